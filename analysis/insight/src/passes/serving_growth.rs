//! The growth of the memory on a device while a server answers requests.
//!
//! Requests come and go side by side, so no single point in time shows what stays. The lowest bytes that a stack held
//! in each of successive periods do: a request that still runs does not count, and a cache that has reached its bound
//! does not grow any more. A period ends after a number of allocations of the server, not after a time.

use std::collections::HashMap;

use memtrace_trace::file::CacheUse;
use memtrace_trace::ids::{ContextId, StackId};

use super::category::BlockAllocation;

/// The most periods. After that many, each takes in its successor, and they become twice as long.
const MAX_PERIODS: usize = 64;
/// The allocations of the first periods.
const FIRST_ALLOCATIONS: u32 = 64;
/// A growth is known from this many periods on.
const MIN_PERIODS: usize = 8;
/// The smallest growth, in bytes.
const MIN_BYTES: u64 = 512 << 10;

/// The growth of one stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServedGrowth {
    pub(crate) site: (StackId, ContextId),
    /// The bytes that were added, from the first to the last period.
    pub(crate) bytes: u64,
    /// The blocks that were added.
    pub(crate) blocks: u64,
    /// The requests that ended in this time.
    pub(crate) requests: u64,
    /// The growth per request, in bytes, in the second half of the periods.
    pub(crate) slope: u64,
    /// The number of periods in which it grew, and of all since it began.
    pub(crate) increases: (u32, u32),
    /// `seq` of the latest allocation.
    pub(crate) last_seq: u64,
}

/// The requests that ended until a time, in clock ticks.
#[derive(Clone, Debug, Default)]
struct EndedRequests(Vec<(u64, u64)>);

impl EndedRequests {
    fn new(uses: &[CacheUse]) -> EndedRequests {
        let mut sum = 0;
        let ended = uses.iter().filter(|one| one.ended > 0).map(|one| {
            sum += one.ended;
            (one.ticks, sum)
        });
        EndedRequests(ended.collect())
    }

    fn until(&self, ticks: u64) -> u64 {
        let after = self.0.partition_point(|(at, _)| *at <= ticks);
        after.checked_sub(1).and_then(|last| self.0.get(last)).map_or(0, |(_, sum)| *sum)
    }
}

/// The blocks that a stack holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Held {
    bytes: u64,
    blocks: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Source {
    now: Held,
    /// The lowest in the period.
    floor: Held,
    context: ContextId,
    last_seq: u64,
}

#[derive(Clone, Debug, Default)]
struct Period {
    /// The time of its begin, in clock ticks.
    ticks: u64,
    floors: HashMap<StackId, Held>,
}

/// The growth of all stacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServingGrowth {
    ended: EndedRequests,
    sources: Vec<Source>,
    periods: Vec<Period>,
    /// The begin of the current period, in clock ticks.
    begin: u64,
    allocations: u32,
    /// The allocations of a period; 0 before the first.
    per_period: u32,
}

impl ServingGrowth {
    /// `uses` are the readings of the engine's counters.
    pub(super) fn new(uses: &[CacheUse]) -> ServingGrowth {
        ServingGrowth { ended: EndedRequests::new(uses), per_period: FIRST_ALLOCATIONS, ..ServingGrowth::default() }
    }

    /// Whether the recording has the number of requests.
    fn counts_requests(&self) -> bool {
        !self.ended.0.is_empty()
    }

