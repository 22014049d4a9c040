//! What stays on a device where a program has released memory: after `empty_cache`, after a model was offloaded, at the
//! end of a trial.
//!
//! A [`ReleasePoint`] names such places: the ends of a named range, of the calls of a Python function, or of a line. Of all times that
//! the program comes to a point, the one with the most memory counts, and of equal ones the last. A call ends with the next event of its thread whose
//! stack does not contain it. The state before that event counts. After the last call of a program no such event comes, only
//! what its teardown frees, on any thread and without a Python frame. So a call may have ended before each event without one.
//! The next event inside it shows that it goes on.

use memtrace_input::{Recording, TraceIndex};
use memtrace_trace::event::{Event, Source};
use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{StackId, ThreadId};

use super::composition::{Amount, Composition};
use super::device_memory::DeviceMemoryState;
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
    /// The end of the calls of the Python functions of this name, which may be qualified: `empty_cache`, `Server.sleep`.
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

/// What stayed on one device after a point.
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
    /// What this process had allocated from CUDA.
    pub allocations: DeviceAllocations,
    /// The whole memory of the device. `None` without readings.
    pub device: Option<DeviceMemoryState>,
}

impl ReleasedMemory {
    /// The program came to the point. `e`: the last event before it.
    #[cold]
    pub(super) fn reached(
        &mut self,
        replay: &Replay,
        device: &DeviceReplay,
        (e, now): (&Event, ProgramPosition),
        start: u64,
        memory: impl FnOnce() -> Option<DeviceMemoryState>,
    ) {
        self.times += 1;
        let bytes = device_bytes(replay, device);
        // Of equal times the last one counts, because the program still holds more of it.
        if bytes < self.stayed {
            return;
        }
        (self.start, self.stayed, self.device) = (start, bytes, memory());
        self.kept.restart(e, now, now.phase, *device.allocator.usage());
        self.allocations = replay.physical().device_allocations(device.device);
    }

    /// The program came to the point, as `at_end` has it for one time.
    #[cold]
    pub(super) fn reached_as(&mut self, at_end: ReleasedMemory) {
        let times = self.times + 1;
        if at_end.stayed >= self.stayed {
            *self = at_end;
        }
        self.times = times;
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

/// Divides what stayed, by the index of the device in the replay. A program can come to a point a million times, and a
/// division visits all segments. So a second pass does it, once for each point.
pub(super) fn divide(
    recording: &dyn Recording,
    trace_index: &TraceIndex,
    mut released: Vec<(usize, &mut ReleasedMemory)>,
) {
    if released.is_empty() {
        return;
    }
    released.sort_by_key(|(_, released)| released.kept.seq);
    let mut waiting = released.into_iter().peekable();
    let mut replay = Replay::new(trace_index, None);
    recording.stream(&mut |events| {
        for e in events {
            while let Some((slot, released)) = waiting.next_if(|(_, released)| released.kept.seq < e.seq) {
                released.divide(&replay.devices()[slot].allocator);
            }
            if waiting.peek().is_some() && e.source != Source::Label {
                replay.apply(e, |_, _, _, _| {});
            }
        }
    });
    waiting.for_each(|(slot, released)| released.divide(&replay.devices()[slot].allocator));
}

/// The bytes that this process has on a device. A recording without CUDA calls only has what PyTorch reserved.
pub(super) fn device_bytes(replay: &Replay, device: &DeviceReplay) -> u64 {
    match replay.physical().device_allocations(device.device).device_bytes() {
        0 => device.allocator.usage().reserved,
        bytes => bytes,
    }
}

/// What an event means for the points: bits by the index of the point.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Passed {
    /// The range or the call begins.
    pub(super) begun: u32,
    /// It has ended.
    pub(super) ended: u32,
    /// It may have ended.
    pub(super) may_have_ended: u32,
    /// It had not, if it may have ended.
    pub(super) goes_on: u32,
}

/// Finds the points in the stream of events.
#[derive(Clone, Debug)]
pub(super) struct ReleasePoints<'a> {
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
    /// Takes the points and the definitions of a recording. At most [`MAX_POINTS`] points count.
    pub(super) fn new(points: &'a [ReleasePoint], definitions: &'a Definitions) -> ReleasePoints<'a> {
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

    /// Takes the start or the end of a range.
    pub(super) fn observe_range(&mut self, e: &Event) -> Passed {
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

    /// Takes any other event, before it is replayed.
    #[inline]
    pub(super) fn observe(&mut self, e: &Event) -> Passed {
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
    pub(super) fn finish(&mut self) -> Passed {
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

    /// What events of threads with stacks mean for calls of `sleep`. The stacks 2 and 3 are inside.
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
