//! Determines whether CPython's cyclic garbage collector is running on this thread. Memory that it frees was part of a
//! reference cycle.
//!
//! The interpreter keeps this in one word: `collecting` of `struct _gc_runtime_state` (Include/internal/pycore_gc.h;
//! pycore_pymem.h before 3.9; pycore_interp_structs.h from 3.14 on). Each free reads it in place. Up to 3.13 the
//! structure is searched for once. Its signature is unique: three generations, followed by a word that points to the
//! first of them. From 3.13 on, `_Py_DebugOffsets` publishes the address, and in 3.13 both results must agree. The
//! generations at that address are verified in each version, and a word that is neither 0 nor 1 is rejected.
//!
//! CPython declares the first word of a generation to be aligned to 4 bytes from 3.13 on. Some compilers follow that,
//! as GCC 14 does in Debian 13: they place the generations 4 bytes before the multiple of 8, and leave the other
//! fields.
//!
//! The interpreter does not store which thread collects, and PyTorch releases the GIL while it frees a tensor. The
//! collecting thread is the first one that runs Python and frees while `collecting` is set. Others run only after it
//! has released the GIL. The interpreter counts collections, which distinguishes them.
//!
//! The words are read without synchronization. A thread that runs Python has the GIL, and its release by the collecting
//! thread orders what that thread has written before. A thread that frees without the GIL may see either value of
//! `collecting`, as its free may be before or after the collection's.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memtrace_stackwalk::CheckedMemory;
use memtrace_trace::definition::NoticeStatus;
use memtrace_trace::event::Flags;

use crate::linker::original;
use crate::recording::guard::Guard;
use crate::recording::observer;
use crate::recording::thread_local::ThreadLocal;

/// The address of `collecting`, [`UNKNOWN`] or [`UNAVAILABLE`].
static COLLECTING_ADDRESS: AtomicUsize = AtomicUsize::new(UNKNOWN);
const UNKNOWN: usize = 0;
const UNAVAILABLE: usize = 1;
/// `PyThreadState *PyGILState_GetThisThreadState(void)`, which returns null on a thread that runs no Python.
static GET_THREAD_STATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The low 48 bits identify the thread of the current collection by the address of its [`ThreadLocal`]. The bits above
/// are the collection's number.
static COLLECTING_THREAD: AtomicU64 = AtomicU64::new(0);
const THREAD_BITS: u32 = 48;

/// How many 8-byte words are searched.
const SEARCHED_WORDS: usize = 8192;
/// Words of a generation: next, previous, and one that holds threshold and count.
const GENERATION: usize = 3;

/// Where fields of the collector's state are, in words from the first of three generations, where that is aligned to 8
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StateLayout {
    /// A word that points to the first generation, if it follows the generations.
    pointer: Option<usize>,
    /// `permanent_generation`.
    permanent: usize,
    collecting: usize,
    counts: Counts,
    /// Where `_Py_DebugOffsets` publishes `collecting`, if the version does.
    published: Option<PublishedState>,
}

/// Where the collections are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Counts {
    /// Three generations' statistics of three words before `collecting`, each with its collections first.
    Inline,
    /// The word before `collecting` points to `struct gc_stats`, whose last word has `update_seq`. Each collection
    /// changes it when it ends. This word of `_Py_DebugOffsets` is the structure's size.
    Pointed { size: usize },
}

/// Indices of words in `_Py_DebugOffsets`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PublishedState {
    /// The offset of the collector's state in the interpreter's state.
    state: usize,
    /// The offset of `collecting` in the collector's state.
    collecting: usize,
}

