//! Walks the program's modules and optimizers and names each tensor as `named_parameters()` does.
//!
//! Constraint: needs the GIL, runs no Python code and keeps no object.

use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ptr::null_mut;

use memtrace_trace::definition::TensorKind;

use super::address_hash::{AddressHasher, BuildAddressHasher, ParameterNames, Parameters};
use crate::cpython::api::PyObjectPtr;
use crate::cpython::gil::{GilToken, PyOwned, class_name};
use crate::observers::tensors::{TensorLayout, TensorMemory, TensorStorage, TorchSymbols};

/// Maximum nesting of modules.
const MAX_DEPTH: usize = 100;
/// Maximum nesting of wrapped tensors.
const MAX_TENSOR_DEPTH: usize = 4;
/// At most this many names are read in one pass. A module that several others share has one name for each path to it.
const MAX_NAMES: usize = 1 << 18;

/// Python strings for the attribute names that the walk reads.
struct Attributes<'a> {
    modules: PyOwned<'a>,
    parameters: PyOwned<'a>,
    buffers: PyOwned<'a>,
    state: PyOwned<'a>,
    groups: PyOwned<'a>,
    local: PyOwned<'a>,
}

/// Receives the names that a walk finds.
pub(super) trait NameSink {
    /// Receives a module, its class and its path. Called once for each module.
    fn module(&mut self, object: PyObjectPtr, class: &str, path: &str);
    /// Receives a name of the memory that begins at `address`. `shape` returns data type and sizes.
    fn tensor(&mut self, kind: TensorKind, name: &str, address: u64, shape: &dyn Fn() -> String);
}

/// The layout of tensors, which the first tensors confirm.
struct LayoutCheck<'a> {
    verified: &'a mut Option<TensorLayout>,
    /// How many tensors did not confirm the layout.
    misses: u32,
    /// Why the layout was rejected.
    error: Option<&'static str>,
}

/// The place of the current module in its model.
#[derive(Default)]
struct ModulePosition {
    /// The path of the module, followed by a dot unless it is empty.
    path: String,
    /// The modules that contain it, outermost first.
    ancestors: Vec<PyObjectPtr>,
}

/// The names of parameters, which name the state of optimizers.
struct WalkedParameters<'a> {
    /// Those of modules.
    of_modules: Parameters,
    /// Those of optimizers in the previous pass.
    previous: &'a Parameters,
    /// Those of optimizers in this pass.
    current: Parameters,
}

/// Counts of names and tensors.
#[derive(Default)]
struct WalkCounts {
    names_read: usize,
    /// How many names were skipped because of [`MAX_NAMES`].
    names_dropped: u64,
    /// How many tensors of modules this pass has visited.
    tensors_seen: usize,
}

/// The result of a walk over models and optimizers.
pub(super) struct WalkResult {
    /// How many names were skipped because of [`MAX_NAMES`].
    pub(super) dropped: u64,
    /// How many tensors did not confirm the layout.
    pub(super) misses: u32,
    /// Why the layout was rejected.
    pub(super) layout_error: Option<&'static str>,
    /// The names of the optimizers' parameters.
    pub(super) parameters: Parameters,
    /// The modules that were visited.
    pub(super) seen: HashSet<usize, BuildAddressHasher>,
}

/// One pass over the models and optimizers.
pub(super) struct ModelWalk<'a, 't> {
    gil: GilToken<'a>,
    torch: &'a TorchSymbols,
    layout: LayoutCheck<'a>,
    /// `torch.nn.Module`.
    module_class: PyObjectPtr,
    attributes: Attributes<'a>,
    /// Whether CPU tensors are recorded too.
    cpu: bool,
    sink: &'t mut dyn NameSink,
    position: ModulePosition,
    seen: HashSet<usize, BuildAddressHasher>,
    parameters: WalkedParameters<'a>,
    counts: WalkCounts,
}

