//! Gradients that the optimizer has used and that stay through the next forward, where nobody needs them.

use memtrace_trace::ids::StackId;

use super::Mark;
use crate::passes::category::Birth;
use crate::passes::phase::{Moment, Phase};

/// Optimizer's steps after which a gradient that nothing has freed to the end is old: programs with several optimizers clear those of one
/// after many steps of another (a critic's five for one of a generator's).
const OLD: u32 = 12;
/// The same where no gradient that an optimizer had used was ever freed.
const OLD_ALONE: u32 = 3;

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
    /// Bytes that an optimizer had used and that were freed while another step was to come.
    cleared: u64,
    /// The same of the time since the latest step and of what is there at the end: all, and what was there for [`OLD_ALONE`] and for [`OLD`]
    /// steps and for half of all.
    last: u64,
    last_alone: u64,
    last_old: u64,
    last_step: u32,
    /// Bytes freed that an optimizer had used less than [`OLD`] times, and more often; of the latter those since the latest step, and for how
    /// many steps.
    young: u64,
    aged: u64,
    last_aged: u64,
    last_age: u32,
    /// How often most gradients were freed at such an age, all at once, and the latest age.
    epochs: u32,
    epoch: u32,
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

    /// Bytes that nothing frees.
    pub fn kept(&self) -> u64 {
        let alone = self.cleared * 20 <= self.last_alone;
        (if alone { self.last_alone } else { self.last_old }).min(self.bytes)
    }

    /// After how many steps gradients are freed, where all are, again and again, and an optimizer uses them meanwhile: once an epoch.
    pub fn freed_after(&self) -> Option<u32> {
        (self.epochs >= 2 && self.young.saturating_mul(20) <= self.aged).then_some(self.epoch)
    }

    /// The recording has come so far.
    #[inline]
    pub(super) fn at(&mut self, now: &Moment) {
        if now.optimizers != self.last_step {
            self.last_step = now.optimizers;
            self.cleared += std::mem::take(&mut self.last);
            // Models that are trained in turn free theirs one after the other.
            if std::mem::take(&mut self.last_aged) * 2 > self.bytes {
                self.epochs += 1;
                self.epoch = self.last_age;
            }
            (self.last_alone, self.last_old) = (0, 0);
        }
    }

    #[inline]
    pub(super) fn freed(&mut self, birth: &Birth, by: StackId, now: &Moment) {
        self.at(now);
        let age = now.optimizers.saturating_sub(birth.at.optimizers);
        let bytes_if = |holds: bool| if holds { birth.size } else { 0 };
        let is_most = age * 2 >= now.optimizers;
        if age >= OLD {
            self.aged += birth.size;
            (self.last_aged, self.last_age) = (self.last_aged + birth.size, age);
        } else {
            self.young += bytes_if(age > 0);
        }
        self.last += bytes_if(age > 0);
        self.last_alone += bytes_if(age >= OLD_ALONE && is_most);
        self.last_old += bytes_if(age >= OLD && is_most);
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
