//! The totals of an allocator in the results of the analysis.

use memtrace_insight::units::{share_text, size_text};
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

/// Rounding is reported if it is at least 2 % (1/50) of the allocated memory.
const SMALL_ROUNDING: u64 = 50;

impl Totals {
    /// A sentence on the allocator's rounding, which the sizes of blocks include, if it is large.
    pub fn rounding_sentence(&self) -> Option<String> {
        let requested = Some(self.requested_bytes).filter(|requested| *requested > 0)?;
        let rounding = self.active_bytes.checked_sub(requested)?;
        let is_large = rounding > 0 && rounding >= self.allocated_bytes / SMALL_ROUNDING;
        is_large.then(|| {
            let share = share_text(rounding, self.active_bytes);
            format!("These sizes include the allocator's rounding: {} ({share}) of them.", size_text(rounding))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_rounding_is_reported() {
        let of = |active_bytes, requested_bytes| {
            let totals = Totals { allocated_bytes: active_bytes, active_bytes, requested_bytes, reserved_bytes: 0 };
            totals.rounding_sentence()
        };
        let text = "These sizes include the allocator's rounding: 20.0 KiB (20 %) of them.";
        assert_eq!(of(100 << 10, 80 << 10).as_deref(), Some(text));
        assert_eq!((of(100 << 10, 99 << 10), of(100 << 10, 0), of(0, 0)), (None, None, None));
    }
}
