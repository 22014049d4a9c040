/** The ranges that the program names, in tracks below the timeline: an outer range above those inside it. */

import type { Axis } from '../data/axis';
import type { Device } from '../data/model';
import { RANGE_KINDS, type Ranges } from '../data/ranges';
import { el, replace } from '../dom';
import * as format from '../format';
import { color } from '../theme';

/** The height of a track in CSS pixels. */
const TRACK = 16;
/** The number of colors of ranges. */
const COLORS = 6;
/** The space between the tracks and what is above them. */
const GAP = 6;

/** What the timeline does with ranges. */
interface RangeTracksHost {
  /** Shows a range of the axis. */
  zoomTo(from: number, to: number): void;
  /** Selects the highest point of a range, and makes the range visible. */
  show(range: number): void;
  /** Compares the end of a range with its start. */
  compare(range: number): void;
  draw(): void;
}

export class RangeTracks {
  /** The selected range, with buttons. */
  readonly element = el('div', { class: 'selection range', role: 'status' });
  readonly note = el('p', { class: 'note' });
  private device: Device | null = null;
  private ranges: Ranges | null = null;
  /** By range: where it begins and ends on the axis. */
  private low = new Float64Array(0);
  private high = new Float64Array(0);
  selected = -1;
  hover = -1;
  private found: number[] = [];
  private foundAt = -1;
  private searched = '';

  constructor(private host: RangeTracksHost) {
    this.element.hidden = true;
  }

  /** Takes the ranges of a device; `null` for none. */
  set(device: Device | null, axis: Axis): void {
    const ranges = device && device.process.ranges.count > 0 ? device.process.ranges : null;
    if (device !== this.device) [this.selected, this.searched] = [-1, ''];
    [this.device, this.ranges, this.hover] = [device, ranges, -1];
    const count = ranges?.count ?? 0;
    this.low = Float64Array.from({ length: count }, (_, range) =>
      axis.at(ranges?.from[range] as number, ranges?.began[range] as number),
    );
    this.high = Float64Array.from({ length: count }, (_, range) =>
      axis.at(ranges?.to[range] as number, ranges?.ended[range] as number),
    );
    replace(
      this.note,
      ranges && ranges.leftOut > 0
        ? `Named ranges: the ${format.number(ranges.count, 'longest one')} of the outermost tracks. ` +
            `${format.number(ranges.leftOut, 'other')} ${ranges.leftOut === 1 ? 'is' : 'are'} left out.`
        : '',
    );
    this.note.hidden = !ranges || ranges.leftOut === 0;
    this.read();
  }

  /** How much space the tracks take. */
  get height(): number {
    return this.ranges ? this.ranges.threads.length * TRACK + GAP : 0;
  }

  /** The part of the axis that a range covers. */
  extent(range: number): [number, number] {
    return [this.low[range] as number, this.high[range] as number];
  }

  /** The range at a place: the distance from the top of the tracks, and a part of the axis. -1 without one. */
  at(y: number, position: number, tolerance: number): number {
    const { ranges } = this;
    const track = Math.floor((y - GAP) / TRACK);
    if (!ranges || track < 0 || track >= ranges.threads.length) return -1;
    let [best, distance] = [-1, tolerance];
    for (let range = 0; range < ranges.count && (this.low[range] as number) <= position + tolerance; range++) {
      if (ranges.track[range] !== track) continue;
      const [low, high] = this.extent(range);
      const far = Math.max(low - position, position - high, 0);
      // Of two ranges that meet here, the later one.
      if (far <= distance) [best, distance] = [range, far];
    }
    return best;
  }

  /** `step 3: record_function, 12.3 ms`, with the allocated bytes. */
  private figures(range: number): { name: string; about: string; start: number; peak: number; end: number } {
    const [ranges, device] = [this.ranges as Ranges, this.device as Device];
    const thread = ranges.threads[ranges.track[range] as number];
    const levels = ranges.of(device.process.devices.indexOf(device));
    return {
      name: ranges.name(range) || '(no name)',
      about: [
        RANGE_KINDS[ranges.kind[range] as number],
        thread ? `thread ${thread}` : '',
        format.duration((ranges.ended[range] as number) - (ranges.began[range] as number)),
      ]
        .filter(text => text)
        .join(', '),
      start: levels.start[range] as number,
      peak: levels.peak[range] as number,
      end: levels.end[range] as number,
    };
  }

  /** What is read of a range under the pointer. */
  text(range: number): (Node | string)[] {
    const { name, about, start, peak, end } = this.figures(range);
    return [
      el('b', {}, name),
      ` (${about}) \u00b7 ${format.size(start)} before, peak ${format.size(peak)}, ${format.size(end)} after ` +
        `(${format.signedSize(end - start)})`,
    ];
  }

