//! One event: what happened to one range of memory, at which time, on which thread and from which stack.
//!
//! In the traced process an event is one 64-byte ring slot ([`Event::to_slot`]). In the trace file it is a row of a
//! columnar block. Both contain exactly these fields.

pub use crate::action::{Action, UsageOccasion};
use crate::api::{Api, Effect};
use crate::ids::{ContextId, ModuleId, StackId, ThreadId};
use crate::named;
pub use crate::source::Source;

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
    /// recordings of `memtrace attach`, PyTorch's allocator has listed it. The event has no stack unless its source
    /// has. In a rotated trace ([`crate::rotation`]) it is the original event, of which later events need the effect.
    pub const PREEXISTING: Flags = Flags(1 << 9);
    /// PyTorch's functions for workspaces of cuBLAS and cuBLASLt allocated the block. Only valid if a notice of the
    /// topic [`WORKSPACES_TOPIC`](crate::definition::WORKSPACES_TOPIC) says that they are known.
    pub const CUBLAS_WORKSPACE: Flags = Flags(1 << 10);

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
    /// The address. Some actions have another 8-byte number here, which [`Event::free_bytes`] and others name.
    pub addr: u64,
    /// The requested size in bytes. For [`Source::TorchReporter`], the rounded size.
    pub size: u64,
    /// The raw `cudaStream_t`. Some actions have a handle here, which [`Event::memory_handle`] and others name.
    pub stream: u64,
    /// The Python (and native) stack of the calling thread.
    pub stack: StackId,
    /// The autograd node that the thread runs, otherwise the `nn.Module` that is being called.
    pub context: ContextId,
    /// Where the event comes from.
    pub source: Source,
    /// The action that the event reports.
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

named! {
    /// The first byte of word 6 of a slot: the slot's content.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum SlotKind {
        /// An event.
        Event = 1,
        /// A free request and the completion that followed at once. The last word of the request's slot is the distance
        /// to the completion. The low half is in timestamp units, the high half in event numbers.
        CompletedFree = 3,
        /// The start of a definition. Word 0 is the length in bytes of the encoded definition, which fills the
        /// following slots.
        Definition = 2,
    }
}

impl SlotKind {
    /// The content of this slot. `None` for a byte that no memtrace writes.
    #[inline]
    pub const fn of(slot: &Slot) -> Option<SlotKind> {
        SlotKind::from_wire(slot[6] & 0xff)
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
        let Some(source) = Source::from_wire(w >> 8 & 7) else { return None };
        let Some(action) = Action::from_wire(w >> 11 & 31) else { return None };
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

/// Two fields have another meaning for some actions. Readers of those actions use these accessors.
impl Event {
    /// The free bytes of the device: [`Action::DeviceUsage`], and [`Action::Oom`] of PyTorch's tracker.
    #[inline]
    pub const fn free_bytes(&self) -> u64 {
        self.addr
    }

    /// The bytes of the device in use, by whatever process: [`Action::DeviceUsage`].
    #[inline]
    pub const fn used_bytes(&self) -> u64 {
        self.size.saturating_sub(self.addr)
    }

    /// Why the driver was asked: [`Action::DeviceUsage`].
    #[inline]
    pub fn occasion(&self) -> UsageOccasion {
        UsageOccasion::from_wire(self.stream).unwrap_or_default()
    }

    /// The [`Event::seq`] of the free that has failed: [`Action::Retract`].
    #[inline]
    pub const fn retracted_seq(&self) -> u64 {
        self.addr
    }

    /// The allocated bytes of the allocator: [`Action::Totals`].
    #[inline]
    pub const fn allocated_bytes(&self) -> u64 {
        self.addr
    }

    /// The reserved bytes of the allocator: [`Action::Totals`].
    #[inline]
    pub const fn reserved_bytes(&self) -> u64 {
        self.size
    }

    /// The handle of the stream-ordered pool: [`Action::Totals`] of a CUDA call.
    #[inline]
    pub const fn pool_handle(&self) -> u64 {
        self.stream
    }

    /// The handle of physical memory: [`Action::Map`], and calls that create, import, retain or release a handle.
    #[inline]
    pub const fn memory_handle(&self) -> u64 {
        if matches!(self.action, Action::Map) { self.stream } else { self.addr }
    }

    /// The hash of the handle with which processes share memory: calls that export or import such a handle.
    #[inline]
    pub const fn ipc_hash(&self) -> u64 {
        self.stream
    }

    /// The label of a named range, 0 if its end does not name it: [`Action::RangeStart`], [`Action::RangeEnd`].
    #[inline]
    pub const fn label_id(&self) -> u64 {
        self.addr
    }

    /// The number of a named range, 0 if it nests on its thread: [`Action::RangeStart`], [`Action::RangeEnd`].
    #[inline]
    pub const fn range_number(&self) -> u64 {
        self.size
    }

    /// The NVTX domain of a named range: [`Action::RangeStart`], [`Action::RangeEnd`].
    #[inline]
    pub const fn range_domain(&self) -> u64 {
        self.stream
    }

    /// The CUDA graph: [`Action::Graph`] at the end of a capture and at an instantiation.
    #[inline]
    pub const fn graph(&self) -> u64 {
        if matches!(self.api.effect(), Some(Effect::Instantiates)) { self.stream } else { self.addr }
    }

    /// The executable CUDA graph: [`Action::Graph`] at an instantiation, an upload and a destruction.
    #[inline]
    pub const fn executable_graph(&self) -> u64 {
        self.addr
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_event() -> impl Strategy<Value = Event> {
        let numbers = (any::<[u64; 5]>(), any::<[u32; 4]>(), any::<i16>(), any::<[u16; 2]>(), any::<i32>());
        (numbers, 0u8..6, 0u8..28).prop_filter_map("a known action", |((w, i, device, n, result), source, action)| {
            let source = Source::from_wire(source.into())?;
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
                action: Action::from_wire(action.into())?,
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
        fn a_request_and_its_completion_share_a_slot(
            event in any_event(),
            distance in 1u64..1 << 32,
            ticks in 0u64..1 << 32,
        ) {
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
