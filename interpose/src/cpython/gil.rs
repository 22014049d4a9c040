//! The proof that this thread holds the GIL, and owned references.

use std::ffi::{CStr, c_char, c_int};

use super::api::{CApi, Functions, PyObjectPtr};
use crate::linker::original::global_symbol;

/// Offset of `PyTypeObject.tp_name`, in bytes. In every CPython it follows `ob_refcnt`, `ob_type` and `ob_size`.
const TP_NAME: usize = 24;

/// Proof that this thread holds the GIL and that no exception is set. A method that fails clears its exception.
/// Borrowed references stay valid while no Python code runs.
#[derive(Clone, Copy)]
pub(crate) struct GilToken<'a> {
    pub(super) api: &'a CApi,
    /// The functions of `api`.
    pub(super) c: Functions<'a>,
}

/// A Python object with a reference that we own.
pub(crate) struct PyOwned<'a> {
    gil: GilToken<'a>,
    pub(crate) object: PyObjectPtr,
}

/// Calls `call` with the GIL, on a thread that may be none of Python's. Waits for the GIL without a limit. `None` if
/// the interpreter does not run.
pub(crate) fn with_gil<T>(api: &CApi, call: impl FnOnce(GilToken<'_>) -> T) -> Option<T> {
    type Ensure = unsafe extern "C-unwind" fn() -> c_int;
    type Release = unsafe extern "C-unwind" fn(c_int);
    // SAFETY: these functions have these types in every CPython.
    let (ensure, release) =
        unsafe { (global_symbol::<Ensure>(c"PyGILState_Ensure")?, global_symbol::<Release>(c"PyGILState_Release")?) };
    if !api.is_running() {
        return None;
    }
    // SAFETY: the interpreter runs. Each call of the first function is followed by one of the second one.
    unsafe {
        let state = ensure();
        let result = GilToken::new(api).map(call);
        release(state);
        result
    }
}

impl<'a> GilToken<'a> {
    /// Access to the interpreter's objects. `None` while an exception is set, and once the interpreter is finalizing.
    ///
    /// # Safety
    ///
    /// The calling thread holds the GIL for as long as the token is used.
    pub(crate) unsafe fn new(api: &'a CApi) -> Option<GilToken<'a>> {
        // SAFETY: the caller guarantees that this thread holds the GIL while the token, and with it `c`, is used.
        let c = unsafe { api.with_gil() };
        (!api.is_finalizing() && c.error_occurred().is_null()).then_some(GilToken { api, c })
    }

    /// A new reference as an owned one. If it is null, `None`; the exception is cleared.
    pub(super) fn owned(self, object: PyObjectPtr) -> Option<PyOwned<'a>> {
        self.checked(object).map(|object| PyOwned { gil: self, object })
    }

    /// The result of a function that may have set an exception. Clears the exception; `None` if there was one.
    pub(super) fn checked(self, object: PyObjectPtr) -> Option<PyObjectPtr> {
        if object.is_null() {
            self.clear_error();
            return None;
        }
        Some(object)
    }

    /// Clears the exception that a failed call of ours has set.
    pub(super) fn clear_error(self) {
        // No exception was set before our call, so this clears none of the program's.
        self.c.clear_error();
    }
}

impl PyOwned<'_> {
    /// Transfers our reference to the caller.
    pub(crate) fn into_raw(self) -> PyObjectPtr {
        let object = self.object;
        std::mem::forget(self);
        object
    }
}

impl Drop for PyOwned<'_> {
    fn drop(&mut self) {
        self.gil.c.dec_ref(self.object);
    }
}

/// The type of an object.
///
/// # Safety
///
/// `object` points to a live Python object.
pub(crate) unsafe fn type_of(object: PyObjectPtr) -> PyObjectPtr {
    // SAFETY: the caller guarantees a live object. `ob_type` is the second word of every object.
    unsafe { object.cast::<PyObjectPtr>().add(1).read() }
}

/// The reference count of an object.
///
/// # Safety
///
/// `object` points to a live Python object.
pub(crate) unsafe fn reference_count(object: PyObjectPtr) -> usize {
    // SAFETY: the caller guarantees a live object. In every CPython with a GIL the count is in the low half of the
    // first word. No object has four billion references.
    unsafe { object.cast::<u32>().read() as usize }
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

/// The name of an object's class, without its module.
///
/// # Safety
///
/// `object` points to a live Python object, and the result is not used after its class is freed.
pub(crate) unsafe fn class_name<'a>(object: PyObjectPtr) -> &'a str {
    // SAFETY: the caller guarantees a live object, which keeps its class alive.
    unsafe { type_name(type_of(object)) }
}
