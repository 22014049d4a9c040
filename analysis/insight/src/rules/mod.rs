//! Facts about the code of PyTorch and other libraries, as data. Every rule has a name, and every verdict names its
//! rule. A rule states what a frame, a node or a library means. The passes combine the verdicts.

mod actions;
mod allocator_settings;
mod categories;
pub mod illnesses;
mod libraries;
mod native;
mod optimizers;
mod phases;
mod workspaces;

pub use actions::{ActionRule, MomentFacts, action_rules};
pub use allocator_settings::{AllocatorSetting, allocator_settings};
pub use categories::{
    CategoryRule, Makes, category_rule, ends_autocast, is_attention, is_cache_name, is_library_module,
};
pub use illnesses::{ILLNESSES, IllnessRule};
pub use libraries::{LibraryRule, library_name};
pub use native::{PlumbingRule, plumbing_rule};
pub use optimizers::{OptimizerRule, optimizer_of};
pub use phases::{FrameRule, LabelRule, Meaning, frame_rule, label_rule};
pub use workspaces::{is_lt_workspace_size, is_workspace_size};
