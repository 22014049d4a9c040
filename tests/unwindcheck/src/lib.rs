//! Compares memtrace's native stacks with those of libgcc's unwinder, in any program that preloads this library.
//!
//! libgcc's unwinder is the one that C++ exceptions use. It shares nothing with memtrace's stack walker except the
//! unwinding information.
//!
//! The library defines a few functions of the C library that code of all kinds calls ([`hooks`]). In each call it
//! captures the stack as a hook of memtrace does, with the same caches, and compares it with libgcc's at the same
//! moment, frame by frame ([`stacks`]). The counts go to the file that `UNWINDCHECK_RESULTS` names ([`results`]).
//! `tests/src/unwind_check.rs` makes that file and reads it.
//!
//! # Constraints
//!
//! The program may hold any lock of its own during a call. So a comparison takes no locks but those that memtrace's
//! walker and libgcc's unwinder take themselves. It preserves `errno`. Without the file nothing is compared.
//!
//! A program whose `malloc` is jemalloc hangs. jemalloc calls these functions under its own lock, and the first
//! comparison of a thread allocates: the C library does so when it determines the bounds of the thread's stack.

pub mod hooks;
pub mod results;
pub mod stacks;
