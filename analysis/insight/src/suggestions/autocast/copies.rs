//! The copies that an operation makes of its inputs and of its weight.

use memtrace_trace::ids::ContextId;

use super::cast::Cast;
use super::cast::Width::{Full, Half};
use super::pass::{Pass, Value};
use super::places::{AutogradSite, is_weight_gradient};
use crate::rules::AutocastType;
use crate::suggestions::recorded::span::{Key, Span, after, at, before};

impl Pass<'_, '_> {
    /// The gradient of the weight of a linear layer or a convolution, and that of its input if the input needs one.
    pub(super) fn weight(&self, place: &AutogradSite, result: u32) -> Option<(u32, Option<u32>)> {
        let lower = place.nodes.iter().zip(&place.types).filter(|(_, of)| **of == AutocastType::Lower);
        let mut found = None;
        for (node, _) in lower {
            let Some(run) = self.places.run(self.recorded, *node, self.block(result).allocated) else { continue };
            let allocated = self.recorded.events[run].iter().filter(|event| event.allocates).map(|event| event.block);
            let allocated: Vec<u32> = allocated.collect();
            let is_weight = |index: &&u32| is_weight_gradient(self.recorded, self.block(**index));
            let weight = allocated.iter().filter(is_weight).max_by_key(|index| self.block(**index).requested());
            let Some(weight) = weight else { continue };
            let is_input = |index: &u32| {
                let block = self.block(*index);
                !is_weight_gradient(self.recorded, block) && block.freed_context != *node
            };
            let inputs = allocated.iter().copied().filter(is_input);
            found = Some((*weight, inputs.max_by_key(|index| self.block(*index).requested())));
        }
        found
    }

    /// Adds the copies that the operation makes of its inputs and of its weight.
    pub(super) fn copy(&self, place: &AutogradSite, blocks: &[u32], result: u32, inputs: &[Value], cast: &mut Cast) {
        let recorded = self.recorded;
        let begins = self.block(blocks[0]).allocated;
        let ended = after(self.block(result).allocated);
        let done = |node: ContextId| {
            let run = self.places.run(recorded, node, self.block(result).allocated)?;
            Some(after(recorded.events[run.end - 1].seq))
        };
        let copy = |block: u32, number: usize, requested: u64, end: Key| Span {
            start: before(begins, number),
            end: end.max(ended),
            requested,
            block,
            stream_pool: self.block(block).stream_pool,
        };
        let of_type = |of: AutocastType| place.nodes.iter().zip(&place.types).find(|(_, t)| **t == of).map(|(n, _)| *n);
        if let Some(node) = of_type(AutocastType::Lower) {
            let weight = self.weight(place, result);
            let done = done(node);
            for (number, value) in inputs.iter().enumerate() {
                match value.width {
                    Full => {
                        let size = self.block(value.block).requested().div_ceil(2);
                        cast.copies.push(copy(value.block, number, size, done.unwrap_or(0)));
                        if self.block(value.block).freed_context == node {
                            cast.unsaved.entry(value.block).or_insert(0);
                        }
                    }
                    Half => {
                        let saved = cast.saved.entry(value.block).or_insert(0);
                        *saved = (*saved).max(done.unwrap_or(0));
                    }
                }
            }
            if let Some((weight, input)) = weight {
                let size = self.block(weight).requested().div_ceil(2);
                let ends = self.backward_begins(begins);
                let end = if input.is_some() { ends.max(done.unwrap_or(0)) } else { ends };
                cast.copies.push(copy(weight, inputs.len(), size, end));
            }
        } else if let Some(node) = of_type(AutocastType::Float32) {
            for (number, value) in inputs.iter().enumerate().filter(|(_, value)| value.width == Half) {
                let size = self.block(value.block).requested();
                cast.copies.push(copy(value.block, number, size, done(node).unwrap_or(0)));
                if self.block(value.block).freed_context == node {
                    cast.unsaved.entry(value.block).or_insert(0);
                }
            }
        } else if of_type(AutocastType::Float32WithoutInputs).is_some() {
            for (number, value) in inputs.iter().enumerate().filter(|(_, value)| value.width == Half) {
                cast.copies.push(copy(value.block, number, self.block(value.block).requested(), 0));
            }
        }
    }

    /// When the first node after an event runs.
    pub(super) fn backward_begins(&self, seq: u32) -> Key {
        self.nodes.get(self.nodes.partition_point(|node| *node <= seq)).map_or(Key::MAX, |node| at(*node))
    }
}
