//! Formats stacks as locations: the program's own line first, then the library's line if that is innermost.

use std::cell::OnceCell;

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::generated::is_inductor_file;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use crate::rules::{alloc_fn_rule, is_library, stands_in_for_kernel};
use crate::stack_summary::{FrameSummary, StackSummary};
use crate::wrappers::Wrappers;

/// The maximum number of frames shown of one stack.
const MAX_FRAMES: usize = 128;

/// Formats the stacks of one recording.
#[derive(Debug)]
pub struct Locations<'a> {
    definitions: &'a Definitions,
    directory: Option<String>,
    wrappers: OnceCell<Wrappers>,
}

impl<'a> Locations<'a> {
    /// The innermost frame of a stack.
    pub fn innermost(&self, stack: StackId) -> FrameId {
        self.definitions.stacks.get(stack.index()).map(|node| node.frame).unwrap_or_default()
    }

    /// The definitions of the recording.
    pub fn definitions(&self) -> &'a Definitions {
        self.definitions
    }

    /// Formats the stacks of `definitions`. Files in `directory` have a path relative to it.
    pub fn new(definitions: &'a Definitions, directory: Option<&std::path::Path>) -> Locations<'a> {
        let directory = directory.and_then(|d| d.to_str()).map(|d| format!("{}/", d.trim_end_matches('/')));
        Locations { definitions, directory, wrappers: OnceCell::new() }
    }

    /// The summary of a stack. For a block of the backward pass it shows the autograd node and the forward call that
    /// made it.
    pub fn stack(&self, stack: StackId, context: ContextId) -> StackSummary {
        let node = self.definitions.context(context);
        let shown = node.map(|c| c.forward).filter(|forward| !forward.is_none()).unwrap_or(stack);
        let frames = self.definitions.walk(shown).filter_map(|(_, frame)| frame);
        let frames = frames.filter(|frame| !stands_in_for_kernel(frame)).take(MAX_FRAMES).map(frame_summary).collect();
        let mut location = self.location(shown);
        if let Some(node) = node {
            location = if location.is_empty() { node.node.to_string() } else { format!("{} of {location}", node.node) };
        }
        StackSummary { location, node: node.map(|c| c.node.to_string()), frames }
    }

    /// Formats a stack: `model.py:88 forward`, `optim/adam.py:94 _init_group, train.py:61`. Without Python frames:
    /// `libnccl.so.2 ncclMalloc [native]`. Empty if nothing is known.
    fn location(&self, stack: StackId) -> String {
        let frames = || self.definitions.walk(stack).filter_map(|(_, frame)| frame);
        let mut python = frames().filter(|frame| !frame.native && !is_skipped(frame)).peekable();
        let Some(innermost) = python.peek().copied() else {
            return self.responsible(stack).map(|(_, frame)| self.native(frame)).unwrap_or_default();
        };
        let own = python.find(|f| !is_library(&f.filename));
        match own {
            Some(own) if std::ptr::eq(own, innermost) => self.line(own, true),
            Some(own) => format!("{}, {}", self.line(own, true), self.line(innermost, true)),
            None => self.line(innermost, true),
        }
    }

    /// The frame that represents a stack. It is the program's own innermost frame, else the innermost Python frame,
    /// else the responsible native frame.
    pub fn own(&self, stack: StackId) -> Option<FrameId> {
        let frames = || {
            let ids = self.definitions.walk_ids(stack);
            ids.filter_map(|(_, id)| self.definitions.frame(id).map(|frame| (id, frame)))
        };
        let python = || frames().filter(|(_, frame)| !frame.native && !is_skipped(frame));
        let own = python().find(|(_, frame)| !is_library(&frame.filename)).or_else(|| python().next());
        own.or_else(|| self.responsible(stack)).map(|(id, _)| id)
    }

    /// The native frame that is responsible for an allocation: neither an allocator nor a wrapper around one.
    fn responsible(&self, stack: StackId) -> Option<(FrameId, &'a Frame)> {
        let definitions = self.definitions;
        let frames = definitions.walk_ids(stack).filter_map(|(_, id)| Some((id, definitions.frame(id)?)));
        let mut frames = frames.filter(|(_, frame)| !stands_in_for_kernel(frame)).peekable();
        let first = frames.peek().copied();
        let is_wrapper = |id| self.wrappers.get_or_init(|| Wrappers::new(definitions)).contains(id);
        frames.find(|(id, frame)| alloc_fn_rule(frame).is_none() && !is_wrapper(*id)).or(first)
    }

    /// Formats a frame: `model.py:88 forward`.
    pub fn frame(&self, frame: &Frame) -> String {
        if frame.native { self.native(frame) } else { self.line(frame, true) }
    }

    fn line(&self, frame: &Frame, named: bool) -> String {
        let file = self.short(&frame.filename);
        let location = format!("{file}:{}", frame.line);
        if named && &*frame.name != "<module>" { format!("{location} {}", frame.name) } else { location }
    }

    fn native(&self, frame: &Frame) -> String {
        let file = self.short(&frame.filename);
        let file = if frame.line > 0 { file } else { file.rsplit('/').next().unwrap_or(file) };
        match frame.line {
            // Nothing is known of the file, or it is one that the CUDA compiler made.
            0 if file == "??" || file.starts_with("tmpxft_") => format!("{} [native]", frame.qualname),
            // A name such as `libfoo.so+0x1234` already contains the file.
            0 if frame.qualname.starts_with(file) => format!("{} [native]", frame.qualname),
            0 => format!("{file} {} [native]", frame.qualname),
            line => format!("{file}:{line} {} [native]", frame.qualname),
        }
    }

    /// The path relative to the program's folder, else its last two components.
    pub fn short<'f>(&self, filename: &'f str) -> &'f str {
        short_path(self.directory.as_deref(), filename)
    }
}

