//! The CUDA calls and named ranges that later events need: what they have allocated, mapped, captured or begun, and not
//! ended.

use std::collections::{BTreeMap, HashMap, VecDeque};

use memtrace_input::AddressBuildHasher;
use memtrace_replay::PhysicalMemory;
use memtrace_trace::api::{Effect, MemoryKind};
use memtrace_trace::event::{Action, Event, Flags, Source};

/// The number of frees that can still turn out to have failed, as in the replay.
const MAX_UNDOABLE_FREES: usize = 256;
/// The number of open ranges that are followed, as in the reports.
const MAX_OPEN_RANGES: usize = 1024;

/// The number of captures that are kept, as in the reports.
const MAX_CAPTURES: usize = 4096;

/// Physical memory behind a handle of the driver.
#[derive(Default)]
struct Handle {
    /// The calls that created, imported or retained it.
    events: Vec<Event>,
    /// The call that gave up the last reference while the memory was mapped.
    released: Option<Event>,
    references: u32,
    mappings: u32,
}

/// The calls so far that later events need. Memory use grows with what is in use.
#[derive(Default)]
pub(super) struct Calls {
    /// By address: the calls that allocated the memory there. A runtime call follows the driver call nested in it.
    allocations: HashMap<u64, Vec<Event>, AddressBuildHasher>,
    /// By address: the openings of memory of other processes.
    imports: HashMap<u64, Vec<Event>, AddressBuildHasher>,
    /// By handle.
    handles: HashMap<u64, Handle, AddressBuildHasher>,
    /// By address.
    mappings: BTreeMap<u64, Event>,
    reservations: BTreeMap<u64, Event>,
    /// By stream-ordered pool: its last totals.
    pool_totals: BTreeMap<u64, Event>,
    /// By exported address.
    exports: BTreeMap<u64, Event>,
    /// The last frees: `seq` of the free, address, and the calls that had allocated.
    freed: VecDeque<(u64, u64, Vec<Event>)>,
    /// By handle of an executable CUDA graph: the capture and the calls about it. By handle of a graph: its capture.
    executables: BTreeMap<u64, Vec<Event>>,
    captures: BTreeMap<u64, Vec<Event>>,
    open_captures: Vec<Event>,
    ranges: Vec<Event>,
}

impl Calls {
    /// Observes the start or the end of a named range.
    pub(super) fn observe_range(&mut self, e: &Event) {
        if e.action == Action::RangeStart {
            if self.ranges.len() < MAX_OPEN_RANGES {
                self.ranges.push(*e);
            }
            return;
        }
        let is_it = |open: &Event| match (e.label_id(), e.range_number()) {
            (0, 0) => open.range_number() == 0 && (open.thread, open.range_domain()) == (e.thread, e.range_domain()),
            (0, number) => open.range_number() == number,
            (label, _) => open.label_id() == label && open.thread == e.thread,
        };
        let elsewhere = |open: &Event| e.label_id() != 0 && open.label_id() == e.label_id();
        let index = self.ranges.iter().rposition(is_it).or_else(|| self.ranges.iter().rposition(elsewhere));
        index.map(|index| self.ranges.remove(index));
    }

    /// Observes a CUDA call. `memory` is the state after it.
    pub(super) fn observe(&mut self, e: &Event, memory: &PhysicalMemory) {
        match e.action {
            Action::Retract => self.undo_free(e.retracted_seq()),
            Action::Graph => self.graph_call(e),
            _ if e.result != 0 => {}
            Action::Alloc | Action::SegmentAlloc => self.allocated(e, memory),
            Action::FreeRequested | Action::FreeCompleted | Action::SegmentFree => self.freed(e, memory),
            Action::Totals => drop(self.pool_totals.insert(e.pool_handle(), *e)),
            Action::Map => {
                self.mappings.insert(e.addr, *e);
                if let Some(handle) = self.handles.get_mut(&e.memory_handle()) {
                    handle.mappings += 1;
                }
            }
            Action::Unmap => self.unmapped(e),
            Action::Reserve => drop(self.reservations.insert(e.addr, *e)),
            Action::Unreserve => drop(self.reservations.remove(&e.addr)),
            _ => {}
        }
    }

    fn allocated(&mut self, e: &Event, memory: &PhysicalMemory) {
        if e.api.exports() {
            self.exports.insert(e.addr, *e);
            return;
        }
        let names_owner = e.source == Source::Runtime && e.flags.contains(Flags::HAS_NESTED);
        if names_owner && let Some(calls) = self.allocations.get_mut(&e.addr).or(self.imports.get_mut(&e.addr)) {
            calls.push(*e);
            return;
        }
        match e.api.memory_kind().unwrap_or(MemoryKind::Device) {
            _ if e.api.retains() => self.retained(e),
            MemoryKind::Address => {}
            MemoryKind::Imported => self.imports.entry(e.addr).or_default().push(*e),
            MemoryKind::Physical => {
                self.handles.insert(e.memory_handle(), Handle { events: vec![*e], references: 1, ..Handle::default() });
            }
            _ if memory.find(e.addr).is_some() => drop(self.allocations.insert(e.addr, vec![*e])),
            _ => {}
        }
    }

