//! What is used of CPython's C API to read the program's objects: functions that run no Python code on what they are given here, and change
//! nothing. All are called with the GIL.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use super::{LINK_FLAGS, LINKS};
use crate::real::global;

/// A `PyObject *`.
pub(crate) type Object = *mut c_void;

/// `Py_TPFLAGS_*_SUBCLASS`
const LIST: u64 = 1 << 25;
const TUPLE: u64 = 1 << 26;
const TEXT: u64 = 1 << 28;
const DICT: u64 = 1 << 29;
const TYPE: u64 = 1 << 31;

/// `PyTypeObject.tp_name`: behind `ob_refcnt`, `ob_type` and `ob_size` in every CPython.
const TP_NAME: usize = 24;

/// Longer names of variables are not shown.
const LONGEST_VARIABLE: usize = 80;

/// Called for each object; 1 goes on.
pub(super) type Visit = unsafe extern "C" fn(Object, *mut c_void) -> c_int;

/// See the module.
pub(super) struct Interface {
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    error_occurred: unsafe extern "C" fn() -> Object,
    clear_error: unsafe extern "C" fn(),
    sys_object: unsafe extern "C" fn(*const c_char) -> Object,
    dict_item_string: unsafe extern "C" fn(Object, *const c_char) -> Object,
    dict_next: unsafe extern "C" fn(Object, *mut isize, *mut Object, *mut Object) -> c_int,
    module_dict: unsafe extern "C" fn(Object) -> Object,
    generic_attribute: unsafe extern "C" fn(Object, Object) -> Object,
    type_lookup: unsafe extern "C" fn(Object, Object) -> Object,
    type_flags: unsafe extern "C" fn(Object) -> u64,
    is_subtype: unsafe extern "C" fn(Object, Object) -> c_int,
    member_type: Object,
    list_size: unsafe extern "C" fn(Object) -> isize,
    list_item: unsafe extern "C" fn(Object, isize) -> Object,
    tuple_size: unsafe extern "C" fn(Object) -> isize,
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object,
    utf8: unsafe extern "C" fn(Object, *mut isize) -> *const c_char,
    new_text: unsafe extern "C" fn(*const c_char) -> Object,
    release: unsafe extern "C" fn(Object),
    /// From 3.12 on.
    visit_objects: Option<unsafe extern "C" fn(Visit, *mut c_void)>,
    call: unsafe extern "C" fn(Object, Object) -> Object,
    is_true: unsafe extern "C" fn(Object) -> c_int,
    /// `PyGC_Disable` and `PyGC_Enable`, from 3.10 on.
    collector: Option<(unsafe extern "C" fn() -> c_int, unsafe extern "C" fn() -> c_int)>,
}

impl Interface {
    /// `None` where there is no CPython, or one whose objects other threads may change while we look.
    pub(super) fn find() -> Option<Interface> {
        // SAFETY: all are of the C API, with these types in every CPython from 3.8 on.
        unsafe {
            let version: unsafe extern "C" fn() -> *const c_char = global(c"Py_GetVersion")?;
            let version = version();
            if version.is_null() || CStr::from_ptr(version).to_bytes().windows(14).any(|w| w == b"free-threading") {
                return None;
            }
            Some(Interface {
                add_pending_call: global(c"Py_AddPendingCall")?,
                is_initialized: global(c"Py_IsInitialized")?,
                // Public since 3.13; before that with an underscore.
                is_finalizing: global(c"Py_IsFinalizing").or_else(|| global(c"_Py_IsFinalizing"))?,
                error_occurred: global(c"PyErr_Occurred")?,
                clear_error: global(c"PyErr_Clear")?,
                sys_object: global(c"PySys_GetObject")?,
                dict_item_string: global(c"PyDict_GetItemString")?,
                dict_next: global(c"PyDict_Next")?,
                module_dict: global(c"PyModule_GetDict")?,
                generic_attribute: global(c"PyObject_GenericGetAttr")?,
                type_lookup: global(c"_PyType_Lookup")?,
                type_flags: global(c"PyType_GetFlags")?,
                is_subtype: global(c"PyType_IsSubtype")?,
                member_type: global(c"PyMemberDescr_Type")?,
                list_size: global(c"PyList_Size")?,
                list_item: global(c"PyList_GetItem")?,
                tuple_size: global(c"PyTuple_Size")?,
                tuple_item: global(c"PyTuple_GetItem")?,
                utf8: global(c"PyUnicode_AsUTF8AndSize")?,
                new_text: global(c"PyUnicode_InternFromString")?,
                release: global(c"Py_DecRef")?,
                visit_objects: global(c"PyUnstable_GC_VisitObjects"),
                call: global(c"PyObject_CallObject")?,
                is_true: global(c"PyObject_IsTrue")?,
                collector: global(c"PyGC_Disable").zip(global(c"PyGC_Enable")),
            })
        }
    }

