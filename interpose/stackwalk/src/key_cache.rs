//! Maps code addresses to frames: a bounded cache that avoids reading a frame's text.
//!
//! A key recognizes a frame without its text. Several keys may stand for one frame (the same function compiled again),
//! and a key is invalid once its code is freed. The cache has three ways a set and one cache line a set, and it
//! overwrites old entries. A forgotten key is resolved by text again and gets the same id. So a program that keeps
//! creating code costs time, not memory.
//!
//! A lookup takes no lock: each set has a sequence number that is odd while the set is being written. A writer needs a
//! [`Locked`] proof.

use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

use memtrace_trace::ids::FrameId;

use super::digest::fold;
use super::lock::Locked;
use super::tables::reserve_table;

/// The largest number of frames (lines of functions) in one process.
pub(crate) const MAX_FRAMES: u32 = 1 << 18;
const SETS_LOG2: u32 = 14;
const SETS: usize = 1 << SETS_LOG2;
const WAYS: usize = 3;

/// Identifies a frame. The words have no meaning here. The code that makes keys ensures that a key never stands for two
/// different frames during the life of the process. The top bit of the first word distinguishes the kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameKey {
    first: u64,
    second: u64,
}

impl FrameKey {
    const NATIVE: u64 = 1 << 63;

    /// A Python frame. `code` is the address of the code object, `instruction` the position in it, as the walker reads
    /// it. `generation` distinguishes code objects that had the same address one after the other.
    #[inline]
    pub(super) fn python(code: usize, instruction: u32, generation: u32) -> FrameKey {
        FrameKey { first: code as u64 & !Self::NATIVE, second: u64::from(generation) << 32 | u64::from(instruction) }
    }

    /// A native frame. `address` is that of an instruction. `generation` distinguishes objects that were loaded at the
    /// same address.
    pub(super) fn native(address: usize, generation: u32) -> FrameKey {
        FrameKey { first: address as u64 | Self::NATIVE, second: u64::from(generation) << 32 }
    }

    #[inline]
    fn set(self) -> usize {
        fold(self.first ^ self.second.rotate_left(17), 0x9E37_79B9_7F4A_7C15) as usize % SETS
    }
}

/// The meaning of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameMeaning(u32);

impl FrameMeaning {
    /// Not looked up yet.
    pub(super) const UNKNOWN: FrameMeaning = FrameMeaning(0);
    /// Not shown in a traceback. The stack continues with the caller.
    pub(super) const HIDDEN: FrameMeaning = FrameMeaning(u32::MAX);
    /// A frame for which there was no space. The stack is cut there, and the cut is counted.
    pub(super) const NO_SPACE: FrameMeaning = FrameMeaning(u32::MAX - 1);

    /// Bits of a frame that calls an `nn.Module`: of `Module.__call__` itself, and of the function that it may call in
    /// turn.
    const CALL: u32 = 1 << 30;
    const INNER_CALL: u32 = 1 << 29;
    const SPECIAL: u32 = 1 << 31;

    /// The meaning of the same frame as a call of an `nn.Module`.
    pub(super) fn as_module_call(self, is_inner: bool) -> FrameMeaning {
        match self.id() {
            Some(_) => FrameMeaning(self.0 | if is_inner { Self::INNER_CALL } else { Self::CALL }),
            None => self,
        }
    }

    /// Whether the frame calls an `nn.Module`, in either way.
    #[inline]
    pub(super) fn is_any_call(self) -> bool {
        self.0 & (Self::CALL | Self::INNER_CALL) != 0 && self.0 & Self::SPECIAL == 0
    }

    /// Whether the frame belongs to `Module.__call__` itself.
    pub(super) fn is_call(self) -> bool {
        self.is_any_call() && self.0 & Self::CALL != 0
    }

    /// Whether the frame belongs to the function that `Module.__call__` may call in turn.
    pub(super) fn is_inner_call(self) -> bool {
        self.is_any_call() && self.0 & Self::INNER_CALL != 0
    }

    /// The meaning of a frame. `NONE` gives [`Self::NO_SPACE`].
    pub(super) fn frame(id: FrameId) -> FrameMeaning {
        if id.is_none() { Self::NO_SPACE } else { FrameMeaning(id.0) }
    }

    /// The frame. `None` for the special meanings.
    #[inline]
    pub(super) fn id(self) -> Option<FrameId> {
        let special = self == Self::UNKNOWN || self == Self::HIDDEN || self == Self::NO_SPACE;
        (!special).then_some(FrameId(self.0 & !(Self::CALL | Self::INNER_CALL)))
    }
}

const _: () = assert!(MAX_FRAMES < FrameMeaning::INNER_CALL, "no frame's number has one of the bits");

#[repr(C, align(64))]
struct Set {
    sequence: AtomicU32,
    meanings: [AtomicU32; WAYS],
    first_words: [AtomicU64; WAYS],
    second_words: [AtomicU64; WAYS],
}

const _: () = assert!(size_of::<Set>() == 64, "one set is one cache line");

