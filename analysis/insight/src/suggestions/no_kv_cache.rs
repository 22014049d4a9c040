//! Forward passes that generate nothing without a key-value cache: `use_cache=False`.

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule};
use super::facts::Facts;
use super::recorded::kv_cache::without_cache;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::NoKvCache,
    action: "use_cache=False for the forward passes outside generate(): no pass reads the keys and values that they \
             cache",
    condition: "Caches of transformers keep the keys and values of layers after the layer's call. Outside generate() \
                no later call joins them with new ones, and the graph does not save them.",
    method: "These keys and values are freed when the call of their layer returns.",
    cost: Cost::Free,
    code: &["output = model(**batch, use_cache=False)  # {call}"],
    link: "https://huggingface.co/docs/transformers/kv_cache",
    at_most: false,
    programs: &["scoring", "pretrain"],
    find,
};

/// The caches that nothing reads are a fact about the recording ([`Facts`]), because checkpointed layers cannot fill
/// any.
#[derive(Debug)]
struct NoKvCache;

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    if facts.unread_cache.is_empty() { None } else { Some(Box::new(NoKvCache)) }
}

impl Change for NoKvCache {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        without_cache(&facts.unread_cache, &mut blocks.spans);
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Eval]
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::ids::{ContextId, StackId};

    use super::*;
    use crate::passes::category::Category;
    use crate::passes::lifetimes::NEVER;
    use crate::suggestions::test_program::{
        COPY, CROP, FIRST, GENERATED_KEYS, KEYS, NET, NODE_OF_FIRST, NODE_OF_SECOND, PRODUCT, Program, REPEAT, SECOND,
    };

    /// A forward pass of two layers that puts 20 MiB into a cache in each, and the cache's blocks.
    fn cached_forward(program: &mut Program, phase: Phase, keys: StackId) -> Vec<usize> {
        let mut cache = Vec::new();
        for layer in [FIRST, SECOND] {
            let entry = program.alloc(20, phase, Category::KvCache, layer);
            program.blocks[entry].start.stack = keys;
            program.blocks[entry].start.is_without_gradients = true;
            cache.push(entry);
            let temporary = program.alloc(30, phase, Category::Temporary, layer);
            program.free(temporary, layer);
        }
        program.alloc(5, phase, Category::Activation, NET);
        cache
    }

    #[test]
    fn keys_and_values_that_nothing_reads_end_with_their_layer() {
        let mut program = Program::default();
        for _ in 0..3 {
            // The new outputs replace the old ones when they are there.
            let earlier: Vec<usize> = (0..program.blocks.len()).filter(|i| program.blocks[*i].freed == NEVER).collect();
            cached_forward(&mut program, Phase::Eval, KEYS);
            earlier.into_iter().for_each(|block| program.free(block, ContextId::NONE));
        }
        assert_eq!(program.peak(), 45 + 40 + 30);
        assert_eq!(program.peak_with(find), 5 + 20 + 30);
    }

    #[test]
    fn caches_that_something_reads_stay() {
        type Reading = fn(&mut Program);
        let append: Reading = |program| {
            let entry = program.alloc(21, Phase::Eval, Category::KvCache, FIRST);
            program.blocks[entry].start.stack = KEYS;
            program.free(0, FIRST);
        };
        let generate: Reading = |program| {
            let entry = program.alloc(21, Phase::Generate, Category::KvCache, FIRST);
            program.blocks[entry].start.stack = GENERATED_KEYS;
            program.free(0, FIRST);
        };
        let continue_twice: Reading = |program| {
            for _ in 0..2 {
                let cache = cached_forward(program, Phase::Eval, KEYS);
                cache.into_iter().for_each(|block| program.free(block, ContextId::NONE));
            }
        };
        let crop: Reading = |program| {
            let entry = program.alloc(10, Phase::Eval, Category::KvCache, ContextId::NONE);
            program.blocks[entry].start.stack = CROP;
        };
        let copy: Reading = |program| {
            let entry = program.alloc(20, Phase::Eval, Category::Unknown, ContextId::NONE);
            program.blocks[entry].start.stack = COPY;
        };
        for (name, read) in
            [("append", append), ("generate", generate), ("twice", continue_twice), ("crop", crop), ("copy", copy)]
        {
            let mut program = Program::default();
            cached_forward(&mut program, Phase::Eval, KEYS);
            read(&mut program);
            assert_eq!(program.peak_with(find), program.peak(), "{name}");
        }
        let mut program = Program::default();
        cached_forward(&mut program, Phase::Generate, KEYS);
        cached_forward(&mut program, Phase::Eval, GENERATED_KEYS);
        assert_eq!(program.peak_with(find), program.peak(), "generation");
    }

    /// In training the graph can need keys and values as well as the cache does.
    #[test]
    fn keys_and_values_that_the_graph_saves_stay() {
        // The layer's allocation beside them, and whether they are freed before the backward pass.
        for (beside, ends_early, is_unread) in [
            (None, false, false),
            (None, true, true),
            (Some((REPEAT, 1)), false, true),
            (Some((PRODUCT, 2)), false, false),
            (Some((PRODUCT, 3)), false, true),
        ] {
            let mut program = Program::default();
            let mut saved = Vec::new();
            for layer in [FIRST, SECOND] {
                let entry = program.activation(20, layer);
                program.blocks[entry].start.stack = KEYS;
                let (stack, count) = beside.unwrap_or((StackId::NONE, 1));
                for _ in 0..count {
                    let repeated = program.activation(40, layer);
                    program.blocks[repeated].start.stack = stack;
                    saved.push(repeated);
                }
            }
            let count = saved.len() as u64;
            let entries: Vec<usize> =
                (0..program.blocks.len()).filter(|i| program.blocks[*i].start.stack == KEYS).collect();
            if ends_early {
                entries.iter().for_each(|entry| program.free(*entry, ContextId::NONE));
            }
            program.passes = 1;
            saved.into_iter().rev().for_each(|block| program.free(block, NODE_OF_FIRST));
            if !ends_early {
                entries.iter().for_each(|entry| program.free(*entry, ContextId::NONE));
            }
            assert_eq!(program.peak(), 40 + 40 * count, "{beside:?}");
            let expected = if is_unread { 20 + 40 * count } else { 40 + 40 * count };
            assert_eq!(program.peak_with(find), expected, "{beside:?} {ends_early}");
        }
    }

    #[test]
    fn keys_and_values_that_a_node_frees_stay() {
        let mut program = Program::default();
        for layer in [FIRST, SECOND] {
            let entry = program.activation(20, layer);
            program.blocks[entry].start.stack = KEYS;
            program.activation(30, layer);
        }
        program.passes = 1;
        program.free(2, NODE_OF_SECOND);
        program.free(0, NODE_OF_FIRST);
        assert_eq!(program.peak_with(find), program.peak());
    }
}
