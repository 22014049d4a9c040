//! Finds the blocks that grow in a program without steps, from window to window of its allocations.
//!
//! A server of plain functions, a search or a simulation has neither training steps nor calls of an `nn.Module`. A
//! window is a number of allocations. Of each source, the lowest number of bytes in a window counts, so what a request
//! allocates and frees again does not. At most 64 windows are kept: then two become one, and each further window is
//! twice as long.
//!
//! A source grows if its lowest bytes rise in many windows, up to the end. A warm-up that stops, a cache that is full
//! and whatever is freed in between does not grow. Wall time decides nothing here.
//!
//! A program that trains can serve requests afterwards, without further steps. So sampling begins anew some time after
//! each backward pass and each step of an optimizer: later than they have ever been apart, except for long evaluations.
//! An evaluation allocates there, too. Its results are no leak: they are freed, or joined to one tensor.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use memtrace_trace::ids::{ContextId, StackId, ThreadId};

use super::loops::{LoopCounter, LoopKey, LoopTable};
use super::open_ranges::{OpenRangeSets, RangeRow, RangeSetId};
use crate::diagnostics::growing::GrowthKind;
use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use memtrace_trace::event::Event;

/// The maximum number of windows, and the number of allocations in the first ones.
const MAX_WINDOWS: usize = 64;
const FIRST_WINDOW: u32 = 8;
/// The minimum number of windows.
const MIN_WINDOWS: usize = 16;
/// The number of windows in which a source must have grown.
const MIN_RISES: usize = 8;
/// The number of blocks by which a list must have grown.
const MIN_BLOCKS: u64 = 8;
/// The growth must reach into the last 12.5 % (1/8) of the windows since it began.
const LAST_PART: usize = 8;
/// Growth tapers off if less than 25 % (1/4) of it lies in the second half of its windows.
const TAPERED: u64 = 4;
/// Training may have ended after twice as many allocations without a backward pass or an optimizer as ever before,
/// within these bounds.
const TRAINING_ENDS: (u32, u32) = (64, 4096);
/// Results are joined by an allocation of at least this share of them.
const JOINED: (u64, u64) = (3, 4);
/// The maximum number of late allocations, each larger than all later ones.
const MAX_LATE: usize = 64;
/// A loop has at least this many iterations, and a range is entered as often.
const MIN_TURNS: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Source {
    bytes: u64,
    /// The lowest number of bytes and of blocks in this window.
    low: u64,
    low_blocks: u32,
    blocks: u32,
    last_seq: u64,
    context: ContextId,
    ranges: RangeSetId,
    /// No allocator of PyTorch makes its blocks.
    is_outside_pytorch: bool,
}

/// The smallest holdings of a source in one window.
#[derive(Clone, Copy, Debug)]
struct Low {
    stack: u32,
    bytes: u64,
    blocks: u32,
}

#[derive(Clone, Debug, Default)]
struct Window {
    ticks: u64,
    peak: u64,
    has_frees: bool,
    low: Vec<Low>,
    /// Up to the end of the window: the iterations of loops, and how often ranges were entered.
    iterations: HashMap<LoopKey, u64>,
    ranges: Vec<u64>,
}

/// The turns by which growth is described.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Turns {
    /// The ranges of this name.
    Ranges(Box<str>, u64),
    /// The iterations of loops around the allocation, from the outermost to the innermost: the stack at the function
    /// with the loop, and the iterations.
    Iterations(Vec<(StackId, u64)>),
}

/// One source that grows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct WindowGrowth {
    /// The stack.
    pub(super) stack: StackId,
    /// The context of the latest block.
    pub(super) context: ContextId,
    /// How it grows.
    pub(super) kind: GrowthKind,
    /// The growth in bytes.
    pub(super) bytes: u64,
    /// The growth in blocks; the number of blocks if only their sizes grow.
    pub(super) blocks: u64,
    /// The number of windows with an increase, out of [`Self::windows`].
    pub(super) rises: usize,
    /// The number of windows since the growth began.
    pub(super) windows: usize,
    /// The duration of the growth in clock ticks.
    pub(super) ticks: u64,
    /// `seq` of the latest allocation.
    pub(super) last_seq: u64,
    /// The turns of the program meanwhile.
    pub(super) turns: Turns,
}

