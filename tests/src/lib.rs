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
/// Reads registers of x86-64, and needs ptrace, which emulators of other processors do not have.
#[cfg(target_arch = "x86_64")]
pub mod tracee;
pub mod unwind_check;
pub mod versions;
