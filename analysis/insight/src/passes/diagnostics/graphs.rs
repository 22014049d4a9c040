//! Autograd graphs that no backward pass consumed: activations that a forward pass kept for the backward pass and that
//! something else freed all at once.
//!
//! A backward pass frees activations one by one. A dropped graph is freed as a whole: many blocks, from many places of
//! the forward pass, with no allocation in between. Two facts identify the issue: whether a backward pass ran since,
//! and how many calls' graphs were freed together.

use std::collections::BTreeMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::mark::Mark;
use crate::passes::category::BlockAllocation;
use crate::passes::phase::{Phase, ProgramPosition};

/// A graph has at least this many blocks of one call of the model, from at least this many stacks. A loop over layers
/// has one stack. A program's own variables hold fewer.
const MIN_BLOCKS: usize = 3;
const MIN_STACKS: usize = 2;
/// Graphs of this many calls that are freed together had been collected. At the end one more is required, because the
/// current graph is freed with them.
const MIN_CALLS: usize = 3;

/// A backward pass that retains its graph frees nothing of it. So at least this many blocks must be left for each block
/// that one frees. Tensors that the program itself holds from a forward pass (a list of features, what a hook stored)
/// are left, too. Memory that only autograd had kept beside them is freed.
const LEFT_PER_FREED: u64 = 3;
/// At least this many blocks must also be left per call of the model, regardless of what backward passes free.
const LEFT_PER_CALL: usize = 2;

/// What is wrong with a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum GraphIssue {
    /// The graph was dropped without a backward pass.
    Unused,
    /// A backward pass ran and left the graph.
    Retained,
    /// The graphs of several calls were held at once.
    Kept,
}

/// The graphs with one issue and of one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnconsumedGraph {
    /// How often it happened.
    pub times: u64,
    /// The bytes of the largest graph.
    pub bytes: u64,
    /// The blocks of the largest graph.
    pub blocks: u64,
    /// The bytes of the largest graph without its last block, the result that the program requested.
    pub beside_result: u64,
    /// The number of calls of the model in the largest graph.
    pub calls: u64,
    /// The number of steps in which they were allocated.
    pub steps: u64,
    /// The stack of the model's call, up to the frame that computes.
    pub site: StackId,
    /// The latest allocation in the largest graph, usually the loss.
    pub last: (StackId, ContextId),
    /// The stack that freed the largest graph.
    pub freed_by: StackId,
    /// The latest call of backward before.
    pub backward: StackId,
    /// `seq` of the first and of the last allocation of the largest graph.
    pub seqs: (u64, u64),
    /// Whether autograd ran nodes of these places.
    pub backward_ran: bool,
}

#[derive(Clone, Copy, Debug)]
struct FreedBlock {
    size: u64,
    seq: u64,
    stack: StackId,
    context: ContextId,
    site: StackId,
    call: u32,
    step: Option<u32>,
    backward_ran: bool,
    backward_since: bool,
    freed_by: StackId,
}

/// The unconsumed graphs of one device.
#[derive(Clone, Debug, Default)]
pub struct UnconsumedGraphs {
    /// The latest call of backward.
    pub backward: StackId,
    freed_together: Vec<FreedBlock>,
    unwound: Vec<FreedBlock>,
    consumed: u64,
    consumed_blocks: u64,
    /// The number of blocks consumed since the beginning, and the number of backward passes.
    total_consumed_blocks: u64,
    backward_passes: u32,
    /// Bytes of the forward passes that backward passes freed, since the beginning.
    pub total_consumed: u64,
    found: BTreeMap<(GraphIssue, StackId), UnconsumedGraph>,
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
    #[inline]
    pub(super) fn freed(&mut self, free: &GraphFree<'_>) {
        let GraphFree { block, mark, freed_by, phase, is_inside_call, is_truncated, now } = *free;
        self.backward_passes = now.backward_passes;
        if matches!(phase, Phase::Backward | Phase::Recompute) {
            self.consumed += block.size;
            self.consumed_blocks += 1;
            self.total_consumed_blocks += 1;
            self.total_consumed += block.size;
        } else if !is_inside_call {
            let freed = freed_block(block, mark, freed_by, now);
            if is_truncated { self.unwound.push(freed) } else { self.freed_together.push(freed) }
        }
    }

    pub(super) fn still_allocated(&mut self, block: &BlockAllocation, mark: Mark, now: &ProgramPosition) {
        self.unwound.push(freed_block(block, mark, StackId::NONE, now));
    }

