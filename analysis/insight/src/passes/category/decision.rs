//! The decision about a block's category, once its lifetime is known: from its proof, from what the recording has shown
//! about other blocks, and from its lifetime.

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Flags;

use super::Categorizer;
use super::block::{BlockAllocation, BlockClassification, Category, LifetimeEnd};
use super::learning::StackGrowth;
use super::proof::Proof;
use crate::passes::phase::{Phase, PhaseTracker, ProgramPosition};
use crate::rules::{CategoryRule, CategoryRuleId, FrameMemory};

/// A block must outlive this many calls of the model to count as a cache. A plain result is freed as soon as the next
/// calls replace it.
const CACHED_CALLS: u32 = 3;
/// A cache that grows with each call is replaced within this many calls.
const GROWN_CALLS: u32 = 2;
/// A growing cache needs at least one in this many of the stacks that allocate in several calls to have a constant
/// size.
const STEADY_PART: u32 = 4;
/// The minimum number of equal-sized blocks from user code that count as a cache: keys and values of two layers.
const CACHE_BLOCKS: u32 = 4;

impl Categorizer {
    /// The category of a block whose lifetime ends, or would end, with `end`.
    #[inline]
    pub fn classify(
        &self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        let now = end.now;
        let at = &block.position;
        let outlives_step = now.step > at.step || end.is_truncated && now.optimizer_steps > at.optimizer_steps;
        match block.proof {
            Proof::Named(TensorKind::Parameter) => return is(Category::Parameter, CategoryRuleId::NameParameter),
            Proof::Named(TensorKind::Buffer) => return is(Category::Parameter, CategoryRuleId::NameBuffer),
            Proof::Named(TensorKind::Gradient) => return is(Category::Gradient, CategoryRuleId::NameGradient),
            Proof::Named(_) => return is(Category::OptimizerState, CategoryRuleId::NameOptimizerState),
            Proof::NamedCache => return is(Category::KvCache, CategoryRuleId::KvCacheBufferName),
            Proof::FrameRule(rule) => return self.by_frame_rule(rule, block, now),
            Proof::PrivatePool => return is(Category::GraphPool, CategoryRuleId::PrivatePool),
            Proof::WorkspaceSized if outlives_step => {
                return is(Category::Workspace, CategoryRuleId::WorkspaceOutlivesStep);
            }
            Proof::LtWorkspaceSized
                if self.learned.has_workspace
                    && end.free.is_none()
                    && outlives_step
                    && block.position.step == Some(0) =>
            {
                return is(Category::Workspace, CategoryRuleId::WorkspaceNeverFreed);
            }
            _ => {}
        }
        match block.phase {
            Phase::Data if self.in_one_call(block, end) => {
                is(Category::Temporary, CategoryRuleId::TemporaryFreedByCall)
            }
            Phase::Data => is(Category::Input, CategoryRuleId::InputDataPhase),
            Phase::Load => self.loading(tracker, block, end),
            Phase::Forward | Phase::Recompute | Phase::Eval => self.forward(tracker, block, end),
            Phase::Backward => self.backward(tracker, block, end),
            Phase::Optimizer => optimizer(block, end),
            Phase::Other => self.other(block, end),
        }
    }

    /// Whether the call that allocated the block also frees it. Such a block is an operator's scratch memory.
    #[inline]
    fn in_one_call(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
        end.free.is_some() && block.call == self.call
    }

    fn by_frame_rule(
        &self,
        rule: &CategoryRule,
        block: &BlockAllocation,
        now: &ProgramPosition,
    ) -> BlockClassification {
        if rule.allocates == FrameMemory::Bucket && block.phase == Phase::Backward && outlives_backward(block, now) {
            return is(Category::Gradient, CategoryRuleId::GradientBucket);
        }
        let category = match rule.allocates {
            FrameMemory::Bucket | FrameMemory::Gathered => Category::CommunicationBucket,
            FrameMemory::KvCache => Category::KvCache,
            FrameMemory::Workspace => Category::Workspace,
            FrameMemory::Parameter => Category::Parameter,
            // A loaded checkpoint is the model itself, unless the program has another copy of the parameters.
            FrameMemory::Checkpoint if self.facts.has_names => Category::Checkpoint,
            FrameMemory::Checkpoint if self.learned.parameter_sizes.contains(&block.requested) => Category::Checkpoint,
            FrameMemory::Checkpoint => Category::Parameter,
        };
        is(category, rule.id)
    }

