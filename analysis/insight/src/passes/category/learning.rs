//! Facts that allocations show about blocks of other allocations: the sizes of parameters and gradients, the stacks
//! that load data, the stacks whose blocks the program keeps, and the stacks whose blocks grow from call to call of the
//! model.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{FrameId, StackId};

use super::block::{BlockAllocation, BlockClassification, BlockMemory, BlockSite, LifetimeEnd, is_without_gradients};
use super::live::{LiveBlocks, is_parameter};
use super::owners::Owners;
use super::proof::Proof;
use super::table::Category;
use crate::passes::phase::{EventClassification, Phase, PhaseTracker, ProgramPosition};
use crate::rules::CategoryRuleId;
use memtrace_input::AddressBuildHasher;
use memtrace_replay::Names;

/// A stack counts in [`Learned::frequent_stacks`] and [`Learned::steady_stacks`] once it has allocated in this many
/// calls of the model.
const SEVERAL_CALLS: u32 = 3;

/// A tensor of at most this many bytes, the smallest block, is a scalar such as a metric. It is no batch.
const SCALAR_BYTES: u64 = 512;

/// Whether a block of this size is a scalar.
pub(super) fn is_scalar(requested: u64) -> bool {
    requested <= SCALAR_BYTES
}

/// The allocations of one stack across the model's calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StackGrowth {
    /// The first call of the model in which the stack allocated, and the number of calls in which it did.
    pub(super) first: u32,
    pub(super) calls: u32,
    /// The latest call in which the stack allocated, and the requested bytes of the first allocation in it.
    call: u32,
    size: u64,
    /// The bytes by which the size grew in the latest call, and whether it grew by as many in the call before.
    rise: u64,
    is_even: bool,
    /// How often in a row the size has grown, and how often in all.
    pub(super) grown: u32,
    increases: u32,
    /// Whether a block of this stack was already classified as a cache that grows.
    pub(super) is_cache: bool,
    /// The call before the latest one.
    pub(super) previous: u32,
    /// Whether another block grew to the same size in the same call: keys and values grow in pairs, results do not.
    pub(super) is_paired: bool,
}

impl StackGrowth {
    /// Whether the size grows in at most every other call. A model with a cache does the same work for each token,
    /// whether a call has one token or a prompt.
    fn is_steady(&self) -> bool {
        2 * self.increases < self.calls
    }
}

/// The facts that the recording has shown so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Learned {
    /// How often the model has been called, in a program that trains without gradients.
    pub(super) model_calls: u32,
    /// The blocks that are allocated now.
    pub(super) live: LiveBlocks,
    pub(super) parameters: LearnedParameters,
    /// Requested sizes of the gradients so far.
    pub(super) gradient_sizes: HashSet<u64, AddressBuildHasher>,
    pub(super) data: LearnedData,
    /// The bytes of forward passes that backward passes have freed.
    consumed_bytes: u64,
    pub(super) at_load: AllocatedAtLoad,
    /// Stacks whose blocks the program keeps.
    kept_stacks: HashSet<StackId, AddressBuildHasher>,
    /// Private pools into which a CUDA graph was captured.
    pub(super) graph_pools: HashSet<u16>,
    /// Whether a request failed. Then the gradients of that time have names, if any have.
    pub(super) out_of_memory: bool,
    pub(super) growth: GrowingStacks,
    latest: LatestAllocation,
}

/// The data that the program loads.
#[derive(Clone, Debug, Default)]
pub(super) struct LearnedData {
    /// By stack: the largest data that it has loaded, in bytes; 0 if it loads none.
    stacks: Vec<u64>,
    /// Whether the program loads a batch for each step or call.
    pub(super) loads_batches: bool,
}

/// The latest allocation.
#[derive(Clone, Copy, Debug, Default)]
struct LatestAllocation {
    /// Whether it was inside a call of the model.
    in_model: bool,
    stack: StackId,
    /// In bytes.
    requested: u64,
}

/// The parameters that the recording has shown so far.
#[derive(Clone, Debug, Default)]
pub(super) struct LearnedParameters {
    /// Requested sizes of the blocks that building, moving and filling models allocated.
    pub(super) sizes: HashSet<u64, AddressBuildHasher>,
    /// Stacks outside of loading that allocated a named parameter of this requested size.
    sites: HashSet<(StackId, u64)>,
    /// Stacks that allocated a named parameter while loading.
    load_stacks: HashSet<StackId, AddressBuildHasher>,
    /// The parameters of each module.
    pub(super) owners: Owners,
}

