/**
 * What summary.json has about a device besides the first figures: each part in the words of the terminal report. Each
 * figure names its field of the summary, so that a test can compare them.
 */

import type { Device } from '../data/model';
import type {
  DeviceSummary,
  HolderSummary,
  MemoryState,
  OomSummary,
  PhaseSummary,
  ProcessSummary,
  Summary,
} from '../data/schema';
import { NO_CUSTOM_CATEGORY } from '../data/series';
import { deviceName, explainedOom, processName } from '../data/summary';
import { el, scrollTable } from '../dom';
import * as format from '../format';

type Part = Node | string;

/** A figure of the device's summary, in bytes. */
export function bytes(field: string, value: number): HTMLElement {
  return el('span', { class: 'num', 'data-field': field, 'data-value': value }, format.size(value));
}

/** A figure of the device's summary that counts something. */
function count(field: string, value: number): HTMLElement {
  return el('span', { class: 'num', 'data-field': field, 'data-value': value }, format.count(value));
}

/** The state that the page explains: at the error, else at the peak. */
function explained(device: DeviceSummary): { state: MemoryState; path: string; oom: OomSummary | undefined } | null {
  const oom = explainedOom(device);
  if (oom) return { state: oom.in_use, path: `ooms.${device.explained_oom}.in_use`, oom };
  return device.peak ? { state: device.peak, path: 'peak', oom: undefined } : null;
}

/** `, ` between parts. */
function joined(parts: Part[][], separator = ', '): Part[] {
  return parts.flatMap((part, at) => (at === 0 ? part : [separator, ...part]));
}

function inBlocks(field: string, blocks: number): Part[] {
  return blocks === 1 ? [] : [' in ', count(field, blocks), ' blocks'];
}

/** A list of facts with labels; `null` without any. */
function facts(id: string, title: string, rows: [string, Part[]][], size = 'w12'): HTMLElement | null {
  if (rows.length === 0) return null;
  return el(
    'section',
    { class: `card ${size}`, id },
    el('h2', {}, title),
    el(
      'dl',
      {},
      rows.flatMap(([label, parts]) => [el('dt', {}, label), el('dd', {}, parts)]),
    ),
  );
}

