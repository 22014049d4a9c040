//! The effect of each source line on a device's memory: the figures of a line profiler, computed from events.
//!
//! A line is current from an event whose stack contains it to the next event of that thread. Between events the
//! recording shows nothing. An event counts for every line in its stack; in a recursive function, only for the
//! innermost line. The level before an event also counts for its lines, because it is the level at which they began.
//!
//! Autograd's own threads work while a line waits for the engine (`loss.backward()`). That work counts for this line
//! and its callers, if an event showed the call. Such work is a stackless event that follows one inside the engine. The
//! forward lines that made the nodes also have it, as a separate figure: `backward`.
//!
//! Each event updates a few sums at its stack. Lines are assembled at the end, so memory grows with the number of
//! distinct stacks.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::event::{Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

use super::composition::Amount;
use super::custom::CustomCategorizer;
use super::open_ranges::OpenRanges;
use super::stacks::StackTable;
use super::statistics::{Stat, StatisticsCollector, Stats};
use crate::rules::CustomCategory;
use memtrace_input::{CompileContextId, EventSource, LostEvents, Recording, TraceIndex};
use memtrace_replay::{Change, DeviceReplay, Names, Replay, Usage};

/// The size of the cache for [`Entries::common`], in entries.
const CACHE_SIZE: usize = 4096;
/// The maximum number of threads whose last stack is remembered.
const MAX_THREADS: usize = 1 << 16;

/// The memory use of a line. Bytes are rounded as the allocator rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LineUse {
    /// How often events showed that the line was entered: a lower bound of its executions. 0 if threads are unknown.
    pub times: u64,
    /// Blocks allocated by the line and the functions it calls.
    pub allocated: Amount,
    /// Blocks freed.
    pub freed: Amount,
    /// The highest number of active bytes while the line was current.
    pub active_peak: u64,
    /// The highest number of reserved bytes while the line was current.
    pub reserved_peak: u64,
    /// Blocks that the backward pass of the line's calls allocated.
    pub backward: Amount,
}

impl LineUse {
    /// Allocated minus freed bytes.
    pub fn net(&self) -> i64 {
        self.allocated.bytes as i64 - self.freed.bytes as i64
    }

    /// Adds what another line did.
    pub fn join(&mut self, other: &LineUse) {
        self.times += other.times;
        self.absorb(other);
    }

    #[inline]
    fn absorb(&mut self, other: &LineUse) {
        for (sum, more) in [
            (&mut self.allocated, other.allocated),
            (&mut self.freed, other.freed),
            (&mut self.backward, other.backward),
        ] {
            sum.bytes += more.bytes;
            sum.blocks += more.blocks;
        }
        self.active_peak = self.active_peak.max(other.active_peak);
        self.reserved_peak = self.reserved_peak.max(other.reserved_peak);
    }
}

/// A function of the program and those of its lines that did anything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FunctionUse {
    /// The qualified name if known, else the name.
    pub qualname: Box<str>,
    /// The file name, as the code object has it.
    pub filename: Box<str>,
    /// The first line of the function; 0 if unknown.
    pub first_line: u32,
    /// The whole function. Each event counts once.
    pub whole: LineUse,
    /// By line number, in order.
    pub lines: Vec<(u32, LineUse)>,
    /// The blocks of [`LineUse::allocated`] by line number, custom category and compiled region. Empty without rules
    /// and compile contexts.
    pub kinds: BTreeMap<(u32, BlockKind), Amount>,
    /// By line number: its blocks with tensor names.
    pub named: BTreeMap<u32, NamedBlocks>,
    /// By line number: the figures of `torch.cuda.memory_stats`. Empty unless requested.
    pub statistics: BTreeMap<u32, LineStatistics>,
}

/// The parts of a recording from which lines are computed, and the figures.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinesScope<'a> {
    /// Only what happens while the program has a range of this name open, on any thread.
    pub range: Option<&'a str>,
    /// Whether lines have [`LineStatistics`].
    pub statistics: bool,
}

/// The figures of `torch.cuda.memory_stats` while a line was current: `current` after its last event, `peak`, and the
/// increases and decreases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LineStatistics {
    /// All pools, the pool of large blocks, and the pool of small blocks.
    pub pools: [Stats; 3],
    /// The `seq` of the last event.
    last: u64,
}

