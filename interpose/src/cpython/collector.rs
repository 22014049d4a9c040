//! The garbage collector: pauses it, and lists the objects that it tracks.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use super::api::PyObjectPtr;
use super::gil::{GilToken, PyOwned, class_name, type_of};

/// Size in bytes of `PyGC_Head`, the collector's two words in front of an object.
pub(crate) const GC_HEAD_BYTES: usize = 16;
/// The low bits of the collector's links hold flags.
pub(crate) const LINK_FLAGS: usize = 3;

/// Keeps the garbage collector disabled while it lives.
///
/// Before Python 3.12 the collector may run whenever an object is created, and a missing attribute creates an
/// exception. A collection could free the objects being scanned and would run the program's finalizers.
pub(crate) struct GcPaused<'a> {
    gil: GilToken<'a>,
    was_enabled: bool,
}

impl Drop for GcPaused<'_> {
    fn drop(&mut self) {
        if self.was_enabled {
            match self.gil.api.collector {
                // SAFETY: the token guarantees the GIL.
                Some((_, on)) => _ = unsafe { on() },
                None => _ = self.gil.call_builtin(c"gc", c"enable"),
            }
        }
    }
}

impl<'a> GilToken<'a> {
    /// Visits every object that the garbage collector tracks and that is an instance of one of `classes`. Calls `found`
    /// with the class's index and the object. Returns `false` if the objects cannot be listed.
    ///
    /// `lists` are the heads of the collector's lists, if they are known. Reading them from both ends is faster than
    /// the interpreter's own iteration.
    pub(crate) fn instances(
        self,
        classes: &[PyObjectPtr],
        lists: Option<[usize; 4]>,
        found: &mut dyn FnMut(usize, PyObjectPtr),
    ) -> bool {
        let mut search = Search { gil: self, classes, cache: vec![(null_mut(), NO_CLASS); CACHE_SLOTS], found };
        if let Some(lists) = lists {
            for head in lists {
                // SAFETY: the caller has verified that these are the heads of the collector's lists, and the token
                // guarantees the GIL. `classify_object` receives live objects and changes nothing.
                unsafe { for_each_object(head, |object| _ = classify_object(object, (&raw mut search).cast())) };
            }
            return true;
        }
        if let Some(visit) = self.api.visit_objects {
            // SAFETY: the token guarantees the GIL. `classify_object` takes each object with a pointer to `search` and
            // only reads.
            unsafe { visit(classify_object, (&raw mut search).cast()) };
            return true;
        }
        // `gc.get_objects()` is C code. It creates one temporary list.
        let Some(list) = self.call_builtin(c"gc", c"get_objects") else { return false };
        for object in self.elements(list.object) {
            // SAFETY: `list` owns a reference to the object. The program owned one before, so the object outlives the
            // list.
            unsafe { classify_object(object, (&raw mut search).cast()) };
        }
        true
    }

    /// Disables the garbage collector until the result is dropped. `None` if that is impossible.
    pub(crate) fn pause_gc(self) -> Option<GcPaused<'a>> {
        let was_enabled = match self.api.collector {
            // SAFETY: the token guarantees the GIL.
            Some((off, _)) => unsafe { off() != 0 },
            None => {
                let is_on = self.call_builtin(c"gc", c"isenabled")?;
                self.builtin(c"gc", c"enable")?;
                self.call_builtin(c"gc", c"disable")?;
                self.c.is_true(is_on.object) == 1
            }
        };
        Some(GcPaused { gil: self, was_enabled })
    }

    /// Calls a C function of a module without arguments. `None` if it fails.
    fn call_builtin(self, module: &CStr, name: &CStr) -> Option<PyOwned<'a>> {
        let function = self.builtin(module, name)?;
        self.owned(self.c.call_object(function, null_mut()))
    }

    /// A function of a module that the program has imported. `None` unless it is a C function.
    pub(crate) fn builtin(self, module: &CStr, name: &CStr) -> Option<PyObjectPtr> {
        let function = self.module_variable(module, name)?;
        // SAFETY: `function` is a live object of the module.
        (unsafe { class_name(function) } == "builtin_function_or_method").then_some(function)
    }
}

/// Number of cache slots for the types that a search has classified.
const CACHE_SLOTS: usize = 1 << 12;
const NO_CLASS: usize = usize::MAX;

struct Search<'a> {
    gil: GilToken<'a>,
    classes: &'a [PyObjectPtr],
    /// A cache by the type's address: the type and the index of the class that it is a subclass of, or [`NO_CLASS`].
    cache: Vec<(PyObjectPtr, usize)>,
    found: &'a mut dyn FnMut(usize, PyObjectPtr),
}

/// Visits each object of one of the collector's lists, from both ends at once. Following a link waits for memory, so
/// two such loads overlap.
///
/// # Safety
///
/// `head` is the head of such a list, the calling thread holds the GIL, and the collector does not run meanwhile.
unsafe fn for_each_object(head: usize, mut visit: impl FnMut(PyObjectPtr)) {
    // SAFETY: the caller guarantees a list of the collector. Each of its links points to a neighbor or to the head.
    let follow = |links: usize| unsafe { std::ptr::with_exposed_provenance::<usize>(links).read() } & !LINK_FLAGS;
    let (mut front, mut back) = (follow(head), follow(head + size_of::<usize>()));
    // No link in a list of the collector is null. A null link means that this is no such list.
    while front != head && back != head && front != 0 && back != 0 {
        visit(std::ptr::with_exposed_provenance_mut(front + GC_HEAD_BYTES));
        if front == back {
            return;
        }
        visit(std::ptr::with_exposed_provenance_mut(back + GC_HEAD_BYTES));
        let (next, previous) = (follow(front), follow(back + size_of::<usize>()));
        if next == back {
            return;
        }
        (front, back) = (next, previous);
    }
}

unsafe extern "C" fn classify_object(object: PyObjectPtr, search: *mut c_void) -> c_int {
    // SAFETY: `instances` passes a pointer to its own `Search`, which nothing else uses during the iteration.
    let search = unsafe { &mut *search.cast::<Search<'_>>() };
    // SAFETY: the collector's lists contain live objects only.
    let class = unsafe { type_of(object) };
    let slot = (class.addr() >> 4) % CACHE_SLOTS;
    let known = search.cache.get(slot).filter(|seen| seen.0 == class).map(|seen| seen.1);
    let which = known.unwrap_or_else(|| {
        let gil = search.gil;
        let is = |of: &PyObjectPtr| gil.is_subclass(class, *of);
        let which = search.classes.iter().position(is).unwrap_or(NO_CLASS);
        if let Some(seen) = search.cache.get_mut(slot) {
            *seen = (class, which);
        }
        which
    });
    if which != NO_CLASS {
        (search.found)(which, object);
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_object_of_a_list_is_visited_once() {
        for count in 0..9 {
            // The head and the objects. Each node has a next link, a previous link and two more words. The links carry
            // the collector's flags.
            let mut nodes = vec![[0_usize; 4]; count + 1];
            let at: Vec<usize> = nodes.iter().map(|node| node.as_ptr().expose_provenance()).collect();
            for (index, node) in nodes.iter_mut().enumerate() {
                node[0] = at[(index + 1) % at.len()] | (index % 2);
                node[1] = at[(index + count) % at.len()] | (index % 4);
            }
            let mut seen = Vec::new();
            // SAFETY: `nodes` is built as such a list, and no collector runs on it.
            unsafe { for_each_object(at[0], |object| seen.push(object.addr() - GC_HEAD_BYTES)) };
            seen.sort_unstable();
            assert_eq!(seen, at[1..], "{count} objects");
        }
    }
}
