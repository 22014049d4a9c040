/**
 * The JSON of memtrace, from analysis/schema, where every field has its meaning. Generated: see
 * analysis/tests/it/typescript.rs.
 */

export type Activity = 'rollout' | 'train' | 'sync';

export interface ActivitySummary {
  activity: Activity;
  bytes: number;
  engine_bytes: number;
  parts: HeldPart[];
  parts_text: string;
  paused_bytes: number;
  time_ns: number;
  times?: number;
  trainer_bytes: number;
}

export interface AllocationGroup {
  blocks: number;
  bytes: number;
  category: Category;
  common_tensor_shape?: string;
  compile_context?: string;
  custom_category?: string;
  memory_pool?: string;
  phase: Phase;
  share: number;
  stack: StackSummary;
  tensor_name?: string;
  tensor_name_pattern?: string;
  tensor_shape?: string;
}

export interface AllocatorAdvice {
  is_fix: boolean;
  text: string;
}

export interface BlockingAllocation {
  allocated_at: StackSummary;
  block_bytes: number;
  blocks: number;
  free_bytes: number;
  segment_bytes: number;
  segments: number;
  tensor_name?: string;
}

export interface BoundingRun {
  allocated_bytes: number;
  has_failed: boolean;
  is_out_of_memory: boolean;
  reserved_bytes: number;
}

export type BufferKind =
  | 'argument'
  | 'donated_argument'
  | 'output'
  | 'temporary'
  | 'constant'
  | 'thread_local'
  | 'other';

export interface CalledFunctionSummary {
  allocated_bytes: number;
  allocations: number;
  calls: number;
  kept_bytes: number;
  location: string;
  name: string;
  peak_bytes: number;
}

export interface CalledFunctionsSummary {
  functions: CalledFunctionSummary[];
  left_out: number;
}

export interface CapturedSize {
  graphs: number;
  instantiated_bytes: number;
  kept_bytes: number;
  mode: number;
  pool_growth_bytes: number;
  segments: number;
  size?: number;
}

export type Category =
  | 'parameter'
  | 'gradient'
  | 'optimizer_state'
  | 'activation'
  | 'autograd_detail'
  | 'input'
  | 'temporary'
  | 'workspace'
  | 'communication_bucket'
  | 'autocast_cache'
  | 'checkpoint'
  | 'kv_cache'
  | 'kept_tensor'
  | 'graph_pool'
  | 'memory_pool'
  | 'unknown';

export interface CategoryAmount {
  blocks: number;
  bytes: number;
  category: Category;
}

export interface CategoryChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  category?: Category;
  difference_bytes: number;
}

export interface CategoryDifference {
  bytes: number;
  category: Category;
}

export type CategoryRuleId =
  | 'name-parameter'
  | 'name-buffer'
  | 'name-gradient'
  | 'name-optimizer-state'
  | 'bucket-ddp'
  | 'bucket-fsdp'
  | 'bucket-data-parallel'
  | 'bucket-zero-redundancy-optimizer'
  | 'bucket-megatron'
  | 'kv-cache-transformers'
  | 'kv-cache-vllm'
  | 'kv-cache-class-name'
  | 'kv-cache-buffer-name'
  | 'kv-cache-equal-blocks'
  | 'kv-cache-grows'
  | 'kv-cache-kept-across-calls'
  | 'checkpoint-torch-load'
  | 'checkpoint-safetensors'
  | 'parameter-serving-loader'
  | 'parameter-fsdp-shard'
  | 'parameter-deepcopy'
  | 'parameter-module-moved'
  | 'parameter-model-loaded'
  | 'parameter-replaced-by-move'
  | 'parameter-same-site'
  | 'parameter-gradient-sized'
  | 'workspace-cublas'
  | 'workspace-cudnn'
  | 'workspace-never-freed'
  | 'graph-pool'
  | 'private-pool'
  | 'input-data-phase'
  | 'input-later-batches'
  | 'input-other-batches'
  | 'input-unnamed-at-load'
  | 'input-no-gradient-at-load'
  | 'input-before-forward'
  | 'input-after-evaluation'
  | 'activation-forward'
  | 'activation-recomputed'
  | 'activation-recorded-backward'
  | 'kept-tensor-at-load'
  | 'kept-tensor-outlives-steps'
  | 'kept-tensor-outside-model'
  | 'kept-tensor-result'
  | 'gradient-bucket'
  | 'gradient-outlives-backward'
  | 'gradient-cleared'
  | 'gradient-freed-outside-engine'
  | 'gradient-accumulate-grad'
  | 'gradient-parameter-sized'
  | 'autograd-detail-between-nodes'
  | 'autocast-cache-weight-cast'
  | 'autocast-cache-freed-at-exit'
  | 'optimizer-state-initialization'
  | 'optimizer-state-outlives-step'
  | 'temporary-freed-by-call'
  | 'temporary-freed-by-node'
  | 'temporary-freed-before-forward'
  | 'temporary-freed-in-optimizer'
  | 'temporary-gradient-work'
  | 'unknown-at-load'
  | 'unknown-in-optimizer'
  | 'no-category-rule';

