//! CUDA memory that one process passes to another belongs to the sender.
//!
//! The receiver's trace has the handles that it opened, and its totals count the memory only as imported. Both
//! processes' events equal PyTorch's recorder and the simulated CUDA's ledger.

use std::collections::BTreeMap;

use memtrace_tests::ledger::{self, Call};
use memtrace_tests::oracle::{Oracle, assert_equal};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::traced_program::TracedProgram;
use memtrace_trace::counters::Counter;
use serde_json::Value;

/// One of the two processes.
struct Side {
    /// Its entry in `summary.json`.
    summary: Value,
    /// PyTorch's snapshot.
    oracle: Oracle,
    /// Its calls in the ledger.
    calls: Vec<Call>,
    /// The memory that it opened, from the launch in `summary.json`.
    opened: Vec<Value>,
}

impl Side {
    /// The peak in bytes on a device, by key (`owners` or `imported`).
    fn peak(&self, device: usize, key: &str) -> u64 {
        let devices = self.summary["devices"].as_array().expect("devices");
        let device = devices.iter().find(|d| d["device"] == device);
        device.map_or(0, |d| {
            d[key].as_array().expect("owners").iter().map(|o| o["peak_bytes"].as_u64().expect("a number")).sum()
        })
    }

    /// The peak of the bytes that PyTorch's allocator reserved on a device.
    fn reserved(&self, device: usize) -> u64 {
        self.oracle.snapshot["statistics"][device]["reserved_bytes.all.peak"].as_u64().unwrap_or(0)
    }

    /// The sizes of the successful calls of this function, in bytes.
    fn sizes(&self, api: &str) -> Vec<u64> {
        self.calls.iter().filter(|c| c.api == api && c.result == 0).map(|c| c.size).collect()
    }
}

fn run(traced: TracedProgram) -> BTreeMap<&'static str, Side> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (prefix, ledger) = (folder.path().join("oracle"), folder.path().join("ledger"));
    let run = traced.env("MEMTRACE_TEST_ORACLE", &prefix).env("SIMCUDA_LEDGER", &ledger).run();
    run.assert_ended_well();
    let ledgers = ledger::read_all(&ledger);
    let summary: Value =
        serde_json::from_str(&std::fs::read_to_string(run.path().join("summary.json")).expect("summary.json"))
            .expect("JSON");
    let stdout = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let side = |role: &'static str| {
        let pid: u32 = stdout.lines().find_map(|l| l.strip_prefix(role)?.trim().parse().ok()).expect(role);
        let trace = run.traces().into_iter().find(|t| ledger::pid(t) == pid).expect("a trace");
        let oracle = Oracle::read(&folder.path().join(format!("oracle.{role}")));
        assert_equal(&trace, &oracle);
        ledger::assert_equal(&ledger::ours(&trace), &ledgers[&pid]);
        assert_eq!(trace.counter(Counter::EventsDropped), 0);
        let mut processes = summary["processes"].as_array().expect("processes").iter();
        let opened = summary["launch"]["shared_memory"].as_array().expect("shared memory").iter();
        let opened = opened.filter(|one| one["importer_pid"] == pid).cloned().collect();
        let summary = processes.find(|p| p["pid"] == pid).expect("the process").clone();
        let losses = summary["losses"].as_object().expect("losses");
        assert!(losses.values().all(|count| count == 0), "{losses:?}");
        (role, Side { summary, oracle, calls: ledgers[&pid].values().flatten().cloned().collect(), opened })
    };
    ["sender", "receiver"].map(side).into()
}

/// Requires that no byte is counted twice. Each process has the memory that its own allocator reserved; the receiver
/// has the sender's as imported.
#[track_caller]
fn assert_counted_once(sides: &BTreeMap<&str, Side>, imported: u64) {
    let (sender, receiver) = (&sides["sender"], &sides["receiver"]);
    for side in [sender, receiver] {
        for device in 0..2 {
            assert_eq!(side.peak(device, "owners"), side.reserved(device), "{}", side.summary);
        }
    }
    assert_eq!((sender.peak(0, "imported"), sender.peak(1, "imported")), (0, 0));
    assert_eq!((receiver.peak(0, "imported"), receiver.peak(1, "imported")), (imported, 0), "{}", receiver.summary);
    // The launch names the owner. Nothing is open at the end, and nothing was freed before it was closed.
    assert_eq!(sender.opened, [Value::Null; 0]);
    let [opened] = &receiver.opened[..] else { panic!("{:?}", receiver.opened) };
    assert_eq!(
        (&opened["exporter_pid"], &opened["peak_bytes"]),
        (&sender.summary["pid"], &imported.into()),
        "{opened}"
    );
    assert_eq!((&opened["end_bytes"], &opened["kept_after_free_bytes"]), (&0.into(), &0.into()), "{opened}");
}

#[test]
fn tensors_shared_by_ipc_handle_are_counted_once() {
    let sides = run(TracedProgram::python("ipc/tensors.py", &[]).env("SIMCUDA_DEVICES", "2"));
    // Each of the two transfers has one small segment and one large one. Both small tensors are in one segment.
    assert_eq!(sides["receiver"].sizes("cudaIpcOpenMemHandle"), [2 << 20, 24 << 20, 2 << 20, 24 << 20]);
    assert_counted_once(&sides, 26 << 20);
}

#[test]
fn handles_pair_processes_whose_memory_has_one_size() {
    let programs = ProgramFolder::new();
    let options = [linked_with("libcudart.so.12"), linked_with("libcuda.so.1")].concat();
    let program = programs.program("cuda/ipc_pairs.c", "program", &options);
    let run = with_simcuda(&[&program]).run();
    run.assert_ended_well();
    let numbers = |line: &str| line.split(' ').map(|pid| pid.parse::<u64>().expect("a pid")).collect::<Vec<_>>();
    let mut expected: Vec<_> = String::from_utf8_lossy(&run.output.stdout).lines().map(numbers).collect();
    let summary = std::fs::read_to_string(run.path().join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    let shared = summary["launch"]["shared_memory"].as_array().expect("shared memory").iter();
    let pid = |one: &Value, key: &str| one[key].as_u64().expect("a pid");
    let mut found: Vec<_> =
        shared.clone().map(|one| vec![pid(one, "exporter_pid"), pid(one, "importer_pid")]).collect();
    expected.sort();
    found.sort();
    assert_eq!((found.len(), found), (2, expected));
    assert!(shared.into_iter().all(|one| one["peak_bytes"] == 5 << 20), "{summary}");
}

mod exhaustive {
    use super::*;

    #[test]
    fn tensors_shared_in_expandable_segments_are_counted_once() {
        let traced = TracedProgram::python("ipc/tensors.py", &[])
            .env("SIMCUDA_DEVICES", "2")
            .env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
        let sides = run(traced);
        let receiver = &sides["receiver"];
        assert_eq!(receiver.sizes("cudaIpcOpenMemHandle"), [0; 0]);
        // Each of the two transfers imports both segments, piece by piece: all memory that the sender reserved.
        assert_eq!(receiver.sizes("cuMemImportFromShareableHandle").len(), 6);
        let reserved = sides["sender"].reserved(0);
        assert_eq!(reserved, 42 << 20);
        assert_counted_once(&sides, reserved);
    }
}
