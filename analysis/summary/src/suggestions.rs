//! What would lower a peak, or the allocated bytes at an out-of-memory error: each change is replayed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_trace::definition::TRAINING_TOPIC;
use memtrace_trace::file::{Frame, Label};
use memtrace_trace::ids::{ContextId, StackId};

use crate::summary::{SuggestionScope, SuggestionSummary};
use crate::why::{allocator_limit, allocator_settings, oom_to_explain};
use memtrace_input::load::Process;
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::changes::{
    BatchChange, Changes, FailedRequest, OptimizerChange, Outcome, Plan, Recorded,
};
use memtrace_insight::passes::{
    Analysis, BlockLifetimes, Category, Composition, DeviceAnalysis, EarlierIteration, Phase, RestOfStep, StackTable,
    StepRows,
};
use memtrace_insight::rules::{
    Meaning, RuleId, SuggestionRule, WORTH_DOING, is_dropout, label_rule, names_evaluation, names_training,
    suggestion_rule,
};
use memtrace_insight::units::size_text;
use memtrace_replay::Names;

/// A combination is reported if it lowers the peak by at least one in this many parts more than its best part.
const WORTH_COMBINING: u64 = 10;
/// A run that would leave less than one in this many parts of the memory is not said to fit.
const CLOSE: u64 = 20;
/// If growth until an error is at least one in this many parts of what was allocated, the growth is what fills the memory.
/// Other changes only delay the error.
const DOMINATES: u64 = 4;
/// The maximum number of changes that are combined.
const MAX_COMBINED: usize = 3;
/// The number of changes to which others are added.
const MAX_STARTS: usize = 2;
/// The maximum number of threads for replays.
const MAX_THREADS: usize = 4;
/// The maximum number of groups of modules that an action names.
const MAX_GROUPS: usize = 6;

/// What suggestions are made from.
pub(crate) struct SuggestionQuery<'a> {
    pub process: &'a Process,
    pub analysis: &'a Analysis,
    pub device: &'a DeviceAnalysis,
    pub lifetimes: &'a BlockLifetimes,
    /// What the step that the explained error interrupted would still have requested.
    pub rest: Option<&'a RestOfStep>,
    pub table: &'a StackTable,
    pub names: &'a Names,
    pub locations: &'a Locations<'a>,
}