const V3_8: StateLayout = StateLayout {
    pointer: Some(3 * GENERATION),
    permanent: 3 * GENERATION + 1,
    collecting: 3 * GENERATION + 1 + GENERATION + 9,
    counts: Counts::Inline,
    published: None,
};
const V3_13: StateLayout = StateLayout { published: Some(PublishedState { state: 10, collecting: 72 }), ..V3_8 };
/// No word points to the first generation.
const V3_14: StateLayout = StateLayout {
    pointer: None,
    permanent: 3 * GENERATION,
    collecting: 3 * GENERATION + GENERATION + 9,
    published: Some(PublishedState { state: 11, collecting: 82 }),
    ..V3_13
};
const V3_15: StateLayout = StateLayout {
    collecting: 3 * GENERATION + GENERATION + 1,
    counts: Counts::Pointed { size: 97 },
    published: Some(PublishedState { state: 11, collecting: 95 }),
    ..V3_14
};
/// The layouts, each from a minor version of CPython 3 on; `None` from the first version whose layout is unknown.
const LAYOUTS: [(u32, Option<StateLayout>); 5] =
    [(8, Some(V3_8)), (13, Some(V3_13)), (14, Some(V3_14)), (15, Some(V3_15)), (16, None)];

impl StateLayout {
    fn of(minor: u32) -> Option<StateLayout> {
        LAYOUTS.iter().rev().find(|(first, _)| *first <= minor)?.1
    }

    /// The offsets of the three generations and of the permanent one, in bytes from a multiple of 8. The generations,
    /// and the permanent one if no pointer is between them, begin `early` bytes before their words.
    fn heads(&self, early: usize) -> [isize; 4] {
        let early = early as isize;
        let at = |words: usize| words as isize * 8;
        let permanent = at(self.permanent) - if self.pointer.is_some() { 0 } else { early };
        [-early, at(GENERATION) - early, at(2 * GENERATION) - early, permanent]
    }
}

/// By how many bytes generations can begin before a multiple of 8.
const EARLY: [usize; 2] = [0, 4];

/// The collector's state as it was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    /// The address of `collecting`.
    collecting: usize,
    /// One of [`EARLY`].
    early: usize,
}

/// [`State::early`], valid once [`COLLECTING_ADDRESS`] is known.
static EARLY_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Where [`Counts::Pointed`] counts; 0 for [`Counts::Inline`].
static COUNTER_ADDRESS: AtomicUsize = AtomicUsize::new(0);

#[cold]
fn report_collector(guard: &mut Guard) {
    observer::collector_frees(&mut |topic, status, text| guard.notice(topic, status, text));
}

/// [`Flags::IN_GC`] if the collector is running on this thread, otherwise no flag.
#[inline(always)]
pub(super) fn flag(guard: &mut Guard) -> Flags {
    // Acquire, with the Release of `find_state`: the function and the counter were stored before the address.
    let address = COLLECTING_ADDRESS.load(Ordering::Acquire);
    if address <= UNAVAILABLE {
        if address == UNKNOWN {
            find_state(guard);
        }
        return Flags::default();
    }
    // SAFETY: `address` is a verified word of the interpreter's state, which is never unmapped. Another thread may
    // write it, so the read is atomic.
    let collecting =
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(address)) }.load(Ordering::Relaxed);
    if collecting != 0 && is_collecting_here(address) {
        report_collector(guard);
        Flags::IN_GC
    } else {
        Flags::default()
    }
}

/// The addresses of the heads of the collector's object lists: three generations and the permanent one.
///
/// `None` if the collector's state was not found.
pub(crate) fn list_heads(guard: &mut Guard) -> Option<[usize; 4]> {
    flag(guard);
    // Acquire: `EARLY_BYTES` was stored before this address was published.
    let address = COLLECTING_ADDRESS.load(Ordering::Acquire);
    let (_, minor) = guard.process().python()?.version();
    let layout = StateLayout::of(minor)?;
    let first = address.checked_sub(layout.collecting * 8).filter(|_| address > UNAVAILABLE)?;
    Some(layout.heads(EARLY_BYTES.load(Ordering::Relaxed)).map(|offset| first.wrapping_add_signed(offset)))
}

/// Assigns the current collection to this thread, whichever thread frees first.
pub(crate) fn claim() {
    let address = COLLECTING_ADDRESS.load(Ordering::Acquire);
    if address > UNAVAILABLE {
        is_collecting_here(address);
    }
}

