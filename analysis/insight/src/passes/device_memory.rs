//! The whole memory of a device: what this process has allocated, and what is in use beyond that.
//!
//! The recording has readings of the memory in use on the device. The excess over this process's allocations at a
//! reading is memory of the driver (contexts, kernels) and of other processes. Between readings, this part counts as
//! unchanged.

use std::collections::BTreeMap;

use memtrace_trace::event::{Action, Event, Source, UsageOccasion};
use memtrace_trace::ids::{ContextId, StackId};

use memtrace_replay::{DeviceAllocations, MemoryLocation, Replay};

/// The maximum number of points of [`DeviceMemory::over_time`]. Beyond it, every second point is dropped.
const MAX_POINTS: usize = 256;

/// How many out-of-memory errors have their held-back bytes, besides the last one.
const MAX_OOMS: usize = 16;
/// A limit holds back at least this much, in bytes. Between the driver's answer to memtrace and the one to PyTorch,
/// other processes can take less.
const MIN_HELD_BACK: u64 = 32 << 20;

/// The driver reports at least so much less in use than this process has allocated, in bytes, before that counts. The
/// estimate of the driver's pages is less wrong.
const MIN_MISSING: u64 = 32 << 20;

/// The memory of allocations that is not on their device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpilledMemory {
    /// The bytes that are not on the device, at least, when they were most.
    pub bytes: u64,
    /// The allocations of this process on the device then, managed memory included, in bytes.
    pub allocated: u64,
    /// The part of it that was managed memory, in bytes.
    pub managed: u64,
    /// The first allocation that did not fit: its stack and context.
    pub first: (StackId, ContextId),
}

/// The memory in use on a device at one point in time, in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceMemoryState {
    /// `seq` of the event that led to it.
    pub seq: u64,
    /// The time, in clock ticks.
    pub ticks: u64,
    /// The bytes in use, of all processes.
    pub used: u64,
    /// Whether `used` was read at this event. Otherwise it is the latest reading and the allocations and frees since.
    pub is_reading: bool,
    /// The part of `used` that this process has not allocated, at the latest reading.
    pub beyond_allocations: u64,
    /// The part of it that contexts took which were created after the first reading.
    pub later_contexts: u64,
    /// This process's allocations.
    pub allocations: DeviceAllocations,
    /// The bytes of blocks that PyTorch's caching allocator had handed out.
    pub blocks: u64,
}

/// The memory of one device, as its readings show it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceMemory {
    /// The total bytes of the device, as the driver reports them.
    pub total: u64,
    /// The bytes in use when this process's contexts of before the first reading had just been created. `None` without
    /// this reading.
    pub context: Option<u64>,
    /// The part of the first reading that this process had not allocated.
    pub first_beyond_allocations: u64,
    /// The number of readings.
    pub readings: u64,
    /// When the most memory was in use.
    pub peak: DeviceMemoryState,
    /// At the peak of allocated bytes. `None` if it came before the first reading.
    pub allocated_peak: Option<DeviceMemoryState>,
    /// At the end of the recording.
    pub end: DeviceMemoryState,
    /// The states at readings, in the order of time.
    pub over_time: Vec<DeviceMemoryState>,
    /// Memory that is not on the device although it was allocated there. `None` if there was none.
    pub spilled: Option<SpilledMemory>,
    held_back: Vec<HeldBack>,
}

/// One device while the recording streams.
#[derive(Clone, Debug, Default)]
struct DeviceReadings {
    memory: DeviceMemory,
    /// Of all readings, [`DeviceMemory::over_time`] has every `stride`th.
    stride: u64,
    beyond_allocations: u64,
    later_contexts: u64,
    /// The bytes of this process's own allocations that the latest reading lacked.
    missing: u64,
    /// The largest allocation since the latest reading that lacked nothing: its bytes, stack and context.
    largest: (u64, StackId, ContextId),
    /// Whether the latest reading followed an allocation that failed, and nothing was allocated since.
    has_just_failed: bool,
}

/// Free memory of a device that a limit kept from this process at an out-of-memory error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HeldBack {
    /// `seq` of the error's event.
    seq: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// The free bytes of the device that a limit kept from this process at the out-of-memory error with this `seq`.
    /// `None` without a limit, or if it is unknown.
    ///
    /// The driver's own answer counts as free. PyTorch's figure of free memory may come from a library that limits
    /// memory.
    pub fn held_back(&self, seq: u64) -> Option<u64> {
        self.held_back.iter().find(|one| one.seq == seq).map(|one| one.bytes)
    }
}

impl DeviceReadings {
    fn has_readings(&self) -> bool {
        self.memory.readings > 0
    }

