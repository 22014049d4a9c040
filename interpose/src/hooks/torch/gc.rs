//! Whether CPython's cyclic garbage collector is at work on this thread: what it frees had waited for it, in a reference cycle.
//!
//! The interpreter says so in a word, `collecting` of `struct _gc_runtime_state` (Include/internal/pycore_gc.h; pycore_pymem.h before
//! 3.9), which is read in place at each free. Where the structure lies differs by release, so it is searched for, once: no other has
//! three generations of which the first is pointed to by the word behind the third. What lies between that and `collecting` is the same
//! from 3.8 to 3.13. From 3.13 on the place is published too (`_Py_DebugOffsets`), and must be the same; 3.14, whose generations are others,
//! has that alone. A word that is neither 0 nor 1 is none of ours.
//!
//! Which thread it is at work on, nothing says: PyTorch lets go of the GIL while a tensor is freed. It is the one that frees first while it is
//! at work, among those that run Python; others come to run only after that one has let go. Collections are told apart by how many there
//! were, which the interpreter counts.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memtrace_trace::definition::Verdict;
use memtrace_trace::event::Flags;

use crate::cycles::Cycles;
use crate::guard::Guard;
use crate::real;
use crate::stack::CheckedMemory;
use crate::thread::Thread;

/// The address of `collecting`, [`UNKNOWN`] or [`REFUSED`].
static PLACE: AtomicUsize = AtomicUsize::new(UNKNOWN);
const UNKNOWN: usize = 0;
const REFUSED: usize = 1;
/// `PyThreadState *PyGILState_GetThisThreadState(void)`: null on a thread that runs no Python.
static THIS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The thread of the present collection (where its storage is, 48 bits) and the collection's number (above).
static OWNER: AtomicU64 = AtomicU64::new(0);
const THREAD_BITS: u32 = 48;

/// The last release (3.x) whose generations are three.
const SAME_UNTIL: u32 = 13;
/// How much is searched, in words.
const SEARCHED: usize = 8192;
/// The words of a generation: next, previous, threshold and count.
const GENERATION: usize = 3;
/// Words from the first generation on: where the pointer to it is, the permanent generation, and `collecting`, which follows three
/// generations' statistics of three words.
const POINTER: usize = 3 * GENERATION;
const PERMANENT: usize = POINTER + 1;
const COLLECTING: usize = PERMANENT + GENERATION + 9;

/// The flag, if it is so.
#[inline(always)]
pub(super) fn flag(guard: &mut Guard) -> Flags {
    let place = PLACE.load(Ordering::Relaxed);
    if place <= REFUSED {
        if place == UNKNOWN {
            find(guard);
        }
        return Flags::default();
    }
    // SAFETY: a word of the interpreter's state, which is never unmapped; read as another thread may write it.
    let collecting =
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(place)) }.load(Ordering::Relaxed);
    if collecting != 0 && is_here(place) {
        Cycles::ask(guard);
        Flags::IN_GC
    } else {
        Flags::default()
    }
}

/// Where the heads of the collector's lists of objects are: three generations and the permanent one. `None` where its state was not found,
/// and from 3.14 on, whose generations are others.
pub(crate) fn lists(guard: &mut Guard) -> Option<[usize; 4]> {
    flag(guard);
    let place = PLACE.load(Ordering::Relaxed);
    let (_, minor) = guard.process().python()?.version();
    let first = place.checked_sub(COLLECTING * 8).filter(|_| place > REFUSED && minor <= SAME_UNTIL)?;
    Some([0, GENERATION, 2 * GENERATION, PERMANENT].map(|words| first + words * 8))
}

/// The collection that is under way is this thread's, whoever frees first.
pub(crate) fn claim() {
    let place = PLACE.load(Ordering::Relaxed);
    if place > REFUSED {
        is_here(place);
    }
}

