//! The simulated `libcudart.so.12` and `libcudart.so.13`: CUDA's runtime interface over the simulated driver.
//!
//! [`driver`] finds the driver's functions at run time, as the real runtime does: `dlopen("libcuda.so.1")`,
//! `dlsym("cuGetProcAddress_v2")`, and every other function through that. A tool that interposes `cu*` by symbol name
//! therefore does not see `cudaMalloc`. A tool that answers `dlsym` does.
//!
//! One archive serves both CUDA versions. Where they differ under one symbol name, the linked-in constant
//! `simcuda_cudart_version` decides ([`device`], [`graph`]).
//!
//! Safety, for all exported functions: the caller keeps CUDA's contract. Results are written through
//! [`simcuda::out::Out`], the only place that relies on it for out-pointers. A function that dereferences other
//! pointers is unsafe and states its requirement.

mod array;
mod device;
mod driver;
mod entry;
mod graph;
mod ipc;
mod kernel;
mod memory;
mod objects;
mod pool;
mod state;
mod stream;
