//! All allocators of one process, driven by its events.
//!
//! Every event goes to the physical ledger or to the device it belongs to; what happened to blocks comes back as
//! [`Change`]s, the same whatever lane told it. A device told by CUDA calls has one segment for each allocation; what its
//! stream-ordered pools hold beyond their allocations is reserved, at no known address. A stream-ordered free completes at once: the
//! memory is there for whatever follows on its stream, which is what PyTorch's own allocator calls completed.

use std::collections::BTreeMap;

use memtrace_trace::api::Memory;
use memtrace_trace::event::{Action, Event, Flags};

use super::allocator::{Allocator, Block, BlockId};
use super::physical::{Effect, Held, Physical, Place};
use memtrace_input::{Lane, Survey};

/// `CUDA_ERROR_OUT_OF_MEMORY`, `cudaErrorMemoryAllocation`
const OUT_OF_MEMORY: i32 = 2;

/// What happened to a device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// A block was handed out.
    Alloc(BlockId),
    /// A block was given back; `FreeCompleted` follows, at once or later.
    FreeRequested(BlockId),
    /// A block's memory is free again: the block as it was.
    FreeCompleted(BlockId, Block),
    /// A segment was obtained, or part of one mapped.
    SegmentGained,
    /// A segment was returned, or part of one unmapped.
    SegmentLost,
    /// An allocation failed for good.
    Oom,
    /// Somebody took a snapshot.
    Snapshot,
    /// The allocator's totals were checked, or nothing changed.
    None,
}

/// One device (or the CPU).
#[derive(Clone, Debug)]
pub struct DeviceReplay {
    /// The ordinal, -1 for the CPU.
    pub device: i16,
    /// Whose events tell about it.
    pub lane: Lane,
    /// Its blocks.
    pub allocator: Allocator,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    devices: Vec<DeviceReplay>,
    slots: BTreeMap<i16, usize>,
    physical: Physical,
    effects: Vec<Effect>,
}

impl Replay {
    /// For the devices of a survey, or only one of them.
    pub fn new(survey: &Survey, only: Option<i16>) -> Replay {
        let mut replay = Replay::default();
        for (&device, &lane) in &survey.lanes {
            if only.is_none_or(|d| d == device) {
                replay.slots.insert(device, replay.devices.len());
                replay.devices.push(DeviceReplay { device, lane, allocator: Allocator::default() });
            }
        }
        replay
    }

    /// The devices, in order of ordinal.
    pub fn devices(&self) -> &[DeviceReplay] {
        &self.devices
    }

    /// The physical ledger.
    pub fn physical(&self) -> &Physical {
        &self.physical
    }

