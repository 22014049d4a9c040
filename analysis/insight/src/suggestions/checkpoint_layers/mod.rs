//! Activation checkpointing of the modules that hold most.

mod classes;
mod replay;
mod split;

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::ids::ContextId;

use classes::{MAX_CLASSES, MIN_MODULES, SAME_PEAK, WORTH_CHECKPOINTING, members};

use super::change::{Assumed, Change, ChangedBlocks, Cost, FORWARD_ONLY, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::calls::{Call, Members, calls, calls_with_gradients};
use super::recorded::kv_cache::without_cache;
use super::recorded::span::at;
use crate::passes::category::Category;
use crate::passes::lifetimes::NEVER;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

/// A module that calls no other and allocates at most so many blocks is a single operation: batch normalization
/// allocates its result, the means and the deviations.
const OPERATION_BLOCKS: usize = 3;
/// Another class is checkpointed too if that lowers the peak by at least 5 % (1/20).
const WORTH_ANOTHER_CLASS: u64 = 20;
pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::CheckpointLayers,
    action: "activation checkpointing (torch.utils.checkpoint) of {layers}",
    condition: "At least two modules of one class, not checkpointed and more than a single operation, hold at least a \
                twentieth of the peak. Or a checkpoint that is around several modules of one class runs them again, \
                and their blocks are a twentieth of the peak.",
    method: "Blocks that only the backward pass of such a module needs are freed when the code after them has run. \
             They are allocated again, with the temporaries of the call, when its backward pass begins. Inputs and \
             results stay, but not a result of which only an average is read. An evaluation with gradients keeps \
             what a training pass keeps. Copies of weights stay until autocast ends.",
    cost: Cost::Recomputed,
    code: &[
        "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper",
        "# once, after the model is built: {layers}",
        "checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in {{classes}})",
    ],
    link: "https://docs.pytorch.org/docs/stable/checkpoint.html",
    at_most: false,
    programs: &["compiled", "decoder", "nested", "resnet", "sharded", "unet"],
    find,
};

/// For a run without a backward pass.
pub(super) static WITHOUT_BACKWARD: SuggestionRule = SuggestionRule {
    id: RuleId::CheckpointOrNoGrad,
    action: "activation checkpointing (torch.utils.checkpoint) of {layers}; torch.no_grad(), if this is not \
             training",
    condition: "The run has no backward pass. At least two modules of one class hold at least a twentieth of the \
                peak. The second part is left out if the program has an optimizer, if dropout is active, or if the \
                innermost function with such a name is named after training.",
    method: "Blocks of such a module are freed when the code after them has run, except its result.",
    cost: Cost::Recomputed,
    code: &[
        "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper",
        "# once, after the model is built: {layers}",
        "# if this is no training, this instead: with torch.no_grad(): at {call}",
        "checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in {{classes}})",
    ],
    link: "https://docs.pytorch.org/docs/stable/checkpoint.html",
    at_most: true,
    programs: &["resnet", "vocabulary"],
    find: find_without_backward,
};

/// The checkpointed modules.
#[derive(Debug)]
struct CheckpointLayers {
    rule: &'static SuggestionRule,
    action: &'static str,
    /// Their classes.
    classes: BTreeSet<Box<str>>,
    /// The phases without a backward pass in which they record a graph, and so keep less of it.
    phases: &'static [Phase],
}

impl CheckpointLayers {
    fn of(classes: BTreeSet<Box<str>>) -> CheckpointLayers {
        CheckpointLayers { rule: &RULE, action: RULE.action, classes, phases: &[] }
    }
}

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.ends_in_evaluation() || !facts.run.has_backward {
        return None;
    }
    let Some(classes) = classes_to_checkpoint(facts) else { return split::find(facts, &RULE) };
    let recorded = &facts.recorded;
    let is_evaluated = |call: &Call| {
        let first = call.blocks.first().map(|index| &recorded.blocks[*index as usize]);
        first.is_some_and(|block| FORWARD_ONLY.contains(&block.start.phase))
    };
    let evaluates = calls_with_gradients(recorded, &members(facts, &classes)).iter().any(is_evaluated);
    let phases = if evaluates { FORWARD_ONLY } else { &[] };
    Some(Box::new(CheckpointLayers { phases, ..CheckpointLayers::of(classes) }))
}

