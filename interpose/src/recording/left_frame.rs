//! Detects that a signal handler has left a hook by `siglongjmp`, from the stack of a later hook on the same thread.
//!
//! While a hook runs, every later hook on its thread is called by a signal handler that has interrupted it. The
//! handler's frame is below that of the hook, with the interrupted registers in between. So a hook at the same height
//! or above proves that the earlier one was left, if both are on the same stack.

use std::fs::File;
use std::io::{BufRead, BufReader};

use super::errno::RestoreErrno;
use crate::arch::LEAST_SIGNAL_FRAME_BYTES;
pub(crate) use crate::arch::stack_pointer;

/// How many bytes the kernel puts on the stack for a signal (`AT_MINSIGSTKSZ`, Linux 5.14; getauxval(3)).
fn signal_frame_bytes() -> usize {
    // SAFETY: `getauxval` reads the auxiliary vector and accepts any type. The result is 0 if there is no such entry.
    let bytes = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) };
    usize::try_from(bytes).unwrap_or(0).max(LEAST_SIGNAL_FRAME_BYTES)
}

/// Whether the hook with the stack pointer `earlier` was left. `later` is the stack pointer of a later hook on the same
/// thread, which calls this. `false` if that is unknown, as for a signal handler on a stack of its own.
#[cold]
pub(super) fn was_left(earlier: usize, later: usize) -> bool {
    let _errno = RestoreErrno::new();
    later.saturating_add(signal_frame_bytes()) > earlier && !is_on_signal_stack() && is_same_mapping(earlier, later)
}

/// Whether the thread runs on an alternate signal stack. That may be a part of the thread's own stack.
fn is_on_signal_stack() -> bool {
    // SAFETY: `stack_t` is plain data, for which zeros are valid.
    let mut stack: libc::stack_t = unsafe { std::mem::zeroed() };
    // SAFETY: a null pointer changes nothing, and `stack` is writable.
    let result = unsafe { libc::syscall(libc::SYS_sigaltstack, std::ptr::null::<libc::stack_t>(), &raw mut stack) };
    result != 0 || stack.ss_flags & libc::SS_ONSTACK != 0
}

/// Whether both addresses are in one mapping. Each stack has its own, with an unreadable page at its end.
fn is_same_mapping(first: usize, second: usize) -> bool {
    let Ok(maps) = File::open("/proc/self/maps") else { return false };
    for line in BufReader::new(maps).lines().map_while(Result::ok) {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let Some((start, end)) = range else { continue };
        if let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            && (start..end).contains(&first)
        {
            return (start..end).contains(&second);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_above_is_distinguished_from_one_below() {
        let here = stack_pointer();
        let below = here - signal_frame_bytes();
        assert!(was_left(below, here), "a deeper hook of this stack was left");
        assert!(was_left(here, below + 1), "no signal frame is between them");
        assert!(!was_left(here, below), "this frame is still active");
        let elsewhere = Box::new(0_u8);
        assert!(!was_left((&raw const *elsewhere).addr(), here), "another mapping");
        let other = std::thread::spawn(stack_pointer).join().unwrap();
        assert!(!was_left(other, here), "another stack");
    }
}
