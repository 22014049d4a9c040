/** Facts about the peak or the out-of-memory error: what the terminal reports besides categories and allocations. */

import type { DeviceSummary, OomSummary, ProcessSummary } from '../../data/schema';
import { el } from '../../dom';
import { bytes, count, explained, facts, joined, type Part } from '../figures';

/** What the terminal reports besides categories and largest allocations. */
export function remarks(process: ProcessSummary, device: DeviceSummary): HTMLElement | null {
  const found = explained(device);
  if (!found) return null;
  const { state, oom } = found;
  const rows: [string, Part[]][] = [];
  if (oom) rows.push(...oomFacts(device, oom));
  else if (state.allocated_at?.location)
    rows.push(['The peak was reached at', [el('code', {}, state.allocated_at.location)]]);
  const cache = state.growing_kv_cache;
  if (cache) {
    rows.push(['KV cache', [cache.text]]);
  }
  const outlier = device.outlier_step;
  if (outlier) rows.push([`Step ${outlier.step} needs more`, [outlier.text]]);
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
    const state = bytes('growth_after_first_step.optimizer_state_bytes', growth.optimizer_state_bytes);
    rows.push(['Growth after the first step', [growth.text, ' Optimizer state: ', state]]);
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
      `${part.label} `,
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
  for (const line of process.pinned_host_lines.slice(0, 3)) if (line.text) rows.push(['Pinned at a line', [line.text]]);
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
          ' reserved; the device had ',
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
          ...(oom.short_bytes === undefined || oom.segment_bytes === oom.requested_bytes
            ? []
            : [
                ' of the ',
                bytes(`${path}.segment_bytes`, oom.segment_bytes),
                ' that PyTorch requests from the driver for it',
              ]),
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
