#!/usr/bin/env node
// Drives an HTML report in headless Chromium: every view, pointer and keyboard, search, zoom, both themes, a phone's
// width. Compares what the page has with summary.json. Exit 0: all of it is right. 1: something is not. 2: the check
// could not run.
import { readFileSync } from 'node:fs';
import { commandLine, harness } from './harness.mjs';
import { driveViews, VIEWS } from './views.mjs';

const USAGE = `usage: node report.mjs PAGE [options]
  --summary FILE    the run's summary.json; without it, the page is compared with the summary inside it
  --expect LIST     what the page must have: ${VIEWS.join(', ')},
                    or the ends of fields of the summary such as larger_inputs.input_bytes
  --blocks FILE     for each process, the table of its blocks (--to csv), with which the sum over ranks is compared
  --window          the page must begin with a part of the run
  --headline TEXT   what the command in the header must contain
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: file, opt } = commandLine(
  USAGE,
  {
    summary: { type: 'string' },
    expect: { type: 'string', default: '' },
    blocks: { type: 'string', multiple: true, default: [] },
    window: { type: 'boolean', default: false },
    headline: { type: 'string' },
  },
  { files: ['summary', 'blocks'] },
);

/**
 * Runs inside the page, before anything is clicked: what the timeline shows, and what it should show, of a page with a
 * window.
 */
function shownFirst() {
  const { state, timeline, page } = window.memtraceReport;
  if (!page.windows[0]) return null;
  const { device, point } = state.now;
  const [first, last] = page.windows[0];
  const within = [...device.pointSeq]
    .map((seq, at) => [seq, at])
    .filter(([seq]) => seq >= first && seq <= last)
    .map(([, at]) => at);
  const { position, begin, end } = timeline.axis;
  const [low, high] = [position[within[0]], position[within.at(-1)]];
  const margin = (high - low) * 0.05;
  return {
    from: timeline.picture.geometry.from,
    to: timeline.picture.geometry.to,
    expectedFrom: Math.max(begin, Math.min(low - margin, end - (high - low) * 1.1)),
    expectedTo: Math.min(end, Math.max(high + margin, begin + (high - low) * 1.1)),
    all: end - begin,
    cursor: device.total[point],
    highest: Math.max(...within.map(at => device.total[at])),
  };
}

/** Runs inside the page: the figures of every device that the page has, by its own data. */
function figures() {
  const { state, summary, timeline } = window.memtraceReport;
  const before = { ...state.now };
  const found = [];
  const select = [...document.querySelectorAll('label.choice')]
    .find(label => label.textContent.startsWith('Device'))
    ?.querySelector('select');
  const count = select ? select.options.length : 1;
  for (let at = 0; at < count; at++) {
    if (select) {
      select.value = String(at);
      select.dispatchEvent(new Event('change'));
    }
    const { device } = state.now;
    const categories = point => {
      state.set({ division: 'category', point });
      const values = timeline.content.set.values(point);
      const all = {};
      timeline.content.set.series.forEach(
        (series, i) => values[i] !== 0 && (all[series.color.replace('category-', '')] = values[i]),
      );
      return all;
    };
    const { trace } = window.memtraceReport.devices.find(one => one.device === device);
    const process = summary.processes.find(one => one.trace === trace);
    const described = process.devices.find(one => one.device === device.info.device);
    const pointAt = seq => device.pointOf(seq);
    const liveBytes = point => device.live(point).reduce((sum, block) => sum + device.size[block], 0);
    const restBytes = point => device.rest.reduce((sum, bytes) => sum + bytes[point], 0);
    const state_ = one =>
      one && {
        seq: one.seq,
        point: pointAt(one.seq),
        allocated: one.totals.allocated_bytes,
        reserved: one.totals.reserved_bytes,
      };
    const states = [described.peak, described.end, ...described.ooms.map(oom => oom.in_use)]
      .map(state_)
      .filter(one => one);
    found.push({
      name: `${process.pid} ${device.info.device}`,
      source: device.info.source,
      mismatches: device.info.mismatches,
      complete: !device.info.rest,
      peak: device.total[device.peak],
      peakSeq: device.pointSeq[device.peak],
      expectedPeakSeq: described.peak?.seq,
      categories: categories(device.peak),
      expectedCategories: Object.fromEntries(
        (described.peak?.by_category ?? []).filter(one => one.bytes > 0).map(one => [one.category, one.bytes]),
      ),
      states: states.map(one => ({
        ...one,
        found: device.total[one.point],
        listed: liveBytes(one.point) + restBytes(one.point),
        foundReserved:
          device.reserved.seq.length === 0
            ? null
            : (() => {
                let value = 0;
                for (let i = 0; i < device.reserved.seq.length && device.reserved.seq[i] <= one.seq; i++)
                  value = device.reserved.value[i];
                return value;
              })(),
      })),
      highest: described.highest.allocated_bytes,
    });
  }
  if (select) {
    select.value = '0';
    select.dispatchEvent(new Event('change'));
  }
  state.set({ division: before.division, point: before.point });
  return found;
}

/**
 * Runs inside the page: columns that hide the highest point in them, or show more than any point has, both counted by
 * brute force. A point at the border of two columns may be in either.
 */
function wrongColumns() {
  const { timeline, state } = window.memtraceReport;
  const device = state.now.division === 'rank' ? timeline.content.device : state.now.device;
  const { ceiling, from, to } = timeline.picture.geometry;
  const { position } = timeline.axis;
  const { width: columns, height: rows, data } = timeline.picture.image;
  const columnOf = point => ((position[point] - from) / (to - from)) * columns;
  const highest = new Float64Array(columns).fill(-1);
  let now = 0;
  let point = 0;
  for (let column = 0; column < columns; column++) {
    highest[column] = now;
    for (; point < device.points && columnOf(point) < column + 1; point++) {
      now = device.total[point];
      highest[column] = Math.max(columnOf(point) < 0 ? 0 : highest[column], now);
    }
  }
  const heights = Array.from({ length: columns }, (_, column) => {
    let row = 0;
    while (row < rows && data[(row * columns + column) * 4 + 3] === 0) row += 1;
    return rows - row;
  });
  const height = value => Math.round((value / ceiling) * rows);
  let wrong = 0;
  for (let column = 1; column + 1 < columns; column++) {
    const near = [column - 1, column, column + 1];
    const shown = Math.max(...near.map(at => heights[at]));
    const most = Math.max(...near.map(at => highest[at]));
    if (shown < height(highest[column]) || heights[column] > height(most)) wrong += 1;
  }
  return { wrong, columns };
}

/** Each sentence of the summary about the run and the selected device, and whether the page shows it. */
function conclusions() {
  const { summary, state, devices } = window.memtraceReport;
  const shown = id => (document.getElementById(id)?.textContent ?? '').replaceAll(/\s+/g, ' ');
  const entry = devices.find(one => one.device === state.now.device.whole) ?? devices[0];
  const process = summary.processes.find(one => one.trace === entry.trace);
  const { advice } = process?.devices.find(one => one.device === entry.device.info.device)?.what_if ?? {};
  const sentences = [
    ...summary.verdict.remarks.map(text => ['verdict', text]),
    ...summary.verdict.statements.flatMap(one => [one.text, ...one.details].map(text => ['verdict', text])),
    ...summary.gaps.map(gap => ['losses', gap.text]),
    ...(advice ? [['suggestions', advice.text]] : []),
  ];
  return sentences.map(([id, text]) => ({ text, isShown: shown(id).includes(text.replaceAll(/\s+/g, ' ')) }));
}

/**
 * Runs inside the page: the longest part of its height, in pixels, of which cards cover less than three quarters of the
 * width.
 */
function emptyHeight() {
  const main = document.querySelector('main').getBoundingClientRect();
  const cards = [...document.querySelectorAll('main .card')].map(card => card.getBoundingClientRect());
  let [longest, run] = [0, 0];
  for (let y = main.top; y < Math.max(...cards.map(card => card.bottom)); y++) {
    const covered = cards.reduce((sum, card) => sum + (card.top <= y && y < card.bottom ? card.width : 0), 0);
    run = covered < 0.75 * main.width ? run + 1 : 0;
    longest = Math.max(longest, run);
  }
  return longest;
}

/** Runs inside the page: the names of categories in the form of code that its prose has. */
function codeNames() {
  const styles = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules]);
  const variables = styles.flatMap(rule => [...(rule.style ?? [])]).filter(name => name.startsWith('--category-'));
  const names = new Set(variables.map(name => name.slice('--category-'.length)).filter(name => name.includes('_')));
  const walker = document.createTreeWalker(document.querySelector('#app'), NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    if (!node.parentElement.closest('code, pre, .code'))
      found.push(...node.data.split(/\W+/).filter(word => names.has(word)));
  return { found, names: names.size };
}

/**
 * Runs inside the page: by category, the pixels of its color in the middle of the rows of the memory map, and the
 * pixels that its blocks have by their sizes. `null` without a map.
 */
function mapScale() {
  const canvas = document.querySelector('#allocations canvas');
  if (canvas.hidden) return null;
  const { device, point } = window.memtraceReport.state.now;
  const copy = (width, height) => {
    const made = document.createElement('canvas');
    [made.width, made.height] = [width, height];
    return made.getContext('2d', { willReadFrequently: true });
  };
  const context = copy(canvas.width, canvas.height);
  context.drawImage(canvas, 0, 0);
  const ratio = canvas.width / canvas.clientWidth;
  const [row, gap] = [18, 5];
  const rows = Math.round(canvas.clientHeight / (row + gap));
  const style = getComputedStyle(document.documentElement);
  const rgb = name => {
    const probe = copy(1, 1);
    probe.fillStyle = style.getPropertyValue(`--category-${name}`).trim();
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
  };
  const colors = new Map();
  for (let at = 0; at < rows; at++) {
    const y = Math.floor((at * (row + gap) + row / 2) * ratio);
    const { data } = context.getImageData(0, y, canvas.width, 1);
    for (let x = 0; x < data.length; x += 4) {
      const key = data.slice(x, x + 3).join();
      if (data[x + 3] === 255) colors.set(key, (colors.get(key) ?? 0) + 1 / ratio);
    }
  }
  // The page names the bytes of a row; the widest row is as wide as the canvas without labels and margin.
  const text = document.querySelector('#allocations div:not([hidden]) > .note').textContent;
  const [, figure, unit] = text.match(/each full row is ([\d.]+) (\w+)\./);
  const rowBytes = Number(figure) * 1024 ** ['B', 'KiB', 'MiB', 'GiB', 'TiB'].indexOf(unit);
  const perByte = (canvas.clientWidth - 66) / rowBytes;
  const { process } = device;
  const expected = new Map();
  for (const block of device.live(point)) {
    const { name } = process.categories[process.category(device.site[block])];
    const sum = expected.get(name) ?? { pixels: 0, blocks: 0 };
    expected.set(name, { pixels: sum.pixels + device.size[block] * perByte, blocks: sum.blocks + 1 });
  }
  return [...expected].map(([name, { pixels, blocks }]) => ({
    name,
    blocks,
    rows,
    expected: pixels,
    found: colors.get(rgb(name)) ?? 0,
  }));
}

const { page, open, note, check, equal, picture, drawn, everywhere, end } = await harness({
  file,
  executable: opt.chromium,
  out: opt.out,
  height: 900,
});
let loadMs = 0;
let devices = [];
try {
  loadMs = await open(() => window.memtraceReport || document.querySelector('main .empty'));
  const isEmpty = await page.evaluate(() => !window.memtraceReport);
  check('title', (await page.title()).startsWith('memtrace:'), await page.title());
  if (opt.headline)
    check(
      'headline',
      (await page.textContent('header code')).includes(opt.headline),
      await page.textContent('header code'),
    );
  const verdict = await page.textContent('#verdict');
  check('verdict', verdict.length > 8, verdict);
  if (!isEmpty) {
    for (const sentence of await page.evaluate(conclusions)) check('conclusions', sentence.isShown, sentence.text);
    const shown = await page.evaluate(shownFirst);
    if (opt.window) check('window', shown !== null, 'the page begins with the whole run');
    if (shown) {
      check(
        'window: range',
        Math.abs(shown.from - shown.expectedFrom) <= 1 && Math.abs(shown.to - shown.expectedTo) <= 1,
        JSON.stringify(shown),
      );
      equal('window: cursor', shown.cursor, shown.highest);
      check('window: part', shown.expectedTo - shown.expectedFrom < shown.all, JSON.stringify(shown));
    }
    devices = await page.evaluate(figures);
    for (const one of devices) {
      if (one.mismatches > 0) continue;
      equal(`${one.name}: peak`, one.peak, one.highest);
      equal(`${one.name}: event of the peak`, one.peakSeq, one.expectedPeakSeq);
      equal(
        `${one.name}: categories at the peak`,
        Object.entries(one.categories).sort(),
        Object.entries(one.expectedCategories).sort(),
      );
      for (const state of one.states) {
        equal(`${one.name}: allocated at event ${state.seq}`, state.found, state.allocated);
        equal(`${one.name}: live blocks at event ${state.seq}`, state.listed, state.allocated);
        if (state.foundReserved !== null)
          equal(`${one.name}: reserved at event ${state.seq}`, state.foundReserved, state.reserved);
      }
    }
    if (opt.summary) {
      const summary = JSON.parse(readFileSync(opt.summary, 'utf8'));
      const peaks = run =>
        run.processes.map(one =>
          one.devices.map(two => [
            two.peak?.seq,
            two.peak?.totals,
            two.peak?.by_category,
            two.ooms.map(oom => oom.in_use.totals),
          ]),
        );
      equal('summary.json', peaks(await page.evaluate(() => window.memtraceReport.summary)), peaks(summary));
    }
    await drive();
    const all = opt.summary
      ? JSON.parse(readFileSync(opt.summary, 'utf8'))
      : await page.evaluate(() => window.memtraceReport.summary);
    const expect = opt.expect.split(',').filter(one => one !== '');
    await driveViews(page, all, { expect, blocks: opt.blocks }, { check, equal, drawn, wrongColumns, picture });
  }
} catch (e) {
  note('harness', e.stack ?? e.message);
}
await end({ load: { ms: loadMs }, devices: devices.length });

async function drive() {
  const point = () => page.evaluate(() => window.memtraceReport.state.now.point);
  const range = () =>
    page.evaluate(() => [
      window.memtraceReport.timeline.picture.geometry.from,
      window.memtraceReport.timeline.picture.geometry.to,
    ]);
  const canvas = page.locator('#timeline canvas');
  await canvas.scrollIntoViewIfNeeded();
  await drawn();
  await picture('light');
  for (const [division, axis] of [
    ['category', 'order'],
    ['phase', 'steps'],
    ['module', 'time'],
    ['line', 'order'],
  ]) {
    await page.locator('#timeline select').nth(0).selectOption(division);
    await page.locator('#timeline select').nth(1).selectOption(axis);
    await drawn();
    const { wrong, columns } = await page.evaluate(wrongColumns);
    equal(`columns of ${division} over ${axis} that lack their highest point, of ${columns}`, wrong, 0);
    const sum = await page.evaluate(() => {
      const { timeline, state } = window.memtraceReport;
      return (
        timeline.content.set.values(state.now.point).reduce((a, b) => a + b, 0) -
        state.now.device.total[state.now.point]
      );
    });
    equal(`the sum of the series by ${division}`, sum, 0);
  }
  await page.locator('#timeline select').nth(0).selectOption('category');
  await page.locator('#timeline select').nth(1).selectOption('order');
  const points = await page.evaluate(() => window.memtraceReport.state.now.device.points);
  const at = async share => {
    await page.evaluate(() =>
      document.querySelector('#timeline').scrollIntoView({ block: 'center', behavior: 'instant' }),
    );
    const box = await canvas.boundingBox();
    return [box.x + 70 + (box.width - 90) * share, box.y + 150];
  };
  // A page from a file says how to load what it lacks.
  const isIncomplete = await page.evaluate(() => window.memtraceReport.state.now.device.info.rest !== null);
  const about = (await page.locator('#timeline > .note').allTextContents()).join(' ');
  equal('how to load all events', about.includes('memtrace open RUN --serve'), isIncomplete);
  // The pointer reads, a click shows the live allocations, Shift and a click compares.
  await page.mouse.move(...(await at(0.3)));
  await drawn();
  const readout = await page.locator('#timeline .readout').textContent();
  check('cursor', /^[\d.]+ ?[KMGT]?i?B? allocated|^0 allocated/.test(readout), readout);
  await page.mouse.click(...(await at(0.4)));
  await drawn();
  const chosen = await point();
  const bytes = await page.evaluate(p => window.memtraceReport.state.now.device.total[p], chosen);
  const shown = await page.evaluate(() => document.querySelector('#allocations .note b').textContent);
  const text = await page.evaluate(value => {
    let unit = 0;
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
    let v = value;
    while (v >= 999.5) {
      v /= 1024;
      unit += 1;
    }
    return value === 0
      ? '0'
      : unit === 0
        ? `${value} B`
        : `${v >= 99.95 ? v.toFixed(0) : v >= 9.995 ? v.toFixed(1) : v.toFixed(2)} ${units[unit]}`;
  }, bytes);
  check('click', shown.startsWith(`${text} at event`), `${shown} for ${text}`);
  await page.keyboard.down('Shift');
  await page.mouse.click(...(await at(0.8)));
  await page.keyboard.up('Shift');
  await drawn();
  check('comparison', (await page.textContent('#allocations h2')) === 'Changes between two points', 'Shift and click');
  await page.locator('#allocations').getByRole('button', { name: 'End the comparison' }).click();
  // Wheel, brush, keys.
  const all = await range();
  if (points > 40) {
    await page.mouse.move(...(await at(0.5)));
    await page.mouse.wheel(0, -300);
    await drawn();
    const zoomed = await range();
    check('wheel', zoomed[1] - zoomed[0] < all[1] - all[0], `${zoomed} of ${all}`);
    const { wrong } = await page.evaluate(wrongColumns);
    equal('columns that lack their highest point after the zoom', wrong, 0);
    await page.mouse.dblclick(...(await at(0.5)));
    await drawn();
    equal('double click', await range(), all);
    await page.mouse.move(...(await at(0.2)));
    await page.mouse.down();
    await page.mouse.move(...(await at(0.5)), { steps: 4 });
    await page.mouse.up();
    await drawn();
    const brushed = await range();
    check('brush', brushed[1] - brushed[0] < 0.4 * (all[1] - all[0]), `${brushed} of ${all}`);
    await page.getByRole('button', { name: 'Whole run' }).click();
    await drawn();
    equal('whole run', await range(), all);
    await canvas.focus();
    await page.keyboard.press('+');
    await drawn();
    check('key', (await range())[1] - (await range())[0] < all[1] - all[0], 'plus');
    await page.keyboard.press('Home');
  }
  await canvas.focus();
  await page.keyboard.press('p');
  await drawn();
  equal('key p', await point(), await page.evaluate(() => window.memtraceReport.state.now.device.peak));
  // The table: sorting, searching, single blocks, a stack.
  const rows = () => page.locator('#allocations tbody tr').count();
  const grouped = await rows();
  await page.locator('#allocations thead button').nth(1).click();
  const sorted = await page.locator('#allocations th').nth(1).getAttribute('aria-sort');
  check('sorting', sorted !== 'none', String(sorted));
  await page.locator('#allocations').getByLabel('Group blocks').uncheck();
  check('single blocks', (await rows()) >= grouped, `${await rows()} of ${grouped}`);
  await page.locator('#allocations').getByLabel('Search').fill('no such text anywhere');
  await drawn();
  equal('search without a match', await rows(), 0);
  await page.locator('#allocations').getByLabel('Search').fill('');
  await drawn();
  check('search', (await rows()) >= grouped, 'cleared');
  const stack = page.locator('#allocations details.stack').first();
  if ((await stack.count()) > 0) {
    await stack.locator('summary').click();
    await stack
      .locator('li')
      .first()
      .waitFor({ timeout: 5000 })
      .catch(() => {});
    check('stack', (await stack.locator('li').count()) > 0, 'no frames');
  }
  // Icicle graph and memory map.
  await page.getByRole('tab', { name: 'Flame graph' }).click();
  await drawn();
  const parts = await page.locator('.flame button').count();
  check('flame graph', parts > 0, 'nothing is drawn');
  if (parts > 2) {
    await page.locator('.flame button').nth(2).click();
    await drawn();
    check('zoom of the flame graph', (await page.locator('.flame button').count()) > 0, 'nothing is left');
    await page.locator('.flame button').first().click();
  }
  await page.locator('.flame').scrollIntoViewIfNeeded();
  await picture('flame');
  await page.getByRole('tab', { name: 'Memory map' }).click();
  await drawn();
  const map = await page.evaluate(() => {
    const canvas = document.querySelector('#allocations canvas');
    const { device } = window.memtraceReport.state.now;
    if (canvas.hidden) return device.segments.seq.length === 0 ? 1 : 0;
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return data.reduce((sum, value, i) => sum + (i % 4 === 3 && value > 0 ? 1 : 0), 0);
  });
  check('memory map', map > 0, 'nothing is drawn');
  for (const one of (await page.evaluate(mapScale)) ?? []) {
    // Each block may lose its last pixel, the borders of its segment, and one pixel at each end of a row.
    const margin = 4 * one.blocks + 2 * one.rows;
    check(
      `memory map: scale of ${one.name}`,
      Math.abs(one.found - one.expected) <= Math.max(margin, 0.02 * one.expected),
      `${one.found} pixels instead of ${one.expected.toFixed(1)}, by ${one.blocks} blocks`,
    );
  }
  await picture('map');
  await page.getByRole('tab', { name: 'Table' }).click();
  // Other devices.
  const ranks = page.locator('.rank');
  for (let i = 0; i < (await ranks.count()); i++) {
    await ranks.nth(i).click();
    await drawn();
    equal('columns of another device that lack their highest point', (await page.evaluate(wrongColumns)).wrong, 0);
  }
  const names = await page.evaluate(codeNames);
  check('names of categories', names.names > 5, `${names.names} in the style sheet`);
  equal('names of categories in the form of code', names.found, []);
  const empty = await page.evaluate(emptyHeight);
  check('empty beside cards', empty <= 400, `${empty} pixels`);
  await everywhere();
  await page.emulateMedia({ media: 'screen' });
  await page.setViewportSize({ width: 390, height: 800 });
  await drawn();
  // A phone shows where each block was allocated, below the other cells of its row.
  for (const [id, cell] of [
    ['largest', 'td.below'],
    ['allocations', 'td.below[data-title="Allocated at"]'],
  ]) {
    const rows = await page.locator(`#${id} tbody tr`).count();
    const places = page.locator(`#${id} tbody ${cell}`);
    equal(`places of ${id} on a phone`, await places.count(), rows);
    if (rows > 0) {
      const [box, table] = [await places.first().boundingBox(), await page.locator(`#${id} .scroll`).boundingBox()];
      const isBeside = Math.abs(box.width - table.width) > 2;
      check(`place in ${id} on a phone`, box.height > 10 && !isBeside, JSON.stringify({ box, table }));
      const text = (await places.first().textContent()).trim();
      check(`text of a place in ${id} on a phone`, text !== '', 'nothing is shown');
    }
  }
  await page.setViewportSize({ width: 1400, height: 900 });
}
