//! Finds the exit status of a process, including one that is not the launcher's child (for example a worker of
//! torchrun).
//!
//! `wait(2)` reports a status only to the parent, and the traced processes keep their own parents. The kernel offers
//! two other sources. While an ended process is not yet collected, `/proc` has its status. Afterwards a pidfd that was
//! opened earlier has it (`PIDFD_GET_INFO`, Linux 6.15). On older kernels the parent may collect the process first. The
//! status is then unknown and is not guessed.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::child;
use crate::proc::ProcessDir;

/// The `wait(2)` status word of a process whose `pidfd` has become readable. `None` when it is unknown.
pub(super) fn wait_status(pidfd: BorrowedFd<'_>, dir: &ProcessDir, start_time: Option<u64>) -> Option<i32> {
    of_child(pidfd).or_else(|| dir.zombie_status(start_time?)).or_else(|| of_collected(pidfd))
}

/// The status of the launcher's own child. The child stays uncollected, because `crate::child` collects it.
fn of_child(pidfd: BorrowedFd<'_>) -> Option<i32> {
    // SAFETY: `siginfo_t` is plain data for which all zeros is valid, and `info` is valid for writes. `pidfd` is
    // borrowed and therefore open. `si_pid` may be read, because `waitid` filled `info` in or left it zero.
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

/// `PIDFD_INFO_EXIT` of linux/pidfd.h.
const EXIT: u64 = 1 << 3;
/// `_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)` of linux/pidfd.h.
const GET_INFO: libc::c_ulong = 3 << 30 | (size_of::<PidfdInfo>() as libc::c_ulong) << 16 | 0xff << 8 | 11;

/// The status of a process that its parent has already collected. `None` on kernels before 6.15.
fn of_collected(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = PidfdInfo { mask: EXIT, ..PidfdInfo::default() };
    // SAFETY: `pidfd` is borrowed and therefore open. `GET_INFO` encodes the size of `PidfdInfo`, so the kernel writes
    // at most that many bytes to `info`. Kernels without this request return an error.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), GET_INFO as _, &raw mut info) };
    (result == 0 && info.mask & EXIT != 0).then_some(info.exit_code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::process::{Command, Stdio};

    /// A grandchild stops itself and ends with status 7 after it continues. Its parent collects it on request.
    #[test]
    fn the_status_of_a_grandchild() {
        let script = "sh -c 'echo $$; kill -STOP $$; exit 7' & read x; wait $!; echo collected; read x";
        let mut command = Command::new("sh");
        let mut parent = command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut to_parent = parent.stdin.take().unwrap();
        let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
        let pid: u32 = lines.next().unwrap().unwrap().parse().unwrap();
        let dir = ProcessDir::of(pid);
        while dir.state() != Some('T') {
            std::thread::yield_now();
        }
        // SAFETY: `pidfd_open` takes two integers. The stopped grandchild `pid` still exists, and nothing else owns the
        // new descriptor.
        let pidfd = unsafe { OwnedFd::from_raw_fd(libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32) };
        let start_time = dir.start_time();
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), None, "not ended");
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `kill` takes two integers, and the stopped grandchild `pid` still exists. `poll` is one valid
        // `pollfd` on this stack frame.
        unsafe {
            assert_eq!(libc::kill(pid as libc::pid_t, libc::SIGCONT), 0);
            assert_eq!(libc::poll(&raw mut poll, 1, 60_000), 1);
        }
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), Some(7 << 8), "ended, not collected");
        assert_eq!(dir.zombie_status(start_time.unwrap() + 1), None, "another process with that pid");
        to_parent.write_all(b"\n").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "collected");
        assert_eq!(dir.zombie_status(start_time.unwrap()), None);
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
        let is_available = (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 15);
        assert_eq!(
            wait_status(pidfd.as_fd(), &dir, start_time),
            is_available.then_some(7 << 8),
            "collected, Linux {release}"
        );
        drop(to_parent);
        parent.wait().unwrap();
    }
}
