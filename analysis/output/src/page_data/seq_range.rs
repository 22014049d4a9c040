//! The range of a recording that a page has.

/// The part of a recording that the data is about: its first and its last event, by `seq`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeqRange {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// Where an event is, relative to a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RangePosition {
    Before,
    Inside,
    After,
}

impl SeqRange {
    pub(super) const WHOLE: SeqRange = SeqRange { first: 0, last: u64::MAX };

    #[inline]
    pub(super) fn place(&self, seq: u64) -> RangePosition {
        if seq < self.first {
            RangePosition::Before
        } else if seq > self.last {
            RangePosition::After
        } else {
            RangePosition::Inside
        }
    }

    /// The maximum number of its events.
    pub(super) fn length(&self) -> u64 {
        self.last.saturating_sub(self.first).saturating_add(1)
    }

    /// Whether a block was allocated during the part. `end` is the event that freed it.
    pub(super) fn has_block(&self, allocated: u64, end: Option<u64>) -> bool {
        allocated <= self.last && end.is_none_or(|end| end >= self.first)
    }
}
