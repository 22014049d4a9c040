//! When the batch of one process is flushed to its file: regularly, and where the process or an inquiry asks for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::writer::FileProgress;

/// The longest time an event waits in memory before it is flushed to the file.
const FLUSH_INTERVAL: Duration = Duration::from_millis(250);
/// The shortest interval between two flushes that the traced process requests. It bounds how much of the file they
/// take.
const REQUESTED_FLUSH_INTERVAL: Duration = Duration::from_millis(5);
/// The interval between clock points while the process records events.
const CLOCK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval between counter snapshots while the process records events.
const COUNTERS_INTERVAL: Duration = Duration::from_secs(4);
/// The flushes of one trace file.
#[derive(Debug)]
pub(super) struct Flushes {
    /// Updated by the writer. When the file cannot be written, the traced process stops producing events.
    progress: Arc<FileProgress>,
    /// The flushes that the traced process requests.
    of_process: FlushRequests,
    /// The number of the last inquiry, which the drain loop counts.
    last_inquiry: u64,
    /// The flushes for inquiries.
    of_inquiries: FlushRequests,
    flushed_at: Duration,
    clock_at: Duration,
    counters_at: Duration,
}

/// The contents of a flush that is due.
#[derive(Clone, Copy, Debug)]
pub(super) struct DueFlush {
    /// The request of the process and the inquiry that it serves.
    pub(super) request: Option<u64>,
    pub(super) inquiry: Option<u64>,
    pub(super) with_clock: bool,
    pub(super) with_counters: bool,
}

impl Flushes {
    /// `now` is the awake time of the drain loop.
    pub(super) fn new(progress: Arc<FileProgress>, now: Duration) -> Flushes {
        Flushes {
            progress,
            of_process: FlushRequests::default(),
            last_inquiry: 0,
            of_inquiries: FlushRequests::default(),
            flushed_at: now,
            clock_at: now,
            counters_at: now,
        }
    }

    /// The writer's progress with the trace file.
    pub(super) fn progress(&self) -> &Arc<FileProgress> {
        &self.progress
    }

    /// Whether the file can no longer be written.
    pub(super) fn has_failed(&self) -> bool {
        self.progress.failed.load(Ordering::Acquire)
    }

    /// The number of the last requested flush that has reached the file.
    pub(super) fn served(&self) -> u64 {
        self.progress.served.load(Ordering::Acquire)
    }

    /// Requests a flush for inquiry `number`.
    pub(super) fn inquire(&mut self, number: u64) {
        self.last_inquiry = number;
    }

    /// Reports a complete pass over the rings. Before it, `requested` was the newest request of the process. `end` is
    /// the number after the last event that the pass has found.
    pub(super) fn pass_completed(&mut self, requested: u64, end: u64) {
        self.of_process.taken(requested, end);
        self.of_inquiries.taken(self.last_inquiry, end);
    }

    /// The flush that is due at `now`, which must then be made. `next` is the number of the next event to release.
    /// `has_data` is true if anything waits to reach the file.
    pub(super) fn due(&mut self, now: Duration, next: u64, has_data: bool) -> Option<DueFlush> {
        let since = now.saturating_sub(self.flushed_at);
        let may_flush = since >= REQUESTED_FLUSH_INTERVAL;
        let request = if may_flush { self.of_process.ready(next) } else { None };
        let inquiry = if may_flush { self.of_inquiries.ready(next) } else { None };
        let is_requested = request.is_some() || inquiry.is_some();
        if !is_requested && (since < FLUSH_INTERVAL || !has_data) {
            return None;
        }
        let with_clock = is_requested || now.saturating_sub(self.clock_at) >= CLOCK_INTERVAL;
        let with_counters = is_requested || now.saturating_sub(self.counters_at) >= COUNTERS_INTERVAL;
        self.flushed_at = now;
        if with_clock {
            self.clock_at = now;
        }
        if with_counters {
            self.counters_at = now;
        }
        Some(DueFlush { request, inquiry, with_clock, with_counters })
    }
}

/// The flushes that the traced process, or inquiries, have requested. One is served at a time: the newest request
/// includes earlier ones.
#[derive(Default, Debug)]
struct FlushRequests {
    /// The number of the last request whose events were taken from the rings.
    taken: u64,
    /// The request to serve next, and the number of the event before which all events belong to it.
    waiting: Option<(u64, u64)>,
}

impl FlushRequests {
    /// Reports a complete pass over the rings. Before it, `requested` was the newest request. `end` is the number after
    /// the last event that the pass has found.
    fn taken(&mut self, requested: u64, end: u64) {
        if requested > self.taken && self.waiting.is_none() {
            self.taken = requested;
            self.waiting = Some((requested, end));
        }
    }

    /// The request whose events have all been released, now that `next` is the number of the next event to release.
    fn ready(&mut self, next: u64) -> Option<u64> {
        self.waiting.take_if(|(_, end)| next >= *end).map(|(request, _)| request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_served_when_its_events_are_released() {
        let mut requests = FlushRequests::default();
        requests.taken(0, 10);
        assert_eq!(requests.ready(10), None, "nothing was requested");
        requests.taken(1, 10);
        assert_eq!(requests.ready(9), None, "event 9 has not arrived");
        // A later request waits, because events 10 to 19 are not released yet.
        requests.taken(2, 20);
        assert_eq!(requests.ready(10), Some(1));
        assert_eq!(requests.ready(30), None);
        requests.taken(2, 20);
        assert_eq!((requests.ready(19), requests.ready(20), requests.ready(20)), (None, Some(2), None));
    }
}
