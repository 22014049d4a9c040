//! How one object refers to another, as text. Runs no Python code.

use memtrace_stackwalk::{CheckedMemory, FrameLocals};

use super::maps::Map;
use super::search::{variable_names, variables_of};
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, class_name, type_of};

/// Keys and names are cut to this many characters.
const MAX_KEY_CHARS: usize = 60;
/// Fields of CPython's own classes that hold objects, which C code stores.
const FIELDS: [&std::ffi::CStr; 6] = [c"__self__", c"__func__", c"__wrapped__", c"func", c"args", c"keywords"];

/// The role of an object for the one that refers to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Plain,
    /// The dictionary with the attributes of an object, or with the variables of a module.
    Attributes,
    /// The cells of this function.
    Closure(PyObjectPtr),
}

/// The text of a reference. The text of the path to the object follows that of the path to the one that refers to it.
pub(super) struct Label {
    pub(super) text: String,
    pub(super) role: Role,
}

/// A name or a key, shortened visibly if it is long.
fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_KEY_CHARS) {
        Some((end, _)) => text.get(..end).unwrap_or_default().to_owned() + "...",
        None => text.to_owned(),
    }
}

fn text(text: String) -> Label {
    Label { text, role: Role::Plain }
}

/// Reads references in one search.
pub(super) struct Labels<'a> {
    pub(super) gil: GilToken<'a>,
    pub(super) frames: Option<FrameLocals<'a>>,
    pub(super) memory: Option<CheckedMemory>,
    /// The names of the attributes that instances of a class share, by the address of the class.
    shared_names: Map<usize, Vec<PyObjectPtr>>,
}

