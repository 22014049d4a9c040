#!/usr/bin/env node
// Loads a snapshot in PyTorch's own MemoryViz.js in headless Chromium, visits
// every view, and reports what was drawn. Exit 0: every view drew something
// and the page raised no error. 1: it did not. 2: the check could not run.
import { existsSync, mkdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { createHash } from 'node:crypto';
import { homedir } from 'node:os';
import { basename, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import { serve } from './server.mjs';

const USAGE = `usage: node check.mjs SNAPSHOT --out DIR [options]
  --viewer FILE      the MemoryViz.js to use (its relative imports lie beside it)
  --torch PATH       a torch package or a PyTorch source tree that contains it
                     (default: $VIZCHECK_VIEWER, then where get-viewer.sh puts it)
  --device N|all     which GPUs to look at (default: the one the viewer opens)
  --drop             load by drag and drop even where the page has a file input
  --require-frames   a view whose hovered element shows no stack frame fails
  --require-category NAME  (may be repeated) the timeline must colour blocks by this
                     category, and have it in its legend
  --timeout SECONDS  for each wait (default 60)
  --chromium PATH    (default: $CHROMIUM, then /usr/bin/chromium)`;

function fail(message) {
  console.error(message);
  process.exit(2);
}

function findViewer({ viewer, torch }) {
  if (viewer) return resolve(viewer);
  if (torch) {
    const tails = ['utils/viz/MemoryViz.js', 'torch/utils/viz/MemoryViz.js', 'MemoryViz.js'];
    const found = tails.map(t => resolve(torch, t)).find(f => existsSync(f));
    return found ?? fail(`no MemoryViz.js under ${torch} (PyPI's wheels leave it out): see README.md`);
  }
  const { VIZCHECK_VIEWER, MEMTRACE_CACHE, XDG_CACHE_HOME } = process.env;
  const cache = MEMTRACE_CACHE || join(XDG_CACHE_HOME || join(homedir(), '.cache'), 'memtrace');
  return VIZCHECK_VIEWER || join(cache, 'viewer/MemoryViz.js');
}

let args;
try {
  args = parseArgs({
    allowPositionals: true,
    options: {
      out: { type: 'string' },
      viewer: { type: 'string' },
      torch: { type: 'string' },
      device: { type: 'string' },
      drop: { type: 'boolean', default: false },
      'require-frames': { type: 'boolean', default: false },
      'require-category': { type: 'string', multiple: true, default: [] },
      timeout: { type: 'string', default: '60' },
      chromium: { type: 'string', default: process.env.CHROMIUM ?? '/usr/bin/chromium' },
    },
  });
} catch (e) {
  fail(`${e.message}\n${USAGE}`);
}
const opt = args.values;
const [snapshot] = args.positionals;
if (args.positionals.length !== 1 || !opt.out) fail(USAGE);
const viewer = findViewer(opt);
for (const file of [snapshot, viewer, opt.chromium]) if (!existsSync(file)) fail(`no such file: ${file}`);
const TIMEOUT = Number(opt.timeout) * 1000;
mkdirSync(opt.out, { recursive: true });

// ---- run inside the page ------------------------------------------------

/** The visible view: the only displayed top-level div with a view's content. */
function activeView() {
  return [...document.querySelectorAll('body > div')]
    .filter(d => d.offsetParent !== null || getComputedStyle(d).display !== 'none')
    .find(d => d.querySelector('svg, pre, p'));
}

/** The elements of the active view, and the screen positions of its main shapes. */
function inspectView() {
  const view = activeView();
  if (!view) return null;
  const count = tag => view.querySelectorAll(tag).length;
  const svg = view.querySelector('svg');
  const area = el => {
    const r = el.getBoundingClientRect();
    return r.width * r.height;
  };
  // Data shapes: the timeline's polygons, or the state view's rects. The
  // plot's white background and clip rect are not data.
  let shapes = svg ? [...svg.querySelectorAll('polygon')] : [];
  if (svg && shapes.length === 0 && !svg.querySelector('clipPath')) shapes = [...svg.querySelectorAll('rect')];
  const drawn = shapes.filter(s => area(s) > 0);

  // Sample the plot for the topmost shape that covers most, preferring shapes that stand for a block. Remember a point
  // well inside it.
  const hits = new Map();
  const box = svg?.getBoundingClientRect();
  for (let i = 0; svg && i < 60 * 60; i++) {
    const x = box.left + ((i % 60) + 0.5) * (box.width / 60);
    const y = box.top + (Math.floor(i / 60) + 0.5) * (box.height / 60);
    const el = document.elementFromPoint(x, y);
    if (!shapes.includes(el)) continue;
    if (!hits.has(el)) hits.set(el, []);
    hits.get(el).push([x, y]);
  }
  const isBlock = el => {
    const d = el.__data__ ?? {};
    return el.tagName === 'polygon' ? typeof d.elem === 'number' : el.getAttribute('fill') !== 'white';
  };
  const [best] = [...hits.entries()].sort(
    ([a, p], [b, q]) => isBlock(b) - isBlock(a) || q.length - p.length,
  );
  const texts = [...view.querySelectorAll('svg text')].map(t => t.textContent);
  // The legend's swatches are bound to the category names. Count the shapes of each color.
  const swatches = svg ? [...svg.querySelectorAll('rect')].filter(r => typeof r.__data__ === 'string') : [];
  const coloured = fill => drawn.filter(s => s.getAttribute('fill') === fill).length;
  return {
    elements: Object.fromEntries(['polygon', 'rect', 'path', 'text', 'pre'].map(t => [t, count(t)])),
    shapes: shapes.length,
    drawn: drawn.length,
    distinct_hit: hits.size,
    labels: texts.slice(0, 40),
    legend: Object.fromEntries(swatches.map(r => [r.__data__, coloured(r.getAttribute('fill'))])),
    plot: box && { x: box.x, y: box.y, width: box.width, height: box.height },
    point: best && best[1][Math.floor(best[1].length / 2)],
    text: svg ? undefined : view.textContent,
  };
}

/** The stack panel: the view's last pre that is not an event list entry. */
function stackText() {
  const view = activeView();
  const grid = [...view.querySelectorAll('div')].find(d => getComputedStyle(d).display === 'grid');
  return [...(grid ?? view).querySelectorAll(':scope > pre, :scope > div > pre:only-child')].at(-1)?.textContent ?? '';
}

/** The share of a screenshot's pixels that are colored (not white, black, gray). */
async function colouredShare(png) {
  const bytes = Uint8Array.from(atob(png), c => c.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes]));
  const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d');
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  let n = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b] = [data[i], data[i + 1], data[i + 2]];
    if (Math.max(r, g, b) - Math.min(r, g, b) >= 10) n++;
  }
  return n / (data.length / 4);
}

