//! Whole-process tests of memtrace: the code that the test binaries in `tests/tests` share.

pub mod distributed;
pub mod disturbance;
pub mod golden;
pub mod json_schema;
pub mod ledger;
pub mod oracle;
pub mod programs;
pub mod snapshots;
pub mod tracee;
pub mod victim;
