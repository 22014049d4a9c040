//! Watches the processes of the command from outside, and finds those that cannot be recorded.
//!
//! The dynamic loader may not preload the library, or the process may be unable to reach the launcher. No memtrace code
//! runs in the first kind, so this module reads `/proc`.
//!
//! Where the kernel reports every exec ([`ProcessEvents`]), each new program is checked at once. The library announces
//! itself in every program that it is loaded into (interpose/src/recording/announce.rs), and reports itself what it
//! cannot record there. Any other program that ends before its check is counted.
//!
//! Elsewhere the module searches for new processes every [`NEW_PROCESS_INTERVAL`]. A process that lives for less than
//! that, or that was orphaned before it was first seen, is not found, and not counted.
//!
//! The checks take at most one fiftieth of a core, and [`FREE_TIME`]. Where the user may, their thread runs before all
//! ordinary threads, so that a short program is checked on a busy machine too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_analysis::load::Discovery;
use memtrace_trace::options::{self, ENV};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::epoll::EventFd;
use crate::preflight::{self, Linkage};
use crate::proc::ProcessDir;
use crate::process_events::{ProcessEvent, ProcessEvents};
use crate::unrecordable::{Obstacle, UnrecordableProcess};

/// The shortest interval between two scans of all processes.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);
/// The interval between two searches for new processes where the kernel does not report them.
const NEW_PROCESS_INTERVAL: Duration = Duration::from_millis(10);
/// The longest interval between two checks of a process in which no problem was found.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after a scan is at least this many times the scan's CPU time, and the CPU time of all checks at most 2 %
/// (1/50) of the run's time.
const PAUSE_FACTOR: u32 = 50;
/// The CPU time that checks of new programs may take at any time, for a command that begins with many programs.
const FREE_TIME: Duration = Duration::from_millis(500);
/// The maximum number of processes that are tracked.
const MAX_TRACKED: usize = 65_536;
/// The maximum number of processes that are listed.
const MAX_LISTED: usize = 256;

/// The settings of the launcher in the environment of the command.
#[derive(Clone, Debug)]
pub(crate) struct CommandEnvironment {
    /// The library in `LD_PRELOAD`.
    pub(crate) library: PathBuf,
    /// The number of seccomp filters that the launcher runs under.
    pub(crate) filters: u32,
}

/// The results of the watch.
#[derive(Clone, Default, Debug)]
pub(crate) struct Watched {
    /// The processes that cannot be recorded, at most [`MAX_LISTED`].
    pub(crate) unrecordable: Vec<UnrecordableProcess>,
    /// The number of further ones.
    pub(crate) unlisted: u64,
    /// The number of programs that ended before they were checked.
    pub(crate) unchecked: u64,
    pub(crate) discovery: Discovery,
}

/// The results of the thread.
#[derive(Clone, Default, Debug)]
struct Found {
    watched: Watched,
    /// By pid: the number of programs that ended before they were checked. [`Watched::unchecked`] has those of further
    /// pids.
    unchecked: BTreeMap<u32, u64>,
}

impl Found {
    /// The result without the processes that recorded events.
    fn without(self, recorded: &BTreeSet<u32>) -> Watched {
        let mut watched = self.watched;
        watched.unrecordable.retain(|process| !recorded.contains(&process.pid));
        let unchecked = self.unchecked.iter().filter(|(pid, _)| !recorded.contains(pid));
        watched.unchecked += unchecked.map(|(_, count)| count).sum::<u64>();
        watched
    }
}

/// A handle to the watching thread.
#[derive(Debug)]
pub(crate) struct ProcessWatch {
    stop: EventFd,
    thread: JoinHandle<Found>,
}

impl ProcessWatch {
    /// Starts a thread that watches all descendants of this process. The command must not run yet.
    ///
    /// Fails when the thread or a descriptor cannot be created.
    pub(crate) fn start(environment: CommandEnvironment) -> std::io::Result<ProcessWatch> {
        let stop = EventFd::new()?;
        let stopped = stop.try_clone()?;
        let events = ProcessEvents::subscribe();
        let thread = std::thread::Builder::new()
            .name("memtrace-scan".into())
            .spawn(move || Watcher::new(environment, events).run(&stopped))?;
        Ok(ProcessWatch { stop, thread })
    }

