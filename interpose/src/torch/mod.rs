//! PyTorch: the tracker of its CUDA allocator, the profiler's reporter (a fallback, and for CPU tensors), autograd.
//!
//! Constraint: whatever depends on a private layout is first verified at run time against an independent source. If the
//! check fails, it is switched off with a notice.

pub(crate) mod autograd;
pub(crate) mod flags;
pub(crate) mod gate;
pub(crate) mod gc;
mod grad_mode;
pub(crate) mod hooked;
pub(crate) mod libraries;
mod python_node;
mod rank;
pub(crate) mod record_function;
pub(crate) mod reporter;
pub(crate) mod running_nodes;
pub(crate) mod snapshot;
pub(crate) mod tracker;
mod workspaces;
