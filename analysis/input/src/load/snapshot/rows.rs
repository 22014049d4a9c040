//! Events as a snapshot tells them, small: they are kept, since a recording is streamed more than once.

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::{ContextId, StackId};

/// Rows of a piece: no vector that grows is ever copied.
const PIECE: usize = 1 << 14;

/// An event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The address; of `oom` what was free.
    pub(super) addr: u64,
    pub(super) size: u64,
    /// Microseconds; without times the place in the file.
    pub(super) time: u64,
    pub(super) stack: StackId,
    pub(super) context: ContextId,
    /// By number, see [`super::tables::Tables::streams`].
    pub(super) stream: u32,
    /// Bytes of the block beyond the request; [`u32::MAX`] where nobody told.
    pub(super) slack: u32,
    pub(super) pool: u16,
    pub(super) action: Action,
}

impl Row {
    /// Nobody told how large the block is.
    pub(super) const NO_SLACK: u32 = u32::MAX;

    /// The row as an event, but for its number.
    #[inline]
    pub(super) fn event(&self, device: i16, streams: &[u64]) -> Event {
        let known = self.slack != Row::NO_SLACK;
        Event {
            ticks: self.time.saturating_mul(1000),
            addr: self.addr,
            size: self.size,
            stream: streams.get(self.stream as usize).copied().unwrap_or(0),
            stack: self.stack,
            context: self.context,
            action: self.action,
            device,
            flags: if known { Flags::SLACK_KNOWN } else { Flags(0) },
            pool: self.pool,
            slack: if known { self.slack } else { 0 },
            ..Event::EMPTY
        }
    }
}

/// All of them, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pieces: Vec<Vec<Row>>,
}

impl Rows {
    /// How many.
    pub(super) fn len(&self) -> usize {
        self.pieces.last().map_or(0, |last| (self.pieces.len() - 1) * PIECE + last.len())
    }

    /// Bytes taken.
    pub(super) fn bytes(&self) -> usize {
        self.pieces.len() * PIECE * size_of::<Row>()
    }

    #[inline]
    pub(super) fn push(&mut self, row: Row) {
        match self.pieces.last_mut() {
            Some(last) if last.len() < PIECE => last.push(row),
            _ => {
                // The first is as large as need be.
                let mut piece = if self.pieces.is_empty() { Vec::new() } else { Vec::with_capacity(PIECE) };
                piece.push(row);
                self.pieces.push(piece);
            }
        }
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<&Row> {
        self.pieces.get(at / PIECE)?.get(at % PIECE)
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Row> {
        self.pieces.get_mut(at / PIECE)?.get_mut(at % PIECE)
    }
}
