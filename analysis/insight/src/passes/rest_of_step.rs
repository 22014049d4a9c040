//! The requests and frees that an interrupted step would still have made, from an earlier iteration of the same loop.
//!
//! While a recording streams, a [`StepRecorder`] keeps the requests and frees of the latest two steps. At the error,
//! [`InterruptedStep`] looks for the place of the failed request in the earlier step: the request with the same stack
//! and size that has the longest run of equal requests before it. The part of the earlier step from that place on
//! is the rest of the failed step.
//!
//! If the earlier step did something else, the failed step itself can have an earlier iteration: a micro-batch, or a
//! batch of an evaluation. Its rest ends where the next iteration began.
//!
//! A free in the rest applies to the block of the failed step that corresponds to the freed one: the block itself if it
//! existed at both places, else the latest one with the same stack and size.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use memtrace_trace::event::{Event, Flags};
use memtrace_trace::ids::{ContextId, StackId};

use super::stacks::StackTable;
use crate::rules::{is_lt_workspace_size, is_workspace_size};
use memtrace_replay::{Allocator, AllocatorSettings, Block, BlockId, BlockState, Change};

/// A step with more requests and frees than this has no rest. The memory for them is bounded: 8 MiB.
const MAX_ENTRIES: usize = 1 << 17;
/// The place of the failed request must follow this many equal requests, or all requests of its step.
const MIN_EQUAL: usize = 8;
/// The place in an earlier iteration of the same step must follow this many equal requests, one of them outside the
/// model.
const MIN_EQUAL_ITERATION: usize = 2;
/// The comparison of the requests before two places ends after this many equal ones.
const MAX_EQUAL: usize = 4096;
/// At most this many places are compared.
const MAX_PLACES: usize = 1024;
/// Blocks that the first step left, and of which it is unknown whether the next step frees them, do not matter up to
/// 5 % (1/20) of the result.
const UNCERTAIN: u64 = 20;

/// The earlier iteration that shows the rest of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EarlierIteration {
    /// The step with this number.
    Step(u32),
    /// An earlier iteration within the failed step.
    InSameStep,
}

/// One event in the rest of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestEvent {
    /// A request. Its block is numbered by the requests so far, from 0, which is the failed request itself.
    Requested {
        /// The requested size in bytes.
        requested: u64,
        /// The size of the block in bytes, rounded as the allocator rounds.
        size: u64,
        /// The stream.
        stream: u64,
        /// `seq` of the allocation in the earlier iteration.
        earlier: u64,
    },
    /// The program frees a block.
    FreeRequested(RestBlock),
    /// The memory of a block is free again.
    FreeCompleted(RestBlock),
}

/// A block that the rest of a step frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestBlock {
    /// The block of the request with this number.
    New(usize),
    /// A block that was allocated when the request failed.
    Old {
        /// Its address.
        addr: u64,
        /// Its size in bytes, rounded as the allocator rounds.
        size: u64,
        /// `seq` of its allocation.
        seq: u64,
        /// `seq` of the allocation of the corresponding block in the earlier iteration.
        earlier: u64,
    },
}

/// The rest of an interrupted step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RestOfStep {
    /// The earlier iteration that it is taken from.
    pub taken_from: EarlierIteration,
    /// The events of the rest, beginning with the failed request.
    pub events: Vec<RestEvent>,
    /// The highest number of allocated bytes.
    pub peak: u64,
    /// The bytes of blocks that the first step left, and that the failed step may free before its peak. `events` keep
    /// them, so `peak` is an upper bound. 0 if they do not matter.
    pub uncertain: u64,
}

/// The allocated bytes during the calls of one module in the forward pass of an interrupted step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallLevel {
    /// The call.
    pub call: ContextId,
    /// `seq` of its first and of its last allocation.
    pub seqs: (u64, u64),
    /// The allocated bytes before its first allocation.
    pub before: u64,
    /// The highest number of allocated bytes after one of its allocations.
    pub peak: u64,
}

