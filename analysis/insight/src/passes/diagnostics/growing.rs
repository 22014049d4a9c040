//! What grows from step to step, by allocation site.
//!
//! At the start of each step the allocated bytes of every source are sampled. At most 64 samples are kept: then every
//! other sample is dropped, and only every other step is sampled. A source grows if its number of blocks increases in
//! several samples, up to the end. A source whose bytes level out does not: a warm-up, a bounded buffer, a full cache.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::mark::Mark;
use crate::passes::category::BlockAllocation;
use crate::passes::phase::Phase;

/// The maximum number of samples.
const MAX_SAMPLES: usize = 64;
/// The number of samples in which a source must have grown.
const MIN_INCREASES: usize = 4;
/// The number of blocks by which a source must have grown.
const MIN_BLOCKS: u64 = 4;
/// The growth must reach into the last one in this many parts of the samples since it began.
const LAST_PART: usize = 5;

/// The number of a source: a stack, or an autograd node if the highest bit is set.
type SourceKey = u32;
const NODE: SourceKey = 1 << 31;

#[derive(Clone, Copy, Debug, Default)]
struct Allocated {
    bytes: u64,
    last_seq: u64,
    blocks: u32,
    context: ContextId,
    bits: u8,
}

#[derive(Clone, Debug)]
struct Sample {
    step: u32,
    seq: u64,
    live: Vec<(SourceKey, u64, u32)>,
}

/// One source that grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrowingSource {
    /// The stack; `NONE` for what a node allocates without a stack.
    pub stack: StackId,
    /// The autograd node or other context.
    pub context: ContextId,
    /// The [`Mark`] bits of the latest block.
    pub bits: u8,
    /// The growth in bytes.
    pub bytes: u64,
    /// The growth in blocks.
    pub blocks: u64,
    /// The first step after which there was more.
    pub first_step: u32,
    /// The number of steps from there to the last sampled increase.
    pub steps: u32,
    /// The number of samples with an increase, out of [`Self::samples`].
    pub increases: u32,
    /// The number of samples since the growth began.
    pub samples: u32,
    /// `seq` of the latest allocation.
    pub last_seq: u64,
}

impl GrowingSource {
    /// The mean growth per step, in bytes.
    pub fn slope(&self) -> u64 {
        self.bytes / u64::from(self.steps.max(1))
    }
}

/// The allocated bytes of each source and their samples, for one device.
#[derive(Clone, Debug)]
pub struct GrowthSampler {
    stacks: Vec<Allocated>,
    nodes: Vec<Allocated>,
    samples: Vec<Sample>,
    step: Option<u32>,
    every: u32,
    seen: u32,
}

impl Default for GrowthSampler {
    fn default() -> GrowthSampler {
        GrowthSampler { stacks: Vec::new(), nodes: Vec::new(), samples: Vec::new(), step: None, every: 1, seen: 0 }
    }
}

