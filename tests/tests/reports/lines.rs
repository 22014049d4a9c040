//! `memtrace lines` against pytorch_memlab's line profiler in the same program, on our recording and on PyTorch's own
//! snapshot.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use memtrace_tests::traced_program::{TracedProgram, memtrace, packages};
use serde_json::Value;

/// The packages that memlab's profiler needs beyond the test environment.
const PACKAGES: [&str; 7] = [
    "pytorch_memlab==0.3.2",
    "pandas==2.2.3",
    "calmsize==0.1.3",
    "python-dateutil==2.9.0.post0",
    "pytz==2025.2",
    "six==1.17.0",
    "tzdata==2025.2",
];

/// Rows by function and line.
type Table<T> = BTreeMap<(String, u64), T>;

/// Memlab's table: active peak, reserved peak, and whether anything was allocated or freed in the line.
fn memlab() -> Table<(u64, u64, bool)> {
    let output =
        TracedProgram::python("torch/line_table.py", &["memlab"]).env("PYTHONPATH", packages(&PACKAGES)).run_alone();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<(String, u64, u64, u64, u64)> = serde_json::from_slice(&output.stdout).unwrap();
    rows.into_iter().map(|(f, line, active, reserved, moved)| ((f, line), (active, reserved, moved > 0))).collect()
}

/// The table of `memtrace lines`.
fn ours(run: &Path, options: &[&str]) -> Table<Value> {
    let output =
        Command::new(memtrace()).args(["lines", "--json", "--top", "99"]).args(options).arg(run).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut table = Table::new();
    for function in report["functions"].as_array().unwrap() {
        let name = function["function"].as_str().unwrap();
        for line in function["lines"].as_array().unwrap().iter().filter(|line| line.get("figures").is_some()) {
            assert!(line["text"].as_str().is_some(), "the source is there: {line}");
            table.insert((name.to_owned(), line["line"].as_u64().unwrap()), line["figures"].clone());
        }
    }
    table
}

#[test]
fn figures_match_pytorch_memlab() {
    let memlab = memlab();
    let run = TracedProgram::python("torch/line_table.py", &[]).run();
    run.assert_ended_well();
    let mut ours = ours(&run.path(), &["--file", "line_table.py"]);
    ours.retain(|(function, _), _| function == "work" || function == "Block.forward");
    for (place, figures) in &ours {
        let (active, reserved, _) = memlab.get(place).unwrap_or_else(|| panic!("memlab has no {place:?}"));
        let peaks = (figures["active_peak_bytes"].as_u64().unwrap(), figures["reserved_peak_bytes"].as_u64().unwrap());
        assert_eq!(peaks, (*active, *reserved), "{place:?}");
    }
    // A line without an event has no row in ours. Memlab is called for every line, and saw no change in memory there
    // either.
    for (place, _) in memlab.iter().filter(|(_, (.., moved))| *moved) {
        assert!(ours.contains_key(place), "{place:?} allocated or freed: {:?}", ours.keys());
    }
    assert_eq!(ours.len(), 11, "{ours:#?}");
}

#[test]
fn a_snapshot_of_pytorch_gives_the_same_figures() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("snapshot.pickle");
    let run = TracedProgram::python("torch/line_table.py", &["snapshot", file.to_str().unwrap()]).run();
    run.assert_ended_well();
    let trace = ours(&run.path(), &["--function", "work"]);
    let snapshot = ours(&file, &["--function", "work"]);
    assert_eq!(trace.keys().collect::<Vec<_>>(), snapshot.keys().collect::<Vec<_>>());
    for (place, figures) in &trace {
        for name in ["active_peak_bytes", "reserved_peak_bytes", "allocated_bytes", "allocations", "net_bytes"] {
            assert_eq!(figures[name], snapshot[place][name], "{place:?} {name}");
        }
        assert_eq!(snapshot[place]["times"], 0, "threads are unknown there");
    }
}

#[test]
fn an_unknown_function_is_an_error() {
    let run = TracedProgram::python("torch/line_table.py", &[]).run();
    run.assert_ended_well();
    let output = Command::new(memtrace()).args(["lines", "--function", "nobody"]).arg(run.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("in the function nobody") && error.contains("to list all functions"), "{error}");
}