/// The key by which two requests are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct RequestKey {
    /// The Python stack.
    stack: StackId,
    /// The requested size, rounded by the allocator's settings. An out-of-memory event has no other size.
    rounded: u64,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    key: RequestKey,
    seq: u64,
    requested: u64,
    size: u64,
    stream: u64,
    /// The call of a module, or the autograd node.
    context: ContextId,
    /// Whether the block is a gradient or optimizer state if it outlives its step. A later step does not allocate
    /// another one.
    is_made_once: bool,
    /// Whether the request was made in a call of a model.
    is_in_model: bool,
}

/// An event of the kept steps. Blocks are identified by the `seq` of their allocation.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Requested(Request),
    FreeRequested(LiveBlock),
    FreeCompleted(u64),
}

impl Entry {
    /// The block that the program frees.
    fn freed(&self) -> Option<u64> {
        match self {
            Entry::FreeRequested(block) => Some(block.seq),
            _ => None,
        }
    }
}

fn is_workspace(requested: u64) -> bool {
    is_workspace_size(requested) || is_lt_workspace_size(requested)
}

/// A block that is allocated at one place.
#[derive(Clone, Copy, Debug)]
struct LiveBlock {
    seq: u64,
    addr: u64,
    size: u64,
    key: RequestKey,
}

/// A request that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRequest {
    pub(super) stack: StackId,
    pub(super) context: ContextId,
    /// The requested bytes, rounded as the allocator rounds.
    pub(super) requested: u64,
}

/// The requests and frees of one step.
#[derive(Clone, Debug, Default)]
struct KeptStep {
    /// The number of the step, and the `seq` of its first allocation. `None` if there is no such step.
    start: Option<(u32, u64)>,
    /// Empty if they are too many.
    entries: Vec<Entry>,
    count: usize,
}

impl KeptStep {
    fn push(&mut self, entry: Entry) {
        self.count += 1;
        if self.count <= MAX_ENTRIES {
            self.entries.push(entry);
        } else {
            self.entries = Vec::new();
        }
    }
}

/// Keeps the latest two steps of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct StepRecorder {
    /// The run's allocator settings.
    settings: AllocatorSettings,
    previous: KeptStep,
    current: KeptStep,
    /// The latest request, until its step is known.
    request: Option<Request>,
}

/// A step that an out-of-memory error interrupted, and the step before it.
#[derive(Debug)]
pub(super) struct InterruptedStep<'a> {
    failed: FailedRequest,
    settings: &'a AllocatorSettings,
    /// The blocks at the time of the error.
    allocator: &'a Allocator,
    table: &'a StackTable,
    /// The step before, and the failed step: the number of the step, and the `seq` of its first allocation.
    previous: Option<(u32, u64)>,
    current: (u32, u64),
    /// The requests and frees of both steps.
    entries: Vec<Entry>,
    /// The blocks that were allocated when the first of the two steps began.
    before: Vec<LiveBlock>,
}

/// The place of the failed request in an earlier iteration.
struct EarlierRequest {
    /// The index of the corresponding request among [`InterruptedStep::entries`].
    at: usize,
    /// The index of the entry at which the rest ends.
    end: usize,
    taken_from: EarlierIteration,
}

impl StepRecorder {
    pub(super) fn new(settings: AllocatorSettings) -> StepRecorder {
        StepRecorder { settings, ..StepRecorder::default() }
    }

    /// Observes a change that the event `e` caused. [`Self::allocated`] follows if it is an allocation.
    #[inline]
    pub(super) fn changed(&mut self, allocator: &Allocator, table: &StackTable, e: &Event, change: &Change) {
        let entry = match *change {
            Change::Alloc(id) => {
                self.request = Some(self.request(allocator, table, e, id));
                return;
            }
            Change::FreeRequested(id) => {
                Entry::FreeRequested(LiveBlock::of(allocator.block(id), &self.settings, table))
            }
            Change::FreeCompleted(_, block) => Entry::FreeCompleted(block.seq),
            _ => return,
        };
        self.push(entry);
    }

