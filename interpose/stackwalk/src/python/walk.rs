//! Reads the frames of the calling thread in live memory.
//!
//! This is the event path, and nothing is checked here. The layout was verified ([`super::verify`]). The calling
//! thread's frames, their code objects and their strings cannot change or be freed while the thread is inside a hook.

use std::ptr::with_exposed_provenance;

use memtrace_trace::ids::{ContextId, FrameId};

use super::super::definition::{DefinitionSink, FrameText, Loss, ModuleCall};
use super::super::frame_chain::{CalledModule, FrameChain, FrameReader, IdentifiedFrame, RawFrame};
use super::super::intern::Interner;
use super::super::key_cache::FrameMeaning;
use super::layout::{BYTES_DATA, Bytecode, Evaluation, FrameLayout, InstructionKind, Layout, OB_SIZE, OB_TYPE};
use super::modules::{self, CallKind, ModuleClasses};
use super::text::{self, Buffer};
use super::{freed_code, lines};

/// The longest file name that is converted because it is not ASCII, in bytes of UTF-8.
const MAX_FILENAME_BYTES: usize = 4096;
/// The longest name that is converted because it is not ASCII, in bytes of UTF-8.
const MAX_NAME_BYTES: usize = 1024;

/// The frames of a process, in one layout.
pub(super) struct FrameWalker {
    layout: Layout,
    /// The address of `PyCode_Type`.
    code_type: usize,
    modules: ModuleClasses,
}

/// # Safety
///
/// A readable, aligned value of a plain type is at `address`.
#[inline]
unsafe fn load<T: Copy>(address: usize) -> T {
    // SAFETY: the caller guarantees a readable, aligned value.
    unsafe { with_exposed_provenance::<T>(address).read() }
}

