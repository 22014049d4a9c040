//! The options and the figures of an engine that serves models, as its own objects have them.

use std::collections::BTreeMap;

use memtrace_insight::rules::ServingEngine;
use memtrace_trace::file::Definitions;

/// The share of a device that stays free for what a run did not show, such as fragmentation and other kernels.
pub(crate) const SPARE: f64 = 0.02;

/// An option of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOption {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// The path of its value.
    pub(crate) path: &'static str,
}

const fn option(name: &'static str, path: &'static str) -> EngineOption {
    EngineOption { name, path }
}

/// The options of an engine that decide about its memory.
pub(crate) struct Options {
    pub(crate) utilization: EngineOption,
    pub(crate) cache_type: EngineOption,
    /// A value of `cache_type` with 8 bits.
    pub(crate) narrow_cache_type: &'static str,
    pub(crate) batched_tokens: EngineOption,
    /// The requests of one decoding step.
    pub(crate) sequences: EngineOption,
    /// The largest number of requests for which a CUDA graph is captured.
    pub(crate) captured_size: EngineOption,
    pub(crate) length: EngineOption,
    pub(crate) tensor_parallel: EngineOption,
    pub(crate) eager: EngineOption,
    pub(crate) quantization: EngineOption,
}

static VLLM: Options = Options {
    utilization: option("--gpu-memory-utilization", "vllm_config.cache_config.gpu_memory_utilization"),
    cache_type: option("--kv-cache-dtype", "vllm_config.cache_config.cache_dtype"),
    narrow_cache_type: "fp8",
    batched_tokens: option("--max-num-batched-tokens", "vllm_config.scheduler_config.max_num_batched_tokens"),
    sequences: option("--max-num-seqs", "vllm_config.scheduler_config.max_num_seqs"),
    captured_size: option("--max-cudagraph-capture-size", "vllm_config.compilation_config.max_cudagraph_capture_size"),
    length: option("--max-model-len", "vllm_config.model_config.max_model_len"),
    tensor_parallel: option("--tensor-parallel-size", "vllm_config.parallel_config.tensor_parallel_size"),
    eager: option("--enforce-eager", "vllm_config.model_config.enforce_eager"),
    quantization: option("--quantization", "vllm_config.model_config.quantization"),
};

static SGLANG: Options = Options {
    utilization: option("--mem-fraction-static", "mem_fraction_static"),
    cache_type: option("--kv-cache-dtype", "server_args.kv_cache_dtype"),
    narrow_cache_type: "fp8_e4m3",
    batched_tokens: option("--chunked-prefill-size", "server_args.chunked_prefill_size"),
    sequences: option("--max-running-requests", "max_running_requests"),
    captured_size: option("--cuda-graph-max-bs-decode", "server_args.cuda_graph_max_bs_decode"),
    length: option("--context-length", "server_args.context_length"),
    tensor_parallel: option("--tp", "tp_size"),
    eager: option("--disable-cuda-graph", "server_args.disable_cuda_graph"),
    quantization: option("--quantization", "server_args.quantization"),
};

/// The bytes of a recording that an engine estimates too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ActualBytes {
    /// With the slots of adapters: an engine measures what it allocates while it loads the model.
    pub(crate) weights: Option<u64>,
    pub(crate) has_adapters: bool,
    pub(crate) activations: Option<u64>,
    pub(crate) graphs: Option<u64>,
    pub(crate) kv_cache: Option<u64>,
}

/// The attributes of the engine's objects, by their paths.
pub(crate) struct Attributes {
    pub(crate) engine: ServingEngine,
    pub(crate) values: BTreeMap<String, String>,
}

impl Attributes {
    pub(crate) fn of(engine: ServingEngine, definitions: &Definitions) -> Attributes {
        let of_engine = definitions.engine_attributes.iter().filter_map(|attribute| {
            Some((attribute.path.strip_prefix(engine.attributes())?.to_owned(), attribute.value.to_string()))
        });
        Attributes { engine, values: of_engine.collect() }
    }

    pub(crate) fn number(&self, path: &str) -> Option<f64> {
        self.values.get(path)?.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
    }

    pub(crate) fn whole(&self, path: &str) -> Option<u64> {
        self.values.get(path)?.parse().ok()
    }