/// The unnamed tensors that user code which no rule matches allocated before the first forward pass.
#[derive(Clone, Debug, Default)]
pub(super) struct AllocatedAtLoad {
    /// The innermost frames outside PyTorch that allocated them.
    frames: HashSet<FrameId, AddressBuildHasher>,
    /// By requested size: the number of blocks.
    pub(super) sizes: HashMap<u64, u32, AddressBuildHasher>,
}

/// Allocations per call of the model. Only for stacks inside the model of an inference-only program, and for evaluation
/// code outside the model.
#[derive(Clone, Debug, Default)]
pub(super) struct GrowingStacks {
    pub(super) by_stack: HashMap<StackId, StackGrowth, AddressBuildHasher>,
    /// The number of stacks that allocated in [`SEVERAL_CALLS`] calls of the model.
    pub(super) frequent: u32,
    /// The blocks of the current call that grew, by requested size: the first stack, and whether there are more.
    grew: (u32, HashMap<u64, StackId, AddressBuildHasher>),
    /// The number of those whose requested size does not grow ([`StackGrowth::is_steady`]).
    pub(super) steady: u32,
    /// By stack outside models: the size of its latest blocks, the call of the model before them, and their number.
    bursts: HashMap<StackId, (u64, u32, u32), AddressBuildHasher>,
}

impl GrowingStacks {
    /// Counts an allocation of a stack whose blocks may grow from call to call of the model. `now` is the number of
    /// calls.
    fn count(&mut self, stack: StackId, requested: u64, now: u32) {
        let first = StackGrowth { first: now, calls: 1, call: now, size: requested, ..StackGrowth::default() };
        let growth = self.by_stack.entry(stack).or_insert(first);
        if growth.call == now {
            growth.is_paired |= growth.grown > 0 && requested == growth.size;
            return;
        }
        let counted_before = growth.calls >= SEVERAL_CALLS;
        let steady_before = counted_before && growth.is_steady();
        let grew = requested > growth.size;
        growth.calls += 1;
        growth.increases += u32::from(grew);
        growth.grown = if grew { growth.grown + 1 } else { 0 };
        let rise = requested.saturating_sub(growth.size);
        growth.is_even = rise == growth.rise;
        growth.rise = rise;
        (growth.previous, growth.call, growth.size) = (growth.call, now, requested);
        let is_counted = growth.calls >= SEVERAL_CALLS;
        self.frequent += u32::from(is_counted && !counted_before);
        self.steady += u32::from(is_counted && growth.is_steady());
        self.steady -= u32::from(steady_before);
        if grew {
            self.pair(stack, requested, now);
        }
    }

    /// Marks the stacks whose blocks grow to one size in one call.
    fn pair(&mut self, stack: StackId, requested: u64, now: u32) {
        if self.grew.0 != now {
            self.grew = (now, HashMap::default());
        }
        let other = *self.grew.1.entry(requested).or_insert(stack);
        if other != stack {
            for stack in [other, stack] {
                self.by_stack.entry(stack).and_modify(|growth| growth.is_paired = true);
            }
        }
    }
}

impl Learned {
    /// Nothing yet, about a recording with this many stacks.
    pub(super) fn new(stacks: usize) -> Learned {
        Learned { data: LearnedData { stacks: vec![0; stacks], ..LearnedData::default() }, ..Learned::default() }
    }

    /// Observes an allocation's place: inside a call of the model or outside, and whether such a call counts.
    #[inline]
    pub(super) fn count_model_calls(&mut self, in_model: bool, counts: bool) {
        self.model_calls += u32::from(in_model && counts && !self.latest.in_model);
        self.latest.in_model = in_model;
    }

    /// Whether a stack loads data.
    #[inline]
    pub(super) fn loads_data(&self, stack: StackId) -> bool {
        self.largest_data(stack) > 0
    }

    /// The largest data that a stack has loaded, in bytes; 0 if it loads none.
    fn largest_data(&self, stack: StackId) -> u64 {
        if stack.is_none() { 0 } else { self.data.stacks.get(stack.index()).copied().unwrap_or(0) }
    }

    /// Records data that a stack has loaded.
    fn loaded(&mut self, stack: StackId, requested: u64) {
        if let Some(largest) = self.data.stacks.get_mut(stack.index()) {
            *largest = requested.max(*largest).max(1);
        }
    }

    /// Whether a line that loads data also joins results, and a block of this size is such a join: larger than the
    /// data, with sizes that grow by as many bytes in each call of the model. Batches in the order of their lengths
    /// grow by different amounts.
    pub(super) fn joins(&self, stack: StackId, requested: u64) -> bool {
        let grows = |growth: &StackGrowth| growth.grown >= 2 && growth.is_even;
        requested > self.largest_data(stack) && self.growth.by_stack.get(&stack).is_some_and(grows)
    }