impl<'a, 't> ModelWalk<'a, 't> {
    /// Makes a pass, which creates six Python strings. `None` if the interpreter has no memory for them.
    pub(super) fn new(
        gil: GilToken<'a>,
        torch: &'a TorchSymbols,
        layout: &'a mut Option<TensorLayout>,
        module_class: PyObjectPtr,
        cpu: bool,
        sink: &'t mut dyn NameSink,
        previous: &'a Parameters,
    ) -> Option<ModelWalk<'a, 't>> {
        let attributes = Attributes {
            modules: gil.interned(c"_modules")?,
            parameters: gil.interned(c"_parameters")?,
            buffers: gil.interned(c"_buffers")?,
            state: gil.interned(c"state")?,
            groups: gil.interned(c"param_groups")?,
            local: gil.interned(c"_local_tensor")?,
        };
        Some(ModelWalk {
            gil,
            torch,
            layout: LayoutCheck { verified: layout, misses: 0, error: None },
            module_class,
            attributes,
            cpu,
            sink,
            position: ModulePosition::default(),
            seen: HashSet::default(),
            parameters: WalkedParameters { of_modules: HashMap::default(), previous, current: HashMap::default() },
            counts: WalkCounts::default(),
        })
    }

    /// The modules that no other module contains.
    pub(super) fn find_models(&self, modules: &[PyObjectPtr]) -> Vec<PyObjectPtr> {
        let mut children_of_others = HashSet::<usize, BuildAddressHasher>::default();
        for module in modules {
            let Some(children) = self.gil.stored_attribute(*module, &self.attributes.modules) else { continue };
            children_of_others.extend(
                self.gil.entries(children.object).map(|(_, child)| child.addr()).filter(|c| *c != module.addr()),
            );
        }
        modules.iter().copied().filter(|module| !children_of_others.contains(&module.addr())).collect()
    }

    /// A model's parameters, by a hash of their names within the model.
    pub(super) fn parameter_names(&mut self, module: PyObjectPtr) -> ParameterNames {
        let mut names = ParameterNames::default();
        let mut path = Vec::new();
        self.collect_names(module, AddressHasher::default().finish(), &mut path, &mut names);
        names
    }

    fn collect_names(
        &self,
        module: PyObjectPtr,
        path: u64,
        ancestors: &mut Vec<PyObjectPtr>,
        names: &mut ParameterNames,
    ) {
        if ancestors.len() >= MAX_DEPTH || ancestors.contains(&module) || names.len() >= MAX_NAMES {
            return;
        }
        let gil = self.gil;
        let joined = |name: &str| {
            let mut hash = AddressHasher(path);
            name.hash(&mut hash);
            hash.finish()
        };
        if let Some(parameters) = gil.stored_attribute(module, &self.attributes.parameters) {
            let tensors = gil.entries(parameters.object).filter(|(_, tensor)| self.is_tensor(*tensor));
            names.extend(tensors.filter_map(|(name, tensor)| Some((joined(gil.str(name)?), tensor.addr()))));
        }
        let Some(children) = gil.stored_attribute(module, &self.attributes.modules) else { return };
        ancestors.push(module);
        for (name, child) in gil.entries(children.object) {
            if let Some(name) = gil.str(name).filter(|_| gil.is_instance(child, self.module_class)) {
                self.collect_names(child, joined(name), ancestors, names);
            }
        }
        ancestors.pop();
    }

    /// Visits a model and everything in it. `name` is the prefix of its tensors' names; empty means no prefix.
    pub(super) fn visit_model(&mut self, module: PyObjectPtr, name: &str) {
        self.position.path.clear();
        if !name.is_empty() {
            self.position.path.push_str(name);
            self.position.path.push('.');
        }
        self.visit_module(module);
        self.position.path.clear();
    }

    /// Whether the layout of tensors is verified.
    pub(super) fn has_layout(&self) -> bool {
        self.layout.verified.is_some()
    }

    /// How many tensors of modules this pass has visited.
    pub(super) fn tensors_seen(&self) -> usize {
        self.counts.tensors_seen
    }

    /// Ends the pass.
    pub(super) fn finish(self) -> WalkResult {
        WalkResult {
            dropped: self.counts.names_dropped,
            misses: self.layout.misses,
            layout_error: self.layout.error,
            parameters: self.parameters.current,
            seen: self.seen,
        }
    }

    /// Forgets what this pass has visited, so that it can be repeated.
    pub(super) fn restart(&mut self) {
        self.seen.clear();
        self.parameters.of_modules.clear();
        (self.counts.names_read, self.counts.names_dropped) = (0, 0);
    }

    fn has_room(&mut self) -> bool {
        self.counts.names_read += 1;
        let has_room = self.counts.names_read <= MAX_NAMES;
        self.counts.names_dropped += u64::from(!has_room);
        has_room
    }

