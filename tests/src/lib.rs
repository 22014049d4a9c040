//! Whole-process tests of memtrace: the code that the test binaries in `tests/tests` share.

pub mod block_changes;
pub mod distributed;
pub mod golden;
pub mod json_schema;
pub mod ledger;
pub mod oracle;
pub mod parallel;
pub mod programs;
pub mod random_delays;
pub mod snapshots;
pub mod suggestions;
pub mod traced_program;
pub mod tracee;
pub mod unwind_check;
pub mod versions;
