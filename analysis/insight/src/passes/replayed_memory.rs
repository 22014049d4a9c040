//! The memory of a recording as its replay shows it, without any classification: the points in time that can be
//! explained.

use std::collections::BTreeMap;

use memtrace_trace::event::{Event, Source};

use super::what_if::WhatIfQuery;
use memtrace_input::EventSource;
use memtrace_replay::{AllocatorSettings, Change, MemoryLocation, Owner, OwnerUsage, Peak, Replay, Usage};

/// The peaks and the out-of-memory errors of a process.
#[derive(Clone, Debug, Default)]
pub struct ReplayedMemory {
    /// The devices, by ordinal.
    pub devices: Vec<ReplayedDevice>,
    /// The memory of each owner.
    pub owners: BTreeMap<(MemoryLocation, Owner), OwnerUsage>,
}

/// The peak and the out-of-memory errors of a device.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedDevice {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The event source that describes the device.
    pub source: EventSource,
    /// `seq` of the event that led to the peak of allocated bytes, and the totals then. `seq` is 0 without a block.
    pub peak: (u64, Usage),
    /// The highest totals, each at its own point in time.
    pub highest: Peak,
    /// The first error and the last one.
    pub ooms: Option<(FailedAllocation, FailedAllocation)>,
}

/// An allocation that ran out of memory.
#[derive(Clone, Copy, Debug)]
pub struct FailedAllocation {
    /// `seq` of its event.
    pub seq: u64,
    /// The requested bytes, rounded as the allocator rounds.
    pub requested: u64,
    /// Free bytes of the device as CUDA reported them; `None` if unknown.
    pub device_free: Option<u64>,
    /// The totals of the device then.
    pub usage: Usage,
}

impl FailedAllocation {
    pub(super) fn new(e: &Event, usage: Usage) -> FailedAllocation {
        // The fallback event source does not report free device memory.
        let device_free = (e.source == Source::Torch).then_some(e.free_bytes());
        FailedAllocation { seq: e.seq, requested: e.size, device_free, usage }
    }
}

/// A point in time of a device to explain: an allocation, or an out-of-memory error.
#[derive(Clone, Debug)]
pub struct OomQuery {
    /// The device ordinal.
    pub device: i16,
    /// `seq` of its event.
    pub seq: u64,
    /// The run's own settings, to continue the step that an error interrupted; `None` to continue none.
    pub continued: Option<AllocatorSettings>,
    /// Other allocator settings to replay; `None` to replay none.
    pub what_if: Option<WhatIfQuery>,
}

/// Collects [`ReplayedMemory`].
#[derive(Clone, Debug)]
pub(super) struct ReplayedMemoryCollector(ReplayedMemory);

impl ReplayedMemoryCollector {
    pub(super) fn new(replay: &Replay) -> ReplayedMemoryCollector {
        let devices = replay.devices().iter().map(|of| ReplayedDevice {
            device: of.device,
            source: of.source,
            peak: (0, Usage::default()),
            highest: Peak::default(),
            ooms: None,
        });
        ReplayedMemoryCollector(ReplayedMemory { devices: devices.collect(), owners: BTreeMap::new() })
    }

    /// Observes a change of the device with this index in the replay.
    #[inline]
    pub(super) fn changed(&mut self, replay: &Replay, slot: usize, e: &Event, change: &Change) {
        let Some(device) = self.0.devices.get_mut(slot) else { return };
        let usage = replay.devices()[slot].allocator.usage();
        match change {
            Change::Alloc(_) if usage.allocated > device.peak.1.allocated => device.peak = (e.seq, *usage),
            Change::Oom => {
                let oom = FailedAllocation::new(e, *usage);
                device.ooms = Some((device.ooms.map_or(oom, |(first, _)| first), oom));
            }
            _ => {}
        }
    }

    /// Observes the state after the last event.
    pub(super) fn finish(mut self, replay: &Replay) -> ReplayedMemory {
        for (device, of) in self.0.devices.iter_mut().zip(replay.devices()) {
            device.highest = *of.allocator.peak();
        }
        self.0.owners = replay.physical().usage_by_owner().clone();
        self.0
    }
}
