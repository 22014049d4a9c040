//! The memory of an engine that serves models on a device, beside the engine's own estimates.

use std::collections::BTreeMap;

use memtrace_insight::passes::{Category, CudaGraphs, DeviceAnalysis, Oom, Origin};
use memtrace_insight::rules::{Activity, ServingEngine, ServingPart, ServingStage};
use memtrace_insight::units::{count_text, signed_size_text, size_text};
use memtrace_replay::Names;
use memtrace_trace::clock::Calibration;
use memtrace_trace::file::Definitions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device_memory::{DeviceMemorySummary, DevicePartKind};
use crate::server_cache::KvCacheUse;
use crate::server_captures::{CapturedSize, captured_sizes, captures_text};
use crate::server_error::RefusedRequest;
use crate::server_options::{ActualBytes, Attributes, SPARE};

/// An engine that serves models, on one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ServerSummary {
    /// The engine: `vLLM` or `SGLang`.
    pub engine: String,
    /// The stages that allocated memory, in their usual order.
    pub stages: Vec<StageSummary>,
    /// PyTorch's allocated bytes at the peak after the engine allocated its KV cache. If it never did: at the peak of
    /// the whole recording. With a trainer: the engine's bytes with memory at the highest of its rollouts.
    pub allocated_bytes: u64,
    /// The parts, most bytes first. The bytes add up to `allocated_bytes`, less the bytes for which no event was
    /// recorded.
    pub parts: Vec<ServerPart>,
    /// The point in time of the parts, as a clause: `while it served`.
    pub when: String,
    /// The weights by data type, most bytes first.
    pub weights_by_type: Vec<TypeBytes>,
    /// The bytes of weights without a name, if some have names; 0 if they are less than 1 %. Kernels of quantized
    /// weights keep them in tensors that are no parameters.
    pub unnamed_weights_bytes: u64,
    /// The KV cache. Absent if the engine did not allocate one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCacheSummary>,
    /// The CUDA graphs by captured size, in the order of their captures.
    pub captured_sizes: Vec<CapturedSize>,
    /// The figures of all sizes in one line. Empty without captures.
    pub captures_text: String,
    /// The estimates of the engine, beside what happened.
    pub expectations: Vec<Expectation>,
    /// The share of the device that the engine may use. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<UtilizationSummary>,
    /// The stage of the request that the explained out-of-memory error refused. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_stage: Option<ServingStage>,
    /// Why that request was refused, as a clause: `the weights do not fit`. Absent without such an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    /// Why the engine did not come to serving, as a sentence. Absent if it did, or if the reason is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Whether the engine may release its memory while it sleeps, which needs an allocator of its own.
    pub may_sleep: bool,
    /// Changes of the server's options, and what each brings, cheapest first.
    pub advice: Vec<String>,
    /// The settings and figures that the engine's own objects have, by their paths (`vllm_config.cache_config.*`).
    pub attributes: BTreeMap<String, String>,
}

impl ServerSummary {
    /// The bytes of the weights.
    pub fn weights_bytes(&self) -> u64 {
        self.parts.iter().filter(|part| part.kind == ServingPart::Weights).map(|part| part.bytes).sum()
    }

    /// How far the engine came, and how much KV cache it has, as a sentence. `None` if it did not come to serving.
    /// `failed` is true if the program ended with an error, which a request can have caused.
    pub(crate) fn verdict(&self, failed: bool) -> Option<String> {
        let state = match self.has_served() {
            true if failed => "began to compute requests",
            true => "answered requests",
            false if failed => "did not come to serve",
            false => "was ready to serve",
        };
        let room = match &self.kv_cache {
            Some(KvCacheSummary { tokens: Some(tokens), .. }) => {
                format!("with a KV cache of {} tokens", count_text(*tokens))
            }
            Some(cache) => format!("with a KV cache of {}", size_text(cache.bytes)),
            None if self.has_served() => "without a KV cache".to_owned(),
            None => return self.problem.clone(),
        };
        Some(format!("{} {state}, {room}.", self.engine))
    }

    /// Whether the engine computed a request.
    fn has_served(&self) -> bool {
        self.stages.iter().any(|one| one.stage.serves())
    }
}

