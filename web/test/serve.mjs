#!/usr/bin/env node
// Starts `memtrace open RUN --serve` on a long recording and drives the page in headless Chromium: zooms until it loads
// the events of a window, and compares totals, categories and blocks with `memtrace export` of the same step. Exit 0:
// all of it is right. 1: something is not. 2: the check could not run.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inflateSync } from 'node:zlib';
import { bundled } from './bundle.mjs';
import { commandLine, fail, harness } from './harness.mjs';

const USAGE = `usage: node serve.mjs RUN --memtrace PATH [options]
  RUN               a recording with so many events that the page lacks some blocks, and with steps
  --memtrace PATH   the binary
  --step N          the step to zoom into (default 86)
  --out DIR         where to put pictures of the page
  --chromium PATH   (default: $CHROMIUM, then /usr/bin/chromium)`;

const { path: run, opt } = commandLine(
  USAGE,
  { memtrace: { type: 'string' }, step: { type: 'string', default: '86' } },
  { required: ['memtrace'], files: ['memtrace'] },
);
/** How long the analysis of a window may take, in milliseconds. */
const WAIT = 240_000;
const format = await bundled('format.ts');
const { Process } = await bundled('data/model.ts');

const truth = exportedStep();
const server = spawn(opt.memtrace, ['open', run, '--serve'], {
  stdio: ['pipe', 'pipe', 'inherit'],
  env: { ...process.env, BROWSER: '', DISPLAY: '', WAYLAND_DISPLAY: '' },
});
process.on('exit', () => server.kill('SIGKILL'));
const ended = once(server, 'exit');
const address = await served();

let inFlight = 0;
let mostInFlight = 0;
const windows = [];
const isWindow = url => url.startsWith(`${address}window?`);
const { page, open, note, check, equal, picture, drawn, everywhere, end } = await harness({
  address,
  executable: opt.chromium,
  out: opt.out,
  height: 1000,
  mayRequest: isWindow,
});
page.on('request', request => {
  if (!isWindow(request.url())) return;
  const { searchParams } = new URL(request.url());
  windows.push([Number(searchParams.get('from')), Number(searchParams.get('to'))]);
  inFlight += 1;
  mostInFlight = Math.max(mostInFlight, inFlight);
});
for (const event of ['requestfinished', 'requestfailed'])
  page.on(event, request => isWindow(request.url()) && (inFlight -= 1));
let loadMs = 0;
try {
  loadMs = await open(() => window.memtraceReport || document.querySelector('main strong.bad'));
  await before();
  await loaded();
  await axes();
  await selection();
  await elsewhere();
  await largeWindow();
  await everywhere();
  await errors();
} catch (e) {
  note('harness', e.stack ?? e.message);
}
server.kill('SIGINT');
equal('exit status of the server', await ended, [0, null]);
await end({ load: { ms: loadMs } });

/** The URL that the server prints. */
async function served() {
  let text = '';
  for await (const chunk of server.stdout) {
    text += chunk;
    const found = /http:\/\/127\.0\.0\.1:\d+\/[0-9a-f]+\//.exec(text);
    if (found) return found[0];
  }
  fail(`memtrace open --serve ended: ${text}`);
}

/** The blocks of the step by `memtrace export`, and the state after each of its events. */
function exportedStep() {
  const folder = mkdtempSync(join(tmpdir(), 'memtrace-serve-'));
  const file = join(folder, 'step.csv');
  execFileSync(opt.memtrace, ['export', run, '--to', 'csv', '--steps', opt.step, '-o', file], {
    stdio: ['ignore', 'ignore', 'ignore'],
  });
  const [head, ...rows] = readFileSync(file, 'utf8')
    .trimEnd()
    .split('\n')
    .map(row => row.split(','));
  rmSync(folder, { recursive: true });
  const at = name => head.indexOf(name);
  const number = text => (text === '' ? Infinity : Number(text));
  const blocks = rows.map(row => ({
    size: Number(row[at('size')]),
    alloc: number(row[at('alloc_seq')]),
    free: number(row[at('free_seq')]),
    category: row[at('category')],
  }));
  const changes = blocks
    .flatMap(block => [
      { seq: block.alloc, block, sign: 1 },
      { seq: block.free, block, sign: -1 },
    ])
    .filter(change => change.seq < Infinity);
  changes.sort((a, b) => a.seq - b.seq);
  // The step begins with its first block: what was allocated before was in use at its start.
  const first = Math.min(...rows.filter(row => row[at('step')] === opt.step).map(row => Number(row[at('alloc_seq')])));
  const states = new Map();
  let [total, count] = [0, 0];
  const categories = {};
  for (const { seq, block, sign } of changes) {
    total += sign * block.size;
    count += sign;
    categories[block.category] = (categories[block.category] ?? 0) + sign * block.size;
    if (seq >= first) states.set(seq, { total, count, categories: { ...categories } });
  }
  return { first, last: Math.max(...states.keys()), states };
}

