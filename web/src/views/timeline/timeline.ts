/** The timeline: allocated bytes in series over allocation order, steps or time. */

import { type Axis, stepRanges } from '../../data/axis';
import { extremesOf } from '../../data/extremes';
import type { Device } from '../../data/model';
import type { RankTotals } from '../../data/rank_totals';
import type { DeviceSummary } from '../../data/schema';
import type { Division } from '../../data/series';
import type { Choice, State } from '../../data/state';
import type { WindowLoader } from '../../data/window_loader';
import { el, replace } from '../../dom';
import * as format from '../../format';
import { onThemeChange } from '../../theme';
import { RangeTracks } from '../range_tracks';
import { paintAreas } from './areas';
import { paintBands } from './bands';
import { axisChoice, divisionChoice } from './choices';
import { Content, positionText } from './content';
import type { TimelineGroup } from './group';
import { PointerInput } from './input';
import { LEFT, TOP } from './layout';
import { Lines } from './lines';
import { type Mark, marksOf, paintMarks } from './marks';
import { Picture } from './picture';
import { byteScale, paintAxis, paintBytes } from './scales';
import { Scene } from './scene';
import { compareWith, selectPeak, selectPoint } from './selection';
import { Texts } from './texts';
import { Viewport } from './viewport';
import { Windows } from './windows';

/** How far a key moves or zooms. */
const KEY_STEP = 0.1;

/** What distinguishes the only timeline of a page. */
interface TimelineAlone {
  /** Where to get what the page lacks; `null` if it came from a file. */
  loader: WindowLoader | null;
  /** The sum over ranks, if the page has several. */
  sum: RankTotals | null;
  /** What the areas can be. */
  divisions: readonly (readonly [Division, string])[];
}

/** What distinguishes one of several timelines of a page. */
interface TimelineInGroup {
  id: string;
  title: string;
  group: TimelineGroup;
  /** The event whose state is compared, instead of the peak. */
  compared: () => number;
}

export class Timeline {
  readonly element: HTMLElement;
  readonly content: Content;
  readonly viewport: Viewport;
  readonly tracks: RangeTracks;
  readonly picture = new Picture(() => this.paint());
  readonly texts: Texts;
  readonly windows: Windows;
  private lines: Lines;
  private input: PointerInput;
  private marks: Mark[] = [];
  /** The point under the cursor; -1 without one. */
  private hover = -1;

