//! What is proven about a block at its allocation: by its tensor name, by the frames of its stack, by its pool and by
//! its size. A proof holds whatever the block's lifetime is.

use std::collections::HashSet;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Definitions, StackNode};
use memtrace_trace::ids::{FrameId, StackId};

use crate::passes::phase::{EventClassification, Phase};
use crate::rules::{
    CategoryRule, FrameMemory, Meaning, PhaseRuleId, category_rule, ends_autocast, is_attention, is_cache_name,
    is_library_module, is_lt_workspace_size, is_workspace_size,
};
use memtrace_input::AddressBuildHasher;
use memtrace_replay::AllocationNames;

/// What a name, a stack, a size or a pool proves about a block, whatever its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Proof {
    /// Nothing.
    #[default]
    None,
    /// The block has a tensor name of this kind.
    Named(TensorKind),
    /// The block is a buffer, and its name is one that people give to a key/value cache.
    NamedCache,
    /// A category rule matches the frames that allocated the block.
    FrameRule(&'static CategoryRule),
    /// A phase rule for building, moving or filling models matches.
    ModelLoaded,
    /// The phase rule for moving a module matches.
    ModuleMoved,
    /// A phase rule for the optimizer's state initialization matches.
    OptimizerState,
    /// An optimizer's step allocated the block.
    OptimizerStep,
    /// Work on gradients outside an optimizer's step allocated the block.
    GradientWork,
    /// The block is in a private pool.
    PrivatePool,
    /// The autograd node `AccumulateGrad`, which passes gradients to parameters, was running.
    AccumulatesGradient,
    /// The block is as large as a library's workspace. It is a workspace if it outlives its step.
    WorkspaceSized,
    /// The block is as large as a cuBLASLt workspace. It is one if it is never freed and cuBLAS has a workspace.
    LtWorkspaceSized,
    /// The block is as large as a parameter. It is a gradient if it comes from a backward pass that was cut short.
    ParameterSized,
    /// The block is half as large as a parameter, and its stack casts tensors. It is a weight that autocast casts.
    WeightCast,
}

/// What the definitions of a recording show about stacks and nodes.
#[derive(Clone, Debug)]
pub(super) struct DefinitionFacts {
    /// By stack: the category rule of the innermost frame that has one.
    rules: Vec<Option<&'static CategoryRule>>,
    /// By stack: the frame that this rule matched.
    frames: Vec<FrameId>,
    /// By stack: whether one of the frames is attention code. `may_cache`: whether a model can keep keys and values
    /// that this stack allocates.
    attends: Vec<bool>,
    may_cache: Vec<bool>,
    /// Stacks whose forward call made an autograd node that casts (`ToCopyBackward`).
    casts: HashSet<StackId, AddressBuildHasher>,
    /// Stacks at the end of an autocast region.
    ends_autocast: HashSet<StackId, AddressBuildHasher>,
    /// By context: whether it is the node `AccumulateGrad`.
    accumulates: Vec<bool>,
    pub(super) has_nodes: bool,
    /// Whether parameters have names. If so, a block without a name is not a parameter.
    pub(super) has_names: bool,
}

impl DefinitionFacts {
    pub(super) fn new(definitions: &Definitions, has_names: bool) -> DefinitionFacts {
        let frame_rules: Vec<_> = definitions.frames.iter().map(category_rule).collect();
        let ends: Vec<bool> = definitions.frames.iter().map(ends_autocast).collect();
        let ends = |stack: &StackNode| ends.get(stack.frame.index()).is_some_and(|ends| *ends);
        let ends = definitions.stacks.iter().enumerate().filter(|(_, stack)| ends(stack));
        let ends: HashSet<StackId, AddressBuildHasher> = ends.map(|(i, _)| StackId(i as u32)).collect();
        let mut rules: Vec<Option<&'static CategoryRule>> = Vec::with_capacity(definitions.stacks.len());
        let mut frames: Vec<FrameId> = Vec::with_capacity(definitions.stacks.len());
        let mut attends: Vec<bool> = Vec::with_capacity(definitions.stacks.len());
        let mut may_cache: Vec<bool> = Vec::with_capacity(definitions.stacks.len());
        // By frame: whether it is native, whether it is attention code, and whether it belongs to a module of
        // PyTorch's.
        let kinds = definitions.frames.iter().map(|f| (f.native, is_attention(f), is_library_module(f)));
        let kinds: Vec<(bool, bool, bool)> = kinds.collect();
        for (i, node) in definitions.stacks.iter().enumerate() {
            let caller = node.parent.index();
            let (in_attention, may_keep) =
                if caller < i { (attends[caller], may_cache[caller]) } else { (false, true) };
            let (native, attention, library) = kinds.get(node.frame.index()).copied().unwrap_or_default();
            attends.push(in_attention || attention);
            // The innermost Python frame decides.
            may_cache.push(if native { may_keep } else { in_attention || attention || !library });
            let inherited = if caller < i { (rules[caller], frames[caller]) } else { (None, FrameId::NONE) };
            let (rule, frame) = match frame_rules.get(node.frame.index()).copied().flatten() {
                Some(rule) => (Some(rule), node.frame),
                None => inherited,
            };
            rules.push(rule);
            frames.push(frame);
        }
        let casts = definitions.contexts.iter().filter(|c| c.node.starts_with("ToCopyBackward"));
        DefinitionFacts {
            rules,
            frames,
            attends,
            may_cache,
            casts: casts.map(|c| c.forward).filter(|stack| !stack.is_none()).collect(),
            ends_autocast: ends,
            accumulates: definitions.contexts.iter().map(|c| &*c.node == "AccumulateGrad").collect(),
            has_nodes: definitions.contexts.iter().any(|c| !c.node.is_empty()),
            has_names,
        }
    }

