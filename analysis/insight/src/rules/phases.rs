//! The facts that a Python frame shows about the phase in which it allocates.
//!
//! Frames are examined from the innermost outwards; the first one that a rule matches decides. Rules match files by the
//! end of their path, so that site-packages can be anywhere.

use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::file::{Frame, Label};

use super::ids::PhaseRuleId;
use super::paths::ends_with;

/// The meaning of a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Meaning {
    /// The call into the autograd engine: backward.
    Engine,
    /// Activation checkpointing: forward the first time, recomputation while the engine is running.
    Checkpoint,
    /// An optimizer's step.
    OptimizerStep,
    /// An optimizer's step that allocates its state, which stays as long as the optimizer.
    OptimizerState,
    /// Work on gradients around the step: clipping, unscaling.
    GradientWork,
    /// Clearing gradients.
    ZeroGrad,
    /// A data loader.
    Data,
    /// Building, moving or filling a model.
    Load,
    /// A module, a functional or a loss that computes.
    Compute,
    /// Library code that proves no phase and ends the search: a learning-rate scheduler, weight averaging.
    NoPhase,
}

/// The paths that a rule is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Path {
    /// The path ends with this.
    Ends(&'static str),
    /// The path contains this folder.
    Has(&'static str),
}

/// One rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRule {
    /// The id, shown with everything that the rule decides.
    pub id: PhaseRuleId,
    /// The meaning of the frame.
    pub meaning: Meaning,
    path: Path,
    /// The functions that the rule is about; empty for all functions.
    functions: &'static [&'static str],
}

impl FrameRule {
    /// Whether such a frame runs inside the call of an `nn.Module`.
    pub fn is_module_call(&self) -> bool {
        matches!(self.id, PhaseRuleId::ComputeNnModules | PhaseRuleId::ComputeNnParallel)
    }
}

const fn rule(id: PhaseRuleId, meaning: Meaning, path: Path, functions: &'static [&'static str]) -> FrameRule {
    FrameRule { id, meaning, path, functions }
}

use Meaning::{
    Checkpoint, Compute, Data, Engine, GradientWork, Load, NoPhase, OptimizerState, OptimizerStep, ZeroGrad,
};
use Path::{Ends, Has};

