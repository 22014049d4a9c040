//! The ids of rules. Their text form is kebab-case. It is part of `summary.json`, of exported tables and of the command
//! line, so an id is never reused for something else.

use std::fmt;
use std::str::FromStr;

use memtrace_trace::named;

use crate::diagnostics::list::with_diagnostics;
use crate::suggestions::list::with_suggestions;

/// Declares the ids of one kind of rule, their text form and the list of all.
macro_rules! rule_ids {
    ($(#[$about:meta])* $name:ident: $($(#[$meaning:meta])* $id:ident = $text:literal,)+) => {
        named! {
            serde
            $(#[$about])*
            #[derive(
                Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
                schemars::JsonSchema,
            )]
            pub enum $name {
                $($(#[$meaning])* $id => $text,)+
            }
        }

        impl $name {
            /// The text form.
            pub const fn as_str(self) -> &'static str {
                self.name()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownRule;

            fn from_str(text: &str) -> Result<$name, UnknownRule> {
                $name::from_name(text).ok_or(UnknownRule)
            }
        }
    };
}

/// The text is not the id of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownRule;

impl fmt::Display for UnknownRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no rule has this id")
    }
}

impl std::error::Error for UnknownRule {}

/// Declares [`RuleId`]: the ids of the diagnostics' rules, and then those of suggestions.
macro_rules! issue_rule_ids {
    (
        { $($suggestions:tt)* }
        $($module:ident: $diagnostic:ident { $($ids:tt)* })*
    ) => {
        rule_ids! {
            /// A rule that finds an issue, or that suggests how to lower a peak.
            RuleId:
            $($($ids)*)*
            $($suggestions)*
        }
    };
}

