//! The main memory of the run's processes: the peak, who had it, how it grows, and whether the kernel killed a process
//! because it was full.
//!
//! All figures are the launcher's samples and the kernel's counters, so they depend on when a sample was taken. Nothing
//! else in a summary rests on them but the cause of a SIGKILL.

use std::collections::BTreeMap;

use memtrace_input::RunFolder;
use memtrace_input::load::{
    Exit, HostLimitKind, HostProcess, HostProcessName, HostSample, HostSamples, HostSharedFile, Run,
};
use memtrace_insight::units::{count_text, duration_text, estimate_text, share_text, size_text};
use memtrace_trace::file::Budget;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::summary::{ProcessSummary, StepSummary};

/// The maximum number of processes that are listed.
const MAX_PROCESSES: usize = 32;
/// The maximum number of processes that a sentence names.
const NAMED_PROCESSES: usize = 3;
/// The signal SIGKILL.
const SIGKILL: i32 = 9;
/// The exit status of a shell whose command was killed by SIGKILL.
const KILLED_STATUS: i32 = 128 + SIGKILL;
/// Growth is looked for among at least this many samples.
const MIN_SAMPLES: usize = 12;
/// Less growth than this is none, in bytes.
const MIN_GROWTH: u64 = 64 << 20;
/// A launcher that was killed together with its control group had sampled at least this share of the limit, in percent.
const FULL_PERCENT: u64 = 95;
/// Reports mention growth that reaches the limit within this time, in nanoseconds: a week.
const SOON_NS: u64 = 7 * 24 * 3600 * 1_000_000_000;
/// Reports mention main memory of which this share of the limit was in use, in percent.
const NOTABLE_PERCENT: u64 = 50;

/// The main memory of the run's processes, in samples of the launcher and counters of the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostMemorySummary {
    /// The peak as a sentence: `212 GiB of 256 GiB (83%)`.
    pub text: String,
    /// The kind of the limit: the main memory of the machine, or the limit of the command's control group.
    pub limit: HostLimitKind,
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// The sample with the most bytes.
    pub peak: HostMemoryState,
    /// The last sample.
    pub end: HostMemoryState,
    /// The most bytes that the control group ever had, with its page cache, as the kernel counts them. Absent without a
    /// group, and if the group had it before the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_peak_bytes: Option<u64>,
    /// The processes at the peak, most bytes first. At most 32.
    pub processes: Vec<HostProcessMemory>,
    /// The number of processes at the peak that are not listed.
    pub unlisted_processes: u64,
    /// The files in shared memory that the processes had mapped, when they had the most of it. At most 16.
    pub shared_files: Vec<HostSharedFile>,
    /// The size of `/dev/shm`, in bytes. 0 if it is unknown.
    pub shm_bytes: u64,
    /// The most bytes of `/dev/shm` that were in use by any process.
    pub shm_peak_bytes: u64,
    /// The peak of pinned host memory, summed over the processes. Each has its own moment.
    pub pinned_bytes: u64,
    /// The growth. Absent if main memory does not grow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth: Option<HostGrowth>,
    /// The kernel killed a process because main memory was full. Absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kill: Option<HostKill>,
    /// The number of samples.
    pub samples: u64,
    /// The longest time between two samples, in nanoseconds. Absent if the launcher was killed or still runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_gap_ns: Option<u64>,
    /// The number of samples that were not kept.
    pub left_out: u64,
    /// The history: at most 200 of the samples, with the peak.
    pub history: Vec<HostMemoryState>,
}

/// The main memory of all processes at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostMemoryState {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The bytes of all processes, in which memory of several processes counts once (`Pss`), as far as it is known.
    pub bytes: u64,
    /// The resident bytes without a file: heap and stacks. Memory of several processes counts in each.
    pub anonymous_bytes: u64,
    /// The resident bytes of mapped files. Memory of several processes counts in each.
    pub file_bytes: u64,
    /// The resident bytes of shared memory. Memory of several processes counts in each.
    pub shared_bytes: u64,
    /// The bytes of the control group, with its page cache. Absent without a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_bytes: Option<u64>,
    /// The page cache of the control group, which the kernel gives back when memory is short. Absent without a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_cache_bytes: Option<u64>,
    /// What the machine had for new programs without swapping.
    pub available_bytes: u64,
}