/// One stage of a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StageSummary {
    /// The stage.
    pub stage: ServingStage,
    /// From its first to its last event, in nanoseconds. Other stages can be in between.
    pub duration_ns: u64,
    /// PyTorch's allocated bytes before its first event.
    pub start_bytes: u64,
    /// The highest allocated bytes.
    pub peak_bytes: u64,
    /// The allocated bytes after its last event.
    pub end_bytes: u64,
    /// The most bytes by which the stage rose above what was allocated before.
    pub transient_bytes: u64,
}

/// The bytes of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ServerPart {
    /// The part.
    pub kind: ServingPart,
    /// Its bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// The bytes of the weights of one data type.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct TypeBytes {
    /// The data type, such as `bfloat16`.
    pub data_type: String,
    /// The bytes.
    pub bytes: u64,
}

/// The cache of keys and values.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvCacheSummary {
    /// Its bytes on this device.
    pub bytes: u64,
    /// The number of tokens that it has room for. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// The number of blocks, and of tokens in a block. Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// The number of tokens in a block. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_tokens: Option<u64>,
    /// The bytes of a token on this device. Absent without `tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_bytes: Option<f64>,
    /// The longest request in tokens. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    /// Its use over time. Absent if the engine's counters are in another process, or unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<KvCacheUse>,
    /// Why the use is unknown although requests were answered; empty if it is known or none were.
    pub usage_unknown: String,
    /// The figures in one line.
    pub text: String,
}

impl KvCacheSummary {
    /// Its use in one line, or why it is unknown.
    pub fn usage_text(&self) -> &str {
        self.usage.as_ref().map_or(&self.usage_unknown, |usage| &usage.text)
    }

    /// How many requests of the longest length have room at a time.
    pub fn concurrency(&self) -> Option<f64> {
        Some(self.tokens? as f64 / self.max_model_len.filter(|length| *length > 0)? as f64)
    }

    fn composed_text(&self) -> String {
        let mut facts = Vec::new();
        facts.extend(self.tokens.map(|tokens| format!("{} tokens", count_text(tokens))));
        facts.extend(self.token_bytes.map(|bytes| format!("{} a token", size_text(bytes.round() as u64))));
        if let Some((concurrency, length)) = self.concurrency().zip(self.max_model_len) {
            facts.push(format!("{concurrency:.1} requests of {} tokens at a time", count_text(length)));
        }
        let facts = if facts.is_empty() { String::new() } else { format!(": {}", facts.join(", ")) };
        format!("{}{facts}", size_text(self.bytes))
    }
}

/// An estimate of the engine, and what happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Expectation {
    /// The part of the memory.
    pub part: String,
    /// The bytes that the engine had measured or estimated.
    pub expected_bytes: u64,
    /// The bytes in the recording.
    pub actual_bytes: u64,
}

/// The share of the device that an engine may use.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct UtilizationSummary {
    /// The option that sets it.
    pub option: String,
    /// Its value in this run.
    pub value: f64,
    /// The bytes that were free on the device when the most memory was in use.
    pub free_bytes: u64,
    /// The bytes that the activations of the profiling run take beyond the most memory in use after it. Later requests
    /// can need them.
    #[serde(default)]
    pub profiled_bytes: u64,
    /// The largest value, in hundredths, that leaves [`SPARE`] of the device free beside these activations. Absent
    /// unless it differs from `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub safe_value: Option<f64>,
    /// By how many bytes the KV cache would grow with `safe_value`; negative if it would shrink.
    pub kv_cache_bytes: i64,
    /// By how many tokens. Absent if the bytes of a token are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_tokens: Option<i64>,
}

/// A part of the device from this share on is worth advice: one fiftieth.
const LARGE_SHARE: u64 = 50;

/// The inputs of a server's summary.
pub(crate) struct ServerInputs<'a> {
    pub(crate) definitions: &'a Definitions,
    pub(crate) names: &'a Names,
    pub(crate) device_memory: Option<&'a DeviceMemorySummary>,
    /// Whether another process of the run allocates on the device. Then what was free at one time says little.
    pub(crate) shares_device: bool,
    pub(crate) calibration: &'a Calibration,
    pub(crate) cuda_graphs: &'a CudaGraphs,
    /// The out-of-memory error to explain.
    pub(crate) refused: Option<Refusal<'a>>,
}

