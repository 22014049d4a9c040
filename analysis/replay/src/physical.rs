//! The memory that the CUDA driver allocated for this process, by owner.
//!
//! Bytes are counted once. A driver call nested in a runtime call counts; the runtime call only identifies the caller.
//! Memory behind VMM handles counts from its creation until it is both released and unmapped, as the driver keeps it. A
//! failed call counts nothing. A free that is later found to have failed is undone.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use memtrace_trace::api::MemoryKind;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::{ModuleId, StackId};

use super::mapped_segments::{MappedSegments, UnmappedBytes};
use memtrace_input::AddressMap;

use super::driver_pages::DriverPages;
use super::pinned::{PinnedBlocks, PinnedMemory};

/// The maximum number of frees that can still be retracted. A retraction follows its free on the same thread, with at
/// most a few events of other threads in between.
const MAX_UNDOABLE_FREES: usize = 256;

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
pub struct PhysicalAllocation {
    /// The device ordinal; -1 for host memory.
    pub device: i16,
    /// The size in bytes.
    pub size: u64,
    /// The owner.
    pub owner: Owner,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The stack that allocated it.
    pub stack: StackId,
}

impl PhysicalAllocation {
    /// Where the memory is.
    pub fn location(&self) -> MemoryLocation {
        match self.kind {
            MemoryKind::Host | MemoryKind::Registered => MemoryLocation::Host,
            MemoryKind::Imported => MemoryLocation::Imported(self.device),
            _ => MemoryLocation::Device(self.device),
        }
    }
}

/// The memory of an owner at one location.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerUsage {
    /// The current number of bytes.
    pub current: u64,
    /// The highest number of bytes.
    pub peak: u64,
    /// The number of allocations.
    pub allocations: u64,
    /// The size of the largest allocation, in bytes.
    pub largest: u64,
    /// The values of `peak` and `largest` before the last allocation.
    peak_before: u64,
    largest_before: u64,
}

impl OwnerUsage {
    fn add(&mut self, size: u64, allocations: u64) {
        self.current += size;
        self.peak_before = self.peak;
        self.peak = self.peak.max(self.current);
        self.allocations += allocations;
        self.largest_before = self.largest;
        self.largest = self.largest.max(size);
    }

    fn subtract(&mut self, size: u64) {
        self.current = self.current.saturating_sub(size);
    }

    /// Undoes the last allocation, which belongs to another owner.
    fn undo_add(&mut self, size: u64) {
        if self.peak == self.current {
            self.peak = self.peak_before.max(self.current.saturating_sub(size));
        }
        self.subtract(size);
        self.allocations = self.allocations.saturating_sub(1);
        if self.largest == size {
            self.largest = self.largest_before;
        }
        if self.allocations == 0 {
            // All its allocations belong to others, so it never had memory.
            (self.peak, self.largest) = (0, 0);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Handle {
    allocation: PhysicalAllocation,
    mappings: u32,
    /// How often it must be released.
    references: u32,
}

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemoryLocation {
    /// The memory of a device, by ordinal.
    Device(i16),
    /// Memory of another process on a device, opened by this process. It counts for the other process.
    Imported(i16),
    /// Pinned host memory.
    Host,
}

/// The effect of an event on memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Memory was allocated. For memory behind a VMM handle, the address is the handle.
    Allocated(u64, PhysicalAllocation),
    /// Memory was freed.
    Freed(u64, PhysicalAllocation),
    /// A free turned out to have failed.
    FreeUndone(u64, PhysicalAllocation),
}

/// The allocations of a process on a device at one point in time, in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceAllocations {
    /// By owner. Memory of pools counts as far as it is in use.
    pub by_owner: Vec<(Owner, u64)>,
    /// Memory of stream-ordered pools that is not in use.
    pub unused_pools: u64,
    /// The bytes that the driver's pages have beyond the allocations in them.
    pub rounding: u64,
    /// The part of `by_owner` that is managed memory, which may be on the host.
    pub managed: u64,
    /// Memory of other processes that this process has opened. It is not part of `by_owner`.
    pub imported: u64,
    /// Page-locked host memory. It is not part of `by_owner`.
    pub pinned_host: u64,
}

impl DeviceAllocations {
    /// The bytes of the device that these allocations take, managed memory excluded.
    pub fn device_bytes(&self) -> u64 {
        let allocated: u64 = self.by_owner.iter().map(|(_, bytes)| bytes).sum();
        allocated.saturating_sub(self.managed).saturating_add(self.unused_pools).saturating_add(self.rounding)
    }
}

/// The memory of this process, by location and owner.
#[derive(Clone, Debug, Default)]
pub struct PhysicalMemory {
    allocations: AddressMap<PhysicalAllocation>,
    handles: HashMap<u64, Handle>,
    /// By address: how often memory of another process was opened there.
    open_imports: HashMap<u64, u32>,
    mappings: BTreeMap<u64, (u64, u64)>,
    /// The reserved address ranges, by their start.
    reservations: BTreeSet<u64>,
    mapped_segments: MappedSegments,
    recent_frees: VecDeque<(u64, u64, PhysicalAllocation)>,
    usage: UsageSums,
    pools: StreamOrderedPools,
    /// By device: the driver's pages.
    pages: BTreeMap<i16, DriverPages>,
    problems: CallProblems,
    effects: Vec<Effect>,
}

/// Calls that changed nothing.
#[derive(Clone, Copy, Debug, Default)]
struct CallProblems {
    failed: u64,
    unmatched_frees: u64,
}

/// The sums over allocations.
#[derive(Clone, Debug, Default)]
struct UsageSums {
    by_owner: BTreeMap<(MemoryLocation, Owner), OwnerUsage>,
    totals: BTreeMap<MemoryLocation, OwnerUsage>,
    pinned: PinnedMemory<(Owner, StackId)>,
}

/// The pools of the driver's stream-ordered allocator.
#[derive(Clone, Debug, Default)]
struct StreamOrderedPools {
    /// By pool: its device, and the bytes that it last reported as reserved.
    reserved: BTreeMap<u64, (i16, u64)>,
    /// By device: the bytes of pools in use.
    used: BTreeMap<i16, u64>,
}

impl PhysicalMemory {
    /// The memory of each owner, by location.
    pub fn usage_by_owner(&self) -> &BTreeMap<(MemoryLocation, Owner), OwnerUsage> {
        &self.usage.by_owner
    }

