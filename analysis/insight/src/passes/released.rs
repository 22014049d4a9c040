//! The memory that stays on a device where a program has released memory: after `empty_cache`, after a model was
//! offloaded, at the end of a trial.
//!
//! The first pass finds when each point counts ([`ReleaseFinder`]). At that time the main pass divides the memory: a
//! program can come to a point a million times, and a division visits all segments.
//!
//! A [`ReleasePoint`] names such places: the ends of a named range, of the calls of a Python function, or of a line. Of
//! all times that the program comes to a point, the one with the most memory counts, and of equal ones the last. A call
//! ends with the next event of its thread whose stack does not contain it. The state before that event counts. After
//! the last call of a program no such event comes, only what its teardown frees, on any thread and without a Python
//! frame. So a call may have ended before each event without one. The next event inside it shows that it goes on.

use memtrace_trace::event::{Event, Source};
use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{StackId, ThreadId};

use super::composition::{Amount, Composition};
use super::device_memory::{DeviceMemories, DeviceMemoryState};
use super::open_ranges::{OpenRanges, RangeBoundary};
use super::phase::ProgramPosition;
use super::reserved::Reserved;
use memtrace_replay::{Allocator, DeviceAllocations, DeviceReplay, Replay};

/// The maximum number of origins to report that block segments.
const MAX_BLOCKERS: usize = 10;
/// The maximum number of points. Each has one bit.
const MAX_POINTS: usize = 32;

/// A place in a program after which memory should have been released.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ReleasePoint {
    /// The end of the ranges of this name (`record_function`, NVTX).
    Range(Box<str>),
    /// The end of the calls of the Python functions of this name, which may be qualified: `empty_cache`,
    /// `Server.sleep`.
    Function(Box<str>),
    /// After this line of the files whose paths end so.
    Line(Box<str>, u32),
}

impl ReleasePoint {
    /// Reads `range:NAME`, `function:NAME` or `line:FILE:LINE`. `None` for anything else.
    pub fn parse(text: &str) -> Option<ReleasePoint> {
        let (kind, name) = text.split_once(':').filter(|(_, name)| !name.is_empty())?;
        match kind {
            "range" => Some(ReleasePoint::Range(name.into())),
            "function" => Some(ReleasePoint::Function(name.into())),
            "line" => {
                let (file, line) = name.rsplit_once(':').filter(|(file, _)| !file.is_empty())?;
                Some(ReleasePoint::Line(file.into(), line.parse().ok().filter(|line| *line > 0)?))
            }
            _ => None,
        }
    }

    /// The text that [`Self::parse`] reads.
    pub fn text(&self) -> String {
        match self {
            ReleasePoint::Range(name) => format!("range:{name}"),
            ReleasePoint::Function(name) => format!("function:{name}"),
            ReleasePoint::Line(file, line) => format!("line:{file}:{line}"),
        }
    }

    fn is_frame(&self, frame: &Frame) -> bool {
        match self {
            ReleasePoint::Range(_) => false,
            ReleasePoint::Function(name) => {
                let is_end = |prefix: &str| prefix.is_empty() || prefix.ends_with('.');
                !frame.native && frame.qualname.strip_suffix(&**name).is_some_and(is_end)
            }
            ReleasePoint::Line(file, line) => {
                let is_end = |folder: &str| folder.is_empty() || folder.ends_with('/');
                !frame.native && frame.line == *line && frame.filename.strip_suffix(&**file).is_some_and(is_end)
            }
        }
    }
}

