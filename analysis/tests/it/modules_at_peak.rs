//! The peak by `nn.Module`, and the savings of checkpointing repeated modules, on a program whose figures are all
//! known.

use crate::training::{MIB, Program};
use memtrace_analysis::ToText;
use memtrace_analysis::load::Run;
use memtrace_analysis::model::Names;
use memtrace_analysis::passes::Category;
use memtrace_analysis::report::{DeviceSummary, MemoryState, ModuleSummary, TextOptions};
use memtrace_analysis::rules::RuleId;
use memtrace_analysis::summarize;
use memtrace_trace::event::Flags;
use memtrace_trace::file::{Context, NnCall, NnName};
use memtrace_trace::ids::{ContextId, StackId};

const MODULE: &str = "/site-packages/torch/nn/modules/module.py";
const LINEAR: &str = "/site-packages/torch/nn/modules/linear.py";
const CHECKPOINT: &str = "/site-packages/torch/utils/checkpoint.py";

/// The calls of a model with four blocks, each with a linear layer, and a head.
struct Model {
    root: ContextId,
    blocks: Vec<(ContextId, ContextId)>,
    head: ContextId,
}

/// Adds a call of the module with this path.
fn call(p: &mut Program, caller: ContextId, class: &str, path: &str) -> ContextId {
    let definitions = &mut p.recording.definitions;
    definitions.contexts.push(Context::default());
    let id = ContextId(definitions.contexts.len() as u32 - 1);
    let object = 0x1000 * u64::from(id.0);
    definitions.nn_calls.insert(id, NnCall { caller, object, class: class.into() });
    definitions.nn_names.push(NnName { object, seq: 1, class: class.into(), name: path.into() });
    id
}

fn model(p: &mut Program) -> Model {
    let root = call(p, ContextId::NONE, "GPT", "");
    let blocks = (0..4)
        .map(|i| {
            let block = call(p, root, "Block", &format!("blocks.{i}"));
            (block, call(p, block, "Linear", &format!("blocks.{i}.fc")))
        })
        .collect();
    Model { root, blocks, head: call(p, root, "Linear", "head") }
}

/// Adds an allocation in the call of a module. It belongs to the forward pass although it has a context.
fn alloc_in_call(p: &mut Program, size: u64, stack: StackId, call: ContextId) -> u64 {
    let addr = p.alloc_in(size, stack, call);
    p.recording.events.iter_mut().rev().take(2).for_each(|e| {
        e.flags = Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED);
    });
    addr
}

/// The forward pass of block `i` keeps `4 + i` MiB of its layer and 2 MiB of its own, which is its output. The peak is
/// 3 MiB higher, in the backward pass of the head. With `checkpointed`, the blocks run under activation checkpointing.
fn trained(checkpointed: bool) -> (Program, Vec<ContextId>) {
    let mut p = Program::new();
    let s = crate::training::stacks(&mut p);
    let model = model(&mut p);
    let node = |p: &mut Program, module: ContextId| {
        let forward = s.forward;
        p.recording.definitions.contexts.push(Context { node: "MmBackward0".into(), forward, module });
        ContextId(p.recording.definitions.contexts.len() as u32 - 1)
    };
    let nodes: Vec<ContextId> = model.blocks.iter().map(|(block, _)| node(&mut p, *block)).collect();
    let head_node = node(&mut p, model.head);
    let inner: &[(&str, u32, &str)] = if checkpointed { &[(CHECKPOINT, 490, "checkpoint")] } else { &[] };
    let forward = [&[("train.py", 20, "<module>"), (MODULE, 1790, "_call_impl")], inner].concat();
    let forward = p.stack(&[&forward[..], &[("model.py", 6, "forward"), (LINEAR, 134, "forward")]].concat());
    p.alloc(5 * MIB, s.load);
    for _ in 0..2 {
        let batch = p.alloc(MIB, s.batch);
        let embedded = alloc_in_call(&mut p, MIB, s.forward, model.root);
        let mut kept = Vec::new();
        for (i, (block, fc)) in model.blocks.iter().enumerate() {
            let inner = alloc_in_call(&mut p, (4 + i as u64) * MIB, forward, *fc);
            kept.push((inner, alloc_in_call(&mut p, 2 * MIB, forward, *block)));
        }
        let logits = alloc_in_call(&mut p, 3 * MIB, s.forward, model.head);
        p.on_thread(2);
        let mut gradients = vec![p.alloc_in(3 * MIB, StackId::NONE, head_node)];
        p.free_in(logits, StackId::NONE, head_node);
        for ((inner, output), node) in kept.into_iter().zip(nodes.iter()).rev() {
            p.free_in(inner, StackId::NONE, *node);
            p.free_in(output, StackId::NONE, *node);
        }
        gradients.push(p.alloc_in(MIB, StackId::NONE, nodes[0]));
        p.free_in(embedded, StackId::NONE, nodes[0]);
        p.on_thread(1).with_grad(false);
        let scratch = p.alloc(MIB, s.step);
        p.free(scratch, s.step);
        p.with_grad(true);
        for gradient in gradients {
            p.free(gradient, s.zero);
        }
        p.free(batch, s.batch);
    }
    let calls = model.blocks.iter().flat_map(|(block, fc)| [*block, *fc]).chain([model.root, model.head]);
    let calls = calls.collect();
    (p, calls)
}

/// A run of this program.
pub(crate) fn run() -> Run {
    Run::from_processes("run".as_ref(), Default::default(), vec![trained(false).0.process()])
}

