//! Frames of engines that serve models, and the stage of a server that they prove.
//!
//! An engine loads weights, profiles a forward pass with the largest batch, gives what is left to the cache of keys and
//! values, captures CUDA graphs, and then serves requests. The functions are those of vLLM 0.33 and SGLang 0.5.23.
//! Those of vLLM's first engine (`vllm/worker`) were not tried.

use memtrace_trace::file::Frame;
use serde::{Deserialize, Serialize};

use super::paths::{ends_with, is_in};

/// An engine that serves models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServingEngine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

impl ServingEngine {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ServingEngine::Vllm => "vLLM",
            ServingEngine::Sglang => "SGLang",
        }
    }

    /// The beginning of the paths of its attributes in a recording.
    pub fn attributes(self) -> &'static str {
        match self {
            ServingEngine::Vllm => "vllm.",
            ServingEngine::Sglang => "sglang.",
        }
    }
}

/// A stage of a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServingStage {
    /// Connecting ranks, and making the buffers of inputs and of the sampler.
    Start,
    /// Building the model and loading its weights.
    Load,
    /// A forward pass with the largest batch, whose peak the engine keeps free.
    Profile,
    /// Allocating the cache of keys and values.
    KvCache,
    /// Capturing CUDA graphs.
    Capture,
    /// Warming up kernels and the sampler.
    WarmUp,
    /// Serving requests; prefill and decode are not distinguished.
    Serve,
    /// Computing the keys and values of prompts.
    Prefill,
    /// Computing one token of each request.
    Decode,
    /// Releasing memory while the server sleeps.
    Sleep,
    /// Taking it again.
    WakeUp,
}

impl ServingStage {
    /// All stages in their usual order.
    pub const ALL: [ServingStage; 11] = [
        ServingStage::Start,
        ServingStage::Load,
        ServingStage::Profile,
        ServingStage::KvCache,
        ServingStage::Capture,
        ServingStage::WarmUp,
        ServingStage::Serve,
        ServingStage::Prefill,
        ServingStage::Decode,
        ServingStage::Sleep,
        ServingStage::WakeUp,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ServingStage::Start => "start",
            ServingStage::Load => "load",
            ServingStage::Profile => "profile",
            ServingStage::KvCache => "KV cache",
            ServingStage::Capture => "capture",
            ServingStage::WarmUp => "warm-up",
            ServingStage::Serve => "serve",
            ServingStage::Prefill => "prefill",
            ServingStage::Decode => "decode",
            ServingStage::Sleep => "sleep",
            ServingStage::WakeUp => "wake up",
        }
    }

    /// A clause for the work of the engine in this stage.
    pub fn clause(self) -> &'static str {
        match self {
            ServingStage::Start => "while it started",
            ServingStage::Load => "while it loaded the model",
            ServingStage::Profile => "in its profiling run",
            ServingStage::KvCache => "while it allocated the KV cache",
            ServingStage::Capture => "while it captured CUDA graphs",
            ServingStage::WarmUp => "while it warmed up",
            ServingStage::Serve => "while it served",
            ServingStage::Prefill => "in prefill",
            ServingStage::Decode => "in decode",
            ServingStage::Sleep => "while it went to sleep",
            ServingStage::WakeUp => "while it woke up",
        }
    }

    /// Whether the server answers requests in this stage.
    pub fn serves(self) -> bool {
        matches!(self, ServingStage::Serve | ServingStage::Prefill | ServingStage::Decode)
    }

    /// Whether a frame of this stage inside a function of `outer` divides that stage.
    fn divides(self, outer: ServingStage) -> bool {
        match self {
            ServingStage::Load => outer == ServingStage::Start,
            ServingStage::Capture => outer == ServingStage::WarmUp,
            ServingStage::Prefill | ServingStage::Decode => outer == ServingStage::Serve,
            _ => false,
        }
    }

    /// The stage of a frame that `rule` matches, called in a function of `outer`.
    pub(crate) fn within(self, outer: Option<ServingStage>) -> ServingStage {
        outer.filter(|outer| !self.divides(*outer)).unwrap_or(self)
    }
}

/// An activity of a job that serves a model and trains one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// The engine computes answers.
    Rollout,
    /// Computing gradients and changing the weights.
    Train,
    /// Loading the changed weights into the engine.
    Sync,
}

impl Activity {
    /// All activities in their usual order.
    pub const ALL: [Activity; 3] = [Activity::Rollout, Activity::Train, Activity::Sync];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Activity::Rollout => "rollout",
            Activity::Train => "train",
            Activity::Sync => "sync",
        }
    }
}

