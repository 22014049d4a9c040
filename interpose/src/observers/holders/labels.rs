//! How one object refers to another, as text. Runs no Python code.

use std::collections::HashMap;

use memtrace_stackwalk::{CheckedMemory, FrameLocals};

use super::search::{variable_names, variables_of};
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, class_name, type_of};

/// Keys are cut to this many characters.
const MAX_KEY_CHARS: usize = 60;
/// Fields of CPython's own classes that hold objects, which C code stores.
const FIELDS: [&std::ffi::CStr; 8] =
    [c"__self__", c"__func__", c"__wrapped__", c"func", c"args", c"keywords", c"gi_frame", c"cr_frame"];

/// What an object is to the one that refers to it.
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

fn text(text: String) -> Label {
    Label { text, role: Role::Plain }
}

/// Reads references in one search.
pub(super) struct Labels<'a> {
    pub(super) gil: GilToken<'a>,
    pub(super) frames: Option<FrameLocals<'a>>,
    pub(super) memory: Option<CheckedMemory>,
    /// The names of the attributes that instances of a class share, by the address of the class.
    shared_names: HashMap<usize, Vec<PyObjectPtr>>,
}

impl<'a> Labels<'a> {
    pub(super) fn new(gil: GilToken<'a>, frames: Option<FrameLocals<'a>>) -> Labels<'a> {
        Labels { gil, frames, memory: CheckedMemory::open().ok(), shared_names: HashMap::new() }
    }

    /// The labels of those objects that `parent`, which has this role, refers to.
    pub(super) fn of(&mut self, parent: PyObjectPtr, role: Role, children: &[PyObjectPtr]) -> Vec<Label> {
        let mut known: HashMap<usize, Label> = HashMap::new();
        let requested: HashMap<usize, ()> = children.iter().map(|child| (child.addr(), ())).collect();
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
                let name = names.get(index).and_then(|name| gil.str(*name));
                add(item, &|| text(name.map_or_else(|| format!("[{index}]"), |name| format!(" (closure): {name}"))));
            }
        } else if gil.is_named(parent, "set") || gil.is_named(parent, "frozenset") {
            children.iter().for_each(|child| add(*child, &|| text("{*}".to_owned())));
        } else if gil.class(c"_collections", c"deque").is_some_and(|class| gil.is_instance(parent, class)) {
            let mut items = Vec::new();
            gil.references(parent, &mut items);
            // SAFETY: the object is alive.
            let class = unsafe { type_of(parent) };
            let items = items.into_iter().filter(|item| *item != class);
            items.enumerate().for_each(|(index, item)| add(item, &|| text(format!("[{index}]"))));
        } else if gil.is_builtin(parent, "cell") {
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
                    add(value, &|| {
                        text(format!(" (frame {}): {}", self.code_name(code), gil.str(name).unwrap_or("?")))
                    });
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
        let cut = |text: &str| text.chars().take(MAX_KEY_CHARS).collect::<String>();
        match (self.gil.str(key), role) {
            (Some(name), Role::Attributes) => format!(".{}", cut(name)),
            (Some(name), _) => format!("['{}']", cut(name)),
            (None, _) if self.gil.is_builtin(key, "int") => format!("[{}]", self.gil.as_int(key)),
            (None, _) => "[*]".to_owned(),
        }
    }

    /// The name of a code object.
    pub(super) fn code_name(&self, code: PyObjectPtr) -> String {
        // Reads an attribute of CPython's own type, which runs no code of the program.
        let name = self.gil.attribute(code, c"co_name");
        name.and_then(|name| self.gil.str(name.object).map(str::to_owned)).unwrap_or_else(|| "?".to_owned())
    }

    /// The names of a function's free variables, in the order of its cells.
    fn free_variables(&self, function: PyObjectPtr) -> Vec<PyObjectPtr> {
        let (Some(frames), Some(code)) = (&self.frames, self.gil.attribute(function, c"__code__")) else {
            return Vec::new();
        };
        let Some(cells) = self.gil.attribute(function, c"__closure__") else { return Vec::new() };
        let names = variable_names(self.gil, frames, code.object);
        // Free variables are the last ones.
        names
            .len()
            .checked_sub(self.gil.tuple_len(cells.object))
            .map_or(Vec::new(), |first| names.into_iter().skip(first).collect())
    }

    fn label_function(
        &self,
        function: PyObjectPtr,
        children: &[PyObjectPtr],
        add: &mut dyn FnMut(PyObjectPtr, &dyn Fn() -> Label),
    ) {
        // Reads attributes of CPython's own type, which run no code of the program.
        let is = |name, child: PyObjectPtr| self.gil.attribute(function, name).is_some_and(|of| of.object == child);
        for child in children {
            if is(c"__closure__", *child) {
                add(*child, &|| Label { text: String::new(), role: Role::Closure(function) });
            } else if is(c"__defaults__", *child) {
                add(*child, &|| text(".__defaults__".to_owned()));
            } else if is(c"__kwdefaults__", *child) {
                add(*child, &|| text(".__kwdefaults__".to_owned()));
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
        let mut named = |name: &str, value: PyObjectPtr| add(value, &|| text(format!(".{name}")));
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
