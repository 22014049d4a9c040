//! Assigns memory to `nn.Module`s. A block belongs to the module that was being called when the block was allocated, or
//! whose call made the autograd node that allocated it. A block with a parameter's name belongs to the module that
//! holds the parameter.
//!
//! A module's path is the one from `named_modules()` if the recording has names, else the chain of classes through
//! which it was called. A module that no other module called is a root. A block known only by a parameter's name
//! belongs to the root that called a module with that path. If there is only one root, it belongs to that root.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

use super::category::Category;
use super::composition::{Amount, Composition, ModuleKey};
use super::phase::Phase;
use memtrace_replay::{AllocationNames, Contexts, Names};

/// The maximum depth of a path. Deeper modules count for their ancestor at this depth.
const MAX_DEPTH: usize = 32;
/// The minimum number of sibling modules of one class that count as repeated.
const MIN_REPEATED: usize = 2;

/// The paths of modules that hold parameters.
#[derive(Clone, Debug, Default)]
pub struct ModulePaths {
    all: Vec<Box<str>>,
    numbers: HashMap<Box<str>, u32>,
}

impl ModulePaths {
    /// The number of the module that holds the named tensor; `None` without a name. The names `blocks.0.fc.weight`,
    /// `blocks.0.fc.weight.grad` and `Adam.exp_avg of blocks.0.fc.weight` all belong to `blocks.0.fc`.
    pub fn number(&mut self, named: &AllocationNames) -> Option<u32> {
        let path = path_of(named.kind, named.names.first()?);
        if let Some(number) = self.numbers.get(path) {
            return Some(*number);
        }
        let number = self.all.len() as u32;
        self.all.push(path.into());
        self.numbers.insert(path.into(), number);
        Some(number)
    }
}

fn path_of(kind: TensorKind, name: &str) -> &str {
    let of = name.rsplit_once(" of ").map_or(name, |(_, of)| of);
    let of = if kind == TensorKind::Gradient { of.strip_suffix(".grad").unwrap_or(of) } else { of };
    of.rsplit_once('.').map_or("", |(module, _)| module)
}

/// One module and its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleMemory {
    /// The path; empty for a root.
    pub path: String,
    /// The class; empty if none of the module's own calls allocated anything.
    pub class: String,
    /// The number of levels below its root; 0 for the root.
    pub depth: usize,
    /// The memory of the module and of all modules inside it, by category.
    pub whole: [Amount; Category::ALL.len()],
    /// The memory of the module alone, by category.
    pub own: [Amount; Category::ALL.len()],
}

impl ModuleMemory {
    /// The sum of all categories, in bytes.
    pub fn bytes(&self) -> u64 {
        self.whole.iter().map(|amount| amount.bytes).sum()
    }

    /// Bytes that the backward pass needs from the module's forward pass.
    pub fn activations(&self) -> u64 {
        self.whole[Category::Activation as usize].bytes
    }
}

/// Sibling modules of one class, for example `blocks.0` to `blocks.11`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RepeatedModules {
    /// Their common path, for example `blocks`; empty if they are children of the root.
    pub path: String,
    /// Their class.
    pub class: String,
    /// The number of siblings that have activations at this point in time. Siblings under activation checkpointing are
    /// left out.
    pub count: usize,
    /// The activations of all of them, in bytes.
    pub activations: u64,
    /// The activations of the largest one, in bytes.
    pub largest: u64,
    /// The activations of the module in whose backward pass the point in time is, in bytes. That backward pass needs
    /// all of them. 0 outside a backward pass: in a forward pass it is unknown how many activations would remain.
    pub running: u64,
    /// The output bytes that each sibling itself allocated after all modules inside it. The next sibling needs them as
    /// input, so they stay. A sibling whose own forward pass does not end this way counts as 0.
    pub outputs: u64,
}

impl RepeatedModules {
    /// The pattern that covers all of them: `blocks.*`.
    pub fn pattern(&self) -> String {
        if self.path.is_empty() { "*".to_owned() } else { format!("{}.*", self.path) }
    }

