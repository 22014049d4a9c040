//! Programs of a few blocks, whose changed peaks the tests of suggestions compute by hand.

use memtrace_trace::file::{Context, Definitions, Frame, NnCall, StackNode};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::change::{Assumed, Change, ChangedBlocks};
use super::facts::{Facts, RunFacts};
use super::recorded::span;
use super::recorded::{FailedRequest, Recorded};
use super::replayer::Replayer;
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime, BlockLifetimes, NEVER, StepWindow};
use crate::passes::phase::Phase;
use crate::passes::rest_of_step::RestOfStep;
use crate::passes::stacks::StackTable;
use memtrace_replay::AllocatorSettings;

/// Finds a change.
pub(super) type Find = fn(&Facts<'_>) -> Option<Box<dyn Change>>;

/// 1 MiB and 512 bytes: too large for the pool of small blocks, too small for segments of their own.
pub(super) const MIB: u64 = 1 << 20;

pub(super) const NET: ContextId = ContextId(1);
pub(super) const FIRST: ContextId = ContextId(2);
pub(super) const SECOND: ContextId = ContextId(3);
pub(super) const NODE_OF_FIRST: ContextId = ContextId(4);
pub(super) const NODE_OF_SECOND: ContextId = ContextId(5);
pub(super) const ACCUMULATE: ContextId = ContextId(6);
pub(super) const ATTENTION: ContextId = ContextId(7);
pub(super) const QUERY: ContextId = ContextId(8);
/// The node of an activation function of `FIRST`.
pub(super) const LEAKY: ContextId = ContextId(9);
/// The stack of `torch.nn.functional.softmax`, and that of `cross_entropy`.
pub(super) const SOFTMAX: StackId = StackId(1);
pub(super) const LOSS: StackId = StackId(2);
/// The stack of a product of matrices.
pub(super) const PRODUCT: StackId = StackId(12);
/// The stack of an optimizer's step.
pub(super) const STEP: StackId = StackId(3);
/// A stack of `torch.load`.
pub(super) const LOAD: StackId = StackId(4);

/// A stack whose innermost frame is `torch.nn.Module`'s.
pub(super) const MODULE: StackId = StackId(5);

/// `NET`'s code at two lines, and the code of a module that each of them calls.
pub(super) const NET_LINES: [StackId; 2] = [StackId(6), StackId(7)];
pub(super) const INNER_LINES: [StackId; 2] = [StackId(9), StackId(11)];

/// The stacks that put keys and values into a cache of transformers: in a forward pass, and in generation.
pub(super) const KEYS: StackId = StackId(13);
pub(super) const GENERATED_KEYS: StackId = StackId(15);
/// Other stacks that have to do with caches: a change of one, a copy of one, and keys that are repeated for several
/// heads.
pub(super) const CROP: StackId = StackId(16);
pub(super) const COPY: StackId = StackId(17);
pub(super) const REPEAT: StackId = StackId(18);
/// A stack of `nn.DataParallel` that gathers results.
pub(super) const GATHER: StackId = StackId(19);
/// The stack of a function under `torch.utils.checkpoint`.
pub(super) const CHECKPOINTED: StackId = StackId(20);

pub(super) fn definitions() -> Definitions {
    let node = |name: &str, module| Context { node: name.into(), module, ..Context::default() };
    let mut definitions = Definitions {
        contexts: vec![
            Context::default(),
            Context::default(),
            Context::default(),
            Context::default(),
            Context { forward: PRODUCT, ..node("BmmBackward0", FIRST) },
            node("BmmBackward0", SECOND),
            node("AccumulateGrad", ContextId::NONE),
            Context::default(),
            Context::default(),
            node("LeakyReluBackward0", FIRST),
        ],
        frames: vec![Frame::default()],
        stacks: vec![StackNode { parent: StackId::NONE, frame: FrameId::NONE }],
        ..Definitions::default()
    };
    let calls = [
        (NET, ContextId::NONE, "Net"),
        (FIRST, NET, "Block"),
        (SECOND, NET, "Block"),
        (ATTENTION, NET, "SelfAttention"),
        (QUERY, ATTENTION, "Linear"),
    ];
    for (id, caller, class) in calls {
        definitions.nn_calls.insert(id, NnCall { caller, object: u64::from(id.0) << 8, class: class.into() });
    }
    for (name, filename) in [
        ("softmax", "/lib/torch/nn/functional.py"),
        ("cross_entropy", "/lib/torch/nn/functional.py"),
        ("_multi_tensor_adam", "/lib/torch/optim/adam.py"),
        ("_load", "/lib/torch/serialization.py"),
    ] {
        let frame = FrameId(definitions.frames.len() as u32);
        let filename = filename.into();
        definitions.frames.push(Frame { name: name.into(), filename, ..Frame::default() });
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame });
    }
    let mut push = |parent: StackId, name: &str, filename: &str, line: u32| {
        let frame = FrameId(definitions.frames.len() as u32);
        definitions.frames.push(Frame { name: name.into(), filename: filename.into(), line, ..Frame::default() });
        definitions.stacks.push(StackNode { parent, frame });
        StackId(definitions.stacks.len() as u32 - 1)
    };
    let call = |push: &mut dyn FnMut(StackId, &str, &str, u32) -> StackId, parent| {
        push(parent, "_call_impl", "/lib/torch/nn/modules/module.py", 1)
    };
    let net = call(&mut push, StackId::NONE);
    let lines = [10, 11].map(|line| push(net, "forward", "net.py", line));
    assert_eq!(lines, NET_LINES);
    let inner = lines.map(|line| {
        let called = call(&mut push, line);
        push(called, "forward", "inner.py", 1)
    });
    assert_eq!(inner, INNER_LINES);
    assert_eq!(push(StackId::NONE, "forward", "attention.py", 1), PRODUCT);
    let caches = "/lib/transformers/cache_utils.py";
    assert_eq!(push(StackId::NONE, "update", caches, 1), KEYS);
    let generate = push(StackId::NONE, "generate", "/lib/transformers/generation/utils.py", 1);
    assert_eq!(push(generate, "DynamicLayer.update", caches, 1), GENERATED_KEYS);
    assert_eq!(push(StackId::NONE, "crop", caches, 2), CROP);
    assert_eq!(push(StackId::NONE, "deepcopy", "/lib/copy.py", 1), COPY);
    assert_eq!(push(StackId::NONE, "repeat_kv", "/lib/transformers/integrations/sdpa_attention.py", 1), REPEAT);
    assert_eq!(push(StackId::NONE, "gather", "/lib/torch/nn/parallel/scatter_gather.py", 1), GATHER);
    assert_eq!(push(StackId::NONE, "checkpoint", "/lib/torch/utils/checkpoint.py", 1), CHECKPOINTED);
    definitions
}

