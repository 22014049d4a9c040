/** What the run means: verdict, figures, issues, suggestions, one step, largest allocations. From summary.json. */

import { stepRanges } from '../data/axis';
import { CATEGORY_TEXTS } from '../data/categories';
import type { Device } from '../data/model';
import type {
  DeviceSummary,
  IssueSummary,
  Levels,
  OomSummary,
  ProcessSummary,
  StackSummary,
  StepSummary,
  Summary,
  VerdictStatus,
  VerdictSummary,
} from '../data/schema';
import type { State } from '../data/state';
import { explainedOom, serverOnly, whenText } from '../data/summary';
import { codeParts, el, scrollTable } from '../dom';
import * as format from '../format';
import { holderText } from './details/in_use';
import { bytes } from './figures';
import { swatch } from './swatch';

/** How a statement of each status is drawn: its class and its mark. */
const STATUS: Record<VerdictStatus, [string, string]> = {
  good: ['ok', '\u2713'],
  warning: ['warn', '!'],
  failed: ['bad', '\u2717'],
};

/** The verdict: how the run ended, and what it used. A mark says how good that is. */
export function verdict({ remarks, statements }: VerdictSummary): HTMLElement {
  return el(
    'section',
    { class: 'card w12 verdict', id: 'verdict' },
    remarks.map(text => el('p', {}, text)),
    statements.flatMap(({ status, text, details }) => [
      el('strong', { class: STATUS[status][0] }, `${STATUS[status][1]} ${text}`),
      ...details.map(detail => el('p', {}, detail)),
    ]),
  );
}

/** What is missing from the recording, if anything is. `name` distinguishes the runs of a page. */
export function losses(summary: Summary, name?: string): { element: HTMLElement; isLoss: boolean } | null {
  if (summary.gaps.length === 0) return null;
  const isLoss = summary.gaps.some(gap => gap.is_loss);
  const title = `${isLoss ? 'The recording is incomplete' : 'Not recorded'}${name ? ` (${name})` : ''}`;
  const element = el(
    'section',
    { class: `card w12 listing ${isLoss ? 'losses' : ''}`, id: name ? `losses-${name}` : 'losses' },
    el('h2', {}, title),
    el(
      'ul',
      {},
      summary.gaps.map(gap => el('li', {}, `${gap.label}: ${gap.text}`)),
    ),
  );
  return { element, isLoss };
}

/** One figure. */
export function card(title: string, figure: string, more: string, size = 'w3'): HTMLElement {
  return el(
    'section',
    { class: `card ${size} figure` },
    el('h2', {}, title),
    el('b', {}, figure),
    el('span', {}, more),
  );
}

/** Up to four figures of a device. */
export function figures(device: DeviceSummary, isSnapshot: boolean): HTMLElement[] {
  const oom = explainedOom(device);
  const state = oom?.in_use ?? device.peak;
  if (!state) return [];
  const unallocated = state.totals.reserved_bytes - state.totals.allocated_bytes;
  const at = oom ? 'at the error' : 'at the peak';
  const outside = device.outside_pytorch;
  const allocated = card(
    oom ? 'Allocated at the error' : 'Peak allocated',
    format.size(state.totals.allocated_bytes),
    serverOnly(device) || state.phase === 'other' ? '' : whenText(state),
    device.device < 0 ? 'w12' : 'w3',
  );
  // CPU tensors have no allocator that reserves, no device of their own, and nothing beside PyTorch.
  if (device.device < 0) return [allocated];
  return [
    allocated,
    card(`Reserved ${at}`, format.size(state.totals.reserved_bytes), `${format.size(unallocated)} unallocated`),
    oom
      ? card(
          'Free on the device',
          oom.device_free_bytes === undefined ? 'unknown' : format.size(oom.device_free_bytes),
          `${format.size(oom.requested_bytes)} requested`,
        )
      : isSnapshot
        ? card('Outside PyTorch', 'unknown', 'not in a snapshot')
        : card(
            'Outside PyTorch',
            format.size(outside?.bytes ?? 0),
            outside?.owners
              .slice(0, 2)
              .map(one => `${one.owner} ${format.size(one.bytes)}`)
              .join(', ') ?? 'no library allocated from CUDA itself',
          ),
    card(
      'Capacity',
      device.total_bytes === undefined ? 'unknown' : format.size(device.total_bytes),
      [
        device.name,
        device.total_bytes === undefined && isSnapshot ? 'not in a snapshot' : '',
        !device.in_use_before_bytes
          ? ''
          : `${format.size(device.in_use_before_bytes)} in use before the program started`,
      ]
        .filter(text => text)
        .join('; '),
    ),
  ];
}

