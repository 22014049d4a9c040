//! The part of CPython's C API that examines what the garbage collector has found.
//!
//! Constraint: every call needs the GIL, except those that say otherwise, and may run Python code.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;

use crate::original::global_symbol;

/// A `PyObject *`.
pub(super) type PyObjectPtr = *mut c_void;

/// Called for each object that another one references. The result 0 continues.
pub(super) type Visit = unsafe extern "C" fn(PyObjectPtr, *mut c_void) -> c_int;
type Traverse = unsafe extern "C" fn(PyObjectPtr, Visit, *mut c_void) -> c_int;

/// `Py_tp_*` of Include/typeslots.h, the same in every CPython.
const TP_CLEAR: c_int = 51;
const TP_DEL: c_int = 53;
const TP_TRAVERSE: c_int = 71;
/// `METH_*` of Include/methodobject.h.
pub(super) const METH_VARARGS: c_int = 1;
pub(super) const METH_O: c_int = 8;

/// `PyMethodDef`.
#[repr(C)]
pub(super) struct MethodDef {
    pub(super) name: *const c_char,
    pub(super) body: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    pub(super) flags: c_int,
    pub(super) doc: *const c_char,
}

// SAFETY: a `MethodDef` never changes, and its pointers refer to constants.
unsafe impl Sync for MethodDef {}

macro_rules! c_api {
    ($($field:ident: $type:ty = $name:literal;)*) => {
        /// Functions and types of the interpreter's C API.
        pub(super) struct CApi {
            $($field: $type,)*
            is_finalizing: unsafe extern "C" fn() -> c_int,
        }

        impl CApi {
            /// Finds the C API. `None` without a CPython, before 3.10, and for a free-threaded build.
            pub(super) fn find() -> Option<CApi> {
                // SAFETY: these symbols belong to the C API and have these types in every CPython from 3.10 on.
                unsafe {
                    let version: unsafe extern "C" fn() -> *const c_char = global_symbol(c"Py_GetVersion")?;
                    let version = version();
                    let is_free_threaded = |text: &[u8]| text.windows(14).any(|w| w == b"free-threading");
                    if version.is_null() || is_free_threaded(CStr::from_ptr(version).to_bytes()) {
                        return None;
                    }
                    // New in 3.10, so its presence proves that the rest is available too.
                    let _: unsafe extern "C" fn() -> c_int = global_symbol(c"PyGC_IsEnabled")?;
                    Some(CApi {
                        $($field: global_symbol($name)?,)*
                        // Public since 3.13. Earlier versions export it with an underscore.
                        is_finalizing: global_symbol(c"Py_IsFinalizing").or_else(|| global_symbol(c"_Py_IsFinalizing"))?,
                    })
                }
            }
        }
    };
}