export interface CategoryRuleSummary {
  blocks: number;
  bytes: number;
  category: Category;
  evidence?: FrameSummary;
  rule: CategoryRuleId;
}

export interface ColocationSummary {
  activities: ActivitySummary[];
  advice: string[];
  engine: string;
  trainer?: string;
}

export interface CompileContextAmount {
  blocks: number;
  bytes: number;
  compile_context?: string;
}

export type Cost =
  | 'free'
  | 'rounding'
  | 'twice'
  | 'more_kernels'
  | 'smaller_steps'
  | 'recomputed'
  | 'transfer'
  | 'eight_bit'
  | 'other_training';

export interface CudaGraphSummary {
  captured_at?: FrameSummary;
  first_dimension?: number;
  graphs_in_pool: number;
  index: number;
  instantiated_bytes: number;
  instantiations: number;
  is_captured: boolean;
  is_destroyed: boolean;
  kept_bytes: number;
  label?: string;
  location: string;
  nodes: number;
  output?: string;
  peak_bytes: number;
  pool?: string;
  pool_growth_bytes: number;
}

export interface CudaGraphsSummary {
  count: number;
  failed_calls: number;
  graphs: CudaGraphSummary[];
  graphs_left_out: number;
  pools: MemoryPoolSummary[];
}

export interface CustomCategoryAmount {
  blocks: number;
  bytes: number;
  custom_category?: string;
}

export interface CustomCategoryChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  custom_category?: string;
  difference_bytes: number;
}

export interface DeviceBreakdown {
  imported_bytes: number;
  is_reading: boolean;
  managed_bytes: number;
  parts: DevicePart[];
  pinned_host_bytes: number;
  seq: number;
  time_ns: number;
  used_bytes: number;
}

export interface DeviceMemoryPoint {
  beyond_allocations_bytes: number;
  libraries_bytes: number;
  pytorch_reserved_bytes: number;
  seq: number;
  time_ns: number;
  used_bytes: number;
}

export interface DeviceMemorySummary {
  at_allocated_peak?: DeviceBreakdown;
  at_end: DeviceBreakdown;
  at_peak: DeviceBreakdown;
  nvml_process_peak_bytes?: number;
  other_processes: OtherProcesses;
  over_time: DeviceMemoryPoint[];
  readings: number;
  total_bytes: number;
}

export interface DevicePair {
  a: DiffPeak;
  b: DiffPeak;
  by_category: CategoryChange[];
  by_custom_category?: CustomCategoryChange[];
  by_line: LineChange[];
  by_module: ModuleChange[];
  by_phase: PhaseChange[];
  by_server_part?: ServerPartChange[];
  by_stack: StackChange[];
  by_stage?: StageChange[];
  difference_bytes: number;
  headline: string;
  moved_lines: number;
  moved_lines_by_text: number;
  noise_bytes: number;
  result: DiffResult;
}

export interface DevicePart {
  bytes: number;
  is_mps?: boolean;
  kind: DevicePartKind;
  label: string;
  name: string;
  pid?: number;
  workload?: Workload;
}

export type DevicePartKind =
  | 'pytorch_allocated'
  | 'pytorch_cached'
  | 'library'
  | 'unused_pools'
  | 'rounding'
  | 'context'
  | 'kernels'
  | 'other_process'
  | 'before_process'
  | 'context_and_other_processes'
  | 'unattributed';

export interface DeviceSummary {
  before_first_step: PhaseSummary[];
  by_step: StepSummary[];
  called_functions?: CalledFunctionsSummary;
  category_rules: CategoryRuleSummary[];
  colocation?: ColocationSummary;
  cuda_graphs?: CudaGraphsSummary;
  custom_category_rules?: CustomCategoryAmount[];
  device: number;
  device_memory?: DeviceMemorySummary;
  end?: MemoryState;
  explained_oom?: number;
  first_step: PhaseSummary[];
  first_step_micro_batches: number;
  freed_at_exit_bytes: number;
  growth_after_first_step?: GrowthAfterFirstStep;
  highest: Totals;
  holders?: HoldersSummary;
  imported: OwnerSummary[];
  in_use_before_bytes?: number;
  labels: LabelSummary[];
  labels_left_out: number;
  larger_inputs?: LargerInputs;
  later_steps: PhaseSummary[];
  later_steps_count: number;
  later_steps_micro_batches: number;
  name?: string;
  oom_count: number;
  ooms: OomSummary[];
  outlier_step?: OutlierStep;
  outside_pytorch?: OutsidePytorch;
  owners: OwnerSummary[];
  peak?: MemoryState;
  phase_rules: PhaseRuleSummary[];
  pools?: PoolSummary[];
  range?: RangeSummary;
  released?: ReleasedSummary[];
  reserved?: ReservedSummary;
  server?: ServerSummary;
  source: string;
  statistics: Record<string, number>;
  steps: number;
  suggestions: SuggestionSummary[];
  total_bytes?: number;
  typical_step?: StepSummary;
  unmapped_segments?: UnmappedSegmentsSummary;
  what_if?: WhatIfSummary;
}

