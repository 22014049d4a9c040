/**
 * The whole memory of a device, as nvidia-smi shows it: a bar of what uses it at several points in time, and its
 * course.
 */

import type {
  DeviceBreakdown,
  DeviceMemoryPoint,
  DeviceMemorySummary,
  DevicePart,
  DeviceSummary,
} from '../data/schema';
import { el } from '../dom';
import * as format from '../format';
import { chartLine, shape } from './chart';
import { bytes } from './figures';
import { swatch } from './swatch';

/** The colors of the style sheet, by kind of part. */
const COLORS: Record<string, string> = {
  pytorch_allocated: 'series-0',
  pytorch_cached: 'free-muted',
  unused_pools: 'series-7',
  rounding: 'series-other',
  context: 'series-10',
  kernels: 'series-2',
  other_process: 'series-8',
  before_process: 'series-4',
  context_and_other_processes: 'series-10',
  unattributed: 'series-rest',
};
/** The colors of libraries, in the order of their parts. */
const LIBRARIES = ['series-6', 'series-5', 'series-3', 'series-9', 'series-1'];

/** What the chart stacks, from the bottom: the field, its color and its label. */
const STACKED = [
  ['pytorch_reserved_bytes', 'series-0', 'reserved by PyTorch'],
  ['libraries_bytes', 'series-6', 'other libraries'],
  ['beyond_allocations_bytes', 'series-10', 'context, kernels and other processes'],
] as const;
const WIDTH = 1000;
const HEIGHT = 120;
/** The last reading has at least this share of the time before it, so that it is visible. */
const LAST_SHARE = 0.02;

const NOTES: Record<string, string> = {
  changing: 'Other processes on the device changed their memory; their figures are up to a second old.',
  other_pids:
    'NVML does not list this process, as in some containers: processes that use the device since before the ' +
    'run count as others.',
  unknown_instance:
    'The GPU is divided into instances (MIG), and NVML does not report in which one this process runs, so other ' +
    'processes are not separated.',
  unknown:
    'NVML has no figures from before the run, so other processes are not separated: what they take after the ' +
    'start is part of the unattributed memory, as are kernels.',
};

/** The card; `null` without readings of the memory in use on the device. */
export function deviceMemory(device: DeviceSummary): HTMLElement | null {
  const memory = device.device_memory;
  if (!memory) return null;
  const { at_peak: peak, at_allocated_peak: allocated, at_end: end } = memory;
  const note = NOTES[memory.other_processes];
  return el(
    'section',
    { class: 'card w12', id: 'device' },
    el('h2', {}, 'Memory of the device'),
    breakdown('Most memory in use', 'at_peak', peak, memory),
    allocated && allocated.seq !== peak.seq
      ? breakdown("At the peak of PyTorch's allocated memory", 'at_allocated_peak', allocated, memory)
      : null,
    end.used_bytes !== peak.used_bytes ? breakdown('At the end of the recording', 'at_end', end, memory) : null,
    overTime(memory),
    memory.nvml_process_peak_bytes === undefined
      ? null
      : el(
          'p',
          {},
          'NVML: at most ',
          bytes('device_memory.nvml_process_peak_bytes', memory.nvml_process_peak_bytes),
          ' for this process, in samples a second apart.',
        ),
    note ? el('p', { class: 'note' }, note) : null,
  );
}

function breakdown(title: string, name: string, state: DeviceBreakdown, memory: DeviceMemorySummary): HTMLElement {
  const field = `device_memory.${name}`;
  const shades = colors(state.parts);
  const bar = el('div', { class: 'bar', role: 'img', 'aria-label': `${title}: share of each part` });
  state.parts.forEach((part, at) => {
    if (part.bytes === 0) return;
    const piece = el('i', { title: `${part.label} ${format.size(part.bytes)}` });
    piece.style.background = `var(--${shades[at]})`;
    piece.style.flexGrow = String(part.bytes);
    bar.append(piece);
  });
  const rows = state.parts.flatMap((part, at) => [
    el('dt', {}, swatch(shades[at] ?? 'series-other', part.label)),
    el('dd', {}, bytes(`${field}.parts.${at}.bytes`, part.bytes), ` (${format.share(part.bytes, state.used_bytes)})`),
  ]);
  const beside = (
    [
      ['pinned_host_bytes', state.pinned_host_bytes, ' pinned host memory of this process'],
      ['imported_bytes', state.imported_bytes, ' opened memory of other processes (CUDA IPC), counted there'],
      ['managed_bytes', state.managed_bytes, ' managed memory, which may be on the host'],
    ] as const
  ).filter(([, value]) => value > 0);
  return el(
    'div',
    {},
    el(
      'h3',
      {},
      `${title}: `,
      bytes(`${field}.used_bytes`, state.used_bytes),
      ' of ',
      bytes('device_memory.total_bytes', memory.total_bytes),
      ` (${format.share(state.used_bytes, memory.total_bytes)}), as nvidia-smi shows it`,
    ),
    bar,
    el('dl', {}, rows),
    beside.map(([part, value, text]) =>
      el('p', { class: 'note' }, 'Beside it: ', bytes(`${field}.${part}`, value), text, '.'),
    ),
  );
}

function colors(parts: DevicePart[]): string[] {
  let libraries = 0;
  return parts.map(part => COLORS[part.kind] ?? LIBRARIES[libraries++ % LIBRARIES.length] ?? 'series-other');
}

/** The memory in use at the readings, stacked; `null` with fewer than two points in time. */
function overTime(memory: DeviceMemorySummary): HTMLElement | null {
  const { over_time: points } = memory;
  const [first, last] = [points[0], points[points.length - 1]];
  if (!first || !last || last.time_ns <= first.time_ns) return null;
  const most = Math.max(1, ...points.map(point => point.used_bytes));
  const chart = shape('svg', {
    class: 'device-chart',
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: 'none',
    role: 'img',
    'aria-label': 'Memory in use on the device over time',
  });
  // Each value holds until the next reading, and the last one until the end of the chart.
  const end = Math.max(last.time_ns + (last.time_ns - first.time_ns) * LAST_SHARE, memory.at_end.time_ns);
  const x = (point: DeviceMemoryPoint) => ((point.time_ns - first.time_ns) / (end - first.time_ns)) * WIDTH;
  const places = [...points.map(x), WIDTH];
  const held = (values: number[]) =>
    [...values, values[values.length - 1] ?? 0].map(value => HEIGHT * (1 - value / most));
  let lower = points.map(() => 0);
  for (const [field, shade] of STACKED) {
    const upper = points.map((point, at) => (lower[at] ?? 0) + point[field]);
    const line = chartLine(places, held(upper));
    const back = chartLine(places, held(lower)).reverse();
    const area = shape('path', { d: `M${[...line, ...back].join('L')}Z` });
    area.style.fill = `var(--${shade})`;
    chart.append(area);
    lower = upper;
  }
  return el(
    'div',
    {},
    el(
      'h3',
      {},
      `Over time: ${format.number(memory.readings, 'reading')} in ` +
        `${format.duration((last.time_ns - first.time_ns) / 1000)}, at most ${format.size(most)}`,
    ),
    chart,
    el(
      'p',
      { class: 'note' },
      STACKED.flatMap(([, shade, label]) => [swatch(shade, label), ' \u2003']),
    ),
  );
}