fn find_without_backward(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.ends_in_evaluation() || facts.run.has_backward {
        return None;
    }
    let action = if facts.run.trains { RULE.action } else { WITHOUT_BACKWARD.action };
    let classes = classes_to_checkpoint(facts)?;
    Some(Box::new(CheckpointLayers { rule: &WITHOUT_BACKWARD, action, ..CheckpointLayers::of(classes) }))
}

impl Change for CheckpointLayers {
    fn rule(&self) -> &'static SuggestionRule {
        self.rule
    }

    fn order(&self) -> Order {
        Order::Saved
    }

    fn phases(&self) -> &'static [Phase] {
        self.phases
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let recorded = &facts.recorded;
        // A recomputation would fill the cache again, so models that are checkpointed fill none in training.
        let of_training = |(index, _): &&(u32, u32)| recorded.blocks[*index as usize].start.phase == Phase::Forward;
        let filled: Vec<(u32, u32)> = facts.unread_cache.iter().filter(of_training).copied().collect();
        without_cache(&filled, &mut blocks.spans);
        let members = members(facts, &self.classes);
        replay::checkpoint(recorded, &members, &calls_with_gradients(recorded, &members), &mut blocks.spans);
    }

    fn conflicts_with(&self, other: RuleId) -> bool {
        // Both take the same activations away.
        other == RuleId::OffloadActivations
    }

    fn action(&self) -> &'static str {
        self.action
    }

    fn values(&self, facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        vec![("layers", Value::Modules(checkpointed(facts, &self.classes)))]
    }
}

/// The calls that stand for the modules of these classes that allocate something in a forward pass.
fn checkpointed(facts: &Facts<'_>, classes: &BTreeSet<Box<str>>) -> Vec<ContextId> {
    let members = members(facts, classes);
    let called: BTreeSet<u32> = calls(&facts.recorded, &members).iter().map(|call| call.member).collect();
    called.iter().filter_map(|member| members.calls.get(*member as usize - 1).copied()).collect()
}

/// The classes whose checkpointing lowers the peak most; `None` if none does.
fn classes_to_checkpoint(facts: &Facts<'_>) -> Option<BTreeSet<Box<str>>> {
    let replayed = |classes: BTreeSet<Box<str>>| {
        let mut blocks = ChangedBlocks::new(facts, Assumed::Largest);
        CheckpointLayers::of(classes.clone()).apply(facts, &mut blocks);
        (blocks.peak(facts).max(repeated_at_error(facts, &classes, &blocks)), classes)
    };
    let classes = repeated_classes(facts);
    let single = classes.iter().map(|class| BTreeSet::from([class.clone()]));
    let several = single.filter(|classes| checkpointed(facts, classes).len() >= MIN_MODULES);
    let all: Vec<(u64, BTreeSet<Box<str>>)> = several.map(replayed).collect();
    let lowest = all.iter().map(|(peak, _)| *peak).min().filter(|peak| *peak < facts.summed)?;
    let close = all.into_iter().filter(|(peak, _)| *peak <= lowest + lowest / SAME_PEAK);
    let mut best = close.min_by_key(|(peak, classes)| (checkpointed(facts, classes).len(), *peak))?;
    for class in &classes {
        if best.1.contains(class) {
            continue;
        }
        let mut more = best.1.clone();
        more.insert(class.clone());
        let more = replayed(more);
        if more.0 + more.0 / WORTH_ANOTHER_CLASS < best.0 {
            best = more;
        }
    }
    Some(best.1)
}

