//! Builds a [`DiffReport`] from two runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use memtrace_trace::counters::Counter;
use memtrace_trace::ids::{FrameId, StackId};

use super::build::totals;
use super::diff::{
    CategoryChange, Change, DIFF_VERSION, DevicePair, DiffMoment, DiffReport, DiffRun, DiffWanted, LineChange,
    ModuleChange, PhaseChange, StackChange, Unpaired, Verdict,
};
use super::finish::Progress;
use super::places::{Places, frame_summary};
use super::same_lines::{Line, SameLines, Version};
use super::units::{signed_size_text, size_text};
use memtrace_input::load::{Process, Run, SNAPSHOT_END};
use memtrace_insight::passes::{Category, Composition, DeviceStory, ModuleTree, Phase, Story};
use memtrace_output::Sources;
use memtrace_replay::{Contexts, Names};

/// A difference below one in this many parts of the peak is noise.
const NOISE: u64 = 1000;
/// The maximum number of frames reported per stack.
const MAX_FRAMES: usize = 128;

/// A process of one run and its analysis.
struct Read<'a> {
    process: &'a Process,
    names: Names,
    story: Story,
}

/// A device's peak in one run.
struct Moment<'a> {
    read: &'a Read<'a>,
    story: &'a DeviceStory,
    peak: &'a Composition,
}

