// The views of a report that only some runs have: tracks of named ranges, stacking by rank and by custom category, and
// the cards about single figures. Figures are compared with summary.json and with the table of blocks.
import { readFileSync } from 'node:fs';

/** What `--expect` can name besides the fields of figures. */
export const VIEWS = ['ranges', 'rank', 'custom', 'pools'];

/** Runs inside the page: the fields and texts of all figures of the shown device. */
function figures() {
  return [...document.querySelectorAll('[data-field]')].map(one => ({
    field: one.dataset.field,
    value: Number(one.dataset.value),
    text: one.textContent,
  }));
}

/** A field of the summary: of a device, or `process.`, or from the top with `/`. */
function fieldOf(summary, process, device, field) {
  const [from, path] = field.startsWith('/')
    ? [summary, field.slice(1)]
    : field.startsWith('process.')
      ? [process, field.slice(8)]
      : [device, field];
  return path.split('.').reduce((value, name) => value?.[name], from);
}

/** Formats as the terminal report does. */
function sizeText(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let [value, unit] = [bytes, 0];
  while (value >= 999.5) [value, unit] = [value / 1024, unit + 1];
  return bytes === 0
    ? '0'
    : unit === 0
      ? `${bytes} B`
      : `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2)} ${units[unit]}`;
}

const highest = values => values.reduce((most, value) => Math.max(most, value), 0);
const countText = value => value.toString().replace(/\B(?=(\d{3})+$)/g, ',');

/** The rows of a table of blocks, without quoted commas. */
function blocksOf(file) {
  const [head, ...lines] = readFileSync(file, 'utf8').trim().split('\n');
  const at = name => head.split(',').indexOf(name);
  const [device, size, alloc, free, allocSeq, freeSeq] = [
    'device',
    'size',
    'alloc_ns',
    'free_ns',
    'alloc_seq',
    'free_seq',
  ].map(at);
  return lines
    .map(line => line.split(','))
    .map(row => ({
      device: Number(row[device]),
      size: Number(row[size]),
      alloc: [BigInt(row[alloc]), Number(row[allocSeq])],
      free: row[free] === '' ? null : [BigInt(row[free]), Number(row[freeSeq])],
    }));
}

/** The sums after each allocation and free of all processes, by time. */
function sumsOf(files) {
  const changes = files.flatMap((file, process) =>
    blocksOf(file)
      .filter(block => block.device >= 0)
      .flatMap(block => [
        { at: block.alloc, process, bytes: block.size },
        ...(block.free ? [{ at: block.free, process, bytes: -block.size }] : []),
      ]),
  );
  changes.sort((a, b) => (a.at[0] < b.at[0] ? -1 : a.at[0] > b.at[0] ? 1 : a.process - b.process || a.at[1] - b.at[1]));
  let sum = 0;
  return changes.map(one => (sum += one.bytes));
}

/** Drives these views. `tools` are those of report.mjs. */
export async function driveViews(page, summary, { expect, blocks }, { check, equal, drawn, wrongColumns, picture }) {
  await cards(page, summary, expect, { check, equal, drawn });
  await tracks(page, summary, expect, { check, equal, drawn, picture });
  await custom(page, expect, { check, equal, drawn });
  await pools(page, expect, { check, equal, drawn });
  await ranks(page, expect, blocks, { check, equal, drawn, wrongColumns, picture });
  await sizes(page, { check, equal, drawn });
}

/** The figures that the card of the whole device has of one point in time. */
function deviceParts({ device_memory: memory }, name) {
  if (!memory || (name === 'at_end' && memory.at_end.used_bytes === memory.at_peak.used_bytes)) return [];
  return memory[name].parts.map((_, at) => [`device_memory.${name}.parts.${at}.bytes`, true]);
}