    /// Observes the step of an allocation.
    #[inline]
    pub(super) fn allocated(&mut self, step: Option<u32>) {
        let Some(request) = self.request.take() else { return };
        let start = step.map(|step| (step, request.seq));
        if start.is_some() && step != self.current.start.map(|(current, _)| current) {
            self.previous = std::mem::replace(&mut self.current, KeptStep { start, ..KeptStep::default() });
        }
        self.push(Entry::Requested(request));
    }

    fn push(&mut self, entry: Entry) {
        if self.current.start.is_none() {
            return;
        }
        self.current.push(entry);
        if self.is_too_long() {
            self.previous.entries = Vec::new();
        }
    }

    fn is_too_long(&self) -> bool {
        self.previous.count + self.current.count > MAX_ENTRIES
    }

    /// The step that the failed request interrupts. `allocator` are the blocks at that time. `None` before the first
    /// step.
    pub(super) fn interrupted<'a>(
        &'a self,
        failed: FailedRequest,
        allocator: &'a Allocator,
        table: &'a StackTable,
    ) -> Option<InterruptedStep<'a>> {
        let current = self.current.start?;
        let kept = [&self.previous.entries[..], &self.current.entries[..]];
        let entries = if self.is_too_long() { Vec::new() } else { kept.concat() };
        let (_, first) = self.previous.start.unwrap_or(current);
        // A block from before is still in use, or a kept step has freed it.
        let freed = entries.iter().filter_map(|entry| match entry {
            Entry::FreeRequested(block) => Some(*block),
            _ => None,
        });
        let mut before: Vec<LiveBlock> =
            live_blocks(allocator, &self.settings, table).into_iter().chain(freed).collect();
        before.retain(|block| block.seq < first);
        before.sort_unstable_by_key(|block| block.seq);
        let (settings, previous) = (&self.settings, self.previous.start);
        Some(InterruptedStep { failed, settings, allocator, table, previous, current, entries, before })
    }

    fn request(&self, allocator: &Allocator, table: &StackTable, e: &Event, id: BlockId) -> Request {
        let block = allocator.block(id);
        let facts = table.facts(e.stack);
        let in_backward =
            e.flags.contains(Flags::IN_BACKWARD) || table.contexts().is_node(e.context) || facts.in_engine;
        Request {
            key: RequestKey::of(block, &self.settings, table),
            seq: e.seq,
            requested: block.requested,
            size: block.size,
            stream: e.stream,
            context: e.context,
            is_made_once: in_backward || facts.optimizer.is_some(),
            is_in_model: in_backward || !facts.outermost_compute.is_none(),
        }
    }
}

impl RequestKey {
    fn of(block: &Block, settings: &AllocatorSettings, table: &StackTable) -> RequestKey {
        RequestKey { stack: table.python(block.stack), rounded: settings.round(block.requested) }
    }
}

impl LiveBlock {
    fn of(block: &Block, settings: &AllocatorSettings, table: &StackTable) -> LiveBlock {
        let key = RequestKey::of(block, settings, table);
        LiveBlock { seq: block.seq, addr: block.addr, size: block.size, key }
    }
}

/// The blocks that the program uses, in the order of their allocation.
fn live_blocks(allocator: &Allocator, settings: &AllocatorSettings, table: &StackTable) -> Vec<LiveBlock> {
    let in_use = allocator.allocated().filter(|(_, block)| block.state == BlockState::Allocated);
    let mut live: Vec<LiveBlock> = in_use.map(|(_, block)| LiveBlock::of(block, settings, table)).collect();
    live.sort_unstable_by_key(|block| block.seq);
    live
}

