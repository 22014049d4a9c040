//! Conclusions: one file per result.
//!
//! A pass implements the trait `Pass` (`pass`) and is an entry of `list`. [`Analysis`] streams a recording once, and
//! drives all passes of each device (`driver`). Facts that must be known before are in [`FirstPass`], which streams the
//! recording at most once. So a recording is streamed at most twice.

mod analysis;
mod call_tree;
mod called_functions;
mod calls;
pub(crate) mod category;
mod colocated;
pub(crate) mod composition;
mod cuda_graphs;
mod custom;
mod device_blocks;
pub(crate) mod device_memory;
mod device_uses;
mod driver;
mod first_pass;
mod forward_only;
pub(crate) mod growth;
pub(crate) mod labels;
pub(crate) mod lifetimes;
mod lines;
mod list;
pub(crate) mod mark;
mod memory_states;
mod missing_modules;
mod model_calls;
mod module_groups;
mod module_memory;
mod module_table;
mod modules;
pub(crate) mod oom;
mod oom_report;
mod open_ranges;
pub(crate) mod optimizer_state;
mod outlier_steps;
pub(crate) mod pass;
pub(crate) mod phase;
mod phase_rule_uses;
pub(crate) mod phase_table;
mod refused;
mod released;
mod replayed_memory;
mod reserved;
pub(crate) mod rest_of_step;
mod rule_uses;
pub(crate) mod serving;
pub(crate) mod serving_growth;
pub(crate) mod stacks;
mod statistics;
mod step_changes;
mod step_inputs;
mod steps;
mod what_if;

pub use analysis::{Analysis, AnalysisOptions};
pub use called_functions::{CalledFunction, CalledFunctions};
pub use calls::Calls;
pub use category::{
    BlockAllocation, BlockClassification, BlockMemory, BlockSite, Categorizer, Category, CategoryRuleUse,
    CategoryRuleUses, LifetimeEnd, Proof,
};
pub use colocated::{ActivityFigures, Colocated};
pub use composition::{Amount, Composition, ModuleKey, Origin};
pub use cuda_graphs::{CaptureMemory, CudaGraph, CudaGraphs, PrivatePool, private_pool_text};
pub use custom::{CustomCategorizer, DecidingRule};
pub use device_memory::{DeviceMemory, DeviceMemoryState, SpilledMemory};
pub use device_uses::{DeviceUse, DeviceUses};
pub use driver::BlockObserver;
pub use first_pass::{FirstPass, FirstPassOptions, ReplayObserver};
pub use forward_only::{CacheGrowth, CacheGrowthTable};
pub use growth::{Growth, GrowthSource, KeptMemory, RunPart};
pub use labels::{LabelRow, LabelTable, LabelTotals};
pub use lifetimes::{BEFORE_STEPS, BlockLifetime, BlockLifetimes, LifetimeCollector, LifetimeStart, NEVER, StepWindow};
pub use lines::{BlockKind, DeviceLines, FunctionUse, LineStatistics, LineUse, Lines, LinesScope, NamedBlocks};
pub use list::DeviceAnalysis;
pub use memory_states::{MemoryStates, RangeMemory};
pub use missing_modules::{MissingModules, MissingSiblings};
pub use model_calls::ModelCalls;
pub use module_groups::{ModuleLine, RepeatedModule, RepeatedModules};
pub use modules::{BlockModule, BlockModules, ModuleMemory, ModulePaths, ModuleSource, ModuleTree, module_path_of};
pub use oom::{Oom, OomLog};
pub use oom_report::OomReport;
pub use open_ranges::RangeNames;
pub use optimizer_state::{only_optimizer, parameter_bytes, state_needed};
pub use outlier_steps::{Outlier, OutlierSteps};
pub use phase::{EventClassification, Phase, PhaseTracker, ProgramPosition};
pub use phase_rule_uses::{PhaseRuleUse, PhaseRuleUses};
pub use phase_table::{JoinedPhases, PhaseRow, PhaseTable, StepRows};
pub use refused::{CudaCaller, FreeAndTotal, MemoryAtRefusal, RefusedRequest, RefusedRequestLog};
pub use released::{ReleasePoint, ReleasedMemory};
pub use replayed_memory::{FailedAllocation, OomQuery, ReplayedDevice, ReplayedMemory};
pub use reserved::{Reserved, SegmentBlocker};
pub use rest_of_step::{CallLevel, EarlierIteration, RestBlock, RestEvent, RestOfStep};
pub use rule_uses::RuleUses;
pub use serving::{Serving, StageFigures, StageFollower};
pub use stacks::{StackFacts, StackTable};
pub use statistics::{Figure, Stat, Statistics, Stats};
pub use step_changes::Change;
pub use step_inputs::{ComparedInputs, StepInputs};
pub use steps::StepEnds;
pub use what_if::{Agreement, PolicyReplay, SettingOutcome, StepOutcome, WhatIf, WhatIfQuery};
