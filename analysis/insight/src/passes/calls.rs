//! The calls of the program's own functions, as far as its allocations and frees show them, and what a call allocates,
//! keeps and needs.
//!
//! A call begins with the first allocation inside it. It ends where an event of its thread comes from its caller or
//! from another function. Blocks that the caller's line frees as the call returns still belong to it: they are the
//! call's local variables. Two calls in a row from one line, between which nothing is freed or allocated outside them,
//! look like one. The second is counted if the function goes on at or before the line at which it began.
//!
//! Events of threads without own functions, such as those of the autograd engine, belong to the latest thread that has
//! some.

use std::sync::Arc;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

use super::call_tree::{CallTree, MAX_DEPTH, Node, NodeId};
use super::category::BlockAllocation;
use super::mark::Mark;
use super::pass::{BlockAllocated, BlockFreed, Pass, RecordingEnd, RecordingStart};
use super::phase::Phase;

/// The maximum number of threads at a time. Then the calls of the thread end that has been idle for longest.
const MAX_THREADS: usize = 64;

/// The sums over the calls of the functions on one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CallTotals {
    /// The number of calls that events show to be different ones.
    pub(super) calls: u64,
    /// The number of these whose end a free showed.
    pub(super) returns: u64,
    /// How often the function went on at or before the line at which it began.
    pub(super) again: u64,
    pub(super) allocations: u64,
    pub(super) allocated: u64,
    pub(super) kept: u64,
    pub(super) peak: u64,
    pub(super) work: Work,
}

/// The work of a function, as the phases of its allocations show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Work {
    /// A backward pass or an optimizer ran.
    pub(super) trains: bool,
    pub(super) backward: bool,
    /// A model computed what no backward pass follows.
    pub(super) forward_only: bool,
    /// Generation, or the collection of experience.
    pub(super) generates: bool,
}

impl Work {
    fn of(phase: Phase) -> Work {
        Work {
            trains: matches!(phase, Phase::Backward | Phase::Optimizer),
            backward: phase == Phase::Backward,
            forward_only: phase.is_forward_only(),
            generates: matches!(phase, Phase::Generate | Phase::Rollout),
        }
    }

    pub(super) fn add(&mut self, other: Work) {
        self.trains |= other.trains;
        self.backward |= other.backward;
        self.forward_only |= other.forward_only;
        self.generates |= other.generates;
    }
}

/// A call that has begun and not ended.
#[derive(Clone, Copy, Debug)]
struct Open {
    path: usize,
    /// The function at its latest line.
    node: NodeId,
    first_line: u32,
    seq: u64,
    /// The thread's totals when it began.
    allocations: u64,
    allocated: u64,
    /// Bytes allocated inside and freed again.
    own_freed: u64,
    peak: u64,
    work: Work,
    /// A free has shown that it has returned. Only the innermost call can be so.
    has_returned: bool,
}

#[derive(Clone, Debug, Default)]
struct Thread {
    id: ThreadId,
    open: Vec<Open>,
    /// The node of the latest allocation.
    latest: NodeId,
    allocations: u64,
    allocated: u64,
    last_seq: u64,
}

/// The calls of one device.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    tree: Arc<CallTree>,
    totals: Vec<CallTotals>,
    work: Work,
}

/// Collects [`Calls`].
#[derive(Clone, Debug, Default)]
pub(crate) struct CallCollector {
    calls: Calls,
    threads: Vec<Thread>,
    /// The latest thread with own functions.
    active: usize,
    /// By block: the thread that allocated it, counted from 1.
    allocated_by: Vec<u8>,
}

impl Calls {
    pub(super) fn tree(&self) -> &CallTree {
        &self.tree
    }

    /// By path: what its calls did.
    pub(super) fn totals(&self) -> &[CallTotals] {
        &self.totals
    }

    /// The work of the whole program.
    pub(super) const fn work(&self) -> Work {
        self.work
    }
}

impl From<CallCollector> for Calls {
    fn from(collector: CallCollector) -> Calls {
        collector.calls
    }
}

