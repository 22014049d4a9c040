//! The memory that the CUDA driver allocated for this process, by owner.
//!
//! Bytes are counted once. A driver call nested in a runtime call counts; the runtime call only identifies the caller.
//! Memory behind VMM handles counts from its creation until it is both released and unmapped, as the driver keeps it. A
//! failed call counts nothing. A free that is later found to have failed is undone.

use std::collections::{BTreeMap, HashMap, VecDeque};

use memtrace_trace::api::{Api, Memory};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::ModuleId;

use memtrace_input::AddressMap;

/// The maximum number of frees that can still be retracted. A retraction follows its free on the same thread, with at
/// most a few events of other threads in between.
const RETRACTABLE: usize = 256;

/// The owner of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    /// PyTorch's caching allocator: its segments.
    CachingAllocator,
    /// Another caller, by the object that made the call.
    Module(ModuleId),
}

/// One allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// The device ordinal; -1 for host memory.
    pub device: i16,
    /// The size in bytes.
    pub size: u64,
    /// The owner.
    pub owner: Owner,
    /// The kind of memory.
    pub memory: Memory,
}

/// What an owner holds in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerUse {
    /// Bytes now.
    pub now: u64,
    /// The highest number of bytes.
    pub peak: u64,
    /// The number of allocations.
    pub allocations: u64,
    /// The value of `peak` before the last allocation.
    peak_before: u64,
}

impl OwnerUse {
    fn add(&mut self, size: u64, allocations: u64) {
        self.now += size;
        self.peak_before = self.peak;
        self.peak = self.peak.max(self.now);
        self.allocations += allocations;
    }

    fn subtract(&mut self, size: u64) {
        self.now = self.now.saturating_sub(size);
    }

    /// Undoes the last allocation, which belongs to another owner.
    fn take_back(&mut self, size: u64) {
        if self.peak == self.now {
            self.peak = self.peak_before.max(self.now.saturating_sub(size));
        }
        self.subtract(size);
        self.allocations = self.allocations.saturating_sub(1);
    }
}

#[derive(Clone, Copy, Debug)]
struct Handle {
    held: Held,
    mappings: u32,
    /// How often it must be released.
    references: u32,
}

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Place {
    /// The memory of a device, by ordinal.
    Device(i16),
    /// Memory of another process on a device, opened by this process. It counts for the other process.
    Imported(i16),
    /// Page-locked host memory.
    Host,
}

/// What an event did to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Memory was allocated. For memory behind a VMM handle, the address is the handle.
    Obtained(u64, Held),
    /// Memory was freed.
    Released(u64, Held),
    /// A free turned out to have failed.
    Restored(u64, Held),
}

/// The memory of this process, by place and owner.
#[derive(Clone, Debug, Default)]
pub struct Physical {
    held: AddressMap<Held>,
    handles: HashMap<u64, Handle>,
    /// By address: how often memory of another process was opened there.
    opened: HashMap<u64, u32>,
    mappings: BTreeMap<u64, (u64, u64)>,
    retractable: VecDeque<(u64, u64, Held)>,
    uses: BTreeMap<(Place, Owner), OwnerUse>,
    totals: BTreeMap<Place, OwnerUse>,
    /// By stream-ordered pool: its device, and the bytes that it last reported to hold.
    pools: BTreeMap<u64, (i16, u64)>,
    /// By device: the bytes of pools in use.
    pooled: BTreeMap<i16, u64>,
    failed_calls: u64,
    unmatched_frees: u64,
    effects: Vec<Effect>,
}

impl Physical {
    /// What each owner holds, by place.
    pub fn uses(&self) -> &BTreeMap<(Place, Owner), OwnerUse> {
        &self.uses
    }

    /// What all owners hold in a place.
    pub fn total(&self, place: Place) -> OwnerUse {
        self.totals.get(&place).copied().unwrap_or_default()
    }

    /// Bytes on a device that are currently held outside PyTorch's caching allocator.
    pub fn outside_allocator(&self, device: i16) -> u64 {
        let place = Place::Device(device);
        let allocator = self.uses.get(&(place, Owner::CachingAllocator)).map_or(0, |u| u.now);
        self.total(place).now.saturating_sub(allocator)
    }

    /// The owners that currently hold memory outside PyTorch's caching allocator on a device, with their bytes.
    pub fn outside_now(&self, device: i16) -> Vec<(Owner, u64)> {
        let held = self.uses.iter().filter(|((place, owner), held)| {
            *place == Place::Device(device) && *owner != Owner::CachingAllocator && held.now > 0
        });
        held.map(|((_, owner), held)| (*owner, held.now)).collect()
    }

