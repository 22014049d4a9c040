//! What was alive at the peak, without remembering every peak on the way up.
//!
//! A block belongs to the peak when it was allocated before it and freed after it. So nothing needs to be done when a new
//! peak is reached, only when a block is freed: if it was alive at the latest peak, it is added to that peak's
//! composition; a newer peak makes all that was added before void. At the end the blocks still alive are added. Each free
//! costs one addition, and by then the block's category is known.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::category::Category;
use super::modules::Belongs;
use super::phase::{Moment, Phase};
use memtrace_input::AddressHashing;
use memtrace_replay::Usage;

/// Bytes and blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amount {
    /// Bytes, rounded as the allocator rounds.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Amount {
    /// Adds one block.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.blocks += 1;
    }
}

/// Where blocks came from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Origin {
    /// The stack.
    pub stack: StackId,
    /// The autograd node.
    pub context: ContextId,
    /// The phase.
    pub phase: Phase,
    /// What they were for.
    pub category: Category,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    generation: u64,
    amount: Amount,
    /// Bytes of the largest block, and the `seq` of its allocation.
    largest: (u64, u64),
}

/// What belongs to a module, of one category.
#[derive(Clone, Copy, Debug, Default)]
pub struct Part {
    generation: u64,
    /// All of it.
    pub amount: Amount,
    /// The block that was made last: the `seq` of its allocation, and its bytes.
    pub last: (u64, u64),
    /// Whether any of it was made under activation checkpointing.
    pub checkpointed: bool,
}

/// A moment and what was alive then.
#[derive(Clone, Debug, Default)]
pub struct Composition {
    /// `seq` of the event that reached it; 0 when there was none.
    pub seq: u64,
    /// When.
    pub ticks: u64,
    /// Where the program was.
    pub at: Option<Moment>,
    /// The phase of the allocation that reached it.
    pub phase: Phase,
    /// The stack and node of that allocation.
    pub by: (StackId, ContextId),
    /// The totals.
    pub usage: Usage,
    by_origin: HashMap<Origin, Entry, AddressHashing>,
    by_module: HashMap<(Belongs, Category), Part, AddressHashing>,
    generation: u64,
}

impl Composition {
    /// A new, higher moment.
    pub fn restart(&mut self, seq: u64, ticks: u64, at: Moment, phase: Phase, by: (StackId, ContextId), usage: Usage) {
        self.generation += 1;
        (self.seq, self.ticks, self.at, self.phase, self.by, self.usage) = (seq, ticks, Some(at), phase, by, usage);
    }

    /// Whether a block allocated at `seq` was alive then, given that it still is.
    #[inline]
    pub fn includes(&self, seq: u64) -> bool {
        seq <= self.seq
    }

    /// Adds a block that was alive then, allocated by the event with this `seq`.
    #[inline]
    pub fn add(&mut self, origin: Origin, bytes: u64, seq: u64) {
        let entry = self.by_origin.entry(origin).or_default();
        if entry.generation != self.generation {
            *entry = Entry { generation: self.generation, ..Entry::default() };
        }
        entry.amount.add(bytes);
        if bytes > entry.largest.0 || bytes == entry.largest.0 && seq < entry.largest.1 {
            entry.largest = (bytes, seq);
        }
    }

    /// Adds a block, allocated by the event with this `seq`, to the module it belongs to.
    #[inline]
    pub fn add_to_module(&mut self, belongs: Belongs, category: Category, bytes: u64, seq: u64, checkpointed: bool) {
        let part = self.by_module.entry((belongs, category)).or_default();
        if part.generation != self.generation {
            *part = Part { generation: self.generation, ..Part::default() };
        }
        part.amount.add(bytes);
        part.last = part.last.max((seq, bytes));
        part.checkpointed |= checkpointed;
    }

    /// What the blocks belong to that belong to a module.
    pub fn modules(&self) -> impl Iterator<Item = (Belongs, Category, &Part)> {
        self.by_module
            .iter()
            .filter(|(_, part)| part.generation == self.generation)
            .map(|((belongs, category), part)| (*belongs, *category, part))
    }

    /// Where the blocks came from.
    pub fn origins(&self) -> impl Iterator<Item = (&Origin, &Amount)> {
        self.by_origin
            .iter()
            .filter(|(_, entry)| entry.generation == self.generation)
            .map(|(origin, entry)| (origin, &entry.amount))
    }

    /// The largest block of an origin: its bytes, and the `seq` of its allocation.
    pub fn largest_of(&self, origin: &Origin) -> Option<(u64, u64)> {
        self.by_origin.get(origin).filter(|entry| entry.generation == self.generation).map(|entry| entry.largest)
    }

    /// Bytes by category.
    pub fn by_category(&self) -> [Amount; Category::ALL.len()] {
        let mut sums = [Amount::default(); Category::ALL.len()];
        for (origin, amount) in self.origins() {
            let sum = &mut sums[origin.category as usize];
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// Bytes by phase of allocation.
    pub fn by_phase(&self) -> [Amount; Phase::ALL.len()] {
        let mut sums = [Amount::default(); Phase::ALL.len()];
        for (origin, amount) in self.origins() {
            let sum = &mut sums[origin.phase as usize];
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// The largest origins, stacks first: (origin, amount), at most `count`.
    pub fn top(&self, count: usize) -> Vec<(Origin, Amount)> {
        let mut all: Vec<_> = self.origins().map(|(o, a)| (*o, *a)).collect();
        all.sort_by_key(|(o, a)| (std::cmp::Reverse(a.bytes), *o));
        all.truncate(count);
        all
    }
}
