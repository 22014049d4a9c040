/** The device that a timeline draws, or the sum over ranks, with its series and its axis. */

import { type Axis, axisOf } from '../../data/axis';
import { type Extremes, extremesOf } from '../../data/extremes';
import { type Device, upperBound } from '../../data/model';
import type { Place, RankTotals } from '../../data/rank_totals';
import type { DeviceSummary } from '../../data/schema';
import { type PointSeries, SeriesSet } from '../../data/series';
import type { State } from '../../data/state';

export class Content {
  /** The whole device, the window of its visible part, or the sum over ranks. */
  device!: Device;
  set!: PointSeries;
  axis!: Axis;
  extremes!: Extremes;
  private series = new Map<Device, PointSeries>();

  constructor(
    readonly state: State,
    readonly summaryOf: (device: Device) => DeviceSummary | undefined,
    private ranks: RankTotals | null,
    /** The event whose state is compared, instead of the peak; `null` for the peak. */
    private compared: (() => number) | null,
  ) {}

  /** The sum over ranks, if it is to be drawn. */
  get sum(): RankTotals | null {
    return this.state.now.division === 'rank' ? this.ranks : null;
  }

  /** The whole device that is drawn, or of which a window is drawn; or the sum over ranks. */
  get whole(): Device {
    return this.device.whole;
  }

  /** What is to be drawn: the chosen device, or the sum over ranks. */
  get chosen(): Device {
    return this.sum ?? this.state.now.device.whole;
  }

  /** The summary of the drawn device; the sum has none. */
  get summary(): DeviceSummary | undefined {
    return this.sum ? undefined : this.summaryOf(this.device);
  }

  /** The point of the peak, or of the state that is compared instead. */
  get peak(): number {
    return this.compared ? this.whole.pointOf(this.compared()) : this.whole.peak;
  }

  /** Draws a device: the whole one or a window. */
  use(device: Device): void {
    const { axis } = this.state.now;
    this.device = device;
    this.set = device === this.sum ? this.sum : this.seriesOf(device);
    this.axis = axisOf(device, axis);
    this.extremes = extremesOf(device.total);
  }

  private seriesOf(device: Device): PointSeries {
    const { division, highlight } = this.state.now;
    const known = this.series.get(device);
    if (known?.division === division && known.highlight === highlight) return known;
    const set = new SeriesSet(device, division, highlight);
    this.series.set(device, set);
    return set;
  }

  /** Drops the series of a device that is no longer drawn; of all devices without one. */
  forget(device?: Device): void {
    if (device) this.series.delete(device);
    else this.series.clear();
  }

  /** A point of the selected device, as one of the whole device. */
  placeOf(point: number): Place {
    const { device } = this.state.now;
    const { whole } = device;
    return { device: whole, point: device === whole ? point : whole.pointOf(device.pointSeq[point] ?? 0) };
  }

  /** The point of the drawn device at which a point of the selected one is. */
  drawnPoint(point: number): number {
    const { device } = this.state.now;
    if (this.sum) return this.sum.pointAt(this.placeOf(point));
    return device === this.device ? point : this.device.pointOf(device.pointSeq[point] ?? 0);
  }

  /** The position of a point of the selected device, which can be outside the drawn window. */
  positionOfPoint(point: number): number {
    const { device, axis } = this.state.now;
    if (this.sum) return this.axis.position[this.drawnPoint(point)] ?? 0;
    return (device === this.device ? this.axis : axisOf(device, axis)).position[point] ?? 0;
  }
}

/** The phase and step at a point: `backward of step 3`. */
export function positionText(device: Device, point: number): string {
  const { process } = device;
  const at = upperBound(process.phaseSeq, device.pointSeq[point] ?? 0) - 1;
  if (at < 0) return '';
  const [phase, step] = [process.phases[process.phaseOf[at] as number] ?? '', process.stepOf[at] as number];
  return step < 0 ? phase : `${phase} of step ${step}`;
}
