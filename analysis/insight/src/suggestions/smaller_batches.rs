//! Half the batch, with gradients accumulated over two backward passes.
//!
//! The second half runs after the first, with the gradients of the first present. Each gradient that it computes is
//! added to them and freed.

use super::change::{Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::Recorded;
use super::recorded::batch::{Batches, halve, lasting_places, passing_end};
use super::recorded::span::{Key, Span, after, at};
use crate::passes::category::Category;
use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime};
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::SmallerBatches,
    action: "half the batch, gradients accumulated over two",
    condition: "Each step has one backward pass, and one forward pass for it. A module is called, or a step has \
                inputs.",
    method: "Activations, inputs, autograd temporaries and temporaries of the model halve. Forward and backward run \
             twice. The gradients of the first half exist in the second, which adds its own one by one. What stays for \
             more than a step is as large as before.",
    cost: Cost::SmallerSteps,
    code: &[
        "for part, target in zip(inputs.chunk(2), labels.chunk(2)):  # {call}",
        "    (loss_fn(model(part), target) / 2).backward()",
        "optimizer.step()",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation",
    at_most: false,
    programs: &["decoder", "vit"],
    find,
};

#[derive(Debug, Default)]
pub(super) struct SmallerBatches {
    /// Whether all passes without gradients belong to training steps, so that they have half the batch too.
    evaluates_in_steps: bool,
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    // Without a model and without inputs of a step, nothing shows that the program has a batch.
    let shows_batch = |block: &BlockLifetime| {
        let is_input = block.category == Category::Input && block.start.step != BEFORE_STEPS;
        is_input || !facts.recorded.table.facts(block.start.stack).outermost_compute.is_none()
    };
    let has_batch = !facts.outermost.is_empty() || facts.recorded.blocks.iter().any(shows_batch);
    let is_possible =
        has_batch && facts.batches == Batches::One && facts.gathered.is_empty() && !facts.ends_in_evaluation();
    let in_steps = |block: &BlockLifetime| facts.recorded.is_in_each_step(block.start.stack);
    let without_gradients = || facts.recorded.blocks.iter().filter(|block| block.start.phase.is_forward_only());
    let evaluates_in_steps = without_gradients().next().is_some() && without_gradients().all(in_steps);
    if is_possible { Some(Box::new(SmallerBatches { evaluates_in_steps })) } else { None }
}

impl Change for SmallerBatches {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Batch
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        halve(&facts.recorded, true, &mut blocks.spans);
        accumulate(&facts.recorded, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        if self.evaluates_in_steps { FORWARD_ONLY } else { &[] }
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        // A batch over which gradients are accumulated needs them until its last part.
        other == RuleId::OptimizerInBackward
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
        let begins = event.allocates && block.start.step != BEFORE_STEPS && is_data(block.start.phase);
        if begins && first.is_none_or(|(step, _)| step != block.start.step) {
            first = Some((block.start.step, event.seq));
        }
        let in_backward = event.allocates && block.start.phase == Phase::Backward
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
fn accumulate(recorded: &Recorded<'_>, spans: &mut Vec<Span>) {
    let sections = sections(recorded);
    // Blocks after a section move by its length.
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
            if lasting.contains(&(block.start.stack, block.start.context)) || is_of_process(recorded, block) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suggestions::test_program::one_step;

    #[test]
    fn the_second_half_of_a_batch_runs_beside_the_gradients_of_the_first() {
        let program = one_step();
        assert_eq!(program.peak(), 40 + 100 + 40);
        // Weights, half the activations, gradients of the first half, and one gradient on its way to the others.
        assert_eq!(program.peak_with(find), 40 + 50 + 40 + 20);
    }
}
