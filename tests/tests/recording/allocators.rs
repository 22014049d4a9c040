//! Every way of managing PyTorch's memory, compared event by event with something independent.
//!
//! The oracles are PyTorch's own recorder, its statistics, and the simulated CUDA's ledger. PyTorch's recorder does not
//! support cudaMallocAsync and pluggable allocators. There the ledger gives the calls, and the same program under
//! PyTorch's own allocator gives the callers.

use std::path::{Path, PathBuf};

use memtrace_tests::ledger::{assert_equal, ours, read};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::snapshots::{
    Recorded, assert_peaks, assert_statistics, at_least, json, pickle, record, summary, vizcheck,
};
use memtrace_tests::traced_program::{Run, TracedProgram, root};
use memtrace_tests::versions::Versions;
use memtrace_trace::api::MemoryKind;
use serde_json::Value;

const CONF: &str = "PYTORCH_CUDA_ALLOC_CONF";

/// A program of `tests/programs/allocators`, with the oracle module on its path.
fn program(name: &str, arguments: &[&str]) -> TracedProgram {
    TracedProgram::python(&format!("allocators/{name}"), arguments)
        .env("PYTHONPATH", root().join("tests/programs/torch"))
}

/// Records a program with PyTorch's recorder. Compares snapshots and peaks, and requires at least `events` events.
#[track_caller]
fn compare(traced: TracedProgram, events: u64) -> Recorded {
    let recorded = record(traced);
    at_least(&recorded.same(false), &[("events", events), ("event frames", events), ("blocks", 5), ("devices", 1)]);
    let statistics = json(recorded.oracle.path());
    assert!(assert_peaks(&recorded.run, &statistics, &["allocated", "active", "reserved", "requested"]) >= 4);
    recorded
}

/// The number of events in PyTorch's recorder that match.
fn count(recorded: &Recorded, condition: impl Fn(&Value) -> bool) -> usize {
    let oracle = json(recorded.oracle.path());
    let events =
        oracle["device_traces"].as_array().expect("traces").iter().flat_map(|t| t.as_array().expect("a trace"));
    events.filter(|event| condition(event)).count()
}

/// Compares `report --section memory` with `torch.cuda.memory_stats` at the program's end, every value of every pool.
/// [`crate::programs`] does this for training programs.
#[track_caller]
fn assert_table_of_memory_summary(recorded: &Recorded, least: usize) {
    let theirs = json(recorded.oracle.path());
    for device in summary(&recorded.run)["devices"].as_array().expect("devices") {
        let ordinal = device["device"].as_u64().expect("a device") as usize;
        let compared = assert_statistics(device, &theirs["statistics"][ordinal], &[]);
        assert!(compared >= least, "{compared} figures");
    }
}

#[test]
fn expandable_segments_are_partly_unmapped() {
    let recorded = compare(program("partial_unmap.py", &[]).env(CONF, "expandable_segments:True"), 900);
    assert_table_of_memory_summary(&recorded, 50);
    let did = |action: &'static str| count(&recorded, |e| e["action"] == action);
    assert!(did("segment_unmap") > 10 && did("segment_map") > 20, "maps and unmaps");
    // A segment with unmapped memory inside is two segments in the snapshot, so the snapshot shows more than were
    // reserved.
    let segments = json(recorded.oracle.path())["segments"].as_array().map_or(0, Vec::len);
    let trace = recorded.run.trace();
    let reserved = memtrace_tests::traced_program::events(&trace)
        .iter()
        .filter(|e| e.api.symbol() == Some("cuMemAddressReserve") && e.result == 0)
        .count();
    assert!(segments > reserved, "{segments} segments in {reserved} reservations");
}

#[test]
fn graphs_and_pools_have_their_pool_ids() {
    let recorded = compare(program("graphs.py", &[]), 250);
    // PyTorch 2.12 and later write each event's pool.
    at_least(&recorded.same(false), &[("pool ids", 250), ("private pool ids", 100)]);
    assert_table_of_memory_summary(&recorded, 70);
    let oracle = json(recorded.oracle.path());
    let segments = oracle["segments"].as_array().expect("segments");
    let pools: std::collections::BTreeSet<_> = segments.iter().map(|s| s["segment_pool_id"].to_string()).collect();
    assert!(pools.len() >= 5, "private pools of both kinds: {pools:?}");
}

