//! The metrics of PyTorch's allocator: their names and meaning, for every protocol.

use super::figures::PytorchReading;

/// One metric.
pub(super) struct PytorchMetric {
    /// The name without a unit and without a suffix. OpenTelemetry has it with dots.
    pub(super) name: &'static str,
    /// Whether the value is a number of bytes.
    pub(super) is_bytes: bool,
    /// Whether the value only grows.
    pub(super) is_counter: bool,
    /// The description of the metric.
    pub(super) help: &'static str,
    /// The value.
    pub(super) value: fn(&PytorchReading) -> u64,
}

/// All of them.
pub(super) const PYTORCH: [PytorchMetric; 5] = [
    PytorchMetric {
        name: "allocated",
        is_bytes: true,
        is_counter: false,
        help: "Bytes of blocks in use, as torch.cuda.memory_allocated counts them.",
        value: |figures| figures.allocated_bytes,
    },
    PytorchMetric {
        name: "reserved",
        is_bytes: true,
        is_counter: false,
        help: "Bytes of segments, as torch.cuda.memory_reserved counts them.",
        value: |figures| figures.reserved_bytes,
    },
    PytorchMetric {
        name: "allocations",
        is_bytes: false,
        is_counter: true,
        help: "Blocks that PyTorch has allocated.",
        value: |figures| figures.allocations,
    },
    PytorchMetric {
        name: "allocation",
        is_bytes: true,
        is_counter: true,
        help: "Bytes of the blocks that PyTorch has allocated.",
        value: |figures| figures.allocation_bytes,
    },
    PytorchMetric {
        name: "out_of_memory_errors",
        is_bytes: false,
        is_counter: true,
        help: "Out-of-memory errors of PyTorch, caught or not.",
        value: |figures| figures.ooms,
    },
];

/// The help of the bytes by owner.
pub(super) const DEVICE_MEMORY: &str = "Bytes that a library of the process has allocated from CUDA.";
/// The help of the bytes by category.
pub(super) const BY_CATEGORY: &str = "Bytes of blocks in use by what they are for, a few seconds ago.";
/// The help of the number of processes.
pub(super) const PROCESSES: &str = "Processes that are being recorded.";
/// The help of the number of processes without figures.
pub(super) const WITHOUT_FIGURES: &str = "Recorded processes whose figures are not followed any more.";
/// The help of the number of their events.
pub(super) const EVENTS_WITHOUT_FIGURES: &str = "Events of processes whose figures were not followed any more.";
