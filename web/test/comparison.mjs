#!/usr/bin/env node
// Drives the page of a comparison in headless Chromium: the verdict, every table, the colors of a chosen row in both
// timelines, zoom, keys, both themes, a phone's width, paper. Compares what is on the screen with the JSON of `memtrace
// diff`. Exit 0: all of it is right. 1: something is not. 2: the check could not run.
import { readFileSync } from 'node:fs';
import { bundled } from './bundle.mjs';
import { commandLine, harness } from './harness.mjs';

const USAGE = `usage: node comparison.mjs PAGE [options]
  --diff FILE       the output of memtrace diff --json; without it, the page is compared with the comparison inside it
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: file, opt } = commandLine(USAGE, { diff: { type: 'string' } }, { files: ['diff'] });
const format = await bundled('format.ts');

const { page, open, note, check, equal, picture, drawn, everywhere, end } = await harness({
  file,
  executable: opt.chromium,
  out: opt.out,
  height: 1000,
});
let loadMs = 0;
try {
  loadMs = await open(
    () =>
      (document.querySelector('#verdict') && (window.memtraceComparison || document.querySelector('#remarks'))) ||
      document.querySelector('main strong.bad'),
  );
  const inside = await page.evaluate(() => window.memtraceComparison?.diff ?? null);
  const diff = opt.diff ? JSON.parse(readFileSync(opt.diff, 'utf8')) : inside;
  if (opt.diff && inside) equal('comparison', inside, diff);
  for (const pair of diff?.pairs ?? [])
    check('verdict', (await page.textContent('#verdict')).includes(pair.headline), pair.headline);
  const pairs = diff?.pairs ?? [];
  for (let number = 0; number < pairs.length; number++) {
    if (pairs.length > 1) await page.getByLabel('Device').selectOption(String(number));
    await comparePair(pairs[number]);
  }
  if (inside) {
    if (pairs.length > 1) await page.getByLabel('Device').selectOption('0');
    await drive();
  }
} catch (e) {
  note('harness', e.stack ?? e.message);
}
await end({ load: { ms: loadMs } });

/** What is on the screen of one device that is in both runs. */
async function comparePair(pair) {
  await drawn();
  const figures = await page
    .locator('.figure')
    .evaluateAll(cards => cards.map(card => card.querySelector('b').textContent));
  equal('figures', figures, [
    format.size(pair.a.totals.allocated_bytes),
    format.size(pair.b.totals.allocated_bytes),
    format.signedSize(pair.difference_bytes),
    format.signedSize(pair.b.reserved_peak_bytes - pair.a.reserved_peak_bytes),
  ]);
  const peaks = await page.evaluate(() =>
    window.memtraceComparison?.states.map(({ now }) => [now.device.pointSeq[now.point], now.device.total[now.point]]),
  );
  if (peaks)
    equal(
      'the compared points',
      peaks,
      [pair.a, pair.b].map(peak => [peak.seq, peak.totals.allocated_bytes]),
    );
  const tables = {
    Category: 'by_category',
    'Custom category': 'by_custom_category',
    Phase: 'by_phase',
    Line: 'by_line',
    Stack: 'by_stack',
    Module: 'by_module',
  };
  const tabs = await page.locator('#changes [role=tab]').allTextContents();
  equal(
    'tables',
    tabs,
    Object.keys(tables).filter(name => (pair[tables[name]] ?? []).length > 0),
  );
  const bytes = row => [row.difference_bytes, row.a_bytes, row.b_bytes];
  const texts = rows =>
    rows.map(([difference, a, b]) => [format.signedSize(difference), format.size(a), format.size(b)]);
  const sorted = rows => rows.map(row => row.join(' ')).sort();
  for (const tab of tabs) {
    await page.locator('#changes').getByRole('tab', { name: tab, exact: true }).click();
    for (const withNoise of [false, true]) {
      await page.locator('#changes').getByLabel('Also changes within noise').setChecked(withNoise);
      const more = page.locator('#changes').getByRole('button', { name: 'Show more' });
      while (await more.isVisible()) await more.click();
      const rows = await page
        .locator('#changes tbody tr')
        .evaluateAll(all => all.map(row => [0, 2, 3].map(at => row.cells[at].textContent)));
      const least = withNoise ? 0 : pair.noise_bytes;
      const expected = pair[tables[tab]].filter(row => Math.abs(row.difference_bytes) > least).map(bytes);
      equal(`${tab}, ${withNoise ? 'with' : 'without'} noise`, sorted(rows), sorted(texts(expected)));
      const magnitudes = expected.map(row => Math.abs(row[0])).sort((x, y) => y - x);
      equal(
        `order of ${tab}`,
        rows.map(row => row[0].replace(/^[+-]/, '')),
        magnitudes.map(one => format.size(one)),
      );
      const longest = await page
        .locator('#changes tbody .change i')
        .evaluateAll(bars => bars.map(bar => Number.parseFloat(bar.style.width)));
      const most = Math.max(1, ...magnitudes);
      check(
        `bars of ${tab}`,
        longest.every((width, at) => Math.abs(width - (50 * magnitudes[at]) / most) < 0.01),
        String(longest),
      );
    }
    if (peaks) await chooseRows(tab, pair[tables[tab]]);
    await page.locator('#changes').getByLabel('Also changes within noise').setChecked(false);
  }
}

/** Chooses the first rows of a table: both timelines then color exactly the row's bytes at their compared points. */
async function chooseRows(tab, rows) {
  const buttons = page.locator('#changes tbody button[data-row]');
  for (let at = 0; at < Math.min(await buttons.count(), 30); at++) {
    await buttons.nth(at).click();
    await drawn();
    equal(`${tab}: the row is marked`, await buttons.nth(at).getAttribute('aria-pressed'), 'true');
    const label = await buttons.nth(at).textContent();
    const shown = await buttons
      .nth(at)
      .evaluate(button => [2, 3].map(cell => button.closest('tr').cells[cell].textContent));
    const { colored, series } = await page.evaluate(() => {
      const { colored, states, timelines } = window.memtraceComparison;
      const series = timelines.map((timeline, side) => {
        const values = timeline.content.set.values(states[side].now.point);
        return timeline.content.set.series.reduce(
          (sum, one, i) => sum + (one.color === 'highlight' ? values[i] : 0),
          0,
        );
      });
      return { colored, series };
    });
    equal(`${tab}, ${label}: the bytes that the timelines color`, series, colored);
    check(
      `${tab}, ${label}: the colored bytes are those of the row`,
      rows.some(
        row =>
          row.a_bytes === colored[0] &&
          row.b_bytes === colored[1] &&
          format.size(row.a_bytes) === shown[0] &&
          format.size(row.b_bytes) === shown[1],
      ),
      `${colored} for ${shown}`,
    );
    check(
      `${tab}, ${label}: the selection is named`,
      (await page.textContent('.selection')).includes(`A ${shown[0]}, B ${shown[1]}`),
      await page.textContent('.selection'),
    );
    await buttons.nth(at).click();
    equal(`${tab}: the row is no longer marked`, await buttons.nth(at).getAttribute('aria-pressed'), 'false');
  }
}

async function drive() {
  const geometry = () =>
    page.evaluate(() =>
      window.memtraceComparison.timelines.map(({ picture: { geometry } }) => ({
        ceiling: geometry.ceiling,
        from: geometry.from,
        to: geometry.to,
      })),
    );
  const canvas = page.locator('#timeline-a canvas');
  await drawn();
  await picture('light');
  const atFirst = await geometry();
  equal('vertical scale at first', atFirst[0].ceiling, atFirst[1].ceiling);
  if (await page.evaluate(() => window.memtraceComparison.group.zoomsTogether))
    equal('horizontal scale at first', [atFirst[0].from, atFirst[0].to], [atFirst[1].from, atFirst[1].to]);
  for (const [division, axis] of [
    ['phase', 'steps'],
    ['module', 'time'],
    ['line', 'order'],
    ['category', 'order'],
  ]) {
    await page.getByLabel('Stacked by').selectOption(division);
    await page.getByLabel('over', { exact: true }).selectOption(axis);
    await drawn();
    const [a, b] = await geometry();
    equal(`vertical scale of both timelines, ${division} over ${axis}`, a.ceiling, b.ceiling);
    const kinds = await page.evaluate(() => window.memtraceComparison.timelines.map(timeline => timeline.axis.kind));
    if (kinds[0] === kinds[1]) equal(`horizontal scale, ${division} over ${axis}`, [a.from, a.to], [b.from, b.to]);
    const highest = await page.evaluate(() =>
      Math.max(...window.memtraceComparison.states.map(({ now }) => now.device.total[now.device.peak])),
    );
    check('the peaks are below the top', highest <= a.ceiling, `${highest} of ${a.ceiling}`);
    const sums = await page.evaluate(() => {
      const { states, timelines } = window.memtraceComparison;
      return timelines.map(
        (timeline, side) =>
          timeline.content.set.values(states[side].now.point).reduce((x, y) => x + y, 0) -
          states[side].now.device.total[states[side].now.point],
      );
    });
    equal(`the sums of the series by ${division}`, sums, [0, 0]);
  }
  // Every column has its highest point, and nothing is drawn after the end of the shorter run.
  const wrong = await page.evaluate(() =>
    window.memtraceComparison.timelines.map((timeline, side) => {
      const { device } = window.memtraceComparison.states[side].now;
      const { from, to, ceiling } = timeline.picture.geometry;
      const { width: columns, height: rows, data } = timeline.picture.image;
      const columnOf = point => ((timeline.axis.position[point] - from) / (to - from)) * columns;
      const heightOf = column => {
        let row = 0;
        while (row < rows && data[(row * columns + column) * 4 + 3] === 0) row += 1;
        return rows - row;
      };
      const end = ((timeline.axis.end - from) / (to - from)) * columns;
      let count = 0;
      for (let point = 0; point < device.points; point++) {
        const column = Math.floor(columnOf(point));
        const near = [column - 1, column, column + 1].filter(at => at >= 0 && at < columns);
        if (Math.max(...near.map(heightOf)) < Math.round((device.total[point] / ceiling) * rows)) count += 1;
      }
      for (let column = Math.ceil(end) + 1; column < columns; column++) if (heightOf(column) > 0) count += 1;
      return count;
    }),
  );
  equal('points that are not drawn, and columns after the end', wrong, [0, 0]);
  // Zoom by keys, together and alone.
  await page.getByLabel('Zoom together').check();
  await canvas.focus();
  await page.keyboard.press('Home');
  await drawn();
  const all = await geometry();
  await page.keyboard.press('+');
  await drawn();
  const [a, b] = await geometry();
  check('zoom', a.to - a.from < all[0].to - all[0].from || all[0].to - all[0].from <= 8, `${a.from} to ${a.to}`);
  equal('zoom of the other timeline', [b.from, b.to, b.ceiling], [a.from, a.to, a.ceiling]);
  await page.keyboard.press('Home');
  await page.getByLabel('Zoom together').uncheck();
  await page.keyboard.press('+');
  await drawn();
  const alone = await geometry();
  equal(
    'the other timeline stays when it is not zoomed together',
    [alone[1].from, alone[1].to],
    [all[1].from, all[1].to],
  );
  equal('the vertical scale stays common', alone[0].ceiling, alone[1].ceiling);
  await page.keyboard.press('Home');
  await page.getByLabel('Zoom together').check();
  // A click shows the live allocations of that run.
  for (const [side, name] of [
    ['a', 'A'],
    ['b', 'B'],
  ]) {
    const one = page.locator(`#timeline-${side} canvas`);
    await one.scrollIntoViewIfNeeded();
    const box = await one.boundingBox();
    await page.mouse.click(box.x + 70 + (box.width - 90) * 0.2, box.y + 120);
    await drawn();
    equal(`click in ${name}`, await page.textContent('#allocations h2'), `Live allocations of ${name}`);
    const total = await page.evaluate(
      at => {
        const { now } = window.memtraceComparison.states[at];
        return now.device.total[now.point];
      },
      side === 'a' ? 0 : 1,
    );
    check(
      `allocations of ${name}`,
      (await page.textContent('#allocations .note b')).startsWith(`${format.size(total)} at event`),
      String(total),
    );
    await one.focus();
    await page.keyboard.press('p');
    await drawn();
  }
  equal(
    'key p',
    await page.evaluate(() => window.memtraceComparison.states.map(({ now }) => now.device.pointSeq[now.point])),
    await page.evaluate(() => ['a', 'b'].map(side => window.memtraceComparison.diff.pairs[0][side].seq)),
  );
  // The table: sorting by a header, choosing a row with the keyboard, and its colors.
  await page.locator('#changes').getByRole('tab', { name: 'Line' }).click();
  await page.locator('#changes thead button').nth(1).click();
  equal('sorting', await page.locator('#changes th').nth(1).getAttribute('aria-sort'), 'descending');
  await page.locator('#changes').getByLabel('Also changes within noise').check();
  const row = page.locator('#changes tbody button[data-row]').first();
  if ((await row.count()) > 0) {
    await row.focus();
    await page.keyboard.press('Enter');
    await drawn();
    equal('Enter on a row', await row.getAttribute('aria-pressed'), 'true');
    equal('the focus stays', await page.evaluate(() => document.activeElement.getAttribute('aria-pressed')), 'true');
    const legend = await page.locator('#timeline-b .legend').textContent();
    check('legend', legend.includes('other allocations') || legend.includes(await row.textContent()), legend);
    await picture('selected');
  }
  await page.locator('#changes').getByLabel('Also changes within noise').uncheck();
  await everywhere();
}
