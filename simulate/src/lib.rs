//! The simulated machine: devices, memory, streams, graphs and the ledger. It knows no CUDA calling convention.
//!
//! The crate contains only bookkeeping behind safe functions. The sibling crates `simcuda-driver`, `simcuda-runtime`
//! and `simcuda-libs` export the `cu*` and `cuda*` symbols. Kernels never run. Memory has an address, a size and, where
//! data was copied to it, contents. Streams have a virtual timeline, and every allocation is accounted for exactly.
//!
//! Unsafe code is in [`backing`], which maps host memory, in [`checkpoint`], which maps a page that processes share,
//! and in [`out`], which writes through C's out-pointers.

pub mod abi;
pub mod arch;
pub mod array;
pub mod attributes;
pub mod backing;
pub mod bridge;
pub mod checkpoint;
pub mod config;
pub mod context;
pub mod cudnn;
pub mod cufft;
pub mod cupti;
pub mod device;
pub mod error;
pub mod exchange;
pub mod fault;
pub mod graph;
pub mod handle;
pub mod ipc;
pub mod ledger;
pub mod library_memory;
pub mod loading;
pub mod machine;
pub mod memory;
pub mod missing;
pub mod out;
pub mod pool;
pub mod ranges;
pub mod reduction;
pub mod shared;
pub mod stream;
pub mod stub;
pub mod uuid;
pub mod vmm;