/** The figures that the card of the launch has. */
function launchFigures(launch) {
  if (!launch || (launch.ranks.length < 2 && launch.issues.length === 0 && launch.shared_memory.length === 0))
    return [];
  const isShown = phase =>
    launch.ranks.some(rank => rank.phases.some(one => one.phase === phase && one.peak_bytes > 0));
  const ranks =
    launch.ranks.length < 2
      ? []
      : launch.ranks.flatMap((rank, at) => {
          const phases = rank.phases.flatMap(({ phase }, i) => (isShown(phase) ? [`phases.${i}.peak_bytes`] : []));
          return ['peak_bytes', 'reserved_bytes', ...phases].map(field => [`/launch.ranks.${at}.${field}`, true]);
        });
  const { imbalance } = launch;
  const matters =
    imbalance && imbalance.difference_bytes > 0 && imbalance.difference_bytes * 100 >= imbalance.max_bytes;
  const shared = launch.shared_memory.map((_, at) => [`/launch.shared_memory.${at}.peak_bytes`, true]);
  return [...ranks, ['/launch.imbalance.unused_bytes', matters], ...shared];
}

async function cards(page, summary, expect, { check, equal, drawn }) {
  const seen = new Set();
  const device = page.getByLabel('Device', { exact: true });
  const count = (await device.count()) > 0 ? await device.locator('option').count() : 1;
  for (let at = 0; at < count; at++) {
    if (count > 1) await device.selectOption(String(at));
    await drawn();
    const [process, ordinal] = await page.evaluate(() => {
      const { state, summary, devices } = window.memtraceReport;
      const entry = devices.find(one => one.device === state.now.device);
      return [summary.processes.findIndex(one => one.trace === entry.trace), state.now.device.info.device];
    });
    const described = summary.processes[process].devices.find(one => one.device === ordinal);
    const found = await page.evaluate(figures);
    for (const { field, value, text } of found) {
      const expected = fieldOf(summary, summary.processes[process], described, field);
      const isBytes = /bytes$/.test(field);
      if (expected !== value || text !== (isBytes ? sizeText(value) : countText(value))) {
        check(`figure ${field}`, false, `${value} as ${text} instead of ${expected}`);
      } else check(`figure ${field}`, true);
      seen.add(field);
    }
    // What the terminal prints of a device has a card.
    const needed = [
      ['larger_inputs.input_bytes', described.larger_inputs],
      ['growth_after_first_step.optimizer_state_bytes', described.growth_after_first_step],
      ['holders.held_bytes', described.holders?.largest.length],
      ['reserved.allocated_bytes', described.reserved],
      [
        'device_memory.at_end.used_bytes',
        described.device_memory &&
          described.device_memory.at_end.used_bytes !== described.device_memory.at_peak.used_bytes,
      ],
      ...['at_peak', 'at_end'].flatMap(one => deviceParts(described, one)),
      ...launchFigures(summary.launch),
    ];
    for (const [field, isThere] of needed)
      check(
        `card of ${field}`,
        Boolean(isThere) === found.some(one => one.field === field),
        isThere ? 'it is missing' : 'it is there',
      );
    const changes = await page.evaluate(() => ({
      code: [...document.querySelectorAll('#suggestions pre.code')].map(one => one.textContent),
      order: ['issues', 'suggestions', 'timeline']
        .filter(id => document.getElementById(id))
        .map(id => [id, document.getElementById(id).getBoundingClientRect().top]),
    }));
    const code = described.suggestions.filter(one => one.code.length > 0).map(one => one.code.join('\n'));
    equal('code of suggestions', changes.code, code);
    const tops = new Map(changes.order);
    for (const id of ['issues', 'suggestions'].filter(id => tops.has(id)))
      check(
        `place of ${id}`,
        (described.explained_oom != null) === tops.get(id) < tops.get('timeline'),
        'after an error it is above the timeline, else below',
      );
    // The sentences that the summary composed are there whole.
    const [state, path] =
      described.explained_oom == null
        ? [described.peak, 'peak']
        : [described.ooms[described.explained_oom].in_use, `ooms.${described.explained_oom}.in_use`];
    const shown = await page.locator('body').textContent();
    for (const [field, sentence] of [
      ['outlier_step.text', described.outlier_step?.text],
      [`${path}.growing_kv_cache.text`, state?.growing_kv_cache?.text],
    ].filter(([, sentence]) => sentence)) {
      check(`sentence ${field}`, shown.includes(sentence), `the page lacks "${sentence}"`);
      seen.add(field);
    }
  }
  if (count > 1) await device.selectOption('0');
  for (const field of expect.filter(one => !VIEWS.includes(one)))
    check(
      `expected figure ${field}`,
      [...seen].some(one => one.endsWith(field)),
      'the page does not have it',
    );
  equal('figures without a name', await page.evaluate(() => document.querySelectorAll('[data-field=""]').length), 0);
}

