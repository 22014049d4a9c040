//! Builds a [`DiffReport`] from two runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use memtrace_trace::counters::Counter;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId};

use crate::diff::{
    CategoryChange, Change, CustomCategoryChange, DIFF_VERSION, DevicePair, DiffOptions, DiffPeak, DiffReport,
    DiffResult, DiffRun, LineChange, ModuleChange, PhaseChange, ServerPartChange, StackChange, StageChange,
    UnpairedDevice,
};
use crate::matched_lines::{Line, MatchedLines, Version};
use crate::progress::Progress;
use crate::totals::totals;
use memtrace_input::load::{Process, Run, SNAPSHOT_END_REASON};
use memtrace_insight::locations::{Locations, frame_summary};
use memtrace_insight::passes::{
    Analysis, AnalysisOptions, Category, Composition, DeviceAnalysis, FirstPass, ModuleTree, Phase,
};
use memtrace_insight::rules::{CustomCategory, CustomRules, ServingPart, ServingStage};
use memtrace_insight::units::{signed_size_text, size_text};
use memtrace_output::{SourceAccess, SourceFiles};
use memtrace_replay::{Contexts, Names};

/// A difference below 0.1 % (1/1000) of the peak is noise.
const NOISE: u64 = 1000;
/// The maximum number of frames reported per stack.
const MAX_FRAMES: usize = 128;

/// A process of one run, with its analysis.
struct AnalyzedProcess<'a> {
    process: &'a Process,
    names: Names,
    analysis: Analysis,
    sources: SourceAccess,
}

/// By stack and category: the part of a server and the stage that allocated it.
type ServerOrigins = HashMap<(StackId, Category), (ServingPart, Option<ServingStage>)>;

/// A device's peak in one run.
pub(crate) struct DevicePeak<'a> {
    process: &'a Process,
    sources: SourceAccess,
    device: i16,
    peak: Composition,
    /// The bytes and blocks of each module itself, by path.
    modules: BTreeMap<String, (u64, u64)>,
    reserved_peak_bytes: u64,
    /// The parts and stages of a server. `None` if the program is no server.
    serving: Option<ServerOrigins>,
    /// Events that could not be decoded.
    undecoded_events: u64,
}