export interface DiffPeak {
  device: number;
  location: string;
  lost_events: number;
  phase: Phase;
  pid: number;
  rank?: number;
  reserved_peak_bytes: number;
  seq: number;
  step?: number;
  totals: Totals;
  trace: string;
}

export interface DiffReport {
  a: DiffRun;
  b: DiffRun;
  notes: string[];
  pairs: DevicePair[];
  unpaired: UnpairedDevice[];
  version: string;
}

export type DiffResult = 'same' | 'redistributed' | 'grew' | 'shrank';

export interface DiffRun {
  command: string[];
  path: string;
  step?: number;
  steps: number;
}

export interface DroppedEvents {
  events: number;
  kept_ns: number;
  recorded_ns: number;
  text: string;
}

export interface EstimatedWorkspaces {
  above_bytes: number;
  below_bytes: number;
  convolutions: number;
  estimated: number;
}

export interface Exit {
  code?: number;
  signal?: number;
}

export interface Expectation {
  actual_bytes: number;
  expected_bytes: number;
  part: string;
}

export interface FrameSummary {
  filename: string;
  line: number;
  name: string;
  native?: boolean;
}

export interface FunctionLines {
  active_peak_bytes: number;
  allocated_bytes: number;
  filename: string;
  first_line: number;
  function: string;
  has_source: boolean;
  lines: LineRow[];
  net_bytes: number;
  reserved_peak_bytes: number;
}

export interface GrowingKvCache {
  blocks: number;
  by_model?: ModelKvCache[];
  bytes: number;
  growth_bytes: number;
  text: string;
}

export interface GrowthAfterFirstStep {
  by_category: CategoryDifference[];
  first_step_peak_bytes: number;
  later_steps_peak_bytes: number;
  optimizer_state_bytes: number;
  text: string;
}

export interface GuessedBranch {
  kind: GuessedKind;
  location: string;
  optimizer?: string;
  times: number;
}

export type GuessedKind = 'branch' | 'size';

export interface GuessedSize {
  is_assumed: boolean;
  location: string;
  operator: string;
  selected: number;
  times: number;
  total: number;
}

export interface HeldPart {
  bytes: number;
  holder: Holder;
  name: string;
}

export interface HelperSummary {
  host?: string;
  peak_bytes: number;
  pid: number;
  run?: string;
}

export type Holder = 'engine' | 'trainer';

export interface HolderSummary {
  bytes: number;
  path: string;
  shape?: string;
  tensors: number;
}

export interface HoldersSummary {
  held_bytes: number;
  largest: HolderSummary[];
  left_out: number;
  scan: ScanSummary;
}

export interface HostClock {
  common_steps: number;
  differs_at_least_ns: number;
  highest_ns: number;
  host: string;
  later_ns: number;
  lowest_ns: number;
}

export interface HostGrowth {
  bytes_per_hour: number;
  bytes_per_step?: number;
  limit_in_ns?: number;
  text: string;
}

export interface HostKill {
  is_certain: boolean;
  outcome: string;
  text: string;
}

export type HostLimitKind = 'machine' | 'control_group';

export interface HostMemoryState {
  anonymous_bytes: number;
  available_bytes: number;
  bytes: number;
  file_bytes: number;
  group_bytes?: number;
  group_cache_bytes?: number;
  shared_bytes: number;
  time_ns: number;
}

export interface HostMemorySummary {
  end: HostMemoryState;
  group_peak_bytes?: number;
  growth?: HostGrowth;
  history: HostMemoryState[];
  kill?: HostKill;
  left_out: number;
  limit: HostLimitKind;
  limit_bytes: number;
  longest_gap_ns?: number;
  peak: HostMemoryState;
  pinned_bytes: number;
  processes: HostProcessMemory[];
  samples: number;
  shared_files: HostSharedFile[];
  shm_bytes: number;
  shm_peak_bytes: number;
  text: string;
  unlisted_processes: number;
}

export interface HostProcessMemory {
  anonymous_bytes: number;
  bytes: number;
  file_bytes: number;
  highest_bytes: number;
  name: string;
  pid: number;
  shared_bytes: number;
}

export interface HostSharedFile {
  bytes: number;
  files: number;
  name: string;
  processes: number;
}

export interface ImbalanceSummary {
  best_rank: number;
  difference_bytes: number;
  max_bytes: number;
  median_bytes: number;
  median_rank: number;
  min_bytes: number;
  phase?: Phase;
  unused_bytes: number;
  worst_rank: number;
}

export interface IssueProcessSummary {
  bytes: number;
  device: number;
  location: string;
  pid: number;
  rank?: number;
}

export interface IssueSummary {
  bytes: number;
  device: number;
  evidence: string[];
  files: string[];
  fix: string;
  forecast?: OomForecastSummary;
  headline: string;
  held_by?: HolderSummary[];
  help?: string;
  rule: RuleId;
  saves_bytes?: number;
  stack?: StackSummary;
}

export interface JobReport {
  clocks: HostClock[];
  hosts: string[];
  imbalance?: ImbalanceSummary;
  job: string;
  job_source: string;
  notices: string[];
  path: string;
  ranks: RankSummary[];
  runs: JobRun[];
  unrecorded_ranks: number[];
  unrecorded_ranks_count: number;
  verdict: VerdictSummary;
  version: string;
  without_rank: HelperSummary[];
  world_size?: number;
  worst_against_median?: RankComparison;
}

