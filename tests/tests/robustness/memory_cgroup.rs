//! A memory cgroup of one test, of version 1 or 2.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::crash_support::{kill, state};

/// The cgroup. Dropping it removes it once its processes are gone.
pub(crate) struct Cgroup {
    /// `None` where this machine does not allow a new cgroup. Then the test sends the OOM killer's signal itself.
    folder: Option<PathBuf>,
    /// The cgroup file that counts OOM kills.
    counts: &'static str,
}

impl Cgroup {
    /// A new cgroup with this limit, such as `64M`. `None` where this machine does not allow one.
    pub(crate) fn new(limit: &str) -> Option<Cgroup> {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path =
            |prefix: &str| Some(own.lines().find_map(|l| l.split_once(prefix))?.1.trim_start_matches('/').to_owned());
        let name =
            format!("memtrace-test-{}-{:?}", std::process::id(), Instant::now()).replace([' ', '{', '}', ':', ','], "");
        let kinds = [
            ("/sys/fs/cgroup/memory", path(":memory:"), "memory.limit_in_bytes", "memory.oom_control"),
            ("/sys/fs/cgroup", path("0::"), "memory.max", "memory.events"),
        ];
        for (root, own, limit_file, counts) in kinds {
            let Some(own) = own else { continue };
            for parent in [Path::new(root).join(&own), PathBuf::from(root)] {
                let folder = parent.join(&name);
                if std::fs::create_dir(&folder).is_ok() {
                    if std::fs::write(folder.join(limit_file), limit).is_ok() {
                        // Without swap the limit cannot be evaded.
                        let _ = std::fs::write(folder.join("memory.swap.max"), "0");
                        return Some(Cgroup { folder: Some(folder), counts });
                    }
                    let _ = std::fs::remove_dir(&folder);
                }
            }
        }
        None
    }

    /// A new cgroup, or one in whose place [`Self::add`] sends SIGKILL.
    pub(crate) fn or_sigkill(limit: &str) -> Cgroup {
        Cgroup::new(limit).unwrap_or_else(|| {
            println!("no memory cgroup can be made here: SIGKILL stands for the kernel's out-of-memory killer");
            Cgroup { folder: None, counts: "" }
        })
    }

    /// Lets the kernel kill all processes of the cgroup together. Returns `false` where it cannot (version 1).
    pub(crate) fn kill_together(&self) -> bool {
        self.folder.as_ref().is_some_and(|folder| std::fs::write(folder.join("memory.oom.group"), "1").is_ok())
    }

    /// Moves a process into the cgroup. The memory that it has stays in the cgroup before.
    pub(crate) fn add(&self, pid: i32) {
        match &self.folder {
            Some(folder) => std::fs::write(folder.join("cgroup.procs"), pid.to_string()).unwrap(),
            None => kill(pid, libc::SIGKILL),
        }
    }

    /// Whether the kernel has killed a process of the cgroup, or the process `pid` has ended where there is none.
    pub(crate) fn has_killed(&self, pid: i32) -> bool {
        let Some(folder) = &self.folder else { return state(pid).is_none_or(|s| s == 'Z' || s == 't') };
        let counts = std::fs::read_to_string(folder.join(self.counts)).unwrap();
        counts.lines().any(|l| l.strip_prefix("oom_kill ").is_some_and(|n| n != "0"))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // The folder can be removed once the killed processes are gone.
            for _ in 0..1000 {
                if std::fs::remove_dir(folder).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