/// The bytes when the largest module of these classes runs again, beside what the other modules left at the error.
/// Before an error in a forward pass nothing else shows that a module must be repeated as a whole, and a container of
/// all layers would seem better than its layers. 0 without an error. `blocks` are the blocks with these classes
/// checkpointed.
fn repeated_at_error(facts: &Facts<'_>, classes: &BTreeSet<Box<str>>, blocks: &ChangedBlocks) -> u64 {
    let recorded = &facts.recorded;
    if recorded.until == NEVER {
        return 0;
    }
    let interrupted = calls(recorded, &members(facts, classes)).pop().map_or(Vec::new(), |call| call.blocks);
    let error = at(recorded.until);
    let others = blocks.spans.iter().filter(|span| span.exists() && span.start < error && span.end > error);
    let others = others.filter(|span| interrupted.binary_search(&span.block).is_err());
    others.map(|span| recorded.settings.round(span.requested)).sum::<u64>() + largest_call(facts, classes)
}

/// The most bytes that a call of a module of these classes keeps, or kept before the error.
fn largest_call(facts: &Facts<'_>, classes: &BTreeSet<Box<str>>) -> u64 {
    let recorded = &facts.recorded;
    let kept = |call: &Call| -> u64 {
        let end = call.end(recorded);
        let blocks = call.blocks.iter().map(|index| &recorded.blocks[*index as usize]);
        let kept = blocks.filter(|b| b.category == Category::Activation && (b.freed > end || !recorded.is_freed(b)));
        kept.map(|block| block.size()).sum()
    };
    calls(recorded, &members(facts, classes)).iter().map(kept).max().unwrap_or(0)
}

/// The classes of several modules that hold much at the peak and are not checkpointed, most bytes first.
fn repeated_classes(facts: &Facts<'_>) -> Vec<Box<str>> {
    let definitions = facts.recorded.definitions;
    // By class: the bytes, those under activation checkpointing, and the modules.
    let mut classes: BTreeMap<&str, (u64, u64, BTreeSet<u64>)> = BTreeMap::new();
    let blocks = facts.recorded.blocks.iter().filter(|block| block.start.phase == Phase::Forward);
    for block in blocks.filter(|block| block.includes(facts.peak_seq)) {
        let is_checkpointed = facts.recorded.table.facts(block.start.stack).in_checkpoint;
        let mut seen: Vec<&str> = Vec::new();
        let mut context = block.start.context;
        while let Some(call) = definitions.nn_calls.get(&context) {
            if !seen.contains(&&*call.class) {
                seen.push(&call.class);
                let class = classes.entry(&call.class).or_default();
                class.0 += block.size();
                class.1 += if is_checkpointed { block.size() } else { 0 };
            }
            classes.entry(&call.class).or_default().2.insert(call.object);
            context = call.caller;
        }
    }
    let is_worth = |(_, (bytes, checkpointed, modules)): &(&str, (u64, u64, BTreeSet<u64>))| {
        *bytes >= facts.peak / WORTH_CHECKPOINTING && *checkpointed * 2 < *bytes && modules.len() >= MIN_MODULES
    };
    let callers: BTreeSet<&str> = definitions
        .nn_calls
        .values()
        .filter_map(|call| definitions.nn_calls.get(&call.caller))
        .map(|caller| &*caller.class)
        .collect();
    // A single operation keeps its input, which another module made. Nothing is gained by repeating it.
    let is_composed = |class: &str| {
        let members = || Members::repeated(&facts.recorded, &BTreeSet::from([class]));
        callers.contains(class)
            || calls(&facts.recorded, &members()).iter().any(|call| call.blocks.len() > OPERATION_BLOCKS)
    };
    let is_worth = |entry: &(&str, (u64, u64, BTreeSet<u64>))| is_worth(entry) && is_composed(entry.0);
    let mut classes: Vec<_> = classes.into_iter().filter(is_worth).collect();
    classes.sort_by_key(|(class, (bytes, ..))| (std::cmp::Reverse(*bytes), *class));
    classes.into_iter().take(MAX_CLASSES).map(|(class, _)| class.into()).collect()
}

#[cfg(test)]
mod tests {
    use memtrace_replay::AllocatorSettings;
    use memtrace_trace::ids::StackId;

