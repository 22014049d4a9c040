//! Finds what is proven about a block at its allocation, from the definitions of a recording and from what earlier
//! allocations have shown.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::{TensorKind, WORKSPACES_TOPIC};
use memtrace_trace::event::{Event, Flags};
use memtrace_trace::file::{Context, Definitions, StackNode, TensorName};
use memtrace_trace::ids::{FrameId, StackId};

use super::block::{BlockClassification, is_recorded};
use super::learning::Learned;
use super::proof::Proof;
use super::table::Category;
use crate::passes::phase::{EventClassification, Phase};
use crate::rules::{
    CategoryRule, FrameMemory, Meaning, PhaseRuleId, UsesCublas, cache_counterpart, captures_graph, category_rule,
    ends_autocast, frame_uses_cublas, is_attention, is_cache_name, is_graphs_own_pool, is_library_module,
    is_lt_workspace_size, is_pytorch, is_workspace_size, node_uses_cublas, serving_stage, stands_in_for_kernel,
};
use memtrace_input::{AddressBuildHasher, KeptBlock};
use memtrace_replay::AllocationNames;

/// The facts that the definitions of a recording show about one stack.
#[derive(Clone, Copy, Debug, Default)]
struct StackProof {
    /// The category rule of the innermost frame that has one, and that frame.
    rule: Option<&'static CategoryRule>,
    frame: FrameId,
    /// The innermost Python frame outside PyTorch.
    caller: FrameId,
    /// Whether one of the frames is attention code.
    attends: bool,
    /// Whether no model keeps keys and values that this stack allocates: the innermost Python frame is PyTorch's.
    never_caches: bool,
    /// Whether an engine that serves models calls this stack. It allocates its cache in functions that have rules.
    serves: bool,
    /// Whether code of PyTorch that captures CUDA graphs calls this stack.
    captures: bool,
    uses_cublas: UsesCublas,
}

/// The facts that the definitions of a recording show about stacks and nodes.
#[derive(Clone, Debug)]
pub(super) struct DefinitionFacts {
    stacks: Vec<StackProof>,
    /// Stacks whose forward call made an autograd node that casts (`ToCopyBackward`).
    casts: HashSet<StackId, AddressBuildHasher>,
    /// Stacks at the end of an autocast region.
    ends_autocast: HashSet<StackId, AddressBuildHasher>,
    /// By context: whether it is the node `AccumulateGrad`, and whether it is a node that multiplies matrices.
    nodes: Vec<(bool, UsesCublas)>,
    /// The names of buffers that are keys or values: a module has both, in the same shape.
    cache_buffers: HashSet<Box<str>>,
    /// The private pools that PyTorch made for CUDA graphs.
    graph_pools: HashSet<u16>,
    /// Whether the recorder knows which blocks are workspaces of cuBLAS. If not, sizes decide.
    pub(super) knows_workspaces: bool,
    pub(super) has_nodes: bool,
    /// Whether parameters have names. If so, a block without a name is not a parameter.
    pub(super) has_names: bool,
    /// Whether gradients have names.
    pub(super) has_gradient_names: bool,
    /// In a rotated trace, by `seq` of the allocation: how earlier events classified blocks.
    earlier: HashMap<u64, BlockClassification, AddressBuildHasher>,
}

impl DefinitionFacts {
    pub(super) fn new(definitions: &Definitions, has_names: bool) -> DefinitionFacts {
        let ends: Vec<bool> = definitions.frames.iter().map(ends_autocast).collect();
        let ends = |stack: &StackNode| ends.get(stack.frame.index()).is_some_and(|ends| *ends);
        let ends = definitions.stacks.iter().enumerate().filter(|(_, stack)| ends(stack));
        let ends: HashSet<StackId, AddressBuildHasher> = ends.map(|(i, _)| StackId(i as u32)).collect();
        let casts = definitions.contexts.iter().filter(|c| c.node.starts_with("ToCopyBackward"));
        let is_gradient = |name: &TensorName| name.kind == TensorKind::Gradient;
        let graph_pools = definitions.pools.iter().filter(|(_, id)| is_graphs_own_pool(**id));
        DefinitionFacts {
            stacks: stack_proofs(definitions),
            casts: casts.map(|c| c.forward).filter(|stack| !stack.is_none()).collect(),
            ends_autocast: ends,
            nodes: definitions
                .contexts
                .iter()
                .map(|c| {
                    (
                        &*c.node == "AccumulateGrad",
                        if c.node.is_empty() { UsesCublas::Unknown } else { node_uses_cublas(&c.node) },
                    )
                })
                .collect(),
            knows_workspaces: definitions.notices.iter().any(|notice| &*notice.topic == WORKSPACES_TOPIC),
            cache_buffers: cache_buffers(definitions),
            graph_pools: graph_pools.map(|(pool, _)| *pool).collect(),
            has_nodes: definitions.contexts.iter().any(|c| !c.node.is_empty()),
            has_names,
            has_gradient_names: has_names && definitions.tensor_names.iter().any(is_gradient),
            earlier: HashMap::default(),
        }
    }