/** What the terminal reports besides categories and largest allocations. */
export function remarks(process: ProcessSummary, device: DeviceSummary): HTMLElement | null {
  const found = explained(device);
  if (!found) return null;
  const { state, path, oom } = found;
  const rows: [string, Part[]][] = [];
  if (oom) rows.push(...oomFacts(device, oom));
  else if (state.allocated_at?.location)
    rows.push(['The peak was reached at', [el('code', {}, state.allocated_at.location)]]);
  const cache = state.growing_kv_cache;
  if (cache) {
    const field = `${path}.growing_kv_cache`;
    rows.push([
      'The KV cache grows by',
      [
        bytes(`${field}.growth_bytes`, cache.growth_bytes),
        ' with each call of the model: ',
        bytes(`${field}.bytes`, cache.bytes),
        ...inBlocks(`${field}.blocks`, cache.blocks),
        ' so far',
      ],
    ]);
  }
  const inputs = device.larger_inputs;
  if (inputs) {
    const held = (inputs.held ?? []).flatMap((one): Part[] => [
      ', ',
      el('code', {}, one.path),
      one.shape ? ` ${one.shape}` : '',
    ]);
    rows.push([
      `Step ${inputs.step} has larger inputs`,
      [
        bytes('larger_inputs.input_bytes', inputs.input_bytes),
        ...held,
        '; the median step has ',
        bytes('larger_inputs.median_input_bytes', inputs.median_input_bytes),
      ],
    ]);
  }
  const growth = device.growth_after_first_step;
  if (growth) {
    const field = 'growth_after_first_step';
    rows.push([
      'Growth after the first step',
      [
        'later steps peak at ',
        bytes(`${field}.later_steps_peak_bytes`, growth.later_steps_peak_bytes),
        ', step 0 at ',
        bytes(`${field}.first_step_peak_bytes`, growth.first_step_peak_bytes),
        ': the optimizer allocated ',
        bytes(`${field}.optimizer_state_bytes`, growth.optimizer_state_bytes),
        ' of state at the end of step 0',
      ],
    ]);
  }
  const owners = (!oom && device.outside_pytorch?.owners) || [];
  if (owners.length > 0) {
    rows.push([
      'Outside PyTorch',
      [
        ...joined(
          owners.map((owner, at) => [`${owner.owner} `, bytes(`outside_pytorch.owners.${at}.bytes`, owner.bytes)]),
        ),
        ' (peak of each owner)',
      ],
    ]);
  }
  const used = device.device_memory?.at_peak;
  if (used && !oom) {
    const parts = used.parts.map((part, at) => ({ part, at })).filter(({ part }) => part.bytes > 0);
    const text = parts.map(({ part, at }): Part[] => [
      `${part.name}${part.pid === undefined ? '' : ` (process ${part.pid})`} `,
      bytes(`device_memory.at_peak.parts.${at}.bytes`, part.bytes),
    ]);
    rows.push([
      'As nvidia-smi shows it',
      [bytes('device_memory.at_peak.used_bytes', used.used_bytes), ' at most: ', ...joined(text)],
    ]);
  }
  const imported = device.imported.map((owner, at) => ({ owner, at })).filter(({ owner }) => owner.peak_bytes > 0);
  if (imported.length > 0) {
    rows.push([
      'Imported',
      [
        ...joined(
          imported.map(({ owner, at }) => [`${owner.owner} `, bytes(`imported.${at}.peak_bytes`, owner.peak_bytes)]),
        ),
        ' of other processes (CUDA IPC), counted there',
      ],
    ]);
  }
  const unmapped = device.unmapped_segments;
  if (unmapped) {
    const field = 'unmapped_segments';
    rows.push([
      'Paused',
      [
        'up to ',
        bytes(`${field}.peak_bytes`, unmapped.peak_bytes),
        ' of the reserved memory was unmapped (',
        unmapped.unmapped_by.join(', '),
        ')',
      ],
    ]);
  }
  const pinned = process.pinned_host_memory.map((owner, at) => ({ owner, at }));
  if (pinned.reduce((sum, { owner }) => sum + owner.peak_bytes, 0) >= 2 ** 20) {
    const parts = pinned
      .slice(0, 3)
      .map(({ owner, at }): Part[] => [
        `${owner.owner} `,
        bytes(`process.pinned_host_memory.${at}.peak_bytes`, owner.peak_bytes),
      ]);
    rows.push(['Pinned host memory', [...joined(parts), ' (peak of each owner)']]);
  }
  if (device.highest.reserved_bytes > state.totals.reserved_bytes)
    rows.push(['Peak of reserved memory', [bytes('highest.reserved_bytes', device.highest.reserved_bytes)]]);
  return facts('facts', oom ? 'The out-of-memory error' : 'More about the peak', rows, 'w7');
}

