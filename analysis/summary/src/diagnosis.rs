//! Turns signals into issues: decides which of them amount to an issue, and describes these with figures and locations.

use std::collections::HashMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::{ContextId, StackId};

use crate::explain::state_needed;
use crate::locations::Locations;
use crate::units::{count_text, share_text, size_text};
use memtrace_input::EventSource;
use memtrace_insight::passes::diagnostics::{EvaluationSign, GraphIssue, GrowingSource, Mark, UnconsumedGraph};
use memtrace_insight::passes::{Analysis, DeviceAnalysis, Issue, Phase, StackTable};
use memtrace_insight::rules::diagnostics as rules;
use memtrace_replay::{Names, ReferenceCycle};

/// The minimum size of an issue: this many bytes, and one in this many parts of the peak.
const MIN_BYTES: u64 = 1 << 20;
const MIN_SHARE: u64 = 50;
/// The minimum fragmentation to report: this many bytes, and one in this many parts of the reserved memory. Less is no
/// fault of the program.
const MIN_FRAGMENTATION: (u64, u64) = (16 << 20, 4);
/// The maximum number of lines listed for one issue.
const LOCATIONS: usize = 3;

/// The inputs for describing signals.
pub(crate) struct IssueBuilder<'a> {
    pub(crate) locations: &'a Locations<'a>,
    pub(crate) table: &'a StackTable,
    pub(crate) ns_per_tick: f64,
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
            fix: String::new(),
            saves: None,
            files: Vec::new(),
        }
    }

    /// Adds leaks and growing graphs. Returns whether growing graphs are among them.
    fn growing(&self, issues: &mut Vec<Issue>) -> bool {
        let grown = self.analysis.signals.growing.grown();
        let (graph, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            grown.iter().partition(|g| g.bits & Mark::GRAPH != 0);
        // A hook that stores one tensor of every layer allocates at one line, so one line alone is no evidence of a
        // graph.
        let mut lines: Vec<_> = graph.iter().map(|g| self.builder.locations.innermost(g.stack)).collect();
        lines.sort_unstable();
        lines.dedup();
        // A backward pass that freed more than stayed did consume its graph. What stayed are results.
        let run: u64 = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).map(GrowingSource::slope).sum();
        let consumed = self.analysis.signals.graphs.total_consumed / u64::from(self.analysis.table.steps().max(1));
        let bytes = graph.iter().map(|g| g.bytes).sum();
        let whole = graph.iter().all(|g| g.bits & Mark::NODE_RAN == 0) || run >= consumed;
        // Graphs that were freed together are evidence as well.
        let was_freed_together = self.analysis.signals.graphs.found().iter().any(|(kind, _)| *kind == GraphIssue::Kept);
        let kept = !graph.is_empty() && (lines.len() >= 2 && whole || was_freed_together) && self.matters(bytes);
        // Tensors that grow together with a graph are inputs that the graph keeps.
        let with = |g: &GrowingSource| {
            graph.iter().any(|of| of.first_step.abs_diff(g.first_step) <= 1 && of.blocks.abs_diff(g.blocks) <= 2)
        };
        let (read, others): (Vec<GrowingSource>, Vec<GrowingSource>) =
            others.into_iter().partition(|g| kept && with(g));
        if kept {
            issues.push(self.graph_grows(&graph, &read));
        }
        let leaks: Vec<GrowingSource> = if kept { others } else { others.into_iter().chain(graph).collect() };
        // One line can leak at several locations below it.
        let mut by_line: HashMap<String, Vec<GrowingSource>> = HashMap::new();
        for leak in leaks {
            by_line.entry(self.builder.line(leak.stack, leak.context)).or_default().push(leak);
        }
        let mut by_line: Vec<(String, Vec<GrowingSource>)> = by_line.into_iter().collect();
        by_line
            .sort_by_key(|(line, leaks)| (std::cmp::Reverse(leaks.iter().map(|g| g.bytes).sum::<u64>()), line.clone()));
        for (_, leaks) in by_line.into_iter().take(LOCATIONS) {
            let (bytes, blocks, slope) = sums(&leaks);
            let workspaces = &self.analysis.signals.workspaces;
            if self.many_workspaces() && leaks.iter().any(|g| workspaces.stacks.contains(&g.stack)) {
                continue;
            }
            let Some(largest) = leaks.iter().max_by_key(|g| g.bytes).filter(|_| self.matters(bytes)) else { continue };
            issues.push(Issue {
                headline: format!("{} more with each step, {} at the end", size_text(slope), size_text(bytes)),
                evidence: vec![
                    format!(
                        "{} blocks stay allocated, from step {} on; their number grew in {} of {} samples at step starts",
                        count_text(blocks),
                        largest.first_step,
                        largest.increases,
                        largest.samples
                    ),
                ],
                place: Some((largest.stack, largest.context)),
                fix: "an object that outlives the step (a list, a dict, an attribute) holds each block: store a number, a CPU copy, or fewer tensors"
                    .to_owned(),
                saves: Some(bytes).filter(|_| self.at_peak(largest.last_seq)),
                ..self.issue(&rules::LEAK, bytes)
            });
        }
        kept
    }

    fn graph_grows(&self, graph: &[GrowingSource], read: &[GrowingSource]) -> Issue {
        let (bytes, blocks, slope) = sums(graph);
        let first = graph.iter().map(|g| g.first_step).min().unwrap_or(0);
        let last = graph.iter().max_by_key(|g| g.last_seq);
        let run = graph.iter().filter(|g| g.bits & Mark::NODE_RAN != 0).map(|g| g.bytes).sum::<u64>() * 2 > bytes;
        let backward = self.analysis.signals.graphs.backward;
        let mut evidence = vec![format!(
            "{} blocks that forward passes saved for backward stay allocated, from step {first} on, of {} call sites in the forward pass",
            count_text(blocks),
            graph.len()
        )];
        evidence.extend(last.map(|l| format!("last block of each step: {}", self.builder.line(l.stack, l.context))));
        if let Some(input) = read.iter().max_by_key(|g| g.bytes) {
            let (bytes, blocks, _) = sums(read);
            evidence.push(format!(
                "{} in {} blocks grew with them, possibly as saved inputs: {}",
                size_text(bytes),
                count_text(blocks),
                self.builder.line(input.stack, input.context)
            ));
        }
        let (place, fix) = if run {
            evidence.push(
                "a backward pass ran through them and kept them: retain_graph=True (or create_graph=True)".to_owned(),
            );
            (
                (!backward.is_none()).then_some((backward, ContextId::NONE)),
                "detach() what one step passes to the next, and remove retain_graph=True".to_owned(),
            )
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
        let signals = &self.analysis.signals;
        let found = signals.graphs.found();
        let dropped = |site| {
            let here = found.iter().filter(|(kind, graph)| *kind == GraphIssue::Unused && graph.site == site);
            here.map(|(_, graph)| graph.times).sum()
        };
        let sites = signals.graphs.consumed_sites();
        let (graph, signs) = signals.evaluations.interrupted(self.builder.locations.definitions(), sites, &dropped)?;
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
            "{} collections freed {} in {} blocks",
            count_text(garbage.collections),
            size_text(collected.iter().map(|(_, c)| c.bytes).sum()),
            count_text(collected.iter().map(|(_, c)| c.blocks).sum())
        )];
        for ((stack, context), c) in collected.iter().take(LOCATIONS) {
            let seconds = self.gib_seconds(c.byte_ticks);
            evidence.push(format!(
                "{} in {} blocks, {seconds} from allocation to collection: {}",
                size_text(c.bytes),
                count_text(c.blocks),
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
        Some(Issue {
            headline: format!("{} of a loaded checkpoint stay allocated beside the model", size_text(bytes)),
            evidence: vec![format!(
                "{} loaded blocks, each as large as a block of the model, were still allocated during training",
                count_text(kept.len() as u64)
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
        if f.blocked < MIN_FRAGMENTATION.0
            || f.blocked * MIN_FRAGMENTATION.1 < f.reserved
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
             and {} segments had live blocks",
            size_text(f.requested),
            size_text(f.largest_free),
            f.segments
        )];
        for ((stack, context), pin) in f.blocked_by.iter().take(LOCATIONS) {
            evidence.push(format!(
                "{} of it blocked by {} in {} blocks: {}",
                size_text(pin.blocked),
                size_text(pin.bytes),
                count_text(pin.blocks),
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
                "{} buckets were allocated during the optimizer step, as large as the gradients themselves",
                buckets.blocks_at_step
            )],
            place: buckets.allocated_at,
            fix: "use DistributedDataParallel(..., gradient_as_bucket_view=True)".to_owned(),
            saves: Some(bytes.min(gradients)),
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
        let in_use = oom.in_use.by_category()[memtrace_insight::passes::Category::OptimizerState as usize].bytes;
        if needed.is_some_and(|needed| in_use >= needed) {
            return None;
        }
        let facts = self.builder.table.facts(oom.requested_at.0);
        let name = facts.optimizer.map_or("the optimizer", |o| o.name);
        let all = needed.map_or(String::new(), |n| format!(" of the {} needed", size_text(n)));
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
                "forward and backward had reached {}; with {} allocated, a request of {} failed",
                size_text(self.peak()),
                size_text(oom.in_use.usage.allocated),
                size_text(oom.requested)
            )],
            place: Some(oom.requested_at),
            fix: "keep the state in 8 bits, on the CPU or sharded (ZeRO, FSDP), or use an optimizer with less; freeing activations does not help here"
                .to_owned(),
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
                "{} blocks of stream {stream:#x}, {} between free and reuse: {}",
                count_text(by.blocks),
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
}

/// The sums of bytes, blocks and growth per step.
fn sums(grown: &[GrowingSource]) -> (u64, u64, u64) {
    (
        grown.iter().map(|g| g.bytes).sum(),
        grown.iter().map(|g| g.blocks).sum(),
        grown.iter().map(GrowingSource::slope).sum(),
    )
}
