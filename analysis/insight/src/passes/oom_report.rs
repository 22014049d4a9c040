//! A second pass over a recording, for out-of-memory errors and peaks that the first pass left to explain. It divides
//! the reserved memory at that point in time, finds what the interrupted step would still have requested, and replays
//! other allocator settings.

use memtrace_trace::event::Event;

use super::reserved::Reserved;
use super::rest_of_step::{CallLevel, InterruptedStep, RestOfStep, StepRecorder};
use super::stacks::StackTable;
use super::what_if::{PolicyReplay, WhatIf, WhatIfQuery};
use memtrace_input::{Recording, TraceIndex};
use memtrace_replay::Replay;

/// The maximum number of origins to list that block segments.
const MAX_BLOCKERS: usize = 10;
/// The maximum number of blocks to list that are as large as a failed request.
const SAME_SIZE: usize = 2;

/// One query about a device.
#[derive(Clone, Debug)]
pub struct OomQuery {
    /// The device ordinal.
    pub device: i16,
    /// `seq` of the last event before the point in time.
    pub seq: u64,
    /// The rounded size in bytes of the allocated blocks to look for; `None` to look for none.
    pub size: Option<u64>,
    /// The request whose step to continue; `None` to continue none.
    pub interrupted: Option<InterruptedStep>,
    /// Other allocator settings to replay; `None` to replay none.
    pub what_if: Option<WhatIfQuery>,
}

/// The answer to one query.
#[derive(Clone, Debug)]
pub struct OomReport {
    /// The device ordinal.
    pub device: i16,
    /// The reserved memory at the point in time.
    pub reserved: Reserved,
    /// Blocks of the requested size, by the `seq` of their allocation. At most two.
    pub same_size: Vec<u64>,
    /// All allocated blocks as the `seq` of their allocation and their bytes, in order. Empty without
    /// [`OomQuery::size`].
    pub in_use: Vec<(u64, u64)>,
    /// What the interrupted step would still have requested. `None` if no earlier iteration shows it.
    pub rest: Option<RestOfStep>,
    /// The allocated bytes during the calls of modules in the interrupted step, if no earlier iteration shows the rest.
    pub calls: Vec<CallLevel>,
    /// What other settings would have done.
    pub what_if: Option<WhatIf>,
}

/// A query while the recording streams.
struct QueryState {
    query: OomQuery,
    replay: Option<Replay>,
    recorder: Option<StepRecorder>,
    policy: Option<PolicyReplay>,
    report: OomReport,
}

impl OomReport {
    /// Streams a recording once and answers all queries, in their order. `progress` receives the number of events read
    /// so far.
    pub fn of(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        queries: Vec<OomQuery>,
        progress: &mut dyn FnMut(u64),
    ) -> Vec<OomReport> {
        let mut states: Vec<QueryState> =
            queries.into_iter().map(|query| QueryState::new(query, trace_index)).collect();
        if states.is_empty() {
            return Vec::new();
        }
        let continues = states.iter().any(|state| state.recorder.is_some());
        let table = if continues { StackTable::new(recording.definitions()) } else { StackTable::default() };
        let mut done = 0;
        recording.stream(&mut |events: &[Event]| {
            states.iter_mut().for_each(|state| state.observe(&table, events));
            done += events.len() as u64;
            progress(done);
        });
        states.into_iter().map(|state| state.finish(&table)).collect()
    }
}

impl QueryState {
    fn new(query: OomQuery, trace_index: &TraceIndex) -> QueryState {
        let device = query.device;
        let report = OomReport {
            device,
            reserved: Reserved::default(),
            same_size: Vec::new(),
            in_use: Vec::new(),
            rest: None,
            calls: Vec::new(),
            what_if: None,
        };
        let recorder = query.interrupted.clone().and_then(StepRecorder::new);
        let policy = query.what_if.clone().map(PolicyReplay::new);
        QueryState { replay: Some(Replay::new(trace_index, Some(device))), recorder, policy, report, query }
    }

    fn observe(&mut self, table: &StackTable, events: &[Event]) {
        if let Some(replay) = &mut self.replay {
            let until = events.partition_point(|e| e.seq <= self.query.seq);
            for e in events.iter().take(until) {
                replay.apply(e, |replay, slot, e, change| {
                    if let Some((recorder, device)) = self.recorder.as_mut().zip(replay.devices().get(slot)) {
                        recorder.observe(&device.allocator, table, e, change);
                    }
                });
            }
            if until < events.len() {
                self.examine(table);
            }
        }
        if let Some(policy) = &mut self.policy {
            events.iter().for_each(|e| policy.observe(e));
        }
    }

    fn examine(&mut self, table: &StackTable) {
        let Some(replay) = self.replay.take() else { return };
        let Some(device) = replay.devices().first() else { return };
        self.report.reserved = Reserved::of(&device.allocator, MAX_BLOCKERS);
        if let Some(recorder) = self.recorder.take() {
            self.report.rest = recorder.rest(&device.allocator, table);
            if self.report.rest.is_none() {
                self.report.calls = recorder.call_levels(&device.allocator);
            }
        }
        if let Some(size) = self.query.size {
            let same = device.allocator.allocated().filter(|(_, block)| block.size == size).map(|(_, block)| block.seq);
            self.report.same_size = same.take(SAME_SIZE).collect();
            self.report.in_use = device.allocator.allocated().map(|(_, block)| (block.seq, block.size)).collect();
            self.report.in_use.sort_unstable();
        }
    }

    fn finish(mut self, table: &StackTable) -> OomReport {
        self.examine(table);
        let rest = self.report.rest.as_ref();
        self.report.what_if = self.policy.map(|policy| policy.finish(rest));
        self.report
    }
}
