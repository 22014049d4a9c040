//! `memtrace lines` against pytorch_memlab's line profiler in the same program, on our recording and on PyTorch's own
//! snapshot.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use memtrace_tests::traced_program::{TracedProgram, memtrace, packages, python};
use serde_json::Value;

/// The packages that memlab's profiler needs beyond the test environment.
const PACKAGES: [&str; 6] = [
    "pytorch_memlab==0.3.2",
    "pandas==3.1.1",
    "calmsize==0.1.3",
    "python-dateutil==2.9.0.post0",
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
    // PyTorch's snapshot does not prove that it was made with the files of this machine.
    let snapshot = ours(&file, &["--function", "work", "--sources"]);
    assert_eq!(trace.keys().collect::<Vec<_>>(), snapshot.keys().collect::<Vec<_>>());
    for (place, figures) in &trace {
        for name in ["active_peak_bytes", "reserved_peak_bytes", "allocated_bytes", "allocations", "net_bytes"] {
            assert_eq!(figures[name], snapshot[place][name], "{place:?} {name}");
        }
        assert_eq!(snapshot[place]["times"], 0, "threads are unknown there");
    }
}

/// Runs `memtrace` in `folder` and returns what it prints and writes there, as text.
fn everything(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new(memtrace()).args(arguments).current_dir(folder).output().unwrap();
    let has_run = matches!(output.status.code(), Some(0 | 1));
    assert!(has_run, "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut all = [output.stdout, output.stderr].concat();
    for entry in std::fs::read_dir(folder).unwrap() {
        all.extend(std::fs::read(entry.unwrap().path()).unwrap());
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// A snapshot from elsewhere names files of the reader. No command quotes them, unless the user asks for source files.
#[test]
fn a_foreign_snapshot_quotes_no_file() {
    const SECRET: &str = "correct horse battery staple";
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = home.path().join(name);
        std::fs::write(&path, format!("{SECRET} of {name}\n").repeat(3)).unwrap();
        path
    };
    let files = ["id_rsa", "server.pem", "notes.txt", "settings.py"].map(file);
    let frames = |path: &Path| {
        serde_json::json!([
            { "name": "forward", "filename": path, "line": 2 },
            { "name": "<module>", "filename": path, "line": 3 },
        ])
    };
    let mut events: Vec<Value> = Vec::new();
    for (path, address) in files.iter().zip((0x7f00_0000_0000_u64..).step_by(2 << 20)) {
        for action in ["segment_alloc", "alloc"] {
            events.push(serde_json::json!({
                "action": action, "addr": address, "size": 2 << 20, "stream": 0, "frames": frames(path),
                // The files do not seem to have changed since: the recording claims to end in the year 2096.
                "time_us": 4_000_000_000_000_000_u64 + events.len() as u64,
            }));
        }
    }
    let snapshot = home.path().join("foreign.json");
    let content = serde_json::json!({ "device_traces": [events], "segments": [] });
    std::fs::write(&snapshot, content.to_string()).unwrap();
    let snapshot = snapshot.to_str().unwrap();
    let run = |arguments: &[&str]| {
        let here = tempfile::tempdir().unwrap();
        let (command, rest) = arguments.split_first().unwrap();
        everything(here.path(), &[&[*command, snapshot], rest].concat())
    };
    for format in ["snapshot", "html", "json", "timeline", "csv", "perfetto", "speedscope", "folded", "parquet"] {
        assert!(!run(&["export", "--to", format]).contains(SECRET), "{format}");
    }
    for command in ["lines", "lines --html", "lines --json", "report", "report --json", "check --max-peak 1GiB"] {
        let command: Vec<&str> = command.split(' ').collect();
        assert!(!run(&command).contains(SECRET), "{command:?}");
    }
    assert!(!run(&["diff", snapshot]).contains(SECRET));
    assert!(run(&["lines"]).contains("--sources"), "the report says how to see the lines");
    // On request, the source file is quoted, but no key and no text.
    let quoted = run(&["lines", "--sources", "--top", "9"]);
    assert!(quoted.contains(&format!("{SECRET} of settings.py")), "{quoted}");
    for other in ["id_rsa", "server.pem", "notes.txt"] {
        assert!(!quoted.contains(&format!("{SECRET} of {other}")), "{other}: {quoted}");
    }
}

/// A recording quotes its own source without an option, also when the folder was moved, until the source changes. A
/// forged list of hashes quotes nothing.
#[test]
fn a_run_of_this_machine_quotes_its_source() {
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("own.py");
    std::fs::write(&program, "import torch\nkept = torch.ones(1 << 20, device='cuda')\n").unwrap();
    let run = TracedProgram::command(&[python().as_ref(), program.as_os_str()]).over_simcuda().run();
    run.assert_ended_well();
    let moved = home.path().join("moved");
    std::fs::rename(run.path(), &moved).unwrap();
    let lines = || everything(tempfile::tempdir().unwrap().path(), &["lines", moved.to_str().unwrap()]);
    assert!(lines().contains("kept = torch.ones"), "{}", lines());
    let hashes = moved.join("sources.json");
    let own = std::fs::read_to_string(&hashes).unwrap();
    assert!(own.contains("own.py"), "{own}");
    let mut forged: Value = serde_json::from_str(&own).unwrap();
    for hash in forged["files"].as_object_mut().unwrap().values_mut() {
        *hash = "0".repeat(64).into();
    }
    std::fs::write(&hashes, forged.to_string()).unwrap();
    assert!(!lines().contains("kept = torch.ones"), "{}", lines());
    std::fs::write(&hashes, own).unwrap();
    std::fs::write(&program, "import torch\nother = torch.ones(1 << 20, device='cuda')\n").unwrap();
    assert!(!lines().contains("torch.ones(") && lines().contains("has changed"), "{}", lines());
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