async function tracks(page, summary, expect, { check, equal, drawn, picture }) {
  await page.locator('#timeline select').nth(0).selectOption('category');
  await page.locator('#timeline select').nth(1).selectOption('order');
  await page.locator('#timeline').getByRole('button', { name: 'Whole run' }).click();
  await drawn();
  const all = await page.evaluate(() => {
    const { state, timeline } = window.memtraceReport;
    const { device } = state.now;
    const { ranges } = device.process;
    const levels = ranges.of(device.process.devices.indexOf(device));
    const before = seq => {
      let total = 0;
      for (let point = 0; point < device.points && device.pointSeq[point] < seq; point++) total = device.total[point];
      return total;
    };
    return Array.from({ length: ranges.count }, (_, range) => {
      const inside = [...device.pointSeq].flatMap((seq, at) =>
        seq > ranges.from[range] && seq < ranges.to[range] ? [device.total[at]] : [],
      );
      const [start, end] = [before(ranges.from[range]), before(ranges.to[range])];
      return {
        name: ranges.name(range),
        levels: [levels.start[range], levels.peak[range], levels.end[range]],
        expected: [start, Math.max(start, ...inside), end],
        track: ranges.track[range],
        extent: timeline.tracks.extent(range),
        isComplete: !device.info.rest,
      };
    });
  });
  if (expect.includes('ranges')) check('named ranges', all.length > 0, 'the page has none');
  if (all.length === 0) return;
  for (const one of all.filter(one => one.isComplete)) equal(`bytes around ${one.name}`, one.levels, one.expected);
  const device = await page.evaluate(() => {
    const { state, devices } = window.memtraceReport;
    return { trace: devices.find(one => one.device === state.now.device).trace, device: state.now.device.info.device };
  });
  const labels = summary.processes
    .find(one => one.trace === device.trace)
    .devices.find(one => one.device === device.device).labels;
  const leftOut = await page.evaluate(() => window.memtraceReport.state.now.device.process.ranges.leftOut);
  for (const label of labels.filter(() => leftOut === 0)) {
    const isIn = name =>
      label.name.endsWith('*')
        ? new RegExp(`^${label.name.slice(0, -1).replace(/[.*+?^${}()|[\]\\]/g, '\\$&')}\\d+$`).test(name)
        : name === label.name;
    const own = all.filter(one => isIn(one.name));
    equal(
      `ranges of ${label.name}`,
      [own.length, Math.max(...own.map(one => one.levels[1]))],
      [label.times, label.peak_bytes],
    );
  }
  // The pointer reads a range, a click selects it.
  const widest = all.reduce(
    (best, one, at) => (one.extent[1] - one.extent[0] > all[best].extent[1] - all[best].extent[0] ? at : best),
    0,
  );
  const canvas = page.locator('#timeline canvas');
  const place = async range => {
    await page.evaluate(() =>
      document.querySelector('#timeline').scrollIntoView({ block: 'center', behavior: 'instant' }),
    );
    const box = await canvas.boundingBox();
    const [x, y] = await page.evaluate(at => {
      const { timeline } = window.memtraceReport;
      const { from, to, left, width } = timeline.picture.geometry;
      const [low, high] = timeline.tracks.extent(at);
      const middle = (Math.max(low, from) + Math.min(high, to)) / 2;
      return [
        left + ((middle - from) / (to - from)) * width,
        timeline.viewport.tracksTop + 6 + 16 * timeline.tracks.ranges.track[at] + 7,
      ];
    }, range);
    return [box.x + x, box.y + y];
  };
  await page.mouse.move(...(await place(widest)));
  await drawn();
  const readout = await page.locator('#timeline .readout').textContent();
  const [start, peak, end] = all[widest].levels;
  const text = `${all[widest].name} (`;
  check(
    'range under the pointer',
    readout.startsWith(text) &&
      readout.includes(`${sizeText(start)} before, peak ${sizeText(peak)}, ${sizeText(end)} after`),
    `${readout} for ${text}`,
  );
  await page.mouse.click(...(await place(widest)));
  await drawn();
  const selected = () => page.evaluate(() => window.memtraceReport.timeline.tracks.selected);
  equal('selected range', await selected(), widest);
  const facts = page.locator('#timeline .range');
  check('facts of the range', (await facts.textContent()).startsWith(`Range ${text}`), await facts.textContent());
  const point = await page.evaluate(
    () => window.memtraceReport.state.now.device.total[window.memtraceReport.state.now.point],
  );
  if (all[widest].isComplete) equal('the selected point is the peak of the range', point, peak);
  await picture('range', false);
  // A drawn track has more than the background.
  const ink = await page.evaluate(() => {
    const { timeline } = window.memtraceReport;
    const canvas = document.querySelector('#timeline canvas');
    const { ratio, left, width } = timeline.picture.geometry;
    const data = canvas
      .getContext('2d')
      .getImageData(
        left * ratio,
        (timeline.viewport.tracksTop + 6) * ratio,
        width * ratio,
        timeline.tracks.ranges.threads.length * 16 * ratio,
      ).data;
    return data.reduce((sum, value, at) => sum + (at % 4 === 3 && value > 0 ? 1 : 0), 0);
  });
  check('drawn tracks', ink > 0, 'nothing is drawn');
  // Buttons and keys.
  await facts.getByRole('button', { name: 'Zoom to it' }).click();
  await drawn();
  const [from, to] = await page.evaluate(() => [
    window.memtraceReport.timeline.picture.geometry.from,
    window.memtraceReport.timeline.picture.geometry.to,
  ]);
  const [low, high] = all[widest].extent;
  check(
    'zoom to a range',
    from <= low && to >= high && to - from <= Math.max(1.2 * (high - low), 10),
    `${from} to ${to} for ${low} to ${high}`,
  );
  await facts.getByRole('button', { name: 'Compare its end' }).click();
  await drawn();
  equal('comparison of a range', await page.textContent('#allocations h2'), 'Changes between two points');
  const change = await page.evaluate(() => {
    const { point, base, device } = window.memtraceReport.state.now;
    return device.total[point] - device.total[base];
  });
  if (all[widest].isComplete && start > 0) equal('change in a range', change, end - start);
  await page.locator('#allocations').getByRole('button', { name: 'End the comparison' }).click();
  await canvas.focus();
  await page.keyboard.press('Home');
  await page.keyboard.press(']');
  await drawn();
  equal('the next range', await selected(), (widest + 1) % all.length);
  await page.keyboard.press('[');
  await page.keyboard.press('Escape');
  await drawn();
  equal('no range', await selected(), -1);
  check('no facts', await facts.isHidden(), 'they are shown');
  // The search finds names, the whole name first, and each in turn.
  const search = page.locator('#timeline').getByLabel('Search the timeline');
  for (const name of [...new Set(all.map(one => one.name).filter(one => one.trim() !== ''))].slice(0, 20)) {
    const found = [];
    const own = all.flatMap((one, at) => (one.name.toLowerCase() === name.toLowerCase() ? [at] : []));
    for (let turn = 0; turn < Math.min(own.length, 3); turn++) {
      await search.fill(name);
      await search.press('Enter');
      found.push(await selected());
    }
    equal(`search for ${name}`, found, own.slice(0, 3));
  }
  await search.fill('');
  // The card lists the names; a click selects a range.
  const link = page.locator('#ranges button.link').first();
  if ((await link.count()) > 0) {
    await facts.getByRole('button', { name: 'Clear' }).click();
    await link.focus();
    await page.keyboard.press('Enter');
    await drawn();
    check('a name of the card', (await selected()) >= 0, await link.textContent());
  }
  await facts.getByRole('button', { name: 'Clear' }).click();
  await page.locator('#timeline').getByRole('button', { name: 'Whole run' }).click();
}

