//! Turns signals into issues: decides which of them amount to an issue, and describes these with figures and locations.

use std::collections::BTreeMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::{ContextId, StackId};

use crate::explain::state_needed;
use crate::window_leaks::{Described, WindowLeaks};
use memtrace_input::EventSource;
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::diagnostics::{
    EvaluationSign, GraphIssue, GrowingSource, GrowthKind, LoopTurn, Mark, UnconsumedGraph,
};
use memtrace_insight::passes::{Analysis, Category, DeviceAnalysis, Issue, OomForecast, Phase, StackTable};
use memtrace_insight::rules::{Meaning, diagnostics as rules};
use memtrace_insight::units::{count_text, number_text, share_text, size_text};
use memtrace_replay::{Names, ReferenceCycle};

/// The minimum size of an issue: this many bytes, and one in this many parts of the peak.
const MIN_BYTES: u64 = 1 << 20;
const MIN_SHARE: u64 = 50;
/// The minimum fragmentation to report, in bytes. Less is no fault of the program.
const MIN_FRAGMENTATION: u64 = 16 << 20;
/// The minimum fragmentation to report, as a share of the reserved memory: a quarter.
const MIN_FRAGMENTATION_OF_RESERVED: u64 = 4;
/// The minimum fragmentation to report where no request failed, as a share of the memory that PyTorch can have: 1 %. With
/// less, no larger model or batch fits if it is avoided.
const MIN_FRAGMENTATION_OF_DEVICE: u64 = 100;
/// The minimum size of a leak that grows in nearly every turn of the loop: these bytes in all, these per turn, and as
/// many turns. A scalar per step (512 bytes) is no leak.
const STEADY_LEAK: (u64, u64, u32) = (512 << 10, 16 << 10, 8);
/// A forecast of more turns than this is of no use.
const LONGEST_FORECAST: u64 = 100_000_000;
/// A graph through which backward passes ran usually has at least this many blocks in each step.
const MIN_GRAPH_BLOCKS: u64 = 3;
/// The maximum number of lines listed for one issue.
const LOCATIONS: usize = 3;

/// The inputs for describing signals.
pub(crate) struct IssueBuilder<'a> {
    pub(crate) locations: &'a Locations<'a>,
    pub(crate) table: &'a StackTable,
    pub(crate) ns_per_tick: f64,
    /// The memory that the caching allocator can have on a device, in bytes; `None` if it is unknown.
    pub(crate) memory_limit: &'a dyn Fn(&DeviceAnalysis) -> Option<u64>,
    /// Computes the tensor names. Called only if an issue needs them.
    pub(crate) names: &'a dyn Fn() -> Names,
    /// Computes the reference cycles that `memtrace --cycles` recorded. Called only if an issue needs them.
    pub(crate) cycles: &'a dyn Fn() -> Vec<ReferenceCycle>,
}

impl IssueBuilder<'_> {
    /// All issues about a process.
    pub(crate) fn issues(&self, analysis: &Analysis) -> Vec<Issue> {
        let mut issues = Vec::new();
        for device in &analysis.devices {
            let at = DeviceIssues { builder: self, analysis: device };
            let graphs = at.growing(&mut issues);
            at.graphs(graphs, &mut issues);
            issues.extend(at.gradients());
            issues.extend(at.garbage());
            issues.extend(at.checkpoint());
            issues.extend(at.wrong_device(analysis));
            issues.extend(at.fragmentation());
            issues.extend(at.buckets());
            issues.extend(at.workspaces());
            issues.extend(at.optimizer_state());
            issues.extend(at.deferred());
            issues.extend(at.outputs());
            at.growing_without_steps(&mut issues);
        }
        issues
    }

    fn line(&self, stack: StackId, context: ContextId) -> String {
        let location = self.locations.stack(stack, context).location;
        if location.is_empty() { "an unknown location".to_owned() } else { location }
    }
}

struct DeviceIssues<'a> {
    builder: &'a IssueBuilder<'a>,
    analysis: &'a DeviceAnalysis,
}

