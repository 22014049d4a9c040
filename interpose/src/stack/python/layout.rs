//! Where things lie in CPython's memory, as data. 64-bit, builds with the GIL.
//!
//! To add a version: add a row to [`TABLE`] (the numbers are `offsetof` of the named fields in that version's headers
//! under `Py_BUILD_CORE`; all patch releases of a version share them), and run `tests/stackprobe/run` with it. From 3.13
//! on the interpreter publishes most offsets (`_Py_DebugOffsets` at the start of `_PyRuntime`); those are used and the
//! table only says what is not published.

use super::reason::Reason;

/// A version of CPython, without the patch level.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// Everything that is read in place. Offsets in bytes from the start of the object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) version: Version,
    pub(super) thread: ThreadLayout,
    pub(super) frame: FrameLayout,
    pub(super) code: CodeLayout,
    pub(super) text: TextLayout,
    pub(super) sizes: TypeSizes,
}

/// `PyThreadState`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadLayout {
    /// `frame` (3.8-3.10), `cframe` (3.11, 3.12) or `current_frame` (3.13 and later).
    pub(super) frame: usize,
    /// `_PyCFrame.current_frame`, where there is a cframe in between.
    pub(super) cframe_current: Option<usize>,
    /// `thread_id`: what `pthread_self` gives.
    pub(super) thread_id: usize,
}

/// `PyFrameObject` (3.8-3.10) or `_PyInterpreterFrame`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FrameLayout {
    /// `f_back`, `previous`.
    pub(super) previous: usize,
    /// `f_code`, `f_executable`.
    pub(super) code: usize,
    /// Cleared bits of a code reference: stack references carry tags from 3.14 on.
    pub(super) code_mask: usize,
    /// `f_lasti`, `prev_instr`, `instr_ptr`: its low 32 bits.
    pub(super) instruction: usize,
    pub(super) instruction_kind: InstructionKind,
    /// `owner`, where there is one.
    pub(super) owner: Option<Owner>,
}

/// How a frame says where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InstructionKind {
    /// A signed index in units of this many bytes.
    Index { unit: i32 },
    /// A pointer to the instruction, into the code object.
    Pointer,
}

/// Who owns a frame's memory, which tells what kind of frame it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    /// A byte.
    pub(super) offset: usize,
    /// `FRAME_OWNED_BY_GENERATOR`.
    pub(super) generator: u8,
    /// This and higher: not a Python frame but a mark that C code left (`FRAME_OWNED_BY_CSTACK`,
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
    /// `co_code`: a bytes object.
    Bytes { code: usize },
    /// `co_code_adaptive`: inside the code object, as many 2-byte units as `ob_size` says.
    Inline {
        start: usize,
        /// `_co_firsttraceable`, in units: a frame that is not there yet is incomplete.
        first_traceable: usize,
    },
}

/// The three ways in which CPython has written line tables.
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
    /// The bits of `state` above this: kind (3 bits), compact, ascii.
    pub(super) kind_shift: u32,
    /// Where the characters of a compact ASCII string begin.
    pub(super) ascii_data: usize,
    /// Where the characters of any other compact string begin.
    pub(super) compact_data: usize,
    /// The pointer to the characters of a string that is not compact.
    pub(super) data_pointer: usize,
}

/// What exported type objects say about the sizes of their objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TypeSizes {
    pub(super) code: (usize, usize),
    /// Without the basic size where that is not known.
    pub(super) frame: (Option<usize>, usize),
    pub(super) unicode: usize,
}

/// `ob_type`, the same in every supported version.
pub(super) const OB_TYPE: usize = 8;
/// `ob_size` of objects of variable size.
pub(super) const OB_SIZE: usize = 16;
/// `ob_sval`: the characters of a bytes object.
pub(super) const BYTES_DATA: usize = 32;
/// `tp_basicsize`, `tp_itemsize`, `tp_dealloc` of type objects.
pub(super) const TP_BASICSIZE: usize = 32;
pub(super) const TP_ITEMSIZE: usize = 40;
pub(super) const TP_DEALLOC: usize = 48;

const OLD_TEXT: TextLayout =
    TextLayout { length: 16, state: 32, kind_shift: 2, ascii_data: 48, compact_data: 72, data_pointer: 72 };
const TEXT: TextLayout =
    TextLayout { length: 16, state: 32, kind_shift: 2, ascii_data: 40, compact_data: 56, data_pointer: 56 };