    /// Takes the next allocation. The blocks that were freed since the previous allocation were freed together.
    #[inline]
    pub(super) fn next_allocation(&mut self) {
        if !self.freed_together.is_empty() {
            self.classify(false);
        }
    }

    /// Ends the recording. One graph that exists now can be in use; several collected graphs cannot.
    pub(super) fn finish(&mut self) {
        // Blocks freed by unwinding or by the end can belong to one step in progress. They count if a backward pass ran
        // since. They also count if their calls never had a backward pass and other calls had one.
        let unwound = std::mem::take(&mut self.unwound);
        let had_backward = self.total_consumed > 0;
        self.freed_together.extend(unwound.into_iter().filter(|f| f.backward_since || had_backward && !f.backward_ran));
        self.classify(true);
    }

    /// Classifies the blocks that were freed together.
    fn classify(&mut self, at_end: bool) {
        let mut freed = std::mem::take(&mut self.freed_together);
        let consumed = std::mem::take(&mut self.consumed);
        let consumed_blocks = std::mem::take(&mut self.consumed_blocks);
        if freed.len() >= MIN_BLOCKS {
            // What a backward pass left counts as a graph only if it is most of the graph. A program's variables hold a
            // part.
            let (left, unused): (Vec<FreedBlock>, Vec<FreedBlock>) = freed.iter().partition(|f| f.backward_since);
            let bytes: u64 = left.iter().map(|f| f.size).sum();
            let (ran, never_ran): (Vec<FreedBlock>, Vec<FreedBlock>) = left.into_iter().partition(|f| f.backward_ran);
            let is_most = bytes >= consumed;
            if is_most && ran.len() as u64 >= LEFT_PER_FREED * consumed_blocks {
                self.add(&ran, GraphIssue::Retained, at_end);
            }
            self.add(&never_ran, GraphIssue::Unused, at_end || !is_most);
            self.add(&unused, GraphIssue::Unused, at_end);
        }
        freed.clear();
        self.freed_together = freed;
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
        if issue == GraphIssue::Retained {
            let per_backward = self.total_consumed_blocks as f64 / f64::from(self.backward_passes.max(1));
            if (of_site as f64) < calls as f64 * (LEFT_PER_FREED as f64 * per_backward)
                || of_site < calls * LEFT_PER_CALL
            {
                return;
            }
        }
        let issue = if calls >= MIN_CALLS + usize::from(at_end) { GraphIssue::Kept } else { issue };
        if at_end && issue != GraphIssue::Kept {
            return;
        }
        let steps = distinct(&mut freed.iter().map(|f| f.step.map_or(0, |s| u64::from(s) + 1)));
        let (Some(last), Some(first)) = (freed.iter().max_by_key(|f| f.seq), freed.iter().min_by_key(|f| f.seq)) else {
            return;
        };
        let bytes: u64 = freed.iter().map(|f| f.size).sum();
        let backward_ran = freed.iter().filter(|f| f.backward_ran).map(|f| f.size).sum::<u64>() * 2 > bytes;
        let found = self.found.entry((issue, site)).or_default();
        found.times += 1;
        if bytes > found.bytes {
            *found = UnconsumedGraph {
                times: found.times,
                bytes,
                blocks: freed.len() as u64,
                beside_result: bytes - last.size,
                calls: calls as u64,
                steps: steps as u64,
                site,
                last: (last.stack, last.context),
                freed_by: last.freed_by,
                backward: self.backward,
                seqs: (first.seq, last.seq),
                backward_ran,
            };
        }
    }

    /// What was found, by bytes in descending order.
    pub fn found(&self) -> Vec<(GraphIssue, UnconsumedGraph)> {
        let mut found: Vec<(GraphIssue, UnconsumedGraph)> =
            self.found.iter().map(|((issue, _), graph)| (*issue, *graph)).collect();
        found.sort_by_key(|(issue, graph)| (std::cmp::Reverse(graph.bytes), *issue, graph.site));
        found
    }
}

fn freed_block(block: &BlockAllocation, mark: Mark, freed_by: StackId, now: &ProgramPosition) -> FreedBlock {
    FreedBlock {
        size: block.size,
        seq: block.seq,
        stack: block.stack,
        context: block.context,
        site: mark.site,
        call: mark.call,
        step: block.position.step,
        backward_ran: mark.is(Mark::NODE_RAN),
        backward_since: now.backward_passes > block.position.backward_passes,
        freed_by,
    }
}
