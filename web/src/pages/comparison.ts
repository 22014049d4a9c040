/** The comparison of two runs: both timelines on one scale, and what changed between the peaks. */

import { stepRanges } from '../data/axis';
import { dataOf } from '../data/decode';
import { type ComparisonInfo, peakText } from '../data/diff';
import { type Device, Process } from '../data/model';
import type { DevicePair, DeviceSummary, DiffPeak, DiffReport, Summary } from '../data/schema';
import type { Highlight } from '../data/series';
import { State } from '../data/state';
import { checkbox, choice, el, replace } from '../dom';
import * as format from '../format';
import { Allocations } from '../views/allocations';
import { type ChangeRow, Changes, type Side } from '../views/changes';
import * as explain from '../views/explain';
import { fillNav, header, type Part } from '../views/header';
import { swatch } from '../views/swatch';
import { axisChoice, DIVISIONS, divisionChoice } from '../views/timeline/choices';
import { TimelineGroup } from '../views/timeline/group';
import { Timeline } from '../views/timeline/timeline';

/** Everything that the page shows, for tests. */
interface Exposed {
  diff: DiffReport;
  /** Of the shown pair, run A first. */
  states: State[];
  timelines: Timeline[];
  group: TimelineGroup;
  /** The bytes of the chosen row in each timeline, at the compared points. */
  colored: number[] | null;
  readyMs: number;
}

declare global {
  interface Window {
    memtraceComparison?: Exposed;
  }
}

interface Entry {
  peak: DiffPeak;
  device: Device;
  summary: DeviceSummary | undefined;
}

const SIDES = ['A', 'B'] as const;
const PARTS: Part[] = [
  ['timeline-a', 'Timelines'],
  ['changes', 'What changed'],
  ['allocations', 'Allocations'],
];
/** How the verdict of each result is marked. */
const MARKS = { same: 'ok', redistributed: '', grew: 'warn', shrank: 'ok' };

/** Shows the comparison whose data the page has in its elements; `data` is the comparison itself. */
export async function comparisonPage(app: HTMLElement, data: Uint8Array): Promise<void> {
  const { page, diff, a, b } = JSON.parse(new TextDecoder().decode(data)) as {
    page: ComparisonInfo;
    diff: DiffReport;
    a: Summary;
    b: Summary;
  };
  const head = header(
    'memtrace diff',
    '',
    SIDES.map((side, at) => `${side}: ${page.names[at]}`),
  );
  const verdict = el(
    'section',
    { class: 'card w12 verdict', id: 'verdict' },
    page.verdict.map((line, at) =>
      el(at === 0 ? 'strong' : 'p', { class: MARKS[diff.pairs[at]?.result ?? 'redistributed'] }, line),
    ),
  );
  const losses = [a, b].map((summary, at) => explain.losses(summary, SIDES[at]));
  const body = el(
    'main',
    {},
    verdict,
    losses.map(one => (one?.isLoss ? one.element : null)).filter(one => one !== null),
  );
  replace(app, head, body);
  const remarks = [
    page.remarks.length > 0
      ? el(
          'section',
          { class: 'card w12 listing', id: 'remarks' },
          el('h2', {}, 'Limits of the comparison'),
          el(
            'ul',
            {},
            page.remarks.map(text => el('li', {}, text)),
          ),
        )
      : null,
    ...losses.map(one => (one && !one.isLoss ? one.element : null)),
  ].filter(part => part !== null);

  const processes: Process[] = [];
  for (let number = 0; ; number++) {
    const bytes = await dataOf(`process-${number}`);
    if (!bytes) break;
    processes.push(new Process(bytes));
  }
  const entriesOf = (number: number): [Entry, Entry] | null => {
    const pair = diff.pairs[number];
    const numbers = page.processes[number];
    if (!pair || !numbers) return null;
    const entries = ([pair.a, pair.b] as const).map((peak, side) => {
      const device = processes[numbers[side as Side]]?.devices.find(one => one.info.device === peak.device);
      const process = [a, b][side]?.processes.find(one => one.trace === peak.trace);
      return device && device.points > 0
        ? { peak, device, summary: process?.devices.find(one => one.device === peak.device) }
        : null;
    });
    return entries[0] && entries[1] ? [entries[0], entries[1]] : null;
  };
  const first = diff.pairs[0];
  if (!first) {
    body.append(...remarks);
    fillNav(head, PARTS);
    return;
  }

  const figures = el('div', { class: 'parts' });
  const pictures = el('div', { class: 'parts' });
  let view: View | null = null;
  const changes = new Changes(row => view?.choose(row));
  const show = (number: number) => {
    const pair = diff.pairs[number] as DevicePair;
    const entries = entriesOf(number);
    replace(figures, figuresOf(pair));
    view = entries ? new View(diff, page, entries, row => changes.mark(row)) : null;
    const without = el(
      'section',
      { class: 'card w12' },
      el('p', {}, 'The page has no timelines of this device: compare it alone, with --rank and --device.'),
    );
    replace(
      pictures,
      view
        ? [view.controls, ...view.timelines.map(one => one.element), changes.element, view.allocations.element]
        : [without, changes.element],
    );
    changes.set(pair, entries ? [entries[0].device, entries[1].device] : null, page.moved_lines[number] ?? null);
    fillNav(head, PARTS);
    if (view) {
      const { states, timelines, group } = view;
      window.memtraceComparison = { diff, states, timelines, group, colored: null, readyMs: performance.now() };
    }
  };
  const devices =
    diff.pairs.length > 1
      ? el(
          'div',
          { class: 'w12' },
          choice(
            'Device',
            page.pairs.map((name, at) => [String(at), name] as const),
            '0',
            value => show(Number(value)),
          ),
        )
      : null;
  body.append(...[devices, figures, pictures, ...remarks].filter(part => part !== null));
  show(0);
}