    /// Stops the thread and returns what it found. `recorded` are the pids of processes that recorded events after all;
    /// they are left out.
    pub(crate) fn finish(self, recorded: impl Iterator<Item = u32>) -> Watched {
        self.stop.raise();
        let recorded: BTreeSet<u32> = recorded.collect();
        self.thread.join().unwrap_or_default().without(&recorded)
    }
}

/// The loop of the thread.
struct Watcher {
    tree: ProcessTree,
    events: Option<ProcessEvents>,
    last_pid: LastPid,
    started: Instant,
    next_scan: Instant,
}

impl Watcher {
    fn new(environment: CommandEnvironment, events: Option<ProcessEvents>) -> Watcher {
        let now = Instant::now();
        let tree = ProcessTree::new(environment, events.is_some());
        Watcher { tree, events, last_pid: LastPid::new(), started: now, next_scan: now + SCAN_INTERVAL }
    }

    fn run(mut self, stop: &EventFd) -> Found {
        run_before_others();
        let mut discovery = if self.events.is_some() { Discovery::KernelReports } else { Discovery::Scans };
        loop {
            let is_stopped = self.wait(stop);
            if self.take_events() {
                // Reports are missing. Scans find what is there to be found from now on.
                (self.events, discovery) = (None, Discovery::Scans);
                self.tree.has_reports = false;
            }
            if is_stopped {
                // Processes may have outlived the command.
                self.tree.scan();
                break;
            }
            if Instant::now() >= self.next_scan || self.events.is_none() && self.has_new_processes() {
                let began = thread_cpu_time();
                self.tree.scan();
                let pause = (thread_cpu_time().saturating_sub(began)) * PAUSE_FACTOR;
                // A process that cannot be recorded may load CUDA soon.
                let interval = if self.tree.has_new_suspect() { NEW_PROCESS_INTERVAL } else { SCAN_INTERVAL };
                self.next_scan = Instant::now() + interval.max(pause);
            }
        }
        self.tree.count_unchecked_now();
        let ProcessTree { unrecordable, unlisted, unchecked, uncounted, .. } = self.tree;
        let watched = Watched {
            unrecordable: unrecordable.into_values().collect(),
            unlisted: unlisted.len() as u64,
            unchecked: uncounted,
            discovery,
        };
        Found { watched, unchecked }
    }

    /// Waits for a report, for the next scan or for the end. Returns whether it is the end.
    fn wait(&self, stop: &EventFd) -> bool {
        let mut pause = self.next_scan.saturating_duration_since(Instant::now());
        if self.events.is_none() {
            pause = pause.min(NEW_PROCESS_INTERVAL);
        }
        let timeout = Timespec::try_from(pause).ok();
        let mut fds = vec![PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
        fds.extend(self.events.as_ref().map(|events| PollFd::from_borrowed_fd(events.as_fd(), PollFlags::IN)));
        // An interrupted wait reports nothing.
        poll(&mut fds, timeout.as_ref()).is_ok() && !fds[0].revents().is_empty()
    }

    /// Handles all reports that have arrived. Returns whether some were lost.
    fn take_events(&mut self) -> bool {
        while let Some(event) = self.events.as_ref().and_then(ProcessEvents::next) {
            match event {
                ProcessEvent::Fork { parent, child } => self.tree.forked(parent, child),
                ProcessEvent::Exec { pid } => {
                    let has_time = self.has_time();
                    self.tree.executed(pid, has_time);
                    if self.tree.has_new_suspect() {
                        self.next_scan = self.next_scan.min(Instant::now() + NEW_PROCESS_INTERVAL);
                    }
                }
                ProcessEvent::Name { pid, name } => self.tree.named(pid, name),
                ProcessEvent::Exit { pid } => self.tree.ended(pid),
                ProcessEvent::Gap => return true,
            }
        }
        false
    }

    /// Whether the checks have used less than their share of time.
    fn has_time(&self) -> bool {
        thread_cpu_time() < FREE_TIME + self.started.elapsed() / PAUSE_FACTOR
    }

    /// Whether a process may have started since the last call, and there is time for a scan.
    fn has_new_processes(&mut self) -> bool {
        self.has_time() && (self.last_pid.has_changed() || self.tree.has_unchecked())
    }
}

/// The pid that the kernel assigned last, in the launcher's pid namespace: the last number of `/proc/loadavg`.
struct LastPid {
    file: Option<File>,
    last: Vec<u8>,
}

impl LastPid {
    fn new() -> LastPid {
        LastPid { file: File::open("/proc/loadavg").ok(), last: Vec::new() }
    }

