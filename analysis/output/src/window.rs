//! Selects the part of a process's recording that an export shows: steps, a named range, a time range, the newest
//! events, one device, blocks of some size.
//!
//! Every export takes a [`Window`], and a window is a consistent view. Blocks allocated before its start are there.
//! Blocks freed after its end are still allocated at its end. Blocks below the minimum size do not occur. Categories,
//! phases and steps are those of the whole recording. [`LeftOut`] counts what a window does not show.

use std::collections::{BTreeMap, VecDeque};

use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use memtrace_input::EventSource;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::{Process, Run};
use memtrace_insight::passes::{Analysis, BlockAllocation, BlockClassification, BlockObserver, FirstPass, RangeNames};
use memtrace_replay::{Allocator, Block, BlockState, Change, Replay, Segment, Usage};

/// A selection of events. The default selects everything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// From the first block of the first of these steps to the event before the first block after the last of these
    /// steps.
    pub steps: Option<(u32, u32)>,
    /// From the first start of a range with this name (`record_function`, NVTX, `annotate`) to the last end of one.
    pub range: Option<String>,
    /// Start and end in nanoseconds since 1970, both inclusive.
    pub epoch_ns: Option<(u64, u64)>,
    /// Blocks smaller than this many bytes are left out.
    pub min_size: u64,
    /// The maximum number of events over all selected devices. The newest are kept, as in PyTorch's ring buffer.
    pub max_events: Option<u64>,
    /// Only this device; -1 is the CPU.
    pub device: Option<i16>,
}

/// The parts of its devices that a window omits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LeftOut {
    /// Events before its steps, its named range or its time range.
    pub before: u64,
    /// Events inside its steps and ranges that are older than the newest ones requested.
    pub older: u64,
    /// Events after it.
    pub after: u64,
    /// Blocks that are left out only because of their size.
    pub small_blocks: u64,
    /// Their bytes.
    pub small_bytes: u64,
}

/// A part of a recording. Events are identified by `seq`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    first: u64,
    last: u64,
    min_size: u64,
    device: Option<i16>,
    left_out: LeftOut,
}

impl Default for Window {
    fn default() -> Window {
        Window::WHOLE
    }
}

/// The time of a run's first event in nanoseconds since 1970; `None` without events.
pub fn run_start_ns(run: &Run) -> Option<u64> {
    let began = |p: &Process| p.trace_index().tick_range.map(|(first, _)| p.recording().calibration().epoch_ns(first));
    run.processes().iter().filter_map(began).min()
}

impl Window {
    /// The whole recording.
    pub const WHOLE: Window = Window {
        first: 0,
        last: u64::MAX,
        min_size: 0,
        device: None,
        left_out: LeftOut { before: 0, older: 0, after: 0, small_blocks: 0, small_bytes: 0 },
    };

    /// The selected part of a process's recording. `progress` receives the number of events read so far. The recording
    /// is read once for each bound that must be found, and once more for what is left out.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyWindow`], which says what the recording has.
    pub fn of(process: &Process, selection: &Selection, progress: &mut dyn FnMut(u64)) -> Result<Window> {
        let sources = &process.trace_index().sources;
        if let Some(device) = selection.device.filter(|device| !sources.contains_key(device)) {
            let devices: Vec<_> = sources.keys().map(i16::to_string).collect();
            let has = if devices.is_empty() {
                "it recorded no memory".to_owned()
            } else {
                format!("its devices are {}", devices.join(", "))
            };
            return Err(empty_window(process, &format!("has no events of device {device}"), has));
        }
        let mut window = Window { min_size: selection.min_size, device: selection.device, ..Window::WHOLE };
        if let Some(steps) = selection.steps {
            window.narrow_to_steps(process, steps, progress)?;
        }
        if let Some(name) = &selection.range {
            window.narrow_to_range(process, name, progress)?;
        }
        if let Some(time) = selection.epoch_ns {
            window.narrow_to_time(process, time, progress)?;
        }
        let bounds = window.first;
        if let Some(most) = selection.max_events {
            window.narrow_to_newest(process, most, progress)?;
        }
        let parts = Selection { device: None, ..selection.clone() };
        if parts != Selection::default() {
            window.count_left_out(process, bounds, progress);
        }
        Ok(window)
    }

