//! Tensors that `torch.load` or safetensors allocate on the device and that are freed later: their values are copied to
//! parameters. Loaded to the CPU, they need no device memory.

use std::collections::HashMap;

use memtrace_trace::ids::StackId;

use super::recorded::Recorded;
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