/// Compares the peaks of two runs. If `a` and `b` are the same run, [`DiffOptions::steps`] selects two of its steps to
/// compare.
pub fn diff(a: &Run, b: &Run, options: &DiffOptions, progress: &mut dyn FnMut(Progress<'_>)) -> DiffReport {
    let (step_a, step_b) = options.steps.unzip();
    let (processes_a, processes_b) = if std::ptr::eq(a, b) {
        let steps: Vec<u32> = step_a.into_iter().chain(step_b).collect();
        (analyze_run(a, &steps, options, progress), None)
    } else {
        (
            analyze_run(a, step_a.as_slice(), options, progress),
            Some(analyze_run(b, step_b.as_slice(), options, progress)),
        )
    };
    let processes_b = processes_b.as_ref().unwrap_or(&processes_a);
    let mut report = DiffReport {
        version: DIFF_VERSION.to_owned(),
        a: diff_run(a, step_a, &processes_a),
        b: diff_run(b, step_b, processes_b),
        ..DiffReport::default()
    };
    let rules = options.custom_rules.as_deref();
    let mut alone: [Vec<DevicePeak<'_>>; 2] = [Vec::new(), Vec::new()];
    for (a, b) in pair_processes(&processes_a, processes_b) {
        let mut of_a = a.map_or(Vec::new(), |analyzed| device_peaks(analyzed, step_a, options));
        let mut of_b = b.map_or(Vec::new(), |analyzed| device_peaks(analyzed, step_b, options));
        if let ([a], [b]) = (&of_a[..], &of_b[..]) {
            // With one device on each side, the devices correspond even if their ordinals differ.
            report.pairs.push(pair(a, b, rules));
            continue;
        }
        for device in of_a.iter().map(|m| m.device).collect::<Vec<_>>() {
            let find = |of: &[DevicePeak<'_>]| of.iter().position(|m| m.device == device);
            if let (Some(i), Some(j)) = (find(&of_a), find(&of_b)) {
                report.pairs.push(pair(&of_a.remove(i), &of_b.remove(j), rules));
            }
        }
        alone[0].extend(of_a);
        alone[1].extend(of_b);
    }
    report
        .pairs
        .sort_by_key(|pair| (Reverse(pair.difference_bytes.unsigned_abs()), pair.a.rank, pair.a.pid, pair.a.device));
    for (run, alone) in ["a", "b"].into_iter().zip(&alone) {
        report.unpaired.extend(alone.iter().map(|device_peak| UnpairedDevice {
            run: run.to_owned(),
            pid: device_peak.process.pid(),
            rank: device_peak.process.rank(),
            device: device_peak.device,
            peak_bytes: device_peak.peak.usage.allocated,
        }));
    }
    report.notes = notes(&report, &processes_a, processes_b);
    report
}

fn diff_run(run: &Run, step: Option<u32>, processes: &[AnalyzedProcess<'_>]) -> DiffRun {
    let command = match (&run.manifest().command[..], run.processes()) {
        ([], [only]) => only.info().argv.clone(),
        (command, _) => command.to_vec(),
    };
    let devices = processes.iter().flat_map(|process| &process.analysis.devices);
    let steps = devices.map(|device| device.table.steps()).max().unwrap_or(0);
    DiffRun { path: run.path().display().to_string(), command, step, steps }
}

fn analyze_run<'a>(
    run: &'a Run,
    steps: &[u32],
    options: &DiffOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Vec<AnalyzedProcess<'a>> {
    let sources = SourceAccess::of(run, options.sources);
    let what = format!("reading {}", run.path().file_name().unwrap_or_default().to_string_lossy());
    let selected =
        run.processes().iter().filter(|process| options.rank.is_none_or(|rank| process.rank() == Some(rank)));
    selected.map(|process| analyze_process(process, steps, options, &sources, &what, progress)).collect()
}

fn analyze_process<'a>(
    process: &'a Process,
    steps: &[u32],
    options: &DiffOptions,
    sources: &SourceAccess,
    what: &str,
    progress: &mut dyn FnMut(Progress<'_>),
) -> AnalyzedProcess<'a> {
    let total = process.recording().event_count();
    let mut on_progress = |done| progress(Progress { what, done, total });
    let first_pass = FirstPass::of_process(process);
    let custom_rules = options.custom_rules.as_deref();
    let analysis = Analysis::with_options(
        process.recording(),
        process.trace_index(),
        &first_pass,
        &AnalysisOptions { step_peaks: steps, custom_rules, ..AnalysisOptions::default() },
        &mut (),
        &mut on_progress,
    );
    AnalyzedProcess { process, names: first_pass.names, analysis, sources: sources.clone() }
}

/// Compares the peaks of two processes of two runs, each on one of its devices. `None` if one of them has no peak
/// there.
pub(crate) fn diff_processes(
    processes: [(&Run, &Process, i16); 2],
    progress: &mut dyn FnMut(Progress<'_>),
) -> Option<DevicePair> {
    let options = DiffOptions::default();
    let [a, b] = processes.map(|(run, process, device)| {
        let sources = SourceAccess::of(run, options.sources);
        let analyzed = analyze_process(process, &[], &options, &sources, "comparing ranks", progress);
        let options = DiffOptions { device: Some(device), ..DiffOptions::default() };
        device_peaks(&analyzed, None, &options).into_iter().next()
    });
    Some(diff_peaks(&a?, &b?))
}

/// Compares two peaks.
pub(crate) fn diff_peaks(a: &DevicePeak<'_>, b: &DevicePeak<'_>) -> DevicePair {
    pair(a, b, None)
}

/// Pairs processes by rank. Processes with the same rank, or without one, are paired in order.
fn pair_processes<'a>(
    a: &'a [AnalyzedProcess<'a>],
    b: &'a [AnalyzedProcess<'a>],
) -> Vec<(Option<&'a AnalyzedProcess<'a>>, Option<&'a AnalyzedProcess<'a>>)> {
    if let ([a], [b]) = (a, b) {
        return vec![(Some(a), Some(b))];
    }
    let mut ranks: BTreeMap<Option<u32>, [Vec<&'a AnalyzedProcess<'a>>; 2]> = BTreeMap::new();
    for (side, processes) in [a, b].into_iter().enumerate() {
        let recorded =
            processes.iter().filter(|process| process.analysis.devices.iter().any(|device| device.states.peak.seq > 0));
        for analyzed in recorded {
            ranks.entry(analyzed.process.rank()).or_default()[side].push(analyzed);
        }
    }
    let mut pairs = Vec::new();
    for [a, b] in ranks.into_values() {
        let at = |processes: &[&'a AnalyzedProcess<'a>], index: usize| processes.get(index).copied();
        pairs.extend((0..a.len().max(b.len())).map(|index| (at(&a, index), at(&b, index))));
    }
    pairs
}

