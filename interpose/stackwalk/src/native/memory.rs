//! Reads the calling thread's stack without ever faulting, regardless of the unwinding information.
//!
//! All memory between the stack pointer and the end of the thread's own stack is mapped, so those words are loaded. All
//! others are read through the kernel, which returns an error where a load would fault. That is slow but safe. They
//! belong to an alternate signal stack, to a coroutine's stack, or to a wrong address.

use std::cell::Cell;
use std::ptr::with_exposed_provenance;

use super::super::python::memory::CheckedMemory;

/// The largest plausible stack size in bytes. Without a limit (`ulimit -s unlimited`), the C library reports that the
/// main thread's stack extends down to the next mapping. That may be terabytes, into which the heap grows, and a
/// coroutine's stack may be there.
const MAX_STACK_BYTES: usize = 1 << 30;

/// How many words one read through the kernel fetches.
const WINDOW_WORDS: usize = 64;

/// The stack of the calling thread at this moment.
pub(super) struct StackMemory {
    /// The stack pointer if it is in the thread's own stack, otherwise equal to `end`.
    start: usize,
    end: usize,
    /// Reads all other memory. Opened on first use.
    kernel_reads: Option<KernelReads>,
}

struct KernelReads {
    memory: Option<CheckedMemory>,
    words: [u64; WINDOW_WORDS],
    at: usize,
    is_filled: bool,
}

thread_local! {
    /// The lowest and the highest address of the thread's stack. (0, 0) means that they are unknown yet.
    static STACK_BOUNDS: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// How much stack, in bytes, the parsing of unwinding information needs.
const PARSER_STACK_BYTES: usize = 16 << 10;

/// Whether the calling thread has enough stack left to parse unwinding information. A program that has recursed to its
/// last page must not overflow because of us. On a stack that is not the thread's own, the limit is unknown and the
/// result is `true`.
pub(super) fn has_room() -> bool {
    let mark = 0_u8;
    let here = (&raw const mark).addr();
    let (low, end) = stack_bounds();
    !(low..end).contains(&here) || here - low >= PARSER_STACK_BYTES
}

/// The bounds of the calling thread's own stack.
#[inline]
fn stack_bounds() -> (usize, usize) {
    STACK_BOUNDS.with(|stack| match stack.get() {
        (0, 0) => query_bounds(stack),
        known => known,
    })
}

impl StackMemory {
    /// The calling thread's stack. Nothing below `sp` is loaded.
    #[inline]
    pub(super) fn from(sp: usize) -> StackMemory {
        let (low, end) = stack_bounds();
        if (low..end).contains(&sp) {
            // SAFETY: all memory between the stack pointer and the end of the thread's own stack is mapped while the
            // thread runs.
            unsafe { StackMemory::of(sp, end) }
        } else {
            // SAFETY: the range is empty.
            unsafe { StackMemory::of(0, 0) }
        }
    }

    /// # Safety
    ///
    /// All of `start..end` is readable as long as the result is used.
    #[inline]
    pub(super) unsafe fn of(start: usize, end: usize) -> StackMemory {
        StackMemory { start, end, kernel_reads: None }
    }

    /// The end of the thread's own stack, 0 if the thread is not on it. It distinguishes stacks.
    #[inline]
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Whether a word at this address can be loaded directly.
    #[inline]
    pub(super) fn is_own(&self, address: usize) -> bool {
        address >= self.start && address < self.end.saturating_sub(size_of::<usize>() - 1)
    }

    /// The first `count` words of the thread's own stack, or fewer if it ends before. Empty if the thread is not on it.
    #[inline]
    pub(super) fn own_words(&self, count: usize) -> impl Iterator<Item = usize> + '_ {
        let start = self.start.next_multiple_of(size_of::<usize>());
        let count = count.min(self.end.saturating_sub(start) / size_of::<usize>());
        // SAFETY: the words are inside `start..end`, which the caller of `of` guarantees to be readable.
        (0..count).map(move |index| unsafe { with_exposed_provenance::<usize>(start).add(index).read() })
    }

    /// The word at `address`. `None` if it is not readable.
    #[inline]
    pub(super) fn read(&mut self, address: usize) -> Option<usize> {
        if self.is_own(address) {
            // SAFETY: the word is inside `start..end`, which the caller of `of` guarantees to be readable.
            return Some(unsafe { with_exposed_provenance::<usize>(address).read_unaligned() });
        }
        self.read_through_kernel(address)
    }

    #[cold]
    fn read_through_kernel(&mut self, address: usize) -> Option<usize> {
        let kernel_reads = self.kernel_reads.get_or_insert_with(|| KernelReads {
            memory: CheckedMemory::open().ok(),
            words: [0; WINDOW_WORDS],
            at: 0,
            is_filled: false,
        });
        let memory = kernel_reads.memory.as_ref()?;
        if !address.is_multiple_of(8) {
            return None;
        }
        if !(kernel_reads.is_filled && (kernel_reads.at..kernel_reads.at + WINDOW_WORDS * 8).contains(&address)) {
            // A window that does not cross a page boundary is readable as a whole or not at all.
            let at = address & !(WINDOW_WORDS * 8 - 1);
            let mut bytes = [0; WINDOW_WORDS * 8];
            if !memory.read(at, &mut bytes) {
                return None;
            }
            for (word, bytes) in kernel_reads.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            (kernel_reads.at, kernel_reads.is_filled) = (at, true);
        }
        kernel_reads.words.get((address - kernel_reads.at) / 8).map(|word| *word as usize)
    }
}

