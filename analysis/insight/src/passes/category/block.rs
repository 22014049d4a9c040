//! A block: its allocation, the end of its lifetime, and its category.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, StackId, ThreadId};

use super::proof::Proof;
use super::table::Category;
use crate::passes::phase::{Phase, ProgramPosition};
use crate::rules::CategoryRuleId;

/// A category and the rule that decided it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockClassification {
    /// The category.
    pub category: Category,
    /// The rule that decided it.
    pub rule: CategoryRuleId,
}

/// The memory of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockMemory {
    /// The address.
    pub addr: u64,
    /// The size in bytes, rounded as the allocator rounds.
    pub size: u64,
    /// The requested size in bytes.
    pub requested: u64,
    /// The stream that the block belongs to.
    pub stream: u64,
    /// The private pool; 0 for the default pool.
    pub pool: u16,
}

/// Where the program allocates a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSite {
    /// The stack that allocated the block.
    pub stack: StackId,
    /// The autograd node that was running; `NONE` without one.
    pub context: ContextId,
    /// The context that the event itself carries: an autograd node or a module's call.
    pub event_context: ContextId,
    /// The thread that allocated the block.
    pub(super) thread: ThreadId,
    /// The number of the run of consecutive events from one place that the allocation belongs to.
    pub(super) call: u32,
}

/// The facts about a block at its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockAllocation {
    /// `seq` of the allocation event.
    pub seq: u64,
    /// Time of the allocation, in clock ticks.
    pub ticks: u64,
    /// The block's memory.
    pub memory: BlockMemory,
    /// Where the program allocates the block.
    pub site: BlockSite,
    /// The program's position at the allocation.
    pub position: ProgramPosition,
    /// The phase of the allocation event. On other threads it can differ from the program's phase in `position`.
    pub phase: Phase,
    /// The number of out-of-memory errors before the allocation.
    pub oom_count: u32,
    /// The fact that the name, stack, size or pool proves.
    pub proof: Proof,
    /// The flags of the allocation event.
    pub(in crate::passes) flags: Flags,
    /// Whether an evaluation with gradients allocates the block.
    pub(super) in_recorded_eval: bool,
    /// The number of calls of the model so far, including the one that allocates this block.
    pub(super) model_calls: u32,
    /// In a rotated trace: how earlier events classified the block.
    pub(super) earlier: Option<BlockClassification>,
}

impl BlockAllocation {
    /// The private pool of the block, if blocks of its category are distinguished by their pools; else 0.
    pub fn private_pool(&self, category: Category) -> u16 {
        if matches!(category, Category::GraphPool | Category::MemoryPool) { self.memory.pool } else { 0 }
    }

    /// A 512-byte block of step 0's forward pass without stack or proof. Only for tests, here and in the crates above.
    #[doc(hidden)]
    pub fn for_tests(seq: u64) -> BlockAllocation {
        let position = ProgramPosition {
            phase: Phase::Forward,
            step: Some(0),
            phase_changes: 0,
            backward_passes: 0,
            optimizer_steps: 0,
        };
        BlockAllocation::of_forward(seq, 512, StackId::NONE, position)
    }

    /// A block of a forward pass without context or proof. Only for tests of passes that examine block lifetimes.
    pub(crate) fn of_forward(seq: u64, size: u64, stack: StackId, position: ProgramPosition) -> BlockAllocation {
        BlockAllocation {
            seq,
            ticks: seq,
            memory: BlockMemory { addr: seq << 9, size, requested: size, stream: 0, pool: 0 },
            site: BlockSite {
                stack,
                context: ContextId::NONE,
                event_context: ContextId::NONE,
                thread: ThreadId::NONE,
                call: 0,
            },
            position,
            phase: Phase::Forward,
            oom_count: 0,
            proof: Proof::None,
            flags: Flags::default(),
            in_recorded_eval: false,
            model_calls: 0,
            earlier: None,
        }
    }
}

/// How a block's lifetime ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LifetimeEnd<'a> {
    /// The program's position at the end.
    pub now: &'a ProgramPosition,
    /// Whether an out-of-memory error or the end of the recording ended the lifetime, not the program's own logic.
    pub is_truncated: bool,
    /// The event that frees the block; `None` if the block is still allocated.
    pub free: Option<&'a Event>,
}

/// Whether autograd records the backward pass that allocates (`create_graph=True`), by the flags of the event. Its
/// blocks belong to the graph of a further backward pass.
pub(crate) fn is_recorded(flags: Flags) -> bool {
    flags.contains(Flags::IN_BACKWARD.with(Flags::GRAD_KNOWN).with(Flags::GRAD_ENABLED))
}

/// Whether gradients are off where a block is allocated, by the flags of the event.
pub(in crate::passes) fn is_without_gradients(flags: Flags) -> bool {
    flags.contains(Flags::GRAD_KNOWN) && !flags.contains(Flags::GRAD_ENABLED)
}
