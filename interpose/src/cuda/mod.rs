//! The hooked CUDA functions. [`registry`] lists them, [`functions`] has their bodies, [`lookup`] intercepts the
//! functions that look them up.

mod call;
mod contexts;
pub(crate) mod device;
mod driver;
mod entry;
mod functions;
mod graphs;
mod hook;
mod ipc;
mod limit;
mod limited;
mod location;
pub(crate) mod lookup;
mod memory;
mod pools;
mod reading;
mod registry;
pub(crate) mod usage;
mod visible;