/** A location that shows its source line. */
function location(stack: StackSummary, device: Device | undefined): HTMLElement {
  const own = stack.frames.find(frame => !frame.native && device?.process.sourceLine(frame.filename, frame.line));
  const source = own && device ? device.process.sourceLine(own.filename, own.line) : null;
  return el(
    'div',
    {},
    el('code', {}, stack.location || 'no stack'),
    source ? el('pre', { class: 'source' }, source) : null,
  );
}

function issue(one: IssueSummary, device: Device | undefined, field: string): HTMLElement {
  return el(
    'article',
    { class: 'issue' },
    el('h3', {}, el('code', {}, one.rule), ` ${one.headline}${one.forecast ? `; ${one.forecast.text}` : ''}`),
    el(
      'dl',
      {},
      one.stack ? [el('dt', {}, 'Location'), el('dd', {}, location(one.stack, device))] : [],
      one.evidence.flatMap(text => [el('dt', {}, 'Evidence'), el('dd', {}, codeParts(text))]),
      (one.held_by ?? []).flatMap((held, at) => [
        el('dt', {}, 'Held by'),
        el(
          'dd',
          {},
          holderText(`${field}.held_by.${at}`, held),
          ' ',
          bytes(`${field}.held_by.${at}.bytes`, held.bytes),
        ),
      ]),
      el('dt', {}, 'Fix'),
      el('dd', {}, codeParts(one.fix)),
      one.saves_bytes === undefined
        ? []
        : [el('dt', {}, 'Lowers the peak by'), el('dd', {}, bytes(`${field}.saves_bytes`, one.saves_bytes))],
      one.files.length === 0 ? [] : [el('dt', {}, 'Files'), el('dd', {}, one.files.join(', '))],
      one.help === undefined ? [] : [el('dt', {}, 'More'), el('dd', {}, one.help)],
    ),
  );
}

export function issues(process: ProcessSummary, device: Device | undefined): HTMLElement | null {
  const shown = process.issues
    .map((one, at) => ({ one, at }))
    .filter(({ one }) => !device || one.device === device.info.device);
  if (shown.length === 0 && process.no_issue_remark === undefined) return null;
  return el(
    'section',
    { class: 'card w12', id: 'issues' },
    el('h2', {}, 'Issues'),
    shown.length === 0 ? el('p', {}, process.no_issue_remark) : null,
    shown.map(({ one, at }) => issue(one, device, `process.issues.${at}`)),
  );
}

function fits(fits: boolean | undefined): HTMLElement {
  const text = fits === undefined ? 'unknown' : fits ? 'yes' : 'no';
  return el('span', { class: `tag ${text}` }, text);
}

