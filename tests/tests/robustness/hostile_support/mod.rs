//! Constants and helpers of the tests with hostile environments.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use memtrace_tests::victim::{Run, Victim};

pub(crate) const NONE: &[&str] = &[];
/// The number of events of one allocation and its free through the runtime: each is recorded by the runtime and the
/// driver.
pub(crate) const PAIR: usize = 4;

/// Makes the folder readable for every user.
pub(crate) fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs the program with and without memtrace and requires the same stdout, stderr and exit status.
#[track_caller]
pub(crate) fn same_output(victim: Victim) -> Run {
    let alone = victim.run_alone();
    let run = victim.option("--quiet").run();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&alone.stdout), text(&run.output.stdout), "{}", text(&run.output.stderr));
    // The launcher's own lines on stderr begin with its name.
    let said = text(&run.output.stderr);
    let theirs: String = said.split_inclusive('\n').filter(|line| !line.starts_with("memtrace: ")).collect();
    assert_eq!(text(&alone.stderr), theirs);
    assert_eq!(alone.status.code(), run.output.status.code(), "{said}");
    assert!(alone.status.success(), "{alone:?}");
    run
}
