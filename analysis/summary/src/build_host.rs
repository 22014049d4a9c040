//! Summarizes the samples of main memory: the peak, the growth, and what the kernel killed.

use std::collections::BTreeMap;

use memtrace_input::RunFolder;
use memtrace_input::load::{Exit, HostLimitKind, HostProcess, HostProcessName, HostSample, HostSamples, Run};
use memtrace_insight::units::{count_text, duration_text, estimate_text, size_text};
use memtrace_trace::file::Budget;

use crate::host_memory::{HostGrowth, HostKill, HostMemoryState, HostMemorySummary, HostProcessMemory, limit_text};
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
const MIN_SAMPLES: usize = 6;
/// Less growth than this, and than this share of the peak, is none.
const MIN_GROWTH: u64 = 32 << 20;
const MIN_GROWTH_SHARE: u64 = 200;
/// A launcher that was killed together with its control group had sampled at least this share of the limit, in percent.
const FULL_PERCENT: u64 = 95;

/// The main memory of a run. `None` without samples.
pub(crate) fn host_memory(run: &Run, processes: &[ProcessSummary], is_recording: bool) -> Option<HostMemorySummary> {
    let was_killed = is_kill(run.manifest().exit) || run.processes().iter().any(|process| is_kill(process.exit()));
    of_samples(run.host_samples(), processes, was_killed, is_recording)
}

/// The main memory that samples show. `None` without samples. `was_killed` is true if SIGKILL ended a process.
pub(crate) fn of_samples(
    samples: &HostSamples,
    processes: &[ProcessSummary],
    was_killed: bool,
    is_recording: bool,
) -> Option<HostMemorySummary> {
    let highest = samples.samples.iter().max_by_key(|sample| sample.bytes())?;
    let last = samples.samples.last()?;
    let names = Names { names: &samples.names, processes };
    let peak = HostMemoryState::of(highest);
    let pinned = processes.iter().flat_map(|process| &process.pinned_host_memory);
    let end = samples.end.unwrap_or_default();
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
        kill: kill(samples, [highest, last], &names, was_killed, is_recording),
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
    let highest = samples.samples.iter().max_by_key(|sample| sample.bytes())?;
    kill(&samples, [highest, samples.samples.last()?], &names, is_kill(exit), false)
}

fn is_kill(exit: Exit) -> bool {
    exit.signal == Some(SIGKILL) || exit.code == Some(KILLED_STATUS)
}

/// The kernel's kill. `None` if it killed nothing of the command, as far as it is known. `was_killed` is true if
/// SIGKILL ended a process of the command.
fn kill(
    samples: &HostSamples,
    [highest, last]: [&HostSample; 2],
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
    // Samples after the kill lack what was killed.
    let most = process_memory(highest, names);
    let named: Vec<String> =
        most.iter().take(NAMED_PROCESSES).map(|one| format!("{} {}", one.name, size_text(one.bytes))).collect();
    let more = match highest.processes.len().saturating_sub(NAMED_PROCESSES) {
        0 => String::new(),
        more => format!(", {} more", count_text(more as u64)),
    };
    let of = match samples.limit {
        HostLimitKind::ControlGroup => "the control group's limit".to_owned(),
        HostLimitKind::Machine => format!("{} available", size_text(highest.available_bytes)),
    };
    let text = format!(
        "Main memory in the highest sample: {} of {} ({of}); most: {}{more}.",
        size_text(highest.bytes()),
        size_text(samples.limit_bytes),
        named.join(", ")
    );
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
    let gained = late.checked_sub(early).filter(|gained| *gained >= MIN_GROWTH.max(late / MIN_GROWTH_SHARE))?;
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
            let limit = limit_text(samples.limit);
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
