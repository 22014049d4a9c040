//! Builds a summary from the analyses of all processes.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::clock::{Calibration, MAX_EPOCH_NS};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::build_beside::{add_processes_beside, add_trainers};
use crate::build_host::host_memory;
use crate::build_launch::{ProcessUses, launch_summary};
use crate::colocated::colocation;
use crate::compare::DevicePeak;
use crate::conclusions::VerdictSummary;
use crate::cuda_graphs::{OutputNames, cuda_graphs};
use crate::device_memory::{DeviceInputs, DeviceMemorySummary, device_breakdown, device_memory};
use crate::diff::DiffOptions;
use crate::explain::{explain, explain_part};
use crate::holders::Holders;
use crate::host_memory::HostKill;
use crate::kv_caches::kv_caches_by_model;
use crate::outside_allocation::OutsideAllocation;
use crate::owners::{by_owner, owner_name};
use crate::pinned::pinned_lines;
use crate::pool_query::add_pools;
use crate::positions::when_refused;
use crate::progress::Progress;
use crate::refused::{RefusedRequestSummary, refused_requests};
use crate::released::{ReleasePoints, release_points, released_parts};
use crate::server::{Refusal, ServerInputs, server};
use crate::shared_memory::DriverCalls;
use crate::step_estimate::{StepEstimate, step_estimate};
use crate::suggestions::{SuggestionQuery, suggestions};
use crate::summary::{
    AllocationGroup, CalledFunctionSummary, CalledFunctionsSummary, CategoryAmount, CategoryRuleSummary,
    CompileContextAmount, CustomCategoryAmount, DeviceSummary, DroppedEvents, EVENTS_OF_UNRECORDED_PROCESSES,
    GrowingKvCache, IssueSummary, JoinedPhasesSummary, KeptAllocation, KeptCategory, LabelSummary, LargerInputs,
    Levels, MemoryState, ModuleGroupSummary, ModuleSummary, NativeObjectSummary, NotRecordedSummary, NoticeSummary,
    OomForecastSummary, OomSummary, OwnerBytes, OwnerSummary, PhaseAmount, PhaseRuleSummary, PhaseSummary,
    ProcessSummary, RangeSummary, ReleasedSummary, RepeatedModulesSummary, RunSummary, SUMMARY_VERSION, StepPhase,
    StepSummary, SuggestionSummary, Summary, UnmappedSegmentsSummary, is_snapshot,
};
use crate::tensors::{name_pattern, requested_for};
use crate::totals::totals;
use crate::why::{
    Replaying, growth_after_first_step, larger_inputs, limit_at, memory_limit, no_issue_remark, oom_queries,
    oom_report, oom_to_explain, outlier_step, refused_by_pytorch, reserved_summary, what_if_summary,
};
use crate::xla_programs::xla_summary;
use memtrace_input::error::Result;
use memtrace_input::load::{DeviceSamples, Exit, Process, Run};
use memtrace_input::pool_figures::read_pool_figures;
use memtrace_input::symbols::ObjectReport;
use memtrace_input::xla::{XlaDump, read_xla_dump};
use memtrace_input::{CompileContextId, EventSource};
use memtrace_insight::diagnostics::{Issue, IssueInputs, sort_issues};
use memtrace_insight::locations::{Locations, frame_summary};
use memtrace_insight::passes::{
    Amount, Analysis, AnalysisOptions, BlockAllocation, BlockClassification, BlockLifetimes, BlockObserver,
    CacheGrowthTable, CalledFunction, CalledFunctions, Category, Composition, CustomCategorizer, DeviceAnalysis,
    DeviceUses, FirstPass, FirstPassOptions, JoinedPhases, LabelRow, LifetimeCollector, MissingModules, ModuleTree,
    Oom, OomReport, Origin, Phase, PhaseRow, ProgramPosition, RefusedRequest, ReleasePoint, RestOfStep, RunPart,
    StackTable, StepRows, private_pool_text, state_needed,
};
use memtrace_insight::rules::{CustomCategory, CustomRules, library_name};
use memtrace_insight::units::{count_text, estimated_duration_text};
use memtrace_output::SourceAccess;
use memtrace_replay::{AllocatorSettings, MemoryLocation, Names, Owner, Replay, Usage};

/// The maximum number of allocation groups listed for one point in time.
const LARGEST_ALLOCATIONS: usize = 20;
/// The maximum number of modules listed for the peak. A listed module has more than one in `SMALLEST_MODULE` parts of
/// the peak.
const MODULES: usize = 500;
const SMALLEST_MODULE: u64 = 500;
/// An allocation outside PyTorch is reported at an error if it is at least 10 % (1/10) of the device.
const LARGE_PART: u64 = 10;

/// Losses that the launcher counts and that every trace also reports. They are not counted twice.
const REPORTED_BY_TRACES: [&str; 4] = ["events", "lost", "late", "dropped"];

/// The options of [`summarize_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SummaryOptions<'a> {
    /// How much of the allocator's policy is replayed.
    pub replaying: Replaying,
    /// The rules of the user's own categories.
    pub custom_rules: Option<&'a CustomRules>,
    /// Also summarizes the ranges of this name.
    pub range: Option<&'a str>,
    /// Also summarizes what stayed after this point.
    pub released_after: Option<&'a ReleasePoint>,
    /// Whether the caller knows that the recording goes on, and that all events up to now are in it. That it has no end
    /// is then no problem.
    pub is_recording: bool,
}

