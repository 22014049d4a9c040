//! A block: its allocation, the end of its lifetime, and its category.

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, StackId, ThreadId};
use serde::{Deserialize, Serialize};

use super::proof::Proof;
use crate::passes::phase::{Phase, ProgramPosition};
use crate::rules::CategoryRuleId;

/// The purpose of a block. The first seven categories are those of PyTorch's own memory timeline.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters and buffers.
    Parameter,
    /// Gradients of parameters.
    Gradient,
    /// Optimizer state.
    OptimizerState,
    /// Results of the forward pass.
    Activation,
    /// Autograd temporaries: what a backward node passes to the next.
    AutogradDetail,
    /// Input batches.
    Input,
    /// Blocks that are freed within the call that allocates them, or within a phase other than forward and backward.
    Temporary,
    /// Scratch memory that a library keeps, such as cuBLAS workspaces.
    Workspace,
    /// Buckets and gathered shards of DistributedDataParallel, FSDP and similar wrappers.
    CommunicationBucket,
    /// Copies of weights in lower precision that autocast keeps.
    AutocastCache,
    /// A loaded checkpoint beside the model that it was loaded into.
    Checkpoint,
    /// Keys and values (or other state) that the model of an inference-only program keeps across calls.
    KvCache,
    /// Tensors that the program itself keeps across steps: replay buffers, queues, copies of weights, results.
    KeptTensor,
    /// Memory of a private pool into which a CUDA graph was captured.
    GraphPool,
    /// Memory of another private pool (`torch.cuda.MemPool`).
    MemoryPool,
    /// Blocks that no rule matches.
    Unknown,
}

impl Category {
    /// All categories, in the order in which reports list them.
    pub const ALL: [Category; 16] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::AutogradDetail,
        Category::Input,
        Category::Temporary,
        Category::Workspace,
        Category::CommunicationBucket,
        Category::AutocastCache,
        Category::Checkpoint,
        Category::KvCache,
        Category::KeptTensor,
        Category::GraphPool,
        Category::MemoryPool,
        Category::Unknown,
    ];

    /// The category with this name in files.
    pub fn named(name: &str) -> Option<Category> {
        Category::ALL.into_iter().find(|category| category.name() == name)
    }

    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer_state",
            Category::Activation => "activation",
            Category::AutogradDetail => "autograd_detail",
            Category::Input => "input",
            Category::Temporary => "temporary",
            Category::Workspace => "workspace",
            Category::CommunicationBucket => "communication_bucket",
            Category::AutocastCache => "autocast_cache",
            Category::Checkpoint => "checkpoint",
            Category::KvCache => "kv_cache",
            Category::KeptTensor => "kept_tensor",
            Category::GraphPool => "graph_pool",
            Category::MemoryPool => "memory_pool",
            Category::Unknown => "unknown",
        }
    }

    /// The plural name in reports.
    pub const fn plural(self) -> &'static str {
        match self {
            Category::Parameter => "parameters",
            Category::Gradient => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activations",
            Category::AutogradDetail => "autograd temporaries",
            Category::Input => "inputs",
            Category::Temporary => "temporaries",
            Category::Workspace => "cuBLAS workspaces",
            Category::CommunicationBucket => "communication buckets",
            Category::AutocastCache => "autocast weights",
            Category::Checkpoint => "loaded checkpoint",
            Category::KvCache => "KV cache",
            Category::KeptTensor => "kept tensors",
            Category::GraphPool => "CUDA graph pool",
            Category::MemoryPool => "memory pool",
            Category::Unknown => "other",
        }
    }

    /// Whether blocks of this category are normally freed within the phase that allocated them.
    pub const fn is_passing(self) -> bool {
        matches!(self, Category::Temporary | Category::AutogradDetail)
    }
}

/// A category and the rule that decided it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockClassification {
    /// The category.
    pub category: Category,
    /// The rule that decided it.
    pub rule: CategoryRuleId,
}

