//! Groups of modules of one class whose paths differ only in numbers, for example `blocks.0` to `blocks.11`, or
//! `stages.0.blocks.0` to `stages.3.blocks.2`.
//!
//! Each group knows all its modules, with and without memory at the point in time.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::ids::ContextId;

use super::module_memory::NodeMemory;
use super::module_table::{KnownModule, ModuleTable};
use crate::rules::is_container_class;

/// The minimum number of modules of one class that count as repeated.
const MIN_REPEATED: usize = 2;
/// The maximum number of patterns in the name of a group.
const MAX_PATTERNS: usize = 3;

/// A module of a group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RepeatedModule {
    /// The path.
    pub path: String,
    /// Its activations, in bytes; 0 if it has none at this point in time.
    pub activations: u64,
    /// The bytes that it allocated itself after all modules inside it, and that still are allocated.
    pub output: u64,
    /// Whether it runs under activation checkpointing.
    pub is_checkpointed: bool,
    /// Whether the point in time is in its backward pass.
    pub is_running: bool,
}

/// Modules of one class, for example `blocks.0` to `blocks.11`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RepeatedModules {
    /// The path that all of them share, for example `blocks`; empty if they share none.
    pub path: String,
    /// The patterns that cover all of them: `blocks.*`. `*` stands for numbers.
    pub patterns: Vec<String>,
    /// Their class.
    pub class: String,
    /// The number of modules that have activations at this point in time. Modules under activation checkpointing are
    /// left out.
    pub count: usize,
    /// The number of all modules of the group that the program has, at any time of the recording.
    pub total: usize,
    /// Whether no other module was ever called inside any of them, as in a `Linear`.
    pub is_leaf: bool,
    /// The activations of all of them, in bytes.
    pub activations: u64,
    /// The activations of the module in whose backward pass the point in time is, in bytes. That backward pass needs
    /// all of them. 0 outside a backward pass: in a forward pass it is unknown how many activations would remain.
    pub running: u64,
    /// The output bytes that each module itself allocated after all modules inside it. The next module needs them as
    /// input, so they stay. A module whose own forward pass does not end this way counts as 0.
    pub outputs: u64,
    /// All modules of the group, by path.
    pub modules: Vec<RepeatedModule>,
    /// The calls of these modules and of all modules inside them, at any time of the recording: the index in `modules`.
    /// A block belongs to a module of the group if its call, or the call that made its autograd node, is one of these.
    /// Empty for leaf modules.
    pub calls: BTreeMap<ContextId, usize>,
}

impl RepeatedModules {
    /// The pattern that covers all of them: `blocks.*`.
    pub fn pattern(&self) -> String {
        let mut pattern = self.patterns.iter().take(MAX_PATTERNS).cloned().collect::<Vec<_>>().join(", ");
        if self.patterns.len() > MAX_PATTERNS {
            pattern.push_str(&format!(" and {} more", self.patterns.len() - MAX_PATTERNS));
        }
        pattern
    }

    /// The group in the words of a report: `blocks.* (12 of Block, 10 with activations)`.
    pub fn text(&self) -> String {
        let part = if self.count < self.total { format!(", {} with activations", self.count) } else { String::new() };
        format!("{} ({} of {}{part})", self.pattern(), self.total, self.class)
    }

    /// The maximum number of bytes that activation checkpointing of each module would save at this point in time. Two
    /// parts stay: the outputs, and the activations of the module whose backward pass is running, which must be
    /// recomputed.
    pub fn checkpointing_saves(&self) -> u64 {
        self.activations.saturating_sub(self.outputs).saturating_sub(self.running)
    }
}

/// One line of a report: a module, or several modules of one class.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleLine {
    /// The path or the pattern; empty for a root.
    pub pattern: String,
    /// The class; empty if it is unknown.
    pub class: String,
    /// The number of modules, with and without memory at this point in time.
    pub count: usize,
    /// Whether the line is only the memory that the module itself holds, without the modules inside it.
    pub is_own: bool,
    /// The bytes.
    pub bytes: u64,
}

/// The modules of a program, grouped by class and pattern.
pub(super) struct AlikeModules {
    /// By module: its group. `None` for a module without a class.
    of: Vec<Option<usize>>,
    groups: Vec<AlikeGroup>,
}

struct AlikeGroup {
    class: String,
    pattern: String,
    modules: Vec<usize>,
}

/// Whether this is one of several models that are named after their class: `Sequential#1`.
fn is_model_of_class(module: &KnownModule) -> bool {
    module.component.text().strip_prefix(&*module.class).is_some_and(|number| number.starts_with('#'))
}