/// Reads every process of a run once and summarizes the run.
pub fn summarize(run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Summary> {
    summarize_with(run, &SummaryOptions::default(), progress)
}

/// Summarizes a run as [`summarize`] does, with what the options add.
pub fn summarize_with(
    run: &Run,
    options: &SummaryOptions<'_>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Summary> {
    let mut processes = Vec::new();
    let machine = Machine::of(run);
    let mut device_uses = Vec::new();
    let mut peaks: Vec<Vec<DevicePeak<'_>>> = Vec::new();
    let sources = SourceAccess::of(run, DiffOptions::default().sources);
    let mut pool_problems = Vec::new();
    let has_imports = run.processes().iter().any(|process| process.trace_index().has_imports);
    for process in run.processes() {
        let what = match process.rank() {
            Some(rank) => format!("reading rank {rank}"),
            None => format!("reading process {}", process.pid()),
        };
        let total = process.recording().event_count();
        let mut on_progress = |done| progress(Progress { what: &what, done, total });
        let (recording, trace_index) = (process.recording(), process.trace_index());
        let custom_rules = options.custom_rules;
        let points = release_points(options.released_after.map_or(&[], std::slice::from_ref), process.definitions());
        let first_pass = FirstPass::with_options(
            recording,
            trace_index,
            &FirstPassOptions { released_after: &points.all, replayed_memory: true },
            None,
            &mut on_progress,
        );
        let replayed_memory = first_pass.replayed_memory.as_ref();
        let queries = replayed_memory.map(|memory| oom_queries(process, memory, options.replaying));
        let mut observers = Observers {
            lifetimes: LifetimeCollector::default(),
            uses: DeviceUses::default(),
            driver: has_imports.then(DriverCalls::default),
            calibration: recording.calibration(),
        };
        let mut analysis = Analysis::with_options(
            recording,
            trace_index,
            &first_pass,
            &AnalysisOptions {
                custom_rules,
                range: options.range,
                queries: queries.as_deref().unwrap_or_default(),
                ..AnalysisOptions::default()
            },
            &mut observers,
            &mut on_progress,
        );
        let lifetimes = observers.lifetimes.finish();
        device_uses.push(ProcessUses::of(process, &observers.uses, observers.driver, &analysis));
        if queries.is_none() {
            // The first pass had no reason to stream the recording. So this is the second stream at most.
            let queries = oom_queries(process, &analysis.replayed_memory(), options.replaying);
            let what = "replaying the allocator";
            analysis.explain_peaks(recording, trace_index, &queries, &mut |done| {
                progress(Progress { what, done, total });
            });
        }
        let what = "replaying changes";
        let mut on_progress = |done, total| progress(Progress { what, done, total });
        let results = Results {
            analysis: &analysis,
            lifetimes: &lifetimes,
            first_pass: &first_pass,
            points: &points,
            machine: &machine,
        };
        let mut summary = process_summary(process, &results, custom_rules, &mut on_progress);
        let figures = read_pool_figures(run.path(), process.pid()).unwrap_or_else(|problem| {
            pool_problems.push(problem);
            None
        });
        let is_compared = process.rank().is_some() && run.processes().len() > 1;
        let of_device = |device: &DeviceAnalysis| {
            DevicePeak::of(process, &first_pass.names, &sources, (&analysis, device), &device.states.peak)
        };
        peaks.push(analysis.devices.iter().filter(|_| is_compared).filter_map(of_device).collect());
        add_pools(process, &analysis, &figures.unwrap_or_default(), &mut summary.devices);
        processes.push(summary);
    }
    let launch = launch_summary(run, &processes, &device_uses, &peaks);
    add_processes_beside(run, &mut processes, &device_uses);
    add_trainers(run, &mut processes, &device_uses);
    processes.sort_by_key(|p| (std::cmp::Reverse(severity(p)), p.rank, p.pid));
    let manifest = run.manifest();
    let mut losses: BTreeMap<String, u64> = manifest.losses.clone();
    losses.retain(|name, _| !REPORTED_BY_TRACES.contains(&name.as_str()));
    for (name, count) in processes.iter().flat_map(|p| &p.losses) {
        let sum = losses.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
    let unrecorded = manifest.unrecordable.iter().fold(0u64, |sum, process| sum.saturating_add(process.lost_events));
    losses.insert(EVENTS_OF_UNRECORDED_PROCESSES.to_owned(), unrecorded);
    losses.retain(|_, count| *count > 0);
    let unusable = run.problems().iter().map(|p| format!("{}: {}", p.path.display(), p.text));
    let without_end = without_end(&processes).or_else(|| manifest.without_end().map(str::to_owned));
    let without_end = without_end.filter(|_| !options.is_recording);
    let dump = read_xla_dump(run.path());
    let problems = without_end
        .into_iter()
        .chain(unusable)
        .chain(dump.iter().flat_map(dump_problems))
        .chain(pool_problems)
        .collect();
    let directory = run.processes().iter().find_map(Process::directory);
    let host = host_memory(run, &processes, options.is_recording);
    let not_recorded = manifest.not_recorded().into_iter();
    let mut summary = Summary {
        version: SUMMARY_VERSION.to_owned(),
        run: run_summary(run, &processes, host.as_ref().and_then(|host| host.kill.as_ref()), options.is_recording),
        verdict: VerdictSummary::default(),
        processes,
        launch,
        losses,
        native_objects: run.native_objects().iter().map(native_object).collect(),
        problems,
        unrecordable: manifest.unrecordable.clone(),
        not_recorded: not_recorded.map(|one| NotRecordedSummary { is_loss: one.is_loss, text: one.text }).collect(),
        gaps: Vec::new(),
        files: Vec::new(),
        xla: dump.as_ref().map(|dump| xla_summary(dump, directory)),
        host,
    };
    summary.conclude();
    Ok(summary)
}

/// The summary of the command. `is_recording` is true if the recording goes on.
fn run_summary(run: &Run, processes: &[ProcessSummary], kill: Option<&HostKill>, is_recording: bool) -> RunSummary {
    let manifest = run.manifest();
    let command = match (&manifest.command[..], run.processes()) {
        ([], [only]) => only.info().argv.clone(),
        (command, _) => command.to_vec(),
    };
    let exit = match (manifest.exit, run.processes()) {
        (exit, [only]) if exit == Exit::default() => only.exit(),
        (exit, _) => exit,
    };
    // `run.json` can claim any time.
    let claimed = |ns: Option<u64>| ns.map(|ns| ns.min(MAX_EPOCH_NS));
    let recorded = || run.processes().iter().filter_map(times);
    let started_ns = claimed(manifest.started_ns).or_else(|| recorded().map(|(first, _)| first).min());
    let ended_ns = claimed(manifest.ended_ns).or_else(|| recorded().map(|(_, last)| last).max());
    let locks_missed = run.processes().iter().map(|process| process.recording().counter(Counter::LimitLockMissed));
    RunSummary {
        path: run.path().display().to_string(),
        memtrace_version: (!manifest.memtrace.is_empty()).then(|| manifest.memtrace.clone()),
        command,
        exit,
        outcome: outcome(exit, processes, kill, is_recording),
        started_ns,
        duration_ns: started_ns.zip(ended_ns).map(|(start, end)| end.saturating_sub(start)),
        events: processes.iter().map(|p| p.events).sum(),
        unrecorded_processes: manifest.unrecorded_processes(),
        simulated: manifest.simulated.clone(),
        limit_bytes: manifest.limit_bytes,
        limit_lock_missed: Some(locks_missed.fold(0, u64::saturating_add)).filter(|count| *count > 0),
    }
}

/// The problems of XLA's dump.
fn dump_problems(dump: &XlaDump) -> impl Iterator<Item = String> {
    let more = (dump.further_problems > 0).then(|| format!("cannot read {} more files in xla", dump.further_problems));
    dump.problems.iter().cloned().chain(more)
}

/// The observers of a process's events, apart from its analysis.
struct Observers {
    lifetimes: LifetimeCollector,
    uses: DeviceUses,
    /// Followed if a process of the run opened memory of another one.
    driver: Option<DriverCalls>,
    calibration: Calibration,
}

impl BlockObserver for Observers {
    #[inline]
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        self.lifetimes.allocated(device, block, usage);
    }

    #[inline]
    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    ) {
        self.lifetimes.lifetime_ended(device, block, classification, evidence, free);
    }

    #[inline]
    fn event_processed(&mut self, replay: &Replay, e: &Event, now: &ProgramPosition) {
        self.lifetimes.event_processed(replay, e, now);
        self.uses.observe(e);
        if let Some(driver) = &mut self.driver {
            driver.observe(e, &self.calibration);
        }
    }
}

fn native_object(object: &ObjectReport) -> NativeObjectSummary {
    NativeObjectSummary {
        path: object.id.path.to_string(),
        build_id: object.id.build_id.to_string(),
        addresses: object.addresses,
        addresses_with_function: object.addresses_with_function,
        addresses_with_line: object.addresses_with_line,
        symbol_file: (!object.symbol_file.is_empty()).then(|| object.symbol_file.clone()),
        notes: object.notes.clone(),
    }
}

/// The problem text for recordings without an end; `None` if all have one.
fn without_end(processes: &[ProcessSummary]) -> Option<String> {
    let count = processes.iter().filter(|p| p.recording_end_reason.is_none()).count();
    (count > 0).then(|| {
        format!(
            "{count} of {} recordings have no end: memtrace was killed, or is still recording. Events that it had not \
             written (of the last quarter of a second, if it kept up) and all later events are missing and not counted",
            processes.len()
        )
    })
}

/// The time of the first and of the last event of a process, in nanoseconds since the epoch. `None` if the recording
/// has no times.
fn times(process: &Process) -> Option<(u64, u64)> {
    let calibration = process.recording().calibration();
    // A recording without times has 0 in all its events.
    process
        .trace_index()
        .tick_range
        .filter(|(_, last)| *last > 0)
        .map(|(first, last)| (calibration.epoch_ns(first), calibration.epoch_ns(last)))
}