c_api! {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int = c"Py_AddPendingCall";
    is_initialized: unsafe extern "C" fn() -> c_int = c"Py_IsInitialized";
    error_occurred: unsafe extern "C" fn() -> PyObjectPtr = c"PyErr_Occurred";
    clear_error: unsafe extern "C" fn() = c"PyErr_Clear";
    fetch_error: unsafe extern "C" fn(*mut PyObjectPtr, *mut PyObjectPtr, *mut PyObjectPtr) = c"PyErr_Fetch";
    sys_object: unsafe extern "C" fn(*const c_char) -> PyObjectPtr = c"PySys_GetObject";
    import: unsafe extern "C" fn(*const c_char) -> PyObjectPtr = c"PyImport_ImportModule";
    attribute: unsafe extern "C" fn(PyObjectPtr, *const c_char) -> PyObjectPtr = c"PyObject_GetAttrString";
    call: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr, PyObjectPtr) -> PyObjectPtr = c"PyObject_Call";
    generic_dict: unsafe extern "C" fn(PyObjectPtr, *mut c_void) -> PyObjectPtr = c"PyObject_GenericGetDict";
    str: unsafe extern "C" fn(PyObjectPtr) -> PyObjectPtr = c"PyObject_Str";
    is_true: unsafe extern "C" fn(PyObjectPtr) -> c_int = c"PyObject_IsTrue";
    dict_item_string: unsafe extern "C" fn(PyObjectPtr, *const c_char) -> PyObjectPtr = c"PyDict_GetItemString";
    dict_next: unsafe extern "C" fn(PyObjectPtr, *mut isize, *mut PyObjectPtr, *mut PyObjectPtr) -> c_int = c"PyDict_Next";
    dict_new: unsafe extern "C" fn() -> PyObjectPtr = c"PyDict_New";
    dict_set: unsafe extern "C" fn(PyObjectPtr, *const c_char, PyObjectPtr) -> c_int = c"PyDict_SetItemString";
    list_new: unsafe extern "C" fn(isize) -> PyObjectPtr = c"PyList_New";
    list_size: unsafe extern "C" fn(PyObjectPtr) -> isize = c"PyList_Size";
    list_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr = c"PyList_GetItem";
    list_set_item: unsafe extern "C" fn(PyObjectPtr, isize, PyObjectPtr) -> c_int = c"PyList_SetItem";
    list_append: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> c_int = c"PyList_Append";
    list_insert: unsafe extern "C" fn(PyObjectPtr, isize, PyObjectPtr) -> c_int = c"PyList_Insert";
    list_slice: unsafe extern "C" fn(PyObjectPtr, isize, isize) -> PyObjectPtr = c"PyList_GetSlice";
    list_set_slice: unsafe extern "C" fn(PyObjectPtr, isize, isize, PyObjectPtr) -> c_int = c"PyList_SetSlice";
    tuple_new: unsafe extern "C" fn(isize) -> PyObjectPtr = c"PyTuple_New";
    tuple_set: unsafe extern "C" fn(PyObjectPtr, isize, PyObjectPtr) -> c_int = c"PyTuple_SetItem";
    tuple_size: unsafe extern "C" fn(PyObjectPtr) -> isize = c"PyTuple_Size";
    tuple_item: unsafe extern "C" fn(PyObjectPtr, isize) -> PyObjectPtr = c"PyTuple_GetItem";
    as_long: unsafe extern "C" fn(PyObjectPtr) -> c_long = c"PyLong_AsLong";
    as_unsigned: unsafe extern "C" fn(PyObjectPtr) -> u64 = c"PyLong_AsUnsignedLongLongMask";
    long_new: unsafe extern "C" fn(c_long) -> PyObjectPtr = c"PyLong_FromLong";
    bool_new: unsafe extern "C" fn(c_long) -> PyObjectPtr = c"PyBool_FromLong";
    utf8: unsafe extern "C" fn(PyObjectPtr, *mut isize) -> *const c_char = c"PyUnicode_AsUTF8AndSize";
    str_new: unsafe extern "C" fn(*const c_char, isize) -> PyObjectPtr = c"PyUnicode_FromStringAndSize";
    function_new: unsafe extern "C" fn(*const MethodDef, PyObjectPtr, PyObjectPtr) -> PyObjectPtr = c"PyCFunction_NewEx";
    type_slot: unsafe extern "C" fn(PyObjectPtr, c_int) -> *mut c_void = c"PyType_GetSlot";
    is_subtype: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> c_int = c"PyType_IsSubtype";
    inc_ref: unsafe extern "C" fn(PyObjectPtr) = c"Py_IncRef";
    dec_ref: unsafe extern "C" fn(PyObjectPtr) = c"Py_DecRef";
    none: PyObjectPtr = c"_Py_NoneStruct";
    dict_type: PyObjectPtr = c"PyDict_Type";
    list_type: PyObjectPtr = c"PyList_Type";
    tuple_type: PyObjectPtr = c"PyTuple_Type";
    function_type: PyObjectPtr = c"PyFunction_Type";
    frame_type: PyObjectPtr = c"PyFrame_Type";
    proxy_type: PyObjectPtr = c"_PyWeakref_ProxyType";
    callable_proxy_type: PyObjectPtr = c"_PyWeakref_CallableProxyType";
}

// SAFETY: the fields are functions and types of the interpreter, which never change and live as long as it.
unsafe impl Sync for CApi {}
// SAFETY: the fields are functions and types of the interpreter, which belong to no thread.
unsafe impl Send for CApi {}

