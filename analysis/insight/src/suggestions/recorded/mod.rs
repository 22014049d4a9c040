//! The recorded data that changes start from: the blocks, their allocations and frees in order, and facts about them.

pub(crate) mod batch;
pub(crate) mod calls;
mod continuation;
pub(crate) mod kv_cache;
pub(crate) mod loaders;
pub(crate) mod micro_batches;
pub(crate) mod optimizer_step;
pub(crate) mod reads;
mod reductions;
pub(crate) mod span;
mod steps;
pub(crate) mod unused_gradients;

use std::collections::{BTreeSet, HashSet};

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime, BlockLifetimes, NEVER};
use crate::passes::phase::Phase;
use crate::passes::rest_of_step::RestOfStep;
use crate::passes::stacks::StackTable;
use continuation::{InterruptedOptimizer, continued, with_state};
use memtrace_input::AddressBuildHasher;
use memtrace_replay::{AllocatorSettings, Contexts, Names};
use span::{Span, after, at};

pub use continuation::FailedRequest;

/// The size of a block for a step counter, in bytes.
const STEP_COUNTER: u64 = 512;

/// The allocation or the free of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockEvent {
    pub(crate) seq: u32,
    pub(crate) context: ContextId,
    /// The index of the block.
    pub(crate) block: u32,
    pub(crate) allocates: bool,
}

/// Stack, context, size and stream. One place can allocate the workspaces of several libraries, of different sizes.
type WorkspacePlace = (StackId, ContextId, u64, u8);

fn workspace_place(block: &BlockLifetime) -> WorkspacePlace {
    (block.start.stack, block.start.context, block.requested(), block.stream_pool)
}

/// The way in which an autograd node handles gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NodeKind {
    /// It passes a gradient to its parameter.
    Accumulates,
    /// It casts.
    Casts,
    Other,
}

impl NodeKind {
    fn of(node: &str) -> NodeKind {
        match node {
            "AccumulateGrad" => NodeKind::Accumulates,
            _ if node.starts_with("ToCopyBackward") => NodeKind::Casts,
            _ => NodeKind::Other,
        }
    }
}

/// A recording from which changes compute what would have been.
#[derive(Debug)]
pub struct Recorded<'a> {
    pub(crate) blocks: Vec<BlockLifetime>,
    pub(crate) events: Vec<BlockEvent>,
    pub(crate) lifetimes: &'a BlockLifetimes,
    pub(crate) definitions: &'a Definitions,
    pub(crate) table: &'a StackTable,
    pub(crate) settings: AllocatorSettings,
    /// The last event that counts: the error, or [`NEVER`].
    pub(crate) until: u32,
    is_continued: bool,
    /// Whether the recording ends in an evaluation that records a graph for nothing.
    pub(crate) ends_in_unused_graph: bool,
    weights: WeightFacts,
    places: UnusualPlaces,
    names: Option<&'a Names>,
}

/// Facts by which a block is recognized as the gradient of a weight.
#[derive(Clone, Debug, Default)]
struct WeightFacts {
    /// Requested sizes of gradients and parameters.
    sizes: HashSet<u64, AddressBuildHasher>,
    /// By context.
    nodes: Vec<NodeKind>,
}

/// Places whose blocks are not what their category or their phase suggests.
#[derive(Clone, Debug, Default)]
struct UnusualPlaces {
    /// They allocate several blocks of one workspace's size for one stream.
    no_workspaces: HashSet<WorkspacePlace>,
    /// They request far more in one step than in others.
    outliers: BTreeSet<StackId>,
    /// Passes without gradients that each training step makes before its backward pass: of a teacher, or of the policy
    /// as it was.
    in_each_step: HashSet<StackId>,
    /// Steps that only evaluate, with gradients.
    evaluated_steps: HashSet<u32>,
    /// Buffers of reductions that use all multiprocessors, by the event that allocated them.
    reduction_buffers: HashSet<u32>,
}

