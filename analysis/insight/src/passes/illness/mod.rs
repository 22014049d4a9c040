//! Signals: what block lifetimes show about issues. Each file computes one signal; the report turns signals into
//! findings.
//!
//! All signals come from one stream of allocations and frees. Their memory grows with allocated blocks and distinct
//! stacks. Frees after the last allocation (the teardown at the program's end) are kept apart: they do not show what
//! the program would have kept.

mod buckets;
mod deferred;
mod fragments;
mod garbage;
mod gradients;
mod graphs;
mod growing;
mod loaded;
mod workspaces;

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::StackId;

pub use buckets::Buckets;
pub use deferred::{Deferred, DeferredBy};
pub use fragments::{Fragments, Pin};
pub use garbage::{Collected, Garbage};
pub use gradients::StaleGradients;
pub use graphs::{Abandoned, Fate, Graphs};
pub use growing::{Growing, Grown};
pub use loaded::{Loaded, LoadedBlock};
pub use workspaces::Workspaces;

use super::category::{Birth, End};
use super::phase::{Moment, Phase, Verdict};
use super::stacks::StackFacts;
use crate::rules::Meaning;
use memtrace_replay::{Allocator, Block, BlockId, Usage};

/// What is remembered of an allocated block besides its [`Birth`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    /// A combination of the constants.
    pub bits: u8,
    /// The number of the call of a model that allocated the block, counted over all places.
    pub call: u32,
    /// The stack up to the place where the program calls its model; `NONE` outside a model.
    pub site: StackId,
}

impl Mark {
    /// Allocated by a forward pass while autograd recorded.
    pub const GRAPH: u8 = 1;
    /// Autograd ran a node that this same stack made.
    pub const RUN: u8 = 2;
    /// Read from a checkpoint.
    pub const LOADED: u8 = 4;
    /// Allocated by a backward pass.
    pub const BACKWARD: u8 = 8;
    /// A bucket of DistributedDataParallel.
    pub const BUCKET: u8 = 16;
    /// As large as a library's workspace.
    pub const WORKSPACE: u8 = 32;
    /// Belongs to a model.
    pub const MODEL: u8 = 64;

    /// Whether any of the given bits is set.
    pub const fn is(self, bit: u8) -> bool {
        self.bits & bit != 0
    }
}

/// All signals of one device.
#[derive(Clone, Debug, Default)]
pub struct Symptoms {
    /// What grows from step to step.
    pub growing: Growing,
    /// Graphs that no backward pass consumed.
    pub graphs: Graphs,
    /// Gradients that stay through the next forward pass.
    pub gradients: StaleGradients,
    /// What only the garbage collector freed.
    pub garbage: Garbage,
    /// Frees that waited for streams.
    pub deferred: Deferred,
    /// What was read from checkpoints.
    pub loaded: Loaded,
    /// Free memory in segments with blocks in use.
    pub fragments: Fragments,
    /// Workspaces of libraries.
    pub workspaces: Workspaces,
    /// Buckets of DistributedDataParallel.
    pub buckets: Buckets,
    /// The number of blocks that computations allocated.
    pub computed: u64,
    marks: Vec<Mark>,
    calls: u32,
    site: StackId,
}

impl Symptoms {
    /// Takes an allocation.
    #[inline]
    pub fn born(
        &mut self,
        birth: &Birth,
        e: &Event,
        id: BlockId,
        facts: &StackFacts,
        verdict: &Verdict,
        usage: &Usage,
    ) {
        let mark = self.mark(birth, e, facts, verdict);
        match self.marks.get_mut(id.index()) {
            Some(place) => *place = mark,
            None => self.marks.resize(id.index() + 1, mark),
        }
        let now = &birth.at;
        self.graphs.settle();
        self.garbage.settle();
        if mark.is(Mark::WORKSPACE) {
            self.workspaces.born(birth, e.stream);
        } else {
            self.growing.born(birth, mark);
        }
        self.loaded.born(birth, mark, now.step);
        self.gradients.born(birth, mark, usage.allocated);
        self.deferred.go_on(usage.active.saturating_sub(usage.allocated));
        if verdict.meaning() == Some(Meaning::Engine) {
            self.graphs.backward = birth.stack;
            self.gradients.backward = birth.stack;
        }
        if mark.is(Mark::BUCKET) {
            self.buckets.born(birth, verdict.rule);
        }
        if birth.phase == Phase::Optimizer {
            self.buckets.at_step();
        }
        self.computed += u64::from(matches!(
            birth.phase,
            Phase::Forward | Phase::Backward | Phase::Eval | Phase::Optimizer | Phase::Recompute
        ));
    }