fn device_peaks<'a>(analyzed: &AnalyzedProcess<'a>, step: Option<u32>, options: &DiffOptions) -> Vec<DevicePeak<'a>> {
    let AnalyzedProcess { process, names, analysis, sources } = analyzed;
    let devices = analysis.devices.iter().filter(|d| options.device.is_none_or(|device| device == d.device));
    let device_peak = |device: &DeviceAnalysis| {
        let peak = match step {
            None => &device.states.peak,
            Some(step) => {
                device.states.step_peaks.iter().find(|(watched, _)| *watched == step).map(|(_, peak)| peak)?
            }
        };
        DevicePeak::of(process, names, sources, (analysis, device), peak)
    };
    devices.filter_map(device_peak).collect()
}

/// The kinds of data that both recordings have. Data that only one recording has is no difference.
#[derive(Clone, Copy, Debug)]
struct CommonData {
    /// Autograd nodes, and with them the forward calls that created the nodes.
    nodes: bool,
    /// Calls of `nn.Module`s.
    modules: bool,
}

impl CommonData {
    fn of(processes: [&Process; 2]) -> CommonData {
        CommonData { nodes: processes.into_iter().all(has_nodes), modules: processes.into_iter().all(has_modules) }
    }
}

/// Whether it is a PyTorch snapshot. Only a snapshot can lack nodes or module calls.
fn is_snapshot(process: &Process) -> bool {
    process.recording().end().is_some_and(|end| end.reason == SNAPSHOT_END_REASON)
}

fn has_nodes(process: &Process) -> bool {
    !is_snapshot(process) || process.definitions().contexts.iter().any(|context| !context.node.is_empty())
}

fn has_modules(process: &Process) -> bool {
    !is_snapshot(process) || !process.definitions().nn_calls.is_empty()
}

