//! The part of CPython's C API that reads the program's objects.
//!
//! Constraints: every call needs the GIL, except those that say otherwise. With the arguments used here, none of them
//! runs the program's Python code or changes an object.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use super::{GC_HEAD_BYTES, LINK_FLAGS};
use crate::original::global_symbol;

/// A `PyObject *`.
pub(crate) type PyObjectPtr = *mut c_void;

/// `Py_TPFLAGS_*_SUBCLASS` of Include/object.h.
const LIST: u64 = 1 << 25;
const TUPLE: u64 = 1 << 26;
const STR: u64 = 1 << 28;
const DICT: u64 = 1 << 29;
const TYPE: u64 = 1 << 31;

/// Offset of `PyTypeObject.tp_name`, in bytes. In every CPython it follows `ob_refcnt`, `ob_type` and `ob_size`.
const TP_NAME: usize = 24;

/// Variable names of this many bytes or more are not used.
const MAX_VARIABLE_BYTES: usize = 80;

/// Called for each object. The result 1 continues the iteration.
pub(super) type Visit = unsafe extern "C" fn(PyObjectPtr, *mut c_void) -> c_int;

/// Functions and types of the interpreter's C API.
pub(super) struct CApi {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    error_occurred: unsafe extern "C" fn() -> PyObjectPtr,
    clear_error: unsafe extern "C" fn(),
    sys_object: unsafe extern "C" fn(*const c_char) -> PyObjectPtr,
    dict_item_string: unsafe extern "C" fn(PyObjectPtr, *const c_char) -> PyObjectPtr,
    dict_next: unsafe extern "C" fn(PyObjectPtr, *mut isize, *mut PyObjectPtr, *mut PyObjectPtr) -> c_int,
    module_dict: unsafe extern "C" fn(PyObjectPtr) -> PyObjectPtr,
    generic_attribute: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    type_lookup: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    type_flags: unsafe extern "C" fn(PyObjectPtr) -> u64,
    is_subtype: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> c_int,
    member_type: PyObjectPtr,
    list_size: unsafe extern "C" fn(PyObjectPtr) -> isize,
    list_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr,
    tuple_size: unsafe extern "C" fn(PyObjectPtr) -> isize,
    tuple_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr,
    utf8: unsafe extern "C" fn(PyObjectPtr, *mut isize) -> *const c_char,
    intern_string: unsafe extern "C" fn(*const c_char) -> PyObjectPtr,
    dec_ref: unsafe extern "C" fn(PyObjectPtr),
    /// `PyUnstable_GC_VisitObjects`, from CPython 3.12 on.
    visit_objects: Option<unsafe extern "C" fn(Visit, *mut c_void)>,
    call: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    is_true: unsafe extern "C" fn(PyObjectPtr) -> c_int,
    /// `PyGC_Disable` and `PyGC_Enable`, from 3.10 on.
    collector: Option<(unsafe extern "C" fn() -> c_int, unsafe extern "C" fn() -> c_int)>,
}

impl CApi {
    /// Finds the C API. `None` without a CPython, and for a free-threaded build, where other threads change objects
    /// during a scan.
    pub(super) fn find() -> Option<CApi> {
        // SAFETY: these symbols belong to the C API and have these types in every CPython from 3.8 on.
        unsafe {
            let version: unsafe extern "C" fn() -> *const c_char = global_symbol(c"Py_GetVersion")?;
            let version = version();
            if version.is_null() || CStr::from_ptr(version).to_bytes().windows(14).any(|w| w == b"free-threading") {
                return None;
            }
            Some(CApi {
                add_pending_call: global_symbol(c"Py_AddPendingCall")?,
                is_initialized: global_symbol(c"Py_IsInitialized")?,
                // Public since 3.13. Earlier versions export it with an underscore.
                is_finalizing: global_symbol(c"Py_IsFinalizing").or_else(|| global_symbol(c"_Py_IsFinalizing"))?,
                error_occurred: global_symbol(c"PyErr_Occurred")?,
                clear_error: global_symbol(c"PyErr_Clear")?,
                sys_object: global_symbol(c"PySys_GetObject")?,
                dict_item_string: global_symbol(c"PyDict_GetItemString")?,
                dict_next: global_symbol(c"PyDict_Next")?,
                module_dict: global_symbol(c"PyModule_GetDict")?,
                generic_attribute: global_symbol(c"PyObject_GenericGetAttr")?,
                type_lookup: global_symbol(c"_PyType_Lookup")?,
                type_flags: global_symbol(c"PyType_GetFlags")?,
                is_subtype: global_symbol(c"PyType_IsSubtype")?,
                member_type: global_symbol(c"PyMemberDescr_Type")?,
                list_size: global_symbol(c"PyList_Size")?,
                list_item: global_symbol(c"PyList_GetItem")?,
                tuple_size: global_symbol(c"PyTuple_Size")?,
                tuple_item: global_symbol(c"PyTuple_GetItem")?,
                utf8: global_symbol(c"PyUnicode_AsUTF8AndSize")?,
                intern_string: global_symbol(c"PyUnicode_InternFromString")?,
                dec_ref: global_symbol(c"Py_DecRef")?,
                visit_objects: global_symbol(c"PyUnstable_GC_VisitObjects"),
                call: global_symbol(c"PyObject_CallObject")?,
                is_true: global_symbol(c"PyObject_IsTrue")?,
                collector: global_symbol(c"PyGC_Disable").zip(global_symbol(c"PyGC_Enable")),
            })
        }
    }

