//! Assigns memory to `nn.Module`s. A block belongs to the module that was being called when the block was allocated, or
//! whose call made the autograd node that allocated it. A block with a parameter's name belongs to the module that
//! holds the parameter. [`super::module_table`] says which module that is.
//!
//! Modules of one class whose paths differ only in numbers are a group: `stages.0.blocks.0` to `stages.3.blocks.2`. The
//! groups are what activation checkpointing can be applied to, and what reports list on one line.

use std::collections::HashMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::ContextId;

use super::category::{BlockAllocation, Category};
use super::composition::{Composition, ModuleKey};
use super::module_groups::{AlikeModules, ModuleLine, RepeatedModules};
use super::module_memory::{Amounts, NodeMemory, add_up};
use super::module_table::ModuleTable;
use super::phase::Phase;
use crate::rules::UserClasses;
use memtrace_replay::{AllocationNames, Contexts, Names};

/// The paths of modules that hold parameters.
#[derive(Clone, Debug, Default)]
pub struct ModulePaths {
    all: Vec<Box<str>>,
    numbers: HashMap<Box<str>, u32>,
}

impl ModulePaths {
    /// The number of the module that holds the named tensor; `None` without a name and for a parameter that no module
    /// holds. The names `blocks.0.fc.weight`, `blocks.0.fc.weight.grad` and `Adam.exp_avg of blocks.0.fc.weight` all
    /// belong to `blocks.0.fc`.
    pub fn number(&mut self, named: &AllocationNames) -> Option<u32> {
        let path = module_path_of(named)?;
        if let Some(number) = self.numbers.get(path) {
            return Some(*number);
        }
        let number = self.all.len() as u32;
        self.all.push(path.into());
        self.numbers.insert(path.into(), number);
        Some(number)
    }
}

/// The path of the module that holds the named tensor, as in [`ModulePaths::number`].
pub fn module_path_of(named: &AllocationNames) -> Option<&str> {
    path_of(named.kind, named.names.first()?)
}

fn path_of(kind: TensorKind, name: &str) -> Option<&str> {
    let of = name.rsplit_once(" of ").map_or(name, |(_, of)| of);
    let of = if kind == TensorKind::Gradient { of.strip_suffix(".grad").unwrap_or(of) } else { of };
    let (module, parameter) = of.rsplit_once('.').unwrap_or(("", of));
    // An optimizer numbers the parameters that belong to no module.
    (!parameter.starts_with("params[")).then_some(module)
}

/// Whether blocks of a category can belong to a module. A workspace belongs to the process, not to the module that
/// first needed it.
fn in_modules(category: Category) -> bool {
    category != Category::Workspace
}

/// The modules of single blocks, by the same rules as in [`ModuleTree`].
#[derive(Debug)]
pub struct BlockModules<'a> {
    table: ModuleTable,
    names: &'a Names,
    contexts: Contexts,
}

/// A module of [`BlockModules`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BlockModule {
    /// The path; empty for a root.
    pub path: String,
    /// The class; empty if it is unknown.
    pub class: String,
}

/// How the module of a block is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ModuleSource {
    /// By the tensor that the block holds.
    Tensor,
    /// By the call that allocated the block, or whose autograd node did. This is the call's context.
    Call(ContextId),
    /// The block belongs to no module.
    None,
}