async function custom(page, expect, { check, equal, drawn }) {
  const select = page.locator('#timeline select').nth(0);
  const has = (await select.locator('option[value=custom]').count()) > 0;
  if (expect.includes('custom')) check('custom categories', has, 'the page does not offer them');
  if (!has) return;
  await select.selectOption('custom');
  await page.locator('#timeline').getByRole('button', { name: 'Peak' }).click();
  await drawn();
  const found = await page.evaluate(() => {
    const { timeline, state, summary, devices } = window.memtraceReport;
    const { device } = state.now;
    const values = timeline.content.set.values(device.peak);
    const { trace } = devices.find(one => one.device === device);
    const described = summary.processes
      .find(one => one.trace === trace)
      .devices.find(one => one.device === device.info.device);
    const expected = described.peak.by_custom_category
      .filter(one => one.bytes > 0)
      .map(one => [one.custom_category ?? 'none of the rules', one.bytes]);
    // The table groups the blocks of a line and a category.
    const table = {};
    for (const block of device.live(device.peak)) {
      const name = device.process.custom(device.site[block]) ?? 'none of the rules';
      table[name] = (table[name] ?? 0) + device.size[block];
    }
    const sort = rows => rows.sort(([a], [b]) => (a < b ? -1 : 1));
    const sum = timeline.content.set.values(state.now.point).reduce((a, b) => a + b, 0);
    return {
      series: sort(
        timeline.content.set.series.map((one, at) => [one.label, values[at]]).filter(([, bytes]) => bytes > 0),
      ),
      expected: sort(expected),
      table: sort(Object.entries(table)),
      sum,
      total: device.total[state.now.point],
    };
  });
  equal('series by custom category at the peak', found.series, found.expected);
  equal('blocks by custom category at the peak', found.table, found.expected);
  equal('sum of the series by custom category', found.sum, found.total);
  const heads = await page.locator('#allocations th').allTextContents();
  const at = heads.findIndex(text => text.startsWith('Custom category'));
  check('column of custom categories', at >= 0, heads.join(', '));
  const cells = await page.locator(`#allocations tbody td:nth-child(${at + 1})`).allTextContents();
  const names = new Set(found.expected.map(([name]) => name));
  check(
    'cells of custom categories',
    cells.length > 0 && cells.every(text => names.has(text)),
    cells.slice(0, 5).join(', '),
  );
  // A name of the card searches the table.
  const name = await page.locator('#custom button.link').first().textContent();
  await page.locator('#custom button.link').first().click();
  await drawn();
  const matching = await page.locator(`#allocations tbody td:nth-child(${at + 1})`).allTextContents();
  check(
    'search for a custom category',
    matching.length > 0 && matching.every(text => text === name),
    `${matching.slice(0, 5)} for ${name}`,
  );
  await page.locator('#allocations').getByLabel('Search').fill('');
  await select.selectOption('category');
  await drawn();
}

