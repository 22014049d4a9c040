//! Imports, calls and changes objects. May run Python code.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::ptr::null_mut;

use super::api::{CApi, MethodDef, PyObjectPtr, Visit};
use super::gil::{GilToken, PyOwned, type_name, type_of};

type Traverse = unsafe extern "C" fn(PyObjectPtr, Visit, *mut c_void) -> c_int;
type Clear = unsafe extern "C" fn(PyObjectPtr) -> c_int;

/// `Py_tp_*` of Include/typeslots.h, the same in every CPython.
const TP_CLEAR: c_int = 51;
const TP_DEL: c_int = 53;
const TP_DESCR_GET: c_int = 54;
const TP_TRAVERSE: c_int = 71;

/// A new reference to `None`, as a result for the interpreter.
///
/// # Safety
///
/// The calling thread holds the GIL.
pub(crate) unsafe fn new_none(api: &CApi) -> PyObjectPtr {
    // SAFETY: the caller guarantees that this thread holds the GIL.
    unsafe { api.with_gil() }.inc_ref(api.none);
    api.none
}

impl<'a> GilToken<'a> {
    /// The text of the exception that the previous call has raised. Clears it.
    fn error(self) -> String {
        let mut error = [null_mut(); 3];
        let [kind, value, trace] = &mut error;
        self.c.fetch_error(kind, value, trace);
        let [kind, value, _trace] = error.map(|object| self.owned(object));
        // SAFETY: `kind` is the type of an exception, and we own a reference to it.
        let name = kind.as_ref().map_or("an error", |kind| unsafe { type_name(kind.object) });
        let text = value.and_then(|value| self.text_of(value.object)).unwrap_or_default();
        format!("{name}: {text}")
    }

    /// Whether the program has imported a module completely.
    pub(crate) fn is_imported(self, name: &CStr) -> bool {
        let Some(module) = self.module(name) else { return false };
        let is_initializing = self
            .attribute(module, c"__spec__")
            .and_then(|spec| self.attribute(spec.object, c"_initializing"))
            .is_some_and(|value| self.c.is_true(value.object) != 0);
        self.clear_error();
        !is_initializing
    }

