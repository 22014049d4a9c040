//! Programs of a few operations, and what autocast changes.

use memtrace_trace::file::{Context, Definitions, Frame, StackNode};
use memtrace_trace::ids::{FrameId, StackId};

use super::cast::Width::{Full, Half};
use super::*;
use crate::passes::lifetimes::{BlockLifetimes, NEVER};
use crate::passes::stacks::StackTable;
use crate::suggestions::recorded::calls::outermost_calls;
use crate::suggestions::recorded::span::{Key, at};
use memtrace_replay::AllocatorSettings;

const MIB: u64 = 1 << 20;
const NONE: ContextId = ContextId::NONE;

/// A line of the program, and the node that it makes. Both have this number.
fn definitions(nodes: &[&str]) -> Definitions {
    let mut definitions = Definitions {
        frames: vec![Frame::default()],
        stacks: vec![StackNode { parent: StackId::NONE, frame: FrameId::NONE }],
        contexts: vec![Context::default()],
        ..Definitions::default()
    };
    for (number, node) in (1..).zip(nodes) {
        let filename = "model.py".into();
        definitions.frames.push(Frame { filename, line: number, ..Frame::default() });
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId(number) });
        definitions.contexts.push(Context { node: (*node).into(), forward: StackId(number), module: NONE });
    }
    definitions
}

#[derive(Default)]
struct Program {
    blocks: Vec<BlockLifetime>,
    seq: u32,
    passes: u16,
}

impl Program {
    fn alloc(&mut self, mib: u64, phase: Phase, category: Category, line: u32, node: u32) -> usize {
        self.seq += 1;
        let mut block = BlockLifetime::of_size(self.seq, mib * MIB);
        (block.start.phase, block.category, block.start.step, block.start.backward_passes) =
            (phase, category, 0, self.passes);
        (block.start.stack, block.start.context) = (StackId(line), ContextId(node));
        self.blocks.push(block);
        self.blocks.len() - 1
    }

    /// A result of the line with this number.
    fn result(&mut self, mib: u64, line: u32) -> usize {
        self.alloc(mib, Phase::Forward, Category::Activation, line, 0)
    }

    fn free(&mut self, block: usize, node: u32) {
        self.seq += 1;
        (self.blocks[block].freed, self.blocks[block].freed_context) = (self.seq, ContextId(node));
    }

    fn with<T>(&self, nodes: &[&str], check: impl FnOnce(&Recorded<'_>) -> T) -> T {
        let definitions = definitions(nodes);
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes {
            blocks: self.blocks.clone(),
            stream_pools: vec![(0, 0)],
            is_whole: true,
            ..BlockLifetimes::default()
        };
        check(&Recorded::new(&lifetimes, &definitions, &table, AllocatorSettings::default(), None, None))
    }
}

/// Two linear layers with a normalization between them, of which the second one needs gradients of its input.
fn normalized() -> Program {
    let mut program = Program::default();
    program.alloc(100, Phase::Data, Category::Input, 0, 0);
    let [first, norm, second] = [1, 2, 3].map(|line| program.result(100, line));
    program.free(second, 0);
    program.passes = 1;
    let of_norm = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 3);
    program.alloc(10, Phase::Backward, Category::Gradient, 0, 3);
    program.free(norm, 3);
    let of_first = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
    program.free(first, 2);
    program.free(of_norm, 2);
    program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
    program.free(of_first, 1);
    program
}
const NODES: [&str; 3] = ["AddmmBackward0", "NativeLayerNormBackward0", "AddmmBackward0"];

#[test]
fn an_operation_in_the_other_type_saves_a_copy_of_its_input() {
    let program = normalized();
    program.with(&NODES, |recorded| {
        let cast = pass::find(recorded, &AutogradSites::of(recorded), Full);
        assert_eq!(cast.halved, [1, 3], "the linear layers");
        let mut copies: Vec<(u32, u64)> = cast.copies.iter().map(|c| (c.block, c.requested / MIB)).collect();
        copies.sort_unstable();
        // Input, result of the first layer in float32, result of the normalization, and both weights.
        assert_eq!(copies, [(0, 50), (1, 100), (2, 50), (5, 5), (7, 5)]);
        let mut unsaved: Vec<u32> = cast.unsaved.keys().copied().collect();
        unsaved.sort_unstable();
        assert_eq!(unsaved, [1, 2]);
        let weight = |block: u32| cast.copies.iter().find(|copy| copy.block == block).map(|copy| copy.end);
        let backward = recorded.events.iter().find(|event| event.context == ContextId(3)).expect("a node").seq;
        assert_eq!(weight(7), Some(at(backward)), "no gradient of the input: the copy ends with autocast");
        assert!(weight(5) > weight(7), "the backward pass needs the copy");
    });
}