/// What would lower the peak, or the allocated bytes at the error to explain, lowest new peak first. Only changes whose
/// replay lowers it. `progress` receives the number of replays done, and their total.
pub(crate) fn suggestions(query: &SuggestionQuery<'_>, progress: &mut dyn FnMut(u64, u64)) -> Vec<SuggestionSummary> {
    let device = query.device;
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
    let (state, phase) = oom.map_or((&device.peak, device.peak.phase), |oom| (&oom.in_use, oom.phase));
    let at_error = state.usage.allocated + failed.map_or(0, |failed| failed.requested);
    let settings = allocator_settings(query.process);
    if at_error == 0 || !settings.native {
        return Vec::new();
    }
    let definitions = query.process.definitions();
    let recorded = Recorded::new(query.lifetimes, definitions, query.table, settings, failed, query.rest);
    let limit = allocator_limit(query.process, device, query.analysis);
    let is_continued = recorded.is_continued();
    let scope = match query.rest.map(|rest| rest.taken_from) {
        _ if failed.is_some() && !is_continued => SuggestionScope::UntilError,
        Some(EarlierIteration::InSameStep) => SuggestionScope::Iteration,
        _ => SuggestionScope::Run,
    };
    let peak = match query.rest {
        Some(rest) if is_continued => rest.peak.max(device.peak.usage.allocated),
        None if is_continued => recorded.highest_sum(),
        _ => at_error,
    };
    let changes = Changes::new(recorded, peak, limit.unwrap_or(u64::MAX), peaks_by_phase(device));
    if !changes.is_sound() {
        return Vec::new();
    }
    let has_backward = device.table.total().phases[Phase::Backward as usize].allocations > 0;
    let phase = if is_continued { changes.peak_phase().unwrap_or(phase) } else { phase };
    let trains = will_train(query.process, oom.map_or(StackId::NONE, |oom| oom.requested_at.0));
    let texts = Texts { query, changes: &changes, has_backward, trains, phase };
    let is_filled =
        oom.is_some() && query.device.diagnostics.grown_bytes(query.table).saturating_mul(DOMINATES) >= at_error;
    let addresses_growth = |plan: &Plan| plan.results_on_cpu || plan.no_grad;
    let may_help = |plan: &Plan| texts.applies(plan) && (!is_filled || addresses_growth(plan));
    let plans: Vec<Plan> = changes.plans().into_iter().filter(may_help).collect();
    let outcomes = replay_all(&changes, &plans, progress);
    let is_worth = |outcome: &Outcome| peak.saturating_sub(outcome.peak) >= (peak / WORTH_DOING).max(1);
    let replayed = plans.into_iter().zip(outcomes).filter_map(|(plan, outcome)| Some((plan, outcome?)));
    let mut found: Vec<(Plan, Outcome)> = replayed.filter(|(_, outcome)| is_worth(outcome)).collect();
    // Adapters train something else than the program does, so they come last.
    found.sort_by_key(|(plan, outcome)| (plan.freeze, outcome.peak));
    let combined = combine(&changes, &found);
    let evidence = figures_text(state);
    let fits = |outcome: &Outcome| match (scope, outcome.fits) {
        (_, false) => Some(false),
        // Where little is left, what the allocator cannot use of its segments decides, and the replay is not that exact.
        (SuggestionScope::Run, true) => limit.filter(|limit| outcome.reserved <= limit - limit / CLOSE).map(|_| true),
        // What follows an iteration is known if the program only repeats it.
        (SuggestionScope::Iteration, true) => (!has_backward).then_some(true),
        (SuggestionScope::UntilError, true) => None,
    };
    let summary = |(plan, outcome): &(Plan, Outcome)| {
        let rules = texts.rules(plan);
        let first = rules.first()?;
        let join = |of: &dyn Fn(&SuggestionRule) -> String, with: &str| {
            let parts: Vec<String> = rules.iter().map(|rule| of(rule)).collect();
            parts.join(with)
        };
        Some(SuggestionSummary {
            rule: if rules.len() > 1 { RuleId::CombinedChanges } else { first.id },
            action: join(&|rule| texts.action(rule, plan), " + "),
            combines: if rules.len() > 1 { rules.iter().map(|rule| rule.id).collect() } else { Vec::new() },
            peak_after_bytes: outcome.peak,
            reserved_after_bytes: outcome.reserved,
            saves_bytes: peak.saturating_sub(outcome.peak),
            fits: fits(outcome),
            scope,
            at_most: rules.iter().any(|rule| rule.at_most),
            evidence: format!("{} {evidence}", join(&|rule| rule.condition.to_owned(), " ")),
            method: join(&|rule| rule.method.to_owned(), " "),
        })
    };
    combined.iter().chain(&found).filter_map(summary).collect()
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

/// Replays all plans, on several threads.
fn replay_all(changes: &Changes<'_>, plans: &[Plan], progress: &mut dyn FnMut(u64, u64)) -> Vec<Option<Outcome>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(plans.len());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((index, plan)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, plans.get(i)?)))
        {
            done.push((index, changes.outcome(plan)));
        }
        done
    };
    let mut outcomes = vec![None; plans.len()];
    progress(0, plans.len() as u64);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = work();
        for other in others {
            // A thread ends early only by a panic, which this one takes over.
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        for (index, outcome) in all {
            outcomes[index] = outcome;
        }
    });
    progress(plans.len() as u64, plans.len() as u64);
    outcomes
}

