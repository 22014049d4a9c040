//! What is used of CPython's C API to see what the garbage collector found. All is called with the GIL, and may run Python code.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;

use crate::real::global;

/// A `PyObject *`.
pub(super) type Object = *mut c_void;

/// Called for each object that another holds; 0 goes on.
pub(super) type Visit = unsafe extern "C" fn(Object, *mut c_void) -> c_int;
type Traverse = unsafe extern "C" fn(Object, Visit, *mut c_void) -> c_int;

/// `Py_tp_*` of Include/typeslots.h, the same in every CPython.
const TP_CLEAR: c_int = 51;
const TP_DEL: c_int = 53;
const TP_TRAVERSE: c_int = 71;
/// `METH_*`.
pub(super) const VARARGS: c_int = 1;
pub(super) const ONE: c_int = 8;

/// `PyMethodDef`.
#[repr(C)]
pub(super) struct Method {
    pub(super) name: *const c_char,
    pub(super) body: unsafe extern "C" fn(Object, Object) -> Object,
    pub(super) flags: c_int,
    pub(super) doc: *const c_char,
}

// SAFETY: never changed; points to constants.
unsafe impl Sync for Method {}

macro_rules! interface {
    ($($field:ident: $type:ty = $name:literal;)*) => {
        /// See the module.
        pub(super) struct Interface {
            $($field: $type,)*
            is_finalizing: unsafe extern "C" fn() -> c_int,
        }

        impl Interface {
            /// `None` where there is no CPython, one before 3.10, or one that runs threads at once.
            pub(super) fn find() -> Option<Interface> {
                // SAFETY: all are of the C API, with these types in every CPython from 3.10 on.
                unsafe {
                    let version: unsafe extern "C" fn() -> *const c_char = global(c"Py_GetVersion")?;
                    let version = version();
                    let threads = |text: &[u8]| text.windows(14).any(|w| w == b"free-threading");
                    if version.is_null() || threads(CStr::from_ptr(version).to_bytes()) {
                        return None;
                    }
                    // Made in 3.10, as is what else is needed.
                    let _: unsafe extern "C" fn() -> c_int = global(c"PyGC_IsEnabled")?;
                    Some(Interface {
                        $($field: global($name)?,)*
                        // Public since 3.13; before that with an underscore.
                        is_finalizing: global(c"Py_IsFinalizing").or_else(|| global(c"_Py_IsFinalizing"))?,
                    })
                }
            }
        }
    };
}

