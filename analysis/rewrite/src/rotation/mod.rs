//! Rotation: drops the oldest events of a trace that is still being written (`memtrace run --keep`).
//!
//! The new trace begins with the events that later ones need, in their original order and with their original numbers
//! and times: the allocations of all blocks and of all other memory in use, their mappings, open ranges, CUDA graphs.
//! All have [`Flags::PREEXISTING`]. A replay of them has the state of the full trace from the first kept event on.
//! Definitions stay, because the traced process may use any id again. Names, holders and cycles stay with their blocks.
//!
//! Facts that an analysis derives from the order of events (phases, steps, categories of blocks that steps have kept)
//! are derived once more from the full trace, for the file beside the new one ([`KeptState`]).
//!
//! Memory grows with the state and the definitions, never with the number of events.

mod calls;
mod named;
mod partial_recording;
mod state;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use memtrace_input::error::{Error, Result};
use memtrace_input::load::TraceRecording;
use memtrace_input::{Budget, KeptState, Recording, TraceIndex};
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockObserver, FirstPass, PhaseTracker, StepEnds,
};
use memtrace_replay::{Change, Replay};
use memtrace_trace::definition::Definition;
use memtrace_trace::error::Result as WriteResult;
use memtrace_trace::event::{Action, Event, Flags, Source, UsageOccasion};
use memtrace_trace::file::{BlockInfo, Writer, definitions_before};
use memtrace_trace::ids::FrameId;
use memtrace_trace::rotation::Rotation;

use calls::Calls;
use named::KeptDefinitions;
use partial_recording::{Cut, PartialRecording};
use state::{Blocks, corrections};

/// Which events to keep at least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// About the newest of the trace that take this many bytes.
    Bytes(u64),
    /// Those since this time, in the unit of [`memtrace_trace::clock`].
    Since(u64),
}

/// A rotated trace.
#[derive(Debug)]
pub struct Rotated<W> {
    /// The new trace, which goes on as the old one does from [`Self::copied_to`] on.
    pub out: W,
    /// The offset in the old trace whose frames before it are in the new one, or dropped.
    pub copied_to: u64,
    /// `seq` of the first kept event.
    pub first_seq: u64,
    /// The number of events that were dropped, in all rotations so far.
    pub dropped: u64,
    /// The part of them that the new trace does not have again.
    pub missing: u64,
    /// The content of the file beside the new trace. It also has the state of the old trace.
    pub kept_state: Vec<u8>,
}

/// Writes the newest part of the trace in `file`, and what came before as far as it is needed, to `out`. `path` is for
/// messages. `kept_state` opens the file beside the trace ([`KeptState`]). If a rotated trace has none that can be
/// read, its new state has only what came after the last rotation. `None` if there is nothing to drop.
///
/// # Errors
///
/// If the trace cannot be read, or `out` cannot be written.
pub fn rotate<W: Write>(
    path: &Path,
    file: File,
    kept_state: impl FnOnce() -> io::Result<File>,
    keep: Keep,
    out: W,
) -> Result<Option<Rotated<W>>> {
    let mut recording = TraceRecording::of_file(path, file)?.with_threads(1);
    // The new state says that something is missing.
    let _ = recording.read_kept_state(kept_state, &Budget::default());
    let whole = PartialRecording { recording: &recording, cut: None };
    let Some(cut) = cut(&whole, keep) else { return Ok(None) };
    let until = PartialRecording { cut: Some(cut), ..whole };
    let trace_index = TraceIndex::of(&whole);
    let mut state = StateAtCut::of(&until, cut, PhaseTracker::of(&whole), &trace_index);
    state.retract_later(&recording, cut);
    let mut known = KnownBlocks::default();
    let first_pass = FirstPass::of(&until, &trace_index);
    let analysis = Analysis::with_observer(&until, &trace_index, &first_pass, &mut known, &mut |_| {});
    let cannot_write = |cause| Error::Trace { path: path.to_owned(), cause };
    state.write(&recording, cut, &trace_index, &analysis, &known, out).map(Some).map_err(cannot_write)
}

