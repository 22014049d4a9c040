//! A thread's cache of its last walk, which makes a known stack cost a few instructions a frame.
//!
//! # Why it is correct
//!
//! A stack is the sequence of its frames' *keys* `(code, instruction)`, from root to leaf. The thread keeps the last
//! sequence in an array, whose index 0 is the root, with the interned stack of every prefix. `entries[i].stack` is
//! *defined* as the stack of the keys in `entries[0..=i]`. This is a fact about keys, not about the present. It stays
//! true when frames return, and nothing is concluded from an entry alone.
//!
//! A capture reads the present chain, from leaf to root, to its very end. It compares each frame's key with the entry
//! of the same index. If all keys from the leaf's index down to 0 are equal and the chain ends exactly there, both
//! sequences are equal. So are their stacks. Otherwise the differing entries are rewritten, and every prefix from the
//! lowest difference up to the leaf is interned again. Longer prefixes are dropped.
//!
//! *The frame addresses in the entries are only predictions* of the leaf's index and of the next frame's address. They
//! are always verified:
//!
//! - A reused frame address with the same code but another line in the caller differs at the caller's index. The walk
//!   goes all the way down, so it finds the difference.
//! - A generator that is resumed from another depth has the same address at another index. Then the chain does not end
//!   at index 0. The prediction is dropped, the frames are counted, and the comparison starts again with the true
//!   index. A wrong prediction costs time but never gives a wrong result.
//! - Memory of returned frames may be unmapped. Only addresses from the present chain are read: the leaf from the
//!   thread state, each next one from its callee's `previous`. The loop compares `previous` with the entry's address
//!   and continues with *the entry's* (equal) value. So the processor's branch prediction can run ahead of the chain of
//!   dependent loads. Loads after a failed comparison never become architectural state, page faults included.
//!
//! *A key stands for one text only while its code object is alive.* A frame on this thread's stack keeps its code
//! alive, so a key from the chain is valid at that moment. But an entry may be older than the end of its code, and
//! another code object may have the same address since. [`FrameChain::freed_code_count`] counts freed code objects
//! before their memory is freed. If it has changed, entries whose [`FrameChain::generation`] has changed are dropped
//! before any comparison.
//!
//! An entry's generation was read while the code was alive on this very stack, so any later free changes it. A free
//! that is noticed too late does no harm. For another code object to appear on our stack at the address, this thread
//! must have run Python code since. It did so under the GIL, after the freeing thread had held the GIL.
//!
//! # Constraints
//!
//! A known stack needs no allocation, no lock and no call except `raw`. The array grows with `mremap`. The struct is
//! plain data for a `thread_local` without a destructor. When a thread ends, [`ThreadStacks::release`] frees the array,
//! or another thread takes over the struct unchanged. It contains facts about keys, which hold for every thread.

use std::ptr::NonNull;

use memtrace_trace::ids::{ContextId, StackId};

use super::arch::opaque;
use super::definition::{DefinitionSink, Loss};
use super::frame_chain::{FrameChain, FrameReader, RawFrame};
use super::intern::Interner;
use super::key_cache::{FrameKey, FrameMeaning};
use super::module_calls::ModuleCalls;
use super::pages;

/// The deepest walk. Deeper stacks lose their outermost frames, which is counted.
pub(crate) const MAX_DEPTH: usize = 100_000;
const FIRST_CAPACITY: usize = 128;
/// How far from the last leaf's index its address is searched for.
const SEARCH_WINDOW: usize = 8;
/// How many new frames a prediction allows for.
const NEW_FRAMES: usize = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    frame: usize,
    /// 0 for a frame whose key does not determine its meaning. Then it never compares equal.
    code: usize,
    instruction: u32,
    generation: u32,
    meaning: FrameMeaning,
    stack: StackId,
}

const _: () = assert!(size_of::<Entry>() == 32, "two entries are one cache line");

/// An entry that another one has replaced.
#[derive(Clone, Copy)]
struct ReplacedLeaf {
    entry: Entry,
    caller: StackId,
    index: usize,
}

impl ReplacedLeaf {
    const NONE: ReplacedLeaf = ReplacedLeaf {
        entry: Entry {
            frame: 0,
            code: 0,
            instruction: 0,
            generation: 0,
            meaning: FrameMeaning::UNKNOWN,
            stack: StackId::NONE,
        },
        caller: StackId::NONE,
        index: usize::MAX,
    };
}

