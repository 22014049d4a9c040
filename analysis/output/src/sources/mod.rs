//! Source lines of the recorded program, read from files of this machine.
//!
//! A recording names files, and it may come from anybody. So a file is quoted only if one of these is true
//! ([`SourceAccess`]):
//!
//! - The run has the SHA-256 of the file's present content, in `sources.json` ([`SourceHashes`]). memtrace writes these
//!   hashes when a run ends. Whoever wrote one has seen the content, so the quotation discloses nothing to them. This
//!   needs no secret and no identity of the machine: a forged run can only claim hashes of files that its author knows.
//! - The user asks for it.
//!
//! In both cases only files that look like source code are quoted ([`content`]).

mod content;
mod files;
mod hashes;

pub use content::NoSource;
pub use files::{SourceAccess, SourceFiles};
pub use hashes::{SOURCES_FILE, SourceHashes};
