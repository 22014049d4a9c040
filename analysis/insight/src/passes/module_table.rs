//! The modules of a program: path, class, and what calls what. A module is known from its calls, at any time of the
//! recording, and from the names that were read.
//!
//! A module's path is the one from `named_modules()` if the recording has names, else the chain of classes through
//! which it was called. All modules of one path are one module, whichever calls lead to it: through a wrapper in
//! training and without it in evaluation, or without any caller where a checkpoint recomputes it. Its root is the model
//! whose call leads to it; without such a call, the model beside which its name was read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

use crate::rules::{UserClasses, is_wrapped_module};
use memtrace_replay::Names;

/// The maximum depth of a path. Deeper modules count for their ancestor at this depth.
const MAX_DEPTH: usize = 32;

/// A component of a path. Numbers sort by value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct PathComponent(Option<u64>, Box<str>);

impl PathComponent {
    fn of(component: &str) -> PathComponent {
        PathComponent(component.parse().ok(), component.into())
    }

    pub(super) fn text(&self) -> &str {
        &self.1
    }
}

/// A module.
#[derive(Debug, Default)]
pub(super) struct KnownModule {
    /// The module that contains it, by index. A smaller index than its own. `None` for a root.
    pub(super) parent: Option<usize>,
    /// The last component of its path. Empty for a root.
    pub(super) component: PathComponent,
    pub(super) children: BTreeMap<PathComponent, usize>,
    /// The class; empty if it is unknown. Inside a model, a wrapper has the class of the module that it wraps.
    pub(super) class: Box<str>,
    /// Whether `class` is that of the module inside it.
    pub(super) is_wrapper: bool,
    /// Whether the program has called it.
    pub(super) is_called: bool,
    /// Whether it has called other modules.
    pub(super) calls_others: bool,
    /// Whether it belongs to a model that has not been replaced by another one of the same path.
    pub(super) is_current: bool,
}

/// The modules of a program.
#[derive(Debug, Default)]
pub(super) struct ModuleTable {
    modules: Vec<KnownModule>,
    /// By class.
    roots: BTreeMap<Box<str>, usize>,
    by_call: HashMap<ContextId, usize>,
    /// By the first component of a path: the class of the root.
    root_classes: HashMap<Box<str>, Box<str>>,
    /// The class of the only model.
    only_model: Option<Box<str>>,
}

fn first_component(path: &str) -> &str {
    path.split(['.', '/']).next().unwrap_or(path)
}

impl ModuleTable {
    /// The modules of a recording. Their paths are those of about `at_seq`.
    pub(super) fn of(definitions: &Definitions, names: &Names, at_seq: u64) -> ModuleTable {
        let mut table = ModuleTable::default();
        table.find_roots(definitions, names, at_seq);
        let replaced = table.add_named(definitions, names, at_seq);
        for (id, call) in &definitions.nn_calls {
            let caller = table.by_call.get(&call.caller).copied();
            let module = match (names.own_path(*id, at_seq), caller) {
                (Some(""), _) | (None, None) => table.root(&call.class),
                (Some(path), _) => table.at_path(path),
                (None, Some(caller)) => table.inside(caller, &call.class),
            };
            table.by_call.insert(*id, module);
            let known = &mut table.modules[module];
            known.class.clone_from(&call.class);
            known.is_called = true;
            known.is_current |= !replaced.contains(&(call.object, &*call.class));
            if let Some(caller) = caller.filter(|caller| *caller != module) {
                table.modules[caller].calls_others = true;
            }
        }
        table.pass_classes_to_wrappers();
        let classes = UserClasses::of(definitions);
        for module in &mut table.modules {
            module.class = classes.name(&module.class).into();
        }
        table
    }

    /// Gives wrappers inside a model the class of the module that they wrap.
    fn pass_classes_to_wrappers(&mut self) {
        // A child has a greater index than its parent, so the innermost class is passed on first.
        for at in (0..self.modules.len()).rev() {
            let module = &self.modules[at];
            let Some(parent) = module.parent.filter(|_| is_wrapped_module(module.component.text())) else { continue };
            if !module.class.is_empty() && self.modules[parent].parent.is_some() {
                let (class, calls_others) = (module.class.clone(), module.calls_others);
                let wrapper = &mut self.modules[parent];
                (wrapper.class, wrapper.calls_others, wrapper.is_wrapper) = (class, calls_others, true);
            }
        }
    }

