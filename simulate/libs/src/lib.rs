//! The functions of cuBLAS, cuDNN, NCCL, NVML and other libraries that must do more than return 0.
//!
//! All are in one archive. `simcuda-build` links each library from it and selects the functions by the prefix of their
//! name. It adds stubs that return 0 for the other functions that PyTorch imports. Handles are boxes that are opaque to
//! the program, and only values that the program stored are read from them.
//!
//! Safety, for all exported functions: the caller keeps the library's contract. Results are written through
//! [`simcuda::out::Out`]. A handle is a `Box` from the library's own create function. The destroy function takes it
//! back, and other functions borrow it. A function that dereferences other pointers is unsafe and states its
//! requirement.

mod cublas;
mod cudnn;
mod cufft;
mod cupti;
mod device_memory;
mod nccl;
mod nvml;
mod nvrtc;
mod solvers;
mod support;
