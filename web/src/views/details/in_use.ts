/** The blocks in use at the explained state: by custom category, compile context and Python object. */

import type { DeviceSummary, HolderSummary } from '../../data/schema';
import { NO_CUSTOM_CATEGORY } from '../../data/series';
import { el, scrollTable } from '../../dom';
import * as format from '../../format';
import { bytes, count, explained, inBlocks, type Part } from '../figures';

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
