//! An allocation of another library that takes the memory which PyTorch lacks, such as a pool for its own tensors.

use memtrace_insight::StackSummary;
use memtrace_insight::rules::smaller_share;
use memtrace_insight::units::size_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::step_estimate::StepEstimate;

/// An allocation from CUDA outside PyTorch's caching allocator.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OutsideAllocation {
    /// The library that made it.
    pub owner: String,
    /// Its bytes.
    pub bytes: u64,
    /// The call stack.
    pub place: StackSummary,
}

impl OutsideAllocation {
    /// Whether the step would have fitted without it, or at least the request, which lacked `short` bytes, where the
    /// rest of the step is unknown.
    pub(crate) fn explains(&self, short: u64, estimate: Option<&StepEstimate>) -> bool {
        let lacks = estimate.and_then(|estimate| estimate.needed_bytes?.checked_sub(estimate.available_bytes?));
        self.bytes >= lacks.unwrap_or(0).max(short)
    }

    /// Who took how much of the device where, and what to do.
    pub(crate) fn sentence(&self, total: Option<u64>) -> String {
        let of = total.map(|total| format!(" of the device's {}", size_text(total))).unwrap_or_default();
        let advice = smaller_share(&self.owner).map(|setting| format!(": {setting}")).unwrap_or_default();
        format!(
            "{} took {}{of} in one allocation at {}, beside PyTorch. Give it a smaller share{advice}",
            self.owner,
            size_text(self.bytes),
            self.place.location
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_names_the_setting_of_a_known_library() {
        let place = StackSummary { location: "train.py:12 main".to_owned(), ..StackSummary::default() };
        let pool = OutsideAllocation { owner: "JAX".to_owned(), bytes: 60 << 30, place };
        let expected = "JAX took 60.0 GiB of the device's 80.0 GiB in one allocation at train.py:12 main, beside \
                        PyTorch. Give it a smaller share: XLA_PYTHON_CLIENT_MEM_FRACTION=.40, or \
                        XLA_PYTHON_CLIENT_PREALLOCATE=false";
        assert_eq!(pool.sentence(Some(80 << 30)), expected);
        let other = OutsideAllocation { owner: "ctypes".to_owned(), ..pool };
        assert!(other.sentence(None).ends_with(
            "ctypes took 60.0 GiB in one allocation at train.py:12 main, beside PyTorch. Give it a smaller share"
        ));
    }
}
