//! Explains a point in time: why its memory use is high, and what would lower it. Converts the passes' results for the
//! summary.

use memtrace_trace::definition::TensorKind;
use memtrace_trace::file::Definitions;

use crate::locations::Locations;
use crate::summary::{
    BlockingAllocation, GrowthAfterFirstStep, ReplayedSetting, ReservedSummary, SuggestionSummary, WhatIfSummary,
};
use crate::units::size_text;
use memtrace_input::EventSource;
use memtrace_input::load::Process;
use memtrace_insight::passes::{
    Analysis, Category, Composition, DeviceAnalysis, ModuleTree, Oom, OomQuery, Phase, RepeatedModules, Reserved,
    RunPart, StackTable, StepRows, WhatIf, WhatIfQuery,
};
use memtrace_insight::rules::{MemoryFacts, suggestion_rules};
use memtrace_replay::{AllocatorSettings, Names};

/// How much is replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replaying {
    /// Replays if there is something to explain: an out-of-memory error, or much reserved memory that is not in use.
    /// Never replays large recordings.
    #[default]
    WhenUseful,
    /// Always replays.
    Always,
}

/// Reserved memory at the peak is explained if at least one in this many parts is not in use.
const WORTH_EXPLAINING: u64 = 20;
/// The allocator's policy is replayed if at least one in this many parts is not in use.
const WORTH_REPLAYING: u64 = 8;
/// Less unused reserved memory than this is never explained, in bytes.
const SMALL: u64 = 64 << 20;
/// Recordings with more events are replayed only on request.
const MANY_EVENTS: u64 = 4_000_000;
/// If more than this was free beside a failed request, CUDA did not refuse it. In bytes.
const CUDA_KEEPS: u64 = 64 << 20;

/// The error to explain: the last one if it ended the process, else the first. `None` without errors.
pub(crate) fn oom_to_explain<'a>(analysis: &'a DeviceAnalysis, process: &Process) -> Option<&'a Oom> {
    let failed = process.exit().success() != Some(true);
    let last = analysis.ooms.last().filter(|oom| failed && analysis.ooms.unwound_to_the_end() && oom.in_use.seq > 0);
    last.or_else(|| analysis.ooms.all().next())
}

/// The points in time that a second pass is to examine.
pub(crate) fn oom_queries(process: &Process, analysis: &Analysis, replaying: Replaying) -> Vec<OomQuery> {
    let env = &process.info().env;
    let conf = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().find_map(|name| env.get(*name));
    let settings = AllocatorSettings::parse(conf.map_or("", String::as_str));
    let always = replaying == Replaying::Always;
    let short = always || process.recording().event_count() <= MANY_EVENTS;
    let devices = analysis.devices.iter().filter(|device| device.source == EventSource::Torch && device.peak.seq > 0);
    let query = |device: &DeviceAnalysis| {
        let oom = oom_to_explain(device, process);
        let usage = oom.map_or(&device.peak.usage, |oom| &oom.in_use.usage);
        let unallocated = usage.reserved.saturating_sub(usage.allocated);
        let is_worth =
            |part: u64| always || oom.is_some() || (unallocated >= SMALL && unallocated >= usage.reserved / part);
        let limit = match oom {
            Some(oom) => limit_at(oom, device),
            None => without_error(process, device, analysis),
        };
        let what_if = WhatIfQuery {
            device: device.device,
            settings: settings.clone(),
            allowed: None,
            limit,
            oom: oom.map(|oom| oom.seq),
        };
        is_worth(WORTH_EXPLAINING).then(|| OomQuery {
            device: device.device,
            seq: oom.map_or(device.peak.seq, |oom| oom.seq),
            size: oom.map(|oom| oom.requested),
            what_if: (is_worth(WORTH_REPLAYING) && short && settings.native).then_some(what_if),
        })
    };
    devices.filter_map(query).collect()
}

/// Whether PyTorch's own limit refused the request. CUDA had the memory.
pub(crate) fn refused_by_pytorch(oom: &Oom) -> bool {
    // The largest rounding: 20 MiB pages of expandable segments.
    let asked = oom.requested.div_ceil(20 << 20).saturating_mul(20 << 20);
    oom.device_free.is_some_and(|free| free > asked.saturating_add(CUDA_KEEPS))
}

/// The memory that the caching allocator could have had at an error, in bytes: its reserved bytes, and the free bytes.
fn limit_at(oom: &Oom, device: &DeviceAnalysis) -> u64 {
    let reserved = oom.in_use.usage.reserved;
    match oom.device_free {
        // PyTorch's limit is unknown. The highest reserved bytes were within it.
        _ if refused_by_pytorch(oom) => device.peaks.reserved.max(reserved),
        Some(free) => reserved.saturating_add(free),
        None => reserved,
    }
}

