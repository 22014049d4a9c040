//! Rotation (`memtrace run --keep`): where the kept events of a trace begin, and how many are dropped. Since 1.6.

use crate::error::Result;
use crate::wire::{Cursor, put_varint};

/// The start of the kept events. Only the last definition of a trace counts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Rotation {
    /// The [`seq`](crate::event::Event::seq) of the first kept event. Earlier events are older: they recreate the
    /// state.
    pub first_seq: u64,
    /// The number of events that all rotations of the trace have dropped.
    pub dropped: u64,
    /// The number of events before the first kept one that recreate the state.
    pub recreating: u64,
    /// The time of the first event of the recording, and of the last one that was dropped, in the unit of
    /// [`crate::clock`].
    pub dropped_ticks: (u64, u64),
}

impl Rotation {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let (first, last) = self.dropped_ticks;
        for number in [self.first_seq, self.dropped, self.recreating, first, last] {
            put_varint(out, number);
        }
    }

    pub(crate) fn decode(c: &mut Cursor<'_>) -> Result<Rotation> {
        Ok(Rotation {
            first_seq: c.varint()?,
            dropped: c.varint()?,
            recreating: c.varint()?,
            dropped_ticks: (c.varint()?, c.varint()?),
        })
    }
}
