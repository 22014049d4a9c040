//! CPython stacks, read in place without the GIL.
//!
//! - [`layout`]: where things lie, per version, as tables of offsets; 3.13 and later publish theirs.
//! - [`verify`]: checks a layout against things that are exported or public, before anything relies on it.
//! - [`walk`]: the frames of the calling thread, on the event path.
//! - [`text`], [`lines`]: names and line numbers, only when something is first seen.
//! - [`deaths`]: notices when a code object's memory is about to be freed.
//! - [`modules`]: which frames call an `nn.Module`, and which one.
//! - [`process`]: puts them together, once per process.
//!
//! No function of CPython that needs the GIL, allocates or takes a lock is called. What is called:
//! `PyGILState_GetThisThreadState` (a thread-specific value), `Py_GetVersion` (once), and during verification
//! `PyCode_Addr2Line` (computes from immutable bytes).

mod deaths;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod layout;
mod lines;
mod memory;
mod modules;
mod process;
mod reason;
mod text;
mod verify;
mod walk;

pub(crate) use memory::{CheckedMemory, avoid_process_vm_readv};
pub(crate) use process::Python;
pub(crate) use reason::Reason;

#[cfg(test)]
mod memory_tests;
