/**
 * The ranks of a launch beside each other, what the worst has more than the median, workers and helpers, memory that processes share,
 * and issues of several processes.
 */

import type { HelperSummary, LaunchSummary, RankSummary, SharedMemorySummary } from '../data/summary';
import { el, scrollTable } from '../dom';
import * as format from '../format';
import { bytes } from './details';
import { categoryName, phaseCells, rankMark } from './rank_table';

const PHASES = ['load', 'forward', 'backward', 'optimizer'] as const;
/** The number of lines of the comparison that are listed. */
const LINES = 8;
/** The number of workers and helpers that are listed. */
const HELPERS = 8;
/** An imbalance below one in this many parts of the highest peak is not worth a comparison. */
const COMPARED_SHARE = 100;

function row(rank: RankSummary, at: number, launch: LaunchSummary): HTMLElement {
  const host = launch.hosts.length > 1 && rank.host !== undefined ? ` ${rank.host}` : '';
  const device = rank.device === undefined ? '-' : rank.device < 0 ? 'CPU' : String(rank.device);
  const cell = (field: string, value: number | undefined) => el('td', { class: 'n' }, value === undefined ? '-' : bytes(`/launch.ranks.${at}.${field}`, value));
  return el(
    'tr',
    {},
    el('td', {}, `${rank.rank}${host}${rankMark(rank.rank, launch)}`),
    el('td', { class: 'n' }, device),
    phaseCells(rank, PHASES, cell),
    cell('peak_bytes', rank.peak_bytes),
    cell('reserved_bytes', rank.reserved_bytes),
    el('td', { class: 'n' }, rank.oom_count > 0 ? format.count(rank.oom_count) : ''),
  );
}

/** What the imbalance costs, and what the worst rank has more than the median. */
function imbalanceParts({ imbalance, worst_against_median: comparison }: LaunchSummary): HTMLElement[] {
  if (!imbalance || imbalance.difference_bytes === 0 || imbalance.difference_bytes * COMPARED_SHARE < imbalance.max_bytes) return [];
  const cost = el('p', {}, bytes('/launch.imbalance.unused_bytes', imbalance.unused_bytes), ` stay unused on the other ranks, because the batch has to fit rank ${imbalance.worst_rank}.`);
  if (!comparison) return [cost];
  const categories = comparison.by_category.map(one => `${format.signedSize(one.difference_bytes)} ${categoryName(one.category)}`);
  return [
    cost,
    el('p', {}, `At its peak it has more than rank ${imbalance.median_rank}, the median: ${categories.join(', ')}.`),
    el('ul', {}, comparison.by_line.slice(0, LINES).map(line => el('li', {}, `${format.signedSize(line.difference_bytes)} ${categoryName(line.category)} at ${line.location}`))),
  ];
}

function processName(rank: number | undefined, pid: number): string {
  return rank === undefined ? `pid ${pid}` : `rank ${rank} (pid ${pid})`;
}

/** The workers and helpers, largest first, and the ranks that were restarted. */
function helperParts(launch: LaunchSummary): HTMLElement[] {
  const of = (one: HelperSummary, field: string, name: string) => ({ one, field: `/launch.${field}.peak_bytes`, name });
  const helpers = [
    ...launch.ranks.flatMap((rank, at) => rank.helpers.map((one, i) => of(one, `ranks.${at}.helpers.${i}`, `pid ${one.pid} of rank ${rank.rank}`))),
    ...launch.without_rank.map((one, i) => of(one, `without_rank.${i}`, `pid ${one.pid}`)),
  ].sort((a, b) => b.one.peak_bytes - a.one.peak_bytes || a.one.pid - b.one.pid);
  const more = helpers.length - HELPERS;
  const restarts = launch.ranks.filter(rank => rank.other_attempts.length > 0);
  return [
    ...(helpers.length > 0
      ? [
          el('h3', {}, 'Workers and helpers'),
          el('ul', {}, helpers.slice(0, HELPERS).map(({ one, field, name }) => el('li', {}, `${name}: `, bytes(field, one.peak_bytes))), more > 0 ? el('li', {}, `${format.count(more)} more`) : null),
        ]
      : []),
    ...restarts.map(rank => el('p', {}, `Restarted: rank ${rank.rank}; other processes: ${rank.other_attempts.join(', ')}`)),
  ];
}

function sharedItem(one: SharedMemorySummary, at: number): HTMLElement {
  const field = (name: string) => `/launch.shared_memory.${at}.${name}`;
  const exporter = one.exporter_pid === undefined ? 'a process that is not known' : processName(one.exporter_rank, one.exporter_pid);
  return el(
    'li',
    {},
    `${processName(one.importer_rank, one.importer_pid)} opened up to `,
    bytes(field('peak_bytes'), one.peak_bytes),
    ` of ${exporter} (`,
    ...(one.at_exporter_peak_bytes === undefined ? [] : [bytes(field('at_exporter_peak_bytes'), one.at_exporter_peak_bytes), ` at the peak of ${exporter}, `]),
    bytes(field('end_bytes'), one.end_bytes),
    ` at the end, ${format.number(one.imports, 'import')})`,
    ...(one.kept_after_free_bytes > 0 ? ['; ', bytes(field('kept_after_free_bytes'), one.kept_after_free_bytes), ` of it after ${exporter} had freed it`] : []),
  );
}

/** The card; `null` if the run has no launch of several ranks, no issue of several processes, and no memory that processes share. */
export function launchView(launch: LaunchSummary | undefined): HTMLElement | null {
  if (!launch || (launch.ranks.length < 2 && launch.issues.length === 0 && launch.shared_memory.length === 0)) return null;
  const heads = [['Rank'], ['GPU', 'n'], ...PHASES.map(phase => [format.capital(phase), 'n'] as const), ['Peak', 'n'], ['Reserved', 'n'], ['OOM', 'n']] as const;
  return el(
    'section',
    { class: 'card w12', id: 'launch' },
    el('h2', {}, 'Launch'),
    launch.ranks.length > 1 ? scrollTable(heads, launch.ranks.map((rank, at) => row(rank, at, launch))) : null,
    imbalanceParts(launch),
    helperParts(launch),
    launch.issues.map(issue =>
      el(
        'div',
        {},
        el('h3', {}, `${issue.rule}: ${issue.headline}`),
        el('ul', {}, issue.evidence.map(text => el('li', {}, text))),
        el('p', {}, `Fix: ${issue.fix}`),
      ),
    ),
    launch.shared_memory.length > 0 ? [el('h3', {}, 'Memory of other processes (CUDA IPC)'), el('ul', {}, launch.shared_memory.map(sharedItem))] : null,
  );
}