    /// Whether the interpreter is there. What frees memory at a program's very end may come after it.
    pub(super) fn is_running(&self) -> bool {
        // SAFETY: both read a word of the runtime's, at any time, on any thread.
        unsafe { (self.is_initialized)() != 0 && (self.is_finalizing)() == 0 }
    }

    /// Has the interpreter call `function` on its main thread, with the GIL; false where too many others wait. It must be running.
    pub(super) fn call_soon(&self, function: unsafe extern "C" fn(*mut c_void) -> c_int) -> bool {
        // SAFETY: needs no GIL.
        unsafe { (self.add_pending_call)(function, null_mut()) == 0 }
    }

    /// What can be read now. `None` while an error is set, and when the interpreter ends.
    ///
    /// # Safety
    /// This thread holds the GIL, and does so as long as the answer lives.
    pub(super) unsafe fn session(&self) -> Option<Session<'_>> {
        // SAFETY: with the GIL, as the caller promises.
        unsafe {
            ((self.is_finalizing)() == 0 && (self.error_occurred)().is_null()).then_some(Session { interface: self })
        }
    }
}

/// The time in which this thread holds the GIL, no error is set, and no Python code runs: borrowed objects stay.
#[derive(Clone, Copy)]
pub(super) struct Session<'a> {
    interface: &'a Interface,
}

/// An object that we hold a reference of.
pub(super) struct Held<'a> {
    session: Session<'a>,
    pub(super) object: Object,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: our own reference, with the GIL.
        unsafe { (self.session.interface.release)(self.object) };
    }
}

/// The time in which the garbage collector does not run. Below Python 3.12 it would where an object is made, and an attribute that is
/// not there makes an exception: what the collector frees may be what we look at, and it runs the program's finalizers.
pub(super) struct Uncollected<'a> {
    session: Session<'a>,
    was_on: bool,
}

