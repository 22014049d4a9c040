//! Reads memory that may not be mapped, through the kernel. Only for verification.
//!
//! `process_vm_readv` on the own process fails with `EFAULT` where a load would fault. Some sandboxes forbid it; then
//! `/proc/self/mem` does the same. These functions may change `errno`.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use super::reason::Reason;

static AVOID_PROCESS_VM_READV: AtomicBool = AtomicBool::new(false);

/// Stops the use of `process_vm_readv`, because the program's own seccomp filter would kill it for that call.
pub fn avoid_process_vm_readv() {
    AVOID_PROCESS_VM_READV.store(true, Ordering::Relaxed);
}

/// Reads memory and returns an error instead of faulting.
pub enum CheckedMemory {
    /// `process_vm_readv`.
    Process(libc::pid_t),
    /// `/proc/self/mem`, open for reading.
    File(libc::c_int),
}

impl CheckedMemory {
    /// Chooses the first way that can read a word of our own.
    pub fn open() -> Result<CheckedMemory, Reason> {
        let known = 0x5EED_u64;
        let can_read = |memory: &CheckedMemory| memory.word((&raw const known).expose_provenance(), 0) == Some(known);
        // SAFETY: `getpid` takes no arguments and cannot fail.
        let process = CheckedMemory::Process(unsafe { libc::getpid() });
        if !AVOID_PROCESS_VM_READV.load(Ordering::Relaxed) && can_read(&process) {
            return Ok(process);
        }
        // SAFETY: the path is a C string.
        let file = unsafe { libc::open(c"/proc/self/mem".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if file < 0 {
            return Err(Reason::UncheckedMemory);
        }
        let file = CheckedMemory::File(file);
        if can_read(&file) { Ok(file) } else { Err(Reason::UncheckedMemory) }
    }

    /// Fills `into` from `address`. Returns `false` if not all of it is readable.
    pub fn read(&self, address: usize, into: &mut [u8]) -> bool {
        let length = into.len();
        let target = into.as_mut_ptr().cast::<c_void>();
        let count = match *self {
            CheckedMemory::Process(pid) => {
                let local = libc::iovec { iov_base: target, iov_len: length };
                let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: length };
                // SAFETY: the kernel writes only to `into` and checks the other address itself.
                unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) }
            }
            CheckedMemory::File(file) => {
                let Ok(offset) = libc::off_t::try_from(address) else {
                    return false;
                };
                // SAFETY: the kernel writes at most `length` bytes to `into`.
                unsafe { libc::pread(file, target, length, offset) }
            }
        };
        usize::try_from(count) == Ok(length)
    }

    /// The 8-byte field at `object + offset`. `None` if it is not readable.
    pub(super) fn word(&self, object: usize, offset: usize) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(object.wrapping_add(offset), &mut bytes).then_some(u64::from_le_bytes(bytes))
    }

    /// [`Self::word`] as an address or a size.
    pub fn size(&self, object: usize, offset: usize) -> Option<usize> {
        self.word(object, offset).map(|word| word as usize)
    }

    /// The 4-byte field at `object + offset`. `None` if it is not readable.
    pub(super) fn half(&self, object: usize, offset: usize) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(object.wrapping_add(offset), &mut bytes).then_some(u32::from_le_bytes(bytes))
    }
}

impl Drop for CheckedMemory {
    fn drop(&mut self) {
        if let CheckedMemory::File(file) = *self {
            // SAFETY: this struct owns the descriptor and closes it once.
            unsafe { libc::close(file) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_read_and_unmapped_memory_is_refused() {
        let word = 0x0102_0304_0506_0708_u64;
        let address = (&raw const word).expose_provenance();
        // SAFETY: the path is a C string.
        let file = unsafe { libc::open(c"/proc/self/mem".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        for memory in [CheckedMemory::open().unwrap(), CheckedMemory::File(file)] {
            assert_eq!(memory.word(address, 0), Some(word));
            assert_eq!(memory.half(address, 0), Some(0x0506_0708));
            assert_eq!(memory.word(0, 0), None);
            assert_eq!(memory.word(0, 8), None);
            assert_eq!(memory.word(usize::MAX, 8), None);
        }
    }
}
