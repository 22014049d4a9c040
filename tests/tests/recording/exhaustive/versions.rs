//! Other releases of PyTorch: the recorder, the snapshot, the autograd nodes and the reports of PyTorch's own snapshots
//! are right on each.
//!
//! Each release needs its own environment (`scripts/venv`: a download of up to 0.9 GB on first use). This tests another
//! release and Python: `SIM_TORCH=2.3.1 SIM_PYTHON=3.9 cargo nextest run --release -E 'binary(recording) and
//! test(/^programs::/)'`.

use memtrace_tests::oracle::Oracle;
use memtrace_tests::snapshots::{Recorded, at_least, pickle, record, vizcheck};
use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_tests::versions::Versions;
use memtrace_trace::event::Source;

use crate::pytorch_snapshots::assert_same_reports;

fn on(versions: Versions, program: &str, arguments: &[&str]) -> TracedProgram {
    TracedProgram::python(program, arguments).on(versions)
}

/// The program that runs on every release. `memtrace report` gives the same for the recording and for PyTorch's
/// snapshot.
#[track_caller]
fn mlp(versions: Versions) -> Recorded {
    let folder = tempfile::tempdir().expect("a folder");
    let pickle = folder.path().join("theirs.pickle");
    let recorded = record(on(versions, "torch/mlp.py", &[]).env("MEMTRACE_TEST_ORACLE_PICKLE", &pickle));
    assert_same_reports(&recorded.run, &pickle);
    recorded
}

/// All comparisons that run on every release.
#[track_caller]
fn check(versions: Versions) {
    let compare = |traced: TracedProgram, events: u64| at_least(&record(traced).same(false), &[("events", events)]);
    let recorded = mlp(versions);
    at_least(&recorded.same(false), &[("events", 400)]);
    if versions == Versions::ON_GPUS {
        // A real H200 printed these values for this program.
        assert_eq!(String::from_utf8_lossy(&recorded.run.output.stdout), "peak 489624576 reserved 494927872\n");
    }
    compare(on(versions, "torch/streams.py", &[]).env("SIMCUDA_KERNEL_US", "100"), 800);
    let expandable = on(versions, "torch/expandable.py", &[]);
    compare(expandable.env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), 600);
    compare(on(versions, "torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G"), 40);

    let nodes = tempfile::NamedTempFile::new().expect("a temporary file");
    let cases = ["function", "accumulate", "convolutions", "checkpoint_saved", "double_backward"];
    let run = on(versions, "torch/forward_calls.py", &cases).env("MEMTRACE_TEST_NODES", nodes.path()).run();
    run.assert_ended_well();
    let named = vizcheck("nodes.py", [pickle(&run).as_path(), nodes.path()]);
    at_least(&named, &[("CubeBackward", 20), ("AccumulateGrad", 20), ("ConvolutionBackward0", 20)]);

    // Later releases write where the forward call was.
    if ["2.4.1", "2.7.1"].contains(&versions.torch) {
        return;
    }
    let cases = ["function", "modules", "convolutions", "checkpoint_reentrant", "double_backward", "forward_threads"];
    let anomaly = on(versions, "torch/forward_calls.py", &cases).env("MEMTRACE_TEST_ANOMALY", "1");
    at_least(&record(anomaly).same(true), &[("forward", 1000), ("forward frames", 5000)]);
}

memtrace_tests::for_each_version! { mod versions: check }

#[test]
fn free_threaded_python() {
    check(Versions::FREE_THREADED);
}

#[test]
fn a_release_with_the_memory_reporter_only() {
    let recorded = mlp(Versions::REPORTER_ONLY);
    let ours: Vec<(String, u64)> = events(&recorded.run.trace())
        .iter()
        .filter(|e| e.source == Source::TorchReporter)
        .map(|e| (e.action.name().to_owned(), e.addr))
        .collect();
    let mut theirs = Oracle::read(recorded.oracle.path()).entries().remove(&0).expect("device 0");
    theirs.retain(|e| e.action == "alloc" || e.action == "free_completed");
    let theirs: Vec<(String, u64)> = theirs.into_iter().map(|e| (e.action, e.addr)).collect();
    assert_eq!(ours, theirs);
    assert!(ours.len() > 250, "{} blocks", ours.len());
    // The notice names the fallback and the reason.
    let notices = recorded.run.manifest()["processes"][0]["notices"].to_string();
    assert!(notices.contains("using the profiler's reporter"), "{notices}");
}