    use super::*;
    use crate::passes::lifetimes::{BlockLifetime, BlockLifetimes};
    use crate::passes::rest_of_step::{EarlierIteration, RestBlock, RestEvent, RestOfStep};
    use crate::passes::stacks::StackTable;
    use crate::suggestions::recorded::{FailedRequest, Recorded};
    use crate::suggestions::test_program::{
        FIRST, Find, MIB, NET, NODE_OF_FIRST, NODE_OF_SECOND, Program, SECOND, definitions, two_blocks,
    };

    const NOTHING: Find = |_| None;
    const LAYERS: Find = |_| Some(Box::new(CheckpointLayers::of(BTreeSet::from(["Block".into()]))));

    #[test]
    fn a_checkpointed_module_keeps_its_result_and_is_computed_again() {
        let program = two_blocks();
        assert_eq!(program.peak(), 110 + 130, "the second forward, with its temporary");
        // The second block beside the first one's result, when it runs and when it runs again.
        assert_eq!(program.peak_with(LAYERS), 10 + 130);
    }

    #[test]
    fn a_result_that_the_modules_own_backward_needs_stays_and_is_computed_again() {
        let mut program = Program::default();
        let mut all = Vec::new();
        for context in [FIRST, SECOND] {
            all.push([program.activation(100, context), program.activation(40, context)]);
        }
        program.passes = 1;
        for (blocks, node) in [(all[1], NODE_OF_SECOND), (all[0], NODE_OF_FIRST)] {
            // The last operation comes first in the backward pass.
            program.free(blocks[1], node);
            program.free(blocks[0], node);
        }
        assert_eq!(program.peak(), 280);
        // The first block's result, then all of the second block: its result from the forward pass ends where its
        // backward pass begins, which allocates it again.
        assert_eq!(program.peak_with(LAYERS), 40 + 140);
    }

    #[test]
    fn a_result_that_is_averaged_is_not_kept() {
        for (averaged, expected) in [(1, 40 + 1 + 150), (40, 40 + 40 + 40 + 150)] {
            let mut program = Program::default();
            let mut all = Vec::new();
            for context in [FIRST, SECOND] {
                all.push([program.activation(100, context), program.activation(40, context)]);
            }
            let rest = [program.activation(averaged, NET), program.activation(150, NET)];
            program.passes = 1;
            program.free(rest[1], ContextId::NONE);
            program.free(rest[0], ContextId::NONE);
            for (blocks, node) in [(all[1], NODE_OF_SECOND), (all[0], NODE_OF_FIRST)] {
                program.free(blocks[1], node);
                program.free(blocks[0], node);
            }
            assert_eq!(program.peak_with(LAYERS), expected, "averaged to {averaged} MiB");
        }
    }

    /// An evaluation with gradients, larger than the training step before it.
    #[test]
    fn an_evaluation_keeps_what_training_does_not_save() {
        let mut program = two_blocks();
        let mut evaluated = Vec::new();
        for context in [FIRST, SECOND] {
            for mib in [60, 200, 20] {
                evaluated.push(program.alloc(mib, Phase::Eval, Category::Activation, context));
            }
            program.free(evaluated[evaluated.len() - 3], context);
        }
        for block in evaluated.iter().skip(1).step_by(3).chain(evaluated.iter().skip(2).step_by(3)) {
            program.free(*block, ContextId::NONE);
        }
        assert_eq!(program.peak(), 60 + 200 + 20 + 200 + 20);
        assert_eq!(program.peak_with(LAYERS), 20 + 60 + 200 + 20);
    }

    #[test]
    fn at_an_error_in_the_forward_pass_the_last_block_of_a_call_is_its_result() {
        let mut program = Program::default();
        for context in [FIRST, SECOND] {
            program.activation(100, context);
            program.activation(10, context);
        }
        let failed = FailedRequest {
            seq: u64::from(program.seq) + 1,
            requested: 50 * MIB,
            at: (StackId::NONE, NET),
            phase: Phase::Forward,
            step: Some(0),
            in_unused_graph: false,
        };
        assert_eq!(program.with_failure(|_| None, failed), 220 + 50);
        assert_eq!(program.with_failure(LAYERS, failed), 10 + 110, "the second call, before the error");
    }