impl LineStatistics {
    fn absorb(&mut self, other: &LineStatistics) {
        let is_later = other.last >= self.last;
        self.last = self.last.max(other.last);
        for (sum, more) in self.pools.iter_mut().flatten().zip(other.pools.iter().flatten()) {
            *sum = Stat {
                current: if is_later { more.current } else { sum.current },
                peak: sum.peak.max(more.peak),
                allocated: sum.allocated.saturating_add(more.allocated),
                freed: sum.freed.saturating_add(more.freed),
            };
        }
    }

    /// The changes from `before` to `now`.
    fn between(before: &[Stats; 3], now: &[Stats; 3], seq: u64) -> LineStatistics {
        let mut pools = *now;
        for (stat, before) in pools.iter_mut().flatten().zip(before.iter().flatten()) {
            *stat = Stat {
                current: stat.current,
                peak: stat.current.max(before.current),
                allocated: stat.allocated.saturating_sub(before.allocated),
                freed: stat.freed.saturating_sub(before.freed),
            };
        }
        LineStatistics { pools, last: seq }
    }
}

/// The statistics of a device by stack.
#[derive(Clone, Debug, Default)]
struct StackStatistics {
    device: StatisticsCollector,
    before: [Stats; 3],
    stacks: HashMap<StackId, LineStatistics>,
    /// The last requested free: its address, and the stacks that it counts for. Its completion counts for them too.
    freed: Option<(u64, [StackId; 2])>,
}

impl StackStatistics {
    /// Observes an event that counts for these stacks.
    fn observe(&mut self, device: &DeviceReplay, e: &Event, change: &Change, stacks: [StackId; 2], counts: bool) {
        self.device.observe(&device.allocator, e, change);
        if device.source != EventSource::Torch {
            self.device.observe_own_segment(&device.allocator, change);
        }
        let now = self.device.pools();
        let before = std::mem::replace(&mut self.before, now);
        let stacks = match change {
            Change::FreeCompleted(..) => match self.freed.take() {
                Some((addr, stacks)) if addr == e.addr => stacks,
                _ => return,
            },
            _ => stacks,
        };
        self.freed = matches!(change, Change::FreeRequested(_)).then_some((e.addr, stacks));
        if !counts || e.flags.contains(Flags::PREEXISTING) {
            return;
        }
        let changed = LineStatistics::between(&before, &now, e.seq);
        let [own, caller] = stacks;
        for stack in [own, if caller == own { StackId::NONE } else { caller }] {
            if !stack.is_none() {
                self.stacks.entry(stack).or_default().absorb(&changed);
            }
        }
    }
}

/// The custom category and the compiled region of a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockKind {
    /// Its custom category.
    pub custom: CustomCategory,
    /// The compiled region of `torch.compile` that allocated it.
    pub compile_context: CompileContextId,
}

impl BlockKind {
    /// The smallest and the largest kind.
    pub const BOUNDS: [BlockKind; 2] = [
        BlockKind { custom: CustomCategory::FIRST, compile_context: CompileContextId::FIRST },
        BlockKind { custom: CustomCategory::NONE, compile_context: CompileContextId::NONE },
    ];
}

/// The allocated blocks that have tensor names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NamedBlocks {
    /// The number of blocks.
    pub blocks: u64,
    /// The largest one, the first of several: its bytes and the `seq` of its allocation.
    pub largest: (u64, u64),
}

impl NamedBlocks {
    fn join(&mut self, other: &NamedBlocks) {
        self.blocks += other.blocks;
        let (bytes, seq) = other.largest;
        if bytes > self.largest.0 || bytes == self.largest.0 && seq < self.largest.1 {
            self.largest = other.largest;
        }
    }
}

/// The lines of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceLines {
    /// The device ordinal; -1 for the CPU.
    pub device: i16,
    /// The device's highest totals.
    pub peak: Usage,
    stacks: Vec<LineUse>,
    /// By stack: the blocks of its [`LineUse::allocated`] by kind.
    kinds: HashMap<StackId, BTreeMap<BlockKind, Amount>>,
    /// By stack: its blocks with tensor names.
    named: HashMap<StackId, NamedBlocks>,
    statistics: Option<Box<StackStatistics>>,
    entries: Entries,
    before: Usage,
}

/// Counts how often each stack was entered. When the current stack changes, everything below the common caller of the
/// old and the new stack is entered. So `at` gets one more at the new stack and one less at the common caller; sums
/// over subtrees are the entries.
#[derive(Clone, Debug, Default)]
struct Entries {
    at: Vec<i64>,
    last: HashMap<ThreadId, StackId>,
    only: Option<(ThreadId, StackId)>,
    cache: Vec<(StackId, StackId, StackId)>,
}