/// The memory that stayed on one device after a point.
#[derive(Clone, Debug, Default)]
pub struct ReleasedMemory {
    /// How often the program came to the point.
    pub times: u64,
    /// The bytes that this process had on the device when the range or the call began.
    pub start: u64,
    /// The bytes that this process still had on the device. The CUDA context does not count.
    pub stayed: u64,
    /// The blocks that were allocated then.
    pub kept: Composition,
    /// The memory that PyTorch's allocator held outside private pools.
    pub reserved: Reserved,
    /// The private pools: their reserved and their allocated bytes.
    pub private_pools: Vec<(u16, u64, Amount)>,
    /// This process's allocations from CUDA.
    pub allocations: DeviceAllocations,
    /// The whole memory of the device. `None` without readings.
    pub device: Option<DeviceMemoryState>,
}

impl ReleasedMemory {
    /// The program came to the point, for the time that counts.
    #[cold]
    pub(super) fn of(stayed: &StayedMemory<'_>) -> ReleasedMemory {
        let StayedMemory { release, now, replay, device, memories } = *stayed;
        let e = &Event { device: device.device, ..release.e };
        let mut memory = ReleasedMemory {
            times: release.times,
            start: release.start,
            stayed: release.stayed,
            allocations: replay.physical().device_allocations(device.device),
            device: memories.state_at(replay, e),
            ..ReleasedMemory::default()
        };
        memory.kept.restart(e, now, now.phase, *device.allocator.usage());
        memory.divide(&device.allocator);
        memory
    }

    /// Divides the memory of the allocator, which is in the state after [`Self::kept`]'s event.
    fn divide(&mut self, allocator: &Allocator) {
        self.reserved = Reserved::of_pools(allocator, MAX_BLOCKERS, |pool| pool == 0);
        for segment in allocator.segments().iter().filter(|segment| segment.pool != 0) {
            let index = self.private_pools.iter().position(|(pool, ..)| *pool == segment.pool);
            let index = index.unwrap_or_else(|| {
                self.private_pools.push((segment.pool, 0, Amount::default()));
                self.private_pools.len() - 1
            });
            let (_, reserved, allocated) = &mut self.private_pools[index];
            let has_memory = |block: &&memtrace_replay::Block| block.state != memtrace_replay::BlockState::Unmapped;
            *reserved += segment.blocks.iter().filter(has_memory).map(|block| block.size).sum::<u64>();
            for block in segment.blocks.iter().filter(|block| block.is_active()) {
                allocated.add(block.size);
            }
        }
    }
}

/// The time that counts, of all times that the program came to a point.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    /// The index of the device in the replay.
    pub(super) slot: usize,
    /// The index of the point.
    pub(super) point: usize,
    /// How often the program came to the point.
    times: u64,
    /// The bytes that this process had on the device when the range or the call began.
    start: u64,
    /// The bytes that this process still had on the device.
    stayed: u64,
    /// The last event before.
    pub(super) e: Event,
}

/// The state at a point after which memory should be released.
#[derive(Clone, Copy)]
pub(crate) struct StayedMemory<'a> {
    pub(super) release: &'a Release,
    pub(crate) now: ProgramPosition,
    pub(crate) replay: &'a Replay,
    pub(crate) device: &'a DeviceReplay,
    pub(crate) memories: &'a DeviceMemories,
}

/// Finds the [`Release`]s of a recording while it is replayed.
#[derive(Clone, Debug)]
pub(super) struct ReleaseFinder<'a> {
    points: ReleasePoints<'a>,
    /// By device and point.
    releases: Vec<Release>,
    /// The bytes of this process on the device when the latest range or call began, in the same order.
    starts: Vec<u64>,
    /// Where the call of a point may have ended, in the same order.
    may_have_ended: Vec<Option<Release>>,
}

