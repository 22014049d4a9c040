#!/usr/bin/env node
// Measures pages in headless Chromium: size, time to the first picture, frames per second while panning, and time to draw a frame.
import { statSync } from 'node:fs';
import { basename, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';

const PAN_MS = 4000;
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox'] });
console.log('page                            size      points  first picture  frames/s panning  median and worst frame');
for (const file of process.argv.slice(2)) {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  const start = performance.now();
  await page.goto(pathToFileURL(resolve(file)).href);
  await page.waitForFunction(() => window.memtraceReport?.timeline?.frames > 0, null, { timeout: 120_000 });
  const load = performance.now() - start;
  const pan = await page.evaluate(async limit => {
    const { timeline } = window.memtraceReport;
    const { begin, end, position } = timeline.axis;
    const length = (end - begin) / 4;
    const times = [];
    const first = timeline.frames;
    const began = performance.now();
    for (let i = 0; performance.now() - began < limit; i++) {
      const from = begin + ((i % 120) / 120) * (end - begin - length);
      timeline.zoomTo(from, from + length);
      await new Promise(done => requestAnimationFrame(done));
      times.push(timeline.drawMs);
    }
    times.sort((a, b) => a - b);
    return {
      points: position.length,
      rate: (1000 * (timeline.frames - first)) / (performance.now() - began),
      median: times[times.length >> 1],
      worst: times.at(-1),
    };
  }, PAN_MS);
  const row = [
    basename(file).padEnd(28),
    `${(statSync(file).size / 2 ** 20).toFixed(2)} MiB`.padStart(10),
    String(pan.points).padStart(10),
    `${load.toFixed(0)} ms`.padStart(14),
    pan.rate.toFixed(0).padStart(17),
    `${pan.median.toFixed(1)} ms, ${pan.worst.toFixed(1)} ms`.padStart(22),
  ];
  console.log(row.join(' '));
  await page.close();
}
await browser.close();