impl FrameWalker {
    /// `layout` must be verified before a frame is read. `code_type` is the address of `PyCode_Type`.
    pub(super) const fn new(layout: Layout, code_type: usize) -> FrameWalker {
        FrameWalker { layout, code_type, modules: ModuleClasses::new() }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The innermost frame of a thread, 0 if it runs no Python code.
    ///
    /// # Safety
    ///
    /// `thread` is the calling thread's live thread state.
    #[inline]
    pub(super) unsafe fn leaf(&self, thread: usize) -> usize {
        let layout = &self.layout.thread;
        // SAFETY: the caller guarantees a live thread state, and the verified layout has this field inside it.
        let frame = unsafe { load::<usize>(thread + layout.frame) };
        match layout.cframe_current {
            // SAFETY: a thread state always has a cframe, which lives as long as it is in use.
            Some(current) if frame != 0 => unsafe { load(frame + current) },
            _ => frame,
        }
    }

    /// Whether `_PyEval_EvalFrameDefault` was called for this frame.
    ///
    /// # Safety
    ///
    /// `frame` belongs to the calling thread's present chain.
    #[inline]
    pub(super) unsafe fn begins_evaluation(&self, frame: usize) -> bool {
        match (self.layout.frame.evaluation, self.layout.frame.owner) {
            // SAFETY: the caller guarantees a live frame, and the verified layout has this field inside it.
            (Evaluation::Entry { offset }, _) => unsafe { load::<u8>(frame + offset) != 0 },
            // SAFETY: the caller guarantees a live frame, and the verified layout has this field inside it.
            (Evaluation::Shim, Some(owner)) => unsafe { load::<u8>(frame + owner.offset) >= owner.first_shim },
            (Evaluation::Every | Evaluation::Shim, _) => true,
        }
    }

    /// The offset of the instruction from the start of the code, in bytes. Negative means not started.
    pub(super) fn instruction_offset(layout: &Layout, code: usize, instruction: u32) -> i32 {
        match (layout.frame.instruction_kind, layout.code.bytecode) {
            (InstructionKind::Index { unit }, _) => instruction.cast_signed().saturating_mul(unit),
            (InstructionKind::Pointer, Bytecode::Inline { start, .. }) => {
                // Code objects are smaller than 2 GiB, so the low halves suffice.
                instruction.wrapping_sub(code.wrapping_add(start) as u32).cast_signed()
            }
            (InstructionKind::Pointer, Bytecode::Bytes { .. }) => -1,
        }
    }

    /// Interns the line that a traceback prints for a frame. Also returns whether the frame calls an `nn.Module`.
    ///
    /// # Safety
    ///
    /// `code` is a live code object.
    unsafe fn intern_frame(
        &self,
        code: usize,
        instruction: u32,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> (FrameId, Option<CallKind>) {
        let layout = &self.layout.code;
        let string = |offset| {
            // SAFETY: the caller guarantees a live code object, and the verified layout has this field inside it.
            unsafe { load::<usize>(code + offset) }
        };
        let mut filename = Buffer::<MAX_FILENAME_BYTES>::new();
        let mut name = Buffer::<MAX_NAME_BYTES>::new();
        let mut qualname = Buffer::<MAX_NAME_BYTES>::new();
        // SAFETY: the caller guarantees a live code object, and the verified layout has this field inside it.
        let first_line = unsafe { load::<u32>(code + layout.first_line) };
        // SAFETY: the caller guarantees a live code object.
        let line = unsafe { self.line(code, instruction, first_line) };
        // SAFETY: the caller guarantees a live code object, which owns its strings.
        let name_text = unsafe { text::read(&self.layout.text, string(layout.name), &mut name) };
        let text = FrameText {
            name: name_text,
            qualname: match layout.qualname {
                // SAFETY: the caller guarantees a live code object, which owns its strings.
                Some(offset) => unsafe { text::read(&self.layout.text, string(offset), &mut qualname) },
                None => name_text,
            },
            // SAFETY: the caller guarantees a live code object, which owns its strings.
            filename: unsafe { text::read(&self.layout.text, string(layout.filename), &mut filename) },
            line,
            first_line,
        };
        let id = interner.frame(&text, sink);
        let call_kind = modules::call_kind(text.filename, text.name);
        if filename.is_truncated() || name.is_truncated() || qualname.is_truncated() {
            sink.lost(Loss::Text);
        }
        (id, call_kind)
    }

    /// Whether this frame or one of its callers belongs to a function of this name.
    ///
    /// # Safety
    ///
    /// `leaf` is 0 or a frame of the calling thread's present chain.
    pub(super) unsafe fn is_in_function(&self, leaf: usize, name: &str) -> bool {
        const MAX_DEPTH: usize = 1000;
        let (reader, mut frame) = (self.reader(), leaf);
        for _ in 0..MAX_DEPTH {
            if frame == 0 {
                return false;
            }
            let mut buffer = Buffer::<MAX_NAME_BYTES>::new();
            // SAFETY: a frame of the present chain leads to another one of it, and its executable is an object that
            // lives as long.
            unsafe {
                let raw = reader.read(frame);
                let is_code = raw.code != 0 && load::<usize>(raw.code + OB_TYPE) == self.code_type;
                if is_code && text::read(&self.layout.text, load(raw.code + self.layout.code.name), &mut buffer) == name
                {
                    return true;
                }
                frame = raw.previous;
            }
        }
        false
    }

    /// Whether a frame at this instruction may be releasing its local variables.
    ///
    /// # Safety
    ///
    /// `code` is a live code object, and the instruction belongs to it.
    unsafe fn is_leaving(&self, code: usize, instruction: u32) -> bool {
        let (Some(leaving), Bytecode::Inline { start, .. }) = (self.layout.frame.leaving, self.layout.code.bytecode)
        else {
            return false;
        };
        let offset = Self::instruction_offset(&self.layout, code, instruction);
        // SAFETY: the caller guarantees that the instruction is inside the live code object.
        offset >= 0 && unsafe { load::<u8>(code + start + offset as usize) } == leaving
    }

    /// # Safety
    ///
    /// `code` is a live code object.
    unsafe fn line(&self, code: usize, instruction: u32, first_line: u32) -> u32 {
        let layout = &self.layout.code;
        let offset = Self::instruction_offset(&self.layout, code, instruction);
        // SAFETY: the caller guarantees a live code object, and the verified layout has this field inside it.
        let table = unsafe { load::<usize>(code + layout.lines) };
        // SAFETY: the table is a bytes object, which the code object owns.
        let length = unsafe { load::<usize>(table + OB_SIZE) };
        // SAFETY: a bytes object has `ob_size` bytes there, which never change.
        let bytes = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(table + BYTES_DATA), length) };
        lines::line_at(layout.lines_kind, bytes, first_line, offset)
    }
}

/// The offsets that the walk needs, in bytes.
#[derive(Clone, Copy)]
pub(super) struct FrameOffsets {
    previous: usize,
    code: usize,
    code_mask: usize,
    instruction: usize,
}

