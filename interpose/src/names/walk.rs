//! Through the program's modules and optimizers: what each tensor is called, as `named_parameters()` would say.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ptr::null_mut;

use memtrace_trace::definition::TensorKind;

use super::python::{Held, Object, Session, type_name, type_of};
use super::roots::Own;
use super::tensors::{Behind, Layout, Memory, Torch};

/// Modules within modules, and tensors within tensors, at most.
const DEEPEST: usize = 100;
const DEEPEST_TENSOR: usize = 4;
/// Names that one pass looks at, at most: a module that several others share has a name for each way to it.
const MOST: usize = 1 << 18;

/// Hashes what is hashed already, or an address.
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

/// By a parameter's Python object: its first name.
pub(super) type Parameters = HashMap<usize, Box<str>, Spreading>;

/// The names of attributes.
struct Attributes<'a> {
    modules: Held<'a>,
    parameters: Held<'a>,
    buffers: Held<'a>,
    state: Held<'a>,
    groups: Held<'a>,
    local: Held<'a>,
}

/// Who is told.
pub(super) trait Listener {
    /// A module's path. Called once a module.
    fn module(&mut self, object: Object, class: &str, path: &str);
    /// A name of the memory that begins at this address; data type and shape on request.
    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String);
}

/// One pass.
pub(super) struct Walk<'a, 't> {
    session: Session<'a>,
    torch: &'a Torch,
    layout: &'a mut Option<Layout>,
    /// `torch.nn.Module`.
    module_class: Object,
    attributes: Attributes<'a>,
    /// CPU tensors are recorded too.
    cpu: bool,
    told: &'t mut dyn Listener,
    /// The path of the module that is being looked at, with a dot behind it.
    path: String,
    /// The modules that lead to it.
    above: Vec<Object>,
    seen: HashSet<usize, Spreading>,
    parameters: Parameters,
    /// What optimizers' parameters were called before, and are called now.
    before: &'a Parameters,
    now: Parameters,
    looked: usize,
    /// Tensors of modules so far.
    pub(super) tensors_seen: usize,
    /// What was not looked at, for there is too much of it.
    pub(super) cut: u64,
    /// Tensors that were no proof of a layout.
    pub(super) misses: u32,
    /// Why a layout was refused.
    pub(super) refused: Option<&'static str>,
}

impl<'a, 't> Walk<'a, 't> {
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

    /// Those that no other holds.
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

    /// A model's parameters by their names within it.
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

    /// A model and all within it; what stands before its names.
    pub(super) fn root(&mut self, module: Object, name: &str) {
        self.path.clear();
        if !name.is_empty() {
            self.path.push_str(name);
            self.path.push('.');
        }
        self.module(module);
        self.path.clear();
    }

    pub(super) fn has_layout(&self) -> bool {
        self.layout.is_some()
    }

    /// What the optimizers' parameters are called, and the modules that were seen.
    pub(super) fn end(self) -> (Parameters, HashSet<usize, Spreading>) {
        (self.now, self.seen)
    }

    /// Forgets what has been seen.
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

    /// A module and all within it. `path` holds its own, with a dot behind it where it has one.
    fn module(&mut self, module: Object) {
        if self.above.len() >= DEEPEST || self.above.contains(&module) || !self.is_room() {
            return;
        }
        if self.seen.insert(module.addr()) {
            let path = self.path.strip_suffix('.').unwrap_or("");
            // SAFETY: an object has a type, which lives as long as it.
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

    /// A tensor of this name, and its gradient.
    fn named(&mut self, kind: TensorKind, tensor: Object, name: &str) {
        if !self.is_room() {
            return;
        }
        let Some(implementation) = self.tell(kind, tensor, name, 0) else { return };
        let Some(layout) = self.layout.filter(|_| kind == TensorKind::Parameter) else { return };
        // SAFETY: a plain implementation of a live tensor; no backward is under way, so that nobody changes its gradient.
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

    /// Tells of a tensor's memory; gives the implementation of a tensor that may have a gradient.
    fn tell(&mut self, kind: TensorKind, tensor: Object, name: &str, depth: usize) -> Option<*mut std::ffi::c_void> {
        if self.layout.is_none() && self.refused.is_none() {
            // SAFETY: an instance of the class of tensors, with the GIL.
            match unsafe { self.torch.calibrate(tensor) } {
                Ok(layout) => {
                    self.misses += u32::from(layout.is_none());
                    *self.layout = layout;
                }
                Err(why) => self.refused = Some(why),
            }
        }
        let layout = (*self.layout)?;
        // SAFETY: as above.
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
        // SAFETY: the implementation of a live tensor, which was found to be plain.
        let shape = || unsafe { self.torch.shape(layout, memory.implementation) };
        self.told.tensor(kind, name, memory.address, &shape);
    }

    /// The tensor that a `DTensor` wraps: this rank's part.
    fn tell_inner(&mut self, kind: TensorKind, tensor: Object, name: &str, depth: usize) {
        let Some(local) = self.session.attribute(tensor, &self.attributes.local) else { return };
        if depth < DEEPEST_TENSOR && self.is_tensor(local.object) {
            self.tell(kind, local.object, name, depth + 1);
        }
    }

    /// What an optimizer keeps for each parameter. After all modules.
    pub(super) fn optimizer(&mut self, optimizer: Object) {
        let session = self.session;
        // SAFETY: an object has a type, which lives as long as it.
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
        // Parameters that are in no module at all are numbered as `state_dict()` does.
        if called.is_empty() {
            for (number, parameter) in order.into_iter().enumerate() {
                // FSDP's are in their modules, but for a while.
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
