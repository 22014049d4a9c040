//! Why memory stays on a device after a program has released what PyTorch can release: a CUDA graph's pool, a
//! communicator, the context. Compared with the simulated driver and PyTorch's own snapshot.

use std::process::Command;

use memtrace_tests::ledger;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use serde_json::Value;

/// The memory that a context uses here, in bytes.
const CONTEXT: u64 = 527 << 20;

fn text(run: &Run, arguments: &[&str]) -> String {
    let output = Command::new(memtrace()).arg("report").arg(run.path()).args(arguments).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The summary's entry for a point of the only device.
fn released(run: &Run, point: &str) -> Value {
    let summary: Value = serde_json::from_str(&text(run, &["--json", "--released-after", point])).expect("JSON");
    let points = summary["processes"][0]["devices"][0]["released"].as_array().unwrap();
    points.iter().find(|one| one["after"] == point).unwrap_or_else(|| panic!("{point}: {points:?}")).clone()
}

/// The names and the bytes of the parts of one kind.
fn parts(of: &Value, kind: &str) -> Vec<(String, u64)> {
    let parts = of["parts"].as_array().unwrap().iter().filter(|part| part["kind"] == kind);
    parts.map(|part| (part["name"].as_str().unwrap().to_owned(), part["bytes"].as_u64().unwrap())).collect()
}

#[test]
fn the_pool_of_a_graph_stays_with_its_graph() {
    // PyTorch 2.15 keeps no workspace of cuBLAS otherwise.
    let traced = TracedProgram::python("released/graph.py", &[]).env("TORCH_CUBLAS_WORKSPACE_CACHE", "1");
    let run = traced.option("--no-snapshot").run();
    run.assert_ended_well();
    let printed = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let row = |name: &str| -> [u64; 3] {
        let line = printed.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    };
    let [used, private, reserved] = row("released ");
    let with_graph = released(&run, "line:released/graph.py:36");
    assert_eq!((&with_graph["stayed_bytes"], used), (&used.into(), reserved), "{with_graph}");
    let [(name, bytes)] = &parts(&with_graph, "private_pool")[..] else { panic!("{with_graph}") };
    assert_eq!((name.as_str(), *bytes), ("CUDA graph pool (1, 0), until its graphs and tensors are gone", private));
    // The workspace that cuBLAS took in the pool while it captured stays.
    let [used, left, reserved] = row("without the graph ");
    let without = released(&run, "line:released/graph.py:39");
    assert_eq!((&without["stayed_bytes"], used), (&used.into(), reserved), "{without}");
    assert!(left < private, "{printed}");
    assert_eq!(parts(&without, "private_pool").iter().map(|(_, bytes)| bytes).sum::<u64>(), left, "{without}");
    let section = text(&run, &["--section", "released"]);
    assert!(section.contains("CUDA graph pool (1, 0)"), "{section}");
}

#[test]
fn the_memory_of_a_communicator_stays_although_the_program_ends_then() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    let program = TracedProgram::python("released/communicator.py", &[]).option("--no-snapshot");
    let program = program.env("SIMCUDA_LIBRARY_MEMORY", "1").env("SIMCUDA_CONTEXT", CONTEXT.to_string());
    let run = program.env("SIMCUDA_LEDGER", &path).run();
    run.assert_ended_well();
    let calls = ledger::read(&path);
    let of_nccl: u64 = calls.values().flatten().filter(|call| call.api == "cuMemCreate").map(|call| call.size).sum();
    assert!(of_nccl > 0);
    let stayed = released(&run, "function:empty_cache");
    assert_eq!(parts(&stayed, "library"), [("NCCL".to_owned(), of_nccl)], "{stayed}");
    assert_eq!(stayed["stayed_bytes"], of_nccl, "{stayed}");
    let context = parts(&stayed["device_memory"], "context_and_other_processes");
    assert_eq!(context.iter().map(|(_, bytes)| bytes).sum::<u64>(), CONTEXT, "{stayed}");
}

#[test]
fn nothing_but_the_context_stays() {
    let program = TracedProgram::python("released/context.py", &[]).option("--no-snapshot");
    let run = program.env("SIMCUDA_CONTEXT", CONTEXT.to_string()).run();
    run.assert_ended_well();
    let stayed = released(&run, "function:empty_cache");
    assert_eq!((&stayed["stayed_bytes"], &stayed["parts"]), (&0.into(), &serde_json::json!([])), "{stayed}");
    let section = text(&run, &["--section", "released"]);
    assert!(section.contains("After function:empty_cache: 0 stayed"), "{section}");
    assert!(section.contains("527 MiB CUDA context and other processes, until the process ends"), "{section}");
}
