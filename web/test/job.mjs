#!/usr/bin/env node
// Drives the page of a job in headless Chromium: every figure, both themes, a phone's width. Compares what is on the screen with the
// JSON of `memtrace report DIR`. Exit 0: all of it is right. 1: something is not. 2: the check could not run.
import { readFileSync } from 'node:fs';
import { bundled } from './bundle.mjs';
import { commandLine, harness } from './harness.mjs';

const USAGE = `usage: node job.mjs PAGE --job FILE [options]
  --job FILE        the output of memtrace report DIR --json
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: file, opt } = commandLine(USAGE, { job: { type: 'string' } }, { required: ['job'], files: ['job'] });
const format = await bundled('format.ts');
const job = JSON.parse(readFileSync(opt.job, 'utf8'));

const { page, open, note, check, equal, picture, everywhere, end } = await harness({ file, executable: opt.chromium, out: opt.out, height: 1000 });
let loadMs = 0;
try {
  loadMs = await open(() => window.memtraceJob || document.querySelector('main strong.bad'));
  equal('the data', await page.evaluate(() => window.memtraceJob?.job ?? null), job);
  await picture('light');
  await ranks();
  await others();
  await everywhere();
} catch (e) {
  note('harness', e.stack ?? e.message);
}
await end({ load: { ms: loadMs } });

/** Every cell of every rank, in the order of the JSON. */
async function ranks() {
  const shown = await page.locator('#ranks table').evaluateAll(tables =>
    tables.map(table => ({ heads: [...table.querySelectorAll('th')].map(one => one.textContent), rows: [...table.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent)) })),
  );
  equal('tables of ranks', shown.length, job.ranks.length > 0 ? 1 : 0);
  if (shown.length === 0) return;
  const [{ heads, rows }] = shown;
  equal('rows', rows.length, job.ranks.length);
  job.ranks.forEach((rank, at) => {
    const cells = Object.fromEntries(heads.map((head, column) => [head, rows[at][column]]));
    equal('rank', Number.parseInt(cells.Rank, 10), rank.rank);
    equal(`peak of rank ${rank.rank}`, cells.Peak, format.size(rank.peak_bytes));
    equal(`reserved bytes of rank ${rank.rank}`, cells.Reserved, format.size(rank.reserved_bytes));
    for (const { phase, peak_bytes } of rank.phases.filter(one => one.peak_bytes > 0)) equal(`${phase} of rank ${rank.rank}`, cells[format.capital(phase)], format.size(peak_bytes));
    equal(`errors of rank ${rank.rank}`, cells.OOM, rank.oom_count > 0 ? format.count(rank.oom_count) : '');
    equal(`host of rank ${rank.rank}`, cells.Host, rank.host === '' ? 'host unknown' : rank.host);
  });
}

/** The comparison, processes without a rank, and notes. */
async function others() {
  const comparison = job.worst_against_median;
  equal('comparisons', await page.locator('#difference').count(), comparison ? 1 : 0);
  if (comparison) {
    const lines = comparison.by_line.filter(one => one.difference_bytes !== 0);
    const shown = await page.locator('#difference li').allTextContents();
    equal('lines of the comparison', shown.length, Math.min(lines.length, 20));
    const largest = Math.max(...lines.map(one => Math.abs(one.difference_bytes)));
    check('largest difference first', shown.length === 0 || lines.some(one => Math.abs(one.difference_bytes) === largest && shown[0].startsWith(format.signedSize(one.difference_bytes))), shown[0]);
  }
  const peaks = await page.locator('#processes tbody tr td:first-child').allTextContents();
  equal('processes without a rank', peaks, job.other_processes.map(one => format.size(one.peak_bytes)));
  const notes = (await page.locator('#notes').count()) > 0 ? await page.textContent('#notes') : '';
  for (const text of job.notices) check('notice', notes.includes(text), text);
  check('missing ranks', job.missing_ranks_count === 0 || notes.includes('without a recording'), notes);
}
