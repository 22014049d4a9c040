//! The phase of an event, and the program's position at it.

use memtrace_input::KeptPosition;
use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::FrameId;
use memtrace_trace::named;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules::{Meaning, PhaseRuleId};

named! {
    serde
    /// The phase in which the program is.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize, JsonSchema)]
    pub enum Phase {
        /// Building, moving and filling models: everything before the first forward pass.
        Load => "load",
        /// Bringing a batch to the device.
        Data => "data",
        /// The forward pass, including the loss.
        Forward => "forward",
        /// The autograd engine.
        Backward => "backward",
        /// Forward computations that activation checkpointing repeats during backward.
        Recompute => "recompute",
        /// The optimizer, including clipping and clearing gradients.
        Optimizer => "optimizer",
        /// Forward passes that no backward pass follows and that are neither of the next two: evaluation, teachers.
        Eval => "eval",
        /// Generation: a model that computes one token after the other.
        Generate => "generate",
        /// The collection of experience for reinforcement learning, between parts of the training.
        Rollout => "rollout",
        /// Anything else.
        #[default]
        Other => "other",
    }
}

impl Phase {
    /// Whether the phase runs models, gradients or optimizers.
    pub const fn computes(self) -> bool {
        self.is_forward_only() || matches!(self, Phase::Forward | Phase::Backward | Phase::Optimizer | Phase::Recompute)
    }

    /// Whether models compute what no backward pass follows: an evaluation, generation or a rollout.
    #[inline]
    pub const fn is_forward_only(self) -> bool {
        matches!(self, Phase::Eval | Phase::Generate | Phase::Rollout)
    }
}

/// The phase of an event and the evidence for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventClassification {
    /// The phase.
    pub phase: Phase,
    /// The rule that decided it.
    pub rule: PhaseRuleId,
    /// The frame that the rule matched; `NONE` if a node, a flag or the position in the program decided.
    pub evidence: FrameId,
    pub(super) meaning: Option<Meaning>,
    /// Whether the classification depends on the stack, the node and the flags only, not on the program's position.
    pub(super) is_position_independent: bool,
    /// Whether the autograd engine caused the event.
    pub(super) in_engine: bool,
}

impl EventClassification {
    #[cfg(test)]
    pub(crate) fn for_tests(phase: Phase, rule: PhaseRuleId) -> EventClassification {
        EventClassification {
            phase,
            rule,
            evidence: FrameId::NONE,
            meaning: None,
            is_position_independent: true,
            in_engine: false,
        }
    }

    /// Whether this is a free that only the position in the program ties to a phase. `older` means that the block is
    /// older than the current step. If no allocation follows such a free, it belongs to the program's teardown.
    pub fn may_be_teardown(&self, older: bool) -> bool {
        self.rule == PhaseRuleId::FreeNoPythonFrame || self.rule == PhaseRuleId::FreeByPosition && older
    }

    /// Whether the event belongs to a forward pass with gradients: of the training, or of an evaluation.
    pub fn may_record(&self) -> bool {
        self.phase == Phase::Forward || self.rule == PhaseRuleId::EvalWithoutBackward
    }

    /// The meaning of the deciding frame; `None` if no frame decided.
    pub fn meaning(&self) -> Option<Meaning> {
        self.meaning
    }
}

/// No program has as many steps, passes or changes of the phase. Larger counts in a malicious file would overflow.
pub(super) const MAX_COUNT: u32 = u32::MAX / 2;

/// The program's position at one event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ProgramPosition {
    /// The phase.
    pub phase: Phase,
    /// The step, counted from 0; `None` before the first step.
    pub step: Option<u32>,
    /// How often the phase has changed.
    pub phase_changes: u32,
    /// How many backward passes have begun.
    pub backward_passes: u32,
    /// How many optimizer steps have begun.
    pub optimizer_steps: u32,
}

impl ProgramPosition {
    /// The same for the file beside a rotated trace.
    pub fn to_kept(&self) -> KeptPosition {
        let ProgramPosition { phase, step, phase_changes, backward_passes, optimizer_steps } = *self;
        KeptPosition { step, phase: phase.name().into(), phase_changes, backward_passes, optimizer_steps }
    }

    pub(super) fn of_kept(kept: &KeptPosition) -> ProgramPosition {
        let count = |count: u32| count.min(MAX_COUNT);
        ProgramPosition {
            phase: Phase::from_name(&kept.phase).unwrap_or_default(),
            step: kept.step.map(count),
            phase_changes: count(kept.phase_changes),
            backward_passes: count(kept.backward_passes),
            optimizer_steps: count(kept.optimizer_steps),
        }
    }
}

/// Whether the event reports autograd's gradient mode and the mode is off.
pub(super) fn is_grad_off(e: &Event) -> bool {
    e.flags.contains(Flags::GRAD_KNOWN) && !e.flags.contains(Flags::GRAD_ENABLED)
}

/// Whether the event needs memory: an allocation, or one that failed.
pub(super) fn is_request(e: &Event) -> bool {
    matches!(e.action, Action::Alloc | Action::Oom)
}

/// The classification before the first event.
pub(super) const START: EventClassification = EventClassification {
    phase: Phase::Load,
    rule: PhaseRuleId::LoadBeforeFirstForward,
    evidence: FrameId::NONE,
    meaning: None,
    is_position_independent: false,
    in_engine: false,
};