/// An out-of-memory error of PyTorch's allocator.
#[derive(Clone, Copy)]
pub(crate) struct Refusal<'a> {
    pub(crate) oom: &'a Oom,
    /// The bytes that the device lacked.
    pub(crate) short: u64,
    /// The bytes that the allocator could have had.
    pub(crate) limit: u64,
}

/// Summarizes the server on a device. `None` if the program is no server.
pub(crate) fn server(analysis: &DeviceAnalysis, inputs: &ServerInputs<'_>) -> Option<ServerSummary> {
    let serving = &analysis.serving;
    let engine = serving.engine.filter(|_| serving.stages.iter().any(Option::is_some))?;
    let attributes = Attributes::of(engine, inputs.definitions);
    let has_cache = serving.peak.seq > 0;
    // With a trainer: the engine's blocks while it computes requests.
    let activity = |activity| serving.colocated.activity(activity);
    let rollout = activity(Activity::Train).or(activity(Activity::Sync)).and(activity(Activity::Rollout));
    let peak = match inputs.refused {
        Some(refusal) => &refusal.oom.in_use,
        None if rollout.is_some() => rollout.map_or(&serving.peak, |figures| &figures.composition),
        None if has_cache => &serving.peak,
        None => &analysis.states.peak,
    };
    let mut parts: BTreeMap<ServingPart, ServerPart> = BTreeMap::new();
    let error_stage = inputs.refused.and_then(|refusal| serving.stage_of(refusal.oom.requested_at.0));
    let has_used_cache = peak.origins().any(|(origin, _)| origin.category == Category::KvCache);
    let is_of_server = |origin: &Origin| rollout.is_none() || serving.is_of_engine(origin);
    for (origin, amount) in peak.origins().filter(|(origin, _)| is_of_server(origin)) {
        let kind = match (serving.part_of(origin.stack, origin.category), serving.stage_of(origin.stack)) {
            // Before the first use, only the stage proves that a block is one of the cache.
            (ServingPart::Buffers, Some(ServingStage::KvCache)) if inputs.refused.is_some() && !has_used_cache => {
                ServingPart::KvCache
            }
            (ServingPart::Buffers, stage @ Some(ServingStage::Profile)) if stage == error_stage => {
                ServingPart::Activations
            }
            (kind, _) => kind,
        };
        let part = parts.entry(kind).or_insert(ServerPart { kind, bytes: 0, blocks: 0 });
        part.bytes += amount.bytes;
        part.blocks += amount.blocks;
    }
    let bytes_of = |kind| parts.get(&kind).map_or(0, |part| part.bytes);
    let bytes_of_weights = bytes_of(ServingPart::Weights);
    // An error while the cache is allocated leaves a part of it.
    let cache_bytes =
        Some(bytes_of(ServingPart::KvCache)).filter(|bytes| *bytes > 0 && error_stage != Some(ServingStage::KvCache));
    let kv_cache = cache_bytes.map(|bytes| {
        let cache = attributes.kv_cache(bytes);
        let uses = &inputs.definitions.cache_uses;
        let usage = KvCacheUse::new(uses, bytes, cache.tokens, |ticks| inputs.calibration.epoch_ns(ticks));
        let is_missing = usage.is_none() && serving.stage(ServingStage::Serve).is_some();
        let reason = attributes.reason_for_unknown_use().filter(|_| is_missing);
        KvCacheSummary { usage, usage_unknown: reason.unwrap_or_default().to_owned(), ..cache }
    });
    let stages = ServingStage::ALL.into_iter().filter_map(|stage| {
        let figures = serving.stage(stage)?;
        Some(StageSummary {
            stage,
            duration_ns: (figures.ticks.1.saturating_sub(figures.ticks.0) as f64 * inputs.calibration.ns_per_tick())
                as u64,
            start_bytes: figures.start,
            peak_bytes: figures.peak,
            end_bytes: figures.end,
            transient_bytes: figures.transient,
        })
    });
    let stages: Vec<StageSummary> = stages.collect();
    // Memory that the profiling run keeps, such as workspaces of kernels, is in use while the engine serves.
    let profile = serving.stage(ServingStage::Profile);
    let activations = profile.map(|figures| figures.peak.saturating_sub(figures.end)).filter(|bytes| *bytes > 0);
    let captured = inputs.cuda_graphs.graphs().iter().filter(|graph| graph.device == analysis.device);
    let captured = captured.filter(|graph| serving.stage_of(graph.stack) == Some(ServingStage::Capture));
    let captured_sizes = captured_sizes(captured, attributes.largest_captures());
    let (captures, graphs) = captured_sizes.iter().fold((0, 0), |(count, bytes), size| {
        (count + size.graphs, bytes + size.pool_growth_bytes + size.instantiated_bytes)
    });
    let adapters = bytes_of(ServingPart::Adapters);
    let actual = ActualBytes {
        weights: Some(bytes_of_weights + adapters).filter(|bytes| *bytes > 0),
        has_adapters: adapters > 0,
        activations,
        graphs: (graphs > 0).then_some(graphs),
        kv_cache: kv_cache.as_ref().map(|cache| cache.bytes),
    };
    let mut weights_by_type: BTreeMap<&str, u64> = BTreeMap::new();
    for (seq, bytes) in &serving.weights {
        let shape = inputs.names.of_allocation(*seq).map(|named| &*named.shape);
        if let Some((data_type, _)) = shape.and_then(|shape| shape.split_once('[')) {
            *weights_by_type.entry(data_type).or_default() += bytes;
        }
    }
    let mut weights_by_type: Vec<TypeBytes> = weights_by_type
        .into_iter()
        .map(|(data_type, bytes)| TypeBytes { data_type: data_type.to_owned(), bytes })
        .collect();
    weights_by_type.sort_by_key(|of_type| std::cmp::Reverse(of_type.bytes));
    let mut parts: Vec<ServerPart> = parts.into_values().collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    // With the profiled activations, beside all that the engine allocated before its first request.
    let settled = [ServingStage::WarmUp, ServingStage::Capture, ServingStage::KvCache];
    let settled = settled.into_iter().find_map(|stage| serving.stage(stage)).map_or(0, |figures| figures.end);
    let largest = settled + activations.unwrap_or(0);
    let refused = inputs.refused.map(|refusal| {
        let Refusal { oom, short, limit } = refusal;
        let (stack, in_use) = (oom.requested_at.0, &oom.in_use);
        let stage = error_stage.or_else(|| serving.latest_stage(oom.ticks)).unwrap_or(ServingStage::Start);
        RefusedRequest {
            stage,
            part: serving.part_of(stack, Category::Activation),
            requested: oom.requested,
            short,
            allocated: in_use.usage.allocated,
            allocated_before: serving.stage(stage).map_or(in_use.usage.allocated, |figures| figures.start),
            limit,
            weights: bytes_of_weights,
            graphs: (captures, graphs),
        }
    });
    let missing = refused.as_ref().map(|refused| refused.short);
    let utilization = inputs
        .device_memory
        .filter(|_| !inputs.shares_device && rollout.is_none())
        .filter(|_| refused.as_ref().is_none_or(RefusedRequest::follows_cache))
        .and_then(|memory| attributes.utilization(memory, kv_cache.as_ref(), largest, missing));
    let total_bytes = inputs.device_memory.map_or(u64::MAX, |memory| memory.total_bytes);
    let of_utilization = utilization.as_ref().zip(inputs.device_memory);
    let of_utilization = of_utilization.and_then(|(utilization, memory)| utilization.advice(memory, missing));
    let advice = match &refused {
        Some(refused) => refused.advice(&attributes, of_utilization),
        None => {
            let others = attributes.advice(&actual, kv_cache.as_ref(), &weights_by_type, total_bytes);
            of_utilization.into_iter().chain(others).collect()
        }
    };
    let allocated_bytes =
        if rollout.is_some() { parts.iter().map(|part| part.bytes).sum() } else { peak.usage.allocated };
    let named: u64 = weights_by_type.iter().map(|of_type| of_type.bytes).sum();
    let unnamed = bytes_of_weights.saturating_sub(named);
    let has_served = stages.iter().any(|one| one.stage.serves());
    let when = match kv_cache {
        _ if refused.is_some() => error_stage.map_or("at the error", ServingStage::clause),
        Some(_) => "while it served",
        None if has_served => "without a KV cache",
        None => "before it had a KV cache",
    };
    Some(ServerSummary {
        engine: engine.name().to_owned(),
        when: when.to_owned(),
        unnamed_weights_bytes: if named > 0 && unnamed * 100 >= bytes_of_weights { unnamed } else { 0 },
        stages,
        allocated_bytes,
        parts,
        captures_text: captures_text(&captured_sizes),
        captured_sizes,
        expectations: attributes.expectations(&actual),
        error_stage,
        problem: inputs.device_memory.and_then(|memory| attributes.problem(memory, &actual)),
        may_sleep: attributes.may_sleep(),
        error_reason: refused.map(|refused| refused.reason().to_owned()),
        advice,
        utilization,
        weights_by_type,
        kv_cache,
        attributes: attributes.values,
    })
}