/// The main memory of a process at the peak of all.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostProcessMemory {
    /// The process id.
    pub pid: u32,
    /// The name of its program, and its rank, if it has one: `python3 (rank 0)`.
    pub name: String,
    /// The bytes, in which memory of several processes counts in equal parts, if that is known.
    pub bytes: u64,
    /// The resident bytes without a file.
    pub anonymous_bytes: u64,
    /// The resident bytes of mapped files.
    pub file_bytes: u64,
    /// The resident bytes of shared memory.
    pub shared_bytes: u64,
    /// The most resident bytes that the process ever had, as the kernel counts them.
    pub highest_bytes: u64,
}

/// Main memory that grows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostGrowth {
    /// The growth as a sentence, with the time to the limit at this rate.
    pub text: String,
    /// The bytes that are added in an hour.
    pub bytes_per_hour: u64,
    /// The bytes that are added with each training step. Absent without steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_step: Option<u64>,
    /// The time from the last sample until the limit is reached at this rate, in nanoseconds. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_in_ns: Option<u64>,
}

/// The kernel's out-of-memory killer.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostKill {
    /// Whether the kernel counted a kill in the command's control group. Otherwise it killed a process of the machine,
    /// or the launcher's recording ends at the limit.
    pub is_certain: bool,
    /// The end of the command: `killed by the kernel: main memory was full`.
    pub outcome: String,
    /// Who had the memory, as a sentence.
    pub text: String,
}

impl HostMemorySummary {
    /// The main memory of a run. `None` without samples.
    pub(crate) fn of(run: &Run, processes: &[ProcessSummary], is_recording: bool) -> Option<HostMemorySummary> {
        let samples = run.host_samples();
        let highest = samples.samples.iter().max_by_key(|sample| sample.bytes())?;
        let last = samples.samples.last()?;
        let names = Names { names: &samples.names, processes };
        let peak = HostMemoryState::of(highest);
        let pinned = processes.iter().flat_map(|process| &process.pinned_host_memory);
        let end = samples.end.unwrap_or_default();
        let was_killed = is_kill(run.manifest().exit) || run.processes().iter().any(|process| is_kill(process.exit()));
        let mut summary = HostMemorySummary {
            text: String::new(),
            limit: samples.limit,
            limit_bytes: samples.limit_bytes,
            peak,
            end: HostMemoryState::of(last),
            group_peak_bytes: end.group_peak_bytes,
            processes: process_memory(highest, &names),
            unlisted_processes: highest.processes.len().saturating_sub(MAX_PROCESSES) as u64,
            shared_files: samples.shared_files.clone(),
            shm_bytes: samples.shm_bytes,
            shm_peak_bytes: samples.samples.iter().map(|sample| sample.shm_used_bytes).max().unwrap_or(0),
            pinned_bytes: pinned.map(|owner| owner.peak_bytes).fold(0, u64::saturating_add),
            growth: None,
            kill: kill(samples, last, &names, was_killed, is_recording),
            samples: samples.end.map_or(samples.samples.len() as u64, |end| end.samples),
            longest_gap_ns: samples.end.map(|end| end.longest_gap_ns),
            left_out: end.left_out,
            history: history(&samples.samples, highest),
        };
        summary.text = summary.peak_text();
        // The end of a program frees what it had.
        let steps = processes.iter().flat_map(|process| &process.devices).map(|device| device.by_step.as_slice());
        let steps = steps.max_by_key(|steps| steps.len()).unwrap_or_default();
        summary.growth = growth(samples, steps, summary.left_to_limit(last));
        Some(summary)
    }

    /// The bytes that can still be added after this sample. `None` if the limit is unknown.
    fn left_to_limit(&self, sample: &HostSample) -> Option<u64> {
        match (self.limit, sample.group_bytes) {
            (HostLimitKind::ControlGroup, Some(bytes)) => {
                let used = bytes.saturating_sub(sample.group_cache_bytes.unwrap_or(0));
                Some(self.limit_bytes.saturating_sub(used))
            }
            _ => (sample.available_bytes > 0).then_some(sample.available_bytes),
        }
    }

