//! Autograd graphs that no backward pass consumes: the program keeps them, drops them, or a backward pass retains them.
//!
//! The three rules share this module, because one signal decides between them: which graphs were freed together, and
//! whether a backward pass ran through them. Graphs that grow from step to step are found by their growth (`growing`),
//! and are not reported here again.

mod evaluation;
pub(super) mod unconsumed;

use std::collections::HashSet;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, OutOfMemory, Pass, RecordingEnd};
use crate::passes::phase::Phase;
use crate::rules::{Meaning, RuleId, is_library};
use crate::units::{count_text, size_text};
use evaluation::{EvaluationSign, Evaluations, InterruptedGraph};
use unconsumed::{GraphFree, GraphIssue, UnconsumedGraph, UnconsumedGraphs};

/// The graphs of several calls of a model are allocated at once.
pub(super) static GRAPH_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::GraphKept,
    meaning: "The program keeps tensors that keep the graphs of earlier forward passes, and with them all their \
              activations.",
    evidence: "Forward passes allocate the blocks while autograd records, at two places or more. Either the blocks \
               increase from step to step, or the blocks of at least three calls are freed together, at least three \
               per call. At the end of the run, those of two steps suffice if backward passes ran through them. If \
               backward passes ran through the graphs, at least three times as many blocks per call remain as a \
               backward pass frees.",
    limits: "The line that stores the loss allocates nothing, so the issue names the line that computes the loss. A \
             graph that is unrolled over many calls on purpose looks the same if an error frees it.",
    code: &[
        "total_loss += loss.item()      # not: total_loss += loss",
        "hidden = hidden.detach()       # before the next step uses it",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    kept_by: KeptBy::Graphs,
};

