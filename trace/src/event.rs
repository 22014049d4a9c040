//! One event: what happened to one range of memory, when, on which thread, from which stack.
//!
//! Inside the traced process an event is one 64-byte ring slot ([`Event::to_slot`]); in the trace file it is a row of a
//! columnar block. Both carry exactly the fields below.

use crate::api::Api;
use crate::ids::{ContextId, ModuleId, StackId, ThreadId};

/// Who told us.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Source {
    /// PyTorch's CUDA caching allocator, through its own trace tracker (`attachAllocatorTraceTracker`).
    Torch = 0,
    /// PyTorch's CUDA allocator, through `c10::reportMemoryUsageToProfiler`: sizes are rounded, streams and segments
    /// are unknown. The fallback where the tracker cannot be attached.
    TorchReporter = 1,
    /// PyTorch's CPU allocator, through `c10::reportMemoryUsageToProfiler`.
    TorchCpu = 2,
    /// A call of the CUDA driver API.
    Driver = 3,
    /// A call of the CUDA runtime API.
    Runtime = 4,
    /// The program itself, through `record_function` or NVTX: ranges with a name, no memory.
    Label = 5,
}

impl Source {
    /// The source with this wire number.
    pub const fn from_wire(value: u8) -> Option<Source> {
        Some(match value {
            0 => Source::Torch,
            1 => Source::TorchReporter,
            2 => Source::TorchCpu,
            3 => Source::Driver,
            4 => Source::Runtime,
            5 => Source::Label,
            _ => return None,
        })
    }

    /// Whether the event comes from one of PyTorch's allocators (as against a CUDA call).
    pub const fn is_torch(self) -> bool {
        matches!(self, Source::Torch | Source::TorchReporter | Source::TorchCpu)
    }
}

/// What happened. The first nine are PyTorch's `TraceEntry::Action`, by number and by name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Action {
    /// A block was handed to the program. For a CUDA call: memory was obtained (see [`Event::api`]).
    Alloc = 0,
    /// The program gave a block back. Where nothing is deferred, `FreeCompleted` follows at once.
    FreeRequested = 1,
    /// The block may be used again. For a CUDA call: memory was released.
    FreeCompleted = 2,
    /// The caching allocator obtained a segment (`cudaMalloc`).
    SegmentAlloc = 3,
    /// The caching allocator returned a segment (`cudaFree`).
    SegmentFree = 4,
    /// Part of an expandable segment was mapped.
    SegmentMap = 5,
    /// Part of an expandable segment was unmapped.
    SegmentUnmap = 6,
    /// Somebody took a snapshot; `size` is the total of active bytes.
    Snapshot = 7,
    /// An allocation failed for good: `size` is the rounded request, `addr` the free bytes of the device.
    Oom = 8,
    /// PyTorch >= 2.14: a text was attached to a block.
    Annotate = 9,
    /// A CUDA free that was recorded before the call was made has failed: `addr` is the [`Event::seq`] of the
    /// event that did not happen.
    Retract = 16,
    /// The allocator's own running totals, for checking a replay: `addr` is bytes allocated, `size` bytes reserved. For a CUDA
    /// call: those of the stream-ordered pool whose handle `stream` is, where what it reserves has changed.
    Totals = 17,
    /// Physical memory was mapped at an address (`cuMemMap`): `addr`, `size`, and the handle in `stream`.
    Map = 18,
    /// Physical memory was unmapped (`cuMemUnmap`).
    Unmap = 19,
    /// An address range was reserved, no memory (`cuMemAddressReserve`).
    Reserve = 20,
    /// An address range was given back (`cuMemAddressFree`).
    Unreserve = 21,
    /// A range that the program named begins: `addr` is the label's id ([`crate::definition::Definition::Label`]), `size` is 0 for ranges that
    /// nest on their thread, else the number by which its end is known (`nvtxRangeStart`), which may come on another thread.
    RangeStart = 22,
    /// Such a range ends: `addr` and `size` as at its start. `addr` is 0 where the program does not say which: with a `size`, the range of that
    /// number; without, the innermost of its thread that nests and was begun through NVTX in the domain that `stream` tells (0: the default one).
    RangeEnd = 23,
}

