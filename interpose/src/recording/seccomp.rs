//! Checks whether the program's seccomp filter permits the system calls of a recording, without risking the process.
//!
//! A filter may kill the process for a system call that it does not expect. Filters that also apply to the launcher are
//! harmless, because the launcher runs under them. For a later filter, the calls are tried in a child process, with
//! arguments that have no effect. The child shares our memory like that of `posix_spawn`. If it dies, this process does
//! not make the calls.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_stackwalk::arch::KEEPS_ORDER_OF_STORES;
use memtrace_trace::options;

/// The size of the child's stack in bytes.
const CHILD_STACK_BYTES: usize = 16 << 10;
/// How far the child got: 1 after the calls of a recording or of a report, 2 after `process_vm_readv`, 3 after
/// `membarrier`.
static CHILD_PROGRESS: AtomicU32 = AtomicU32::new(0);

/// The permitted system calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PermittedCalls {
    /// The calls that connect to the launcher and record.
    pub(crate) recording: bool,
    /// The call `process_vm_readv`.
    pub(crate) process_vm_readv: bool,
    /// The call `membarrier`, which not every processor needs.
    pub(crate) membarrier: bool,
}

/// Determines what this process may call. `launcher_filters` is the number of filters under which the launcher ran.
pub(crate) fn permitted_calls(launcher_filters: u32) -> PermittedCalls {
    const ALL: PermittedCalls = PermittedCalls { recording: true, process_vm_readv: true, membarrier: true };
    if !has_later_filter(launcher_filters) {
        return ALL;
    }
    let progress = try_in_child(recording_calls);
    PermittedCalls { recording: progress >= 1, process_vm_readv: progress >= 2, membarrier: progress >= 3 }
}

/// Whether this process may create and remove links.
#[cold]
pub(super) fn permits_links(launcher_filters: u32) -> bool {
    !has_later_filter(launcher_filters) || try_in_child(link_calls) >= 1
}

/// Whether this process has a filter that does not apply to the launcher.
pub(super) fn has_later_filter(launcher_filters: u32) -> bool {
    // Without /proc the number of filters is unknown.
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| options::filters_in(&status) > launcher_filters)
}

/// Runs `calls` in a child process and returns its progress.
#[cold]
fn try_in_child(calls: extern "C" fn(*mut c_void) -> c_int) -> u32 {
    let mut stack: Vec<u128> = Vec::with_capacity(CHILD_STACK_BYTES / size_of::<u128>());
    CHILD_PROGRESS.store(0, Ordering::Relaxed);
    let (mut before, all) = (0u64, u64::MAX);
    // SAFETY: all signals are blocked while the child runs on our memory, so no handler of the program runs in it. This
    // thread is suspended until the child has ended (`CLONE_VFORK`) and then reaps it. Only the child uses the stack.
    unsafe {
        let set = |how: c_int, new: &u64, old: *mut u64| {
            libc::syscall(libc::SYS_rt_sigprocmask, how, std::ptr::from_ref(new), old, size_of::<u64>());
        };
        set(libc::SIG_SETMASK, &all, &mut before);
        let top = stack.as_mut_ptr().add(stack.capacity()).cast::<c_void>();
        let child = libc::clone(calls, top, libc::CLONE_VM | libc::CLONE_VFORK, std::ptr::null_mut());
        if child > 0 {
            let mut status = 0;
            libc::waitpid(child, &mut status, libc::__WALL);
        }
        set(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    }
    CHILD_PROGRESS.load(Ordering::Relaxed)
}

const INVALID: c_long = -1;
const NULL: *mut c_void = std::ptr::null_mut();

/// Prevents a core file of the child.
fn forbid_core() {
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limits belong to the child alone.
    unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_CORE, &raw const no_core, NULL) };
}

/// A child that makes every kind of call that a recording makes and that a program may not make itself.
extern "C" fn recording_calls(_: *mut c_void) -> c_int {
    forbid_core();
    // SAFETY: the descriptors belong to the child alone. All other calls fail because of their arguments or have no
    // effect.
    unsafe {
        libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        libc::syscall(libc::SYS_setsockopt, INVALID, libc::SOL_SOCKET, libc::SO_RCVTIMEO, NULL, 0);
        libc::syscall(libc::SYS_connect, INVALID, NULL, 0);
        libc::syscall(libc::SYS_sendto, INVALID, NULL, 0, libc::MSG_NOSIGNAL, NULL, 0);
        libc::syscall(libc::SYS_recvmsg, INVALID, NULL, libc::MSG_CMSG_CLOEXEC);
        libc::syscall(libc::SYS_madvise, NULL, 0, libc::MADV_WIPEONFORK);
        libc::syscall(libc::SYS_gettid);
        libc::syscall(libc::SYS_tgkill, INVALID, INVALID, 0);
        libc::syscall(libc::SYS_prctl, libc::PR_GET_NAME, NULL, 0, 0, 0);
        libc::syscall(libc::SYS_sched_yield);
        libc::syscall(libc::SYS_clock_nanosleep, INVALID, 0, NULL, NULL);
        libc::syscall(libc::SYS_mremap, NULL, 0, 0, 0);
        CHILD_PROGRESS.store(1, Ordering::Relaxed);
        libc::syscall(libc::SYS_process_vm_readv, INVALID, NULL, 0, NULL, 0, 0);
        CHILD_PROGRESS.store(2, Ordering::Relaxed);
        if !KEEPS_ORDER_OF_STORES {
            libc::syscall(libc::SYS_membarrier, INVALID, 0, 0);
        }
        CHILD_PROGRESS.store(3, Ordering::Relaxed);
        libc::syscall(libc::SYS_exit_group, 0);
    }
    0
}

/// A child that makes the calls of a report.
extern "C" fn link_calls(_: *mut c_void) -> c_int {
    forbid_core();
    // SAFETY: null pointers make the calls fail.
    unsafe {
        libc::syscall(libc::SYS_symlinkat, NULL, INVALID, NULL);
        libc::syscall(libc::SYS_unlinkat, INVALID, NULL, 0);
        CHILD_PROGRESS.store(1, Ordering::Relaxed);
        libc::syscall(libc::SYS_exit_group, 0);
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_calls_are_permitted_without_a_filter() {
        assert_eq!((try_in_child(recording_calls), try_in_child(link_calls)), (3, 1));
        assert_eq!(permitted_calls(0), permitted_calls(u32::MAX));
    }
}
