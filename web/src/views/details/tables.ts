/** The tables of the summary: phases, named ranges, functions, processes. */

import type { Device } from '../../data/model';
import type { DeviceSummary, MemoryState, PhaseSummary, Summary } from '../../data/schema';
import { deviceName, explainedOom, processName } from '../../data/summary';
import { el, scrollTable } from '../../dom';
import * as format from '../../format';
import { bytes, count } from '../figures';

/** The mean of bytes over so many times. */
function mean(bytes: number, times: number): string {
  return format.size(Math.floor(bytes / Math.max(1, times)));
}

/** The ranges that the program names, most allocated bytes first. `find` selects the next one on the timeline. */
export function namedRanges(device: DeviceSummary, model: Device, find: (name: string) => void): HTMLElement | null {
  const own = device.labels.map((label, at) => ({ label, at })).filter(({ label }) => label.rule === undefined);
  if (own.length === 0) return null;
  own.sort((a, b) => b.label.allocated_bytes - a.label.allocated_bytes);
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
            el('td', { class: 'n wide' }, mean(value, label.times)),
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
        ['Location', 'below'],
      ],
      called.functions.map((one, at) =>
        el(
          'tr',
          {},
          el('td', {}, el('code', {}, one.name)),
          el('td', { class: 'n' }, count(field(at, 'calls'), one.calls)),
          el('td', { class: 'n' }, bytes(field(at, 'peak_bytes'), one.peak_bytes)),
          [one.allocated_bytes, one.kept_bytes].map(value => el('td', { class: 'n wide' }, mean(value, one.calls))),
          el('td', { class: 'below' }, el('code', {}, one.location)),
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
        ['Main changes', 'below'],
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
                  el('td', { class: 'below' }, row.explanation),
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
      [['Process'], ['Device'], ['Peak', 'n'], ['Reserved', 'n'], ['Outside PyTorch', 'n wide'], ['Peak at', 'below']],
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
              { class: 'below' },
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
