//! What the CUDA driver handed out to this process, by who asked for it.
//!
//! Bytes are counted once: a driver call nested in a runtime call counts, the runtime call only says who the caller was.
//! Memory behind VMM handles counts from its creation until it is both released and unmapped, as the driver keeps it.
//! A failed call counts nothing; a free that turns out to have failed is taken back.

use std::collections::{BTreeMap, HashMap, VecDeque};

use memtrace_trace::api::{Api, Memory};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::ModuleId;

use memtrace_input::AddressMap;

/// Frees that may still be retracted. A retraction follows its free on the same thread, with at most a few events of
/// other threads between.
const RETRACTABLE: usize = 256;

/// Who holds memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    /// PyTorch's caching allocator: its segments.
    CachingAllocator,
    /// Another caller, by the object that made the call.
    Module(ModuleId),
}

/// One piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// The device, -1 for host memory.
    pub device: i16,
    /// Its size.
    pub size: u64,
    /// Who holds it.
    pub owner: Owner,
    /// What kind of memory it is.
    pub memory: Memory,
}

/// What an owner holds on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerUse {
    /// Bytes now.
    pub now: u64,
    /// Bytes at most.
    pub peak: u64,
    /// Pieces obtained.
    pub allocations: u64,
    /// `peak` before the last piece.
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

    /// The last piece was another's.
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

/// Device or host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Place {
    /// A device, by ordinal.
    Device(i16),
    /// Memory of another process on a device, opened here: that process's, and counted there.
    Imported(i16),
    /// Page-locked host memory.
    Host,
}

/// What an event did to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Memory was obtained; the address of memory behind a VMM handle is the handle.
    Obtained(u64, Held),
    /// Memory was given back.
    Released(u64, Held),
    /// A free did not happen after all.
    Restored(u64, Held),
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Physical {
    held: AddressMap<Held>,
    handles: HashMap<u64, Handle>,
    /// How often memory of another process was opened at an address.
    opened: HashMap<u64, u32>,
    mappings: BTreeMap<u64, (u64, u64)>,
    retractable: VecDeque<(u64, u64, Held)>,
    uses: BTreeMap<(Place, Owner), OwnerUse>,
    totals: BTreeMap<Place, OwnerUse>,
    /// What each stream-ordered pool said last that it holds of its device.
    pools: BTreeMap<u64, (i16, u64)>,
    /// Bytes of pools in use, by device.
    pooled: BTreeMap<i16, u64>,
    failed_calls: u64,
    unmatched_frees: u64,
    effects: Vec<Effect>,
}

impl Physical {
    /// What each owner holds.
    pub fn uses(&self) -> &BTreeMap<(Place, Owner), OwnerUse> {
        &self.uses
    }

    /// What is held altogether.
    pub fn total(&self, place: Place) -> OwnerUse {
        self.totals.get(&place).copied().unwrap_or_default()
    }

    /// Bytes that are held on a device outside PyTorch's caching allocator now.
    pub fn outside_allocator(&self, device: i16) -> u64 {
        let place = Place::Device(device);
        let allocator = self.uses.get(&(place, Owner::CachingAllocator)).map_or(0, |u| u.now);
        self.total(place).now.saturating_sub(allocator)
    }

    /// The same, by owner: those that hold anything.
    pub fn outside_now(&self, device: i16) -> Vec<(Owner, u64)> {
        let held = self.uses.iter().filter(|((place, owner), held)| {
            *place == Place::Device(device) && *owner != Owner::CachingAllocator && held.now > 0
        });
        held.map(|((_, owner), held)| (*owner, held.now)).collect()
    }

    /// What the stream-ordered pools of a device hold of it and do not use, as far as they have told.
    pub fn pool_spare(&self, device: i16) -> u64 {
        let held: u64 = self.pools.values().filter(|(d, _)| *d == device).map(|(_, held)| held).sum();
        held.saturating_sub(self.pooled.get(&device).copied().unwrap_or(0))
    }

    /// What is at an address.
    pub fn find(&self, addr: u64) -> Option<&Held> {
        self.held.get(&addr)
    }

    /// Calls that failed.
    pub fn failed_calls(&self) -> u64 {
        self.failed_calls
    }

    /// Frees of memory whose allocation was not recorded.
    pub fn unmatched_frees(&self) -> u64 {
        self.unmatched_frees
    }

    /// PyTorch's caching allocator says that the memory at this address is a segment of its own, whoever obtained it for it.
    pub fn claim(&mut self, addr: u64) {
        let Some(held) = self.held.get_mut(&addr).filter(|held| held.owner != Owner::CachingAllocator) else { return };
        let before = std::mem::replace(&mut held.owner, Owner::CachingAllocator);
        let (place, size) = (Self::place_of(held), held.size);
        self.uses.entry((place, before)).or_default().take_back(size);
        self.uses.entry((place, Owner::CachingAllocator)).or_default().add(size, 1);
    }

    /// Takes one driver or runtime event and says what it did; events of others do nothing.
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
            // The same bytes; but this caller is who wanted them, not the runtime that called the driver.
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

    /// Memory of another process was opened. Its bytes are never the device's or the allocator's: only its own place has them.
    fn import(&mut self, e: &Event, held: Held) {
        if e.api == Api::cuMemImportFromShareableHandle {
            // How large it is, its mapping tells.
            self.handles.entry(e.addr).or_insert(Handle { held, mappings: 0, references: 0 }).references += 1;
            return;
        }
        // What is open already is opened once more at the same address.
        let opened = self.opened.entry(e.addr).or_default();
        *opened += 1;
        if *opened == 1 {
            self.held.insert(e.addr, held);
            self.add(&held, 1);
        }
    }

    fn close_import(&mut self, e: &Event) {
        let Some(opened) = self.opened.get_mut(&e.addr) else {
            // The runtime's call closed it before the driver call nested in it came.
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
            // The runtime's free took it before the driver call nested in it came.
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

    /// Where memory lies.
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