/// A program under construction: each allocation and free is the next event.
#[derive(Default)]
pub(super) struct Program {
    pub(super) blocks: Vec<BlockLifetime>,
    pub(super) seq: u32,
    pub(super) step: u32,
    pub(super) passes: u16,
}

impl Program {
    /// Allocates `mib` MiB and returns the number of the block.
    pub(super) fn alloc(&mut self, mib: u64, phase: Phase, category: Category, context: ContextId) -> usize {
        self.seq += 1;
        let mut block = BlockLifetime::of_size(self.seq, mib * MIB);
        (block.start.phase, block.category, block.start.context) = (phase, category, context);
        (block.start.step, block.start.backward_passes) = (self.step, self.passes);
        self.blocks.push(block);
        self.blocks.len() - 1
    }

    pub(super) fn activation(&mut self, mib: u64, context: ContextId) -> usize {
        self.alloc(mib, Phase::Forward, Category::Activation, context)
    }

    pub(super) fn free(&mut self, block: usize, context: ContextId) {
        self.seq += 1;
        (self.blocks[block].freed, self.blocks[block].freed_context) = (self.seq, context);
    }

    /// The highest sum, in MiB.
    pub(super) fn peak(&self) -> u64 {
        self.peak_with(|_| None)
    }

    /// The highest sum with a change if it is found, in MiB.
    pub(super) fn peak_with(&self, find: Find) -> u64 {
        self.with_rest(find, None, None)
    }

    /// The same, if a request fails at the end.
    pub(super) fn with_failure(&self, find: Find, failed: FailedRequest) -> u64 {
        self.with_rest(find, Some(failed), None)
    }