#[cold]
fn is_collecting_here(address: usize) -> bool {
    // SAFETY: the pointer is null or this function, which has this type in every CPython. It reads a word of the
    // calling thread.
    let get_thread_state = unsafe {
        std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *mut c_void>>(
            GET_THREAD_STATE.load(Ordering::Relaxed),
        )
    };
    // SAFETY: `get_thread_state` is `PyGILState_GetThisThreadState`, which needs no GIL.
    if get_thread_state.is_none_or(|get_thread_state| unsafe { get_thread_state() }.is_null()) {
        return false;
    }
    let count = |address: usize| {
        // SAFETY: these words precede `collecting` in the same verified structure, or are in the interpreter's
        // statistics, which are never unmapped. Each is a number of collections.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address)) }.load(Ordering::Relaxed)
    };
    let collections = match COUNTER_ADDRESS.load(Ordering::Relaxed) {
        0 => [9, 6, 3].map(|words| count(address - words * 8)).into_iter().fold(0, u64::wrapping_add),
        counter => count(counter),
    };
    let here = std::ptr::from_ref(ThreadLocal::current()).addr() as u64 & ((1 << THREAD_BITS) - 1);
    let claim = collections << THREAD_BITS | here;
    let known = COLLECTING_THREAD.load(Ordering::Relaxed);
    // Whether a thread owns this collection already. Otherwise this thread claims it.
    let is_claimed = known != 0 && known >> THREAD_BITS == claim >> THREAD_BITS;
    let owner = if is_claimed {
        known
    } else {
        COLLECTING_THREAD
            .compare_exchange(known, claim, Ordering::Relaxed, Ordering::Relaxed)
            .map_or_else(|other| other, |_| claim)
    };
    owner == claim
}

/// Searches for the word once the interpreter is known, and reports the result.
#[cold]
fn find_state(guard: &mut Guard) {
    let Some(python) = guard.process().python().filter(|python| python.verified() == Ok(true)) else { return };
    let (_, minor) = python.version();
    let address = if python.is_free_threaded() {
        // Other threads run while the collector frees, so the first one that frees need not be the one that collects.
        Err(
            "free-threaded CPython does not publish which thread collects: blocks that the garbage collector frees are \
             not marked",
        )
    } else {
        locate(minor, &original::global_address)
    };
    let (status, text) = match address {
        Ok(_) => (NoticeStatus::Works, "garbage collector state verified: blocks that it frees are marked"),
        Err(reason) => (NoticeStatus::Off, reason),
    };
    if COLLECTING_ADDRESS
        .compare_exchange(UNKNOWN, address.unwrap_or(UNAVAILABLE), Ordering::Release, Ordering::Relaxed)
        .is_ok()
    {
        guard.notice("python.gc", status, text);
        report_collector(guard);
    }
}

fn locate(minor: u32, symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<usize, &'static str> {
    let get_thread_state = symbol(c"PyGILState_GetThisThreadState");
    let main = symbol(c"PyInterpreterState_Main");
    let runtime = symbol(c"_PyRuntime").expose_provenance();
    if get_thread_state.is_null() || main.is_null() || runtime == 0 {
        return Err("the interpreter lacks a symbol: blocks that the garbage collector frees are not marked");
    }
    GET_THREAD_STATE.store(get_thread_state, Ordering::Relaxed);
    // SAFETY: `PyInterpreterState *PyInterpreterState_Main(void)` reads a word of `_PyRuntime` and needs no GIL.
    let main = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(main)() };
    let memory = CheckedMemory::open()
        .map_err(|_| "memory cannot be read: blocks that the garbage collector frees are not marked")?;
    let owner = if minor < 9 { runtime } else { main.expose_provenance() };
    let unknown = "the garbage collector's state was not found: blocks that it frees are not marked";
    let layout = StateLayout::of(minor).ok_or(unknown)?;
    let published = layout.published.map(|slots| {
        let offset = published(&memory, runtime, minor, slots)?;
        verified(&memory, main.expose_provenance() + offset, &layout)
    });
    let searched = layout.pointer.map(|_| search(&memory, owner, &layout));
    let state = match (published, searched) {
        (Some(Some(state)), None) | (None, Some(Some(state))) => state,
        (Some(Some(state)), Some(Some(same))) if state == same => state,
        _ => return Err(unknown),
    };
    let address = state.collecting;
    EARLY_BYTES.store(state.early, Ordering::Relaxed);
    if let Counts::Pointed { size } = layout.counts {
        let word = |address: usize| memory.size(address, 0).filter(|word| word.is_multiple_of(8) && *word > 0);
        let counter = word(address - 8).zip(word(runtime + size * 8)).map(|(stats, size)| stats + size - 8);
        COUNTER_ADDRESS.store(counter.filter(|at| memory.size(*at, 0).is_some()).ok_or(unknown)?, Ordering::Relaxed);
    }
    Ok(address)
}

