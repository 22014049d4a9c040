//! Runs in a memory cgroup, as in a container or a batch job: the launcher shares the limit with the program.
//!
//! The oracle is the simulated CUDA's ledger. Without the right to make a cgroup a test says that it has checked
//! nothing.

use std::process::Command;

use crate::crash_support::*;
use crate::memory_cgroup::Cgroup;
use memtrace_tests::ledger::{assert_equal, calls_of};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::memtrace;

/// The number of events of one allocation and its free: the driver and the runtime record each.
const PAIR: u64 = 4;

fn start(pairs: u64) -> (ProgramFolder, Scenario) {
    let programs = ProgramFolder::new();
    let program = programs.program("crash/eat.c", "eat", &linked_with("libcudart.so.12"));
    let pairs = pairs.to_string();
    let scenario = Scenario::start(with_simcuda(&[program.as_os_str(), pairs.as_ref()]), true, None);
    (programs, scenario)
}

/// A cgroup with this limit. `None`, with a message, where this machine does not allow one.
fn cgroup(limit: &str) -> Option<Cgroup> {
    let cgroup = Cgroup::new(limit);
    if cgroup.is_none() {
        println!("SKIPPED: no memory cgroup can be made here; run this test as root");
    }
    cgroup
}

/// Moves the launcher and the program into the cgroup, and lets the program make its calls.
#[track_caller]
fn make_calls_inside(cgroup: &Cgroup, scenario: &mut Scenario, pairs: u64) {
    cgroup.add(scenario.launcher.id() as i32);
    cgroup.add(scenario.pid);
    scenario.send_line();
    assert_eq!(scenario.line(), format!("made {pairs}"));
}

#[track_caller]
fn assert_all_recorded(scenario: &Scenario) {
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    let events = all_events(trace);
    let end = trace.end().expect("an end");
    assert_eq!((end.lost, end.late), (0, 0));
    assert_equal(&calls_of(trace, &events), &scenario.ledgers()[&(scenario.pid as u32)]);
}