impl<'a> BlockModules<'a> {
    /// The modules of a recording. Their paths are those of about `at_seq`.
    pub fn of(definitions: &Definitions, names: &'a Names, at_seq: u64) -> BlockModules<'a> {
        let table = ModuleTable::of(definitions, names, at_seq);
        BlockModules { table, names, contexts: Contexts::of(definitions) }
    }

    /// How the module of a block is known.
    pub fn source(&self, block: &BlockAllocation, category: Category) -> ModuleSource {
        if !in_modules(category) {
            ModuleSource::None
        } else if block.proof.is_named() && self.names.of_allocation(block.seq).is_some() {
            ModuleSource::Tensor
        } else {
            match self.contexts.module(block.site.event_context) {
                ContextId::NONE => ModuleSource::None,
                call => ModuleSource::Call(call),
            }
        }
    }

    /// The module of a call.
    pub fn called(&self, call: ContextId) -> Option<BlockModule> {
        self.table.called(call).map(|module| self.module(module))
    }

    /// The module that holds a named tensor.
    pub fn holder(&mut self, named: &AllocationNames) -> Option<BlockModule> {
        let module = self.table.owner(module_path_of(named)?);
        Some(self.module(module))
    }

    fn module(&self, module: usize) -> BlockModule {
        let class = self.table.modules()[module].class.to_string();
        BlockModule { path: self.table.components(module).join("."), class }
    }
}

/// One module and its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleMemory {
    /// The path; empty for a root.
    pub path: String,
    /// The class; empty if the module was never called and holds no memory of its own, as a `ModuleList`.
    pub class: String,
    /// The number of levels below its root; 0 for the root.
    pub depth: usize,
    /// The memory of the module and of all modules inside it, by category.
    pub whole: Amounts,
    /// The memory of the module alone, by category.
    pub own: Amounts,
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

/// Memory by module at one point in time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModuleTree {
    /// The modules with memory. A parent comes before its children, children are ordered by path, and roots have depth
    /// 0.
    pub modules: Vec<ModuleMemory>,
    /// Groups of modules of one class that have activations, most activations first. Groups can overlap: the modules of
    /// one can be inside the modules of another.
    pub repeated: Vec<RepeatedModules>,
    /// The lines of a report: the memory of all modules, each counted once. Most bytes first.
    pub lines: Vec<ModuleLine>,
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
        let classes = UserClasses::of(definitions);
        let mut table = ModuleTable::of(definitions, names, composition.seq);
        let mut memory: Vec<NodeMemory> = Vec::new();
        let of_modules = composition.modules().filter(|(_, category, _)| in_modules(*category));
        let mut parts: Vec<_> = of_modules.collect();
        parts.sort_unstable_by_key(|(module, category, _)| (*module, *category));
        for (key, category, part) in parts {
            let module = match key {
                ModuleKey::Path(number) => Some(table.owner(paths.all.get(number as usize).map_or("", |path| path))),
                ModuleKey::Call(id) => table.called(id),
            };
            let Some(module) = module else { continue };
            if memory.len() < table.modules().len() {
                memory.resize(table.modules().len(), NodeMemory::default());
            }
            let node = &mut memory[module];
            node.add(category, &part.amount);
            let ModuleKey::Call(id) = key else { continue };
            if let Some(call) = definitions.nn_calls.get(&id) {
                node.class = classes.name(&call.class).to_owned();
            }
            if category == Category::Activation {
                node.add_activations(part);
            }
        }
        memory.resize(table.modules().len(), NodeMemory::default());
        let running = table.called(contexts.module(composition.allocated_at.1));
        if let Some(running) = running.filter(|_| composition.phase != Phase::Forward) {
            memory[running].is_running = true;
        }
        add_up(&table, &mut memory);
        let alike = AlikeModules::of(&table, &memory);
        let mut tree = ModuleTree {
            repeated: alike.repeated(&table, &memory),
            lines: alike.lines(&table, &memory),
            ..ModuleTree::default()
        };
        for root in table.roots() {
            tree.add_subtree(&table, &memory, root, 0);
        }
        tree
    }

    /// Adds a module with memory and the modules inside it.
    fn add_subtree(&mut self, table: &ModuleTable, memory: &[NodeMemory], module: usize, depth: usize) {
        let node = &memory[module];
        if node.bytes() == 0 {
            return;
        }
        self.modules.push(ModuleMemory {
            path: table.components(module).join("."),
            class: node.class.clone(),
            depth,
            whole: node.whole,
            own: node.own,
        });
        for child in table.modules()[module].children.values() {
            self.add_subtree(table, memory, *child, depth + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{NnCall, NnName};
    use memtrace_trace::ids::ContextId;

    use super::*;
    use memtrace_input::MemoryRecording;

    const AT: u64 = 1000;

    /// The calls and names of a program's modules, and the blocks at one point in time.
    #[derive(Default)]
    struct Program {
        definitions: Definitions,
        composition: Composition,
        paths: ModulePaths,
    }

    impl Program {
        fn name(&mut self, object: u64, seq: u64, class: &str, name: &str) {
            self.definitions.nn_names.push(NnName { object, seq, class: class.into(), name: name.into() });
        }

        fn call(&mut self, caller: ContextId, object: u64, class: &str) -> ContextId {
            let id = ContextId(self.definitions.nn_calls.len() as u32 + 1);
            self.definitions.nn_calls.insert(id, NnCall { caller, object, class: class.into() });
            id
        }

        fn activations(&mut self, call: ContextId, bytes: u64) {
            let seq = self.composition.usage.allocated + 1;
            self.composition.add_to_module(ModuleKey::Call(call), Category::Activation, bytes, seq, false);
            self.composition.usage.allocated += bytes;
        }

        fn parameter(&mut self, name: &str, bytes: u64) {
            let kind = TensorKind::Parameter;
            let named = AllocationNames { kind, names: vec![name.into()], shape: "".into() };
            let path = ModuleKey::Path(self.paths.number(&named).unwrap());
            self.composition.add_to_module(path, Category::Parameter, bytes, 1, false);
            self.composition.usage.allocated += bytes;
        }

        fn tree(mut self) -> ModuleTree {
            self.composition.seq = AT;
            let definitions = self.definitions.clone();
            let names = Names::of(&MemoryRecording { definitions, ..MemoryRecording::default() });
            let contexts = Contexts::of(&self.definitions);
            ModuleTree::of(&self.composition, &self.paths, &self.definitions, &names, &contexts)
        }
    }

    fn lines(tree: &ModuleTree) -> Vec<(String, usize, u64)> {
        let text = |line: &ModuleLine| format!("{}:{}", line.pattern, line.class);
        tree.lines.iter().map(|line| (text(line), line.count, line.bytes)).collect()
    }

    fn groups(tree: &ModuleTree) -> Vec<(String, usize, u64)> {
        tree.repeated.iter().map(|group| (group.text(), group.modules.len(), group.activations)).collect()
    }

    /// A model with six blocks, four of which were called. Only their layers allocate.
    #[test]
    fn callers_without_blocks_have_a_class_and_the_group_knows_all_its_modules() {
        let mut p = Program::default();
        p.name(0xa0, 10, "GPT", "");
        p.name(0xa1, 10, "ModuleList", "blocks");
        let gpt = p.call(ContextId::NONE, 0xa0, "GPT");
        let mut layers = Vec::new();
        for block in 0..6 {
            p.name(0x100 + block, 10, "Block", &format!("blocks.{block}"));
            p.name(0x200 + block, 10, "Linear", &format!("blocks.{block}.fc"));
        }
        for block in 0..4 {
            let of = p.call(gpt, 0x100 + block, "Block");
            layers.push(p.call(of, 0x200 + block, "Linear"));
        }
        layers.iter().for_each(|layer| p.activations(*layer, 10));
        let tree = p.tree();
        let block = tree.modules.iter().find(|module| module.path == "blocks.2").unwrap();
        assert_eq!((&*block.class, block.depth, block.bytes()), ("Block", 2, 10));
        let text = |text: &str| text.to_owned();
        assert_eq!(
            groups(&tree),
            [
                (text("blocks.* (6 of Block, 4 with activations)"), 6, 40),
                (text("blocks.*.fc (6 of Linear, 4 with activations)"), 6, 40)
            ]
        );
        let [blocks, layers_alike] = &tree.repeated[..] else { panic!("{:?}", tree.repeated) };
        assert_eq!((blocks.is_leaf, layers_alike.is_leaf), (false, true));
        assert_eq!((blocks.path.as_str(), blocks.count, blocks.total), ("blocks", 4, 6));
        assert_eq!(blocks.calls.get(&layers[3]), Some(&3), "the call of a layer belongs to its block");
        assert_eq!(blocks.calls.get(&gpt), None);
        assert_eq!(lines(&tree), [(text("blocks.*:Block"), 6, 40)]);
    }

    #[test]
    fn modules_of_one_class_in_nested_containers_are_one_group() {
        let mut p = Program::default();
        p.name(0xa0, 10, "Net", "");
        p.name(0xa1, 10, "ModuleList", "stages");
        let net = p.call(ContextId::NONE, 0xa0, "Net");
        for (stage, depth) in [3, 3, 9, 3].into_iter().enumerate() {
            let object = 0x1000 * (1 + stage as u64);
            p.name(object, 10, "Stage", &format!("stages.{stage}"));
            p.name(object + 1, 10, "Sequential", &format!("stages.{stage}.blocks"));
            let stage_call = p.call(net, object, "Stage");
            let blocks = p.call(stage_call, object + 1, "Sequential");
            for block in 0..depth {
                let object = object + 0x10 + block;
                p.name(object, 10, "Block", &format!("stages.{stage}.blocks.{block}"));
                let call = p.call(blocks, object, "Block");
                p.name(object + 0x100, 10, "Conv2d", &format!("stages.{stage}.blocks.{block}.conv"));
                let inner = p.call(call, object + 0x100, "Conv2d");
                p.activations(inner, 7);
                p.activations(call, 3);
            }
        }
        let tree = p.tree();
        let texts: Vec<String> = tree.repeated.iter().map(RepeatedModules::text).collect();
        assert_eq!(
            texts,
            [
                "stages.* (4 of Stage)",
                "stages.*.blocks (4 of Sequential)",
                "stages.*.blocks.* (18 of Block)",
                "stages.*.blocks.*.conv (18 of Conv2d)"
            ]
        );
        let blocks = &tree.repeated[2];
        assert_eq!((blocks.activations, blocks.outputs, blocks.checkpointing_saves()), (180, 54, 126));
        assert_eq!(blocks.modules[6].path, "stages.2.blocks.0");
        assert_eq!(lines(&tree), [("stages.*:Stage".to_owned(), 4, 180)]);
    }

    /// The blocks of an encoder and of a decoder can be checkpointed together.
    #[test]
    fn modules_of_one_class_at_two_places() {
        let mut p = Program::default();
        p.name(0xa0, 10, "T", "");
        let model = p.call(ContextId::NONE, 0xa0, "T");
        for (at, part) in ["encoder", "decoder"].into_iter().enumerate() {
            let object = 0x1000 * (1 + at as u64);
            p.name(object, 10, "Stack", part);
            let stack = p.call(model, object, "Stack");
            for block in 0..3 {
                p.name(object + 0x10 + block, 10, "Block", &format!("{part}.block.{block}"));
                p.name(object + 0x20 + block, 10, "Linear", &format!("{part}.block.{block}.fc"));
                let call = p.call(stack, object + 0x10 + block, "Block");
                let fc = p.call(call, object + 0x20 + block, "Linear");
                p.activations(fc, 5 + at as u64);
            }
        }
        let tree = p.tree();
        assert_eq!(tree.repeated[0].text(), "decoder, encoder (2 of Stack)");
        let both = &tree.repeated[1];
        assert_eq!((both.text().as_str(), both.activations), ("decoder.block.*, encoder.block.* (6 of Block)", 33));
        assert_eq!(
            lines(&tree),
            [("decoder.block.*:Block".to_owned(), 3, 18), ("encoder.block.*:Block".to_owned(), 3, 15)]
        );
    }

    /// A wrapper calls the model in training, evaluation calls it directly, and a checkpoint calls its blocks.
    #[test]
    fn a_module_has_one_root_whatever_calls_it() {
        let mut p = Program::default();
        p.name(0xd0, 10, "DistributedDataParallel", "");
        p.name(0xa0, 10, "Net", "module");
        p.name(0xb0, 10, "Block", "module.blocks.0");
        p.name(0xb1, 10, "Block", "module.blocks.1");
        let evaluated = p.call(ContextId::NONE, 0xa0, "Net");
        let recomputed = p.call(ContextId::NONE, 0xb0, "Block");
        let wrapper = p.call(ContextId::NONE, 0xd0, "DistributedDataParallel");
        let net = p.call(wrapper, 0xa0, "Net");
        let blocks = [p.call(net, 0xb0, "Block"), p.call(net, 0xb1, "Block")];
        let in_evaluation = p.call(evaluated, 0xb1, "Block");
        for call in [recomputed, in_evaluation, blocks[0], blocks[1]] {
            p.activations(call, 10);
        }
        p.parameter("module.blocks.1.weight", 4);
        let tree = p.tree();
        let found: Vec<(&str, &str, u64)> =
            tree.modules.iter().map(|module| (&*module.path, &*module.class, module.bytes())).collect();
        assert_eq!(
            found,
            [
                ("", "DistributedDataParallel", 44),
                ("module", "Net", 44),
                ("module.blocks", "", 44),
                ("module.blocks.0", "Block", 20),
                ("module.blocks.1", "Block", 24)
            ]
        );
    }

    /// At the optimizer's peak only parameters are left, and a model without a call of its own has modules that are
    /// called.
    #[test]
    fn parameters_belong_to_the_model_that_holds_them() {
        let mut p = Program::default();
        p.name(0xa0, 10, "Sequential", "");
        p.name(0xa1, 10, "Linear", "0");
        p.name(0xa2, 10, "Tanh", "1");
        p.name(0xa3, 10, "Linear", "2");
        // A loss has a name of its own.
        p.name(0xf0, 10, "MSELoss", "");
        let model = p.call(ContextId::NONE, 0xa0, "Sequential");
        for (object, class) in [(0xa1, "Linear"), (0xa2, "Tanh"), (0xa3, "Linear")] {
            p.call(model, object, class);
        }
        p.call(ContextId::NONE, 0xf0, "MSELoss");
        for name in ["0.weight", "2.weight", "2.bias"] {
            p.parameter(name, 8);
        }
        let tree = p.tree();
        assert_eq!((&*tree.modules[0].class, tree.modules[0].bytes()), ("Sequential", 24));
        assert_eq!(lines(&tree), [("*:Linear".to_owned(), 2, 24)]);
        let number = |name: &str| {
            let kind = TensorKind::Parameter;
            ModulePaths::default().number(&AllocationNames { kind, names: vec![name.into()], shape: "".into() })
        };
        assert_eq!(number("SGD.params[3]"), None, "a tensor that no module holds");

        let mut p = Program::default();
        p.name(0xa0, 10, "LitModel", "");
        p.name(0xa1, 10, "Encoder", "encoder");
        p.name(0xa2, 10, "Decoder", "decoder");
        let encoder = p.call(ContextId::NONE, 0xa1, "Encoder");
        let decoder = p.call(ContextId::NONE, 0xa2, "Decoder");
        p.activations(encoder, 3);
        p.activations(decoder, 2);
        let tree = p.tree();
        let found: Vec<(&str, &str)> = tree.modules.iter().map(|m| (&*m.path, &*m.class)).collect();
        assert_eq!(found, [("", "LitModel"), ("decoder", "Decoder"), ("encoder", "Encoder")]);
    }

    /// Two models with the same parameter names have their class as prefix.
    #[test]
    fn models_with_a_name_of_their_own_are_roots() {
        let mut p = Program::default();
        p.name(0xf0, 10, "BCELoss", "");
        for (object, class) in [(0xa0, "Generator"), (0xb0, "Critic")] {
            p.name(object, 10, class, class);
            let model = p.call(ContextId::NONE, object, class);
            for at in 0..2 {
                p.name(object + 1 + at, 10, "Conv2d", &format!("{class}.main.{at}"));
                let conv = p.call(model, object + 1 + at, "Conv2d");
                p.activations(conv, 10);
            }
        }
        let loss = p.call(ContextId::NONE, 0xf0, "BCELoss");
        p.activations(loss, 1);
        let tree = p.tree();
        let roots = tree.modules.iter().filter(|module| module.depth == 0);
        let roots: Vec<(&str, u64)> = roots.map(|root| (&*root.class, root.bytes())).collect();
        assert_eq!(roots, [("BCELoss", 1), ("Critic", 20), ("Generator", 20)]);
        let expected = [("Critic.main.*:Conv2d", 2, 20), ("Generator.main.*:Conv2d", 2, 20), (":BCELoss", 1, 1)];
        assert_eq!(lines(&tree), expected.map(|(text, count, bytes)| (text.to_owned(), count, bytes)));
    }

    /// A sweep over depths: the second model replaces the first one.
    #[test]
    fn modules_of_a_replaced_model_do_not_count() {
        let mut p = Program::default();
        for (from, depth, seq) in [(0x1000, 6, 10), (0x2000, 3, 500)] {
            p.name(from, seq, "Net", "");
            p.name(from + 1, seq, "ModuleList", "blocks");
            let net = p.call(ContextId::NONE, from, "Net");
            for block in 0..depth {
                p.name(from + 2 + block, seq, "Block", &format!("blocks.{block}"));
                let call = p.call(net, from + 2 + block, "Block");
                if seq == 500 && block < 2 {
                    p.activations(call, 10);
                }
            }
        }
        let tree = p.tree();
        assert_eq!(tree.repeated[0].text(), "blocks.* (3 of Block, 2 with activations)");
    }

    /// A line does not count modules that belong to another line.
    #[test]
    fn groups_that_are_partly_inside_others() {
        let mut p = Program::default();
        p.name(0xa0, 10, "UNet", "");
        let unet = p.call(ContextId::NONE, 0xa0, "UNet");
        for (at, class) in ["Down", "AttentionDown", "AttentionDown"].into_iter().enumerate() {
            let object = 0x1000 * (1 + at as u64);
            p.name(object, 10, class, &format!("down.{at}"));
            let down = p.call(unet, object, class);
            for block in 0..2 {
                p.name(object + 1 + block, 10, "Resnet", &format!("down.{at}.resnets.{block}"));
                let resnet = p.call(down, object + 1 + block, "Resnet");
                p.activations(resnet, 10);
            }
        }
        let tree = p.tree();
        assert_eq!(
            lines(&tree),
            [("down.*:AttentionDown".to_owned(), 2, 40), ("down.0.resnets.*:Resnet".to_owned(), 2, 20)]
        );
        assert_eq!(tree.repeated[0].text(), "down.*.resnets.* (6 of Resnet)");
    }

    /// Two containers without names of their own: an embedding with a layer, and a layer with another.
    #[test]
    fn models_named_after_a_container_class_are_divided_each_for_itself() {
        let mut p = Program::default();
        for (model, class, inner) in [(1u64, "Linear", "Linear"), (2, "Embedding", "Linear")] {
            let name = format!("Sequential#{model}");
            p.name(model << 8, 10, "Sequential", &name);
            p.name(model << 8 | 1, 10, class, &format!("{name}.0"));
            p.name(model << 8 | 2, 10, inner, &format!("{name}.1"));
            let root = p.call(ContextId::NONE, model << 8, "Sequential");
            p.call(root, model << 8 | 1, class);
            p.call(root, model << 8 | 2, inner);
        }
        p.parameter("Sequential#1.0.weight", 4);
        p.parameter("Sequential#1.1.weight", 31);
        p.parameter("Sequential#2.0.weight", 32);
        p.parameter("Sequential#2.1.weight", 4);
        let expected =
            [("Sequential#2.0:Embedding", 1, 32), ("Sequential#1.*:Linear", 2, 35), ("Sequential#2.1:Linear", 1, 4)];
        let mut expected: Vec<_> = expected.map(|(text, count, bytes)| (text.to_owned(), count, bytes)).into();
        expected.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes));
        assert_eq!(lines(&p.tree()), expected);
    }

    /// torch.compile, FSDP and checkpoint_wrapper can wrap each block.
    #[test]
    fn wrappers_of_blocks_have_the_class_of_what_they_wrap() {
        let mut p = Program::default();
        p.name(0xa0, 10, "Net", "");
        let net = p.call(ContextId::NONE, 0xa0, "Net");
        for block in 0..3 {
            let (outer, inner) = (0x100 + block, 0x200 + block);
            p.name(outer, 10, "OptimizedModule", &format!("blocks.{block}"));
            p.name(inner, 10, "Block", &format!("blocks.{block}._orig_mod"));
            let call = p.call(net, outer, "OptimizedModule");
            let call = p.call(call, inner, "Block");
            p.activations(call, 10);
        }
        let tree = p.tree();
        assert_eq!(tree.repeated[0].text(), "blocks.* (3 of Block)");
        assert_eq!(lines(&tree), [("blocks.*:Block".to_owned(), 3, 30)]);
    }

    #[test]
    fn calls_without_names_have_the_classes_of_their_callers() {
        let mut p = Program::default();
        let model = p.call(ContextId::NONE, 0xa0, "Net");
        let block = p.call(model, 0xa1, "Block");
        let other = p.call(model, 0xa2, "Block");
        p.activations(block, 10);
        p.activations(other, 10);
        let tree = p.tree();
        let found: Vec<(&str, &str, u64)> = tree.modules.iter().map(|m| (&*m.path, &*m.class, m.bytes())).collect();
        assert_eq!(found, [("", "Net", 20), ("Block", "Block", 20)]);
    }
}
