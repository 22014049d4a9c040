//! How a process ended, also one that is not our child (a worker of torchrun, say).
//!
//! Only a parent is told by `wait(2)`, and the traced program's processes keep the parents they have. But the kernel tells others
//! too: of a process that has ended and was not yet waited for, `/proc` has the status; of one that was, a descriptor opened before
//! has it (`PIDFD_GET_INFO`, Linux 6.15). Before 6.15 the parent may have been faster than we are: then the status is not known, and
//! nothing is guessed.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::child;
use crate::proc::ProcessDir;

/// The status word of `wait(2)` of a process whose `pidfd` has told that it ended; `None` where it cannot be known.
pub(super) fn wait_status(pidfd: BorrowedFd<'_>, dir: &ProcessDir, start_time: Option<u64>) -> Option<i32> {
    of_child(pidfd).or_else(|| dir.zombie_status(start_time?)).or_else(|| of_collected(pidfd))
}

/// Our own child, left for its parent's code to collect.
fn of_child(pidfd: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: `info` is plain data that the call fills; the descriptor is open.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
        let result = libc::waitid(libc::P_PIDFD, pidfd.as_raw_fd() as libc::id_t, &mut info, flags);
        (result == 0 && info.si_pid() != 0).then(|| child::wait_status(&info))
    }
}

/// `struct pidfd_info` of linux/pidfd.h, in its first version.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    process: [u32; 3],
    credentials: [u32; 8],
    exit_code: i32,
}

/// `PIDFD_INFO_EXIT`
const EXIT: u64 = 1 << 3;
/// `_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)`
const GET_INFO: libc::c_ulong = 3 << 30 | (size_of::<PidfdInfo>() as libc::c_ulong) << 16 | 0xff << 8 | 11;

/// A process whose parent has collected it.
fn of_collected(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = PidfdInfo { mask: EXIT, ..PidfdInfo::default() };
    // SAFETY: the request says how long the structure is; kernels that do not know it refuse.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), GET_INFO as _, &raw mut info) };
    (result == 0 && info.mask & EXIT != 0).then_some(info.exit_code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::process::{Command, Stdio};

    /// A grandchild that stops itself and, continued, ends with status 7; its parent collects it when told.
    #[test]
    fn a_process_of_another_parent() {
        let script = "sh -c 'echo $$; kill -STOP $$; exit 7' & read x; wait $!; echo collected; read x";
        let mut command = Command::new("sh");
        let mut parent = command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut tell = parent.stdin.take().unwrap();
        let mut said = BufReader::new(parent.stdout.take().unwrap()).lines();
        let pid: u32 = said.next().unwrap().unwrap().parse().unwrap();
        let dir = ProcessDir::of(pid);
        while dir.state() != Some('T') {
            std::thread::yield_now();
        }
        // SAFETY: the process waits for us; the descriptor is new and ours.
        let pidfd = unsafe { OwnedFd::from_raw_fd(libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32) };
        let start_time = dir.start_time();
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), None, "not ended");
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: a process that waits for us; one valid entry.
        unsafe {
            assert_eq!(libc::kill(pid as libc::pid_t, libc::SIGCONT), 0);
            assert_eq!(libc::poll(&raw mut poll, 1, 60_000), 1);
        }
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), Some(7 << 8), "ended, not collected");
        assert_eq!(dir.zombie_status(start_time.unwrap() + 1), None, "another process of that number");
        tell.write_all(b"\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "collected");
        assert_eq!(dir.zombie_status(start_time.unwrap()), None);
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
        let told = (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 15);
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), told.then_some(7 << 8), "collected, Linux {release}");
        drop(tell);
        parent.wait().unwrap();
    }
}
