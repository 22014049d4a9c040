//! Offsets in CPython's structures, as data. For 64-bit builds: with the GIL, and free-threaded ones from 3.14 on.
//!
//! To add a version, add a row to [`TABLE`] and run `tests/stackprobe/run` with it. The numbers are `offsetof` of the
//! named fields in that version's headers under `Py_BUILD_CORE`, and all patch releases of a version share them. From
//! 3.13 on the interpreter publishes most offsets (`_Py_DebugOffsets` at the start of `_PyRuntime`), and those are
//! used. A row then contains their slots ([`PublishedSlots`]) and the offsets that are not published.

use super::reason::Reason;

/// A version of CPython, without the patch level.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// All fields that are read in place. Offsets are in bytes from the start of the object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) version: Version,
    pub(super) objects: ObjectLayout,
    pub(super) thread: ThreadLayout,
    pub(super) frame: FrameLayout,
    pub(super) code: CodeLayout,
    pub(super) text: TextLayout,
    pub(super) sizes: TypeSizes,
    /// Where the bytecode of each thread is, in a free-threaded build.
    pub(super) thread_bytecode: Option<ThreadBytecode>,
    /// The slots in which this version publishes its offsets, if it does.
    pub(super) published: Option<PublishedSlots>,
}

/// The fields that all objects and all type objects have. The header of an object is larger in a free-threaded build
/// (`ob_tid`, `ob_mutex`, `ob_gc_bits`, `ob_ref_local` and `ob_ref_shared` instead of `ob_refcnt`), and all fields
/// after it move by the same number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectLayout {
    moved: usize,
}

impl ObjectLayout {
    /// A build with the GIL.
    pub const WITH_GIL: ObjectLayout = ObjectLayout { moved: 0 };
    /// A free-threaded build.
    pub const FREE_THREADED: ObjectLayout = ObjectLayout { moved: 16 };

    /// `ob_type`.
    #[inline]
    pub const fn class(self) -> usize {
        8 + self.moved
    }

    /// `ob_size` of objects of variable size.
    pub(super) const fn size(self) -> usize {
        16 + self.moved
    }

    /// `ob_sval`, the characters of a bytes object.
    pub(super) const fn bytes(self) -> usize {
        32 + self.moved
    }

    /// `tp_name` of a type object.
    pub const fn class_name(self) -> usize {
        24 + self.moved
    }

    /// `tp_basicsize` of a type object.
    pub(super) const fn basic_size(self) -> usize {
        32 + self.moved
    }

    /// `tp_itemsize` of a type object.
    pub(super) const fn item_size(self) -> usize {
        40 + self.moved
    }

    /// `tp_dealloc` of a type object.
    pub(super) const fn dealloc(self) -> usize {
        48 + self.moved
    }

    /// `tp_mro` of a type object.
    pub(super) const fn method_order(self) -> usize {
        344 + self.moved
    }

    /// Where the items of a tuple may start: before 3.14, and from 3.14 on (`ob_hash`).
    pub(super) const fn tuple_items(self) -> [usize; 2] {
        [24 + self.moved, 32 + self.moved]
    }
}

/// The bytecode that a frame runs, in a free-threaded build. Each thread specializes instructions in a copy of its own
/// (Include/cpython/code.h, `_PyCodeArray`). The copy of the first thread is the code object's `co_code_adaptive`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadBytecode {
    /// `PyCodeObject.co_tlbc`: the array of copies.
    pub(super) copies: usize,
    /// `_PyInterpreterFrame.tlbc_index`: the index of the frame's copy in that array, 32 bits.
    pub(super) index: usize,
}

impl ThreadBytecode {
    /// `_PyCodeArray.size`.
    pub(super) const COUNT: usize = 0;
    /// `_PyCodeArray.entries`.
    pub(super) const ENTRIES: usize = 8;
}

/// `PyThreadState`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadLayout {
    /// `frame` (3.8-3.10), `cframe` (3.11, 3.12) or `current_frame` (3.13 and later).
    pub(super) frame: usize,
    /// `_PyCFrame.current_frame`, if the version has a cframe in between.
    pub(super) cframe_current: Option<usize>,
    /// `thread_id` is the result of `pthread_self`.
    pub(super) thread_id: usize,
}

