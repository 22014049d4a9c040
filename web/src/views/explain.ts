/** What the run means: verdict, figures, issues, suggestions, one step, largest allocations. From summary.json. */

import { stepRanges } from '../data/axis';
import { type Device, upperBound } from '../data/model';
import { SeriesSet } from '../data/series';
import type { State } from '../data/state';
import {
  type DeviceSummary,
  type IssueSummary,
  type OomSummary,
  type ProcessSummary,
  type StackSummary,
  type Summary,
  deviceName,
  explainedOom,
  whenText,
} from '../data/summary';
import { el } from '../dom';
import * as format from '../format';
import { swatch } from './swatch';

/** The device of a process that the report is about: the first with an explained error, else the first. */
function mainDevice(summary: Summary): { process: ProcessSummary; device: DeviceSummary } | null {
  for (const process of summary.processes) {
    const device = process.devices.find(one => explainedOom(one)) ?? process.devices[0];
    if (device) return { process, device };
  }
  return null;
}

function whereText(summary: Summary, process: ProcessSummary, device: DeviceSummary): string {
  const rank = summary.processes.length > 1 ? `${process.rank === undefined ? `pid ${process.pid}` : `rank ${process.rank}`}, ` : '';
  return `${rank}${deviceName(device.device)}`;
}

function issuesText(summary: Summary): string {
  const issues = summary.processes.reduce((sum, process) => sum + process.issues.length, 0);
  return issues > 0 ? `${format.number(issues, 'issue')} found.` : 'No leaks or misuse found.';
}

/** The verdict: how the run ended, and what it used. */
export function verdict(summary: Summary): HTMLElement {
  const main = mainDevice(summary);
  const { outcome } = summary.run;
  if (!main) return el('section', { class: 'card w12 verdict', id: 'verdict' }, el('strong', {}, format.capital(outcome)), el('span', {}, 'No memory was recorded.'));
  const { process, device } = main;
  const where = whereText(summary, process, device);
  const oom = explainedOom(device);
  const capacity = device.total_bytes;
  if (oom) {
    const at = oom.in_use.step === undefined ? oom.in_use.phase : `step ${oom.in_use.step}, ${oom.in_use.phase}`;
    const free = oom.device_free_bytes === undefined ? '' : `; ${format.size(oom.device_free_bytes)} free`;
    // PyTorch requests whole segments: 20 MiB for blocks up to 10 MiB, 2 MiB for those up to 1 MiB.
    const segment = oom.requested_bytes <= 1 << 20 ? 2 << 20 : 20 << 20;
    const fits = oom.device_free_bytes !== undefined && oom.requested_bytes <= oom.device_free_bytes && oom.device_free_bytes < segment;
    const asked = fits && device.source === 'torch' ? `, and PyTorch requests ${format.size(segment)} from CUDA for it` : '';
    const limit = oom.refused_by_pytorch ? ', and PyTorch\u2019s own limit refused it' : '';
    const short = oom.short_bytes === undefined ? '' : `, ${format.size(oom.short_bytes)} short`;
    return el(
      'section',
      { class: 'card w12 verdict', id: 'verdict' },
      el('strong', { class: 'bad' }, `\u2717 CUDA out of memory on ${where}${capacity === undefined ? '' : ` (${format.size(capacity)})`}`),
      el('span', {}, `${at}${oom.requested_at.location ? `, ${oom.requested_at.location}` : ''}`),
      el('span', { class: 'wide-line' }, `Tried to allocate ${format.size(oom.requested_bytes)}${free}${short}${asked}${limit}. ${process.no_issue_remark ? format.capital(process.no_issue_remark) : issuesText(summary)}`),
    );
  }
  const { peak } = device;
  const finished = outcome === 'finished';
  const figures = peak
    ? `Peak ${format.size(peak.totals.allocated_bytes)}${capacity === undefined ? '' : ` of ${format.size(capacity)} (${format.share(peak.totals.allocated_bytes, capacity)})`} on ${where}, ${whenText(peak)}. `
    : '';
  return el(
    'section',
    { class: 'card w12 verdict', id: 'verdict' },
    el('strong', { class: finished ? 'ok' : 'bad' }, `${finished ? '\u2713' : '\u2717'} ${format.capital(outcome)}`),
    el('span', {}, figures + issuesText(summary)),
  );
}