impl<'a> Recorded<'a> {
    /// Makes the recorded data from the blocks of a device. `failed` is the request at which the recording ends. `rest`
    /// has the events that follow it in the interrupted step.
    pub fn new(
        lifetimes: &'a BlockLifetimes,
        definitions: &'a Definitions,
        table: &'a StackTable,
        settings: AllocatorSettings,
        failed: Option<FailedRequest>,
        rest: Option<&RestOfStep>,
    ) -> Recorded<'a> {
        let mut blocks = lifetimes.blocks.clone();
        let mut until = failed.map_or(NEVER, |failed| u32::try_from(failed.seq).unwrap_or(NEVER));
        let mut is_continued = false;
        if let Some(failed) = failed {
            blocks.retain(|block| block.allocated < until);
            let with_state = || {
                let optimizer = interrupted_optimizer(&blocks, &failed, table)?;
                with_state(&blocks, &failed, optimizer, |context| table.contexts().is_node(context))
            };
            let with_rest = match rest {
                Some(rest) => continued(&blocks, &failed, rest),
                None => with_state(),
            };
            match with_rest {
                Some(with_rest) => {
                    (blocks, until, is_continued) = (with_rest, NEVER, true);
                }
                None => blocks.push(requested_block(&failed, until, &blocks)),
            }
        }
        let mut events = Vec::with_capacity(blocks.len() * 2);
        for (index, block) in blocks.iter().enumerate() {
            let event = |seq, context, allocates| BlockEvent { seq, context, block: index as u32, allocates };
            events.push(event(block.allocated, block.start.context, true));
            if block.freed <= until && block.freed < NEVER {
                events.push(event(block.freed, block.freed_context, false));
            }
        }
        events.sort_unstable_by_key(|event| (event.seq, event.allocates));
        let is_weight = |b: &&BlockLifetime| matches!(b.category, Category::Gradient | Category::Parameter);
        let weight_sizes = blocks.iter().filter(is_weight).map(BlockLifetime::requested).collect();
        let (mut workspaces, mut no_workspaces) = (HashSet::new(), HashSet::new());
        for block in blocks.iter().filter(|block| block.category == Category::Workspace) {
            if !workspaces.insert(workspace_place(block)) {
                no_workspaces.insert(workspace_place(block));
            }
        }
        Recorded {
            events,
            lifetimes,
            definitions,
            table,
            settings,
            until,
            is_continued,
            ends_in_unused_graph: failed.is_some_and(|failed| failed.in_unused_graph),
            weights: WeightFacts {
                sizes: weight_sizes,
                nodes: definitions.contexts.iter().map(|context| NodeKind::of(&context.node)).collect(),
            },
            names: None,
            places: UnusualPlaces {
                no_workspaces,
                outliers: BTreeSet::new(),
                in_each_step: steps::forward_only_in_each_step(&blocks),
                evaluated_steps: steps::evaluated_steps(&blocks, failed.is_some()),
                reduction_buffers: reductions::reduction_buffers(&blocks, definitions),
            },
            blocks,
        }
    }

    /// The same with the places that request far more in one step than in others.
    pub fn with_outliers(mut self, outliers: impl Iterator<Item = StackId>) -> Recorded<'a> {
        self.places.outliers = outliers.collect();
        self
    }

    /// The same with the tensor names.
    pub fn with_names(mut self, names: &'a Names) -> Recorded<'a> {
        self.names = Some(names);
        self
    }

    /// Whether the block is the gradient of a parameter without optimizer state, while other parameters have some.
    pub(crate) fn has_no_optimizer_state(&self, gradient: &BlockLifetime) -> bool {
        self.names.is_some_and(|names| names.is_gradient_without_state(gradient.allocated.into()))
    }

    /// Whether this place requests far more in one step than in others, which did not follow from the batch.
    pub(crate) fn is_outlier(&self, stack: StackId) -> bool {
        self.places.outliers.contains(&stack)
    }

    /// Whether the step only evaluates, although autograd records.
    pub(crate) fn is_evaluated_step(&self, step: u32) -> bool {
        self.places.evaluated_steps.contains(&step)
    }

    /// Whether each training step makes this pass without gradients before its backward pass.
    pub(crate) fn is_in_each_step(&self, stack: StackId) -> bool {
        self.places.in_each_step.contains(&stack)
    }

    /// Whether an error interrupted a step, and the blocks of its rest were added.
    pub fn is_continued(&self) -> bool {
        self.is_continued
    }

    /// The highest sum of the recorded blocks, with the rest of an interrupted step if it was added.
    pub fn highest_sum(&self) -> u64 {
        span::peak(&self.spans(), &self.settings).0
    }

    pub(crate) fn contexts(&self) -> &Contexts {
        self.table.contexts()
    }

    /// The recorded blocks as spans. The index of a span is that of its block.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let span = |(index, block): (usize, &BlockLifetime)| Span {
            start: at(block.allocated),
            end: match block.freed {
                NEVER => u64::MAX,
                // Blocks freed as an error unwinds would have stayed.
                freed if freed > self.until => u64::MAX,
                freed => at(freed).max(after(block.allocated)),
            },
            requested: block.requested(),
            block: index as u32,
            stream_pool: block.stream_pool,
        };
        self.blocks.iter().enumerate().map(span).collect()
    }

    /// Whether the block is freed at a time that counts. A block that is not is still allocated at the end.
    pub(crate) fn is_freed(&self, block: &BlockLifetime) -> bool {
        block.freed < NEVER && block.freed <= self.until
    }

    /// Whether a block of a workspace's size is one of several that one place allocates. A workspace is allocated once.
    pub(crate) fn is_no_workspace(&self, block: &BlockLifetime) -> bool {
        self.places.no_workspaces.contains(&workspace_place(block))
    }

    /// Whether the block is the buffer of a reduction, whose size follows from the multiprocessors of the GPU.
    pub(crate) fn is_reduction_buffer(&self, block: &BlockLifetime) -> bool {
        self.places.reduction_buffers.contains(&block.allocated)
    }

    /// Whether an autograd node freed the block.
    pub(crate) fn is_freed_by_node(&self, block: &BlockLifetime) -> bool {
        self.is_freed(block) && self.contexts().is_node(block.freed_context)
    }

    /// Whether a parameter or a gradient has this requested size.
    pub(crate) fn is_weight_size(&self, requested: u64) -> bool {
        self.weights.sizes.contains(&requested)
    }

    /// Whether a backward pass makes this block as the gradient of a weight, and frees it when the gradient is added to
    /// the one that exists or has been cast.
    pub(crate) fn is_passing_weight_gradient(&self, block: &BlockLifetime) -> bool {
        if block.start.phase != Phase::Backward || !self.is_freed(block) {
            return false;
        }
        let requested = block.requested();
        match self.weights.nodes.get(block.freed_context.index()) {
            Some(NodeKind::Accumulates) => self.weights.sizes.contains(&requested),
            Some(NodeKind::Casts) => {
                self.weights.sizes.contains(&(2 * requested)) || self.weights.sizes.contains(&(requested / 2))
            }
            _ => false,
        }
    }

    /// The index of the first event after `seq`.
    pub(crate) fn first_event_after(&self, seq: u32) -> usize {
        self.events.partition_point(|event| event.seq <= seq)
    }
}

