//! What grew and what was freed, by phase. It explains the net change of each phase.
//!
//! A phase *keeps* a block that it allocates if the block outlives the phase. It *gives back* a block that it frees and
//! that another phase had kept. Optimizers allocate their state in the first step. So the sums are separate for the
//! time before the first step, the first step, and the later steps.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::category::{Birth, Category};
use super::composition::Amount;
use super::phase::{Moment, Phase};
use memtrace_input::AddressHashing;

/// A part of the run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Part {
    /// Before the first step.
    Before,
    /// The first step.
    First,
    /// All steps after the first.
    Later,
}

impl Part {
    /// The part that a step belongs to.
    pub const fn of(step: Option<u32>) -> Part {
        match step {
            None => Part::Before,
            Some(0) => Part::First,
            Some(_) => Part::Later,
        }
    }
}

/// A source of growth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Source {
    /// The part of the run of the allocation.
    pub part: Part,
    /// The phase of the allocation.
    pub phase: Phase,
    /// The category of the blocks.
    pub category: Category,
    /// The stack of the allocation.
    pub stack: StackId,
    /// The autograd node of the allocation.
    pub context: ContextId,
}

/// Kept memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// Blocks and their rounded bytes.
    pub amount: Amount,
    /// Requested bytes, without rounding.
    pub requested: u64,
}

/// Collects what each phase kept and gave back.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    kept: HashMap<Source, Kept, AddressHashing>,
    given_back: HashMap<(Part, Phase, Category), Amount, AddressHashing>,
}

impl Growth {
    /// Takes the end of a block's lifetime. The block was freed at `now` in phase `freed_in`, or the recording ended
    /// (`None`).
    #[inline]
    pub fn ended(&mut self, birth: &Birth, category: Category, now: &Moment, freed_in: Option<Phase>) {
        if birth.at.run == now.run && birth.phase == now.phase && freed_in.is_some() {
            return;
        }
        let source = Source {
            part: Part::of(birth.at.step),
            phase: birth.phase,
            category,
            stack: birth.stack,
            context: birth.context,
        };
        let kept = self.kept.entry(source).or_default();
        kept.amount.add(birth.size);
        kept.requested += birth.requested;
        if let Some(phase) = freed_in {
            self.given_back.entry((Part::of(now.step), phase, category)).or_default().add(birth.size);
        }
    }

    /// What a phase kept, by category, most bytes first.
    pub fn kept(&self, part: Part, phase: Phase) -> Vec<(Category, Kept)> {
        let mut sums: HashMap<Category, Kept> = HashMap::new();
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

    /// What a phase freed of the blocks that others had kept, by category, most bytes first.
    pub fn given_back(&self, part: Part, phase: Phase) -> Vec<(Category, Amount)> {
        let mut all: Vec<_> = self
            .given_back
            .iter()
            .filter(|((p, f, _), _)| *p == part && *f == phase)
            .map(|((_, _, category), amount)| (*category, *amount))
            .collect();
        all.sort_by_key(|(category, amount)| (std::cmp::Reverse(amount.bytes), *category));
        all
    }

    /// The sources of kept memory that `wanted` selects, most bytes first.
    pub fn sources(&self, wanted: impl Fn(&Source) -> bool) -> Vec<(Source, Kept)> {
        let mut all: Vec<_> = self.kept.iter().filter(|(s, _)| wanted(s)).map(|(s, k)| (*s, *k)).collect();
        all.sort_by_key(|(source, kept)| (std::cmp::Reverse(kept.amount.bytes), *source));
        all
    }

    /// The memory kept in a category over the whole run.
    pub fn total(&self, category: Category) -> Kept {
        let mut sum = Kept::default();
        for (_, kept) in self.kept.iter().filter(|(s, _)| s.category == category) {
            sum.amount.bytes += kept.amount.bytes;
            sum.amount.blocks += kept.amount.blocks;
            sum.requested += kept.requested;
        }
        sum
    }
}
