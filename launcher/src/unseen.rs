//! Processes of the command that use CUDA where nothing can be recorded: the loader was told to preload nothing, or cannot, or the
//! process cannot reach us. Nothing of ours runs there, so they are looked for from outside, in `/proc`, now and then.
//!
//! A process that lives for less than twice [`EVERY`], or that was orphaned before it was first seen, is not found. Looking takes at most a
//! fiftieth of a core.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_trace::options::{self, ENV};
use serde::Serialize;

use crate::preflight::{self, Linkage};
use crate::proc::ProcessDir;

/// How often is looked.
const EVERY: Duration = Duration::from_millis(100);
/// How often a process is looked at that was found in order.
const SELDOM: Duration = Duration::from_secs(2);
/// Looking may take this part of the time.
const SHARE: u32 = 50;
/// The most processes that are kept in mind.
const MAX_KNOWN: usize = 65_536;
/// The most that are told.
const MAX_TOLD: usize = 256;

/// A process that was not recorded.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Unseen {
    /// Its process id, as the launcher sees it.
    pub(crate) pid: u32,
    /// What it executes.
    pub(crate) program: String,
    /// Why nothing can be recorded.
    pub(crate) reason: &'static str,
    /// Whether it has CUDA loaded. Where this cannot be known it is false.
    pub(crate) uses_cuda: bool,
}

/// What the environment of the command was given.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    /// The library in LD_PRELOAD.
    pub(crate) library: PathBuf,
    /// Filters of system calls that the launcher runs under.
    pub(crate) filters: u32,
}

/// The looking, under way.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Unseen>>,
}

impl Watch {
    /// Begins to look at all descendants of this process.
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

    /// Ends it; gives what was found, without the processes that were recorded after all.
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
    /// Those that were alive at the last look.
    known: BTreeMap<u32, Known>,
    unseen: BTreeMap<(u32, u64), Unseen>,
    own_network: Option<PathBuf>,
    /// Its processes are the launcher's own, and none of the command's.
    own_executable: Option<PathBuf>,
}

/// A process that was seen before.
struct Known {
    start: u64,
    executable: Option<PathBuf>,
    /// Judged when, and when again.
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
        // Whose parent has died has another one now, but is still of this family.
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
                continue; // another process's number by now
            }
            todo.extend(dir.children());
            let known = self.known_again(pid, start, &dir, old);
            self.known.insert(pid, known);
        }
    }

    /// Judges a process when it is new, executes something else, or was not looked at for a while.
    fn known_again(&mut self, pid: u32, start: u64, dir: &ProcessDir, old: Option<Known>) -> Known {
        let executable = dir.executable();
        let wait = match old {
            Some(old) if old.executable == executable && old.judged.elapsed() < old.wait => return old,
            Some(old) if old.executable == executable => (old.wait * 2).min(SELDOM),
            Some(_) => EVERY,
            // At first sight it may be in the middle of something: a fork before its exec, a child that only tries something.
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
        // Only now: the list of mappings may be long.
        let maps = dir.mappings();
        let uses_cuda = maps.as_deref().is_some_and(uses_cuda);
        let is_loaded = maps.is_some_and(|maps| maps.contains(&*self.given.library.to_string_lossy()));
        // A process that has our library and says nothing has not allocated, as far as anybody knows.
        if loaded && uses_cuda && is_loaded || !loaded && !is_loaded {
            let program = executable.map_or_else(String::new, |exe| exe.to_string_lossy().into_owned());
            self.unseen.insert(key, Unseen { pid, program, reason, uses_cuda });
        }
    }

    /// What speaks against a recording, and whether our library is loaded all the same.
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
        // Programs that change their title write over it.
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

/// How long this thread has been at work.
fn worked() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Whether a process with these mappings has CUDA loaded, or a device of it open.
fn uses_cuda(maps: &str) -> bool {
    ["/libcuda.so", "/dev/nvidia"].iter().any(|sign| maps.contains(sign))
}

/// Says it in one line; `None` where there is nothing to say.
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