/// Samples the sources of one device while the program has no step.
#[derive(Clone, Debug, Default)]
pub(super) struct WindowSampler {
    /// By stack. Without any, nothing is sampled.
    sources: Vec<Source>,
    windows: Vec<Window>,
    every: u32,
    in_window: u32,
    peak: u64,
    has_frees: bool,
    loops: LoopCounter,
    ranges: OpenRangeSets,
    is_on: bool,
    is_inference: bool,
    /// In a program that trains.
    after_training: Option<AfterTraining>,
}

/// The state since the latest part of the training.
#[derive(Clone, Debug)]
struct AfterTraining {
    /// The number of backward passes and of steps of optimizers so far.
    trained: u64,
    /// The number of allocations since then.
    allocations: u32,
    /// The number of them at which sampling begins.
    begins: u32,
    /// `seq` of the allocation at which sampling began.
    since: u64,
    /// The bytes and `seq` of allocations, each larger than all later ones.
    late: Vec<(u64, u64)>,
    /// The blocks freed since the latest allocation: stacks and bytes.
    freed: Vec<(StackId, u64)>,
}

impl WindowSampler {
    /// Makes a sampler for the stacks and the names of ranges of a recording. `is_inference` means that the program
    /// calls a model and never trains.
    pub(super) fn new(
        loops: &Arc<LoopTable>,
        rows: &Arc<BTreeMap<u64, RangeRow>>,
        is_inference: bool,
    ) -> WindowSampler {
        WindowSampler {
            is_inference,
            every: FIRST_WINDOW,
            loops: LoopCounter::new(loops),
            ranges: OpenRangeSets::new(rows),
            is_on: true,
            ..WindowSampler::default()
        }
    }