/** The request that failed, and where the device's memory was. */
function oomFacts(device: DeviceSummary, oom: OomSummary): [string, Part[]][] {
  const path = `ooms.${device.explained_oom}`;
  const rows: [string, Part[]][] = [];
  const what = oom.requested_for
    ? ` for ${oom.requested_for}`
    : oom.as_large_as
      ? ` (as large as ${oom.as_large_as})`
      : '';
  const end =
    oom.fatal === undefined
      ? 'it is unknown whether the error ended the process'
      : oom.fatal
        ? 'the error ended the process'
        : 'the program continued';
  rows.push(['Requested', [bytes(`${path}.requested_bytes`, oom.requested_bytes), `${what}; ${end}`]]);
  if (oom.requested_at.location) rows.push(['Requested at', [el('code', {}, oom.requested_at.location)]]);
  const free = oom.device_free_bytes;
  if (free !== undefined) {
    const shown = bytes(`${path}.device_free_bytes`, free);
    if (oom.refused_by_pytorch) {
      rows.push([
        'Limit',
        [
          "PyTorch's own limit (set_per_process_memory_fraction) refused the request at ",
          bytes(`${path}.in_use.totals.reserved_bytes`, oom.in_use.totals.reserved_bytes),
          ' reserved; CUDA had ',
          shown,
          ' free',
        ],
      ]);
    } else {
      rows.push([
        oom.held_back_bytes === undefined ? 'Free on the device' : 'Free within the limit',
        [
          shown,
          ...(oom.short_bytes === undefined ? [] : [', ', bytes(`${path}.short_bytes`, oom.short_bytes), ' short']),
        ],
      ]);
    }
  }
  if (oom.held_back_bytes !== undefined) {
    rows.push([
      'Limit',
      [
        'a library (such as HAMi-core) holds back ',
        bytes(`${path}.held_back_bytes`, oom.held_back_bytes),
        ' that the device has free',
      ],
    ]);
  }
  if (oom.reserved_but_unallocated_bytes > 0) {
    const { reserved } = device;
    rows.push([
      'Reserved but unallocated',
      [
        bytes(`${path}.reserved_but_unallocated_bytes`, oom.reserved_but_unallocated_bytes),
        '; largest free block ',
        bytes(`${path}.largest_free_bytes`, oom.largest_free_bytes),
        oom.largest_free_bytes < oom.requested_bytes ? ', smaller than the request' : '',
        ...(reserved && reserved.blocked_bytes > 0
          ? ['; ', bytes('reserved.blocked_bytes', reserved.blocked_bytes), ' blocked by live blocks']
          : []),
      ],
    ]);
  }
  const owners = oom.outside_pytorch.map((owner, at): Part[] => [
    `${owner.owner} `,
    bytes(`${path}.outside_pytorch.${at}.bytes`, owner.bytes),
  ]);
  const others = oom.contexts_and_other_processes_bytes ?? 0;
  if (others > 0)
    owners.push(['CUDA contexts and other processes ', bytes(`${path}.contexts_and_other_processes_bytes`, others)]);
  if (owners.length > 0) rows.push(['Outside PyTorch', joined(owners)]);
  if (oom.optimizer_state_needed_bytes !== undefined)
    rows.push([
      'Optimizer state needed in all',
      [bytes(`${path}.optimizer_state_needed_bytes`, oom.optimizer_state_needed_bytes)],
    ]);
  const estimate = oom.step_estimate;
  if (estimate) {
    const field = `${path}.step_estimate`;
    const parts = estimate.still_to_come.map((part, at): Part[] => [
      part.text,
      ...(part.bytes !== undefined && estimate.still_to_come.length > 1
        ? [' (', bytes(`${field}.still_to_come.${at}.bytes`, part.bytes), ')']
        : []),
    ]);
    const needed: Part[] =
      estimate.needed_bytes === undefined
        ? []
        : [
            `: ${estimate.basis === 'earlier_iteration' ? 'the iteration' : 'a full step'} needs ` +
              `${estimate.at_least ? 'at least' : 'about'} `,
            bytes(`${field}.needed_bytes`, estimate.needed_bytes),
          ];
    if (estimate.needed_with_foreach_bytes !== undefined)
      needed.push(
        ', or ',
        bytes(`${field}.needed_with_foreach_bytes`, estimate.needed_with_foreach_bytes),
        ' with foreach=True (the default)',
      );
    if (estimate.available_bytes !== undefined && estimate.needed_bytes !== undefined)
      needed.push('; the allocator could have ', bytes(`${field}.available_bytes`, estimate.available_bytes));
    rows.push(['Still to come', [...joined(parts), ...needed]]);
  }
  device.ooms.forEach((other, at) => {
    if (at === device.explained_oom) return;
    const when =
      other.in_use.step === undefined ? other.in_use.phase : `step ${other.in_use.step}, ${other.in_use.phase}`;
    rows.push([
      'Another error',
      [
        'requested ',
        bytes(`ooms.${at}.requested_bytes`, other.requested_bytes),
        ` at ${when}  `,
        el('code', {}, other.requested_at.location),
      ],
    ]);
  });
  if (device.oom_count > device.ooms.length) rows.push(['Errors in all', [count('oom_count', device.oom_count)]]);
  return rows;
}

