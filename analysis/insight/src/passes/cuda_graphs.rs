//! The cost of each CUDA graph: the blocks and segments that its capture adds to a private pool, and the device memory
//! that its instantiation takes.
//!
//! Events of PyTorch's allocator between the begin and the end of a capture belong to it, if they are of a private pool
//! and of the capture's thread or stream. Blocks that the capture frees are reused by later captures into the same
//! pool. So a pool that several graphs share grows less than the sum of what each would take alone.

use std::collections::{BTreeMap, HashMap};

use memtrace_input::AddressBuildHasher;
use memtrace_trace::api::Effect;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

/// The maximum number of graphs with figures of their own. Later ones are only counted.
const MAX_GRAPHS: usize = 4096;
/// The maximum number of blocks that are kept for one graph, largest first. They serve only to find tensor names.
const MAX_KEPT_BLOCKS: usize = 64;
/// The maximum number of nested ranges of one process that are followed.
const MAX_RANGES: usize = 1024;

/// The id of a private pool as PyTorch prints its `MempoolId_t`, for example `(0, 1)`. `None` for the default pool and
/// for an unknown one.
pub fn private_pool_text(definitions: &Definitions, pool: u16) -> Option<String> {
    let (first, second) = definitions.pools.get(&pool).filter(|_| pool != 0)?;
    Some(format!("({first}, {second})"))
}

/// One captured or instantiated graph.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CudaGraph {
    /// The device ordinal.
    pub device: i16,
    /// Whether a capture made the graph. Without one, the program built it node by node, or captured it before the
    /// recording.
    pub is_captured: bool,
    /// The stack that began the capture, or else instantiated the graph.
    pub stack: StackId,
    /// The `seq` and the time of that event.
    pub at: (u64, u64),
    /// The innermost range that the program had named on that thread: a label id.
    pub label: Option<u32>,
    /// The memory of the capture.
    pub capture: CaptureMemory,
    /// The number of nodes. 0 if it is unknown.
    pub nodes: u64,
    /// How often it was instantiated.
    pub instantiations: u64,
    /// The device memory that its instantiations and uploads took, in bytes.
    pub instantiated: u64,
    /// The number of executable graphs that were not destroyed.
    pub executables: u64,
    /// `seq` of the event that destroyed the last of them. 0 if one is left.
    destroyed_at: u64,
}

/// The memory that a capture allocated.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CaptureMemory {
    /// The private pool that received most bytes. 0 if the capture allocated in none.
    pub pool: u16,
    /// By how many bytes of segments the capture enlarged private pools.
    pub growth: u64,
    /// The number of these segments.
    pub segments: u64,
    /// The highest number of bytes of blocks that the capture had allocated.
    pub peak: u64,
    /// The bytes of its blocks that were still allocated when the capture ended.
    pub kept: u64,
    /// The largest of these blocks: `seq` of the allocation and bytes.
    pub kept_blocks: Vec<(u64, u64)>,
}

/// A private pool of PyTorch's allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrivatePool {
    /// The current bytes of its segments, and the highest.
    pub reserved: (u64, u64),
    /// The current bytes of its allocated blocks, and the highest.
    pub allocated: (u64, u64),
    /// The number of captures that allocated in it.
    pub captures: u64,
}

impl PrivatePool {
    fn add((current, highest): &mut (u64, u64), bytes: u64) {
        *current += bytes;
        *highest = (*highest).max(*current);
    }

    fn subtract((current, _): &mut (u64, u64), bytes: u64) {
        *current = current.saturating_sub(bytes);
    }
}

/// A capture that has begun and not ended.
#[derive(Clone, Debug)]
struct OpenCapture {
    thread: ThreadId,
    stream: u64,
    graph: CudaGraph,
    allocated: u64,
    /// By address: `seq` and bytes of its allocated blocks.
    blocks: BTreeMap<u64, (u64, u64)>,
    /// By pool: the bytes that it allocated there.
    by_pool: BTreeMap<u16, u64>,
}

/// Follows captures, graphs and private pools while a recording streams. Events must come in the order of `seq`.
#[derive(Clone, Debug, Default)]
pub struct CudaGraphs {
    open: Vec<OpenCapture>,
    graphs: Vec<CudaGraph>,
    /// By handle of a graph: its index in `graphs`.
    by_graph: HashMap<u64, usize, AddressBuildHasher>,
    /// By handle of an executable graph: the index in `graphs`.
    by_executable: HashMap<u64, usize, AddressBuildHasher>,
    pools: BTreeMap<(i16, u16), PrivatePool>,
    /// By device and address: the pool and the bytes of its allocated blocks.
    blocks: HashMap<(i16, u64), (u16, u64)>,
    /// The open nested ranges: thread and label.
    ranges: Vec<(ThreadId, u64)>,
    left_out: u64,
    failed: u64,
    /// `seq` of the last allocation of PyTorch's allocator.
    last_allocation: u64,
}

