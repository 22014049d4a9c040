//! The whole memory of a device: what this process has allocated, and what is in use beyond that.
//!
//! The recording has readings of the memory in use on the device. The excess over this process's allocations at a
//! reading is memory of the driver (contexts, kernels) and of other processes. Between readings, this part counts as
//! unchanged.

use std::collections::BTreeMap;

use memtrace_trace::event::{Action, Event, Source, UsageOccasion};

use memtrace_replay::{DeviceAllocations, Replay};

/// The maximum number of points of [`DeviceMemory::over_time`]. Beyond it, every second point is dropped.
const MAX_POINTS: usize = 256;

/// How many out-of-memory errors have their held-back bytes, besides the last one.
const MAX_OOMS: usize = 16;
/// A limit holds back at least this much, in bytes. Between the driver's answer to memtrace and the one to PyTorch,
/// other processes can take less.
const MIN_HELD_BACK: u64 = 32 << 20;

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
        }
        let physical = replay.physical();
        let location = memtrace_replay::MemoryLocation::Device(e.device);
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
