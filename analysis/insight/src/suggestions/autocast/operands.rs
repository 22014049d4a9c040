//! The values that an operation reads.

use super::pass::{Pass, Value};
use super::places::AutogradSite;
use crate::rules::AutocastType;

/// An input is at least as large as 1.56 % (1/64) of the result. Others are indices or labels.
const SMALLEST_INPUT: u64 = 64;
/// The number of values that a product without weights reads.
const FACTORS: usize = 2;

impl Pass<'_, '_> {
    /// The values that the operation reads.
    pub(super) fn inputs(&self, place: &AutogradSite, blocks: &[u32], result: u32) -> Vec<Value> {
        let first = self.block(blocks[0]).allocated;
        let value_of = |block: u32| self.widths[block as usize].map(|width| Value { block, width });
        let before = self.first..blocks[0];
        let mut inputs: Vec<Value> = Vec::new();
        let smallest = self.block(result).requested() / SMALLEST_INPUT;
        let is_large = |value: &Value| self.block(value.block).requested() >= smallest;
        for node in &place.nodes {
            let freed = self.places.freed(*node, &before).iter().filter_map(|index| value_of(*index));
            inputs.extend(freed.filter(is_large));
        }
        // Values that the operation saved are allocated when its node runs. The latest one is an input if the nodes do
        // not show all of them.
        let is_saved = |block: u32| self.is_saved(place, result, block);
        let weight = self.weight(place, result);
        let is_product = place.has(AutocastType::Lower) && weight.is_none();
        let size = weight.and_then(|(_, input)| input).map(|input| self.block(input).requested());
        let is_like = |value: &Value| size.is_none_or(|size| self.block(value.block).requested() == size);
        let is_of_lower = |block: u32| {
            let mut lower = place.nodes.iter().zip(&place.types).filter(|(_, of)| **of == AutocastType::Lower);
            lower.any(|(node, _)| *node == self.block(block).freed_context)
        };
        let own = blocks.iter().filter(|block| **block != result);
        let own = own.filter(|block| if is_product { is_saved(**block) } else { is_of_lower(**block) }).count();
        let shown = inputs.len() + own;
        if shown < if is_product { FACTORS } else { 1 } {
            let mut latest = self.latest(self.values.len(), first).filter(is_large);
            let found = match place.has(AutocastType::Lower) {
                true => latest.find(|value| is_saved(value.block) && is_like(value)),
                false => latest.next().map(|value| self.argument(value, first)),
            };
            inputs.extend(found.filter(|value| !inputs.contains(value)));
        }
        inputs.sort_by_key(|value| value.block);
        inputs.dedup();
        inputs
    }

    /// The latest value before an operation. If it is older than the running call, it is an argument, or any other
    /// value that a variable of the code around the call keeps is.
    pub(super) fn argument(&self, latest: Value, seq: u32) -> Value {
        let mut begun = self.open.iter().rev().map(|(_, begun)| *begun);
        let begins = |number: usize| self.values.get(number).map_or(u32::MAX, |value| value.block);
        if begun.next().is_none_or(|call| latest.block >= begins(call)) {
            return latest;
        }
        let around = begins(begun.next().unwrap_or(0));
        let size = self.block(latest.block).requested();
        let is_variable = |value: &Value| {
            let block = self.block(value.block);
            value.block >= around
                && block.requested() >= size / SMALLEST_INPUT
                && !self.recorded.is_freed_by_node(block)
        };
        let mut variables = self.latest(self.values.len(), seq).filter(is_variable);
        let is_known = variables.all(|other| other.width == latest.width);
        Value { width: if is_known { latest.width } else { self.assumed }, ..latest }
    }

    /// Whether a block is still allocated when the nodes of an operation that save inputs begin.
    pub(super) fn is_saved(&self, place: &AutogradSite, result: u32, block: u32) -> bool {
        let saves = place.nodes.iter().zip(&place.types);
        let saves = saves.filter(|(_, of)| matches!(of, AutocastType::Lower | AutocastType::Float32));
        let runs = saves.filter_map(|(node, _)| self.places.run(self.recorded, *node, self.block(result).allocated));
        let begins = runs.map(|run| self.recorded.events[run.start].seq).min();
        begins.is_none_or(|seq| self.block(block).freed >= seq)
    }
}
