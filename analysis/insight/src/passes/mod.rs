//! Conclusions: one file per result. Passes take events and changes one by one. Their memory grows with allocated
//! blocks and distinct stacks, not with events. [`Analysis`] drives them all in one streaming pass.

mod analysis;
mod category;
pub mod changes;
mod composition;
mod cuda_graphs;
mod custom;
mod device_memory;
mod device_uses;
pub mod diagnostics;
mod forward_only;
mod growth;
mod issue;
mod labels;
mod lifetimes;
mod lines;
mod missing_modules;
mod model_calls;
mod module_groups;
mod module_memory;
mod module_table;
mod modules;
mod oom;
mod oom_report;
mod phase;
mod phase_rule_uses;
mod phase_table;
mod released;
mod reserved;
mod rest_of_step;
mod stacks;
mod statistics;
mod step_inputs;
mod steps;
mod what_if;

pub use analysis::{Analysis, AnalysisOptions, BlockObserver, DeviceAnalysis, RangeMemory};
pub use category::{
    BlockAllocation, BlockClassification, Categorizer, Category, CategoryRuleUse, CategoryRuleUses, LifetimeEnd, Proof,
};
pub use composition::{Amount, Composition, ModuleKey, Origin};
pub use cuda_graphs::{CudaGraph, CudaGraphs, PrivatePool, private_pool_text};
pub use custom::{CustomCategorizer, DecidingRule};
pub use device_memory::{DeviceMemory, DeviceMemoryState};
pub use device_uses::{DeviceUse, DeviceUses};
pub use growth::{Growth, GrowthSource, KeptMemory, RunPart};
pub use issue::{Issue, OomForecast, sort_issues};
pub use labels::{LabelRow, LabelTable, RangeNames};
pub use lifetimes::{BEFORE_STEPS, BlockLifetime, BlockLifetimes, LifetimeCollector, NEVER, StepWindow};
pub use lines::{BlockKind, DeviceLines, FunctionUse, LineStatistics, LineUse, Lines, LinesScope, NamedBlocks};
pub use missing_modules::{MissingModules, MissingSiblings};
pub use model_calls::ModelCalls;
pub use module_groups::{ModuleLine, RepeatedModule, RepeatedModules};
pub use modules::{BlockModule, BlockModules, ModuleMemory, ModulePaths, ModuleSource, ModuleTree, module_path_of};
pub use oom::{Oom, OomLog};
pub use oom_report::{OomQuery, OomReport};
pub use phase::{EventClassification, Phase, PhaseTracker, ProgramPosition};
pub use phase_rule_uses::{PhaseRuleUse, PhaseRuleUses};
pub use phase_table::{PhaseRow, PhaseTable, StepRows};
pub use released::{ReleasePoint, ReleasedMemory};
pub use reserved::{Reserved, SegmentBlocker};
pub use rest_of_step::{CallLevel, EarlierIteration, InterruptedStep, RestBlock, RestEvent, RestOfStep, StepStarts};
pub use stacks::{StackFacts, StackTable};
pub use statistics::{Figure, Stat, Statistics, Stats};
pub use step_inputs::{ComparedInputs, StepInputs};
pub use steps::{LabelRules, StepEnds};
pub use what_if::{Agreement, Outcome, PolicyReplay, StepOutcome, WhatIf, WhatIfQuery};
