//! Tests the replay against a naive model of PyTorch's caching allocator that makes its own events. The input is random
//! programs of allocations, frees, streams that keep blocks, freed segments and expandable segments.
//!
//! The model keeps blocks in plain vectors, one per segment, and finds everything by searching. It shares no code and
//! no data structure with the replay.

use memtrace_analysis::model::{Allocator, BlockState, Change, EventSource, Replay, TraceIndex};
use memtrace_trace::event::{Action, Event, Flags, Source};
use proptest::prelude::*;

const SMALL: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
const RESERVATION: u64 = 1 << 30;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Used,
    Pending,
    Unmapped,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    addr: u64,
    size: u64,
    requested: u64,
    state: State,
}

#[derive(Clone, Debug)]
struct Area {
    pieces: Vec<Piece>,
    small: bool,
    stream: u64,
    expandable: bool,
}

#[derive(Default, Debug)]
struct Model {
    areas: Vec<Area>,
    events: Vec<Event>,
    next: u64,
    expandable: bool,
    reports_slack: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Alloc { size: u64, stream: u64 },
    Free(prop::sample::Index),
    FreeLater(prop::sample::Index),
    Complete(prop::sample::Index),
    EmptyCache,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![1u64..2000, 1u64..SMALL, SMALL..(30 << 20), Just(SMALL), Just(SMALL + 1)];
    let step = prop_oneof![
        6 => (size, 0u64..2).prop_map(|(size, stream)| Step::Alloc { size, stream: stream * 77 }),
        4 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => any::<prop::sample::Index>().prop_map(Step::FreeLater),
        1 => any::<prop::sample::Index>().prop_map(Step::Complete),
        1 => Just(Step::EmptyCache),
    ];
    prop::collection::vec(step, 1..120)
}

impl Model {
    fn emit(&mut self, action: Action, addr: u64, size: u64, stream: u64, block: u64) {
        let seq = self.events.len() as u64 + 1;
        let mut e = Event { seq, ticks: seq, action, addr, size, stream, device: 0, ..Event::EMPTY };
        if action == Action::Alloc && self.reports_slack {
            e.flags = Flags::SLACK_KNOWN;
            e.slack = (block - size) as u32;
        }
        self.events.push(e);
    }

    fn alloc(&mut self, requested: u64, stream: u64) {
        let size = requested.max(512).div_ceil(512) * 512;
        let small = size <= SMALL;
        let (area, piece) = match self.find_free(size, small, stream) {
            Some(place) => place,
            None if self.expandable => self.grow(size, small, stream),
            None => self.new_segment(size, small, stream),
        };
        let pieces = &mut self.areas[area].pieces;
        let rest = pieces[piece].size - size;
        let split = if small || self.expandable { rest >= 512 } else { rest > SMALL };
        if split {
            let addr = pieces[piece].addr;
            pieces[piece].addr += size;
            pieces[piece].size -= size;
            pieces.insert(piece, Piece { addr, size, requested, state: State::Used });
        }
        let taken = &mut pieces[piece];
        (taken.state, taken.requested) = (State::Used, requested);
        let (addr, block) = (taken.addr, taken.size);
        self.emit(Action::Alloc, addr, requested, stream, block);
    }

    /// Best fit, then the lowest address.
    fn find_free(&self, size: u64, small: bool, stream: u64) -> Option<(usize, usize)> {
        let mut best: Option<(u64, u64, usize, usize)> = None;
        for (a, area) in self.areas.iter().enumerate().filter(|(_, a)| a.small == small && a.stream == stream) {
            for (p, piece) in area.pieces.iter().enumerate() {
                let fits = piece.state == State::Free && piece.size >= size;
                if fits && best.is_none_or(|(s, at, ..)| (piece.size, piece.addr) < (s, at)) {
                    best = Some((piece.size, piece.addr, a, p));
                }
            }
        }
        best.map(|(_, _, a, p)| (a, p))
    }

