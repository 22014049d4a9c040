//! Results of a forward pass that the program still holds in the next forward pass, and what the peak would be if the
//! program had let go of them before.
//!
//! A block counts if all of this holds: a forward pass allocated it while autograd recorded. A backward pass and an
//! optimizer step followed. Then user code freed it during the next forward pass, before another backward pass began. So
//! no graph needed it any more, and only the program's own variables held it.
//!
//! Which of the older blocks will be freed this way is known only afterwards. So the level without all older blocks is
//! followed, and at the end of a pass those that were not freed this way are added again. The peak without them is
//! therefore never too low.

use std::collections::BTreeMap;

use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use crate::passes::phase::{Phase, ProgramPosition};

/// Blocks that were held, by the place that allocated them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeldBlocks {
    /// The bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The stack that freed the last of them.
    pub freed_by: StackId,
}

type BySource = BTreeMap<(StackId, ContextId), HeldBlocks>;

/// The results of one device that were held through the next forward pass.
#[derive(Clone, Debug, Default)]
pub struct HeldOutputs {
    /// The highest number of allocated bytes, and of those without the held blocks.
    peak: u64,
    peak_without: u64,
    /// What was held at the peak.
    at_peak: BySource,
    /// The number of forward passes that freed results of the pass before.
    passes: u64,
    /// The pass that runs, or that ran last.
    pass: ForwardPass,
}

#[derive(Clone, Debug, Default)]
struct ForwardPass {
    /// The position of its blocks: the numbers of backward passes and of optimizer steps before it.
    position: Option<(u32, u32)>,
    /// The position of the blocks of the pass before it.
    before: Option<(u32, u32)>,
    /// Bytes of its own graph blocks that are allocated.
    own: u64,
    /// Bytes of the graph blocks of the pass before that are allocated.
    older: u64,
    /// Bytes of those that were older and were not freed by user code in this forward pass.
    kept: u64,
    peak: u64,
    /// The highest level without `older`.
    peak_without: u64,
    /// The blocks that user code freed since the peak of this pass: they were held at it.
    freed: BySource,
    has_freed: bool,
}

fn position_of(position: &ProgramPosition) -> (u32, u32) {
    (position.backward_passes, position.optimizer_steps)
}