/// The sort key of a process: out-of-memory errors first, then the highest peak.
fn severity(process: &ProcessSummary) -> (bool, u64) {
    let has_oom = process.devices.iter().any(|d| d.oom_count > 0);
    let highest_peak = process.devices.iter().map(|d| d.highest.allocated_bytes).max().unwrap_or(0);
    (has_oom, highest_peak)
}

/// Why a recording ended whose process goes on without memtrace.
const DETACHED: &str = "detached";

fn outcome(exit: Exit, processes: &[ProcessSummary], kill: Option<&HostKill>, is_recording: bool) -> String {
    // As far as the recording shows, an error ended the process if the process did nothing after it.
    let first_oom = processes
        .iter()
        .flat_map(|p| p.devices.iter().flat_map(move |d| d.ooms.iter().map(move |oom| (p, d, oom))))
        .filter(|(_, _, oom)| oom.fatal != Some(false))
        // The first error across processes counts. Later errors are often a consequence of it.
        .min_by_key(|(_, _, oom)| (oom.fatal.is_none(), oom.in_use.time_ns));
    // A command can go on or end in another way after the kernel has killed one of its processes.
    let kill = kill.filter(|_| exit.success() != Some(true));
    let end = kill.map(|kill| kill.outcome.clone()).or_else(|| exit.text());
    let end = end.unwrap_or_else(|| unknown_end(processes, is_recording));
    let Some((process, device, oom)) = first_oom else { return end };
    let when = when_refused(device, oom);
    match (process.rank, exit.success()) {
        (None, Some(false)) => format!("ended by an out-of-memory error{when}"),
        (Some(rank), Some(false)) => format!("ended by an out-of-memory error in rank {rank}{when}"),
        _ if is_snapshot(processes) => format!("{end}, taken after an out-of-memory error{when}"),
        (Some(rank), _) => format!("{end}, with an out-of-memory error in rank {rank}{when}"),
        (None, _) => format!("{end}, with an out-of-memory error in process {}{when}", process.pid),
    }
}

/// The outcome of a run whose exit is unknown.
fn unknown_end(processes: &[ProcessSummary], is_recording: bool) -> String {
    let reasons = || processes.iter().map(|process| process.recording_end_reason.as_deref());
    let end = if is_snapshot(processes) {
        match processes.len() {
            1 => "a snapshot",
            several => return format!("{several} snapshots"),
        }
    } else if is_recording {
        "the recording so far"
    } else if reasons().any(|reason| reason.is_none()) {
        "the recording was cut off"
    } else if reasons().any(|reason| reason == Some(DETACHED)) {
        "memtrace detached from the process"
    } else {
        "end unknown"
    };
    end.to_owned()
}

/// The results of the passes over a process's events.
struct Results<'a> {
    analysis: &'a Analysis,
    lifetimes: &'a [BlockLifetimes],
    first_pass: &'a FirstPass,
    points: &'a ReleasePoints,
    machine: &'a Machine<'a>,
}

fn process_summary(
    process: &Process,
    results: &Results<'_>,
    custom_rules: Option<&CustomRules>,
    progress: &mut dyn FnMut(u64, u64),
) -> ProcessSummary {
    let Results { analysis, lifetimes, first_pass, points, machine } = *results;
    let names = &first_pass.names;
    let info = process.info();
    let oom_of = |device: &DeviceAnalysis| Some((device.device, oom_to_explain(device, process)?.seq));
    let explained_ooms = analysis.devices.iter().filter_map(oom_of).collect();
    let context = Context {
        cache_growth: &analysis.cache_growth,
        process,
        definitions: process.definitions(),
        locations: Locations::new(process.definitions(), process.directory()),
        calibration: process.recording().calibration(),
        table: first_pass.stacks(),
        names,
        custom: custom_rules.map(|rules| CustomCategorizer::new(rules, process.definitions(), names)),
        holders: Holders::of(process, &analysis.objects.holder_changes, &explained_ooms, &released_at(analysis)),
        points,
        machine,
        outputs: OutputNames::of(&analysis.cuda_graphs, names, &analysis.objects.holder_changes),
    };
    let mut devices: Vec<DeviceSummary> = analysis.devices.iter().map(|d| context.device(d, analysis)).collect();
    for (summary, device) in devices.iter_mut().zip(&analysis.devices) {
        let found = oom_report(device, process, &device.oom_reports);
        let rest = found.and_then(|found| found.rest.as_ref());
        summary.suggestions = context.suggestions(device, analysis, (lifetimes, rest), progress);
    }
    devices.sort_by_key(|d| (std::cmp::Reverse((d.oom_count > 0, d.highest.allocated_bytes)), d.device));
    let issues = context.issues(analysis, &devices);
    ProcessSummary {
        pid: process.pid(),
        ppid: info.ppid,
        rank: process.rank(),
        world_size: process.world_size(),
        host: info.host.clone(),
        argv: info.argv.clone(),
        exit: process.exit(),
        recording_end_reason: process.recording().end().map(|end| end.reason.clone()),
        trace: process.trace_name().into_owned(),
        snapshot: None,
        events: process
            .recording()
            .event_count()
            .saturating_sub(process.recording().derived_events())
            .saturating_sub(analysis.lost.events),
        dropped: dropped_events(process),
        no_issue_remark: no_issue_remark(&devices).filter(|_| issues.is_empty()),
        devices,
        refused_requests: context.refused_requests(analysis),
        refused_requests_left_out: analysis.refused.left_out,
        issues,
        pinned_host_memory: context.owners(analysis, MemoryLocation::Host),
        pinned_host_lines: pinned_lines(analysis, &context.locations),
        losses: losses(process, analysis),
        notices: notices(process),
    }
}

/// By device: after which events the program had released memory.
fn released_at(analysis: &Analysis) -> BTreeSet<(i16, u64)> {
    let reached = |device: &DeviceAnalysis| {
        let ordinal = device.device;
        device
            .states
            .released
            .iter()
            .filter(|one| one.times > 0)
            .map(move |one| (ordinal, one.kept.seq))
            .collect::<Vec<_>>()
    };
    analysis.devices.iter().flat_map(reached).collect()
}

/// The sentence about what is missing if the state of the program at the first kept event is not known completely.
pub(crate) fn missing_state(process: &Process) -> Option<&'static str> {
    process.definitions().rotation?;
    let is_known = process.recording().kept_state().is_some_and(|state| !state.is_partial);
    (!is_known).then_some("steps and categories before are unknown, so steps count from the first kept event")
}

/// The events that rotation has dropped.
pub(crate) fn dropped_events(process: &Process) -> Option<DroppedEvents> {
    let rotation = process.definitions().rotation.as_ref()?;
    let (began, until) = rotation.dropped_ticks;
    let (_, last) = process.trace_index().tick_range?;
    let calibration = process.recording().calibration();
    let ns_since = |ticks: u64| calibration.epoch_ns(last).saturating_sub(calibration.epoch_ns(ticks));
    let (kept_ns, recorded_ns) = (ns_since(until), ns_since(began));
    let text = format!(
        "the recording has the last {} of {}: {} earlier events were dropped; what they left in use is kept",
        estimated_duration_text(kept_ns),
        estimated_duration_text(recorded_ns),
        count_text(rotation.dropped)
    );
    let missing = missing_state(process).map_or(String::new(), |missing| format!("; {missing}"));
    let text = text + &missing;
    Some(DroppedEvents { events: rotation.dropped, kept_ns, recorded_ns, text })
}

