//! Gradients that the optimizer has already used and that stay allocated through the next forward pass, where nothing
//! needs them.

use memtrace_trace::ids::StackId;

use super::Mark;
use crate::passes::category::Birth;
use crate::passes::phase::{Moment, Phase};

/// A gradient that was never freed counts as old after this many optimizer steps. Programs with several optimizers
/// clear the gradients of one after many steps of another: a generator's after five steps of the critic.
const OLD: u32 = 12;
/// The same limit if no gradient that an optimizer had used was ever freed.
const OLD_ALONE: u32 = 3;

/// The gradients of one device.
#[derive(Clone, Debug, Default)]
pub struct StaleGradients {
    /// The latest call of backward.
    pub backward: StackId,
    /// The highest number of gradient bytes at the start of a forward pass.
    pub bytes: u64,
    /// The number of forward passes that began with at least half of these bytes.
    pub forwards: u64,
    /// The number of forward passes that followed an optimizer's step.
    pub chances: u64,
    /// Bytes that an optimizer had used and that were freed with another optimizer step to come.
    cleared: u64,
    /// Bytes freed, or left at the end, since the latest optimizer step. `last`: all that an optimizer had used.
    /// `last_alone` and `last_old`: those that existed for [`OLD_ALONE`] or [`OLD`] steps and for at least half of all
    /// steps.
    last: u64,
    last_alone: u64,
    last_old: u64,
    last_step: u32,
    /// `young` and `aged`: bytes freed that an optimizer had used less than [`OLD`] times, and more often. `last_aged`:
    /// those of `aged` since the latest optimizer step. `last_age`: their age in optimizer steps.
    young: u64,
    aged: u64,
    last_aged: u64,
    last_age: u32,
    /// `epochs`: how often most gradients were freed at such an age, all at once. `epoch`: the latest such age, in
    /// optimizer steps.
    epochs: u32,
    epoch: u32,
    /// The highest number of bytes freed between forward and backward.
    pub cleared_late: u64,
    /// The stack that last freed them.
    pub cleared_by: StackId,
    /// The highest number of allocated bytes if these gradients had not stayed.
    pub peak_without: u64,
    /// The highest number of gradient bytes at an optimizer's step.
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

    /// The number of optimizer steps after which gradients are freed; `None` if they are not freed this way. It
    /// requires that the program frees all gradients together, repeatedly, and that an optimizer uses them in between,
    /// as in clearing once per epoch.
    pub fn freed_after(&self) -> Option<u32> {
        (self.epochs >= 2 && self.young.saturating_mul(20) <= self.aged).then_some(self.epoch)
    }

    /// Takes the program's current position.
    #[inline]
    pub(super) fn at(&mut self, now: &Moment) {
        if now.optimizers != self.last_step {
            self.last_step = now.optimizers;
            self.cleared += std::mem::take(&mut self.last);
            // Models that are trained in turn free their gradients one model after the other.
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