    /// Bytes of a device that its stream-ordered pools hold but do not use, according to their last reports.
    pub fn pool_spare(&self, device: i16) -> u64 {
        let held: u64 = self.pools.values().filter(|(d, _)| *d == device).map(|(_, held)| held).sum();
        held.saturating_sub(self.pooled.get(&device).copied().unwrap_or(0))
    }

    /// The allocation at an address; `None` if there is none.
    pub fn find(&self, addr: u64) -> Option<&Held> {
        self.held.get(&addr)
    }

    /// The number of calls that failed.
    pub fn failed_calls(&self) -> u64 {
        self.failed_calls
    }

    /// The number of frees of memory whose allocation was not recorded.
    pub fn unmatched_frees(&self) -> u64 {
        self.unmatched_frees
    }

    /// Assigns the memory at this address to PyTorch's caching allocator, which reported it as a segment. The caller of
    /// CUDA can be another object.
    pub fn claim(&mut self, addr: u64) {
        let Some(held) = self.held.get_mut(&addr).filter(|held| held.owner != Owner::CachingAllocator) else { return };
        let before = std::mem::replace(&mut held.owner, Owner::CachingAllocator);
        let (place, size) = (Self::place_of(held), held.size);
        self.uses.entry((place, before)).or_default().take_back(size);
        self.uses.entry((place, Owner::CachingAllocator)).or_default().add(size, 1);
    }

    /// Takes one event and returns its effects. Only driver and runtime events have effects.
    pub fn apply(&mut self, e: &Event) -> &[Effect] {
        self.effects.clear();
        if e.source.is_torch() {
            return &[];
        }
        if e.action == Action::Retract {
            self.retract(e.addr);
            return &self.effects;
        }
        if e.result != 0 {
            self.failed_calls += 1;
            return &[];
        }
        match e.action {
            Action::Totals => {
                self.pools.insert(e.stream, (e.device, e.size));
            }
            Action::Alloc | Action::SegmentAlloc => self.obtain(e),
            Action::FreeRequested | Action::FreeCompleted | Action::SegmentFree => self.give_back(e),
            Action::Map => self.map(e),
            Action::Unmap => self.unmap(e),
            _ => {}
        }
        &self.effects
    }

    fn owner(e: &Event) -> Owner {
        if e.flags.contains(Flags::IN_ALLOCATOR) { Owner::CachingAllocator } else { Owner::Module(e.module) }
    }

    fn obtain(&mut self, e: &Event) {
        let memory = e.api.memory().unwrap_or(Memory::Device);
        if e.source == Source::Runtime && e.flags.contains(Flags::HAS_NESTED) {
            // The nested driver call already counted these bytes. This caller owns them, not the runtime that called
            // the driver.
            if let Some(held) = self.held.get_mut(&e.addr) {
                let before = std::mem::replace(&mut held.owner, Self::owner(e));
                let held = *held;
                if before != held.owner {
                    let place = Self::place_of(&held);
                    self.uses.entry((place, before)).or_default().take_back(held.size);
                    self.uses.entry((place, held.owner)).or_default().add(held.size, 1);
                }
                return;
            }
        }
        let host = matches!(memory, Memory::Host | Memory::Registered);
        let held = Held { device: if host { -1 } else { e.device }, size: e.size, owner: Self::owner(e), memory };
        match memory {
            Memory::Address => {
                if e.api == Api::cuMemRetainAllocationHandle
                    && let Some(handle) = self.handles.get_mut(&e.addr)
                {
                    handle.references += 1;
                }
            }
            Memory::Imported => self.import(e, held),
            Memory::Physical => {
                self.handles.insert(e.addr, Handle { held, mappings: 0, references: 1 });
                self.add(&held, 1);
                self.effects.push(Effect::Obtained(e.addr, held));
            }
            _ => {
                if let Some(old) = self.held.insert(e.addr, held) {
                    self.subtract(&old);
                    self.effects.push(Effect::Released(e.addr, old));
                }
                self.add(&held, 1);
                self.effects.push(Effect::Obtained(e.addr, held));
            }
        }
    }

    /// Takes the opening of another process's memory. Its bytes count only for [`Place::Imported`], never for the
    /// device or the allocator.
    fn import(&mut self, e: &Event, held: Held) {
        if e.api == Api::cuMemImportFromShareableHandle {
            // Its size becomes known when it is mapped.
            self.handles.entry(e.addr).or_insert(Handle { held, mappings: 0, references: 0 }).references += 1;
            return;
        }
        // Memory that is already open is opened again at the same address.
        let opened = self.opened.entry(e.addr).or_default();
        *opened += 1;
        if *opened == 1 {
            self.held.insert(e.addr, held);
            self.add(&held, 1);
        }
    }