/// The notices by topic. Threads write them to their own rings, so the order in the file depends on when each ring was
/// drained. Notices of one topic keep that order.
fn notices(process: &Process) -> Vec<NoticeSummary> {
    let notice = |n: &memtrace_trace::file::Notice| NoticeSummary {
        topic: n.topic.to_string(),
        text: n.text.to_string(),
        status: n.status.name().to_owned(),
    };
    let mut notices: Vec<NoticeSummary> = process.definitions().notices.iter().map(notice).collect();
    notices.sort_by(|a, b| a.topic.cmp(&b.topic));
    notices
}

/// Everything that is missing or inconsistent in a recording, by name.
fn losses(process: &Process, analysis: &Analysis) -> BTreeMap<String, u64> {
    let mut losses = BTreeMap::new();
    let mut add = |name: &str, count: u64| {
        if count > 0 {
            *losses.entry(name.to_owned()).or_default() += count;
        }
    };
    let recording = process.recording();
    for counter in Counter::ALL.iter().filter(|counter| counter.is_loss()) {
        add(counter.name(), recording.counter(*counter));
    }
    if let Some(end) = recording.end() {
        add("events_lost", end.lost);
        add("events_late", end.late);
    }
    let damage = recording.damage();
    add("damaged_ranges", damage.damaged_ranges.saturating_sub(u64::from(damage.is_tail_truncated)));
    add("bytes_skipped", damage.bytes_skipped);
    add("unknown_frames", damage.unknown_frames);
    add("unknown_definitions", damage.unknown_definitions);
    add("malformed_definitions", damage.malformed_definitions);
    add("definitions_over_budget", damage.over_budget);
    // A damaged block's number of events can itself be damaged, so blocks are counted too.
    add("undecodable_blocks", analysis.lost.blocks);
    add("undecodable_events", analysis.lost.events);
    add("unmatched_cuda_frees", analysis.unmatched_cuda_frees);
    for device in &analysis.devices {
        let a = &device.statistics.anomalies;
        add("unmatched_frees", a.unmatched_frees);
        add("missing_frees", a.missing_frees);
        add("allocations_outside_segments", a.outside_segments);
        add("misfitting_allocations", a.misfits);
        add("unmatched_segment_frees", a.unmatched_segment_frees);
        add("totals_mismatched", a.totals_mismatched);
    }
    losses
}

/// The common parts of the names of several tensors.
struct CommonName {
    pattern: String,
    /// The data type and shape of all of them, if it is the same.
    shape: Option<String>,
}

/// The inputs for summarizing one process.
struct Context<'a> {
    process: &'a Process,
    definitions: &'a Definitions,
    locations: Locations<'a>,
    calibration: Calibration,
    table: &'a StackTable,
    names: &'a Names,
    custom: Option<CustomCategorizer<'a>>,
    holders: Holders,
    outputs: OutputNames,
    points: &'a ReleasePoints,
    cache_growth: &'a CacheGrowthTable,
    machine: &'a Machine<'a>,
}

/// Facts about the run's devices and processes as a whole.
struct Machine<'a> {
    samples: &'a DeviceSamples,
    /// Names of the run's processes, by pid.
    processes: BTreeMap<u32, String>,
    /// The PCI bus ids of devices that only one process can use: simulated devices of a dry run.
    exclusive_devices: BTreeSet<&'a str>,
    /// The PCI bus ids of devices on which several processes of the run have a PyTorch.
    shared_devices: BTreeSet<&'a str>,
    /// The GPUs are simulated: the run does not show how long kernels take.
    is_simulated: bool,
}

