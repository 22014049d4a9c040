//! Checks the limits on this process and its control group: memory, address space, open files.

use memtrace_trace::shm::layout::SEGMENT_SIZE;
use rustix::process::{Resource, getrlimit};

use super::report::Check;
use super::units::bytes;
use crate::host;

/// The memory that the launcher needs in addition to the program, in bytes, with a margin. docs/dev/performance.md
/// measures 10 MiB.
const LAUNCHER_MEMORY: u64 = 64 << 20;
/// The minimum number of descriptors: two for each process and a few for the launcher itself.
const MIN_FILES: u64 = 256;

/// Checks how many files may be open. The launcher raises its soft limit to the hard limit.
pub(super) fn open_files() -> Check {
    let name = "Open files";
    match getrlimit(Resource::Nofile).maximum {
        Some(hard) if hard < MIN_FILES => Check::failed(
            name,
            format!("at most {hard}, and the launcher needs two for each recorded process"),
            "raise the hard limit: ulimit -Hn 4096 (as root), or LimitNOFILE= of the systemd service",
        ),
        None => Check::ok(name, "no limit"),
        Some(hard) => Check::ok(name, format!("up to {hard}; the launcher needs two for each recorded process")),
    }
}

/// Checks how much address space may be mapped.
pub(super) fn address_space() -> Check {
    let name = "Address space";
    let needed = SEGMENT_SIZE as u64;
    match getrlimit(Resource::As).current {
        None => Check::ok(name, "no limit"),
        Some(soft) if soft < 4 * needed => Check::failed(
            name,
            format!("limited to {}, and each recorded process maps {} more", bytes(soft), bytes(needed)),
            "raise the limit: ulimit -v unlimited",
        ),
        Some(soft) => Check::ok(name, format!("limited to {}", bytes(soft))),
    }
}

/// Checks how much memory the control group may use.
pub(super) fn group_memory() -> Check {
    let name = "Memory limit";
    match host::group_memory() {
        None => Check::ok(name, "the control group has no limit"),
        Some((limit, used)) if limit.saturating_sub(used) < LAUNCHER_MEMORY => Check::failed(
            name,
            format!(
                "the control group may use {} and uses {}; the kernel may kill the launcher",
                bytes(limit),
                bytes(used)
            ),
            "raise the memory limit of the container or job",
        ),
        Some((limit, used)) => {
            Check::ok(name, format!("the control group may use {} and uses {}", bytes(limit), bytes(used)))
        }
    }
}
