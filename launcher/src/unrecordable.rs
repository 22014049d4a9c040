//! Finds unrecordable processes: processes of the command in which memtrace cannot record.
//!
//! The dynamic loader may not preload the library, or the process may be unable to reach the launcher. No memtrace code
//! runs in such a process, so this module scans `/proc` from outside, at intervals.
//!
//! A process is not found if it lives for less than twice [`SCAN_INTERVAL`], or if it was orphaned before its first
//! scan. The scans take at most one fiftieth of a core.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_trace::options::{self, ENV};
use serde::Serialize;

use crate::preflight::{self, Linkage};
use crate::proc::ProcessDir;

/// The shortest interval between two scans.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);
/// The longest interval between two checks of a process in which no problem was found.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after a scan is at least this many times the scan's CPU time.
const PAUSE_FACTOR: u32 = 50;
/// The maximum number of processes that are tracked.
const MAX_TRACKED: usize = 65_536;
/// The maximum number of processes that are reported.
const MAX_REPORTED: usize = 256;

/// Why no event of a process can be recorded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Obstacle {
    OtherUser,
    StaticallyLinked,
    OtherMachine,
    PreloadRemoved,
    LibraryNotVisible,
    Privileged,
    SessionRemoved,
    NetworkNamespace,
    Seccomp,
    AddressSpaceLimit,
}

impl Obstacle {
    /// All obstacles.
    const ALL: [Obstacle; 10] = [
        Obstacle::OtherUser,
        Obstacle::StaticallyLinked,
        Obstacle::OtherMachine,
        Obstacle::PreloadRemoved,
        Obstacle::LibraryNotVisible,
        Obstacle::Privileged,
        Obstacle::SessionRemoved,
        Obstacle::NetworkNamespace,
        Obstacle::Seccomp,
        Obstacle::AddressSpaceLimit,
    ];

    /// The reason in `run.json` and in messages.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Obstacle::OtherUser => "it runs as another user",
            Obstacle::StaticallyLinked => "it is statically linked",
            Obstacle::OtherMachine => "it is a program for another machine, such as a 32-bit program",
            Obstacle::PreloadRemoved => "LD_PRELOAD in its environment does not name memtrace's library",
            Obstacle::LibraryNotVisible => "its file system does not contain memtrace's library (container or chroot)",
            Obstacle::Privileged => "its program has privileges (setuid, file capabilities)",
            Obstacle::SessionRemoved => "MEMTRACE_SESSION is not in its environment",
            Obstacle::NetworkNamespace => "it is in another network namespace (container)",
            Obstacle::Seccomp => "a seccomp filter prevents its connection to the launcher",
            Obstacle::AddressSpaceLimit => "its address space limit (ulimit -v) leaves no space for the recording",
        }
    }

    /// What to do so that such a process is recorded.
    pub(crate) fn fix(self) -> &'static str {
        match self {
            Obstacle::OtherUser => "run memtrace as that user: sudo -u USER memtrace -- COMMAND",
            Obstacle::StaticallyLinked => "run a dynamically linked build of the program",
            Obstacle::OtherMachine => "run a 64-bit build of the program",
            Obstacle::PreloadRemoved => {
                "pass LD_PRELOAD and MEMTRACE_SESSION to it, or start memtrace there: env -i ... memtrace -- COMMAND"
            }
            Obstacle::LibraryNotVisible | Obstacle::NetworkNamespace => {
                "start memtrace inside the container, before its command"
            }
            Obstacle::Privileged => "start memtrace from the privileged program: PROGRAM ... memtrace -- COMMAND",
            Obstacle::SessionRemoved => "pass MEMTRACE_SESSION to the process, together with LD_PRELOAD",
            Obstacle::Seccomp => "allow socket(AF_UNIX), connect, recvmsg and mmap in the seccomp filter",
            Obstacle::AddressSpaceLimit => "raise the limit: ulimit -v unlimited",
        }
    }

    /// The obstacle with this text.
    pub(crate) fn from_text(text: &str) -> Option<Obstacle> {
        Obstacle::ALL.into_iter().find(|obstacle| obstacle.text() == text)
    }
}

impl Serialize for Obstacle {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text())
    }
}

/// A process of the command that cannot be recorded.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct UnrecordableProcess {
    /// Its process id in the launcher's pid namespace.
    pub(crate) pid: u32,
    /// The path of its executable.
    pub(crate) program: String,
    /// Why nothing can be recorded.
    #[serde(rename = "reason")]
    pub(crate) obstacle: Obstacle,
    /// Whether it has CUDA loaded. False when this is unknown.
    pub(crate) uses_cuda: bool,
}

/// What the launcher put into the environment of the command.
#[derive(Clone, Debug)]
pub(crate) struct CommandEnvironment {
    /// The library in `LD_PRELOAD`.
    pub(crate) library: PathBuf,
    /// The number of seccomp filters that the launcher runs under.
    pub(crate) filters: u32,
}

