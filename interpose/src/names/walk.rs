//! Walks the program's modules and optimizers and names each tensor as `named_parameters()` does.
//!
//! Constraint: needs the GIL, runs no Python code and keeps no object.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ptr::null_mut;

use memtrace_trace::definition::TensorKind;

use super::python::{Held, Object, Session, type_name, type_of};
use super::roots::Own;
use super::tensors::{Behind, Layout, Memory, Torch};

/// Maximum nesting of modules.
const DEEPEST: usize = 100;
/// Maximum nesting of wrapped tensors.
const DEEPEST_TENSOR: usize = 4;
/// At most this many names are read in one pass. A module that several others share has one name for each path to it.
const MOST: usize = 1 << 18;

/// A hash function for addresses and for values that are hashes already.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.write_u64(u64::from_le_bytes(word) ^ (chunk.len() as u64) << 56);
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 29;
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

pub(super) type Spreading = BuildHasherDefault<Spread>;

/// Maps a parameter's Python object to its first name.
pub(super) type Parameters = HashMap<usize, Box<str>, Spreading>;

/// Python strings for the attribute names that the walk reads.
struct Attributes<'a> {
    modules: Held<'a>,
    parameters: Held<'a>,
    buffers: Held<'a>,
    state: Held<'a>,
    groups: Held<'a>,
    local: Held<'a>,
}

/// Receives the names that a walk finds.
pub(super) trait Listener {
    /// Takes a module, its class and its path. Called once for each module.
    fn module(&mut self, object: Object, class: &str, path: &str);
    /// Takes a name of the memory that begins at `address`. `shape` returns data type and sizes.
    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String);
}

/// One pass over the models and optimizers.
pub(super) struct Walk<'a, 't> {
    session: Session<'a>,
    torch: &'a Torch,
    layout: &'a mut Option<Layout>,
    /// `torch.nn.Module`.
    module_class: Object,
    attributes: Attributes<'a>,
    /// Whether CPU tensors are recorded too.
    cpu: bool,
    told: &'t mut dyn Listener,
    /// The path of the current module, followed by a dot unless it is empty.
    path: String,
    /// The modules that contain the current one, outermost first.
    above: Vec<Object>,
    seen: HashSet<usize, Spreading>,
    parameters: Parameters,
    /// The names of optimizers' parameters in the previous pass.
    before: &'a Parameters,
    /// The names of optimizers' parameters in this pass.
    now: Parameters,
    looked: usize,
    /// How many tensors of modules this pass has visited.
    pub(super) tensors_seen: usize,
    /// How many names were skipped because of [`MOST`].
    pub(super) cut: u64,
    /// How many tensors did not confirm the layout.
    pub(super) misses: u32,
    /// Why the layout was rejected.
    pub(super) refused: Option<&'static str>,
}

impl<'a, 't> Walk<'a, 't> {
    /// Makes a pass, which creates six Python strings. `None` if the interpreter has no memory for them.
    pub(super) fn new(
        session: Session<'a>,
        torch: &'a Torch,
        layout: &'a mut Option<Layout>,
        module_class: Object,
        cpu: bool,
        told: &'t mut dyn Listener,
        before: &'a Parameters,
    ) -> Option<Walk<'a, 't>> {
        let attributes = Attributes {
            modules: session.text(c"_modules")?,
            parameters: session.text(c"_parameters")?,
            buffers: session.text(c"_buffers")?,
            state: session.text(c"state")?,
            groups: session.text(c"param_groups")?,
            local: session.text(c"_local_tensor")?,
        };
        Some(Walk {
            session,
            torch,
            layout,
            module_class,
            attributes,
            cpu,
            told,
            path: String::new(),
            above: Vec::new(),
            seen: HashSet::default(),
            parameters: HashMap::default(),
            before,
            now: HashMap::default(),
            looked: 0,
            tensors_seen: 0,
            cut: 0,
            misses: 0,
            refused: None,
        })
    }

    /// The modules that no other module contains.
    pub(super) fn roots(&self, modules: &[Object]) -> Vec<Object> {
        let mut held = HashSet::<usize, Spreading>::default();
        for module in modules {
            let Some(children) = self.session.attribute(*module, &self.attributes.modules) else { continue };
            held.extend(
                self.session.entries(children.object).map(|(_, child)| child.addr()).filter(|c| *c != module.addr()),
            );
        }
        modules.iter().copied().filter(|module| !held.contains(&module.addr())).collect()
    }

    /// A model's parameters, by a hash of their names within the model.
    pub(super) fn own(&mut self, module: Object) -> Own {
        let mut own = Own::default();
        let mut path = Vec::new();
        self.collect(module, Spread::default().finish(), &mut path, &mut own);
        own
    }

