//! What a Python frame shows about the phase in which it allocates.
//!
//! Frames are examined from the innermost outwards; the first one that a rule matches decides. Rules match files by the
//! end of their path, so that site-packages can be anywhere.

use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::file::{Frame, Label};

/// What a frame means.
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
    Aside,
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
    /// The name, shown with every verdict of the rule.
    pub name: &'static str,
    /// What the frame means.
    pub meaning: Meaning,
    path: Path,
    /// The functions that the rule is about; empty for all functions.
    functions: &'static [&'static str],
}

const fn rule(name: &'static str, meaning: Meaning, path: Path, functions: &'static [&'static str]) -> FrameRule {
    FrameRule { name, meaning, path, functions }
}

use Meaning::{Aside, Checkpoint, Compute, Data, Engine, GradientWork, Load, OptimizerState, OptimizerStep, ZeroGrad};
use Path::{Ends, Has};

/// The rules. The first one that matches a frame decides.
static FRAME_RULES: &[FrameRule] = &[
    // Autograd.
    rule("engine: torch.autograd", Engine, Ends("torch/autograd/graph.py"), &["_engine_run_backward"]),
    rule("engine: torch.autograd", Engine, Ends("torch/autograd/__init__.py"), &[]),
    rule("engine: Tensor.backward", Engine, Ends("torch/_tensor.py"), &["backward"]),
    rule("checkpoint: torch.utils.checkpoint", Checkpoint, Ends("torch/utils/checkpoint.py"), &[]),
    rule("checkpoint: deepspeed", Checkpoint, Has("deepspeed/runtime/activation_checkpointing/"), &[]),
    rule("checkpoint: fairscale", Checkpoint, Ends("fairscale/nn/checkpoint/checkpoint_activations.py"), &[]),
    rule("checkpoint: megatron", Checkpoint, Ends("megatron/core/tensor_parallel/random.py"), &["checkpoint"]),
    // Optimizers.
    rule("scheduler: torch.optim.lr_scheduler", Aside, Ends("torch/optim/lr_scheduler.py"), &[]),
    rule("averaging: torch.optim.swa_utils", Aside, Ends("torch/optim/swa_utils.py"), &[]),
    rule("zero_grad: Optimizer", ZeroGrad, Has("torch/optim/"), &["zero_grad"]),
    rule("zero_grad: Module", ZeroGrad, Ends("torch/nn/modules/module.py"), &["zero_grad"]),
    rule("zero_grad: other optimizers", ZeroGrad, Has("optim"), &["zero_grad"]),
    rule("optimizer state: _init_group", OptimizerState, Has("torch/optim/"), &["_init_group"]),
    rule("optimizer state: loaded", Load, Has("torch/optim/"), &["load_state_dict", "add_param_group", "__init__"]),
    rule("optimizer step: torch.optim", OptimizerStep, Has("torch/optim/"), &[]),
    rule(
        "optimizer state: bitsandbytes",
        OptimizerState,
        Has("bitsandbytes/optim/"),
        &["init_state", "get_state_buffer"],
    ),
    rule("optimizer step: bitsandbytes", OptimizerStep, Has("bitsandbytes/optim/"), &[]),
    rule("optimizer step: apex", OptimizerStep, Has("apex/optimizers/"), &[]),
    rule("optimizer step: apex", OptimizerStep, Has("apex/contrib/optimizers/"), &[]),
    rule("optimizer step: deepspeed", OptimizerStep, Has("deepspeed/ops/adam/"), &[]),
    rule("optimizer step: deepspeed", OptimizerStep, Has("deepspeed/ops/lamb/"), &[]),
    rule(
        "optimizer step: deepspeed ZeRO",
        OptimizerStep,
        Has("deepspeed/runtime/zero/"),
        &["step", "unscale_and_clip_grads"],
    ),
    rule("optimizer step: deepspeed bf16", OptimizerStep, Ends("deepspeed/runtime/bf16_optimizer.py"), &["step"]),
    rule("optimizer step: torchao", OptimizerStep, Has("torchao/optim/"), &[]),
    rule("optimizer step: timm", OptimizerStep, Has("timm/optim/"), &[]),
    rule("optimizer step: transformers", OptimizerStep, Ends("transformers/optimization.py"), &["step"]),
    rule(
        "optimizer step: megatron",
        OptimizerStep,
        Has("megatron/core/optimizer/"),
        &["step", "prepare_grads", "step_with_ready_grads"],
    ),
    rule("optimizer step: lion", OptimizerStep, Has("lion_pytorch/"), &[]),
    rule("optimizer step: schedulefree", OptimizerStep, Has("schedulefree/"), &["step"]),
    rule("gradients: clip_grad", GradientWork, Ends("torch/nn/utils/clip_grad.py"), &[]),
    rule(
        "gradients: GradScaler",
        GradientWork,
        Ends("amp/grad_scaler.py"),
        &["unscale_", "_unscale_grads_", "step", "_maybe_opt_step", "update"],
    ),
    // Data.
    rule("data: torch.utils.data", Data, Has("torch/utils/data/"), &[]),
    rule("data: torchdata", Data, Has("torchdata/"), &[]),
    rule("data: DALI", Data, Has("nvidia/dali/"), &[]),
    rule("data: accelerate", Data, Ends("accelerate/data_loader.py"), &[]),
    rule("data: accelerate", Data, Ends("accelerate/utils/operations.py"), &["send_to_device", "_send_to_device"]),
    // Building and filling models.
    rule(
        "load: Module moved",
        Load,
        Ends("torch/nn/modules/module.py"),
        &["_apply", "<lambda>", "convert", "to", "cuda", "half", "bfloat16", "to_empty"],
    ),
    rule(
        "load: state_dict",
        Load,
        Ends("torch/nn/modules/module.py"),
        &["load_state_dict", "_load_from_state_dict", "load"],
    ),
    rule("load: Module built", Load, Has("torch/nn/modules/"), &["__init__", "reset_parameters", "_reset_parameters"]),
    rule("load: torch.nn.init", Load, Ends("torch/nn/init.py"), &[]),
    rule("load: torch.load", Load, Ends("torch/serialization.py"), &[]),
    rule("load: safetensors", Load, Has("safetensors/"), &[]),
    rule("load: checkpoint", Load, Has("torch/distributed/checkpoint/"), &[]),
    rule(
        "load: DistributedDataParallel built",
        Load,
        Ends("torch/nn/parallel/distributed.py"),
        &["__init__", "_ddp_init_helper"],
    ),
    rule(
        "load: transformers",
        Load,
        Ends("transformers/modeling_utils.py"),
        &["from_pretrained", "_load_pretrained_model"],
    ),
    rule("load: accelerate", Load, Ends("accelerate/utils/modeling.py"), &[]),
    // Computing.
    rule("compute: torch.nn.modules", Compute, Has("torch/nn/modules/"), &[]),
    rule("compute: torch.nn.functional", Compute, Ends("torch/nn/functional.py"), &[]),
    rule(
        "compute: DistributedDataParallel's buckets",
        Compute,
        Ends("torch/nn/parallel/distributed.py"),
        &["_pre_forward", "_rebuild_buckets"],
    ),
    rule("compute: torch.nn.parallel", Compute, Has("torch/nn/parallel/"), &[]),
    rule("compute: torch.nn.attention", Compute, Has("torch/nn/attention/"), &[]),
    rule("compute: compiled", Compute, Has("torchinductor"), &[]),
    rule("compute: compiled", Compute, Has("torch/_functorch/"), &[]),
    rule("compute: compiled", Compute, Has("torch/_inductor/"), &[]),
    rule("compute: compiled", Compute, Has("torch/_dynamo/"), &[]),
    rule("compute: autograd.Function", Compute, Ends("torch/autograd/function.py"), &["apply"]),
    rule("compute: flash_attn", Compute, Has("flash_attn/"), &[]),
];

/// The rule that matches this frame. `None` for native frames: the rules are about Python files.
pub fn frame_rule(frame: &Frame) -> Option<&'static FrameRule> {
    if frame.native {
        return None;
    }
    FRAME_RULES.iter().find(|rule| {
        let path = match rule.path {
            Path::Ends(end) => ends_with_path(&frame.filename, end),
            Path::Has(folder) => frame.filename.contains(folder),
        };
        path && (rule.functions.is_empty() || rule.functions.contains(&&*frame.name))
    })
}

