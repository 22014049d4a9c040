//! The table of CPython's functions and types.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::linker::original::global_symbol;

/// A `PyObject *`.
pub(crate) type PyObjectPtr = *mut c_void;

/// A function that the interpreter calls for each object of a set.
pub(crate) type Visit = unsafe extern "C" fn(PyObjectPtr, *mut c_void) -> c_int;
/// A function that the interpreter calls between two instructions.
pub(crate) type PendingCall = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `METH_*` of Include/methodobject.h.
pub(crate) const METH_VARARGS: c_int = 1;

/// `PyMethodDef`.
#[repr(C)]
pub(crate) struct MethodDef {
    pub(crate) name: *const c_char,
    pub(crate) body: unsafe extern "C" fn(PyObjectPtr, PyObjectPtr) -> PyObjectPtr,
    pub(crate) flags: c_int,
    pub(crate) doc: *const c_char,
}

// SAFETY: a `MethodDef` never changes, and its pointers refer to constants.
unsafe impl Sync for MethodDef {}

/// The functions that need the GIL. Only a [`GilToken`](super::gil::GilToken) has one.
#[derive(Clone, Copy)]
pub(super) struct Functions<'a>(&'a CApi);

macro_rules! c_api {
    (
        functions { $($function:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $function_name:literal;)* }
        types { $($class:ident = $class_name:literal;)* }
    ) => {
        /// Functions and types of the interpreter's C API. They exist in every CPython from 3.8 on.
        pub(crate) struct CApi {
            $($function: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            $(pub(super) $class: PyObjectPtr,)*
            add_pending_call: unsafe extern "C" fn(PendingCall, *mut c_void) -> c_int,
            is_initialized: unsafe extern "C" fn() -> c_int,
            is_finalizing: unsafe extern "C" fn() -> c_int,
            /// `PyUnstable_GC_VisitObjects`, from 3.12 on.
            pub(super) visit_objects: Option<unsafe extern "C" fn(Visit, *mut c_void)>,
            /// `PyGC_Disable` and `PyGC_Enable`, from 3.10 on.
            pub(super) collector: Option<(unsafe extern "C" fn() -> c_int, unsafe extern "C" fn() -> c_int)>,
        }

        impl Functions<'_> {
            $(
                #[doc = concat!("`", stringify!($function_name), "`.")]
                #[inline(always)]
                pub(super) fn $function(self, $($argument: $type),*) $(-> $result)? {
                    // SAFETY: this value proves that the thread holds the GIL, and `find` has given the function this
                    // type. The methods of `GilToken` pass objects that their callers keep alive, and storage of their
                    // own.
                    unsafe { (self.0.$function)($($argument),*) }
                }
            )*
        }

        impl CApi {
            fn find() -> Option<CApi> {
                // SAFETY: these symbols belong to the C API and have these types in every CPython from 3.8 on.
                unsafe {
                    let version: unsafe extern "C" fn() -> *const c_char = global_symbol(c"Py_GetVersion")?;
                    let version = version();
                    let is_free_threaded = |text: &[u8]| text.windows(14).any(|w| w == b"free-threading");
                    if version.is_null() || is_free_threaded(CStr::from_ptr(version).to_bytes()) {
                        return None;
                    }
                    Some(CApi {
                        $($function: global_symbol($function_name)?,)*
                        $($class: global_symbol($class_name)?,)*
                        add_pending_call: global_symbol(c"Py_AddPendingCall")?,
                        is_initialized: global_symbol(c"Py_IsInitialized")?,
                        // Public since 3.13. Earlier versions export it with an underscore.
                        is_finalizing: global_symbol(c"Py_IsFinalizing")
                            .or_else(|| global_symbol(c"_Py_IsFinalizing"))?,
                        visit_objects: global_symbol(c"PyUnstable_GC_VisitObjects"),
                        collector: global_symbol(c"PyGC_Disable").zip(global_symbol(c"PyGC_Enable")),
                    })
                }
            }
        }
    };
}

