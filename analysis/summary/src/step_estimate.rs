//! The memory that an interrupted step would still have needed: from an earlier step, from the modules that it had not
//! called, or from the optimizer's state.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use memtrace_insight::passes::{
    Category, DeviceAnalysis, EarlierIteration, MissingModules, MissingSiblings, Oom, Phase, RestOfStep, StackTable,
    parameter_bytes, state_needed,
};
use memtrace_insight::units::size_text;

/// The maximum number of uncalled modules that are named.
const NAMED: usize = 4;
/// An estimate must exceed what the failed request itself shows by 2 % (1/50).
const MIN_GAIN: u64 = 50;
/// The size of a block for a step counter, in bytes.
const STEP_COUNTER: u64 = 512;

/// The memory that an interrupted step would still have needed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StepEstimate {
    /// The highest number of allocated bytes that the whole step needs. Absent if the recording does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needed_bytes: Option<u64>,
    /// Whether `needed_bytes` is a lower bound, because the bytes of some parts are unknown. Absent if it is not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_least: bool,
    /// The same figure if the optimizer updates all parameters at once (`foreach=True`, the default on CUDA). Absent if
    /// it is not higher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needed_with_foreach_bytes: Option<u64>,
    /// The bytes that the caching allocator could have had: what it had reserved, and what was free on the device.
    /// Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// The source of the figures.
    pub basis: StepEstimateBasis,
    /// The step that shows the rest of the interrupted one. Absent unless `basis` is `earlier_step`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earlier_step: Option<u32>,
    /// The parts of the step that had not run when the request failed.
    pub still_to_come: Vec<StepPart>,
}

/// The source of the figures of a [`StepEstimate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StepEstimateBasis {
    /// A complete step before, which made the same requests.
    EarlierStep,
    /// An iteration before in the same step, which made the same requests.
    EarlierIteration,
    /// The activations of modules of the same class.
    SiblingModules,
    /// The optimizer's state for each parameter.
    OptimizerState,
    /// The names of the model's modules. There are no figures.
    #[default]
    ModuleNames,
}

/// A part of a step that was still to come.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StepPart {
    /// The part, as text.
    pub text: String,
    /// The bytes that the part would have added to the allocated ones. Absent if they are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The evidence for the bytes, as text. Absent without bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
}

impl StepPart {
    fn new(text: String, bytes: u64, evidence: String) -> StepPart {
        StepPart { text, bytes: Some(bytes), evidence: Some(evidence) }
    }

    fn without_bytes(text: String) -> StepPart {
        StepPart { text, bytes: None, evidence: None }
    }
}

impl StepEstimate {
    /// The estimate in one sentence.
    pub fn text(&self) -> String {
        let part = |part: &StepPart| match part.bytes.filter(|_| self.still_to_come.len() > 1) {
            Some(bytes) => format!("{} ({})", part.text, size_text(bytes)),
            None => part.text.clone(),
        };
        let parts: Vec<String> = self.still_to_come.iter().map(part).collect();
        let mut text = parts.join(", ");
        let Some(needed) = self.needed_bytes else { return text };
        let whole = match self.basis {
            StepEstimateBasis::EarlierIteration => "the iteration",
            _ => "a full step",
        };
        let bound = if self.at_least { "at least" } else { "about" };
        text.push_str(&format!(": {whole} needs {bound} {}", size_text(needed)));
        if let Some(with) = self.needed_with_foreach_bytes {
            text.push_str(&format!(", or {} with foreach=True (the default)", size_text(with)));
        }
        if let Some(available) = self.available_bytes {
            text.push_str(&format!("; the allocator could have {}", size_text(available)));
        }
        text
    }

    /// The lowest number of allocated bytes that the whole step needs.
    pub(crate) fn least(&self) -> u64 {
        self.needed_bytes.unwrap_or(0)
    }
}

