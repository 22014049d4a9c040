//! A set of keys with dense ids, for the nodes of the prefix tree and for frames.
//!
//! Keys are in one array, in the order of their ids. Its address space is reserved once, and pages are used as it
//! fills. A hash table of ids (4 bytes a slot, linear probing, at most half full) finds them. A lookup takes no lock
//! and writes nothing. An insertion needs a [`Locked`] proof.
//!
//! Why a lookup is correct without a lock: a key is written before its slot is published with `Release`. Neither ever
//! changes, and both are read after an `Acquire` load of the slot. A larger slot table is published in the same way.
//! The old table's pages are discarded while its addresses stay mapped. A reader that still uses it finds empty slots,
//! takes the key for unknown and repeats the lookup under the lock.

use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use super::digest::fold;
use super::lock::Locked;
use super::pages;
use super::tables::reserve_table;

const FIRST_SLOTS_LOG2: u32 = 11;
/// The slot table is page-aligned, so the low bits of its address can hold its size.
const LOG2_BITS: usize = 0x1f;

/// A set of keys of `WORDS` 8-byte words.
pub(super) struct IdSet<const WORDS: usize> {
    /// An array of `(limit + 1) * WORDS` words. Entry 0 is not used.
    keys: AtomicPtr<AtomicU64>,
    /// The address of the slots, combined with log2 of their number. 0 before the first insertion.
    slots: AtomicUsize,
    /// How many ids have been assigned.
    len: AtomicU32,
    limit: u32,
}

/// The result of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Inserted {
    /// The key has this id already.
    Known(u32),
    /// The key gets this new id.
    New(u32),
    /// The limit is reached, or the kernel refused memory.
    Full,
}

#[derive(Clone, Copy)]
struct Slots<'a> {
    first: &'a AtomicU32,
    log2: u32,
}

impl<'a> Slots<'a> {
    fn unpack(word: usize) -> Option<Slots<'a>> {
        let first = std::ptr::with_exposed_provenance::<AtomicU32>(word & !LOG2_BITS);
        // SAFETY: the word is 0 or was packed from a mapping of 2^log2 slots, which is never unmapped.
        let first = unsafe { first.as_ref() }?;
        Some(Slots { first, log2: (word & LOG2_BITS) as u32 })
    }

    fn map(log2: u32) -> Option<(Slots<'a>, usize)> {
        let memory = reserve_table(size_of::<AtomicU32>() << log2)?;
        let word = memory.as_ptr().expose_provenance() | log2 as usize;
        Some((Slots::unpack(word)?, word))
    }

    fn mask(self) -> usize {
        (1 << self.log2) - 1
    }

    #[inline]
    fn at(self, index: usize) -> &'a AtomicU32 {
        // SAFETY: the index is masked to the table's size, and the table is never unmapped.
        unsafe { &*std::ptr::from_ref(self.first).add(index & self.mask()) }
    }

    fn discard(self) {
        let start = NonNull::from(self.first).cast();
        // SAFETY: the table comes from `map`. A reader that still uses it may find its slots empty, which is harmless.
        unsafe { pages::discard(start, size_of::<AtomicU32>() << self.log2) };
    }
}

#[inline]
fn hash<const WORDS: usize>(key: &[u64; WORDS]) -> usize {
    let mut hash = 0x9E37_79B9_7F4A_7C15;
    for word in key {
        hash = fold(hash ^ word, 0xD6E8_FEB8_6659_FD93);
    }
    hash as usize
}

impl<const WORDS: usize> IdSet<WORDS> {
    /// An empty set of at most `limit` keys, which maps no memory yet.
    pub(super) const fn new(limit: u32) -> Self {
        IdSet { keys: AtomicPtr::new(std::ptr::null_mut()), slots: AtomicUsize::new(0), len: AtomicU32::new(0), limit }
    }

    /// How many ids have been assigned. Ids are `1..=len`.
    pub(super) fn len(&self) -> u32 {
        self.len.load(Relaxed)
    }

    /// The id of a key. `None` if it has none, or if the table is just being replaced.
    #[inline]
    pub(super) fn find(&self, key: &[u64; WORDS]) -> Option<u32> {
        let slots = Slots::unpack(self.slots.load(Acquire))?;
        let start = hash(key);
        for step in 0..=slots.mask() {
            let id = slots.at(start.wrapping_add(step)).load(Acquire);
            if id == 0 {
                return None;
            }
            if self.has_key(id, key) {
                return Some(id);
            }
        }
        None
    }

    /// Assigns an id to `key` unless it has one.
    pub(super) fn insert(&self, key: &[u64; WORDS], locked: &Locked<'_>) -> Inserted {
        if let Some(id) = self.find(key) {
            return Inserted::Known(id);
        }
        let id = self.len() + 1;
        if id > self.limit {
            return Inserted::Full;
        }
        let Some(slots) = self.slots_for(id, locked) else {
            return Inserted::Full;
        };
        let Some(key_words) = self.key_words(id) else {
            return Inserted::Full;
        };
        for (word, value) in key_words.iter().zip(key) {
            word.store(*value, Relaxed);
        }
        self.len.store(id, Relaxed);
        Self::publish(slots, hash(key), id);
        Inserted::New(id)
    }