    /// The limit in words.
    pub fn limit_text(&self) -> &'static str {
        match self.limit {
            HostLimitKind::ControlGroup => "the control group's limit",
            HostLimitKind::Machine => "the machine's memory",
        }
    }

    fn peak_text(&self) -> String {
        let of = format!(
            "{} of {} ({}), {}",
            size_text(self.peak.bytes),
            size_text(self.limit_bytes),
            share_text(self.peak.bytes, self.limit_bytes),
            self.limit_text()
        );
        match self.pinned_bytes {
            0..1_048_576 => of,
            bytes => format!("{of}; pinned by CUDA: {}", size_text(bytes)),
        }
    }

    /// Whether a report mentions it although nobody has asked: much is in use, it grows towards the limit, or the kernel
    /// killed a process.
    pub fn is_notable(&self) -> bool {
        let is_much = |bytes: u64, of: u64| of > 0 && bytes.saturating_mul(100) / NOTABLE_PERCENT >= of;
        self.kill.is_some()
            || self.growth.as_ref().and_then(|growth| growth.limit_in_ns).is_some_and(|ns| ns <= SOON_NS)
            || is_much(self.peak.bytes, self.limit_bytes)
            || (is_much(self.shm_peak_bytes, self.shm_bytes) && self.shm_text().is_some())
    }

    /// Shared memory as text. `None` if the processes have none.
    pub fn shm_text(&self) -> Option<String> {
        let first = self.shared_files.iter().find(|file| file.name.starts_with("/dev/shm/"))?;
        let files = if first.files == 1 { String::new() } else { format!(" in {} files", count_text(first.files)) };
        let mapped = format!("{} mapped{files} at {}", size_text(first.bytes), first.name);
        Some(match self.shm_bytes {
            0 => mapped,
            total => format!(
                "{} of {} ({}) in use; most: {mapped}",
                size_text(self.shm_peak_bytes),
                size_text(total),
                share_text(self.shm_peak_bytes, total)
            ),
        })
    }
}

impl HostMemoryState {
    fn of(sample: &HostSample) -> HostMemoryState {
        let sum = |part: fn(&HostProcess) -> u64| sample.processes.iter().map(part).fold(0, u64::saturating_add);
        HostMemoryState {
            time_ns: sample.time_ns,
            bytes: sample.bytes(),
            anonymous_bytes: sum(|process| process.anonymous_bytes),
            file_bytes: sum(|process| process.file_bytes),
            shared_bytes: sum(|process| process.shared_bytes),
            group_bytes: sample.group_bytes,
            group_cache_bytes: sample.group_cache_bytes,
            available_bytes: sample.available_bytes,
        }
    }
}

/// The names of processes in the samples and in the recording.
struct Names<'a> {
    names: &'a BTreeMap<u32, HostProcessName>,
    processes: &'a [ProcessSummary],
}

impl Names<'_> {
    fn of(&self, pid: u32) -> String {
        let name = self.names.get(&pid).map(|process| process.name.as_str()).filter(|name| !name.is_empty());
        let name = name.unwrap_or("process");
        match self.processes.iter().find(|process| process.pid == pid).and_then(|process| process.rank) {
            Some(rank) => format!("{name} (rank {rank})"),
            None => format!("{name} ({pid})"),
        }
    }
}

/// The processes of a sample, most bytes first.
fn process_memory(sample: &HostSample, names: &Names<'_>) -> Vec<HostProcessMemory> {
    let mut processes: Vec<&HostProcess> = sample.processes.iter().collect();
    processes.sort_by_key(|process| (std::cmp::Reverse(process.bytes()), process.pid));
    let memory = |process: &HostProcess| HostProcessMemory {
        pid: process.pid,
        name: names.of(process.pid),
        bytes: process.bytes(),
        anonymous_bytes: process.anonymous_bytes,
        file_bytes: process.file_bytes,
        shared_bytes: process.shared_bytes,
        highest_bytes: process.peak_bytes,
    };
    processes.into_iter().take(MAX_PROCESSES).map(memory).collect()
}

/// At most 200 samples, the highest among them.
fn history(samples: &[HostSample], highest: &HostSample) -> Vec<HostMemoryState> {
    const MAX: usize = 200;
    let (count, last) = (samples.len(), samples.len().saturating_sub(1));
    let is_kept = |index: usize, sample: &HostSample| {
        let is_due = count <= MAX || index == last || index * (MAX - 2) / count != (index + 1) * (MAX - 2) / count;
        is_due || std::ptr::eq(sample, highest)
    };
    let kept = samples.iter().enumerate().filter(|(index, sample)| is_kept(*index, sample));
    kept.map(|(_, sample)| HostMemoryState::of(sample)).collect()
}

/// Whether the kernel killed a process of a command that recorded nothing, because main memory was full.
///
/// `exit` is the end of the command. `None` if it did not, as far as it is known.
pub fn host_kill(folder: &RunFolder, exit: Exit) -> Option<HostKill> {
    let samples = HostSamples::read_within(folder, &Budget::default()).ok()?;
    let names = Names { names: &samples.names, processes: &[] };
    kill(&samples, samples.samples.last()?, &names, is_kill(exit), false)
}

fn is_kill(exit: Exit) -> bool {
    exit.signal == Some(SIGKILL) || exit.code == Some(KILLED_STATUS)
}

