//! The first pass over a recording: all that must be known before the main pass.
//!
//! An [`Analysis`](super::Analysis) streams a recording once, which is the main pass. Some of its conclusions need
//! facts about later events: the names of tensors, the ends of steps, when memory stays after it was released, and
//! which points in time are to be explained. The first pass finds all of them in one stream, and streams nothing if the
//! recording has none. So a recording is streamed at most twice.

use std::sync::Arc;

use memtrace_trace::event::{Action, Event};

use super::phase::PhaseTracker;
use super::released::{Release, ReleaseFinder, ReleasePoint};
use super::replayed_memory::{ReplayedMemory, ReplayedMemoryCollector};
use super::stacks::StackTable;
use super::steps::{LabelRules, LoopFinder, TrainingLoop};
use memtrace_input::{EventSource, Process, Recording, TraceIndex};
use memtrace_replay::{Change, NameMatcher, Names, Replay};

/// Further facts that the first pass finds on request.
#[derive(Clone, Copy, Debug, Default)]
pub struct FirstPassOptions<'a> {
    /// When the most memory stays after each of these points.
    pub released_after: &'a [ReleasePoint],
    /// The points in time that can be explained: [`FirstPass::replayed_memory`].
    pub replayed_memory: bool,
}

/// The facts about a recording that the main pass needs from its start.
#[derive(Clone, Debug)]
pub struct FirstPass {
    /// The names of tensors and modules.
    pub names: Names,
    /// The peaks and the out-of-memory errors. `None` if they were not requested, and if the pass did not stream the
    /// recording: then there is no error.
    pub replayed_memory: Option<ReplayedMemory>,
    stacks: Arc<StackTable>,
    rules: LabelRules,
    training: TrainingLoop,
    /// In the order of time.
    pub(super) releases: Vec<Release>,
    pub(super) release_points: usize,
}

impl FirstPass {
    /// The first pass over a recording. Streams it if it has names of tensors or marks of steps, or no training.
    pub fn of(recording: &dyn Recording, trace_index: &TraceIndex) -> FirstPass {
        FirstPass::with_options(recording, trace_index, &FirstPassOptions::default(), None, &mut |_| {})
    }

    /// [`Self::of`] the recording of a process.
    pub fn of_process(process: &Process) -> FirstPass {
        FirstPass::of(process.recording(), process.trace_index())
    }

    /// [`Self::of`], with what the options and an observer need. An observer always needs a stream. `progress` receives
    /// the number of events read so far.
    pub fn with_options(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        options: &FirstPassOptions<'_>,
        observer: Option<&mut dyn ReplayObserver>,
        progress: &mut dyn FnMut(u64),
    ) -> FirstPass {
        let mut stream = Stream::new(recording, trace_index, options, observer);
        if stream.is_needed(trace_index) {
            let mut done = 0;
            recording.stream(&mut |events| {
                stream.observe(events);
                done += events.len() as u64;
                progress(done);
            });
        } else {
            stream.replayed_memory = None;
        }
        stream.finish(recording, trace_index)
    }

    /// The tracker of the recording, without another stream.
    pub fn tracker(&self, recording: &dyn Recording) -> PhaseTracker {
        PhaseTracker::new(recording, Arc::clone(&self.stacks), self.rules.clone(), self.training.clone())
    }

    /// The facts of every stack and node of the recording.
    pub fn stacks(&self) -> &StackTable {
        &self.stacks
    }
}

/// Observes the replay of the first pass.
pub trait ReplayObserver {
    /// An event comes.
    fn before(&mut self, e: &Event);
    /// The event changed the memory of the device with this index in the replay.
    fn changed(&mut self, replay: &Replay, slot: usize, e: &Event, change: &Change);
}

/// A recording that streams through the parts of the first pass.
struct Stream<'a, 'o> {
    replay: Replay,
    stacks: StackTable,
    rules: LabelRules,
    training: LoopFinder,
    names: NameMatcher<'a>,
    releases: ReleaseFinder<'a>,
    release_points: usize,
    replayed_memory: Option<ReplayedMemoryCollector>,
    observer: Option<&'o mut dyn ReplayObserver>,
    /// Whether all events are replayed. Otherwise only those up to the last name.
    is_replayed: bool,
    last_seq: u64,
}

impl<'a, 'o> Stream<'a, 'o> {
    fn new(
        recording: &'a dyn Recording,
        trace_index: &TraceIndex,
        options: &FirstPassOptions<'a>,
        observer: Option<&'o mut dyn ReplayObserver>,
    ) -> Stream<'a, 'o> {
        let definitions = recording.definitions();
        let stacks = StackTable::new(definitions);
        let rules = LabelRules::of(definitions);
        let replay = Replay::new(trace_index, None);
        let is_explained = options.replayed_memory && trace_index.sources.values().any(|s| *s == EventSource::Torch);
        let releases = ReleaseFinder::new(options.released_after, definitions, replay.devices().len());
        Stream {
            training: LoopFinder::new(definitions, &stacks, &rules),
            stacks,
            rules,
            names: NameMatcher::new(definitions),
            is_replayed: is_explained || releases.is_needed() || observer.is_some(),
            releases,
            release_points: options.released_after.len(),
            replayed_memory: is_explained.then(|| ReplayedMemoryCollector::new(&replay)),
            replay,
            observer,
            last_seq: 0,
        }
    }

    fn is_needed(&self, trace_index: &TraceIndex) -> bool {
        self.training.is_needed()
            || !self.names.is_done()
            || self.releases.is_needed()
            || self.replayed_memory.is_some() && trace_index.out_of_memory_errors > 0
            || self.observer.is_some()
    }

    fn observe(&mut self, events: &[Event]) {
        self.last_seq = events.last().map_or(self.last_seq, |e| e.seq);
        // Each of the two has caches of its own.
        if self.training.is_needed() {
            events.iter().for_each(|e| self.training.observe(e, &self.stacks));
        }
        if self.is_replayed || !self.names.is_done() {
            events.iter().for_each(|e| self.replay(e));
        }
    }

    #[inline]
    fn replay(&mut self, e: &Event) {
        let Stream { replay, names, releases, replayed_memory, observer, .. } = self;
        names.before(e.seq, replay);
        releases.before(e, replay);
        if let Some(observer) = observer {
            observer.before(e);
        }
        replay.apply(e, |replay, slot, e, change| {
            if let Some(memory) = replayed_memory {
                memory.changed(replay, slot, e, &change);
            }
            if let Some(observer) = observer {
                observer.changed(replay, slot, e, &change);
            }
        });
    }

    fn finish(self, recording: &dyn Recording, trace_index: &TraceIndex) -> FirstPass {
        let Stream { replay, stacks, rules, training, names, releases, replayed_memory, .. } = self;
        let ticks = trace_index.tick_range.map_or(0, |(_, last)| last);
        let last = Event { seq: self.last_seq, ticks, action: Action::Snapshot, ..Event::EMPTY };
        FirstPass {
            names: names.finish(&replay),
            replayed_memory: replayed_memory.map(|memory| memory.finish(&replay)),
            training: training.finish(recording.definitions(), &stacks),
            stacks: Arc::new(stacks),
            rules,
            releases: releases.finish(&last, &replay),
            release_points: self.release_points,
        }
    }
}