/// The rules. The first one that matches a frame decides.
static FRAME_RULES: &[FrameRule] = &[
    // Autograd.
    rule(PhaseRuleId::EngineTorchAutograd, Engine, Ends("torch/autograd/graph.py"), &["_engine_run_backward"]),
    rule(PhaseRuleId::EngineTorchAutograd, Engine, Ends("torch/autograd/__init__.py"), &[]),
    rule(PhaseRuleId::EngineTensorBackward, Engine, Ends("torch/_tensor.py"), &["backward"]),
    rule(PhaseRuleId::CheckpointTorch, Checkpoint, Ends("torch/utils/checkpoint.py"), &[]),
    rule(PhaseRuleId::CheckpointDeepspeed, Checkpoint, Has("deepspeed/runtime/activation_checkpointing/"), &[]),
    rule(PhaseRuleId::CheckpointFairscale, Checkpoint, Ends("fairscale/nn/checkpoint/checkpoint_activations.py"), &[]),
    rule(PhaseRuleId::CheckpointMegatron, Checkpoint, Ends("megatron/core/tensor_parallel/random.py"), &["checkpoint"]),
    // Optimizers.
    rule(PhaseRuleId::LrScheduler, NoPhase, Ends("torch/optim/lr_scheduler.py"), &[]),
    rule(PhaseRuleId::WeightAveraging, NoPhase, Ends("torch/optim/swa_utils.py"), &[]),
    rule(PhaseRuleId::ZeroGradOptimizer, ZeroGrad, Has("torch/optim/"), &["zero_grad"]),
    rule(PhaseRuleId::ZeroGradModule, ZeroGrad, Ends("torch/nn/modules/module.py"), &["zero_grad"]),
    rule(PhaseRuleId::ZeroGradOtherOptimizer, ZeroGrad, Has("optim"), &["zero_grad"]),
    rule(PhaseRuleId::OptimizerStateInitGroup, OptimizerState, Has("torch/optim/"), &["_init_group"]),
    rule(
        PhaseRuleId::OptimizerStateLoaded,
        Load,
        Has("torch/optim/"),
        &["load_state_dict", "add_param_group", "__init__"],
    ),
    rule(PhaseRuleId::OptimizerStepTorch, OptimizerStep, Has("torch/optim/"), &[]),
    rule(
        PhaseRuleId::OptimizerStateBitsandbytes,
        OptimizerState,
        Has("bitsandbytes/optim/"),
        &["init_state", "get_state_buffer"],
    ),
    rule(PhaseRuleId::OptimizerStepBitsandbytes, OptimizerStep, Has("bitsandbytes/optim/"), &[]),
    rule(PhaseRuleId::OptimizerStepApex, OptimizerStep, Has("apex/optimizers/"), &[]),
    rule(PhaseRuleId::OptimizerStepApex, OptimizerStep, Has("apex/contrib/optimizers/"), &[]),
    rule(PhaseRuleId::OptimizerStepDeepspeed, OptimizerStep, Has("deepspeed/ops/adam/"), &[]),
    rule(PhaseRuleId::OptimizerStepDeepspeed, OptimizerStep, Has("deepspeed/ops/lamb/"), &[]),
    rule(
        PhaseRuleId::OptimizerStepDeepspeedZero,
        OptimizerStep,
        Has("deepspeed/runtime/zero/"),
        &["step", "unscale_and_clip_grads"],
    ),
    rule(
        PhaseRuleId::OptimizerStepDeepspeedBf16,
        OptimizerStep,
        Ends("deepspeed/runtime/bf16_optimizer.py"),
        &["step"],
    ),
    rule(PhaseRuleId::OptimizerStepTorchao, OptimizerStep, Has("torchao/optim/"), &[]),
    rule(PhaseRuleId::OptimizerStepTimm, OptimizerStep, Has("timm/optim/"), &[]),
    rule(PhaseRuleId::OptimizerStepTransformers, OptimizerStep, Ends("transformers/optimization.py"), &["step"]),
    rule(
        PhaseRuleId::OptimizerStepMegatron,
        OptimizerStep,
        Has("megatron/core/optimizer/"),
        &["step", "prepare_grads", "step_with_ready_grads"],
    ),
    rule(PhaseRuleId::OptimizerStepLion, OptimizerStep, Has("lion_pytorch/"), &[]),
    rule(PhaseRuleId::OptimizerStepSchedulefree, OptimizerStep, Has("schedulefree/"), &["step"]),
    rule(PhaseRuleId::GradientsClipGrad, GradientWork, Ends("torch/nn/utils/clip_grad.py"), &[]),
    rule(
        PhaseRuleId::GradientsGradScaler,
        GradientWork,
        Ends("amp/grad_scaler.py"),
        &["unscale_", "_unscale_grads_", "step", "_maybe_opt_step", "update"],
    ),
    // Data.
    rule(PhaseRuleId::DataTorch, Data, Has("torch/utils/data/"), &[]),
    rule(PhaseRuleId::DataTorchdata, Data, Has("torchdata/"), &[]),
    rule(PhaseRuleId::DataDali, Data, Has("nvidia/dali/"), &[]),
    rule(PhaseRuleId::DataAccelerate, Data, Ends("accelerate/data_loader.py"), &[]),
    rule(
        PhaseRuleId::DataAccelerate,
        Data,
        Ends("accelerate/utils/operations.py"),
        &["send_to_device", "_send_to_device"],
    ),
    // Building and filling models.
    rule(
        PhaseRuleId::LoadModuleMoved,
        Load,
        Ends("torch/nn/modules/module.py"),
        &["_apply", "<lambda>", "convert", "to", "cuda", "half", "bfloat16", "to_empty"],
    ),
    // A recurrent module that is moved joins its weights.
    rule(PhaseRuleId::LoadModuleMoved, Load, Ends("torch/nn/modules/rnn.py"), &["_apply"]),
    rule(
        PhaseRuleId::LoadStateDict,
        Load,
        Ends("torch/nn/modules/module.py"),
        &["load_state_dict", "_load_from_state_dict", "load"],
    ),
    rule(
        PhaseRuleId::LoadModuleBuilt,
        Load,
        Has("torch/nn/modules/"),
        &["__init__", "reset_parameters", "_reset_parameters", "_init_weights"],
    ),
    rule(PhaseRuleId::LoadNnInit, Load, Ends("torch/nn/init.py"), &[]),
    rule(PhaseRuleId::LoadTorchLoad, Load, Ends("torch/serialization.py"), &[]),
    rule(PhaseRuleId::LoadSafetensors, Load, Has("safetensors/"), &[]),
    rule(PhaseRuleId::LoadDistributedCheckpoint, Load, Has("torch/distributed/checkpoint/"), &[]),
    rule(PhaseRuleId::LoadDdpBuilt, Load, Ends("torch/nn/parallel/distributed.py"), &["__init__", "_ddp_init_helper"]),
    rule(
        PhaseRuleId::LoadTransformers,
        Load,
        Ends("transformers/modeling_utils.py"),
        &["from_pretrained", "_load_pretrained_model"],
    ),
    rule(PhaseRuleId::LoadAccelerate, Load, Ends("accelerate/utils/modeling.py"), &[]),
    // Computing.
    rule(PhaseRuleId::ComputeNnModules, Compute, Has("torch/nn/modules/"), &[]),
    rule(PhaseRuleId::ComputeNnFunctional, Compute, Ends("torch/nn/functional.py"), &[]),
    rule(
        PhaseRuleId::ComputeDdpBuckets,
        Compute,
        Ends("torch/nn/parallel/distributed.py"),
        &["_pre_forward", "_rebuild_buckets"],
    ),
    rule(PhaseRuleId::ComputeNnParallel, Compute, Has("torch/nn/parallel/"), &[]),
    rule(PhaseRuleId::ComputeNnAttention, Compute, Has("torch/nn/attention/"), &[]),
    rule(PhaseRuleId::ComputeCompiled, Compute, Has("torchinductor"), &[]),
    rule(PhaseRuleId::ComputeCompiled, Compute, Has("torch/_functorch/"), &[]),
    rule(PhaseRuleId::ComputeCompiled, Compute, Has("torch/_inductor/"), &[]),
    rule(PhaseRuleId::ComputeCompiled, Compute, Has("torch/_dynamo/"), &[]),
    rule(PhaseRuleId::ComputeAutogradFunction, Compute, Ends("torch/autograd/function.py"), &["apply"]),
    rule(PhaseRuleId::ComputeFlashAttn, Compute, Has("flash_attn/"), &[]),
];