    /// Whether the interpreter is running. A program frees memory even after its interpreter has ended.
    pub(super) fn is_running(&self) -> bool {
        // SAFETY: both functions read one word of the runtime. They need no GIL and may be called at any time.
        unsafe { (self.is_initialized)() != 0 && (self.is_finalizing)() == 0 }
    }

    /// Queues a pending call: the interpreter calls `function` on its main thread, with the GIL. Returns `false` if the
    /// queue is full. The interpreter must be running.
    pub(super) fn queue_call(&self, function: unsafe extern "C" fn(*mut c_void) -> c_int) -> bool {
        // SAFETY: `Py_AddPendingCall` needs no GIL, and `function` has the type that it takes.
        unsafe { (self.add_pending_call)(function, null_mut()) == 0 }
    }

    /// Access to the interpreter's objects. `None` while an exception is set, and once the interpreter is finalizing.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the token lives.
    pub(super) unsafe fn gil_token(&self) -> Option<GilToken<'_>> {
        // SAFETY: the caller guarantees that this thread holds the GIL.
        unsafe { ((self.is_finalizing)() == 0 && (self.error_occurred)().is_null()).then_some(GilToken { api: self }) }
    }
}

/// Proof that this thread holds the GIL, that no exception is set, and that no Python code runs. Borrowed references
/// stay valid.
#[derive(Clone, Copy)]
pub(super) struct GilToken<'a> {
    api: &'a CApi,
}

/// A Python object with a reference that we own.
pub(super) struct OwnedRef<'a> {
    gil: GilToken<'a>,
    pub(super) object: PyObjectPtr,
}

impl Drop for OwnedRef<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the token guarantees the GIL.
        unsafe { (self.gil.api.dec_ref)(self.object) };
    }
}

/// Keeps the garbage collector disabled while it lives.
///
/// Before Python 3.12 the collector may run whenever an object is created, and a missing attribute creates an
/// exception. A collection could free the objects being scanned and would run the program's finalizers.
pub(super) struct GcPaused<'a> {
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

/// The type of an object.
///
/// # Safety
///
/// `object` points to a live Python object.
pub(super) unsafe fn type_of(object: PyObjectPtr) -> PyObjectPtr {
    // SAFETY: the caller guarantees a live object. `ob_type` is the second word of every object.
    unsafe { object.cast::<PyObjectPtr>().add(1).read() }
}

/// The name of a type, without its module.
///
/// # Safety
///
/// `of` points to a type, and the result is not used after the type is freed.
pub(crate) unsafe fn type_name<'a>(of: PyObjectPtr) -> &'a str {
    // SAFETY: the caller guarantees a live type. `tp_name` is null or a C string that lives as long as the type.
    let name = unsafe {
        let name = of.byte_add(TP_NAME).cast::<*const c_char>().read();
        if name.is_null() {
            return "?";
        }
        CStr::from_ptr(name)
    };
    let name = name.to_str().unwrap_or("?");
    name.rsplit('.').next().unwrap_or(name)
}

impl<'a> GilToken<'a> {
    fn non_null(object: PyObjectPtr) -> Option<PyObjectPtr> {
        (!object.is_null()).then_some(object)
    }

