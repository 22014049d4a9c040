/** Timelines of several devices on the same scale. */

import type { Axis, AxisKind } from '../../data/axis';

/** A timeline as its group knows it. */
interface Member {
  readonly axis: Axis;
  highestValue(): number;
  show(range: [number, number]): void;
  draw(): void;
}

export class TimelineGroup {
  readonly timelines: Member[] = [];
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