/// A backward pass retained its graph.
static GRAPH_RETAINED: DiagnosticRule = DiagnosticRule {
    id: RuleId::GraphRetained,
    meaning: "A graph survives its backward pass, because backward() retains it or the program keeps the loss.",
    evidence: "The blocks that a forward pass keeps for the backward pass are freed together after that backward pass. \
               They have at least as many bytes as the backward pass freed, and at least three times as many blocks.",
    limits: "The rule does not know which of several backward calls was the last to need the graph. It can misjudge a \
             graph of which only one branch remains.",
    code: &[
        "(first_loss + second_loss).backward()  # one pass, without retain_graph=True",
        "del loss                               # if something else needs the memory in this step",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
    kept_by: KeptBy::Graphs,
};

/// Forward passes without a backward pass keep their activations.
static EVAL_WITHOUT_NO_GRAD: DiagnosticRule = DiagnosticRule {
    id: RuleId::EvalWithoutNoGrad,
    meaning: "An evaluation runs while autograd records, so it keeps activations for a backward pass that never \
              comes.",
    evidence: "A call of the model allocates at least three blocks, at two places or more, while autograd records. \
               They are freed together without a backward pass in between, and no backward pass runs through another \
               part of the call. This happens at least twice. Or a forward pass runs out of memory at a place through \
               which no backward pass ever ran, after training steps with the same modules at another place. Then one \
               of three facts is required: an earlier graph of this place was dropped, a function named after \
               evaluation calls the model, or dropout and batch normalization allocate as after model.eval().",
    limits: "Graphs that the program drops on purpose look the same, for example in a skipped step. The rule misses an \
             evaluation that runs out of memory in its first call if nothing else shows that it is one.",
    code: &["model.eval()", "with torch.inference_mode():", "    outputs = model(inputs)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    kept_by: KeptBy::Nothing,
};

/// The graphs of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graphs {
    unconsumed: UnconsumedGraphs,
    /// Evaluations with gradients that ran out of memory.
    evaluations: Evaluations,
}

impl Graphs {
    /// `seq` of the out-of-memory error that interrupted an evaluation with gradients.
    pub(super) fn interrupting_error(&self, definitions: &Definitions) -> Option<u64> {
        self.interrupted_evaluation(definitions).map(|(graph, _)| graph.seq)
    }

    /// Where an evaluation calls the model: the stack up to the innermost line of the program that training does not
    /// run. `no_grad` around a line that training runs too, in a function that both call, would break training.
    fn line_of_evaluation(&self, definitions: &Definitions, site: StackId) -> StackId {
        let own = |(_, id): &(StackId, FrameId)| {
            definitions.frame(*id).is_some_and(|frame| !frame.native && !is_library(&frame.filename))
        };
        let trained: HashSet<FrameId> = (self.unconsumed.consumed_sites().iter())
            .flat_map(|site| definitions.walk_ids(*site))
            .filter(own)
            .map(|(_, frame)| frame)
            .collect();
        let mut lines = definitions.walk_ids(site).filter(own);
        match lines.next() {
            Some((_, innermost)) if trained.contains(&innermost) => {
                lines.find(|(_, frame)| !trained.contains(frame)).map_or(site, |(stack, _)| stack)
            }
            _ => site,
        }
    }

    /// The graph of an evaluation that ran out of memory itself because it recorded one, and what shows that.
    fn interrupted_evaluation(&self, definitions: &Definitions) -> Option<(&InterruptedGraph, Vec<EvaluationSign>)> {
        let found = self.unconsumed.found();
        let dropped = |site| {
            let here = found.iter().filter(|(kind, graph)| *kind == GraphIssue::Unused && graph.site == site);
            here.map(|(_, graph)| graph.times).sum()
        };
        self.evaluations.interrupted(definitions, self.unconsumed.consumed_sites(), &dropped)
    }

    /// An evaluation with gradients that itself runs out of memory.
    fn interrupted(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        let definitions = device.inputs.locations.definitions();
        let (graph, signs) = self.interrupted_evaluation(definitions)?;
        let steps = |count: u32| if count == 1 { "1 step".to_owned() } else { format!("{count} steps") };
        let mut evidence = vec![format!(
            "{} blocks that {} of the model saved with autograd enabled; after {} of training, no backward pass ever \
             ran through this place",
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
            place: Some((self.line_of_evaluation(definitions, graph.site), ContextId::NONE)),
            fix: "call the model there under torch.inference_mode() or torch.no_grad()".to_owned(),
            ..device.issue(&EVAL_WITHOUT_NO_GRAD, graph.bytes)
        };
        device.matters(issue.bytes).then_some(issue)
    }
}

impl Pass for Graphs {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { block, mark, .. } = *allocated;
        self.unconsumed.next_allocation();
        if mark.is(Mark::GRAPH) {
            self.unconsumed.allocated(mark, &block.position);
            self.evaluations.allocated(block, mark);
        }
        if allocated.classification.meaning() == Some(Meaning::Engine) {
            self.unconsumed.backward_called(block.site.stack);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        let BlockFreed { block, mark, facts, .. } = *freed;
        if !mark.is(Mark::GRAPH) {
            return;
        }
        let phase = freed.classification.phase;
        if matches!(phase, Phase::Backward | Phase::Recompute) {
            self.evaluations.consumed(block, mark);
        }
        self.unconsumed.freed(&GraphFree {
            block,
            mark,
            freed_by: freed.e.stack,
            phase,
            is_inside_call: facts.outermost_compute == mark.site && !mark.site.is_none(),
            is_truncated: freed.is_truncated,
            now: freed.now,
        });
    }

    fn out_of_memory(&mut self, error: &OutOfMemory<'_>) {
        let (now, Some(in_use)) = (error.now, error.in_use) else { return };
        if error.classification.may_record() {
            let unconsumed = &self.unconsumed;
            let pending = in_use.iter().filter(|(block, mark)| {
                let is_pending =
                    block.position.backward_passes == now.backward_passes && !unconsumed.is_consumed(mark.call);
                mark.is(Mark::GRAPH) && is_pending
            });
            self.evaluations.out_of_memory(error.e.seq, pending, now);
        }
        self.unconsumed.out_of_memory(now);
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        for (block, mark) in end.in_use.iter().filter(|(_, mark)| mark.is(Mark::GRAPH)) {
            self.unconsumed.still_allocated(block, mark, end.now);
        }
        self.unconsumed.finish(end.now);
    }
}

impl Diagnostic for Graphs {
    const RULES: &'static [&'static DiagnosticRule] = &[&GRAPH_KEPT, &GRAPH_RETAINED, &EVAL_WITHOUT_NO_GRAD];

    fn share(&self, _: &DeviceFacts<'_>, shared: &mut SharedFacts) {
        shared.graphs = self.unconsumed.facts();
        shared.consumed_calls = self.unconsumed.consumed_sites().clone();
    }

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        let grow = issues.iter().any(|issue| issue.rule.id == RuleId::GraphKept);
        let interrupted = self.interrupted(device);
        let place = interrupted.as_ref().and_then(|issue| issue.place);
        let is_interrupted = |a: &UnconsumedGraph| place.is_some_and(|(site, _)| site == a.site && !a.backward_ran);
        for (kind, a) in self.unconsumed.found() {
            let found = match kind {
                // The evaluation is one issue, whatever it drops or keeps before it runs out of memory.
                GraphIssue::Kept | GraphIssue::Unused if is_interrupted(&a) => continue,
                GraphIssue::Kept if !grow => collected(device, &a),
                GraphIssue::Unused if a.times >= 2 => {
                    dropped(device, &a, self.line_of_evaluation(device.inputs.locations.definitions(), a.site))
                }
                GraphIssue::Retained if a.times >= 2 && !grow => retained(device, &a),
                _ => continue,
            };
            if device.matters(found.bytes) {
                issues.push(found);
            }
        }
        issues.extend(interrupted);
    }
}