impl InterruptedStep<'_> {
    /// The rest of the step from the failed request on. `None` if no earlier iteration shows it.
    pub(super) fn rest(&self) -> Option<RestOfStep> {
        let FailedRequest { stack, requested, .. } = self.failed;
        let failed = RequestKey { stack: self.table.python(stack), rounded: self.settings.round(requested) };
        let place = self.place_in_previous_step(failed).or_else(|| self.place_in_same_step(failed))?;
        let now = live_blocks(self.allocator, self.settings, self.table);
        let mut matched = MatchedBlocks::new(&self.live_at(place.at), &now);
        let part = self.entries.get(place.at..place.end)?;
        let freed: HashSet<u64> = part.iter().filter_map(Entry::freed).collect();
        let mut numbers: HashMap<u64, usize> = HashMap::new();
        let mut events = Vec::with_capacity(part.len());
        for entry in part {
            let block = |seq: &u64| match numbers.get(seq) {
                Some(number) => Some(RestBlock::New(*number)),
                None => matched.now.get(seq).map(|block| RestBlock::Old {
                    addr: block.addr,
                    size: block.size,
                    seq: block.seq,
                    earlier: *seq,
                }),
            };
            match entry {
                Entry::Requested(one) => {
                    let exists = !events.is_empty()
                        && one.is_made_once
                        && !freed.contains(&one.seq)
                        && matched.take_unmatched(one.key);
                    if !exists {
                        numbers.insert(one.seq, numbers.len());
                        let Request { requested, size, stream, seq: earlier, .. } = *one;
                        events.push(RestEvent::Requested { requested, size, stream, earlier });
                    }
                }
                Entry::FreeRequested(freed) => events.extend(block(&freed.seq).map(RestEvent::FreeRequested)),
                Entry::FreeCompleted(seq) => events.extend(block(seq).map(RestEvent::FreeCompleted)),
            }
        }
        let peak = peak_of(&events, self.allocator.usage().allocated);
        let uncertain = Some(self.uncertain(&place, &matched)).filter(|bytes| bytes.saturating_mul(UNCERTAIN) > peak);
        Some(RestOfStep { taken_from: place.taken_from, events, peak, uncertain: uncertain.unwrap_or(0) })
    }

    /// The allocated bytes during the calls of modules in the failed step, by call. Empty if a backward pass has run:
    /// then a call can belong to an earlier forward pass of the step.
    pub(super) fn call_levels(&self) -> Vec<CallLevel> {
        let part = self.entries.get(self.failed_step()..).unwrap_or_default();
        // The level at the end is known. Going back from it gives the level at the beginning.
        let mut level = part.iter().rev().fold(self.allocator.usage().allocated, |level, entry| match entry {
            Entry::Requested(one) => level.saturating_sub(one.size),
            Entry::FreeRequested(block) => level.saturating_add(block.size),
            Entry::FreeCompleted(_) => level,
        });
        let mut calls: BTreeMap<ContextId, CallLevel> = BTreeMap::new();
        for entry in part {
            match entry {
                Entry::Requested(one) if one.is_made_once => return Vec::new(),
                Entry::Requested(one) => {
                    let before = level;
                    level = level.saturating_add(one.size);
                    let first = CallLevel { call: one.context, seqs: (one.seq, one.seq), before, peak: level };
                    let call = calls.entry(one.context).or_insert(first);
                    call.seqs.1 = one.seq;
                    call.peak = call.peak.max(level);
                }
                Entry::FreeRequested(block) => level = level.saturating_sub(block.size),
                Entry::FreeCompleted(_) => {}
            }
        }
        calls.into_values().filter(|call| !call.call.is_none()).collect()
    }

    /// The index of the first entry of the failed step.
    fn failed_step(&self) -> usize {
        let (_, from) = self.current;
        let is_before = |entry: &Entry| matches!(entry, Entry::Requested(one) if one.seq >= from);
        self.entries.iter().position(is_before).unwrap_or(self.entries.len())
    }

    fn request_at(&self, index: usize) -> Option<&Request> {
        match self.entries.get(index) {
            Some(Entry::Requested(one)) => Some(one),
            _ => None,
        }
    }

    /// The indices of the requests of a part of the entries.
    fn requests(&self, from: usize, to: usize) -> Vec<usize> {
        (from..to).filter(|at| self.request_at(*at).is_some()).collect()
    }

    /// The number of equal requests before two places, each given by the requests before it.
    fn equal_before(&self, a: &[usize], b: &[usize]) -> usize {
        let key = |at: &usize| self.request_at(*at).map(|one| one.key);
        a.iter().rev().zip(b.iter().rev()).take(MAX_EQUAL).take_while(|(a, b)| key(a) == key(b)).count()
    }

    fn place_in_previous_step(&self, failed: RequestKey) -> Option<EarlierRequest> {
        let (step, _) = self.previous?;
        let middle = self.failed_step();
        let mut earlier = self.requests(0, middle);
        // Workspaces that an earlier step allocates exist in later ones, and can be as large as what their place
        // allocates.
        let freed: HashSet<u64> = self.entries.iter().filter_map(Entry::freed).collect();
        earlier.retain(|at| {
            self.request_at(*at).is_none_or(|one| freed.contains(&one.seq) || !is_workspace(one.requested))
        });
        let so_far = self.requests(middle, self.entries.len());
        let places =
            earlier.iter().enumerate().filter(|(_, at)| self.request_at(**at).is_some_and(|r| r.key == failed));
        // The request comes as often in each step. Without this, the longest run of equal requests can belong to
        // another of several equal layers, because the first step also allocates workspaces.
        let is_failed = |at: &&usize| self.request_at(**at).is_some_and(|one| one.key == failed);
        let before = so_far.iter().filter(is_failed).count();
        let compared = places.take(MAX_PLACES).enumerate().map(|(count, (number, at))| {
            let equal = self.equal_before(&earlier[..number], &so_far);
            let is_nth = count == before && equal >= MIN_EQUAL;
            (is_nth, equal, std::cmp::Reverse(number.abs_diff(so_far.len())), *at)
        });
        let (_, equal, std::cmp::Reverse(apart), at) = compared.max()?;
        let is_same = equal >= MIN_EQUAL || equal == so_far.len() && apart == 0;
        is_same.then_some(EarlierRequest { at, end: middle, taken_from: EarlierIteration::Step(step) })
    }

    /// The place in an earlier iteration of the failed step. An iteration calls a model: the failed request is made in
    /// the same call of a module, and between the two there is a request outside the model. Loops of a model repeat
    /// requests as well, and so does the loop of an optimizer over its parameters.
    fn place_in_same_step(&self, failed: RequestKey) -> Option<EarlierRequest> {
        let call = self.failed.context;
        if call.is_none() {
            return None;
        }
        let all = self.requests(self.failed_step(), self.entries.len());
        let is_place = |(_, at): &(usize, &usize)| {
            self.request_at(**at).is_some_and(|one| one.key == failed && one.context == call)
        };
        for (number, at) in
            all.iter().enumerate().filter(is_place).collect::<Vec<_>>().into_iter().rev().take(MAX_PLACES)
        {
            let equal = self.equal_before(&all[..number], &all);
            let begin = all.len() - equal;
            let is_outside =
                |at: &usize| self.request_at(*at).is_some_and(|one| !one.is_in_model && one.context.is_none());
            if equal >= MIN_EQUAL_ITERATION && begin > number && all[begin..].iter().any(is_outside) {
                let end = all.get(begin).copied().unwrap_or(self.entries.len());
                return Some(EarlierRequest { at: *at, end, taken_from: EarlierIteration::InSameStep });
            }
        }
        None
    }

    /// The blocks that were allocated before the entry at `index`.
    fn live_at(&self, index: usize) -> Vec<LiveBlock> {
        let mut live: Vec<LiveBlock> = self.before.clone();
        let mut freed: HashSet<u64> = HashSet::new();
        for entry in &self.entries[..index] {
            match entry {
                Entry::Requested(one) => {
                    live.push(LiveBlock { seq: one.seq, addr: 0, size: one.size, key: one.key });
                }
                Entry::FreeRequested(block) => {
                    freed.insert(block.seq);
                }
                Entry::FreeCompleted(_) => {}
            }
        }
        live.retain(|block| !freed.contains(&block.seq));
        live
    }

    /// Bytes of blocks that the first step left, neither gradients nor optimizer state. The first step does not show
    /// whether a later step frees them.
    fn uncertain(&self, place: &EarlierRequest, matched: &MatchedBlocks) -> u64 {
        if place.taken_from != EarlierIteration::Step(0) {
            return 0;
        }
        let (_, to) = self.current;
        let (_, from) = self.previous.unwrap_or(self.current);
        let made_once: HashSet<u64> = self
            .entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Requested(one) if one.is_made_once => Some(one.seq),
                _ => None,
            })
            .collect();
        let unmatched = matched.unmatched.values().flatten();
        let uncertain = unmatched.filter(|one| one.seq >= from && one.seq < to && !made_once.contains(&one.seq));
        uncertain.map(|one| one.size).sum()
    }
}