/// The offset of `collecting` in the interpreter's state, in bytes, as `_Py_DebugOffsets` publishes it.
fn published(memory: &CheckedMemory, runtime: usize, minor: u32, slots: PublishedState) -> Option<usize> {
    const FARTHEST: usize = 1 << 20;
    let word = |index: usize| memory.size(runtime, index * 8);
    if word(0)? as u64 != u64::from_le_bytes(*b"xdebugpy") || word(1)? >> 16 != 0x300 | minor as usize {
        return None;
    }
    let (state, collecting) = (word(slots.state)?, word(slots.collecting)?);
    (state < FARTHEST && collecting < FARTHEST).then_some(state + collecting)
}

/// The collector's state around `collecting`, if it is there.
fn verified(memory: &CheckedMemory, collecting: usize, layout: &StateLayout) -> Option<State> {
    let first = collecting.checked_sub(layout.collecting * 8)?;
    let start = first.checked_sub(START)?;
    let mut bytes = vec![0; START + (layout.collecting + 1) * 8];
    let early = memory.read(start, &mut bytes).then(|| early(&bytes, first as u64, layout))??;
    Some(State { collecting, early })
}

/// How many bytes before the first generation's word are read, for those that begin early.
const START: usize = 8;

/// The collector's state in the memory at `base`, which is a multiple of 8. `None` unless exactly one is found.
fn search(memory: &CheckedMemory, base: usize, layout: &StateLayout) -> Option<State> {
    let mut bytes = vec![0; SEARCHED_WORDS * 8];
    // The size of the structure at `base` is unknown, and memory after it may not be mapped.
    while !memory.read(base, &mut bytes) {
        let half = bytes.len() / 2;
        bytes.truncate(half);
        if half < 4096 {
            return None;
        }
    }
    let mut found =
        bytes.windows(START + (layout.collecting + 1) * 8).step_by(8).enumerate().filter_map(|(index, bytes)| {
            let address = base + index * 8 + START;
            let early = early(bytes, address as u64, layout)?;
            Some(State { collecting: address + layout.collecting * 8, early })
        });
    found.next().filter(|_| found.next().is_none())
}

