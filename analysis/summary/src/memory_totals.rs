//! The totals of an allocator in the results of the analysis.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The totals of a device at one point in time, as `torch.cuda.memory_stats` counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Totals {
    /// The bytes of blocks in use by the program, rounded as the allocator rounds.
    pub allocated_bytes: u64,
    /// `allocated_bytes` and the bytes of freed blocks that streams still use.
    pub active_bytes: u64,
    /// The bytes of segments: the memory that the caching allocator holds from CUDA.
    pub reserved_bytes: u64,
    /// The bytes that the program requested for active blocks, without rounding.
    pub requested_bytes: u64,
}
