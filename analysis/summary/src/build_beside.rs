//! Finds the memory that other recorded processes of a run had on the device when a request failed.

use memtrace_input::EventSource;
use memtrace_input::load::{Process, Run};
use memtrace_replay::{Replay, Usage};

use crate::beside::ProcessBeside;
use crate::build_launch::ProcessUses;
use crate::device_names::process_name;
use crate::summary::ProcessSummary;
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
                let device = uses.get(at).zip(uses.get(other)).and_then(|(own, theirs)| own.shared(ordinal, theirs));
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

/// The totals of a process's caching allocator on a device at a time, in nanoseconds since the Unix epoch. `None`
/// without PyTorch's events, and if it had reserved nothing.
fn usage_at(process: &Process, device: i16, time_ns: u64) -> Option<Usage> {
    let recording = process.recording();
    let calibration = recording.calibration();
    let mut replay = Replay::new(process.trace_index(), Some(device));
    replay.devices().iter().find(|one| one.source == EventSource::Torch)?;
    recording.stream(&mut |events| {
        for e in events.iter().filter(|e| calibration.epoch_ns(e.ticks) + CLOCK_ERROR_NS <= time_ns) {
            replay.apply(e, |_, _, _, _| {});
        }
    });
    let usage = *replay.devices().first()?.allocator.usage();
    (usage.reserved > 0).then_some(usage)
}
