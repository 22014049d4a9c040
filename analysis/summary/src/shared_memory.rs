//! Finds device memory that one process allocated and another opened (CUDA IPC): matches what a process opened with
//! what other processes of the launch had allocated.
//!
//! The driver reports the size of an opened allocation, but not its owner. The events of an export and of an opening have
//! a hash of the handle that passed between the two, and the process with the export of that handle is the exporter.
//! Memory that was opened without such a handle (file descriptors, recordings before format 1.4) is matched by size: a
//! process is taken for the exporter if it alone had memory of exactly this size on this GPU when the memory was opened.
//! Otherwise the exporter stays unknown. The pass over the driver's events runs only if a process opened memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use memtrace_trace::api::MemoryKind;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::{ContextId, StackId};

use crate::launch::SharedMemorySummary;
use memtrace_input::load::Process;
use memtrace_insight::locations::Locations;

/// Memory of one size on one GPU: the GPU's number in this pass, and the bytes.
type Kind = (usize, u64);

/// A process of the launch, with what this pass has to know about it.
pub(crate) struct SharingProcess<'a> {
    pub(crate) process: &'a Process,
    /// The rank to which it belongs.
    pub(crate) rank: Option<u32>,
    /// The identity of each GPU across processes, by ordinal.
    pub(crate) gpus: BTreeMap<i16, String>,
    /// By ordinal: the time of the peak of allocated bytes, in nanoseconds since the Unix epoch.
    pub(crate) peaks_ns: BTreeMap<i16, u64>,
    /// Whether it opened memory of another process.
    pub(crate) has_imports: bool,
}

/// Memory that a process opened.
#[derive(Clone, Copy, Debug)]
struct Import {
    kind: Kind,
    /// The hash of the handle; 0 if none was recorded.
    handle: u64,
    device: i16,
    opened_ns: u64,
    /// `u64::MAX` if it was never closed.
    closed_ns: u64,
    stack: StackId,
    context: ContextId,
}

/// An own allocation for which a process made a handle.
#[derive(Clone, Copy, Debug)]
struct Exported {
    /// `None` if the allocation precedes the recording.
    device: Option<i16>,
    /// `u64::MAX` if it was never freed.
    freed_ns: u64,
}

/// The driver memory of one process over time.
#[derive(Default)]
struct DriverMemory {
    imports: Vec<Import>,
    /// By kind: the number of allocations after each change, by time.
    own: BTreeMap<Kind, Vec<(u64, u64)>>,
    /// By kind: the ordinal in this process.
    devices: BTreeMap<Kind, i16>,
    /// By the hash of the handle: the time of the export and the index in `exported`, by time.
    exports: HashMap<u64, Vec<(u64, usize)>>,
    exported: Vec<Exported>,
}

impl DriverMemory {
    /// The number of own allocations of a kind at a time.
    fn live(&self, kind: Kind, ns: u64) -> u64 {
        let Some(changes) = self.own.get(&kind) else { return 0 };
        let after = changes.partition_point(|(at, _)| *at <= ns);
        after.checked_sub(1).and_then(|at| changes.get(at)).map_or(0, |(_, count)| *count)
    }

    /// The allocation that was last exported with this handle before `ns`. Clocks of two recordings differ by little,
    /// so an export that seems later than its opening counts if there is no other.
    fn export(&self, handle: u64, ns: u64) -> Option<Exported> {
        let exports = self.exports.get(&handle)?;
        let after = exports.partition_point(|(at, _)| *at <= ns);
        let (_, exported) = exports.get(after.saturating_sub(1))?;
        self.exported.get(*exported).copied()
    }
}

/// An own allocation that is not freed yet.
struct OwnAllocation {
    kind: Kind,
    device: i16,
    /// Its index in [`DriverMemory::exported`], once it has a handle.
    exported: Option<usize>,
}

/// Follows the driver's calls of one process.
struct Follower<'a> {
    gpu: &'a dyn Fn(i16) -> Option<usize>,
    memory: DriverMemory,
    own: BTreeMap<u64, OwnAllocation>,
    /// By address: the index of an open import, and how often it was opened.
    open: HashMap<u64, (usize, u32)>,
    /// Handles of imported physical memory, with the call that imported them.
    handles: HashMap<u64, (StackId, ContextId)>,
}

