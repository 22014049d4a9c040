//! Finds the memory that other recorded processes of a run had on the device: when a request failed, and for a trainer
//! beside an engine.

use memtrace_input::EventSource;
use memtrace_input::load::{Process, Run};
use memtrace_replay::{Replay, Usage};

use crate::beside::ProcessBeside;
use crate::build_launch::ProcessUses;
use crate::colocated::{ProcessMemory, TrainerPeak};
use crate::device_names::process_name;
use crate::summary::{DeviceSummary, ProcessSummary};
use crate::why::no_issue_remark;

/// Within this error of their clocks, the order of the events of two processes is unknown.
const CLOCK_ERROR_NS: u64 = 1_000;

/// Adds the other processes to each error that a summary explains. `summaries` and `uses` are those of the run's
/// processes, in its order.
pub(crate) fn add_processes_beside(run: &Run, summaries: &mut [ProcessSummary], uses: &[ProcessUses]) {
    let names: Vec<String> = summaries.iter().map(process_name).collect();
    for (at, summary) in summaries.iter_mut().enumerate() {
        let mut is_changed = false;
        for device in &mut summary.devices {
            let ordinal = device.device;
            let Some(oom) = device.explained_oom.and_then(|index| device.ooms.get_mut(index)) else { continue };
            if oom.contexts_and_other_processes_bytes.is_none_or(|bytes| bytes == 0) {
                continue;
            }
            for (other, process) in run.processes().iter().enumerate().filter(|(other, _)| *other != at) {
                let device = shared_device(uses, (at, ordinal), other);
                let Some(usage) = device.and_then(|device| usage_at(process, device, oom.in_use.time_ns)) else {
                    continue;
                };
                oom.processes_beside.push(ProcessBeside {
                    pid: process.pid(),
                    name: names.get(other).cloned().unwrap_or_default(),
                    reserved_bytes: usage.reserved,
                    allocated_bytes: usage.allocated,
                });
            }
            oom.processes_beside.sort_by_key(|other| std::cmp::Reverse(other.reserved_bytes));
            is_changed |= !oom.processes_beside.is_empty();
        }
        if is_changed && summary.no_issue_remark.is_some() {
            summary.no_issue_remark = no_issue_remark(&summary.devices);
        }
    }
}

/// The ordinal that a device of process `at` has in process `other`. `None` if that does not use it.
fn shared_device(uses: &[ProcessUses], (at, device): (usize, i16), other: usize) -> Option<i16> {
    uses.get(at)?.shared(device, uses.get(other)?)
}

/// Joins the engines and the trainers of a run that share a device. An engine without a trainer is none of this.
pub(crate) fn add_trainers(run: &Run, summaries: &mut [ProcessSummary], uses: &[ProcessUses]) {
    let trainers: Vec<Vec<TrainerPeak>> = summaries.iter().map(trainer_peaks).collect();
    for (at, summary) in summaries.iter_mut().enumerate() {
        for device in &mut summary.devices {
            let Some(colocation) = device.colocation.as_mut().filter(|colocation| !colocation.trains()) else {
                continue;
            };
            let shared = |(other, peaks): (usize, &'_ Vec<TrainerPeak>)| {
                let theirs = shared_device(uses, (at, device.device), other)?;
                Some((run.processes().get(other)?, peaks.iter().find(|peak| peak.device == theirs)?.clone()))
            };
            let others = trainers.iter().enumerate().filter(|(other, _)| *other != at).filter_map(shared);
            let found = run.processes().get(at).zip(others.max_by_key(|(_, peak)| peak.bytes));
            let Some((engine, (process, peak))) = found else {
                device.colocation = None;
                continue;
            };
            let may_sleep = device.server.as_ref().is_some_and(|server| server.may_sleep);
            colocation.join(&peak, may_sleep, |times| {
                let engine = memory_at(engine, device.device, times);
                engine.into_iter().zip(memory_at(process, peak.device, times)).collect()
            });
        }
    }
}

/// The peaks of a process on the devices on which it trains.
fn trainer_peaks(summary: &ProcessSummary) -> Vec<TrainerPeak> {
    let peak = |device: &DeviceSummary| {
        let peak = device.peak.as_ref().filter(|_| device.trains())?;
        Some(TrainerPeak {
            name: process_name(summary),
            device: device.device,
            time_ns: peak.time_ns,
            bytes: peak.totals.allocated_bytes,
            parts: peak.by_category.iter().map(|part| (part.category, part.bytes)).collect(),
        })
    };
    summary.devices.iter().filter_map(peak).collect()
}

/// The totals of a process's caching allocator on a device at a time, in nanoseconds since the Unix epoch. `None`
/// without PyTorch's events, and if it had reserved nothing.
fn usage_at(process: &Process, device: i16, time_ns: u64) -> Option<Usage> {
    let mut found = None;
    replay_to(process, device, &[time_ns.saturating_sub(CLOCK_ERROR_NS)], |_, usage, _| found = Some(usage));
    found.filter(|usage| usage.reserved > 0)
}

/// PyTorch's memory in a process at times that ascend, in nanoseconds since the Unix epoch.
fn memory_at(process: &Process, device: i16, times_ns: &[u64]) -> Vec<ProcessMemory> {
    let mut found = vec![ProcessMemory::default(); times_ns.len()];
    replay_to(process, device, times_ns, |at, usage, unmapped| {
        let reserved = usage.reserved.saturating_sub(unmapped);
        found[at] = ProcessMemory { reserved, allocated: usage.allocated };
    });
    found
}

/// Replays a process, and calls `at_time` at each of the ascending times, with its index, the totals of the allocator
/// on a device, and the bytes of its segments without memory. Does nothing without PyTorch's events.
fn replay_to(process: &Process, device: i16, times_ns: &[u64], mut at_time: impl FnMut(usize, Usage, u64)) {
    let recording = process.recording();
    let calibration = recording.calibration();
    let mut replay = Replay::new(process.trace_index(), Some(device));
    if replay.devices().iter().all(|one| one.source != EventSource::Torch) {
        return;
    }
    let mut next = 0;
    let mut report = |replay: &Replay, next: usize| {
        let usage = replay.devices().first().map(|one| *one.allocator.usage()).unwrap_or_default();
        let unmapped = replay.physical().unmapped_segments().get(&device).map_or(0, |unmapped| unmapped.current);
        at_time(next, usage, unmapped);
    };
    recording.stream(&mut |events| {
        for e in events {
            while times_ns.get(next).is_some_and(|time| calibration.epoch_ns(e.ticks) > *time) {
                report(&replay, next);
                next += 1;
            }
            if next < times_ns.len() {
                replay.apply(e, |_, _, _, _| {});
            }
        }
    });
    for at in next..times_ns.len() {
        report(&replay, at);
    }
}
