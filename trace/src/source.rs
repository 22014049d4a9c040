//! The sources of events.

/// Where an event comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Source {
    /// PyTorch's CUDA caching allocator, through its trace tracker (`attachAllocatorTraceTracker`).
    Torch = 0,
    /// PyTorch's CUDA allocator, through `c10::reportMemoryUsageToProfiler`. Sizes are rounded, streams and segments
    /// are unknown. Used if the tracker cannot be attached.
    TorchReporter = 1,
    /// PyTorch's CPU allocator, through `c10::reportMemoryUsageToProfiler`.
    TorchCpu = 2,
    /// A call of the CUDA driver API.
    Driver = 3,
    /// A call of the CUDA runtime API.
    Runtime = 4,
    /// The program itself, through `record_function` or NVTX: named ranges without memory.
    Label = 5,
}

impl Source {
    /// The source with this wire number. `None` if it is unknown.
    pub const fn from_wire(value: u8) -> Option<Source> {
        Some(match value {
            0 => Source::Torch,
            1 => Source::TorchReporter,
            2 => Source::TorchCpu,
            3 => Source::Driver,
            4 => Source::Runtime,
            5 => Source::Label,
            _ => return None,
        })
    }

    /// Whether the event comes from one of PyTorch's allocators, not from a CUDA call.
    pub const fn is_torch(self) -> bool {
        matches!(self, Source::Torch | Source::TorchReporter | Source::TorchCpu)
    }
}
