//! Gradients that the optimizer has already used and that stay allocated through the next forward pass, where nothing
//! needs them.

use memtrace_trace::event::{Action, Event};
use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass, RecordingEnd};
use crate::passes::phase::{Phase, ProgramPosition};
use crate::passes::stacks::StackTable;
use crate::rules::{Meaning, RuleId};
use crate::units::{count_text, size_text};
use memtrace_replay::Names;

/// Gradients stay allocated through the next forward pass because nothing frees them.
static GRADIENTS_NOT_CLEARED: DiagnosticRule = DiagnosticRule {
    id: RuleId::GradientsNotCleared,
    meaning: "Gradients stay allocated after the optimizer's step, because nothing clears them.",
    evidence: "Gradients are still allocated when forward passes begin after an optimizer step. Either they are never \
               freed, for at least half of all steps and at least twelve steps (six if optimizers keep state, but \
               none for their parameters; three if the program frees no gradients). Or all are freed at once, \
               repeatedly, after at least twelve steps that used them.",
    limits: "Without PyTorch's profiler ranges, the rule cannot tell gradients that are filled with zeros \
             (set_to_none=False) from gradients that are never cleared.",
    code: &["optimizer.step()", "optimizer.zero_grad(set_to_none=True)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    kept_by: KeptBy::Nothing,
};

/// Gradients are freed between forward and backward.
static GRADIENTS_CLEARED_LATE: DiagnosticRule = DiagnosticRule {
    id: RuleId::GradientsClearedLate,
    meaning: "Gradients stay allocated during the next forward pass, because zero_grad() runs after it.",
    evidence: "Gradients are still allocated when a forward pass begins after an optimizer step, and are freed before \
               the backward pass. The peak is higher because of them.",
    limits: "The rule does not compute what earlier clearing saves within a backward pass.",
    code: &["optimizer.step()", "optimizer.zero_grad(set_to_none=True)  # here, not before the next backward()"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    kept_by: KeptBy::Nothing,
};

/// A gradient that was never freed counts as old after this many optimizer steps. Programs with several optimizers
/// clear the gradients of one after many steps of another: a generator's after five steps of the critic.
const OLD: u32 = 12;
/// The same limit for a parameter without optimizer state, while others have some.
const OLD_WITHOUT_STATE: u32 = 6;
/// The same limit if no gradient that an optimizer had used was ever freed.
const OLD_ALONE: u32 = 3;

const CLEAR: &str = "call optimizer.zero_grad() after each step; set_to_none=False only fills the gradients with \
                     zeros, and a model without an optimizer (a teacher) needs requires_grad_(False)";
const FILLS_WITH_ZEROS: &str = "zero_grad(set_to_none=False) only fills the gradients with zeros: leave out \
                                set_to_none=False, and they are freed";
const WITHOUT_OPTIMIZER: &str = "the program clears other gradients: no optimizer has these parameters. \
                                 requires_grad_(False) for them (or torch.no_grad() around the model's call), or give \
                                 them to an optimizer";

/// The gradients of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gradients {
    /// The latest call of backward.
    backward: StackId,
    /// Gradient bytes now.
    current: u64,
    /// The highest number of gradient bytes at the start of a forward pass.
    bytes: u64,
    /// The highest number of gradient bytes at an optimizer's step.
    at_step: u64,
    /// The number of forward passes that began with at least half of [`Self::bytes`].
    forwards_with_gradients: u64,
    /// The number of forward passes that followed an optimizer's step.
    forwards_after_step: u64,
    /// The number of optimizer steps and of backward passes before the latest forward pass.
    optimizer_steps: u32,
    backward_passes: u32,
    uncleared: Uncleared,
    clearing: ClearingCalls,
    epochs: Epochs,
    late: ClearedLate,
}

/// Gradients that an optimizer had used. Which of them stay to the end is known only there.
#[derive(Clone, Debug, Default)]
struct Uncleared {
    /// Bytes that were freed with another optimizer step to come.
    cleared: u64,
    /// The number of the latest optimizer step.
    last_step: u32,
    /// Bytes freed, or left at the end, since the latest optimizer step. `last` has all that an optimizer had used.
    /// `last_alone` are those that existed for [`OLD_ALONE`] steps and for at least half of all steps.
    last: u64,
    last_alone: u64,
    /// Those that existed for [`OLD_WITHOUT_STATE`] steps.
    last_old: Vec<OldGradient>,
    /// The largest of these gradients: its bytes and its place.
    largest: Option<(u64, (StackId, ContextId))>,
}

/// A gradient that existed for many optimizer steps.
#[derive(Clone, Copy, Debug)]
struct OldGradient {
    /// `seq` of its allocation.
    seq: u64,
    size: u64,
    /// The number of steps.
    age: u32,
}

/// The ranges that PyTorch marks around calls of optimizers: how often each stack began one. Those of `zero_grad` are
/// known only by the frames of their stacks.
#[derive(Clone, Debug, Default)]
struct ClearingCalls(Vec<(StackId, u32)>);

impl ClearingCalls {
    /// The maximum number of stacks.
    const MAX: usize = 16;

    fn range_began(&mut self, stack: StackId) {
        match self.0.iter().position(|(known, _)| *known == stack) {
            Some(at) => self.0[at].1 += 1,
            None if self.0.len() < ClearingCalls::MAX => self.0.push((stack, 1)),
            None => {}
        }
    }

    /// The stack of a call of `zero_grad` in at least half of `steps`.
    fn in_most_steps(&self, steps: u32, table: &StackTable) -> Option<StackId> {
        let clears = |stack| table.facts(stack).rule.is_some_and(|rule| rule.meaning == Meaning::ZeroGrad);
        let (stack, count) = *self.0.iter().filter(|(stack, _)| clears(*stack)).max_by_key(|(_, count)| *count)?;
        (count * 2 >= steps).then_some(stack)
    }
}

/// Gradients that are freed all at once, after many steps.
#[derive(Clone, Debug, Default)]
struct Epochs {
    /// Bytes freed that an optimizer had used less than [`OLD`] times.
    young: u64,
    /// Bytes freed that an optimizer had used more often.
    aged: u64,
    /// Those of `aged` since the latest optimizer step, and their age in optimizer steps.
    last_aged: u64,
    last_age: u32,
    /// How often most gradients were freed at such an age, all at once.
    count: u32,
    /// The latest such age in optimizer steps.
    age: u32,
}

/// Gradients that are freed between forward and backward.
#[derive(Clone, Debug, Default)]
struct ClearedLate {
    /// Bytes that the latest forward pass found, and that are not freed since.
    stale: u64,
    /// Those freed since.
    freed: u64,
    /// The highest number of bytes freed between forward and backward.
    bytes: u64,
    /// The stack that last freed them.
    by: StackId,
    /// The highest number of allocated bytes if these gradients had not stayed.
    peak_without: u64,
}

impl Gradients {
    /// Whether the program clears other gradients than those that nothing frees.
    fn clears_others(&self) -> bool {
        self.uncleared.cleared * 20 > self.uncleared.last_alone
    }

    /// Bytes that nothing frees.
    fn kept(&self, names: &Names) -> u64 {
        // A model that no optimizer has keeps the gradients of its first backward pass. Others are of copies of a
        // model.
        let oldest = self.uncleared.last_old.iter().map(|old| old.age).max().unwrap_or(0);
        let has_no_state = |old: &OldGradient| old.age == oldest && names.is_gradient_without_state(old.seq);
        let unused = |old: &OldGradient| old.age >= OLD || has_no_state(old);
        let kept = if self.clears_others() { self.old_bytes(unused) } else { self.uncleared.last_alone };
        kept.min(self.bytes)
    }

    /// The bytes of those old gradients to which something applies.
    fn old_bytes(&self, applies: impl Fn(&OldGradient) -> bool) -> u64 {
        self.uncleared.last_old.iter().filter(|old| applies(old)).map(|old| old.size).sum()
    }

    /// The number of optimizer steps after which gradients are freed; `None` if they are not freed this way. It
    /// requires that the program frees all gradients together, repeatedly, and that an optimizer uses them in between,
    /// as in clearing once per epoch.
    fn freed_after(&self) -> Option<u32> {
        let Epochs { young, aged, count, age, .. } = self.epochs;
        (count >= 2 && young.saturating_mul(20) <= aged).then_some(age)
    }

    /// Follows the program's position.
    #[inline]
    fn position_changed(&mut self, now: &ProgramPosition) {
        let uncleared = &mut self.uncleared;
        if now.optimizer_steps != uncleared.last_step {
            let cleared = uncleared.cleared + uncleared.last;
            *uncleared = Uncleared { cleared, last_step: now.optimizer_steps, ..Uncleared::default() };
            // Models that are trained in turn free their gradients one model after the other.
            let epochs = &mut self.epochs;
            if std::mem::take(&mut epochs.last_aged) * 2 > self.bytes {
                epochs.count += 1;
                epochs.age = epochs.last_age;
            }
        }
    }

    #[inline]
    fn free(&mut self, block: &BlockAllocation, by: StackId, now: &ProgramPosition) {
        self.position_changed(now);
        let age = now.optimizer_steps.saturating_sub(block.position.optimizer_steps);
        let for_most_steps = age * 2 >= now.optimizer_steps;
        let size = block.memory.size;
        let Gradients { uncleared, epochs, late, .. } = self;
        if age >= OLD {
            epochs.aged += size;
            (epochs.last_aged, epochs.last_age) = (epochs.last_aged + size, age);
        } else if age > 0 {
            epochs.young += size;
        }
        if age > 0 {
            uncleared.last += size;
        }
        if age >= OLD_ALONE && for_most_steps {
            uncleared.last_alone += size;
        }
        if age >= OLD_WITHOUT_STATE && for_most_steps {
            uncleared.last_old.push(OldGradient { seq: block.seq, size, age });
            if uncleared.largest.is_none_or(|(largest, _)| size > largest) {
                uncleared.largest = Some((size, (block.site.stack, block.site.context)));
            }
        }
        if late.stale > 0 {
            late.stale = late.stale.saturating_sub(size);
            late.freed += size;
            if late.freed > late.bytes {
                (late.bytes, late.by) = (late.freed, by);
            }
        }
        self.current = self.current.saturating_sub(size);
    }

    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        // At least half of the steps. A loop that is left and entered again begins with gradients once, without an
        // issue.
        if !device.matters(self.bytes)
            || self.forwards_with_gradients < 2
            || self.forwards_with_gradients * 2 < self.forwards_after_step
        {
            return None;
        }
        let evidence = format!(
            "{} of {} forward passes after an optimizer step started with these gradients",
            count_text(self.forwards_with_gradients),
            count_text(self.forwards_after_step)
        );
        let saves = device.peak_bytes().saturating_sub(self.late.peak_without);
        let often = self.freed_after();
        let kept = if often.is_some() { self.bytes } else { self.kept(device.inputs.names) };
        // Gradients that the program clears late do not hide those that it never clears.
        if device.matters(kept) && (self.clears_others() || kept * 2 >= self.bytes) {
            let freed = match often {
                Some(steps) => format!("they are freed once in {} steps", count_text(u64::from(steps))),
                None => "nothing frees them".to_owned(),
            };
            let without_state = || self.old_bytes(|old| device.inputs.names.is_gradient_without_state(old.seq));
            let has_no_optimizer = often.is_none() && (self.clears_others() || without_state() * 2 > kept);
            let kept_at = self.uncleared.largest.map(|(_, place)| place);
            let of_backward = (!self.backward.is_none()).then_some((self.backward, ContextId::NONE));
            let called = self.clearing.in_most_steps(self.optimizer_steps, device.inputs.table);
            let (place, fix) = match called {
                _ if has_no_optimizer => (kept_at, WITHOUT_OPTIMIZER),
                Some(stack) if often.is_none() => (Some((stack, ContextId::NONE)), FILLS_WITH_ZEROS),
                _ => (of_backward, CLEAR),
            };
            return Some(Issue {
                headline: format!("{} of gradients stay from step to step: {freed}", size_text(kept)),
                evidence: vec![evidence, "the next backward pass adds to them".to_owned()],
                place,
                fix: fix.to_owned(),
                saves: Some(saves).filter(|bytes| *bytes > 0),
                suggestion: has_no_optimizer.then_some(RuleId::FreezeUnused),
                ..device.issue(&GRADIENTS_NOT_CLEARED, kept)
            });
        }
        // If the peak is elsewhere, these gradients cost nothing.
        (device.matters(saves) && self.late.bytes * 2 >= self.bytes).then(|| Issue {
            headline: format!(
                "{} of gradients stay through the next forward pass and are freed before its backward pass",
                size_text(self.bytes)
            ),
            evidence: vec![evidence, format!("without them the peak would be {}", size_text(self.late.peak_without))],
            place: Some((self.late.by, ContextId::NONE)),
            fix: "clear the gradients right after the optimizer step, or before the forward pass".to_owned(),
            saves: Some(saves),
            ..device.issue(&GRADIENTS_CLEARED_LATE, self.bytes)
        })
    }
}

