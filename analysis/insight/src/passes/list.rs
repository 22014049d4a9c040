//! The list of passes. A new pass changes this file, and has one of its own.

use super::calls::{CallCollector, Calls};
use super::growth::{Growth, GrowthCollector};
use super::labels::{LabelCollector, LabelTable};
use super::memory_states::{MemoryStates, StateCollector};
use super::oom::{OomCollector, OomLog};
use super::oom_report::{OomReport, OomReportCollector};
use super::outlier_steps::OutlierSteps;
use super::pass::pass_group;
use super::phase_table::{PhaseTable, PhaseTableBuilder};
use super::rule_uses::RuleUses;
use super::serving::Serving;
use super::statistics::{Statistics, StatisticsCollector};
use super::step_inputs::StepInputs;
use crate::diagnostics::Diagnostics;
use memtrace_input::EventSource;

/// Declares [`Passes`] and [`DeviceAnalysis`] with a field for each entry: its name, the pass, and the result that the
/// pass becomes.
macro_rules! passes {
    ($($(#[$meta:meta])* $name:ident: $pass:ty => $result:ty,)*) => {
        pass_group! {
            /// The passes over one device.
            pub(super) struct Passes { $($name: $pass,)* }
        }

        /// The results for one device.
        #[derive(Clone, Debug)]
        pub struct DeviceAnalysis {
            /// The device ordinal; -1 for the CPU.
            pub device: i16,
            /// The event source that describes this device.
            pub source: EventSource,
            $($(#[$meta])* pub $name: $result,)*
        }

        impl Passes {
            /// The results, after [`super::pass::Pass::finish`].
            pub(super) fn results(self, device: i16, source: EventSource) -> DeviceAnalysis {
                DeviceAnalysis { device, source, $($name: self.$name.into(),)* }
            }
        }
    };
}

passes! {
    /// The blocks allocated at chosen points in time.
    states: StateCollector => MemoryStates,
    /// The allocator's figures.
    statistics: StatisticsCollector => Statistics,
    /// The figures of each phase.
    table: PhaseTableBuilder => PhaseTable,
    /// The figures of the ranges that the program named.
    labels: LabelCollector => LabelTable,
    /// The figures of the calls of the program's own functions.
    calls: CallCollector => Calls,
    /// The growth after the first step.
    growth: GrowthCollector => Growth,
    /// The inputs of each step.
    step_inputs: StepInputs => StepInputs,
    /// The places that request far more in one step than in others.
    outlier_steps: OutlierSteps => OutlierSteps,
    /// The stages of an engine that serves models.
    serving: Serving => Serving,
    /// The out-of-memory errors.
    ooms: OomCollector => OomLog,
    /// The explanations of the requested points in time.
    oom_reports: OomReportCollector => Vec<OomReport>,
    /// Which rules decided.
    rules: RuleUses => RuleUses,
    /// The diagnostics.
    diagnostics: Diagnostics => Diagnostics,
}

impl Passes {
    /// `seq` of the event that led to the highest peak of allocated bytes so far.
    #[inline]
    pub(super) fn peak_seq(&self) -> u64 {
        self.states.peak_seq()
    }
}
