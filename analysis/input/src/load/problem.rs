//! Problems with the files of a run.

use std::path::PathBuf;

/// A file of the run that could not be used, and the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The file.
    pub path: PathBuf,
    /// The problem, without the path.
    pub text: String,
}