impl HeldOutputs {
    /// Takes an allocation. `is_graph`: a forward pass allocates it while autograd records. `level`: allocated bytes
    /// after it.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, is_graph: bool, level: u64) {
        let position = position_of(&block.position);
        if block.phase == Phase::Forward && self.pass.position != Some(position) {
            self.begin_pass(position);
        }
        let pass = &mut self.pass;
        if is_graph && pass.position == Some(position) {
            pass.own += block.size;
        }
        pass.peak_without = pass.peak_without.max(level.saturating_sub(pass.older));
        if level > pass.peak {
            pass.peak = level;
            pass.freed.clear();
        }
    }

    /// A forward pass begins. Only after both a backward pass and an optimizer step is it a new one.
    #[cold]
    fn begin_pass(&mut self, position: (u32, u32)) {
        let Some(last) = self.pass.position else {
            self.pass.position = Some(position);
            return;
        };
        if position.0 == last.0 || position.1 == last.1 {
            return;
        }
        self.end_pass();
        let older = self.pass.own;
        self.pass = ForwardPass { position: Some(position), before: Some(last), older, ..ForwardPass::default() };
    }

    fn end_pass(&mut self) {
        let pass = &mut self.pass;
        // Those that are still allocated were subtracted as well.
        let kept = pass.kept + pass.older;
        self.peak_without = self.peak_without.max(pass.peak.min(pass.peak_without.saturating_add(kept)));
        self.passes += u64::from(pass.has_freed);
        if pass.peak > self.peak {
            self.peak = pass.peak;
            self.at_peak = std::mem::take(&mut pass.freed);
        }
    }

    /// Takes the free of a graph block. `by_user`: user code outside the autograd engine and the garbage collector frees
    /// it.
    #[inline]
    pub(super) fn freed(&mut self, block: &BlockAllocation, by: StackId, by_user: bool, now: &ProgramPosition) {
        let pass = &mut self.pass;
        let position = Some(position_of(&block.position));
        if position == pass.position {
            pass.own = pass.own.saturating_sub(block.size);
        } else if position == pass.before {
            pass.older = pass.older.saturating_sub(block.size);
            if by_user && now.phase == Phase::Forward && Some(now.backward_passes) == pass.position.map(|at| at.0) {
                pass.has_freed = true;
                let held = pass.freed.entry((block.stack, block.context)).or_default();
                held.bytes += block.size;
                held.blocks += 1;
                held.freed_by = by;
            } else {
                pass.kept += block.size;
            }
        }
    }

    /// Ends the recording.
    pub(super) fn finish(&mut self) {
        self.end_pass();
        self.pass = ForwardPass::default();
    }

    /// What was held at the peak, by stack and autograd node of its allocation, most bytes first.
    pub fn at_peak(&self) -> Vec<((StackId, ContextId), HeldBlocks)> {
        let mut all: Vec<_> = self.at_peak.iter().map(|(source, held)| (*source, *held)).collect();
        all.sort_by_key(|(source, held)| (std::cmp::Reverse(held.bytes), *source));
        all
    }

    /// The bytes by which the peak would have been lower without what was held.
    pub fn saves(&self) -> u64 {
        self.peak.saturating_sub(self.peak_without)
    }

    /// The number of forward passes in which results of the pass before were freed.
    pub fn passes(&self) -> u64 {
        self.passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program of one letter per event and returns what was held at the peak and the saving, in MiB. `f`: the
    /// forward pass allocates 10 MiB that backward frees. `o`: it allocates an output of 4 MiB. `b`: backward frees what
    /// `f` allocated, and allocates and frees 1 MiB. `s`: an optimizer step. `r`: user code frees the oldest output. `e`: the
    /// engine frees it.
    fn held(program: &str) -> (u64, u64) {
        let mut outputs = HeldOutputs::default();
        let mut now =
            ProgramPosition { phase: Phase::Forward, step: Some(0), ..BlockAllocation::for_tests(0).position };
        let (mut activations, mut kept): (Vec<BlockAllocation>, Vec<BlockAllocation>) = Default::default();
        let mut level = 0;
        for (seq, letter) in (1..).zip(program.chars()) {
            match letter {
                'f' | 'o' => {
                    now.phase = Phase::Forward;
                    let mib = if letter == 'f' { 10 } else { 4 };
                    let block = BlockAllocation::of_forward(seq, mib << 20, StackId(7), now);
                    level += block.size;
                    outputs.allocated(&block, true, level);
                    if letter == 'f' { &mut activations } else { &mut kept }.push(block);
                }
                'b' => {
                    (now.backward_passes, now.phase) = (now.backward_passes + 1, Phase::Backward);
                    for block in activations.drain(..) {
                        level -= block.size;
                        outputs.freed(&block, StackId(8), false, &now);
                    }
                    let mut block = BlockAllocation::for_tests(seq);
                    (block.phase, block.position) = (Phase::Backward, now);
                    outputs.allocated(&block, false, level + (1 << 20));
                }
                's' => {
                    now.optimizer_steps += 1;
                    now.phase = Phase::Optimizer;
                }
                'r' | 'e' => {
                    let block = kept.remove(0);
                    level -= block.size;
                    outputs.freed(&block, StackId(9), letter == 'r', &now);
                }
                _ => panic!("{letter}"),
            }
        }
        outputs.finish();
        let at_peak: u64 = outputs.at_peak().iter().map(|(_, held)| held.bytes).sum();
        (at_peak >> 20, outputs.saves() >> 20)
    }

    #[test]
    fn outputs_of_the_pass_before_count_if_user_code_frees_them_after_the_peak() {
        let cases = [
            // Each pass replaces the output of the pass before at its end.
            ("fobsforbsforbs", (4, 4)),
            // The output is freed before the next pass begins; in the middle of it, before the peak.
            ("fobsrfobsrfobs", (0, 0)),
            ("fobsfrfobsfrfobs", (0, 0)),
            // The graph of the next pass still needs it: the engine frees it, or user code after backward.
            ("fobsfoebsfoebs", (0, 0)),
            ("fobsfobrsfobrs", (0, 0)),
            // Micro-batches without an optimizer step between, and a run without backward passes.
            ("fobforbforb", (0, 0)),
            ("foforfor", (0, 0)),
            // A leak: nothing is freed.
            ("fobsfobsfobs", (0, 0)),
        ];
        for (program, expected) in cases {
            assert_eq!(held(program), expected, "{program}");
        }
    }
}