    /// Whether backward passes free, in a mean step, as many bytes of forward passes as a block has. If not, the
    /// program retains graphs.
    pub(super) fn consumes_graphs(&self, size: u64, now: &ProgramPosition) -> bool {
        self.consumed_bytes / u64::from(now.step.map_or(1, |step| step.saturating_add(1))) >= size
    }

    /// Counts the bytes of forward passes that backward passes free, at the end of a block's lifetime.
    #[inline]
    pub(super) fn learn_consumed(&mut self, block: &BlockAllocation, end: &LifetimeEnd<'_>) {
        let in_backward = end.free.is_some_and(|e| e.flags.contains(Flags::IN_BACKWARD));
        if block.phase == Phase::Forward && in_backward {
            self.consumed_bytes = self.consumed_bytes.saturating_add(block.memory.size);
        }
    }

    /// Whether a frame allocated unnamed tensors before the first forward pass too, such as the first batch.
    #[inline]
    pub(super) fn allocated_at_load_by(&self, frame: FrameId) -> bool {
        !frame.is_none() && self.at_load.frames.contains(&frame)
    }

    /// Whether the program keeps blocks of this stack.
    pub(super) fn keeps(&self, stack: StackId) -> bool {
        self.kept_stacks.contains(&stack)
    }

    /// Whether parameters of this size had this stack outside of loading: code that replaces parameters.
    pub(super) fn replaces_parameters(&self, stack: StackId, requested: u64) -> bool {
        self.parameters.sites.contains(&(stack, requested))
    }

    /// Whether a stack has allocated parameters while loading.
    pub(super) fn loads_parameters(&self, stack: StackId) -> bool {
        self.parameters.load_stacks.contains(&stack)
    }

    /// Whether a block of this size can be a parameter's gradient: a parameter has this size, and fewer gradients have
    /// it than parameters.
    pub(super) fn may_be_gradient(&self, requested: u64) -> bool {
        self.parameters.sizes.contains(&requested) && self.live.may_be_gradient(requested)
    }

    /// Whether the module whose call allocates the block of `e` has a weight of twice the size without a cast. Where
    /// its parameters are unknown, one cast of each size may be a weight's.
    pub(super) fn may_be_cast_of_call(&mut self, names: Option<&Names>, e: &Event, requested: u64) -> bool {
        if e.context.is_none() {
            return true;
        }
        let weights =
            names.and_then(|names| self.parameters.owners.count_of_call(names, e, 2 * requested)).unwrap_or(1);
        self.live.casts_in_call(e.context, requested) < weights
    }

    /// Records the facts that an allocation shows about other blocks. `caller` is the innermost frame outside PyTorch.
    #[inline]
    pub(super) fn learn(
        &mut self,
        tracker: &PhaseTracker,
        caller: FrameId,
        e: &Event,
        requested: u64,
        classification: &EventClassification,
        proof: Proof,
    ) {
        self.live.add(e, requested, proof);
        (self.latest.stack, self.latest.requested) = (e.stack, requested);
        if proof == Proof::None && !self.latest.in_model && tracker.is_inference() && !is_scalar(requested) {
            let burst = self.growth.bursts.entry(e.stack).or_default();
            let continues = (burst.0, burst.1) == (requested, self.model_calls);
            *burst = (requested, self.model_calls, if continues { burst.2 + 1 } else { 1 });
        }
        match proof {
            Proof::Named(TensorKind::Parameter) if classification.phase == Phase::Load => {
                self.parameters.load_stacks.insert(e.stack);
            }
            Proof::Named(TensorKind::Parameter) => {
                self.parameters.sites.insert((e.stack, requested));
            }
            _ => {}
        }
        if is_parameter(proof) {
            self.parameters.sizes.insert(requested);
        }
        match (classification.phase, proof) {
            // Between a backward pass and the next forward pass, user code with gradients that no rule matches loads
            // the next batch.
            (Phase::Data, _) | (Phase::Other, Proof::None)
                if classification.phase == Phase::Data
                    || classification.meaning().is_none() && !is_without_gradients(e.flags) =>
            {
                self.loaded(e.stack, requested);
                self.data.loads_batches |=
                    classification.phase == Phase::Data && !is_scalar(requested) && tracker.now().step.is_some();
            }
            (Phase::Load, Proof::None) => {
                *self.at_load.sizes.entry(requested).or_default() += 1;
                self.at_load.frames.insert(caller);
            }
            (Phase::Forward, Proof::None) if tracker.is_inference() && self.latest.in_model => {
                self.growth.count(e.stack, requested, self.model_calls);
            }
            (Phase::Eval | Phase::Generate | Phase::Rollout, Proof::None)
                if self.latest.in_model || !tracker.is_inference() =>
            {
                self.growth.count(e.stack, requested, self.model_calls);
            }
            _ => {}
        }
    }

