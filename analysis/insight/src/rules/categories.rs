//! Frames that prove the category of the blocks they allocate, whatever the blocks' lifetimes.
//!
//! The innermost frame that a rule matches decides. Rules match files by the end of their path or by a folder in it.

use memtrace_trace::file::Frame;

/// What a frame allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Makes {
    /// A bucket of gradients, or a buffer of collectives. It is a gradient if a backward pass allocates it and it
    /// outlives that pass.
    Bucket,
    /// A temporary replacement for a module's parameter, under the same name: gathered from shards, or a copy for
    /// another device.
    Gathered,
    /// Keys and values.
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
    /// The name, shown with every verdict of the rule.
    pub name: &'static str,
    /// What the frame allocates.
    pub makes: Makes,
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
use Makes::{Bucket, Checkpoint, Gathered, KvCache, Parameter, Workspace};

const fn rule(name: &'static str, makes: Makes, file: File, functions: &'static [&'static str]) -> CategoryRule {
    CategoryRule { name, makes, file, functions }
}

static CATEGORY_RULES: &[CategoryRule] = &[
    rule(
        "bucket: DistributedDataParallel",
        Bucket,
        Ends("torch/nn/parallel/distributed.py"),
        &["_ddp_init_helper", "_pre_forward"],
    ),
    rule("bucket: FSDP", Bucket, Ends("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"), &[]),
    rule("bucket: FSDP", Bucket, Ends("torch/distributed/_composable/fsdp/_fsdp_collectives.py"), &[]),
    rule(
        "bucket: FSDP",
        Gathered,
        Ends("torch/distributed/fsdp/_fully_shard/_fsdp_param.py"),
        &["alloc_storage", "init_all_gather_outputs", "init_unsharded_param"],
    ),
    rule(
        "bucket: FSDP",
        Gathered,
        Ends("torch/distributed/_composable/fsdp/_fsdp_param.py"),
        &["alloc_storage", "init_all_gather_outputs", "init_unsharded_param"],
    ),
    rule(
        "bucket: FSDP",
        Gathered,
        Ends("torch/distributed/fsdp/_flat_param.py"),
        &["_alloc_padded_unsharded_flat_param", "_all_gather_flat_param"],
    ),
    rule(
        "bucket: FSDP",
        Bucket,
        Ends("torch/distributed/fsdp/_runtime_utils.py"),
        &["_get_reduce_scatter_tensors", "_reduce_grad"],
    ),
    rule("bucket: DataParallel", Gathered, Ends("torch/nn/parallel/replicate.py"), &[]),
    rule(
        "bucket: ZeroRedundancyOptimizer",
        Bucket,
        Ends("torch/distributed/optim/zero_redundancy_optimizer.py"),
        &["_build_param_buckets", "_build_ddp_param_buckets"],
    ),
    rule("bucket: megatron", Bucket, Ends("megatron/core/distributed/param_and_grad_buffer.py"), &[]),
    rule("kv cache: transformers", KvCache, Ends("transformers/cache_utils.py"), &[]),
    rule(
        "kv cache: vLLM",
        KvCache,
        Has("vllm/"),
        &["_allocate_kv_cache", "_allocate_kv_cache_tensors", "initialize_kv_cache"],
    ),
    rule("kv cache: a class named so", KvCache, Named("kvcache"), &[]),
    rule("kv cache: a class named so", KvCache, Named("kv_cache"), &[]),
    rule("kv cache: a class named so", KvCache, Named("staticcache"), &[]),
    rule("kv cache: a class named so", KvCache, Named("dynamiccache"), &[]),
    rule("checkpoint: torch.load", Checkpoint, Ends("torch/serialization.py"), &[]),
    rule("checkpoint: safetensors", Checkpoint, Has("safetensors/"), &[]),
    rule(
        "parameter: FSDP's shard",
        Parameter,
        Ends("torch/distributed/fsdp/_fully_shard/_fsdp_param.py"),
        &["_init_sharded_param"],
    ),
    rule(
        "parameter: FSDP's shard",
        Parameter,
        Ends("torch/distributed/_composable/fsdp/_fsdp_param.py"),
        &["_init_sharded_param"],
    ),
    rule("parameter: FSDP's shard", Parameter, Ends("torch/distributed/fsdp/_flat_param.py"), &["_get_shard"]),
    rule("parameter: copied with its module", Parameter, Ends("torch/nn/parameter.py"), &["__deepcopy__"]),
    rule("workspace: cuBLAS", Workspace, Native("at::cuda::getCurrentCUDABlasHandle"), &[]),
    rule("workspace: cuBLAS", Workspace, Native("at::cuda::getCUDABlasLtWorkspace"), &[]),
    rule("workspace: cuDNN", Workspace, Native("at::native::Workspace"), &[]),
];

/// The rule that matches this frame; `None` without one.
pub fn category_rule(frame: &Frame) -> Option<&'static CategoryRule> {
    CATEGORY_RULES.iter().find(|rule| {
        let known = match rule.file {
            Native(start) => frame.native && frame.qualname.starts_with(start),
            _ if frame.native => false,
            Ends(end) => frame.filename.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('/')),
            Has(folder) => frame.filename.contains(folder),
            Named(start) => frame
                .qualname
                .split('.')
                .any(|part| part.get(..start.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(start))),
        };
        known && (rule.functions.is_empty() || rule.functions.contains(&&*frame.name))
    })
}

/// Whether the frame is the end of an autocast region, which frees the casts that autocast had kept.
pub fn ends_autocast(frame: &Frame) -> bool {
    !frame.native && &*frame.name == "__exit__" && frame.filename.ends_with("torch/amp/autocast_mode.py")
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
    NAMES.iter().any(|known| last.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(filename: &str, qualname: &str) -> Option<&'static str> {
        let name = qualname.rsplit('.').next().unwrap_or(qualname);
        let frame =
            Frame { filename: filename.into(), name: name.into(), qualname: qualname.into(), ..Frame::default() };
        category_rule(&frame).map(|rule| rule.name)
    }

    #[test]
    fn frames_make_what_they_say() {
        let site = |file: &str| format!("/venv/lib/python3.12/site-packages/{file}");
        let ddp = site("torch/nn/parallel/distributed.py");
        assert_eq!(by(&ddp, "DistributedDataParallel._ddp_init_helper"), Some("bucket: DistributedDataParallel"));
        assert_eq!(by(&ddp, "DistributedDataParallel.forward"), None);
        assert_eq!(by(&site("torch/serialization.py"), "_load.<locals>.load_tensor"), Some("checkpoint: torch.load"));
        assert_eq!(by("model.py", "KVCache.__init__"), Some("kv cache: a class named so"));
        assert_eq!(by("model.py", "Attention.__init__"), None);
        assert_eq!(by("model.py", "make_kvcaches"), None);
        assert!(is_cache_name("layers.0.attention.kv_cache") && !is_cache_name("cached_norm.weight"));
    }
}