const V3_8: Layout = Layout {
    version: Version { major: 3, minor: 8 },
    thread: ThreadLayout { frame: 24, cframe_current: None, thread_id: 176 },
    frame: FrameLayout {
        previous: 24,
        code: 32,
        code_mask: !0,
        instruction: 104,
        instruction_kind: InstructionKind::Index { unit: 1 },
        owner: None,
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
};

const V3_9: Layout = Layout { version: Version { major: 3, minor: 9 }, ..V3_8 };

const V3_10: Layout = Layout {
    version: Version { major: 3, minor: 10 },
    frame: FrameLayout { instruction: 96, instruction_kind: InstructionKind::Index { unit: 2 }, ..V3_8.frame },
    code: CodeLayout { lines_kind: LinesKind::Ranges, ..V3_8.code },
    sizes: TypeSizes { frame: (Some(360), 8), ..V3_8.sizes },
    ..V3_8
};

const V3_11: Layout = Layout {
    version: Version { major: 3, minor: 11 },
    thread: ThreadLayout { frame: 56, cframe_current: Some(8), thread_id: 152 },
    frame: FrameLayout {
        previous: 48,
        code: 32,
        code_mask: !0,
        instruction: 56,
        instruction_kind: InstructionKind::Pointer,
        owner: Some(Owner { offset: 69, generator: 1, first_shim: u8::MAX }),
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
};

const V3_12: Layout = Layout {
    version: Version { major: 3, minor: 12 },
    thread: ThreadLayout { frame: 56, cframe_current: Some(0), thread_id: 136 },
    frame: FrameLayout {
        previous: 8,
        code: 0,
        owner: Some(Owner { offset: 70, generator: 1, first_shim: 3 }),
        ..V3_11.frame
    },
    code: CodeLayout { first_line: 68, bytecode: Bytecode::Inline { start: 192, first_traceable: 176 }, ..V3_11.code },
    text: TEXT,
    sizes: TypeSizes { code: (192, 2), frame: (Some(120), 8), unicode: 64 },
};

const V3_13: Layout = Layout {
    version: Version { major: 3, minor: 13 },
    thread: ThreadLayout { frame: 72, cframe_current: None, thread_id: 152 },
    code: CodeLayout { bytecode: Bytecode::Inline { start: 200, first_traceable: 184 }, ..V3_12.code },
    sizes: TypeSizes { code: (200, 2), frame: (Some(136), 8), unicode: 64 },
    ..V3_12
};

const TABLE: [Layout; 6] = [V3_8, V3_9, V3_10, V3_11, V3_12, V3_13];

impl Layout {
    /// The layout of a version, from the table.
    pub(super) fn of(version: Version) -> Result<&'static Layout, Reason> {
        TABLE.iter().find(|layout| layout.version == version).ok_or(Reason::UnknownVersion)
    }
}

impl Version {
    /// Reads what `Py_GetVersion` gives, e.g. `3.12.1 (main, Jan 1 2024, 00:00:00) [GCC 13.2.0]`.
    pub(super) fn parse(text: &str) -> Result<Version, Reason> {
        if text.contains("free-threading") {
            return Err(Reason::FreeThreaded);
        }
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Version { major, minor }),
            _ => Err(Reason::UnreadableVersion),
        }
    }
}

/// `_Py_DebugOffsets`: offsets that CPython 3.13 and later publish at the start of `_PyRuntime`.
pub(super) struct Published<'a> {
    words: &'a [u64],
}

impl<'a> Published<'a> {
    /// How many words of `_PyRuntime` are looked at.
    pub(super) const WORDS: usize = 72;
    const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
    const FREE_THREADED: usize = 16;

    pub(super) fn new(words: &'a [u64]) -> Option<Published<'a>> {
        (words.first() == Some(&Self::COOKIE)).then_some(Published { words })
    }

    fn at(&self, offset: usize) -> Option<usize> {
        self.words.get(offset / 8).map(|word| *word as usize)
    }

    /// Whether what is published for 3.13 says the same as the table.
    pub(super) fn agrees_3_13(&self, layout: &Layout) -> Result<(), Reason> {
        if self.at(Self::FREE_THREADED) != Some(0) {
            return Err(Reason::FreeThreaded);
        }
        let Bytecode::Inline { start, .. } = layout.code.bytecode else {
            return Err(Reason::PublishedOffsets);
        };
        // Offsets inside `_Py_DebugOffsets` of 3.13, and what the table has for them.
        let pairs = [
            (184, Some(layout.thread.frame)),
            (192, Some(layout.thread.thread_id)),
            (232, Some(layout.frame.previous)),
            (240, Some(layout.frame.code)),
            (248, Some(layout.frame.instruction)),
            (264, layout.frame.owner.map(|owner| owner.offset)),
            (280, Some(layout.code.filename)),
            (288, Some(layout.code.name)),
            (296, layout.code.qualname),
            (304, Some(layout.code.lines)),
            (312, Some(layout.code.first_line)),
            (344, Some(start)),
            (544, Some(layout.text.state)),
            (552, Some(layout.text.length)),
            (560, Some(layout.text.ascii_data)),
        ];
        if pairs.into_iter().all(|(offset, expected)| self.at(offset) == expected) {
            Ok(())
        } else {
            Err(Reason::PublishedOffsets)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_py_getversion_prints_them() {
        let version = |major, minor| Ok(Version { major, minor });
        assert_eq!(Version::parse("3.12.1 (main, Jan  1 2024, 00:00:00) [GCC 13.2.0]"), version(3, 12));
        assert_eq!(Version::parse("3.14.0rc2 (main)"), version(3, 14));
        assert_eq!(Version::parse("3.15a1"), version(3, 15));
        assert_eq!(Version::parse("3.13.0 experimental free-threading build (main)"), Err(Reason::FreeThreaded));
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

    #[test]
    fn published_offsets_must_agree() {
        let mut words = [0; Published::WORDS];
        assert!(Published::new(&words).is_none());
        words[0] = Published::COOKIE;
        let published = |words: &[u64]| Published::new(words).unwrap().agrees_3_13(&V3_13);
        assert_eq!(published(&words), Err(Reason::PublishedOffsets));
        for (offset, value) in [
            (184, 72),
            (192, 152),
            (232, 8),
            (240, 0),
            (248, 56),
            (264, 70),
            (280, 112),
            (288, 120),
            (296, 128),
            (304, 136),
            (312, 68),
            (344, 200),
            (544, 32),
            (552, 16),
            (560, 40),
        ] {
            words[offset / 8] = value;
        }
        assert_eq!(published(&words), Ok(()));
        words[2] = 1;
        assert_eq!(published(&words), Err(Reason::FreeThreaded));
    }
}