export function suggestions(device: DeviceSummary): HTMLElement | null {
  const advice = device.what_if?.advice;
  if (device.suggestions.length === 0 && !advice) return null;
  const capacity = device.total_bytes === undefined ? 'Fits' : `Fits ${format.size(device.total_bytes)}`;
  const partial = device.suggestions.some(one => one.scope !== 'run');
  const setting = advice ? el('p', {}, `${advice.text} (allocator replay)`) : null;
  return el(
    'section',
    { class: 'card w7', id: 'suggestions' },
    el('h2', {}, 'What to try'),
    advice?.is_fix ? setting : null,
    device.suggestions.length > 0
      ? [
          scrollTable(
            [['Change'], ['Peak after', 'n'], ['Saves', 'n wide'], [capacity]],
            device.suggestions.map(one =>
              el(
                'tr',
                {},
                el(
                  'td',
                  {},
                  el(
                    'details',
                    {},
                    el('summary', {}, one.action),
                    one.code.length > 0 ? el('pre', { class: 'code' }, one.code.join('\n')) : null,
                    el(
                      'p',
                      {},
                      `Cost: ${one.cost_text}. `,
                      one.link === '' ? null : el('a', { href: one.link, rel: 'noreferrer' }, 'Documentation'),
                    ),
                    el('p', { class: 'note' }, `${one.evidence} ${one.method}`),
                  ),
                ),
                el('td', { class: 'n' }, `${one.at_most ? 'at most ' : ''}${format.size(one.peak_after_bytes)}`),
                el('td', { class: 'n wide' }, format.size(one.saves_bytes)),
                el('td', {}, fits(one.fits)),
              ),
            ),
          ),
          el(
            'p',
            { class: 'note' },
            `Peaks are replays of the recorded blocks with the ` +
              `change.${partial ? ' They cover the program up to the error, or to the end of its iteration.' : ''}`,
          ),
        ]
      : null,
    advice?.is_fix ? null : setting,
  );
}

/** The largest allocations at the peak, or at the explained error. */
export function largest(device: DeviceSummary, model: Device | undefined, state: State): HTMLElement | null {
  const oom: OomSummary | undefined = explainedOom(device);
  const memory = oom?.in_use ?? device.peak;
  if (!memory) return null;
  const total = memory.totals.allocated_bytes;
  const bar = el('div', { class: 'bar', role: 'img', 'aria-label': 'Share of each category' });
  for (const one of memory.by_category) {
    const part = el('i', { title: `${CATEGORY_TEXTS[one.category]} ${format.size(one.bytes)}` });
    part.style.background = `var(--category-${one.category})`;
    part.style.flexGrow = String(one.bytes);
    bar.append(part);
  }
  return el(
    'section',
    { class: 'card w12', id: 'largest' },
    el('h2', {}, oom ? 'In use at the error' : 'In use at the peak'),
    bar,
    el(
      'div',
      { class: 'legend', id: 'categories' },
      memory.by_category.map(one =>
        el(
          'button',
          {
            type: 'button',
            'data-category': one.category,
            'data-bytes': one.bytes,
            onclick: () => show(state, memory.seq, CATEGORY_TEXTS[one.category]),
          },
          swatch(`category-${one.category}`, CATEGORY_TEXTS[one.category]),
          el('b', {}, `${format.size(one.bytes)} (${format.share(one.bytes, total)})`),
        ),
      ),
    ),
    scrollTable(
      [['Size', 'n'], ['Share', 'n'], ['Largest allocations'], ['Allocated at', 'below']],
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
            swatch(
              `category-${one.category}`,
              `${CATEGORY_TEXTS[one.category]}${one.memory_pool ? ` ${one.memory_pool}` : ''}` +
                `${one.blocks === 1 ? '' : ` in ${format.count(one.blocks)} blocks`}` +
                `${one.custom_category ? ` [${one.custom_category}]` : ''}`,
            ),
            name ? el('div', {}, `${name}${shape ? `  ${shape}` : ''}`) : null,
          ),
          el('td', { class: 'below' }, location(one.stack, model)),
        );
      }),
    ),
  );
}

/** Shows the live allocations at an event, with a search. */
function show(state: State, seq: number, search: string): void {
  const device = state.now.device.whole;
  state.set({ device, point: device.pointOf(seq), search });
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
    scrollTable(
      [['Size', 'n'], ['Share', 'n'], ['Module']],
      groups.map(one =>
        el(
          'tr',
          {},
          el('td', { class: 'n' }, format.size(one.bytes)),
          el('td', { class: 'n' }, format.share(one.bytes, total)),
          el(
            'td',
            {},
            el('code', {}, one.pattern || one.class || 'model'),
            one.modules > 1 ? ` (${one.modules} of ${one.class ?? 'one class'})` : one.class ? ` (${one.class})` : '',
            one.is_own ? ', itself' : '',
          ),
        ),
      ),
    ),
  );
}