interface! {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int = c"Py_AddPendingCall";
    is_initialized: unsafe extern "C" fn() -> c_int = c"Py_IsInitialized";
    error_occurred: unsafe extern "C" fn() -> Object = c"PyErr_Occurred";
    clear_error: unsafe extern "C" fn() = c"PyErr_Clear";
    fetch_error: unsafe extern "C" fn(*mut Object, *mut Object, *mut Object) = c"PyErr_Fetch";
    sys_object: unsafe extern "C" fn(*const c_char) -> Object = c"PySys_GetObject";
    import: unsafe extern "C" fn(*const c_char) -> Object = c"PyImport_ImportModule";
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object = c"PyObject_GetAttrString";
    call: unsafe extern "C" fn(Object, Object, Object) -> Object = c"PyObject_Call";
    generic_dict: unsafe extern "C" fn(Object, *mut c_void) -> Object = c"PyObject_GenericGetDict";
    str: unsafe extern "C" fn(Object) -> Object = c"PyObject_Str";
    is_true: unsafe extern "C" fn(Object) -> c_int = c"PyObject_IsTrue";
    dict_item_string: unsafe extern "C" fn(Object, *const c_char) -> Object = c"PyDict_GetItemString";
    dict_next: unsafe extern "C" fn(Object, *mut isize, *mut Object, *mut Object) -> c_int = c"PyDict_Next";
    dict_new: unsafe extern "C" fn() -> Object = c"PyDict_New";
    dict_set: unsafe extern "C" fn(Object, *const c_char, Object) -> c_int = c"PyDict_SetItemString";
    list_new: unsafe extern "C" fn(isize) -> Object = c"PyList_New";
    list_size: unsafe extern "C" fn(Object) -> isize = c"PyList_Size";
    list_item: unsafe extern "C" fn(Object, isize) -> Object = c"PyList_GetItem";
    list_set_item: unsafe extern "C" fn(Object, isize, Object) -> c_int = c"PyList_SetItem";
    list_append: unsafe extern "C" fn(Object, Object) -> c_int = c"PyList_Append";
    list_insert: unsafe extern "C" fn(Object, isize, Object) -> c_int = c"PyList_Insert";
    list_slice: unsafe extern "C" fn(Object, isize, isize) -> Object = c"PyList_GetSlice";
    list_set_slice: unsafe extern "C" fn(Object, isize, isize, Object) -> c_int = c"PyList_SetSlice";
    tuple_new: unsafe extern "C" fn(isize) -> Object = c"PyTuple_New";
    tuple_set: unsafe extern "C" fn(Object, isize, Object) -> c_int = c"PyTuple_SetItem";
    tuple_size: unsafe extern "C" fn(Object) -> isize = c"PyTuple_Size";
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object = c"PyTuple_GetItem";
    as_long: unsafe extern "C" fn(Object) -> c_long = c"PyLong_AsLong";
    as_unsigned: unsafe extern "C" fn(Object) -> u64 = c"PyLong_AsUnsignedLongLongMask";
    new_long: unsafe extern "C" fn(c_long) -> Object = c"PyLong_FromLong";
    new_bool: unsafe extern "C" fn(c_long) -> Object = c"PyBool_FromLong";
    utf8: unsafe extern "C" fn(Object, *mut isize) -> *const c_char = c"PyUnicode_AsUTF8AndSize";
    new_text: unsafe extern "C" fn(*const c_char, isize) -> Object = c"PyUnicode_FromStringAndSize";
    new_function: unsafe extern "C" fn(*const Method, Object, Object) -> Object = c"PyCFunction_NewEx";
    type_slot: unsafe extern "C" fn(Object, c_int) -> *mut c_void = c"PyType_GetSlot";
    is_subtype: unsafe extern "C" fn(Object, Object) -> c_int = c"PyType_IsSubtype";
    hold: unsafe extern "C" fn(Object) = c"Py_IncRef";
    release: unsafe extern "C" fn(Object) = c"Py_DecRef";
    none: Object = c"_Py_NoneStruct";
    dict_type: Object = c"PyDict_Type";
    list_type: Object = c"PyList_Type";
    tuple_type: Object = c"PyTuple_Type";
    function_type: Object = c"PyFunction_Type";
    frame_type: Object = c"PyFrame_Type";
    proxy_type: Object = c"_PyWeakref_ProxyType";
    callable_proxy_type: Object = c"_PyWeakref_CallableProxyType";
}

// SAFETY: functions of the interpreter's, and types that are there as long as it.
unsafe impl Sync for Interface {}
// SAFETY: as above.
unsafe impl Send for Interface {}

impl Interface {
    /// Has the interpreter call `function` on its main thread, with the GIL; false where it is not running, or too many others wait.
    pub(super) fn call_soon(&self, function: unsafe extern "C" fn(*mut c_void) -> c_int) -> bool {
        // SAFETY: these need no GIL, and are there at any time.
        unsafe {
            (self.is_initialized)() != 0
                && (self.is_finalizing)() == 0
                && (self.add_pending_call)(function, null_mut()) == 0
        }
    }

    /// `None` while an error is set, and when the interpreter ends.
    ///
    /// # Safety
    /// This thread holds the GIL, and does so as long as the answer is used.
    pub(super) unsafe fn session(&self) -> Option<Session<'_>> {
        // SAFETY: with the GIL, as the caller promises.
        unsafe { ((self.is_finalizing)() == 0 && (self.error_occurred)().is_null()).then_some(Session(self)) }
    }

    /// `None`, for the interpreter: a new reference.
    ///
    /// # Safety
    /// This thread holds the GIL.
    pub(super) unsafe fn nothing(&self) -> Object {
        // SAFETY: with the GIL.
        unsafe { (self.hold)(self.none) };
        self.none
    }
}

/// The time in which this thread holds the GIL and no error is set. Functions that fail leave none behind.
#[derive(Clone, Copy)]
pub(super) struct Session<'a>(&'a Interface);

/// An object that we hold a reference of.
pub(super) struct Held<'a> {
    session: Session<'a>,
    pub(super) object: Object,
}

