//! The current figures of each recorded process.
//!
//! A traced process is not trusted. The data that is kept of it is bounded, for each process and for all together.
//! Beyond a bound, and when something goes wrong in the replay, the figures of that process end: sums without some of
//! the blocks would be wrong. A gauge counts such processes, and a counter their further events.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memtrace_analysis::load::Workload;
use memtrace_analysis::model::{Allocator, Change, MemoryLocation, Owner, PhysicalMemory};
use memtrace_analysis::passes::Category;
use memtrace_analysis::rules::library_name;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::ids::ModuleId;

/// The maximum that is kept of one process, and of all processes. A block or another entry has about 100 bytes, and a
/// series about 150 bytes of text.
const BOUNDS: Bounds =
    Bounds { process: Kept { entries: 1 << 21, series: 1 << 13 }, all: Kept { entries: 1 << 22, series: 1 << 18 } };
/// The number of series that a device can have beside those of the owners of its memory.
const SERIES_OF_DEVICE: u64 = 20;
/// The maximum number of objects with a name, and of devices of one process. Other objects are `unknown`.
const MAX_MODULES: usize = 1 << 12;
const MAX_DEVICES: usize = 256;
/// The maximum length of a library's name in characters.
const MAX_NAME: usize = 64;

/// The processes that are being recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Arc<Run>);

#[derive(Debug, Default)]
struct Run {
    processes: Mutex<Vec<Arc<ProcessFigures>>>,
    totals: Arc<Totals>,
}

/// The maximum of what is kept.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    process: Kept,
    all: Kept,
}

impl Default for Bounds {
    fn default() -> Bounds {
        BOUNDS
    }
}

/// The sums over all processes.
#[derive(Debug, Default)]
struct Totals {
    bounds: Bounds,
    entries: AtomicU64,
    series: AtomicU64,
    /// The events of processes whose figures are no longer followed.
    unfollowed_events: AtomicU64,
}

/// The data that is kept of a process, as counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Kept {
    entries: u64,
    series: u64,
}

impl Totals {
    /// Replaces what was kept of a process, and returns whether the new amounts are within the bounds.
    fn replace(&self, old: Kept, new: Kept) -> bool {
        let replace = |total: &AtomicU64, old: u64, new: u64| {
            total.fetch_add(new, Ordering::Relaxed);
            total.fetch_sub(old, Ordering::Relaxed) - old
        };
        let all = Kept {
            entries: replace(&self.entries, old.entries, new.entries),
            series: replace(&self.series, old.series, new.series),
        };
        new.is_within(&self.bounds.process) && all.is_within(&self.bounds.all)
    }
}

impl Kept {
    fn is_within(&self, maximum: &Kept) -> bool {
        self.entries <= maximum.entries && self.series <= maximum.series
    }
}

impl Figures {
    /// Adds a process, which has this trace in the run folder.
    pub(crate) fn start(&self, pid: u32, trace: String, workload: &Workload) -> Arc<ProcessFigures> {
        let totals = Arc::clone(&self.0.totals);
        let labels = workload.labels().into_iter().map(|(name, value)| (name, value.to_owned())).collect();
        let (state, by_category) = (Mutex::default(), Mutex::default());
        let process = Arc::new(ProcessFigures { pid, labels, trace, totals, state, by_category });
        lock(&self.0.processes).push(Arc::clone(&process));
        process
    }

    /// Removes a process that has ended.
    pub(crate) fn end(&self, process: &Arc<ProcessFigures>) {
        lock(&self.0.processes).retain(|one| !Arc::ptr_eq(one, process));
    }

    /// The number of events, so far, of processes whose figures are no longer followed.
    pub(super) fn unfollowed_events(&self) -> u64 {
        self.0.totals.unfollowed_events.load(Ordering::Relaxed)
    }

    /// The figures of all processes now, by pid.
    pub(super) fn now(&self) -> Vec<Reading> {
        let mut readings: Vec<Reading> = self.processes().iter().map(|process| process.read()).collect();
        readings.sort_by_key(|reading| reading.pid);
        readings
    }

