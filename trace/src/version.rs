//! The version of the trace file, as types.

use std::fmt;

/// A format version. A reader of `major.minor` reads every file with the same major. It skips and counts unknown frame
/// kinds, definitions and columns of a newer minor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Incremented if old readers would misread a file.
    pub major: u16,
    /// Incremented if something was added that old readers can skip.
    pub minor: u16,
}

impl Version {
    /// The version that this build writes. 1.0: the first. 1.1: notices have a status; ranks. 1.2: module calls, names
    /// of modules and tensors, labels, reference cycles, holders. 1.3: labels of `gpu_memtrace.annotate`. 1.4: readings
    /// of the memory in use on a device; CUDA graphs. 1.5: rotated traces. 1.6: what the analysis remembers of dropped
    /// events is in a file of its own.
    pub const CURRENT: Version = Version { major: 1, minor: 7 };

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
