//! The meaning of the contexts of a recording's events: autograd nodes, or calls of `nn.Module`s.

use std::collections::HashMap;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

/// A table that answers with one lookup per event.
#[derive(Clone, Debug, Default)]
pub struct Contexts {
    /// For a call: the call itself. For a node: the call that made it.
    modules: Vec<ContextId>,
    /// For a node: the first node with its name and forward stack.
    nodes: Vec<ContextId>,
}

impl Contexts {
    /// Makes the contexts for the definitions of a recording.
    pub fn of(definitions: &Definitions) -> Contexts {
        let is_call = |id: &ContextId| !id.is_none() && definitions.nn_calls.contains_key(id);
        let creator_of =
            |c: &memtrace_trace::file::Context| if is_call(&c.module) { c.module } else { ContextId::NONE };
        let mut modules: Vec<ContextId> = definitions.contexts.iter().map(creator_of).collect();
        for id in definitions.nn_calls.keys() {
            if let Some(module) = modules.get_mut(id.index()) {
                *module = *id;
            }
        }
        let mut first = HashMap::new();
        let nodes = definitions.contexts.iter().enumerate().map(|(at, context)| {
            let id = ContextId(at as u32);
            if context.node.is_empty() {
                return id;
            }
            *first.entry((&*context.node, context.forward)).or_insert(id)
        });
        Contexts { nodes: nodes.collect(), modules }
    }

    /// Whether an event with this context belongs to the backward pass. A context whose definition was lost counts as a
    /// node.
    #[inline]
    pub fn is_node(&self, context: ContextId) -> bool {
        !context.is_none() && self.module(context) != context
    }

    /// The autograd node; `NONE` for the call of a module.
    ///
    /// Nodes with the same name and forward stack are one node here, whichever module's call made them. The recorder
    /// knows modules by their addresses, and whether a later module lies at the address of an earlier one differs
    /// between runs of one program.
    #[inline]
    pub fn node(&self, context: ContextId) -> ContextId {
        if self.is_node(context) {
            self.nodes.get(context.index()).copied().unwrap_or(context)
        } else {
            ContextId::NONE
        }
    }

    /// The module that is being called, or the one whose call made the node; `NONE` if unknown.
    #[inline]
    pub fn module(&self, context: ContextId) -> ContextId {
        self.modules.get(context.index()).copied().unwrap_or(ContextId::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::file::{Context, NnCall};

    #[test]
    fn calls_and_nodes_are_distinguished() {
        let mut definitions = Definitions::default();
        let node = |module| Context { node: "AddBackward0".into(), module: ContextId(module), ..Context::default() };
        definitions.contexts = vec![Context::default(), Context::default(), node(1), node(0), node(3)];
        let call = NnCall { caller: ContextId::NONE, object: 16, class: "Linear".into() };
        definitions.nn_calls.insert(ContextId(1), call);
        let contexts = Contexts::of(&definitions);
        let all = |of: &dyn Fn(ContextId) -> u32| (0..7).map(|id| of(ContextId(id))).collect::<Vec<_>>();
        // No context; a call; a node of the call; a node without a module; a node that names a node as its creator; two
        // lost definitions.
        assert_eq!(all(&|id| contexts.is_node(id).into()), [0, 0, 1, 1, 1, 1, 1]);
        assert_eq!(all(&|id| contexts.node(id).0), [0, 0, 2, 2, 2, 5, 6]);
        assert_eq!(all(&|id| contexts.module(id).0), [0, 1, 1, 0, 0, 0, 0]);
    }
}
