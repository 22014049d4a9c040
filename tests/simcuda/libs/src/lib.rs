//! The few functions of cuBLAS, cuDNN, NCCL, NVML and the like that must do more than return 0.
//!
//! One archive for all of them: `simcuda-build` links each library out of it, taking the functions whose names belong
//! to that library, and adds return-0 stubs for whatever else PyTorch imports. Handles are boxes of our own, opaque to
//! the program; what is drawn from them is only what was put into them.
//!
//! Safety, for all exported functions: the caller keeps the library's contract, so a non-null out-pointer can be
//! written, a handle came from this library's own create function, and memory can be accessed.

mod cublas;
mod cudnn;
mod cufft;
mod cupti;
mod nccl;
mod nvml;
mod nvrtc;
mod solvers;
mod support;
