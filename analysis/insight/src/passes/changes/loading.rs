//! What loading a model needs beside the model.
//!
//! Tensors that `torch.load` or safetensors allocate on the device and that are freed later: their values are copied to
//! parameters. Loaded to the CPU, they need no device memory.
//!
//! Parameters that loaded tensors replace: `load_state_dict(assign=True)` makes the tensors that it gets parameters of the
//! model. Built on the meta device, the model has no values to replace.
//!
//! Parameters that the module's own conversion (`.half()`, `.to(dtype)`) replaces by smaller ones. Made in the final data
//! type, they are small from the start.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::ids::StackId;

use super::recorded::{BlockEvent, Recorded};
use super::span::Span;
use crate::passes::category::Category;
use crate::passes::lifetimes::NEVER;
use crate::passes::phase::Phase;

/// The files of the functions that load tensors.
const LOADERS: [&str; 2] = ["/torch/serialization.py", "/safetensors/torch.py"];

/// Whether code that loads tensors allocates at a stack.
fn by_loader<'a>(recorded: &'a Recorded<'_>) -> impl FnMut(StackId) -> bool + 'a {
    let mut by_stack: HashMap<StackId, bool> = HashMap::new();
    move |stack| {
        let of_loader = |filename: &str| LOADERS.iter().any(|loader| filename.ends_with(loader));
        *by_stack.entry(stack).or_insert_with(|| {
            let mut frames = recorded.definitions.walk(stack).filter_map(|(_, frame)| frame);
            frames.any(|frame| !frame.native && of_loader(&frame.filename))
        })
    }
}

/// The indices of tensors that are loaded and freed. At an error, those that are allocated count as well.
pub(super) fn loaded(recorded: &Recorded<'_>) -> Vec<u32> {
    let mut is_loaded = by_loader(recorded);
    let blocks = recorded.blocks.iter().enumerate();
    let in_load = blocks.filter(|(_, block)| block.phase == Phase::Load);
    let freed = in_load.filter(|(_, block)| recorded.is_freed(block) || recorded.until < NEVER);
    freed.filter(|(_, block)| is_loaded(block.stack)).map(|(index, _)| index as u32).collect()
}

/// The indices of the blocks that loaded parameters of the same sizes replace. Frees without an allocation between them
/// belong together.
pub(super) fn replaced(recorded: &Recorded<'_>) -> Vec<u32> {
    let mut is_loaded = by_loader(recorded);
    let in_load = recorded.blocks.iter().filter(|block| block.phase == Phase::Load);
    let last = in_load.map(|block| block.allocated).max().unwrap_or(0);
    // By requested size: the loaded parameters that have replaced nothing.
    let mut loaded: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut replaced, mut freed) = (Vec::new(), Vec::new());
    for event in &recorded.events {
        let block = &recorded.blocks[event.block as usize];
        if event.allocates {
            replaced.append(&mut with_equals(std::mem::take(&mut freed), &mut loaded));
            let stays = block.phase == Phase::Load && (block.freed > last || !recorded.is_freed(block));
            if stays && block.category == Category::Parameter && is_loaded(block.stack) {
                *loaded.entry(block.requested()).or_default() += 1;
            }
        } else if block.phase == Phase::Load && !is_loaded(block.stack) {
            freed.push((event.block, block.requested()));
        }
    }
    replaced.append(&mut with_equals(freed, &mut loaded));
    replaced
}

/// Those of the freed blocks that replace loaded parameters: all, if there is a loaded parameter of its size for each.
fn with_equals(freed: Vec<(u32, u64)>, loaded: &mut BTreeMap<u64, usize>) -> Vec<u32> {
    let mut left = loaded.clone();
    let has_equal = |(_, requested): &(u32, u64)| match left.get_mut(requested) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    if freed.is_empty() || !freed.iter().all(has_equal) {
        return Vec::new();
    }
    *loaded = left;
    freed.into_iter().map(|(block, _)| block).collect()
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