/**
 * The ids of private memory pools in the list of live allocations, beside those of the summary's largest allocations.
 */
async function pools(page, expect, { check, equal, drawn }) {
  await page.locator('#timeline').getByRole('button', { name: 'Peak' }).click();
  const grouping = page.locator('#allocations').getByLabel('Group blocks');
  await grouping.check();
  await drawn();
  const found = await page.evaluate(() => {
    const { state, summary, devices } = window.memtraceReport;
    const { device } = state.now;
    const { trace } = devices.find(one => one.device === device);
    const { peak } = summary.processes
      .find(one => one.trace === trace)
      .devices.find(one => one.device === device.info.device);
    const plural = name => device.process.categories.find(one => one.name === name).plural;
    const [blocks, expected] = [{}, {}];
    for (const block of device.live(device.peak)) {
      const text = device.process.categoryText(device.site[block]);
      if (text.endsWith(')')) blocks[text] = (blocks[text] ?? 0) + device.size[block];
    }
    const groups = peak?.largest_allocations ?? [];
    for (const one of groups.filter(one => one.memory_pool)) {
      const text = `${plural(one.category)} ${one.memory_pool}`;
      expected[text] = (expected[text] ?? 0) + one.bytes;
    }
    const sort = rows => Object.entries(rows).sort(([a], [b]) => (a < b ? -1 : 1));
    // The summary lists the 20 largest groups, and a long recording only its largest blocks.
    return { blocks: sort(blocks), expected: sort(expected), isComplete: groups.length < 20 && !device.info.rest };
  });
  if (expect.includes('pools'))
    check('memory pools', found.isComplete && found.expected.length > 1, JSON.stringify(found));
  if (!found.isComplete || found.expected.length === 0) return;
  equal('blocks by memory pool at the peak', found.blocks, found.expected);
  const category = async () => {
    const heads = await page.locator('#allocations th').allTextContents();
    return page
      .locator(`#allocations tbody td:nth-child(${heads.findIndex(text => text.startsWith('Category')) + 1})`)
      .allTextContents();
  };
  const cells = await category();
  equal(
    'cells of memory pools',
    [...new Set(cells.filter(text => text.endsWith(')')))].sort(),
    found.expected.map(([text]) => text),
  );
  const [text] = found.expected.at(-1);
  await page.locator('#allocations').getByLabel('Search').fill(text);
  await drawn();
  const matching = await category();
  check(
    'search for a memory pool',
    matching.length > 0 && matching.every(one => one === text),
    `${matching.slice(0, 5)} for ${text}`,
  );
  await page.locator('#allocations').getByLabel('Search').fill('');
  await drawn();
}

