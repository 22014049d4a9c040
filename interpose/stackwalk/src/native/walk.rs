//! A thread's cache of its last native walk, so that only what has changed is unwound.
//!
//! # Why it is correct
//!
//! Unwinding is a function of three inputs. They are a frame's [`FrameRegisters`] (instruction pointer, stack pointer,
//! frame pointer, called `bp` here), the rule for its instruction pointer, and the words that the rule reads. These
//! alone determine the caller's state. The thread keeps the states of its last walk; index 0 is the outermost. With
//! each state it keeps the addresses of the words that were read to unwind it. The values of these words are in the
//! caller's cached state.
//!
//! A capture unwinds from the present registers. Once a frame's state *equals* a cached one, its callers need not be
//! unwound. Instead, the cached words are compared with their present values. If all are equal, all states down to the
//! outermost are what unwinding would give. This follows by induction: the same state, the same rule and the same words
//! give the same caller's state. At the first word that differs, that frame's state is still correct. Unwinding
//! continues from there and may reach cached states again further out.
//!
//! - *Same rule*: a rule is a function of the address as long as the object with that address is loaded. After an
//!   unload ([`unloads`]) the whole cache is dropped. The end of a walk (the outermost frame, or a guess that failed)
//!   is not cached but determined again each time.
//! - *`bp` matters only where it is used*: most code keeps a value of its own in it, which changes each time. A
//!   frame's `bp` matters if its rule computes an address from it, or if it passes it unchanged to a caller where it
//!   matters. Otherwise it is not compared. It is still kept up to date, because another caller may make it matter.
//! - *Words are read where unwinding would read them*: between the present stack pointer and the end of the thread's
//!   own stack. The addresses were inside these bounds when they were cached. They are at or above the stack pointer of
//!   their frame, which the present walk has just reached. The bounds' end is compared. Frames on other stacks (a
//!   signal's, a coroutine's) are not cached.
//! - *The link register of an interrupted frame* is read from the signal's frame below it, which is not above its stack
//!   pointer. So such a frame is not cached.
//! - *Stack pointers select the cached state to compare with*, because they grow towards the outermost frame. A wrong
//!   selection costs time. Only equality leads to a conclusion.
//!
//! # Constraints
//!
//! A known stack needs no allocation, no lock and no system call. The struct is plain data without a destructor. It is
//! stored with the thread's ring and passes to the ring's next owner.

use memtrace_trace::ids::StackId;

use super::super::arch;
use super::super::key_cache::FrameMeaning;
use super::super::loader::unload_count;
use super::array::{Array, Zeroed};
use super::memory::StackMemory;
use super::rule::{FrameRegisters, ReadAddresses, UnwindRule, UnwindStep, unwind_by_frame_pointer};
use super::rules;

/// The deepest walk. Deeper stacks lose their outermost frames, which is counted.
pub(crate) const MAX_DEPTH: usize = 8192;
/// At most this many consecutive frames of generated code are accepted as a chain of frame pointers.
const MAX_GUESSES: u32 = 32;

/// A frame of the walk.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Entry {
    pub(super) state: FrameRegisters,
    /// The meaning of the frame, for the caller of the walk. Unknown for a new frame.
    pub(super) meaning: FrameMeaning,
    /// The stack up to this frame, for the caller of the walk.
    pub(super) stack: StackId,
    /// The offsets that were read to unwind it. Unused in the outermost entry.
    reads: ReadOffsets,
    /// Whether its `bp` affects any caller's state.
    is_bp_used: bool,
}

// SAFETY: the fields are numbers and `bool`s, for which zero is valid.
unsafe impl Zeroed for Entry {}

const _: () = assert!(size_of::<Entry>() == 64, "an entry is one cache line");

/// [`ReadAddresses`] as distances from the frame's stack pointer in bytes, with the lowest bit set. 0 means not read.
#[derive(Clone, Copy, Default)]
struct ReadOffsets {
    ip: u32,
    bp: u32,
    sp: u32,
    uses_bp: bool,
    /// Whether all words are in the thread's own stack, so that they can be loaded directly.
    is_on_own_stack: bool,
}