impl<'a> DevicePeak<'a> {
    /// A peak of a device. `None` if it never came.
    pub(crate) fn of(
        process: &'a Process,
        names: &Names,
        sources: &SourceAccess,
        (analysis, device): (&Analysis, &DeviceAnalysis),
        peak: &Composition,
    ) -> Option<DevicePeak<'a>> {
        if peak.seq == 0 {
            return None;
        }
        let definitions = process.definitions();
        let tree = ModuleTree::of(peak, &device.states.module_paths, definitions, names, &Contexts::of(definitions));
        let mut modules: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for module in &tree.modules {
            let own = modules.entry(module.path.clone()).or_default();
            own.0 += module.own.iter().map(|amount| amount.bytes).sum::<u64>();
            own.1 += module.own.iter().map(|amount| amount.blocks).sum::<u64>();
        }
        let serving = &device.serving;
        let proven =
            |(stack, category)| ((stack, category), (serving.part_of(stack, category), serving.stage_of(stack)));
        let of_server = peak.origins().map(|(origin, _)| (origin.stack, origin.category)).map(proven);
        Some(DevicePeak {
            serving: serving.engine.map(|_| of_server.collect()),
            process,
            sources: sources.clone(),
            device: device.device,
            peak: peak.clone(),
            modules,
            reserved_peak_bytes: device.statistics.highest.reserved,
            undecoded_events: analysis.lost.events,
        })
    }

    /// The device ordinal.
    pub(crate) fn device(&self) -> i16 {
        self.device
    }

    fn version(&self, common: CommonData) -> Version<'a> {
        let process = self.process;
        Version {
            definitions: process.definitions(),
            directory: process.directory().and_then(|d| d.to_str()),
            sources: SourceFiles::of(process, &self.sources),
            stacks: self
                .peak
                .origins()
                .map(|(origin, _)| self.shown_stack(origin.stack, origin.context, common))
                .collect(),
        }
    }

    /// The stack that represents a block. For a block of an autograd node it is the forward call that created the node,
    /// if both recordings have nodes.
    fn shown_stack(&self, stack: StackId, context: memtrace_trace::ids::ContextId, common: CommonData) -> StackId {
        let node = self.process.definitions().context(context).filter(|_| common.nodes);
        node.map(|node| node.forward).filter(|forward| !forward.is_none()).unwrap_or(stack)
    }

    fn summary(&self) -> DiffPeak {
        let process = self.process;
        let recording = process.recording();
        let locations = Locations::new(process.definitions(), process.directory());
        let lost = recording.end().map_or(0, |end| end.lost.saturating_add(end.late));
        DiffPeak {
            pid: process.pid(),
            rank: process.rank(),
            trace: process.trace_name().into_owned(),
            device: self.device,
            seq: self.peak.seq,
            step: self.peak.position.and_then(|position| position.step),
            phase: self.peak.phase,
            location: locations.stack(self.peak.allocated_at.0, self.peak.allocated_at.1).location,
            totals: totals(&self.peak.usage),
            reserved_peak_bytes: self.reserved_peak_bytes,
            lost_events: lost
                .saturating_add(recording.counter(Counter::EventsDropped))
                .saturating_add(self.undecoded_events),
        }
    }

    /// Bytes of the peak for which no event was recorded.
    fn unrecorded(&self) -> u64 {
        let recorded = self.peak.origins().map(|(_, amount)| amount.bytes).sum();
        self.peak.usage.allocated.saturating_sub(recorded)
    }
}

/// Sums for both runs, by key.
struct Sums<K>(HashMap<K, Change>);

impl<K: Eq + Hash + Ord + Clone> Sums<K> {
    fn new() -> Sums<K> {
        Sums(HashMap::new())
    }

    fn add(&mut self, key: K, side: usize, bytes: u64, blocks: u64) {
        if bytes > 0 || blocks > 0 {
            self.0.entry(key).or_default().add(side, bytes, blocks);
        }
    }

    /// The sums, largest growth first.
    fn sorted(self) -> Vec<(K, Change)> {
        let mut all: Vec<(K, Change)> = self.0.into_iter().collect();
        all.sort_by(|(a, x), (b, y)| {
            let key = |c: &Change| Reverse((c.difference_bytes, c.b_bytes));
            key(x).cmp(&key(y)).then_with(|| a.cmp(b))
        });
        all
    }
}

/// The key of a line's row: the line, or the node if there is no frame, and the category.
type LineKey = (Option<Line>, Option<Box<str>>, Option<Category>);
/// The key of a stack's row.
type StackKey = (Vec<Line>, Option<Box<str>>, Option<Category>, Option<Phase>);

