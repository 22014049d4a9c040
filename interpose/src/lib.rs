//! The library that is preloaded into the traced process.
//!
//! First invariant: the traced process must not notice it. A hook calls the original with the arguments it got and
//! returns the original's result, whatever happens in between. A process that never touches GPU memory pays only for
//! loading this library. Before the first event there is no mapping, no connection, no thread and no lock.
//!
//! ```text
//! hooks -> guard -> emit -> ring
//!   |        \-> stack
//!   \-> original (original functions), loaded_objects (shared objects and callers)
//! ```

#![cfg_attr(test, allow(dead_code, reason = "hooks are reached through exports, which tests leave out"))]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::expect_used))]

mod connect;
mod cycles;
mod emit;
mod guard;
mod heap;
mod hooks;
mod inductor_lines;
mod labels;
#[cfg(not(test))]
mod lazy_symbol;
mod loaded_objects;
mod names;
mod original;
mod process;
mod rank;
mod seccomp;
mod stack;
mod thread_local;
mod thread_state;
mod unwind_check;
