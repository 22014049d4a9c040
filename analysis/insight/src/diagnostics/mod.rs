//! Diagnostics: each file, or folder, finds the issues of one kind, from the events to the texts.
//!
//! A diagnostic is a pass (`passes::pass`) that implements the trait `Diagnostic` and is an entry of `list.rs`.
//! [`Diagnostics`] has one of each for a device. All see one stream of allocations and frees.
//!
//! The modules below them are shared: the turns of the program's loop (`turns`), the results of other passes,
//! thresholds and locations (`device_facts`). Facts that one diagnostic needs from another are fields of `SharedFacts`.

mod checkpoint;
mod cublas_workspaces;
mod ddp_buckets;
mod deferred_frees;
mod device_facts;
mod diagnostic;
mod fragmentation;
mod gradients;
mod graphs;
mod growing;
mod issue;
mod launch;
pub(crate) mod list;
mod optimizer_state;
mod outputs_kept;
mod reference_cycle;
mod rule;
mod spilled_to_host;
mod stray_context;
mod stream_caches;
#[cfg(test)]
mod test_program;
mod turns;
mod windows;

use std::cmp::Reverse;
use std::collections::HashSet;

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::StackId;

use crate::passes::pass::pass_group;
use crate::passes::stacks::StackTable;
use device_facts::{Computing, SharedFacts};
use diagnostic::Diagnostic;
use list::with_diagnostics;

pub use device_facts::IssueInputs;
pub use issue::{Issue, OomForecast, sort_issues};
pub use launch::{GpuName, GpuUse, Gpus, LaunchIssue, LaunchProcess, ProcessOnGpu};
pub use rule::{DiagnosticRule, KeptBy};
pub use turns::LoopTurn;

pub(crate) use device_facts::{DeviceCapacity, DeviceFacts};

/// Declares [`Diagnostics`] with a field for each entry of the list.
macro_rules! diagnostics {
    ($($module:ident: $diagnostic:ident { $($ids:tt)* })*) => {
        pass_group! {
            /// The diagnostics of one device.
            pub struct Diagnostics {
                computing: Computing,
                $($module: $module::$diagnostic,)*
            }
        }

        impl Diagnostics {
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
    /// Whether the process computes on the device.
    pub(crate) fn computes(&self) -> bool {
        self.computing.computes()
    }

    /// The bytes that had grown until the end of the run, from turn to turn of the program's loop or from call to call
    /// within the last step.
    pub fn grown_bytes(&self, table: &StackTable) -> u64 {
        self.growing.grown_bytes(table)
    }

    /// The stacks whose allocated bytes grow from turn to turn of the program's loop.
    pub fn growing_stacks(&self) -> HashSet<StackId> {
        self.growing.growing_stacks()
    }

    /// `seq` of the out-of-memory error that interrupted an evaluation with gradients.
    pub fn interrupting_error(&self, definitions: &Definitions) -> Option<u64> {
        self.graphs.interrupting_error(definitions)
    }
}