    /// Page-locked host memory at its peak, by owner and stack.
    pub fn pinned_at_peak(&self) -> BTreeMap<(Owner, StackId), PinnedBlocks> {
        self.usage.pinned.at_peak()
    }

    /// The memory of all owners at a location.
    pub fn total(&self, location: MemoryLocation) -> OwnerUsage {
        self.usage.totals.get(&location).copied().unwrap_or_default()
    }

    /// The number of allocations, mappings, reservations and sums that this value keeps: its memory is proportional to
    /// it.
    pub fn entries(&self) -> usize {
        let addresses = [self.allocations.len(), self.handles.len(), self.open_imports.len(), self.mappings.len()];
        let sums =
            [self.usage.by_owner.len(), self.usage.totals.len(), self.pools.reserved.len(), self.pools.used.len()];
        let pinned = self.usage.pinned.entries();
        let others = [self.reservations.len(), self.mapped_segments.entries(), self.pages.len(), pinned];
        addresses.into_iter().chain(sums).chain(others).sum()
    }

    /// Bytes on a device that are currently allocated outside PyTorch's caching allocator.
    pub fn bytes_outside_allocator(&self, device: i16) -> u64 {
        let location = MemoryLocation::Device(device);
        let allocator = self.usage.by_owner.get(&(location, Owner::CachingAllocator)).map_or(0, |usage| usage.current);
        self.total(location).current.saturating_sub(allocator)
    }

    /// The owners of memory outside PyTorch's caching allocator on a device, with their bytes.
    pub fn owners_outside_allocator(&self, device: i16) -> Vec<(Owner, u64)> {
        let outside = self.usage.by_owner.iter().filter(|((location, owner), usage)| {
            *location == MemoryLocation::Device(device) && *owner != Owner::CachingAllocator && usage.current > 0
        });
        outside.map(|((_, owner), usage)| (*owner, usage.current)).collect()
    }

    /// The largest allocation of a device outside PyTorch's caching allocator.
    pub fn largest_outside_allocator(&self, device: i16) -> Option<PhysicalAllocation> {
        let all = self.allocations.values().chain(self.handles.values().map(|handle| &handle.allocation));
        let outside = all.filter(|allocation| {
            allocation.location() == MemoryLocation::Device(device) && allocation.owner != Owner::CachingAllocator
        });
        outside.max_by_key(|allocation| (allocation.size, Reverse(allocation.stack))).copied()
    }