    fn new_segment(&mut self, size: u64, small: bool, stream: u64) -> (usize, usize) {
        let total = match (small, size < (10 << 20)) {
            (true, _) => SMALL_SEGMENT,
            (false, true) => LARGE_SEGMENT,
            (false, false) => size.div_ceil(SMALL_SEGMENT) * SMALL_SEGMENT,
        };
        let addr = (self.next + 1) << 32;
        self.next += 1;
        let piece = Piece { addr, size: total, requested: 0, state: State::Free };
        self.areas.push(Area { pieces: vec![piece], small, stream, expandable: false });
        self.emit(Action::SegmentAlloc, addr, total, stream, 0);
        (self.areas.len() - 1, 0)
    }

    /// Maps as much after the last free piece (or from the first unmapped one) as the request needs.
    fn grow(&mut self, size: u64, small: bool, stream: u64) -> (usize, usize) {
        let granule = if small { SMALL_SEGMENT } else { LARGE_SEGMENT };
        let found = self.areas.iter().position(|a| a.small == small && a.stream == stream && a.room_at_end() >= size);
        let area = found.unwrap_or_else(|| {
            let addr = (self.next + 1) << 32;
            self.next += 1;
            let piece = Piece { addr, size: RESERVATION, requested: 0, state: State::Unmapped };
            self.areas.push(Area { pieces: vec![piece], small, stream, expandable: true });
            self.areas.len() - 1
        });
        let last = self.areas[area].pieces.len() - 1;
        let tail_free = last > 0 && self.areas[area].pieces[last - 1].state == State::Free;
        let have = if tail_free { self.areas[area].pieces[last - 1].size } else { 0 };
        let map = (size - have).div_ceil(granule) * granule;
        let pieces = &mut self.areas[area].pieces;
        let unmapped = pieces[last];
        let mut mapped = Piece { size: map, state: State::Free, ..unmapped };
        pieces[last] =
            Piece { addr: unmapped.addr + map, size: unmapped.size - map, requested: 0, state: State::Unmapped };
        let mut at = last;
        if tail_free {
            mapped.addr = pieces[last - 1].addr;
            mapped.size += have;
            pieces[last - 1] = mapped;
            at = last - 1;
        } else {
            pieces.insert(last, mapped);
        }
        self.emit(Action::SegmentMap, unmapped.addr, map, stream, 0);
        (area, at)
    }

    fn pick(&self, state: State, index: &prop::sample::Index) -> Option<(usize, usize)> {
        let all: Vec<(usize, usize)> = self
            .areas
            .iter()
            .enumerate()
            .flat_map(|(a, area)| (0..area.pieces.len()).map(move |p| (a, p)))
            .filter(|(a, p)| self.areas[*a].pieces[*p].state == state)
            .collect();
        (!all.is_empty()).then(|| all[index.index(all.len())])
    }

    fn request(&mut self, (area, piece): (usize, usize)) {
        let stream = self.areas[area].stream;
        let p = &mut self.areas[area].pieces[piece];
        p.state = State::Pending;
        let (addr, requested) = (p.addr, p.requested);
        self.emit(Action::FreeRequested, addr, requested, stream, 0);
    }

    fn complete(&mut self, (area, piece): (usize, usize)) {
        let stream = self.areas[area].stream;
        let p = &mut self.areas[area].pieces[piece];
        p.state = State::Free;
        let (addr, requested) = (p.addr, p.requested);
        self.emit(Action::FreeCompleted, addr, requested, stream, 0);
        self.areas[area].merge(piece);
    }

    fn empty_cache(&mut self) {
        for a in (0..self.areas.len()).rev() {
            if self.areas[a].expandable {
                self.unmap(a);
            } else if let [Piece { addr, size, state: State::Free, .. }] = self.areas[a].pieces[..] {
                let stream = self.areas[a].stream;
                self.areas.remove(a);
                self.emit(Action::SegmentFree, addr, size, stream, 0);
            }
        }
    }

