//! The current figures of each recorded process.
//!
//! A traced process is not trusted. Its blocks and names are bounded, and what goes wrong in the replay ends the figures
//! of that process only. Its series then end, and a gauge counts such processes.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memtrace_analysis::model::{Allocator, Change, MemoryLocation, Owner, PhysicalMemory};
use memtrace_analysis::rules::library_name;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::ids::ModuleId;

/// The maximum number of live blocks, of objects with a name, and of devices of one process.
const MAX_BLOCKS: u64 = 1 << 22;
const MAX_MODULES: usize = 1 << 16;
const MAX_DEVICES: usize = 256;

/// The processes that are being recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Arc<Mutex<Vec<Arc<ProcessFigures>>>>);

impl Figures {
    /// Adds a process.
    pub(crate) fn start(&self, pid: u32) -> Arc<ProcessFigures> {
        let process = Arc::new(ProcessFigures { pid, state: Mutex::default() });
        lock(&self.0).push(Arc::clone(&process));
        process
    }

    /// Removes a process that has ended.
    pub(crate) fn end(&self, process: &Arc<ProcessFigures>) {
        lock(&self.0).retain(|one| !Arc::ptr_eq(one, process));
    }

    /// The figures of all processes now, by pid.
    pub(super) fn now(&self) -> Vec<Reading> {
        let processes: Vec<Arc<ProcessFigures>> = lock(&self.0).clone();
        let mut readings: Vec<Reading> = processes.iter().map(|process| process.read()).collect();
        readings.sort_by_key(|reading| reading.pid);
        readings
    }
}

/// A panic in the replay leaves figures that are not used any more.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The figures of one process.
#[derive(Debug)]
pub(crate) struct ProcessFigures {
    pid: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rank: Option<u32>,
    /// The names of the libraries that call CUDA.
    modules: HashMap<ModuleId, String>,
    physical: PhysicalMemory,
    devices: BTreeMap<i16, Device>,
    /// Whether the figures are no longer followed.
    is_over: bool,
}

#[derive(Debug, Default)]
struct Device {
    allocator: Allocator,
    allocations: u64,
    allocated: u64,
    ooms: u64,
}

impl ProcessFigures {
    /// Takes the rank or the name of a library.
    pub(crate) fn define(&self, definition: &Definition<'_>) {
        let mut state = lock(&self.state);
        match *definition {
            Definition::Rank { rank, .. } => _ = state.rank.get_or_insert(rank),
            Definition::Module { id, path, .. } if state.modules.len() < MAX_MODULES => {
                state.modules.insert(id, library_name(path).to_owned());
            }
            _ => {}
        }
    }

    /// Takes events in their order.
    pub(crate) fn apply(&self, events: &[Event]) {
        let mut state = lock(&self.state);
        if state.is_over {
            return;
        }
        let replayed = catch_unwind(AssertUnwindSafe(|| events.iter().for_each(|e| state.apply(e))));
        let blocks: u64 = state.devices.values().map(|device| device.allocator.live_blocks()).sum();
        if replayed.is_err() || blocks > MAX_BLOCKS || state.devices.len() > MAX_DEVICES {
            *state = State { rank: state.rank, is_over: true, ..State::default() };
        }
    }

    fn read(&self) -> Reading {
        let state = lock(&self.state);
        let mut devices: BTreeMap<i16, DeviceReading> = BTreeMap::new();
        for (ordinal, device) in state.devices.iter().filter(|(ordinal, _)| **ordinal >= 0) {
            let usage = device.allocator.usage();
            let reading = devices.entry(*ordinal).or_default();
            reading.pytorch = Some(PytorchReading {
                allocated_bytes: usage.allocated,
                reserved_bytes: usage.reserved,
                allocations: device.allocations,
                allocation_bytes: device.allocated,
                ooms: device.ooms,
            });
        }
        for ((location, owner), usage) in state.physical.usage_by_owner() {
            let MemoryLocation::Device(ordinal) = location else { continue };
            let name = match owner {
                Owner::CachingAllocator => "PyTorch",
                Owner::Module(id) => state.modules.get(id).map_or("unknown", String::as_str),
            };
            let owners = &mut devices.entry(*ordinal).or_default().by_owner;
            *owners.entry(name.to_owned()).or_default() += usage.current;
        }
        Reading { pid: self.pid, rank: state.rank, is_over: state.is_over, devices }
    }
}

