//! Shared memory between the traced process and the launcher: one segment a process, one ring a thread.
//!
//! It lives for one run and one build ([`layout::BUILD`]): nothing here is a stable format.

pub mod handshake;
pub mod intake;
pub mod layout;
pub mod owner;
pub mod ring;
// The memory itself: the model checker's atomics cannot lie in a file.
#[cfg(not(loom))]
pub mod segment;