/** What the page draws and has selected. */
function now() {
  return page.evaluate(() => {
    const { timeline, state } = window.memtraceReport;
    const { device, point } = state.now;
    return {
      window: timeline.content.device.window,
      complete: timeline.content.device.info.rest === null,
      geometry: timeline.picture.geometry,
      selected: device.pointSeq[point],
      selectedWindow: device.window,
      loading: timeline.windows.element.textContent,
      about: timeline.texts.note.textContent,
      readout: timeline.texts.readout.textContent,
      allocations: document.querySelector('#allocations .note').textContent,
    };
  });
}

async function searchFor(text) {
  const field = page.getByLabel('Search the timeline');
  await field.fill(text);
  await field.press('Enter');
  await drawn();
}

/** Waits until the drawn device is a window with all events, and nothing is being loaded. */
async function waitForDetails() {
  await page.waitForFunction(
    () => {
      const { timeline } = window.memtraceReport;
      return timeline.content.device.window && timeline.windows.element.textContent === '';
    },
    null,
    { timeout: WAIT },
  );
  await drawn();
}

/** Before a zoom, nothing is loaded. */
async function before() {
  await drawn();
  const { window, about, allocations } = await now();
  equal('the whole run is drawn first', window, null);
  check('the note says how to load more', about.includes('Zoom in to load all events and blocks of a part.'), about);
  check('blocks are left out at first', /smaller or shorter-lived blocks?/.test(about), about);
  check('the first state', allocations.includes('blocks listed'), allocations);
  equal('requests before a zoom', windows.length, 0);
  // A part with more points than columns needs no more events.
  await page.evaluate(() => {
    const { timeline } = window.memtraceReport;
    timeline.zoomTo(timeline.axis.begin, timeline.axis.begin + (timeline.axis.end - timeline.axis.begin) / 2);
  });
  await page.waitForTimeout(600);
  equal('requests for half of the run', windows.length, 0);
}

/** Zooms into a step: the page loads its events, and shows what the export has. */
async function loaded() {
  await searchFor(`step ${opt.step}`);
  await page.waitForFunction(() => window.memtraceReport.timeline.windows.element.textContent !== '', null, {
    timeout: WAIT,
  });
  const { loading } = await now();
  check('progress', /^Loading events [\d,]+ to [\d,]+$/.test(loading), loading);
  equal('role of the progress', await page.locator('#timeline [role=status]').last().getAttribute('role'), 'status');
  await waitForDetails();
  equal('requests for one step', windows.length, 1);
  const { window, complete, about, selectedWindow } = await now();
  equal('the drawn window', window, windows[0]);
  equal('the selected state is in the window', selectedWindow, windows[0]);
  check('all blocks are there', complete && about.includes('with all blocks'), about);
  check(
    'the step is in the window',
    window[0] <= truth.first && truth.last <= window[1],
    `${window} for ${truth.first} to ${truth.last}`,
  );
  await picture('loaded', false);
  const found = await page.evaluate(
    ([first, last]) => {
      const { timeline } = window.memtraceReport;
      const { device: shown, set } = timeline.content;
      const states = [];
      for (let point = 0; point < shown.points; point++) {
        const seq = shown.pointSeq[point];
        if (seq < first || seq > last) continue;
        const values = set.values(point);
        const categories = Object.fromEntries(
          set.series
            .map((series, i) => [series.color.replace('category-', ''), values[i]])
            .filter(([, bytes]) => bytes > 0),
        );
        states.push([seq, shown.total[point], shown.live(point).length, categories]);
      }
      return states;
    },
    [truth.first, truth.last],
  );
  equal(
    'events of the step',
    found.map(([seq]) => seq),
    [...truth.states.keys()],
  );
  const sorted = categories =>
    JSON.stringify(
      Object.entries(categories)
        .filter(([, bytes]) => bytes > 0)
        .sort(),
    );
  const wrong = found.filter(([seq, total, count, categories]) => {
    const state = truth.states.get(seq);
    return !state || state.total !== total || state.count !== count || sorted(state.categories) !== sorted(categories);
  });
  equal('states that differ from the export', wrong.slice(0, 3), []);
  // Zoom in until each event has its own columns: what is on the screen is the state at the pointer.
  const middle = [...truth.states.keys()][Math.floor(truth.states.size / 2)];
  await page.evaluate(seq => window.memtraceReport.timeline.zoomTo(seq - 20, seq + 20), middle);
  await drawn();
  equal('requests for a part of the window', windows.length, 1);
  await picture('events', false);
  await onScreen();
}