/** What is missing from the recording, if anything is. */
export function losses(summary: Summary): HTMLElement | null {
  const isLoss = Object.values(summary.losses).some(count => count > 0) || summary.problems.length > 0 || summary.not_recorded.some(one => one.is_loss);
  const lines = [
    ...Object.entries(summary.losses).map(([name, count]) => `${name.replaceAll('_', ' ')}: ${format.count(count)}`),
    ...summary.problems,
    ...summary.not_recorded.map(one => one.text),
  ];
  if (lines.length === 0) return null;
  return el('section', { class: `card w12 ${isLoss ? 'losses' : ''}`, id: 'losses' }, el('h2', {}, isLoss ? 'The recording is incomplete' : 'Not recorded'), el('ul', {}, lines.map(line => el('li', {}, line))));
}

function card(title: string, figure: string, more: string): HTMLElement {
  return el('section', { class: 'card w3 figure' }, el('h2', {}, title), el('b', {}, figure), el('span', {}, more));
}

/** Four figures of a device. */
export function figures(device: DeviceSummary): HTMLElement[] {
  const oom = explainedOom(device);
  const state = oom?.in_use ?? device.peak;
  if (!state) return [];
  const unallocated = state.totals.reserved_bytes - state.totals.allocated_bytes;
  const at = oom ? 'at the error' : 'at the peak';
  const owners = device.owners.filter(owner => owner.owner !== "PyTorch's caching allocator");
  const outside = owners.reduce((sum, owner) => sum + owner.peak_bytes, 0);
  const cards = [
    card(oom ? 'Allocated at the error' : 'Peak allocated', format.size(state.totals.allocated_bytes), whenText(state)),
    card(`Reserved ${at}`, format.size(state.totals.reserved_bytes), `${format.size(unallocated)} unallocated`),
    oom
      ? card('Free on the device', oom.device_free_bytes === undefined ? 'unknown' : format.size(oom.device_free_bytes), `${format.size(oom.requested_bytes)} requested`)
      : card(
          'Outside PyTorch',
          format.size(outside),
          owners.slice(0, 2).map(owner => `${owner.owner} ${format.size(owner.peak_bytes)}`).join(', ') || 'no library allocated from CUDA itself',
        ),
    card(
      'Capacity',
      device.total_bytes === undefined ? 'unknown' : format.size(device.total_bytes),
      [device.name, !device.in_use_before_bytes ? '' : `${format.size(device.in_use_before_bytes)} in use before the program started`].filter(text => text).join('; '),
    ),
  ];
  return cards;
}

/** A location that shows its source line. */
function location(stack: StackSummary, device: Device | undefined): HTMLElement {
  const own = stack.frames.find(frame => !frame.native && device?.process.sourceLine(frame.filename, frame.line));
  const source = own && device ? device.process.sourceLine(own.filename, own.line) : null;
  return el('div', {}, el('code', {}, stack.location || 'no stack'), source ? el('pre', { class: 'source' }, source) : null);
}

function issue(one: IssueSummary, device: Device | undefined): HTMLElement {
  return el(
    'article',
    { class: 'issue' },
    el('h3', {}, el('code', {}, one.rule), ` ${one.headline}`),
    el(
      'dl',
      {},
      one.stack ? [el('dt', {}, 'Location'), el('dd', {}, location(one.stack, device))] : [],
      one.evidence.flatMap(text => [el('dt', {}, 'Evidence'), el('dd', {}, text)]),
      (one.held_by ?? []).flatMap(held => [el('dt', {}, 'Held by'), el('dd', {}, el('code', {}, held.path), ` ${format.size(held.bytes)}`)]),
      el('dt', {}, 'Fix'),
      el('dd', {}, one.fix),
      one.saves_bytes === undefined ? [] : [el('dt', {}, 'Lowers the peak by'), el('dd', {}, format.size(one.saves_bytes))],
      one.help === undefined ? [] : [el('dt', {}, 'More'), el('dd', {}, one.help)],
    ),
  );
}

export function issues(process: ProcessSummary, device: Device | undefined): HTMLElement | null {
  const shown = process.issues.filter(one => !device || one.device === device.info.device);
  if (shown.length === 0) return null;
  return el('section', { class: 'card w12', id: 'issues' }, el('h2', {}, 'Issues'), shown.map(one => issue(one, device)));
}

function fits(fits: boolean | undefined): HTMLElement {
  const text = fits === undefined ? 'unknown' : fits ? 'yes' : 'no';
  return el('span', { class: `tag ${text}` }, text);
}