    /// Bytes of a device that its stream-ordered pools reserve but do not use, according to their last reports.
    pub fn unused_pool_bytes(&self, device: i16) -> u64 {
        let reserved: u64 = self.pools.reserved.values().filter(|(d, _)| *d == device).map(|(_, bytes)| bytes).sum();
        reserved.saturating_sub(self.pools.used.get(&device).copied().unwrap_or(0))
    }

    /// This process's allocations on a device.
    pub fn device_allocations(&self, device: i16) -> DeviceAllocations {
        let location = MemoryLocation::Device(device);
        let by_owner = self.usage.by_owner.range((location, Owner::CachingAllocator)..);
        let by_owner = by_owner.take_while(|((one, _), _)| *one == location).filter(|(_, usage)| usage.current > 0);
        let pages = self.pages.get(&device).copied().unwrap_or_default();
        DeviceAllocations {
            by_owner: by_owner.map(|((_, owner), usage)| (*owner, usage.current)).collect(),
            unused_pools: self.unused_pool_bytes(device),
            rounding: pages.rounding(),
            managed: pages.managed(),
            imported: self.total(MemoryLocation::Imported(device)).current,
            pinned_host: self.total(MemoryLocation::Host).current,
        }
    }

    /// The allocation at an address; `None` if there is none.
    pub fn find(&self, addr: u64) -> Option<&PhysicalAllocation> {
        self.allocations.get(&addr)
    }

    /// The number of calls that failed.
    pub fn failed_calls(&self) -> u64 {
        self.problems.failed
    }

    /// The number of frees of memory whose allocation was not recorded.
    pub fn unmatched_frees(&self) -> u64 {
        self.problems.unmatched_frees
    }

    /// The bytes of segments of PyTorch's caching allocator that had no device memory, by device.
    pub fn unmapped_segments(&self) -> &BTreeMap<i16, UnmappedBytes> {
        self.mapped_segments.unmapped()
    }

    /// The segments of PyTorch's caching allocator that have no device memory: address and size, in order.
    pub fn segments_without_memory(&self, device: i16) -> impl Iterator<Item = (u64, u64)> {
        self.mapped_segments.without_memory(device)
    }

    /// Assigns the memory of a segment to PyTorch's caching allocator, which reported it. The caller of CUDA can be
    /// another object, and the memory can be mapped.
    pub fn assign_to_allocator(&mut self, segment: &Event) {
        let Event { addr, size, device, .. } = *segment;
        if let Some(allocation) = self.allocations.get_mut(&addr) {
            let before = *allocation;
            allocation.owner = Owner::CachingAllocator;
            self.owner_changed(&before);
            return;
        }
        let mapped: Vec<u64> =
            self.mappings.range(addr..addr.saturating_add(size)).map(|(_, (_, handle))| *handle).collect();
        if !mapped.is_empty() {
            self.mapped_segments.insert(addr, size, device);
            mapped.into_iter().for_each(|handle| self.assign_handle_to_allocator(handle));
        }
    }

    /// Observes the end of a segment that PyTorch's caching allocator reported.
    pub fn segment_freed(&mut self, addr: u64) {
        self.mapped_segments.remove(addr);
    }

    fn assign_handle_to_allocator(&mut self, handle: u64) {
        // Memory of other processes does not count for the allocator.
        if let Some(handle) = self.handles.get_mut(&handle).filter(|h| h.allocation.kind == MemoryKind::Physical) {
            let before = handle.allocation;
            handle.allocation.owner = Owner::CachingAllocator;
            self.owner_changed(&before);
        }
    }

    /// Moves the bytes of an allocation from its owner to PyTorch's caching allocator.
    fn owner_changed(&mut self, before: &PhysicalAllocation) {
        if before.owner != Owner::CachingAllocator {
            let (location, size) = (before.location(), before.size);
            self.usage.by_owner.entry((location, before.owner)).or_default().undo_add(size);
            self.usage.by_owner.entry((location, Owner::CachingAllocator)).or_default().add(size, 1);
        }
    }

    /// Applies one event and returns its effects. Only driver and runtime events have effects.
    pub fn apply(&mut self, e: &Event) -> &[Effect] {
        self.effects.clear();
        // A call about a CUDA graph has no address of memory.
        if e.source.is_torch() || e.action == Action::Graph {
            return &[];
        }
        if e.action == Action::Retract {
            self.undo_free(e.retracted_seq());
            return &self.effects;
        }
        if e.result != 0 {
            self.problems.failed += 1;
            return &[];
        }
        match e.action {
            Action::Totals => {
                self.pools.reserved.insert(e.pool_handle(), (e.device, e.reserved_bytes()));
            }
            Action::Alloc | Action::SegmentAlloc => self.record_alloc(e),
            Action::FreeRequested | Action::FreeCompleted | Action::SegmentFree => self.record_free(e),
            Action::Map => self.record_map(e),
            Action::Unmap => self.record_unmap(e),
            Action::Reserve => {
                self.reservations.insert(e.addr);
            }
            Action::Unreserve => {
                self.reservations.remove(&e.addr);
            }
            _ => {}
        }
        &self.effects
    }

