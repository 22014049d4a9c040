//! Determines whether CPython's cyclic garbage collector is running on this thread. Memory that it frees was part of a
//! reference cycle.
//!
//! The interpreter keeps this in one word: `collecting` of `struct _gc_runtime_state` (Include/internal/pycore_gc.h;
//! pycore_pymem.h before 3.9). Each free reads it in place. The structure's address differs by release, so it is
//! searched for once. Its signature is unique: three generations, followed by a word that points to the first of them.
//! The fields between that word and `collecting` are the same from 3.8 to 3.13.
//!
//! From 3.13 on, `_Py_DebugOffsets` publishes the address, and both results must agree. CPython 3.14 has other
//! generations, so there only the published address is used. A word that is neither 0 nor 1 is rejected.
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

/// The minor version of the last CPython 3 release with three generations.
const LAST_WITH_THREE_GENERATIONS: u32 = 13;
/// How many 8-byte words are searched.
const SEARCHED_WORDS: usize = 8192;
/// Words of a generation: next, previous, and one that holds threshold and count.
const GENERATION: usize = 3;
/// Offsets in words from the first generation: the pointer to that generation, the permanent generation, and
/// `collecting`. Between the last two are the statistics of three generations, three words each.
const POINTER: usize = 3 * GENERATION;
const PERMANENT: usize = POINTER + 1;
const COLLECTING: usize = PERMANENT + GENERATION + 9;

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
/// `None` if the collector's state was not found, and from CPython 3.14 on, which has other generations.
pub(crate) fn list_heads(guard: &mut Guard) -> Option<[usize; 4]> {
    flag(guard);
    let address = COLLECTING_ADDRESS.load(Ordering::Relaxed);
    let (_, minor) = guard.process().python()?.version();
    let first = address
        .checked_sub(COLLECTING * 8)
        .filter(|_| address > UNAVAILABLE && minor <= LAST_WITH_THREE_GENERATIONS)?;
    Some([0, GENERATION, 2 * GENERATION, PERMANENT].map(|words| first + words * 8))
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
    let count = |words: usize| {
        // SAFETY: these words precede `collecting` in the same verified structure. Each is a generation's number of
        // collections.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address - words * 8)) }
            .load(Ordering::Relaxed)
    };
    let collections = count(9).wrapping_add(count(6)).wrapping_add(count(3));
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
    let address = locate(minor, &original::global_address);
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
    let published =
        (minor >= 13).then(|| published(&memory, runtime, minor).map(|offset| main.expose_provenance() + offset));
    let searched = (minor <= LAST_WITH_THREE_GENERATIONS).then(|| search(&memory, owner));
    let unknown = "the garbage collector's state was not found: blocks that it frees are not marked";
    let address = match (published, searched) {
        (Some(Some(address)), None) | (None, Some(Some(address))) => address,
        (Some(Some(address)), Some(Some(same))) if address == same => address,
        _ => return Err(unknown),
    };
    let mut value = [0; 4];
    let is_plausible = memory.read(address, &mut value) && u32::from_le_bytes(value) <= 1;
    if is_plausible { Ok(address) } else { Err(unknown) }
}

/// The offset of `collecting` in the interpreter's state, in bytes, as `_Py_DebugOffsets` publishes it.
fn published(memory: &CheckedMemory, runtime: usize, minor: u32) -> Option<usize> {
    /// For each minor version, two indices of words in `_Py_DebugOffsets`. The first word is the offset of the
    /// collector's state in the interpreter's state. The second is the offset of `collecting` in the collector's state.
    const SLOTS: [(u32, usize, usize); 2] = [(13, 10, 72), (14, 11, 82)];
    const FARTHEST: usize = 1 << 20;
    let (_, state, collecting) = SLOTS.into_iter().find(|(of, ..)| *of == minor)?;
    let word = |index: usize| memory.size(runtime, index * 8);
    if word(0)? as u64 != u64::from_le_bytes(*b"xdebugpy") || word(1)? >> 16 != 0x300 | minor as usize {
        return None;
    }
    let (state, collecting) = (word(state)?, word(collecting)?);
    (state < FARTHEST && collecting < FARTHEST).then_some(state + collecting)
}

/// The address of `collecting` in the memory at `base`. `None` unless exactly one collector's state is found.
fn search(memory: &CheckedMemory, base: usize) -> Option<usize> {
    let mut bytes = vec![0; SEARCHED_WORDS * 8];
    // The size of the structure at `base` is unknown, and memory after it may not be mapped.
    while !memory.read(base, &mut bytes) {
        let half = bytes.len() / 2;
        bytes.truncate(half);
        if half < 4096 {
            return None;
        }
    }
    let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let mut found = words.windows(COLLECTING + 1).enumerate().filter_map(|(index, words)| {
        let address = base + index * 8;
        is_state(words, address as u64).then_some(address + COLLECTING * 8)
    });
    found.next().filter(|_| found.next().is_none())
}

/// Whether `words`, read at `address`, are the collector's state, beginning at its generations.
fn is_state(words: &[u64], address: u64) -> bool {
    let is_pointer = |index: usize| words.get(index).is_some_and(|word| *word != 0 && word.is_multiple_of(8));
    let is_head = |index: usize| is_pointer(index) && is_pointer(index + 1);
    let is_count =
        |index: usize| words.get(index).is_some_and(|word| (*word as u32) < 1 << 31 && (*word >> 32) < 1 << 31);
    words.get(POINTER) == Some(&address)
        && [0, GENERATION, 2 * GENERATION, PERMANENT].into_iter().all(|index| is_head(index) && is_count(index + 2))
        && words.get(COLLECTING).is_some_and(|word| *word as u32 <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A collector's state as CPython initializes it: empty generations that link to themselves.
    fn state(base: u64, before: usize) -> Vec<u64> {
        let mut words = vec![7; before + COLLECTING + 20];
        let at = |index: usize| base + (before + index) as u64 * 8;
        for index in [0, 3, 6, PERMANENT] {
            words[before + index] = at(index);
            words[before + index + 1] = at(index);
            words[before + index + 2] = 10 << 32 | 700;
        }
        words[before + POINTER] = at(0);
        words[before + COLLECTING] = 1;
        words
    }

    #[test]
    fn only_the_collector_state_is_found() {
        let memory = CheckedMemory::open().unwrap();
        let mut words = vec![0; SEARCHED_WORDS];
        let base = words.as_ptr().addr();
        let words_of_state = state(base as u64, 100);
        words[..words_of_state.len()].copy_from_slice(&words_of_state);
        assert_eq!(search(&memory, base), Some(base + (100 + COLLECTING) * 8));
        for (index, value) in [(COLLECTING, 2), (POINTER, base as u64), (1, 0), (4, 3), (5, 1 << 31), (PERMANENT, 0)] {
            let before = std::mem::replace(&mut words[100 + index], value);
            assert_eq!(search(&memory, base), None, "word {index}");
            words[100 + index] = before;
        }
        assert!(search(&memory, base).is_some());
        let twice = state(base as u64, 400);
        words[200..twice.len()].copy_from_slice(&twice[200..]);
        assert_eq!(search(&memory, base), None, "two of them");
        assert_eq!(search(&memory, 8), None, "unmapped memory");
    }
}