    /// Observes an allocation. `allocated` has the device's allocated bytes after it.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, thread: ThreadId, mark: Mark, allocated: u64) {
        if !self.is_on {
            return;
        }
        if block.position.step.is_some() && !self.trained_before(block) {
            return;
        }
        self.take(block, thread, mark, allocated);
    }

    /// Observes an allocation of a program with steps. Returns whether its training may be over.
    fn trained_before(&mut self, block: &BlockAllocation) -> bool {
        if self.is_inference {
            // Steps show growth better.
            *self = WindowSampler::default();
            return false;
        }
        let trained = u64::from(block.position.backward_passes) + u64::from(block.position.optimizer_steps);
        let after = self.after_training.get_or_insert_with(|| {
            (self.sources, self.windows) = (Vec::new(), Vec::new());
            AfterTraining::new(trained)
        });
        if after.trained != trained {
            after.trained_again(trained);
        }
        after.allocations = after.allocations.saturating_add(1);
        if after.allocations < after.begins {
            return false;
        }
        if after.allocations == after.begins {
            after.since = block.seq;
            self.loops.restart();
            self.sources.clear();
            self.windows.clear();
            (self.every, self.in_window, self.peak, self.has_frees) = (FIRST_WINDOW, 0, 0, false);
        }
        after.freed.clear();
        while after.late.last().is_some_and(|(bytes, _)| *bytes <= block.memory.size) {
            after.late.pop();
        }
        if after.late.len() < MAX_LATE {
            after.late.push((block.memory.size, block.seq));
        }
        true
    }

    fn take(&mut self, block: &BlockAllocation, thread: ThreadId, mark: Mark, allocated: u64) {
        self.peak = self.peak.max(allocated);
        self.loops.observe(thread, block.site.stack);
        let index = block.site.stack.index();
        // Models are built and loaded once.
        if !block.site.stack.is_none() && !mark.is(Mark::MODEL | Mark::LOADED) {
            if index >= self.sources.len() {
                self.sources.resize(index + 1, Source::default());
            }
            let source = &mut self.sources[index];
            source.bytes += block.memory.size;
            source.blocks += 1;
            (source.last_seq, source.context) = (block.seq, block.site.context);
            source.ranges = self.ranges.of(thread);
        }
        self.in_window += 1;
        if self.in_window >= self.every {
            self.close(block.ticks);
        }
    }

    /// Notes that no allocator of PyTorch made an allocation, already observed.
    #[inline]
    pub(super) fn allocated_outside_pytorch(&mut self, block: &BlockAllocation) {
        if let Some(source) = self.sources.get_mut(block.site.stack.index()) {
            source.is_outside_pytorch = true;
        }
    }

    /// Observes a free.
    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation, mark: Mark) {
        if !self.is_on || mark.is(Mark::MODEL | Mark::LOADED) {
            return;
        }
        if let Some(after) = &mut self.after_training {
            if !after.is_over() || block.seq < after.since {
                return;
            }
            after.freed.push((block.site.stack, block.memory.size));
        }
        let Some(source) = self.sources.get_mut(block.site.stack.index()).filter(|_| !block.site.stack.is_none())
        else {
            return;
        };
        source.bytes = source.bytes.saturating_sub(block.memory.size);
        source.blocks = source.blocks.saturating_sub(1);
        source.low = source.low.min(source.bytes);
        source.low_blocks = source.low_blocks.min(source.blocks);
        self.has_frees = true;
    }

    /// Observes the start or the end of a range.
    pub(super) fn observe_range(&mut self, e: &Event) {
        if self.is_on {
            self.ranges.observe(e);
        }
    }

    fn close(&mut self, ticks: u64) {
        let mut low = Vec::new();
        for (stack, source) in self.sources.iter_mut().enumerate() {
            if source.low > 0 {
                let Source { low: bytes, low_blocks: blocks, .. } = *source;
                low.push(Low { stack: stack as u32, bytes, blocks });
            }
            (source.low, source.low_blocks) = (source.bytes, source.blocks);
        }
        self.windows.push(Window {
            ticks,
            peak: std::mem::take(&mut self.peak),
            has_frees: std::mem::take(&mut self.has_frees),
            low,
            iterations: self.loops.counts().clone(),
            ranges: self.ranges.starts().to_vec(),
        });
        self.in_window = 0;
        if self.windows.len() >= MAX_WINDOWS {
            self.every = self.every.saturating_mul(2);
            let mut windows = std::mem::take(&mut self.windows).into_iter();
            while let (Some(first), Some(second)) = (windows.next(), windows.next()) {
                self.windows.push(joined(&first, second));
            }
        }
    }

    /// The sources that grow, by bytes in descending order. `is_native` is true if a stack has no Python frame.
    pub(super) fn grown(&self, is_native: &dyn Fn(StackId) -> bool) -> Vec<WindowGrowth> {
        // After an evaluation, what trained may have gone on.
        let trains = self.after_training.as_ref().is_some_and(|after| !after.is_over());
        if trains || self.windows.len() < MIN_WINDOWS {
            return Vec::new();
        }
        let mut series: BTreeMap<u32, Vec<(usize, Low)>> = BTreeMap::new();
        for (at, window) in self.windows.iter().enumerate() {
            for low in &window.low {
                series.entry(low.stack).or_default().push((at, *low));
            }
        }
        let mut grown: Vec<WindowGrowth> =
            series.iter().filter_map(|(stack, series)| self.growth(StackId(*stack), series, is_native)).collect();
        grown.sort_by_key(|g| (std::cmp::Reverse(g.bytes), g.stack));
        grown
    }

    /// Whether the windows begin after training steps.
    pub(super) fn is_after_training(&self) -> bool {
        self.after_training.is_some()
    }

    /// The most bytes that were allocated in the last quarter of the windows.
    pub(super) fn last_peak(&self) -> u64 {
        let from = self.windows.len() - self.windows.len() / 4;
        self.windows.iter().skip(from).map(|window| window.peak).max().unwrap_or(0).max(self.peak)
    }

    fn growth(
        &self,
        stack: StackId,
        series: &[(usize, Low)],
        is_native: &dyn Fn(StackId) -> bool,
    ) -> Option<WindowGrowth> {
        let count = self.windows.len();
        let (mut bytes, mut blocks) = (vec![0u64; count], vec![0u64; count]);
        for &(at, low) in series {
            (bytes[at], blocks[at]) = (low.bytes, low.blocks.into());
        }
        // The end of the growth: the highest window; of equal ones, the last. The start: the lowest window before.
        let top = bytes.iter().enumerate().max_by_key(|(at, b)| (**b, *at))?.0;
        let lowest = bytes[..=top].iter().copied().min()?;
        let from = bytes[..=top].iter().rposition(|b| *b == lowest)?;
        let rises: Vec<usize> = (from + 1..=top).filter(|at| bytes[*at] > bytes[*at - 1]).collect();
        let (first, last) = (*rises.first()?, *rises.last()?);
        let windows = last + 1 - first;
        let growth = bytes[last] - bytes[first - 1];
        let more = blocks[last].saturating_sub(blocks[first - 1]);
        let kind = if more >= MIN_BLOCKS { GrowthKind::Blocks } else { GrowthKind::Sizes };
        // Blocks that are replaced by larger ones must be larger nearly each time.
        if rises.len() < MIN_RISES || kind == GrowthKind::Sizes && rises.len() * 4 < windows * 3 {
            return None;
        }
        // A source that frees blocks now and then does not leak.
        let freed_between: u64 = (1..count).map(|at| bytes[at - 1].saturating_sub(bytes[at])).sum();
        if freed_between * 4 > growth {
            return None;
        }
        let middle = first - 1 + windows.div_ceil(2);
        let second_half = bytes[last].saturating_sub(bytes[middle.min(last - 1)]);
        if second_half.saturating_mul(TAPERED) < growth {
            return None;
        }
        if last + 1 + ((count - first) / LAST_PART).max(1) < count {
            return None;
        }
        // A program that only fills a list loads its data. One with a loop allocates and frees beside it. An iteration
        // can take several windows.
        let parts = self.windows[first..=last].chunks(windows.div_ceil(MIN_WINDOWS));
        let with_frees = parts.clone().filter(|part| part.iter().any(|window| window.has_frees)).count();
        if with_frees * 4 < parts.len() * 3 {
            return None;
        }
        let source = self.sources.get(stack.index())?;
        // An object that has its end frees what Python has. In C and C++, the program frees what it has not lost.
        if source.is_outside_pytorch && is_native(stack) && source.bytes * 2 < growth {
            return None;
        }
        if self.after_training.as_ref().is_some_and(|after| after.are_results(stack, source, growth)) {
            return None;
        }
        Some(WindowGrowth {
            stack,
            context: source.context,
            kind,
            bytes: growth,
            blocks: if kind == GrowthKind::Blocks { more } else { blocks[last] },
            rises: rises.len(),
            windows,
            ticks: self.windows[last].ticks.saturating_sub(self.windows[first - 1].ticks),
            last_seq: source.last_seq,
            turns: self.turns(stack, source.ranges, (first - 1, last)),
        })
    }

    /// The turns of the program from the end of one window to the end of another.
    fn turns(&self, stack: StackId, ranges: RangeSetId, (from, to): (usize, usize)) -> Turns {
        let of = |window: usize, row: usize| self.windows[window].ranges.get(row).copied().unwrap_or(0);
        // The outermost range is the request.
        for row in self.ranges.rows_of(ranges) {
            let entered = of(to, *row).saturating_sub(of(from, *row));
            if entered >= MIN_TURNS {
                return Turns::Ranges(self.ranges.name(*row).into(), entered);
            }
        }
        let iterations = |window: usize, key: &LoopKey| self.windows[window].iterations.get(key).copied().unwrap_or(0);
        let around = self.loops.around(stack).into_iter();
        let counted = around.map(|(at, key)| (at, iterations(to, &key).saturating_sub(iterations(from, &key))));
        Turns::Iterations(counted.filter(|(_, count)| *count >= MIN_TURNS).collect())
    }
}

