//! Leaks: what grows from turn to turn of the program's loop.
//!
//! Graphs that grow are an issue of their own (`graphs`). They are found here, because only together do the sources
//! that grow show which of them belong to a graph, which are the inputs of one, and which leak.

mod causes;
mod sampler;

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MAX_LINES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::graphs::GRAPH_KEPT;
use super::issue::{Issue, LONGEST_FORECAST, OomForecast};
use super::rule::{DiagnosticRule, KeptBy};
use super::turns::LoopTurn;
use crate::passes::category::Category;
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, LifetimeEnded, OutOfMemory, Pass, RecordingStart};
use crate::passes::serving_growth::ServedGrowth;
use crate::passes::stacks::StackTable;
use crate::rules::{Meaning, RuleId};
use crate::units::{count_text, number_text, size_text};
use causes::{GraphsOfGradients, OR_STORED_ON_CONTEXT, WITHOUT_GRAPH};
use sampler::{GrowingSource, GrowthSampler};

pub(super) use causes::is_in_function;
pub(super) use sampler::GrowthKind;

/// The allocated bytes of one stack grow from step to step.
pub(super) static LEAK: DiagnosticRule = DiagnosticRule {
    id: RuleId::Leak,
    meaning: "The memory that one line of the program allocates grows from step to step, up to the end of the run.",
    evidence: "The allocated bytes of one stack are sampled at the start of each step, or of each request if the \
               program only calls a model. They increase in at least four samples, up to the end of the run, without \
               leveling out, and the program frees at most a quarter of the growth in between. Either the blocks \
               become more, or each block replaces a smaller one while the batch does not grow. The garbage collector \
               frees at most half of the growth. Growth in nearly every step counts from 512 KiB and 16 KiB per step \
               on. Optimizer state after the first counts if it exceeds the parameters or grows with them. Within one \
               step, the rule looks at calls of the model without gradients up to an out-of-memory error. If a server \
               counts its requests, the rule compares the lowest bytes of each stack in successive periods. They must \
               grow by 512 KiB or more and never shrink. At least a quarter of the growth must lie in the second half, \
               and a quarter of that in the last quarter of the periods.",
    limits: "The rule knows the object that holds the blocks only with `memtrace --holders`. A buffer that is not full \
             when the run ends looks like a leak. A request begins with a call of the model whose input is larger than \
             that of the call before. The forecast assumes that the rest of the program needs as much memory and time \
             as before.",
    code: &[
        "losses.append(loss.item())              # a number, not a tensor",
        "results.append(output.detach().cpu())   # a copy on the CPU",
        "history = collections.deque(maxlen=100) # a bound",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    kept_by: KeptBy::Objects,
};

/// The same for blocks that C++ keeps alive, where `memtrace --holders` sees nothing.
pub(super) static LEAK_IN_CPP: DiagnosticRule = DiagnosticRule { kept_by: KeptBy::Nothing, ..LEAK };

/// The minimum size of a leak that grows in nearly every turn of the loop: these bytes in all, these per turn, and as
/// many turns. A scalar per step (512 bytes) is no leak.
const STEADY_LEAK: (u64, u64, u32) = (512 << 10, 16 << 10, 8);
/// The fix for a tensor that is replaced by a larger one. Stacks have no frame of the operator that makes it.
pub(super) const BOUND_TENSOR: &str = "a tensor that takes in all earlier data has no bound: keep a window, write into \
     a preallocated tensor, or move old data to the CPU";
/// The fix for optimizer state that something keeps after its optimizer was replaced.
const EARLIER_OPTIMIZERS: &str = "a new optimizer allocates its state again, and something keeps the earlier ones (a \
     list, a scheduler, a closure): drop them, or keep one optimizer";
/// The fix for replaced parameters that an optimizer keeps, with their state.
const REPLACED_PARAMETERS: &str = "the optimizer keeps the parameters that the program has replaced, with their state: \
     remove their group from param_groups and their entries from state, or make a new optimizer";
/// The fix for graphs of forward passes that were left early.
const KEPT_EXCEPTION: &str = "these forward passes end inside the model: an exception that is kept \
     (errors.append(error)) keeps the frames of its traceback with their tensors: keep str(error) or \
     traceback.format_exc(); if the program keeps outputs instead, detach() them";
/// A graph through which backward passes ran usually has at least this many blocks in each step.
const MIN_GRAPH_BLOCKS: u64 = 3;

/// The blocks that grow on one device, from step to step or from request to request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growing {
    sampler: GrowthSampler,
    graphs_of_gradients: GraphsOfGradients,
}

