//! Where steps end: the evidence that a recording has for it, and what the current step has shown.

use std::collections::HashSet;

use memtrace_trace::event::Event;
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

use super::event::is_request;
use crate::passes::stacks::StackTable;
use crate::passes::steps::StepEnds;
use crate::rules::Meaning;

/// The kind of evidence that ends a step in this recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StepEvidence {
    /// The profiler ranges that [`StepEnds`] evaluates.
    ProfilerRange,
    Optimizer,
    ZeroGrad,
    Backward,
    ModelCall,
}

impl StepEvidence {
    /// `had_ranges` means that profiler ranges ended steps in the dropped part of the recording.
    fn of(table: &StackTable, ends: &StepEnds, had_ranges: bool) -> StepEvidence {
        if had_ranges || !ends.all().is_empty() {
            StepEvidence::ProfilerRange
        } else if table.any(Meaning::OptimizerStep) || table.any(Meaning::OptimizerState) {
            StepEvidence::Optimizer
        } else if table.any(Meaning::ZeroGrad) {
            StepEvidence::ZeroGrad
        } else if table.has_nodes() || table.any(Meaning::Engine) {
            StepEvidence::Backward
        } else {
            StepEvidence::ModelCall
        }
    }
}

/// The forward and backward passes of the current step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Passes {
    /// The line of the first model call since the last backward pass. Libraries make the last pass of a step in the
    /// optimizer's closure, so the callers of this line differ.
    pub(super) place: FrameId,
    /// The line of the latest pass, how many consecutive passes began there, and the optimizer steps before them.
    pub(super) latest: (FrameId, u32, u32),
    /// The highest such number.
    pub(super) most: u32,
}

/// Decides when a step is over.
#[derive(Clone, Debug)]
pub(super) struct StepMachine {
    pub(super) evidence: StepEvidence,
    /// Whether the step is over; the next one begins with the next batch or pass.
    pub(super) is_over: bool,
    /// The backward passes of this step.
    pub(super) backward_passes: u32,
    pub(super) backward_passes_of_first: Option<u32>,
    /// The optimizer steps seen without profiler ranges.
    pub(super) optimizer_steps: u32,
    pub(super) passes: Passes,
    pub(super) ends: StepEnds,
    /// The index of the next end of a step and its `seq`; `u64::MAX` if there is none.
    pub(super) next_end: (usize, u64),
    /// The first model call of an inference-only program.
    model_call: StackId,
    /// The threads of such a program that have allocated outside the model since they called it. The order of events of
    /// different threads is not the same in each run.
    outside_model: HashSet<ThreadId>,
}

impl StepMachine {
    /// `had_ranges` means that profiler ranges ended steps in the dropped part of the recording.
    pub(super) fn new(table: &StackTable, ends: StepEnds, had_ranges: bool) -> StepMachine {
        StepMachine {
            evidence: StepEvidence::of(table, &ends, had_ranges),
            is_over: false,
            backward_passes: 0,
            backward_passes_of_first: None,
            optimizer_steps: 0,
            passes: Passes::default(),
            next_end: (0, ends.all().first().copied().unwrap_or(u64::MAX)),
            ends,
            model_call: StackId::NONE,
            outside_model: HashSet::new(),
        }
    }

    /// Begins the next step.
    pub(super) fn begin(&mut self) {
        self.is_over = false;
        self.backward_passes = 0;
        self.passes = Passes::default();
    }

    /// Advances the step past all ends before this event.
    #[cold]
    pub(super) fn advance_past_ends(&mut self, seq: u64, step: &mut Option<u32>) {
        while seq > self.next_end.1 {
            match step {
                None => *step = Some(0),
                Some(step) => *step += u32::from(self.is_over),
            }
            self.is_over = true;
            let next = self.next_end.0 + 1;
            self.next_end = (next, self.ends.all().get(next).copied().unwrap_or(u64::MAX));
        }
    }

    /// Whether a forward pass that begins now belongs to a new step although no optimizer was seen.
    pub(super) fn ended_without_optimizer(&self) -> bool {
        match self.evidence {
            StepEvidence::Optimizer => {
                self.optimizer_steps <= 1
                    && self.backward_passes_of_first.is_some_and(|first| self.backward_passes >= first)
            }
            StepEvidence::Backward => self.backward_passes > 0,
            StepEvidence::ProfilerRange | StepEvidence::ZeroGrad | StepEvidence::ModelCall => false,
        }
    }

    /// Whether an inference-only program calls its model again. True if the stack is that of the first call and an
    /// allocation of this thread outside the model came before.
    pub(super) fn model_called(&mut self, e: &Event, table: &StackTable) -> bool {
        if self.evidence != StepEvidence::ModelCall || !is_request(e) {
            return false;
        }
        let facts = table.facts(e.stack);
        let call = facts.outermost_compute;
        // Building a model runs its containers' code too.
        if call.is_none() || facts.rule.is_some_and(|rule| rule.meaning == Meaning::Load) {
            self.outside_model.insert(e.thread);
            return false;
        }
        if self.model_call.is_none() {
            self.model_call = call;
            self.outside_model.remove(&e.thread);
        }
        self.model_call == call && self.outside_model.remove(&e.thread)
    }
}
