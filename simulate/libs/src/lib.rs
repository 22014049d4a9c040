//! The few functions of cuBLAS, cuDNN, NCCL, NVML and the like that must do more than return 0.
//!
//! One archive for all of them: `simcuda-build` links each library out of it, taking the functions whose names belong
//! to that library, and adds return-0 stubs for whatever else PyTorch imports. Handles are boxes of our own, opaque to
//! the program; what is drawn from them is only what was put into them.
//!
//! Safety, for all exported functions: the caller keeps the library's contract. Results are written through
//! [`simcuda::out::Out`]; a handle is a `Box` given out by the library's own create function, taken back by its destroy
//! function and borrowed by the others; where other pointers are followed, the function is unsafe and says what it relies on.

mod cublas;
mod cudnn;
mod cufft;
mod cupti;
mod nccl;
mod nvml;
mod nvrtc;
mod solvers;
mod support;