impl Entries {
    #[inline]
    fn observe(&mut self, definitions: &Definitions, thread: ThreadId, stack: StackId) {
        let before = match self.only {
            Some((t, last)) if t == thread => last,
            _ => self.last.get(&thread).copied().unwrap_or_default(),
        };
        if before == stack && self.only.is_some_and(|(t, _)| t == thread) {
            return;
        }
        if let Some((t, last)) = self.only.replace((thread, stack)).filter(|(t, _)| *t != thread)
            && (self.last.len() < MAX_THREADS || self.last.contains_key(&t))
        {
            self.last.insert(t, last);
        }
        if before != stack {
            let common = self.common(definitions, before, stack);
            self.at[stack.index()] += 1;
            self.at[common.index()] -= 1;
        }
    }

    /// The innermost stack that is a caller of both, or one of them.
    #[inline]
    fn common(&mut self, definitions: &Definitions, a: StackId, b: StackId) -> StackId {
        if self.cache.is_empty() {
            self.cache = vec![(StackId::NONE, StackId::NONE, StackId::NONE); CACHE_SIZE];
        }
        let slot = (a.0.wrapping_mul(0x9e37_79b1) ^ b.0.wrapping_mul(0x85eb_ca6b)) as usize >> 7 & (CACHE_SIZE - 1);
        let (cached_a, cached_b, cached) = self.cache[slot];
        if (cached_a, cached_b) == (a, b) {
            return cached;
        }
        let (mut x, mut y) = (a, b);
        // A caller has a smaller id than the stacks it calls.
        while x != y {
            let deeper = if x > y { &mut x } else { &mut y };
            let parent = definitions.stacks.get(deeper.index()).map_or(StackId::NONE, |node| node.parent);
            *deeper = if parent < *deeper { parent } else { StackId::NONE };
        }
        self.cache[slot] = (a, b, x);
        x
    }

    /// How often each stack was entered.
    fn entered(&self, definitions: &Definitions) -> Vec<i64> {
        let mut entered = self.at.clone();
        for id in (1..entered.len()).rev() {
            let parent = definitions.stacks.get(id).map_or(0, |node| node.parent.index());
            if parent < id {
                entered[parent] += entered[id];
            }
        }
        entered
    }
}

/// The lines of a process.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    /// By device, by ordinal.
    pub devices: Vec<DeviceLines>,
    /// Events that could not be decoded.
    pub lost: LostEvents,
}

