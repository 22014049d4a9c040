/**
 * The ranks of a launch or of a job beside each other: the table of ranks and phases, what the worst rank has more than
 * the median, and the processes that are no ranks. `path` is that of the table in the page's data; figures name their
 * field by it.
 */

import { CATEGORY_TEXTS } from '../data/categories';
import type { Category, HelperSummary, RankSummary } from '../data/schema';
import type { RankTable } from '../data/summary';
import { el, scrollTable } from '../dom';
import * as format from '../format';
import { WITHOUT_EVENT } from './changes';
import { bytes } from './figures';

/** The phases, in the order of their columns. */
const PHASES = [
  'load',
  'data',
  'forward',
  'backward',
  'recompute',
  'optimizer',
  'eval',
  'generate',
  'rollout',
  'other',
];
/** The number of lines of the comparison that are listed. */
const LINES = 8;
/** The number of workers and helpers that are listed. */
const HELPERS = 8;
/** An imbalance below 1 % (1/100) of the highest peak is not worth a comparison. */
const COMPARED_SHARE = 100;

/** Marks the worst, the median and the best of more than two ranks. Empty for the others. */
function mark(rank: number, { ranks, imbalance }: RankTable): string {
  if (!imbalance || ranks.length <= 2) return '';
  const { worst_rank, median_rank, best_rank } = imbalance;
  const marks = [
    [worst_rank, 'worst'],
    [median_rank, 'median'],
    [best_rank, 'best'],
  ] as const;
  const found = marks.find(([of]) => of === rank);
  return found ? ` (${found[1]})` : '';
}

function row(rank: RankSummary, at: number, table: RankTable, phases: string[], path: string): HTMLElement {
  const host = table.hosts.length > 1 && rank.host !== undefined ? ` ${rank.host}` : '';
  const device = rank.device === undefined ? '-' : rank.device < 0 ? 'CPU' : String(rank.device);
  const others = rank.other_devices.length;
  const cell = (field: string, value: number | undefined) =>
    el('td', { class: 'n' }, value === undefined ? '-' : bytes(`${path}ranks.${at}.${field}`, value));
  return el(
    'tr',
    {},
    el('td', {}, `${rank.rank}${host}${mark(rank.rank, table)}`),
    el('td', { class: 'n' }, `${device}${others > 0 ? ` and ${others} more` : ''}`),
    phases.map(wanted => {
      const found = rank.phases.findIndex(one => one.phase === wanted);
      return cell(`phases.${found}.peak_bytes`, rank.phases[found]?.peak_bytes);
    }),
    cell('peak_bytes', rank.peak_bytes),
    cell('reserved_bytes', rank.reserved_bytes),
    el('td', { class: 'n' }, rank.oom_count > 0 ? format.count(rank.oom_count) : ''),
  );
}

/** The table of all ranks, and of the phases in which any rank has memory. */
export function rankRows(table: RankTable, path: string): HTMLElement {
  const phases = PHASES.filter(phase =>
    table.ranks.some(rank => rank.phases.some(one => one.phase === phase && one.peak_bytes > 0)),
  );
  const heads = [
    ['Rank'],
    ['GPU', 'n'],
    ...phases.map(phase => [format.capital(phase), 'n'] as const),
    ['Peak', 'n'],
    ['Reserved', 'n'],
    ['OOM', 'n'],
  ] as const;
  return scrollTable(
    heads,
    table.ranks.map((rank, at) => row(rank, at, table, phases, path)),
  );
}

function categoryName(category: Category | undefined): string {
  return category === undefined ? WITHOUT_EVENT : CATEGORY_TEXTS[category];
}

/** What the imbalance costs, and what the worst rank has more than the median. */
export function imbalanceParts(
  { imbalance, worst_against_median: comparison }: RankTable,
  path: string,
): HTMLElement[] {
  if (
    !imbalance ||
    imbalance.difference_bytes === 0 ||
    imbalance.difference_bytes * COMPARED_SHARE < imbalance.max_bytes
  )
    return [];
  const cost = el(
    'p',
    {},
    bytes(`${path}imbalance.unused_bytes`, imbalance.unused_bytes),
    ` stay unused on the other ranks, because the batch has to fit rank ${imbalance.worst_rank}.`,
  );
  if (!comparison) return [cost];
  const categories = comparison.by_category.map(
    one => `${format.signedSize(one.difference_bytes)} ${categoryName(one.category)}`,
  );
  return [
    cost,
    el('p', {}, `At its peak it has more than rank ${imbalance.median_rank}, the median: ${categories.join(', ')}.`),
    el(
      'ul',
      { class: 'lines' },
      comparison.by_line
        .slice(0, LINES)
        .map(line =>
          el(
            'li',
            {},
            `${format.signedSize(line.difference_bytes)} ${categoryName(line.category)} at ${line.location}`,
          ),
        ),
    ),
  ];
}

/** The workers and helpers, largest first, and the ranks that were started or recorded several times. */
export function helperParts(table: RankTable, path: string): HTMLElement[] {
  const of = (one: HelperSummary, field: string, name: string) => ({ one, field: `${path}${field}.peak_bytes`, name });
  const helpers = [
    ...table.ranks.flatMap((rank, at) =>
      rank.helpers.map((one, i) => of(one, `ranks.${at}.helpers.${i}`, `pid ${one.pid} of rank ${rank.rank}`)),
    ),
    ...table.without_rank.map((one, i) =>
      of(one, `without_rank.${i}`, `pid ${one.pid}${one.host === undefined ? '' : ` on ${one.host}`}`),
    ),
  ].sort((a, b) => b.one.peak_bytes - a.one.peak_bytes || a.one.pid - b.one.pid);
  const more = helpers.length - HELPERS;
  const again = table.ranks.filter(rank => rank.other_runs !== undefined);
  const list = el(
    'ul',
    { class: 'helpers' },
    helpers.slice(0, HELPERS).map(({ one, field, name }) => el('li', {}, `${name}: `, bytes(field, one.peak_bytes))),
    more > 0 ? el('li', {}, `${format.count(more)} more`) : null,
  );
  return [
    ...(helpers.length > 0 ? [el('h3', {}, 'Workers and helpers'), list] : []),
    ...table.ranks
      .filter(rank => rank.other_attempts.length > 0)
      .map(rank => el('p', {}, `Restarted: rank ${rank.rank}; other processes: ${rank.other_attempts.join(', ')}`)),
    ...again
      .slice(0, HELPERS)
      .map(({ rank, other_runs }) =>
        el('p', {}, `Recorded again: rank ${rank}; other runs: ${other_runs?.join(', ')}`),
      ),
    ...(again.length > HELPERS
      ? [el('p', {}, `${format.number(again.length - HELPERS, 'more rank')} recorded again`)]
      : []),
  ];
}
