//! Out-of-memory errors: what was requested, and what was allocated at that time.

use memtrace_trace::ids::{ContextId, StackId};

use super::composition::Composition;
use super::phase::{Phase, ProgramPosition};
use super::reserved::Reserved;
use super::rest_of_step::StepStarts;
use crate::rules::PhaseRuleId;
use memtrace_replay::Owner;

/// The number of errors kept in full, besides the last one. Programs that try batch sizes can have hundreds.
const DETAILED: usize = 16;
/// The allocated blocks are determined for this many errors, because any of them can be the last one.
const EXAMINED: u64 = 1000;

/// One out-of-memory error.
#[derive(Clone, Debug)]
pub struct Oom {
    /// `seq` of its event.
    pub seq: u64,
    /// The time, in clock ticks.
    pub ticks: u64,
    /// The requested bytes, rounded as the allocator rounds.
    pub requested: u64,
    /// Free bytes of the device as CUDA reported them; `None` if unknown.
    pub device_free: Option<u64>,
    /// The stack and the context of the request.
    pub requested_at: (StackId, ContextId),
    /// The phase of the request.
    pub phase: Phase,
    /// The rule that decided the phase.
    pub rule: PhaseRuleId,
    /// The program's position.
    pub position: ProgramPosition,
    /// Where this step and the step before it began.
    pub step_starts: StepStarts,
    /// The blocks that were in use.
    pub in_use: Composition,
    /// What the caching allocator had reserved.
    pub reserved: Reserved,
    /// By owner: bytes that this process held outside the caching allocator.
    pub outside_pytorch: Vec<(Owner, u64)>,
}

/// All out-of-memory errors of a device.
#[derive(Clone, Debug, Default)]
pub struct OomLog {
    detailed: Vec<Oom>,
    last: Option<Oom>,
    count: u64,
    /// How often the phase had changed at the last error.
    phase_changes: Option<u32>,
    unwound_to_the_end: bool,
}

impl OomLog {
    /// Takes one error at the program's position `now`.
    pub fn add(&mut self, oom: Oom, now: &ProgramPosition) {
        self.count += 1;
        self.phase_changes = Some(now.phase_changes);
        if self.detailed.len() < DETAILED { self.detailed.push(oom) } else { self.last = Some(oom) }
    }

    /// Whether the next error is to be recorded with its allocated blocks.
    pub fn needs_details(&self) -> bool {
        self.count < EXAMINED
    }

    /// The number of errors.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The errors that are kept in full.
    pub fn all(&self) -> impl Iterator<Item = &Oom> {
        self.detailed.iter().chain(&self.last)
    }

    /// The last error.
    pub fn last(&self) -> Option<&Oom> {
        self.last.as_ref().or(self.detailed.last())
    }

    /// Ends the recording at the position `now`.
    pub fn finish(&mut self, now: &ProgramPosition) {
        self.unwound_to_the_end = self.count > 0 && self.phase_changes == Some(now.phase_changes);
    }

    /// Whether nothing but unwinding followed the last error.
    pub fn unwound_to_the_end(&self) -> bool {
        self.unwound_to_the_end
    }

    /// Whether the program is still unwinding from an error that came after the first `before` errors.
    #[inline]
    pub fn unwinding(&self, before: u32, now: &ProgramPosition) -> bool {
        self.count > u64::from(before) && self.phase_changes == Some(now.phase_changes)
    }
}
