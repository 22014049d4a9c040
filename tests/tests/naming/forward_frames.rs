//! The autograd node that made each backward block, and the forward call that made the node.
//!
//! The first oracle is `forward_frames`, which PyTorch 2.11's recorder writes under anomaly mode; the strings must be
//! equal. The second is the list of nodes that PyTorch's profiler saw the engine evaluate. `recording/programs.rs`
//! tests a statement over several lines.

use memtrace_tests::snapshots::{at_least, pickle, record, vizcheck};
use memtrace_tests::traced_program::TracedProgram;
use serde_json::Value;

/// The cases that run on one thread, and so are the same in every run.
const ONE_THREAD: [&str; 8] = [
    "function",
    "modules",
    "convolutions",
    "accumulate",
    "checkpoint_reentrant",
    "checkpoint_saved",
    "double_backward",
    "retain_graph",
];
const THREADS: [&str; 2] = ["forward_threads", "backward_threads"];

/// Without the cache, cuBLAS workspaces of several threads are allocated in an order that differs from run to run.
fn calls(cases: &[&str]) -> TracedProgram {
    TracedProgram::python("torch/forward_calls.py", cases).env("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
}

/// Compares the recording under anomaly mode with PyTorch's, then with our own recording without anomaly mode.
#[track_caller]
fn compare(cases: &[&str], least: u64) -> Value {
    let under_anomaly = record(calls(cases).env("MEMTRACE_TEST_ANOMALY", "1"));
    let found = under_anomaly.same(true);
    at_least(&found, &[("forward", least), ("forward frames", least * 2), ("nodes", least)]);
    let plain = record(calls(cases));
    let ours = vizcheck("forward.py", [&under_anomaly.pickle, &plain.pickle]);
    assert_eq!(ours["backward"], found["nodes"], "backward events");
    found
}

#[test]
fn functions_modules_checkpoints_double_backward() {
    compare(&ONE_THREAD, 1200);
}

#[test]
fn several_forward_and_backward_threads() {
    compare(&THREADS, 500);
}

#[test]
fn recorded_nodes_match_the_engine() {
    let nodes = tempfile::NamedTempFile::new().expect("a temporary file");
    let mut cases = ONE_THREAD.to_vec();
    cases.push("forward_threads");
    let run = calls(&cases).env("MEMTRACE_TEST_NODES", nodes.path()).run();
    run.assert_ended_well();
    let found = vizcheck("nodes.py", [pickle(&run).as_path(), nodes.path()]);
    for (node, least) in [
        ("AccumulateGrad", 20),
        ("AddmmBackward0", 50),
        ("CheckpointFunctionBackward", 20),
        ("ConvolutionBackward0", 20),
        ("CubeBackward", 20),
        ("NativeBatchNormBackward0", 10),
        ("PairBackward", 10),
        ("TanhBackward0", 20),
    ] {
        at_least(&found, &[(node, least)]);
    }
}