    /// The maximum number of bytes that activation checkpointing of each sibling would save at this point in time. Two
    /// parts stay: the outputs, and the activations of the sibling whose backward pass is running, which must be
    /// recomputed.
    pub fn checkpointing_saves(&self) -> u64 {
        self.activations.saturating_sub(self.outputs).saturating_sub(self.running)
    }
}

/// Memory by module at one point in time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleTree {
    /// The modules. A parent comes before its children, children are ordered by path, and roots have depth 0.
    pub modules: Vec<ModuleMemory>,
    /// Repeated sibling modules, most activations first.
    pub repeated: Vec<RepeatedModules>,
    /// Bytes that belong to no module.
    pub outside_modules: u64,
}

#[derive(Default)]
struct TreeNode {
    class: String,
    own: [Amount; Category::ALL.len()],
    children: BTreeMap<PathComponent, TreeNode>,
    /// The last activation that the module itself allocated: `seq` and bytes.
    last: (u64, u64),
    checkpointed: bool,
    /// Whether the point in time is in this module and not in a module inside it.
    is_running: bool,
}

/// A module that was added to the tree.
struct AddedModule {
    /// The index in [`ModuleTree::modules`].
    index: usize,
    /// `seq` of the last activation of the module and the modules inside it.
    last: u64,
    /// Bytes that the module itself allocated after all modules inside it; 0 if one of those allocated last.
    output: u64,
    checkpointed: bool,
    is_running: bool,
}

/// A component of a path. Numbers sort by value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PathComponent(Option<u64>, String);

impl PathComponent {
    fn of(component: &str) -> PathComponent {
        PathComponent(component.parse().ok(), component.to_owned())
    }
}

impl TreeNode {
    fn at(&mut self, path: &[&str]) -> &mut TreeNode {
        path.iter()
            .take(MAX_DEPTH)
            .fold(self, |node, component| node.children.entry(PathComponent::of(component)).or_default())
    }
}

fn add(to: &mut [Amount; Category::ALL.len()], category: Category, amount: &Amount) {
    let to = &mut to[category as usize];
    to.bytes += amount.bytes;
    to.blocks += amount.blocks;
}

impl ModuleTree {
    /// The modules of the blocks that were allocated at one point in time.
    pub fn of(
        composition: &Composition,
        paths: &ModulePaths,
        definitions: &Definitions,
        names: &Names,
        contexts: &Contexts,
    ) -> ModuleTree {
        let mut roots: BTreeMap<String, TreeNode> = BTreeMap::new();
        let mut owned: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        let mut inside = 0;
        let mut by_path = Vec::new();
        // By call: its module. The cache avoids a new lookup for each category of a call.
        let mut called: HashMap<ContextId, Option<CalledModule>> = HashMap::new();
        let path_set: BTreeMap<&str, ()> = paths.all.iter().map(|path| (&**path, ())).collect();
        // A workspace belongs to the process, not to the module that first needed it.
        let of_modules = composition.modules().filter(|(_, category, _)| *category != Category::Workspace);
        for (module, category, part) in of_modules {
            let amount = &part.amount;
            inside += amount.bytes;
            match module {
                ModuleKey::Path(number) => {
                    by_path.push((paths.all.get(number as usize).map_or("", |path| path), category, amount));
                }
                ModuleKey::Call(id) => {
                    let module =
                        called.entry(id).or_insert_with(|| CalledModule::of(id, composition.seq, definitions, names));
                    let Some(module) = module else {
                        inside -= amount.bytes;
                        continue;
                    };
                    let root = roots.entry(module.root.clone()).or_default();
                    let node = root.at(&module.components());
                    node.class.clone_from(&module.class);
                    add(&mut node.own, category, amount);
                    if category == Category::Activation {
                        node.last = node.last.max(part.last);
                        node.checkpointed |= part.checkpointed;
                    }
                    if let Some((path, ())) = path_set.get_key_value(&*module.path) {
                        owned.entry(path).or_default().insert(module.root.clone());
                    }
                }
            }
        }
        for (path, category, amount) in by_path {
            let claimed = owned.get(path).filter(|roots| roots.len() == 1).and_then(|roots| roots.first().cloned());
            let only = if roots.len() == 1 { roots.keys().next().cloned() } else { None };
            let root = roots.entry(claimed.or(only).unwrap_or_default()).or_default();
            let components: Vec<&str> = path.split('.').filter(|c| !c.is_empty()).collect();
            add(&mut root.at(&components).own, category, amount);
        }
        let at = contexts.module(composition.allocated_at.1);
        if composition.phase != Phase::Forward
            && let Some(module) = CalledModule::of(at, composition.seq, definitions, names)
        {
            roots.entry(module.root.clone()).or_default().at(&module.components()).is_running = true;
        }
        let mut tree =
            ModuleTree { outside_modules: composition.usage.allocated.saturating_sub(inside), ..ModuleTree::default() };
        for (class, mut root) in roots {
            root.class = class;
            tree.add_subtree(root, String::new(), 0);
        }
        tree.repeated.sort_by(|a, b| (b.activations, &a.path, &a.class).cmp(&(a.activations, &b.path, &b.class)));
        tree
    }

