/** The parts of summary.json that the page shows. `analysis/schema/summary.schema.json` describes all of them. */

import type { RankTable } from './ranks';

export interface FrameSummary {
  name: string;
  filename: string;
  line: number;
  native?: boolean;
}

export interface StackSummary {
  location: string;
  node?: string;
  frames: FrameSummary[];
}

export interface Totals {
  allocated_bytes: number;
  active_bytes: number;
  reserved_bytes: number;
  requested_bytes: number;
}

/** Blocks with one custom category; without a name, those that no rule matches. */
export interface CustomAmount {
  custom_category?: string;
  bytes: number;
  blocks: number;
}

/** Blocks of one compiled region of `torch.compile`; without a name, those outside all. */
export interface ContextAmount {
  compile_context?: string;
  bytes: number;
  blocks: number;
}

/** Tensors that Python paths of one pattern hold. */
export interface Holder {
  path: string;
  tensors: number;
  bytes: number;
  shape?: string;
}

export interface AllocationGroup {
  custom_category?: string;
  /** The id of the private pool of the blocks. */
  memory_pool?: string;
  bytes: number;
  blocks: number;
  share: number;
  category: string;
  phase: string;
  stack: StackSummary;
  tensor_name?: string;
  tensor_shape?: string;
  tensor_name_pattern?: string;
  common_tensor_shape?: string;
}

export interface MemoryState {
  time_ns: number;
  seq: number;
  step?: number;
  phase: string;
  allocated_at?: StackSummary;
  totals: Totals;
  by_category: { category: string; bytes: number; blocks: number }[];
  by_custom_category?: CustomAmount[];
  by_compile_context?: ContextAmount[];
  growing_kv_cache?: { blocks: number; bytes: number; growth_bytes: number };
  largest_allocations: AllocationGroup[];
  module_groups?: { pattern: string; class?: string; modules: number; is_own: boolean; bytes: number }[];
}

export interface OomSummary {
  requested_bytes: number;
  requested_at: StackSummary;
  in_use: MemoryState;
  device_free_bytes?: number;
  reserved_but_unallocated_bytes: number;
  largest_free_bytes: number;
  outside_pytorch_bytes: number;
  outside_pytorch: { owner: string; bytes: number }[];
  contexts_and_other_processes_bytes?: number;
  held_back_bytes?: number;
  refused_by_pytorch: boolean;
  short_bytes?: number;
  requested_for?: string;
  as_large_as?: string;
  optimizer_state_needed_bytes?: number;
  step_estimate?: {
    needed_bytes?: number;
    at_least?: boolean;
    needed_with_foreach_bytes?: number;
    available_bytes?: number;
    basis: string;
    still_to_come: { text: string; bytes?: number }[];
  };
  fatal?: boolean;
}

/** The division of reserved memory. */
export interface ReservedSummary {
  allocated_bytes: number;
  rounding_bytes: number;
  pending_free_bytes: number;
  releasable_bytes: number;
  blocked_bytes: number;
  largest_free_bytes: number;
  segments: number;
  blocked_segments: number;
  blocked_by: {
    segments: number;
    segment_bytes: number;
    blocks: number;
    block_bytes: number;
    free_bytes: number;
    allocated_at: StackSummary;
    tensor_name?: string;
  }[];
}

/** Other settings of PyTorch's allocator. */
export interface WhatIfSummary {
  matched_blocks: number;
  matched_segment_events: number;
  mismatch?: string;
  limit_bytes?: number;
  reserved_peak_bytes: number;
  settings: {
    setting: string;
    fits?: boolean;
    fails_earlier: boolean;
    reserved_peak_bytes: number;
    step_fits?: boolean;
    step_short_bytes?: number;
  }[];
}

/** What happened inside the ranges of one name. */
export interface LabelSummary {
  name: string;
  api: string;
  rule?: string;
  times: number;
  allocations: number;
  allocated_bytes: number;
  frees: number;
  freed_bytes: number;
  kept_bytes: number;
  peak_bytes: number;
  after_bytes: number;
  duration_ns: number;
}

export interface PhaseSummary {
  phase: string;
  explanation: string;
  steps: number;
  allocated_bytes: number;
  freed_bytes: number;
  net_bytes: number;
  start_bytes: number;
  peak_bytes: number;
  after_bytes: number;
}

export interface SuggestionSummary {
  rule: string;
  action: string;
  peak_after_bytes: number;
  saves_bytes: number;
  fits?: boolean;
  scope: string;
  at_most?: boolean;
  evidence: string;
  method: string;
}

export interface OwnerSummary {
  owner: string;
  object?: string;
  end_bytes: number;
  peak_bytes: number;
  allocations: number;
}

export interface Levels {
  start_bytes: number;
  peak_bytes: number;
  end_bytes: number;
}

export interface StepSummary {
  step: number;
  micro_batches: number;
  phases: ({ phase: string } & Levels)[];
  passes?: Levels;
}

/** One CUDA graph. */
export interface CudaGraph {
  index: number;
  is_captured: boolean;
  location: string;
  label?: string;
  pool?: string;
  pool_growth_bytes: number;
  kept_bytes: number;
  nodes: number;
  instantiated_bytes: number;
  first_dimension?: number;
  is_destroyed: boolean;
}

/** A private memory pool. */
export interface MemoryPool {
  id: string;
  is_cuda_graph_pool: boolean;
  captures: number;
  peak_reserved_bytes: number;
  peak_allocated_bytes: number;
}

export interface CalledFunction {
  name: string;
  location: string;
  calls: number;
  allocated_bytes: number;
  kept_bytes: number;
  peak_bytes: number;
}

