//! Finds device memory that one process allocated and another opened (CUDA IPC): matches what a process opened with
//! what other processes of the launch had allocated.
//!
//! The driver reports the size of an opened allocation, but not its owner. The events of an export and of an opening
//! have a hash of the handle that passed between the two, and the process with the export of that handle is the
//! exporter. Memory that was opened without such a handle (file descriptors, recordings before format 1.4) is matched
//! by size: a process is taken for the exporter if it alone had memory of exactly this size on this GPU when the memory
//! was opened. Otherwise the exporter stays unknown. The driver's events are followed only if a process of the run
//! opened memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use memtrace_trace::api::MemoryKind;
use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::{ContextId, StackId};

use crate::launch::SharedMemorySummary;
use memtrace_input::load::Process;
use memtrace_insight::locations::Locations;

/// Memory of one size on one GPU: the number of the GPU among those of the launch, and the bytes.
type Kind = (usize, u64);

/// A process of the launch, and what its driver's events show.
pub(crate) struct SharingProcess<'a> {
    pub(crate) process: &'a Process,
    /// The rank to which it belongs.
    pub(crate) rank: Option<u32>,
    /// The identity of each GPU across processes, by ordinal.
    pub(crate) gpus: BTreeMap<i16, String>,
    /// By ordinal: the time of the peak of allocated bytes, in nanoseconds since the Unix epoch.
    pub(crate) peaks_ns: BTreeMap<i16, u64>,
    /// `None` if no process of the run opened memory.
    pub(crate) driver: Option<&'a DriverCalls>,
}

/// Memory that a process opened.
#[derive(Clone, Copy, Debug)]
struct Import {
    size: u64,
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

/// The driver memory of one process over time, with the GPUs of the launch.
struct DriverMemory<'a> {
    calls: &'a DriverCalls,
    /// The imports, with their kinds.
    imports: Vec<(Kind, &'a Import)>,
    /// By kind: the number of allocations after each change, by time.
    own: BTreeMap<Kind, Vec<(u64, u64)>>,
    /// By kind: the ordinal in this process.
    devices: BTreeMap<Kind, i16>,
}

impl<'a> DriverMemory<'a> {
    fn new(calls: &'a DriverCalls, gpu: impl Fn(i16) -> Option<usize>) -> DriverMemory<'a> {
        let with_kind = |import: &'a Import| Some(((gpu(import.device)?, import.size), import));
        // By kind: the changes of all devices that count as this GPU.
        let mut changes: BTreeMap<Kind, Vec<(u64, i64)>> = BTreeMap::new();
        let mut devices: BTreeMap<Kind, (u64, i16)> = BTreeMap::new();
        for (&(device, size), of_device) in &calls.own {
            let Some(gpu) = gpu(device) else { continue };
            let known = changes.entry((gpu, size)).or_default();
            known.extend(of_device);
            let latest = (of_device.last().map_or(0, |(ns, _)| *ns), device);
            let known = devices.entry((gpu, size)).or_insert(latest);
            *known = latest.max(*known);
        }
        let counts = |(kind, mut changes): (Kind, Vec<(u64, i64)>)| {
            changes.sort_by_key(|(ns, _)| *ns);
            let mut count = 0u64;
            let count_after = |(ns, by): (u64, i64)| {
                count = count.saturating_add_signed(by);
                (ns, count)
            };
            (kind, changes.into_iter().map(count_after).collect())
        };
        DriverMemory {
            calls,
            imports: calls.imports.iter().filter_map(with_kind).collect(),
            own: changes.into_iter().map(counts).collect(),
            devices: devices.into_iter().map(|(kind, (_, device))| (kind, device)).collect(),
        }
    }

    /// The number of own allocations of a kind at a time.
    fn live(&self, kind: Kind, ns: u64) -> u64 {
        let Some(changes) = self.own.get(&kind) else { return 0 };
        let after = changes.partition_point(|(at, _)| *at <= ns);
        after.checked_sub(1).and_then(|at| changes.get(at)).map_or(0, |(_, count)| *count)
    }

    /// The allocation that was last exported with this handle before `ns`. Clocks of two recordings differ by little,
    /// so an export that seems later than its opening counts if there is no other.
    fn export(&self, handle: u64, ns: u64) -> Option<Exported> {
        let exports = self.calls.exports.get(&handle)?;
        let after = exports.partition_point(|(at, _)| *at <= ns);
        let (_, exported) = exports.get(after.saturating_sub(1))?;
        self.calls.exported.get(*exported).copied()
    }
}

/// An own allocation that is not freed yet.
#[derive(Debug)]
struct OwnAllocation {
    size: u64,
    device: i16,
    /// Its index in [`DriverCalls::exported`], once it has a handle.
    exported: Option<usize>,
}

/// The driver's calls of one process: its own memory and that of other processes, over time.
#[derive(Debug, Default)]
pub(crate) struct DriverCalls {
    imports: Vec<Import>,
    /// By device and size: the changes of the number of allocations, by time.
    own: BTreeMap<(i16, u64), Vec<(u64, i64)>>,
    /// By the hash of the handle: the time of the export and the index in `exported`, by time.
    exports: HashMap<u64, Vec<(u64, usize)>>,
    exported: Vec<Exported>,
    /// By address: the own allocations that are not freed yet.
    live: BTreeMap<u64, OwnAllocation>,
    /// By address: the index of an open import, and how often it was opened.
    open: HashMap<u64, (usize, u32)>,
    /// Handles of imported physical memory, with the call that imported them.
    handles: HashMap<u64, (StackId, ContextId)>,
}

impl DriverCalls {
    /// Observes an event.
    #[inline]
    pub(crate) fn observe(&mut self, e: &Event, calibration: &Calibration) {
        if matches!(e.source, Source::Driver | Source::Runtime) && e.result == 0 {
            self.apply(e, calibration.epoch_ns(e.ticks));
        }
    }

