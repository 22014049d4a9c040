//! Half the batch, with gradients accumulated over two backward passes where the program has one in each step.
//!
//! What depends on the batch halves: activations, inputs of a step, autograd temporaries, and temporaries of forward and
//! backward passes. Weights, gradients, optimizer state, workspaces and copies of weights do not, nor do the gradients of
//! weights that a backward pass adds to existing ones.
//!
//! The second half runs after the first, with the gradients of the first present. Each gradient that it computes is
//! added to them and freed.

use std::collections::{HashMap, HashSet};

use memtrace_trace::ids::{ContextId, StackId};

use super::recorded::Recorded;
use super::span::{Key, Span, after, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;

/// A step's blocks that belong to a later one of its backward passes are at most one in this many parts of the
/// gradients, if the program accumulates gradients.
const SMALL_PART: u64 = 10;

/// A block lasts if its place allocates another one this many steps later. One variable keeps its value until the next
/// step replaces it.
const LASTING_STEPS: u32 = 2;
/// The number of steps in a row that replace a block by a larger one.
const GROWN: u32 = 3;

/// How a program uses batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Batches {
    /// No step has a backward pass.
    Inference,
    /// Each step has one backward pass.
    One,
    /// Each step accumulates the gradients of this many backward passes.
    Accumulated(u16),
    /// A step has several backward passes with gradients of their own.
    Several,
}

/// Whether half the batch halves the block.
pub(super) fn depends_on_batch(recorded: &Recorded<'_>, block: &BlockLifetime, is_training: bool) -> bool {
    let in_model = match block.phase {
        Phase::Forward | Phase::Backward | Phase::Recompute => true,
        Phase::Eval | Phase::Generate | Phase::Rollout => !is_training,
        Phase::Data | Phase::Other => block.step != BEFORE_STEPS,
        // The first batch, if the program makes it before the first step. Data that stays is no batch.
        Phase::Load => block.category == Category::Input && recorded.is_freed(block),
        Phase::Optimizer => false,
    };
    in_model
        && match block.category {
            Category::Activation | Category::Input | Category::KvCache => true,
            Category::AutogradDetail | Category::Temporary => !recorded.is_passing_weight_gradient(block),
            // A part of the graph of a derivative.
            Category::Gradient => recorded.is_freed_by_node(block) && !recorded.is_passing_weight_gradient(block),
            Category::Workspace => recorded.is_no_workspace(block),
            _ => false,
        }
}

/// How the steps of the recording use batches. The last step counts only if there is no other, because it can be cut
/// off.
pub(super) fn batches(recorded: &Recorded<'_>) -> Batches {
    let mut passes: Vec<(u32, Vec<(u16, u64)>)> = Vec::new();
    for block in recorded.blocks.iter().filter(|block| block.phase == Phase::Backward && block.step != BEFORE_STEPS) {
        if passes.last().is_none_or(|(step, _)| *step != block.step) {
            passes.push((block.step, Vec::new()));
        }
        let Some((_, passes)) = passes.last_mut() else { continue };
        if passes.last().is_none_or(|(pass, _)| *pass != block.backward_passes) {
            passes.push((block.backward_passes, 0));
        }
        if let (Category::Gradient, Some((_, bytes))) = (block.category, passes.last_mut()) {
            *bytes += block.size();
        }
    }
    if passes.len() > 1 {
        passes.pop();
    }
    let Some((_, most)) = passes.iter().max_by_key(|(_, passes)| passes.len()) else { return Batches::Inference };
    let (first, all) = (most.first().map_or(0, |(_, bytes)| *bytes), most.iter().map(|(_, bytes)| bytes).sum::<u64>());
    match most.len() {
        1 => Batches::One,
        several if (all - first) <= all / SMALL_PART => Batches::Accumulated(several as u16),
        _ => Batches::Several,
    }
}

/// The places whose blocks stay for more than a step, or are replaced by larger ones in each step. What a training keeps
/// of its batches is as large with smaller ones.
fn lasting_places(recorded: &Recorded<'_>) -> HashSet<(StackId, ContextId)> {
    // By place: its oldest block that is allocated, and how often in a row it was replaced by a larger one.
    let mut places: HashMap<(StackId, ContextId), (&BlockLifetime, u32)> = HashMap::new();
    let mut lasting = HashSet::new();
    let in_step = |block: &&BlockLifetime| {
        block.step != BEFORE_STEPS && matches!(block.phase, Phase::Data | Phase::Forward | Phase::Other)
    };
    for block in recorded.blocks.iter().filter(in_step) {
        let place = (block.stack, block.context);
        let (oldest, grown) = places.entry(place).or_insert((block, 0));
        if oldest.freed <= block.allocated {
            (*oldest, *grown) = (block, 0);
        } else if block.step > oldest.step && block.requested() > oldest.requested() {
            (*oldest, *grown) = (block, *grown + 1);
        }
        if *grown >= GROWN || block.step - oldest.step >= LASTING_STEPS {
            lasting.insert(place);
        }
    }
    lasting
}

/// Halves what depends on the batch.
pub(super) fn halve(recorded: &Recorded<'_>, is_training: bool, spans: &mut [Span]) {
    let kept = if is_training { lasting_places(recorded) } else { kept_places(recorded) };
    for span in spans {
        let block = &recorded.blocks[span.block as usize];
        let is_kept = || kept.contains(&(block.stack, block.context)) && block.category != Category::KvCache;
        if depends_on_batch(recorded, block, is_training) && !is_kept() {
            span.requested = span.requested.div_ceil(2);
        }
    }
}

/// A part of the recording that runs twice: the first event and the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Section {
    step: u32,
    first: u32,
    last: u32,
}

