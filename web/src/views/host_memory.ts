/**
 * The main memory of the run's processes, as the launcher sampled it: its course, who had it at the peak, and the files
 * in shared memory.
 */

import type { HostMemoryState, HostMemorySummary, Summary } from '../data/schema';
import { el, scrollTable } from '../dom';
import * as format from '../format';
import { chartLine, shape } from './chart';
import { bytes, count } from './figures';

const WIDTH = 1000;
const HEIGHT = 90;
/** The number of processes in the table. */
const PROCESSES = 8;

/** The card; `null` without samples. */
export function hostMemory(summary: Summary): HTMLElement | null {
  const { host } = summary;
  if (!host) return null;
  const gap = host.longest_gap_ns === undefined ? '' : `, at most ${format.duration(host.longest_gap_ns / 1000)} apart`;
  const more = host.processes.length - PROCESSES + host.unlisted_processes;
  const sentences = [host.kill?.text, host.growth?.text].filter(text => text !== undefined);
  return el(
    'section',
    { class: 'card w12', id: 'host' },
    el('h2', {}, 'Main memory of the host'),
    el('p', {}, `Peak ${host.text}.`),
    sentences.map(text => el('p', {}, text.charAt(0).toUpperCase() + text.slice(1).replace(/\.$/, ''), '.')),
    overTime(host),
    processTable(host),
    more > 0 ? el('p', { class: 'note' }, `${format.number(more, 'more process')}: see summary.json.`) : null,
    sharedFiles(host),
    el('p', { class: 'note' }, `${format.number(host.samples, 'sample')}${gap}.`),
  );
}

function processTable(host: HostMemorySummary): HTMLElement {
  const rows = host.processes.slice(0, PROCESSES).map((process, at) => {
    const cell = (part: 'bytes' | 'anonymous_bytes' | 'file_bytes' | 'shared_bytes' | 'highest_bytes') =>
      el('td', { class: 'num' }, bytes(`/host.processes.${at}.${part}`, process[part]));
    return el(
      'tr',
      {},
      el('td', {}, process.name),
      cell('bytes'),
      cell('anonymous_bytes'),
      cell('file_bytes'),
      cell('shared_bytes'),
      cell('highest_bytes'),
    );
  });
  return scrollTable(
    [
      ['Process', ''],
      ['At the peak', 'num'],
      ['Anonymous', 'num'],
      ['Files', 'num'],
      ['Shared', 'num'],
      ['Highest', 'num'],
    ],
    rows,
  );
}

function sharedFiles(host: HostMemorySummary): HTMLElement | null {
  if (host.shared_files.length === 0) return null;
  const rows = host.shared_files.map((file, at) =>
    el(
      'tr',
      {},
      el('td', {}, el('code', {}, file.name)),
      el('td', { class: 'num' }, bytes(`/host.shared_files.${at}.bytes`, file.bytes)),
      el('td', { class: 'num' }, count(`/host.shared_files.${at}.files`, file.files)),
      el('td', { class: 'num' }, count(`/host.shared_files.${at}.processes`, file.processes)),
    ),
  );
  return el(
    'div',
    {},
    el('h3', {}, 'Shared memory'),
    scrollTable(
      [
        ['File', ''],
        ['Mapped', 'num'],
        ['Files', 'num'],
        ['Processes', 'num'],
      ],
      rows,
    ),
  );
}

/** The bytes of all processes over time; `null` with fewer than two points in time. */
function overTime(host: HostMemorySummary): HTMLElement | null {
  const { history } = host;
  const [first, last] = [history[0], history[history.length - 1]];
  if (!first || !last || last.time_ns <= first.time_ns) return null;
  const span = last.time_ns - first.time_ns;
  const most = Math.max(1, host.peak.bytes);
  const chart = shape('svg', {
    class: 'device-chart',
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: 'none',
    role: 'img',
    'aria-label': 'Main memory of all processes over time',
  });
  const x = (state: HostMemoryState) => ((state.time_ns - first.time_ns) / span) * WIDTH;
  const line = chartLine(
    history.map(x),
    history.map(state => HEIGHT * (1 - state.bytes / most)),
  );
  const area = shape('path', { d: `M0 ${HEIGHT}L${line.join('L')}L${WIDTH} ${HEIGHT}Z` });
  area.style.fill = 'var(--series-5)';
  chart.append(area);
  return el('div', {}, el('h3', {}, `Over time: ${format.duration(span / 1000)}, at most ${format.size(most)}`), chart);
}
