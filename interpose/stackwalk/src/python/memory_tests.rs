//! Tests the walker and the checks with synthetic objects in a synthetic layout.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;

use memtrace_trace::ids::{FrameId, StackId};

use super::super::definition::{DefinitionSink, FrameText};
use super::super::intern::Interner;
use super::super::thread::ThreadStacks;
use super::layout::{
    Bytecode, CodeLayout, Evaluation, FrameLayout, InstructionKind, Layout, LinesKind, ObjectLayout, Owner, TextLayout,
    ThreadLayout, TypeSizes, Version,
};
use super::memory::CheckedMemory;
use super::reason::Reason;
use super::verify::{self, Examined, LiveCheck, Types};
use super::walk::FrameWalker;

/// A layout that no CPython has.
const LAYOUT: Layout = Layout {
    version: Version { major: 3, minor: 99 },
    objects: ObjectLayout::WITH_GIL,
    thread: ThreadLayout { frame: 40, cframe_current: Some(24), thread_id: 8 },
    frame: FrameLayout {
        previous: 16,
        code: 32,
        code_mask: !7,
        instruction: 24,
        instruction_kind: InstructionKind::Pointer,
        owner: Some(Owner { offset: 5, generator: 1, first_shim: 3 }),
        locals: 40,
        leaving: None,
        evaluation: Evaluation::Shim,
    },
    code: CodeLayout {
        name: 64,
        qualname: Some(24),
        filename: 32,
        first_line: 44,
        lines: 48,
        lines_kind: LinesKind::Ranges,
        bytecode: Bytecode::Inline { start: 72, first_traceable: 56 },
    },
    text: TextLayout {
        length: 16,
        state: 28,
        ascii_data: 32,
        compact_data: 48,
        data_pointer: 48,
        state_shifts: &[2, 16],
    },
    sizes: TypeSizes { code: (72, 2), frame: (None, 8), unicode: 56 },
    thread_bytecode: None,
    published: None,
};

/// The same layout with frames and bytecode as before 3.11.
const OLD: Layout = Layout {
    thread: ThreadLayout { frame: 16, cframe_current: None, thread_id: 8 },
    frame: FrameLayout {
        code_mask: !0,
        instruction_kind: InstructionKind::Index { unit: 2 },
        owner: None,
        ..LAYOUT.frame
    },
    code: CodeLayout { bytecode: Bytecode::Bytes { code: 56 }, qualname: None, ..LAYOUT.code },
    ..LAYOUT
};

const GENERATOR: u8 = 1;
const SHIM: u8 = 3;
const THREAD_ID: usize = 0x7777;
/// Bytecode units, and the matching line table: one line for each two units.
const UNITS: usize = 8;
const LINES: [u8; 8] = [4, 0, 4, 1, 4, 1, 4, 1];

/// Objects that keep their addresses for the whole test.
struct FakeHeap {
    layout: Layout,
    objects: Vec<Box<[u64]>>,
    types: Types,
}

/// The address of a function's code object.
#[derive(Clone, Copy)]
struct Code(usize);

impl FakeHeap {
    fn new(layout: Layout) -> FakeHeap {
        let mut heap = FakeHeap { layout, objects: vec![], types: Types { code: 0, frame: 0, unicode: 0, bytes: 0 } };
        let mut type_object = |(basic, item): (usize, usize)| {
            let object = heap.allocate(56);
            heap.put(object + 32, basic);
            heap.put(object + 40, item);
            object
        };
        let code = type_object(layout.sizes.code);
        let frame = type_object((1234, layout.sizes.frame.1));
        let unicode = type_object((layout.sizes.unicode, 0));
        let bytes = type_object((33, 1));
        heap.types = Types { code, frame, unicode, bytes };
        heap
    }

    fn allocate(&mut self, bytes: usize) -> usize {
        let object = vec![0u64; bytes.div_ceil(8) + 1].into_boxed_slice();
        let address = object.as_ptr().expose_provenance();
        self.objects.push(object);
        address
    }

    /// Writes into the object that contains this address.
    fn put_bytes(&mut self, address: usize, bytes: &[u8]) {
        let object = self.objects.iter_mut().find(|object| {
            let start = object.as_ptr().addr();
            (start..start + object.len() * 8).contains(&address)
        });
        let object = object.expect("inside an object");
        let offset = address - object.as_ptr().addr();
        for (index, byte) in bytes.iter().enumerate() {
            let at = offset + index;
            let shift = at % 8 * 8;
            object[at / 8] = object[at / 8] & !(0xff << shift) | u64::from(*byte) << shift;
        }
    }

