//! Changes that would lower a peak, or the allocated bytes at an out-of-memory error. Each change is replayed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_trace::definition::TRAINING_TOPIC;
use memtrace_trace::file::{Frame, Label};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::framework_settings::FrameworkSettings;
use crate::summary::{SuggestionScope, SuggestionSummary};
use crate::why::{allocator_limit, allocator_settings, oom_to_explain};
use memtrace_input::load::Process;
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::{
    Analysis, BlockLifetimes, Category, Composition, DeviceAnalysis, EarlierIteration, Phase, RestOfStep, StackTable,
    StepRows,
};
use memtrace_insight::rules::{
    Meaning, UserClasses, is_dropout, is_library, is_pytorch, label_rule, names_evaluation, names_training,
};
use memtrace_insight::suggestions::{
    COMBINED_CHANGES, Change, Combination, FailedRequest, Recorded, ReplayedPeak, Replayer, RunFacts, SuggestionRule,
    Value, WORTH_DOING, changes,
};
use memtrace_insight::units::size_text;
use memtrace_replay::Names;

/// A combination is reported if it lowers the peak by at least 10 % (1/10) more than its best part.
const WORTH_COMBINING: u64 = 10;
/// A run that would leave less than 5 % (1/20) of the memory is not said to fit.
const CLOSE: u64 = 20;
/// If growth until an error is at least 25 % (1/4) of what was allocated, the growth is what fills the memory. Other
/// changes only delay the error.
const DOMINATES: u64 = 4;
/// The maximum number of changes that are combined.
const MAX_COMBINED: usize = 3;
/// The number of changes to which others are added.
const MAX_STARTS: usize = 2;
/// The maximum number of threads for replays.
const MAX_THREADS: usize = 4;
/// The maximum number of groups of modules that an action names.
const MAX_GROUPS: usize = 6;

/// The inputs of suggestions.
pub(crate) struct SuggestionQuery<'a> {
    pub process: &'a Process,
    pub analysis: &'a Analysis,
    pub device: &'a DeviceAnalysis,
    pub lifetimes: &'a BlockLifetimes,
    /// The requests that the step that the explained error interrupted would still have made.
    pub rest: Option<&'a RestOfStep>,
    pub table: &'a StackTable,
    pub names: &'a Names,
    pub locations: &'a Locations<'a>,
}

