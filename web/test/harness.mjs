/**
 * What the drivers of the pages share: checks, a page in headless Chromium whose errors count, and the last checks of
 * every page.
 */
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';

/** Ends the program: the check could not run. */
export function fail(message) {
  console.error(message);
  process.exit(2);
}

/**
 * Parses the command line of a driver: one path and `options`, beside --out and --chromium. The `required` options must
 * be there. The path and the files that the options named in `files` have must exist.
 */
export function commandLine(usage, options, { required = [], files = [] } = {}) {
  let args;
  try {
    args = parseArgs({
      allowPositionals: true,
      options: {
        ...options,
        out: { type: 'string' },
        chromium: { type: 'string', default: process.env.CHROMIUM ?? '/usr/bin/chromium' },
      },
    });
  } catch (e) {
    fail(`${e.message}\n${usage}`);
  }
  const { values: opt, positionals } = args;
  if (positionals.length !== 1 || required.some(name => opt[name] === undefined)) fail(usage);
  const [path] = positionals;
  for (const needed of [path, opt.chromium, ...files.flatMap(name => opt[name] ?? [])])
    if (!existsSync(needed)) fail(`no such file: ${needed}`);
  if (opt.out) mkdirSync(opt.out, { recursive: true });
  return { path, opt };
}

/**
 * Opens a browser for the page `file`, or for the one that a server has at `address`. Pictures go to the folder `out`,
 * if there is one. `mayRequest` tells whether the page may load a URL.
 */
export async function harness({ file, address, executable, out, height, mayRequest = () => false }) {
  const errors = [];
  const note = (kind, message) => errors.push({ where: 'page', kind, message: message.slice(0, 600) });
  let checks = 0;
  const check = (kind, condition, message) => {
    checks += 1;
    if (!condition) note(kind, message);
  };
  const equal = (kind, found, expected) =>
    check(
      kind,
      JSON.stringify(found) === JSON.stringify(expected),
      `${JSON.stringify(found)} instead of ${JSON.stringify(expected)}`,
    );

  const browser = await chromium.launch({ executablePath: executable, args: ['--no-sandbox'] });
  const page = await browser.newPage({ viewport: { width: 1400, height }, colorScheme: 'light' });
  const url = address ?? pathToFileURL(file).href;
  page.on('console', m => ['error', 'warning'].includes(m.type()) && note('console', m.text()));
  page.on('pageerror', e => note('script', e.message));
  page.on('dialog', d => {
    note('dialog', d.message());
    d.dismiss();
  });
  page.on('request', r => r.url() !== url && !mayRequest(r.url()) && note('request', r.url()));

  /** Loads the page and waits until `isReady` is true in it. Returns how long that took, in milliseconds. */
  const open = async isReady => {
    const start = Date.now();
    await page.goto(url);
    await page.waitForFunction(isReady, null, { timeout: 60_000 });
    return Date.now() - start;
  };

  const picture = async (name, fullPage = true) => {
    if (out) await page.screenshot({ path: join(out, `${name}.png`), fullPage });
  };

  /** Waits until the page has drawn. */
  const drawn = () =>
    page.evaluate(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))));

  /** Both themes, a phone, a wall, and paper. */
  const everywhere = async () => {
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await ground();
    await page.locator('.theme').click();
    check('theme', (await ground()) !== light, light);
    await drawn();
    await picture('dark');
    await page.setViewportSize({ width: 390, height: 800 });
    await drawn();
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    check('phone', wide <= 0, `${wide} pixels wider than the window`);
    await picture('phone');
    await page.setViewportSize({ width: 2560, height: 1400 });
    await drawn();
    await picture('wall', false);
    await page.emulateMedia({ media: 'print' });
    check('paper', await page.locator('#verdict').isVisible(), 'no verdict');
  };

  /** Closes the browser, prints the result with what else there is to say, and sets the exit status. */
  const end = async more => {
    await browser.close();
    console.log(JSON.stringify({ ok: errors.length === 0, checks, ...more, errors }, null, 2));
    process.exitCode = errors.length === 0 ? 0 : 1;
  };

  return { page, open, note, check, equal, picture, drawn, everywhere, end };
}
