//! One event: what happened to one range of memory, at which time, on which thread and from which stack.
//!
//! In the traced process an event is one 64-byte ring slot ([`Event::to_slot`]). In the trace file it is a row of a
//! columnar block. Both contain exactly these fields.

use crate::api::Api;
use crate::ids::{ContextId, ModuleId, StackId, ThreadId};
pub use crate::source::Source;

/// What happened. The first ten are PyTorch's `TraceEntry::Action`, with the same numbers and names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Action {
    /// A block was allocated. For a CUDA call: memory was allocated (see [`Event::api`]).
    Alloc = 0,
    /// The program freed a block. Unless the free is deferred, `FreeCompleted` follows at once.
    FreeRequested = 1,
    /// The block may be reused. For a CUDA call: memory was freed.
    FreeCompleted = 2,
    /// The caching allocator allocated a segment (`cudaMalloc`).
    SegmentAlloc = 3,
    /// The caching allocator freed a segment (`cudaFree`).
    SegmentFree = 4,
    /// Part of an expandable segment was mapped.
    SegmentMap = 5,
    /// Part of an expandable segment was unmapped.
    SegmentUnmap = 6,
    /// The program took a snapshot. `size` is the total of active bytes.
    Snapshot = 7,
    /// An allocation failed for good. `size` is the rounded request, `addr` the free bytes of the device.
    Oom = 8,
    /// PyTorch >= 2.14: a text was attached to a block.
    Annotate = 9,
    /// A CUDA free, recorded before its call, has failed. `addr` is the [`Event::seq`] of the event to cancel.
    Retract = 16,
    /// The allocator's own totals, to verify a replay: `addr` is the bytes allocated, `size` the bytes reserved.
    ///
    /// For a CUDA call these are the totals of the stream-ordered pool with the handle `stream`, recorded when its
    /// reserved bytes have changed.
    Totals = 17,
    /// Physical memory was mapped at an address (`cuMemMap`). `stream` is its handle.
    Map = 18,
    /// Physical memory was unmapped (`cuMemUnmap`).
    Unmap = 19,
    /// An address range was reserved, without memory (`cuMemAddressReserve`).
    Reserve = 20,
    /// An address range was freed (`cuMemAddressFree`).
    Unreserve = 21,
    /// A range that the program named begins. `addr` is the label's id ([`crate::definition::Definition::Label`]).
    ///
    /// `size` is 0 for a range that nests on its thread. Otherwise it is a number that identifies the range's end
    /// (`nvtxRangeStart`), which may come from another thread.
    RangeStart = 22,
    /// A named range ends. `addr` and `size` are those of its start.
    ///
    /// `addr` is 0 if the program does not name the range. Then a `size` that is not 0 identifies the range by its
    /// number. With a `size` of 0 it is the innermost nested NVTX range of its thread in the domain `stream` (0 is the
    /// default domain).
    RangeEnd = 23,
    /// The driver was asked how much of the device's memory is in use (`cuMemGetInfo`). Since 1.4.
    ///
    /// `addr` is the free bytes and `size` the total bytes of the whole device, other processes included. `stream` is
    /// the occasion ([`UsageOccasion`]). `api` and `module` are those of the call that was the occasion, if any. The
    /// effects of that call are included, and its own event precedes this one, except before a context is created.
    DeviceUsage = 24,
    /// A call about a CUDA graph; [`Event::api`] says which. `addr` is the graph after the end of a capture, otherwise
    /// the executable graph, and 0 at the begin of a capture.
    ///
    /// `stream` is the captured stream; at an instantiation it is the graph. `size` is the number of nodes after the
    /// end of a capture. At an instantiation or an upload it is the device memory that the call took, in bytes.
    Graph = 25,
    /// Only in rotated traces (`--keep`), with [`Flags::PREEXISTING`]: what earlier blocks have left in the bookkeeping of
    /// PyTorch's allocator. Since 1.5.
    ///
    /// The block at `addr` was last requested with `size` bytes, if it is free. `stack` and `context` are those of its
    /// segment. `slack` is 1 in the pool of small blocks.
    BlockState = 27,
}

/// Why the driver was asked for the device's memory in use ([`Action::DeviceUsage`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum UsageOccasion {
    /// Any other occasion, including those of a newer build.
    Other = 0,
    /// A context was created on the device. The reading may precede the recording; its event does not.
    ContextCreated = 1,
    /// A module or library with kernels was loaded.
    CodeLoaded = 2,
    /// This process has allocated more of the device's memory than at any reading before.
    Allocated = 3,
    /// An allocation failed because no memory was left.
    OutOfMemory = 4,
    /// memtrace has scanned the program's objects for tensor names: at the ends of backward passes and optimizer steps,
    /// ever more rarely.
    Scan = 5,
    /// A context is about to be created on the device, which has one already.
    ContextRequested = 6,
}

