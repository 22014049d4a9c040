//! What can lower a peak: each action, the condition under which it is considered, and how the new peak is computed.
//!
//! The new peak of each action comes from a replay of the recorded blocks with the change
//! ([`crate::passes::changes`]). An action that does not lower the peak there is not reported.

use super::ids::RuleId;

/// An action that can lower the peak.
#[derive(Debug)]
pub struct SuggestionRule {
    /// The stable id in reports.
    pub id: RuleId,
    /// What to do, in the program's terms. `{layers}` stands for modules, `{place}` for a line of the program, `{count}`
    /// and `{twice}` for the number of micro-batches in a step and its double, `{optimizer}` for the optimizer,
    /// `{evaluation}` for evaluations, generation or rollouts.
    pub action: &'static str,
    /// When it is considered.
    pub condition: &'static str,
    /// What the replay changes.
    pub method: &'static str,
    /// Whether the new peak is an upper bound, because the run does not show the exact value.
    pub at_most: bool,
}

/// A saving below one part in this many of the peak is not worth changing a program.
pub const WORTH_DOING: u64 = 50;

static SUGGESTIONS: &[SuggestionRule] = &[
    SuggestionRule {
        id: RuleId::CheckpointLayers,
        action: "activation checkpointing (torch.utils.checkpoint) of {layers}",
        condition: "At least two modules of one class, not checkpointed and more than a single operation, hold at least a \
                    twentieth of the peak.",
        method: "Blocks that only the backward pass of such a module needs are freed when the code after them has run. \
                 They are allocated again, with the temporaries of the call, when its backward pass begins. Inputs and \
                 results stay. Copies of weights stay until autocast ends.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::CheckpointOrNoGrad,
        action: "activation checkpointing (torch.utils.checkpoint) of {layers}; torch.no_grad(), if this is not \
                 training",
        condition: "The run has no backward pass. At least two modules of one class hold at least a twentieth of the \
                    peak. The second part is left out if the program has an optimizer, if dropout is active, or if the \
                    innermost function with such a name is named after training.",
        method: "Blocks of such a module are freed when the code after them has run, except its result.",
        at_most: true,
    },
    SuggestionRule {
        id: RuleId::OffloadActivations,
        action: "saved tensors in host memory: torch.autograd.graph.save_on_cpu() around the forward pass; slower by \
                 their copies",
        condition: "The run has a backward pass.",
        method: "Blocks that only the backward pass needs are freed when the code after them has run. They are \
                 allocated again for the node that frees them, with a copy of the node's weight.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::ScaledDotProductAttention,
        action: "F.scaled_dot_product_attention instead of softmax(QK^T)V at {place}",
        condition: "In the call of a module that computes attention, a softmax and at least one other block of its \
                    size are allocated. The softmax follows a product of matrices of its size, or its code is \
                    named after attention. The program does not keep them, and the module looks up no bias in an embedding.",
        method: "The blocks of the score matrix's size vanish from the call and from its backward pass, in all data \
                 types.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::ChunkedCrossEntropy,
        action: "the loss at {place} in 8 chunks of tokens, each with its logits and checkpointed",
        condition: "The softmax of a cross-entropy is at least a twentieth of the peak.",
        method: "Blocks of the logits' size are an eighth as large. The sum of the output layer's gradients exists \
                 from the first chunk on, and a new sum when a chunk's gradient is added.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::SmallerBatches,
        action: "half the batch, gradients accumulated over two",
        condition: "Each step has one backward pass.",
        method: "Activations, inputs, autograd temporaries and temporaries of the model halve. Forward and backward \
                 run twice. The gradients of the first half exist in the second, which adds its own one by one. What stays for more than a step is as large as before.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::MoreMicroBatches,
        action: "half of each micro-batch: {twice} in a step instead of {count}",
        condition: "Each step accumulates the gradients of several backward passes.",
        method: "Activations, inputs, autograd temporaries and temporaries of the model halve.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::HalfTheBatch,
        action: "half the batch",
        condition: "The run has no backward pass, or several in a step with gradients of their own.",
        method: "Activations, inputs, autograd temporaries and temporaries of the model halve. Results that are kept do not.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::NoGrad,
        action: "torch.no_grad() for the forward passes that no backward pass follows",
        condition: "Calls of a model keep at least three blocks for a backward pass, and no backward pass frees any of \
                    them.",
        method: "Blocks of such a call, except the last two, are freed when the code after them has run: the module \
                 that gets them as arguments, the next operation of their statement, or the code that assigned them to \
                 a variable.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::ResultsToCpu,
        action: "move the results of {place} to the CPU after each call: result.cpu()",
        condition: "Without gradients, a place allocates blocks that stay while a later iteration comes to it, and no \
                    backward pass begins before they are freed. In a run without a backward pass they do not grow.",
        method: "Such blocks end before the next iteration. Those that each iteration replaces by larger ones vanish.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::NoKvCache,
        action: "use_cache=False for the forward passes outside generate(): no pass reads the keys and values that they \
                 cache",
        condition: "Caches of transformers keep the keys and values of layers after the layer's call. Outside generate() no \
                    later call joins them with new ones, and the graph does not save them.",
        method: "These keys and values are freed when the call of their layer returns.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::LoadToCpu,
        action: "load to the CPU at {place}: map_location=\"cpu\"",
        condition: "The peak is in loading, and torch.load or safetensors allocate tensors that are freed later.",
        method: "These tensors vanish.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::BuildOnMeta,
        action: "build the model of {place} on the meta device: with torch.device(\"meta\"). Loaded tensors replace its \
                 parameters",
        condition: "The peak is in loading. Tensors that torch.load or safetensors allocate become parameters, as \
                    load_state_dict(assign=True) makes them. The blocks that are freed together for them have the same \
                    sizes.",
        method: "The freed blocks vanish.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::FinalDataType,
        action: "make the parameters in the data type to which {place} converts them: dtype= of from_pretrained(), or \
                 torch.set_default_dtype() before the model is built",
        condition: "The peak is in loading, and a conversion of the model replaces parameters by smaller ones.",
        method: "The smaller parameters exist from the start. Those that they replace vanish.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::SmallerEvaluationBatch,
        action: "half the batch in {evaluation}",
        condition: "The peak is in an evaluation, in generation or in a rollout of a training run, and no blocks of a training step are allocated.",
        method: "What it computes halves, but not the results that it keeps.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::FusedStep,
        action: "fused=True for {optimizer}",
        condition: "The optimizer's step allocates temporaries, and PyTorch has a fused variant of the optimizer.",
        method: "The temporaries of the step vanish.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::SingleTensorStep,
        action: "foreach=False for {optimizer}: one parameter after the other",
        condition: "The optimizer's step allocates temporaries, and PyTorch has no fused variant of the optimizer.",
        method: "Three temporaries of the largest parameter's size remain in each step.",
        at_most: true,
    },
    SuggestionRule {
        id: RuleId::OptimizerInBackward,
        action: "step {optimizer} in the backward pass (register_post_accumulate_grad_hook), one parameter at a time",
        condition: "Each step has one backward pass, and nothing works on all gradients together.",
        method: "Each gradient is freed when it is complete. The step needs one temporary of the parameter's size.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::SetToNone,
        action: "optimizer.zero_grad(set_to_none=True) right after optimizer.step()",
        condition: "Gradients exist in the forward pass after the optimizer's step.",
        method: "Gradients end with the optimizer's step. The next backward pass allocates them.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::GradientsInBuckets,
        action: "gradient_as_bucket_view=True for DistributedDataParallel",
        condition: "DistributedDataParallel is called, and buckets are allocated.",
        method: "Gradients are views of the buckets.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::EightBitMoments,
        action: "8-bit state for {optimizer} (bitsandbytes)",
        condition: "The optimizer keeps float32 state, and bitsandbytes has an 8-bit variant of it.",
        method: "State tensors of at least 4096 values take one byte per value, and four bytes per 256 values. The \
                 step needs no temporaries.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::Bfloat16Model,
        action: "parameters in bfloat16, and with them gradients and optimizer state",
        condition: "All parameters are float32. They, gradients, optimizer state and workspaces are all but a \
                    twentieth of the peak.",
        method: "Parameters, gradients, optimizer state and the temporaries of the optimizer's step halve.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::Adapters,
        action: "for fine-tuning: freeze the model and give it small adapters (LoRA, peft)",
        condition: "Each step has one backward pass. Parameters, gradients and optimizer state are at least half of the \
                    peak, and nearly all gradients are those of linear layers and embeddings.",
        method: "Gradients, optimizer state and the temporaries of the optimizer's step vanish. Activations stay. The \
                 adapters themselves, a few hundredths of the parameters, are left out.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::Autocast,
        action: "torch.autocast(\"cuda\", dtype=torch.bfloat16) around the forward pass and the loss",
        condition: "All parameters are float32 and get gradients. The operations that allocate nearly all values are \
                    known, and values of unknown types change the new peak by at most a twentieth. The workspaces of \
                    libraries are at most a tenth of the peak.",
        method: "Results of operations that autocast runs in bfloat16 halve, and those that take the type of their inputs \
                 with them. An operation in the other type works on a copy of its input, which the backward pass needs \
                 instead of the input. Copies of weights stay until autocast ends, and until the backward pass has used \
                 them.",
        at_most: false,
    },
    SuggestionRule {
        id: RuleId::CombinedChanges,
        action: "several of these changes together",
        condition: "Together they lower the peak by at least a tenth more than the best of them alone.",
        method: "The changes are replayed together.",
        at_most: false,
    },
];

/// All suggestions.
pub fn suggestion_rules() -> &'static [SuggestionRule] {
    SUGGESTIONS
}

/// The suggestion with this id.
pub fn suggestion_rule(id: RuleId) -> Option<&'static SuggestionRule> {
    SUGGESTIONS.iter().find(|rule| rule.id == id)
}