// ---- drive the page -----------------------------------------------------

const errors = [];
const server = await serve(viewer, resolve(snapshot)).catch(e => fail(e.message));
const browser = await chromium
  .launch({ executablePath: opt.chromium, headless: true, args: ['--no-sandbox', '--disable-dev-shm-usage'] })
  .catch(e => fail(e.message));
const context = await browser.newContext({ viewport: { width: 1400, height: 900 }, timezoneId: 'UTC' });
const page = await context.newPage();
page.setDefaultTimeout(TIMEOUT);
let where = 'start';
const note = (kind, message) => errors.push({ where, kind, message: String(message).slice(0, 600) });
page.on('pageerror', e => note('exception', e.stack ?? e.message));
page.on('console', m => m.type() === 'error' && note('console', m.text()));
page.on('crash', () => note('crash', 'the page crashed'));
page.on('requestfailed', r => note('network', `${r.url()}: ${r.failure()?.errorText}`));
await context.route(u => !u.href.startsWith(server.url), (route, request) => {
  if (!/^(blob|data|about):/.test(request.url())) note('network', `tried to reach ${request.url()}`);
  return route.abort();
});
await page.addInitScript(
  `${activeView}\n${inspectView}\n${stackText}\nObject.assign(globalThis, { activeView, inspectView, stackText });`,
);

const selects = page.locator('select'); // snapshot, view, GPU: in this order
const options = i => selects.nth(i).locator('option').allTextContents();
const summary = { ok: false };

async function settle() {
  // Two frames for the view's own requestAnimationFrame, then quiet.
  await page.evaluate(() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(r, 50)))));
}

async function load() {
  const input = page.locator('input[type=file]');
  const drop = opt.drop || (await input.count()) === 0;
  const before = errors.length;
  const start = Date.now();
  if (!drop) {
    await input.setInputFiles(resolve(snapshot));
  } else {
    await page.evaluate(async name => {
      const blob = await (await fetch('/snapshot')).blob();
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([blob], name));
      document.body.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }));
    }, basename(snapshot));
  }
  const ready = page.waitForFunction(() => document.querySelectorAll('select')[2].options.length > 0);
  const broken = new Promise((_, reject) => {
    const thrown = () => errors.slice(before).some(e => ['exception', 'crash'].includes(e.kind));
    const timer = setInterval(() => {
      if (thrown()) reject(new Error('the viewer could not load the snapshot'));
    }, 100);
    ready.catch(() => {}).finally(() => clearInterval(timer));
  });
  await Promise.race([ready, broken]);
  await settle();
  return { via: drop ? 'drop' : 'file input', ms: Date.now() - start };
}

