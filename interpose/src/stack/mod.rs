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
//! This module may not call the hooks, the ring or the trace file: what is new goes to the sink that the caller gives.
//! It may not be entered twice on one thread (a signal handler inside a capture): the caller's guard sees to that.
//!
//! A forked child, whose own trace needs all definitions again, makes a new [`Interner`] and a new [`Python`]. The
//! parent's are left alone: a lock in them may be held by a thread that is not there, and their pages are shared with
//! the parent until somebody writes. A [`ThreadStacks`] may be kept: it notices that the interner is another one.
//!
//! [`StackId`]: memtrace_trace::ids::StackId

mod definition;
mod digest;
mod id_set;
mod intern;
mod key_cache;
mod lock;
mod pages;
pub(crate) mod python;
mod thread;

#[allow(unused_imports, reason = "for sinks that count losses")]
pub(crate) use definition::Loss;
pub(crate) use definition::{DefinitionSink, FrameText};
pub(crate) use intern::Interner;
pub(crate) use python::{Python, Reason};
pub(crate) use thread::ThreadStacks;