/// The optimizer in whose first step a request failed; `None` in another place.
fn interrupted_optimizer(
    blocks: &[BlockLifetime],
    failed: &FailedRequest,
    table: &StackTable,
) -> Option<InterruptedOptimizer> {
    let rule = table.facts(failed.at.0).optimizer.filter(|_| failed.phase == Phase::Optimizer)?;
    let (_, states) = rule.state_per_parameter?;
    let state = blocks.iter().filter(|block| block.category == Category::OptimizerState);
    let is_first = state.clone().all(|block| Some(block.start.step) == failed.step);
    // A fused or capturable optimizer keeps its step counters on the device. It works without copies.
    let counts_on_device = state.clone().any(|block| block.size() <= STEP_COUNTER);
    let foreach = rule.foreach_temporaries.filter(|_| !counts_on_device).unwrap_or(0);
    is_first.then_some(InterruptedOptimizer { states, foreach })
}

/// The block that a failed request would have got.
fn requested_block(failed: &FailedRequest, seq: u32, blocks: &[BlockLifetime]) -> BlockLifetime {
    let is_weight_size =
        || blocks.iter().any(|b| b.category == Category::Parameter && b.requested().abs_diff(failed.requested) < 512);
    let category = match failed.phase {
        Phase::Forward | Phase::Recompute | Phase::Eval | Phase::Generate | Phase::Rollout => Category::Activation,
        Phase::Backward if is_weight_size() => Category::Gradient,
        Phase::Backward => Category::AutogradDetail,
        Phase::Optimizer if is_weight_size() => Category::OptimizerState,
        Phase::Optimizer => Category::Temporary,
        Phase::Load => Category::Parameter,
        Phase::Data => Category::Input,
        Phase::Other => Category::Unknown,
    };
    let passes = blocks.last().map_or(0, |block| block.start.backward_passes);
    let mut block = BlockLifetime::of_size(seq, failed.requested);
    (block.start.stack, block.start.context) = failed.at;
    block.start.step = failed.step.unwrap_or(BEFORE_STEPS);
    block.start.backward_passes = passes;
    (block.category, block.start.phase) = (category, failed.phase);
    block
}
