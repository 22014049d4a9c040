//! The atomics of the ring: those of the standard library, or the model checker's (`--cfg loom`, see
//! `trace/tests/loom.rs`).

#[cfg(loom)]
pub mod killable;

#[cfg(loom)]
pub use self::killable::{AtomicU32, AtomicU64};
#[cfg(loom)]
pub use loom::sync::atomic::Ordering;
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
