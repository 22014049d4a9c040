//! The custom category of a block: the first rule of the user's file that matches it.
//!
//! Every stack, node and module call is matched once, before the events are streamed. A block costs a few table
//! lookups. With rules for tensors or modules, it also costs the lookup of its names.

use std::cell::RefCell;
use std::collections::HashMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::category::BlockAllocation;
use crate::rules::{CustomCategory, CustomField, CustomRules};
use memtrace_replay::{AllocationNames, Contexts, Names};

/// The rules that match, as the number of an entry of [`RuleSets`].
type SetId = u32;
/// The bits of a set of rules.
type Bits = Box<[u64]>;

/// Sets of rules, each stored once.
#[derive(Clone, Debug, Default)]
struct RuleSets {
    all: Vec<Bits>,
    ids: HashMap<Bits, SetId>,
    unions: HashMap<(SetId, SetId), SetId>,
}

impl RuleSets {
    fn id(&mut self, bits: Bits) -> SetId {
        if let Some(id) = self.ids.get(&bits) {
            return *id;
        }
        let id = self.all.len() as SetId;
        self.all.push(bits.clone());
        self.ids.insert(bits, id);
        id
    }

    fn union(&mut self, a: SetId, b: SetId) -> SetId {
        if a == b {
            return a;
        }
        if let Some(id) = self.unions.get(&(a, b)) {
            return *id;
        }
        let bits = self.all[a as usize].iter().zip(&self.all[b as usize]).map(|(a, b)| a | b).collect();
        let id = self.id(bits);
        self.unions.insert((a, b), id);
        id
    }
}

/// Decides custom categories for the blocks of one recording.
#[derive(Debug)]
pub struct CustomCategorizer<'a> {
    rules: &'a CustomRules,
    definitions: &'a Definitions,
    names: &'a Names,
    contexts: Contexts,
    /// By stack, and by context.
    stacks: Vec<SetId>,
    nodes: Vec<SetId>,
    /// By call of a module: the rules that match its class or the class of one of its callers.
    classes: HashMap<ContextId, SetId>,
    /// The classes of named modules, by path.
    classes_of_path: HashMap<&'a str, Vec<&'a str>>,
    /// By field: the rules without an expression for it, which match any content.
    indifferent: [SetId; CustomField::ALL.len()],
    cache: RefCell<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    sets: RuleSets,
    /// By path of a module, alone and with the classes on the way to it.
    paths: HashMap<Box<str>, SetId>,
    named_paths: HashMap<Box<str>, SetId>,
    /// By tensor name.
    tensors: HashMap<Box<str>, SetId>,
}

/// The rule that decided, by its index in [`CustomRules::rules`]. `None`: no rule matches.
pub type DecidingRule = Option<usize>;

impl<'a> CustomCategorizer<'a> {
    /// Makes a categorizer for these rules, and for the definitions and names of a recording.
    pub fn new(rules: &'a CustomRules, definitions: &'a Definitions, names: &'a Names) -> CustomCategorizer<'a> {
        let mut sets = RuleSets::default();
        let indifferent = CustomField::ALL.map(|field| sets.id(texts_match(rules, field, &[])));
        let [any_stack, any_module, _, any_node] = indifferent;
        let mut stacks = vec![any_stack; definitions.stacks.len().max(1)];
        if rules.uses(CustomField::Stack) {
            let of_frame = |id: usize| match definitions.frame(FrameId(id as u32)) {
                Some(frame) => sets.id(texts_match(rules, CustomField::Stack, &[&frame_text(frame)])),
                None => any_stack,
            };
            let frames: Vec<SetId> = (0..definitions.frames.len()).map(of_frame).collect();
            // A parent has a smaller id than its child.
            for (at, node) in definitions.stacks.iter().enumerate().skip(1) {
                let parent = if node.parent.index() < at { stacks[node.parent.index()] } else { any_stack };
                stacks[at] = sets.union(parent, frames.get(node.frame.index()).copied().unwrap_or(any_stack));
            }
        }
        let mut nodes = vec![any_node; definitions.contexts.len().max(1)];
        if rules.uses(CustomField::Node) {
            for (set, context) in nodes.iter_mut().zip(&definitions.contexts) {
                if !context.node.is_empty() {
                    *set = sets.id(texts_match(rules, CustomField::Node, &[&context.node]));
                }
            }
        }
        let (mut classes, mut classes_of_path) = (HashMap::new(), HashMap::<&str, Vec<&str>>::new());
        if rules.uses(CustomField::Module) {
            // A caller has a smaller id than its call.
            for (id, call) in &definitions.nn_calls {
                let caller = classes.get(&call.caller).copied().unwrap_or(any_module);
                let own = sets.id(texts_match(rules, CustomField::Module, &[&call.class]));
                classes.insert(*id, sets.union(caller, own));
            }
            for name in &definitions.nn_names {
                let classes = classes_of_path.entry(&name.name).or_default();
                if !classes.contains(&&*name.class) {
                    classes.push(&name.class);
                }
            }
        }
        CustomCategorizer {
            rules,
            definitions,
            names,
            contexts: Contexts::of(definitions),
            stacks,
            nodes,
            classes,
            classes_of_path,
            indifferent,
            cache: RefCell::new(Cache { sets, ..Cache::default() }),
        }
    }

    /// The rules.
    pub fn rules(&self) -> &'a CustomRules {
        self.rules
    }