/// The memory that the caching allocator could have had without an error. It is the device's memory minus what was in
/// use before and minus the peaks of other owners in this process. `u64::MAX` if the device's memory is unknown.
fn without_error(process: &Process, device: &DeviceAnalysis, analysis: &Analysis) -> u64 {
    let ordinal = u32::try_from(device.device).ok();
    let definition = ordinal.and_then(|ordinal| process.definitions().devices.get(&ordinal));
    let Some(definition) = definition.filter(|definition| definition.total > 0) else { return u64::MAX };
    let location = memtrace_replay::MemoryLocation::Device(device.device);
    let outside = analysis
        .owners
        .iter()
        .filter(|((l, owner), _)| *l == location && *owner != memtrace_replay::Owner::CachingAllocator);
    let outside: u64 = outside.map(|(_, usage)| usage.peak).sum();
    definition.total.saturating_sub(definition.used_before).saturating_sub(outside).max(device.peaks.reserved)
}

pub(crate) fn reserved_summary(reserved: &Reserved, locations: &Locations<'_>, names: &Names) -> ReservedSummary {
    ReservedSummary {
        allocated_bytes: reserved.allocated,
        rounding_bytes: reserved.rounding,
        pending_free_bytes: reserved.pending_free,
        releasable_bytes: reserved.releasable,
        blocked_bytes: reserved.blocked,
        largest_free_bytes: reserved.largest_free,
        segments: reserved.segments,
        blocked_segments: reserved.blocked_segments,
        blocked_by: reserved
            .blocked_by
            .iter()
            .map(|blocker| BlockingAllocation {
                segments: blocker.segments,
                segment_bytes: blocker.reserved,
                block_bytes: blocker.in_use,
                blocks: blocker.blocks,
                free_bytes: blocker.free,
                allocated_at: locations.stack(blocker.allocated_at.0, blocker.allocated_at.1),
                tensor_name: names.of_allocation(blocker.seq).map(|named| named.text()),
            })
            .collect(),
    }
}

/// `refused`: whether a limit of PyTorch's refused the request. Only a lower bound of that limit is known.
pub(crate) fn what_if_summary(what_if: &WhatIf, refused: bool) -> WhatIfSummary {
    let agreement = &what_if.agreement;
    WhatIfSummary {
        matched_blocks: agreement.blocks,
        matched_segment_events: agreement.segments,
        mismatch: agreement.difference.as_ref().map(|(seq, what)| format!("event {seq}: {what}")),
        limit_bytes: (what_if.limit < u64::MAX).then_some(what_if.limit),
        reserved_peak_bytes: agreement.peak_reserved,
        settings: what_if
            .outcomes
            .iter()
            .map(|outcome| ReplayedSetting {
                setting: outcome.setting.name.to_owned(),
                fits: outcome.fits.filter(|fits| *fits || !refused),
                fails_earlier: outcome.fails_earlier.is_some() && !refused,
                reserved_peak_bytes: outcome.peak_reserved,
            })
            .collect(),
    }
}

/// The second step's growth over the first, if optimizer state allocated in the first step is at least half of it.
pub(crate) fn growth_after_first_step(analysis: &DeviceAnalysis) -> Option<GrowthAfterFirstStep> {
    let first = analysis.table.first()?.peak();
    let (later, steps) = analysis.table.later();
    let later = later.peak();
    let kept = analysis.growth.kept(RunPart::FirstStep, Phase::Optimizer);
    let state: u64 =
        kept.iter().filter(|(c, _)| *c == Category::OptimizerState).map(|(_, kept)| kept.amount.bytes).sum();
    // The cause is stated only if it explains at least half of the growth.
    (steps > 0 && later > first && state * 2 >= later - first).then_some(GrowthAfterFirstStep {
        first_step_peak_bytes: first,
        later_steps_peak_bytes: later,
        optimizer_state_bytes: state,
    })
}

/// What would lower a point in time, largest saving first. Includes only suggestions whose conditions hold for this run.
pub(crate) fn suggestions(
    analysis: &DeviceAnalysis,
    state: &Composition,
    modules: &ModuleTree,
    definitions: &Definitions,
    table: &StackTable,
) -> Vec<SuggestionSummary> {
    let layers = modules.repeated.iter().max_by_key(|layers| layers.checkpointing_saves());
    let facts = facts(analysis, state, layers, definitions, table);
    let named = layers.map(|layers| format!("{} ({} of {})", layers.pattern(), layers.count, layers.class));
    let named = named.unwrap_or_default();
    let mut suggestions: Vec<SuggestionSummary> = suggestion_rules()
        .iter()
        .filter_map(|rule| {
            let saves = rule.saves(&facts)?;
            Some(SuggestionSummary {
                rule: rule.id,
                action: rule.action.replace("{layers}", &named),
                saves_bytes: saves,
                at_most: rule.at_most,
                evidence: format!("{} {}", rule.condition, figures_text(&facts)),
                method: rule.method.to_owned(),
            })
        })
        .collect();
    suggestions.sort_by_key(|suggestion| std::cmp::Reverse(suggestion.saves_bytes));
    suggestions
}

