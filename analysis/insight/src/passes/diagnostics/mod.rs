//! Signals: what block lifetimes show about issues. Each file computes one signal; the report turns signals into
//! issues.
//!
//! All signals come from one stream of allocations and frees. Their memory grows with allocated blocks and distinct
//! stacks. Frees after the last allocation (the teardown at the program's end) are kept apart: they do not show what
//! the program would have kept.

mod buckets;
mod checkpoints;
mod deferred;
mod evaluation;
mod fragmentation;
mod garbage;
mod gradients;
mod graphs;
mod growing;
mod loops;
mod mark;
mod open_ranges;
mod outputs;
mod turns;
mod windows;
mod workspaces;

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::StackId;

pub use buckets::DdpBuckets;
pub use checkpoints::{CheckpointBlock, CheckpointBlocks};
pub use deferred::{DeferredFrees, DeferredSource};
pub use evaluation::{EvaluationSign, Evaluations, InterruptedGraph};
pub use fragmentation::{BlockingSource, WorstFragmentation};
pub use garbage::{CollectedBlocks, CollectedGarbage};
pub use gradients::StaleGradients;
pub use graphs::{GraphIssue, UnconsumedGraph, UnconsumedGraphs};
pub use growing::{GrowingSource, GrowthKind, GrowthRate, GrowthSampler};
pub use mark::Mark;
pub use outputs::{HeldBlocks, HeldOutputs};
pub use turns::LoopTurn;
pub use windows::{Turns, WindowGrowth, WindowSampler};
pub use workspaces::CublasWorkspaces;

pub(super) use loops::LoopTable;
pub(super) use open_ranges::range_rows;

use super::category::{BlockAllocation, LifetimeEnd, Proof};
use super::phase::{EventClassification, Phase, ProgramPosition};
use super::stacks::StackFacts;
use crate::rules::Meaning;
use graphs::GraphFree;
use memtrace_replay::{Allocator, Block, BlockId, Usage};

/// The allocation or the free of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockEvent<'a> {
    /// The event.
    pub e: &'a Event,
    /// The block.
    pub id: BlockId,
    /// The phase of the event.
    pub classification: &'a EventClassification,
}

/// All signals of one device.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    /// What grows from step to step, or from request to request.
    pub growing: GrowthSampler,
    /// What grows without steps.
    pub windows: WindowSampler,
    /// Graphs that no backward pass consumed.
    pub graphs: UnconsumedGraphs,
    /// Evaluations with gradients that ran out of memory.
    pub evaluations: Evaluations,
    /// Gradients that stay through the next forward pass.
    pub gradients: StaleGradients,
    /// Results of a forward pass that stay through the next one.
    pub outputs: HeldOutputs,
    /// What only the garbage collector freed.
    pub garbage: CollectedGarbage,
    /// Frees that waited for streams.
    pub deferred: DeferredFrees,
    /// What was read from checkpoints.
    pub checkpoints: CheckpointBlocks,
    /// Free memory in segments with blocks in use.
    pub fragmentation: WorstFragmentation,
    /// Workspaces of libraries.
    pub workspaces: CublasWorkspaces,
    /// Buckets of DistributedDataParallel.
    pub buckets: DdpBuckets,
    /// The number of blocks that computations allocated.
    pub computed: u64,
    marks: Vec<Mark>,
    calls: u32,
    site: StackId,
}

impl Signals {
    /// `is_inference`: the program calls a model and never trains. `windows`: for growth without steps.
    pub(in crate::passes) fn new(is_inference: bool, windows: WindowSampler) -> Signals {
        Signals { growing: GrowthSampler::new(is_inference), windows, ..Signals::default() }
    }

    /// Takes an allocation.
    #[inline]
    pub fn allocated(&mut self, block: &BlockAllocation, event: &BlockEvent<'_>, facts: &StackFacts, usage: &Usage) {
        let BlockEvent { e, id, classification } = *event;
        let mark = self.mark(block, e, facts, classification);
        match self.marks.get_mut(id.index()) {
            Some(old) => *old = mark,
            None => self.marks.resize(id.index() + 1, mark),
        }
        let now = &block.position;
        self.graphs.next_allocation();
        if mark.is(Mark::GRAPH) {
            self.graphs.allocated(mark);
            self.evaluations.allocated(block, mark);
        }
        self.garbage.next_allocation();
        if mark.is(Mark::WORKSPACE) {
            self.workspaces.allocated(block, e.stream);
        } else {
            self.growing.allocated(block, mark, usage.allocated);
            self.windows.allocated(block, e.thread, mark, usage.allocated);
        }
        self.checkpoints.allocated(block, mark, now.step);
        self.gradients.allocated(block, mark, usage.allocated);
        self.outputs.allocated(block, mark.is(Mark::GRAPH), usage.allocated);
        self.deferred.next_allocation(usage.active.saturating_sub(usage.allocated));
        if classification.meaning() == Some(Meaning::Engine) {
            self.graphs.backward = block.stack;
            self.gradients.backward = block.stack;
        }
        if mark.is(Mark::BUCKET) {
            self.buckets.allocated(block, classification.rule);
        }
        if block.phase == Phase::Optimizer {
            self.buckets.at_step();
        }
        let computes = matches!(block.phase, Phase::Forward | Phase::Backward | Phase::Optimizer | Phase::Recompute);
        self.computed += u64::from(computes || block.phase.is_forward_only());
    }