/// A component with `*` for each number in it.
fn generalized(component: &str) -> String {
    let mut pattern = String::with_capacity(component.len());
    for c in component.chars() {
        let c = if c.is_ascii_digit() { '*' } else { c };
        if c != '*' || !pattern.ends_with('*') {
            pattern.push(c);
        }
    }
    pattern
}

/// The pattern of paths that differ only in numbers. A number that is the same in all of them stays.
fn pattern_of(paths: &[Vec<&str>]) -> String {
    let Some((first, others)) = paths.split_first() else { return String::new() };
    let component = |(at, component): (usize, &&str)| {
        let is_same = others.iter().all(|path| path.get(at) == Some(component));
        if is_same { (*component).to_owned() } else { generalized(component) }
    };
    first.iter().enumerate().map(component).collect::<Vec<_>>().join(".")
}

impl AlikeModules {
    pub(super) fn of(table: &ModuleTable, memory: &[NodeMemory]) -> AlikeModules {
        // By module: the number of its pattern. A parent comes before its children.
        let mut patterns: HashMap<(Option<usize>, String), usize> = HashMap::new();
        let mut pattern: Vec<usize> = Vec::with_capacity(memory.len());
        let mut by_key: BTreeMap<(usize, &str), Vec<usize>> = BTreeMap::new();
        for (at, (known, node)) in table.modules().iter().zip(memory).enumerate() {
            let component = match known.parent {
                // Roots have their class instead of a component.
                None => known.class.to_string(),
                // Containers without names of their own are different models, whose modules have nothing in common.
                Some(_) if is_model_of_class(known) && is_container_class(&known.class) => {
                    known.component.text().to_owned()
                }
                Some(_) => generalized(known.component.text()),
            };
            let next = patterns.len();
            pattern.push(*patterns.entry((known.parent.map(|parent| pattern[parent]), component)).or_insert(next));
            let class = if node.class.is_empty() { &*known.class } else { &*node.class };
            if !class.is_empty() && (known.is_current || node.bytes() > 0) {
                by_key.entry((pattern[at], class)).or_default().push(at);
            }
        }
        // A group of containers that are never called is no group.
        by_key.retain(|_, modules| modules.iter().any(|module| !memory[*module].class.is_empty()));
        let mut groups = AlikeModules { of: vec![None; memory.len()], groups: Vec::new() };
        for ((_, class), mut modules) in by_key {
            let paths: Vec<Vec<&str>> = modules.iter().map(|module| table.components(*module)).collect();
            let pattern = pattern_of(&paths);
            modules.sort_by_cached_key(|module| path_key(table, *module));
            for module in &modules {
                groups.of[*module] = Some(groups.groups.len());
            }
            groups.groups.push(AlikeGroup { class: class.to_owned(), pattern, modules });
        }
        groups
    }

    /// The groups of modules with activations, most activations first.
    pub(super) fn repeated(&self, table: &ModuleTable, memory: &[NodeMemory]) -> Vec<RepeatedModules> {
        let mut repeated = Vec::new();
        let mut by_class: BTreeMap<&str, Vec<&AlikeGroup>> = BTreeMap::new();
        for group in &self.groups {
            if group.modules.iter().all(|module| memory[*module].activations() == 0) {
                continue;
            }
            let one = RepeatedModules::of(&[group], &group.modules, table, memory);
            if one.count > 0 && !one.is_leaf && !is_container_class(&group.class) {
                by_class.entry(&group.class).or_default().push(group);
            }
            if one.count >= MIN_REPEATED {
                repeated.push(one);
            }
        }
        // A model can have modules of one class at several places: in an encoder and in a decoder.
        for groups in by_class.into_values().filter(|groups| groups.len() > 1) {
            let mut modules: Vec<usize> = groups.iter().flat_map(|group| group.modules.iter().copied()).collect();
            let all: HashSet<usize> = modules.iter().copied().collect();
            let is_inside = |module: usize| {
                let mut around =
                    std::iter::successors(table.modules()[module].parent, |at| table.modules()[*at].parent);
                around.any(|at| all.contains(&at))
            };
            modules.retain(|module| !is_inside(*module));
            modules.sort_by_cached_key(|module| path_key(table, *module));
            let one = RepeatedModules::of(&groups, &modules, table, memory);
            if one.count >= MIN_REPEATED && one.patterns.len() > 1 {
                repeated.push(one);
            }
        }
        // Of groups with the same activations, the outermost is first.
        repeated.sort_by_cached_key(|one| {
            let depth = one.patterns.iter().map(|pattern| pattern.split('.').count()).min();
            (std::cmp::Reverse(one.activations), depth, one.pattern(), one.class.clone())
        });
        repeated
    }

