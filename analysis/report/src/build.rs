//! Builds a summary from the analyses of all processes.

use std::collections::BTreeMap;

use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, StackId};

use super::diagnosis::Doctor;
use super::explain::{explain, state_needed};
use super::finish::Progress;
use super::places::{Places, frame_summary};
use super::summary::{
    CategoryAmount, CategoryReasonSummary, DeviceSummary, FindingSummary, KeptSummary, LabelSummary, ModuleSummary,
    MomentSummary, NativeObjectSummary, NoticeSummary, OomSummary, OutsideSummary, OwnerSummary, PhaseAmount,
    PhaseSummary, ProcessSummary, ReasonSummary, RepeatedSummary, RunSummary, SUMMARY_VERSION, SourceSummary,
    StepPhase, StepSummary, Summary, TopEntry, Totals,
};
use super::tensors::{common, wanted_for};
use super::why::{
    Replaying, actions, inquests, oom_to_explain, refused_by_pytorch, reserved_summary, second_step, what_if_summary,
};
use memtrace_input::Lane;
use memtrace_input::error::Result;
use memtrace_input::load::{Exit, Process, Run, SNAPSHOT_END};
use memtrace_input::symbols::ObjectReport;
use memtrace_insight::passes::{
    Amount, Category, Composition, DeviceStory, LabelRow, ModuleTree, Oom, Origin, Part, Phase, PhaseRow, PostMortem,
    StackTable, StepRows, Story, sort_findings,
};
use memtrace_insight::rules::library_name;
use memtrace_replay::{Names, Owner, Place, Usage, held_by_cycles};

/// The maximum number of sources listed for one point in time.
const TOP: usize = 20;
/// The maximum number of modules listed for the peak. A listed module has more than one in `LEAST_OF_A_MODULE` parts of
/// the peak.
const MODULES: usize = 500;
const LEAST_OF_A_MODULE: u64 = 500;

/// Losses that the launcher counts and that every trace also reports. They are not counted twice.
const TOLD_BY_TRACES: [&str; 4] = ["events", "lost", "late", "dropped"];

