//! The actions of events.

use crate::named;

named! {
    /// The kind of an event. The first ten are PyTorch's `TraceEntry::Action`, with the same numbers and names as in
    /// its snapshots.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum Action {
        /// A block was allocated. For a CUDA call: memory was allocated (see [`Event::api`](crate::event::Event::api)).
        Alloc = 0 => "alloc",
        /// The program freed a block. Unless the free is deferred, `FreeCompleted` follows at once.
        FreeRequested = 1 => "free_requested",
        /// The block may be reused. For a CUDA call: memory was freed.
        FreeCompleted = 2 => "free_completed",
        /// The caching allocator allocated a segment (`cudaMalloc`).
        SegmentAlloc = 3 => "segment_alloc",
        /// The caching allocator freed a segment (`cudaFree`).
        SegmentFree = 4 => "segment_free",
        /// Part of an expandable segment was mapped.
        SegmentMap = 5 => "segment_map",
        /// Part of an expandable segment was unmapped.
        SegmentUnmap = 6 => "segment_unmap",
        /// The program took a snapshot. `size` is the total of active bytes.
        Snapshot = 7 => "snapshot",
        /// An allocation failed for good. `size` is the rounded request, `addr` the free bytes of the device.
        Oom = 8 => "oom",
        /// PyTorch >= 2.14: a text was attached to a block.
        Annotate = 9 => "annotate",
        /// A CUDA free, recorded before its call, has failed. `addr` is the [`Event::seq`](crate::event::Event::seq) of
        /// the event to cancel.
        Retract = 16 => "retract",
        /// The allocator's own totals, to verify a replay: `addr` is the bytes allocated, `size` the bytes reserved.
        ///
        /// For a CUDA call these are the totals of the stream-ordered pool with the handle `stream`, recorded when its
        /// reserved bytes have changed.
        Totals = 17 => "totals",
        /// Physical memory was mapped at an address (`cuMemMap`). `stream` is its handle.
        Map = 18 => "map",
        /// Physical memory was unmapped (`cuMemUnmap`).
        Unmap = 19 => "unmap",
        /// An address range was reserved, without memory (`cuMemAddressReserve`).
        Reserve = 20 => "reserve",
        /// An address range was freed (`cuMemAddressFree`).
        Unreserve = 21 => "unreserve",
        /// A range that the program named begins. `addr` is the label's id ([`crate::definition::Definition::Label`]).
        ///
        /// `size` is 0 for a range that nests on its thread. Otherwise it is a number that identifies the range's end
        /// (`nvtxRangeStart`), which may come from another thread.
        RangeStart = 22 => "range_start",
        /// A named range ends. `addr` and `size` are those of its start.
        ///
        /// `addr` is 0 if the program does not name the range. Then a `size` that is not 0 identifies the range by its
        /// number. With a `size` of 0 it is the innermost nested NVTX range of its thread in the domain `stream` (0 is
        /// the default domain).
        RangeEnd = 23 => "range_end",
        /// The driver was asked how much of the device's memory is in use (`cuMemGetInfo`). Since 1.4.
        ///
        /// `addr` is the free bytes and `size` the total bytes of the whole device, other processes included. `stream`
        /// is the occasion ([`UsageOccasion`]). `api` and `module` are those of the call that was the occasion, if any.
        /// The effects of that call are included, and its own event precedes this one, except before a context is
        /// created.
        DeviceUsage = 24 => "device_usage",
        /// A call about a CUDA graph; [`Event::api`](crate::event::Event::api) says which. `addr` is the graph after
        /// the end of a capture, otherwise the executable graph, and 0 at the begin of a capture.
        ///
        /// `stream` is the captured stream; at an instantiation it is the graph. `size` is the number of nodes after
        /// the end of a capture. At an instantiation or an upload it is the device memory that the call took, in bytes.
        Graph = 25 => "graph",
        /// Only in rotated traces (`--keep`), with [`Flags::PREEXISTING`](crate::event::Flags::PREEXISTING): what
        /// earlier blocks have left in the bookkeeping of PyTorch's allocator. Since 1.5.
        ///
        /// The block at `addr` was last requested with `size` bytes, if it is free. `stack` and `context` are those of
        /// its segment. `slack` is 1 in the pool of small blocks.
        BlockState = 27 => "block_state",
    }
}

named! {
    /// Why the driver was asked for the device's memory in use ([`Action::DeviceUsage`]).
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
    pub enum UsageOccasion {
        /// Any other occasion, including those of a newer build.
        #[default]
        Other = 0,
        /// A context was created on the device. The reading may precede the recording; its event does not.
        ContextCreated = 1,
        /// A module or library with kernels was loaded.
        CodeLoaded = 2,
        /// This process has allocated more of the device's memory than at any reading before.
        Allocated = 3,
        /// An allocation failed because no memory was left.
        OutOfMemory = 4,
        /// memtrace has scanned the program's objects for tensor names: at the ends of backward passes and optimizer
        /// steps, ever more rarely.
        Scan = 5,
        /// A context is about to be created on the device, which has one already.
        ContextRequested = 6,
    }
}