    fn put(&mut self, address: usize, value: usize) {
        self.put_bytes(address, &value.to_le_bytes());
    }

    fn text(&mut self, text: &str) -> usize {
        assert!(text.is_ascii());
        let layout = self.layout.text;
        let object = self.allocate(layout.ascii_data + text.len() + 1);
        let unicode = self.types.unicode;
        self.put(object + 8, unicode);
        self.put(object + layout.length, text.len());
        self.put_bytes(object + layout.state, &(0b110_0100_u32).to_le_bytes());
        self.put_bytes(object + layout.ascii_data, text.as_bytes());
        object
    }

    fn bytes(&mut self, bytes: &[u8]) -> usize {
        let object = self.allocate(32 + bytes.len() + 1);
        let bytes_type = self.types.bytes;
        self.put(object + 8, bytes_type);
        self.put(object + 16, bytes.len());
        self.put_bytes(object + 32, bytes);
        object
    }

    fn code(&mut self, name: &str, filename: &str, first_line: u32) -> Code {
        let layout = self.layout.code;
        let code = self.allocate(layout_size(&self.layout));
        let (name, filename, lines) = (self.text(name), self.text(filename), self.bytes(&LINES));
        let code_type = self.types.code;
        self.put(code + 8, code_type);
        self.put(code + 16, UNITS);
        self.put(code + layout.name, name);
        self.put(code + layout.filename, filename);
        self.put_bytes(code + layout.first_line, &first_line.to_le_bytes());
        self.put(code + layout.lines, lines);
        if let Some(qualname) = layout.qualname {
            let object = self.text("Class.method");
            self.put(code + qualname, object);
        }
        match layout.bytecode {
            Bytecode::Bytes { code: field } => {
                let bytecode = self.bytes(&[0; UNITS * 2]);
                self.put(code + field, bytecode);
            }
            // Instructions before unit 2 are a prologue.
            Bytecode::Inline { first_traceable, .. } => self.put_bytes(code + first_traceable, &2u32.to_le_bytes()),
        }
        Code(code)
    }

    /// A frame of `code` at an instruction (in units), called from `previous`.
    fn frame(&mut self, code: Code, unit: usize, owner: u8, previous: usize) -> usize {
        let layout = self.layout.frame;
        let frame = self.allocate(48);
        self.put(frame + layout.previous, previous);
        let tag = usize::from(layout.code_mask != !0);
        self.put(frame + layout.code, code.0 | tag);
        if let Some(field) = layout.owner {
            self.put_bytes(frame + field.offset, &[owner]);
        }
        self.move_to(frame, code, unit);
        frame
    }

    fn move_to(&mut self, frame: usize, code: Code, unit: usize) {
        let at = frame + self.layout.frame.instruction;
        match self.layout.code.bytecode {
            Bytecode::Inline { start, .. } => self.put(at, code.0 + start + unit * 2),
            Bytecode::Bytes { .. } => self.put_bytes(at, &(unit as u32).to_le_bytes()),
        }
    }

    fn thread(&mut self, leaf: usize) -> usize {
        let layout = self.layout.thread;
        let thread = self.allocate(64);
        self.put(thread + layout.thread_id, THREAD_ID);
        match layout.cframe_current {
            Some(current) => {
                let cframe = self.allocate(48);
                self.put(thread + layout.frame, cframe);
                self.put(cframe + current, leaf);
            }
            None => self.put(thread + layout.frame, leaf),
        }
        thread
    }

    fn check(&self, thread: usize) -> Result<Examined, Reason> {
        let memory = CheckedMemory::open()?;
        let check = LiveCheck { layout: &self.layout, types: &self.types, address_to_line, memory };
        check.run(thread, THREAD_ID)
    }
}

fn layout_size(layout: &Layout) -> usize {
    layout.sizes.code.0 + UNITS * 2 + 8
}

thread_local! {
    static FIRST_LINE: Cell<i32> = const { Cell::new(0) };
}

/// Stands for `PyCode_Addr2Line`. All code objects here start at `FIRST_LINE`.
unsafe extern "C" fn address_to_line(_code: *mut c_void, offset: i32) -> i32 {
    FIRST_LINE.get() + if offset < 0 { 0 } else { offset / 4 }
}

