//! Explains a point in time: why its memory use is high, and what would lower it. Converts the passes' results for the
//! summary.

use std::collections::BTreeMap;

use crate::beside;
use crate::step_estimate::StepEstimate;
use crate::summary::{
    BlockingAllocation, CategoryDifference, DeviceSummary, GrowthAfterFirstStep, LargerInputs, OomSummary, OutlierStep,
    ReplayedSetting, ReservedSummary, WhatIfSummary,
};
use memtrace_input::EventSource;
use memtrace_input::load::Process;
use memtrace_insight::StackSummary;
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::{
    Analysis, Category, ComparedInputs, Composition, DeviceAnalysis, FailedAllocation, Oom, OomQuery, OomReport,
    Outlier, Phase, ReplayedDevice, ReplayedMemory, Reserved, RunPart, SettingOutcome, WhatIf, WhatIfQuery,
};
use memtrace_insight::units::{signed_size_text, size_text};
use memtrace_replay::{AllocatorSettings, MemoryLocation, Names, Owner, OwnerUsage, Peak};
use memtrace_trace::ids::{ContextId, StackId};

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

/// The outliers of a step are reported if they hold at least 33.3 % (1/3) of the memory in use.
const OUTLIER_SHARE: u64 = 3;
/// The part of the growth that its text mentions if it is unexplained: 5 % (1/20).
const UNEXPLAINED: u64 = 20;
/// Growth after the first step is reported if it exceeds 1 % (1/100) of the first step's peak.
const SMALL_GROWTH: u64 = 100;
/// Inputs that exceed the median by at least 25 % (1/4) are reported.
const LARGER_INPUTS: u64 = 4;
/// Reserved memory at the peak is explained if at least 5 % (1/20) is not in use.
const WORTH_EXPLAINING: u64 = 20;
/// The allocator's policy is replayed if at least 12.5 % (1/8) is not in use.
const WORTH_REPLAYING: u64 = 8;
/// Less unused reserved memory than this is never explained, in bytes.
const SMALL: u64 = 64 << 20;
/// Recordings with more events are replayed only on request.
const MANY_EVENTS: u64 = 4_000_000;
/// Less memory of CUDA contexts and other processes than this is not worth a remark, in bytes.
const MANY_OTHERS: u64 = 2 << 30;
/// If the rest of a step is unknown, the pieces of the free memory explain an error only if they are at least 12.5 %
/// (1/8) of what the allocator could have had.
const MANY_PIECES: u64 = 8;
/// If more than this was free beside a failed request, CUDA did not refuse it. In bytes.
const CUDA_KEEPS: u64 = 64 << 20;

/// The error to explain: the last one if it ended the process, else the first. `None` without errors.
pub(crate) fn oom_to_explain<'a>(analysis: &'a DeviceAnalysis, process: &Process) -> Option<&'a Oom> {
    let failed = process.exit().success() != Some(true);
    let last = analysis.ooms.last().filter(|oom| failed && analysis.ooms.unwound_to_the_end() && oom.in_use.seq > 0);
    last.or_else(|| analysis.ooms.all().next())
}

/// The allocator settings of the process.
pub(crate) fn allocator_settings(process: &Process) -> AllocatorSettings {
    let env = &process.info().env;
    let conf = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().find_map(|name| env.get(*name));
    AllocatorSettings::parse(conf.map_or("", String::as_str))
}

/// The memory that the caching allocator could have had, in bytes: at the error to explain, else at any time. `None` if
/// the device's memory is unknown.
pub(crate) fn allocator_limit(process: &Process, device: &DeviceAnalysis, analysis: &Analysis) -> Option<u64> {
    match oom_to_explain(device, process) {
        Some(oom) => Some(limit_at(&oom.allocation(), &device.statistics.highest)),
        None => memory_limit(process, device.device, &device.statistics.highest, &analysis.owners),
    }
}