    /// Takes one event; `sink` gets what changed, with the index of the device in [`Self::devices`] and the event that
    /// tells it (for a change that follows from a CUDA call, an event of that call with the block's address and size).
    #[inline]
    pub fn apply(&mut self, e: &Event, mut sink: impl FnMut(&Replay, usize, &Event, Change)) {
        if e.source.is_torch() {
            let Some((device, lane)) = Lane::of(e) else { return };
            let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].lane == lane) else { return };
            if lane != Lane::Torch {
                self.apply_alone(slot, e, &mut sink);
                return;
            }
            if e.action == Action::SegmentAlloc {
                self.physical.claim(e.addr);
            }
            let change = self.devices[slot].allocator.apply_torch(e);
            if change != Change::None {
                sink(self, slot, e, change);
            }
            return;
        }
        self.note_reservation(e);
        let mut effects = std::mem::take(&mut self.effects);
        effects.clear();
        effects.extend_from_slice(self.physical.apply(e));
        for effect in &effects {
            self.apply_effect(e, *effect, &mut sink);
        }
        self.effects = effects;
        // Where PyTorch's tracker is silent its failed call is the error that it raises: there is no retry before it. Others may have
        // asked only to see.
        let asked =
            e.action == Action::Alloc && e.flags.contains(Flags::IN_ALLOCATOR) && !e.flags.contains(Flags::NESTED);
        if asked
            && e.result == OUT_OF_MEMORY
            && let Some(slot) = self.slot(e.device).filter(|slot| self.devices[*slot].lane == Lane::Cuda)
        {
            sink(self, slot, e, Change::Oom);
        }
        if e.action == Action::Totals {
            self.note_spare(e.device);
        }
    }

    #[inline]
    fn slot(&self, device: i16) -> Option<usize> {
        // Nearly always one device.
        match &self.devices[..] {
            [only] => (only.device == device).then_some(0),
            _ => self.slots.get(&device).copied(),
        }
    }

    fn apply_effect(&mut self, e: &Event, effect: Effect, sink: &mut impl FnMut(&Replay, usize, &Event, Change)) {
        let (Effect::Obtained(addr, held) | Effect::Released(addr, held) | Effect::Restored(addr, held)) = effect;
        let Held { device, size, memory, .. } = held;
        if Physical::place_of(&held) == Place::Host {
            return;
        }
        let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].lane == Lane::Cuda) else { return };
        let pooled = memory == Memory::Pool;
        // Where the call has no stream the field holds something else, or nothing.
        let stream = if e.api.memory() == Some(Memory::Pool) {
            e.stream
        } else {
            let allocator = &self.devices[slot].allocator;
            allocator.find(addr).map_or(0, |id| allocator.block(id).stream)
        };
        let told = Event { addr, size, device, stream, ..*e };
        match effect {
            Effect::Obtained(..) | Effect::Restored(..) => {
                // What the pool had to spare becomes the block's, before the block counts.
                if pooled {
                    self.note_spare(device);
                }
                self.alloc_alone(slot, &told, sink);
            }
            Effect::Released(..) => {
                self.free_alone(slot, &told, sink);
                if pooled {
                    self.note_spare(device);
                }
            }
        }
    }

    fn note_spare(&mut self, device: i16) {
        let spare = self.physical.pool_spare(device);
        if let Some(slot) = self.slot(device).filter(|slot| self.devices[*slot].lane == Lane::Cuda) {
            self.devices[slot].allocator.set_spare(spare);
        }
    }

    /// One event of a source that tells blocks only. A free is one event, whichever of the two it is called.
    fn apply_alone(&mut self, slot: usize, e: &Event, sink: &mut impl FnMut(&Replay, usize, &Event, Change)) {
        match e.action {
            Action::Alloc => self.alloc_alone(slot, e, sink),
            Action::FreeRequested | Action::FreeCompleted => self.free_alone(slot, e, sink),
            Action::Oom => sink(self, slot, e, Change::Oom),
            Action::Totals => {
                // A source without segments reserves what PyTorch's caching allocator holds, which it cannot tell.
                let reserved = self.devices[slot].allocator.usage().reserved;
                self.devices[slot].allocator.check_totals(e.addr, reserved);
            }
            _ => {}
        }
    }

    fn alloc_alone(&mut self, slot: usize, e: &Event, sink: &mut impl FnMut(&Replay, usize, &Event, Change)) {
        let id = self.devices[slot].allocator.alloc_alone(e);
        sink(self, slot, e, Change::Alloc(id));
    }

    fn free_alone(&mut self, slot: usize, e: &Event, sink: &mut impl FnMut(&Replay, usize, &Event, Change)) {
        let Some(id) = self.devices[slot].allocator.free_requested(e.addr) else { return };
        sink(self, slot, e, Change::FreeRequested(id));
        if let Some((id, block)) = self.devices[slot].allocator.free_completed(e.addr) {
            sink(self, slot, e, Change::FreeCompleted(id, block));
        }
    }

    /// Reservations bound the expandable segments of the devices' caching allocators.
    fn note_reservation(&mut self, e: &Event) {
        match e.action {
            Action::Reserve if e.result == 0 => {
                for device in self.devices.iter_mut().filter(|d| d.lane == Lane::Torch) {
                    if e.device < 0 || e.device == device.device {
                        device.allocator.reserve(e.addr, e.size);
                    }
                }
            }
            Action::Unreserve if e.result == 0 => {
                for device in self.devices.iter_mut().filter(|d| d.lane == Lane::Torch) {
                    device.allocator.unreserve(e.addr);
                }
            }
            _ => {}
        }
    }
}

impl Allocator {
    /// One event of PyTorch's tracker.
    #[inline]
    fn apply_torch(&mut self, e: &Event) -> Change {
        match e.action {
            Action::Alloc if e.flags.contains(Flags::BEFORE) => Change::Alloc(self.place(e)),
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
            Action::Totals => {
                self.check_totals(e.addr, e.size);
                Change::None
            }
            _ => Change::None,
        }
    }
}
