//! Functions of a program in C or C++ that only pass an allocation on: `device(size)` around `cudaMalloc`, the
//! constructor of a buffer. Their own line is that of all blocks, so locations name the caller that differs.

use std::collections::{HashMap, HashSet};

use memtrace_trace::file::{Definitions, Frame, StackNode};
use memtrace_trace::ids::{FrameId, StackId};

use crate::rules::alloc_fn_rule;

/// The maximum number of wrappers around each other.
const MAX_DEPTH: usize = 8;

/// A function by its file and its name.
type Function<'a> = (&'a str, &'a str);

/// The frames of functions that allocate at one line only, for callers that differ.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wrappers {
    frames: HashSet<FrameId>,
}

/// The line of a function that allocates, and the lines that call the function.
#[derive(Debug, Default)]
struct Uses {
    lines: HashSet<FrameId>,
    callers: HashSet<FrameId>,
    /// The stacks of those callers, unless a caller is not code of the program.
    stacks: Option<HashSet<StackId>>,
}

impl Wrappers {
    pub(crate) fn new(definitions: &Definitions) -> Wrappers {
        if definitions.native_frames.is_empty() {
            return Wrappers::default();
        }
        let first = responsible_stacks(definitions);
        let mut stacks = first.clone();
        // A caller of a wrapper can be one itself. Its other allocations count, too.
        let mut uses = uses_of(definitions, &stacks);
        for _ in 0..MAX_DEPTH {
            let passed = uses.values().filter(|uses| uses.lines.len() == 1).filter_map(|uses| uses.stacks.as_ref());
            let next: HashSet<StackId> = first.iter().chain(passed.flatten()).copied().collect();
            if next == stacks {
                break;
            }
            stacks = next;
            uses = uses_of(definitions, &stacks);
        }
        let is_one_line = |uses: &&Uses| uses.lines.len() == 1 && uses.stacks.is_some();
        let mut frames: HashSet<FrameId> = HashSet::new();
        for _ in 0..MAX_DEPTH {
            let differs = |uses: &&Uses| uses.callers.len() > 1 || uses.callers.iter().any(|at| frames.contains(at));
            let found: HashSet<FrameId> =
                uses.values().filter(is_one_line).filter(differs).flat_map(|uses| &uses.lines).copied().collect();
            if found == frames {
                break;
            }
            frames = found;
        }
        Wrappers { frames }
    }

    /// Whether a frame passes on the allocations of callers that differ.
    pub(crate) fn contains(&self, frame: FrameId) -> bool {
        self.frames.contains(&frame)
    }
}

/// Whether a frame is native code of the program: it has a line, and it is no allocator.
fn is_own(frame: &Frame) -> bool {
    frame.native && frame.line > 0 && alloc_fn_rule(frame).is_none()
}

fn own_frame<'a>(definitions: &'a Definitions, node: &StackNode) -> Option<&'a Frame> {
    definitions.frame(node.frame).filter(|frame| is_own(frame))
}

/// The stacks at which code of the program calls an allocator.
fn responsible_stacks(definitions: &Definitions) -> HashSet<StackId> {
    let mut calls: Vec<bool> = vec![true; definitions.stacks.len()];
    let mut allocates: Vec<bool> = vec![false; definitions.stacks.len()];
    for node in &definitions.stacks {
        let is_allocator = definitions.frame(node.frame).is_some_and(|frame| alloc_fn_rule(frame).is_some());
        if let (Some(calls), Some(allocates)) =
            (calls.get_mut(node.parent.index()), allocates.get_mut(node.parent.index()))
        {
            *calls = false;
            *allocates |= is_allocator;
        }
    }
    let nodes = definitions.stacks.iter().enumerate();
    let ends = nodes.filter(|(at, node)| (calls[*at] || allocates[*at]) && own_frame(definitions, node).is_some());
    ends.map(|(at, _)| StackId(at as u32)).collect()
}

