//! KV caches by model: speculative decoding has one for its draft and one for its target.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_insight::passes::{Category, Composition, ModuleKey};
use memtrace_insight::units::{number_text, size_text};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, StackId};

use crate::summary::{GrowingKvCache, ModelKvCache};

/// The caches of each model that grow with its calls, most bytes first. Empty if not several models have one.
pub(crate) fn kv_caches_by_model(
    composition: &Composition,
    definitions: &Definitions,
    growth: &BTreeMap<(StackId, ContextId), u64>,
) -> Vec<ModelKvCache> {
    let caches: BTreeSet<StackId> = composition
        .origins()
        .filter(|(origin, _)| origin.category == Category::KvCache)
        .map(|(o, _)| o.stack)
        .collect();
    let mut by_call: BTreeMap<ContextId, u64> = BTreeMap::new();
    for ((_, call), by) in growth.iter().filter(|((stack, _), _)| caches.contains(stack)) {
        *by_call.entry(*call).or_default() += by;
    }
    // By the object that is called: a program can call a model at several places.
    let mut models: BTreeMap<u64, (ContextId, ModelKvCache)> = BTreeMap::new();
    for (module, category, part) in composition.modules() {
        let (ModuleKey::Call(call), Category::KvCache) = (module, category) else { continue };
        let Some(by) = by_call.get(&call) else { continue };
        let Some((first, model)) = definitions.nn_call_chain(call).last() else { continue };
        let (earliest, cache) = models.entry(model.object).or_insert((first, ModelKvCache::default()));
        *earliest = first.min(*earliest);
        cache.model = model.class.to_string();
        cache.blocks += part.amount.blocks;
        cache.bytes += part.amount.bytes;
        cache.growth_bytes += by;
    }
    let mut models: Vec<_> = models.into_values().collect();
    models.sort_by_key(|(earliest, _)| *earliest);
    let mut named: Vec<ModelKvCache> = models.iter().map(|(_, cache)| cache.clone()).collect();
    for (at, cache) in named.iter_mut().enumerate() {
        let same = |(_, other): &&(ContextId, ModelKvCache)| other.model == cache.model;
        if models.iter().filter(same).count() > 1 {
            let number = models[..=at].iter().filter(same).count();
            cache.model = format!("{} {number}", cache.model);
        }
    }
    named.sort_by_key(|cache| std::cmp::Reverse(cache.bytes));
    if named.len() > 1 { named } else { Vec::new() }
}

impl GrowingKvCache {
    /// The sentence about it.
    pub(crate) fn sentence(&self) -> String {
        let (growth, bytes) = (size_text(self.growth_bytes), size_text(self.bytes));
        let blocks = |blocks| number_text(blocks, "block");
        if self.by_model.is_empty() {
            let blocks = blocks(self.blocks);
            return format!("The KV cache grows by {growth} with each call of the model: {bytes} in {blocks} so far.");
        }
        let text = |one: &ModelKvCache| {
            let (growth, bytes) = (size_text(one.growth_bytes), size_text(one.bytes));
            format!("{} by {growth} ({bytes} in {} so far)", one.model, blocks(one.blocks))
        };
        let models: Vec<String> = self.by_model.iter().map(text).collect();
        format!("The KV caches grow with each call of their model: {}.", models.join(", "))
    }
}
