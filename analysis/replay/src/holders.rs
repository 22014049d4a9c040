//! The Python paths that hold blocks (`--holders`), as they change from scan to scan.

use memtrace_trace::file::Holder;
use memtrace_trace::ids::{ContextId, StackId};

use super::allocator::Block;

/// A block that a Python path holds from a scan on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldBlock {
    /// The device.
    pub device: i16,
    /// The stack of its allocation.
    pub stack: StackId,
    /// The autograd node or module call of its allocation.
    pub context: ContextId,
    /// `seq` of its allocation.
    pub seq: u64,
    /// Its size in bytes.
    pub size: u64,
}

/// A path that a scan has found at an address, and that the scan before has not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HolderChange {
    /// The number of events at the scan.
    pub scan: u64,
    /// The address.
    pub address: u64,
    /// The path. Empty if none holds the memory at the address any more.
    pub path: Box<str>,
    /// Data type and shape of the tensor at the path. Empty if unknown.
    pub shape: Box<str>,
    /// The block at the address. `None` if the recording has no such block.
    pub block: Option<HeldBlock>,
}

impl HolderChange {
    /// `found` is the device and the block at the address.
    pub(super) fn of(holder: &Holder, found: Option<(i16, Block)>) -> HolderChange {
        let block = found.map(|(device, block)| HeldBlock {
            device,
            stack: block.stack,
            context: block.context,
            seq: block.seq,
            size: block.size,
        });
        let (path, shape) = (holder.path.clone(), holder.shape.clone());
        HolderChange { scan: holder.seq, address: holder.address, path, shape, block }
    }
}
