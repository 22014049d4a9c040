//! The simulated `libcuda.so.1`: CUDA's driver interface over [`simcuda::machine::Machine`].
//!
//! Each part of the interface has one module. A function decodes its arguments, does its work on the machine under the
//! one lock ([`state`]), and returns CUDA's number. Allocations and frees go through [`state::recorded`], which counts
//! them for failures on demand and writes the ledger. [`entry`] finds functions in the library's own symbol table, so
//! nothing has to be listed by hand.
//!
//! Safety, for all exported functions: the caller keeps CUDA's contract. Results are written through
//! [`simcuda::out::Out`], the only place that relies on it for out-pointers. A function that dereferences other
//! pointers is unsafe and states its requirement.

mod accepted;
mod array;
mod bridge;
mod checkpoint;
mod context;
mod copy;
mod device;
mod entry;
mod graph;
mod injection;
mod ipc;
mod memory;
mod missing;
mod module;
mod own_functions;
mod pool;
mod refused;
mod state;
mod stream;
mod vmm;
