//! The trace file, `.mtr`: what a process recorded, for years. `trace/FORMAT.md` has the byte tables.
//!
//! The constraints it was made under: a file cut anywhere is readable up to the cut; damage in the middle costs the
//! damaged frame and is counted; a reader never believes a number it has not checked; at most 8 bytes an event;
//! windows of events can be found without decoding the rest.

mod block;
mod census;
mod column;
mod decoder;
mod definitions;
pub mod foreign;
mod frame;
mod reader;
mod writer;

pub use census::Census;
pub use decoder::{Decoder, LostBlock};
pub use definitions::{
    Context, Cycle, Definitions, Device, Frame, Label, Module, NativeFrame, NnCall, NnName, Notice, StackNode,
    TensorName, Thread,
};
pub use frame::MAGIC;
pub use reader::{BlockInfo, Damage, Events, Reader};
pub use writer::{End, Writer, end_after_failure};