/// Changes that lower the peak, or the allocated bytes at the error to explain, cheapest first. Only changes whose
/// replay lowers it. `progress` receives the number of replays done, and their total.
pub(crate) fn suggestions(query: &SuggestionQuery<'_>, progress: &mut dyn FnMut(u64, u64)) -> Vec<SuggestionSummary> {
    let device = query.device;
    let has_backward = device.table.has_backward();
    // An engine divides requests into batches itself, and has options of its own (`server`).
    if device.serving.engine.is_some() && !has_backward {
        return Vec::new();
    }
    let oom = oom_to_explain(device, query.process);
    let interrupting = device.diagnostics.interrupting_error(query.process.definitions());
    let failed = oom.map(|oom| FailedRequest {
        seq: oom.seq,
        requested: oom.requested,
        at: oom.requested_at,
        phase: oom.phase,
        step: oom.position.step,
        in_unused_graph: interrupting == Some(oom.seq),
    });
    let (state, phase) = oom.map_or((&device.states.peak, device.states.peak.phase), |oom| (&oom.in_use, oom.phase));
    let at_error = state.usage.allocated + failed.map_or(0, |failed| failed.requested);
    let settings = allocator_settings(query.process);
    if at_error == 0 || !settings.native {
        return Vec::new();
    }
    let definitions = query.process.definitions();
    let recorded = Recorded::new(query.lifetimes, definitions, query.table, settings, failed, query.rest)
        .with_outliers(device.outlier_steps.places())
        .with_names(query.names);
    let limit = allocator_limit(query.process, device, query.analysis);
    let is_continued = recorded.is_continued();
    let scope = match query.rest.map(|rest| rest.taken_from) {
        _ if failed.is_some() && !is_continued => SuggestionScope::UntilError,
        Some(EarlierIteration::InSameStep) => SuggestionScope::Iteration,
        _ => SuggestionScope::Run,
    };
    let peak = match query.rest {
        Some(rest) if is_continued => rest.peak.max(device.states.peak.usage.allocated),
        None if is_continued => recorded.highest_sum(),
        _ => at_error,
    };
    let trains = will_train(query.process, oom.map_or(StackId::NONE, |oom| oom.requested_at.0));
    let run = RunFacts { phase, has_backward, trains };
    let replayer = Replayer::new(recorded, run, peak, limit.unwrap_or(u64::MAX), peaks_by_phase(device));
    if !replayer.is_sound() {
        return Vec::new();
    }
    let is_filled =
        oom.is_some() && query.device.diagnostics.grown_bytes(query.table).saturating_mul(DOMINATES) >= at_error;
    let mut allowed = changes(replayer.facts());
    allowed.retain(|change| !is_filled || change.stops_growth());
    let replayed = replay_all(&replayer, &allowed, progress);
    let is_worth = |after: &ReplayedPeak| peak.saturating_sub(after.peak) >= (peak / WORTH_DOING).max(1);
    let mut found: Vec<(&dyn Change, ReplayedPeak)> =
        allowed.iter().zip(replayed).filter_map(|(change, after)| Some((&**change, after.filter(is_worth)?))).collect();
    found.sort_by_key(|(change, after)| (change.is_other_training(), after.peak));
    let combined = combine(&replayer, &found);
    // For people, the cheapest comes first. A combination comes after each change alone.
    found.sort_by_key(|(change, after)| (change.is_other_training(), change.rule().cost, after.peak));
    let settings = FrameworkSettings::new(definitions, state);
    let texts = Texts {
        query,
        replayer: &replayer,
        settings,
        call: line_that_calls_the_model(query, state),
        is_cut_off: scope == SuggestionScope::UntilError,
    };
    let figures = figures_text(state);
    // The replays keep these bytes, which the step may free.
    let uncertain = query.rest.filter(|_| is_continued).map_or(0, |rest| rest.uncertain);
    let fits = |after: &ReplayedPeak| match (scope, after.fits) {
        (SuggestionScope::Run, false) if uncertain > 0 => {
            limit.filter(|limit| after.peak.saturating_sub(uncertain) > *limit).map(|_| false)
        }
        (_, false) => Some(false),
        // Where little is left, what the allocator cannot use of its segments decides, and the replay is not that
        // exact.
        (SuggestionScope::Run, true) => limit.filter(|limit| after.reserved <= limit - limit / CLOSE).map(|_| true),
        // The rest after an iteration is known if the program only repeats it.
        (SuggestionScope::Iteration, true) => (!has_backward).then_some(true),
        (SuggestionScope::UntilError, true) => None,
    };
    let summary = |(changes, after): (Combination<'_>, ReplayedPeak)| {
        let rules: Vec<&SuggestionRule> = changes.rules().collect();
        let (rule, combines) = match rules[..] {
            [single] => (single, Vec::new()),
            _ => (&COMBINED_CHANGES, rules.iter().map(|rule| rule.id).collect()),
        };
        let cost = rules.iter().map(|rule| rule.cost).max().unwrap_or(rule.cost);
        SuggestionSummary {
            rule: rule.id,
            action: texts.action(&changes),
            cost,
            cost_text: cost.text().to_owned(),
            code: texts.code(&changes),
            link: rule.link.to_owned(),
            combines,
            peak_after_bytes: after.peak,
            reserved_after_bytes: after.reserved,
            saves_bytes: peak.saturating_sub(after.peak),
            fits: fits(&after),
            scope,
            at_most: uncertain > 0 || rules.iter().any(|rule| rule.at_most),
            evidence: format!("{} {figures}", joined(&rules, |rule| rule.condition)),
            method: joined(&rules, |rule| rule.method),
        }
    };
    let alone = found.iter().map(|(change, after)| (Combination::of(*change), *after));
    alone.chain(combined).map(summary).collect()
}

/// The line that calls the model which made most activations of `state`: the innermost line of the program outside its
/// outermost module.
fn line_that_calls_the_model(query: &SuggestionQuery<'_>, state: &Composition) -> String {
    let definitions = query.process.definitions();
    let mut by_line: BTreeMap<FrameId, u64> = BTreeMap::new();
    for (origin, amount) in state.origins().filter(|(origin, _)| origin.category == Category::Activation) {
        let (mut line, mut is_in_module) = (None, false);
        let frames = definitions.walk_ids(origin.stack).filter_map(|(_, id)| Some((id, definitions.frame(id)?)));
        for (id, frame) in frames.filter(|(_, frame)| !frame.native) {
            if &*frame.name == "_call_impl" && is_pytorch(frame) {
                (line, is_in_module) = (None, true);
            } else if is_in_module && line.is_none() && !is_library(&frame.filename) {
                line = Some(id);
            }
        }
        if let Some(line) = line {
            *by_line.entry(line).or_default() += amount.bytes;
        }
    }
    let most = by_line.into_iter().max_by_key(|(_, bytes)| *bytes);
    let frame = most.and_then(|(line, _)| definitions.frame(line));
    frame.map_or_else(
        || "where the model is called".to_owned(),
        |frame| format!("{}:{}", query.locations.short(&frame.filename), frame.line),
    )
}

