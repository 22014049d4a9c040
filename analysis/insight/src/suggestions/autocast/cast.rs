//! The effect of autocast: which blocks halve, which copies are made, and what each node of the backward pass computes.

use std::collections::HashMap;

use memtrace_trace::ids::ContextId;

use super::places::is_weight_gradient;
use crate::passes::phase::Phase;
use crate::rules::{AutocastType, autocast_type};
use crate::suggestions::recorded::Recorded;
use crate::suggestions::recorded::batch::passing_end;
use crate::suggestions::recorded::calls::Call;
use crate::suggestions::recorded::reads::read_until;
use crate::suggestions::recorded::span::{Key, Span, after};

/// The floating-point type of a value under autocast.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Width {
    /// bfloat16.
    Half,
    /// float32.
    Full,
}

use Width::{Full, Half};

/// The effect of autocast.
#[derive(Debug, Default)]
pub(super) struct Cast {
    /// Blocks in bfloat16.
    pub(super) halved: Vec<u32>,
    /// Copies.
    pub(super) copies: Vec<Span>,
    /// Blocks that no node saves any more, and how long an operation in their own type saves them.
    pub(super) unsaved: HashMap<u32, Key>,
    /// How long blocks in bfloat16 are saved by operations in bfloat16.
    pub(super) saved: HashMap<u32, Key>,
    /// Blocks of unknown operations.
    pub(super) unknown: Vec<u32>,
    /// Workspaces: blocks that an operation in bfloat16 allocates and frees before the next allocation.
    pub(super) workspaces: Vec<u32>,
    /// Whether workspaces for bfloat16 are assumed to be missing.
    pub(super) drops_workspaces: bool,
    /// By node: the requested sizes of its inputs and their types; and the type of its result.
    pub(super) inputs: HashMap<ContextId, Vec<(u64, Width)>>,
    pub(super) results: HashMap<ContextId, Width>,
}

impl Cast {
    /// Applies the changes to the spans of the recorded blocks.
    pub(super) fn apply(&self, recorded: &Recorded<'_>, outermost: &[Call], spans: &mut Vec<Span>) {
        let mut reads: HashMap<u32, Key> = HashMap::new();
        if !self.unsaved.is_empty() {
            for call in outermost {
                let ends = read_until(recorded, call);
                reads.extend(call.blocks.iter().copied().zip(ends));
            }
        }
        for (index, saved) in &self.unsaved {
            let next = recorded.blocks.get(*index as usize + 1).map_or(Key::MAX, |next| after(next.allocated));
            let read = reads.get(index).copied().unwrap_or(next);
            let saved = self.saved.get(index).copied().unwrap_or(0).max(*saved);
            spans[*index as usize].end_by(read.max(saved));
        }
        for index in &self.halved {
            spans[*index as usize].requested = spans[*index as usize].requested.div_ceil(2);
        }
        for index in self.workspaces.iter().filter(|_| self.drops_workspaces) {
            spans[*index as usize].vanish();
        }
        let mut added = Vec::new();
        let mut latest = Half;
        for (index, block) in recorded.blocks.iter().enumerate() {
            if block.start.phase != Phase::Backward || !recorded.contexts().is_node(block.start.context) {
                continue;
            }
            let Some(name) = recorded.definitions.contexts.get(block.start.context.index()).map(|of| &*of.node) else {
                continue;
            };
            let span = &mut spans[index];
            let half = span.requested.div_ceil(2);
            let passes = passing_end(recorded, block).clamp(span.start + 1, span.end.max(span.start + 1));
            let is_weight = is_weight_gradient(recorded, block);
            let input = || {
                let inputs = self.inputs.get(&block.start.context);
                let same = inputs.and_then(|all| all.iter().rev().find(|(size, _)| *size == block.requested()));
                same.or_else(|| inputs.and_then(|all| all.last())).map_or(Half, |(_, width)| *width)
            };
            match autocast_type(name) {
                // Cast to the type of the parameter when the node is done.
                AutocastType::Lower if is_weight => added.push(Span { end: passes, requested: half, ..*span }),
                // Partial sums are in float32 anyway. Others are workspaces.
                AutocastType::Lower if block.freed_context == block.start.context && self.drops_workspaces => {
                    span.vanish()
                }
                AutocastType::Lower if block.freed_context == block.start.context => {}
                AutocastType::Lower => {
                    latest = input();
                    match latest {
                        Half => span.requested = half,
                        Full => added.push(Span { end: passes, requested: half, ..*span }),
                    }
                }
                AutocastType::Float32 | AutocastType::Float32WithoutInputs if !is_weight => {
                    latest = input();
                    if latest == Half && block.freed_context != block.start.context && span.exists() {
                        added.push(Span { start: passes - 1, end: span.end.max(passes), requested: half, ..*span });
                        span.end = passes;
                    }
                }
                AutocastType::Widest if !is_weight => {
                    latest = self.results.get(&block.start.context).copied().unwrap_or(latest);
                    if latest == Half {
                        span.requested = half;
                    }
                }
                _ => {}
            }
        }
        spans.extend(added);
        spans.extend(&self.copies);
    }
}