c_api! {
    functions {
        error_occurred() -> PyObjectPtr = c"PyErr_Occurred";
        clear_error() = c"PyErr_Clear";
        fetch_error(kind: *mut PyObjectPtr, value: *mut PyObjectPtr, trace: *mut PyObjectPtr) = c"PyErr_Fetch";
        sys_object(name: *const c_char) -> PyObjectPtr = c"PySys_GetObject";
        import(name: *const c_char) -> PyObjectPtr = c"PyImport_ImportModule";
        module_dict(module: PyObjectPtr) -> PyObjectPtr = c"PyModule_GetDict";
        attribute(object: PyObjectPtr, name: *const c_char) -> PyObjectPtr = c"PyObject_GetAttrString";
        generic_attribute(object: PyObjectPtr, name: PyObjectPtr) -> PyObjectPtr = c"PyObject_GenericGetAttr";
        generic_dict(object: PyObjectPtr, context: *mut c_void) -> PyObjectPtr = c"PyObject_GenericGetDict";
        call_object(function: PyObjectPtr, arguments: PyObjectPtr) -> PyObjectPtr = c"PyObject_CallObject";
        str(object: PyObjectPtr) -> PyObjectPtr = c"PyObject_Str";
        is_true(object: PyObjectPtr) -> c_int = c"PyObject_IsTrue";
        dict_item_string(dict: PyObjectPtr, key: *const c_char) -> PyObjectPtr = c"PyDict_GetItemString";
        dict_item(dict: PyObjectPtr, key: PyObjectPtr) -> PyObjectPtr = c"PyDict_GetItemWithError";
        dict_next(dict: PyObjectPtr, position: *mut isize, key: *mut PyObjectPtr, value: *mut PyObjectPtr) -> c_int
            = c"PyDict_Next";
        list_size(list: PyObjectPtr) -> isize = c"PyList_Size";
        list_item(list: PyObjectPtr, at: isize) -> PyObjectPtr = c"PyList_GetItem";
        list_set_item(list: PyObjectPtr, at: isize, item: PyObjectPtr) -> c_int = c"PyList_SetItem";
        list_append(list: PyObjectPtr, item: PyObjectPtr) -> c_int = c"PyList_Append";
        list_insert(list: PyObjectPtr, at: isize, item: PyObjectPtr) -> c_int = c"PyList_Insert";
        list_slice(list: PyObjectPtr, from: isize, to: isize) -> PyObjectPtr = c"PyList_GetSlice";
        list_set_slice(list: PyObjectPtr, from: isize, to: isize, items: PyObjectPtr) -> c_int = c"PyList_SetSlice";
        tuple_new(size: isize) -> PyObjectPtr = c"PyTuple_New";
        tuple_set(tuple: PyObjectPtr, at: isize, item: PyObjectPtr) -> c_int = c"PyTuple_SetItem";
        tuple_size(tuple: PyObjectPtr) -> isize = c"PyTuple_Size";
        tuple_item(tuple: PyObjectPtr, at: isize) -> PyObjectPtr = c"PyTuple_GetItem";
        as_long(object: PyObjectPtr) -> c_long = c"PyLong_AsLong";
        as_unsigned(object: PyObjectPtr) -> u64 = c"PyLong_AsUnsignedLongLongMask";
        long_new(value: c_long) -> PyObjectPtr = c"PyLong_FromLong";
        utf8(text: PyObjectPtr, size: *mut isize) -> *const c_char = c"PyUnicode_AsUTF8AndSize";
        str_new(text: *const c_char, size: isize) -> PyObjectPtr = c"PyUnicode_FromStringAndSize";
        intern_string(text: *const c_char) -> PyObjectPtr = c"PyUnicode_InternFromString";
        function_new(method: *const MethodDef, object: PyObjectPtr, module: PyObjectPtr) -> PyObjectPtr
            = c"PyCFunction_NewEx";
        type_lookup(class: PyObjectPtr, name: PyObjectPtr) -> PyObjectPtr = c"_PyType_Lookup";
        type_flags(class: PyObjectPtr) -> u64 = c"PyType_GetFlags";
        type_slot(class: PyObjectPtr, slot: c_int) -> *mut c_void = c"PyType_GetSlot";
        is_subtype(class: PyObjectPtr, base: PyObjectPtr) -> c_int = c"PyType_IsSubtype";
        inc_ref(object: PyObjectPtr) = c"Py_IncRef";
        dec_ref(object: PyObjectPtr) = c"Py_DecRef";
        gc_untrack(object: PyObjectPtr) = c"PyObject_GC_UnTrack";
        handled_error(kind: *mut PyObjectPtr, value: *mut PyObjectPtr, trace: *mut PyObjectPtr) = c"PyErr_GetExcInfo";
        interpreter_main() -> *mut c_void = c"PyInterpreterState_Main";
        thread_head(interpreter: *mut c_void) -> *mut c_void = c"PyInterpreterState_ThreadHead";
        thread_next(thread: *mut c_void) -> *mut c_void = c"PyThreadState_Next";
        thread_get() -> *mut c_void = c"PyThreadState_Get";
        weak_reference(object: PyObjectPtr, callback: PyObjectPtr) -> PyObjectPtr = c"PyWeakref_NewRef";
        function_code(function: PyObjectPtr) -> PyObjectPtr = c"PyFunction_GetCode";
        function_globals(function: PyObjectPtr) -> PyObjectPtr = c"PyFunction_GetGlobals";
        function_closure(function: PyObjectPtr) -> PyObjectPtr = c"PyFunction_GetClosure";
        function_defaults(function: PyObjectPtr) -> PyObjectPtr = c"PyFunction_GetDefaults";
        function_keyword_defaults(function: PyObjectPtr) -> PyObjectPtr = c"PyFunction_GetKwDefaults";
    }
    types {
        none = c"_Py_NoneStruct";
        member_type = c"PyMemberDescr_Type";
        function_type = c"PyFunction_Type";
        frame_type = c"PyFrame_Type";
        module_type = c"PyModule_Type";
        str_type = c"PyUnicode_Type";
    }
}

