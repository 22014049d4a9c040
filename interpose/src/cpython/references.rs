//! The references of objects, as the garbage collector sees them. Runs no Python code and changes no object.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::api::{PyObjectPtr, Visit};
use super::gil::{GilToken, PyOwned, type_name, type_of};

/// `Py_TPFLAGS_HAVE_GC` of Include/object.h.
const HAVE_GC: u64 = 1 << 14;
/// Offsets in `PyTypeObject`, in bytes, the same from 3.8 to 3.15.
const TP_FLAGS: usize = 168;
const TP_TRAVERSE: usize = 184;
const TP_DICT: usize = 264;
const TP_MRO: usize = 344;
/// `Py_tp_traverse` of Include/typeslots.h.
const TRAVERSE_SLOT: c_int = 71;

/// The parts of a Python function.
pub(crate) struct FunctionParts {
    pub(crate) code: PyObjectPtr,
    pub(crate) globals: PyObjectPtr,
    pub(crate) closure: PyObjectPtr,
    pub(crate) defaults: PyObjectPtr,
    pub(crate) keyword_defaults: PyObjectPtr,
}

type Traverse = unsafe extern "C" fn(PyObjectPtr, Visit, *mut c_void) -> c_int;

/// Receives an object. Returns whether it wants more of them.
type Visitor<'a> = &'a mut dyn FnMut(PyObjectPtr) -> bool;