impl Growing {
    /// The bytes that had grown until the end of the run, from turn to turn of the program's loop or from call to call
    /// within the last step.
    pub(super) fn grown_bytes(&self, table: &StackTable) -> u64 {
        let turns = self.sampler.grown();
        let to_the_end = turns.iter().filter(|g| g.reaches_end && !is_of_optimizer(g, table));
        let by_turns: u64 = to_the_end.map(|g| g.bytes).sum();
        let by_calls: u64 = self.sampler.grown_at_oom().iter().map(|g| g.bytes).sum();
        by_turns.max(by_calls)
    }

    /// The stacks whose allocated bytes grow from turn to turn of the program's loop.
    pub(super) fn growing_stacks(&self) -> HashSet<StackId> {
        self.sampler.grown().iter().map(|g| g.site.0).filter(|stack| !stack.is_none()).collect()
    }

    /// The memory that grew within a step, call by call, until it was full.
    fn grown_at_oom(&self, device: &DeviceFacts<'_>, shared: &SharedFacts) -> Option<Issue> {
        let ooms = &device.ooms;
        if !ooms.unwound_to_the_end() {
            return None;
        }
        let grown = self.sampler.grown_at_oom();
        let in_model = |g: &GrowingSource| !device.inputs.table.facts(g.site.0).outermost_compute.is_none();
        // Inside a model, a larger result can be a larger batch, or the cache of one generation. Graphs have rules of
        // their own.
        let batch_grows = grown.iter().any(|g| g.kind == GrowthKind::Sizes && in_model(g));
        let is_kept = |g: &&GrowingSource| g.bits & Mark::GRAPH == 0 && (g.kind == GrowthKind::Blocks || !batch_grows);
        let leaks = leaks_by_line(device, shared, grown.iter().filter(is_kept).copied().collect());
        let leaks = leaks.first().filter(|leaks| device.matters(sums(leaks).0))?;
        let (bytes, _, slope) = sums(leaks);
        let issue = leak(device, leaks, LoopTurn::ModelCall);
        Some(Issue {
            headline: format!(
                "{} more with each model call, {} with the request that failed",
                size_text(slope),
                size_text(bytes)
            ),
            fix: "the results of all calls stay on the device until the loop ends: move each to the CPU (.cpu()), or \
                  keep only what is needed"
                .to_owned(),
            saves: None,
            ..issue
        })
    }

    /// Adds the leak of gradients that have a graph, with all that grows with them. Returns the other leaks.
    fn gradients_with_graph(
        &self,
        device: &DeviceFacts<'_>,
        leaks: Vec<GrowingSource>,
        issues: &mut Vec<Issue>,
    ) -> Vec<GrowingSource> {
        let Some(call) = self.graphs_of_gradients.call(device.inputs.locations.definitions()) else { return leaks };
        let gradients: Vec<GrowingSource> =
            leaks.iter().filter(|g| is_list(g) && self.graphs_of_gradients.has(g)).copied().collect();
        let (kept, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            leaks.into_iter().partition(|g| is_list(g) && grows_with(g, &gradients));
        if matters(device, &kept) {
            issues.push(Issue {
                rule: &LEAK_IN_CPP,
                place: Some((call, ContextId::NONE)),
                fix: WITHOUT_GRAPH.to_owned(),
                ..leak(device, &kept, self.sampler.turn())
            });
        }
        others
    }

    /// When the memory would be full if each turn needs `growth` bytes more. `None` after an out-of-memory error, and
    /// if the device's memory is unknown.
    fn forecast(&self, device: &DeviceFacts<'_>, growth: u64) -> Option<OomForecast> {
        if device.ooms.count() > 0 || growth == 0 {
            return None;
        }
        let rate = self.sampler.rate()?;
        let growth = growth.max(rate.peak_slope);
        let free = device.capacity.limit?.checked_sub(rate.peak)?;
        let turns = free.checked_div(growth).filter(|turns| *turns <= LONGEST_FORECAST)?;
        Some(OomForecast { turn: self.sampler.turn(), turns, free, growth, ticks: turns.saturating_mul(rate.ticks) })
    }
}

impl Pass for Growing {
    fn started(start: &RecordingStart<'_>) -> Growing {
        Growing { sampler: GrowthSampler::new(start.is_inference), graphs_of_gradients: GraphsOfGradients::default() }
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        self.graphs_of_gradients.allocated(allocated);
        if !allocated.mark.is(Mark::WORKSPACE) {
            self.sampler.allocated(allocated.block, allocated.mark, allocated.usage.allocated);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if !freed.mark.is(Mark::WORKSPACE) {
            let by_program = !freed.is_truncated && !freed.e.stack.is_none() && !freed.facts.native_only;
            self.sampler.freed(freed.block, !by_program);
        }
    }

    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        let category = ended.classification.category;
        let is_kept = matches!(category, Category::KeptTensor | Category::Parameter);
        // The cache of a generation is freed with it, and what a module computes with the call.
        if is_kept && ended.freed.is_some_and(|freed| freed.may_be_teardown && !freed.mark.is(Mark::WORKSPACE)) {
            self.sampler.freed_with_its_owner(ended.block);
        }
    }

