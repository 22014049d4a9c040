/** Divides a device's memory into series (by category, phase, module or line), exact at every point. */

import { CATEGORIES } from './categories';
import { type Device, moduleText } from './model';

export type Division = 'category' | 'phase' | 'module' | 'line' | 'custom' | 'rank';

/** What stands for the blocks that no rule of the user's own categories matches. */
export const NO_CUSTOM_CATEGORY = 'none of the rules';

/** Blocks in a color of their own; all others have another. */
export interface Highlight {
  label: string;
  has: (device: Device, block: number) => boolean;
}

/** The number of series with a color of their own; smaller ones are added up. */
const MOST = 11;
/** The number of events between two stored states. */
const INTERVAL = 512;
export interface OneSeries {
  label: string;
  /** The name of its color in the style sheet. */
  color: string;
  /** The highest number of bytes. */
  most: number;
}

/** A device's memory at each point, in series. */
export interface PointSeries {
  readonly device: Device;
  readonly division: Division;
  readonly highlight: Highlight | null;
  readonly series: OneSeries[];
  /** Writes the bytes of each series at a point to `out`. */
  at(point: number, out: Float64Array): void;
  /** The bytes of each series at a point. */
  values(point: number): Float64Array;
}

/** The name of a module with numbers replaced: `blocks.*`; modules inside it belong to it. */
export function modulePattern(path: string): string {
  if (path.startsWith('/')) return moduleText(path);
  const parts = path.split('.');
  const at = parts.findIndex(part => /^\d+$/.test(part));
  if (at >= 0) return [...parts.slice(0, at), '*'].join('.');
  return parts[0] ?? path;
}

/** The group of each block, and the names of the groups. */
function groups(device: Device, division: Division, highlight: Highlight | null): [Int32Array, string[]] {
  const { process, site } = device;
  if (highlight) {
    const group = Int32Array.from(site, (_, block) => (highlight.has(device, block) ? 0 : 1));
    return [group, [highlight.label, 'other allocations']];
  }
  const numbers = new Map<string, number>();
  const names: string[] = [];
  const numberOf = (name: string) => {
    let number = numbers.get(name);
    if (number === undefined) {
      numbers.set(name, (number = names.length));
      names.push(name);
    }
    return number;
  };
  if (division === 'category') CATEGORIES.forEach(numberOf);
  if (division === 'phase') process.phases.forEach(numberOf);
  const bySite = new Int32Array(process.sites).fill(-1);
  const byTensor = new Map<number, number>();
  const group = new Int32Array(site.length);
  for (let block = 0; block < site.length; block++) {
    const at = site[block] as number;
    const tensor = device.tensor[block] as number;
    // A named tensor can be in another module than the call that allocated it.
    if (division === 'module' && tensor > 0) {
      let found = byTensor.get(tensor);
      if (found === undefined) byTensor.set(tensor, (found = numberOf(moduleName(device, block))));
      group[block] = found;
      continue;
    }
    if ((bySite[at] as number) < 0) {
      bySite[at] = numberOf(
        division === 'category'
          ? (process.categories[process.category(at)]?.name ?? 'unknown')
          : division === 'phase'
            ? (process.phases[process.phase(at)] ?? 'other')
            : division === 'line'
              ? process.location(process.stack(at)) || 'no stack'
              : division === 'custom'
                ? (process.custom(at) ?? NO_CUSTOM_CATEGORY)
                : moduleName(device, block),
      );
    }
    group[block] = bySite[at] as number;
  }
  return [group, names];
}

function moduleName(device: Device, block: number): string {
  const module = device.process.module(device, block);
  return module === null ? 'no module' : modulePattern(module);
}

export class SeriesSet implements PointSeries {
  readonly series: OneSeries[] = [];
  /** By block: its series. */
  readonly of: Uint8Array;
  /** The series of the blocks that are not listed; -1 if they are divided like the others, or if there are none. */
  private restSeries = -1;
  /** By category: its series. */
  private categorySeries: number[] = [];
  private states: Float64Array;
  private now: Float64Array;
  private nowEvent = 0;

