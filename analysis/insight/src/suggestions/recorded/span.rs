//! Blocks on a time axis that changes can lengthen, and the peak that they add up to.

use memtrace_replay::{AllocatorSettings, LimitedDevice, Policy};

/// A point in time between events. Events are far apart, so that changes can insert others between them.
pub(crate) type Key = u64;

const SUBDIVISIONS: u32 = 24;
const EVENT: u64 = 1 << (SUBDIVISIONS - 1);

/// The time of the event `seq`.
pub(crate) const fn at(seq: u32) -> Key {
    (seq as u64) << SUBDIVISIONS | EVENT
}

/// The time right after the event `seq`.
pub(crate) const fn after(seq: u32) -> Key {
    at(seq) + 1
}

/// The time of the inserted event number `index` before the event `seq`.
pub(crate) fn before(seq: u32, index: usize) -> Key {
    u64::from(seq) << SUBDIVISIONS | (index as u64).min(EVENT - 1)
}

/// The last recorded event at or before this time.
pub(crate) const fn seq_of(key: Key) -> u32 {
    ((key.saturating_sub(EVENT)) >> SUBDIVISIONS) as u32
}

/// A block from its allocation to its free, as recorded or changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: Key,
    /// Not before `start`. A span that starts and ends at the same time does not exist.
    pub(crate) end: Key,
    /// In bytes, without rounding.
    pub(crate) requested: u64,
    /// The index of the recorded block that it is, or a copy of.
    pub(crate) block: u32,
    pub(crate) stream_pool: u8,
}

impl Span {
    /// Removes the span.
    pub(crate) fn vanish(&mut self) {
        self.end = self.start;
    }

    pub(crate) fn exists(&self) -> bool {
        self.start < self.end && self.requested > 0
    }

    /// Ends the span at `end` if it would last longer.
    pub(crate) fn end_by(&mut self, end: Key) {
        self.end = self.end.min(end).max(self.start);
    }

    /// Makes the span last until `end` at least.
    pub(crate) fn last_until(&mut self, end: Key) {
        self.end = self.end.max(end);
    }
}

/// The allocations and frees of spans in order: time, whether it is an allocation, and the index of the span. At equal
/// times frees come first.
fn events(spans: &[Span]) -> Vec<(Key, bool, u32)> {
    let mut events = Vec::with_capacity(spans.len() * 2);
    for (index, span) in spans.iter().enumerate().filter(|(_, span)| span.exists()) {
        events.push((span.start, true, index as u32));
        if span.end < Key::MAX {
            events.push((span.end, false, index as u32));
        }
    }
    events.sort_unstable();
    events
}

/// The highest sum of rounded sizes, and when it is reached.
pub(crate) fn peak(spans: &[Span], settings: &AllocatorSettings) -> (u64, Key) {
    let (mut level, mut peak) = (0u64, (0, 0));
    for (key, allocates, index) in events(spans) {
        let size = settings.round(spans[index as usize].requested);
        if allocates {
            level += size;
            if level > peak.0 {
                peak = (level, key);
            }
        } else {
            level -= size;
        }
    }
    peak
}

/// The result of PyTorch's allocator with changed blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Placed {
    /// The highest allocated bytes, as `torch.cuda.max_memory_allocated` counts them.
    pub(crate) allocated: u64,
    /// The highest reserved bytes.
    pub(crate) reserved: u64,
    /// Whether every request got memory.
    pub(crate) fits: bool,
}

/// Replays the allocator's policy on a device with `limit` bytes for it, up to the first request that fails.
pub(crate) fn place(spans: &[Span], stream_pools: &[(u64, u16)], settings: &AllocatorSettings, limit: u64) -> Placed {
    let mut policy = Policy::new(settings.clone(), LimitedDevice::new(limit, false));
    let mut granted = vec![(0u64, 0u64); spans.len()];
    let mut placed = Placed { fits: true, ..Placed::default() };
    let mut level = 0u64;
    for (_, allocates, index) in events(spans) {
        let span = &spans[index as usize];
        let block = &mut granted[index as usize];
        if allocates {
            let (stream, pool) = stream_pools.get(usize::from(span.stream_pool)).copied().unwrap_or_default();
            let Some(allocated) = policy.alloc(span.requested, stream, pool) else {
                placed.fits = false;
                break;
            };
            *block = (allocated.addr, allocated.size);
            level += allocated.size;
            placed.allocated = placed.allocated.max(level);
        } else {
            policy.free(block.0);
            level -= block.1;
        }
    }
    placed.reserved = policy.peak_reserved();
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u32, end: u32, requested: u64) -> Span {
        Span { start: at(start), end: at(end), requested, block: 0, stream_pool: 0 }
    }

    #[test]
    fn the_peak_is_where_most_bytes_are_allocated_together() {
        let spans = [span(1, 5, 1000), span(2, 3, 512), span(3, 4, 512), span(6, 7, 2000), span(8, 8, 1 << 30)];
        let settings = AllocatorSettings::default();
        assert_eq!(peak(&spans, &settings), (2048, at(6)));
        assert_eq!(peak(&spans[..3], &settings), (1536, at(2)), "a free at the time of an allocation comes first");
    }

    #[test]
    fn the_policy_counts_what_it_does_not_split_and_reports_what_does_not_fit() {
        let mib = 1 << 20;
        let spans = [span(1, 5, 11 * mib), span(2, 6, 11 * mib)];
        let settings = AllocatorSettings::default();
        let whole = place(&spans, &[(0, 0)], &settings, u64::MAX);
        assert_eq!(whole, Placed { allocated: 24 * mib, reserved: 24 * mib, fits: true });
        assert!(!place(&spans, &[(0, 0)], &settings, 23 * mib).fits);
    }

    #[test]
    fn inserted_events_lie_between_recorded_ones() {
        assert!(after(6) < before(7, 0) && before(7, 0) < before(7, 1) && before(7, 1) < at(7) && at(7) < after(7));
        assert_eq!([seq_of(at(7)), seq_of(after(7)), seq_of(before(7, 3))], [7, 7, 6]);
    }
}
