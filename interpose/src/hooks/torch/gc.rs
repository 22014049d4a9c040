//! Whether CPython's cyclic garbage collector is at work on this thread: what it frees had waited for it, in a reference cycle.
//!
//! The interpreter says so in a word, `collecting` of `struct _gc_runtime_state` (Include/internal/pycore_gc.h; pycore_pymem.h before
//! 3.9), which is read in place at each free. Where the structure lies differs by release, so it is searched for, once: no other has
//! three generations of which the first is pointed to by the word behind the third. What lies between that and `collecting` is the same
//! from 3.8 to 3.13. From 3.13 on the place is published too (`_Py_DebugOffsets`), and must be the same; 3.14, whose generations are others,
//! has that alone. A word that is neither 0 nor 1 is none of ours.
//!
//! The collector runs with the GIL, so it is this thread's where this thread has the GIL.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use memtrace_trace::definition::Verdict;
use memtrace_trace::event::Flags;

use crate::guard::Guard;
use crate::real;
use crate::stack::CheckedMemory;

/// The address of `collecting`, [`UNKNOWN`] or [`REFUSED`].
static PLACE: AtomicUsize = AtomicUsize::new(UNKNOWN);
const UNKNOWN: usize = 0;
const REFUSED: usize = 1;
/// `PyThreadState *_PyThreadState_UncheckedGet(void)`: whose turn it is, null where this thread must not run Python; and
/// `PyThreadState *PyGILState_GetThisThreadState(void)`: this thread's.
static CURRENT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static THIS: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

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
    if collecting != 0 && is_here() { Flags::IN_GC } else { Flags::default() }
}

#[cold]
fn is_here() -> bool {
    let ask = |function: &AtomicPtr<c_void>| {
        // SAFETY: null, or a function of this type in every CPython, which reads a word of the thread's or of the interpreter's.
        let function = unsafe {
            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn() -> *mut c_void>>(
                function.load(Ordering::Relaxed),
            )
        };
        // SAFETY: as above.
        function.map_or(std::ptr::null_mut(), |function| unsafe { function() })
    };
    let current = ask(&CURRENT);
    !current.is_null() && std::ptr::eq(current, ask(&THIS))
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
    }
}

fn locate(minor: u32, symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<usize, &'static str> {
    let either = |a, b| Some(symbol(a)).filter(|f| !f.is_null()).unwrap_or_else(|| symbol(b));
    let current = either(c"_PyThreadState_UncheckedGet", c"PyThreadState_GetUnchecked");
    let this = symbol(c"PyGILState_GetThisThreadState");
    let main = symbol(c"PyInterpreterState_Main");
    let runtime = symbol(c"_PyRuntime").expose_provenance();
    if current.is_null() || this.is_null() || main.is_null() || runtime == 0 {
        return Err("the interpreter lacks a symbol: what the collector frees is not marked");
    }
    CURRENT.store(current, Ordering::Relaxed);
    THIS.store(this, Ordering::Relaxed);
    // SAFETY: `PyInterpreterState *PyInterpreterState_Main(void)`, which reads a word of `_PyRuntime`.
    let main = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *mut c_void>(main)() };
    let memory = CheckedMemory::open().map_err(|_| "memory cannot be read: what the collector frees is not marked")?;
    let owner = if minor < 9 { runtime } else { main.expose_provenance() };
    let published =
        (minor >= 13).then(|| published(&memory, runtime, minor).map(|offset| main.expose_provenance() + offset));
    let searched = (minor <= 13).then(|| search(&memory, owner));
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
