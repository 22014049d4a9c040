//! The content of XLA's dump about compiled programs (`memtrace --xla-dump`): the structure in `summary.json`.

use memtrace_input::xla::BufferKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The programs that XLA compiled, as it described them (`--xla-dump`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct XlaSummary {
    /// The number of compiled programs that were read.
    pub program_count: u64,
    /// The largest programs: those for a GPU come first, then by `total_bytes` in descending order.
    pub programs: Vec<XlaProgramSummary>,
    /// The number of programs that were not read because there are too many.
    pub unread_programs: u64,
    /// The number of programs whose allocations do not add up to the total that XLA states.
    pub mismatched_programs: u64,
    /// The number of lines of XLA's files that were not understood.
    pub unknown_lines: u64,
}

/// A compiled program: the memory that it needs while it runs, as XLA assigned it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct XlaProgramSummary {
    /// The number of the module in its process.
    pub module: u32,
    /// The name, for example `jit_train_step`.
    pub name: String,
    /// Whether the program runs on a GPU.
    pub is_for_gpu: bool,
    /// All bytes that the program needs while it runs, with its arguments and outputs.
    pub total_bytes: u64,
    /// The bytes by what they are for. Kinds without bytes are absent.
    pub by_kind: Vec<XlaKindBytes>,
    /// Whether the allocations add up to the total that XLA states. Absent if XLA states none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_total_confirmed: Option<bool>,
    /// The buffers at the program's peak. Absent for smaller programs, and if XLA wrote no live ranges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<XlaPeakSummary>,
}

/// The bytes of a compiled program that have one purpose.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct XlaKindBytes {
    /// The purpose.
    pub kind: BufferKind,
    /// The bytes.
    pub bytes: u64,
}

/// The buffers that are live when a compiled program needs the most bytes at once.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct XlaPeakSummary {
    /// The bytes of all live buffers.
    pub live_bytes: u64,
    /// The number of live buffers.
    pub buffers: u64,
    /// Whether XLA's own running totals equal the sums of the buffers.
    pub is_sum_confirmed: bool,
    /// The live bytes by purpose and source line, the largest first.
    pub lines: Vec<XlaLineSummary>,
    /// The bytes of further lines that `lines` leaves out.
    pub left_out_bytes: u64,
}

/// Live buffers with one purpose that one source line produces. For arguments, those of one name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct XlaLineSummary {
    /// The purpose. Absent if the buffer assignment does not have the buffers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<BufferKind>,
    /// The source line, for example `train.py:31 loss`. Empty for arguments, and if it is unknown.
    pub location: String,
    /// The operation of the largest of the buffers, for example `jit(train_step)/dot_general`. For arguments, their
    /// common name. Empty if it is unknown.
    pub operation: String,
    /// The bytes of the buffers.
    pub bytes: u64,
    /// The number of buffers.
    pub buffers: u64,
}