/// `PyFrameObject` (3.8-3.10) or `_PyInterpreterFrame`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameLayout {
    /// `f_back`, `previous`.
    pub(super) previous: usize,
    /// `f_code`, `f_executable`.
    pub(super) code: usize,
    /// Clears these bits of a code reference. Stack references carry tags from 3.14 on.
    pub(super) code_mask: usize,
    /// The low 32 bits of `f_lasti`, `prev_instr` or `instr_ptr`.
    pub(super) instruction: usize,
    pub(super) instruction_kind: InstructionKind,
    /// `owner`, if the version has it.
    pub(super) owner: Option<Owner>,
    /// `f_localsplus` or `localsplus`: the first local variable. Stack references carry the same tags as that of the
    /// code.
    pub(super) locals: usize,
    /// The opcode at which a frame of the chain may have released its local variables.
    pub(super) leaving: Option<u8>,
    /// Which frames the interpreter's C function was called for.
    pub(super) evaluation: Evaluation,
}

/// Which frames start an evaluation, a call of `_PyEval_EvalFrameDefault`. The other frames were called within one.
/// This is not published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Evaluation {
    /// Every frame (3.8 to 3.10).
    Every,
    /// Frames with `is_entry` set (3.11), a byte at this offset.
    Entry { offset: usize },
    /// Frames after a shim of their own (3.12 and later), see [`Owner::first_shim`].
    Shim,
}

/// How a frame stores its position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InstructionKind {
    /// A signed index in units of this many bytes.
    Index { unit: i32 },
    /// A pointer to the instruction, into the code object.
    Pointer,
    /// A pointer to the instruction, into the copy of the bytecode that the frame runs. Reading the frame gives the
    /// distance from the start of that copy.
    ThreadPointer,
}

/// The owner of a frame's memory, which identifies the kind of frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    /// The offset of a byte.
    pub(super) offset: usize,
    /// `FRAME_OWNED_BY_GENERATOR`.
    pub(super) generator: u8,
    /// This value and higher ones: no Python frame but a mark of C code (`FRAME_OWNED_BY_CSTACK`,
    /// `FRAME_OWNED_BY_INTERPRETER`).
    pub(super) first_shim: u8,
}

/// `PyCodeObject`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CodeLayout {
    pub(super) name: usize,
    /// `co_qualname`, from 3.11 on.
    pub(super) qualname: Option<usize>,
    pub(super) filename: usize,
    pub(super) first_line: usize,
    /// `co_lnotab` or `co_linetable`.
    pub(super) lines: usize,
    pub(super) lines_kind: LinesKind,
    pub(super) bytecode: Bytecode,
}

/// Where the instructions are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Bytecode {
    /// `co_code` is a bytes object.
    Bytes { code: usize },
    /// `co_code_adaptive` is inside the code object, with `ob_size` units of 2 bytes.
    Inline {
        start: usize,
        /// `_co_firsttraceable`, in units. A frame before that instruction is incomplete.
        first_traceable: usize,
    },
}

/// The three formats of CPython's line tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinesKind {
    /// 3.8, 3.9: `Objects/lnotab_notes.txt`.
    Lnotab,
    /// 3.10: PEP 626 ranges.
    Ranges,
    /// 3.11 and later: `Objects/locations.md`.
    Locations,
}

/// `PyASCIIObject`, `PyCompactUnicodeObject`, `PyUnicodeObject`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TextLayout {
    pub(super) length: usize,
    pub(super) state: usize,
    /// Where the characters of a compact ASCII string start.
    pub(super) ascii_data: usize,
    /// Where the characters of any other compact string start.
    pub(super) compact_data: usize,
    /// The pointer to the characters of a string that is not compact.
    pub(super) data_pointer: usize,
    /// Where in `PyASCIIObject.state` the bits for kind (3), compact and ascii may be. They follow 2 bits of
    /// `interned`, or 16 bits in some builds of 3.14. In each of these forms the bits at the other position cannot be a
    /// string's, because the kind would be 0. In free-threaded builds, `interned` has 8 bits, and the bits after ascii
    /// have any value.
    pub(super) state_shifts: &'static [u32],
}

/// The sizes that exported type objects state, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TypeSizes {
    /// Basic size and item size.
    pub(super) code: (usize, usize),
    /// Basic size if it is known, and item size.
    pub(super) frame: (Option<usize>, usize),
    pub(super) unicode: usize,
}

