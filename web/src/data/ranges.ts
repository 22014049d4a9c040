/** The ranges that the program names: `record_function` labels and NVTX ranges. */

import type { Reader } from './decode';

/** What made a range. */
export const RANGE_KINDS = ['record_function', 'NVTX', 'PyTorch'] as const;

/** The allocated bytes of one device, by range. */
interface RangeLevels {
  start: Float64Array;
  peak: Float64Array;
  end: Float64Array;
}

/** The ranges of one process, in the order of their starts. */
export class Ranges {
  /** Event numbers of the start and of the end. */
  from = new Float64Array(0);
  to = new Float64Array(0);
  /** Times of the start and of the end in microseconds since the first event. */
  began = new Float64Array(0);
  ended = new Float64Array(0);
  track = new Uint8Array(0);
  kind = new Uint8Array(0);
  /** Numbers of strings. */
  private names = new Float64Array(0);
  /** By device, in the order of the process. */
  private levels: RangeLevels[] = [];
  /** By track: its thread. */
  threads: string[] = [];
  leftOut = 0;

  constructor(private text: (number: number) => string = () => '') {}

  get count(): number {
    return this.from.length;
  }

  name(range: number): string {
    return this.text(this.names[range] as number);
  }

  of(device: number): RangeLevels {
    return (
      this.levels[device] ?? {
        start: new Float64Array(this.count),
        peak: new Float64Array(this.count),
        end: new Float64Array(this.count),
      }
    );
  }

  /** The ranges whose names contain a text, or equal it, if any does. */
  matching(text: string): number[] {
    const wanted = text.trim().toLowerCase();
    const found: number[] = [];
    const equal: number[] = [];
    // Many ranges have the same name.
    const matches = new Map<number, 0 | 1 | 2>();
    for (let range = 0; range < this.count; range++) {
      const number = this.names[range] as number;
      let match = matches.get(number);
      if (match === undefined) {
        const name = this.text(number).toLowerCase();
        matches.set(number, (match = name === wanted ? 2 : name.includes(wanted) ? 1 : 0));
      }
      if (match === 2) equal.push(range);
      if (match > 0) found.push(range);
    }
    return equal.length > 0 ? equal : found;
  }

  read(reader: Reader): void {
    const rows = reader.next();
    const devices = reader.next();
    const column = (value: () => number) => Float64Array.from({ length: rows }, value);
    const rising = () => {
      let last = 0;
      return column(() => (last += reader.next()));
    };
    const added = (base: Float64Array, value: () => number) => base.map(start => start + value());
    this.from = rising();
    this.to = added(this.from, () => reader.next());
    this.began = rising();
    this.ended = added(this.began, () => reader.next());
    this.track = Uint8Array.from({ length: rows }, () => reader.next());
    const names = column(() => reader.next());
    this.names = names.map(value => Math.floor(value / 4));
    this.kind = Uint8Array.from(names, value => value % 4);
    for (let device = 0; device < devices; device++) {
      const start = column(() => reader.next());
      this.levels.push({ start, peak: added(start, () => reader.next()), end: added(start, () => reader.signed()) });
    }
  }
}
