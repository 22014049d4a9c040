//! Autograd graphs that no backward pass consumed: activations that a forward pass kept for the backward pass and that
//! something else freed all at once.
//!
//! A backward pass frees activations one by one. A dropped graph is freed as a whole: many blocks, from many places of
//! the forward pass, with no allocation in between. Three facts identify the issue: whether a backward pass ran since,
//! how many calls' graphs were freed together, and whether a backward pass ran through another part of the same call.
//! Parts of its own forward pass that a training step drops (a cache, the logits of a router) are no evaluation, so a
//! graph that was dropped before the backward pass is only reported when nothing is left of its call. A backward pass
//! that follows it and frees no graph has unpacked copies of the dropped one: `save_on_cpu()` keeps them on the host.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use crate::passes::phase::{Phase, ProgramPosition};
use memtrace_input::AddressBuildHasher;

/// A graph has at least this many blocks of one call of the model, from at least this many stacks. A loop over layers
/// has one stack. A program's own variables hold fewer.
const MIN_BLOCKS: usize = 3;
const MIN_STACKS: usize = 2;
/// Graphs of this many calls that are freed together had been collected. At the end one more is required, because the
/// current graph is freed with them, or a variable holds the latest one. After an out-of-memory error, those that a
/// backward pass followed suffice: they are not current.
const MIN_CALLS: usize = 3;

/// A backward pass that retains its graph frees nothing of it. So at least this many blocks must be left for each block
/// that one frees. Tensors that the program itself holds from a forward pass (a list of features, what a hook stored)
/// are left, too. Memory that only autograd had kept beside them is freed.
const LEFT_PER_FREED: u64 = 3;
/// At least this many blocks must also be left per call of the model, regardless of what backward passes free.
const LEFT_PER_CALL: usize = 2;

/// At the end, the retained graphs of this many steps had been collected.
const MIN_STEPS_LEFT: usize = 2;

/// The issue of a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum GraphIssue {
    /// The graph was dropped without a backward pass.
    Unused,
    /// A backward pass ran and left the graph.
    Retained,
    /// The graphs of several calls were held at once.
    Kept,
}

/// The graphs with one issue and of one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct UnconsumedGraph {
    /// How often it happened.
    pub(super) times: u64,
    /// The bytes of the largest graph.
    pub(super) bytes: u64,
    /// The blocks of the largest graph.
    pub(super) blocks: u64,
    /// The bytes of the largest graph without its last block, the result that the program requested.
    pub(super) beside_result: u64,
    /// The number of calls of the model in the largest graph.
    pub(super) calls: u64,
    /// The number of steps in which they were allocated.
    pub(super) steps: u64,
    /// The stack of the model's call, up to the frame that computes.
    pub(super) site: StackId,
    /// The latest allocation in the largest graph, usually the loss.
    pub(super) last: (StackId, ContextId),
    /// The stack that freed the largest graph.
    pub(super) freed_by: StackId,
    /// The latest call of backward before.
    pub(super) backward: StackId,
    /// `seq` of the first and of the last allocation of the largest graph.
    pub(super) seqs: (u64, u64),
    /// Whether autograd ran nodes of these places.
    pub(super) backward_ran: bool,
}

impl UnconsumedGraph {
    /// Adds graphs of the same place. The figures are those of the largest one.
    fn add(&mut self, graph: &UnconsumedGraph) {
        let times = self.times + graph.times;
        if graph.bytes > self.bytes {
            *self = *graph;
        }
        self.times = times;
    }
}

#[derive(Clone, Copy, Debug)]
struct FreedBlock {
    size: u64,
    seq: u64,
    stack: StackId,
    context: ContextId,
    site: StackId,
    call: u32,
    /// Whether a backward pass has freed blocks of this call.
    is_consumed: bool,
    step: Option<u32>,
    backward_ran: bool,
    backward_since: bool,
    freed_by: StackId,
}

/// The state of one call of the model while blocks of its graph are allocated.
#[derive(Clone, Debug, Default)]
struct CallBlocks {
    allocated: u64,
    is_consumed: bool,
    /// The blocks of it that the program dropped. If a backward pass consumes the rest, this was no graph of its own.
    dropped: Vec<(GraphIssue, UnconsumedGraph)>,
    /// The numbers of backward passes, and of blocks that they had freed, when it was dropped.
    dropped_at: (u32, u64),
}