async function ranks(page, expect, blocks, { check, equal, drawn, wrongColumns, picture }) {
  const select = page.locator('#timeline select').nth(0);
  const has = (await select.locator('option[value=rank]').count()) > 0;
  if (expect.includes('rank')) check('stacking by rank', has, 'the page does not offer it');
  if (!has) return;
  await select.selectOption('rank');
  for (const axis of ['order', 'time', 'steps']) {
    await page.locator('#timeline select').nth(1).selectOption(axis);
    await drawn();
    equal(`columns by rank over ${axis} that lack their highest point`, (await page.evaluate(wrongColumns)).wrong, 0);
  }
  await picture('ranks', false);
  const found = await page.evaluate(() => {
    const { timeline } = window.memtraceReport;
    const sum = timeline.content.device;
    const totals = [...sum.total];
    const wrong = totals.filter((total, point) => sum.values(point).reduce((a, b) => a + b, 0) !== total).length;
    const random = Array.from({ length: 200 }, (_, at) => (at * 7919) % sum.points);
    // Each part is the level of its device, in whatever order the points are asked for.
    const parts = random.filter(point =>
      sum.devices.some(
        (device, rank) =>
          !sum.info.rest &&
          sum.values(point)[rank] !== 0 &&
          device.total[sum.place(point, device).point] !== sum.values(point)[rank],
      ),
    ).length;
    const back = random.filter(point =>
      sum.devices.some(device => {
        const place = sum.place(point, device);
        return sum.values(point)[sum.devices.indexOf(device)] !== 0 && sum.pointAt(place) > point;
      }),
    ).length;
    const times = sum.pointTime.every((time, at) => at === 0 || time >= sum.pointTime[at - 1]);
    return {
      totals,
      wrong,
      parts,
      back,
      times,
      peak: sum.total[sum.peak],
      isComplete: !sum.info.rest,
      points: sum.devices.reduce((count, device) => count + device.points, 0),
    };
  });
  equal('sums that differ from their parts', [found.wrong, found.parts, found.back], [0, 0, 0]);
  check('times of the sum', found.times, 'they decrease');
  equal('peak of the sum', found.peak, highest(found.totals));
  if (blocks.length > 0) {
    const expected = sumsOf(blocks);
    equal('peak of the sum by the table of blocks', found.peak, highest(expected));
    if (found.isComplete) {
      const wrong = expected.filter((sum, at) => found.totals[at] !== sum).length;
      equal('sums that differ from the table of blocks', [wrong, found.totals.length], [0, expected.length]);
    }
  }
  if (found.isComplete) equal('points of the sum', found.totals.length, found.points);
  // A click on an area shows the live allocations of that rank, and keeps the picture.
  await page.locator('#timeline select').nth(1).selectOption('order');
  await page.locator('#timeline').getByRole('button', { name: 'Peak' }).click();
  await drawn();
  const canvas = page.locator('#timeline canvas');
  await page.evaluate(() =>
    document.querySelector('#timeline').scrollIntoView({ block: 'center', behavior: 'instant' }),
  );
  const box = await canvas.boundingBox();
  const count = await page.evaluate(() => window.memtraceReport.timeline.content.device.devices.length);
  for (let rank = 0; rank < count; rank++) {
    const target = await page.evaluate(at => {
      const { timeline } = window.memtraceReport;
      const sum = timeline.content.device;
      const { from, to, left, width, top, height, ceiling } = timeline.picture.geometry;
      const values = sum.values(sum.peak);
      const below = values.slice(0, at).reduce((a, b) => a + b, 0);
      const x = left + ((timeline.axis.position[sum.peak] - from) / (to - from)) * width;
      if (values[at] === 0) return null;
      // Neighboring points share a pixel, and the areas at one of them can be others.
      const bytes = below + values[at] / 2;
      const owner = values => {
        let sum = 0;
        return values.findIndex(value => {
          sum += value;
          return bytes < sum;
        });
      };
      const ranks = [];
      for (let point = 0; point < sum.points; point++) {
        const position = left + ((timeline.axis.position[point] - from) / (to - from)) * width;
        if (Math.abs(position - x) <= 1.5) ranks.push(owner(sum.values(point)));
      }
      return { x, y: top + height * (1 - bytes / ceiling), ranks };
    }, rank);
    if (!target) continue;
    const selected = () =>
      page.evaluate(() => {
        const { timeline, state } = window.memtraceReport;
        return [timeline.content.device.devices.indexOf(state.now.device), state.now.division];
      });
    const [before] = await selected();
    await page.mouse.click(box.x + target.x, box.y + target.y);
    await drawn();
    const [clicked, division] = await selected();
    // Beside a short peak the pixel can be above all areas. A click there selects nothing.
    if (target.ranks.includes(-1)) target.ranks.push(before);
    check(
      `click on the area of rank ${rank}`,
      (clicked === rank || target.ranks.includes(clicked)) && division === 'rank',
      `${clicked}, ${division} instead of ${target.ranks}`,
    );
  }
  await page.locator('#timeline .legend button').first().focus();
  await page.keyboard.press('Enter');
  await drawn();
  const last = await page.evaluate(() =>
    window.memtraceReport.timeline.content.device.devices.indexOf(window.memtraceReport.state.now.device),
  );
  equal('the legend chooses a rank', last, count - 1);
  await select.selectOption('category');
  await drawn();
}