impl AfterTraining {
    fn new(trained: u64) -> AfterTraining {
        let begins = TRAINING_ENDS.0;
        AfterTraining { trained, allocations: 0, begins, since: 0, late: Vec::new(), freed: Vec::new() }
    }

    /// Another backward pass or optimizer runs.
    fn trained_again(&mut self, trained: u64) {
        self.trained = trained;
        self.begins = self.begins.max(self.allocations.saturating_mul(2)).min(TRAINING_ENDS.1);
        self.allocations = 0;
        self.late.clear();
        self.freed.clear();
    }

    /// Whether the training may have ended.
    fn is_over(&self) -> bool {
        self.allocations >= self.begins
    }

    /// Whether what grew has been freed before the program's last allocation, or joined to one tensor.
    fn are_results(&self, stack: StackId, source: &Source, growth: u64) -> bool {
        let at_end: u64 = self.freed.iter().filter(|(one, _)| *one == stack).map(|(_, bytes)| bytes).sum();
        let is_joined = |(bytes, seq): &(u64, u64)| *seq > source.last_seq && bytes * JOINED.1 >= growth * JOINED.0;
        (source.bytes + at_end) * 2 < growth || self.late.iter().any(is_joined)
    }
}

/// Two windows as one.
fn joined(first: &Window, second: Window) -> Window {
    let mut low = Vec::new();
    for one in second.low {
        if let Ok(at) = first.low.binary_search_by_key(&one.stack, |low| low.stack) {
            let other = first.low[at];
            low.push(Low { bytes: one.bytes.min(other.bytes), blocks: one.blocks.min(other.blocks), ..one });
        }
    }
    let (peak, has_frees) = (first.peak.max(second.peak), first.has_frees || second.has_frees);
    Window { peak, has_frees, low, ..second }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::phase::{Phase, ProgramPosition};

    const MIB: u64 = 1 << 20;

    fn block(seq: u64, stack: u32, size: u64) -> BlockAllocation {
        let position = ProgramPosition {
            phase: Phase::Other,
            step: None,
            phase_changes: 0,
            backward_passes: 0,
            optimizer_steps: 0,
        };
        BlockAllocation::of_forward(seq, size, StackId(stack), position)
    }

    /// The sources that grow in a program of so many requests. Each frees three blocks that it allocates, and then
    /// keeps
    /// `kept(request)` blocks of a mebibyte in all.
    fn grown(requests: u32, kept: impl Fn(u32) -> u32) -> Vec<WindowGrowth> {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default(), false);
        let (mut seq, mut held) = (0, Vec::new());
        let mut allocated = |sampler: &mut WindowSampler, stack, size| {
            seq += 1;
            let block = block(seq, stack, size);
            sampler.allocated(&block, ThreadId(1), Mark::default(), 0);
            block
        };
        for request in 0..requests {
            for stack in 1..4 {
                let block = allocated(&mut sampler, stack, 4 * MIB);
                sampler.freed(&block, Mark::default());
            }
            while held.len() < kept(request) as usize {
                held.push(allocated(&mut sampler, 9, MIB));
            }
            for block in held.drain(kept(request) as usize..) {
                sampler.freed(&block, Mark::default());
            }
        }
        sampler.grown(&|_| false)
    }

    #[test]
    fn a_list_that_grows_to_the_end_is_found() {
        for requests in [60, 200, 5000] {
            let [leak] = &grown(requests, |request| request + 1)[..] else { panic!("{requests} requests") };
            assert_eq!((leak.stack, leak.kind), (StackId(9), GrowthKind::Blocks));
            assert_eq!(leak.bytes, leak.blocks * MIB);
            assert!(leak.blocks * 10 > u64::from(requests) * 8, "{leak:?}");
        }
        let [leak] = &grown(1000, |request| request / 10)[..] else { panic!("each tenth request") };
        assert!(leak.bytes > 85 * MIB, "{leak:?}");
    }

    /// The growth of a program in C whose iterations allocate `each` blocks and then free all but one. `frees` means
    /// that the program frees the others at its end.
    fn grown_in_c(each: u32, frees: bool) -> Vec<WindowGrowth> {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default(), false);
        let (mut seq, mut kept) = (0, Vec::new());
        for _ in 0..40 {
            let mut blocks = Vec::new();
            for stack in 1..=each {
                seq += 1;
                let block = block(seq, stack, MIB);
                sampler.allocated(&block, ThreadId(1), Mark::default(), 0);
                sampler.allocated_outside_pytorch(&block);
                blocks.push(block);
            }
            kept.extend(blocks.pop());
            blocks.iter().for_each(|block| sampler.freed(block, Mark::default()));
        }
        kept.iter().filter(|_| frees).for_each(|block| sampler.freed(block, Mark::default()));
        sampler.grown(&|_| true)
    }

    #[test]
    fn an_iteration_can_take_several_windows() {
        for each in [4, 12] {
            let [leak] = &grown_in_c(each, false)[..] else { panic!("{each} blocks in an iteration") };
            assert!(leak.stack == StackId(each) && leak.blocks >= 35, "{leak:?}");
        }
    }

    #[test]
    fn what_a_program_in_c_frees_at_its_end_is_no_leak() {
        assert_eq!(grown_in_c(12, true), []);
    }

    #[test]
    fn what_stops_growing_or_is_freed_is_no_leak() {
        let requests = 400;
        let cases: [(&str, &dyn Fn(u32) -> u32); 8] = [
            ("nothing is kept", &|_| 0),
            ("a warm-up", &|request| request.min(100)),
            ("a cache that fills in the second half", &|request| request.saturating_sub(200).min(130)),
            ("a cache that is emptied", &|request| request % 50),
            ("an evaluation", &|request| if request % 10 == 9 { 30 } else { 2 }),
            ("an evaluation that grows and then frees all", &|request| request % 100),
            ("ever slower growth", &|request| f64::from(request + 1).log2() as u32 * 8),
            ("three late blocks", &|request| u32::from(request > 390) * 3),
        ];
        for (what, kept) in cases {
            assert_eq!(grown(requests, kept), [], "{what}");
        }
        assert_eq!(grown(12, |request| request + 1), [], "too few requests");
    }

    /// The growth after four training steps, each with 20 allocations, if so many requests keep a block each. `joins`
    /// means that a block as large as all of them is allocated then. `frees` means that they are freed, and one more
    /// block is allocated.
    fn grown_after_training(requests: u64, joins: bool, frees: bool) -> Vec<WindowGrowth> {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default(), false);
        let (mut seq, mut held, mut trained) = (0, Vec::new(), 0);
        let mut allocated = |sampler: &mut WindowSampler, stack, size, trained| {
            seq += 1;
            let mut block = block(seq, stack, size);
            (block.position.step, block.position.optimizer_steps) = (Some(trained), trained);
            sampler.allocated(&block, ThreadId(1), Mark::default(), 0);
            block
        };
        for _ in 0..4 {
            for _ in 0..20 {
                let kept = allocated(&mut sampler, 9, MIB, trained);
                sampler.freed(&kept, Mark::default());
            }
            trained += 1;
        }
        for _ in 0..requests {
            let block = allocated(&mut sampler, 1, 4 * MIB, trained);
            sampler.freed(&block, Mark::default());
            held.push(allocated(&mut sampler, 9, MIB, trained));
        }
        if joins {
            allocated(&mut sampler, 5, requests * MIB, trained);
        }
        if frees {
            held.iter().for_each(|block| sampler.freed(block, Mark::default()));
            allocated(&mut sampler, 5, MIB, trained);
        }
        sampler.grown(&|_| false)
    }

    #[test]
    fn requests_that_keep_blocks_after_training_are_found() {
        let [leak] = &grown_after_training(400, false, false)[..] else { panic!("one source") };
        assert_eq!(leak.stack, StackId(9));
        assert!(leak.blocks > 300, "{leak:?}");
    }

    #[test]
    fn what_an_evaluation_keeps_is_no_leak_if_the_training_goes_on() {
        assert_eq!(grown_after_training(400, false, false).len(), 1);
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default(), false);
        let mut seq = 0;
        let mut allocate = |count, trained| {
            for _ in 0..count {
                seq += 1;
                let mut block = block(seq, 9, MIB);
                (block.position.step, block.position.optimizer_steps) = (Some(trained), trained);
                sampler.allocated(&block, ThreadId(1), Mark::default(), 0);
                if seq % 2 == 0 {
                    sampler.freed(&block, Mark::default());
                }
            }
            sampler.after_training.as_ref().is_some_and(AfterTraining::is_over)
        };
        assert!(allocate(300, 0), "the first step is longer than any before");
        assert!(!allocate(300, 1) && !allocate(300, 2), "the next ones are as long as it");
        assert!(allocate(3000, 3), "an evaluation");
        assert!(!allocate(300, 4));
        assert!(sampler.windows.len() >= MIN_WINDOWS);
        assert_eq!(sampler.grown(&|_| false), []);
    }

    #[test]
    fn the_results_of_an_evaluation_are_no_leak() {
        assert_eq!(grown_after_training(400, true, false), [], "joined to one tensor");
        assert_eq!(grown_after_training(400, false, true), [], "freed");
    }

    #[test]
    fn data_that_is_loaded_is_no_leak() {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default(), false);
        for seq in 1..1000 {
            sampler.allocated(&block(seq, 1, MIB), ThreadId(1), Mark::default(), 0);
        }
        assert_eq!(sampler.grown(&|_| false), []);
    }
}