/// A text of each rule, as one text.
fn joined(rules: &[&SuggestionRule], text: impl Fn(&SuggestionRule) -> &str) -> String {
    rules.iter().map(|rule| text(rule)).collect::<Vec<&str>>().join(" ")
}

/// Whether the program trains, although no backward pass has run: it has an optimizer, dropout is active, or the
/// innermost function around `failed` that is named after one of the two trains rather than evaluates.
fn will_train(process: &Process, failed: StackId) -> bool {
    let definitions = process.definitions();
    let frames = || definitions.walk(failed).filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
    let evaluates = |frame: &Frame| names_evaluation(&frame.filename, &frame.name);
    let named = frames().find(|frame| evaluates(frame) || names_training(&frame.name));
    match named {
        Some(frame) => !evaluates(frame),
        None => {
            let is_of_optimizer = |label: &Label| label_rule(label).is_some_and(|rule| rule.meaning != Meaning::Data);
            definitions.notices.iter().any(|notice| &*notice.topic == TRAINING_TOPIC)
                || definitions.labels.values().any(is_of_optimizer)
                || definitions.frames.iter().any(is_dropout)
        }
    }
}

/// Replays each change alone, on several threads.
fn replay_all(
    replayer: &Replayer<'_>,
    changes: &[Box<dyn Change>],
    progress: &mut dyn FnMut(u64, u64),
) -> Vec<Option<ReplayedPeak>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(changes.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((index, change)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, changes.get(i)?)))
        {
            done.push((index, replayer.replay(&Combination::of(&**change))));
        }
        done
    };
    let mut replayed = vec![None; changes.len()];
    progress(0, changes.len() as u64);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = work();
        for other in others {
            // A thread ends early only by a panic, which this one takes over.
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        for (index, peak) in all {
            replayed[index] = peak;
        }
    });
    progress(changes.len() as u64, changes.len() as u64);
    replayed
}

/// The changes that lower the peak most, if together they lower it clearly more than the best one alone. Changes are
/// added to each of the best ones, because the best one can exclude others.
fn combine<'c>(
    replayer: &Replayer<'_>,
    found: &[(&'c dyn Change, ReplayedPeak)],
) -> Option<(Combination<'c>, ReplayedPeak)> {
    let (_, alone) = found.first()?;
    let best = found.iter().take(MAX_STARTS).map(|(start, _)| {
        let mut changes = Combination::of(*start);
        let mut best = replayer.summed_peak(&changes);
        for _ in 1..MAX_COMBINED {
            let more = found.iter().filter_map(|(other, _)| changes.with(*other));
            let replayed = more.map(|more| (replayer.summed_peak(&more), more));
            let Some((peak, more)) = replayed.min_by_key(|(peak, _)| *peak) else { break };
            if peak + best / WORTH_COMBINING > best {
                break;
            }
            (changes, best) = (more, peak);
        }
        (best, changes)
    });
    let (_, changes) = best.min_by_key(|(peak, _)| *peak)?;
    let together = if changes.changes().len() > 1 { replayer.replay(&changes)? } else { return None };
    (together.peak < alone.peak).then_some((changes, together))
}

/// The highest peak of each phase over the whole run.
fn peaks_by_phase(device: &DeviceAnalysis) -> [u64; Phase::ALL.len()] {
    let (later, _) = device.table.later();
    let parts: Vec<&StepRows> =
        [Some(device.table.before()), device.table.first(), Some(later)].into_iter().flatten().collect();
    Phase::ALL.map(|phase| parts.iter().map(|rows| rows.phases[phase as usize].peak).max().unwrap_or(0))
}

/// The texts of changes.
struct Texts<'a> {
    query: &'a SuggestionQuery<'a>,
    replayer: &'a Replayer<'a>,
    settings: FrameworkSettings,
    /// The line that calls the model.
    call: String,
    /// Whether an error cut the step off, so that modules of the model can be without a call.
    is_cut_off: bool,
}