    /// Adds a module and the modules inside it.
    fn add_subtree(&mut self, node: TreeNode, path: String, depth: usize) -> AddedModule {
        let index = self.modules.len();
        let memory = ModuleMemory { path: path.clone(), class: node.class, depth, whole: node.own, own: node.own };
        self.modules.push(memory);
        let mut added =
            AddedModule { index, last: 0, output: 0, checkpointed: node.checkpointed, is_running: node.is_running };
        let mut classes: BTreeMap<String, RepeatedModules> = BTreeMap::new();
        for (PathComponent(_, component), child) in node.children {
            let child_path = if path.is_empty() { component } else { format!("{path}.{component}") };
            let child = self.add_subtree(child, child_path, depth + 1);
            added.last = added.last.max(child.last);
            added.checkpointed |= child.checkpointed;
            added.is_running |= child.is_running;
            let whole = self.modules[child.index].whole;
            for (category, amount) in Category::ALL.iter().zip(&whole) {
                add(&mut self.modules[index].whole, *category, amount);
            }
            let memory = &self.modules[child.index];
            let activations = memory.activations();
            if activations > 0 && !memory.class.is_empty() && !child.checkpointed {
                let one = classes.entry(memory.class.clone()).or_insert_with(|| RepeatedModules {
                    path: path.clone(),
                    class: memory.class.clone(),
                    ..RepeatedModules::default()
                });
                one.count += 1;
                one.activations += activations;
                one.largest = one.largest.max(activations);
                one.running += if child.is_running { activations } else { 0 };
                one.outputs += child.output;
            }
        }
        if node.last.0 > added.last {
            (added.last, added.output) = node.last;
        }
        self.repeated.extend(classes.into_values().filter(|one| one.count >= MIN_REPEATED));
        added
    }
}

/// The module of a call.
struct CalledModule {
    /// The class of the root.
    root: String,
    /// The path below the root.
    path: String,
    class: String,
}

impl CalledModule {
    fn of(id: ContextId, at_seq: u64, definitions: &Definitions, names: &Names) -> Option<CalledModule> {
        let call = definitions.nn_calls.get(&id)?;
        let mut outermost = call;
        // The loop ends, because a caller's id is smaller than the id of the call.
        while let Some(caller) = definitions.nn_calls.get(&outermost.caller) {
            outermost = caller;
        }
        let (root, class) = (outermost.class.to_string(), call.class.to_string());
        let path = names.module_path(id, at_seq).unwrap_or_default();
        // The root's own path is its class, and a chain of classes begins with it.
        let path = match path.strip_prefix(&*root) {
            Some("") if outermost == call => String::new(),
            Some(rest) if rest.starts_with('/') => rest[1..].to_owned(),
            _ => path,
        };
        Some(CalledModule { root, path, class })
    }

    fn components(&self) -> Vec<&str> {
        self.path.split(['.', '/']).filter(|component| !component.is_empty()).collect()
    }
}
