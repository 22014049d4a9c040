//! Captures CPython stacks in place, without the GIL.
//!
//! - [`layout`]: tables of offsets for each version; 3.13 and later publish theirs.
//! - [`verify`]: checks a layout against exported or public facts before it is used.
//! - [`walk`]: the frames of the calling thread, on the event path.
//! - [`text`], [`lines`]: names and line numbers, read only when a frame is first seen.
//! - [`freed_code`]: detects that a code object's memory is about to be freed.
//! - [`locals`]: the local variables of frames, with the GIL.
//! - [`modules`]: which frames call an `nn.Module`, and which module.
//! - [`process`]: combines them, once for each process.
//!
//! Constraint: no function of CPython is called that needs the GIL, allocates or takes a lock. These are called:
//! `PyGILState_GetThisThreadState` (a thread-specific value), `Py_GetVersion` (once), and during verification
//! `PyCode_Addr2Line` (computes from immutable bytes).

mod freed_code;
#[cfg(fuzzing)]
pub mod fuzzing;
mod layout;
mod lines;
mod locals;
pub(super) mod memory;
mod modules;
pub(super) mod process;
mod reason;
mod text;
mod verify;
mod walk;

pub use layout::ObjectLayout;
pub use locals::FrameLocals;
pub use memory::{CheckedMemory, avoid_process_vm_readv};
pub use process::Python;
pub use reason::Reason;

#[cfg(test)]
mod memory_tests;
