//! Free-threaded CPython (3.13t and later) is refused in words: its objects and frames have another layout, and other
//! threads change them while a hook would read them. The process is unharmed, every event has its native stack, and the
//! report and `run.json` give the reason. The program has the symbols of such an interpreter.

use std::process::Command;

use crate::hostile_support::*;
use memtrace_tests::ledger::{assert_equal, ours, pid, read_all};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::{events, memtrace};

#[test]
fn a_free_threaded_python_is_refused_with_a_reason() {
    let builds = [
        r#"-DVERSION="3.13.0 experimental free-threading build (main, Oct  7 2024, 00:00:00) [GCC 13.2.0]""#,
        r#"-DVERSION="3.14.0 free-threading build (main, Oct  7 2025, 00:00:00) [GCC 14.2.0]""#,
    ];
    // Python's own spelling of the version may change; then the published flag still says it.
    let by_flag = [r#"-DVERSION="3.13.0 (main, Oct  7 2024, 00:00:00) [GCC 13.2.0]""#, "-DFLAG"];
    for options in [&builds[..1], &builds[1..], &by_flag] {
        let programs = ProgramFolder::new();
        let mut all = linked_with("libcudart.so.12");
        all.extend(options.iter().map(|option| (*option).to_owned()));
        let program = programs.program("hostile/free_threaded.c", "free_threaded", &all);
        let ledger = programs.path("ledger");
        let run = same_output(with_simcuda(&[&program]).env("SIMCUDA_LEDGER", &ledger));
        let trace = run.trace();
        let events = events(&trace);
        assert!(events.len() >= 400 && events.iter().all(|event| !event.stack.is_none()), "native stacks");
        // The file has the calls of both runs.
        assert_equal(&ours(&trace), &read_all(&ledger)[&pid(&trace)]);
        let notices: Vec<_> = trace.definitions().notices.iter().filter(|n| &*n.topic == "python").collect();
        let [notice] = notices[..] else { panic!("{notices:?}") };
        assert_eq!(notice.status.name(), "off");
        assert!(notice.text.starts_with("no Python stacks: free-threaded CPython is not supported"), "{}", notice.text);
        let report = Command::new(memtrace()).arg("report").arg(run.path()).output().unwrap();
        let report = String::from_utf8(report.stdout).unwrap();
        let words: Vec<&str> = report.split_whitespace().collect();
        assert!(words.join(" ").contains("free-threaded CPython is not supported"), "{report}");
    }
}
