/** The timeline: allocated bytes in series over allocation order, steps or time. Every drawn value existed. */

import { type Axis, type AxisKind, axisOf, stepRanges } from '../data/axis';
import { Extremes } from '../data/extremes';
import { type Changes, type Device, upperBound } from '../data/model';
import type { Place, RankTotals } from '../data/rank_totals';
import type { DeviceSummary } from '../data/schema';
import { type Division, type PointSeries, SeriesSet } from '../data/series';
import type { State } from '../data/state';
import type { WindowLoader } from '../data/window_loader';
import { choice, el, replace } from '../dom';
import * as format from '../format';
import { color, onThemeChange, rgb } from '../theme';
import { RangeTracks } from './range_tracks';

const LEFT = 62;
const RIGHT = 12;
const TOP = 34;
/** Rows of bands and the axis below the plot, in CSS pixels. */
const BAND = 16;
const BOTTOM = 2 * BAND + 34;
const HEIGHT = 380;
/** The height of one of several timelines. */
const HEIGHT_IN_GROUP = 270;
/** How far a key moves or zooms. */
const KEY_STEP = 0.1;

interface Mark {
  position: number;
  text: string;
  kind: 'peak' | 'oom' | 'found';
}

/** The number of windows that are kept. */
const MOST_WINDOWS = 4;
/** How long the visible part must stay as it is before its events are loaded, in milliseconds. */
const DELAY = 250;
/** At least so many events are loaded before and after the visible ones. */
const MARGIN = 100_000;

/** What distinguishes the only timeline of a page. */
export interface TimelineAlone {
  /** Where to get what the page lacks; `null` if it came from a file. */
  loader: WindowLoader | null;
  /** The sum over ranks, if the page has several. */
  sum: RankTotals | null;
  /** What the areas can be. */
  divisions: readonly (readonly [Division, string])[];
}

/** What distinguishes one of several timelines of a page. */
export interface TimelineInGroup {
  id: string;
  title: string;
  group: TimelineGroup;
  /** The event whose state is compared, instead of the peak. */
  compared: () => number;
}

/** Timelines of several devices on the same scale. */
export class TimelineGroup {
  readonly timelines: Timeline[] = [];
  /** Whether a zoom applies to all. */
  zoomsTogether = true;

  /** The range of the axis in which any of them has points. */
  extent(kind: AxisKind): [number, number] {
    const axes = this.timelines.map(one => one.axis).filter(axis => axis.kind === kind);
    return [Math.min(...axes.map(axis => axis.begin)), Math.max(...axes.map(axis => axis.end))];
  }

  highestValue(): number {
    return Math.max(...this.timelines.map(one => one.highestValue()));
  }

  /** Shows a range of the axis in all timelines that have this axis. */
  show(kind: AxisKind, range: [number, number]): void {
    this.timelines.filter(one => one.axis.kind === kind).forEach(one => one.show(range));
  }

  draw(): void {
    this.timelines.forEach(one => one.draw());
  }
}

/** What the points of the sum over ranks are. */
function sumNote(sum: RankTotals): string {
  const points = sum.info.rest
    ? `${format.count(sum.points)} of ${format.number(sum.info.events, 'allocation and free')}: the highest, ` +
      `lowest and last of each range`
    : 'each allocation and free of any of them';
  return (
    `The sum of ${format.number(sum.devices.length, 'rank')} or devices at ${points}, in the order of the ` +
    `wall clock. `
  );
}

export class Timeline {
  readonly element: HTMLElement;
  private canvas = el('canvas', { tabindex: 0, role: 'application' });
  private readout = el('div', { class: 'readout', role: 'status', 'aria-live': 'polite' });
  private legend = el('div', { class: 'legend' });
  private note = el('p', { class: 'note' });
  axis!: Axis;
  private set!: PointSeries;
  readonly tracks: RangeTracks;
  private extremes!: Extremes;
  private marks: Mark[] = [];
  /** The visible part of the axis. */
  private from = 0;
  private to = 1;
  private hover = -1;
  private drag: { x: number; from: number; to: number; brush: boolean; moved: boolean } | null = null;
  private touches = new Map<number, number>();
  private lines = new Set(['reserved', 'used']);
  private pending = false;
  /** How long the latest frame took to draw, in milliseconds, and where it drew. For tests and the benchmark. */
  drawMs = 0;
  frames = 0;
  image: ImageData | null = null;
  /** The device of the visible part, or the whole one. */
  private shown!: Device;
  private series = new Map<Device, PointSeries>();
  private loader: WindowLoader | null;
  private windows: Device[] = [];
  private loading = el('p', { class: 'note', role: 'status' });
  private timer = 0;
  private isLoading = false;
  private failed = false;
  private ranks: RankTotals | null;
  private one: TimelineInGroup | undefined;
  geometry = { left: 0, top: 0, width: 0, height: 0, ceiling: 1, from: 0, to: 1, ratio: 1 };

