//! The comparison of two peaks: `DiffReport`. `analysis/schema/diff.schema.json` describes its JSON.
//!
//! Every table divides the difference of the two peaks without remainder: by category, by phase of allocation, by line,
//! by stack and by module. Bytes that no event accounts for have a row of their own.

use schemars::JsonSchema;
use serde::Serialize;

use super::summary::{FrameSummary, Totals, schema_text};
use memtrace_input::printable;
use memtrace_insight::passes::{Category, Phase};

/// The version of the structure: major.minor.
pub const DIFF_VERSION: &str = "1.0";

/// What to compare.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DiffWanted {
    /// A step of the first run and a step of the second. Compares the peaks of these steps instead of the runs' peaks.
    pub steps: Option<(u32, u32)>,
    /// Compares only processes of this rank.
    pub rank: Option<u32>,
    /// Compares only this device.
    pub device: Option<i16>,
}

/// Two runs beside each other. Sizes in bytes; a difference is the second's less the first's.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct DiffReport {
    /// The version of this structure.
    pub version: String,
    /// The first run.
    pub a: DiffRun,
    /// The second run.
    pub b: DiffRun,
    /// The devices that were compared: the greatest difference first.
    pub pairs: Vec<DevicePair>,
    /// Devices of one run that have no counterpart in the other.
    pub unpaired: Vec<Unpaired>,
    /// What the comparison cannot tell, in words.
    pub remarks: Vec<String>,
}

/// A run.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct DiffRun {
    /// What was read.
    pub path: String,
    /// The command.
    pub command: Vec<String>,
    /// The step whose peak is compared; absent where it is the run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
}

/// A device of one run only.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct Unpaired {
    /// `a` or `b`.
    pub run: String,
    /// The process.
    pub pid: u32,
    /// Its rank in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device; -1 is the CPU.
    pub device: i16,
    /// Its peak of allocated bytes.
    pub peak_bytes: u64,
}

/// What two peaks come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing differs by more than [`DevicePair::noise_bytes`].
    #[default]
    Same,
    /// The peaks do not differ by more than that, what is in them does.
    Moved,
    /// The second peak is higher.
    Grew,
    /// The second peak is lower.
    Shrank,
}

/// A device in both runs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct DevicePair {
    /// In the first run.
    pub a: DiffMoment,
    /// In the second run.
    pub b: DiffMoment,
    /// The difference of the peaks of allocated bytes.
    pub difference_bytes: i64,
    /// What is not called a difference in words: a thousandth of the higher peak.
    pub noise_bytes: u64,
    /// What it comes to.
    pub verdict: Verdict,
    /// The same in a line.
    pub headline: String,
    /// By what it was for. Differences add up to that of the peaks, as in all tables here.
    pub by_category: Vec<CategoryChange>,
    /// By the phase that had allocated it.
    pub by_phase: Vec<PhaseChange>,
    /// By the program's own line and category: what grew most first.
    pub by_line: Vec<LineChange>,
    /// By stack, category and phase: what grew most first. Stacks with as many bytes in both are left out.
    pub by_stack: Vec<StackChange>,
    /// By `nn.Module`, what is in modules of its own left out: what grew most first; empty where no calls of modules were recorded.
    pub by_module: Vec<ModuleChange>,
    /// Lines whose number is another one in the second run, after an edit; they count as one line.
    pub moved_lines: u64,
    /// Of these, how many the text of both sources proves; the others were matched by what they call and their place in the function.
    pub moved_lines_by_text: u64,
}

/// A peak.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct DiffMoment {
    /// The process.
    pub pid: u32,
    /// Its rank in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device; -1 is the CPU.
    pub device: i16,
    /// The step; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase.
    pub phase: Phase,
    /// Who made the allocation that reached it, in a few words.
    pub place: String,
    /// The totals then; allocated bytes are what is compared.
    pub totals: Totals,
    /// The device's highest number of reserved bytes.
    pub reserved_peak_bytes: u64,
    /// Events of the process that were lost: what is said of it may be too low.
    pub lost_events: u64,
}

/// Bytes and blocks in both peaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct Change {
    /// Bytes in the first.
    pub a_bytes: u64,
    /// Bytes in the second.
    pub b_bytes: u64,
    /// The difference.
    pub difference_bytes: i64,
    /// Blocks in the first.
    pub a_blocks: u64,
    /// Blocks in the second.
    pub b_blocks: u64,
}

impl Change {
    /// Adds bytes and blocks to one side: 0 for the first peak, 1 for the second.
    pub(super) fn add(&mut self, side: usize, bytes: u64, blocks: u64) {
        let (of_bytes, of_blocks) =
            if side == 0 { (&mut self.a_bytes, &mut self.a_blocks) } else { (&mut self.b_bytes, &mut self.b_blocks) };
        *of_bytes += bytes;
        *of_blocks += blocks;
        self.difference_bytes = self.b_bytes as i64 - self.a_bytes as i64;
    }
}

/// A category.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct CategoryChange {
    /// Which; absent for what no event accounts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// How much.
    #[serde(flatten)]
    pub change: Change,
}

/// A phase.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct PhaseChange {
    /// Which; absent for what no event accounts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// How much.
    #[serde(flatten)]
    pub change: Change,
}

/// A line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct LineChange {
    /// The line in a few words; empty where no stack is known.
    pub place: String,
    /// Its frame in the first run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub a_frame: Option<FrameSummary>,
    /// Its frame in the second run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b_frame: Option<FrameSummary>,
    /// What it was for; absent for what no event accounts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// How much.
    #[serde(flatten)]
    pub change: Change,
}

/// A stack.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct StackChange {
    /// In a few words; empty where no stack is known.
    pub place: String,
    /// The autograd node that ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What it was for; absent for what no event accounts for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// The phase that allocated it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Its frames, innermost first, of the second run where it is there; with a node, those of the forward call that made it.
    pub frames: Vec<FrameSummary>,
    /// How much.
    #[serde(flatten)]
    pub change: Change,
}

/// A module.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct ModuleChange {
    /// Its path; absent for what belongs to no module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// How much is its own.
    #[serde(flatten)]
    pub change: Change,
}

impl DiffReport {
    /// The JSON Schema, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text(&schemars::schema_for!(DiffReport))
    }

    /// The comparison as JSON.
    pub fn to_json(&self) -> String {
        // Serializing these plain structures cannot fail.
        printable::json(serde_json::to_string_pretty(self).unwrap_or_default() + "\n")
    }
}
