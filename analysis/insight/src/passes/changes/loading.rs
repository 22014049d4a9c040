//! What loading a model needs beside the model.
//!
//! Tensors that `torch.load` or safetensors allocate on the device and that are freed later: their values are copied to
//! parameters. Loaded to the CPU, they need no device memory.
//!
//! Parameters that the module's own conversion (`.half()`, `.to(dtype)`) replaces by smaller ones. Made in the final data
//! type, they are small from the start.

use std::collections::HashMap;

use memtrace_trace::ids::StackId;

use super::recorded::{BlockEvent, Recorded};
use super::span::Span;
use crate::passes::lifetimes::NEVER;
use crate::passes::phase::Phase;

/// The files of the functions that load tensors.
const LOADERS: [&str; 2] = ["/torch/serialization.py", "/safetensors/torch.py"];

/// The indices of these blocks. At an error, those that are allocated count as well.
pub(super) fn loaded(recorded: &Recorded<'_>) -> Vec<u32> {
    let mut by_stack: HashMap<StackId, bool> = HashMap::new();
    let mut is_loaded = |stack: StackId| {
        let of_loader = |filename: &str| LOADERS.iter().any(|loader| filename.ends_with(loader));
        *by_stack.entry(stack).or_insert_with(|| {
            let mut frames = recorded.definitions.walk(stack).filter_map(|(_, frame)| frame);
            frames.any(|frame| !frame.native && of_loader(&frame.filename))
        })
    };
    let blocks = recorded.blocks.iter().enumerate();
    let in_load = blocks.filter(|(_, block)| block.phase == Phase::Load);
    let freed = in_load.filter(|(_, block)| recorded.is_freed(block) || recorded.until < NEVER);
    freed.filter(|(_, block)| is_loaded(block.stack)).map(|(index, _)| index as u32).collect()
}

/// The file of `torch.nn.Module`, which converts one parameter after the other.
const MODULE: &str = "/torch/nn/modules/module.py";

/// A parameter, and the smaller one that replaces it. Indices of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Converted {
    from: u32,
    pub(super) to: u32,
}

/// The conversions of parameters to a smaller data type while the model is loaded: the new parameter is allocated, and
/// right after that the old one is freed.
pub(super) fn converted(recorded: &Recorded<'_>) -> Vec<Converted> {
    let is_in_module = |stack: StackId| {
        let (_, frame) =
            recorded.definitions.walk(stack).find(|(_, frame)| frame.is_some_and(|frame| !frame.native))?;
        frame.filter(|frame| frame.filename.ends_with(MODULE))
    };
    let conversion = |pair: &[BlockEvent]| {
        let [new, old] = pair else { return None };
        let (to, from) = (&recorded.blocks[new.block as usize], &recorded.blocks[old.block as usize]);
        let is_conversion = new.allocates
            && !old.allocates
            && to.phase == Phase::Load
            && from.phase == Phase::Load
            && [2, 4].contains(&(from.requested() / to.requested().max(1)))
            && from.requested() % to.requested().max(1) == 0
            && is_in_module(to.stack).is_some();
        is_conversion.then_some(Converted { from: old.block, to: new.block })
    };
    recorded.events.windows(2).filter_map(conversion).collect()
}

/// Makes the parameters in their final data type.
pub(super) fn convert_first(converted: &[Converted], spans: &mut [Span]) {
    for Converted { from, to } in converted {
        spans[*to as usize].start = spans[*from as usize].start;
        spans[*from as usize].vanish();
    }
}
