//! The iterations of the program's loops, as far as its allocations show them.
//!
//! Where a function goes on at an earlier line than that of the allocation before, it has begun another iteration of a
//! loop, or its caller has called it once more. Both count as an iteration.

use std::collections::HashMap;
use std::sync::Arc;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

/// The maximum number of functions. Further ones are not counted.
const MAX_LOOPS: usize = 4096;

/// A function that one call stack calls: the stack of the caller, and the number of the function.
pub(super) type LoopKey = (StackId, u32);

/// By stack: its caller, its function and its line.
#[derive(Clone, Debug, Default)]
pub(super) struct LoopTable {
    callers: Vec<StackId>,
    /// 0 for native code and for unknown functions.
    functions: Vec<u32>,
    lines: Vec<u32>,
}

impl LoopTable {
    /// Makes the table for the stacks of a recording.
    pub(super) fn new(definitions: &Definitions) -> LoopTable {
        let mut numbers = HashMap::new();
        let mut table = LoopTable::default();
        for (at, node) in definitions.stacks.iter().enumerate() {
            let frame = definitions.frame(node.frame).filter(|frame| !frame.native && frame.line > 0);
            let function = frame.map_or(0, |frame| {
                let next = numbers.len() as u32 + 1;
                *numbers.entry((&frame.filename, &frame.qualname, frame.first_line)).or_insert(next)
            });
            // A parent has a smaller id than its child.
            table.callers.push(if node.parent.index() < at { node.parent } else { StackId::NONE });
            table.functions.push(function);
            table.lines.push(frame.map_or(0, |frame| frame.line));
        }
        table
    }

    fn caller(&self, stack: StackId) -> StackId {
        self.callers.get(stack.index()).copied().unwrap_or(StackId::NONE)
    }

    fn function(&self, stack: StackId) -> u32 {
        self.functions.get(stack.index()).copied().unwrap_or(0)
    }

    fn line(&self, stack: StackId) -> u32 {
        self.lines.get(stack.index()).copied().unwrap_or(0)
    }
}

/// Counts iterations.
#[derive(Clone, Debug, Default)]
pub(super) struct LoopCounter {
    table: Arc<LoopTable>,
    /// By thread: the stack of its latest allocation.
    latest: Vec<(ThreadId, StackId)>,
    /// By thread and function: the line of its latest allocation.
    lines: HashMap<(ThreadId, LoopKey), u32>,
    counts: HashMap<LoopKey, u64>,
}

impl LoopCounter {
    pub(super) fn new(table: &Arc<LoopTable>) -> LoopCounter {
        LoopCounter { table: table.clone(), ..LoopCounter::default() }
    }

    /// Begins to count anew.
    pub(super) fn restart(&mut self) {
        *self = LoopCounter::new(&self.table);
    }

    /// Observes the stack of an allocation.
    pub(super) fn observe(&mut self, thread: ThreadId, stack: StackId) {
        if stack.is_none() {
            return;
        }
        let mut before = match self.latest.iter_mut().find(|(one, _)| *one == thread) {
            Some((_, latest)) => std::mem::replace(latest, stack),
            None => {
                self.latest.push((thread, stack));
                StackId::NONE
            }
        };
        // The common part of both stacks has not changed its line.
        let mut now = stack;
        while before != now {
            if before > now {
                before = self.table.caller(before);
            } else {
                self.moved(thread, now);
                now = self.table.caller(now);
            }
        }
    }

    /// The function at the end of this stack has allocated, itself or by a call.
    fn moved(&mut self, thread: ThreadId, stack: StackId) {
        let (function, line) = (self.table.function(stack), self.table.line(stack));
        if function == 0 {
            return;
        }
        let key = (self.table.caller(stack), function);
        if self.lines.len() >= MAX_LOOPS && !self.lines.contains_key(&(thread, key)) {
            return;
        }
        if self.lines.insert((thread, key), line).is_some_and(|latest| line < latest) {
            *self.counts.entry(key).or_default() += 1;
        }
    }

    /// The iterations so far.
    pub(super) fn counts(&self) -> &HashMap<LoopKey, u64> {
        &self.counts
    }

    /// The functions of a stack from the outermost to the innermost: the stack there, and the key of its loop.
    pub(super) fn around(&self, stack: StackId) -> Vec<(StackId, LoopKey)> {
        let mut all = Vec::new();
        let mut at = stack;
        while !at.is_none() {
            let caller = self.table.caller(at);
            all.push((at, (caller, self.table.function(at))));
            at = caller;
        }
        all.reverse();
        all
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{Frame, StackNode};
    use memtrace_trace::ids::FrameId;

    use super::*;

    #[test]
    fn an_iteration_begins_where_a_function_returns_to_an_earlier_line() {
        let frame = |name: &str, line| Frame {
            name: name.into(),
            qualname: name.into(),
            filename: "a.py".into(),
            line,
            ..Frame::default()
        };
        let node = |parent, frame| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        // main calls handle at its line 11, and allocates at line 10 itself.
        let definitions = Definitions {
            frames: vec![
                Frame::default(),
                frame("main", 10),
                frame("main", 11),
                frame("handle", 2),
                frame("handle", 3),
            ],
            stacks: vec![StackNode::default(), node(0, 1), node(0, 2), node(2, 3), node(2, 4)],
            ..Definitions::default()
        };
        let mut loops = LoopCounter::new(&Arc::new(LoopTable::new(&definitions)));
        for _ in 0..3 {
            for stack in [1, 3, 4, 3, 4] {
                loops.observe(ThreadId(1), StackId(stack));
            }
            // Another thread has iterations of its own.
            loops.observe(ThreadId(2), StackId(1));
        }
        let around = loops.around(StackId(4));
        let counts: Vec<_> = around.iter().map(|(at, key)| (at.0, loops.counts().get(key).copied())).collect();
        assert_eq!(counts, [(2, Some(2)), (4, Some(5))], "the loop of main, and the calls of handle");
    }
}
