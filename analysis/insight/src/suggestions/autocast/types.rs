//! The type of the result of an operation.

use super::cast::Width::{self, Full, Half};
use super::pass::{Pass, Value};
use super::places::{AutogradSite, Kind};
use crate::passes::lifetimes::BlockLifetime;
use crate::rules::AutocastType;

impl Pass<'_, '_> {
    /// The type of one of the results.
    pub(super) fn width(&self, place: &AutogradSite, index: u32, results: usize, inputs: &[Value]) -> Width {
        let block = self.block(index);
        // The saved result of an operation in float32 is allocated when its node runs.
        let is_float32_result = |pass: &Self| {
            let float32 = place.nodes.iter().zip(&place.types);
            let mut float32 =
                float32.filter(|(_, of)| matches!(of, AutocastType::Float32 | AutocastType::Float32WithoutInputs));
            float32.any(|(node, _)| {
                let run = pass.places.run(pass.recorded, *node, block.allocated);
                run.is_none_or(|run| block.freed >= pass.recorded.events[run.start].seq)
            })
        };
        let widest = || inputs.iter().map(|value| value.width).max().unwrap_or(self.assumed);
        let hides = place.hides_operands || place.operations < results;
        match place.kind() {
            Kind::Unknown => self.assumed,
            Kind::Full => Full,
            Kind::Lower => Half,
            Kind::Mixed => {
                let freed_by = place.nodes.iter().zip(&place.types).find(|(node, _)| **node == block.freed_context);
                match freed_by.map(|(_, of)| *of) {
                    Some(AutocastType::Float32 | AutocastType::Float32WithoutInputs) => Full,
                    Some(AutocastType::Lower) => Half,
                    // A program can cast logits to float32 before, which shows nowhere in a recording in float32.
                    Some(AutocastType::Widest) => widest().max(self.assumed),
                    None if place.has(AutocastType::Lower) && !is_float32_result(self) => Half,
                    _ => self.assumed,
                }
            }
            Kind::Widest if place.has_parameter => Full,
            Kind::Widest => match widest() {
                Full => Full,
                Half if !hides => Half,
                Half => self.other_operand(block, inputs).unwrap_or(Half),
            },
        }
    }

    /// The type of the other operand of an addition, or of another operation that saves none of its inputs: an earlier
    /// result of the same code, or what the code around was called with. `None` if there is none of the size.
    pub(super) fn other_operand(&self, result: &BlockLifetime, inputs: &[Value]) -> Option<Width> {
        let (call, begun) = self.open.last().copied()?;
        let is_like =
            |value: &Value| self.block(value.block).requested() == result.requested() && !inputs.contains(value);
        let own = self.latest(self.values.len(), result.allocated);
        let own = own.filter(|value| self.block(value.block).start.context == call);
        let since = self.values.get(begun).map_or(u32::MAX, |value| value.block);
        let own = own.filter(|value| value.block >= since).find(is_like);
        let argument = self.latest(begun, result.allocated).find(is_like);
        let around = self.open.iter().rev().nth(1).map_or(0, |(_, begun)| *begun);
        let outer = self.latest(around, result.allocated).find(is_like);
        let mut widths = [own, argument, outer].into_iter().flatten().map(|value| value.width);
        let first = widths.next()?;
        Some(if widths.all(|width| width == first) { first } else { self.assumed })
    }
}
