//! What the interner tells its caller: the text of a new frame, the place of a new stack.

use memtrace_trace::ids::{FrameId, StackId};

/// One line of one function, as a traceback prints it. Borrowed: from the interpreter's own strings where they are
/// ASCII, else from a buffer on the stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameText<'a> {
    /// The function's name (`co_name`), a native symbol or an autograd node's type.
    pub name: &'a str,
    /// The qualified name (`co_qualname`, Python 3.11 and later); else the same as `name`.
    pub qualname: &'a str,
    /// The file's name, as the code object has it.
    pub filename: &'a str,
    /// The line being executed, 0 when unknown.
    pub line: u32,
    /// The first line of the function, 0 when unknown.
    pub first_line: u32,
}

/// Receives definitions.
///
/// A definition is delivered at least once, on the thread that made the id and before that thread gets to see the id.
/// Another thread may use the id a moment earlier. Duplicates do not happen but would be harmless. No lock is held
/// during a call; the sink may not take a stack.
pub trait DefinitionSink {
    /// `id` means `text`.
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>);

    /// `id` means: `frame` called from `parent` (`NONE` for an outermost frame).
    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId);
}
