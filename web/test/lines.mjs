#!/usr/bin/env node
// Drives the page of a line table in headless Chromium: every figure, sorting, search, keys, both themes, a phone's
// width, paper. Compares what is on the screen with the JSON of `memtrace lines`. Exit 0: all of it is right. 1:
// something is not. 2: the check could not run.
import { readFileSync } from 'node:fs';
import { bundled } from './bundle.mjs';
import { commandLine, harness } from './harness.mjs';

const USAGE = `usage: node lines.mjs PAGE --lines FILE [options]
  --lines FILE      the output of memtrace lines --json with the same options
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: file, opt } = commandLine(
  USAGE,
  { lines: { type: 'string' } },
  { required: ['lines'], files: ['lines'] },
);
const format = await bundled('format.ts');
const report = JSON.parse(readFileSync(opt.lines, 'utf8'));

const { page, open, note, check, equal, picture, drawn, everywhere, end } = await harness({
  file,
  executable: opt.chromium,
  out: opt.out,
  height: 1000,
});
let loadMs = 0;
try {
  loadMs = await open(() => window.memtraceLines || document.querySelector('main strong.bad'));
  equal('the data', await page.evaluate(() => window.memtraceLines?.report ?? null), report);
  await figures();
  await functions();
  await search();
  await keys();
  await everywhere();
  await onPaper();
} catch (e) {
  note('harness', e.stack ?? e.message);
}
await end({ load: { ms: loadMs } });

/** Every line of every function. */
async function figures() {
  await picture('light');
  const verdict = await page.textContent('#verdict');
  check(
    'verdict',
    verdict.includes(
      `Active peak ${format.size(report.active_peak_bytes)}, reserved peak ${format.size(report.reserved_peak_bytes)}`,
    ),
    verdict,
  );
  for (const text of report.notes) check('note', (await page.textContent('#legend')).includes(text), text);
  const shown = await page.locator('#source details').evaluateAll(all =>
    all.map(one => ({
      title: one.querySelector('summary').textContent,
      heads: [...one.querySelectorAll('th')].map(head => head.textContent),
      rows: [...one.querySelectorAll('tbody tr:not(.gap)')].map(row => ({
        cells: [...row.cells].map(cell => cell.textContent),
        bars: [...row.querySelectorAll('.share')].map(cell => Number.parseFloat(cell.style.backgroundSize)),
      })),
      gaps: one.querySelectorAll('tr.gap').length,
    })),
  );
  equal('functions', shown.length, report.functions.length);
  report.functions.forEach((expected, at) => {
    const { title, heads, rows, gaps } = shown[at];
    check(
      'title',
      title.startsWith(`${expected.function} ${format.size(expected.active_peak_bytes)} active peak`),
      title,
    );
    equal(`lines of ${expected.function}`, rows.length, expected.lines.length);
    const isNew = (line, i) => i > 0 && expected.has_source && expected.lines[i - 1].line + 1 < line.line;
    equal(`gaps of ${expected.function}`, gaps, expected.lines.filter(isNew).length);
    const texts = expected.lines.map(line => line.text ?? '').filter(text => text.trim() !== '');
    const margin = Math.min(...texts.map(text => text.length - text.trimStart().length), Infinity);
    expected.lines.forEach((line, i) => {
      const cells = Object.fromEntries(heads.map((head, column) => [head, rows[i].cells[column]]));
      const { figures } = line;
      const some = bytes => (bytes > 0 ? format.size(bytes) : '');
      const expectedCells = {
        'Active peak': figures ? some(figures.active_peak_bytes) : '',
        'Reserved peak': figures ? some(figures.reserved_peak_bytes) : '',
        Net: figures ? format.signedSize(figures.net_bytes) : '',
        Allocated: figures ? format.size(figures.allocated_bytes) : '',
        Blocks: figures ? format.count(figures.allocations) : '',
        Times: figures?.times > 0 ? format.count(figures.times) : '',
        Line: String(line.line),
        Source: (line.text ?? '').slice(margin),
      };
      for (const [head, text] of Object.entries(expectedCells))
        equal(`${head} of ${expected.filename}:${line.line}`, cells[head], text);
      equal(`backward bytes of line ${line.line}`, cells.Backward ?? '', figures ? some(figures.backward_bytes) : '');
      if (line.largest_tensor)
        check('tensor', cells['Largest tensor'].startsWith(line.largest_tensor.name), cells['Largest tensor']);
      for (const one of (line.custom_categories ?? []).slice(0, 3)) {
        check(
          'custom category',
          cells['Custom categories'].includes(
            `${one.custom_category ?? 'none of the rules'} ${format.size(one.bytes)}`,
          ),
          cells['Custom categories'],
        );
      }
      const share = (bytes, most) => (100 * (bytes ?? 0)) / Math.max(1, most);
      const bars = [
        share(figures?.active_peak_bytes, report.active_peak_bytes),
        share(figures?.reserved_peak_bytes, report.reserved_peak_bytes),
      ];
      check(
        `bars of line ${line.line}`,
        rows[i].bars.every((width, bar) => Math.abs(width - bars[bar]) < 0.01),
        String(rows[i].bars),
      );
    });
  });
}

/** The table of functions, sorted by each of its columns. */
async function functions() {
  const heads = await page.locator('#functions th').allTextContents();
  const of = {
    'Active peak': 'active_peak_bytes',
    'Reserved peak': 'reserved_peak_bytes',
    Net: 'net_bytes',
    Allocated: 'allocated_bytes',
    Function: 'function',
    File: 'filename',
  };
  equal(
    'columns',
    heads.map(head => head.replace(/ [\u2191\u2193]$/, '')),
    Object.keys(of),
  );
  for (const [at, name] of Object.keys(of).entries()) {
    await page.locator('#functions th button').nth(at).click();
    const sorted = await page.locator('#functions th').nth(at).getAttribute('aria-sort');
    const rows = await page
      .locator('#functions tbody tr')
      .evaluateAll(all => all.map(row => [...row.cells].map(cell => cell.textContent)));
    const key = of[name];
    if (typeof report.functions[0][key] === 'number') {
      // The first column was sorted from large to small at first, so a click turns it.
      const values = report.functions.map(one => one[key]).sort((a, b) => (sorted === 'descending' ? b - a : a - b));
      equal(
        `order by ${name}`,
        rows.map(row => row[at]),
        values.map(format.size),
      );
    } else {
      equal(`rows by ${name}`, rows.map(row => row[4]).sort(), report.functions.map(one => one.function).sort());
    }
  }
}

async function search() {
  const field = page.getByLabel('Search the functions and their source');
  const visible = () => page.locator('#source details:not([hidden])').count();
  const [first] = report.functions;
  for (const word of [
    first.function,
    first.filename.split('/').at(-1),
    first.lines
      .find(line => line.text?.trim())
      ?.text.trim()
      .split(/\s+/)[0],
  ].filter(one => one)) {
    await field.fill(word);
    const matches = report.functions.filter(one =>
      [
        one.function,
        `${one.filename}:${one.first_line}`,
        ...one.lines.map(
          line => `${line.text ?? ''} ${line.largest_tensor?.name ?? ''} ${line.largest_tensor?.shape ?? ''}`,
        ),
      ]
        .join('\n')
        .toLowerCase()
        .includes(word.toLowerCase()),
    );
    equal(`functions that match ${word}`, await visible(), matches.length);
    equal(`rows that match ${word}`, await page.locator('#functions tbody tr').count(), matches.length);
    check(
      'matches',
      (await page.textContent('#functions .note')).startsWith(`${matches.length} of `),
      await page.textContent('#functions .note'),
    );
  }
  await field.fill('no function has this name');
  equal('no match', await visible(), 0);
  await field.fill('');
  equal('without a search', await visible(), report.functions.length);
  equal('marks without a search', await page.locator('#source tr.selected').count(), 0);
}

/** A function of the table opens its source, without a mouse. */
async function keys() {
  const last = page.locator('#functions tbody button').last();
  const name = await last.textContent();
  await last.focus();
  await page.keyboard.press('Enter');
  await drawn();
  const focused = await page.evaluate(() => ({
    tag: document.activeElement.tagName,
    text: document.activeElement.textContent,
    open: document.activeElement.parentElement.open,
  }));
  check(
    'Enter on a function',
    focused.tag === 'SUMMARY' && focused.text.startsWith(name) && focused.open,
    JSON.stringify(focused),
  );
  await page.keyboard.press('Enter');
  equal('Enter on its source', await page.evaluate(() => document.activeElement.parentElement.open), false);
}

/** In the frame of a notebook, the number and the code of a line stand beside its figures, without scrolling. */
async function beside() {
  await page.setViewportSize({ width: 700, height: 700 });
  await drawn();
  const places = await page.evaluate(() =>
    [...document.querySelectorAll('#source .code-table')]
      .filter(one => one.checkVisibility())
      .map(one => {
        const head = [...one.querySelectorAll('th')].find(cell => cell.textContent === 'Source');
        return Math.round(head.getBoundingClientRect().left);
      }),
  );
  check('a table is open', places.length > 0, 'none');
  equal(
    'code that begins in the right half of a frame',
    places.filter(left => left > 350),
    [],
  );
  check('figures that are left out', await page.locator('.spare-note').isVisible(), 'no note');
}

/** On paper, all parts are open and no table is cut. After `everywhere`, the page is on paper. */
async function onPaper() {
  await page.setViewportSize({ width: 1000, height: 1200 });
  await drawn();
  equal('parts that are closed on paper', await page.locator('#source details:not([open])').count(), 0);
  const cut = await page.evaluate(
    () =>
      [...document.querySelectorAll('.scroll')].filter(
        one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== 'visible',
      ).length,
  );
  equal('tables that are cut on paper', cut, 0);
  equal('the theme on paper', await page.evaluate(() => document.documentElement.dataset.theme), 'light');
  await picture('paper');
  await page.emulateMedia({ media: 'screen' });
  await drawn();
  await beside();
  equal('the theme on the screen', await page.evaluate(() => document.documentElement.dataset.theme), 'dark');
}
