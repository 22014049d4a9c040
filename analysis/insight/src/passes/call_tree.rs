//! The program's own functions on each stack, without those of libraries.

use std::collections::HashMap;

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{FrameId, StackId};

use crate::rules::is_library;

/// The maximum number of own functions on a stack, and of different stacks of functions. Deeper calls count for their
/// caller.
pub(super) const MAX_DEPTH: usize = 16;
const MAX_PATHS: usize = 4096;

/// The number of a [`Node`]. 0 is the node without functions.
pub(super) type NodeId = u32;

/// A stack of own functions, each at one of its lines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Node {
    pub(super) parent: NodeId,
    /// The number of functions.
    pub(super) depth: usize,
    /// The [`Path`] of the functions.
    pub(super) path: usize,
    /// The line of the innermost function.
    pub(super) line: u32,
}

/// A stack of own functions, wherever in them the calls are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Path {
    pub(super) parent: usize,
    /// The number of the innermost function.
    pub(super) function: u32,
    /// A frame of it.
    pub(super) frame: FrameId,
    /// It is the code of a module, which runs once.
    pub(super) is_module: bool,
}

/// The nodes of all stacks of a recording.
#[derive(Clone, Debug, Default)]
pub(super) struct CallTree {
    of_stack: Vec<NodeId>,
    nodes: Vec<Node>,
    paths: Vec<Path>,
}

/// Whether calls of this function are distinguished. Comprehensions and lambdas belong to their function.
fn is_own(frame: &Frame) -> bool {
    let is_function = !frame.name.starts_with('<') || &*frame.name == "<module>";
    !frame.native && frame.line > 0 && is_function && !is_library(&frame.filename)
}

impl CallTree {
    /// Makes a tree for the stacks of a recording.
    pub(super) fn new(definitions: &Definitions) -> CallTree {
        let mut tree = CallTree { of_stack: Vec::new(), nodes: vec![Node::default()], paths: vec![Path::default()] };
        let mut functions = HashMap::new();
        let (mut nodes, mut paths) = (HashMap::new(), HashMap::new());
        for (at, stack) in definitions.stacks.iter().enumerate() {
            // A parent has a smaller id than its child.
            let parent = if stack.parent.index() < at { tree.node(stack.parent) } else { 0 };
            let frame = definitions.frame(stack.frame).filter(|frame| is_own(frame));
            let node = frame.and_then(|frame| {
                let Node { depth, path, .. } = tree.at(parent);
                let next = functions.len() as u32 + 1;
                let function = *functions.entry((&frame.filename, &frame.qualname, frame.first_line)).or_insert(next);
                let has_room = depth < MAX_DEPTH && tree.paths.len() < MAX_PATHS;
                let path = match paths.get(&(path, function)) {
                    Some(path) => *path,
                    None if has_room => {
                        let is_module = &*frame.name == "<module>";
                        tree.paths.push(Path { parent: path, function, frame: stack.frame, is_module });
                        paths.insert((path, function), tree.paths.len() - 1);
                        tree.paths.len() - 1
                    }
                    None => return None,
                };
                Some(*nodes.entry((parent, path, frame.line)).or_insert_with(|| {
                    tree.nodes.push(Node { parent, depth: depth + 1, path, line: frame.line });
                    (tree.nodes.len() - 1) as NodeId
                }))
            });
            tree.of_stack.push(node.unwrap_or(parent));
        }
        tree
    }

    /// The own functions of a stack.
    #[inline]
    pub(super) fn node(&self, stack: StackId) -> NodeId {
        self.of_stack.get(stack.index()).copied().unwrap_or(0)
    }

    pub(super) fn at(&self, node: NodeId) -> Node {
        self.nodes.get(node as usize).copied().unwrap_or_default()
    }

    /// The nodes from the outermost function to this one, into `all`. Returns their number.
    pub(super) fn ancestors(&self, node: NodeId, all: &mut [NodeId; MAX_DEPTH]) -> usize {
        let depth = self.at(node).depth;
        let mut at = node;
        for place in all[..depth].iter_mut().rev() {
            *place = at;
            at = self.at(at).parent;
        }
        depth
    }

    /// By number: the stacks of functions. A parent has a smaller number than its child. 0 is the one without
    /// functions.
    pub(super) fn paths(&self) -> &[Path] {
        &self.paths
    }
}

#[cfg(test)]
pub(super) mod tests {
    use memtrace_trace::file::StackNode;

    use super::*;

    pub(in crate::passes) fn frame(name: &str, filename: &str, line: u32) -> Frame {
        Frame { name: name.into(), qualname: name.into(), filename: filename.into(), line, ..Frame::default() }
    }

    /// Definitions with these frames, and these stacks of a parent and a frame. Both count from 1.
    pub(in crate::passes) fn definitions(frames: &[Frame], stacks: &[(u32, u32)]) -> Definitions {
        let node = |&(parent, frame): &(u32, u32)| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        Definitions {
            frames: std::iter::once(Frame::default()).chain(frames.iter().cloned()).collect(),
            stacks: std::iter::once(StackNode::default()).chain(stacks.iter().map(node)).collect(),
            ..Definitions::default()
        }
    }

    #[test]
    fn libraries_and_comprehensions_belong_to_the_function_that_calls_them() {
        let library = "/usr/lib/python3/dist-packages/torch/nn.py";
        let frames = [
            frame("main", "a.py", 10),
            frame("call", library, 7),
            frame("search", "a.py", 2),
            frame("<listcomp>", "a.py", 2),
            frame("search", "a.py", 3),
        ];
        let tree = CallTree::new(&definitions(&frames, &[(0, 1), (1, 2), (2, 3), (3, 4), (2, 5)]));
        let nodes: Vec<NodeId> = (1..=5).map(|stack| tree.node(StackId(stack))).collect();
        assert_eq!(nodes, [1, 1, 2, 2, 3]);
        let mut all = [0; MAX_DEPTH];
        assert_eq!((tree.ancestors(3, &mut all), all[..2].to_vec()), (2, vec![1, 3]));
        assert_eq!((tree.at(2).path, tree.at(3).path), (2, 2), "one function at two lines");
        assert_eq!((tree.at(2).line, tree.at(3).line), (2, 3));
    }

    #[test]
    fn deep_recursion_counts_for_the_deepest_call_that_is_distinguished() {
        let stacks: Vec<(u32, u32)> = (0..40).map(|parent| (parent, 1)).collect();
        let tree = CallTree::new(&definitions(&[frame("f", "a.py", 1)], &stacks));
        assert_eq!(tree.at(tree.node(StackId(40))).depth, MAX_DEPTH);
    }
}
