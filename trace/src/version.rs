//! The version of the trace file, as types.

use std::fmt;

/// A format version. A reader of `major.minor` reads every file of the same major: unknown frame kinds, definitions and
/// columns of a newer minor are skipped and counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Raised when old readers would misread.
    pub major: u16,
    /// Raised when something was added that old readers can skip.
    pub minor: u16,
}

impl Version {
    /// What this build writes. 1.0: the first; 1.1: notices carry a verdict; ranks.
    pub const CURRENT: Version = Version { major: 1, minor: 2 };

    /// Whether this build can read a file of version `found`.
    pub const fn reads(self, found: Version) -> bool {
        self.major == found.major
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