/// The program takes all memory that the cgroup allows. The kernel kills it, and the launcher writes everything.
#[test]
fn the_oom_killer_takes_the_program_and_spares_the_launcher() {
    const PAIRS: u64 = 500;
    let Some(cgroup) = cgroup("256M") else { return };
    let (_programs, mut scenario) = start(PAIRS);
    make_calls_inside(&cgroup, &mut scenario, PAIRS);
    scenario.send_line();
    assert_eq!(scenario.end(), Ending { code: 128 + libc::SIGKILL, stdout: String::new() });
    assert!(cgroup.has_killed(scenario.pid));
    assert_eq!(scenario.launcher_messages(), "");
    assert_all_recorded(&scenario);
    let manifest = scenario.manifest();
    assert_eq!((&manifest["state"], &manifest["losses"]["lost"]), (&"ended".into(), &0.into()));
    for name in ["summary.txt", "summary.json"] {
        assert!(scenario.run().join(name).exists(), "the analysis found memory: {name}");
    }
    // The report says who ended the program, and who had the memory.
    let summary = std::fs::read(scenario.run().join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("JSON");
    let host = &summary["host"];
    assert_eq!((&host["limit"], &host["limit_bytes"]), (&"control_group".into(), &(256u64 << 20).into()), "{host}");
    assert_eq!(host["kill"]["is_certain"], true, "{host}");
    assert_eq!(summary["run"]["outcome"], "killed by the kernel: main memory was full");
    let text = std::fs::read_to_string(scenario.run().join("summary.txt")).expect("a report");
    assert!(text.contains("Killed by the kernel: main memory was full"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("MiB of 256 MiB (the control group's limit); most: eat ("), "{text}");
    scenario.assert_nothing_is_left();
}

/// A program whose main memory grows steadily. When half of the samples are taken, the report says when the kernel will
/// kill it, and the kernel does so at about that time.
#[test]
fn the_time_until_the_oom_killer_comes_is_forecast() {
    const PAIRS: u64 = 5;
    let Some(cgroup) = cgroup("384M") else { return };
    let programs = ProgramFolder::new();
    let program = programs.program("crash/eat.c", "eat", &linked_with("libcudart.so.12"));
    let [pairs, pause] = [PAIRS.to_string(), "60000".to_owned()];
    let command = [program.as_os_str(), pairs.as_ref(), pause.as_ref()];
    let mut scenario = Scenario::start(with_simcuda(&command), true, None);
    cgroup.add(scenario.pid);
    scenario.send_line();
    assert_eq!(scenario.line(), format!("made {PAIRS}"));
    scenario.send_line();
    assert_eq!(scenario.end(), Ending { code: 128 + libc::SIGKILL, stdout: String::new() });
    // The recording as it was at 60 % of the time: without the later samples and the end.
    let text = std::fs::read_to_string(scenario.run().join("host.jsonl")).expect("samples");
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let time = |line: &serde_json::Value| line["time_ns"].as_u64().unwrap_or(0);
    let [first, killed] = [lines.first(), lines.last()].map(|line| time(line.expect("a line")));
    let cut = first + (killed - first) * 6 / 10;
    let kept: Vec<&str> =
        text.lines().zip(&lines).filter(|(_, line)| time(line) <= cut).map(|(text, _)| text).collect();
    let samples = kept.iter().filter(|line| line.contains("\"sample\"")).count();
    assert!(samples >= 20, "{samples} samples");
    std::fs::write(scenario.run().join("host.jsonl"), kept.join("\n")).expect("the shorter file");
    let report = Command::new(memtrace()).args(["report", "--json"]).arg(scenario.run()).output().expect("a report");
    let summary: serde_json::Value = serde_json::from_slice(&report.stdout).expect("JSON");
    let growth = &summary["host"]["growth"];
    let forecast = growth["limit_in_ns"].as_u64().unwrap_or_else(|| panic!("a forecast: {}", summary["host"]));
    let real = killed - time(&serde_json::from_str(kept.last().expect("a sample")).expect("JSON"));
    let error = forecast.abs_diff(real) as f64 / real as f64;
    assert!(error < 0.25, "forecast {forecast} ns, real {real} ns: {growth}");
    assert!(growth["text"].as_str().is_some_and(|text| text.contains("the control group's limit is reached in about")));
}

/// A container whose memory is used up: the kernel ends all processes together, as Kubernetes requests it.
#[test]
fn a_container_that_is_killed_as_a_whole_leaves_a_readable_run() {
    const PAIRS: u64 = 500;
    let Some(cgroup) = cgroup("256M") else { return };
    let (_programs, mut scenario) = start(PAIRS);
    make_calls_inside(&cgroup, &mut scenario, PAIRS);
    wait_for("what is published to be written", || scenario.written() == PAIR * PAIRS);
    if cgroup.kill_together() {
        scenario.send_line();
    } else {
        // Without `memory.oom.group`: neither process runs again after the first signal.
        let processes = [scenario.launcher.id() as i32, scenario.pid];
        processes.iter().for_each(|pid| kill(*pid, libc::SIGSTOP));
        processes.iter().for_each(|pid| wait_for("the stop", || state(*pid) == Some('T')));
        processes.iter().for_each(|pid| kill(*pid, libc::SIGKILL));
    }
    assert_eq!(scenario.end_of_orphan(), Ending { code: 128 + libc::SIGKILL, stdout: String::new() });
    let [(_, trace)] = &scenario.traces()[..] else { panic!("one trace") };
    assert!(trace.end().is_none() && trace.damage().is_none());
    assert_equal(&calls_of(trace, &all_events(trace)), &scenario.ledgers()[&(scenario.pid as u32)]);
    let report = scenario.report();
    assert!(report.contains("recording was cut off"), "{report}");
}

/// The launcher, the analysis at the end, and the program with its ring stay below a small limit.
#[test]
fn a_small_cgroup_suffices_for_a_recording() {
    const PAIRS: u64 = 50_000;
    let Some(cgroup) = cgroup("96M") else { return };
    let (_programs, mut scenario) = start(PAIRS);
    make_calls_inside(&cgroup, &mut scenario, PAIRS);
    scenario.close_stdin();
    assert_eq!(scenario.end(), Ending { code: 3, stdout: String::new() });
    assert!(!cgroup.has_killed(scenario.pid), "the kernel had to kill a process");
    assert_eq!(scenario.launcher_messages(), "");
    assert_all_recorded(&scenario);
    assert!(scenario.run().join("summary.json").exists());
    scenario.assert_nothing_is_left();
}
