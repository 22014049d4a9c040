//! Samples the main memory of the command's processes from outside while a run lasts.
//!
//! The samples go to `host.jsonl` in the run folder. The sampling thread reads `/proc` and the files of the control
//! group; nothing runs in the traced processes. It takes at most one fiftieth of a core.

mod samples_file;
mod sources;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{HostLimitKind, HostSample, HostSamplesEnd};

use self::samples_file::SamplesFile;
use self::sources::{PAUSE_FACTOR, Processes, SharedMemory, available_memory, machine_kills};
use crate::control_group::ControlGroup;
use crate::host;
use crate::process_watch::thread_cpu_time;

/// The shortest and the longest time between two samples. A short run has samples close together.
const INTERVALS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// The share of the run's time after which the next sample follows.
const INTERVAL_SHARE: u32 = 20;

/// The sampling thread. It ends with [`HostSampler::finish`].
#[derive(Debug)]
pub(crate) struct HostSampler {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl HostSampler {
    /// Starts to sample the process `root` and all that it starts. `None` if no thread can be started.
    pub(crate) fn start(folder: Arc<RunFolder>, root: u32) -> Option<HostSampler> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("memtrace-host".into())
            .spawn(move || sample_until(&folder, root, &stopped))
            .ok()?;
        Some(HostSampler { stop, thread })
    }