impl<'a> Machine<'a> {
    fn of(run: &'a Run) -> Machine<'a> {
        let named = run.processes().iter().zip(run.process_names());
        let name = |process: &Process, name: String| match process.rank() {
            Some(_) => name,
            None => format!("process {name}"),
        };
        Machine {
            samples: run.device_samples(),
            processes: named.map(|(process, text)| (process.pid(), name(process, text))).collect(),
            exclusive_devices: exclusive_devices(run),
            shared_devices: shared_devices(run),
            is_simulated: run.manifest().simulated.is_some(),
        }
    }
}

/// The PCI bus ids of the simulated devices that one process of a dry run uses. Only processes of the run can use them.
fn exclusive_devices(run: &Run) -> BTreeSet<&str> {
    let manifest = run.manifest();
    let has_unrecorded = manifest.unlisted > 0 || manifest.unrecordable.iter().any(|process| process.uses_cuda);
    if manifest.simulated.is_none() || has_unrecorded {
        return BTreeSet::new();
    }
    let mut users: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    for process in run.processes() {
        // A redacted run has no bus ids: then all devices count as one.
        for device in process.definitions().devices.values() {
            users.entry(&device.pci).or_default().insert(process.pid());
        }
    }
    users.into_iter().filter(|(_, pids)| pids.len() == 1).map(|(pci, _)| pci).collect()
}

/// The PCI bus ids of devices on which several processes of a run have a PyTorch.
fn shared_devices(run: &Run) -> BTreeSet<&str> {
    let (mut found, mut shared) = (BTreeSet::new(), BTreeSet::new());
    for process in run.processes() {
        let sources = process.trace_index().sources.iter().filter(|(_, source)| **source == EventSource::Torch);
        let definitions = sources.filter_map(|(device, _)| {
            process.definitions().devices.get(&u32::try_from(*device).ok()?).map(|definition| &*definition.pci)
        });
        for pci in definitions.filter(|pci| !pci.is_empty()) {
            if !found.insert(pci) {
                shared.insert(pci);
            }
        }
    }
    shared
}

impl Context<'_> {
    fn device(&self, analysis: &DeviceAnalysis, process_analysis: &Analysis) -> DeviceSummary {
        let found = oom_report(analysis, self.process, &analysis.oom_reports);
        let explained = oom_to_explain(analysis, self.process);
        let refused = explained.is_some_and(|oom| refused_by_pytorch(&oom.allocation()));
        let what_if = found.and_then(|found| found.what_if.as_ref());
        let estimate = explained.and_then(|oom| self.step_estimate(analysis, oom, found));
        let definition = u32::try_from(analysis.device).ok().and_then(|d| self.definitions.devices.get(&d));
        let interrupted = explained.and_then(|oom| oom.position.step);
        let (later, later_steps_count) = analysis.table.later();
        let kept_steps = analysis.table.kept();
        let device_memory = self.device_memory(process_analysis, analysis.device);
        let cuda_graphs = cuda_graphs(analysis.device, &process_analysis.cuda_graphs, &self.locations, &self.outputs);
        let server = server(
            analysis,
            &ServerInputs {
                definitions: self.definitions,
                names: self.names,
                device_memory: device_memory.as_ref(),
                shares_device: definition.is_some_and(|device| self.machine.shared_devices.contains(&*device.pci)),
                calibration: &self.calibration,
                cuda_graphs: &process_analysis.cuda_graphs,
                refused: explained.map(|oom| {
                    let allocation = oom.allocation();
                    let (segment, free) = (self.segment_of(analysis, oom), oom.device_free.filter(|_| !refused));
                    let short = segment.saturating_sub(free.unwrap_or(0));
                    Refusal { oom, short, limit: limit_at(&allocation, &analysis.statistics.highest) }
                }),
            },
        );
        DeviceSummary {
            device: analysis.device,
            name: match analysis.source {
                EventSource::TorchCpu => Some("CPU".to_owned()),
                _ => definition.map(|d| d.name.to_string()).filter(|name| !name.is_empty()),
            },
            total_bytes: definition.map(|d| d.total).filter(|total| *total > 0),
            in_use_before_bytes: definition.map(|d| d.used_before),
            source: analysis.source.name().to_owned(),
            highest: totals(&analysis.statistics.highest),
            statistics: match analysis.source {
                EventSource::Torch => crate::statistics::by_key(&analysis.statistics, analysis.ooms.count()),
                _ => BTreeMap::new(),
            },
            peak: (analysis.states.peak.seq > 0).then(|| self.state_by_module(analysis, &analysis.states.peak, true)),
            end: (analysis.states.peak.seq > 0).then(|| self.memory_state(&analysis.states.end, false)),
            reserved: found.map(|found| reserved_summary(&found.reserved, &self.locations, self.names)),
            colocation: colocation(analysis, server.as_ref().is_some_and(|server| server.may_sleep), |ticks| {
                self.calibration.epoch_ns(ticks)
            }),
            server,
            growth_after_first_step: growth_after_first_step(analysis),
            larger_inputs: explained
                .map_or(analysis.states.peak.position.and_then(|position| position.step), |oom| oom.position.step)
                .and_then(|step| larger_inputs(analysis, step))
                .map(|inputs| {
                    let blocks = analysis.step_inputs.of_step(inputs.step, &analysis.diagnostics.growing_stacks());
                    LargerInputs { held: self.holders.of_blocks(analysis.device, &blocks), ..inputs }
                }),
            outlier_step: outlier_step(analysis, explained, &self.locations),
            suggestions: Vec::new(),
            what_if: what_if.map(|what_if| what_if_summary(what_if, refused, estimate.as_ref())),
            steps: analysis.table.steps(),
            before_first_step: self.phases(analysis, analysis.table.before(), RunPart::BeforeFirstStep),
            first_step: analysis
                .table
                .first()
                .map(|rows| self.phases(analysis, &rows.with_cleared(), RunPart::FirstStep))
                .unwrap_or_default(),
            first_step_micro_batches: analysis.table.first().map_or(0, |rows| rows.micro_batches),
            later_steps: self.phases(analysis, later, RunPart::LaterSteps),
            later_steps_count,
            later_steps_micro_batches: later.micro_batches,
            freed_at_exit_bytes: analysis.table.freed_at_exit(),
            typical_step: analysis.table.typical(interrupted).and_then(|rows| self.step(analysis, rows)),
            by_step: kept_steps.iter().filter_map(|rows| self.step(analysis, rows)).collect(),
            labels: analysis.labels.rows().iter().map(|row| self.label(row)).collect(),
            labels_left_out: analysis.labels.left_out(),
            called_functions: self.called_functions(analysis),
            range: analysis.states.range.as_ref().map(|range| RangeSummary {
                start_bytes: range.start,
                end_bytes: range.end,
                peak: self.state_by_module(analysis, &range.peak, true),
            }),
            released: self.released(process_analysis, analysis),
            oom_count: analysis.ooms.count(),
            ooms: analysis.ooms.all().map(|oom| self.oom((process_analysis, analysis), oom, found)).collect(),
            explained_oom: explained.and_then(|oom| analysis.ooms.all().position(|one| one.seq == oom.seq)),
            owners: self.owners(process_analysis, MemoryLocation::Device(analysis.device)),
            outside_pytorch: None,
            pools: Vec::new(),
            imported: self.owners(process_analysis, MemoryLocation::Imported(analysis.device)),
            device_memory,
            unmapped_segments: self.unmapped_segments(process_analysis, analysis.device),
            cuda_graphs,
            holders: self.holders.of_device(analysis.device),
            phase_rules: analysis
                .rules
                .phases
                .all()
                .iter()
                .map(|r| PhaseRuleSummary {
                    rule: r.rule,
                    phase: r.phase,
                    evidence: self.definitions.frame(r.evidence).map(frame_summary),
                    allocations: r.allocations,
                    bytes: r.bytes,
                })
                .collect(),
            category_rules: analysis
                .rules
                .categories
                .all()
                .iter()
                .map(|r| CategoryRuleSummary {
                    rule: r.classification.rule,
                    category: r.classification.category,
                    evidence: self.definitions.frame(r.evidence).map(frame_summary),
                    blocks: r.blocks,
                    bytes: r.bytes,
                })
                .collect(),
            custom_category_rules: self.custom_category_rules(analysis),
        }
    }

    /// The memory that stayed after each point that the program came to.
    fn released(&self, process_analysis: &Analysis, analysis: &DeviceAnalysis) -> Vec<ReleasedSummary> {
        let points = self.points.all.iter().zip(&analysis.states.released).enumerate();
        let shown = points.filter(|(index, (_, released))| self.points.is_shown(*index, released.times));
        let reached = shown.map(|(_, point)| point);
        // The CPU and devices that the process does not use have nothing to release.
        let reached =
            reached.filter(|_| analysis.source != EventSource::TorchCpu && analysis.statistics.highest.reserved > 0);
        reached
            .map(|(point, released)| ReleasedSummary {
                after: point.text(),
                times: released.times,
                start_bytes: released.start,
                stayed_bytes: released.stayed,
                parts: released_parts(released, analysis, (&process_analysis.cuda_graphs, self.definitions)),
                state: self.memory_state(&released.kept, false),
                reserved: reserved_summary(&released.reserved, &self.locations, self.names),
                held_by: self.holders.after(analysis.device, released.kept.seq),
                device_memory: released.device.as_ref().and_then(|state| {
                    let memory = process_analysis.device_memory.get(&analysis.device)?;
                    Some(device_breakdown(state, memory, &self.device_inputs(analysis.device)?))
                }),
            })
            .collect()
    }

