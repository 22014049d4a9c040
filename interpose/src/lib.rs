//! The library that is preloaded into the traced process.
//!
//! It must never change what the program sees: see "Laws" in ARCHITECTURE.md.
