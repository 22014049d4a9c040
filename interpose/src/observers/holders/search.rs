//! The breadth-first search over the references of the program's objects.

use memtrace_stackwalk::{CheckedMemory, FrameLocals};

use super::maps::{Map, Set};
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, type_of};

/// At most this many objects are visited. Their table takes 50 bytes each.
const MAX_OBJECTS: usize = 1 << 20;
/// Modules inside of modules are expanded together up to this depth.
const MAX_DEPTH: usize = 200;
/// At most this many frames of a traceback are roots.
const MAX_TRACEBACK: usize = 1000;

/// Where a path begins.
#[derive(Clone, Copy)]
pub(super) enum Root {
    /// A module's global variables, with the module's name.
    Module(PyObjectPtr),
    /// A local variable of a running frame: its code object and its name.
    Local { code: PyObjectPtr, name: PyObjectPtr },
    /// A frame of a traceback.
    Traceback,
}

/// The object that refers to another one on its path.
#[derive(Clone, Copy)]
pub(super) enum Parent {
    Node(u32),
    Root(Root),
}

/// An object that the search has reached.
#[derive(Clone, Copy)]
pub(super) struct Node {
    pub(super) object: PyObjectPtr,
    pub(super) parent: Parent,
}

/// The result of a search. Its objects are alive as long as no Python code runs.
pub(super) struct Search {
    /// In the order of their discovery: parents precede their children.
    pub(super) nodes: Vec<Node>,
    /// The positions of tensors in `nodes`.
    pub(super) tensors: Vec<u32>,
    /// Whether objects were left out.
    pub(super) is_partial: bool,
}

struct Searcher<'a> {
    gil: GilToken<'a>,
    tensor_class: PyObjectPtr,
    seen: Set<usize>,
    /// Whether a class is a class of tensors, by its address.
    classes: Map<usize, bool>,
    found: Search,
    /// How many of the nodes have been expanded.
    expanded: usize,
    references: Vec<PyObjectPtr>,
    /// `torch.nn.Module`.
    module_class: Option<PyObjectPtr>,
    /// Keys of dictionaries, and the dictionaries that have them.
    keys: Vec<(Parent, PyObjectPtr)>,
}

/// Searches everything that the program's variables hold.
pub(super) fn search(
    gil: GilToken<'_>,
    frames: Option<FrameLocals<'_>>,
    memory: Option<&CheckedMemory>,
    tensor_class: PyObjectPtr,
) -> Search {
    let mut searcher = Searcher {
        gil,
        tensor_class,
        seen: Set::default(),
        classes: Map::default(),
        found: Search { nodes: Vec::new(), tensors: Vec::new(), is_partial: false },
        expanded: 0,
        references: Vec::new(),
        module_class: gil.class(c"torch.nn.modules.module", c"Module"),
        keys: Vec::new(),
    };
    // Modules are roots and never part of another root's path.
    let modules = gil.modules();
    let mut variables = Vec::new();
    for (name, module) in modules {
        searcher.seen.insert(module.addr());
        if let Some(dict) = gil.module_variables(module)
            && searcher.seen.insert(dict.addr())
        {
            variables.push((name, dict));
        }
    }
    let (main, others): (Vec<_>, Vec<_>) =
        variables.into_iter().partition(|(name, _)| gil.str(*name) == Some("__main__"));
    for (name, dict) in main {
        searcher.add_root(dict, Root::Module(name));
    }
    // Global and local variables are on one level of the search.
    searcher.expand_next();
    if let (Some(frames), Some(memory)) = (frames, memory) {
        searcher.add_frames(frames, memory);
    }
    searcher.add_tracebacks();
    searcher.run();
    for (name, dict) in others {
        searcher.add_root(dict, Root::Module(name));
    }
    searcher.run();
    searcher.add_keys();
    searcher.run();
    searcher.found
}

