//! Fragmentation: free memory in segments that contain blocks in use. It is measured when the allocator asks CUDA for
//! memory although it has as much free memory reserved.

use std::collections::HashMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::device_facts::{DeviceFacts, MAX_LINES, MIN_INCREASE, SharedFacts};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::pass::{Pass, SegmentRequested};
use crate::passes::phase::ProgramPosition;
use crate::rules::RuleId;
use crate::units::{number_text, share_text, size_text};
use memtrace_input::EventSource;
use memtrace_replay::{BlockState, Segment};

/// Blocks in use block segments whose free memory the allocator could not use.
static FRAGMENTATION: DiagnosticRule = DiagnosticRule {
    id: RuleId::Fragmentation,
    meaning: "PyTorch's allocator reserves memory that it cannot use, because blocks in use divide it into parts \
              that are too small.",
    evidence: "The allocator requests more memory from CUDA although as much is free in segments with blocks in use. \
               That free memory is at least a quarter of the reserved memory, then and at its peak, and at least 1 % \
               of the device's memory if no request failed.",
    limits: "The rule does not cover expandable segments and private pools. It does not know which block of a segment \
             is to blame, so the sources of all its blocks share the free memory.",
    code: &[
        "# before the program starts: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "model = Model().cuda()  # long-lived tensors first, temporary ones after them",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    kept_by: KeptBy::Nothing,
};

/// The minimum fragmentation to report, in bytes. Less is no fault of the program.
const MIN_FRAGMENTATION: u64 = 16 << 20;
/// The minimum fragmentation to report, as a share of the reserved memory: a quarter.
const MIN_FRAGMENTATION_OF_RESERVED: u64 = 4;

/// The blocks of one source that keep free memory from being used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct BlockingSource {
    /// Free bytes in segments with such blocks, divided equally among the sources in a segment.
    blocked: u64,
    /// The bytes of the blocks.
    bytes: u64,
    /// The number of blocks.
    blocks: u64,
}

/// The worst fragmentation of one device so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fragmentation {
    /// The highest number of free bytes in segments with blocks in use. The other fields describe this point in time.
    blocked: u64,
    /// The number of these segments.
    segments: u64,
    /// The size of the largest free block, in bytes.
    largest_free: u64,
    /// The requested bytes.
    requested: u64,
    /// Reserved bytes, including the request if it succeeded.
    reserved: u64,
    /// The program's position.
    position: Option<ProgramPosition>,
    /// Whether the request failed.
    failed: bool,
    /// By the source of the blocks in use, by free bytes in descending order. At most eight.
    blocked_by: Vec<((StackId, ContextId), BlockingSource)>,
}

impl Fragmentation {
    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        if self.blocked < MIN_FRAGMENTATION
            || self.blocked * MIN_FRAGMENTATION_OF_RESERVED < self.reserved.max(device.peaks.reserved)
            || !device.matters_for_device(self.blocked, self.failed)
            || device.source != EventSource::Torch
        {
            return None;
        }
        let (source, _) = self.blocked_by.first()?;
        let verb = if self.failed { "could not reserve" } else { "reserved" };
        // The peak and an out-of-memory error have their own figures. This is the worst point in time at which
        // fragmentation had an effect.
        let when = match (self.failed, self.position.and_then(|position| position.step)) {
            (true, _) => " when a request failed".to_owned(),
            (false, Some(step)) => format!(" in step {step}"),
            (false, None) => String::new(),
        };
        let mut evidence = vec![format!(
            "the allocator {verb} {} more although that much was free in the stream's segments for large blocks: the \
             largest free block was {}, and {} had live blocks",
            size_text(self.requested),
            size_text(self.largest_free),
            number_text(self.segments, "segment")
        )];
        for (site, pin) in self.blocked_by.iter().take(MAX_LINES) {
            evidence.push(format!(
                "{} of it blocked by {} in {}: {}",
                size_text(pin.blocked),
                size_text(pin.bytes),
                number_text(pin.blocks, "block"),
                device.line(*site)
            ));
        }
        Some(Issue {
            headline: format!(
                "{} of {} reserved ({}) were free but blocked by live blocks{when}",
                size_text(self.blocked),
                size_text(self.reserved),
                share_text(self.blocked, self.reserved)
            ),
            evidence,
            place: Some(*source),
            fix: "allocate long-lived tensors before short-lived ones; set \
                  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if the suggestions say that it helps"
                .to_owned(),
            ..device.issue(&FRAGMENTATION, self.blocked)
        })
    }
}

impl Pass for Fragmentation {
    fn segment_requested(&mut self, requested: &SegmentRequested<'_>) {
        let SegmentRequested { e, now, allocator } = *requested;
        let (bytes, failed) = (e.size, requested.failed());
        let is_more = |free: u64| free * 100 >= self.blocked * MIN_INCREASE;
        if !requested.free_that_suffices().is_some_and(is_more) {
            return;
        }
        let mut sources: HashMap<(StackId, ContextId), BlockingSource> = HashMap::new();
        let (mut blocked, mut segments, mut largest_free) = (0, 0, 0);
        let usable = |s: &&Segment| !s.expandable && s.pool == 0 && !s.small && s.stream == e.stream;
        for segment in allocator.segments().iter().filter(usable) {
            let inactive = |b: &&memtrace_replay::Block| b.state == BlockState::Inactive;
            let free: u64 = segment.blocks.iter().filter(inactive).map(|b| b.size).sum();
            let in_use: Vec<_> = segment.blocks.iter().filter(|b| b.is_active()).collect();
            if free == 0 || in_use.is_empty() {
                continue;
            }
            blocked += free;
            segments += 1;
            largest_free = segment.blocks.iter().filter(inactive).map(|b| b.size).fold(largest_free, u64::max);
            let mut origins: Vec<(StackId, ContextId)> = in_use.iter().map(|b| (b.stack, b.context)).collect();
            origins.sort_unstable();
            origins.dedup();
            for origin in &origins {
                sources.entry(*origin).or_default().blocked += free / origins.len() as u64;
            }
            for block in in_use {
                let source = sources.entry((block.stack, block.context)).or_default();
                source.bytes += block.size;
                source.blocks += 1;
            }
        }
        if blocked < bytes || blocked <= self.blocked {
            return;
        }
        let mut blocked_by: Vec<_> = sources.into_iter().collect();
        blocked_by.sort_by_key(|(origin, source)| (std::cmp::Reverse(source.blocked), *origin));
        blocked_by.truncate(8);
        *self = Fragmentation {
            blocked,
            segments,
            largest_free,
            requested: bytes,
            reserved: allocator.usage().reserved,
            position: Some(*now),
            failed,
            blocked_by,
        };
    }
}

impl Diagnostic for Fragmentation {
    const RULES: &'static [&'static DiagnosticRule] = &[&FRAGMENTATION];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device));
    }
}