const TEXT: TextLayout =
    TextLayout { length: 16, state: 32, ascii_data: 40, compact_data: 56, data_pointer: 56, state_shifts: &[2, 16] };
const OLD_TEXT: TextLayout = TextLayout { ascii_data: 48, compact_data: 72, data_pointer: 72, ..TEXT };

const V3_8: Layout = Layout {
    version: Version { major: 3, minor: 8 },
    objects: ObjectLayout::WITH_GIL,
    thread: ThreadLayout { frame: 24, cframe_current: None, thread_id: 176 },
    frame: FrameLayout {
        previous: 24,
        code: 32,
        code_mask: !0,
        instruction: 104,
        instruction_kind: InstructionKind::Index { unit: 1 },
        owner: None,
        locals: 360,
        leaving: None,
        evaluation: Evaluation::Every,
    },
    code: CodeLayout {
        name: 112,
        qualname: None,
        filename: 104,
        first_line: 40,
        lines: 120,
        lines_kind: LinesKind::Lnotab,
        bytecode: Bytecode::Bytes { code: 48 },
    },
    text: OLD_TEXT,
    sizes: TypeSizes { code: (176, 0), frame: (Some(368), 8), unicode: 80 },
    thread_bytecode: None,
    published: None,
};

const V3_9: Layout = Layout { version: Version { major: 3, minor: 9 }, ..V3_8 };

const V3_10: Layout = Layout {
    version: Version { major: 3, minor: 10 },
    frame: FrameLayout {
        instruction: 96,
        locals: 352,
        instruction_kind: InstructionKind::Index { unit: 2 },
        ..V3_8.frame
    },
    code: CodeLayout { lines_kind: LinesKind::Ranges, ..V3_8.code },
    sizes: TypeSizes { frame: (Some(360), 8), ..V3_8.sizes },
    ..V3_8
};

const V3_11: Layout = Layout {
    version: Version { major: 3, minor: 11 },
    objects: ObjectLayout::WITH_GIL,
    thread: ThreadLayout { frame: 56, cframe_current: Some(8), thread_id: 152 },
    frame: FrameLayout {
        previous: 48,
        code: 32,
        code_mask: !0,
        instruction: 56,
        instruction_kind: InstructionKind::Pointer,
        owner: Some(Owner { offset: 69, generator: 1, first_shim: u8::MAX }),
        locals: 72,
        // `RETURN_VALUE`: `pop_frame` clears the frame before it leaves the chain.
        leaving: Some(83),
        evaluation: Evaluation::Entry { offset: 68 },
    },
    code: CodeLayout {
        name: 120,
        qualname: Some(128),
        filename: 112,
        first_line: 72,
        lines: 136,
        lines_kind: LinesKind::Locations,
        bytecode: Bytecode::Inline { start: 184, first_traceable: 168 },
    },
    text: OLD_TEXT,
    sizes: TypeSizes { code: (184, 2), frame: (Some(120), 8), unicode: 80 },
    thread_bytecode: None,
    published: None,
};

const V3_12: Layout = Layout {
    version: Version { major: 3, minor: 12 },
    objects: ObjectLayout::WITH_GIL,
    thread: ThreadLayout { frame: 56, cframe_current: Some(0), thread_id: 136 },
    frame: FrameLayout {
        previous: 8,
        code: 0,
        owner: Some(Owner { offset: 70, generator: 1, first_shim: 3 }),
        leaving: None,
        evaluation: Evaluation::Shim,
        ..V3_11.frame
    },
    code: CodeLayout { first_line: 68, bytecode: Bytecode::Inline { start: 192, first_traceable: 176 }, ..V3_11.code },
    text: TEXT,
    sizes: TypeSizes { code: (192, 2), frame: (Some(120), 8), unicode: 64 },
    thread_bytecode: None,
    published: None,
};

