//! Reads the program's objects. Runs no Python code and changes no object.

use std::ffi::CStr;
use std::ptr::null_mut;

use super::api::PyObjectPtr;
use super::gil::{GilToken, PyOwned, class_name, type_of};

/// `Py_TPFLAGS_*_SUBCLASS` of Include/object.h.
const LIST: u64 = 1 << 25;
const TUPLE: u64 = 1 << 26;
const STR: u64 = 1 << 28;
const DICT: u64 = 1 << 29;
const TYPE: u64 = 1 << 31;
/// `Py_TPFLAGS_HEAPTYPE`: the class was created at run time, as every class of a program is.
const HEAP_TYPE: u64 = 1 << 9;

/// Variable names of this many bytes or more are not used.
const MAX_VARIABLE_BYTES: usize = 80;

impl<'a> GilToken<'a> {
    /// A module that the program has imported, or begun to. A borrowed reference of `sys.modules`.
    pub(super) fn module(self, name: &CStr) -> Option<PyObjectPtr> {
        let modules = self.c.sys_object(c"modules".as_ptr());
        if modules.is_null() {
            return None;
        }
        self.checked(self.c.dict_item_string(modules, name.as_ptr()))
    }

    /// A global variable of such a module, as a borrowed reference.
    pub(super) fn module_variable(self, module: &CStr, name: &CStr) -> Option<PyObjectPtr> {
        let variables = self.checked(self.c.module_dict(self.module(module)?))?;
        self.checked(self.c.dict_item_string(variables, name.as_ptr()))
    }

    /// A class in a module that the program has imported. `None` if there is none.
    pub(crate) fn class(self, module: &CStr, name: &CStr) -> Option<PyObjectPtr> {
        self.module_variable(module, name).filter(|class| self.has_type_flag(*class, TYPE))
    }