impl CudaGraphs {
    /// The graphs, in the order of their captures.
    pub fn graphs(&self) -> &[CudaGraph] {
        &self.graphs
    }

    /// The private pools, by device and by the pool's id in events.
    pub fn pools(&self) -> &BTreeMap<(i16, u16), PrivatePool> {
        &self.pools
    }

    /// Whether the program destroyed all executable graphs of this one, and allocated memory afterwards. Graphs that
    /// are destroyed at the end of the process do not count.
    pub fn is_destroyed(&self, graph: &CudaGraph) -> bool {
        graph.destroyed_at != 0 && graph.destroyed_at < self.last_allocation
    }

    /// The number of further graphs that [`Self::graphs`] leaves out.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// The number of captures and instantiations that failed.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    /// Observes the start or end of a named range.
    pub fn observe_range(&mut self, e: &Event) {
        // A range with a number can end on another thread, so it says nothing about the thread's calls.
        if e.range_number() != 0 {
            return;
        }
        if e.action == Action::RangeStart {
            if self.ranges.len() < MAX_RANGES {
                self.ranges.push((e.thread, e.label_id()));
            }
        } else if e.action == Action::RangeEnd
            && let Some(at) = self
                .ranges
                .iter()
                .rposition(|(thread, label)| *thread == e.thread && (e.label_id() == 0 || *label == e.label_id()))
        {
            self.ranges.remove(at);
        }
    }

    /// Observes any other event. Returns the private pool of an allocation that belongs to a capture.
    #[inline]
    pub fn observe(&mut self, e: &Event) -> Option<u16> {
        if e.action == Action::Graph {
            self.observe_call(e);
            return None;
        }
        // Only PyTorch's tracker reports pools.
        if e.source != Source::Torch {
            return None;
        }
        if e.action == Action::Alloc {
            self.last_allocation = e.seq;
        }
        if e.pool == 0 { None } else { self.observe_pool(e) }
    }

    fn observe_call(&mut self, e: &Event) {
        let Some(call) = e.api.effect() else { return };
        if e.result != 0 {
            self.failed += 1;
        }
        match call {
            Effect::BeginsCapture if e.result == 0 => self.begin(e),
            Effect::EndsCapture => self.end(e),
            Effect::Instantiates if e.result == 0 => self.instantiate(e),
            Effect::Uploads if e.result == 0 => {
                if let Some(graph) =
                    self.by_executable.get(&e.executable_graph()).and_then(|at| self.graphs.get_mut(*at))
                {
                    graph.instantiated += e.size;
                }
            }
            Effect::DestroysGraph => {
                if let Some(graph) =
                    self.by_executable.remove(&e.executable_graph()).and_then(|at| self.graphs.get_mut(at))
                {
                    graph.executables = graph.executables.saturating_sub(1);
                    if graph.executables == 0 {
                        graph.destroyed_at = e.seq;
                    }
                }
            }
            _ => {}
        }
    }

    fn begin(&mut self, e: &Event) {
        let label = self.ranges.iter().rfind(|(thread, _)| *thread == e.thread);
        let graph = CudaGraph {
            device: e.device,
            is_captured: true,
            stack: e.stack,
            at: (e.seq, e.ticks),
            label: label.and_then(|(_, label)| u32::try_from(*label).ok()),
            ..CudaGraph::default()
        };
        self.open.push(OpenCapture {
            thread: e.thread,
            stream: e.stream,
            graph,
            allocated: 0,
            blocks: BTreeMap::new(),
            by_pool: BTreeMap::new(),
        });
    }

    fn end(&mut self, e: &Event) {
        // One stream can only be captured once at a time. A capture can end on another thread.
        let Some(at) = self.open.iter().rposition(|open| open.stream == e.stream && open.graph.device == e.device)
        else {
            return;
        };
        let OpenCapture { mut graph, blocks, by_pool, .. } = self.open.remove(at);
        for pool in by_pool.keys() {
            self.pools.entry((graph.device, *pool)).or_default().captures += 1;
        }
        if e.result != 0 {
            return;
        }
        graph.nodes = e.size;
        graph.capture.pool =
            by_pool.iter().max_by_key(|(pool, bytes)| (**bytes, std::cmp::Reverse(**pool))).map_or(0, |(p, _)| *p);
        let mut kept: Vec<(u64, u64)> = blocks.into_values().collect();
        graph.capture.kept = kept.iter().map(|(_, bytes)| bytes).sum();
        kept.sort_unstable_by_key(|(seq, bytes)| (std::cmp::Reverse(*bytes), *seq));
        kept.truncate(MAX_KEPT_BLOCKS);
        graph.capture.kept_blocks = kept;
        self.add(e.graph(), graph);
    }

