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
//! Nanoseconds a capture, `tests/stackprobe/run --bench` on 2 busy cores of an AMD EPYC, CPython 3.12; 3.8 to 3.13 differ
//! by less than the noise. 15 instructions a frame and about 100 more (callgrind). "first" begins with empty tables, whose
//! pages the kernel has yet to give.
//!
//! | depth | unchanged | another line | another callee | up and down 4 frames | one new frame | first |
//! |---|---|---|---|---|---|---|
//! | 2 | 17 | 30 | 40 | 60 | 900 | 37,000 |
//! | 20 | 35 | 45 | 60 | 90 | 1,000 | 40,000 |
//! | 60 | 78 | 90 | 100 | 140 | 1,150 | 42,000 |
//! | 1000 | 1250 | 1370 | 1410 | 1410 | 3,400 | 73,000 |
//!
//! Memory: 4 KiB a thread up to 128 frames deep; 16 bytes a stack and 24 a frame, at most 23 MiB a process.
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
