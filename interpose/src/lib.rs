//! The library that is preloaded into the traced process.
//!
//! First invariant: the traced process must not notice it. A hook calls the original with the arguments it got and
//! returns the original's result, whatever happens in between. A process that never touches GPU memory pays only for
//! loading this library. Before the first event there is no mapping, no connection, no thread and no lock.
//!
//! ```text
//! hooks -> guard -> emit -> ring
//!   |        \-> stack
//!   \-> real (original functions), objects (loaded objects and callers)
//! ```

#![cfg_attr(test, allow(dead_code, reason = "hooks are reached through exports, which tests leave out"))]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::expect_used))]

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "memtrace's preloaded library knows Linux on x86-64 only: hooks/entry.rs and objects.rs are what to port"
);

mod connect;
mod cycles;
mod emit;
mod guard;
mod heap;
mod hooks;
mod labels;
#[cfg(not(test))]
mod late;
mod local;
mod names;
mod objects;
mod origins;
mod process;
mod rank;
mod real;
mod seccomp;
mod stack;
mod thread;
mod unwind_check;