async function pick(i, label) {
  if ((await selects.nth(i).evaluate(s => s.selectedOptions[0]?.textContent)) !== label) {
    await selects.nth(i).selectOption({ label });
  }
  await settle();
}

async function checkView(name, device, file) {
  where = `${name}, device ${device}`;
  await page.mouse.move(0, 0); // hover nothing
  const start = Date.now();
  await pick(1, name);
  let seen = await page.evaluate(() => inspectView());
  const view = { name, device, ms: Date.now() - start, png: file };
  const problem = message => note('view', message);
  if (!seen) {
    problem('nothing on show');
    return view;
  }

  // The state view's event list (view > grid > list > entry).
  const events = page
    .locator('body > div:visible > div > div > pre')
    .filter({ hasText: /^(alloc|free|segment|OOM|snapshot|annotate)/ });
  view.events = await events.count();
  // Going to the first event replays the whole trace backward: a trace that disagrees with the final segments throws
  // here. The middle event is the last stop, because at the end everything may be free.
  const stops = [view.events - 1, 0, view.events >> 1];
  for (const i of [...new Set(stops)].filter(i => i >= 0 && i < view.events)) {
    await events.nth(i).scrollIntoViewIfNeeded();
    await events.nth(i).click();
    await settle();
    (view.event_stacks ??= []).push((await page.evaluate(() => stackText())).slice(0, 300));
  }
  if (view.events > 0) seen = await page.evaluate(() => inspectView());
  Object.assign(view, seen);

  if (seen.text !== undefined) {
    view.text = seen.text.slice(0, 400);
    if (/No allocator settings found/.test(seen.text) || !/[{]/.test(seen.text)) problem('no settings shown');
  } else {
    if (seen.drawn === 0) problem(`empty: ${seen.shapes} shapes, none with an area`);
    if (seen.distinct_hit === 0) problem('no shape is visible in the plot');
    if (name === 'Active Memory Timeline') {
      for (const category of opt['require-category']) {
        if (!seen.legend[category]) problem(`nothing is coloured as ${category}: ${JSON.stringify(seen.legend)}`);
      }
    }
  }

  const { point } = seen;
  if (point) {
    await page.mouse.move(...point);
    await settle();
    await page.mouse.down();
    await page.mouse.up();
    await settle();
    const stack = await page.evaluate(() => stackText());
    view.stack = stack.slice(0, 1200);
    view.frames = stack.split('\n').filter(l => /^\S.*:\d+:[^\d\s]/.test(l)).length;
    if (stack === '' || stack === 'none') problem('hovering a shape shows no text');
    else if (opt['require-frames'] && view.frames === 0) problem('the hovered shape has no stack frame');
  }
  const png = await page.screenshot({ path: join(opt.out, file) });
  if (seen.plot) {
    const clip = await page.screenshot({ clip: seen.plot });
    view.coloured = +(await page.evaluate(colouredShare, clip.toString('base64'))).toFixed(4);
    // Chromium draws nothing, without an error, for a polygon with too many points.
    if (seen.elements.polygon > 0 && view.coloured === 0) problem('shapes exist but no pixel is coloured');
  }
  view.png_bytes = png.length;
  delete view.point;
  delete view.plot;
  return view;
}

try {
  summary.viewer = {
    files: server.files.map(f => ({ file: f, sha256: createHash('sha256').update(readFileSync(f)).digest('hex') })),
    imports: server.versions,
  };
  summary.browser = browser.version();
  summary.snapshot = { file: resolve(snapshot), bytes: statSync(snapshot).size };
  where = 'open';
  await page.goto(server.url);
  await page.waitForFunction(() => window.viewerReady === true);
  where = 'load';
  summary.load = await load();
  summary.devices = await options(2);
  const first = await selects.nth(2).evaluate(s => s.selectedOptions[0]?.textContent);
  const devices = opt.device === 'all' ? summary.devices : [opt.device ?? first];
  summary.views = [];
  for (const device of devices) {
    await pick(2, device);
    for (const name of await options(1)) {
      const slug = name.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '');
      const file = `gpu${device}-${String(summary.views.length + 1).padStart(2, '0')}-${slug}.png`;
      summary.views.push(await checkView(name, device, file));
    }
  }
} catch (e) {
  note('harness', e.message);
  await page.screenshot({ path: join(opt.out, 'failure.png'), timeout: 5000 }).catch(() => {});
}
await browser.close();
server.close();
summary.errors = errors;
summary.ok = errors.length === 0;
const text = JSON.stringify(summary, null, 2);
writeFileSync(join(opt.out, 'summary.json'), text + '\n');
console.log(text);
process.exitCode = summary.ok ? 0 : 1;