const V3_13: Layout = Layout {
    version: Version { major: 3, minor: 13 },
    thread: ThreadLayout { frame: 72, cframe_current: None, thread_id: 152 },
    code: CodeLayout { bytecode: Bytecode::Inline { start: 200, first_traceable: 184 }, ..V3_12.code },
    sizes: TypeSizes { code: (200, 2), frame: (Some(136), 8), unicode: 64 },
    published: Some(PublishedSlots {
        thread: ThreadSlots { frame: 23, id: 24 },
        frame: FrameSlots { previous: 29, executable: 30, instruction: 31, locals: 32, owner: 33 },
        code: CodeSlots { filename: 35, name: 36, qualname: 37, line_table: 38, first_line: 39, bytecode: 43 },
        text: TextSlots { state: 68, length: 69, ascii_size: 70 },
        free_threaded: None,
    }),
    ..V3_12
};

const V3_14: Layout = Layout {
    version: Version { major: 3, minor: 14 },
    // `f_executable` is a stack reference; code objects are aligned to 16 bytes, so all low bits are tags.
    frame: FrameLayout { code_mask: !7, ..V3_13.frame },
    code: CodeLayout { bytecode: Bytecode::Inline { start: 208, first_traceable: 192 }, ..V3_13.code },
    sizes: TypeSizes { code: (208, 2), frame: (None, 8), unicode: 64 },
    published: Some(PublishedSlots {
        thread: ThreadSlots { frame: 26, id: 27 },
        frame: FrameSlots { previous: 32, executable: 33, instruction: 34, locals: 35, owner: 36 },
        code: CodeSlots { filename: 40, name: 41, qualname: 42, line_table: 43, first_line: 44, bytecode: 48 },
        text: TextSlots { state: 78, length: 79, ascii_size: 80 },
        free_threaded: Some(FreeThreadedSlots { index: 38, copies: 49 }),
    }),
    ..V3_13
};

const V3_15: Layout = Layout {
    version: Version { major: 3, minor: 15 },
    published: Some(PublishedSlots {
        thread: ThreadSlots { frame: 26, id: 30 },
        frame: FrameSlots { previous: 40, executable: 41, instruction: 42, locals: 43, owner: 44 },
        code: CodeSlots { filename: 48, name: 49, qualname: 50, line_table: 51, first_line: 52, bytecode: 56 },
        text: TextSlots { state: 90, length: 91, ascii_size: 92 },
        free_threaded: None,
    }),
    ..V3_14
};

const TABLE: [Layout; 8] = [V3_8, V3_9, V3_10, V3_11, V3_12, V3_13, V3_14, V3_15];

impl Layout {
    /// The row of a version. The error is [`Reason::UnknownVersion`].
    pub(super) fn of(version: Version) -> Result<&'static Layout, Reason> {
        TABLE.iter().find(|layout| layout.version == version).ok_or(Reason::UnknownVersion)
    }
}

impl Version {
    /// The upper half of `PY_VERSION_HEX`.
    fn hex(self) -> u64 {
        u64::from(self.major) << 8 | u64::from(self.minor)
    }

    /// Parses the result of `Py_GetVersion`, for example `3.12.1 (main, Jan 1 2024, 00:00:00) [GCC 13.2.0]`.
    pub(super) fn parse(text: &str) -> Result<Version, Reason> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Version { major, minor }),
            _ => Err(Reason::UnreadableVersion),
        }
    }
}

/// The indices of the words of `_Py_DebugOffsets`, at the start of `_PyRuntime`, that hold each offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PublishedSlots {
    thread: ThreadSlots,
    frame: FrameSlots,
    code: CodeSlots,
    text: TextSlots,
    /// The slots of a free-threaded build. `None` if such a build of this version is not supported.
    free_threaded: Option<FreeThreadedSlots>,
}

/// Offsets in a free-threaded build: of `_PyInterpreterFrame.tlbc_index` and `PyCodeObject.co_tlbc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FreeThreadedSlots {
    index: usize,
    copies: usize,
}

/// Offsets in `PyThreadState`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ThreadSlots {
    frame: usize,
    id: usize,
}

/// Offsets in `_PyInterpreterFrame`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FrameSlots {
    previous: usize,
    executable: usize,
    instruction: usize,
    locals: usize,
    owner: usize,
}

/// Offsets in `PyCodeObject`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CodeSlots {
    filename: usize,
    name: usize,
    qualname: usize,
    line_table: usize,
    first_line: usize,
    bytecode: usize,
}

/// Offsets in `PyUnicodeObject`, and the size of `PyASCIIObject`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TextSlots {
    state: usize,
    length: usize,
    ascii_size: usize,
}

