//! Shared memory between the traced process and the launcher: one segment for each process, one ring for each thread.
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
pub mod segment;
