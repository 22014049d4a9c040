//! The simulated `libcudart.so.12` and `libcudart.so.13`: CUDA's runtime interface over the simulated driver.
//!
//! As in the real runtime, driver functions are found at run time ([`driver`]): `dlopen("libcuda.so.1")`,
//! `dlsym("cuGetProcAddress_v2")`, and every other function through that. So a tool that interposes `cu*` by symbol
//! name is not called for `cudaMalloc`, and one that answers `dlsym` is.
//!
//! One archive serves both CUDA versions. Where they differ under one symbol name, the linked-in constant
//! `simcuda_cudart_version` decides ([`device`], [`graph`]).
//!
//! Safety, for all exported functions: the caller keeps the interface's contract. Results are written through
//! [`simcuda::out::Out`], which relies on it in one place; where other pointers are followed, the function is unsafe and says
//! what it relies on.

mod array;
mod device;
mod driver;
mod entry;
mod graph;
mod ipc;
mod kernel;
mod memory;
mod pool;
mod state;
mod stream;
