//! Reasons for not capturing Python stacks.

use std::fmt;

use memtrace_trace::named;

named! {
    /// Why Python stacks are not captured, in this process or at this moment. [`fmt::Display`] gives a text for users.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Reason {
        /// There is no CPython in the process, or its symbols cannot be found.
        NoPython = 1,
        /// A symbol that every supported CPython exports is missing.
        MissingSymbol = 2,
        /// The version string could not be read.
        UnreadableVersion = 3,
        /// The layout of this CPython version is not known.
        UnknownVersion = 4,
        /// A free-threaded build of a version whose layout is only known with the GIL.
        FreeThreaded = 5,
        /// An exported type object states other object sizes than the table (a debug or patched build).
        TypeSizes = 6,
        /// The offsets that the interpreter publishes do not match a layout that this build can read.
        PublishedOffsets = 7,
        /// The thread state does not hold this thread's id at the expected offset.
        ThreadState = 8,
        /// The kernel does not let the process read its own memory with checks, so nothing can be verified.
        UncheckedMemory = 9,
        /// A frame does not lead to a code object.
        NotACodeObject = 10,
        /// A code object's name, file name or tables are not as expected.
        CodeObject = 11,
        /// A frame's instruction pointer is outside its code.
        Instruction = 12,
        /// The chain of frames does not end, or leaves readable memory.
        FrameChain = 13,
        /// A line number differs from that of `PyCode_Addr2Line`.
        LineNumber = 14,
        /// The type object of code objects is not as expected, so freed code objects cannot be detected.
        CodeType = 15,
    }
}

impl Reason {
    /// One sentence, without a full stop.
    pub const fn text(self) -> &'static str {
        match self {
            Reason::NoPython => "no CPython in this process",
            Reason::MissingSymbol => "a symbol is missing that every supported CPython exports",
            Reason::UnreadableVersion => "Py_GetVersion() returns no version number",
            Reason::UnknownVersion => "this CPython version is not supported (3.8 to 3.15 are)",
            Reason::FreeThreaded => "free-threaded CPython is supported in version 3.14 only",
            Reason::TypeSizes => {
                "object sizes differ from those of this CPython version, as in a debug or patched build"
            }
            Reason::PublishedOffsets => "CPython publishes offsets that this build of memtrace cannot read",
            Reason::ThreadState => "the thread state has an unexpected layout",
            Reason::UncheckedMemory => "the kernel does not let the process read its own memory",
            Reason::NotACodeObject => "a frame does not lead to a code object",
            Reason::CodeObject => "a code object has an unexpected layout",
            Reason::Instruction => "an instruction pointer is outside its code",
            Reason::FrameChain => "the chain of frames is broken",
            Reason::LineNumber => "a line number differs from that of PyCode_Addr2Line",
            Reason::CodeType => "the type of code objects has an unexpected layout",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_gives_its_reason() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_wire(reason as u64), Some(reason));
        }
        assert_eq!(Reason::from_wire(0), None);
        assert_eq!(Reason::from_wire(200), None);
    }
}