    fn loading(&self, tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        let never_used = block.position.step.is_none() && end.now.step.is_none() && !end.is_truncated;
        match block.proof {
            Proof::ModuleMoved => is(Category::Parameter, CategoryRuleId::ParameterModuleMoved),
            Proof::ModelLoaded if never_used => is(Category::Temporary, CategoryRuleId::TemporaryFreedBeforeForward),
            Proof::ModelLoaded => is(Category::Parameter, CategoryRuleId::ParameterModelLoaded),
            _ if self.learned.loads_data(block.stack) => is(Category::Input, CategoryRuleId::InputLaterBatches),
            _ if never_used => is(Category::Temporary, CategoryRuleId::TemporaryFreedBeforeForward),
            _ if tracker.is_inference() => {
                let equal_blocks = self.learned.allocated_at_load.get(&block.requested).copied().unwrap_or_default();
                let is_kept = self.learned.model_calls >= block.model_calls + CACHED_CALLS;
                if self.facts.has_names && is_kept && equal_blocks >= CACHE_BLOCKS && equal_blocks % 2 == 0 {
                    is(Category::KvCache, CategoryRuleId::KvCacheEqualBlocks)
                } else if self.facts.has_names {
                    is(Category::Input, CategoryRuleId::InputUnnamedAtLoad)
                } else {
                    is(Category::Unknown, CategoryRuleId::UnknownAtLoad)
                }
            }
            _ if self.facts.has_names => is(Category::Input, CategoryRuleId::InputUnnamedAtLoad),
            _ if self.learned.gradient_sizes.contains(&block.requested) => {
                is(Category::Parameter, CategoryRuleId::ParameterGradientSized)
            }
            _ if !self.learned.gradient_sizes.is_empty() => is(Category::Input, CategoryRuleId::InputNoGradientAtLoad),
            _ => is(Category::Unknown, CategoryRuleId::UnknownAtLoad),
        }
    }

    fn forward(&self, tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        if self.in_one_call(block, end) {
            return is(Category::Temporary, CategoryRuleId::TemporaryFreedByCall);
        }
        if block.proof == Proof::WeightCast {
            return is(Category::AutocastCache, CategoryRuleId::AutocastCacheWeightCast);
        }
        if end.free.is_some_and(|e| self.facts.ends_autocast(e.stack)) {
            return is(Category::AutocastCache, CategoryRuleId::AutocastCacheFreedAtExit);
        }
        // A block that only the garbage collector frees was not kept for later calls to read.
        let collected = end.free.is_some_and(|e| e.flags.contains(Flags::IN_GC));
        if tracker.is_inference() && !collected {
            let outlives = self.learned.model_calls.saturating_sub(block.model_calls);
            let may_cache = self.facts.may_cache(block.stack);
            let growth = self.learned.growth.get(&block.stack);
            // A model with a cache does constant work per token, so most of its stacks allocate a constant size. The
            // last version of a cache is never replaced: it is still allocated at the end. `is_cache` covers that
            // version.
            let is_replaced = end.free.is_some() && (1..=GROWN_CALLS).contains(&outlives);
            let has_constant_work = STEADY_PART * self.learned.steady_stacks >= self.learned.frequent_stacks;
            let grows = |g: &StackGrowth| g.is_cache || is_replaced && g.grown >= 2 && has_constant_work;
            if may_cache && growth.is_some_and(grows) {
                return is(Category::KvCache, CategoryRuleId::KvCacheGrows);
            }
            let inside = !tracker.stacks().facts(block.stack).outermost_compute.is_none();
            if inside && outlives >= CACHED_CALLS {
                // A cache is allocated once, or in attention. A block that every call allocates anew and that the
                // program keeps is a result.
                let is_frequent =
                    growth.is_some_and(|g| 2 * g.calls > self.learned.model_calls.saturating_sub(g.first));
                if self.facts.attends(block.stack) || may_cache && !is_frequent {
                    return is(Category::KvCache, CategoryRuleId::KvCacheKeptAcrossCalls);
                }
                return is(Category::Activation, CategoryRuleId::ActivationKeptResult);
            }
        }
        if self.learned.loads_data(block.stack) && tracker.stacks().facts(block.stack).rule.is_none() {
            return is(Category::Input, CategoryRuleId::InputOtherBatches);
        }
        match block.phase {
            Phase::Recompute => is(Category::Activation, CategoryRuleId::ActivationRecomputed),
            _ => is(Category::Activation, CategoryRuleId::ActivationForward),
        }
    }

