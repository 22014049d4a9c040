//! The comparison of two peaks: `DiffReport`. `analysis/schema/diff.schema.json` describes its JSON.
//!
//! Every table divides the difference of the two peaks without remainder: by category, by custom category, by phase of
//! allocation, by line, by stack and by module. Bytes for which no event was recorded have a row of their own.
//!
//! The doc comments of these types are the descriptions in the JSON Schema.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::json_text::json_text;
use crate::memory_totals::Totals;
use crate::schema_text::schema_text;
use memtrace_insight::FrameSummary;
use memtrace_insight::passes::{Category, Phase};
use memtrace_insight::rules::{CustomRules, ServingPart, ServingStage};
use memtrace_trace::named;

/// The version of the structure: major.minor.
pub const DIFF_VERSION: &str = "2.2";

/// The selection of what to compare.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DiffOptions {
    /// A step of the first run and a step of the second. Compares the peaks of these steps instead of the runs' peaks.
    pub steps: Option<(u32, u32)>,
    /// Compares only processes of this rank.
    pub rank: Option<u32>,
    /// Compares only this device.
    pub device: Option<i16>,
    /// Whether to read source files of this machine that a recording names, even if nothing proves that it was made
    /// with them. Their text only decides which lines correspond; it is not part of the comparison.
    pub sources: bool,
    /// The rules of the user's own categories.
    pub custom_rules: Option<Arc<CustomRules>>,
}

/// The comparison of the peaks of two runs, A and B. A field whose name ends in `_bytes` is in bytes. A difference is
/// the value of B minus the value of A.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DiffReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// Run A, the baseline.
    pub a: DiffRun,
    /// Run B.
    pub b: DiffRun,
    /// The devices that are in both runs, by the size of their difference in descending order.
    pub pairs: Vec<DevicePair>,
    /// The devices that are in one run only.
    pub unpaired: Vec<UnpairedDevice>,
    /// The limits of the comparison, as text.
    pub notes: Vec<String>,
}

/// A run of a comparison.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DiffRun {
    /// The path of the run folder, trace or snapshot that was read.
    pub path: String,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The step whose peak is compared, counted from 0. Absent if the peak of the whole run is compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The number of steps: the highest of the selected processes and devices.
    pub steps: u32,
}

/// A device that is in one run only.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UnpairedDevice {
    /// The run: `a` or `b`.
    pub run: String,
    /// The process id.
    pub pid: u32,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The peak of allocated bytes.
    pub peak_bytes: u64,
}

named! {
    serde
    /// The result of a comparison of two peaks.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
    pub enum DiffResult {
        /// No difference exceeds `noise_bytes`.
        #[default]
        Same => "same",
        /// The difference of the peaks does not exceed `noise_bytes`, but a category or line differs by more.
        Redistributed => "redistributed",
        /// The peak of B is higher by more than `noise_bytes`.
        Grew => "grew",
        /// The peak of B is lower by more than `noise_bytes`.
        Shrank => "shrank",
    }
}

/// A device that is in both runs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DevicePair {
    /// The peak in run A.
    pub a: DiffPeak,
    /// The peak in run B.
    pub b: DiffPeak,
    /// The difference of the peaks of allocated bytes.
    pub difference_bytes: i64,
    /// The largest difference that `result` and `headline` ignore: a thousandth of the higher peak, in bytes.
    pub noise_bytes: u64,
    /// The result of the comparison.
    pub result: DiffResult,
    /// The result in one line.
    pub headline: String,
    /// The allocated blocks by category. In this table and in the others, the differences add up to `difference_bytes`.
    pub by_category: Vec<CategoryChange>,
    /// The allocated blocks by custom category (`--categories FILE`), largest growth first. Absent without a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_custom_category: Vec<CustomCategoryChange>,
    /// The allocated blocks by the phase that allocated them.
    pub by_phase: Vec<PhaseChange>,
    /// The allocated blocks by part of a server. Absent unless both runs are of engines that serve models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_server_part: Vec<ServerPartChange>,
    /// The allocated blocks by the stage of the server that allocated them. Absent unless both runs are of servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_stage: Vec<StageChange>,
    /// The allocated blocks by the line of the program's own code and by category, largest growth first.
    pub by_line: Vec<LineChange>,
    /// The allocated blocks by call stack, category and phase, largest growth first. Stacks with equal bytes in both
    /// peaks are left out.
    pub by_stack: Vec<StackChange>,
    /// The allocated blocks by `nn.Module`, without the modules inside it, largest growth first. Empty if no calls of
    /// modules were recorded in both runs.
    pub by_module: Vec<ModuleChange>,
    /// The number of lines that have another line number in run B, after an edit. Each counts as one line.
    pub moved_lines: u64,
    /// The number of these lines that were matched by their source text. The others were matched by the functions that
    /// they call and by their distance from the start of the function.
    pub moved_lines_by_text: u64,
}

