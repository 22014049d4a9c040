//! Programs of a few blocks, whose changed peaks are computed by hand.

use memtrace_trace::file::{Context, Definitions, Frame, NnCall, StackNode};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::*;
use crate::passes::lifetimes::{BlockLifetime, BlockLifetimes, StepWindow};
use crate::passes::rest_of_step::{EarlierIteration, RestBlock, RestEvent, RestOfStep};
use crate::passes::stacks::StackTable;
use memtrace_replay::AllocatorSettings;

/// 1 MiB and 512 bytes: too large for the pool of small blocks, too small for segments of their own.
const MIB: u64 = 1 << 20;

const NET: ContextId = ContextId(1);
const FIRST: ContextId = ContextId(2);
const SECOND: ContextId = ContextId(3);
const NODE_OF_FIRST: ContextId = ContextId(4);
const NODE_OF_SECOND: ContextId = ContextId(5);
const ACCUMULATE: ContextId = ContextId(6);
const ATTENTION: ContextId = ContextId(7);
const QUERY: ContextId = ContextId(8);
/// The stack of `torch.nn.functional.softmax`, and that of `cross_entropy`.
const SOFTMAX: StackId = StackId(1);
const LOSS: StackId = StackId(2);
/// The stack of a product of matrices.
const PRODUCT: StackId = StackId(12);
/// The stack of an optimizer's step.
const STEP: StackId = StackId(3);
/// A stack of `torch.load`.
const LOAD: StackId = StackId(4);

/// A stack whose innermost frame is `torch.nn.Module`'s.
const MODULE: StackId = StackId(5);

/// `NET`'s code at two lines, and the code of a module that each of them calls.
const NET_LINES: [StackId; 2] = [StackId(6), StackId(7)];
const INNER_LINES: [StackId; 2] = [StackId(9), StackId(11)];

/// The stacks that put keys and values into a cache of transformers: in a forward pass, and in generation.
const KEYS: StackId = StackId(13);
const GENERATED_KEYS: StackId = StackId(15);
/// Other stacks that have to do with caches: a change of one, a copy of one, and keys that are repeated for several heads.
const CROP: StackId = StackId(16);
const COPY: StackId = StackId(17);
const REPEAT: StackId = StackId(18);

fn definitions() -> Definitions {
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
    definitions
}

/// A program under construction: each allocation and free is the next event.
#[derive(Default)]
struct Program {
    blocks: Vec<BlockLifetime>,
    seq: u32,
    step: u32,
    passes: u16,
}

impl Program {
    /// Allocates `mib` MiB and returns the number of the block.
    fn alloc(&mut self, mib: u64, phase: Phase, category: Category, context: ContextId) -> usize {
        self.seq += 1;
        let mut block = BlockLifetime::of_size(self.seq, mib * MIB);
        (block.phase, block.category, block.context) = (phase, category, context);
        (block.step, block.backward_passes) = (self.step, self.passes);
        self.blocks.push(block);
        self.blocks.len() - 1
    }

    fn activation(&mut self, mib: u64, context: ContextId) -> usize {
        self.alloc(mib, Phase::Forward, Category::Activation, context)
    }

    fn free(&mut self, block: usize, context: ContextId) {
        self.seq += 1;
        (self.blocks[block].freed, self.blocks[block].freed_context) = (self.seq, context);
    }

    /// The highest sum after `plan`, in MiB.
    fn peak(&self, plan: &Plan) -> u64 {
        self.with_failure(plan, None)
    }

    fn with_failure(&self, plan: &Plan, failed: Option<FailedRequest>) -> u64 {
        self.with_rest(plan, failed, None)
    }

    fn with_rest(&self, plan: &Plan, failed: Option<FailedRequest>, rest: Option<&RestOfStep>) -> u64 {
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
        assert_eq!(recorded.is_continued(), rest.is_some());
        let (peak, _) = span::peak(&recorded.spans(), &recorded.settings);
        let changes = Changes::new(recorded, peak, u64::MAX, [0; Phase::ALL.len()]);
        assert!(changes.is_sound());
        changes.quick(plan) / MIB
    }
}

