//! Changes to a program that can lower a peak, computed by replaying its recorded blocks with the change.
//!
//! Each suggestion is one file. It finds its change in a recording and applies it: a change turns the lifetimes of
//! blocks into other lifetimes, so blocks shrink, end earlier, vanish, or are allocated again. The new peak is the
//! highest sum of the changed blocks, as PyTorch's allocator would place them. Changes can be combined: each takes what
//! the one before has left.
//!
//! A recording that ends with an out-of-memory error lacks the rest of a step. If an earlier iteration shows the rest,
//! its blocks are added. Else the new peak is that of the recorded part.

mod adapters;
mod autocast;
mod backward_each;
mod bfloat16_model;
mod build_on_meta;
mod change;
mod checkpoint_layers;
mod chunked_cross_entropy;
mod combination;
mod data_to_cpu;
mod eight_bit_moments;
mod facts;
mod final_data_type;
mod freeze_unused;
mod fused_step;
mod gradients_in_buckets;
mod half_the_batch;
pub(crate) mod list;
mod load_to_cpu;
mod loss_in_replicas;
mod more_micro_batches;
mod no_autocast_cache;
mod no_grad;
mod no_kv_cache;
mod offload_activations;
mod optimizer_in_backward;
mod recorded;
mod replayer;
mod results_to_cpu;
mod scaled_dot_product_attention;
mod set_to_none;
mod share_buffers;
mod single_tensor_step;
mod smaller_batches;
mod smaller_evaluation_batch;
#[cfg(test)]
mod test_program;

pub use change::{Assumed, Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
pub use combination::{Combination, RULE as COMBINED_CHANGES};
pub use facts::{Facts, RunFacts};
pub use recorded::{FailedRequest, Recorded};
pub use replayer::{ReplayedPeak, Replayer};

/// A saving below 2 % (1/50) of the peak is not worth changing a program.
pub const WORTH_DOING: u64 = 50;

/// Declares the rules of the list.
macro_rules! rules {
    ($($module:ident { $($(#[$about:meta])* $rule:ident: $id:ident = $text:literal,)+ })+) => {
        static RULES: &[&SuggestionRule] = &[$($(&$module::$rule,)+)+];
    };
}

list::with_suggestions! { rules }

/// All rules.
pub fn suggestion_rules() -> &'static [&'static SuggestionRule] {
    RULES
}

/// The changes that a recording allows, in the order of the list.
pub fn changes(facts: &Facts<'_>) -> Vec<Box<dyn Change>> {
    RULES.iter().filter_map(|rule| (rule.find)(facts)).collect()
}
