//! Every native stack of the PyTorch programs equals, frame by frame, the one that libgcc's unwinder gives at the same
//! time. `scripts/gpu-check` does the same for JAX and NCCL.

use memtrace_tests::victim::Victim;

#[track_caller]
fn check(victim: Victim, stacks: &str, least: u64) {
    let run = victim.option("--stacks").option(stacks).option("--check-stacks").option("--no-snapshot").run();
    run.assert_ended_well();
    let checked = run.checked_stacks();
    assert!(checked >= least, "{checked} stacks were compared, no test of anything");
}

#[test]
fn a_training_with_backward_threads() {
    check(Victim::python("torch/mlp.py", &[]), "native", 300);
    check(Victim::python("torch/mlp.py", &[]), "both", 300);
}

#[test]
fn two_devices_and_threads() {
    check(Victim::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2"), "both", 3000);
}

#[test]
fn expandable_segments_and_streams() {
    let victim = Victim::python("torch/expandable.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
    check(victim, "native", 300);
    check(Victim::python("torch/streams.py", &[]), "native", 500);
}