  constructor(
    private state: State,
    private summaryOf: (device: Device) => DeviceSummary | undefined,
    of: TimelineAlone | TimelineInGroup,
  ) {
    const { now } = state;
    this.one = 'group' in of ? of : undefined;
    const alone = 'loader' in of ? of : null;
    this.loader = alone?.loader ?? null;
    this.ranks = alone?.sum ?? null;
    const { one } = this;
    this.tracks = new RangeTracks({
      zoomTo: (from, to) => this.zoomTo(from, to),
      show: range => this.showRange(range),
      compare: range => this.compareRange(range),
      draw: () => this.draw(),
    });
    this.canvas.setAttribute(
      'aria-label',
      `Timeline of allocated memory${one ? ` of ${one.title}` : ''}. Arrow keys move the cursor, plus and ` +
        `minus zoom, Enter shows the live allocations, P goes to the peak, brackets select the previous and ` +
        `the next named range.`,
    );
    const reset = el('button', { type: 'button', onclick: () => this.zoomTo(...this.extent()) }, 'Whole run');
    const toPeak = el('button', { type: 'button', onclick: () => this.toPeak() }, 'Peak');
    const search = el('input', {
      type: 'search',
      placeholder: 'step, range, event or text',
      'aria-label': 'Search the timeline: a step, a named range, an event number, or a name',
      onkeydown: (event: KeyboardEvent) => event.key === 'Enter' && this.search(search.value),
    });
    this.element = el(
      'section',
      {
        class: 'card w12 timeline',
        id: one?.id ?? 'timeline',
        'aria-label': one ? `Timeline of ${one.title}` : 'Timeline',
      },
      el(
        'div',
        { class: 'controls' },
        el('h2', {}, one?.title ?? 'Allocated memory'),
        one ? null : divisionChoice(now.division, division => state.set({ division }), alone?.divisions),
        one ? null : axisChoice(now.axis, axis => state.set({ axis })),
        search,
        toPeak,
        reset,
      ),
      this.canvas,
      this.readout,
      this.loading,
      this.tracks.element,
      this.legend,
      this.note,
      this.tracks.note,
    );
    one?.group.timelines.push(this);
    this.rebuild();
    state.listen(changed => {
      // The sum over ranks stays the same when another of them is chosen.
      const isNew = changed.axis !== undefined || this.chosen !== this.whole;
      if (isNew || changed.division || changed.highlight !== undefined) this.rebuild(!isNew);
      const select = changed.division && this.element.querySelector('select');
      if (select && !one) select.value = state.now.division;
      if (changed.point !== undefined) this.showPoint(changed.point);
      this.read();
      this.draw();
    });
    onThemeChange(() => this.draw());
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** The sum over ranks, if it is to be drawn. */
  private get sum(): RankTotals | null {
    return this.state.now.division === 'rank' ? this.ranks : null;
  }

  /** The device that is drawn: the chosen one, or the sum over ranks. */
  private get device(): Device {
    return this.shown;
  }

  /** The whole device that is drawn, or of which a window is drawn; or the sum over ranks. */
  private get whole(): Device {
    return this.shown.whole;
  }

  /** What is to be drawn: the chosen device, or the sum over ranks. */
  private get chosen(): Device {
    return this.sum ?? this.state.now.device.whole;
  }

  /** A point of the selected device, as one of the whole device. */
  private placeOf(point: number): Place {
    const { device } = this.state.now;
    const { whole } = device;
    return { device: whole, point: device === whole ? point : whole.pointOf(device.pointSeq[point] ?? 0) };
  }

  /** Shows the live allocations of a rank at a drawn point of the sum. */
  private selectInSum(sum: RankTotals, point: number, rank: Device): void {
    const place = sum.place(point, rank);
    const { device } = this.state.now;
    this.state.set(place.device === device.whole ? { ...place, ...this.baseIn(place.device) } : { ...place, base: -1 });
  }

  /** The summary of the drawn device; the sum has none. */
  private get summary(): DeviceSummary | undefined {
    return this.sum ? undefined : this.summaryOf(this.device);
  }

  private get height(): number {
    return (this.one ? HEIGHT_IN_GROUP : HEIGHT) + this.tracks.height;
  }

  /** The height of what is below the plot. */
  private get bottom(): number {
    return BOTTOM + this.tracks.height;
  }

  /** The range of the axis that can be shown. */
  private extent(): [number, number] {
    return this.one ? this.one.group.extent(this.axis.kind) : [this.axis.begin, this.axis.end];
  }

  /** The point of the peak, or of the state that is compared instead. */
  private peak(): number {
    return this.one ? this.whole.pointOf(this.one.compared()) : this.whole.peak;
  }

  private toPeak(): void {
    if (this.sum) return this.selectInSum(this.sum, this.peak(), this.state.now.device.whole);
    this.state.set({ device: this.whole, point: this.peak() });
  }

  private rebuild(keepsZoom = false): void {
    const device = this.chosen;
    if (this.shown !== undefined && this.whole !== device) {
      this.windows = [];
      this.series.clear();
      if (this.failed) replace(this.loading);
      this.failed = false;
    }
    this.use(device);
    // The clocks of ranks differ in where they begin, so the sum has no tracks.
    this.tracks.set(this.sum ? null : device, this.axis);
    this.canvas.style.height = `${this.height}px`;
    if (!keepsZoom) [this.from, this.to] = this.extent();
    const { summary } = this;
    const position = (point: number) => this.axis.position[point] ?? 0;
    this.marks =
      device.points > 0
        ? [
            {
              position: position(device.peak),
              text: `peak ${format.size(device.total[device.peak] as number)}`,
              kind: 'peak',
            },
          ]
        : [];
    const compared = this.peak();
    if (device.points > 0 && compared !== device.peak) {
      this.marks.unshift({
        position: position(compared),
        text: `compared: ${format.size(device.total[compared] as number)}`,
        kind: 'found',
      });
    }
    for (const oom of summary?.ooms ?? []) {
      this.marks.push({
        position: position(device.pointOf(oom.in_use.seq)),
        text: `out of memory: requested ${format.size(oom.requested_bytes)}`,
        kind: 'oom',
      });
    }
    if (this.sum) this.marks.push(...this.errorsOfRanks(this.sum));
    const capacity = summary?.total_bytes;
    if (capacity !== undefined && (device.total[device.peak] ?? 0) > capacity / 2) this.lines.add('capacity');
    this.hover = -1;
    this.chooseDevice();
    this.describe();
    this.read();
  }

  /** Draws a device: the whole one or a window. */
  private use(device: Device): void {
    const { division, highlight, axis } = this.state.now;
    let set: PointSeries | undefined = device === this.sum ? this.sum : this.series.get(device);
    if (!set || (set !== this.sum && (set.division !== division || set.highlight !== highlight)))
      this.series.set(device, (set = new SeriesSet(device, division, highlight)));
    this.shown = device;
    this.set = set;
    this.axis = axisOf(device, axis);
    this.extremes = extremesOf(device.total);
  }

  /** Says what is drawn. */
  private describe(): void {
    const { device } = this;
    const { rest, mismatches } = device.info;
    const listed = device.window
      ? 'the largest of them'
      : 'all at the peak, at errors and at the end, and the largest others';
    replace(
      this.note,
      device.window
        ? `Events ${rangeText(...device.window)}, loaded from the recording${rest ? '' : ', with all blocks'}. `
        : '',
      'Solid: at least this much was allocated throughout a column. Paler: at most, divided as at that highest point. ',
      this.sum ? sumNote(this.sum) : '',
      rest && !this.sum
        ? `${format.number(device.info.blocks, 'block')} are listed singly: ${listed}. ` +
            `${format.number(rest.blocks, 'smaller or shorter-lived block')} (at most ` +
            `${format.size(rest.largest)} each) are added up at ` +
            `${format.count(device.points)} points: the highest, lowest and last event of each range of ` +
            `events. Totals are exact there. `
        : '',
      rest && !this.one
        ? this.loader
          ? 'Zoom in to load all events and blocks of a part. '
          : [
              'To load all events and blocks of a part, serve the page: ',
              el('code', {}, 'memtrace open RUN --serve'),
              '. ',
            ]
        : '',
      device.process.shortestPhase > 1
        ? `Phases of fewer than ${format.count(device.process.shortestPhase)} events are not drawn. `
        : '',
      mismatches > 0
        ? `At ${format.number(mismatches, 'event')}, the allocator's own total differs: the recording lacks frees. `
        : '',
    );
  }

  // ---- the events of a window

  /** The events around the visible part, by the points of the whole recording. */
  private visibleEvents(): [number, number] {
    const { whole } = this;
    const { position } = whole === this.shown ? this.axis : axisOf(whole, this.state.now.axis);
    const at = (point: number) => whole.pointSeq[Math.max(0, Math.min(point, whole.points - 1))] ?? 0;
    return [at(upperBound(position, this.from) - 1), at(upperBound(position, this.to))];
  }

  /** Draws the loaded window that has the visible part, if there is one, and plans to load it if there is none. */
  private chooseDevice(): void {
    const { loader, whole } = this;
    if (!loader || this.sum || !whole.info.rest) return;
    const [first, last] = this.visibleEvents();
    const length = ({ window }: Device) => (window ? window[1] - window[0] : Infinity);
    const found = this.windows.filter(one => one.covers(first) && one.covers(last));
    found.sort((a, b) => Number(a.info.rest !== null) - Number(b.info.rest !== null) || length(a) - length(b));
    const device = found[0] ?? whole;
    if (device !== this.shown) {
      const seq = this.hover >= 0 ? this.shown.pointSeq[this.hover] : undefined;
      this.use(device);
      this.hover = seq === undefined ? -1 : device.pointOf(seq);
      this.describe();
      this.read();
    }
    clearTimeout(this.timer);
    if (this.lacksEvents(first, last) && !this.failed)
      this.timer = window.setTimeout(() => void this.load(loader), DELAY);
  }

  /** Whether the recording has events in the visible part that are not drawn, and too few points to fill it. */
  private lacksEvents(first: number, last: number): boolean {
    const { info, window } = this.shown;
    // The points of a window do not come closer by loading nearly the same window again.
    if (info.rest === null || (window && 2 * (last - first) > window[1] - window[0])) return false;
    return this.visiblePoints() < this.width() && last - first >= this.visiblePoints();
  }

  /** Loads the visible events and some around them. One request at a time. */
  private async load(loader: WindowLoader): Promise<void> {
    const { whole } = this;
    const [first, last] = this.visibleEvents();
    if (this.isLoading || !this.lacksEvents(first, last)) return;
    // As much around them as comes with all blocks.
    const most = Math.max(0, Math.floor((loader.completeEvents - 1 - (last - first)) / 2));
    const margin = Math.min(Math.max(MARGIN, Math.ceil((last - first) / 2)), most);
    const range = [Math.max(0, first - margin), last + margin] as const;
    this.isLoading = true;
    replace(this.loading, `Loading events ${rangeText(first, last)}`);
    try {
      const device = await loader.load(whole, ...range);
      replace(this.loading);
      if (whole === this.whole) this.addWindow(device);
    } catch (error) {
      // One message, until the reader tries again.
      this.failed = true;
      const again = () => {
        this.failed = false;
        replace(this.loading);
        this.chooseDevice();
      };
      replace(
        this.loading,
        el('span', { class: 'bad' }, error instanceof Error ? error.message : String(error)),
        ' ',
        el('button', { type: 'button', onclick: again }, 'Try again'),
      );
    } finally {
      this.isLoading = false;
    }
    // The reader can have moved on meanwhile.
    this.chooseDevice();
    this.draw();
  }

  private addWindow(device: Device): void {
    this.windows.push(device);
    if (this.windows.length > MOST_WINDOWS) this.series.delete(this.windows.shift() as Device);
    // The selected state is shown with all of its blocks.
    const { now } = this.state;
    const [point, base] = [now.point, now.base].map(at => now.device.pointSeq[at] ?? -1) as [number, number];
    const isBetter = now.device.whole === device.whole && now.device.info.rest !== null && device.covers(point);
    if (isBetter && (now.base < 0 || device.covers(base))) {
      this.state.set({ device, point: device.pointOf(point), base: now.base < 0 ? -1 : device.pointOf(base) });
    }
  }

  /** The point of the drawn device at which a point of the selected one is. */
  private drawnPoint(point: number): number {
    const { device } = this.state.now;
    if (this.sum) return this.sum.pointAt(this.placeOf(point));
    return device === this.shown ? point : this.shown.pointOf(device.pointSeq[point] ?? 0);
  }

  /** The position of a point of the selected device, which can be outside the drawn window. */
  private positionOfPoint(point: number): number {
    const { device, axis } = this.state.now;
    if (this.sum) return this.axis.position[this.drawnPoint(point)] ?? 0;
    return (device === this.shown ? this.axis : axisOf(device, axis)).position[point] ?? 0;
  }

  /** The errors of all ranks, on the timeline of the sum. */
  private errorsOfRanks(sum: RankTotals): Mark[] {
    return sum.devices.flatMap((device, rank) =>
      (this.summaryOf(device)?.ooms ?? []).map(oom => ({
        position: this.axis.position[sum.pointAt({ device, point: device.pointOf(oom.in_use.seq) })] ?? 0,
        text: `${sum.series[rank]?.label} out of memory: requested ${format.size(oom.requested_bytes)}`,
        kind: 'oom' as const,
      })),
    );
  }

  // ---- coordinates

  private width(): number {
    return Math.max(1, this.canvas.clientWidth - LEFT - RIGHT);
  }

  private x(position: number): number {
    return LEFT + ((position - this.from) / (this.to - this.from)) * this.width();
  }

  private positionAt(x: number): number {
    return this.from + ((x - LEFT) / this.width()) * (this.to - this.from);
  }

  /** The point whose state holds at a position; -1 before the first. */
  private pointAt(position: number): number {
    return upperBound(this.axis.position, position) - 1;
  }

  /** The points of a pixel column, as from and to; the state before it if no event is in it. */
  private column(x: number, width: number): [number, number] {
    const low = this.positionAt(x);
    const high = this.positionAt(x + width);
    const from = upperBound(this.axis.position, low - Number.EPSILON * Math.abs(low));
    const to = upperBound(this.axis.position, high - Number.EPSILON * Math.abs(high));
    // The state at the start of the column also counts.
    return [Math.max(0, Math.min(from, to - 1, this.device.points - 1)), Math.max(to, 0)];
  }

  zoomTo(from: number, to: number): void {
    const [begin, end] = this.extent();
    const least = Math.min(end - begin, this.axis.kind === 'order' && !this.device.info.rest ? 8 : (end - begin) / 1e7);
    const length = Math.max(least, Math.min(to - from, end - begin));
    const start = Math.max(begin, Math.min((from + to - length) / 2, end - length));
    const group = this.one?.group;
    if (group?.zoomsTogether) group.show(this.axis.kind, [start, start + length]);
    else [this.from, this.to] = [start, start + length];
    this.chooseDevice();
    this.redraw();
  }

  /** Shows a range of the axis. */
  show([from, to]: [number, number]): void {
    [this.from, this.to] = [from, to];
    this.draw();
  }

  /** Shows a range of events. */
  showEvents(first: number, last: number): void {
    this.showPoints(this.device.pointOf(first), this.device.pointOf(last));
  }

  /** Shows a range of points, with a margin. */
  private showPoints(from: number, to: number): void {
    const position = (point: number) => this.axis.position[Math.min(point, this.device.points - 1)] ?? 0;
    const [low, high] = [position(from), position(to)];
    this.zoomTo(low - (high - low) * 0.05, high + (high - low) * 0.05);
  }

  /** Draws this timeline, and those that have the same vertical scale. */
  private redraw(): void {
    if (this.one) this.one.group.draw();
    else this.draw();
  }

  /** Makes a point visible. */
  private showPoint(point: number): void {
    const position = this.positionOfPoint(point);
    if (position < this.from || position > this.to) {
      const half = (this.to - this.from) / 2;
      this.zoomTo(position - half, position + half);
    }
  }

  /** Selects the highest point of a named range, and makes the range visible. */
  private showRange(range: number): void {
    const [low, high] = this.tracks.extent(range);
    if (low < this.from || high > this.to) {
      const length = Math.max(this.to - this.from, (high - low) * 1.1);
      this.zoomTo((low + high - length) / 2, (low + high + length) / 2);
    }
    const device = this.whole;
    const { from, to } = device.process.ranges;
    const [first, last] = [device.pointOf(from[range] as number), device.pointOf(to[range] as number)];
    this.state.set({ device, point: extremesOf(device.total).highest(first, last + 1), base: -1 });
  }

  private compareRange(range: number): void {
    const device = this.whole;
    const { from, to } = device.process.ranges;
    this.state.set({ device, base: device.pointOf(from[range] as number), point: device.pointOf(to[range] as number) });
    document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
  }

  /**
   * Moves to what the reader searches: a range with this name, a step, an event number, or the first block that matches
   * a text.
   */
  search(text: string): void {
    const trimmed = text.trim();
    if (trimmed === '') return;
    // Of the sum, the steps and events of the chosen rank.
    const device = this.state.now.device.whole;
    const step = /^step\s+(\d+)$/i.exec(trimmed);
    const digits = trimmed.replace(/,/g, '');
    const isEvent = /^\d+$/.test(digits);
    // Programs name their ranges like steps, too: then both are shown.
    const isNamed = !isEvent && this.tracks.search(trimmed);
    const range = step && stepRanges(device).find(one => one.step === Number(step[1]));
    if (range) {
      const { sum } = this;
      if (!sum) this.use(device);
      const drawn = (point: number) =>
        sum ? sum.pointAt({ device, point: Math.min(point, device.points - 1) }) : point;
      this.showPoints(drawn(range.from), drawn(range.to));
      const point = extremesOf(device.total).highest(range.from, range.to);
      this.select(device.pointSeq[point] as number);
      return this.say(`Step ${range.step} peaks at ${format.size(device.total[point] as number)}.`);
    }
    if (isNamed) return;
    if (step) return this.say(`The run has no step ${step[1]}.`);
    if (isEvent) {
      this.select(Number(digits));
      return this.say('');
    }
    this.state.set({ search: trimmed });
    document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
  }

  private say(text: string): void {
    if (text !== '') replace(this.readout, text);
  }

  // ---- input

  private listen(): void {
    const { canvas } = this;
    const at = (event: PointerEvent | WheelEvent) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener(
      'wheel',
      event => {
        if (event.ctrlKey || event.metaKey || Math.abs(event.deltaY) >= Math.abs(event.deltaX)) {
          event.preventDefault();
          const center = this.positionAt(Math.max(LEFT, at(event)));
          const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
          this.zoomTo(center - (center - this.from) * factor, center + (this.to - center) * factor);
        } else {
          event.preventDefault();
          this.pan((event.deltaX / this.width()) * (this.to - this.from));
        }
      },
      { passive: false },
    );
    canvas.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      this.touches.set(event.pointerId, at(event));
      canvas.setPointerCapture(event.pointerId);
      // A mouse brushes; with Alt, and below the plot, it pans. A finger pans, two zoom.
      const y = event.clientY - canvas.getBoundingClientRect().top;
      const brush = event.pointerType === 'mouse' && !event.altKey && y < this.height - this.bottom;
      this.drag = { x: at(event), from: this.from, to: this.to, brush, moved: false };
    });
    canvas.addEventListener('pointermove', event => {
      const x = at(event);
      if (this.touches.has(event.pointerId)) {
        const before = [...this.touches.values()];
        this.touches.set(event.pointerId, x);
        const after = [...this.touches.values()];
        if (after.length === 2) return this.pinch(before as [number, number], after as [number, number]);
      }
      if (this.drag && Math.abs(x - this.drag.x) > 3) this.drag.moved = true;
      if (this.drag?.moved && !this.drag.brush) {
        const shift = ((this.drag.x - x) / this.width()) * (this.drag.to - this.drag.from);
        return this.zoomTo(this.drag.from + shift, this.drag.to + shift);
      }
      this.moveTo(x, event.clientY - canvas.getBoundingClientRect().top);
    });
    canvas.addEventListener('pointerup', event => {
      const x = at(event);
      const y = event.clientY - canvas.getBoundingClientRect().top;
      this.touches.delete(event.pointerId);
      const { drag } = this;
      this.drag = null;
      if (!drag) return;
      if (drag.moved && drag.brush) {
        const [low, high] = [this.positionAt(Math.min(drag.x, x)), this.positionAt(Math.max(drag.x, x))];
        this.zoomTo(low, high);
      } else if (!drag.moved) {
        this.moveTo(x, y);
        if (this.tracks.hover >= 0) this.tracks.select(this.tracks.hover);
        else this.choose(event.shiftKey, y);
      }
      this.draw();
    });
    canvas.addEventListener('pointercancel', event => {
      this.touches.delete(event.pointerId);
      this.drag = null;
      this.draw();
    });
    canvas.addEventListener('pointerleave', () => {
      [this.hover, this.tracks.hover] = [-1, -1];
      this.read();
      this.draw();
    });
    canvas.addEventListener('dblclick', () => this.zoomTo(...this.extent()));
    canvas.addEventListener('keydown', event => this.key(event));
  }

  private pinch(before: [number, number], after: [number, number]): void {
    const [a, b] = [this.positionAt(before[0]), this.positionAt(before[1])];
    const scale = (b - a) / Math.max(1, Math.abs(after[1] - after[0])) / Math.sign(after[1] - after[0] || 1);
    const from = a - (after[0] - LEFT) * scale;
    if (this.drag) this.drag.moved = true;
    this.zoomTo(from, from + this.width() * scale);
  }

  private pan(by: number): void {
    this.zoomTo(this.from + by, this.to + by);
  }

  private moveTo(x: number, y: number): void {
    this.tracks.hover = this.tracks.at(
      y - this.tracksTop,
      this.positionAt(x),
      (3 * (this.to - this.from)) / this.width(),
    );
    const inside = Math.max(LEFT, Math.min(x, LEFT + this.width() - 0.01));
    const [from, to] = this.column(inside, 1);
    this.hover = to > from ? this.extremes.highest(from, to) : Math.max(0, this.pointAt(this.positionAt(inside)));
    this.read();
    this.draw();
  }

  /** The distance of the tracks from the top. */
  private get tracksTop(): number {
    return this.height - this.bottom + 2 * BAND + 4;
  }

  /** Shows the live allocations at the cursor, or compares with them. In the sum, of the rank at this height. */
  private choose(asBase: boolean, y = -1): void {
    if (this.hover < 0) return;
    if (this.sum) {
      const { device } = this.state.now;
      if (asBase)
        return this.state.set({
          ...this.placeOf(this.state.now.point),
          base: this.sum.place(this.hover, device.whole).point,
        });
      return this.selectInSum(this.sum, this.hover, this.rankAt(this.sum, y) ?? device.whole);
    }
    const { device, point } = this.state.now;
    const seq = this.shown.pointSeq[this.hover] as number;
    if (!asBase)
      return this.state.set({
        device: this.shown,
        point: this.hover,
        ...(this.shown === device ? {} : this.baseIn(this.shown)),
      });
    const selected = device.pointSeq[point] ?? 0;
    // Both points must be of one device.
    const common =
      device === this.shown
        ? device
        : ([this.shown, device].find(one => one.covers(selected) && one.covers(seq)) ?? this.whole);
    this.state.set({ device: common, point: common.pointOf(selected), base: common.pointOf(seq) });
  }

  /** The rank whose area is at this height; `null` above and below all. */
  private rankAt(sum: RankTotals, y: number): Device | null {
    const { top, height, ceiling } = this.geometry;
    let left = (1 - (y - top) / height) * ceiling;
    if (y < top || y > top + height) return null;
    const rank = sum.values(this.hover).findIndex(bytes => (left -= bytes) < 0);
    return sum.devices[rank] ?? null;
  }

  /** The point to compare with, in a device; none if the device does not have it. */
  private baseIn(device: Device): { base: number } {
    const { now } = this.state;
    const seq = now.device.pointSeq[now.base] ?? -1;
    return { base: now.base >= 0 && device.covers(seq) ? device.pointOf(seq) : -1 };
  }

  /** Selects the state at an event of the chosen rank, with the most details that are loaded. */
  private select(seq: number): void {
    const device = this.windows.find(one => one.covers(seq) && !one.info.rest) ?? this.state.now.device.whole;
    this.state.set({ device, point: device.pointOf(seq) });
  }

  private key(event: KeyboardEvent): void {
    const length = this.to - this.from;
    const center = (this.from + this.to) / 2;
    const from = this.hover >= 0 ? this.hover : this.drawnPoint(this.state.now.point);
    const move = (by: number) => {
      this.hover = Math.max(0, Math.min(this.device.points - 1, from + by));
      const position = this.axis.position[this.hover] ?? 0;
      if (position < this.from || position > this.to) this.pan(position - center);
      this.read();
    };
    const far = Math.max(1, Math.round(this.visiblePoints() * KEY_STEP));
    if (event.key === 'ArrowLeft') move(event.shiftKey ? -far : -1);
    else if (event.key === 'ArrowRight') move(event.shiftKey ? far : 1);
    else if (event.key === 'PageUp') this.pan(-length / 2);
    else if (event.key === 'PageDown') this.pan(length / 2);
    else if (event.key === '+' || event.key === '=') this.zoomTo(center - length / 4, center + length / 4);
    else if (event.key === '-') this.zoomTo(center - length, center + length);
    else if (event.key === 'Home') this.zoomTo(...this.extent());
    else if (event.key === 'p' || event.key === 'P') this.toPeak();
    else if (event.key === '[' || event.key === ']') this.tracks.move(event.key === ']' ? 1 : -1);
    else if (event.key === 'Escape' && this.tracks.selected >= 0) this.tracks.select(-1);
    else if (event.key === 'Enter' || event.key === ' ') this.choose(event.shiftKey);
    else return;
    event.preventDefault();
    this.draw();
  }

  private visiblePoints(): number {
    return Math.max(1, upperBound(this.axis.position, this.to) - upperBound(this.axis.position, this.from));
  }

  // ---- text

  /** The phase and step at a point: `backward of step 3`. */
  positionText(point: number, device = this.state.now.device): string {
    const { process } = device;
    const at = upperBound(process.phaseSeq, device.pointSeq[point] ?? 0) - 1;
    if (at < 0) return '';
    const [phase, step] = [process.phases[process.phaseOf[at] as number] ?? '', process.stepOf[at] as number];
    return step < 0 ? phase : `${phase} of step ${step}`;
  }

  private read(): void {
    const { device } = this;
    if (this.tracks.hover >= 0) return replace(this.readout, ...this.tracks.text(this.tracks.hover));
    const point = this.hover >= 0 ? this.hover : Math.min(this.drawnPoint(this.state.now.point), device.points - 1);
    if (point < 0) return replace(this.readout, 'No memory was allocated.');
    const values = this.set.values(point);
    const seq = device.pointSeq[point] as number;
    const facts = [
      this.sum ? `event ${format.count(seq)} of all ranks` : `event ${format.count(seq)}`,
      this.positionText(point, device),
      `${format.duration(device.pointTime[point] as number)} after the first event`,
    ];
    const reserved = valueAt(device.reserved, seq);
    replace(
      this.readout,
      el('b', {}, format.size(device.total[point] as number)),
      ` allocated${reserved > 0 ? `, ${format.size(reserved)} reserved` : ''} \u00b7 ` +
        `${facts.filter(text => text !== '').join(' \u00b7 ')}`,
      this.hover < 0 ? ' (selected)' : '',
    );
    const rows = this.set.series.map((series, i) => ({ series, bytes: values[i] as number }));
    replace(
      this.legend,
      rows.reverse().map(({ series, bytes }) => {
        const swatch = el('i', { class: 'swatch' });
        swatch.style.background = `var(--${series.color})`;
        return el(
          'button',
          { type: 'button', class: bytes > 0 ? '' : 'zero', onclick: () => this.chooseSeries(series.label, point) },
          swatch,
          el('span', {}, series.label),
          el('b', {}, format.size(bytes)),
        );
      }),
      this.line('reserved', 'reserved'),
      this.line('used', 'device used by the process'),
      this.line('capacity', 'capacity'),
    );
  }

  /** Searches the live allocations for a series. Of the sum, shows those of a rank. */
  private chooseSeries(label: string, point: number): void {
    if (!this.sum) return this.state.set({ search: label });
    const rank = this.sum.devices[this.sum.series.findIndex(one => one.label === label)];
    if (rank) this.selectInSum(this.sum, point, rank);
  }

  private line(name: string, label: string): HTMLElement | null {
    const { device } = this;
    const capacity = this.summary?.total_bytes;
    if (name === 'reserved' && device.reserved.seq.length === 0) return null;
    if (name === 'used' && device.physical.seq.length === 0) return null;
    if (name === 'capacity' && capacity === undefined) return null;
    const pressed = this.lines.has(name);
    const swatch = el('i', { class: `line ${name}` });
    return el(
      'button',
      {
        type: 'button',
        'aria-pressed': pressed ? 'true' : 'false',
        class: pressed ? '' : 'zero',
        onclick: () => {
          if (pressed) this.lines.delete(name);
          else this.lines.add(name);
          this.read();
          this.redraw();
        },
      },
      swatch,
      el('span', {}, label),
      name === 'capacity' ? el('b', {}, format.size(capacity as number)) : null,
    );
  }

  // ---- drawing

  draw(): void {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      const start = performance.now();
      this.paint();
      this.drawMs = performance.now() - start;
      this.frames += 1;
    });
  }

  private paint(): void {
    const { canvas, device } = this;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const [width, height] = [canvas.clientWidth, this.height];
    if (width === 0) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext('2d') as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = '12px system-ui, sans-serif';
    if (device.points === 0) return;
    const plot = { left: LEFT, top: TOP, width: this.width(), height: height - TOP - this.bottom };
    const most = this.one ? this.one.group.highestValue() : this.highestValue();
    const [unitName, unit] = format.byteUnit(most);
    const step = format.labelStep(most / unit, 5) * unit;
    const ceiling = Math.ceil((most * 1.02) / step) * step;
    const y = (bytes: number) => plot.top + plot.height * (1 - bytes / ceiling);
    this.geometry = { ...plot, ceiling, from: this.from, to: this.to, ratio };
    const [ink, mute, grid] = [color('ink'), color('mute'), color('line')];
    this.paintAreas(context, ratio, plot, ceiling);
    for (let value = 0; value <= ceiling + step / 2; value += step) {
      context.globalCompositeOperation = 'destination-over';
      context.fillStyle = grid;
      context.fillRect(plot.left, Math.round(y(value)), plot.width, 1);
      context.globalCompositeOperation = 'source-over';
      context.fillStyle = mute;
      context.textAlign = 'right';
      context.fillText(format.axisLabel(value / unit, step / unit), plot.left - 8, y(value) + 4);
    }
    context.textAlign = 'left';
    context.fillText(unitName, 8, plot.top - 12);
    this.paintLines(context, plot, y, ceiling);
    this.paintBands(context, plot);
    this.tracks.paint(context, plot, this.tracksTop, position => this.x(position));
    this.paintAxis(context, plot, mute, grid);
    this.paintMarks(context, plot, ink);
  }

  /** The highest value of the visible part, with the lines that are shown. */
  highestValue(): number {
    const { device } = this;
    const [from, to] = this.column(LEFT, this.width());
    let most = to > from ? (device.total[this.extremes.highest(from, to)] as number) : 0;
    const seqs: [number, number] = [device.pointSeq[from] ?? 0, device.pointSeq[Math.max(from, to - 1)] ?? 0];
    if (this.lines.has('reserved')) most = Math.max(most, highestOf(device.reserved, seqs));
    if (this.lines.has('used')) most = Math.max(most, highestOf(device.physical, seqs));
    if (this.lines.has('capacity')) most = Math.max(most, this.summary?.total_bytes ?? 0);
    return Math.max(most, 1);
  }

  private paintAreas(
    context: CanvasRenderingContext2D,
    ratio: number,
    plot: { left: number; top: number; width: number; height: number },
    ceiling: number,
  ): void {
    const { device, set, extremes } = this;
    const columns = Math.max(1, Math.round(plot.width * ratio));
    const rows = Math.max(1, Math.round(plot.height * ratio));
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const background = rgb(color('card'));
    const solid = set.series.map(series => packed(rgb(color(series.color))));
    const pale = set.series.map(series => packed(mixed(rgb(color(series.color)), background, 0.5)));
    const gap = packed(background);
    const values = new Float64Array(set.series.length);
    let [lastPoint, lastLow] = [-1, -1];
    const end = this.endOf(plot) * ratio;
    for (let column = 0; column < Math.min(columns, end); column++) {
      const [from, to] = this.column(LEFT + column / ratio, 1 / ratio);
      if (to <= from) continue;
      const high = extremes.highest(from, to);
      const low = device.total[extremes.lowest(from, to)] as number;
      if (high === lastPoint && low === lastLow && column > 0) {
        for (let row = 0, at = column; row < rows; row++, at += columns) pixels[at] = pixels[at - 1] as number;
        continue;
      }
      [lastPoint, lastLow] = [high, low];
      set.at(high, values);
      const lowRow = rows - Math.round((low / ceiling) * rows);
      let bytes = 0;
      let bottom = rows;
      for (let series = 0; series < values.length; series++) {
        bytes += values[series] as number;
        const top = Math.max(0, rows - Math.round((bytes / ceiling) * rows));
        const [dark, light] = [solid[series] as number, pale[series] as number];
        for (let row = top, at = top * columns + column; row < bottom; row++, at += columns) {
          pixels[at] = row >= lowRow ? dark : light;
        }
        // A line of the background between series helps those who do not see the colors.
        if (bottom - top > 3 && series > 0 && bottom < rows) pixels[(bottom - 1) * columns + column] = gap;
        bottom = Math.min(bottom, top);
      }
    }
    this.image = image;
    context.putImageData(image, Math.round(plot.left * ratio), Math.round(plot.top * ratio));
  }

  /** Where the run ends in the plot, in CSS pixels from its left. Other timelines of the group can be longer. */
  private endOf(plot: { width: number }): number {
    return this.one ? Math.max(0, Math.min(plot.width, this.x(this.axis.end) - LEFT)) : plot.width;
  }

  private paintLines(
    context: CanvasRenderingContext2D,
    plot: { left: number; top: number; width: number; height: number },
    y: (bytes: number) => number,
    ceiling: number,
  ): void {
    const { device } = this;
    const stroke = (changes: Changes, style: string, dash: number[]) => {
      if (changes.seq.length === 0) return;
      context.strokeStyle = style;
      context.setLineDash(dash);
      context.lineWidth = 1.5;
      context.beginPath();
      let before = -1;
      const end = this.endOf(plot);
      for (let column = 0; column <= end; column++) {
        const [from, to] = this.column(LEFT + column, 1);
        const seqs: [number, number] = [device.pointSeq[from] ?? 0, device.pointSeq[Math.max(from, to - 1)] ?? 0];
        // The highest value of the column: no peak is lost.
        const value = Math.min(ceiling, highestOf(changes, seqs));
        if (before < 0) context.moveTo(plot.left + column, y(value));
        else if (value !== before) {
          context.lineTo(plot.left + column, y(before));
          context.lineTo(plot.left + column, y(value));
        }
        before = value;
      }
      context.lineTo(plot.left + end, y(before));
      context.stroke();
      context.setLineDash([]);
      context.lineWidth = 1;
    };
    if (this.lines.has('reserved')) stroke(device.reserved, color('ink'), []);
    if (this.lines.has('used')) stroke(device.physical, color('mute'), [5, 3]);
    const capacity = this.summary?.total_bytes;
    if (this.lines.has('capacity') && capacity !== undefined) {
      context.fillStyle = color('bad');
      context.fillRect(plot.left, Math.round(y(capacity)), plot.width, 2);
    }
  }

  private paintBands(
    context: CanvasRenderingContext2D,
    plot: { left: number; top: number; width: number; height: number },
  ): void {
    const { device } = this;
    const { process } = device;
    if (process.phaseSeq.length === 0) return;
    const top = plot.top + plot.height + 6;
    const at = (x: number) =>
      upperBound(process.phaseSeq, device.pointSeq[Math.max(0, this.pointAt(this.positionAt(x)))] ?? 0) - 1;
    const runs = (of: (change: number) => number, put: (value: number, from: number, to: number) => void) => {
      let [value, from] = [Number.NaN, 0];
      const end = Math.floor(this.endOf(plot));
      for (let column = 0; column <= end; column++) {
        const change = at(LEFT + column + 0.5);
        const next = column === end || change < 0 ? Number.NaN : of(change);
        if (next === value) continue;
        if (!Number.isNaN(value)) put(value, plot.left + from, plot.left + column);
        [value, from] = [next, column];
      }
    };
    const ink = color('ink');
    runs(
      change => process.phaseOf[change] as number,
      (phase, from, to) => {
        const name = process.phases[phase] ?? 'other';
        context.fillStyle = color(`phase-${name}`);
        context.fillRect(from, top, Math.max(1, to - from - 0.5), BAND - 4);
        if (to - from > context.measureText(name).width + 6) {
          context.fillStyle = color('on-band');
          context.textAlign = 'center';
          context.fillText(name, (from + to) / 2, top + BAND - 6);
        }
      },
    );
    runs(
      change => process.stepOf[change] as number,
      (step, from, to) => {
        context.fillStyle = color('line');
        context.fillRect(from, top + BAND, Math.max(1, to - from - 1), BAND - 2);
        const label =
          step < 0
            ? 'before step 0'
            : [`step ${step}`, `${step}`].find(text => context.measureText(text).width + 6 < to - from);
        if (label && context.measureText(label).width + 6 < to - from) {
          context.fillStyle = ink;
          context.textAlign = 'center';
          context.fillText(label, (from + to) / 2, top + 2 * BAND - 5);
        }
      },
    );
  }

  private paintAxis(
    context: CanvasRenderingContext2D,
    plot: { left: number; top: number; width: number; height: number },
    mute: string,
    grid: string,
  ): void {
    const y = plot.top + plot.height + 2 * BAND + 10 + this.tracks.height;
    let step = format.labelStep(this.to - this.from, Math.max(2, plot.width / 110));
    if (this.axis.kind !== 'time') step = Math.max(1, Math.round(step));
    context.textAlign = 'center';
    for (let value = Math.ceil(this.from / step) * step; value <= this.to; value += step) {
      const x = this.x(value);
      context.fillStyle = grid;
      context.fillRect(x, plot.top + plot.height, 1, 4);
      context.fillStyle = mute;
      const text = this.axis.label(value, step);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.max(plot.left + half - 20, Math.min(x, plot.left + plot.width - half)), y + 8);
    }
    context.textAlign = 'right';
    if (plot.width > 500) context.fillText(this.axis.title, plot.left + plot.width, y + 22);
  }

  private paintMarks(
    context: CanvasRenderingContext2D,
    plot: { left: number; top: number; width: number; height: number },
    ink: string,
  ): void {
    const { axis, state } = this;
    const taken: { row: number; start: number; end: number }[] = [];
    const vertical = (position: number, style: string, dash: number[], text: string, row: number) => {
      const x = this.x(position);
      if (x < plot.left - 1 || x > plot.left + plot.width + 1) return;
      context.strokeStyle = style;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x, plot.top - 4);
      context.lineTo(x, plot.top + plot.height);
      context.stroke();
      context.setLineDash([]);
      if (text === '') return;
      context.fillStyle = style;
      const wide = context.measureText(text).width;
      context.textAlign = x + wide + 8 > plot.left + plot.width ? 'right' : 'left';
      const start = context.textAlign === 'right' ? x - 5 - wide : x + 5;
      // Of marks whose texts would overlap, the first has its text.
      if (taken.some(one => one.row === row && start < one.end + 6 && one.start < start + wide + 6)) return;
      taken.push({ row, start, end: start + wide });
      context.fillText(text, x + (context.textAlign === 'right' ? -5 : 5), plot.top - 8 - row);
    };
    for (const mark of this.marks) {
      vertical(
        mark.position,
        mark.kind === 'oom' ? color('bad') : ink,
        [4, 3],
        mark.text,
        mark.kind === 'oom' ? 13 : 0,
      );
    }
    const { point, base } = state.now;
    if (this.tracks.selected >= 0) {
      const [low, high] = this.tracks
        .extent(this.tracks.selected)
        .map(position => Math.max(plot.left, Math.min(this.x(position), plot.left + plot.width))) as [number, number];
      context.fillStyle = color('accent');
      context.globalAlpha = 0.12;
      context.fillRect(low, plot.top, Math.max(1, high - low), plot.height);
      context.globalAlpha = 1;
    }
    vertical(this.positionOfPoint(point), color('accent'), [], '', 0);
    if (base >= 0) vertical(this.positionOfPoint(base), color('accent'), [2, 2], 'compared with', 0);
    if (this.hover >= 0) vertical(axis.position[this.hover] ?? 0, color('mute'), [1, 2], '', 0);
    if (this.drag?.brush && this.drag.moved && this.hover >= 0) {
      const x = this.x(axis.position[this.hover] ?? 0);
      context.fillStyle = color('accent');
      context.globalAlpha = 0.18;
      context.fillRect(Math.min(x, this.drag.x), plot.top, Math.abs(x - this.drag.x), plot.height);
      context.globalAlpha = 1;
    }
  }
}

