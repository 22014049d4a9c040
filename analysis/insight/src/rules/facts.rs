//! Everything that the rules say about one frame. Redaction replaces names and must not change it.

use memtrace_trace::file::Frame;

use super::categories::{captures_graph, category_rule, ends_autocast, is_attention, is_library_module, is_pytorch};
use super::evaluation::{names_evaluation, names_training};
use super::ids::{CategoryRuleId, PhaseRuleId};
use super::native::alloc_fn_rule;
use super::optimizers::optimizer_of;
use super::phases::frame_rule;
use super::workspaces::{UsesCublas, frame_uses_cublas};

/// The facts that the rules give about a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameFacts {
    phase: Option<PhaseRuleId>,
    category: Option<CategoryRuleId>,
    optimizer: Option<&'static str>,
    alloc_fn: Option<&'static str>,
    is_attention: bool,
    is_library_module: bool,
    ends_autocast: bool,
    captures_graph: bool,
    is_pytorch: bool,
    uses_cublas: UsesCublas,
    names_evaluation: bool,
    names_training: bool,
}

impl FrameFacts {
    /// The facts about a frame. A new rule about frames belongs here.
    pub fn of(frame: &Frame) -> FrameFacts {
        FrameFacts {
            phase: frame_rule(frame).map(|rule| rule.id),
            category: category_rule(frame).map(|rule| rule.id),
            optimizer: optimizer_of(frame).map(|rule| rule.name),
            alloc_fn: alloc_fn_rule(frame).map(|rule| rule.name),
            is_attention: is_attention(frame),
            is_library_module: is_library_module(frame),
            ends_autocast: ends_autocast(frame),
            captures_graph: captures_graph(frame),
            is_pytorch: is_pytorch(frame),
            uses_cublas: frame_uses_cublas(frame),
            names_evaluation: names_evaluation(&frame.filename, &frame.name),
            names_training: names_training(&frame.name),
        }
    }
}
