//! Blocks that were read from checkpoints: whether they stay beside the model that they were copied into, and whether
//! they were read to a device that computes nothing.

use std::collections::HashMap;

use memtrace_trace::definition::TensorKind;
use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MIN_BYTES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::{BlockMemory, BlockSite};
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass, RecordingEnd};
use crate::rules::RuleId;
use crate::units::{number_text, size_text};

/// A checkpoint stays allocated beside the model that it was copied into.
static CHECKPOINT_KEPT: DiagnosticRule = DiagnosticRule {
    id: RuleId::CheckpointKept,
    meaning: "A loaded checkpoint stays on the GPU beside the model that it was copied into.",
    evidence: "torch.load, safetensors or torch.distributed.checkpoint allocates the blocks. They are still allocated \
               when the second step begins. For each of them, the model has another block of the same size. None of \
               them is a named tensor of the model or the optimizer.",
    limits: "The rule misses checkpoints that other code reads. Without tensor names, it does not know which of \
             several blocks of one size is the copy.",
    code: &[r#"state = torch.load(path, map_location="cpu", mmap=True)"#, "model.load_state_dict(state)", "del state"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.load.html",
    kept_by: KeptBy::Nothing,
};

/// A checkpoint was read to a device that computes nothing.
static WRONG_DEVICE: DiagnosticRule = DiagnosticRule {
    id: RuleId::WrongDevice,
    meaning: "A checkpoint is read to a GPU on which the process computes nothing.",
    evidence: "The program reads a checkpoint to a device on which this process computes nothing, while it computes on \
               another device.",
    limits: "The rule misses a device on which the process also computes a little.",
    code: &[r#"state = torch.load(path, map_location=f"cuda:{local_rank}")  # or "cpu""#],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.load.html",
    kept_by: KeptBy::Nothing,
};

/// A block that was read from a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CheckpointBlock {
    /// `seq` of the allocation.
    seq: u64,
    /// The size in bytes, rounded as the allocator rounds.
    size: u64,
    /// The requested size in bytes.
    requested: u64,
    /// The stack of the allocation.
    stack: StackId,
    /// The context of the allocation.
    context: ContextId,
}

/// The checkpoint blocks of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Checkpoints {
    /// The highest number of bytes from checkpoints at one point in time.
    peak: u64,
    /// The source of the allocation that reached it.
    peak_at: Option<(StackId, ContextId)>,
    /// The blocks read that were still allocated when the second step began, or at the end if there was no second step.
    kept: Vec<CheckpointBlock>,
    /// By requested size: the number of the model's other blocks at that time.
    model: HashMap<u64, u64>,
    current: HashMap<u64, CheckpointBlock>,
    others: HashMap<u64, u64>,
    bytes: u64,
    is_sampled: bool,
}

impl Checkpoints {
    fn sample(&mut self) {
        self.is_sampled = true;
        self.kept = self.current.values().copied().collect();
        self.kept.sort_by_key(|block| block.seq);
        self.model = self.others.clone();
    }

    /// The blocks that a checkpoint keeps beside the model. Each block of the model accounts for one checkpoint block
    /// of its size. `is_named` is true if the block with this `seq` is itself a parameter or optimizer state of the
    /// program.
    fn beside_the_model(&self, is_named: impl Fn(u64) -> bool) -> Vec<CheckpointBlock> {
        let mut model = self.model.clone();
        let unused = self.kept.iter().filter(|block| !is_named(block.seq));
        let copies = unused.filter(|block| {
            let copied = model.get_mut(&block.requested).filter(|count| **count > 0);
            copied.map(|count| *count -= 1).is_some()
        });
        copies.copied().collect()
    }

