//! Real programs over the simulated CUDA, each recorded once with PyTorch's own recorder enabled in the same process.
//!
//! Each recording is compared in every way with PyTorch's:
//!
//! - every event: action, address, size, stream, device, order, Python frames;
//! - the snapshot in the run folder, read by Python's pickle: events, segments, blocks, frames;
//! - the snapshot that the analysis exports, dictionary for dictionary;
//! - the peaks and the table of `torch.cuda.memory_summary`;
//! - the output of `memtrace report` for PyTorch's snapshot, in every format, and for our recording;
//! - a replay of the allocator's policy, which reproduces the recording.

use std::path::Path;
use std::process::Command;

use memtrace_analysis::export::{SnapshotOptions, SourceAccess, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_tests::oracle::{Oracle, assert_equal, compare};
use memtrace_tests::snapshots::{Recorded, assert_statistics, at_least, record, summary, vizcheck};
use memtrace_tests::traced_program::{TracedProgram, events, root};
use memtrace_trace::event::{Action, Source};
use memtrace_trace::file::Reader;

use crate::{allocator_policy, pytorch_snapshots};

/// The part of the recording before PyTorch's snapshot was taken.
fn events_until_the_oracles_snapshot(reader: &Reader) -> MemoryRecording {
    let mut events = events(reader);
    let snapshot = events.iter().position(|e| e.action == Action::Snapshot).expect("the oracle's snapshot");
    // Each device takes its own snapshot, one after the other.
    events.truncate(snapshot + 1);
    events.retain(|e| e.source != Source::Torch || e.action != Action::Snapshot);
    MemoryRecording {
        definitions: reader.definitions().clone(),
        events,
        clock: reader.clock_points().to_vec(),
        info: reader.info().to_owned(),
        ..MemoryRecording::default()
    }
}

/// Compares the analysis's exported snapshot with PyTorch's. Returns the output of the comparison.
#[track_caller]
fn assert_same_export(recorded: &Recorded) -> String {
    let recording = events_until_the_oracles_snapshot(&recorded.run.trace());
    let process = Process::new(Path::new("1.mtr"), Box::new(recording), &Manifest::default());
    let ours = recorded.run.dir.path().join("ours.pickle");
    let options = SnapshotOptions { sources: SourceAccess::AllNamed, ..SnapshotOptions::default() };
    snapshot(&process, &mut std::fs::File::create(&ours).unwrap(), &options, &mut |_| {}).unwrap();
    let compare = root().join("tests/golden/snapshots/compare.py");
    let output = Command::new("python3").arg(compare).arg(&ours).arg(recorded.oracle.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The minimum number of compared items.
struct Least {
    events: u64,
    active: u64,
    /// Values of the `memory_summary` table that are not zero.
    figures: usize,
}

/// The results of one recording.
struct Compared {
    recorded: Recorded,
    oracle: Oracle,
    /// The counts that `tests/vizcheck/same.py` printed.
    found: serde_json::Value,
    /// The output of `tests/golden/snapshots/compare.py`.
    exported: String,
}

/// Records a program once and runs all comparisons.
#[track_caller]
fn check(traced: TracedProgram, least: Least) -> Compared {
    let folder = tempfile::tempdir().expect("a folder");
    let pickle = folder.path().join("theirs.pickle");
    let compared = check_without_reports(traced, least, &pickle);
    pytorch_snapshots::assert_same_reports(&compared.recorded.run, &pickle);
    compared
}

/// Runs all comparisons except those of the reports. PyTorch's snapshot is also written to `pickle`.
#[track_caller]
fn check_without_reports(traced: TracedProgram, least: Least, pickle: &Path) -> Compared {
    let recorded = record(traced.env("MEMTRACE_TEST_ORACLE_PICKLE", pickle));
    let oracle = Oracle::read(recorded.oracle.path());
    assert_equal(&recorded.run.trace(), &oracle);

    let found = recorded.same(false);
    let Least { events, active, figures } = least;
    at_least(&found, &[("events", events), ("event frames", events / 2), ("active blocks", active), ("devices", 1)]);
    let exported = assert_same_export(&recorded);

    for device in summary(&recorded.run)["devices"].as_array().expect("devices") {
        let ordinal = device["device"].as_u64().expect("a device") as usize;
        let compared = assert_statistics(device, &oracle.snapshot["statistics"][ordinal], &[]);
        assert!(compared >= figures, "{compared} figures of device {ordinal}");
        assert_ends_within(&recorded, device);
    }
    Compared { recorded, oracle, found, exported }
}

/// The time of a device's end is one at which the program ran.
#[track_caller]
fn assert_ends_within(recorded: &Recorded, device: &serde_json::Value) {
    let manifest = recorded.run.manifest();
    let [started, ended] = ["recording_started_ns", "ended_ns"].map(|key| manifest["processes"][0][key].as_u64());
    let (end, peak) = (device["end"]["time_ns"].as_u64(), device["peak"]["time_ns"].as_u64());
    assert!(started <= peak && peak <= end && end <= ended, "{started:?}, {peak:?}, {end:?}, {ended:?}");
    assert!(device["peak"]["seq"].as_u64() <= device["end"]["seq"].as_u64(), "numbers of events");
}

/// A program whose allocator a replay repeats, too.
#[track_caller]
fn check_and_replay(traced: TracedProgram, settings: &str, least: Least) -> Compared {
    let compared = check(traced, least);
    allocator_policy::assert_repeated(&compared.recorded.run, settings, None);
    compared
}

#[test]
fn mlp() {
    let least = Least { events: 400, active: 20, figures: 70 };
    check_and_replay(TracedProgram::python("torch/mlp.py", &[]), "", least);
}

#[test]
fn resnet50() {
    let least = Least { events: 5000, active: 500, figures: 30 };
    check_and_replay(TracedProgram::python("torch/resnet50.py", &[]), "", least);
}

#[test]
fn transformer_under_autocast() {
    let least = Least { events: 3000, active: 100, figures: 30 };
    check_and_replay(TracedProgram::python("torch/transformer_amp.py", &[]), "", least);
}

#[test]
fn checkpointing() {
    let least = Least { events: 300, active: 10, figures: 30 };
    // For this program, `memtrace report` counts 162 frees in PyTorch's snapshot and 164 in our recording.
    let folder = tempfile::tempdir().expect("a folder");
    let pickle = folder.path().join("theirs.pickle");
    let compared = check_without_reports(TracedProgram::python("torch/checkpoint.py", &[]), least, &pickle);
    allocator_policy::assert_repeated(&compared.recorded.run, "", None);
}

#[test]
fn streams_with_deferred_frees() {
    let traced = TracedProgram::python("torch/streams.py", &[]).env("SIMCUDA_KERNEL_US", "100");
    let compared = check_and_replay(traced, "", Least { events: 800, active: 30, figures: 50 });
    let deferred = compared.oracle.entries()[&0]
        .windows(2)
        .any(|w| w[0].action == "free_requested" && w[1].action != "free_completed");
    assert!(deferred, "the program defers frees");
    at_least(&compared.found, &[("deferred frees", 10)]);
}

#[test]
fn expandable_segments() {
    const SETTINGS: &str = "expandable_segments:True";
    let traced = TracedProgram::python("torch/expandable.py", &[]).env("PYTORCH_CUDA_ALLOC_CONF", SETTINGS);
    let compared = check_and_replay(traced, SETTINGS, Least { events: 600, active: 50, figures: 30 });
    assert!(compared.oracle.entries()[&0].iter().any(|e| e.action == "segment_unmap"), "the program unmaps");
}

#[test]
fn out_of_memory_with_retry() {
    let traced = TracedProgram::python("torch/oom_retry.py", &[]).env("SIMCUDA_MEMORY", "8G");
    let compared = check(traced, Least { events: 40, active: 10, figures: 30 });
    assert_eq!(compared.oracle.entries()[&0].iter().filter(|e| e.action == "oom").count(), 2);
}

#[test]
fn two_devices_and_threads() {
    let traced = TracedProgram::python("torch/two_devices.py", &[]).env("SIMCUDA_DEVICES", "2");
    let compared = check(traced, Least { events: 6000, active: 3, figures: 10 });
    assert_eq!(compared.oracle.entries().len(), 2);
    at_least(&compared.found, &[("devices", 2)]);
}

/// A statement over several lines: backward shows the frames that anomaly mode shows.
#[test]
fn backward_with_forward_frames() {
    let compared = check(TracedProgram::python("torch/backward.py", &[]), Least { events: 70, active: 1, figures: 10 });
    assert!(!compared.exported.contains(" 0 forward_frames"), "{}", compared.exported);
    at_least(&compared.recorded.same(true), &[("forward", 70), ("forward frames", 400)]);
}

#[test]
fn data_loader_workers_are_unchanged() {
    // `compare` requires exactly one trace: workers that only make CPU tensors leave none.
    let (run, _) = compare(TracedProgram::python("torch/loader.py", &[]));
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), "rows 64\n");
}

#[test]
fn the_comparison_detects_every_kind_of_difference() {
    // The cached workspace is a block in use at the end.
    let traced = TracedProgram::python("torch/forward_calls.py", &["convolutions"])
        .env("MEMTRACE_TEST_ANOMALY", "1")
        .env("TORCH_CUBLAS_WORKSPACE_CACHE", "1");
    let recorded = record(traced);
    let tried = vizcheck("same_selftest.py", [recorded.pickle.as_path(), recorded.oracle.path()]);
    at_least(&tried, &[("changes", 30)]);
}