    fn out_of_memory(&mut self, error: &OutOfMemory<'_>) {
        if error.in_use.is_some() {
            self.sampler.out_of_memory(error.e.stack, error.e.size);
        }
    }
}

impl Diagnostic for Growing {
    const RULES: &'static [&'static DiagnosticRule] = &[&LEAK];

    fn issues(&self, device: &DeviceFacts<'_>, shared: &SharedFacts, issues: &mut Vec<Issue>) {
        if let Some(grown) = device.serving.and_then(|serving| serving.growth.grown()) {
            return of_requests(device, shared, grown, issues);
        }
        let mut grown = self.sampler.grown();
        grown.retain(|g| !is_collected(g, &shared.collected));
        // Optimizers bound their state themselves: the history of LBFGS, the state of parameters that are used later.
        let table = device.inputs.table;
        let mut states: Vec<GrowingSource> = grown.extract_if(.., |g| is_of_optimizer(g, table)).collect();
        states.retain(is_list);
        let mut growth: u64 = grown.iter().filter(|g| g.reaches_end).map(|g| g.slope).sum();
        let (graph, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            grown.iter().partition(|g| is_list(g) && g.bits & Mark::GRAPH != 0);
        let first = issues.len();
        let leaks: Vec<GrowingSource> = if is_graph_kept(device, shared, &graph) {
            // Tensors that grow together with a graph are inputs that the graph keeps.
            let (read, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
                others.into_iter().partition(|g| is_list(g) && grows_with(g, &graph));
            issues.push(graph_kept(device, shared, &graph, &read));
            // Blocks that grow in size beside graphs are computed from them.
            others.into_iter().filter(is_list).collect()
        } else {
            others.into_iter().chain(graph).collect()
        };
        let turn = self.sampler.turn();
        let leaks = self.gradients_with_graph(device, leaks, issues);
        let mut groups = leaks_by_line(device, shared, leaks);
        // The state of parameters that the program replaces belongs to their leak, else earlier optimizers are kept.
        let is_model = |group: &&mut Vec<GrowingSource>| group.iter().any(|g| g.bits & Mark::MODEL != 0);
        let mut of_models = groups.iter_mut().filter(is_model);
        let fix = match of_models.find(|group| states.iter().any(|g| grows_with(g, group))) {
            Some(group) => {
                group.append(&mut states);
                groups.sort_by_key(|group| std::cmp::Reverse(sums(group).0));
                REPLACED_PARAMETERS
            }
            None => {
                states.retain(|g| exceeds_parameters(device, g));
                groups.insert(0, states);
                EARLIER_OPTIMIZERS
            }
        };
        growth += groups
            .iter()
            .flatten()
            .filter(|g| g.reaches_end && is_of_optimizer(g, table))
            .map(|g| g.slope)
            .sum::<u64>();
        let of_group = |leaks: Vec<GrowingSource>| {
            let issue = leak(device, &leaks, turn);
            if !leaks.iter().any(|g| is_of_optimizer(g, table)) {
                return issue;
            }
            let of_model = leaks.iter().find(|g| g.bits & Mark::MODEL != 0);
            Issue { fix: fix.to_owned(), place: of_model.map(|g| g.site).or(issue.place), ..issue }
        };
        groups.retain(|leaks| matters(device, leaks));
        issues.extend(groups.into_iter().take(MAX_LINES).map(of_group));
        // One forecast for all that grows.
        if let Some(largest) = issues[first..].first_mut()
            && let Some(forecast) = self.forecast(device, growth)
        {
            largest.evidence.push(forecast.evidence());
            largest.forecast = Some(forecast);
        }
        if issues.len() == first {
            issues.extend(self.grown_at_oom(device, shared));
        }
    }
}

/// Whether an optimizer's source holds more blocks and more bytes than all parameters: a line allocates one state for
/// each parameter.
fn exceeds_parameters(device: &DeviceFacts<'_>, source: &GrowingSource) -> bool {
    let parameters = device.peak.by_category()[Category::Parameter as usize];
    let exceeds = |held: u64, parameters: u64| held > parameters + parameters / 4;
    exceeds(source.blocks, parameters.blocks) && exceeds(source.bytes, parameters.bytes)
}

/// Whether the source's blocks become more.
fn is_list(source: &GrowingSource) -> bool {
    source.kind == GrowthKind::Blocks
}

/// Whether an optimizer allocates the source's blocks.
fn is_of_optimizer(source: &GrowingSource, table: &StackTable) -> bool {
    let meaning = table.facts(source.site.0).rule.map(|rule| rule.meaning);
    matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState))
}

