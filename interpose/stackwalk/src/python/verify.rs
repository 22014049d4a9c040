//! Verifies a layout before anything relies on it.
//!
//! The first check is against the interpreter's exports: object sizes in its type objects, and the offsets it
//! publishes. The second is against the live frames of the first thread that runs Python code:
//! - The thread state holds this thread's id.
//! - Every frame refers to an object whose type *is* `PyCode_Type`.
//! - Names are `PyUnicode_Type` objects of plausible length, and tables are `PyBytes_Type` objects.
//! - The instruction is inside the code.
//! - Our line equals that of `PyCode_Addr2Line`.
//! - The chain ends.
//!
//! All reads go through the kernel ([`CheckedMemory`]), so a wrong layout gives a reason, not a crash.

use super::layout::{Bytecode, InstructionKind, Layout, LinesKind, PublishedSlots};
use super::lines;
use super::memory::CheckedMemory;
use super::reason::Reason;
use super::text::Storage;
use super::walk::{FrameWalker, FreeThreadedOffsets};

/// How many frames are checked, at some ten microseconds each. Deeper ones give no further evidence.
const CHECKED_FRAMES: usize = 16;
/// How many frames are followed to see that the chain ends.
const MAX_CHAIN: usize = 2_000;
/// The longest plausible string, line table or code, in bytes or characters.
const MAX_LENGTH: usize = 1 << 28;
/// The longest line table in bytes that is compared with `PyCode_Addr2Line`.
const COMPARED_TABLE: usize = 4096;

/// `PyCode_Addr2Line`.
pub(super) type AddressToLine = unsafe extern "C" fn(*mut std::ffi::c_void, i32) -> i32;

/// The addresses of the exported type objects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    pub(super) code: usize,
    pub(super) frame: usize,
    pub(super) unicode: usize,
    pub(super) bytes: usize,
}

/// The layout of `row`'s version in this process, checked against the interpreter's exports. `runtime` is the address
/// of `_PyRuntime`, 0 if it is not exported.
pub(super) fn check_exports(row: &Layout, types: &Types, runtime: usize) -> Result<Layout, Reason> {
    let memory = CheckedMemory::open()?;
    let mut words = [0; PublishedSlots::WORDS];
    if row.published.is_some() {
        for (word, offset) in words.iter_mut().zip((0..).step_by(8)) {
            *word = memory.word(runtime, offset).ok_or(Reason::PublishedOffsets)?;
        }
    }
    let layout = row.with_published(&words)?;
    let objects = layout.objects;
    let size = |object: usize, field| memory.size(object, field).ok_or(Reason::TypeSizes);
    let code = (size(types.code, objects.basic_size())?, size(types.code, objects.item_size())?);
    let frame = (size(types.frame, objects.basic_size())?, size(types.frame, objects.item_size())?);
    let unicode = size(types.unicode, objects.basic_size())?;
    let expected = &layout.sizes;
    let same = code == expected.code
        && frame.1 == expected.frame.1
        && expected.frame.0.is_none_or(|basic| basic == frame.0)
        && unicode == expected.unicode;
    if same { Ok(layout) } else { Err(Reason::TypeSizes) }
}

/// The result of examining live frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Examined {
    /// At least one Python frame, and all were as expected.
    Frames,
    /// No Python frame, so another attempt is needed.
    NoFrames,
}

/// Checks the frames of the calling thread.
pub(super) struct LiveCheck<'a> {
    pub(super) layout: &'a Layout,
    pub(super) types: &'a Types,
    pub(super) address_to_line: AddressToLine,
    pub(super) memory: CheckedMemory,
}

