//! Conclusions: one file per result. Passes take events and changes one by one. Their memory grows with allocated
//! blocks and distinct stacks, not with events. [`Story`] drives them all in one streaming pass.

mod category;
mod composition;
mod finding;
mod fragmentation;
mod growth;
pub mod illness;
mod labels;
mod lines;
mod modules;
mod oom;
mod phase;
mod phase_table;
mod post_mortem;
mod reasons;
mod stacks;
mod statistics;
mod steps;
mod story;
mod what_if;

pub use category::{Birth, Categorizer, Category, CategoryReason, CategoryReasons, End, Judged, Proof};
pub use composition::{Amount, Composition, Origin};
pub use finding::{Finding, sort_findings};
pub use fragmentation::{Pin, Reserved};
pub use growth::{Growth, Kept, Part, Source};
pub use labels::{LabelRow, LabelTable, RangeNames};
pub use lines::{DeviceLines, FunctionUse, LineUse, Lines};
pub use modules::{Belongs, ModuleMemory, ModuleTree, Paths, Repeated};
pub use oom::{Oom, OomLog};
pub use phase::{Moment, Phase, PhaseTracker, Verdict};
pub use phase_table::{PhaseRow, PhaseTable, StepRows};
pub use post_mortem::{Inquest, PostMortem};
pub use reasons::{Reason, Reasons};
pub use stacks::{StackFacts, StackTable};
pub use statistics::{Figure, Stat, Statistics, Stats};
pub use steps::{LabelRules, StepEnds};
pub use story::{DeviceStory, Lives, Story};
pub use what_if::{Agreement, Outcome, PolicyReplay, Question, WhatIf};
