//! Conclusions: one file, one result each. Passes take events and changes one by one and keep what grows with live blocks
//! and distinct stacks.

mod phase;
mod stacks;

pub use phase::{Moment, Phase, PhaseTracker, Verdict};
pub use stacks::{StackFacts, StackTable};
