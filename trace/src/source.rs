//! The sources of events.

use crate::named;

named! {
    /// Where an event comes from.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum Source {
        /// PyTorch's CUDA caching allocator, through its trace tracker (`attachAllocatorTraceTracker`).
        Torch = 0,
        /// PyTorch's CUDA allocator, through `c10::reportMemoryUsageToProfiler`. Sizes are rounded, streams and
        /// segments are unknown. Used if the tracker cannot be attached.
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
}

impl Source {
    /// Whether the event comes from one of PyTorch's allocators, not from a CUDA call.
    pub const fn is_torch(self) -> bool {
        matches!(self, Source::Torch | Source::TorchReporter | Source::TorchCpu)
    }
}
