/** The segments of PyTorch's caching allocator at a point in time, from the recorded segment events. */

import type { Device } from './model';

export interface SegmentAt {
  address: number;
  size: number;
  pool: number;
  expandable: boolean;
  blocks: number[];
  used: number;
}

/** The segments of a device at an event, in the order of their addresses, with the given blocks. */
export function segmentsAt(device: Device, seq: number, blocks: number[]): SegmentAt[] {
  const { segments } = device;
  const ranges = new Map<number, { size: number; pool: number; mapped: boolean }>();
  for (let i = 0; i < segments.seq.length && (segments.seq[i] as number) <= seq; i++) {
    const [address, size, pool] = [
      segments.address[i] as number,
      segments.size[i] as number,
      segments.pool[i] as number,
    ];
    switch (segments.kind[i]) {
      case 0:
        ranges.set(address, { size, pool, mapped: false });
        break;
      case 1:
        ranges.delete(address);
        break;
      case 2:
        ranges.set(address, { size, pool, mapped: true });
        break;
      default:
        unmap(ranges, address, size);
    }
  }
  const sorted = [...ranges].sort((a, b) => a[0] - b[0]);
  const found: SegmentAt[] = [];
  for (const [address, range] of sorted) {
    const last = found.at(-1);
    // Mapped parts without a gap are one expandable segment.
    if (range.mapped && last?.expandable && last.address + last.size === address && last.pool === range.pool)
      last.size += range.size;
    else found.push({ address, size: range.size, pool: range.pool, expandable: range.mapped, blocks: [], used: 0 });
  }
  const byAddress = [...blocks].sort((a, b) => (device.address[a] as number) - (device.address[b] as number));
  let at = 0;
  for (const block of byAddress) {
    const address = device.address[block] as number;
    while (at < found.length && (found[at] as SegmentAt).address + (found[at] as SegmentAt).size <= address) at += 1;
    const segment = found[at];
    if (!segment || address < segment.address) continue;
    segment.blocks.push(block);
    segment.used += device.size[block] as number;
  }
  return found;
}

/** Removes a part of mapped ranges. */
function unmap(
  ranges: Map<number, { size: number; pool: number; mapped: boolean }>,
  address: number,
  size: number,
): void {
  const end = address + size;
  for (const [from, range] of [...ranges]) {
    const to = from + range.size;
    if (to <= address || from >= end) continue;
    ranges.delete(from);
    if (from < address) ranges.set(from, { ...range, size: address - from });
    if (to > end) ranges.set(end, { ...range, size: to - end });
  }
}
