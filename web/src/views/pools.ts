/**
 * The memory pools of JAX and CuPy, and the programs that XLA compiled (`--xla-dump`), in the words of the terminal
 * report. Each figure names its field of the summary.
 */

import type {
  BufferKind,
  DeviceSummary,
  PoolSummary,
  Summary,
  XlaLineSummary,
  XlaProgramSummary,
} from '../data/schema';
import { el, scrollTable } from '../dom';
import * as format from '../format';
import { bytes } from './figures';

type Part = Node | string;

/** The number of programs in the table. */
const PROGRAMS = 8;
/** The number of lines of the largest program's peak. */
const LINES = 12;

const KINDS: Record<BufferKind, string> = {
  argument: 'argument',
  donated_argument: 'donated argument',
  output: 'output',
  temporary: 'temporary',
  constant: 'constant',
  thread_local: 'thread-local',
  other: 'other',
};

/** What each pool took from CUDA, and what is known to be in use inside it. */
export function pools(device: DeviceSummary): HTMLElement | null {
  const found = device.pools ?? [];
  if (found.length === 0) return null;
  const rows = found.flatMap((pool, at) => [
    el('dt', {}, `${pool.library} pool`),
    el('dd', {}, poolText(pool, `pools.${at}`)),
  ]);
  return el('section', { class: 'card w5', id: 'pools' }, el('h2', {}, 'Memory pools'), el('dl', {}, rows));
}

function poolText(pool: PoolSummary, field: string): Part[] {
  const taken = bytes(`${field}.taken_peak_bytes`, pool.taken_peak_bytes);
  const parts: Part[] = [];
  if (pool.allocation === 'each_buffer') {
    parts.push(
      'off: each buffer is an allocation (',
      `${format.number(pool.allocations, 'allocation')}, peak `,
      taken,
      ')',
    );
  } else {
    parts.push(taken, ' taken from CUDA', pool.allocation === 'on_demand' ? ' on demand' : '');
  }
  if (pool.preallocated_bytes !== undefined) {
    parts.push(
      ', ',
      bytes(`${field}.preallocated_bytes`, pool.preallocated_bytes),
      ' of it preallocated whatever the program needs',
    );
  }
  if (pool.used_peak_bytes !== undefined)
    parts.push('; in use inside it at most ', bytes(`${field}.used_peak_bytes`, pool.used_peak_bytes));
  if (pool.used_end_bytes !== undefined && pool.allocation !== 'each_buffer') {
    parts.push('; in use inside it at the end ', bytes(`${field}.used_end_bytes`, pool.used_end_bytes));
  }
  const isUnknown =
    pool.used_peak_bytes === undefined && pool.used_end_bytes === undefined && pool.allocation !== 'each_buffer';
  if (isUnknown) parts.push('; the buffers inside it are not recorded (memtrace --pools read or off)');
  return parts;
}

/** The largest compiled programs, and the lines at the peak of the largest. */
export function xla(summary: Summary): HTMLElement | null {
  const found = summary.xla;
  if (!found || found.programs.length === 0) return null;
  const shown = found.programs.slice(0, PROGRAMS);
  const rows = shown.map((program, at) => programRow(program, `/xla.programs.${at}`));
  const head: [string, string][] = [
    ['Program', ''],
    ['Arguments', 'num'],
    ['Donated', 'num'],
    ['Outputs', 'num'],
    ['Temporary', 'num'],
    ['Total', 'num'],
  ];
  const more = found.program_count - shown.length;
  const note = [
    more > 0 ? `${format.number(more, 'smaller program')} not listed.` : '',
    found.mismatched_programs > 0
      ? `${format.number(found.mismatched_programs, 'program')} do not add up to the total that XLA states.`
      : '',
  ].join(' ');
  const title = el('h2', {}, 'Programs that XLA compiled');
  return el(
    'section',
    { class: 'card w12', id: 'xla' },
    title,
    scrollTable(head, rows),
    el('p', { class: 'note' }, note),
    peak(shown[0]),
  );
}

function programRow(program: XlaProgramSummary, field: string): HTMLElement {
  const cell = (kind: BufferKind) => {
    const at = program.by_kind.findIndex(one => one.kind === kind);
    return el(
      'td',
      { class: 'num' },
      at < 0 ? '' : bytes(`${field}.by_kind.${at}.bytes`, program.by_kind[at]?.bytes ?? 0),
    );
  };
  const name = el(
    'td',
    {},
    el('code', {}, program.name),
    ` (module ${program.module}${program.is_for_gpu ? '' : ', for the CPU'})`,
  );
  const kinds: BufferKind[] = ['argument', 'donated_argument', 'output', 'temporary'];
  return el(
    'tr',
    {},
    name,
    kinds.map(cell),
    el('td', { class: 'num' }, bytes(`${field}.total_bytes`, program.total_bytes)),
  );
}

function peak(program: XlaProgramSummary | undefined): HTMLElement {
  const found = program?.peak;
  if (!program || !found) return el('div', {});
  const text = (line: XlaLineSummary): Part[] => [
    line.kind ? KINDS[line.kind] : 'unknown',
    ' ',
    el('code', {}, [line.location, line.operation].filter(Boolean).join('  ')),
  ];
  const row = (line: XlaLineSummary, at: number) =>
    el(
      'tr',
      {},
      el('td', { class: 'num' }, bytes(`/xla.programs.0.peak.lines.${at}.bytes`, line.bytes)),
      el('td', {}, text(line)),
    );
  const title = el(
    'h3',
    {},
    `Live at the peak of ${program.name}: `,
    bytes('/xla.programs.0.peak.live_bytes', found.live_bytes),
  );
  return el(
    'div',
    {},
    title,
    scrollTable(
      [
        ['Bytes', 'num'],
        ['Buffers', ''],
      ],
      found.lines.slice(0, LINES).map(row),
    ),
  );
}
