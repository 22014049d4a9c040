//! Classifies each block by purpose, from its name, its allocation site and its lifetime.
//!
//! A block's category is decided when the block is freed, because only then is its whole lifetime known. The evidence,
//! in order of trust:
//!
//! 1. A tensor name that was read in the traced process: a parameter, a gradient or optimizer state.
//! 2. A rule about the frames that allocated the block.
//! 3. The block's lifetime:
//! - A block from a forward pass is an activation, unless the call that allocated it also frees it.
//! - A block from a backward pass is a gradient if the optimizer still finds it. It is an autograd temporary if it
//!   goes from one node to the next.
//! - A block that the optimizer allocates is optimizer state if the next step still finds it.
//!
//! An out-of-memory error that unwinds the program, or the end of the recording, cuts lifetimes short. Such blocks are
//! classified by allocation site.
//!
//! The first seven categories, and the distinctions between them, are those of PyTorch's own memory timeline
//! (`torch.profiler._memory_profiler`). `docs/dev/accuracy.md` measures the agreement with it.

mod block;
mod decision;
mod learning;
mod proof;
mod rule_uses;

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::phase::{EventClassification, Phase, PhaseTracker};
use learning::Learned;
use memtrace_replay::{AllocationNames, Block};
use proof::DefinitionFacts;

pub use block::{BlockAllocation, BlockClassification, Category, LifetimeEnd};
pub use proof::Proof;
pub use rule_uses::{CategoryRuleUse, CategoryRuleUses};

/// Classifies blocks. Facts about stacks are computed once; facts about the program accumulate as the recording
/// streams.
#[derive(Clone, Debug)]
pub struct Categorizer {
    facts: DefinitionFacts,
    learned: Learned,
    /// The Python stack and the context of the latest event, and the number of runs of events from one place so far.
    place: (StackId, ContextId),
    call: u32,
}

impl Categorizer {
    /// Takes the definitions of a recording. `has_names`: whether the recording names parameters.
    pub fn new(definitions: &Definitions, has_names: bool) -> Categorizer {
        Categorizer {
            facts: DefinitionFacts::new(definitions, has_names),
            learned: Learned::new(definitions.stacks.len()),
            place: (StackId::NONE, ContextId::NONE),
            call: 0,
        }
    }

    /// The frame that decided the classification. `NONE` if no category rule about frames decided it.
    #[inline]
    pub fn evidence(&self, block: &BlockAllocation, classification: &BlockClassification) -> FrameId {
        match block.proof {
            Proof::FrameRule(rule) if rule.id == classification.rule => self.facts.rule_frame(block.stack),
            _ => FrameId::NONE,
        }
    }

    /// Takes an allocation or a free. Consecutive events with the same Python stack and context belong to one call.
    #[inline]
    fn note_place(&mut self, tracker: &PhaseTracker, e: &Event) {
        let place = (tracker.stacks().python(e.stack), e.context);
        if place != self.place {
            self.place = place;
            self.call = self.call.wrapping_add(1);
        }
    }

    /// Takes an allocation. `name` is the block's tensor name, `oom_count` the number of out-of-memory errors so far.
    #[inline]
    pub fn allocated(
        &mut self,
        tracker: &PhaseTracker,
        e: &Event,
        block: &Block,
        classification: &EventClassification,
        name: Option<&AllocationNames>,
        oom_count: u32,
    ) -> BlockAllocation {
        self.note_place(tracker, e);
        self.learned.count_model_calls(!tracker.stacks().facts(e.stack).outermost_compute.is_none());
        let proof = self.facts.proof(e, block.requested, classification, name, &self.learned.parameter_sizes);
        self.learned.learn(tracker, e, block.requested, classification, proof);
        BlockAllocation {
            seq: e.seq,
            ticks: e.ticks,
            addr: e.addr,
            size: block.size,
            requested: block.requested,
            stack: e.stack,
            context: tracker.stacks().contexts().node(e.context),
            event_context: e.context,
            position: *tracker.now(),
            phase: classification.phase,
            oom_count,
            proof,
            call: self.call,
            model_calls: self.learned.model_calls,
        }
    }

    /// Takes a free. Call this before the block's lifetime is classified.
    #[inline]
    pub fn freed(&mut self, tracker: &PhaseTracker, e: &Event) {
        self.note_place(tracker, e);
    }

