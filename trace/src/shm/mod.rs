//! Shared memory between the traced process and the launcher: one segment for each process, one ring for each thread,
//! and one lock for all processes of a run.
//!
//! It lives for one run and one build ([`layout::BUILD`]), so nothing here is a stable format.

pub mod handshake;
pub mod layout;
pub mod owner;
mod owner_word;
pub mod ring;
pub mod validation;
// Not with loom, because the model checker's atomics cannot be in a mapped file.
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
pub mod run_lock;
#[cfg(not(loom))]
pub mod segment;