/// A part of the memory of a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServingPart {
    /// The cache of keys and values.
    KvCache,
    /// The weights, and what was made of them while the model was loaded.
    Weights,
    /// Slots for adapters (LoRA).
    Adapters,
    /// Memory of CUDA graphs.
    CudaGraphs,
    /// Logits, and buffers of the sampler.
    Sampler,
    /// Buffers of collectives, such as the custom all-reduce.
    Communication,
    /// Activations of requests.
    Activations,
    /// Other buffers and workspaces that stay.
    Buffers,
}

impl ServingPart {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ServingPart::KvCache => "KV cache",
            ServingPart::Weights => "weights",
            ServingPart::Adapters => "adapters (LoRA)",
            ServingPart::CudaGraphs => "CUDA graphs",
            ServingPart::Sampler => "sampler and logits",
            ServingPart::Communication => "communication buffers",
            ServingPart::Activations => "activations",
            ServingPart::Buffers => "buffers and workspaces",
        }
    }
}

/// Folders of engines whose code allocates one part, whatever the stage.
static PART_FOLDERS: &[(&str, ServingPart)] = &[
    ("vllm/lora/", ServingPart::Adapters),
    ("vllm/model_executor/model_loader/", ServingPart::Weights),
    ("vllm/v1/sample/", ServingPart::Sampler),
    ("vllm/v1/worker/gpu/sample/", ServingPart::Sampler),
    ("vllm/distributed/device_communicators/", ServingPart::Communication),
    ("sglang/srt/lora/", ServingPart::Adapters),
    ("sglang/srt/model_loader/", ServingPart::Weights),
    ("sglang/srt/layers/sampler", ServingPart::Sampler),
    ("sglang/srt/sampling/", ServingPart::Sampler),
    ("sglang/srt/distributed/device_communicators/", ServingPart::Communication),
];

/// The part that a frame proves. The outermost such frame of a stack decides.
pub fn serving_part(frame: &Frame) -> Option<ServingPart> {
    PART_FOLDERS.iter().find(|(folder, _)| !frame.native && is_in(&frame.filename, folder)).map(|(_, part)| *part)
}

/// One rule: functions of a file, and the stage in which the engine calls them.
struct StageRule {
    engine: ServingEngine,
    /// The end of the file's path, or a folder in it.
    file: &'static str,
    /// The functions; empty for all.
    functions: &'static [&'static str],
    stage: ServingStage,
}

const fn rule(
    engine: ServingEngine,
    file: &'static str,
    functions: &'static [&'static str],
    stage: ServingStage,
) -> StageRule {
    StageRule { engine, file, functions, stage }
}

use ServingEngine::{Sglang, Vllm};

const VLLM_WORKER: &str = "vllm/v1/worker/gpu_worker.py";
const SGLANG_RUNNER: &str = "sglang/srt/model_executor/model_runner.py";
const SGLANG_EAGER: &str = "sglang/srt/model_executor/runner/eager_runner.py";

static STAGE_RULES: &[StageRule] = &[
    rule(Vllm, VLLM_WORKER, &["init_device", "load_model"], ServingStage::Start),
    rule(
        Vllm,
        VLLM_WORKER,
        &["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"],
        ServingStage::Load,
    ),
    rule(Vllm, "vllm/model_executor/models/", &["load_weights"], ServingStage::Load),
    rule(Vllm, "vllm/distributed/weight_transfer/", &[], ServingStage::Load),
    rule(Vllm, "vllm/model_executor/model_loader/", &[], ServingStage::Load),
    rule(Vllm, VLLM_WORKER, &["determine_available_memory"], ServingStage::Profile),
    rule(Vllm, VLLM_WORKER, &["initialize_from_config", "initialize_cache"], ServingStage::KvCache),
    rule(Vllm, VLLM_WORKER, &["compile_or_warm_up_model"], ServingStage::WarmUp),
    rule(Vllm, VLLM_WORKER, &["execute_model", "sample_tokens", "execute_dummy_batch"], ServingStage::Serve),
    rule(Vllm, VLLM_WORKER, &["sleep"], ServingStage::Sleep),
    rule(Vllm, VLLM_WORKER, &["wake_up"], ServingStage::WakeUp),
    rule(Vllm, "vllm/v1/worker/gpu_model_runner.py", &["capture_model"], ServingStage::Capture),
    rule(Vllm, "vllm/v1/worker/gpu/model_runner.py", &["capture_model"], ServingStage::Capture),
    rule(Vllm, "vllm/worker/worker.py", &["init_device", "load_model"], ServingStage::Start),
    rule(Vllm, "vllm/worker/worker.py", &["determine_num_available_blocks"], ServingStage::Profile),
    rule(Vllm, "vllm/worker/worker.py", &["_init_cache_engine"], ServingStage::KvCache),
    rule(Vllm, "vllm/worker/worker.py", &["_warm_up_model"], ServingStage::Capture),
    rule(Vllm, "vllm/worker/worker_base.py", &["execute_model"], ServingStage::Serve),
    rule(Sglang, SGLANG_RUNNER, &["init_torch_distributed", "load_model"], ServingStage::Start),
    rule(Sglang, "sglang/srt/model_loader/", &[], ServingStage::Load),
    rule(
        Sglang,
        SGLANG_RUNNER,
        &["update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"],
        ServingStage::Load,
    ),
    rule(Sglang, "sglang/srt/model_executor/model_runner_components/weight_updater.py", &[], ServingStage::Load),
    rule(Sglang, "sglang/srt/managers/scheduler_components/weight_updater.py", &[], ServingStage::Load),
    rule(Sglang, "sglang/srt/weight_sync/", &[], ServingStage::Load),
    rule(Sglang, SGLANG_RUNNER, &["profile_max_num_token"], ServingStage::Profile),
    rule(Sglang, SGLANG_RUNNER, &["alloc_memory_pool", "init_memory_pool"], ServingStage::KvCache),
    rule(
        Sglang,
        SGLANG_RUNNER,
        &["init_cuda_graphs", "init_device_graphs", "init_decode_cuda_graph", "init_prefill_cuda_graph"],
        ServingStage::Capture,
    ),
    rule(
        Sglang,
        SGLANG_RUNNER,
        &["init_attention_backend", "init_attention_backends", "prewarm_sampling", "kernel_warmup"],
        ServingStage::WarmUp,
    ),
    rule(Sglang, SGLANG_RUNNER, &["forward", "sample"], ServingStage::Serve),
    rule(Sglang, SGLANG_RUNNER, &["forward_decode"], ServingStage::Decode),
    rule(Sglang, SGLANG_RUNNER, &["forward_extend", "forward_split_prefill"], ServingStage::Prefill),
    rule(Sglang, SGLANG_EAGER, &["forward_decode", "_forward_decode"], ServingStage::Decode),
    rule(Sglang, SGLANG_EAGER, &["forward_extend", "_forward_extend"], ServingStage::Prefill),
];