impl CApi {
    /// Queues a pending call: the interpreter calls `function` on its main thread, with the GIL. Returns `false` if the
    /// interpreter is not running or its queue is full.
    pub(super) fn queue_call(&self, function: unsafe extern "C" fn(*mut c_void) -> c_int) -> bool {
        // SAFETY: these functions need no GIL and may be called at any time.
        unsafe {
            (self.is_initialized)() != 0
                && (self.is_finalizing)() == 0
                && (self.add_pending_call)(function, null_mut()) == 0
        }
    }

    /// Access to the interpreter. `None` while an exception is set, and once the interpreter is finalizing.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the token is used.
    pub(super) unsafe fn gil_token(&self) -> Option<GilToken<'_>> {
        // SAFETY: the caller guarantees that this thread holds the GIL.
        unsafe { ((self.is_finalizing)() == 0 && (self.error_occurred)().is_null()).then_some(GilToken(self)) }
    }

    /// A new reference to `None`, as a result for the interpreter.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL.
    pub(super) unsafe fn new_none(&self) -> PyObjectPtr {
        // SAFETY: the caller guarantees that this thread holds the GIL.
        unsafe { (self.inc_ref)(self.none) };
        self.none
    }
}

/// Proof that this thread holds the GIL and that no exception is set. A method that fails clears the exception.
#[derive(Clone, Copy)]
pub(super) struct GilToken<'a>(&'a CApi);

/// A Python object with a reference that we own.
pub(super) struct OwnedRef<'a> {
    gil: GilToken<'a>,
    pub(super) object: PyObjectPtr,
}

impl OwnedRef<'_> {
    /// Transfers our reference to the caller.
    pub(super) fn into_raw(self) -> PyObjectPtr {
        let object = self.object;
        std::mem::forget(self);
        object
    }
}

impl Drop for OwnedRef<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the token guarantees the GIL.
        unsafe { (self.gil.0.dec_ref)(self.object) };
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

/// The reference count of an object.
///
/// # Safety
///
/// `object` points to a live Python object.
pub(super) unsafe fn reference_count(object: PyObjectPtr) -> usize {
    // SAFETY: the caller guarantees a live object. In every CPython with a GIL the count is in the low half of the
    // first word. No object has four billion references.
    unsafe { object.cast::<u32>().read() as usize }
}

/// The name of a type, without its module.
///
/// # Safety
///
/// `of` points to a type, and the result is not used after the type is freed.
pub(super) unsafe fn type_name<'a>(of: PyObjectPtr) -> &'a str {
    // SAFETY: the caller guarantees a live type.
    unsafe { crate::names::type_name(of) }
}