    #[inline]
    fn mark(&mut self, birth: &Birth, e: &Event, facts: &StackFacts, verdict: &Verdict) -> Mark {
        let site = facts.outermost_compute;
        if site != self.site {
            self.site = site;
            self.calls += u32::from(!site.is_none());
        }
        let recorded = e.flags.contains(Flags::GRAD_KNOWN) && e.flags.contains(Flags::GRAD_ENABLED);
        // A workspace belongs to no graph and to no step.
        if crate::rules::is_workspace_size(birth.requested) && verdict.meaning() != Some(Meaning::Load) {
            return Mark { bits: Mark::WORKSPACE, call: self.calls, site };
        }
        let mut bits = 0;
        match birth.phase {
            Phase::Forward if recorded => {
                bits |= Mark::GRAPH;
                if facts.made_node {
                    bits |= Mark::RUN;
                }
            }
            Phase::Backward => bits |= Mark::BACKWARD,
            Phase::Load if loaded::is_checkpoint(verdict.rule) => bits |= Mark::LOADED,
            Phase::Load if verdict.meaning() == Some(Meaning::Load) => bits |= Mark::MODEL,
            _ => {}
        }
        if buckets::is_bucket(verdict.rule) {
            bits |= Mark::BUCKET;
        }
        Mark { bits, call: self.calls, site }
    }

    /// Takes the program's free of a block.
    #[inline]
    pub fn freed(&mut self, birth: &Birth, id: BlockId, facts: &StackFacts, verdict: &Verdict, end: &End<'_>) {
        let End { now, cut, free: Some(e) } = *end else { return };
        let mark = self.marks.get(id.index()).copied().unwrap_or_default();
        if mark.is(Mark::WORKSPACE) {
            self.workspaces.freed(birth);
        } else {
            self.growing.freed(birth);
        }
        if mark.is(Mark::GRAPH) {
            let inside = facts.outermost_compute == mark.site && !mark.site.is_none();
            self.graphs.freed(birth, mark, e.stack, verdict.phase, inside, cut, now);
        }
        if mark.is(Mark::BACKWARD) {
            self.gradients.freed(birth, e.stack, now);
        }
        if e.flags.contains(Flags::IN_GC) {
            self.garbage.freed(birth, e.ticks, now);
        }
        if mark.is(Mark::LOADED | Mark::MODEL) {
            self.loaded.freed(birth, mark);
        }
        if mark.is(Mark::BUCKET) {
            self.buckets.freed(birth);
        }
        self.deferred.requested(id, birth, e.ticks);
    }

    /// Takes the completion of a free: the block's memory is free again.
    #[inline]
    pub fn completed(&mut self, id: BlockId, block: &Block, ticks: u64) {
        self.deferred.completed(id, block, ticks);
    }

    /// Takes a request of the caching allocator to CUDA for a segment, whether it succeeded or not.
    pub fn wanted_more(&mut self, allocator: &Allocator, e: &Event, at: &Moment) {
        self.fragments.wanted(allocator, e, at);
    }

    /// Ends the recording. `alive`: the blocks that were not freed.
    pub fn finish<'a>(
        &mut self,
        allocator: &Allocator,
        alive: impl Iterator<Item = (BlockId, &'a Birth)>,
        now: &Moment,
        ticks: u64,
    ) {
        self.gradients.at(now);
        for (id, birth) in alive {
            let mark = self.marks.get(id.index()).copied().unwrap_or_default();
            if mark.is(Mark::GRAPH) {
                self.graphs.alive(birth, mark, now);
            }
            if mark.is(Mark::BACKWARD) {
                self.gradients.freed(birth, StackId::NONE, now);
            }
        }
        self.graphs.finish();
        self.loaded.finish();
        self.deferred.finish(|id| allocator.block(id).stream, ticks);
        self.marks = Vec::new();
    }
}
