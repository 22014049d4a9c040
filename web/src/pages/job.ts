/** The ranks of a job on several hosts: the table of ranks and phases, what the worst rank has more, and what limits the figures. */

import type { JobRank, JobReport } from '../data/job';
import { el, replace, scrollTable } from '../dom';
import * as format from '../format';
import { bytes } from '../views/details';
import * as explain from '../views/explain';
import { type Part, fillNav, header } from '../views/header';
import { categoryName, phaseCells, rankMark } from '../views/rank_table';

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
  ['difference', 'Worst against median'],
  ['processes', 'Other processes'],
  ['notes', 'Notes'],
];
const LINES = 20;

/** Shows the report of a job that is in `data`. */
export function jobPage(app: HTMLElement, data: Uint8Array): void {
  const { page, job } = JSON.parse(new TextDecoder().decode(data)) as { page: { verdict: string[] }; job: JobReport };
  const hosts = new Set(job.ranks.map(rank => rank.host)).size;
  const of = job.world_size !== undefined && job.world_size !== job.ranks.length ? ` of ${format.count(job.world_size)}` : '';
  const facts = [`${format.number(job.ranks.length, 'rank')}${of}`, format.number(hosts, 'host'), format.number(job.runs.length, 'run')];
  const head = header('memtrace', `job ${job.job} (${job.job_source})`, facts);
  const cards = [ranks(job), difference(job), processes(job), notes(job)].filter(card => card !== null);
  replace(app, head, el('main', {}, explain.verdict(page.verdict), ...cards));
  fillNav(head, PARTS);
  window.memtraceJob = { job, readyMs: performance.now() };
}

function ranks(job: JobReport): HTMLElement | null {
  if (job.ranks.length === 0) return null;
  // The order of the phases is that of the first rank that has them.
  const phases = [...new Set(job.ranks.flatMap(rank => rank.phases.filter(one => one.peak_bytes > 0).map(one => one.phase)))];
  const heads = [['Rank'], ['Peak', 'n'], ['Reserved', 'n'], ...phases.map(phase => [format.capital(phase), 'n'] as const), ['OOM', 'n'], ['Device'], ['Host']] as const;
  const table = scrollTable(heads, job.ranks.map((rank, at) => row(job, rank, at, phases)));
  return el('section', { class: 'card w12', id: 'ranks' }, el('h2', {}, 'Ranks'), table);
}

function row(job: JobReport, rank: JobRank, at: number, phases: string[]): HTMLElement {
  const cell = (field: string, value: number | undefined) => el('td', { class: 'n' }, value === undefined ? '' : bytes(`ranks.${at}.${field}`, value));
  const others = rank.other_devices.length;
  return el(
    'tr',
    {},
    el('td', {}, `${rank.rank}${rankMark(rank.rank, job)}`),
    cell('peak_bytes', rank.peak_bytes),
    cell('reserved_bytes', rank.reserved_bytes),
    phaseCells(rank, phases, cell),
    el('td', { class: 'n' }, rank.oom_count > 0 ? format.count(rank.oom_count) : ''),
    el('td', {}, `${rank.device < 0 ? 'CPU' : `GPU ${rank.device}`}${others > 0 ? ` and ${others} more` : ''}`),
    el('td', {}, rank.host === '' ? 'host unknown' : rank.host),
  );
}

function difference({ worst_against_median: comparison }: JobReport): HTMLElement | null {
  if (!comparison) return null;
  const largest = <T extends { difference_bytes: number }>(rows: T[]) =>
    rows.filter(one => one.difference_bytes !== 0).sort((a, b) => Math.abs(b.difference_bytes) - Math.abs(a.difference_bytes));
  const lines = largest(comparison.by_line);
  const more = lines.length - LINES;
  return el(
    'section',
    { class: 'card w12', id: 'difference' },
    el('h2', {}, `Rank ${comparison.rank} beside rank ${comparison.than_rank}, the median, at their peaks`),
    el('p', {}, `${format.signedSize(comparison.difference_bytes)}: ${largest(comparison.by_category).map(one => `${format.signedSize(one.difference_bytes)} ${categoryName(one.category)}`).join(', ')}`),
    el('ul', {}, lines.slice(0, LINES).map(one => el('li', {}, `${format.signedSize(one.difference_bytes)} ${categoryName(one.category)} at ${one.location}`))),
    more > 0 ? el('p', { class: 'note' }, `${format.number(more, 'more line')}: see memtrace report --json.`) : null,
  );
}

function processes({ other_processes: found }: JobReport): HTMLElement | null {
  if (found.length === 0) return null;
  const rows = found.map((one, at) =>
    el('tr', {}, el('td', { class: 'n' }, bytes(`other_processes.${at}.peak_bytes`, one.peak_bytes)), el('td', {}, `GPU ${one.device}`), el('td', {}, String(one.pid)), el('td', {}, one.rank === undefined ? '' : String(one.rank)), el('td', {}, one.host)),
  );
  return el('section', { class: 'card w12', id: 'processes' }, el('h2', {}, 'Processes that are no rank'), scrollTable([['Peak', 'n'], ['Device'], ['Process'], ['Inherited rank'], ['Host']], rows));
}

function notes(job: JobReport): HTMLElement | null {
  const milliseconds = (ns: number) => `${(ns / 1e6).toFixed(1)} ms`;
  const more = job.missing_ranks_count > job.missing_ranks.length ? ', ...' : '';
  const texts = [
    ...job.clocks.map(one => `by the clocks, steps begin ${milliseconds(one.later_ns)} later on ${one.host} (median of ${format.number(one.common_steps, 'common step')}); this is clock difference and waiting together`),
    ...job.clocks.filter(one => one.differs_at_least_ns > 0).map(one => `the clock of ${one.host} differs by at least ${milliseconds(one.differs_at_least_ns)}, if each step waits for all ranks`),
    ...(job.missing_ranks_count > 0 ? [`${format.number(job.missing_ranks_count, 'rank')} without a recording: ${job.missing_ranks.join(', ')}${more}`] : []),
    ...job.notices,
  ];
  if (texts.length === 0) return null;
  return el('section', { class: 'card w12', id: 'notes' }, el('h2', {}, 'Notes'), el('ul', {}, texts.map(text => el('li', {}, text))));
}