/**
 * What a phase changed: `+ activations 7.6 GiB, - gradients 1.5 GiB`. What it allocates and frees again cancels out.
 */
function changesText(explanation: string): string {
  const parts = explanation
    .split(', ')
    .filter(part => part !== '')
    .map(part =>
      part.includes(' freed ') ? { sign: '\u2212', text: part.replace(' freed ', ' ') } : { sign: '+', text: part },
    );
  const left = parts.filter(part => !parts.some(other => other.sign !== part.sign && other.text === part.text));
  return left.map(part => `${part.sign} ${part.text}`).join(', ');
}

/** The phases of a micro-batch. */
const PASSES = ['forward', 'backward', 'recompute'];

/** One step in time order, as in the terminal: the typical one, else the first. */
export function oneStep(device: DeviceSummary, model: Device, state: State): HTMLElement | null {
  const step: StepSummary | undefined = device.typical_step ?? device.by_step[0];
  if (!step) return null;
  const range = stepRanges(model).find(one => one.step === step.step);
  /** The highest point of a phase of the step, for the link into the timeline. */
  const peakOf = (bytes: number): number => {
    for (let point = range?.from ?? 0; point < (range?.to ?? 0); point++)
      if (model.total[point] === bytes) return point;
    return -1;
  };
  const row = (name: string, levels: Levels, [text, turns]: [string, string]) => {
    const point = peakOf(levels.peak_bytes);
    return el(
      'tr',
      {},
      el(
        'td',
        {},
        point < 0
          ? name
          : el('button', { type: 'button', class: 'link', onclick: () => state.set({ device: model, point }) }, name),
      ),
      [levels.start_bytes, levels.peak_bytes, levels.end_bytes].map(bytes =>
        el('td', { class: 'n' }, format.size(bytes)),
      ),
      el('td', { class: 'below' }, [changesText(text), turns].filter(one => one !== '').join('. ')),
    );
  };
  const rows = step.joined_phases.flatMap(part => {
    const accumulates = step.micro_batches > 1 && part.phases.includes('forward');
    const isPasses = accumulates && part.phases.every(phase => PASSES.includes(phase));
    const names = isPasses ? 'forward + backward' : part.phases.join(' + ');
    const name = accumulates ? `${format.count(step.micro_batches)} \u00d7 ${names}` : names;
    const turns =
      isPasses || part.phases.length === 1
        ? []
        : step.phases
            .filter(one => part.phases.includes(one.phase))
            .map(one => `${one.phase} in ${format.count(one.turns)} parts, peak ${format.size(one.peak_bytes)}`);
    return [row(name, part, [part.explanation, turns.join('; ')])];
  });
  const listed = step.phases.map(one => one.phase);
  const rare = device.typical_step ? device.later_steps.filter(one => !listed.includes(one.phase)) : [];
  const rareText = (one: (typeof rare)[number]) =>
    `${one.phase} (in ${one.steps} of ${device.later_steps_count} steps, peak ${format.size(one.peak_bytes)})`;
  return el(
    'section',
    { class: 'card w5', id: 'step' },
    el(
      'h2',
      {},
      device.typical_step && device.later_steps_count > 1
        ? `Step ${step.step} of 0 to ${format.count(device.steps - 1)}`
        : `Step ${step.step}`,
    ),
    scrollTable([['Phase'], ['Start', 'n'], ['Peak', 'n'], ['End', 'n'], ['What changed', 'below']], rows),
    rare.length > 0 ? el('p', { class: 'note' }, `Only in some steps: ${rare.map(rareText).join(', ')}.`) : null,
  );
}