    /// Unmaps the whole granules of the last free piece of an expandable segment.
    fn unmap(&mut self, a: usize) {
        let area = &self.areas[a];
        let granule = if area.small { SMALL_SEGMENT } else { LARGE_SEGMENT };
        let start = area.pieces[0].addr;
        let Some(at) = area.pieces.iter().rposition(|p| p.state == State::Free) else { return };
        let piece = area.pieces[at];
        let from = start + (piece.addr - start).div_ceil(granule) * granule;
        let to = start + (piece.addr + piece.size - start) / granule * granule;
        // Unmaps only at the end, because the model keeps one unmapped piece per segment.
        if to <= from || to != piece.addr + piece.size || at + 2 != area.pieces.len() {
            return;
        }
        let stream = area.stream;
        let pieces = &mut self.areas[a].pieces;
        let tail = pieces[at + 1];
        pieces[at + 1] =
            Piece { addr: from, size: tail.size + (to - from), requested: piece.requested, state: State::Unmapped };
        pieces[at] = Piece { addr: piece.addr, size: from - piece.addr, requested: 0, state: State::Free };
        if from == piece.addr {
            pieces.remove(at);
        }
        self.emit(Action::SegmentUnmap, from, to - from, stream, 0);
    }

    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Alloc { size, stream } => self.alloc(*size, *stream),
                Step::Free(index) => {
                    if let Some(place) = self.pick(State::Used, index) {
                        self.request(place);
                        self.complete(place);
                    }
                }
                Step::FreeLater(index) => {
                    if let Some(place) = self.pick(State::Used, index) {
                        self.request(place);
                    }
                }
                Step::Complete(index) => {
                    if let Some(place) = self.pick(State::Pending, index) {
                        self.complete(place);
                    }
                }
                Step::EmptyCache => self.empty_cache(),
            }
        }
    }

    /// Every mapped piece, by segment.
    fn segments(&self) -> Vec<(u64, bool, u64, Vec<Piece>)> {
        let mut segments: Vec<_> = self
            .areas
            .iter()
            .map(|area| {
                let mapped: Vec<Piece> = area.pieces.iter().filter(|p| p.state != State::Unmapped).copied().collect();
                (area.small, area.stream, mapped)
            })
            .filter(|(_, _, mapped)| !mapped.is_empty())
            .map(|(small, stream, mapped)| (mapped[0].addr, small, stream, mapped))
            .collect();
        segments.sort_by_key(|s| s.0);
        segments
    }
}

impl Area {
    fn room_at_end(&self) -> u64 {
        let mut room = 0;
        for piece in self.pieces.iter().rev() {
            match piece.state {
                State::Unmapped => room += piece.size,
                State::Free => return room + piece.size,
                _ => return room,
            }
        }
        room
    }

    /// The freed piece absorbs its free neighbors and keeps its own stale request.
    fn merge(&mut self, at: usize) {
        if at + 1 < self.pieces.len() && self.pieces[at + 1].state == State::Free {
            self.pieces[at].size += self.pieces.remove(at + 1).size;
        }
        if at > 0 && self.pieces[at - 1].state == State::Free {
            let before = self.pieces.remove(at - 1);
            self.pieces[at - 1].addr = before.addr;
            self.pieces[at - 1].size += before.size;
        }
    }
}

fn replay(events: &[Event]) -> Replay {
    let mut trace_index = TraceIndex::default();
    trace_index.sources.insert(0, EventSource::Torch);
    let mut replay = Replay::new(&trace_index, None);
    for e in events {
        replay.apply(e, |_, _, _, change| assert_ne!(change, Change::None));
    }
    replay
}

fn state(state: BlockState) -> State {
    match state {
        BlockState::Allocated => State::Used,
        BlockState::PendingFree => State::Pending,
        BlockState::Inactive => State::Free,
        BlockState::Unmapped => State::Unmapped,
    }
}