/// Whether the garbage collector freed most of the growth: a reference cycle held it, which is an issue of its own.
fn is_collected(source: &GrowingSource, collected: &HashMap<(StackId, ContextId), u64>) -> bool {
    // As the sampler identifies sources: by the stack, or else by the autograd node.
    let (stack, context) = source.site;
    let is_of = |of: &(StackId, ContextId)| if stack.is_none() { of.1 == context } else { of.0 == stack };
    let freed: u64 = collected.iter().filter(|(of, _)| is_of(of)).map(|(_, bytes)| bytes).sum();
    freed * 2 > source.bytes
}

/// In how many turns the blocks of the graph grow whose lines autograd ran, and whether these are most blocks: a
/// backward pass ran through them and left them.
fn left_by_backward(device: &DeviceFacts<'_>, shared: &SharedFacts, graph: &[GrowingSource]) -> (u64, bool) {
    let ran: Vec<&GrowingSource> = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).collect();
    let turns = ran.iter().map(|g| u64::from(g.turns)).max().unwrap_or(0);
    let consumed = shared.graphs.consumed_bytes / u64::from(device.table.steps().max(1));
    let is_most = ran.iter().map(|g| g.slope).sum::<u64>() >= consumed
        && shared.graphs.are_most(ran.iter().map(|g| g.blocks).sum(), turns);
    (turns, is_most)
}

/// Whether blocks of graphs that grow are graphs that the program keeps.
fn is_graph_kept(device: &DeviceFacts<'_>, shared: &SharedFacts, graph: &[GrowingSource]) -> bool {
    // A hook that stores one tensor of every layer allocates at one line, so one line alone is no evidence of a graph.
    let mut lines: Vec<_> = graph.iter().map(|g| device.inputs.locations.innermost(g.site.0)).collect();
    lines.sort_unstable();
    lines.dedup();
    // A backward pass that freed more than stayed did consume its graph. What stayed are results: outputs and hidden
    // states that the program has detached, or keeps without their graph.
    let (turns, is_most) = left_by_backward(device, shared, graph);
    // Forward passes that an exception left have no backward pass of their own.
    let last = graph.iter().max_by_key(|g| g.last_seq);
    let are_left = shared.graphs.left_calls >= turns && last.is_some_and(|l| is_left_early(device, shared, l));
    let is_whole = turns == 0 || is_most || are_left;
    // Graphs that were freed together are evidence as well.
    let is_evident = lines.len() >= 2 && is_whole || shared.graphs.were_freed_together;
    !graph.is_empty() && is_evident && device.matters(graph.iter().map(|g| g.bytes).sum())
}

