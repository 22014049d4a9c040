//! Replays the recorded blocks with changes, and the policy of PyTorch's allocator with them.

use super::change::Assumed;
use super::combination::Combination;
use super::facts::{Facts, RunFacts};
use super::recorded::Recorded;
use super::recorded::span;
use crate::passes::phase::Phase;

/// The policy's peak counts if it differs by at most 0.5 % (1/200) from the recorded one.
const PRECISE: u64 = 200;
/// A peak is announced if it depends on assumptions by at most 5 % (1/20).
const SMALL_DIFFERENCE: u64 = 20;

/// The result of changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplayedPeak {
    /// The new peak of allocated bytes.
    pub peak: u64,
    /// The new peak of reserved bytes.
    pub reserved: u64,
    /// Whether the allocator served every request within the limit.
    pub fits: bool,
}

/// Replays a recording with changes.
#[derive(Debug)]
pub struct Replayer<'a> {
    facts: Facts<'a>,
    /// The highest sum of the recorded blocks as the allocator's policy places them.
    placed: u64,
    /// The highest peaks outside the kept steps, by phase.
    elsewhere: [u64; Phase::ALL.len()],
    /// The bytes that the allocator can reserve.
    limit: u64,
}

impl<'a> Replayer<'a> {
    /// A replayer of the recorded blocks. `peak` are the allocated bytes at the point in time to improve. `limit` has
    /// the bytes that the allocator can reserve. `elsewhere` is the peak of each phase over the whole run.
    pub fn new(
        recorded: Recorded<'a>,
        run: RunFacts,
        peak: u64,
        limit: u64,
        elsewhere: [u64; Phase::ALL.len()],
    ) -> Replayer<'a> {
        let spans = recorded.spans();
        let placed = span::place(&spans, &recorded.lifetimes.stream_pools, &recorded.settings, u64::MAX).allocated;
        Replayer { facts: Facts::new(recorded, &spans, run, peak), placed, elsewhere, limit }
    }

    /// The recording.
    pub fn facts(&self) -> &Facts<'a> {
        &self.facts
    }

    /// Whether the recorded blocks add up to the recorded peak. If not, blocks are missing, and no change is computed.
    pub fn is_sound(&self) -> bool {
        let Facts { peak, summed, .. } = self.facts;
        let tolerance = peak / 50;
        summed <= peak + tolerance && summed + peak / 10 >= peak
    }

    /// The result of changes; `None` if they do not lower the peak, or if assumptions decide the new one.
    pub fn replay(&self, changes: &Combination<'_>) -> Option<ReplayedPeak> {
        let facts = &self.facts;
        let recorded = &facts.recorded;
        let spans = changes.apply(facts, Assumed::Largest).spans;
        let (summed, _) = span::peak(&spans, &recorded.settings);
        let floor = self.floor(changes);
        if summed.max(floor) >= facts.summed || changes.has_assumptions() && !self.is_sure(changes, summed) {
            return None;
        }
        let place = |limit| span::place(&spans, &recorded.lifetimes.stream_pools, &recorded.settings, limit);
        let placed = place(u64::MAX);
        let fits = placed.reserved <= self.limit || place(self.limit).fits;
        let peak = if self.placed.abs_diff(facts.peak) <= facts.peak / PRECISE {
            placed.allocated
        } else {
            // The excess of recorded sizes over the rounded requests remains in proportion.
            (u128::from(summed) * u128::from(facts.peak) / u128::from(facts.summed.max(1))) as u64
        };
        let reserved = placed.reserved.max(floor);
        Some(ReplayedPeak { peak: peak.max(floor), reserved, fits: fits && floor <= self.limit })
    }

    /// The highest sum of the changed blocks. Faster than a replay, and without what the allocator adds.
    pub fn summed_peak(&self, changes: &Combination<'_>) -> u64 {
        changes.apply(&self.facts, Assumed::Largest).peak(&self.facts).max(self.floor(changes))
    }

    /// Whether what the recording leaves open changes the peak only a little.
    fn is_sure(&self, changes: &Combination<'_>, largest: u64) -> bool {
        let smallest = changes.apply(&self.facts, Assumed::Smallest).peak(&self.facts);
        largest.abs_diff(smallest) <= largest / SMALL_DIFFERENCE
    }

    /// The peak of the phases that no change lowers, in steps whose blocks were not kept.
    fn floor(&self, changes: &Combination<'_>) -> u64 {
        if self.facts.recorded.lifetimes.is_whole {
            return 0;
        }
        let is_unchanged = |phase: &&Phase| match phase {
            Phase::Load | Phase::Eval | Phase::Generate | Phase::Rollout | Phase::Optimizer => {
                !changes.changes_phase(**phase)
            }
            _ => false,
        };
        let unchanged = Phase::ALL.iter().filter(is_unchanged);
        unchanged.map(|phase| self.elsewhere[*phase as usize]).max().unwrap_or(0)
    }
}