    /// Adds a graph with this handle. Returns its index.
    fn add(&mut self, handle: u64, graph: CudaGraph) -> Option<usize> {
        if self.graphs.len() == MAX_GRAPHS {
            self.left_out += 1;
            self.by_graph.remove(&handle);
            return None;
        }
        self.graphs.push(graph);
        let at = self.graphs.len() - 1;
        self.by_graph.insert(handle, at);
        Some(at)
    }

    fn instantiate(&mut self, e: &Event) {
        let known = self.by_graph.get(&e.graph()).copied();
        let built = || CudaGraph { device: e.device, stack: e.stack, at: (e.seq, e.ticks), ..CudaGraph::default() };
        let Some(at) = known.or_else(|| self.add(e.graph(), built())) else { return };
        if let Some(graph) = self.graphs.get_mut(at) {
            graph.instantiations += 1;
            graph.instantiated += e.size;
            graph.executables += 1;
            graph.destroyed_at = 0;
            self.by_executable.insert(e.executable_graph(), at);
        }
    }

    #[cold]
    fn observe_pool(&mut self, e: &Event) -> Option<u16> {
        let capture = self.capture_of(e);
        let pool = self.pools.entry((e.device, e.pool)).or_default();
        match e.action {
            Action::Alloc => {
                let bytes = e.block_size();
                PrivatePool::add(&mut pool.allocated, bytes);
                self.blocks.insert((e.device, e.addr), (e.pool, bytes));
                let open = capture.and_then(|at| self.open.get_mut(at))?;
                open.allocated += bytes;
                open.graph.capture.peak = open.graph.capture.peak.max(open.allocated);
                open.blocks.insert(e.addr, (e.seq, bytes));
                *open.by_pool.entry(e.pool).or_default() += bytes;
                return Some(e.pool);
            }
            Action::FreeCompleted => {
                let (_, bytes) = self.blocks.remove(&(e.device, e.addr))?;
                PrivatePool::subtract(&mut pool.allocated, bytes);
            }
            // A capture defers the completion of a free. So the request ends the block.
            Action::FreeRequested => {
                let open = self
                    .open
                    .iter_mut()
                    .find(|open| open.graph.device == e.device && open.blocks.contains_key(&e.addr))?;
                let (_, bytes) = open.blocks.remove(&e.addr)?;
                open.allocated = open.allocated.saturating_sub(bytes);
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                PrivatePool::add(&mut pool.reserved, e.size);
                if let Some(open) = capture.and_then(|at| self.open.get_mut(at)) {
                    open.graph.capture.growth += e.size;
                    open.graph.capture.segments += 1;
                }
            }
            Action::SegmentFree | Action::SegmentUnmap => PrivatePool::subtract(&mut pool.reserved, e.size),
            _ => {}
        }
        None
    }