    fn suggestions(
        &self,
        device: &DeviceAnalysis,
        analysis: &Analysis,
        (lifetimes, rest): (&[BlockLifetimes], Option<&RestOfStep>),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Vec<SuggestionSummary> {
        let lifetimes = lifetimes.iter().find(|one| one.device == device.device);
        match lifetimes.filter(|_| device.source == EventSource::Torch) {
            None => Vec::new(),
            Some(lifetimes) => {
                let query = SuggestionQuery {
                    process: self.process,
                    analysis,
                    device,
                    lifetimes,
                    rest,
                    table: self.table,
                    names: self.names,
                    locations: &self.locations,
                };
                suggestions(&query, progress)
            }
        }
    }

    fn issues(&self, analysis: &Analysis, devices: &[DeviceSummary]) -> Vec<IssueSummary> {
        let inputs = IssueInputs {
            locations: &self.locations,
            table: self.table,
            ns_per_tick: self.calibration.ns_per_tick(),
            names: self.names,
            cycles: &analysis.objects.cycles,
        };
        let mut issues = analysis.issues(&inputs, &|device| {
            memory_limit(self.process, device.device, &device.statistics.highest, &analysis.owners)
        });
        sort_issues(&mut issues);
        // The help is the same for all issues: the first one has it.
        let helped = issues.iter().position(|issue| self.holders.help(issue).is_some());
        // A simulated run does not show how long kernels take.
        let ns_per_tick = (!self.machine.is_simulated).then(|| self.calibration.ns_per_tick());
        let replayed = |issue: &Issue| {
            let device = devices.iter().find(|device| device.device == issue.device)?;
            let suggestion = device.suggestions.iter().find(|one| Some(one.rule) == issue.suggestion)?;
            Some(suggestion.saves_bytes)
        };
        let summaries = issues.into_iter().enumerate().map(|(index, issue)| IssueSummary {
            held_by: self.holders.of_issue(&issue),
            help: self.holders.help(&issue).filter(|_| helped == Some(index)),
            saves_bytes: replayed(&issue).or(issue.saves),
            rule: issue.rule.id,
            device: issue.device,
            bytes: issue.bytes,
            headline: issue.headline,
            evidence: issue.evidence,
            stack: issue.place.map(|(stack, node)| self.locations.stack(stack, node)),
            fix: issue.fix,
            forecast: issue.forecast.map(|forecast| OomForecastSummary::of(&forecast, ns_per_tick)),
            files: issue.files,
        });
        summaries.collect()
    }

    fn modules(&self, analysis: &DeviceAnalysis, composition: &Composition) -> ModuleTree {
        ModuleTree::of(composition, &analysis.states.module_paths, self.definitions, self.names, self.table.contexts())
    }

    /// A peak, or what was in use at an error, with the figures by module. `composition` has the blocks that were
    /// allocated then.
    fn state_by_module(&self, analysis: &DeviceAnalysis, composition: &Composition, is_peak: bool) -> MemoryState {
        let mut state = self.memory_state(composition, is_peak);
        let tree = self.modules(analysis, composition);
        let smallest = state.totals.allocated_bytes / SMALLEST_MODULE;
        let large = tree.modules.iter().filter(|module| module.bytes() > smallest).take(MODULES);
        let sum = |amounts: &[Amount]| amounts.iter().map(|amount| amount.bytes).sum();
        state.by_module = large
            .map(|module| ModuleSummary {
                path: module.path.clone(),
                class: (!module.class.is_empty()).then(|| module.class.clone()),
                depth: module.depth,
                bytes: module.bytes(),
                own_bytes: sum(&module.own),
                by_category: by_category(module.whole),
            })
            .collect();
        state.module_groups = tree
            .lines
            .iter()
            .filter(|line| line.bytes > smallest)
            .take(MODULES)
            .map(|line| ModuleGroupSummary {
                pattern: line.pattern.clone(),
                class: (!line.class.is_empty()).then(|| line.class.clone()),
                modules: line.count,
                is_own: line.is_own,
                bytes: line.bytes,
            })
            .collect();
        state.repeated_modules = tree
            .repeated
            .iter()
            .filter(|one| one.activations > smallest)
            .map(|one| RepeatedModulesSummary {
                path: one.path.clone(),
                patterns: one.patterns.clone(),
                class: one.class.clone(),
                count: one.count,
                total: one.total,
                is_leaf: one.is_leaf,
                activation_bytes: one.activations,
                checkpointing_saves_at_most_bytes: one.checkpointing_saves(),
            })
            .collect();
        state
    }

    /// The blocks of a KV cache that grow with each call.
    fn growing_kv_cache(&self, composition: &Composition) -> Option<GrowingKvCache> {
        let mut cache = GrowingKvCache::default();
        for (origin, amount) in composition.origins().filter(|(origin, _)| origin.category == Category::KvCache) {
            let Some(growth) = self.cache_growth.by_stack.get(&origin.stack) else { continue };
            cache.blocks += amount.blocks;
            cache.bytes += amount.bytes;
            cache.growth_bytes += growth.by.saturating_mul(amount.blocks.min(u64::from(growth.blocks)));
        }
        cache.by_model = kv_caches_by_model(composition, self.definitions, &self.cache_growth.by_call);
        cache.text = cache.sentence();
        (cache.growth_bytes > 0).then_some(cache)
    }

    fn memory_state(&self, composition: &Composition, is_peak: bool) -> MemoryState {
        let (stack, node) = composition.allocated_at;
        let whole = composition.usage.allocated.max(1);
        MemoryState {
            time_ns: self.calibration.epoch_ns(composition.ticks),
            seq: composition.seq,
            step: composition.position.and_then(|position| position.step),
            phase: composition.phase,
            allocated_at: is_peak.then(|| self.locations.stack(stack, node)),
            totals: totals(&composition.usage),
            by_category: by_category(composition.by_category()),
            by_custom_category: self.by_custom_category(composition),
            by_compile_context: self.by_compile_context(composition),
            growing_kv_cache: self.growing_kv_cache(composition),
            by_phase: Phase::ALL
                .iter()
                .zip(composition.by_phase())
                .filter(|(_, amount)| amount.blocks > 0)
                .map(|(&phase, a)| PhaseAmount { phase, bytes: a.bytes, blocks: a.blocks })
                .collect(),
            largest_allocations: composition
                .largest(LARGEST_ALLOCATIONS)
                .into_iter()
                .map(|(origin, amount)| {
                    let largest = composition.largest_of(&origin).map(|(_, seq)| seq);
                    let common = self.common_name(&origin, amount.blocks, composition.seq);
                    AllocationGroup {
                        bytes: amount.bytes,
                        blocks: amount.blocks,
                        share: amount.bytes as f64 / whole as f64,
                        category: origin.category,
                        custom_category: self.custom_name(origin.custom),
                        memory_pool: private_pool_text(self.definitions, origin.pool),
                        compile_context: self.compile_context(origin.compile_context),
                        phase: origin.phase,
                        stack: self.locations.stack(origin.stack, origin.context),
                        tensor_name: largest.and_then(|seq| self.name(seq)),
                        tensor_shape: largest.and_then(|seq| self.shape(seq)),
                        common_tensor_shape: common.as_ref().and_then(|common| common.shape.clone()),
                        tensor_name_pattern: common.map(|common| common.pattern),
                    }
                })
                .collect(),
            ..MemoryState::default()
        }
    }

    /// The blocks of a point in time, by custom category. Empty without rules.
    fn by_custom_category(&self, composition: &Composition) -> Vec<CustomCategoryAmount> {
        let Some(custom) = &self.custom else { return Vec::new() };
        let amounts = composition.by_custom_category();
        let all = custom.rules().categories().map(|(category, _)| category).chain([CustomCategory::NONE]);
        let amount = |category: CustomCategory| {
            let amount = amounts.get(&category).copied().unwrap_or_default();
            CustomCategoryAmount {
                custom_category: self.custom_name(category),
                bytes: amount.bytes,
                blocks: amount.blocks,
            }
        };
        all.map(amount).collect()
    }

    /// The blocks of a point in time, by compile context. Empty if the recording has none.
    fn by_compile_context(&self, composition: &Composition) -> Vec<CompileContextAmount> {
        if self.process.recording().compile_contexts().is_empty() {
            return Vec::new();
        }
        let amounts = composition.by_compile_context().into_iter();
        amounts
            .map(|(id, amount)| CompileContextAmount {
                compile_context: self.compile_context(id),
                bytes: amount.bytes,
                blocks: amount.blocks,
            })
            .collect()
    }

    fn compile_context(&self, id: CompileContextId) -> Option<String> {
        self.process.recording().compile_contexts().text(id).map(str::to_owned)
    }

    /// The rules of the user's file, and what each decided.
    fn custom_category_rules(&self, analysis: &DeviceAnalysis) -> Vec<CustomCategoryAmount> {
        let Some(custom) = &self.custom else { return Vec::new() };
        let names = custom.rules().rules().iter().map(|rule| Some(rule.name.to_string())).chain([None]);
        let amounts = analysis.rules.custom.iter().copied().chain(std::iter::repeat(Amount::default()));
        names
            .zip(amounts)
            .map(|(custom_category, amount)| CustomCategoryAmount {
                custom_category,
                bytes: amount.bytes,
                blocks: amount.blocks,
            })
            .collect()
    }

    fn custom_name(&self, category: CustomCategory) -> Option<String> {
        self.custom.as_ref()?.rules().name(category).map(str::to_owned)
    }

    /// The tensor name of the block that the event `seq` allocated.
    fn name(&self, seq: u64) -> Option<String> {
        self.names.of_allocation(seq).map(|named| named.text())
    }

    /// The data type and shape of that tensor.
    fn shape(&self, seq: u64) -> Option<String> {
        self.names.of_allocation(seq).map(|named| named.shape.to_string()).filter(|shape| !shape.is_empty())
    }

    /// The common name of an origin's blocks that were allocated at `seq`. `None` unless each of the `blocks` blocks
    /// has a name.
    fn common_name(&self, origin: &Origin, blocks: u64, seq: u64) -> Option<CommonName> {
        let named = self.names.of_allocation_site(origin.stack, origin.context, seq);
        // The same stack can allocate tensors of another kind, which have names of their own.
        let own = |kind: TensorKind| match kind {
            TensorKind::Parameter | TensorKind::Buffer => Category::Parameter,
            TensorKind::Gradient => Category::Gradient,
            TensorKind::OptimizerState => Category::OptimizerState,
            TensorKind::Other => Category::Unknown,
        };
        let is_custom = |seq: u64| {
            let Some(custom) = &self.custom else { return true };
            custom.category(custom.rule_of_allocation(origin.stack, origin.context, seq)) == origin.custom
        };
        let named = named.into_iter().filter(|(seq, named)| own(named.kind) == origin.category && is_custom(*seq));
        let named: BTreeMap<String, &str> = named.map(|(_, named)| (named.text(), &*named.shape)).collect();
        // Names must be distinct, because a gradient gets the same name again in each step.
        if named.len() as u64 != blocks {
            return None;
        }
        let shapes: BTreeSet<&str> = named.values().copied().collect();
        let only = shapes.first().filter(|shape| shapes.len() == 1 && !shape.is_empty());
        let shape = only.map(|shape| (*shape).to_owned());
        let texts: Vec<String> = named.into_keys().collect();
        Some(CommonName { pattern: name_pattern(&texts)?, shape })
    }

    fn phases(&self, analysis: &DeviceAnalysis, rows: &StepRows, part: RunPart) -> Vec<PhaseSummary> {
        rows.in_order().map(|(phase, row)| self.phase(analysis, phase, row, part)).collect()
    }

    fn phase(&self, analysis: &DeviceAnalysis, phase: Phase, row: &PhaseRow, part: RunPart) -> PhaseSummary {
        let kept = analysis.growth.kept(part, phase);
        PhaseSummary {
            phase,
            steps: row.steps,
            allocations: row.allocations,
            allocated_bytes: row.allocated,
            frees: row.frees,
            freed_bytes: row.freed,
            net_bytes: row.net(),
            start_bytes: row.start,
            peak_bytes: row.peak,
            after_bytes: row.after,
            kept: kept
                .iter()
                .map(|&(category, kept)| KeptCategory {
                    category,
                    bytes: kept.amount.bytes,
                    requested_bytes: kept.requested,
                    blocks: kept.amount.blocks,
                    largest_allocation: self.largest(analysis, part, phase, category),
                })
                .collect(),
            freed_of_other_phases: analysis
                .growth
                .freed_of_other_phases(part, phase)
                .iter()
                .map(|(category, a)| CategoryAmount { category: *category, bytes: a.bytes, blocks: a.blocks })
                .collect(),
            explanation: explain(analysis, self.table, part, phase, row.steps.into()),
        }
    }

    fn largest(
        &self,
        analysis: &DeviceAnalysis,
        part: RunPart,
        phase: Phase,
        category: Category,
    ) -> Option<KeptAllocation> {
        let sources = analysis.growth.sources(|s| s.part == part && s.phase == phase && s.category == category);
        let (source, kept) = sources.first()?;
        Some(KeptAllocation {
            bytes: kept.amount.bytes,
            blocks: kept.amount.blocks,
            stack: self.locations.stack(source.stack, source.context),
        })
    }

    fn step(&self, analysis: &DeviceAnalysis, rows: &StepRows) -> Option<StepSummary> {
        let (first, last) = (self.calibration.epoch_ns(rows.ticks.0), self.calibration.epoch_ns(rows.ticks.1));
        Some(StepSummary {
            step: rows.step?,
            time_ns: first,
            duration_ns: last.saturating_sub(first),
            micro_batches: rows.micro_batches,
            phases: rows
                .in_order()
                .map(|(phase, row)| StepPhase {
                    phase,
                    allocations: row.allocations,
                    allocated_bytes: row.allocated,
                    freed_bytes: row.freed,
                    net_bytes: row.net(),
                    start_bytes: row.start,
                    peak_bytes: row.peak,
                    end_bytes: row.after,
                    turns: row.turns,
                })
                .collect(),
            passes: rows.joined(&[Phase::Forward, Phase::Backward, Phase::Recompute]).map(|row| Levels {
                start_bytes: row.start,
                peak_bytes: row.peak,
                end_bytes: row.after,
            }),
            joined_phases: analysis
                .table
                .joined_phases(rows)
                .iter()
                .map(|part| self.joined_phases(analysis, rows, part))
                .collect(),
        })
    }

    fn joined_phases(&self, analysis: &DeviceAnalysis, rows: &StepRows, part: &JoinedPhases) -> JoinedPhasesSummary {
        let PhaseRow { start, peak, after, .. } = part.row;
        JoinedPhasesSummary {
            phases: part.phases.clone(),
            start_bytes: start,
            peak_bytes: peak,
            end_bytes: after,
            explanation: explain_part(analysis, self.table, RunPart::of(rows.step), part),
        }
    }

    fn called_functions(&self, analysis: &DeviceAnalysis) -> Option<CalledFunctionsSummary> {
        let has_ranges = analysis.labels.rows().iter().any(|row| row.rule.is_none());
        let CalledFunctions { functions, left_out } = CalledFunctions::of(&analysis.calls, has_ranges);
        let functions: Vec<_> = functions.iter().map(|one| self.called_function(one)).collect();
        (!functions.is_empty()).then_some(CalledFunctionsSummary { functions, left_out })
    }

    fn called_function(&self, called: &CalledFunction) -> CalledFunctionSummary {
        let frame = self.locations.definitions().frame(called.frame);
        let location = frame.map(|frame| match frame.first_line {
            0 => self.locations.short(&frame.filename).to_owned(),
            line => format!("{}:{line}", self.locations.short(&frame.filename)),
        });
        CalledFunctionSummary {
            name: frame.map(|frame| frame.qualname.to_string()).unwrap_or_default(),
            location: location.unwrap_or_default(),
            calls: called.calls,
            allocations: called.allocations,
            allocated_bytes: called.allocated,
            kept_bytes: called.kept,
            peak_bytes: called.peak,
        }
    }

    fn label(&self, row: &LabelRow) -> LabelSummary {
        let since = |ticks: u64| self.calibration.epoch_ns(ticks);
        LabelSummary {
            name: row.name.to_string(),
            api: row.origin.name().to_owned(),
            rule: row.rule,
            times: row.times,
            allocations: row.totals.allocations,
            allocated_bytes: row.totals.allocated,
            frees: row.totals.frees,
            freed_bytes: row.totals.freed,
            kept_bytes: row.kept,
            peak_bytes: row.peak,
            after_bytes: row.after,
            duration_ns: since(row.started.saturating_add(row.ticks)).saturating_sub(since(row.started)),
        }
    }

    fn oom(
        &self,
        (process_analysis, analysis): (&Analysis, &DeviceAnalysis),
        oom: &Oom,
        found: Option<&OomReport>,
    ) -> OomSummary {
        let held_back =
            process_analysis.device_memory.get(&analysis.device).and_then(|memory| memory.held_back(oom.seq));
        let (stack, node): (StackId, ContextId) = oom.requested_at;
        let total = u32::try_from(analysis.device).ok().and_then(|d| self.definitions.devices.get(&d)).map(|d| d.total);
        let outside: u64 = oom.outside_pytorch.iter().map(|(_, bytes)| bytes).sum();
        let known = oom.in_use.usage.reserved.saturating_add(outside);
        let refused = refused_by_pytorch(&oom.allocation());
        let segment = self.segment_of(analysis, oom);
        let explained = oom_to_explain(analysis, self.process).is_some_and(|one| one.seq == oom.seq);
        let same: Vec<String> = match found.filter(|_| explained) {
            Some(found) => found.same_size.iter().filter_map(|seq| self.name(*seq)).collect(),
            None => Vec::new(),
        };
        let last = analysis.ooms.last().is_some_and(|last| last.seq == oom.seq);
        OomSummary {
            requested_bytes: oom.requested,
            requested_at: self.locations.stack(stack, node),
            phase_rule: oom.rule,
            in_use: self.state_by_module(analysis, &oom.in_use, false),
            device_free_bytes: oom.device_free,
            reserved_but_unallocated_bytes: oom.in_use.usage.reserved.saturating_sub(oom.in_use.usage.allocated),
            largest_free_bytes: oom.reserved.largest_free,
            outside_pytorch_bytes: outside,
            outside_pytorch: self.outside_pytorch(&oom.outside_pytorch),
            largest_outside: oom
                .largest_outside
                .filter(|one| total.is_some_and(|total| one.size >= total / LARGE_PART))
                .map(|one| OutsideAllocation {
                    owner: owner_name(one.owner, self.definitions).to_owned(),
                    bytes: one.size,
                    place: self.locations.stack(one.stack, ContextId::NONE),
                }),
            outside_text: None,
            processes_beside: Vec::new(),
            contexts_and_other_processes_bytes: total.filter(|total| *total > 0).zip(oom.device_free).and_then(
                |(total, free)| total.checked_sub(free)?.checked_sub(held_back.unwrap_or(0))?.checked_sub(known),
            ),
            held_back_bytes: held_back,
            refused_by_pytorch: refused,
            segment_bytes: segment,
            short_bytes: oom
                .device_free
                .filter(|_| !refused)
                .and_then(|free| segment.checked_sub(free))
                .filter(|short| *short > 0),
            requested_for: found.filter(|_| explained).and_then(|found| requested_for(oom, &found.in_use, self.names)),
            as_large_as: match (&same[..], found.map(|found| found.same_size.len())) {
                ([only], Some(1)) => Some(only.clone()),
                _ => None,
            },
            optimizer_state_needed_bytes: state_needed(&analysis.growth, self.table).filter(|needed| {
                let in_use = oom.in_use.by_category()[Category::OptimizerState as usize].bytes;
                oom.phase == Phase::Optimizer && in_use < *needed
            }),
            step_estimate: explained.then(|| self.step_estimate(analysis, oom, found)).flatten(),
            fatal: match self.process.exit().success() {
                // The program went on after the error.
                _ if !last || !analysis.ooms.unwound_to_the_end() => Some(false),
                Some(success) => Some(!success),
                None => None,
            },
        }
    }

    /// The bytes that PyTorch requests from CUDA for the refused request.
    fn segment_of(&self, analysis: &DeviceAnalysis, oom: &Oom) -> u64 {
        match analysis.source {
            EventSource::CudaCalls => oom.requested,
            _ => AllocatorSettings::default().segment_size(oom.requested),
        }
    }

    /// The requests that the step of the explained error would still have made.
    fn step_estimate(&self, analysis: &DeviceAnalysis, oom: &Oom, found: Option<&OomReport>) -> Option<StepEstimate> {
        let rest = found.and_then(|found| found.rest.as_ref());
        let missing = || {
            let tree = self.modules(analysis, &oom.in_use);
            let calls = found.map_or(&[][..], |found| &found.calls);
            let request = (oom.requested_at.1, oom.seq);
            MissingModules::of(&tree, self.definitions, self.names, self.table.contexts(), calls, request)
        };
        let failed = oom.allocation();
        let limit = || limit_at(&failed, &analysis.statistics.highest);
        let available = oom.device_free.filter(|_| !refused_by_pytorch(&failed)).map(|_| limit());
        step_estimate(analysis, oom, self.table, rest, missing, available)
    }

    /// The whole memory of a device. `None` without readings.
    fn device_memory(&self, analysis: &Analysis, device: i16) -> Option<DeviceMemorySummary> {
        let memory = analysis.device_memory.get(&device)?;
        Some(device_memory(memory, &self.device_inputs(device)?))
    }

    fn device_inputs(&self, device: i16) -> Option<DeviceInputs<'_>> {
        let definition = self.definitions.devices.get(&u32::try_from(device).ok()?);
        let pci = definition.map_or("", |definition| &*definition.pci);
        Some(DeviceInputs {
            pid: self.process.pid(),
            definitions: self.definitions,
            calibration: self.calibration,
            samples: self.machine.samples,
            processes: &self.machine.processes,
            pci,
            recorded_ns: times(self.process).unwrap_or_default(),
            is_only_process: self.machine.exclusive_devices.contains(pci),
        })
    }