#[test]
fn settings_of_the_allocator() {
    let of = |settings: &str| compare(program("policies.py", &["0.1"]).env(CONF, settings), 900);
    let gc = of("garbage_collection_threshold:0.3");
    let freed = |recorded: &Recorded| count(recorded, |e| e["action"] == "segment_free");
    let plain = compare(program("policies.py", &[]), 900);
    assert!(freed(&gc) > freed(&plain), "the threshold frees segments");
    // `per_process_memory_fraction`: the program allocates until a request fails.
    assert!(count(&gc, |e| e["action"] == "oom") > 0);
    of("max_split_size_mb:20");
    let rounded = of("roundup_power2_divisions:4,max_split_size_mb:40,garbage_collection_threshold:0.6");
    assert!(count(&rounded, |e| e["action"] == "segment_free") > 0);
}

#[test]
fn gradients_by_transforms() {
    compare(program("transforms.py", &[]).env("SIMCUDA_KERNEL_US", "20"), 800);
}

/// Pinned (page-locked) host memory: every call, and the peak, against PyTorch's own statistics.
#[test]
fn pinned_memory() {
    for settings in
        ["pinned_use_cuda_host_register:False", "pinned_use_cuda_host_register:True,pinned_num_register_threads:2"]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = folder.path().join("ledger");
        let recorded = record(program("pinned.py", &[]).env(CONF, settings).env("SIMCUDA_LEDGER", &ledger));
        at_least(&recorded.same(false), &[("events", 10)]);
        let trace = recorded.run.trace();
        assert_equal(&ours(&trace), &read(&ledger));
        let pinned = summary(&recorded.run)["pinned_host_memory"].take();
        let held: u64 = pinned.as_array().expect("owners").iter().filter_map(|o| o["peak_bytes"].as_u64()).sum();
        let theirs = &json(recorded.oracle.path())["host_statistics"]["allocated_bytes.peak"];
        assert!(held > 0, "{settings}: {pinned}");
        let lines = summary(&recorded.run)["pinned_host_lines"].take();
        let lines = lines.as_array().expect("lines");
        let sum = |field: &str| lines.iter().filter_map(|line| line[field].as_u64()).sum::<u64>();
        assert_eq!(sum("bytes"), held, "{settings}: {lines:?}");
        assert!(sum("requested_over_bytes") > 0, "{settings}: {lines:?}");
        assert!(theirs.as_u64().is_some_and(|theirs| theirs > 0), "{settings}: {theirs}");
        // The program itself registers 256 KiB, which PyTorch does not count.
        assert!(
            held == theirs.as_u64().unwrap_or(0) || held == theirs.as_u64().unwrap_or(0) + (1 << 18),
            "{settings}: {held}, {theirs}"
        );
        let of_host = |e: &&memtrace_trace::event::Event| {
            matches!(e.api.memory_kind(), Some(MemoryKind::Host | MemoryKind::Registered)) && e.device != -1
        };
        assert_eq!(
            memtrace_tests::traced_program::events(&trace).iter().filter(of_host).count(),
            0,
            "host memory is on no device"
        );
    }
}

/// Runs a program whose allocator PyTorch's recorder does not support. Compares the snapshot with the ledger, and with
/// the same program under PyTorch's own allocator.
#[track_caller]
fn compare_calls(traced: TracedProgram) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().join("ledger");
    let run = traced.env("SIMCUDA_LEDGER", &ledger).env("MEMTRACE_TEST_ORACLE_LAST", "1").run();
    run.assert_ended_well();
    assert_equal(&ours(&run.trace()), &read(&ledger));
    let usual = record(program("stream_ordered.py", &[]));
    let pickle = pickle(&run);
    let arguments = [pickle.as_path(), Path::new("--ledger"), &ledger, Path::new("--like"), usual.oracle.path()];
    let found = vizcheck("calls.py", arguments);
    let expected = [("requests", 130), ("calls", 130), ("frames", 260), ("segments", 10), ("devices", 1)];
    at_least(&found, &expected);
    run
}

#[test]
fn the_stream_ordered_allocator() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let program = program("stream_ordered.py", &[]).env(CONF, "backend:cudaMallocAsync");
    let run = compare_calls(program.env("MEMTRACE_TEST_STATISTICS", file.path()));
    let statistics = json(file.path());
    // `allocated` is the pool's memory in use, `reserved` the device memory that it holds. The pool grows, is trimmed,
    // and grows again.
    assert!(assert_peaks(&run, &statistics, &["allocated", "reserved"]) >= 2);
    let summary = summary(&run);
    let end = &summary["devices"][0]["end"]["totals"];
    for (ours, theirs) in
        [("allocated_bytes", "allocated_bytes.all.current"), ("reserved_bytes", "reserved_bytes.all.current")]
    {
        assert_eq!(end[ours], statistics["statistics"][0][theirs], "{ours} at the end");
    }
    assert_eq!(summary["devices"][0]["in_use_before_bytes"], 0, "the pool's first growth is the process's own");
}