    /// Whether it has changed since the last call. True when it is unknown.
    fn has_changed(&mut self) -> bool {
        let mut text = [0; 128];
        let Some(size) = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()) else { return true };
        let last = text[..size].split(|b| *b == b' ').next_back().unwrap_or_default();
        let has_changed = last != self.last;
        if has_changed {
            self.last = last.to_owned();
        }
        has_changed
    }
}

/// The launcher's descendants.
struct ProcessTree {
    environment: CommandEnvironment,
    /// Whether the kernel reports every exec and exit.
    has_reports: bool,
    own_pid: u32,
    /// The processes that were alive at the last scan or report.
    tracked: BTreeMap<u32, TrackedProcess>,
    /// The processes that cannot be recorded, by process id and start time.
    unrecordable: BTreeMap<(u32, u64), UnrecordableProcess>,
    /// The processes for which that list had no place.
    unlisted: BTreeSet<(u32, u64)>,
    /// By pid: the number of programs that ended before they were checked.
    unchecked: BTreeMap<u32, u64>,
    /// Those of the pids for which that table had no place.
    uncounted: u64,
    own_network: Option<PathBuf>,
    /// The launcher's executable. Processes that run it belong to the launcher, not to the command.
    own_executable: Option<PathBuf>,
}

/// A process of the command.
struct TrackedProcess {
    /// Its start time. `None` before its first scan.
    start: Option<u64>,
    executable: Option<PathBuf>,
    /// Whether its program was checked since it was executed.
    is_checked: bool,
    announcement: Announcement,
    /// When the process was last checked. The next check comes `wait` after that.
    checked: Instant,
    wait: Duration,
}

impl TrackedProcess {
    /// Whether it is unknown if its program can be recorded.
    fn is_unknown(&self) -> bool {
        !self.is_checked && !self.announcement.is_complete
    }

    /// A process that still runs the program of its parent.
    fn forked() -> TrackedProcess {
        TrackedProcess {
            start: None,
            executable: None,
            is_checked: true,
            announcement: Announcement::default(),
            checked: Instant::now(),
            wait: Duration::ZERO,
        }
    }
}

/// The state of the library's announcement, from the names that a program has set.
#[derive(Clone, Copy, Default)]
struct Announcement {
    last: Option<[u8; 16]>,
    /// Whether the library has announced itself: two equal names in a row.
    is_complete: bool,
}

impl Announcement {
    fn name(&mut self, name: [u8; 16]) {
        self.is_complete |= self.last.replace(name) == Some(name);
    }
}

/// The result of a check.
enum CheckResult {
    /// No obstacle.
    Clear,
    /// The process cannot be recorded. The flag says whether the library may be loaded nevertheless.
    Obstacle(Obstacle, bool),
    /// The process has ended, or does not show what it is.
    Unknown,
}

impl ProcessTree {
    fn new(environment: CommandEnvironment, has_reports: bool) -> ProcessTree {
        ProcessTree {
            environment,
            has_reports,
            own_pid: std::process::id(),
            tracked: BTreeMap::new(),
            unrecordable: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            unchecked: BTreeMap::new(),
            uncounted: 0,
            own_network: std::fs::read_link("/proc/self/ns/net").ok(),
            own_executable: std::fs::read_link("/proc/self/exe").ok(),
        }
    }

    fn forked(&mut self, parent: u32, child: u32) {
        let is_ours = parent == self.own_pid || self.tracked.contains_key(&parent);
        if is_ours && self.tracked.len() < MAX_TRACKED {
            self.tracked.insert(child, TrackedProcess::forked());
        }
    }

    /// Checks a process that executes a new program. Without time, the next scan checks it.
    fn executed(&mut self, pid: u32, has_time: bool) {
        let Some(process) = self.tracked.get_mut(&pid) else { return };
        (process.is_checked, process.announcement) = (false, Announcement::default());
        process.wait = Duration::ZERO;
        if has_time {
            let old = self.tracked.remove(&pid);
            self.scan_process(pid, &ProcessDir::of(pid), old);
        }
    }

    fn named(&mut self, pid: u32, name: [u8; 16]) {
        if let Some(process) = self.tracked.get_mut(&pid) {
            process.announcement.name(name);
        }
    }

    fn ended(&mut self, pid: u32) {
        if self.tracked.remove(&pid).is_some_and(|process| process.is_unknown()) {
            self.count_unchecked(pid);
        }
    }

