//! Caches of streams: free segments that the allocator keeps for the streams on which they were used. A program that
//! makes new streams again and again strands such a cache on each of them.

use std::collections::{BTreeSet, HashMap};

use super::device_facts::{DeviceFacts, MAX_LINES, MIN_INCREASE, SharedFacts, Site};
use super::diagnostic::Diagnostic;
use super::issue::Issue;
use super::rule::{DiagnosticRule, KeptBy};
use crate::passes::pass::{Pass, SegmentRequested};
use crate::rules::RuleId;
use crate::units::{count_text, size_text};
use memtrace_input::EventSource;
use memtrace_replay::{BlockState, Segment};

/// Streams have caches that no other stream can use.
static STREAM_CACHES: DiagnosticRule = DiagnosticRule {
    id: RuleId::StreamCaches,
    meaning: "Each stream has cached memory of its own, which allocations on other streams cannot use.",
    evidence: "The allocator requests memory from CUDA for one stream although at least as much is free in unused \
               segments of other streams. These segments belong to at least four streams, are at least half of the \
               reserved memory, and at least 1 % of the device's memory if no request failed.",
    limits: "The rule does not know where the streams were made, so the issue names the line that allocates on them.",
    code: &[
        "side = torch.cuda.Stream()     # once, not in each step",
        "buffer = torch.empty(...)      # on the default stream, outside the next line",
        "with torch.cuda.stream(side):",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams",
    kept_by: KeptBy::Nothing,
};

/// The minimum cache to report, in bytes.
const MIN_CACHE: u64 = 16 << 20;
/// The minimum number of streams with a cache. Programs overlap copies and communication on a few streams of their own.
const MIN_STREAMS: usize = 4;

/// The largest caches of other streams on one device so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamCaches {
    /// The free bytes in unused segments of other streams. The other fields describe this point in time.
    bytes: u64,
    /// The number of these streams.
    streams: usize,
    /// The requested bytes, and where.
    requested: u64,
    requested_at: Site,
    /// Reserved bytes, including the request if it succeeded.
    reserved: u64,
    /// Whether the request failed.
    failed: bool,
    /// By the source of the segments: their bytes, in descending order. At most [`MAX_LINES`].
    by_source: Vec<(Site, u64)>,
}

impl StreamCaches {
    fn issue(&self, device: &DeviceFacts<'_>) -> Option<Issue> {
        if self.bytes < MIN_CACHE
            || self.streams < MIN_STREAMS
            || self.bytes * 2 < self.reserved
            || !device.matters_for_device(self.bytes, self.failed)
            || device.source != EventSource::Torch
        {
            return None;
        }
        // PyTorch does not know the source of a segment any more once its blocks were merged.
        let known = self.by_source.iter().map(|(site, _)| *site).find(|(stack, _)| !stack.is_none());
        let place = known.unwrap_or(self.requested_at);
        let verb = if self.failed { "could not reserve" } else { "reserved" };
        let mut evidence = vec![format!(
            "the allocator {verb} {} more for another stream although that much was free: it keeps a cache for each \
             stream",
            size_text(self.requested)
        )];
        for (site, bytes) in self.by_source.iter().filter(|((stack, _), _)| !stack.is_none()) {
            evidence.push(format!("{} of it was allocated at {}", size_text(*bytes), device.line(*site)));
        }
        Some(Issue {
            headline: format!(
                "{} of {} reserved are cached for {} streams that do not use them",
                size_text(self.bytes),
                size_text(self.reserved),
                count_text(self.streams as u64)
            ),
            evidence,
            place: Some(place),
            fix: "make streams once and use them again, instead of torch.cuda.Stream() in each step; or allocate \
                  before torch.cuda.stream(), on the default stream"
                .to_owned(),
            ..device.issue(&STREAM_CACHES, self.bytes)
        })
    }
}

/// Whether a segment of the default pool has no block in use.
fn is_unused(segment: &Segment) -> bool {
    let is_free = |state| matches!(state, BlockState::Inactive | BlockState::Unmapped);
    segment.pool == 0 && !segment.small && segment.blocks.iter().all(|block| is_free(block.state))
}

impl Pass for StreamCaches {
    fn segment_requested(&mut self, requested: &SegmentRequested<'_>) {
        let SegmentRequested { e, allocator, .. } = *requested;
        let (bytes, failed) = (e.size, requested.failed());
        let is_more = |free: u64| free * 100 >= self.bytes * MIN_INCREASE;
        if !requested.free_that_suffices().is_some_and(is_more) {
            return;
        }
        let (mut cached, mut streams) = (0, BTreeSet::new());
        let mut sources: HashMap<Site, u64> = HashMap::new();
        let segments = allocator.segments();
        for segment in segments.iter().filter(|segment| segment.stream != e.stream && is_unused(segment)) {
            cached += segment.size;
            streams.insert(segment.stream);
            *sources.entry((segment.stack, segment.context)).or_default() += segment.size;
        }
        if cached < bytes || cached <= self.bytes {
            return;
        }
        let mut by_source: Vec<(Site, u64)> = sources.into_iter().collect();
        by_source.sort_by_key(|(site, bytes)| (std::cmp::Reverse(*bytes), *site));
        by_source.truncate(MAX_LINES);
        let (streams, reserved) = (streams.len(), allocator.usage().reserved);
        let requested_at = (e.stack, e.context);
        *self = StreamCaches { bytes: cached, streams, requested: bytes, requested_at, reserved, failed, by_source };
    }
}

impl Diagnostic for StreamCaches {
    const RULES: &'static [&'static DiagnosticRule] = &[&STREAM_CACHES];

    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        issues.extend(self.issue(device));
    }
}
