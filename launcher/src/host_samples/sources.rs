//! Reads the main memory of processes, and shared memory, from `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use memtrace_analysis::load::{HostProcess, HostProcessName, HostSample, HostSharedFile};

use crate::control_group::field;
use crate::proc::ProcessDir;
use crate::process_watch::thread_cpu_time;

/// The pause after a sample is at least this many times its CPU time.
pub(super) const PAUSE_FACTOR: u32 = 50;
/// The maximum number of processes in a sample.
const MAX_PROCESSES: usize = 1024;
/// The longest name of a process, in characters.
const MAX_NAME: usize = 64;
/// The maximum number of files in shared memory that are listed.
const MAX_FILES: usize = 16;
/// The longest name of a file in shared memory, in characters.
const MAX_FILE_NAME: usize = 128;
/// Less shared memory than this is not looked into, in bytes.
const LEAST_SHARED: u64 = 1 << 20;
/// From this version on, the kernel reads the mappings of a process without making it wait (`smaps_rollup` releases
/// the lock of the address space when another thread waits for it).
const KERNEL_WITHOUT_WAIT: (u32, u32) = (5, 10);

/// Memory that is read only as often as its cost allows.
#[derive(Clone, Copy, Debug)]
struct Paced {
    next: Instant,
}

impl Paced {
    fn new() -> Paced {
        Paced { next: Instant::now() }
    }

    /// Runs `read` if the last one was long enough ago for what it had cost.
    fn run<T>(&mut self, read: impl FnOnce() -> T) -> Option<T> {
        if Instant::now() < self.next {
            return None;
        }
        let before = thread_cpu_time();
        let result = read();
        self.next = Instant::now() + thread_cpu_time().saturating_sub(before) * PAUSE_FACTOR;
        Some(result)
    }
}

/// The processes that descend from one. Those whose parents have ended stay among them.
#[derive(Debug)]
pub(super) struct Processes {
    root: u32,
    /// When each started, in clock ticks since boot, and its parent.
    tracked: BTreeMap<u32, (u64, Option<u32>)>,
    proportional: Paced,
    reads_proportional: bool,
    shared: Paced,
    most_shared: u64,
}

impl Processes {
    pub(super) fn of(root: u32) -> Processes {
        Processes {
            root,
            tracked: BTreeMap::new(),
            proportional: Paced::new(),
            reads_proportional: kernel().is_some_and(|version| version >= KERNEL_WITHOUT_WAIT),
            shared: Paced::new(),
            most_shared: 0,
        }
    }

    /// The memory of all processes, by pid.
    pub(super) fn sample(&mut self) -> Vec<HostProcess> {
        self.follow();
        let pids: Vec<u32> = self.tracked.keys().copied().collect();
        let mut processes: Vec<HostProcess> = pids.into_iter().filter_map(memory).collect();
        if self.reads_proportional {
            self.proportional.run(|| {
                for process in &mut processes {
                    process.proportional_bytes = proportional(process.pid);
                }
            });
        }
        processes
    }

    /// Finds new processes, and forgets those that have ended.
    fn follow(&mut self) {
        let before = std::mem::take(&mut self.tracked);
        let mut todo: Vec<(u32, Option<u32>)> = before.iter().map(|(pid, (_, parent))| (*pid, *parent)).collect();
        todo.push((self.root, None));
        while let Some((pid, parent)) = todo.pop() {
            if self.tracked.contains_key(&pid) || self.tracked.len() >= MAX_PROCESSES {
                continue;
            }
            let dir = ProcessDir::of(pid);
            let Some(start) = dir.start_time() else { continue };
            // Another process with the pid of one that has ended.
            if before.get(&pid).is_some_and(|(known, _)| *known != start) {
                continue;
            }
            self.tracked.insert(pid, (start, parent));
            todo.extend(dir.children().into_iter().map(|child| (child, Some(pid))));
        }
    }

    /// The name of a process and its parent in the run.
    pub(super) fn name(&self, pid: u32) -> HostProcessName {
        let name = ProcessDir::of(pid).name().unwrap_or_default().chars().take(MAX_NAME).collect();
        HostProcessName { name, parent: self.tracked.get(&pid).and_then(|(_, parent)| *parent) }
    }

