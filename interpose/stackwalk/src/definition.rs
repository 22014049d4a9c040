//! Reports of a capture to its caller: the text of a new frame, the position of a new stack, and losses.

use std::ffi::CStr;

use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId};

/// One line of one function, as a traceback prints it. Borrowed from the interpreter's own strings if they are ASCII,
/// otherwise from a buffer on the stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameText<'a> {
    /// The function's name (`co_name`), or the type of an autograd node.
    pub name: &'a str,
    /// The qualified name (`co_qualname`, Python 3.11 and later), otherwise the same as `name`.
    pub qualname: &'a str,
    /// The file name in the code object.
    pub filename: &'a str,
    /// The current line, 0 if unknown.
    pub line: u32,
    /// The first line of the function, 0 if unknown.
    pub first_line: u32,
}

/// The loaded object that contains a native frame.
#[derive(Clone, Copy, Debug)]
pub struct LoadedObject<'a> {
    /// Where it starts in memory.
    pub start: usize,
    /// Its path as the loader has it. Empty for the executable.
    pub path: &'a CStr,
    /// Its GNU build id, empty if it has none.
    pub build_id: &'a [u8],
}

/// A call of an `nn.Module`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModuleCall {
    /// The call that contains this one.
    pub caller: ContextId,
    /// The address of the module's object.
    pub object: usize,
    /// The address of its class.
    pub class: usize,
}

/// Receives definitions.
///
/// A definition is delivered at least once, on the thread that created the id and before that thread gets the id.
/// Another thread may use the id a moment earlier. Duplicates do not happen but would be harmless. No lock is held
/// during a call, and the sink must not capture a stack.
pub trait DefinitionSink {
    /// Defines the frame `id`.
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>);

    /// The id of a loaded object, which is defined if it is new. `NONE` if there is no space.
    fn module(&mut self, _object: &LoadedObject<'_>) -> ModuleId {
        ModuleId::NONE
    }

    /// Defines the native frame `id`: code of `module` (`NONE` if it is in no object) that continues at `address`. The
    /// address is relative to the object's load bias.
    fn native_frame(&mut self, _id: FrameId, _module: ModuleId, _address: u64) {}

    /// Defines the stack `id`: `frame`, called from `parent` (`NONE` for an outermost frame).
    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId);

    /// The id of a module call, if it has one. `next` is the index at which the call is expected, in the order in which
    /// calls were found. On success it becomes the index after it. The expectation is always verified.
    fn find_call(&mut self, _call: ModuleCall, _next: &mut u32) -> Option<ContextId> {
        None
    }

    /// The id of a module call, which is defined if it is new. `class` is the name of its class. If there is no space,
    /// the id of a less exact call.
    fn add_call(&mut self, call: ModuleCall, _class: &str) -> ContextId {
        call.caller
    }

    /// Reports whether an object on which `Module.__call__` was called is an `nn.Module`. Called once for each result.
    fn module_layout_checked(&mut self, _is_verified: bool) {}

    /// Reports that something is missing from this capture, so that it is counted.
    fn lost(&mut self, _loss: Loss) {}
}

/// A part that can be missing from a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// A frame, because a table is full. Its caller stands for it.
    Frame,
    /// The outermost frames, because the stack is deeper than [`MAX_DEPTH`](super::thread::MAX_DEPTH).
    Depth,
    /// The outermost native frames, because unwinding information is missing or wrong.
    Unwinding,
    /// The positions of the Python frames among the native ones, because the interpreter's own frames do not match
    /// them. The native frames between them are omitted.
    Merging,
    /// The whole stack, because the kernel refused memory.
    Memory,
    /// The whole stack, because another thread was verifying the interpreter's layout, or it could not be verified on
    /// this one.
    Unverified,
    /// The end of a text that is not ASCII: a name longer than 1 KiB, or a file name longer than 4 KiB.
    Text,
}
