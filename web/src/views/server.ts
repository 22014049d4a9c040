/**
 * An engine that serves models: where its memory is, what it had expected, its stages, and which options change it, in
 * the words of the terminal report. Each figure names its field of the summary.
 */

import type {
  Activity,
  ColocationSummary,
  DeviceSummary,
  ServerSummary,
  ServingPart,
  ServingStage,
} from '../data/schema';
import { codeParts, el, scrollTable } from '../dom';
import * as format from '../format';
import { bytes, joined, type Part } from './figures';

export const PARTS: Record<ServingPart, string> = {
  kv_cache: 'KV cache',
  weights: 'weights',
  adapters: 'adapters (LoRA)',
  cuda_graphs: 'CUDA graphs',
  sampler: 'sampler and logits',
  communication: 'communication buffers',
  activations: 'activations',
  buffers: 'buffers and workspaces',
};

export const STAGES: Record<ServingStage, string> = {
  start: 'start',
  load: 'load',
  profile: 'profile',
  kv_cache: 'KV cache',
  capture: 'capture',
  warm_up: 'warm-up',
  serve: 'serve',
  prefill: 'prefill',
  decode: 'decode',
  sleep: 'sleep',
  wake_up: 'wake up',
};

const ACTIVITIES: Record<Activity, string> = { rollout: 'rollout', train: 'train', sync: 'sync' };

/** The server of a device; `null` if no engine was recognized there. */
export function server(device: DeviceSummary): HTMLElement | null {
  const found = device.server;
  if (!found) return null;
  return el(
    'section',
    { class: 'card w12', id: 'server' },
    el(
      'h2',
      {},
      `${found.engine} ${found.when}, at the peak of `,
      bytes('server.allocated_bytes', found.allocated_bytes),
    ),
    el('div', { class: 'side' }, parts(found), stages(found)),
    el(
      'dl',
      {},
      facts(found).flatMap(([label, text]) => [el('dt', {}, label), el('dd', {}, text)]),
    ),
    advice(found),
    device.colocation ? colocation(device.colocation) : null,
  );
}

/** The activities of an engine and a trainer on one device. */
function colocation(found: ColocationSummary): HTMLElement {
  const figure = (at: number, name: 'bytes' | 'engine_bytes' | 'trainer_bytes') =>
    el('td', { class: 'n' }, bytes(`colocation.activities.${at}.${name}`, found.activities[at]?.[name] ?? 0));
  const rows = found.activities.map((one, at) =>
    el(
      'tr',
      {},
      el('td', {}, ACTIVITIES[one.activity]),
      figure(at, 'bytes'),
      figure(at, 'engine_bytes'),
      figure(at, 'trainer_bytes'),
      el('td', { class: 'below' }, one.parts_text),
    ),
  );
  const trainer = found.trainer ?? 'Trainer';
  return el(
    'div',
    {},
    el('h3', {}, 'Rollout and training'),
    scrollTable(
      [['Activity'], ['On the GPU', 'n'], [found.engine, 'n'], [trainer, 'n'], ['Most of it', 'below']],
      rows,
      {
        'aria-label': `Rollout and training of ${found.engine}`,
      },
    ),
    el(
      'ul',
      {},
      found.advice.map(text => el('li', {}, codeParts(text))),
    ),
  );
}

function parts(found: ServerSummary): HTMLElement {
  const rows = found.parts.map((part, at) => [part, at] as const).filter(([part]) => part.bytes > 0);
  return scrollTable(
    [['Part'], ['Bytes', 'n'], ['Share', 'n']],
    rows.map(([part, at]) =>
      el(
        'tr',
        {},
        el('td', {}, PARTS[part.kind]),
        el('td', { class: 'n' }, bytes(`server.parts.${at}.bytes`, part.bytes)),
        el('td', { class: 'n' }, format.share(part.bytes, found.allocated_bytes)),
      ),
    ),
    { 'aria-label': `Memory of ${found.engine}` },
  );
}

function facts(found: ServerSummary): [string, Part[]][] {
  const rows: [string, Part[]][] = [];
  const types = found.weights_by_type.map((one, at): Part[] => [
    `${one.data_type} `,
    bytes(`server.weights_by_type.${at}.bytes`, one.bytes),
  ]);
  if (types.length > 0 && found.unnamed_weights_bytes > 0)
    types.push(['no name ', bytes('server.unnamed_weights_bytes', found.unnamed_weights_bytes)]);
  if (types.length > 0) rows.push(['Weights', joined(types)]);
  if (found.kv_cache && found.kv_cache.text !== '') rows.push(['KV cache', [found.kv_cache.text]]);
  const usage = found.kv_cache?.usage?.text ?? found.kv_cache?.usage_unknown ?? '';
  if (usage !== '') rows.push(['KV cache use', [usage]]);
  if (found.captures_text !== '') rows.push(['CUDA graphs by size', [found.captures_text]]);
  const expected = found.expectations.map((one, at): Part[] => [
    `${one.part} `,
    bytes(`server.expectations.${at}.expected_bytes`, one.expected_bytes),
    ', took ',
    bytes(`server.expectations.${at}.actual_bytes`, one.actual_bytes),
  ]);
  if (expected.length > 0) rows.push([`${found.engine} estimated`, joined(expected, '; ')]);
  return rows;
}

function advice(found: ServerSummary): HTMLElement | null {
  if (found.advice.length === 0) return null;
  return el(
    'div',
    {},
    el('h3', {}, 'What to try'),
    el(
      'ul',
      {},
      found.advice.map(text => el('li', {}, codeParts(text))),
    ),
  );
}

function stages(found: ServerSummary): HTMLElement {
  const figure = (at: number, name: 'start_bytes' | 'peak_bytes' | 'end_bytes' | 'transient_bytes', className = 'n') =>
    el('td', { class: className }, bytes(`server.stages.${at}.${name}`, found.stages[at]?.[name] ?? 0));
  return scrollTable(
    [['Stage'], ['Start', 'n'], ['Peak', 'n'], ['End', 'n'], ['Above start', 'n wide'], ['Time', 'n wide']],
    found.stages.map((one, at) =>
      el(
        'tr',
        {},
        el('td', {}, STAGES[one.stage]),
        figure(at, 'start_bytes'),
        figure(at, 'peak_bytes'),
        figure(at, 'end_bytes'),
        figure(at, 'transient_bytes', 'n wide'),
        el('td', { class: 'n wide' }, format.duration(one.duration_ns / 1000)),
      ),
    ),
    { 'aria-label': `Stages of ${found.engine}` },
  );
}
