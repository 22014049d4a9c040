//! Other releases of PyTorch than the default one: the recorder, the snapshot and the autograd nodes are right on each.
//!
//! Each release needs an environment of its own (scripts/venv: a download of up to 0.9 GB on first use), so these are the oldest
//! supported release with a tracker, one in between and the newest; `MEMTRACE_TEST_TORCH=2.5.1,2.9.1` adds more. Releases before
//! 2.4, whose tracker has another form, are recorded by the reporter alone: `cargo test --test versions -- --ignored`.

mod snapshot_support;

use memtrace_tests::victim::Victim;
use snapshot_support::{at_least, pickle, record, vizcheck};

const OLDEST: &str = "2.4.1";
const BETWEEN: &str = "2.7.1";
const NEWEST: &str = "2.15.0";

fn on(torch: &str, program: &str, arguments: &[&str]) -> Victim {
    Victim::python(program, arguments).env("SIM_TORCH", torch)
}

/// Everything that is compared on every release.
#[track_caller]
fn check(torch: &str) {
    let compare = |victim: Victim, events: u64| at_least(&record(victim).same(false), &[("events", events)]);
    compare(on(torch, "torch/mlp.py", &[]), 400);
    compare(on(torch, "torch/streams.py", &[]).env("SIMCUDA_KERNEL_US", "100"), 800);
    let expandable = on(torch, "torch/expandable.py", &[]);
    compare(expandable.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), 600);
    compare(on(torch, "torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G"), 40);

    let nodes = tempfile::NamedTempFile::new().expect("a temporary file");
    let cases = ["function", "accumulate", "convolutions", "checkpoint_saved", "double_backward"];
    let run = on(torch, "torch/forward_calls.py", &cases).env("MEMTRACE_TEST_NODES", nodes.path()).run();
    run.assert_ended_well();
    let named = vizcheck("nodes.py", [pickle(&run).as_path(), nodes.path()]);
    at_least(&named, &[("CubeBackward", 20), ("AccumulateGrad", 20), ("ConvolutionBackward0", 20)]);
}

#[test]
fn the_oldest() {
    check(OLDEST);
}

#[test]
fn one_in_between() {
    check(BETWEEN);
}

#[test]
fn the_newest() {
    check(NEWEST);
    let cases = ["function", "modules", "convolutions", "checkpoint_reentrant", "double_backward", "forward_threads"];
    let anomaly = on(NEWEST, "torch/forward_calls.py", &cases).env("MEMTRACE_TEST_ANOMALY", "1");
    at_least(&record(anomaly).same(true), &[("forward", 1000), ("forward frames", 5000)]);
}

#[test]
fn those_asked_for() {
    for torch in std::env::var("MEMTRACE_TEST_TORCH").unwrap_or_default().split(',').filter(|t| !t.is_empty()) {
        check(torch);
    }
}
