//! What the signals remember of an allocated block.

use memtrace_trace::ids::StackId;

/// What is remembered of an allocated block besides its `BlockAllocation`.
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
    pub const NODE_RAN: u8 = 2;
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
