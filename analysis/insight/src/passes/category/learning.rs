//! What allocations show about blocks of other allocations: the sizes of parameters and gradients, the stacks that load
//! data, and the stacks whose blocks grow from call to call of an inference-only model.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::ids::StackId;

use super::block::{BlockAllocation, BlockClassification, Category};
use super::proof::Proof;
use crate::passes::phase::{EventClassification, Phase, PhaseTracker};
use crate::rules::CategoryRuleId;
use memtrace_input::AddressBuildHasher;

/// A stack counts in [`Learned::frequent_stacks`] and [`Learned::steady_stacks`] once it has allocated in this many
/// calls of the model.
const SEVERAL_CALLS: u32 = 3;

/// The allocations of one stack across the model's calls, in an inference-only program.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackGrowth {
    /// The first call of the model in which the stack allocated, and the number of calls in which it did.
    pub(super) first: u32,
    pub(super) calls: u32,
    /// The latest call in which the stack allocated, and the requested bytes of the first allocation in it.
    call: u32,
    size: u64,
    /// How often in a row the size has grown, and whether it has ever changed.
    pub(super) grown: u32,
    varies: bool,
    /// Whether a block of this stack was already classified as a cache that grows.
    pub(super) is_cache: bool,
}

/// What the recording has shown so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Learned {
    /// Whether a block as large as cuBLAS's workspace has been allocated.
    pub(super) has_workspace: bool,
    /// How often the model has been called, and whether the latest allocation was inside a call.
    pub(super) model_calls: u32,
    in_model: bool,
    /// Requested sizes of the blocks that building, moving and filling models allocated.
    pub(super) parameter_sizes: HashSet<u64, AddressBuildHasher>,
    /// Requested sizes of the gradients so far.
    pub(super) gradient_sizes: HashSet<u64, AddressBuildHasher>,
    /// By stack: whether it loads data.
    data_stacks: Vec<bool>,
    /// By stack: allocations per call of the model. Filled only for inference-only programs.
    pub(super) growth: HashMap<StackId, StackGrowth, AddressBuildHasher>,
    /// The number of stacks that allocated in [`SEVERAL_CALLS`] calls of the model. `steady_stacks`: those of them
    /// whose requested size never changed.
    pub(super) frequent_stacks: u32,
    pub(super) steady_stacks: u32,
    /// By requested size: how many blocks user code that no rule matches allocated before the first forward pass.
    pub(super) allocated_at_load: HashMap<u64, u32, AddressBuildHasher>,
}

impl Learned {
    /// Nothing yet, about a recording with this many stacks.
    pub(super) fn new(stacks: usize) -> Learned {
        Learned { data_stacks: vec![false; stacks], ..Learned::default() }
    }

    /// Takes an allocation's place: inside a call of the model or outside.
    #[inline]
    pub(super) fn count_model_calls(&mut self, in_model: bool) {
        self.model_calls += u32::from(in_model && !self.in_model);
        self.in_model = in_model;
    }

    /// Whether a stack loads data.
    #[inline]
    pub(super) fn loads_data(&self, stack: StackId) -> bool {
        self.data_stacks.get(stack.index()).is_some_and(|loads| *loads)
    }

    /// Takes an allocation and records what it shows about other blocks.
    #[inline]
    pub(super) fn learn(
        &mut self,
        tracker: &PhaseTracker,
        e: &Event,
        requested: u64,
        classification: &EventClassification,
        proof: Proof,
    ) {
        match (classification.phase, proof) {
            (_, Proof::WorkspaceSized) => self.has_workspace = true,
            (_, Proof::ModelLoaded | Proof::ModuleMoved | Proof::Named(TensorKind::Parameter)) => {
                self.parameter_sizes.insert(requested);
            }
            // Between a backward pass and the next forward pass, user code that no rule matches loads the next batch.
            (Phase::Data, _) | (Phase::Other, Proof::None)
                if classification.meaning().is_none() || classification.phase == Phase::Data =>
            {
                if let Some(loads) = self.data_stacks.get_mut(e.stack.index()) {
                    *loads = true;
                }
            }
            (Phase::Load, Proof::None) => *self.allocated_at_load.entry(requested).or_default() += 1,
            (Phase::Eval | Phase::Forward, Proof::None) if tracker.is_inference() && self.in_model => {
                let now = self.model_calls;
                let first = StackGrowth {
                    first: now,
                    calls: 1,
                    call: now,
                    size: requested,
                    grown: 0,
                    varies: false,
                    is_cache: false,
                };
                let growth = self.growth.entry(e.stack).or_insert(first);
                if growth.call != now {
                    growth.calls += 1;
                    let varied = growth.varies;
                    growth.varies |= requested != growth.size;
                    if growth.calls == SEVERAL_CALLS {
                        self.frequent_stacks += 1;
                        self.steady_stacks += u32::from(!growth.varies);
                    } else if growth.calls > SEVERAL_CALLS && growth.varies && !varied {
                        self.steady_stacks -= 1;
                    }
                    growth.grown = if requested > growth.size { growth.grown + 1 } else { 0 };
                    (growth.call, growth.size) = (now, requested);
                }
            }
            _ => {}
        }
    }

    /// Takes the category of a block and records the size of a gradient.
    #[inline]
    pub(super) fn learn_gradient(&mut self, block: &BlockAllocation, classification: &BlockClassification) {
        if classification.category == Category::Gradient {
            self.gradient_sizes.insert(block.requested);
        }
    }

    /// Takes the category of a block whose lifetime ended, and records a stack whose blocks are a growing cache.
    #[inline]
    pub(super) fn learn_cache(&mut self, block: &BlockAllocation, classification: &BlockClassification) {
        if classification.rule == CategoryRuleId::KvCacheGrows
            && let Some(growth) = self.growth.get_mut(&block.stack)
        {
            growth.is_cache = true;
        }
    }
}
