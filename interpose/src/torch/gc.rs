//! Determines whether CPython's cyclic garbage collector is running on this thread. Memory that it frees was part of a
//! reference cycle.
//!
//! The interpreter keeps this in one word: `collecting` of `struct _gc_runtime_state` (Include/internal/pycore_gc.h;
//! pycore_pymem.h before 3.9; pycore_interp_structs.h from 3.14 on). Each free reads it in place. Up to 3.13 the
//! structure is searched for once. Its signature is unique: three generations, followed by a word that points to the
//! first of them. From 3.13 on, `_Py_DebugOffsets` publishes the address, and in 3.13 both results must agree. The
//! generations at that address are verified in each version, and a word that is neither 0 nor 1 is rejected.
//!
//! The interpreter does not store which thread collects, and PyTorch releases the GIL while it frees a tensor. The
//! collecting thread is the first one that runs Python and frees while `collecting` is set. Others run only after it
//! has released the GIL. The interpreter counts collections, which distinguishes them.

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

/// Where fields of the collector's state are, in words from the first of three generations.
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

    /// The first words of the three generations and of the permanent one.
    const fn heads(&self) -> [usize; 4] {
        [0, GENERATION, 2 * GENERATION, self.permanent]
    }
}

/// Where [`Counts::Pointed`] counts; 0 for [`Counts::Inline`].
static COUNTER_ADDRESS: AtomicUsize = AtomicUsize::new(0);

#[cold]
fn report_collector(guard: &mut Guard) {
    observer::collector_frees(&mut |topic, status, text| guard.notice(topic, status, text));
}

/// [`Flags::IN_GC`] if the collector is running on this thread, otherwise no flag.
#[inline(always)]
pub(super) fn flag(guard: &mut Guard) -> Flags {
    let address = COLLECTING_ADDRESS.load(Ordering::Relaxed);
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
    let address = COLLECTING_ADDRESS.load(Ordering::Relaxed);
    let (_, minor) = guard.process().python()?.version();
    let layout = StateLayout::of(minor)?;
    let first = address.checked_sub(layout.collecting * 8).filter(|_| address > UNAVAILABLE)?;
    Some(layout.heads().map(|words| first + words * 8))
}

/// Assigns the current collection to this thread, whichever thread frees first.
pub(crate) fn claim() {
    let address = COLLECTING_ADDRESS.load(Ordering::Relaxed);
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
        is_verified(&memory, main.expose_provenance() + offset, &layout)
    });
    let searched = layout.pointer.map(|_| search(&memory, owner, &layout));
    let address = match (published, searched) {
        (Some(Some(address)), None) | (None, Some(Some(address))) => address,
        (Some(Some(address)), Some(Some(same))) if address == same => address,
        _ => return Err(unknown),
    };
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

/// The address of `collecting`, if the collector's state is around it.
fn is_verified(memory: &CheckedMemory, collecting: usize, layout: &StateLayout) -> Option<usize> {
    let first = collecting.checked_sub(layout.collecting * 8)?;
    let mut bytes = vec![0; (layout.collecting + 1) * 8];
    let is_read = memory.read(first, &mut bytes);
    (is_read && is_state(&words_of(&bytes), first as u64, layout)).then_some(collecting)
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// The address of `collecting` in the memory at `base`. `None` unless exactly one collector's state is found.
fn search(memory: &CheckedMemory, base: usize, layout: &StateLayout) -> Option<usize> {
    let mut bytes = vec![0; SEARCHED_WORDS * 8];
    // The size of the structure at `base` is unknown, and memory after it may not be mapped.
    while !memory.read(base, &mut bytes) {
        let half = bytes.len() / 2;
        bytes.truncate(half);
        if half < 4096 {
            return None;
        }
    }
    let words = words_of(&bytes);
    let mut found = words.windows(layout.collecting + 1).enumerate().filter_map(|(index, words)| {
        let address = base + index * 8;
        is_state(words, address as u64, layout).then_some(address + layout.collecting * 8)
    });
    found.next().filter(|_| found.next().is_none())
}

/// Whether `words`, read at `address`, are the collector's state, beginning at its generations.
fn is_state(words: &[u64], address: u64, layout: &StateLayout) -> bool {
    let is_pointer = |index: usize| words.get(index).is_some_and(|word| *word != 0 && word.is_multiple_of(8));
    let is_head = |index: usize| is_pointer(index) && is_pointer(index + 1);
    let is_count =
        |index: usize| words.get(index).is_some_and(|word| (*word as u32) < 1 << 31 && (*word >> 32) < 1 << 31);
    layout.pointer.is_none_or(|index| words.get(index) == Some(&address))
        && layout.heads().into_iter().all(|index| is_head(index) && is_count(index + 2))
        && words.get(layout.collecting).is_some_and(|word| *word as u32 <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A collector's state as CPython initializes it: empty generations that link to themselves.
    fn state(base: u64, before: usize, layout: &StateLayout) -> Vec<u64> {
        let mut words = vec![7; before + layout.collecting + 20];
        let at = |index: usize| base + (before + index) as u64 * 8;
        for index in layout.heads() {
            words[before + index] = at(index);
            words[before + index + 1] = at(index);
            words[before + index + 2] = 10 << 32 | 700;
        }
        if let Some(index) = layout.pointer {
            words[before + index] = at(0);
        }
        words[before + layout.collecting] = 1;
        words
    }

    #[test]
    fn only_the_collector_state_is_found() {
        let memory = CheckedMemory::open().unwrap();
        let mut words = vec![0; SEARCHED_WORDS];
        let base = words.as_ptr().addr();
        let collecting = V3_8.collecting;
        let words_of_state = state(base as u64, 100, &V3_8);
        words[..words_of_state.len()].copy_from_slice(&words_of_state);
        assert_eq!(search(&memory, base, &V3_8), Some(base + (100 + collecting) * 8));
        let (pointer, permanent) = (9, V3_8.permanent);
        for (index, value) in [(collecting, 2), (pointer, base as u64), (1, 0), (4, 3), (5, 1 << 31), (permanent, 0)] {
            let before = std::mem::replace(&mut words[100 + index], value);
            assert_eq!(search(&memory, base, &V3_8), None, "word {index}");
            words[100 + index] = before;
        }
        assert!(search(&memory, base, &V3_8).is_some());
        let twice = state(base as u64, 400, &V3_8);
        words[200..twice.len()].copy_from_slice(&twice[200..]);
        assert_eq!(search(&memory, base, &V3_8), None, "two of them");
        assert_eq!(search(&memory, 8, &V3_8), None, "unmapped memory");
    }

    #[test]
    fn generations_around_the_published_word_are_verified() {
        let memory = CheckedMemory::open().unwrap();
        for layout in [V3_14, V3_15] {
            let mut words = vec![0; 64];
            let base = words.as_ptr().addr();
            let of_state = state(base as u64, 10, &layout);
            words[..of_state.len()].copy_from_slice(&of_state);
            let collecting = base + (10 + layout.collecting) * 8;
            assert_eq!(is_verified(&memory, collecting, &layout), Some(collecting));
            assert_eq!(is_verified(&memory, collecting + 8, &layout), None);
            words[10 + layout.permanent] = 1;
            assert_eq!(is_verified(&memory, collecting, &layout), None);
        }
        assert_eq!(StateLayout::of(16), None);
        assert_eq!(StateLayout::of(12), Some(V3_8));
    }
}
