//! The ranges that the program names, for the tracks below the timeline: when each began and ended, and each device's
//! allocated bytes then and at the highest point between.
//!
//! A page has at most [`MAX_RANGES`] ranges: the longest. A range is at least as long as those inside it, so no range
//! is left out whose inner ranges are in the page. Of the rows of ranges, a page has at most [`MAX_TRACKS`], the
//! outermost.

use std::collections::HashMap;
use std::io::Write;

use memtrace_insight::rules::label_rule;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::Event;
use memtrace_trace::file::{Definitions, Label};
use memtrace_trace::ids::ThreadId;
use serde_json::{Value, json};

use super::dictionary::Dictionary;
use super::encode::{Clock, Column, Records, Rising, Tag};
use crate::named_ranges::{NamedRange, NamedRanges};

const MAX_RANGES: usize = 1 << 14;
const MAX_TRACKS: usize = 8;

/// The allocated bytes of a device around a range.
#[derive(Clone, Copy, Debug, Default)]
struct Levels {
    start: u64,
    peak: u64,
    end: u64,
}

/// A range that has ended.
struct Ended<'a> {
    label: &'a Label,
    thread: ThreadId,
    row: u32,
    /// `seq` and clock ticks.
    from: (u64, u64),
    to: (u64, u64),
    /// By device.
    levels: Vec<Levels>,
}

/// Collects the ranges while a recording streams.
pub(super) struct Annotations<'a> {
    definitions: &'a Definitions,
    open: NamedRanges<'a, Vec<Levels>>,
    ended: Vec<Ended<'a>>,
    left_out: u64,
    /// The threads, in the order of their first ranges.
    threads: Vec<ThreadId>,
    /// By device: the allocated bytes, and their highest number since a range last started or ended.
    now: Vec<(u64, u64)>,
    last: (u64, u64),
}