impl ReadOffsets {
    #[inline]
    fn new(reads: ReadAddresses, sp: usize, memory: &StackMemory) -> ReadOffsets {
        let mut is_on_own_stack = true;
        let mut distance = |at: usize| {
            if at == 0 {
                return 0;
            }
            let found = at.checked_sub(sp).filter(|_| memory.is_own(at)).and_then(|d| u32::try_from(d).ok());
            is_on_own_stack &= found.is_some_and(|d| d & 1 == 0);
            found.unwrap_or(0) | 1
        };
        let (ip, bp, sp) = (distance(reads.ip), distance(reads.bp), distance(reads.sp));
        ReadOffsets { ip, bp, sp, uses_bp: reads.uses_bp, is_on_own_stack }
    }

    /// Reads a cached word.
    ///
    /// # Safety
    ///
    /// [`Self::is_on_own_stack`] was true when this was made from a frame with this stack pointer. The frame is at or
    /// above the present stack pointer, on a stack with the same end. `distance` is one of the fields and not 0.
    #[inline]
    unsafe fn word(sp: usize, distance: u32) -> usize {
        // SAFETY: the caller guarantees that the word is in the thread's own stack, above the present stack pointer.
        unsafe { std::ptr::with_exposed_provenance::<usize>(sp + (distance & !1) as usize).read_unaligned() }
    }
}

impl Entry {
    /// Whether a frame with this state is this frame, in everything that affects its callers.
    #[inline]
    fn is_same_frame(&self, state: &FrameRegisters) -> bool {
        self.state.ip == state.ip
            && self.state.sp == state.sp
            && self.state.exact == state.exact
            && (!self.is_bp_used || self.state.bp == state.bp)
    }
}

/// How a walk ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WalkEnd {
    /// At the outermost frame.
    Outermost,
    /// Before it, because unwinding information is missing or wrong.
    Lost,
    /// At [`MAX_DEPTH`].
    TooDeep,
    /// The kernel refused memory, so there are no frames.
    NoMemory,
}

/// The result of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkResult {
    /// The number of frames.
    pub(super) depth: usize,
    /// Entries from this index on are new and may have another meaning than before.
    pub(super) changed: usize,
    pub(super) end_kind: WalkEnd,
}

/// The cache of a thread's last walk.
pub(super) struct Walk {
    /// Index 0 is the outermost frame.
    entries: Array<Entry>,
    /// New frames during a walk, innermost first.
    new_frames: Array<Entry>,
    /// Entries `0..known` are valid.
    known: usize,
    /// The end of the stack to which the entries belong.
    end: usize,
    unloads: u32,
    end_kind: WalkEnd,
}

impl Walk {
    pub(super) const fn new() -> Walk {
        Walk {
            entries: Array::new(),
            new_frames: Array::new(),
            known: 0,
            end: 0,
            unloads: 0,
            end_kind: WalkEnd::Outermost,
        }
    }

    /// Frees the memory.
    pub(super) fn release(&mut self) {
        self.entries.release();
        self.new_frames.release();
        *self = Walk::new();
    }

    /// An entry of the last walk.
    #[inline]
    pub(super) fn entry_mut(&mut self, index: usize) -> &mut Entry {
        self.entries.get_mut(index)
    }

    /// An entry of the last walk.
    #[inline]
    pub(super) fn entry(&self, index: usize) -> &Entry {
        self.entries.get(index)
    }

    /// Drops all entries.
    pub(super) fn forget(&mut self) {
        self.known = 0;
    }