    /// The server allocated a block while it serves.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation) {
        if !self.counts_requests() {
            return;
        }
        if self.allocations == self.per_period {
            self.end_period();
        }
        if self.allocations == 0 {
            self.begin = block.ticks;
        }
        self.allocations += 1;
        let index = block.site.stack.index();
        if index >= self.sources.len() {
            self.sources.resize(index + 1, Source::default());
        }
        let source = &mut self.sources[index];
        source.now.bytes += block.memory.size;
        source.now.blocks += 1;
        (source.context, source.last_seq) = (block.site.context, block.seq);
    }

    /// Such a block was freed.
    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation) {
        let Some(source) = self.sources.get_mut(block.site.stack.index()) else { return };
        source.now.bytes = source.now.bytes.saturating_sub(block.memory.size);
        source.now.blocks = source.now.blocks.saturating_sub(1);
        if source.now.bytes < source.floor.bytes {
            source.floor = source.now;
        }
    }

    fn end_period(&mut self) {
        let held = self.sources.iter().enumerate().filter(|(_, source)| source.floor.bytes > 0);
        let floors = held.map(|(index, source)| (StackId(index as u32), source.floor)).collect();
        self.periods.push(Period { ticks: self.begin, floors });
        self.sources.iter_mut().for_each(|source| source.floor = source.now);
        self.allocations = 0;
        if self.periods.len() == MAX_PERIODS {
            self.per_period = self.per_period.saturating_mul(2);
            let mut halves = std::mem::take(&mut self.periods).into_iter();
            while let Some((mut first, second)) = halves.next().zip(halves.next()) {
                first.floors.retain(|stack, floor| {
                    let other = second.floors.get(stack).copied().unwrap_or_default();
                    *floor = if other.bytes < floor.bytes { other } else { *floor };
                    floor.bytes > 0
                });
                self.periods.push(first);
            }
        }
    }

    /// The stacks that grow without a bound to be seen, the largest first, and the clock ticks of a request. `None` if
    /// the recording is too short, or without the number of requests.
    pub(crate) fn grown(&self) -> Option<(Vec<ServedGrowth>, u64)> {
        let (last, middle) = (self.periods.last()?, self.periods.get(self.periods.len() / 2)?);
        let requests = |from: &Period| self.ended.until(last.ticks) - self.ended.until(from.ticks);
        let of_half = requests(middle);
        if self.periods.len() < MIN_PERIODS || of_half == 0 {
            return None;
        }
        let growth_of = |stack: StackId| -> Option<ServedGrowth> {
            let held: Vec<Held> =
                self.periods.iter().map(|period| period.floors.get(&stack).copied().unwrap_or_default()).collect();
            let bytes = |at: usize| held[at].bytes;
            let end = held.len() - 1;
            // The last period before it grows.
            let from = (0..end).find(|at| bytes(at + 1) > bytes(*at))?;
            let rises = |from: usize| (from..end).filter(|at| bytes(at + 1) > bytes(*at)).count();
            let grew = |from: usize| bytes(end).saturating_sub(bytes(from));
            let (half, quarter) = (held.len() / 2, held.len() * 3 / 4);
            // Growth that levels off adds little in the second half, and a cache that is full adds nothing at the end.
            let is_steady = grew(half) * 4 >= grew(from) && grew(quarter) * 4 >= grew(half);
            let is_often = rises(half) * 2 >= end - half;
            let never_shrinks = (from..end).all(|at| bytes(at + 1) >= bytes(at));
            if grew(from) < MIN_BYTES || !is_steady || !is_often || !never_shrinks {
                return None;
            }
            let source = self.sources.get(stack.index())?;
            Some(ServedGrowth {
                site: (stack, source.context),
                bytes: grew(from),
                blocks: held[end].blocks.saturating_sub(held[from].blocks),
                requests: requests(&self.periods[from]),
                slope: grew(half) / of_half,
                increases: (rises(from) as u32, (end - from) as u32),
                last_seq: source.last_seq,
            })
        };
        let mut grown: Vec<ServedGrowth> = last.floors.keys().filter_map(|stack| growth_of(*stack)).collect();
        grown.sort_by_key(|growth| (std::cmp::Reverse(growth.bytes), growth.site));
        Some((grown, last.ticks.saturating_sub(middle.ticks) / of_half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::phase::ProgramPosition;

    /// The growth in a server with four requests at a time, each of which computes 20 passes. `kept` are the bytes that
    /// stay after each request, by its number.
    fn grown(requests: u64, kept: impl Fn(u64) -> i64) -> Vec<ServedGrowth> {
        let ended = (1..=requests).map(|n| CacheUse {
            ticks: n * 20,
            used: 1,
            size: 100,
            requests: 4,
            readings: 1,
            sum: 1,
            full: 0,
            preempted: 0,
            ended: 1,
        });
        let mut growth = ServingGrowth::new(&ended.collect::<Vec<_>>());
        let block =
            |seq, stack, size| BlockAllocation::of_forward(seq, size, StackId(stack), ProgramPosition::default());
        for pass in 1..=requests * 20 {
            // Activations of a changing number of tokens.
            for stack in 0..4 {
                let activation = block(pass, stack, (1 + pass % 7) << 20);
                growth.allocated(&activation);
                growth.freed(&activation);
            }
            if pass % 20 == 0 {
                let bytes = kept(pass / 20);
                let block = block(pass, 9, bytes.unsigned_abs());
                if bytes > 0 { growth.allocated(&block) } else { growth.freed(&block) }
            }
        }
        growth.grown().unwrap().0
    }

    #[test]
    fn what_every_request_leaves_is_growth_and_what_is_bounded_is_none() {
        let [leak] = grown(400, |_| 64 << 10)[..] else { panic!() };
        // A period begins a little before or after the end of a request.
        let is_near = |bytes: u64, expected: u64| bytes.abs_diff(expected) * 50 < expected;
        assert!(leak.site.0 == StackId(9) && is_near(leak.slope, 64 << 10), "{leak:?}");
        assert!(leak.requests > 380 && is_near(leak.bytes, leak.requests * (64 << 10)), "{leak:?}");
        let of = |kept: fn(u64) -> i64| grown(400, kept).len();
        assert_eq!(of(|_| 0), 0);
        assert_eq!(of(|n| if n < 320 { 64 << 10 } else { 0 }), 0, "a cache that is full");
        assert_eq!(of(|n| (1 << 20) / n as i64), 0, "a growth that levels off");
        assert_eq!(of(|n| if n % 50 == 0 { -(49 * (64 << 10)) } else { 64 << 10 }), 0, "a buffer that is emptied");
        assert_eq!(of(|n| if n % 3 == 0 { 192 << 10 } else { 0 }), 1, "every third request");
    }
}