    /// The traces of the processes in which PyTorch has allocated.
    pub(super) fn traces(&self) -> Vec<String> {
        let has_pytorch =
            |process: &&Arc<ProcessFigures>| lock(&process.state).devices.keys().any(|device| *device >= 0);
        self.processes().iter().filter(has_pytorch).map(|process| process.trace.clone()).collect()
    }

    /// Sets the bytes by category of the process with this trace. One that has ended has no figures any more.
    pub(super) fn set_by_category(&self, trace: &str, by_category: ByCategory) {
        if let Some(process) = self.processes().iter().find(|process| process.trace == trace) {
            process.set_by_category(by_category);
        }
    }

    /// Removes all bytes by category.
    pub(super) fn clear_by_category(&self) {
        self.processes().iter().for_each(|process| lock(&process.by_category).clear());
    }

    fn processes(&self) -> Vec<Arc<ProcessFigures>> {
        lock(&self.0.processes).clone()
    }
}

/// A panic in the replay leaves figures that are not used any more.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Labels by name.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Bytes by device and category.
pub(super) type ByCategory = BTreeMap<i16, BTreeMap<Category, u64>>;

/// The figures of one process.
#[derive(Debug)]
pub(crate) struct ProcessFigures {
    pid: u32,
    /// The names and values of its pod, container, Slurm job and user.
    labels: Labels,
    /// The name of the trace in the run folder.
    trace: String,
    totals: Arc<Totals>,
    state: Mutex<State>,
    /// The latest bytes by category, which come from another process than the rest.
    by_category: Mutex<ByCategory>,
}

#[derive(Debug, Default)]
struct State {
    rank: Option<u32>,
    /// The names of the libraries that call CUDA.
    modules: HashMap<ModuleId, String>,
    physical: PhysicalMemory,
    devices: BTreeMap<i16, Device>,
    /// The part that counts in the totals.
    kept: Kept,
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
    /// Stores the rank or the name of a library.
    pub(crate) fn define(&self, definition: &Definition<'_>) {
        let mut state = lock(&self.state);
        match *definition {
            Definition::Rank { rank, .. } => _ = state.rank.get_or_insert(rank),
            Definition::Module { id, path, .. } if !state.is_over && state.modules.len() < MAX_MODULES => {
                state.modules.insert(id, library_name(path).chars().take(MAX_NAME).collect());
                self.check_bounds(&mut state);
            }
            _ => {}
        }
    }

    /// Applies events in their order.
    pub(crate) fn apply(&self, events: &[Event]) {
        let mut state = lock(&self.state);
        if !state.is_over {
            let replayed = catch_unwind(AssertUnwindSafe(|| events.iter().for_each(|e| state.apply(e))));
            if replayed.is_err() || state.devices.len() > MAX_DEVICES {
                self.end_figures(&mut state);
            } else {
                self.check_bounds(&mut state);
            }
        }
        if state.is_over {
            self.totals.unfollowed_events.fetch_add(events.len() as u64, Ordering::Relaxed);
        }
    }

    fn check_bounds(&self, state: &mut State) {
        let new = state.size();
        let old = std::mem::replace(&mut state.kept, new);
        if !self.totals.replace(old, new) {
            self.end_figures(state);
        }
    }

    fn end_figures(&self, state: &mut State) {
        self.totals.replace(state.kept, Kept::default());
        *state = State { rank: state.rank, is_over: true, ..State::default() };
        lock(&self.by_category).clear();
    }

    /// A category that was there before has 0 bytes now if it is missing.
    fn set_by_category(&self, mut new: ByCategory) {
        let mut current = lock(&self.by_category);
        for (device, categories) in current.iter() {
            let bytes = new.entry(*device).or_default();
            categories.keys().for_each(|category| _ = bytes.entry(*category).or_default());
        }
        *current = new;
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
        let by_category = lock(&self.by_category).clone();
        for (ordinal, bytes) in by_category {
            if let Some(reading) = devices.get_mut(&ordinal).filter(|reading| reading.pytorch.is_some()) {
                reading.by_category = bytes;
            }
        }
        let labels = self.labels.clone();
        Reading { pid: self.pid, rank: state.rank, labels, is_over: state.is_over, devices }
    }
}

impl Drop for ProcessFigures {
    fn drop(&mut self) {
        let kept = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).kept;
        self.totals.replace(kept, Kept::default());
    }
}

