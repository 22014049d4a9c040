//! The reference cycles that a trace contains (`--cycles`), and the allocations that they held.

use memtrace_trace::file::Cycle;
use memtrace_trace::ids::{ContextId, StackId};

use super::allocator::Block;

/// A cycle, and the allocation of a tensor that it held.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReferenceCycle {
    /// The file in the run's folder that shows the objects; empty if there is none.
    pub file: Box<str>,
    /// A one-line description of the cycle.
    pub text: Box<str>,
    /// The device, stack, and autograd node or module call of the allocation; `None` if the recording has no such
    /// block.
    pub allocation: Option<(i16, StackId, ContextId)>,
}

impl ReferenceCycle {
    /// `found` is the device and the block at the address.
    pub(super) fn of(cycle: &Cycle, found: Option<(i16, Block)>) -> ReferenceCycle {
        let allocation = found.map(|(device, block)| (device, block.stack, block.context));
        ReferenceCycle { file: cycle.file.clone(), text: cycle.text.clone(), allocation }
    }
}