  constructor(
    readonly device: Device,
    readonly division: Division,
    readonly highlight: Highlight | null = null,
  ) {
    const [group, names] = groups(device, division, highlight);
    const most = highest(device, group, names.length);
    const byCategory = division === 'category' && !highlight;
    const isUnmatched = (name: string) => division === 'custom' && name === NO_CUSTOM_CATEGORY;
    const isFixed = byCategory || division === 'phase' || highlight !== null;
    const { process } = device;
    let chosen = names.map((_, number) => number);
    if (byCategory && device.info.rest) {
      device.rest.forEach((bytes, category) => {
        const number = names.indexOf(process.categories[category]?.name ?? '');
        if (number >= 0) most[number] = (most[number] as number) + bytes.reduce((a, b) => Math.max(a, b), 0);
      });
    }
    if (!isFixed) {
      // Equal ones keep their order, so the same run has the same colors.
      chosen.sort((a, b) => (most[b] as number) - (most[a] as number));
      chosen = chosen.slice(0, MOST);
    }
    chosen = chosen.filter(number => (most[number] as number) > 0);
    const seriesOf = new Int32Array(names.length).fill(-1);
    for (const number of chosen) {
      seriesOf[number] = this.series.length;
      const name = names[number] as string;
      const plural = process.categories.find(category => category.name === name)?.plural;
      this.series.push({
        label: byCategory ? (plural ?? name) : name,
        color: highlight
          ? number === 0
            ? 'highlight'
            : 'series-muted'
          : isFixed
            ? `${division}-${name}`
            : isUnmatched(name)
              ? 'series-muted'
              : `series-${this.series.length}`,
        most: most[number] as number,
      });
    }
    const left = names.filter((_, number) => (seriesOf[number] as number) < 0 && (most[number] as number) > 0).length;
    if (left > 0) {
      const [noun, nouns] = { module: ['module', 'modules'], custom: ['category', 'categories'] }[
        division as string
      ] ?? ['line', 'lines'];
      this.series.push({ label: `${left} other ${left === 1 ? noun : nouns}`, color: 'series-other', most: 0 });
    }
    const other = Math.max(0, this.series.length - 1);
    if (device.info.rest && !byCategory) {
      this.restSeries = this.series.length;
      this.series.push({ label: 'allocations not listed singly', color: 'series-rest', most: 0 });
    }
    this.categorySeries = process.categories.map(category => seriesOf[names.indexOf(category.name)] ?? -1);
    this.of = new Uint8Array(group.length);
    for (let block = 0; block < group.length; block++) {
      const series = seriesOf[group[block] as number] as number;
      this.of[block] = series < 0 ? other : series;
    }
    // At most 14 series.
    const width = this.series.length;
    const { eventBlock, size } = device;
    this.now = new Float64Array(width);
    this.states = new Float64Array((Math.floor(eventBlock.length / INTERVAL) + 1) * width);
    for (let event = 0; event < eventBlock.length; event++) {
      if (event % INTERVAL === 0) this.states.set(this.now, (event / INTERVAL) * width);
      this.step(event, eventBlock, size);
    }
    if (eventBlock.length % INTERVAL === 0) this.states.set(this.now, (eventBlock.length / INTERVAL) * width);
    this.nowEvent = eventBlock.length;
  }

  private step(event: number, eventBlock: Int32Array, size: Float64Array): void {
    const block = eventBlock[event] as number;
    const at = block >= 0 ? block : ~block;
    const series = this.of[at] as number;
    const bytes = size[at] as number;
    this.now[series] = (this.now[series] as number) + (block >= 0 ? bytes : -bytes);
  }

  /** Writes the bytes of each series at a point to `out`. */
  at(point: number, out: Float64Array): void {
    const { device } = this;
    const event = device.upto[point] ?? 0;
    const width = this.series.length;
    if (event < this.nowEvent || event - this.nowEvent > INTERVAL) {
      const state = Math.floor(event / INTERVAL);
      this.now.set(this.states.subarray(state * width, (state + 1) * width));
      this.nowEvent = state * INTERVAL;
    }
    while (this.nowEvent < event) this.step(this.nowEvent++, device.eventBlock, device.size);
    out.set(this.now);
    if (!device.info.rest) return;
    device.rest.forEach((bytes, category) => {
      const series = this.restSeries >= 0 ? this.restSeries : (this.categorySeries[category] as number);
      if (series >= 0) out[series] = (out[series] as number) + (bytes[point] as number);
    });
  }

  /** The bytes of each series at a point. */
  values(point: number): Float64Array {
    const out = new Float64Array(this.series.length);
    this.at(point, out);
    return out;
  }
}

/** The highest number of bytes of each group. */
function highest(device: Device, group: Int32Array, groups: number): Float64Array {
  const [now, most] = [new Float64Array(groups), new Float64Array(groups)];
  for (const block of device.eventBlock) {
    const at = block >= 0 ? block : ~block;
    const number = group[at] as number;
    const bytes = (now[number] as number) + (block >= 0 ? 1 : -1) * (device.size[at] as number);
    now[number] = bytes;
    if (bytes > (most[number] as number)) most[number] = bytes;
  }
  return most;
}
