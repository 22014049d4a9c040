//! Gradients that the optimizer has used and that stay through the next forward, where nobody needs them.

use memtrace_trace::ids::StackId;

use super::Mark;
use crate::passes::category::Birth;
use crate::passes::phase::{Moment, Phase};

/// Optimizer's steps after which a gradient is old: programs with several optimizers clear those of one while another's step is on.
const OLD: u32 = 4;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct StaleGradients {
    /// The latest call of backward.
    pub backward: StackId,
    /// Bytes that waited, at most.
    pub bytes: u64,
    /// Forwards that began with such.
    pub forwards: u64,
    /// Forwards that followed an optimizer's step.
    pub chances: u64,
    /// Bytes that were there for more than [`OLD`] optimizer's steps.
    pub old: u64,
    /// Bytes freed between forward and backward, at most.
    pub cleared_late: u64,
    /// Who freed them last.
    pub cleared_by: StackId,
    /// The highest number of allocated bytes, had they not waited.
    pub peak_without: u64,
    /// Bytes of what backward passes left, at most, when an optimizer's step followed.
    pub gradients: u64,
    live: u64,
    waiting: u64,
    late: u64,
    optimizers: u32,
    backwards: u32,
}

impl StaleGradients {
    #[inline]
    pub(super) fn born(&mut self, birth: &Birth, mark: Mark, level: u64) {
        let at = &birth.at;
        if mark.is(Mark::BACKWARD) {
            self.live += birth.size;
        }
        if at.backwards != self.backwards {
            self.backwards = at.backwards;
            (self.waiting, self.late) = (0, 0);
        }
        if birth.phase == Phase::Optimizer {
            self.gradients = self.gradients.max(self.live);
        }
        if birth.phase == Phase::Forward && at.optimizers != self.optimizers {
            self.optimizers = at.optimizers;
            self.chances += 1;
            self.forwards += u64::from(self.live > 0 && self.live * 2 >= self.bytes);
            (self.waiting, self.late) = (self.live, 0);
            self.bytes = self.bytes.max(self.live);
        }
        self.peak_without = self.peak_without.max(level.saturating_sub(self.waiting));
    }

    #[inline]
    pub(super) fn freed(&mut self, birth: &Birth, by: StackId, now: &Moment) {
        if now.optimizers >= birth.at.optimizers + OLD {
            self.old += birth.size;
        }
        self.live = self.live.saturating_sub(birth.size);
        if self.waiting > 0 {
            self.waiting = self.waiting.saturating_sub(birth.size);
            self.late += birth.size;
            if self.late > self.cleared_late {
                (self.cleared_late, self.cleared_by) = (self.late, by);
            }
        }
    }
}