#[cold]
fn is_here(place: usize) -> bool {
    // SAFETY: null, or a function of this type in every CPython, which reads a word of the thread's.
    let this = unsafe {
        std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *mut c_void>>(THIS.load(Ordering::Relaxed))
    };
    // SAFETY: as above.
    if this.is_none_or(|this| unsafe { this() }.is_null()) {
        return false;
    }
    let count = |words: usize| {
        // SAFETY: words of the same structure, before `collecting`: each generation's number of collections.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(place - words * 8)) }.load(Ordering::Relaxed)
    };
    let collections = count(9).wrapping_add(count(6)).wrapping_add(count(3));
    let here = std::ptr::from_ref(Thread::here()).addr() as u64 & ((1 << THREAD_BITS) - 1);
    let claim = collections << THREAD_BITS | here;
    let known = OWNER.load(Ordering::Relaxed);
    // The same collection is some thread's already, or becomes this one's.
    let settled = known != 0 && known >> THREAD_BITS == claim >> THREAD_BITS;
    let owner = if settled {
        known
    } else {
        OWNER.compare_exchange(known, claim, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|other| other, |_| claim)
    };
    owner == claim
}

/// Looks for the word once the interpreter is known, and says what came of it.
#[cold]
fn find(guard: &mut Guard) {
    let Some(python) = guard.process().python().filter(|python| python.verified() == Ok(true)) else { return };
    let (_, minor) = python.version();
    let place = locate(minor, &|name| real::lookup(libc::RTLD_DEFAULT, name));
    let (verdict, text) = match place {
        Ok(_) => (Verdict::Works, "the collector's state verified: what it frees is marked"),
        Err(why) => (Verdict::Off, why),
    };
    if PLACE.compare_exchange(UNKNOWN, place.unwrap_or(REFUSED), Ordering::Release, Ordering::Relaxed).is_ok() {
        guard.notice("python.gc", verdict, text);
        Cycles::ask(guard);
    }
}

fn locate(minor: u32, symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<usize, &'static str> {
    let this = symbol(c"PyGILState_GetThisThreadState");
    let main = symbol(c"PyInterpreterState_Main");
    let runtime = symbol(c"_PyRuntime").expose_provenance();
    if this.is_null() || main.is_null() || runtime == 0 {
        return Err("the interpreter lacks a symbol: what the collector frees is not marked");
    }
    THIS.store(this, Ordering::Relaxed);
    // SAFETY: `PyInterpreterState *PyInterpreterState_Main(void)`, which reads a word of `_PyRuntime`.
    let main = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(main)() };
    let memory = CheckedMemory::open().map_err(|_| "memory cannot be read: what the collector frees is not marked")?;
    let owner = if minor < 9 { runtime } else { main.expose_provenance() };
    let published =
        (minor >= 13).then(|| published(&memory, runtime, minor).map(|offset| main.expose_provenance() + offset));
    let searched = (minor <= SAME_UNTIL).then(|| search(&memory, owner));
    let unknown = "the collector's state was not found where it should be: what the collector frees is not marked";
    let place = match (published, searched) {
        (Some(Some(place)), None) | (None, Some(Some(place))) => place,
        (Some(Some(place)), Some(Some(same))) if place == same => place,
        _ => return Err(unknown),
    };
    let mut value = [0; 4];
    let sane = memory.read(place, &mut value) && u32::from_le_bytes(value) <= 1;
    if sane { Ok(place) } else { Err(unknown) }
}

/// Where `_Py_DebugOffsets` says that `collecting` is, from the start of the interpreter's state.
fn published(memory: &CheckedMemory, runtime: usize, minor: u32) -> Option<usize> {
    /// The words that hold the offset of the collector's state in the interpreter's, and of `collecting` in that.
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

/// The address of `collecting` in what begins at `base`, where there is exactly one collector's state.
fn search(memory: &CheckedMemory, base: usize) -> Option<usize> {
    let mut bytes = vec![0; SEARCHED * 8];
    // How far the state goes is not known: what lies behind it may not be there.
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

/// Whether the words at `address` are the collector's state from its generations on.
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

    /// A state as CPython makes it: empty generations, linked to themselves.
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
    fn the_state_is_found_and_nothing_else_is_taken_for_it() {
        let memory = CheckedMemory::open().unwrap();
        let mut words = vec![0; SEARCHED];
        let base = words.as_ptr().addr();
        let made = state(base as u64, 100);
        words[..made.len()].copy_from_slice(&made);
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
        assert_eq!(search(&memory, 8), None, "nothing is there");
    }
}
