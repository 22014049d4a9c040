/** The run as the page has it: for each device, every block with its lifetime, and points at which totals are known. */

import { records } from './decode';
import { DeviceRecords } from './device_records';
import { Growing } from './growing';
import { Ranges } from './ranges';

interface DeviceInfo {
  device: number;
  source: string;
  events: number;
  blocks: number;
  rest: { blocks: number; bytes: number; largest: number } | null;
  segments_left_out: number;
  reserved_left_out: number;
  physical_left_out: number;
  mismatches: number;
}

interface Tables {
  strings: string[];
  /** Name, file, line, flags. */
  frames: [number, number, number, number][];
  /** By stack: the caller's stack plus one, 0 for an outermost frame. */
  callers: number[];
  /** By stack: its innermost frame. */
  calls: number[];
  /** Numbers of stacks, nodes, modules, custom categories and pools are plus one; 0 is none. */
  sites: {
    stack: number[];
    node: number[];
    module: number[];
    category: number[];
    phase: number[];
    custom: number[];
    pool: number[];
  };
  /** By custom category: its name. */
  custom_categories: number[];
  /** Name, shape, module plus one. */
  tensors: [number, number, number][];
}

interface Json {
  begin_ns: string;
  categories: { name: string; plural: string }[];
  phases: string[];
  shortest_phase: number;
  ranges: { tracks: number[]; left_out: number } | null;
  devices: DeviceInfo[];
  sources: [number, [number, string[]][]][];
  tables: Tables;
}

export interface Frame {
  name: string;
  file: string;
  line: number;
  native: boolean;
  library: boolean;
}

/** A value after each of its changes. */
export interface Changes {
  seq: Float64Array;
  value: Float64Array;
}

export interface Segments {
  seq: Float64Array;
  /** 0 to 3: alloc, free, map, unmap. */
  kind: Uint8Array;
  address: Float64Array;
  size: Float64Array;
  pool: Float64Array;
  stream: Float64Array;
}