    /// Takes the blocks that are still allocated at the end of the recording, and records the sizes of the gradients
    /// among them.
    pub fn recording_ended<'a>(
        &mut self,
        tracker: &PhaseTracker,
        blocks: impl Iterator<Item = &'a BlockAllocation>,
        end: &LifetimeEnd<'_>,
    ) {
        for block in blocks.filter(|b| b.phase == Phase::Backward) {
            self.learned.learn_gradient(block, &self.backward(tracker, block, end));
        }
    }

    /// The category of a block whose lifetime ends. Blocks must come in the order in which their lifetimes end.
    #[inline]
    pub fn lifetime_ended(
        &mut self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        let classification = self.classify(tracker, block, end);
        self.learned.learn_gradient(block, &classification);
        self.learned.learn_cache(block, &classification);
        classification
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::definition::TensorKind;

    use super::*;
    use crate::passes::{LabelRules, ProgramPosition, StackTable, StepEnds};
    use memtrace_trace::event::Flags;

    const NOW: ProgramPosition =
        ProgramPosition { phase: Phase::Load, step: None, phase_changes: 0, backward_passes: 0, optimizer_steps: 0 };

    fn block(phase: Phase, proof: Proof) -> BlockAllocation {
        BlockAllocation { position: ProgramPosition { phase, ..NOW }, phase, proof, ..BlockAllocation::for_tests(1) }
    }

    #[test]
    fn lifetime_and_proof_decide_the_category() {
        let definitions = Definitions::default();
        let tracker = PhaseTracker::new(StackTable::new(&definitions), StepEnds::default(), LabelRules::default());
        let mut categorizer = Categorizer::new(&definitions, false);
        // An event from another place has passed since the allocation.
        categorizer.call = 1;
        let later = ProgramPosition {
            phase: Phase::Optimizer,
            step: Some(0),
            phase_changes: 3,
            backward_passes: 1,
            optimizer_steps: 1,
        };
        let free = Event { flags: Flags::IN_BACKWARD, ..Event::EMPTY };
        let category = |phase, proof, now: ProgramPosition, is_truncated: bool| {
            categorizer
                .classify(
                    &tracker,
                    &block(phase, proof),
                    &LifetimeEnd { now: &now, is_truncated, free: (!is_truncated).then_some(&free) },
                )
                .category
        };
        let forward = ProgramPosition { phase: Phase::Forward, ..NOW };
        assert_eq!(category(Phase::Forward, Proof::None, later, false), Category::Activation);
        assert_eq!(category(Phase::Forward, Proof::None, forward, false), Category::Activation);
        assert_eq!(category(Phase::Forward, Proof::None, forward, true), Category::Activation);
        assert_eq!(category(Phase::Backward, Proof::None, later, false), Category::Gradient);
        let backward = ProgramPosition { phase: Phase::Backward, phase_changes: 2, ..NOW };
        assert_eq!(category(Phase::Backward, Proof::None, backward, false), Category::AutogradDetail);
        assert_eq!(category(Phase::Backward, Proof::ParameterSized, backward, true), Category::Gradient);
        let optimizer = ProgramPosition { phase: Phase::Optimizer, ..NOW };
        assert_eq!(category(Phase::Optimizer, Proof::OptimizerState, optimizer, true), Category::OptimizerState);
        assert_eq!(category(Phase::Optimizer, Proof::OptimizerStep, optimizer, false), Category::Temporary);
        assert_eq!(category(Phase::Optimizer, Proof::OptimizerStep, later, false), Category::OptimizerState);
        assert_eq!(category(Phase::Load, Proof::ModelLoaded, later, false), Category::Parameter);
        assert_eq!(category(Phase::Load, Proof::ModelLoaded, NOW, false), Category::Temporary);
        assert_eq!(category(Phase::Load, Proof::None, later, false), Category::Unknown);
        let buffer = Proof::Named(TensorKind::Buffer);
        assert_eq!(category(Phase::Forward, buffer, later, false), Category::Parameter);
        assert_eq!(
            category(Phase::Load, Proof::Named(TensorKind::OptimizerState), later, true),
            Category::OptimizerState
        );
        // The call that allocated the block also frees it.
        categorizer.call = 0;
        let classification = categorizer.classify(
            &tracker,
            &block(Phase::Forward, Proof::None),
            &LifetimeEnd { now: &later, is_truncated: false, free: Some(&free) },
        );
        assert_eq!(classification.category, Category::Temporary);
    }
}