    #[inline]
    fn mark(
        &mut self,
        block: &BlockAllocation,
        e: &Event,
        facts: &StackFacts,
        classification: &EventClassification,
    ) -> Mark {
        let site = facts.outermost_compute;
        if site != self.site {
            self.site = site;
            self.calls += u32::from(!site.is_none());
        }
        let recorded = e.flags.contains(Flags::GRAD_KNOWN) && e.flags.contains(Flags::GRAD_ENABLED);
        // A workspace belongs to no graph and to no step.
        if may_be_workspace(block) && classification.meaning() != Some(Meaning::Load) {
            return Mark { bits: Mark::WORKSPACE, call: self.calls, site };
        }
        let mut bits = 0;
        match block.phase {
            Phase::Forward | Phase::Eval if recorded && classification.may_record() => {
                bits |= Mark::GRAPH;
                if facts.made_node {
                    bits |= Mark::NODE_RAN;
                }
            }
            Phase::Backward => bits |= Mark::BACKWARD,
            Phase::Load if checkpoints::is_checkpoint(classification.rule) => bits |= Mark::LOADED,
            Phase::Load if classification.meaning() == Some(Meaning::Load) => bits |= Mark::MODEL,
            _ => {}
        }
        if buckets::is_bucket(classification.rule) {
            bits |= Mark::BUCKET;
        }
        Mark { bits, call: self.calls, site }
    }

    /// Whether a block is a workspace of a library, which belongs to no part of the program.
    #[inline]
    pub(in crate::passes) fn is_workspace(&self, id: BlockId) -> bool {
        self.marks.get(id.index()).is_some_and(|mark| mark.is(Mark::WORKSPACE))
    }

    /// Takes the program's free of a block.
    #[inline]
    pub fn freed(
        &mut self,
        block: &BlockAllocation,
        event: &BlockEvent<'_>,
        facts: &StackFacts,
        end: &LifetimeEnd<'_>,
    ) {
        let BlockEvent { e, id, classification } = *event;
        let LifetimeEnd { now, is_truncated, .. } = *end;
        let mark = self.marks.get(id.index()).copied().unwrap_or_default();
        if mark.is(Mark::WORKSPACE) {
            self.workspaces.freed(block);
        } else {
            let by_program = !is_truncated && !e.stack.is_none() && !facts.native_only;
            self.growing.freed(block, !by_program);
            self.windows.freed(block, mark);
        }
        if mark.is(Mark::GRAPH) {
            if matches!(classification.phase, Phase::Backward | Phase::Recompute) {
                self.evaluations.consumed(block, mark);
            }
            self.graphs.freed(&GraphFree {
                block,
                mark,
                freed_by: e.stack,
                phase: classification.phase,
                is_inside_call: facts.outermost_compute == mark.site && !mark.site.is_none(),
                is_truncated,
                now,
            });
        }
        if mark.is(Mark::GRAPH) {
            let by_engine = facts.in_engine || e.flags.contains(Flags::IN_BACKWARD);
            let by_user = !by_engine && !e.flags.contains(Flags::IN_GC) && !is_truncated;
            self.outputs.freed(block, e.stack, by_user, now);
        }
        if mark.is(Mark::BACKWARD) {
            self.gradients.freed(block, e.stack, now);
        }
        if e.flags.contains(Flags::IN_GC) {
            self.garbage.freed(block, e.ticks, now);
        }
        if mark.is(Mark::LOADED | Mark::MODEL) {
            self.checkpoints.freed(block, mark);
        }
        if mark.is(Mark::BUCKET) {
            self.buckets.freed(block);
        }
        self.deferred.requested(id, block, e.ticks);
    }

    /// Takes the completion of a free: the block's memory is free again.
    #[inline]
    pub fn completed(&mut self, id: BlockId, block: &Block, ticks: u64) {
        self.deferred.completed(id, block, ticks);
    }