#[derive(Default)]
struct TextSink {
    frames: HashMap<FrameId, String>,
    stacks: HashMap<StackId, (StackId, FrameId)>,
}

impl DefinitionSink for TextSink {
    fn frame(&mut self, id: FrameId, text: &FrameText<'_>) {
        let FrameText { name, qualname, filename, line, first_line } = *text;
        self.frames.insert(id, format!("{name} {qualname} {filename}:{line} {first_line}"));
    }

    fn stack(&mut self, id: StackId, parent: StackId, frame: FrameId) {
        self.stacks.insert(id, (parent, frame));
    }
}

fn walk(heap: &FakeHeap, thread: usize) -> Vec<String> {
    let (frames, interner) = (FrameWalker::new(heap.layout, heap.types.code), Interner::new());
    let (mut stacks, mut names) = (ThreadStacks::new(), TextSink::default());
    // SAFETY: the objects have this layout and live in `heap`.
    let mut id = unsafe {
        let leaf = frames.leaf(thread);
        stacks.capture(&frames.frames(), leaf, &interner, &mut names)
    };
    stacks.release();
    let mut texts = vec![];
    while !id.is_none() {
        let (parent, frame) = names.stacks[&id];
        texts.push(names.frames[&frame].clone());
        id = parent;
    }
    texts
}

#[test]
fn frames_are_walked_by_the_layout_alone() {
    let mut heap = FakeHeap::new(LAYOUT);
    let (outer, inner) = (heap.code("outer", "a.py", 10), heap.code("inner", "b.py", 20));
    let root = heap.frame(outer, 2, 0, 0);
    let shim = heap.frame(outer, 0, SHIM, root);
    let middle = heap.frame(inner, 5, 0, shim);
    let prologue = heap.frame(inner, 1, 0, middle);
    let leaf = heap.frame(outer, 1, GENERATOR, prologue);
    let thread = heap.thread(leaf);
    let expected = ["outer Class.method a.py:10 10", "inner Class.method b.py:22 20", "outer Class.method a.py:11 10"];
    assert_eq!(walk(&heap, thread), expected);

    let mut heap = FakeHeap::new(OLD);
    let code = heap.code("old", "a.py", 10);
    let root = heap.frame(code, 2, 0, 0);
    let not_started = heap.frame(code, usize::MAX, 0, root);
    let thread = heap.thread(not_started);
    assert_eq!(walk(&heap, thread), ["old old a.py:10 10", "old old a.py:11 10"]);

    let idle = heap.thread(0);
    assert_eq!(walk(&heap, idle), [""; 0]);
}

#[test]
fn exported_sizes_are_checked() {
    for layout in [LAYOUT, OLD] {
        let heap = FakeHeap::new(layout);
        assert_eq!(verify::check_exports(&layout, &heap.types, 0), Ok(layout));
        let wrong: [fn(&Types) -> usize; 3] =
            [|types| types.code + 32, |types| types.code + 40, |types| types.unicode + 32];
        for field in wrong {
            let mut heap = FakeHeap::new(layout);
            heap.put(field(&heap.types), 8);
            assert_eq!(verify::check_exports(&layout, &heap.types, 0), Err(Reason::TypeSizes));
        }
        let unmapped = Types { code: 8, ..heap.types };
        assert_eq!(verify::check_exports(&layout, &unmapped, 0), Err(Reason::TypeSizes));
    }
}

/// A world with two frames that passes the checks, and what a test needs to break it.
fn valid_heap(layout: Layout) -> (FakeHeap, usize, usize, Code) {
    FIRST_LINE.set(10);
    let mut heap = FakeHeap::new(layout);
    let code = heap.code("f", "a.py", 10);
    let root = heap.frame(code, 3, 0, 0);
    let leaf = heap.frame(code, 4, 0, root);
    let thread = heap.thread(leaf);
    assert_eq!(heap.check(thread), Ok(Examined::Frames));
    (heap, thread, leaf, code)
}