export interface JobRun {
  ended_ns?: number;
  host: string;
  is_running: boolean;
  memtrace_version: string;
  name: string;
  origin: RunOrigin;
  path?: string;
  started_ns?: number;
}

export interface JoinedPhasesSummary {
  end_bytes: number;
  explanation: string;
  peak_bytes: number;
  phases: Phase[];
  start_bytes: number;
}

export interface KeptAllocation {
  blocks: number;
  bytes: number;
  stack: StackSummary;
}

export interface KeptCategory {
  blocks: number;
  bytes: number;
  category: Category;
  largest_allocation?: KeptAllocation;
  requested_bytes: number;
}

export interface KvCachePoint {
  requests: number;
  share: number;
  time_ns: number;
}

export interface KvCacheSummary {
  block_tokens?: number;
  blocks?: number;
  bytes: number;
  max_model_len?: number;
  text: string;
  token_bytes?: number;
  tokens?: number;
  usage?: KvCacheUse;
  usage_unknown: string;
}

export interface KvCacheUse {
  full_readings: number;
  highest_requests: number;
  highest_share: number;
  highest_time_ns: number;
  highest_tokens?: number;
  mean_share: number;
  over_time: KvCachePoint[];
  preemptions: number;
  readings: number;
  text: string;
  unused_bytes: number;
}

export interface LabelSummary {
  after_bytes: number;
  allocated_bytes: number;
  allocations: number;
  api: string;
  duration_ns: number;
  freed_bytes: number;
  frees: number;
  kept_bytes: number;
  name: string;
  peak_bytes: number;
  rule?: PhaseRuleId;
  times: number;
}

export interface LargerInputs {
  held?: HolderSummary[];
  input_bytes: number;
  median_input_bytes: number;
  step: number;
}

export interface LaunchIssueSummary {
  bytes: number;
  device: number;
  evidence: string[];
  files: string[];
  fix: string;
  forecast?: OomForecastSummary;
  headline: string;
  held_by?: HolderSummary[];
  help?: string;
  processes: IssueProcessSummary[];
  rule: RuleId;
  saves_bytes?: number;
  stack?: StackSummary;
}

export interface LaunchSummary {
  hosts: string[];
  imbalance?: ImbalanceSummary;
  issues: LaunchIssueSummary[];
  ranks: RankSummary[];
  shared_memory: SharedMemorySummary[];
  unrecorded_ranks: number[];
  unrecorded_ranks_count: number;
  without_rank: HelperSummary[];
  world_size?: number;
  worst_against_median?: RankComparison;
}

export interface Levels {
  end_bytes: number;
  peak_bytes: number;
  start_bytes: number;
}

export interface LineChange {
  a_blocks: number;
  a_bytes: number;
  a_frame?: FrameSummary;
  b_blocks: number;
  b_bytes: number;
  b_frame?: FrameSummary;
  category?: Category;
  difference_bytes: number;
  location: string;
}

export interface LineFigures {
  active_peak_bytes: number;
  allocated_bytes: number;
  allocations: number;
  backward_allocations: number;
  backward_bytes: number;
  freed_bytes: number;
  frees: number;
  net_bytes: number;
  reserved_peak_bytes: number;
  times: number;
}

export interface LineRow {
  compile_contexts?: CompileContextAmount[];
  custom_categories?: CustomCategoryAmount[];
  figures?: LineFigures;
  largest_tensor?: LineTensor;
  line: number;
  statistics?: Record<string, number>;
  text?: string;
}

export interface LineTensor {
  bytes: number;
  name: string;
  named_blocks: number;
  shape?: string;
}

export interface LinesReport {
  active_peak_bytes: number;
  device: number;
  functions: FunctionLines[];
  functions_left_out: number;
  notes: string[];
  other_devices: OtherDevice[];
  pid: number;
  rank?: number;
  reserved_peak_bytes: number;
  run: string;
  source: string;
  version: string;
}

export type LoopTurn = 'step' | 'model_call' | 'request' | 'range' | 'iteration' | 'block';

export interface MemoryPoolSummary {
  captures: number;
  end_allocated_bytes: number;
  end_reserved_bytes: number;
  id: string;
  is_cuda_graph_pool: boolean;
  peak_allocated_bytes: number;
  peak_reserved_bytes: number;
}

export interface MemoryState {
  allocated_at?: StackSummary;
  by_category: CategoryAmount[];
  by_compile_context?: CompileContextAmount[];
  by_custom_category?: CustomCategoryAmount[];
  by_module?: ModuleSummary[];
  by_phase: PhaseAmount[];
  growing_kv_cache?: GrowingKvCache;
  largest_allocations: AllocationGroup[];
  module_groups?: ModuleGroupSummary[];
  phase: Phase;
  repeated_modules?: RepeatedModulesSummary[];
  seq: number;
  step?: number;
  time_ns: number;
  totals: Totals;
}

export interface MissingFunction {
  calls: number;
  name: string;
}

