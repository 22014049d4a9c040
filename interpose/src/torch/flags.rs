//! The flags of an event that describe the state of PyTorch.

use memtrace_trace::event::Flags;

use super::{grad_mode, libraries};
use crate::recording::thread_local::with_thread_local;

/// PyTorch's state at this point in time: whether autograd records and whether this thread runs backward.
#[inline]
pub(crate) fn current_flags() -> Flags {
    let mut flags = Flags::default();
    if with_thread_local(|t| t.backward_depth.get()) > 0 {
        flags = flags.with(Flags::IN_BACKWARD);
    }
    // PyTorch's libraries are available only once PyTorch has called one of our hooks.
    if !libraries::is_loaded() {
        return flags;
    }
    if let Some(enabled) = grad_mode::is_enabled() {
        flags = flags.with(Flags::GRAD_KNOWN);
        if enabled {
            flags = flags.with(Flags::GRAD_ENABLED);
        }
    }
    flags
}