/// Reads every process of a run once and summarizes the run.
pub fn summarize(run: &Run, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Summary> {
    summarize_with(run, Replaying::default(), progress)
}

/// Summarizes a run as [`summarize`] does. `replaying` selects how much of the allocator's policy is replayed.
pub fn summarize_with(run: &Run, replaying: Replaying, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Summary> {
    let mut processes = Vec::new();
    for process in run.processes() {
        let what = match process.rank() {
            Some(rank) => format!("reading rank {rank}"),
            None => format!("reading process {}", process.pid()),
        };
        let total = process.recording().event_count();
        let mut heard = |done| progress(Progress { what: &what, done, total });
        let names = Names::of(process.recording());
        let story = Story::with(process.recording(), process.survey(), &names, &mut (), &mut heard);
        let inquests = inquests(process, &story, replaying);
        let what = "replaying the allocator";
        let mut heard = |done| progress(Progress { what, done, total });
        let found = PostMortem::of(process.recording(), process.survey(), inquests, &mut heard);
        processes.push(process_summary(process, &story, names, &found));
    }
    processes.sort_by_key(|p| (std::cmp::Reverse(worst(p)), p.rank, p.pid));
    let manifest = run.manifest();
    let mut losses: BTreeMap<String, u64> = manifest.losses.clone();
    losses.retain(|name, _| !TOLD_BY_TRACES.contains(&name.as_str()));
    for (name, count) in processes.iter().flat_map(|p| &p.losses) {
        let sum = losses.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
    losses.retain(|_, count| *count > 0);
    let command = match (&manifest.command[..], run.processes()) {
        ([], [only]) => only.info().argv.clone(),
        (command, _) => command.to_vec(),
    };
    let exit = match (manifest.exit, run.processes()) {
        (exit, [only]) if exit == Exit::default() => only.exit(),
        (exit, _) => exit,
    };
    let started_ns = manifest.started_ns.or_else(|| run.processes().iter().filter_map(|p| times(p).map(|t| t.0)).min());
    let ended_ns = manifest.ended_ns.or_else(|| run.processes().iter().filter_map(|p| times(p).map(|t| t.1)).max());
    let unusable = run.problems().iter().map(|p| format!("{}: {}", p.path.display(), p.text));
    let problems = endless(&processes).into_iter().chain(unusable).collect();
    let summary = RunSummary {
        path: run.path().display().to_string(),
        memtrace: (!manifest.memtrace.is_empty()).then(|| manifest.memtrace.clone()),
        command,
        exit,
        outcome: outcome(exit, &processes),
        started_ns,
        duration_ns: started_ns.zip(ended_ns).map(|(start, end)| end.saturating_sub(start)),
        events: processes.iter().map(|p| p.events).sum(),
    };
    Ok(Summary {
        version: SUMMARY_VERSION.to_owned(),
        run: summary,
        processes,
        losses,
        native_objects: run.native_objects().iter().map(native_object).collect(),
        problems,
        files: Vec::new(),
    })
}

fn native_object(object: &ObjectReport) -> NativeObjectSummary {
    NativeObjectSummary {
        path: object.id.path.to_string(),
        build_id: object.id.build_id.to_string(),
        places: object.places,
        named: object.named,
        with_line: object.with_line,
        symbols_from: (!object.file.is_empty()).then(|| object.file.clone()),
        notes: object.notes.clone(),
    }
}

/// The remark for recordings without an end; `None` if all have one.
fn endless(processes: &[ProcessSummary]) -> Option<String> {
    let endless = processes.iter().filter(|p| p.recording_ended.is_none()).count();
    (endless > 0).then(|| {
        format!(
            "{endless} of {} recordings have no end: memtrace was killed, or is still recording. Missing, and not counted, is what it had \
             not written then (a quarter of a second, if it kept up) and all that came after",
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
        .survey()
        .ticks
        .filter(|(_, last)| *last > 0)
        .map(|(first, last)| (calibration.epoch_ns(first), calibration.epoch_ns(last)))
}

/// The key that puts the most interesting process first: out-of-memory errors, then the fullest device.
fn worst(process: &ProcessSummary) -> (bool, u64) {
    let fatal = process.devices.iter().any(|d| d.oom_count > 0);
    let fullest = process.devices.iter().map(|d| d.highest.allocated_bytes).max().unwrap_or(0);
    (fatal, fullest)
}

fn outcome(exit: Exit, processes: &[ProcessSummary]) -> String {
    // As far as the recording shows, an error ended the process if the process did nothing after it.
    let last_straw = processes
        .iter()
        .flat_map(|p| p.devices.iter().flat_map(move |d| d.ooms.iter().map(move |oom| (p, oom))))
        .filter(|(_, oom)| oom.fatal != Some(false))
        // The first error across processes counts. Later errors are often a consequence of it.
        .min_by_key(|(_, oom)| (oom.fatal.is_none(), oom.there.time_ns));
    let end = match (exit.code, exit.signal) {
        (_, Some(signal)) => format!("killed by {}", signal_name(signal)),
        (Some(0), None) => "finished".to_owned(),
        (Some(code), None) => format!("exit status {code}"),
        (None, None) if is_snapshot(processes) => "a snapshot".to_owned(),
        (None, None) if processes.iter().any(|p| p.recording_ended.is_none()) => "the recording was cut off".to_owned(),
        (None, None) => "end unknown".to_owned(),
    };
    let Some((process, oom)) = last_straw else { return end };
    let when = when(oom.there.step, oom.there.phase);
    match (process.rank, exit.success()) {
        (None, Some(false)) => format!("ended by an out-of-memory error {when}"),
        (Some(rank), Some(false)) => format!("ended by an out-of-memory error in rank {rank} {when}"),
        _ if is_snapshot(processes) => format!("{end}, taken after it ran out of memory {when}"),
        (Some(rank), _) => format!("{end}, rank {rank} ran out of memory {when}"),
        (None, _) => format!("{end}, process {} ran out of memory {when}", process.pid),
    }
}

/// Whether every process is a PyTorch snapshot. A snapshot does not know how its program ended.
pub(super) fn is_snapshot(processes: &[ProcessSummary]) -> bool {
    !processes.is_empty() && processes.iter().all(|p| p.recording_ended.as_deref() == Some(SNAPSHOT_END))
}

/// Formats a position: `at step 0, optimizer`.
pub(super) fn when(step: Option<u32>, phase: Phase) -> String {
    match step {
        Some(step) => format!("at step {step}, {}", phase.name()),
        None if phase == Phase::Load => "while loading".to_owned(),
        None => format!("before the first step, {}", phase.name()),
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

fn process_summary(process: &Process, story: &Story, names: Names, found: &[PostMortem]) -> ProcessSummary {
    let info = process.info();
    let table = StackTable::new(process.definitions());
    let context = Context {
        process,
        definitions: process.definitions(),
        places: Places::new(process.definitions(), process.directory()),
        calibration: process.recording().calibration(),
        table,
        names,
    };
    let found = |device| found.iter().find(|found| found.device == device);
    let mut devices: Vec<DeviceSummary> =
        story.devices.iter().map(|d| context.device(d, story, found(d.device))).collect();
    devices.sort_by_key(|d| (std::cmp::Reverse((d.oom_count > 0, d.highest.allocated_bytes)), d.device));
    ProcessSummary {
        pid: process.pid(),
        ppid: info.ppid,
        rank: process.rank(),
        world_size: process.world_size(),
        host: info.host.clone(),
        argv: info.argv.clone(),
        exit: process.exit(),
        recording_ended: process.recording().end().map(|end| end.reason.clone()),
        trace: process.path().file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
        snapshot: None,
        events: process
            .recording()
            .event_count()
            .saturating_sub(process.recording().added_events())
            .saturating_sub(story.lost.events),
        devices,
        findings: context.findings(story),
        pinned: context.owners(story, Place::Host),
        losses: losses(process, story),
        notices: notices(process),
    }
}

/// The notices by topic. Threads write them to their own rings, so the order in the file depends on when each ring was
/// drained. Notices of one topic keep that order.
fn notices(process: &Process) -> Vec<NoticeSummary> {
    let notice = |n: &memtrace_trace::file::Notice| NoticeSummary {
        topic: n.topic.to_string(),
        text: n.text.to_string(),
        verdict: n.verdict.name().to_owned(),
    };
    let mut notices: Vec<NoticeSummary> = process.definitions().notices.iter().map(notice).collect();
    notices.sort_by(|a, b| a.topic.cmp(&b.topic));
    notices
}

/// Everything that is missing or inconsistent in a recording, by name.
fn losses(process: &Process, story: &Story) -> BTreeMap<String, u64> {
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
    add("damaged_places", damage.damaged_places.saturating_sub(u64::from(damage.cut_tail)));
    add("bytes_skipped", damage.bytes_skipped);
    add("unknown_frames", damage.unknown_frames);
    add("unknown_definitions", damage.unknown_definitions);
    add("malformed_definitions", damage.malformed_definitions);
    // A damaged block's number of events can itself be damaged, so blocks are counted besides.
    add("undecodable_blocks", story.lost.blocks);
    add("undecodable_events", story.lost.events);
    add("unmatched_cuda_frees", story.unmatched_cuda_frees);
    for device in &story.devices {
        let a = &device.anomalies;
        add("unmatched_frees", a.unmatched_frees);
        add("missing_frees", a.missing_frees);
        add("allocations_outside_segments", a.outside_segments);
        add("misfitting_allocations", a.misfits);
        add("unmatched_segment_frees", a.unmatched_segment_frees);
        add("totals_mismatched", a.totals_mismatched);
    }
    losses
}

/// The inputs for summarizing one process.
struct Context<'a> {
    process: &'a Process,
    definitions: &'a Definitions,
    places: Places<'a>,
    calibration: Calibration,
    table: StackTable,
    names: Names,
}

impl Context<'_> {
    fn device(&self, story: &DeviceStory, whole: &Story, found: Option<&PostMortem>) -> DeviceSummary {
        let explained = oom_to_explain(story, self.process);
        let refused = explained.is_some_and(refused_by_pytorch);
        let what_if = found.and_then(|found| found.what_if.as_ref());
        let definition = u32::try_from(story.device).ok().and_then(|d| self.definitions.devices.get(&d));
        let (later, later_steps_count) = story.table.later();
        let kept_steps = story.table.kept();
        DeviceSummary {
            device: story.device,
            name: match story.lane {
                Lane::Cpu => Some("CPU".to_owned()),
                _ => definition.map(|d| d.name.to_string()).filter(|name| !name.is_empty()),
            },
            total_bytes: definition.map(|d| d.total).filter(|total| *total > 0),
            used_before_bytes: definition.map(|d| d.used_before),
            source: story.lane.name().to_owned(),
            highest: totals(&story.peaks),
            statistics: match story.lane {
                Lane::Torch => super::statistics::by_key(&story.statistics, story.ooms.count()),
                _ => BTreeMap::new(),
            },
            peak: (story.peak.seq > 0).then(|| self.peak(story)),
            end: (story.peak.seq > 0).then(|| self.moment(&story.end, false)),
            reserved: found.map(|found| reserved_summary(&found.reserved, &self.places, &self.names)),
            second_step: second_step(story),
            actions: if story.lane == Lane::Cpu {
                Vec::new()
            } else {
                let moment = explained.map_or(&story.peak, |oom| &oom.there);
                actions(story, moment, &self.modules(story, moment), self.definitions, &self.table)
            },
            what_if: what_if.map(|what_if| what_if_summary(what_if, refused)),
            steps: story.table.steps(),
            before: self.phases(story, story.table.before(), Part::Before, 1),
            first_step: story.table.first().map(|rows| self.phases(story, rows, Part::First, 1)).unwrap_or_default(),
            later_steps: self.phases(story, later, Part::Later, later_steps_count.into()),
            later_steps_count,
            freed_at_exit_bytes: story.table.freed_at_exit(),
            by_step: kept_steps.iter().filter_map(|rows| self.step(rows)).collect(),
            labels: story.labels.rows().iter().map(|row| self.label(row)).collect(),
            labels_left_out: story.labels.left_out(),
            oom_count: story.ooms.count(),
            ooms: story.ooms.all().map(|oom| self.oom(story, oom, found)).collect(),
            explained_oom: explained.and_then(|oom| story.ooms.all().position(|one| one.seq == oom.seq)),
            owners: self.owners(whole, Place::Device(story.device)),
            imported: self.owners(whole, Place::Imported(story.device)),
            reasons: story
                .reasons
                .all()
                .iter()
                .map(|r| ReasonSummary {
                    rule: r.rule.to_owned(),
                    phase: r.phase,
                    evidence: self.definitions.frame(r.evidence).map(frame_summary),
                    allocations: r.allocations,
                    bytes: r.bytes,
                })
                .collect(),
            category_reasons: story
                .category_reasons
                .all()
                .iter()
                .map(|r| CategoryReasonSummary {
                    rule: r.judged.rule.to_owned(),
                    category: r.judged.category,
                    evidence: self.definitions.frame(r.evidence).map(frame_summary),
                    blocks: r.blocks,
                    bytes: r.bytes,
                })
                .collect(),
        }
    }

    fn findings(&self, story: &Story) -> Vec<FindingSummary> {
        let doctor = Doctor {
            places: &self.places,
            table: &self.table,
            ns_per_tick: self.calibration.ns_per_tick(),
            names: &|| Names::of(self.process.recording()),
            cycles: &|| held_by_cycles(self.process.recording()),
        };
        let mut findings = story.findings.clone();
        findings.extend(doctor.findings(story));
        sort_findings(&mut findings);
        let told = findings.into_iter().map(|finding| FindingSummary {
            rule: finding.rule.name.to_owned(),
            device: finding.device,
            bytes: finding.bytes,
            headline: finding.headline,
            evidence: finding.evidence,
            place: finding.place.map(|(stack, node)| self.places.stack(stack, node)),
            mend: finding.mend,
            saves_bytes: finding.saves,
            files: finding.files,
        });
        told.collect()
    }

    fn modules(&self, story: &DeviceStory, moment: &Composition) -> ModuleTree {
        ModuleTree::of(moment, &story.paths, self.definitions, &self.names, self.table.contexts())
    }

    /// The peak, with the figures by module that only the peak has.
    fn peak(&self, story: &DeviceStory) -> MomentSummary {
        let mut peak = self.moment(&story.peak, true);
        let tree = self.modules(story, &story.peak);
        let least = peak.totals.allocated_bytes / LEAST_OF_A_MODULE;
        let large = tree.modules.iter().filter(|module| module.bytes() > least).take(MODULES);
        let sum = |amounts: &[Amount]| amounts.iter().map(|amount| amount.bytes).sum();
        peak.by_module = large
            .map(|module| ModuleSummary {
                path: module.path.clone(),
                class: (!module.class.is_empty()).then(|| module.class.clone()),
                depth: module.depth,
                bytes: module.bytes(),
                own_bytes: sum(&module.own),
                by_category: by_category(module.whole),
            })
            .collect();
        peak.repeated_modules = tree
            .repeated
            .iter()
            .filter(|one| one.activations > least)
            .map(|one| RepeatedSummary {
                path: one.path.clone(),
                class: one.class.clone(),
                count: one.count,
                activation_bytes: one.activations,
                checkpointing_saves_at_most_bytes: one.checkpointing_saves(),
            })
            .collect();
        peak
    }

    fn moment(&self, composition: &Composition, named: bool) -> MomentSummary {
        let (stack, node) = composition.by;
        let whole = composition.usage.allocated.max(1);
        MomentSummary {
            time_ns: self.calibration.epoch_ns(composition.ticks),
            seq: composition.seq,
            step: composition.at.and_then(|at| at.step),
            phase: composition.phase,
            by: named.then(|| self.places.stack(stack, node)),
            totals: totals(&composition.usage),
            by_category: by_category(composition.by_category()),
            by_phase: Phase::ALL
                .iter()
                .zip(composition.by_phase())
                .filter(|(_, amount)| amount.blocks > 0)
                .map(|(&phase, a)| PhaseAmount { phase, bytes: a.bytes, blocks: a.blocks })
                .collect(),
            top: composition
                .top(TOP)
                .into_iter()
                .map(|(origin, amount)| TopEntry {
                    bytes: amount.bytes,
                    blocks: amount.blocks,
                    share: amount.bytes as f64 / whole as f64,
                    category: origin.category,
                    phase: origin.phase,
                    stack: self.places.stack(origin.stack, origin.context),
                    name: composition.largest_of(&origin).and_then(|(_, seq)| self.name(seq)),
                    names: self.common_name(&origin, amount.blocks, composition.seq),
                })
                .collect(),
            ..MomentSummary::default()
        }
    }

    /// The tensor name of the block that the event `seq` allocated.
    fn name(&self, seq: u64) -> Option<String> {
        self.names.of_alloc(seq).map(|named| named.text())
    }

    /// The common name of an origin's blocks that were allocated at `seq`. `None` unless each of the `blocks` blocks
    /// has a name.
    fn common_name(&self, origin: &Origin, blocks: u64, seq: u64) -> Option<String> {
        let named = self.names.of_source(origin.stack, origin.context, seq);
        // The same stack can allocate tensors of another kind, which have names of their own.
        let own = |kind: TensorKind| match kind {
            TensorKind::Parameter | TensorKind::Buffer => Category::Parameter,
            TensorKind::Gradient => Category::Gradient,
            TensorKind::OptimizerState => Category::OptimizerState,
            TensorKind::Other => Category::Unknown,
        };
        let named = named.into_iter().filter(|(_, named)| own(named.kind) == origin.category);
        let mut texts: Vec<String> = named.map(|(_, named)| named.text()).collect();
        texts.sort_unstable();
        texts.dedup();
        // Names must be distinct, because a gradient gets the same name again in each step.
        (texts.len() as u64 == blocks).then(|| common(&texts))?
    }

    fn phases(&self, story: &DeviceStory, rows: &StepRows, part: Part, steps: u64) -> Vec<PhaseSummary> {
        Phase::ALL
            .iter()
            .map(|&phase| (phase, rows.phases[phase as usize]))
            .filter(|(_, row)| !row.is_empty())
            .map(|(phase, row)| self.phase(story, phase, &row, part, steps))
            .collect()
    }

    fn phase(&self, story: &DeviceStory, phase: Phase, row: &PhaseRow, part: Part, steps: u64) -> PhaseSummary {
        let kept = story.growth.kept(part, phase);
        PhaseSummary {
            phase,
            allocations: row.allocations,
            allocated_bytes: row.allocated,
            frees: row.frees,
            freed_bytes: row.freed,
            net_bytes: row.net(),
            peak_bytes: row.peak,
            after_bytes: row.after,
            kept: kept
                .iter()
                .map(|&(category, kept)| KeptSummary {
                    category,
                    bytes: kept.amount.bytes,
                    requested_bytes: kept.requested,
                    blocks: kept.amount.blocks,
                    largest: self.largest(story, part, phase, category),
                })
                .collect(),
            given_back: story
                .growth
                .given_back(part, phase)
                .iter()
                .map(|(category, a)| CategoryAmount { category: *category, bytes: a.bytes, blocks: a.blocks })
                .collect(),
            explanation: explain(story, &self.table, part, phase, steps),
        }
    }

    fn largest(&self, story: &DeviceStory, part: Part, phase: Phase, category: Category) -> Option<SourceSummary> {
        let sources = story.growth.sources(|s| s.part == part && s.phase == phase && s.category == category);
        let (source, kept) = sources.first()?;
        Some(SourceSummary {
            bytes: kept.amount.bytes,
            blocks: kept.amount.blocks,
            stack: self.places.stack(source.stack, source.context),
        })
    }

    fn step(&self, rows: &StepRows) -> Option<StepSummary> {
        let (first, last) = (self.calibration.epoch_ns(rows.ticks.0), self.calibration.epoch_ns(rows.ticks.1));
        Some(StepSummary {
            step: rows.step?,
            time_ns: first,
            duration_ns: last.saturating_sub(first),
            phases: Phase::ALL
                .iter()
                .map(|&phase| (phase, rows.phases[phase as usize]))
                .filter(|(_, row)| !row.is_empty())
                .map(|(phase, row)| StepPhase {
                    phase,
                    allocations: row.allocations,
                    allocated_bytes: row.allocated,
                    freed_bytes: row.freed,
                    net_bytes: row.net(),
                    peak_bytes: row.peak,
                })
                .collect(),
        })
    }

    fn label(&self, row: &LabelRow) -> LabelSummary {
        let since = |ticks: u64| self.calibration.epoch_ns(ticks);
        LabelSummary {
            name: row.name.to_string(),
            origin: if row.nvtx { "nvtx" } else { "record_function" }.to_owned(),
            rule: row.rule.map(str::to_owned),
            times: row.times,
            allocations: row.allocations,
            allocated_bytes: row.allocated,
            frees: row.frees,
            freed_bytes: row.freed,
            kept_bytes: row.kept,
            peak_bytes: row.peak,
            after_bytes: row.after,
            duration_ns: since(row.began.saturating_add(row.ticks)).saturating_sub(since(row.began)),
        }
    }

    fn oom(&self, story: &DeviceStory, oom: &Oom, found: Option<&PostMortem>) -> OomSummary {
        let (stack, node): (StackId, ContextId) = oom.by;
        let total = u32::try_from(story.device).ok().and_then(|d| self.definitions.devices.get(&d)).map(|d| d.total);
        let outside: u64 = oom.outside.iter().map(|(_, bytes)| bytes).sum();
        let known = oom.there.usage.reserved.saturating_add(outside);
        let refused = refused_by_pytorch(oom);
        let explained = oom_to_explain(story, self.process).is_some_and(|one| one.seq == oom.seq);
        let same: Vec<String> = match found.filter(|_| explained) {
            Some(found) => found.same_size.iter().filter_map(|seq| self.name(*seq)).collect(),
            None => Vec::new(),
        };
        let last = story.ooms.last().is_some_and(|last| last.seq == oom.seq);
        OomSummary {
            wanted_bytes: oom.wanted,
            by: self.places.stack(stack, node),
            rule: oom.rule.to_owned(),
            there: self.moment(&oom.there, false),
            device_free_bytes: oom.device_free,
            cached_bytes: oom.there.usage.reserved.saturating_sub(oom.there.usage.allocated),
            largest_free_bytes: oom.reserved.largest_free,
            outside_allocator_bytes: outside,
            outside: self.outside(&oom.outside),
            others_bytes: total
                .filter(|total| *total > 0)
                .zip(oom.device_free)
                .and_then(|(total, free)| total.checked_sub(free)?.checked_sub(known)),
            refused_by_pytorch: refused,
            short_bytes: oom.device_free.and_then(|free| oom.wanted.checked_sub(free)).filter(|short| *short > 0),
            wanted_for: found.filter(|_| explained).and_then(|found| wanted_for(oom, &found.live, &self.names)),
            as_large_as: match (&same[..], found.map(|found| found.same_size.len())) {
                ([only], Some(1)) => Some(only.clone()),
                _ => None,
            },
            state_needed_bytes: state_needed(story, &self.table).filter(|needed| {
                let there = oom.there.by_category()[Category::OptimizerState as usize].bytes;
                oom.phase == Phase::Optimizer && there < *needed
            }),
            fatal: match self.process.exit().success() {
                // The program went on after the error.
                _ if !last || !story.ooms.unwound_to_the_end() => Some(false),
                Some(success) => Some(!success),
                None => None,
            },
        }
    }

    /// The owners of memory outside the caching allocator, most bytes first.
    fn outside(&self, held: &[(Owner, u64)]) -> Vec<OutsideSummary> {
        let mut all: Vec<OutsideSummary> = Vec::new();
        for (owner, bytes) in held {
            let name = match owner {
                Owner::CachingAllocator => continue,
                Owner::Module(id) => library_name(self.definitions.module(*id).unwrap_or_default()),
            };
            match all.iter_mut().find(|one| one.owner == name) {
                Some(one) => one.bytes += bytes,
                None => all.push(OutsideSummary { owner: name.to_owned(), bytes: *bytes }),
            }
        }
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.owner.cmp(&b.owner)));
        all
    }

    /// The owners of memory in one place, most bytes first.
    fn owners(&self, story: &Story, place: Place) -> Vec<OwnerSummary> {
        let mut owners: Vec<OwnerSummary> = Vec::new();
        for ((_, owner), held) in story.owners.iter().filter(|((p, _), held)| *p == place && held.peak > 0) {
            let (name, module) = match owner {
                Owner::CachingAllocator => ("PyTorch's caching allocator", None),
                Owner::Module(id) => {
                    let path = self.definitions.module(*id).unwrap_or_default();
                    (library_name(path), Some(path.to_owned()))
                }
            };
            owners.push(OwnerSummary {
                owner: name.to_owned(),
                module,
                end_bytes: held.now,
                peak_bytes: held.peak,
                allocations: held.allocations,
            });
        }
        owners.sort_by(|a, b| b.peak_bytes.cmp(&a.peak_bytes).then(a.owner.cmp(&b.owner)));
        owners
    }
}

fn by_category(amounts: [Amount; Category::ALL.len()]) -> Vec<CategoryAmount> {
    let there = Category::ALL.iter().zip(amounts).filter(|(_, amount)| amount.blocks > 0);
    there.map(|(&category, a)| CategoryAmount { category, bytes: a.bytes, blocks: a.blocks }).collect()
}

pub(super) fn totals(usage: &Usage) -> Totals {
    Totals {
        allocated_bytes: usage.allocated,
        active_bytes: usage.active,
        reserved_bytes: usage.reserved,
        requested_bytes: usage.requested,
    }
}
