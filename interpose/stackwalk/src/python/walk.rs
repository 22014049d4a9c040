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
use super::layout::{Bytecode, Evaluation, FrameLayout, InstructionKind, Layout, ThreadBytecode};
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
            (InstructionKind::ThreadPointer, _) => instruction.cast_signed(),
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
        let (reader, mut frame) = (FrameOffsets::of(&self.layout), leaf);
        for _ in 0..MAX_DEPTH {
            if frame == 0 {
                return false;
            }
            let mut buffer = Buffer::<MAX_NAME_BYTES>::new();
            // SAFETY: a frame of the present chain leads to another one of it, and its executable is an object that
            // lives as long.
            unsafe {
                let raw = reader.read(frame);
                let is_code = raw.code != 0 && load::<usize>(raw.code + self.layout.objects.class()) == self.code_type;
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
        let length = unsafe { load::<usize>(table + self.layout.objects.size()) };
        // SAFETY: a bytes object has `ob_size` bytes there, which never change.
        let bytes = unsafe {
            std::slice::from_raw_parts(with_exposed_provenance::<u8>(table + self.layout.objects.bytes()), length)
        };
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

impl FrameOffsets {
    #[inline]
    fn of(layout: &Layout) -> FrameOffsets {
        let FrameLayout { previous, code, code_mask, instruction, .. } = layout.frame;
        FrameOffsets { previous, code, code_mask, instruction }
    }
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

/// The offsets that the walk needs in a free-threaded build, in bytes, and the type of code objects.
#[derive(Clone, Copy)]
pub(super) struct FreeThreadedOffsets {
    frame: FrameOffsets,
    class: usize,
    code_type: usize,
    size: usize,
    bytecode: usize,
    first_traceable: usize,
    thread_bytecode: ThreadBytecode,
}

impl FreeThreadedOffsets {
    /// `None` for a build with the GIL.
    #[inline]
    pub(super) fn of(layout: &Layout, code_type: usize) -> Option<FreeThreadedOffsets> {
        let thread_bytecode = layout.thread_bytecode?;
        let Bytecode::Inline { start, first_traceable } = layout.code.bytecode else { return None };
        Some(FreeThreadedOffsets {
            frame: FrameOffsets::of(layout),
            class: layout.objects.class(),
            code_type,
            size: layout.objects.size(),
            bytecode: start,
            first_traceable,
            thread_bytecode,
        })
    }

    /// The distance of an instruction from the start of the bytecode that the frame runs, in bytes. `None` if that copy
    /// of the bytecode is not found. `read` reads a word in the code object, or in memory that it refers to.
    ///
    /// While the thread is detached from the interpreter, another thread may replace the array of copies by a larger
    /// one and free it. So what is read there counts only if the instruction is inside that copy.
    #[inline]
    pub(super) fn position(
        self,
        code: usize,
        pointer: usize,
        index: usize,
        read: impl Fn(usize) -> Option<usize>,
    ) -> Option<u32> {
        let bytes = read(code + self.size)?.saturating_mul(2);
        let main = pointer.wrapping_sub(code + self.bytecode);
        if main < bytes {
            return Some(main as u32);
        }
        for _ in 0..3 {
            let copies = read(code + self.thread_bytecode.copies)?;
            let count = read(copies.checked_add(ThreadBytecode::COUNT).filter(|_| copies != 0)?)?;
            if index < count {
                let distance = pointer.wrapping_sub(read(copies + ThreadBytecode::ENTRIES + index * 8)?);
                if distance < bytes {
                    return Some(distance as u32);
                }
            }
        }
        None
    }

    /// The position of the function's first line, for a frame whose own is not found.
    ///
    /// # Safety
    ///
    /// `code` is a live code object.
    #[cold]
    #[inline(never)]
    unsafe fn first_position(self, code: usize) -> u32 {
        // SAFETY: the caller guarantees a live code object, and the verified layout has this field inside it.
        unsafe { load::<u32>(code + self.first_traceable) }.saturating_mul(2)
    }
}

impl FrameReader for FreeThreadedOffsets {
    #[inline]
    unsafe fn read(self, frame: usize) -> RawFrame {
        // SAFETY: the caller guarantees a frame of the present chain. The verified layout has these fields inside it,
        // and an executable is an object, which lives as long as the frame. The array of copies is alive while the
        // thread is attached to the interpreter. While it is detached, the array can be freed between two loads
        // (`_PyMem_FreeDelayed`). Memory of that size stays mapped as long as its allocator keeps the segment.
        unsafe {
            let code = load::<usize>(frame + self.frame.code) & self.frame.code_mask;
            let previous = load(frame + self.frame.previous);
            if code == 0 || load::<usize>(code + self.class) != self.code_type {
                return RawFrame { code, instruction: 0, previous };
            }
            let pointer = load(frame + self.frame.instruction);
            let index = load::<u32>(frame + self.thread_bytecode.index) as usize;
            let position = self.position(code, pointer, index, |address| Some(load(address)));
            let instruction = position.unwrap_or_else(|| self.first_position(code));
            RawFrame { code, instruction, previous }
        }
    }
}

/// The frames of a process, with a function that makes the reader for its build.
pub(super) struct Frames<'a, F> {
    walker: &'a FrameWalker,
    reader: F,
}

impl FrameWalker {
    /// The frames of a build with the GIL.
    #[inline]
    pub(super) fn frames(&self) -> Frames<'_, impl Fn() -> FrameOffsets> {
        Frames { walker: self, reader: || FrameOffsets::of(&self.layout) }
    }

    /// The frames of a free-threaded build. `None` for a build with the GIL.
    #[inline]
    pub(super) fn free_threaded_frames(&self) -> Option<Frames<'_, impl Fn() -> FreeThreadedOffsets>> {
        let offsets = FreeThreadedOffsets::of(&self.layout, self.code_type)?;
        Some(Frames { walker: self, reader: move || offsets })
    }
}