/// A handle to the running scan thread.
#[derive(Debug)]
pub(crate) struct Scanner {
    stop: Sender<()>,
    thread: JoinHandle<Vec<UnrecordableProcess>>,
}

impl Scanner {
    /// Starts a thread that scans all descendants of this process.
    ///
    /// Fails when the thread cannot be created.
    pub(crate) fn start(environment: CommandEnvironment) -> std::io::Result<Scanner> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("memtrace-scan".into()).spawn(move || {
            let mut tree = ProcessTree::new(environment);
            let mut pause = SCAN_INTERVAL;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let began = thread_cpu_time();
                tree.scan();
                pause = SCAN_INTERVAL.max(thread_cpu_time().saturating_sub(began) * PAUSE_FACTOR);
            }
            tree.unrecordable.into_values().collect()
        })?;
        Ok(Scanner { stop, thread })
    }

    /// Stops the thread and returns the processes that it found. `recorded` are the pids of processes that recorded
    /// events after all; they are left out.
    pub(crate) fn finish(self, recorded: impl Iterator<Item = u32>) -> Vec<UnrecordableProcess> {
        drop(self.stop);
        let recorded: BTreeSet<u32> = recorded.collect();
        let mut found = self.thread.join().unwrap_or_default();
        found.retain(|process| !recorded.contains(&process.pid));
        found
    }
}

/// The launcher's descendants.
struct ProcessTree {
    environment: CommandEnvironment,
    /// The processes that were alive at the last scan.
    tracked: BTreeMap<u32, TrackedProcess>,
    /// The processes that cannot be recorded, by process id and start time.
    unrecordable: BTreeMap<(u32, u64), UnrecordableProcess>,
    own_network: Option<PathBuf>,
    /// The launcher's executable. Processes that run it belong to the launcher, not to the command.
    own_executable: Option<PathBuf>,
}

/// A process that an earlier scan has found.
struct TrackedProcess {
    start: u64,
    executable: Option<PathBuf>,
    /// When the process was last checked. The next check comes `wait` after that.
    checked: Instant,
    wait: Duration,
}

impl ProcessTree {
    fn new(environment: CommandEnvironment) -> ProcessTree {
        ProcessTree {
            environment,
            tracked: BTreeMap::new(),
            unrecordable: BTreeMap::new(),
            own_network: std::fs::read_link("/proc/self/ns/net").ok(),
            own_executable: std::fs::read_link("/proc/self/exe").ok(),
        }
    }

    fn scan(&mut self) {
        let mut before = std::mem::take(&mut self.tracked);
        // Keep the processes of the last scan: an orphaned process has another parent now, but still belongs to the
        // command.
        let mut todo: Vec<u32> = before.keys().copied().collect();
        todo.extend(ProcessDir::of(std::process::id()).children());
        while let Some(pid) = todo.pop() {
            if self.tracked.contains_key(&pid) || self.tracked.len() >= MAX_TRACKED {
                continue;
            }
            let dir = ProcessDir::of(pid);
            let Some(start) = dir.start_time() else { continue };
            let old = before.remove(&pid);
            if old.as_ref().is_some_and(|old| old.start != start) {
                continue; // the pid belongs to another process now
            }
            todo.extend(dir.children());
            let tracked = self.update(pid, start, &dir, old);
            self.tracked.insert(pid, tracked);
        }
    }

    /// Checks a process that is new, runs another executable, or is due for a check. Returns its updated state.
    fn update(&mut self, pid: u32, start: u64, dir: &ProcessDir, old: Option<TrackedProcess>) -> TrackedProcess {
        let executable = dir.executable();
        let wait = match old {
            Some(old) if old.executable == executable && old.checked.elapsed() < old.wait => return old,
            Some(old) if old.executable == executable => (old.wait * 2).min(MAX_CHECK_INTERVAL),
            Some(_) => SCAN_INTERVAL,
            // A new process may be between fork and exec, or may be a short-lived child. Check it at the next scan.
            None => return TrackedProcess { start, executable: None, checked: Instant::now(), wait: Duration::ZERO },
        };
        self.check(pid, start, dir, executable.as_deref());
        TrackedProcess { start, executable, checked: Instant::now(), wait }
    }

    fn check(&mut self, pid: u32, start: u64, dir: &ProcessDir, executable: Option<&Path>) {
        if executable.is_some() && executable == self.own_executable.as_deref() {
            return;
        }
        let key = (pid, start);
        let reported = self.unrecordable.get(&key);
        if reported.is_some_and(|process| process.uses_cuda)
            || reported.is_none() && self.unrecordable.len() >= MAX_REPORTED
        {
            return;
        }
        let Some((obstacle, may_be_loaded)) = self.obstacle(dir, executable) else {
            self.unrecordable.remove(&key);
            return;
        };
        // Read the mappings last, because the list may be long.
        let maps = dir.mappings();
        let uses_cuda = maps.as_deref().is_some_and(uses_cuda);
        let is_loaded = maps.is_some_and(|maps| maps.contains(&*self.environment.library.to_string_lossy()));
        // With the library loaded, only a process that uses CUDA can lose events. For the other obstacles, the library
        // must be absent.
        if may_be_loaded && uses_cuda && is_loaded || !may_be_loaded && !is_loaded {
            let program = executable.map_or_else(String::new, |exe| exe.to_string_lossy().into_owned());
            self.unrecordable.insert(key, UnrecordableProcess { pid, program, obstacle, uses_cuda });
        }
    }

