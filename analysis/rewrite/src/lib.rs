//! Makes new traces from a trace: without its oldest events (`memtrace run --keep`), or without the names of its
//! program (`memtrace redact`).

mod redact;
mod rotation;

pub use redact::{KEY_BYTES, Redactor};
pub use rotation::{Keep, Rotated, rotate};
