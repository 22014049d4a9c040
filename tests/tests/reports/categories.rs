//! Categories against the tensors that Python has: `programs/walked/walked.py` runs a program and writes which storages
//! are parameters, gradients, optimizer state and saved by a graph.

use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_tests::snapshots::vizcheck;
use memtrace_tests::traced_program::{TracedProgram, memtrace, root};
use serde_json::Value;

use crate::diagnostics::declared_env;

/// At most this share of the bytes in use may have a wrong category at any sample, in percent.
const MAXIMUM_WRONG: f64 = 0.5;

/// This program keeps results of `torch.autograd.grad()`: gradients that are no tensor's `grad`.
const OTHER_GRADIENTS: &str = "issues/teacher.py";

/// Runs a program of `tests/programs` and compares its categories. `None` where it has no such sample.
fn walked(program: &str) -> Option<Value> {
    let path = root().join("tests/programs").join(program);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{program}: {e}"));
    let walked = tempfile::NamedTempFile::new().expect("a temporary file");
    let program = path.to_str().expect("UTF-8");
    let mut traced = TracedProgram::python("walked/walked.py", &[program])
        .option("--no-snapshot")
        .env("SIMCUDA_DEVICES", "2")
        .env("OMP_NUM_THREADS", "1")
        .env("WALKED", walked.path());
    for (name, value) in declared_env(&text) {
        traced = traced.env(name, value);
    }
    let run = traced.run();
    let samples = std::fs::read_to_string(walked.path()).expect("the samples");
    if samples.is_empty() {
        return None;
    }
    let tables = tables(&run.path(), run.dir.path());
    let arguments = std::iter::once(walked.path().to_owned()).chain(tables);
    Some(vizcheck("categories.py", arguments))
}

/// A table of blocks for each process.
fn tables(run: &Path, folder: &Path) -> Vec<PathBuf> {
    let pids = std::fs::read_dir(run).expect("a run folder").filter_map(|entry| {
        let path = entry.expect("an entry").path();
        path.extension().is_some_and(|e| e == "mtr").then(|| path.file_stem().map(|pid| pid.to_owned()))?
    });
    let table = |pid: std::ffi::OsString| {
        let table = folder.join(&pid).with_extension("csv");
        let mut export = Command::new(memtrace());
        export.arg("export").arg(run).args(["--to", "csv", "--pid"]).arg(&pid).arg("-o").arg(&table);
        let output = export.output().expect("memtrace export");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        table
    };
    pids.map(table).collect()
}

#[track_caller]
fn are_right(program: &str, result: &Value) {
    let percent = result["wrong_percent"].as_f64().expect("a share");
    let most = if program == OTHER_GRADIENTS { 2.0 * MAXIMUM_WRONG } else { MAXIMUM_WRONG };
    assert!(percent <= most, "{program}: {result:#}");
}

#[test]
fn of_two_networks() {
    let result = walked("suggestions/gan.py").expect("samples");
    assert!(result["samples"].as_u64() >= Some(4) && result["compared"].as_u64() >= Some(400), "{result}");
    are_right("gan", &result);
}

mod exhaustive {
    use memtrace_tests::parallel::{cores, in_parallel};

    use super::*;

    /// At least so many programs have samples. The others run without modules and optimizers, or in child processes.
    const WALKED: usize = 100;

    #[test]
    fn of_all_programs() {
        let mut programs = Vec::new();
        for folder in ["issues", "suggestions"] {
            for entry in std::fs::read_dir(root().join("tests/programs").join(folder)).expect("programs") {
                let name = entry.expect("an entry").file_name().into_string().expect("UTF-8");
                if name.ends_with(".py") && name != "changes.py" {
                    programs.push(format!("{folder}/{name}"));
                }
            }
        }
        programs.sort();
        let results = in_parallel(&programs, cores(), |program| walked(program));
        let found: Vec<(&String, Value)> =
            programs.iter().zip(results).filter_map(|(program, result)| Some((program, result?))).collect();
        assert!(found.len() >= WALKED, "only {} of {} have samples", found.len(), programs.len());
        found.iter().for_each(|(program, result)| are_right(program, result));
    }
}