/// Where to cut: where a step ends, if one does soon after the oldest event to keep. `None` if there is nothing to
/// drop.
fn cut(whole: &PartialRecording<'_>, keep: Keep) -> Option<Cut> {
    let blocks = whole.recording.reader().blocks();
    let end = blocks.last()?.end();
    let is_new = |block: &&BlockInfo| match keep {
        Keep::Bytes(bytes) => end - block.offset <= bytes,
        Keep::Since(ticks) => block.last_ticks >= ticks,
    };
    let oldest = blocks.iter().position(|block| is_new(&block))?.max(1);
    let first_seq = blocks.get(oldest)?.first_seq;
    let soon = blocks.get(oldest + (blocks.len() - oldest) / 4)?.first_seq;
    let ends = StepEnds::of(whole);
    let first_seq =
        ends.all().iter().map(|end| end + 1).find(|seq| (first_seq..=soon).contains(seq)).unwrap_or(first_seq);
    let block = blocks.iter().skip(oldest).take_while(|block| block.first_seq <= first_seq).count() + oldest - 1;
    Some(Cut { first_seq, block })
}

/// The blocks in use at the end of an analysis.
#[derive(Default)]
struct KnownBlocks(HashMap<u64, (BlockAllocation, BlockClassification)>);

impl BlockObserver for KnownBlocks {
    fn lifetime_ended(
        &mut self,
        _: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        if free.is_none() {
            self.0.insert(block.seq, (*block, *classification));
        }
    }
}

/// The state of the process at the first kept event.
struct StateAtCut {
    replay: Replay,
    calls: Calls,
    blocks: Blocks,
    tracker: PhaseTracker,
    /// The number of events so far, without those that recreate an earlier state.
    events: u64,
    began_ticks: Option<u64>,
    /// The number and the time of the last event.
    last: Event,
}

impl StateAtCut {
    fn of(until: &PartialRecording<'_>, cut: Cut, tracker: PhaseTracker, trace_index: &TraceIndex) -> StateAtCut {
        let mut state = StateAtCut {
            replay: Replay::new(trace_index, None),
            calls: Calls::default(),
            blocks: Blocks::default(),
            tracker,
            events: 0,
            began_ticks: None,
            last: Event::EMPTY,
        };
        until.stream(&mut |events| events.iter().for_each(|e| state.take(e)));
        state.last = Event { seq: cut.first_seq.saturating_sub(1), ticks: state.last.ticks, ..Event::EMPTY };
        state
    }

    fn take(&mut self, e: &Event) {
        if !e.flags.contains(Flags::PREEXISTING) {
            self.events += 1;
            self.began_ticks.get_or_insert(e.ticks);
        }
        self.last.ticks = self.last.ticks.max(e.ticks);
        if e.source == Source::Label {
            self.tracker.observe_label(e);
            self.calls.observe_range(e);
            return;
        }
        let StateAtCut { replay, blocks, tracker, .. } = self;
        replay.apply(e, |_, slot, e, change| {
            if matches!(change, Change::Alloc(_) | Change::FreeRequested(_) | Change::Oom) {
                tracker.observe(e);
            }
            blocks.observe(slot, e, &change);
        });
        if !e.source.is_torch() {
            self.calls.observe(e, self.replay.physical());
        }
    }

    /// Undoes frees that turn out to have failed shortly after the cut.
    fn retract_later(&mut self, recording: &TraceRecording, Cut { first_seq, block }: Cut) {
        let reader = recording.reader();
        let mut events = Vec::new();
        for at in [block, block + 1] {
            if reader.blocks().get(at).is_some_and(|block| reader.decode(block, &mut events).is_ok()) {
                let is_late =
                    |e: &&Event| e.action == Action::Retract && e.retracted_seq() < first_seq && e.seq >= first_seq;
                for e in events.iter().filter(is_late) {
                    self.replay.apply(e, |_, _, _, _| {});
                    self.calls.observe(e, self.replay.physical());
                }
            }
        }
    }

