//! Call stacks: taken from inside a hook, at a few nanoseconds a frame, and named by a [`StackId`].
//!
//! The calling thread's frames cannot change while the thread is inside our hook, so they are read in place, without
//! the GIL ([`python`]). A stack is a node of one process-wide prefix tree ([`Interner`]); a thread remembers its last
//! walk ([`ThreadStacks`]) and only looks up what changed since.
//!
//! Constraints, all of which hold for a stack that is already known: no allocation, no lock, no panic, no call into
//! foreign code but `PyGILState_GetThisThreadState` (one read of a thread-specific value). A *new* frame or stack may
//! map anonymous memory and takes one short lock, which is never held while the [`DefinitionSink`] or anything foreign
//! is called.
//!
//! # Cost
//!
//! Nanoseconds a capture, `tests/stackprobe/run --bench` on 2 shared cores of an AMD EPYC, CPython 3.12; 3.8 to 3.13
//! differ by less than the noise, which is up to a factor of 2. 15 instructions a frame and about 100 more (callgrind).
//! "first" begins with empty tables, whose pages the kernel has yet to give.
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
//! Memory: 4 KiB a thread up to 128 frames deep; 16 bytes a stack and 24 a frame, at most 23 MiB a process.
//!
//! # Limits
//!
//! Before 3.12 a sub-interpreter's frames are not seen: the thread-specific state stays the main interpreter's, and so
//! do the frames. Free-threaded builds are refused. A `libpython` that is unloaded after use is not expected.
//!
//! # Borders
//!
//! This module may not call the hooks, the ring or the trace file: what is new goes to the sink that the caller gives.
//! It may not be entered twice on one thread (a signal handler inside a capture): the caller's guard sees to that.
//!
//! A forked child, whose own trace needs all definitions again, makes a new [`Interner`] and a new [`Python`]. The
//! parent's are left alone: a lock in them may be held by a thread that is not there, and their pages are shared with
//! the parent until somebody writes. A [`ThreadStacks`] may be kept: it notices that the interner is another one.
//!
//! [`StackId`]: memtrace_trace::ids::StackId

mod calls;
mod definition;
mod digest;
mod id_set;
mod intern;
mod key_cache;
mod lock;
pub(crate) mod native;
mod pages;
pub(crate) mod python;
mod texts;
mod thread;

pub(crate) use definition::{DefinitionSink, FrameText, LoadedObject, Loss, ModuleCall};
pub(crate) use intern::{Interner, MAX_STACKS};
pub(crate) use native::NativeStacks;
pub(crate) use python::{CheckedMemory, Python, Reason, avoid_process_vm_readv};
#[allow(unused_imports, reason = "the stack probe has no labels")]
pub(crate) use texts::{TextId, Texts};
pub(crate) use thread::ThreadStacks;