/// What is known about a block at its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockAllocation {
    /// `seq` of the allocation event.
    pub seq: u64,
    /// Time of the allocation, in clock ticks.
    pub ticks: u64,
    /// The block's address.
    pub addr: u64,
    /// The block's size in bytes, rounded as the allocator rounds.
    pub size: u64,
    /// The requested size in bytes.
    pub requested: u64,
    /// The stream that the block belongs to.
    pub stream: u64,
    /// The private pool of the block; 0 for the default pool.
    pub pool: u16,
    /// The stack that allocated the block.
    pub stack: StackId,
    /// The autograd node that was running; `NONE` without one.
    pub context: ContextId,
    /// The context that the event itself carries: an autograd node or a module's call.
    pub event_context: ContextId,
    /// The program's position at the allocation.
    pub position: ProgramPosition,
    /// The phase of the allocation event. On other threads it can differ from the program's phase in `position`.
    pub phase: Phase,
    /// The number of out-of-memory errors before the allocation.
    pub oom_count: u32,
    /// What the name, stack, size or pool proves.
    pub proof: Proof,
    /// The flags of the allocation event.
    pub(in crate::passes) flags: Flags,
    /// Whether an evaluation with gradients allocates the block.
    pub(super) in_recorded_eval: bool,
    /// The thread that allocated the block.
    pub(super) thread: ThreadId,
    /// The number of the run of consecutive events from one place that the allocation belongs to.
    pub(super) call: u32,
    /// The number of calls of the model so far, including the one that allocates this block.
    pub(super) model_calls: u32,
    /// In a rotated trace: how earlier events classified the block.
    pub(super) earlier: Option<BlockClassification>,
}

impl BlockAllocation {
    /// The private pool of the block, if blocks of its category are distinguished by their pools; else 0.
    pub fn private_pool(&self, category: Category) -> u16 {
        if matches!(category, Category::GraphPool | Category::MemoryPool) { self.pool } else { 0 }
    }

    /// A 512-byte block of step 0's forward pass without stack or proof. Only for tests, here and in the crates above.
    #[doc(hidden)]
    pub fn for_tests(seq: u64) -> BlockAllocation {
        let position = ProgramPosition {
            phase: Phase::Forward,
            step: Some(0),
            phase_changes: 0,
            backward_passes: 0,
            optimizer_steps: 0,
        };
        BlockAllocation::of_forward(seq, 512, StackId::NONE, position)
    }

    /// A block of a forward pass without context or proof. Only for tests of passes that examine block lifetimes.
    pub(crate) fn of_forward(seq: u64, size: u64, stack: StackId, position: ProgramPosition) -> BlockAllocation {
        BlockAllocation {
            seq,
            ticks: seq,
            addr: seq << 9,
            size,
            requested: size,
            stream: 0,
            pool: 0,
            stack,
            context: ContextId::NONE,
            event_context: ContextId::NONE,
            position,
            phase: Phase::Forward,
            oom_count: 0,
            proof: Proof::None,
            flags: Flags::default(),
            in_recorded_eval: false,
            thread: ThreadId::NONE,
            call: 0,
            model_calls: 0,
            earlier: None,
        }
    }
}

/// How a block's lifetime ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LifetimeEnd<'a> {
    /// The program's position at the end.
    pub now: &'a ProgramPosition,
    /// Whether an out-of-memory error or the end of the recording ended the lifetime, not the program's own logic.
    pub is_truncated: bool,
    /// The event that frees the block; `None` if the block is still allocated.
    pub free: Option<&'a Event>,
}

/// Whether autograd records the backward pass that allocates (`create_graph=True`), by the flags of the event. Its
/// blocks belong to the graph of a further backward pass.
pub(super) fn is_recorded(flags: Flags) -> bool {
    flags.contains(Flags::IN_BACKWARD.with(Flags::GRAD_KNOWN).with(Flags::GRAD_ENABLED))
}

/// Whether gradients are off where a block is allocated, by the flags of the event.
pub(in crate::passes) fn is_without_gradients(flags: Flags) -> bool {
    flags.contains(Flags::GRAD_KNOWN) && !flags.contains(Flags::GRAD_ENABLED)
}
