/**
 * The ranks of a job on several hosts: the table of ranks and phases, what the worst rank has more, and what limits the
 * figures.
 */

import type { JobReport } from '../data/schema';
import { el, replace } from '../dom';
import * as format from '../format';
import * as explain from '../views/explain';
import { fillNav, header, type Part } from '../views/header';
import { helperParts, imbalanceParts, rankRows } from '../views/rank_table';

/** Everything that the page shows, for tests. */
interface Exposed {
  job: JobReport;
  readyMs: number;
}

declare global {
  interface Window {
    memtraceJob?: Exposed;
  }
}

const PARTS: Part[] = [
  ['ranks', 'Ranks'],
  ['notes', 'Notes'],
];

/** Shows the report of a job that is in `data`. */
export function jobPage(app: HTMLElement, data: Uint8Array): void {
  const { job } = JSON.parse(new TextDecoder().decode(data)) as { job: JobReport };
  const of =
    job.world_size !== undefined && job.world_size !== job.ranks.length ? ` of ${format.count(job.world_size)}` : '';
  const facts = [
    `${format.number(job.ranks.length, 'rank')}${of}`,
    ...(job.hosts.length > 0 ? [format.number(job.hosts.length, 'host')] : []),
    format.number(job.runs.length, 'run'),
  ];
  const head = header('memtrace', `job ${job.job} (${job.job_source})`, facts);
  const cards = [ranks(job), notes(job)].filter(card => card !== null);
  replace(app, head, el('main', {}, explain.verdict(job.verdict), ...cards));
  fillNav(head, PARTS);
  window.memtraceJob = { job, readyMs: performance.now() };
}

function ranks(job: JobReport): HTMLElement | null {
  if (job.ranks.length === 0 && job.without_rank.length === 0) return null;
  const table = job.ranks.length > 0 ? rankRows(job, '') : null;
  return el(
    'section',
    { class: 'card w12', id: 'ranks' },
    el('h2', {}, 'Ranks'),
    table,
    imbalanceParts(job, ''),
    helperParts(job, ''),
  );
}

function notes(job: JobReport): HTMLElement | null {
  const milliseconds = (ns: number) => `${(ns / 1e6).toFixed(1)} ms`;
  const texts = [
    ...job.clocks.map(
      one =>
        `by the clocks, steps begin ${milliseconds(one.later_ns)} later on ${one.host} (median of ` +
        `${format.number(one.common_steps, 'common step')}); this is clock difference and waiting together`,
    ),
    ...job.clocks
      .filter(one => one.differs_at_least_ns > 0)
      .map(
        one =>
          `the clock of ${one.host} differs by at least ${milliseconds(one.differs_at_least_ns)}, if each step ` +
          `waits for all ranks`,
      ),
    ...job.notices,
  ];
  if (texts.length === 0) return null;
  return el(
    'section',
    { class: 'card w12', id: 'notes' },
    el('h2', {}, 'Notes'),
    el(
      'ul',
      {},
      texts.map(text => el('li', {}, text)),
    ),
  );
}