    fn close_import(&mut self, e: &Event) {
        let Some(opened) = self.opened.get_mut(&e.addr) else {
            // The runtime's call was recorded before the driver call nested in it, and has already closed it.
            self.unmatched_frees += u64::from(!e.flags.contains(Flags::NESTED));
            return;
        };
        if !e.flags.contains(Flags::NESTED) {
            *opened -= 1;
            if *opened == 0 {
                self.opened.remove(&e.addr);
                if let Some(held) = self.held.remove(&e.addr) {
                    self.subtract(&held);
                }
            }
        }
    }

    fn give_back(&mut self, e: &Event) {
        if e.api.memory() == Some(Memory::Physical) {
            if let Some(handle) = self.handles.get_mut(&e.addr) {
                handle.references = handle.references.saturating_sub(1);
                self.drop_unused_handle(e.addr);
            } else {
                self.unmatched_frees += 1;
            }
            return;
        }
        if e.addr == 0 {
            return;
        }
        if e.api.memory() == Some(Memory::Imported) {
            self.close_import(e);
            return;
        }
        match self.held.remove(&e.addr) {
            Some(held) => {
                self.subtract(&held);
                self.effects.push(Effect::Released(e.addr, held));
                self.retractable.push_back((e.seq, e.addr, held));
                if self.retractable.len() > RETRACTABLE {
                    self.retractable.pop_front();
                }
            }
            // The runtime's free was recorded before the driver call nested in it, and has already released it.
            None if e.flags.contains(Flags::NESTED) => {}
            None => self.unmatched_frees += 1,
        }
    }

    fn retract(&mut self, seq: u64) {
        if let Some(at) = self.retractable.iter().rposition(|(s, ..)| *s == seq)
            && let Some((_, addr, held)) = self.retractable.remove(at)
        {
            self.held.insert(addr, held);
            self.add(&held, 0);
            self.effects.push(Effect::Restored(addr, held));
        }
    }

    fn map(&mut self, e: &Event) {
        if let Some(handle) = self.handles.get_mut(&e.stream) {
            handle.mappings += 1;
            if handle.held.memory == Memory::Imported && handle.held.size == 0 {
                handle.held.size = e.size;
                let held = handle.held;
                self.add(&held, 1);
            }
        }
        self.mappings.insert(e.addr, (e.size, e.stream));
    }

    fn unmap(&mut self, e: &Event) {
        let end = e.addr.saturating_add(e.size.max(1));
        let starts: Vec<u64> = self.mappings.range(e.addr..end).map(|(start, _)| *start).collect();
        for start in starts {
            if let Some((_, id)) = self.mappings.remove(&start)
                && let Some(handle) = self.handles.get_mut(&id)
            {
                handle.mappings = handle.mappings.saturating_sub(1);
                self.drop_unused_handle(id);
            }
        }
    }

    fn drop_unused_handle(&mut self, id: u64) {
        if let Some(handle) = self.handles.get(&id).filter(|h| h.references == 0 && h.mappings == 0).copied() {
            self.handles.remove(&id);
            self.subtract(&handle.held);
            if handle.held.memory != Memory::Imported {
                self.effects.push(Effect::Released(id, handle.held));
            }
        }
    }

    /// The place of an allocation.
    pub fn place_of(held: &Held) -> Place {
        match held.memory {
            Memory::Host | Memory::Registered => Place::Host,
            Memory::Imported => Place::Imported(held.device),
            _ => Place::Device(held.device),
        }
    }

    fn add(&mut self, held: &Held, allocations: u64) {
        let place = Self::place_of(held);
        for counts in [self.uses.entry((place, held.owner)).or_default(), self.totals.entry(place).or_default()] {
            counts.add(held.size, allocations);
        }
        if held.memory == Memory::Pool {
            *self.pooled.entry(held.device).or_default() += held.size;
        }
    }

    fn subtract(&mut self, held: &Held) {
        let place = Self::place_of(held);
        for counts in [self.uses.entry((place, held.owner)).or_default(), self.totals.entry(place).or_default()] {
            counts.subtract(held.size);
        }
        if held.memory == Memory::Pool {
            let pooled = self.pooled.entry(held.device).or_default();
            *pooled = pooled.saturating_sub(held.size);
        }
    }
}