    /// An interned string, for use with [`Self::stored_attribute`].
    pub(crate) fn interned(self, text: &CStr) -> Option<PyOwned<'a>> {
        self.owned(self.c.intern_string(text.as_ptr()))
    }

    /// A new Python string. `None` without memory.
    pub(crate) fn new_str(self, text: &str) -> Option<PyOwned<'a>> {
        self.owned(self.c.str_new(text.as_ptr().cast(), text.len() as isize))
    }

    /// Whether the object's type has one of these flags.
    fn has_type_flag(self, object: PyObjectPtr, flags: u64) -> bool {
        // SAFETY: callers pass a live object.
        self.c.type_flags(unsafe { type_of(object) }) & flags != 0
    }

    pub(crate) fn is_dict(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, DICT)
    }

    pub(crate) fn is_tuple(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, TUPLE)
    }

    /// Whether the object is a list or a tuple.
    pub(crate) fn is_sequence(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, LIST | TUPLE)
    }

    pub(crate) fn is_type(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, TYPE)
    }

    /// Whether a class was created at run time.
    pub(crate) fn is_heap_type(self, class: PyObjectPtr) -> bool {
        self.c.type_flags(class) & HEAP_TYPE != 0
    }

    /// Whether the object's class was created at run time, as every class of a program is.
    pub(crate) fn is_of_heap_type(self, object: PyObjectPtr) -> bool {
        self.has_type_flag(object, HEAP_TYPE)
    }

    pub(crate) fn is_function(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.api.function_type)
    }

    pub(crate) fn is_frame(self, object: PyObjectPtr) -> bool {
        self.is_instance(object, self.api.frame_type)
    }

    /// Whether the object's class has this name and is no class of the program.
    pub(crate) fn is_builtin(self, object: PyObjectPtr, class: &str) -> bool {
        // SAFETY: callers pass a live object.
        let is_named = unsafe { class_name(object) } == class;
        is_named && !self.has_type_flag(object, HEAP_TYPE)
    }

    /// The local variables of a frame, as a dictionary. `None` if they are something else.
    pub(crate) fn frame_locals(self, frame: PyObjectPtr) -> Option<PyOwned<'a>> {
        let locals = self.attribute(frame, c"f_locals")?;
        if self.is_dict(locals.object) {
            return Some(locals);
        }
        // From 3.13 on they are a proxy, whose method is C code. In the body of a class they may be an object of the
        // program.
        if !self.is_builtin(locals.object, "FrameLocalsProxy") {
            return None;
        }
        let copy = self.attribute(locals.object, c"copy")?;
        self.call(copy.object, &[]).filter(|copy| self.is_dict(copy.object))
    }

    /// Whether the object is none of CPython's own kinds whose attribute dictionary is not their content.
    pub(crate) fn is_plain_instance(self, object: PyObjectPtr) -> bool {
        !(self.is_dict(object) || self.is_sequence(object) || self.is_function(object) || self.is_frame(object))
    }

    /// Whether `object` is an instance of `class`, decided by its type alone (no `__instancecheck__`).
    pub(crate) fn is_instance(self, object: PyObjectPtr, class: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object.
        self.is_subclass(unsafe { type_of(object) }, class)
    }

    /// Whether the type `class` is `base` or derives from it, decided by its method resolution order.
    pub(super) fn is_subclass(self, class: PyObjectPtr, base: PyObjectPtr) -> bool {
        class == base || self.c.is_subtype(class, base) != 0
    }

    /// The attribute in the instance's own dictionary or in a slot. `None` for anything that the class computes,
    /// because that may be the program's code.
    pub(crate) fn stored_attribute(self, object: PyObjectPtr, name: &PyOwned<'_>) -> Option<PyOwned<'a>> {
        self.stored_value(object, name.object)
    }

    /// [`Self::stored_attribute`] with the name as a Python string.
    pub(crate) fn stored_value(self, object: PyObjectPtr, name: PyObjectPtr) -> Option<PyOwned<'a>> {
        // SAFETY: callers pass a live object.
        let of_class = self.c.type_lookup(unsafe { type_of(object) }, name);
        // Only slots of the class are read, and those are C code.
        // SAFETY: the class holds what it was just looked up in.
        if !of_class.is_null() && unsafe { type_of(of_class) } != self.api.member_type {
            return None;
        }
        self.owned(self.c.generic_attribute(object, name))
    }

    /// The entries of a dictionary in order of insertion. Empty if `dict` is no dictionary. The caller must not change
    /// it meanwhile.
    pub(crate) fn entries(self, dict: PyObjectPtr) -> impl Iterator<Item = (PyObjectPtr, PyObjectPtr)> {
        let mut position = if self.is_dict(dict) { Some(0) } else { None };
        std::iter::from_fn(move || {
            let (mut key, mut value) = (null_mut(), null_mut());
            let more = self.c.dict_next(dict, position.as_mut()?, &mut key, &mut value) != 0;
            (more && !key.is_null() && !value.is_null()).then_some((key, value))
        })
    }

    /// The key of a value in a dictionary, as a borrowed reference. `None` if there is none.
    pub(crate) fn key_of(self, dict: PyObjectPtr, value: PyObjectPtr) -> Option<PyObjectPtr> {
        self.entries(dict).find(|(_, at)| *at == value).map(|(key, _)| key)
    }

    /// The value of a key in a dictionary, as a borrowed reference. `None` if there is none, or for any other object.
    /// The key must be a string.
    pub(crate) fn item(self, dict: PyObjectPtr, key: &PyOwned<'_>) -> Option<PyObjectPtr> {
        self.checked(self.c.dict_item(dict, key.object))
    }

    /// The elements of a list or a tuple, as borrowed references. Empty for any other object.
    pub(crate) fn elements(self, sequence: PyObjectPtr) -> impl Iterator<Item = PyObjectPtr> {
        let is_list = self.has_type_flag(sequence, LIST);
        let size = if is_list {
            self.c.list_size(sequence)
        } else if self.is_tuple(sequence) {
            self.c.tuple_size(sequence)
        } else {
            0
        };
        (0..size).map_while(move |at| {
            let item = if is_list { self.c.list_item(sequence, at) } else { self.c.tuple_item(sequence, at) };
            self.checked(item)
        })
    }

    /// The length of a list. 0 for any other object.
    pub(crate) fn list_len(self, list: PyObjectPtr) -> usize {
        let size = self.c.list_size(list);
        if size < 0 {
            self.clear_error();
        }
        size.try_into().unwrap_or(0)
    }

    /// An element of a list, as a borrowed reference. `None` if there is none.
    pub(crate) fn list_item(self, list: PyObjectPtr, at: usize) -> Option<PyObjectPtr> {
        self.checked(self.c.list_item(list, at as isize))
    }

    /// The length of a tuple. 0 for any other object.
    pub(crate) fn tuple_len(self, tuple: PyObjectPtr) -> usize {
        let size = self.c.tuple_size(tuple);
        if size < 0 {
            self.clear_error();
        }
        size.try_into().unwrap_or(0)
    }

    /// An element of a tuple, as a borrowed reference. `None` if there is none.
    pub(crate) fn tuple_item(self, tuple: PyObjectPtr, at: usize) -> Option<PyObjectPtr> {
        self.checked(self.c.tuple_item(tuple, at as isize))
    }

    /// A weak reference to an object. `None` if its class has none, or if its field is not where it should be.
    pub(crate) fn weak_reference(self, object: PyObjectPtr) -> Option<PyOwned<'a>> {
        let reference = self.owned(self.c.weak_reference(object, null_mut()))?;
        (self.referent(reference.object) == Some(object)).then_some(reference)
    }

    /// The object of a weak reference, as a borrowed reference. `None` once it is freed.
    pub(crate) fn referent(self, reference: PyObjectPtr) -> Option<PyObjectPtr> {
        // SAFETY: callers pass a live weak reference. `wr_object` follows the two words of every object, and is `None`
        // or a live object while the GIL is held.
        let object = unsafe { reference.cast::<PyObjectPtr>().add(2).read() };
        (object != self.api.none).then_some(object)
    }

    /// The UTF-8 text of a Python string, valid as long as the string lives. `None` for any other object.
    pub(crate) fn str<'t>(self, text: PyObjectPtr) -> Option<&'t str> {
        if !self.has_type_flag(text, STR) {
            return None;
        }
        let mut length = 0;
        let bytes = self.checked(self.c.utf8(text, &mut length).cast_mut().cast())?;
        // SAFETY: `PyUnicode_AsUTF8AndSize` has returned this many bytes, which belong to the string and live as long
        // as it.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(length).ok()?) };
        str::from_utf8(bytes).ok()
    }

    /// The value of an `int`. -1 for any other object.
    pub(crate) fn as_int(self, object: PyObjectPtr) -> std::ffi::c_long {
        let value = self.c.as_long(object);
        self.clear_error();
        value
    }

    /// The value of an `int`. `None` for any other object, and if it needs more than 64 bits.
    pub(crate) fn int_value(self, object: PyObjectPtr) -> Option<std::ffi::c_long> {
        let value = self.c.as_long(object);
        if value == -1 && !self.c.error_occurred().is_null() {
            self.clear_error();
            return None;
        }
        Some(value)
    }

    /// The low 64 bits of an `int`. All bits set for any other object.
    pub(crate) fn as_address(self, object: PyObjectPtr) -> u64 {
        let value = self.c.as_unsigned(object);
        self.clear_error();
        value
    }

    /// The name of the first global variable of `__main__` that refers to this object.
    pub(crate) fn global_variable_name<'t>(self, object: PyObjectPtr) -> Option<&'t str> {
        let names = self.checked(self.c.module_dict(self.module(c"__main__")?))?;
        let is_usable = |name: &&str| !name.is_empty() && !name.starts_with('_') && name.len() < MAX_VARIABLE_BYTES;
        self.entries(names).filter(|(_, value)| *value == object).find_map(|(name, _)| self.str(name).filter(is_usable))
    }
}
