/** The structure of `memtrace report DIR --json`, as far as the page shows it (analysis/schema/job.schema.json). */

import type { RankTable } from './ranks';

export interface JobReport extends RankTable {
  path: string;
  job: string;
  job_source: string;
  runs: { name: string; host: string }[];
  clocks: { host: string; common_steps: number; later_ns: number; differs_at_least_ns: number }[];
  notices: string[];
}
