//! Frames that prove the category of the blocks they allocate, whatever the blocks' lifetimes.
//!
//! The innermost frame that a rule matches decides. Rules match files by the end of their path or by a folder in it.

use memtrace_trace::file::Frame;

use super::ids::CategoryRuleId;
use super::libraries::stands_in_for_kernel;
use super::paths::ends_with;

/// The memory that a frame allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameMemory {
    /// A bucket of gradients, or a buffer of collectives. It is a gradient if a backward pass, or the code right after
    /// it, allocates it and the optimizer's step finds it.
    Bucket,
    /// A temporary replacement for a module's parameter, under the same name: gathered from shards, or a copy for
    /// another device.
    Gathered,
    /// Keys and values. In a forward pass of a training they belong to its graph, and are activations.
    KvCache,
    /// A library's scratch memory.
    Workspace,
    /// A parameter or buffer.
    Parameter,
    /// The contents of a checkpoint file: the model's parameters, or a copy beside them.
    Checkpoint,
}

/// One rule.
#[derive(PartialEq, Eq, Debug)]
pub struct CategoryRule {
    /// The id, shown with everything that the rule decides.
    pub id: CategoryRuleId,
    /// The kind of memory that the frame allocates.
    pub allocates: FrameMemory,
    file: File,
    /// The functions that the rule is about; empty for all functions.
    functions: &'static [&'static str],
}

