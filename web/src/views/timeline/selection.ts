/** What a choice on the timeline selects: a point of the drawn device, of its window, or of a rank of the sum. */

import type { Device } from '../../data/model';
import type { RankTotals } from '../../data/rank_totals';
import type { Content } from './content';

/** The point to compare with, in a device; none if the device does not have it. */
function baseIn(content: Content, device: Device): { base: number } {
  const { now } = content.state;
  const seq = now.device.pointSeq[now.base] ?? -1;
  return { base: now.base >= 0 && device.covers(seq) ? device.pointOf(seq) : -1 };
}

/** Shows the live allocations of a rank at a drawn point of the sum. */
export function selectInSum(content: Content, sum: RankTotals, point: number, rank: Device): void {
  const place = sum.place(point, rank);
  const { state } = content;
  const isSame = place.device === state.now.device.whole;
  state.set({ ...place, ...(isSame ? baseIn(content, place.device) : { base: -1 }) });
}

export function selectPeak(content: Content): void {
  const { sum, state, whole, peak } = content;
  if (sum) selectInSum(content, sum, peak, state.now.device.whole);
  else state.set({ device: whole, point: peak });
}

/** Shows the live allocations at a drawn point. In the sum, those of a rank, or of the chosen one. */
export function selectPoint(content: Content, drawn: number, rank: Device | null): void {
  const { sum, state, device: shown } = content;
  const { device } = state.now;
  if (sum) selectInSum(content, sum, drawn, rank ?? device.whole);
  else state.set({ device: shown, point: drawn, ...(shown === device ? {} : baseIn(content, shown)) });
}

/** Compares the selected state with that at a drawn point. */
export function compareWith(content: Content, drawn: number): void {
  const { sum, state, device: shown, whole } = content;
  const { device, point } = state.now;
  if (sum) return state.set({ ...content.placeOf(point), base: sum.place(drawn, device.whole).point });
  const seq = shown.pointSeq[drawn] as number;
  const selected = device.pointSeq[point] ?? 0;
  // Both points must be of one device.
  const common =
    device === shown ? device : ([shown, device].find(one => one.covers(selected) && one.covers(seq)) ?? whole);
  state.set({ device: common, point: common.pointOf(selected), base: common.pointOf(seq) });
}