/// The points in time that may have to be explained: of each device its errors, else its peak if much reserved memory
/// is not in use then. Of several errors, the end of the recording shows which one [`oom_to_explain`] takes.
pub(crate) fn oom_queries(process: &Process, memory: &ReplayedMemory, replaying: Replaying) -> Vec<OomQuery> {
    let settings = allocator_settings(process);
    let always = replaying == Replaying::Always;
    let short = always || process.recording().event_count() <= MANY_EVENTS;
    let what_if = |device: i16, limit: Option<u64>, oom: Option<u64>| {
        let limit = limit.unwrap_or(u64::MAX);
        let query = WhatIfQuery { device, settings: settings.clone(), allowed: None, limit, oom };
        (short && settings.native).then_some(query)
    };
    let of_error = |device: &ReplayedDevice, oom: &FailedAllocation| OomQuery {
        device: device.device,
        seq: oom.seq,
        continued: short.then(|| settings.clone()),
        what_if: what_if(device.device, Some(limit_at(oom, &device.highest)), Some(oom.seq)),
    };
    let of_peak = |device: &ReplayedDevice| {
        let (seq, usage) = device.peak;
        let unallocated = usage.reserved.saturating_sub(usage.allocated);
        let is_worth = |part: u64| always || (unallocated >= SMALL && unallocated >= usage.reserved / part);
        let limit = || memory_limit(process, device.device, &device.highest, &memory.owners);
        is_worth(WORTH_EXPLAINING).then(|| OomQuery {
            device: device.device,
            seq,
            continued: None,
            what_if: is_worth(WORTH_REPLAYING).then(|| what_if(device.device, limit(), None)).flatten(),
        })
    };
    let failed = process.exit().success() != Some(true);
    let devices = memory.devices.iter().filter(|one| one.source == EventSource::Torch && one.peak.0 > 0);
    let queries = |device: &ReplayedDevice| match &device.ooms {
        Some((first, last)) if failed && first.seq != last.seq => vec![of_error(device, first), of_error(device, last)],
        Some((first, _)) => vec![of_error(device, first)],
        None => of_peak(device).into_iter().collect(),
    };
    devices.flat_map(queries).collect()
}

/// The explanation of a device: of the error to explain, else of the peak.
pub(crate) fn oom_report<'a>(
    device: &DeviceAnalysis,
    process: &Process,
    reports: impl IntoIterator<Item = &'a OomReport>,
) -> Option<&'a OomReport> {
    let seq = oom_to_explain(device, process).map_or(device.states.peak.seq, |oom| oom.seq);
    reports.into_iter().find(|report| (report.device, report.seq) == (device.device, seq))
}

/// Whether PyTorch's own limit refused the request. CUDA had the memory.
pub(crate) fn refused_by_pytorch(oom: &FailedAllocation) -> bool {
    // The largest rounding: 20 MiB pages of expandable segments.
    let asked = oom.requested.div_ceil(20 << 20).saturating_mul(20 << 20);
    oom.device_free.is_some_and(|free| free > asked.saturating_add(CUDA_KEEPS))
}

/// The memory that the caching allocator could have had at an error, in bytes: its reserved bytes, and the free bytes.
/// `highest` are the highest totals of the device.
pub(crate) fn limit_at(oom: &FailedAllocation, highest: &Peak) -> u64 {
    let reserved = oom.usage.reserved;
    match oom.device_free {
        // PyTorch's limit is unknown. The highest reserved bytes were within it.
        _ if refused_by_pytorch(oom) => highest.reserved.max(reserved),
        Some(free) => reserved.saturating_add(free),
        None => reserved,
    }
}

/// The memory that the caching allocator could have had without an error. It is the device's memory minus what was in
/// use before and minus the peaks of other owners in this process. `None` if the device's memory is unknown.
pub(crate) fn memory_limit(
    process: &Process,
    device: i16,
    highest: &Peak,
    owners: &BTreeMap<(MemoryLocation, Owner), OwnerUsage>,
) -> Option<u64> {
    let definition = process.definitions().devices.get(&u32::try_from(device).ok()?);
    let definition = definition.filter(|definition| definition.total > 0)?;
    let location = MemoryLocation::Device(device);
    let outside = owners.iter().filter(|((l, owner), _)| *l == location && *owner != Owner::CachingAllocator);
    let outside: u64 = outside.map(|(_, usage)| usage.peak).sum();
    let available = definition.total.saturating_sub(definition.used_before).saturating_sub(outside);
    Some(available.max(highest.reserved))
}

