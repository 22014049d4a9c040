//! Results of a forward pass that the program still holds in the next forward pass, and what the peak would be if the
//! program had let go of them before.
//!
//! A block counts if all of this holds: a forward pass allocated it while autograd recorded. A backward pass and an
//! optimizer step followed. Then user code freed it during the next forward pass, before another backward pass began.
//! So no graph needed it any more, and only the program's own variables held it.
//!
//! Which of the older blocks will be freed this way is known only afterwards. So the level without all older blocks is
//! followed, and at the end of a pass those that were not freed this way are added again. The peak without them is
//! therefore never too low.

use std::collections::BTreeMap;

use memtrace_trace::event::Flags;
use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MAX_LINES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass, RecordingEnd};
use crate::passes::phase::{Phase, ProgramPosition};
use crate::rules::RuleId;
use crate::units::{count_text, size_text};

/// Results of a forward pass stay allocated through the next forward pass.
static OUTPUTS_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::OutputsKept,
    meaning: "Variables keep the results of a forward pass during the next one.",
    evidence: "Results of a forward pass are still allocated in the next forward pass, although a backward pass and an \
               optimizer step came in between. User code frees them there, before another backward pass begins. The \
               peak is higher because of them.",
    limits: "The rule knows the variable that holds the blocks only with `memtrace --holders`. A result that the next \
             forward pass reads and that autograd does not save looks the same.",
    code: &["loss.backward()", "optimizer.step()", "del outputs, loss"],
    link: "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    kept_by: KeptBy::Objects,
};

/// Blocks that were held, by the place that allocated them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct HeldBlocks {
    /// The bytes of the blocks.
    bytes: u64,
    /// The number of blocks.
    blocks: u64,
    /// The stack that freed the last of them.
    freed_by: StackId,
}

type BySource = BTreeMap<(StackId, ContextId), HeldBlocks>;

/// The results of one device that were held through the next forward pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputsKept {
    /// The highest number of allocated bytes, and of those without the held blocks.
    peak: u64,
    peak_without: u64,
    /// The blocks that were held at the peak.
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

impl OutputsKept {
    /// Observes an allocation. `is_graph` means that a forward pass allocates it while autograd records. `level` has
    /// the allocated bytes after it.
    #[inline]
    fn allocate(&mut self, block: &BlockAllocation, is_graph: bool, level: u64) {
        let position = position_of(&block.position);
        if block.phase == Phase::Forward && self.pass.position != Some(position) {
            self.begin_pass(position);
        }
        let pass = &mut self.pass;
        if is_graph && pass.position == Some(position) {
            pass.own += block.memory.size;
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

    /// Observes the free of a graph block. `by_user` means that user code outside the autograd engine and the garbage
    /// collector frees it.
    #[inline]
    fn free(&mut self, block: &BlockAllocation, by: StackId, by_user: bool, now: &ProgramPosition) {
        let pass = &mut self.pass;
        let position = Some(position_of(&block.position));
        if position == pass.position {
            pass.own = pass.own.saturating_sub(block.memory.size);
        } else if position == pass.before {
            pass.older = pass.older.saturating_sub(block.memory.size);
            if by_user && now.phase == Phase::Forward && Some(now.backward_passes) == pass.position.map(|at| at.0) {
                pass.has_freed = true;
                let held = pass.freed.entry((block.site.stack, block.site.context)).or_default();
                held.bytes += block.memory.size;
                held.blocks += 1;
                held.freed_by = by;
            } else {
                pass.kept += block.memory.size;
            }
        }
    }

    /// The blocks that were held at the peak, by stack and autograd node of their allocation, most bytes first.
    fn at_peak(&self) -> Vec<((StackId, ContextId), HeldBlocks)> {
        let mut all: Vec<_> = self.at_peak.iter().map(|(source, held)| (*source, *held)).collect();
        all.sort_by_key(|(source, held)| (std::cmp::Reverse(held.bytes), *source));
        all
    }

    /// The bytes by which the peak would have been lower without what was held.
    fn saves(&self) -> u64 {
        self.peak.saturating_sub(self.peak_without)
    }

    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        let held = self.at_peak();
        let bytes = held.iter().map(|(_, held)| held.bytes).sum::<u64>();
        let saves = self.saves().min(bytes);
        let (source, _) = held.first().filter(|_| device.matters(saves))?;
        let mut evidence = vec![format!(
            "{} forward passes freed results of the pass before, after its backward pass and the optimizer step",
            count_text(self.passes)
        )];
        for (site, held) in held.iter().take(MAX_LINES) {
            evidence.push(format!(
                "{} in {} blocks: {}, freed at {}",
                size_text(held.bytes),
                count_text(held.blocks),
                device.line(*site),
                device.line((held.freed_by, ContextId::NONE))
            ));
        }
        Some(Issue {
            headline: format!(
                "{} of results of the previous forward pass are held at the peak; without them the peak is {}",
                size_text(bytes),
                size_text(device.peak_bytes().saturating_sub(saves))
            ),
            evidence,
            place: Some(*source),
            sites: held.iter().map(|(site, _)| *site).collect(),
            fix: "del the variables that hold them (outputs, loss) after the step, or compute the step in a function \
                  that returns loss.item()"
                .to_owned(),
            saves: Some(saves),
            ..device.issue(&OUTPUTS_KEPT, bytes)
        })
    }
}

impl Pass for OutputsKept {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        self.allocate(allocated.block, allocated.mark.is(Mark::GRAPH), allocated.usage.allocated);
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if !freed.mark.is(Mark::GRAPH) {
            return;
        }
        let flags = freed.e.flags;
        let by_engine = freed.facts.in_engine || flags.contains(Flags::IN_BACKWARD);
        let by_user = !by_engine && !flags.contains(Flags::IN_GC) && !freed.is_truncated;
        self.free(freed.block, freed.e.stack, by_user, freed.now);
    }

    fn finish(&mut self, _: &RecordingEnd<'_>) {
        self.end_pass();
        self.pass = ForwardPass::default();
    }
}

impl Diagnostic for OutputsKept {
    const RULES: &'static [&'static DiagnosticRule] = &[&OUTPUTS_KEPT];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program of one letter per event and returns what was held at the peak and the saving, in MiB. `f`: the
    /// forward pass allocates 10 MiB that backward frees. `o`: it allocates an output of 4 MiB. `b`: backward frees
    /// what `f` allocated, and allocates and frees 1 MiB. `s`: an optimizer step. `r`: user code frees the oldest
    /// output. `e`: the engine frees it.
    fn held(program: &str) -> (u64, u64) {
        let mut outputs = OutputsKept::default();
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
                    level += block.memory.size;
                    outputs.allocate(&block, true, level);
                    if letter == 'f' { &mut activations } else { &mut kept }.push(block);
                }
                'b' => {
                    (now.backward_passes, now.phase) = (now.backward_passes + 1, Phase::Backward);
                    for block in activations.drain(..) {
                        level -= block.memory.size;
                        outputs.free(&block, StackId(8), false, &now);
                    }
                    let mut block = BlockAllocation::for_tests(seq);
                    (block.phase, block.position) = (Phase::Backward, now);
                    outputs.allocate(&block, false, level + (1 << 20));
                }
                's' => {
                    now.optimizer_steps += 1;
                    now.phase = Phase::Optimizer;
                }
                'r' | 'e' => {
                    let block = kept.remove(0);
                    level -= block.memory.size;
                    outputs.free(&block, StackId(9), letter == 'r', &now);
                }
                _ => panic!("{letter}"),
            }
        }
        outputs.end_pass();
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