unsafe extern "C" fn visit(object: PyObjectPtr, visitor: *mut c_void) -> c_int {
    // SAFETY: `visit_references` passes a pointer to its own visitor, which nothing else uses during the call.
    let visitor = unsafe { &mut *visitor.cast::<Visitor<'_>>() };
    c_int::from(!visitor(object))
}

/// # Safety
///
/// `class` is a live type object, and `offset` is that of one of its fields.
unsafe fn type_field(class: PyObjectPtr, offset: usize) -> *mut c_void {
    // SAFETY: the caller guarantees a type object with this field.
    unsafe { class.byte_add(offset).cast::<*mut c_void>().read() }
}

impl<'a> GilToken<'a> {
    /// Whether the collector can traverse this object.
    pub(crate) fn has_references(self, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object.
        let class = unsafe { type_of(object) };
        // The interpreter ends the process if a class that is not created at run time is traversed.
        self.c.type_flags(class) & HAVE_GC != 0 && (!self.is_type(object) || self.is_heap_type(object))
    }

    /// Visits the objects that this one references, in the order in which the collector visits them, until the visitor
    /// wants no more.
    pub(crate) fn visit_references(self, object: PyObjectPtr, mut visitor: Visitor<'_>) {
        if !self.has_references(object) {
            return;
        }
        // SAFETY: callers pass a live object.
        let class = unsafe { type_of(object) };
        let traverse = if self.api.has_type_slots() {
            self.c.type_slot(class, TRAVERSE_SLOT)
        } else {
            // SAFETY: a type object has this field. The flags confirm the layout.
            let flags = unsafe { type_field(class, TP_FLAGS) }.addr() as u64;
            // SAFETY: the layout is confirmed.
            if flags == self.c.type_flags(class) { unsafe { type_field(class, TP_TRAVERSE) } } else { null_mut() }
        };
        // SAFETY: the slot is null or a function of this type, and `visit` accepts a pointer to the visitor.
        unsafe {
            if let Some(traverse) = std::mem::transmute::<*mut c_void, Option<Traverse>>(traverse) {
                traverse(object, visit, (&raw mut visitor).cast());
            }
        }
    }

    /// Appends the objects that this one references and that reference others themselves, until `found` has `limit` of
    /// them. Returns whether that is all of them.
    pub(crate) fn references(self, object: PyObjectPtr, found: &mut Vec<PyObjectPtr>, limit: usize) -> bool {
        let mut is_complete = true;
        self.visit_references(object, &mut |reference| {
            // A list of millions of numbers takes no memory here.
            if self.has_references(reference) {
                is_complete = found.len() < limit;
                if is_complete {
                    found.push(reference);
                }
            }
            is_complete
        });
        is_complete
    }

    /// The dictionary of a class that was created at run time, as a borrowed reference. `None` for any other object.
    pub(crate) fn class_dict(self, class: PyObjectPtr) -> Option<PyObjectPtr> {
        if !self.is_type(class) || !self.is_heap_type(class) {
            return None;
        }
        // SAFETY: `class` is a type object, which has these fields. The flags confirm the layout.
        let (flags, dict) = unsafe { (type_field(class, TP_FLAGS), type_field(class, TP_DICT)) };
        let is_confirmed = flags.addr() as u64 == self.c.type_flags(class);
        (is_confirmed && !dict.is_null()).then_some(dict).filter(|dict| self.is_dict(*dict))
    }

    /// The classes in the method resolution order of an object's class, as borrowed references.
    pub(crate) fn classes_of(self, object: PyObjectPtr) -> Vec<PyObjectPtr> {
        // SAFETY: callers pass a live object. Its type object has these fields. The flags confirm the layout.
        let (flags, order, class) = unsafe {
            let class = type_of(object);
            (type_field(class, TP_FLAGS), type_field(class, TP_MRO), class)
        };
        if flags.addr() as u64 != self.c.type_flags(class) || order.is_null() || !self.is_tuple(order) {
            return Vec::new();
        }
        self.elements(order).collect()
    }

    /// Whether the object is a descriptor of a slot or of another field that C code stores.
    pub(crate) fn is_member(self, object: PyObjectPtr) -> bool {
        // SAFETY: callers pass a live object.
        unsafe { type_of(object) == self.api.member_type }
    }

    /// Whether the object is an instance of this kind of CPython's own classes, by the name of its type.
    pub(crate) fn is_named(self, object: PyObjectPtr, class: &str) -> bool {
        // SAFETY: callers pass a live object.
        unsafe { type_name(type_of(object)) == class }
    }

    /// The thread states of the main interpreter, the calling thread's first.
    pub(crate) fn thread_states(self) -> Vec<usize> {
        const MAX_THREADS: usize = 1 << 14;
        let own = self.c.thread_get();
        let mut states = vec![own.expose_provenance()];
        let mut next = self.c.thread_head(self.c.interpreter_main());
        while !next.is_null() && states.len() < MAX_THREADS {
            if next != own {
                states.push(next.expose_provenance());
            }
            next = self.c.thread_next(next);
        }
        states
    }

    /// `sys.modules` in its order: names and modules, as borrowed references.
    pub(crate) fn modules(self) -> Vec<(PyObjectPtr, PyObjectPtr)> {
        let modules = self.c.sys_object(c"modules".as_ptr());
        if modules.is_null() { Vec::new() } else { self.entries(modules).collect() }
    }

    /// The global variables of a module, as a borrowed reference. `None` for any other object.
    pub(crate) fn module_variables(self, module: PyObjectPtr) -> Option<PyObjectPtr> {
        self.is_instance(module, self.api.module_type).then(|| self.c.module_dict(module)).and_then(|d| self.checked(d))
    }

    /// The parts of a function: its code object, global variables, closure, default values and those of keyword
    /// arguments, as borrowed references. Null for a part that it lacks. Reading the attributes would call the
    /// program's audit hooks.
    pub(crate) fn function_parts(self, function: PyObjectPtr) -> Option<FunctionParts> {
        self.is_function(function).then(|| FunctionParts {
            code: self.c.function_code(function),
            globals: self.c.function_globals(function),
            closure: self.c.function_closure(function),
            defaults: self.c.function_defaults(function),
            keyword_defaults: self.c.function_keyword_defaults(function),
        })
    }

    /// The traceback of the exception that has ended the program, or of the one that the calling thread is handling.
    pub(crate) fn tracebacks(self) -> Vec<PyOwned<'a>> {
        let mut found = Vec::new();
        let last = self.c.sys_object(c"last_traceback".as_ptr());
        if !last.is_null() {
            self.c.inc_ref(last);
            found.extend(self.owned(last));
        }
        let mut handled = [null_mut(); 3];
        let [kind, value, trace] = &mut handled;
        self.c.handled_error(kind, value, trace);
        let [_kind, _value, trace] = handled.map(|object| self.owned(object));
        found.extend(trace);
        found
    }

    /// Hides an object of ours from the garbage collector.
    pub(crate) fn untrack(self, object: PyObjectPtr) {
        self.c.gc_untrack(object);
    }
}
