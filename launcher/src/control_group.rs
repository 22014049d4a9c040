//! The memory limits of control groups, versions 1 and 2.

use std::path::{Path, PathBuf};

use procfs_core::{FromRead, ProcessCGroups};

/// The root of version 2.
const UNIFIED: &str = "/sys/fs/cgroup";
/// The root of the memory controller of version 1.
const MEMORY: &str = "/sys/fs/cgroup/memory";
/// Version 1 encodes "no limit" as a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;

/// A control group that limits the memory of a process, with its limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ControlGroup {
    /// The folder that has the limit.
    folder: PathBuf,
    /// The folder of the process itself. In a container, the kernel shows only the root.
    own: PathBuf,
    is_unified: bool,
    /// The limit, in bytes.
    pub(crate) limit: u64,
}

impl ControlGroup {
    /// The control group with the tightest limit, over that of the process and all parents. `None` without a limit.
    /// `process` is a folder of `/proc`, such as `/proc/self`.
    pub(crate) fn of(process: &Path) -> Option<ControlGroup> {
        let groups = ProcessCGroups::from_file(process.join("cgroup")).ok()?;
        let mut tightest: Option<(ControlGroup, u64)> = None;
        for group in groups {
            let is_unified = group.controllers.is_empty();
            if !is_unified && !group.controllers.iter().any(|controller| controller == "memory") {
                continue;
            }
            let root = Path::new(if is_unified { UNIFIED } else { MEMORY });
            let own = root.join(group.pathname.trim_start_matches('/'));
            // In a container the group's own path is not mounted, and its limit is at the root.
            for folder in own.ancestors().take_while(|folder| folder.starts_with(root)) {
                let group = ControlGroup { folder: folder.to_owned(), own: own.clone(), is_unified, limit: 0 };
                let file = group.name("memory.max", "memory.limit_in_bytes");
                let Some(limit) = number(&folder.join(file)).filter(|limit| *limit < NO_LIMIT) else { continue };
                let left = limit.saturating_sub(group.used().unwrap_or(0));
                if tightest.as_ref().is_none_or(|(_, least)| left < *least) {
                    tightest = Some((ControlGroup { limit, ..group }, left));
                }
            }
        }
        tightest.map(|(group, _)| group)
    }

    /// Whether both are one group, whatever its limit is.
    pub(crate) fn is_same(&self, other: &ControlGroup) -> bool {
        (&self.folder, &self.own) == (&other.folder, &other.own)
    }

    fn name(&self, unified: &'static str, first_version: &'static str) -> &'static str {
        if self.is_unified { unified } else { first_version }
    }

    /// The bytes in use, with the page cache.
    pub(crate) fn used(&self) -> Option<u64> {
        number(&self.folder.join(self.name("memory.current", "memory.usage_in_bytes")))
    }

    /// The highest number of bytes that were in use since the group was made.
    pub(crate) fn peak(&self) -> Option<u64> {
        number(&self.folder.join(self.name("memory.peak", "memory.max_usage_in_bytes")))
    }

    /// The bytes of the page cache without shared memory, which the kernel gives back when memory is short.
    pub(crate) fn cache(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.folder.join("memory.stat")).ok()?;
        let (cache, shared) = if self.is_unified { ("file", "shmem") } else { ("total_cache", "total_shmem") };
        Some(field(&text, cache)?.saturating_sub(field(&text, shared).unwrap_or(0)))
    }

    /// How many processes the kernel has killed because the group's memory was full.
    pub(crate) fn kills(&self) -> u64 {
        let file = self.name("memory.events", "memory.oom_control");
        let count = |folder: &Path| field(&std::fs::read_to_string(folder.join(file)).ok()?, "oom_kill");
        // Version 1 counts in the group of the killed process only.
        let folders = [&self.folder, &self.own];
        let folders = &folders[..if self.is_unified || self.folder == self.own { 1 } else { 2 }];
        folders.iter().filter_map(|folder| count(folder)).fold(0, u64::saturating_add)
    }
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number after `name` in a text with one name and number a line.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}
