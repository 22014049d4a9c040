/** summary.json as the page has it, and how parts of it are named. */

import type { DeviceSummary, LaunchSummary, MemoryState, OomSummary, ProcessSummary } from './schema';

/** The ranks of a launch or of a job. */
export type RankTable = Omit<LaunchSummary, 'issues' | 'shared_memory'>;

/** What the page says about itself. */
export interface PageInfo {
  title: string;
  only: string | null;
  /** For each process, the first and the last event that the timeline shows first; `null` for the whole run. */
  windows: ([number, number] | null)[];
  processes_left_out: number;
  /** If a server has sent the page: the largest number of events of which it sends all blocks. */
  complete_window: number | null;
  memtrace_version: string;
}

export function processName(process: ProcessSummary): string {
  return process.rank === undefined ? `pid ${process.pid}` : `rank ${process.rank}`;
}

export function deviceName(device: number): string {
  return device < 0 ? 'CPU tensors' : `GPU ${device}`;
}

/** The out-of-memory error that the report explains. */
export function explainedOom(device: DeviceSummary): OomSummary | undefined {
  return device.explained_oom === undefined ? undefined : device.ooms[device.explained_oom];
}

/** The engine that serves models, unless the process also trains: then it has phases and steps. */
export function serverOnly(device: DeviceSummary): DeviceSummary['server'] {
  const trains = [...device.before_first_step, ...device.first_step, ...device.later_steps].some(
    row => row.phase === 'backward',
  );
  return trains ? undefined : device.server;
}

/** `in backward of step 1`. */
export function whenText(state: MemoryState): string {
  return state.step === undefined ? `in ${state.phase}` : `in ${state.phase} of step ${state.step}`;
}
