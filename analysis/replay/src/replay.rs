//! Drives all allocators of one process by its events.
//!
//! Every event goes to the accounting of physical memory or to the device it belongs to. Changes of blocks are returned
//! as [`Change`]s, the same for all event sources.
//!
//! A device that is known only from CUDA calls has one segment per allocation. The memory that its stream-ordered pools
//! hold beyond their allocations is reserved, at no known address. A stream-ordered free completes at once, because
//! later work on its stream can use the memory. PyTorch's own allocator calls that completed.

use std::collections::BTreeMap;

use memtrace_trace::api::{MemoryKind, OUT_OF_MEMORY};
use memtrace_trace::event::{Action, Event, Flags};

use super::allocator::{Allocator, Block, BlockId};
use super::physical::{Effect, MemoryLocation, PhysicalAllocation, PhysicalMemory};
use memtrace_input::{EventSource, TraceIndex};

/// A change of a device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// A block was allocated.
    Alloc(BlockId),
    /// The program freed a block. `FreeCompleted` follows, at once or later.
    FreeRequested(BlockId),
    /// A block's memory is free again. Carries the block as it was before.
    FreeCompleted(BlockId, Block),
    /// A segment was allocated, or a part of one was mapped.
    SegmentGained,
    /// A segment was freed, or a part of one was unmapped.
    SegmentLost,
    /// An allocation failed for good.
    Oom,
    /// A PyTorch snapshot was taken.
    Snapshot,
    /// The allocator's totals were checked, or nothing changed.
    None,
}

/// One device, or the CPU.
#[derive(Clone, Debug)]
pub struct DeviceReplay {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The event source that describes the device.
    pub source: EventSource,
    /// The device's blocks.
    pub allocator: Allocator,
}

/// The replayed state of one process.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    devices: Vec<DeviceReplay>,
    slots: BTreeMap<i16, usize>,
    physical: PhysicalMemory,
    effects: Vec<Effect>,
}

/// The receiver of each change.
type Sink<'s> = &'s mut dyn FnMut(&Replay, usize, &Event, Change);

impl Replay {
    /// Makes a replay of the devices of a trace index, or only of the one in `only`.
    pub fn new(trace_index: &TraceIndex, only: Option<i16>) -> Replay {
        let mut replay = Replay::default();
        for (&device, &source) in &trace_index.sources {
            if only.is_none_or(|d| d == device) {
                replay.slots.insert(device, replay.devices.len());
                replay.devices.push(DeviceReplay { device, source, allocator: Allocator::default() });
            }
        }
        replay
    }

    /// The devices, by ordinal.
    pub fn devices(&self) -> &[DeviceReplay] {
        &self.devices
    }

    /// The accounting of physical memory.
    pub fn physical(&self) -> &PhysicalMemory {
        &self.physical
    }

    /// Applies one event. `sink` receives each change, with the index of the device in [`Self::devices`] and the event
    /// that caused it. For a change that follows from a CUDA call, that event has the block's address and size.
    #[inline]
    pub fn apply(&mut self, e: &Event, mut sink: impl FnMut(&Replay, usize, &Event, Change)) {
        self.apply_to(e, &mut sink);
    }