/// The rule that matches this frame. `None` for native frames: the rules are about Python files.
pub fn frame_rule(frame: &Frame) -> Option<&'static FrameRule> {
    if frame.native || is_called_by_any_phase(frame) {
        return None;
    }
    FRAME_RULES.iter().find(|rule| {
        let path = match rule.path {
            Path::Ends(end) => ends_with(&frame.filename, end),
            Path::Has(folder) => frame.filename.contains(folder),
        };
        path && (rule.functions.is_empty() || rule.functions.contains(&&*frame.name))
    })
}

/// Whether only the caller shows the phase: recurrent modules join their weights when they are built or moved, and
/// programs call that in `forward` too.
fn is_called_by_any_phase(frame: &Frame) -> bool {
    ["flatten_parameters", "_init_flat_weights"].contains(&&*frame.name)
        && ends_with(&frame.filename, "torch/nn/modules/rnn.py")
}

/// The meaning of a range that PyTorch itself marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LabelRule {
    /// The id, shown with everything that the rule decides.
    pub id: PhaseRuleId,
    /// The program's work inside the range.
    pub meaning: Meaning,
    /// The start of the range's name.
    prefix: &'static str,
}

static LABEL_RULES: &[LabelRule] = &[
    LabelRule { id: PhaseRuleId::RangeOptimizerStep, meaning: OptimizerStep, prefix: "Optimizer.step#" },
    LabelRule { id: PhaseRuleId::RangeZeroGrad, meaning: ZeroGrad, prefix: "Optimizer.zero_grad#" },
    LabelRule { id: PhaseRuleId::RangeDataLoader, meaning: Data, prefix: "enumerate(DataLoader)#" },
    LabelRule { id: PhaseRuleId::RangeDataPipe, meaning: Data, prefix: "enumerate(DataPipe)#" },
];

/// The rule that matches this range. Only ranges that PyTorch marks with `record_function` match.
pub fn label_rule(label: &Label) -> Option<&'static LabelRule> {
    let ours = label.origin == LabelOrigin::RecordFunction;
    LABEL_RULES.iter().find(|rule| ours && label.text.starts_with(rule.prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(filename: &str, name: &str) -> Option<Meaning> {
        let frame = Frame { filename: filename.into(), name: name.into(), ..Frame::default() };
        frame_rule(&frame).map(|rule| rule.meaning)
    }

    #[test]
    fn frames_have_the_meaning_of_their_file_and_function() {
        let site = |file: &str| format!("/venv/lib/python3.12/site-packages/{file}");
        assert_eq!(meaning(&site("torch/optim/adam.py"), "step"), Some(OptimizerStep));
        assert_eq!(meaning(&site("torch/optim/adam.py"), "_init_group"), Some(OptimizerState));
        assert_eq!(meaning(&site("torch/optim/optimizer.py"), "zero_grad"), Some(ZeroGrad));
        assert_eq!(meaning(&site("torch/optim/lr_scheduler.py"), "step"), Some(NoPhase));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "_apply"), Some(Load));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "<lambda>"), Some(Load));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "_call_impl"), Some(Compute));
        assert_eq!(meaning(&site("torch/nn/modules/linear.py"), "forward"), Some(Compute));
        assert_eq!(meaning(&site("torch/nn/modules/linear.py"), "__init__"), Some(Load));
        assert_eq!(meaning(&site("torch/autograd/graph.py"), "_engine_run_backward"), Some(Engine));
        assert_eq!(meaning(&site("torch/nn/modules/rnn.py"), "flatten_parameters"), None);
        assert_eq!(meaning(&site("torch/nn/modules/rnn.py"), "_apply"), Some(Load));
        assert_eq!(meaning(&site("torch/nn/modules/rnn.py"), "forward"), Some(Compute));
        assert_eq!(meaning("train.py", "forward"), None);
        assert_eq!(meaning("my_torch/utils/checkpoint.py", "f"), None);
        let native = Frame {
            filename: "/src/torch/nn/modules/x.cpp".into(),
            name: "f".into(),
            native: true,
            ..Frame::default()
        };
        assert_eq!(frame_rule(&native), None);
    }
}