impl<'a> ReleaseFinder<'a> {
    pub(super) fn new(points: &'a [ReleasePoint], definitions: &'a Definitions, devices: usize) -> ReleaseFinder<'a> {
        let release = |slot, point| Release { slot, point, times: 0, start: 0, stayed: 0, e: Event::EMPTY };
        let releases = (0..devices).flat_map(|slot| (0..points.len()).map(move |point| release(slot, point)));
        let releases: Vec<Release> = releases.collect();
        ReleaseFinder {
            points: ReleasePoints::new(points, definitions),
            starts: vec![0; releases.len()],
            may_have_ended: vec![None; releases.len()],
            releases,
        }
    }

    /// Whether the program can come to a point.
    pub(super) fn is_needed(&self) -> bool {
        !self.releases.is_empty() && self.points.are_any()
    }

    /// Observes an event, before which `replay` has the state.
    #[inline]
    pub(super) fn before(&mut self, e: &Event, replay: &Replay) {
        if e.source == Source::Label {
            let passed = self.points.observe_range(e);
            self.passed(passed, e, replay);
        } else {
            let passed = self.points.observe(e);
            if passed != Passed::default() {
                self.passed(passed, &Event { seq: e.seq.saturating_sub(1), ..*e }, replay);
            }
        }
    }

    /// `last` is the last event. Returns the releases in the order of time.
    pub(super) fn finish(mut self, last: &Event, replay: &Replay) -> Vec<Release> {
        let passed = self.points.finish();
        self.passed(passed, last, replay);
        self.releases.retain(|release| release.times > 0);
        self.releases.sort_by_key(|release| release.e.seq);
        self.releases
    }

    /// The program begins a range or a call after which memory should be released, or has ended it. `e` is the last
    /// event that counts.
    fn passed(&mut self, passed: Passed, e: &Event, replay: &Replay) {
        if passed == Passed::default() {
            return;
        }
        let rows = self.releases.iter_mut().zip(&mut self.starts).zip(&mut self.may_have_ended);
        for ((release, start), maybe) in rows {
            let is_in = |bits: u32| bits.checked_shr(release.point as u32).unwrap_or(0) & 1 != 0;
            let bytes = || device_bytes(replay, &replay.devices()[release.slot]);
            if is_in(passed.goes_on) {
                *maybe = None;
            }
            if is_in(passed.begun) {
                *start = bytes();
            }
            if is_in(passed.may_have_ended) {
                *maybe = Some(Release { start: *start, stayed: bytes(), e: *e, ..*release });
            }
            if is_in(passed.ended) {
                let ended = maybe.take();
                let ended = ended.unwrap_or_else(|| Release { start: *start, stayed: bytes(), e: *e, ..*release });
                let times = release.times + 1;
                // Of equal times the last one counts, because the program still holds more of it.
                *release = Release { times, ..if ended.stayed >= release.stayed { ended } else { *release } };
            }
        }
    }
}

/// The bytes that this process has on a device. A recording without CUDA calls only has what PyTorch reserved.
pub(super) fn device_bytes(replay: &Replay, device: &DeviceReplay) -> u64 {
    match replay.physical().device_allocations(device.device).device_bytes() {
        0 => device.allocator.usage().reserved,
        bytes => bytes,
    }
}

/// The meaning of an event for the points: bits by the index of the point.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Passed {
    /// The range or the call begins.
    begun: u32,
    /// It has ended.
    ended: u32,
    /// It may have ended.
    may_have_ended: u32,
    /// It had not, if it may have ended.
    goes_on: u32,
}

/// Finds the points in the stream of events.
#[derive(Clone, Debug)]
struct ReleasePoints<'a> {
    /// By point: the open ranges of its name.
    ranges: Vec<Option<OpenRanges<'a>>>,
    /// By stack: the points whose function or line is in it. Empty if none is.
    of_stack: Vec<u32>,
    /// By stack: whether a Python frame is in it.
    has_python: Vec<bool>,
    /// By thread: the points whose function or line its latest event was in.
    inside: Vec<(ThreadId, u32)>,
    /// The points whose calls may have ended.
    maybe: u32,
}

