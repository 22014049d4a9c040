//! Explains out-of-memory errors and peaks: divides the reserved memory at that point in time, finds what the
//! interrupted step would still have requested, and replays other allocator settings.
//!
//! The first pass finds the points in time ([`ReplayedMemory`](super::ReplayedMemory)), and the main pass explains
//! them.

use std::sync::Arc;

use memtrace_trace::event::Event;

use super::pass::{BlockAllocated, DeviceChange, OutOfMemory, Pass, RecordingStart};
use super::replayed_memory::OomQuery;
use super::reserved::Reserved;
use super::rest_of_step::{CallLevel, FailedRequest, RestOfStep, StepRecorder};
use super::what_if::{PolicyReplay, WhatIf};
use memtrace_input::{Recording, TraceIndex};
use memtrace_replay::{Allocator, Change, Replay};

/// The maximum number of origins to list that block segments.
const MAX_BLOCKERS: usize = 10;
/// The maximum number of blocks to list that are as large as a failed request.
const SAME_SIZE: usize = 2;

/// The answer to one query.
#[derive(Clone, Debug)]
pub struct OomReport {
    /// The device ordinal.
    pub device: i16,
    /// `seq` of the event.
    pub seq: u64,
    /// The reserved memory at the point in time.
    pub reserved: Reserved,
    /// Blocks as large as a failed request, by the `seq` of their allocation. At most two.
    pub same_size: Vec<u64>,
    /// All allocated blocks at an error, as the `seq` of their allocation and their bytes, in order.
    pub in_use: Vec<(u64, u64)>,
    /// The requests that the interrupted step would still have made. `None` if no earlier iteration shows it.
    pub rest: Option<RestOfStep>,
    /// The allocated bytes during the calls of modules in the interrupted step, if no earlier iteration shows the rest.
    pub calls: Vec<CallLevel>,
    /// The outcomes with other settings.
    pub what_if: Option<WhatIf>,
}

impl OomReport {
    fn new(query: &OomQuery, allocator: &Allocator) -> OomReport {
        OomReport {
            device: query.device,
            seq: query.seq,
            reserved: Reserved::of(allocator, MAX_BLOCKERS),
            same_size: Vec::new(),
            in_use: Vec::new(),
            rest: None,
            calls: Vec::new(),
            what_if: None,
        }
    }

    /// Explains peaks that no first pass has found. Streams the recording if there are any. `progress` receives the
    /// number of events read so far.
    pub(super) fn of_peaks(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        queries: &[OomQuery],
        progress: &mut dyn FnMut(u64),
    ) -> Vec<OomReport> {
        if queries.is_empty() {
            return Vec::new();
        }
        let mut replay = Replay::new(trace_index, None);
        let mut settings = SettingsReplay::new(queries);
        let mut reports = Vec::new();
        let mut done = 0;
        recording.stream(&mut |events| {
            settings.observe(events);
            for e in events {
                replay.apply(e, |replay, slot, e, change| {
                    let device = &replay.devices()[slot];
                    let query = queries.iter().find(|query| (query.seq, query.device) == (e.seq, device.device));
                    if let Some(query) = query.filter(|_| matches!(change, Change::Alloc(_))) {
                        reports.push(OomReport::new(query, &device.allocator));
                    }
                });
            }
            done += events.len() as u64;
            progress(done);
        });
        settings.finish(&mut reports);
        reports
    }
}

/// Replays other allocator settings for queries.
#[derive(Debug, Default)]
pub(super) struct SettingsReplay {
    /// With the device and the `seq` of the query.
    replays: Vec<(i16, u64, PolicyReplay)>,
}

impl SettingsReplay {
    pub(super) fn new(queries: &[OomQuery]) -> SettingsReplay {
        let replay = |query: &OomQuery| Some((query.device, query.seq, PolicyReplay::new(query.what_if.clone()?)));
        SettingsReplay { replays: queries.iter().filter_map(replay).collect() }
    }

    pub(super) fn observe(&mut self, events: &[Event]) {
        for (.., replay) in &mut self.replays {
            events.iter().for_each(|e| replay.observe(e));
        }
    }

    /// Adds the results to the reports.
    pub(super) fn finish<'r>(mut self, reports: impl IntoIterator<Item = &'r mut OomReport>) {
        for report in reports {
            let is_meant =
                |(device, seq, _): &mut (i16, u64, PolicyReplay)| (*device, *seq) == (report.device, report.seq);
            let replay = self.replays.extract_if(.., is_meant).next();
            report.what_if = replay.map(|(.., replay)| replay.finish(report.rest.as_ref()));
        }
    }
}

/// Collects the [`OomReport`]s of a device, without other settings.
#[derive(Clone, Debug, Default)]
pub(crate) struct OomReportCollector {
    /// Those of all devices.
    queries: Arc<[OomQuery]>,
    /// The latest steps, until the last error.
    recorder: Option<StepRecorder>,
    reports: Vec<OomReport>,
}

impl From<OomReportCollector> for Vec<OomReport> {
    fn from(collector: OomReportCollector) -> Vec<OomReport> {
        collector.reports
    }
}

impl OomReportCollector {
    fn query(&self, e: &Event) -> Option<&OomQuery> {
        self.queries.iter().find(|query| (query.seq, query.device) == (e.seq, e.device))
    }
}

impl Pass for OomReportCollector {
    fn started(start: &RecordingStart<'_>) -> OomReportCollector {
        let recorder = start.queries.iter().find_map(|query| query.continued.clone()).map(StepRecorder::new);
        OomReportCollector { queries: start.queries.into(), recorder, reports: Vec::new() }
    }

    #[inline]
    fn changed(&mut self, changed: &DeviceChange<'_>) {
        let DeviceChange { allocator, stacks, e, change, .. } = *changed;
        if let Some(recorder) = &mut self.recorder {
            recorder.changed(allocator, stacks, e, change);
        }
        if matches!(change, Change::Alloc(_))
            && let Some(query) = self.query(e)
        {
            self.reports.push(OomReport::new(query, allocator));
        }
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.allocated(allocated.now.step);
        }
    }

    fn out_of_memory(&mut self, error: &OutOfMemory<'_>) {
        let OutOfMemory { e, allocator, stacks, .. } = *error;
        let Some(query) = self.query(e) else { return };
        let mut report = OomReport::new(query, allocator);
        let same = allocator.allocated().filter(|(_, block)| block.size == e.size).map(|(_, block)| block.seq);
        report.same_size = same.take(SAME_SIZE).collect();
        report.in_use = allocator.allocated().map(|(_, block)| (block.seq, block.size)).collect();
        report.in_use.sort_unstable();
        let failed = FailedRequest { stack: e.stack, context: e.context, requested: e.size };
        let recorder = self.recorder.as_ref().filter(|_| query.continued.is_some());
        if let Some(step) = recorder.and_then(|recorder| recorder.interrupted(failed, allocator, stacks)) {
            report.rest = step.rest();
            if report.rest.is_none() {
                report.calls = step.call_levels();
            }
        }
        self.reports.push(report);
        if self.queries.iter().all(|query| query.device != e.device || query.seq <= e.seq) {
            self.recorder = None;
        }
    }
}