/** A table of bytes, their share of a whole, and what they are. */
function amounts(
  id: string,
  title: string,
  whole: number,
  rows: [HTMLElement, number, Part[]][],
  size = 'w5',
  note?: string,
): HTMLElement | null {
  if (rows.length === 0) return null;
  return el(
    'section',
    { class: `card ${size}`, id },
    el('h2', {}, title),
    scrollTable(
      [['Size', 'n'], ['Share', 'n'], ['']],
      rows.map(([figure, value, parts]) =>
        el(
          'tr',
          {},
          el('td', { class: 'n' }, figure),
          el('td', { class: 'n' }, format.share(value, whole)),
          el('td', {}, parts),
        ),
      ),
    ),
    note ? el('p', { class: 'note' }, note) : null,
  );
}

/** In use by custom category, the largest first. What no rule matches comes last. */
export function customCategories(device: DeviceSummary, search: (text: string) => void): HTMLElement | null {
  const found = explained(device);
  const all = (found?.state.by_custom_category ?? [])
    .map((one, at) => ({ one, at }))
    .filter(({ one }) => one.bytes > 0);
  if (!found || all.length === 0) return null;
  all.sort(
    (a, b) =>
      Number(a.one.custom_category === undefined) - Number(b.one.custom_category === undefined) ||
      b.one.bytes - a.one.bytes,
  );
  return amounts(
    'custom',
    `In use by custom category (${found.oom ? 'at the error' : 'at the peak'})`,
    found.state.totals.allocated_bytes,
    all.map(({ one, at }) => {
      const field = `${found.path}.by_custom_category.${at}`;
      const name = one.custom_category ?? NO_CUSTOM_CATEGORY;
      return [
        bytes(`${field}.bytes`, one.bytes),
        one.bytes,
        [
          el('button', { type: 'button', class: 'link', onclick: () => search(name) }, name),
          ...inBlocks(`${field}.blocks`, one.blocks),
        ],
      ];
    }),
  );
}

/** In use by compiled region of `torch.compile`. */
export function compileContexts(device: DeviceSummary): HTMLElement | null {
  const found = explained(device);
  const all = (found?.state.by_compile_context ?? [])
    .map((one, at) => ({ one, at }))
    .filter(({ one }) => one.bytes > 0);
  if (!found || !all.some(({ one }) => one.compile_context !== undefined)) return null;
  return amounts(
    'compile-contexts',
    'In use by compile context of torch.compile',
    found.state.totals.allocated_bytes,
    all.slice(0, 40).map(({ one, at }) => {
      const field = `${found.path}.by_compile_context.${at}`;
      return [
        bytes(`${field}.bytes`, one.bytes),
        one.bytes,
        [one.compile_context ?? 'outside compiled regions', ...inBlocks(`${field}.blocks`, one.blocks)],
      ];
    }),
  );
}

const OCCASIONS: Record<string, string> = { out_of_memory: 'after the out-of-memory error', end: 'at the end' };

/** The tensors that a holder holds: `(24 tensors)`, and their shape. */
export function holderText(field: string, one: HolderSummary): Part[] {
  return [
    el('code', {}, one.path),
    ...(one.tensors === 1 ? [] : [' (', count(`${field}.tensors`, one.tensors), ' tensors)']),
    one.shape ? `  ${one.shape}` : '',
  ];
}

/** Which Python objects hold the largest tensors (`--holders`). */
export function holders(device: DeviceSummary): HTMLElement | null {
  const found = device.holders;
  if (!found || found.largest.length === 0) return null;
  const note = [
    found.left_out > 0 ? `${format.number(found.left_out, 'smaller pattern')} not listed.` : '',
    found.scan.is_partial ? 'The program has too many objects: some were not visited.' : '',
  ].join(' ');
  const section = amounts(
    'holders',
    `Who holds it: Python objects ${OCCASIONS[found.scan.occasion] ?? 'while the program ran'}`,
    found.held_bytes,
    found.largest.map((one, at) => [
      bytes(`holders.largest.${at}.bytes`, one.bytes),
      one.bytes,
      holderText(`holders.largest.${at}`, one),
    ]),
    'w5',
    note.trim(),
  );
  section?.insertBefore(
    el(
      'p',
      { class: 'note' },
      'Shares are of the ',
      bytes('holders.held_bytes', found.held_bytes),
      ' that Python objects held.',
    ),
    section.children[1] ?? null,
  );
  return section;
}

