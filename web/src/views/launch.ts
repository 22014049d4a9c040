/** The ranks of a launch beside each other, what the worst has more than the median, and issues of several processes. */

import type { LaunchSummary, RankSummary } from '../data/summary';
import { el, scrollTable } from '../dom';
import * as format from '../format';

const PHASES = ['load', 'forward', 'backward', 'optimizer'] as const;
/** The number of lines of the comparison that are listed. */
const LINES = 8;

function row(rank: RankSummary, hosts: number): HTMLElement {
  const name = hosts > 1 && rank.host !== undefined ? `${rank.rank} ${rank.host}` : String(rank.rank);
  const device = rank.device === undefined ? '-' : rank.device < 0 ? 'CPU' : String(rank.device);
  const phase = (wanted: string) => rank.phases.find(one => one.phase === wanted)?.peak_bytes;
  const bytes = (value: number | undefined) => el('td', { class: 'n' }, value === undefined ? '-' : format.size(value));
  return el(
    'tr',
    {},
    el('td', {}, name),
    el('td', { class: 'n' }, device),
    PHASES.map(one => bytes(phase(one))),
    bytes(rank.peak_bytes),
    bytes(rank.reserved_bytes),
    el('td', { class: 'n' }, rank.oom_count > 0 ? format.count(rank.oom_count) : ''),
  );
}

/** The card; `null` if the run has no launch of several ranks and no issue of several processes. */
export function launchView(launch: LaunchSummary | undefined): HTMLElement | null {
  if (!launch || (launch.ranks.length < 2 && launch.issues.length === 0)) return null;
  const heads = [['Rank'], ['GPU', 'n'], ...PHASES.map(phase => [format.capital(phase), 'n'] as const), ['Peak', 'n'], ['Reserved', 'n'], ['OOM', 'n']] as const;
  const { imbalance, worst_against_median: comparison } = launch;
  return el(
    'section',
    { class: 'card w12', id: 'launch' },
    el('h2', {}, 'Launch'),
    launch.ranks.length > 1 ? scrollTable(heads, launch.ranks.map(rank => row(rank, launch.hosts.length))) : null,
    comparison && imbalance
      ? [
          el('p', {}, `${format.size(imbalance.unused_bytes)} stay unused on the other ranks, because the batch has to fit rank ${imbalance.worst_rank}. At its peak it has more than rank ${imbalance.median_rank}:`),
          el('ul', {}, comparison.by_line.slice(0, LINES).map(line => el('li', {}, `${format.signedSize(line.difference_bytes)} ${line.category ?? 'without a recorded event'} at ${line.location}`))),
        ]
      : null,
    launch.issues.map(issue =>
      el(
        'div',
        {},
        el('h3', {}, `${issue.rule}: ${issue.headline}`),
        el('ul', {}, issue.evidence.map(text => el('li', {}, text))),
        el('p', {}, `Fix: ${issue.fix}`),
      ),
    ),
  );
}
