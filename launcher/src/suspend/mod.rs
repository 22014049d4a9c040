//! Suspends and resumes the GPU part of running processes through CUDA's checkpoint API (driver 570 and newer).
//!
//! The driver copies a process's GPU memory to the host's memory and gives back all of it, the context included. Later
//! it restores the process at the same addresses. The process itself is not changed: its CPU part goes on, and its next
//! call of CUDA waits.

mod driver;
mod members;
mod transaction;

pub(crate) use driver::{CheckpointError, CudaDriver, NoDriver, ProcessState};
pub(crate) use members::{Member, members, obstacle};
pub(crate) use transaction::{Failure, Step, resume, suspend};