    pub(super) fn backward(
        &self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        let now = end.now;
        if block.proof == Proof::Named(TensorKind::Gradient) {
            return is(Category::Gradient, CategoryRuleId::NameGradient);
        }
        if outlives_backward(block, now) {
            return is(Category::Gradient, CategoryRuleId::GradientOutlivesBackward);
        }
        if end.free.is_some_and(|e| tracker.is_outside_engine(e)) {
            return is(Category::Gradient, CategoryRuleId::GradientFreedOutsideEngine);
        }
        if end.is_truncated {
            if !matches!(now.phase, Phase::Backward | Phase::Recompute) {
                return is(Category::Gradient, CategoryRuleId::GradientOutlivesBackward);
            }
            match block.proof {
                Proof::AccumulatesGradient => return is(Category::Gradient, CategoryRuleId::GradientAccumulateGrad),
                Proof::ParameterSized => return is(Category::Gradient, CategoryRuleId::GradientParameterSized),
                _ => {}
            }
        }
        if self.in_one_call(block, end) && (self.facts.has_nodes || !block.stack.is_none()) {
            return is(Category::Temporary, CategoryRuleId::TemporaryFreedByNode);
        }
        is(Category::AutogradDetail, CategoryRuleId::AutogradDetailBetweenNodes)
    }

    fn other(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        if self.in_one_call(block, end) {
            is(Category::Temporary, CategoryRuleId::TemporaryFreedByCall)
        } else if self.learned.loads_data(block.stack) {
            is(Category::Input, CategoryRuleId::InputOtherBatches)
        } else if block.proof == Proof::None
            && end.now.phase_changes > block.position.phase_changes
            && block.position.step.is_some()
        {
            is(Category::Input, CategoryRuleId::InputBeforeForward)
        } else {
            is(Category::Unknown, CategoryRuleId::NoCategoryRule)
        }
    }
}

/// Whether the backward pass that allocated the block has ended.
fn outlives_backward(block: &BlockAllocation, now: &ProgramPosition) -> bool {
    now.optimizer_steps > block.position.optimizer_steps || now.backward_passes > block.position.backward_passes
}

fn optimizer(block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
    match block.proof {
        Proof::OptimizerState => is(Category::OptimizerState, CategoryRuleId::OptimizerStateInitialization),
        _ if block.position.phase_changes == end.now.phase_changes => {
            is(Category::Temporary, CategoryRuleId::TemporaryFreedInOptimizer)
        }
        Proof::OptimizerStep => is(Category::OptimizerState, CategoryRuleId::OptimizerStateOutlivesStep),
        Proof::GradientWork => is(Category::Temporary, CategoryRuleId::TemporaryGradientWork),
        _ => is(Category::Unknown, CategoryRuleId::UnknownInOptimizer),
    }
}

const fn is(category: Category, rule: CategoryRuleId) -> BlockClassification {
    BlockClassification { category, rule }
}