impl<'a> GilToken<'a> {
    fn owned(self, object: PyObjectPtr) -> Option<OwnedRef<'a>> {
        if object.is_null() {
            self.clear_error();
            return None;
        }
        Some(OwnedRef { gil: self, object })
    }

    /// Clears the exception that a failed call of ours has set.
    pub(super) fn clear_error(self) {
        // SAFETY: the token guarantees the GIL. No exception was set before our call, so this clears none of the
        // program's.
        unsafe { (self.0.clear_error)() };
    }

    /// The text of the exception that the previous call has raised. Clears it.
    fn error(self) -> String {
        let mut error = [null_mut(); 3];
        let [kind, value, trace] = &mut error;
        // SAFETY: the token guarantees the GIL. The three results are null or references that become ours.
        unsafe { (self.0.fetch_error)(kind, value, trace) };
        let [kind, value, _trace] = error.map(|object| (!object.is_null()).then_some(OwnedRef { gil: self, object }));
        // SAFETY: `kind` is the type of an exception, and we own a reference to it.
        let name = kind.as_ref().map_or("an error", |kind| unsafe { type_name(kind.object) });
        let text = value.and_then(|value| self.text_of(value.object)).unwrap_or_default();
        format!("{name}: {text}")
    }

    /// Whether the program has imported a module completely.
    pub(super) fn is_imported(self, name: &CStr) -> bool {
        // SAFETY: the token guarantees the GIL. The references are borrowed from `sys.modules`, and only attributes
        // of a module and its spec are read.
        unsafe {
            let modules = (self.0.sys_object)(c"modules".as_ptr());
            if modules.is_null() {
                return false;
            }
            let module = (self.0.dict_item_string)(modules, name.as_ptr());
            if module.is_null() {
                self.clear_error();
                return false;
            }
            let is_initializing = self
                .attribute(module, c"__spec__")
                .and_then(|spec| self.attribute(spec.object, c"_initializing"))
                .is_some_and(|value| (self.0.is_true)(value.object) != 0);
            self.clear_error();
            !is_initializing
        }
    }

    /// Imports a module. The error is the text of the exception.
    pub(super) fn import(self, name: &CStr) -> Result<OwnedRef<'a>, String> {
        // SAFETY: `name` is a C string, and the token guarantees the GIL.
        let module = unsafe { (self.0.import)(name.as_ptr()) };
        if module.is_null() { Err(self.error()) } else { Ok(OwnedRef { gil: self, object: module }) }
    }

    /// `getattr(object, name)`. `None` if it raises an exception.
    pub(super) fn attribute(self, object: PyObjectPtr, name: &CStr) -> Option<OwnedRef<'a>> {
        // SAFETY: callers pass a live object, `name` is a C string, and the token guarantees the GIL.
        self.owned(unsafe { (self.0.attribute)(object, name.as_ptr()) })
    }

    /// `function(*arguments, **keywords)`. The arguments are borrowed. `None` if it raises an exception.
    pub(super) fn call(
        self,
        function: PyObjectPtr,
        arguments: &[PyObjectPtr],
        keywords: &[(&CStr, PyObjectPtr)],
    ) -> Option<OwnedRef<'a>> {
        // SAFETY: the token guarantees the GIL. `PyTuple_SetItem` takes over one reference to each argument, which
        // `inc_ref` has added.
        unsafe {
            let tuple = self.owned((self.0.tuple_new)(arguments.len() as isize))?;
            for (at, argument) in (0..).zip(arguments) {
                (self.0.inc_ref)(*argument);
                (self.0.tuple_set)(tuple.object, at, *argument);
            }
            let mut dict = None;
            if !keywords.is_empty() {
                let made = self.owned((self.0.dict_new)())?;
                for (name, value) in keywords {
                    (self.0.dict_set)(made.object, name.as_ptr(), *value);
                }
                dict = Some(made);
            }
            let dict = dict.as_ref().map_or(null_mut(), |dict| dict.object);
            self.owned((self.0.call)(function, tuple.object, dict))
        }
    }

    /// A Python function that calls `method`.
    pub(super) fn new_function(self, method: &'static MethodDef) -> Option<OwnedRef<'a>> {
        // SAFETY: `method` lives forever. The function has no `self` and no module.
        self.owned(unsafe { (self.0.function_new)(method, null_mut(), null_mut()) })
    }

    /// A new Python string. `None` without memory.
    pub(super) fn new_str(self, text: &str) -> Option<OwnedRef<'a>> {
        // SAFETY: the bytes are UTF-8 of this length, and the token guarantees the GIL.
        self.owned(unsafe { (self.0.str_new)(text.as_ptr().cast(), text.len() as isize) })
    }

    /// A new Python `int`. `None` without memory.
    pub(super) fn new_int(self, value: c_long) -> Option<OwnedRef<'a>> {
        // SAFETY: the token guarantees the GIL.
        self.owned(unsafe { (self.0.long_new)(value) })
    }

    /// A new reference to `True` or `False`, as a result for the interpreter.
    pub(super) fn new_bool(self, value: bool) -> PyObjectPtr {
        // SAFETY: the token guarantees the GIL. The caller gives the new reference to the interpreter.
        unsafe { (self.0.bool_new)(value.into()) }
    }

    /// The value of an `int`. -1 for any other object.
    pub(super) fn as_int(self, object: PyObjectPtr) -> c_long {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no number raises an
        // exception.
        let value = unsafe { (self.0.as_long)(object) };
        self.clear_error();
        value
    }

    /// The low 64 bits of an `int`. All bits set for any other object.
    pub(super) fn as_address(self, object: PyObjectPtr) -> u64 {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no number raises an
        // exception.
        let value = unsafe { (self.0.as_unsigned)(object) };
        self.clear_error();
        value
    }

    /// The UTF-8 bytes of a string, valid as long as it lives. `None` for any other object.
    pub(super) fn utf8<'t>(self, text: PyObjectPtr) -> Option<&'t str> {
        let mut length = 0;
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no string raises an
        // exception. The bytes belong to the string.
        unsafe {
            let bytes = (self.0.utf8)(text, &mut length);
            if bytes.is_null() {
                self.clear_error();
                return None;
            }
            str::from_utf8(std::slice::from_raw_parts(bytes.cast(), usize::try_from(length).ok()?)).ok()
        }
    }

    /// `str(object)`. `None` if it raises an exception.
    pub(super) fn text_of(self, object: PyObjectPtr) -> Option<String> {
        // SAFETY: callers pass a live object, and the token guarantees the GIL.
        let text = self.owned(unsafe { (self.0.str)(object) })?;
        self.utf8(text.object).map(str::to_owned)
    }

    /// A new, empty list. `None` without memory.
    pub(super) fn new_list(self) -> Option<OwnedRef<'a>> {
        // SAFETY: the token guarantees the GIL.
        self.owned(unsafe { (self.0.list_new)(0) })
    }

    /// The length of a list. 0 for any other object.
    pub(super) fn list_len(self, list: PyObjectPtr) -> usize {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no list raises an
        // exception.
        let size = unsafe { (self.0.list_size)(list) };
        if size < 0 {
            self.clear_error();
        }
        size.try_into().unwrap_or(0)
    }

    /// An element of a list, as a borrowed reference. `None` if there is none.
    pub(super) fn list_item(self, list: PyObjectPtr, at: usize) -> Option<PyObjectPtr> {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. `PyList_GetItem` checks the type and
        // the index.
        let item = unsafe { (self.0.list_item)(list, at as isize) };
        if item.is_null() {
            self.clear_error();
            return None;
        }
        Some(item)
    }

    /// Appends an object, to which the list takes a reference. Returns `false` if `list` is no list or memory is
    /// missing.
    pub(super) fn list_append(self, list: PyObjectPtr, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass live objects, and the token guarantees the GIL. An object that is no list raises an
        // exception.
        let is_ok = unsafe { (self.0.list_append)(list, object) } == 0;
        if !is_ok {
            self.clear_error();
        }
        is_ok
    }

    /// Inserts an object as the first element.
    pub(super) fn list_prepend(self, list: PyObjectPtr, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass live objects, and the token guarantees the GIL. An object that is no list raises an
        // exception.
        let is_ok = unsafe { (self.0.list_insert)(list, 0, object) } == 0;
        if !is_ok {
            self.clear_error();
        }
        is_ok
    }

    /// A new list with the elements from index `from` on.
    pub(super) fn list_slice_from(self, list: PyObjectPtr, from: usize) -> Option<OwnedRef<'a>> {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no list raises an
        // exception.
        self.owned(unsafe { (self.0.list_slice)(list, from as isize, isize::MAX) })
    }

    /// Removes the elements from index `from` on.
    pub(super) fn list_truncate(self, list: PyObjectPtr, from: usize) {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. A null value removes the slice.
        if unsafe { (self.0.list_set_slice)(list, from as isize, isize::MAX, null_mut()) } != 0 {
            self.clear_error();
        }
    }

    /// Replaces an element by `None`, which releases its reference.
    pub(super) fn list_clear_item(self, list: PyObjectPtr, at: usize) {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. `PyList_SetItem` takes over the new
        // reference to `None`.
        unsafe {
            let none = self.0.new_none();
            if (self.0.list_set_item)(list, at as isize, none) != 0 {
                self.clear_error();
            }
        }
    }

    /// The elements of a tuple, as borrowed references. Empty for any other object.
    pub(super) fn tuple(self, tuple: PyObjectPtr) -> impl Iterator<Item = PyObjectPtr> {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object that is no tuple raises an
        // exception.
        let size = unsafe { (self.0.tuple_size)(tuple) };
        if size < 0 {
            self.clear_error();
        }
        // SAFETY: `at` is below the size, so `tuple` is a tuple. It cannot change.
        (0..size).map(move |at| unsafe { (self.0.tuple_item)(tuple, at) })
    }

    /// Whether `object` is an instance of `class`, decided by its type alone (no `__instancecheck__`).
    pub(super) fn is_instance(self, object: PyObjectPtr, class: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object and a live type, and the token guarantees the GIL.
        unsafe { type_of(object) == class || (self.0.is_subtype)(type_of(object), class) != 0 }
    }

    /// Whether the object is a weak reference proxy, which behaves like the object that it refers to.
    pub(super) fn is_proxy(self, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object.
        let class = unsafe { type_of(object) };
        class == self.0.proxy_type || class == self.0.callable_proxy_type
    }

    pub(super) fn is_dict(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.0.dict_type)
    }

    pub(super) fn is_sequence(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.0.list_type) || self.is_instance(object, self.0.tuple_type)
    }

    pub(super) fn is_tuple(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.0.tuple_type)
    }

    pub(super) fn is_function(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.0.function_type)
    }

    pub(super) fn is_frame(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.0.frame_type)
    }

    /// Whether the object is none of CPython's own kinds whose attribute dictionary is not their content.
    pub(super) fn is_plain_instance(self, object: PyObjectPtr) -> bool {
        !(self.is_dict(object) || self.is_sequence(object) || self.is_function(object) || self.is_frame(object))
    }

    /// Whether the object is a dictionary that is not empty.
    pub(super) fn has_entries(self, dict: PyObjectPtr) -> bool {
        let mut position = 0;
        // SAFETY: `dict` is a dictionary, and `PyDict_Next` accepts null for both results.
        self.is_dict(dict) && unsafe { (self.0.dict_next)(dict, &mut position, null_mut(), null_mut()) } != 0
    }

    /// The attribute dictionary of an object. `None` if it cannot have one. Creates the dictionary if it does not exist
    /// yet.
    pub(super) fn attribute_dict(self, object: PyObjectPtr) -> Option<OwnedRef<'a>> {
        // SAFETY: callers pass a live object, and the token guarantees the GIL. An object without a dictionary raises
        // an exception.
        self.owned(unsafe { (self.0.generic_dict)(object, null_mut()) })
    }

    /// The key of a value in a dictionary, as a borrowed reference. `None` if there is none.
    pub(super) fn key_of(self, dict: PyObjectPtr, value: PyObjectPtr) -> Option<PyObjectPtr> {
        if !self.is_dict(dict) {
            return None;
        }
        let (mut position, mut key, mut at) = (0, null_mut(), null_mut());
        // SAFETY: `dict` is a dictionary, and the loop runs no code that could change it.
        while unsafe { (self.0.dict_next)(dict, &mut position, &mut key, &mut at) } != 0 {
            if at == value {
                return Some(key);
            }
        }
        None
    }

    /// Calls `visit` for each object that this one references, as the garbage collector does.
    pub(super) fn traverse(self, object: PyObjectPtr, visit: Visit, with: *mut c_void) {
        // SAFETY: the slot `tp_traverse` is null or a function of this type. `visit` accepts the argument `with`.
        unsafe {
            let slot = (self.0.type_slot)(type_of(object), TP_TRAVERSE);
            if let Some(traverse) = std::mem::transmute::<*mut c_void, Option<Traverse>>(slot) {
                traverse(object, visit, with);
            }
        }
    }

    /// Clears the references of an object, as the garbage collector does with garbage.
    ///
    /// # Safety
    ///
    /// The object is garbage, and another reference keeps it alive during the call.
    pub(super) unsafe fn clear(self, object: PyObjectPtr) {
        // SAFETY: the slot `tp_clear` is null or a function of this type. The caller guarantees that the object
        // survives the call.
        unsafe {
            let slot = (self.0.type_slot)(type_of(object), TP_CLEAR);
            if let Some(clear) =
                std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(PyObjectPtr) -> c_int>>(slot)
            {
                clear(object);
            }
        }
        self.clear_error();
    }

    /// Whether the collector never clears objects of this class but leaves them in `gc.garbage`, because the class has
    /// `tp_del`.
    pub(super) fn has_tp_del(self, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object, and every object has a type.
        !unsafe { (self.0.type_slot)(type_of(object), TP_DEL) }.is_null()
    }
}
