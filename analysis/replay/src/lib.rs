//! Replays a recording event by event, and keeps the state of the allocators.
//!
//! The state grows with the blocks in use, never with the number of events.

mod allocator;
mod contexts;
mod cycles;
mod located;
mod names;
mod physical;
mod policy;
mod replay;

pub use allocator::{Allocator, Anomalies, Block, BlockId, BlockState, Peak, Segment, Usage};
pub use contexts::Contexts;
pub use cycles::{HeldByCycle, held_by_cycles};
pub use names::{Named, Names};
pub use physical::{Effect, Held, Owner, OwnerUse, Physical, Place};
pub use policy::{Budget, Device, Granted, Policy, Settings};
pub use replay::{Change, DeviceReplay, Replay};
