//! When a snapshot is written: at an out-of-memory error, when a condition begins to hold, and at intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use memtrace_analysis::report::LiveReport;

use crate::condition::Condition;

/// The triggers of one command, and what they have seen.
#[derive(Debug)]
pub(super) struct Triggers {
    on_oom: bool,
    when: Option<Condition>,
    every: Option<Duration>,
    next: Instant,
    /// By process: the out-of-memory errors so far.
    ooms: BTreeMap<u32, u64>,
    /// The processes and devices for which the condition holds.
    holding: BTreeSet<(u32, i16)>,
    is_first: bool,
}

/// A trigger that fired.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fired {
    /// Why.
    pub(super) reason: String,
    /// The process that caused it. `None` for an interval.
    pub(super) pid: Option<u32>,
}

impl Triggers {
    /// The first snapshot of an interval is due one interval after `now`.
    pub(super) fn new(on_oom: bool, when: Option<Condition>, every: Option<Duration>, now: Instant) -> Triggers {
        let next = now + every.unwrap_or_default();
        Triggers { on_oom, when, every, next, ooms: BTreeMap::new(), holding: BTreeSet::new(), is_first: true }
    }

    /// Evaluates the current figures, and returns the triggers that fire. Errors from before the first call do not
    /// count; a condition that holds at the first call does.
    pub(super) fn fired(&mut self, report: &LiveReport, now: Instant) -> Vec<Fired> {
        let mut fired = Vec::new();
        let mut holding = BTreeSet::new();
        for process in report.recordings.iter().flat_map(|recording| &recording.processes) {
            let before = self.ooms.insert(process.pid, process.oom_count);
            // A process that begins later has no errors from before.
            let before = if self.is_first { process.oom_count } else { before.unwrap_or(0) };
            if self.on_oom && process.oom_count > before {
                let reason = format!("out-of-memory error in process {}", process.pid);
                fired.push(Fired { reason, pid: Some(process.pid) });
            }
            for device in &process.devices {
                let key = (process.pid, device.device);
                if self.when.is_some_and(|condition| condition.holds(device)) {
                    holding.insert(key);
                    if !self.holding.contains(&key) {
                        let reason = format!("the condition holds in process {}", process.pid);
                        fired.push(Fired { reason, pid: Some(process.pid) });
                    }
                }
            }
        }
        if let Some(every) = self.every.filter(|_| now >= self.next) {
            // Missed intervals, for example while this process was stopped, are skipped.
            self.next = now + every;
            fired.push(Fired { reason: "the interval has passed".to_owned(), pid: None });
        }
        (self.holding, self.is_first) = (holding, false);
        fired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::condition::condition;
    use memtrace_analysis::report::{LiveDevice, LiveProcessReport, LiveRecording, Totals};

    fn report(processes: &[(u32, u64, u64)]) -> LiveReport {
        let process = |&(pid, oom_count, allocated_bytes): &(u32, u64, u64)| {
            let totals = Totals { allocated_bytes, ..Totals::default() };
            let devices = vec![LiveDevice { totals, ..LiveDevice::default() }];
            LiveProcessReport { pid, oom_count, devices, ..LiveProcessReport::default() }
        };
        let processes = processes.iter().map(process).collect();
        LiveReport {
            recordings: vec![LiveRecording { processes, ..LiveRecording::default() }],
            ..LiveReport::default()
        }
    }

    #[test]
    fn new_errors_and_new_processes_with_errors_fire() {
        let now = Instant::now();
        let mut triggers = Triggers::new(true, None, None, now);
        let mut pids =
            |processes| triggers.fired(&report(processes), now).into_iter().map(|f| f.pid).collect::<Vec<_>>();
        assert_eq!(pids(&[(1, 2, 0)]), [], "from before");
        assert_eq!(pids(&[(1, 2, 0)]), []);
        assert_eq!(pids(&[(1, 3, 0), (2, 1, 0)]), [Some(1), Some(2)]);
        assert_eq!(pids(&[(1, 3, 0), (2, 1, 0)]), []);
    }

    #[test]
    fn a_condition_fires_when_it_begins_to_hold() {
        let now = Instant::now();
        let mut triggers = Triggers::new(false, Some(condition("allocated > 10").unwrap()), None, now);
        let mut count = |bytes| triggers.fired(&report(&[(1, 9, bytes)]), now).len();
        assert_eq!([count(11), count(12), count(10), count(11), count(11)], [1, 0, 0, 1, 0]);
    }

    #[test]
    fn an_interval_fires_once_however_late_it_is() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut triggers = Triggers::new(false, None, Some(10 * second), now);
        let mut count = |seconds| triggers.fired(&report(&[]), now + seconds * second).len();
        assert_eq!([count(0), count(9), count(10), count(11), count(35), count(44), count(45)], [0, 0, 1, 0, 1, 0, 1]);
    }
}
