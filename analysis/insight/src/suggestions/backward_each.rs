//! The backward pass of each micro-batch right after its forward pass, so that the activations of only one exist.

use memtrace_trace::ids::StackId;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::span::{Key, before};
use crate::rules::{RuleId, is_pipelining};

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::BackwardEach,
    action: "backward() right after the forward pass and the loss of each of the {count} micro-batches at {place} \
             instead of after all of them",
    condition: "A step calls one module several times, computes a loss after each call, and runs the backward passes \
                after all of the calls.",
    method: "The forward pass of each micro-batch moves to the end of the backward pass of the one before it.",
    cost: Cost::Free,
    code: &[
        "for inputs, labels in micro_batches:  # {place}",
        "    (loss_fn(model(inputs), labels) / {count}).backward()",
        "optimizer.step()",
    ],
    link: "https://docs.pytorch.org/docs/stable/notes/autograd.html",
    at_most: false,
    programs: &["gpipe", "summed"],
    find,
};

#[derive(Debug)]
struct BackwardEach;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let recorded = &facts.recorded;
    // The schedule of several stages also decides how long each one waits.
    if recorded.definitions.frames.iter().any(|frame| is_pipelining(&frame.filename)) {
        return None;
    }
    if facts.gathered.is_empty() { None } else { Some(Box::new(BackwardEach)) }
}

impl Change for BackwardEach {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Operations
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let events = &facts.recorded.events;
        // By event of a forward pass that moves: its new time.
        let mut moved: Vec<(u32, Key)> = Vec::new();
        for pair in facts.gathered.iter().flat_map(|micro_batches| micro_batches.windows(2)) {
            let [earlier, later] = pair else { continue };
            let Some(next) = events.get(earlier.backward.end) else { continue };
            let forward = events[later.forward.clone()].iter().enumerate();
            moved.extend(forward.map(|(index, event)| (event.seq, before(next.seq, index))));
        }
        moved.sort_unstable();
        let time_of = |seq: u32| Some(moved[moved.binary_search_by_key(&seq, |(seq, _)| *seq).ok()?].1);
        for span in &mut blocks.spans {
            let block = &facts.recorded.blocks[span.block as usize];
            if let Some(start) = time_of(block.allocated) {
                span.start = start;
            }
            if let Some(end) = time_of(block.freed) {
                span.end = end;
            }
            span.end = span.end.max(span.start);
        }
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        use RuleId::{CheckpointLayers, ChunkedCrossEntropy, HalfTheBatch, MoreMicroBatches, SmallerBatches};
        let moves_too = [CheckpointLayers, ChunkedCrossEntropy, HalfTheBatch, MoreMicroBatches, SmallerBatches];
        moves_too.contains(&other) || matches!(other, RuleId::OffloadActivations | RuleId::OptimizerInBackward)
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let Some(last) = facts.gathered.last() else { return Vec::new() };
        let event = last.first().and_then(|micro_batch| facts.recorded.events.get(micro_batch.forward.end - 1));
        let place = event.map_or(StackId::NONE, |event| facts.recorded.blocks[event.block as usize].start.stack);
        vec![("count", Value::Text(last.len().to_string())), ("place", Value::Line(place))]
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::ContextId;

    use super::*;
    use crate::passes::category::Category;
    use crate::passes::phase::Phase;
    use crate::suggestions::test_program::{LOSS, NET, NODE_OF_FIRST, Program};

    /// Two micro-batches; `has_losses` means that a loss follows each of them, and not only both.
    fn gathered(has_losses: bool) -> Program {
        let mut program = Program::default();
        let mut saved = Vec::new();
        for micro_batch in 0..2 {
            saved.push(program.activation(100, NET));
            if has_losses || micro_batch == 1 {
                let loss = program.activation(1, ContextId::NONE);
                program.blocks[loss].start.stack = LOSS;
                saved.push(loss);
            }
        }
        program.passes += 1;
        let gradient = program.alloc(10, Phase::Backward, Category::Gradient, NODE_OF_FIRST);
        saved.into_iter().for_each(|block| program.free(block, NODE_OF_FIRST));
        program.free(gradient, ContextId::NONE);
        program
    }

    #[test]
    fn the_activations_of_one_micro_batch_exist() {
        let program = gathered(true);
        assert_eq!(program.peak(), 2 * 101 + 10);
        assert_eq!(program.peak_with(find), 101 + 10);
    }

    #[test]
    fn two_inputs_of_one_loss_are_no_micro_batches() {
        assert_eq!(gathered(false).peak_with(find), gathered(false).peak());
    }
}