/// The cache. One set is one cache line.
pub(super) struct KeyCache {
    sets: AtomicPtr<Set>,
    evictions: AtomicU64,
}

impl KeyCache {
    pub(super) const fn new() -> KeyCache {
        KeyCache { sets: AtomicPtr::new(std::ptr::null_mut()), evictions: AtomicU64::new(0) }
    }

    /// How many entries were overwritten.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions.load(Relaxed)
    }

    #[inline]
    fn set(&self, key: FrameKey) -> Option<&Set> {
        let sets = self.sets.load(Acquire);
        if sets.is_null() {
            return None;
        }
        // SAFETY: `SETS` zeroed sets are mapped there and never unmapped. Zeros are valid, and the index is below
        // `SETS`.
        Some(unsafe { &*sets.add(key.set()) })
    }

    /// The meaning of `key`. `UNKNOWN` if it is not cached or its set is being written.
    #[inline]
    pub(super) fn find(&self, key: FrameKey) -> FrameMeaning {
        let Some(set) = self.set(key) else {
            return FrameMeaning::UNKNOWN;
        };
        let before = set.sequence.load(Acquire);
        let mut found = FrameMeaning::UNKNOWN;
        for ((first, second), meaning) in set.first_words.iter().zip(&set.second_words).zip(&set.meanings) {
            if first.load(Relaxed) == key.first && second.load(Relaxed) == key.second {
                found = FrameMeaning(meaning.load(Relaxed));
            }
        }
        fence(Acquire);
        let is_torn = before & 1 != 0 || set.sequence.load(Relaxed) != before;
        if is_torn { FrameMeaning::UNKNOWN } else { found }
    }

    /// Caches the meaning of `key`, if necessary in place of an older entry. Does nothing without memory.
    pub(super) fn insert(&self, key: FrameKey, meaning: FrameMeaning, _locked: &Locked<'_>) {
        if self.sets.load(Relaxed).is_null()
            && let Some(memory) = reserve_table(SETS * size_of::<Set>())
        {
            self.sets.store(memory.as_ptr().cast(), Release);
        }
        let Some(set) = self.set(key) else {
            return;
        };
        let sequence = set.sequence.load(Relaxed);
        set.sequence.store(sequence.wrapping_add(1), Relaxed);
        fence(Release);
        let ways = || set.first_words.iter().zip(&set.second_words).zip(&set.meanings);
        let same_key =
            ways().find(|((first, second), _)| first.load(Relaxed) == key.first && second.load(Relaxed) == key.second);
        let free = || ways().find(|(_, meaning)| meaning.load(Relaxed) == FrameMeaning::UNKNOWN.0);
        let oldest = || {
            self.evictions.fetch_add(1, Relaxed);
            ways().nth((sequence >> 1) as usize % WAYS)
        };
        if let Some(((first, second), slot)) = same_key.or_else(free).or_else(oldest) {
            first.store(key.first, Relaxed);
            second.store(key.second, Relaxed);
            slot.store(meaning.0, Relaxed);
        }
        set.sequence.store(sequence.wrapping_add(2), Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::lock::Lock;
    use super::*;

    #[test]
    fn entries_are_stored_evicted_and_never_confused() {
        let (cache, lock) = (KeyCache::new(), Lock::new());
        let key = |n: u64| FrameKey::python(0x7f00_0000_0000 + n as usize * 32, (n % 100) as u32, (n % 3) as u32);
        assert_eq!(cache.find(key(1)), FrameMeaning::UNKNOWN);
        let count = (SETS * WAYS * 2) as u64;
        for n in 0..count {
            cache.insert(key(n), FrameMeaning::frame(FrameId(n as u32 + 1)), &lock.lock().unwrap());
        }
        let known = (0..count)
            .filter(|n| match cache.find(key(*n)).id() {
                Some(id) => {
                    assert_eq!(id, FrameId(*n as u32 + 1));
                    true
                }
                None => false,
            })
            .count();
        assert!(known > SETS * WAYS * 8 / 10, "{known}");
        assert!(cache.evictions() > 0);
    }

    #[test]
    fn readers_see_whole_entries_while_a_set_is_rewritten() {
        let (cache, lock) = (KeyCache::new(), Lock::new());
        let key = |n: u32| FrameKey::python(0x1000 + n as usize, n, n);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20 {
                    for n in 1..60_000 {
                        cache.insert(key(n + round), FrameMeaning::frame(FrameId(n + round)), &lock.lock().unwrap());
                    }
                }
            });
            scope.spawn(|| {
                for _ in 0..40 {
                    for n in 1..60_000 {
                        if let Some(id) = cache.find(key(n)).id() {
                            assert_eq!(id, FrameId(n));
                        }
                    }
                }
            });
        });
    }

    #[test]
    fn a_native_frame_is_not_a_python_frame() {
        assert_ne!(FrameKey::native(0x1000, 1), FrameKey::python(0x1000, 0, 1));
    }
}