/// Whether the source grows as one of the graph's does.
fn grows_with(source: &GrowingSource, graph: &[GrowingSource]) -> bool {
    graph.iter().any(|g| g.first_turn.abs_diff(source.first_turn) <= 1 && g.blocks.abs_diff(source.blocks) <= 2)
}

/// Whether leaks are worth an issue.
fn matters(device: &DeviceFacts<'_>, leaks: &[GrowingSource]) -> bool {
    let (bytes, _, slope) = sums(leaks);
    let (all, each, turns) = STEADY_LEAK;
    let is_steady = leaks.iter().any(|g| g.increases >= turns && g.increases * 10 >= g.samples * 9);
    device.matters(bytes) || device.ordinal >= 0 && is_steady && bytes >= all && slope >= each
}

/// The leaks of each line, the largest first. Lines that grow alike belong together: keys and values, for example.
fn leaks_by_line(device: &DeviceFacts<'_>, shared: &SharedFacts, leaks: Vec<GrowingSource>) -> Vec<Vec<GrowingSource>> {
    // One line can leak at several locations below it.
    let mut by_line: BTreeMap<String, Vec<GrowingSource>> = BTreeMap::new();
    for leak in leaks {
        by_line.entry(device.line(leak.site)).or_default().push(leak);
    }
    let mut groups: Vec<(_, Vec<GrowingSource>)> = Vec::new();
    for (_, leaks) in by_line {
        if leaks.iter().any(|g| shared.workspace_stacks.contains(&g.site.0)) {
            continue;
        }
        let rate = (leaks[0].kind, leaks[0].first_turn, leaks[0].increases, sums(&leaks).2);
        match groups.iter_mut().find(|group| group.0 == rate) {
            Some((_, group)) => group.extend(leaks),
            None => groups.push((rate, leaks)),
        }
    }
    // The order of the lines decides between equal groups.
    groups.sort_by_key(|(_, leaks)| std::cmp::Reverse(sums(leaks).0));
    groups.into_iter().map(|(_, leaks)| leaks).collect()
}

/// The growth of a server that answers requests side by side.
fn of_requests(
    device: &DeviceFacts<'_>,
    shared: &SharedFacts,
    (grown, ticks): (Vec<ServedGrowth>, u64),
    issues: &mut Vec<Issue>,
) {
    let of_source = |one: &ServedGrowth| GrowingSource {
        site: one.site,
        bits: 0,
        kind: if one.blocks > 0 { GrowthKind::Blocks } else { GrowthKind::Sizes },
        bytes: one.bytes,
        blocks: one.blocks.max(1),
        slope: one.slope,
        first_turn: 0,
        turns: u32::try_from(one.requests).unwrap_or(u32::MAX),
        increases: one.increases.0,
        samples: one.increases.1,
        last_seq: one.last_seq,
        reaches_end: true,
    };
    let sources: Vec<GrowingSource> = grown.iter().map(of_source).collect();
    let growth: u64 = sources.iter().map(|source| source.slope).sum();
    let first = issues.len();
    for leaks in leaks_by_line(device, shared, sources).into_iter().take(MAX_LINES) {
        let issue = leak(device, &leaks, LoopTurn::Request);
        let (blocks, largest) = (sums(&leaks).1, leaks[0]);
        let evidence = match largest.kind {
            GrowthKind::Blocks => format!("{} more stay allocated", number_text(blocks, "block")),
            GrowthKind::Sizes => "a block is replaced by larger ones".to_owned(),
        };
        let evidence = format!(
            "{evidence}; the lowest bytes grew in {} of {} successive periods, up to the end",
            largest.increases, largest.samples
        );
        issues.push(Issue {
            evidence: std::iter::once(evidence).chain(issue.evidence.into_iter().skip(1)).collect(),
            ..issue
        });
    }
    let free = device.capacity.limit.and_then(|limit| limit.checked_sub(device.peak_bytes()));
    if let Some((issue, free)) = issues[first..].first_mut().zip(free)
        && let Some(turns) = free.checked_div(growth).filter(|turns| *turns <= LONGEST_FORECAST)
        && device.ooms.count() == 0
    {
        let ticks = turns.saturating_mul(ticks);
        let forecast = OomForecast { turn: LoopTurn::Request, turns, free, growth, ticks };
        issue.evidence.push(forecast.evidence());
        issue.forecast = Some(forecast);
    }
}