impl PublishedSlots {
    /// How many words of `_PyRuntime` are read.
    pub(super) const WORDS: usize = 96;
    const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
    /// The word that holds `PY_VERSION_HEX`.
    const VERSION: usize = 1;
    /// The word that is not 0 in a free-threaded build.
    const FREE_THREADED: usize = 2;
    /// Every structure that is read is smaller than this many bytes.
    const LARGEST_OFFSET: usize = 4096;
    /// `_co_firsttraceable` is this far before `co_code_adaptive` with a GIL: an int and `co_extra`.
    const FIRST_TRACEABLE: usize = 16;
    /// `sizeof(PyCompactUnicodeObject) - sizeof(PyASCIIObject)`: `utf8_length` and `utf8`.
    const COMPACT_EXTRA: usize = 16;

    /// The row's layout with the published offsets in `words`.
    fn apply(&self, row: &Layout, words: &[u64]) -> Result<Layout, Reason> {
        let word = |slot| words.get(slot).copied().ok_or(Reason::PublishedOffsets);
        if word(0)? != Self::COOKIE || word(Self::VERSION)? >> 16 != row.version.hex() {
            return Err(Reason::PublishedOffsets);
        }
        let offset = |slot| match word(slot)? as usize {
            offset if offset < Self::LARGEST_OFFSET => Ok(offset),
            _ => Err(Reason::PublishedOffsets),
        };
        let owner = row.frame.owner.ok_or(Reason::PublishedOffsets)?;
        let start = offset(self.code.bytecode)?;
        let ascii_data = offset(self.text.ascii_size)?;
        let compact_data = ascii_data + Self::COMPACT_EXTRA;
        let row = match (word(Self::FREE_THREADED)?, self.free_threaded) {
            (0, _) => row,
            (_, None) => return Err(Reason::FreeThreaded),
            (_, Some(slots)) => &row.free_threaded(offset(slots.copies)?, offset(slots.index)?),
        };
        // In a free-threaded build, `co_tlbc` comes in between.
        let before_bytecode = Self::FIRST_TRACEABLE + if row.thread_bytecode.is_some() { 8 } else { 0 };
        Ok(Layout {
            thread: ThreadLayout {
                frame: offset(self.thread.frame)?,
                thread_id: offset(self.thread.id)?,
                ..row.thread
            },
            frame: FrameLayout {
                previous: offset(self.frame.previous)?,
                code: offset(self.frame.executable)?,
                instruction: offset(self.frame.instruction)?,
                owner: Some(Owner { offset: offset(self.frame.owner)?, ..owner }),
                locals: offset(self.frame.locals)?,
                ..row.frame
            },
            code: CodeLayout {
                name: offset(self.code.name)?,
                qualname: Some(offset(self.code.qualname)?),
                filename: offset(self.code.filename)?,
                first_line: offset(self.code.first_line)?,
                lines: offset(self.code.line_table)?,
                bytecode: Bytecode::Inline { start, first_traceable: start.saturating_sub(before_bytecode) },
                ..row.code
            },
            text: TextLayout {
                length: offset(self.text.length)?,
                state: offset(self.text.state)?,
                ascii_data,
                compact_data,
                data_pointer: compact_data,
                state_shifts: row.text.state_shifts,
            },
            sizes: TypeSizes { code: (start, row.sizes.code.1), ..row.sizes },
            ..*row
        })
    }
}

impl Layout {
    /// This row for a free-threaded build, with the offsets of `co_tlbc` and `tlbc_index`.
    fn free_threaded(&self, copies: usize, index: usize) -> Layout {
        let objects = ObjectLayout::FREE_THREADED;
        Layout {
            objects,
            frame: FrameLayout { instruction_kind: InstructionKind::ThreadPointer, ..self.frame },
            text: TextLayout { state_shifts: &[8], ..self.text },
            sizes: TypeSizes { unicode: self.sizes.unicode + objects.moved, ..self.sizes },
            thread_bytecode: Some(ThreadBytecode { copies, index }),
            ..*self
        }
    }

