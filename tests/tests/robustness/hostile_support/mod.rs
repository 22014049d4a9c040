//! What the tests of hostile surroundings share.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use memtrace_tests::victim::{Run, Victim};

pub(crate) const NONE: &[&str] = &[];
/// Events of one allocation and its free, by way of the runtime.
pub(crate) const PAIR: usize = 4;

/// Lets every user in.
pub(crate) fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs it with and without memtrace: what it says on either stream and how it ends is the same.
#[track_caller]
pub(crate) fn same_output(victim: Victim) -> Run {
    let alone = victim.run_alone();
    let run = victim.option("--quiet").run();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&alone.stdout), text(&run.output.stdout), "{}", text(&run.output.stderr));
    // What memtrace itself has to say begins with its name.
    let said = text(&run.output.stderr);
    let theirs: String = said.split_inclusive('\n').filter(|line| !line.starts_with("memtrace: ")).collect();
    assert_eq!(text(&alone.stderr), theirs);
    assert_eq!(alone.status.code(), run.output.status.code(), "{said}");
    assert!(alone.status.success(), "{alone:?}");
    run
}