#[test]
fn an_unexpected_layout_gives_a_reason() {
    for layout in [LAYOUT, OLD] {
        let broken = |expected: Reason, change: &dyn Fn(&mut FakeHeap, usize, usize, Code)| {
            let (mut heap, thread, leaf, code) = valid_heap(layout);
            change(&mut heap, thread, leaf, code);
            assert_eq!(heap.check(thread), Err(expected));
        };
        broken(Reason::ThreadState, &|heap, thread, _, _| heap.put(thread + layout.thread.thread_id, 1));
        broken(Reason::FrameChain, &|heap, _, leaf, _| heap.put(leaf + layout.frame.previous, 0x10_0000));
        broken(Reason::FrameChain, &|heap, _, leaf, _| heap.put(leaf + layout.frame.previous, 0xdead_beef));
        broken(Reason::NotACodeObject, &|heap, _, leaf, _| heap.put(leaf + layout.frame.code, 64));
        broken(Reason::NotACodeObject, &|heap, _, _, code| heap.put(code.0 + 8, code.0));
        broken(Reason::Instruction, &|heap, _, leaf, code| heap.move_to(leaf, code, UNITS));
        broken(Reason::Instruction, &|heap, _, leaf, code| heap.move_to(leaf, code, 1 << 20));
        broken(Reason::CodeObject, &|heap, _, _, code| heap.put(code.0 + layout.code.name, 0));
        broken(Reason::CodeObject, &|heap, _, _, code| heap.put(code.0 + layout.code.filename, code.0));
        broken(Reason::CodeObject, &|heap, _, _, code| {
            let name = heap.text("f");
            heap.put_bytes(name + layout.text.state, &[0; 4]);
            heap.put(code.0 + layout.code.name, name);
        });
        broken(Reason::CodeObject, &|heap, _, _, code| {
            let name = heap.text("f");
            heap.put(name + layout.text.length, 0);
            heap.put(code.0 + layout.code.name, name);
        });
        broken(Reason::CodeObject, &|heap, _, _, code| heap.put(code.0 + layout.code.lines, code.0));
        broken(Reason::LineNumber, &|_, _, _, _| FIRST_LINE.set(11));
    }
}

#[test]
fn a_thread_without_frames_gives_no_result() {
    for layout in [LAYOUT, OLD] {
        let mut heap = FakeHeap::new(layout);
        let thread = heap.thread(0);
        assert_eq!(heap.check(thread), Ok(Examined::NoFrames));
    }
    let mut heap = FakeHeap::new(LAYOUT);
    let code = heap.code("f", "a.py", 10);
    let shim = heap.frame(code, 0, SHIM, 0);
    let thread = heap.thread(shim);
    assert_eq!(heap.check(thread), Ok(Examined::NoFrames));
}

/// Any offset wrong by any number of bytes: the check gives a reason, or none if the wrong offset has the same value.
/// It never crashes.
#[test]
fn wrong_layouts_never_crash() {
    let (heap, thread, ..) = valid_heap(LAYOUT);
    let mut refused = 0;
    for wrong in (-128isize..=128).filter(|wrong| *wrong != 0) {
        let moved = |offset: usize| offset.wrapping_add_signed(wrong);
        let layouts = [
            Layout { thread: ThreadLayout { frame: moved(40), ..LAYOUT.thread }, ..LAYOUT },
            Layout { thread: ThreadLayout { cframe_current: Some(moved(24)), ..LAYOUT.thread }, ..LAYOUT },
            Layout { frame: FrameLayout { previous: moved(16), ..LAYOUT.frame }, ..LAYOUT },
            Layout { frame: FrameLayout { code: moved(32), ..LAYOUT.frame }, ..LAYOUT },
            Layout { frame: FrameLayout { instruction: moved(24), ..LAYOUT.frame }, ..LAYOUT },
            Layout { code: CodeLayout { name: moved(64), ..LAYOUT.code }, ..LAYOUT },
            Layout { code: CodeLayout { lines: moved(48), ..LAYOUT.code }, ..LAYOUT },
            Layout { code: CodeLayout { first_line: moved(44), ..LAYOUT.code }, ..LAYOUT },
            Layout { text: TextLayout { state: moved(28), ..LAYOUT.text }, ..LAYOUT },
            Layout { text: TextLayout { length: moved(16), ..LAYOUT.text }, ..LAYOUT },
            Layout { text: TextLayout { ascii_data: moved(32), ..LAYOUT.text }, ..LAYOUT },
        ];
        for layout in layouts {
            let memory = CheckedMemory::open().unwrap();
            let check = LiveCheck { layout: &layout, types: &heap.types, address_to_line, memory };
            refused += usize::from(check.run(thread, THREAD_ID) != Ok(Examined::Frames));
        }
    }
    assert!(refused > 256 * 11 * 3 / 4, "{refused}");
}