/// The cache of a thread's last walk.
pub struct ThreadStacks {
    entries: *mut Entry,
    capacity: usize,
    /// Entries `0..known` are valid.
    known: usize,
    /// The index of the last leaf.
    last: usize,
    /// The entry that was the leaf before the last one.
    replaced_leaf: ReplacedLeaf,
    /// The entries that call modules.
    module_calls: ModuleCalls,
    /// The value of [`FrameChain::freed_code_count`] when the entries were last checked.
    freed_code_count: usize,
    /// The [`Interner::epoch`] of the interner whose ids the entries contain.
    epoch: u32,
}

impl ThreadStacks {
    /// An empty cache, which has no memory.
    #[allow(clippy::new_without_default, reason = "lives in a thread_local, which needs the const function")]
    pub const fn new() -> ThreadStacks {
        ThreadStacks {
            entries: std::ptr::null_mut(),
            capacity: 0,
            known: 0,
            last: 0,
            replaced_leaf: ReplacedLeaf::NONE,
            module_calls: ModuleCalls::new(),
            freed_code_count: 0,
            epoch: 0,
        }
    }

    /// Frees the memory. The struct can be used again and is then empty.
    pub fn release(&mut self) {
        if let Some(entries) = NonNull::new(self.entries) {
            // SAFETY: the array comes from `reserve` or `grow` with this capacity, and the pointer is overwritten
            // below.
            unsafe { pages::release(entries.cast(), self.capacity * size_of::<Entry>()) };
        }
        *self = ThreadStacks::new();
    }