  select(range: number): void {
    this.selected = range;
    this.read();
    if (range >= 0) this.host.show(range);
    this.host.draw();
  }

  /** Selects the next or the previous range. */
  move(by: 1 | -1): void {
    const count = this.ranges?.count ?? 0;
    if (count === 0) return;
    this.select(this.selected < 0 ? (by > 0 ? 0 : count - 1) : (this.selected + by + count) % count);
  }

  /** Selects the first range whose name contains a text, and the next one when it is searched again. */
  search(text: string): boolean {
    if (!this.ranges) return false;
    if (text !== this.searched) {
      [this.found, this.foundAt, this.searched] = [this.ranges.matching(text), -1, text];
    }
    if (this.found.length === 0) return false;
    this.foundAt = (this.foundAt + 1) % this.found.length;
    this.select(this.found[this.foundAt] as number);
    return true;
  }

  private read(): void {
    const range = this.selected;
    this.element.hidden = range < 0 || !this.ranges;
    if (this.element.hidden) return replace(this.element);
    const isFound = this.found[this.foundAt] === range && this.found.length > 1 && this.searched !== '';
    const button = (label: string, onclick: () => void, title?: string) =>
      el('button', { type: 'button', title, onclick }, label);
    replace(
      this.element,
      el(
        'span',
        { class: 'facts' },
        'Range ',
        ...this.text(range),
        isFound ? ` \u00b7 ${this.foundAt + 1} of ${format.count(this.found.length)} that match` : '',
      ),
      button('Zoom to it', () => {
        const [low, high] = this.extent(range);
        this.host.zoomTo(low - (high - low) * 0.05, high + (high - low) * 0.05);
      }),
      button('Compare its end with its start', () => this.host.compare(range)),
      button('Previous', () => this.move(-1), 'Previous range: ['),
      button('Next', () => this.move(1), 'Next range: ]'),
      button('Clear', () => this.select(-1), 'Clear: Escape'),
    );
  }

  /** Draws the tracks below `top`. `x` places a part of the axis. */
  paint(
    context: CanvasRenderingContext2D,
    plot: { left: number; width: number },
    top: number,
    x: (position: number) => number,
  ): void {
    const { ranges } = this;
    if (!ranges) return;
    const right = plot.left + plot.width;
    const drawnTo = new Float64Array(ranges.threads.length).fill(-1);
    const colors = Array.from({ length: COLORS }, (_, number) => color(`range-${number}`));
    const put = (range: number) => {
      const track = ranges.track[range] as number;
      const from = Math.max(plot.left, x(this.low[range] as number));
      const to = Math.min(right, Math.max(x(this.high[range] as number) - 0.5, from + 1));
      if (to <= plot.left || from >= right) return;
      const marked = range === this.selected || range === this.hover;
      // Of ranges that share a pixel, the first is drawn.
      if (!marked && to <= (drawnTo[track] as number)) return;
      drawnTo[track] = Math.max(drawnTo[track] as number, Math.ceil(to));
      const y = top + GAP + track * TRACK;
      const name = ranges.name(range);
      context.fillStyle = colors[hash(name) % COLORS] as string;
      context.fillRect(from, y, to - from, TRACK - 2);
      if (marked) {
        context.strokeStyle = color(range === this.selected ? 'accent' : 'ink');
        context.lineWidth = 2;
        context.strokeRect(from, y, to - from, TRACK - 2);
        context.lineWidth = 1;
      }
      if (to - from < 14) return;
      const text = fitting(context, name, to - from - 6);
      if (text === '') return;
      context.fillStyle = color('on-band');
      context.textAlign = 'center';
      context.fillText(text, (from + to) / 2, y + TRACK - 5);
    };
    for (let range = 0; range < ranges.count; range++) put(range);
    for (const range of [this.hover, this.selected]) if (range >= 0) put(range);
  }
}

/** A text, cut to a width; empty if less than three of its characters fit. */
function fitting(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let length = Math.floor((text.length * width) / Math.max(1, context.measureText(text).width));
  while (length >= 3 && context.measureText(`${text.slice(0, length)}\u2026`).width > width) length -= 1;
  return length >= 3 ? `${text.slice(0, length)}\u2026` : '';
}

/** A number for a name without its digits, so that `step 1` and `step 2` have the same color. */
function hash(name: string): number {
  let value = 7;
  for (const char of name.replace(/\d+/g, '#')) value = (value * 31 + (char.codePointAt(0) as number)) >>> 0;
  return value;
}
