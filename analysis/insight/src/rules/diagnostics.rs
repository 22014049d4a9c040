//! The issues that a run's memory use can have, with one rule per issue.
//!
//! Reports cite the rule, and docs/reference/diagnostics.md repeats its texts. The passes in `passes/diagnostics`
//! collect the evidence.

use super::ids::RuleId;

/// The rule for one issue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiagnosticRule {
    /// The stable id in reports and on the command line.
    pub id: RuleId,
    /// The evidence that the rule requires.
    pub evidence: &'static str,
    /// What the rule cannot detect, or can mistake.
    pub limits: &'static str,
}

/// The allocated bytes of one stack grow from step to step.
pub static LEAK: DiagnosticRule = DiagnosticRule {
    id: RuleId::Leak,
    evidence: "The allocated bytes of one stack are sampled at the start of each step, or of each request if the \
               program only calls a model. They increase in at least four samples, up to the end of the run, without \
               leveling out, and the program frees at most a quarter of the growth in between. Either the blocks \
               become more, or each block replaces a smaller one while the batch does not grow. Growth in nearly every \
               step counts from 512 KiB and 16 KiB per step on. Within one step, the rule looks at calls of the model \
               without gradients up to an out-of-memory error.",
    limits: "The rule knows the object that holds the blocks only with `memtrace --holders`. A buffer that is not full when the run ends looks \
             like a leak. A request begins with a call of the model whose input is larger than that of the call before. \
             The forecast assumes that the rest of the program needs as much memory and time as before.",
};

/// The graphs of several calls of a model are allocated at once.
pub static GRAPH_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::GraphKept,
    evidence: "Forward passes allocate the blocks while autograd records, at two places or more. Either the blocks \
               increase from step to step, or the blocks of at least three calls are freed together, at least three \
               per call. At the end of the run, those of two steps suffice if backward passes ran through them. If backward passes ran through the graphs, at least three times as many blocks per call \
               remain as a backward pass frees.",
    limits: "The line that stores the loss allocates nothing, so the issue names the line that computes the loss. A \
             graph that is unrolled over many calls on purpose looks the same if an error frees it.",
};

/// A backward pass retained its graph.
pub static GRAPH_RETAINED: DiagnosticRule = DiagnosticRule {
    id: RuleId::GraphRetained,
    evidence: "The blocks that a forward pass keeps for the backward pass are freed together after that backward pass. \
               They have at least as many bytes as the backward pass freed, and at least three times as many blocks.",
    limits: "The rule does not know which of several backward calls was the last to need the graph. It can misjudge a \
             graph of which only one branch remains.",
};

/// Forward passes without a backward pass keep their activations.
pub static EVAL_WITHOUT_NO_GRAD: DiagnosticRule = DiagnosticRule {
    id: RuleId::EvalWithoutNoGrad,
    evidence: "A call of the model allocates at least three blocks, at two places or more, while autograd records. \
               They are freed together without a backward pass in between, and no backward pass runs through another \
               part of the call. This happens at least twice. Or a forward pass runs out of memory at a place through \
               which no backward pass ever ran, after training steps with the same modules at another place. Then one \
               of three facts is required: an earlier graph of this place was dropped, a function named after \
               evaluation calls the model, or dropout and batch normalization allocate as after model.eval().",
    limits: "Graphs that the program drops on purpose look the same, for example in a skipped step. The rule misses \
             an evaluation that runs out of memory in its first call if nothing else shows that it is one.",
};

/// Gradients stay allocated through the next forward pass because nothing frees them.
pub static GRADIENTS_NOT_CLEARED: DiagnosticRule = DiagnosticRule {
    id: RuleId::GradientsNotCleared,
    evidence: "Gradients are still allocated when forward passes begin after an optimizer step. Either they are never \
               freed, for at least half of all steps and at least twelve steps (three if the program frees no \
               gradients). Or all are freed at once, repeatedly, after at least twelve steps that used them.",
    limits: "Without PyTorch's profiler ranges, the rule cannot tell gradients that are filled with zeros \
             (set_to_none=False) from gradients that are never cleared.",
};

/// Gradients are freed between forward and backward.
pub static GRADIENTS_CLEARED_LATE: DiagnosticRule = DiagnosticRule {
    id: RuleId::GradientsClearedLate,
    evidence: "Gradients are still allocated when a forward pass begins after an optimizer step, and are freed before \
               the backward pass. The peak is higher because of them.",
    limits: "The rule does not compute what earlier clearing saves within a backward pass.",
};

/// Reference cycles held memory until the garbage collector ran.
pub static REFERENCE_CYCLE: DiagnosticRule = DiagnosticRule {
    id: RuleId::ReferenceCycle,
    evidence: "CPython's cyclic garbage collector frees the blocks, before the program's end.",
    limits: "The rule does not know when the blocks became garbage. It knows the objects of a cycle only with \
             `memtrace --cycles`.",
};

/// A checkpoint stays allocated beside the model that it was copied into.
pub static CHECKPOINT_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::CheckpointKept,
    evidence: "torch.load, safetensors or torch.distributed.checkpoint allocates the blocks. They are still allocated \
               when the second step begins. For each of them, the model has another block of the same size. None of \
               them is a named tensor of the model or the optimizer.",
    limits: "The rule misses checkpoints that other code reads. Without tensor names, it does not know which of \
             several blocks of one size is the copy.",
};