/** The ways to divide the areas of any run. */
export const DIVISIONS: readonly (readonly [Division, string])[] = [
  ['category', 'category'],
  ['phase', 'phase'],
  ['module', 'module'],
  ['line', 'line of the program'],
];

/** By what the areas are divided. */
export function divisionChoice(
  chosen: Division,
  onchange: (division: Division) => void,
  divisions = DIVISIONS,
): HTMLElement {
  return choice('Stacked by', divisions, chosen, value => onchange(value as Division));
}

/** The horizontal axis. */
export function axisChoice(chosen: AxisKind, onchange: (axis: AxisKind) => void): HTMLElement {
  return choice(
    'over',
    [
      ['order', 'allocation order'],
      ['steps', 'steps'],
      ['time', 'time'],
    ],
    chosen,
    value => onchange(value as AxisKind),
  );
}

/** The value that holds at an event. */
export function valueAt(changes: Changes, seq: number): number {
  const at = upperBound(changes.seq, seq) - 1;
  return at < 0 ? 0 : (changes.value[at] as number);
}

/** `1,200,000 to 1,400,000`. */
function rangeText(first: number, last: number): string {
  return `${format.count(first)} to ${format.count(last)}`;
}

const trees = new WeakMap<Float64Array, Extremes>();

function extremesOf(values: Float64Array): Extremes {
  let tree = trees.get(values);
  if (!tree) trees.set(values, (tree = new Extremes(values)));
  return tree;
}

/** The highest value between two events. */
function highestOf(changes: Changes, [from, to]: [number, number]): number {
  if (changes.seq.length === 0) return 0;
  const tree = extremesOf(changes.value);
  const [low, high] = [Math.max(0, upperBound(changes.seq, from) - 1), upperBound(changes.seq, to)];
  return high > low ? (changes.value[tree.highest(low, high)] as number) : valueAt(changes, to);
}

function packed([red, green, blue]: [number, number, number]): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function mixed(a: [number, number, number], b: [number, number, number], share: number): [number, number, number] {
  return [0, 1, 2].map(i => Math.round((a[i] as number) * share + (b[i] as number) * (1 - share))) as [
    number,
    number,
    number,
  ];
}