/// The names of a code object's variables, in the order of a frame's local variables.
pub(super) fn variable_names(gil: GilToken<'_>, frames: &FrameLocals<'_>, code: PyObjectPtr) -> Vec<PyObjectPtr> {
    // SAFETY: callers pass a live code object.
    let tuples = unsafe { frames.names_of(code.expose_provenance()) };
    let mut names = Vec::new();
    for tuple in tuples {
        let tuple: PyObjectPtr = std::ptr::with_exposed_provenance_mut(tuple);
        if !tuple.is_null() && gil.is_tuple(tuple) {
            names.extend(gil.elements(tuple));
        }
    }
    names
}

/// The local variables of a frame: name and value.
///
/// # Safety
///
/// `frame` is a live frame with this code object, and the calling thread holds the GIL.
pub(super) unsafe fn local_variables(
    gil: GilToken<'_>,
    frames: &FrameLocals<'_>,
    frame: usize,
    code: PyObjectPtr,
) -> Vec<(PyObjectPtr, PyObjectPtr)> {
    let names = variable_names(gil, frames, code);
    let value = |index: usize| -> PyObjectPtr {
        // SAFETY: the caller guarantees the frame, and its code object has this many variables.
        std::ptr::with_exposed_provenance_mut(unsafe { frames.value(frame, index) })
    };
    names.into_iter().enumerate().map(|(index, name)| (name, value(index))).filter(|(_, v)| !v.is_null()).collect()
}