/// Asks the C library for the bounds, once a thread. For the main thread it reads /proc/self/maps and includes space
/// for growth.
///
/// The C library takes the thread's own lock, and for the main thread the allocator's. A signal handler that jumped out
/// would leave them locked, so signals wait until the query has ended.
#[cold]
fn query_bounds(stack: &Cell<(usize, usize)>) -> (usize, usize) {
    const UNKNOWN: (usize, usize) = (usize::MAX, usize::MAX);
    // Whatever happens during the query, it is not made again.
    stack.set(UNKNOWN);
    with_signals_blocked(|| {
        let mut found = UNKNOWN;
        // SAFETY: `pthread_attr_t` is plain data, for which zeros are valid.
        let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
        // SAFETY: the handle is the calling thread's own, and the attributes are destroyed below.
        if unsafe { libc::pthread_getattr_np(libc::pthread_self(), &mut attributes) } == 0 {
            let (mut address, mut size) = (std::ptr::null_mut(), 0);
            // SAFETY: the call has just initialized the attributes.
            unsafe {
                if libc::pthread_attr_getstack(&attributes, &mut address, &mut size) == 0 {
                    let end = address.expose_provenance().saturating_add(size);
                    found = (address.expose_provenance().max(end.saturating_sub(MAX_STACK_BYTES)), end);
                }
                libc::pthread_attr_destroy(&mut attributes);
            }
        }
        // Set while signals are blocked: the handler of one that waits may jump.
        stack.set(found);
        found
    })
}

/// Calls `ask` while the calling thread gets no signal but those of its own faults.
fn with_signals_blocked<T>(ask: impl FnOnce() -> T) -> T {
    const OF_FAULTS: [libc::c_int; 6] =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
    // SAFETY: signal sets are plain data, for which zeros are valid.
    let (mut blocked, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: both sets are valid for the calls. Without an error, `before` is what the thread had.
    let is_blocked = unsafe {
        libc::sigfillset(&mut blocked);
        for signal in OF_FAULTS {
            libc::sigdelset(&mut blocked, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut before) == 0
    };
    let result = ask();
    if is_blocked {
        // SAFETY: the set is the one that the call above returned.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_own_stack_is_found_and_no_read_faults() {
        let check = || {
            let words = [11_usize, 22];
            let here = (&raw const words).expose_provenance();
            let mut memory = StackMemory::from(here);
            assert!(memory.is_own(here) && memory.is_own(here + 8) && !memory.is_own(here - 8));
            assert_eq!(memory.read(here + 8), Some(22));
            // The last word of the stack is readable, and no load reaches beyond it.
            assert!(memory.read(memory.end() - 8).is_some() && !memory.is_own(memory.end() - 7));
            for unmapped in [0, 8, 4096, usize::MAX - 6, usize::MAX & !7, 1 << 47] {
                assert_eq!(memory.read(unmapped), None, "{unmapped:#x}");
            }
            let heap = Box::new([33_u64, 44]);
            assert_eq!(memory.read((&raw const heap[1]).expose_provenance()), Some(44));
        };
        check();
        std::thread::Builder::new().stack_size(64 << 10).spawn(check).unwrap().join().unwrap();
    }
}
