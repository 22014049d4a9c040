//! Diagnostics: each file, or folder, finds the issues of one kind, from the events to the texts.
//!
//! A diagnostic implements the trait `Diagnostic` and is an entry of `list.rs`. [`Diagnostics`] has one of each for a
//! device, and passes events on to all. All diagnostics see one stream of allocations and frees.
//!
//! What they share is below them: marks of blocks (`mark`), the turns of the program's loop (`turns`), the results of
//! other passes, thresholds and locations (`device_facts`). What one diagnostic must know of another is a field of
//! `SharedFacts`.

mod checkpoint;
mod cublas_workspaces;
mod ddp_buckets;
mod deferred_frees;
mod device_facts;
mod diagnostic;
mod events;
mod fragmentation;
mod gradients;
mod graphs;
mod growing;
mod issue;
mod launch;
pub(crate) mod list;
mod mark;
mod optimizer_state;
mod outputs_kept;
mod reference_cycle;
mod rule;
mod stray_context;
#[cfg(test)]
mod test_program;
mod turns;
mod windows;

use std::cmp::Reverse;

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;

use crate::passes::category::{BlockAllocation, LifetimeEnd};
use crate::passes::phase::{EventClassification, ProgramPosition};
use crate::passes::stacks::{StackFacts, StackTable};
use device_facts::SharedFacts;
use diagnostic::Diagnostic;
use events::{BlockAllocated, BlockFreed, BlocksInUse, OutOfMemory, RecordingEnd};
use list::with_diagnostics;
use mark::Marks;
use memtrace_replay::{Allocator, Block, BlockId, Usage};

pub use device_facts::IssueInputs;
pub use issue::{Issue, OomForecast, sort_issues};
pub use launch::{GpuName, GpuUse, Gpus, LaunchIssue, LaunchProcess, ProcessOnGpu};
pub use rule::{DiagnosticRule, KeptBy};
pub use turns::LoopTurn;

pub(crate) use device_facts::DeviceFacts;
pub(crate) use events::{BlockEvent, RecordingStart};

/// Declares [`Diagnostics`] with a field for each entry of the list, and passes calls on to all.
macro_rules! diagnostics {
    ($($module:ident: $diagnostic:ident { $($ids:tt)* })*) => {
        /// The diagnostics of one device.
        #[derive(Clone, Debug, Default)]
        pub struct Diagnostics {
            marks: Marks,
            $($module: $module::$diagnostic,)*
        }

        impl Diagnostics {
            /// The diagnostics of a device before its first event.
            pub(crate) fn started(start: &RecordingStart<'_>) -> Diagnostics {
                Diagnostics { marks: Marks::default(), $($module: Diagnostic::started(start),)* }
            }

            /// A range that the program names starts or ends.
            #[inline]
            pub(crate) fn range(&mut self, e: &Event) {
                $(self.$module.range(e);)*
            }

            /// A block was allocated. `usage`: the totals of the device after it.
            #[inline]
            pub(crate) fn allocated(
                &mut self,
                block: &BlockAllocation,
                event: &BlockEvent<'_>,
                facts: &StackFacts,
                usage: &Usage,
            ) {
                let BlockEvent { e, id, classification } = *event;
                let mark = self.marks.allocated(id, block, e, facts, classification);
                let allocated = BlockAllocated { e, block, mark, classification, usage };
                $(self.$module.allocated(&allocated);)*
            }

            /// The program freed a block.
            #[inline]
            pub(crate) fn freed(
                &mut self,
                block: &BlockAllocation,
                event: &BlockEvent<'_>,
                facts: &StackFacts,
                end: &LifetimeEnd<'_>,
            ) {
                let BlockEvent { e, id, classification } = *event;
                let LifetimeEnd { now, is_truncated, .. } = *end;
                let mark = self.marks.of(id);
                let freed = BlockFreed { e, id, block, mark, classification, facts, now, is_truncated };
                $(self.$module.freed(&freed);)*
            }

            /// A free was completed: the memory of the block can be reused.
            #[inline]
            pub(crate) fn free_completed(&mut self, id: BlockId, block: &Block, ticks: u64) {
                $(self.$module.free_completed(id, block, ticks);)*
            }

            /// The caching allocator requested a segment from CUDA, whether it succeeded or not.
            pub(crate) fn segment_requested(&mut self, allocator: &Allocator, e: &Event, now: &ProgramPosition) {
                $(self.$module.segment_requested(allocator, e, now);)*
            }

            /// A request ran out of memory. `allocations`: by block id.
            pub(crate) fn out_of_memory(
                &mut self,
                allocator: &Allocator,
                allocations: &[BlockAllocation],
                e: &Event,
                classification: &EventClassification,
                now: &ProgramPosition,
            ) {
                let in_use = BlocksInUse { allocator, allocations, marks: &self.marks };
                let error = OutOfMemory { e, now, may_record: classification.may_record(), in_use };
                $(self.$module.out_of_memory(&error);)*
            }

            /// The recording ended. `allocations`: by block id. `ticks`: the time of the last allocation.
            pub(crate) fn finish(
                &mut self,
                allocator: &Allocator,
                allocations: &[BlockAllocation],
                now: &ProgramPosition,
                ticks: u64,
            ) {
                let in_use = BlocksInUse { allocator, allocations, marks: &self.marks };
                let end = RecordingEnd { allocator, in_use, now, ticks };
                $(self.$module.finish(&end);)*
                self.marks.clear();
            }

            /// The issues of the device.
            pub(crate) fn issues(&self, device: &DeviceFacts<'_>) -> Vec<Issue> {
                let mut shared = SharedFacts::default();
                $(self.$module.share(device, &mut shared);)*
                let mut issues = Vec::new();
                $(self.$module.issues(device, &shared, &mut issues);)*
                issues
            }
        }

        /// The rules of all diagnostics.
        pub fn diagnostic_rules() -> Vec<&'static DiagnosticRule> {
            [$($module::$diagnostic::RULES),*].concat()
        }

        /// The issues that concern several processes of a launch, by bytes in descending order.
        pub fn launch_issues(processes: &[LaunchProcess<'_>]) -> Vec<LaunchIssue> {
            let mut issues = Vec::new();
            $(issues.extend($module::$diagnostic::launch_issues(processes));)*
            issues.sort_by_key(|one| (Reverse(one.bytes), one.rule.id, one.processes.first().map(|first| first.pid)));
            issues
        }
    };
}

with_diagnostics!(diagnostics);

impl Diagnostics {
    /// Whether a block is a workspace of a library, which belongs to no part of the program.
    #[inline]
    pub(crate) fn is_workspace(&self, id: BlockId) -> bool {
        self.marks.of(id).is(mark::Mark::WORKSPACE)
    }

    /// Whether the process computes on the device.
    pub(crate) fn computes(&self) -> bool {
        self.marks.computes()
    }

    /// The bytes that had grown until the end of the run, from turn to turn of the program's loop or from call to call
    /// within the last step.
    pub fn grown_bytes(&self, table: &StackTable) -> u64 {
        self.growing.grown_bytes(table)
    }

    /// `seq` of the out-of-memory error that interrupted an evaluation with gradients.
    pub fn interrupting_error(&self, definitions: &Definitions) -> Option<u64> {
        self.graphs.interrupting_error(definitions)
    }
}