    /// Why the process cannot be recorded, and whether the library is loaded nevertheless. `None` when no obstacle was
    /// found.
    fn obstacle(&self, dir: &ProcessDir, executable: Option<&Path>) -> Option<(Obstacle, bool)> {
        let Some(executable) = executable else {
            return (!dir.is_of_our_user()).then_some((Obstacle::OtherUser, false));
        };
        match preflight::linkage(&dir.file("exe"))? {
            Linkage::Static => return Some((Obstacle::StaticallyLinked, false)),
            Linkage::Foreign => return Some((Obstacle::OtherMachine, false)),
            Linkage::Dynamic => {}
        }
        let environment = dir.variables()?;
        // Programs that change their process title overwrite the environment. It is then unreadable.
        if environment.iter().any(|variable| !variable.contains('=')) {
            return None;
        }
        let library = self.environment.library.as_path();
        let preload = environment.iter().find_map(|v| v.strip_prefix("LD_PRELOAD="));
        if !preload.is_some_and(|preload| preload.split([':', ' ']).any(|entry| Path::new(entry) == library)) {
            return Some((Obstacle::PreloadRemoved, false));
        }
        let inside = library.strip_prefix("/").map_or_else(|_| library.to_owned(), |l| dir.file("root").join(l));
        if !inside.exists() {
            return Some((Obstacle::LibraryNotVisible, false));
        }
        if preflight::is_privileged(executable) {
            return Some((Obstacle::Privileged, false));
        }
        let session = format!("{ENV}=");
        if !environment.iter().any(|v| v.starts_with(&session)) {
            return Some((Obstacle::SessionRemoved, true));
        }
        if dir.network().is_some() && dir.network() != self.own_network {
            return Some((Obstacle::NetworkNamespace, true));
        }
        if dir.status().is_some_and(|status| options::filters_in(&status) > self.environment.filters) {
            return Some((Obstacle::Seccomp, true));
        }
        dir.has_address_limit().then_some((Obstacle::AddressSpaceLimit, true))
    }
}

/// The CPU time that this thread has used.
fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Whether a process with these mappings has loaded CUDA or mapped a GPU device.
fn uses_cuda(maps: &str) -> bool {
    ["/libcuda.so", "/dev/nvidia"].iter().any(|sign| maps.contains(sign))
}

/// The processes by obstacle, each group as a text such as `python3 (7), python3 (8) and 2 more`.
pub(crate) fn by_obstacle(processes: &[UnrecordableProcess]) -> BTreeMap<Obstacle, String> {
    const SHOWN: usize = 3;
    let mut names: BTreeMap<Obstacle, Vec<String>> = BTreeMap::new();
    for process in processes {
        let name = Path::new(&process.program).file_name().map(|n| n.to_string_lossy().into_owned());
        let name = format!("{} ({})", name.unwrap_or_default(), process.pid);
        names.entry(process.obstacle).or_default().push(name);
    }
    let list = |names: Vec<String>| match names.len().saturating_sub(SHOWN) {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ")),
    };
    names.into_iter().map(|(obstacle, names)| (obstacle, list(names))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_grouped_by_obstacle() {
        let process =
            |pid, obstacle| UnrecordableProcess { pid, program: "/usr/bin/python3".into(), obstacle, uses_cuda: true };
        assert!(by_obstacle(&[]).is_empty());
        let all: Vec<UnrecordableProcess> =
            (1..=5).map(|pid| process(pid, Obstacle::Seccomp)).chain([process(9, Obstacle::OtherUser)]).collect();
        let groups: Vec<_> = by_obstacle(&all).into_iter().collect();
        let seccomp = "python3 (1), python3 (2), python3 (3) and 2 more";
        assert_eq!(groups, [(Obstacle::OtherUser, "python3 (9)".into()), (Obstacle::Seccomp, seccomp.into())]);
    }

    #[test]
    fn obstacles_are_found_by_their_text() {
        assert!(Obstacle::ALL.iter().all(|obstacle| Obstacle::from_text(obstacle.text()) == Some(*obstacle)));
    }

    #[test]
    fn cuda_is_detected_by_driver_library_and_device() {
        assert!(uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.1\n"));
        assert!(uses_cuda("7f00-7f01 rw-s 00000000 08:01 1 /dev/nvidiactl\n"));
        assert!(!uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /opt/libcudart.so.12\n"));
    }
}
