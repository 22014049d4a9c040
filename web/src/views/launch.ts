/**
 * The ranks of a launch beside each other, what the worst has more than the median, workers and helpers, memory that
 * processes share, and issues of several processes.
 */

import type { LaunchSummary, SharedMemorySummary } from '../data/schema';
import { el } from '../dom';
import * as format from '../format';
import { bytes } from './figures';
import { helperParts, imbalanceParts, rankRows } from './rank_table';

/** The launch in the page's data. */
const PATH = '/launch.';

function processName(rank: number | undefined, pid: number): string {
  return rank === undefined ? `pid ${pid}` : `rank ${rank} (pid ${pid})`;
}

function sharedItem(one: SharedMemorySummary, at: number): HTMLElement {
  const field = (name: string) => `${PATH}shared_memory.${at}.${name}`;
  const exporter =
    one.exporter_pid === undefined ? 'a process that is not known' : processName(one.exporter_rank, one.exporter_pid);
  return el(
    'li',
    {},
    `${processName(one.importer_rank, one.importer_pid)} opened up to `,
    bytes(field('peak_bytes'), one.peak_bytes),
    ` of ${exporter} (`,
    ...(one.at_exporter_peak_bytes === undefined
      ? []
      : [bytes(field('at_exporter_peak_bytes'), one.at_exporter_peak_bytes), ` at the peak of ${exporter}, `]),
    bytes(field('end_bytes'), one.end_bytes),
    ` at the end, ${format.number(one.imports, 'import')})`,
    ...(one.kept_after_free_bytes > 0
      ? [
          '; ',
          bytes(field('kept_after_free_bytes'), one.kept_after_free_bytes),
          ` of it after ${exporter} had freed it`,
        ]
      : []),
  );
}

/**
 * The card; `null` if the run has no launch of several ranks, no issue of several processes, and no memory that
 * processes share.
 */
export function launchView(launch: LaunchSummary | undefined): HTMLElement | null {
  if (!launch || (launch.ranks.length < 2 && launch.issues.length === 0 && launch.shared_memory.length === 0))
    return null;
  return el(
    'section',
    { class: 'card w12', id: 'launch' },
    el('h2', {}, 'Launch'),
    launch.ranks.length > 1 ? rankRows(launch, PATH) : null,
    imbalanceParts(launch, PATH),
    helperParts(launch, PATH),
    launch.issues.map(issue =>
      el(
        'div',
        {},
        el('h3', {}, `${issue.rule}: ${issue.headline}`),
        el(
          'ul',
          {},
          issue.evidence.map(text => el('li', {}, text)),
        ),
        el('p', {}, `Fix: ${issue.fix}`),
      ),
    ),
    launch.shared_memory.length > 0
      ? [el('h3', {}, 'Memory of other processes (CUDA IPC)'), el('ul', {}, launch.shared_memory.map(sharedItem))]
      : null,
  );
}