/// The memory that the step of the out-of-memory error `oom` would still have needed. `rest` is the rest of the step
/// that an earlier iteration shows. `available` has the bytes that the allocator could have had. `None` if the
/// recording shows nothing of it.
pub(crate) fn step_estimate(
    analysis: &DeviceAnalysis,
    oom: &Oom,
    table: &StackTable,
    rest: Option<&RestOfStep>,
    missing: impl FnOnce() -> MissingModules,
    available: Option<u64>,
) -> Option<StepEstimate> {
    let estimate = match rest {
        Some(rest) => Some(from_earlier_iteration(oom, rest)),
        None if oom.phase == Phase::Optimizer => from_optimizer(analysis, oom, table),
        None if oom.phase == Phase::Forward => from_modules(oom, &missing(), available),
        None => None,
    };
    estimate.map(|estimate| StepEstimate {
        available_bytes: available.filter(|_| estimate.needed_bytes.is_some()),
        ..estimate
    })
}

fn is_first_step(oom: &Oom) -> bool {
    oom.position.step.is_none_or(|step| step == 0)
}

fn from_earlier_iteration(oom: &Oom, rest: &RestOfStep) -> StepEstimate {
    let needed = rest.peak.saturating_sub(rest.uncertain);
    let more = needed.saturating_sub(oom.in_use.usage.allocated);
    let (basis, earlier_step, what) = match rest.taken_from {
        EarlierIteration::Step(step) => {
            (StepEstimateBasis::EarlierStep, Some(step), format!("what step {step} did from this request on"))
        }
        EarlierIteration::InSameStep => {
            (StepEstimateBasis::EarlierIteration, None, "what the iteration before did from this request on".to_owned())
        }
    };
    let evidence = "the requests and frees of that iteration, applied to the blocks in use".to_owned();
    StepEstimate {
        needed_bytes: Some(needed),
        at_least: rest.uncertain > 0,
        basis,
        earlier_step,
        still_to_come: vec![StepPart::new(what, more, evidence)],
        ..StepEstimate::default()
    }
}

/// The state that the optimizer had not allocated in its first step, and the next step's peak with all of it.
fn from_optimizer(analysis: &DeviceAnalysis, oom: &Oom, table: &StackTable) -> Option<StepEstimate> {
    if !is_first_step(oom) {
        return None;
    }
    let optimizer = table.facts(oom.requested_at.0).optimizer?;
    let (noun, each) = optimizer.state_per_parameter?;
    let state = state_needed(&analysis.growth, table)
        .or_else(|| Some(parameter_bytes(&analysis.growth)?.0 * u64::from(each)))?;
    let allocated = oom.in_use.usage.allocated;
    let in_use = oom.in_use.by_category()[Category::OptimizerState as usize].bytes;
    let missing = state.checked_sub(in_use).filter(|missing| *missing > 0)?;
    let with_state = allocated.saturating_add(missing);
    let rows = analysis.table.first()?;
    let in_model = [Phase::Forward, Phase::Backward, Phase::Recompute];
    let highest = in_model.iter().map(|phase| rows.phases[*phase as usize].peak).max().unwrap_or(0);
    let later = highest.saturating_add(state);
    let needed = with_state.max(later);
    // A fused or capturable optimizer keeps its step counters on the device. It works without these temporaries.
    let counts_on_device = oom
        .in_use
        .origins()
        .filter(|(origin, _)| origin.category == Category::OptimizerState)
        .any(|(origin, _)| oom.in_use.largest_of(origin).is_some_and(|(bytes, _)| bytes <= STEP_COUNTER));
    let temporaries = optimizer.foreach_temporaries.filter(|_| !counts_on_device);
    let with_foreach = temporaries.map(|copies| with_state + state / u64::from(each) * u64::from(copies));
    let mut parts = vec![StepPart::new(
        format!("the rest of the optimizer's {noun}"),
        missing,
        format!("{} for each parameter with a gradient: {} in all", noun, size_text(state)),
    )];
    if later > with_state {
        parts.push(StepPart::new(
            format!("the next forward and backward pass beside all {noun}"),
            later - with_state,
            format!("they reached {} in the first step, without the {noun}", size_text(highest)),
        ));
    }
    Some(StepEstimate {
        needed_bytes: Some(needed),
        at_least: true,
        needed_with_foreach_bytes: with_foreach.filter(|with| *with > needed),
        basis: StepEstimateBasis::OptimizerState,
        still_to_come: parts,
        ..StepEstimate::default()
    })
}