impl Held<'_> {
    /// Gives the reference away.
    pub(super) fn keep(self) -> Object {
        let object = self.object;
        std::mem::forget(self);
        object
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: our own reference, with the GIL.
        unsafe { (self.session.0.release)(self.object) };
    }
}

/// The type of an object.
///
/// # Safety
/// It is one.
pub(super) unsafe fn type_of(object: Object) -> Object {
    // SAFETY: `ob_type` is the second word of every object.
    unsafe { object.cast::<Object>().add(1).read() }
}

/// How many references of an object there are.
///
/// # Safety
/// It is one.
pub(super) unsafe fn references(object: Object) -> usize {
    // SAFETY: the count is in the low half of the first word in every CPython with a GIL; nobody holds four billion.
    unsafe { object.cast::<u32>().read() as usize }
}

/// The name of a type, without its module.
///
/// # Safety
/// It is a type; the name is used while it lives.
pub(super) unsafe fn type_name<'a>(of: Object) -> &'a str {
    // SAFETY: as promised.
    unsafe { crate::names::type_name(of) }
}

impl<'a> Session<'a> {
    fn held(self, object: Object) -> Option<Held<'a>> {
        if object.is_null() {
            self.clear_error();
            return None;
        }
        Some(Held { session: self, object })
    }

    pub(super) fn clear_error(self) {
        // SAFETY: with the GIL; no error was set before what we called.
        unsafe { (self.0.clear_error)() };
    }

    /// What went wrong in the call before, in words; nothing is set afterwards.
    fn error(self) -> String {
        let mut error = [null_mut(); 3];
        let [kind, value, trace] = &mut error;
        // SAFETY: with the GIL; the three references, or nulls, become ours.
        unsafe { (self.0.fetch_error)(kind, value, trace) };
        let [kind, value, _trace] = error.map(|object| (!object.is_null()).then_some(Held { session: self, object }));
        // SAFETY: the kind of an error is a type.
        let name = kind.as_ref().map_or("an error", |kind| unsafe { type_name(kind.object) });
        let text = value.and_then(|value| self.text_of(value.object)).unwrap_or_default();
        format!("{name}: {text}")
    }

    /// Whether the program has imported a module, and is not about to.
    pub(super) fn is_imported(self, name: &CStr) -> bool {
        // SAFETY: with the GIL; borrowed, and attributes of a module and its specification.
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
            let going_on = self
                .attribute(module, c"__spec__")
                .and_then(|spec| self.attribute(spec.object, c"_initializing"))
                .is_some_and(|value| (self.0.is_true)(value.object) != 0);
            self.clear_error();
            !going_on
        }
    }

    /// Imports a module; `Err` says what it raised.
    pub(super) fn import(self, name: &CStr) -> Result<Held<'a>, String> {
        // SAFETY: a C string, with the GIL.
        let module = unsafe { (self.0.import)(name.as_ptr()) };
        if module.is_null() { Err(self.error()) } else { Ok(Held { session: self, object: module }) }
    }

    pub(super) fn attribute(self, object: Object, name: &CStr) -> Option<Held<'a>> {
        // SAFETY: an object and a C string, with the GIL.
        self.held(unsafe { (self.0.attribute)(object, name.as_ptr()) })
    }

    /// `function(*arguments, **named)`; the arguments are borrowed.
    pub(super) fn call(self, function: Object, arguments: &[Object], named: &[(&CStr, Object)]) -> Option<Held<'a>> {
        // SAFETY: with the GIL; the tuple takes over a reference each.
        unsafe {
            let tuple = self.held((self.0.tuple_new)(arguments.len() as isize))?;
            for (at, argument) in (0..).zip(arguments) {
                (self.0.hold)(*argument);
                (self.0.tuple_set)(tuple.object, at, *argument);
            }
            let mut dict = None;
            if !named.is_empty() {
                let made = self.held((self.0.dict_new)())?;
                for (name, value) in named {
                    (self.0.dict_set)(made.object, name.as_ptr(), *value);
                }
                dict = Some(made);
            }
            let dict = dict.as_ref().map_or(null_mut(), |dict| dict.object);
            self.held((self.0.call)(function, tuple.object, dict))
        }
    }

    /// A function of ours as an object.
    pub(super) fn function(self, method: &'static Method) -> Option<Held<'a>> {
        // SAFETY: a definition that is there for ever; no self and no module.
        self.held(unsafe { (self.0.new_function)(method, null_mut(), null_mut()) })
    }

    pub(super) fn text(self, text: &str) -> Option<Held<'a>> {
        // SAFETY: UTF-8 of this length.
        self.held(unsafe { (self.0.new_text)(text.as_ptr().cast(), text.len() as isize) })
    }

    pub(super) fn number(self, value: c_long) -> Option<Held<'a>> {
        // SAFETY: with the GIL.
        self.held(unsafe { (self.0.new_long)(value) })
    }

    pub(super) fn truth(self, value: bool) -> Object {
        // SAFETY: with the GIL; a new reference, for the interpreter.
        unsafe { (self.0.new_bool)(value.into()) }
    }

    pub(super) fn as_number(self, object: Object) -> c_long {
        // SAFETY: an object; what is no number is refused with an error.
        let value = unsafe { (self.0.as_long)(object) };
        self.clear_error();
        value
    }

    pub(super) fn as_address(self, object: Object) -> u64 {
        // SAFETY: as above.
        let value = unsafe { (self.0.as_unsigned)(object) };
        self.clear_error();
        value
    }

    /// The bytes of a text, as long as it lives.
    pub(super) fn utf8<'t>(self, text: Object) -> Option<&'t str> {
        let mut length = 0;
        // SAFETY: an object; what is no text is refused with an error. The bytes are the text's own.
        unsafe {
            let bytes = (self.0.utf8)(text, &mut length);
            if bytes.is_null() {
                self.clear_error();
                return None;
            }
            str::from_utf8(std::slice::from_raw_parts(bytes.cast(), usize::try_from(length).ok()?)).ok()
        }
    }

    /// `str(object)`.
    pub(super) fn text_of(self, object: Object) -> Option<String> {
        // SAFETY: an object, with the GIL.
        let text = self.held(unsafe { (self.0.str)(object) })?;
        self.utf8(text.object).map(str::to_owned)
    }

    pub(super) fn new_list(self) -> Option<Held<'a>> {
        // SAFETY: with the GIL.
        self.held(unsafe { (self.0.list_new)(0) })
    }

    pub(super) fn list_len(self, list: Object) -> usize {
        // SAFETY: an object; what is no list is refused with an error.
        let size = unsafe { (self.0.list_size)(list) };
        if size < 0 {
            self.clear_error();
        }
        size.try_into().unwrap_or(0)
    }

    /// Borrowed from the list.
    pub(super) fn list_item(self, list: Object, at: usize) -> Option<Object> {
        // SAFETY: as above; bounds are checked.
        let item = unsafe { (self.0.list_item)(list, at as isize) };
        if item.is_null() {
            self.clear_error();
            return None;
        }
        Some(item)
    }

    pub(super) fn list_append(self, list: Object, object: Object) -> bool {
        // SAFETY: as above.
        let done = unsafe { (self.0.list_append)(list, object) } == 0;
        if !done {
            self.clear_error();
        }
        done
    }

    /// As its first element.
    pub(super) fn list_prepend(self, list: Object, object: Object) -> bool {
        // SAFETY: as above.
        let done = unsafe { (self.0.list_insert)(list, 0, object) } == 0;
        if !done {
            self.clear_error();
        }
        done
    }

    /// What a list has from here on, as a list.
    pub(super) fn list_tail(self, list: Object, from: usize) -> Option<Held<'a>> {
        // SAFETY: as above.
        self.held(unsafe { (self.0.list_slice)(list, from as isize, isize::MAX) })
    }

    /// Takes out of a list what it has from here on.
    pub(super) fn list_cut(self, list: Object, from: usize) {
        // SAFETY: as above; a null removes.
        if unsafe { (self.0.list_set_slice)(list, from as isize, isize::MAX, null_mut()) } != 0 {
            self.clear_error();
        }
    }

    /// Lets go of an element.
    pub(super) fn list_drop(self, list: Object, at: usize) {
        // SAFETY: as above; takes over the reference of `None`.
        unsafe {
            let none = self.0.nothing();
            if (self.0.list_set_item)(list, at as isize, none) != 0 {
                self.clear_error();
            }
        }
    }

    /// The elements of a tuple.
    pub(super) fn tuple(self, tuple: Object) -> impl Iterator<Item = Object> {
        // SAFETY: an object; what is no tuple is refused with an error.
        let size = unsafe { (self.0.tuple_size)(tuple) };
        if size < 0 {
            self.clear_error();
        }
        // SAFETY: within its bounds.
        (0..size).map(move |at| unsafe { (self.0.tuple_item)(tuple, at) })
    }

    pub(super) fn is_instance(self, object: Object, class: Object) -> bool {
        // SAFETY: an object and a type.
        unsafe { type_of(object) == class || (self.0.is_subtype)(type_of(object), class) != 0 }
    }

    /// Whether it is a weak reference that passes for what it refers to.
    pub(super) fn is_proxy(self, object: Object) -> bool {
        // SAFETY: an object.
        let class = unsafe { type_of(object) };
        class == self.0.proxy_type || class == self.0.callable_proxy_type
    }

    pub(super) fn is_dict(self, object: Object) -> bool {
        self.is_instance(object, self.0.dict_type)
    }

    pub(super) fn is_sequence(self, object: Object) -> bool {
        self.is_instance(object, self.0.list_type) || self.is_instance(object, self.0.tuple_type)
    }

    pub(super) fn is_tuple(self, object: Object) -> bool {
        self.is_instance(object, self.0.tuple_type)
    }

    pub(super) fn is_function(self, object: Object) -> bool {
        self.is_instance(object, self.0.function_type)
    }

    pub(super) fn is_frame(self, object: Object) -> bool {
        self.is_instance(object, self.0.frame_type)
    }

    /// Whether it is none of CPython's own kinds that have attributes beside what they are for.
    pub(super) fn is_plain(self, object: Object) -> bool {
        !(self.is_dict(object) || self.is_sequence(object) || self.is_function(object) || self.is_frame(object))
    }

    /// Whether it is a dictionary with something in it.
    pub(super) fn has_entries(self, dict: Object) -> bool {
        let mut position = 0;
        // SAFETY: a dictionary; the answer's places may be null.
        self.is_dict(dict) && unsafe { (self.0.dict_next)(dict, &mut position, null_mut(), null_mut()) } != 0
    }

    /// An object's own dictionary, if it can have one.
    pub(super) fn dict_of(self, object: Object) -> Option<Held<'a>> {
        // SAFETY: an object; one that can have none is refused with an error.
        self.held(unsafe { (self.0.generic_dict)(object, null_mut()) })
    }

    /// The key under which a dictionary has a value. Borrowed.
    pub(super) fn key_of(self, dict: Object, value: Object) -> Option<Object> {
        if !self.is_dict(dict) {
            return None;
        }
        let (mut position, mut key, mut at) = (0, null_mut(), null_mut());
        // SAFETY: a dictionary, which nobody changes meanwhile.
        while unsafe { (self.0.dict_next)(dict, &mut position, &mut key, &mut at) } != 0 {
            if at == value {
                return Some(key);
            }
        }
        None
    }

    /// Calls `visit` for each object that this one holds, as the garbage collector does.
    pub(super) fn traverse(self, object: Object, visit: Visit, with: *mut c_void) {
        // SAFETY: the slot is a function of this type or null; `visit` takes what it is given here.
        unsafe {
            let slot = (self.0.type_slot)(type_of(object), TP_TRAVERSE);
            if let Some(traverse) = std::mem::transmute::<*mut c_void, Option<Traverse>>(slot) {
                traverse(object, visit, with);
            }
        }
    }

    /// Has an object let go of what it holds, as the garbage collector does with garbage.
    ///
    /// # Safety
    /// The object is garbage, and held by somebody meanwhile.
    pub(super) unsafe fn clear(self, object: Object) {
        // SAFETY: the slot is a function of this type or null.
        unsafe {
            let slot = (self.0.type_slot)(type_of(object), TP_CLEAR);
            if let Some(clear) = std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(Object) -> c_int>>(slot)
            {
                clear(object);
            }
        }
        self.clear_error();
    }

    /// Whether objects of its class are never cleared by the collector, but left in `gc.garbage`.
    pub(super) fn is_left_to_the_program(self, object: Object) -> bool {
        // SAFETY: an object has a type.
        !unsafe { (self.0.type_slot)(type_of(object), TP_DEL) }.is_null()
    }
}
