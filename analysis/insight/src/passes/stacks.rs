//! The facts that each stack of a recording proves on its own, computed once before the events are streamed.
//!
//! A parent has a smaller id than its child, so one pass over the table computes each stack from its caller's facts.
//! Native frames are ignored: stacks that differ only in native frames have the same facts. So are the frames that
//! stand in for kernels in a dry run: a GPU would have seen native code there.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::rules::{
    FrameRule, Meaning, OptimizerRule, PYTORCH, frame_rule, library_name, optimizer_class, optimizer_of,
    stands_in_for_kernel,
};
use memtrace_replay::Contexts;

/// The facts about a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackFacts {
    /// The rule of the innermost frame that any rule matches.
    pub rule: Option<&'static FrameRule>,
    /// The frame that this rule matched.
    pub frame: FrameId,
    /// That frame calls Python code that no rule matches.
    pub has_inner_frame: bool,
    /// An activation checkpoint is running, with no engine call below it.
    pub in_checkpoint: bool,
    /// The autograd engine was called in this stack.
    pub in_engine: bool,
    /// Autograd later ran a node that this same stack had made. This proves a forward pass.
    pub made_node: bool,
    /// One of the callers has `made_node`: the call of an `autograd.Function`, which runs its body without gradients.
    pub inside_node: bool,
    /// The optimizer whose code runs.
    pub optimizer: Option<&'static OptimizerRule>,
    /// The stack at the outermost frame that computes, where the program calls its model.
    pub outermost_compute: StackId,
    /// The stack at the outermost frame of an `nn.Module`'s call. `NONE` outside such calls.
    pub outermost_module: StackId,
    /// The Python frame that makes this call, which is a line of the program; `NONE` without one.
    pub module_caller: FrameId,
    /// The stack has frames, and none is a Python frame.
    pub native_only: bool,
}

static NO_FACTS: StackFacts = StackFacts {
    rule: None,
    frame: FrameId::NONE,
    has_inner_frame: false,
    in_checkpoint: false,
    in_engine: false,
    made_node: false,
    inside_node: false,
    optimizer: None,
    outermost_compute: StackId::NONE,
    outermost_module: StackId::NONE,
    module_caller: FrameId::NONE,
    native_only: false,
};

/// The facts of every stack and node.
#[derive(Clone, Debug, Default)]
pub struct StackTable {
    stacks: Vec<StackFacts>,
    /// By stack: the first stack with the same Python frames. `None` if no frame of the recording is ignored.
    same_python: Option<Vec<StackId>>,
    recomputing_nodes: HashSet<ContextId>,
    /// The `outermost_module` of all stacks that made a node.
    trained_calls: HashSet<StackId>,
    contexts: Contexts,
    has_nodes: bool,
    is_without_pytorch: bool,
    /// The classes of the optimizers whose steps PyTorch marked.
    optimizer_classes: Vec<Box<str>>,
}