    /// The lines of a report. A module is divided further if modules inside it that are alike hold at least half of it,
    /// or if one other module inside it does. A root is always divided, into its own memory and its modules.
    pub(super) fn lines(&self, table: &ModuleTable, memory: &[NodeMemory]) -> Vec<ModuleLine> {
        let mut lines = Lines {
            alike: self,
            table,
            memory,
            lines: Vec::new(),
            by_group: BTreeMap::new(),
            listed: HashSet::new(),
            divided: HashSet::new(),
        };
        for root in table.roots().filter(|root| memory[*root].bytes() > 0) {
            lines.add(root, true);
        }
        let Lines { lines, by_group, listed, divided, .. } = lines;
        let is_inside_another = |module: &usize| {
            let mut around = std::iter::successors(table.modules()[*module].parent, |at| table.modules()[*at].parent);
            around.any(|at| listed.contains(&at))
        };
        let groups = by_group.into_iter().map(|(group, bytes)| {
            let AlikeGroup { class, modules, .. } = &self.groups[group];
            let is_whole = |module: &usize| !is_inside_another(module) && !divided.contains(module);
            let modules: Vec<usize> = modules.iter().copied().filter(is_whole).collect();
            let paths: Vec<Vec<&str>> = modules.iter().map(|module| table.components(*module)).collect();
            let class = class.clone();
            ModuleLine { pattern: pattern_of(&paths), class, count: modules.len(), is_own: false, bytes }
        });
        let mut all: Vec<ModuleLine> = lines.into_iter().chain(groups).collect();
        all.sort_by(|a, b| (b.bytes, &a.pattern, &a.class).cmp(&(a.bytes, &b.pattern, &b.class)));
        all
    }
}

/// Sorts paths by the values of their numbers.
fn path_key(table: &ModuleTable, module: usize) -> Vec<(Option<u64>, String)> {
    table.components(module).into_iter().map(|c| (c.parse().ok(), c.to_owned())).collect()
}

impl RepeatedModules {
    /// The given modules of these groups.
    fn of(groups: &[&AlikeGroup], modules: &[usize], table: &ModuleTable, memory: &[NodeMemory]) -> RepeatedModules {
        let mut one = RepeatedModules { total: modules.len(), is_leaf: true, ..RepeatedModules::default() };
        one.class = groups.first().map(|group| group.class.clone()).unwrap_or_default();
        let has_module = |group: &&&AlikeGroup| group.modules.iter().any(|module| modules.contains(module));
        one.patterns = groups.iter().filter(has_module).map(|group| group.pattern.clone()).collect();
        one.patterns.sort_unstable();
        one.path = shared_path(&one.patterns);
        for module in modules {
            let node = &memory[*module];
            let activations = node.activations();
            one.is_leaf &= !table.modules()[*module].calls_others;
            one.modules.push(RepeatedModule {
                path: table.components(*module).join("."),
                activations,
                output: node.output,
                is_checkpointed: node.is_checkpointed,
                is_running: node.is_running,
            });
            if activations == 0 || node.is_checkpointed {
                continue;
            }
            one.count += 1;
            one.activations += activations;
            one.running += if node.is_running { activations } else { 0 };
            one.outputs += node.output;
        }
        if !one.is_leaf && one.count >= MIN_REPEATED {
            one.calls = calls_of(modules, table);
        }
        one
    }
}

/// The calls of these modules and of the modules inside them, with the index of the module.
fn calls_of(modules: &[usize], table: &ModuleTable) -> BTreeMap<ContextId, usize> {
    let mut of: Vec<Option<usize>> = vec![None; table.modules().len()];
    for (index, module) in modules.iter().enumerate() {
        of[*module] = Some(index);
    }
    for (at, known) in table.modules().iter().enumerate() {
        if of[at].is_none() {
            of[at] = known.parent.and_then(|parent| of[parent]);
        }
    }
    table.calls().filter_map(|(call, module)| Some((call, of[module]?))).collect()
}

/// The leading components without numbers that all patterns share.
fn shared_path(patterns: &[String]) -> String {
    let Some((first, others)) = patterns.split_first() else { return String::new() };
    let mut shared: Vec<&str> = first.split('.').take_while(|component| !component.contains('*')).collect();
    for other in others {
        let same = shared.iter().zip(other.split('.')).take_while(|(a, b)| *a == b).count();
        shared.truncate(same);
    }
    // The last component is the module's own, not that of a module around it.
    if shared.len() == first.split('.').count() {
        shared.pop();
    }
    shared.join(".")
}