impl Attributes {
    fn kv_cache(&self, bytes: u64) -> KvCacheSummary {
        let (tokens, blocks, block_tokens, max_model_len) = match self.engine {
            ServingEngine::Vllm => {
                let blocks = self
                    .whole("vllm_config.cache_config.num_gpu_blocks")
                    .or_else(|| self.whole("model_runner.kv_cache_config.num_blocks"));
                let block_tokens = self.whole("vllm_config.cache_config.block_size");
                let product = blocks.zip(block_tokens).and_then(|(blocks, tokens)| blocks.checked_mul(tokens));
                // Only newer versions have it. It also counts requests that take blocks of several groups of layers.
                let tokens = self.whole("vllm_config.cache_config.kv_cache_size_tokens").or(product);
                (tokens, blocks, block_tokens, self.whole("vllm_config.model_config.max_model_len"))
            }
            ServingEngine::Sglang => {
                let (tokens, page) = (self.whole("max_total_num_tokens"), self.whole("page_size"));
                let blocks = tokens.zip(page).and_then(|(tokens, page)| tokens.checked_div(page));
                let length = self.whole("server_args.context_length");
                (tokens, blocks, page, length.or_else(|| self.whole("model_config.context_len")))
            }
        };
        let token_bytes = tokens.filter(|tokens| *tokens > 0).map(|tokens| bytes as f64 / tokens as f64);
        let cache = KvCacheSummary {
            bytes,
            tokens,
            blocks,
            block_tokens,
            token_bytes,
            max_model_len,
            ..KvCacheSummary::default()
        };
        KvCacheSummary { text: cache.composed_text(), ..cache }
    }

