//! The simulated `libcuda.so.1`: CUDA's driver interface over [`simcuda::machine::Machine`].
//!
//! One module for each part of the interface; a function takes its arguments apart, does its work on the machine under
//! the one lock ([`state`]), and gives CUDA's number. Allocations and frees go through [`state::recorded`], which
//! counts them for failures on demand and writes the ledger. Which functions there are is read out of the built archive
//! by `simcuda-build`, which makes the table that [`entry`] searches; nothing has to be listed by hand.
//!
//! Safety, for all exported functions: the caller keeps the interface's contract. Results are written through
//! [`simcuda::out::Out`], which relies on it in one place; where other pointers are followed, the function is unsafe and says
//! what it relies on.

mod array;
mod bridge;
mod context;
mod copy;
mod device;
mod entry;
mod graph;
mod ipc;
mod memory;
mod module;
mod pool;
mod refused;
mod state;
mod stream;
mod vmm;