impl Action {
    /// The action with this wire number.
    pub const fn from_wire(value: u8) -> Option<Action> {
        Some(match value {
            0 => Action::Alloc,
            1 => Action::FreeRequested,
            2 => Action::FreeCompleted,
            3 => Action::SegmentAlloc,
            4 => Action::SegmentFree,
            5 => Action::SegmentMap,
            6 => Action::SegmentUnmap,
            7 => Action::Snapshot,
            8 => Action::Oom,
            9 => Action::Annotate,
            16 => Action::Retract,
            17 => Action::Totals,
            18 => Action::Map,
            19 => Action::Unmap,
            20 => Action::Reserve,
            21 => Action::Unreserve,
            22 => Action::RangeStart,
            23 => Action::RangeEnd,
            _ => return None,
        })
    }

    /// The name PyTorch's snapshots use; ours for the actions PyTorch does not have.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
            Action::Annotate => "annotate",
            Action::Retract => "retract",
            Action::Totals => "totals",
            Action::Map => "map",
            Action::Unmap => "unmap",
            Action::Reserve => "reserve",
            Action::Unreserve => "unreserve",
            Action::RangeStart => "range_start",
            Action::RangeEnd => "range_end",
        }
    }
}

/// Facts about the moment of an event, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Flags(pub u16);

impl Flags {
    /// The thread is inside `torch::autograd::Engine::evaluate_function`: backward, by definition.
    pub const IN_BACKWARD: Flags = Flags(1 << 0);
    /// Autograd was recording (`c10::GradMode::is_enabled()`); meaningful only with [`Self::GRAD_KNOWN`].
    pub const GRAD_ENABLED: Flags = Flags(1 << 1);
    /// The grad mode could be read.
    pub const GRAD_KNOWN: Flags = Flags(1 << 2);
    /// A driver call made from inside a hooked runtime call: the same bytes, already counted here; the runtime event
    /// that follows on this thread carries [`Self::HAS_NESTED`].
    pub const NESTED: Flags = Flags(1 << 3);
    /// A runtime call during which the driver call it stands for was recorded too: do not count its bytes again.
    pub const HAS_NESTED: Flags = Flags(1 << 4);
    /// [`Event::slack`] is known: the block's rounded size is `size + slack`.
    pub const SLACK_KNOWN: Flags = Flags(1 << 5);
    /// The stack could not be taken in full (too deep, or the table is full).
    pub const STACK_CUT: Flags = Flags(1 << 6);
    /// The CUDA call came from inside PyTorch's caching allocator: these bytes are one of its segments.
    pub const IN_ALLOCATOR: Flags = Flags(1 << 7);
    /// CPython's cyclic garbage collector is at work on this thread.
    pub const IN_GC: Flags = Flags(1 << 8);
    /// Nothing happened: this was there before the recording's first event. Only of recordings that others made (PyTorch's snapshots), where
    /// what follows or the state at the end tells of it; it is no older than what it is told before.
    pub const BEFORE: Flags = Flags(1 << 9);

    /// Whether all bits of `other` are set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets of bits.
    #[inline]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One event. Sizes in bytes, addresses as the device or the driver gave them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event {
    /// Place in the process-wide order, from 1, without gaps: a missing number is a lost event.
    pub seq: u64,
    /// When, in [`crate::clock`] ticks.
    pub ticks: u64,
    /// The address (or, see [`Action`], another number of 8 bytes).
    pub addr: u64,
    /// The requested size in bytes ([`Source::TorchReporter`]: the rounded one).
    pub size: u64,
    /// The raw `cudaStream_t`; for VMM calls the allocation handle.
    pub stream: u64,
    /// The Python (and native) stack of the calling thread.
    pub stack: StackId,
    /// What autograd was doing, when the thread runs a backward node; else the `nn.Module` that was being called.
    pub context: ContextId,
    /// Who told us.
    pub source: Source,
    /// What happened.
    pub action: Action,
    /// The device ordinal; -1 for host memory or where it is unknown.
    pub device: i16,
    /// Facts about the moment.
    pub flags: Flags,
    /// CUDA calls: which function. Torch: [`Api::NONE`].
    pub api: Api,
    /// Torch: the private pool (0 = the default pool), see [`crate::definition::Definition::Pool`].
    pub pool: u16,
    /// Torch, `Alloc`: rounded block size less requested size, where [`Flags::SLACK_KNOWN`]. Saturates.
    pub slack: u32,
    /// CUDA calls: the result code (`CUresult` or `cudaError_t`); 0 is success.
    pub result: i32,
    /// CUDA calls: the object that called.
    pub module: ModuleId,
    /// The thread. Not part of the ring slot: the ring has one owner.
    pub thread: ThreadId,
}

