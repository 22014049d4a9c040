//! What each source line did to a device's memory: the figures of a line profiler, from events.
//!
//! A line is current from an event whose stack has it to the next event of that thread; between events nothing of a program is seen. What an
//! event does belongs to every line in its stack, of a function that calls itself to the innermost one. The level before an event counts
//! for its lines, too: it is what was there when they began.
//!
//! What autograd's own threads do while a line waits for the engine (`loss.backward()`) belongs to that line and all its callers, where an event showed
//! the call: a stackless event after one inside the engine. The lines whose forward call made the nodes have it as `backward`, beside their own.
//!
//! Per event a few sums at its stack; lines are put together at the end, so memory grows with distinct stacks.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

use super::composition::Amount;
use super::stacks::StackTable;
use memtrace_input::{LostEvents, Recording, Survey};
use memtrace_replay::{Change, Replay, Usage};

/// Remembered answers of [`Entries::common`].
const REMEMBERED: usize = 4096;
/// Threads whose last stack is remembered.
const THREADS: usize = 1 << 16;

/// What a line did. Bytes are rounded as the allocator rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LineUse {
    /// How often events showed it entered anew: at least so often it ran. 0 where threads are unknown.
    pub times: u64,
    /// Blocks allocated by it and what it called.
    pub allocated: Amount,
    /// Blocks given back.
    pub freed: Amount,
    /// The highest number of active bytes while it was current.
    pub active_peak: u64,
    /// The highest number of reserved bytes.
    pub reserved_peak: u64,
    /// What the backward of its calls allocated.
    pub backward: Amount,
}

impl LineUse {
    /// Bytes it added to what is allocated, or took from it.
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

/// A function of the program and its lines that did anything.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FunctionUse {
    /// The qualified name, where known; else the name.
    pub qualname: Box<str>,
    /// As the code object has it.
    pub filename: Box<str>,
    /// The first line of the function; 0 when unknown.
    pub first_line: u32,
    /// All of it: each event once.
    pub whole: LineUse,
    /// By line, in order.
    pub lines: Vec<(u32, LineUse)>,
}

/// The lines of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceLines {
    /// The ordinal, -1 for the CPU.
    pub device: i16,
    /// Its highest totals.
    pub peak: Usage,
    stacks: Vec<LineUse>,
    entries: Entries,
    before: Usage,
}

/// Which stacks were entered how often. In the tree of stacks a change from one to another enters what lies below their common
/// caller: one more at the stack, one less at the caller; sums over subtrees are the entries.
#[derive(Clone, Debug, Default)]
struct Entries {
    at: Vec<i64>,
    last: HashMap<ThreadId, StackId>,
    only: Option<(ThreadId, StackId)>,
    remembered: Vec<(StackId, StackId, StackId)>,
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
            && (self.last.len() < THREADS || self.last.contains_key(&t))
        {
            self.last.insert(t, last);
        }
        if before != stack {
            let common = self.common(definitions, before, stack);
            self.at[stack.index()] += 1;
            self.at[common.index()] -= 1;
        }
    }

    /// The innermost stack that both came through.
    #[inline]
    fn common(&mut self, definitions: &Definitions, a: StackId, b: StackId) -> StackId {
        if self.remembered.is_empty() {
            self.remembered = vec![(StackId::NONE, StackId::NONE, StackId::NONE); REMEMBERED];
        }
        let slot = (a.0.wrapping_mul(0x9e37_79b1) ^ b.0.wrapping_mul(0x85eb_ca6b)) as usize >> 7 & (REMEMBERED - 1);
        let (known_a, known_b, known) = self.remembered[slot];
        if (known_a, known_b) == (a, b) {
            return known;
        }
        let (mut x, mut y) = (a, b);
        // A caller has a smaller id than what it calls.
        while x != y {
            let deeper = if x > y { &mut x } else { &mut y };
            let parent = definitions.stacks.get(deeper.index()).map_or(StackId::NONE, |node| node.parent);
            *deeper = if parent < *deeper { parent } else { StackId::NONE };
        }
        self.remembered[slot] = (a, b, x);
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
    /// By device, in order of ordinal.
    pub devices: Vec<DeviceLines>,
    /// What could not be decoded.
    pub lost: LostEvents,
}