/// The changes that lower the peak most together, if together they lower it clearly more than the best one alone. Changes
/// are added to each of the best ones, because the best one can exclude others.
fn combine(changes: &Changes<'_>, found: &[(Plan, Outcome)]) -> Option<(Plan, Outcome)> {
    let (_, outcome) = found.first()?;
    let best = found.iter().take(MAX_STARTS).map(|(alone, _)| {
        let mut plan = alone.clone();
        let mut best = changes.summed_peak(&plan);
        for _ in 1..MAX_COMBINED {
            let more = found.iter().filter_map(|(other, _)| plan.with(other));
            let replayed = more.map(|more| (changes.summed_peak(&more), more));
            let Some((peak, more)) = replayed.min_by_key(|(peak, _)| *peak) else { break };
            if peak + best / WORTH_COMBINING > best {
                break;
            }
            (plan, best) = (more, peak);
        }
        (best, plan)
    });
    let (_, plan) = best.min_by_key(|(peak, _)| *peak)?;
    let is_alone = found.iter().any(|(alone, _)| *alone == plan);
    let together = (!is_alone).then(|| changes.outcome(&plan)).flatten()?;
    (together.peak < outcome.peak).then_some((plan, together))
}

/// The highest peak of each phase over the whole run.
fn peaks_by_phase(device: &DeviceAnalysis) -> [u64; Phase::ALL.len()] {
    let (later, _) = device.table.later();
    let parts: Vec<&StepRows> =
        [Some(device.table.before()), device.table.first(), Some(later)].into_iter().flatten().collect();
    Phase::ALL.map(|phase| parts.iter().map(|rows| rows.phases[phase as usize].peak).max().unwrap_or(0))
}

/// The texts of plans.
struct Texts<'a> {
    query: &'a SuggestionQuery<'a>,
    changes: &'a Changes<'a>,
    has_backward: bool,
    /// Whether a forward pass without a backward pass belongs to a training.
    trains: bool,
    phase: Phase,
}