    /// Adds what is known about the blocks that are older than the kept events of a rotated trace.
    pub(super) fn set_earlier(&mut self, blocks: &[KeptBlock]) {
        let classification = |block: &KeptBlock| {
            let (category, rule) = block.classification.as_ref()?;
            let (category, rule) = (Category::named(category)?, rule.parse().ok()?);
            Some((block.seq, BlockClassification { category, rule }))
        };
        self.earlier = blocks.iter().filter_map(classification).collect();
    }

    /// How events that a rotated trace has dropped classified the block of this allocation.
    #[inline]
    pub(super) fn earlier_classification(&self, e: &Event) -> Option<BlockClassification> {
        if e.flags.contains(Flags::PREEXISTING) { self.earlier.get(&e.seq).copied() } else { None }
    }

    fn stack(&self, stack: StackId) -> StackProof {
        self.stacks.get(stack.index()).copied().unwrap_or_default()
    }

    /// The innermost Python frame of a stack outside PyTorch; `NONE` without one.
    #[inline]
    pub(super) fn caller(&self, stack: StackId) -> FrameId {
        self.stack(stack).caller
    }

    /// Whether code of PyTorch that captures CUDA graphs calls a stack.
    #[inline]
    pub(super) fn captures(&self, stack: StackId) -> bool {
        self.stack(stack).captures
    }

    /// Whether PyTorch made a private pool for a CUDA graph.
    pub(super) fn is_graph_pool(&self, pool: u16) -> bool {
        self.graph_pools.contains(&pool)
    }

    /// The frame that the category rule of a stack matched; `NONE` without a rule.
    #[inline]
    pub(super) fn rule_frame(&self, stack: StackId) -> FrameId {
        self.stack(stack).frame
    }

    /// Whether one of the frames of a stack is attention code, in a program other than a server.
    pub(super) fn attends(&self, stack: StackId) -> bool {
        self.stack(stack).attends && !self.serves(stack)
    }

    /// Whether a model can keep keys and values that this stack allocates.
    pub(super) fn may_cache(&self, stack: StackId) -> bool {
        !self.stack(stack).never_caches && !self.serves(stack)
    }

    /// Whether an engine that serves models calls a stack.
    pub(super) fn serves(&self, stack: StackId) -> bool {
        self.stack(stack).serves
    }

    /// Whether a stack is at the end of an autocast region.
    pub(super) fn ends_autocast(&self, stack: StackId) -> bool {
        self.ends_autocast.contains(&stack)
    }

    /// The proof for the block that `e` allocates. `learned` has the facts that earlier allocations have shown.
    #[inline]
    pub(super) fn proof(
        &self,
        e: &Event,
        requested: u64,
        classification: &EventClassification,
        name: Option<&AllocationNames>,
        learned: &Learned,
    ) -> Proof {
        let stack = self.stack(e.stack);
        let frame_rule = stack.rule;
        if let Some(rule) = frame_rule.filter(|rule| rule.allocates == FrameMemory::Gathered) {
            return Proof::FrameRule(rule);
        }
        if let Some(AllocationNames { kind, names, .. }) = name.filter(|name| name.kind != TensorKind::Other) {
            let is_keys = |name: &str| is_cache_name(name) || self.cache_buffers.contains(name);
            let is_cache = *kind == TensorKind::Buffer && names.iter().any(|name| is_keys(name));
            return if is_cache { Proof::NamedCache } else { Proof::Named(*kind) };
        }
        if let Some(rule) = frame_rule {
            return Proof::FrameRule(rule);
        }
        if e.pool != 0 {
            return Proof::PrivatePool(e.pool);
        }
        if e.flags.contains(Flags::CUBLAS_WORKSPACE) {
            return Proof::CublasWorkspace;
        }
        match classification.meaning() {
            Some(Meaning::Load) if classification.rule == PhaseRuleId::LoadModuleMoved => return Proof::ModuleMoved,
            Some(Meaning::Load) => return Proof::ModelLoaded,
            Some(Meaning::OptimizerState) => return Proof::OptimizerState,
            Some(Meaning::OptimizerStep) => return Proof::OptimizerStep,
            Some(Meaning::GradientWork) => return Proof::GradientWork,
            _ => {}
        }
        let phase = classification.phase;
        // The recorder does not know blocks that are older than the recording. Their size can identify them.
        let by_size = !self.knows_workspaces || e.flags.contains(Flags::PREEXISTING);
        let computes = phase.is_forward_only() || matches!(phase, Phase::Forward | Phase::Backward | Phase::Recompute);
        let (accumulates, by_node) = self.nodes.get(e.context.index()).copied().unwrap_or_default();
        let by_node = if classification.phase == Phase::Backward { by_node } else { UsesCublas::Unknown };
        let uses_cublas = if by_node == UsesCublas::Unknown { stack.uses_cublas } else { by_node };
        match classification.phase {
            Phase::Backward if accumulates => Proof::AccumulatesGradient,
            _ if computes && by_size && is_workspace_size(requested) && uses_cublas != UsesCublas::No => {
                if uses_cublas == UsesCublas::Yes { Proof::WorkspaceSized } else { Proof::MaybeWorkspace }
            }
            Phase::Backward if !is_recorded(e.flags) && learned.may_be_gradient(requested) => Proof::ParameterSized,
            _ if computes && by_size && is_lt_workspace_size(requested) && uses_cublas != UsesCublas::No => {
                if uses_cublas == UsesCublas::Yes {
                    Proof::LtWorkspaceSized
                } else {
                    Proof::MaybeLtWorkspace
                }
            }
            Phase::Forward | Phase::Recompute
                if self.casts.contains(&e.stack) && learned.live.may_be_cast(requested) =>
            {
                Proof::WeightCast
            }
            _ => Proof::None,
        }
    }
}