impl StackTable {
    /// Makes the table for the definitions of a recording.
    pub fn new(definitions: &Definitions) -> StackTable {
        let rules: Vec<_> = definitions.frames.iter().map(|f| (frame_rule(f), optimizer_of(f))).collect();
        let is_ignored = |(i, frame): (usize, &Frame)| {
            definitions.native_frames.contains_key(&FrameId(i as u32)) || stands_in_for_kernel(frame)
        };
        let ignored: Vec<bool> = definitions.frames.iter().enumerate().map(is_ignored).collect();
        let is_ignored = |frame: FrameId| ignored.get(frame.index()).copied().unwrap_or(false);
        let same_python = ignored.contains(&true).then(|| same_python(definitions, is_ignored));
        let python = |stack: StackId| match &same_python {
            Some(same) => same.get(stack.index()).copied().unwrap_or(stack),
            None => stack,
        };
        // `AccumulateGrad` belongs to a parameter, not to a call. While any graph exists, later calls use the same
        // node.
        let of_calls = definitions.contexts.iter().filter(|c| &*c.node != "AccumulateGrad");
        let made_nodes: HashSet<StackId> = of_calls.map(|c| python(c.forward)).collect();
        let mut stacks: Vec<StackFacts> = Vec::with_capacity(definitions.stacks.len());
        // By stack: the innermost Python frame.
        let mut callers: Vec<FrameId> = Vec::with_capacity(definitions.stacks.len());
        for (i, node) in definitions.stacks.iter().enumerate() {
            let parent = if node.parent.index() < i { stacks[node.parent.index()] } else { StackFacts::default() };
            let (rule, optimizer) = rules.get(node.frame.index()).copied().unwrap_or_default();
            let id = python(StackId(i as u32));
            let made_node = !id.is_none() && made_nodes.contains(&id);
            // A native frame is not a call of its own.
            let called = !is_ignored(node.frame);
            let inside_node = parent.inside_node || called && parent.made_node;
            let mut facts = StackFacts { made_node, inside_node, native_only: i > 0 && id.is_none(), ..parent };
            facts.has_inner_frame |= called && facts.rule.is_some();
            if let Some(rule) = rule {
                facts.rule = Some(rule);
                facts.frame = node.frame;
                facts.has_inner_frame = false;
                match rule.meaning {
                    Meaning::Engine => {
                        facts.in_engine = true;
                        facts.in_checkpoint = false;
                    }
                    Meaning::Checkpoint => facts.in_checkpoint = true,
                    Meaning::Compute => {
                        if facts.outermost_compute.is_none() {
                            facts.outermost_compute = id;
                        }
                        if facts.outermost_module.is_none() && rule.is_module_call() {
                            facts.outermost_module = id;
                            facts.module_caller = callers.get(node.parent.index()).copied().unwrap_or(FrameId::NONE);
                        }
                    }
                    _ => {}
                }
            }
            facts.optimizer = optimizer.or(parent.optimizer);
            stacks.push(facts);
            let caller = callers.get(node.parent.index()).copied().unwrap_or(FrameId::NONE);
            callers.push(if called { node.frame } else { caller });
        }
        let in_module = |facts: &&StackFacts| facts.made_node && !facts.outermost_module.is_none();
        let trained_calls = stacks.iter().filter(in_module).map(|facts| facts.outermost_module).collect();
        let recomputing_nodes = definitions
            .contexts
            .iter()
            .enumerate()
            .filter(|(_, c)| c.node.contains("CheckpointFunction"))
            .map(|(i, _)| ContextId(i as u32))
            .collect();
        // An autograd node's definition has a name. A context without a name is empty or the call of a module.
        let has_nodes = definitions.contexts.iter().any(|c| !c.node.is_empty());
        let ranges = definitions.labels.values().filter(|label| label.origin == LabelOrigin::RecordFunction);
        let optimizer_classes = ranges.filter_map(|label| optimizer_class(&label.text)).map(Box::from).collect();
        let contexts = Contexts::of(definitions);
        let is_native = |(i, facts): (usize, &StackFacts)| i == 0 || facts.native_only;
        let is_native_program = stacks.len() > 1 && stacks.iter().enumerate().all(is_native);
        let is_without_pytorch = !has_nodes && (is_native_program || calls_cuda_without_pytorch(definitions));
        StackTable {
            stacks,
            same_python,
            recomputing_nodes,
            trained_calls,
            contexts,
            has_nodes,
            is_without_pytorch,
            optimizer_classes,
        }
    }

    /// Whether a backward pass ran through what the module calls with this `outermost_module` computed.
    pub fn is_trained(&self, outermost_module: StackId) -> bool {
        self.trained_calls.contains(&outermost_module)
    }

    /// Whether a backward pass ran through what any module call computed.
    pub fn has_trained_calls(&self) -> bool {
        !self.trained_calls.is_empty()
    }

    /// The name of the optimizer whose code runs.
    pub fn optimizer_name(&self, stack: StackId) -> Option<String> {
        Some(self.facts(stack).optimizer?.class_name(&self.optimizer_classes))
    }

    /// Whether no Python frame runs. False for an id that was never defined, because such a stack can have any frames.
    pub fn is_without_python(&self, stack: StackId) -> bool {
        stack.is_none() || self.facts(stack).native_only
    }

    /// The facts about a stack. Default values for a stack that was never defined.
    #[inline]
    pub fn facts(&self, stack: StackId) -> &StackFacts {
        self.stacks.get(stack.index()).unwrap_or(&NO_FACTS)
    }

    /// The representative of all stacks with these Python frames; `NONE` if there are none.
    #[inline]
    pub fn python(&self, stack: StackId) -> StackId {
        match &self.same_python {
            Some(same) => same.get(stack.index()).copied().unwrap_or(stack),
            None => stack,
        }
    }

    /// Whether a node recomputes activations.
    #[inline]
    pub fn recomputes(&self, context: ContextId) -> bool {
        !context.is_none() && !self.recomputing_nodes.is_empty() && self.recomputing_nodes.contains(&context)
    }

