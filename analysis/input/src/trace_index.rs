//! Indexes a recording: its devices, and the event source that describes each.
//!
//! The best available source describes a device's blocks: PyTorch's allocator tracker, else PyTorch's profiler
//! reporter, else the CUDA calls. CPU tensors form a "device" of their own, which counts only if there is no other
//! device.

use std::collections::BTreeMap;

use memtrace_trace::api::MemoryKind;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::named;

use super::recording::{LostEvents, Recording};

named! {
    /// The event source that describes a device. Later variants are better sources.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    pub enum EventSource {
        /// CPU tensors.
        TorchCpu => "torch_cpu",
        /// CUDA calls of any caller. Every allocation is its own segment.
        CudaCalls => "cuda_calls",
        /// PyTorch's profiler reporter: sizes of blocks, but no segments.
        TorchReporter => "torch_reporter",
        /// PyTorch's allocator tracker: blocks and segments.
        Torch => "torch",
    }
}

impl EventSource {
    /// The device and the source of an event; `None` for events that describe no device. Uses only fields that a
    /// [`EventCounts`](memtrace_trace::file::EventCounts) keeps.
    #[inline]
    pub fn of(e: &Event) -> Option<(i16, EventSource)> {
        match e.source {
            Source::Torch => Some((e.device, EventSource::Torch)),
            Source::TorchReporter => Some((e.device, EventSource::TorchReporter)),
            Source::TorchCpu => Some((-1, EventSource::TorchCpu)),
            // A CUDA call of PyTorch's allocator also counts. If the tracker and the reporter see nothing on a device
            // (cudaMallocAsync, pluggable allocators), there is no better source.
            Source::Label => None,
            Source::Driver | Source::Runtime => {
                let device_memory = !matches!(
                    e.api.memory_kind(),
                    Some(
                        MemoryKind::Host
                            | MemoryKind::Registered
                            | MemoryKind::Address
                            | MemoryKind::Imported
                            | MemoryKind::Driver
                    )
                );
                let obtained = e.action == Action::Alloc && e.result == 0;
                (obtained && device_memory && e.device >= 0).then_some((e.device, EventSource::CudaCalls))
            }
        }
    }
}

/// The index of a recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TraceIndex {
    /// The event source of each device; -1 is the CPU.
    pub sources: BTreeMap<i16, EventSource>,
    /// The number of events by device and source.
    pub events_by_source: BTreeMap<(i16, EventSource), u64>,
    /// The number of all events.
    pub total_events: u64,
    /// The number of out-of-memory errors of PyTorch's allocator.
    pub out_of_memory_errors: u64,
    /// Whether the process opened memory of another process (CUDA IPC).
    pub has_imports: bool,
    /// The time of the earliest and the latest event, in clock ticks. `None` without events.
    pub tick_range: Option<(u64, u64)>,
    /// The events that could not be decoded.
    pub lost: LostEvents,
}

impl TraceIndex {
    /// Counts a recording's events by kind, without decoding them if the recording supports that.
    pub fn of(recording: &dyn Recording) -> TraceIndex {
        let (event_counts, lost) = recording.event_counts();
        let mut index = TraceIndex {
            total_events: event_counts.events(),
            tick_range: event_counts.ticks,
            lost,
            ..TraceIndex::default()
        };
        for (kind, count) in event_counts.kinds() {
            if kind.source == Source::Torch && kind.action == Action::Oom {
                index.out_of_memory_errors += count;
            }
            index.has_imports |= kind.action == Action::Alloc
                && kind.result == 0
                && kind.api.memory_kind() == Some(MemoryKind::Imported);
            let Some((device, source)) = EventSource::of(kind) else { continue };
            *index.events_by_source.entry((device, source)).or_default() += count;
            let best = index.sources.entry(device).or_insert(source);
            *best = (*best).max(source);
        }
        if index.sources.keys().any(|device| *device >= 0) {
            index.sources.remove(&-1);
        }
        index
    }
}
