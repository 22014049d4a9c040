/** The report of a run. */

import { dataOf } from '../data/decode';
import { extremesOf } from '../data/extremes';
import { type Device, Process } from '../data/model';
import { RankTotals } from '../data/rank_totals';
import type { DeviceSummary, ProcessSummary, Summary } from '../data/schema';
import type { Division } from '../data/series';
import { State } from '../data/state';
import { deviceName, explainedOom, type PageInfo, processName, serverOnly } from '../data/summary';
import { WindowLoader } from '../data/window_loader';
import { choice, el, replace } from '../dom';
import * as format from '../format';
import { Allocations } from '../views/allocations';
import { compileContexts, customCategories, holders } from '../views/details/in_use';
import { remarks } from '../views/details/remarks';
import { reserved } from '../views/details/reserved';
import * as tables from '../views/details/tables';
import { deviceMemory } from '../views/device_memory';
import * as explain from '../views/explain';
import * as graphs from '../views/graphs';
import { fillNav, header, type Part } from '../views/header';
import { hostMemory } from '../views/host_memory';
import { launchView } from '../views/launch';
import { linesView } from '../views/lines';
import { pools, xla } from '../views/pools';
import { ranksView } from '../views/ranks';
import { server } from '../views/server';
import { DIVISIONS } from '../views/timeline/choices';
import { Timeline } from '../views/timeline/timeline';

interface Entry {
  /** The first and the last event that the timeline shows first. */
  window: [number, number] | null;
  name: string;
  device: Device;
  process: ProcessSummary;
  summary: DeviceSummary;
}

/** Everything that the page shows, for tests and the benchmark. */
interface Exposed {
  summary: Summary;
  page: PageInfo;
  state: State;
  timeline: Timeline | null;
  /** The devices that the page shows, with the traces of their processes. */
  devices: { device: Device; trace: string }[];
  readyMs: number;
}

declare global {
  interface Window {
    memtraceReport?: Exposed;
  }
}

function facts(summary: Summary, page: PageInfo): string[] {
  const { run } = summary;
  const hosts = [...new Set(summary.processes.map(one => one.host))];
  return [
    run.started_ns === undefined
      ? ''
      : `${new Date(run.started_ns / 1e6).toISOString().slice(0, 16).replace('T', ' ')} UTC`,
    hosts.length === 1 ? (hosts[0] ?? '') : '',
    run.duration_ns === undefined ? '' : format.duration(run.duration_ns / 1000),
    run.events === 0 ? '' : `${format.count(run.events)} events`,
    page.only ? `only ${page.only}` : '',
    page.processes_left_out > 0
      ? `${format.number(page.processes_left_out, 'process')} not shown: memtrace export --to html --rank`
      : '',
  ];
}

const PARTS: Part[] = [
  ['server', 'Server'],
  ['timeline', 'Timeline'],
  ['allocations', 'Allocations'],
  ['issues', 'Issues'],
  ['suggestions', 'What to try'],
  ['largest', 'Peak'],
  ['holders', 'Holders'],
  ['pools', 'Pools'],
  ['device', 'Device'],
  ['host', 'Host'],
  ['xla', 'XLA'],
  ['ranges', 'Ranges'],
  ['functions', 'Functions'],
  ['lines', 'Lines'],
  ['launch', 'Launch'],
  ['ranks', 'Ranks'],
];

/** Cards in two columns of about the same height. */
function balanced(cards: (HTMLElement | null)[]): HTMLElement | null {
  const found = cards.filter(card => card !== null);
  if (found.length === 0) return null;
  return el('div', { class: found.length > 1 ? 'balanced w12' : 'column w12' }, found);
}