    /// Records the size of a gradient, from the category of its block.
    #[inline]
    pub(super) fn learn_gradient(&mut self, memory: &BlockMemory, classification: &BlockClassification) {
        if classification.category == Category::Gradient {
            self.gradient_sizes.insert(memory.requested);
        }
    }

    /// Records a stack whose blocks are a growing cache, from the category of a block whose lifetime ended.
    #[inline]
    pub(super) fn learn_cache(&mut self, block: &BlockAllocation, classification: &BlockClassification) {
        if classification.rule != CategoryRuleId::KvCacheGrows {
            return;
        }
        if let Some(growth) = self.growth.by_stack.get_mut(&block.site.stack) {
            growth.is_cache = true;
        }
        // A cache that is cut back: the part that is kept was copied just before, outside the model.
        let (stack, copied) = (self.latest.stack, self.latest.requested);
        let whole = block.memory.requested;
        if !self.latest.in_model && copied < whole && copied >= whole / 2 {
            self.growth.by_stack.entry(stack).or_default().is_cache = true;
        }
    }

    /// The number of equal blocks outside models that a stack allocated at once.
    pub(super) fn burst(&self, stack: StackId, requested: u64) -> u32 {
        self.growth.bursts.get(&stack).filter(|burst| burst.0 == requested).map_or(0, |burst| burst.2)
    }

    /// Whether the latest allocation was inside a call of the model.
    pub(super) fn in_model(&self) -> bool {
        self.latest.in_model
    }

    /// Records a stack whose blocks the program keeps, from the category of a block.
    #[inline]
    pub(super) fn learn_kept(&mut self, site: &BlockSite, classification: &BlockClassification) {
        if classification.category == Category::KeptTensor {
            self.kept_stacks.insert(site.stack);
        }
    }

    /// Records that the program loads batches, from the category of a block whose lifetime ended. Batches are allocated
    /// between an evaluation and a forward pass. In an inference-only program, they are allocated outside its model and
    /// freed after the next call.
    #[inline]
    pub(super) fn learn_batches(
        &mut self,
        tracker: &PhaseTracker,
        block: &BlockAllocation,
        classification: &BlockClassification,
    ) {
        let is_batch = match classification.rule {
            CategoryRuleId::InputAfterEvaluation => true,
            CategoryRuleId::ActivationForward | CategoryRuleId::InputOtherBatches => {
                tracker.is_inference()
                    && block.model_calls > 0
                    && self.model_calls > block.model_calls
                    && block.proof == Proof::None
                    && tracker.stacks().facts(block.site.stack).outermost_compute.is_none()
            }
            _ => false,
        };
        // Code without gradients after the optimizer loads a batch for an evaluation.
        if classification.rule == CategoryRuleId::InputBeforeForward {
            self.loaded(block.site.stack, block.memory.requested);
        }
        self.data.loads_batches |= is_batch && !is_scalar(block.memory.requested);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_loads_equal_batches_joins_what_grows_evenly() {
        let stack = StackId(1);
        let joins = |sizes: &[u64], requested| {
            let mut learned = Learned::new(2);
            learned.loaded(stack, 1024);
            for (call, size) in sizes.iter().enumerate() {
                learned.growth.count(stack, *size, call as u32);
                learned.growth.count(stack, 1024, call as u32);
            }
            learned.joins(stack, requested)
        };
        assert!(joins(&[1024, 2048, 3072, 4096], 3072));
        assert!(!joins(&[1024, 2048, 3072, 4096], 1024), "a batch");
        assert!(!joins(&[1024, 2048, 2560, 4096], 2560), "batches in the order of their lengths");
    }

    #[test]
    fn keys_and_values_grow_in_pairs() {
        let (keys, values, results, layers) = (StackId(1), StackId(2), StackId(3), StackId(4));
        let mut growing = GrowingStacks::default();
        for call in 1..5u64 {
            growing.count(keys, call * 1024, call as u32);
            growing.count(values, call * 1024, call as u32);
            growing.count(results, call * 4096 + 512, call as u32);
            // One line of two layers.
            growing.count(layers, call * 512 + 64, call as u32);
            growing.count(layers, call * 512 + 64, call as u32);
        }
        let paired = |stack: StackId| growing.by_stack[&stack].is_paired;
        assert!(paired(keys) && paired(values) && paired(layers));
        assert!(!paired(results), "a running concatenation");
    }
}