    /// A reading of `used` bytes. The driver counts all processes, so it is less than this process's own allocations
    /// only if some of these are elsewhere.
    ///
    /// Another thread can allocate between the driver's answer and the event of the reading. So one reading shows
    /// nothing; what two readings in a row lack was missing at the first.
    fn compare(&mut self, used: u64, allocations: &DeviceAllocations) {
        // The figures of unused memory of pools can be old, and the pages are estimated.
        let all: u64 = allocations.by_owner.iter().map(|(_, bytes)| bytes).sum();
        let missing = all.saturating_sub(allocations.managed).saturating_sub(used);
        let before = std::mem::replace(&mut self.missing, missing);
        if before.min(missing) >= MIN_MISSING {
            let (_, stack, context) = self.largest;
            self.spill(before.min(missing), allocations, (stack, context));
        } else if missing == 0 {
            self.largest = (0, StackId::NONE, ContextId::NONE);
        }
    }

    /// So many bytes of the allocations are not on the device.
    fn spill(&mut self, bytes: u64, allocations: &DeviceAllocations, first: (StackId, ContextId)) {
        let before = self.memory.spilled;
        if before.is_none_or(|spilled| spilled.bytes < bytes) {
            let allocated = allocations.by_owner.iter().map(|(_, bytes)| bytes).sum();
            let first = before.map_or(first, |spilled| spilled.first);
            self.memory.spilled = Some(SpilledMemory { bytes, allocated, managed: allocations.managed, first });
        }
    }

    /// PyTorch's out-of-memory error. `free` is the driver's free memory.
    fn out_of_memory(&mut self, e: &Event, free: u64) {
        let bytes = free.saturating_sub(e.free_bytes());
        // The driver has the memory that the request needs. Once a limit is known, older readings suffice.
        let is_limit = self.has_just_failed && free >= e.size || !self.memory.held_back.is_empty();
        if is_limit && bytes >= MIN_HELD_BACK {
            self.memory.held_back.truncate(MAX_OOMS);
            self.memory.held_back.push(HeldBack { seq: e.seq, bytes });
        }
    }
}

/// The devices of one process.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceMemories {
    devices: BTreeMap<i16, DeviceReadings>,
}

impl DeviceMemories {
    /// Observes an event that was replayed.
    #[inline]
    pub(super) fn observe(&mut self, replay: &Replay, e: &Event) {
        if e.action == Action::DeviceUsage {
            self.read(replay, e);
        } else if e.action == Action::Oom {
            self.out_of_memory(replay, e);
        } else if !e.source.is_torch() && !self.devices.is_empty() {
            // A driver's or runtime's event can change what is allocated.
            self.changed(replay, e);
        }
    }

    #[cold]
    fn read(&mut self, replay: &Replay, e: &Event) {
        let device = self.devices.entry(e.device).or_default();
        let used = e.used_bytes();
        device.memory.total = e.size;
        let is_context = e.occasion() == UsageOccasion::ContextCreated;
        if is_context && device.memory.readings == 0 {
            device.memory.context = Some(used);
            return;
        }
        let mut state = state(replay, e, device);
        let beyond_allocations = used.saturating_sub(state.allocations.device_bytes());
        if is_context {
            device.later_contexts += beyond_allocations.saturating_sub(device.beyond_allocations);
        }
        device.beyond_allocations = beyond_allocations;
        device.has_just_failed = e.occasion() == UsageOccasion::OutOfMemory;
        device.compare(used, &state.allocations);
        (state.used, state.is_reading) = (used, true);
        (state.beyond_allocations, state.later_contexts) = (beyond_allocations, device.later_contexts);
        if device.memory.readings == 0 {
            (device.memory.first_beyond_allocations, device.stride) = (device.beyond_allocations, 1);
        }
        if device.memory.readings.is_multiple_of(device.stride) {
            device.memory.over_time.push(state.clone());
        }
        if device.memory.over_time.len() > MAX_POINTS {
            let mut place = 0;
            device.memory.over_time.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            device.stride *= 2;
        }
        device.memory.readings += 1;
        if state.used > device.memory.peak.used {
            device.memory.peak = state;
        }
    }

    #[cold]
    fn out_of_memory(&mut self, replay: &Replay, e: &Event) {
        // Only PyTorch's own event has what PyTorch got as free.
        if e.source != Source::Torch {
            return;
        }
        if let Some(device) = self.devices.get_mut(&e.device).filter(|device| device.has_readings()) {
            let free = device.memory.total.saturating_sub(state(replay, e, device).used);
            device.out_of_memory(e, free);
        }
    }