    /// The engine's own names of options.
    pub(crate) fn options(&self) -> &'static Options {
        match self.engine {
            ServingEngine::Vllm => &VLLM,
            ServingEngine::Sglang => &SGLANG,
        }
    }

    /// Whether the engine captures no CUDA graphs.
    pub(crate) fn is_eager(&self) -> bool {
        self.values.get(self.options().eager.path).is_some_and(|value| value == "True")
    }

    /// The value of an option.
    pub(crate) fn value(&self, option: EngineOption) -> Option<u64> {
        self.whole(option.path)
    }

    /// The largest size of captures, and that of captures for requests. `None` if it is unknown.
    pub(crate) fn largest_captures(&self) -> Option<(u64, u64)> {
        let largest = self.value(self.options().captured_size)?;
        Some((largest, self.value(self.options().sequences).unwrap_or(largest)))
    }

    /// Whether the engine may release its memory while it sleeps. Its allocator for that excludes expandable segments.
    pub(crate) fn may_sleep(&self) -> bool {
        let paths = ["vllm_config.model_config.enable_sleep_mode", "server_args.enable_memory_saver"];
        paths.iter().any(|path| self.values.get(*path).is_some_and(|value| value == "True"))
    }

    /// The option that divides the weights among twice as many GPUs.
    pub(crate) fn twice_as_parallel(&self) -> String {
        let EngineOption { name, .. } = self.options().tensor_parallel;
        format!("{name} {}", 2 * self.value(self.options().tensor_parallel).unwrap_or(1))
    }

    /// The bytes that a token takes in the cache of keys and values on one device, by the model's configuration. `None`
    /// unless all layers keep the keys and values of all tokens, in 16 bits or fewer.
    pub(crate) fn expected_token_bytes(&self) -> Option<u64> {
        let of_model = |name: &str| self.whole(&format!("vllm_config.model_config.{name}"));
        let excluded = ["hf_text_config.sliding_window", "hf_text_config.attention_chunk_size"];
        let has_mla = self.values.get("vllm_config.model_config.model_arch_config.is_deepseek_mla");
        let has_states = self.whole("vllm_config.cache_config.mamba_block_size").is_some();
        if has_mla? != "False" || has_states || excluded.iter().any(|name| of_model(name).is_some()) {
            return None;
        }
        let of_architecture = |name: &str| of_model(&format!("model_arch_config.{name}"));
        let of_parallel = |name: &str| self.whole(&format!("vllm_config.parallel_config.{name}")).unwrap_or(1).max(1);
        let heads = of_architecture("total_num_kv_heads")?.div_ceil(of_parallel("tensor_parallel_size"));
        let layers = of_architecture("total_num_hidden_layers")?.div_ceil(of_parallel("pipeline_parallel_size"));
        let element = match self.values.get(self.options().cache_type.path)?.as_str() {
            "auto" | "bfloat16" | "float16" => 2,
            narrow if narrow.starts_with("fp8") => 1,
            _ => return None,
        };
        [heads, layers, 2 * element].into_iter().try_fold(of_architecture("head_size")?, u64::checked_mul)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(values: &[(&str, &str)]) -> Attributes {
        let values = values.iter().map(|(path, value)| ((*path).to_owned(), (*value).to_owned()));
        Attributes { engine: ServingEngine::Vllm, values: values.collect() }
    }

    #[test]
    fn weights_are_divided_among_twice_as_many_gpus_as_now() {
        let engine = attributes(&[("vllm_config.parallel_config.tensor_parallel_size", "4")]);
        assert_eq!(engine.twice_as_parallel(), "--tensor-parallel-size 8");
        assert_eq!(attributes(&[]).twice_as_parallel(), "--tensor-parallel-size 2");
    }

    #[test]
    fn the_bytes_of_a_token_follow_from_the_model() {
        // Llama 3.1 8B: 8 heads of 128 for keys and for values in each of 32 layers.
        let mut engine = attributes(&[
            ("vllm_config.model_config.model_arch_config.is_deepseek_mla", "False"),
            ("vllm_config.model_config.model_arch_config.head_size", "128"),
            ("vllm_config.model_config.model_arch_config.total_num_kv_heads", "8"),
            ("vllm_config.model_config.model_arch_config.total_num_hidden_layers", "32"),
            ("vllm_config.cache_config.cache_dtype", "auto"),
        ]);
        assert_eq!(engine.expected_token_bytes(), Some(128 << 10));
        let mut set = |path: &str, value: &str| {
            engine.values.insert(path.to_owned(), value.to_owned());
            engine.expected_token_bytes()
        };
        assert_eq!(set("vllm_config.cache_config.cache_dtype", "fp8"), Some(64 << 10));
        assert_eq!(set("vllm_config.parallel_config.tensor_parallel_size", "4"), Some(16 << 10));
        assert_eq!(set("vllm_config.model_config.hf_text_config.sliding_window", "4096"), None);
    }
}
