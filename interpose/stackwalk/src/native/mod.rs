//! Captures native stacks: the return addresses of the calling thread, without frame pointers, in place.
//!
//! - [`memory`]: reads the stack and never faults.
//! - [`elf_objects`]: the loaded object of a code address.
//! - [`cfi`]: converts unwinding information into a [`rule`] for one address; [`rules`] caches rules for the process.
//! - [`walk`]: unwinds what has changed since the thread's last walk, and explains why that is correct.
//! - [`evaluator`], [`merge`]: replace the interpreter's own frames by Python frames.
//!
//! A frame is (object, address), see [`memtrace_trace::definition::Definition::NativeFrame`]. Symbol names are found
//! afterwards, offline. Frames of this library are not shown.
//!
//! # Cost
//!
//! docs/dev/performance.md has the results; `scripts/bench unwind` measures them.
//!
//! # Boundaries
//!
//! Those of [`super`] apply. A *new* address is looked up among the loaded objects (some microseconds, no lock).
//! A thread's first walk asks the C library for the stack's bounds. An alternate signal stack and coroutines' stacks
//! are read through the kernel.
//!
//! Code without unwinding information is unwound by its frame pointer. The result must be inside the stack's bounds and
//! follow a call instruction. Otherwise the walk ends there, which is counted.

mod array;
mod cfi;
mod elf_objects;
pub(super) mod evaluator;
#[cfg(fuzzing)]
pub mod fuzzing;
mod memory;
mod merge;
mod rule;
mod rules;
mod walk;

use std::ffi::CString;
use std::ops::Range;

use memtrace_trace::ids::StackId;

use elf_objects::{with_code_at, with_start};

use super::arch;
use super::definition::{DefinitionSink, LoadedObject, Loss};
use super::intern::Interner;
use super::key_cache::{FrameKey, FrameMeaning};
use super::loader::unload_count;
use super::python::process::Python;
use super::thread::ThreadStacks;
use memory::StackMemory;
use merge::{Merged, child};
use rule::FrameRegisters;
use walk::{Walk, WalkEnd, WalkResult};

/// How many stacks a thread caches. A program alternates between allocating and freeing in different innermost frames,
/// and each of these stacks has its own slot.
const SLOTS: usize = 4;

/// How many words of the stack are searched for a return address.
const SEARCHED_WORDS: usize = 1024;

/// A thread's cache of its last native stacks.
pub struct NativeStacks {
    slots: [Slot; SLOTS],
    /// The index of the slot used last.
    last: usize,
}

/// One cached stack.
struct Slot {
    /// The instruction pointer and stack pointer at which the walk started.
    start: (usize, usize),
    walk: Walk,
    merged: Merged,
    /// How many frames the last walk found.
    depth: usize,
    /// Entries `0..interned` have their stacks.
    interned: usize,
    /// The epoch of the interner whose ids the entries contain.
    epoch: u32,
}

/// The registers of the function into which this one is inlined.
#[inline(always)]
fn registers() -> FrameRegisters {
    let arch::StackRegisters { ip, sp, bp } = arch::registers();
    FrameRegisters { ip, sp, bp, exact: true }
}

impl NativeStacks {
    /// An empty cache, which has no memory.
    #[allow(clippy::new_without_default, reason = "made in a const context")]
    pub const fn new() -> NativeStacks {
        NativeStacks { slots: [const { Slot::new() }; SLOTS], last: 0 }
    }

    /// Frees the memory. The struct can be used again and is then empty.
    pub fn release(&mut self) {
        for slot in &mut self.slots {
            slot.walk.release();
            slot.merged.release();
        }
        *self = NativeStacks::new();
    }

    /// The calling thread's native stack. Never call it twice at a time on one thread.
    #[inline(never)]
    pub fn capture<S: DefinitionSink>(&mut self, interner: &Interner, sink: &mut S) -> StackId {
        let start = registers();
        self.slot(&start).map_or(StackId::NONE, |slot| slot.capture(start, interner, sink))
    }

    /// The calling thread's native stack, in which frames of `python` replace those of its interpreter. The Python
    /// stack `stack` was just captured into `stacks`.
    #[inline(never)]
    pub fn capture_merged<S: DefinitionSink>(
        &mut self,
        python: &Python,
        stacks: &ThreadStacks,
        stack: StackId,
        interner: &Interner,
        sink: &mut S,
    ) -> StackId {
        let start = registers();
        let Some(slot) = self.slot(&start) else { return StackId::NONE };
        let walked = slot.walk(start, interner, sink);
        slot.merged.merge(&slot.walk, walked, python, stacks, stack, interner, sink)
    }