/** At a phone's width and on paper, nothing is cut; the keyboard reaches everything. */
async function sizes(page, { check, equal, drawn }) {
  const size = page.viewportSize();
  const cut = () => {
    // A place that scrolls, and the parts of a flame graph, which have their texts as titles.
    const scrolls = one => one.closest('.scroll, .flame, .command, .tag') !== null;
    const wide = [];
    for (const one of document.querySelectorAll('main *, header *')) {
      const box = one.getBoundingClientRect();
      if (box.width === 0 || scrolls(one) || one.closest('[hidden]')) continue;
      if (box.right > document.documentElement.clientWidth + 1 || box.left < -1)
        wide.push(`${one.tagName} ${one.className} ${one.textContent.slice(0, 40)}`);
      const style = getComputedStyle(one);
      if (style.overflowX === 'hidden' && one.scrollWidth > one.clientWidth + 1)
        wide.push(`text of ${one.tagName} ${one.className}`);
    }
    return wide.slice(0, 5);
  };
  await page.setViewportSize({ width: 390, height: 800 });
  await drawn();
  equal('cut at a phone\u2019s width', await page.evaluate(cut), []);
  // A4 paper with the margins of a browser.
  await page.emulateMedia({ media: 'print' });
  await page.setViewportSize({ width: 718, height: 1000 });
  await drawn();
  equal('cut on paper', await page.evaluate(cut), []);
  const scrolled = await page.evaluate(() =>
    [...document.querySelectorAll('.scroll')]
      .filter(one => one.scrollWidth > one.clientWidth + 1)
      .map(one => one.closest('section')?.id ?? ''),
  );
  equal('tables that paper cuts', scrolled, []);
  const broken = await page.evaluate(() => {
    const words = [];
    for (const cell of document.querySelectorAll('.scroll th, .scroll td.n, .scroll td .labeled')) {
      const text = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      while (text.nextNode()) {
        for (const word of text.currentNode.data.matchAll(/[^\s-]+/g)) {
          const range = document.createRange();
          range.setStart(text.currentNode, word.index);
          range.setEnd(text.currentNode, word.index + word[0].length);
          if (new Set([...range.getClientRects()].map(rect => rect.top)).size > 1) words.push(word[0]);
        }
      }
    }
    return words.slice(0, 5);
  });
  equal('words that paper breaks', broken, []);
  await page.emulateMedia({ media: 'screen' });
  await page.setViewportSize(size);
  await drawn();
  // Tab visits everything that can be operated, and each has a name. Tab scrolls, so the pointer leaves the timeline.
  await page.mouse.move(1, 1);
  await drawn();
  const operated = await page.evaluate(() => {
    const visible = one => one.checkVisibility() && one.getClientRects().length > 0 && !one.disabled;
    const all = [...document.querySelectorAll('button, select, input, summary, a[href], canvas[tabindex]')].filter(
      visible,
    );
    all.forEach((one, at) => (one.dataset.tab = String(at)));
    const name = one =>
      one.getAttribute('aria-label') ??
      (one.textContent.trim() || one.closest('label')?.textContent.trim() || one.title);
    return { count: all.length, unnamed: all.filter(one => !name(one)).map(one => one.outerHTML.slice(0, 80)) };
  });
  equal('operated without a name', operated.unnamed, []);
  await page.locator('[data-tab="0"]').focus();
  const most = Math.min(operated.count, 400);
  const visited = new Set(['0']);
  // A table that scrolls sideways is a stop too.
  for (let step = 0; step < 2 * most && visited.size < most; step++) {
    await page.keyboard.press('Tab');
    const at = await page.evaluate(() => document.activeElement?.dataset.tab ?? '');
    if (at !== '') visited.add(at);
  }
  const missed = await page.evaluate(
    reached =>
      [...document.querySelectorAll('[data-tab]')]
        .filter(one => !reached.includes(one.dataset.tab))
        .map(one => one.outerHTML.slice(0, 120)),
    [...visited],
  );
  check(
    'the keyboard reaches everything',
    visited.size >= most,
    `${visited.size} of ${operated.count}, without ${missed.slice(0, 4).join(' ')}`,
  );
}