    fn owner(e: &Event) -> Owner {
        if e.flags.contains(Flags::IN_ALLOCATOR) { Owner::CachingAllocator } else { Owner::Module(e.module) }
    }

    fn record_alloc(&mut self, e: &Event) {
        let kind = e.api.memory_kind().unwrap_or(MemoryKind::Device);
        if e.source == Source::Runtime && e.flags.contains(Flags::HAS_NESTED) {
            // The nested driver call already counted these bytes. This caller owns them, not the runtime that called
            // the driver.
            if let Some(allocation) = self.allocations.get_mut(&e.addr) {
                let before = std::mem::replace(&mut allocation.owner, Self::owner(e));
                let allocation = *allocation;
                if before != allocation.owner {
                    let location = allocation.location();
                    self.usage.by_owner.entry((location, before)).or_default().undo_add(allocation.size);
                    self.usage.by_owner.entry((location, allocation.owner)).or_default().add(allocation.size, 1);
                    if location == MemoryLocation::Host {
                        self.usage.pinned.subtract((before, allocation.stack), allocation.size);
                        self.usage.pinned.add((allocation.owner, allocation.stack), allocation.size);
                    }
                }
                return;
            }
        }
        // A library that replaces `cudaMalloc` has mapped memory there. Its handle already counts.
        if e.source == Source::Runtime && kind == MemoryKind::Device && self.reservations.contains(&e.addr) {
            return;
        }
        let host = matches!(kind, MemoryKind::Host | MemoryKind::Registered);
        let allocation = PhysicalAllocation {
            device: if host { -1 } else { e.device },
            size: e.size,
            owner: Self::owner(e),
            kind,
            stack: e.stack,
        };
        match kind {
            MemoryKind::Address => {
                if e.api.retains()
                    && let Some(handle) = self.handles.get_mut(&e.memory_handle())
                {
                    handle.references += 1;
                }
            }
            MemoryKind::Imported => self.record_import(e, allocation),
            MemoryKind::Physical => {
                self.handles.insert(e.memory_handle(), Handle { allocation, mappings: 0, references: 1 });
                self.add(&allocation, 1);
                self.effects.push(Effect::Allocated(e.addr, allocation));
            }
            _ => {
                if let Some(old) = self.allocations.insert(e.addr, allocation) {
                    self.subtract(&old);
                    self.effects.push(Effect::Freed(e.addr, old));
                }
                self.add(&allocation, 1);
                self.effects.push(Effect::Allocated(e.addr, allocation));
            }
        }
    }

    /// Records that another process's memory was opened. Its bytes count only for [`MemoryLocation::Imported`], never
    /// for the device or the allocator.
    fn record_import(&mut self, e: &Event, allocation: PhysicalAllocation) {
        if e.api.retains() {
            // Its size becomes known when it is mapped.
            self.handles
                .entry(e.memory_handle())
                .or_insert(Handle { allocation, mappings: 0, references: 0 })
                .references += 1;
            return;
        }
        // Memory that is already open is opened again at the same address.
        let opened = self.open_imports.entry(e.addr).or_default();
        *opened += 1;
        if *opened == 1 {
            self.allocations.insert(e.addr, allocation);
            self.add(&allocation, 1);
        }
    }

    fn record_import_close(&mut self, e: &Event) {
        let Some(opened) = self.open_imports.get_mut(&e.addr) else {
            // The runtime's call was recorded before the driver call nested in it, and has already closed it.
            self.problems.unmatched_frees += u64::from(!e.flags.contains(Flags::NESTED));
            return;
        };
        if !e.flags.contains(Flags::NESTED) {
            *opened -= 1;
            if *opened == 0 {
                self.open_imports.remove(&e.addr);
                if let Some(allocation) = self.allocations.remove(&e.addr) {
                    self.subtract(&allocation);
                }
            }
        }
    }

