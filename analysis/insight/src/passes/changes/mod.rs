//! Changes to a program, computed by replaying its recorded blocks with the change.
//!
//! A change turns the lifetimes of blocks into other lifetimes: blocks shrink, end earlier, vanish, or are allocated again.
//! The new peak is the highest sum of the changed blocks, as PyTorch's allocator would place them. Changes can be
//! combined: each takes what the one before has left.
//!
//! A recording that ends with an out-of-memory error lacks the rest of a step. If an earlier iteration shows the rest, its
//! blocks are added. Else the new peak is that of the recorded part.

mod attention;
mod autocast;
mod batch;
mod calls;
mod checkpointing;
mod continuation;
mod evaluation;
mod kv_cache;
mod loading;
mod loss;
mod offload;
mod optimizer;
mod reads;
mod recorded;
mod results;
mod span;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::{ContextId, StackId};

pub use continuation::FailedRequest;
pub use recorded::Recorded;

use super::category::Category;
use super::lifetimes::{BlockLifetime, NEVER};
use super::phase::Phase;
use crate::rules::OptimizerRule;
use attention::Scores;
use autocast::{Autocast, Width};
use batch::Batches;
use calls::{Call, Members};
use loading::Converted;
use loss::Logits;
use results::Results;
use span::Span;

/// A change of the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OptimizerChange {
    /// `fused=True`.
    Fused,
    /// `foreach=False`.
    OneByOne,
    /// State in 8 bits.
    EightBit,
    /// The optimizer steps inside the backward pass, parameter by parameter.
    InBackward,
}

/// A change of the batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BatchChange {
    /// Half the batch; gradients are accumulated over two.
    Accumulated,
    /// Half of each micro-batch, and twice as many. The number is that of today's micro-batches in a step.
    MoreMicroBatches(u16),
    /// Half the batch.
    Half,
    /// Half the batch of evaluations.
    Evaluation,
}

/// What to change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// Attention without score matrices.
    pub attention: bool,
    /// The loss of a language model in chunks.
    pub chunked_loss: bool,
    /// Forward passes without a backward pass run without gradients.
    pub no_grad: bool,
    /// Results that an evaluation keeps are moved to the CPU.
    pub results_on_cpu: bool,
    /// Forward passes that generate nothing keep no keys and values.
    pub no_cache: bool,
    /// Tensors are loaded to the CPU.
    pub load_on_cpu: bool,
    /// The model is built on the meta device, because loaded tensors replace its parameters.
    pub build_on_meta: bool,
    /// Parameters are made in the data type to which the program converts them.
    pub convert_first: bool,
    /// Activation checkpointing of the modules of these classes; empty without it.
    pub checkpoint: BTreeSet<Box<str>>,
    /// Saved tensors are kept in host memory.
    pub offload: bool,
    /// Gradients are freed right after the optimizer's step.
    pub clear_gradients: bool,
    /// Gradients are views of DistributedDataParallel's buckets.
    pub bucket_views: bool,
    /// Parameters, gradients and optimizer state in bfloat16.
    pub bfloat16: bool,
    /// Forward pass and loss under autocast in bfloat16.
    pub autocast: bool,
    /// All parameters are frozen, and small adapters are trained.
    pub freeze: bool,
    /// The optimizer.
    pub optimizer: Option<OptimizerChange>,
    /// The batch.
    pub batch: Option<BatchChange>,
}