    /// The files in shared memory, if the processes have clearly more of it than ever.
    pub(super) fn shared_files(&mut self, sample: &HostSample) -> Option<Vec<HostSharedFile>> {
        let most = sample.processes.iter().map(|process| process.shared_bytes).max().unwrap_or(0);
        if most < LEAST_SHARED || most < self.most_shared + self.most_shared / 8 {
            return None;
        }
        let sharing = sample.processes.iter().filter(|process| process.shared_bytes >= LEAST_SHARED);
        let files = self.shared.run(|| {
            let maps = sharing.filter_map(|process| ProcessDir::of(process.pid).mappings());
            shared_files(maps)
        })?;
        self.most_shared = most;
        Some(files)
    }
}

/// The version of the kernel: major and minor.
fn kernel() -> Option<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The bytes after `name` in a text whose lines are `NAME: 12 kB`.
fn bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The memory of a process. `None` if it has ended.
fn memory(pid: u32) -> Option<HostProcess> {
    let status = ProcessDir::of(pid).status()?;
    Some(HostProcess {
        pid,
        // A process that has ended has no memory, and no such lines.
        anonymous_bytes: bytes(&status, "RssAnon")?,
        file_bytes: bytes(&status, "RssFile")?,
        shared_bytes: bytes(&status, "RssShmem")?,
        peak_bytes: bytes(&status, "VmHWM")?,
        proportional_bytes: None,
    })
}

fn proportional(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(ProcessDir::of(pid).file("smaps_rollup")).ok()?;
    bytes(&rollup, "Pss")
}

/// The machine's memory for new programs without swapping, in bytes. 0 if it is unknown.
pub(super) fn available_memory() -> u64 {
    std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| bytes(&text, "MemAvailable")).unwrap_or(0)
}

/// How many processes the kernel has killed since boot because memory was full. 0 before Linux 4.13.
pub(super) fn machine_kills() -> u64 {
    std::fs::read_to_string("/proc/vmstat").ok().and_then(|text| field(&text, "oom_kill")).unwrap_or(0)
}

/// `/dev/shm`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedMemory {
    exists: bool,
}

impl SharedMemory {
    /// The file system for shared memory, if it is one of its own.
    pub(super) fn find() -> SharedMemory {
        let device = |path: &str| std::fs::metadata(path).map(|meta| std::os::unix::fs::MetadataExt::dev(&meta)).ok();
        SharedMemory { exists: device("/dev/shm").is_some_and(|shm| Some(shm) != device("/dev")) }
    }

    fn blocks(self) -> Option<rustix::fs::StatVfs> {
        self.exists.then(|| rustix::fs::statvfs("/dev/shm").ok())?
    }

    /// Its size in bytes. 0 if it is unknown.
    pub(super) fn total(self) -> u64 {
        self.blocks().map_or(0, |blocks| blocks.f_blocks.saturating_mul(blocks.f_frsize))
    }

    /// The bytes in use.
    pub(super) fn used(self) -> u64 {
        let used = |blocks: rustix::fs::StatVfs| {
            blocks.f_blocks.saturating_sub(blocks.f_bfree).saturating_mul(blocks.f_frsize)
        };
        self.blocks().map_or(0, used)
    }
}

