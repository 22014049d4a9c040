//! PyTorch: the tracker of its CUDA allocator, the profiler's reporter (a fallback, and for CPU tensors), autograd.
//!
//! Constraint: whatever depends on a private layout is first verified at run time against an independent source. If the
//! check fails, it is switched off with a notice.

mod autograd;
mod gc;
mod grad_mode;
pub(crate) mod nn_calls;
mod python_node;
mod rank;
mod record_function;
mod reporter;
mod table;
pub(super) mod tracker;

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_trace::event::Flags;
use memtrace_trace::ids::ContextId;

pub(crate) use self::gc::{claim as claim_collection, list_heads as gc_list_heads};
use crate::loaded_objects;
use crate::original::{self, OriginalFunction};
use crate::thread_local::with_thread_local;

/// What this process knows about its PyTorch.
pub(crate) struct TorchState {
    /// The allocator's callback.
    tracker: tracker::TrackerState,
    /// Nodes and forward calls.
    autograd: autograd::AutogradRecorder,
    /// Calls of `nn.Module`s.
    pub(crate) nn_calls: nn_calls::NnCalls,
    /// How many ids autograd nodes and module calls have been given.
    contexts: AtomicU32,
    /// The pool ids of PyTorch.
    pools: tracker::PoolIds,
}

impl TorchState {
    /// `parent` is the state of the process that forked this one. A child inherits PyTorch with our tracker attached.
    pub(crate) fn new(parent: Option<&TorchState>) -> TorchState {
        TorchState {
            tracker: tracker::TrackerState::new(parent.map(|p| &p.tracker)),
            autograd: autograd::AutogradRecorder::new(),
            nn_calls: nn_calls::NnCalls::new(),
            contexts: AtomicU32::new(0),
            pools: tracker::PoolIds::new(),
        }
    }

    /// A new id, distinct among autograd nodes and module calls.
    pub(crate) fn next_context(&self) -> ContextId {
        ContextId(self.contexts.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Set once a CUDA device is in use. CPU tensors are then not recorded, unless the options request it. Belongs to the
/// loaded library and is inherited by forked children, so that the workers of a GPU program do not record CPU tensors
/// either.
static DEVICE_IN_USE: AtomicU32 = AtomicU32::new(0);

/// Reports that a CUDA device is in use.
pub(super) fn device_in_use() {
    DEVICE_IN_USE.store(1, Ordering::Relaxed);
}

/// Whether a CUDA device is in use.
pub(crate) fn is_device_in_use() -> bool {
    DEVICE_IN_USE.load(Ordering::Relaxed) != 0
}

/// How many more calls of other objects are examined for whether PyTorch's allocator caused them. Each takes a native
/// stack.
///
/// It is 0 before the allocator is loaded and after its first own call. Belongs to the loaded library, not to a
/// recording.
static STACK_CHECKS_LEFT: AtomicU32 = AtomicU32::new(0);
const MAX_STACK_CHECKS: u32 = 100;

/// Reports that an object has been loaded. This is noticed at the program's next `dlsym`; the CUDA runtime calls it to
/// find the driver.
pub(super) fn object_loaded(file_name: &[u8]) {
    if is_allocator(file_name) {
        STACK_CHECKS_LEFT.store(MAX_STACK_CHECKS, Ordering::Relaxed);
    }
}

/// Whether this file is PyTorch's CUDA caching allocator.
pub(super) fn is_allocator(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libc10_cuda")
}

/// A function that libc10 exports. Null if there is none.
fn libc10(cache: &OriginalFunction, name: &CStr) -> *mut std::ffi::c_void {
    cache.get_or_find(|| exported_by(b"libc10.so", name))
}

/// A symbol that the loaded object of this file name exports, never one of ours. Null if there is none.
pub(crate) fn exported_by(file_name: &[u8], name: &CStr) -> *mut std::ffi::c_void {
    let Some(object) = loaded_objects::find_by_name(file_name) else { return std::ptr::null_mut() };
    let handle = object.handle();
    if handle.is_null() { handle } else { original::lookup(handle, name) }
}

/// What PyTorch knows about this point in time: whether autograd records and whether this thread runs backward.
#[inline]
pub(super) fn current_flags() -> Flags {
    let mut flags = Flags::default();
    if with_thread_local(|t| t.backward_depth.get()) > 0 {
        flags = flags.with(Flags::IN_BACKWARD);
    }
    // PyTorch's libraries are available only once PyTorch has called one of our hooks.
    if reporter::IS_TORCH_LOADED.load(Ordering::Relaxed) == 0 {
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