impl Follower<'_> {
    fn apply(&mut self, e: &Event, ns: u64) {
        if !matches!(e.source, Source::Driver | Source::Runtime) || e.result != 0 {
            return;
        }
        let counted = e.source == Source::Runtime && e.flags.contains(Flags::HAS_NESTED);
        match (e.action, e.api.memory_kind()) {
            (Action::Alloc, Some(MemoryKind::Imported)) if e.api.retains() => {
                self.handles.insert(e.memory_handle(), (e.stack, e.context));
            }
            (Action::Alloc, Some(MemoryKind::Imported)) if !counted => {
                self.open(e, e.ipc_hash(), ns, (e.stack, e.context));
            }
            (Action::Alloc, Some(MemoryKind::Address)) if e.api.exports() => self.export(e.addr, e.ipc_hash(), ns),
            (Action::Map, _) => {
                if let Some(&from) = self.handles.get(&e.memory_handle()) {
                    self.open(e, 0, ns, from);
                }
            }
            (Action::FreeCompleted, Some(MemoryKind::Imported)) if !e.flags.contains(Flags::NESTED) => {
                self.close(e.addr, ns);
            }
            (Action::Unmap, _) => self.close(e.addr, ns),
            (Action::Alloc, Some(MemoryKind::Device | MemoryKind::Physical)) if !counted => {
                let Some(gpu) = (self.gpu)(e.device) else { return };
                let kind = (gpu, e.size);
                self.own.insert(e.addr, OwnAllocation { kind, device: e.device, exported: None });
                self.memory.devices.insert(kind, e.device);
                self.change(kind, ns, 1);
            }
            (Action::FreeCompleted, Some(MemoryKind::Device | MemoryKind::Physical)) => {
                if e.api.memory_kind() == Some(MemoryKind::Physical) {
                    self.handles.remove(&e.memory_handle());
                }
                if let Some(own) = self.own.remove(&e.addr) {
                    self.change(own.kind, ns, -1);
                    if let Some(exported) = own.exported.and_then(|at| self.memory.exported.get_mut(at)) {
                        exported.freed_ns = ns;
                    }
                }
            }
            _ => {}
        }
    }

    fn change(&mut self, kind: Kind, ns: u64, by: i64) {
        let changes = self.memory.own.entry(kind).or_default();
        let count = changes.last().map_or(0, |(_, count)| *count);
        changes.push((ns, count.saturating_add_signed(by)));
    }

    /// Takes the export of the allocation that contains `addr`.
    fn export(&mut self, addr: u64, handle: u64, ns: u64) {
        let next = self.memory.exported.len();
        let below = self.own.range_mut(..=addr).next_back();
        let own = below.filter(|(base, own)| addr - **base < own.kind.1).map(|(_, own)| own);
        let device = own.as_ref().map(|own| own.device);
        let at = own.map_or(next, |own| *own.exported.get_or_insert(next));
        if at == next {
            self.memory.exported.push(Exported { device, freed_ns: u64::MAX });
        }
        self.memory.exports.entry(handle).or_default().push((ns, at));
    }

    fn open(&mut self, e: &Event, handle: u64, ns: u64, (stack, context): (StackId, ContextId)) {
        if let Some((_, times)) = self.open.get_mut(&e.addr) {
            *times += 1;
            return;
        }
        let device = e.device;
        let Some(gpu) = (self.gpu)(device) else { return };
        self.open.insert(e.addr, (self.memory.imports.len(), 1));
        let kind = (gpu, e.size);
        self.memory.imports.push(Import { kind, handle, device, opened_ns: ns, closed_ns: u64::MAX, stack, context });
    }

    fn close(&mut self, addr: u64, ns: u64) {
        let Some((at, times)) = self.open.get_mut(&addr) else { return };
        *times -= 1;
        if *times == 0 {
            if let Some(import) = self.memory.imports.get_mut(*at) {
                import.closed_ns = ns;
            }
            self.open.remove(&addr);
        }
    }
}

