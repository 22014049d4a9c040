//! The interface of a diagnostic.

use memtrace_trace::event::Event;

use super::device_facts::{DeviceFacts, SharedFacts};
use super::events::{BlockAllocated, BlockFreed, OutOfMemory, RecordingEnd, RecordingStart};
use super::issue::Issue;
use super::launch::{LaunchIssue, LaunchProcess};
use super::rule::DiagnosticRule;
use crate::passes::phase::ProgramPosition;
use memtrace_replay::{Allocator, Block, BlockId};

/// A diagnostic: its rules, the signal that it collects from the events of one device, and the issues that it finds in
/// the signal.
///
/// The memory of a signal grows with allocated blocks and distinct stacks, not with events. Frees after the last
/// allocation (the teardown at the program's end) do not show what the program would have kept.
pub(crate) trait Diagnostic: Default {
    /// The rules by which it finds issues. A rule that several diagnostics share belongs to one of them.
    const RULES: &'static [&'static DiagnosticRule];

    /// The diagnostic before the first event.
    fn started(_start: &RecordingStart<'_>) -> Self {
        Self::default()
    }

    /// A range that the program names starts or ends.
    #[inline]
    fn range(&mut self, _e: &Event) {}

    /// A block was allocated.
    #[inline]
    fn allocated(&mut self, _allocated: &BlockAllocated<'_>) {}

    /// The program freed a block.
    #[inline]
    fn freed(&mut self, _freed: &BlockFreed<'_>) {}

    /// A free was completed: the memory of the block can be reused.
    #[inline]
    fn free_completed(&mut self, _id: BlockId, _block: &Block, _ticks: u64) {}

    /// The caching allocator requested a segment from CUDA, whether it succeeded or not.
    fn segment_requested(&mut self, _allocator: &Allocator, _e: &Event, _now: &ProgramPosition) {}

    /// A request ran out of memory.
    fn out_of_memory(&mut self, _error: &OutOfMemory<'_>) {}

    /// The recording ended.
    fn finish(&mut self, _end: &RecordingEnd<'_>) {}

    /// Adds what other diagnostics need to know. Called after the end, before issues are found.
    fn share(&self, _device: &DeviceFacts<'_>, _shared: &mut SharedFacts) {}

    /// Adds the issues of the device. `issues` has those of the diagnostics before this one.
    fn issues(&self, _device: &DeviceFacts<'_>, _shared: &SharedFacts, _issues: &mut Vec<Issue>) {}

    /// The issues that concern several processes.
    fn launch_issues(_processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssue> {
        Vec::new()
    }
}
