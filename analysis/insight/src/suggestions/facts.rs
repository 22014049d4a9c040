//! The facts about a recording that suggestions need beside its blocks.

use memtrace_trace::definition::TensorKind;

use super::recorded::Recorded;
use super::recorded::batch::{self, Batches};
use super::recorded::calls::{self, Call};
use super::recorded::kv_cache;
use super::recorded::micro_batches::{MicroBatch, gathered_micro_batches};
use super::recorded::optimizer_step;
use super::recorded::span::{self, Span};
use super::recorded::unused_gradients::unused_gradients;
use crate::passes::category::Category;
use crate::passes::lifetimes::BlockLifetime;
use crate::passes::phase::Phase;
use crate::rules::{OptimizerRule, is_serving_engine};

/// The facts about the run beside the blocks of its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunFacts {
    /// The phase of the point in time to improve.
    pub phase: Phase,
    /// Whether a backward pass has run on the device.
    pub has_backward: bool,
    /// Whether a forward pass without a backward pass belongs to a training.
    pub trains: bool,
}

/// A recording, and the figures of it that several suggestions need.
#[derive(Debug)]
pub struct Facts<'a> {
    pub(super) recorded: Recorded<'a>,
    pub(super) run: RunFacts,
    /// The allocated bytes at the point in time to improve.
    pub(super) peak: u64,
    /// The highest sum of the recorded blocks.
    pub(super) summed: u64,
    /// `seq` of the event that reaches the highest sum.
    pub(super) peak_seq: u32,
    pub(super) batches: Batches,
    /// The outermost calls of modules with gradients.
    pub(super) outermost: Vec<Call>,
    /// Keys and values that nothing reads, each with the last event that needs it without a cache.
    pub(super) unread_cache: Vec<(u32, u32)>,
    /// By step: micro-batches whose forward passes all run before the first backward pass.
    pub(super) gathered: Vec<Vec<MicroBatch>>,
    /// The indices of gradients that no optimizer uses, in order.
    pub(super) unused_gradients: Vec<u32>,
    pub(super) optimizer: Option<&'static OptimizerRule>,
}

impl<'a> Facts<'a> {
    /// The facts about recorded blocks, whose spans are `spans`. `peak` are the allocated bytes at the point in time to
    /// improve.
    pub(super) fn new(recorded: Recorded<'a>, spans: &[Span], run: RunFacts, peak: u64) -> Facts<'a> {
        let (summed, key) = span::peak(spans, &recorded.settings);
        let outermost = calls::outermost_calls(&recorded);
        let mut facts = Facts {
            run,
            peak,
            summed,
            peak_seq: span::seq_of(key),
            batches: batch::batches(&recorded),
            gathered: gathered_micro_batches(&recorded, &outermost),
            outermost,
            unread_cache: kv_cache::unread(&recorded),
            unused_gradients: unused_gradients(&recorded),
            optimizer: optimizer_step::optimizer(&recorded),
            recorded,
        };
        if facts.recorded.is_continued() {
            facts.run.phase = facts.peak_phase().unwrap_or(run.phase);
        }
        facts
    }

    /// The phase in which the highest sum of the recorded blocks is reached.
    fn peak_phase(&self) -> Option<Phase> {
        let at_peak = |block: &&BlockLifetime| block.allocated == self.peak_seq;
        self.recorded.blocks.iter().find(at_peak).map(|block| block.start.phase)
    }

    /// Whether steps have backward passes.
    pub(super) fn is_training(&self) -> bool {
        self.batches != Batches::Inference
    }

    /// Whether the recording ends with an error in an evaluation that keeps activations for no backward pass.
    pub(super) fn ends_in_evaluation(&self) -> bool {
        self.recorded.ends_in_unused_graph
    }

    /// Whether blocks that a backward pass frees are allocated at the peak. A forward pass without gradients is then a
    /// part of a training step, such as that of a teacher.
    pub(super) fn peak_is_in_training_step(&self) -> bool {
        let mut at_peak = self.recorded.blocks.iter().filter(|block| block.includes(self.peak_seq));
        at_peak.any(|block| block.start.phase == Phase::Forward && self.recorded.is_freed_by_node(block))
    }

    /// Whether parameters are shards of FullyShardedDataParallel, which gathers them for each module.
    pub(super) fn is_sharded(&self) -> bool {
        let is_sharded = |class: &str| class.starts_with("FSDP") || class == "FullyShardedDataParallel";
        self.recorded.definitions.nn_calls.values().any(|call| is_sharded(&call.class))
    }

    /// Whether all named tensors of a kind are `float32`. Scalars such as step counters are ignored.
    pub(super) fn is_float32(&self, kind: TensorKind) -> bool {
        let names = self.recorded.definitions.tensor_names.iter();
        let mut shapes = names.filter(|n| n.kind == kind && !n.shape.ends_with("[]")).map(|n| &*n.shape).peekable();
        shapes.peek().is_some() && shapes.all(|shape| shape.starts_with("float32["))
    }

    /// Whether an engine serves the model: its batches are its own, and its cache is as large as the device permits.
    pub(super) fn is_served(&self) -> bool {
        let mut frames = self.recorded.definitions.frames.iter();
        !self.is_training() && frames.any(|frame| is_serving_engine(&frame.filename))
    }

    /// Whether optimizers keep state of one of these names, such as `exp_avg_sq`.
    pub(super) fn has_optimizer_state(&self, states: &[&str]) -> bool {
        let mut names = self.recorded.definitions.tensor_names.iter().filter(|n| n.kind == TensorKind::OptimizerState);
        let state =
            |name: &str| name.split_once(" of ").and_then(|(state, _)| Some(state.split_once('.')?.1.to_owned()));
        names.any(|n| state(&n.name).is_some_and(|state| states.contains(&state.as_str())))
    }

    /// The name of the optimizer's class; `None` without one, or with several.
    pub(super) fn optimizer_name(&self) -> Option<String> {
        let optimizer = self.optimizer?;
        let facts = |block: &BlockLifetime| self.recorded.table.facts(block.start.stack);
        let mut in_step = self.recorded.blocks.iter().filter(|block| block.start.phase == Phase::Optimizer);
        let block = in_step.find(|block| facts(block).optimizer.is_some_and(|one| one.name == optimizer.name))?;
        self.recorded.table.optimizer_name(block.start.stack)
    }

    /// The name of the optimizer, as an action has it.
    pub(super) fn optimizer_text(&self) -> String {
        self.optimizer_name().unwrap_or_else(|| "the optimizer".to_owned())
    }

    /// The bytes at the peak in blocks of some categories.
    pub(super) fn bytes_at_peak(&self, counts: impl Fn(Category) -> bool) -> u64 {
        let counted = self.recorded.blocks.iter().filter(|block| counts(block.category));
        counted.filter(|block| block.includes(self.peak_seq)).map(|block| block.size()).sum()
    }
}
