#!/usr/bin/env node
// Measures pages in headless Chromium: size, time to the first picture, frames per second while panning, and time to
// draw a frame. With --viewer, also PyTorch's own viewer with a snapshot: see tests/vizcheck.
import { statSync } from 'node:fs';
import { basename, dirname, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';

const USAGE = `usage: node bench.mjs [PAGE...] [--viewer MEMORYVIZ.js --snapshot FILE] [--json]`;
const PAN_MS = 4000;
/** How long the viewer may take, in milliseconds. */
const LIMIT_MS = 300_000;

const { values: opt, positionals: pages } = parseArgs({
  allowPositionals: true,
  options: { viewer: { type: 'string' }, snapshot: { type: 'string' }, json: { type: 'boolean', default: false } },
});
if (!opt.viewer !== !opt.snapshot || (pages.length === 0 && !opt.viewer)) {
  console.error(USAGE);
  process.exit(2);
}

/** Runs inside our page: zooms to a quarter of the run and moves that window for `limit` milliseconds. */
async function panOurs(limit) {
  const { timeline } = window.memtraceReport;
  const { begin, end, position } = timeline.axis;
  const length = (end - begin) / 4;
  const times = [];
  const first = timeline.picture.frames;
  const began = performance.now();
  for (let i = 0; performance.now() - began < limit; i++) {
    const from = begin + ((i % 120) / 120) * (end - begin - length);
    timeline.zoomTo(from, from + length);
    await new Promise(done => requestAnimationFrame(done));
    times.push(timeline.picture.drawMs);
  }
  times.sort((a, b) => a - b);
  return {
    points: position.length,
    rate: (1000 * (timeline.picture.frames - first)) / (performance.now() - began),
    median: times[times.length >> 1],
    worst: times.at(-1),
  };
}

/**
 * Runs inside PyTorch's viewer: turns the wheel over the plot, in and out, and waits for each frame, for `limit`
 * milliseconds.
 */
async function panViewer(limit) {
  const polygon = document.querySelector('svg polygon');
  const svg = polygon.closest('svg');
  const box = svg.getBoundingClientRect();
  const began = performance.now();
  let frames = 0;
  while (performance.now() - began < limit || frames === 0) {
    const turn = {
      bubbles: true,
      cancelable: true,
      clientX: box.left + box.width / 2,
      clientY: box.top + box.height / 2,
      deltaY: frames % 8 < 4 ? -100 : 100,
    };
    polygon.dispatchEvent(new WheelEvent('wheel', turn));
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    frames += 1;
  }
  return { shapes: svg.querySelectorAll('polygon').length, rate: (1000 * frames) / (performance.now() - began) };
}

async function ours(browser, file) {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  const start = performance.now();
  await page.goto(pathToFileURL(resolve(file)).href);
  await page.waitForFunction(() => window.memtraceReport?.timeline?.picture.frames > 0, null, { timeout: 120_000 });
  const first = performance.now() - start;
  const pan = await page.evaluate(panOurs, PAN_MS);
  await page.close();
  return { name: basename(file), bytes: statSync(file).size, first_picture_ms: first, frames_per_s: pan.rate, ...pan };
}

async function viewers(browser, viewer, snapshot) {
  const { serve } = await import(resolve(dirname(fileURLToPath(import.meta.url)), '../../tests/vizcheck/server.mjs'));
  const server = await serve(resolve(viewer), resolve(snapshot));
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  page.setDefaultTimeout(LIMIT_MS);
  const row = { name: 'MemoryViz.js', bytes: statSync(snapshot).size };
  try {
    await page.goto(server.url);
    await page.waitForFunction(() => window.viewerReady === true);
    const start = performance.now();
    await page.evaluate(async name => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([await (await fetch('/snapshot')).blob()], name));
      document.body.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }));
    }, basename(snapshot));
    await page.waitForFunction(() =>
      [...document.querySelectorAll('svg polygon')].some(one => one.getBoundingClientRect().width > 0),
    );
    row.first_picture_ms = performance.now() - start;
    const pan = await page.evaluate(panViewer, PAN_MS);
    Object.assign(row, { frames_per_s: pan.rate, points: pan.shapes });
  } catch (error) {
    row.error = String(error.message).split('\n')[0];
  }
  await page.close().catch(() => {});
  server.close();
  return row;
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-dev-shm-usage'],
});
const rows = [];
for (const file of pages) rows.push(await ours(browser, file));
if (opt.viewer) rows.push(await viewers(browser, opt.viewer, opt.snapshot));
await browser.close();
if (opt.json) {
  console.log(JSON.stringify(rows));
} else {
  console.log(
    'page                            size      points  first picture  frames/s panning  median and worst frame',
  );
  for (const row of rows) {
    const cells = [
      row.name.padEnd(28),
      `${(row.bytes / 2 ** 20).toFixed(2)} MiB`.padStart(10),
      String(row.points ?? '').padStart(10),
      (row.error ?? `${row.first_picture_ms.toFixed(0)} ms`).padStart(14),
      row.frames_per_s === undefined ? '' : row.frames_per_s.toFixed(1).padStart(17),
      row.median === undefined ? '' : `${row.median.toFixed(1)} ms, ${row.worst.toFixed(1)} ms`.padStart(22),
    ];
    console.log(cells.join(' ').trimEnd());
  }
}