/// Size of a ring slot, in 8-byte words.
pub const SLOT_WORDS: usize = 8;
/// One ring slot: 64 bytes, one cache line.
pub type Slot = [u64; SLOT_WORDS];

/// First byte of word 6 of a slot: what the slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum SlotKind {
    /// An event.
    Event = 1,
    /// A free request and the completion that followed it at once: the request's slot, whose last word is how many ticks (low half)
    /// and how many numbers (high half) later it was completed.
    FreeAtOnce = 3,
    /// The head of a definition: word 0 is the length in bytes of the encoded definition, which fills the slots after it.
    Definition = 2,
}

impl SlotKind {
    /// What this slot holds, or `None` for a byte no build of ours writes.
    #[inline]
    pub const fn of(slot: &Slot) -> Option<SlotKind> {
        match slot[6] as u8 {
            1 => Some(SlotKind::Event),
            3 => Some(SlotKind::FreeAtOnce),
            2 => Some(SlotKind::Definition),
            _ => None,
        }
    }
}

impl Event {
    /// An event with every field "none" or zero: the base for struct update.
    pub const EMPTY: Event = Event {
        seq: 0,
        ticks: 0,
        addr: 0,
        size: 0,
        stream: 0,
        stack: StackId::NONE,
        context: ContextId::NONE,
        source: Source::Torch,
        action: Action::Alloc,
        device: -1,
        flags: Flags(0),
        api: Api::NONE,
        pool: 0,
        slack: 0,
        result: 0,
        module: ModuleId::NONE,
        thread: ThreadId::NONE,
    };

    /// The ring slot of this event. Word 6: kind (8 bits), source (3) and action (5), device (16), flags (16), api or
    /// pool (16); word 7: slack or result (32), module (32).
    #[inline]
    pub const fn to_slot(&self) -> Slot {
        let (narrow, wide) =
            if self.source.is_torch() { (self.pool, self.slack) } else { (self.api.0, self.result as u32) };
        [
            self.seq,
            self.ticks,
            self.addr,
            self.size,
            self.stream,
            self.stack.0 as u64 | (self.context.0 as u64) << 32,
            SlotKind::Event as u64
                | (self.source as u64) << 8
                | (self.action as u64) << 11
                | (self.device as u16 as u64) << 16
                | (self.flags.0 as u64) << 32
                | (narrow as u64) << 48,
            wide as u64 | (self.module.0 as u64) << 32,
        ]
    }

    /// The last two words of the slot of an allocation whose block turned out to be `slack` bytes larger than the request.
    #[inline]
    pub const fn amend_slack(slot: &Slot, slack: u32) -> [u64; 2] {
        let [.., w6, w7] = *slot;
        [w6 | (Flags::SLACK_KNOWN.0 as u64) << 32, w7 & !(u32::MAX as u64) | slack as u64]
    }

    /// Whether this completion tells nothing new about the free request in `slot`, but when it was and its number.
    #[inline]
    pub const fn completes(&self, slot: &Slot) -> bool {
        const SAME: u64 = !(0xffff << 32 | 31 << 11);
        let request = self.to_slot();
        let action = (slot[6] >> 11) as u8 & 31;
        matches!(self.action, Action::FreeCompleted)
            && action == Action::FreeRequested as u8
            && slot[2] == request[2]
            && slot[3] == request[3]
            && slot[4] == request[4]
            && slot[6] & SAME == request[6] & SAME
    }

    /// The last two words of a free request's slot that stands for its completion too.
    #[inline]
    pub const fn at_once(slot: &Slot, seq: u64, ticks: u64) -> [u64; 2] {
        let ticks = ticks.saturating_sub(slot[1]);
        let ticks = if ticks > u32::MAX as u64 { u32::MAX as u64 } else { ticks };
        [slot[6] & !0xff | SlotKind::FreeAtOnce as u64, ticks | seq.wrapping_sub(slot[0]) << 32]
    }

    /// The completion in the slot of this free request; `None` where the slot holds none.
    #[inline]
    pub const fn completion(&self, slot: &Slot) -> Option<Event> {
        if slot[6] as u8 != SlotKind::FreeAtOnce as u8 {
            return None;
        }
        let (ticks, later) = (slot[7] & u32::MAX as u64, slot[7] >> 32);
        Some(Event {
            seq: self.seq.wrapping_add(later),
            ticks: self.ticks.wrapping_add(ticks),
            action: Action::FreeCompleted,
            ..*self
        })
    }

