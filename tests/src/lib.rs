//! Whole-process tests of memtrace.
