//! Places of the program that request far more in one step than in all others: a picture with many boxes, a long text.
//!
//! The tensor that causes it can be tiny, so the inputs of the step need not be larger. If the first request of the
//! step is an outlier too, the batch is larger, and with it all that follows.

use std::collections::BTreeSet;

use memtrace_trace::ids::StackId;

use super::category::Proof;
use super::pass::{BlockAllocated, Pass};
use super::phase::{Phase, ProgramPosition};

/// An outlier is larger than the largest request of the other steps by at least this factor.
const FACTOR: u64 = 4;
/// A place is compared if it allocates in so many other steps.
const MIN_OTHERS: u32 = 3;
/// Smaller requests are no outliers, in bytes.
const MIN_BYTES: u64 = 1 << 20;

/// The requests of one place.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// The largest request in bytes.
    largest: u64,
    /// The step that made it.
    step: u32,
    /// The largest request of the other steps.
    others: u64,
    /// The number of steps, and the latest one.
    steps: u32,
    latest: u32,
}

/// The largest requests of each place by step, for one device.
#[derive(Clone, Debug, Default)]
pub struct OutlierSteps {
    /// By stack.
    places: Vec<Place>,
    /// The places at which steps begin.
    first: BTreeSet<StackId>,
    /// The latest step with a request, plus one.
    began: u32,
}

/// A request that is far larger than those of the same place in other steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outlier {
    /// The requested bytes.
    pub bytes: u64,
    /// The largest request of the other steps, in bytes.
    pub others: u64,
}

impl Pass for OutlierSteps {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let block = allocated.block;
        if counts(block.phase, block.proof) && block.memory.requested >= MIN_BYTES / FACTOR {
            self.request(block.site.stack, block.memory.requested, allocated.now);
        }
    }
}

/// Whether the request of a block can show that a step computes more. A workspace is allocated by whichever operation
/// needs it first.
fn counts(phase: Phase, proof: Proof) -> bool {
    matches!(phase, Phase::Forward | Phase::Eval | Phase::Generate | Phase::Rollout)
        && proof != Proof::CublasWorkspace
        && !proof.may_be_workspace()
}

impl OutlierSteps {
    #[inline]
    fn request(&mut self, stack: StackId, bytes: u64, now: &ProgramPosition) {
        let (Some(step), false) = (now.step, stack.is_none()) else { return };
        if self.places.len() <= stack.index() {
            self.places.resize(stack.index() + 1, Place::default());
        }
        let place = &mut self.places[stack.index()];
        if self.began <= step {
            self.began = step + 1;
            self.first.insert(stack);
        }
        if place.steps == 0 || step != place.latest {
            place.steps += 1;
            place.latest = step;
        }
        if place.largest == 0 || step == place.step && bytes > place.largest {
            (place.largest, place.step) = (bytes, step);
        } else if step != place.step && bytes > place.largest {
            (place.others, place.largest, place.step) = (place.largest, bytes, step);
        } else if step != place.step {
            place.others = place.others.max(bytes);
        }
    }

    /// The outlier of a place, and its step. `None` if it has none.
    fn of(&self, stack: StackId) -> Option<(u32, Outlier)> {
        let place = self.places.get(stack.index())?;
        let is_outlier = place.steps > MIN_OTHERS
            && place.largest >= MIN_BYTES
            && place.others > 0
            && place.largest >= place.others.saturating_mul(FACTOR);
        is_outlier.then_some((place.step, Outlier { bytes: place.largest, others: place.others }))
    }

    /// The outlier of a place if it is in this step, whose batch is not larger.
    pub fn in_step(&self, stack: StackId, step: u32) -> Option<Outlier> {
        let (of, outlier) = self.of(stack)?;
        (of == step && self.larger_batch(step).is_none()).then_some(outlier)
    }

    /// The place at which a step begins, if its request there shows that its batch is larger than the others.
    pub fn larger_batch(&self, step: u32) -> Option<(StackId, Outlier)> {
        let in_step = |stack: &StackId| self.of(*stack).filter(|(of, _)| *of == step).map(|(_, outlier)| outlier);
        self.first.iter().find_map(|stack| Some((*stack, in_step(stack)?)))
    }

    /// The places with an outlier in any step whose batch is not larger.
    pub fn places(&self) -> impl Iterator<Item = StackId> {
        let ids = (0..self.places.len()).map(|index| StackId(index as u32));
        ids.filter(|stack| self.of(*stack).is_some_and(|(step, _)| self.larger_batch(step).is_none()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of these sizes in MiB, one in each step.
    fn requests(sizes: &[u64]) -> OutlierSteps {
        let mut outliers = OutlierSteps::default();
        for (step, size) in sizes.iter().enumerate() {
            let now = ProgramPosition { step: Some(step as u32), ..ProgramPosition::default() };
            outliers.request(StackId(1), 7 << 20, &now);
            outliers.request(StackId(2), *size << 20, &now);
            outliers.request(StackId(2), 1 << 20, &now);
        }
        outliers
    }

    #[test]
    fn a_step_that_begins_with_more_has_a_larger_batch() {
        let mut outliers = OutlierSteps::default();
        for step in 0..5 {
            let now = ProgramPosition { step: Some(step), ..ProgramPosition::default() };
            let bytes = if step == 3 { 40 << 20 } else { 4 << 20 };
            outliers.request(StackId(1), bytes, &now);
            outliers.request(StackId(2), 2 * bytes, &now);
        }
        let expected = Outlier { bytes: 40 << 20, others: 4 << 20 };
        assert_eq!(outliers.larger_batch(3), Some((StackId(1), expected)));
        assert_eq!((outliers.in_step(StackId(2), 3), outliers.places().count()), (None, 0));
    }

    #[test]
    fn a_workspace_is_no_outlier() {
        for (proof, expected) in [(Proof::None, true), (Proof::CublasWorkspace, false), (Proof::WorkspaceSized, false)]
        {
            assert_eq!(counts(Phase::Forward, proof), expected, "{proof:?}");
        }
    }

    #[test]
    fn one_step_that_needs_far_more_is_an_outlier() {
        let found =
            |sizes: &[u64], step| requests(sizes).in_step(StackId(2), step).map(|o| (o.bytes >> 20, o.others >> 20));
        assert_eq!(found(&[10, 28, 12, 422, 20], 3), Some((422, 28)));
        assert_eq!(found(&[422, 28, 12, 10], 0), Some((422, 28)), "in the first step");
        assert_eq!(found(&[10, 28, 12, 422, 20], 4), None, "another step");
        assert_eq!(found(&[10, 20, 40, 80], 3), None, "what grows");
        assert_eq!(found(&[10, 422, 10], 1), None, "too few steps");
        assert_eq!(found(&[10, 422, 10, 422, 10], 1), None, "two of them");
        assert_eq!(requests(&[10, 28, 12, 422, 20]).places().collect::<Vec<_>>(), [StackId(2)]);
    }
}