    /// Assigns the first components of paths to roots.
    fn find_roots(&mut self, definitions: &Definitions, names: &Names, at_seq: u64) {
        let calls = &definitions.nn_calls;
        let mut assign = |path: &str, class: &str| {
            self.root_classes.entry(first_component(path).into()).or_insert_with(|| class.into());
        };
        // By call: the class of the nearest caller that is a model, or the call itself.
        let mut models: HashMap<ContextId, Option<&str>> = HashMap::with_capacity(calls.len());
        let mut called_models: BTreeSet<&str> = BTreeSet::new();
        // Modules with a path of one component, and whether another module ever called them.
        let mut has_caller: HashMap<&str, bool> = HashMap::new();
        for (id, call) in calls {
            let path = names.own_path(*id, at_seq);
            let is_outermost = !calls.contains_key(&call.caller);
            let model = match path {
                Some("") => Some(&*call.class),
                None if is_outermost => Some(&*call.class),
                _ => models.get(&call.caller).copied().flatten(),
            };
            models.insert(*id, model);
            match path.filter(|path| !path.is_empty()) {
                None => called_models.extend(model),
                Some(path) => {
                    if let Some(model) = model {
                        assign(path, model);
                    }
                    if first_component(path) == path {
                        *has_caller.entry(path).or_default() |= !is_outermost;
                    }
                }
            }
        }
        // A scan reports a model before the modules inside it. A model whose parameters have the names of another
        // model's has a name itself.
        let mut model: Option<(u64, &str)> = None;
        let mut all_models = called_models.clone();
        for name in &definitions.nn_names {
            if name.name.is_empty() {
                model = Some((name.seq, &name.class));
                all_models.insert(&name.class);
                continue;
            }
            let beside = model.filter(|(seq, _)| *seq == name.seq).map(|(_, class)| class);
            let has_own_name = name.name.strip_prefix(&*name.class).is_some_and(|n| n.is_empty() || n.starts_with('#'));
            let is_model = has_own_name
                || has_caller.get(&*name.name) == Some(&false) && beside.is_none_or(|of| called_models.contains(of));
            if is_model {
                assign(&name.name, &name.class);
            } else if let Some(class) = beside {
                assign(&name.name, class);
            }
        }
        if let (1, Some(only)) = (all_models.len(), all_models.first()) {
            self.only_model = Some((*only).into());
        }
        let mut outermost: HashMap<ContextId, &str> = HashMap::with_capacity(calls.len());
        for (id, call) in calls {
            let class = outermost.get(&call.caller).copied().unwrap_or(&call.class);
            outermost.insert(*id, class);
            if let Some(path) = names.own_path(*id, at_seq).filter(|path| !path.is_empty()) {
                self.root_classes
                    .entry(first_component(path).into())
                    .or_insert_with(|| self.only_model.clone().unwrap_or_else(|| class.into()));
            }
        }
    }

