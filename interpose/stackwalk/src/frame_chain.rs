//! The facts that a walk of frames needs from an interpreter: the frames of a thread, their meaning, and the functions
//! that they call.

use memtrace_trace::ids::ContextId;

use super::definition::DefinitionSink;
use super::intern::Interner;
use super::key_cache::FrameMeaning;

/// One frame of a chain, as read from memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RawFrame {
    /// The address of the code object.
    pub(super) code: usize,
    /// The position in the code, in the interpreter's own form.
    pub(super) instruction: u32,
    /// The address of the caller's frame, 0 at the root.
    pub(super) previous: usize,
}

/// The meaning of a frame that was determined from its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct IdentifiedFrame {
    /// The meaning of the frame.
    pub(super) meaning: FrameMeaning,
    /// Whether the key alone determines the meaning, so that it may be cached.
    pub(super) is_cacheable: bool,
}

/// Reads frames. A small copy of the data it needs, which the loop keeps in registers.
pub(super) trait FrameReader: Copy {
    /// Reads a frame.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the calling thread's present chain.
    unsafe fn read(self, frame: usize) -> RawFrame;
}

/// A source of frames: an interpreter's live memory, or a test's.
pub(super) trait FrameChain {
    /// Reads this chain's frames.
    type Reader<'a>: FrameReader
    where
        Self: 'a;

    /// A reader of this chain's frames.
    fn reader(&self) -> Self::Reader<'_>;

    /// How many code objects have been freed.
    fn freed_code_count(&self) -> usize;

    /// A number that changes whenever a code object at this address is freed, and sometimes without a reason.
    fn generation(&self, code: usize) -> u32;

    /// Determines what a frame is by reading its text.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the calling thread's present chain, and `raw` is its content.
    unsafe fn identify(
        &self,
        frame: usize,
        raw: RawFrame,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> IdentifiedFrame;

    /// The object in a frame's first local variable, 0 if there is none.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the calling thread's present chain.
    unsafe fn first_local(&self, frame: usize) -> usize;

    /// The class of an object.
    ///
    /// # Safety
    ///
    /// `object` points to a live object.
    unsafe fn class(&self, object: usize) -> usize;

    /// Determines what was called. `object` was called within `caller`, in a frame whose meaning is a call. `next` is
    /// passed to [`DefinitionSink::find_call`].
    ///
    /// # Safety
    ///
    /// [`Self::first_local`] has returned `object` for that frame, which belongs to the calling thread's present chain.
    unsafe fn called(
        &self,
        object: usize,
        caller: ContextId,
        next: &mut u32,
        sink: &mut dyn DefinitionSink,
    ) -> CalledModule;
}

/// The result of examining a called object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CalledModule {
    /// The address of its class, 0 if it cannot be read.
    pub(super) class: usize,
    /// The context of the call, or the caller's if it is no call of a module.
    pub(super) context: ContextId,
}