    fn key_bytes(&self) -> usize {
        (self.limit as usize + 1) * WORDS * size_of::<u64>()
    }

    /// Where the key of `id` is stored. `None` before the first insertion and beyond the limit.
    #[inline]
    fn key_words(&self, id: u32) -> Option<&[AtomicU64; WORDS]> {
        let keys = self.keys.load(Relaxed);
        if keys.is_null() || id > self.limit {
            return None;
        }
        // SAFETY: `keys` has space for `limit + 1` keys and is never unmapped. Zeroed memory is valid for atomics.
        Some(unsafe { &*keys.add(id as usize * WORDS).cast() })
    }

    #[inline]
    fn has_key(&self, id: u32, key: &[u64; WORDS]) -> bool {
        self.key_words(id)
            .is_some_and(|key_words| key_words.iter().zip(key).all(|(word, expected)| word.load(Relaxed) == *expected))
    }

    fn publish(slots: Slots<'_>, hash: usize, id: u32) {
        for step in 0..=slots.mask() {
            let slot = slots.at(hash.wrapping_add(step));
            if slot.load(Relaxed) == 0 {
                slot.store(id, Release);
                return;
            }
        }
    }

    /// A slot table that is at most half full with `id` in it. The first call maps the arrays.
    fn slots_for(&self, id: u32, _locked: &Locked<'_>) -> Option<Slots<'_>> {
        if self.keys.load(Relaxed).is_null() {
            self.keys.store(reserve_table(self.key_bytes())?.as_ptr().cast(), Release);
        }
        let Some(old) = Slots::unpack(self.slots.load(Relaxed)) else {
            let (slots, word) = Slots::map(FIRST_SLOTS_LOG2)?;
            self.slots.store(word, Release);
            return Some(slots);
        };
        if (id as usize) <= old.mask() / 2 {
            return Some(old);
        }
        let (slots, word) = Slots::map(old.log2 + 1)?;
        for known in 1..id {
            let key = self.key_words(known)?;
            Self::publish(slots, hash(&key.each_ref().map(|word| word.load(Relaxed))), known);
        }
        self.slots.store(word, Release);
        old.discard();
        Some(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::super::lock::Lock;
    use super::*;
    use std::collections::HashMap;

    fn insert(set: &IdSet<2>, lock: &Lock, key: [u64; 2]) -> Inserted {
        set.insert(&key, &lock.lock().unwrap())
    }

    #[test]
    fn ids_are_dense_and_survive_growth() {
        let (set, lock) = (IdSet::<2>::new(100_000), Lock::new());
        assert_eq!(set.find(&[1, 1]), None);
        for n in 0..50_000u64 {
            assert_eq!(insert(&set, &lock, [n % 7, n]), Inserted::New(n as u32 + 1));
        }
        for n in 0..50_000u64 {
            assert_eq!(set.find(&[n % 7, n]), Some(n as u32 + 1));
            assert_eq!(insert(&set, &lock, [n % 7, n]), Inserted::Known(n as u32 + 1));
            assert_eq!(set.find(&[n % 7 + 1, n]), None);
        }
    }

    #[test]
    fn a_full_set_still_finds_its_keys() {
        let (set, lock) = (IdSet::<2>::new(3), Lock::new());
        for n in 1..=3 {
            assert_eq!(insert(&set, &lock, [n, n]), Inserted::New(n as u32));
        }
        assert_eq!(insert(&set, &lock, [9, 9]), Inserted::Full);
        assert_eq!(insert(&set, &lock, [2, 2]), Inserted::Known(2));
    }

    #[test]
    fn threads_that_insert_the_same_keys_agree() {
        let (set, lock) = (IdSet::<2>::new(1 << 20), Lock::new());
        let views: Vec<HashMap<[u64; 2], u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u64)
                .map(|thread| {
                    let (set, lock) = (&set, &lock);
                    scope.spawn(move || {
                        let mut view = HashMap::new();
                        let mut state = thread + 1;
                        for _ in 0..60_000 {
                            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                            let key = [state >> 50, 3];
                            let id = match set.find(&key) {
                                Some(id) => id,
                                None => match insert(set, lock, key) {
                                    Inserted::Known(id) | Inserted::New(id) => id,
                                    Inserted::Full => unreachable!("the limit is higher"),
                                },
                            };
                            assert_eq!(*view.entry(key).or_insert(id), id);
                        }
                        view
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut all = HashMap::new();
        for (key, id) in views.into_iter().flatten() {
            assert_eq!(*all.entry(key).or_insert(id), id);
        }
        assert_eq!(all.len(), set.len() as usize);
    }
}