    /// Adds the modules whose names were read. Returns the objects of modules that were replaced by others.
    fn add_named<'a>(&mut self, definitions: &'a Definitions, names: &Names, at_seq: u64) -> HashSet<(u64, &'a str)> {
        // By path, and for roots by class: since when which object had it. One object can have several classes.
        let mut objects: HashMap<(&str, &str), Vec<(u64, u64)>> = HashMap::new();
        let key = |path: &'a str, class: &'a str| (path, if path.is_empty() { class } else { "" });
        for name in &definitions.nn_names {
            let of_path = objects.entry(key(&name.name, &name.class)).or_default();
            if of_path.last().is_none_or(|(_, object)| *object != name.object) {
                of_path.push((name.seq, name.object));
            }
        }
        let mut seen = HashSet::new();
        let mut replaced = HashSet::new();
        for name in &definitions.nn_names {
            if !seen.insert((name.object, &*name.class)) {
                continue;
            }
            let Some(named) = names.of_module(name.object, &name.class, at_seq).filter(|n| !n.name.is_empty()) else {
                continue;
            };
            let parent = match named.name.rsplit_once('.') {
                Some((parent, _)) => objects.get(&(parent, "")),
                None => self.root_classes.get(&*named.name).and_then(|class| objects.get(&("", &**class))),
            };
            // The modules inside a model are reported with it or later. Where another object has taken the parent's
            // path since, the module belonged to the former one.
            let is_current = parent.is_none_or(|parent| {
                let later = parent.partition_point(|(seq, _)| *seq <= at_seq).max(1);
                let until = parent.get(later).map_or(u64::MAX, |(seq, _)| *seq);
                (parent[later - 1].0..until).contains(&named.seq)
            });
            if !is_current {
                replaced.insert((name.object, &*name.class));
            }
            let module = self.at_path(&named.name);
            let known = &mut self.modules[module];
            if is_current || known.class.is_empty() {
                known.class.clone_from(&name.class);
            }
            known.is_current |= is_current;
        }
        replaced
    }

    fn add(&mut self, module: KnownModule) -> usize {
        self.modules.push(module);
        self.modules.len() - 1
    }

    fn root(&mut self, class: &str) -> usize {
        if let Some(root) = self.roots.get(class) {
            return *root;
        }
        let root = self.add(KnownModule { class: class.into(), ..KnownModule::default() });
        self.roots.insert(class.into(), root);
        root
    }

    /// The module inside another one.
    fn inside(&mut self, parent: usize, component: &str) -> usize {
        let depth = std::iter::successors(Some(parent), |at| self.modules[*at].parent).take(MAX_DEPTH + 1).count();
        let component = PathComponent::of(component);
        if let Some(module) = self.modules[parent].children.get(&component) {
            return *module;
        }
        if depth > MAX_DEPTH {
            return parent;
        }
        let module =
            self.add(KnownModule { parent: Some(parent), component: component.clone(), ..KnownModule::default() });
        self.modules[parent].children.insert(component, module);
        module
    }

    /// The module of a path. A path that no model is known to contain belongs to the only model.
    fn at_path(&mut self, path: &str) -> usize {
        let class = self.root_classes.get(first_component(path)).or(self.only_model.as_ref()).cloned();
        let root = self.root(&class.unwrap_or_default());
        path.split(['.', '/']).filter(|component| !component.is_empty()).fold(root, |at, c| self.inside(at, c))
    }

    /// The module that holds the parameters of a path. An empty path belongs to the only model
    /// that is called, else to the only model.
    pub(super) fn owner(&mut self, path: &str) -> usize {
        if !path.is_empty() {
            return self.at_path(path);
        }
        let has_modules = |root: &&usize| !self.modules[**root].children.is_empty();
        let mut called = self.roots.values().filter(has_modules).filter(|root| self.modules[**root].is_called);
        let mut models = self.roots.values().filter(has_modules);
        let only = match (called.next(), called.next(), models.next(), models.next()) {
            (Some(root), None, ..) | (None, _, Some(root), None) => Some(*root),
            (None, _, None, _) if self.roots.len() == 1 => self.roots.values().next().copied(),
            _ => None,
        };
        only.unwrap_or_else(|| self.root(""))
    }

    /// The module of a call.
    pub(super) fn called(&self, call: ContextId) -> Option<usize> {
        self.by_call.get(&call).copied()
    }

    /// The calls and their modules.
    pub(super) fn calls(&self) -> impl Iterator<Item = (ContextId, usize)> {
        self.by_call.iter().map(|(call, module)| (*call, *module))
    }

    /// The roots, by class.
    pub(super) fn roots(&self) -> impl Iterator<Item = usize> {
        self.roots.values().copied()
    }

    /// All modules. A parent comes before its children.
    pub(super) fn modules(&self) -> &[KnownModule] {
        &self.modules
    }

    /// The components of a module's path.
    pub(super) fn components(&self, module: usize) -> Vec<&str> {
        let mut components: Vec<&str> = std::iter::successors(Some(module), |at| self.modules[*at].parent)
            .map(|at| self.modules[at].component.text())
            .filter(|component| !component.is_empty())
            .collect();
        components.reverse();
        components
    }
}
