//! The fields of memtrace's JSON that answers use: `report --json` (analysis/schema/summary.schema.json), `lines --json`
//! and `diff --json`.
//!
//! The analysis only writes these structures. A field that it renames fails here, and in `tests/mcp`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The part of `analysis/schema/summary.schema.json` that answers use.
#[derive(Deserialize, Debug)]
pub(crate) struct Summary {
    pub(crate) run: RunPart,
    pub(crate) processes: Vec<Process>,
    pub(crate) losses: BTreeMap<String, u64>,
    pub(crate) problems: Vec<String>,
    pub(crate) not_recorded: Vec<NotRecorded>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct RunPart {
    pub(crate) memtrace_version: Option<String>,
    pub(crate) command: Vec<String>,
    pub(crate) exit: Exit,
    pub(crate) outcome: String,
    pub(crate) duration_ns: Option<u64>,
    pub(crate) simulated: Option<SimulatedGpus>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct SimulatedGpus {
    pub(crate) gpu: String,
}

#[derive(Deserialize, Debug)]
pub(crate) struct NotRecorded {
    pub(crate) text: String,
}

#[derive(Deserialize, Debug, Default, Clone, Copy)]
pub(crate) struct Exit {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
}

impl Exit {
    /// How the process ended, as text. `None` if that is unknown.
    pub(crate) fn text(self) -> Option<String> {
        match (self.signal, self.code) {
            (Some(signal), _) => Some(format!("signal {signal}")),
            (None, Some(code)) => Some(format!("exit status {code}")),
            (None, None) => None,
        }
    }
}

#[derive(Deserialize, Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) rank: Option<u32>,
    pub(crate) devices: Vec<Device>,
    pub(crate) issues: Vec<Issue>,
    pub(crate) no_issue_remark: Option<String>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Issue {
    pub(crate) rule: String,
    pub(crate) device: i16,
    pub(crate) bytes: u64,
    pub(crate) headline: String,
    pub(crate) evidence: Vec<String>,
    pub(crate) stack: Option<Stack>,
    pub(crate) fix: String,
    pub(crate) saves_bytes: Option<u64>,
    pub(crate) forecast: Option<Forecast>,
    #[serde(default)]
    pub(crate) held_by: Vec<Holder>,
    pub(crate) help: Option<String>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Forecast {
    pub(crate) turn: String,
    pub(crate) turns: u64,
    pub(crate) growth_bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Holder {
    pub(crate) path: String,
    pub(crate) bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Device {
    pub(crate) device: i16,
    pub(crate) name: Option<String>,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) highest: Totals,
    pub(crate) peak: Option<State>,
    pub(crate) reserved: Option<Reserved>,
    pub(crate) suggestions: Vec<Suggestion>,
    pub(crate) what_if: Option<WhatIf>,
    pub(crate) steps: u32,
    pub(crate) typical_step: Option<Step>,
    pub(crate) oom_count: u64,
    pub(crate) ooms: Vec<Oom>,
    pub(crate) explained_oom: Option<usize>,
}

impl Device {
    /// The peak of allocated bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak.as_ref().map_or(0, |peak| peak.totals.allocated_bytes)
    }
}

#[derive(Deserialize, Debug, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) allocated_bytes: u64,
    pub(crate) active_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) requested_bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct State {
    pub(crate) step: Option<u32>,
    pub(crate) phase: String,
    pub(crate) allocated_at: Option<Stack>,
    pub(crate) totals: Totals,
    pub(crate) by_category: Vec<CategoryAmount>,
    pub(crate) by_phase: Vec<PhaseAmount>,
    pub(crate) largest_allocations: Vec<AllocationGroup>,
    #[serde(default)]
    pub(crate) module_groups: Vec<ModuleGroup>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct CategoryAmount {
    pub(crate) category: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct PhaseAmount {
    pub(crate) phase: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct AllocationGroup {
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) category: String,
    pub(crate) phase: String,
    pub(crate) stack: Stack,
    pub(crate) tensor_name: Option<String>,
    pub(crate) tensor_shape: Option<String>,
    pub(crate) tensor_name_pattern: Option<String>,
    pub(crate) common_tensor_shape: Option<String>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct ModuleGroup {
    pub(crate) pattern: String,
    pub(crate) class: Option<String>,
    pub(crate) modules: u64,
    pub(crate) bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Reserved {
    pub(crate) releasable_bytes: u64,
    pub(crate) blocked_bytes: u64,
    pub(crate) blocked_by: Vec<Blocking>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Blocking {
    pub(crate) free_bytes: u64,
    pub(crate) allocated_at: Stack,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Suggestion {
    pub(crate) rule: String,
    pub(crate) action: String,
    pub(crate) peak_after_bytes: u64,
    pub(crate) saves_bytes: u64,
    pub(crate) fits: Option<bool>,
    pub(crate) scope: String,
    #[serde(default)]
    pub(crate) at_most: bool,
    pub(crate) evidence: String,
    pub(crate) method: String,
}

#[derive(Deserialize, Debug)]
pub(crate) struct WhatIf {
    pub(crate) settings: Vec<Setting>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Setting {
    pub(crate) setting: String,
    pub(crate) fits: Option<bool>,
    pub(crate) step_fits: Option<bool>,
    pub(crate) reserved_peak_bytes: u64,
}

#[derive(Deserialize, Debug, Default)]
pub(crate) struct Stack {
    pub(crate) location: String,
    pub(crate) node: Option<String>,
    pub(crate) frames: Vec<Frame>,
}

#[derive(Deserialize, Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) name: String,
    pub(crate) filename: String,
    pub(crate) line: u32,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Step {
    pub(crate) step: u32,
    pub(crate) phases: Vec<StepPhase>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct StepPhase {
    pub(crate) phase: String,
    pub(crate) start_bytes: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) end_bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Oom {
    pub(crate) requested_bytes: u64,
    pub(crate) requested_at: Stack,
    pub(crate) in_use: State,
    pub(crate) device_free_bytes: Option<u64>,
    pub(crate) reserved_but_unallocated_bytes: u64,
    pub(crate) largest_free_bytes: u64,
    pub(crate) outside_pytorch_bytes: u64,
    pub(crate) contexts_and_other_processes_bytes: Option<u64>,
    pub(crate) held_back_bytes: Option<u64>,
    pub(crate) refused_by_pytorch: bool,
    pub(crate) short_bytes: Option<u64>,
    pub(crate) requested_for: Option<String>,
    pub(crate) as_large_as: Option<String>,
    pub(crate) step_estimate: Option<StepEstimate>,
    pub(crate) fatal: Option<bool>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct StepEstimate {
    pub(crate) needed_bytes: Option<u64>,
    #[serde(default)]
    pub(crate) at_least: bool,
    pub(crate) available_bytes: Option<u64>,
    pub(crate) still_to_come: Vec<StepPart>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct StepPart {
    pub(crate) text: String,
    pub(crate) bytes: Option<u64>,
}

/// The part of `analysis/schema/lines.schema.json` that answers use.
#[derive(Deserialize, Debug)]
pub(crate) struct Lines {
    pub(crate) pid: u32,
    pub(crate) rank: Option<u32>,
    pub(crate) device: i16,
    pub(crate) active_peak_bytes: u64,
    pub(crate) functions: Vec<Function>,
    pub(crate) functions_left_out: u64,
    pub(crate) other_devices: Vec<OtherDevice>,
    pub(crate) notes: Vec<String>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct OtherDevice {
    pub(crate) pid: u32,
    pub(crate) rank: Option<u32>,
    pub(crate) device: i16,
    pub(crate) active_peak_bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Function {
    pub(crate) function: String,
    pub(crate) filename: String,
    pub(crate) first_line: u32,
    pub(crate) active_peak_bytes: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) net_bytes: i64,
    pub(crate) lines: Vec<Line>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Line {
    pub(crate) line: u32,
    pub(crate) text: Option<String>,
    pub(crate) figures: Option<LineFigures>,
    pub(crate) largest_tensor: Option<LineTensor>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct LineTensor {
    pub(crate) name: String,
}

#[derive(Deserialize, Debug)]
pub(crate) struct LineFigures {
    pub(crate) times: u64,
    pub(crate) active_peak_bytes: u64,
    pub(crate) net_bytes: i64,
    pub(crate) allocations: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) backward_bytes: u64,
}

/// The part of `analysis/schema/diff.schema.json` that answers use.
#[derive(Deserialize, Debug)]
pub(crate) struct Diff {
    pub(crate) a: DiffRun,
    pub(crate) b: DiffRun,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) unpaired: Vec<Unpaired>,
    pub(crate) notes: Vec<String>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct DiffRun {
    pub(crate) path: String,
    pub(crate) command: Vec<String>,
    pub(crate) step: Option<u32>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Unpaired {
    pub(crate) run: String,
    pub(crate) pid: u32,
    pub(crate) rank: Option<u32>,
    pub(crate) device: i16,
    pub(crate) peak_bytes: u64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct Pair {
    pub(crate) a: DiffPeak,
    pub(crate) b: DiffPeak,
    pub(crate) difference_bytes: i64,
    pub(crate) noise_bytes: u64,
    pub(crate) result: String,
    pub(crate) headline: String,
    pub(crate) by_category: Vec<CategoryChange>,
    pub(crate) by_phase: Vec<PhaseChange>,
    pub(crate) by_line: Vec<LineChange>,
    pub(crate) by_module: Vec<ModuleChange>,
}

#[derive(Deserialize, Debug)]
pub(crate) struct DiffPeak {
    pub(crate) rank: Option<u32>,
    pub(crate) device: i16,
    pub(crate) step: Option<u32>,
    pub(crate) phase: String,
    pub(crate) location: String,
    pub(crate) totals: Totals,
}

#[derive(Deserialize, Debug)]
pub(crate) struct CategoryChange {
    pub(crate) category: Option<String>,
    pub(crate) a_bytes: u64,
    pub(crate) b_bytes: u64,
    pub(crate) difference_bytes: i64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct PhaseChange {
    pub(crate) phase: Option<String>,
    pub(crate) a_bytes: u64,
    pub(crate) b_bytes: u64,
    pub(crate) difference_bytes: i64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct LineChange {
    pub(crate) location: String,
    pub(crate) a_frame: Option<Frame>,
    pub(crate) b_frame: Option<Frame>,
    pub(crate) category: Option<String>,
    pub(crate) a_bytes: u64,
    pub(crate) b_bytes: u64,
    pub(crate) difference_bytes: i64,
}

#[derive(Deserialize, Debug)]
pub(crate) struct ModuleChange {
    pub(crate) path: Option<String>,
    pub(crate) a_bytes: u64,
    pub(crate) b_bytes: u64,
    pub(crate) difference_bytes: i64,
}