/// What the kernel killed. `None` if it killed nothing of the command, as far as it is known. `was_killed` is true if
/// SIGKILL ended a process of the command.
fn kill(
    samples: &HostSamples,
    last: &HostSample,
    names: &Names<'_>,
    was_killed: bool,
    is_recording: bool,
) -> Option<HostKill> {
    let group = samples.limit == HostLimitKind::ControlGroup;
    let is_full = last.group_bytes.is_some_and(|bytes| {
        bytes.saturating_sub(last.group_cache_bytes.unwrap_or(0)).saturating_mul(100) / FULL_PERCENT
            >= samples.limit_bytes
    });
    let (is_certain, outcome) = match samples.end {
        Some(end) if end.group_kills > 0 => (true, "killed by the kernel: main memory was full"),
        Some(end) if end.machine_kills > 0 && was_killed => {
            (false, "probably killed by the kernel: main memory was full")
        }
        // The kernel killed the launcher with the rest of its group.
        None if group && is_full && !is_recording => (false, "probably killed by the kernel: main memory was full"),
        _ => return None,
    };
    let most = process_memory(last, names);
    let named: Vec<String> =
        most.iter().take(NAMED_PROCESSES).map(|one| format!("{} {}", one.name, size_text(one.bytes))).collect();
    let more = most.len().saturating_sub(NAMED_PROCESSES);
    let more = if more == 0 { String::new() } else { format!(", {} more", count_text(more as u64)) };
    let (used, limit) = match (group, last.group_bytes) {
        (true, Some(bytes)) => (bytes, format!("of {} (the control group's limit)", size_text(samples.limit_bytes))),
        _ => (
            last.bytes(),
            format!("of {}, and {} available", size_text(samples.limit_bytes), size_text(last.available_bytes)),
        ),
    };
    let text =
        format!("Main memory at the last sample: {} {limit}; most: {}{more}.", size_text(used), named.join(", "));
    Some(HostKill { is_certain, outcome: outcome.to_owned(), text })
}

/// The growth over the training steps, or over the second half of the samples of a program without steps.
///
/// Main memory grows if its lowest value in the last third of the time is above its highest in the first third by more
/// than [`MIN_GROWTH`], and if the last third adds as much as a third of the average: a cache that fills stops growing.
fn growth(samples: &HostSamples, steps: &[StepSummary], left: Option<u64>) -> Option<HostGrowth> {
    let all = &samples.samples;
    let (first, last) = match steps {
        // The first step loads code and fills caches.
        [_, second, .., last] => (second.time_ns, last.time_ns.saturating_add(last.duration_ns)),
        _ => {
            let (start, end) = (all.first()?.time_ns, all.last()?.time_ns);
            (start + (end - start) / 2, end)
        }
    };
    // Files can be mapped, read and dropped without a need for memory.
    let bytes = |sample: &HostSample| {
        let state = HostMemoryState::of(sample);
        state.bytes.saturating_sub(state.file_bytes)
    };
    let points: Vec<(u64, u64)> = all
        .iter()
        .filter(|sample| (first..=last).contains(&sample.time_ns))
        .map(|sample| (sample.time_ns, bytes(sample)))
        .collect();
    let (begin, end) = (points.first()?.0, points.last()?.0);
    let third = (end - begin) / 3;
    if points.len() < MIN_SAMPLES || third == 0 {
        return None;
    }
    let part =
        |from: u64, to: u64| points.iter().filter(move |(at, _)| (from..=to).contains(at)).map(|(_, bytes)| *bytes);
    let early = part(begin, begin + third).max()?;
    let late = part(end - third, end).min()?;
    let gained = late.checked_sub(early).filter(|gained| *gained >= MIN_GROWTH)?;
    let (late_start, at_end) = (part(end - third, end).next()?, points.last()?.1);
    if at_end.saturating_sub(late_start).saturating_mul(3) < gained {
        return None;
    }
    let slope = slope(&points)?;
    let per_second = slope * 1e9;
    // Of many steps, only some are listed.
    let per_step = match steps {
        [_, second, .., last] => {
            let (ns, count) = (last.time_ns.saturating_sub(second.time_ns), last.step.saturating_sub(second.step));
            (count > 0).then(|| (slope * ns as f64 / f64::from(count)) as u64)
        }
        _ => None,
    };
    let limit_in_ns = left.map(|left| (left as f64 / slope) as u64);
    let rate = match per_step {
        Some(bytes) => format!("{} with each step", size_text(bytes)),
        None => format!("{} a minute", size_text((per_second * 60.0) as u64)),
    };
    let until = match limit_in_ns {
        Some(ns) => {
            let limit = if samples.limit == HostLimitKind::ControlGroup {
                "the control group's limit"
            } else {
                "the machine's memory"
            };
            let steps = per_step.filter(|bytes| *bytes > 0).zip(left);
            let steps =
                steps.map(|(bytes, left)| format!(" ({} steps)", estimate_text(left / bytes))).unwrap_or_default();
            format!("; {limit} is reached in about {}{steps} at this rate", duration_text(ns))
        }
        None => String::new(),
    };
    Some(HostGrowth {
        text: format!("main memory grows by {rate}{until}"),
        bytes_per_hour: (per_second * 3600.0) as u64,
        bytes_per_step: per_step,
        limit_in_ns,
    })
}