    /// The checkpoint that stays beside the model.
    fn kept(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        if self.kept.is_empty() || !device.matters(self.kept.iter().map(|b| b.size).sum()) {
            return None;
        }
        let names = device.inputs.names;
        let own = |seq: u64| names.of_allocation(seq).is_some_and(|named| named.kind != TensorKind::Other);
        let kept = self.beside_the_model(own);
        let bytes = kept.iter().map(|b| b.size).sum();
        let largest = kept.iter().max_by_key(|b| b.size).filter(|_| device.matters(bytes))?;
        let when = match device.table.steps() {
            0 | 1 if device.ooms.unwound_to_the_end() => "when the memory was full",
            0 | 1 => "at the end",
            _ => "when the second step began",
        };
        Some(Issue {
            headline: format!("{} of a loaded checkpoint stay allocated beside the model", size_text(bytes)),
            evidence: vec![format!(
                "{}, each as large as a block of the model, {} still allocated {when}",
                number_text(kept.len() as u64, "loaded block"),
                if kept.len() == 1 { "was" } else { "were" },
            )],
            place: Some((largest.stack, largest.context)),
            fix: "delete the checkpoint once it is copied, or load it with map_location=\"cpu\" (and mmap=True) or \
                  load_state_dict(..., assign=True)"
                .to_owned(),
            saves: Some(bytes).filter(|_| device.at_peak(largest.seq)),
            ..device.issue(&CHECKPOINT_KEPT, bytes)
        })
    }

    /// The checkpoint on a device that computes nothing.
    fn on_wrong_device(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        let (stack, context) = self.peak_at?;
        let elsewhere = device.computes_elsewhere?;
        if device.ordinal < 0 || device.computes || self.peak < MIN_BYTES {
            return None;
        }
        let bytes = self.peak;
        Some(Issue {
            headline: format!(
                "{} of a checkpoint were loaded to GPU {}, but this process computes on GPU {}",
                size_text(bytes),
                device.ordinal,
                elsewhere
            ),
            evidence: vec![format!(
                "only loading allocated memory on GPU {}, and it created a CUDA context there",
                device.ordinal
            )],
            place: Some((stack, context)),
            fix: format!(
                "use torch.load(..., map_location=\"cuda:{}\") or map_location=\"cpu\": by default a tensor goes to \
                 the device it was saved from",
                elsewhere
            ),
            saves: Some(bytes),
            ..device.issue(&WRONG_DEVICE, bytes)
        })
    }
}

impl Pass for Checkpoints {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { block, mark, .. } = *allocated;
        if !self.is_sampled && block.position.step.is_some_and(|step| step > 0) {
            self.sample();
        }
        if mark.is(Mark::LOADED) {
            let BlockMemory { size, requested, .. } = block.memory;
            let (seq, BlockSite { stack, context, .. }) = (block.seq, block.site);
            self.current.insert(seq, CheckpointBlock { seq, size, requested, stack, context });
            self.bytes += size;
            if self.bytes > self.peak {
                (self.peak, self.peak_at) = (self.bytes, Some((stack, context)));
            }
        } else if mark.is(Mark::MODEL) {
            *self.others.entry(block.memory.requested).or_default() += 1;
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        let BlockFreed { block, mark, .. } = *freed;
        if mark.is(Mark::LOADED) {
            self.bytes = self.bytes.saturating_sub(block.memory.size);
            self.current.remove(&block.seq);
        } else if mark.is(Mark::MODEL)
            && let Some(count) = self.others.get_mut(&block.memory.requested)
        {
            *count = count.saturating_sub(1);
        }
    }

    fn finish(&mut self, _: &RecordingEnd<'_>) {
        if !self.is_sampled {
            self.sample();
        }
        (self.current, self.others) = (HashMap::new(), HashMap::new());
    }
}

impl Diagnostic for Checkpoints {
    const RULES: &'static [&'static DiagnosticRule] = &[&CHECKPOINT_KEPT, &WRONG_DEVICE];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.kept(device));
        issues.extend(self.on_wrong_device(device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostics::test_program::TestProgram;

    /// A program that loads a checkpoint and allocates a model of the same size.
    fn program(frees: bool) -> TestProgram<Checkpoints> {
        let mut program = TestProgram::new();
        let loaded = program.allocate(8 << 20, Mark::LOADED);
        program.allocate(8 << 20, Mark::MODEL);
        if frees {
            program.free(&loaded, Mark::LOADED);
        }
        program.now.step = Some(1);
        program.allocate(512, 0);
        program
    }

    #[test]
    fn a_checkpoint_that_outlives_the_first_step_is_kept() {
        assert_eq!(program(false).found(), [("checkpoint-kept", 8 << 20)]);
        assert_eq!(program(true).found(), []);
    }

    #[test]
    fn a_checkpoint_on_a_device_that_computes_nothing() {
        let mut program = program(true);
        program.computes = false;
        assert_eq!(program.found(), [("wrong-device", 8 << 20)]);
    }
}
