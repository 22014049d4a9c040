//! The sum of several processes' allocated bytes on a common clock, for the timeline that is stacked by rank.
//!
//! The sum changes at each allocation and free of any process. If the page has every event, this data is their common
//! order; the page adds up the totals of its devices. Otherwise it is the sum and its parts at chosen points: the
//! highest, the lowest and the last of each of [`RANGES`] ranges of events. So each point is exact, and no peak is
//! lost.
//!
//! Every process is read on a thread of its own, and their events are merged by time. Memory does not grow with events.

use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use serde_json::json;

use super::encode::{Column, ROWS, Records, Rising, Tag};
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_replay::{Change, Replay};

const RANGES: u64 = 10_000;
/// The number of changes that a thread hands over at once, and how many times it does before it waits.
const BATCH: usize = 1 << 12;
const BATCHES_IN_FLIGHT: usize = 4;

/// A device of a process whose bytes are added up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankSeries {
    /// The place of the process among those of the page.
    pub process: usize,
    /// The device; -1 is the CPU.
    pub device: i16,
}

/// The allocated bytes of a series after a change.
#[derive(Clone, Copy, Debug)]
struct Level {
    ns: u64,
    series: usize,
    allocated: u64,
}

/// Writes the sum of `series`, of which those of one process are neighbors. `is_complete` means that the page has every
/// event of these devices. `progress` receives the number of changes merged so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn rank_totals(
    processes: &[&Process],
    series: &[RankSeries],
    is_complete: bool,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let begin_ns = |process: &Process| {
        let first = process.trace_index().tick_range.map(|(first, _)| first);
        first.map_or(0, |first| process.recording().calibration().epoch_ns(first))
    };
    let begins: Vec<u64> = processes.iter().map(|process| begin_ns(process)).collect();
    let begin = series.iter().filter_map(|one| begins.get(one.process).copied()).min().unwrap_or(0);
    let events: u64 = processes.iter().map(|process| process.recording().event_count()).sum();
    let mut records = Records::new(out);
    let mut order = Order::default();
    let mut points = Points::new(series.len(), events.div_ceil(RANGES).max(1));
    let mut done = 0;
    merge(processes, series, &mut |level| {
        if is_complete {
            order.put(level, &mut records)
        } else {
            points.put(level)
        }
        done += 1;
        if done % ROWS == 0 {
            progress(done);
        }
    });
    if is_complete {
        order.write(&mut records);
    } else {
        points.write(&mut records, begin);
    }
    let series: Vec<_> = series.iter().map(|one| json!([one.process, one.device])).collect();
    let table = json!({ "begin_ns": begin.to_string(), "complete": is_complete, "events": done, "series": series });
    records.bytes(Tag::Json, table.to_string().as_bytes());
    records.finish().map(drop).map_err(Error::io("cannot write the page"))
}

/// Passes every change of `series` to `put`, in the order of time. Changes of one process keep their order, and of
/// changes at the same nanosecond that of the first process comes first.
fn merge(processes: &[&Process], series: &[RankSeries], put: &mut dyn FnMut(Level)) {
    std::thread::scope(|scope| {
        let mut sources: Vec<Source> = Vec::new();
        for (number, process) in processes.iter().enumerate() {
            let own = series.iter().enumerate().filter(|(_, one)| one.process == number);
            let own: Vec<(usize, i16)> = own.map(|(at, one)| (at, one.device)).collect();
            if !own.is_empty() {
                let (sender, receiver) = sync_channel(BATCHES_IN_FLIGHT);
                scope.spawn(move || read(process, &own, &sender));
                sources.push(Source { receiver, batch: Vec::new().into_iter(), next: None });
            }
        }
        sources.iter_mut().for_each(Source::advance);
        loop {
            let first = sources.iter_mut().filter(|one| one.next.is_some());
            // The first of equal ones.
            let Some(source) = first.min_by_key(|one| one.next.map_or(u64::MAX, |level| level.ns)) else { break };
            if let Some(level) = source.next {
                put(level);
            }
            source.advance();
        }
    });
}

/// Sends the changes of one process.
fn read(process: &Process, series: &[(usize, i16)], sender: &SyncSender<Vec<Level>>) {
    let calibration = process.recording().calibration();
    let mut replay = Replay::new(process.trace_index(), None);
    let mut batch = Vec::with_capacity(BATCH);
    let mut last_ns = 0;
    process.recording().stream(&mut |events| {
        for e in events {
            replay.apply(e, |replay, slot, e, change| {
                if !matches!(change, Change::Alloc(_) | Change::FreeRequested(_)) {
                    return;
                }
                let device = &replay.devices()[slot];
                let Some((series, _)) = series.iter().find(|(_, ordinal)| *ordinal == device.device) else { return };
                last_ns = calibration.epoch_ns(e.ticks).max(last_ns);
                batch.push(Level { ns: last_ns, series: *series, allocated: device.allocator.usage().allocated });
            });
            if batch.len() >= BATCH {
                // The receiver lives until all senders are gone.
                let _ = sender.send(std::mem::replace(&mut batch, Vec::with_capacity(BATCH)));
            }
        }
    });
    let _ = sender.send(batch);
}