    /// Walks the stack from `start`. These are the registers of a frame of the calling thread that does not return
    /// before this function.
    #[inline]
    pub(super) fn walk(&mut self, start: FrameRegisters, memory: &mut StackMemory) -> WalkResult {
        let unloads = unload_count();
        if unloads != Some(self.unloads) || self.end != memory.end() {
            self.known = 0;
            self.unloads = unloads.unwrap_or(0);
            self.end = memory.end();
        }
        let mut new_frames = 0;
        // The walk may still reach entries `0..below`.
        let mut below = self.known;
        let mut state = start;
        let mut guesses = 0;
        // Where a signal frame has saved the link register of `state`. 0 if it is no interrupted frame.
        let mut link = 0;
        let end_kind = loop {
            while below > 0 && self.entries.get(below - 1).state.sp < state.sp {
                below -= 1;
            }
            if below > 0 && self.entries.get(below - 1).is_same_frame(&state) {
                self.entries.get_mut(below - 1).state.bp = state.bp;
                match self.first_difference(below - 1, memory, unloads) {
                    None => break self.end_kind,
                    Some(differs) => {
                        // The frames up to the difference are unchanged, but their indices may change. The frame that
                        // differs is unwound again below.
                        if !self.new_frames.reserve(new_frames + below - differs) {
                            return self.without_memory();
                        }
                        for index in (differs..below).rev() {
                            *self.new_frames.get_mut(new_frames) = *self.entries.get(index);
                            new_frames += 1;
                        }
                        below = differs;
                        state = self.entries.get(differs).state;
                        // The words of a cached frame are on the stack, so it does not need the link register.
                        link = 0;
                    }
                }
            } else {
                if !self.new_frames.reserve(new_frames + 1) {
                    return self.without_memory();
                }
                *self.new_frames.get_mut(new_frames) = Entry {
                    state,
                    meaning: FrameMeaning::UNKNOWN,
                    stack: StackId::NONE,
                    reads: ReadOffsets::default(),
                    is_bp_used: false,
                };
                new_frames += 1;
            }
            if new_frames >= MAX_DEPTH {
                below = 0;
                break WalkEnd::TooDeep;
            }
            let rule = rules::rule(&state, unloads);
            match unwind(&rule, state, link, memory, unloads, &mut guesses) {
                UnwindStep::Caller(caller, reads) => {
                    link = saved_link(&rule, &state);
                    self.new_frames.get_mut(new_frames - 1).reads = ReadOffsets::new(reads, state.sp, memory);
                    state = caller;
                }
                end => {
                    below = 0;
                    break if end == UnwindStep::End { WalkEnd::Outermost } else { WalkEnd::Lost };
                }
            }
        };
        self.store(below, new_frames, unloads, end_kind)
    }

    /// Makes the entries `0..below` and the new frames the last walk.
    #[inline]
    fn store(&mut self, below: usize, mut new_frames: usize, unloads: Option<u32>, end_kind: WalkEnd) -> WalkResult {
        if end_kind == WalkEnd::Lost {
            // A frame from a guess that led nowhere is dropped. The leaf is kept, because it is ours.
            while new_frames > 1
                && is_outside_objects(&rules::rule(&self.new_frames.get(new_frames - 1).state, unloads))
            {
                new_frames -= 1;
            }
        }
        let depth = below + new_frames;
        if !self.entries.reserve(depth) {
            return self.without_memory();
        }
        for index in 0..new_frames {
            *self.entries.get_mut(depth - 1 - index) = *self.new_frames.get(index);
        }
        // The outermost frame is unwound again each time, so its `bp` matters.
        let mut is_used = below.checked_sub(1).is_none_or(|index| self.entries.get(index).is_bp_used);
        for index in below..depth {
            let entry = self.entries.get_mut(index);
            is_used = index == 0 || entry.reads.uses_bp || (entry.reads.bp == 0 && is_used);
            entry.is_bp_used = is_used;
        }
        self.known = if unloads.is_none() || depth == 0 {
            0
        } else {
            (below.max(1)..depth).find(|index| !self.entries.get(*index).reads.is_on_own_stack).unwrap_or(depth)
        };
        self.end_kind = end_kind;
        WalkResult { depth, changed: below, end_kind }
    }