    /// The stack whose innermost frame is at `leaf`.
    ///
    /// # Safety
    ///
    /// `leaf` is 0 or the innermost frame of the calling thread's present chain. `self` is only used with chains of the
    /// same kind.
    #[inline]
    pub(super) unsafe fn capture<C: FrameChain>(
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
            self.replaced_leaf = ReplacedLeaf::NONE;
            self.epoch = interner.claim_epoch();
        }
        let freed_code_count = chain.freed_code_count();
        if self.freed_code_count != freed_code_count {
            self.drop_freed(chain);
            self.freed_code_count = freed_code_count;
        }
        let is_leaf_at_last_index = self.last < self.known && self.entry(self.last).frame == leaf;
        let mut differs = self.last;
        if is_leaf_at_last_index {
            // SAFETY: `last` is below `known`, and the entry's frame is the leaf, which the caller guarantees to be the
            // present chain's.
            let mut first = unsafe { self.first_difference(chain, self.last) };
            // SAFETY: the caller guarantees that `leaf` is the present chain's leaf, and it is the frame of
            // `entries[last]`.
            if first == Some(self.last) && unsafe { self.swap_leaf(chain, leaf) } {
                // SAFETY: `swap_leaf` has kept `leaf` as the frame of `entries[last]`, which is below `known`.
                first = unsafe { self.first_difference(chain, self.last) };
            }
            match first {
                None => return self.entry(self.last).stack,
                Some(index) => differs = index,
            }
        }
        let mut changed = self.known;
        if is_leaf_at_last_index {
            // SAFETY: `first_difference` has followed the chain to the entry `differs`, so its frame belongs to the
            // chain.
            let aligned = unsafe { self.follow(chain, differs, &mut changed) };
            if aligned {
                // SAFETY: `follow` has returned true, so entries `0..=last` mirror the present chain.
                return unsafe { self.intern(chain, self.last, changed, interner, sink) };
            }
        }
        // SAFETY: the caller guarantees `leaf`, which is not 0.
        unsafe { self.capture_moved_leaf(chain, leaf, changed, interner, sink) }
    }

    /// Restores the previous leaf entry if the leaf is at that entry's instruction again. A program often allocates in
    /// one line and frees in another, in alternation. Otherwise it stores the present leaf entry for later. Returns
    /// whether it has restored the entry.
    ///
    /// The stored entry is a fact about a key, like all entries, and is dropped with them. Its stack belongs to the key
    /// *on its callers' stack*, which is stored with it. The entry returns only if the callers' entries still have that
    /// stack, so that every entry stays valid. The following walk verifies that the callers are still the same.
    ///
    /// # Safety
    ///
    /// `leaf` is the innermost frame of the present chain and the frame of `entries[last]`, which is valid.
    #[inline]
    unsafe fn swap_leaf<C: FrameChain>(&mut self, chain: &C, leaf: usize) -> bool {
        // SAFETY: the caller guarantees that `leaf` belongs to the present chain.
        let raw = unsafe { chain.reader().read(leaf) };
        let present = *self.entry(self.last);
        if present.code == raw.code && present.instruction == raw.instruction {
            return false; // The leaf is unchanged, so a caller differs.
        }
        let (index, caller) = (self.last, self.callers_stack(self.last));
        let replaced_leaf = std::mem::replace(&mut self.replaced_leaf, ReplacedLeaf { entry: present, caller, index });
        let same_key = replaced_leaf.entry.code == raw.code && replaced_leaf.entry.instruction == raw.instruction;
        let is_previous_leaf = same_key && replaced_leaf.index == index && replaced_leaf.caller == caller;
        if is_previous_leaf {
            *self.entry(index) = Entry { frame: leaf, ..replaced_leaf.entry };
            // Longer prefixes belonged to the other leaf.
            self.known = index + 1;
            self.module_calls.truncate(index);
            if replaced_leaf.entry.meaning.is_any_call() {
                self.add_call_frame(index, replaced_leaf.entry.meaning);
            }
        }
        is_previous_leaf
    }

    /// The stack of the callers of a frame at this index.
    #[inline]
    fn callers_stack(&mut self, index: usize) -> StackId {
        match index.checked_sub(1) {
            Some(below) => self.entry(below).stack,
            None => StackId::NONE,
        }
    }

    /// How many frames the stack of the last capture has, hidden ones included. Only valid right after a capture that
    /// returned a stack.
    #[inline]
    pub(super) fn depth(&self) -> usize {
        if self.known == 0 { 0 } else { self.last + 1 }
    }

    /// The address and meaning of one of these frames. 0 is the outermost.
    #[inline]
    pub(super) fn frame(&self, index: usize) -> (usize, FrameMeaning) {
        debug_assert!(index < self.depth());
        // SAFETY: callers pass an index below `depth`, which is at most `known`. Only this struct uses the array.
        let entry = unsafe { &*self.entries.add(index) };
        (entry.frame, entry.meaning)
    }

    /// Adds the call at the entry `index`, whose meaning is a call.
    #[cold]
    fn add_call_frame(&mut self, index: usize, meaning: FrameMeaning) {
        let below = (0..index).rev().map(|below| self.meaning(below)).find(|meaning| *meaning != FrameMeaning::HIDDEN);
        self.module_calls.add(index, meaning, below);
    }

    /// Whether the stack of the last capture may contain calls.
    #[inline(always)]
    pub fn has_module_calls(&self) -> bool {
        !self.module_calls.is_empty()
    }

    /// The innermost module call on the stack of the last capture, which was not `NONE`.
    ///
    /// # Safety
    ///
    /// The last capture was of this chain, which has not changed since.
    #[inline]
    pub(super) unsafe fn module_call<C: FrameChain>(&mut self, chain: &C, sink: &mut dyn DefinitionSink) -> ContextId {
        let (entries, depth) = (self.entries, self.depth());
        // SAFETY: `ModuleCalls` passes an index below `depth`, which is at most `known`. Nothing else uses the array
        // meanwhile.
        let frame_at = |index| unsafe { (*entries.add(index)).frame };
        // SAFETY: the caller guarantees the chain, and the entries are those of its last capture.
        unsafe { self.module_calls.innermost(depth, frame_at, chain, sink) }
    }

    /// The meaning of an entry. Valid for indices below the one that is being interned.
    pub(super) fn meaning(&self, index: usize) -> FrameMeaning {
        debug_assert!(index < self.capacity);
        // SAFETY: callers pass an index below the capacity. Only this struct uses the array, and zeroed memory is a
        // valid entry.
        unsafe { (*self.entries.add(index)).meaning }
    }

    /// An entry. `index` must be below `capacity`.
    #[inline]
    fn entry(&mut self, index: usize) -> &mut Entry {
        debug_assert!(index < self.capacity);
        // SAFETY: callers pass an index below `known`, or below a capacity that they have just ensured. Only this
        // struct uses the array, and zeroed memory is a valid entry.
        unsafe { &mut *self.entries.add(index) }
    }

    /// The first index at which the chain from `entries[from].frame` on differs from the entries `from..=0`. `None` if
    /// it does not. The difference is the frame's key, its caller's address or the end of the chain. The chain reaches
    /// the frame at that index.
    ///
    /// Every capture runs this loop. It is separate, so that all its data fits into registers.
    ///
    /// # Safety
    ///
    /// `from < known`, and `entries[from].frame` belongs to the present chain.
    #[inline]
    unsafe fn first_difference<C: FrameChain>(&self, chain: &C, from: usize) -> Option<usize> {
        // SAFETY: `from` is below `known`, hence inside the array. The caller guarantees that the frame belongs to the
        // present chain.
        unsafe {
            let found = compare(chain.reader(), self.entries, self.entries.add(from));
            (!found.is_null()).then(|| found.offset_from_unsigned(self.entries))
        }
    }

    /// Compares the chain from `entries[from].frame` on with the entries `from..=0`, whose addresses must all be equal.
    ///
    /// It rewrites keys that differ and sets `changed` to the lowest such index. `changed` keeps a lower value from an
    /// earlier attempt, whose entries are not interned yet. Returns `false` if the chain is not as long as the entries
    /// or has another address.
    ///
    /// # Safety
    ///
    /// `from < known`, and `entries[from].frame` belongs to the present chain.
    #[inline]
    unsafe fn follow<C: FrameChain>(&mut self, chain: &C, from: usize, changed: &mut usize) -> bool {
        let reader = chain.reader();
        let first = self.entries;
        // SAFETY: `from` is below `known`, hence inside the array.
        let mut entry = unsafe { first.add(from) };
        // SAFETY: `entry` is inside the array, below `known`.
        let mut frame = unsafe { (*entry).frame };
        loop {
            // SAFETY: `frame` is the first one, which the caller guarantees, or was just equal to a `previous` of the
            // chain.
            let raw = unsafe { reader.read(frame) };
            // SAFETY: `entry` stays between `first` and `first + from`, and nothing else refers to it.
            let known = unsafe { &mut *entry };
            if known.code != raw.code || known.instruction != raw.instruction {
                known.code = raw.code;
                known.instruction = raw.instruction;
                known.meaning = FrameMeaning::UNKNOWN;
                // SAFETY: both pointers are inside the same array.
                *changed = unsafe { entry.offset_from_unsigned(first) }.min(*changed);
            }
            if entry == first {
                return raw.previous == 0;
            }
            // SAFETY: `entry` is above `first`, so the entry before it is inside the array.
            entry = unsafe { entry.sub(1) };
            // SAFETY: `entry` is inside the array, below `known`.
            let predicted = unsafe { (*entry).frame };
            frame = opaque(predicted);
            if predicted != raw.previous {
                return false;
            }
        }
    }

    /// [`Self::capture`] for a leaf that is not at its last index. Finds its index with the entries' help or by
    /// counting the frames.
    ///
    /// # Safety
    ///
    /// `leaf` is the innermost frame of the calling thread's present chain and not 0.
    #[inline(never)]
    unsafe fn capture_moved_leaf<C: FrameChain>(
        &mut self,
        chain: &C,
        leaf: usize,
        mut changed: usize,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> StackId {
        // SAFETY: the caller guarantees `leaf`.
        if let Some((known_index, new)) = unsafe { self.guess(chain, leaf) }
            && self.ensure_capacity(known_index + new + 1)
        {
            let depth = known_index + new;
            // SAFETY: `guess` has followed the chain for `new` frames from the leaf, and the capacity exceeds `depth`.
            let next_frame = unsafe { self.rewrite(chain, leaf, depth, known_index + 1, &mut changed) };
            // SAFETY: the chain has just reached this frame, and `known_index` is below `known`.
            if next_frame == self.entry(known_index).frame && unsafe { self.follow(chain, known_index, &mut changed) } {
                // SAFETY: `rewrite` and `follow` have made entries `0..=depth` mirror the present chain.
                return unsafe { self.intern(chain, depth, changed, interner, sink) };
            }
        }
        // SAFETY: the caller guarantees `leaf`.
        let (count, is_too_deep) = unsafe { Self::count(chain, leaf) };
        if is_too_deep {
            sink.lost(Loss::Depth);
        }
        if !self.ensure_capacity(count) {
            self.known = self.known.min(changed);
            sink.lost(Loss::Memory);
            return StackId::NONE;
        }
        let depth = count - 1;
        // SAFETY: the chain has `count` frames from the leaf, and the capacity is at least `count`.
        unsafe { self.rewrite(chain, leaf, depth, 0, &mut changed) };
        // SAFETY: `rewrite` has made entries `0..=depth` mirror the present chain.
        unsafe { self.intern(chain, depth, changed, interner, sink) }
    }

    /// Searches near the last leaf for one of the innermost frames together with its caller. Returns its index and the
    /// number of frames above it.
    ///
    /// # Safety
    ///
    /// `leaf` is the innermost frame of the calling thread's present chain and not 0.
    unsafe fn guess<C: FrameChain>(&mut self, chain: &C, leaf: usize) -> Option<(usize, usize)> {
        let low = self.last.saturating_sub(SEARCH_WINDOW);
        let high = self.known.min(self.last + SEARCH_WINDOW);
        let reader = chain.reader();
        let mut frame = leaf;
        for new in 0..NEW_FRAMES {
            // SAFETY: `frame` was reached from the leaf through the chain and is not 0.
            let previous = unsafe { reader.read(frame) }.previous;
            // The caller must match too, because frames on the heap exchange their addresses.
            let is_match = |stacks: &mut Self, index: usize| {
                let below = index.checked_sub(1).map_or(0, |below| stacks.entry(below).frame);
                stacks.entry(index).frame == frame && below == previous
            };
            if let Some(index) = (low..high).rev().find(|index| is_match(self, *index)) {
                return Some((index, new));
            }
            frame = previous;
            if frame == 0 {
                return None;
            }
        }
        None
    }

    /// The number of frames from `leaf` to the root, and whether there are more than [`MAX_DEPTH`].
    ///
    /// # Safety
    ///
    /// `leaf` is the innermost frame of the calling thread's present chain and not 0.
    unsafe fn count<C: FrameChain>(chain: &C, leaf: usize) -> (usize, bool) {
        let reader = chain.reader();
        let mut frame = leaf;
        for count in 1..=MAX_DEPTH {
            // SAFETY: `frame` was reached from the leaf through the chain and is not 0.
            frame = unsafe { reader.read(frame) }.previous;
            if frame == 0 {
                return (count, false);
            }
        }
        (MAX_DEPTH, true)
    }

    /// Writes the chain's frames from `frame` on into the entries `from`, `from - 1`, ..., `to`. Sets `changed` to the
    /// lowest index whose key has changed. Returns the next frame of the chain.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the present chain, which has at least `from - to + 1` frames from there (none if `from <
    /// to`), and `from < capacity`.
    unsafe fn rewrite<C: FrameChain>(
        &mut self,
        chain: &C,
        mut frame: usize,
        from: usize,
        to: usize,
        changed: &mut usize,
    ) -> usize {
        let (known, reader) = (self.known, chain.reader());
        for index in (to..=from).rev() {
            // SAFETY: `frame` was reached from the first one, and the caller guarantees that the chain has enough
            // frames.
            let raw = unsafe { reader.read(frame) };
            let entry = self.entry(index);
            entry.frame = frame;
            if index >= known || entry.code != raw.code || entry.instruction != raw.instruction {
                entry.code = raw.code;
                entry.instruction = raw.instruction;
                entry.meaning = FrameMeaning::UNKNOWN;
                *changed = index.min(*changed);
            }
            frame = raw.previous;
        }
        frame
    }

    /// Interns the prefixes from `changed` to `depth`, and makes `depth` the last leaf. Returns its stack.
    ///
    /// # Safety
    ///
    /// Entries `0..=depth` mirror the calling thread's present chain.
    #[inline(never)]
    unsafe fn intern<C: FrameChain>(
        &mut self,
        chain: &C,
        depth: usize,
        changed: usize,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> StackId {
        self.last = depth;
        // If the sink panics, the entries from `changed` on are not valid.
        self.known = self.known.min(changed);
        if changed > depth {
            return self.entry(depth).stack;
        }
        self.module_calls.truncate(changed);
        let mut stack = self.callers_stack(changed);
        for index in changed..=depth {
            let entry = self.entry(index);
            if entry.meaning == FrameMeaning::UNKNOWN {
                // SAFETY: the caller guarantees that the entry mirrors a frame of the present chain.
                unsafe { Self::find_meaning(entry, chain, interner, sink) };
            }
            if let Some(frame) = entry.meaning.id() {
                stack = interner.child(stack, frame, sink);
            } else if entry.meaning == FrameMeaning::NO_SPACE {
                sink.lost(Loss::Frame);
            }
            entry.stack = stack;
            let meaning = entry.meaning;
            if meaning.is_any_call() {
                self.add_call_frame(index, meaning);
            }
        }
        self.known = depth + 1;
        stack
    }

    /// Determines the meaning of an entry.
    ///
    /// # Safety
    ///
    /// The entry's frame, code and instruction are those of a frame of the present chain.
    #[inline]
    unsafe fn find_meaning<C: FrameChain>(
        entry: &mut Entry,
        chain: &C,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) {
        // The generation is read while this stack keeps the code alive, and before the code's text. So any later free
        // changes it.
        entry.generation = chain.generation(entry.code);
        let key = FrameKey::python(entry.code, entry.instruction, entry.generation);
        entry.meaning = interner.meaning(key);
        if entry.meaning != FrameMeaning::UNKNOWN {
            return;
        }
        let raw = RawFrame { code: entry.code, instruction: entry.instruction, previous: 0 };
        // SAFETY: the caller guarantees the frame. `previous` is not read.
        let identity = unsafe { chain.identify(entry.frame, raw, interner, sink) };
        entry.meaning = identity.meaning;
        if identity.is_cacheable {
            interner.remember(key, identity.meaning);
        } else {
            entry.code = 0;
            entry.generation = chain.generation(0);
        }
    }

    /// Drops the entries from the first one on whose code may have been freed.
    #[cold]
    fn drop_freed<C: FrameChain>(&mut self, chain: &C) {
        self.replaced_leaf = ReplacedLeaf::NONE;
        for index in 0..self.known {
            let entry = self.entry(index);
            if entry.generation != chain.generation(entry.code) {
                self.known = index;
                return;
            }
        }
    }

    /// Ensures space for `count` entries. Returns `false` if the kernel refuses memory.
    fn ensure_capacity(&mut self, count: usize) -> bool {
        if count <= self.capacity {
            return true;
        }
        let capacity = count.next_power_of_two().max(FIRST_CAPACITY);
        let bytes = capacity * size_of::<Entry>();
        let memory = match NonNull::new(self.entries) {
            None => pages::reserve(bytes),
            // SAFETY: the array comes from this function with the old capacity, and the old pointer is overwritten
            // below.
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

/// The comparison of [`ThreadStacks::first_difference`]. Null means that there is no difference.
///
/// # Safety
///
/// `first..=entry` are valid entries, and `entry`'s frame belongs to the present chain.
#[inline(always)]
unsafe fn compare<R: FrameReader>(reader: R, first: *const Entry, mut entry: *const Entry) -> *const Entry {
    // SAFETY: the caller guarantees that `entry` is valid.
    let mut frame = unsafe { (*entry).frame };
    loop {
        // SAFETY: `frame` is the first one, which the caller guarantees, or was just equal to a `previous` of the
        // chain. `entry` stays within the caller's range.
        let (raw, known) = unsafe { (reader.read(frame), &*entry) };
        if known.code != raw.code || known.instruction != raw.instruction {
            return entry;
        }
        if entry == first {
            return if raw.previous == 0 { std::ptr::null() } else { entry };
        }
        // SAFETY: `entry` is above `first`, so the entry before it is in the caller's range.
        let below = unsafe { entry.sub(1) };
        // SAFETY: `below` is in the caller's range.
        let predicted = unsafe { (*below).frame };
        // This must come before the comparison, after which the compiler knows that both values are equal.
        frame = opaque(predicted);
        if predicted != raw.previous {
            return entry;
        }
        entry = below;
    }
}

#[cfg(test)]
#[path = "thread_tests.rs"]
mod tests;
