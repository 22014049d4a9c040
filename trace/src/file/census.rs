//! What kinds of events a trace holds and how many of each: enough to see whose events tell about a device, at a tenth of
//! what decoding costs.

use std::collections::HashMap;

use crate::event::Event;

/// Counts of events by kind. A kind is an event of which only the source, the action, the device, the flags, the API and whether
/// the call failed (`result` is 0 or 1) are told.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Census {
    kinds: HashMap<Event, u64>,
    /// Earliest and latest moment, in ticks.
    pub ticks: Option<(u64, u64)>,
}

impl Census {
    /// Counts one event.
    pub fn count(&mut self, e: &Event) {
        self.add(e, e.result != 0, 1);
        self.stretch((e.ticks, e.ticks));
    }

    /// Counts so many events of the kind of `e`; says nothing of their moments.
    pub fn count_many(&mut self, e: &Event, count: u64) {
        self.add(e, e.result != 0, count);
    }

    /// Takes over what another has counted.
    pub fn merge(&mut self, other: Census) {
        for (kind, count) in other.kinds {
            *self.kinds.entry(kind).or_default() += count;
        }
        if let Some(ticks) = other.ticks {
            self.stretch(ticks);
        }
    }

    /// Every kind with its count, in no order.
    pub fn kinds(&self) -> impl Iterator<Item = (&Event, u64)> {
        self.kinds.iter().map(|(kind, count)| (kind, *count))
    }

    /// All events.
    pub fn events(&self) -> u64 {
        self.kinds.values().sum()
    }

    pub(super) fn add(&mut self, e: &Event, failed: bool, count: u64) {
        if count == 0 {
            return;
        }
        let Event { source, action, device, flags, api, .. } = *e;
        let kind = Event { source, action, device, flags, api, result: failed.into(), ..Event::EMPTY };
        *self.kinds.entry(kind).or_default() += count;
    }

    pub(super) fn stretch(&mut self, (first, last): (u64, u64)) {
        let (f, l) = self.ticks.unwrap_or((first, last));
        self.ticks = Some((f.min(first), l.max(last)));
    }
}