/// The names of buffers whose module also has the counterpart, in the same shape of several dimensions.
fn cache_buffers(definitions: &Definitions) -> HashSet<Box<str>> {
    let buffers = definitions.tensor_names.iter().filter(|name| name.kind == TensorKind::Buffer);
    let buffers: HashSet<(&str, &str)> = buffers.map(|buffer| (&*buffer.name, &*buffer.shape)).collect();
    let is_pair = |(name, shape): &&(&str, &str)| {
        shape.contains(',') && cache_counterpart(name).is_some_and(|other| buffers.contains(&(other.as_str(), *shape)))
    };
    buffers.iter().filter(is_pair).map(|(name, _)| Box::from(*name)).collect()
}

/// The facts of each stack. A parent has a smaller id than its child, so its facts are known first.
fn stack_proofs(definitions: &Definitions) -> Vec<StackProof> {
    struct FrameProof {
        rule: Option<&'static CategoryRule>,
        native: bool,
        stands_in: bool,
        pytorch: bool,
        attends: bool,
        never_caches: bool,
        serves: bool,
        captures: bool,
        uses_cublas: UsesCublas,
    }
    let frames: Vec<FrameProof> = definitions
        .frames
        .iter()
        .map(|frame| FrameProof {
            rule: category_rule(frame),
            native: frame.native,
            stands_in: stands_in_for_kernel(frame),
            pytorch: is_pytorch(frame),
            attends: is_attention(frame),
            never_caches: is_library_module(frame),
            serves: serving_stage(frame).is_some(),
            captures: captures_graph(frame),
            uses_cublas: frame_uses_cublas(frame),
        })
        .collect();
    let mut stacks: Vec<StackProof> = Vec::with_capacity(definitions.stacks.len());
    for (i, node) in definitions.stacks.iter().enumerate() {
        let mut stack = if node.parent.index() < i { stacks[node.parent.index()] } else { StackProof::default() };
        if let Some(frame) = frames.get(node.frame.index()) {
            if frame.rule.is_some() {
                (stack.rule, stack.frame) = (frame.rule, node.frame);
            }
            if !frame.native && !frame.stands_in {
                stack.attends |= frame.attends;
                stack.serves |= frame.serves;
                stack.captures |= frame.captures;
                stack.never_caches = frame.never_caches && !stack.attends;
                stack.uses_cublas = frame.uses_cublas;
                if !frame.pytorch {
                    stack.caller = node.frame;
                }
            }
        }
        stacks.push(stack);
    }
    // The operations for which a stack made nodes are known exactly.
    let made = |context: &&Context| !context.node.is_empty() && !context.forward.is_none();
    let uses = |context: &Context| node_uses_cublas(&context.node);
    let unsure = definitions.contexts.iter().filter(made).filter(|context| uses(context) == UsesCublas::Unknown);
    let unsure: HashSet<StackId> = unsure.map(|context| context.forward).collect();
    for context in definitions.contexts.iter().filter(made) {
        let Some(stack) = stacks.get_mut(context.forward.index()) else { continue };
        match uses(context) {
            UsesCublas::Yes => stack.uses_cublas = UsesCublas::Yes,
            UsesCublas::No if stack.uses_cublas == UsesCublas::Unknown && !unsure.contains(&context.forward) => {
                stack.uses_cublas = UsesCublas::No;
            }
            _ => {}
        }
    }
    stacks
}
