//! The snapshots and summaries in a run folder, and the programs of `tests/vizcheck` that check them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::traced_program::{Run, TracedProgram, root};

/// A run with PyTorch's own recorder enabled in the same process.
#[derive(Debug)]
pub struct Recorded {
    /// The run.
    pub run: Run,
    /// PyTorch's snapshot.
    pub oracle: NamedTempFile,
    /// The snapshot that the launcher wrote.
    pub pickle: PathBuf,
}

/// Runs a program of `tests/programs/torch` with PyTorch's recorder. The program ends right after taking PyTorch's
/// snapshot.
#[track_caller]
pub fn record(traced: TracedProgram) -> Recorded {
    let oracle = NamedTempFile::new().expect("a temporary file");
    let run = traced.env("MEMTRACE_TEST_ORACLE", oracle.path()).env("MEMTRACE_TEST_ORACLE_LAST", "1").run();
    run.assert_ended_well();
    let pickle = pickle(&run);
    Recorded { run, oracle, pickle }
}

/// The path of the only snapshot in a run folder.
#[track_caller]
pub fn pickle(run: &Run) -> PathBuf {
    let entries = std::fs::read_dir(run.path()).expect("a run folder");
    let mut pickles: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    pickles.retain(|p| p.extension() == Some(OsStr::new("pickle")));
    assert_eq!(pickles.len(), 1, "snapshots: {pickles:?}; stderr: {}", String::from_utf8_lossy(&run.output.stderr));
    pickles.remove(0)
}

/// Runs a program of `tests/vizcheck`, which must succeed, and returns the JSON that it printed.
#[track_caller]
pub fn vizcheck<I: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = I>) -> Value {
    let program = root().join("tests/vizcheck").join(program);
    let output = Command::new("python3").arg(program).args(arguments).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

impl Recorded {
    /// Compares the two snapshots and returns the counts of compared items.
    #[track_caller]
    pub fn same(&self, forward: bool) -> Value {
        let mut arguments = vec![self.pickle.as_os_str(), self.oracle.path().as_os_str()];
        if forward {
            arguments.push(OsStr::new("--forward"));
        }
        vizcheck("same.py", arguments)
    }
}

/// Fails the test when fewer items were compared than expected.
#[track_caller]
pub fn at_least(found: &Value, expected: &[(&str, u64)]) {
    for (what, least) in expected {
        assert!(found[what].as_u64().unwrap_or(0) >= *least, "{what}: {least} at least, in {found}");
    }
}

/// Parses a JSON file.
#[track_caller]
pub fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// The entry of the only process in `summary.json`.
#[track_caller]
pub fn summary(run: &Run) -> Value {
    json(&run.path().join("summary.json"))["processes"][0].take()
}

/// Compares the peaks in `summary.json` with PyTorch's statistics and returns the number of compared values.
#[track_caller]
pub fn assert_peaks(run: &Run, statistics: &Value, totals: &[&str]) -> usize {
    let summary = summary(run);
    assert_eq!(summary["losses"], serde_json::json!({}), "losses");
    let devices = summary["devices"].as_array().expect("devices");
    for device in devices {
        let theirs = &statistics["statistics"][device["device"].as_u64().expect("a device") as usize];
        for total in totals {
            let peak = &theirs[format!("{total}_bytes.all.peak")];
            assert!(peak.as_u64().is_some_and(|bytes| bytes > 0), "PyTorch's peak of {total}: {peak}");
            assert_eq!(
                &device["highest"][format!("{total}_bytes")],
                peak,
                "highest {total} (left: ours, right: PyTorch's)"
            );
        }
    }
    devices.len() * totals.len()
}

/// Compares our `statistics` of a device with PyTorch's `memory_stats`, the data of `torch.cuda.memory_summary`. Skips
/// keys that end in one of `not_yet`. Returns the number of compared values that are not zero.
#[track_caller]
pub fn assert_statistics(device: &Value, theirs: &Value, not_yet: &[&str]) -> usize {
    let ours = device["statistics"].as_object().expect("statistics");
    assert_eq!(ours.len(), 109, "nine figures, three pools, four columns, and errors");
    // Older PyTorch releases do not report requested bytes.
    let known = ours.iter().filter(|(key, _)| !theirs[key.as_str()].is_null());
    let compared: Vec<_> = known.filter(|(key, _)| !not_yet.iter().any(|column| key.ends_with(column))).collect();
    let wrong: Vec<String> = compared
        .iter()
        .filter(|(key, ours)| **ours != theirs[key.as_str()])
        .map(|(key, ours)| format!("{key}: ours {ours}, PyTorch's {}", theirs[key.as_str()]))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    compared.iter().filter(|(_, ours)| ours.as_u64() > Some(0)).count()
}
