//! Facts about this machine, and its clocks in words.

use memtrace_trace::clock;
use serde::Serialize;

/// The machine a run was made on.
#[derive(Serialize, Debug)]
pub(crate) struct Host {
    /// Its name.
    name: String,
    /// The kernel's release, e.g. `6.8.0-45-generic`.
    kernel: String,
    /// Processors this process may use.
    cpus: usize,
    /// All of its memory, in bytes.
    memory_bytes: u64,
    /// The driver's version line, where there is an NVIDIA driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvidia_driver: Option<String>,
}

impl Host {
    /// Asks the system.
    pub(crate) fn read() -> Host {
        // SAFETY: plain calls without arguments that point anywhere.
        let (pages, page_size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        let line = |path: &str| std::fs::read_to_string(path).ok().and_then(|t| t.lines().next().map(str::to_owned));
        Host {
            name: name(),
            kernel: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: pages.max(0) as u64 * page_size.max(0) as u64,
            nvidia_driver: line("/proc/driver/nvidia/version"),
        }
    }
}

/// The machine's name.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|n| n.trim().to_owned()).unwrap_or_default()
}

/// Now, in nanoseconds since the epoch; steps of the machine's clock during the run are not followed.
pub(crate) fn epoch_ns() -> u64 {
    clock::epoch_ns()
}

/// The moment that is `ticks` clock ticks after boot (`/proc/PID/stat`, field 22), in nanoseconds since the epoch.
pub(crate) fn boot_ticks_to_epoch_ns(ticks: u64) -> Option<u64> {
    // SAFETY: a plain call; and `boot` is a valid timespec that the second call fills.
    let (per_second, boot_ns) = unsafe {
        let mut boot: libc::timespec = std::mem::zeroed();
        if libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut boot) != 0 {
            return None;
        }
        (libc::sysconf(libc::_SC_CLK_TCK), boot.tv_sec as u64 * 1_000_000_000 + boot.tv_nsec as u64)
    };
    let since_boot = ticks.checked_mul(1_000_000_000)?.checked_div(u64::try_from(per_second).ok()?)?;
    epoch_ns().checked_sub(boot_ns)?.checked_add(since_boot)
}

/// A moment broken down into calendar fields.
fn calendar(epoch_seconds: i64, local: bool) -> libc::tm {
    // SAFETY: both structures are plain data, and the calls only read the one and fill the other.
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

/// `2026-11-20T22:31:05.123Z`.
pub(crate) fn rfc3339(epoch_ns: u64) -> String {
    let t = calendar((epoch_ns / 1_000_000_000) as i64, false);
    let ms = epoch_ns / 1_000_000 % 1000;
    let (year, month) = (t.tm_year + 1900, t.tm_mon + 1);
    format!("{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}.{ms:03}Z", t.tm_mday, t.tm_hour, t.tm_min, t.tm_sec)
}

/// `20261120-223105`, local time.
pub(crate) fn stamp(epoch_ns: u64) -> String {
    let t = calendar((epoch_ns / 1_000_000_000) as i64, true);
    let (year, month) = (t.tm_year + 1900, t.tm_mon + 1);
    format!("{year:04}{month:02}{:02}-{:02}{:02}{:02}", t.tm_mday, t.tm_hour, t.tm_min, t.tm_sec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_in_words() {
        assert_eq!(rfc3339(1_795_213_865_123_456_789), "2026-11-20T22:31:05.123Z");
        assert_eq!(stamp(1_795_213_865_000_000_000).len(), 15);
    }

    #[test]
    fn the_host_has_a_name_and_memory() {
        let host = Host::read();
        assert!(!host.name.is_empty() && host.memory_bytes > 1 << 20);
    }
}
