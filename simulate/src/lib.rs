//! The simulated machine: devices, memory, streams, graphs and the ledger, free of any CUDA calling convention.
//!
//! The crate is pure bookkeeping behind safe functions; the exported `cu*` and `cuda*` symbols are in the sibling
//! crates `simcuda-driver`, `simcuda-runtime` and `simcuda-libs`. Kernels never run: memory has an address, a size and
//! (where something copied to it) contents, streams have a virtual timeline, and everything allocated is accounted for
//! exactly. Unsafe code is in [`backing`], which maps
//! host memory, and in [`out`], which writes through C's out-pointers.

pub mod abi;
pub mod array;
pub mod attributes;
pub mod backing;
pub mod bridge;
pub mod config;
pub mod context;
pub mod device;
pub mod error;
pub mod fault;
pub mod graph;
pub mod handle;
pub mod ipc;
pub mod ledger;
pub mod machine;
pub mod memory;
pub mod out;
pub mod pool;
pub mod ranges;
pub mod stream;
pub mod vmm;
