//! What a thread remembers of its last walk, so that a known stack costs a few instructions a frame.
//!
//! # The argument
//!
//! A stack is the sequence of its frames' *keys* `(code, instruction)`, root to leaf. The thread keeps the last
//! sequence in an array, index 0 = root, with the interned stack of every prefix: `entries[i].stack` is *defined* as
//! the stack of `entries[0..=i]`'s keys. This is a fact about keys, not about the present: it stays true when frames
//! return, and nothing is concluded from an entry alone.
//!
//! A capture reads the present chain, leaf to root, to its very end, and compares each frame's key with the entry of
//! the same index. Where all keys from the leaf's index down to 0 are equal and the chain ends exactly there, the two
//! sequences are equal, hence so is the stack. Otherwise the differing entries are rewritten and every prefix from the
//! lowest difference up to the leaf is interned anew; longer prefixes are dropped.
//!
//! *The frame addresses in the entries are only predictions*: which index the leaf has, and where the next frame
//! lies. They are compared, never believed:
//!
//! - A re-used frame address with the same code but another caller line differs at the caller's index: the walk goes
//!   all the way down, so it is noticed.
//! - A generator resumed from another depth has the same address at another index: the chain then does not end at
//!   index 0, the guess is dropped, the frames are counted and the comparison starts again with the true index. A wrong
//!   guess costs time, never truth.
//! - Memory of returned frames may be unmapped. Only addresses that the present chain has just yielded are read: the
//!   leaf from the thread state, each next one from its callee's `previous`. Comparing `previous` with the entry's
//!   address and going on with *the entry's* (equal) value lets the processor's branch prediction run ahead of the
//!   chain of dependent loads; what it reads ahead of a failed comparison never becomes architectural, faults included.
//!
//! *A key stands for one text only while its code object lives.* A frame on this thread's stack keeps its code alive,
//! so a key read from the chain is right at that moment; but an entry may be older than the death of its code, and
//! another code object may have been made at the same address since. [`Chain::deaths`] counts deaths before the memory
//! is freed. When it has changed, entries whose [`Chain::generation`] has changed are dropped before anything is
//! compared. The generation stored in an entry was read while the code was alive on this very stack, hence any later
//! death changes it. A death seen too late cannot matter: for the address to come up on our stack as another code
//! object, this thread must have run Python code since, under the GIL, after the thread that freed it had held the GIL.
//!
//! # Constraints
//!
//! A known stack: no allocation, no lock, no call but `step`. The array grows by `mremap`. The struct is plain data for
//! a `thread_local` without a destructor; when a thread ends, [`ThreadStacks::release`] gives the array back, or the struct
//! is handed on to another thread as it is: what it remembers are facts about keys, whoever learned them.

use std::arch::asm;
use std::ptr::NonNull;

use memtrace_trace::ids::{ContextId, StackId};

use super::calls::{Called, Calls};
use super::definition::{DefinitionSink, Loss};
use super::intern::Interner;
use super::key_cache::{FrameKey, Meaning};
use super::pages;

/// The deepest walk; deeper stacks lose their outermost frames, and that is counted.
pub(crate) const MAX_DEPTH: usize = 100_000;
const FIRST_CAPACITY: usize = 128;
/// How far around the last leaf its address is looked for, and how many new frames are tried.
const WINDOW: usize = 8;
const NEW_FRAMES: usize = 4;

/// One frame of a chain, as read in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Step {
    /// Address of the code object.
    pub(super) code: usize,
    /// Where in the code, in whatever form the interpreter keeps it.
    pub(super) instruction: u32,
    /// Address of the caller's frame, 0 at the root.
    pub(super) previous: usize,
}

/// What a frame turned out to be, the slow way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) meaning: Meaning,
    /// Whether the key alone decides, so that the meaning may be remembered.
    pub(super) lasting: bool,
}

/// Reads frames. A copy of what that takes, so that the loop keeps it in registers.
pub(super) trait ReadFrame: Copy {
    /// Reads a frame.
    ///
    /// # Safety
    /// `frame` belongs to the calling thread's present chain.
    unsafe fn step(self, frame: usize) -> Step;
}