fn pair(a: &DevicePeak<'_>, b: &DevicePeak<'_>, rules: Option<&CustomRules>) -> DevicePair {
    let common = CommonData::of([a.process, b.process]);
    let (mut version_a, mut version_b) = (a.version(common), b.version(common));
    let matched = MatchedLines::of(&mut version_a, &mut version_b);
    let mut categories: Sums<Option<Category>> = Sums::new();
    let mut custom: Sums<CustomCategory> = Sums::new();
    let mut phases: Sums<Option<Phase>> = Sums::new();
    let mut parts: Sums<Option<ServingPart>> = Sums::new();
    let mut stages: Sums<Option<ServingStage>> = Sums::new();
    let are_servers = [a, b].iter().all(|peak| peak.serving.is_some());
    let mut lines: Sums<LineKey> = Sums::new();
    let mut stacks: Sums<StackKey> = Sums::new();
    let mut modules: Sums<Option<String>> = Sums::new();
    // For each stack's row: one of its stacks, from the second recording if it is there.
    let mut examples: HashMap<StackKey, (usize, StackId)> = HashMap::new();
    for (side, device_peak) in [a, b].into_iter().enumerate() {
        let definitions = device_peak.process.definitions();
        let locations = Locations::new(definitions, device_peak.process.directory());
        let mut lines_of_stacks: HashMap<StackId, (Vec<Line>, Option<Line>)> = HashMap::new();
        for (origin, amount) in device_peak.peak.origins() {
            let shown = device_peak.shown_stack(origin.stack, origin.context, common);
            let (frames, own) = lines_of_stacks.entry(shown).or_insert_with(|| {
                let frames = definitions.walk_ids(shown).filter_map(|(_, frame)| matched.line(side, frame)).collect();
                (frames, locations.own(shown).and_then(|frame| matched.line(side, frame)))
            });
            let node = definitions.context(origin.context).filter(|_| common.nodes);
            let node = node.map(|context| context.node.clone());
            let add = (side, amount.bytes, amount.blocks);
            categories.add(Some(origin.category), add.0, add.1, add.2);
            custom.add(origin.custom, add.0, add.1, add.2);
            phases.add(Some(origin.phase), add.0, add.1, add.2);
            let proven = device_peak.serving.as_ref().filter(|_| are_servers);
            if let Some((part, stage)) = proven.and_then(|proven| proven.get(&(origin.stack, origin.category))) {
                parts.add(Some(*part), add.0, add.1, add.2);
                stages.add(*stage, add.0, add.1, add.2);
            }
            let alone = node.clone().filter(|_| own.is_none());
            lines.add((*own, alone, Some(origin.category)), add.0, add.1, add.2);
            let key: StackKey = (frames.clone(), node, Some(origin.category), Some(origin.phase));
            examples.insert(key.clone(), (side, shown));
            stacks.add(key, add.0, add.1, add.2);
        }
        let rest = device_peak.unrecorded();
        categories.add(None, side, rest, 0);
        custom.add(CustomCategory::NONE, side, rest, 0);
        phases.add(None, side, rest, 0);
        if are_servers {
            parts.add(None, side, rest, 0);
            stages.add(None, side, rest, 0);
        }
        lines.add((None, None, None), side, rest, 0);
        stacks.add((Vec::new(), None, None, None), side, rest, 0);
        let own = &device_peak.modules;
        let blocks: u64 = device_peak.peak.origins().map(|(_, amount)| amount.blocks).sum();
        let (in_bytes, in_blocks) = own.values().fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
        let whole = device_peak.peak.usage.allocated;
        modules.add(None, side, whole.saturating_sub(in_bytes), blocks.saturating_sub(in_blocks));
        own.iter().for_each(|(path, own)| modules.add(Some(path.clone()), side, own.0, own.1));
    }
    let sides = [a, b].map(Side::of);
    let by_module: Vec<ModuleChange> =
        modules.sorted().into_iter().map(|(path, change)| ModuleChange { path, change }).collect();
    let mut pair = DevicePair {
        a: a.summary(),
        b: b.summary(),
        difference_bytes: b.peak.usage.allocated as i64 - a.peak.usage.allocated as i64,
        noise_bytes: a.peak.usage.allocated.max(b.peak.usage.allocated) / NOISE,
        by_category: categories
            .sorted()
            .into_iter()
            .map(|(category, change)| CategoryChange { category, change })
            .collect(),
        by_custom_category: rules.map_or(Vec::new(), |rules| {
            let name = |category| rules.name(category).map(str::to_owned);
            let rows = custom.sorted().into_iter();
            rows.map(|(category, change)| CustomCategoryChange { custom_category: name(category), change }).collect()
        }),
        by_phase: phases.sorted().into_iter().map(|(phase, change)| PhaseChange { phase, change }).collect(),
        by_server_part: parts.sorted().into_iter().map(|(part, change)| ServerPartChange { part, change }).collect(),
        by_stage: stages.sorted().into_iter().map(|(stage, change)| StageChange { stage, change }).collect(),
        by_line: lines.sorted().into_iter().map(|(key, change)| line_change(&sides, &matched, key, change)).collect(),
        by_stack: stacks
            .sorted()
            .into_iter()
            .filter(|(_, change)| change.a_bytes != change.b_bytes)
            .map(|(key, change)| {
                let (side, stack) = examples.get(&key).copied().unwrap_or((1, StackId::NONE));
                stack_change(&sides[side], stack, key, change)
            })
            .collect(),
        by_module: if common.modules && by_module.iter().any(|module| module.path.is_some()) {
            by_module
        } else {
            Vec::new()
        },
        moved_lines: matched.moved as u64,
        moved_lines_by_text: matched.moved_by_text as u64,
        ..DevicePair::default()
    };
    pair.result = result(&pair);
    pair.headline = headline(&pair);
    pair
}

