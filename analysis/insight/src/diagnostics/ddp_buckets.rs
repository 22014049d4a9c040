//! Buckets of DistributedDataParallel: a second copy of the gradients, unless the gradients are views of the buckets.

use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass};
use crate::passes::phase::Phase;
use crate::rules::{PhaseRuleId, RuleId};
use crate::units::{number_text, size_text};

/// DistributedDataParallel holds a second copy of the gradients.
static DDP_BUCKETS: DiagnosticRule = DiagnosticRule {
    id: RuleId::DdpBuckets,
    meaning: "DistributedDataParallel keeps a second copy of the gradients in its buckets.",
    evidence: "DistributedDataParallel allocates buckets that are at least half as large as the gradients beside them.",
    limits: "The rule does not know whether communication hooks need the buckets.",
    code: &["model = DistributedDataParallel(model, gradient_as_bucket_view=True)"],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    kept_by: KeptBy::Nothing,
};

/// The buckets of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DdpBuckets {
    /// Bytes now.
    bytes: u64,
    /// The number of blocks now.
    blocks: u64,
    /// The number of blocks at the latest optimizer step.
    blocks_at_step: u64,
    /// Bytes at the latest optimizer step, after the backward pass has left its gradients.
    bytes_at_step: u64,
    /// The stack and context that wrapped the model.
    allocated_at: Option<(StackId, ContextId)>,
}

impl DdpBuckets {
    /// The issue beside so many bytes of gradients.
    fn issue(&self, device: &DeviceFacts<'_>, gradients: u64) -> Option<Issue> {
        let bytes = self.bytes_at_step;
        if !device.matters(bytes) || gradients < bytes / 2 || bytes < gradients / 2 {
            return None;
        }
        Some(Issue {
            headline: format!("DDP buckets of {} beside {} of gradients", size_text(bytes), size_text(gradients)),
            evidence: vec![format!(
                "{} of DistributedDataParallel stayed allocated during the optimizer step, as large as the gradients \
                 themselves",
                number_text(self.blocks_at_step, "bucket")
            )],
            place: self.allocated_at,
            fix: "use DistributedDataParallel(..., gradient_as_bucket_view=True)".to_owned(),
            // Whether the peak falls depends on what else is allocated when the buckets are made anew.
            ..device.issue(&DDP_BUCKETS, bytes)
        })
    }
}

impl Pass for DdpBuckets {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { block, mark, .. } = *allocated;
        if mark.is(Mark::BUCKET) {
            self.bytes += block.memory.size;
            self.blocks += 1;
            if allocated.classification.rule == PhaseRuleId::LoadDdpBuilt {
                self.allocated_at.get_or_insert((block.site.stack, block.site.context));
            }
        }
        if block.phase == Phase::Optimizer {
            (self.bytes_at_step, self.blocks_at_step) = (self.bytes, self.blocks);
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if freed.mark.is(Mark::BUCKET) {
            self.bytes = self.bytes.saturating_sub(freed.block.memory.size);
            self.blocks = self.blocks.saturating_sub(1);
        }
    }
}

impl Diagnostic for DdpBuckets {
    const RULES: &'static [&'static DiagnosticRule] = &[&DDP_BUCKETS];

    fn issues(&self, device: &DeviceFacts<'_>, shared: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device, shared.gradient_bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostics::test_program::TestProgram;

    /// The number of issues of a program with so many bytes of buckets and of gradients at its optimizer's step.
    fn issues(buckets: u64, gradient_bytes: u64) -> usize {
        let mut program = TestProgram::<DdpBuckets>::new();
        program.rule = PhaseRuleId::LoadDdpBuilt;
        program.allocate(buckets, Mark::BUCKET);
        (program.rule, program.phase) = (PhaseRuleId::OptimizerStepTorch, Phase::Optimizer);
        program.allocate(512, 0);
        program.issues(&SharedFacts { gradient_bytes, ..SharedFacts::default() }).len()
    }

    #[test]
    fn buckets_beside_gradients_are_a_second_copy() {
        assert_eq!(issues(64 << 20, 64 << 20), 1);
        assert_eq!(issues(64 << 20, 0), 0, "the gradients are views of the buckets");
        assert_eq!(issues(64 << 10, 64 << 10), 0, "too small");
    }
}
