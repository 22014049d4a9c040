//! The Python objects that hold memory, with the blocks that they hold: paths (`--holders`) and cycles (`--cycles`).

use memtrace_trace::file::{Cycle, Definitions, Holder};

use super::cycles::ReferenceCycle;
use super::holders::HolderChange;
use super::locate::Locator;
use super::replay::Replay;

/// The Python objects of a recording that hold memory, in the order of time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HoldingObjects {
    /// The paths, as they change from scan to scan.
    pub holder_changes: Vec<HolderChange>,
    /// The reference cycles.
    pub cycles: Vec<ReferenceCycle>,
}

/// Finds the blocks that Python objects hold while a recording is replayed.
#[derive(Clone, Debug)]
pub struct ObjectMatcher<'a> {
    objects: HoldingObjects,
    holders: Locator<'a, Holder>,
    cycles: Locator<'a, Cycle>,
}

impl<'a> ObjectMatcher<'a> {
    /// For a recording with these definitions.
    pub fn new(definitions: &'a Definitions) -> ObjectMatcher<'a> {
        ObjectMatcher {
            objects: HoldingObjects::default(),
            holders: Locator::new(definitions.holders.iter(), |holder| (holder.seq, holder.address)),
            cycles: Locator::new(definitions.cycles.iter(), |cycle| (cycle.seq, cycle.address)),
        }
    }

    /// The number of events at the next point in time. `u64::MAX` if there is none.
    pub fn next_point(&self) -> u64 {
        self.holders.next_point().min(self.cycles.next_point())
    }

    /// Observes the state before the event `seq`.
    #[inline]
    pub fn before(&mut self, seq: u64, replay: &Replay) {
        let HoldingObjects { holder_changes, cycles } = &mut self.objects;
        self.holders.before(seq, replay, |holder, found| holder_changes.push(HolderChange::of(holder, found)));
        self.cycles.before(seq, replay, |cycle, found| cycles.push(ReferenceCycle::of(cycle, found)));
    }

    /// Observes the state after the last event.
    pub fn finish(mut self, replay: &Replay) -> HoldingObjects {
        let HoldingObjects { holder_changes, cycles } = &mut self.objects;
        self.holders.finish(replay, |holder, found| holder_changes.push(HolderChange::of(holder, found)));
        self.cycles.finish(replay, |cycle, found| cycles.push(ReferenceCycle::of(cycle, found)));
        self.objects
    }
}
