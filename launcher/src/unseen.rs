//! Finds processes of the command that use CUDA but cannot be recorded.
//!
//! The dynamic loader may not preload the library, or the process may be unable to reach the launcher. No memtrace code
//! runs in such a process, so this module scans `/proc` from outside, at intervals.
//!
//! A process is not found if it lives for less than twice [`EVERY`], or if it was orphaned before its first scan. The
//! scans take at most one fiftieth of a core.

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
const EVERY: Duration = Duration::from_millis(100);
/// The longest interval between two checks of a process in which no problem was found.
const SELDOM: Duration = Duration::from_secs(2);
/// The pause after a scan is at least this many times the scan's CPU time.
const SHARE: u32 = 50;
/// The maximum number of processes that are tracked.
const MAX_KNOWN: usize = 65_536;
/// The maximum number of processes that are reported.
const MAX_TOLD: usize = 256;

/// A process that was not recorded.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Unseen {
    /// Its process id in the launcher's pid namespace.
    pub(crate) pid: u32,
    /// The path of its executable.
    pub(crate) program: String,
    /// Why nothing can be recorded.
    pub(crate) reason: &'static str,
    /// Whether it has CUDA loaded. False when this is unknown.
    pub(crate) uses_cuda: bool,
}

/// What the launcher put into the environment of the command.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// The library in `LD_PRELOAD`.
    pub(crate) library: PathBuf,
    /// The number of seccomp filters that the launcher runs under.
    pub(crate) filters: u32,
}

/// A handle to the running scan thread.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Unseen>>,
}

impl Watch {
    /// Starts a thread that scans all descendants of this process.
    ///
    /// Fails when the thread cannot be created.
    pub(crate) fn start(given: Given) -> std::io::Result<Watch> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("memtrace-unseen".into()).spawn(move || {
            let mut family = Family::new(given);
            let mut pause = EVERY;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let began = worked();
                family.look();
                pause = EVERY.max(worked().saturating_sub(began) * SHARE);
            }
            family.unseen.into_values().collect()
        })?;
        Ok(Watch { stop, thread })
    }

    /// Stops the thread and returns the processes that it found. `recorded` are the pids of processes that recorded
    /// events after all; they are left out.
    pub(crate) fn finish(self, recorded: impl Iterator<Item = u32>) -> Vec<Unseen> {
        drop(self.stop);
        let recorded: BTreeSet<u32> = recorded.collect();
        let mut found = self.thread.join().unwrap_or_default();
        found.retain(|unseen| !recorded.contains(&unseen.pid));
        found
    }
}

/// The launcher's descendants.
struct Family {
    given: Given,
    /// The processes that were alive at the last scan.
    known: BTreeMap<u32, Known>,
    unseen: BTreeMap<(u32, u64), Unseen>,
    own_network: Option<PathBuf>,
    /// The launcher's executable. Processes that run it belong to the launcher, not to the command.
    own_executable: Option<PathBuf>,
}

/// A process that an earlier scan has seen.
struct Known {
    start: u64,
    executable: Option<PathBuf>,
    /// When the process was last checked. The next check comes `wait` after that.
    judged: Instant,
    wait: Duration,
}

impl Family {
    fn new(given: Given) -> Family {
        let own_network = std::fs::read_link("/proc/self/ns/net").ok();
        let own_executable = std::fs::read_link("/proc/self/exe").ok();
        Family { given, known: BTreeMap::new(), unseen: BTreeMap::new(), own_network, own_executable }
    }

    fn look(&mut self) {
        let mut before = std::mem::take(&mut self.known);
        // Keep the processes of the last scan: an orphaned process has another parent now, but still belongs to the
        // command.
        let mut todo: Vec<u32> = before.keys().copied().collect();
        todo.extend(ProcessDir::of(std::process::id()).children());
        while let Some(pid) = todo.pop() {
            if self.known.contains_key(&pid) || self.known.len() >= MAX_KNOWN {
                continue;
            }
            let dir = ProcessDir::of(pid);
            let Some(start) = dir.start_time() else { continue };
            let old = before.remove(&pid);
            if old.as_ref().is_some_and(|old| old.start != start) {
                continue; // the pid belongs to another process now
            }
            todo.extend(dir.children());
            let known = self.known_again(pid, start, &dir, old);
            self.known.insert(pid, known);
        }
    }

    /// Checks a process that is new, runs another executable, or is due for a check. Returns its updated state.
    fn known_again(&mut self, pid: u32, start: u64, dir: &ProcessDir, old: Option<Known>) -> Known {
        let executable = dir.executable();
        let wait = match old {
            Some(old) if old.executable == executable && old.judged.elapsed() < old.wait => return old,
            Some(old) if old.executable == executable => (old.wait * 2).min(SELDOM),
            Some(_) => EVERY,
            // A new process may be between fork and exec, or may be a short-lived child. Check it at the next scan.
            None => return Known { start, executable: None, judged: Instant::now(), wait: Duration::ZERO },
        };
        self.judge(pid, start, dir, executable.as_deref());
        Known { start, executable, judged: Instant::now(), wait }
    }

