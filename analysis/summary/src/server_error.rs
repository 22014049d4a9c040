//! Why a server did not come to serving, or ended: its own refusals, and what to change after an out-of-memory error.

use memtrace_insight::rules::{ServingEngine, ServingPart, ServingStage};
use memtrace_insight::units::{count_text, size_text};

use crate::device_memory::DeviceMemorySummary;
use crate::server_options::{ActualBytes, Attributes, EngineOption, SPARE};

/// Fewer weights are advised after an error of the largest batch if they take at least 25 % (1/4).
const LARGE_WEIGHTS: u64 = 4;

/// A request of a server that was refused for lack of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RefusedRequest {
    /// The stage that requested it, else the stage before.
    pub(crate) stage: ServingStage,
    /// The part that the request was for.
    pub(crate) part: ServingPart,
    pub(crate) requested: u64,
    /// The bytes that the device lacked.
    pub(crate) short: u64,
    /// The allocated bytes of PyTorch, and before the stage began.
    pub(crate) allocated: u64,
    pub(crate) allocated_before: u64,
    /// The bytes that PyTorch's allocator could have had.
    pub(crate) limit: u64,
    /// The bytes of weights that were allocated.
    pub(crate) weights: u64,
    /// The CUDA graphs that were captured, and their bytes.
    pub(crate) graphs: (u64, u64),
}

impl RefusedRequest {
    /// Whether the engine had given what was left to the KV cache: then a smaller share of the device helps.
    pub(crate) fn follows_cache(&self) -> bool {
        self.stage >= ServingStage::KvCache
    }

    /// Why the request was refused, as a clause.
    pub(crate) fn reason(&self) -> &'static str {
        match self.stage {
            ServingStage::Start | ServingStage::Load => "the weights do not fit",
            ServingStage::Profile => "the largest batch of the profiling run does not fit",
            ServingStage::KvCache => "the KV cache does not fit",
            ServingStage::Capture => "CUDA graphs do not fit",
            ServingStage::WarmUp => "the largest batch does not fit",
            ServingStage::Sleep | ServingStage::WakeUp => "what the engine had released does not fit any more",
            _ => "requests do not fit",
        }
    }

    /// Changes of options, cheapest first. `utilization` is a smaller share of the device.
    pub(crate) fn advice(&self, engine: &Attributes, utilization: Option<String>) -> Vec<String> {
        let options = engine.options();
        let mut advice: Vec<String> = utilization.into_iter().collect();
        let half = |option: EngineOption, least: u64| {
            let value = engine.value(option).filter(|value| *value >= least)?;
            Some(format!("`{} {}` instead of {value}", option.name, value / 2))
        };
        let needs = self.allocated.saturating_sub(self.allocated_before) + self.requested;
        let smaller_batch = |advice: &mut Vec<String>| {
            let sequences = half(options.sequences, 2).map(|text| (text, "logits and the sampler take half"));
            let tokens = half(options.batched_tokens, 1024).map(|text| (text, "activations take about half"));
            let is_sampler = self.part == ServingPart::Sampler;
            let changes = if is_sampler { [sequences, tokens] } else { [tokens, sequences] };
            if let Some((change, effect)) = changes.into_iter().flatten().next() {
                advice.push(format!("{change}: {effect} of at least {}", size_text(needs)));
            }
        };
        match self.stage {
            ServingStage::Profile | ServingStage::WarmUp => smaller_batch(&mut advice),
            stage if stage.serves() => smaller_batch(&mut advice),
            _ => {}
        }
        let captures = self.stage == ServingStage::Capture;
        let (count, bytes) = self.graphs;
        if captures && let Some(change) = half(options.captured_size, 2) {
            advice.push(format!("{change}: CUDA graphs for smaller batches only"));
        }
        if !engine.is_eager() && self.follows_cache() && (captures || bytes >= self.short.max(1)) {
            let graphs = if count == 1 { "graph".to_owned() } else { format!("{} graphs", count_text(count)) };
            let taken =
                if bytes > 0 { format!(", which take {} in {graphs}", size_text(bytes)) } else { String::new() };
            advice.push(format!("`{}`: no CUDA graphs{taken}; decoding becomes slower", options.eager.name));
        }
        let loads = matches!(self.stage, ServingStage::Start | ServingStage::Load);
        if loads || (self.stage == ServingStage::Profile && self.weights >= self.limit / LARGE_WEIGHTS) {
            advice.extend(self.smaller_weights(engine));
        }
        advice
    }

    fn smaller_weights(&self, engine: &Attributes) -> Vec<String> {
        // Weights that are still loaded need more.
        let (weights, at_least) = if self.stage != ServingStage::Profile {
            (self.weights + self.requested, "at least ")
        } else {
            (self.weights, "")
        };
        let limit = size_text(self.limit);
        let mut advice = vec![format!(
            "`{}`: each GPU has half of the weights, which take {at_least}{}; PyTorch can have {limit} here",
            engine.twice_as_parallel(),
            size_text(weights),
        )];
        if !engine.values.is_empty() && !engine.values.contains_key(engine.options().quantization.path) {
            advice.push(format!(
                "a model with weights quantized to 8 bits: about half of the {at_least}{} of weights with 16 bits, \
                 with 4 bits about a quarter",
                size_text(weights)
            ));
        }
        advice
    }
}

