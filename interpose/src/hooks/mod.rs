//! All interposed functions. [`registry`] lists those of CUDA, `torch` has those of PyTorch, and `loader` intercepts
//! the functions that look up both.

mod call;
mod cuda;
mod deepbind;
mod device;
mod entry;
mod loader;
mod location;
mod nvtx;
mod pools;
mod registry;
mod torch;

pub(crate) use torch::{TorchState, claim_collection, exported_by, gc_list_heads, is_device_in_use};
