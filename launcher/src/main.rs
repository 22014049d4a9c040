//! The binary `memtrace`.
fn main() {}