/// Adds the ids of the diagnostics to those of the suggestions.
macro_rules! with_suggestion_ids {
    (
        { }
        $($module:ident { $($(#[$about:meta])* $rule:ident: $id:ident = $text:literal,)+ })+
    ) => {
        with_diagnostics! { issue_rule_ids {
            $($($(#[$about])* $id = $text,)+)+
        } }
    };
}

with_suggestions! { with_suggestion_ids {
} }

rule_ids! {
    /// A rule that decides the phase of an event.
    PhaseRuleId:
    /// A frame of `torch.autograd` that calls the engine.
    EngineTorchAutograd = "engine-torch-autograd",
    /// `Tensor.backward`.
    EngineTensorBackward = "engine-tensor-backward",
    /// `torch.utils.checkpoint`.
    CheckpointTorch = "checkpoint-torch",
    /// DeepSpeed's activation checkpointing.
    CheckpointDeepspeed = "checkpoint-deepspeed",
    /// FairScale's activation checkpointing.
    CheckpointFairscale = "checkpoint-fairscale",
    /// Megatron's activation checkpointing.
    CheckpointMegatron = "checkpoint-megatron",
    /// A learning-rate scheduler.
    LrScheduler = "lr-scheduler",
    /// `torch.optim.swa_utils`.
    WeightAveraging = "weight-averaging",
    /// `Optimizer.zero_grad`.
    ZeroGradOptimizer = "zero-grad-optimizer",
    /// `Module.zero_grad`.
    ZeroGradModule = "zero-grad-module",
    /// `zero_grad` of another library's optimizer.
    ZeroGradOtherOptimizer = "zero-grad-other-optimizer",
    /// `_init_group` of `torch.optim`, which allocates the state.
    OptimizerStateInitGroup = "optimizer-state-init-group",
    /// The state of `torch.optim` is loaded.
    OptimizerStateLoaded = "optimizer-state-loaded",
    /// The state of bitsandbytes.
    OptimizerStateBitsandbytes = "optimizer-state-bitsandbytes",
    /// A step of `torch.optim`.
    OptimizerStepTorch = "optimizer-step-torch",
    /// A step of bitsandbytes.
    OptimizerStepBitsandbytes = "optimizer-step-bitsandbytes",
    /// A step of Apex.
    OptimizerStepApex = "optimizer-step-apex",
    /// A step of DeepSpeed.
    OptimizerStepDeepspeed = "optimizer-step-deepspeed",
    /// A step of DeepSpeed ZeRO.
    OptimizerStepDeepspeedZero = "optimizer-step-deepspeed-zero",
    /// A step of DeepSpeed's bfloat16 optimizer.
    OptimizerStepDeepspeedBf16 = "optimizer-step-deepspeed-bf16",
    /// A step of torchao.
    OptimizerStepTorchao = "optimizer-step-torchao",
    /// A step of timm.
    OptimizerStepTimm = "optimizer-step-timm",
    /// A step of Transformers.
    OptimizerStepTransformers = "optimizer-step-transformers",
    /// A step of Megatron.
    OptimizerStepMegatron = "optimizer-step-megatron",
    /// A step of `lion_pytorch`.
    OptimizerStepLion = "optimizer-step-lion",
    /// A step of schedulefree.
    OptimizerStepSchedulefree = "optimizer-step-schedulefree",
    /// `torch.nn.utils.clip_grad`.
    GradientsClipGrad = "gradients-clip-grad",
    /// `GradScaler`.
    GradientsGradScaler = "gradients-grad-scaler",
    /// `torch.utils.data`.
    DataTorch = "data-torch",
    /// torchdata.
    DataTorchdata = "data-torchdata",
    /// DALI.
    DataDali = "data-dali",
    /// Accelerate's data loaders.
    DataAccelerate = "data-accelerate",
    /// A module is moved or cast (`Module.to`).
    LoadModuleMoved = "load-module-moved",
    /// `Module.load_state_dict`.
    LoadStateDict = "load-state-dict",
    /// A module of PyTorch is built.
    LoadModuleBuilt = "load-module-built",
    /// `torch.nn.init`.
    LoadNnInit = "load-nn-init",
    /// `torch.load`.
    LoadTorchLoad = "load-torch-load",
    /// safetensors.
    LoadSafetensors = "load-safetensors",
    /// `torch.distributed.checkpoint`.
    LoadDistributedCheckpoint = "load-distributed-checkpoint",
    /// DistributedDataParallel is built.
    LoadDdpBuilt = "load-ddp-built",
    /// Transformers loads a model.
    LoadTransformers = "load-transformers",
    /// Accelerate loads a model.
    LoadAccelerate = "load-accelerate",
    /// `torch.nn.modules`.
    ComputeNnModules = "compute-nn-modules",
    /// `torch.nn.functional`.
    ComputeNnFunctional = "compute-nn-functional",
    /// DistributedDataParallel rebuilds its buckets.
    ComputeDdpBuckets = "compute-ddp-buckets",
    /// `torch.nn.parallel`.
    ComputeNnParallel = "compute-nn-parallel",
    /// `torch.nn.attention`.
    ComputeNnAttention = "compute-nn-attention",
    /// Code that `torch.compile` generated or runs.
    ComputeCompiled = "compute-compiled",
    /// `autograd.Function.apply`.
    ComputeAutogradFunction = "compute-autograd-function",
    /// flash-attn.
    ComputeFlashAttn = "compute-flash-attn",
    /// Inside PyTorch's range for an optimizer's step.
    RangeOptimizerStep = "range-optimizer-step",
    /// Inside PyTorch's range for clearing gradients.
    RangeZeroGrad = "range-zero-grad",
    /// Inside PyTorch's range for a data loader.
    RangeDataLoader = "range-data-loader",
    /// Inside PyTorch's range for a data pipe.
    RangeDataPipe = "range-data-pipe",
    /// The stack made an autograd node.
    ForwardMadeAutogradNode = "forward-made-autograd-node",
    /// User code outside the model, between forward and backward.
    ForwardOutsideModel = "forward-outside-model",
    /// An autograd node is running.
    BackwardAutogradNode = "backward-autograd-node",
    /// The event happens inside the autograd engine.
    BackwardInsideEngine = "backward-inside-engine",
    /// No Python frame runs while the engine runs.
    BackwardNoPythonFrame = "backward-no-python-frame",
    /// A checkpointed function runs inside backward.
    RecomputeCheckpointInBackward = "recompute-checkpoint-in-backward",
    /// The node `CheckpointFunctionBackward` is running.
    RecomputeCheckpointFunction = "recompute-checkpoint-function",
    /// User code outside the model, after a forward pass without gradients.
    EvalOutsideModel = "eval-outside-model",
    /// A module call with gradients whose results no backward pass uses.
    EvalWithoutBackward = "eval-without-backward",
    /// A call without gradients of a function named after generation, or in which a cache grows with each call.
    GenerateTokens = "generate-tokens",
    /// A call without gradients of a function named after rollouts, or of modules that the program trains between such
    /// calls.
    RolloutForTraining = "rollout-for-training",
    /// User code without gradients, after a backward pass.
    OptimizerNoGradAfterBackward = "optimizer-no-grad-after-backward",
    /// User code without gradients, in the optimizer phase.
    OptimizerNoGradOutsideStep = "optimizer-no-grad-outside-step",
    /// User code without gradients, after the optimizer's step.
    OtherNoGradAfterStep = "other-no-grad-after-step",
    /// User code before the first forward pass.
    LoadBeforeFirstForward = "load-before-first-forward",
    /// User code between steps.
    DataBetweenSteps = "data-between-steps",
    /// A free while no Python frame runs.
    FreeNoPythonFrame = "free-no-python-frame",
    /// A free by user code that no other rule matches. It has the program's current phase.
    FreeByPosition = "free-by-position",
    /// User code after the optimizer's step, before the next batch is loaded.
    OtherBeforeNextBatch = "other-before-next-batch",
    /// The block is older than the recording, and its stack proves no phase.
    OlderThanRecording = "older-than-recording",
    /// No rule matches.
    NoPhaseRule = "no-phase-rule",
}

rule_ids! {
    /// A rule that decides the category of a block.
    CategoryRuleId:
    /// The tensor name of a parameter.
    NameParameter = "name-parameter",
    /// The tensor name of a buffer.
    NameBuffer = "name-buffer",
    /// The tensor name of a gradient.
    NameGradient = "name-gradient",
    /// The tensor name of optimizer state.
    NameOptimizerState = "name-optimizer-state",
    /// DistributedDataParallel allocates a bucket.
    BucketDdp = "bucket-ddp",
    /// FSDP allocates a buffer of a collective, or gathers parameters.
    BucketFsdp = "bucket-fsdp",
    /// DataParallel copies parameters to another device.
    BucketDataParallel = "bucket-data-parallel",
    /// `ZeroRedundancyOptimizer` allocates a bucket.
    BucketZeroRedundancyOptimizer = "bucket-zero-redundancy-optimizer",
    /// Megatron allocates a bucket.
    BucketMegatron = "bucket-megatron",
    /// The cache of Transformers.
    KvCacheTransformers = "kv-cache-transformers",
    /// The cache of vLLM.
    KvCacheVllm = "kv-cache-vllm",
    /// A class or function with the name of a key/value cache.
    KvCacheClassName = "kv-cache-class-name",
    /// A buffer with the name of a key/value cache.
    KvCacheBufferName = "kv-cache-buffer-name",
    /// Equal blocks without tensor names that are kept across calls of the model.
    KvCacheEqualBlocks = "kv-cache-equal-blocks",
    /// The block grows from call to call of the model.
    KvCacheGrows = "kv-cache-grows",
    /// The block is kept across calls of the model.
    KvCacheKeptAcrossCalls = "kv-cache-kept-across-calls",
    /// `torch.load`.
    CheckpointTorchLoad = "checkpoint-torch-load",
    /// safetensors.
    CheckpointSafetensors = "checkpoint-safetensors",
    /// An engine that serves models builds a model and loads its weights.
    ParameterServingLoader = "parameter-serving-loader",
    /// FSDP allocates a shard.
    ParameterFsdpShard = "parameter-fsdp-shard",
    /// `Parameter.__deepcopy__`.
    ParameterDeepcopy = "parameter-deepcopy",
    /// A module is moved or cast.
    ParameterModuleMoved = "parameter-module-moved",
    /// A model is built, moved or filled.
    ParameterModelLoaded = "parameter-model-loaded",
    /// The move or the cast of a module replaces the block.
    ParameterReplacedByMove = "parameter-replaced-by-move",
    /// The same stack has allocated parameters.
    ParameterSameSite = "parameter-same-site",
    /// The block is as large as a gradient.
    ParameterGradientSized = "parameter-gradient-sized",
    /// cuBLAS gets a workspace.
    WorkspaceCublas = "workspace-cublas",
    /// cuDNN gets a workspace.
    WorkspaceCudnn = "workspace-cudnn",
    /// The block is as large as a workspace, its stack multiplies matrices, and it is never freed.
    WorkspaceNeverFreed = "workspace-never-freed",
    /// The block is in a private pool into which a CUDA graph was captured.
    GraphPool = "graph-pool",
    /// The block is in a private pool.
    PrivatePool = "private-pool",
    /// The data phase allocates the block.
    InputDataPhase = "input-data-phase",
    /// Later batches come from the same stack.
    InputLaterBatches = "input-later-batches",
    /// Other batches come from the same stack.
    InputOtherBatches = "input-other-batches",
    /// Allocated before the first forward pass, without a tensor name in a program whose parameters have names.
    InputUnnamedAtLoad = "input-unnamed-at-load",
    /// Allocated before the first forward pass, and no gradient has its size.
    InputNoGradientAtLoad = "input-no-gradient-at-load",
    /// Allocated between a backward pass and the next forward pass.
    InputBeforeForward = "input-before-forward",
    /// Allocated with gradients enabled, after an evaluation and before the next forward pass.
    InputAfterEvaluation = "input-after-evaluation",
    /// A forward pass computes the block.
    ActivationForward = "activation-forward",
    /// Activation checkpointing computes the block again.
    ActivationRecomputed = "activation-recomputed",
    /// A backward pass that autograd records computes the block for a further one.
    ActivationRecordedBackward = "activation-recorded-backward",
    /// Allocated before the first forward pass and kept, while later steps load batches.
    KeptTensorAtLoad = "kept-tensor-at-load",
    /// Code outside the model allocates the block, and several later steps find it.
    KeptTensorOutlivesSteps = "kept-tensor-outlives-steps",
    /// Code outside the model allocates the block without autograd, and it outlives its step.
    KeptTensorOutsideModel = "kept-tensor-outside-model",
    /// A result without gradients that the program keeps across calls of the model.
    KeptTensorResult = "kept-tensor-result",
    /// A bucket of gradients that outlives its backward pass.
    GradientBucket = "gradient-bucket",
    /// The block outlives its backward pass.
    GradientOutlivesBackward = "gradient-outlives-backward",
    /// Clearing gradients frees the block, also inside a backward pass.
    GradientCleared = "gradient-cleared",
    /// Code outside the autograd engine frees the block after its backward pass.
    GradientFreedOutsideEngine = "gradient-freed-outside-engine",
    /// The node `AccumulateGrad` allocates the block.
    GradientAccumulateGrad = "gradient-accumulate-grad",
    /// The block is as large as a parameter.
    GradientParameterSized = "gradient-parameter-sized",
    /// A backward node passes the block to another node.
    AutogradDetailBetweenNodes = "autograd-detail-between-nodes",
    /// A cast that is half as large as a parameter.
    AutocastCacheWeightCast = "autocast-cache-weight-cast",
    /// The block is freed when autocast ends.
    AutocastCacheFreedAtExit = "autocast-cache-freed-at-exit",
    /// The optimizer initializes its state.
    OptimizerStateInitialization = "optimizer-state-initialization",
    /// The block outlives the optimizer's step.
    OptimizerStateOutlivesStep = "optimizer-state-outlives-step",
    /// The call that allocates the block frees it.
    TemporaryFreedByCall = "temporary-freed-by-call",
    /// The node that allocates the block frees it.
    TemporaryFreedByNode = "temporary-freed-by-node",
    /// The block is freed before the first forward pass.
    TemporaryFreedBeforeForward = "temporary-freed-before-forward",
    /// The block is freed before the optimizer phase ends.
    TemporaryFreedInOptimizer = "temporary-freed-in-optimizer",
    /// Work on gradients, such as clipping, allocates the block.
    TemporaryGradientWork = "temporary-gradient-work",
    /// User code allocates the block before the first forward pass.
    UnknownAtLoad = "unknown-at-load",
    /// User code allocates the block in the optimizer phase, outside a step.
    UnknownInOptimizer = "unknown-in-optimizer",
    /// No rule matches.
    NoCategoryRule = "no-category-rule",
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Debug;

    use super::*;
    use crate::diagnostics::diagnostic_rules;
    use crate::suggestions::suggestion_rules;

    /// The kebab-case form of a variant's name.
    fn kebab(id: &impl Debug) -> String {
        let mut kebab = String::new();
        for c in format!("{id:?}").chars() {
            if c.is_ascii_uppercase() && !kebab.is_empty() {
                kebab.push('-');
            }
            kebab.push(c.to_ascii_lowercase());
        }
        kebab
    }

    fn check<Id: Copy + Debug + FromStr + PartialEq>(all: &[Id], text: fn(Id) -> &'static str) {
        let texts: BTreeSet<&str> = all.iter().map(|id| text(*id)).collect();
        assert_eq!(texts.len(), all.len(), "ids are unique");
        for id in all {
            assert_eq!(text(*id), kebab(id));
            assert_eq!(text(*id).parse::<Id>().ok(), Some(*id));
        }
    }

    #[test]
    fn ids_are_unique_and_kebab_case() {
        check(&RuleId::ALL, RuleId::as_str);
        check(&PhaseRuleId::ALL, PhaseRuleId::as_str);
        check(&CategoryRuleId::ALL, CategoryRuleId::as_str);
        assert_eq!("graph kept".parse::<RuleId>(), Err(UnknownRule));
        assert_eq!(format!("{:>6}", RuleId::Leak), "  leak");
    }

    #[test]
    fn each_rule_id_has_one_rule() {
        let diagnostics = diagnostic_rules().into_iter().map(|rule| rule.id);
        let mut ids: Vec<RuleId> = diagnostics.chain(suggestion_rules().iter().map(|rule| rule.id)).collect();
        ids.sort_unstable();
        assert_eq!(ids, RuleId::ALL);
    }
}