/** The compared figures of a pair. */
function figuresOf(pair: DevicePair): HTMLElement[] {
  const { a, b } = pair;
  const larger = Math.max(a.totals.allocated_bytes, b.totals.allocated_bytes);
  const percent =
    a.totals.allocated_bytes > 0
      ? `${format.share(Math.abs(pair.difference_bytes), a.totals.allocated_bytes)} of A`
      : '';
  return [
    explain.card('Peak of A', format.size(a.totals.allocated_bytes), peakText(a)),
    explain.card('Peak of B', format.size(b.totals.allocated_bytes), peakText(b)),
    explain.card('Difference', format.signedSize(pair.difference_bytes), larger > 0 ? percent : ''),
    explain.card(
      'Reserved peak',
      format.signedSize(b.reserved_peak_bytes - a.reserved_peak_bytes),
      `A ${format.size(a.reserved_peak_bytes)}, B ${format.size(b.reserved_peak_bytes)}`,
    ),
  ];
}

/** The timelines and the live allocations of a pair. */
class View {
  readonly states: State[];
  readonly timelines: Timeline[];
  readonly group = new TimelineGroup();
  readonly controls: HTMLElement;
  readonly allocations: Allocations;
  private selection = el('div', { class: 'selection', role: 'status' });

  constructor(
    diff: DiffReport,
    page: ComparisonInfo,
    private entries: [Entry, Entry],
    private mark: (row: ChangeRow | null) => void,
  ) {
    const steps = [diff.a.step, diff.b.step];
    const comparesSteps = steps.every(step => step !== undefined);
    const choiceOf = ({ device, peak }: Entry) => ({
      device,
      point: device.pointOf(peak.seq),
      base: -1,
      division: 'category' as const,
      axis: comparesSteps ? ('steps' as const) : ('order' as const),
      highlight: null,
      search: '',
    });
    const states = entries.map(entry => new State(choiceOf(entry)));
    this.states = states;
    this.timelines = entries.map(
      ({ peak, summary }, at) =>
        new Timeline(states[at] as State, () => summary, {
          id: `timeline-${at === 0 ? 'a' : 'b'}`,
          title: `${SIDES[at]}: ${page.names[at]}`,
          group: this.group,
          compared: () => peak.seq,
        }),
    );
    // The live allocations of the timeline that was used last.
    const last = new State(choiceOf(entries[1]));
    let shown: Side = 1;
    this.allocations = new Allocations(
      last,
      point => (this.timelines[shown] as Timeline).positionText(point),
      () => SIDES[shown],
    );
    states.forEach((state, side) =>
      state.listen(({ point, base, search }) => {
        if (point === undefined && base === undefined && search === undefined) return;
        shown = side as Side;
        last.set({
          device: state.now.device,
          point: state.now.point,
          base: state.now.base,
          ...(search === undefined ? {} : { search }),
        });
      }),
    );
    const together = checkbox('Zoom together', true, isOn => {
      this.group.zoomsTogether = isOn;
    });
    const hasRules = entries.some(({ device }) => device.process.customCategories.length > 0);
    const divisions = hasRules ? ([...DIVISIONS, ['custom', 'custom category']] as const) : DIVISIONS;
    this.controls = el(
      'section',
      { class: 'card w12', 'aria-label': 'Timelines' },
      el(
        'div',
        { class: 'controls' },
        el('h2', {}, 'Allocated memory of both runs, on the same scale'),
        divisionChoice('category', division => states.forEach(state => state.set({ division })), divisions),
        axisChoice(states[0]?.now.axis ?? 'order', axis => {
          states.forEach(state => state.set({ axis }));
          this.showAll();
        }),
        together,
      ),
      this.selection,
    );
    this.showAll();
    if (comparesSteps) {
      // Two steps are compared side by side; one step of both runs at the same place.
      if (steps[0] !== steps[1]) {
        this.group.zoomsTogether = false;
        (together.querySelector('input') as HTMLInputElement).checked = false;
      }
      this.timelines.forEach((timeline, at) => {
        const range = stepRanges(entries[at]?.device as Device).find(one => one.step === steps[at]);
        if (range && timeline.axis.kind === 'steps') timeline.show([range.step - 0.05, range.step + 1.05]);
      });
    }
    this.choose(null);
    this.group.draw();
  }