/// The leak of these sources.
fn leak(device: &DeviceFacts<'_>, leaks: &[GrowingSource], turn: LoopTurn) -> Issue {
    let (bytes, blocks, slope) = sums(leaks);
    let turn = turn.name();
    let Some(largest) = leaks.iter().max_by_key(|g| (g.bytes, std::cmp::Reverse(g.site.0))) else {
        return device.issue(&LEAK, bytes);
    };
    let grew = format!("in {} of {} samples at {turn} starts", largest.increases, largest.samples);
    let on_average = if largest.increases * 3 <= largest.samples * 2 { " on average" } else { "" };
    let evidence = match largest.kind {
        GrowthKind::Blocks => format!(
            "{} blocks stay allocated, from {turn} {} on; their number grew {grew}",
            count_text(blocks),
            largest.first_turn
        ),
        GrowthKind::Sizes => format!(
            "each new block is larger than the block that it replaces ({} at a time), from {turn} {} on; they grew \
             {grew}",
            count_text(blocks),
            largest.first_turn
        ),
    };
    let is_in_function = is_in_function(device.inputs.locations.definitions(), largest.site.0);
    let mut evidence = vec![evidence];
    let named = device.line(largest.site);
    let lines = leaks.iter().map(|g| device.line(g.site));
    let mut others: Vec<String> = lines.filter(|line| *line != named).collect();
    others.sort_unstable();
    others.dedup();
    evidence.extend(others.iter().take(MAX_LINES).map(|line| format!("as much grows at {line}")));
    Issue {
        headline: format!(
            "{} more with each {turn}{on_average}, {} in {} {turn}s",
            size_text(slope),
            size_text(bytes),
            count_text(largest.turns.into())
        ),
        evidence,
        place: Some(largest.site),
        sites: leaks.iter().map(|g| g.site).collect(),
        fix: fix(largest.kind, turn, is_in_function),
        saves: Some(bytes).filter(|_| device.at_peak(largest.last_seq)),
        ..device.issue(&LEAK, bytes)
    }
}

/// The fix for a source that grows. `is_in_function` means that it is in the forward function of an
/// `autograd.Function`.
fn fix(kind: GrowthKind, turn: &str, is_in_function: bool) -> String {
    match kind {
        GrowthKind::Blocks => format!(
            "an object that outlives the {turn} (a list, a dict, an attribute) holds each block: store a number, a CPU \
             copy, or fewer tensors{}",
            if is_in_function { OR_STORED_ON_CONTEXT } else { "" }
        ),
        GrowthKind::Sizes => BOUND_TENSOR.to_owned(),
    }
}

