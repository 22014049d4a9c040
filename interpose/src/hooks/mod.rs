//! Every function that is interposed. [`registry`] lists the CUDA ones; `torch` has PyTorch's; `loader` is how both are reached.

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

pub(crate) use torch::{TorchState, claim_collection, collector_lists, exported_by, is_device_in_use};
