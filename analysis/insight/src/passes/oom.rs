//! Out-of-memory errors: what was requested, and what was allocated at that time.

use memtrace_trace::ids::{ContextId, StackId};

use super::composition::Composition;
use super::pass::{OutOfMemory, Pass, RecordingEnd};
use super::phase::{Phase, ProgramPosition};
use super::replayed_memory::FailedAllocation;
use super::reserved::Reserved;
use crate::rules::PhaseRuleId;
use memtrace_replay::{Owner, PhysicalAllocation};

/// The number of errors kept in full, besides the last one. Programs that try batch sizes can have hundreds.
const DETAILED: usize = 16;
/// The maximum number of origins to report that block segments at an error.
const MAX_BLOCKERS: usize = 10;

/// One out-of-memory error.
#[derive(Clone, Debug)]
pub struct Oom {
    /// `seq` of its event.
    pub seq: u64,
    /// The time, in clock ticks.
    pub ticks: u64,
    /// The requested bytes, rounded as the allocator rounds.
    pub requested: u64,
    /// Free bytes of the device as CUDA reported them; `None` if unknown.
    pub device_free: Option<u64>,
    /// The stack and the context of the request.
    pub requested_at: (StackId, ContextId),
    /// The phase of the request.
    pub phase: Phase,
    /// The rule that decided the phase.
    pub rule: PhaseRuleId,
    /// The program's position.
    pub position: ProgramPosition,
    /// The blocks that were in use.
    pub in_use: Composition,
    /// The memory that the caching allocator had reserved.
    pub reserved: Reserved,
    /// By owner: bytes that this process held outside the caching allocator.
    pub outside_pytorch: Vec<(Owner, u64)>,
    /// The largest allocation of this process outside the caching allocator.
    pub largest_outside: Option<PhysicalAllocation>,
}

impl Oom {
    /// The allocation that failed.
    pub fn allocation(&self) -> FailedAllocation {
        let Oom { seq, requested, device_free, .. } = *self;
        FailedAllocation { seq, requested, device_free, usage: self.in_use.usage }
    }
}

/// All out-of-memory errors of a device.
#[derive(Clone, Debug, Default)]
pub struct OomLog {
    detailed: Vec<Oom>,
    last: Option<Oom>,
    count: u64,
    unwound_to_the_end: bool,
}

impl OomLog {
    /// The number of errors.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The errors that are kept in full.
    pub fn all(&self) -> impl Iterator<Item = &Oom> {
        self.detailed.iter().chain(&self.last)
    }

    /// The last error.
    pub fn last(&self) -> Option<&Oom> {
        self.last.as_ref().or(self.detailed.last())
    }

    /// Whether nothing but unwinding followed the last error.
    pub fn unwound_to_the_end(&self) -> bool {
        self.unwound_to_the_end
    }
}

/// Collects [`OomLog`].
#[derive(Clone, Debug, Default)]
pub(crate) struct OomCollector {
    log: OomLog,
}

impl From<OomCollector> for OomLog {
    fn from(collector: OomCollector) -> OomLog {
        collector.log
    }
}

impl Pass for OomCollector {
    fn out_of_memory(&mut self, error: &OutOfMemory<'_>) {
        let OutOfMemory { e, classification, now, allocator, .. } = *error;
        let FailedAllocation { seq, requested, device_free, .. } = FailedAllocation::new(e, *allocator.usage());
        let oom = Oom {
            seq,
            ticks: e.ticks,
            requested,
            device_free,
            requested_at: (e.stack, e.context),
            phase: classification.phase,
            rule: classification.rule,
            position: *now,
            in_use: error.in_use.map(|in_use| in_use.composition(e, classification.phase)).unwrap_or_default(),
            reserved: Reserved::of(allocator, MAX_BLOCKERS),
            outside_pytorch: error.physical.owners_outside_allocator(error.device),
            largest_outside: error.physical.largest_outside_allocator(error.device),
        };
        let log = &mut self.log;
        log.count += 1;
        if log.detailed.len() < DETAILED { log.detailed.push(oom) } else { log.last = Some(oom) }
    }

    fn finish(&mut self, end: &RecordingEnd<'_>) {
        let is_unwinding = |last: &Oom| last.position.phase_changes == end.now.phase_changes;
        self.log.unwound_to_the_end = self.log.last().is_some_and(is_unwinding);
    }
}