/// The meaning of a range that PyTorch itself marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LabelRule {
    /// The name, shown with every verdict of the rule.
    pub name: &'static str,
    /// What the program does inside the range.
    pub meaning: Meaning,
    /// The start of the range's name.
    prefix: &'static str,
}

static LABEL_RULES: &[LabelRule] = &[
    LabelRule { name: "optimizer: inside Optimizer.step", meaning: OptimizerStep, prefix: "Optimizer.step#" },
    LabelRule { name: "optimizer: inside Optimizer.zero_grad", meaning: ZeroGrad, prefix: "Optimizer.zero_grad#" },
    LabelRule { name: "data: inside DataLoader", meaning: Data, prefix: "enumerate(DataLoader)#" },
    LabelRule { name: "data: inside DataPipe", meaning: Data, prefix: "enumerate(DataPipe)#" },
];

/// The rule that matches this range. Only ranges that PyTorch marks with `record_function` match.
pub fn label_rule(label: &Label) -> Option<&'static LabelRule> {
    let ours = label.origin == LabelOrigin::RecordFunction;
    LABEL_RULES.iter().find(|rule| ours && label.text.starts_with(rule.prefix))
}

/// Whether a path ends with these components, and not merely with these characters.
fn ends_with_path(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(filename: &str, name: &str) -> Option<Meaning> {
        let frame = Frame { filename: filename.into(), name: name.into(), ..Frame::default() };
        frame_rule(&frame).map(|rule| rule.meaning)
    }

    #[test]
    fn frames_mean_what_they_say() {
        let site = |file: &str| format!("/venv/lib/python3.12/site-packages/{file}");
        assert_eq!(meaning(&site("torch/optim/adam.py"), "step"), Some(OptimizerStep));
        assert_eq!(meaning(&site("torch/optim/adam.py"), "_init_group"), Some(OptimizerState));
        assert_eq!(meaning(&site("torch/optim/optimizer.py"), "zero_grad"), Some(ZeroGrad));
        assert_eq!(meaning(&site("torch/optim/lr_scheduler.py"), "step"), Some(Aside));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "_apply"), Some(Load));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "<lambda>"), Some(Load));
        assert_eq!(meaning(&site("torch/nn/modules/module.py"), "_call_impl"), Some(Compute));
        assert_eq!(meaning(&site("torch/nn/modules/linear.py"), "forward"), Some(Compute));
        assert_eq!(meaning(&site("torch/nn/modules/linear.py"), "__init__"), Some(Load));
        assert_eq!(meaning(&site("torch/autograd/graph.py"), "_engine_run_backward"), Some(Engine));
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