impl Searcher<'_> {
    fn add_root(&mut self, object: PyObjectPtr, root: Root) {
        self.seen.insert(object.addr());
        self.found.nodes.push(Node { object, parent: Parent::Root(root) });
    }

    /// Adds an object unless it is known or can hold nothing.
    fn add(&mut self, object: PyObjectPtr, parent: Parent) {
        if !self.gil.has_references(object) || !self.seen.insert(object.addr()) {
            return;
        }
        if self.found.nodes.len() >= MAX_OBJECTS {
            self.found.is_partial = true;
            return;
        }
        if self.is_tensor(object) {
            self.found.tensors.push(self.found.nodes.len() as u32);
        }
        self.found.nodes.push(Node { object, parent });
    }

    fn is_tensor(&mut self, object: PyObjectPtr) -> bool {
        // SAFETY: the search reaches live objects only.
        let class = unsafe { type_of(object) }.addr();
        let (gil, tensor_class) = (self.gil, self.tensor_class);
        *self.classes.entry(class).or_insert_with(|| gil.is_instance(object, tensor_class))
    }

    fn add_frames(&mut self, frames: FrameLocals<'_>, memory: &CheckedMemory) {
        for thread in self.gil.thread_states() {
            for frame in frames.of_thread(thread, memory) {
                // SAFETY: the frame is part of that thread's chain, which does not change meanwhile.
                let Some(code) = (unsafe { frames.code_of(frame) }) else { continue };
                let code = std::ptr::with_exposed_provenance_mut(code);
                // SAFETY: the frame is part of that thread's chain, and this is its code object.
                for (name, value) in unsafe { local_variables(self.gil, &frames, frame, code) } {
                    self.add(value, Parent::Root(Root::Local { code, name }));
                }
            }
        }
    }

    fn add_tracebacks(&mut self) {
        let gil = self.gil;
        for traceback in gil.tracebacks() {
            // The program may store anything in `sys.last_traceback`.
            let is_traceback = |object: &PyObjectPtr| gil.is_builtin(*object, "traceback");
            let mut next = Some(traceback.object).filter(is_traceback);
            for _ in 0..MAX_TRACEBACK {
                let Some(traceback) = next.take() else { break };
                // A traceback references its frame and the next traceback. Reading the attribute `tb_frame` would call
                // the program's audit hooks.
                let mut references = Vec::new();
                gil.references(traceback, &mut references, MAX_TRACEBACK);
                for reference in references {
                    if gil.is_frame(reference) && !self.seen.contains(&reference.addr()) {
                        self.add_root(reference, Root::Traceback);
                    } else if is_traceback(&reference) {
                        next = Some(reference);
                    }
                }
            }
        }
    }

    fn run(&mut self) {
        while self.expanded < self.found.nodes.len() {
            self.expand_next();
        }
    }

    fn expand_next(&mut self) {
        let at = self.expanded;
        self.expanded += 1;
        self.expand(at, false, 0);
    }

    /// Adds what this node's object refers to. `is_in_module` says that it is a dictionary of an `nn.Module`.
    ///
    /// Objects that count as a part of the object are expanded at once, and do not make a path longer: the dictionaries
    /// of an object, and the modules inside of a module. So it does not matter whether CPython has made a dictionary of
    /// the attributes, and a parameter belongs to its model rather than to the optimizer.
    fn expand(&mut self, at: usize, is_in_module: bool, depth: usize) {
        let Some(Node { object, .. }) = self.found.nodes.get(at).copied() else { return };
        let parent = Parent::Node(at as u32);
        let gil = self.gil;
        if gil.is_type(object) {
            // Base classes and metaclasses are found as variables of their modules.
            if let Some(dict) = gil.class_dict(object) {
                self.add(dict, parent);
            }
            return;
        }
        let is_dict = gil.is_dict(object);
        let mut keys = Set::default();
        if is_dict {
            // Values hold what belongs to their keys, such as a parameter's optimizer state.
            let all = gil.entries(object).map(|(key, _)| key).filter(|key| gil.has_references(*key));
            keys.extend(all.take(MAX_OBJECTS));
        }
        let mut references = std::mem::take(&mut self.references);
        references.clear();
        self.found.is_partial |= !gil.references(object, &mut references, MAX_OBJECTS);
        // SAFETY: the object is alive.
        let class = unsafe { type_of(object) };
        let is_frame = gil.is_frame(object);
        let first = self.found.nodes.len();
        for reference in &references {
            if keys.contains(reference) {
                if self.keys.len() < MAX_OBJECTS {
                    self.keys.push((parent, *reference));
                } else {
                    self.found.is_partial = true;
                }
            // An object does not hold its class for the program, nor a frame its caller.
            } else if *reference != class && !(is_frame && gil.is_frame(*reference)) {
                self.add(*reference, parent);
            }
        }
        self.references = references;
        let is_instance = gil.is_of_heap_type(object) && gil.is_plain_instance(object);
        let is_module = is_in_module || is_instance && self.is_module(object);
        if depth >= MAX_DEPTH || !(is_instance || is_dict && is_in_module) {
            return;
        }
        for at in first..self.found.nodes.len() {
            let Some(node) = self.found.nodes.get(at).copied() else { break };
            if gil.is_dict(node.object) || is_module && self.is_module(node.object) {
                self.expand(at, is_module, depth + 1);
            }
        }
    }

    fn is_module(&self, object: PyObjectPtr) -> bool {
        self.module_class.is_some_and(|class| self.gil.is_instance(object, class))
    }

    /// Adds the keys of dictionaries, after everything that values hold.
    fn add_keys(&mut self) {
        for (parent, key) in std::mem::take(&mut self.keys) {
            self.add(key, parent);
        }
    }
}

/// The local variables of a frame object or a generator. Empty if they cannot be read.
pub(super) fn variables_of(
    gil: GilToken<'_>,
    frames: &FrameLocals<'_>,
    memory: &CheckedMemory,
    object: PyObjectPtr,
) -> Option<(PyObjectPtr, Vec<(PyObjectPtr, PyObjectPtr)>)> {
    let address = object.expose_provenance();
    // SAFETY: callers pass a live object. Its kind was checked, and this thread holds the GIL.
    unsafe {
        let frame = if gil.is_frame(object) {
            frames.of_frame_object(address, memory)?
        } else {
            frames.of_generator(address, memory)?
        };
        let code = std::ptr::with_exposed_provenance_mut(frames.code_of(frame)?);
        Some((code, local_variables(gil, frames, frame, code)))
    }
}
