//! Captures call stacks inside a hook, at a few nanoseconds a frame. A stack is identified by a [`StackId`].
//!
//! The calling thread's frames cannot change while the thread is inside a hook. So they are read in place, without the
//! GIL ([`python`]). A stack is a node of one process-wide prefix tree ([`Interner`]). A thread remembers its last walk
//! ([`ThreadStacks`]) and looks up only what has changed.
//!
//! A stack that is already known takes no allocation and no lock, and cannot panic. It calls no foreign code except
//! `PyGILState_GetThisThreadState` (one read of a thread-specific value). A *new* frame or stack may map anonymous
//! memory and takes one short lock. That lock is never held while the [`DefinitionSink`] or foreign code is called.
//!
//! # Cost
//!
//! The table shows nanoseconds for one capture, measured with `tests/stackprobe/run --bench` on 2 shared cores of an
//! AMD EPYC with CPython 3.12. CPython 3.8 to 3.13 differ by less than the noise, which is up to a factor of 2. A
//! capture takes 15 instructions a frame and about 100 more (callgrind). "first" starts with empty tables, whose pages
//! the kernel has not provided yet.
//!
//! | depth | unchanged | another line | another callee | up and down 4 frames | one new frame | first |
//! |---|---|---|---|---|---|---|
//! | 2 | 12 | 30 | 40 | 60 | 900 | 40,000 |
//! | 20 | 22 | 45 | 50 | 60 | 1,000 | 45,000 |
//! | 60 | 44 | 90 | 100 | 140 | 1,150 | 50,000 |
//! | 1000 | 980 | 1310 | 1380 | 1500 | 3,700 | 80,000 |
//!
//! The first capture of a process also verifies the layout, which takes 0.2 to 0.6 ms.
//!
//! Memory: 4 KiB a thread for up to 128 frames. 16 bytes a stack and 24 a frame, at most 23 MiB a process.
//!
//! # Limits
//!
//! Before 3.12 the frames of a sub-interpreter are not found, because the thread-specific state remains that of the
//! main interpreter. Free-threaded builds are refused. A `libpython` must not be unloaded after use.
//!
//! # Boundaries
//!
//! This crate knows no hooks, no ring and no trace file. It passes new definitions to the sink that the caller
//! provides. It must not be entered twice on one thread (a signal handler inside a capture), which the caller's guard
//! ensures.
//!
//! The trace of a forked child needs all definitions again, so the child makes a new [`Interner`] and a new [`Python`].
//! It does not touch the parent's. A thread that does not exist in the child may hold a lock in them. Their pages are
//! shared with the parent until a write. A [`ThreadStacks`] may be kept, because it notices that the interner has
//! changed.
//!
//! [`StackId`]: memtrace_trace::ids::StackId

#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::expect_used))]

pub mod arch;
mod definition;
mod digest;
mod frame_chain;
mod id_set;
mod intern;
mod key_cache;
pub mod loader;
mod lock;
mod module_calls;
pub mod native;
mod pages;
pub mod python;
mod tables;
mod texts;
mod thread;

pub use definition::{DefinitionSink, FrameText, LoadedObject, Loss, ModuleCall};
pub use intern::{Interner, MAX_STACKS};
pub use lock::{Lock, Locked};
pub use native::NativeStacks;
pub use pages::page_size;
pub use python::{CheckedMemory, FrameLocals, ObjectLayout, Python, Reason, avoid_process_vm_readv};
pub use tables::{end_tables, reserve_table, return_table};
pub use texts::{TextId, Texts};
pub use thread::ThreadStacks;