fn analysed(p: Program) -> (DeviceSummary, String) {
    let run = Run::from_processes("run".as_ref(), Default::default(), vec![p.process()]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let text = summary.to_text(&TextOptions::default());
    (summary.processes[0].devices[0].clone(), text)
}

#[track_caller]
fn module<'a>(peak: &'a MemoryState, path: &str) -> &'a ModuleSummary {
    peak.by_module.iter().find(|m| m.path == path).unwrap_or_else(|| panic!("no {path:?} in {:#?}", peak.by_module))
}

#[test]
fn the_peak_is_divided_among_modules() {
    let (program, calls) = trained(false);
    let names = Names::of(&program.recording);
    let mut paths: Vec<String> = calls.iter().map(|id| names.module_path(*id, 1).unwrap()).collect();
    let (device, text) = analysed(program);
    let peak = device.peak.unwrap();
    // Parameters, batch, embeddings, blocks, logits and their gradient.
    assert_eq!(peak.totals.allocated_bytes, (5 + 1 + 1 + (6 + 7 + 8 + 9) + 3 + 3) * MIB);
    // Outside all modules: parameters without names, and the batch.
    let own: u64 = peak.by_module.iter().map(|m| m.own_bytes).sum();
    assert_eq!(own + (5 + 1) * MIB, peak.totals.allocated_bytes);
    assert_eq!(module(&peak, "").bytes, own);
    assert_eq!((module(&peak, "blocks").bytes, module(&peak, "blocks").own_bytes), (30 * MIB, 0));
    assert_eq!((module(&peak, "blocks.2").bytes, module(&peak, "blocks.2").own_bytes), (8 * MIB, 2 * MIB));
    assert_eq!(module(&peak, "blocks.2.fc").class.as_deref(), Some("Linear"));
    // The logits, and what the node of the head's call has allocated.
    assert_eq!(module(&peak, "head").bytes, 6 * MIB);
    // The categories of the root equal the totals where all memory is in modules.
    let of = |amounts: &[memtrace_analysis::report::CategoryAmount], category| {
        amounts.iter().find(|a| a.category == category).map_or((0, 0), |a| (a.bytes, a.blocks))
    };
    let root = module(&peak, "");
    assert!(of(&root.by_category, Category::Activation).0 >= 30 * MIB);
    for category in [Category::Activation, Category::Gradient, Category::AutogradDetail] {
        assert_eq!(of(&root.by_category, category), of(&peak.by_category, category), "{category:?}");
    }
    // Every named module, and the module that only contains others.
    let mut reported: Vec<String> = peak.by_module.iter().map(|m| m.path.clone()).collect();
    paths.iter_mut().filter(|path| *path == "GPT").for_each(String::clear);
    paths.push("blocks".to_owned());
    paths.sort();
    reported.sort();
    assert_eq!(reported, paths);
    assert!(text.contains("blocks.* (4 of Block)"), "{text}");
    assert!(text.contains("head (Linear)"), "{text}");
    // The lines of the report count each block once.
    let blocks = &peak.module_groups[0];
    assert_eq!((&*blocks.pattern, blocks.class.as_deref(), blocks.modules), ("blocks.*", Some("Block"), 4));
    assert_eq!(peak.module_groups.iter().map(|group| group.bytes).sum::<u64>(), own);
}

#[test]
fn checkpointing_of_repeated_modules_has_a_predicted_saving() {
    let (device, text) = analysed(trained(false).0);
    let peak = device.peak.as_ref().unwrap();
    let blocks = peak.repeated_modules.iter().find(|r| r.path == "blocks").unwrap();
    assert_eq!((blocks.class.as_str(), blocks.count, blocks.activation_bytes), ("Block", 4, 30 * MIB));
    assert_eq!((blocks.total, blocks.is_leaf, &*blocks.patterns), (4, false, &["blocks.*".to_owned()][..]));
    let layers = peak.repeated_modules.iter().find(|r| r.class == "Linear").unwrap();
    assert_eq!((layers.total, layers.is_leaf, &*layers.patterns), (4, true, &["blocks.*.fc".to_owned()][..]));
    // Each block outputs 2 MiB. The peak is in the head.
    assert_eq!(blocks.checkpointing_saves_at_most_bytes, (30 - 4 * 2) * MIB);
    let action = device.suggestions.iter().find(|a| a.rule == RuleId::CheckpointLayers).unwrap();
    // The replay: when the last block is computed again, its 7 + 2 MiB are beside the outputs of the others, the
    // gradient of the logits, the parameters, the batch and the embeddings. 1 MiB of a segment is too small to be split
    // off a block.
    assert_eq!((action.peak_after_bytes, action.at_most), ((7 + 2 + 3 * 2 + 3 + 5 + 1 + 1 + 1) * MIB, false));
    assert_eq!((action.saves_bytes, action.fits), ((43 - 26) * MIB, Some(true)));
    assert!(action.action.contains("blocks.* (4 of Block)"), "{}", action.action);
    // The report wraps lines, so they are joined.
    let flat: Vec<&str> = text.split_whitespace().collect();
    let flat = flat.join(" ");
    assert!(flat.contains("What to try") && flat.contains("blocks.* (4 of Block)"), "{text}");
}

#[test]
fn checkpointing_is_not_suggested_for_checkpointed_modules() {
    let (device, _) = analysed(trained(true).0);
    assert!(device.peak.unwrap().repeated_modules.is_empty());
    assert!(device.suggestions.iter().all(|a| a.rule != RuleId::CheckpointLayers));
}
