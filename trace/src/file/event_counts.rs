//! Counts the events of a trace by kind, at a tenth of the cost of decoding. That is enough to choose the event source
//! for a device.

use std::collections::HashMap;

use crate::event::Event;

/// Event counts by kind. A kind is an event with only source, action, device, flags, API and `result` set. `result` is
/// 1 if the call failed and 0 otherwise.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EventCounts {
    kinds: HashMap<Event, u64>,
    /// The earliest and the latest timestamp, in the unit of [`crate::clock`].
    pub ticks: Option<(u64, u64)>,
}

impl EventCounts {
    /// Counts one event.
    pub fn count(&mut self, e: &Event) {
        self.add(e, e.result != 0, 1);
        self.extend_time_range((e.ticks, e.ticks));
    }

    /// Counts `count` events of the kind of `e`, without their timestamps.
    pub fn count_many(&mut self, e: &Event, count: u64) {
        self.add(e, e.result != 0, count);
    }

    /// Adds the counts of another census.
    pub fn merge(&mut self, other: EventCounts) {
        for (kind, count) in other.kinds {
            *self.kinds.entry(kind).or_default() += count;
        }
        if let Some(ticks) = other.ticks {
            self.extend_time_range(ticks);
        }
    }

    /// All kinds with their counts, in no particular order.
    pub fn kinds(&self) -> impl Iterator<Item = (&Event, u64)> {
        self.kinds.iter().map(|(kind, count)| (kind, *count))
    }

    /// The total number of events.
    pub fn events(&self) -> u64 {
        self.kinds.values().sum()
    }

    /// Adds `count` events of the kind of `e`, with the given result.
    pub(super) fn add(&mut self, e: &Event, failed: bool, count: u64) {
        if count == 0 {
            return;
        }
        let Event { source, action, device, flags, api, .. } = *e;
        let kind = Event { source, action, device, flags, api, result: failed.into(), ..Event::EMPTY };
        *self.kinds.entry(kind).or_default() += count;
    }

    /// Extends the time range to include both timestamps.
    pub(super) fn extend_time_range(&mut self, (first, last): (u64, u64)) {
        let (f, l) = self.ticks.unwrap_or((first, last));
        self.ticks = Some((f.min(first), l.max(last)));
    }
}