fn figures_text(facts: &MemoryFacts) -> String {
    let figures = [
        ("parameters", facts.parameters),
        ("gradients", facts.gradients),
        ("optimizer state", facts.optimizer_state),
        ("buckets", facts.buckets),
        ("activations", facts.activations),
        ("of these in layers", facts.layer_activations),
        ("autograd temporaries", facts.autograd_detail),
        ("inputs", facts.inputs),
        ("optimizer temporaries", facts.step_temporaries),
    ];
    let present = figures.iter().filter(|(_, bytes)| *bytes > 0);
    let present: Vec<String> = present.map(|(name, bytes)| format!("{name} {}", size_text(*bytes))).collect();
    format!("Allocated {}: {}.", size_text(facts.allocated), present.join(", "))
}

fn facts(
    analysis: &DeviceAnalysis,
    state: &Composition,
    layers: Option<&RepeatedModules>,
    definitions: &Definitions,
    table: &StackTable,
) -> MemoryFacts {
    let by_category = state.by_category();
    let of = |category: Category| by_category[category as usize].bytes;
    let in_model = |phase: Phase| matches!(phase, Phase::Forward | Phase::Backward | Phase::Recompute);
    let step_temporaries =
        || state.origins().filter(|(o, _)| o.category == Category::Temporary && o.phase == Phase::Optimizer);
    let multi_tensor = step_temporaries()
        .any(|(o, _)| definitions.walk(o.stack).any(|(_, f)| f.is_some_and(|f| f.name.starts_with("_multi_tensor_"))));
    let (later, _) = analysis.table.later();
    let first = analysis.table.first();
    let parts: Vec<&StepRows> = [Some(analysis.table.before()), first, Some(later)].into_iter().flatten().collect();
    let highest = |is_included: &dyn Fn(Phase) -> bool, parts: &[&StepRows]| {
        let rows = parts.iter().flat_map(|rows| Phase::ALL.iter().map(|&phase| (phase, rows.phases[phase as usize])));
        rows.filter(|(phase, _)| is_included(*phase)).map(|(_, row)| row.peak).max().unwrap_or(0)
    };
    let until_state = [Some(analysis.table.before()), first];
    let until_state: Vec<&StepRows> = until_state.into_iter().flatten().collect();
    let moments = || analysis.growth.sources(|s| s.category == Category::OptimizerState && s.phase == Phase::Optimizer);
    let keeps_moments = moments().iter().any(|(source, _)| {
        table
            .facts(source.stack)
            .optimizer
            .is_some_and(|o| o.state_per_parameter.is_some_and(|(noun, _)| noun == "moments"))
    });
    let largest =
        step_temporaries().filter_map(|(o, _)| state.largest_of(o)).map(|(bytes, _)| bytes).max().unwrap_or(0);
    MemoryFacts {
        allocated: state.usage.allocated,
        parameters: of(Category::Parameter),
        gradients: of(Category::Gradient),
        optimizer_state: of(Category::OptimizerState),
        buckets: of(Category::CommunicationBucket),
        activations: of(Category::Activation),
        autograd_detail: of(Category::AutogradDetail),
        inputs: of(Category::Input),
        step_temporaries: step_temporaries().map(|(_, amount)| amount.bytes).sum(),
        largest_step_temporary: largest,
        multi_tensor,
        in_optimizer: state.phase == Phase::Optimizer,
        in_model: in_model(state.phase),
        in_forward: state.phase == Phase::Forward,
        float32_parameters: all_float32(definitions, TensorKind::Parameter),
        float32_moments: keeps_moments && all_float32(definitions, TensorKind::OptimizerState),
        peak_outside_model: highest(&|phase| !in_model(phase), &parts),
        peak_outside_optimizer: highest(&|phase| phase != Phase::Optimizer, &parts),
        // Code that handles a caught error also counts for the first step, and runs after the state was allocated. So
        // other phases are excluded.
        peak_before_state: highest(&|phase| in_model(phase) || phase == Phase::Load, &until_state),
        trains: analysis.table.total().phases[Phase::Backward as usize].allocations > 0,
        layer_activations: layers.map_or(0, |layers| layers.activations),
        layer_outputs: layers.map_or(0, |layers| layers.outputs),
        running_layer: layers.map_or(0, |layers| layers.running),
        largest_layer: layers.map_or(0, |layers| layers.largest),
    }
}

/// Whether all tensors of a kind whose names were read are `float32`. Scalars such as step counters are ignored.
fn all_float32(definitions: &Definitions, kind: TensorKind) -> bool {
    let mut shapes = definitions
        .tensor_names
        .iter()
        .filter(|n| n.kind == kind && !n.shape.ends_with("[]"))
        .map(|n| &*n.shape)
        .peekable();
    shapes.peek().is_some() && shapes.all(|shape| shape.starts_with("float32["))
}