/// The files in shared memory of these lists of mappings, those with the most bytes first.
fn shared_files(maps: impl Iterator<Item = String>) -> Vec<HostSharedFile> {
    /// The bytes that a process has mapped of each file.
    type Mapped<'a> = BTreeMap<(&'a str, &'a str), (u64, &'a str)>;
    /// The bytes and the path of each file, by its device and inode.
    type Files = BTreeMap<(String, String), (u64, String)>;
    let (mut files, mut users) = (Files::new(), BTreeMap::<String, u64>::new());
    for text in maps {
        let mut mapped = Mapped::new();
        for line in text.lines() {
            let mut fields = line.splitn(6, ' ');
            let (range, _, _, device) = (fields.next(), fields.next(), fields.next(), fields.next());
            let (inode, path) = (fields.next(), fields.next().map(str::trim_start));
            let (Some(range), Some(device), Some(inode), Some(path)) = (range, device, inode, path) else { continue };
            // The rings of memtrace are not the program's.
            let is_own = path.starts_with("/memfd:memtrace");
            if is_own || !["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"].iter().any(|start| path.starts_with(start)) {
                continue;
            }
            let ends = range.split_once('-').map(|(start, end)| [start, end].map(|at| u64::from_str_radix(at, 16)));
            let Some([Ok(start), Ok(end)]) = ends else { continue };
            let file = mapped.entry((device, inode)).or_insert((0, path));
            file.0 = file.0.saturating_add(end.saturating_sub(start));
        }
        let mut names = BTreeSet::new();
        for ((device, inode), (bytes, path)) in mapped {
            let path = path.trim_end_matches(" (deleted)");
            let file = files.entry((device.to_owned(), inode.to_owned())).or_insert((0, path.to_owned()));
            file.0 = file.0.max(bytes);
            names.insert(general_name(path));
        }
        for name in names {
            *users.entry(name).or_default() += 1;
        }
    }
    let mut by_name: BTreeMap<String, HostSharedFile> = BTreeMap::new();
    for (bytes, path) in files.into_values() {
        let name = general_name(&path);
        let processes = users.get(&name).copied().unwrap_or(0);
        let shown = path.chars().take(MAX_FILE_NAME).collect();
        let file = by_name.entry(name.clone()).or_insert(HostSharedFile { name: shown, bytes: 0, files: 0, processes });
        file.bytes = file.bytes.saturating_add(bytes);
        file.files += 1;
        if file.files > 1 {
            file.name = name.chars().take(MAX_FILE_NAME).collect();
        }
    }
    let mut files: Vec<HostSharedFile> = by_name.into_values().collect();
    files.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    files.truncate(MAX_FILES);
    files
}

/// A name in which numbers are replaced, so that files of one kind have one name: `/dev/shm/torch_*_*_*`.
fn general_name(path: &str) -> String {
    // Semaphores, Python's shared memory and NCCL's buffers have names by chance.
    for prefix in ["/dev/shm/sem.", "/dev/shm/psm_", "/dev/shm/nccl-"] {
        if path.starts_with(prefix) {
            return format!("{prefix}*");
        }
    }
    let mut name = String::new();
    for c in path.chars() {
        match c {
            '0'..='9' if name.ends_with('*') => {}
            '0'..='9' => name.push('*'),
            c => name.push(c),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Duration;

    #[test]
    fn files_in_shared_memory_count_once_and_by_kind() {
        let worker = "7f0000000000-7f0000100000 rw-s 00000000 00:19 11  /dev/shm/torch_41_9_1 (deleted)\n\
                      7f0000100000-7f0000200000 rw-s 00100000 00:19 11  /dev/shm/torch_41_9_1 (deleted)\n\
                      7f0000200000-7f0000201000 rw-s 00000000 00:19 12  /dev/shm/torch_41_10_2 (deleted)\n\
                      7f0000201000-7f0000301000 rw-s 00000000 00:01 9  /memfd:memtrace (deleted)\n\
                      7f0000300000-7f0000400000 r-xp 00000000 08:01 13  /usr/lib/libc.so.6\n\
                      broken\n";
        let parent = "7f0000000000-7f0000200000 rw-s 00000000 00:19 11  /dev/shm/torch_41_9_1 (deleted)\n\
                      7f1000000000-7f1000001000 rw-s 00000000 00:01 5  /dev/shm/nccl-Ab1\n";
        let files = shared_files([worker, parent].map(str::to_owned).into_iter());
        let found: Vec<_> =
            files.iter().map(|file| (file.name.as_str(), file.bytes, file.files, file.processes)).collect();
        assert_eq!(found, [("/dev/shm/torch_*_*_*", (2 << 20) + 4096, 2, 2), ("/dev/shm/nccl-Ab1", 4096, 1, 1)]);
    }

    #[test]
    fn a_reading_pauses_for_what_it_costs() {
        let mut paced = Paced::new();
        let busy = || {
            let began = thread_cpu_time();
            while thread_cpu_time().saturating_sub(began) < Duration::from_millis(2) {}
        };
        assert!(paced.run(busy).is_some() && paced.run(busy).is_none());
        paced.next = Instant::now();
        assert!(paced.run(busy).is_some());
    }

    #[test]
    fn this_process_has_memory_and_one_that_has_ended_has_none() {
        let own = memory(std::process::id()).expect("this process");
        assert!(own.anonymous_bytes > 0 && own.peak_bytes > 0);
        assert_eq!(memory(u32::MAX), None);
        assert!(kernel().is_some_and(|(major, _)| major >= 3) && available_memory() > 0);
    }
}
