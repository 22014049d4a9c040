//! The right to read the loader's structures and the tables of loaded objects.
//!
//! While a [`Reading`] exists, the `dlclose` hook does not call the original, so nothing is unmapped and reads are
//! loads. The exception is a [`Reading`] that begins inside a `dlclose`: on its thread, in a destructor, or on another
//! thread. It must not wait, because a destructor may wait for its thread. Then reads go through the kernel, which
//! returns an error where a load would fault.
//!
//! The kernel is asked only once a recording has found out that the program's seccomp filter permits it
//! ([`permit_checked_reads`]). Before, and where the kernel refuses, reads are loads. Then only the objects that the
//! `dlclose` unloads are at risk, for the microseconds of one read. Their destructors have run by then, so a program
//! that still uses them is at the same risk without memtrace.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::python::memory::CheckedMemory;
use super::r_debug::r_debug;
use super::unloads;

/// How many times a reader yields the processor while the loader unmaps objects.
const MAX_YIELDS: u32 = 1000;

static CHECKED_READS_PERMITTED: AtomicBool = AtomicBool::new(false);

/// Permits reads through the kernel: the program's seccomp filter does not kill it for them.
pub fn permit_checked_reads() {
    CHECKED_READS_PERMITTED.store(true, Ordering::Relaxed);
}

/// The right to read. Ends with the value. Take it for microseconds, and call no foreign code meanwhile.
pub struct Reading {
    /// Reads through the kernel. `None` if loads are safe.
    checked: Option<CheckedMemory>,
    /// Whether `dlclose` waits for this value.
    is_counted: bool,
}

impl Reading {
    /// Begins to read. Never waits for a lock.
    pub fn begin() -> Reading {
        let is_unloading = unloads::begin_reading();
        let mut reading = Reading { checked: None, is_counted: true };
        if is_unloading {
            if CHECKED_READS_PERMITTED.load(Ordering::Relaxed) {
                reading.checked = CheckedMemory::open().ok();
            }
            // An unload waits only for those who may fault.
            if reading.checked.is_some() {
                reading.end();
            }
            wait_for_unmapping();
        }
        reading
    }

    /// Reads only objects that are never unloaded: those that were loaded before the program started. Makes no system
    /// call.
    pub(super) fn of_startup_objects() -> Reading {
        Reading { checked: None, is_counted: false }
    }

    /// The value at `address`. `None` if it is not readable.
    ///
    /// `T` must be plain data, for which all bytes are valid. The loader's structures must have such a value there, in
    /// an object that is loaded.
    #[inline]
    pub(super) fn read<T: Copy>(&self, address: usize) -> Option<T> {
        let Some(memory) = &self.checked else {
            // SAFETY: the address comes from the structures of a loaded object, and `dlclose` waits for this reader.
            return Some(unsafe { with_exposed_provenance::<T>(address).read_unaligned() });
        };
        let mut value = MaybeUninit::<T>::zeroed();
        // SAFETY: the bytes are initialized with zeros and belong to `value`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
        // SAFETY: all bytes are initialized, and callers choose a `T` for which all bytes are valid.
        memory.read(address, bytes).then(|| unsafe { value.assume_init() })
    }

    /// Whether the C string at `address` is `text`.
    pub(super) fn is_c_string(&self, address: usize, text: &[u8]) -> bool {
        // Compares byte by byte, so that nothing beyond the string's end is read.
        text.iter().enumerate().all(|(at, byte)| self.read(address.wrapping_add(at)) == Some(*byte))
            && self.read(address.wrapping_add(text.len())) == Some(0u8)
    }

    /// Calls `visit` with the C string at `address`. It is empty if it is not readable.
    pub(super) fn with_c_string<T>(&self, address: usize, visit: impl FnOnce(&CStr) -> T) -> T {
        /// The longest path of Linux, in bytes.
        const MAX_BYTES: usize = libc::PATH_MAX as usize;
        /// One read through the kernel. It does not cross a page boundary, so it is readable as a whole or not at all.
        const PIECE: usize = 64;
        if address == 0 {
            return visit(c"");
        }
        if self.checked.is_none() {
            // SAFETY: the loader's structures have a C string there, and `dlclose` waits for this reader.
            return visit(unsafe { CStr::from_ptr(with_exposed_provenance(address)) });
        }
        let (mut bytes, mut at) = (Vec::new(), address);
        while bytes.len() < MAX_BYTES && !bytes.contains(&0) {
            let Some(piece) = self.read::<[u8; PIECE]>(at & !(PIECE - 1)) else { break };
            bytes.extend_from_slice(piece.get(at % PIECE..).unwrap_or_default());
            at = (at & !(PIECE - 1)).saturating_add(PIECE);
        }
        visit(CStr::from_bytes_until_nul(&bytes).unwrap_or_default())
    }
}

impl Reading {
    /// Lets `dlclose` go on.
    fn end(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            unloads::end_reading();
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits until the loader does not unmap objects. In that phase no code of the program runs, so it is short. The wait
/// is bounded, because a signal handler may have interrupted it on this very thread.
#[cold]
fn wait_for_unmapping() {
    let Some(loader) = r_debug() else { return };
    for _ in 0..MAX_YIELDS {
        if !loader.is_unmapping() {
            return;
        }
        // SAFETY: `sched_yield` takes no arguments and has no preconditions.
        unsafe { libc::sched_yield() };
    }
}
