//! The tables that the blocks of a page refer to: strings, frames, stacks, allocation sites and tensor names. They grow
//! with distinct stacks and names, never with events.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, Hash, RandomState};

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{ContextId, FrameId, StackId};
use serde_json::{Value, json};

use crate::flame_graph::attributed_stack;
use crate::sources::SourceFiles;
use memtrace_input::{AddressBuildHasher, printable};
use memtrace_insight::passes::{
    BlockAllocation, BlockClassification, BlockModule, BlockModules, CustomCategorizer, ModuleSource, private_pool_text,
};
use memtrace_insight::rules::{CustomCategory, CustomRules};
use memtrace_replay::Names;

/// The properties that distinguish allocation sites: stack, autograd node, call of the module if that decides,
/// category, phase, custom category, private pool if the category distinguishes pools.
type SiteKey = (StackId, ContextId, Option<ContextId>, u8, u8, CustomCategory, u16);

/// The maximum number of source files in a page.
const MAX_SOURCES: usize = 64;
/// How many lines before and after a line in a stack are quoted.
const NEAR: usize = 8;
/// The maximum length of a quoted line in characters.
const MAX_LINE: usize = 400;
/// Flags of a frame.
const NATIVE: u8 = 1;
const LIBRARY: u8 = 2;

/// Rows that are numbered in the order in which they are added. Each key has one row.
struct Rows<K, R, S = RandomState> {
    numbers: HashMap<K, usize, S>,
    all: Vec<R>,
}

impl<K, R, S: Default> Default for Rows<K, R, S> {
    fn default() -> Rows<K, R, S> {
        Rows { numbers: HashMap::default(), all: Vec::new() }
    }
}

impl<K: Eq + Hash, R, S: BuildHasher> Rows<K, R, S> {
    fn number<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<usize>
    where
        K: Borrow<Q>,
    {
        self.numbers.get(key).copied()
    }

    /// Adds the row of a new key. Returns its number.
    fn add(&mut self, key: K, row: R) -> usize {
        let number = self.all.len();
        self.all.push(row);
        self.numbers.insert(key, number);
        number
    }
}

/// The prefix tree of stacks.
#[derive(Default)]
struct StackTree {
    /// The caller's node plus one, and the frame. 0 is the empty stack.
    nodes: Rows<(usize, usize), (usize, usize)>,
    /// By stack: its node plus one.
    by_id: HashMap<StackId, usize, AddressBuildHasher>,
}

/// The names of the user's categories.
struct CustomNames<'a> {
    categorizer: Option<CustomCategorizer<'a>>,
    /// By category: the number of its name.
    numbers: Vec<usize>,
}

/// The name and the shape of tensors, and whether the name decides the module.
type TensorKey = (Box<str>, Box<str>, bool);

/// Collects what blocks refer to, and numbers it.
pub(super) struct Dictionary<'a> {
    definitions: &'a Definitions,
    names: &'a Names,
    is_library: &'a dyn Fn(&Frame) -> bool,
    strings: Rows<Box<str>, Box<str>>,
    frames: Rows<FrameId, Value, AddressBuildHasher>,
    /// The program's own lines in stacks: by the number of the file's name, the name and the lines.
    own_lines: BTreeMap<usize, (Box<str>, BTreeSet<u32>)>,
    stacks: StackTree,
    sites: Rows<SiteKey, [usize; 7], AddressBuildHasher>,
    custom: CustomNames<'a>,
    modules: BlockModules<'a>,
    /// By call: the module plus one, 0 without one.
    called: HashMap<ContextId, usize, AddressBuildHasher>,
    tensors: Rows<TensorKey, [usize; 3]>,
}