  /** Shows both runs as a whole. A run without steps has another axis than one with steps. */
  private showAll(): void {
    for (const kind of new Set(this.timelines.map(one => one.axis.kind)))
      this.group.show(kind, this.group.extent(kind));
  }

  /** Colors the blocks of a row in both timelines. */
  choose(row: ChangeRow | null): void {
    const belongs = row?.belongs;
    let colored: number[] | null = null;
    this.states.forEach((state, side) => {
      let highlight: Highlight | null = null;
      if (row && belongs) {
        const { device } = this.entries[side as Side];
        const has = belongs(side as Side, device);
        highlight = { label: row.label, has: (_, block) => has(block) };
        const bytes = device
          .live(device.pointOf(this.entries[side as Side].peak.seq))
          .reduce((sum, block) => sum + (has(block) ? (device.size[block] as number) : 0), 0);
        (colored ??= []).push(bytes);
      }
      state.set({ highlight });
    });
    if (window.memtraceComparison) window.memtraceComparison.colored = colored;
    this.mark(row);
    replace(
      this.selection,
      ...(row && colored
        ? this.selectionText(row, colored)
        : ['Choose a row of the table below to color its blocks in both timelines.']),
    );
  }

  private selectionText(row: ChangeRow, colored: number[]): Node[] {
    const { a_bytes, b_bytes } = row.change;
    const isAll = colored[0] === a_bytes && colored[1] === b_bytes;
    return [
      swatch('highlight', el('b', {}, row.label)),
      el('span', {}, `at the peaks: A ${format.size(a_bytes)}, B ${format.size(b_bytes)}`),
      ...(isAll
        ? []
        : [
            el(
              'span',
              { class: 'warn' },
              `the timelines color A ${format.size(colored[0] ?? 0)}, B ${format.size(colored[1] ?? 0)}`,
            ),
          ]),
      el('button', { type: 'button', onclick: () => this.choose(null) }, 'Show all'),
    ];
  }
}
