//! The events of a snapshot in a compact form. They are kept in memory, because a recording is streamed more than once.

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::ids::{ContextId, StackId};

/// The number of rows per chunk. Rows are stored in chunks so that no growing vector is ever copied.
const ROWS_PER_CHUNK: usize = 1 << 14;

/// An event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The address; in an `oom` event, the free bytes of the device.
    pub(super) addr: u64,
    pub(super) size: u64,
    /// Time in microseconds. Without times, the position in the file.
    pub(super) time: u64,
    pub(super) stack: StackId,
    pub(super) context: ContextId,
    /// The number of the stream in [`super::tables::Tables::streams`].
    pub(super) stream: u32,
    /// Bytes of the block beyond the request; [`u32::MAX`] if unknown.
    pub(super) slack: u32,
    pub(super) pool: u16,
    pub(super) action: Action,
}

impl Row {
    /// The value of `slack` if the block's size is unknown.
    pub(super) const NO_SLACK: u32 = u32::MAX;

    /// The row as an event without its `seq`.
    #[inline]
    pub(super) fn event(&self, device: i16, streams: &[u64]) -> Event {
        let has_slack = self.slack != Row::NO_SLACK;
        let flags = if has_slack { Flags::SLACK_KNOWN } else { Flags(0) };
        Event {
            ticks: self.time.saturating_mul(1000),
            addr: self.addr,
            size: self.size,
            stream: streams.get(self.stream as usize).copied().unwrap_or(0),
            stack: self.stack,
            context: self.context,
            action: self.action,
            device,
            // All contexts of a snapshot are autograd nodes.
            flags: if self.context.is_none() { flags } else { flags.with(Flags::IN_BACKWARD) },
            pool: self.pool,
            slack: if has_slack { self.slack } else { 0 },
            ..Event::EMPTY
        }
    }
}

/// All rows, in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Rows {
    chunks: Vec<Vec<Row>>,
}

impl Rows {
    /// The number of rows.
    pub(super) fn len(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * ROWS_PER_CHUNK + last.len())
    }

    /// The memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * ROWS_PER_CHUNK * size_of::<Row>()
    }

    #[inline]
    pub(super) fn push(&mut self, row: Row) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < ROWS_PER_CHUNK => last.push(row),
            _ => {
                // The first chunk grows as needed, so that small snapshots stay small.
                let mut chunk = if self.chunks.is_empty() { Vec::new() } else { Vec::with_capacity(ROWS_PER_CHUNK) };
                chunk.push(row);
                self.chunks.push(chunk);
            }
        }
    }

    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<&Row> {
        self.chunks.get(at / ROWS_PER_CHUNK)?.get(at % ROWS_PER_CHUNK)
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Row> {
        self.chunks.get_mut(at / ROWS_PER_CHUNK)?.get_mut(at % ROWS_PER_CHUNK)
    }
}