    fn retained(&mut self, e: &Event) {
        let is_import = e.api.memory_kind() == Some(MemoryKind::Imported);
        if is_import || self.handles.contains_key(&e.memory_handle()) {
            let handle = self.handles.entry(e.memory_handle()).or_default();
            handle.references += 1;
            handle.events.push(*e);
        }
    }

    fn freed(&mut self, e: &Event, memory: &PhysicalMemory) {
        match e.api.memory_kind() {
            Some(MemoryKind::Physical) => {
                let Some(handle) = self.handles.get_mut(&e.memory_handle()) else { return };
                handle.references = handle.references.saturating_sub(1);
                // The first call created it.
                if handle.references > 0 && handle.events.len() > 1 {
                    handle.events.pop();
                } else if handle.references == 0 {
                    handle.released = Some(*e);
                }
                self.drop_unused_handle(e.memory_handle());
            }
            Some(MemoryKind::Imported) => {
                if !e.flags.contains(Flags::NESTED)
                    && let Some(opened) = self.imports.get_mut(&e.addr)
                {
                    opened.pop();
                    if memory.find(e.addr).is_none() {
                        self.imports.remove(&e.addr);
                    }
                }
            }
            _ if memory.find(e.addr).is_none() => {
                self.exports.remove(&e.addr);
                if let Some(calls) = self.allocations.remove(&e.addr) {
                    self.freed.push_back((e.seq, e.addr, calls));
                    if self.freed.len() > MAX_UNDOABLE_FREES {
                        self.freed.pop_front();
                    }
                }
            }
            _ => {}
        }
    }

    fn undo_free(&mut self, seq: u64) {
        if let Some(at) = self.freed.iter().rposition(|(freed, ..)| *freed == seq)
            && let Some((_, addr, calls)) = self.freed.remove(at)
        {
            self.allocations.insert(addr, calls);
        }
    }

    fn unmapped(&mut self, e: &Event) {
        let end = e.addr.saturating_add(e.size.max(1));
        let starts: Vec<u64> = self.mappings.range(e.addr..end).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(map) = self.mappings.remove(&start) else { continue };
            if let Some(handle) = self.handles.get_mut(&map.memory_handle()) {
                handle.mappings = handle.mappings.saturating_sub(1);
                self.drop_unused_handle(map.memory_handle());
            }
        }
    }

    fn drop_unused_handle(&mut self, id: u64) {
        if self.handles.get(&id).is_some_and(|handle| handle.references == 0 && handle.mappings == 0) {
            self.handles.remove(&id);
        }
    }

    fn graph_call(&mut self, e: &Event) {
        match e.api.effect() {
            Some(Effect::BeginsCapture) if e.result == 0 && self.open_captures.len() < MAX_CAPTURES => {
                self.open_captures.push(*e);
            }
            Some(Effect::EndsCapture) => {
                let is_it = |open: &Event| (open.stream, open.device) == (e.stream, e.device);
                let began = self.open_captures.iter().rposition(is_it).map(|at| self.open_captures.remove(at));
                if e.result == 0 {
                    self.captures.insert(e.graph(), began.into_iter().chain([*e]).collect());
                    if self.captures.len() > MAX_CAPTURES {
                        self.captures.pop_first();
                    }
                }
            }
            Some(Effect::Instantiates) if e.result == 0 => {
                let mut calls = self.captures.get(&e.graph()).cloned().unwrap_or_default();
                calls.push(*e);
                self.executables.insert(e.executable_graph(), calls);
            }
            Some(Effect::Uploads) if e.result == 0 => {
                if let Some(calls) = self.executables.get_mut(&e.executable_graph()) {
                    calls.push(*e);
                }
            }
            Some(Effect::DestroysGraph) => drop(self.executables.remove(&e.executable_graph())),
            _ => {}
        }
    }

    /// The calls, in no particular order. Some occur twice. `last` is the number of the last event, where the effect of
    /// a released handle does not come before the mappings that keep its memory.
    pub(super) fn into_events(self, last: u64) -> Vec<Event> {
        let handles = self.handles.into_values().flat_map(|handle| {
            let released = handle.released.filter(|_| handle.references == 0).map(|e| Event { seq: last, ..e });
            handle.events.into_iter().chain(released)
        });
        let lists = self.allocations.into_values().chain(self.imports.into_values());
        let graphs = self.executables.into_values().chain(self.captures.into_values()).flatten();
        let single = self.mappings.into_values().chain(self.reservations.into_values());
        let single = single.chain(self.pool_totals.into_values()).chain(self.exports.into_values());
        let open = self.open_captures.into_iter().chain(self.ranges);
        lists.flatten().chain(handles).chain(graphs).chain(single).chain(open).collect()
    }
}