impl Plan {
    /// This plan and another one; `None` if they change the same thing.
    pub fn with(&self, other: &Plan) -> Option<Plan> {
        let clashes = self.optimizer.is_some() && other.optimizer.is_some()
            || self.batch.is_some() && other.batch.is_some()
            || !self.checkpoint.is_empty() && !other.checkpoint.is_empty()
            // Both take the same activations away.
            || !self.checkpoint.is_empty() && other.offload
            || self.offload && !other.checkpoint.is_empty()
            // A loaded tensor can be a parameter that is converted.
            || self.load_on_cpu && other.convert_first
            || self.convert_first && other.load_on_cpu
            // A parameter that is replaced can be one that is converted.
            || self.build_on_meta && other.convert_first
            || self.convert_first && other.build_on_meta
            // Only for a training that starts from a trained model.
            || self.freeze != other.freeze
            // What these do is not known of values in two types.
            || self.autocast && other.changes_forward()
            || self.changes_forward() && other.autocast
            // A batch over which gradients are accumulated needs them until its last part.
            || self.accumulates() && other.steps_early()
            || self.steps_early() && other.accumulates();
        let more = Plan {
            attention: self.attention || other.attention,
            chunked_loss: self.chunked_loss || other.chunked_loss,
            no_grad: self.no_grad || other.no_grad,
            results_on_cpu: self.results_on_cpu || other.results_on_cpu,
            no_cache: self.no_cache || other.no_cache,
            load_on_cpu: self.load_on_cpu || other.load_on_cpu,
            build_on_meta: self.build_on_meta || other.build_on_meta,
            convert_first: self.convert_first || other.convert_first,
            checkpoint: self.checkpoint.union(&other.checkpoint).cloned().collect(),
            offload: self.offload || other.offload,
            clear_gradients: self.clear_gradients || other.clear_gradients,
            bucket_views: self.bucket_views || other.bucket_views,
            bfloat16: self.bfloat16 || other.bfloat16,
            autocast: self.autocast || other.autocast,
            freeze: self.freeze || other.freeze,
            optimizer: self.optimizer.or(other.optimizer),
            batch: self.batch.or(other.batch),
        };
        (!clashes && more != *self).then_some(more)
    }

    fn changes_forward(&self) -> bool {
        self.attention
            || self.chunked_loss
            || self.no_grad
            || self.no_cache
            || !self.checkpoint.is_empty()
            || self.offload
            || self.bfloat16
            || self.steps_early()
    }

    fn accumulates(&self) -> bool {
        self.batch == Some(BatchChange::Accumulated)
    }

    fn steps_early(&self) -> bool {
        self.optimizer == Some(OptimizerChange::InBackward)
    }
}

/// What a plan leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// The new peak of allocated bytes.
    pub peak: u64,
    /// The new peak of reserved bytes.
    pub reserved: u64,
    /// Whether the allocator served every request within the limit.
    pub fits: bool,
}

/// The facts about a recording that plans need.
#[derive(Debug)]
pub struct Changes<'a> {
    recorded: Recorded<'a>,
    scores: Option<Scores>,
    logits: Option<Logits>,
    unused_graphs: Vec<Call>,
    results: Results,
    /// Keys and values that nothing reads, each with the last event that needs it without a cache.
    unread_cache: Vec<(u32, u32)>,
    loaded: Vec<u32>,
    replaced: Vec<u32>,
    converted: Vec<Converted>,
    batches: Batches,
    optimizer: Option<&'static OptimizerRule>,
    /// What autocast changes, if the recording shows that.
    autocast: Option<Autocast>,
    /// The recorded peak, and the highest sum of the recorded blocks as the allocator's policy places them.
    peak: u64,
    placed: u64,
    summed: u64,
    /// `seq` of the event that reaches the highest sum.
    peak_seq: u32,
    /// The highest peaks outside the kept steps, by phase.
    elsewhere: [u64; Phase::ALL.len()],
    limit: u64,
}

/// Checkpointed modules are worth a replay if they hold at least one in this many parts of the peak.
const WORTH_CHECKPOINTING: u64 = 20;
/// A module that calls no other and allocates at most so many blocks is a single operation: batch normalization
/// allocates its result, the means and the deviations.
const OPERATION_BLOCKS: usize = 3;
/// The minimum number of modules that are checkpointed.
const MIN_MODULES: usize = 2;
/// The maximum number of classes whose checkpointing is replayed.
const MAX_CLASSES: usize = 8;
/// The policy's peak counts if it differs by at most one in this many parts from the recorded one.
const PRECISE: u64 = 200;
/// Another class is checkpointed too if that lowers the peak by at least one in this many parts.
const WORTH_ANOTHER_CLASS: u64 = 20;
/// Among classes whose checkpointing leads to peaks within one in this many parts, the one with the fewest modules counts.
const SAME_PEAK: u64 = 33;
/// `bfloat16` is computed where blocks of unknown data types are at most one in this many parts of the peak.
const SMALL_UNKNOWN: u64 = 20;
/// Autocast is computed where values of unknown operations, and parameters without gradients, are at most one in this many
/// parts of the peak.
const SMALL_UNTYPED: u64 = 33;
/// Autocast is computed where the workspaces of libraries are at most one in this many parts of the peak.
const SMALL_WORKSPACES: u64 = 10;
/// The peak under autocast is announced if it depends on unknown types by at most one in this many parts.
const SMALL_DIFFERENCE: u64 = 20;

