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
//!   goes from one node to the next, and an activation if autograd records the backward pass (`create_graph=True`).
//! - A block that the optimizer allocates is optimizer state if the next step still finds it.
//! - A block that code outside the model allocates, and that several steps or calls of the model find, is a tensor that
//!   the program keeps.
//!
//! An out-of-memory error that unwinds the program, or the end of the recording, cuts lifetimes short. Such blocks are
//! classified by allocation site.
//!
//! The first seven categories, and the distinctions between them, are those of PyTorch's own memory timeline
//! (`torch.profiler._memory_profiler`). `docs/dev/accuracy.md` measures the agreement with it.

mod block;
mod decision;
mod facts;
mod learning;
mod live;
mod owners;
mod proof;
mod rule_uses;
mod table;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};

use super::phase::{EventClassification, Phase, PhaseTracker};
use crate::rules::PhaseRuleId;
use facts::DefinitionFacts;
use learning::Learned;
use memtrace_input::KeptState;
use memtrace_replay::{Block, Names};

pub(crate) use block::is_recorded;
pub(in crate::passes) use block::is_without_gradients;
pub use block::{BlockAllocation, BlockClassification, BlockMemory, BlockSite, LifetimeEnd};
pub use proof::Proof;
pub use rule_uses::{CategoryRuleUse, CategoryRuleUses};
pub use table::Category;

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
    /// Makes a categorizer for the definitions of a recording. `has_names` is true if the recording names parameters.
    pub fn new(definitions: &Definitions, has_names: bool) -> Categorizer {
        Categorizer {
            facts: DefinitionFacts::new(definitions, has_names),
            learned: Learned::new(definitions.stacks.len()),
            place: (StackId::NONE, ContextId::NONE),
            call: 0,
        }
    }

    /// The same with what is known about the dropped events of a rotated trace.
    pub fn with_kept_state(mut self, state: Option<&KeptState>) -> Categorizer {
        self.facts.set_earlier(state.map_or(&[], |state| &state.blocks));
        self
    }

    /// Whether the recorder knows which blocks are workspaces of cuBLAS. If not, sizes decide.
    pub fn knows_workspaces(&self) -> bool {
        self.facts.knows_workspaces
    }

    /// The frame that decided the classification. `NONE` if no category rule about frames decided it.
    #[inline]
    pub fn evidence(&self, block: &BlockAllocation, classification: &BlockClassification) -> FrameId {
        match block.proof {
            Proof::FrameRule(rule) if rule.id == classification.rule => self.facts.rule_frame(block.site.stack),
            _ => FrameId::NONE,
        }
    }

    /// Observes the place of an allocation or a free. Consecutive events with the same Python stack and context belong
    /// to one call.
    #[inline]
    fn note_place(&mut self, tracker: &PhaseTracker, e: &Event) {
        let place = (tracker.stacks().python(e.stack), e.context);
        if place != self.place {
            self.place = place;
            self.call = self.call.wrapping_add(1);
        }
    }

    /// Observes an allocation. `names` are those of the recording if parameters have names, `oom_count` is the number
    /// of out-of-memory errors so far.
    #[inline]
    pub fn allocated(
        &mut self,
        tracker: &PhaseTracker,
        e: &Event,
        block: &Block,
        classification: &EventClassification,
        names: Option<&Names>,
        oom_count: u32,
    ) -> BlockAllocation {
        let e = &with_thread(e, classification);
        self.note_place(tracker, e);
        let in_model = !tracker.stacks().facts(e.stack).outermost_compute.is_none()
            && !matches!(classification.phase, Phase::Backward | Phase::Recompute);
        // Of a program that trains, only the calls in evaluations count.
        let counts = tracker.is_inference() || classification.phase.is_forward_only();
        self.learned.count_model_calls(in_model, counts);
        let name = names.and_then(|names| names.of_allocation(e.seq));
        if let Some(name) = name.filter(|name| name.kind == TensorKind::Parameter) {
            self.learned.parameters.owners.add(name, block.requested);
        }
        let proof = self.facts.proof(e, block.requested, classification, name, &self.learned);
        let proof = match proof {
            Proof::WeightCast if !self.learned.may_be_cast_of_call(names, e, block.requested) => Proof::None,
            proof => proof,
        };
        self.learned.learn(tracker, self.facts.caller(e.stack), e, block.requested, classification, proof);
        if e.pool != 0 && (self.facts.is_graph_pool(e.pool) || self.facts.captures(e.stack)) {
            self.learned.graph_pools.insert(e.pool);
        }
        BlockAllocation {
            seq: e.seq,
            ticks: e.ticks,
            memory: BlockMemory {
                addr: e.addr,
                size: block.size,
                requested: block.requested,
                stream: e.stream,
                pool: e.pool,
            },
            site: BlockSite {
                stack: e.stack,
                context: tracker.stacks().contexts().node(e.context),
                event_context: e.context,
                thread: e.thread,
                call: self.call,
            },
            position: *tracker.now(),
            phase: classification.phase,
            oom_count,
            proof,
            flags: e.flags,
            in_recorded_eval: classification.rule == PhaseRuleId::EvalWithoutBackward,
            model_calls: self.learned.model_calls,
            earlier: self.facts.earlier_classification(e),
        }
    }

    /// Observes a free. Call this before the block's lifetime is classified.
    #[inline]
    pub fn freed(&mut self, tracker: &PhaseTracker, e: &Event) {
        self.note_place(tracker, e);
    }

    /// Examines the blocks that are allocated at the end of the recording, or when a request fails. Records the sizes
    /// of the gradients among them, and the stacks whose blocks the program keeps.
    pub fn examine_allocated<'a>(
        &mut self,
        tracker: &PhaseTracker,
        blocks: impl Iterator<Item = &'a BlockAllocation>,
        end: &LifetimeEnd<'_>,
    ) {
        for block in blocks {
            let classification = self.classify(tracker, block, end);
            self.learned.learn_gradient(&block.memory, &classification);
            self.learned.learn_kept(&block.site, &classification);
        }
    }

    /// Marks a private pool into which a CUDA graph was captured.
    pub fn captured_into(&mut self, pool: u16) {
        self.learned.graph_pools.insert(pool);
    }

    /// Observes a request that failed.
    pub fn out_of_memory(&mut self) {
        self.learned.out_of_memory = true;
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
        self.learned.learn_gradient(&block.memory, &classification);
        self.learned.learn_cache(block, &classification);
        self.learned.learn_kept(&block.site, &classification);
        self.learned.learn_consumed(block, end);
        self.learned.learn_batches(tracker, block, &classification);
        self.learned.live.remove(block);
        classification
    }
}

