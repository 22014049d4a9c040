//! `memtrace dry-run --vary`, `--max` and `--bounds`: the ends of their runs, and their figures.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use memtrace_tests::traced_program::{python, root};
use serde_json::Value;

use crate::launcher_support::*;

/// A dry run of a program of `tests/programs/launcher`, in a folder.
fn dry_run(folder: &Path, options: &[&str], program: &str, arguments: &[&str]) -> Command {
    // For the Python of the test environment.
    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(folder).arg(memtrace()).args(["dry-run", "--gpu", "h200", "-o", "run"]).args(options);
    command.arg("--").arg(python()).arg(root().join("tests/programs/launcher").join(program)).args(arguments);
    command
}

/// Whether a process exists and has not ended.
fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn check_signal(signal: i32, options: &[&str], expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pids");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let here = folder.path().to_str().unwrap();
    let mut command = dry_run(folder.path(), options, "dry_run_waits.py", &[here, "{n}"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The program of the second try runs, and has memory.
    let mut line = String::new();
    BufReader::new(std::fs::File::open(&pipe).unwrap()).read_line(&mut line).unwrap();
    let program: i32 = line.trim().parse().unwrap();
    assert!(is_running(program));
    kill(child.id() as i32, signal);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(128 + signal), "{}", stderr(&ended));
    let text = String::from_utf8_lossy(&ended.stdout);
    let has_first = text.lines().any(|line| line.trim_start().starts_with("1 ") && line.contains("fits, peak"));
    assert!(has_first, "{text}");
    let both = format!("{text}{}", stderr(&ended));
    assert!(both.contains(expected), "{both}");
    wait_for(|| !is_running(program));
}

#[test]
fn a_signal_ends_the_tries_and_prints_those_that_ended() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        check_signal(signal, &["--vary", "n=1,2,3"], "interrupted; the table has the tries that ended before");
        check_signal(signal, &["--max", "n=1:4"], "No answer: interrupted");
    }
}

#[test]
fn bounds_are_the_peaks_with_nothing_and_with_everything_selected() {
    let folder = tempfile::tempdir().unwrap();
    let program = "dry_run_values.py";
    let ended = output(&mut dry_run(folder.path(), &["--bounds"], program, &["selection"]));
    assert!(ended.status.success(), "{}", stderr(&ended));
    let read = |folder: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(folder.join("run/summary.json")).unwrap()).unwrap()
    };
    let summary = read(folder.path());
    let bounds = &summary["run"]["simulated"]["bounds"];
    let peak = |summary: &Value| summary["processes"][0]["devices"][0]["highest"]["allocated_bytes"].as_u64().unwrap();
    for (nonzero, bound) in [("zero", "smallest"), ("full", "largest")] {
        let alone = tempfile::tempdir().unwrap();
        let ended = output(&mut dry_run(alone.path(), &["--nonzero", nonzero], program, &["selection"]));
        assert!(ended.status.success(), "{}", stderr(&ended));
        assert_eq!(bounds[bound]["allocated_bytes"], peak(&read(alone.path())), "{nonzero}: {summary}");
    }
    let [smallest, largest] = ["smallest", "largest"].map(|bound| bounds[bound]["allocated_bytes"].as_u64().unwrap());
    assert!(smallest < peak(&summary) && peak(&summary) < largest, "{summary}");
    let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(report.contains("By the runs of --bounds, the peak is "), "{report}");
    // With as much memory as PyTorch reserves, and none for the context, the run with the largest sizes fails.
    let memory = format!("{}MiB", bounds["largest"]["reserved_bytes"].as_u64().unwrap() >> 20);
    let limited = tempfile::tempdir().unwrap();
    let ended = output(&mut dry_run(limited.path(), &["--bounds", "--memory", &memory], program, &["selection"]));
    assert!(ended.status.success(), "{}", stderr(&ended));
    assert_eq!(read(limited.path())["run"]["simulated"]["bounds"]["largest"]["is_out_of_memory"], true);
    let report = stderr(&ended).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(report.contains("The run with the largest sizes ran out of memory"), "{report}");
}