    /// Takes a request of the caching allocator to CUDA for a segment, whether it succeeded or not.
    pub fn segment_requested(&mut self, allocator: &Allocator, e: &Event, position: &ProgramPosition) {
        self.fragmentation.segment_requested(allocator, e, position);
    }

    /// Takes an out-of-memory error.
    pub fn out_of_memory(&mut self, e: &Event, now: &ProgramPosition) {
        self.growing.out_of_memory(e.stack, e.size);
        self.graphs.out_of_memory(now);
    }

    /// Takes an out-of-memory error in a forward pass. `allocated`: the blocks that are in use.
    pub fn forward_interrupted<'a>(
        &mut self,
        e: &Event,
        allocated: impl Iterator<Item = (BlockId, &'a BlockAllocation)>,
        now: &ProgramPosition,
    ) {
        let (marks, graphs) = (&self.marks, &self.graphs);
        let marked = allocated.map(|(id, block)| (block, marks.get(id.index()).copied().unwrap_or_default()));
        let of_graphs = marked.filter(|(block, mark)| {
            let is_pending = block.position.backward_passes == now.backward_passes && !graphs.is_consumed(mark.call);
            mark.is(Mark::GRAPH) && is_pending
        });
        self.evaluations.out_of_memory(e.seq, of_graphs, now);
    }

    /// The graph of an evaluation that ran out of memory itself because it recorded one, and what shows that.
    pub fn interrupted_evaluation(
        &self,
        definitions: &Definitions,
    ) -> Option<(&InterruptedGraph, Vec<EvaluationSign>)> {
        let found = self.graphs.found();
        let dropped = |site| {
            let here = found.iter().filter(|(kind, graph)| *kind == GraphIssue::Unused && graph.site == site);
            here.map(|(_, graph)| graph.times).sum()
        };
        self.evaluations.interrupted(definitions, self.graphs.consumed_sites(), &dropped)
    }

    /// Ends the recording. `allocated`: the blocks that were not freed.
    pub fn finish<'a>(
        &mut self,
        allocator: &Allocator,
        allocated: impl Iterator<Item = (BlockId, &'a BlockAllocation)>,
        now: &ProgramPosition,
        ticks: u64,
    ) {
        self.gradients.position_changed(now);
        for (id, block) in allocated {
            let mark = self.marks.get(id.index()).copied().unwrap_or_default();
            if mark.is(Mark::GRAPH) {
                self.graphs.still_allocated(block, mark, now);
            }
            if mark.is(Mark::BACKWARD) {
                self.gradients.freed(block, StackId::NONE, now);
            }
        }
        self.graphs.finish();
        self.outputs.finish();
        self.checkpoints.finish();
        self.deferred.finish(|id| allocator.block(id).stream, ticks);
        self.marks = Vec::new();
    }
}

/// Whether a block is as large as a cuBLAS workspace and nothing shows that it is something else. Where the model
/// computes, a workspace has a proof: any code that multiplies matrices, or may do so, gives one.
fn may_be_workspace(block: &BlockAllocation) -> bool {
    let is_something_else = match block.phase {
        Phase::Data => true,
        Phase::Forward | Phase::Backward | Phase::Recompute | Phase::Eval | Phase::Generate | Phase::Rollout => {
            matches!(
                block.proof,
                Proof::None
                    | Proof::ParameterSized
                    | Proof::AccumulatesGradient
                    | Proof::WeightCast
                    | Proof::Named(_)
                    | Proof::NamedCache
            )
        }
        Phase::Load | Phase::Optimizer | Phase::Other => false,
    };
    crate::rules::is_workspace_size(block.requested) && !is_something_else
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_as_large_as_a_workspace_is_a_result() {
        let cases = [
            (Phase::Eval, Proof::None, 32 << 20, false),
            (Phase::Forward, Proof::None, 32 << 20, false),
            (Phase::Backward, Proof::AccumulatesGradient, 32 << 20, false),
            (Phase::Data, Proof::None, 32 << 20, false),
            // Code that multiplies matrices, or that may do so.
            (Phase::Forward, Proof::WorkspaceSized, 32 << 20, true),
            (Phase::Eval, Proof::MaybeWorkspace, 32 << 20, true),
            (Phase::Other, Proof::None, 32 << 20, true),
            (Phase::Forward, Proof::WorkspaceSized, 31 << 20, false),
        ];
        for (phase, proof, requested, expected) in cases {
            let mut block = BlockAllocation::for_tests(1);
            (block.phase, block.proof, block.requested) = (phase, proof, requested);
            assert_eq!(may_be_workspace(&block), expected, "{phase:?} {proof:?} {requested}");
        }
    }
}
