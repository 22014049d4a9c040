//! Every native stack of the PyTorch programs equals, frame by frame, the one that libgcc's unwinder gives at the same
//! time. `scripts/gpu-check` does the same for JAX and NCCL.

use memtrace_tests::traced_program::TracedProgram;

#[track_caller]
fn check(traced: TracedProgram, stacks: &str, least: u64) {
    let run = traced.option("--stacks").option(stacks).option("--check-stacks").option("--no-snapshot").run();
    run.assert_ended_well();
    let checked = run.checked_stacks();
    assert!(checked >= least, "{checked} stacks were compared, no test of anything");
}

#[test]
fn a_training_with_backward_threads() {
    check(TracedProgram::python("torch/mlp.py", &[]), "native", 300);
    check(TracedProgram::python("torch/mlp.py", &[]), "both", 300);
}

#[test]
fn two_devices_and_threads() {
    check(TracedProgram::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2"), "both", 3000);
}

#[test]
fn expandable_segments_and_streams() {
    let traced =
        TracedProgram::python("torch/expandable.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    check(traced, "native", 300);
    check(TracedProgram::python("torch/streams.py", &[]), "native", 500);
}
