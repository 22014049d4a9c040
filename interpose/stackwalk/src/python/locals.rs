//! Finds the local variables of Python frames in place. No frame object is created, and no reference count changes.
//!
//! The caller holds the GIL, so no thread runs Python code meanwhile: the frames of all threads stay as they are.

use std::ptr::with_exposed_provenance;

use super::layout::{Bytecode, CodeLayout, FrameLayout, Layout};
use super::memory::CheckedMemory;

/// At most this many frames of one thread are listed.
const MAX_FRAMES: usize = 1000;
/// `f_frame` of a `PyFrameObject`, from 3.11 on, after its header and `f_back`.
const OBJECT_FRAME: usize = 24;
/// The frame inside of a `PyFrameObject` begins before this offset.
const OBJECT_HEAD: usize = 128;
/// How many words of a frame are searched for the address of its frame object.
const FRAME_WORDS: usize = 9;
/// Where the frame inside a generator may begin, from 3.11 on: after its header and before this offset.
const GENERATOR_FRAME: std::ops::Range<usize> = 24..128;
/// `co_varnames`, `co_cellvars` and `co_freevars` are this far before `co_filename`, before 3.11.
const OLD_VARIABLES: [usize; 3] = [32, 16, 24];
/// `co_localsplusnames` is this far before `co_filename`, from 3.11 on.
const NAMES_BEFORE_FILENAME: usize = 16;

/// Reads frames in the verified layout of this interpreter.
#[derive(Clone, Copy)]
pub struct FrameLocals<'a> {
    layout: &'a Layout,
    frame: &'a FrameLayout,
    code: &'a CodeLayout,
    code_type: usize,
}

/// The addresses of a code object's tuples of variable names. Their names together are those of the local variables, in
/// order.
pub(super) type NameTuples = [usize; 3];

/// # Safety
///
/// A readable, aligned word is at `address`.
unsafe fn load(address: usize) -> usize {
    // SAFETY: the caller guarantees a readable, aligned word.
    unsafe { with_exposed_provenance::<usize>(address).read() }
}

impl<'a> FrameLocals<'a> {
    /// The layout is verified.
    pub(super) fn new(layout: &'a Layout, code_type: usize) -> Self {
        FrameLocals { layout, frame: &layout.frame, code: &layout.code, code_type }
    }

    fn has_frame_objects_only(&self) -> bool {
        matches!(self.code.bytecode, Bytecode::Bytes { .. })
    }

    /// The frames of a thread that run Python code, outermost first. The chain is read with checks: until Python 3.12
    /// it begins on the thread's stack, which is gone if the thread was canceled.
    /// `thread` is a thread state, and the calling thread holds the GIL.
    pub fn of_thread(&self, thread: usize, memory: &CheckedMemory) -> Vec<usize> {
        let mut frame = self.leaf(thread, memory).unwrap_or(0);
        let mut frames = Vec::new();
        for _ in 0..MAX_FRAMES {
            let Some(previous) = memory.size(frame, self.frame.previous).filter(|_| frame != 0) else { break };
            if !self.is_shim(frame, memory) && self.has_code(frame, memory) {
                frames.push(frame);
            }
            frame = previous;
        }
        frames.reverse();
        frames
    }

    /// The innermost frame of a thread, 0 if it runs no Python code. `None` if it cannot be read.
    fn leaf(&self, thread: usize, memory: &CheckedMemory) -> Option<usize> {
        let thread_layout = &self.layout.thread;
        let frame = memory.size(thread, thread_layout.frame)?;
        match thread_layout.cframe_current {
            Some(current) if frame != 0 => memory.size(frame, current),
            _ => Some(frame),
        }
    }

    /// Whether a frame is a mark of C code.
    fn is_shim(&self, frame: usize, memory: &CheckedMemory) -> bool {
        let Some(owner) = self.frame.owner else { return false };
        let mut byte = [0];
        !memory.read(frame + owner.offset, &mut byte) || byte >= [owner.first_shim]
    }