    fn apply_to(&mut self, e: &Event, sink: Sink<'_>) {
        if e.source.is_torch() {
            let Some((device, source)) = EventSource::of(e) else { return };
            let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].source == source) else { return };
            if source != EventSource::Torch {
                self.apply_block_event(slot, e, sink);
                return;
            }
            match e.action {
                Action::SegmentAlloc => self.physical.assign_to_allocator(e),
                Action::SegmentFree => self.physical.segment_freed(e.addr),
                _ => {}
            }
            let change = self.devices[slot].allocator.apply_torch(e);
            if change != Change::None {
                sink(self, slot, e, change);
            }
            return;
        }
        self.update_reservations(e);
        let mut effects = std::mem::take(&mut self.effects);
        effects.clear();
        effects.extend_from_slice(self.physical.apply(e));
        for effect in &effects {
            self.apply_effect(e, *effect, sink);
        }
        self.effects = effects;
        // Without events of PyTorch's tracker, its failed call is the error that it raises, because it does not retry
        // before. Other callers can make a failing call only to probe.
        let is_allocator_call =
            e.action == Action::Alloc && e.flags.contains(Flags::IN_ALLOCATOR) && !e.flags.contains(Flags::NESTED);
        if is_allocator_call
            && e.result == OUT_OF_MEMORY
            && let Some(slot) = self.slot(e.device).filter(|slot| self.devices[*slot].source == EventSource::CudaCalls)
        {
            sink(self, slot, e, Change::Oom);
        }
        if e.action == Action::Totals {
            self.update_unused_pool_bytes(e.device);
        }
    }

    #[inline]
    fn slot(&self, device: i16) -> Option<usize> {
        // There is nearly always one device.
        match &self.devices[..] {
            [only] => (only.device == device).then_some(0),
            _ => self.slots.get(&device).copied(),
        }
    }

    fn apply_effect(&mut self, e: &Event, effect: Effect, sink: Sink<'_>) {
        let (Effect::Allocated(addr, allocation)
        | Effect::Freed(addr, allocation)
        | Effect::FreeUndone(addr, allocation)) = effect;
        let PhysicalAllocation { device, size, kind, .. } = allocation;
        if allocation.location() == MemoryLocation::Host {
            return;
        }
        let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].source == EventSource::CudaCalls) else {
            return;
        };
        let is_pooled = kind == MemoryKind::Pool;
        // A call without a stream has another value, or none, in this field.
        let stream = if e.api.memory_kind() == Some(MemoryKind::Pool) {
            e.stream
        } else {
            let allocator = &self.devices[slot].allocator;
            allocator.find(addr).map_or(0, |id| allocator.block(id).stream)
        };
        let block_event = Event { addr, size, device, stream, ..*e };
        match effect {
            Effect::Allocated(..) | Effect::FreeUndone(..) => {
                // The pool's unused memory becomes the block's memory. So it is updated before the block counts.
                if is_pooled {
                    self.update_unused_pool_bytes(device);
                }
                self.alloc_own_segment(slot, &block_event, sink);
            }
            Effect::Freed(..) => {
                self.free_own_segment(slot, &block_event, sink);
                if is_pooled {
                    self.update_unused_pool_bytes(device);
                }
            }
        }
    }

    fn update_unused_pool_bytes(&mut self, device: i16) {
        let bytes = self.physical.unused_pool_bytes(device);
        if let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].source == EventSource::CudaCalls) {
            self.devices[slot].allocator.set_unused_pool_bytes(bytes);
        }
    }

    /// Applies one event of a source that reports only blocks. A free is a single event, requested or completed.
    fn apply_block_event(&mut self, slot: usize, e: &Event, sink: Sink<'_>) {
        match e.action {
            Action::Alloc => self.alloc_own_segment(slot, e, sink),
            Action::FreeRequested | Action::FreeCompleted => self.free_own_segment(slot, e, sink),
            Action::Oom => sink(self, slot, e, Change::Oom),
            Action::Totals => {
                // A source without segments reports the bytes reserved by PyTorch's caching allocator, which the replay
                // cannot check.
                let reserved = self.devices[slot].allocator.usage().reserved;
                self.devices[slot].allocator.check_totals(e.allocated_bytes(), reserved);
            }
            _ => {}
        }
    }

    fn alloc_own_segment(&mut self, slot: usize, e: &Event, sink: Sink<'_>) {
        let id = self.devices[slot].allocator.alloc_own_segment(e);
        sink(self, slot, e, Change::Alloc(id));
    }

    fn free_own_segment(&mut self, slot: usize, e: &Event, sink: Sink<'_>) {
        let Some(id) = self.devices[slot].allocator.free_requested(e.addr) else { return };
        sink(self, slot, e, Change::FreeRequested(id));
        if let Some((id, block)) = self.devices[slot].allocator.free_completed(e.addr) {
            sink(self, slot, e, Change::FreeCompleted(id, block));
        }
    }

    /// Applies reservations of addresses, which bound the expandable segments of the devices' caching allocators.
    fn update_reservations(&mut self, e: &Event) {
        match e.action {
            Action::Reserve if e.result == 0 => {
                for device in self.devices.iter_mut().filter(|d| d.source == EventSource::Torch) {
                    if e.device < 0 || e.device == device.device {
                        device.allocator.reserve(e.addr, e.size);
                    }
                }
            }
            Action::Unreserve if e.result == 0 => {
                for device in self.devices.iter_mut().filter(|d| d.source == EventSource::Torch) {
                    device.allocator.unreserve(e.addr);
                }
            }
            _ => {}
        }
    }
}

impl Allocator {
    /// Applies one event of PyTorch's tracker.
    #[inline]
    pub fn apply_torch(&mut self, e: &Event) -> Change {
        match e.action {
            Action::Alloc if e.flags.contains(Flags::PREEXISTING) => Change::Alloc(self.add_existing(e)),
            Action::Alloc => Change::Alloc(self.alloc(e)),
            Action::FreeRequested => self.free_requested(e.addr).map_or(Change::None, Change::FreeRequested),
            Action::FreeCompleted => {
                self.free_completed(e.addr).map_or(Change::None, |(id, block)| Change::FreeCompleted(id, block))
            }
            Action::SegmentAlloc => {
                self.segment_alloc(e);
                Change::SegmentGained
            }
            Action::SegmentFree => {
                self.segment_free(e);
                Change::SegmentLost
            }
            Action::SegmentMap => {
                self.segment_map(e);
                Change::SegmentGained
            }
            Action::SegmentUnmap => {
                self.segment_unmap(e);
                Change::SegmentLost
            }
            Action::Oom => Change::Oom,
            Action::Snapshot => Change::Snapshot,
            Action::BlockState => {
                self.restore_block(e);
                Change::None
            }
            Action::Totals => {
                self.check_totals(e.allocated_bytes(), e.reserved_bytes());
                Change::None
            }
            _ => Change::None,
        }
    }
}
