//! No loss is silent: what could not be recorded is named with its reason, in messages, in the report and in
//! `memtrace check`, however short the process.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::hostile_support::*;
use crate::launcher_support::Running;
use memtrace_tests::programs::ProgramFolder;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use memtrace_trace::counters::Counter;

/// `brief.c` over a driver without locks.
struct Fixture {
    programs: ProgramFolder,
    program: PathBuf,
}

impl Fixture {
    fn new() -> Fixture {
        let programs = ProgramFolder::new();
        let program = programs.program_over_bare_driver("hostile/brief.c", "brief");
        Fixture { programs, program }
    }

    /// A shell script whose `$1` is the program.
    fn script(&self, script: &str) -> TracedProgram {
        let words = ["sh".as_ref(), "-c".as_ref(), script.as_ref(), "sh".as_ref(), self.program.as_os_str()];
        TracedProgram::command(&words).env("LD_LIBRARY_PATH", self.programs.path(""))
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The processes of this program in the manifest's list of unrecordable processes.
fn unrecordable(run: &Run, program: &str) -> Vec<Value> {
    let manifest = run.manifest();
    let all = manifest["unrecordable"].as_array().unwrap().clone();
    let is_named = |process: &Value| Path::new(process["program"].as_str().unwrap()).ends_with(program);
    all.into_iter().filter(is_named).collect()
}

fn memtrace_on(run: &Path, words: &[&str]) -> Output {
    let (command, options) = words.split_first().unwrap();
    Command::new(memtrace()).arg(command).arg(run).args(options).output().unwrap()
}

/// Requires that the end of the run, the report and the check speak of a run in which nothing was recorded, with this
/// reason.
#[track_caller]
fn assert_reported(run: &Run, reason: &str) {
    let text = stderr_of(&run.output);
    assert!(text.contains(reason) && text.contains("nothing recorded: "), "{text}");
    assert!(!text.contains("no process allocated GPU memory"), "{text}");
    for words in [&["report"][..], &["check", "--max-peak", "1GiB"]] {
        let output = memtrace_on(&run.path(), words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr_of(&output));
        let text = stderr_of(&output);
        assert!(text.contains("no process was recorded: ") && text.contains(reason), "{words:?}: {text}");
        assert_error_with_help(&text, "");
    }
}

#[test]
fn a_limit_on_the_address_space_is_reported_however_short_the_process() {
    const REASON: &str = "its address space limit (ulimit -v) leaves no space for the recording";
    let fixture = Fixture::new();
    // The limit applies to one program of the command.
    let run = fixture.script(r#"ulimit -v 1048576; "$1" 8; true"#).run();
    assert_eq!(run.output.stdout, b"fine\n");
    let [process] = &unrecordable(&run, "brief")[..] else { panic!("{:#}", run.manifest()) };
    assert_eq!((process["reason"].as_str(), process["uses_cuda"].as_bool()), (Some(REASON), Some(true)));
    // The report is made at the 1st, 2nd, 4th ... lost event.
    let lost = process["lost_events"].as_u64().unwrap();
    let all = 8 * PAIR as u64;
    assert!(lost > all / 2 && lost <= all, "{lost} of {all}");
    let text = stderr_of(&run.output);
    assert!(text.contains("warning: cannot record brief (") && text.contains("events are lost"), "{text}");
    assert_reported(&run, REASON);
    let left = std::fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: std::collections::BTreeSet<_> = left.collect();
    let expected = ["host.jsonl", "run.json"].map(Into::into).into();
    assert_eq!(left, expected, "the process's report is in run.json");

    // The limit applies to memtrace too.
    let folder = fixture.programs.path("run");
    let output = Command::new("sh")
        .args(["-c", r#"ulimit -v 1048576; exec "$0" "$@""#])
        .arg(memtrace())
        .arg("-o")
        .arg(&folder)
        .arg("--")
        .arg(&fixture.program)
        .arg("8")
        .env("LD_LIBRARY_PATH", fixture.programs.path(""))
        .output()
        .unwrap();
    assert!(output.status.success() && stderr_of(&output).contains(REASON), "{}", stderr_of(&output));
}

#[test]
fn a_part_of_the_command_that_is_not_recorded_fails_the_check() {
    let fixture = Fixture::new();
    let run = fixture.script(r#""$1" 2; (ulimit -v 1048576; "$1" 8); true"#).run();
    let report = memtrace_on(&run.path(), &["report"]);
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    let lost = unrecordable(&run, "brief")[0]["lost_events"].as_u64().unwrap();
    let headline = format!("{} events, {lost} lost, 1 process not recorded", 2 * PAIR);
    assert!(text.contains(&headline) && text.contains("address space limit"), "{text}");
    let limit = ["check", "--max-peak", "1GiB"];
    let check = memtrace_on(&run.path(), &limit);
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert_eq!(check.status.code(), Some(1), "{text}");
    assert!(text.contains("could not record brief (") && text.contains("--allow-incomplete"), "{text}");
    let accepted = memtrace_on(&run.path(), &[&limit[..], &["--allow-incomplete"]].concat());
    assert_eq!(accepted.status.code(), Some(0), "{}", String::from_utf8_lossy(&accepted.stdout));
}

#[test]
fn short_children_in_another_network_namespace_are_reported() {
    let fixture = Fixture::new();
    let run = fixture.script(r#"for i in 1 2 3 4 5 6 7 8; do unshare --net "$1" 1; done"#).run();
    assert_eq!(run.output.stdout, b"fine\n".repeat(8));
    let processes = unrecordable(&run, "brief");
    assert_eq!(processes.len(), 8, "{processes:#?}");
    // The launcher may also find one of them while it lives.
    let reason = "another network namespace";
    assert!(processes.iter().all(|process| process["reason"].as_str().unwrap().contains(reason)), "{processes:#?}");
    assert_reported(&run, reason);
}

#[test]
fn short_children_without_the_library_are_reported_or_counted() {
    let fixture = Fixture::new();
    let script = r#"for i in 1 2 3 4 5 6 7 8; do env -i LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "$1" 1; done"#;
    let run = fixture.script(script).run();
    assert_eq!(run.output.stdout, b"fine\n".repeat(8));
    let text = stderr_of(&run.output);
    let manifest = run.manifest();
    let (listed, unchecked) = (unrecordable(&run, "brief").len() as u64, manifest["unchecked"].as_u64().unwrap());
    eprintln!("{listed} listed, {unchecked} unchecked, by {}", manifest["discovery"]);
    if listed + unchecked > 0 {
        assert!(!text.contains("no process allocated GPU memory"), "{text}");
    }
    if manifest["discovery"] != "kernel_reports" {
        eprintln!("skipped: the kernel does not report processes here, so such short ones may be missed");
        return;
    }
    assert!(listed + unchecked >= 8, "{manifest:#}");
    let is_named = |process: &Value| process["reason"].as_str().unwrap().contains("LD_PRELOAD in its environment");
    assert!(unrecordable(&run, "brief").iter().all(is_named), "{manifest:#}");
}

#[test]
fn a_launcher_that_is_killed_before_the_first_event_is_reported() {
    let fixture = Fixture::new();
    let folder = fixture.programs.path("run");
    let mut command = Command::new(memtrace());
    command.arg("--quiet").arg("-o").arg(&folder).arg("--").arg(&fixture.program).args(["wait", "2"]);
    command.env("LD_LIBRARY_PATH", fixture.programs.path("")).stdin(Stdio::piped());
    let mut launcher = Running::start(&mut command);
    let mut stdin = launcher.child.stdin.take().unwrap();
    assert_eq!(launcher.line(), "ready");
    launcher.signal(libc::SIGKILL);
    launcher.child.wait().unwrap();
    let report = || stderr_of(&memtrace_on(&folder, &["report"]));
    let text = report();
    assert!(text.contains("no process was recorded: memtrace was killed, or is still recording"), "{text}");
    assert_error_with_help(&text, "");
    // The program goes on, and cannot be recorded.
    stdin.write_all(b"\n").unwrap();
    assert_eq!(launcher.line(), "fine");
    let text = report();
    assert!(text.contains("could not record brief (") && text.contains("the launcher, which has ended"), "{text}");
}

#[test]
fn events_that_interrupt_a_hook_are_lost_events() {
    let fixture = Fixture::new();
    // Where a signal arrives is up to the machine. Nearly every run has one inside a hook.
    let (run, pairs, lost) = (0..50)
        .find_map(|_| {
            let run = fixture.script(r#"exec "$1" signals 300"#).run();
            assert!(run.output.status.success(), "{}", stderr_of(&run.output));
            let pairs: u64 = String::from_utf8_lossy(&run.output.stdout).trim().parse().unwrap();
            let trace = run.trace();
            let lost = trace.counter(Counter::Reentered);
            let all = trace.event_count() + lost + trace.counter(Counter::EventsDropped);
            assert_eq!(all, pairs * PAIR as u64, "every event is recorded or counted");
            (lost > 0).then_some((run, pairs, lost))
        })
        .expect("a signal that arrives inside a hook");
    let report = memtrace_on(&run.path(), &["report"]);
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(!text.contains(" 0 lost") && text.contains("reentered"), "{lost} of {pairs} pairs: {text}");
    let limit = ["check", "--max-peak", "1GiB"];
    let check = memtrace_on(&run.path(), &limit);
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(check.status.code() == Some(1) && text.contains("reentered"), "{text}");
    let accepted = memtrace_on(&run.path(), &[&limit[..], &["--allow-incomplete"]].concat());
    assert_eq!(accepted.status.code(), Some(0), "{}", String::from_utf8_lossy(&accepted.stdout));
}

#[test]
fn programs_that_load_the_library_need_no_check_however_short() {
    let run = TracedProgram::command(&["sh", "-c", "for i in $(seq 200); do env true; done"]).run();
    let manifest = run.manifest();
    assert_eq!(manifest["unchecked"], 0, "{manifest:#}");
    if manifest["discovery"] == "kernel_reports" {
        let text = stderr_of(&run.output);
        assert!(text.contains("nothing recorded: no process allocated GPU memory"), "{text}");
    }
}

#[test]
fn a_recorded_run_has_no_such_reports() {
    let fixture = Fixture::new();
    let run = fixture.script(r#"exec "$1" 3"#).run();
    assert_eq!(run.trace().event_count(), 3 * PAIR as u64);
    let manifest = run.manifest();
    assert_eq!(manifest["unrecordable"].as_array().map(Vec::len), Some(0), "{manifest:#}");
    let report = memtrace_on(&run.path(), &["report"]);
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(text.contains(&format!("{} events, 0 lost", 3 * PAIR)) && !text.contains("ot recorded"), "{text}");
}

/// A program removes its trace: the launcher does not call the recording complete.
#[test]
fn a_trace_that_the_program_removed_is_reported() {
    let fixture = Fixture::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let script = r#""$1" 8; until ls "$2"/*.mtr 2>&1; do sleep 0.01; done >"$2.list"; rm "$2"/*.mtr"#;
    let mut command = Command::new(memtrace());
    command.arg("-o").arg(&path).args(["--", "sh", "-c", script, "sh"]).arg(&fixture.program).arg(&path);
    let output = command.env("LD_LIBRARY_PATH", fixture.programs.path("")).output().unwrap();
    let text = stderr_of(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(&format!("was removed, with {} events that memtrace wrote", 8 * PAIR)), "{text}");
    assert!(!text.contains("is complete"), "{text}");
}

/// Traces were removed or cut after the run: every report says what is missing.
#[test]
fn a_trace_that_was_removed_or_cut_later_is_reported() {
    let fixture = Fixture::new();
    let run = fixture.script(r#""$1" 8; "$1" 8"#).run();
    let traces: Vec<PathBuf> = std::fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let mut traces: Vec<PathBuf> =
        traces.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "mtr")).collect();
    traces.sort();
    let assert_incomplete = |expected: &str| {
        let report = memtrace_on(&run.path(), &["report", "--json"]);
        let summary: Value = serde_json::from_slice(&report.stdout).unwrap_or_else(|e| panic!("{e}: {report:?}"));
        assert!(summary["not_recorded"].to_string().contains(expected), "{:#}", summary["not_recorded"]);
        let check = memtrace_on(&run.path(), &["check", "--max-peak", "100GiB"]);
        assert_eq!(check.status.code(), Some(1), "{}", stderr_of(&check));
    };
    let check = memtrace_on(&run.path(), &["check", "--max-peak", "100GiB"]);
    assert_eq!(check.status.code(), Some(0), "{}", stderr_of(&check));
    let [first, second] = &traces[..] else { panic!("{traces:?}") };
    std::fs::remove_file(first).unwrap();
    assert_incomplete("was removed, with");
    std::fs::File::options().write(true).open(second).unwrap().set_len(300).unwrap();
    assert_incomplete("something cut it");
}
