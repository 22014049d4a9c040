//! The code that loads tensors.

use std::collections::HashMap;

use memtrace_trace::ids::StackId;

use super::Recorded;

/// The files of the functions that load tensors.
const LOADERS: [&str; 2] = ["/torch/serialization.py", "/safetensors/torch.py"];

/// Whether code that loads tensors allocates at a stack.
pub(crate) fn by_loader<'a>(recorded: &'a Recorded<'_>) -> impl FnMut(StackId) -> bool + 'a {
    let mut by_stack: HashMap<StackId, bool> = HashMap::new();
    move |stack| {
        let of_loader = |filename: &str| LOADERS.iter().any(|loader| filename.ends_with(loader));
        *by_stack.entry(stack).or_insert_with(|| {
            let mut frames = recorded.definitions.walk(stack).filter_map(|(_, frame)| frame);
            frames.any(|frame| !frame.native && of_loader(&frame.filename))
        })
    }
}