/// The meaning of an out-of-memory error that ended the process if no rule found an issue. `None` without such an
/// error.
pub(crate) fn no_issue_remark(devices: &[DeviceSummary]) -> Option<String> {
    let explained = |device: &DeviceSummary| device.ooms.get(device.explained_oom?).cloned();
    let (device, oom) = devices
        .iter()
        .find_map(|device| Some((device, explained(device)?)))
        .filter(|(device, oom)| device.source.starts_with("torch") && oom.fatal != Some(false))?;
    let free = oom.device_free_bytes?;
    let reason = device.server_only().and_then(|server| server.error_reason.clone());
    let misfit = reason.unwrap_or_else(|| {
        let misfit = match oom.in_use.phase {
            Phase::Load => "what the program loads does not fit",
            Phase::Optimizer => "model, gradients and optimizer state do not fit",
            _ => "model and batch do not fit",
        };
        misfit.to_owned()
    });
    let others = oom.contexts_and_other_processes_bytes.unwrap_or(0);
    let are_many = others >= MANY_OTHERS && device.total_bytes.is_some_and(|total| others >= total / 10);
    let text = if oom.refused_by_pytorch {
        format!("{misfit} within PyTorch's limit")
    } else if is_in_pieces(device, &oom, free) {
        "the memory that is free is in pieces too small for the request".to_owned()
    } else if oom.held_back_bytes.is_some() {
        format!("{misfit} within the limit that a library sets on this process")
    } else if let Some(pool) = oom
        .largest_outside
        .as_ref()
        .filter(|pool| pool.explains(oom.short_bytes.unwrap_or(oom.requested_bytes), oom.step_estimate.as_ref()))
    {
        pool.sentence(device.total_bytes)
    } else if are_many {
        let text = format!("{misfit} beside CUDA contexts and other processes ({})", size_text(others));
        match beside::text(&oom.processes_beside, oom.short_bytes.unwrap_or(0)) {
            Some(beside) => format!("{text}. {beside}"),
            None => text,
        }
    } else {
        misfit
    };
    Some(format!("No leak or misuse found: {text}."))
}

/// Whether the pieces of the free memory are the reason of an error. Together they suffice for the request, and the
/// rest of the step fits. If that is unknown, they are much of what the allocator could have had.
fn is_in_pieces(device: &DeviceSummary, oom: &OomSummary, free: u64) -> bool {
    let settings = device.what_if.iter().flat_map(|what_if| &what_if.settings);
    let step_fits: Vec<bool> = settings.filter_map(|setting| setting.step_fits).collect();
    let needed = oom.step_estimate.as_ref().and_then(|estimate| estimate.needed_bytes);
    let pieces = oom.reserved_but_unallocated_bytes.saturating_add(free);
    are_pieces_to_blame(oom.in_use.totals.allocated_bytes, pieces, oom.requested_bytes, needed, &step_fits)
}