impl Drop for Uncollected<'_> {
    fn drop(&mut self) {
        if self.was_on {
            match self.session.interface.collector {
                // SAFETY: with the GIL.
                Some((_, on)) => _ = unsafe { on() },
                None => _ = self.session.asked(c"gc", c"enable"),
            }
        }
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

/// The name of a type, without its module.
///
/// # Safety
/// It is a type; the name is used while it lives.
pub(crate) unsafe fn type_name<'a>(of: Object) -> &'a str {
    // SAFETY: as promised; a C string that lives as long as the type.
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

impl<'a> Session<'a> {
    fn some(object: Object) -> Option<Object> {
        (!object.is_null()).then_some(object)
    }

    fn held(self, object: Object) -> Option<Held<'a>> {
        Session::some(object).map(|object| Held { session: self, object })
    }

    /// A text of ours, for [`Self::attribute`].
    pub(super) fn text(self, text: &CStr) -> Option<Held<'a>> {
        // SAFETY: a C string, with the GIL.
        let text = unsafe { (self.interface.new_text)(text.as_ptr()) };
        self.cleared(text).and_then(|text| self.held(text))
    }

    /// The answer of a function that may have set an error.
    fn cleared(self, object: Object) -> Option<Object> {
        if object.is_null() {
            // SAFETY: with the GIL; no error was set before the call.
            unsafe { (self.interface.clear_error)() };
        }
        Session::some(object)
    }

    /// A class of a module that the program has imported.
    pub(super) fn class(self, module: &CStr, name: &CStr) -> Option<Object> {
        // SAFETY: with the GIL; all borrowed. What is not of the expected type is refused with an error.
        let class = unsafe {
            let modules = (self.interface.sys_object)(c"modules".as_ptr());
            let module = (!modules.is_null())
                .then(|| (self.interface.dict_item_string)(modules, module.as_ptr()))
                .and_then(|module| self.cleared(module))?;
            let names = self.cleared((self.interface.module_dict)(module))?;
            self.cleared((self.interface.dict_item_string)(names, name.as_ptr()))?
        };
        self.is(class, TYPE).then_some(class)
    }

    /// Whether an object is of one of these kinds.
    fn is(self, object: Object, flags: u64) -> bool {
        // SAFETY: an object, with the GIL.
        unsafe { (self.interface.type_flags)(type_of(object)) & flags != 0 }
    }

    pub(super) fn is_dict(self, object: Object) -> bool {
        self.is(object, DICT)
    }

    /// Whether `object` is an instance of `class`, by its type alone.
    pub(super) fn is_instance(self, object: Object, class: Object) -> bool {
        // SAFETY: an object and a type, with the GIL.
        unsafe { self.is_subtype(type_of(object), class) }
    }

    /// # Safety
    /// Both are types.
    unsafe fn is_subtype(self, of: Object, class: Object) -> bool {
        // SAFETY: as promised; walks the method resolution order.
        of == class || unsafe { (self.interface.is_subtype)(of, class) } != 0
    }

    /// What an instance itself has under this name, in its dictionary or a slot. What its class computes is not asked for: that may be
    /// the program's own code.
    pub(super) fn attribute(self, object: Object, name: &Held<'_>) -> Option<Held<'a>> {
        // SAFETY: an object and a text, with the GIL. Nothing of the class answers, but for slots, which are C code.
        unsafe {
            let of_class = (self.interface.type_lookup)(type_of(object), name.object);
            if !of_class.is_null() && type_of(of_class) != self.interface.member_type {
                return None;
            }
            let found = (self.interface.generic_attribute)(object, name.object);
            self.cleared(found).and_then(|found| self.held(found))
        }
    }

    /// The entries of a dictionary, in order of insertion; nothing, where it is none. They must not be changed meanwhile.
    pub(super) fn entries(self, dict: Object) -> impl Iterator<Item = (Object, Object)> {
        let mut position = if self.is_dict(dict) { Some(0) } else { None };
        std::iter::from_fn(move || {
            let position = position.as_mut()?;
            let (mut key, mut value) = (null_mut(), null_mut());
            // SAFETY: a dictionary, which nobody changes while we hold the GIL and run no code of the program's.
            let more = unsafe { (self.interface.dict_next)(dict, position, &mut key, &mut value) } != 0;
            (more && !key.is_null() && !value.is_null()).then_some((key, value))
        })
    }

    /// The elements of a list or tuple; nothing, where it is neither.
    pub(super) fn elements(self, sequence: Object) -> impl Iterator<Item = Object> {
        let size = if self.is(sequence, LIST) {
            // SAFETY: a list, with the GIL.
            Some((unsafe { (self.interface.list_size)(sequence) }, self.interface.list_item))
        } else if self.is(sequence, TUPLE) {
            // SAFETY: a tuple, with the GIL.
            Some((unsafe { (self.interface.tuple_size)(sequence) }, self.interface.tuple_item))
        } else {
            None
        };
        let (size, item) = size.unwrap_or((0, self.interface.list_item));
        // SAFETY: within its bounds; borrowed.
        (0..size).map_while(move |index| Session::some(unsafe { item(sequence, index) }))
    }

    /// A Python text's own bytes.
    pub(super) fn str<'t>(self, text: Object) -> Option<&'t str> {
        if !self.is(text, TEXT) {
            return None;
        }
        let mut length = 0;
        // SAFETY: a text, with the GIL; the bytes are its own and live as long as it.
        unsafe {
            let bytes = (self.interface.utf8)(text, &mut length);
            if bytes.is_null() {
                (self.interface.clear_error)();
                return None;
            }
            str::from_utf8(std::slice::from_raw_parts(bytes.cast::<u8>(), usize::try_from(length).ok()?)).ok()
        }
    }

    /// Every object that the garbage collector knows and that is an instance of one of these classes. Called with the index of the class.
    /// `lists`: the heads of the collector's lists, where they are known: from two ends they are read faster than the interpreter's own way does.
    pub(super) fn instances(
        self,
        classes: &[Object],
        lists: Option<[usize; 4]>,
        found: &mut dyn FnMut(usize, Object),
    ) -> bool {
        let mut search = Search { session: self, classes, seen: vec![(null_mut(), NONE); SEEN], found };
        if let Some(lists) = lists {
            for head in lists {
                // SAFETY: the heads of the collector's own lists, which were verified, with the GIL; `look` gets live objects and changes
                // nothing.
                unsafe { each(head, |object| _ = look(object, (&raw mut search).cast())) };
            }
            return true;
        }
        if let Some(visit) = self.interface.visit_objects {
            // SAFETY: with the GIL. `look` gets each object and the search, and does nothing but look.
            unsafe { visit(look, (&raw mut search).cast()) };
            return true;
        }
        // A list of all of them, made by C code: one object more for a while.
        let Some(list) = self.asked(c"gc", c"get_objects") else { return false };
        for object in self.elements(list.object) {
            // SAFETY: the list holds it until then, and the program as before.
            unsafe { look(object, (&raw mut search).cast()) };
        }
        true
    }

    /// Keeps the garbage collector from running. `None` where that cannot be done.
    pub(super) fn uncollected(self) -> Option<Uncollected<'a>> {
        let was_on = match self.interface.collector {
            // SAFETY: with the GIL.
            Some((off, _)) => unsafe { off() != 0 },
            None => {
                let is_on = self.asked(c"gc", c"isenabled")?;
                self.builtin(c"gc", c"enable")?;
                self.asked(c"gc", c"disable")?;
                // SAFETY: an object, with the GIL.
                unsafe { (self.interface.is_true)(is_on.object) == 1 }
            }
        };
        Some(Uncollected { session: self, was_on })
    }

    /// What a function of C answers, without arguments.
    fn asked(self, module: &CStr, name: &CStr) -> Option<Held<'a>> {
        let function = self.builtin(module, name)?;
        // SAFETY: a function, with the GIL.
        let answer = unsafe { (self.interface.call)(function, null_mut()) };
        self.cleared(answer).and_then(|answer| self.held(answer))
    }

    /// A function of a module that the program has imported, if it is one of C.
    fn builtin(self, module: &CStr, name: &CStr) -> Option<Object> {
        // SAFETY: as in `class`.
        let function = unsafe {
            let modules = Session::some((self.interface.sys_object)(c"modules".as_ptr()))?;
            let module = self.cleared((self.interface.dict_item_string)(modules, module.as_ptr()))?;
            let names = self.cleared((self.interface.module_dict)(module))?;
            self.cleared((self.interface.dict_item_string)(names, name.as_ptr()))?
        };
        // SAFETY: an object has a type.
        (unsafe { type_name(type_of(function)) } == "builtin_function_or_method").then_some(function)
    }

    /// The first global variable of the program that holds this object.
    pub(super) fn variable<'t>(self, object: Object) -> Option<&'t str> {
        // SAFETY: as in `class`.
        let names = unsafe {
            let modules = Session::some((self.interface.sys_object)(c"modules".as_ptr()))?;
            let main = self.cleared((self.interface.dict_item_string)(modules, c"__main__".as_ptr()))?;
            self.cleared((self.interface.module_dict)(main))?
        };
        let is_own = |name: &&str| !name.is_empty() && !name.starts_with('_') && name.len() < LONGEST_VARIABLE;
        self.entries(names).filter(|(_, value)| *value == object).find_map(|(name, _)| self.str(name).filter(is_own))
    }
}

