//! Facts about this machine, and conversions of its clocks.

use std::path::Path;

use memtrace_analysis::load::Machine;
use memtrace_trace::clock;
use rustix::time::ClockId;

use crate::control_group::ControlGroup;

/// This machine. Facts that cannot be read are empty or 0.
pub(crate) fn machine() -> Machine {
    let line = |path: &str| std::fs::read_to_string(path).ok().and_then(|t| t.lines().next().map(str::to_owned));
    Machine {
        name: name(),
        kernel: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
        cpus: std::thread::available_parallelism().map_or(0, usize::from),
        memory_bytes: total_memory(),
        nvidia_driver: line("/proc/driver/nvidia/version"),
    }
}

/// The main memory of the machine in bytes.
pub(crate) fn total_memory() -> u64 {
    let system = rustix::system::sysinfo();
    system.totalram.saturating_mul(system.mem_unit.into())
}

/// The tightest memory limit and its current usage, in bytes, over this process's control group and all parents.
pub(crate) fn group_memory() -> Option<(u64, u64)> {
    let group = ControlGroup::of(Path::new("/proc/self"))?;
    Some((group.limit, group.used().unwrap_or(0)))
}

/// The machine's host name, or an empty string when it cannot be read.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|n| n.trim().to_owned()).unwrap_or_default()
}

/// The current time in nanoseconds since the Unix epoch. Adjustments of the machine's clock during the run have no
/// effect.
pub(crate) fn epoch_ns() -> u64 {
    clock::epoch_ns()
}

/// Converts clock ticks since boot (`/proc/PID/stat`, field 22) to nanoseconds since the Unix epoch. `None` on
/// overflow.
pub(crate) fn boot_ticks_to_epoch_ns(ticks: u64) -> Option<u64> {
    let boot = rustix::time::clock_gettime(ClockId::Boottime);
    let boot_ns = boot.tv_sec as u64 * 1_000_000_000 + boot.tv_nsec as u64;
    let since_boot = ticks.checked_mul(1_000_000_000)?.checked_div(rustix::param::clock_ticks_per_second())?;
    epoch_ns().checked_sub(boot_ns)?.checked_add(since_boot)
}

/// Splits a time into calendar fields, in local time or in UTC.
fn calendar(epoch_seconds: i64, local: bool) -> libc::tm {
    // SAFETY: `tm` is plain data for which all zeros is valid. Both pointers refer to values on this stack frame, and
    // the calls only read the one and write the other.
    unsafe {
        let mut tm: libc::tm = std::mem::zeroed();
        if local {
            libc::localtime_r(&epoch_seconds, &mut tm)
        } else {
            libc::gmtime_r(&epoch_seconds, &mut tm)
        };
        tm
    }
}

/// Formats a time as `2026-11-20T22:31:05.123Z`.
pub(crate) fn rfc3339(epoch_ns: u64) -> String {
    let t = calendar((epoch_ns / 1_000_000_000) as i64, false);
    let ms = epoch_ns / 1_000_000 % 1000;
    let (year, month) = (t.tm_year + 1900, t.tm_mon + 1);
    format!("{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}.{ms:03}Z", t.tm_mday, t.tm_hour, t.tm_min, t.tm_sec)
}

/// Formats a time as `20261120-223105`, in local time.
pub(crate) fn stamp(epoch_ns: u64) -> String {
    let t = calendar((epoch_ns / 1_000_000_000) as i64, true);
    let (year, month) = (t.tm_year + 1900, t.tm_mon + 1);
    format!("{year:04}{month:02}{:02}-{:02}{:02}{:02}", t.tm_mday, t.tm_hour, t.tm_min, t.tm_sec)
}

/// Formats a time as `2026-11-20 22:31`, in local time.
pub(crate) fn local_minute(epoch_ns: u64) -> String {
    let t = calendar((epoch_ns / 1_000_000_000) as i64, true);
    format!("{:04}-{:02}-{:02} {:02}:{:02}", t.tm_year + 1900, t.tm_mon + 1, t.tm_mday, t.tm_hour, t.tm_min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted() {
        assert_eq!(rfc3339(1_795_213_865_123_456_789), "2026-11-20T22:31:05.123Z");
        assert_eq!(stamp(1_795_213_865_000_000_000).len(), 15);
    }

    #[test]
    fn the_host_has_a_name_and_memory() {
        let host = machine();
        assert!(!host.name.is_empty() && host.memory_bytes > 1 << 20);
    }
}
