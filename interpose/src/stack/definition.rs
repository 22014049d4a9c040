//! What a capture tells its caller: the text of a new frame, the place of a new stack, and what was lost.

use std::ffi::CStr;

use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId};

/// One line of one function, as a traceback prints it. Borrowed: from the interpreter's own strings where they are
/// ASCII, else from a buffer on the stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrameText<'a> {
    /// The function's name (`co_name`) or an autograd node's type.
    pub(crate) name: &'a str,
    /// The qualified name (`co_qualname`, Python 3.11 and later); else the same as `name`.
    pub(crate) qualname: &'a str,
    /// The file's name, as the code object has it.
    pub(crate) filename: &'a str,
    /// The line being executed, 0 when unknown.
    pub(crate) line: u32,
    /// The first line of the function, 0 when unknown.
    pub(crate) first_line: u32,
}

/// A loaded object that a native frame is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedObject<'a> {
    /// Where it starts in memory.
    pub(crate) start: usize,
    /// Its path as the loader has it; empty for the executable.
    pub(crate) path: &'a CStr,
    /// Its GNU build id, empty where it has none.
    pub(crate) build_id: &'a [u8],
}

/// The call of an `nn.Module`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ModuleCall {
    /// The call from within which it was called.
    pub(crate) caller: ContextId,
    /// Address of the module's object.
    pub(crate) object: usize,
    /// Address of its class.
    pub(crate) class: usize,
}

/// Receives definitions.
///
/// A definition is delivered at least once, on the thread that made the id and before that thread gets to see the id.
/// Another thread may use the id a moment earlier. Duplicates do not happen but would be harmless. No lock is held
/// during a call; the sink may not take a stack.
pub(crate) trait DefinitionSink {
    /// `id` means `text`.
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>);

    /// The id of a loaded object, which is defined if it is new. `NONE` when there is no room.
    fn module(&mut self, _object: &LoadedObject<'_>) -> ModuleId {
        ModuleId::NONE
    }

    /// `id` means: a frame in the code of `module` (`NONE`: in no object) that goes on at `address`, which is relative to the
    /// object's load bias.
    fn native_frame(&mut self, _id: FrameId, _module: ModuleId, _address: u64) {}

    /// `id` means: `frame` called from `parent` (`NONE` for an outermost frame).
    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId);

    /// The id of a module's call, if it has one. `next`: which call it is expected to be, in the order in which they became known; then
    /// which one is expected to follow it. What is expected is compared, never believed.
    fn known_call(&mut self, _call: ModuleCall, _next: &mut u32) -> Option<ContextId> {
        None
    }

    /// The id of a module's call, which is defined if it is new; `class` is its class's name. Where there is no room: that of
    /// something less exact.
    fn new_call(&mut self, call: ModuleCall, _class: &str) -> ContextId {
        call.caller
    }

    /// Whether an object that `Module.__call__` was called on was found to be an `nn.Module`. Said once for each.
    fn modules_verified(&mut self, _works: bool) {}

    /// Something is missing from what this capture gives. To be counted.
    fn lost(&mut self, _what: Loss) {}
}

/// What can be missing from a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loss {
    /// A frame, because a table is full: its caller stands for it.
    Frame,
    /// The outermost frames, because the stack is deeper than [`MAX_DEPTH`](super::thread::MAX_DEPTH).
    Depth,
    /// The outermost native frames, because unwinding information is missing or wrong.
    Unwinding,
    /// The places of the Python frames among the native ones, because the interpreter's own frames do not match them: the native
    /// frames between them are left out.
    Merging,
    /// All of the stack, because the kernel gave no memory.
    Memory,
    /// All of the stack, because the interpreter's layout was being verified on another thread, or could not be on this.
    Unverified,
    /// The end of a name longer than 1 KiB, or of a file name longer than 4 KiB, that is not ASCII.
    Text,
}
