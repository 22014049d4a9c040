//! PyTorch: its CUDA allocator's own tracker, the profiler's reporter (fallback, and CPU tensors), autograd.
//!
//! Everything that rests on a private layout is checked at run time against something independent before it is believed, and
//! switched off with a notice where the check fails.

mod autograd;
mod gc;
mod grad_mode;
mod labels;
pub(crate) mod nn_calls;
mod python_node;
mod rank;
mod reporter;
mod table;
pub(super) mod tracker;

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_trace::event::Flags;
use memtrace_trace::ids::ContextId;

pub(crate) use self::gc::{claim as claim_collection, lists as collector_lists};
use crate::objects;
use crate::real::{self, Original};
use crate::thread::thread;

/// What is known of this process's PyTorch.
pub(crate) struct TorchState {
    /// See [`tracker`].
    tracker: tracker::State,
    /// See [`autograd`].
    autograd: autograd::State,
    /// See [`nn_calls`].
    pub(crate) nn_calls: nn_calls::NnCalls,
    /// How many autograd nodes and calls of modules have been given an id.
    contexts: AtomicU32,
    /// PyTorch's pool ids, by ours.
    pools: tracker::Pools,
}

impl TorchState {
    /// A forked child has its parent's PyTorch, with our tracker in it.
    pub(crate) fn new(parent: Option<&TorchState>) -> TorchState {
        TorchState {
            tracker: tracker::State::new(parent.map(|p| &p.tracker)),
            autograd: autograd::State::new(),
            nn_calls: nn_calls::NnCalls::new(),
            contexts: AtomicU32::new(0),
            pools: tracker::Pools::new(),
        }
    }

    /// An id that no other autograd node and no call has.
    pub(crate) fn next_context(&self) -> ContextId {
        ContextId(self.contexts.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// Set once a CUDA device is in use: CPU tensors are then left alone, unless asked for. Of this image and of the children it forks: the
/// workers of a program that trains on a GPU are not what is looked for either.
static DEVICE_IN_USE: AtomicU32 = AtomicU32::new(0);

/// A CUDA device is in use.
pub(super) fn device_in_use() {
    DEVICE_IN_USE.store(1, Ordering::Relaxed);
}

/// Whether one is.
pub(crate) fn is_device_in_use() -> bool {
    DEVICE_IN_USE.load(Ordering::Relaxed) != 0
}

/// How many calls of others are still to be looked at, for whether PyTorch's allocator made them ask: none before it is loaded and
/// none after its first own call, for a look is a native stack. Of this image, as above.
static LOOKS: AtomicU32 = AtomicU32::new(0);
const MOST_LOOKS: u32 = 100;

/// An object has been loaded. Noticed at the next `dlsym` of the program's: the CUDA runtime asks for the driver that way.
pub(super) fn object_loaded(file_name: &[u8]) {
    if is_allocator(file_name) {
        LOOKS.store(MOST_LOOKS, Ordering::Relaxed);
    }
}

/// Whether an object's calls are those of PyTorch's CUDA caching allocator.
pub(super) fn is_allocator(file_name: &[u8]) -> bool {
    file_name.starts_with(b"libc10_cuda")
}

/// A function that libc10 exports, as libc10 itself would find it.
fn libc10(cache: &Original, name: &CStr) -> *mut std::ffi::c_void {
    cache.get(|| exported_by(b"libc10.so", name))
}

/// A symbol that the object of this file name exports; not ours.
pub(crate) fn exported_by(file_name: &[u8], name: &CStr) -> *mut std::ffi::c_void {
    let Some(object) = objects::named(file_name) else { return std::ptr::null_mut() };
    let handle = object.handle();
    if handle.is_null() { handle } else { real::lookup(handle, name) }
}

/// The facts about this moment that PyTorch knows: is autograd recording, is this thread running backward.
#[inline]
pub(super) fn moment() -> Flags {
    let mut flags = Flags::default();
    if thread(|t| t.backward_depth.get()) > 0 {
        flags = flags.with(Flags::IN_BACKWARD);
    }
    // Only where PyTorch has called one of our hooks are its libraries there to be asked.
    if reporter::SEEN.load(Ordering::Relaxed) == 0 {
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