/** The division of reserved memory, what blocks it, and a replay with other allocator settings. */
export function reserved(device: DeviceSummary): HTMLElement | null {
  const [division, whatIf, found] = [device.reserved, device.what_if, explained(device)];
  if (!found || (!division && !whatIf)) return null;
  const whole = found.state.totals.reserved_bytes;
  const rows: [HTMLElement, number, string][] = division
    ? [
        [
          bytes('reserved.allocated_bytes', division.allocated_bytes),
          division.allocated_bytes,
          'allocated by the program',
        ],
        [
          bytes('reserved.rounding_bytes', division.rounding_bytes),
          division.rounding_bytes,
          'of it, rounding of requests to block sizes',
        ],
        [
          bytes('reserved.pending_free_bytes', division.pending_free_bytes),
          division.pending_free_bytes,
          'pending free: streams still use the block',
        ],
        [
          bytes('reserved.releasable_bytes', division.releasable_bytes),
          division.releasable_bytes,
          'free in unused segments and pages, releasable to CUDA',
        ],
        [
          bytes('reserved.blocked_bytes', division.blocked_bytes),
          division.blocked_bytes,
          'free but blocked by live blocks in the same segment',
        ],
      ]
    : [];
  const text = (fits: boolean | undefined) => (fits === undefined ? '' : fits ? 'fits' : 'fails');
  return el(
    'section',
    { class: 'card w7', id: 'reserved' },
    el('h2', {}, found.oom ? 'Reserved memory at the error' : 'Reserved memory at the peak'),
    division
      ? scrollTable(
          [['Size', 'n'], ['Share', 'n'], ['']],
          rows
            .filter(([, value]) => value > 0)
            .map(([figure, value, what]) =>
              el(
                'tr',
                {},
                el('td', { class: 'n' }, figure),
                el('td', { class: 'n' }, format.share(value, whole)),
                el('td', {}, what),
              ),
            ),
        )
      : null,
    division && division.blocked_by.length > 0
      ? el(
          'details',
          { class: 'more' },
          el('summary', {}, `Segments blocked by (${format.count(division.blocked_by.length)})`),
          el(
            'ul',
            {},
            division.blocked_by.map((one, at) => {
              const field = `reserved.blocked_by.${at}`;
              return el(
                'li',
                {},
                count(`${field}.blocks`, one.blocks),
                one.blocks === 1 ? ' block of ' : ' blocks of ',
                bytes(`${field}.block_bytes`, one.block_bytes),
                one.tensor_name ? ` (${one.tensor_name})` : '',
                ': ',
                bytes(`${field}.free_bytes`, one.free_bytes),
                ' free in ',
                count(`${field}.segments`, one.segments),
                one.segments === 1 ? ' segment of ' : ' segments of ',
                bytes(`${field}.segment_bytes`, one.segment_bytes),
                ' ',
                el('code', {}, one.allocated_at.location),
              );
            }),
          ),
        )
      : null,
    whatIf?.mismatch
      ? el(
          'p',
          { class: 'note' },
          'The allocator replay differs from the recording after ',
          count('what_if.matched_blocks', whatIf.matched_blocks),
          ` blocks, so other settings are not compared: ${whatIf.mismatch}`,
        )
      : null,
    whatIf && whatIf.settings.length > 0
      ? [
          el('h3', { class: 'sub' }, 'Allocator settings'),
          scrollTable(
            [['PYTORCH_CUDA_ALLOC_CONF'], ['Peak reserved', 'n'], ['Request', 'wide'], ['Rest of the step', 'wide']],
            [
              el(
                'tr',
                {},
                el('td', {}, "the run's own"),
                el('td', { class: 'n' }, bytes('what_if.reserved_peak_bytes', whatIf.reserved_peak_bytes)),
                el('td', { class: 'wide' }),
                el('td', { class: 'wide' }),
              ),
              ...whatIf.settings.map((one, at) =>
                el(
                  'tr',
                  {},
                  el('td', {}, el('code', {}, one.setting)),
                  el(
                    'td',
                    { class: 'n' },
                    bytes(`what_if.settings.${at}.reserved_peak_bytes`, one.reserved_peak_bytes),
                  ),
                  el('td', { class: 'wide' }, one.fails_earlier ? 'an earlier request fails' : text(one.fits)),
                  el(
                    'td',
                    { class: 'wide' },
                    one.step_fits === false && one.step_short_bytes !== undefined
                      ? [bytes(`what_if.settings.${at}.step_short_bytes`, one.step_short_bytes), ' short']
                      : text(one.step_fits),
                  ),
                ),
              ),
            ],
          ),
          el(
            'p',
            { class: 'note' },
            'A replay of PyTorch\u2019s allocator; it matches ',
            count('what_if.matched_blocks', whatIf.matched_blocks),
            ' recorded blocks and ',
            count('what_if.matched_segment_events', whatIf.matched_segment_events),
            ' segment events.',
          ),
        ]
      : null,
  );
}

