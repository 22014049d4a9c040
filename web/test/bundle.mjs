// Builds a module of src, so that a test can import it.
import { mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'vite';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');

/** The exports of a module below src. */
export async function bundled(path) {
  const outDir = mkdtempSync(join(tmpdir(), 'memtrace-web-'));
  const lib = { entry: join(root, 'src', path), formats: ['es'], fileName: () => 'module.mjs' };
  await build({ root, configFile: false, logLevel: 'silent', build: { target: 'es2022', minify: false, outDir, lib } });
  return import(pathToFileURL(join(outDir, 'module.mjs')).href);
}