/// Where frames come from: an interpreter's live memory, or a test's.
pub(super) trait Chain {
    /// Reads this chain's frames.
    type Reader<'a>: ReadFrame
    where
        Self: 'a;

    fn reader(&self) -> Self::Reader<'_>;

    /// How many code objects have died.
    fn deaths(&self) -> usize;

    /// Changes whenever a code object at this address dies (and now and then for no reason).
    fn generation(&self, code: usize) -> u32;

    /// Finds out what a frame is by reading its text.
    ///
    /// # Safety
    /// `frame` belongs to the calling thread's present chain and `step` is what it holds.
    unsafe fn identify(&self, frame: usize, step: Step, interner: &Interner, sink: &mut dyn DefinitionSink)
    -> Identity;

    /// The object that is a frame's first local, 0 when there is none.
    ///
    /// # Safety
    /// `frame` belongs to the calling thread's present chain.
    unsafe fn first_local(&self, frame: usize) -> usize;

    /// The class of an object.
    ///
    /// # Safety
    /// `object` is a live object.
    unsafe fn class(&self, object: usize) -> usize;

    /// What an object is that was called from within `caller`, in a frame whose meaning is that of a call. `next` is for
    /// [`DefinitionSink::known_call`].
    ///
    /// # Safety
    /// `object` is what [`Self::first_local`] gives for that frame, which belongs to the calling thread's present chain.
    unsafe fn called(&self, object: usize, caller: ContextId, next: &mut u32, sink: &mut dyn DefinitionSink) -> Called;
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    frame: usize,
    /// 0 for a frame whose key does not decide what it is: it never compares equal.
    code: usize,
    instruction: u32,
    generation: u32,
    meaning: Meaning,
    stack: StackId,
}

const _: () = assert!(size_of::<Entry>() == 32, "two entries are one cache line");

/// An entry that another has taken the place of.
#[derive(Clone, Copy)]
struct Aside {
    entry: Entry,
    caller: StackId,
    index: usize,
}

impl Aside {
    const NONE: Aside = Aside {
        entry: Entry {
            frame: 0,
            code: 0,
            instruction: 0,
            generation: 0,
            meaning: Meaning::UNKNOWN,
            stack: StackId::NONE,
        },
        caller: StackId::NONE,
        index: usize::MAX,
    };
}

/// A thread's memory of its last walk. See the module for why it is right.
pub(crate) struct ThreadStacks {
    entries: *mut Entry,
    capacity: usize,
    /// Entries `0..known` hold.
    known: usize,
    /// The index of the last leaf.
    last: usize,
    /// The leaf before the last one.
    aside: Aside,
    /// The entries that call modules.
    pub(super) calls: Calls,
    /// [`Chain::deaths`] when the entries were last checked.
    deaths: usize,
    /// [`Interner::epoch`] of the interner whose ids the entries hold.
    epoch: u32,
}

impl ThreadStacks {
    /// Nothing remembered, nothing allocated.
    #[allow(clippy::new_without_default, reason = "lives in a thread_local, which needs the const function")]
    pub(crate) const fn new() -> ThreadStacks {
        ThreadStacks {
            entries: std::ptr::null_mut(),
            capacity: 0,
            known: 0,
            last: 0,
            aside: Aside::NONE,
            calls: Calls::new(),
            deaths: 0,
            epoch: 0,
        }
    }

    /// Gives the memory back. The struct may be used again and starts from nothing.
    #[allow(dead_code, reason = "for tests, the stack probe and whoever wants to know")]
    pub(crate) fn release(&mut self) {
        if let Some(entries) = NonNull::new(self.entries) {
            // SAFETY: the array came from `reserve` or `grow` with this capacity; the pointer is forgotten below.
            unsafe { pages::release(entries.cast(), self.capacity * size_of::<Entry>()) };
        }
        *self = ThreadStacks::new();
    }

