//! The growth and the frees by phase. They explain the net change of each phase.
//!
//! A phase *keeps* a block that it allocates if the block outlives the phase. A phase can also free blocks that other
//! phases had kept. Optimizers allocate their state in the first step. So the sums are separate for the time before the
//! first step, the first step, and the later steps.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::category::{BlockAllocation, Category};
use super::composition::Amount;
use super::pass::{BlockAllocated, LifetimeEnded, Pass, RecordingEnd};
use super::phase::{Phase, ProgramPosition};
use memtrace_input::AddressBuildHasher;

/// A part of the run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RunPart {
    /// Before the first step.
    BeforeFirstStep,
    /// The first step.
    FirstStep,
    /// All steps after the first.
    LaterSteps,
}

impl RunPart {
    /// The part that a step belongs to.
    pub const fn of(step: Option<u32>) -> RunPart {
        match step {
            None => RunPart::BeforeFirstStep,
            Some(0) => RunPart::FirstStep,
            Some(_) => RunPart::LaterSteps,
        }
    }
}

/// A source of growth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GrowthSource {
    /// The part of the run of the allocation.
    pub part: RunPart,
    /// The phase of the allocation.
    pub phase: Phase,
    /// The category of the blocks.
    pub category: Category,
    /// The stack of the allocation.
    pub stack: StackId,
    /// The autograd node of the allocation.
    pub context: ContextId,
}

/// KeptMemory memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeptMemory {
    /// Blocks and their rounded bytes.
    pub amount: Amount,
    /// Requested bytes, without rounding.
    pub requested: u64,
}

/// The bytes that each phase kept, and those that it freed of other phases.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    kept: HashMap<GrowthSource, KeptMemory, AddressBuildHasher>,
    freed_of_other_phases: HashMap<(RunPart, Phase, Category), Amount, AddressBuildHasher>,
}

/// Collects [`Growth`].
#[derive(Clone, Debug, Default)]
pub(crate) struct GrowthCollector {
    growth: Growth,
    pending: Vec<PendingFree>,
}

/// A free that belongs to the program's teardown if no allocation follows.
#[derive(Clone, Copy, Debug)]
struct PendingFree {
    block: BlockAllocation,
    category: Category,
    position: ProgramPosition,
    phase: Option<Phase>,
}

impl From<GrowthCollector> for Growth {
    fn from(collector: GrowthCollector) -> Growth {
        collector.growth
    }
}

impl Pass for GrowthCollector {
    #[inline]
    fn allocated(&mut self, _: &BlockAllocated<'_>) {
        for free in self.pending.drain(..) {
            self.growth.lifetime_ended(&free.block, free.category, &free.position, free.phase);
        }
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        let (block, category, now) = (ended.block, ended.classification.category, ended.now);
        let phase = ended.freed.filter(|freed| !freed.is_truncated).map(|freed| freed.classification.phase);
        if ended.freed.is_some_and(|freed| freed.may_be_teardown) {
            self.pending.push(PendingFree { block: *block, category, position: *now, phase });
        } else {
            self.growth.lifetime_ended(block, category, now, phase);
        }
    }

    fn finish(&mut self, _: &RecordingEnd<'_>) {
        for free in std::mem::take(&mut self.pending) {
            self.growth.lifetime_ended(&free.block, free.category, &free.position, None);
        }
    }
}

impl Growth {
    /// The lifetime of a block ended. The block was freed at `now` in phase `freed_in`, or the recording ended
    /// (`None`).
    #[inline]
    fn lifetime_ended(
        &mut self,
        block: &BlockAllocation,
        category: Category,
        now: &ProgramPosition,
        freed_in: Option<Phase>,
    ) {
        // Some phases do not change the program's position, such as an optimizer inside a backward pass.
        if block.position.phase_changes == now.phase_changes && freed_in == Some(block.phase) {
            return;
        }
        let source = GrowthSource {
            part: RunPart::of(block.position.step),
            phase: block.phase,
            category,
            stack: block.site.stack,
            context: block.site.context,
        };
        let kept = self.kept.entry(source).or_default();
        kept.amount.add(block.memory.size);
        kept.requested += block.memory.requested;
        if let Some(phase) = freed_in {
            self.freed_of_other_phases
                .entry((RunPart::of(now.step), phase, category))
                .or_default()
                .add(block.memory.size);
        }
    }

    /// The blocks that a phase kept, by category, most bytes first.
    pub fn kept(&self, part: RunPart, phase: Phase) -> Vec<(Category, KeptMemory)> {
        let mut sums: HashMap<Category, KeptMemory> = HashMap::new();
        for (source, kept) in self.kept.iter().filter(|(s, _)| s.part == part && s.phase == phase) {
            let sum = sums.entry(source.category).or_default();
            sum.amount.bytes += kept.amount.bytes;
            sum.amount.blocks += kept.amount.blocks;
            sum.requested += kept.requested;
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(category, kept)| (std::cmp::Reverse(kept.amount.bytes), *category));
        sums
    }

    /// The blocks of other phases that a phase freed, by category, most bytes first.
    pub fn freed_of_other_phases(&self, part: RunPart, phase: Phase) -> Vec<(Category, Amount)> {
        let mut all: Vec<_> = self
            .freed_of_other_phases
            .iter()
            .filter(|((p, f, _), _)| *p == part && *f == phase)
            .map(|((_, _, category), amount)| (*category, *amount))
            .collect();
        all.sort_by_key(|(category, amount)| (std::cmp::Reverse(amount.bytes), *category));
        all
    }

    /// The sources of kept memory that `is_included` selects, most bytes first.
    pub fn sources(&self, is_included: impl Fn(&GrowthSource) -> bool) -> Vec<(GrowthSource, KeptMemory)> {
        let mut all: Vec<_> = self.kept.iter().filter(|(s, _)| is_included(s)).map(|(s, k)| (*s, *k)).collect();
        all.sort_by_key(|(source, kept)| (std::cmp::Reverse(kept.amount.bytes), *source));
        all
    }

    /// The memory kept in a category over the whole run.
    pub fn total(&self, category: Category) -> KeptMemory {
        let mut sum = KeptMemory::default();
        for (_, kept) in self.kept.iter().filter(|(s, _)| s.category == category) {
            sum.amount.bytes += kept.amount.bytes;
            sum.amount.blocks += kept.amount.blocks;
            sum.requested += kept.requested;
        }
        sum
    }
}