    /// Why the use of the KV cache is not recorded. With several ranks, vLLM's scheduler has a process of its own,
    /// which allocates nothing on a GPU.
    fn reason_for_unknown_use(&self) -> Option<&'static str> {
        let ranks =
            ["tensor", "pipeline"].map(|kind| self.whole(&format!("vllm_config.parallel_config.{kind}_parallel_size")));
        (self.engine == ServingEngine::Vllm && ranks.into_iter().flatten().any(|ranks| ranks > 1)).then_some(
            "unknown: vLLM's scheduler, which counts it, has a process without a GPU (vLLM's /metrics has it)",
        )
    }

    fn expectations(&self, actual: &ActualBytes) -> Vec<Expectation> {
        // SGLang counts in GiB, as a fraction.
        let gib = |path: &str| self.number(path).map(|gib| (gib * (1u64 << 30) as f64) as u64);
        let weights = if actual.has_adapters { "weights and adapters" } else { "weights" };
        let expected = match self.engine {
            ServingEngine::Vllm => {
                let graphs = self.whole("cudagraph_memory_estimate").filter(|bytes| *bytes > 0);
                // Since 0.21, the peak that vLLM keeps free has its estimate of the graphs in it.
                let (peak, actual_peak) = if graphs.is_some() {
                    ("peak of activations and CUDA graphs", actual.activations.zip(actual.graphs).map(|(a, b)| a + b))
                } else {
                    ("peak of activations", actual.activations)
                };
                vec![
                    (weights, self.whole("model_runner.model_memory_usage"), actual.weights),
                    (peak, self.whole("peak_activation_memory"), actual_peak),
                    ("CUDA graphs", graphs, actual.graphs),
                    ("KV cache", self.whole("available_kv_cache_memory_bytes"), actual.kv_cache),
                ]
            }
            ServingEngine::Sglang => vec![
                (weights, gib("weight_load_mem_usage"), actual.weights),
                ("CUDA graphs", gib("graph_mem_usage"), actual.graphs),
            ],
        };
        let known = expected.into_iter().filter_map(|(part, expected, actual)| {
            let expected_bytes = expected.filter(|bytes| *bytes > 0)?;
            Some(Expectation { part: part.to_owned(), expected_bytes, actual_bytes: actual? })
        });
        known.collect()
    }

    /// Changes of options beside the utilization.
    fn advice(
        &self,
        actual: &ActualBytes,
        cache: Option<&KvCacheSummary>,
        weights: &[TypeBytes],
        total_bytes: u64,
    ) -> Vec<String> {
        let options = self.options();
        let is_large = |bytes: u64| bytes >= total_bytes / LARGE_SHARE;
        let mut advice = Vec::new();
        let is_wide = self.values.get(options.cache_type.path).is_some_and(|data_type| data_type == "auto");
        // The cache of a hybrid model also has states, which keep their type.
        let is_wide = is_wide && self.whole("vllm_config.cache_config.mamba_block_size").is_none();
        if let Some((tokens, bytes)) = cache.filter(|_| is_wide).and_then(|cache| cache.tokens.zip(cache.token_bytes)) {
            advice.push(format!(
                "`{} {}`: a token takes {} instead of {}, so the cache has room for {} instead of {} \
                 tokens (Ada, Hopper and newer; check the quality of answers)",
                options.cache_type.name,
                options.narrow_cache_type,
                size_text((bytes / 2.0) as u64),
                size_text(bytes as u64),
                count_text(2 * tokens),
                count_text(tokens)
            ));
        }
        let batched = self.value(options.batched_tokens).filter(|tokens| *tokens >= 1024);
        if let Some((peak, tokens)) = actual.activations.filter(|peak| is_large(*peak)).zip(batched) {
            advice.push(format!(
                "`{} {}` instead of {tokens}: the largest batch takes about {} instead of {}, and the KV cache gets \
                 the rest; long prompts take more steps",
                options.batched_tokens.name,
                tokens / 2,
                size_text(peak / 2),
                size_text(peak)
            ));
        }
        if let Some(graphs) = actual.graphs.filter(|bytes| is_large(*bytes)) {
            advice.push(format!(
                "`{}`: no CUDA graphs, which take {}; decoding becomes slower",
                options.eager.name,
                size_text(graphs)
            ));
        }
        let wide: u64 = weights.iter().filter(|of| of.data_type.ends_with("float16")).map(|of| of.bytes).sum();
        if wide >= total_bytes / 4 {
            advice.push(format!(
                "weights quantized to 8 bits take about {} instead of {}; with `{}`, each GPU has half of these \
                 weights",
                size_text(wide / 2),
                size_text(wide),
                self.twice_as_parallel()
            ));
        }
        advice
    }

    fn utilization(
        &self,
        memory: &DeviceMemorySummary,
        kv_cache: Option<&KvCacheSummary>,
        largest_allocated: u64,
        missing: Option<u64>,
    ) -> Option<UtilizationSummary> {
        let option = self.options().utilization;
        let value = self.number(option.path).filter(|value| (0.0..=1.0).contains(value))?;
        let total = memory.total_bytes as f64;
        let free_bytes = memory.total_bytes.saturating_sub(memory.at_peak.used_bytes);
        // Unused memory that PyTorch caches serves activations, too.
        let of_pytorch = [DevicePartKind::PytorchAllocated, DevicePartKind::PytorchCached];
        let of_pytorch = memory.at_peak.parts.iter().filter(|part| of_pytorch.contains(&part.kind));
        let profiled_bytes = largest_allocated.saturating_sub(of_pytorch.map(|part| part.bytes).sum());
        let mut utilization = UtilizationSummary {
            option: option.name.to_owned(),
            value,
            free_bytes,
            profiled_bytes,
            safe_value: None,
            kv_cache_bytes: 0,
            kv_cache_tokens: None,
        };
        // A refused request lacked `missing` bytes.
        let room = free_bytes as i64 - profiled_bytes as i64;
        let room = missing.map_or(room, |missing| room.min(-(missing as i64)));
        let change = room as f64 / total - SPARE;
        // A millionth for the rounding of sums such as 0.92 + 0.05.
        let safe = (((value + change) * 100.0 + 1e-6).floor() / 100.0).clamp(0.0, 1.0);
        let Some(cache) = kv_cache.filter(|_| total > 0.0 && (safe - value).abs() >= 0.005) else {
            return Some(utilization);
        };
        let bytes = ((safe - value) * total) as i64;
        if bytes.saturating_add_unsigned(cache.bytes) <= 0 {
            return Some(utilization);
        }
        utilization.safe_value = Some(safe);
        utilization.kv_cache_bytes = bytes;
        utilization.kv_cache_tokens = cache.token_bytes.map(|token| (bytes as f64 / token) as i64);
        Some(utilization)
    }
}

