// One script and one style sheet without imports: a page has both inline, with their hashes in its policy.
import { defineConfig } from 'vite';

export default defineConfig({
  build: {
    target: 'es2022',
    outDir: 'dist',
    emptyOutDir: true,
    modulePreload: false,
    lib: {
      entry: 'src/main.ts',
      formats: ['iife'],
      name: 'memtrace',
      fileName: () => 'report.js',
      cssFileName: 'report',
    },
  },
});