impl CallBlocks {
    /// The graphs that the program dropped, when no block of them is left. If a backward pass has run since and freed
    /// no block of any graph, it has used copies of the dropped one.
    fn into_dropped(self, facts: GraphFacts) -> impl Iterator<Item = (GraphIssue, UnconsumedGraph)> {
        let (passes, blocks) = self.dropped_at;
        let has_copies = facts.backward_passes > passes && facts.consumed_blocks == blocks;
        self.dropped.into_iter().filter(move |(issue, _)| !has_copies || *issue != GraphIssue::Unused)
    }
}

/// The unconsumed graphs of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct UnconsumedGraphs {
    calls: HashMap<u32, CallBlocks, AddressBuildHasher>,
    /// The latest call with a graph.
    latest_call: u32,
    /// Calls of which no block is left.
    ended_calls: Vec<u32>,
    consumed_sites: BTreeSet<StackId>,
    latest_consumed_site: StackId,
    freed_together: Vec<FreedBlock>,
    unwound: Vec<FreedBlock>,
    consumed: u64,
    consumed_blocks: u64,
    /// Since the beginning.
    facts: GraphFacts,
    /// Whether no backward pass began since the last out-of-memory error.
    is_interrupted: bool,
    found: BTreeMap<(GraphIssue, StackId), UnconsumedGraph>,
}

/// The facts that the graphs of a device show about blocks that grow.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::diagnostics) struct GraphFacts {
    /// The latest call of backward.
    pub(in crate::diagnostics) backward: StackId,
    /// Bytes of the forward passes that backward passes freed.
    pub(in crate::diagnostics) consumed_bytes: u64,
    consumed_blocks: u64,
    backward_passes: u32,
    /// Whether the graphs of several calls were freed together.
    pub(in crate::diagnostics) were_freed_together: bool,
    /// The calls whose graphs no backward pass has consumed and are allocated at the end.
    pub(in crate::diagnostics) left_calls: u64,
}

impl GraphFacts {
    /// Whether so many blocks of so many calls, through which backward passes ran, are most blocks of their graphs.
    /// Else they are results that the program keeps: backward passes freed the rest.
    pub(in crate::diagnostics) fn are_most(&self, blocks: u64, calls: u64) -> bool {
        let per_backward = self.consumed_blocks as f64 / f64::from(self.backward_passes.max(1));
        blocks as f64 >= calls as f64 * (LEFT_PER_FREED as f64 * per_backward)
    }
}

/// The free of a block of a graph.
pub(super) struct GraphFree<'a> {
    pub(super) block: &'a BlockAllocation,
    pub(super) mark: Mark,
    /// The stack that freed the block.
    pub(super) freed_by: StackId,
    /// The phase of the free.
    pub(super) phase: Phase,
    /// Whether the call of the model that allocated the block is still running.
    pub(super) is_inside_call: bool,
    /// Whether an out-of-memory error that unwinds the program frees the block.
    pub(super) is_truncated: bool,
    /// The program's position at the free.
    pub(super) now: &'a ProgramPosition,
}

impl UnconsumedGraphs {
    /// Observes the allocation of a block of a graph.
    #[inline]
    pub(super) fn allocated(&mut self, mark: Mark, now: &ProgramPosition) {
        self.advance(now);
        if mark.call != self.latest_call {
            self.ended_calls.push(self.latest_call);
            self.latest_call = mark.call;
        }
        self.calls.entry(mark.call).or_default().allocated += 1;
    }

    #[inline]
    pub(super) fn freed(&mut self, free: &GraphFree<'_>) {
        let GraphFree { block, mark, freed_by, phase, is_inside_call, is_truncated, now } = *free;
        self.advance(now);
        let call = self.calls.entry(mark.call).or_default();
        call.allocated = call.allocated.saturating_sub(1);
        if call.allocated == 0 {
            self.ended_calls.push(mark.call);
        }
        if matches!(phase, Phase::Backward | Phase::Recompute) {
            if !call.is_consumed {
                call.is_consumed = true;
                call.dropped = Vec::new();
            }
            // The loss is often computed outside all modules, and is freed first.
            if !mark.site.is_none() && mark.site != self.latest_consumed_site {
                self.latest_consumed_site = mark.site;
                self.consumed_sites.insert(mark.site);
            }
            self.consumed += block.memory.size;
            self.consumed_blocks += 1;
            self.facts.consumed_blocks += 1;
            self.facts.consumed_bytes += block.memory.size;
        } else if !is_inside_call {
            let freed = freed_block(block, mark, freed_by, now);
            if is_truncated {
                // The error interrupted the step. Its backward pass may not have begun yet.
                call.dropped = Vec::new();
                self.unwound.push(freed);
            } else {
                self.freed_together.push(freed);
            }
        }
    }

