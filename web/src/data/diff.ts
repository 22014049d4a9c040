/** The comparison of two peaks. `analysis/schema/diff.schema.json` describes all of it. */

import type { FrameSummary, Totals } from './summary';

export interface Change {
  a_bytes: number;
  b_bytes: number;
  difference_bytes: number;
  a_blocks: number;
  b_blocks: number;
}

export interface LineChange extends Change {
  location: string;
  a_frame?: FrameSummary;
  b_frame?: FrameSummary;
  category?: string;
}

export interface StackChange extends Change {
  location: string;
  node?: string;
  category?: string;
  phase?: string;
  frames: FrameSummary[];
}

export interface DiffPeak {
  pid: number;
  rank?: number;
  trace: string;
  device: number;
  seq: number;
  step?: number;
  phase: string;
  location: string;
  totals: Totals;
  reserved_peak_bytes: number;
}

export interface DevicePair {
  a: DiffPeak;
  b: DiffPeak;
  difference_bytes: number;
  noise_bytes: number;
  result: 'same' | 'redistributed' | 'grew' | 'shrank';
  headline: string;
  by_category: (Change & { category?: string })[];
  by_custom_category?: (Change & { custom_category?: string })[];
  by_phase: (Change & { phase?: string })[];
  by_line: LineChange[];
  by_stack: StackChange[];
  by_module: (Change & { path?: string })[];
}

export interface DiffReport {
  a: { path: string; step?: number };
  b: { path: string; step?: number };
  pairs: DevicePair[];
}

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