    /// The frame that the category rule of a stack matched; `NONE` without a rule.
    #[inline]
    pub(super) fn rule_frame(&self, stack: StackId) -> FrameId {
        self.frames.get(stack.index()).copied().unwrap_or(FrameId::NONE)
    }

    /// Whether one of the frames of a stack is attention code.
    pub(super) fn attends(&self, stack: StackId) -> bool {
        self.attends.get(stack.index()).is_some_and(|attends| *attends)
    }

    /// Whether a model can keep keys and values that this stack allocates.
    pub(super) fn may_cache(&self, stack: StackId) -> bool {
        self.may_cache.get(stack.index()).is_some_and(|may| *may)
    }

    /// Whether a stack is at the end of an autocast region.
    pub(super) fn ends_autocast(&self, stack: StackId) -> bool {
        self.ends_autocast.contains(&stack)
    }

    /// What is proven about the block that `e` allocates. `parameter_sizes`: the requested sizes of
    /// earlier parameters.
    #[inline]
    pub(super) fn proof(
        &self,
        e: &Event,
        requested: u64,
        classification: &EventClassification,
        name: Option<&AllocationNames>,
        parameter_sizes: &HashSet<u64, AddressBuildHasher>,
    ) -> Proof {
        let frame_rule = self.rules.get(e.stack.index()).copied().flatten();
        if let Some(rule) = frame_rule.filter(|rule| rule.allocates == FrameMemory::Gathered) {
            return Proof::FrameRule(rule);
        }
        if let Some(AllocationNames { kind, names, .. }) = name.filter(|name| name.kind != TensorKind::Other) {
            let is_cache = *kind == TensorKind::Buffer && names.iter().any(|name| is_cache_name(name));
            return if is_cache { Proof::NamedCache } else { Proof::Named(*kind) };
        }
        if let Some(rule) = frame_rule {
            return Proof::FrameRule(rule);
        }
        if e.pool != 0 {
            return Proof::PrivatePool;
        }
        match classification.meaning() {
            Some(Meaning::Load) if classification.rule == PhaseRuleId::LoadModuleMoved => return Proof::ModuleMoved,
            Some(Meaning::Load) => return Proof::ModelLoaded,
            Some(Meaning::OptimizerState) => return Proof::OptimizerState,
            Some(Meaning::OptimizerStep) => return Proof::OptimizerStep,
            Some(Meaning::GradientWork) => return Proof::GradientWork,
            _ => {}
        }
        match classification.phase {
            Phase::Backward if self.accumulates.get(e.context.index()).is_some_and(|a| *a) => {
                Proof::AccumulatesGradient
            }
            Phase::Backward if parameter_sizes.contains(&requested) => Proof::ParameterSized,
            Phase::Forward | Phase::Backward | Phase::Eval | Phase::Recompute if is_workspace_size(requested) => {
                Proof::WorkspaceSized
            }
            Phase::Forward | Phase::Backward | Phase::Eval | Phase::Recompute if is_lt_workspace_size(requested) => {
                Proof::LtWorkspaceSized
            }
            Phase::Forward | Phase::Recompute
                if self.casts.contains(&e.stack) && parameter_sizes.contains(&(2 * requested)) =>
            {
                Proof::WeightCast
            }
            _ => Proof::None,
        }
    }
}