impl State {
    fn apply(&mut self, e: &Event) {
        if !e.source.is_torch() {
            self.physical.apply(e);
            return;
        }
        // The other sources of PyTorch report what this one reports better.
        if e.source != Source::Torch {
            return;
        }
        match e.action {
            Action::SegmentAlloc => self.physical.assign_to_allocator(e),
            Action::SegmentFree => self.physical.segment_freed(e.addr),
            _ => {}
        }
        let device = self.devices.entry(e.device).or_default();
        match device.allocator.apply_torch(e) {
            Change::Alloc(id) => {
                device.allocations += 1;
                device.allocated += device.allocator.block(id).size;
            }
            Change::Oom => device.ooms += 1,
            _ => {}
        }
    }
}

/// The figures of a process at one point in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reading {
    pub(super) pid: u32,
    pub(super) rank: Option<u32>,
    /// Whether the figures are no longer followed.
    pub(super) is_over: bool,
    pub(super) devices: BTreeMap<i16, DeviceReading>,
}

/// Calls `each` with the figures of each device of each process.
pub(super) fn for_each_device(readings: &[Reading], mut each: impl FnMut(&Reading, i16, &DeviceReading)) {
    for reading in readings {
        reading.devices.iter().for_each(|(device, figures)| each(reading, *device, figures));
    }
}

/// The figures of one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct DeviceReading {
    /// What PyTorch's allocator reports. `None` without PyTorch.
    pub(super) pytorch: Option<PytorchReading>,
    /// The bytes that each library has allocated from CUDA.
    pub(super) by_owner: BTreeMap<String, u64>,
}

/// The figures of PyTorch's allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct PytorchReading {
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
    /// The number and the bytes of all allocations so far.
    pub(super) allocations: u64,
    pub(super) allocation_bytes: u64,
    pub(super) ooms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(action: Action, addr: u64, size: u64) -> Event {
        Event { action, addr, size, device: 0, source: Source::Torch, ..Event::EMPTY }
    }

    #[test]
    fn figures_follow_the_events_until_the_process_ends() {
        let figures = Figures::default();
        let process = figures.start(7);
        process.define(&Definition::Rank { rank: 3, size: 4 });
        process.apply(&[
            event(Action::SegmentAlloc, 1 << 30, 2 << 20),
            event(Action::Alloc, 1 << 30, 1000),
            event(Action::Alloc, (1 << 30) + 1024, 512),
            event(Action::FreeRequested, 1 << 30, 1000),
            event(Action::FreeCompleted, 1 << 30, 1000),
            event(Action::Oom, 0, 9 << 30),
        ]);
        let [reading] = &figures.now()[..] else { panic!("one process") };
        assert_eq!((reading.pid, reading.rank, reading.is_over), (7, Some(3), false));
        let pytorch = reading.devices[&0].pytorch.expect("PyTorch");
        assert_eq!((pytorch.allocated_bytes, pytorch.reserved_bytes), (512, 2 << 20));
        assert_eq!((pytorch.allocations, pytorch.allocation_bytes, pytorch.ooms), (2, 1536, 1));
        figures.end(&process);
        assert_eq!(figures.now(), []);
    }

    #[test]
    fn too_many_devices_end_the_figures_of_their_process_only() {
        let figures = Figures::default();
        let (bad, good) = (figures.start(1), figures.start(2));
        let devices: Vec<Event> = (0..300).map(|device| Event { device, ..event(Action::Oom, 0, 1) }).collect();
        bad.apply(&devices);
        bad.apply(&[event(Action::Oom, 0, 1)]);
        good.apply(&[event(Action::Oom, 0, 1)]);
        let ended: Vec<_> = figures.now().iter().map(|reading| (reading.is_over, reading.devices.len())).collect();
        assert_eq!(ended, [(true, 0), (false, 1)]);
    }
}