    /// The owners of memory outside the caching allocator, most bytes first.
    fn refused_requests(&self, analysis: &Analysis) -> Vec<RefusedRequestSummary> {
        let stack = |refused: &RefusedRequest| self.locations.stack(refused.caller.at.0, refused.caller.at.1);
        refused_requests(analysis, self.definitions, &stack, self.process.exit().success())
    }

    fn outside_pytorch(&self, held: &[(Owner, u64)]) -> Vec<OwnerBytes> {
        by_owner(held.iter().copied().filter(|(owner, _)| *owner != Owner::CachingAllocator), self.definitions)
    }

    fn unmapped_segments(&self, analysis: &Analysis, device: i16) -> Option<UnmappedSegmentsSummary> {
        let unmapped = analysis.unmapped_segments.get(&device)?;
        let objects = unmapped.modules.iter().map(|id| self.definitions.module(*id).unwrap_or_default());
        let libraries: BTreeSet<&str> = objects.map(library_name).collect();
        Some(UnmappedSegmentsSummary {
            peak_bytes: unmapped.peak,
            end_bytes: unmapped.current,
            times: unmapped.times,
            unmapped_by: libraries.into_iter().map(str::to_owned).collect(),
        })
    }

    /// The owners of memory at one location, most bytes first.
    fn owners(&self, analysis: &Analysis, location: MemoryLocation) -> Vec<OwnerSummary> {
        let mut owners: Vec<OwnerSummary> = Vec::new();
        for ((_, owner), usage) in analysis.owners.iter().filter(|((l, _), usage)| *l == location && usage.peak > 0) {
            let object = match owner {
                Owner::CachingAllocator => None,
                Owner::Module(id) => Some(self.definitions.module(*id).unwrap_or_default().to_owned()),
            };
            owners.push(OwnerSummary {
                owner: owner_name(*owner, self.definitions).to_owned(),
                object,
                end_bytes: usage.current,
                peak_bytes: usage.peak,
                allocations: usage.allocations,
            });
        }
        owners.sort_by(|a, b| b.peak_bytes.cmp(&a.peak_bytes).then(a.owner.cmp(&b.owner)));
        owners
    }
}

fn by_category(amounts: [Amount; Category::ALL.len()]) -> Vec<CategoryAmount> {
    let present = Category::ALL.iter().zip(amounts).filter(|(_, amount)| amount.blocks > 0);
    present.map(|(&category, a)| CategoryAmount { category, bytes: a.bytes, blocks: a.blocks }).collect()
}
