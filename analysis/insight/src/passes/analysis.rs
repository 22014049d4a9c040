//! The main pass over the recording of one process: replay, phases, and every conclusion that depends on them. It
//! streams the recording once.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::slice;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::ids::StackId;

use super::category::Categorizer;
use super::cuda_graphs::CudaGraphs;
use super::custom::CustomCategorizer;
use super::device_blocks::{DeviceBlocks, Tracked};
use super::device_memory::{DeviceMemories, DeviceMemory};
use super::driver::{BlockObserver, DeviceDriver};
use super::first_pass::FirstPass;
use super::forward_only::CacheGrowthTable;
use super::list::{DeviceAnalysis, Passes};
use super::oom_report::{OomReport, SettingsReplay};
use super::open_ranges::OpenRanges;
use super::pass::{Pass, PassedRange, RecordingStart, StayedMemory};
use super::refused::{RefusedRequestLog, RefusedRequests};
use super::released::Release;
use super::replayed_memory::{OomQuery, ReplayedDevice, ReplayedMemory};
use crate::diagnostics::{DeviceCapacity, DeviceFacts, Issue, IssueInputs};
use crate::rules::CustomRules;
use memtrace_input::{LostEvents, Recording, TraceIndex};
use memtrace_replay::{
    Change, DeviceReplay, HoldingObjects, MemoryLocation, ObjectMatcher, Owner, OwnerUsage, PinnedBlocks, Replay,
    UnmappedBytes,
};

/// The results that an analysis adds on request.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnalysisOptions<'a> {
    /// Records, for each of these steps, the blocks that were allocated at the step's peak.
    pub step_peaks: &'a [u32],
    /// Records what happened while a range of this name was open.
    pub range: Option<&'a str>,
    /// Explains these points in time.
    pub queries: &'a [OomQuery],
    /// Divides the blocks into the custom categories of these rules.
    pub custom_rules: Option<&'a CustomRules>,
}

/// The results for one process.
#[derive(Clone, Debug, Default)]
pub struct Analysis {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceAnalysis>,
    /// The use of each device's memory and of page-locked host memory by each owner.
    pub owners: BTreeMap<(MemoryLocation, Owner), OwnerUsage>,
    /// By device: its whole memory. Without a device whose memory in use was never read.
    pub device_memory: BTreeMap<i16, DeviceMemory>,
    /// Page-locked host memory at its peak, by owner and stack.
    pub pinned: BTreeMap<(Owner, StackId), PinnedBlocks>,
    /// The sum over all owners, by location.
    pub locations: BTreeMap<MemoryLocation, OwnerUsage>,
    /// How caches grow with each call that adds a token.
    pub cache_growth: CacheGrowthTable,
    /// The CUDA graphs, and the private pools of PyTorch's allocator.
    pub cuda_graphs: CudaGraphs,
    /// By device: how much of the segments of PyTorch's allocator had no device memory.
    pub unmapped_segments: BTreeMap<i16, UnmappedBytes>,
    /// Requests that CUDA refused to other callers than PyTorch's allocator, and that nothing has served.
    pub refused: RefusedRequestLog,
    /// The Python objects that hold memory.
    pub objects: HoldingObjects,
    /// CUDA frees of memory whose allocation was not recorded.
    pub unmatched_cuda_frees: u64,
    /// Events that could not be decoded.
    pub lost: LostEvents,
}

impl Analysis {
    /// Analyzes a recording, after its first pass. `progress` receives the number of events that the main pass has read
    /// so far.
    pub fn of(recording: &dyn Recording, trace_index: &TraceIndex, progress: &mut dyn FnMut(u64)) -> Analysis {
        Analysis::with_observer(recording, trace_index, &FirstPass::of(recording, trace_index), &mut (), progress)
    }

    /// [`Self::of`], with the results of the first pass. Streams the recording once. `observer` observes every block,
    /// `progress` the number of events read so far.
    pub fn with_observer(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        first_pass: &FirstPass,
        observer: &mut dyn BlockObserver,
        progress: &mut dyn FnMut(u64),
    ) -> Analysis {
        Analysis::with_options(recording, trace_index, first_pass, &AnalysisOptions::default(), observer, progress)
    }

    /// [`Self::with_observer`], with what the options add.
    pub fn with_options(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        first_pass: &FirstPass,
        options: &AnalysisOptions<'_>,
        observer: &mut dyn BlockObserver,
        progress: &mut dyn FnMut(u64),
    ) -> Analysis {
        let mut stream = Stream::new(recording, trace_index, first_pass, options);
        let mut done = 0;
        let lost = recording.stream(&mut |events| {
            // Each of the two has caches of its own.
            stream.settings.observe(events);
            for e in events {
                stream.observe(e, observer);
            }
            done += events.len() as u64;
            progress(done);
        });
        let mut analysis = stream.finish(trace_index, observer);
        analysis.lost = lost;
        analysis
    }