export interface ModelKvCache {
  blocks: number;
  bytes: number;
  growth_bytes: number;
  model: string;
}

export interface ModuleChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  difference_bytes: number;
  path?: string;
}

export interface ModuleGroupSummary {
  bytes: number;
  class?: string;
  is_own: boolean;
  modules: number;
  pattern: string;
}

export interface ModuleSummary {
  by_category: CategoryAmount[];
  bytes: number;
  class?: string;
  depth: number;
  own_bytes: number;
  path: string;
}

export interface NativeObjectSummary {
  addresses: number;
  addresses_with_function: number;
  addresses_with_line: number;
  build_id: string;
  notes: string[];
  path: string;
  symbol_file?: string;
}

export interface NotRecordedSummary {
  is_loss: boolean;
  text: string;
}

export interface NoticeSummary {
  status: string;
  text: string;
  topic: string;
}

export interface OomForecastSummary {
  duration_ns: number;
  free_bytes: number;
  growth_bytes: number;
  text: string;
  turn: LoopTurn;
  turns: number;
}

export interface OomSummary {
  as_large_as?: string;
  contexts_and_other_processes_bytes?: number;
  device_free_bytes?: number;
  fatal?: boolean;
  held_back_bytes?: number;
  in_use: MemoryState;
  largest_free_bytes: number;
  largest_outside?: OutsideAllocation;
  optimizer_state_needed_bytes?: number;
  outside_pytorch: OwnerBytes[];
  outside_pytorch_bytes: number;
  outside_text?: string;
  phase_rule: PhaseRuleId;
  processes_beside?: ProcessBeside[];
  refused_by_pytorch: boolean;
  requested_at: StackSummary;
  requested_bytes: number;
  requested_for?: string;
  reserved_but_unallocated_bytes: number;
  segment_bytes: number;
  short_bytes?: number;
  step_estimate?: StepEstimate;
}

export interface OtherDevice {
  active_peak_bytes: number;
  device: number;
  pid: number;
  rank?: number;
}

export type OtherProcesses = 'steady' | 'changing' | 'other_pids' | 'none' | 'unknown_instance' | 'unknown';

export interface OutlierStep {
  bytes: number;
  held_bytes: number;
  other_steps_bytes: number;
  place: StackSummary;
  step: number;
  text: string;
}

export interface OutsideAllocation {
  bytes: number;
  owner: string;
  place: StackSummary;
}

export interface OutsidePytorch {
  bytes: number;
  owners: OwnerBytes[];
  text: string;
}

export interface OwnerBytes {
  bytes: number;
  owner: string;
}

export interface OwnerSummary {
  allocations: number;
  end_bytes: number;
  object?: string;
  owner: string;
  peak_bytes: number;
}

export interface PeakBounds {
  largest: BoundingRun;
  smallest: BoundingRun;
}

export type Phase =
  | 'load'
  | 'data'
  | 'forward'
  | 'backward'
  | 'recompute'
  | 'optimizer'
  | 'eval'
  | 'generate'
  | 'rollout'
  | 'other';

export interface PhaseAmount {
  blocks: number;
  bytes: number;
  phase: Phase;
}

export interface PhaseChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  difference_bytes: number;
  phase?: Phase;
}

export type PhaseRuleId =
  | 'engine-torch-autograd'
  | 'engine-tensor-backward'
  | 'checkpoint-torch'
  | 'checkpoint-deepspeed'
  | 'checkpoint-fairscale'
  | 'checkpoint-megatron'
  | 'lr-scheduler'
  | 'weight-averaging'
  | 'zero-grad-optimizer'
  | 'zero-grad-module'
  | 'zero-grad-other-optimizer'
  | 'optimizer-state-init-group'
  | 'optimizer-state-loaded'
  | 'optimizer-state-bitsandbytes'
  | 'optimizer-step-torch'
  | 'optimizer-step-bitsandbytes'
  | 'optimizer-step-apex'
  | 'optimizer-step-deepspeed'
  | 'optimizer-step-deepspeed-zero'
  | 'optimizer-step-deepspeed-bf16'
  | 'optimizer-step-torchao'
  | 'optimizer-step-timm'
  | 'optimizer-step-transformers'
  | 'optimizer-step-megatron'
  | 'optimizer-step-lion'
  | 'optimizer-step-schedulefree'
  | 'gradients-clip-grad'
  | 'gradients-grad-scaler'
  | 'data-torch'
  | 'data-torchdata'
  | 'data-dali'
  | 'data-accelerate'
  | 'load-module-moved'
  | 'load-state-dict'
  | 'load-module-built'
  | 'load-nn-init'
  | 'load-torch-load'
  | 'load-safetensors'
  | 'load-distributed-checkpoint'
  | 'load-ddp-built'
  | 'load-transformers'
  | 'load-accelerate'
  | 'compute-nn-modules'
  | 'compute-nn-functional'
  | 'compute-ddp-buckets'
  | 'compute-nn-parallel'
  | 'compute-nn-attention'
  | 'compute-compiled'
  | 'compute-autograd-function'
  | 'compute-flash-attn'
  | 'range-optimizer-step'
  | 'range-zero-grad'
  | 'range-data-loader'
  | 'range-data-pipe'
  | 'forward-made-autograd-node'
  | 'forward-outside-model'
  | 'backward-autograd-node'
  | 'backward-inside-engine'
  | 'backward-no-python-frame'
  | 'recompute-checkpoint-in-backward'
  | 'recompute-checkpoint-function'
  | 'eval-outside-model'
  | 'eval-without-backward'
  | 'generate-tokens'
  | 'rollout-for-training'
  | 'optimizer-no-grad-after-backward'
  | 'optimizer-no-grad-outside-step'
  | 'other-no-grad-after-step'
  | 'load-before-first-forward'
  | 'data-between-steps'
  | 'free-no-python-frame'
  | 'free-by-position'
  | 'other-before-next-batch'
  | 'older-than-recording'
  | 'no-phase-rule';

