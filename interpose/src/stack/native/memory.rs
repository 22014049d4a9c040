//! Reading the calling thread's stack without ever faulting, whatever unwinding information says.
//!
//! Between the stack pointer and the end of the thread's own stack everything is mapped: those words are loaded. All others
//! (an alternate signal stack, a coroutine's, or nonsense) are read through the kernel, which answers where a load would
//! be a fault: slow, but right.

use std::cell::Cell;
use std::ptr::with_exposed_provenance;

use super::super::python::CheckedMemory;

/// The longest stack that is believed. Where its size has no limit (`ulimit -s unlimited`) the C library says that the main thread's
/// reaches down to the next mapping, which may be terabytes: the heap grows into that, and a coroutine's stack may be there.
const LONGEST: usize = 1 << 30;

/// How many words one question to the kernel fetches.
const WINDOW: usize = 64;

/// The stack of the calling thread, as of now.
pub(super) struct StackMemory {
    /// The stack pointer, when it lies in the thread's own stack; else equal to `end`.
    start: usize,
    end: usize,
    /// The way to the rest, opened when first needed.
    rest: Option<Rest>,
}

struct Rest {
    memory: Option<CheckedMemory>,
    words: [u64; WINDOW],
    at: usize,
    used: bool,
}

thread_local! {
    /// The lowest and the highest address of the thread's stack; (0, 0): not asked yet.
    static STACK: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// What it takes to understand unwinding information, in bytes of stack.
const NEEDED: usize = 16 << 10;

/// Whether the calling thread has as much of its stack left as it takes to understand unwinding information: who has recursed down to
/// the last page shall not fall off because of us. (On a stack that is not its own nobody knows.)
pub(super) fn has_room() -> bool {
    let mark = 0_u8;
    let here = (&raw const mark).addr();
    let (low, end) = known_stack();
    !(low..end).contains(&here) || here - low >= NEEDED
}

/// The calling thread's own stack.
#[inline]
fn known_stack() -> (usize, usize) {
    STACK.with(|stack| match stack.get() {
        (0, 0) => ask(stack),
        known => known,
    })
}

impl StackMemory {
    /// The calling thread's stack, of which nothing below `sp` will be loaded.
    #[inline]
    pub(super) fn from(sp: usize) -> StackMemory {
        let (low, end) = known_stack();
        if (low..end).contains(&sp) {
            // SAFETY: what lies between the stack pointer and the end of the thread's stack is mapped while it runs.
            unsafe { StackMemory::of(sp, end) }
        } else {
            // SAFETY: nothing at all.
            unsafe { StackMemory::of(0, 0) }
        }
    }

    /// # Safety
    /// All of `start..end` is readable as long as the result is used.
    #[inline]
    pub(super) unsafe fn of(start: usize, end: usize) -> StackMemory {
        StackMemory { start, end, rest: None }
    }

    /// Where the thread's own stack ends, 0 when the thread is not on it: tells stacks apart.
    #[inline]
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Whether a word at this address can simply be loaded.
    #[inline]
    pub(super) fn is_own(&self, address: usize) -> bool {
        address >= self.start && address < self.end.saturating_sub(size_of::<usize>() - 1)
    }

    /// The word at `address`; `None` when it cannot be read.
    #[inline]
    pub(super) fn read(&mut self, address: usize) -> Option<usize> {
        if self.is_own(address) {
            // SAFETY: inside `start..end`, as `of` was promised.
            return Some(unsafe { with_exposed_provenance::<usize>(address).read_unaligned() });
        }
        self.read_elsewhere(address)
    }

    #[cold]
    fn read_elsewhere(&mut self, address: usize) -> Option<usize> {
        let rest = self.rest.get_or_insert_with(|| Rest {
            memory: CheckedMemory::open().ok(),
            words: [0; WINDOW],
            at: 0,
            used: false,
        });
        let memory = rest.memory.as_ref()?;
        if !address.is_multiple_of(8) {
            return None;
        }
        if !(rest.used && (rest.at..rest.at + WINDOW * 8).contains(&address)) {
            // A window that does not cross a page's border is readable as a whole or not at all.
            let at = address & !(WINDOW * 8 - 1);
            let mut bytes = [0; WINDOW * 8];
            if !memory.read(at, &mut bytes) {
                return None;
            }
            for (word, bytes) in rest.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            (rest.at, rest.used) = (at, true);
        }
        rest.words.get((address - rest.at) / 8).map(|word| *word as usize)
    }
}

/// Asks the C library once a thread. (For the main thread it reads /proc/self/maps; what it may still grow is included.)
#[cold]
fn ask(stack: &Cell<(usize, usize)>) -> (usize, usize) {
    let mut found = (usize::MAX, usize::MAX);
    // SAFETY: plain data for the call to fill.
    let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
    // SAFETY: the calling thread's own handle; the attributes are destroyed below.
    if unsafe { libc::pthread_getattr_np(libc::pthread_self(), &mut attributes) } == 0 {
        let (mut address, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: attributes that were just filled.
        unsafe {
            if libc::pthread_attr_getstack(&attributes, &mut address, &mut size) == 0 {
                let end = address.expose_provenance().saturating_add(size);
                found = (address.expose_provenance().max(end.saturating_sub(LONGEST)), end);
            }
            libc::pthread_attr_destroy(&mut attributes);
        }
    }
    stack.set(found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_own_stack_is_found_and_nothing_faults() {
        let check = || {
            let words = [11_usize, 22];
            let here = (&raw const words).expose_provenance();
            let mut memory = StackMemory::from(here);
            assert!(memory.is_own(here) && memory.is_own(here + 8) && !memory.is_own(here - 8));
            assert_eq!(memory.read(here + 8), Some(22));
            // Up to its last word, and not one further by a load.
            assert!(memory.read(memory.end() - 8).is_some() && !memory.is_own(memory.end() - 7));
            for nowhere in [0, 8, 4096, usize::MAX - 6, usize::MAX & !7, 1 << 47] {
                assert_eq!(memory.read(nowhere), None, "{nowhere:#x}");
            }
            let elsewhere = Box::new([33_u64, 44]);
            assert_eq!(memory.read((&raw const elsewhere[1]).expose_provenance()), Some(44));
        };
        check();
        std::thread::Builder::new().stack_size(64 << 10).spawn(check).unwrap().join().unwrap();
    }
}