fn checkpoint() -> Plan {
    Plan { checkpoint: BTreeSet::from(["Block".into()]), ..Plan::default() }
}

/// Two blocks of a network. Each keeps 100 MiB for its backward pass, allocates 30 MiB that it frees itself, and results
/// in 10 MiB that the next one needs.
fn two_blocks() -> Program {
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

#[test]
fn a_checkpointed_module_keeps_its_result_and_is_computed_again() {
    let program = two_blocks();
    assert_eq!(program.peak(&Plan::default()), 110 + 130, "the second forward, with its temporary");
    // The second block beside the first one's result, when it runs and when it runs again.
    assert_eq!(program.peak(&checkpoint()), 10 + 130);
}

#[test]
fn a_result_that_the_modules_own_backward_needs_stays_and_is_computed_again() {
    let mut program = Program::default();
    let mut all = Vec::new();
    for context in [FIRST, SECOND] {
        all.push([program.activation(100, context), program.activation(40, context)]);
    }
    program.passes = 1;
    for (blocks, node) in [(all[1], NODE_OF_SECOND), (all[0], NODE_OF_FIRST)] {
        // The last operation comes first in the backward pass.
        program.free(blocks[1], node);
        program.free(blocks[0], node);
    }
    assert_eq!(program.peak(&Plan::default()), 280);
    // The first block's result, then all of the second block: its result from the forward pass ends where its backward
    // pass begins, which allocates it again.
    assert_eq!(program.peak(&checkpoint()), 40 + 140);
}

#[test]
fn at_an_error_in_the_forward_pass_the_last_block_of_a_call_is_its_result() {
    let mut program = Program::default();
    for context in [FIRST, SECOND] {
        program.activation(100, context);
        program.activation(10, context);
    }
    let failed = FailedRequest {
        seq: u64::from(program.seq) + 1,
        requested: 50 * MIB,
        at: (StackId::NONE, NET),
        phase: Phase::Forward,
        step: Some(0),
        in_unused_graph: false,
    };
    assert_eq!(program.with_failure(&Plan::default(), Some(failed)), 220 + 50);
    assert_eq!(program.with_failure(&checkpoint(), Some(failed)), 10 + 110, "the second call, before the error");
}

/// Two steps, of which the second fails at the request of its second block. The first shows what follows.
#[test]
fn after_an_error_the_step_goes_on_as_the_step_before() {
    let mut program = two_blocks();
    let first = program.blocks.clone();
    // The second step up to the request: the first block's forward pass.
    let requests: Vec<&BlockLifetime> = first.iter().filter(|block| block.phase == Phase::Forward).collect();
    let at = requests.iter().position(|block| block.context == SECOND).expect("the second block");
    let offset = program.seq;
    for block in &requests[..at] {
        let mut again = **block;
        again.allocated += offset;
        again.freed = if block.freed < requests[at].allocated { block.freed + offset } else { NEVER };
        program.blocks.push(again);
    }
    let seq = u64::from(offset + requests[at].allocated);
    let failed = FailedRequest {
        seq,
        requested: requests[at].requested(),
        at: (StackId::NONE, SECOND),
        phase: Phase::Forward,
        step: Some(1),
        in_unused_graph: false,
    };
    let mut numbers: BTreeMap<u32, usize> = BTreeMap::new();
    let mut events: Vec<(u32, RestEvent)> = Vec::new();
    let mut times: Vec<(u32, bool, &BlockLifetime)> = first
        .iter()
        .flat_map(|block| [(block.allocated, true, block), (block.freed, false, block)])
        .filter(|(time, ..)| *time >= requests[at].allocated && *time < NEVER)
        .collect();
    times.sort_by_key(|(time, is_request, _)| (*time, *is_request));
    for (time, is_request, block) in times {
        let earlier = u64::from(block.allocated);
        let event = if is_request {
            let number = numbers.len();
            numbers.insert(block.allocated, number);
            RestEvent::Requested { requested: block.requested(), size: block.size(), stream: 0, earlier }
        } else {
            RestEvent::FreeRequested(match numbers.get(&block.allocated) {
                Some(number) => RestBlock::New(*number),
                None => {
                    let seq = earlier + u64::from(offset);
                    RestBlock::Old { addr: 0, size: block.size(), seq, earlier }
                }
            })
        };
        events.push((time, event));
    }
    let events = events.into_iter().map(|(_, event)| event).collect();
    let rest = RestOfStep { taken_from: EarlierIteration::Step(0), events, peak: 0 };
    for plan in [Plan::default(), checkpoint()] {
        assert_eq!(program.with_rest(&plan, Some(failed), Some(&rest)), two_blocks().peak(&plan), "{plan:?}");
    }
    let lost =
        RestOfStep { events: vec![RestEvent::Requested { requested: 1, size: 512, stream: 0, earlier: 9999 }], ..rest };
    let definitions = definitions();
    let table = StackTable::new(&definitions);
    let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
    let settings = AllocatorSettings::default();
    let recorded = Recorded::new(&lifetimes, &definitions, &table, settings, Some(failed), Some(&lost));
    assert!(!recorded.is_continued(), "the blocks of the earlier step are not kept");
}

/// One step: 100 MiB of activations, two weights of 20 MiB with gradients.
fn one_step() -> Program {
    let mut program = Program::default();
    for _ in 0..2 {
        let weight = program.alloc(20, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
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

#[test]
fn the_second_half_of_a_batch_runs_beside_the_gradients_of_the_first() {
    let program = one_step();
    assert_eq!(program.peak(&Plan::default()), 40 + 100 + 40);
    let plan = Plan { batch: Some(BatchChange::Accumulated), ..Plan::default() };
    // Weights, half the activations, gradients of the first half, and one gradient on its way to the others.
    assert_eq!(program.peak(&plan), 40 + 50 + 40 + 20);
    let plan = Plan { batch: Some(BatchChange::Half), ..Plan::default() };
    assert_eq!(program.peak(&plan), 40 + 50 + 40);
}

#[test]
fn gradients_of_weights_that_are_added_up_do_not_depend_on_the_batch() {
    let mut program = one_step();
    program.passes = 2;
    let weight = program.alloc(20, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
    program.free(weight, ACCUMULATE);
    let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
    program.free(gradient, NODE_OF_FIRST);
    let definitions = definitions();
    let table = StackTable::new(&definitions);
    let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
    let recorded = Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), None, None);
    let depends = |index: usize| batch::depends_on_batch(&recorded, &program.blocks[index], true);
    assert!(!depends(weight) && depends(gradient));
    assert_eq!(batch::batches(&recorded), Batches::Accumulated(2));
}

#[test]
fn an_optimizer_in_the_backward_pass_never_has_all_gradients() {
    let mut program = Program::default();
    let activations = program.activation(100, NET);
    program.passes = 1;
    let gradients = [NODE_OF_SECOND, NODE_OF_FIRST, NODE_OF_SECOND]
        .map(|node| program.alloc(20, Phase::Backward, Category::Gradient, node));
    program.free(activations, NODE_OF_FIRST);
    program.alloc(1, Phase::Optimizer, Category::Temporary, ContextId::NONE);
    gradients.into_iter().for_each(|gradient| program.free(gradient, ContextId::NONE));
    assert_eq!(program.peak(&Plan::default()), 160);
    let plan = Plan { optimizer: Some(OptimizerChange::InBackward), ..Plan::default() };
    assert_eq!(program.peak(&plan), 100 + 20, "one gradient");
    program.blocks[4].stack = STEP;
    assert_eq!(program.peak(&plan), 100 + 20 + 20, "one gradient and one temporary of the step");
}

#[test]
fn scores_vanish_from_both_passes() {
    let mut program = Program::default();
    let scores = program.activation(80, FIRST);
    program.blocks[scores].stack = PRODUCT;
    let softmax = program.activation(80, FIRST);
    program.blocks[softmax].stack = SOFTMAX;
    program.free(scores, FIRST);
    let dropped = program.activation(80, FIRST);
    let mask = program.activation(20, FIRST);
    let result = program.activation(8, FIRST);
    program.passes = 1;
    let gradient = program.alloc(80, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
    for block in [gradient, dropped, mask, softmax, result] {
        program.free(block, NODE_OF_FIRST);
    }
    assert_eq!(program.peak(&Plan::default()), 80 + 80 + 20 + 8 + 80);
    assert_eq!(program.peak(&Plan { attention: true, ..Plan::default() }), 8);
}

/// A mixture of experts multiplies with the softmax of its router.
#[test]
fn a_softmax_of_no_product_has_no_scores() {
    let mut program = Program::default();
    for pass in 0..2 {
        let gates = program.activation(80, FIRST);
        let softmax = program.activation(80, FIRST);
        program.blocks[softmax].stack = SOFTMAX;
        program.free(gates, FIRST);
        let slots = program.activation(80, FIRST);
        program.blocks[slots].stack = PRODUCT;
        program.passes = pass + 1;
        for block in [slots, softmax] {
            program.free(block, NODE_OF_FIRST);
        }
    }
    let peak = program.peak(&Plan::default());
    assert_eq!(program.peak(&Plan { attention: true, ..Plan::default() }), peak);
}

#[test]
fn scores_are_found_without_a_backward_pass() {
    let mut program = Program::default();
    let query = program.activation(20, QUERY);
    let scores = program.activation(80, ATTENTION);
    let softmax = program.activation(80, ATTENTION);
    program.free(scores, ATTENTION);
    let result = program.activation(20, ATTENTION);
    for block in [query, softmax, result] {
        program.free(block, NET);
    }
    assert_eq!(program.peak(&Plan::default()), 180);
    assert_eq!(program.peak(&Plan { attention: true, ..Plan::default() }), 40);
}

#[test]
fn chunks_of_the_loss_need_the_sum_of_the_weights_gradients() {
    let mut program = Program::default();
    let weight = program.alloc(40, Phase::Load, Category::Parameter, ContextId::NONE);
    program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
    let logits = program.activation(800, NET);
    let softmax = program.activation(800, NET);
    program.blocks[softmax].stack = LOSS;
    program.passes = 1;
    let gradient = program.alloc(800, Phase::Backward, Category::AutogradDetail, ContextId::NONE);
    program.free(softmax, NODE_OF_FIRST);
    program.alloc(40, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
    program.free(gradient, NODE_OF_FIRST);
    program.free(logits, NODE_OF_FIRST);
    assert_eq!(program.peak(&Plan::default()), 40 + 2400);
    assert_eq!(program.peak(&Plan { chunked_loss: true, ..Plan::default() }), 40 + 300 + 40);
}

#[test]
fn plans_that_change_the_same_thing_are_not_combined() {
    let fused = Plan { optimizer: Some(OptimizerChange::Fused), ..Plan::default() };
    let early = Plan { optimizer: Some(OptimizerChange::InBackward), ..Plan::default() };
    let half = Plan { batch: Some(BatchChange::Accumulated), ..Plan::default() };
    assert_eq!(fused.with(&early), None);
    assert_eq!(half.with(&early), None, "gradients must stay until the last half");
    assert_eq!(fused.with(&half).map(|plan| (plan.optimizer, plan.batch)), Some((fused.optimizer, half.batch)));
    assert_eq!(fused.with(&fused), None);
}

#[test]
fn a_checkpointed_module_keeps_its_input() {
    let mut program = Program::default();
    let input = program.activation(10, NET);
    let copied = program.activation(10, FIRST);
    let saved = program.activation(100, FIRST);
    let result = program.activation(10, FIRST);
    // The program's variable gets the result, and autograd does not need the input.
    program.free(input, NET);
    let head = program.activation(150, NET);
    program.passes = 1;
    program.free(head, ContextId::NONE);
    program.free(result, ContextId::NONE);
    let gradient = program.alloc(30, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
    for block in [saved, copied, gradient] {
        program.free(block, NODE_OF_FIRST);
    }
    // Another call, because one module alone is not checkpointed.
    program.activation(1, SECOND);
    assert_eq!(program.peak(&Plan::default()), 110 + 10 + 150);
    assert_eq!(program.peak(&checkpoint()), 10 + 10 + 150, "input, result and head");
}

#[test]
fn smaller_evaluation_batches_keep_as_many_results() {
    let mut program = Program::default();
    let weight = program.alloc(10, Phase::Load, Category::Parameter, ContextId::NONE);
    program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
    let batches = 4;
    for _ in 0..batches {
        let hidden = program.alloc(100, Phase::Eval, Category::Activation, FIRST);
        // A loop inside the model that keeps what it computes until its end.
        let parts = [(), ()].map(|()| program.alloc(30, Phase::Eval, Category::Activation, SECOND));
        parts.into_iter().for_each(|part| program.free(part, SECOND));
        program.alloc(20, Phase::Eval, Category::Activation, ContextId::NONE);
        program.free(hidden, ContextId::NONE);
    }
    let results = 20 * batches;
    assert_eq!(program.peak(&Plan::default()), 10 + results - 20 + 100 + 60);
    let plan = Plan { batch: Some(BatchChange::Evaluation), ..Plan::default() };
    assert_eq!(program.peak(&plan), 10 + results - 20 + 50 + 30);
}

#[test]
fn results_of_an_evaluation_need_no_device_memory_on_the_cpu() {
    let mut program = one_step();
    for _ in 0..4 {
        let hidden = program.alloc(200, Phase::Eval, Category::Activation, FIRST);
        program.alloc(20, Phase::Eval, Category::Activation, ContextId::NONE);
        program.free(hidden, ContextId::NONE);
    }
    let base = program.peak(&Plan::default()) - (200 + 4 * 20);
    let plan = Plan { results_on_cpu: true, ..Plan::default() };
    // The results of one iteration, and the tensors of the next.
    assert_eq!(program.peak(&plan), base + 200 + 20);
}

#[test]
fn what_is_loaded_and_copied_vanishes() {
    let mut program = Program::default();
    let mut loaded = Vec::new();
    for _ in 0..3 {
        let index = program.alloc(50, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[index].stack = LOAD;
        program.blocks[index].step = crate::passes::lifetimes::BEFORE_STEPS;
        loaded.push(index);
    }
    let weight = program.alloc(150, Phase::Load, Category::Parameter, ContextId::NONE);
    program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
    program.free(loaded[0], ContextId::NONE);
    program.free(loaded[1], ContextId::NONE);
    assert_eq!(program.peak(&Plan::default()), 300);
    // The third is used as it is.
    assert_eq!(program.peak(&Plan { load_on_cpu: true, ..Plan::default() }), 200);
}

#[test]
fn parameters_that_loaded_ones_replace_vanish() {
    // By case: the sizes that are loaded, and whether the loaded tensors are freed while loading goes on.
    for (sizes, is_freed, is_replaced) in [
        (vec![30, 50], false, true),
        (vec![30], false, false),
        (vec![30, 40], false, false),
        (vec![30, 50], true, false),
    ] {
        let mut program = Program::default();
        let load = |program: &mut Program, mib: u64, category: Category, stack: StackId| {
            let weight = program.alloc(mib, Phase::Load, category, ContextId::NONE);
            program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
            program.blocks[weight].stack = stack;
            weight
        };
        let built = [30, 50].map(|mib| load(&mut program, mib, Category::Unknown, MODULE));
        let loaded: u64 = sizes.iter().sum();
        let loaded_blocks: Vec<usize> =
            sizes.into_iter().map(|mib| load(&mut program, mib, Category::Parameter, LOAD)).collect();
        built.into_iter().for_each(|weight| program.free(weight, ContextId::NONE));
        if is_freed {
            loaded_blocks.into_iter().for_each(|block| program.free(block, ContextId::NONE));
            load(&mut program, 1, Category::Parameter, MODULE);
        }
        let plan = Plan { build_on_meta: true, ..Plan::default() };
        assert_eq!(program.peak(&Plan::default()), 80 + loaded);
        assert_eq!(program.peak(&plan), if is_replaced { loaded } else { 80 + loaded }, "{loaded} {is_freed}");
    }
}

#[test]
fn parameters_in_their_final_type_are_not_converted() {
    let mut program = Program::default();
    let load = |program: &mut Program, mib: u64, stack: StackId| {
        let weight = program.alloc(mib, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
        program.blocks[weight].stack = stack;
        weight
    };
    let weights = [load(&mut program, 40, LOAD), load(&mut program, 40, LOAD)];
    for weight in weights {
        load(&mut program, 20, MODULE);
        program.free(weight, ContextId::NONE);
    }
    // Code of the program replaces a tensor by a smaller one.
    let other = load(&mut program, 8, LOAD);
    load(&mut program, 4, LOAD);
    program.free(other, ContextId::NONE);
    assert_eq!(program.peak(&Plan::default()), 80 + 20);
    assert_eq!(program.peak(&Plan { convert_first: true, ..Plan::default() }), 2 * 20 + 8 + 4);
}

#[test]
fn frozen_parameters_have_neither_gradients_nor_state() {
    let mut program = one_step();
    program.alloc(80, Phase::Optimizer, Category::OptimizerState, ContextId::NONE);
    assert_eq!(program.peak(&Plan::default()), 40 + 100 + 40);
    assert_eq!(program.peak(&Plan { freeze: true, ..Plan::default() }), 40 + 100);
}

#[test]
fn after_an_error_in_the_first_optimizer_step_the_state_and_the_next_step_follow() {
    let mut program = Program::default();
    let mut weights = Vec::new();
    for _ in 0..2 {
        let weight = program.alloc(20, Phase::Load, Category::Parameter, ContextId::NONE);
        program.blocks[weight].step = crate::passes::lifetimes::BEFORE_STEPS;
        weights.push(weight);
    }
    let activations = program.activation(100, FIRST);
    program.passes = 1;
    program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_SECOND);
    program.alloc(20, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
    program.free(activations, NODE_OF_FIRST);
    let state = program.alloc(20, Phase::Optimizer, Category::OptimizerState, ContextId::NONE);
    program.blocks[state].stack = STEP;
    let failed = FailedRequest {
        seq: u64::from(program.seq) + 1,
        requested: 20 * MIB,
        at: (STEP, ContextId::NONE),
        phase: Phase::Optimizer,
        step: Some(0),
        in_unused_graph: false,
    };
    let peak = |plan: &Plan| {
        let (definitions, settings) = (definitions(), AllocatorSettings::default());
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes {
            blocks: program.blocks.clone(),
            stream_pools: vec![(0, 0)],
            is_whole: true,
            ..BlockLifetimes::default()
        };
        let recorded = Recorded::new(&lifetimes, &definitions, &table, settings, Some(failed), None);
        assert!(recorded.is_continued());
        let peak = recorded.highest_sum();
        Changes::new(recorded, peak, u64::MAX, [0; Phase::ALL.len()]).quick(plan) / MIB
    };
    let (weights, gradients, moments) = (40, 40, 80);
    // The next forward and backward pass beside all moments: 100 MiB of activations and the gradients.
    assert_eq!(peak(&Plan::default()), weights + moments + 100 + gradients);
    let half = Plan { batch: Some(BatchChange::Half), ..Plan::default() };
    assert_eq!(peak(&half), weights + moments + 50 + gradients);
    let short = Plan { optimizer: Some(OptimizerChange::EightBit), ..Plan::default() };
    assert_eq!(peak(&short), weights + moments * 65 / 256 + 100 + gradients);
}

/// An evaluation with gradients: blocks of `NET` and of the modules that it calls, at one of two lines of `NET`.
fn evaluated(blocks: &[(u64, ContextId, usize)]) -> Program {
    let mut program = Program::default();
    let mut allocated = Vec::new();
    for (mib, context, line) in blocks {
        let block = program.alloc(*mib, Phase::Eval, Category::Activation, *context);
        program.blocks[block].stack = if *context == NET { NET_LINES[*line] } else { INNER_LINES[*line] };
        allocated.push(block);
    }
    program.seq += 1;
    for block in allocated {
        program.free(block, ContextId::NONE);
    }
    program
}

#[test]
fn without_gradients_values_of_one_statement_are_freed_when_the_next_operation_has_read_them() {
    // second(relu(first(x))), and what the caller makes of it.
    let program = evaluated(&[(100, FIRST, 0), (100, NET, 0), (100, SECOND, 0), (1, NET, 1), (1, NET, 1)]);
    let no_grad = Plan { no_grad: true, ..Plan::default() };
    assert_eq!(program.peak(&Plan::default()), 302);
    assert_eq!(program.peak(&no_grad), 200);
}

#[test]
fn without_gradients_a_variable_stays_until_the_code_that_assigned_it_reads_it() {
    // x = first(x) + 1; x = x + second(x), and what the caller makes of it.
    let blocks = [(10, FIRST, 0), (100, NET, 0), (30, SECOND, 1), (100, NET, 1), (1, NET, 1), (1, NET, 1)];
    assert_eq!(evaluated(&blocks).peak(&Plan { no_grad: true, ..Plan::default() }), 230);
}

#[test]
fn where_gradients_are_off_already_nothing_is_suggested() {
    let mut program = evaluated(&[(100, FIRST, 0), (100, NET, 0), (100, SECOND, 0), (1, NET, 1), (1, NET, 1)]);
    program.blocks.iter_mut().for_each(|block| block.is_without_gradients = true);
    assert_eq!(program.peak(&Plan { no_grad: true, ..Plan::default() }), 302);
}

#[test]
fn offloaded_tensors_come_back_for_the_node_that_needs_them() {
    let mut program = Program::default();
    let mut allocated = Vec::new();
    for (context, stack) in
        [(FIRST, INNER_LINES[0]), (NET, NET_LINES[0]), (SECOND, INNER_LINES[0]), (NET, NET_LINES[0])]
    {
        let block = program.activation(100, context);
        program.blocks[block].stack = stack;
        allocated.push(block);
    }
    program.passes = 1;
    for (blocks, node) in [([3, 2], NODE_OF_SECOND), ([1, 0], NODE_OF_FIRST)] {
        let gradient = program.alloc(20, Phase::Backward, Category::AutogradDetail, node);
        for block in blocks {
            program.free(allocated[block], node);
        }
        program.free(gradient, ContextId::NONE);
    }
    assert_eq!(program.peak(&Plan::default()), 420);
    // In the forward pass one operation's argument and result, in the backward pass what one node saved.
    assert_eq!(program.peak(&Plan { offload: true, ..Plan::default() }), 220);
}

/// A forward pass of two layers that puts 20 MiB into a cache in each, and the cache's blocks.
fn cached_forward(program: &mut Program, phase: Phase, keys: StackId) -> Vec<usize> {
    let mut cache = Vec::new();
    for layer in [FIRST, SECOND] {
        let entry = program.alloc(20, phase, Category::KvCache, layer);
        program.blocks[entry].stack = keys;
        program.blocks[entry].is_without_gradients = true;
        cache.push(entry);
        let temporary = program.alloc(30, phase, Category::Temporary, layer);
        program.free(temporary, layer);
    }
    program.alloc(5, phase, Category::Activation, NET);
    cache
}

fn without_cache() -> Plan {
    Plan { no_cache: true, ..Plan::default() }
}

#[test]
fn keys_and_values_that_nothing_reads_end_with_their_layer() {
    let mut program = Program::default();
    for _ in 0..3 {
        // The new outputs replace the old ones when they are there.
        let earlier: Vec<usize> = (0..program.blocks.len()).filter(|i| program.blocks[*i].freed == NEVER).collect();
        cached_forward(&mut program, Phase::Eval, KEYS);
        earlier.into_iter().for_each(|block| program.free(block, ContextId::NONE));
    }
    assert_eq!(program.peak(&Plan::default()), 45 + 40 + 30);
    assert_eq!(program.peak(&without_cache()), 5 + 20 + 30);
}

#[test]
fn caches_that_something_reads_stay() {
    type Reading = fn(&mut Program);
    let append: Reading = |program| {
        let entry = program.alloc(21, Phase::Eval, Category::KvCache, FIRST);
        program.blocks[entry].stack = KEYS;
        program.free(0, FIRST);
    };
    let generate: Reading = |program| {
        let entry = program.alloc(21, Phase::Generate, Category::KvCache, FIRST);
        program.blocks[entry].stack = GENERATED_KEYS;
        program.free(0, FIRST);
    };
    let continue_twice: Reading = |program| {
        for _ in 0..2 {
            let cache = cached_forward(program, Phase::Eval, KEYS);
            cache.into_iter().for_each(|block| program.free(block, ContextId::NONE));
        }
    };
    let crop: Reading = |program| {
        let entry = program.alloc(10, Phase::Eval, Category::KvCache, ContextId::NONE);
        program.blocks[entry].stack = CROP;
    };
    let copy: Reading = |program| {
        let entry = program.alloc(20, Phase::Eval, Category::Unknown, ContextId::NONE);
        program.blocks[entry].stack = COPY;
    };
    for (name, read) in
        [("append", append), ("generate", generate), ("twice", continue_twice), ("crop", crop), ("copy", copy)]
    {
        let mut program = Program::default();
        cached_forward(&mut program, Phase::Eval, KEYS);
        read(&mut program);
        assert_eq!(program.peak(&without_cache()), program.peak(&Plan::default()), "{name}");
    }
    let mut program = Program::default();
    cached_forward(&mut program, Phase::Generate, KEYS);
    cached_forward(&mut program, Phase::Eval, GENERATED_KEYS);
    assert_eq!(program.peak(&without_cache()), program.peak(&Plan::default()), "generation");
}

/// In training the graph can need keys and values as well as the cache does.
#[test]
fn keys_and_values_that_the_graph_saves_stay() {
    // What the layer allocates beside them, and whether they are freed before the backward pass.
    for (beside, ends_early, is_unread) in [
        (None, false, false),
        (None, true, true),
        (Some((REPEAT, 1)), false, true),
        (Some((PRODUCT, 2)), false, false),
        (Some((PRODUCT, 3)), false, true),
    ] {
        let mut program = Program::default();
        let mut saved = Vec::new();
        for layer in [FIRST, SECOND] {
            let entry = program.activation(20, layer);
            program.blocks[entry].stack = KEYS;
            let (stack, count) = beside.unwrap_or((StackId::NONE, 1));
            for _ in 0..count {
                let repeated = program.activation(40, layer);
                program.blocks[repeated].stack = stack;
                saved.push(repeated);
            }
        }
        let count = saved.len() as u64;
        let entries: Vec<usize> = (0..program.blocks.len()).filter(|i| program.blocks[*i].stack == KEYS).collect();
        if ends_early {
            entries.iter().for_each(|entry| program.free(*entry, ContextId::NONE));
        }
        program.passes = 1;
        saved.into_iter().rev().for_each(|block| program.free(block, NODE_OF_FIRST));
        if !ends_early {
            entries.iter().for_each(|entry| program.free(*entry, ContextId::NONE));
        }
        assert_eq!(program.peak(&Plan::default()), 40 + 40 * count, "{beside:?}");
        let expected = if is_unread { 20 + 40 * count } else { 40 + 40 * count };
        assert_eq!(program.peak(&without_cache()), expected, "{beside:?} {ends_early}");
    }
}

#[test]
fn keys_and_values_that_a_node_frees_stay() {
    let mut program = Program::default();
    for layer in [FIRST, SECOND] {
        let entry = program.activation(20, layer);
        program.blocks[entry].stack = KEYS;
        program.activation(30, layer);
    }
    program.passes = 1;
    program.free(2, NODE_OF_SECOND);
    program.free(0, NODE_OF_FIRST);
    assert_eq!(program.peak(&without_cache()), program.peak(&Plan::default()));
}
