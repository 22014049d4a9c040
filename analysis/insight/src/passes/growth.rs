//! What grew and what was given back, by phase: the explanation of a phase's net.
//!
//! A block is *kept* by the phase that allocated it when it outlives that phase, and *given back* by the phase that frees it
//! when another had kept it. The sums are held apart for the time before the first step, the first step, and the later
//! steps, because optimizers make their state in the first.

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
    /// All steps after it.
    Later,
}

impl Part {
    /// The part a step lies in.
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
    /// When.
    pub part: Part,
    /// In which phase.
    pub phase: Phase,
    /// What for.
    pub category: Category,
    /// From where.
    pub stack: StackId,
    /// By which autograd node.
    pub context: ContextId,
}

/// Kept bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// In blocks.
    pub amount: Amount,
    /// As asked for, without rounding.
    pub requested: u64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    kept: HashMap<Source, Kept, AddressHashing>,
    given_back: HashMap<(Part, Phase, Category), Amount, AddressHashing>,
}

impl Growth {
    /// A block has ended: it was freed in `phase` at `now`, or (`None`) the recording ended.
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

    /// What a phase kept, by category, most first.
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

    /// What a phase gave back of what others had kept, by category, most first.
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

    /// The sources of what was kept, most first.
    pub fn sources(&self, wanted: impl Fn(&Source) -> bool) -> Vec<(Source, Kept)> {
        let mut all: Vec<_> = self.kept.iter().filter(|(s, _)| wanted(s)).map(|(s, k)| (*s, *k)).collect();
        all.sort_by_key(|(source, kept)| (std::cmp::Reverse(kept.amount.bytes), *source));
        all
    }

    /// Bytes kept in a category over the whole run.
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