    #[cfg(test)]
    pub(super) fn for_tests(first: u64, last: u64, min_size: u64) -> Window {
        Window { first, last, min_size, ..Window::WHOLE }
    }

    /// `seq` of its first and of its last event, which need not exist. `None` if it has no bounds.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        (self.first > 0 || self.last < u64::MAX).then_some((self.first, self.last))
    }

    /// The parts that it omits.
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// `seq` of its first event. The event itself need not exist.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// `seq` of its last event. The event itself need not exist.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Whether an event is in it.
    #[inline]
    pub(super) fn contains(&self, seq: u64) -> bool {
        (self.first..=self.last).contains(&seq)
    }

    /// Whether an event comes after it.
    #[inline]
    pub(super) fn is_past(&self, seq: u64) -> bool {
        seq > self.last
    }

    /// Whether it includes a device.
    #[inline]
    pub(super) fn has_device(&self, device: i16) -> bool {
        self.device.is_none_or(|only| only == device)
    }

    /// Whether it includes blocks of this many bytes.
    #[inline]
    pub(super) fn has_size(&self, size: u64) -> bool {
        size >= self.min_size
    }

    /// Its devices, with their event sources.
    pub(super) fn sources(&self, process: &Process) -> BTreeMap<i16, EventSource> {
        let sources = &process.trace_index().sources;
        sources
            .iter()
            .filter(|(device, _)| self.has_device(**device))
            .map(|(device, source)| (*device, *source))
            .collect()
    }

    /// A block as the window shows it: `Some` with its free, or with `None` if the block is still allocated at the
    /// window's end. `None` if the window does not show it.
    #[inline]
    pub(super) fn shows_block<'e>(
        &self,
        device: i16,
        block: &BlockAllocation,
        free: Option<&'e Event>,
    ) -> Option<Option<&'e Event>> {
        let free = free.filter(|free| !self.is_past(free.seq));
        let is_shown = !self.is_past(block.seq) && free.is_none_or(|free| free.seq >= self.first);
        (is_shown && self.has_size(block.memory.size) && self.has_device(device)).then_some(free)
    }

    /// Whether a change of a device's memory is shown, regardless of its time.
    #[inline]
    pub(super) fn shows_change(&self, allocator: &Allocator, e: &Event, change: &Change) -> bool {
        if e.flags.contains(Flags::PREEXISTING) {
            // Nothing happened: readers find such a block in the segments or by its free.
            return false;
        }
        match change {
            Change::Alloc(id) | Change::FreeRequested(id) => self.has_size(allocator.block(*id).size),
            Change::FreeCompleted(_, block) => self.has_size(block.size),
            Change::SegmentGained | Change::SegmentLost | Change::Oom | Change::Snapshot => true,
            Change::None => false,
        }
    }

    /// A device's segments as the window shows them. Blocks below the minimum size become free memory.
    pub(super) fn segments(&self, allocator: &Allocator) -> Vec<Segment> {
        let mut segments = allocator.segments();
        if self.min_size == 0 {
            return segments;
        }
        let is_hidden = |block: &Block| block.is_active() && !self.has_size(block.size);
        segments.retain(|segment| !segment.blocks.iter().any(|block| block.segment.implied && is_hidden(block)));
        for segment in &mut segments {
            let mut blocks: Vec<Block> = Vec::with_capacity(segment.blocks.len());
            let mut joins = false;
            for block in &segment.blocks {
                let hidden = is_hidden(block);
                let free = hidden || block.state == BlockState::Inactive;
                match blocks.last_mut() {
                    Some(last) if free && last.state == BlockState::Inactive && (hidden || joins) => {
                        last.size += block.size;
                        joins = true;
                        continue;
                    }
                    _ => {}
                }
                joins = hidden;
                let mut shown = *block;
                if hidden {
                    (shown.state, shown.stack, shown.context) = (BlockState::Inactive, StackId::NONE, ContextId::NONE);
                }
                blocks.push(shown);
            }
            segment.blocks = blocks;
        }
        segments
    }

    fn narrow_to_steps(
        &mut self,
        process: &Process,
        (from, to): (u32, u32),
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let recording = process.recording();
        let mut steps = StepFinder { from, to, found: None, recorded: None };
        Analysis::with_observer(
            recording,
            process.trace_index(),
            &FirstPass::of_process(process),
            &mut steps,
            progress,
        );
        let Some((first, last)) = steps.found else {
            let range = if from == to { format!("step {from}") } else { format!("steps {from}-{to}") };
            let has = match steps.recorded {
                Some((a, b)) if a == b => format!("its only step is {a}"),
                Some((a, b)) => format!("its steps are {a} to {b}"),
                None => "it has no steps".to_owned(),
            };
            return Err(empty_window(process, &format!("has no events in {range}"), has));
        };
        (self.first, self.last) = (self.first.max(first), self.last.min(last));
        Ok(())
    }

    fn narrow_to_range(&mut self, process: &Process, name: &str, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let mut names = RangeNames::new(process.definitions());
        let (mut first, mut last, mut open, mut done) = (None, 0, 0u64, 0);
        process.recording().stream(&mut |events| {
            for e in events.iter().filter(|e| e.source == Source::Label) {
                if names.label(e).is_none_or(|label| &*label.text != name) {
                    continue;
                }
                if e.action == Action::RangeStart {
                    first = first.or(Some(e.seq));
                    open += 1;
                } else {
                    last = e.seq;
                    open = open.saturating_sub(1);
                }
            }
            done += events.len() as u64;
            progress(done);
        });
        let Some(first) = first else {
            let has = "the report lists its named ranges".to_owned();
            return Err(empty_window(process, &format!("has no range {name}"), has));
        };
        let last = if open > 0 { u64::MAX } else { last };
        (self.first, self.last) = (self.first.max(first), self.last.min(last));
        if self.first > self.last {
            return Err(empty_window(process, &format!("has no range {name} in these steps"), String::new()));
        }
        Ok(())
    }

    fn narrow_to_time(
        &mut self,
        process: &Process,
        (from, to): (u64, u64),
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let recording = process.recording();
        let calibration = recording.calibration();
        let (mut first, mut last, mut done) = (None, None, 0);
        recording.stream(&mut |events| {
            for e in events.iter().filter(|e| !e.flags.contains(Flags::PREEXISTING)) {
                let at = calibration.epoch_ns(e.ticks);
                if first.is_none() && at >= from {
                    first = Some(e.seq);
                }
                if last.is_none() && at > to {
                    last = Some(e.seq - 1);
                }
            }
            done += events.len() as u64;
            progress(done);
        });
        let last = last.unwrap_or(u64::MAX);
        let (from_seq, to_seq) = (self.first.max(first.unwrap_or(u64::MAX)), self.last.min(last));
        if first.is_none() || from_seq > to_seq {
            let at = |ticks| calibration.epoch_ns(ticks);
            let Some((began, ended)) = process.trace_index().tick_range.map(|(a, b)| (at(a), at(b))) else {
                return Err(empty_window(process, "has no events", String::new()));
            };
            let since = |ns: u64| ns.saturating_sub(began) as f64 / 1e9;
            let has = format!(
                "its events span {:.6} s, and the range starts {:.6} s {} the first one",
                since(ended),
                from.abs_diff(began) as f64 / 1e9,
                if from < began { "before" } else { "after" },
            );
            return Err(empty_window(process, "has no events in this time range", has));
        }
        (self.first, self.last) = (from_seq, to_seq);
        Ok(())
    }

    fn narrow_to_newest(&mut self, process: &Process, most: u64, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
        let mut newest: VecDeque<u64> = VecDeque::new();
        let mut all = 0u64;
        self.for_each_change(process, progress, &mut |window, allocator, e, change| {
            if window.contains(e.seq) && window.shows_change(allocator, e, &change) && newest.back() != Some(&e.seq) {
                if newest.len() >= most {
                    newest.pop_front();
                }
                newest.push_back(e.seq);
                all += 1;
            }
        });
        if all > newest.len() as u64
            && let Some(first) = newest.front()
        {
            self.first = *first;
        }
        Ok(())
    }

    /// Counts what is left out. `bounds` is `seq` of the window's first event if it had all of its events.
    fn count_left_out(&mut self, process: &Process, bounds: u64, progress: &mut dyn FnMut(u64)) {
        let mut left = LeftOut::default();
        let mut latest = 0;
        let mut small: BTreeMap<(i16, u64), u64> = BTreeMap::new();
        let is_small = |size: u64| !self.has_size(size);
        let all = Window { min_size: 0, ..self.clone() };
        all.for_each_change(process, progress, &mut |window, allocator, e, change| {
            // Small blocks in the window. Those allocated before it count at its start.
            match change {
                Change::Alloc(id) if is_small(allocator.block(id).size) && !window.is_past(e.seq) => {
                    let block = allocator.block(id);
                    if let Some(size) = small.insert((e.device, block.addr), block.size)
                        && window.contains(e.seq)
                    {
                        left.small_blocks += 1;
                        left.small_bytes += size;
                    }
                }
                Change::FreeCompleted(_, block) if is_small(block.size) && !window.is_past(e.seq) => {
                    if let Some(size) = small.remove(&(e.device, block.addr))
                        && window.contains(e.seq)
                    {
                        left.small_blocks += 1;
                        left.small_bytes += size;
                    }
                }
                _ => {}
            }
            let is_shown = window.shows_change(allocator, e, &change);
            if is_shown && e.seq != latest && !window.contains(e.seq) {
                match e.seq {
                    seq if window.is_past(seq) => left.after += 1,
                    seq if seq >= bounds => left.older += 1,
                    _ => left.before += 1,
                }
            }
            latest = if is_shown { e.seq } else { latest };
        });
        left.small_blocks += small.len() as u64;
        left.small_bytes += small.values().sum::<u64>();
        self.left_out = left;
    }

    /// Passes every change of the devices' memory to `sink`, with the device's allocator.
    fn for_each_change(
        &self,
        process: &Process,
        progress: &mut dyn FnMut(u64),
        sink: &mut dyn FnMut(&Window, &Allocator, &Event, Change),
    ) {
        let mut replay = Replay::new(process.trace_index(), self.device);
        let mut done = 0;
        process.recording().stream(&mut |events| {
            for e in events {
                replay.apply(e, |replay, slot, e, change| sink(self, &replay.devices()[slot].allocator, e, change));
            }
            done += events.len() as u64;
            progress(done);
        });
    }
}

fn empty_window(process: &Process, what: &str, help: String) -> Error {
    let who = match process.rank() {
        Some(rank) => format!("rank {rank}"),
        None if process.pid() == 0 => process.path().display().to_string(),
        None => format!("process {}", process.pid()),
    };
    Error::EmptyWindow { reason: format!("{who} {what}"), help }
}

/// Finds where steps begin: at their first blocks.
struct StepFinder {
    from: u32,
    to: u32,
    found: Option<(u64, u64)>,
    recorded: Option<(u32, u32)>,
}

impl BlockObserver for StepFinder {
    fn allocated(&mut self, _: i16, block: &BlockAllocation, _: &Usage) {
        let Some(step) = block.position.step else { return };
        let (least, most) = self.recorded.unwrap_or((step, step));
        self.recorded = Some((least.min(step), most.max(step)));
        match &mut self.found {
            None if (self.from..=self.to).contains(&step) => self.found = Some((block.seq, u64::MAX)),
            Some((_, last)) if step > self.to && *last == u64::MAX => *last = block.seq - 1,
            _ => {}
        }
    }

    fn lifetime_ended(&mut self, _: i16, _: &BlockAllocation, _: &BlockClassification, _: FrameId, _: Option<&Event>) {}
}
