//! A first look over a recording: which devices there are and whose events tell about each.
//!
//! A device's blocks are told by the best source it has: PyTorch's own tracker, else PyTorch's reporter, else the CUDA
//! calls themselves. CPU tensors are a "device" of their own, which counts only where there is no other.

use std::collections::BTreeMap;

use memtrace_trace::api::Memory;
use memtrace_trace::event::{Action, Event, Source};

use super::recording::{LostEvents, Recording};

/// Whose events tell about a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// CPU tensors.
    Cpu,
    /// CUDA calls, whoever makes them: every allocation is its own segment.
    Cuda,
    /// PyTorch's profiler reporter: block sizes, no segments.
    Reporter,
    /// PyTorch's allocator tracker: everything.
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

    /// The lane an event belongs to, with its device; `None` for events that make no lane. Looks at what a
    /// [`Census`](memtrace_trace::file::Census) tells of an event, and at nothing else.
    #[inline]
    pub fn of(e: &Event) -> Option<(i16, Lane)> {
        match e.source {
            Source::Torch => Some((e.device, Lane::Torch)),
            Source::TorchReporter => Some((e.device, Lane::Reporter)),
            Source::TorchCpu => Some((-1, Lane::Cpu)),
            // A call of PyTorch's allocator counts too: there is no better source on a device where its tracker and its
            // reporter are silent (cudaMallocAsync, pluggable allocators).
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

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Survey {
    /// The lane of each device; -1 is the CPU.
    pub lanes: BTreeMap<i16, Lane>,
    /// Events on each lane.
    pub events: BTreeMap<(i16, Lane), u64>,
    /// All events.
    pub total_events: u64,
    /// Earliest and latest moment, in ticks.
    pub ticks: Option<(u64, u64)>,
    /// What could not be decoded.
    pub lost: LostEvents,
}

impl Survey {
    /// Counts a recording's events by kind; none is decoded for it.
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
