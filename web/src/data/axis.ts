/** Positions of points on the horizontal axis: allocation order, steps or time. */

import * as format from '../format';
import { type Device, upperBound } from './model';

export type AxisKind = 'order' | 'steps' | 'time';

export interface Axis {
  kind: AxisKind;
  /** By point: its position. Never decreases. */
  position: Float64Array;
  begin: number;
  end: number;
  label: (value: number, step: number) => string;
  title: string;
  /** Where an event is between the points, from its number and its time in microseconds. */
  at: (seq: number, us: number) => number;
}

/** Where a step begins, as a point. Step -1 is what comes before the first one. */
interface StepRange {
  step: number;
  from: number;
  /** The point after its last. */
  to: number;
}

/** The steps of a device in order. */
export function stepRanges(device: Device): StepRange[] {
  const { phaseSeq, stepOf } = device.process;
  const ranges: StepRange[] = [];
  for (let i = 0; i < phaseSeq.length; i++) {
    const from = Math.min(device.points, upperBound(device.pointSeq, (phaseSeq[i] as number) - 1));
    const last = ranges.at(-1);
    if (last && last.step === (stepOf[i] as number)) continue;
    if (last) last.to = from;
    ranges.push({ step: stepOf[i] as number, from: ranges.length === 0 ? 0 : from, to: device.points });
  }
  return ranges.filter(range => range.from < range.to);
}

/** The position of an event on the axis of a device. Events between two points are spread evenly. */
function positionOf(device: Device, axis: Axis, seq: number): number {
  const at = upperBound(device.pointSeq, seq) - 1;
  const [before, after] = [device.pointSeq[at] ?? seq, device.pointSeq[at + 1] ?? seq];
  const [from, to] = [axis.position[at] ?? axis.begin, axis.position[at + 1] ?? axis.position[at] ?? axis.begin];
  return after > before ? from + ((to - from) * (seq - before)) / (after - before) : from;
}

const axes = new WeakMap<Device, Map<AxisKind, Axis>>();

export function axisOf(device: Device, kind: AxisKind): Axis {
  let known = axes.get(device);
  if (!known) axes.set(device, (known = new Map()));
  let axis = known.get(kind);
  if (!axis) known.set(kind, (axis = newAxis(device, kind)));
  return axis;
}

function newAxis(device: Device, kind: AxisKind): Axis {
  if (device.whole !== device) {
    // A part is drawn where the whole recording has it.
    const whole = axisOf(device.whole, kind);
    if (whole.kind === 'order') return { ...whole, position: device.pointSeq };
    if (whole.kind === 'time') return { ...whole, position: device.pointTime };
    return { ...whole, position: device.pointSeq.map(seq => positionOf(device.whole, whole, seq)) };
  }
  const n = device.points;
  if (kind === 'time') {
    const position = device.pointTime;
    return {
      kind,
      position,
      begin: position[0] ?? 0,
      end: Math.max((position[n - 1] ?? 0) * (1 + 1e-9), (position[0] ?? 0) + 1),
      label: (value, step) =>
        step >= 1e6
          ? `${format.axisLabel(value / 1e6, step / 1e6)} s`
          : `${format.axisLabel(value / 1e3, step / 1e3)} ms`,
      title: 'time since the first event',
      at: (_, us) => us,
    };
  }
  if (kind === 'steps') {
    const ranges = stepRanges(device);
    if (ranges.some(range => range.step >= 0)) {
      const position = new Float64Array(n);
      for (const range of ranges) {
        const length = range.to - range.from;
        for (let point = range.from; point < range.to; point++)
          position[point] = range.step + (point - range.from) / length;
      }
      const last = ranges.at(-1)?.step ?? 0;
      return {
        kind,
        position,
        begin: ranges[0]?.step ?? 0,
        end: last + 1,
        label: value => (value < 0 ? 'before step 0' : Number.isInteger(value) ? `step ${value}` : ''),
        title: 'steps, each in allocation order',
        at: seq => position[upperBound(device.pointSeq, seq)] ?? last + 1,
      };
    }
  }
  const complete = !device.info.rest;
  const position = complete ? Float64Array.from({ length: n }, (_, point) => point) : device.pointSeq;
  return {
    kind: 'order',
    position,
    begin: position[0] ?? 0,
    end: complete ? Math.max(n, 1) : (position[n - 1] ?? 0) + 1,
    label: value => format.count(value),
    title: complete ? 'allocations and frees, in order' : 'events of the recording, in order',
    at: complete ? seq => upperBound(device.pointSeq, seq) : seq => seq,
  };
}