impl Lines {
    /// Streams a recording once. `progress` hears how many events have been read.
    pub fn of(recording: &dyn Recording, survey: &Survey, progress: &mut dyn FnMut(u64)) -> Lines {
        let definitions = recording.definitions();
        let table = StackTable::new(definitions);
        let mut replay = Replay::new(survey, None);
        let stacks = definitions.stacks.len().max(1);
        let new = |device: i16| DeviceLines {
            device,
            stacks: vec![LineUse::default(); stacks],
            entries: Entries { at: vec![0; stacks], ..Entries::default() },
            ..DeviceLines::default()
        };
        let mut devices: Vec<DeviceLines> = replay.devices().iter().map(|d| new(d.device)).collect();
        let mut engine = Engine::default();
        let mut done = 0;
        let lost = recording.stream(&mut |events| {
            for e in events {
                replay.apply(e, |replay, slot, e, change| {
                    let Some(device) = devices.get_mut(slot) else { return };
                    let usage = replay.devices()[slot].allocator.usage();
                    // Whoever completes a free did not ask for it; PyTorch's snapshots give it the stack of the allocation.
                    if matches!(change, Change::FreeCompleted(..)) {
                        device.before = *usage;
                        return;
                    }
                    let caller = engine.caller(&table, e);
                    device.observe(definitions, &table, usage, e, caller);
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

/// Which stack last called the autograd engine and waits for it.
#[derive(Clone, Copy, Debug, Default)]
struct Engine {
    called: Option<(ThreadId, StackId)>,
}

impl Engine {
    /// The stack that waits while this event happens on a thread of the engine; `NONE` where there is none.
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
        // A snapshot of PyTorch's knows no threads: there what has no stack is the engine's.
        if in_backward || without && e.thread.is_none() {
            return stack;
        }
        if thread == e.thread && !without {
            self.called = None;
        }
        StackId::NONE
    }
}

impl DeviceLines {
    #[inline]
    fn observe(&mut self, definitions: &Definitions, table: &StackTable, usage: &Usage, e: &Event, caller: StackId) {
        let before = std::mem::replace(&mut self.before, *usage);
        if e.flags.contains(Flags::BEFORE) {
            return;
        }
        let one = |more: u64, less: u64| {
            let bytes = more.saturating_sub(less);
            Amount { bytes, blocks: u64::from(bytes > 0) }
        };
        let mut did = LineUse {
            times: 0,
            allocated: one(usage.allocated, before.allocated),
            freed: one(before.allocated, usage.allocated),
            active_peak: usage.active.max(before.active),
            reserved_peak: usage.reserved.max(before.reserved),
            backward: Amount::default(),
        };
        if !e.stack.is_none() && e.stack.index() < self.stacks.len() {
            self.stacks[e.stack.index()].absorb(&did);
            // Snapshots of PyTorch's know no threads: what follows what on one is unknown.
            if !e.thread.is_none() {
                self.entries.observe(definitions, e.thread, e.stack);
            }
        }
        if !caller.is_none() && caller != e.stack {
            self.stacks[caller.index()].absorb(&did);
        }
        if did.allocated.blocks > 0 && table.contexts().is_node(e.context) {
            let forward = definitions.context(e.context).map_or(StackId::NONE, |c| c.forward);
            if let Some(of) = self.stacks.get_mut(forward.index()).filter(|_| !forward.is_none()) {
                did = LineUse { backward: did.allocated, ..LineUse::default() };
                of.absorb(&did);
            }
        }
    }

    /// The functions whose frames `wanted` chooses, in order of file and place.
    pub fn functions(&self, definitions: &Definitions, wanted: &dyn Fn(FrameId) -> bool) -> Vec<FunctionUse> {
        let mut found: Vec<Found> = Vec::new();
        let mut numbers: HashMap<(&str, &str, u32), usize> = HashMap::new();
        // Of each frame its function, where it is wanted.
        let mut of: Vec<Option<usize>> = vec![None; definitions.frames.len()];
        for (index, place) in of.iter_mut().enumerate() {
            let id = FrameId(index as u32);
            let Some(frame) = definitions.frame(id).filter(|f| !f.native && wanted(id)) else { continue };
            let number = *numbers.entry((&frame.filename, &frame.qualname, frame.first_line)).or_insert(found.len());
            if number == found.len() {
                found.push(Found {
                    function: FunctionUse {
                        qualname: frame.qualname.clone(),
                        filename: frame.filename.clone(),
                        first_line: frame.first_line,
                        ..FunctionUse::default()
                    },
                    ..Found::default()
                });
            }
            *place = Some(number);
        }
        let entered = self.entries.entered(definitions);
        for (index, (did, entered)) in self.stacks.iter().zip(&entered).enumerate().skip(1) {
            let id = StackId(index as u32);
            let idle = *did == LineUse::default();
            for (stack, frame) in definitions.walk_ids(id) {
                // Only its own frames are entered with it.
                if idle && stack != id {
                    break;
                }
                let Some(number) = of.get(frame.index()).copied().flatten() else { continue };
                let line = definitions.frame(frame).map_or(0, |f| f.line);
                found[number].add(id, line, did, if stack == id { *entered } else { 0 });
            }
        }
        found.into_iter().filter_map(Found::finish).collect()
    }
}

/// A function in the making.
#[derive(Default)]
struct Found {
    function: FunctionUse,
    lines: BTreeMap<u32, (LineUse, StackId)>,
    seen: StackId,
}

impl Found {
    /// What a stack did; its frames come innermost first.
    fn add(&mut self, stack: StackId, line: u32, did: &LineUse, entered: i64) {
        let known = self.function.first_line > 0;
        let (sum, seen) = self.lines.entry(line).or_default();
        sum.times += entered.max(0) as u64;
        // Functions whose first line is unknown may be several of one name, and then each line speaks for itself.
        let again = if known { self.seen == stack } else { *seen == stack };
        if !again {
            sum.absorb(did);
        }
        if self.seen != stack {
            self.function.whole.absorb(did);
        }
        (*seen, self.seen) = (stack, stack);
    }

    fn finish(mut self) -> Option<FunctionUse> {
        let did = |one: &LineUse| LineUse { times: 0, ..*one } != LineUse::default();
        let lines = self.lines.into_iter().map(|(line, (did, _))| (line, did));
        self.function.lines = lines.filter(|(_, one)| did(one)).collect();
        (!self.function.lines.is_empty()).then_some(self.function)
    }
}