export interface PhaseRuleSummary {
  allocations: number;
  bytes: number;
  evidence?: FrameSummary;
  phase: Phase;
  rule: PhaseRuleId;
}

export interface PhaseSummary {
  after_bytes: number;
  allocated_bytes: number;
  allocations: number;
  explanation: string;
  freed_bytes: number;
  freed_of_other_phases: CategoryAmount[];
  frees: number;
  kept: KeptCategory[];
  net_bytes: number;
  peak_bytes: number;
  phase: Phase;
  start_bytes: number;
  steps: number;
}

export interface PinnedLine {
  blocks: number;
  bytes: number;
  location: string;
  owner: string;
  requested_over_bytes?: number;
  text?: string;
}

export type PoolAllocation = 'preallocated' | 'on_demand' | 'each_buffer' | 'unknown';

export interface PoolSummary {
  allocation: PoolAllocation;
  allocations: number;
  largest_bytes: number;
  library: string;
  pool_end_bytes?: number;
  preallocated_bytes?: number;
  taken_end_bytes: number;
  taken_peak_bytes: number;
  used_end_bytes?: number;
  used_peak_bytes?: number;
}

export interface ProcessBeside {
  allocated_bytes: number;
  name: string;
  pid: number;
  reserved_bytes: number;
}

export interface ProcessSummary {
  argv: string[];
  devices: DeviceSummary[];
  dropped?: DroppedEvents;
  events: number;
  exit: Exit;
  host?: string;
  issues: IssueSummary[];
  losses: Record<string, number>;
  no_issue_remark?: string;
  notices: NoticeSummary[];
  pid: number;
  pinned_host_lines: PinnedLine[];
  pinned_host_memory: OwnerSummary[];
  ppid?: number;
  rank?: number;
  recording_end_reason?: string;
  refused_requests: RefusedRequestSummary[];
  refused_requests_left_out: number;
  snapshot?: string;
  trace: string;
  world_size?: number;
}

export interface RangeSummary {
  end_bytes: number;
  peak: MemoryState;
  start_bytes: number;
}

export interface RankComparison {
  by_category: CategoryChange[];
  by_line: LineChange[];
  difference_bytes: number;
  median: DiffPeak;
  worst: DiffPeak;
}

export interface RankDevice {
  device: number;
  peak_bytes: number;
  reserved_bytes: number;
}

export interface RankPhasePeak {
  peak_bytes: number;
  phase: Phase;
}

export type RankSource = 'torch' | 'rank' | 'slurm' | 'open_mpi' | 'pmix' | 'pmi' | 'jax' | 'file_name' | 'file_order';

export interface RankSummary {
  device?: number;
  ended_by_oom?: boolean;
  events: number;
  exit: Exit;
  helpers: HelperSummary[];
  host?: string;
  local_rank?: number;
  lost_events: number;
  node_rank?: number;
  oom_count: number;
  other_attempts: number[];
  other_devices: RankDevice[];
  other_runs?: string[];
  outside_pytorch_bytes?: number;
  pci_bus_id?: string;
  peak_bytes: number;
  peak_phase?: Phase;
  peak_step?: number;
  phases: RankPhasePeak[];
  pid: number;
  rank: number;
  rank_source?: RankSource;
  reserved_bytes: number;
  run?: string;
  steps?: number;
  total_bytes?: number;
  trace: string;
}

export interface RecordingGap {
  is_loss: boolean;
  label: string;
  text: string;
}

export interface RefusedRequestSummary {
  caller: string;
  count: number;
  details: string[];
  device: number;
  device_free_bytes?: number;
  device_total_bytes?: number;
  fatal?: boolean;
  function: string;
  in_use: OwnerBytes[];
  pytorch_blocked_bytes: number;
  pytorch_releasable_bytes: number;
  requested_at: StackSummary;
  requested_bytes: number;
  step?: number;
  text: string;
}

export interface ReleasedPart {
  bytes: number;
  kind: ReleasedPartKind;
  name: string;
}

export type ReleasedPartKind =
  | 'allocated'
  | 'blocked'
  | 'cached'
  | 'pending_free'
  | 'private_pool'
  | 'caching_allocator'
  | 'library'
  | 'unused_pools'
  | 'rounding';

