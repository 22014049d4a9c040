#!/usr/bin/env node
// Opens a page that memtrace wrote (report.html) from disk in headless Chromium, without a network and with scripts
// allowed, and prints its content. Exit 0: title, headline and pictures exist, nothing was loaded and no error
// occurred. 1: one of these fails. 2: the check could not run.
import { existsSync, mkdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';

const USAGE = `usage: node page.mjs PAGE [options]
  --headline TEXT   what the headline must contain
  --out DIR         where to put page.png
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

function fail(message) {
  console.error(message);
  process.exit(2);
}

let args;
try {
  args = parseArgs({
    allowPositionals: true,
    options: {
      headline: { type: 'string', default: 'memtrace' },
      out: { type: 'string' },
      chromium: { type: 'string', default: process.env.CHROMIUM ?? '/usr/bin/chromium' },
    },
  });
} catch (e) {
  fail(`${e.message}\n${USAGE}`);
}
const opt = args.values;
if (args.positionals.length !== 1) fail(USAGE);
const file = resolve(args.positionals[0]);
for (const needed of [file, opt.chromium]) if (!existsSync(needed)) fail(`no such file: ${needed}`);

/** Runs inside the page: collects what is visible. */
function inspect() {
  const area = el => {
    const r = el.getBoundingClientRect();
    return r.width * r.height;
  };
  const drawn = tag => [...document.querySelectorAll(`svg ${tag}`)].filter(el => area(el) > 0);
  const boxes = drawn('rect');
  const inside = el => {
    const r = el.getBoundingClientRect();
    const s = el.ownerSVGElement.getBoundingClientRect();
    return r.left >= s.left - 1 && r.right <= s.right + 1 && r.top >= s.top - 1 && r.bottom <= s.bottom + 1;
  };
  return {
    title: document.title,
    headline: document.querySelector('h1')?.innerText ?? '',
    answer: document.querySelector('#answer')?.innerText ?? '',
    svg: document.querySelectorAll('svg').length,
    rects: boxes.length,
    outside: boxes.filter(el => !inside(el)).length,
    areas: drawn('path').length,
    titles: boxes.filter(el => el.parentNode.querySelector('title')?.textContent).length,
    sections: document.querySelectorAll('details').length,
    scripts: document.scripts.length,
    wider: document.documentElement.scrollWidth > innerWidth,
  };
}

const errors = [];
const note = (kind, message) => errors.push({ where: 'page', kind, message });
const browser = await chromium.launch({ executablePath: opt.chromium, args: ['--no-sandbox'] });
const page = await browser.newPage({ viewport: { width: 1300, height: 900 } });
const url = pathToFileURL(file).href;
page.on('console', m => ['error', 'warning'].includes(m.type()) && note('console', m.text()));
page.on('pageerror', e => note('script', e.message));
page.on('dialog', d => {
  note('dialog', d.message());
  d.dismiss();
});
page.on('request', r => r.url() !== url && note('request', r.url()));
let seen = {};
const start = Date.now();
try {
  await page.goto(url);
  seen = await page.evaluate(inspect);
  if (!seen.title.startsWith('memtrace: ')) note('title', seen.title);
  if (!seen.headline.includes(opt.headline)) note('headline', `${seen.headline}: no ${opt.headline}`);
  if (seen.answer.trim() === '') note('answer', 'it is empty');
  if (seen.rects === 0 || seen.areas === 0) note('pictures', `${seen.rects} boxes, ${seen.areas} areas are drawn`);
  if (seen.titles < seen.rects) note('pictures', `${seen.rects - seen.titles} boxes say nothing under the pointer`);
  if (seen.outside > 0) note('pictures', `${seen.outside} boxes lie outside of their picture`);
  if (seen.scripts > 0) note('scripts', `${seen.scripts} on the page`);
  if (seen.wider) note('layout', 'the page is wider than its window');
  if (opt.out) {
    mkdirSync(opt.out, { recursive: true });
    await page.screenshot({ path: join(opt.out, 'page.png'), fullPage: true });
  }
} catch (e) {
  note('harness', e.message);
}
await browser.close();
const ok = errors.length === 0;
console.log(JSON.stringify({ ok, load: { ms: Date.now() - start }, ...seen, errors }, null, 2));
process.exitCode = ok ? 0 : 1;
