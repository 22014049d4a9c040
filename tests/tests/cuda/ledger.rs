//! Compares the recorded driver and runtime events with the simulated CUDA's ledger, call by call.

use memtrace_tests::ledger::{assert_equal, ours, read};
use memtrace_tests::traced_program::TracedProgram;

/// Runs a program with a ledger, compares the calls, and returns their number.
#[track_caller]
fn compare(traced: TracedProgram) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    let run = traced.env("SIMCUDA_LEDGER", &path).run();
    run.assert_ended_well();
    let (ours, ledger) = (ours(&run.trace()), read(&path));
    assert_equal(&ours, &ledger);
    ledger.values().map(Vec::len).sum()
}

#[test]
fn pytorch_native() {
    assert!(compare(TracedProgram::python("torch/mlp.py", &[])) > 20);
}

#[test]
fn pytorch_expandable_segments() {
    let expandable = TracedProgram::python("torch/expandable.py", &[]);
    assert!(compare(expandable.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")) > 50);
}

#[test]
fn pytorch_stream_ordered_allocator() {
    let program = TracedProgram::python("torch/mlp.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync");
    assert!(compare(program) > 100);
}

/// cuBLAS allocates by calls of the driver that are nested in none of the runtime.
#[test]
fn libraries_that_allocate_for_themselves() {
    let calls = |setting| compare(TracedProgram::python("torch/mlp.py", &[]).env("SIMCUDA_LIBRARY_MEMORY", setting));
    // Three blocks for the handle of each of two threads.
    assert_eq!(calls("1") - calls("0"), 6);
}

#[test]
fn pytorch_out_of_memory() {
    assert!(compare(TracedProgram::python("torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G")) > 30);
}
