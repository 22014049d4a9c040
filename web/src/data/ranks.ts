/** The ranks of a launch or of a job beside each other, as far as pages show them: the same fields in both. */

/** A process that is no rank: a worker or helper. */
export interface HelperSummary {
  pid: number;
  /** Its host, in the report of a job. */
  host?: string;
  peak_bytes: number;
}

/** One rank. */
export interface RankSummary {
  rank: number;
  host?: string;
  pid: number;
  device?: number;
  peak_bytes: number;
  reserved_bytes: number;
  phases: { phase: string; peak_bytes: number }[];
  oom_count: number;
  other_devices: unknown[];
  helpers: HelperSummary[];
  other_attempts: number[];
  /** Other runs of the job that have this rank. */
  other_runs?: string[];
}

export interface RankTable {
  world_size?: number;
  hosts: string[];
  ranks: RankSummary[];
  imbalance?: { worst_rank: number; median_rank: number; best_rank: number; max_bytes: number; difference_bytes: number; unused_bytes: number };
  worst_against_median?: {
    by_category: { category?: string; difference_bytes: number }[];
    by_line: { location: string; category?: string; difference_bytes: number }[];
  };
  without_rank: HelperSummary[];
}