/// Which block of the failed step corresponds to which block of the earlier iteration.
struct MatchedBlocks {
    /// By `seq` of the earlier block.
    now: HashMap<u64, LiveBlock>,
    /// The blocks of the failed step that correspond to none, in the order of their allocation.
    unmatched: HashMap<RequestKey, VecDeque<LiveBlock>>,
}

impl MatchedBlocks {
    /// Both lists are in the order of allocation.
    fn new(then: &[LiveBlock], now: &[LiveBlock]) -> MatchedBlocks {
        let earlier: HashSet<u64> = then.iter().map(|block| block.seq).collect();
        let mut matched = HashMap::new();
        let mut unmatched: HashMap<RequestKey, VecDeque<LiveBlock>> = HashMap::new();
        for block in now {
            if earlier.contains(&block.seq) {
                matched.insert(block.seq, *block);
            } else {
                unmatched.entry(block.key).or_default().push_back(*block);
            }
        }
        for block in then.iter().rev() {
            if !matched.contains_key(&block.seq)
                && let Some(same) = unmatched.get_mut(&block.key).and_then(VecDeque::pop_back)
            {
                matched.insert(block.seq, same);
            }
        }
        MatchedBlocks { now: matched, unmatched }
    }

    /// Removes a block of the failed step that corresponds to none. Returns whether there was one.
    fn take_unmatched(&mut self, key: RequestKey) -> bool {
        self.unmatched.get_mut(&key).and_then(VecDeque::pop_front).is_some()
    }
}