export interface ReleasedSummary {
  after: string;
  device_memory?: DeviceBreakdown;
  held_by?: HolderSummary[];
  parts: ReleasedPart[];
  reserved: ReservedSummary;
  start_bytes: number;
  state: MemoryState;
  stayed_bytes: number;
  times: number;
}

export interface RepeatedModulesSummary {
  activation_bytes: number;
  checkpointing_saves_at_most_bytes: number;
  class: string;
  count: number;
  is_leaf: boolean;
  path: string;
  patterns: string[];
  total: number;
}

export interface ReplayedSetting {
  fails_earlier: boolean;
  fits?: boolean;
  reserved_peak_bytes: number;
  setting: string;
  step_fits?: boolean;
  step_reserved_peak_bytes?: number;
  step_short_bytes?: number;
}

export interface ReservedSummary {
  allocated_bytes: number;
  blocked_by: BlockingAllocation[];
  blocked_bytes: number;
  blocked_segments: number;
  largest_free_bytes: number;
  pending_free_bytes: number;
  releasable_bytes: number;
  rounding_bytes: number;
  segments: number;
}

export type RuleId =
  | 'leak'
  | 'graph-kept'
  | 'graph-retained'
  | 'eval-without-no-grad'
  | 'gradients-not-cleared'
  | 'gradients-cleared-late'
  | 'reference-cycle'
  | 'checkpoint-kept'
  | 'wrong-device'
  | 'fragmentation'
  | 'ddp-buckets'
  | 'cublas-workspaces'
  | 'optimizer-state-does-not-fit'
  | 'deferred-frees'
  | 'outputs-kept'
  | 'stream-caches'
  | 'spilled-to-host'
  | 'stray-context'
  | 'worker-context'
  | 'scaled-dot-product-attention'
  | 'chunked-cross-entropy'
  | 'loss-in-replicas'
  | 'backward-each'
  | 'no-grad'
  | 'results-to-cpu'
  | 'no-kv-cache'
  | 'no-autocast-cache'
  | 'share-buffers'
  | 'data-to-cpu'
  | 'load-to-cpu'
  | 'build-on-meta'
  | 'final-data-type'
  | 'checkpoint-layers'
  | 'checkpoint-or-no-grad'
  | 'offload-activations'
  | 'smaller-batches'
  | 'more-micro-batches'
  | 'half-the-batch'
  | 'smaller-evaluation-batch'
  | 'freeze-unused'
  | 'set-to-none'
  | 'gradients-in-buckets'
  | 'fused-step'
  | 'single-tensor-step'
  | 'eight-bit-moments'
  | 'optimizer-in-backward'
  | 'bfloat16-model'
  | 'autocast'
  | 'adapters'
  | 'combined-changes';

export type RunOrigin = 'summary' | 'traces' | 'parquet';

export interface RunSummary {
  command: string[];
  duration_ns?: number;
  events: number;
  exit: Exit;
  limit_bytes?: number;
  limit_lock_missed?: number;
  memtrace_version?: string;
  outcome: string;
  path: string;
  simulated?: SimulatedGpus;
  started_ns?: number;
  unrecorded_processes: number;
}

export interface ScanSummary {
  event: number;
  is_partial: boolean;
  objects: number;
  occasion: string;
}

export interface ServerPart {
  blocks: number;
  bytes: number;
  kind: ServingPart;
}

export interface ServerPartChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  difference_bytes: number;
  part?: ServingPart;
}

export interface ServerSummary {
  advice: string[];
  allocated_bytes: number;
  attributes: Record<string, string>;
  captured_sizes: CapturedSize[];
  captures_text: string;
  engine: string;
  error_reason?: string;
  error_stage?: ServingStage;
  expectations: Expectation[];
  kv_cache?: KvCacheSummary;
  may_sleep: boolean;
  parts: ServerPart[];
  problem?: string;
  stages: StageSummary[];
  unnamed_weights_bytes: number;
  utilization?: UtilizationSummary;
  weights_by_type: TypeBytes[];
  when: string;
}

export type ServingPart =
  | 'kv_cache'
  | 'weights'
  | 'adapters'
  | 'cuda_graphs'
  | 'sampler'
  | 'communication'
  | 'activations'
  | 'buffers';

export type ServingStage =
  | 'start'
  | 'load'
  | 'profile'
  | 'kv_cache'
  | 'capture'
  | 'warm_up'
  | 'serve'
  | 'prefill'
  | 'decode'
  | 'sleep'
  | 'wake_up';

export interface SharedMemorySummary {
  at_exporter_peak_bytes?: number;
  end_bytes: number;
  exporter_device?: number;
  exporter_pid?: number;
  exporter_rank?: number;
  importer_device: number;
  importer_pid: number;
  importer_rank?: number;
  imports: number;
  kept_after_free_bytes: number;
  opened_at?: StackSummary;
  peak_bytes: number;
}

export interface SimulatedGpus {
  bounds?: PeakBounds;
  count: number;
  exception?: ValueException;
  gpu: string;
  guessed_branches?: GuessedBranch[];
  guessed_sizes?: GuessedSize[];
  memory_bytes: number;
  missing_functions?: MissingFunction[];
  was_ready?: boolean;
  workspaces?: EstimatedWorkspaces;
}