    pub(super) fn still_allocated(&mut self, block: &BlockAllocation, mark: Mark, now: &ProgramPosition) {
        self.advance(now);
        self.unwound.push(freed_block(block, mark, StackId::NONE, now));
    }

    /// Observes the next allocation. The blocks that were freed since the previous allocation were freed together.
    #[inline]
    pub(super) fn next_allocation(&mut self) {
        if !self.freed_together.is_empty() {
            self.classify(false);
        }
        if !self.ended_calls.is_empty() {
            self.end_calls();
        }
    }

    /// Ends the calls of which nothing is left. If no backward pass ran through a call, the blocks that were dropped
    /// from it are final.
    fn end_calls(&mut self) {
        for call in std::mem::take(&mut self.ended_calls) {
            let is_over = call != self.latest_call && self.calls.get(&call).is_some_and(|blocks| blocks.allocated == 0);
            if is_over && let Some(blocks) = self.calls.remove(&call) {
                blocks.into_dropped(self.facts).for_each(|(issue, graph)| self.report(issue, &graph));
            }
        }
    }

    /// The places where the program calls a model and a backward pass followed.
    pub(super) fn consumed_sites(&self) -> &BTreeSet<StackId> {
        &self.consumed_sites
    }

    /// Whether a backward pass has freed blocks of this call, some of which are still allocated.
    pub(super) fn is_consumed(&self, call: u32) -> bool {
        self.calls.get(&call).is_some_and(|blocks| blocks.is_consumed)
    }

    /// Ends the recording. One graph that exists now can be in use; several collected graphs cannot.
    pub(super) fn finish(&mut self, now: &ProgramPosition) {
        self.advance(now);
        // Blocks freed by unwinding or by the end can belong to one step in progress. They count if a backward pass ran
        // since. They also count if their calls never had a backward pass and other calls had one.
        let unwound = std::mem::take(&mut self.unwound);
        let had_backward = self.facts.consumed_bytes > 0;
        let is_left = |call: &&CallBlocks| !call.is_consumed && call.allocated >= MIN_BLOCKS as u64;
        self.facts.left_calls = self.calls.values().filter(is_left).count() as u64;
        self.freed_together.extend(unwound.into_iter().filter(|f| f.backward_since || had_backward && !f.backward_ran));
        self.classify(true);
        // A result that the program keeps does not make the rest of its call a part of training.
        let mut calls: Vec<(u32, CallBlocks)> = std::mem::take(&mut self.calls).into_iter().collect();
        calls.sort_unstable_by_key(|(call, _)| *call);
        let facts = self.facts;
        for (issue, graph) in calls.into_iter().flat_map(|(_, blocks)| blocks.into_dropped(facts)) {
            self.report(issue, &graph);
        }
    }

    /// Classifies the blocks that were freed together.
    fn classify(&mut self, at_end: bool) {
        let mut freed = std::mem::take(&mut self.freed_together);
        for block in &mut freed {
            block.is_consumed |= self.is_consumed(block.call);
        }
        let consumed = std::mem::take(&mut self.consumed);
        let consumed_blocks = std::mem::take(&mut self.consumed_blocks);
        if freed.len() >= MIN_BLOCKS {
            // The blocks that a backward pass left count as a graph only if they are most of the graph. A program's
            // variables hold a part.
            let (left, unused): (Vec<FreedBlock>, Vec<FreedBlock>) = freed.iter().partition(|f| f.backward_since);
            let bytes: u64 = left.iter().map(|f| f.size).sum();
            let (ran, never_ran): (Vec<FreedBlock>, Vec<FreedBlock>) = left.into_iter().partition(|f| f.backward_ran);
            let is_most = bytes >= consumed;
            if is_most && ran.len() as u64 >= LEFT_PER_FREED * consumed_blocks {
                self.add(&ran, GraphIssue::Retained, at_end);
            }
            let of_unused_calls = |blocks: Vec<FreedBlock>| -> Vec<FreedBlock> {
                blocks.into_iter().filter(|f| !f.is_consumed).collect()
            };
            self.add(&of_unused_calls(never_ran), GraphIssue::Unused, at_end || !is_most);
            self.add(&of_unused_calls(unused), GraphIssue::Unused, at_end);
        }
        freed.clear();
        self.freed_together = freed;
    }