impl FrameReader for FrameOffsets {
    #[inline]
    unsafe fn read(self, frame: usize) -> RawFrame {
        // SAFETY: the caller guarantees a frame of the present chain, and the verified layout has these fields inside
        // it.
        unsafe {
            RawFrame {
                code: load::<usize>(frame.wrapping_add(self.code)) & self.code_mask,
                instruction: load(frame.wrapping_add(self.instruction)),
                previous: load(frame.wrapping_add(self.previous)),
            }
        }
    }
}

impl FrameChain for FrameWalker {
    type Reader<'a> = FrameOffsets;

    #[inline]
    fn reader(&self) -> FrameOffsets {
        let FrameLayout { previous, code, code_mask, instruction, .. } = self.layout.frame;
        FrameOffsets { previous, code, code_mask, instruction }
    }

    #[inline]
    fn freed_code_count(&self) -> usize {
        freed_code::freed_count()
    }

    #[inline]
    fn generation(&self, code: usize) -> u32 {
        freed_code::generation(code)
    }

    /// Hides the frames that CPython's tracebacks omit (`_PyFrame_IsIncomplete`): marks of C code, and frames with an
    /// unfinished prologue, unless a generator owns them.
    ///
    /// The owner is not part of a key, so results that depend on it are not cached. From 3.13 on, marks of C code run
    /// `None` instead of a code object.
    #[cold]
    unsafe fn identify(
        &self,
        frame: usize,
        raw: RawFrame,
        interner: &Interner,
        sink: &mut dyn DefinitionSink,
    ) -> IdentifiedFrame {
        let mut is_cacheable = true;
        if let Some(owner) = self.layout.frame.owner {
            // SAFETY: the caller guarantees a frame of the present chain, and the verified layout has this field inside
            // it.
            let owned_by = unsafe { load::<u8>(frame + owner.offset) };
            if owned_by >= owner.first_shim {
                return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable };
            }
            // SAFETY: an executable is an object, and its frame keeps it alive.
            if unsafe { load::<usize>(raw.code + OB_TYPE) } != self.code_type {
                return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable: false };
            }
            if let Bytecode::Inline { first_traceable, .. } = self.layout.code.bytecode {
                // SAFETY: the frame keeps its code object alive, and the verified layout has this field inside it.
                let first = unsafe { load::<i32>(raw.code + first_traceable) }.saturating_mul(2);
                if Self::instruction_offset(&self.layout, raw.code, raw.instruction) < first {
                    is_cacheable = false;
                    if owned_by != owner.generator {
                        return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable };
                    }
                }
            }
        }
        // SAFETY: the frame keeps its code object alive.
        let (id, call_kind) = unsafe { self.intern_frame(raw.code, raw.instruction, interner, sink) };
        let meaning = FrameMeaning::frame(id);
        // SAFETY: the frame keeps its code object alive, and the instruction was read from the frame.
        let call_kind = call_kind.filter(|_| unsafe { !self.is_leaving(raw.code, raw.instruction) });
        let meaning = call_kind.map_or(meaning, |kind| meaning.as_module_call(kind == CallKind::Inner));
        IdentifiedFrame { meaning, is_cacheable }
    }

    #[inline]
    unsafe fn first_local(&self, frame: usize) -> usize {
        // SAFETY: the caller guarantees a frame of the present chain. It belongs to a function with parameters, so it
        // has a first local variable.
        unsafe { load::<usize>(frame + self.layout.frame.locals) & self.layout.frame.code_mask }
    }

    #[inline]
    unsafe fn class(&self, object: usize) -> usize {
        // SAFETY: the caller guarantees a live object.
        unsafe { load(object + OB_TYPE) }
    }

    unsafe fn called(
        &self,
        object: usize,
        caller: ContextId,
        next: &mut u32,
        sink: &mut dyn DefinitionSink,
    ) -> CalledModule {
        let no_module = CalledModule { class: 0, context: caller };
        if object == 0 {
            return no_module;
        }
        // SAFETY: the frame owns this object if the layout is right, which `modules` verifies before it relies on it.
        let Some(class) = (unsafe { self.modules.class(object) }) else { return no_module };
        let call = ModuleCall { caller, object, class };
        if let Some(context) = sink.find_call(call, next) {
            return CalledModule { class, context };
        }
        if !self.modules.is_module(class, sink) {
            return CalledModule { class: if self.modules.is_verified() { class } else { 0 }, context: caller };
        }
        // SAFETY: `class` is the class of a live object.
        let context = sink.add_call(call, unsafe { modules::name(class) });
        CalledModule { class, context }
    }
}