    /// Completes the file.
    pub(crate) fn finish(self) {
        // The thread has ended already if the file could not be created.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

/// The limit of the command's memory, and what the kernel counts there.
struct Limit {
    group: Option<ControlGroup>,
    /// The kernel's counts when the group was first seen.
    kills_before: u64,
    peak_before: u64,
    /// The kills in groups that the command has left.
    kills: u64,
}

impl Limit {
    fn of(process: &Path) -> Limit {
        let group = ControlGroup::of(process);
        let (kills_before, peak_before) =
            group.as_ref().map_or((0, 0), |group| (group.kills(), group.peak().unwrap_or(0)));
        Limit { group, kills_before, peak_before, kills: 0 }
    }

    /// Follows the process into another group, or a limit that has changed. Returns whether there was a change.
    fn follow(&mut self, process: &Path) -> bool {
        let group = ControlGroup::of(process);
        // A process that has ended is in no group.
        if group == self.group || group.is_none() {
            return false;
        }
        if group.as_ref().zip(self.group.as_ref()).is_some_and(|(new, old)| new.is_same(old)) {
            self.group = group;
        } else {
            *self = Limit { kills: self.kills_so_far(), ..Limit::of(process) };
        }
        true
    }

    fn kills_so_far(&self) -> u64 {
        let here = self.group.as_ref().map_or(0, |group| group.kills().saturating_sub(self.kills_before));
        self.kills.saturating_add(here)
    }

    fn kind_and_bytes(&self) -> (HostLimitKind, u64) {
        match &self.group {
            Some(group) => (HostLimitKind::ControlGroup, group.limit.min(host::total_memory())),
            None => (HostLimitKind::Machine, host::total_memory()),
        }
    }

    /// The group's highest use, if it had it during the run.
    fn peak(&self) -> Option<u64> {
        self.group.as_ref()?.peak().filter(|peak| *peak > self.peak_before)
    }
}

/// Samples at once, then at each interval, until `stop` has a message.
fn sample_until(folder: &RunFolder, root: u32, stop: &Receiver<()>) {
    let process = Path::new("/proc").join(root.to_string());
    let began = Instant::now();
    let mut limit = Limit::of(&process);
    let killed_before = machine_kills();
    let (mut processes, shared) = (Processes::of(root), SharedMemory::find());
    let (kind, bytes) = limit.kind_and_bytes();
    // Without the file there are no samples. Nothing else depends on them.
    let Ok(mut file) = SamplesFile::create(folder, host::epoch_ns(), kind, bytes, shared.total()) else { return };
    let (mut samples, mut longest_gap, mut last) = (0, Duration::ZERO, began);
    loop {
        let cpu_time = thread_cpu_time();
        if limit.follow(&process) {
            let (kind, bytes) = limit.kind_and_bytes();
            file.limit(host::epoch_ns(), kind, bytes);
        }
        let sample = HostSample {
            time_ns: host::epoch_ns(),
            processes: processes.sample(),
            group_bytes: limit.group.as_ref().and_then(ControlGroup::used),
            group_cache_bytes: limit.group.as_ref().and_then(ControlGroup::cache),
            available_bytes: available_memory(),
            shm_used_bytes: shared.used(),
        };
        if !sample.processes.is_empty() {
            let now = Instant::now();
            longest_gap = longest_gap.max(now - last);
            last = now;
            samples += 1;
            if let Some(files) = processes.shared_files(&sample) {
                file.shared_files(sample.time_ns, files);
            }
            file.add(sample, &|pid| processes.name(pid));
        }
        let cost = thread_cpu_time().saturating_sub(cpu_time);
        let interval = (began.elapsed() / INTERVAL_SHARE).clamp(INTERVALS[0], INTERVALS[1]).max(cost * PAUSE_FACTOR);
        if stop.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    file.finish(
        host::epoch_ns(),
        HostSamplesEnd {
            samples,
            longest_gap_ns: u64::try_from(longest_gap.as_nanos()).unwrap_or(u64::MAX),
            left_out: 0,
            group_peak_bytes: limit.peak(),
            group_kills: limit.kills_so_far(),
            machine_kills: machine_kills().saturating_sub(killed_before),
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    use memtrace_analysis::load::{HOST_SAMPLES_FILE, HostSamples};
    use memtrace_trace::file::Budget;

    #[test]
    fn a_process_and_its_children_are_sampled_as_smaps_rollup_shows_them() {
        let path = tempfile::tempdir().unwrap();
        let folder = Arc::new(RunFolder::open(path.path()).unwrap());
        // A shell that holds 64 MiB in a variable, and a child of it.
        let script = "x=$(head -c 67108864 /dev/zero | tr '\\0' x); sleep 30 & echo ready; wait";
        let mut child = Command::new("bash").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("bash");
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let sampler = HostSampler::start(Arc::clone(&folder), child.id()).unwrap();
        std::thread::sleep(Duration::from_millis(400));
        sampler.finish();
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", child.id())).unwrap();
        let children = crate::proc::ProcessDir::of(child.id()).children();
        for pid in children {
            let _ = Command::new("kill").arg(pid.to_string()).status();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let samples = HostSamples::read_within(&folder, &Budget::default()).unwrap();
        let last = samples.samples.last().expect("a sample");
        assert_eq!(last.processes.len(), 2, "{samples:?}");
        let own = last.processes.iter().find(|process| process.pid == child.id()).expect("the shell");
        let kilobytes = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
            line.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).expect("a number") * 1024
        };
        assert!(own.resident_bytes() >= 64 << 20, "{own:?}");
        assert!(own.resident_bytes().abs_diff(kilobytes("Rss:")) <= 64 << 10, "{own:?}: {rollup}");
        assert!(own.proportional_bytes.unwrap().abs_diff(kilobytes("Pss:")) <= 1 << 20, "{own:?}: {rollup}");
        assert!(own.peak_bytes >= own.resident_bytes());
        assert_eq!(samples.names[&own.pid].name, "bash");
        let other = last.processes.iter().find(|process| process.pid != child.id()).expect("the child");
        assert_eq!(samples.names[&other.pid].parent, Some(child.id()));
        let end = samples.end.expect("an end");
        assert!(end.samples >= 2 && end.longest_gap_ns < 5_000_000_000, "{end:?}");
        assert!(std::fs::read_to_string(path.path().join(HOST_SAMPLES_FILE)).unwrap().lines().count() < 20);
    }
}