    /// Applies a call that succeeded.
    fn apply(&mut self, e: &Event, ns: u64) {
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
                self.live.insert(e.addr, OwnAllocation { size: e.size, device: e.device, exported: None });
                self.own.entry((e.device, e.size)).or_default().push((ns, 1));
            }
            (Action::FreeCompleted, Some(MemoryKind::Device | MemoryKind::Physical)) => {
                if e.api.memory_kind() == Some(MemoryKind::Physical) {
                    self.handles.remove(&e.memory_handle());
                }
                if let Some(own) = self.live.remove(&e.addr) {
                    self.own.entry((own.device, own.size)).or_default().push((ns, -1));
                    if let Some(exported) = own.exported.and_then(|at| self.exported.get_mut(at)) {
                        exported.freed_ns = ns;
                    }
                }
            }
            _ => {}
        }
    }

    /// Applies the export of the allocation that contains `addr`.
    fn export(&mut self, addr: u64, handle: u64, ns: u64) {
        let next = self.exported.len();
        let below = self.live.range_mut(..=addr).next_back();
        let own = below.filter(|(base, own)| addr - **base < own.size).map(|(_, own)| own);
        let device = own.as_ref().map(|own| own.device);
        let at = own.map_or(next, |own| *own.exported.get_or_insert(next));
        if at == next {
            self.exported.push(Exported { device, freed_ns: u64::MAX });
        }
        self.exports.entry(handle).or_default().push((ns, at));
    }

    fn open(&mut self, e: &Event, handle: u64, ns: u64, (stack, context): (StackId, ContextId)) {
        if let Some((_, times)) = self.open.get_mut(&e.addr) {
            *times += 1;
            return;
        }
        self.open.insert(e.addr, (self.imports.len(), 1));
        let (device, size) = (e.device, e.size);
        self.imports.push(Import { size, handle, device, opened_ns: ns, closed_ns: u64::MAX, stack, context });
    }

    fn close(&mut self, addr: u64, ns: u64) {
        let Some((at, times)) = self.open.get_mut(&addr) else { return };
        *times -= 1;
        if *times == 0 {
            if let Some(import) = self.imports.get_mut(*at) {
                import.closed_ns = ns;
            }
            self.open.remove(&addr);
        }
    }
}

/// The memory that processes of the launch opened from each other, by peak in descending order.
pub(crate) fn shared_memory<'a>(processes: &[SharingProcess<'a>]) -> Vec<SharedMemorySummary> {
    let mut gpus: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in processes.iter().flat_map(|one| one.gpus.values()) {
        let next = gpus.len();
        gpus.entry(gpu).or_insert(next);
    }
    let memory = |one: &SharingProcess<'a>| {
        let gpu = |device: i16| one.gpus.get(&device).and_then(|gpu| gpus.get(gpu.as_str())).copied();
        Some(DriverMemory::new(one.driver?, gpu))
    };
    let Some(memories) = processes.iter().map(memory).collect::<Option<Vec<DriverMemory<'_>>>>() else {
        return Vec::new();
    };
    let mut shared = Vec::new();
    for (importer, memory) in memories.iter().enumerate() {
        let mut groups: BTreeMap<ExporterAndDevice, Vec<(Kind, &Import)>> = BTreeMap::new();
        for &(kind, import) in &memory.imports {
            let has = |other: &usize| *other != importer && is_exporter(&memories[*other], (kind, import));
            let mut exporters = (0..memories.len()).filter(has);
            let exporter = exporters.next().filter(|_| exporters.next().is_none());
            groups.entry((exporter, import.device)).or_default().push((kind, import));
        }
        for ((exporter, device), imports) in groups {
            shared.push(summary(processes, &memories, (importer, device), exporter, &imports));
        }
    }
    shared.sort_by_key(|one| (Reverse(one.peak_bytes), one.importer_pid, one.exporter_pid, one.importer_device));
    shared
}