    /// The rule that decides about a block.
    #[inline]
    pub fn rule_of(&self, block: &BlockAllocation) -> DecidingRule {
        self.rule_of_allocation(block.site.stack, block.site.event_context, block.seq)
    }

    /// The custom category of a block.
    #[inline]
    pub fn category_of(&self, block: &BlockAllocation) -> CustomCategory {
        self.category(self.rule_of(block))
    }

    /// The name of a block's custom category; `None` if no rule matches.
    pub fn name_of(&self, block: &BlockAllocation) -> Option<&'a str> {
        self.rules.name(self.category_of(block))
    }

    /// The category that a rule gives.
    pub fn category(&self, rule: DecidingRule) -> CustomCategory {
        rule.and_then(|rule| self.rules.rules().get(rule)).map_or(CustomCategory::NONE, |rule| rule.category())
    }

    /// The rule that decides about the block that the event `seq` allocated. `context` is the event's own context.
    pub fn rule_of_allocation(&self, stack: StackId, context: ContextId, seq: u64) -> DecidingRule {
        let [any_stack, any_module, any_tensor, any_node] = self.indifferent;
        // The frames that reports show: those of the forward call if an autograd node allocated the block.
        let node = self.definitions.context(context);
        let shown = node.map(|node| node.forward).filter(|forward| !forward.is_none()).unwrap_or(stack);
        let stack = self.stacks.get(shown.index()).copied().unwrap_or(any_stack);
        let node = self.nodes.get(context.index()).copied().unwrap_or(any_node);
        let cache = &mut *self.cache.borrow_mut();
        let named = self.names.of_allocation(seq);
        let tensor = match named {
            Some(named) if self.rules.uses(CustomField::Tensor) => self.tensor(cache, named),
            _ => any_tensor,
        };
        let module =
            if self.rules.uses(CustomField::Module) { self.module(cache, named, context, seq) } else { any_module };
        let sets = [stack, node, tensor, module].map(|set| &cache.sets.all[set as usize]);
        let words = self.rules.rules().len().div_ceil(64);
        (0..words).find_map(|word| {
            let bits = sets.iter().fold(u64::MAX, |bits, set| bits & set[word]);
            (bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize)
        })
    }

    fn tensor(&self, cache: &mut Cache, named: &AllocationNames) -> SetId {
        let mut set = self.indifferent[CustomField::Tensor as usize];
        for name in &named.names {
            let own = match cache.tensors.get(name) {
                Some(own) => *own,
                None => {
                    let own = cache.sets.id(texts_match(self.rules, CustomField::Tensor, &[name]));
                    cache.tensors.insert(name.clone(), own);
                    own
                }
            };
            set = cache.sets.union(set, own);
        }
        set
    }

    /// A named tensor belongs to the module that holds it, any other block to the module that was being called.
    fn module(&self, cache: &mut Cache, named: Option<&AllocationNames>, context: ContextId, seq: u64) -> SetId {
        let any_module = self.indifferent[CustomField::Module as usize];
        let path = named.filter(|named| named.kind != TensorKind::Other).and_then(|named| {
            let name = named.names.first()?;
            Some(module_of_tensor(named.kind, name))
        });
        if let Some(path) = path {
            return match cache.named_paths.get(path) {
                Some(set) => *set,
                None => {
                    let set = cache.sets.id(texts_match(self.rules, CustomField::Module, &self.on_the_way(path)));
                    cache.named_paths.insert(path.into(), set);
                    set
                }
            };
        }
        let call = self.contexts.module(context);
        let classes = self.classes.get(&call).copied().unwrap_or(any_module);
        let Some(path) = self.names.module_path(context, seq) else { return classes };
        let own = match cache.paths.get(&*path) {
            Some(own) => *own,
            None => {
                let own = cache.sets.id(texts_match(self.rules, CustomField::Module, &[&path]));
                cache.paths.insert(path.into(), own);
                own
            }
        };
        cache.sets.union(classes, own)
    }

    /// A path, and the classes of the modules on the way to it.
    fn on_the_way<'p>(&self, path: &'p str) -> Vec<&'p str>
    where
        'a: 'p,
    {
        let ends = path.match_indices('.').map(|(at, _)| at).chain((!path.is_empty()).then_some(path.len()));
        let parts = std::iter::once("").chain(ends.map(|end| &path[..end]));
        let classes = parts.filter_map(|part| self.classes_of_path.get(part)).flatten().copied();
        classes.chain((!path.is_empty()).then_some(path)).collect()
    }
}