/** The first index whose value is above `value`, in a rising array. */
export function upperBound(values: Float64Array, value: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((values[middle] as number) <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** One device of one process. */
export class Device {
  /** By block: its allocation, its free (`Infinity` if it was allocated at the end), and the rest. */
  allocSeq!: Float64Array;
  freeSeq!: Float64Array;
  size!: Float64Array;
  site!: Float64Array;
  address!: Float64Array;
  tensor!: Float64Array;
  /** Allocations and frees of the listed blocks in order: the block, or its complement for a free. */
  eventBlock!: Int32Array;
  /** The points: event number, time in microseconds, allocated bytes, and the number of listed events up to it. */
  pointSeq!: Float64Array;
  pointTime!: Float64Array;
  total!: Float64Array;
  upto!: Int32Array;
  /** By point: bytes of the blocks that are not listed, by category; and their number. */
  rest: Float64Array[] = [];
  restCount: Float64Array | null = null;
  segments!: Segments;
  reserved!: Changes;
  physical!: Changes;
  /** The point of the peak. */
  peak = 0;
  /** The device of the whole recording, and the first and the last event if this is a part of it. */
  whole: Device = this;
  window: [number, number] | null = null;

  constructor(
    readonly process: Process,
    readonly info: DeviceInfo,
  ) {}

  get points(): number {
    return this.pointSeq.length;
  }

  /** The last point that is not after an event; 0 if there is none. */
  pointOf(seq: number): number {
    return Math.max(0, upperBound(this.pointSeq, seq) - 1);
  }

  /** Whether it has the state at an event. */
  covers(seq: number): boolean {
    return !this.window || (this.window[0] <= seq && seq <= this.window[1]);
  }

  /** The listed blocks that are allocated at a point. */
  live(point: number): number[] {
    const seq = this.pointSeq[point] ?? -1;
    const { allocSeq, freeSeq } = this;
    const found: number[] = [];
    for (let block = 0; block < allocSeq.length; block++) {
      if ((allocSeq[block] as number) <= seq && seq < (freeSeq[block] as number)) found.push(block);
    }
    return found;
  }

  /** The time of an event in microseconds: exact if the event is a point, else of the point before. */
  timeOf(seq: number): number {
    return this.pointTime[this.pointOf(seq)] ?? 0;
  }
}

/** One process. */
export class Process {
  devices: Device[] = [];
  categories: { name: string; plural: string }[] = [];
  phases: string[] = [];
  beginNs = 0n;
  shortestPhase = 0;
  /** Where phases and steps begin; step -1 is before the first. */
  phaseSeq: Float64Array = new Float64Array(0);
  phaseOf: Float64Array = new Float64Array(0);
  stepOf: Float64Array = new Float64Array(0);
  /** The ranges that the program names. */
  readonly ranges = new Ranges(number => this.string(number));
  private json!: Json;
  private sourceLines = new Map<number, [number, string[]][]>();
  private ownLine = new Map<number, number>();

  /** Without data, it is a process without blocks. */
  constructor(bytes?: Uint8Array) {
    if (bytes) this.read(bytes);
  }

  private read(bytes: Uint8Array): void {
    const parts: DeviceRecords[] = [];
    const part = (number: number) => (parts[number] ??= new DeviceRecords());
    const [phaseSeq, phase, step] = [new Growing(), new Growing(), new Growing()];
    for (const [tag, reader] of records(bytes)) {
      if (tag === 'J') {
        this.json = JSON.parse(new TextDecoder().decode(bytes.subarray(reader.at, reader.end))) as Json;
      } else if (tag === 'H') {
        const rows = reader.next();
        for (let i = 0; i < rows; i++) phaseSeq.push(phaseSeq.last + reader.next());
        for (let i = 0; i < rows; i++) phase.push(reader.next());
        for (let i = 0; i < rows; i++) step.push(reader.next() - 1);
      } else if (tag === 'A') {
        this.ranges.read(reader);
      } else {
        part(reader.next()).read(tag, reader);
      }
    }
    [this.phaseSeq, this.phaseOf, this.stepOf] = [phaseSeq.done(), phase.done(), step.done()];
    this.categories = this.json.categories;
    this.phases = this.json.phases;
    this.beginNs = BigInt(this.json.begin_ns);
    this.shortestPhase = this.json.shortest_phase;
    this.devices = this.json.devices.map((info, number) => part(number).device(new Device(this, info)));
    this.ranges.threads = (this.json.ranges?.tracks ?? []).map(name => this.string(name));
    this.ranges.leftOut = this.json.ranges?.left_out ?? 0;
    for (const [file, ranges] of this.json.sources) this.sourceLines.set(file, ranges);
  }

  string(number: number): string {
    return this.json.tables.strings[number] ?? '';
  }

  /** The value of an optional reference, where 0 is none. */
  private optional(number: number): string | null {
    return number === 0 ? null : this.string(number - 1);
  }

  get sites(): number {
    return this.json.tables.sites.stack.length;
  }

  category(site: number): number {
    return this.json.tables.sites.category[site] as number;
  }

  phase(site: number): number {
    return this.json.tables.sites.phase[site] as number;
  }

  /** The names of the custom categories; empty if the run was analyzed without. */
  get customCategories(): string[] {
    return this.json.tables.custom_categories.map(name => this.string(name));
  }

  /** The custom category of a site; `null` if no rule matches. */
  custom(site: number): string | null {
    const number = this.json.tables.sites.custom[site] as number;
    return number === 0 ? null : this.string(this.json.tables.custom_categories[number - 1] as number);
  }

  /** The text of a site's category, with the id of the private pool: `memory pool (0, 1)`. */
  categoryText(site: number): string {
    const pool = this.optional(this.json.tables.sites.pool[site] as number);
    const plural = this.categories[this.category(site)]?.plural ?? '';
    return pool === null ? plural : `${plural} ${pool}`;
  }

  /** The stack of a site plus one; 0 without a known frame. */
  stack(site: number): number {
    return this.json.tables.sites.stack[site] as number;
  }

  node(site: number): string | null {
    return this.optional(this.json.tables.sites.node[site] as number);
  }

  tensor(number: number): { name: string; shape: string; module: string | null } | null {
    const row = this.json.tables.tensors[number - 1];
    return row ? { name: this.string(row[0]), shape: this.string(row[1]), module: this.optional(row[2]) } : null;
  }

  /** The module of a block, as in the summary: its path, or `/` and the class of a model itself. */
  module(device: Device, block: number): string | null {
    const tensor = this.json.tables.tensors[(device.tensor[block] as number) - 1];
    const held = tensor ? this.optional(tensor[2]) : null;
    return held ?? this.optional(this.json.tables.sites.module[device.site[block] as number] as number);
  }

  frame(number: number): Frame {
    const [name, file, line, flags] = this.json.tables.frames[number] as [number, number, number, number];
    return {
      name: this.string(name),
      file: this.string(file),
      line,
      native: (flags & 1) > 0,
      library: (flags & 2) > 0,
    };
  }

  /** The numbers of the frames of a stack, innermost first. */
  frames(stack: number): number[] {
    const found: number[] = [];
    for (let at = stack; at > 0; at = this.json.tables.callers[at - 1] as number) {
      found.push(this.json.tables.calls[at - 1] as number);
    }
    return found;
  }

  /** The frame that represents a stack: the program's own innermost one, else the innermost; -1 without frames. */
  own(stack: number): number {
    let found = this.ownLine.get(stack);
    if (found === undefined) {
      const frames = this.frames(stack);
      const flags = (frame: number) => (this.json.tables.frames[frame] as number[])[3] as number;
      found =
        frames.find(frame => flags(frame) === 0) ?? frames.find(frame => (flags(frame) & 1) === 0) ?? frames[0] ?? -1;
      this.ownLine.set(stack, found);
    }
    return found;
  }

  /** `model.py:88 forward`; empty without frames. */
  location(stack: number): string {
    const own = this.own(stack);
    return own < 0 ? '' : frameText(this.frame(own));
  }

  /** The quoted lines of the program's own files: file, first line of each range, lines. */
  get sources(): [string, [number, string[]][]][] {
    return [...this.sourceLines].map(([file, ranges]) => [this.string(file), ranges]);
  }

  /** The quoted line of a file without surrounding white space. */
  sourceLine(file: string, line: number): string | null {
    for (const [number, ranges] of this.sourceLines) {
      if (this.string(number) !== file) continue;
      for (const [from, lines] of ranges) {
        if (line >= from && line < from + lines.length) return (lines[line - from] as string).trim();
      }
    }
    return null;
  }
}

/** The name of a module: its path, or the class of a model itself. */
export function moduleText(module: string): string {
  return module.startsWith('/') ? module.slice(1) || 'the model itself' : module;
}

/** The last two components of a path. */
export function shortFile(file: string): string {
  return file.split('/').slice(-2).join('/');
}

export function frameText(frame: Frame): string {
  const file = frame.library ? shortFile(frame.file) : (frame.file.split('/').at(-1) ?? frame.file);
  const name = frame.name === '<module>' ? '' : ` ${frame.name}`;
  return frame.line > 0 ? `${file}:${frame.line}${name}` : `${file}${name}`;
}