impl DeviceIssues<'_> {
    fn peak(&self) -> u64 {
        self.analysis.peak.usage.allocated
    }

    /// Whether this many bytes are worth an issue.
    fn matters(&self, bytes: u64) -> bool {
        bytes >= MIN_BYTES && bytes.saturating_mul(MIN_SHARE) >= self.peak()
    }

    /// Whether the peak is at or after the event with `seq` `from`, so that a block allocated there and kept counts for
    /// it.
    fn at_peak(&self, from: u64) -> bool {
        self.analysis.peak.seq >= from
    }

    fn issue(&self, rule: &'static memtrace_insight::rules::DiagnosticRule, bytes: u64) -> Issue {
        Issue {
            rule,
            device: self.analysis.device,
            bytes,
            headline: String::new(),
            evidence: Vec::new(),
            place: None,
            sites: Vec::new(),
            fix: String::new(),
            saves: None,
            forecast: None,
            files: Vec::new(),
        }
    }

    /// Adds leaks and growing graphs. Returns whether growing graphs are among them.
    fn growing(&self, issues: &mut Vec<Issue>) -> bool {
        let signals = &self.analysis.signals;
        let by_optimizer = |g: &GrowingSource| {
            let meaning = self.builder.table.facts(g.stack).rule.map(|rule| rule.meaning);
            matches!(meaning, Some(Meaning::OptimizerStep | Meaning::OptimizerState))
        };
        let mut grown = signals.growing.grown();
        // Optimizers bound their state themselves: the history of LBFGS, the state of parameters that are used later.
        grown.retain(|g| !by_optimizer(g));
        let growth: u64 = grown.iter().filter(|g| g.reaches_end).map(|g| g.slope).sum();
        let is_list = |g: &&GrowingSource| g.kind == GrowthKind::Blocks;
        let (graph, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            grown.iter().partition(|g| is_list(g) && g.bits & Mark::GRAPH != 0);
        // A hook that stores one tensor of every layer allocates at one line, so one line alone is no evidence of a
        // graph.
        let mut lines: Vec<_> = graph.iter().map(|g| self.builder.locations.innermost(g.stack)).collect();
        lines.sort_unstable();
        lines.dedup();
        // A backward pass that freed more than stayed did consume its graph. What stayed are results: outputs and hidden
        // states that the program has detached, or keeps without their graph.
        let run: u64 = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).map(|g| g.slope).sum();
        let consumed = signals.graphs.total_consumed / u64::from(self.analysis.table.steps().max(1));
        let bytes = graph.iter().map(|g| g.bytes).sum();
        let ran = || graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0);
        let blocks_run = ran().map(|g| g.blocks).sum();
        let turns = ran().map(|g| u64::from(g.turns)).max().unwrap_or(0);
        let whole = turns == 0 || run >= consumed && signals.graphs.are_most(blocks_run, turns);
        // Graphs that were freed together are evidence as well.
        let was_freed_together = signals.graphs.found().iter().any(|(kind, _)| *kind == GraphIssue::Kept);
        let kept = !graph.is_empty() && (lines.len() >= 2 && whole || was_freed_together) && self.matters(bytes);
        // Tensors that grow together with a graph are inputs that the graph keeps.
        let with = |g: &GrowingSource| {
            graph.iter().any(|of| of.first_turn.abs_diff(g.first_turn) <= 1 && of.blocks.abs_diff(g.blocks) <= 2)
        };
        let (read, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            others.into_iter().partition(|g| kept && is_list(&g) && with(g));
        let first = issues.len();
        if kept {
            issues.push(self.graph_grows(&graph, &read));
        }
        // What grows in size beside graphs is computed from them.
        let leaks: Vec<GrowingSource> = match kept {
            true => others.into_iter().filter(|g| is_list(&g)).collect(),
            false => others.into_iter().chain(graph).collect(),
        };
        let matters = |leaks: &[GrowingSource]| {
            let (bytes, _, slope) = sums(leaks);
            let (all, each, turns) = STEADY_LEAK;
            let is_steady = leaks.iter().any(|g| g.increases >= turns && g.increases * 10 >= g.samples * 9);
            self.matters(bytes) || self.analysis.device >= 0 && is_steady && bytes >= all && slope >= each
        };
        let groups = self.leaks_by_line(leaks).into_iter().take(LOCATIONS).filter(|leaks| matters(leaks));
        issues.extend(groups.map(|leaks| self.leak(&leaks, signals.growing.turn())));
        // One forecast for all that grows.
        if let Some(largest) = issues[first..].first_mut()
            && let Some(forecast) = self.forecast(growth)
        {
            largest.evidence.push(forecast_evidence(&forecast));
            largest.forecast = Some(forecast);
        }
        if issues.len() == first {
            issues.extend(self.grown_at_oom());
        }
        kept
    }

    /// Adds leaks of a program without steps, and of what follows the last step. What another issue names is no further one.
    fn growing_without_steps(&self, issues: &mut Vec<Issue>) {
        let named: Vec<_> = issues.iter().filter(|issue| issue.device == self.analysis.device).collect();
        let is_named = |stack: StackId| named.iter().any(|issue| issue.sites.iter().any(|(site, _)| *site == stack));
        let leaks = WindowLeaks::of(&self.analysis.signals.windows, self.builder.locations, &is_named);
        let first = issues.len();
        for Described { bytes, headline, evidence, fix, sites, last_seq } in leaks.described(LOCATIONS) {
            if self.matters(bytes) {
                issues.push(Issue {
                    headline,
                    evidence,
                    place: sites.first().copied(),
                    sites,
                    fix,
                    saves: Some(bytes).filter(|_| self.at_peak(last_seq)),
                    ..self.issue(&rules::LEAK, bytes)
                });
            }
        }
        // One forecast for all that grows.
        if let Some(largest) = issues[first..].first_mut()
            && self.analysis.ooms.count() == 0
            && let Some(limit) = (self.builder.memory_limit)(self.analysis)
            && let Some(forecast) = leaks.forecast(limit, LONGEST_FORECAST)
        {
            largest.evidence.push(forecast_evidence(&forecast));
            largest.forecast = Some(forecast);
        }
    }

    /// The leaks of each line, the largest first. Lines that grow alike belong together: keys and values, for example.
    fn leaks_by_line(&self, leaks: Vec<GrowingSource>) -> Vec<Vec<GrowingSource>> {
        let workspaces = &self.analysis.signals.workspaces;
        let many_workspaces = self.many_workspaces();
        // One line can leak at several locations below it.
        let mut by_line: BTreeMap<String, Vec<GrowingSource>> = BTreeMap::new();
        for leak in leaks {
            by_line.entry(self.builder.line(leak.stack, leak.context)).or_default().push(leak);
        }
        let rate = |leaks: &[GrowingSource]| (leaks[0].kind, leaks[0].first_turn, leaks[0].increases, sums(leaks).2);
        let mut groups: Vec<(_, Vec<GrowingSource>)> = Vec::new();
        for (_, leaks) in by_line {
            if many_workspaces && leaks.iter().any(|g| workspaces.stacks.contains(&g.stack)) {
                continue;
            }
            let rate = rate(&leaks);
            match groups.iter_mut().find(|group| group.0 == rate) {
                Some((_, group)) => group.extend(leaks),
                None => groups.push((rate, leaks)),
            }
        }
        // The order of the lines decides between equal groups.
        groups.sort_by_key(|(_, leaks)| std::cmp::Reverse(sums(leaks).0));
        groups.into_iter().map(|(_, leaks)| leaks).collect()
    }

    fn leak(&self, leaks: &[GrowingSource], turn: LoopTurn) -> Issue {
        let (bytes, blocks, slope) = sums(leaks);
        let turn = turn.name();
        let Some(largest) = leaks.iter().max_by_key(|g| (g.bytes, std::cmp::Reverse(g.stack))) else {
            return self.issue(&rules::LEAK, bytes);
        };
        let grew = format!("in {} of {} samples at {turn} starts", largest.increases, largest.samples);
        let (evidence, fix) = match largest.kind {
            GrowthKind::Blocks => (
                format!(
                    "{} blocks stay allocated, from {turn} {} on; their number grew {grew}",
                    count_text(blocks),
                    largest.first_turn
                ),
                format!(
                    "an object that outlives the {turn} (a list, a dict, an attribute) holds each block: store a number, a CPU copy, or \
                     fewer tensors"
                ),
            ),
            GrowthKind::Sizes => (
                format!(
                    "each new block is larger than the block that it replaces ({} at a time), from {turn} {} on; they grew {grew}",
                    count_text(blocks),
                    largest.first_turn
                ),
                "torch.cat with all earlier data has no bound: keep a window, write into a preallocated tensor, or move old data to the CPU"
                    .to_owned(),
            ),
        };
        let mut evidence = vec![evidence];
        let line = |g: &GrowingSource| self.builder.line(g.stack, g.context);
        let mut others: Vec<String> = leaks.iter().map(line).filter(|one| *one != line(largest)).collect();
        others.sort_unstable();
        others.dedup();
        evidence.extend(others.iter().take(LOCATIONS).map(|line| format!("as much grows at {line}")));
        Issue {
            headline: format!(
                "{} more with each {turn}, {} in {} {turn}s",
                size_text(slope),
                size_text(bytes),
                count_text(largest.turns.into())
            ),
            evidence,
            place: Some((largest.stack, largest.context)),
            sites: leaks.iter().map(|g| (g.stack, g.context)).collect(),
            fix,
            saves: Some(bytes).filter(|_| self.at_peak(largest.last_seq)),
            ..self.issue(&rules::LEAK, bytes)
        }
    }

    /// The memory that grew within a step, call by call, until it was full.
    fn grown_at_oom(&self) -> Option<Issue> {
        let ooms = &self.analysis.ooms;
        if !ooms.unwound_to_the_end() {
            return None;
        }
        let grown = self.analysis.signals.growing.grown_at_oom();
        let in_model = |g: &GrowingSource| !self.builder.table.facts(g.stack).outermost_compute.is_none();
        // Inside a model, a larger result can be a larger batch, or the cache of one generation. Graphs have rules of
        // their own.
        let batch_grows = grown.iter().any(|g| g.kind == GrowthKind::Sizes && in_model(g));
        let is_kept = |g: &&GrowingSource| g.bits & Mark::GRAPH == 0 && (g.kind == GrowthKind::Blocks || !batch_grows);
        let leaks = self.leaks_by_line(grown.iter().filter(is_kept).copied().collect());
        let leaks = leaks.first().filter(|leaks| self.matters(sums(leaks).0))?;
        let (bytes, _, slope) = sums(leaks);
        let issue = self.leak(leaks, LoopTurn::ModelCall);
        Some(Issue {
            headline: format!(
                "{} more with each model call, {} with the request that failed",
                size_text(slope),
                size_text(bytes)
            ),
            fix: "the results of all calls stay on the device until the loop ends: move each to the CPU (.cpu()), or keep only what is needed"
                .to_owned(),
            saves: None,
            ..issue
        })
    }

    /// When the memory would be full if each turn needs `growth` bytes more. `None` after an out-of-memory error, and if
    /// the device's memory is unknown.
    fn forecast(&self, growth: u64) -> Option<OomForecast> {
        if self.analysis.ooms.count() > 0 || growth == 0 {
            return None;
        }
        let growing = &self.analysis.signals.growing;
        let rate = growing.rate()?;
        let growth = growth.max(rate.peak_slope);
        let free = (self.builder.memory_limit)(self.analysis)?.checked_sub(rate.peak)?;
        let turns = free.checked_div(growth).filter(|turns| *turns <= LONGEST_FORECAST)?;
        Some(OomForecast { turn: growing.turn(), turns, free, growth, ticks: turns.saturating_mul(rate.ticks) })
    }

    fn graph_grows(&self, graph: &[GrowingSource], read: &[GrowingSource]) -> Issue {
        let (bytes, blocks, slope) = sums(graph);
        let first = graph.iter().map(|g| g.first_turn).min().unwrap_or(0);
        let last = graph.iter().max_by_key(|g| g.last_seq);
        let run = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).map(|g| g.bytes).sum::<u64>() * 2 > bytes;
        let backward = self.analysis.signals.graphs.backward;
        let mut evidence = vec![format!(
            "{} that forward passes saved for backward stay allocated, from step {first} on, of {} in the forward pass",
            number_text(blocks, "block"),
            number_text(graph.len() as u64, "call site")
        )];
        evidence.extend(last.map(|l| format!("last block of each step: {}", self.builder.line(l.stack, l.context))));
        if let Some(input) = read.iter().max_by_key(|g| g.bytes) {
            let (bytes, blocks, _) = sums(read);
            evidence.push(format!(
                "{} in {} grew with them, possibly as saved inputs: {}",
                size_text(bytes),
                number_text(blocks, "block"),
                self.builder.line(input.stack, input.context)
            ));
        }
        let turns = graph.iter().map(|g| u64::from(g.turns)).max().unwrap_or(0);
        let has_inputs = !read.is_empty();
        let (place, fix) = if run {
            // So few blocks of a step, without an input, can also be results that the program keeps without their graph.
            let may_be_results = blocks < MIN_GRAPH_BLOCKS * turns && !has_inputs;
            let (why, fix) = match may_be_results {
                true => (
                    "a backward pass ran through them: retain_graph=True kept them, or the program keeps the results themselves",
                    "detach() what one step passes to the next, and remove retain_graph=True; if the program keeps detached results, move \
                     them to the CPU",
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
                last.map(|l| (l.stack, l.context)),
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
            sites: graph.iter().chain(read).map(|g| (g.stack, g.context)).collect(),
            fix,
            saves: last.filter(|l| self.at_peak(l.last_seq)).map(|_| bytes),
            ..self.issue(&rules::GRAPH_KEPT, bytes)
        }
    }

    fn graphs(&self, grow: bool, issues: &mut Vec<Issue>) {
        let interrupted = self.interrupted_evaluation();
        let place = interrupted.as_ref().and_then(|issue| issue.place);
        let is_interrupted = |a: &UnconsumedGraph| place.is_some_and(|(site, _)| site == a.site && !a.backward_ran);
        for (kind, a) in self.analysis.signals.graphs.found() {
            let found = match kind {
                // The evaluation is one issue, whatever it drops or keeps before it runs out of memory.
                GraphIssue::Kept | GraphIssue::Unused if is_interrupted(&a) => continue,
                GraphIssue::Kept if !grow => self.graph_collected(&a),
                GraphIssue::Unused if a.times >= 2 => self.eval(&a),
                GraphIssue::Retained if a.times >= 2 && !grow => self.retained(&a),
                _ => continue,
            };
            if self.matters(found.bytes) {
                issues.push(found);
            }
        }
        issues.extend(interrupted);
    }

    /// An evaluation with gradients that itself runs out of memory.
    fn interrupted_evaluation(&self) -> Option<Issue> {
        let definitions = self.builder.locations.definitions();
        let (graph, signs) = self.analysis.signals.interrupted_evaluation(definitions)?;
        let steps = |count: u32| if count == 1 { "1 step".to_owned() } else { format!("{count} steps") };
        let mut evidence = vec![format!(
            "{} blocks that {} of the model saved with autograd enabled; after {} of training, no backward pass ever ran through this place",
            count_text(graph.blocks),
            if graph.calls == 1 { "a call".to_owned() } else { format!("{} calls", count_text(graph.calls)) },
            steps(graph.optimizer_steps)
        )];
        evidence.extend(signs.into_iter().map(|sign| match sign {
            EvaluationSign::Dropped(1) => "the program has dropped a graph of this place before".to_owned(),
            EvaluationSign::Dropped(times) => {
                format!("the program has dropped {} graphs of this place before", count_text(times))
            }
            EvaluationSign::Function(name) => format!("the function {name} calls the model; training never runs in it"),
            EvaluationSign::Inactive(class) => {
                format!("the {class} modules allocate less than in training, as after model.eval()")
            }
        }));
        let issue = Issue {
            headline: format!(
                "an evaluation runs out of memory while {} of activations are kept for a backward pass",
                size_text(graph.bytes)
            ),
            evidence,
            place: Some((graph.site, ContextId::NONE)),
            fix: "call the model there under torch.inference_mode() or torch.no_grad()".to_owned(),
            ..self.issue(&rules::EVAL_WITHOUT_NO_GRAD, graph.bytes)
        };
        self.matters(issue.bytes).then_some(issue)
    }

    fn graph_collected(&self, a: &UnconsumedGraph) -> Issue {
        let run = a.backward_ran && !a.backward.is_none();
        Issue {
            headline: format!(
                "the graphs of {} calls are kept at the same time: {}, {} each",
                a.calls,
                size_text(a.bytes),
                size_text(a.bytes / a.calls.max(1))
            ),
            evidence: vec![
                format!(
                    "{} blocks that the calls at {} saved",
                    count_text(a.blocks),
                    self.builder.line(a.site, ContextId::NONE)
                ),
                if run {
                    "a backward pass ran through them and kept them: retain_graph=True (or create_graph=True)"
                        .to_owned()
                } else {
                    format!(
                        "no backward pass ran through them; the last block: {}",
                        self.builder.line(a.last.0, a.last.1)
                    )
                },
            ],
            place: Some(if run { (a.backward, ContextId::NONE) } else { a.last }),
            fix: if run {
                "detach() what one step passes to the next, and remove retain_graph=True".to_owned()
            } else {
                "the summed or stored tensor keeps its graph: use .item() or .detach(), or compute it under torch.no_grad()".to_owned()
            },
            saves: Some(a.bytes - a.bytes / a.calls.max(1)).filter(|_| self.at_peak(a.seqs.1)),
            ..self.issue(&rules::GRAPH_KEPT, a.bytes)
        }
    }

    fn eval(&self, a: &UnconsumedGraph) -> Issue {
        Issue {
            headline: format!(
                "{} of activations are kept for a backward pass that never runs, {} times",
                size_text(a.beside_result),
                count_text(a.times)
            ),
            evidence: vec![format!(
                "{} blocks of a model call with autograd enabled were freed together without a backward pass{}",
                count_text(a.blocks),
                self.dropped_at(a)
            )],
            place: Some((a.site, ContextId::NONE)),
            fix: "call the model there under torch.inference_mode() or torch.no_grad()".to_owned(),
            ..self.issue(&rules::EVAL_WITHOUT_NO_GRAD, a.beside_result)
        }
    }

    fn retained(&self, a: &UnconsumedGraph) -> Issue {
        let place = if a.backward.is_none() { a.last } else { (a.backward, ContextId::NONE) };
        Issue {
            headline: format!("the graph survives its backward pass: {}, {} times", size_text(a.bytes), count_text(a.times)),
            evidence: vec![
                format!(
                    "{} blocks that the forward pass saved were still allocated after the backward pass and were freed together{}",
                    count_text(a.blocks),
                    self.dropped_at(a)
                ),
                format!("the last block: {}", self.builder.line(a.last.0, a.last.1)),
            ],
            place: Some(place),
            fix: "the last backward pass of a graph needs no retain_graph=True (add the losses and call backward once); do not keep the \
                   loss beyond the step"
                .to_owned(),
            ..self.issue(&rules::GRAPH_RETAINED, a.bytes)
        }
    }

    fn dropped_at(&self, a: &UnconsumedGraph) -> String {
        if a.freed_by.is_none() {
            return String::new();
        }
        format!(", at {}", self.builder.line(a.freed_by, ContextId::NONE))
    }

    fn gradients(&self) -> Option<Issue> {
        let g = &self.analysis.signals.gradients;
        // At least half of the steps. A loop that is left and entered again begins with gradients once, without an
        // issue.
        if !self.matters(g.bytes)
            || g.forwards_with_gradients < 2
            || g.forwards_with_gradients * 2 < g.forwards_after_step
        {
            return None;
        }
        let evidence = format!(
            "{} of {} forward passes after an optimizer step started with these gradients",
            count_text(g.forwards_with_gradients),
            count_text(g.forwards_after_step)
        );
        let saves = self.peak().saturating_sub(g.peak_without);
        let often = g.freed_after();
        let kept = if often.is_some() { g.bytes } else { g.kept() };
        if self.matters(kept) && kept * 2 >= g.bytes {
            let freed = match often {
                Some(steps) => format!("they are freed once in {} steps", count_text(u64::from(steps))),
                None => "nothing frees them".to_owned(),
            };
            return Some(Issue {
                headline: format!("{} of gradients stay from step to step: {freed}", size_text(kept)),
                evidence: vec![evidence, "the next backward pass adds to them".to_owned()],
                place: (!g.backward.is_none()).then_some((g.backward, ContextId::NONE)),
                fix: "call optimizer.zero_grad() after each step; set_to_none=False only fills the gradients with zeros, and a model without \
                       an optimizer (a teacher) needs requires_grad_(False)"
                    .to_owned(),
                saves: Some(saves).filter(|bytes| *bytes > 0),
                ..self.issue(&rules::GRADIENTS_NOT_CLEARED, kept)
            });
        }
        // If the peak is elsewhere, these gradients cost nothing.
        (self.matters(saves) && g.cleared_late * 2 >= g.bytes).then(|| Issue {
            headline: format!(
                "{} of gradients stay through the next forward pass and are freed before its backward pass",
                size_text(g.bytes)
            ),
            evidence: vec![evidence, format!("without them the peak would be {}", size_text(g.peak_without))],
            place: Some((g.cleared_by, ContextId::NONE)),
            fix: "clear the gradients right after the optimizer step, or before the forward pass".to_owned(),
            saves: Some(saves),
            ..self.issue(&rules::GRADIENTS_CLEARED_LATE, g.bytes)
        })
    }

    fn garbage(&self) -> Option<Issue> {
        let garbage = &self.analysis.signals.garbage;
        let collected = garbage.collected();
        let (source, _) = collected.first()?;
        if !self.matters(garbage.largest_collection) {
            return None;
        }
        let mut evidence = vec![format!(
            "{} freed {} in {}",
            number_text(garbage.collections, "collection"),
            size_text(collected.iter().map(|(_, c)| c.bytes).sum()),
            number_text(collected.iter().map(|(_, c)| c.blocks).sum(), "block")
        )];
        for ((stack, context), c) in collected.iter().take(LOCATIONS) {
            let seconds = self.gib_seconds(c.byte_ticks);
            evidence.push(format!(
                "{} in {}, {seconds} from allocation to collection: {}",
                size_text(c.bytes),
                number_text(c.blocks, "block"),
                self.builder.line(*stack, *context)
            ));
        }
        // The cycles of the sources named in the evidence come first, in the same order.
        let rank = |held: &ReferenceCycle| {
            let (device, stack, context) = held.allocation?;
            let position = collected.iter().position(|(of, _)| *of == (stack, context))?;
            (device == self.analysis.device).then_some(position)
        };
        let mut cycles: Vec<_> =
            (self.builder.cycles)().into_iter().filter_map(|held| Some((rank(&held)?, held))).collect();
        cycles.sort_by_key(|(rank, _)| *rank);
        let mut files: Vec<String> = Vec::new();
        let mut shown_texts: Vec<Box<str>> = Vec::new();
        for (_, ReferenceCycle { file, text, .. }) in cycles {
            if !shown_texts.contains(&text) {
                if shown_texts.len() < LOCATIONS {
                    let shown = if file.is_empty() { String::new() } else { format!("{file}: ") };
                    evidence.push(format!("objects of the cycle: {shown}{text}"));
                }
                shown_texts.push(text);
            }
            if !file.is_empty() && !files.iter().any(|known| **known == *file) {
                files.push(file.into());
            }
        }
        let fix = "break the cycle (weakref, del, no frame or exception in a local variable)";
        let how = if shown_texts.is_empty() { "; memtrace --cycles shows its objects" } else { "" };
        Some(Issue {
            headline: format!("{} were freed only by the garbage collector", size_text(garbage.largest_collection)),
            evidence,
            place: Some(*source),
            fix: format!("{fix}{how}"),
            files,
            ..self.issue(&rules::REFERENCE_CYCLE, garbage.largest_collection)
        })
    }

    /// Formats bytes times clock ticks as `3.20 GiB·s`.
    fn gib_seconds(&self, byte_ticks: u128) -> String {
        let seconds = byte_ticks as f64 * self.builder.ns_per_tick / 1e9;
        format!("{}·s", size_text(seconds as u64))
    }

    fn checkpoint(&self) -> Option<Issue> {
        let loaded = &self.analysis.signals.checkpoints;
        if loaded.kept.is_empty() || !self.matters(loaded.kept.iter().map(|b| b.size).sum()) {
            return None;
        }
        let names = (self.builder.names)();
        let own = |seq: u64| names.of_allocation(seq).is_some_and(|named| named.kind != TensorKind::Other);
        let kept = loaded.beside_the_model(own);
        let bytes = kept.iter().map(|b| b.size).sum();
        let largest = kept.iter().max_by_key(|b| b.size).filter(|_| self.matters(bytes))?;
        let when = match self.analysis.table.steps() {
            0 | 1 if self.analysis.ooms.unwound_to_the_end() => "when the memory was full",
            0 | 1 => "at the end",
            _ => "when the second step began",
        };
        Some(Issue {
            headline: format!("{} of a loaded checkpoint stay allocated beside the model", size_text(bytes)),
            evidence: vec![format!(
                "{}, each as large as a block of the model, {} still allocated {when}",
                number_text(kept.len() as u64, "loaded block"),
                if kept.len() == 1 { "was" } else { "were" },
            )],
            place: Some((largest.stack, largest.context)),
            fix: "delete the checkpoint once it is copied, or load it with map_location=\"cpu\" (and mmap=True) or load_state_dict(..., assign=True)"
                .to_owned(),
            saves: Some(bytes).filter(|_| self.at_peak(largest.seq)),
            ..self.issue(&rules::CHECKPOINT_KEPT, bytes)
        })
    }

    fn wrong_device(&self, analysis: &Analysis) -> Option<Issue> {
        let signals = &self.analysis.signals;
        let (stack, context) = signals.checkpoints.peak_at?;
        let elsewhere = analysis
            .devices
            .iter()
            .find(|d| d.device >= 0 && d.device != self.analysis.device && d.signals.computed > 0)?;
        if self.analysis.device < 0 || signals.computed > 0 || signals.checkpoints.peak < MIN_BYTES {
            return None;
        }
        let bytes = signals.checkpoints.peak;
        Some(Issue {
            headline: format!(
                "{} of a checkpoint were loaded to GPU {}, but this process computes on GPU {}",
                size_text(bytes),
                self.analysis.device,
                elsewhere.device
            ),
            evidence: vec![format!(
                "only loading allocated memory on GPU {}, and it created a CUDA context there",
                self.analysis.device
            )],
            place: Some((stack, context)),
            fix: format!(
                "use torch.load(..., map_location=\"cuda:{}\") or map_location=\"cpu\": by default a tensor goes to the device it was saved from",
                elsewhere.device
            ),
            saves: Some(bytes),
            ..self.issue(&rules::WRONG_DEVICE, bytes)
        })
    }

    fn fragmentation(&self) -> Option<Issue> {
        let f = &self.analysis.signals.fragmentation;
        let limit = (self.builder.memory_limit)(self.analysis).filter(|_| !f.failed);
        if f.blocked < MIN_FRAGMENTATION
            || f.blocked * MIN_FRAGMENTATION_OF_RESERVED < f.reserved
            || limit.is_some_and(|limit| f.blocked.saturating_mul(MIN_FRAGMENTATION_OF_DEVICE) < limit)
            || f.blocked * 10 < self.analysis.peaks.reserved
            || self.analysis.source != EventSource::Torch
        {
            return None;
        }
        let (source, _) = f.blocked_by.first()?;
        let verb = if f.failed { "could not reserve" } else { "reserved" };
        // The peak and an out-of-memory error have their own figures. This is the worst point in time at which
        // fragmentation had an effect.
        let when = match (f.failed, f.position.and_then(|position| position.step)) {
            (true, _) => " when a request failed".to_owned(),
            (false, Some(step)) => format!(" in step {step}"),
            (false, None) => String::new(),
        };
        let mut evidence = vec![format!(
            "the allocator {verb} {} more although that much was free in the stream's segments for large blocks: the largest free block was {}, \
             and {} had live blocks",
            size_text(f.requested),
            size_text(f.largest_free),
            number_text(f.segments, "segment")
        )];
        for ((stack, context), pin) in f.blocked_by.iter().take(LOCATIONS) {
            evidence.push(format!(
                "{} of it blocked by {} in {}: {}",
                size_text(pin.blocked),
                size_text(pin.bytes),
                number_text(pin.blocks, "block"),
                self.builder.line(*stack, *context)
            ));
        }
        Some(Issue {
            headline: format!(
                "{} of {} reserved ({}) were free but blocked by live blocks{when}",
                size_text(f.blocked),
                size_text(f.reserved),
                share_text(f.blocked, f.reserved)
            ),
            evidence,
            place: Some(*source),
            fix: "allocate long-lived tensors before short-lived ones; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if the suggestions \
                  say that it helps"
                .to_owned(),
            ..self.issue(&rules::FRAGMENTATION, f.blocked)
        })
    }

    fn buckets(&self) -> Option<Issue> {
        let signals = &self.analysis.signals;
        let (buckets, gradients) = (&signals.buckets, signals.gradients.gradients);
        let bytes = buckets.bytes_at_step;
        if !self.matters(bytes) || gradients < bytes / 2 || bytes < gradients / 2 {
            return None;
        }
        Some(Issue {
            headline: format!("DDP buckets of {} beside {} of gradients", size_text(bytes), size_text(gradients)),
            evidence: vec![format!(
                "{} of DistributedDataParallel stayed allocated during the optimizer step, as large as the gradients themselves",
                number_text(buckets.blocks_at_step, "bucket")
            )],
            place: buckets.allocated_at,
            fix: "use DistributedDataParallel(..., gradient_as_bucket_view=True)".to_owned(),
            // Whether the peak falls depends on what else is allocated when the buckets are made anew.
            ..self.issue(&rules::DDP_BUCKETS, bytes)
        })
    }

    fn many_workspaces(&self) -> bool {
        let w = &self.analysis.signals.workspaces;
        w.peak >= 4 && w.streams.len() >= 3 && self.matters(w.bytes)
    }

    fn workspaces(&self) -> Option<Issue> {
        let w = &self.analysis.signals.workspaces;
        if !self.many_workspaces() {
            return None;
        }
        let one = w.bytes / w.peak;
        Some(Issue {
            headline: format!("{} cuBLAS workspaces of {}, {} in all", w.peak, size_text(one), size_text(w.bytes)),
            evidence: vec![format!(
                "on {} streams: PyTorch keeps one workspace per handle (thread) and stream for the life of the process; the location is that of the latest",
                w.streams.len()
            )],
            place: Some(w.latest),
            fix: "reuse a few streams and threads, or set CUBLAS_WORKSPACE_CONFIG=:16:8 for smaller workspaces"
                .to_owned(),
            saves: Some(w.bytes - one),
            ..self.issue(&rules::CUBLAS_WORKSPACES, w.bytes)
        })
    }

    fn optimizer_state(&self) -> Option<Issue> {
        let oom = self
            .analysis
            .ooms
            .all()
            .find(|oom| oom.phase == Phase::Optimizer && oom.position.step.is_none_or(|s| s == 0))?;
        let needed = state_needed(self.analysis, self.builder.table);
        let of = |category: Category| oom.in_use.by_category()[category as usize].bytes;
        let (in_use, activations) = (of(Category::OptimizerState), of(Category::Activation));
        if needed.is_some_and(|needed| in_use >= needed) {
            return None;
        }
        let name = self.builder.table.optimizer_name(oom.requested_at.0);
        let name = name.as_deref().unwrap_or("the optimizer");
        let all = needed.map_or(String::new(), |n| format!(" of the {} needed", size_text(n)));
        let phases = [Phase::Forward, Phase::Backward, Phase::Recompute];
        let total = self.analysis.table.total();
        let model_peak = phases.iter().map(|phase| total.phases[*phase as usize].peak).max().unwrap_or(0);
        let missing = needed.map_or(oom.requested, |n| n - in_use);
        Some(Issue {
            headline: match in_use {
                0 => format!("{name} allocates its state in the first step, and not even its first tensor fits"),
                _ => format!(
                    "{name} allocates its state in the first step, and it does not fit: {}{all} was allocated",
                    size_text(in_use)
                ),
            },
            evidence: vec![format!(
                "with {} allocated, a request of {} failed; forward and backward had peaked at {}",
                size_text(oom.in_use.usage.allocated),
                size_text(oom.requested),
                size_text(model_peak)
            )],
            place: Some(oom.requested_at),
            fix: format!(
                "keep the state in 8 bits, on the CPU or sharded (ZeRO, FSDP), or use an optimizer with less{}",
                if activations < missing { "; freeing activations does not help here" } else { "" }
            ),
            ..self.issue(&rules::OPTIMIZER_STATE_DOES_NOT_FIT, missing)
        })
    }

    fn deferred(&self) -> Option<Issue> {
        let deferred = &self.analysis.signals.deferred;
        let sources = deferred.by_source();
        let ((stack, context, _), _) = sources.first()?;
        if !self.matters(deferred.peak) || deferred.peak * 10 < self.peak() {
            return None;
        }
        let mut evidence = Vec::new();
        for ((stack, context, stream), by) in sources.iter().take(LOCATIONS) {
            evidence.push(format!(
                "{} of stream {stream:#x}, {} between free and reuse: {}",
                number_text(by.blocks, "block"),
                self.gib_seconds(by.byte_ticks),
                self.builder.line(*stack, *context)
            ));
        }
        Some(Issue {
            headline: format!("{} were freed but waited for other streams", size_text(deferred.peak)),
            evidence,
            place: Some((*stack, *context)),
            fix: "call wait_stream() before the last reference is dropped, instead of record_stream(); or prefetch fewer batches"
                .to_owned(),
            ..self.issue(&rules::DEFERRED_FREES, deferred.peak)
        })
    }

    fn outputs(&self) -> Option<Issue> {
        let outputs = &self.analysis.signals.outputs;
        let held = outputs.at_peak();
        let bytes = held.iter().map(|(_, held)| held.bytes).sum::<u64>();
        let saves = outputs.saves().min(bytes);
        let (source, _) = held.first().filter(|_| self.matters(saves))?;
        let mut evidence = vec![format!(
            "{} forward passes freed results of the pass before, after its backward pass and the optimizer step",
            count_text(outputs.passes())
        )];
        for ((stack, context), held) in held.iter().take(LOCATIONS) {
            evidence.push(format!(
                "{} in {} blocks: {}, freed at {}",
                size_text(held.bytes),
                count_text(held.blocks),
                self.builder.line(*stack, *context),
                self.builder.line(held.freed_by, ContextId::NONE)
            ));
        }
        Some(Issue {
            headline: format!(
                "{} of results of the previous forward pass are held at the peak; without them the peak is {}",
                size_text(bytes),
                size_text(self.peak().saturating_sub(saves))
            ),
            evidence,
            place: Some(*source),
            sites: held.iter().map(|(site, _)| *site).collect(),
            fix: "del the variables that hold them (outputs, loss) after the step, or compute the step in a function that returns \
                  loss.item()"
                .to_owned(),
            saves: Some(saves),
            ..self.issue(&rules::OUTPUTS_KEPT, bytes)
        })
    }
}

/// The sums of bytes, blocks and growth per turn.
fn sums(grown: &[GrowingSource]) -> (u64, u64, u64) {
    (grown.iter().map(|g| g.bytes).sum(), grown.iter().map(|g| g.blocks).sum(), grown.iter().map(|g| g.slope).sum())
}

fn forecast_evidence(forecast: &OomForecast) -> String {
    let turn = forecast.turn.name();
    format!(
        "{} are free at the peak of the last {turn}s, and each {turn} needs {} more",
        size_text(forecast.free),
        size_text(forecast.growth)
    )
}
