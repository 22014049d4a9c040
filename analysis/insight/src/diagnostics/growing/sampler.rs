//! Finds the allocation sites whose blocks grow from turn to turn of the program's loop.
//!
//! At the start of each step (or request) the allocated bytes of every source are sampled. At most 64 samples are kept:
//! then every other sample is dropped, and only every other turn is sampled. A source grows if its bytes increase in
//! several samples, up to the end. Either its blocks become more (a list), or each block replaces a smaller one
//! (`torch.cat`). A source whose bytes level out does not grow: a warm-up, a bounded buffer, a full cache. Neither does
//! a source that takes part in the growth of the whole batch.
//!
//! Calls of the model without gradients are sampled within a step too, for an out-of-memory error there: an evaluation
//! can keep its results until it ends.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use crate::diagnostics::turns::{LoopTurn, Requests};
use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use crate::passes::phase::Phase;

/// The maximum number of samples.
const MAX_SAMPLES: usize = 64;
/// The number of samples in which a source must have grown.
const MIN_INCREASES: usize = 4;
/// The number of blocks by which a list must have grown.
const MIN_BLOCKS: u64 = 4;
/// The growth must reach into the last 20 % (1/5) of the samples since it began.
const LAST_PART: usize = 5;
/// Growth tapers off if less than 25 % (1/4) of it lies in the second half of its samples.
const TAPERED: u64 = 4;
/// The batch grows if at least this share of the places that compute or load data allocate more than at first.
const BATCH_GROWS: (usize, usize) = (3, 4);
/// The unit of volumes in bytes.
const VOLUME_UNIT: u64 = 64;

/// The number of a source: a stack, or an autograd node if the highest bit is set.
type SourceKey = u32;
const NODE: SourceKey = 1 << 31;

/// The bytes that a source allocated in one turn, in units of [`VOLUME_UNIT`].
#[derive(Clone, Copy, Debug, Default)]
struct Volumes {
    /// The turn of the latest allocation.
    turn: u32,
    in_turn: u32,
    /// In its first turn.
    first: u32,
}

impl Volumes {
    #[inline]
    fn add(&mut self, turn: u32, bytes: u64) {
        if turn != self.turn {
            if self.first == 0 {
                self.first = self.in_turn;
            }
            (self.turn, self.in_turn) = (turn, 0);
        }
        let units = u32::try_from(bytes / VOLUME_UNIT).unwrap_or(u32::MAX);
        self.in_turn = self.in_turn.saturating_add(units);
    }

    /// Whether the source allocates more in the last whole turn than in its first, if it took part in both. `now` is
    /// the turn that begins.
    fn grow(&self, now: u32) -> Option<bool> {
        (self.first > 0 && self.in_turn > 0 && self.turn + 1 == now).then_some(self.in_turn > self.first)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Source {
    bytes: u64,
    /// Bytes without the allocator's rounding, by which the sizes of replaced blocks are compared.
    requested: u64,
    last_seq: u64,
    /// Bytes that the end of the process, or an error, freed since the last sample.
    freed_at_end: u64,
    /// Bytes of tensors that something had kept, and that were freed after the device's last allocation: their owner
    /// was a local variable of a function that has returned. Valid in this teardown.
    freed_with_owner: (u32, u64),
    blocks: u32,
    context: ContextId,
    volumes: Volumes,
    bits: u8,
    /// Allocated by data loading or by a forward pass.
    is_forward: bool,
    /// Allocated within a call of the model.
    is_in_model: bool,
    /// How often the program freed the last block before the source allocated another one.
    emptied: u32,
}

#[derive(Clone, Debug)]
struct Sample {
    turn: u32,
    seq: u64,
    ticks: u64,
    /// The most bytes that were allocated on the device since the sample before.
    peak: u64,
    /// Nearly everything that computes or loads data allocated more than at first.
    batch_grows: bool,
    live: Vec<(SourceKey, Held)>,
}

/// The memory that a source holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    bytes: u64,
    requested: u64,
    blocks: u32,
}

#[derive(Clone, Debug)]
struct Series {
    samples: Vec<Sample>,
    every: u32,
    seen: u32,
}

impl Default for Series {
    fn default() -> Series {
        Series { samples: Vec::new(), every: 1, seen: 0 }
    }
}

impl Series {
    /// Whether a turn that begins now is to be sampled.
    fn takes_next(&mut self) -> bool {
        self.seen += 1;
        self.seen.is_multiple_of(self.every)
    }

    fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
        if self.samples.len() >= MAX_SAMPLES {
            self.every *= 2;
            // The last sample stays. Each that stays takes over the peak of the one before.
            let mut dropped_peak = 0;
            let mut keep = true;
            self.samples.retain_mut(|sample| {
                keep = !keep;
                sample.peak = sample.peak.max(dropped_peak);
                dropped_peak = if keep { 0 } else { sample.peak };
                keep
            });
        }
    }

    fn clear(&mut self) {
        *self = Series::default();
    }
}

/// How a source grows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::diagnostics) enum GrowthKind {
    /// Its blocks become more.
    Blocks,
    /// Its blocks become larger.
    Sizes,
}

/// One source that grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GrowingSource {
    /// The stack, `NONE` for what a node allocates without a stack, and the autograd node or other context.
    pub(super) site: (StackId, ContextId),
    /// The [`Mark`] bits of the latest block.
    pub(super) bits: u8,
    /// How it grows.
    pub(super) kind: GrowthKind,
    /// The growth in bytes.
    pub(super) bytes: u64,
    /// The growth in blocks; the number of blocks if only their sizes grow.
    pub(super) blocks: u64,
    /// The mean growth per turn in bytes, in the second half of the rises.
    pub(super) slope: u64,
    /// The first turn after which there was more.
    pub(super) first_turn: u32,
    /// The number of turns in which it grew, with those between the rises.
    pub(super) turns: u32,
    /// The number of samples with an increase, out of [`Self::samples`].
    pub(super) increases: u32,
    /// The number of samples since the growth began.
    pub(super) samples: u32,
    /// `seq` of the latest allocation.
    pub(super) last_seq: u64,
    /// The growth reaches the end of the recording. Else a loop grew, and freed everything at its end.
    pub(super) reaches_end: bool,
}

/// The rate at which the peak of a turn grows, and the time of a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GrowthRate {
    /// The most allocated bytes in the last sampled turns.
    pub(super) peak: u64,
    /// The growth of the peak per turn in bytes; 0 if it does not grow steadily.
    pub(super) peak_slope: u64,
    /// The mean duration of a turn, in clock ticks.
    pub(super) ticks: u64,
}

/// Frees of kept tensors that may belong to the program's teardown, because no allocation has followed.
#[derive(Clone, Copy, Debug, Default)]
struct Teardown {
    /// How often an allocation has followed, so that it was none.
    number: u32,
    is_now: bool,
}

impl Teardown {
    #[inline]
    fn allocated(&mut self) {
        self.number += u32::from(self.is_now);
        self.is_now = false;
    }
}

/// The allocated bytes of each source and their samples, for one device.
#[derive(Clone, Debug, Default)]
pub(super) struct GrowthSampler {
    stacks: Vec<Source>,
    nodes: Vec<Source>,
    /// The samples at the starts of turns.
    turns: Series,
    /// The samples at calls of the model without gradients, within the current step.
    calls: Series,
    /// The sources that grew within the step of an out-of-memory error.
    at_oom: Vec<GrowingSource>,
    peak: u64,
    step: Option<u32>,
    call: u32,
    /// The number of the current turn.
    turn: u32,
    requests: Option<Requests>,
    /// A step of a program that only calls a model began, and the model has not allocated since.
    awaits_model: bool,
    teardown: Teardown,
}

impl GrowthSampler {
    /// `is_inference` means that the program calls a model and never trains.
    pub(super) fn new(is_inference: bool) -> GrowthSampler {
        GrowthSampler { requests: is_inference.then(Requests::default), ..GrowthSampler::default() }
    }

    /// The kind of turn.
    pub(super) fn turn(&self) -> LoopTurn {
        self.requests.as_ref().map_or(LoopTurn::Step, Requests::turn)
    }

    #[inline]
    fn source(&mut self, block: &BlockAllocation) -> &mut Source {
        let by_node = block.phase == Phase::Backward && !block.site.context.is_none() || block.site.stack.is_none();
        let (table, index) = if by_node {
            (&mut self.nodes, block.site.context.index())
        } else {
            (&mut self.stacks, block.site.stack.index())
        };
        if index >= table.len() {
            table.resize(index + 1, Source::default());
        }
        &mut table[index]
    }