impl Pass for Gradients {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { block, mark, .. } = *allocated;
        let position = &block.position;
        if mark.is(Mark::BACKWARD) {
            self.current += block.memory.size;
        }
        if position.backward_passes != self.backward_passes {
            self.backward_passes = position.backward_passes;
            (self.late.stale, self.late.freed) = (0, 0);
        }
        if block.phase == Phase::Optimizer {
            self.at_step = self.at_step.max(self.current);
        }
        if block.phase == Phase::Forward && position.optimizer_steps != self.optimizer_steps {
            self.optimizer_steps = position.optimizer_steps;
            self.forwards_after_step += 1;
            self.forwards_with_gradients += u64::from(self.current > 0 && self.current * 2 >= self.bytes);
            (self.late.stale, self.late.freed) = (self.current, 0);
            self.bytes = self.bytes.max(self.current);
        }
        let late = &mut self.late;
        late.peak_without = late.peak_without.max(allocated.usage.allocated.saturating_sub(late.stale));
        if allocated.classification.meaning() == Some(Meaning::Engine) {
            self.backward = block.site.stack;
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if freed.mark.is(Mark::BACKWARD) {
            self.free(freed.block, freed.e.stack, freed.now);
        }
    }

    fn range(&mut self, e: &Event) {
        if e.action == Action::RangeStart && !e.stack.is_none() {
            self.clearing.range_began(e.stack);
        }
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        self.position_changed(end.now);
        for (block, _) in end.in_use.iter().filter(|(_, mark)| mark.is(Mark::BACKWARD)) {
            self.free(block, StackId::NONE, end.now);
        }
    }
}

