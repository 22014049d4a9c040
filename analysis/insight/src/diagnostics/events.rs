//! The events of a device that diagnostics observe.

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;

use super::mark::{Mark, Marks};
use crate::passes::category::BlockAllocation;
use crate::passes::phase::{EventClassification, ProgramPosition};
use crate::passes::stacks::StackFacts;
use memtrace_replay::{Allocator, BlockId, BlockState, Usage};

/// The allocation or the free of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockEvent<'a> {
    /// The event.
    pub(crate) e: &'a Event,
    /// The block.
    pub(crate) id: BlockId,
    /// The phase of the event.
    pub(crate) classification: &'a EventClassification,
}

/// The facts that are known before the first event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordingStart<'a> {
    pub(crate) definitions: &'a Definitions,
    /// The program calls a model and never trains.
    pub(crate) is_inference: bool,
}

/// The allocation of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockAllocated<'a> {
    pub(crate) e: &'a Event,
    pub(crate) block: &'a BlockAllocation,
    pub(crate) mark: Mark,
    pub(crate) classification: &'a EventClassification,
    /// The totals of the device after the allocation.
    pub(crate) usage: &'a Usage,
}

/// The program's free of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFreed<'a> {
    pub(crate) e: &'a Event,
    pub(crate) id: BlockId,
    pub(crate) block: &'a BlockAllocation,
    pub(crate) mark: Mark,
    pub(crate) classification: &'a EventClassification,
    /// The facts about the stack that frees the block.
    pub(crate) facts: &'a StackFacts,
    pub(crate) now: &'a ProgramPosition,
    /// Whether an out-of-memory error that unwinds the program frees the block.
    pub(crate) is_truncated: bool,
}

/// The blocks of a device that are in use.
#[derive(Clone, Copy)]
pub(crate) struct BlocksInUse<'a> {
    pub(super) allocator: &'a Allocator,
    /// By block id.
    pub(super) allocations: &'a [BlockAllocation],
    pub(super) marks: &'a Marks,
}

impl<'a> BlocksInUse<'a> {
    /// The blocks and their marks.
    pub(crate) fn iter(self) -> impl Iterator<Item = (&'a BlockAllocation, Mark)> {
        let in_use = self.allocator.allocated().filter(|(_, block)| block.state == BlockState::Allocated);
        in_use.filter_map(move |(id, _)| Some((self.allocations.get(id.index())?, self.marks.of(id))))
    }
}

/// An out-of-memory error.
#[derive(Clone, Copy)]
pub(crate) struct OutOfMemory<'a> {
    pub(crate) e: &'a Event,
    pub(crate) now: &'a ProgramPosition,
    /// Whether autograd may record what the error interrupts.
    pub(crate) may_record: bool,
    pub(crate) in_use: BlocksInUse<'a>,
}

/// The end of a recording.
#[derive(Clone, Copy)]
pub(crate) struct RecordingEnd<'a> {
    pub(crate) allocator: &'a Allocator,
    pub(crate) in_use: BlocksInUse<'a>,
    pub(crate) now: &'a ProgramPosition,
    /// The time of the device's last allocation, in clock ticks.
    pub(crate) ticks: u64,
}
