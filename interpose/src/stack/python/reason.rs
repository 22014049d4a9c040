//! Why Python stacks are not taken.

use std::fmt;

/// Why Python stacks are not taken, in this process or at this moment. [`fmt::Display`] says it for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub(crate) enum Reason {
    /// There is no CPython in the process (or none whose symbols can be found).
    NoPython = 1,
    /// A symbol is missing that every supported CPython exports.
    MissingSymbol,
    /// The version string could not be read.
    UnreadableVersion,
    /// A CPython whose layout is not known.
    UnknownVersion,
    /// A free-threaded build: frames and reference counts are laid out differently there.
    FreeThreaded,
    /// An exported type object says that objects are larger or smaller than the table says (a debug or patched build).
    TypeSizes,
    /// The offsets that the interpreter publishes are not those of a layout this build can read.
    PublishedOffsets,
    /// The thread state does not hold this thread's id where the table says.
    ThreadState,
    /// The kernel does not let the process read its own memory with checks, so nothing could be verified.
    UncheckedMemory,
    /// A frame does not lead to a code object.
    NotACodeObject,
    /// A code object's name, file name or tables are not what they should be.
    CodeObject,
    /// A frame's instruction pointer lies outside its code.
    Instruction,
    /// The chain of frames has no end or leaves readable memory.
    FrameChain,
    /// A line number is not the one that `PyCode_Addr2Line` gives.
    LineNumber,
    /// The type object of code objects is not what it should be, so their deaths cannot be noticed.
    CodeType,
}

impl Reason {
    pub(super) const ALL: [Reason; 15] = [
        Reason::NoPython,
        Reason::MissingSymbol,
        Reason::UnreadableVersion,
        Reason::UnknownVersion,
        Reason::FreeThreaded,
        Reason::TypeSizes,
        Reason::PublishedOffsets,
        Reason::ThreadState,
        Reason::UncheckedMemory,
        Reason::NotACodeObject,
        Reason::CodeObject,
        Reason::Instruction,
        Reason::FrameChain,
        Reason::LineNumber,
        Reason::CodeType,
    ];

    /// One sentence, without a full stop.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Reason::NoPython => "no CPython in this process",
            Reason::MissingSymbol => "a symbol is missing that every supported CPython exports",
            Reason::UnreadableVersion => "Py_GetVersion() gives nothing that looks like a version",
            Reason::UnknownVersion => "this CPython version is not known (3.8 to 3.14 are)",
            Reason::FreeThreaded => "free-threaded CPython is not supported yet",
            Reason::TypeSizes => "object sizes differ from this CPython version's (a debug or patched build?)",
            Reason::PublishedOffsets => "the offsets CPython publishes differ from those this build knows how to read",
            Reason::ThreadState => "the thread state is not laid out as expected",
            Reason::UncheckedMemory => "the process may not read its own memory through the kernel",
            Reason::NotACodeObject => "a frame does not lead to a code object",
            Reason::CodeObject => "a code object is not laid out as expected",
            Reason::Instruction => "an instruction pointer lies outside its code",
            Reason::FrameChain => "the chain of frames is broken",
            Reason::LineNumber => "a line number differs from PyCode_Addr2Line's",
            Reason::CodeType => "the type of code objects is not laid out as expected",
        }
    }

    /// The reason with this number.
    pub(super) fn from_number(number: u8) -> Option<Reason> {
        Self::ALL.into_iter().find(|reason| *reason as u8 == number)
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
    fn numbers_lead_back_to_reasons() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason as u8), Some(reason));
        }
        assert_eq!(Reason::from_number(0), None);
        assert_eq!(Reason::from_number(200), None);
    }
}
