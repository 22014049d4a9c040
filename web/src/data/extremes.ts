/** Finds the highest and the lowest of any range of points: a tree of them, 16 to a node. */

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