    /// Observes an allocation. `allocated` has the device's allocated bytes after it.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, mark: Mark, allocated: u64) {
        if block.position.step != self.step || self.awaits_model || mark.call != self.call {
            self.advance(block, mark);
        }
        self.peak = self.peak.max(allocated);
        self.teardown.allocated();
        let turn = self.turn;
        let source = self.source(block);
        source.bytes += block.memory.size;
        source.requested += block.memory.requested;
        source.blocks += 1;
        source.last_seq = block.seq;
        source.context = block.site.context;
        source.bits = mark.bits;
        source.is_forward = block.phase.is_forward_only() || matches!(block.phase, Phase::Data | Phase::Forward);
        source.is_in_model = !mark.site.is_none();
        source.volumes.add(turn, block.memory.requested);
    }

    /// Observes a free. `at_end` means that no Python frame frees the block, or an error that unwinds the program.
    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation, at_end: bool) {
        let source = self.source(block);
        source.bytes = source.bytes.saturating_sub(block.memory.size);
        source.requested = source.requested.saturating_sub(block.memory.requested);
        source.blocks = source.blocks.saturating_sub(1);
        source.freed_at_end += if at_end { block.memory.size } else { 0 };
        source.emptied += u32::from(source.blocks == 0);
    }

    /// Notes that a free, already observed, is that of a kept tensor, and may belong to the program's teardown.
    pub(super) fn freed_with_its_owner(&mut self, block: &BlockAllocation) {
        self.teardown.is_now = true;
        let teardown = self.teardown.number;
        let freed = &mut self.source(block).freed_with_owner;
        let before = if freed.0 == teardown { freed.1 } else { 0 };
        *freed = (teardown, before + block.memory.size);
    }

    /// Begins a step, a call, or both.
    fn advance(&mut self, block: &BlockAllocation, mark: Mark) {
        let is_call = mark.call != self.call;
        self.call = mark.call;
        let is_step = block.position.step != self.step;
        self.step = block.position.step;
        let Some(step) = self.step else { return };
        match &mut self.requests {
            Some(requests) => {
                self.awaits_model |= is_step;
                if self.awaits_model && !mark.site.is_none() {
                    self.awaits_model = false;
                    if let Some(request) = requests.begins(block.memory.requested) {
                        self.turn = request;
                        self.sample_turn(block);
                    }
                }
            }
            None => {
                if is_step {
                    self.turn = step;
                    self.calls.clear();
                    self.sample_turn(block);
                }
                let computes = is_call && (block.phase.is_forward_only() || block.phase == Phase::Forward);
                if computes && !mark.is(Mark::GRAPH) && self.calls.takes_next() {
                    let sample = Sample { turn: self.calls.seen, ..self.sample(block) };
                    self.calls.push(sample);
                }
            }
        }
    }

    fn sample_turn(&mut self, block: &BlockAllocation) {
        if self.turns.takes_next() {
            let batch_grows = self.batch_grows();
            let sample = Sample { peak: std::mem::take(&mut self.peak), batch_grows, ..self.sample(block) };
            self.turns.push(sample);
            self.stacks.iter_mut().chain(&mut self.nodes).for_each(|source| source.freed_at_end = 0);
        }
    }

    fn sample(&self, block: &BlockAllocation) -> Sample {
        let held = |&Source { bytes, requested, blocks, .. }: &Source| Held { bytes, requested, blocks };
        let of = |table: &[Source], base: SourceKey| -> Vec<(SourceKey, Held)> {
            let live = table.iter().enumerate().filter(|(_, source)| source.blocks > 0);
            live.map(|(i, source)| (base | i as SourceKey, held(source))).collect()
        };
        let mut live = of(&self.stacks, 0);
        live.extend(of(&self.nodes, NODE));
        Sample { turn: self.turn, seq: block.seq, ticks: block.ticks, peak: 0, batch_grows: false, live }
    }

    /// Observes an out-of-memory error, at which `stack` requested so many bytes.
    pub(super) fn out_of_memory(&mut self, stack: StackId, requested: u64) {
        let mut samples = self.calls.samples.clone();
        self.at_oom.clear();
        let Some(mut last) = samples.last().cloned() else { return };
        // The request that failed is a sample of its own: what its source would hold.
        last.turn += 1;
        let source = self.stacks.get(stack.index()).copied().unwrap_or_default();
        last.live.retain(|(key, ..)| *key != stack.0);
        let is_list = source.blocks > 1;
        let with = |held: u64| if is_list { held.saturating_add(requested) } else { requested };
        let blocks = if is_list { source.blocks + 1 } else { 1 };
        last.live.push((stack.0, Held { bytes: with(source.bytes), requested: with(source.requested), blocks }));
        samples.push(last);
        self.at_oom = self.grown_in(&samples, true);
    }

    /// The sources that grow from turn to turn, by bytes in descending order.
    pub(super) fn grown(&self) -> Vec<GrowingSource> {
        self.grown_in(&self.turns.samples, false)
    }

    /// The sources that grew from one call of the model to the next within a step, at the last out-of-memory error.
    pub(super) fn grown_at_oom(&self) -> &[GrowingSource] {
        &self.at_oom
    }

    fn grown_in(&self, samples: &[Sample], is_oom: bool) -> Vec<GrowingSource> {
        let mut series: HashMap<SourceKey, Vec<(usize, Held)>> = HashMap::new();
        for (at, sample) in samples.iter().enumerate() {
            for &(key, held) in &sample.live {
                series.entry(key).or_default().push((at, held));
            }
        }
        let mut grown: Vec<GrowingSource> =
            series.iter().filter_map(|(key, series)| self.growth_of(samples, *key, series, is_oom)).collect();
        if grown.iter().any(|g| g.kind == GrowthKind::Sizes) {
            let is_root = |g: &GrowingSource| g.kind == GrowthKind::Blocks || g.bits & Mark::NODE_RAN == 0;
            // Tensors computed from a tensor that grows, grow too. Autograd runs a node for it, unlike for a tensor
            // that is only kept.
            let has_root = grown.iter().any(|g| g.kind == GrowthKind::Sizes && is_root(g));
            grown.retain(|g| !has_root || is_root(g));
        }
        grown.sort_by_key(|g| (std::cmp::Reverse(g.bytes), g.site));
        grown
    }

    /// Whether nearly everything in the model, or nearly everything that computes or loads data, allocated more in the
    /// last turn than at first: longer sequences, larger pictures.
    fn batch_grows(&self) -> bool {
        let (mut inside, mut all) = ((0, 0), (0, 0));
        for source in self.stacks.iter().filter(|source| source.is_forward) {
            let Some(grows) = source.volumes.grow(self.turn) else { continue };
            for sum in [Some(&mut all), source.is_in_model.then_some(&mut inside)].into_iter().flatten() {
                *sum = (sum.0 + usize::from(grows), sum.1 + 1);
            }
        }
        [inside, all].iter().any(|(growing, of)| *growing > 0 && growing * BATCH_GROWS.1 >= of * BATCH_GROWS.0)
    }

    fn growth_of(
        &self,
        samples: &[Sample],
        key: SourceKey,
        series: &[(usize, Held)],
        is_oom: bool,
    ) -> Option<GrowingSource> {
        if series.len() < MIN_INCREASES {
            return None;
        }
        let count = samples.len();
        let (mut bytes, mut requested, mut blocks) = (vec![0u64; count], vec![0u64; count], vec![0u64; count]);
        for &(at, held) in series {
            (bytes[at], requested[at], blocks[at]) = (held.bytes, held.requested, held.blocks.into());
        }
        let growth = |kind, bytes: &[u64]| self.growth(samples, key, (bytes, &blocks), kind, is_oom);
        growth(GrowthKind::Blocks, &bytes).or_else(|| growth(GrowthKind::Sizes, &requested))
    }

    fn growth(
        &self,
        samples: &[Sample],
        key: SourceKey,
        (bytes, blocks): (&[u64], &[u64]),
        kind: GrowthKind,
        is_oom: bool,
    ) -> Option<GrowingSource> {
        let count = samples.len();
        // The end of the growth: the highest sample; of equal ones, the last. Before an error it is the last sample,
        // because an earlier evaluation can have kept more.
        let top = match is_oom {
            true => count.checked_sub(1)?,
            false => bytes.iter().enumerate().max_by_key(|(at, b)| (**b, *at))?.0,
        };
        let highest = bytes[top];
        let source =
            if key & NODE == 0 { self.stacks.get(key as usize) } else { self.nodes.get((key & !NODE) as usize) }?;
        // The start of the growth: the lowest sample before its end; of equal ones, the last. The first state of an
        // optimizer is no growth.
        let counts = |bytes: &u64| source.bits & Mark::OPTIMIZER == 0 || *bytes > 0;
        let lowest = bytes[..=top].iter().copied().filter(counts).min()?;
        let from = bytes[..=top].iter().rposition(|b| *b == lowest)?;
        let is_list = kind == GrowthKind::Blocks;
        let rises = |at: &usize| bytes[*at] > bytes[*at - 1] && (!is_list || blocks[*at] > blocks[*at - 1]);
        let rises: Vec<usize> = (from + 1..=top).filter(rises).collect();
        // The first of the blocks that replace each other, one of every layer, are not more than before.
        let first_blocks = blocks[from..=top].iter().copied().find(|count| is_list || *count > 0)?;
        let more = blocks[top].saturating_sub(first_blocks);
        if rises.len() < MIN_INCREASES || is_list != (more >= MIN_BLOCKS) {
            return None;
        }
        let (first, last) = (*rises.first()?, *rises.last()?);
        let intervals = last + 1 - first;
        // Blocks that are replaced by larger ones must be larger each time. Batches are so only sometimes.
        let batch_grows = || samples[first..=last].iter().filter(|sample| sample.batch_grows).count() * 2 > intervals;
        if !is_list && (rises.len() * 4 < intervals * 3 || batch_grows()) {
            return None;
        }
        // A source that frees blocks now and then does not leak. Neither does one that grew and shrank before.
        // Blocks that an earlier evaluation kept do not matter for the one that fails.
        let since = if is_oom { from + 1 } else { 1 };
        let freed_between: u64 = (since..=top).map(|at| bytes[at - 1].saturating_sub(bytes[at])).sum();
        if freed_between * 4 > highest - lowest {
            return None;
        }
        let middle = first - 1 + intervals.div_ceil(2);
        let second_half = bytes[last].saturating_sub(bytes[middle.min(last - 1)]);
        if second_half.saturating_mul(TAPERED) < bytes[last].saturating_sub(bytes[first - 1]) {
            return None;
        }
        // The growth must reach the end of the recording, or the end of its loop. At the end of its loop all of it was
        // freed, and nothing was allocated since.
        let ended = bytes[top..].iter().position(|b| *b <= lowest).map(|at| top + at);
        let until = match ended {
            Some(at) if is_list && self.requests.is_none() && source.last_seq < samples[at].seq => at,
            Some(_) => return None,
            None => count,
        };
        if last + 1 + ((until - first) / LAST_PART).max(1) < until {
            return None;
        }
        // Calls with inputs of one size can be the tokens of one generation, which frees its cache when it ends.
        let (teardown, with_owner) = source.freed_with_owner;
        let with_owner = if self.teardown.is_now && teardown == self.teardown.number { with_owner } else { 0 };
        let kept = source.bytes + source.freed_at_end + with_owner;
        if !is_oom && self.turn() == LoopTurn::ModelCall && kept * 2 < highest {
            return None;
        }
        let (begin, end) = (samples[first - 1].turn, samples[last].turn);
        // A block that the program frees before it allocates the next one keeps no earlier data.
        if !is_list && source.emptied.saturating_mul(2) > end - begin {
            return None;
        }
        // From one rise to another, because only some turns may bring growth.
        let rise = rises[(rises.len() - 1) / 2];
        let turns_to_end = |at: usize| end - samples[at].turn;
        let slope = bytes[last].saturating_sub(bytes[rise]) / u64::from(turns_to_end(rise).max(1));
        let between_rises = turns_to_end(first) / (rises.len() as u32 - 1).max(1);
        Some(GrowingSource {
            site: if key & NODE == 0 {
                (StackId(key), source.context)
            } else {
                (StackId::NONE, ContextId(key & !NODE))
            },
            bits: source.bits,
            kind,
            bytes: highest - lowest,
            blocks: if is_list { more } else { blocks[top] },
            slope,
            first_turn: begin,
            turns: turns_to_end(first) + between_rises,
            increases: rises.len() as u32,
            samples: intervals as u32,
            last_seq: source.last_seq,
            reaches_end: until == count,
        })
    }

    /// How fast the peaks of turns grow. `None` with too few turns.
    pub(super) fn rate(&self) -> Option<GrowthRate> {
        // The turn that a sample begins is not over, so each sample has the peak of the turns before it.
        let samples = &self.turns.samples;
        let (middle, last) = (samples.get(samples.len() / 2)?, samples.last()?);
        let turns = last.turn.checked_sub(middle.turn).filter(|turns| *turns > 0)?;
        let second_half = &samples[samples.len() / 2..];
        let rises = second_half.windows(2).filter(|pair| pair[1].peak > pair[0].peak).count();
        let is_steady = rises * 4 >= (second_half.len() - 1) * 3;
        let growth = last.peak.saturating_sub(middle.peak);
        Some(GrowthRate {
            peak: second_half.iter().skip(1).map(|sample| sample.peak).max().unwrap_or(0).max(self.peak),
            peak_slope: if is_steady { growth / u64::from(turns) } else { 0 },
            ticks: last.ticks.saturating_sub(middle.ticks) / u64::from(turns),
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
            growing.allocated(&block(step, seq, 1), Mark::default(), 0);
            growing.freed(&block(step, seq, 1), false);
            while live.len() < blocks(step) as usize {
                seq += 1;
                live.push(block(step, seq, 2));
                growing.allocated(&live[live.len() - 1], Mark::default(), 0);
            }
            while live.len() > blocks(step) as usize {
                growing.freed(&live.remove(0), false);
            }
        }
        growing.grown()
    }

    #[test]
    fn a_source_that_is_never_freed_grows() {
        let [leak] = grown(40, |step| step * 3)[..] else { panic!("one source") };
        assert_eq!((leak.site.0, leak.slope, leak.first_turn), (StackId(2), 3 * 512, 1));
        assert_eq!((leak.kind, leak.increases, leak.samples), (GrowthKind::Blocks, 38, 38));
        // Of thousands of steps, only some are sampled.
        let [leak] = grown(5000, |step| step)[..] else { panic!("one source") };
        assert_eq!(leak.slope, 512);
        // Every tenth step, as in an evaluation.
        let [leak] = grown(63, |step| step / 10)[..] else { panic!("one source") };
        assert_eq!(leak.blocks, 6);
        assert!(leak.reaches_end);
        assert_eq!((leak.slope, leak.turns), (512 / 10, 60), "not more than the rate of ten steps");
        // In the first of two loops, which freed everything at its end.
        let [leak] = grown(20, |step| if step < 14 { step } else { 0 })[..] else { panic!("one source") };
        assert!(!leak.reaches_end);
        // Pieces that become more: the slope is that of the end.
        let [leak] = grown(32, |step| step * step)[..] else { panic!("one source") };
        assert!(leak.slope > 40 * 512, "{leak:?}");
    }

    #[test]
    fn caches_of_many_layers_grow_by_their_sizes() {
        let (mut growing, mut seq) = (GrowthSampler::default(), 0);
        let mut live: Vec<BlockAllocation> = Vec::new();
        for step in 0..20 {
            seq += 1;
            growing.allocated(&block(step, seq, 1), Mark::default(), 0);
            growing.freed(&block(step, seq, 1), false);
            for layer in 0..8 {
                seq += 1;
                let bytes = u64::from(step + 1) << 20;
                let mut larger = block(step, seq, 2);
                (larger.memory.size, larger.memory.requested) = (bytes, bytes);
                growing.allocated(&larger, Mark::default(), 0);
                if step > 0 {
                    growing.freed(&std::mem::replace(&mut live[layer], larger), false);
                } else {
                    live.push(larger);
                }
            }
        }
        let [cache] = growing.grown()[..] else { panic!("one source") };
        assert_eq!((cache.site.0, cache.kind, cache.blocks, cache.slope), (StackId(2), GrowthKind::Sizes, 8, 8 << 20));
    }

    #[test]
    fn a_source_that_levels_out_does_not_grow() {
        assert_eq!(grown(40, |_| 7), []);
        assert_eq!(grown(40, |step| step.min(12)), [], "a buffer that is full");
        assert_eq!(grown(40, |step| step % 12), [], "a cache that begins anew");
        assert_eq!(grown(40, |step| if step < 20 { step } else { 20 - step.min(20) + (step - 20) }), [], "grown twice");
        assert_eq!(grown(40, |step| step / 20), [], "once or twice is no leak");
        assert_eq!(grown(40, |step| (40 * step).isqrt() / 2 + 40 * step.min(8)), [], "a cache that is nearly full");
    }

    /// A program that replaces one block by a larger one in each turn.
    struct Replacing {
        growing: GrowthSampler,
        seq: u64,
        kept: Option<BlockAllocation>,
    }

    impl Replacing {
        fn new(is_inference: bool) -> Replacing {
            Replacing { growing: GrowthSampler::new(is_inference), seq: 0, kept: None }
        }

        fn block(&mut self, step: u32, stack: u32, size: u64) -> BlockAllocation {
            self.seq += 1;
            let mut block = block(step, self.seq, stack);
            (block.memory.size, block.memory.requested) = (size, size);
            block
        }

        /// Allocates and frees a block of the model's call number `call`.
        fn compute(&mut self, step: u32, stack: u32, size: u64, call: u32) {
            let passing = self.block(step, stack, size);
            let mark = Mark { call, site: StackId(9), ..Mark::default() };
            self.growing.allocated(&passing, mark, 0);
            self.growing.freed(&passing, false);
        }

        /// Replaces the block that is kept by one of this size.
        fn replace(&mut self, step: u32, size: u64, bits: u8, call: u32) {
            let new = self.block(step, 2, size);
            self.growing.allocated(&new, Mark { bits, call, ..Mark::default() }, 0);
            if let Some(old) = self.kept.replace(new) {
                self.growing.freed(&old, false);
            }
        }
    }

    /// The growing sources of a training: each step computes with `batch(step)` bytes and then keeps `kept(step)`.
    fn training(batch: impl Fn(u32) -> u64, kept: impl Fn(u32) -> u64) -> Vec<GrowingSource> {
        let mut program = Replacing::new(false);
        for step in 0..24 {
            (3..7).for_each(|stack| program.compute(step, stack, batch(step), step + 1));
            program.replace(step, kept(step), 0, step + 1);
        }
        program.growing.grown()
    }

    #[test]
    fn a_block_that_is_replaced_by_larger_ones_grows() {
        let [leak] = training(|_| 4096, |step| 1024 * u64::from(step + 1))[..] else { panic!("one source") };
        assert_eq!((leak.kind, leak.site.0, leak.slope, leak.blocks), (GrowthKind::Sizes, StackId(2), 1024, 1));
        assert_eq!(training(|_| 4096, |step| 1024 * u64::from(step % 5 + 1)), [], "batches of several sizes");
        assert_eq!(training(|_| 4096, |step| 1024 * u64::from(step / 6 + 1)), [], "larger only now and then");
        let longer = |step: u32| 1024 * u64::from(step + 1);
        assert_eq!(training(longer, longer), [], "sequences that become longer, and the last batch");
    }

    #[test]
    fn a_block_that_is_freed_before_the_next_is_no_leak() {
        let mut program = Replacing::new(false);
        for step in 0..24 {
            // Freed in the step that allocated it, after the next sample: the optimizer ends a step before the program.
            let size = 1024 * u64::from(step + 1);
            let input = program.block(step, 2, size);
            program.growing.allocated(&input, Mark::default(), 0);
            (3..7).for_each(|stack| program.compute(step + 1, stack, 4096, step + 1));
            program.growing.freed(&input, false);
        }
        assert_eq!(program.growing.grown(), []);
    }

    #[test]
    fn an_input_that_the_model_grows_with_is_no_leak() {
        let sources = |model: u64| {
            let mut program = Replacing::new(false);
            for step in 0..24 {
                program.replace(step, 1024 * u64::from(step + 1), 0, step + 1);
                program.compute(step, 3, 4096 * (1 + model * u64::from(step)), step + 1);
                for stack in 4..9 {
                    let result = program.block(step, stack, 4096);
                    program.growing.allocated(&result, Mark { call: step + 1, ..Mark::default() }, 0);
                    program.growing.freed(&result, false);
                }
            }
            program.growing.grown().len()
        };
        assert_eq!((sources(0), sources(1)), (1, 0));
    }

    #[test]
    fn of_what_grows_in_size_only_what_is_kept_counts() {
        let mut program = Replacing::new(false);
        let mut derived: Option<BlockAllocation> = None;
        for step in 0..12 {
            (3..7).for_each(|stack| program.compute(step, stack, 4096, step + 1));
            program.replace(step, 1024 * u64::from(step + 1), 0, step + 1);
            let new = program.block(step, 8, 8192 * u64::from(step + 1));
            let mark = Mark { bits: Mark::GRAPH | Mark::NODE_RAN, call: step + 1, ..Mark::default() };
            program.growing.allocated(&new, mark, 0);
            derived.replace(new).iter().for_each(|old| program.growing.freed(old, false));
        }
        let [leak] = program.growing.grown()[..] else { panic!("one source") };
        assert_eq!(leak.site.0, StackId(2));
    }

    /// The growing sources of a server: each request calls the model with `inputs`, and each call keeps one more unit
    /// of its input. `is_kept` is true if the next request keeps it too.
    fn server(requests: u32, inputs: &[u64], is_kept: bool) -> (Vec<GrowingSource>, LoopTurn) {
        let (mut program, mut step, mut size) = (Replacing::new(true), 0, 0);
        for _ in 0..requests {
            size = if is_kept { size } else { 0 };
            for input in inputs {
                program.compute(step, 3, 512 * input, step + 1);
                program.compute(step, 4, 4096, step + 1);
                size += 512 * input;
                program.replace(step, size, 0, step + 1);
                step += 1;
            }
        }
        // The process ends and frees everything.
        program.kept.iter().for_each(|old| program.growing.freed(old, true));
        (program.growing.grown(), program.growing.turn())
    }

    #[test]
    fn a_server_that_keeps_its_cache_grows_by_request() {
        let (grown, turn) = server(12, &[64, 1, 1, 1], true);
        let [leak] = grown[..] else { panic!("one source: {grown:?}") };
        assert_eq!((leak.kind, leak.slope, turn), (GrowthKind::Sizes, 67 * 512, LoopTurn::Request));
        assert_eq!(server(12, &[64, 1, 1, 1], false).0, [], "a cache of each request");
        assert_eq!(server(1, &[64, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], true).0, [], "one request");
        let (grown, turn) = server(12, &[64], true);
        assert_eq!((grown.len(), turn), (1, LoopTurn::ModelCall));
    }

    #[test]
    fn a_generation_that_frees_its_cache_does_not_grow() {
        let mut program = Replacing::new(true);
        for step in 0..30 {
            program.compute(step, 3, 512, step + 1);
            program.replace(step, 1024 * u64::from(step + 1), 0, step + 1);
        }
        assert_eq!(program.growing.grown().len(), 1, "so far");
        let cache = program.kept.take().expect("a block");
        program.growing.freed(&cache, false);
        assert_eq!(program.growing.grown(), []);
    }

    /// Evaluates in several steps. In each, every batch keeps a block more and enlarges another. One batch more fails
    /// when the stack `failing` requests `requested` bytes.
    fn evaluations(batches: &[u32], failing: u32, requested: u64) -> Vec<GrowingSource> {
        let (mut program, mut call, mut list) = (Replacing::new(false), 0, Vec::new());
        for (step, batches) in (0..).zip(batches) {
            list.drain(..).for_each(|block| program.growing.freed(&block, false));
            for batch in 0..*batches {
                call += 1;
                program.compute(step, 3, 4096, call);
                program.replace(step, 1024 * u64::from(batch + 1), 0, call);
                list.push(program.block(step, 7, 2048));
                program.growing.allocated(&list[list.len() - 1], Mark { call, ..Mark::default() }, 0);
            }
        }
        assert_eq!(program.growing.grown(), [], "from step to step");
        program.compute(batches.len() as u32 - 1, 3, 4096, call + 1);
        program.growing.out_of_memory(StackId(failing), requested);
        program.growing.grown_at_oom().to_vec()
    }

    #[test]
    fn an_evaluation_that_runs_out_of_memory_shows_what_grew() {
        let [list, replaced] = evaluations(&[9, 3, 9], 7, 2048)[..] else { panic!("two sources") };
        assert_eq!((list.kind, list.site.0, list.slope, list.bytes), (GrowthKind::Blocks, StackId(7), 2048, 10 * 2048));
        assert_eq!((replaced.kind, replaced.site.0, replaced.slope), (GrowthKind::Sizes, StackId(2), 1024));
        assert_eq!(evaluations(&[9, 2], 7, 2048), [], "too few batches");
        // The request that failed is one more increase.
        let at = |batches, failing, requested| {
            let found = evaluations(&[9, batches], failing, requested);
            found.iter().map(|g| g.site.0.0).collect::<Vec<_>>()
        };
        assert_eq!((at(3, 7, 2048), at(3, 3, 4096)), (vec![7], vec![]));
        assert_eq!((at(4, 2, 5 * 1024), at(4, 3, 4096)), (vec![7, 2], vec![7]));
    }

    #[test]
    fn the_peak_of_a_turn_has_a_rate() {
        let mut growing = GrowthSampler::default();
        for step in 0..100u32 {
            let mut at = block(step, u64::from(step), 1);
            at.ticks = u64::from(step) * 10;
            growing.allocated(&at, Mark::default(), 1000);
            growing.allocated(&at, Mark::default(), 5000 + 64 * u64::from(step));
            growing.freed(&at, false);
            growing.freed(&at, false);
        }
        let rate = growing.rate().expect("a rate");
        assert_eq!((rate.peak, rate.peak_slope, rate.ticks), (5000 + 64 * 99, 64, 10));
    }
}