impl UsageOccasion {
    /// The occasion with this wire number ([`Event::stream`]). A number of a newer build is [`Self::Other`].
    pub const fn from_wire(number: u64) -> UsageOccasion {
        match number {
            1 => UsageOccasion::ContextCreated,
            2 => UsageOccasion::CodeLoaded,
            3 => UsageOccasion::Allocated,
            4 => UsageOccasion::OutOfMemory,
            5 => UsageOccasion::Scan,
            6 => UsageOccasion::ContextRequested,
            _ => UsageOccasion::Other,
        }
    }
}

impl Action {
    /// The action with this wire number. `None` if it is unknown.
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
            24 => Action::DeviceUsage,
            25 => Action::Graph,
            27 => Action::BlockState,
            _ => return None,
        })
    }

    /// The name in PyTorch's snapshots, or memtrace's own name for actions that PyTorch does not have.
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
            Action::DeviceUsage => "device_usage",
            Action::Graph => "graph",
            Action::BlockState => "block_state",
        }
    }
}

/// Facts about the point in time of an event, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[repr(transparent)]
pub struct Flags(pub u16);

impl Flags {
    /// The thread is inside `torch::autograd::Engine::evaluate_function`, so it runs backward.
    pub const IN_BACKWARD: Flags = Flags(1 << 0);
    /// Autograd was recording (`c10::GradMode::is_enabled()`). Only valid together with [`Self::GRAD_KNOWN`].
    pub const GRAD_ENABLED: Flags = Flags(1 << 1);
    /// [`Self::GRAD_ENABLED`] is valid.
    pub const GRAD_KNOWN: Flags = Flags(1 << 2);
    /// A driver call inside a hooked runtime call. Its bytes are counted here. The runtime event that follows on this
    /// thread has [`Self::HAS_NESTED`].
    pub const NESTED: Flags = Flags(1 << 3);
    /// A runtime call whose driver call was recorded too. Its bytes must not be counted again.
    pub const HAS_NESTED: Flags = Flags(1 << 4);
    /// [`Event::slack`] is valid: the block's rounded size is `size + slack`.
    pub const SLACK_KNOWN: Flags = Flags(1 << 5);
    /// The stack is not complete (too deep, or a table was full).
    pub const STACK_TRUNCATED: Flags = Flags(1 << 6);
    /// PyTorch's caching allocator made the CUDA call, for one of its segments.
    pub const IN_ALLOCATOR: Flags = Flags(1 << 7);
    /// CPython's cyclic garbage collector is running on this thread.
    pub const IN_GC: Flags = Flags(1 << 8);
    /// The event recreates what existed before the recording's first event, such as a block.
    ///
    /// In recordings of other tools (PyTorch's snapshots), later events or the final state show that it existed. In
    /// recordings of `memtrace attach`, PyTorch's allocator has listed it. The event has no stack unless its source has. In a
    /// rotated trace ([`crate::rotation`]) it is the original event, of which later events need the effect.
    pub const PREEXISTING: Flags = Flags(1 << 9);

    /// Whether all bits of `other` are set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both sets of bits.
    #[inline]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One event. Sizes are in bytes, addresses are those of the device or the driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event {
    /// The position in the process-wide order, from 1, without gaps. A missing number is a lost event. After the events
    /// that recreate what `memtrace attach` has found, the numbers continue at 2^24.
    pub seq: u64,
    /// The timestamp, in the unit of [`crate::clock`].
    pub ticks: u64,
    /// The address, or another 8-byte number (see [`Action`]).
    pub addr: u64,
    /// The requested size in bytes. For [`Source::TorchReporter`], the rounded size.
    pub size: u64,
    /// The raw `cudaStream_t`. For VMM calls, the allocation handle.
    pub stream: u64,
    /// The Python (and native) stack of the calling thread.
    pub stack: StackId,
    /// The autograd node that the thread runs, otherwise the `nn.Module` that is being called.
    pub context: ContextId,
    /// Where the event comes from.
    pub source: Source,
    /// What happened.
    pub action: Action,
    /// The device ordinal. -1 for host memory, and if it is unknown.
    pub device: i16,
    /// Facts about the point in time.
    pub flags: Flags,
    /// For CUDA calls, the function. For PyTorch's allocators, [`Api::NONE`].
    pub api: Api,
    /// For PyTorch's allocators, the private pool ([`crate::definition::Definition::Pool`]). 0 is the default pool.
    pub pool: u16,
    /// For `Alloc` of PyTorch's allocators, the rounded block size minus the requested size, valid with
    /// [`Flags::SLACK_KNOWN`]. Larger differences saturate.
    pub slack: u32,
    /// For CUDA calls, the result code (`CUresult` or `cudaError_t`). 0 is success.
    pub result: i32,
    /// For CUDA calls, the object that made the call.
    pub module: ModuleId,
    /// The thread. It is not part of the ring slot, because a ring has one owner.
    pub thread: ThreadId,
}

