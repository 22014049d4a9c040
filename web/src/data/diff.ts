/** The comparison of two peaks, as the page has it. */

import type { CategoryChange, DiffPeak } from './schema';

/** The figures that every row of a comparison has. */
export type Change = Pick<CategoryChange, 'a_bytes' | 'b_bytes' | 'difference_bytes' | 'a_blocks' | 'b_blocks'>;

/** What the page says about itself, in the words of the terminal. */
export interface ComparisonInfo {
  title: string;
  /** The names of the two runs. */
  names: [string, string];
  verdict: string[];
  /** By pair: its devices. */
  pairs: string[];
  /** By pair: how moved lines were matched. */
  moved_lines: (string | null)[];
  remarks: string[];
  /** By pair: the numbers of the data of both processes; `null` if the page does not have them. */
  processes: ([number, number] | null)[];
}

/** `step 1, forward, train.py:38`. */
export function peakText(peak: DiffPeak): string {
  const step = peak.step === undefined ? 'before the first step' : `step ${peak.step}`;
  return [step, peak.phase, peak.location || 'no stack'].join(', ');
}