    #[test]
    fn a_checkpointed_module_keeps_its_input() {
        let mut program = Program::default();
        let input = program.activation(10, NET);
        let copied = program.activation(10, FIRST);
        let saved = program.activation(100, FIRST);
        let result = program.activation(10, FIRST);
        // The program's variable gets the result, and autograd does not need the input.
        program.free(input, NET);
        let head = program.activation(150, NET);
        program.passes = 1;
        program.free(head, ContextId::NONE);
        program.free(result, ContextId::NONE);
        let gradient = program.alloc(30, Phase::Backward, Category::AutogradDetail, NODE_OF_FIRST);
        for block in [saved, copied, gradient] {
            program.free(block, NODE_OF_FIRST);
        }
        // Another call, because one module alone is not checkpointed.
        program.activation(1, SECOND);
        assert_eq!(program.peak(), 110 + 10 + 150);
        assert_eq!(program.peak_with(LAYERS), 10 + 10 + 150, "input, result and head");
    }

    /// Two steps, of which the second fails at the request of its second block. The first shows what follows.
    #[test]
    fn after_an_error_the_step_goes_on_as_the_step_before() {
        let mut program = two_blocks();
        let first = program.blocks.clone();
        // The second step up to the request: the first block's forward pass.
        let requests: Vec<&BlockLifetime> = first.iter().filter(|block| block.start.phase == Phase::Forward).collect();
        let at = requests.iter().position(|block| block.start.context == SECOND).expect("the second block");
        let offset = program.seq;
        for block in &requests[..at] {
            let mut again = **block;
            again.allocated += offset;
            again.freed = if block.freed < requests[at].allocated { block.freed + offset } else { NEVER };
            program.blocks.push(again);
        }
        let seq = u64::from(offset + requests[at].allocated);
        let failed = FailedRequest {
            seq,
            requested: requests[at].requested(),
            at: (StackId::NONE, SECOND),
            phase: Phase::Forward,
            step: Some(1),
            in_unused_graph: false,
        };
        let mut numbers: BTreeMap<u32, usize> = BTreeMap::new();
        let mut events: Vec<(u32, RestEvent)> = Vec::new();
        let mut times: Vec<(u32, bool, &BlockLifetime)> = first
            .iter()
            .flat_map(|block| [(block.allocated, true, block), (block.freed, false, block)])
            .filter(|(time, ..)| *time >= requests[at].allocated && *time < NEVER)
            .collect();
        times.sort_by_key(|(time, is_request, _)| (*time, *is_request));
        for (time, is_request, block) in times {
            let earlier = u64::from(block.allocated);
            let event = if is_request {
                let number = numbers.len();
                numbers.insert(block.allocated, number);
                RestEvent::Requested { requested: block.requested(), size: block.size(), stream: 0, earlier }
            } else {
                RestEvent::FreeRequested(match numbers.get(&block.allocated) {
                    Some(number) => RestBlock::New(*number),
                    None => {
                        let seq = earlier + u64::from(offset);
                        RestBlock::Old { addr: 0, size: block.size(), seq, earlier }
                    }
                })
            };
            events.push((time, event));
        }
        let events = events.into_iter().map(|(_, event)| event).collect();
        let rest = RestOfStep { taken_from: EarlierIteration::Step(0), events, peak: 0, uncertain: 0 };
        for find in [NOTHING, LAYERS] {
            assert_eq!(program.with_rest(find, Some(failed), Some(&rest)), two_blocks().peak_with(find));
        }
        let lost = RestOfStep {
            events: vec![RestEvent::Requested { requested: 1, size: 512, stream: 0, earlier: 9999 }],
            ..rest
        };
        let definitions = definitions();
        let table = StackTable::new(&definitions);
        let lifetimes = BlockLifetimes { blocks: program.blocks.clone(), ..BlockLifetimes::default() };
        let settings = AllocatorSettings::default();
        let recorded = Recorded::new(&lifetimes, &definitions, &table, settings, Some(failed), Some(&lost));
        assert!(!recorded.is_continued(), "the blocks of the earlier step are not kept");
    }
}