/// How many types are remembered while searching.
const SEEN: usize = 1 << 12;
const NONE: usize = usize::MAX;

struct Search<'a> {
    session: Session<'a>,
    classes: &'a [Object],
    /// By a type's address: what it is a subclass of.
    seen: Vec<(Object, usize)>,
    found: &'a mut dyn FnMut(usize, Object),
}

/// Looks at each object of a list of the collector's, from both of its ends: every link is a load that has to wait for memory, and so two of
/// them wait at once.
///
/// # Safety
/// The head of such a list, with the GIL, while the collector does not run.
unsafe fn each(head: usize, mut visit: impl FnMut(Object)) {
    // SAFETY: every link of the list leads to the next, or the one before, and the last to the head.
    let follow = |links: usize| unsafe { std::ptr::with_exposed_provenance::<usize>(links).read() } & !LINK_FLAGS;
    let (mut front, mut back) = (follow(head), follow(head + size_of::<usize>()));
    // A link is missing in no list of the collector's; what is no such list ends there.
    while front != head && back != head && front != 0 && back != 0 {
        visit(std::ptr::with_exposed_provenance_mut(front + LINKS));
        if front == back {
            return;
        }
        visit(std::ptr::with_exposed_provenance_mut(back + LINKS));
        let (next, previous) = (follow(front), follow(back + size_of::<usize>()));
        if next == back {
            return;
        }
        (front, back) = (next, previous);
    }
}

