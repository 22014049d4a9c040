//! Memory by the `nn.Module` it belongs to: the one that was being called when a block was made, whose call made the autograd node that
//! made it, or that holds the parameter which a block has its name from.
//!
//! A module's path is that of `named_modules()` where the recording has names, else the chain of classes by which it was called. A
//! module that no module called is a root; what is known by a parameter's name alone belongs to the root that has called a module of that
//! path, or to the only one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

use super::category::Category;
use super::composition::{Amount, Composition};
use super::phase::Phase;
use memtrace_replay::{Contexts, Named, Names};

/// The most levels of a path; what lies deeper belongs to its ancestor there.
const DEEPEST: usize = 32;
/// The fewest modules of a class, side by side, that are looked at as repeated.
const REPEATED: usize = 2;

/// What a block belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Belongs {
    /// The call of a module.
    Call(ContextId),
    /// The module of a path, by its number in [`Paths`].
    Path(u32),
}

/// Paths of modules that hold parameters.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    all: Vec<Box<str>>,
    numbers: HashMap<Box<str>, u32>,
}

impl Paths {
    /// The number of the module that a name is of: `blocks.0.fc.weight`, `blocks.0.fc.weight.grad` and `Adam.exp_avg of
    /// blocks.0.fc.weight` are all of `blocks.0.fc`.
    pub fn number(&mut self, named: &Named) -> Option<u32> {
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

/// One module and what is in it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleMemory {
    /// The path; empty for a root.
    pub path: String,
    /// Its class; empty where nothing was made in a call of its own.
    pub class: String,
    /// How many levels it is below its root, which is 0.
    pub depth: usize,
    /// What belongs to it and to all modules in it.
    pub whole: [Amount; Category::ALL.len()],
    /// What belongs to it alone.
    pub own: [Amount; Category::ALL.len()],
}

impl ModuleMemory {
    /// All of its bytes.
    pub fn bytes(&self) -> u64 {
        self.whole.iter().map(|amount| amount.bytes).sum()
    }

    /// Bytes of what backward needs of its forward.
    pub fn activations(&self) -> u64 {
        self.whole[Category::Activation as usize].bytes
    }
}

/// Modules of one class, side by side, e.g. `blocks.0` to `blocks.11`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Repeated {
    /// Their common path, e.g. `blocks`; empty where they are children of the root.
    pub path: String,
    /// Their class.
    pub class: String,
    /// How many have activations at the moment, those under activation checkpointing left out.
    pub count: usize,
    /// The activations of all of them.
    pub activations: u64,
    /// Of the one that has most.
    pub most: u64,
    /// Of the one in the backward of whose call the moment is, which needs all of them; 0 where it is in none. In a forward it is
    /// not known how many of those made so far would be there still.
    pub here: u64,
    /// What each made itself after all modules in it: what the next is called with, which stays. Modules whose own forward does not
    /// end so do not tell, and count nothing.
    pub outputs: u64,
}

impl Repeated {
    /// What stands for all of them: `blocks.*`.
    pub fn pattern(&self) -> String {
        if self.path.is_empty() { "*".to_owned() } else { format!("{}.*", self.path) }
    }

    /// By how much activation checkpointing of each of them would lower this moment, at most: all of their activations but what each
    /// hands to the next, and those of the one whose backward the moment is in, which has to be recomputed.
    pub fn checkpointing_saves(&self) -> u64 {
        self.activations.saturating_sub(self.outputs).saturating_sub(self.here)
    }
}

/// Memory by module at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleTree {
    /// A parent before its children, which follow it by path; roots have depth 0.
    pub modules: Vec<ModuleMemory>,
    /// Modules of one class, side by side: those with most activations first.
    pub repeated: Vec<Repeated>,
    /// What belongs to no module.
    pub outside: u64,
}

#[derive(Default)]
struct Node {
    class: String,
    own: [Amount; Category::ALL.len()],
    children: BTreeMap<Key, Node>,
    /// The activation that it made last itself: `seq` and bytes.
    last: (u64, u64),
    checkpointed: bool,
    /// Whether the moment is in it, not in a module in it.
    here: bool,
}

/// A module that was put into the tree.
struct Put {
    place: usize,
    /// `seq` of the last activation of it and all in it.
    last: u64,
    /// Bytes of its own that it made after all modules in it; 0 where another made the last.
    output: u64,
    checkpointed: bool,
    here: bool,
}

/// A component of a path: numbers in order of their value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key(Option<u64>, String);

impl Key {
    fn of(component: &str) -> Key {
        Key(component.parse().ok(), component.to_owned())
    }
}

impl Node {
    fn at(&mut self, path: &[&str]) -> &mut Node {
        path.iter().take(DEEPEST).fold(self, |node, component| node.children.entry(Key::of(component)).or_default())
    }
}

fn add(to: &mut [Amount; Category::ALL.len()], category: Category, amount: &Amount) {
    let to = &mut to[category as usize];
    to.bytes += amount.bytes;
    to.blocks += amount.blocks;
}