    fn record_free(&mut self, e: &Event) {
        if e.api.memory_kind() == Some(MemoryKind::Physical) {
            if let Some(handle) = self.handles.get_mut(&e.memory_handle()) {
                handle.references = handle.references.saturating_sub(1);
                self.drop_unused_handle(e.memory_handle());
            } else {
                self.problems.unmatched_frees += 1;
            }
            return;
        }
        if e.addr == 0 {
            return;
        }
        if e.api.memory_kind() == Some(MemoryKind::Imported) {
            self.record_import_close(e);
            return;
        }
        match self.allocations.remove(&e.addr) {
            Some(allocation) => {
                self.subtract(&allocation);
                self.effects.push(Effect::Freed(e.addr, allocation));
                self.recent_frees.push_back((e.seq, e.addr, allocation));
                if self.recent_frees.len() > MAX_UNDOABLE_FREES {
                    self.recent_frees.pop_front();
                }
            }
            // The runtime's free was recorded before the driver call nested in it, and has already released it.
            None if e.flags.contains(Flags::NESTED) || self.reservations.contains(&e.addr) => {}
            None => self.problems.unmatched_frees += 1,
        }
    }

    fn undo_free(&mut self, seq: u64) {
        if let Some(at) = self.recent_frees.iter().rposition(|(s, ..)| *s == seq)
            && let Some((_, addr, allocation)) = self.recent_frees.remove(at)
        {
            self.allocations.insert(addr, allocation);
            self.add(&allocation, 0);
            self.effects.push(Effect::FreeUndone(addr, allocation));
        }
    }

    fn record_map(&mut self, e: &Event) {
        if let Some(handle) = self.handles.get_mut(&e.memory_handle()) {
            handle.mappings += 1;
            if handle.allocation.kind == MemoryKind::Imported && handle.allocation.size == 0 {
                handle.allocation.size = e.size;
                let allocation = handle.allocation;
                self.add(&allocation, 1);
            }
        }
        self.mappings.insert(e.addr, (e.size, e.memory_handle()));
        // A library that stands before the driver can have created what PyTorch's allocator maps.
        if self.mapped_segments.mapped(e.addr, e.size) || e.flags.contains(Flags::IN_ALLOCATOR) {
            self.assign_handle_to_allocator(e.memory_handle());
        }
    }

    fn record_unmap(&mut self, e: &Event) {
        let end = e.addr.saturating_add(e.size.max(1));
        let starts: Vec<u64> = self.mappings.range(e.addr..end).map(|(start, _)| *start).collect();
        for start in starts {
            let Some((size, id)) = self.mappings.remove(&start) else { continue };
            self.mapped_segments.unmapped_by(start, size, e.module);
            if let Some(handle) = self.handles.get_mut(&id) {
                handle.mappings = handle.mappings.saturating_sub(1);
                self.drop_unused_handle(id);
            }
        }
    }

    fn drop_unused_handle(&mut self, id: u64) {
        if let Some(handle) = self.handles.get(&id).filter(|h| h.references == 0 && h.mappings == 0).copied() {
            self.handles.remove(&id);
            self.subtract(&handle.allocation);
            if handle.allocation.kind != MemoryKind::Imported {
                self.effects.push(Effect::Freed(id, handle.allocation));
            }
        }
    }

    fn add(&mut self, allocation: &PhysicalAllocation, allocations: u64) {
        let location = allocation.location();
        for counts in [
            self.usage.by_owner.entry((location, allocation.owner)).or_default(),
            self.usage.totals.entry(location).or_default(),
        ] {
            counts.add(allocation.size, allocations);
        }
        if location == MemoryLocation::Host {
            self.usage.pinned.add((allocation.owner, allocation.stack), allocation.size);
        }
        if let MemoryLocation::Device(device) = location {
            self.pages.entry(device).or_default().add(allocation.kind, allocation.size);
        }
        if allocation.kind == MemoryKind::Pool {
            *self.pools.used.entry(allocation.device).or_default() += allocation.size;
        }
    }

    fn subtract(&mut self, allocation: &PhysicalAllocation) {
        let location = allocation.location();
        for counts in [
            self.usage.by_owner.entry((location, allocation.owner)).or_default(),
            self.usage.totals.entry(location).or_default(),
        ] {
            counts.subtract(allocation.size);
        }
        if location == MemoryLocation::Host {
            self.usage.pinned.subtract((allocation.owner, allocation.stack), allocation.size);
        }
        if let MemoryLocation::Device(device) = location {
            self.pages.entry(device).or_default().subtract(allocation.kind, allocation.size);
        }
        if allocation.kind == MemoryKind::Pool {
            let pooled = self.pools.used.entry(allocation.device).or_default();
            *pooled = pooled.saturating_sub(allocation.size);
        }
    }
}
