/** The visible part of the axis, and where the canvas has it. */

import { axisOf } from '../../data/axis';
import { upperBound } from '../../data/model';
import type { Content } from './content';
import type { TimelineGroup } from './group';
import { BAND, BOTTOM, HEIGHT, HEIGHT_IN_GROUP, LEFT, RIGHT } from './layout';

export class Viewport {
  from = 0;
  to = 1;

  constructor(
    private canvas: HTMLElement,
    private content: Content,
    readonly group: TimelineGroup | null,
  ) {}

  /** The width of the plot. */
  get width(): number {
    return Math.max(1, this.canvas.clientWidth - LEFT - RIGHT);
  }

  /** The height without tracks of ranges. */
  get height(): number {
    return this.group ? HEIGHT_IN_GROUP : HEIGHT;
  }

  /** The distance of the lower edge of the plot from the top. */
  get plotBottom(): number {
    return this.height - BOTTOM;
  }

  /** The distance of the tracks from the top. */
  get tracksTop(): number {
    return this.plotBottom + 2 * BAND + 4;
  }

  get length(): number {
    return this.to - this.from;
  }

  /** The range of the axis that can be shown. */
  get extent(): [number, number] {
    const { axis } = this.content;
    return this.group ? this.group.extent(axis.kind) : [axis.begin, axis.end];
  }

  show([from, to]: [number, number]): void {
    [this.from, this.to] = [from, to];
  }

  /** The range that can be shown in the place of a requested one: neither too short nor beyond the ends. */
  limited(from: number, to: number): [number, number] {
    const { axis, device } = this.content;
    const [begin, end] = this.extent;
    const least = Math.min(end - begin, axis.kind === 'order' && !device.info.rest ? 8 : (end - begin) / 1e7);
    const length = Math.max(least, Math.min(to - from, end - begin));
    const start = Math.max(begin, Math.min((from + to - length) / 2, end - length));
    return [start, start + length];
  }

  contains(position: number): boolean {
    return position >= this.from && position <= this.to;
  }

  x(position: number): number {
    return LEFT + ((position - this.from) / this.length) * this.width;
  }

  positionAt(x: number): number {
    return this.from + ((x - LEFT) / this.width) * this.length;
  }

  /** The point whose state holds at a position; -1 before the first. */
  pointAt(position: number): number {
    return upperBound(this.content.axis.position, position) - 1;
  }

  /** The points of a pixel column, as from and to; the state before it if no event is in it. */
  column(x: number, width: number): [number, number] {
    const { axis, device } = this.content;
    const low = this.positionAt(x);
    const high = this.positionAt(x + width);
    const from = upperBound(axis.position, low - Number.EPSILON * Math.abs(low));
    const to = upperBound(axis.position, high - Number.EPSILON * Math.abs(high));
    // The state at the start of the column also counts.
    return [Math.max(0, Math.min(from, to - 1, device.points - 1)), Math.max(to, 0)];
  }

  /** The first and the last event of a pixel column. */
  eventsOfColumn(x: number, width: number): [number, number] {
    const { pointSeq } = this.content.device;
    const [from, to] = this.column(x, width);
    return [pointSeq[from] ?? 0, pointSeq[Math.max(from, to - 1)] ?? 0];
  }

  get visiblePoints(): number {
    const { position } = this.content.axis;
    return Math.max(1, upperBound(position, this.to) - upperBound(position, this.from));
  }

  /** The events around the visible part, by the points of the whole recording. */
  get visibleEvents(): [number, number] {
    const { whole, device, axis, state } = this.content;
    const { position } = whole === device ? axis : axisOf(whole, state.now.axis);
    const at = (point: number) => whole.pointSeq[Math.max(0, Math.min(point, whole.points - 1))] ?? 0;
    return [at(upperBound(position, this.from) - 1), at(upperBound(position, this.to))];
  }
}