    /// Visits a module and everything in it. `path` is the module's path, followed by a dot unless it is empty.
    fn visit_module(&mut self, module: PyObjectPtr) {
        if self.position.ancestors.len() >= MAX_DEPTH || self.position.ancestors.contains(&module) || !self.has_room() {
            return;
        }
        if self.seen.insert(module.addr()) {
            let path = self.position.path.strip_suffix('.').unwrap_or("");
            // SAFETY: `module` is alive, because the model that contains it is. Its type lives at least as long.
            self.sink.module(module, unsafe { class_name(module) }, path);
        }
        let gil = self.gil;
        if let Some(parameters) = gil.stored_attribute(module, &self.attributes.parameters) {
            self.visit_tensors(TensorKind::Parameter, parameters.object);
        }
        if let Some(buffers) = gil.stored_attribute(module, &self.attributes.buffers) {
            self.visit_tensors(TensorKind::Buffer, buffers.object);
        }
        let Some(children) = gil.stored_attribute(module, &self.attributes.modules) else { return };
        self.position.ancestors.push(module);
        for (name, child) in gil.entries(children.object) {
            let Some(name) = gil.str(name).filter(|_| gil.is_instance(child, self.module_class)) else {
                continue;
            };
            let before = self.position.path.len();
            self.position.path.push_str(name);
            self.position.path.push('.');
            self.visit_module(child);
            self.position.path.truncate(before);
        }
        self.position.ancestors.pop();
    }

    fn visit_tensors(&mut self, kind: TensorKind, of: PyObjectPtr) {
        let gil = self.gil;
        for (name, tensor) in gil.entries(of) {
            let Some(name) = gil.str(name).filter(|_| self.is_tensor(tensor)) else { continue };
            let before = self.position.path.len();
            self.position.path.push_str(name);
            let name = std::mem::take(&mut self.position.path);
            if kind == TensorKind::Parameter {
                self.parameters.of_modules.entry(tensor.addr()).or_insert_with(|| name.as_str().into());
            }
            self.counts.tensors_seen += 1;
            self.report_with_gradient(kind, tensor, &name);
            self.position.path = name;
            self.position.path.truncate(before);
        }
    }

    fn is_tensor(&self, object: PyObjectPtr) -> bool {
        self.gil.is_instance(object, self.torch.tensor_class)
    }

    /// Reports a tensor of this name, and its gradient if it is a parameter.
    fn report_with_gradient(&mut self, kind: TensorKind, tensor: PyObjectPtr, name: &str) {
        if !self.has_room() {
            return;
        }
        let Some(implementation) = self.report_tensor(kind, tensor, name, 0) else { return };
        let Some(layout) = self.layout.verified.filter(|_| kind == TensorKind::Parameter) else { return };
        // SAFETY: `report_tensor` has verified that `implementation` is a plain `TensorImpl`. The tensor is alive, and
        // no backward pass is running that could change its gradient.
        let Some((storage, python)) = (unsafe { self.torch.gradient(&layout, implementation, self.cpu) }) else {
            return;
        };
        let name = format!("{name}.grad");
        match storage {
            TensorStorage::Memory(memory) => self.report_memory(&layout, TensorKind::Gradient, &name, &memory),
            TensorStorage::Wrapper(_) if !python.is_null() => {
                self.report_local_tensor(TensorKind::Gradient, python, &name, 0)
            }
            _ => {}
        }
    }

    /// Reports a tensor's memory. Returns the implementation of a tensor that may have a gradient, `None` for memory
    /// that is not recorded.
    fn report_tensor(
        &mut self,
        kind: TensorKind,
        tensor: PyObjectPtr,
        name: &str,
        depth: usize,
    ) -> Option<*mut std::ffi::c_void> {
        if self.layout.verified.is_none() && self.layout.error.is_none() {
            // A `DTensor` has no memory that shows the layout. The tensor that it wraps has.
            let local = self.gil.stored_attribute(tensor, &self.attributes.local);
            let local = local.as_ref().map(|local| local.object).filter(|local| self.is_tensor(*local));
            // SAFETY: `is_tensor` or the callers have checked that this is an instance of the tensor class. It is
            // alive, and this thread holds the GIL.
            match unsafe { self.torch.verify_layout(local.unwrap_or(tensor)) } {
                Ok(layout) => {
                    self.layout.misses += u32::from(layout.is_none());
                    *self.layout.verified = layout;
                }
                Err(reason) => self.layout.error = Some(reason),
            }
        }
        let layout = (*self.layout.verified)?;
        // SAFETY: the callers have checked that `tensor` is an instance of the tensor class. It is alive, and this
        // thread holds the GIL.
        match unsafe { self.torch.storage_of(&layout, tensor, self.cpu) } {
            TensorStorage::Memory(memory) => {
                self.report_memory(&layout, kind, name, &memory);
                Some(memory.implementation)
            }
            TensorStorage::Wrapper(implementation) => {
                self.report_local_tensor(kind, tensor, name, depth);
                Some(implementation)
            }
            TensorStorage::NotRecorded => None,
        }
    }