    fn judge(&mut self, pid: u32, start: u64, dir: &ProcessDir, executable: Option<&Path>) {
        if executable.is_some() && executable == self.own_executable.as_deref() {
            return;
        }
        let key = (pid, start);
        let told = self.unseen.get(&key);
        if told.is_some_and(|unseen| unseen.uses_cuda) || told.is_none() && self.unseen.len() >= MAX_TOLD {
            return;
        }
        let Some((reason, loaded)) = self.reason(dir, executable) else {
            self.unseen.remove(&key);
            return;
        };
        // Read the mappings last, because the list may be long.
        let maps = dir.mappings();
        let uses_cuda = maps.as_deref().is_some_and(uses_cuda);
        let is_loaded = maps.is_some_and(|maps| maps.contains(&*self.given.library.to_string_lossy()));
        // With the library loaded, only a process that uses CUDA can lose events. For the other reasons, the library
        // must be absent.
        if loaded && uses_cuda && is_loaded || !loaded && !is_loaded {
            let program = executable.map_or_else(String::new, |exe| exe.to_string_lossy().into_owned());
            self.unseen.insert(key, Unseen { pid, program, reason, uses_cuda });
        }
    }

    /// Why the process cannot be recorded, and whether the library is loaded nevertheless. `None` when no obstacle was
    /// found.
    fn reason(&self, dir: &ProcessDir, executable: Option<&Path>) -> Option<(&'static str, bool)> {
        let Some(executable) = executable else {
            return (!dir.is_of_our_user()).then_some(("it runs as another user, with privileges of its own", false));
        };
        match preflight::linkage(&dir.file("exe"))? {
            Linkage::Static => return Some(("it is statically linked", false)),
            Linkage::Foreign => return Some(("it is a program for another machine (32-bit?)", false)),
            Linkage::Dynamic => {}
        }
        let environment = dir.variables()?;
        // Programs that change their process title overwrite the environment. It is then unreadable.
        if environment.iter().any(|variable| !variable.contains('=')) {
            return None;
        }
        let library = self.given.library.as_path();
        let preload = environment.iter().find_map(|v| v.strip_prefix("LD_PRELOAD="));
        if !preload.is_some_and(|preload| preload.split([':', ' ']).any(|entry| Path::new(entry) == library)) {
            return Some(("LD_PRELOAD was taken out of its environment, or set anew", false));
        }
        let inside = library.strip_prefix("/").map_or_else(|_| library.to_owned(), |l| dir.file("root").join(l));
        if !inside.exists() {
            return Some(("memtrace's library is not in its file system (a container, chroot)", false));
        }
        if preflight::is_privileged(executable) {
            return Some(("its program has privileges (setuid, file capabilities): nothing can be preloaded", false));
        }
        let session = format!("{ENV}=");
        if !environment.iter().any(|v| v.starts_with(&session)) {
            return Some(("MEMTRACE_SESSION was taken out of its environment", true));
        }
        if dir.network().is_some() && dir.network() != self.own_network {
            return Some(("it is in a network namespace of its own (a container)", true));
        }
        if dir.status().is_some_and(|status| options::filters_in(&status) > self.given.filters) {
            return Some(("a filter of system calls (seccomp) of its own keeps it from reaching the launcher", true));
        }
        dir.has_address_limit()
            .then_some(("its address space is limited (ulimit -v): there is no room for the recording", true))
    }
}

/// The CPU time that this thread has used.
fn worked() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a `timespec` on this stack frame and valid for writes. The clock id is a constant that Linux
    // supports.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Whether a process with these mappings has loaded CUDA or mapped a GPU device.
fn uses_cuda(maps: &str) -> bool {
    ["/libcuda.so", "/dev/nvidia"].iter().any(|sign| maps.contains(sign))
}

/// Summarizes the processes in one line. `None` when there are none.
pub(crate) fn in_words(unseen: &[Unseen]) -> Option<String> {
    const SHOWN: usize = 3;
    let mut by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for one in unseen {
        let name = Path::new(&one.program).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        by_reason.entry(one.reason).or_default().push(format!("{name} ({})", one.pid));
    }
    let parts: Vec<String> = by_reason
        .iter()
        .map(|(reason, names)| {
            let more = names.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{}{more}: {reason}", names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", "))
        })
        .collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_reason_is_said_once() {
        let unseen = |pid, reason| Unseen { pid, program: "/usr/bin/python3".into(), reason, uses_cuda: true };
        assert_eq!(in_words(&[]), None);
        let all: Vec<Unseen> = (1..=5).map(|pid| unseen(pid, "b")).chain([unseen(9, "a")]).collect();
        assert_eq!(in_words(&all).unwrap(), "python3 (9): a; python3 (1), python3 (2), python3 (3) and 2 more: b");
    }

    #[test]
    fn cuda_is_known_by_its_driver() {
        assert!(uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.1\n"));
        assert!(uses_cuda("7f00-7f01 rw-s 00000000 08:01 1 /dev/nvidiactl\n"));
        assert!(!uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /opt/libcudart.so.12\n"));
    }
}
