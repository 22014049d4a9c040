//! The atomics the ring is made of: the real ones, or loom's when the model checker drives it (`--cfg loom`).

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