/// The error that ends a program under cudaMallocAsync: the requested bytes, the line, and the memory in use.
#[test]
fn out_of_memory_in_the_stream_ordered_allocator() {
    let ledger = tempfile::NamedTempFile::new().expect("a file");
    let traced = program("stream_ordered.py", &[]).env(CONF, "backend:cudaMallocAsync").env("SIMCUDA_MEMORY", "200M");
    let run = traced.env("SIMCUDA_LEDGER", ledger.path()).run();
    assert_eq!(run.output.status.code(), Some(1), "{}", String::from_utf8_lossy(&run.output.stderr));
    let device = &summary(&run)["devices"][0];
    // PyTorch 2.15 repeats a failed call once, and each failed call counts.
    let calls = std::fs::read_to_string(ledger.path()).expect("the ledger");
    let failed = |line: &&str| line.contains(r#""cudaMallocAsync""#) && line.contains(r#""result":2"#);
    assert_eq!(device["oom_count"], calls.lines().filter(failed).count());
    for oom in device["ooms"].as_array().expect("errors") {
        assert_eq!(oom["requested_bytes"], 40 << 20, "{oom}");
        assert!(oom["requested_at"].to_string().contains("stream_ordered.py"), "{oom}");
    }
}

/// The allocator of `allocators/allocator.c`, linked with the CUDA that PyTorch uses.
fn own_allocator(programs: &ProgramFolder) -> PathBuf {
    programs.library("allocators/allocator.c", "liballocator.so", &linked_with("libcudart.so.13"))
}

#[test]
fn a_pluggable_allocator() {
    let programs = ProgramFolder::new();
    let library = own_allocator(&programs);
    compare_calls(program("stream_ordered.py", &[&library.to_string_lossy()]));
}

#[test]
fn a_pool_with_its_own_allocator() {
    let programs = ProgramFolder::new();
    let library = own_allocator(&programs);
    let library = library.to_string_lossy();
    // `FIRST` makes it the process's first memory. PyTorch's allocator then makes no CUDA call at which the tracker
    // could be attached.
    for arguments in [vec![&*library], vec![&*library, "FIRST"]] {
        let recorded = compare(program("own_pool.py", &arguments).env("OWN_ALLOC_EXTRA", "4096"), 15);
        let owners = &summary(&recorded.run)["devices"][0]["owners"];
        // Segments belong to PyTorch's allocator, whichever library obtained them.
        for owner in owners.as_array().expect("owners").iter().filter(|o| o["owner"] != "PyTorch's caching allocator") {
            assert_eq!((&owner["end_bytes"], &owner["peak_bytes"]), (&0.into(), &0.into()), "{arguments:?}: {owners}");
        }
    }
}

/// A program without PyTorch has only CUDA calls. Its snapshot is compared with the ledger.
#[test]
fn a_program_without_pytorch() {
    let programs = ProgramFolder::new();
    let program = programs.program("allocators/loose.c", "loose", &linked_with("libcudart.so.13"));
    let ledger = programs.path("ledger");
    let run = with_simcuda(&[&program]).env("SIMCUDA_LEDGER", &ledger).run();
    run.assert_ended_well();
    let found = vizcheck("calls.py", [pickle(&run).as_path(), Path::new("--ledger"), &ledger]);
    at_least(&found, &[("calls", 60), ("segments", 10), ("devices", 1)]);
    let device = &summary(&run)["devices"][0];
    assert_eq!(device["source"], "cuda_calls");
    // The driver takes more than was requested; only the driver knows how much.
    assert!(
        device["in_use_before_bytes"].as_u64().is_some_and(|bytes| bytes < 2 << 20),
        "{}",
        device["in_use_before_bytes"]
    );
}

mod exhaustive {
    use super::*;

    /// Events without a pool.
    mod graphs {
        use super::*;

        #[test]
        fn pytorch_2_11_0_on_python_3_11() {
            compare(program("graphs.py", &[]).on(Versions::ON_GPUS), 250);
        }
    }
}