/// The rules that match any of these texts, and those without an expression for the field.
fn texts_match(rules: &CustomRules, field: CustomField, texts: &[&str]) -> Bits {
    let mut bits = vec![0u64; rules.rules().len().div_ceil(64)];
    for (at, rule) in rules.rules().iter().enumerate() {
        let is_match = |expression: &regex_lite::Regex| texts.iter().any(|text| expression.is_match(text));
        if rule.expression(field).is_none_or(is_match) {
            bits[at / 64] |= 1 << (at % 64);
        }
    }
    bits.into()
}

/// The text of a frame that an expression for the stack is matched against: `/home/me/model.py:88 Block.forward`.
/// Without a known line, `libtorch_cuda.so at::native::empty_cuda`.
fn frame_text(frame: &Frame) -> String {
    let name = if frame.qualname.is_empty() { &frame.name } else { &frame.qualname };
    match frame.line {
        0 => format!("{} {name}", frame.filename),
        line => format!("{}:{line} {name}", frame.filename),
    }
}

/// The path of the module that holds a tensor: `blocks.0` for `blocks.0.weight`, `blocks.0.weight.grad` and
/// `Adam.exp_avg of blocks.0.weight`.
fn module_of_tensor(kind: TensorKind, name: &str) -> &str {
    let of = name.rsplit_once(" of ").map_or(name, |(_, of)| of);
    let of = if kind == TensorKind::Gradient { of.strip_suffix(".grad").unwrap_or(of) } else { of };
    of.rsplit_once('.').map_or("", |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::event::{Action, Event};
    use memtrace_trace::file::{Context, NnCall, NnName, StackNode, TensorName};

    fn frame(filename: &str, line: u32, name: &str) -> Frame {
        Frame { name: name.into(), qualname: name.into(), filename: filename.into(), line, ..Frame::default() }
    }

    /// Stacks: 1 main; 2 main > Attention.forward; 3 main > step. Contexts: 1 a call of the model, 2 a call of its
    /// block, 3 a node of the block's call with the forward stack 2. Allocations 2 and 3 have names.
    fn recording() -> MemoryRecording {
        let mut definitions = Definitions {
            frames: vec![
                Frame::default(),
                frame("/home/me/train.py", 5, "main"),
                frame("/home/me/model.py", 88, "Attention.forward"),
                frame("/site-packages/torch/optim/adam.py", 200, "step"),
            ],
            contexts: vec![Context::default(); 4],
            ..Definitions::default()
        };
        for (parent, frame) in [(0, 0), (0, 1), (1, 2), (1, 3)] {
            definitions.stacks.push(StackNode { parent: StackId(parent), frame: FrameId(frame) });
        }
        definitions.contexts[3] = Context { node: "SdpaBackward0".into(), forward: StackId(2), module: ContextId(2) };
        let call = |caller, object, class: &str| NnCall { caller: ContextId(caller), object, class: class.into() };
        definitions.nn_calls.insert(ContextId(1), call(0, 16, "GPT"));
        definitions.nn_calls.insert(ContextId(2), call(1, 32, "Attention"));
        let name = |object, class: &str, name: &str| NnName { object, seq: 1, class: class.into(), name: name.into() };
        definitions.nn_names = vec![name(16, "GPT", ""), name(32, "Attention", "blocks.0.attn")];
        let tensor = |address, kind, name: &str| TensorName {
            address,
            seq: 9,
            kind,
            name: name.into(),
            shape: "float32[2]".into(),
        };
        definitions.tensor_names = vec![
            tensor(0x10000, TensorKind::Parameter, "blocks.0.attn.weight"),
            tensor(0x10200, TensorKind::OptimizerState, "Adam.exp_avg of head.weight"),
        ];
        let event = |seq, action, addr, size| Event { seq, ticks: seq, addr, size, action, device: 0, ..Event::EMPTY };
        let events = vec![
            event(1, Action::SegmentAlloc, 0x10000, 2 << 20),
            event(2, Action::Alloc, 0x10000, 512),
            event(3, Action::Alloc, 0x10200, 512),
            event(9, Action::Alloc, 0x10400, 512),
        ];
        MemoryRecording { definitions, events, ..MemoryRecording::default() }
    }

    /// The names of the categories of (stack, context, seq).
    fn categories(rules: &str, blocks: &[(u32, u32, u64)]) -> Vec<String> {
        let recording = recording();
        let names = Names::of(&recording);
        let rules = CustomRules::parse(&format!("{{\"categories\": [{rules}]}}")).unwrap();
        let categorizer = CustomCategorizer::new(&rules, &recording.definitions, &names);
        let category = |(stack, context, seq): &(u32, u32, u64)| {
            let rule = categorizer.rule_of_allocation(StackId(*stack), ContextId(*context), *seq);
            rules.name(categorizer.category(rule)).unwrap_or("-").to_owned()
        };
        blocks.iter().map(category).collect()
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = r#"{"name": "a", "stack": "model\\.py:8\\d Attention"}, {"name": "b", "stack": "^/home/me/"}"#;
        // The innermost frame; an outer frame; no stack; a node shows its forward call; an undefined stack.
        let blocks = [(2, 0, 7), (3, 0, 7), (0, 0, 7), (3, 3, 7), (0, 3, 7), (99, 0, 7)];
        assert_eq!(categories(rules, &blocks), ["a", "b", "-", "a", "a", "-"]);
    }

    #[test]
    fn a_block_must_match_every_expression_of_a_rule() {
        let rules = r#"{"name": "a", "stack": "model", "node": "^Sdpa"}, {"name": "b", "node": "Backward"},
            {"name": "c", "tensor": "."}"#;
        assert_eq!(categories(rules, &[(2, 0, 7), (2, 3, 7), (1, 0, 2)]), ["-", "a", "c"]);
    }

    #[test]
    fn modules_are_matched_by_their_path_and_by_the_classes_on_the_way() {
        let blocks = [(2, 2, 7), (2, 1, 7), (3, 3, 7), (1, 0, 2), (3, 0, 3), (1, 0, 7)];
        let of = |module: &str| categories(&format!("{{\"name\": \"x\", \"module\": \"{module}\"}}"), &blocks);
        // A call, the call of the model itself, a node, a parameter of the module, a state of another module, plain
        // code.
        assert_eq!(of("attn$"), ["x", "-", "x", "x", "-", "-"]);
        assert_eq!(of("^Attention$"), ["x", "-", "x", "x", "-", "-"]);
        assert_eq!(of("^GPT$"), ["x", "x", "x", "x", "x", "-"]);
        assert_eq!(of("^head$"), ["-", "-", "-", "-", "x", "-"]);
    }

    #[test]
    fn many_rules_have_a_word_each() {
        let mut rules: Vec<String> =
            (0..200).map(|i| format!("{{\"name\": \"n{i}\", \"tensor\": \"^never{i}\"}}")).collect();
        rules.push("{\"name\": \"last\", \"tensor\": \"weight\"}".to_owned());
        assert_eq!(categories(&rules.join(","), &[(1, 0, 2), (1, 0, 7)]), ["last", "-"]);
    }
}
