/** The sum of several processes' allocated bytes on a common clock, divided by rank. Exact at every point. */

import { type Reader, records } from './decode';
import { type Changes, Device, Process, type Segments, upperBound } from './model';
import type { OneSeries, PointSeries } from './series';

/** The number of points between two stored states. */
const INTERVAL = 512;

interface Json {
  begin_ns: string;
  complete: boolean;
  events: number;
  /** By series: the number of the process and the device. */
  series: [number, number][];
}

/** A place in the sum: a device, and one of its points. */
export interface Place {
  device: Device;
  point: number;
}

/** The sum as a device without blocks, whose series are devices. */
export class RankTotals extends Device implements PointSeries {
  readonly division = 'rank' as const;
  readonly highlight = null;
  readonly series: OneSeries[];
  readonly device = this;
  /** By series: its device, and when its process began, in microseconds after the first of all. */
  readonly devices: Device[];
  private offsets: number[] = [];
  /**
   * If the page has all events: the series of each, and how many points of each series are before every `INTERVAL`th.
   */
  private order: Uint8Array | null = null;
  private states = new Int32Array(0);
  /** Otherwise the bytes of each series at each point. */
  private parts: Float64Array[] = [];
  private now: Int32Array;
  private nowPoint = 0;

  /** `deviceOf` finds the device of a process of the page, and its name. */
  static of(
    bytes: Uint8Array,
    deviceOf: (process: number, device: number) => { device: Device; name: string } | undefined,
  ): RankTotals | null {
    const order: Uint8Array[] = [];
    let json: Json | null = null;
    let sums: Reader | null = null;
    for (const [tag, reader] of records(bytes)) {
      if (tag === 'J') json = JSON.parse(new TextDecoder().decode(bytes.subarray(reader.at, reader.end))) as Json;
      else if (tag === 'O') order.push(Uint8Array.from({ length: reader.next() }, () => reader.next()));
      else if (tag === 'T') sums = reader;
    }
    if (!json) return null;
    const found = json.series.map(([process, device]) => deviceOf(process, device));
    // A device without allocations adds nothing, and the page does not list it.
    return new RankTotals(
      json,
      found.map(one => one?.device ?? null),
      found.map(one => one?.name ?? ''),
      order,
      sums,
    );
  }

  private constructor(
    json: Json,
    devices: (Device | null)[],
    names: string[],
    order: Uint8Array[],
    sums: Reader | null,
  ) {
    const events = json.events;
    super(new Process(), {
      device: 0,
      source: 'sum',
      events,
      blocks: 0,
      rest: json.complete ? null : { blocks: 0, bytes: 0, largest: 0 },
      segments_left_out: 0,
      reserved_left_out: 0,
      physical_left_out: 0,
      mismatches: devices.reduce((sum, device) => sum + (device?.info.mismatches ?? 0), 0),
    });
    const listed = devices.flatMap((device, number) =>
      device ? [{ device, number, name: names[number] as string }] : [],
    );
    this.devices = listed.map(one => one.device);
    const begin = BigInt(json.begin_ns);
    this.offsets = this.devices.map(device => Number(device.process.beginNs - begin) / 1000);
    const none: Changes = { seq: new Float64Array(0), value: new Float64Array(0) };
    [this.reserved, this.physical] = [none, none];
    this.segments = {
      seq: none.seq,
      kind: new Uint8Array(0),
      address: none.seq,
      size: none.seq,
      pool: none.seq,
      stream: none.seq,
    } satisfies Segments;
    this.now = new Int32Array(this.devices.length);
    if (sums)
      this.readSums(
        sums,
        listed.map(one => one.number),
        json.series.length,
      );
    else this.readOrder(order, new Map(listed.map((one, at) => [one.number, at])));
    for (let point = 1; point < this.points; point++)
      if ((this.total[point] as number) > (this.total[this.peak] as number)) this.peak = point;
    this.series = listed.map(({ device, name }, at) => ({
      label: name,
      color: `series-${at % 11}`,
      most: device.total[device.peak] ?? 0,
    }));
  }

