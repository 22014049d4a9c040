//! Out-of-memory errors: what was asked for, and what was there.

use memtrace_trace::ids::{ContextId, StackId};

use super::composition::Composition;
use super::fragmentation::Reserved;
use super::phase::{Moment, Phase};
use memtrace_replay::Owner;

/// Errors kept, and the last; programs that try batch sizes may have hundreds.
const DETAILED: usize = 16;
/// What was alive is worked out for so many: any of them may turn out to be the last.
const LOOKED_AT: u64 = 1000;

/// One out-of-memory error.
#[derive(Clone, Debug)]
pub struct Oom {
    /// `seq` of its event.
    pub seq: u64,
    /// When.
    pub ticks: u64,
    /// The (rounded) request.
    pub wanted: u64,
    /// Free bytes of the device, as CUDA said.
    pub device_free: Option<u64>,
    /// Who asked.
    pub by: (StackId, ContextId),
    /// In which phase.
    pub phase: Phase,
    /// The rule that says so.
    pub rule: &'static str,
    /// Where the program was.
    pub at: Moment,
    /// What was alive.
    pub there: Composition,
    /// What the caching allocator had reserved.
    pub reserved: Reserved,
    /// What this process held outside the caching allocator, by owner.
    pub outside: Vec<(Owner, u64)>,
}

/// All of a device.
#[derive(Clone, Debug, Default)]
pub struct OomLog {
    detailed: Vec<Oom>,
    last: Option<Oom>,
    count: u64,
    run: Option<u32>,
    to_the_end: bool,
}

impl OomLog {
    /// Takes one.
    pub fn add(&mut self, oom: Oom, now: &Moment) {
        self.count += 1;
        self.run = Some(now.run);
        if self.detailed.len() < DETAILED { self.detailed.push(oom) } else { self.last = Some(oom) }
    }

    /// Whether the next one is told in full.
    pub fn wants_details(&self) -> bool {
        self.count < LOOKED_AT
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Those told.
    pub fn all(&self) -> impl Iterator<Item = &Oom> {
        self.detailed.iter().chain(&self.last)
    }

    /// The last one.
    pub fn last(&self) -> Option<&Oom> {
        self.last.as_ref().or(self.detailed.last())
    }

    /// The recording ends at `now`.
    pub fn finish(&mut self, now: &Moment) {
        self.to_the_end = self.count > 0 && self.run == Some(now.run);
    }

    /// Whether nothing but unwinding followed the last one.
    pub fn unwound_to_the_end(&self) -> bool {
        self.to_the_end
    }

    /// Whether the program is still unwinding from an error that happened after `before` others.
    #[inline]
    pub fn unwinding(&self, before: u32, now: &Moment) -> bool {
        self.count > u64::from(before) && self.run == Some(now.run)
    }
}