impl State {
    /// The size of the data that is kept of the process.
    fn size(&self) -> Kept {
        let blocks: usize = self.devices.values().map(|device| device.allocator.entries()).sum();
        let series = SERIES_OF_DEVICE * self.devices.len() as u64 + self.physical.usage_by_owner().len() as u64;
        Kept { entries: (blocks + self.physical.entries() + self.modules.len()) as u64, series }
    }

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
    /// The names and values of its pod, container, Slurm job and user.
    pub(super) labels: Labels,
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
    /// The figures of PyTorch's allocator. `None` without PyTorch.
    pub(super) pytorch: Option<PytorchReading>,
    /// The bytes that each library has allocated from CUDA.
    pub(super) by_owner: BTreeMap<String, u64>,
    /// The bytes of PyTorch's blocks in use, by what they are for, a few seconds ago.
    pub(super) by_category: BTreeMap<Category, u64>,
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
    use memtrace_trace::api::Api;

    use super::*;

    fn start(figures: &Figures, pid: u32, trace: String) -> Arc<ProcessFigures> {
        figures.start(pid, trace, &Workload::default())
    }

    fn event(action: Action, addr: u64, size: u64) -> Event {
        Event { action, addr, size, device: 0, source: Source::Torch, ..Event::EMPTY }
    }