/// The engine and the stage of this frame, on its own; `None` for any other frame.
pub fn serving_stage(frame: &Frame) -> Option<(ServingEngine, ServingStage)> {
    if frame.native {
        return None;
    }
    let matches = |rule: &&StageRule| {
        let in_file = if rule.file.ends_with('/') { is_in } else { ends_with };
        let is_function = rule.functions.is_empty() || rule.functions.contains(&&*frame.name);
        is_function && in_file(&frame.filename, rule.file)
    };
    let rule = STAGE_RULES.iter().find(matches);
    rule.map(|rule| (rule.engine, rule.stage))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(filename: &str, name: &str) -> Option<ServingStage> {
        let frame = Frame { name: name.into(), filename: filename.into(), ..Frame::default() };
        serving_stage(&frame).map(|(_, stage)| stage)
    }

    #[test]
    fn a_stage_is_a_function_of_an_engines_file() {
        let worker = "/x/site-packages/vllm/v1/worker/gpu_worker.py";
        assert_eq!(stage(worker, "determine_available_memory"), Some(ServingStage::Profile));
        assert_eq!(stage(worker, "check_health"), None);
        assert_eq!(stage("/home/me/myvllm/v1/worker/gpu_worker.py", "execute_model"), None);
        assert_eq!(stage("sglang/srt/model_executor/model_runner.py", "forward"), Some(ServingStage::Serve));
        assert_eq!(stage("/x/vllm/model_executor/models/llama.py", "load_weights"), Some(ServingStage::Load));
        assert_eq!(stage("/x/vllm/model_executor/models/llama.py", "forward"), None);
    }

    #[test]
    fn a_part_is_a_folder_of_an_engine() {
        let part = |filename: &str| serving_part(&Frame { filename: filename.into(), ..Frame::default() });
        assert_eq!(part("/x/vllm/v1/worker/gpu/sample/sampler.py"), Some(ServingPart::Sampler));
        assert_eq!(part("vllm/lora/model_manager.py"), Some(ServingPart::Adapters));
        assert_eq!(part("/home/me/myvllm/lora/model_manager.py"), None);
    }

    #[test]
    fn the_outer_function_decides_but_for_captures_and_kinds_of_requests() {
        use ServingStage::{Capture, Decode, Profile, Serve, WarmUp};
        assert_eq!(Capture.within(Some(Profile)), Profile, "an engine captures graphs to learn what they take");
        assert_eq!(Capture.within(Some(WarmUp)), Capture);
        assert_eq!(Serve.within(Some(WarmUp)), WarmUp);
        assert_eq!(ServingStage::Load.within(Some(ServingStage::Start)), ServingStage::Load);
        assert_eq!((Decode.within(Some(Serve)), Serve.within(None)), (Decode, Serve));
    }
}
