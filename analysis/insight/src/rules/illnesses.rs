//! The issues that a run's memory use can have, with one rule per issue.
//!
//! Reports cite the rule, and docs/reference/diagnostics.md explains it. The passes in `passes/illness` collect the evidence.

/// The rule for one issue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IllnessRule {
    /// The stable name in reports, for example `leak` or `graph kept`.
    pub name: &'static str,
    /// The evidence that the rule requires.
    pub rests_on: &'static str,
    /// What the rule cannot detect, or can mistake.
    pub blind_to: &'static str,
}

const fn rule(name: &'static str, rests_on: &'static str, blind_to: &'static str) -> IllnessRule {
    IllnessRule { name, rests_on, blind_to }
}

/// The blocks of one place in the program increase from step to step.
pub static LEAK: IllnessRule = rule(
    "leak",
    "live blocks of one stack at each step's begin: more of them in at least four samples, never a quarter given back, to the end",
    "which object holds them; a buffer that the run ended before it was full; what grows within one step; programs without steps",
);

/// The graphs of several calls of a model are held at once.
pub static GRAPH_KEPT: IllnessRule = rule(
    "graph kept",
    "what a forward made with autograd recording, of two places or more: it grows from step to step, or three blocks or more of a call fell at once, \
     for three calls or more; where backward passes ran through them, three times as many blocks for each call as a backward freed",
    "the line that stores the loss (storing allocates nothing): the loss's own line is named; a graph unrolled over many calls on purpose, cut off by \
     an error",
);

/// A backward pass retained its graph.
pub static GRAPH_RETAINED: IllnessRule = rule(
    "graph retained",
    "what a forward kept for the backward fell as a whole after it, and was more than the backward had freed and three times as many blocks",
    "which of several backward calls was the last to need it; a graph of which a branch is left",
);

/// Forward passes without a backward pass keep their activations.
pub static EVAL_WITH_GRAPH: IllnessRule = rule(
    "eval without no_grad",
    "three blocks or more that a model's call made with autograd recording, of two places or more, fell as a whole with no backward since, twice or \
     more",
    "graphs that are dropped on purpose (a step that was skipped)",
);

/// Gradients stay through the next forward pass because nothing frees them.
pub static GRADIENTS_KEPT: IllnessRule = rule(
    "gradients not cleared",
    "what backward passes left was there when forwards began after an optimizer's step, and is never freed: for half of all steps and twelve of \
     them, or three where the program frees none; or is all freed at once, again and again, after twelve steps or more that used it",
    "whether they were filled with zeros (set_to_none=False) or never cleared, where PyTorch's own marks were not recorded",
);

/// Gradients are freed between forward and backward.
pub static GRADIENTS_LATE: IllnessRule = rule(
    "gradients cleared late",
    "what backward passes left was there when a forward began after an optimizer's step, was freed between it and the backward, and the peak was \
     higher for it",
    "what would be gained within a backward",
);

/// Reference cycles held memory until the garbage collector ran.
pub static CYCLE: IllnessRule = rule(
    "reference cycle",
    "blocks that were freed while CPython's cyclic garbage collector was at work, other than at the program's end",
    "since when they were garbage; which objects formed the cycle, unless `memtrace --cycles` was asked to show them",
);

/// A checkpoint stays beside the model that it was copied into.
pub static CHECKPOINT_KEPT: IllnessRule = rule(
    "checkpoint kept",
    "blocks that torch.load, safetensors or torch.distributed.checkpoint allocated, there when the second step began, each of a size that the \
     model has elsewhere, and not a tensor of the model's or the optimizer's own",
    "checkpoints that other code reads; without names of tensors, which of several of one size is the copy",
);

/// A checkpoint was read to a device that computes nothing.
pub static WRONG_DEVICE: IllnessRule = rule(
    "wrong device",
    "a checkpoint was read to a device on which this process computes nothing, while it computes on another",
    "a device on which it also computes a little",
);

/// Blocks in use hold segments whose free memory the allocator could not use.
pub static FRAGMENTATION: IllnessRule = rule(
    "fragmentation",
    "the allocator asked CUDA for more although it had as much free, a quarter of what it had reserved or more, in segments with live blocks",
    "expandable segments and private pools; which of several blocks in a segment is to blame: they share it",
);

/// DistributedDataParallel holds a second copy of the gradients.
pub static BUCKETS: IllnessRule = rule(
    "DDP buckets",
    "blocks that DistributedDataParallel made, at least half as large as the gradients that there are besides",
    "hooks that need the buckets",
);

/// cuBLAS has many workspaces.
pub static WORKSPACES: IllnessRule = rule(
    "workspaces",
    "blocks of exactly a cuBLAS workspace's size, at least four at once, on three streams or more",
    "workspaces of another size (CUBLAS_WORKSPACE_CONFIG); other blocks that happen to be as large",
);

/// The optimizer state does not fit.
pub static STATE_DOES_NOT_FIT: IllnessRule = rule(
    "optimizer state does not fit",
    "an out-of-memory error while an optimizer made its state; what it needs in all is told by the optimizer's kind and the parameters",
    "optimizers whose state depends on their options",
);

/// Frees wait for streams.
pub static DEFERRED: IllnessRule = rule(
    "deferred frees",
    "bytes between a free's request and its completion, at least a tenth of the peak at one moment",
    "the call of record_stream: the allocation's line is named; on what the stream was at work",
);

/// All rules.
pub static ILLNESSES: [&IllnessRule; 14] = [
    &LEAK,
    &GRAPH_KEPT,
    &GRAPH_RETAINED,
    &EVAL_WITH_GRAPH,
    &GRADIENTS_KEPT,
    &GRADIENTS_LATE,
    &CYCLE,
    &CHECKPOINT_KEPT,
    &WRONG_DEVICE,
    &FRAGMENTATION,
    &BUCKETS,
    &WORKSPACES,
    &STATE_DOES_NOT_FIT,
    &DEFERRED,
];