/// `step_fits` says by replayed allocator setting whether the whole step fits, where it is known.
fn are_pieces_to_blame(allocated: u64, pieces: u64, requested: u64, needed: Option<u64>, step_fits: &[bool]) -> bool {
    let available = allocated.saturating_add(pieces);
    let suffices = pieces >= requested && needed.is_none_or(|needed| needed <= available);
    suffices && (step_fits.contains(&true) || step_fits.is_empty() && pieces >= available / MANY_PIECES)
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

/// `refused` is true if a limit of PyTorch's refused the request. Only a lower bound of that limit is known. `estimate`
/// is the memory that the interrupted step needs.
pub(crate) fn what_if_summary(what_if: &WhatIf, refused: bool, estimate: Option<&StepEstimate>) -> WhatIfSummary {
    let agreement = &what_if.agreement;
    let setting = |outcome: &SettingOutcome| {
        let fits = outcome.fits.filter(|fits| *fits || !refused);
        let short = step_short(outcome, what_if.limit, estimate).filter(|_| !refused && fits == Some(true));
        ReplayedSetting {
            setting: outcome.setting.name.to_owned(),
            fits,
            fails_earlier: outcome.fails_earlier.is_some() && !refused,
            reserved_peak_bytes: outcome.peak_reserved,
            step_fits: short.map(|short| short == 0),
            step_short_bytes: short.filter(|short| *short > 0),
            step_reserved_peak_bytes: outcome.step.filter(|_| short == Some(0)).map(|step| step.peak_reserved),
        }
    };
    WhatIfSummary {
        matched_blocks: agreement.blocks,
        matched_segment_events: agreement.segments,
        mismatch: agreement.difference.as_ref().map(|(seq, what)| format!("event {seq}: {what}")),
        limit_bytes: (what_if.limit < u64::MAX).then_some(what_if.limit),
        reserved_peak_bytes: agreement.peak_reserved,
        settings: what_if.outcomes.iter().map(setting).collect(),
        advice: None,
    }
}

/// The bytes that the device lacks for the interrupted step under one setting; 0 if the step fits. `None` if the
/// recording does not show whether it fits.
fn step_short(outcome: &SettingOutcome, limit: u64, estimate: Option<&StepEstimate>) -> Option<u64> {
    match outcome.step {
        Some(step) => Some(step.short),
        // A lower bound can only show that the step does not fit.
        None => estimate?.least().checked_sub(limit).filter(|short| *short > 0),
    }
}

/// The later steps' growth over the first, if optimizer state that the first step allocated explains it.
pub(crate) fn growth_after_first_step(analysis: &DeviceAnalysis) -> Option<GrowthAfterFirstStep> {
    let first = analysis.table.first()?.peak();
    let (later, steps) = analysis.table.later();
    let later = later.peak();
    let kept = analysis.growth.kept(RunPart::FirstStep, Phase::Optimizer);
    let state: u64 =
        kept.iter().filter(|(c, _)| *c == Category::OptimizerState).map(|(_, kept)| kept.amount.bytes).sum();
    let growth = later.saturating_sub(first);
    let peak = &analysis.states.peak;
    // The state is in use in the same phase of later steps, which need not be the phase of the first step's peak.
    let same_phase = Some(&analysis.states.first_step[peak.phase as usize]);
    let same_phase = same_phase.filter(|first| first.seq > 0 && peak.usage.allocated == later);
    let by_category = same_phase.map_or(Vec::new(), |first| differences(first, peak));
    let state_at_peak =
        by_category.iter().find(|one| one.category == Category::OptimizerState).map_or(0, |one| one.bytes);
    // The state explains at least half of the growth, and most of the state is part of it. An out-of-memory error can
    // come before a later step has reached its peak.
    let is_at_peak = same_phase.is_none() || state_at_peak > 0 && state_at_peak.unsigned_abs() * 2 >= growth;
    let is_cause = is_at_peak && state * 2 >= growth && (growth * 2 >= state || analysis.ooms.count() > 0);
    let phase = same_phase.map(|first| (peak.phase, first.usage.allocated));
    (steps > 0 && growth > first / SMALL_GROWTH && is_cause).then(|| GrowthAfterFirstStep {
        first_step_peak_bytes: first,
        later_steps_peak_bytes: later,
        optimizer_state_bytes: state,
        text: growth_text((first, later), state, phase, &by_category),
        by_category,
    })
}

/// The categories that differ between two points in time, largest difference first. The differences add up to that of
/// the allocated bytes.
fn differences(from: &Composition, to: &Composition) -> Vec<CategoryDifference> {
    let (from, to) = (from.by_category(), to.by_category());
    let of = |category: Category| to[category as usize].bytes as i64 - from[category as usize].bytes as i64;
    let all = Category::ALL.into_iter().map(|category| CategoryDifference { category, bytes: of(category) });
    let mut all: Vec<_> = all.filter(|difference| difference.bytes != 0).collect();
    all.sort_by_key(|difference| (std::cmp::Reverse(difference.bytes.unsigned_abs()), difference.category));
    all
}

/// The sentence about the growth from one peak to the other. `phase` is the phase of the later peak, and its peak in
/// the first step. With it, the figures add up; without it, the sentence names what the state does not explain.
fn growth_text(
    (first, later): (u64, u64),
    state: u64,
    phase: Option<(Phase, u64)>,
    by_category: &[CategoryDifference],
) -> String {
    let growth = later.saturating_sub(first);
    let is_large = |bytes: i64| bytes.unsigned_abs() > growth / UNEXPLAINED;
    let base = phase.map_or(first, |(_, before)| before);
    let rest = later as i64 - base as i64 - state as i64;
    let mut text = format!(
        "Why later steps peak {} higher than step 0 ({} instead of {}): the optimizer allocated {} of state at the end \
         of step 0",
        size_text(growth),
        size_text(later),
        size_text(first),
        size_text(state),
    );
    if let Some((phase, before)) = phase.filter(|(_, before)| is_large(first as i64 - *before as i64)) {
        text.push_str(&format!(
            ", beside which {} peaks at {} instead of {}",
            phase.name(),
            size_text(later),
            size_text(before)
        ));
    }
    // The state that the first step's peak has already is no growth.
    let beside_state = |difference: &CategoryDifference| match difference.category {
        Category::OptimizerState => ("optimizer state in use at both peaks", difference.bytes - state as i64),
        category => (category.plural(), difference.bytes),
    };
    let named: Vec<(&str, i64)> = by_category.iter().map(beside_state).filter(|(_, bytes)| is_large(*bytes)).collect();
    let unnamed = rest - named.iter().map(|(_, bytes)| bytes).sum::<i64>();
    let others = Some(("of others", unnamed)).filter(|(_, bytes)| is_large(*bytes) && !by_category.is_empty());
    let clause = |(what, bytes): (&str, i64)| format!("{} {what}", signed_size_text(bytes));
    let named: Vec<String> = named.into_iter().chain(others).map(clause).collect();
    if !named.is_empty() {
        text.push_str(&format!("; further differences between the peaks: {}", named.join(", ")));
    } else if rest > 0 && is_large(rest) {
        text.push_str(&format!("; the other {} are unexplained", size_text(rest.unsigned_abs())));
    }
    text.push('.');
    text
}

/// The place that needs far more in the explained step than in others, if what the step's outliers hold is much of the
/// memory in use.
pub(crate) fn outlier_step(
    analysis: &DeviceAnalysis,
    explained: Option<&Oom>,
    locations: &Locations<'_>,
) -> Option<OutlierStep> {
    let composition = explained.map_or(&analysis.states.peak, |oom| &oom.in_use);
    let step = explained.map_or(analysis.states.peak.position.as_ref()?.step, |oom| oom.position.step)?;
    if let Some((stack, outlier)) = analysis.outlier_steps.larger_batch(step) {
        return (larger_inputs(analysis, step).is_none())
            .then(|| larger_batch(composition, step, locations.stack(stack, ContextId::NONE), (stack, outlier)));
    }
    let mut held = 0;
    let mut most: Option<(u64, StackId, ContextId, Outlier)> = None;
    for (origin, amount) in composition.origins() {
        let Some(outlier) = analysis.outlier_steps.in_step(origin.stack, step) else { continue };
        held += amount.bytes;
        if most.is_none_or(|(bytes, ..)| amount.bytes > bytes) {
            most = Some((amount.bytes, origin.stack, origin.context, outlier));
        }
    }
    let (_, stack, context, outlier) = most.filter(|_| held >= composition.usage.allocated / OUTLIER_SHARE)?;
    let place = locations.stack(stack, context);
    let Outlier { bytes, others } = outlier;
    let text = outlier_text(outlier, &place);
    Some(OutlierStep { step, place, bytes, other_steps_bytes: others, held_bytes: held, text })
}

/// The clause that compares the request at `place` with those of other steps.
fn outlier_text(Outlier { bytes, others }: Outlier, place: &StackSummary) -> String {
    format!(
        "{} at {}, {} times the most of any other step ({})",
        size_text(bytes),
        place.location,
        bytes / others.max(1),
        size_text(others)
    )
}

/// The step whose first operation, at `place`, shows that its batch is larger.
fn larger_batch(
    composition: &Composition,
    step: u32,
    place: StackSummary,
    (stack, outlier): (StackId, Outlier),
) -> OutlierStep {
    let of_first = composition.origins().filter(|(origin, _)| origin.stack == stack);
    let Outlier { bytes, others } = outlier;
    let text = format!("its batch is larger: its first operation allocates {}", outlier_text(outlier, &place));
    let held_bytes = of_first.map(|(_, amount)| amount.bytes).sum();
    OutlierStep { step, place, bytes, other_steps_bytes: others, held_bytes, text }
}

/// The inputs of this step, if they are clearly larger than the median of the other steps.
pub(crate) fn larger_inputs(analysis: &DeviceAnalysis, step: u32) -> Option<LargerInputs> {
    let ComparedInputs { bytes, median } =
        analysis.step_inputs.compare(step, &analysis.diagnostics.growing_stacks())?;
    (bytes >= median + median / LARGER_INPUTS).then_some(LargerInputs {
        step,
        input_bytes: bytes,
        median_input_bytes: median,
        held: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_optimizer_state_does_not_explain_is_reported() {
        const MIB: u64 = 1 << 20;
        let explained = "Why later steps peak 288 MiB higher than step 0 (1.75 GiB instead of 1.47 GiB): the optimizer \
                         allocated 280 MiB of state at the end of step 0.";
        assert_eq!(growth_text((1504 * MIB, 1792 * MIB), 280 * MIB, None, &[]), explained);
        let peaks = (439 * MIB, 564 * MIB);
        let text = growth_text(peaks, 70 * MIB, None, &[]);
        assert!(
            text.ends_with("allocated 70.0 MiB of state at the end of step 0; the other 55.0 MiB are unexplained.")
        );
        let of = |category, mib: i64| CategoryDifference { category, bytes: mib << 20 };
        let by_category =
            [of(Category::OptimizerState, 70), of(Category::Activation, 90), of(Category::Temporary, -35)];
        let text = growth_text(peaks, 70 * MIB, Some((Phase::Backward, 439 * MIB)), &by_category);
        let expected = "70.0 MiB of state at the end of step 0; further differences between the peaks: +90.0 MiB \
                        activations, -35.0 MiB temporaries.";
        assert!(text.ends_with(expected), "{text}");
        let by_category = [of(Category::OptimizerState, 225)];
        let text = growth_text(peaks, 225 * MIB, Some((Phase::Backward, 339 * MIB)), &by_category);
        let expected =
            "225 MiB of state at the end of step 0, beside which backward peaks at 564 MiB instead of 339 MiB.";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn free_pieces_explain_an_error_only_if_the_step_fits_without_them() {
        let cases = [
            ("pieces smaller than the request", 90, 5, None, &[][..], false),
            ("few pieces, and nothing is known of the rest", 90, 10, None, &[], false),
            ("many pieces", 80, 20, None, &[], true),
            ("few pieces, and the step fits with another setting", 90, 10, Some(98), &[true, false], true),
            ("the step does not fit with any setting", 80, 20, None, &[false], false),
            ("the step needs more than there is", 80, 20, Some(120), &[], false),
        ];
        for (what, allocated, pieces, needed, step_fits, expected) in cases {
            assert_eq!(are_pieces_to_blame(allocated, pieces, 8, needed, step_fits), expected, "{what}");
        }
    }
}