  constructor(
    state: State,
    summaryOf: (device: Device) => DeviceSummary | undefined,
    of: TimelineAlone | TimelineInGroup,
  ) {
    const one = 'group' in of ? of : null;
    const alone = 'loader' in of ? of : null;
    const { canvas } = this.picture;
    this.content = new Content(state, summaryOf, alone?.sum ?? null, one?.compared ?? null);
    this.viewport = new Viewport(canvas, this.content, one?.group ?? null);
    this.windows = new Windows(alone?.loader ?? null, this.content, this.viewport, {
      use: device => this.use(device),
      draw: () => this.draw(),
    });
    this.tracks = new RangeTracks({
      zoomTo: (from, to) => this.zoomTo(from, to),
      show: range => this.showRange(range),
      compare: range => this.compareRange(range),
      draw: () => this.draw(),
    });
    this.lines = new Lines(this.content);
    this.texts = new Texts(this.content, this.lines, () => {
      this.read();
      this.redraw();
    });
    this.element = this.layOut(one, alone);
    one?.group.timelines.push(this);
    this.rebuild();
    state.listen(changed => this.onChange(changed));
    onThemeChange(() => this.draw());
    this.input = new PointerInput(canvas, this.viewport, {
      zoomTo: (from, to) => this.zoomTo(from, to),
      pointAt: (x, y) => this.moveTo(x, y),
      click: (y, comparesPoint) => {
        if (this.tracks.hover >= 0) this.tracks.select(this.tracks.hover);
        else this.choose(comparesPoint, y);
      },
      leave: () => {
        [this.hover, this.tracks.hover] = [-1, -1];
        this.read();
        this.draw();
      },
      draw: () => this.draw(),
    });
    canvas.addEventListener('keydown', event => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  private layOut(one: TimelineInGroup | null, alone: TimelineAlone | null): HTMLElement {
    const { canvas } = this.picture;
    const { state } = this.content;
    canvas.setAttribute(
      'aria-label',
      `Timeline of allocated memory${one ? ` of ${one.title}` : ''}. Arrow keys move the cursor, plus and minus ` +
        'zoom, Enter shows the live allocations, P goes to the peak, brackets select the previous and the next named ' +
        'range.',
    );
    const button = (label: string, onclick: () => void) => el('button', { type: 'button', onclick }, label);
    const search = el('input', {
      type: 'search',
      placeholder: 'step, range, event or text',
      'aria-label': 'Search the timeline: a step, a named range, an event number, or a name',
      onkeydown: (event: KeyboardEvent) => event.key === 'Enter' && this.search(search.value),
    });
    return el(
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
        alone && divisionChoice(state.now.division, division => state.set({ division }), alone.divisions),
        alone && axisChoice(state.now.axis, axis => state.set({ axis })),
        search,
        button('Peak', () => selectPeak(this.content)),
        button('Whole run', () => this.zoomTo(...this.viewport.extent)),
      ),
      canvas,
      this.texts.readout,
      this.windows.element,
      this.tracks.element,
      this.texts.legend,
      this.texts.note,
      this.tracks.note,
    );
  }

  get axis(): Axis {
    return this.content.axis;
  }

  private get isInGroup(): boolean {
    return this.viewport.group !== null;
  }

  // ---- what is drawn

  private onChange(changed: Partial<Choice>): void {
    const { content } = this;
    // The sum over ranks stays the same when another of them is chosen.
    const isNew = changed.axis !== undefined || content.chosen !== content.whole;
    if (isNew || changed.division || changed.highlight !== undefined) this.rebuild(!isNew);
    const select = changed.division && this.element.querySelector('select');
    if (select && !this.isInGroup) select.value = content.state.now.division;
    if (changed.point !== undefined) this.showPoint(changed.point);
    this.read();
    this.draw();
  }

  private rebuild(keepsZoom = false): void {
    const { content } = this;
    const device = content.chosen;
    if (content.device !== undefined && content.whole !== device) {
      this.windows.clear();
      content.forget();
    }
    content.use(device);
    // The clocks of ranks differ in where they begin, so the sum has no tracks.
    this.tracks.set(content.sum ? null : device, content.axis);
    this.picture.canvas.style.height = `${this.viewport.height + this.tracks.height}px`;
    if (!keepsZoom) this.viewport.show(this.viewport.extent);
    this.marks = marksOf(content);
    const capacity = content.summary?.total_bytes;
    if (capacity !== undefined && (device.total[device.peak] ?? 0) > capacity / 2) this.lines.show('capacity');
    this.hover = -1;
    this.windows.choose();
    this.readAll();
  }

  /** Draws another window of the same device, or all of it. */
  private use(device: Device): void {
    const seq = this.hover >= 0 ? this.content.device.pointSeq[this.hover] : undefined;
    this.content.use(device);
    this.hover = seq === undefined ? -1 : device.pointOf(seq);
    this.readAll();
  }

  private readAll(): void {
    this.texts.describe(this.isInGroup, this.windows.loader !== null);
    this.read();
  }

  // ---- the visible part

  zoomTo(from: number, to: number): void {
    const { group } = this.viewport;
    const range = this.viewport.limited(from, to);
    if (group?.zoomsTogether) group.show(this.axis.kind, range);
    else this.viewport.show(range);
    this.windows.choose();
    this.redraw();
  }

  private pan(by: number): void {
    this.zoomTo(this.viewport.from + by, this.viewport.to + by);
  }

  /** Shows a range of the axis. */
  show(range: [number, number]): void {
    this.viewport.show(range);
    this.draw();
  }

  /** Shows a range of events. */
  showEvents(first: number, last: number): void {
    const { device } = this.content;
    this.showPoints(device.pointOf(first), device.pointOf(last));
  }

  /** Shows a range of points, with a margin. */
  private showPoints(from: number, to: number): void {
    const position = (point: number) => this.axis.position[Math.min(point, this.content.device.points - 1)] ?? 0;
    const [low, high] = [position(from), position(to)];
    this.zoomTo(low - (high - low) * 0.05, high + (high - low) * 0.05);
  }

  /** Makes a point of the selected device visible. */
  private showPoint(point: number): void {
    const position = this.content.positionOfPoint(point);
    if (this.viewport.contains(position)) return;
    const half = this.viewport.length / 2;
    this.zoomTo(position - half, position + half);
  }

  /** Selects the highest point of a named range, and makes the range visible. */
  private showRange(range: number): void {
    const [low, high] = this.tracks.extent(range);
    const { from, to, length } = this.viewport;
    if (low < from || high > to) {
      const wide = Math.max(length, (high - low) * 1.1);
      this.zoomTo((low + high - wide) / 2, (low + high + wide) / 2);
    }
    const { whole: device, state } = this.content;
    const [first, last] = pointsOfRange(device, range);
    state.set({ device, point: extremesOf(device.total).highest(first, last + 1), base: -1 });
  }

  /** Compares the end of a named range with its start. */
  private compareRange(range: number): void {
    const { whole: device, state } = this.content;
    const [base, point] = pointsOfRange(device, range);
    state.set({ device, base, point });
    document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
  }

  // ---- search

  /**
   * Moves to what the reader searches: a range with this name, a step, an event number, or the first block that matches
   * a text.
   */
  search(text: string): void {
    const trimmed = text.trim();
    if (trimmed === '') return;
    const { state } = this.content;
    const step = /^step\s+(\d+)$/i.exec(trimmed);
    const digits = trimmed.replace(/,/g, '');
    const isEvent = /^\d+$/.test(digits);
    // Programs name their ranges like steps, too: then both are shown.
    const isNamed = !isEvent && this.tracks.search(trimmed);
    if (step && this.showStep(Number(step[1]))) return;
    if (isNamed) return;
    if (step) return replace(this.texts.readout, `The run has no step ${step[1]}.`);
    if (isEvent) return this.select(Number(digits));
    state.set({ search: trimmed });
    document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
  }

  /** Shows a step of the chosen rank, and selects its highest point. Whether there is such a step. */
  private showStep(step: number): boolean {
    const { content } = this;
    const { sum } = content;
    const device = content.state.now.device.whole;
    const range = stepRanges(device).find(one => one.step === step);
    if (!range) return false;
    if (!sum) content.use(device);
    const drawn = (point: number) => (sum ? sum.pointAt({ device, point: Math.min(point, device.points - 1) }) : point);
    this.showPoints(drawn(range.from), drawn(range.to));
    const point = extremesOf(device.total).highest(range.from, range.to);
    this.select(device.pointSeq[point] as number);
    replace(this.texts.readout, `Step ${step} peaks at ${format.size(device.total[point] as number)}.`);
    return true;
  }

  /** Selects the state at an event of the chosen rank, with the most details that are loaded. */
  private select(seq: number): void {
    const { state } = this.content;
    const device = this.windows.complete(seq) ?? state.now.device.whole;
    state.set({ device, point: device.pointOf(seq) });
  }

  // ---- pointer and keyboard

  private moveTo(x: number, y: number): void {
    const { viewport, tracks, content } = this;
    const tolerance = (3 * viewport.length) / viewport.width;
    tracks.hover = tracks.at(y - viewport.tracksTop, viewport.positionAt(x), tolerance);
    const inside = Math.max(LEFT, Math.min(x, LEFT + viewport.width - 0.01));
    const [from, to] = viewport.column(inside, 1);
    this.hover =
      to > from ? content.extremes.highest(from, to) : Math.max(0, viewport.pointAt(viewport.positionAt(inside)));
    this.read();
    this.draw();
  }

  /** Shows the live allocations at the cursor, or compares with them. In the sum, of the rank at this height. */
  private choose(comparesPoint: boolean, y = -1): void {
    const { content, hover } = this;
    if (hover < 0) return;
    if (comparesPoint) compareWith(content, hover);
    else selectPoint(content, hover, content.sum && this.rankAt(content.sum, y));
  }

  /** The rank whose area is at this height; `null` above and below all. */
  private rankAt(sum: RankTotals, y: number): Device | null {
    const { top, height, ceiling } = this.picture.geometry;
    let left = (1 - (y - top) / height) * ceiling;
    if (y < top || y > top + height) return null;
    const rank = sum.values(this.hover).findIndex(bytes => (left -= bytes) < 0);
    return sum.devices[rank] ?? null;
  }

  /** Moves the cursor by points of the drawn device. */
  private step(by: number): void {
    const { content, viewport } = this;
    const from = this.hover >= 0 ? this.hover : content.drawnPoint(content.state.now.point);
    this.hover = Math.max(0, Math.min(content.device.points - 1, from + by));
    const position = this.axis.position[this.hover] ?? 0;
    if (!viewport.contains(position)) this.pan(position - (viewport.from + viewport.to) / 2);
    this.read();
  }

  private key(event: KeyboardEvent): void {
    const { viewport, tracks } = this;
    const { length } = viewport;
    const center = (viewport.from + viewport.to) / 2;
    const by = event.shiftKey ? Math.max(1, Math.round(viewport.visiblePoints * KEY_STEP)) : 1;
    if (event.key === 'ArrowLeft') this.step(-by);
    else if (event.key === 'ArrowRight') this.step(by);
    else if (event.key === 'PageUp') this.pan(-length / 2);
    else if (event.key === 'PageDown') this.pan(length / 2);
    else if (event.key === '+' || event.key === '=') this.zoomTo(center - length / 4, center + length / 4);
    else if (event.key === '-') this.zoomTo(center - length, center + length);
    else if (event.key === 'Home') this.zoomTo(...viewport.extent);
    else if (event.key === 'p' || event.key === 'P') selectPeak(this.content);
    else if (event.key === '[' || event.key === ']') tracks.move(event.key === ']' ? 1 : -1);
    else if (event.key === 'Escape' && tracks.selected >= 0) tracks.select(-1);
    else if (event.key === 'Enter' || event.key === ' ') this.choose(event.shiftKey);
    else return;
    event.preventDefault();
    this.draw();
  }

  // ---- texts and drawing

  /** The phase and step at a point of the selected device: `backward of step 3`. */
  positionText(point: number): string {
    return positionText(this.content.state.now.device, point);
  }

  private read(): void {
    if (this.tracks.hover >= 0) replace(this.texts.readout, ...this.tracks.text(this.tracks.hover));
    else this.texts.read(this.hover);
  }

  draw(): void {
    this.picture.draw();
  }

  /** Draws this timeline, and those that have the same vertical scale. */
  private redraw(): void {
    if (this.viewport.group) this.viewport.group.draw();
    else this.draw();
  }

  /** The highest value of the visible part, with the lines that are shown. */
  highestValue(): number {
    const { content, viewport } = this;
    const { device, extremes } = content;
    const [from, to] = viewport.column(LEFT, viewport.width);
    const most = to > from ? (device.total[extremes.highest(from, to)] as number) : 0;
    return Math.max(most, this.lines.highest(viewport.eventsOfColumn(LEFT, viewport.width)), 1);
  }

  private paint(): void {
    const { content, viewport, picture, tracks } = this;
    const { group, from, to, plotBottom } = viewport;
    const frame = picture.begin(viewport.height + tracks.height);
    if (!frame || content.device.points === 0) return;
    const { context, ratio } = frame;
    const plot = { left: LEFT, top: TOP, width: viewport.width, height: plotBottom - TOP };
    const bytes = byteScale(group ? group.highestValue() : this.highestValue());
    const { ceiling } = bytes;
    picture.geometry = { ...plot, ceiling, from, to, ratio };
    const scene = new Scene(context, ratio, plot, ceiling, content, viewport);
    picture.image = paintAreas(scene);
    paintBytes(scene, bytes);
    this.lines.paint(scene);
    paintBands(scene);
    tracks.paint(context, plot, viewport.tracksTop, position => viewport.x(position));
    paintAxis(scene, tracks.height);
    paintMarks(scene, this.marks, {
      hover: this.hover,
      brushedFrom: this.input.brushedFrom,
      range: tracks.selected >= 0 ? tracks.extent(tracks.selected) : null,
    });
  }
}

/** The first and the last point of a named range. */
function pointsOfRange(device: Device, range: number): [number, number] {
  const { from, to } = device.process.ranges;
  return [device.pointOf(from[range] as number), device.pointOf(to[range] as number)];
}