impl Pass for CallCollector {
    fn started(start: &RecordingStart<'_>) -> CallCollector {
        CallCollector::new(start.definitions)
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { e, id, block, mark, usage, .. } = *allocated;
        if !allocated.is_earlier {
            // Workspaces of libraries stay. They belong to no call.
            let counted = if mark.is(Mark::WORKSPACE) { 0 } else { block.memory.size };
            self.allocate(block, e.thread, counted, id.index(), usage.allocated);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        self.free(freed.block, freed.id.index(), freed.e.thread, freed.e.stack);
    }

    fn finish(&mut self, _: &RecordingEnd<'_>) {
        self.close();
    }
}

impl CallCollector {
    pub(super) fn new(definitions: &Definitions) -> CallCollector {
        let tree = Arc::new(CallTree::new(definitions));
        let totals = vec![CallTotals::default(); tree.paths().len()];
        CallCollector { calls: Calls { tree, totals, ..Calls::default() }, ..CallCollector::default() }
    }

    /// `bytes` are the bytes that count for the call. `id` is the number of the block. `level` is the device's
    /// allocated bytes after the allocation.
    #[inline]
    pub(super) fn allocate(&mut self, block: &BlockAllocation, thread: ThreadId, bytes: u64, id: usize, level: u64) {
        let node = self.calls.tree.node(block.site.stack);
        let thread_number = self.thread_of(node, thread, block.seq);
        let by = if bytes > 0 { thread_number } else { 0 };
        if let Some(place) = self.allocated_by.get_mut(id) {
            *place = by;
        } else {
            self.allocated_by.resize(id + 1, 0);
            self.allocated_by[id] = by;
        }
        let index = usize::from(thread_number).checked_sub(1);
        let Some(thread) = index.and_then(|at| self.threads.get_mut(at)) else { return };
        thread.last_seq = block.seq;
        if node != 0 && (node != thread.latest || thread.open.last().is_none_or(|open| open.has_returned)) {
            thread.entered(&self.calls.tree, &mut self.calls.totals, node, block.seq);
        }
        thread.allocations += 1;
        thread.allocated += bytes;
        if let Some(open) = thread.open.last_mut() {
            open.peak = open.peak.max(level);
            let work = Work::of(block.phase);
            if work != Work::default() {
                open.work.add(work);
                self.calls.work.add(work);
            }
        }
    }

    /// `thread` and `stack`: of the free.
    #[inline]
    fn free(&mut self, block: &BlockAllocation, id: usize, thread: ThreadId, stack: StackId) {
        let node = self.calls.tree.node(stack);
        if node != 0
            && let Some(thread) = self.threads.iter_mut().find(|one| one.id == thread)
        {
            thread.returned(&self.calls.tree, &mut self.calls.totals, node);
        }
        let by = self.allocated_by.get(id).copied().unwrap_or(0);
        let Some(thread) = usize::from(by).checked_sub(1).and_then(|at| self.threads.get_mut(at)) else { return };
        if let Some(open) = thread.open.iter_mut().rev().find(|open| open.seq <= block.seq) {
            open.own_freed += block.memory.size;
        }
    }

    /// Ends all calls.
    pub(super) fn close(&mut self) {
        for thread in &mut self.threads {
            thread.close(&mut self.calls.totals, 0);
        }
    }

    /// The thread that an allocation with these own functions belongs to, counted from 1; 0 for none.
    #[inline]
    fn thread_of(&mut self, node: NodeId, id: ThreadId, seq: u64) -> u8 {
        if node != 0 && self.threads.get(self.active).is_none_or(|active| active.id != id) {
            self.activate(id, seq);
        }
        if self.threads.is_empty() { 0 } else { self.active as u8 + 1 }
    }