/** Shows the report whose data the page has in its elements; `data` is the summary. */
export async function reportPage(app: HTMLElement, data: Uint8Array): Promise<void> {
  const { page, summary } = JSON.parse(new TextDecoder().decode(data)) as { page: PageInfo; summary: Summary };
  const head = header('memtrace', page.title, facts(summary, page));
  const losses = explain.losses(summary);
  // What makes the figures wrong comes first, other remarks last.
  const body = el('main', {}, explain.verdict(summary.verdict), losses?.isLoss ? losses.element : null);
  replace(app, head, body);

  const entries: Entry[] = [];
  const processes: Process[] = [];
  for (let number = 0; ; number++) {
    const bytes = await dataOf(`process-${number}`);
    if (!bytes) break;
    const process = new Process(bytes);
    processes.push(process);
    const described = summary.processes[number];
    if (!described) break;
    for (const one of described.devices) {
      const device = process.devices.find(candidate => candidate.info.device === one.device);
      if (device && device.points > 0) {
        const name =
          summary.processes.length > 1
            ? `${processName(described)}, ${deviceName(one.device)}`
            : deviceName(one.device);
        entries.push({ name, device, process: described, summary: one, window: page.windows[number] ?? null });
      }
    }
  }
  const first = entries[0];
  if (!first) {
    body.append(el('section', { class: 'card w12 empty' }, el('p', {}, 'The recording has no allocations.')));
    fillNav(head, PARTS);
    return;
  }
  const pointOf = (entry: Entry) => {
    const { device, window } = entry;
    if (window) return extremesOf(device.total).highest(device.pointOf(window[0]), device.pointOf(window[1]) + 1);
    const oom = explainedOom(entry.summary);
    return oom ? entry.device.pointOf(oom.in_use.seq) : entry.device.peak;
  };
  const state = new State({
    device: first.device,
    point: pointOf(first),
    base: -1,
    division: 'category',
    axis: 'order',
    highlight: null,
    search: '',
  });
  const entryOf = (device: Device) => entries.find(entry => entry.device === device.whole) ?? first;
  const loader =
    page.complete_window === null
      ? null
      : new WindowLoader(page.complete_window, process => processes.indexOf(process));
  const sums = await dataOf('rank-totals');
  const deviceOf = (process: number, device: number) =>
    entries.find(entry => entry.process === summary.processes[process] && entry.summary.device === device);
  const totals = sums ? RankTotals.of(sums, deviceOf) : null;
  const divisions: (readonly [Division, string])[] = [...DIVISIONS];
  if (entries.some(entry => entry.device.process.customCategories.length > 0))
    divisions.push(['custom', 'custom category']);
  if (totals && totals.devices.length > 1)
    divisions.push([
      'rank',
      summary.processes.length === 1
        ? 'device'
        : summary.processes.every(one => one.rank !== undefined)
          ? 'rank'
          : 'process',
    ]);
  const timeline = new Timeline(state, device => entryOf(device).summary, { loader, sum: totals, divisions });
  const allocations = new Allocations(state, point => timeline.positionText(point));
  const top = el('div', { class: 'parts' });
  const rest = el('div', { class: 'parts' });
  const devices =
    entries.length > 1
      ? choice(
          'Device',
          entries.map((entry, at) => [String(at), entry.name] as const),
          '0',
          value => {
            const entry = entries[Number(value)] ?? first;
            state.set({ device: entry.device, point: pointOf(entry), base: -1 });
          },
        )
      : null;
  let shown: Entry | null = null;
  const isSnapshot = summary.run.command.length === 0 && summary.run.started_ns === undefined;
  const show = () => {
    const entry = entryOf(state.now.device);
    if (entry === shown) return;
    shown = entry;
    if (entry.window) timeline.showEvents(...entry.window);
    // After an error, the way out comes before the timeline.
    const wayOut = [
      explain.issues(entry.process, entry.device),
      explain.suggestions(entry.summary),
      explain.modules(entry.summary),
    ];
    const failed = explainedOom(entry.summary) !== undefined;
    replace(top, server(entry.summary), explain.figures(entry.summary, isSnapshot), ...(failed ? wayOut : []));
    const [issues, suggestions, modules] = failed ? [null, null, null] : wayOut;
    replace(
      rest,
      issues ?? null,
      explain.largest(entry.summary, entry.device, state),
      balanced([
        suggestions ?? null,
        // A server has stages instead.
        serverOnly(entry.summary) ? null : explain.oneStep(entry.summary, entry.device, state),
        modules ?? null,
        remarks(entry.process, entry.summary),
        reserved(entry.summary),
        customCategories(entry.summary, text => {
          state.set({ search: text });
          document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
        }),
        compileContexts(entry.summary),
        holders(entry.summary),
        pools(entry.summary),
      ]),
      deviceMemory(entry.summary),
      hostMemory(summary),
      graphs.cudaGraphs(entry.summary),
      tables.namedRanges(entry.summary, entry.device, name => {
        if (state.now.division === 'rank') state.set({ division: 'category' });
        timeline.tracks.search(name);
        timeline.element.scrollIntoView({ behavior: 'smooth' });
      }),
      tables.calledFunctions(entry.summary),
      serverOnly(entry.summary) ? null : tables.phases(entry.summary),
      xla(summary),
      linesView(entry.device, state),
    );
    const select = devices?.querySelector('select');
    if (select) select.value = String(entries.indexOf(entry));
    fillNav(head, PARTS);
  };
  const ranks = ranksView(
    entries.map(entry => ({
      name: entry.name,
      device: entry.device,
      issues: entry.process.issues.filter(issue => issue.device === entry.summary.device).length,
      failed: explainedOom(entry.summary) !== undefined,
    })),
    state,
  );
  body.append(
    ...[
      devices ? el('div', { class: 'w12' }, devices) : null,
      top,
      timeline.element,
      allocations.element,
      launchView(summary.launch),
      ranks,
      tables.processes(summary),
      rest,
      losses?.isLoss === false ? losses.element : null,
    ].filter(part => part !== null),
  );
  state.listen(changed => changed.device && show());
  show();
  timeline.draw();
  const listed = entries.map(({ device, process }) => ({ device, trace: process.trace }));
  window.memtraceReport = { summary, page, state, timeline, devices: listed, readyMs: performance.now() };
}