/// PyTorch's snapshots do not name threads. Autograd runs backward passes on a thread of its own, which has its own
/// cuBLAS workspace.
fn with_thread(e: &Event, classification: &EventClassification) -> Event {
    const AUTOGRAD: ThreadId = ThreadId(u32::MAX);
    let is_autograd = e.thread.is_none() && classification.phase == Phase::Backward;
    Event { thread: if is_autograd { AUTOGRAD } else { e.thread }, ..*e }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::ProgramPosition;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::event::Flags;

    const NOW: ProgramPosition =
        ProgramPosition { phase: Phase::Load, step: None, phase_changes: 0, backward_passes: 0, optimizer_steps: 0 };

    fn block(phase: Phase, proof: Proof) -> BlockAllocation {
        // The first block of a forward pass begins the first step.
        let step = (phase == Phase::Forward).then_some(0);
        let position = ProgramPosition { phase, step, ..NOW };
        BlockAllocation { position, phase, proof, ..BlockAllocation::for_tests(1) }
    }

    #[test]
    fn lifetime_and_proof_decide_the_category() {
        let definitions = Definitions::default();
        let mut categorizer = Categorizer::new(&definitions, false);
        let tracker = PhaseTracker::of(&MemoryRecording { definitions, ..MemoryRecording::default() });
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

    /// The tracker of a recording with a backward pass.
    fn training() -> PhaseTracker {
        let node = memtrace_trace::file::Context { node: "AddBackward0".into(), ..Default::default() };
        let definitions = Definitions { contexts: vec![Default::default(), node], ..Definitions::default() };
        PhaseTracker::of(&MemoryRecording { definitions, ..MemoryRecording::default() })
    }

    #[test]
    fn an_output_that_outlives_its_graph_by_several_steps_is_kept() {
        use memtrace_trace::file::{Context, Frame, StackNode};
        let node = Context { node: "AddmmBackward0".into(), forward: StackId(1), ..Context::default() };
        let definitions = Definitions {
            frames: vec![Frame::default(), Frame { name: "forward".into(), ..Frame::default() }],
            stacks: vec![StackNode::default(), StackNode { parent: StackId::NONE, frame: FrameId(1) }],
            contexts: vec![Context::default(), node],
            ..Definitions::default()
        };
        let tracker = PhaseTracker::of(&MemoryRecording { definitions, ..MemoryRecording::default() });
        let mut categorizer = Categorizer { call: 1, ..Categorizer::new(&Definitions::default(), true) };
        let output = BlockAllocation::of_forward(1, 512, StackId(1), position(Phase::Forward, Some(0), 0));
        let (now, free) = (position(Phase::Forward, Some(3), 9), Event::EMPTY);
        let end = LifetimeEnd { now: &now, is_truncated: false, free: Some(&free) };
        let retained = categorizer.classify(&tracker, &output, &end);
        assert_eq!(retained.category, Category::Activation, "no backward pass has freed any graph");
        let consumed = Event { flags: Flags::IN_BACKWARD, ..Event::EMPTY };
        for _ in 0..4 {
            categorizer.lifetime_ended(&tracker, &output, &LifetimeEnd { free: Some(&consumed), ..end });
        }
        assert_eq!(categorizer.classify(&tracker, &output, &end).category, Category::KeptTensor);
        let soon = position(Phase::Forward, Some(1), 3);
        let next_step = LifetimeEnd { now: &soon, ..end };
        assert_eq!(categorizer.classify(&tracker, &output, &next_step).category, Category::Activation);
    }

    /// The category and the rule of a block whose lifetime ends at `now`.
    fn classified(
        categorizer: &Categorizer,
        block: &BlockAllocation,
        now: ProgramPosition,
        is_truncated: bool,
    ) -> (Category, &'static str) {
        let tracker = training();
        let free = Event::EMPTY;
        let end = LifetimeEnd { now: &now, is_truncated, free: (!is_truncated).then_some(&free) };
        let classification = categorizer.classify(&tracker, block, &end);
        (classification.category, classification.rule.as_str())
    }

    fn position(phase: Phase, step: Option<u32>, phase_changes: u32) -> ProgramPosition {
        let steps = step.unwrap_or_default();
        ProgramPosition { phase, step, phase_changes, backward_passes: steps, optimizer_steps: steps }
    }

    /// A categorizer of a program whose parameters have names, and that goes on after each block was allocated.
    fn with_names() -> Categorizer {
        Categorizer { call: 1, ..Categorizer::new(&Definitions::default(), true) }
    }

    #[test]
    fn a_recorded_backward_pass_leaves_activations() {
        let categorizer = with_names();
        let recorded = Flags::IN_BACKWARD.with(Flags::GRAD_KNOWN).with(Flags::GRAD_ENABLED);
        let at = position(Phase::Backward, Some(0), 2);
        let block = |flags, proof| BlockAllocation { position: at, flags, ..block(Phase::Backward, proof) };
        let next_pass = ProgramPosition { backward_passes: 1, phase_changes: 4, ..at };
        let of = |block: &BlockAllocation, now, truncated| classified(&categorizer, block, now, truncated).0;
        assert_eq!(of(&block(recorded, Proof::None), next_pass, false), Category::Activation);
        assert_eq!(of(&block(recorded, Proof::None), at, true), Category::Activation);
        assert_eq!(of(&block(recorded, Proof::AccumulatesGradient), next_pass, false), Category::Gradient);
        let inside = ProgramPosition { phase_changes: 2, ..at };
        assert_eq!(of(&block(recorded, Proof::None), inside, false), Category::AutogradDetail);
        let plain = Flags::IN_BACKWARD.with(Flags::GRAD_KNOWN);
        assert_eq!(of(&block(plain, Proof::None), next_pass, false), Category::Gradient);
    }

    #[test]
    fn tensors_from_before_the_first_step_are_inputs_or_kept() {
        let mut categorizer = with_names();
        let block = BlockAllocation { position: position(Phase::Load, None, 0), ..block(Phase::Load, Proof::None) };
        let of = |categorizer: &Categorizer, step, truncated| {
            classified(categorizer, &block, position(Phase::Forward, step, 9), truncated)
        };
        assert_eq!(of(&categorizer, Some(5), true), (Category::Input, "input-unnamed-at-load"));
        categorizer.learned.data.loads_batches = true;
        assert_eq!(of(&categorizer, Some(5), true), (Category::KeptTensor, "kept-tensor-at-load"));
        assert_eq!(of(&categorizer, Some(5), false).0, Category::KeptTensor);
        assert_eq!(of(&categorizer, Some(1), true).0, Category::KeptTensor);
        // The first batch is freed when the second one is there.
        assert_eq!(of(&categorizer, Some(1), false).0, Category::Input);
        assert_eq!(of(&categorizer, None, true), (Category::Unknown, "unknown-at-load"));
    }

    #[test]
    fn only_a_stack_or_a_phase_of_its_own_shows_the_category_of_a_snapshots_block() {
        let categorizer = Categorizer { call: 1, ..Categorizer::new(&Definitions::default(), false) };
        let of = |phase, flags, stack| {
            let mut block =
                BlockAllocation { position: position(phase, Some(0), 0), flags, ..block(phase, Proof::None) };
            block.site.stack = stack;
            classified(&categorizer, &block, position(Phase::Forward, Some(1), 9), false).0
        };
        let stack = memtrace_trace::ids::StackId(1);
        assert_eq!(of(Phase::Data, Flags::default(), stack), Category::Input);
        assert_eq!(of(Phase::Data, Flags::GRAD_KNOWN, Default::default()), Category::Input);
        assert_eq!(of(Phase::Data, Flags::default(), Default::default()), Category::Unknown);
        assert_eq!(of(Phase::Forward, Flags::default(), Default::default()), Category::Activation);
    }

    #[test]
    fn a_block_from_before_the_recording_is_no_batch_without_evidence() {
        let categorizer = with_names();
        let of = |flags, to: u32| {
            let at = position(Phase::Other, Some(0), 0);
            let block = BlockAllocation { position: at, flags, ..block(Phase::Other, Proof::None) };
            classified(&categorizer, &block, position(Phase::Forward, Some(to), 10 * to + 1), false)
        };
        assert_eq!(of(Flags::default(), 1).0, Category::Input, "the block of the recording");
        assert_eq!(of(Flags::PREEXISTING, 1), (Category::Unknown, "no-category-rule"));
        assert_eq!(of(Flags::PREEXISTING, 4).0, Category::KeptTensor);
    }

    #[test]
    fn what_several_steps_find_is_kept() {
        let categorizer = with_names();
        let of = |phase, proof, flags, from: u32, to: u32, truncated| {
            let at = position(phase, Some(from), 10 * from);
            // A stack of the program's own code.
            let mut block = BlockAllocation { position: at, flags, ..block(phase, proof) };
            block.site.stack = StackId(9);
            classified(&categorizer, &block, position(Phase::Forward, Some(to), 10 * to + 1), truncated).0
        };
        let none = Flags::default();
        assert_eq!(of(Phase::Data, Proof::None, none, 1, 2, false), Category::Input);
        assert_eq!(of(Phase::Data, Proof::None, none, 1, 4, false), Category::KeptTensor);
        // Code outside the model that makes no autograd node.
        assert_eq!(of(Phase::Forward, Proof::None, none, 1, 1, true), Category::Activation);
        assert_eq!(of(Phase::Forward, Proof::None, none, 1, 2, false), Category::KeptTensor);
        assert_eq!(of(Phase::Optimizer, Proof::None, none, 1, 2, false), Category::KeptTensor);
        assert_eq!(of(Phase::Eval, Proof::None, none, 1, 4, false), Category::KeptTensor);
        let grad_on = Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED);
        assert_eq!(of(Phase::Eval, Proof::None, grad_on, 1, 1, false), Category::Input);
        assert_eq!(of(Phase::Eval, Proof::None, Flags::GRAD_KNOWN, 1, 1, false), Category::Activation);
        assert_eq!(of(Phase::Optimizer, Proof::OptimizerStep, none, 1, 2, false), Category::OptimizerState);
        // FSDP reduces gradients after the last autograd node too.
        let gradients_of_fsdp = position(Phase::Optimizer, Some(1), 5);
        let rule = crate::rules::category_rule(&memtrace_trace::file::Frame {
            filename: "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py".into(),
            name: "allocate".into(),
            ..Default::default()
        })
        .unwrap();
        let shard = BlockAllocation { position: gradients_of_fsdp, ..block(Phase::Optimizer, Proof::FrameRule(rule)) };
        let at_step = ProgramPosition { optimizer_steps: 2, ..gradients_of_fsdp };
        assert_eq!(classified(&categorizer, &shard, at_step, false).0, Category::Gradient);
        assert_eq!(classified(&categorizer, &shard, gradients_of_fsdp, false).0, Category::CommunicationBucket);
    }

    #[test]
    fn a_private_pool_is_a_graphs_only_with_proof() {
        let mut definitions = Definitions::default();
        definitions.pools.insert(1, (3, 0));
        definitions.pools.insert(2, (0, 3));
        let mut categorizer = Categorizer::new(&definitions, true);
        assert!(categorizer.facts.is_graph_pool(1) && !categorizer.facts.is_graph_pool(2));
        categorizer.learned.graph_pools.insert(1);
        let of = |pool| classified(&categorizer, &block(Phase::Forward, Proof::PrivatePool(pool)), NOW, true).0;
        assert_eq!((of(1), of(2)), (Category::GraphPool, Category::MemoryPool));
    }
}