impl<'a> Annotations<'a> {
    pub(super) fn new(definitions: &'a Definitions, devices: usize) -> Annotations<'a> {
        Annotations {
            definitions,
            open: NamedRanges::new(definitions),
            ended: Vec::new(),
            left_out: 0,
            threads: Vec::new(),
            now: vec![(0, 0); devices],
            last: (0, 0),
        }
    }

    /// Observes the allocated bytes of a device after an allocation or a free.
    #[inline]
    pub(super) fn level(&mut self, device: usize, bytes: u64) {
        if let Some((now, highest)) = self.now.get_mut(device) {
            *now = bytes;
            *highest = bytes.max(*highest);
        }
    }

    /// Observes the position of any event.
    #[inline]
    pub(super) fn event(&mut self, e: &Event) {
        self.last = (e.seq, e.ticks);
    }

    /// Observes the start or the end of a range.
    pub(super) fn observe(&mut self, e: &Event) {
        self.update_peaks();
        let levels = || self.now.iter().map(|(now, _)| Levels { start: *now, peak: *now, end: *now }).collect();
        if let Some(range) = self.open.observe(e, levels) {
            self.end(range, (e.seq, e.ticks));
        }
    }

    fn update_peaks(&mut self) {
        for range in self.open.open() {
            for (levels, (_, highest)) in range.kept.iter_mut().zip(&self.now) {
                levels.peak = levels.peak.max(*highest);
            }
        }
        for (now, highest) in &mut self.now {
            *highest = *now;
        }
    }

    fn end(&mut self, range: NamedRange<'a, Vec<Levels>>, to: (u64, u64)) {
        let thread = range.thread();
        if !self.threads.contains(&thread) {
            self.threads.push(thread);
        }
        let NamedRange { label, start, row, kept: mut levels } = range;
        for (levels, (now, _)) in levels.iter_mut().zip(&self.now) {
            levels.end = *now;
        }
        self.ended.push(Ended { label, thread, row, from: (start.seq, start.ticks), to, levels });
        if self.ended.len() >= 2 * MAX_RANGES {
            self.keep_longest();
        }
    }

    /// Keeps the longest ranges. Of equal ones, an outer one precedes those inside it, and then the first.
    fn keep_longest(&mut self) {
        if self.ended.len() > MAX_RANGES {
            let ticks = |one: &Ended<'_>| one.to.1.saturating_sub(one.from.1);
            self.ended.sort_by_key(|one| (std::cmp::Reverse(ticks(one)), one.row, one.from.0));
            self.left_out += (self.ended.len() - MAX_RANGES) as u64;
            self.ended.truncate(MAX_RANGES);
        }
    }

    /// Writes the ranges in the order of their starts. Returns what the page's JSON has about them; `None` without any.
    pub(super) fn write<W: Write>(
        mut self,
        records: &mut Records<W>,
        dictionary: &mut Dictionary<'_>,
        clock: &Clock,
    ) -> Option<Value> {
        self.update_peaks();
        self.left_out += self.open.left_out();
        let open = std::mem::replace(&mut self.open, NamedRanges::new(self.definitions));
        open.finish().into_iter().for_each(|range| self.end(range, self.last));
        self.keep_longest();
        let tracks = self.tracks();
        let before = self.ended.len();
        self.ended.retain(|one| tracks.contains_key(&(one.thread, one.row)));
        self.left_out += (before - self.ended.len()) as u64;
        if self.ended.is_empty() {
            return None;
        }
        self.ended.sort_by_key(|one| (one.from.0, one.row, one.to.0));
        let (mut from, mut began) = (Rising::default(), Rising::default());
        let mut columns: [Column; 4] = Default::default();
        let mut levels: Vec<Column> = vec![Column::default(); 3 * self.now.len()];
        for one in &self.ended {
            let [length, duration, track, name] = &mut columns;
            from.put(one.from.0);
            length.put(one.to.0.saturating_sub(one.from.0));
            began.put(clock.us(one.from.1));
            duration.put(clock.us(one.to.1).saturating_sub(clock.us(one.from.1)));
            track.put(tracks[&(one.thread, one.row)] as u64);
            name.put((dictionary.string(&one.label.text) as u64) << 2 | kind(one.label));
            for (device, one) in one.levels.iter().enumerate() {
                levels[3 * device].put(one.start);
                levels[3 * device + 1].put(one.peak.saturating_sub(one.start));
                levels[3 * device + 2].put_signed(one.end.wrapping_sub(one.start) as i64);
            }
        }
        let [length, duration, track, name] = &mut columns;
        let mut all = vec![&mut from.column, length, &mut began.column, duration, track, name];
        all.extend(levels.iter_mut());
        records.columns(Tag::Ranges, &[self.ended.len() as u64, self.now.len() as u64], &mut all);
        let mut rows: Vec<(usize, ThreadId)> = tracks.iter().map(|((thread, _), track)| (*track, *thread)).collect();
        rows.sort_unstable();
        let name = |thread| self.definitions.thread(thread).map_or_else(String::new, |thread| thread.name.to_string());
        let tracks: Vec<usize> = rows.into_iter().map(|(_, thread)| dictionary.string(&name(thread))).collect();
        Some(json!({ "tracks": tracks, "left_out": self.left_out }))
    }

    /// The track of each row of each thread: the outermost rows, those of one thread together.
    fn tracks(&self) -> HashMap<(ThreadId, u32), usize> {
        let place = |thread: ThreadId| self.threads.iter().position(|one| *one == thread).unwrap_or(usize::MAX);
        let mut rows: Vec<(u32, usize, ThreadId)> =
            self.ended.iter().map(|one| (one.row, place(one.thread), one.thread)).collect();
        rows.sort_unstable();
        rows.dedup();
        rows.truncate(MAX_TRACKS);
        rows.sort_unstable_by_key(|(row, place, _)| (*place, *row));
        rows.into_iter().enumerate().map(|(track, (row, _, thread))| ((thread, row), track)).collect()
    }
}

/// 0: `record_function`, 1: NVTX, 2: a range of PyTorch itself.
fn kind(label: &Label) -> u64 {
    match label.origin {
        LabelOrigin::Nvtx => 1,
        _ if label_rule(label).is_some() => 2,
        _ => 0,
    }
}