    fn count_unchecked(&mut self, pid: u32) {
        if self.unchecked.len() < MAX_TRACKED || self.unchecked.contains_key(&pid) {
            *self.unchecked.entry(pid).or_default() += 1;
        } else {
            self.uncounted += 1;
        }
    }

    /// Counts the processes that still wait for a check.
    fn count_unchecked_now(&mut self) {
        let waiting: Vec<u32> =
            self.tracked.iter().filter(|(_, process)| process.is_unknown()).map(|(pid, _)| *pid).collect();
        waiting.into_iter().for_each(|pid| self.count_unchecked(pid));
    }

    /// Whether a process that cannot be recorded was found within about the last [`SCAN_INTERVAL`], and not seen with
    /// CUDA.
    fn has_new_suspect(&self) -> bool {
        self.unrecordable.iter().any(|((pid, start), process)| {
            let tracked = self.tracked.get(pid).filter(|tracked| tracked.start == Some(*start));
            !process.uses_cuda && tracked.is_some_and(|tracked| tracked.wait < SCAN_INTERVAL)
        })
    }

    /// Whether a process waits for its first check.
    fn has_unchecked(&self) -> bool {
        self.tracked.values().any(|process| !process.is_checked)
    }

    fn scan(&mut self) {
        let mut before = std::mem::take(&mut self.tracked);
        // Keep the processes of the last scan: an orphaned process has another parent now, but still belongs to the
        // command.
        let mut todo: Vec<u32> = before.keys().copied().collect();
        todo.extend(ProcessDir::of(self.own_pid).children());
        while let Some(pid) = todo.pop() {
            if self.tracked.contains_key(&pid) || self.tracked.len() >= MAX_TRACKED {
                continue;
            }
            let dir = ProcessDir::of(pid);
            let old = before.remove(&pid);
            todo.extend(dir.children());
            self.scan_process(pid, &dir, old);
        }
    }

    /// Updates what is known about a process, and tracks it while it exists.
    fn scan_process(&mut self, pid: u32, dir: &ProcessDir, old: Option<TrackedProcess>) {
        let start = dir.start_time();
        let is_other = old.as_ref().and_then(|old| old.start).is_some_and(|before| start != Some(before));
        let Some(start) = start.filter(|_| !is_other) else {
            // The process has ended. The pid may belong to another one.
            match old {
                // Its further reports are on their way: an announcement, and its end.
                Some(old) if self.has_reports => drop(self.tracked.insert(pid, old)),
                Some(old) if old.is_unknown() => self.count_unchecked(pid),
                _ => {}
            }
            return;
        };
        let is_new = old.is_none();
        let tracked = self.update(pid, start, dir, old);
        // The end of this one is already reported: nobody has collected its exit status.
        if is_new && self.has_reports && tracked.is_unknown() {
            return;
        }
        self.tracked.insert(pid, tracked);
    }

    /// Checks a process that is new, runs another executable, or is due for a check. Returns its updated state.
    fn update(&mut self, pid: u32, start: u64, dir: &ProcessDir, old: Option<TrackedProcess>) -> TrackedProcess {
        let executable = dir.executable();
        let announcement = old.as_ref().map(|old| old.announcement).unwrap_or_default();
        let wait = match old {
            Some(old) if old.is_checked && old.executable == executable && old.checked.elapsed() < old.wait => {
                return TrackedProcess { start: Some(start), ..old };
            }
            Some(old) if old.executable == executable => (old.wait * 2).clamp(NEW_PROCESS_INTERVAL, MAX_CHECK_INTERVAL),
            _ => NEW_PROCESS_INTERVAL,
        };
        let is_checked = self.check(pid, start, dir, executable.as_deref());
        TrackedProcess { start: Some(start), executable, is_checked, announcement, checked: Instant::now(), wait }
    }