/** The ranges that the program names, most allocated bytes first. `find` selects the next one on the timeline. */
export function namedRanges(device: DeviceSummary, model: Device, find: (name: string) => void): HTMLElement | null {
  const own = device.labels.map((label, at) => ({ label, at })).filter(({ label }) => label.rule === undefined);
  if (own.length === 0) return null;
  own.sort((a, b) => b.label.allocated_bytes - a.label.allocated_bytes);
  const per = (value: number, times: number) => format.size(Math.floor(value / Math.max(1, times)));
  const shown = own.slice(0, 40);
  const left = own.length - shown.length + device.labels_left_out;
  return el(
    'section',
    { class: 'card w12', id: 'ranges' },
    el('h2', {}, 'Named ranges (record_function, NVTX)'),
    scrollTable(
      [
        ['Range'],
        ['Times', 'n'],
        ['Peak', 'n'],
        ['After the last', 'n'],
        ['Allocated, mean', 'n wide'],
        ['Freed, mean', 'n wide'],
        ['Kept, mean', 'n wide'],
        ['Duration, mean', 'n wide'],
      ],
      shown.map(({ label, at }) => {
        // Names that differ in a number share a row.
        const name = label.name.endsWith('*') ? label.name.slice(0, -1) : label.name;
        const title =
          label.name === ''
            ? '(no name)'
            : model.process.ranges.count > 0
              ? el('button', { type: 'button', class: 'link', onclick: () => find(name) }, label.name)
              : label.name;
        return el(
          'tr',
          {},
          el('td', {}, title, el('span', { class: 'mute' }, ` ${label.api === 'nvtx' ? 'NVTX' : label.api}`)),
          el('td', { class: 'n' }, count(`labels.${at}.times`, label.times)),
          el('td', { class: 'n' }, bytes(`labels.${at}.peak_bytes`, label.peak_bytes)),
          el('td', { class: 'n' }, bytes(`labels.${at}.after_bytes`, label.after_bytes)),
          [label.allocated_bytes, label.freed_bytes, label.kept_bytes].map(value =>
            el('td', { class: 'n wide' }, per(value, label.times)),
          ),
          el('td', { class: 'n wide' }, format.duration(label.duration_ns / 1000 / Math.max(1, label.times))),
        );
      }),
    ),
    el(
      'p',
      { class: 'note' },
      `Choose a name to select its next range on the ` +
        `timeline.${left > 0 ? ` ${format.number(left, 'more name')}: see summary.json.` : ''}`,
    ),
  );
}

/** The functions that the program calls again and again, most allocated bytes first. */
export function calledFunctions(device: DeviceSummary): HTMLElement | null {
  const called = device.called_functions;
  if (!called) return null;
  const per = (value: number, calls: number) => format.size(Math.floor(value / Math.max(1, calls)));
  const field = (at: number, name: string) => `called_functions.functions.${at}.${name}`;
  return el(
    'section',
    { class: 'card w12', id: 'functions' },
    el('h2', {}, 'Functions that allocate'),
    scrollTable(
      [
        ['Function'],
        ['Calls', 'n'],
        ['Peak', 'n'],
        ['Allocated, mean', 'n wide'],
        ['Kept, mean', 'n wide'],
        ['Location', 'wide'],
      ],
      called.functions.map((one, at) =>
        el(
          'tr',
          {},
          el('td', {}, el('code', {}, one.name)),
          el('td', { class: 'n' }, count(field(at, 'calls'), one.calls)),
          el('td', { class: 'n' }, bytes(field(at, 'peak_bytes'), one.peak_bytes)),
          [one.allocated_bytes, one.kept_bytes].map(value => el('td', { class: 'n wide' }, per(value, one.calls))),
          el('td', { class: 'wide' }, el('code', {}, one.location)),
        ),
      ),
    ),
    called.left_out > 0 ? el('p', { class: 'note' }, `${format.number(called.left_out, 'more function')}.`) : null,
  );
}