impl Attributes {
    /// Why an engine did not begin to load: vLLM does not start if its share of the device is not free.
    fn refused_start(&self, memory: &DeviceMemorySummary) -> Option<String> {
        let (option, total) = (self.options().utilization, memory.total_bytes);
        let share = self.number(option.path).filter(|_| self.engine == ServingEngine::Vllm)?;
        let requested = (share * total as f64).ceil() as u64;
        let free = total.saturating_sub(memory.at_peak.used_bytes);
        let fits = (free as f64 / total.max(1) as f64 * 100.0).floor() / 100.0;
        (free < requested).then(|| {
            format!(
                "{} did not start: `{} {share}` requests {} of the device, and {} was free. `{} {fits:.2}` is the most \
                 that starts beside what is in use.",
                self.engine.name(),
                option.name,
                size_text(requested),
                size_text(free),
                option.name
            )
        })
    }

    /// Why an engine that has profiled its largest batch has no KV cache.
    pub(crate) fn problem(&self, memory: &DeviceMemorySummary, actual: &ActualBytes) -> Option<String> {
        if actual.weights.is_none() {
            return self.refused_start(memory);
        }
        let activations = actual.activations.filter(|_| actual.kv_cache.is_none())?;
        let requested = self.whole("requested_memory")?;
        let options = self.options();
        let share = self.number(options.utilization.path)?;
        // With what PyTorch caches, of which an engine can release a part: the change that follows suffices.
        let used = memory.at_peak.used_bytes;
        let total = memory.total_bytes.max(1) as f64;
        let weights = size_text(actual.weights.unwrap_or(0));
        let needs = format!(
            "weights of {weights}, the peak of activations of {} and what is outside PyTorch take {}",
            size_text(activations),
            size_text(used)
        );
        let (engine, option) = (self.engine.name(), options.utilization.name);
        let allowed = format!("{} that `{option} {share}` allows", size_text(requested));
        let length = self.value(options.length).filter(|length| *length > 0);
        // A cache must have room for one request of the largest length.
        let of_length = length.zip(self.expected_token_bytes());
        let cache = of_length.and_then(|(length, token)| length.checked_mul(token));
        let least = (((used + cache.unwrap_or(0)) as f64 / total + SPARE) * 100.0).ceil() / 100.0;
        let left_with = |share: f64| ((share * total) as u64).saturating_sub(used);
        // The profiling run does not show all that CUDA graphs take.
        let spare = if self.is_eager() { 0 } else { (SPARE * total) as u64 };
        let block = self.whole("vllm_config.cache_config.block_size").unwrap_or(1).max(1);
        let tokens = |left: u64, token: u64| left.saturating_sub(spare) / token.max(1) / block * block;
        let request = of_length.zip(cache).map(|((length, token), bytes)| {
            let text = format!(
                "a request of {} tokens (`{}`) needs {}",
                count_text(length),
                options.length.name,
                size_text(bytes)
            );
            (text, token)
        });
        let shorter = |share: f64| {
            let tokens = tokens(left_with(share), request.as_ref()?.1);
            (tokens > 0).then(|| format!("`{} {tokens}`", options.length.name))
        };
        let larger = (least < 1.0).then(|| format!("`{option} {least:.2}`"));
        let too_small = || format!("The device is too small: `{}` divides the weights.", self.twice_as_parallel());
        Some(match requested.checked_sub(used).filter(|left| *left > 0) {
            None => {
                let request = request.as_ref().map(|(text, _)| format!(", {text}")).unwrap_or_default();
                // The largest share that leaves some memory free.
                let most = 1.0 - SPARE;
                let remedy = match (larger, shorter(most)) {
                    (Some(change), _) => format!("{change} leaves {} for it{request}.", size_text(left_with(least))),
                    (None, Some(change)) => {
                        let left = size_text(left_with(most));
                        format!("`{option} {most:.2}` leaves {left} for it{request}, so {change} is needed, too.")
                    }
                    (None, None) => too_small(),
                };
                format!("{engine} has no memory for a KV cache: of the {allowed}, {needs}. {remedy}")
            }
            Some(left) => {
                let stopped = format!(
                    "{engine} stopped before it had a KV cache: of the {allowed}, {needs}, so at least {} is left",
                    size_text(left)
                );
                match (&request, length) {
                    // The reason is another one.
                    (Some((_, token)), _) if cache.is_some_and(|bytes| bytes <= left.saturating_sub(spare)) => {
                        format!("{stopped}, room for {} tokens.", count_text(tokens(left, *token)))
                    }
                    (Some((text, _)), _) => {
                        let changes: Vec<String> = shorter(share).into_iter().chain(larger).collect();
                        let remedy = if changes.is_empty() { too_small() } else { changes.join(" or ") + " fits." };
                        format!("{stopped}; {text}. {remedy}")
                    }
                    (None, Some(length)) => format!(
                        "{stopped}, which must have room for a request of {} tokens (`{}`).",
                        count_text(length),
                        options.length.name
                    ),
                    (None, None) => format!("{stopped}."),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn advice(stage: ServingStage, part: ServingPart) -> String {
        let values = [
            ("vllm_config.scheduler_config.max_num_batched_tokens", "8192"),
            ("vllm_config.scheduler_config.max_num_seqs", "256"),
            ("vllm_config.compilation_config.max_cudagraph_capture_size", "512"),
        ];
        let values = values.map(|(path, value)| (path.to_owned(), value.to_owned())).into();
        let refused = RefusedRequest {
            stage,
            part,
            requested: 100 * MIB,
            short: 60 * MIB,
            allocated: 900 * MIB,
            allocated_before: 700 * MIB,
            limit: 1000 * MIB,
            weights: 400 * MIB,
            graphs: (3, 80 * MIB),
        };
        let utilization = refused.follows_cache().then(|| "`--gpu-memory-utilization 0.85`".to_owned());
        refused.advice(&Attributes { engine: ServingEngine::Vllm, values }, utilization).join("\n")
    }

    #[test]
    fn each_stage_has_advice_of_its_own() {
        let load = advice(ServingStage::Load, ServingPart::Weights);
        assert!(load.starts_with("`--tensor-parallel-size 2`") && load.contains("at least 500 MiB"), "{load}");
        assert!(!load.contains("utilization") && !load.contains("--max-num"), "{load}");
        let profile = advice(ServingStage::Profile, ServingPart::Activations);
        assert!(profile.starts_with("`--max-num-batched-tokens 4096` instead of 8192"), "{profile}");
        assert!(profile.contains("at least 300 MiB") && profile.contains("weights quantized"), "{profile}");
        let sampler = advice(ServingStage::WarmUp, ServingPart::Sampler);
        assert!(sampler.contains("`--max-num-seqs 128` instead of 256"), "{sampler}");
        let capture = advice(ServingStage::Capture, ServingPart::CudaGraphs);
        assert!(
            capture.starts_with("`--gpu-memory-utilization 0.85`\n`--max-cudagraph-capture-size 256`"),
            "{capture}"
        );
        assert!(capture.contains("`--enforce-eager`: no CUDA graphs, which take 80.0 MiB in 3 graphs"), "{capture}");
        let serve = advice(ServingStage::Decode, ServingPart::Activations);
        assert!(serve.starts_with("`--gpu-memory-utilization 0.85`") && serve.contains("--enforce-eager"), "{serve}");
        assert!(!serve.contains("tensor-parallel"), "{serve}");
    }
}