    /// Checks a process. Returns whether its state could be read.
    fn check(&mut self, pid: u32, start: u64, dir: &ProcessDir, executable: Option<&Path>) -> bool {
        if executable.is_some() && executable == self.own_executable.as_deref() {
            return true;
        }
        let key = (pid, start);
        let listed = self.unrecordable.get(&key);
        if listed.is_some_and(|process| process.uses_cuda) {
            return true;
        }
        let (obstacle, may_be_loaded) = match self.find_obstacle(dir, executable) {
            CheckResult::Obstacle(obstacle, may_be_loaded) => (obstacle, may_be_loaded),
            CheckResult::Clear => {
                self.unrecordable.remove(&key);
                self.unlisted.remove(&key);
                return true;
            }
            CheckResult::Unknown => return false,
        };
        // Read the mappings last, because the list may be long.
        let maps = dir.mappings();
        let uses_cuda = maps.as_deref().is_some_and(uses_cuda);
        let is_loaded = maps.is_some_and(|maps| maps.contains(&*self.environment.library.to_string_lossy()));
        // With the library loaded, only a process that uses CUDA can lose events. For the other obstacles, the library
        // must be absent.
        if may_be_loaded && uses_cuda && is_loaded || !may_be_loaded && !is_loaded {
            if listed.is_none() && self.unrecordable.len() >= MAX_LISTED {
                self.unlisted.insert(key);
                return true;
            }
            let program = executable.map_or_else(String::new, |exe| exe.to_string_lossy().into_owned());
            let process = UnrecordableProcess { pid, program, obstacle, uses_cuda, lost_events: 0 };
            self.unrecordable.insert(key, process);
        } else {
            // For example valgrind: a static program that loads the library later, for the program that it runs.
            self.unrecordable.remove(&key);
            self.unlisted.remove(&key);
        }
        true
    }

    /// Why the process cannot be recorded.
    fn find_obstacle(&self, dir: &ProcessDir, executable: Option<&Path>) -> CheckResult {
        let Some(executable) = executable else {
            let is_other_user = !dir.is_of_our_user() && dir.exists();
            return if is_other_user {
                CheckResult::Obstacle(Obstacle::OtherUser, false)
            } else {
                CheckResult::Unknown
            };
        };
        match preflight::linkage(&dir.file("exe")) {
            Some(Linkage::Static) => return CheckResult::Obstacle(Obstacle::StaticallyLinked, false),
            Some(Linkage::Foreign) => return CheckResult::Obstacle(Obstacle::OtherMachine, false),
            Some(Linkage::Dynamic) => {}
            None => return CheckResult::Unknown,
        }
        let Some(environment) = dir.variables() else { return CheckResult::Unknown };
        // Programs that change their process title overwrite the environment. It is then unreadable.
        if environment.iter().any(|variable| !variable.contains('=')) {
            return CheckResult::Clear;
        }
        let library = self.environment.library.as_path();
        let preload = environment.iter().find_map(|v| v.strip_prefix("LD_PRELOAD="));
        if !preload.is_some_and(|preload| preload.split([':', ' ']).any(|entry| Path::new(entry) == library)) {
            return CheckResult::Obstacle(Obstacle::PreloadRemoved, false);
        }
        let inside = library.strip_prefix("/").map_or_else(|_| library.to_owned(), |l| dir.file("root").join(l));
        if !inside.exists() {
            // The folder of an ended process leads nowhere.
            let is_gone = dir.executable().is_none();
            return if is_gone {
                CheckResult::Unknown
            } else {
                CheckResult::Obstacle(Obstacle::LibraryNotVisible, false)
            };
        }
        if preflight::is_privileged(executable) {
            return CheckResult::Obstacle(Obstacle::Privileged, false);
        }
        let session = format!("{ENV}=");
        if !environment.iter().any(|v| v.starts_with(&session)) {
            return CheckResult::Obstacle(Obstacle::SessionRemoved, true);
        }
        if dir.network().is_some() && dir.network() != self.own_network {
            return CheckResult::Obstacle(Obstacle::NetworkNamespace, true);
        }
        if dir.status().is_some_and(|status| options::filters_in(&status) > self.environment.filters) {
            return CheckResult::Obstacle(Obstacle::Seccomp, true);
        }
        if dir.has_address_limit() {
            return CheckResult::Obstacle(Obstacle::AddressSpaceLimit, true);
        }
        CheckResult::Clear
    }
}

/// Lets this thread run as soon as it has something to do, if the user may (`CAP_SYS_NICE`, `RLIMIT_RTPRIO`).
///
/// A program that ends while its check waits for a CPU cannot be checked anymore.
fn run_before_others() {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter is valid for the call, and 0 is this thread. Without permission nothing changes.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &raw const lowest) };
}