/// The changes of one process.
struct Source {
    receiver: Receiver<Vec<Level>>,
    batch: std::vec::IntoIter<Level>,
    next: Option<Level>,
}

impl Source {
    fn advance(&mut self) {
        loop {
            self.next = self.batch.next();
            if self.next.is_some() {
                return;
            }
            match self.receiver.recv() {
                Ok(batch) => self.batch = batch.into_iter(),
                Err(_) => return,
            }
        }
    }
}

/// The series of each change.
#[derive(Default)]
struct Order {
    rows: u64,
    column: Column,
}

impl Order {
    fn put<W: Write>(&mut self, level: Level, records: &mut Records<W>) {
        self.column.put(level.series as u64);
        self.rows += 1;
        if self.rows >= ROWS {
            self.write(records);
        }
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>) {
        if self.rows > 0 {
            records.columns(Tag::Order, &[self.rows], &mut [&mut self.column]);
            self.rows = 0;
        }
    }
}

/// A state of the sum.
#[derive(Clone, Debug, Default)]
struct State {
    /// The number of changes before it.
    number: u64,
    ns: u64,
    total: u64,
    /// By series.
    parts: Vec<u64>,
}

/// The points of the sum.
struct Points {
    width: u64,
    now: State,
    range: Option<u64>,
    low: State,
    high: State,
    chosen: Vec<State>,
    changes: u64,
}

impl Points {
    fn new(series: usize, width: u64) -> Points {
        let now = State { parts: vec![0; series], ..State::default() };
        Points { width, low: now.clone(), high: now.clone(), now, range: None, chosen: Vec::new(), changes: 0 }
    }

    fn put(&mut self, level: Level) {
        let range = self.changes / self.width;
        if self.range != Some(range) {
            self.close();
        }
        let part = &mut self.now.parts[level.series];
        self.now.total = self.now.total - *part + level.allocated;
        *part = level.allocated;
        (self.now.number, self.now.ns) = (self.changes, level.ns);
        self.changes += 1;
        let is_first = self.range.replace(range) != Some(range);
        if is_first || self.now.total > self.high.total {
            self.high.clone_from(&self.now);
        }
        if is_first || self.now.total < self.low.total {
            self.low.clone_from(&self.now);
        }
    }

    /// Ends the current range of changes.
    fn close(&mut self) {
        if self.range.is_none() {
            return;
        }
        let mut ends = [self.low.clone(), self.high.clone(), self.now.clone()];
        ends.sort_by_key(|state| state.number);
        for state in ends {
            if self.chosen.last().is_none_or(|last| last.number < state.number) {
                self.chosen.push(state);
            }
        }
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>, begin_ns: u64) {
        self.close();
        let (mut number, mut time) = (Rising::default(), Rising::default());
        let mut parts = vec![Column::default(); self.now.parts.len()];
        let mut before = vec![0u64; parts.len()];
        for state in &self.chosen {
            number.put(state.number);
            time.put(state.ns.saturating_sub(begin_ns) / 1000);
            for ((column, bytes), before) in parts.iter_mut().zip(&state.parts).zip(&mut before) {
                column.put_signed(bytes.wrapping_sub(*before) as i64);
                *before = *bytes;
            }
        }
        let mut all = vec![&mut number.column, &mut time.column];
        all.extend(parts.iter_mut());
        records.columns(Tag::Sums, &[self.chosen.len() as u64, self.now.parts.len() as u64], &mut all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_changes_keeps_its_extremes_and_its_end() {
        let mut points = Points::new(2, 4);
        let levels = [(0, 5), (1, 7), (0, 0), (1, 6), (0, 9)];
        for (ns, (series, allocated)) in (100..).zip(levels) {
            points.put(Level { ns, series, allocated });
        }
        points.close();
        let found: Vec<_> = points.chosen.iter().map(|one| (one.number, one.total, one.parts.clone())).collect();
        let expected = [(0, 5, vec![5, 0]), (1, 12, vec![5, 7]), (3, 6, vec![0, 6]), (4, 15, vec![9, 6])];
        assert_eq!(found, expected);
    }
}
