/** Finds the highest and the lowest of any range of points: a tree of them, 16 to a node. */

import { type Changes, upperBound } from './model';

const WIDTH = 16;

export class Extremes {
  private high: Int32Array[] = [];
  private low: Int32Array[] = [];

  constructor(readonly values: Float64Array) {
    let [high, low]: (Int32Array | null)[] = [null, null];
    for (let n = values.length; n > WIDTH; ) {
      const parents = Math.ceil(n / WIDTH);
      const [nextHigh, nextLow]: [Int32Array, Int32Array] = [new Int32Array(parents), new Int32Array(parents)];
      for (let parent = 0; parent < parents; parent++) {
        const from = parent * WIDTH;
        let [best, least] = [high ? (high[from] as number) : from, low ? (low[from] as number) : from];
        for (let child = from + 1; child < Math.min(from + WIDTH, n); child++) {
          const [h, l] = [high ? (high[child] as number) : child, low ? (low[child] as number) : child];
          if ((values[h] as number) > (values[best] as number)) best = h;
          if ((values[l] as number) < (values[least] as number)) least = l;
        }
        nextHigh[parent] = best;
        nextLow[parent] = least;
      }
      this.high.push(nextHigh);
      this.low.push(nextLow);
      [high, low, n] = [nextHigh, nextLow, parents];
    }
  }

  /** The first highest point of `from` to before `to`, which is not empty. */
  highest(from: number, to: number): number {
    return this.find(from, to, this.high, 1);
  }

  /** The first lowest point. */
  lowest(from: number, to: number): number {
    return this.find(from, to, this.low, -1);
  }

  private find(from: number, to: number, levels: Int32Array[], sign: number): number {
    const { values } = this;
    let best = from;
    const take = (point: number) => {
      const [value, most] = [sign * (values[point] as number), sign * (values[best] as number)];
      if (value > most || (value === most && point < best)) best = point;
    };
    // Nodes at both ends that are not whole, level by level.
    for (let level = -1; from < to; level++) {
      const above = levels[level + 1];
      const at = (node: number) => (level < 0 ? node : ((levels[level] as Int32Array)[node] as number));
      if (!above || to - from <= WIDTH) {
        for (let node = from; node < to; node++) take(at(node));
        break;
      }
      while (from < to && from % WIDTH !== 0) take(at(from++));
      while (from < to && to % WIDTH !== 0) take(at(--to));
      [from, to] = [from / WIDTH, to / WIDTH];
    }
    return best;
  }
}

const trees = new WeakMap<Float64Array, Extremes>();

export function extremesOf(values: Float64Array): Extremes {
  let tree = trees.get(values);
  if (!tree) trees.set(values, (tree = new Extremes(values)));
  return tree;
}

/** The value that holds at an event. */
export function valueAt(changes: Changes, seq: number): number {
  const at = upperBound(changes.seq, seq) - 1;
  return at < 0 ? 0 : (changes.value[at] as number);
}

/** The highest value between two events. */
export function highestBetween(changes: Changes, [from, to]: [number, number]): number {
  if (changes.seq.length === 0) return 0;
  const tree = extremesOf(changes.value);
  const [low, high] = [Math.max(0, upperBound(changes.seq, from) - 1), upperBound(changes.seq, to)];
  return high > low ? (changes.value[tree.highest(low, high)] as number) : valueAt(changes, to);
}