impl Diagnostic for Gradients {
    const RULES: &'static [&'static DiagnosticRule] = &[&GRADIENTS_NOT_CLEARED, &GRADIENTS_CLEARED_LATE];

    fn share(&self, _: &DeviceFacts<'_>, shared: &mut SharedFacts) {
        shared.gradient_bytes = self.at_step;
    }

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        // A leak of gradients, such as those of copies of a model, is none of these.
        let leaks =
            |issue: &Issue| issue.place.is_some_and(|place| issues.iter().any(|one| one.sites.contains(&place)));
        let found = self.issue(device).filter(|issue| !leaks(issue));
        issues.extend(found);
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{Definitions, Frame, StackNode};
    use memtrace_trace::ids::FrameId;

    use super::*;
    use crate::diagnostics::test_program::TestProgram;

    const GRADIENTS: u64 = 4 << 20;

    /// When the gradients of a step are freed.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Clears {
        Never,
        AfterStep,
        InForward,
    }

    fn found(clears: Clears) -> Vec<(&'static str, u64)> {
        let mut program = TestProgram::<Gradients>::new();
        let mut gradients = None;
        for _ in 0..14 {
            program.phase = Phase::Forward;
            let activations = program.allocate(64 << 20, Mark::GRAPH);
            if clears == Clears::InForward {
                gradients.take().iter().for_each(|old| program.free(old, Mark::BACKWARD));
            }
            program.now.backward_passes += 1;
            program.phase = Phase::Backward;
            program.free(&activations, Mark::GRAPH);
            if gradients.is_none() {
                gradients = Some(program.allocate(GRADIENTS, Mark::BACKWARD));
            }
            program.now.optimizer_steps += 1;
            program.phase = Phase::Optimizer;
            program.allocate(512, 0);
            if clears == Clears::AfterStep {
                gradients.take().iter().for_each(|old| program.free(old, Mark::BACKWARD));
            }
        }
        // The end frees what is left.
        gradients.iter().for_each(|old| program.free(old, Mark::BACKWARD));
        program.found()
    }

    #[test]
    fn a_call_of_zero_grad_in_most_steps_is_known_by_its_frame() {
        let frame = |name: &str| {
            let filename = "/lib/torch/optim/optimizer.py".into();
            Frame { name: name.into(), filename, ..Frame::default() }
        };
        let frames = vec![Frame::default(), frame("zero_grad"), frame("profile_hook_step")];
        let stacks = (0..3).map(|frame| StackNode { parent: StackId::NONE, frame: FrameId(frame) }).collect();
        let table = StackTable::new(&Definitions { frames, stacks, ..Definitions::default() });
        let mut calls = ClearingCalls::default();
        for step in 0..8 {
            calls.range_began(StackId(2));
            if step % 2 == 0 {
                calls.range_began(StackId(1));
            }
        }
        assert_eq!(calls.in_most_steps(8, &table), Some(StackId(1)));
        assert_eq!(calls.in_most_steps(9, &table), None, "once in a while");
    }

    #[test]
    fn gradients_that_stay_through_the_next_forward_pass() {
        assert_eq!(found(Clears::Never), [("gradients-not-cleared", GRADIENTS)]);
        assert_eq!(found(Clears::InForward), [("gradients-cleared-late", GRADIENTS)]);
        assert_eq!(found(Clears::AfterStep), []);
    }
}
