//! Cycles through C++ that hold a leak, which neither Python's reference counts nor its garbage collector see whole.

use std::collections::HashSet;

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{ContextId, StackId};

use super::sampler::GrowingSource;
use crate::passes::category::is_recorded;
use crate::passes::mark::Mark;
use crate::passes::pass::BlockAllocated;
use crate::rules::{Meaning, stands_in_for_kernel};

/// The second possible cause of a leak in an `autograd.Function`, and its fix.
pub(super) const OR_STORED_ON_CONTEXT: &str = "; or the autograd.Function stores its result on ctx (ctx.y = y), a \
     cycle through C++: ctx.save_for_backward(y)";
/// The fix for gradients that have a graph.
pub(super) const WITHOUT_GRAPH: &str = "backward(create_graph=True) makes each parameter and its gradient keep each \
     other alive, through C++, where no garbage collector sees it: torch.autograd.grad(loss, parameters, \
     create_graph=True), or .grad = None for all parameters when the result has been used";

/// Backward passes whose gradients have a graph of their own.
#[derive(Clone, Debug, Default)]
pub(super) struct GraphsOfGradients {
    /// The latest call of the engine.
    engine: StackId,
    /// The latest such call whose backward pass autograd recorded.
    recorded: StackId,
    /// The sources that allocated in such a backward pass.
    sources: HashSet<(StackId, ContextId)>,
}

impl GraphsOfGradients {
    #[inline]
    pub(super) fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        if allocated.classification.meaning() == Some(Meaning::Engine) {
            self.engine = allocated.block.site.stack;
        }
        if allocated.mark.is(Mark::BACKWARD) && is_recorded(allocated.e.flags) {
            let site = allocated.block.site;
            self.recorded = self.engine;
            // As the sampler identifies sources.
            let stack = if site.context.is_none() { site.stack } else { StackId::NONE };
            self.sources.insert((stack, site.context));
        }
    }

    /// Whether a source allocates in such a backward pass.
    pub(super) fn has(&self, source: &GrowingSource) -> bool {
        self.sources.contains(&source.site)
    }

    /// The call of `backward(create_graph=True)`.
    pub(super) fn call(&self, definitions: &Definitions) -> Option<StackId> {
        calls_backward(definitions, self.recorded).then_some(self.recorded)
    }
}

fn python_frames(definitions: &Definitions, stack: StackId) -> impl Iterator<Item = &Frame> {
    let frames = definitions.walk(stack).filter_map(|(_, frame)| frame);
    frames.filter(|frame| !frame.native && !stands_in_for_kernel(frame))
}

/// Whether the program called `backward()`, not `torch.autograd.grad()`, which sets no `.grad`.
fn calls_backward(definitions: &Definitions, stack: StackId) -> bool {
    python_frames(definitions, stack)
        .any(|frame| &*frame.name == "backward" && frame.filename.ends_with("torch/autograd/__init__.py"))
}

/// Whether a stack is in the forward function of an `autograd.Function`.
pub(in crate::diagnostics) fn is_in_function(definitions: &Definitions, stack: StackId) -> bool {
    let mut frames = python_frames(definitions, stack);
    let is_apply =
        |frame: &Frame| frame.name.ends_with("apply") && frame.filename.ends_with("torch/autograd/function.py");
    frames.next().is_some_and(|inner| inner.name.ends_with("forward")) && frames.next().is_some_and(is_apply)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::StackNode;
    use memtrace_trace::ids::FrameId;

    use super::*;

    /// Definitions with one stack, whose frames are given from the outside to the inside.
    fn stack(frames: &[(&str, &str)]) -> (Definitions, StackId) {
        let mut definitions = Definitions { frames: vec![Frame::default()], ..Definitions::default() };
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: FrameId::NONE });
        let mut parent = StackId::NONE;
        for (name, filename) in frames {
            let frame = FrameId(definitions.frames.len() as u32);
            let (name, filename) = ((*name).into(), (*filename).into());
            definitions.frames.push(Frame { name, filename, ..Frame::default() });
            definitions.stacks.push(StackNode { parent, frame });
            parent = StackId(definitions.stacks.len() as u32 - 1);
        }
        (definitions, parent)
    }

    #[test]
    fn the_forward_function_of_a_function_is_known() {
        let apply = ("Function.apply", "/lib/torch/autograd/function.py");
        let (definitions, inside) = stack(&[("forward", "net.py"), apply, ("forward", "ops.py")]);
        assert!(is_in_function(&definitions, inside));
        let (definitions, module) = stack(&[("_call_impl", "/lib/torch/nn/modules/module.py"), ("forward", "net.py")]);
        assert!(!is_in_function(&definitions, module));
    }

    #[test]
    fn autograd_grad_sets_no_gradients() {
        let engine = "/lib/torch/autograd/__init__.py";
        let (definitions, backward) = stack(&[("step", "train.py"), ("backward", engine), ("_make_grads", engine)]);
        assert!(calls_backward(&definitions, backward));
        let (definitions, grad) = stack(&[("step", "train.py"), ("grad", engine), ("_make_grads", engine)]);
        assert!(!calls_backward(&definitions, grad));
    }
}