    /// Whether a function in `code` has called the current one, at most a few calls ago: its return address is among
    /// the first [`SEARCHED_WORDS`] words of the stack. An old value there is no proof, so the stack is then unwound.
    #[inline(never)]
    pub fn is_called_from<S: DefinitionSink>(
        &mut self,
        code: &Range<usize>,
        interner: &Interner,
        sink: &mut S,
    ) -> bool {
        let start = registers();
        let memory = StackMemory::from(start.sp);
        if memory.is_own(start.sp) && !memory.own_words(SEARCHED_WORDS).any(|word| code.contains(&word)) {
            return false;
        }
        let Some(slot) = self.slot(&start) else { return false };
        let walked = slot.walk(start, interner, sink);
        (0..walked.depth).any(|index| code.contains(&slot.walk.entry(index).state.ip))
    }

    /// The frames of the last capture, innermost first: the address where each continues, and whether it belongs to
    /// this library.
    pub fn frames(&self) -> impl Iterator<Item = (usize, bool)> {
        let slot = self.slots.get(self.last);
        let entries = slot.into_iter().flat_map(|slot| (0..slot.depth).rev().map(|index| slot.walk.entry(index)));
        entries.map(|entry| (entry.state.ip, entry.meaning == FrameMeaning::HIDDEN))
    }

    /// The slot of the stack that last started at these registers, otherwise the slot after the last one, whose outer
    /// frames may be the same. The choice affects only the cost of the walk, not its result.
    #[inline]
    fn slot(&mut self, start: &FrameRegisters) -> Option<&mut Slot> {
        let start = (start.ip, start.sp);
        if self.slots.get(self.last).is_none_or(|slot| slot.start != start) {
            self.last = match self.slots.iter().position(|slot| slot.start == start) {
                Some(index) => index,
                None => (self.last + 1) % SLOTS,
            };
        }
        let slot = self.slots.get_mut(self.last)?;
        slot.start = start;
        Some(slot)
    }
}

impl Slot {
    const fn new() -> Slot {
        Slot { start: (0, 0), walk: Walk::new(), merged: Merged::new(), depth: 0, interned: 0, epoch: 0 }
    }

    #[inline(always)]
    fn capture<S: DefinitionSink>(&mut self, start: FrameRegisters, interner: &Interner, sink: &mut S) -> StackId {
        let walked = self.walk(start, interner, sink);
        let Some(leaf) = walked.depth.checked_sub(1) else { return StackId::NONE };
        self.interned = self.interned.min(walked.changed);
        if self.interned < walked.depth {
            self.intern(walked.depth, interner, sink);
        }
        self.walk.entry(leaf).stack
    }

    #[inline(always)]
    fn walk<S: DefinitionSink>(&mut self, start: FrameRegisters, interner: &Interner, sink: &mut S) -> WalkResult {
        let epoch = interner.epoch();
        if self.epoch != epoch || epoch == 0 {
            self.walk.forget();
            self.merged.forget();
            self.epoch = interner.claim_epoch();
        }
        let walked = self.walk.walk(start, &mut StackMemory::from(start.sp));
        self.depth = walked.depth;
        for index in walked.changed..walked.depth {
            let entry = self.walk.entry_mut(index);
            if entry.meaning == FrameMeaning::UNKNOWN {
                entry.meaning = meaning(&entry.state, interner, sink);
            }
        }
        match walked.end_kind {
            WalkEnd::Outermost => {}
            WalkEnd::Lost => sink.lost(Loss::Unwinding),
            WalkEnd::TooDeep => sink.lost(Loss::Depth),
            WalkEnd::NoMemory => sink.lost(Loss::Memory),
        }
        walked
    }

    fn intern<S: DefinitionSink>(&mut self, depth: usize, interner: &Interner, sink: &mut S) {
        let mut stack = match self.interned.checked_sub(1) {
            Some(below) => self.walk.entry(below).stack,
            None => StackId::NONE,
        };
        for index in self.interned..depth {
            let entry = self.walk.entry_mut(index);
            stack = child(stack, entry.meaning, interner, sink);
            entry.stack = stack;
        }
        self.interned = depth;
    }
}

/// The GNU build id of the loaded object that starts at this address. Empty if it has none.
pub fn build_id(start: usize) -> Vec<u8> {
    with_start(start, |object| object.build_id().map(<[u8]>::to_vec)).flatten().unwrap_or_default()
}

/// The meaning of the frame with this state.
#[inline]
fn meaning<S: DefinitionSink>(state: &FrameRegisters, interner: &Interner, sink: &mut S) -> FrameMeaning {
    // While an object is being unloaded, nothing is cached by address.
    let key = unload_count().map(|unloads| FrameKey::native(state.return_address(), unloads));
    let known = key.map_or(FrameMeaning::UNKNOWN, |key| interner.meaning(key));
    if known == FrameMeaning::UNKNOWN { identify(state, key, interner, sink) } else { known }
}