/// The frames that a rule is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum File {
    /// Python frames of a file whose path ends with this.
    Ends(&'static str),
    /// Python frames of a file whose path contains this folder.
    Has(&'static str),
    /// Python frames with a class or function in the qualified name that begins with this, ignoring ASCII case.
    Named(&'static str),
    /// Native functions whose qualified name begins with this.
    Native(&'static str),
}

use File::{Ends, Has, Named, Native};
use FrameMemory::{Bucket, Checkpoint, Gathered, KvCache, Parameter, Workspace};

const fn rule(
    id: CategoryRuleId,
    allocates: FrameMemory,
    file: File,
    functions: &'static [&'static str],
) -> CategoryRule {
    CategoryRule { id, allocates, file, functions }
}

static CATEGORY_RULES: &[CategoryRule] = &[
    rule(
        CategoryRuleId::BucketDdp,
        Bucket,
        Ends("torch/nn/parallel/distributed.py"),
        &["_ddp_init_helper", "_pre_forward"],
    ),
    rule(CategoryRuleId::BucketFsdp, Bucket, Ends("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"), &[]),
    rule(CategoryRuleId::BucketFsdp, Bucket, Ends("torch/distributed/_composable/fsdp/_fsdp_collectives.py"), &[]),
    rule(
        CategoryRuleId::BucketFsdp,
        Gathered,
        Ends("torch/distributed/fsdp/_fully_shard/_fsdp_param.py"),
        &["alloc_storage", "init_all_gather_outputs", "init_unsharded_param"],
    ),
    rule(
        CategoryRuleId::BucketFsdp,
        Gathered,
        Ends("torch/distributed/_composable/fsdp/_fsdp_param.py"),
        &["alloc_storage", "init_all_gather_outputs", "init_unsharded_param"],
    ),
    rule(
        CategoryRuleId::BucketFsdp,
        Gathered,
        Ends("torch/distributed/fsdp/_flat_param.py"),
        &["_alloc_padded_unsharded_flat_param", "_all_gather_flat_param"],
    ),
    rule(
        CategoryRuleId::BucketFsdp,
        Bucket,
        Ends("torch/distributed/fsdp/_runtime_utils.py"),
        &["_get_reduce_scatter_tensors", "_reduce_grad"],
    ),
    rule(CategoryRuleId::BucketDataParallel, Gathered, Ends("torch/nn/parallel/replicate.py"), &[]),
    rule(
        CategoryRuleId::BucketZeroRedundancyOptimizer,
        Bucket,
        Ends("torch/distributed/optim/zero_redundancy_optimizer.py"),
        &["_build_param_buckets", "_build_ddp_param_buckets"],
    ),
    rule(CategoryRuleId::BucketMegatron, Bucket, Ends("megatron/core/distributed/param_and_grad_buffer.py"), &[]),
    rule(CategoryRuleId::KvCacheTransformers, KvCache, Ends("transformers/cache_utils.py"), &[]),
    rule(
        CategoryRuleId::KvCacheVllm,
        KvCache,
        Has("vllm/"),
        &["_allocate_kv_cache", "_allocate_kv_cache_tensors", "initialize_kv_cache"],
    ),
    rule(CategoryRuleId::KvCacheClassName, KvCache, Named("kvcache"), &[]),
    rule(CategoryRuleId::KvCacheClassName, KvCache, Named("kv_cache"), &[]),
    rule(CategoryRuleId::KvCacheClassName, KvCache, Named("staticcache"), &[]),
    rule(CategoryRuleId::KvCacheClassName, KvCache, Named("dynamiccache"), &[]),
    rule(CategoryRuleId::ParameterServingLoader, Parameter, Has("vllm/model_executor/model_loader/"), &[]),
    rule(CategoryRuleId::ParameterServingLoader, Parameter, Has("sglang/srt/model_loader/"), &[]),
    rule(CategoryRuleId::CheckpointTorchLoad, Checkpoint, Ends("torch/serialization.py"), &[]),
    rule(CategoryRuleId::CheckpointSafetensors, Checkpoint, Has("safetensors/"), &[]),
    rule(
        CategoryRuleId::ParameterFsdpShard,
        Parameter,
        Ends("torch/distributed/fsdp/_fully_shard/_fsdp_param.py"),
        &["_init_sharded_param"],
    ),
    rule(
        CategoryRuleId::ParameterFsdpShard,
        Parameter,
        Ends("torch/distributed/_composable/fsdp/_fsdp_param.py"),
        &["_init_sharded_param"],
    ),
    rule(CategoryRuleId::ParameterFsdpShard, Parameter, Ends("torch/distributed/fsdp/_flat_param.py"), &["_get_shard"]),
    rule(CategoryRuleId::ParameterDeepcopy, Parameter, Ends("torch/nn/parameter.py"), &["__deepcopy__"]),
    rule(CategoryRuleId::WorkspaceCublas, Workspace, Native("at::cuda::getCurrentCUDABlasHandle"), &[]),
    rule(CategoryRuleId::WorkspaceCublas, Workspace, Native("at::cuda::getCUDABlasLtWorkspace"), &[]),
    rule(CategoryRuleId::WorkspaceCudnn, Workspace, Native("at::native::Workspace"), &[]),
];

/// The rule that matches this frame; `None` without one.
pub fn category_rule(frame: &Frame) -> Option<&'static CategoryRule> {
    CATEGORY_RULES.iter().find(|rule| {
        let matches = match rule.file {
            Native(start) => frame.native && frame.qualname.starts_with(start),
            _ if frame.native => false,
            Ends(end) => ends_with(&frame.filename, end),
            Has(folder) => frame.filename.contains(folder),
            Named(start) => frame
                .qualname
                .split('.')
                .any(|part| part.get(..start.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(start))),
        };
        matches && (rule.functions.is_empty() || rule.functions.contains(&&*frame.name))
    })
}

/// Whether the frame is the end of an autocast region, which frees the casts that autocast had kept.
pub fn ends_autocast(frame: &Frame) -> bool {
    !frame.native && &*frame.name == "__exit__" && frame.filename.ends_with("torch/amp/autocast_mode.py")
}

/// Whether the frame is code of PyTorch that captures CUDA graphs. The code that it calls allocates in the graph's
/// pool.
pub fn captures_graph(frame: &Frame) -> bool {
    !frame.native
        && ["torch/cuda/graphs.py", "torch/_inductor/cudagraph_trees.py"]
            .iter()
            .any(|file| frame.filename.ends_with(file))
}

/// Whether PyTorch made a pool for a CUDA graph, by its `MempoolId_t`. The ids of `torch.cuda.MemPool` and of
/// `torch.cuda.graph_pool_handle` have the first number 0 (c10/cuda/CUDACachingAllocator.cpp, `MemPool::MemPool`), and
/// show nothing.
pub fn is_graphs_own_pool(id: (u64, u64)) -> bool {
    id.0 != 0
}

/// Whether the frame is code of PyTorch itself.
pub fn is_pytorch(frame: &Frame) -> bool {
    frame.filename.contains("/torch/") || stands_in_for_kernel(frame)
}

/// Whether the frame is attention code, by the usual names: of its class, its function or its file. Blocks that a model
/// keeps there from call to call are keys and values.
pub fn is_attention(frame: &Frame) -> bool {
    let file = frame.filename.rsplit('/').next().unwrap_or_default();
    !frame.native
        && [&*frame.qualname, &*frame.name, file].into_iter().any(|text| {
            let text = text.to_ascii_lowercase();
            text.contains("attention") || text.contains("attn")
        })
}

/// Whether the frame is a module or function of PyTorch itself. Such code allocates results, not caches.
pub fn is_library_module(frame: &Frame) -> bool {
    !frame.native && frame.filename.contains("torch/nn/")
}

/// Whether a buffer with this name, as `named_buffers()` gives it, is a key/value cache, by the usual names for caches.
pub fn is_cache_name(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    const NAMES: [&str; 10] = [
        "k_cache",
        "v_cache",
        "kv_cache",
        "cache_k",
        "cache_v",
        "cache_kv",
        "key_cache",
        "value_cache",
        "past_key",
        "past_value",
    ];
    NAMES.iter().any(|name| last.eq_ignore_ascii_case(name))
}

/// The name that the values of a cache have if this is the name of its keys, and the reverse: `attn.k` and `attn.v`.
/// `None` for other names.
pub fn cache_counterpart(name: &str) -> Option<String> {
    const PAIRS: [(&str, &str); 3] = [("k", "v"), ("key", "value"), ("keys", "values")];
    let (path, last) = name.rsplit_once('.').unwrap_or(("", name));
    let other = |part: &str| {
        let pair = PAIRS.iter().find(|(key, value)| part == *key || part == *value)?;
        Some(if part == pair.0 { pair.1 } else { pair.0 })
    };
    let mut parts: Vec<&str> = last.split('_').collect();
    let (at, renamed) = parts.iter().enumerate().find_map(|(at, part)| Some((at, other(part)?)))?;
    parts[at] = renamed;
    let last = parts.join("_");
    Some(if path.is_empty() { last } else { format!("{path}.{last}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule_of(filename: &str, qualname: &str) -> Option<CategoryRuleId> {
        let name = qualname.rsplit('.').next().unwrap_or(qualname);
        let frame =
            Frame { filename: filename.into(), name: name.into(), qualname: qualname.into(), ..Frame::default() };
        category_rule(&frame).map(|rule| rule.id)
    }

    #[test]
    fn frames_are_recognized_by_file_class_and_function() {
        let site = |file: &str| format!("/venv/lib/python3.12/site-packages/{file}");
        let ddp = site("torch/nn/parallel/distributed.py");
        assert_eq!(rule_of(&ddp, "DistributedDataParallel._ddp_init_helper"), Some(CategoryRuleId::BucketDdp));
        assert_eq!(rule_of(&ddp, "DistributedDataParallel.forward"), None);
        assert_eq!(
            rule_of(&site("torch/serialization.py"), "_load.<locals>.load_tensor"),
            Some(CategoryRuleId::CheckpointTorchLoad)
        );
        assert_eq!(rule_of("model.py", "KVCache.__init__"), Some(CategoryRuleId::KvCacheClassName));
        assert_eq!(rule_of("model.py", "Attention.__init__"), None);
        assert_eq!(rule_of("model.py", "make_kvcaches"), None);
        assert_eq!(cache_counterpart("l.0.a.k").as_deref(), Some("l.0.a.v"));
        assert_eq!(cache_counterpart("past_values").as_deref(), Some("past_keys"));
        assert_eq!(cache_counterpart("running_mean"), None);
        assert!(is_cache_name("layers.0.attention.kv_cache") && !is_cache_name("cached_norm.weight"));
    }
}