/// The modules that the forward pass had not called. A lower bound that the allocator could have had explains nothing,
/// so it is left out.
fn from_modules(oom: &Oom, missing: &MissingModules, available: Option<u64>) -> Option<StepEstimate> {
    let allocated = oom.in_use.usage.allocated;
    let shown = allocated.saturating_add(oom.requested);
    let needed = missing.siblings.as_ref().map(|siblings| {
        let rest = siblings.rest_of_running.max(oom.requested);
        let at_end =
            allocated.saturating_add(rest).saturating_add(siblings.each.saturating_mul(siblings.missing as u64));
        siblings.peak.map_or(at_end, |peak| peak.max(at_end))
    });
    let needed = needed.filter(|needed| needed.saturating_sub(shown) >= shown / MIN_GAIN);
    let needed = needed.filter(|needed| available.is_none_or(|available| *needed > available));
    let mut parts: Vec<StepPart> = Vec::new();
    if let Some(siblings) = missing.siblings.as_ref().filter(|_| needed.is_some()) {
        parts.extend(parts_of(siblings, oom));
    }
    // Modules that complete steps never called will not be called.
    let uncalled = if is_first_step(oom) { &missing.uncalled[..] } else { &[] };
    let named = uncalled.iter().take(NAMED);
    parts.extend(named.map(|(path, class)| StepPart::without_bytes(format!("{path} ({class})"))));
    if let Some(more) = uncalled.len().checked_sub(NAMED).filter(|more| *more > 0) {
        parts.push(StepPart::without_bytes(format!("{more} more modules")));
    }
    if parts.is_empty() {
        return None;
    }
    parts.push(StepPart::without_bytes("in training the backward pass and the optimizer".to_owned()));
    Some(StepEstimate {
        needed_bytes: needed,
        at_least: needed.is_some(),
        basis: match needed {
            Some(_) => StepEstimateBasis::SiblingModules,
            None => StepEstimateBasis::ModuleNames,
        },
        still_to_come: parts,
        ..StepEstimate::default()
    })
}

fn parts_of(siblings: &MissingSiblings, oom: &Oom) -> Vec<StepPart> {
    let MissingSiblings { pattern, class, count, missing, complete, each, rest_of_running, .. } = siblings;
    let evidence = format!("the mean of {complete} complete {class}: {}", size_text(*each));
    let mut parts = vec![StepPart::new(
        format!("the rest of the running {class}"),
        (*rest_of_running).max(oom.requested),
        evidence.clone(),
    )];
    if *missing > 0 {
        let what = format!("{missing} of {count} {class} in {pattern}");
        parts.push(StepPart::new(what, each.saturating_mul(*missing as u64), evidence));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_sentence_has_figures_only_where_they_are_known() {
        let step = StepEstimate {
            needed_bytes: Some(40 * GIB),
            available_bytes: Some(24 * GIB),
            basis: StepEstimateBasis::EarlierStep,
            earlier_step: Some(3),
            still_to_come: vec![StepPart::new("what step 3 did from this request on".into(), GIB, String::new())],
            ..StepEstimate::default()
        };
        let expected = "what step 3 did from this request on: a full step needs about 40.0 GiB; the allocator could \
                        have 24.0 GiB";
        assert_eq!(step.text(), expected);
        let head = StepPart::without_bytes("lm_head (Linear)".into());
        let modules = StepEstimate {
            needed_bytes: Some(3 * GIB),
            at_least: true,
            basis: StepEstimateBasis::SiblingModules,
            still_to_come: vec![StepPart::new("2 of 12 Block in h.*".into(), GIB, String::new()), head.clone()],
            ..StepEstimate::default()
        };
        let expected = "2 of 12 Block in h.* (1.00 GiB), lm_head (Linear): a full step needs at least 3.00 GiB";
        assert_eq!(modules.text(), expected);
        let names = StepEstimate { still_to_come: vec![head], ..StepEstimate::default() };
        assert_eq!(names.text(), "lm_head (Linear)");
        let optimizer = StepEstimate {
            needed_bytes: Some(3 * GIB),
            at_least: true,
            needed_with_foreach_bytes: Some(4 * GIB),
            basis: StepEstimateBasis::OptimizerState,
            still_to_come: vec![StepPart::new("the rest of the optimizer's moments".into(), GIB, String::new())],
            ..StepEstimate::default()
        };
        let expected = "the rest of the optimizer's moments: a full step needs at least 3.00 GiB, or 4.00 GiB with \
                        foreach=True (the default)";
        assert_eq!(optimizer.text(), expected);
    }
}
