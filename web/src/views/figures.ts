/**
 * Figures of summary.json, in the words of the terminal report. Each names its field of the summary, so that a test can
 * compare them.
 */

import type { DeviceSummary, MemoryState, OomSummary } from '../data/schema';
import { explainedOom } from '../data/summary';
import { el } from '../dom';
import * as format from '../format';

/** A part of a text: a figure, or what is between figures. */
export type Part = Node | string;

/** A figure of the device's summary, in bytes. */
export function bytes(field: string, value: number): HTMLElement {
  return el('span', { class: 'num', 'data-field': field, 'data-value': value }, format.size(value));
}

/** A figure of the device's summary that counts something. */
export function count(field: string, value: number): HTMLElement {
  return el('span', { class: 'num', 'data-field': field, 'data-value': value }, format.count(value));
}

/** The state that the page explains: at the error, else at the peak. */
export function explained(
  device: DeviceSummary,
): { state: MemoryState; path: string; oom: OomSummary | undefined } | null {
  const oom = explainedOom(device);
  if (oom) return { state: oom.in_use, path: `ooms.${device.explained_oom}.in_use`, oom };
  return device.peak ? { state: device.peak, path: 'peak', oom: undefined } : null;
}

/** `, ` between parts. */
export function joined(parts: Part[][], separator = ', '): Part[] {
  return parts.flatMap((part, at) => (at === 0 ? part : [separator, ...part]));
}

export function inBlocks(field: string, blocks: number): Part[] {
  return blocks === 1 ? [] : [' in ', count(field, blocks), ' blocks'];
}

/** A list of facts with labels; `null` without any. */
export function facts(id: string, title: string, rows: [string, Part[]][], size = 'w12'): HTMLElement | null {
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