#[cold]
#[inline(never)]
fn identify<S: DefinitionSink>(
    state: &FrameRegisters,
    key: Option<FrameKey>,
    interner: &Interner,
    sink: &mut S,
) -> FrameMeaning {
    /// The longest build id that is stored, in bytes. Linkers write 20, 16 or 8.
    const MAX_ID_BYTES: usize = 32;
    let found = with_code_at(state.lookup(), |object| {
        let is_ours = object.code(identify::<S> as *const () as usize).is_some();
        let build_id = object.build_id().unwrap_or_default();
        let build_id = build_id.get(..MAX_ID_BYTES).unwrap_or(build_id).to_vec();
        (is_ours, object.bias, object.start(), CString::from(object.path), build_id)
    });
    let address = state.return_address();
    // Code outside all objects may be replaced by an object without notice.
    let is_cacheable = found.is_some();
    let meaning = match found {
        Some((true, ..)) => FrameMeaning::HIDDEN,
        Some((false, bias, start, path, build_id)) => {
            let module = sink.module(&LoadedObject { start, path: &path, build_id: &build_id });
            FrameMeaning::frame(interner.native_frame(module, address.wrapping_sub(bias) as u64, sink))
        }
        // Generated code: its address, in no object.
        None => FrameMeaning::frame(interner.native_frame(Default::default(), address as u64, sink)),
    };
    if let Some(key) = key.filter(|_| is_cacheable) {
        interner.remember(key, meaning);
    }
    meaning
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hint::black_box;

    use memtrace_trace::ids::FrameId;

    use super::*;
    use crate::FrameText;

    struct Discard;

    impl DefinitionSink for Discard {
        fn frame(&mut self, _: FrameId, _: &FrameText<'_>) {}
        fn stack(&mut self, _: StackId, _: StackId, _: FrameId) {}
        fn lost(&mut self, what: Loss) {
            panic!("{what:?}");
        }
    }

    struct Program {
        cached: NativeStacks,
        interner: Interner,
        random: u64,
        seen: HashSet<Vec<(usize, usize)>>,
        captures: usize,
    }

    impl Program {
        fn below(&mut self, limit: u64) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random % limit
        }

        /// Captures the stack twice at one place: with the cache and without it.
        #[inline(never)]
        fn check(&mut self) {
            let mut fresh = NativeStacks::new();
            // All code of a test is in our own object, which no stack shows. So the registers of the frames are
            // compared.
            let mut found = [Vec::new(), Vec::new()];
            let mut turn = 0;
            while turn < black_box(2) {
                let stacks = if turn == 0 { &mut self.cached } else { &mut fresh };
                black_box(stacks.capture(&self.interner, &mut Discard));
                let slot = &stacks.slots[stacks.last];
                found[turn] =
                    (0..slot.interned).map(|index| slot.walk.entry(index).state).map(|s| (s.ip, s.sp)).collect();
                turn += black_box(1);
            }
            fresh.release();
            assert_eq!(found[0], found[1], "capture {}", self.captures);
            let [found, _] = found;
            self.seen.insert(found);
            self.captures += 1;
        }

        /// Makes random calls, at random depths, with frames of many sizes, directly and through pointers.
        fn random_calls(&mut self, depth: u64) {
            for _ in 0..self.below(3) + 1 {
                match self.below(6) {
                    0 if depth < 60 => self.small(depth + 1),
                    1 if depth < 60 => self.large(depth + 1),
                    2 if depth < 60 => {
                        let through: fn(&mut Self, u64, [u64; 9]) -> u64 = black_box(Self::through);
                        black_box(through(self, depth + 1, [depth; 9]));
                    }
                    _ => self.check(),
                }
            }
        }

        #[inline(never)]
        fn small(&mut self, depth: u64) {
            self.random_calls(depth);
            black_box(depth);
        }

        #[inline(never)]
        fn large(&mut self, depth: u64) {
            let mut padding = [0u64; 300];
            black_box(&mut padding)[depth as usize] = depth;
            self.random_calls(depth);
            black_box(&padding);
        }

        #[inline(never)]
        fn through(&mut self, depth: u64, words: [u64; 9]) -> u64 {
            let sums: Vec<u64> = words.iter().map(|word| word * self.below(9)).collect();
            self.random_calls(depth);
            sums.iter().sum()
        }
    }

    #[test]
    fn a_cached_stack_equals_a_newly_unwound_one() {
        let mut program = Program {
            cached: NativeStacks::new(),
            interner: Interner::new(),
            random: 0x2545_f491_4f6c_dd1d,
            seen: Default::default(),
            captures: 0,
        };
        while program.captures < 20_000 {
            program.random_calls(0);
        }
        program.cached.release();
        assert!(program.seen.len() > 2_000, "{} stacks: no test of anything", program.seen.len());
    }
}