impl<'a> ReleasePoints<'a> {
    /// Makes the points for the definitions of a recording. At most [`MAX_POINTS`] points count.
    fn new(points: &'a [ReleasePoint], definitions: &'a Definitions) -> ReleasePoints<'a> {
        let points = points.get(..points.len().min(MAX_POINTS)).unwrap_or_default();
        let of_frame = |frame: &Frame| {
            let bits = points.iter().enumerate().filter(|(_, point)| point.is_frame(frame)).map(|(at, _)| 1 << at);
            bits.fold(0, |all, bit: u32| all | bit)
        };
        let frames: Vec<u32> = definitions.frames.iter().map(of_frame).collect();
        let (mut of_stack, mut has_python): (Vec<u32>, Vec<bool>) = (Vec::new(), Vec::new());
        if frames.iter().any(|bits| *bits != 0) {
            // A parent has a smaller id than its child.
            for (at, node) in definitions.stacks.iter().enumerate() {
                let parent = (node.parent.index() < at).then_some(node.parent.index());
                let frame = frames.get(node.frame.index()).copied().unwrap_or(0);
                of_stack.push(parent.map_or(0, |parent| of_stack[parent]) | frame);
                let is_python = definitions.frame(node.frame).is_some_and(|frame| !frame.native);
                has_python.push(parent.is_some_and(|parent| has_python[parent]) || is_python);
            }
        }
        let range = |point: &'a ReleasePoint| match point {
            ReleasePoint::Range(name) => Some(OpenRanges::new(name, definitions)),
            _ => None,
        };
        ReleasePoints { ranges: points.iter().map(range).collect(), of_stack, has_python, inside: Vec::new(), maybe: 0 }
    }

    /// Whether the recording has any point.
    fn are_any(&self) -> bool {
        !self.of_stack.is_empty() || self.ranges.iter().flatten().any(OpenRanges::can_open)
    }

    /// Observes the start or the end of a range.
    fn observe_range(&mut self, e: &Event) -> Passed {
        let mut passed = Passed::default();
        for (at, ranges) in self.ranges.iter_mut().enumerate() {
            let Some(ranges) = ranges else { continue };
            match ranges.observe(e) {
                Some(RangeBoundary::Start) => passed.begun |= 1 << at,
                Some(RangeBoundary::End) => passed.ended |= 1 << at,
                None => {}
            }
        }
        passed
    }

    /// Observes any other event, before it is replayed.
    #[inline]
    fn observe(&mut self, e: &Event) -> Passed {
        if self.of_stack.is_empty() {
            return Passed::default();
        }
        let is_python = !e.stack.is_none() && self.has_python.get(e.stack.index()).copied().unwrap_or(false);
        if is_python {
            self.moved(e.thread, e.stack)
        } else {
            let may_have_ended = self.inside.iter().fold(0, |all, (_, bits)| all | bits) & !self.maybe;
            self.maybe |= may_have_ended;
            Passed { may_have_ended, ..Passed::default() }
        }
    }

    fn moved(&mut self, thread: ThreadId, stack: StackId) -> Passed {
        let now = self.of_stack.get(stack.index()).copied().unwrap_or(0);
        let Some(index) = self.inside.iter().position(|(one, _)| *one == thread) else {
            if now != 0 {
                self.inside.push((thread, now));
            }
            let goes_on = self.maybe & now;
            self.maybe &= !goes_on;
            return Passed { begun: now, goes_on, ..Passed::default() };
        };
        let before = std::mem::replace(&mut self.inside[index].1, now);
        if now == 0 {
            self.inside.swap_remove(index);
        }
        let goes_on = self.maybe & (before | now);
        self.maybe &= !goes_on;
        Passed { begun: now & !before, ended: before & !now, goes_on, ..Passed::default() }
    }

    /// The recording ends: the calls that no event followed have ended.
    fn finish(&mut self) -> Passed {
        let ended = self.inside.drain(..).fold(0, |all, (_, bits)| all | bits);
        Passed { ended, ..Passed::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::file::StackNode;
    use memtrace_trace::ids::FrameId;

    fn frame(qualname: &str, filename: &str, line: u32) -> Frame {
        let name = qualname.rsplit('.').next().unwrap_or_default();
        Frame { name: name.into(), qualname: qualname.into(), filename: filename.into(), line, ..Frame::default() }
    }

    #[test]
    fn points_are_read_and_written() {
        for text in ["range:sleep: deep", "function:Server.sleep", "line:train.py:42"] {
            assert_eq!(ReleasePoint::parse(text).expect(text).text(), text);
        }
        for text in ["sleep", "range:", "line:train.py", "line::4", "line:a.py:0", "module:x"] {
            assert_eq!(ReleasePoint::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_function_is_found_by_its_name_and_a_line_by_the_end_of_its_path() {
        let is = |point: &str, frame: &Frame| ReleasePoint::parse(point).unwrap().is_frame(frame);
        let sleep = frame("Server.sleep", "/home/me/serve.py", 7);
        assert!(is("function:sleep", &sleep) && is("function:Server.sleep", &sleep) && is("line:serve.py:7", &sleep));
        assert!(is("line:me/serve.py:7", &sleep) && is("line:/home/me/serve.py:7", &sleep));
        for other in ["function:leep", "function:erver.sleep", "line:serve.py:8", "line:erve.py:7", "range:sleep"] {
            assert!(!is(other, &sleep), "{other}");
        }
    }

    fn sleeping<R>(run: impl FnOnce(ReleasePoints<'_>) -> R) -> R {
        let node = |parent, frame| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        let definitions = Definitions {
            frames: vec![
                Frame::default(),
                frame("main", "a.py", 1),
                frame("sleep", "a.py", 2),
                Frame { native: true, ..frame("ncclCommDestroy", "libnccl.so", 0) },
            ],
            stacks: vec![StackNode::default(), node(0, 1), node(1, 2), node(2, 1), node(0, 3)],
            ..Definitions::default()
        };
        run(ReleasePoints::new(&[ReleasePoint::Function("sleep".into())], &definitions))
    }

    /// The points that events of threads with stacks pass, for calls of `sleep`. The stacks 2 and 3 are inside.
    fn passed_by(found: &mut ReleasePoints<'_>, stacks: &[(u32, u32)]) -> Vec<Passed> {
        let event =
            |(thread, stack): &(u32, u32)| Event { thread: ThreadId(*thread), stack: StackId(*stack), ..Event::EMPTY };
        stacks.iter().map(|one| found.observe(&event(one))).collect()
    }

    fn passed(stacks: &[(u32, u32)]) -> Vec<Passed> {
        sleeping(|mut found| passed_by(&mut found, stacks))
    }

    fn ended(stacks: &[(u32, u32)]) -> (Vec<u32>, u32) {
        sleeping(|mut found| {
            let passed = passed_by(&mut found, stacks);
            (passed.iter().map(|one| one.ended).collect(), found.finish().ended)
        })
    }

    #[test]
    fn a_call_ends_with_the_next_event_of_its_thread_outside_it() {
        assert_eq!(ended(&[(1, 1), (1, 2), (1, 3), (2, 1), (1, 1), (1, 1)]), (vec![0, 0, 0, 0, 1, 0], 0));
        assert_eq!(
            ended(&[(1, 2), (1, 0), (1, 2)]),
            (vec![0, 0, 0], 1),
            "an event without a Python frame ends no call"
        );
    }

    #[test]
    fn a_call_may_have_ended_before_an_event_without_a_python_frame_on_any_thread() {
        let found = passed(&[(1, 2), (2, 0), (2, 4), (1, 3), (3, 4), (1, 1), (1, 0)]);
        let maybe: Vec<(u32, u32)> = found.iter().map(|one| (one.may_have_ended, one.goes_on)).collect();
        assert_eq!(maybe, [(0, 0), (1, 0), (0, 0), (0, 1), (1, 0), (0, 1), (0, 0)]);
    }
}