    #[cold]
    fn activate(&mut self, id: ThreadId, seq: u64) {
        let new = Thread { id, last_seq: seq, ..Thread::default() };
        self.active = match self.threads.iter().position(|one| one.id == id) {
            Some(at) => at,
            None if self.threads.len() < MAX_THREADS => {
                self.threads.push(new);
                self.threads.len() - 1
            }
            None => {
                let idle = self.threads.iter_mut().enumerate().min_by_key(|(_, thread)| thread.last_seq);
                let Some((at, thread)) = idle else { return };
                thread.close(&mut self.calls.totals, 0);
                *thread = new;
                at
            }
        };
    }
}

impl Thread {
    /// The number of open calls in which an event with these functions is.
    fn in_common(&self, tree: &CallTree, now: &[NodeId]) -> usize {
        let mut common = 0;
        let mut same_line = true;
        for (open, node) in self.open.iter().zip(now) {
            if !same_line || open.path != tree.at(*node).path || open.has_returned {
                break;
            }
            common += 1;
            // A caller at another line has called anew.
            same_line = open.node == *node;
        }
        common
    }

    /// An allocation comes from these functions, which are not those of the allocation before.
    fn entered(&mut self, tree: &CallTree, totals: &mut [CallTotals], node: NodeId, seq: u64) {
        let mut all = [0; MAX_DEPTH];
        let depth = tree.ancestors(node, &mut all);
        let common = self.in_common(tree, &all[..depth]);
        self.close(totals, common);
        for (open, node) in self.open.iter_mut().zip(&all) {
            let (before, now) = (tree.at(open.node).line, tree.at(*node).line);
            if now < before && now <= open.first_line {
                totals[open.path].again += 1;
            }
            open.node = *node;
        }
        for node in &all[common..depth] {
            let Node { path, line, .. } = tree.at(*node);
            self.open.push(Open {
                path,
                node: *node,
                first_line: line,
                seq,
                allocations: self.allocations,
                allocated: self.allocated,
                own_freed: 0,
                peak: 0,
                work: Work::default(),
                has_returned: false,
            });
        }
        self.latest = node;
    }

    /// A free comes from these functions.
    fn returned(&mut self, tree: &CallTree, totals: &mut [CallTotals], node: NodeId) {
        if node == self.latest && self.open.last().is_some_and(|open| !open.has_returned) {
            return;
        }
        let mut all = [0; MAX_DEPTH];
        let depth = tree.ancestors(node, &mut all);
        let common = self.in_common(tree, &all[..depth]);
        if common >= self.open.len() {
            return;
        }
        for open in self.open[common..].iter().filter(|open| !open.has_returned) {
            totals[open.path].returns += 1;
        }
        // The line of the call frees what the call leaves: its local variables.
        let is_caller = common == depth && common > 0 && self.open[common - 1].node == node;
        self.close(totals, if is_caller { common + 1 } else { common });
        if is_caller && let Some(open) = self.open.get_mut(common) {
            open.has_returned = true;
        }
    }