/// The highest number of allocated bytes, from `allocated` on.
fn peak_of(events: &[RestEvent], allocated: u64) -> u64 {
    let mut sizes = Vec::new();
    let (mut level, mut peak) = (allocated, allocated);
    for event in events {
        match event {
            RestEvent::Requested { size, .. } => {
                sizes.push(*size);
                level = level.saturating_add(*size);
                peak = peak.max(level);
            }
            RestEvent::FreeRequested(RestBlock::New(number)) => {
                level = level.saturating_sub(sizes.get(*number).copied().unwrap_or(0));
            }
            RestEvent::FreeRequested(RestBlock::Old { size, .. }) => level = level.saturating_sub(*size),
            RestEvent::FreeCompleted(_) => {}
        }
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::TraceIndex;
    use memtrace_replay::Replay;
    use memtrace_trace::event::{Action, Source};
    use memtrace_trace::file::{Definitions, Frame, StackNode};
    use memtrace_trace::ids::FrameId;

    const MIB: u64 = 1 << 20;
    /// A stack in a model, and one outside.
    const MODEL: StackId = StackId(2);
    /// The call of a module in which the stacks below 20 allocate.
    const CALL: ContextId = ContextId(1);

    /// A recording of one device.
    struct Recorded {
        events: Vec<Event>,
        table: StackTable,
        next: u64,
    }

    impl Recorded {
        fn new() -> Recorded {
            let mut definitions = Definitions::default();
            let frame =
                |filename: &str| Frame { name: "forward".into(), filename: filename.into(), ..Frame::default() };
            definitions.frames = vec![Frame::default(), frame("train.py"), frame("/torch/nn/modules/module.py")];
            let node = |parent, frame| StackNode { parent: StackId(parent), frame: FrameId(frame) };
            definitions.stacks = vec![StackNode::default(), node(0, 1), node(1, 2)];
            definitions.stacks.extend((3..20).map(|_| node(2, 1)));
            definitions.stacks.extend((20..40).map(|_| node(0, 1)));
            Recorded { events: Vec::new(), table: StackTable::new(&definitions), next: 1 << 30 }
        }

        fn alloc(&mut self, stack: u32, mib: u64) -> u64 {
            self.next += 1 << 30;
            self.event(Action::SegmentAlloc, stack, self.next, mib);
            self.event(Action::Alloc, stack, self.next, mib);
            self.next
        }

        fn free(&mut self, addr: u64) {
            self.event(Action::FreeRequested, 0, addr, 0);
            self.event(Action::FreeCompleted, 0, addr, 0);
        }

        fn event(&mut self, action: Action, stack: u32, addr: u64, mib: u64) {
            let seq = self.events.len() as u64 + 1;
            let (stack, size) = (StackId(stack), mib * MIB);
            self.events.push(Event {
                seq,
                source: Source::Torch,
                action,
                addr,
                size,
                stack,
                context: if (3..20).contains(&stack.0) { CALL } else { ContextId::NONE },
                device: 0,
                ..Event::EMPTY
            });
        }

        fn here(&self) -> u64 {
            self.events.len() as u64 + 1
        }

        /// The rest of the step after a failed request of `mib` MiB at `stack`. `starts` is the `seq` of the first
        /// allocation of each step, with its number.
        fn rest(&self, starts: &[(u32, u64)], stack: u32, mib: u64) -> Option<RestOfStep> {
            let context = if stack < 20 { CALL } else { ContextId::NONE };
            let failed = FailedRequest { stack: StackId(stack), context, requested: mib * MIB };
            let mut recorder = StepRecorder::new(AllocatorSettings::default());
            let mut index = TraceIndex::default();
            index.sources.insert(0, memtrace_input::EventSource::Torch);
            let mut replay = Replay::new(&index, Some(0));
            for e in &self.events {
                replay.apply(e, |replay, _, e, change| {
                    recorder.changed(&replay.devices()[0].allocator, &self.table, e, &change);
                    if matches!(change, Change::Alloc(_)) {
                        recorder.allocated(starts.iter().rfind(|(_, seq)| *seq <= e.seq).map(|(step, _)| *step));
                    }
                });
            }
            recorder.interrupted(failed, &replay.devices()[0].allocator, &self.table).unwrap().rest()
        }
    }

    /// Two steps of ten layers of 10 MiB and a temporary of `scratch` MiB, of which the second ends after six layers.
    fn two_steps(scratch: u64, second_layer: u64) -> (Recorded, [(u32, u64); 2]) {
        let mut r = Recorded::new();
        r.alloc(30, 100);
        let first = r.here();
        let layers: Vec<u64> = (3..13).map(|stack| r.alloc(stack, 10)).collect();
        let temporary = r.alloc(13, scratch);
        r.free(temporary);
        layers.into_iter().for_each(|layer| r.free(layer));
        let second = r.here();
        r.alloc(3, second_layer);
        (4..9).for_each(|stack| _ = r.alloc(stack, 10));
        (r, [(4, first), (5, second)])
    }

    #[test]
    fn the_previous_step_shows_the_rest() {
        let (r, starts) = two_steps(50, 10);
        let rest = r.rest(&starts, 9, 10).unwrap();
        assert_eq!((rest.taken_from, rest.peak / MIB), (EarlierIteration::Step(4), 100 + 10 * 10 + 50));
        assert!(matches!(rest.events[0], RestEvent::Requested { requested, .. } if requested == 10 * MIB));
        let old = rest.events.iter().filter(|e| matches!(e, RestEvent::FreeCompleted(RestBlock::Old { .. }))).count();
        assert_eq!(old, 6, "the layers that the second step has, {:?}", rest.events);
    }

    /// Ten equal layers whose stack is the same. The first step allocates a workspace of the
    /// same size in the first layer.
    #[test]
    fn the_place_is_that_of_the_same_layer() {
        let mut r = Recorded::new();
        let first = r.here();
        let layer = |r: &mut Recorded| [3, 4, 5].map(|stack| r.alloc(stack, 32));
        let mut kept = vec![r.alloc(3, 32)];
        r.alloc(3, 32);
        kept.extend([4, 5].map(|stack| r.alloc(stack, 32)));
        kept.extend((1..10).flat_map(|_| layer(&mut r)));
        kept.into_iter().for_each(|block| r.free(block));
        let second = r.here();
        (0..6).for_each(|_| _ = layer(&mut r));
        let starts = [(0, first), (1, second)];
        let rest = r.rest(&starts, 3, 32).unwrap();
        assert_eq!(rest.peak / MIB, 32 + 10 * 3 * 32, "the workspace and all ten layers");
    }

    #[test]
    fn other_requests_show_no_rest() {
        let (r, starts) = two_steps(50, 20);
        assert_eq!(r.rest(&starts, 9, 10), None, "the step began in another way");
        let (r, starts) = two_steps(50, 10);
        assert_eq!(r.rest(&starts, 9, 20), None, "a request of another size");
        assert_eq!(r.rest(&starts[1..], 9, 10), None, "no earlier step");
    }

    /// The blocks that the first step leaves behind make its rest uncertain. A small one can be ignored.
    #[test]
    fn what_the_first_step_leaves_makes_the_rest_uncertain() {
        for (left, uncertain) in [(1, 0), (100, 100)] {
            let mut r = Recorded::new();
            let first = r.here();
            let layers: Vec<u64> = (3..13).map(|stack| r.alloc(stack, 10)).collect();
            r.alloc(30, left);
            layers.into_iter().for_each(|layer| r.free(layer));
            let second = r.here();
            (3..12).for_each(|stack| _ = r.alloc(stack, 10));
            let starts = [(0, first), (1, second)];
            let rest = r.rest(&starts, 12, 10).expect("a rest");
            assert_eq!((rest.peak, rest.uncertain), ((2 * left + 100) * MIB, uncertain * MIB), "{left}");
        }
    }

    #[test]
    fn an_iteration_of_the_same_step_shows_the_rest_up_to_the_next_one() {
        let mut r = Recorded::new();
        let step = r.here();
        let batch = |r: &mut Recorded, layers: u32| -> Vec<u64> {
            let mut all = vec![r.alloc(30, 5)];
            all.extend((3..3 + layers).map(|stack| r.alloc(stack, 10)));
            all
        };
        let first = batch(&mut r, 12);
        first.into_iter().for_each(|block| r.free(block));
        batch(&mut r, 9);
        let starts = [(0, step)];
        let rest = r.rest(&starts, 12, 10).unwrap();
        assert_eq!((rest.taken_from, rest.peak / MIB), (EarlierIteration::InSameStep, 5 + 12 * 10));
        // A loop inside the model, without a request outside it between two rounds, is no iteration.
        let mut r = Recorded::new();
        let step = r.here();
        for stack in (3..13).chain(3..12) {
            r.alloc(stack, 10);
        }
        let starts = [(0, step)];
        assert_eq!(r.rest(&starts, 12, 10), None);
        assert!(!r.table.facts(MODEL).outermost_compute.is_none());
    }
}