    /// Imports a module. The error is the text of the exception.
    pub(crate) fn import(self, name: &CStr) -> Result<PyOwned<'a>, String> {
        let module = self.c.import(name.as_ptr());
        if module.is_null() { Err(self.error()) } else { self.owned(module).ok_or_else(String::new) }
    }

    /// `getattr(object, name)`. `None` if it raises an exception.
    pub(crate) fn attribute(self, object: PyObjectPtr, name: &CStr) -> Option<PyOwned<'a>> {
        self.owned(self.c.attribute(object, name.as_ptr()))
    }

    /// An attribute of a module that the program has imported. `None` if there is none.
    pub(crate) fn module_attribute(self, module: &CStr, name: &CStr) -> Option<PyOwned<'a>> {
        self.attribute(self.module(module)?, name)
    }

    /// `function(*arguments)`. The arguments are borrowed. `None` if it raises an exception.
    pub(crate) fn call(self, function: PyObjectPtr, arguments: &[PyObjectPtr]) -> Option<PyOwned<'a>> {
        let tuple = self.owned(self.c.tuple_new(arguments.len() as isize))?;
        for (at, argument) in (0..).zip(arguments) {
            // `PyTuple_SetItem` takes over this reference.
            self.c.inc_ref(*argument);
            self.c.tuple_set(tuple.object, at, *argument);
        }
        self.owned(self.c.call_object(function, tuple.object))
    }

    /// A Python function that calls `method`.
    pub(crate) fn new_function(self, method: &'static MethodDef) -> Option<PyOwned<'a>> {
        // The function has no `self` and no module.
        self.owned(self.c.function_new(method, null_mut(), null_mut()))
    }

    /// A new Python `int`. `None` without memory.
    pub(crate) fn new_int(self, value: c_long) -> Option<PyOwned<'a>> {
        self.owned(self.c.long_new(value))
    }

    /// `str(object)`. `None` if it raises an exception.
    pub(crate) fn text_of(self, object: PyObjectPtr) -> Option<String> {
        let text = self.owned(self.c.str(object))?;
        self.str(text.object).map(str::to_owned)
    }

    /// Whether a function has succeeded. Clears the exception of one that has not.
    fn succeeded(self, result: c_int) -> bool {
        if result != 0 {
            self.clear_error();
        }
        result == 0
    }

    /// Appends an object, to which the list takes a reference. Returns `false` if `list` is no list or memory is
    /// missing.
    pub(crate) fn list_append(self, list: PyObjectPtr, object: PyObjectPtr) -> bool {
        self.succeeded(self.c.list_append(list, object))
    }

    /// Inserts an object as the first element.
    pub(crate) fn list_prepend(self, list: PyObjectPtr, object: PyObjectPtr) -> bool {
        self.succeeded(self.c.list_insert(list, 0, object))
    }

    /// A new list with the elements from index `from` on.
    pub(crate) fn list_slice_from(self, list: PyObjectPtr, from: usize) -> Option<PyOwned<'a>> {
        self.owned(self.c.list_slice(list, from as isize, isize::MAX))
    }

    /// Removes the elements from index `from` on.
    pub(crate) fn list_truncate(self, list: PyObjectPtr, from: usize) {
        // A null value removes the slice.
        self.succeeded(self.c.list_set_slice(list, from as isize, isize::MAX, null_mut()));
    }

    /// Replaces an element by `None`, which releases its reference.
    pub(crate) fn list_clear_item(self, list: PyObjectPtr, at: usize) {
        // `PyList_SetItem` takes over the new reference to `None`.
        self.c.inc_ref(self.api.none);
        self.succeeded(self.c.list_set_item(list, at as isize, self.api.none));
    }

    /// The attribute dictionary of an object. `None` if it cannot have one. Creates the dictionary if it does not exist
    /// yet.
    pub(crate) fn attribute_dict(self, object: PyObjectPtr) -> Option<PyOwned<'a>> {
        self.owned(self.c.generic_dict(object, null_mut()))
    }

    /// A slot of the object's class, null if it has none.
    fn slot(self, object: PyObjectPtr, slot: c_int) -> *mut c_void {
        // SAFETY: callers pass a live object.
        self.c.type_slot(unsafe { type_of(object) }, slot)
    }

    /// The attribute that the instance stores, or else the constant of that name in its class. `None` for anything that
    /// a descriptor of the class computes. Needs [`CApi::has_type_slots`](super::api::CApi::has_type_slots).
    pub(crate) fn constant_or_stored(self, object: PyObjectPtr, name: &PyOwned<'_>) -> Option<PyOwned<'a>> {
        // SAFETY: callers pass a live object.
        let of_class = self.c.type_lookup(unsafe { type_of(object) }, name.object);
        if !of_class.is_null() && !self.slot(of_class, TP_DESCR_GET).is_null() {
            return None;
        }
        self.owned(self.c.generic_attribute(object, name.object))
    }

    /// Calls `visit` for each object that this one references, as the garbage collector does.
    pub(crate) fn traverse(self, object: PyObjectPtr, visit: Visit, with: *mut c_void) {
        // SAFETY: the slot `tp_traverse` is null or a function of this type. `visit` accepts the argument `with`.
        unsafe {
            if let Some(traverse) = std::mem::transmute::<*mut c_void, Option<Traverse>>(self.slot(object, TP_TRAVERSE))
            {
                traverse(object, visit, with);
            }
        }
    }

    /// Clears the references of an object, as the garbage collector does with garbage.
    ///
    /// # Safety
    ///
    /// The object is garbage, and another reference keeps it alive during the call.
    pub(crate) unsafe fn clear(self, object: PyObjectPtr) {
        // SAFETY: the slot `tp_clear` is null or a function of this type. The caller guarantees that the object
        // survives the call.
        unsafe {
            if let Some(clear) = std::mem::transmute::<*mut c_void, Option<Clear>>(self.slot(object, TP_CLEAR)) {
                clear(object);
            }
        }
        self.clear_error();
    }

    /// Whether the collector never clears objects of this class but leaves them in `gc.garbage`, because the class has
    /// `tp_del`.
    pub(crate) fn has_tp_del(self, object: PyObjectPtr) -> bool {
        !self.slot(object, TP_DEL).is_null()
    }
}