impl<'a> Changes<'a> {
    /// Takes the recorded blocks. `peak`: the allocated bytes at the point in time to improve. `limit`: the bytes that
    /// the allocator can reserve. `elsewhere`: the peak of each phase over the whole run.
    pub fn new(recorded: Recorded<'a>, peak: u64, limit: u64, elsewhere: [u64; Phase::ALL.len()]) -> Changes<'a> {
        let spans = recorded.spans();
        let (summed, key) = span::peak(&spans, &recorded.settings);
        let placed = span::place(&spans, &recorded.lifetimes.stream_pools, &recorded.settings, u64::MAX).allocated;
        let batches = batch::batches(&recorded);
        let outermost = evaluation::outermost_calls(&recorded);
        let mut changes = Changes {
            scores: Scores::find(&recorded, peak),
            logits: Logits::find(&recorded, peak),
            results: if recorded.ends_in_unused_graph {
                Results::default()
            } else {
                Results::find(&recorded, &outermost, batches != Batches::Inference)
            },
            unused_graphs: evaluation::unused_graphs(&recorded, outermost),
            unread_cache: kv_cache::unread(&recorded),
            loaded: loading::loaded(&recorded),
            replaced: loading::replaced(&recorded),
            converted: loading::converted(&recorded),
            batches,
            optimizer: optimizer::optimizer(&recorded),
            autocast: None,
            peak,
            placed,
            summed,
            peak_seq: span::seq_of(key),
            elsewhere,
            limit,
            recorded,
        };
        if changes.is_in_float32() {
            changes.autocast = Autocast::find(&changes.recorded, peak / SMALL_UNTYPED);
        }
        changes
    }

    /// Whether the recording is a training in float32, without operations that autocast changes in other ways.
    fn is_in_float32(&self) -> bool {
        let recorded = &self.recorded;
        let is_other =
            |block: &BlockLifetime| block.category == Category::AutocastCache || block.phase == Phase::Recompute;
        self.batches != Batches::Inference
            && !self.is_sharded()
            && recorded.until == NEVER
            && self.is_float32(TensorKind::Parameter)
            && !recorded.blocks.iter().any(is_other)
            && self.workspace_bytes() <= self.peak / SMALL_WORKSPACES
            && self.frozen_bytes() <= self.peak / SMALL_UNTYPED
    }

    /// Whether parameters are shards of FullyShardedDataParallel, which gathers them for each module.
    fn is_sharded(&self) -> bool {
        let is_sharded = |class: &str| class.starts_with("FSDP") || class == "FullyShardedDataParallel";
        self.recorded.definitions.nn_calls.values().any(|call| is_sharded(&call.class))
    }

    /// The bytes of libraries' workspaces at the peak. Those for another data type can be larger or smaller.
    fn workspace_bytes(&self) -> u64 {
        let workspaces = self.recorded.blocks.iter().filter(|block| block.category == Category::Workspace);
        workspaces.filter(|block| block.includes(self.peak_seq)).map(|block| block.size()).sum()
    }

    /// The bytes of parameters for which no backward pass computes a gradient of their size. Autocast makes copies of
    /// them that the recording does not show.
    fn frozen_bytes(&self) -> u64 {
        let mut sizes: BTreeMap<u64, i64> = BTreeMap::new();
        let blocks = &self.recorded.blocks;
        for block in blocks.iter().filter(|b| b.category == Category::Parameter && b.includes(self.peak_seq)) {
            *sizes.entry(block.requested()).or_default() += 1;
        }
        let parameters = sizes.clone();
        // In one pass each parameter has at most one gradient.
        let mut of_pass: BTreeMap<(u16, u64), i64> = BTreeMap::new();
        for block in blocks.iter().filter(|block| autocast::is_weight_gradient(&self.recorded, block)) {
            *of_pass.entry((block.backward_passes, block.requested())).or_default() += 1;
        }
        for ((_, size), count) in of_pass {
            if let Some(left) = sizes.get_mut(&size) {
                *left = (*left).min(parameters[&size] - count);
            }
        }
        sizes.into_iter().map(|(size, left)| size * left.max(0) as u64).sum()
    }

    /// Whether values whose types the recording does not show change the peak under autocast only a little.
    fn is_sure(&self, plan: &Plan) -> bool {
        if !plan.autocast {
            return true;
        }
        let peak = |assumed| span::peak(&self.apply_assuming(plan, assumed), &self.recorded.settings).0;
        let (low, high) = (peak(Width::Half), peak(Width::Full));
        high.abs_diff(low) <= high / SMALL_DIFFERENCE
    }

    /// Whether the recorded blocks add up to the recorded peak. If not, blocks are missing, and no change is computed.
    pub fn is_sound(&self) -> bool {
        let tolerance = self.peak / 50;
        self.summed <= self.peak + tolerance && self.summed + self.peak / 10 >= self.peak
    }

    /// The phase in which the highest sum of the recorded blocks is reached.
    pub fn peak_phase(&self) -> Option<Phase> {
        let at_peak = |block: &&BlockLifetime| block.allocated == self.peak_seq;
        self.recorded.blocks.iter().find(at_peak).map(|block| block.phase)
    }

    /// The single changes that make sense for the recording.
    pub fn plans(&self) -> Vec<Plan> {
        let mut plans = Vec::new();
        let mut add = |plan: Plan| plans.push(plan);
        if self.scores.is_some() {
            add(Plan { attention: true, ..Plan::default() });
        }
        if self.logits.is_some() {
            add(Plan { chunked_loss: true, ..Plan::default() });
        }
        let is_training = self.batches != Batches::Inference;
        if self.ends_in_evaluation() {
            add(Plan { batch: Some(BatchChange::Evaluation), ..Plan::default() });
        } else {
            if let Some(classes) = self.classes_to_checkpoint() {
                add(Plan { checkpoint: classes, ..Plan::default() });
            }
            let batch = match self.batches {
                Batches::One => BatchChange::Accumulated,
                Batches::Accumulated(passes) => BatchChange::MoreMicroBatches(passes),
                Batches::Several | Batches::Inference => BatchChange::Half,
            };
            add(Plan { batch: Some(batch), ..Plan::default() });
        }
        if !self.unused_graphs.is_empty() {
            add(Plan { no_grad: true, ..Plan::default() });
        }
        if !self.results.is_empty() {
            add(Plan { results_on_cpu: true, ..Plan::default() });
        }
        if !self.unread_cache.is_empty() {
            add(Plan { no_cache: true, ..Plan::default() });
        }
        if !self.loaded.is_empty() {
            add(Plan { load_on_cpu: true, ..Plan::default() });
        }
        if !self.replaced.is_empty() {
            add(Plan { build_on_meta: true, ..Plan::default() });
        }
        if !self.converted.is_empty() {
            add(Plan { convert_first: true, ..Plan::default() });
        }
        if is_training {
            if !self.peak_is_in_training_step() && !self.ends_in_evaluation() {
                add(Plan { batch: Some(BatchChange::Evaluation), ..Plan::default() });
            }
            add(Plan { offload: true, ..Plan::default() });
            add(Plan { clear_gradients: true, ..Plan::default() });
        }
        let calls = &self.recorded.definitions.nn_calls;
        let has_buckets = self.recorded.blocks.iter().any(|b| b.category == Category::CommunicationBucket);
        if has_buckets && calls.values().any(|call| &*call.class == "DistributedDataParallel") {
            add(Plan { bucket_views: true, ..Plan::default() });
        }
        let mut optimizer = |change| add(Plan { optimizer: Some(change), ..Plan::default() });
        if let (Some(rule), Some(name)) = (self.optimizer, self.optimizer_name()) {
            if optimizer::can_fuse(&name) {
                optimizer(OptimizerChange::Fused);
            } else if optimizer::is_own_class(rule, &name) {
                optimizer(OptimizerChange::OneByOne);
            }
            if optimizer::has_eight_bit(&name) && self.is_float32(TensorKind::OptimizerState) {
                optimizer(OptimizerChange::EightBit);
            }
            if self.batches == Batches::One && !optimizer::works_on_gradients(&self.recorded) {
                optimizer(OptimizerChange::InBackward);
            }
        }
        if self.is_float32(TensorKind::Parameter) && self.unknown_types() <= self.peak / SMALL_UNKNOWN {
            add(Plan { bfloat16: true, ..Plan::default() });
        }
        let (training, with_parameters) = optimizer::trained_bytes(&self.recorded, self.peak_seq);
        let is_filled = training > 0 && with_parameters >= self.summed / 2;
        if is_filled && self.batches == Batches::One && !self.is_sharded() && optimizer::is_adaptable(&self.recorded) {
            add(Plan { freeze: true, ..Plan::default() });
        }
        if self.autocast.is_some() {
            add(Plan { autocast: true, ..Plan::default() });
        }
        plans
    }

    /// Whether the recording ends with an error in an evaluation that keeps activations for no backward pass.
    pub fn ends_in_evaluation(&self) -> bool {
        self.recorded.ends_in_unused_graph
    }

    /// Whether blocks that a backward pass frees are allocated at the peak. A forward pass without gradients is then a
    /// part of a training step, such as that of a teacher.
    fn peak_is_in_training_step(&self) -> bool {
        let at_peak = self.recorded.blocks.iter().filter(|block| block.includes(self.peak_seq));
        at_peak.into_iter().any(|block| block.phase == Phase::Forward && self.recorded.is_freed_by_node(block))
    }

    /// What a plan leads to; `None` if it does not lower the peak.
    pub fn outcome(&self, plan: &Plan) -> Option<Outcome> {
        let spans = self.apply(plan);
        let recorded = &self.recorded;
        let (summed, _) = span::peak(&spans, &recorded.settings);
        let floor = self.floor(plan);
        if summed.max(floor) >= self.summed || !self.is_sure(plan) {
            return None;
        }
        let placed = span::place(&spans, &recorded.lifetimes.stream_pools, &recorded.settings, u64::MAX);
        let fits = placed.reserved <= self.limit
            || span::place(&spans, &recorded.lifetimes.stream_pools, &recorded.settings, self.limit).fits;
        let peak = if self.placed.abs_diff(self.peak) <= self.peak / PRECISE {
            placed.allocated
        } else {
            // What the recorded sizes have more than the rounded requests remains in proportion.
            (u128::from(summed) * u128::from(self.peak) / u128::from(self.summed.max(1))) as u64
        };
        Some(Outcome { peak: peak.max(floor), reserved: placed.reserved.max(floor), fits: fits && floor <= self.limit })
    }

    /// The highest sum of the changed blocks. Faster than an outcome, and without what the allocator adds.
    pub fn summed_peak(&self, plan: &Plan) -> u64 {
        self.quick(plan).max(self.floor(plan))
    }

    /// The highest sum of the changed blocks.
    fn quick(&self, plan: &Plan) -> u64 {
        span::peak(&self.apply(plan), &self.recorded.settings).0
    }

    /// The peak of the phases that a plan does not change, in steps whose blocks were not kept.
    fn floor(&self, plan: &Plan) -> u64 {
        if self.recorded.lifetimes.is_whole {
            return 0;
        }
        let changes_state =
            plan.freeze || plan.bfloat16 || plan.optimizer.is_some() || plan.clear_gradients || plan.bucket_views;
        let changes_eval = plan.attention || matches!(plan.batch, Some(BatchChange::Half | BatchChange::Evaluation));
        let is_unchanged = |phase: &&Phase| match phase {
            Phase::Load => !plan.bfloat16 && !plan.load_on_cpu && !plan.build_on_meta && !plan.convert_first,
            Phase::Eval if plan.no_cache => false,
            Phase::Eval | Phase::Generate | Phase::Rollout => !changes_eval && !plan.results_on_cpu && !changes_state,
            Phase::Optimizer => !changes_state,
            _ => false,
        };
        let unchanged = Phase::ALL.iter().filter(is_unchanged);
        unchanged.map(|phase| self.elsewhere[*phase as usize]).max().unwrap_or(0)
    }

    fn apply(&self, plan: &Plan) -> Vec<Span> {
        self.apply_assuming(plan, Width::Full)
    }

    /// Applies a plan. `assumed`: the type under autocast of values of which the recording does not show it.
    fn apply_assuming(&self, plan: &Plan, assumed: Width) -> Vec<Span> {
        let recorded = &self.recorded;
        let mut spans = recorded.spans();
        if plan.no_grad {
            evaluation::without_gradients(recorded, &self.unused_graphs, &mut spans);
        }
        if plan.results_on_cpu {
            self.results.remove(&mut spans);
        }
        if plan.no_cache {
            kv_cache::without_cache(&self.unread_cache, &mut spans);
        } else if !plan.checkpoint.is_empty() {
            // A recomputation would fill the cache again, so models that are checkpointed fill none in training.
            let of_training = |(index, _): &&(u32, u32)| recorded.blocks[*index as usize].phase == Phase::Forward;
            let filled: Vec<(u32, u32)> = self.unread_cache.iter().filter(of_training).copied().collect();
            kv_cache::without_cache(&filled, &mut spans);
        }
        if plan.load_on_cpu {
            self.loaded.iter().for_each(|index| spans[*index as usize].vanish());
        }
        if plan.build_on_meta {
            self.replaced.iter().for_each(|index| spans[*index as usize].vanish());
        }
        if plan.convert_first {
            loading::convert_first(&self.converted, &mut spans);
        }
        if plan.clear_gradients {
            optimizer::clear_gradients(recorded, &mut spans);
        }
        if let (true, Some(autocast)) = (plan.autocast, &self.autocast) {
            autocast.apply(recorded, assumed, &mut spans);
        }
        if let (true, Some(scores)) = (plan.attention, &self.scores) {
            scores.remove(recorded, &mut spans);
        }
        if let (true, Some(logits)) = (plan.chunked_loss, &self.logits) {
            logits.split(recorded, &mut spans);
        }
        if !plan.checkpoint.is_empty() {
            let members = self.members(&plan.checkpoint);
            let calls = calls::calls(recorded, &members);
            checkpointing::checkpoint(recorded, &members, &calls, &mut spans);
        }
        if plan.offload {
            let logits = self.logits.as_ref().filter(|_| plan.chunked_loss);
            let recomputed = logits.map(|logits| logits.weight_gradients(recorded)).unwrap_or_default();
            offload::offload(recorded, &recomputed, &mut spans);
        }
        if plan.bucket_views {
            optimizer::gradients_in_buckets(recorded, &mut spans);
        }
        if plan.freeze {
            optimizer::freeze(recorded, &mut spans);
        }
        if plan.bfloat16 {
            self.halve_state(&mut spans);
        }
        match plan.optimizer {
            Some(OptimizerChange::Fused) => optimizer::fuse(recorded, &mut spans),
            Some(OptimizerChange::OneByOne) => optimizer::one_by_one(recorded, 3, &mut spans),
            Some(OptimizerChange::EightBit) => optimizer::eight_bit(recorded, &mut spans),
            Some(OptimizerChange::InBackward) => optimizer::step_in_backward(recorded, &mut spans),
            None => {}
        }
        match plan.batch {
            Some(BatchChange::Accumulated) => {
                batch::halve(recorded, true, &mut spans);
                batch::accumulate(recorded, &mut spans);
            }
            Some(BatchChange::MoreMicroBatches(_)) => batch::halve(recorded, true, &mut spans),
            Some(BatchChange::Half) => batch::halve(recorded, self.batches != Batches::Inference, &mut spans),
            Some(BatchChange::Evaluation) => batch::halve_evaluation(recorded, &mut spans),
            None => {}
        }
        spans
    }

    fn members(&self, classes: &BTreeSet<Box<str>>) -> Members {
        Members::of(&self.recorded, &classes.iter().map(|class| &**class).collect())
    }

    /// The calls that stand for the modules of these classes that allocate something in a forward pass.
    pub fn checkpointed(&self, classes: &BTreeSet<Box<str>>) -> Vec<ContextId> {
        let members = self.members(classes);
        let called: BTreeSet<u32> = calls::calls(&self.recorded, &members).iter().map(|call| call.member).collect();
        called.iter().filter_map(|member| members.calls.get(*member as usize - 1).copied()).collect()
    }

    /// The classes whose checkpointing lowers the peak most; `None` if none does.
    fn classes_to_checkpoint(&self) -> Option<BTreeSet<Box<str>>> {
        // Before an error in a forward pass nothing shows that a module must be repeated as a whole. Its blocks then count
        // beside the peak, so that a container of all layers is not better than its layers.
        let replayed = |classes: BTreeSet<Box<str>>| {
            let peak = self.quick(&Plan { checkpoint: classes.clone(), ..Plan::default() });
            let repeated = if self.recorded.until < NEVER { self.largest_call(&classes) } else { 0 };
            (peak + repeated, classes)
        };
        let classes = self.repeated_classes();
        let single = classes.iter().map(|class| BTreeSet::from([class.clone()]));
        let several = single.filter(|classes| self.checkpointed(classes).len() >= MIN_MODULES);
        let all: Vec<(u64, BTreeSet<Box<str>>)> = several.map(replayed).collect();
        let lowest = all.iter().map(|(peak, _)| *peak).min().filter(|peak| *peak < self.summed)?;
        let close = all.into_iter().filter(|(peak, _)| *peak <= lowest + lowest / SAME_PEAK);
        let mut best = close.min_by_key(|(peak, classes)| (self.checkpointed(classes).len(), *peak))?;
        for class in &classes {
            if best.1.contains(class) {
                continue;
            }
            let mut more = best.1.clone();
            more.insert(class.clone());
            let more = replayed(more);
            if more.0 + more.0 / WORTH_ANOTHER_CLASS < best.0 {
                best = more;
            }
        }
        Some(best.1)
    }

    /// The most bytes that a call of a module of these classes keeps, or kept before the error.
    fn largest_call(&self, classes: &BTreeSet<Box<str>>) -> u64 {
        let recorded = &self.recorded;
        let kept = |call: &Call| -> u64 {
            let end = call.end(recorded);
            let blocks = call.blocks.iter().map(|index| &recorded.blocks[*index as usize]);
            let kept =
                blocks.filter(|b| b.category == Category::Activation && (b.freed > end || !recorded.is_freed(b)));
            kept.map(|block| block.size()).sum()
        };
        calls::calls(recorded, &self.members(classes)).iter().map(kept).max().unwrap_or(0)
    }

    /// The classes of several modules that hold much at the peak and are not checkpointed, most bytes first.
    fn repeated_classes(&self) -> Vec<Box<str>> {
        let definitions = self.recorded.definitions;
        // By class: the bytes, those under activation checkpointing, and the modules.
        let mut classes: BTreeMap<&str, (u64, u64, BTreeSet<u64>)> = BTreeMap::new();
        let blocks = self.recorded.blocks.iter().filter(|block| block.phase == Phase::Forward);
        for block in blocks.filter(|block| block.includes(self.peak_seq)) {
            let is_checkpointed = self.recorded.table.facts(block.stack).in_checkpoint;
            let mut seen: Vec<&str> = Vec::new();
            let mut context = block.context;
            while let Some(call) = definitions.nn_calls.get(&context) {
                if !seen.contains(&&*call.class) {
                    seen.push(&call.class);
                    let class = classes.entry(&call.class).or_default();
                    class.0 += block.size();
                    class.1 += if is_checkpointed { block.size() } else { 0 };
                }
                classes.entry(&call.class).or_default().2.insert(call.object);
                context = call.caller;
            }
        }
        let is_worth = |(_, (bytes, checkpointed, modules)): &(&str, (u64, u64, BTreeSet<u64>))| {
            *bytes >= self.peak / WORTH_CHECKPOINTING && *checkpointed * 2 < *bytes && modules.len() >= MIN_MODULES
        };
        let callers: BTreeSet<&str> = definitions
            .nn_calls
            .values()
            .filter_map(|call| definitions.nn_calls.get(&call.caller))
            .map(|caller| &*caller.class)
            .collect();
        // A single operation keeps its input, which another module made. Nothing is gained by repeating it.
        let is_composed = |class: &str| {
            let members = || Members::of(&self.recorded, &BTreeSet::from([class]));
            callers.contains(class)
                || calls::calls(&self.recorded, &members()).iter().any(|call| call.blocks.len() > OPERATION_BLOCKS)
        };
        let is_worth = |entry: &(&str, (u64, u64, BTreeSet<u64>))| is_worth(entry) && is_composed(entry.0);
        let mut classes: Vec<_> = classes.into_iter().filter(is_worth).collect();
        classes.sort_by_key(|(class, (bytes, ..))| (std::cmp::Reverse(*bytes), *class));
        classes.into_iter().take(MAX_CLASSES).map(|(class, _)| class.into()).collect()
    }

    /// Whether all named tensors of a kind are `float32`. Scalars such as step counters are ignored.
    fn is_float32(&self, kind: TensorKind) -> bool {
        let names = self.recorded.definitions.tensor_names.iter();
        let mut shapes = names.filter(|n| n.kind == kind && !n.shape.ends_with("[]")).map(|n| &*n.shape).peekable();
        shapes.peek().is_some() && shapes.all(|shape| shape.starts_with("float32["))
    }

    /// The highest sum of blocks whose data types no name shows.
    fn unknown_types(&self) -> u64 {
        let is_known = |category| {
            matches!(
                category,
                Category::Parameter | Category::Gradient | Category::OptimizerState | Category::Workspace
            )
        };
        let unknown = self.recorded.blocks.iter().filter(|block| !is_known(block.category));
        unknown.filter(|block| block.includes(self.peak_seq)).map(|block| block.size()).sum()
    }

    fn halve_state(&self, spans: &mut [Span]) {
        for span in spans.iter_mut() {
            let block = &self.recorded.blocks[span.block as usize];
            let is_state =
                matches!(block.category, Category::Parameter | Category::Gradient | Category::OptimizerState);
            if is_state || block.category == Category::Temporary && block.phase == Phase::Optimizer {
                span.requested = span.requested.div_ceil(2);
            }
        }
    }

    /// The name of the optimizer's class; `None` without one, or with several.
    pub fn optimizer_name(&self) -> Option<String> {
        let optimizer = self.optimizer?;
        let facts = |block: &BlockLifetime| self.recorded.table.facts(block.stack);
        let mut in_step = self.recorded.blocks.iter().filter(|block| block.phase == Phase::Optimizer);
        let block = in_step.find(|block| facts(block).optimizer.is_some_and(|one| one.name == optimizer.name))?;
        self.recorded.table.optimizer_name(block.stack)
    }

    /// The stack of the softmax whose score matrices attention would not need.
    pub fn softmax(&self) -> Option<StackId> {
        self.scores.as_ref().map(|scores| scores.softmax)
    }

    /// The stack of the results that an evaluation keeps most bytes of.
    pub fn results(&self) -> Option<StackId> {
        self.results.place(&self.recorded)
    }

    /// The stack of the largest tensor that is loaded and freed.
    pub fn load(&self) -> Option<StackId> {
        let loaded = self.loaded.iter().map(|index| &self.recorded.blocks[*index as usize]);
        loaded.max_by_key(|block| block.size()).map(|block| block.stack)
    }

    /// The stack of the largest parameter that a loaded tensor replaces.
    pub fn replacement(&self) -> Option<StackId> {
        let replaced = self.replaced.iter().map(|index| &self.recorded.blocks[*index as usize]);
        replaced.max_by_key(|block| block.size()).map(|block| block.stack)
    }

    /// The stack that converts the largest parameter to a smaller data type.
    pub fn conversion(&self) -> Option<StackId> {
        let converted = self.converted.iter().map(|converted| &self.recorded.blocks[converted.to as usize]);
        converted.max_by_key(|block| block.size()).map(|block| block.stack)
    }

    /// The stack of the loss whose logits could be computed in chunks.
    pub fn loss(&self) -> Option<StackId> {
        self.logits.as_ref().map(|logits| logits.loss)
    }
}