// SAFETY: the fields are functions and types of the interpreter, which never change and live as long as it.
unsafe impl Sync for CApi {}
// SAFETY: the fields are functions and types of the interpreter, which belong to no thread.
unsafe impl Send for CApi {}

/// The interpreter's C API. Belongs to the loaded library and is inherited by forked children.
static C_API: AtomicPtr<CApi> = AtomicPtr::new(null_mut());

/// The interpreter's C API, if [`find`] has found it.
pub(crate) fn found() -> Option<&'static CApi> {
    // SAFETY: the pointer is null or comes from a box that `find` has leaked.
    unsafe { C_API.load(Ordering::Acquire).as_ref() }
}

/// The interpreter's C API. `None` without a CPython, and for a free-threaded build, where other threads change objects
/// while this one reads them. Needs no GIL.
///
/// It takes no lock, because a forked child may not wait for a thread that does not exist there.
pub(crate) fn find() -> Option<&'static CApi> {
    if let Some(api) = found() {
        return Some(api);
    }
    let api = Box::into_raw(Box::new(CApi::find()?));
    if C_API.compare_exchange(null_mut(), api, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: this box was just made, and no other thread has seen its address.
        drop(unsafe { Box::from_raw(api) });
    }
    found()
}

impl CApi {
    /// The functions that need the GIL.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the result is used.
    pub(super) unsafe fn with_gil(&self) -> Functions<'_> {
        Functions(self)
    }

    /// Whether the interpreter is running. A program frees memory even after its interpreter has ended. Needs no GIL.
    pub(crate) fn is_running(&self) -> bool {
        // SAFETY: this function reads one word of the runtime. It needs no GIL and may be called at any time.
        unsafe { (self.is_initialized)() != 0 && !self.is_finalizing() }
    }

    pub(super) fn is_finalizing(&self) -> bool {
        // SAFETY: this function reads one word of the runtime. It needs no GIL and may be called at any time.
        unsafe { (self.is_finalizing)() != 0 }
    }

    /// Queues a pending call: the interpreter calls `function` on its main thread, with the GIL. Returns `false` if the
    /// queue is full. The interpreter must be running. Needs no GIL.
    pub(crate) fn queue_call(&self, function: PendingCall) -> bool {
        // SAFETY: `Py_AddPendingCall` needs no GIL, and `function` has the type that it takes.
        unsafe { (self.add_pending_call)(function, null_mut()) == 0 }
    }

    /// Whether type slots can be read from every type, which is so from 3.10 on.
    pub(crate) fn has_type_slots(&self) -> bool {
        self.collector.is_some()
    }
}