    fn collect(&self, module: Object, path: u64, above: &mut Vec<Object>, own: &mut Own) {
        if above.len() >= DEEPEST || above.contains(&module) || own.len() >= MOST {
            return;
        }
        let session = self.session;
        let joined = |name: &str| {
            let mut hash = Spread(path);
            name.hash(&mut hash);
            hash.finish()
        };
        if let Some(parameters) = session.attribute(module, &self.attributes.parameters) {
            let tensors = session.entries(parameters.object).filter(|(_, tensor)| self.is_tensor(*tensor));
            own.extend(tensors.filter_map(|(name, tensor)| Some((joined(session.str(name)?), tensor.addr()))));
        }
        let Some(children) = session.attribute(module, &self.attributes.modules) else { return };
        above.push(module);
        for (name, child) in session.entries(children.object) {
            if let Some(name) = session.str(name).filter(|_| session.is_instance(child, self.module_class)) {
                self.collect(child, joined(name), above, own);
            }
        }
        above.pop();
    }

    /// Visits a model and everything in it. `name` is the prefix of its tensors' names; empty means no prefix.
    pub(super) fn root(&mut self, module: Object, name: &str) {
        self.path.clear();
        if !name.is_empty() {
            self.path.push_str(name);
            self.path.push('.');
        }
        self.module(module);
        self.path.clear();
    }

    /// Whether the layout of tensors is verified.
    pub(super) fn has_layout(&self) -> bool {
        self.layout.is_some()
    }

    /// Ends the pass. Returns the names of the optimizers' parameters and the modules that were visited.
    pub(super) fn end(self) -> (Parameters, HashSet<usize, Spreading>) {
        (self.now, self.seen)
    }

    /// Forgets what this pass has visited, so that it can be repeated.
    pub(super) fn begin_again(&mut self) {
        self.seen.clear();
        self.parameters.clear();
        (self.looked, self.cut) = (0, 0);
    }

    fn is_room(&mut self) -> bool {
        self.looked += 1;
        let is_room = self.looked <= MOST;
        self.cut += u64::from(!is_room);
        is_room
    }

    /// Visits a module and everything in it. `path` is the module's path, followed by a dot unless it is empty.
    fn module(&mut self, module: Object) {
        if self.above.len() >= DEEPEST || self.above.contains(&module) || !self.is_room() {
            return;
        }
        if self.seen.insert(module.addr()) {
            let path = self.path.strip_suffix('.').unwrap_or("");
            // SAFETY: `module` is alive, because the model that contains it is. Its type lives at least as long.
            self.told.module(module, unsafe { type_name(type_of(module)) }, path);
        }
        let session = self.session;
        if let Some(parameters) = session.attribute(module, &self.attributes.parameters) {
            self.tensors(TensorKind::Parameter, parameters.object);
        }
        if let Some(buffers) = session.attribute(module, &self.attributes.buffers) {
            self.tensors(TensorKind::Buffer, buffers.object);
        }
        let Some(children) = session.attribute(module, &self.attributes.modules) else { return };
        self.above.push(module);
        for (name, child) in session.entries(children.object) {
            let Some(name) = session.str(name).filter(|_| session.is_instance(child, self.module_class)) else {
                continue;
            };
            let before = self.path.len();
            self.path.push_str(name);
            self.path.push('.');
            self.module(child);
            self.path.truncate(before);
        }
        self.above.pop();
    }

    fn tensors(&mut self, kind: TensorKind, of: Object) {
        let session = self.session;
        for (name, tensor) in session.entries(of) {
            let Some(name) = session.str(name).filter(|_| self.is_tensor(tensor)) else { continue };
            let before = self.path.len();
            self.path.push_str(name);
            let name = std::mem::take(&mut self.path);
            if kind == TensorKind::Parameter {
                self.parameters.entry(tensor.addr()).or_insert_with(|| name.as_str().into());
            }
            self.tensors_seen += 1;
            self.named(kind, tensor, &name);
            self.path = name;
            self.path.truncate(before);
        }
    }

    fn is_tensor(&self, object: Object) -> bool {
        self.session.is_instance(object, self.torch.tensor_class)
    }

    /// Reports a tensor of this name, and its gradient if it is a parameter.
    fn named(&mut self, kind: TensorKind, tensor: Object, name: &str) {
        if !self.is_room() {
            return;
        }
        let Some(implementation) = self.tell(kind, tensor, name, 0) else { return };
        let Some(layout) = self.layout.filter(|_| kind == TensorKind::Parameter) else { return };
        // SAFETY: `tell` has verified that `implementation` is a plain `TensorImpl`. The tensor is alive, and no
        // backward pass is running that could change its gradient.
        let Some((behind, python)) = (unsafe { self.torch.gradient(&layout, implementation, self.cpu) }) else {
            return;
        };
        let name = format!("{name}.grad");
        match behind {
            Behind::Memory(memory) => self.tell_memory(&layout, TensorKind::Gradient, &name, &memory),
            Behind::Nothing(_) if !python.is_null() => self.tell_inner(TensorKind::Gradient, python, &name, 0),
            _ => {}
        }
    }

