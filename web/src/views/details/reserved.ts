/** Reserved memory, and a replay with other allocator settings. */

import type { DeviceSummary } from '../../data/schema';
import { el, scrollTable } from '../../dom';
import * as format from '../../format';
import { bytes, count, explained } from '../figures';

/** The parts of reserved memory, as fields of the summary and in words. */
const PARTS = [
  ['allocated_bytes', 'allocated by the program'],
  ['rounding_bytes', 'of it, rounding of requests to block sizes'],
  ['pending_free_bytes', 'pending free: streams still use the block'],
  ['releasable_bytes', 'free in unused segments and pages, releasable to CUDA'],
  ['blocked_bytes', 'free but blocked by live blocks in the same segment'],
] as const;

/** The division of reserved memory, what blocks it, and a replay with other allocator settings. */
export function reserved(device: DeviceSummary): HTMLElement | null {
  const [division, whatIf, found] = [device.reserved, device.what_if, explained(device)];
  if (!found || (!division && !whatIf)) return null;
  const whole = found.state.totals.reserved_bytes;
  const text = (fits: boolean | undefined) => (fits === undefined ? '' : fits ? 'fits' : 'fails');
  return el(
    'section',
    { class: 'card w7', id: 'reserved' },
    el('h2', {}, found.oom ? 'Reserved memory at the error' : 'Reserved memory at the peak'),
    division
      ? scrollTable(
          [['Size', 'n'], ['Share', 'n'], ['']],
          PARTS.filter(([field]) => division[field] > 0).map(([field, words]) =>
            el(
              'tr',
              {},
              el('td', { class: 'n' }, bytes(`reserved.${field}`, division[field])),
              el('td', { class: 'n' }, format.share(division[field], whole)),
              el('td', {}, words),
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
