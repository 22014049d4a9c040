//! The conclusions of a summary, which reports lay out: verdict, gaps, advice.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::owners::OwnerBytes;

/// The verdict as sentences: how the run ended, what it used, and the reasons.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VerdictSummary {
    /// The worst status of the statements.
    pub status: VerdictStatus,
    /// Sentences about what kind of run it is: a dry run, or a run with a limit.
    pub remarks: Vec<String>,
    /// The statements, in the order in which a report lists them.
    pub statements: Vec<VerdictStatement>,
}

/// A statement, and what explains it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VerdictStatement {
    /// How good it is.
    pub status: VerdictStatus,
    /// The statement, as a sentence.
    pub text: String,
    /// Further sentences that explain it.
    pub details: Vec<String>,
}

/// How a run went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VerdictStatus {
    /// As it should.
    #[default]
    Good,
    /// It has issues, or the recording is incomplete.
    Warning,
    /// It failed.
    Failed,
}

/// Something that the recording lacks, or that limits what it shows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RecordingGap {
    /// The kind of gap, for example `Losses` or `Not recorded`.
    pub label: String,
    /// A sentence without a period.
    pub text: String,
    /// Whether the figures can be wrong because of it.
    pub is_loss: bool,
}

/// The outcome of the best allocator setting that was replayed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct AllocatorAdvice {
    /// Whether the setting is a fix. Otherwise the text says why no setting is.
    pub is_fix: bool,
    /// A sentence without a period.
    pub text: String,
}

/// The memory of a device outside PyTorch's caching allocator, over the whole recording.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OutsidePytorch {
    /// The sum of the peaks of all owners, in bytes. The peaks can belong to different points in time.
    pub bytes: u64,
    /// The owners, each with its peak, the largest first.
    pub owners: Vec<OwnerBytes>,
    /// The total with the largest owners and with what was in use before the program started, as text. Empty without
    /// PyTorch.
    pub text: String,
}