/// Compares the peaks of two runs. If `a` and `b` are the same run, [`DiffWanted::steps`] selects two of its steps to
/// compare.
pub fn diff(a: &Run, b: &Run, wanted: &DiffWanted, progress: &mut dyn FnMut(Progress<'_>)) -> DiffReport {
    let (step_a, step_b) = wanted.steps.unzip();
    let (read_a, read_b) = if std::ptr::eq(a, b) {
        let steps: Vec<u32> = step_a.into_iter().chain(step_b).collect();
        (read(a, &steps, wanted, progress), None)
    } else {
        (read(a, step_a.as_slice(), wanted, progress), Some(read(b, step_b.as_slice(), wanted, progress)))
    };
    let read_b = read_b.as_ref().unwrap_or(&read_a);
    let mut report = DiffReport {
        version: DIFF_VERSION.to_owned(),
        a: diff_run(a, step_a),
        b: diff_run(b, step_b),
        ..DiffReport::default()
    };
    let mut alone: [Vec<Moment<'_>>; 2] = [Vec::new(), Vec::new()];
    for (a, b) in pair_processes(&read_a, read_b) {
        let mut of_a = a.map_or(Vec::new(), |read| moments(read, step_a, wanted));
        let mut of_b = b.map_or(Vec::new(), |read| moments(read, step_b, wanted));
        if let ([a], [b]) = (&of_a[..], &of_b[..]) {
            // With one device on each side, the devices correspond even if their ordinals differ.
            report.pairs.push(pair(a, b));
            continue;
        }
        for device in of_a.iter().map(|m| m.story.device).collect::<Vec<_>>() {
            let find = |of: &[Moment<'_>]| of.iter().position(|m| m.story.device == device);
            if let (Some(i), Some(j)) = (find(&of_a), find(&of_b)) {
                report.pairs.push(pair(&of_a.remove(i), &of_b.remove(j)));
            }
        }
        alone[0].extend(of_a);
        alone[1].extend(of_b);
    }
    report
        .pairs
        .sort_by_key(|pair| (Reverse(pair.difference_bytes.unsigned_abs()), pair.a.rank, pair.a.pid, pair.a.device));
    for (run, alone) in ["a", "b"].into_iter().zip(&alone) {
        report.unpaired.extend(alone.iter().map(|moment| Unpaired {
            run: run.to_owned(),
            pid: moment.read.process.pid(),
            rank: moment.read.process.rank(),
            device: moment.story.device,
            peak_bytes: moment.peak.usage.allocated,
        }));
    }
    report.remarks = remarks(&report, &read_a, read_b);
    report
}

fn diff_run(run: &Run, step: Option<u32>) -> DiffRun {
    let command = match (&run.manifest().command[..], run.processes()) {
        ([], [only]) => only.info().argv.clone(),
        (command, _) => command.to_vec(),
    };
    DiffRun { path: run.path().display().to_string(), command, step }
}

fn read<'a>(run: &'a Run, steps: &[u32], wanted: &DiffWanted, progress: &mut dyn FnMut(Progress<'_>)) -> Vec<Read<'a>> {
    let mut all = Vec::new();
    for process in run.processes() {
        if wanted.rank.is_some_and(|rank| process.rank() != Some(rank)) {
            continue;
        }
        let total = process.recording().event_count();
        let what = format!("reading {}", run.path().file_name().unwrap_or_default().to_string_lossy());
        let mut heard = |done| progress(Progress { what: &what, done, total });
        let names = Names::of(process.recording());
        let story = Story::watching(process.recording(), process.survey(), &names, steps, &mut (), &mut heard);
        all.push(Read { process, names, story });
    }
    all
}

/// Pairs processes by rank. Processes with the same rank, or without one, are paired in order.
fn pair_processes<'a>(a: &'a [Read<'a>], b: &'a [Read<'a>]) -> Vec<(Option<&'a Read<'a>>, Option<&'a Read<'a>>)> {
    if let ([a], [b]) = (a, b) {
        return vec![(Some(a), Some(b))];
    }
    let mut ranks: BTreeMap<Option<u32>, [Vec<&'a Read<'a>>; 2]> = BTreeMap::new();
    for (side, reads) in [a, b].into_iter().enumerate() {
        let recorded = reads.iter().filter(|read| read.story.devices.iter().any(|device| device.peak.seq > 0));
        for read in recorded {
            ranks.entry(read.process.rank()).or_default()[side].push(read);
        }
    }
    let mut pairs = Vec::new();
    for [a, b] in ranks.into_values() {
        let at = |reads: &[&'a Read<'a>], index: usize| reads.get(index).copied();
        pairs.extend((0..a.len().max(b.len())).map(|index| (at(&a, index), at(&b, index))));
    }
    pairs
}

fn moments<'a>(read: &'a Read<'a>, step: Option<u32>, wanted: &DiffWanted) -> Vec<Moment<'a>> {
    let devices = read.story.devices.iter().filter(|d| wanted.device.is_none_or(|device| device == d.device));
    let moment = |story: &'a DeviceStory| {
        let peak = match step {
            None => &story.peak,
            Some(step) => story.watched.iter().find(|(watched, _)| *watched == step).map(|(_, peak)| peak)?,
        };
        (peak.seq > 0).then_some(Moment { read, story, peak })
    };
    devices.filter_map(moment).collect()
}

/// What both recordings know. A fact that only one recording knows is not a difference.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// Autograd nodes, and with them the forward calls behind allocations of a backward pass.
    nodes: bool,
    /// Calls of modules.
    modules: bool,
}

impl Known {
    fn of(reads: [&Read<'_>; 2]) -> Known {
        Known { nodes: reads.into_iter().all(Read::knows_nodes), modules: reads.into_iter().all(Read::knows_modules) }
    }
}

impl Read<'_> {
    /// Only PyTorch's snapshots can lack nodes or module calls. memtrace records all that the program had.
    fn is_snapshot(&self) -> bool {
        self.process.recording().end().is_some_and(|end| end.reason == SNAPSHOT_END)
    }

    fn knows_nodes(&self) -> bool {
        !self.is_snapshot() || self.process.definitions().contexts.iter().any(|context| !context.node.is_empty())
    }

    fn knows_modules(&self) -> bool {
        !self.is_snapshot() || !self.process.definitions().nn_calls.is_empty()
    }
}

impl<'a> Moment<'a> {
    fn version(&self, known: Known) -> Version<'a> {
        let process = self.read.process;
        Version {
            definitions: process.definitions(),
            directory: process.directory().and_then(|d| d.to_str()),
            sources: Sources::of(process),
            stacks: self.peak.origins().map(|(origin, _)| self.shown(origin.stack, origin.context, known)).collect(),
        }
    }

    /// The stack that represents a block. For a block of an autograd node it is the forward call that made the node, if
    /// both recordings know nodes.
    fn shown(&self, stack: StackId, context: memtrace_trace::ids::ContextId, known: Known) -> StackId {
        let node = self.read.process.definitions().context(context).filter(|_| known.nodes);
        node.map(|node| node.forward).filter(|forward| !forward.is_none()).unwrap_or(stack)
    }

    fn told(&self) -> DiffMoment {
        let process = self.read.process;
        let recording = process.recording();
        let places = Places::new(process.definitions(), process.directory());
        let lost = recording.end().map_or(0, |end| end.lost.saturating_add(end.late));
        DiffMoment {
            pid: process.pid(),
            rank: process.rank(),
            device: self.story.device,
            step: self.peak.at.and_then(|at| at.step),
            phase: self.peak.phase,
            place: places.stack(self.peak.by.0, self.peak.by.1).place,
            totals: totals(&self.peak.usage),
            reserved_peak_bytes: self.story.peaks.reserved,
            lost_events: lost
                .saturating_add(recording.counter(Counter::EventsDropped))
                .saturating_add(self.read.story.lost.events),
        }
    }

    /// Bytes of the peak that no known block accounts for.
    fn unaccounted(&self) -> u64 {
        let known = self.peak.origins().map(|(_, amount)| amount.bytes).sum();
        self.peak.usage.allocated.saturating_sub(known)
    }

    /// The bytes and blocks of each module itself, by path.
    fn modules(&self) -> BTreeMap<String, (u64, u64)> {
        let definitions = self.read.process.definitions();
        let contexts = Contexts::of(definitions);
        let tree = ModuleTree::of(self.peak, &self.story.paths, definitions, &self.read.names, &contexts);
        let mut modules = BTreeMap::new();
        for module in &tree.modules {
            let own: &mut (u64, u64) = modules.entry(module.path.clone()).or_default();
            own.0 += module.own.iter().map(|amount| amount.bytes).sum::<u64>();
            own.1 += module.own.iter().map(|amount| amount.blocks).sum::<u64>();
        }
        modules
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
type OfLine = (Option<Line>, Option<Box<str>>, Option<Category>);
/// The key of a stack's row.
type OfStack = (Vec<Line>, Option<Box<str>>, Option<Category>, Option<Phase>);

fn pair(a: &Moment<'_>, b: &Moment<'_>) -> DevicePair {
    let both = Known::of([a.read, b.read]);
    let (mut version_a, mut version_b) = (a.version(both), b.version(both));
    let same = SameLines::of(&mut version_a, &mut version_b);
    let mut categories: Sums<Option<Category>> = Sums::new();
    let mut phases: Sums<Option<Phase>> = Sums::new();
    let mut lines: Sums<OfLine> = Sums::new();
    let mut stacks: Sums<OfStack> = Sums::new();
    let mut modules: Sums<Option<String>> = Sums::new();
    // For each stack's row: one of its stacks, from the second recording if it is there.
    let mut examples: HashMap<OfStack, (usize, StackId)> = HashMap::new();
    for (side, moment) in [a, b].into_iter().enumerate() {
        let definitions = moment.read.process.definitions();
        let places = Places::new(definitions, moment.read.process.directory());
        let mut known: HashMap<StackId, (Vec<Line>, Option<Line>)> = HashMap::new();
        for (origin, amount) in moment.peak.origins() {
            let shown = moment.shown(origin.stack, origin.context, both);
            let (frames, own) = known.entry(shown).or_insert_with(|| {
                let frames = definitions.walk_ids(shown).filter_map(|(_, frame)| same.line(side, frame)).collect();
                (frames, places.own(shown).and_then(|frame| same.line(side, frame)))
            });
            let node = definitions.context(origin.context).filter(|_| both.nodes);
            let node = node.map(|context| context.node.clone());
            let add = (side, amount.bytes, amount.blocks);
            categories.add(Some(origin.category), add.0, add.1, add.2);
            phases.add(Some(origin.phase), add.0, add.1, add.2);
            let alone = node.clone().filter(|_| own.is_none());
            lines.add((*own, alone, Some(origin.category)), add.0, add.1, add.2);
            let of: OfStack = (frames.clone(), node, Some(origin.category), Some(origin.phase));
            examples.insert(of.clone(), (side, shown));
            stacks.add(of, add.0, add.1, add.2);
        }
        let rest = moment.unaccounted();
        categories.add(None, side, rest, 0);
        phases.add(None, side, rest, 0);
        lines.add((None, None, None), side, rest, 0);
        stacks.add((Vec::new(), None, None, None), side, rest, 0);
        let own = moment.modules();
        let blocks: u64 = moment.peak.origins().map(|(_, amount)| amount.blocks).sum();
        let (in_bytes, in_blocks) = own.values().fold((0, 0), |sum, own| (sum.0 + own.0, sum.1 + own.1));
        let whole = moment.peak.usage.allocated;
        modules.add(None, side, whole.saturating_sub(in_bytes), blocks.saturating_sub(in_blocks));
        own.into_iter().for_each(|(path, own)| modules.add(Some(path), side, own.0, own.1));
    }
    let moments = [a, b];
    let places = moments.map(|m| Places::new(m.read.process.definitions(), m.read.process.directory()));
    let frame = |side: usize, id: FrameId| moments[side].read.process.definitions().frame(id);
    let line_change = |((line, node, category), change): (OfLine, Change)| {
        let [in_a, in_b] = line.map_or([FrameId::NONE; 2], |line| same.frames(line));
        let (in_a, in_b) = (frame(0, in_a), frame(1, in_b));
        let words = match (in_a, in_b) {
            (Some(a), Some(b)) if a.line != b.line => format!("{} (was line {})", places[1].frame(b), a.line),
            (_, Some(b)) => places[1].frame(b),
            (Some(a), None) => places[0].frame(a),
            (None, None) => node.map_or_else(String::new, |node| node.to_string()),
        };
        LineChange {
            place: words,
            a_frame: in_a.map(frame_summary),
            b_frame: in_b.map(frame_summary),
            category,
            change,
        }
    };
    let stack_change = |(of, change): (OfStack, Change)| {
        let (side, stack) = examples.get(&of).copied().unwrap_or((1, StackId::NONE));
        let definitions = moments[side].read.process.definitions();
        let frames =
            definitions.walk(stack).filter_map(|(_, frame)| frame).take(MAX_FRAMES).map(frame_summary).collect();
        let (_, node, category, phase) = of;
        let place = places[side].stack(stack, memtrace_trace::ids::ContextId::NONE).place;
        let place = match &node {
            Some(node) if place.is_empty() => node.to_string(),
            Some(node) => format!("{node} of {place}"),
            None => place,
        };
        StackChange { place, node: node.map(String::from), category, phase, frames, change }
    };
    let by_module: Vec<ModuleChange> =
        modules.sorted().into_iter().map(|(path, change)| ModuleChange { path, change }).collect();
    let mut pair = DevicePair {
        a: a.told(),
        b: b.told(),
        difference_bytes: b.peak.usage.allocated as i64 - a.peak.usage.allocated as i64,
        noise_bytes: a.peak.usage.allocated.max(b.peak.usage.allocated) / NOISE,
        by_category: categories
            .sorted()
            .into_iter()
            .map(|(category, change)| CategoryChange { category, change })
            .collect(),
        by_phase: phases.sorted().into_iter().map(|(phase, change)| PhaseChange { phase, change }).collect(),
        by_line: lines.sorted().into_iter().map(line_change).collect(),
        by_stack: stacks
            .sorted()
            .into_iter()
            .filter(|(_, change)| change.a_bytes != change.b_bytes)
            .map(stack_change)
            .collect(),
        by_module: if both.modules && by_module.iter().any(|module| module.path.is_some()) {
            by_module
        } else {
            Vec::new()
        },
        moved_lines: same.moved as u64,
        moved_lines_by_text: same.moved_by_text as u64,
        ..DevicePair::default()
    };
    pair.verdict = verdict(&pair);
    pair.headline = headline(&pair);
    pair
}

fn verdict(pair: &DevicePair) -> Verdict {
    let noise = pair.noise_bytes;
    let changed = |change: &Change| change.difference_bytes.unsigned_abs() > noise;
    let within = pair.by_line.iter().any(|line| changed(&line.change))
        || pair.by_category.iter().any(|category| changed(&category.change));
    match pair.difference_bytes {
        difference if difference.unsigned_abs() > noise && difference > 0 => Verdict::Grew,
        difference if difference.unsigned_abs() > noise => Verdict::Shrank,
        _ if within => Verdict::Moved,
        _ => Verdict::Same,
    }
}

/// Formats a line's content: `activations at model.py:88 forward`.
pub(super) fn line_what(line: &LineChange) -> String {
    let what = line.category.map_or("that no event accounts for", Category::plural);
    if line.place.is_empty() { what.to_owned() } else { format!("{what} at {}", line.place) }
}

/// Formats a line's change: `+3.1 GiB activations at model.py:88 forward`.
pub(super) fn line_text(line: &LineChange) -> String {
    format!("{} {}", signed_size_text(line.change.difference_bytes), line_what(line))
}

fn headline(pair: &DevicePair) -> String {
    let (a, b) = (pair.a.totals.allocated_bytes, pair.b.totals.allocated_bytes);
    let peaks = format!("peak {} -> {}", size_text(a), size_text(b));
    let by = |change: &Change| change.difference_bytes;
    let most = match pair.verdict {
        Verdict::Same if pair.difference_bytes == 0 => return format!("{peaks}: no difference"),
        Verdict::Same => {
            let difference = signed_size_text(pair.difference_bytes);
            return format!("{peaks}: no difference that matters ({difference}, below a thousandth)");
        }
        Verdict::Shrank => pair.by_line.iter().min_by_key(|line| by(&line.change)),
        Verdict::Grew | Verdict::Moved => pair.by_line.first(),
    };
    let most = most
        .filter(|line| by(&line.change) != 0)
        .map_or_else(String::new, |line| format!("; the most: {}", line_text(line)));
    match pair.verdict {
        Verdict::Moved => format!("{peaks}: as high, but of other things{most}"),
        _ => format!("{peaks}: {}{most}", signed_size_text(pair.difference_bytes)),
    }
}

fn remarks(report: &DiffReport, a: &[Read<'_>], b: &[Read<'_>]) -> Vec<String> {
    let mut remarks = Vec::new();
    for (name, reads, run) in [("A", a, &report.a), ("B", b, &report.b)] {
        if let Some(step) = run.step {
            let steps =
                reads.iter().flat_map(|read| &read.story.devices).map(|device| device.table.steps()).max().unwrap_or(0);
            if step >= steps {
                remarks.push(format!("{name} has no step {step}: its steps are 0 to {}", i64::from(steps) - 1));
            }
        }
    }
    for (name, lost) in [
        ("A", report.pairs.iter().map(|pair| pair.a.lost_events).sum::<u64>()),
        ("B", report.pairs.iter().map(|pair| pair.b.lost_events).sum::<u64>()),
    ] {
        if lost > 0 {
            remarks.push(format!("{name} lost {lost} events: its peak may be too low"));
        }
    }
    let sources = |reads: &[Read<'_>]| {
        let lanes = reads.iter().flat_map(|read| &read.story.devices).filter(|d| d.peak.seq > 0).map(|d| d.lane);
        lanes.map(memtrace_input::Lane::name).collect::<std::collections::BTreeSet<_>>()
    };
    if sources(a) != sources(b) {
        remarks.push(
            "the two were told by different sources: what one of them cannot see counts as a difference".to_owned(),
        );
    }
    let differ = |know: &dyn Fn(&Read<'_>) -> bool| a.iter().all(know) != b.iter().all(know);
    if differ(&|read| read.knows_nodes()) {
        remarks.push("one of the two is a snapshot without autograd's nodes: of neither is it said which line of the forward made backward allocate".to_owned());
    }
    if differ(&|read| read.knows_modules()) {
        remarks.push("one of the two is a snapshot without calls of modules: nothing is said by module".to_owned());
    }
    let names = |reads: &[Read<'_>]| reads.iter().any(|read| !read.process.definitions().tensor_names.is_empty());
    if names(a) != names(b) {
        remarks.push("only one of the two knows the names of tensors: what rests on them alone (gradients, parameters) may be called otherwise in the other".to_owned());
    }
    remarks
}