    fn report_memory(&mut self, layout: &TensorLayout, kind: TensorKind, name: &str, memory: &TensorMemory) {
        // SAFETY: `storage_of` or `gradient` has verified that this is a plain `TensorImpl` of a live tensor.
        let shape = || unsafe { self.torch.shape(layout, memory.implementation) };
        self.sink.tensor(kind, name, memory.address, &shape);
    }

    /// Reports the tensor that a `DTensor` wraps: the shard of this rank.
    fn report_local_tensor(&mut self, kind: TensorKind, tensor: PyObjectPtr, name: &str, depth: usize) {
        let Some(local) = self.gil.stored_attribute(tensor, &self.attributes.local) else { return };
        if depth < MAX_TENSOR_DEPTH && self.is_tensor(local.object) {
            self.report_tensor(kind, local.object, name, depth + 1);
        }
    }

    /// Reports the state that an optimizer keeps for each parameter. Call it after all models, whose parameter names it
    /// uses.
    pub(super) fn visit_optimizer(&mut self, optimizer: PyObjectPtr) {
        let gil = self.gil;
        // SAFETY: `optimizer` is alive, and so is its type.
        let class = unsafe { class_name(optimizer) }.to_owned();
        let mut order = Vec::new();
        if let Some(groups) = gil.stored_attribute(optimizer, &self.attributes.groups) {
            for group in gil.elements(groups.object) {
                let parameters = gil.entries(group).find(|(key, _)| gil.str(*key) == Some("params"));
                order.extend(gil.elements(parameters.map_or(null_mut(), |(_, list)| list)));
            }
        }
        let mut names = Parameters::default();
        for parameter in &order {
            let key = parameter.addr();
            if let Some(name) = self.parameters.of_modules.get(&key).or_else(|| self.parameters.previous.get(&key)) {
                names.insert(key, name.clone());
            }
        }
        self.parameters.current.extend(names.iter().map(|(key, name)| (*key, name.clone())));
        // Parameters that belong to no module are numbered as in `state_dict()`.
        if names.is_empty() {
            for (number, parameter) in order.into_iter().enumerate() {
                // FSDP's sharded parameters are outside their modules only temporarily.
                if !self.is_tensor(parameter) || gil.stored_attribute(parameter, &self.attributes.local).is_some() {
                    continue;
                }
                self.report_with_gradient(TensorKind::Parameter, parameter, &format!("{class}.params[{number}]"));
                names.insert(parameter.addr(), format!("params[{number}]").into());
            }
        }
        let Some(state) = gil.stored_attribute(optimizer, &self.attributes.state) else { return };
        for (parameter, tensors) in gil.entries(state.object) {
            let Some(of) = names.get(&parameter.addr()) else { continue };
            for (key, value) in gil.entries(tensors) {
                let Some(key) = gil.str(key) else { continue };
                if self.is_tensor(value) {
                    self.report_state(value, &format!("{class}.{key} of {of}"));
                    continue;
                }
                let (sequence, inner) = (gil.elements(value), gil.entries(value));
                for (index, element) in sequence.enumerate() {
                    if self.is_tensor(element) {
                        self.report_state(element, &format!("{class}.{key}[{index}] of {of}"));
                    }
                }
                for (name, element) in inner {
                    if let Some(name) = gil.str(name).filter(|_| self.is_tensor(element)) {
                        self.report_state(element, &format!("{class}.{key}.{name} of {of}"));
                    }
                }
            }
        }
    }

    fn report_state(&mut self, tensor: PyObjectPtr, name: &str) {
        if self.has_room() {
            self.report_tensor(TensorKind::OptimizerState, tensor, name, 0);
        }
    }
}