    /// The highest index up to `from` whose frame has another caller than before. `None` if all callers are unchanged.
    /// Updates `bp` in all entries that it reaches.
    #[inline]
    fn first_difference(&mut self, from: usize, memory: &mut StackMemory, unloads: Option<u32>) -> Option<usize> {
        let Entry { state: FrameRegisters { mut sp, mut bp, .. }, mut reads, .. } = *self.entries.get(from);
        for index in (0..from).rev() {
            let caller = self.entries.get_mut(index);
            // SAFETY: entries below `known` have words inside the thread's own stack (`is_on_own_stack`). They are
            // above the present stack pointer, because the walk has reached this frame. The stack's end was compared.
            let (ip_now, sp_now) = unsafe {
                let sp_now = if reads.sp == 0 { caller.state.sp } else { ReadOffsets::word(sp, reads.sp) };
                (arch::without_signature(ReadOffsets::word(sp, reads.ip)), sp_now)
            };
            if reads.bp != 0 {
                // SAFETY: entries below `known` have words inside the thread's own stack (`is_on_own_stack`). They are
                // above the present stack pointer, because the walk has reached this frame. The stack's end was
                // compared.
                bp = unsafe { ReadOffsets::word(sp, reads.bp) };
            }
            if ip_now != caller.state.ip || sp_now != caller.state.sp || (caller.is_bp_used && bp != caller.state.bp) {
                return Some(index + 1);
            }
            caller.state.bp = bp;
            (sp, reads) = (sp_now, caller.reads);
        }
        let outermost = self.entries.get(0).state;
        let rule = rules::rule(&outermost, unloads);
        match unwind(&rule, outermost, 0, memory, unloads, &mut 0) {
            UnwindStep::End if self.end_kind == WalkEnd::Outermost => None,
            UnwindStep::Lost if self.end_kind == WalkEnd::Lost => None,
            _ => Some(0),
        }
    }

    #[cold]
    fn without_memory(&mut self) -> WalkResult {
        self.known = 0;
        WalkResult { depth: 0, changed: 0, end_kind: WalkEnd::NoMemory }
    }
}

/// Where a frame with this rule and state has saved the link register of its caller: a signal frame. Otherwise 0.
#[inline]
fn saved_link(rule: &UnwindRule, state: &FrameRegisters) -> usize {
    match (arch::SAVED_BY_SIGNAL, rule) {
        (Some(saved), UnwindRule::Frame(frame)) if frame.signal => state.sp.wrapping_add_signed(saved.link as isize),
        _ => 0,
    }
}

/// Whether the rule's address is in no object.
fn is_outside_objects(rule: &UnwindRule) -> bool {
    matches!(rule, UnwindRule::Guess { is_in_object: false, .. })
}

#[inline]
fn unwind(
    rule: &UnwindRule,
    state: FrameRegisters,
    link: usize,
    memory: &mut StackMemory,
    unloads: Option<u32>,
    guesses: &mut u32,
) -> UnwindStep {
    match rule {
        UnwindRule::Frame(frame) => frame.unwind(state, link, memory),
        UnwindRule::Outermost => UnwindStep::End,
        UnwindRule::Unsupported => UnwindStep::Lost,
        UnwindRule::Guess { .. } => unwind_by_guess(state, memory, unloads, guesses),
    }
}

/// Unwinds a frame without information by its frame pointer, if the result can be its caller.
#[cold]
fn unwind_by_guess(
    state: FrameRegisters,
    memory: &mut StackMemory,
    unloads: Option<u32>,
    guesses: &mut u32,
) -> UnwindStep {
    *guesses += 1;
    if *guesses > MAX_GUESSES {
        return UnwindStep::Lost;
    }
    let step = unwind_by_frame_pointer(state, memory);
    match step {
        UnwindStep::Caller(caller, _) if !rules::rule(&caller, unloads).is_plausible_caller() => UnwindStep::Lost,
        step => step,
    }
}