struct Lines<'a> {
    alike: &'a AlikeModules,
    table: &'a ModuleTable,
    memory: &'a [NodeMemory],
    lines: Vec<ModuleLine>,
    by_group: BTreeMap<usize, u64>,
    /// The modules that lines include with all that is inside them.
    listed: HashSet<usize>,
    /// The modules whose parts have lines of their own.
    divided: HashSet<usize>,
}

impl Lines<'_> {
    fn group(&self, module: usize) -> Option<usize> {
        self.alike.of[module].filter(|group| self.alike.groups[*group].modules.len() >= MIN_REPEATED)
    }

    /// The bytes of the group inside this module that holds the most of it. Groups of generic containers are left out.
    fn largest_group_inside(&self, module: usize) -> u64 {
        let mut bytes: HashMap<usize, u64> = HashMap::new();
        let mut inside: Vec<usize> = self.table.modules()[module].children.values().copied().collect();
        while let Some(at) = inside.pop() {
            if self.memory[at].bytes() == 0 {
                continue;
            }
            let group = self.group(at).filter(|group| !is_container_class(&self.alike.groups[*group].class));
            match group {
                Some(group) => *bytes.entry(group).or_default() += self.memory[at].bytes(),
                None => inside.extend(self.table.modules()[at].children.values()),
            }
        }
        bytes.into_values().max().unwrap_or(0)
    }

    fn line(&mut self, module: usize, bytes: u64, is_own: bool) {
        let components = self.table.components(module);
        let class = self.memory[module].class.clone();
        self.lines.push(ModuleLine { pattern: components.join("."), class, count: 1, is_own, bytes });
    }

    fn add(&mut self, module: usize, is_root: bool) {
        let bytes = self.memory[module].bytes();
        let children: Vec<usize> = self.table.modules()[module].children.values().copied().collect();
        let children: Vec<usize> = children.into_iter().filter(|child| self.memory[*child].bytes() > 0).collect();
        let mut by_class: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for child in &children {
            by_class.entry(&self.memory[*child].class).or_default().push(*child);
        }
        let memory = self.memory;
        let sum = |modules: &[usize]| modules.iter().map(|module| memory[*module].bytes()).sum::<u64>();
        let repeated = by_class.iter().filter(|(class, modules)| !class.is_empty() && modules.len() >= MIN_REPEATED);
        let most_repeated = repeated.map(|(_, modules)| sum(modules)).max().unwrap_or(0);
        let largest = children.iter().map(|child| memory[*child].bytes()).max().unwrap_or(0);
        let inside = largest.max(most_repeated).max(self.largest_group_inside(module));
        if !is_root && inside * 2 < bytes {
            self.listed.insert(module);
            return self.line(module, bytes, false);
        }
        let own = bytes - sum(&children);
        if own > 0 {
            self.line(module, own, !children.is_empty());
        }
        for (class, modules) in by_class {
            // A container, or modules with names of their own such as an encoder and a decoder, say less than the
            // modules that are alike inside them.
            let divides = |lines: &Self, module: usize| {
                (lines.group(module).is_none() || is_container_class(class))
                    && lines.largest_group_inside(module) * 2 >= lines.memory[module].bytes()
            };
            let (divided, whole): (Vec<usize>, Vec<usize>) =
                modules.into_iter().partition(|module| divides(self, *module));
            self.divided.extend(&divided);
            divided.into_iter().for_each(|module| self.add(module, false));
            let (grouped, others): (Vec<usize>, Vec<usize>) =
                whole.into_iter().partition(|module| self.group(*module).is_some());
            for module in grouped {
                if let Some(group) = self.group(module) {
                    *self.by_group.entry(group).or_default() += memory[module].bytes();
                    self.listed.insert(module);
                }
            }
            if class.is_empty() || is_container_class(class) || others.len() < MIN_REPEATED {
                others.into_iter().for_each(|module| self.add(module, false));
                continue;
            }
            let path = self.table.components(module).join(".");
            let pattern = if path.is_empty() { "*".to_owned() } else { format!("{path}.*") };
            let known = self.table.modules()[module].children.values();
            let count = known.filter(|child| memory[**child].class == class && self.group(**child).is_none()).count();
            let bytes = sum(&others);
            self.listed.extend(&others);
            self.lines.push(ModuleLine { pattern, class: class.to_owned(), count, is_own: false, bytes });
        }
    }
}