/// The CPU time that this thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Whether a process with these mappings has loaded CUDA or mapped a GPU device.
fn uses_cuda(maps: &str) -> bool {
    ["/libcuda.so", "/dev/nvidia"].iter().any(|sign| maps.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn cuda_is_detected_by_driver_library_and_device() {
        assert!(uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.1\n"));
        assert!(uses_cuda("7f00-7f01 rw-s 00000000 08:01 1 /dev/nvidiactl\n"));
        assert!(!uses_cuda("7f00-7f01 r-xp 00000000 08:01 1 /opt/libcudart.so.12\n"));
    }

    fn tree() -> ProcessTree {
        ProcessTree::new(CommandEnvironment { library: "/nowhere/library.so".into(), filters: u32::MAX }, true)
    }

    #[test]
    fn a_program_is_checked_when_it_is_executed_and_counted_when_it_is_too_late() {
        let mut tree = tree();
        let mut child = Command::new("sleep").arg("600").env_clear().spawn().unwrap();
        let pid = child.id();
        tree.forked(1, pid);
        assert!(tree.tracked.is_empty(), "the parent is not of the command");
        tree.forked(tree.own_pid, pid);
        tree.executed(pid, false);
        assert!(tree.has_unchecked() && tree.unrecordable.is_empty());
        tree.executed(pid, true);
        let found: Vec<_> = tree.unrecordable.values().map(|p| (p.pid, p.obstacle, p.uses_cuda)).collect();
        assert_eq!(found, [(pid, Obstacle::PreloadRemoved, false)]);
        child.kill().unwrap();
        child.wait().unwrap();
        tree.ended(pid);
        assert_eq!((tree.unchecked.get(&pid), tree.tracked.len()), (None, 0));
        // The next program has ended when its report is read.
        tree.forked(tree.own_pid, pid);
        tree.executed(pid, true);
        tree.scan();
        tree.ended(pid);
        assert_eq!((tree.unchecked.get(&pid), tree.tracked.contains_key(&pid)), (Some(&1), false));
        // This one ends before there is time for a check.
        tree.forked(tree.own_pid, pid);
        tree.executed(pid, false);
        tree.ended(pid);
        assert_eq!(tree.unchecked, BTreeMap::from([(pid, 2)]));
        // The library is loaded into this one. A program may also set its name.
        let name = |name: &[u8; 5]| std::array::from_fn(|i| name.get(i).copied().unwrap_or(0));
        tree.forked(tree.own_pid, pid);
        tree.executed(pid, false);
        tree.named(pid, name(b"sleep"));
        tree.named(pid, name(b"sleep"));
        tree.ended(pid);
        assert_eq!(tree.unchecked, BTreeMap::from([(pid, 2)]));
        tree.forked(tree.own_pid, pid);
        tree.named(pid, name(b"child"));
        tree.executed(pid, false);
        tree.named(pid, name(b"child"));
        tree.named(pid, name(b"other"));
        tree.ended(pid);
        assert_eq!(tree.unchecked, BTreeMap::from([(pid, 3)]));
        // A child without a program of its own is none.
        tree.forked(tree.own_pid, pid);
        tree.ended(pid);
        assert_eq!(tree.unchecked, BTreeMap::from([(pid, 3)]));
    }

    #[test]
    fn a_process_that_recorded_events_needed_no_check() {
        let found =
            Found { watched: Watched { unchecked: 1, ..Watched::default() }, unchecked: [(7, 2), (8, 3)].into() };
        assert_eq!(found.clone().without(&BTreeSet::new()).unchecked, 6);
        assert_eq!(found.without(&BTreeSet::from([8])).unchecked, 3);
    }

    #[test]
    fn processes_beyond_the_list_are_counted() {
        let mut tree = tree();
        let mut child = Command::new("sleep").arg("600").env_clear().spawn().unwrap();
        let pid = child.id();
        let process = |pid| UnrecordableProcess {
            pid,
            program: String::new(),
            obstacle: Obstacle::Seccomp,
            uses_cuda: false,
            lost_events: 0,
        };
        tree.unrecordable.extend((0..MAX_LISTED as u32).map(|other| ((other, u64::MAX), process(other))));
        for _ in 0..2 {
            tree.scan();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((tree.unlisted.iter().filter(|(other, _)| *other == pid).count()), 1);
        assert_eq!(tree.unrecordable.len(), MAX_LISTED);
    }

    #[test]
    fn a_new_process_changes_the_last_pid() {
        let mut last_pid = LastPid::new();
        assert!(last_pid.has_changed());
        Command::new("true").status().unwrap();
        assert!(last_pid.has_changed());
    }
}
