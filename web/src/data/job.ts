/** The structure of `memtrace report DIR --json`, as far as the page shows it (analysis/schema/job.schema.json). */

export interface JobRank {
  rank: number;
  run: string;
  host: string;
  pid: number;
  device: number;
  peak_bytes: number;
  reserved_bytes: number;
  phases: { phase: string; peak_bytes: number }[];
  oom_count: number;
  other_devices: unknown[];
}

export interface JobReport {
  path: string;
  job: string;
  job_source: string;
  runs: { name: string; host: string }[];
  world_size?: number;
  ranks: JobRank[];
  missing_ranks_count: number;
  missing_ranks: number[];
  imbalance?: { worst_rank: number; median_rank: number; best_rank: number };
  worst_against_median?: {
    rank: number;
    than_rank: number;
    difference_bytes: number;
    by_category: { category?: string; difference_bytes: number }[];
    by_line: { location: string; category?: string; difference_bytes: number }[];
  };
  other_processes: { host: string; pid: number; rank?: number; device: number; peak_bytes: number }[];
  clocks: { host: string; common_steps: number; later_ns: number; differs_at_least_ns: number }[];
  notices: string[];
}