    /// Observes an out-of-memory error.
    pub(super) fn out_of_memory(&mut self, now: &ProgramPosition) {
        self.advance(now);
        self.is_interrupted = true;
    }

    #[inline]
    fn advance(&mut self, now: &ProgramPosition) {
        self.is_interrupted &= self.facts.backward_passes == now.backward_passes;
        self.facts.backward_passes = now.backward_passes;
    }

    /// Adds a graph whose blocks are `freed`, unless they are too few.
    fn add(&mut self, freed: &[FreedBlock], issue: GraphIssue, at_end: bool) {
        let distinct = |of: &mut dyn Iterator<Item = u64>| {
            let mut all: Vec<u64> = of.collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        let mut sites: BTreeMap<StackId, u64> = BTreeMap::new();
        for f in freed.iter().filter(|f| !f.site.is_none()) {
            *sites.entry(f.site).or_default() += f.size;
        }
        let Some((&site, _)) = sites.iter().max_by_key(|(site, bytes)| (**bytes, **site)) else { return };
        let of_site = freed.iter().filter(|f| f.site == site).count();
        if of_site < MIN_BLOCKS || distinct(&mut freed.iter().map(|f| u64::from(f.stack.0))) < MIN_STACKS {
            return;
        }
        let calls = distinct(&mut freed.iter().filter(|f| f.site == site).map(|f| u64::from(f.call)));
        if issue == GraphIssue::Retained
            && (!self.facts.are_most(of_site as u64, calls as u64) || of_site < calls * LEFT_PER_CALL)
        {
            return;
        }
        let is_unused = issue == GraphIssue::Unused;
        let steps = distinct(&mut freed.iter().map(|f| f.step.map_or(0, |s| u64::from(s) + 1)));
        // At most one step is in progress. So of two steps whose backward passes ran, one had no more use for its
        // graph. At a regular end, the variables of the last two steps can still hold them.
        let is_left = at_end && self.is_interrupted && issue == GraphIssue::Retained && steps >= MIN_STEPS_LEFT;
        let is_past = self.is_interrupted && freed.iter().all(|f| f.backward_since);
        let issue =
            if calls >= MIN_CALLS + usize::from(at_end && !is_past) || is_left { GraphIssue::Kept } else { issue };
        if at_end && issue != GraphIssue::Kept {
            return;
        }
        let (Some(last), Some(first)) = (freed.iter().max_by_key(|f| f.seq), freed.iter().min_by_key(|f| f.seq)) else {
            return;
        };
        let bytes: u64 = freed.iter().map(|f| f.size).sum();
        let backward_ran = freed.iter().filter(|f| f.backward_ran).map(|f| f.size).sum::<u64>() * 2 > bytes;
        let graph = UnconsumedGraph {
            times: 1,
            bytes,
            blocks: freed.len() as u64,
            beside_result: bytes - last.size,
            calls: calls as u64,
            steps: steps as u64,
            site,
            last: (last.stack, last.context),
            freed_by: last.freed_by,
            backward: self.facts.backward,
            seqs: (first.seq, last.seq),
            backward_ran,
        };
        // A backward pass can still run through the rest of the call, or through copies.
        let has_rest = |call: &u32| self.calls.get(call).is_some_and(|blocks| blocks.allocated > 0);
        let is_current = |call: &u32| *call == self.latest_call || has_rest(call);
        let rest = freed.iter().map(|f| f.call).filter(is_current).max().filter(|_| is_unused && !at_end);
        match rest {
            Some(call) => {
                let blocks = self.calls.entry(call).or_default();
                blocks.dropped_at = (self.facts.backward_passes, self.facts.consumed_blocks);
                let dropped = &mut blocks.dropped;
                match dropped.iter_mut().find(|(kind, of)| (*kind, of.site) == (issue, graph.site)) {
                    Some((_, known)) => known.add(&graph),
                    None => dropped.push((issue, graph)),
                }
            }
            None => self.report(issue, &graph),
        }
    }

    /// Sets the latest call of backward.
    #[inline]
    pub(super) fn backward_called(&mut self, by: StackId) {
        self.facts.backward = by;
    }

    /// The facts that the graphs show about blocks that grow.
    pub(super) fn facts(&self) -> GraphFacts {
        self.facts
    }

    fn report(&mut self, issue: GraphIssue, graph: &UnconsumedGraph) {
        self.facts.were_freed_together |= issue == GraphIssue::Kept;
        self.found.entry((issue, graph.site)).or_default().add(graph);
    }

    /// The issues that were found, by bytes in descending order.
    pub(super) fn found(&self) -> Vec<(GraphIssue, UnconsumedGraph)> {
        let mut found: Vec<(GraphIssue, UnconsumedGraph)> =
            self.found.iter().map(|((issue, _), graph)| (*issue, *graph)).collect();
        found.sort_by_key(|(issue, graph)| (std::cmp::Reverse(graph.bytes), *issue, graph.site));
        found
    }
}

fn freed_block(block: &BlockAllocation, mark: Mark, freed_by: StackId, now: &ProgramPosition) -> FreedBlock {
    FreedBlock {
        size: block.memory.size,
        seq: block.seq,
        stack: block.site.stack,
        context: block.site.context,
        site: mark.site,
        call: mark.call,
        is_consumed: false,
        step: block.position.step,
        backward_ran: mark.is(Mark::NODE_RAN),
        backward_since: now.backward_passes > block.position.backward_passes,
        freed_by,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calls of a model, with blocks of two places.
    #[derive(Default)]
    struct Program {
        graphs: UnconsumedGraphs,
        seq: u64,
        backward_passes: u32,
    }

    const SITE: StackId = StackId(9);

    impl Program {
        fn position(&self) -> ProgramPosition {
            ProgramPosition {
                phase: Phase::Forward,
                step: Some(0),
                phase_changes: 0,
                backward_passes: self.backward_passes,
                optimizer_steps: 0,
            }
        }

        /// The blocks of one call.
        fn call(&mut self, call: u32, count: u32) -> Vec<(BlockAllocation, Mark)> {
            let mark = Mark { bits: Mark::GRAPH, call, site: SITE };
            let blocks = (0..count).map(|at| {
                self.seq += 1;
                self.graphs.next_allocation();
                let now = self.position();
                self.graphs.allocated(mark, &now);
                (BlockAllocation::of_forward(self.seq, 1 << 20, StackId(1 + at % 2), self.position()), mark)
            });
            blocks.collect()
        }

        fn free(&mut self, blocks: &[(BlockAllocation, Mark)], phase: Phase) {
            self.backward_passes += u32::from(phase == Phase::Backward);
            let now = self.position();
            for (block, mark) in blocks {
                self.graphs.freed(&GraphFree {
                    block,
                    mark: *mark,
                    freed_by: StackId::NONE,
                    phase,
                    is_inside_call: false,
                    is_truncated: false,
                    now: &now,
                });
            }
            self.graphs.next_allocation();
        }

        fn found(mut self) -> Vec<(GraphIssue, u64, u64)> {
            let now = self.position();
            self.graphs.finish(&now);
            self.graphs.found().iter().map(|(issue, graph)| (*issue, graph.times, graph.blocks)).collect()
        }
    }

    #[test]
    fn graphs_that_the_program_drops() {
        let mut p = Program::default();
        for call in 1..=3 {
            let blocks = p.call(call, 5);
            p.free(&blocks, Phase::Forward);
        }
        assert_eq!(p.found(), [(GraphIssue::Unused, 3, 5)]);
    }

    /// A loop over batches that allocates nothing outside the model looks like one call.
    #[test]
    fn graphs_of_one_call_that_the_program_drops() {
        let mut p = Program::default();
        let mut former = p.call(1, 5);
        for _ in 0..100 {
            let next = p.call(1, 5);
            p.free(&former, Phase::Forward);
            former = next;
        }
        assert_eq!(p.graphs.calls.values().map(|blocks| blocks.dropped.len()).sum::<usize>(), 1);
        assert_eq!(p.found(), [(GraphIssue::Unused, 100, 5)]);
    }

    /// A result that the program keeps does not hide the graph.
    #[test]
    fn graphs_that_the_program_drops_but_for_the_result() {
        let mut p = Program::default();
        for call in 1..=3 {
            let blocks = p.call(call, 5);
            p.free(&blocks[..4], Phase::Forward);
        }
        assert_eq!(p.found(), [(GraphIssue::Unused, 3, 4)]);
    }

    /// A cache that a training step computes and drops, before its backward pass or after it.
    #[test]
    fn a_part_of_a_call_whose_rest_is_consumed_is_training() {
        let mut p = Program::default();
        for call in 1..=4 {
            let blocks = p.call(call, 9);
            let (cache, rest) = blocks.split_at(4);
            if call % 2 == 0 {
                p.free(cache, Phase::Forward);
                p.free(rest, Phase::Backward);
            } else {
                p.free(rest, Phase::Backward);
                p.free(cache, Phase::Forward);
            }
        }
        assert_eq!(p.found(), []);
    }

    /// `save_on_cpu()` keeps the graph on the host, so its backward passes free none of these blocks.
    #[test]
    fn a_graph_whose_copies_are_consumed_is_training() {
        let run = |backward: bool| {
            let mut p = Program::default();
            for call in 1..=4 {
                let blocks = p.call(call, 5);
                p.free(&blocks, Phase::Forward);
                p.backward_passes += u32::from(backward);
            }
            p.found()
        };
        assert_eq!(run(true), []);
        assert_eq!(run(false), [(GraphIssue::Unused, 4, 5)]);
    }

    /// The caches of several steps are freed at once.
    #[test]
    fn kept_parts_of_consumed_calls_are_no_graphs() {
        let mut p = Program::default();
        let mut caches = Vec::new();
        for call in 1..=5 {
            let blocks = p.call(call, 9);
            let (cache, rest) = blocks.split_at(4);
            caches.extend_from_slice(cache);
            p.free(rest, Phase::Backward);
        }
        p.free(&caches, Phase::Forward);
        p.call(6, 1);
        assert_eq!(p.found(), []);
    }

    /// Backward passes that retain their graphs free nothing until the third step finds no memory.
    #[test]
    fn retained_graphs_of_two_steps_at_an_error() {
        let run = |passes_after_error: u32| {
            let mut p = Program::default();
            let mut graphs = Vec::new();
            for call in 1..=3 {
                let mut blocks = p.call(call, 5);
                blocks.iter_mut().for_each(|(block, _)| block.position.step = Some(call));
                graphs.extend(blocks);
                p.backward_passes += u32::from(call < 3);
            }
            let now = p.position();
            p.graphs.out_of_memory(&now);
            p.backward_passes += passes_after_error;
            let now = p.position();
            for (block, mark) in &graphs {
                p.graphs.still_allocated(block, Mark { bits: mark.bits | Mark::NODE_RAN, ..*mark }, &now);
            }
            p.found()
        };
        assert_eq!(run(0), [(GraphIssue::Kept, 1, 10)]);
        assert_eq!(run(1), [], "the variables of the last two steps can still hold them");
    }

    /// Validation losses are stored after each step, until a training step finds no memory.
    #[test]
    fn graphs_of_evaluations_that_were_stored_before_an_error() {
        let run = |evaluations: u32| {
            let mut p = Program::default();
            let mut stored = Vec::new();
            for call in 0..evaluations {
                let blocks = p.call(2 * call, 5);
                p.free(&blocks, Phase::Backward);
                stored.extend(p.call(2 * call + 1, 5));
            }
            stored.extend(p.call(2 * evaluations, 2));
            let now = p.position();
            p.graphs.out_of_memory(&now);
            stored.iter().for_each(|(block, mark)| p.graphs.still_allocated(block, *mark, &now));
            p.found()
        };
        // A backward pass followed all but the latest.
        assert_eq!(run(4), [(GraphIssue::Kept, 1, 15)]);
        assert_eq!(run(3), []);
    }

    /// The state of a call is dropped when no block of it is left.
    #[test]
    fn memory_does_not_grow_with_calls() {
        let mut p = Program::default();
        for call in 1..=1000 {
            let blocks = p.call(call, 5);
            p.free(&blocks[..2], Phase::Forward);
            p.free(&blocks[2..], Phase::Backward);
        }
        assert!(p.graphs.calls.len() <= 2 && p.graphs.ended_calls.len() <= 2);
    }
}
