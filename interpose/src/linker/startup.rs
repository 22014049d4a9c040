//! The objects that were loaded before the program started.
//!
//! The loader searches them in the order of its list, and never unloads them. Of objects that `dlopen` loads later, the
//! loader does not show which are in the global scope (`RTLD_GLOBAL`).

use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_stackwalk::loader::Reading;

/// How many objects were loaded when this library's constructor ran. 0 before that.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// How many objects from the beginning of the loader's list were loaded before the program started. Before this
/// library's constructor has run, `None`: those are all.
pub(super) fn startup_object_count() -> Option<usize> {
    Some(COUNT.load(Ordering::Relaxed)).filter(|count| *count != 0)
}

/// The constructor. It only reads the loader's list: no function of the C library is called, because a sanitizer's
/// runtime may not be initialized yet.
extern "C" fn count_startup_objects() {
    COUNT.store(Reading::begin().objects().count(), Ordering::Relaxed);
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = count_startup_objects;