/** The state that holds at an event, by the export. */
function stateAt(seq) {
  const seqs = [...truth.states.keys()];
  return truth.states.get(seqs.findLast(one => one <= seq));
}

/** Points and clicks at several places of the plot. */
async function onScreen() {
  const canvas = page.locator('#timeline canvas');
  await canvas.scrollIntoViewIfNeeded();
  const box = await canvas.boundingBox();
  const { geometry } = await now();
  for (const part of [0.05, 0.21, 0.37, 0.5, 0.64, 0.83, 0.97]) {
    const x = geometry.left + part * geometry.width;
    await page.mouse.move(box.x + x, box.y + 150);
    await drawn();
    const hovered = await now();
    const seq = Number(/event ([\d,]+)/.exec(hovered.readout)[1].replaceAll(',', ''));
    const state = stateAt(seq);
    check(
      'read-out',
      hovered.readout.startsWith(`${format.size(state.total)} allocated`),
      `${hovered.readout}, not ${format.size(state.total)}`,
    );
    // The event is the last one before the pointer.
    const pointed = geometry.from + part * (geometry.to - geometry.from);
    check('event at the pointer', Math.abs(seq - pointed) < 3, `${seq} at ${pointed}`);
    const legend = await page.locator('#timeline .legend b').allTextContents();
    const bytes = Object.values(state.categories)
      .filter(one => one > 0)
      .map(format.size)
      .sort();
    equal('legend', legend.filter(text => text !== '0').sort(), bytes);
    // The height of the column is the total.
    const height = await page.evaluate(x => {
      const { image, geometry } = window.memtraceReport.timeline.picture;
      const column = Math.floor((x - geometry.left) * geometry.ratio);
      let row = 0;
      while (row < image.height && image.data[(row * image.width + column) * 4 + 3] === 0) row += 1;
      return ((image.height - row) / image.height) * geometry.ceiling;
    }, x);
    const pixel = geometry.ceiling / (geometry.height * geometry.ratio);
    check('height of the column', Math.abs(height - state.total) <= 1.5 * pixel, `${height} for ${state.total}`);
    await page.mouse.click(box.x + x, box.y + 150);
    await drawn();
    const clicked = await now();
    equal('selected event', clicked.selected, seq);
    check(
      'all blocks',
      clicked.allocations.includes(`${format.number(state.count, 'block')} listed.`),
      `${clicked.allocations}, not ${state.count}`,
    );
    check(
      'total',
      clicked.allocations.startsWith(`${format.size(state.total)} at event ${format.count(seq)}`),
      clicked.allocations,
    );
  }
  // The table of single blocks has their sizes in order, and all of them.
  await page.getByLabel('Group blocks of one line and category').uncheck();
  const rows = await page.locator('#allocations tbody tr').count();
  const left = await page.locator('#allocations .scroll > button').textContent();
  const more = Number(/\(([\d,]+) rows? /.exec(left)?.[1]?.replaceAll(',', '') ?? 0);
  equal('rows of the table', rows + more, stateAt((await now()).selected).count);
  await page.getByLabel('Group blocks of one line and category').check();
}

/** The same events are drawn over steps and over time, without another request. */
async function axes() {
  const { selected } = await now();
  for (const axis of ['steps', 'time', 'order']) {
    await page.getByLabel('over', { exact: true }).selectOption(axis);
    await searchFor(`step ${opt.step}`);
    await waitForDetails();
    const { window, geometry } = await now();
    check(`window over ${axis}`, window[0] <= truth.first && truth.last <= window[1], String(window));
    const positions = await page.evaluate(() => {
      const { axis, device: shown } = window.memtraceReport.timeline.content;
      return [
        axis.position.length,
        shown.points,
        axis.position.every((position, at) => at === 0 || position >= axis.position[at - 1]),
      ];
    });
    equal(`positions over ${axis}`, [positions[0], positions[2]], [positions[1], true]);
    check(`the step is visible over ${axis}`, geometry.to > geometry.from, JSON.stringify(geometry));
  }
  equal('requests for other axes', windows.length, 1);
  await searchFor(String(selected));
  equal('search for an event', (await now()).selected, selected);
}

/** The selection stays when the whole run is drawn again; two points of the window can be compared. */
async function selection() {
  const { selected } = await now();
  await page.getByRole('button', { name: 'Whole run' }).click();
  await drawn();
  const { window, selected: after, allocations } = await now();
  equal('the whole run is drawn again', window, null);
  equal('the selected event stays', after, selected);
  check(
    'with all blocks',
    allocations.includes(`${format.number(stateAt(selected).count, 'block')} listed.`),
    allocations,
  );
  await page.evaluate(seq => window.memtraceReport.timeline.zoomTo(seq - 20, seq + 20), selected);
  await drawn();
  const canvas = page.locator('#timeline canvas');
  const box = await canvas.boundingBox();
  await page.keyboard.down('Shift');
  await page.mouse.click(box.x + box.width * 0.9, box.y + 150);
  await page.keyboard.up('Shift');
  await drawn();
  const { point, base, text } = await page.evaluate(() => {
    const { now } = window.memtraceReport.state;
    return {
      point: now.device.pointSeq[now.point],
      base: now.device.pointSeq[now.base],
      text: document.querySelector('#allocations .note').textContent,
    };
  });
  equal('the compared state', point, selected);
  check('the difference', text.includes(`: ${format.signedSize(stateAt(point).total - stateAt(base).total)}.`), text);
  await page.getByRole('button', { name: 'End the comparison' }).click();
}

/** Somewhere else: the whole run is drawn until its events have come. One request at a time. */
async function elsewhere() {
  const count = windows.length;
  // The first window is being read until the reader has moved on.
  let answer;
  const moved = new Promise(done => (answer = done));
  await page.route(
    url => isWindow(url.href),
    async route => {
      await moved;
      await route.continue();
    },
    { times: 1 },
  );
  await searchFor('step 20');
  equal('the whole run is drawn meanwhile', (await now()).window, null);
  await page.waitForFunction(() => window.memtraceReport.timeline.windows.element.textContent !== '', null, {
    timeout: WAIT,
  });
  await searchFor('step 150');
  await page.waitForTimeout(600);
  await searchFor('step 60');
  await page.waitForTimeout(600);
  answer();
  await waitForDetails();
  const { window } = await now();
  const range = await page.evaluate(() => {
    const { timeline } = window.memtraceReport;
    return [timeline.viewport.from, timeline.viewport.to];
  });
  check('the last place is drawn', window[0] <= range[0] && range[1] <= window[1], `${window} for ${range}`);
  equal('requests at the same time', mostInFlight, 1);
  equal('requests for the places where the reader stayed', windows.length - count, 2);
  // Back to a window that is still there.
  await searchFor(`step ${opt.step}`);
  equal('the first window is kept', (await now()).window, windows[0]);
  await page.keyboard.press('Escape');
}

/** A window with too many events has points of its own, exact and closer than those of the page. */
async function largeWindow() {
  const [first, last] = [200_000, 3_200_000];
  const answer = await fetch(`${address}window?process=0&device=0&from=${first}&to=${last}`);
  equal('status', answer.status, 200);
  const [device] = new Process(new Uint8Array(inflateSync(new Uint8Array(await answer.arrayBuffer())))).devices;
  check(
    'points',
    device.info.rest !== null && device.points > 10_000 && device.points <= 30_001,
    `${device.points} points`,
  );
  check(
    'range',
    device.pointSeq[1] >= first && device.pointSeq.at(-1) <= last,
    `${device.pointSeq[1]} to ${device.pointSeq.at(-1)}`,
  );
  let compared = 0;
  for (let point = 0; point < device.points; point++) {
    const state = truth.states.get(device.pointSeq[point]);
    if (!state) continue;
    compared += 1;
    const live =
      device.live(point).reduce((sum, block) => sum + device.size[block], 0) +
      device.rest.reduce((sum, bytes) => sum + bytes[point], 0);
    equal('a point of a large window', [device.total[point], live], [state.total, state.total]);
  }
  check('points that the export has', compared > 10, String(compared));
}

/** Errors of the server are shown once, in words, and the reader can try again. */
async function errors() {
  const other = await page.context().browser().newPage();
  await other.goto(address);
  await other.waitForFunction(() => window.memtraceReport);
  let asked = 0;
  await other.route('**/window?*', route => {
    asked += 1;
    return asked === 1
      ? route.fulfill({ status: 500, contentType: 'text/plain', body: 'the disk is gone\n' })
      : route.abort();
  });
  const zoom = step => other.evaluate(n => window.memtraceReport.timeline.search(`step ${n}`), step);
  await zoom(30);
  const message = other.locator('#timeline .bad');
  await message.waitFor({ timeout: WAIT });
  equal('error', await message.textContent(), 'The server cannot read these events: the disk is gone.');
  await zoom(40);
  await other.waitForTimeout(700);
  equal('requests after an error', asked, 1);
  equal('messages', await message.count(), 1);
  await other.getByRole('button', { name: 'Try again' }).click();
  await other.waitForFunction(
    () => document.querySelector('#timeline .bad')?.textContent.includes('does not answer'),
    null,
    { timeout: WAIT },
  );
  equal(
    'error without a server',
    await message.textContent(),
    'The server does not answer. Is memtrace open --serve still running?',
  );
  equal('requests after another try', asked, 2);
  await other.close();
}
