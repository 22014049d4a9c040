//! Files that the user named: a disk that is full, or another failure, leaves neither a part of a file under its name
//! nor anything beside it, and an older file stays.
//!
//! The limit of a file's size (`ulimit -f 0`) fails every write to a file as a full disk does, without root.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::launcher_support::*;

const INTRUDER: &str = env!("CARGO_BIN_EXE_intruder");
/// The content of an older file.
const OLDER: &[u8] = b"older\n";

/// A recorded run.
fn recorded(folder: &Path) -> PathBuf {
    let run = folder.join("run");
    let output = output(recording(&run).args([INTRUDER, "names"]));
    assert!(output.status.success(), "{output:?}");
    run
}

/// Runs memtrace where no file can grow.
fn with_full_disk(here: &Path, words: &[&str]) -> Output {
    let script = "ulimit -f 0; trap '' XFSZ; exec \"$@\"";
    output(Command::new("sh").args(["-c", script, "sh"]).arg(memtrace()).args(words).current_dir(here))
}

/// The paths of the files in a folder and in those below it.
fn files(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        match entry.path().is_dir() {
            true => files.extend(self::files(&entry.path()).iter().map(|file| format!("{name}/{file}"))),
            false => files.push(name),
        }
    }
    files.sort();
    files
}

/// The formats that `memtrace export` lists.
fn formats() -> Vec<String> {
    let script = output(Command::new(memtrace()).args(["completions", "bash"]));
    let script = String::from_utf8(script.stdout).unwrap();
    let list = script.split_once("--to)").unwrap().1.split_once("-W \"").unwrap().1;
    list.split_once('"').unwrap().0.split(' ').map(str::to_owned).collect()
}

#[test]
fn a_full_disk_leaves_no_part_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let run = recorded(folder.path());
    let run = run.to_str().unwrap();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let formats = formats();
    assert!(formats.len() >= 9 && formats.contains(&"csv".to_owned()), "{formats:?}");
    let mut calls: Vec<Vec<&str>> = Vec::new();
    for format in &formats {
        let file = if format == "timeline" { "file.svg" } else { "file" };
        // Parquet is written into a folder, by the names of tables.
        let named = if format == "parquet" { "." } else { file };
        calls.push(vec!["export", run, "--to", format, "-o", named]);
        // The summary goes to stdout.
        if format != "json" {
            calls.push(vec!["export", run, "--to", format]);
        }
    }
    calls.extend([
        vec!["export", run, "--to", "parquet", "--partition", "-o", "."],
        vec!["report", run, "--ranks", "--html", "file.html"],
        vec!["lines", run, "-o", "file"],
        vec!["lines", run, "--json", "-o", "file"],
        vec!["lines", run, "--html", "-o", "file"],
        vec!["lines", run, "--html", "file.html"],
        vec!["lines", run, "--html"],
        vec!["report", run, "--html", "file.html"],
        vec!["report", run, "--html"],
        vec!["diff", run, run, "--html", "file.html"],
        vec!["diff", run, run, "--html"],
        vec!["man", "-o", "."],
        vec!["redact", run, "-o", "copy"],
    ]);
    for call in calls {
        for name in ["file", "file.svg", "file.html", "diff.html", "lines.html", "report.html", "memtrace.1"] {
            std::fs::write(out.join(name), OLDER).unwrap();
        }
        let before = files(&out);
        let output = with_full_disk(&out, &call);
        assert_eq!(output.status.code(), Some(2), "{call:?}: {output:?}");
        let message = stderr(&output);
        // It names the file, or for tables their folder.
        let named = call.windows(2).find(|pair| matches!(pair[0], "-o" | "--html") && !pair[1].starts_with('-'));
        let is_named =
            named.is_none_or(|pair| [": ", "/"].iter().any(|end| message.contains(&format!("{}{end}", pair[1]))));
        assert!(is_named && message.contains("File too large"), "{call:?}: {message}");
        for name in &before {
            assert_eq!(std::fs::read(out.join(name)).unwrap(), OLDER, "{call:?}: {name}");
        }
        assert_eq!(files(&out), before, "{call:?}");
        assert!(!out.join("copy").exists(), "{call:?}");
    }
}

#[test]
fn a_snapshot_of_a_running_program_is_complete_or_missing() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let mut command = recording(&run);
    command.args([INTRUDER, "names", "say=ready", "wait"]).stdin(std::process::Stdio::piped());
    let mut running = Running::start(&mut command);
    assert_eq!(running.line(), "ready");
    let run = run.to_str().unwrap();
    for name in [
        "now.pickle",
        "now.html",
        "now.json",
        "now.txt",
        "now.csv",
        "now.svg",
        "now.pftrace",
        "now.folded",
        "now.pb.gz",
    ] {
        let output = with_full_disk(&out, &["snapshot", run, "-o", name]);
        assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
        assert!(stderr(&output).contains(name) && stderr(&output).contains("File too large"), "{name}: {output:?}");
        assert_eq!(files(&out), [""; 0], "{name}");
    }
}

/// The error names the file that cannot be written, not the one that is read. It names the one that is read if that is
/// the reason.
#[test]
fn redact_names_the_file_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let run = recorded(folder.path());
    let (run_path, here) = (run.to_str().unwrap(), folder.path());
    let trace = files(&run).into_iter().find(|name| name.ends_with(".mtr")).unwrap();
    let full = stderr(&with_full_disk(here, &["redact", run_path, "-o", "copy"]));
    assert_eq!(full, format!("error: cannot write copy/{trace}: File too large\n"));
    let redact = |run: &str| {
        let output = output(Command::new(memtrace()).args(["redact", run, "-o", "a/b/copy"]).current_dir(here));
        assert_eq!(output.status.code(), Some(2));
        assert!(!here.join("a").exists(), "no folder is left");
        stderr(&output)
    };
    std::fs::write(run.join("run.json"), "{").unwrap();
    let broken = redact(run_path);
    assert!(broken.contains(&format!("cannot redact {run_path}/run.json: ")), "{broken}");
    assert!(!here.join("copy").exists());
    // A folder that has files is not touched.
    let used = output(Command::new(memtrace()).args(["redact", run_path, "-o", run_path]));
    assert!(stderr(&used).contains("it is not empty") && run.join(&trace).exists(), "{used:?}");
    // An empty folder stays.
    std::fs::create_dir(here.join("empty")).unwrap();
    let full = with_full_disk(here, &["redact", run_path, "-o", "empty"]);
    assert_eq!(full.status.code(), Some(2));
    assert_eq!(files(&here.join("empty")), [""; 0]);
}