    /// The code object of a frame. `None` for a mark of C code.
    ///
    /// # Safety
    ///
    /// `frame` is a live frame, and the calling thread holds the GIL.
    pub unsafe fn code_of(&self, frame: usize) -> Option<usize> {
        // SAFETY: the caller guarantees a live frame. The verified layout has these fields inside it, and a frame keeps
        // its executable alive.
        unsafe {
            if let Some(owner) = self.frame.owner
                && with_exposed_provenance::<u8>(frame + owner.offset).read() >= owner.first_shim
            {
                return None;
            }
            let code = load(frame + self.frame.code) & self.frame.code_mask;
            (code != 0 && load(code + self.layout.objects.class()) == self.code_type).then_some(code)
        }
    }

    /// The tuples of variable names of a code object. An address of 0 stands for no tuple. The caller checks that they
    /// are tuples.
    ///
    /// # Safety
    ///
    /// `code` is a live code object.
    pub unsafe fn names_of(&self, code: usize) -> NameTuples {
        let field = |before: usize| {
            // SAFETY: the caller guarantees a live code object, and these fields precede the verified `co_filename`.
            unsafe { load(code + self.code.filename - before) }
        };
        if self.has_frame_objects_only() {
            // The order in a frame is variables, cells, free variables.
            let [variables, cells, free] = OLD_VARIABLES;
            return [field(variables), field(cells), field(free)];
        }
        [field(NAMES_BEFORE_FILENAME), 0, 0]
    }

    /// The value of a local variable, 0 if it has none.
    ///
    /// # Safety
    ///
    /// `frame` is a live frame of a code object with more than `index` variables, and the calling thread holds the GIL.
    pub unsafe fn value(&self, frame: usize, index: usize) -> usize {
        // SAFETY: the caller guarantees a live frame with this variable.
        unsafe { load(frame + self.frame.locals + index * size_of::<usize>()) & self.frame.code_mask }
    }

    /// The frame of a frame object. `None` if it is not where this interpreter should have it.
    ///
    /// # Safety
    ///
    /// `object` is a live frame object, and the calling thread holds the GIL.
    pub unsafe fn of_frame_object(&self, object: usize, memory: &CheckedMemory) -> Option<usize> {
        if self.has_frame_objects_only() {
            return Some(object);
        }
        let frame = memory.size(object, OBJECT_FRAME)?;
        // While the frame runs, it points back to its object. Afterwards it is inside of it.
        let points_back = || (0..FRAME_WORDS).any(|word| memory.size(frame, word * size_of::<usize>()) == Some(object));
        let is_confirmed = (OBJECT_FRAME..OBJECT_HEAD).contains(&frame.wrapping_sub(object)) || points_back();
        (is_confirmed && self.has_code(frame, memory)).then_some(frame)
    }

    /// The frame inside a generator or coroutine. `None` if it has none that this interpreter should have.
    ///
    /// # Safety
    ///
    /// `object` is a live generator, coroutine or asynchronous generator that has not ended, and the calling thread
    /// holds the GIL.
    pub unsafe fn of_generator(&self, object: usize, memory: &CheckedMemory) -> Option<usize> {
        let owner = self.frame.owner?;
        let is_frame = |frame: &usize| {
            let mut byte = [0];
            memory.read(frame + owner.offset, &mut byte) && byte == [owner.generator] && self.has_code(*frame, memory)
        };
        GENERATOR_FRAME.step_by(size_of::<usize>()).map(|offset| object + offset).find(is_frame)
    }

    fn has_code(&self, frame: usize, memory: &CheckedMemory) -> bool {
        let code = memory.size(frame, self.frame.code).map(|code| code & self.frame.code_mask);
        code.is_some_and(|code| code != 0 && memory.size(code, self.layout.objects.class()) == Some(self.code_type))
    }
}
