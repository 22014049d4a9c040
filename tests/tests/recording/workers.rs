//! DataLoader workers with every start method.
//!
//! The training process's events equal PyTorch's recorder and the simulated CUDA's ledger, which has the pinning
//! thread's memory. Workers that only make CPU tensors leave no trace and are not disturbed, including one that is
//! killed.

use memtrace_tests::ledger;
use memtrace_tests::oracle::compare;
use memtrace_tests::traced_program::TracedProgram;
use memtrace_trace::api::{Api, MemoryKind};

#[test]
fn data_loader_workers_by_fork_spawn_and_forkserver() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let traced = TracedProgram::python("workers/loaders.py", &["fork", "spawn", "forkserver"])
        .env("SIMCUDA_LEDGER", file.path())
        // On a machine with a GPU, CPU tensors are not recorded by default.
        .option("--cpu")
        .option("never");
    // `compare` requires exactly one trace, of one process.
    let (run, _) = compare(traced);
    let mut expected = String::new();
    for method in ["fork", "spawn", "forkserver"] {
        for epoch in 0..2 {
            expected += &format!("{method} {epoch} True pinned True\n");
        }
    }
    expected += "queue 0\na worker died: True\n";
    assert_eq!(String::from_utf8_lossy(&run.output.stdout), expected);
    let trace = run.trace();
    let (ours, theirs) = (ledger::ours(&trace), ledger::read_all(file.path()));
    assert_eq!(theirs.keys().collect::<Vec<_>>(), [&ledger::pid(&trace)], "processes that used CUDA");
    ledger::assert_equal(&ours, &theirs[&ledger::pid(&trace)]);
    let is_pinned_allocation = |call: &ledger::Call| {
        let api = Api::ALL.iter().find(|a| a.symbol() == Some(&call.api));
        api.is_some_and(|a| !a.frees() && matches!(a.memory_kind(), Some(MemoryKind::Host | MemoryKind::Registered)))
    };
    let allocating_threads =
        ours.iter().filter(|(_, calls)| calls.iter().any(is_pinned_allocation)).map(|(tid, _)| *tid);
    let main = ledger::pid(&trace);
    assert!(
        allocating_threads.clone().any(|tid| tid != main),
        "a pinning thread obtained memory: {:?}",
        allocating_threads.collect::<Vec<_>>()
    );
}