impl Texts<'_> {
    /// The action.
    fn action(&self, changes: &Combination<'_>) -> String {
        let action = |change: &&dyn Change| {
            let action = self.filled(change.action(), *change);
            match self.settings.of(change.rule().id) {
                Some(setting) => format!("{action} [{}]", setting.text),
                None => action,
            }
        };
        changes.changes().iter().map(action).collect::<Vec<String>>().join(" + ")
    }

    /// Lines of Python that make the changes, with an empty line between two.
    fn code(&self, changes: &Combination<'_>) -> Vec<String> {
        let code = |change: &&dyn Change| {
            let setting = self.settings.of(change.rule().id);
            let lines = setting.map_or(change.rule().code, |setting| setting.code);
            lines.iter().map(|line| self.filled(line, *change)).collect::<Vec<String>>()
        };
        changes.changes().iter().map(code).collect::<Vec<_>>().join(&String::new())
    }

    /// A text with what its placeholders stand for.
    fn filled(&self, text: &str, change: &dyn Change) -> String {
        let mut text = text.to_owned();
        for (name, value) in change.values(self.replayer.facts()) {
            let value = match value {
                Value::Text(text) => text,
                Value::Line(stack) => self.line(stack),
                Value::Modules(calls) => {
                    text = text.replace("{classes}", &self.classes(&calls));
                    self.modules(&calls)
                }
            };
            text = text.replace(&format!("{{{name}}}"), &value);
        }
        text.replace("{call}", &self.call)
    }

    /// The program's classes of these calls' modules as strings of Python.
    fn classes(&self, calls: &[ContextId]) -> String {
        let definitions = self.query.process.definitions();
        let classes = UserClasses::of(definitions);
        let class_names: BTreeSet<String> = calls
            .iter()
            .filter_map(|call| definitions.nn_calls.get(call))
            .map(|call| format!("{:?}", classes.name(call.class.rsplit('.').next().unwrap_or_default())))
            .collect();
        class_names.into_iter().collect::<Vec<String>>().join(", ")
    }

    /// The innermost line of a stack outside PyTorch: a model's code can be in a library.
    fn line(&self, stack: StackId) -> String {
        let frames = self.query.process.definitions().walk(stack);
        let mut frames = frames.filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
        let outside = frames.find(|frame| !is_pytorch(frame));
        outside.map_or_else(
            || "an unknown line".to_owned(),
            |frame| format!("{}:{}", self.query.locations.short(&frame.filename), frame.line),
        )
    }

    /// The modules of these calls: `layers.* (12 of Block)`, `layer1.* (3 of Block), layer2.* (4 of Block)`,
    /// `encoder (Tower), decoder (Tower)`.
    fn modules(&self, calls: &[ContextId]) -> String {
        let definitions = self.query.process.definitions();
        let classes = UserClasses::of(definitions);
        // By class and parent's path: the paths.
        let mut groups: BTreeMap<(&str, String), BTreeSet<String>> = BTreeMap::new();
        for call in calls {
            let class = definitions.nn_calls.get(call).map_or("", |call| classes.name(&call.class));
            let path = self.query.names.module_path(*call, self.query.device.states.peak.seq).unwrap_or_default();
            let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
            let parent = parent.to_owned();
            groups.entry((class, parent)).or_default().insert(path);
        }
        for name in definitions.nn_names.iter().filter(|_| self.is_cut_off) {
            let parent = name.name.rsplit_once('.').map_or("", |(parent, _)| parent);
            if let Some(paths) = groups.get_mut(&(classes.name(&name.class), parent.to_owned())) {
                paths.insert(name.name.to_string());
            }
        }
        let texts: Vec<String> = groups
            .iter()
            .flat_map(|((class, parent), paths)| match parent.is_empty() {
                false => vec![format!("{parent}.* ({} of {class})", paths.len())],
                // The modules of a model that is a `Sequential` itself.
                true if paths.len() > 1 && paths.iter().all(|path| path.parse::<u32>().is_ok()) => {
                    vec![format!("* ({} of {class})", paths.len())]
                }
                true => paths.iter().map(|path| format!("{path} ({class})")).collect(),
            })
            .collect();
        if texts.len() <= MAX_GROUPS && groups.values().flatten().all(|path| !path.is_empty()) {
            return texts.join(", ");
        }
        let mut classes: BTreeMap<&str, usize> = BTreeMap::new();
        for ((class, _), paths) in &groups {
            *classes.entry(class).or_default() += paths.len();
        }
        let text = |(class, count): (&&str, &usize)| format!("all {count} {class} modules");
        classes.iter().map(text).collect::<Vec<String>>().join(", ")
    }
}

fn figures_text(state: &Composition) -> String {
    let by_category = state.by_category();
    let figures = Category::ALL.iter().zip(by_category).filter(|(_, amount)| amount.bytes > 0);
    let present: Vec<String> =
        figures.map(|(category, amount)| format!("{} {}", category.plural(), size_text(amount.bytes))).collect();
    format!("Allocated {}: {}.", size_text(state.usage.allocated), present.join(", "))
}