/// The uses of the functions at the ends of these stacks.
fn uses_of<'a>(definitions: &'a Definitions, stacks: &HashSet<StackId>) -> HashMap<Function<'a>, Uses> {
    let mut uses: HashMap<Function<'a>, Uses> = HashMap::new();
    for stack in stacks {
        let Some(node) = definitions.stacks.get(stack.index()) else { continue };
        let Some(frame) = own_frame(definitions, node) else { continue };
        let new = || Uses { stacks: Some(HashSet::new()), ..Uses::default() };
        let of = uses.entry((&frame.filename, &frame.qualname)).or_insert_with(new);
        of.lines.insert(node.frame);
        let caller = definitions.stacks.get(node.parent.index()).filter(|_| !node.parent.is_none());
        match caller.filter(|caller| own_frame(definitions, caller).is_some()) {
            Some(caller) => {
                of.callers.insert(caller.frame);
                of.stacks.iter_mut().for_each(|stacks| _ = stacks.insert(node.parent));
            }
            None => of.stacks = None,
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::NativeFrame;

    use super::*;

    /// Definitions with these stacks, from the outermost frame to the innermost: function and line.
    fn program(stacks: &[&[(&str, u32)]]) -> (Definitions, Vec<StackId>) {
        let mut definitions = Definitions { frames: vec![Frame::default()], ..Definitions::default() };
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId::NONE });
        let mut ends = Vec::new();
        for frames in stacks {
            let mut parent = StackId::NONE;
            for (name, line) in *frames {
                let known = definitions.frames.iter().position(|f| &*f.name == *name && f.line == *line);
                let frame = FrameId(known.unwrap_or(definitions.frames.len()) as u32);
                if known.is_none() {
                    definitions.native_frames.insert(frame, NativeFrame::default());
                    definitions.frames.push(Frame {
                        name: (*name).into(),
                        qualname: (*name).into(),
                        filename: "flow.c".into(),
                        line: *line,
                        native: true,
                        ..Frame::default()
                    });
                }
                let node = definitions.stacks.iter().position(|n| n.parent == parent && n.frame == frame);
                let at = node.unwrap_or(definitions.stacks.len());
                if node.is_none() {
                    definitions.stacks.push(StackNode { parent, frame });
                }
                parent = StackId(at as u32);
            }
            ends.push(parent);
        }
        (definitions, ends)
    }

    /// The function and the line that locations name.
    fn named(stacks: &[&[(&str, u32)]]) -> Vec<(String, u32)> {
        let (definitions, ends) = program(stacks);
        let wrappers = Wrappers::new(&definitions);
        let own = |stack: &StackId| {
            let mut frames = definitions.walk_ids(*stack).filter_map(|(_, id)| Some((id, definitions.frame(id)?)));
            let (_, frame) = frames.find(|(id, frame)| is_own(frame) && !wrappers.contains(*id))?;
            Some((frame.name.to_string(), frame.line))
        };
        ends.iter().filter_map(own).collect()
    }

    #[test]
    fn a_wrapper_is_not_the_place_of_an_allocation() {
        const CALL: (&str, u32) = ("cudaMalloc", 0);
        let one = named(&[
            &[("main", 9), ("load", 5), ("device", 2), CALL],
            &[("main", 9), ("load", 6), ("device", 2), CALL],
        ]);
        assert_eq!(one, [("load".into(), 5), ("load".into(), 6)], "one wrapper");
        let two = named(&[
            &[("main", 9), ("load", 5), ("array", 3), ("device", 2), CALL],
            &[("main", 9), ("load", 6), ("array", 3), ("device", 2), CALL],
        ]);
        assert_eq!(two, [("load".into(), 5), ("load".into(), 6)], "a wrapper around a wrapper");
        let single = named(&[&[("main", 9), ("load", 5), CALL]]);
        assert_eq!(single, [("load".into(), 5)], "a function with one caller");
        let several = named(&[
            &[("main", 8), ("frame", 5), CALL],
            &[("main", 9), ("frame", 5), CALL],
            &[("main", 9), ("frame", 6), CALL],
        ]);
        assert_eq!(
            several,
            [("frame".into(), 5), ("frame".into(), 5), ("frame".into(), 6)],
            "a function with two lines"
        );
    }
}