export interface DeviceSummary {
  device: number;
  name?: string;
  total_bytes?: number;
  in_use_before_bytes?: number;
  source: string;
  highest: Totals;
  peak?: MemoryState;
  end?: MemoryState;
  reserved?: ReservedSummary;
  growth_after_first_step?: { first_step_peak_bytes: number; later_steps_peak_bytes: number; optimizer_state_bytes: number };
  larger_inputs?: { step: number; input_bytes: number; median_input_bytes: number; held?: Holder[] };
  what_if?: WhatIfSummary;
  statistics: Record<string, number>;
  suggestions: SuggestionSummary[];
  steps: number;
  later_steps_count: number;
  first_step: PhaseSummary[];
  later_steps: PhaseSummary[];
  before_first_step: PhaseSummary[];
  labels: LabelSummary[];
  labels_left_out: number;
  called_functions?: { functions: CalledFunction[]; left_out: number };
  typical_step?: StepSummary;
  by_step: StepSummary[];
  oom_count: number;
  ooms: OomSummary[];
  explained_oom?: number;
  owners: OwnerSummary[];
  imported: OwnerSummary[];
  device_memory?: DeviceMemory;
  pools?: PoolSummary[];
  unmapped_segments?: { peak_bytes: number; end_bytes: number; times: number; unmapped_by: string[] };
  cuda_graphs?: { count: number; graphs: CudaGraph[]; pools: MemoryPool[] };
  holders?: { scan: { occasion: string; objects: number; is_partial: boolean }; held_bytes: number; largest: Holder[]; left_out: number };
}

/** A part of the memory in use on a device. */
export interface DevicePart {
  kind: string;
  name: string;
  bytes: number;
  pid?: number;
}

/** The memory in use on a device at one point in time. */
export interface DeviceBreakdown {
  time_ns: number;
  seq: number;
  used_bytes: number;
  parts: DevicePart[];
  pinned_host_bytes: number;
  imported_bytes: number;
  managed_bytes: number;
}

export interface DeviceMemoryPoint {
  time_ns: number;
  used_bytes: number;
  pytorch_reserved_bytes: number;
  libraries_bytes: number;
  beyond_allocations_bytes: number;
}

/** The memory in use on a device, of all processes, and what uses it. */
export interface DeviceMemory {
  total_bytes: number;
  at_peak: DeviceBreakdown;
  at_allocated_peak?: DeviceBreakdown;
  at_end: DeviceBreakdown;
  readings: number;
  over_time: DeviceMemoryPoint[];
  other_processes: string;
  nvml_process_peak_bytes?: number;
}

/** The memory pool of a library on one device. */
export interface PoolSummary {
  library: string;
  allocation: 'preallocated' | 'on_demand' | 'each_buffer' | 'unknown';
  taken_peak_bytes: number;
  allocations: number;
  preallocated_bytes?: number;
  used_peak_bytes?: number;
  used_end_bytes?: number;
}

export type XlaKind = 'argument' | 'donated_argument' | 'output' | 'temporary' | 'constant' | 'thread_local' | 'other';

/** Live buffers of one purpose and source line. */
export interface XlaLine {
  kind?: XlaKind;
  location: string;
  operation: string;
  bytes: number;
}

/** A program that XLA compiled. */
export interface XlaProgram {
  module: number;
  name: string;
  is_for_gpu: boolean;
  total_bytes: number;
  by_kind: { kind: XlaKind; bytes: number }[];
  peak?: { live_bytes: number; lines: XlaLine[] };
}

export interface IssueSummary {
  rule: string;
  device: number;
  bytes: number;
  headline: string;
  evidence: string[];
  stack?: StackSummary;
  fix: string;
  saves_bytes?: number;
  forecast?: { turn: string; turns: number; duration_ns: number; free_bytes: number; growth_bytes: number };
  files: string[];
  held_by?: Holder[];
  help?: string;
}

export interface ProcessSummary {
  pid: number;
  /** The file name of its trace. */
  trace: string;
  rank?: number;
  argv: string[];
  events: number;
  devices: DeviceSummary[];
  issues: IssueSummary[];
  no_issue_remark?: string;
  pinned_host_memory: OwnerSummary[];
  losses: Record<string, number>;
  notices: { topic: string; text: string; status: string }[];
}

/** Device memory of one process that another process opened (CUDA IPC). */
export interface SharedMemorySummary {
  importer_pid: number;
  importer_rank?: number;
  exporter_pid?: number;
  exporter_rank?: number;
  peak_bytes: number;
  at_exporter_peak_bytes?: number;
  end_bytes: number;
  kept_after_free_bytes: number;
  imports: number;
}

/** The processes of a launch beside each other. */
export interface LaunchSummary extends RankTable {
  issues: IssueSummary[];
  shared_memory: SharedMemorySummary[];
}

export interface Summary {
  run: { path: string; command: string[]; outcome: string; duration_ns?: number; events: number; unrecorded_processes: number };
  processes: ProcessSummary[];
  launch?: LaunchSummary;
  losses: Record<string, number>;
  problems: string[];
  native_objects: { path: string; addresses: number; addresses_with_function: number; notes: string[] }[];
  not_recorded: { is_loss: boolean; text: string }[];
  xla?: { program_count: number; programs: XlaProgram[]; mismatched_programs: number };
}

/** What the page says about itself. */
export interface PageInfo {
  title: string;
  /** The lines of the verdict, in the words of the terminal. */
  verdict: string[];
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

/** `in backward of step 1`. */
export function whenText(state: MemoryState): string {
  return state.step === undefined ? `in ${state.phase}` : `in ${state.phase} of step ${state.step}`;
}
