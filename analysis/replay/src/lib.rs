//! What the events add up to: the allocators' state, replayed event by event.
//!
//! The state grows with live blocks, never with events.

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