export function suggestions(device: DeviceSummary): HTMLElement | null {
  if (device.suggestions.length === 0) return null;
  const capacity = device.total_bytes === undefined ? 'Fits' : `Fits ${format.size(device.total_bytes)}`;
  const partial = device.suggestions.some(one => one.scope !== 'run');
  return el(
    'section',
    { class: 'card w7', id: 'suggestions' },
    el('h2', {}, 'What to try'),
    el(
      'div',
      { class: 'scroll' },
      el(
        'table',
        {},
        el('thead', {}, el('tr', {}, el('th', {}, 'Change'), el('th', { class: 'n' }, 'Peak after'), el('th', { class: 'n wide' }, 'Saves'), el('th', {}, capacity))),
        el(
          'tbody',
          {},
          device.suggestions.map(one =>
            el(
              'tr',
              {},
              el('td', {}, el('details', {}, el('summary', {}, one.action), el('p', { class: 'note' }, `${one.evidence} ${one.method}`))),
              el('td', { class: 'n' }, `${one.at_most ? 'at most ' : ''}${format.size(one.peak_after_bytes)}`),
              el('td', { class: 'n wide' }, format.size(one.saves_bytes)),
              el('td', {}, fits(one.fits)),
            ),
          ),
        ),
      ),
    ),
    el('p', { class: 'note' }, `Peaks are replays of the recorded blocks with the change.${partial ? ' They cover the program up to the error, or to the end of its iteration.' : ''}`),
  );
}

/** The largest allocations at the peak, or at the explained error. */
export function largest(device: DeviceSummary, model: Device | undefined, state: State): HTMLElement | null {
  const oom: OomSummary | undefined = explainedOom(device);
  const memory = oom?.in_use ?? device.peak;
  if (!memory) return null;
  const plural = (name: string) => model?.process.categories.find(one => one.name === name)?.plural ?? name;
  const total = memory.totals.allocated_bytes;
  const bar = el('div', { class: 'bar', role: 'img', 'aria-label': 'Share of each category' });
  for (const one of memory.by_category) {
    const part = el('i', { title: `${plural(one.category)} ${format.size(one.bytes)}` });
    part.style.background = `var(--category-${one.category})`;
    part.style.flexGrow = String(one.bytes);
    bar.append(part);
  }
  return el(
    'section',
    { class: 'card w7', id: 'largest' },
    el('h2', {}, oom ? 'In use at the error' : 'In use at the peak'),
    bar,
    el(
      'div',
      { class: 'legend', id: 'categories' },
      memory.by_category.map(one =>
        el(
          'button',
          { type: 'button', 'data-category': one.category, 'data-bytes': one.bytes, onclick: () => show(state, memory.seq, plural(one.category)) },
          swatch(`category-${one.category}`, plural(one.category)),
          el('b', {}, `${format.size(one.bytes)} (${format.share(one.bytes, total)})`),
        ),
      ),
    ),
    el(
      'div',
      { class: 'scroll' },
      el(
        'table',
        {},
        el('thead', {}, el('tr', {}, el('th', { class: 'n' }, 'Size'), el('th', { class: 'n' }, 'Share'), el('th', {}, 'Largest allocations'), el('th', { class: 'wide' }, 'Allocated at'))),
        el(
          'tbody',
          {},
          memory.largest_allocations.slice(0, 10).map(one => {
            const name = one.tensor_name_pattern ?? one.tensor_name;
            const shape = one.tensor_name_pattern ? one.common_tensor_shape : one.tensor_shape;
            return el(
              'tr',
              {},
              el('td', { class: 'n' }, format.size(one.bytes)),
              el('td', { class: 'n' }, format.share(one.bytes, total)),
              el(
                'td',
                {},
                swatch(`category-${one.category}`, `${plural(one.category)}${one.blocks === 1 ? '' : ` in ${format.count(one.blocks)} blocks`}`),
                name ? el('div', {}, `${name}${shape ? `  ${shape}` : ''}`) : null,
              ),
              el('td', { class: 'wide' }, location(one.stack, model)),
            );
          }),
        ),
      ),
    ),
  );
}

/** Shows the live allocations at an event, with a search. */
function show(state: State, seq: number, search: string): void {
  state.set({ point: state.now.device.pointOf(seq), search });
  document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
}

export function modules(device: DeviceSummary): HTMLElement | null {
  const memory = explainedOom(device)?.in_use ?? device.peak;
  const groups = (memory?.module_groups ?? []).slice(0, 12);
  if (!memory || groups.length === 0) return null;
  const total = memory.totals.allocated_bytes;
  return el(
    'section',
    { class: 'card w5', id: 'modules' },
    el('h2', {}, 'By module'),
    el(
      'div',
      { class: 'scroll' },
      el(
        'table',
        {},
        el('thead', {}, el('tr', {}, el('th', { class: 'n' }, 'Size'), el('th', { class: 'n' }, 'Share'), el('th', {}, 'Module'))),
        el(
          'tbody',
          {},
          groups.map(one =>
            el(
              'tr',
              {},
              el('td', { class: 'n' }, format.size(one.bytes)),
              el('td', { class: 'n' }, format.share(one.bytes, total)),
              el('td', {}, el('code', {}, one.pattern || one.class || 'model'), one.modules > 1 ? ` (${one.modules} of ${one.class ?? 'one class'})` : one.class ? ` (${one.class})` : '', one.is_own ? ', itself' : ''),
            ),
          ),
        ),
      ),
    ),
  );
}