/// Graphs of several calls that were kept and then freed together.
fn collected(device: &DeviceFacts<'_>, a: &UnconsumedGraph) -> Issue {
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
                device.line((a.site, ContextId::NONE))
            ),
            if run {
                "a backward pass ran through them and kept them: retain_graph=True (or create_graph=True)".to_owned()
            } else {
                format!("no backward pass ran through them; the last block: {}", device.line(a.last))
            },
        ],
        place: Some(if run { (a.backward, ContextId::NONE) } else { a.last }),
        fix: if run {
            "detach() what one step passes to the next, and remove retain_graph=True".to_owned()
        } else {
            "the summed or stored tensor keeps its graph: use .item() or .detach(), or compute it under torch.no_grad()"
                .to_owned()
        },
        saves: Some(a.bytes - a.bytes / a.calls.max(1)).filter(|_| device.at_peak(a.seqs.1)),
        ..device.issue(&GRAPH_KEPT, a.bytes)
    }
}

/// Graphs that the program drops. `line` is the line where it calls the model.
fn dropped(device: &DeviceFacts<'_>, a: &UnconsumedGraph, line: StackId) -> Issue {
    Issue {
        headline: format!(
            "{} of activations are kept for a backward pass that never runs, {} times",
            size_text(a.beside_result),
            count_text(a.times)
        ),
        evidence: vec![format!(
            "{} blocks of a model call with autograd enabled were freed together without a backward pass{}",
            count_text(a.blocks),
            dropped_at(device, a)
        )],
        place: Some((line, ContextId::NONE)),
        fix: "call the model there under torch.inference_mode() or torch.no_grad()".to_owned(),
        ..device.issue(&EVAL_WITHOUT_NO_GRAD, a.beside_result)
    }
}

/// Graphs that backward passes leave.
fn retained(device: &DeviceFacts<'_>, a: &UnconsumedGraph) -> Issue {
    let place = if a.backward.is_none() { a.last } else { (a.backward, ContextId::NONE) };
    Issue {
        headline: format!(
            "the graph survives its backward pass: {}, {} times",
            size_text(a.bytes),
            count_text(a.times)
        ),
        evidence: vec![
            format!(
                "{} blocks that the forward pass saved were still allocated after the backward pass and were freed \
                 together{}",
                count_text(a.blocks),
                dropped_at(device, a)
            ),
            format!("the last block: {}", device.line(a.last)),
        ],
        place: Some(place),
        fix:
            "the last backward pass of a graph needs no retain_graph=True (add the losses and call backward once); do \
              not keep the loss beyond the step"
                .to_owned(),
        ..device.issue(&GRAPH_RETAINED, a.bytes)
    }
}

fn dropped_at(device: &DeviceFacts<'_>, a: &UnconsumedGraph) -> String {
    if a.freed_by.is_none() {
        return String::new();
    }
    format!(", at {}", device.line((a.freed_by, ContextId::NONE)))
}