/// The peak of one device in one run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DiffPeak {
    /// The process id.
    pub pid: u32,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The file name of the process's trace or snapshot.
    pub trace: String,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The number of the event that reached the peak.
    pub seq: u64,
    /// The step of the peak, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase of the peak.
    pub phase: Phase,
    /// The line of the allocation that reached the peak. Empty if it is unknown.
    pub location: String,
    /// The totals at the peak. `allocated_bytes` is compared.
    pub totals: Totals,
    /// The peak of reserved bytes of the device.
    pub reserved_peak_bytes: u64,
    /// The number of lost events of the process. With lost events, the figures can be too low.
    pub lost_events: u64,
}

/// Bytes and blocks in both peaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Change {
    /// The bytes in run A.
    pub a_bytes: u64,
    /// The bytes in run B.
    pub b_bytes: u64,
    /// `b_bytes` minus `a_bytes`.
    pub difference_bytes: i64,
    /// The number of blocks in run A.
    pub a_blocks: u64,
    /// The number of blocks in run B.
    pub b_blocks: u64,
}

impl Change {
    /// Adds bytes and blocks to one side: 0 for run A, 1 for run B.
    pub(crate) fn add(&mut self, side: usize, bytes: u64, blocks: u64) {
        let (side_bytes, side_blocks) =
            if side == 0 { (&mut self.a_bytes, &mut self.a_blocks) } else { (&mut self.b_bytes, &mut self.b_blocks) };
        *side_bytes += bytes;
        *side_blocks += blocks;
        self.difference_bytes = self.b_bytes as i64 - self.a_bytes as i64;
    }
}

/// The blocks of one category in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CategoryChange {
    /// The category. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks of one custom category in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CustomCategoryChange {
    /// The name of the category. Absent for the blocks that no rule matches, and the bytes for which no event was
    /// recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom_category: Option<String>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks of one part of a server, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServerPartChange {
    /// The part. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<ServingPart>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks that one stage of a server allocated, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StageChange {
    /// The stage. Absent for bytes that no stage allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<ServingStage>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks that one phase allocated, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PhaseChange {
    /// The phase. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks of one category that one line allocated, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LineChange {
    /// The line as text, for example `model.py:88 forward`. Without a line, the autograd node. Empty if neither is
    /// known.
    pub location: String,
    /// The frame in run A. Absent if the line is not in run A.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub a_frame: Option<FrameSummary>,
    /// The frame in run B. Absent if the line is not in run B.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b_frame: Option<FrameSummary>,
    /// The category. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks of one category and phase that one call stack allocated, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StackChange {
    /// The line of the program's own code, and the innermost line if that is in a library. Empty if the stack is
    /// unknown.
    pub location: String,
    /// The autograd node that was running. Absent outside the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The category. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// The phase that allocated the blocks. Absent for bytes for which no event was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The frames, innermost first, of run B if the stack is there, else of run A. With `node`, these are the frames of
    /// the forward call that created the node.
    pub frames: Vec<FrameSummary>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

/// The blocks of one `nn.Module`, without the modules inside it, in both peaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ModuleChange {
    /// The path of the module. Absent for blocks that belong to no module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The bytes and blocks.
    #[serde(flatten)]
    pub change: Change,
}

impl DiffReport {
    /// The JSON Schema, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text::<DiffReport>()
    }

    /// The comparison as JSON.
    pub fn to_json(&self) -> String {
        json_text(self) + "\n"
    }
}
