//! Reading a recording executes nothing that it names, starts no other program and makes no connection.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::launcher_support::*;
use memtrace_tests::programs::ProgramFolder;

const NONE: &[&str] = &[];

#[test]
fn reading_starts_no_program_and_makes_no_connection() {
    let programs = ProgramFolder::new();
    let no_exec = programs.program("safety/no_exec.c", "no_exec", NONE);
    let filtered = |arguments: &[&str], last: &Path| -> Output {
        let mut command = Command::new(&no_exec);
        output(command.arg(memtrace()).args(arguments).arg(last).current_dir(programs.path("")))
    };
    // The filter kills what it should: a recording needs a socket and a command.
    let recorded = output(Command::new(&no_exec).arg(memtrace()).args(["--", "true"]).current_dir(programs.path("")));
    assert_eq!(recorded.status.signal(), Some(libc::SIGSYS), "{}", stderr(&recorded));
    let run = programs.path("run");
    assert!(output(recording(&run).args([PRODUCER, "define", "events=1000", "write"])).status.success());
    let pickle = run.join(format!("{}.pickle", only_process(&run)["pid"]));
    for read in [&run, &traces(&run)[0], &pickle] {
        for arguments in [
            &["report"][..],
            &["report", "--json"],
            &["lines"],
            &["export", "-o", "out", "--to", "snapshot"],
            &["export", "-o", "out", "--to", "html"],
            &["export", "-o", "out", "--to", "perfetto"],
            &["export", "-o", "out", "--to", "speedscope"],
            &["export", "-o", "out", "--to", "csv"],
        ] {
            let ended = filtered(arguments, read);
            assert!(ended.status.success(), "{arguments:?} {}: {}", read.display(), stderr(&ended));
        }
    }
    // Python's `pickle.load` would call `os.system`.
    let evil = programs.path("evil.pickle");
    std::fs::write(&evil, b"\x80\x02cposix\nsystem\nq\x00X\x0b\x00\x00\x00touch OWNEDq\x01\x85q\x02Rq\x03.").unwrap();
    let ended = filtered(&["report"], &evil);
    assert_eq!(ended.status.code(), Some(2), "{}", stderr(&ended));
    assert!(!stderr(&ended).contains("signal"), "{}", stderr(&ended));
    assert!(!programs.path("OWNED").exists());
}