/// The graphs that grow, and the inputs that they read.
fn graph_kept(
    device: &DeviceFacts<'_>,
    shared: &SharedFacts,
    graph: &[GrowingSource],
    read: &[GrowingSource],
) -> Issue {
    let (bytes, blocks, slope) = sums(graph);
    let first = graph.iter().map(|g| g.first_turn).min().unwrap_or(0);
    let last = graph.iter().max_by_key(|g| g.last_seq);
    let run = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).map(|g| g.bytes).sum::<u64>() * 2 > bytes;
    let backward = shared.graphs.backward;
    let mut evidence = vec![format!(
        "{} that forward passes saved for backward stay allocated, from step {first} on, of {} in the forward pass",
        number_text(blocks, "block"),
        number_text(graph.len() as u64, "call site")
    )];
    evidence.extend(last.map(|l| format!("last block of each step: {}", device.line(l.site))));
    if let Some(input) = read.iter().max_by_key(|g| g.bytes) {
        let (bytes, blocks, _) = sums(read);
        evidence.push(format!(
            "{} in {} grew with them, possibly as saved inputs: {}",
            size_text(bytes),
            number_text(blocks, "block"),
            device.line(input.site)
        ));
    }
    let turns = graph.iter().map(|g| u64::from(g.turns)).max().unwrap_or(0);
    let has_inputs = !read.is_empty();
    let (ran_turns, is_most) = left_by_backward(device, shared, graph);
    let is_retained = ran_turns > 0 && is_most;
    let (place, fix) = if !is_retained && last.is_some_and(|l| is_left_early(device, shared, l)) {
        evidence.push("no backward pass ran through them, unlike through others of the same call".to_owned());
        (last.map(|l| l.site), KEPT_EXCEPTION.to_owned())
    } else if run {
        // So few blocks of a step, without an input, can also be results that the program keeps without their graph.
        let may_be_results = blocks < MIN_GRAPH_BLOCKS * turns && !has_inputs;
        let (why, fix) = match may_be_results {
            true => (
                "a backward pass ran through them: retain_graph=True kept them, or the program keeps the results \
                 themselves",
                "detach() what one step passes to the next, and remove retain_graph=True; if the program keeps \
                 detached results, move them to the CPU",
            ),
            false => (
                "a backward pass ran through them and kept them: retain_graph=True (or create_graph=True)",
                "detach() what one step passes to the next, and remove retain_graph=True",
            ),
        };
        evidence.push(why.to_owned());
        ((!backward.is_none()).then_some((backward, ContextId::NONE)), fix.to_owned())
    } else {
        evidence.push("no backward pass ran through them".to_owned());
        (
            last.map(|l| l.site),
            "the stored tensor keeps its graph: store loss.item() or loss.detach(), or compute it under torch.no_grad()"
                .to_owned(),
        )
    };
    Issue {
        headline: format!(
            "the graphs of earlier iterations are kept: {} more with each step, {} at the end",
            size_text(slope),
            size_text(bytes)
        ),
        evidence,
        place,
        sites: graph.iter().chain(read).map(|g| g.site).collect(),
        fix,
        saves: last.filter(|l| device.at_peak(l.last_seq)).map(|_| bytes),
        ..device.issue(&GRAPH_KEPT, bytes)
    }
}

/// Whether graphs whose last block is of `last` end inside the model, where backward passes consume graphs of the same
/// call: the program left the forward pass early.
fn is_left_early(device: &DeviceFacts<'_>, shared: &SharedFacts, last: &GrowingSource) -> bool {
    let facts = device.inputs.table.facts(last.site.0);
    !facts.outermost_module.is_none() && shared.consumed_calls.contains(&facts.outermost_compute)
}

/// The sums of bytes, blocks and growth per turn.
fn sums(grown: &[GrowingSource]) -> (u64, u64, u64) {
    (grown.iter().map(|g| g.bytes).sum(), grown.iter().map(|g| g.blocks).sum(), grown.iter().map(|g| g.slope).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(stack: u32, context: u32, bytes: u64) -> GrowingSource {
        GrowingSource {
            site: (StackId(stack), ContextId(context)),
            bits: 0,
            kind: GrowthKind::Blocks,
            bytes,
            blocks: 20,
            slope: 1,
            first_turn: 0,
            turns: 20,
            increases: 20,
            samples: 20,
            last_seq: 0,
            reaches_end: true,
        }
    }

    #[test]
    fn growth_that_the_garbage_collector_freed_is_no_leak() {
        let collected = HashMap::from([((StackId(1), ContextId(2)), 300), ((StackId(1), ContextId(3)), 300)]);
        assert!(is_collected(&source(1, 9, 1000), &collected));
        assert!(!is_collected(&source(1, 9, 1200), &collected), "most of it stays allocated");
        assert!(!is_collected(&source(4, 2, 100), &collected), "another stack");
        assert!(is_collected(&source(StackId::NONE.0, 2, 500), &collected), "by an autograd node");
    }

    #[test]
    fn the_context_of_a_function_is_one_of_two_possible_causes() {
        let text = fix(GrowthKind::Blocks, "step", true);
        assert!(text.starts_with("an object that outlives the step (a list"), "{text}");
        assert!(text.contains("; or the autograd.Function stores its result on ctx"), "{text}");
        assert!(!fix(GrowthKind::Blocks, "step", false).contains("ctx"));
        assert!(!fix(GrowthKind::Sizes, "step", false).contains("torch.cat"));
    }
}