unsafe extern "C" fn look(object: Object, search: *mut c_void) -> c_int {
    // SAFETY: `instances` gave its own, and nobody else uses it meanwhile.
    let search = unsafe { &mut *search.cast::<Search<'_>>() };
    // SAFETY: an object.
    let class = unsafe { type_of(object) };
    let place = (class.addr() >> 4) % SEEN;
    let known = search.seen.get(place).filter(|seen| seen.0 == class).map(|seen| seen.1);
    let which = known.unwrap_or_else(|| {
        let session = search.session;
        // SAFETY: types.
        let is = |of: &Object| unsafe { session.is_subtype(class, *of) };
        let which = search.classes.iter().position(is).unwrap_or(NONE);
        if let Some(seen) = search.seen.get_mut(place) {
            *seen = (class, which);
        }
        which
    });
    if which != NONE {
        (search.found)(which, object);
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_from_both_ends_and_each_object_once() {
        for count in 0..9 {
            // Head and objects: next, previous and what lies behind them. The collector's flags are in the links.
            let mut nodes = vec![[0_usize; 4]; count + 1];
            let at: Vec<usize> = nodes.iter().map(|node| node.as_ptr().expose_provenance()).collect();
            for (index, node) in nodes.iter_mut().enumerate() {
                node[0] = at[(index + 1) % at.len()] | (index % 2);
                node[1] = at[(index + count) % at.len()] | (index % 4);
            }
            let mut seen = Vec::new();
            // SAFETY: such a list.
            unsafe { each(at[0], |object| seen.push(object.addr() - LINKS)) };
            seen.sort_unstable();
            assert_eq!(seen, at[1..], "{count} objects");
        }
    }
}
