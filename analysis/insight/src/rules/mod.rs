//! Facts about the code of PyTorch and other libraries, as data. A rule that decides something has an id ([`RuleId`],
//! [`PhaseRuleId`], [`CategoryRuleId`]), and every decision keeps the id. A rule states what a frame, a node or a
//! library means. The passes combine the rules.

mod autocast;
mod candidate_settings;
mod categories;
mod custom;
mod evaluation;
mod facts;
mod frameworks;
mod gpus;
mod ids;
mod libraries;
mod modules;
mod native;
mod optimizers;
mod paths;
mod phases;
mod serving;
mod workspaces;

pub use autocast::{
    AutocastType, autocast_type, autocast_type_of_class, casts_logits, is_cross_entropy, makes_other_types,
    makes_views, promotes, saves_no_operand,
};
pub use candidate_settings::{CandidateSetting, candidate_settings};
pub use categories::{
    CategoryRule, FrameMemory, cache_counterpart, captures_graph, category_rule, ends_autocast, is_attention,
    is_cache_name, is_graphs_own_pool, is_library_module, is_pytorch,
};
pub use custom::{
    CustomCategory, CustomField, CustomRule, CustomRules, CustomRulesError, MAX_CUSTOM_RULES, NO_CUSTOM_CATEGORY,
};
pub use evaluation::{
    ForwardOnlyUse, is_changed_by_eval, is_dropout, is_loss, names_evaluation, names_forward_only, names_training,
};
pub use facts::FrameFacts;
pub use frameworks::{Framework, Setting};
pub use gpus::multiprocessors;
pub use ids::{CategoryRuleId, PhaseRuleId, RuleId, UnknownRule};
pub use libraries::{
    LibraryRule, PYTORCH, allocation_error, is_data_parallel_gather, is_library, is_pipelining, is_serving_engine,
    library_name, smaller_share, stands_in_for_kernel,
};
pub use modules::{UserClasses, is_container_class, is_wrapped_module};
pub use native::{AllocFnRule, alloc_fn_rule};
pub use optimizers::{OptimizerRule, optimizer_class, optimizer_of};
pub use phases::{FrameRule, LabelRule, Meaning, frame_rule, label_rule};
pub use serving::{Activity, ServingEngine, ServingPart, ServingStage, serving_part, serving_stage};
pub use workspaces::{UsesCublas, frame_uses_cublas, is_lt_workspace_size, is_workspace_size, node_uses_cublas};
