//! Replays a recording event by event, and keeps the state of the allocators.
//!
//! The state grows with the blocks in use, never with the number of events.
//!
//! ```
//! use memtrace_replay::Replay;
//!
//! let run = memtrace_input::open_run("../../tests/golden/snapshots/resnet_leak.pickle.gz")?;
//! let process = &run.processes()[0];
//! let mut replay = Replay::new(process.trace_index(), None);
//! process.recording().stream(&mut |events| {
//!     for event in events {
//!         replay.apply(event, |_, _, _, _| {});
//!     }
//! });
//! let allocator = &replay.devices()[0].allocator;
//! assert_eq!(allocator.usage().allocated, 380_880_384);
//! assert!(allocator.peak().allocated > allocator.usage().allocated);
//! # Ok::<(), memtrace_input::Error>(())
//! ```

mod allocator;
mod contexts;
mod cycles;
mod driver_pages;
mod holders;
mod locate;
mod mapped_segments;
mod names;
mod objects;
mod physical;
mod pinned;
mod policy;
mod replay;

pub use allocator::{
    Allocator, Anomalies, Block, BlockId, BlockSegment, BlockState, Peak, SMALL_SEGMENT, Segment, Usage,
};
pub use contexts::Contexts;
pub use cycles::ReferenceCycle;
pub use holders::{HeldBlock, HolderChange};
pub use mapped_segments::UnmappedBytes;
pub use names::{AllocationNames, NameMatcher, Names};
pub use objects::{HoldingObjects, ObjectMatcher};
pub use physical::{DeviceAllocations, Effect, MemoryLocation, Owner, OwnerUsage, PhysicalAllocation, PhysicalMemory};
pub use pinned::PinnedBlocks;
pub use policy::{AllocatedBlock, AllocatorSettings, LimitedDevice, Policy, PolicyDevice};
pub use replay::{Change, DeviceReplay, Replay};