/// The slope of the least-squares line through the points, in bytes a nanosecond. `None` unless it rises.
fn slope(points: &[(u64, u64)]) -> Option<f64> {
    let (first_ns, first_bytes) = *points.first()?;
    let count = points.len() as f64;
    let centred = |(at, bytes): &(u64, u64)| ((at - first_ns) as f64, *bytes as f64 - first_bytes as f64);
    let mean = points.iter().map(centred).fold((0.0, 0.0), |sum, (x, y)| (sum.0 + x / count, sum.1 + y / count));
    let (mut both, mut squares) = (0.0, 0.0);
    for (x, y) in points.iter().map(centred) {
        both += (x - mean.0) * (y - mean.1);
        squares += (x - mean.0) * (x - mean.0);
    }
    (both / squares > 0.0).then_some(both / squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn sample(second: u64, mebibytes: u64) -> HostSample {
        let process = HostProcess { pid: 7, anonymous_bytes: mebibytes * MIB, ..HostProcess::default() };
        HostSample { time_ns: second * 1_000_000_000, processes: vec![process], ..HostSample::default() }
    }

    fn growth_of(mebibytes: impl Fn(u64) -> u64, steps: u64) -> Option<HostGrowth> {
        let samples = HostSamples {
            samples: (0..100).map(|second| sample(second, mebibytes(second))).collect(),
            limit_bytes: 10_000 * MIB,
            ..HostSamples::default()
        };
        let step = |step: u64| StepSummary {
            step: step as u32,
            time_ns: step * 90_000_000_000 / steps,
            duration_ns: 90_000_000_000 / steps,
            ..StepSummary::default()
        };
        let steps: Vec<StepSummary> = (0..steps).map(step).collect();
        growth(&samples, &steps, Some(1000 * MIB))
    }

    #[test]
    fn steady_growth_has_its_rate_and_the_time_to_the_limit() {
        let grown = growth_of(|second| 500 + 4 * second, 45).expect("growth");
        assert!(grown.bytes_per_step.unwrap().abs_diff(8 * MIB) <= MIB / 8, "{grown:?}");
        assert!(grown.limit_in_ns.unwrap().abs_diff(250_000_000_000) < 1_000_000_000, "{grown:?}");
        assert!(grown.bytes_per_hour.abs_diff(14_400 * MIB) <= MIB, "{grown:?}");
        assert!(
            grown.text.contains("8.00 MiB with each step; the machine's memory is reached in about 4 min"),
            "{grown:?}"
        );
        let served = growth_of(|second| 500 + 8 * second, 0).expect("growth without steps");
        assert!(served.bytes_per_step.is_none() && served.text.contains("480 MiB a minute"), "{served:?}");
    }

    #[test]
    fn memory_that_fills_once_or_swings_does_not_grow() {
        for (name, mebibytes) in [
            ("steady", (|_| 500) as fn(u64) -> u64),
            ("filled in the first step", |second| if second < 3 { 10 } else { 5000 }),
            ("a cache that is full after a third", |second| 500 + 20 * second.min(35)),
            ("a file that is loaded again and again", |second| 500 + 300 * (second % 5)),
            ("a saw", |second| 500 + 10 * (second % 30)),
            ("too little", |second| 500 + second / 4),
            ("falling", |second| 1000 - 5 * second),
        ] {
            assert_eq!(growth_of(mebibytes, 45), None, "{name}");
        }
    }

    #[test]
    fn the_history_keeps_the_peak_and_the_ends() {
        let samples: Vec<HostSample> =
            (0..5000).map(|second| sample(second, if second == 4321 { 9999 } else { second % 7 })).collect();
        let kept = history(&samples, &samples[4321]);
        assert!(kept.len() <= 201, "{}", kept.len());
        assert!(kept.iter().any(|state| state.bytes == 9999 * MIB));
        assert_eq!(kept.last().unwrap().time_ns, 4999 * 1_000_000_000);
        assert_eq!(history(&samples[..5], &samples[0]).len(), 5);
    }
}