    /// Reports a tensor's memory. Returns the implementation of a tensor that may have a gradient, `None` for memory
    /// that is not recorded.
    fn tell(&mut self, kind: TensorKind, tensor: Object, name: &str, depth: usize) -> Option<*mut std::ffi::c_void> {
        if self.layout.is_none() && self.refused.is_none() {
            // SAFETY: the callers have checked that `tensor` is an instance of the tensor class. It is alive, and this
            // thread holds the GIL.
            match unsafe { self.torch.calibrate(tensor) } {
                Ok(layout) => {
                    self.misses += u32::from(layout.is_none());
                    *self.layout = layout;
                }
                Err(why) => self.refused = Some(why),
            }
        }
        let layout = (*self.layout)?;
        // SAFETY: the callers have checked that `tensor` is an instance of the tensor class. It is alive, and this
        // thread holds the GIL.
        match unsafe { self.torch.behind(&layout, tensor, self.cpu) } {
            Behind::Memory(memory) => {
                self.tell_memory(&layout, kind, name, &memory);
                Some(memory.implementation)
            }
            Behind::Nothing(implementation) => {
                self.tell_inner(kind, tensor, name, depth);
                Some(implementation)
            }
            Behind::Elsewhere => None,
        }
    }

    fn tell_memory(&mut self, layout: &Layout, kind: TensorKind, name: &str, memory: &Memory) {
        // SAFETY: `behind` or `gradient` has verified that this is a plain `TensorImpl` of a live tensor.
        let shape = || unsafe { self.torch.shape(layout, memory.implementation) };
        self.told.tensor(kind, name, memory.address, &shape);
    }

    /// Reports the tensor that a `DTensor` wraps: the shard of this rank.
    fn tell_inner(&mut self, kind: TensorKind, tensor: Object, name: &str, depth: usize) {
        let Some(local) = self.session.attribute(tensor, &self.attributes.local) else { return };
        if depth < DEEPEST_TENSOR && self.is_tensor(local.object) {
            self.tell(kind, local.object, name, depth + 1);
        }
    }

    /// Reports the state that an optimizer keeps for each parameter. Call it after all models, whose parameter names it
    /// uses.
    pub(super) fn optimizer(&mut self, optimizer: Object) {
        let session = self.session;
        // SAFETY: `optimizer` is alive, and so is its type.
        let class = unsafe { type_name(type_of(optimizer)) }.to_owned();
        let mut order = Vec::new();
        if let Some(groups) = session.attribute(optimizer, &self.attributes.groups) {
            for group in session.elements(groups.object) {
                let parameters = session.entries(group).find(|(key, _)| session.str(*key) == Some("params"));
                order.extend(session.elements(parameters.map_or(null_mut(), |(_, list)| list)));
            }
        }
        let mut called = Parameters::default();
        for parameter in &order {
            let key = parameter.addr();
            if let Some(name) = self.parameters.get(&key).or_else(|| self.before.get(&key)) {
                called.insert(key, name.clone());
            }
        }
        self.now.extend(called.iter().map(|(key, name)| (*key, name.clone())));
        // Parameters that belong to no module are numbered as in `state_dict()`.
        if called.is_empty() {
            for (number, parameter) in order.into_iter().enumerate() {
                // FSDP's sharded parameters are outside their modules only temporarily.
                if !self.is_tensor(parameter) || session.attribute(parameter, &self.attributes.local).is_some() {
                    continue;
                }
                self.named(TensorKind::Parameter, parameter, &format!("{class}.params[{number}]"));
                called.insert(parameter.addr(), format!("params[{number}]").into());
            }
        }
        let Some(state) = session.attribute(optimizer, &self.attributes.state) else { return };
        for (parameter, kept) in session.entries(state.object) {
            let Some(of) = called.get(&parameter.addr()) else { continue };
            for (key, value) in session.entries(kept) {
                let Some(key) = session.str(key) else { continue };
                if self.is_tensor(value) {
                    self.state(value, &format!("{class}.{key} of {of}"));
                    continue;
                }
                let (sequence, inner) = (session.elements(value), session.entries(value));
                for (index, element) in sequence.enumerate() {
                    if self.is_tensor(element) {
                        self.state(element, &format!("{class}.{key}[{index}] of {of}"));
                    }
                }
                for (name, element) in inner {
                    if let Some(name) = session.str(name).filter(|_| self.is_tensor(element)) {
                        self.state(element, &format!("{class}.{key}.{name} of {of}"));
                    }
                }
            }
        }
    }

    fn state(&mut self, tensor: Object, name: &str) {
        if self.is_room() {
            self.tell(TensorKind::OptimizerState, tensor, name, 0);
        }
    }
}