    /// Ends the open calls but so many.
    fn close(&mut self, totals: &mut [CallTotals], keep: usize) {
        while self.open.len() > keep {
            let Some(open) = self.open.pop() else { return };
            let Some(of) = totals.get_mut(open.path) else { continue };
            let allocated = self.allocated - open.allocated;
            of.calls += 1;
            of.allocations += self.allocations - open.allocations;
            of.allocated += allocated;
            of.kept += allocated.saturating_sub(open.own_freed);
            of.peak = of.peak.max(open.peak);
            of.work.add(open.work);
            if let Some(caller) = self.open.last_mut() {
                caller.own_freed += open.own_freed;
                caller.peak = caller.peak.max(open.peak);
                caller.work.add(open.work);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::call_tree::tests::{definitions, frame};
    use super::super::phase::ProgramPosition;
    use super::*;

    /// The stacks of a program: `main` calls `search` at line 10, and `recommend` at line 11. `search` calls `embed`.
    const SEARCH: u32 = 2;
    const EMBED: u32 = 4;
    const RECOMMEND: u32 = 6;
    const MAIN_AT_SEARCH: u32 = 1;
    const MAIN_AFTER: u32 = 7;
    const SEARCH_LATER: u32 = 8;

    fn tested_definitions() -> Definitions {
        let frames = [
            frame("main", "a.py", 10),
            frame("search", "a.py", 2),
            frame("search", "a.py", 3),
            frame("embed", "a.py", 7),
            frame("main", "a.py", 11),
            frame("recommend", "a.py", 5),
            frame("main", "a.py", 12),
            frame("search", "a.py", 4),
        ];
        definitions(&frames, &[(0, 1), (1, 2), (1, 3), (3, 4), (0, 5), (5, 6), (0, 7), (1, 8)])
    }

    /// Allocates (`+`) and frees blocks by number, from stacks on threads. Each has 100 bytes.
    fn run(events: &[(char, usize, u32, u32)]) -> CallCollector {
        let mut calls = CallCollector::new(&tested_definitions());
        let position = ProgramPosition { step: None, ..BlockAllocation::for_tests(1).position };
        let (mut seq, mut level) = (0, 0);
        let mut blocks = std::collections::HashMap::new();
        for &(action, id, stack, thread) in events {
            seq += 1;
            let (stack, thread) = (StackId(stack), ThreadId(thread));
            if action == '+' {
                level += 100;
                let block = BlockAllocation::of_forward(seq, 100, stack, position);
                calls.allocate(&block, thread, block.memory.size, id, level);
                blocks.insert(id, block);
            } else {
                level -= 100;
                calls.free(&blocks[&id], id, thread, stack);
            }
        }
        calls.close();
        calls
    }

    fn of(CallCollector { calls, .. }: &CallCollector, stack: u32) -> CallTotals {
        calls.totals()[calls.tree.at(calls.tree.node(StackId(stack))).path]
    }

    #[test]
    fn a_call_ends_where_another_function_or_its_caller_goes_on() {
        let calls = run(&[
            ('+', 0, SEARCH, 1),
            ('+', 1, EMBED, 1),
            ('+', 2, RECOMMEND, 1),
            ('+', 3, SEARCH, 1),
            ('-', 3, MAIN_AT_SEARCH, 1),
            ('+', 4, SEARCH, 1),
        ]);
        let search = of(&calls, SEARCH);
        assert_eq!((search.calls, search.returns, search.again, search.allocations), (3, 1, 0, 4));
        // The second call freed its block as it returned.
        assert_eq!((search.allocated, search.kept, search.peak), (400, 300, 400));
        assert_eq!((of(&calls, EMBED).calls, of(&calls, RECOMMEND).calls, of(&calls, MAIN_AFTER).calls), (1, 1, 1));
    }

    #[test]
    fn what_the_caller_frees_later_was_kept() {
        let calls =
            run(&[('+', 0, SEARCH, 1), ('+', 1, EMBED, 1), ('-', 1, MAIN_AT_SEARCH, 1), ('-', 0, MAIN_AFTER, 1)]);
        let (search, embed) = (of(&calls, SEARCH), of(&calls, EMBED));
        assert_eq!((search.kept, search.returns), (100, 1));
        assert_eq!((embed.kept, embed.returns), (100, 1), "search freed what embed returned");
    }

    #[test]
    fn a_function_that_goes_on_where_it_began_is_counted_again() {
        let events = [('+', 0, SEARCH, 1), ('+', 1, SEARCH_LATER, 1), ('+', 2, SEARCH, 1), ('+', 3, SEARCH_LATER, 1)];
        let search = of(&run(&events), SEARCH);
        assert_eq!((search.calls, search.again), (1, 1));
    }

    #[test]
    fn threads_have_calls_of_their_own_and_threads_without_functions_belong_to_the_latest() {
        let calls = run(&[
            ('+', 0, SEARCH, 1),
            ('+', 1, RECOMMEND, 2),
            ('+', 2, SEARCH, 1),
            ('+', 3, 0, 3),
            ('-', 1, RECOMMEND, 2),
        ]);
        let (search, recommend) = (of(&calls, SEARCH), of(&calls, RECOMMEND));
        assert_eq!((search.calls, search.allocated, search.kept), (1, 300, 300));
        assert_eq!((recommend.calls, recommend.allocated, recommend.kept), (1, 100, 0));
    }

    #[test]
    fn threads_are_bounded() {
        let events: Vec<_> = (0..200).map(|at| ('+', at, SEARCH, at as u32 + 1)).collect();
        let calls = run(&events);
        assert_eq!(calls.threads.len(), MAX_THREADS);
        assert_eq!((of(&calls, SEARCH).calls, of(&calls, SEARCH).kept), (200, 20_000));
    }
}
