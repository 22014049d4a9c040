//! The trace file, `.mtr`: the recording of one process, in a format that stays readable for years. `trace/FORMAT.md`
//! has the byte tables.
//!
//! Constraints of the format:
//! - A file that is cut anywhere is readable up to the cut.
//! - Damage costs only the damaged frame, and is counted.
//! - A reader uses no number that it has not checked.
//! - An event takes at most 8 bytes.
//! - A window of events can be found without decoding the others.

mod block;
pub mod budget;
mod column;
mod copy;
mod decoder;
mod definitions;
mod event_counts;
mod frame;
mod reader;
mod rewrite;
pub mod untrusted;
mod writer;

pub use crate::definition::owned::{
    CacheUse, Context, Cycle, Device, EngineAttribute, Holder, HolderScan, Label, Module, NativeFrame, NnCall, NnName,
    Notice, StackNode, TensorName, Thread,
};
pub use budget::{Budget, Exceeded};
pub use copy::{DefinitionSink, copy_frames, definitions_before};
pub use decoder::{Decoder, Events, LostBlock};
pub use definitions::{Definitions, Frame, PackedState};
pub use event_counts::EventCounts;
pub use frame::MAGIC;
pub use reader::{BlockInfo, Damage, Reader};
pub use rewrite::{NewTexts, RewriteError, rewrite};
pub use writer::{End, Writer, end_after_failure};