    /// This row's layout with the offsets that the interpreter publishes, if the version publishes any. `words` are the
    /// first [`PublishedSlots::WORDS`] words of `_PyRuntime`.
    pub(super) fn with_published(&self, words: &[u64]) -> Result<Layout, Reason> {
        match &self.published {
            Some(slots) => slots.apply(self, words),
            None => Ok(*self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_as_py_getversion_prints_them() {
        let version = |major, minor| Ok(Version { major, minor });
        assert_eq!(Version::parse("3.12.1 (main, Jan  1 2024, 00:00:00) [GCC 13.2.0]"), version(3, 12));
        assert_eq!(Version::parse("3.14.0rc2 (main)"), version(3, 14));
        assert_eq!(Version::parse("3.15a1"), version(3, 15));
        assert_eq!(Version::parse("3.14.7 free-threading build (main)"), version(3, 14));
        for bad in ["", "x", "3", "3.", "3.x"] {
            assert_eq!(Version::parse(bad), Err(Reason::UnreadableVersion), "{bad:?}");
        }
    }

    #[test]
    fn each_version_has_one_row() {
        for (minor, layout) in (8..).zip(&TABLE) {
            assert_eq!(Layout::of(Version { major: 3, minor }), Ok(layout));
        }
        assert_eq!(Layout::of(Version { major: 3, minor: 7 }), Err(Reason::UnknownVersion));
        assert_eq!(Layout::of(Version { major: 4, minor: 12 }), Err(Reason::UnknownVersion));
    }

    /// The words that CPython 3.13.0 publishes, as far as they are read.
    fn words_of_3_13() -> [u64; PublishedSlots::WORDS] {
        let mut words = [0; PublishedSlots::WORDS];
        words[0] = PublishedSlots::COOKIE;
        words[1] = 0x030d_00f0;
        for (slot, value) in [
            (23, 72),
            (24, 152),
            (29, 8),
            (30, 0),
            (31, 56),
            (32, 72),
            (33, 70),
            (35, 112),
            (36, 120),
            (37, 128),
            (38, 136),
            (39, 68),
            (43, 200),
            (68, 32),
            (69, 16),
            (70, 40),
        ] {
            words[slot] = value;
        }
        words
    }

    #[test]
    fn the_row_of_3_13_equals_what_3_13_publishes() {
        assert_eq!(V3_13.with_published(&words_of_3_13()), Ok(V3_13));
        assert_eq!(V3_12.with_published(&[]), Ok(V3_12));
    }

    #[test]
    fn invalid_published_offsets_are_rejected() {
        let with = |slot: usize, value| {
            let mut words = words_of_3_13();
            words[slot] = value;
            V3_13.with_published(&words)
        };
        assert_eq!(with(0, 7), Err(Reason::PublishedOffsets));
        assert_eq!(with(1, 0x030e_00f0), Err(Reason::PublishedOffsets));
        assert_eq!(with(2, 1), Err(Reason::FreeThreaded));
        assert_eq!(with(29, 1 << 20), Err(Reason::PublishedOffsets));
        assert_eq!(V3_13.with_published(&words_of_3_13()[..50]), Err(Reason::PublishedOffsets));
        let moved = with(43, 208).unwrap();
        assert_eq!(moved.code.bytecode, Bytecode::Inline { start: 208, first_traceable: 192 });
        assert_eq!(moved.sizes.code, (208, 2));
    }

    /// The offsets of 3.14.7, built with `--disable-gil`.
    #[test]
    fn a_free_threaded_build_has_larger_headers_and_bytecode_for_each_thread() {
        let mut words = [0; PublishedSlots::WORDS];
        (words[0], words[1], words[2]) = (PublishedSlots::COOKIE, 0x030e_07f0, 1);
        for (slot, value) in [(26, 72), (36, 78), (38, 72), (48, 232), (49, 224), (80, 56)] {
            words[slot] = value;
        }
        let layout = V3_14.with_published(&words).unwrap();
        assert_eq!((layout.objects.class(), layout.objects.size(), layout.objects.bytes()), (24, 32, 48));
        assert_eq!(layout.thread_bytecode, Some(ThreadBytecode { copies: 224, index: 72 }));
        assert_eq!(layout.code.bytecode, Bytecode::Inline { start: 232, first_traceable: 208 });
        assert_eq!(layout.sizes.unicode, 80);
        assert_eq!(V3_15.with_published(&words), Err(Reason::PublishedOffsets));
    }
}