    /// The peaks of a recording without out-of-memory errors, as a first pass that streams it finds them.
    pub fn replayed_memory(&self) -> ReplayedMemory {
        let devices = self.devices.iter().map(|device| ReplayedDevice {
            device: device.device,
            source: device.source,
            peak: (device.states.peak.seq, device.states.peak.usage),
            highest: device.statistics.highest,
            ooms: None,
        });
        ReplayedMemory { devices: devices.collect(), owners: self.owners.clone() }
    }

    /// Explains peaks that are known only after the main pass. Streams the recording if there are any. `progress`
    /// receives the number of events read so far.
    pub fn explain_peaks(
        &mut self,
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        queries: &[OomQuery],
        progress: &mut dyn FnMut(u64),
    ) {
        let reports = OomReport::of_peaks(recording, trace_index, queries, progress);
        for report in reports {
            if let Some(device) = self.devices.iter_mut().find(|device| device.device == report.device) {
                device.oom_reports.push(report);
            }
        }
    }
}

/// A recording that streams through all passes.
struct Stream<'a> {
    replay: Replay,
    tracked: Tracked<'a>,
    /// In the order of the replay's devices.
    devices: Vec<DeviceDriver>,
    /// The open ranges of the requested name.
    ranges: Option<OpenRanges<'a>>,
    /// The releases that are still to come, in the order of time.
    releases: Peekable<slice::Iter<'a, Release>>,
    /// The number of events at the next point in time that `objects` or `releases` has.
    next_point: u64,
    objects: ObjectMatcher<'a>,
    settings: SettingsReplay,
    cuda_graphs: CudaGraphs,
    memories: DeviceMemories,
    refused: RefusedRequests,
    last_seq: u64,
}

