//! Finds the exit status of a process, including one that is not the launcher's child (for example a worker of
//! torchrun).
//!
//! `wait(2)` reports a status only to the parent, and the traced processes keep their own parents. The kernel offers
//! two other sources. While an ended process is not yet collected, `/proc` has its status. Afterwards a pidfd that was
//! opened earlier has it (`PIDFD_GET_INFO`, Linux 6.15). On older kernels the parent may collect the process first. The
//! status is then unknown and is not guessed.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::child;
use crate::proc::ProcessDir;

/// The `wait(2)` status word of a process whose `pidfd` has become readable. `None` when it is unknown.
pub(super) fn wait_status(pidfd: BorrowedFd<'_>, dir: &ProcessDir, start_time: Option<u64>) -> Option<i32> {
    of_child(pidfd).or_else(|| dir.zombie_status(start_time?)).or_else(|| of_collected(pidfd))
}

/// The status of the launcher's own child. The child stays uncollected, because `crate::child` collects it.
fn of_child(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    waitid(WaitId::PidFd(pidfd), options).ok().flatten().map(|status| child::wait_status(&status))
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
    use std::os::fd::AsFd;
    use std::process::{Command, Stdio};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

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
        let process = Pid::from_raw(pid.cast_signed()).unwrap();
        let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
        let start_time = dir.start_time();
        assert_eq!(wait_status(pidfd.as_fd(), &dir, start_time), None, "not ended");
        kill_process(process, Signal::CONT).unwrap();
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&minute)), Ok(1));
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
