//! The tools, one file each. A tool reads its arguments and returns an answer of bounded size.
//!
//! The comments of arguments and answers are part of the protocol: agents read them.

mod arguments;
pub(crate) mod diagnostics;
pub(crate) mod diff;
pub(crate) mod dry_run;
pub(crate) mod lines;
pub(crate) mod out_of_memory;
pub(crate) mod peak;
mod place;
pub(crate) mod run;
pub(crate) mod runs;
mod selection;
mod state;
pub(crate) mod summary;