impl LiveCheck<'_> {
    /// Runs the check. `thread` is the calling thread's thread state, `thread_id` the result of `pthread_self`.
    pub(super) fn run(&self, thread: usize, thread_id: usize) -> Result<Examined, Reason> {
        let layout = self.layout;
        if self.memory.size(thread, layout.thread.thread_id) != Some(thread_id) {
            return Err(Reason::ThreadState);
        }
        let mut frame = self.memory.size(thread, layout.thread.frame).ok_or(Reason::ThreadState)?;
        if let Some(current) = layout.thread.cframe_current
            && frame != 0
        {
            frame = self.memory.size(frame, current).ok_or(Reason::ThreadState)?;
        }
        let mut examined = Examined::NoFrames;
        for depth in 0..MAX_CHAIN {
            if frame == 0 {
                return Ok(examined);
            }
            if !frame.is_multiple_of(8) {
                return Err(Reason::FrameChain);
            }
            if depth < CHECKED_FRAMES && !self.is_shim(frame)? {
                self.check_frame(frame)?;
                examined = Examined::Frames;
            }
            frame = self.memory.size(frame, layout.frame.previous).ok_or(Reason::FrameChain)?;
        }
        Ok(examined)
    }

    fn is_shim(&self, frame: usize) -> Result<bool, Reason> {
        let Some(owner) = self.layout.frame.owner else {
            return Ok(false);
        };
        let mut owned_by = [0];
        if !self.memory.read(frame.wrapping_add(owner.offset), &mut owned_by) || owned_by > [8] {
            return Err(Reason::FrameChain);
        }
        Ok(owned_by >= [owner.first_shim])
    }

    fn check_frame(&self, frame: usize) -> Result<(), Reason> {
        let layout = &self.layout.frame;
        let code = self.memory.size(frame, layout.code).ok_or(Reason::FrameChain)? & layout.code_mask;
        if !self.is_instance(code, self.types.code) {
            return Err(Reason::NotACodeObject);
        }
        let instruction = self.instruction(frame, code)?;
        self.check_instruction(frame, code, instruction)?;
        self.check_code(code)?;
        self.check_line(code, instruction)
    }

    fn is_instance(&self, object: usize, class: usize) -> bool {
        object != 0 && object.is_multiple_of(8) && self.memory.size(object, self.layout.objects.class()) == Some(class)
    }

    /// The position of a frame in its code, in the layout's own form.
    fn instruction(&self, frame: usize, code: usize) -> Result<u32, Reason> {
        let layout = self.layout;
        let Some(offsets) = FreeThreadedOffsets::of(layout, self.types.code) else {
            return self.memory.half(frame, layout.frame.instruction).ok_or(Reason::FrameChain);
        };
        let pointer = self.memory.size(frame, layout.frame.instruction).ok_or(Reason::FrameChain)?;
        let index = layout.thread_bytecode.and_then(|bytecode| self.memory.half(frame, bytecode.index));
        let index = index.ok_or(Reason::FrameChain)? as usize;
        offsets.position(code, pointer, index, |address| self.memory.size(address, 0)).ok_or(Reason::Instruction)
    }

    /// Checks that the instruction is inside the code, at an even offset.
    fn check_instruction(&self, frame: usize, code: usize, instruction: u32) -> Result<(), Reason> {
        let size = |object, field| self.memory.size(object, field).ok_or(Reason::CodeObject);
        let bytes = match self.layout.code.bytecode {
            Bytecode::Bytes { code: field } => {
                let object = size(code, field)?;
                if !self.is_instance(object, self.types.bytes) {
                    return Err(Reason::CodeObject);
                }
                size(object, self.layout.objects.size())?
            }
            Bytecode::Inline { start, .. } => {
                // The layout keeps only the low half of the pointer. Here the whole pointer must be inside the code.
                let pointer = size(frame, self.layout.frame.instruction)?;
                let units = size(code, self.layout.objects.size())?;
                let first = code.wrapping_add(start);
                // In 3.11 and 3.12, one unit before the first instruction means "not started".
                if self.layout.frame.instruction_kind == InstructionKind::Pointer
                    && !(first.wrapping_sub(2)..first.saturating_add(units.saturating_mul(2))).contains(&pointer)
                {
                    return Err(Reason::Instruction);
                }
                units.saturating_mul(2)
            }
        };
        let offset = FrameWalker::instruction_offset(self.layout, code, instruction);
        let inside = offset < 0 || (offset as usize) < bytes;
        if bytes < MAX_LENGTH && offset >= -2 && inside && (offset % 2 == 0 || offset == -1) {
            Ok(())
        } else {
            Err(Reason::Instruction)
        }
    }

    fn check_code(&self, code: usize) -> Result<(), Reason> {
        let layout = &self.layout.code;
        for field in [Some(layout.name), Some(layout.filename), layout.qualname].into_iter().flatten() {
            let string = self.memory.size(code, field).ok_or(Reason::CodeObject)?;
            if !self.is_string(string) {
                return Err(Reason::CodeObject);
            }
        }
        Ok(())
    }

    /// Whether this is a string whose kind, length and characters are consistent: its last character is readable and
    /// followed by a terminating zero.
    fn is_string(&self, string: usize) -> bool {
        let layout = &self.layout.text;
        let (Some(state), Some(length)) =
            (self.memory.half(string, layout.state), self.memory.size(string, layout.length))
        else {
            return false;
        };
        let Some(storage) = Storage::of(layout, state) else {
            return false;
        };
        if !self.is_instance(string, self.types.unicode) || length > MAX_LENGTH {
            return false;
        }
        if !storage.compact {
            return true;
        }
        let start = string.wrapping_add(if storage.ascii { layout.ascii_data } else { layout.compact_data });
        let mut end = [1; 4];
        let width = storage.kind as usize;
        let terminated =
            end.get_mut(..width).is_some_and(|end| self.memory.read(start.wrapping_add(length * width), end));
        terminated && end.iter().take(width).all(|byte| *byte == 0)
    }

    /// Compares our line with that of `PyCode_Addr2Line`, which may be called because the code object is verified.
    fn check_line(&self, code: usize, instruction: u32) -> Result<(), Reason> {
        let layout = &self.layout.code;
        let field = |offset| self.memory.size(code, offset).ok_or(Reason::CodeObject);
        let table = field(layout.lines)?;
        if !self.is_instance(table, self.types.bytes) {
            return Err(Reason::CodeObject);
        }
        let first_line = self.memory.half(code, layout.first_line).ok_or(Reason::CodeObject)?;
        let length = self.memory.size(table, self.layout.objects.size()).ok_or(Reason::CodeObject)?;
        if length > MAX_LENGTH || first_line > i32::MAX as u32 {
            return Err(Reason::CodeObject);
        }
        let mut buffer = [0; COMPARED_TABLE];
        let Some(bytes) = buffer.get_mut(..length) else {
            return Ok(());
        };
        if !self.memory.read(table.wrapping_add(self.layout.objects.bytes()), bytes) {
            return Err(Reason::CodeObject);
        }
        let offset = FrameWalker::instruction_offset(self.layout, code, instruction);
        let ours = lines::line_at(layout.lines_kind, bytes, first_line, offset);
        // `PyCode_Addr2Line` of 3.8 and 3.9 does not know "not started" and returns the first line for it too.
        debug_assert!(layout.lines_kind != LinesKind::Lnotab || offset >= -1);
        let object = std::ptr::with_exposed_provenance_mut(code);
        // SAFETY: the object's type is `PyCode_Type`, and its frame on this thread's stack keeps it alive. The function
        // computes from the line table and changes nothing that the GIL protects.
        let theirs = unsafe { (self.address_to_line)(object, offset) };
        if ours == u32::try_from(theirs).unwrap_or(0) { Ok(()) } else { Err(Reason::LineNumber) }
    }
}
