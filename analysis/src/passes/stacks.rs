//! What each stack of a recording says by itself, worked out once before the events are streamed.
//!
//! A parent has a smaller id than its child, so one walk over the table settles every stack from its caller's facts.

use std::collections::HashSet;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::rules::{FrameRule, Meaning, OptimizerRule, frame_rule, optimizer_of};

/// What a stack says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StackFacts {
    /// The rule of the innermost frame that any rule knows.
    pub rule: Option<&'static FrameRule>,
    /// That frame: the evidence.
    pub frame: FrameId,
    /// An activation checkpoint is running, with no engine call further in.
    pub in_checkpoint: bool,
    /// The autograd engine was called somewhere in this stack.
    pub in_engine: bool,
    /// Autograd later ran a node that this very stack had made: forward, by proof.
    pub made_node: bool,
    /// The same is true of one of its callers: the call of an `autograd.Function`, whose inside runs without gradients.
    pub inside_node: bool,
    /// The optimizer whose code runs.
    pub optimizer: Option<&'static OptimizerRule>,
    /// The outermost frame that computes: where the program calls its model.
    pub outermost_compute: StackId,
}

/// Facts of every stack and node.
#[derive(Clone, Debug, Default)]
pub struct StackTable {
    stacks: Vec<StackFacts>,
    recomputing_nodes: HashSet<ContextId>,
    has_nodes: bool,
}

impl StackTable {
    /// From a recording's definitions.
    pub fn new(definitions: &Definitions) -> StackTable {
        let rules: Vec<_> = definitions.frames.iter().map(|f| (frame_rule(f), optimizer_of(f))).collect();
        let made_nodes: HashSet<StackId> = definitions.contexts.iter().map(|c| c.forward).collect();
        let mut stacks: Vec<StackFacts> = Vec::with_capacity(definitions.stacks.len());
        for (i, node) in definitions.stacks.iter().enumerate() {
            let parent = if node.parent.index() < i { stacks[node.parent.index()] } else { StackFacts::default() };
            let (rule, optimizer) = rules.get(node.frame.index()).copied().unwrap_or_default();
            let id = StackId(i as u32);
            let made_node = i > 0 && made_nodes.contains(&id);
            let mut facts = StackFacts { made_node, inside_node: parent.inside_node || parent.made_node, ..parent };
            if let Some(rule) = rule {
                facts.rule = Some(rule);
                facts.frame = node.frame;
                match rule.meaning {
                    Meaning::Engine => {
                        facts.in_engine = true;
                        facts.in_checkpoint = false;
                    }
                    Meaning::Checkpoint => facts.in_checkpoint = true,
                    Meaning::Compute if facts.outermost_compute.is_none() => facts.outermost_compute = id,
                    _ => {}
                }
            }
            facts.optimizer = optimizer.or(parent.optimizer);
            stacks.push(facts);
        }
        let recomputing_nodes = definitions
            .contexts
            .iter()
            .enumerate()
            .filter(|(_, c)| c.node.contains("CheckpointFunction"))
            .map(|(i, _)| ContextId(i as u32))
            .collect();
        StackTable { stacks, recomputing_nodes, has_nodes: definitions.contexts.len() > 1 }
    }

    /// What a stack says; nothing for a stack that was never defined.
    #[inline]
    pub fn facts(&self, stack: StackId) -> StackFacts {
        self.stacks.get(stack.index()).copied().unwrap_or_default()
    }

    /// Whether a node recomputes activations.
    #[inline]
    pub fn recomputes(&self, context: ContextId) -> bool {
        !context.is_none() && !self.recomputing_nodes.is_empty() && self.recomputing_nodes.contains(&context)
    }

    /// Whether any autograd node was recorded.
    pub fn has_nodes(&self) -> bool {
        self.has_nodes
    }

    /// Whether any stack has this meaning.
    pub fn any(&self, meaning: Meaning) -> bool {
        self.stacks.iter().any(|f| f.rule.is_some_and(|r| r.meaning == meaning))
    }
}