    fn owned(self, object: PyObjectPtr) -> Option<OwnedRef<'a>> {
        GilToken::non_null(object).map(|object| OwnedRef { gil: self, object })
    }

    /// An interned string, for use with [`Self::attribute`].
    pub(super) fn interned(self, text: &CStr) -> Option<OwnedRef<'a>> {
        // SAFETY: `text` is a C string, and the token guarantees the GIL.
        let text = unsafe { (self.api.intern_string)(text.as_ptr()) };
        self.cleared(text).and_then(|text| self.owned(text))
    }

    /// The result of a function that may have set an exception. Clears the exception; `None` if there was one.
    fn cleared(self, object: PyObjectPtr) -> Option<PyObjectPtr> {
        if object.is_null() {
            // SAFETY: the token guarantees the GIL. No exception was set before the call, so this clears none of the
            // program's.
            unsafe { (self.api.clear_error)() };
        }
        GilToken::non_null(object)
    }

    /// A class in a module that the program has imported. `None` if there is none.
    pub(super) fn class(self, module: &CStr, name: &CStr) -> Option<PyObjectPtr> {
        // SAFETY: the token guarantees the GIL. All references are borrowed. The functions check types and refuse
        // other objects with an exception.
        let class = unsafe {
            let modules = (self.api.sys_object)(c"modules".as_ptr());
            let module = (!modules.is_null())
                .then(|| (self.api.dict_item_string)(modules, module.as_ptr()))
                .and_then(|module| self.cleared(module))?;
            let names = self.cleared((self.api.module_dict)(module))?;
            self.cleared((self.api.dict_item_string)(names, name.as_ptr()))?
        };
        self.has_type_flag(class, TYPE).then_some(class)
    }

    /// Whether the object's type has one of these flags.
    fn has_type_flag(self, object: PyObjectPtr, flags: u64) -> bool {
        // SAFETY: callers pass live objects, and the token guarantees the GIL.
        unsafe { (self.api.type_flags)(type_of(object)) & flags != 0 }
    }

    /// Whether the object is a dictionary.
    pub(super) fn is_dict(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, DICT)
    }

    /// Whether `object` is an instance of `class`, decided by its type alone (no `__instancecheck__`).
    pub(super) fn is_instance(self, object: PyObjectPtr, class: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object and a live type, and the token guarantees the GIL.
        unsafe { self.is_subtype(type_of(object), class) }
    }

    /// # Safety
    ///
    /// `of` and `class` point to live types.
    unsafe fn is_subtype(self, of: PyObjectPtr, class: PyObjectPtr) -> bool {
        // SAFETY: the caller guarantees two live types. `PyType_IsSubtype` only reads the method resolution order.
        of == class || unsafe { (self.api.is_subtype)(of, class) } != 0
    }

    /// The attribute in the instance's own dictionary or in a slot. `None` for anything that the class computes,
    /// because that may be the program's code.
    pub(super) fn attribute(self, object: PyObjectPtr, name: &OwnedRef<'_>) -> Option<OwnedRef<'a>> {
        // SAFETY: callers pass a live object, `name` is a string, and the token guarantees the GIL. Only slots of the
        // class are read, and those are C code.
        unsafe {
            let of_class = (self.api.type_lookup)(type_of(object), name.object);
            if !of_class.is_null() && type_of(of_class) != self.api.member_type {
                return None;
            }
            let found = (self.api.generic_attribute)(object, name.object);
            self.cleared(found).and_then(|found| self.owned(found))
        }
    }

    /// The entries of a dictionary in order of insertion. Empty if `dict` is no dictionary. The caller must not change
    /// it meanwhile.
    pub(super) fn entries(self, dict: PyObjectPtr) -> impl Iterator<Item = (PyObjectPtr, PyObjectPtr)> {
        let mut position = if self.is_dict(dict) { Some(0) } else { None };
        std::iter::from_fn(move || {
            let position = position.as_mut()?;
            let (mut key, mut value) = (null_mut(), null_mut());
            // SAFETY: `dict` is a dictionary. It does not change, because we hold the GIL and run no Python code.
            let more = unsafe { (self.api.dict_next)(dict, position, &mut key, &mut value) } != 0;
            (more && !key.is_null() && !value.is_null()).then_some((key, value))
        })
    }

    /// The elements of a list or a tuple. Empty for any other object.
    pub(super) fn elements(self, sequence: PyObjectPtr) -> impl Iterator<Item = PyObjectPtr> {
        let size = if self.has_type_flag(sequence, LIST) {
            // SAFETY: `sequence` is a list, and the token guarantees the GIL.
            Some((unsafe { (self.api.list_size)(sequence) }, self.api.list_item))
        } else if self.has_type_flag(sequence, TUPLE) {
            // SAFETY: `sequence` is a tuple, and the token guarantees the GIL.
            Some((unsafe { (self.api.tuple_size)(sequence) }, self.api.tuple_item))
        } else {
            None
        };
        let (size, item) = size.unwrap_or((0, self.api.list_item));
        // SAFETY: `index` is below the size. The reference is borrowed from the sequence, which does not change while
        // we hold the GIL.
        (0..size).map_while(move |index| GilToken::non_null(unsafe { item(sequence, index) }))
    }

    /// The UTF-8 text of a Python string. `None` for any other object.
    pub(super) fn str<'t>(self, text: PyObjectPtr) -> Option<&'t str> {
        if !self.has_type_flag(text, STR) {
            return None;
        }
        let mut length = 0;
        // SAFETY: `text` is a string, and the token guarantees the GIL. The bytes belong to the string and live as
        // long as it.
        unsafe {
            let bytes = (self.api.utf8)(text, &mut length);
            if bytes.is_null() {
                (self.api.clear_error)();
                return None;
            }
            str::from_utf8(std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(length).ok()?)).ok()
        }
    }

    /// Visits every object that the garbage collector tracks and that is an instance of one of `classes`. Calls `found`
    /// with the class's index and the object. Returns `false` if the objects cannot be listed.
    ///
    /// `lists` are the heads of the collector's lists, if they are known. Reading them from both ends is faster than
    /// the interpreter's own iteration.
    pub(super) fn instances(
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
    pub(super) fn pause_gc(self) -> Option<GcPaused<'a>> {
        let was_enabled = match self.api.collector {
            // SAFETY: the token guarantees the GIL.
            Some((off, _)) => unsafe { off() != 0 },
            None => {
                let is_on = self.call_builtin(c"gc", c"isenabled")?;
                self.builtin(c"gc", c"enable")?;
                self.call_builtin(c"gc", c"disable")?;
                // SAFETY: `is_on` owns a live object, and the token guarantees the GIL.
                unsafe { (self.api.is_true)(is_on.object) == 1 }
            }
        };
        Some(GcPaused { gil: self, was_enabled })
    }

    /// Calls a C function of a module without arguments. `None` if it fails.
    fn call_builtin(self, module: &CStr, name: &CStr) -> Option<OwnedRef<'a>> {
        let function = self.builtin(module, name)?;
        // SAFETY: `function` is a live C function, and the token guarantees the GIL.
        let result = unsafe { (self.api.call)(function, null_mut()) };
        self.cleared(result).and_then(|result| self.owned(result))
    }

    /// A function of a module that the program has imported. `None` unless it is a C function.
    fn builtin(self, module: &CStr, name: &CStr) -> Option<PyObjectPtr> {
        // SAFETY: the token guarantees the GIL. All references are borrowed. The functions check types and refuse
        // other objects with an exception.
        let function = unsafe {
            let modules = GilToken::non_null((self.api.sys_object)(c"modules".as_ptr()))?;
            let module = self.cleared((self.api.dict_item_string)(modules, module.as_ptr()))?;
            let names = self.cleared((self.api.module_dict)(module))?;
            self.cleared((self.api.dict_item_string)(names, name.as_ptr()))?
        };
        // SAFETY: `function` is a live object, and every object has a type.
        (unsafe { type_name(type_of(function)) } == "builtin_function_or_method").then_some(function)
    }

    /// The name of the first global variable of `__main__` that refers to this object.
    pub(super) fn global_variable_name<'t>(self, object: PyObjectPtr) -> Option<&'t str> {
        // SAFETY: the token guarantees the GIL. All references are borrowed. The functions check types and refuse
        // other objects with an exception.
        let names = unsafe {
            let modules = GilToken::non_null((self.api.sys_object)(c"modules".as_ptr()))?;
            let main = self.cleared((self.api.dict_item_string)(modules, c"__main__".as_ptr()))?;
            self.cleared((self.api.module_dict)(main))?
        };
        let is_usable = |name: &&str| !name.is_empty() && !name.starts_with('_') && name.len() < MAX_VARIABLE_BYTES;
        self.entries(names).filter(|(_, value)| *value == object).find_map(|(name, _)| self.str(name).filter(is_usable))
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
        // SAFETY: `class` is the type of a live object, and the caller of `instances` passes live classes.
        let is = |of: &PyObjectPtr| unsafe { gil.is_subtype(class, *of) };
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