    #[test]
    fn figures_follow_the_events_until_the_process_ends() {
        let figures = Figures::default();
        let process = start(&figures, 7, "7.mtr".to_owned());
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
    fn categories_belong_to_the_process_with_the_trace_and_end_with_it() {
        let figures = Figures::default();
        let (first, second) = (start(&figures, 7, "7.mtr".to_owned()), start(&figures, 7, "7.1.mtr".to_owned()));
        first.apply(&[event(Action::SegmentAlloc, 1 << 30, 2 << 20), event(Action::Alloc, 1 << 30, 1024)]);
        assert_eq!(figures.traces(), ["7.mtr"], "the other process has no allocation of PyTorch");
        let by_category = |bytes: &[(Category, u64)]| BTreeMap::from([(0, bytes.iter().copied().collect())]);
        let seen = || figures.now()[0].devices.get(&0).map(|device| device.by_category.clone()).unwrap_or_default();
        figures.set_by_category("7.mtr", by_category(&[(Category::Input, 1024)]));
        figures.set_by_category("7.1.mtr", by_category(&[(Category::Input, 5)]));
        assert_eq!(seen(), BTreeMap::from([(Category::Input, 1024)]));
        assert!(figures.now()[1].devices.is_empty(), "without PyTorch there is nothing that the bytes are a part of");
        figures.set_by_category("7.mtr", by_category(&[(Category::Unknown, 512)]));
        assert_eq!(seen(), BTreeMap::from([(Category::Input, 0), (Category::Unknown, 512)]));
        figures.clear_by_category();
        assert_eq!(seen(), BTreeMap::new());
        figures.end(&first);
        figures.set_by_category("7.mtr", by_category(&[(Category::Input, 1024)]));
        assert_eq!((figures.now().len(), seen()), (1, BTreeMap::new()));
        figures.end(&second);
    }

    /// Figures with other bounds.
    fn bounded(process: Kept, all: Kept) -> Figures {
        let totals = Totals { bounds: Bounds { process, all }, ..Totals::default() };
        Figures(Arc::new(Run { processes: Mutex::default(), totals: Arc::new(totals) }))
    }

    #[test]
    fn whatever_a_process_keeps_is_bounded_and_counted() {
        const MANY: u64 = 1000;
        let driver =
            |api, action, n: u64| Event { api, source: Source::Driver, stream: n, ..event(action, (1 + n) << 30, 512) };
        type Make<'a> = &'a dyn Fn(u64) -> Event;
        let kinds: [(&str, Make<'_>); 10] = [
            ("blocks of PyTorch", &|n| event(Action::Alloc, n << 30, 512)),
            ("free segments", &|n| event(Action::SegmentAlloc, n << 30, 2 << 20)),
            ("allocations of the driver", &|n| driver(Api::cuMemAlloc_v2, Action::Alloc, n)),
            ("host memory", &|n| driver(Api::cuMemAllocHost_v2, Action::Alloc, n)),
            ("handles", &|n| driver(Api::cuMemCreate, Action::Alloc, n)),
            ("imports", &|n| driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, n)),
            ("mappings", &|n| driver(Api::cuMemMap, Action::Map, n)),
            ("reservations", &|n| driver(Api::cuMemAddressReserve, Action::Reserve, n)),
            ("pools", &|n| driver(Api::cuMemAllocAsync, Action::Totals, n)),
            ("owners", &|n| Event { module: ModuleId(n as u32), ..driver(Api::cuMemAlloc_v2, Action::Alloc, n % 2) }),
        ];
        for (kind, make) in kinds {
            let bound = Kept { entries: MANY / 2, series: MANY };
            let figures = bounded(bound, Kept { entries: 10 * MANY, series: 10 * MANY });
            let [process, other] = [7, 8].map(|pid| start(&figures, pid, format!("{pid}.mtr")));
            other.apply(&[event(Action::Oom, 0, 1)]);
            (0..MANY).for_each(|n| process.apply(&[make(n)]));
            let over: Vec<bool> = figures.now().iter().map(|reading| reading.is_over).collect();
            assert_eq!(over, [true, false], "{kind}");
            let unfollowed = figures.unfollowed_events();
            assert!((400..MANY - 100).contains(&unfollowed), "{kind}: {unfollowed} events");
            assert!(figures.now()[0].devices.is_empty(), "{kind}: no figures rather than wrong ones");
            figures.end(&process);
            drop(process);
            let left = figures.0.totals.entries.load(Ordering::Relaxed);
            assert!(left < 10, "{kind}: {left} entries of a process that has ended");
        }
    }

    #[test]
    fn all_processes_together_are_bounded() {
        const MANY: u64 = 1000;
        let bound = Kept { entries: MANY, series: MANY };
        let figures = bounded(bound, bound);
        let fill = |pid| {
            let process = start(&figures, pid, format!("{pid}.mtr"));
            let blocks: Vec<Event> = (0..MANY * 3 / 4).map(|n| event(Action::Alloc, n << 30, 512)).collect();
            process.apply(&blocks);
            process
        };
        let (first, second) = (fill(1), fill(2));
        let over = || figures.now().iter().map(|reading| reading.is_over).collect::<Vec<bool>>();
        assert_eq!(over(), [false, true]);
        figures.end(&first);
        drop(first);
        let third = fill(3);
        assert_eq!(over(), [true, false]);
        drop((second, third));
    }

    #[test]
    fn series_and_names_are_bounded() {
        let figures = Figures::default();
        let process = start(&figures, 7, "7.mtr".to_owned());
        let path = format!("/usr/lib/{}.so", "x".repeat(200));
        (0..2 * MAX_MODULES as u32).for_each(|id| {
            process.define(&Definition::Module { id: ModuleId(id), build_id: "", path: &path });
        });
        let own = |id: u32| Event {
            module: ModuleId(id),
            source: Source::Driver,
            api: Api::cuMemAlloc_v2,
            ..event(Action::Alloc, 1 << 30, 1)
        };
        process.apply(&[own(1)]);
        let [reading] = &figures.now()[..] else { panic!("one process") };
        assert_eq!(reading.devices[&0].by_owner, BTreeMap::from([("x".repeat(MAX_NAME), 1)]));
        process.apply(&(0..=BOUNDS.process.series as u32).map(own).collect::<Vec<_>>());
        assert!(figures.now()[0].is_over);
    }

    #[test]
    fn too_many_devices_end_the_figures_of_their_process_only() {
        let figures = Figures::default();
        let (bad, good) = (start(&figures, 1, "1.mtr".to_owned()), start(&figures, 2, "2.mtr".to_owned()));
        let devices: Vec<Event> = (0..300).map(|device| Event { device, ..event(Action::Oom, 0, 1) }).collect();
        bad.apply(&devices);
        bad.apply(&[event(Action::Oom, 0, 1)]);
        good.apply(&[event(Action::Oom, 0, 1)]);
        let ended: Vec<_> = figures.now().iter().map(|reading| (reading.is_over, reading.devices.len())).collect();
        assert_eq!(ended, [(true, 0), (false, 1)]);
    }
}
