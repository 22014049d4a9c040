//! The blocks that were allocated at the peak, without storing every peak on the way up.
//!
//! A block belongs to the peak if it was allocated before it and freed after it. So a new peak needs no work; only a
//! free does. A freed block that was allocated at the latest peak is added to that peak's composition. A newer peak
//! invalidates everything added before. At the end the remaining blocks are added. Each free costs one addition, and by
//! then the block's category is known.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::event::Event;
use memtrace_trace::ids::{ContextId, StackId};

use super::category::Category;
use super::phase::{Phase, ProgramPosition};
use crate::rules::CustomCategory;
use memtrace_input::{AddressBuildHasher, CompileContextId};
use memtrace_replay::Usage;

/// A number of bytes and of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amount {
    /// Bytes, rounded as the allocator rounds.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

impl Amount {
    /// Adds one block of `bytes` bytes.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.blocks += 1;
    }
}

/// The source of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Origin {
    /// The stack that allocated them.
    pub stack: StackId,
    /// The autograd node that allocated them.
    pub context: ContextId,
    /// The phase of their allocation.
    pub phase: Phase,
    /// Their category.
    pub category: Category,
    /// Their custom category; [`CustomCategory::NONE`] without rules.
    pub custom: CustomCategory,
    /// The private pool of memory of such pools ([`Category::GraphPool`], [`Category::MemoryPool`]), otherwise 0.
    pub pool: u16,
    /// The compiled region of `torch.compile` that allocated them.
    pub compile_context: CompileContextId,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    generation: u64,
    amount: Amount,
    /// The largest block: its bytes and the `seq` of its allocation.
    largest: (u64, u64),
}

/// The module that a block belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ModuleKey {
    /// The call of a module.
    Call(ContextId),
    /// The module with this path, by its number in `ModulePaths`.
    Path(u32),
}

/// The blocks of one category that belong to a module.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModulePart {
    generation: u64,
    /// All of them.
    pub amount: Amount,
    /// The block that was allocated last: the `seq` of its allocation and its bytes.
    pub last: (u64, u64),
    /// Whether any of them was allocated under activation checkpointing.
    pub checkpointed: bool,
}

/// A point in time and the blocks that were allocated then.
#[derive(Clone, Debug, Default)]
pub struct Composition {
    /// `seq` of the event that reached it; 0 without one.
    pub seq: u64,
    /// The time, in clock ticks.
    pub ticks: u64,
    /// The program's position.
    pub position: Option<ProgramPosition>,
    /// The phase of the allocation that reached it.
    pub phase: Phase,
    /// The stack and the context of that allocation.
    pub allocated_at: (StackId, ContextId),
    /// The totals at that time.
    pub usage: Usage,
    by_origin: HashMap<Origin, Entry, AddressBuildHasher>,
    by_module: HashMap<(ModuleKey, Category), ModulePart, AddressBuildHasher>,
    generation: u64,
}

impl Composition {
    /// Moves to a new, higher point in time and invalidates all blocks added so far. `e` is the event that reached it.
    /// `phase` is the phase of that event. `usage` are the totals after it.
    pub fn restart(&mut self, e: &Event, position: ProgramPosition, phase: Phase, usage: Usage) {
        self.generation += 1;
        (self.seq, self.ticks, self.allocated_at) = (e.seq, e.ticks, (e.stack, e.context));
        (self.position, self.phase, self.usage) = (Some(position), phase, usage);
    }

    /// Whether a block allocated at `seq` was allocated at this point in time. Only valid for a block that has not been
    /// freed before.
    #[inline]
    pub fn includes(&self, seq: u64) -> bool {
        seq <= self.seq
    }

    /// Adds a block of `bytes` bytes that was allocated then. `seq` is the number of its allocation event.
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

    /// Adds a block of `bytes` bytes to the module that it belongs to. `seq` is the number of its allocation event.
    #[inline]
    pub fn add_to_module(&mut self, module: ModuleKey, category: Category, bytes: u64, seq: u64, checkpointed: bool) {
        let part = self.by_module.entry((module, category)).or_default();
        if part.generation != self.generation {
            *part = ModulePart { generation: self.generation, ..ModulePart::default() };
        }
        part.amount.add(bytes);
        part.last = part.last.max((seq, bytes));
        part.checkpointed |= checkpointed;
    }

    /// The parts that belong to modules.
    pub fn modules(&self) -> impl Iterator<Item = (ModuleKey, Category, &ModulePart)> {
        self.by_module
            .iter()
            .filter(|(_, part)| part.generation == self.generation)
            .map(|((module, category), part)| (*module, *category, part))
    }

    /// The blocks by origin.
    pub fn origins(&self) -> impl Iterator<Item = (&Origin, &Amount)> {
        self.by_origin
            .iter()
            .filter(|(_, entry)| entry.generation == self.generation)
            .map(|(origin, entry)| (origin, &entry.amount))
    }

    /// The largest block of an origin: its bytes and the `seq` of its allocation. `None` if the origin has no blocks.
    pub fn largest_of(&self, origin: &Origin) -> Option<(u64, u64)> {
        self.by_origin.get(origin).filter(|entry| entry.generation == self.generation).map(|entry| entry.largest)
    }

    /// The amounts by category.
    pub fn by_category(&self) -> [Amount; Category::ALL.len()] {
        let mut sums = [Amount::default(); Category::ALL.len()];
        for (origin, amount) in self.origins() {
            let sum = &mut sums[origin.category as usize];
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// The amounts by custom category, in the order of the categories' first rules. Blocks that no rule matches come
    /// last.
    pub fn by_custom_category(&self) -> BTreeMap<CustomCategory, Amount> {
        let mut sums: BTreeMap<CustomCategory, Amount> = BTreeMap::new();
        for (origin, amount) in self.origins() {
            let sum = sums.entry(origin.custom).or_default();
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// The amounts by compile context. Blocks that no compiled region allocated come last.
    pub fn by_compile_context(&self) -> BTreeMap<CompileContextId, Amount> {
        let mut sums: BTreeMap<CompileContextId, Amount> = BTreeMap::new();
        for (origin, amount) in self.origins() {
            let sum = sums.entry(origin.compile_context).or_default();
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// The amounts by phase of allocation.
    pub fn by_phase(&self) -> [Amount; Phase::ALL.len()] {
        let mut sums = [Amount::default(); Phase::ALL.len()];
        for (origin, amount) in self.origins() {
            let sum = &mut sums[origin.phase as usize];
            sum.bytes += amount.bytes;
            sum.blocks += amount.blocks;
        }
        sums
    }

    /// The origins with the most bytes, at most `count`. Ties are broken by origin.
    pub fn largest(&self, count: usize) -> Vec<(Origin, Amount)> {
        let mut all: Vec<_> = self.origins().map(|(o, a)| (*o, *a)).collect();
        all.sort_by_key(|(o, a)| (std::cmp::Reverse(a.bytes), *o));
        all.truncate(count);
        all
    }
}