/// The names of one of the two recordings.
struct Side<'a> {
    definitions: &'a Definitions,
    locations: Locations<'a>,
}

impl<'a> Side<'a> {
    fn of(device_peak: &DevicePeak<'a>) -> Side<'a> {
        let process = device_peak.process;
        let definitions = process.definitions();
        Side { definitions, locations: Locations::new(definitions, process.directory()) }
    }
}

/// The row of a line, with its place in both recordings.
fn line_change(sides: &[Side<'_>; 2], matched: &MatchedLines, key: LineKey, change: Change) -> LineChange {
    let [before, after] = sides;
    let (line, node, category) = key;
    let [a_frame, b_frame] = line.map_or([FrameId::NONE; 2], |line| matched.frames(line));
    let (a_frame, b_frame) = (before.definitions.frame(a_frame), after.definitions.frame(b_frame));
    let location = match (a_frame, b_frame) {
        (Some(a), Some(b)) if a.line != b.line => format!("{} (was line {})", after.locations.frame(b), a.line),
        (_, Some(b)) => after.locations.frame(b),
        (Some(a), None) => before.locations.frame(a),
        (None, None) => node.map_or_else(String::new, |node| node.to_string()),
    };
    LineChange { location, a_frame: a_frame.map(frame_summary), b_frame: b_frame.map(frame_summary), category, change }
}

/// The row of a stack. `stack` is one of the row's stacks, in the recording of `side`.
fn stack_change(side: &Side<'_>, stack: StackId, key: StackKey, change: Change) -> StackChange {
    let frames =
        side.definitions.walk(stack).filter_map(|(_, frame)| frame).take(MAX_FRAMES).map(frame_summary).collect();
    let (_, node, category, phase) = key;
    let location = side.locations.stack(stack, memtrace_trace::ids::ContextId::NONE).location;
    let location = match &node {
        Some(node) if location.is_empty() => node.to_string(),
        Some(node) => format!("{node} of {location}"),
        None => location,
    };
    StackChange { location, node: node.map(String::from), category, phase, frames, change }
}

fn result(pair: &DevicePair) -> DiffResult {
    let noise = pair.noise_bytes;
    let changed = |change: &Change| change.difference_bytes.unsigned_abs() > noise;
    let within = pair.by_line.iter().any(|line| changed(&line.change))
        || pair.by_category.iter().any(|category| changed(&category.change));
    match pair.difference_bytes {
        difference if difference.unsigned_abs() > noise && difference > 0 => DiffResult::Grew,
        difference if difference.unsigned_abs() > noise => DiffResult::Shrank,
        _ if within => DiffResult::Redistributed,
        _ => DiffResult::Same,
    }
}

/// Formats a line's content: `activations at model.py:88 forward`.
pub fn line_what(line: &LineChange) -> String {
    let what = line.category.map_or("without a recorded event", Category::plural);
    if line.location.is_empty() { what.to_owned() } else { format!("{what} at {}", line.location) }
}

/// Formats a line's change: `+3.1 GiB activations at model.py:88 forward`.
pub(crate) fn line_text(line: &LineChange) -> String {
    format!("{} {}", signed_size_text(line.change.difference_bytes), line_what(line))
}

fn headline(pair: &DevicePair) -> String {
    let (a, b) = (pair.a.totals.allocated_bytes, pair.b.totals.allocated_bytes);
    let peaks = format!("peak {} -> {}", size_text(a), size_text(b));
    let difference = |change: &Change| change.difference_bytes;
    let line = match pair.result {
        DiffResult::Same if pair.difference_bytes == 0 => return format!("{peaks}: no difference"),
        DiffResult::Same => {
            let difference = signed_size_text(pair.difference_bytes);
            return format!("{peaks}: the difference is within noise ({difference}, below a thousandth)");
        }
        DiffResult::Shrank => pair.by_line.iter().min_by_key(|line| difference(&line.change)),
        DiffResult::Grew | DiffResult::Redistributed => pair.by_line.first(),
    };
    let largest = line
        .filter(|line| difference(&line.change) != 0)
        .map_or_else(String::new, |line| format!("; largest change: {}", line_text(line)));
    match pair.result {
        DiffResult::Redistributed => format!("{peaks}: same peak, different contents{largest}"),
        _ => format!("{peaks}: {}{largest}", signed_size_text(pair.difference_bytes)),
    }
}

fn notes(report: &DiffReport, a: &[AnalyzedProcess<'_>], b: &[AnalyzedProcess<'_>]) -> Vec<String> {
    let mut notes = Vec::new();
    for (name, run) in [("A", &report.a), ("B", &report.b)] {
        if let Some(step) = run.step.filter(|step| *step >= run.steps) {
            notes.push(format!("{name} has no step {step}: its steps are 0 to {}", i64::from(run.steps) - 1));
        }
    }
    for (name, lost) in [
        ("A", report.pairs.iter().map(|pair| pair.a.lost_events).sum::<u64>()),
        ("B", report.pairs.iter().map(|pair| pair.b.lost_events).sum::<u64>()),
    ] {
        if lost > 0 {
            notes.push(format!("{name} lost {lost} events: its peak may be too low"));
        }
    }
    let sources = |processes: &[AnalyzedProcess<'_>]| {
        let sources = processes
            .iter()
            .flat_map(|process| &process.analysis.devices)
            .filter(|d| d.states.peak.seq > 0)
            .map(|d| d.source);
        sources.map(memtrace_input::EventSource::name).collect::<std::collections::BTreeSet<_>>()
    };
    if sources(a) != sources(b) {
        notes.push(
            "A and B have different event sources: what one source does not record counts as a difference".to_owned(),
        );
    }
    let differ = |has: &dyn Fn(&AnalyzedProcess<'_>) -> bool| a.iter().all(has) != b.iter().all(has);
    if differ(&|one| has_nodes(one.process)) {
        notes.push(
            "one of the two is a snapshot without autograd nodes: backward allocations of neither are attributed to \
             lines of the forward pass"
                .to_owned(),
        );
    }
    if differ(&|one| has_modules(one.process)) {
        notes.push("one of the two is a snapshot without module calls: there is no table by module".to_owned());
    }
    let names = |processes: &[AnalyzedProcess<'_>]| {
        processes.iter().any(|process| !process.process.definitions().tensor_names.is_empty())
    };
    if names(a) != names(b) {
        notes.push(
            "only one of the two has tensor names: categories that depend on them (gradients, parameters) can differ"
                .to_owned(),
        );
    }
    notes
}