impl<R: FrameReader, F: Fn() -> R> FrameChain for Frames<'_, F> {
    type Reader<'a>
        = R
    where
        Self: 'a;

    #[inline]
    fn reader(&self) -> R {
        (self.reader)()
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
        if let Some(owner) = self.walker.layout.frame.owner {
            // SAFETY: the caller guarantees a frame of the present chain, and the verified layout has this field inside
            // it.
            let owned_by = unsafe { load::<u8>(frame + owner.offset) };
            if owned_by >= owner.first_shim {
                return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable };
            }
            // SAFETY: an executable is an object, and its frame keeps it alive.
            if unsafe { load::<usize>(raw.code + self.walker.layout.objects.class()) } != self.walker.code_type {
                return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable: false };
            }
            if let Bytecode::Inline { first_traceable, .. } = self.walker.layout.code.bytecode {
                // SAFETY: the frame keeps its code object alive, and the verified layout has this field inside it.
                let first = unsafe { load::<i32>(raw.code + first_traceable) }.saturating_mul(2);
                if FrameWalker::instruction_offset(&self.walker.layout, raw.code, raw.instruction) < first {
                    is_cacheable = false;
                    if owned_by != owner.generator {
                        return IdentifiedFrame { meaning: FrameMeaning::HIDDEN, is_cacheable };
                    }
                }
            }
        }
        // SAFETY: the frame keeps its code object alive.
        let (id, call_kind) = unsafe { self.walker.intern_frame(raw.code, raw.instruction, interner, sink) };
        let meaning = FrameMeaning::frame(id);
        // SAFETY: the frame keeps its code object alive, and the instruction was read from the frame.
        let call_kind = call_kind.filter(|_| unsafe { !self.walker.is_leaving(raw.code, raw.instruction) });
        let meaning = call_kind.map_or(meaning, |kind| meaning.as_module_call(kind == CallKind::Inner));
        IdentifiedFrame { meaning, is_cacheable }
    }

    #[inline]
    unsafe fn first_local(&self, frame: usize) -> usize {
        // SAFETY: the caller guarantees a frame of the present chain. It belongs to a function with parameters, so it
        // has a first local variable.
        unsafe { load::<usize>(frame + self.walker.layout.frame.locals) & self.walker.layout.frame.code_mask }
    }

    #[inline]
    unsafe fn class(&self, object: usize) -> usize {
        // SAFETY: the caller guarantees a live object.
        unsafe { load(object + self.walker.layout.objects.class()) }
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
        let Some(class) = (unsafe { self.walker.modules.class(self.walker.layout.objects, object) }) else {
            return no_module;
        };
        let call = ModuleCall { caller, object, class };
        if let Some(context) = sink.find_call(call, next) {
            return CalledModule { class, context };
        }
        if !self.walker.modules.is_module(self.walker.layout.objects, class, sink) {
            return CalledModule { class: if self.walker.modules.is_verified() { class } else { 0 }, context: caller };
        }
        // SAFETY: `class` is the class of a live object.
        let context = sink.add_call(call, unsafe { modules::name(self.walker.layout.objects, class) });
        CalledModule { class, context }
    }
}