/// The path relative to `directory`, which ends with a slash, else its last two components.
pub fn short_path<'f>(directory: Option<&str>, filename: &'f str) -> &'f str {
    if let Some(rest) = directory.and_then(|d| filename.strip_prefix(d))
        && !is_library(filename)
    {
        return rest;
    }
    let cut = filename.rmatch_indices('/').nth(1).map(|(at, _)| at + 1).unwrap_or(0);
    &filename[cut..]
}

/// Whether a generated line has a known source line. The user wrote that source line, so it is shown instead.
fn explained(frame: &Frame) -> bool {
    !frame.inlined_into.is_none() && is_inductor_file(&frame.filename)
}

/// Whether locations do not name a Python frame.
fn is_skipped(frame: &Frame) -> bool {
    explained(frame) || stands_in_for_kernel(frame) || intercepts_operators(frame)
}

/// Whether a frame is of a library's mode or tensor class that every operator passes through. Its caller calls the
/// operator.
fn intercepts_operators(frame: &Frame) -> bool {
    matches!(&*frame.name, "__torch_function__" | "__torch_dispatch__") && is_library(&frame.filename)
}

/// A frame as reports show it.
pub fn frame_summary(frame: &Frame) -> FrameSummary {
    FrameSummary {
        name: frame.name.to_string(),
        filename: frame.filename.to_string(),
        line: frame.line,
        native: frame.native,
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{Frame, StackNode};

    use super::*;

    #[test]
    fn no_frame_of_the_simulated_cuda_is_a_place() {
        let file = "/cache/site-packages/simcuda/operators.py";
        let simulated = Frame { name: "original".into(), filename: file.into(), line: 148, ..Frame::default() };
        let native = Frame {
            name: "mm_out_cuda".into(),
            qualname: "at::native::mm_out_cuda".into(),
            filename: "/x/torch/lib/libtorch_cuda.so".into(),
            native: true,
            ..Frame::default()
        };
        let definitions = Definitions {
            frames: vec![Frame::default(), simulated, native],
            // None; the native frame; the simulated frame that it calls; the simulated frame alone.
            stacks: [(0, 0), (0, 2), (1, 1), (0, 1)]
                .map(|(parent, frame)| StackNode { parent: StackId(parent), frame: FrameId(frame) })
                .into(),
            ..Definitions::default()
        };
        let locations = Locations::new(&definitions, None);
        let of = |stack| locations.stack(StackId(stack), ContextId::NONE);
        assert_eq!(of(2).location, "libtorch_cuda.so at::native::mm_out_cuda [native]");
        assert_eq!((of(2).frames.len(), of(3).frames.len()), (1, 0));
        assert_eq!((of(3).location.as_str(), locations.own(StackId(3))), ("", None));
    }
}