    /// The stack whose innermost frame is at `leaf`.
    ///
    /// # Safety
    /// `leaf` is 0 or the innermost frame of the calling thread's present chain, and `self` is only ever used with
    /// chains of the same kind.
    #[inline]
    pub(super) unsafe fn capture<C: Chain>(
        &mut self,
        chain: &C,
        leaf: usize,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> StackId {
        if leaf == 0 {
            return StackId::NONE;
        }
        let epoch = interner.epoch();
        if self.epoch != epoch || epoch == 0 {
            self.known = 0;
            self.aside = Aside::NONE;
            self.epoch = interner.claim_epoch();
        }
        let deaths = chain.deaths();
        if self.deaths != deaths {
            self.drop_dead(chain);
            self.deaths = deaths;
        }
        let leaf_is_where_it_was = self.last < self.known && self.entry(self.last).frame == leaf;
        let mut differs = self.last;
        if leaf_is_where_it_was {
            // SAFETY: the entry's frame is the leaf.
            let mut first = unsafe { self.first_difference(chain, self.last) };
            // SAFETY: `leaf` is the present chain's, and that entry's.
            if first == Some(self.last) && unsafe { self.swap_leaf(chain, leaf) } {
                // SAFETY: as above.
                first = unsafe { self.first_difference(chain, self.last) };
            }
            match first {
                None => return self.entry(self.last).stack,
                Some(index) => differs = index,
            }
        }
        let mut changed = self.known;
        if leaf_is_where_it_was {
            // SAFETY: the chain was followed to that entry, whose frame is part of it.
            let aligned = unsafe { self.follow(chain, differs, &mut changed) };
            if aligned {
                // SAFETY: entries `0..=last` mirror the present chain.
                return unsafe { self.intern(chain, self.last, changed, interner, sink) };
            }
        }
        // SAFETY: as promised by the caller.
        unsafe { self.capture_elsewhere(chain, leaf, changed, interner, sink) }
    }

    /// Where the leaf runs another instruction than last time, and ran this one the time before (a block is taken in one line and
    /// given back in another, in turns): brings that entry back. Otherwise sets the present entry aside.
    ///
    /// What is set aside are facts about a key, as all entries are, and dropped with them. Its stack is that of the key *on its
    /// callers' stack*, which is kept beside it: the entry comes back only where the callers' entries still have that stack,
    /// so that every entry goes on meaning what the module says. Whether the callers are still those is for the walk to see.
    ///
    /// # Safety
    /// `leaf` is the innermost frame of the present chain, and that of `entries[last]`, which holds.
    #[inline]
    unsafe fn swap_leaf<C: Chain>(&mut self, chain: &C, leaf: usize) -> bool {
        // SAFETY: as promised by the caller.
        let step = unsafe { chain.reader().step(leaf) };
        let present = *self.entry(self.last);
        if present.code == step.code && present.instruction == step.instruction {
            return false; // it is the caller that differs
        }
        let (index, caller) = (self.last, self.callers_stack(self.last));
        let aside = std::mem::replace(&mut self.aside, Aside { entry: present, caller, index });
        let same_key = aside.entry.code == step.code && aside.entry.instruction == step.instruction;
        let back = same_key && aside.index == index && aside.caller == caller;
        if back {
            *self.entry(index) = Entry { frame: leaf, ..aside.entry };
            // Longer prefixes were those of the other leaf.
            self.known = index + 1;
            self.calls.cut(index);
            if aside.entry.meaning.is_any_call() {
                self.note_call(index, aside.entry.meaning);
            }
        }
        back
    }

    /// The stack that a frame at this index was called from.
    #[inline]
    fn callers_stack(&mut self, index: usize) -> StackId {
        match index.checked_sub(1) {
            Some(below) => self.entry(below).stack,
            None => StackId::NONE,
        }
    }

    /// How many frames the stack has that the last capture gave, hidden ones included. To be asked right after it, and not
    /// when it gave no stack.
    #[inline]
    pub(super) fn depth(&self) -> usize {
        if self.known == 0 { 0 } else { self.last + 1 }
    }

    /// Address and meaning of one of these frames; 0 is the outermost.
    #[inline]
    pub(super) fn frame(&self, index: usize) -> (usize, Meaning) {
        debug_assert!(index < self.depth());
        // SAFETY: the caller stays below `depth`, which is at most `known`; the array is ours alone.
        let entry = unsafe { &*self.entries.add(index) };
        (entry.frame, entry.meaning)
    }

    /// What an entry means, for indices below the one that is being interned.
    pub(super) fn meaning(&self, index: usize) -> Meaning {
        debug_assert!(index < self.capacity);
        // SAFETY: as below.
        unsafe { (*self.entries.add(index)).meaning }
    }

    /// Not for indices beyond `capacity`.
    #[inline]
    fn entry(&mut self, index: usize) -> &mut Entry {
        debug_assert!(index < self.capacity);
        // SAFETY: every caller stays below `known` or below a capacity it has just made sure of; the array is ours
        // alone and zeroed memory is a valid entry.
        unsafe { &mut *self.entries.add(index) }
    }

    /// Where the chain from `entries[from].frame` on first differs from the entries `from..=0`; `None`: nowhere. What differs at the
    /// index is its key, its caller's address or where the chain ends; the chain was followed to it.
    ///
    /// The loop that every capture runs, by itself so that all it needs is in registers.
    ///
    /// # Safety
    /// `from < known`, and `entries[from].frame` belongs to the present chain.
    #[inline]
    unsafe fn first_difference<C: Chain>(&self, chain: &C, from: usize) -> Option<usize> {
        // SAFETY: `from` is below `known`, hence inside the array; the rest is the caller's promise.
        unsafe {
            let found = compare(chain.reader(), self.entries, self.entries.add(from));
            (!found.is_null()).then(|| found.offset_from_unsigned(self.entries))
        }
    }

    /// Compares the chain from `entries[from].frame` on with the entries `from..=0`, whose addresses must all agree.
    /// Keys that differ are rewritten, and `changed` becomes the lowest such index unless it is lower already (from an
    /// attempt before, whose entries are still to be interned). False when the chain is not as long as the entries say
    /// or turns elsewhere.
    ///
    /// # Safety
    /// `from < known`, and `entries[from].frame` belongs to the present chain.
    #[inline]
    unsafe fn follow<C: Chain>(&mut self, chain: &C, from: usize, changed: &mut usize) -> bool {
        let reader = chain.reader();
        let first = self.entries;
        // SAFETY: `from` is below `known`, hence inside the array.
        let mut entry = unsafe { first.add(from) };
        // SAFETY: as above.
        let mut frame = unsafe { (*entry).frame };
        loop {
            // SAFETY: `frame` is the caller's, or has just compared equal to a `previous` of the chain.
            let step = unsafe { reader.step(frame) };
            // SAFETY: `entry` stays between `first` and `first + from`.
            let known = unsafe { &mut *entry };
            if known.code != step.code || known.instruction != step.instruction {
                known.code = step.code;
                known.instruction = step.instruction;
                known.meaning = Meaning::UNKNOWN;
                // SAFETY: both point into the same array.
                *changed = unsafe { entry.offset_from_unsigned(first) }.min(*changed);
            }
            if entry == first {
                return step.previous == 0;
            }
            // SAFETY: `entry` is above `first`.
            entry = unsafe { entry.sub(1) };
            // SAFETY: as above.
            let predicted = unsafe { (*entry).frame };
            frame = unlinked(predicted);
            if predicted != step.previous {
                return false;
            }
        }
    }

    /// The leaf is not where it was: finds out how deep it is, by what the entries suggest or by counting.
    ///
    /// # Safety
    /// As [`Self::capture`], with `leaf` not 0.
    #[inline(never)]
    unsafe fn capture_elsewhere<C: Chain>(
        &mut self,
        chain: &C,
        leaf: usize,
        mut changed: usize,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> StackId {
        // SAFETY: as promised by the caller.
        if let Some((base, new)) = unsafe { self.guess(chain, leaf) }
            && self.ensure_capacity(base + new + 1)
        {
            let depth = base + new;
            // SAFETY: the chain has at least `new` frames from the leaf before the guessed one.
            let reached = unsafe { self.rewrite(chain, leaf, depth, base + 1, &mut changed) };
            // SAFETY: the frame was just reached in the chain, and its index is below `known`.
            if reached == self.entry(base).frame && unsafe { self.follow(chain, base, &mut changed) } {
                // SAFETY: entries `0..=depth` mirror the present chain.
                return unsafe { self.intern(chain, depth, changed, interner, sink) };
            }
        }
        // SAFETY: as promised by the caller.
        let (count, cut) = unsafe { Self::count(chain, leaf) };
        if cut {
            sink.lost(Loss::Depth);
        }
        if !self.ensure_capacity(count) {
            self.known = self.known.min(changed);
            sink.lost(Loss::Memory);
            return StackId::NONE;
        }
        let depth = count - 1;
        // SAFETY: the chain has `count` frames from the leaf.
        unsafe { self.rewrite(chain, leaf, depth, 0, &mut changed) };
        // SAFETY: entries `0..=depth` mirror the present chain.
        unsafe { self.intern(chain, depth, changed, interner, sink) }
    }

    /// Looks for one of the innermost frames and its caller near the last leaf: its index, and the number of frames above
    /// it.
    ///
    /// # Safety
    /// As [`Self::capture`], with `leaf` not 0.
    unsafe fn guess<C: Chain>(&mut self, chain: &C, leaf: usize) -> Option<(usize, usize)> {
        let low = self.last.saturating_sub(WINDOW);
        let high = self.known.min(self.last + WINDOW);
        let reader = chain.reader();
        let mut frame = leaf;
        for new in 0..NEW_FRAMES {
            // SAFETY: `frame` was reached from the leaf.
            let previous = unsafe { reader.step(frame) }.previous;
            // The caller must fit, too: where frames are heap objects they change places.
            let fits = |this: &mut Self, index: usize| {
                let below = index.checked_sub(1).map_or(0, |below| this.entry(below).frame);
                this.entry(index).frame == frame && below == previous
            };
            if let Some(index) = (low..high).rev().find(|index| fits(self, *index)) {
                return Some((index, new));
            }
            frame = previous;
            if frame == 0 {
                return None;
            }
        }
        None
    }

    /// The number of frames from `leaf` to the root, and whether it was more than [`MAX_DEPTH`].
    ///
    /// # Safety
    /// As [`Self::capture`], with `leaf` not 0.
    unsafe fn count<C: Chain>(chain: &C, leaf: usize) -> (usize, bool) {
        let reader = chain.reader();
        let mut frame = leaf;
        for count in 1..=MAX_DEPTH {
            // SAFETY: `frame` was reached from the leaf.
            frame = unsafe { reader.step(frame) }.previous;
            if frame == 0 {
                return (count, false);
            }
        }
        (MAX_DEPTH, true)
    }

    /// Writes the chain's frames from `frame` on into the entries `from`, `from - 1`, ..., `to`. `changed` becomes the
    /// lowest index whose key was not already there. Returns the next frame of the chain.
    ///
    /// # Safety
    /// `frame` belongs to the present chain, which has at least `from - to + 1` frames from there (none if
    /// `from < to`); `from < capacity`.
    unsafe fn rewrite<C: Chain>(
        &mut self,
        chain: &C,
        mut frame: usize,
        from: usize,
        to: usize,
        changed: &mut usize,
    ) -> usize {
        let (known, reader) = (self.known, chain.reader());
        for index in (to..=from).rev() {
            // SAFETY: `frame` was reached from the first one.
            let step = unsafe { reader.step(frame) };
            let entry = self.entry(index);
            entry.frame = frame;
            if index >= known || entry.code != step.code || entry.instruction != step.instruction {
                entry.code = step.code;
                entry.instruction = step.instruction;
                entry.meaning = Meaning::UNKNOWN;
                *changed = index.min(*changed);
            }
            frame = step.previous;
        }
        frame
    }

    /// Interns the prefixes from `changed` to `depth` and makes `depth` the last leaf.
    ///
    /// # Safety
    /// Entries `0..=depth` mirror the calling thread's present chain.
    #[inline(never)]
    unsafe fn intern<C: Chain>(
        &mut self,
        chain: &C,
        depth: usize,
        changed: usize,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> StackId {
        self.last = depth;
        // If the sink should panic, what follows does not hold.
        self.known = self.known.min(changed);
        if changed > depth {
            return self.entry(depth).stack;
        }
        self.calls.cut(changed);
        let mut stack = self.callers_stack(changed);
        for index in changed..=depth {
            let entry = self.entry(index);
            if entry.meaning == Meaning::UNKNOWN {
                // SAFETY: the entry mirrors a frame of the present chain.
                unsafe { Self::find_meaning(entry, chain, interner, sink) };
            }
            if let Some(frame) = entry.meaning.id() {
                stack = interner.child(stack, frame, sink);
            } else if entry.meaning == Meaning::REFUSED {
                sink.lost(Loss::Frame);
            }
            entry.stack = stack;
            let meaning = entry.meaning;
            if meaning.is_any_call() {
                self.note_call(index, meaning);
            }
        }
        self.known = depth + 1;
        stack
    }

    /// # Safety
    /// The entry's frame, code and instruction are those of a frame of the present chain.
    #[inline]
    unsafe fn find_meaning<C: Chain>(entry: &mut Entry, chain: &C, interner: &Interner, sink: &mut dyn DefinitionSink) {
        // Read while the code is alive on this stack, and before its text: a death from now on is noticed.
        entry.generation = chain.generation(entry.code);
        let key = FrameKey::python(entry.code, entry.instruction, entry.generation);
        entry.meaning = interner.meaning(key);
        if entry.meaning != Meaning::UNKNOWN {
            return;
        }
        let step = Step { code: entry.code, instruction: entry.instruction, previous: 0 };
        // SAFETY: as promised by the caller; `previous` is not looked at.
        let identity = unsafe { chain.identify(entry.frame, step, interner, sink) };
        entry.meaning = identity.meaning;
        if identity.lasting {
            interner.remember(key, identity.meaning);
        } else {
            entry.code = 0;
            entry.generation = chain.generation(0);
        }
    }

    /// Drops the entries from the first one on whose code may have died.
    #[cold]
    fn drop_dead<C: Chain>(&mut self, chain: &C) {
        self.aside = Aside::NONE;
        for index in 0..self.known {
            let entry = self.entry(index);
            if entry.generation != chain.generation(entry.code) {
                self.known = index;
                return;
            }
        }
    }

    /// Makes room for `count` entries. False when the kernel gives no memory.
    fn ensure_capacity(&mut self, count: usize) -> bool {
        if count <= self.capacity {
            return true;
        }
        let capacity = count.next_power_of_two().max(FIRST_CAPACITY);
        let bytes = capacity * size_of::<Entry>();
        let memory = match NonNull::new(self.entries) {
            None => pages::reserve(bytes),
            // SAFETY: the array came from here with the old capacity; the old pointer is replaced below.
            Some(old) => unsafe { pages::grow(old.cast(), self.capacity * size_of::<Entry>(), bytes) },
        };
        let Some(memory) = memory else {
            return false;
        };
        self.entries = memory.as_ptr().cast();
        self.capacity = capacity;
        true
    }
}

/// See [`ThreadStacks::first_difference`]; null: no difference.
///
/// # Safety
/// `first..=entry` are entries that hold, and `entry`'s frame belongs to the present chain.
#[inline(always)]
unsafe fn compare<R: ReadFrame>(reader: R, first: *const Entry, mut entry: *const Entry) -> *const Entry {
    // SAFETY: as promised by the caller.
    let mut frame = unsafe { (*entry).frame };
    loop {
        // SAFETY: `frame` is the caller's, or has just compared equal to a `previous` of the chain; `entry` is one of the caller's.
        let (step, known) = unsafe { (reader.step(frame), &*entry) };
        if known.code != step.code || known.instruction != step.instruction {
            return entry;
        }
        if entry == first {
            return if step.previous == 0 { std::ptr::null() } else { entry };
        }
        // SAFETY: `entry` is above `first`.
        let below = unsafe { entry.sub(1) };
        // SAFETY: as above.
        let predicted = unsafe { (*below).frame };
        // Before the comparison, after which the compiler knows them to be equal.
        frame = unlinked(predicted);
        if predicted != step.previous {
            return entry;
        }
        entry = below;
    }
}

/// The same number, but the compiler may not know: where it sees two equal numbers it uses the one that comes last, and
/// the next frame's loads would have to wait for it.
#[inline]
fn unlinked(address: usize) -> usize {
    let mut address = address;
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(reg) address, options(nomem, nostack, preserves_flags)) };
    address
}

#[cfg(test)]
#[path = "thread_tests.rs"]
mod tests;