#[test]
fn a_gradient_has_the_type_of_the_operation_and_then_that_of_the_input() {
    let program = normalized();
    program.with(&NODES, |recorded| {
        let mut spans = recorded.spans();
        pass::find(recorded, &AutogradSites::of(recorded), Full).apply(
            recorded,
            &outermost_calls(recorded),
            &mut spans,
        );
        let of = |block: u32| {
            let all = spans.iter().filter(|span| span.block == block && span.exists());
            let mut all: Vec<(Key, u64)> = all.map(|span| (span.start, span.requested / MIB)).collect();
            all.sort_unstable();
            all.into_iter().map(|(_, mib)| mib).collect::<Vec<u64>>()
        };
        // The gradient of what the normalization computed is cast to float32, that of its input to bfloat16.
        assert_eq!(of(4), [50, 100]);
        assert_eq!(of(6), [100, 50]);
        // A copy of the weight in the forward pass, then its gradient in both types.
        assert_eq!(of(5), [5, 5, 10]);
    });
}

#[test]
fn workspaces_for_bfloat16_are_unknown() {
    let mut program = Program::default();
    program.alloc(100, Phase::Data, Category::Input, 0, 0);
    let result = program.result(100, 1);
    let workspace = program.result(300, 1);
    program.free(workspace, 0);
    program.passes = 1;
    let of_result = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
    program.free(result, 0);
    let in_backward = program.alloc(200, Phase::Backward, Category::AutogradDetail, 0, 1);
    program.free(in_backward, 1);
    program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
    program.free(of_result, 1);
    program.with(&["ConvolutionBackward0", "ReluBackward0"], |recorded| {
        let sizes = |assumed| {
            let mut spans = recorded.spans();
            let cast = pass::find(recorded, &AutogradSites::of(recorded), assumed);
            assert_eq!(cast.halved, [result as u32], "the workspace is no result");
            cast.apply(recorded, &outermost_calls(recorded), &mut spans);
            let of = |block: usize| if spans[block].exists() { spans[block].requested / MIB } else { 0 };
            [of(workspace), of(in_backward)]
        };
        assert_eq!((sizes(Full), sizes(Half)), ([300, 200], [0, 0]));
    });
}

#[test]
fn unknown_operations_are_counted() {
    let program = normalized();
    program.with(&NODES, |recorded| {
        assert_eq!(unknown_bytes(recorded, &pass::find(recorded, &AutogradSites::of(recorded), Full)), 0)
    });
    let nodes = ["AddmmBackward0", "FusedNormBackward", "AddmmBackward0"];
    // The result, and after it the gradient of the input.
    program.with(&nodes, |recorded| {
        assert!(Autocast::of(recorded, 99 * MIB).is_none() && Autocast::of(recorded, 100 * MIB).is_some())
    });
}

#[test]
fn the_softmax_of_a_cross_entropy_has_the_type_of_the_logits_or_one_that_is_not_shown() {
    let mut program = Program::default();
    program.alloc(1, Phase::Data, Category::Input, 0, 0);
    let logits = program.result(100, 1);
    let softmax = program.result(100, 2);
    program.free(logits, 0);
    program.passes = 1;
    let gradient = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 3);
    let of_logits = program.alloc(100, Phase::Backward, Category::AutogradDetail, 0, 2);
    program.free(softmax, 2);
    program.free(gradient, 2);
    program.alloc(10, Phase::Backward, Category::Gradient, 0, 1);
    program.free(of_logits, 1);
    let nodes = ["MmBackward0", "LogSoftmaxBackward0", "NllLossBackward0"];
    let halved = |assumed, is_one_function: bool| {
        let mut definitions = definitions(&nodes);
        if is_one_function {
            definitions.contexts[3].forward = StackId(2);
        }
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
        let settings = AllocatorSettings::default();
        let recorded = Recorded::new(&lifetimes, &definitions, &table, settings, None, None);
        assert_eq!(recorded.until, NEVER);
        pass::find(&recorded, &AutogradSites::of(&recorded), assumed).halved
    };
    assert_eq!(halved(Full, true), [1]);
    assert_eq!(halved(Half, true), [1, 2]);
    assert_eq!(halved(Half, false), [1], "log_softmax of its own");
}
