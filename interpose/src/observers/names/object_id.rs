//! Identifies Python objects that a scan remembers for the next one.

use memtrace_stackwalk::CheckedMemory;

use crate::cpython::api::PyObjectPtr;
use crate::cpython::collector::{GC_HEAD_BYTES, LINK_FLAGS};
use crate::cpython::gil::type_of;

/// A Python object, identified by its address and its type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectId {
    object: usize,
    class: usize,
}

impl ObjectId {
    /// # Safety
    ///
    /// `object` points to a live Python object, and the calling thread holds the GIL.
    pub(super) unsafe fn of(object: PyObjectPtr) -> ObjectId {
        // SAFETY: the caller guarantees that `object` is alive, so its type can be read.
        ObjectId { object: object.expose_provenance(), class: unsafe { type_of(object) }.addr() }
    }

    pub(super) fn object(&self) -> PyObjectPtr {
        std::ptr::with_exposed_provenance_mut(self.object)
    }

    /// Whether the object is still alive: the garbage collector's list links it with both neighbors, and its type is
    /// unchanged. The memory of a freed object does not satisfy this.
    pub(super) fn is_alive(&self, memory: &CheckedMemory) -> bool {
        let links = self.object.wrapping_sub(GC_HEAD_BYTES);
        let link = |at: usize, which: usize| memory.size(at, which * 8).map(|word| word & !LINK_FLAGS);
        let are_neighbors_linked = || {
            let (next, previous) = (link(links, 0)?, link(links, 1)?);
            let known = next != 0 && previous != 0 && memory.size(self.object, 8)? == self.class;
            Some(known && link(next, 1)? == links && link(previous, 0)? == links)
        };
        are_neighbors_linked() == Some(true)
    }
}