/// The part of each step from its data or its forward pass to the end of its backward pass.
fn sections(recorded: &Recorded<'_>) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let is_data = |phase| matches!(phase, Phase::Data | Phase::Forward | Phase::Other);
    let mut first: Option<(u32, u32)> = None;
    for event in &recorded.events {
        let block = &recorded.blocks[event.block as usize];
        let begins = event.allocates && block.step != BEFORE_STEPS && is_data(block.phase);
        if begins && first.is_none_or(|(step, _)| step != block.step) {
            first = Some((block.step, event.seq));
        }
        let in_backward = event.allocates && block.phase == Phase::Backward
            || !event.allocates && recorded.contexts().is_node(event.context);
        if let (true, Some((step, first))) = (in_backward, first) {
            match sections.last_mut() {
                Some(section) if section.step == step => section.last = event.seq,
                _ => sections.push(Section { step, first, last: event.seq }),
            }
        }
    }
    sections
}

/// Runs the forward and backward pass of each step twice.
pub(super) fn accumulate(recorded: &Recorded<'_>, spans: &mut Vec<Span>) {
    let sections = sections(recorded);
    // What is later than a section moves by its length.
    let length = |section: &Section| after(section.last) - at(section.first) + 1;
    let mut moved: Vec<(Key, Key)> = Vec::with_capacity(sections.len());
    let mut sum = 0;
    for section in &sections {
        sum += length(section);
        moved.push((after(section.last), sum));
    }
    let shift = |key: Key| {
        let later = moved.partition_point(|(end, _)| *end < key);
        if key == Key::MAX || later == 0 { key } else { key + moved[later - 1].1 }
    };
    let lasting = lasting_places(recorded);
    let mut copies = Vec::new();
    for span in spans.iter_mut().filter(|span| span.exists()) {
        let (start, end) = (span.start, span.end);
        (span.start, span.end) = (shift(start), shift(end));
        let next = sections.partition_point(|section| after(section.last) < start);
        let Some(section) = sections.get(next).filter(|section| at(section.first) <= start) else { continue };
        let (last, length) = (after(section.last), length(section));
        let mut copy = Span { start: span.start + length, end: span.end.saturating_add(length), ..*span };
        if end > last {
            let block = &recorded.blocks[span.block as usize];
            if lasting.contains(&(block.stack, block.context)) || is_of_process(recorded, block) {
                // Both halves are in the block, which was not halved, or use it.
                continue;
            }
            if block.category == Category::Gradient {
                // Added to the gradient of the first half, and freed before another node allocates.
                copy.end = shift(passing_end(recorded, block).min(last)) + length;
            } else {
                // The second half replaces it.
                copy.end = span.end;
                span.end = copy.start + 1;
            }
        }
        copy.end = copy.end.max(copy.start + 1);
        copies.push(copy);
    }
    spans.extend(copies);
}

/// Whether a step makes the block only if it does not exist.
fn is_of_process(recorded: &Recorded<'_>, block: &BlockLifetime) -> bool {
    match block.category {
        Category::Parameter | Category::OptimizerState | Category::CommunicationBucket => true,
        Category::Workspace => !recorded.is_no_workspace(block),
        _ => false,
    }
}

/// When a gradient that is only added to another one is freed: before the next allocation of another node.
pub(super) fn passing_end(recorded: &Recorded<'_>, gradient: &BlockLifetime) -> Key {
    let later = &recorded.events[recorded.first_event_after(gradient.allocated)..];
    let next = later.iter().find(|event| event.allocates && event.context != gradient.context);
    next.map_or(Key::MAX, |event| at(event.seq) - 1)
}

/// The places whose blocks are kept while a later iteration allocates another one there: results in a list, or in a
/// tensor that grows. With smaller batches there are more of them, and as many bytes.
///
/// An iteration begins with an allocation outside modules, or where the first allocation of a module is repeated.
pub(super) fn kept_places(recorded: &Recorded<'_>) -> HashSet<(StackId, ContextId)> {
    let mut latest: HashMap<(StackId, ContextId), (u32, u32)> = HashMap::new();
    let mut kept = HashSet::new();
    let (mut iteration, mut first, mut is_outside) = (0, None, false);
    for block in recorded.blocks.iter().filter(|block| block.phase.is_forward_only()) {
        let place = (block.stack, block.context);
        if block.context.is_none() {
            iteration += u32::from(!is_outside);
            first = None;
        } else {
            iteration += u32::from(*first.get_or_insert(place) == place);
        }
        is_outside = block.context.is_none();
        let earlier = latest.insert(place, (block.freed, iteration));
        if earlier.is_some_and(|(freed, then)| freed > block.allocated && then < iteration) {
            kept.insert(place);
        }
    }
    kept
}

/// Halves what an evaluation computes.
pub(super) fn halve_evaluation(recorded: &Recorded<'_>, spans: &mut [Span]) {
    let kept = kept_places(recorded);
    let passes = recorded.blocks.last().map_or(0, |block| block.backward_passes);
    // An evaluation with gradients that an error ends looks like a forward pass of training.
    let is_interrupted = |block: &BlockLifetime| {
        recorded.ends_in_unused_graph && block.phase == Phase::Forward && block.backward_passes == passes
    };
    for span in spans {
        let block = &recorded.blocks[span.block as usize];
        let computed = matches!(block.category, Category::Activation | Category::Temporary | Category::Input);
        if (block.phase.is_forward_only() || is_interrupted(block))
            && computed
            && !kept.contains(&(block.stack, block.context))
        {
            span.requested = span.requested.div_ceil(2);
        }
    }
}