    fn write<W: Write>(
        mut self,
        recording: &TraceRecording,
        cut: Cut,
        trace_index: &TraceIndex,
        analysis: &Analysis,
        known: &KnownBlocks,
        out: W,
    ) -> WriteResult<Rotated<W>> {
        let Cut { first_seq, block } = cut;
        let reader = recording.reader();
        let definitions = recording.definitions();
        let rotated_before = definitions.rotation.as_ref();
        let dropped = self.events + rotated_before.map_or(0, |rotation| rotation.dropped);
        let began_ticks = rotated_before.map(|rotation| rotation.dropped_ticks.0).or(self.began_ticks).unwrap_or(0);
        let dropped_ticks = (began_ticks, self.last.ticks);
        let copied_to = reader.blocks()[block].end();

        let mut writer = Writer::new(out, recording.info())?;
        let mut kept = KeptDefinitions::new(definitions, &self.replay, first_seq);
        definitions_before(reader.file(), copied_to, &mut |definition, encoded| {
            if definition.is_none_or(|definition| kept.keeps(definition)) { writer.definition(encoded) } else { Ok(()) }
        })?;
        let progress = self.tracker.to_kept(first_seq);
        let now = self.tracker.now();
        let allocated = self.replay.devices().iter().flat_map(|device| device.allocator.allocated());
        let blocks = allocated.filter_map(|(_, block)| {
            let (allocation, classification) = known.0.get(&block.seq)?;
            Some(allocation.to_kept(classification, now))
        });
        let blocks = blocks.collect();
        // The first and the last clock point give the rate, the first one the time of day.
        let points = reader.clock_points();
        for point in points.first().into_iter().chain(points.get(1..).and_then(<[_]>::last)) {
            writer.clock(*point)?;
        }
        writer.counters(&reader.counters())?;
        let recreating = self.into_events(trace_index, analysis);
        let rotation = Rotation { first_seq, dropped, recreating: recreating.len() as u64, dropped_ticks };
        let before = recording.kept_state();
        let is_partial = rotated_before.is_some() && before.is_none_or(|state| state.is_partial);
        let state = KeptState { rotation, is_partial, progress, blocks };
        let mut encoded = Vec::new();
        Definition::Rotation { rotation }.encode(&mut encoded);
        writer.definition(&encoded)?;
        for e in &recreating {
            writer.event(e)?;
        }
        let mut events = Vec::new();
        if reader.decode(&reader.blocks()[block], &mut events).is_ok() {
            for e in cut.split(&events).1 {
                writer.event(e)?;
            }
        }
        writer.flush()?;
        let missing = dropped.saturating_sub(recreating.len() as u64);
        let out = writer.into_out()?;
        Ok(Rotated { out, copied_to, first_seq, dropped, missing, kept_state: state.to_file(before) })
    }

    /// The events that recreate the state, in order.
    fn into_events(self, trace_index: &TraceIndex, analysis: &Analysis) -> Vec<Event> {
        let StateAtCut { replay, calls, blocks, last, .. } = self;
        let mut events = calls.into_events(last.seq);
        events.extend(blocks.events(&replay, &last));
        for (device, memory) in &analysis.device_memory {
            let reading = |used: u64, occasion: UsageOccasion| Event {
                source: Source::Driver,
                action: Action::DeviceUsage,
                device: *device,
                addr: memory.total.saturating_sub(used),
                size: memory.total,
                stream: occasion as u64,
                ..last
            };
            events.extend(memory.context.map(|used| reading(used, UsageOccasion::ContextCreated)));
            if memory.readings > 0 {
                events.push(reading(memory.end.used, UsageOccasion::Other));
            }
        }
        for e in &mut events {
            e.flags = e.flags.with(Flags::PREEXISTING);
        }
        events.sort_by_key(|e| (e.seq, place(e)));
        events.dedup();
        let corrections = corrections(&replay, trace_index, &events, &last);
        events.extend(corrections);
        events
    }
}

/// The order of events with the same number: a segment comes before the first block in it. The driver's reading comes
/// when everything is allocated.
fn place(e: &Event) -> u8 {
    match (e.source.is_torch(), e.action) {
        (false, Action::DeviceUsage) => 4,
        (false, _) => 0,
        (true, Action::SegmentAlloc | Action::SegmentMap) => 1,
        (true, Action::Alloc) => 2,
        (true, _) => 3,
    }
}
