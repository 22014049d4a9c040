#!/usr/bin/env node
// Drives the page of a job in headless Chromium: every figure, both themes, a phone's width. Compares what is on the
// screen with the JSON of `memtrace report DIR`. Exit 0: all of it is right. 1: something is not. 2: the check could
// not run.
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

const { page, open, note, check, equal, picture, everywhere, end } = await harness({
  file,
  executable: opt.chromium,
  out: opt.out,
  height: 1000,
});
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

/** Every cell of every rank, in the order of the JSON, and every figure with its field. */
async function ranks() {
  const shown = await page.locator('#ranks table').evaluateAll(tables =>
    tables.map(table => ({
      heads: [...table.querySelectorAll('th')].map(one => one.textContent),
      rows: [...table.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent)),
    })),
  );
  equal('tables of ranks', shown.length, job.ranks.length > 0 ? 1 : 0);
  const figures = await page
    .locator('[data-field]')
    .evaluateAll(all => all.map(one => [one.dataset.field, Number(one.dataset.value), one.textContent]));
  for (const [field, value, text] of figures) {
    const expected = field.split('.').reduce((part, name) => part?.[name], job);
    check(
      `figure ${field}`,
      expected === value && text === format.size(value),
      `${value} as ${text} instead of ${expected}`,
    );
  }
  if (shown.length === 0) return;
  const [{ heads, rows }] = shown;
  equal('rows', rows.length, job.ranks.length);
  job.ranks.forEach((rank, at) => {
    const cells = Object.fromEntries(heads.map((head, column) => [head, rows[at][column]]));
    equal('rank', Number.parseInt(cells.Rank, 10), rank.rank);
    equal(`peak of rank ${rank.rank}`, cells.Peak, format.size(rank.peak_bytes));
    equal(`reserved bytes of rank ${rank.rank}`, cells.Reserved, format.size(rank.reserved_bytes));
    for (const { phase, peak_bytes } of rank.phases.filter(one => one.peak_bytes > 0))
      equal(`${phase} of rank ${rank.rank}`, cells[format.capital(phase)], format.size(peak_bytes));
    equal(`errors of rank ${rank.rank}`, cells.OOM, rank.oom_count > 0 ? format.count(rank.oom_count) : '');
    equal(`GPU of rank ${rank.rank}`, Number.parseInt(cells.GPU, 10), rank.device);
    if (job.hosts.length > 1) check(`host of rank ${rank.rank}`, cells.Rank.split(' ')[1] === rank.host, cells.Rank);
  });
}

/** The comparison, processes that are no ranks, missing ranks, and notes. */
async function others() {
  const { imbalance, worst_against_median: comparison } = job;
  const matters =
    imbalance && imbalance.difference_bytes > 0 && imbalance.difference_bytes * 100 >= imbalance.max_bytes;
  equal('imbalances', await page.locator('[data-field="imbalance.unused_bytes"]').count(), matters ? 1 : 0);
  const lines = await page.locator('#ranks ul.lines li').allTextContents();
  const expected = comparison?.by_line.slice(0, 8) ?? [];
  equal('lines of the comparison', lines.length, expected.length);
  expected.forEach((line, at) =>
    check(
      'line of the comparison',
      lines[at].startsWith(format.signedSize(line.difference_bytes)) && lines[at].endsWith(` at ${line.location}`),
      lines[at],
    ),
  );
  const helpers = job.ranks.flatMap(rank => rank.helpers).concat(job.without_rank);
  equal(
    'processes that are no ranks',
    await page.locator('#ranks ul.helpers .num').count(),
    Math.min(helpers.length, 8),
  );
  const verdict = await page.textContent('#verdict');
  check('missing ranks', job.unrecorded_ranks_count === 0 || verdict.includes('No recording: '), verdict);
  const notes = (await page.locator('#notes').count()) > 0 ? await page.textContent('#notes') : '';
  for (const text of job.notices) check('notice', notes.includes(text), text);
}