/// The index of the process that exported memory, if it is known, and the importer's device.
type ExporterAndDevice = (Option<usize>, i16);

/// Whether a process can be the exporter of memory: it made the handle, or there is none and it had memory of this
/// size.
fn is_exporter(memory: &DriverMemory<'_>, (kind, import): (Kind, &Import)) -> bool {
    match import.handle {
        0 => memory.live(kind, import.opened_ns) > 0,
        handle => memory.export(handle, import.opened_ns).is_some(),
    }
}

fn summary(
    processes: &[SharingProcess<'_>],
    memories: &[DriverMemory<'_>],
    (importer, importer_device): (usize, i16),
    exporter: Option<usize>,
    imports: &[(Kind, &Import)],
) -> SharedMemorySummary {
    let open_at = |ns: u64| imports.iter().filter(move |(_, one)| one.opened_ns <= ns && ns < one.closed_ns);
    let bytes_at = |ns: u64| open_at(ns).map(|(_, one)| one.size).sum::<u64>();
    let opened = imports.iter().map(|(_, one)| one.opened_ns);
    let of_importer = &processes[importer];
    let of_exporter = exporter.map(|at| &processes[at]);
    let exporter_device =
        exporter.and_then(|at| imports.first().and_then(|import| device_of_exporter(&memories[at], *import)));
    let peak_ns = of_exporter.zip(exporter_device).and_then(|(one, device)| one.peaks_ns.get(&device).copied());
    let largest = imports.iter().map(|(_, one)| one).max_by_key(|one| (one.size, Reverse(one.opened_ns)));
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
fn device_of_exporter(exporter: &DriverMemory<'_>, (kind, import): (Kind, &Import)) -> Option<i16> {
    let exported = exporter.export(import.handle, import.opened_ns).and_then(|one| one.device);
    exported.or_else(|| exporter.devices.get(&kind).copied())
}

/// The most bytes that were open although the exporter had freed them.
///
/// With a handle the allocation is known. Without one, more allocations of a size were open than the exporter still
/// had.
fn kept_after_free(exporter: &DriverMemory<'_>, imports: &[(Kind, &Import)]) -> u64 {
    // The bytes that are kept from a time on: positive at the free, negative at the close.
    let mut kept_changes: Vec<(u64, i64)> = Vec::new();
    let mut by_kind: BTreeMap<Kind, Vec<&Import>> = BTreeMap::new();
    for &(kind, import) in imports {
        if let Some(exported) = exporter.export(import.handle, import.opened_ns) {
            let from = exported.freed_ns.max(import.opened_ns);
            if from < import.closed_ns && from != u64::MAX {
                let bytes = i64::try_from(import.size).unwrap_or(i64::MAX);
                kept_changes.extend([(from, bytes), (import.closed_ns, -bytes)]);
            }
        } else {
            by_kind.entry(kind).or_default().push(import);
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

    fn follow(events: &[(u64, Event)]) -> DriverCalls {
        let mut calls = DriverCalls::default();
        events.iter().for_each(|(ns, e)| calls.apply(e, *ns));
        calls
    }

    fn memory(calls: &DriverCalls) -> DriverMemory<'_> {
        DriverMemory::new(calls, |device| usize::try_from(device).ok())
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
        let (exporter, importer) = (memory(&exporter), memory(&importer));
        let counts = [0, 1, 2, 5, 9].map(|ns| exporter.live((0, 64), ns));
        assert_eq!(counts, [0, 1, 2, 1, 0]);
        let times: Vec<_> = importer.imports.iter().map(|(_, one)| (one.opened_ns, one.closed_ns)).collect();
        assert_eq!(times, [(3, 7), (4, 8)]);
        // At 5, two of the exporter's allocations are open and one of them is freed.
        assert_eq!(kept_after_free(&exporter, &importer.imports), 64);
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
        let calls = (exporter(71), exporter(72));
        let (first, second) = (memory(&calls.0), memory(&calls.1));
        let opened = Event { stream: 72, ..driver(Api::cuIpcOpenMemHandle_v2, Action::Alloc, 0x7000, 64) };
        let importer = follow(&[(3, opened), (8, driver(Api::cuIpcCloseMemHandle, Action::FreeCompleted, 0x7000, 0))]);
        let [import] = memory(&importer).imports[..] else { panic!("{:?}", importer.imports) };
        assert!(first.live(import.0, 3) > 0 && second.live(import.0, 3) > 0, "sizes are ambiguous");
        assert_eq!([&first, &second].map(|one| is_exporter(one, import)), [false, true]);
        assert_eq!(calls.1.exported.len(), 1);
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
        let found: Vec<_> =
            memory(&importer).imports.iter().map(|(kind, one)| (*kind, one.opened_ns, one.closed_ns)).collect();
        assert_eq!(found, [((0, 32), 2, 3)]);
    }
}