    /// The event in this slot (of two, the first), or `None` when the slot holds something else or an unknown source or action.
    #[inline]
    pub const fn from_slot(slot: &Slot, thread: ThreadId) -> Option<Event> {
        let w = slot[6];
        let (wide, module) = match SlotKind::of(slot) {
            Some(SlotKind::Event) => (slot[7] as u32, (slot[7] >> 32) as u32),
            Some(SlotKind::FreeAtOnce) => (0, 0),
            _ => return None,
        };
        let Some(source) = Source::from_wire((w >> 8) as u8 & 7) else { return None };
        let Some(action) = Action::from_wire((w >> 11) as u8 & 31) else { return None };
        let narrow = (w >> 48) as u16;
        let torch = source.is_torch();
        Some(Event {
            seq: slot[0],
            ticks: slot[1],
            addr: slot[2],
            size: slot[3],
            stream: slot[4],
            stack: StackId(slot[5] as u32),
            context: ContextId((slot[5] >> 32) as u32),
            source,
            action,
            device: (w >> 16) as u16 as i16,
            flags: Flags((w >> 32) as u16),
            api: if torch { Api::NONE } else { Api(narrow) },
            pool: if torch { narrow } else { 0 },
            slack: if torch { wide } else { 0 },
            result: if torch { 0 } else { wide as i32 },
            module: ModuleId(module),
            thread,
        })
    }

    /// The size of the block that the allocator set aside, where it is known; else the requested size.
    #[inline]
    pub const fn block_size(&self) -> u64 {
        self.size + self.slack as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_event() -> impl Strategy<Value = Event> {
        let numbers = (any::<[u64; 5]>(), any::<[u32; 4]>(), any::<i16>(), any::<[u16; 2]>(), any::<i32>());
        (numbers, 0u8..6, 0u8..24).prop_filter_map("a known action", |((w, i, device, n, result), source, action)| {
            let source = Source::from_wire(source)?;
            let torch = source.is_torch();
            Some(Event {
                seq: w[0],
                ticks: w[1],
                addr: w[2],
                size: w[3],
                stream: w[4],
                stack: StackId(i[0]),
                context: ContextId(i[1]),
                source,
                action: Action::from_wire(action)?,
                device,
                flags: Flags(n[0]),
                api: if torch { Api::NONE } else { Api(n[1]) },
                pool: if torch { n[1] } else { 0 },
                slack: if torch { i[2] } else { 0 },
                result: if torch { 0 } else { result },
                module: ModuleId(i[3]),
                thread: ThreadId(7),
            })
        })
    }

    proptest! {
        #[test]
        fn a_slot_carries_every_field(event in any_event()) {
            prop_assert_eq!(Event::from_slot(&event.to_slot(), ThreadId(7)), Some(event));
        }

        #[test]
        fn a_request_and_its_completion_share_a_slot(event in any_event(), later in 1u64..1 << 32, ticks in 0u64..1 << 32) {
            let request = Event {
                source: Source::Torch,
                action: Action::FreeRequested,
                api: Api::NONE,
                slack: 0,
                result: 0,
                module: ModuleId::NONE,
                ..event
            };
            let (seq, at) = (request.seq.wrapping_add(later), request.ticks.saturating_add(ticks));
            let done = Event { seq, ticks: at, action: Action::FreeCompleted, ..request };
            let mut slot = request.to_slot();
            prop_assert!(done.completes(&slot));
            prop_assert!(done.completes(&slot));
            let others = [
                Event { addr: done.addr ^ 1, ..done },
                Event { size: done.size ^ 1, ..done },
                Event { stream: done.stream ^ 1, ..done },
                Event { device: done.device ^ 1, ..done },
                Event { pool: done.pool ^ 1, ..done },
            ];
            prop_assert!(others.iter().all(|other| !other.completes(&slot)));
            let otherwise_taken = Event { flags: Flags(0), stack: StackId(1), context: ContextId(1), ..done };
            prop_assert!(otherwise_taken.completes(&slot));
            prop_assert!(!done.completes(&done.to_slot()));
            prop_assert_eq!(request.completion(&slot), None);
            [slot[6], slot[7]] = Event::at_once(&slot, seq, at);
            let read = Event::from_slot(&slot, ThreadId(7));
            prop_assert_eq!(read, Some(request));
            prop_assert_eq!(request.completion(&slot), Some(done));
        }

        #[test]
        fn any_slot_is_an_event_or_refused(slot in any::<Slot>()) {
            let _ = Event::from_slot(&slot, ThreadId(1));
        }
    }
}