/// By how many bytes the generations begin early, if `bytes`, read [`START`] bytes before `address`, are the
/// collector's state, whose other fields are laid out as if the generations began at `address`.
fn early(bytes: &[u8], address: u64, layout: &StateLayout) -> Option<usize> {
    let word = |offset: isize| {
        let word = bytes.get(START.checked_add_signed(offset)?..)?.first_chunk()?;
        Some(u64::from_le_bytes(*word))
    };
    let at = |words: usize| words as isize * 8;
    // An empty list links to its head. Objects, the other neighbors, are aligned to 8 bytes or more.
    let is_link = |offset: isize, head: isize| {
        word(offset).is_some_and(|word| {
            word != 0 && (word.is_multiple_of(8) || word == address.wrapping_add_signed(head as i64))
        })
    };
    let is_count = |offset: isize| word(offset).is_some_and(|word| (word as u32) < 1 << 31 && (word >> 32) < 1 << 31);
    let is_generation = |head: isize| is_link(head, head) && is_link(head + 8, head) && is_count(head + 16);
    if word(at(layout.collecting))? as u32 > 1 {
        return None;
    }
    EARLY.into_iter().find(|early| {
        layout.pointer.is_none_or(|index| word(at(index)) == Some(address - *early as u64))
            && layout.heads(*early).into_iter().all(is_generation)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that begins at a multiple of 8.
    struct Memory(Vec<u64>);

    impl Memory {
        fn base(&self) -> usize {
            self.0.as_ptr().addr()
        }

        /// Writes 8 bytes at any offset, and returns what was there.
        fn replace(&mut self, offset: usize, value: u64) -> u64 {
            // SAFETY: the vector has these bytes (the tests stay inside it).
            let word = unsafe { self.0.as_mut_ptr().byte_add(offset) };
            assert!(offset + 8 <= self.0.len() * 8);
            // SAFETY: checked above.
            unsafe {
                let before = word.read_unaligned();
                word.write_unaligned(value);
                before
            }
        }

        /// A collector's state as CPython initializes it: empty generations that link to themselves.
        fn with_state(before: usize, early: usize, layout: &StateLayout) -> Memory {
            let mut memory = Memory(vec![0; SEARCHED_WORDS]);
            memory.add_state(before, early, layout);
            memory
        }

        fn add_state(&mut self, before: usize, early: usize, layout: &StateLayout) {
            let base = self.base() as u64;
            for offset in layout.heads(early) {
                let offset = (before * 8).checked_add_signed(offset).unwrap();
                self.replace(offset, base + offset as u64);
                self.replace(offset + 8, base + offset as u64);
                self.replace(offset + 16, 10 << 32 | 700);
            }
            if let Some(index) = layout.pointer {
                self.replace((before + index) * 8, base + (before * 8 - early) as u64);
            }
            self.replace((before + layout.collecting) * 8, 1);
        }
    }

    #[test]
    fn only_the_collector_state_is_found() {
        let reader = CheckedMemory::open().unwrap();
        for early in EARLY {
            let mut memory = Memory::with_state(100, early, &V3_8);
            let base = memory.base();
            let collecting = V3_8.collecting * 8;
            let expected = Some(State { collecting: base + 800 + collecting, early });
            assert_eq!(search(&reader, base, &V3_8), expected);
            let (pointer, permanent) = (72, V3_8.permanent * 8);
            let wrong = [
                (collecting, 2),
                (pointer, base as u64),
                (8 - early, 0),
                (32 - early, 3),
                (40 - early, 1 << 31),
                (permanent, 0),
            ];
            for (offset, value) in wrong {
                let before = memory.replace(800 + offset, value);
                assert_eq!(search(&reader, base, &V3_8), None, "byte {offset}, {early} bytes early");
                memory.replace(800 + offset, before);
            }
            assert_eq!(search(&reader, base, &V3_8), expected);
            memory.add_state(400, early, &V3_8);
            assert_eq!(search(&reader, base, &V3_8), None, "two of them");
        }
        assert_eq!(search(&reader, 8, &V3_8), None, "unmapped memory");
    }

    #[test]
    fn generations_around_the_published_word_are_verified() {
        let reader = CheckedMemory::open().unwrap();
        for (layout, early) in [V3_13, V3_14, V3_15].into_iter().flat_map(|layout| EARLY.map(|early| (layout, early))) {
            let mut memory = Memory::with_state(10, early, &layout);
            let collecting = memory.base() + (10 + layout.collecting) * 8;
            assert_eq!(verified(&reader, collecting, &layout), Some(State { collecting, early }));
            assert_eq!(verified(&reader, collecting + 8, &layout), None);
            let [.., permanent] = layout.heads(early);
            memory.replace(80_usize.strict_add_signed(permanent), 1);
            assert_eq!(verified(&reader, collecting, &layout), None);
        }
        assert_eq!(StateLayout::of(16), None);
        assert_eq!(StateLayout::of(12), Some(V3_8));
    }

    /// CPython 3.13.5 of Debian 13: generations at byte 20 of the state, `generation0` at 96, `permanent_generation` at
    /// 104, `collecting` at 200.
    #[test]
    fn generations_of_debian_13_begin_four_bytes_early() {
        let heads = V3_13.heads(4).map(|offset| 24 + offset);
        assert_eq!(heads, [20, 44, 68, 104]);
        assert_eq!((24 + V3_13.pointer.unwrap() * 8, 24 + V3_13.collecting * 8), (96, 200));
    }
}