interface StepPart {
  name: string;
  from: number;
  to: number;
  times: number;
}

/** The phases of a step in order. Micro-batches are one part: `4 x forward + backward`. */
function stepParts(device: Device, from: number, to: number): StepPart[] {
  const { process } = device;
  const runs: StepPart[] = [];
  let at = upperBound(process.phaseSeq, device.pointSeq[from] as number) - 1;
  for (let point = from; point < to; ) {
    const next = process.phaseSeq[at + 1];
    const end = next === undefined ? to : Math.min(to, upperBound(device.pointSeq, next - 1));
    const name = process.phases[process.phaseOf[Math.max(0, at)] as number] ?? 'other';
    const last = runs.at(-1);
    if (end > point) {
      if (last && last.name === name) last.to = end;
      else runs.push({ name, from: point, to: end, times: 1 });
    }
    point = Math.max(point, end);
    at += 1;
  }
  const parts: StepPart[] = [];
  for (let i = 0; i < runs.length; ) {
    const [a, b] = [runs[i] as StepPart, runs[i + 1]];
    let times = 1;
    while (b && runs[i + 2 * times]?.name === a.name && runs[i + 2 * times + 1]?.name === b.name) times += 1;
    if (b && times > 1) {
      const last = runs[i + 2 * times - 1] as StepPart;
      parts.push({ name: `${times} \u00d7 ${a.name} + ${b.name}`, from: a.from, to: last.to, times });
      i += 2 * times;
    } else {
      parts.push(a);
      i += 1;
    }
  }
  return parts;
}

/** One representative step: the one with the median peak of those after the first. */
export function oneStep(device: Device, state: State): HTMLElement | null {
  if (device.info.rest) return null;
  const all = stepRanges(device).filter(range => range.step >= 0);
  if (all.length === 0) return null;
  const peakOf = (range: { from: number; to: number }) => {
    let best = range.from;
    for (let point = range.from; point < range.to; point++) if ((device.total[point] as number) > (device.total[best] as number)) best = point;
    return best;
  };
  // The first step differs, and what follows the last one belongs to it.
  const steady = all.length > 2 ? all.slice(1, -1) : all.slice(-1);
  const sorted = steady.map(range => ({ range, peak: peakOf(range) })).sort((a, b) => (device.total[a.peak] as number) - (device.total[b.peak] as number) || a.range.step - b.range.step);
  const { range } = sorted[Math.floor((sorted.length - 1) / 2)] as { range: (typeof all)[0]; peak: number };
  const set = new SeriesSet(device, 'category');
  const rows = stepParts(device, range.from, range.to).slice(0, 12).map(part => {
    const before = set.values(Math.max(0, part.from - 1));
    const start = part.from === 0 ? 0 : (device.total[part.from - 1] as number);
    const peak = peakOf(part);
    const end = device.total[part.to - 1] as number;
    const after = set.values(part.to - 1);
    const changes = set.series.map((series, i) => ({ label: series.label, bytes: (after[i] as number) - (part.from === 0 ? 0 : (before[i] as number)) }));
    const most = changes.filter(one => Math.abs(one.bytes) >= Math.max(1, (device.total[peak] as number) / 100)).sort((a, b) => Math.abs(b.bytes) - Math.abs(a.bytes));
    return el(
      'tr',
      {},
      el('td', {}, el('button', { type: 'button', class: 'link', onclick: () => state.set({ point: peak }) }, part.name)),
      [start, device.total[peak] as number, end].map(bytes => el('td', { class: 'n' }, format.size(bytes))),
      el('td', { class: 'wide' }, most.slice(0, 3).map(one => `${one.bytes > 0 ? '+' : '\u2212'} ${one.label} ${format.size(Math.abs(one.bytes))}`).join(', ')),
    );
  });
  return el(
    'section',
    { class: 'card w5', id: 'step' },
    el('h2', {}, `One step: ${range.step} of 0 to ${all.at(-1)?.step}${steady.length > 1 ? ', the median by peak' : ''}`),
    el(
      'div',
      { class: 'scroll' },
      el(
        'table',
        {},
        el('thead', {}, el('tr', {}, el('th', {}, 'Phase'), ['Start', 'Peak', 'End'].map(title => el('th', { class: 'n' }, title)), el('th', { class: 'wide' }, 'What changed'))),
        el('tbody', {}, rows),
      ),
    ),
  );
}