impl<'a> Dictionary<'a> {
    pub(super) fn new(
        definitions: &'a Definitions,
        names: &'a Names,
        modules: BlockModules<'a>,
        is_library: &'a dyn Fn(&Frame) -> bool,
        custom_rules: Option<&'a CustomRules>,
    ) -> Dictionary<'a> {
        let mut dictionary = Dictionary {
            definitions,
            names,
            is_library,
            strings: Rows::default(),
            frames: Rows::default(),
            own_lines: BTreeMap::new(),
            stacks: StackTree::default(),
            sites: Rows::default(),
            custom: CustomNames {
                categorizer: custom_rules.map(|rules| CustomCategorizer::new(rules, definitions, names)),
                numbers: Vec::new(),
            },
            modules,
            called: HashMap::default(),
            tensors: Rows::default(),
        };
        for (_, name) in custom_rules.iter().flat_map(|rules| rules.categories()) {
            let name = dictionary.string(name);
            dictionary.custom.numbers.push(name);
        }
        dictionary
    }

    /// The number of a text, made printable.
    pub(super) fn string(&mut self, text: &str) -> usize {
        let text = printable::line(text);
        self.strings.number(&*text).unwrap_or_else(|| self.strings.add((&*text).into(), (&*text).into()))
    }

    fn frame(&mut self, id: FrameId) -> Option<usize> {
        if let Some(number) = self.frames.number(&id) {
            return Some(number);
        }
        let frame = self.definitions.frame(id)?;
        let flags = if frame.native { NATIVE } else { 0 } | if (self.is_library)(frame) { LIBRARY } else { 0 };
        let (name, file, line) = (self.string(&frame.name), self.string(&frame.filename), frame.line);
        if flags == 0 {
            self.own_lines.entry(file).or_insert_with(|| (frame.filename.clone(), BTreeSet::new())).1.insert(line);
        }
        Some(self.frames.add(id, json!([name, file, line, flags])))
    }

    /// The node of a stack plus one; 0 without known frames.
    fn stack(&mut self, stack: StackId) -> usize {
        let mut below: Vec<(StackId, FrameId)> = Vec::new();
        let mut at = 0;
        let definitions = self.definitions;
        for (id, frame) in definitions.walk_ids(stack) {
            if below.last().is_none_or(|(last, _)| *last != id)
                && let Some(node) = self.stacks.by_id.get(&id)
            {
                at = *node;
                break;
            }
            below.push((id, frame));
        }
        while let Some((id, frame)) = below.pop() {
            if let Some(frame) = self.frame(frame) {
                let (nodes, key) = (&mut self.stacks.nodes, (at, frame));
                at = nodes.number(&key).unwrap_or_else(|| nodes.add(key, key)) + 1;
            }
            // Frames that were inlined into one share its stack; the innermost is the last.
            if below.last().is_none_or(|(next, _)| *next != id) {
                self.stacks.by_id.insert(id, at);
            }
        }
        at
    }

    /// The number of a module's text plus one: its path, or `/` and the class of a model itself. 0 without a module.
    fn module(&mut self, module: Option<BlockModule>) -> usize {
        let text = module.map(|one| if one.path.is_empty() { format!("/{}", one.class) } else { one.path });
        text.map_or(0, |text| 1 + self.string(&text))
    }

    /// The number of the site that allocated a block. `phase` is the number of its phase, or of a server's stage.
    pub(super) fn site(
        &mut self,
        block: &BlockAllocation,
        classification: &BlockClassification,
        phase: usize,
    ) -> usize {
        let category = classification.category;
        let call = match self.modules.source(block, category) {
            ModuleSource::Call(call) => Some(call),
            ModuleSource::Tensor | ModuleSource::None => None,
        };
        let categorizer = self.custom.categorizer.as_ref();
        let custom = categorizer.map(|categorizer| categorizer.category_of(block)).unwrap_or_default();
        let pool = block.private_pool(category);
        let key = (block.site.stack, block.site.context, call, category as u8, phase as u8, custom, pool);
        if let Some(site) = self.sites.number(&key) {
            return site;
        }
        let stack = self.stack(attributed_stack(self.definitions, block.site.stack, block.site.context));
        let node = self.definitions.context(block.site.context).map(|context| context.node.clone());
        let node = node.map_or(0, |node| 1 + self.string(&node));
        let module = call.map_or(0, |call| self.called(call));
        let custom = custom.number().map_or(0, |number| 1 + number);
        let pool = private_pool_text(self.definitions, pool).map_or(0, |text| 1 + self.string(&text));
        self.sites.add(key, [stack, node, module, category as usize, phase, custom, pool])
    }

    fn called(&mut self, call: ContextId) -> usize {
        if let Some(module) = self.called.get(&call) {
            return *module;
        }
        let module = self.modules.called(call);
        let module = self.module(module);
        self.called.insert(call, module);
        module
    }

    /// The number of the tensors in a block plus one; 0 if none is known.
    pub(super) fn tensor(&mut self, block: &BlockAllocation, classification: &BlockClassification) -> usize {
        let Some(named) = self.names.of_allocation(block.seq) else { return 0 };
        let decides = self.modules.source(block, classification.category) == ModuleSource::Tensor;
        let key = (named.text().into_boxed_str(), named.shape.clone(), decides);
        if let Some(tensor) = self.tensors.number(&key) {
            return tensor + 1;
        }
        let module = if decides { self.modules.holder(named) } else { None };
        let module = self.module(module);
        let row = [self.string(&key.0), self.string(&key.1), module];
        self.tensors.add(key, row) + 1
    }

    /// The program's own source lines near those that allocate: by file, ranges of lines with the first line's number.
    pub(super) fn sources(&self, files: &mut SourceFiles) -> Value {
        let mut quoted = Vec::new();
        for (number, (file, lines)) in self.own_lines.iter().take(MAX_SOURCES) {
            let Ok(text) = files.lines(file) else { continue };
            let mut ranges: Vec<(usize, usize)> = Vec::new();
            for line in lines {
                let line = *line as usize;
                let (from, to) = (line.saturating_sub(NEAR).max(1), (line + NEAR).min(text.len()));
                match ranges.last_mut() {
                    Some((_, end)) if from <= *end + 1 => *end = to.max(*end),
                    _ if from <= to => ranges.push((from, to)),
                    _ => {}
                }
            }
            let lines = |(from, to): &(usize, usize)| {
                let lines = text.get(from - 1..*to).unwrap_or_default();
                let cut = |line: &String| printable::line(line).chars().take(MAX_LINE).collect::<String>();
                json!([from, lines.iter().map(cut).collect::<Vec<_>>()])
            };
            quoted.push(json!([number, ranges.iter().map(lines).collect::<Vec<_>>()]));
        }
        quoted.into()
    }

    /// The tables as JSON. `web/src/data/model.ts` has their types.
    pub(super) fn json(&self) -> Value {
        let column = |at: usize| self.sites.all.iter().map(|row| row[at]).collect::<Vec<_>>();
        json!({
            "strings": self.strings.all,
            "frames": self.frames.all,
            "callers": self.stacks.nodes.all.iter().map(|(caller, _)| caller).collect::<Vec<_>>(),
            "calls": self.stacks.nodes.all.iter().map(|(_, frame)| frame).collect::<Vec<_>>(),
            "sites": {
                "stack": column(0), "node": column(1), "module": column(2), "category": column(3), "phase": column(4),
                // The number of the custom category plus one; 0 if no rule matches.
                "custom": column(5),
                // The number of the private pool's id plus one; 0 without one.
                "pool": column(6),
            },
            "custom_categories": self.custom.numbers,
            "tensors": self.tensors.all,
        })
    }
}
