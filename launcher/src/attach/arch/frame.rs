//! The parts of a call in passing that all architectures share.

use std::io;

/// `NT_PRSTATUS` of linux/elf.h: the set of general registers.
pub(in crate::attach) const NT_PRSTATUS: usize = 1;

/// Reads a set of registers of a stopped thread, as linux/elf.h numbers them. Returns its size in bytes, which is not
/// more than that of `bytes`.
pub(super) fn read_register_set(tid: i32, set: usize, bytes: &mut [u8]) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel writes to the part, which is as large as it says, and stores how much that was.
    match unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, set, &raw mut part) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(part.iov_len.min(bytes.len())),
    }
}

/// A function to call.
pub(in crate::attach) struct Call<'a> {
    pub(in crate::attach) function: u64,
    /// Its first argument, a string.
    pub(in crate::attach) text: &'a [u8],
    /// Its second argument.
    pub(in crate::attach) number: u64,
}

/// A thread that was interrupted between two instructions.
pub(in crate::attach) struct Interrupted<R, S> {
    pub(in crate::attach) registers: R,
    pub(in crate::attach) signal_mask: u64,
    /// Its vector registers.
    pub(in crate::attach) extended_state: S,
}

/// A call that a thread makes in passing, with the bytes for its stack.
pub(in crate::attach) struct Prepared<R> {
    /// Where `bytes` belong.
    pub(in crate::attach) address: u64,
    pub(in crate::attach) bytes: Vec<u8>,
    /// The part of `bytes` from here on stays as it is until the program goes on.
    pub(in crate::attach) unchanged_from: usize,
    /// The registers to set then.
    pub(in crate::attach) registers: R,
}

/// No valid mode of an alternate signal stack, so that the kernel leaves the thread's own as it is.
pub(super) const KEEP_STACK: u64 = 0x7;

/// Bytes of consecutive addresses, which are filled in at any of them.
pub(super) struct Bytes {
    start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Bytes {
    pub(super) fn new(start: u64, end: u64) -> Option<Bytes> {
        /// More than any frame has.
        const MAX_BYTES: u64 = 1 << 20;
        let size = end.checked_sub(start).filter(|size| *size <= MAX_BYTES)?;
        Some(Bytes { start, bytes: vec![0; size as usize] })
    }

    /// `None` if the data is not inside.
    pub(super) fn put(&mut self, at: u64, data: &[u8]) -> Option<()> {
        let at = usize::try_from(at.checked_sub(self.start)?).ok()?;
        self.bytes.get_mut(at..at.checked_add(data.len())?)?.copy_from_slice(data);
        Some(())
    }
}

pub(super) fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The multiple of `to`, a power of two, at or below an address.
pub(super) fn align_down(address: u64, to: u64) -> u64 {
    address & !(to - 1)
}
