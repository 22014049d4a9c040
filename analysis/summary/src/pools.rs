//! The memory pools of JAX and CuPy: the structure in `summary.json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The memory pool of a library on one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolSummary {
    /// The library: `JAX` or `CuPy`.
    pub library: String,
    /// How the library takes memory from CUDA.
    pub allocation: PoolAllocation,
    /// The most bytes that the library's allocations had at once, as CUDA calls show them.
    pub taken_peak_bytes: u64,
    /// These bytes at the end of the recording.
    pub taken_end_bytes: u64,
    /// The number of these allocations.
    pub allocations: u64,
    /// The size of the largest of them.
    pub largest_bytes: u64,
    /// The bytes that the library took when it started, a fixed share of the device whatever the program needs. Absent
    /// if it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preallocated_bytes: Option<u64>,
    /// The most bytes that were in use at once inside the pool, as the library reports it (`--pools read`). Absent if
    /// it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_peak_bytes: Option<u64>,
    /// The bytes in use inside the pool when the interpreter ended, as the library reports it (`--pools read`). Absent
    /// if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_end_bytes: Option<u64>,
    /// The bytes that the pool has taken from CUDA when the interpreter ended, as the library reports it. Absent if it
    /// is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_end_bytes: Option<u64>,
}

/// How a library takes memory from CUDA.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolAllocation {
    /// A fixed share of the device at the start, whatever the program needs.
    Preallocated,
    /// More pieces as the program needs them.
    OnDemand,
    /// Each buffer is an allocation: there is no pool.
    EachBuffer,
    /// It is unknown.
    #[default]
    Unknown,
}