impl<'a> Stream<'a> {
    fn new(
        recording: &'a dyn Recording,
        trace_index: &TraceIndex,
        first_pass: &'a FirstPass,
        options: &AnalysisOptions<'a>,
    ) -> Stream<'a> {
        let definitions = recording.definitions();
        let names = &first_pass.names;
        let has_names = definitions.tensor_names.iter().any(|name| name.kind == TensorKind::Parameter);
        let tracked = Tracked {
            tracker: first_pass.tracker(recording),
            names: has_names.then_some(names),
            custom: options.custom_rules.map(|rules| CustomCategorizer::new(rules, definitions, names)),
            compile_contexts: recording.compile_contexts(),
        };
        let categorizer = Categorizer::new(definitions, has_names).with_kept_state(recording.kept_state());
        let blocks = DeviceBlocks::new(categorizer);
        let passes = Passes::started(&RecordingStart {
            definitions,
            is_inference: tracked.tracker.is_inference(),
            dropped_steps: tracked.tracker.dropped_steps(),
            step_peaks: options.step_peaks,
            release_points: first_pass.release_points,
            queries: options.queries,
        });
        let replay = Replay::new(trace_index, None);
        let driver = |of: &DeviceReplay| DeviceDriver::new(of.device, of.source, blocks.clone(), passes.clone());
        Stream {
            devices: replay.devices().iter().map(driver).collect(),
            replay,
            tracked,
            ranges: options.range.map(|name| OpenRanges::new(name, definitions)),
            releases: first_pass.releases.iter().peekable(),
            next_point: 0,
            objects: ObjectMatcher::new(definitions),
            settings: SettingsReplay::new(options.queries),
            cuda_graphs: CudaGraphs::default(),
            memories: DeviceMemories::default(),
            refused: RefusedRequests::default(),
            last_seq: 0,
        }
    }

    #[inline]
    fn observe(&mut self, e: &Event, observer: &mut dyn BlockObserver) {
        if self.next_point < e.seq {
            self.points_passed(e.seq);
        }
        self.last_seq = e.seq;
        if e.source == Source::Label {
            self.range(e);
        } else {
            self.event(e, observer);
        }
        observer.event_processed(&self.replay, e, self.tracked.tracker.now());
    }

    /// A range that the program names starts or ends.
    fn range(&mut self, e: &Event) {
        self.tracked.tracker.observe_label(e);
        self.cuda_graphs.observe_range(e);
        self.devices.iter_mut().for_each(|device| device.range(e));
        let Some(boundary) = self.ranges.as_mut().and_then(|ranges| ranges.observe(e)) else { return };
        let now = *self.tracked.tracker.now();
        for (driver, device) in self.devices.iter_mut().zip(self.replay.devices()) {
            driver.range_passed(&PassedRange { e, now, boundary, usage: device.allocator.usage() });
        }
    }

    /// The program has come to points in time before the event `seq`.
    #[cold]
    fn points_passed(&mut self, seq: u64) {
        self.objects.before(seq, &self.replay);
        self.release(|release| release.e.seq < seq);
        let next_release = self.releases.peek().map_or(u64::MAX, |release| release.e.seq);
        self.next_point = self.objects.next_point().min(next_release);
    }

    /// The program has come to the points of these releases.
    fn release(&mut self, is_now: impl Fn(&Release) -> bool) {
        while let Some(release) = self.releases.next_if(|release| is_now(release)) {
            let Stream { replay, tracked, devices, memories, .. } = self;
            let now = *tracked.tracker.now();
            if let Some((driver, device)) = devices.get_mut(release.slot).zip(replay.devices().get(release.slot)) {
                driver.memory_stayed(&StayedMemory { release, now, replay, device, memories });
            }
        }
    }

    #[inline]
    fn event(&mut self, e: &Event, observer: &mut dyn BlockObserver) {
        let Stream { replay, tracked, devices, memories, .. } = self;
        if let Some(pool) = self.cuda_graphs.observe(e)
            && let Some(device) = devices.iter_mut().find(|device| device.device() == e.device)
        {
            device.captured_into(pool);
        }
        replay.apply(e, |replay, slot, e, change| {
            let Some(device) = devices.get_mut(slot) else { return };
            device.observe((replay, slot), tracked, observer, e, change);
            if device.peak_seq() == e.seq && matches!(change, Change::Alloc(_)) {
                memories.allocated_peak(replay, e);
            }
        });
        memories.observe(replay, e);
        self.refused.observe(replay, tracked.tracker.now().step, e);
    }

    fn finish(mut self, trace_index: &TraceIndex, observer: &mut dyn BlockObserver) -> Analysis {
        let ticks = trace_index.tick_range.map_or(0, |(_, last)| last);
        let last = &Event { seq: self.last_seq, ticks, action: Action::Snapshot, ..Event::EMPTY };
        self.release(|_| true);
        let Stream { replay, tracked, devices, .. } = self;
        let drivers = devices.into_iter().zip(replay.devices());
        let devices = drivers.map(|(driver, of)| driver.finish(&of.allocator, &tracked, last, observer));
        let mut devices: Vec<DeviceAnalysis> = devices.collect();
        self.settings.finish(devices.iter_mut().flat_map(|device| &mut device.oom_reports));
        let physical = replay.physical();
        let total = |(location, _): &(MemoryLocation, Owner)| (*location, physical.total(*location));
        Analysis {
            devices,
            device_memory: self.memories.finish(&replay, last),
            owners: physical.usage_by_owner().clone(),
            pinned: physical.pinned_at_peak(),
            locations: physical.usage_by_owner().keys().map(total).collect(),
            cache_growth: tracked.tracker.cache_growth().clone(),
            cuda_graphs: self.cuda_graphs,
            objects: self.objects.finish(&replay),
            unmapped_segments: physical.unmapped_segments().clone(),
            refused: self.refused.into(),
            unmatched_cuda_frees: physical.unmatched_frees(),
            lost: LostEvents::default(),
        }
    }
}

impl Analysis {
    /// The issues of the process, in no particular order. `memory_limit` is the memory that the caching allocator can
    /// have on a device, in bytes; `None` if it is unknown.
    pub fn issues(
        &self,
        inputs: &IssueInputs<'_>,
        memory_limit: &dyn Fn(&DeviceAnalysis) -> Option<u64>,
    ) -> Vec<Issue> {
        let computing: Vec<i16> =
            self.devices.iter().filter(|one| one.diagnostics.computes()).map(|one| one.device).collect();
        let issues_of = |device: &DeviceAnalysis| {
            let mut issues = device.diagnostics.issues(&DeviceFacts {
                inputs,
                ordinal: device.device,
                source: device.source,
                peak: &device.states.peak,
                peaks: &device.statistics.highest,
                table: &device.table,
                growth: &device.growth,
                ooms: &device.ooms,
                serving: Some(&device.serving).filter(|_| !device.table.has_backward()),
                computes: device.diagnostics.computes(),
                computes_elsewhere: computing.iter().copied().find(|other| *other >= 0 && *other != device.device),
                capacity: DeviceCapacity {
                    limit: memory_limit(device),
                    readings: self.device_memory.get(&device.device),
                },
            });
            let trains = device.table.has_backward();
            issues.retain(|issue| trains || !device.serving.excludes(issue.rule.id, issue.place.map(|place| place.0)));
            issues
        };
        self.devices.iter().flat_map(issues_of).collect()
    }
}