export interface StackChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  category?: Category;
  difference_bytes: number;
  frames: FrameSummary[];
  location: string;
  node?: string;
  phase?: Phase;
}

export interface StackSummary {
  frames: FrameSummary[];
  location: string;
  node?: string;
}

export interface StageChange {
  a_blocks: number;
  a_bytes: number;
  b_blocks: number;
  b_bytes: number;
  difference_bytes: number;
  stage?: ServingStage;
}

export interface StageSummary {
  duration_ns: number;
  end_bytes: number;
  peak_bytes: number;
  stage: ServingStage;
  start_bytes: number;
  transient_bytes: number;
}

export interface StepEstimate {
  at_least?: boolean;
  available_bytes?: number;
  basis: StepEstimateBasis;
  earlier_step?: number;
  needed_bytes?: number;
  needed_with_foreach_bytes?: number;
  still_to_come: StepPart[];
}

export type StepEstimateBasis =
  | 'earlier_step'
  | 'earlier_iteration'
  | 'sibling_modules'
  | 'optimizer_state'
  | 'module_names';

export interface StepPart {
  bytes?: number;
  evidence?: string;
  text: string;
}

export interface StepPhase {
  allocated_bytes: number;
  allocations: number;
  end_bytes: number;
  freed_bytes: number;
  net_bytes: number;
  peak_bytes: number;
  phase: Phase;
  start_bytes: number;
  turns: number;
}

export interface StepSummary {
  duration_ns: number;
  joined_phases: JoinedPhasesSummary[];
  micro_batches: number;
  passes?: Levels;
  phases: StepPhase[];
  step: number;
  time_ns: number;
}

export type SuggestionScope = 'run' | 'iteration' | 'until_error';

export interface SuggestionSummary {
  action: string;
  at_most?: boolean;
  code: string[];
  combines?: RuleId[];
  cost: Cost;
  cost_text: string;
  evidence: string;
  fits?: boolean;
  link: string;
  method: string;
  peak_after_bytes: number;
  reserved_after_bytes: number;
  rule: RuleId;
  saves_bytes: number;
  scope: SuggestionScope;
}

export interface Summary {
  files: string[];
  gaps: RecordingGap[];
  host?: HostMemorySummary;
  launch?: LaunchSummary;
  losses: Record<string, number>;
  native_objects: NativeObjectSummary[];
  not_recorded: NotRecordedSummary[];
  problems: string[];
  processes: ProcessSummary[];
  run: RunSummary;
  unrecordable: UnrecordableProcess[];
  verdict: VerdictSummary;
  version: string;
  xla?: XlaSummary;
}

export interface Totals {
  active_bytes: number;
  allocated_bytes: number;
  requested_bytes: number;
  reserved_bytes: number;
}

export interface TypeBytes {
  bytes: number;
  data_type: string;
}

export interface UnmappedSegmentsSummary {
  end_bytes: number;
  peak_bytes: number;
  times: number;
  unmapped_by: string[];
}

export interface UnpairedDevice {
  device: number;
  peak_bytes: number;
  pid: number;
  rank?: number;
  run: string;
}

export interface UnrecordableProcess {
  lost_events: number;
  pid: number;
  program: string;
  reason: string;
  uses_cuda: boolean;
}

export interface UtilizationSummary {
  free_bytes: number;
  kv_cache_bytes: number;
  kv_cache_tokens?: number;
  option: string;
  profiled_bytes: number;
  safe_value?: number;
  value: number;
}

export interface ValueException {
  exception: string;
  location: string;
  read_location: string;
}

export interface VerdictStatement {
  details: string[];
  status: VerdictStatus;
  text: string;
}

export type VerdictStatus = 'good' | 'warning' | 'failed';

export interface VerdictSummary {
  remarks: string[];
  statements: VerdictStatement[];
  status: VerdictStatus;
}

export interface WhatIfSummary {
  advice?: AllocatorAdvice;
  limit_bytes?: number;
  matched_blocks: number;
  matched_segment_events: number;
  mismatch?: string;
  reserved_peak_bytes: number;
  settings: ReplayedSetting[];
}

export interface Workload {
  container?: string;
  container_id?: string;
  namespace?: string;
  pod?: string;
  pod_uid?: string;
  slurm_job?: string;
  slurm_step?: string;
  user?: string;
}

export interface XlaKindBytes {
  bytes: number;
  kind: BufferKind;
}

export interface XlaLineSummary {
  buffers: number;
  bytes: number;
  kind?: BufferKind;
  location: string;
  operation: string;
}

export interface XlaPeakSummary {
  buffers: number;
  is_sum_confirmed: boolean;
  left_out_bytes: number;
  lines: XlaLineSummary[];
  live_bytes: number;
}

export interface XlaProgramSummary {
  by_kind: XlaKindBytes[];
  is_for_gpu: boolean;
  is_total_confirmed?: boolean;
  module: number;
  name: string;
  peak?: XlaPeakSummary;
  total_bytes: number;
}

export interface XlaSummary {
  mismatched_programs: number;
  program_count: number;
  programs: XlaProgramSummary[];
  unknown_lines: number;
  unread_programs: number;
}