    fn changed(&mut self, replay: &Replay, e: &Event) {
        let Some(device) = self.devices.get_mut(&e.device).filter(|device| device.has_readings()) else { return };
        if e.action == Action::Alloc && e.result == 0 {
            device.has_just_failed = false;
            if e.size > device.largest.0 {
                device.largest = (e.size, e.stack, e.context);
            }
        }
        let physical = replay.physical();
        let location = MemoryLocation::Device(e.device);
        let excess = physical.total(location).current.saturating_sub(device.memory.total);
        if excess > device.memory.spilled.map_or(0, |spilled| spilled.bytes) {
            device.spill(excess, &physical.device_allocations(e.device), (e.stack, e.context));
        }
        // Allocations can be summed up without a list of their owners, so most events need no list.
        let at_least = physical.total(location).current.saturating_add(device.beyond_allocations);
        if at_least.saturating_add(physical.unused_pool_bytes(e.device)) <= device.memory.peak.used {
            return;
        }
        let state = state(replay, e, device);
        if state.used > device.memory.peak.used {
            device.memory.peak = state;
        }
    }

    /// Observes the event that led to a new peak of allocated bytes on its device.
    #[cold]
    pub(super) fn allocated_peak(&mut self, replay: &Replay, e: &Event) {
        if let Some(device) = self.devices.get_mut(&e.device).filter(|device| device.has_readings()) {
            let state = state(replay, e, device);
            // While the memory in use stays at its peak, the state with the most blocks says more.
            if state.used == device.memory.peak.used && state.blocks > device.memory.peak.blocks {
                device.memory.peak = state.clone();
            }
            device.memory.allocated_peak = Some(state);
        }
    }

    /// The state of the event's device after the events up to now. `None` before the first reading.
    pub(super) fn state_at(&self, replay: &Replay, e: &Event) -> Option<DeviceMemoryState> {
        let device = self.devices.get(&e.device).filter(|device| device.has_readings())?;
        Some(state(replay, e, device))
    }

    /// The results. `last` is the time and number of the recording's last event.
    pub(super) fn finish(mut self, replay: &Replay, last: &Event) -> BTreeMap<i16, DeviceMemory> {
        self.devices.retain(|_, device| device.has_readings());
        for (ordinal, device) in &mut self.devices {
            device.memory.end = state(replay, &Event { device: *ordinal, ..*last }, device);
        }
        self.devices.into_iter().map(|(ordinal, device)| (ordinal, device.memory)).collect()
    }
}

/// The state after an event, with what this process has not allocated as at the latest reading.
fn state(replay: &Replay, e: &Event, device: &DeviceReadings) -> DeviceMemoryState {
    let beyond_allocations = device.beyond_allocations;
    let allocations = replay.physical().device_allocations(e.device);
    let of_device = replay.devices().iter().find(|device| device.device == e.device);
    DeviceMemoryState {
        seq: e.seq,
        ticks: e.ticks,
        used: allocations.device_bytes().saturating_add(beyond_allocations),
        is_reading: false,
        beyond_allocations,
        later_contexts: device.later_contexts,
        blocks: of_device
            .filter(|device| device.source != memtrace_input::EventSource::CudaCalls)
            .map_or(0, |device| device.allocator.usage().allocated),
        allocations,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_replay::Owner;

    const MIB: u64 = 1 << 20;

    fn allocated(bytes: u64, managed: u64) -> DeviceAllocations {
        let by_owner = vec![(Owner::CachingAllocator, bytes)];
        DeviceAllocations { by_owner, managed, ..DeviceAllocations::default() }
    }

    #[test]
    fn what_two_readings_in_a_row_lack_is_not_on_the_device() {
        let mut device = DeviceReadings::default();
        let place = (StackId(7), ContextId::NONE);
        device.compare(1100 * MIB, &allocated(1000 * MIB, 0));
        device.largest = (500 * MIB, place.0, place.1);
        device.compare(1100 * MIB, &allocated(1500 * MIB, 0));
        assert_eq!(device.memory.spilled, None, "another thread may have allocated since");
        device.compare(1150 * MIB, &allocated(1500 * MIB, 0));
        let expected = SpilledMemory { bytes: 350 * MIB, allocated: 1500 * MIB, managed: 0, first: place };
        assert_eq!(device.memory.spilled, Some(expected));
        device.largest = (900 * MIB, StackId(8), ContextId::NONE);
        device.compare(1150 * MIB, &allocated(2400 * MIB, 0));
        device.compare(1150 * MIB, &allocated(2400 * MIB, 0));
        let spilled = device.memory.spilled.unwrap();
        assert_eq!((spilled.bytes, spilled.first), (1250 * MIB, place), "the first one stays");
    }

    #[test]
    fn readings_that_lack_little_or_managed_memory_show_nothing() {
        let mut device = DeviceReadings::default();
        for _ in 0..3 {
            device.compare(1000 * MIB, &allocated(1031 * MIB, 0));
            device.compare(1000 * MIB, &allocated(3000 * MIB, 2000 * MIB));
        }
        device.compare(1000 * MIB, &allocated(2000 * MIB, 0));
        device.compare(2100 * MIB, &allocated(2000 * MIB, 0));
        device.compare(1000 * MIB, &allocated(2000 * MIB, 0));
        assert_eq!(device.memory.spilled, None);
    }
}