impl UtilizationSummary {
    /// The change to [`Self::safe_value`] as advice. `None` without one.
    fn advice(&self, memory: &DeviceMemorySummary, missing: Option<u64>) -> Option<String> {
        let (option, value, safe) = (&self.option, self.value, self.safe_value?);
        let tokens = self.kv_cache_tokens.map(|tokens| {
            let sign = if tokens < 0 { "-" } else { "+" };
            format!(", {sign}{} tokens", count_text(tokens.unsigned_abs()))
        });
        let change = format!(
            "`{option} {safe:.2}` instead of {value}: KV cache {}{}",
            signed_size_text(self.kv_cache_bytes),
            tokens.unwrap_or_default()
        );
        if let Some(missing) = missing {
            let profiled = match self.profiled_bytes {
                0 => String::new(),
                bytes => format!(", and activations as in the profiling run need {} more", size_text(bytes)),
            };
            return Some(format!("{change}. The refused request lacked {}{profiled}.", size_text(missing)));
        }
        // Unused memory that PyTorch caches serves the next requests.
        let cached = memory.at_peak.parts.iter().filter(|part| part.kind == DevicePartKind::PytorchCached);
        let cached: u64 = cached.map(|part| part.bytes).sum();
        let cached = if cached > 0 { format!("; PyTorch cached {} unused", size_text(cached)) } else { String::new() };
        let profiled = match self.profiled_bytes {
            0 => String::new(),
            bytes => format!(", of which activations as in the profiling run need {}", size_text(bytes)),
        };
        Some(format!(
            "{change}. In this run {} of the device stayed free{profiled}{cached}; {:.0} % stays free with it.",
            size_text(self.free_bytes),
            SPARE * 100.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_memory::{DeviceBreakdown, DevicePart, OtherProcesses};

    const GIB: u64 = 1 << 30;

    fn attributes(values: &[(&str, &str)]) -> Attributes {
        let values = values.iter().map(|(path, value)| ((*path).to_owned(), (*value).to_owned()));
        Attributes { engine: ServingEngine::Vllm, values: values.collect() }
    }

    #[test]
    fn a_safe_utilization_leaves_the_profiled_activations_their_memory() {
        let pytorch = DevicePart::new(DevicePartKind::PytorchAllocated, "PyTorch allocated", 90 * GIB);
        let at_peak = DeviceBreakdown { used_bytes: 94 * GIB, parts: vec![pytorch], ..DeviceBreakdown::default() };
        let memory = DeviceMemorySummary {
            total_bytes: 100 * GIB,
            at_end: at_peak.clone(),
            at_peak,
            at_allocated_peak: None,
            readings: 1,
            over_time: Vec::new(),
            other_processes: OtherProcesses::None,
            nvml_process_peak_bytes: None,
        };
        let engine = attributes(&[("vllm_config.cache_config.gpu_memory_utilization", "0.9")]);
        let cache = KvCacheSummary { bytes: 50 * GIB, ..KvCacheSummary::default() };
        let with = |largest: u64| engine.utilization(&memory, Some(&cache), largest * GIB, None).unwrap();
        assert_eq!((with(90).profiled_bytes, with(90).safe_value), (0, Some(0.94)));
        assert_eq!((with(93).profiled_bytes, with(93).safe_value), (3 * GIB, Some(0.91)));
        let advice = with(93).advice(&memory, None).unwrap();
        assert!(advice.contains(
            "6.00 GiB of the device stayed free, of which activations as in the profiling run need 3.00 GiB"
        ));
    }
}