impl Lines {
    /// Streams a recording once. `names` are those of its tensors, and `custom` divides what lines allocated into
    /// custom categories. `scope` selects events and figures. `progress` receives the number of events read so far.
    pub fn of(
        recording: &dyn Recording,
        trace_index: &TraceIndex,
        names: &Names,
        custom: Option<&CustomCategorizer<'_>>,
        scope: LinesScope<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Lines {
        let definitions = recording.definitions();
        let table = StackTable::new(definitions);
        let mut replay = Replay::new(trace_index, None);
        let stacks = definitions.stacks.len().max(1);
        let new = |device: i16| DeviceLines {
            device,
            stacks: vec![LineUse::default(); stacks],
            entries: Entries { at: vec![0; stacks], ..Entries::default() },
            statistics: scope.statistics.then(Box::default),
            ..DeviceLines::default()
        };
        let mut ranges = scope.range.map(|name| OpenRanges::new(name, definitions));
        let mut devices: Vec<DeviceLines> = replay.devices().iter().map(|d| new(d.device)).collect();
        let mut engine = Engine::default();
        let compile_contexts = recording.compile_contexts();
        let has_kinds = custom.is_some() || !compile_contexts.is_empty();
        let mut done = 0;
        let lost = recording.stream(&mut |events| {
            for e in events {
                if let Some(ranges) = ranges.as_mut().filter(|_| e.source == Source::Label) {
                    ranges.observe(e);
                }
                let counts = ranges.as_ref().is_none_or(OpenRanges::is_open);
                replay.apply(e, |replay, slot, e, change| {
                    let Some(device) = devices.get_mut(slot) else { return };
                    let allocator = &replay.devices()[slot].allocator;
                    let usage = allocator.usage();
                    let is_completion = matches!(change, Change::FreeCompleted(..));
                    let caller = if is_completion { StackId::NONE } else { engine.caller(&table, e) };
                    if let Some(statistics) = &mut device.statistics {
                        statistics.observe(&replay.devices()[slot], e, &change, [e.stack, caller], counts);
                    }
                    // The code that completes a free did not request it. PyTorch's snapshots give a completion the
                    // stack of the allocation.
                    if is_completion || !counts {
                        device.before = *usage;
                        return;
                    }
                    let kind = (has_kinds && matches!(change, Change::Alloc(_))).then(|| {
                        let rule = custom.map(|custom| custom.rule_of_allocation(e.stack, e.context, e.seq));
                        let category = custom.zip(rule).map(|(custom, rule)| custom.category(rule));
                        BlockKind { custom: category.unwrap_or_default(), compile_context: compile_contexts.of(e.seq) }
                    });
                    let named = matches!(change, Change::Alloc(_)) && names.of_allocation(e.seq).is_some();
                    device.observe(definitions, &table, usage, e, &EventAttribution { caller, kind, named });
                });
            }
            done += events.len() as u64;
            progress(done);
        });
        for (device, replayed) in devices.iter_mut().zip(replay.devices()) {
            device.peak = *replayed.allocator.peak();
        }
        Lines { devices, lost }
    }
}

/// The stack that last called the autograd engine and waits for it.
#[derive(Clone, Copy, Debug, Default)]
struct Engine {
    called: Option<(ThreadId, StackId)>,
}

impl Engine {
    /// The stack that waits while this event happens on a thread of the engine; `NONE` without one.
    #[inline]
    fn caller(&mut self, table: &StackTable, e: &Event) -> StackId {
        let facts = table.facts(e.stack);
        let without = table.is_without_python(e.stack);
        if facts.in_engine && !without {
            self.called = Some((e.thread, e.stack));
            return StackId::NONE;
        }
        let Some((thread, stack)) = self.called else { return StackId::NONE };
        let in_backward = e.flags.contains(Flags::IN_BACKWARD) || table.contexts().is_node(e.context);
        // PyTorch's snapshots have no thread ids. There, an event without a stack belongs to the engine.
        if in_backward || without && e.thread.is_none() {
            return stack;
        }
        if thread == e.thread && !without {
            self.called = None;
        }
        StackId::NONE
    }
}

/// The totals that an event belongs to, in addition to its own stack.
struct EventAttribution {
    /// The stack that waits for the autograd engine; `NONE` without one.
    caller: StackId,
    /// The kind of the allocated block, if blocks have kinds.
    kind: Option<BlockKind>,
    /// Whether the allocated block has a tensor name.
    named: bool,
}

impl DeviceLines {
    #[inline]
    fn observe(
        &mut self,
        definitions: &Definitions,
        table: &StackTable,
        usage: &Usage,
        e: &Event,
        attribution: &EventAttribution,
    ) {
        let caller = attribution.caller;
        let before = std::mem::replace(&mut self.before, *usage);
        if e.flags.contains(Flags::PREEXISTING) {
            return;
        }
        let one = |more: u64, less: u64| {
            let bytes = more.saturating_sub(less);
            Amount { bytes, blocks: u64::from(bytes > 0) }
        };
        let mut line_use = LineUse {
            times: 0,
            allocated: one(usage.allocated, before.allocated),
            freed: one(before.allocated, usage.allocated),
            active_peak: usage.active.max(before.active),
            reserved_peak: usage.reserved.max(before.reserved),
            backward: Amount::default(),
        };
        if !e.stack.is_none() && e.stack.index() < self.stacks.len() {
            self.stacks[e.stack.index()].absorb(&line_use);
            // PyTorch's snapshots have no thread ids, so the order of events on one thread is unknown.
            if !e.thread.is_none() {
                self.entries.observe(definitions, e.thread, e.stack);
            }
        }
        if !caller.is_none() && caller != e.stack {
            self.stacks[caller.index()].absorb(&line_use);
        }
        if attribution.named && line_use.allocated.blocks > 0 {
            let largest = (line_use.allocated.bytes, e.seq);
            let also = (caller != e.stack).then_some(caller);
            for stack in std::iter::once(e.stack).chain(also).filter(|stack| !stack.is_none()) {
                self.named.entry(stack).or_default().join(&NamedBlocks { blocks: 1, largest });
            }
        }
        if let Some(kind) = attribution.kind.filter(|_| line_use.allocated.blocks > 0) {
            let also = (caller != e.stack).then_some(caller);
            for stack in std::iter::once(e.stack).chain(also).filter(|stack| !stack.is_none()) {
                self.kinds.entry(stack).or_default().entry(kind).or_default().add(line_use.allocated.bytes);
            }
        }
        if line_use.allocated.blocks > 0 && table.contexts().is_node(e.context) {
            let forward = definitions.context(e.context).map_or(StackId::NONE, |c| c.forward);
            if let Some(of) = self.stacks.get_mut(forward.index()).filter(|_| !forward.is_none()) {
                line_use = LineUse { backward: line_use.allocated, ..LineUse::default() };
                of.absorb(&line_use);
            }
        }
    }

