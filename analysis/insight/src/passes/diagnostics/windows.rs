//! What grows in a program without steps, from window to window of its allocations.
//!
//! A server of plain functions, a search or a simulation has neither training steps nor calls of an `nn.Module`. A window
//! is a number of allocations. Of each source, the lowest number of bytes in a window counts, so what a request allocates
//! and frees again does not. At most 64 windows are kept: then two become one, and each further window is twice as long.
//!
//! A source grows if its lowest bytes rise in many windows, up to the end. A warm-up that stops, a cache that is full and
//! whatever is freed in between does not grow. Wall time decides nothing here.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use memtrace_trace::ids::{ContextId, StackId, ThreadId};

use super::growing::GrowthKind;
use super::loops::{LoopCounter, LoopKey, LoopTable};
use super::mark::Mark;
use super::open_ranges::{OpenRangeSets, RangeRow, RangeSetId};
use crate::passes::category::BlockAllocation;
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
/// The growth must reach into the last one in this many parts of the windows since it began.
const LAST_PART: usize = 8;
/// Growth tapers off if less than one in this many parts of it lies in the second half of its windows.
const TAPERED: u64 = 4;
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
}

/// What a source holds at least, in one window.
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
pub enum Turns {
    /// The ranges of this name.
    Ranges(Box<str>, u64),
    /// The iterations of loops around the allocation, from the outermost to the innermost: the stack at the function with
    /// the loop, and the iterations.
    Iterations(Vec<(StackId, u64)>),
}

/// One source that grows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WindowGrowth {
    /// The stack.
    pub stack: StackId,
    /// The context of the latest block.
    pub context: ContextId,
    /// How it grows.
    pub kind: GrowthKind,
    /// The growth in bytes.
    pub bytes: u64,
    /// The growth in blocks; the number of blocks if only their sizes grow.
    pub blocks: u64,
    /// The number of windows with an increase, out of [`Self::windows`].
    pub rises: usize,
    /// The number of windows since the growth began.
    pub windows: usize,
    /// What the growth took in clock ticks.
    pub ticks: u64,
    /// `seq` of the latest allocation.
    pub last_seq: u64,
    /// The turns of the program meanwhile.
    pub turns: Turns,
}

/// Samples the sources of one device while the program has no step.
#[derive(Clone, Debug, Default)]
pub struct WindowSampler {
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
}

impl WindowSampler {
    /// Takes the stacks and the names of ranges of a recording.
    pub(in crate::passes) fn new(loops: &Arc<LoopTable>, rows: &Arc<BTreeMap<u64, RangeRow>>) -> WindowSampler {
        WindowSampler {
            every: FIRST_WINDOW,
            loops: LoopCounter::new(loops),
            ranges: OpenRangeSets::new(rows),
            is_on: true,
            ..WindowSampler::default()
        }
    }

    /// Takes an allocation. `allocated`: the device's allocated bytes after it.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, thread: ThreadId, mark: Mark, allocated: u64) {
        if !self.is_on {
            return;
        }
        if block.position.step.is_some() {
            // Steps show growth better.
            *self = WindowSampler::default();
            return;
        }
        self.take(block, thread, mark, allocated);
    }

    fn take(&mut self, block: &BlockAllocation, thread: ThreadId, mark: Mark, allocated: u64) {
        self.peak = self.peak.max(allocated);
        self.loops.observe(thread, block.stack);
        let index = block.stack.index();
        // Models are built and loaded once.
        if !block.stack.is_none() && !mark.is(Mark::MODEL | Mark::LOADED) {
            if index >= self.sources.len() {
                self.sources.resize(index + 1, Source::default());
            }
            let source = &mut self.sources[index];
            source.bytes += block.size;
            source.blocks += 1;
            (source.last_seq, source.context) = (block.seq, block.context);
            source.ranges = self.ranges.of(thread);
        }
        self.in_window += 1;
        if self.in_window >= self.every {
            self.close(block.ticks);
        }
    }

    /// Takes a free.
    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation, mark: Mark) {
        if !self.is_on || mark.is(Mark::MODEL | Mark::LOADED) {
            return;
        }
        let Some(source) = self.sources.get_mut(block.stack.index()).filter(|_| !block.stack.is_none()) else { return };
        source.bytes = source.bytes.saturating_sub(block.size);
        source.blocks = source.blocks.saturating_sub(1);
        source.low = source.low.min(source.bytes);
        source.low_blocks = source.low_blocks.min(source.blocks);
        self.has_frees = true;
    }

    /// Takes the start or the end of a range.
    pub(in crate::passes) fn observe_range(&mut self, e: &Event) {
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

    /// The sources that grow, by bytes in descending order.
    pub fn grown(&self) -> Vec<WindowGrowth> {
        if self.windows.len() < MIN_WINDOWS {
            return Vec::new();
        }
        let mut series: BTreeMap<u32, Vec<(usize, Low)>> = BTreeMap::new();
        for (at, window) in self.windows.iter().enumerate() {
            for low in &window.low {
                series.entry(low.stack).or_default().push((at, *low));
            }
        }
        let mut grown: Vec<WindowGrowth> =
            series.iter().filter_map(|(stack, series)| self.growth(StackId(*stack), series)).collect();
        grown.sort_by_key(|g| (std::cmp::Reverse(g.bytes), g.stack));
        grown
    }

    /// The most bytes that were allocated in the last quarter of the windows.
    pub fn last_peak(&self) -> u64 {
        let from = self.windows.len() - self.windows.len() / 4;
        self.windows.iter().skip(from).map(|window| window.peak).max().unwrap_or(0).max(self.peak)
    }

    fn growth(&self, stack: StackId, series: &[(usize, Low)]) -> Option<WindowGrowth> {
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
        // What is replaced by something larger must be larger nearly each time.
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
        // A program that only fills a list loads its data. One with a loop allocates and frees beside it.
        let with_frees = self.windows[first..=last].iter().filter(|window| window.has_frees).count();
        if with_frees * 4 < windows * 3 {
            return None;
        }
        let source = self.sources.get(stack.index())?;
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

    /// The sources that grow in a program of so many requests. Each frees three blocks that it allocates, and then keeps
    /// `kept(request)` blocks of a mebibyte in all.
    fn grown(requests: u32, kept: impl Fn(u32) -> u32) -> Vec<WindowGrowth> {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default());
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
        sampler.grown()
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

    #[test]
    fn data_that_is_loaded_is_no_leak() {
        let mut sampler = WindowSampler::new(&Arc::default(), &Arc::default());
        for seq in 1..1000 {
            sampler.allocated(&block(seq, 1, MIB), ThreadId(1), Mark::default(), 0);
        }
        assert_eq!(sampler.grown(), []);
    }
}