impl GrowthSampler {
    #[inline]
    fn source(&mut self, block: &BlockAllocation) -> &mut Allocated {
        let by_node = block.phase == Phase::Backward && !block.context.is_none() || block.stack.is_none();
        let (table, index) =
            if by_node { (&mut self.nodes, block.context.index()) } else { (&mut self.stacks, block.stack.index()) };
        if index >= table.len() {
            table.resize(index + 1, Allocated::default());
        }
        &mut table[index]
    }

    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, mark: Mark) {
        if block.position.step != self.step {
            self.sample(block);
        }
        let source = self.source(block);
        source.bytes += block.size;
        source.blocks += 1;
        source.last_seq = block.seq;
        source.context = block.context;
        source.bits = mark.bits;
    }

    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation) {
        let source = self.source(block);
        source.bytes = source.bytes.saturating_sub(block.size);
        source.blocks = source.blocks.saturating_sub(1);
    }

    fn sample(&mut self, block: &BlockAllocation) {
        self.step = block.position.step;
        let Some(step) = block.position.step else { return };
        self.seen += 1;
        if !self.seen.is_multiple_of(self.every) {
            return;
        }
        let of = |table: &[Allocated], base: SourceKey| -> Vec<(SourceKey, u64, u32)> {
            let live = table.iter().enumerate().filter(|(_, live)| live.blocks > 0);
            live.map(|(i, live)| (base | i as SourceKey, live.bytes, live.blocks)).collect()
        };
        let mut live = of(&self.stacks, 0);
        live.extend(of(&self.nodes, NODE));
        self.samples.push(Sample { step, seq: block.seq, live });
        if self.samples.len() >= MAX_SAMPLES {
            self.every *= 2;
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
        }
    }

    /// The sources that grow, by bytes in descending order.
    pub fn grown(&self) -> Vec<GrowingSource> {
        let mut series: HashMap<SourceKey, Vec<(usize, u64, u32)>> = HashMap::new();
        for (at, sample) in self.samples.iter().enumerate() {
            for &(key, bytes, blocks) in &sample.live {
                series.entry(key).or_default().push((at, bytes, blocks));
            }
        }
        let mut grown: Vec<GrowingSource> =
            series.iter().filter_map(|(key, series)| self.growth_of(*key, series)).collect();
        grown.sort_by_key(|g| (std::cmp::Reverse(g.bytes), g.stack, g.context));
        grown
    }

    fn growth_of(&self, key: SourceKey, series: &[(usize, u64, u32)]) -> Option<GrowingSource> {
        if series.len() < MIN_INCREASES {
            return None;
        }
        let count = self.samples.len();
        let (mut bytes, mut blocks) = (vec![0u64; count], vec![0u64; count]);
        for &(at, b, n) in series {
            (bytes[at], blocks[at]) = (b, u64::from(n));
        }
        // The end of the growth: the highest sample; of equal ones, the last.
        let (top, &highest) = bytes.iter().enumerate().max_by_key(|(at, b)| (**b, *at))?;
        // The start of the growth: the lowest sample before its end; of equal ones, the last.
        let lowest = bytes[..=top].iter().copied().min()?;
        let from = bytes[..=top].iter().rposition(|b| *b == lowest)?;
        let rises: Vec<usize> =
            (from + 1..=top).filter(|&at| bytes[at] > bytes[at - 1] && blocks[at] > blocks[at - 1]).collect();
        let (first, last) = (*rises.first()?, *rises.last()?);
        let more = blocks[top].saturating_sub(blocks[from]);
        if rises.len() < MIN_INCREASES || more < MIN_BLOCKS {
            return None;
        }
        // A source that frees blocks now and then does not leak. Neither does one that grew and shrank before.
        let freed_between: u64 = (1..=top).map(|at| bytes[at - 1].saturating_sub(bytes[at])).sum();
        if freed_between * 4 > highest - lowest {
            return None;
        }
        let live =
            if key & NODE == 0 { self.stacks.get(key as usize) } else { self.nodes.get((key & !NODE) as usize) }?;
        // The growth must reach the end of the recording, or the end of its loop. At the end of its loop all of it was
        // freed, and nothing was allocated since.
        let ended = bytes[top..].iter().position(|b| *b <= lowest).map(|at| top + at);
        let until = match ended {
            Some(at) if live.last_seq < self.samples[at].seq => at,
            Some(_) => return None,
            None => count,
        };
        if last + 1 + ((until - first) / LAST_PART).max(1) < until {
            return None;
        }
        let (begin, end) = (self.samples[first - 1].step, self.samples[last].step);
        Some(GrowingSource {
            stack: if key & NODE == 0 { StackId(key) } else { StackId::NONE },
            context: if key & NODE == 0 { live.context } else { ContextId(key & !NODE) },
            bits: live.bits,
            bytes: highest - lowest,
            blocks: more,
            first_step: begin,
            steps: end - begin,
            increases: rises.len() as u32,
            samples: (last + 1 - first) as u32,
            last_seq: live.last_seq,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::phase::ProgramPosition;

    fn block(step: u32, seq: u64, stack: u32) -> BlockAllocation {
        let position = ProgramPosition {
            phase: Phase::Forward,
            step: Some(step),
            phase_changes: 0,
            backward_passes: 0,
            optimizer_steps: 0,
        };
        BlockAllocation::of_forward(seq, 512, StackId(stack), position)
    }

    /// The growing sources of a program with `blocks(step)` blocks at the start of each step.
    fn grown(steps: u32, blocks: impl Fn(u32) -> u32) -> Vec<GrowingSource> {
        let (mut growing, mut live, mut seq) = (GrowthSampler::default(), Vec::new(), 0);
        for step in 0..steps {
            seq += 1;
            growing.allocated(&block(step, seq, 1), Mark::default());
            growing.freed(&block(step, seq, 1));
            while live.len() < blocks(step) as usize {
                seq += 1;
                live.push(block(step, seq, 2));
                growing.allocated(&live[live.len() - 1], Mark::default());
            }
            while live.len() > blocks(step) as usize {
                growing.freed(&live.remove(0));
            }
        }
        growing.grown()
    }

    #[test]
    fn a_source_that_is_never_freed_grows() {
        let [leak] = grown(40, |step| step * 3)[..] else { panic!("one source") };
        assert_eq!((leak.stack, leak.slope(), leak.first_step), (StackId(2), 3 * 512, 1));
        // Of thousands of steps, only some are sampled.
        let [leak] = grown(5000, |step| step)[..] else { panic!("one source") };
        assert!((508..=512).contains(&leak.slope()), "{leak:?}");
        // Every tenth step, as in an evaluation.
        let [leak] = grown(63, |step| step / 10)[..] else { panic!("one source") };
        assert_eq!(leak.blocks, 6);
        // In the first of two loops, which freed everything at its end.
        assert_eq!(grown(20, |step| if step < 14 { step } else { 0 }).len(), 1);
    }

    #[test]
    fn a_source_that_levels_out_does_not_grow() {
        assert_eq!(grown(40, |_| 7), []);
        assert_eq!(grown(40, |step| step.min(12)), [], "a buffer that is full");
        assert_eq!(grown(40, |step| step % 12), [], "a cache that begins anew");
        assert_eq!(grown(40, |step| if step < 20 { step } else { 20 - step.min(20) + (step - 20) }), [], "grown twice");
        assert_eq!(grown(40, |step| step / 20), [], "once or twice is no leak");
    }
}
