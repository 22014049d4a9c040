//! Gradients that the optimizer has already used and that stay allocated through the next forward pass, where nothing
//! needs them.

use memtrace_trace::ids::StackId;

use super::mark::Mark;
use crate::passes::category::BlockAllocation;
use crate::passes::phase::{Phase, ProgramPosition};

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
    pub forwards_with_gradients: u64,
    /// The number of forward passes that followed an optimizer's step.
    pub forwards_after_step: u64,
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
    /// `current`: gradient bytes now. `stale`: those that the latest forward pass found, and that are not freed since.
    /// `freed_late`: those freed since.
    current: u64,
    stale: u64,
    freed_late: u64,
    optimizer_steps: u32,
    backward_passes: u32,
}

impl StaleGradients {
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, mark: Mark, level: u64) {
        let position = &block.position;
        if mark.is(Mark::BACKWARD) {
            self.current += block.size;
        }
        if position.backward_passes != self.backward_passes {
            self.backward_passes = position.backward_passes;
            (self.stale, self.freed_late) = (0, 0);
        }
        if block.phase == Phase::Optimizer {
            self.gradients = self.gradients.max(self.current);
        }
        if block.phase == Phase::Forward && position.optimizer_steps != self.optimizer_steps {
            self.optimizer_steps = position.optimizer_steps;
            self.forwards_after_step += 1;
            self.forwards_with_gradients += u64::from(self.current > 0 && self.current * 2 >= self.bytes);
            (self.stale, self.freed_late) = (self.current, 0);
            self.bytes = self.bytes.max(self.current);
        }
        self.peak_without = self.peak_without.max(level.saturating_sub(self.stale));
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
    pub(super) fn position_changed(&mut self, now: &ProgramPosition) {
        if now.optimizer_steps != self.last_step {
            self.last_step = now.optimizer_steps;
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
    pub(super) fn freed(&mut self, block: &BlockAllocation, by: StackId, now: &ProgramPosition) {
        self.position_changed(now);
        let age = now.optimizer_steps.saturating_sub(block.position.optimizer_steps);
        let bytes_if = |holds: bool| if holds { block.size } else { 0 };
        let for_most_steps = age * 2 >= now.optimizer_steps;
        if age >= OLD {
            self.aged += block.size;
            (self.last_aged, self.last_age) = (self.last_aged + block.size, age);
        } else {
            self.young += bytes_if(age > 0);
        }
        self.last += bytes_if(age > 0);
        self.last_alone += bytes_if(age >= OLD_ALONE && for_most_steps);
        self.last_old += bytes_if(age >= OLD && for_most_steps);
        self.current = self.current.saturating_sub(block.size);
        if self.stale > 0 {
            self.stale = self.stale.saturating_sub(block.size);
            self.freed_late += block.size;
            if self.freed_late > self.cleared_late {
                (self.cleared_late, self.cleared_by) = (self.freed_late, by);
            }
        }
    }
}