/// A checkpoint was read to a device that computes nothing.
pub static WRONG_DEVICE: DiagnosticRule = DiagnosticRule {
    id: RuleId::WrongDevice,
    evidence: "The program reads a checkpoint to a device on which this process computes nothing, while it computes on \
               another device.",
    limits: "The rule misses a device on which the process also computes a little.",
};

/// Blocks in use block segments whose free memory the allocator could not use.
pub static FRAGMENTATION: DiagnosticRule = DiagnosticRule {
    id: RuleId::Fragmentation,
    evidence: "The allocator requests more memory from CUDA although as much is free in segments with blocks in use. \
               That free memory is at least a quarter of the reserved memory, and at least 1 % of the device's memory \
               if no request failed.",
    limits: "The rule does not cover expandable segments and private pools. It does not know which block of a segment \
             is to blame, so the sources of all its blocks share the free memory.",
};

/// DistributedDataParallel holds a second copy of the gradients.
pub static DDP_BUCKETS: DiagnosticRule = DiagnosticRule {
    id: RuleId::DdpBuckets,
    evidence: "DistributedDataParallel allocates buckets that are at least half as large as the gradients beside them.",
    limits: "The rule does not know whether communication hooks need the buckets.",
};

/// cuBLAS has many workspaces.
pub static CUBLAS_WORKSPACES: DiagnosticRule = DiagnosticRule {
    id: RuleId::CublasWorkspaces,
    evidence: "At least four blocks of exactly the size of a cuBLAS workspace are allocated at once, on three streams \
               or more.",
    limits: "The rule misses workspaces of another size (CUBLAS_WORKSPACE_CONFIG). It counts other blocks of the same \
             size.",
};

/// The optimizer state does not fit.
pub static OPTIMIZER_STATE_DOES_NOT_FIT: DiagnosticRule = DiagnosticRule {
    id: RuleId::OptimizerStateDoesNotFit,
    evidence: "An out-of-memory error occurs while an optimizer allocates its state. The kind of optimizer and the \
               parameters determine the size of the whole state.",
    limits: "The rule does not know the size of a state that depends on the optimizer's options.",
};

/// Frees wait for streams.
pub static DEFERRED_FREES: DiagnosticRule = DiagnosticRule {
    id: RuleId::DeferredFrees,
    evidence: "The program has freed blocks that streams still use. At one point in time they are at least a tenth of \
               the peak.",
    limits: "The rule does not know the line that calls record_stream, so the issue names the line that allocates. It \
             does not know the stream's work.",
};

/// Results of a forward pass stay allocated through the next forward pass.
pub static OUTPUTS_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::OutputsKept,
    evidence: "Results of a forward pass are still allocated in the next forward pass, although a backward pass and an \
               optimizer step came in between. User code frees them there, before another backward pass begins. The \
               peak is higher because of them.",
    limits: "The rule knows the variable that holds the blocks only with `memtrace --holders`. A result that the next \
             forward pass reads and that autograd does not save looks the same.",
};

/// A process holds memory or a context on a GPU that is another rank's.
pub static STRAY_CONTEXT: DiagnosticRule = DiagnosticRule {
    id: RuleId::StrayContext,
    evidence: "A process of one rank allocates or creates a CUDA context on a GPU that is another rank's own, besides \
               the GPU of its own rank. A rank's own GPU is the one with its local rank, else the one on which it \
               computes most. GPUs are compared by PCI bus id, else by CUDA_VISIBLE_DEVICES. A GPU on which \
               the program itself opens memory of another process (CUDA IPC) does not count. NCCL opens memory on the \
               other GPUs of a host too, and needs no context there.",
    limits: "The bytes are those that the process allocated. Its CUDA context takes several hundred MiB besides. A \
             context without an allocation has a line only if the process had allocated on another GPU before. \
             Ranks that share a GPU on purpose have the same own GPU and are not reported.",
};

/// A DataLoader worker holds memory on a GPU.
pub static WORKER_CONTEXT: DiagnosticRule = DiagnosticRule {
    id: RuleId::WorkerContext,
    evidence: "The first allocation of a process on a GPU comes from the worker loop of torch.utils.data.",
    limits: "The bytes are those that the worker allocated. Its CUDA context takes several hundred MiB besides.",
};

/// All rules.
pub static DIAGNOSTICS: [&DiagnosticRule; 17] = [
    &LEAK,
    &GRAPH_KEPT,
    &GRAPH_RETAINED,
    &EVAL_WITHOUT_NO_GRAD,
    &GRADIENTS_NOT_CLEARED,
    &GRADIENTS_CLEARED_LATE,
    &REFERENCE_CYCLE,
    &CHECKPOINT_KEPT,
    &WRONG_DEVICE,
    &FRAGMENTATION,
    &DDP_BUCKETS,
    &CUBLAS_WORKSPACES,
    &OPTIMIZER_STATE_DOES_NOT_FIT,
    &DEFERRED_FREES,
    &OUTPUTS_KEPT,
    &STRAY_CONTEXT,
    &WORKER_CONTEXT,
];