    /// The functions with at least one frame that `is_selected` selects, in the order of their first frames.
    pub fn functions(&self, definitions: &Definitions, is_selected: &dyn Fn(FrameId) -> bool) -> Vec<FunctionUse> {
        let mut functions: Vec<FunctionBuilder> = Vec::new();
        let mut numbers: HashMap<(&str, &str, u32), usize> = HashMap::new();
        // By frame: the index of its function; `None` if it is not selected.
        let mut of: Vec<Option<usize>> = vec![None; definitions.frames.len()];
        for (index, place) in of.iter_mut().enumerate() {
            let id = FrameId(index as u32);
            let Some(frame) = definitions.frame(id).filter(|f| !f.native && is_selected(id)) else { continue };
            let number =
                *numbers.entry((&frame.filename, &frame.qualname, frame.first_line)).or_insert(functions.len());
            if number == functions.len() {
                functions.push(FunctionBuilder {
                    function: FunctionUse {
                        qualname: frame.qualname.clone(),
                        filename: frame.filename.clone(),
                        first_line: frame.first_line,
                        ..FunctionUse::default()
                    },
                    ..FunctionBuilder::default()
                });
            }
            *place = Some(number);
        }
        let entered = self.entries.entered(definitions);
        for (index, (line_use, entered)) in self.stacks.iter().zip(&entered).enumerate().skip(1) {
            let id = StackId(index as u32);
            let is_idle = *line_use == LineUse::default();
            for (stack, frame) in definitions.walk_ids(id) {
                // Without other figures, a stack contributes only the entries of its own frame.
                if is_idle && stack != id {
                    break;
                }
                let Some(number) = of.get(frame.index()).copied().flatten() else { continue };
                let line = definitions.frame(frame).map_or(0, |f| f.line);
                let entered = if stack == id { *entered } else { 0 };
                let statistics = self.statistics.as_ref().and_then(|statistics| statistics.stacks.get(&id));
                let also = (self.kinds.get(&id), self.named.get(&id), statistics);
                functions[number].add(id, line, line_use, also, entered);
            }
        }
        functions.into_iter().filter_map(FunctionBuilder::finish).collect()
    }
}

/// A function while its lines are collected.
#[derive(Default)]
struct FunctionBuilder {
    function: FunctionUse,
    lines: BTreeMap<u32, (LineUse, StackId)>,
    seen: StackId,
}

impl FunctionBuilder {
    /// Adds what a stack did to one of its frames' lines. The frames of a stack come innermost first.
    fn add(
        &mut self,
        stack: StackId,
        line: u32,
        line_use: &LineUse,
        (kinds, named, statistics): (
            Option<&BTreeMap<BlockKind, Amount>>,
            Option<&NamedBlocks>,
            Option<&LineStatistics>,
        ),
        entered: i64,
    ) {
        let is_known = self.function.first_line > 0;
        let (sum, seen) = self.lines.entry(line).or_default();
        sum.times += entered.max(0) as u64;
        // Functions whose first line is unknown can be several functions with one name. Their lines are treated as
        // independent.
        let again = if is_known { self.seen == stack } else { *seen == stack };
        if !again {
            sum.absorb(line_use);
            if let Some(named) = named {
                self.function.named.entry(line).or_default().join(named);
            }
            if let Some(statistics) = statistics {
                self.function.statistics.entry(line).or_default().absorb(statistics);
            }
            for (kind, amount) in kinds.into_iter().flatten() {
                let sum = self.function.kinds.entry((line, *kind)).or_default();
                sum.bytes += amount.bytes;
                sum.blocks += amount.blocks;
            }
        }
        if self.seen != stack {
            self.function.whole.absorb(line_use);
        }
        (*seen, self.seen) = (stack, stack);
    }

    fn finish(mut self) -> Option<FunctionUse> {
        let is_used = |one: &LineUse| LineUse { times: 0, ..*one } != LineUse::default();
        let lines = self.lines.into_iter().map(|(line, (line_use, _))| (line, line_use));
        self.function.lines = lines.filter(|(_, one)| is_used(one)).collect();
        (!self.function.lines.is_empty()).then_some(self.function)
    }
}
