//! The decision about a block's category, once its lifetime is known: from its proof, from what the recording has shown
//! about other blocks, and from its lifetime.

use memtrace_input::KeptBlock;
use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Event, Flags};

use super::Categorizer;
use super::block::{BlockAllocation, BlockClassification, BlockSite, LifetimeEnd, is_recorded, is_without_gradients};
use super::learning::{StackGrowth, is_scalar};
use super::proof::Proof;
use super::table::Category;
use crate::passes::phase::{Phase, PhaseTracker, ProgramPosition};
use crate::rules::{CategoryRule, CategoryRuleId, FrameMemory, Meaning, PhaseRuleId};

/// A block must outlive this many calls of the model to count as a cache. A plain result is freed as soon as the next
/// calls replace it.
const CACHED_CALLS: u32 = 3;
/// A cache that grows with each call is replaced within this many calls.
const GROWN_CALLS: u32 = 2;
/// A growing cache needs at least 25 % (1/4) of the stacks that allocate in several calls to have a size that does not
/// grow.
const STEADY_PART: u32 = 4;
/// The minimum number of equal-sized blocks from user code that count as a cache: keys and values of two layers.
const CACHE_BLOCKS: u32 = 4;
/// A block that so many later steps find is no batch. A loader that works ahead frees a batch earlier.
const KEPT_STEPS: u32 = 3;

impl BlockAllocation {
    /// The state to keep of this block when the events before `now` are dropped. `classification` is made as if the
    /// recording had ended there. Steps that follow still decide about a block that few steps have found.
    pub fn to_kept(&self, classification: &BlockClassification, now: &ProgramPosition) -> KeptBlock {
        let is_decided = self.earlier.is_some() || steps_outlived(self, now) >= KEPT_STEPS;
        let names = (classification.category.name().into(), classification.rule.as_str().into());
        KeptBlock {
            seq: self.seq,
            position: self.position.to_kept(),
            phase: self.phase.name().into(),
            classification: is_decided.then_some(names),
        }
    }

    /// Whether only the time of the allocation is known: PyTorch's snapshots have no grad mode, and no stacks unless
    /// the program asks for them.
    pub fn is_of_snapshot_without_stack(&self) -> bool {
        let site = &self.site;
        let is_recorded = !self.flags.contains(Flags::PREEXISTING);
        is_recorded && site.stack.is_none() && site.context.is_none() && !self.flags.contains(Flags::GRAD_KNOWN)
    }
}