/// The memory that processes of the launch opened from each other, by peak in descending order.
pub(crate) fn shared_memory(processes: &[SharingProcess<'_>]) -> Vec<SharedMemorySummary> {
    if !processes.iter().any(|one| one.has_imports) {
        return Vec::new();
    }
    let mut gpus: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in processes.iter().flat_map(|one| one.gpus.values()) {
        let next = gpus.len();
        gpus.entry(gpu).or_insert(next);
    }
    let followed = processes.iter().map(|one| {
        let gpu = |device: i16| one.gpus.get(&device).and_then(|gpu| gpus.get(gpu.as_str())).copied();
        let mut follower = Follower {
            gpu: &gpu,
            memory: DriverMemory::default(),
            own: BTreeMap::new(),
            open: HashMap::new(),
            handles: HashMap::new(),
        };
        let calibration = one.process.recording().calibration();
        one.process.recording().stream(&mut |events| {
            events.iter().for_each(|e| follower.apply(e, calibration.epoch_ns(e.ticks)));
        });
        follower.memory
    });
    let memories: Vec<DriverMemory> = followed.collect();
    let mut shared = Vec::new();
    for (importer, memory) in memories.iter().enumerate() {
        // By exporter and device.
        let mut groups: BTreeMap<(Option<usize>, i16), Vec<&Import>> = BTreeMap::new();
        for import in &memory.imports {
            let has = |other: &usize| *other != importer && is_exporter(&memories[*other], import);
            let mut exporters = (0..memories.len()).filter(has);
            let exporter = exporters.next().filter(|_| exporters.next().is_none());
            groups.entry((exporter, import.device)).or_default().push(import);
        }
        for ((exporter, device), imports) in groups {
            shared.push(summary(processes, &memories, (importer, device), exporter, &imports));
        }
    }
    shared.sort_by_key(|one| (Reverse(one.peak_bytes), one.importer_pid, one.exporter_pid, one.importer_device));
    shared
}

/// Whether a process can be the exporter of memory: it made the handle, or there is none and it had memory of this size.
fn is_exporter(memory: &DriverMemory, import: &Import) -> bool {
    match import.handle {
        0 => memory.live(import.kind, import.opened_ns) > 0,
        handle => memory.export(handle, import.opened_ns).is_some(),
    }
}

fn summary(
    processes: &[SharingProcess<'_>],
    memories: &[DriverMemory],
    (importer, importer_device): (usize, i16),
    exporter: Option<usize>,
    imports: &[&Import],
) -> SharedMemorySummary {
    let open_at = |ns: u64| imports.iter().filter(move |one| one.opened_ns <= ns && ns < one.closed_ns);
    let bytes_at = |ns: u64| open_at(ns).map(|one| one.kind.1).sum::<u64>();
    let opened = imports.iter().map(|one| one.opened_ns);
    let of_importer = &processes[importer];
    let of_exporter = exporter.map(|at| &processes[at]);
    let exporter_device =
        exporter.and_then(|at| imports.first().and_then(|import| device_of_exporter(&memories[at], import)));
    let peak_ns = of_exporter.zip(exporter_device).and_then(|(one, device)| one.peaks_ns.get(&device).copied());
    let largest = imports.iter().max_by_key(|one| (one.kind.1, Reverse(one.opened_ns)));
    let locations = Locations::new(of_importer.process.definitions(), of_importer.process.directory());
    SharedMemorySummary {
        importer_pid: of_importer.process.pid(),
        importer_rank: of_importer.rank,
        importer_device,
        exporter_pid: of_exporter.map(|one| one.process.pid()),
        exporter_rank: of_exporter.and_then(|one| one.rank),
        exporter_device,
        peak_bytes: opened.map(bytes_at).max().unwrap_or(0),
        at_exporter_peak_bytes: peak_ns.map(bytes_at),
        end_bytes: bytes_at(u64::MAX - 1),
        kept_after_free_bytes: exporter.map_or(0, |at| kept_after_free(&memories[at], imports)),
        imports: imports.len() as u64,
        opened_at: largest.map(|one| locations.stack(one.stack, one.context)),
    }
}

/// The ordinal in the exporter of the device that has the memory. `None` if it is unknown.
fn device_of_exporter(exporter: &DriverMemory, import: &Import) -> Option<i16> {
    let exported = exporter.export(import.handle, import.opened_ns).and_then(|one| one.device);
    exported.or_else(|| exporter.devices.get(&import.kind).copied())
}

/// The most bytes that were open although the exporter had freed them.
///
/// With a handle the allocation is known. Without one, more allocations of a size were open than the exporter still had.
fn kept_after_free(exporter: &DriverMemory, imports: &[&Import]) -> u64 {
    // The bytes that are kept from a time on: positive at the free, negative at the close.
    let mut kept_changes: Vec<(u64, i64)> = Vec::new();
    let mut by_kind: BTreeMap<Kind, Vec<&Import>> = BTreeMap::new();
    for import in imports {
        if let Some(exported) = exporter.export(import.handle, import.opened_ns) {
            let from = exported.freed_ns.max(import.opened_ns);
            if from < import.closed_ns && from != u64::MAX {
                let bytes = i64::try_from(import.kind.1).unwrap_or(i64::MAX);
                kept_changes.extend([(from, bytes), (import.closed_ns, -bytes)]);
            }
        } else {
            by_kind.entry(import.kind).or_default().push(import);
        }
    }
    kept_changes.sort_unstable();
    let mut kept_now = 0i64;
    let kept_by_handle = kept_changes.iter().map(|(_, change)| {
        kept_now = kept_now.saturating_add(*change);
        kept_now.max(0).unsigned_abs()
    });
    let kept_by_handle = kept_by_handle.max().unwrap_or(0);
    let kept = |(kind, imports): (Kind, Vec<&Import>)| {
        let changes = exporter.own.get(&kind).into_iter().flatten();
        let most = changes.map(|(ns, live)| {
            let open = imports.iter().filter(|one| one.opened_ns <= *ns && *ns < one.closed_ns).count() as u64;
            open.saturating_sub(*live)
        });
        most.max().unwrap_or(0).saturating_mul(kind.1)
    };
    kept_by_handle + by_kind.into_iter().map(kept).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::api::Api;

    fn driver(api: Api, action: Action, addr: u64, size: u64) -> Event {
        Event { source: Source::Driver, api, action, addr, size, device: 0, ..Event::EMPTY }
    }

    fn follow(events: &[(u64, Event)]) -> DriverMemory {
        let mut follower = Follower {
            gpu: &|device| usize::try_from(device).ok(),
            memory: DriverMemory::default(),
            own: BTreeMap::new(),
            open: HashMap::new(),
            handles: HashMap::new(),
        };
        events.iter().for_each(|(ns, e)| follower.apply(e, *ns));
        follower.memory
    }

    #[test]
    fn memory_that_its_owner_freed_first_is_kept_by_the_importer() {
        let exporter = follow(&[
            (1, driver(Api::cuMemAlloc_v2, Action::Alloc, 0x1000, 64)),
            (2, driver(Api::cuMemAlloc_v2, Action::Alloc, 0x2000, 64)),
            (5, driver(Api::cuMemFree_v2, Action::FreeCompleted, 0x1000, 0)),
            (9, driver(Api::cuMemFree_v2, Action::FreeCompleted, 0x2000, 0)),
        ]);
        let importer = follow(&[
            (3, driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, 0x7000, 64)),
            (4, driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, 0x7000, 64)),
            (4, driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, 0x8000, 64)),
            (6, driver(Api::cuIpcCloseMemHandle, Action::FreeCompleted, 0x7000, 0)),
            (7, driver(Api::cuIpcCloseMemHandle, Action::FreeCompleted, 0x7000, 0)),
            (8, driver(Api::cuIpcCloseMemHandle, Action::FreeCompleted, 0x8000, 0)),
        ]);
        let counts = [0, 1, 2, 5, 9].map(|ns| exporter.live((0, 64), ns));
        assert_eq!(counts, [0, 1, 2, 1, 0]);
        let times: Vec<_> = importer.imports.iter().map(|one| (one.opened_ns, one.closed_ns)).collect();
        assert_eq!(times, [(3, 7), (4, 8)]);
        // At 5, two of the exporter's allocations are open and one of them is freed.
        assert_eq!(kept_after_free(&exporter, &importer.imports.iter().collect::<Vec<_>>()), 64);
    }

    #[test]
    fn a_handle_names_the_exporter_among_processes_with_memory_of_one_size() {
        let with_handle = |api, action, addr, handle| Event { stream: handle, ..driver(api, action, addr, 0) };
        let exporter = |handle: u64| {
            follow(&[
                (1, driver(Api::cuMemAlloc_v2, Action::Alloc, 0x1000, 64)),
                // Of the two events of one export, the runtime's has an address inside the allocation.
                (2, with_handle(Api::cuIpcGetMemHandle, Action::Alloc, 0x1000, handle)),
                (2, with_handle(Api::cudaIpcGetMemHandle, Action::Alloc, 0x1020, handle)),
                // Another allocation of this size is alive, so only the handle shows that the exported one is freed.
                (4, driver(Api::cuMemAlloc_v2, Action::Alloc, 0x3000, 64)),
                (5, driver(Api::cuMemFree_v2, Action::FreeCompleted, 0x1000, 0)),
            ])
        };
        let (first, second) = (exporter(71), exporter(72));
        let opened = Event { stream: 72, ..driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, 0x7000, 64) };
        let importer = follow(&[(3, opened), (8, driver(Api::cuIpcCloseMemHandle, Action::FreeCompleted, 0x7000, 0))]);
        let [import] = &importer.imports[..] else { panic!("{:?}", importer.imports) };
        assert!(first.live(import.kind, 3) > 0 && second.live(import.kind, 3) > 0, "sizes are ambiguous");
        assert_eq!([&first, &second].map(|one| is_exporter(one, import)), [false, true]);
        assert_eq!(second.exported.len(), 1);
        assert_eq!((device_of_exporter(&second, import), kept_after_free(&second, &[import])), (Some(0), 64));
    }

    #[test]
    fn imported_handles_are_open_while_they_are_mapped() {
        let mapped = Event { stream: 0x99, ..driver(Api::cuMemMap, Action::Map, 0x7000, 32) };
        let importer = follow(&[
            (1, driver(Api::cuMemImportFromShareableHandle, Action::Alloc, 0x99, 0)),
            (2, mapped),
            (3, driver(Api::cuMemUnmap, Action::Unmap, 0x7000, 32)),
        ]);
        let found: Vec<_> = importer.imports.iter().map(|one| (one.kind, one.opened_ns, one.closed_ns)).collect();
        assert_eq!(found, [((0, 32), 2, 3)]);
    }
}