impl Texts<'_> {
    /// Whether the condition of a plan's rule holds, beside what the replay shows.
    fn applies(&self, plan: &Plan) -> bool {
        match plan.batch {
            _ if plan.load_on_cpu || plan.build_on_meta || plan.convert_first => self.phase == Phase::Load,
            Some(BatchChange::Evaluation) => {
                self.changes.ends_in_evaluation() || self.phase.is_forward_only() && self.has_backward
            }
            Some(BatchChange::Half) => {
                self.has_backward || self.phase == Phase::Forward || self.phase.is_forward_only()
            }
            _ => true,
        }
    }

    fn rules(&self, plan: &Plan) -> Vec<&'static SuggestionRule> {
        let mut ids = Vec::new();
        let mut add = |holds: bool, id: RuleId| {
            if holds {
                ids.push(id);
            }
        };
        add(plan.attention, RuleId::ScaledDotProductAttention);
        add(plan.chunked_loss, RuleId::ChunkedCrossEntropy);
        add(plan.no_grad, RuleId::NoGrad);
        add(plan.results_on_cpu, RuleId::ResultsToCpu);
        add(plan.no_cache, RuleId::NoKvCache);
        add(plan.load_on_cpu, RuleId::LoadToCpu);
        add(plan.build_on_meta, RuleId::BuildOnMeta);
        add(plan.convert_first, RuleId::FinalDataType);
        let checkpoint = if self.has_backward { RuleId::CheckpointLayers } else { RuleId::CheckpointOrNoGrad };
        add(!plan.checkpoint.is_empty(), checkpoint);
        add(plan.offload, RuleId::OffloadActivations);
        match plan.batch {
            Some(BatchChange::Accumulated) => add(true, RuleId::SmallerBatches),
            Some(BatchChange::MoreMicroBatches(_)) => add(true, RuleId::MoreMicroBatches),
            Some(BatchChange::Half) => add(true, RuleId::HalfTheBatch),
            Some(BatchChange::Evaluation) => add(true, RuleId::SmallerEvaluationBatch),
            None => {}
        }
        add(plan.clear_gradients, RuleId::SetToNone);
        add(plan.bucket_views, RuleId::GradientsInBuckets);
        match plan.optimizer {
            Some(OptimizerChange::Fused) => add(true, RuleId::FusedStep),
            Some(OptimizerChange::OneByOne) => add(true, RuleId::SingleTensorStep),
            Some(OptimizerChange::EightBit) => add(true, RuleId::EightBitMoments),
            Some(OptimizerChange::InBackward) => add(true, RuleId::OptimizerInBackward),
            None => {}
        }
        add(plan.bfloat16, RuleId::Bfloat16Model);
        add(plan.autocast, RuleId::Autocast);
        add(plan.freeze, RuleId::Adapters);
        ids.into_iter().filter_map(suggestion_rule).collect()
    }

    fn action(&self, rule: &SuggestionRule, plan: &Plan) -> String {
        // The innermost line outside PyTorch: a model's code can be in a library.
        let place = |stack: Option<StackId>| {
            let frames = self.query.process.definitions().walk(stack.unwrap_or_default());
            let mut frames = frames.filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
            let outside = frames.find(|frame| !frame.filename.contains("/torch/"));
            outside.map_or_else(
                || "an unknown line".to_owned(),
                |frame| format!("{}:{}", self.query.locations.short(&frame.filename), frame.line),
            )
        };
        let mut action = rule.action.to_owned();
        if rule.id == RuleId::CheckpointOrNoGrad && self.trains {
            action = suggestion_rule(RuleId::CheckpointLayers).map_or(action, |rule| rule.action.to_owned());
        }
        if action.contains("{layers}") {
            action = action.replace("{layers}", &self.modules(&self.changes.checkpointed(&plan.checkpoint)));
        }
        if action.contains("{place}") {
            let stack = match rule.id {
                RuleId::ChunkedCrossEntropy => self.changes.loss(),
                RuleId::ResultsToCpu => self.changes.results(),
                RuleId::LoadToCpu => self.changes.load(),
                RuleId::BuildOnMeta => self.changes.replacement(),
                RuleId::FinalDataType => self.changes.conversion(),
                _ => self.changes.softmax(),
            };
            action = action.replace("{place}", &place(stack));
        }
        if let Some(BatchChange::MoreMicroBatches(count)) = plan.batch {
            let (count, twice) = (count.to_string(), (2 * u32::from(count)).to_string());
            action = action.replace("{count}", &count).replace("{twice}", &twice);
        }
        let evaluation = match self.phase {
            Phase::Generate => "generation",
            Phase::Rollout => "rollouts",
            _ => "evaluations",
        };
        let action = action.replace("{evaluation}", evaluation);
        action.replace("{optimizer}", self.changes.optimizer_name().as_deref().unwrap_or("the optimizer"))
    }

    /// The modules of these calls: `layers.* (12 of Block)`, `layer1.* (3 of Block), layer2.* (4 of Block)`,
    /// `encoder (Tower), decoder (Tower)`.
    fn modules(&self, calls: &[ContextId]) -> String {
        let definitions = self.query.process.definitions();
        // By class and parent's path: the paths.
        let mut groups: BTreeMap<(&str, String), BTreeSet<String>> = BTreeMap::new();
        for call in calls {
            let class = definitions.nn_calls.get(call).map_or("", |call| &*call.class);
            let path = self.query.names.module_path(*call, self.query.device.peak.seq).unwrap_or_default();
            let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
            let parent = parent.to_owned();
            groups.entry((class, parent)).or_default().insert(path);
        }
        let texts: Vec<String> = groups
            .iter()
            .flat_map(|((class, parent), paths)| match parent.is_empty() {
                false => vec![format!("{parent}.* ({} of {class})", paths.len())],
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