    /// The open capture that an event of a private pool belongs to: that of its thread, else that of its stream. A
    /// backward pass inside a capture allocates on threads of autograd, and a capture can include more streams.
    fn capture_of(&self, e: &Event) -> Option<usize> {
        let of_device = |open: &&OpenCapture| open.graph.device == e.device;
        let last = |matches: &dyn Fn(&OpenCapture) -> bool| {
            self.open.iter().rposition(|open| of_device(&open) && matches(open))
        };
        last(&|open| open.thread == e.thread).or_else(|| last(&|open| open.stream == e.stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::api::Api;

    const MIB: u64 = 1 << 20;

    struct Feed(CudaGraphs, u64);

    impl Feed {
        fn torch(&mut self, action: Action, addr: u64, size: u64, pool: u16) -> Option<u16> {
            self.1 += 1;
            let (thread, device, stream) = (ThreadId(1), 0, 7);
            self.0.observe(&Event { seq: self.1, action, addr, size, pool, thread, device, stream, ..Event::EMPTY })
        }

        fn call(&mut self, api: Api, addr: u64, size: u64, stream: u64) {
            self.1 += 1;
            let (source, action, thread, device) = (Source::Driver, Action::Graph, ThreadId(1), 0);
            self.0.observe(&Event {
                seq: self.1,
                source,
                action,
                addr,
                size,
                stream,
                api,
                thread,
                device,
                ..Event::EMPTY
            });
        }

        fn capture(&mut self, graph: u64, body: impl FnOnce(&mut Feed)) {
            self.call(Api::cuStreamBeginCapture_v2, 0, 0, 7);
            body(self);
            self.call(Api::cuStreamEndCapture, graph, 3, 7);
        }
    }

    #[test]
    fn a_second_graph_in_a_shared_pool_adds_only_what_the_first_left_no_room_for() {
        let mut feed = Feed(CudaGraphs::default(), 0);
        feed.capture(100, |feed| {
            feed.torch(Action::SegmentAlloc, 0x1000_0000, 20 * MIB, 1);
            assert_eq!(feed.torch(Action::Alloc, 0x1000_0000, 8 * MIB, 1), Some(1));
            feed.torch(Action::Alloc, 0x1080_0000, 4 * MIB, 1);
            feed.torch(Action::FreeRequested, 0x1000_0000, 8 * MIB, 1);
            feed.torch(Action::FreeCompleted, 0x1000_0000, 8 * MIB, 1);
        });
        feed.call(Api::cuGraphInstantiateWithFlags, 200, 2 * MIB, 100);
        feed.capture(101, |feed| {
            feed.torch(Action::Alloc, 0x1000_0000, 6 * MIB, 1);
        });
        feed.call(Api::cuGraphExecDestroy, 200, 0, 0);
        assert!(!feed.0.is_destroyed(&feed.0.graphs()[0]), "the end of the process may have destroyed it");
        // An allocation in a pool outside a capture belongs to no graph.
        assert_eq!(feed.torch(Action::Alloc, 0x2000_0000, MIB, 2), None);
        assert!(feed.0.is_destroyed(&feed.0.graphs()[0]) && !feed.0.is_destroyed(&feed.0.graphs()[1]));
        let [first, second] = feed.0.graphs() else { panic!("two graphs: {:?}", feed.0.graphs()) };
        let capture = |of: &CudaGraph| (of.capture.pool, of.capture.growth, of.capture.peak, of.capture.kept);
        assert_eq!(capture(first), (1, 20 * MIB, 12 * MIB, 4 * MIB));
        assert_eq!((first.nodes, first.instantiated, first.instantiations, first.executables), (3, 2 * MIB, 1, 0));
        assert_eq!(capture(second), (1, 0, 6 * MIB, 6 * MIB));
        let shared = feed.0.pools()[&(0, 1)];
        assert_eq!(
            (shared.captures, shared.reserved, shared.allocated),
            (2, (20 * MIB, 20 * MIB), (10 * MIB, 12 * MIB))
        );
        assert_eq!(feed.0.pools()[&(0, 2)].captures, 0);
    }

    #[test]
    fn a_graph_that_was_not_captured_has_the_memory_of_its_instantiation() {
        let mut feed = Feed(CudaGraphs::default(), 0);
        feed.call(Api::cuGraphInstantiateWithFlags, 200, MIB, 100);
        feed.call(Api::cuGraphUpload, 200, MIB, 0);
        let [built] = feed.0.graphs() else { panic!("one graph") };
        assert_eq!((built.is_captured, built.instantiated, built.executables), (false, 2 * MIB, 1));
    }

    #[test]
    fn a_failed_capture_is_counted_and_leaves_no_graph() {
        let mut feed = Feed(CudaGraphs::default(), 0);
        feed.call(Api::cuStreamBeginCapture_v2, 0, 0, 7);
        feed.torch(Action::Alloc, 0x1000, MIB, 1);
        let failed = Event { result: 901, api: Api::cuStreamEndCapture, stream: 7, device: 0, ..Event::EMPTY };
        feed.0.observe(&Event { source: Source::Driver, action: Action::Graph, ..failed });
        assert_eq!((feed.0.graphs().len(), feed.0.failed()), (0, 1));
        assert_eq!(feed.torch(Action::Alloc, 0x2000, MIB, 1), None);
    }

    #[test]
    fn a_capture_has_the_innermost_range_of_its_thread() {
        let mut feed = Feed(CudaGraphs::default(), 0);
        let range = |action, addr| Event { source: Source::Label, action, addr, thread: ThreadId(1), ..Event::EMPTY };
        for e in [
            range(Action::RangeStart, 1),
            range(Action::RangeStart, 2),
            range(Action::RangeEnd, 2),
            Event { thread: ThreadId(2), ..range(Action::RangeStart, 3) },
        ] {
            feed.0.observe_range(&e);
        }
        feed.capture(100, |_| {});
        assert_eq!(feed.0.graphs()[0].label, Some(1));
    }
}