  private readOrder(order: Uint8Array[], places: Map<number, number>): void {
    this.order = new Uint8Array(order.reduce((sum, part) => sum + part.length, 0));
    let points = 0;
    for (const part of order) {
      for (const series of part) {
        const place = places.get(series);
        if (place !== undefined) this.order[points++] = place;
      }
    }
    this.order = this.order.subarray(0, points);
    const width = this.devices.length;
    this.pointSeq = Float64Array.from({ length: points }, (_, point) => point);
    this.pointTime = new Float64Array(points);
    this.total = new Float64Array(points);
    this.states = new Int32Array((Math.floor(points / INTERVAL) + 1) * width);
    let [sum, last] = [0, 0];
    for (let point = 0; point < points; point++) {
      if (point % INTERVAL === 0) this.states.set(this.now, (point / INTERVAL) * width);
      const series = this.order[point] as number;
      const device = this.devices[series] as Device;
      const own = this.now[series] as number;
      sum += (device.total[own] ?? 0) - (own > 0 ? (device.total[own - 1] as number) : 0);
      this.total[point] = sum;
      // Times are rounded to microseconds; the order is that of nanoseconds.
      last = Math.max(last, (device.pointTime[own] ?? 0) + (this.offsets[series] as number));
      this.pointTime[point] = last;
      this.now[series] = own + 1;
    }
    if (points % INTERVAL === 0) this.states.set(this.now, (points / INTERVAL) * width);
    this.nowPoint = points;
  }

  private readSums(reader: Reader, listed: number[], width: number): void {
    const points = reader.next();
    reader.next();
    const column = (value: () => number) => Float64Array.from({ length: points }, value);
    const summed = (next: () => number) => {
      let last = 0;
      return column(() => (last += next()));
    };
    this.pointSeq = summed(() => reader.next());
    this.pointTime = summed(() => reader.next());
    const all = Array.from({ length: width }, () => summed(() => reader.signed()));
    this.parts = listed.map(number => all[number] as Float64Array);
    this.total = column(() => 0).map((_, point) => this.parts.reduce((sum, part) => sum + (part[point] as number), 0));
  }

  /** How many points of each series are up to a point of the sum. */
  private counts(point: number): Int32Array {
    const order = this.order as Uint8Array;
    const width = this.devices.length;
    const end = point + 1;
    if (end < this.nowPoint || end - this.nowPoint > INTERVAL) {
      const state = Math.floor(end / INTERVAL);
      this.now.set(this.states.subarray(state * width, (state + 1) * width));
      this.nowPoint = state * INTERVAL;
    }
    for (; this.nowPoint < end; this.nowPoint++) {
      const series = order[this.nowPoint] as number;
      this.now[series] = (this.now[series] as number) + 1;
    }
    return this.now;
  }

  /** Writes the bytes of each series at a point to `out`. */
  at(point: number, out: Float64Array): void {
    if (!this.order) {
      this.parts.forEach((part, series) => (out[series] = part[point] as number));
      return;
    }
    const counts = this.counts(point);
    this.devices.forEach((device, series) => {
      const count = counts[series] as number;
      out[series] = count > 0 ? (device.total[count - 1] as number) : 0;
    });
  }

  values(point: number): Float64Array {
    const out = new Float64Array(this.series.length);
    this.at(point, out);
    return out;
  }

  /** The state of a device at a point of the sum: its last point until then. */
  place(point: number, device: Device): Place {
    const series = Math.max(0, this.devices.indexOf(device));
    const chosen = this.devices[series] as Device;
    if (this.order) return { device: chosen, point: Math.max(0, (this.counts(point)[series] as number) - 1) };
    const time = (this.pointTime[point] ?? 0) - (this.offsets[series] as number);
    return { device: chosen, point: Math.max(0, upperBound(chosen.pointTime, time) - 1) };
  }

  /** The point of the sum that shows a point of a device. */
  pointAt({ device, point }: Place): number {
    const series = this.devices.indexOf(device);
    if (series < 0) return 0;
    if (!this.order) {
      const time = (device.pointTime[point] ?? 0) + (this.offsets[series] as number);
      return Math.max(0, upperBound(this.pointTime, time) - 1);
    }
    // The first point of the sum that has this many points of the series.
    let [low, high] = [0, this.points - 1];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if ((this.counts(middle)[series] as number) > point) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