    /// The same, with the rest of the step that the error interrupted.
    pub(super) fn with_rest(&self, find: Find, failed: Option<FailedRequest>, rest: Option<&RestOfStep>) -> u64 {
        let definitions = definitions();
        let table = StackTable::new(&definitions);
        let window = StepWindow { step: 0, first: 1, last: NEVER, peak: 0 };
        let lifetimes = BlockLifetimes {
            blocks: self.blocks.clone(),
            stream_pools: vec![(0, 0)],
            windows: vec![window],
            is_whole: true,
            ..BlockLifetimes::default()
        };
        let recorded = Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), failed, rest);
        let (peak, key) = span::peak(&recorded.spans(), &recorded.settings);
        let at_peak = recorded.blocks.iter().find(|block| block.allocated == span::seq_of(key));
        let run = RunFacts {
            phase: at_peak.map_or(Phase::Other, |block| block.start.phase),
            has_backward: recorded.blocks.iter().any(|block| block.start.phase == Phase::Backward),
            trains: false,
        };
        let replayer = Replayer::new(recorded, run, peak, u64::MAX, [0; Phase::ALL.len()]);
        assert!(replayer.is_sound());
        let facts = replayer.facts();
        find(facts).map_or(peak, |change| peak_after(facts, &*change)) / MIB
    }
}

/// Two blocks of a network. Each keeps 100 MiB for its backward pass, allocates 30 MiB that it frees itself, and
/// results in 10 MiB that the next one needs.
pub(super) fn two_blocks() -> Program {
    let mut program = Program::default();
    let mut kept = Vec::new();
    for context in [FIRST, SECOND] {
        let temporary = program.activation(30, context);
        let saved = program.activation(100, context);
        program.free(temporary, context);
        let result = program.activation(10, context);
        kept.push((saved, result));
    }
    program.passes = 1;
    // The loss needs the result of the second block, which needs that of the first.
    program.free(kept[1].1, ContextId::NONE);
    for (saved, result, node) in [(kept[1].0, Some(kept[0].1), NODE_OF_SECOND), (kept[0].0, None, NODE_OF_FIRST)] {
        let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, node);
        program.free(saved, node);
        if let Some(result) = result {
            program.free(result, node);
        }
        program.free(gradient, node);
    }
    program
}

/// One step: 100 MiB of activations, two weights of 20 MiB with gradients.
pub(super) fn one_step() -> Program {
    let mut program = Program::default();
    for _ in 0..2 {
        let weight = program.alloc(20, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].start.step = BEFORE_STEPS;
    }
    let activations = program.activation(100, FIRST);
    program.passes = 1;
    let first = program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_SECOND);
    let second = program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
    program.free(activations, NODE_OF_FIRST);
    program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
    program.free(first, ContextId::NONE);
    program.free(second, ContextId::NONE);
    program
}

/// An evaluation with gradients: blocks of `NET` and of the modules that it calls, at one of two lines of `NET`.
pub(super) fn evaluated(blocks: &[(u64, ContextId, usize)]) -> Program {
    let mut program = Program::default();
    let mut allocated = Vec::new();
    for (mib, context, line) in blocks {
        let block = program.alloc(*mib, Phase::Eval, Category::Activation, *context);
        program.blocks[block].start.stack = if *context == NET { NET_LINES[*line] } else { INNER_LINES[*line] };
        allocated.push(block);
    }
    program.seq += 1;
    for block in allocated {
        program.free(block, ContextId::NONE);
    }
    program
}

/// A step of two weights of 20 MiB and 100 MiB of activations, with an error at the second of four optimizer states.
pub(super) fn interrupted_optimizer() -> (Program, FailedRequest) {
    let mut program = Program::default();
    for _ in 0..2 {
        let weight = program.alloc(20, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].start.step = BEFORE_STEPS;
    }
    let activations = program.activation(100, FIRST);
    program.passes = 1;
    program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_SECOND);
    program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
    program.free(activations, NODE_OF_FIRST);
    let state = program.alloc(20, Phase::Optimizer, Category::OptimizerState, ContextId::NONE);
    program.blocks[state].start.stack = STEP;
    let failed = FailedRequest {
        seq: u64::from(program.seq) + 1,
        requested: 20 * MIB,
        at: (STEP, ContextId::NONE),
        phase: Phase::Optimizer,
        step: Some(0),
        in_unused_graph: false,
    };
    (program, failed)
}

/// The highest sum of the blocks with one change.
fn peak_after(facts: &Facts<'_>, change: &dyn Change) -> u64 {
    let mut blocks = ChangedBlocks::new(facts, Assumed::Largest);
    change.apply(facts, &mut blocks);
    blocks.peak(facts)
}
