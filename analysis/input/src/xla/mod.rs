//! Reads the files that XLA writes about compiled programs (`XLA_FLAGS=--xla_dump_to=DIR --xla_dump_hlo_as_text`).
//!
//! XLA serves the buffers of JAX from its own pool, so no CUDA call shows them. Its dump has the buffer assignment of
//! each compiled program: every buffer with its size and its place in the program's allocations.
//!
//! - [`dump`]: the folder, and which files belong to one program.
//! - [`assignment`]: `*-buffer-assignment.txt`, the allocations and the buffers in them.
//! - [`live_range`]: `*-live-range.txt`, the buffers that are live at the program's peak.
//! - [`hlo`]: the program's text, which has the operation and the source lines of each instruction.
//! - [`lines`]: reads lines of bounded length within the budget.
//! - [`instruction`]: the names of instructions.
//!
//! XLA does not document these formats, and they change between versions. Lines that are not understood are counted.
//! The sum of the allocations is compared with the total that XLA states in `*-memory-usage-report.txt`.

mod assignment;
mod dump;
mod hlo;
mod instruction;
mod lines;
mod live_range;

pub use assignment::{Allocation, BufferKind};
pub use dump::{DETAILED_PROGRAMS, PeakBuffer, XLA_FOLDER, XlaDump, XlaModuleId, XlaPeak, XlaProgram, read_xla_dump};
pub use hlo::SourceFrame;
pub use live_range::LiveBuffer;
