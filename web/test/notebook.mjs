#!/usr/bin/env node
// Drives a notebook, converted to HTML, in headless Chromium: each page of memtrace in it renders in its frame, shows
// its figures, and cannot reach the notebook. Exit 0: all of it is right. 1: something is not. 2: the check could not
// run.
import { readFileSync } from 'node:fs';
import { bundled } from './bundle.mjs';
import { commandLine, harness } from './harness.mjs';

const USAGE = `usage: node notebook.mjs PAGE [options]
  --pages FILE      JSON: for each frame its title, and the output of memtrace lines --json if it is a line table
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: file, opt } = commandLine(USAGE, { pages: { type: 'string' } }, { files: ['pages'] });
const format = await bundled('format.ts');
const expected = opt.pages ? JSON.parse(readFileSync(opt.pages, 'utf8')) : null;

// Scripts of nbconvert's template, which a notebook needs for formulas and widgets only.
const isLibrary = url => new URL(url).host === 'cdnjs.cloudflare.com';
const { page, open, note, check, equal, picture, drawn, end } = await harness({
  file,
  executable: opt.chromium,
  out: opt.out,
  height: 1000,
  mayRequest: isLibrary,
});
await page.route(isLibrary, route => route.fulfill({ contentType: 'text/javascript', body: '' }));
let loadMs = 0;
try {
  loadMs = await open(() => document.querySelector('iframe.memtrace') !== null);
  // What a cell shows only on demand.
  for (const summary of await page.locator('details:has(iframe.memtrace) > summary').all()) await summary.click();
  // Chromium draws no frame that is outside of the window.
  await page.setViewportSize({ width: 1400, height: await page.evaluate(() => document.documentElement.scrollHeight) });
  const frames = await page.locator('iframe.memtrace').all();
  check('frames', frames.length > 0, 'none');
  if (expected)
    equal(
      'titles',
      await Promise.all(frames.map(frame => frame.getAttribute('title'))),
      expected.map(one => one.title),
    );
  for (const [at, frame] of frames.entries()) await frameOf(frame, expected?.[at]);
  await picture('notebook');
} catch (e) {
  note('harness', e.stack ?? e.message);
}
await end({ load: { ms: loadMs } });

/**
 * One frame: its page is ready and visible, its scripts cannot reach the notebook, and its figures are the expected
 * ones.
 */
async function frameOf(element, expectation) {
  const frame = await (await element.elementHandle()).contentFrame();
  await frame.waitForFunction(
    () => window.memtraceLines || window.memtraceReport || document.querySelector('main strong.bad'),
    null,
    { timeout: 60_000 },
  );
  await drawn();
  const title = await element.getAttribute('title');
  const reach = await frame.evaluate(() => {
    try {
      return parent.document.title;
    } catch (e) {
      return e.name;
    }
  });
  equal(`${title}: access to the notebook`, reach, 'SecurityError');
  const isLines = await frame.evaluate(() => window.memtraceLines !== undefined);
  // The timeline of a report takes its width when it is drawn next, which may be later.
  const wide = await frame.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (isLines) check(`${title}: width`, wide <= 0, `${wide} pixels wider than its frame`);
  if (expectation) equal(`${title}: kind`, isLines, expectation.lines !== null);
  await (isLines ? lineTable(frame, title, expectation?.lines) : report(frame, title));
}

async function lineTable(frame, title, expectation) {
  const data = await frame.evaluate(() => window.memtraceLines.report);
  if (expectation) equal(`${title}: the data`, data, expectation);
  check(`${title}: functions`, data.functions.length > 0, 'none');
  check(
    `${title}: sources`,
    data.functions.every(one => one.has_source),
    JSON.stringify(data.functions.map(one => [one.filename, one.has_source])),
  );
  // The lines come first: they are what the cell asked for.
  const top = selector => frame.locator(selector).evaluate(one => one.getBoundingClientRect().top);
  check(`${title}: order`, (await top('#source')) < (await top('#functions')), 'the functions come first');
  const shown = await frame.locator('#source details').evaluateAll(all =>
    all.map(one => {
      const heads = [...one.querySelectorAll('th')].map(head => head.textContent);
      return [...one.querySelectorAll('tbody tr:not(.gap)')].map(row =>
        Object.fromEntries(heads.map((head, column) => [head, row.cells[column].textContent])),
      );
    }),
  );
  for (const [at, one] of data.functions.entries()) {
    for (const [i, line] of one.lines.entries()) {
      const cells = shown[at][i];
      equal(`${title}: line`, cells.Line, String(line.line));
      equal(`${title}: source`, cells.Source.trim(), line.text.trim());
      if (!line.figures) continue;
      equal(`${title}: net of line ${line.line}`, cells.Net, format.signedSize(line.figures.net_bytes));
      equal(`${title}: allocated of line ${line.line}`, cells.Allocated, format.size(line.figures.allocated_bytes));
    }
  }
  const first = frame.locator('#source tbody tr').first();
  check(`${title}: first line`, await first.isVisible(), 'it is not visible');
  await scrolls(frame, title);
}

async function report(frame, title) {
  const { peak, canvas } = await frame.evaluate(() => ({
    peak: window.memtraceReport.summary.processes[0].devices[0].highest.allocated_bytes,
    canvas: document.querySelector('canvas')?.width ?? 0,
  }));
  check(`${title}: timeline`, canvas > 0, 'no canvas');
  const verdict = await frame.textContent('#verdict');
  check(`${title}: verdict`, verdict.includes(format.size(peak)), verdict);
  check(`${title}: so far`, verdict.toLowerCase().includes('the recording so far'), verdict);
  const files = await frame.locator('#lines details > summary').allTextContents();
  check(`${title}: files`, files.length > 0, 'none');
  equal(
    `${title}: files without source`,
    files.filter(text => text.includes('the source is not in the page')),
    [],
  );
  await scrolls(frame, title);
}

/** A link to a part of the page scrolls the frame, and does not load the notebook into it. */
async function scrolls(frame, title) {
  const before = page.url();
  // Not the pointer: Playwright waits for pictures of the frame, and Chromium draws frames of other origins rarely.
  await frame.evaluate(() => [...document.querySelectorAll('nav a')].at(-1).click());
  await drawn();
  equal(`${title}: address`, [page.url(), frame.url()], [before, 'about:srcdoc']);
  check(
    `${title}: page`,
    await frame.evaluate(() => Boolean(window.memtraceLines ?? window.memtraceReport)),
    'another page',
  );
}
