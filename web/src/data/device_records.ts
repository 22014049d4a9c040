/** The records of one device, which a process has in its data. */

import type { Reader } from './decode';
import { Growing } from './growing';
import type { Device } from './model';

export class DeviceRecords {
  private columns = new Map<string, Growing>();
  private addresses: number[] = [];
  private liveAddresses: number[] = [];
  private categories: Growing[] = [];

  private column(name: string): Growing {
    let column = this.columns.get(name);
    if (!column) this.columns.set(name, (column = new Growing()));
    return column;
  }

  read(tag: string, reader: Reader): void {
    const rows = reader.next();
    const each = (put: () => void) => {
      for (let i = 0; i < rows; i++) put();
    };
    const rising = (name: string) => {
      const column = this.column(name);
      each(() => column.push(column.last + reader.next()));
    };
    const summed = (name: string) => {
      const column = this.column(name);
      each(() => column.push(column.last + reader.signed()));
    };
    const plain = (name: string) => {
      const column = this.column(name);
      each(() => column.push(reader.next()));
    };
    switch (tag) {
      case 'E': {
        const [seq, time] = [this.column('seq'), this.column('time')];
        each(() => seq.push(seq.last + Math.floor(reader.next() / 2)));
        each(() => time.push(time.last + reader.next()));
        break;
      }
      case 'B':
      case 'L': {
        const is_live = tag === 'L';
        if (!is_live) rising('free');
        plain(is_live ? 'live.alloc' : 'lifetime');
        const prefix = is_live ? 'live.' : '';
        plain(`${prefix}size`);
        plain(`${prefix}site`);
        const sites = this.column(`${prefix}site`);
        const address = this.column(`${prefix}address`);
        const before = is_live ? this.liveAddresses : this.addresses;
        const from = sites.length - rows;
        for (let i = 0; i < rows; i++) {
          const value = reader.next();
          const zigzag = Math.floor(value / 2);
          const change = zigzag % 2 === 0 ? zigzag / 2 : -(zigzag + 1) / 2;
          const site = sites.at(from + i);
          before[site] = (before[site] ?? 0) + (value % 2 === 0 ? change * 512 : change);
          address.push(before[site]);
        }
        plain(`${prefix}tensor`);
        break;
      }
      case 'P': {
        const categories = reader.next();
        rising('seq');
        rising('time');
        summed('total');
        summed('rest');
        for (let category = 0; category < categories; category++) {
          const column = (this.categories[category] ??= new Growing());
          each(() => column.push(column.last + reader.signed()));
        }
        break;
      }
      case 'S':
        rising('segment.seq');
        plain('segment.kind');
        summed('segment.address');
        plain('segment.size');
        plain('segment.pool');
        plain('segment.stream');
        break;
      case 'R':
      case 'U': {
        const name = tag === 'R' ? 'reserved' : 'physical';
        rising(`${name}.seq`);
        summed(`${name}.value`);
        break;
      }
    }
  }

  /** Fills a device with what was read. */
  device(device: Device): Device {
    const get = (name: string) => this.column(name).done();
    const joined = (name: string) => {
      const [freed, live] = [get(name), get(`live.${name}`)];
      const all = new Float64Array(freed.length + live.length);
      all.set(freed);
      all.set(live, freed.length);
      return all;
    };
    const [free, lifetime, live] = [get('free'), get('lifetime'), get('live.alloc')];
    const blocks = free.length + live.length;
    device.freeSeq = new Float64Array(blocks).fill(Infinity);
    device.allocSeq = new Float64Array(blocks);
    for (let i = 0; i < free.length; i++) {
      device.freeSeq[i] = free[i] as number;
      device.allocSeq[i] = (free[i] as number) - (lifetime[i] as number);
    }
    device.allocSeq.set(live, free.length);
    for (const name of ['size', 'site', 'address', 'tensor'] as const) device[name] = joined(name);
    device.pointSeq = get('seq');
    device.pointTime = get('time');
    this.order(device, free);
    if (device.info.rest) {
      device.total = get('total');
      device.restCount = get('rest');
      device.rest = this.categories.map(category => category.done());
    } else {
      device.total = sums(device);
    }
    for (let point = 1; point < device.points; point++) {
      if ((device.total[point] as number) > (device.total[device.peak] as number)) device.peak = point;
    }
    device.segments = {
      seq: get('segment.seq'),
      kind: Uint8Array.from(get('segment.kind')),
      address: get('segment.address'),
      size: get('segment.size'),
      pool: get('segment.pool'),
      stream: get('segment.stream'),
    };
    device.reserved = { seq: get('reserved.seq'), value: get('reserved.value') };
    device.physical = { seq: get('physical.seq'), value: get('physical.value') };
    this.columns.clear();
    return device;
  }

  /** Orders the allocations and frees of the listed blocks, and finds how many of them are up to each point. */
  private order(device: Device, free: Float64Array): void {
    const blocks = device.allocSeq.length;
    // Event number and block in one number, which sorts fast. It is exact below 2^53.
    const scale = 2 ** Math.ceil(Math.log2(Math.max(blocks, 2)));
    const allocs = new Float64Array(blocks);
    for (let block = 0; block < blocks; block++) allocs[block] = (device.allocSeq[block] as number) * scale + block;
    allocs.sort();
    const order = new Int32Array(blocks + free.length);
    const upto = new Int32Array(device.points);
    let [alloc, freed, point, n] = [0, 0, 0, 0];
    while (alloc < blocks || freed < free.length) {
      const allocSeq = alloc < blocks ? Math.floor((allocs[alloc] as number) / scale) : Infinity;
      const freeSeq = freed < free.length ? (free[freed] as number) : Infinity;
      const seq = Math.min(allocSeq, freeSeq);
      while (point < device.points && (device.pointSeq[point] as number) < seq) upto[point++] = n;
      order[n++] = freeSeq <= allocSeq ? ~freed++ : (allocs[alloc++] as number) % scale;
    }
    while (point < device.points) upto[point++] = n;
    device.eventBlock = order;
    device.upto = upto;
  }
}

/** The allocated bytes at each point, if all blocks are listed. */
function sums(device: Device): Float64Array {
  const total = new Float64Array(device.points);
  let [sum, event] = [0, 0];
  for (let point = 0; point < device.points; point++) {
    for (; event < (device.upto[point] as number); event++) {
      const block = device.eventBlock[event] as number;
      sum += block >= 0 ? (device.size[block] as number) : -(device.size[~block] as number);
    }
    total[point] = sum;
  }
  return total;
}