/// The size of a ring slot in 8-byte words.
pub const SLOT_WORDS: usize = 8;
/// One ring slot: 64 bytes, one cache line.
pub type Slot = [u64; SLOT_WORDS];

/// The first byte of word 6 of a slot: the slot's content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum SlotKind {
    /// An event.
    Event = 1,
    /// A free request and the completion that followed at once. The last word of the request's slot is the distance to
    /// the completion. The low half is in timestamp units, the high half in event numbers.
    CompletedFree = 3,
    /// The start of a definition. Word 0 is the length in bytes of the encoded definition, which fills the following
    /// slots.
    Definition = 2,
}

impl SlotKind {
    /// The content of this slot. `None` for a byte that no memtrace writes.
    #[inline]
    pub const fn of(slot: &Slot) -> Option<SlotKind> {
        match slot[6] as u8 {
            1 => Some(SlotKind::Event),
            3 => Some(SlotKind::CompletedFree),
            2 => Some(SlotKind::Definition),
            _ => None,
        }
    }
}

impl Event {
    /// An event whose fields are all zero or "none", as a base for struct updates.
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

    /// The ring slot of this event. Word 6: kind (8 bits), source (3), action (5), device (16), flags (16), api or pool
    /// (16). Word 7: slack or result (32), module (32).
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

    /// The last two words of an allocation's slot whose block is `slack` bytes larger than the request.
    #[inline]
    pub const fn amend_slack(slot: &Slot, slack: u32) -> [u64; 2] {
        let [.., w6, w7] = *slot;
        [w6 | (Flags::SLACK_KNOWN.0 as u64) << 32, w7 & !(u32::MAX as u64) | slack as u64]
    }

    /// Whether this completion differs from the free request in `slot` only in its time and number.
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

    /// The last two words of a free request's slot that includes its completion. Time differences saturate at 32 bits.
    #[inline]
    pub const fn complete_free(slot: &Slot, seq: u64, ticks: u64) -> [u64; 2] {
        let ticks = ticks.saturating_sub(slot[1]);
        let ticks = if ticks > u32::MAX as u64 { u32::MAX as u64 } else { ticks };
        [slot[6] & !0xff | SlotKind::CompletedFree as u64, ticks | seq.wrapping_sub(slot[0]) << 32]
    }

    /// The completion in the slot of this free request. `None` if the slot contains none.
    #[inline]
    pub const fn completion(&self, slot: &Slot) -> Option<Event> {
        if slot[6] as u8 != SlotKind::CompletedFree as u8 {
            return None;
        }
        let (ticks, distance) = (slot[7] & u32::MAX as u64, slot[7] >> 32);
        Some(Event {
            seq: self.seq.wrapping_add(distance),
            ticks: self.ticks.wrapping_add(ticks),
            action: Action::FreeCompleted,
            ..*self
        })
    }

    /// The event in this slot, or the first of two. `None` if the slot contains something else, or an unknown source or
    /// action.
    #[inline]
    pub const fn from_slot(slot: &Slot, thread: ThreadId) -> Option<Event> {
        let w = slot[6];
        let (wide, module) = match SlotKind::of(slot) {
            Some(SlotKind::Event) => (slot[7] as u32, (slot[7] >> 32) as u32),
            Some(SlotKind::CompletedFree) => (0, 0),
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

    /// The size in bytes of the allocator's block if it is known, otherwise the requested size.
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
        (numbers, 0u8..6, 0u8..28).prop_filter_map("a known action", |((w, i, device, n, result), source, action)| {
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
        fn a_slot_stores_every_field(event in any_event()) {
            prop_assert_eq!(Event::from_slot(&event.to_slot(), ThreadId(7)), Some(event));
        }

        #[test]
        fn a_request_and_its_completion_share_a_slot(event in any_event(), distance in 1u64..1 << 32, ticks in 0u64..1 << 32) {
            let request = Event {
                source: Source::Torch,
                action: Action::FreeRequested,
                api: Api::NONE,
                slack: 0,
                result: 0,
                module: ModuleId::NONE,
                ..event
            };
            let (seq, at) = (request.seq.wrapping_add(distance), request.ticks.saturating_add(ticks));
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
            let other_circumstances = Event { flags: Flags(0), stack: StackId(1), context: ContextId(1), ..done };
            prop_assert!(other_circumstances.completes(&slot));
            prop_assert!(!done.completes(&done.to_slot()));
            prop_assert_eq!(request.completion(&slot), None);
            [slot[6], slot[7]] = Event::complete_free(&slot, seq, at);
            let read = Event::from_slot(&slot, ThreadId(7));
            prop_assert_eq!(read, Some(request));
            prop_assert_eq!(request.completion(&slot), Some(done));
        }

        #[test]
        fn any_slot_is_an_event_or_rejected(slot in any::<Slot>()) {
            let _ = Event::from_slot(&slot, ThreadId(1));
        }
    }
}