impl ModuleTree {
    /// The modules of what was alive at a moment.
    pub fn of(
        composition: &Composition,
        paths: &Paths,
        definitions: &Definitions,
        names: &Names,
        contexts: &Contexts,
    ) -> ModuleTree {
        let mut roots: BTreeMap<String, Node> = BTreeMap::new();
        let mut owned: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        let mut inside = 0;
        let mut by_path = Vec::new();
        // The place of each call, of which several have what they have of many categories.
        let mut places: HashMap<ContextId, Option<Place>> = HashMap::new();
        let path_set: BTreeMap<&str, ()> = paths.all.iter().map(|path| (&**path, ())).collect();
        // A workspace is the process's, whoever needed it first.
        let of_modules = composition.modules().filter(|(_, category, _)| *category != Category::Workspace);
        for (belongs, category, part) in of_modules {
            let amount = &part.amount;
            inside += amount.bytes;
            match belongs {
                Belongs::Path(number) => {
                    by_path.push((paths.all.get(number as usize).map_or("", |path| path), category, amount));
                }
                Belongs::Call(id) => {
                    let place = places.entry(id).or_insert_with(|| Place::of(id, composition.seq, definitions, names));
                    let Some(place) = place else {
                        inside -= amount.bytes;
                        continue;
                    };
                    let root = roots.entry(place.root.clone()).or_default();
                    let node = root.at(&place.components());
                    node.class.clone_from(&place.class);
                    add(&mut node.own, category, amount);
                    if category == Category::Activation {
                        node.last = node.last.max(part.last);
                        node.checkpointed |= part.checkpointed;
                    }
                    if let Some((path, ())) = path_set.get_key_value(&*place.path) {
                        owned.entry(path).or_default().insert(place.root.clone());
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
        let at = contexts.module(composition.by.1);
        if composition.phase != Phase::Forward
            && let Some(place) = Place::of(at, composition.seq, definitions, names)
        {
            roots.entry(place.root.clone()).or_default().at(&place.components()).here = true;
        }
        let mut tree =
            ModuleTree { outside: composition.usage.allocated.saturating_sub(inside), ..ModuleTree::default() };
        for (class, mut root) in roots {
            root.class = class;
            tree.put(root, String::new(), 0);
        }
        tree.repeated.sort_by(|a, b| (b.activations, &a.path, &a.class).cmp(&(a.activations, &b.path, &b.class)));
        tree
    }

    /// Adds a module and what is in it.
    fn put(&mut self, node: Node, path: String, depth: usize) -> Put {
        let place = self.modules.len();
        let memory = ModuleMemory { path: path.clone(), class: node.class, depth, whole: node.own, own: node.own };
        self.modules.push(memory);
        let mut put = Put { place, last: 0, output: 0, checkpointed: node.checkpointed, here: node.here };
        let mut classes: BTreeMap<String, Repeated> = BTreeMap::new();
        for (Key(_, component), child) in node.children {
            let child_path = if path.is_empty() { component } else { format!("{path}.{component}") };
            let child = self.put(child, child_path, depth + 1);
            put.last = put.last.max(child.last);
            put.checkpointed |= child.checkpointed;
            put.here |= child.here;
            let whole = self.modules[child.place].whole;
            for (category, amount) in Category::ALL.iter().zip(&whole) {
                add(&mut self.modules[place].whole, *category, amount);
            }
            let memory = &self.modules[child.place];
            let activations = memory.activations();
            if activations > 0 && !memory.class.is_empty() && !child.checkpointed {
                let one = classes.entry(memory.class.clone()).or_insert_with(|| Repeated {
                    path: path.clone(),
                    class: memory.class.clone(),
                    ..Repeated::default()
                });
                one.count += 1;
                one.activations += activations;
                one.most = one.most.max(activations);
                one.here += if child.here { activations } else { 0 };
                one.outputs += child.output;
            }
        }
        if node.last.0 > put.last {
            (put.last, put.output) = node.last;
        }
        self.repeated.extend(classes.into_values().filter(|one| one.count >= REPEATED));
        put
    }
}

/// Where a call's module is.
struct Place {
    /// The class of the root.
    root: String,
    /// The path below it.
    path: String,
    class: String,
}

impl Place {
    fn of(id: ContextId, at_seq: u64, definitions: &Definitions, names: &Names) -> Option<Place> {
        let call = definitions.nn_calls.get(&id)?;
        let mut outermost = call;
        // A caller's id is smaller than its own: this ends.
        while let Some(caller) = definitions.nn_calls.get(&outermost.caller) {
            outermost = caller;
        }
        let (root, class) = (outermost.class.to_string(), call.class.to_string());
        let path = names.module_path(id, at_seq).unwrap_or_default();
        // The root's own path is its class, and a class chain begins with it.
        let path = match path.strip_prefix(&*root) {
            Some("") if outermost == call => String::new(),
            Some(rest) if rest.starts_with('/') => rest[1..].to_owned(),
            _ => path,
        };
        Some(Place { root, path, class })
    }

    fn components(&self) -> Vec<&str> {
        self.path.split(['.', '/']).filter(|component| !component.is_empty()).collect()
    }
}
