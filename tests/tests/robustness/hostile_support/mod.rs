//! Constants and helpers of the tests with hostile environments.
#![allow(dead_code, reason = "every test binary uses its part")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use memtrace_tests::traced_program::{Run, TracedProgram};

pub(crate) const NONE: &[&str] = &[];
/// The number of events of one allocation and its free through the runtime: each is recorded by the runtime and the
/// driver.
pub(crate) const PAIR: usize = 4;

/// Makes the folder readable for every user.
pub(crate) fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Requires that stderr is an error line and a help line, both with this prefix.
#[track_caller]
pub(crate) fn assert_error_with_help(message: &str, prefix: &str) {
    let lines: Vec<_> = message.lines().collect();
    let [error, help] = lines[..] else { panic!("{message}") };
    assert!(error.starts_with(&format!("{prefix}error: ")), "{message}");
    assert!(help.starts_with(&format!("{prefix}help: ")), "{message}");
}

/// Runs the program with and without memtrace and requires the same stdout, stderr and exit status.
#[track_caller]
pub(crate) fn same_output(traced: TracedProgram) -> Run {
    let alone = traced.run_alone();
    let run = traced.option("--quiet").run();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&alone.stdout), text(&run.output.stdout), "{}", text(&run.output.stderr));
    // The launcher's own lines on stderr begin with its name.
    let stderr = text(&run.output.stderr);
    let theirs: String = stderr.split_inclusive('\n').filter(|line| !line.starts_with("memtrace: ")).collect();
    assert_eq!(text(&alone.stderr), theirs);
    assert_eq!(alone.status.code(), run.output.status.code(), "{stderr}");
    assert!(alone.status.success(), "{alone:?}");
    run
}