    /// The meaning of each context.
    #[inline]
    pub fn contexts(&self) -> &Contexts {
        &self.contexts
    }

    /// Whether nothing that was recorded is PyTorch's: a program of CUDA, JAX or CuPy, in which nothing shows a phase.
    pub fn is_without_pytorch(&self) -> bool {
        self.is_without_pytorch
    }

    /// Whether any autograd node was recorded.
    pub fn has_nodes(&self) -> bool {
        self.has_nodes
    }

    /// Whether anything shows training: autograd nodes, a call of the autograd engine, an optimizer, or clearing
    /// gradients.
    pub fn may_train(&self) -> bool {
        let trains = |meaning: Meaning| {
            matches!(meaning, Meaning::OptimizerStep | Meaning::OptimizerState | Meaning::ZeroGrad | Meaning::Engine)
        };
        self.has_nodes || self.stacks.iter().any(|f| f.rule.is_some_and(|r| trains(r.meaning)))
    }

    /// Whether any stack has this meaning.
    pub fn any(&self, meaning: Meaning) -> bool {
        self.stacks.iter().any(|f| f.rule.is_some_and(|r| r.meaning == meaning))
    }
}

/// By stack: the first stack with the same Python frames, `NONE` if it has none.
fn same_python(definitions: &Definitions, is_ignored: impl Fn(FrameId) -> bool) -> Vec<StackId> {
    let mut first: HashMap<(StackId, FrameId), StackId> = HashMap::new();
    let mut same: Vec<StackId> = Vec::with_capacity(definitions.stacks.len());
    for (i, node) in definitions.stacks.iter().enumerate() {
        let caller = same.get(node.parent.index()).copied().unwrap_or(StackId::NONE);
        same.push(if i == 0 || is_ignored(node.frame) {
            caller
        } else {
            *first.entry((caller, node.frame)).or_insert(StackId(i as u32))
        });
    }
    same
}

/// Whether the objects that called CUDA are known and none of them is PyTorch's, nor any file of a frame.
fn calls_cuda_without_pytorch(definitions: &Definitions) -> bool {
    let callers = || definitions.modules.iter().filter(|module| !module.path.is_empty());
    callers().next().is_some()
        && callers().all(|module| library_name(&module.path) != PYTORCH)
        && !definitions.frames.iter().any(|frame| frame.filename.contains("/torch/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::file::{Context, NativeFrame, StackNode};
    use memtrace_trace::ids::ModuleId;

    #[test]
    fn native_frames_are_ignored() {
        let mut definitions = Definitions { frames: vec![Frame::default()], ..Definitions::default() };
        for name in ["forward", "native", "inner"] {
            let filename = match name {
                "forward" => "/torch/nn/modules/x.py",
                "native" => "/torch/nn/modules/x.cpp",
                // No native frame either, but what stands in for a kernel.
                _ => "/site-packages/simcuda/operators.py",
            };
            definitions.frames.push(Frame { name: name.into(), filename: filename.into(), ..Frame::default() });
        }
        definitions.frames[2].native = true;
        definitions.native_frames.insert(FrameId(2), NativeFrame { module: ModuleId(1), address: 7 });
        // forward; forward > native; forward > native > inner; native; native > forward; native > forward > inner
        for (parent, frame) in [(0, 0), (0, 1), (1, 2), (2, 3), (0, 2), (4, 1), (5, 3)] {
            definitions.stacks.push(StackNode { parent: StackId(parent), frame: FrameId(frame) });
        }
        definitions.contexts = vec![
            Context::default(),
            Context { node: "AddBackward0".into(), forward: StackId(1), ..Context::default() },
        ];
        let table = StackTable::new(&definitions);
        for stack in [1, 2, 3, 5, 6] {
            let facts = table.facts(StackId(stack));
            assert!(facts.made_node && !facts.inside_node && !facts.native_only, "stack {stack}: {facts:?}");
            assert_eq!((facts.outermost_compute, facts.frame), (StackId(1), FrameId(1)));
        }
        let facts = table.facts(StackId(4));
        assert!(facts.native_only && !facts.made_node && facts.rule.is_none());
        assert!(table.is_without_python(StackId(4)) && table.is_without_python(StackId::NONE));
        assert!(!table.is_without_python(StackId(6)) && !table.is_without_python(StackId(99)));
    }
}