/** What each phase allocated, freed and kept. */
export function phases(device: DeviceSummary): HTMLElement | null {
  const later = device.later_steps_count;
  const parts: [string, string, PhaseSummary[]][] = [
    ['before the first step', 'before_first_step', device.before_first_step],
    ['step 0', 'first_step', device.first_step],
    [
      later === 1 ? 'step 1' : `steps 1-${later}: per-step mean; peak is the maximum`,
      'later_steps',
      device.later_steps,
    ],
  ];
  if (parts.every(([, , rows]) => rows.length === 0)) return null;
  const per = (row: PhaseSummary, value: number, isMean: boolean) =>
    Math.trunc(value / (isMean ? Math.max(1, row.steps) : 1));
  return el(
    'section',
    { class: 'card w12', id: 'phases' },
    el('h2', {}, 'Memory by phase'),
    scrollTable(
      [
        ['Phase'],
        ['Allocated', 'n wide'],
        ['Freed', 'n wide'],
        ['Net', 'n'],
        ['After', 'n'],
        ['Peak', 'n'],
        ['Main changes', 'wide'],
      ],
      parts.flatMap(([caption, field, rows]) =>
        rows.length === 0
          ? []
          : [
              el('tr', { class: 'caption' }, el('th', { colspan: 7, scope: 'colgroup' }, caption)),
              ...rows.map((row, at) => {
                const isMean = field === 'later_steps';
                return el(
                  'tr',
                  {},
                  el(
                    'td',
                    {},
                    row.phase,
                    isMean && row.steps < later
                      ? el('span', { class: 'mute' }, ` in ${row.steps} of ${later} steps`)
                      : null,
                  ),
                  [row.allocated_bytes, row.freed_bytes].map(value =>
                    el('td', { class: 'n wide' }, format.size(per(row, value, isMean))),
                  ),
                  el('td', { class: 'n' }, format.signedSize(per(row, row.net_bytes, isMean))),
                  el('td', { class: 'n' }, bytes(`${field}.${at}.after_bytes`, row.after_bytes)),
                  el('td', { class: 'n' }, bytes(`${field}.${at}.peak_bytes`, row.peak_bytes)),
                  el('td', { class: 'wide' }, row.explanation),
                );
              }),
            ],
      ),
    ),
  );
}

/** One line per process and device, as in the terminal: also those whose timeline the page does not have. */
export function processes(summary: Summary): HTMLElement | null {
  if (summary.processes.length < 2) return null;
  return el(
    'section',
    { class: 'card w12', id: 'processes' },
    el('h2', {}, 'Processes'),
    scrollTable(
      [['Process'], ['Device'], ['Peak', 'n'], ['Reserved', 'n'], ['Outside PyTorch', 'n wide'], ['Peak at', 'wide']],
      summary.processes.flatMap((process, at) =>
        process.devices.map((device, number) => {
          const field = `/processes.${at}.devices.${number}`;
          const oom = explainedOom(device);
          const when = (state: MemoryState) =>
            state.step === undefined ? state.phase : `step ${state.step}, ${state.phase}`;
          return el(
            'tr',
            {},
            el('td', {}, processName(process)),
            el('td', {}, deviceName(device.device)),
            el('td', { class: 'n' }, bytes(`${field}.highest.allocated_bytes`, device.highest.allocated_bytes)),
            el('td', { class: 'n' }, bytes(`${field}.highest.reserved_bytes`, device.highest.reserved_bytes)),
            el('td', { class: 'n wide' }, format.size(device.outside_pytorch?.bytes ?? 0)),
            el(
              'td',
              { class: 'wide' },
              [device.peak ? when(device.peak) : '', oom ? `out of memory at ${when(oom.in_use)}` : '']
                .filter(text => text)
                .join('; '),
            ),
          );
        }),
      ),
    ),
  );
}
