//! The list of suggestions, in the order in which a combination names them. A new suggestion has a line here.

/// Calls the macro `$apply` with `$more` and the list. An entry has the module, and for each of its rules the static,
/// the id and the text form of the id. An id is never reused for something else.
macro_rules! with_suggestions {
    ($apply:ident $($more:tt)*) => {
        $apply! {
            $($more)*
            scaled_dot_product_attention {
                /// Suggests attention without score matrices.
                RULE: ScaledDotProductAttention = "scaled-dot-product-attention",
            }
            chunked_cross_entropy {
                /// Suggests the loss of a language model in chunks.
                RULE: ChunkedCrossEntropy = "chunked-cross-entropy",
            }
            loss_in_replicas {
                /// Suggests the loss inside the module that DataParallel wraps.
                RULE: LossInReplicas = "loss-in-replicas",
            }
            backward_each {
                /// Suggests a backward pass right after each forward pass.
                RULE: BackwardEach = "backward-each",
            }
            no_grad {
                /// Suggests forward passes without gradients.
                RULE: NoGrad = "no-grad",
            }
            results_to_cpu {
                /// Suggests results of an evaluation on the CPU.
                RULE: ResultsToCpu = "results-to-cpu",
            }
            no_kv_cache {
                /// Suggests forward passes without a key-value cache.
                RULE: NoKvCache = "no-kv-cache",
            }
            no_autocast_cache {
                /// Suggests autocast without its cache where no gradients are needed.
                RULE: NoAutocastCache = "no-autocast-cache",
            }
            share_buffers {
                /// Suggests one buffer for all modules.
                RULE: ShareBuffers = "share-buffers",
            }
            data_to_cpu {
                /// Suggests data on the CPU.
                RULE: DataToCpu = "data-to-cpu",
            }
            load_to_cpu {
                /// Suggests loading to the CPU.
                RULE: LoadToCpu = "load-to-cpu",
            }
            build_on_meta {
                /// Suggests to build the model on the meta device.
                RULE: BuildOnMeta = "build-on-meta",
            }
            final_data_type {
                /// Suggests to make parameters in their final data type.
                RULE: FinalDataType = "final-data-type",
            }
            checkpoint_layers {
                /// Suggests activation checkpointing.
                RULE: CheckpointLayers = "checkpoint-layers",
                /// Suggests activation checkpointing, or no gradients, for a run without a backward pass.
                WITHOUT_BACKWARD: CheckpointOrNoGrad = "checkpoint-or-no-grad",
            }
            offload_activations {
                /// Suggests saved tensors in host memory.
                RULE: OffloadActivations = "offload-activations",
            }
            smaller_batches {
                /// Suggests smaller batches with gradient accumulation.
                RULE: SmallerBatches = "smaller-batches",
            }
            more_micro_batches {
                /// Suggests more and smaller micro-batches for a program that accumulates gradients.
                RULE: MoreMicroBatches = "more-micro-batches",
            }
            half_the_batch {
                /// Suggests half the batch where gradients cannot be accumulated.
                RULE: HalfTheBatch = "half-the-batch",
            }
            smaller_evaluation_batch {
                /// Suggests half the batch in evaluations.
                RULE: SmallerEvaluationBatch = "smaller-evaluation-batch",
            }
            freeze_unused {
                /// Suggests no gradients for parameters that no optimizer has.
                RULE: FreezeUnused = "freeze-unused",
            }
            set_to_none {
                /// Suggests freeing gradients right after the optimizer's step.
                RULE: SetToNone = "set-to-none",
            }
            gradients_in_buckets {
                /// Suggests gradients that are views of the buckets.
                RULE: GradientsInBuckets = "gradients-in-buckets",
            }
            fused_step {
                /// Suggests an optimizer step without temporaries.
                RULE: FusedStep = "fused-step",
            }
            single_tensor_step {
                /// Suggests an optimizer step that processes one parameter after the other.
                RULE: SingleTensorStep = "single-tensor-step",
            }
            eight_bit_moments {
                /// Suggests optimizer moments in 8 bits.
                RULE: EightBitMoments = "eight-bit-moments",
            }
            optimizer_in_backward {
                /// Suggests an optimizer that steps inside the backward pass.
                RULE: OptimizerInBackward = "optimizer-in-backward",
            }
            bfloat16_model {
                /// Suggests parameters in bfloat16.
                RULE: Bfloat16Model = "bfloat16-model",
            }
            autocast {
                /// Suggests autocast in bfloat16.
                RULE: Autocast = "autocast",
            }
            adapters {
                /// Suggests to freeze the parameters and to train adapters.
                RULE: Adapters = "adapters",
            }
            combination {
                /// Suggests several changes together.
                RULE: CombinedChanges = "combined-changes",
            }
        }
    };
}

pub(crate) use with_suggestions;