impl Categorizer {
    /// The category of a block whose lifetime ends, or would end, with `end`.
    #[inline]
    pub fn classify(
        &self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        if let Some(earlier) = block.earlier {
            return earlier;
        }
        match block.proof {
            Proof::Named(TensorKind::Parameter) => return is(Category::Parameter, CategoryRuleId::NameParameter),
            Proof::Named(TensorKind::Buffer) => return is(Category::Parameter, CategoryRuleId::NameBuffer),
            Proof::Named(TensorKind::Gradient) => return is(Category::Gradient, CategoryRuleId::NameGradient),
            Proof::Named(_) => return is(Category::OptimizerState, CategoryRuleId::NameOptimizerState),
            Proof::NamedCache => return is(Category::KvCache, CategoryRuleId::KvCacheBufferName),
            Proof::FrameRule(rule)
                if rule.allocates != FrameMemory::KvCache || !self.is_cache_of_graph(tracker, block) =>
            {
                return self.by_frame_rule(rule, block, end.now);
            }
            Proof::PrivatePool(pool) if self.learned.graph_pools.contains(&pool) => {
                return is(Category::GraphPool, CategoryRuleId::GraphPool);
            }
            Proof::PrivatePool(_) => return is(Category::MemoryPool, CategoryRuleId::PrivatePool),
            Proof::CublasWorkspace => return is(Category::Workspace, CategoryRuleId::WorkspaceCublas),
            _ if self.is_workspace(block, end) => {
                return is(Category::Workspace, CategoryRuleId::WorkspaceNeverFreed);
            }
            _ => {}
        }
        let by_position = matches!(block.phase, Phase::Data | Phase::Load | Phase::Other);
        let is_open = block.proof == Proof::None && !self.facts.has_names;
        if by_position && is_open && block.is_of_snapshot_without_stack() {
            return is(Category::Unknown, CategoryRuleId::NoCategoryRule);
        }
        // Autograd later ran a node of this line, so the block is part of a graph: the weights that the inner loop of a
        // meta-learner computes.
        let is_in_graph = || block.flags.contains(Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED)) && self.facts.has_nodes;
        let made_node = tracker.stacks().facts(block.site.stack).made_node;
        if matches!(block.phase, Phase::Data | Phase::Other) && made_node && is_in_graph() && end.free.is_some() {
            return self.forward(tracker, block, end);
        }
        match block.phase {
            Phase::Data if self.in_one_call(&block.site, end) => {
                is(Category::Temporary, CategoryRuleId::TemporaryFreedByCall)
            }
            Phase::Data if steps_outlived(block, end.now) >= KEPT_STEPS => {
                is(Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps)
            }
            Phase::Data => is(Category::Input, CategoryRuleId::InputDataPhase),
            Phase::Load => self.loading(tracker, block, end),
            Phase::Forward | Phase::Recompute | Phase::Eval | Phase::Generate | Phase::Rollout => {
                self.forward(tracker, block, end)
            }
            Phase::Backward => self.backward(tracker, block, end),
            Phase::Optimizer => self.optimizer(tracker, block, end),
            // No phase shows the use of a block that a program without PyTorch allocates.
            Phase::Other if tracker.stacks().is_without_pytorch() && !self.in_one_call(&block.site, end) => {
                is(Category::Unknown, CategoryRuleId::NoCategoryRule)
            }
            Phase::Other => self.other(block, end),
        }
    }

    /// Whether a block is a workspace of cuBLAS or cuBLASLt. There is one for each thread and stream. PyTorch does not
    /// free it, unless it captures CUDA graphs.
    fn is_workspace(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
        let more = match block.proof {
            Proof::WorkspaceSized => true,
            Proof::MaybeWorkspace => outlives_step(block, end),
            Proof::LtWorkspaceSized => self.learned.live.has_workspace_beside(block),
            Proof::MaybeLtWorkspace => outlives_step(block, end) && self.learned.live.has_workspace_beside(block),
            _ => return false,
        };
        more && end.free.is_none_or(|e| self.facts.captures(e.stack)) && self.learned.live.is_oldest_workspace(block)
    }

    /// Whether a block of a cache belongs to a forward pass that autograd records. A training computes it for its own
    /// graph. In other programs, later calls of the model find a cache.
    fn is_cache_of_graph(&self, tracker: &PhaseTracker, block: &BlockAllocation) -> bool {
        let in_graph = matches!(block.phase, Phase::Forward | Phase::Backward | Phase::Recompute);
        in_graph && (!tracker.is_inference() || self.learned.model_calls == block.model_calls)
    }

    /// Whether several steps find the block. A block whose lifetime is cut short counts too if the program keeps
    /// earlier blocks of the same stack.
    fn is_kept(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
        steps_outlived(block, end.now) >= KEPT_STEPS || end.is_truncated && self.learned.keeps(block.site.stack)
    }

    /// Whether a block is still allocated, and its stack replaces parameters. Its name was not read.
    fn replaces_parameter(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
        block.proof == Proof::None
            && end.is_truncated
            && self.learned.replaces_parameters(block.site.stack, block.memory.requested)
    }

    /// Whether a block that no rule matches is a batch: other blocks of its stack are, or its caller also allocated
    /// before the first forward pass.
    fn loads_data(&self, site: &BlockSite) -> bool {
        self.learned.loads_data(site.stack) || self.learned.allocated_at_load_by(self.facts.caller(site.stack))
    }

    /// Whether the call that allocated the block also frees it. Such a block is an operator's scratch memory.
    #[inline]
    fn in_one_call(&self, site: &BlockSite, end: &LifetimeEnd<'_>) -> bool {
        end.free.is_some() && site.call == self.call
    }

    fn by_frame_rule(
        &self,
        rule: &CategoryRule,
        block: &BlockAllocation,
        now: &ProgramPosition,
    ) -> BlockClassification {
        let holds_gradients = match block.phase {
            Phase::Backward => outlives_backward(block, now),
            // FSDP reduces the gradients of its last group after the last node.
            Phase::Optimizer | Phase::Other if rule.id == CategoryRuleId::BucketFsdp => {
                now.optimizer_steps > block.position.optimizer_steps
            }
            _ => false,
        };
        if rule.allocates == FrameMemory::Bucket && holds_gradients {
            return is(Category::Gradient, CategoryRuleId::GradientBucket);
        }
        let category = match rule.allocates {
            FrameMemory::Bucket | FrameMemory::Gathered => Category::CommunicationBucket,
            FrameMemory::KvCache => Category::KvCache,
            FrameMemory::Workspace => Category::Workspace,
            FrameMemory::Parameter => Category::Parameter,
            // A loaded checkpoint is the model itself, unless the program has another copy of the parameters.
            FrameMemory::Checkpoint if self.facts.has_names => Category::Checkpoint,
            FrameMemory::Checkpoint if self.learned.parameters.sizes.contains(&block.memory.requested) => {
                Category::Checkpoint
            }
            FrameMemory::Checkpoint => Category::Parameter,
        };
        is(category, rule.id)
    }

    fn loading(&self, tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        let never_used = block.position.step.is_none() && end.now.step.is_none() && !end.is_truncated;
        match block.proof {
            Proof::ModuleMoved => is(Category::Parameter, CategoryRuleId::ParameterModuleMoved),
            Proof::ModelLoaded | Proof::None if never_used && freed_by_move(tracker, end) => {
                is(Category::Parameter, CategoryRuleId::ParameterReplacedByMove)
            }
            // Weights that a model takes over, and that it replaces before its first call.
            Proof::None
                if never_used
                    && self.learned.loads_parameters(block.site.stack)
                    && !self.in_one_call(&block.site, end) =>
            {
                is(Category::Parameter, CategoryRuleId::ParameterSameSite)
            }
            Proof::ModelLoaded if never_used => is(Category::Temporary, CategoryRuleId::TemporaryFreedBeforeForward),
            Proof::ModelLoaded => is(Category::Parameter, CategoryRuleId::ParameterModelLoaded),
            _ if self.learned.loads_data(block.site.stack) && !self.is_kept(block, end) => {
                is(Category::Input, CategoryRuleId::InputLaterBatches)
            }
            _ if never_used => is(Category::Temporary, CategoryRuleId::TemporaryFreedBeforeForward),
            // The recording shows no step that could use the block.
            _ if end.now.step.is_none() => is(Category::Unknown, CategoryRuleId::UnknownAtLoad),
            _ if tracker.is_inference() => {
                let equal_blocks = self.learned.at_load.sizes.get(&block.memory.requested).copied().unwrap_or_default();
                let is_kept = self.learned.model_calls >= block.model_calls + CACHED_CALLS;
                let may_cache = self.facts.has_names && !self.facts.serves(block.site.stack);
                if may_cache && is_kept && equal_blocks >= CACHE_BLOCKS && equal_blocks % 2 == 0 {
                    is(Category::KvCache, CategoryRuleId::KvCacheEqualBlocks)
                } else if self.facts.has_names && is_kept && self.learned.data.loads_batches {
                    is(Category::KeptTensor, CategoryRuleId::KeptTensorAtLoad)
                } else if self.facts.has_names {
                    is(Category::Input, CategoryRuleId::InputUnnamedAtLoad)
                } else {
                    is(Category::Unknown, CategoryRuleId::UnknownAtLoad)
                }
            }
            _ if !self.facts.has_names && self.learned.gradient_sizes.contains(&block.memory.requested) => {
                is(Category::Parameter, CategoryRuleId::ParameterGradientSized)
            }
            _ if self.outlives_batches(block, end) => is(Category::KeptTensor, CategoryRuleId::KeptTensorAtLoad),
            _ if self.facts.has_names => is(Category::Input, CategoryRuleId::InputUnnamedAtLoad),
            _ if !self.learned.gradient_sizes.is_empty() => is(Category::Input, CategoryRuleId::InputNoGradientAtLoad),
            _ => is(Category::Unknown, CategoryRuleId::UnknownAtLoad),
        }
    }

    /// Whether a block from before the first step outlives the batches that later steps load. Without such batches,
    /// what is allocated in advance is the input of every step.
    fn outlives_batches(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
        let outlived = steps_outlived(block, end.now);
        let is_kept = outlived >= KEPT_STEPS || end.free.is_none() && outlived > 1;
        is_kept && self.learned.data.loads_batches && (self.facts.has_names || !self.learned.gradient_sizes.is_empty())
    }

    fn forward(&self, tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        if self.in_one_call(&block.site, end) {
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
        if (tracker.is_inference() || block.phase.is_forward_only()) && !collected {
            let outlives = self.learned.model_calls.saturating_sub(block.model_calls);
            let may_cache = self.facts.may_cache(block.site.stack);
            let growth = self.learned.growth.by_stack.get(&block.site.stack);
            let inside = !tracker.stacks().facts(block.site.stack).outermost_compute.is_none();
            // A model with a cache does constant work per token, so the sizes of other stacks do not grow. The last
            // version of a cache is never replaced: it is still allocated at the end. `is_cache` covers that version.
            // A further model can be called in between, and a cache that is cut back is replaced after the call.
            let is_replaced = |g: &StackGrowth| {
                let by_next = outlives > 0 && g.previous == block.model_calls;
                let is_cut = outlives == 0 && !self.learned.in_model();
                end.free.is_some() && (by_next || is_cut || (1..=GROWN_CALLS).contains(&outlives))
            };
            let has_constant_work = STEADY_PART * self.learned.growth.steady >= self.learned.growth.frequent;
            let grows = |g: &StackGrowth| {
                g.is_cache || inside && is_replaced(g) && g.grown >= 2 && g.is_paired && has_constant_work
            };
            if may_cache && growth.is_some_and(grows) {
                return is(Category::KvCache, CategoryRuleId::KvCacheGrows);
            }
            if tracker.is_inference() && inside && outlives >= CACHED_CALLS {
                // A cache is allocated once, or in attention. A block that every call allocates anew and that the
                // program keeps is a result.
                let is_frequent =
                    growth.is_some_and(|g| 2 * g.calls > self.learned.model_calls.saturating_sub(g.first));
                if self.facts.attends(block.site.stack) || may_cache && !is_frequent {
                    return is(Category::KvCache, CategoryRuleId::KvCacheKeptAcrossCalls);
                }
                return is(Category::KeptTensor, CategoryRuleId::KeptTensorResult);
            }
        }
        if let Some(classification) = self.kept_or_input(tracker, block, end) {
            return classification;
        }
        match block.phase {
            Phase::Recompute => is(Category::Activation, CategoryRuleId::ActivationRecomputed),
            _ => is(Category::Activation, CategoryRuleId::ActivationForward),
        }
    }

    /// The category of a forward pass's block that its model does not compute, or that later calls of the model find;
    /// `None` for an activation.
    fn kept_or_input(
        &self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> Option<BlockClassification> {
        if self.replaces_parameter(block, end) {
            return Some(is(Category::Parameter, CategoryRuleId::ParameterSameSite));
        }
        let facts = tracker.stacks().facts(block.site.stack);
        // Code that makes no autograd node computes nothing that a backward pass needs.
        let is_outside = facts.outermost_compute.is_none() && !facts.made_node && !facts.inside_node;
        // A stack without Python frames does not show whether the model allocates.
        let is_outside = is_outside && !tracker.stacks().is_without_python(block.site.stack);
        let is_plain = is_outside && facts.rule.is_none() && block.proof.is_open();
        // Later calls find what the graph of an evaluation holds, such as its loss.
        let burst = self.learned.burst(block.site.stack, block.memory.requested);
        let is_found = self.learned.model_calls >= block.model_calls + CACHED_CALLS;
        let may_cache = is_plain && !self.facts.serves(block.site.stack);
        if may_cache && tracker.is_inference() && is_found && burst >= CACHE_BLOCKS && burst.is_multiple_of(2) {
            return Some(is(Category::KvCache, CategoryRuleId::KvCacheEqualBlocks));
        }
        if is_plain && !block.in_recorded_eval && self.is_kept(block, end) {
            return Some(is(Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps));
        }
        // A line that loads a batch, calls the model and joins its results.
        if is_plain && block.phase == Phase::Eval && self.learned.joins(block.site.stack, block.memory.requested) {
            return Some(is(Category::KeptTensor, CategoryRuleId::KeptTensorResult));
        }
        if self.learned.loads_data(block.site.stack) && facts.rule.is_none() || is_plain && self.loads_data(&block.site)
        {
            return Some(is(Category::Input, CategoryRuleId::InputOtherBatches));
        }
        let is_found_after_step = || end.now.optimizer_steps > block.position.optimizer_steps;
        let outlives = || outlives_step(block, end) || is_found_after_step() && self.learned.keeps(block.site.stack);
        if block.phase == Phase::Forward && is_plain && outlives() {
            return Some(is(Category::KeptTensor, CategoryRuleId::KeptTensorOutsideModel));
        }
        // The backward pass through this line has freed its graph. What later steps find is held by the program.
        let outlives_graph = || {
            steps_outlived(block, end.now) >= KEPT_STEPS
                || end.is_truncated && is_found_after_step() && self.learned.keeps(block.site.stack)
        };
        if block.phase == Phase::Forward
            && facts.made_node
            && block.proof.is_open()
            && outlives_graph()
            && self.learned.consumes_graphs(block.memory.size, end.now)
        {
            return Some(is(Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps));
        }
        if !block.phase.is_forward_only() || !block.proof.is_open() || block.in_recorded_eval {
            return None;
        }
        // Without gradients, nothing but the program holds a result of an earlier call. What a training step computes
        // without gradients, such as a teacher's results, is freed after the step's backward pass.
        let outlives = self.learned.model_calls.saturating_sub(block.model_calls);
        let same_pass = block.position.backward_passes == end.now.backward_passes;
        let grows = || self.learned.growth.by_stack.get(&block.site.stack).is_some_and(|growth| growth.grown >= 2);
        let is_kept =
            self.is_kept(block, end) || same_pass && (outlives >= CACHED_CALLS || is_plain && outlives > 0 && grows());
        let collected = end.free.is_some_and(|e| e.flags.contains(Flags::IN_GC));
        if is_kept && !collected && (is_plain || !tracker.is_inference()) {
            return Some(is(Category::KeptTensor, CategoryRuleId::KeptTensorResult));
        }
        // Code after an evaluation, with gradients enabled again.
        let records = block.flags.contains(Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED));
        (is_plain && records && !tracker.is_inference())
            .then_some(is(Category::Input, CategoryRuleId::InputAfterEvaluation))
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
        if is_recorded(block.flags) && block.proof != Proof::AccumulatesGradient {
            return self.recorded_backward(tracker, block, end);
        }
        if outlives_backward(block, now) {
            return is(Category::Gradient, CategoryRuleId::GradientOutlivesBackward);
        }
        if end.free.is_some_and(|e| tracker.is_outside_engine(e)) {
            return is(Category::Gradient, CategoryRuleId::GradientFreedOutsideEngine);
        }
        if end.free.is_some_and(|e| clears_gradients(tracker, e)) {
            return is(Category::Gradient, CategoryRuleId::GradientCleared);
        }
        if end.is_truncated {
            if !matches!(now.phase, Phase::Backward | Phase::Recompute) {
                return is(Category::Gradient, CategoryRuleId::GradientOutlivesBackward);
            }
            match block.proof {
                Proof::AccumulatesGradient => return is(Category::Gradient, CategoryRuleId::GradientAccumulateGrad),
                // A failed request makes the recorder read the names of all gradients.
                Proof::ParameterSized if !(self.learned.out_of_memory && self.facts.has_gradient_names) => {
                    return is(Category::Gradient, CategoryRuleId::GradientParameterSized);
                }
                _ => {}
            }
        }
        if self.in_one_call(&block.site, end) && (self.facts.has_nodes || !block.site.stack.is_none()) {
            return is(Category::Temporary, CategoryRuleId::TemporaryFreedByNode);
        }
        is(Category::AutogradDetail, CategoryRuleId::AutogradDetailBetweenNodes)
    }

    /// The category of a block that a recorded backward pass allocates. A block that outlives the pass is saved for a
    /// further one, or is its input.
    fn recorded_backward(
        &self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        let outside = || end.free.is_some_and(|e| !end.is_truncated && tracker.is_outside_engine(e));
        if self.in_one_call(&block.site, end) {
            is(Category::Temporary, CategoryRuleId::TemporaryFreedByNode)
        } else if self.learned.parameters.sizes.contains(&block.memory.requested) && outside() {
            // `torch.func.grad` and `autograd.grad` return gradients of parameters.
            is(Category::Gradient, CategoryRuleId::GradientFreedOutsideEngine)
        } else if end.is_truncated || outlives_backward(block, end.now) {
            is(Category::Activation, CategoryRuleId::ActivationRecordedBackward)
        } else {
            is(Category::AutogradDetail, CategoryRuleId::AutogradDetailBetweenNodes)
        }
    }

    fn optimizer(&self, tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        match block.proof {
            Proof::OptimizerState => is(Category::OptimizerState, CategoryRuleId::OptimizerStateInitialization),
            _ if block.position.phase_changes == end.now.phase_changes => {
                is(Category::Temporary, CategoryRuleId::TemporaryFreedInOptimizer)
            }
            // A closure that the optimizer calls has its own phases.
            Proof::OptimizerStep if freed_by_same_step(tracker, block, end) => {
                is(Category::Temporary, CategoryRuleId::TemporaryFreedInOptimizer)
            }
            Proof::OptimizerStep => is(Category::OptimizerState, CategoryRuleId::OptimizerStateOutlivesStep),
            Proof::GradientWork => is(Category::Temporary, CategoryRuleId::TemporaryGradientWork),
            _ => self.around_optimizer(block, end).unwrap_or(is(Category::Unknown, CategoryRuleId::UnknownInOptimizer)),
        }
    }

    /// The category of a block that user code without gradients allocates around an optimizer's step, such as an
    /// average of weights or a metric. `None` if nothing shows it.
    fn around_optimizer(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> Option<BlockClassification> {
        let (category, rule) = if self.replaces_parameter(block, end) {
            (Category::Parameter, CategoryRuleId::ParameterSameSite)
        } else if self.is_kept(block, end) {
            (Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps)
        } else if self.loads_data(&block.site) {
            (Category::Input, CategoryRuleId::InputOtherBatches)
        } else if outlives_step(block, end) {
            (Category::KeptTensor, CategoryRuleId::KeptTensorOutsideModel)
        } else {
            return None;
        };
        Some(is(category, rule))
    }

    fn other(&self, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> BlockClassification {
        let is_open = block.proof == Proof::None;
        if is_open && block.flags.contains(Flags::PREEXISTING) && block.site.stack.is_none() {
            // Nothing shows what made a block that is older than the recording. How long it lives is known.
            let is_kept = steps_outlived(block, end.now) >= KEPT_STEPS;
            return if is_kept {
                is(Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps)
            } else {
                is(Category::Unknown, CategoryRuleId::NoCategoryRule)
            };
        }
        let without_gradients = is_open && is_without_gradients(block.flags);
        let outlives_phase = end.now.phase_changes > block.position.phase_changes && block.position.step.is_some();
        if self.in_one_call(&block.site, end) {
            return is(Category::Temporary, CategoryRuleId::TemporaryFreedByCall);
        }
        if without_gradients && let Some(classification) = self.around_optimizer(block, end) {
            return classification;
        }
        if self.replaces_parameter(block, end) {
            is(Category::Parameter, CategoryRuleId::ParameterSameSite)
        } else if is_open && self.is_kept(block, end) {
            is(Category::KeptTensor, CategoryRuleId::KeptTensorOutlivesSteps)
        } else if self.loads_data(&block.site) {
            is(Category::Input, CategoryRuleId::InputOtherBatches)
        } else if is_open && outlives_phase && !(without_gradients && is_scalar(block.memory.requested)) {
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

/// How many steps have begun since the block's allocation.
fn steps_outlived(block: &BlockAllocation, now: &ProgramPosition) -> u32 {
    let number = |step: Option<u32>| step.map_or(0, |step| step + 1);
    number(now.step).saturating_sub(number(block.position.step))
}

/// Whether the step that allocated the block has ended.
fn outlives_step(block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
    end.now.step > block.position.step || end.is_truncated && end.now.optimizer_steps > block.position.optimizer_steps
}

/// Whether an optimizer frees the block in the step that allocated it.
fn freed_by_same_step(tracker: &PhaseTracker, block: &BlockAllocation, end: &LifetimeEnd<'_>) -> bool {
    let steps = |stack| {
        let facts = tracker.stacks().facts(stack);
        facts.optimizer.is_some() || facts.rule.is_some_and(|rule| rule.meaning == Meaning::OptimizerStep)
    };
    block.position.step == end.now.step && !end.is_truncated && end.free.is_some_and(|e| steps(e.stack))
}

/// Whether an event is part of clearing gradients.
fn clears_gradients(tracker: &PhaseTracker, e: &Event) -> bool {
    tracker.stacks().facts(e.stack).rule.is_some_and(|rule| rule.meaning == Meaning::ZeroGrad)
}

/// Whether the move or the cast of a module frees the block.
fn freed_by_move(tracker: &PhaseTracker, end: &LifetimeEnd<'_>) -> bool {
    let rule = |stack| tracker.stacks().facts(stack).rule.map(|rule| rule.id);
    end.free.is_some_and(|e| rule(e.stack) == Some(PhaseRuleId::LoadModuleMoved))
}

const fn is(category: Category, rule: CategoryRuleId) -> BlockClassification {
    BlockClassification { category, rule }
}