impl<'a> Labels<'a> {
    pub(super) fn new(gil: GilToken<'a>, frames: Option<FrameLocals<'a>>) -> Labels<'a> {
        Labels { gil, frames, memory: CheckedMemory::open().ok(), shared_names: Map::default() }
    }

    /// The labels of those objects that `parent`, which has this role, refers to.
    pub(super) fn of(&mut self, parent: PyObjectPtr, role: Role, children: &[PyObjectPtr]) -> Vec<Label> {
        let mut known: Map<usize, Label> = Map::default();
        let requested: Map<usize, ()> = children.iter().map(|child| (child.addr(), ())).collect();
        let mut add = |child: PyObjectPtr, label: &dyn Fn() -> Label| {
            if requested.contains_key(&child.addr()) {
                known.entry(child.addr()).or_insert_with(label);
            }
        };
        let gil = self.gil;
        if gil.is_dict(parent) {
            for (key, value) in gil.entries(parent) {
                add(value, &|| text(self.key(key, role)));
            }
            for (key, _) in gil.entries(parent) {
                add(key, &|| text(".keys()".to_owned()));
            }
        } else if gil.is_sequence(parent) {
            let names = match role {
                Role::Closure(function) => self.free_variables(function),
                _ => Vec::new(),
            };
            for (index, item) in gil.elements(parent).enumerate() {
                let label = |name: &PyObjectPtr| format!(" (closure): {}", self.name(*name));
                add(item, &|| text(names.get(index).map_or_else(|| format!("[{index}]"), label)));
            }
        } else if gil.is_named(parent, "set") || gil.is_named(parent, "frozenset") {
            children.iter().for_each(|child| add(*child, &|| text("{*}".to_owned())));
        } else if gil.class(c"_collections", c"deque").is_some_and(|class| gil.is_instance(parent, class)) {
            // SAFETY: the object is alive.
            let class = unsafe { type_of(parent) };
            let mut index = 0;
            gil.visit_references(parent, &mut |item| {
                if item != class {
                    add(item, &|| text(format!("[{index}]")));
                    index += 1;
                }
                true
            });
        } else if gil.is_builtin(parent, "cell") || gil.is_builtin(parent, "traceback") {
            // A traceback refers to its frame and to the next traceback. The frame's variables name the frame.
            children.iter().for_each(|child| add(*child, &|| text(String::new())));
        } else if gil.is_type(parent) {
            children.iter().for_each(|child| add(*child, &|| Label { text: String::new(), role: Role::Attributes }));
        } else if gil.is_frame(parent) || self.is_generator(parent) {
            // Before 3.11 a generator has a frame object.
            children
                .iter()
                .filter(|child| gil.is_frame(**child))
                .for_each(|child| add(*child, &|| text(String::new())));
            if let (Some(frames), Some(memory)) = (&self.frames, &self.memory)
                && let Some((code, variables)) = variables_of(gil, frames, memory, parent)
            {
                for (name, value) in variables {
                    add(value, &|| text(format!(" (frame {}): {}", self.code_name(code), self.name(name))));
                }
            }
        } else if gil.is_function(parent) {
            self.label_function(parent, children, &mut add);
        } else {
            self.label_instance(parent, children, &mut add);
        }
        children.iter().map(|child| known.remove(&child.addr()).unwrap_or_else(|| self.unknown(*child))).collect()
    }

    fn is_generator(&self, object: PyObjectPtr) -> bool {
        ["generator", "coroutine", "async_generator"].iter().any(|name| self.gil.is_builtin(object, name))
    }

    /// The label of a reference that C code keeps somewhere.
    fn unknown(&self, child: PyObjectPtr) -> Label {
        // SAFETY: the object is alive.
        text(format!(".<{}>", unsafe { class_name(child) }))
    }

    fn key(&self, key: PyObjectPtr, role: Role) -> String {
        match (self.gil.str(key), role) {
            (Some(name), Role::Attributes) => format!(".{}", cut(name)),
            (Some(name), _) => format!("['{}']", cut(name)),
            (None, _) if self.gil.is_builtin(key, "int") => {
                self.gil.int_value(key).map_or_else(|| "[*]".to_owned(), |key| format!("[{key}]"))
            }
            (None, _) => "[*]".to_owned(),
        }
    }

    /// The text of a name.
    pub(super) fn name(&self, name: PyObjectPtr) -> String {
        self.gil.str(name).map_or_else(|| "?".to_owned(), cut)
    }

    /// The name of a code object.
    pub(super) fn code_name(&self, code: PyObjectPtr) -> String {
        // Reads a field of CPython's own type, which runs no code of the program and calls no audit hook.
        self.gil.attribute(code, c"co_name").map_or_else(|| "?".to_owned(), |name| self.name(name.object))
    }

    /// The names of a function's free variables, in the order of its cells.
    fn free_variables(&self, function: PyObjectPtr) -> Vec<PyObjectPtr> {
        let (Some(frames), Some(parts)) = (&self.frames, self.gil.function_parts(function)) else { return Vec::new() };
        if parts.code.is_null() || parts.closure.is_null() {
            return Vec::new();
        }
        let names = variable_names(self.gil, frames, parts.code);
        // Free variables are the last ones.
        names
            .len()
            .checked_sub(self.gil.tuple_len(parts.closure))
            .map_or(Vec::new(), |first| names.into_iter().skip(first).collect())
    }

    fn label_function(
        &self,
        function: PyObjectPtr,
        children: &[PyObjectPtr],
        add: &mut dyn FnMut(PyObjectPtr, &dyn Fn() -> Label),
    ) {
        let Some(parts) = self.gil.function_parts(function) else { return };
        for child in children {
            if *child == parts.closure {
                add(*child, &|| Label { text: String::new(), role: Role::Closure(function) });
            } else if *child == parts.defaults {
                add(*child, &|| text(".__defaults__".to_owned()));
            } else if *child == parts.keyword_defaults {
                add(*child, &|| text(".__kwdefaults__".to_owned()));
            } else if *child == parts.globals {
                // Of a module that is not in `sys.modules`.
                add(*child, &|| Label { text: ".__globals__".to_owned(), role: Role::Attributes });
            } else if self.gil.is_dict(*child) {
                add(*child, &|| Label { text: String::new(), role: Role::Attributes });
            }
        }
    }

    fn label_instance(
        &mut self,
        object: PyObjectPtr,
        children: &[PyObjectPtr],
        add: &mut dyn FnMut(PyObjectPtr, &dyn Fn() -> Label),
    ) {
        let gil = self.gil;
        let mut named = |name: &str, value: PyObjectPtr| add(value, &|| text(format!(".{}", cut(name))));
        for class in gil.classes_of(object) {
            let Some(dict) = gil.class_dict(class) else { continue };
            for (name, _) in gil.entries(dict).filter(|(_, member)| gil.is_member(*member)) {
                if let (Some(text), Some(value)) = (gil.str(name), gil.stored_value(object, name)) {
                    named(text, value.object);
                }
            }
        }
        for name in FIELDS.iter().filter(|_| !gil.is_of_heap_type(object) || gil.is_named(object, "partial")) {
            let value = gil.interned(name).and_then(|name| gil.stored_attribute(object, &name));
            if let (Ok(text), Some(value)) = (name.to_str(), value) {
                named(text, value.object);
            }
        }
        if let Some(memory) = &self.memory {
            // SAFETY: the object is alive.
            let class = unsafe { type_of(object) }.addr();
            let names = self.shared_names.entry(class).or_insert_with(|| gil.shared_attribute_names(object, memory));
            for name in &*names {
                if let (Some(text), Some(value)) = (gil.str(*name), gil.stored_value(object, *name)) {
                    named(text, value.object);
                }
            }
        }
        for child in children {
            if gil.is_named(*child, "traceback") {
                add(*child, &|| text(".__traceback__".to_owned()));
            } else if gil.is_dict(*child) && !gil.is_named(*child, "OrderedDict") {
                // The dictionary of an object's attributes is none of its members.
                add(*child, &|| Label { text: String::new(), role: Role::Attributes });
            }
        }
    }
}
