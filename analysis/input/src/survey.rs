//! Indexes a recording: its devices, and the event source that describes each.
//!
//! The best available source describes a device's blocks: PyTorch's allocator tracker, else PyTorch's profiler
//! reporter, else the CUDA calls. CPU tensors form a "device" of their own, which counts only if there is no other
//! device.

use std::collections::BTreeMap;

use memtrace_trace::api::Memory;
use memtrace_trace::event::{Action, Event, Source};

use super::recording::{LostEvents, Recording};

/// The event source that describes a device. Later variants are better sources.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// CPU tensors.
    Cpu,
    /// CUDA calls of any caller. Every allocation is its own segment.
    Cuda,
    /// PyTorch's profiler reporter: sizes of blocks, but no segments.
    Reporter,
    /// PyTorch's allocator tracker: blocks and segments.
    Torch,
}

impl Lane {
    /// The name in `summary.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Cpu => "torch_cpu",
            Lane::Cuda => "cuda_calls",
            Lane::Reporter => "torch_reporter",
            Lane::Torch => "torch",
        }
    }

    /// The device and the source of an event; `None` for events that describe no device. Uses only fields that a
    /// [`Census`](memtrace_trace::file::Census) keeps.
    #[inline]
    pub fn of(e: &Event) -> Option<(i16, Lane)> {
        match e.source {
            Source::Torch => Some((e.device, Lane::Torch)),
            Source::TorchReporter => Some((e.device, Lane::Reporter)),
            Source::TorchCpu => Some((-1, Lane::Cpu)),
            // A CUDA call of PyTorch's allocator also counts. If the tracker and the reporter see nothing on a device
            // (cudaMallocAsync, pluggable allocators), there is no better source.
            Source::Label => None,
            Source::Driver | Source::Runtime => {
                let device_memory = !matches!(
                    e.api.memory(),
                    Some(Memory::Host | Memory::Registered | Memory::Address | Memory::Imported)
                );
                let obtained = e.action == Action::Alloc && e.result == 0;
                (obtained && device_memory && e.device >= 0).then_some((e.device, Lane::Cuda))
            }
        }
    }
}

/// The index of a recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Survey {
    /// The event source of each device; -1 is the CPU.
    pub lanes: BTreeMap<i16, Lane>,
    /// The number of events by device and source.
    pub events: BTreeMap<(i16, Lane), u64>,
    /// The number of all events.
    pub total_events: u64,
    /// The time of the earliest and the latest event, in clock ticks. `None` without events.
    pub ticks: Option<(u64, u64)>,
    /// What could not be decoded.
    pub lost: LostEvents,
}

impl Survey {
    /// Counts a recording's events by kind, without decoding them if the recording supports that.
    pub fn of(recording: &dyn Recording) -> Survey {
        let (census, lost) = recording.census();
        let mut survey = Survey { total_events: census.events(), ticks: census.ticks, lost, ..Survey::default() };
        for (kind, count) in census.kinds() {
            let Some((device, lane)) = Lane::of(kind) else { continue };
            *survey.events.entry((device, lane)).or_default() += count;
            let best = survey.lanes.entry(device).or_insert(lane);
            *best = (*best).max(lane);
        }
        if survey.lanes.keys().any(|device| *device >= 0) {
            survey.lanes.remove(&-1);
        }
        survey
    }
}