fn segments(allocator: &Allocator) -> Vec<(u64, bool, u64, Vec<Piece>)> {
    allocator
        .segments()
        .into_iter()
        .map(|s| {
            let pieces = s.blocks.iter().map(|b| Piece {
                addr: b.addr,
                size: b.size,
                requested: b.requested,
                state: state(b.state),
            });
            (s.addr, s.small, s.stream, pieces.collect())
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_replay_matches_a_model_of_the_allocator(steps in steps(), expandable: bool, reports_slack: bool) {
        let mut model = Model { expandable, reports_slack, ..Model::default() };
        model.run(&steps);
        let replay = replay(&model.events);
        let allocator = &replay.devices()[0].allocator;
        prop_assert_eq!(allocator.anomalies().total(), 0, "{:?}", allocator.anomalies());
        prop_assert_eq!(segments(allocator), model.segments());
        let sum = |states: &[State]| -> u64 {
            model.areas.iter().flat_map(|a| &a.pieces).filter(|p| states.contains(&p.state)).map(|p| p.size).sum()
        };
        prop_assert_eq!(allocator.usage().allocated, sum(&[State::Used]));
        prop_assert_eq!(allocator.usage().active, sum(&[State::Used, State::Pending]));
        prop_assert_eq!(allocator.usage().reserved, sum(&[State::Used, State::Pending, State::Free]));
    }

    /// With any events missing, nothing panics, segments stay tiled, and the totals are those of the blocks.
    #[test]
    fn lost_events_leave_a_consistent_state(
        steps in steps(),
        expandable: bool,
        lost in prop::collection::vec(any::<prop::sample::Index>(), 1..20),
    ) {
        let mut model = Model { expandable, ..Model::default() };
        model.run(&steps);
        for index in &lost {
            if !model.events.is_empty() {
                model.events.remove(index.index(model.events.len()));
            }
        }
        let mut trace_index = TraceIndex::default();
        trace_index.sources.insert(0, EventSource::Torch);
        let mut replay = Replay::new(&trace_index, None);
        for e in &model.events {
            replay.apply(e, |_, _, _, _| {});
        }
        let allocator = &replay.devices()[0].allocator;
        let mut allocated = 0;
        for segment in allocator.segments() {
            let mut at = segment.addr;
            for block in &segment.blocks {
                prop_assert_eq!(block.addr, at);
                at += block.size;
                allocated += if block.state == BlockState::Allocated { block.size } else { 0 };
            }
            prop_assert_eq!(at, segment.addr + segment.size);
        }
        prop_assert_eq!(allocator.usage().allocated, allocated);
    }

    /// Events with arbitrary content.
    #[test]
    fn arbitrary_events_cause_no_panic(
        words in prop::collection::vec((0u8..5, 0u8..22, 0u64..40, 0u64..40, -1i16..2, any::<u16>()), 0..200),
    ) {
        let events: Vec<Event> = words
            .iter()
            .enumerate()
            .filter_map(|(i, (source, action, addr, size, device, flags))| Some(Event {
                seq: i as u64,
                source: Source::from_wire((*source).into())?,
                action: Action::from_wire((*action).into())?,
                addr: addr * 512,
                size: size * 512,
                device: *device,
                flags: Flags(*flags),
                ..Event::EMPTY
            }))
            .collect();
        for source in [EventSource::Torch, EventSource::CudaCalls, EventSource::TorchReporter] {
            let mut trace_index = TraceIndex::default();
            trace_index.sources.insert(0, source);
            trace_index.sources.insert(-1, EventSource::TorchCpu);
            let mut replay = Replay::new(&trace_index, None);
            for e in &events {
                replay.apply(e, |_, _, _, _| {});
            }
            replay.devices()[0].allocator.segments();
        }
    }
}
