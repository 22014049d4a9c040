//! Merges a native and a Python stack: Python frames replace the native frames of the interpreter's evaluation
//! function.
//!
//! Each native frame of that function evaluates one Python frame (up to 3.10) or a group of frames that call each other
//! (3.11 and later). The frames contain which of them start a group. So the outermost evaluation is replaced by the
//! outermost group, and so on.
//!
//! Each merge verifies that there are as many evaluations as groups. If not, nothing is invented: the stack contains
//! all Python frames and then the native frames that the innermost evaluation has called. This is counted. It happens
//! if a stack cannot be unwound completely, or if something else has added frames to the chain.

use memtrace_trace::ids::StackId;

use super::super::definition::{DefinitionSink, Loss};
use super::super::intern::Interner;
use super::super::key_cache::FrameMeaning;
use super::super::python::process::Python;
use super::super::thread::ThreadStacks;
use super::array::{Array, Zeroed};
use super::walk::{Walk, WalkResult};

/// A frame of the merged stack, and the stack up to it.
#[derive(Clone, Copy)]
struct MergedFrame {
    meaning: FrameMeaning,
    /// The stack up to and including this frame.
    stack: StackId,
}

// SAFETY: both fields are numbers, for which zero is valid.
unsafe impl Zeroed for MergedFrame {}

/// A thread's last merged stack.
pub(super) struct Merged {
    /// Index 0 is the outermost frame.
    items: Array<MergedFrame>,
    /// Items `0..known` are valid: each is its meaning on top of the previous item.
    known: usize,
    /// The number of native frames in the last merge.
    depth: usize,
    /// The Python stack of the last merge.
    python: StackId,
    shape: u64,
    stack: StackId,
    is_matched: bool,
}

/// How a Python stack is divided into groups.
struct EvaluationGroups {
    count: usize,
    /// A hash of the positions at which groups start.
    shape: u64,
}

impl Merged {
    pub(super) const fn new() -> Merged {
        Merged {
            items: Array::new(),
            known: 0,
            depth: 0,
            python: StackId::NONE,
            shape: 0,
            stack: StackId::NONE,
            is_matched: false,
        }
    }

    /// Drops the items, so that the next merge interns all frames again.
    pub(super) fn forget(&mut self) {
        self.known = 0;
        self.depth = 0;
    }

    /// Frees the memory.
    pub(super) fn release(&mut self) {
        self.items.release();
        *self = Merged::new();
    }

    /// The merged stack of a native walk and the Python stack `stack`, which was just captured into `frames`.
    #[allow(clippy::too_many_arguments, reason = "two stacks, and where frames go")]
    pub(super) fn merge<S: DefinitionSink>(
        &mut self,
        walk: &Walk,
        walked: WalkResult,
        python: &Python,
        frames: &ThreadStacks,
        stack: StackId,
        interner: &Interner,
        sink: &mut S,
    ) -> StackId {
        let groups = groups(python, frames);
        let same = walked.changed == walked.depth
            && walked.depth == self.depth
            && stack == self.python
            && groups.shape == self.shape;
        if !same {
            self.build(walk, walked.depth, python, frames, groups.count, interner, sink);
            (self.depth, self.python, self.shape) = (walked.depth, stack, groups.shape);
        }
        if !self.is_matched {
            sink.lost(Loss::Merging);
        }
        self.stack
    }

    #[allow(clippy::too_many_arguments, reason = "the two stacks with their sizes, and the destination of frames")]
    fn build<S: DefinitionSink>(
        &mut self,
        walk: &Walk,
        depth: usize,
        python: &Python,
        frames: &ThreadStacks,
        groups: usize,
        interner: &Interner,
        sink: &mut S,
    ) {
        let evaluator = python.evaluator();
        let evaluates = |index: usize| evaluator.contains(walk.entry(index).state.lookup());
        let evaluations = (0..depth).filter(|index| evaluates(*index)).count();
        self.is_matched = evaluations == groups;
        let python_depth = frames.depth();
        if !self.items.reserve(depth + python_depth) {
            self.forget();
            (self.stack, self.is_matched) = (StackId::NONE, true);
            sink.lost(Loss::Memory);
            return;
        }
        let mut builder = MergeBuilder { merged: self, at: 0, stack: StackId::NONE };
        let mut next = 0;
        // Pushes one group: its first frame and all following ones that start no group. Pushes all remaining frames if
        // `all` is set.
        let group = |builder: &mut MergeBuilder<'_>, next: &mut usize, all: bool, sink: &mut S| {
            let mut first = true;
            while *next < python_depth {
                let (frame, meaning) = frames.frame(*next);
                // SAFETY: `frames` was just captured on this thread, so the frame belongs to the present chain.
                if !all && !first && unsafe { python.begins_evaluation(frame) } {
                    break;
                }
                first = false;
                builder.push(meaning, interner, sink);
                *next += 1;
            }
        };
        if builder.merged.is_matched {
            for index in 0..depth {
                if evaluates(index) {
                    group(&mut builder, &mut next, false, sink);
                } else {
                    builder.push(walk.entry(index).meaning, interner, sink);
                }
            }
        } else {
            group(&mut builder, &mut next, true, sink);
            let innermost = (0..depth).rev().find(|index| evaluates(*index));
            for index in innermost.map_or(depth, |index| index + 1)..depth {
                builder.push(walk.entry(index).meaning, interner, sink);
            }
        }
        let MergeBuilder { at, stack, .. } = builder;
        self.known = at;
        self.stack = stack;
    }
}

/// The merged stack during its construction.
struct MergeBuilder<'a> {
    merged: &'a mut Merged,
    at: usize,
    stack: StackId,
}

impl MergeBuilder<'_> {
    #[inline]
    fn push<S: DefinitionSink>(&mut self, meaning: FrameMeaning, interner: &Interner, sink: &mut S) {
        if meaning == FrameMeaning::HIDDEN {
            return;
        }
        let known = self.at < self.merged.known;
        let item = self.merged.items.get_mut(self.at);
        if !known || item.meaning != meaning {
            *item = MergedFrame { meaning, stack: child(self.stack, meaning, interner, sink) };
            self.merged.known = self.at;
        }
        self.stack = item.stack;
        self.at += 1;
    }
}

#[inline]
fn groups(python: &Python, frames: &ThreadStacks) -> EvaluationGroups {
    let mut groups = EvaluationGroups { count: 0, shape: 0 };
    for index in 0..frames.depth() {
        // SAFETY: `frames` was just captured on this thread, so the frame belongs to the present chain.
        let begins = unsafe { python.begins_evaluation(frames.frame(index).0) };
        groups.count += usize::from(begins);
        groups.shape = groups.shape.wrapping_mul(0x0000_0100_0000_01b3) ^ u64::from(begins) ^ 2;
    }
    groups
}

/// The stack of a frame with this meaning on top of `parent`.
#[inline]
pub(super) fn child<S: DefinitionSink>(
    parent: StackId,
    meaning: FrameMeaning,
    interner: &Interner,
    sink: &mut S,
) -> StackId {
    if let Some(frame) = meaning.id() {
        return interner.child(parent, frame, sink);
    }
    if meaning == FrameMeaning::NO_SPACE {
        sink.lost(Loss::Frame);
    }
    parent
}
