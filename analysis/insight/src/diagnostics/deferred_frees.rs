//! Deferred frees: blocks that the program freed while other streams still used them (`record_stream`). Until the
//! streams are done, no allocation can reuse their memory.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MAX_LINES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::category::BlockSite;
use crate::passes::pass::{BlockAllocated, BlockFreed, FreeCompleted, Pass, RecordingEnd};
use crate::rules::RuleId;
use crate::units::{number_text, size_text};
use memtrace_replay::BlockId;

/// Frees wait for streams.
static DEFERRED_FREES: DiagnosticRule = DiagnosticRule {
    id: RuleId::DeferredFrees,
    meaning: "Blocks that the program has freed wait for the streams that still use them.",
    evidence: "The program has freed blocks that streams still use. At one point in time they are at least a tenth of \
               the peak.",
    limits: "The rule does not know the line that calls record_stream, so the issue names the line that allocates. It \
             does not know the stream's work.",
    code: &[
        "torch.cuda.current_stream().wait_stream(side)  # before the last reference is dropped",
        "del batch                                      # then without record_stream()",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html",
    kept_by: KeptBy::Nothing,
};

/// The deferred frees of one source on one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct DeferredSource {
    /// The number of blocks.
    blocks: u64,
    /// The sum over the blocks of bytes times clock ticks between request and completion.
    byte_ticks: u128,
}

#[derive(Clone, Copy, Debug)]
struct PendingFree {
    id: BlockId,
    stack: StackId,
    context: ContextId,
    size: u64,
    ticks: u64,
}

/// The deferred frees of one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeferredFrees {
    now: u64,
    latest: Option<PendingFree>,
    pending: HashMap<BlockId, PendingFree>,
    by_source: HashMap<(StackId, ContextId, u64), DeferredSource>,
    /// The highest number of bytes that waited at one point in time.
    peak: u64,
}

impl DeferredFrees {
    /// Marks the latest request as deferred. Its completion did not follow at once.
    #[inline]
    fn defer(&mut self) {
        if let Some(earlier) = self.latest.take() {
            self.pending.insert(earlier.id, earlier);
        }
    }

    fn add(&mut self, pending: &PendingFree, stream: u64, until: u64) {
        let source = self.by_source.entry((pending.stack, pending.context, stream)).or_default();
        source.blocks += 1;
        source.byte_ticks += u128::from(pending.size) * u128::from(until.saturating_sub(pending.ticks));
    }

    /// By source and stream, by bytes times time in descending order.
    fn by_source(&self) -> Vec<((StackId, ContextId, u64), DeferredSource)> {
        let mut all: Vec<_> = self.by_source.iter().map(|(source, by)| (*source, *by)).collect();
        all.sort_by_key(|(source, by)| (std::cmp::Reverse(by.byte_ticks), *source));
        all
    }

    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        let sources = self.by_source();
        let ((stack, context, _), _) = sources.first()?;
        if !device.matters(self.peak) || self.peak * 10 < device.peak_bytes() {
            return None;
        }
        let mut evidence = Vec::new();
        for ((stack, context, stream), by) in sources.iter().take(MAX_LINES) {
            evidence.push(format!(
                "{} of stream {stream:#x}, {} between free and reuse: {}",
                number_text(by.blocks, "block"),
                device.gib_seconds(by.byte_ticks),
                device.line((*stack, *context))
            ));
        }
        Some(Issue {
            headline: format!("{} were freed but waited for other streams", size_text(self.peak)),
            evidence,
            place: Some((*stack, *context)),
            fix: "call wait_stream() before the last reference is dropped, instead of record_stream(); or prefetch \
                  fewer batches"
                .to_owned(),
            ..device.issue(&DEFERRED_FREES, self.peak)
        })
    }
}

impl Pass for DeferredFrees {
    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        self.defer();
        // Blocks that wait are active but not allocated.
        let usage = allocated.usage;
        self.peak = self.peak.max(usage.active.saturating_sub(usage.allocated));
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        let BlockSite { stack, context, .. } = freed.block.site;
        let size = freed.block.memory.size;
        self.defer();
        self.latest = Some(PendingFree { id: freed.id, stack, context, size, ticks: freed.e.ticks });
    }

    #[inline]
    fn free_completed(&mut self, completed: &FreeCompleted<'_>) {
        let FreeCompleted { id, block, ticks } = *completed;
        // Nearly all frees complete at once.
        self.now = ticks;
        if self.latest.is_some_and(|latest| latest.id == id) {
            self.latest = None;
            return;
        }
        if let Some(pending) = self.pending.remove(&id) {
            self.add(&pending, block.stream, ticks);
        }
    }

    /// Blocks that still wait count as pending until the end.
    fn finish(&mut self, end: &RecordingEnd<'_>) {
        self.defer();
        for pending in std::mem::take(&mut self.pending).into_values() {
            self.add(&pending, end.allocator.block(pending.id).stream, end.last_allocation.max(self.now));
        }
    }
}

impl Diagnostic for DeferredFrees {
    const RULES: &'static [&'static DiagnosticRule] = &[&DEFERRED_FREES];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device));
    }
}
