//! Programs of several ranks: starting them, and comparing each rank's trace with PyTorch's recorder in the same
//! process.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_trace::file::Reader;
use serde_json::Value;

use crate::oracle::{Oracle, assert_equal};
use crate::traced_program::{Run, TracedProgram, python, root};

/// How ranks are started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// By torchrun, which sets `RANK` and the related variables in each process's environment.
    Torchrun,
    /// By `torch.multiprocessing.spawn`, which sets none of these variables.
    Spawn,
}

/// `tests/programs/distributed/train.py` with two ranks, one device each.
pub fn two_ranks(start: Start, arguments: &[&str]) -> TracedProgram {
    program("train.py", start, arguments)
}

/// A program of `tests/programs/distributed` with two ranks, one device each.
pub fn program(name: &str, start: Start, arguments: &[&str]) -> TracedProgram {
    let program = root().join("tests/programs/distributed").join(name);
    let program = program.to_str().expect("a path in UTF-8");
    let mut command = vec![python()];
    match start {
        Start::Torchrun => {
            command.extend(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]);
            command.extend(arguments);
        }
        Start::Spawn => {
            command.push(program);
            command.extend(arguments);
            command.extend(["--spawn", "2"]);
        }
    }
    TracedProgram::command(&command).over_simcuda().env("SIMCUDA_DEVICES", "2").env("OMP_NUM_THREADS", "1")
}

/// A run of several ranks, with the snapshots of PyTorch's recorder.
#[derive(Debug)]
pub struct Ranks {
    /// The run.
    pub run: Run,
    /// By rank: the process's entry in `run.json`, its trace, and PyTorch's snapshot. The snapshot is `None` where the
    /// rank ended before taking it.
    pub ranks: BTreeMap<u32, (Value, Reader, Option<Oracle>)>,
}

/// Runs the program with memtrace and PyTorch's recorder at once, and finds each rank's process in `run.json`.
#[track_caller]
pub fn run(traced: TracedProgram) -> Ranks {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let prefix = folder.path().join("oracle");
    let run = traced.env("MEMTRACE_TEST_ORACLE", &prefix).run();
    let manifest = run.manifest();
    let ranks = manifest["processes"].as_array().expect("processes").iter();
    let ranks = ranks.map(|entry| {
        let rank = entry["rank"].as_u64().unwrap_or_else(|| panic!("a rank: {entry}")) as u32;
        let trace = Path::new(entry["trace"].as_str().expect("a trace"));
        let trace = Reader::open(run.path().join(trace)).expect("a readable trace");
        let path = folder.path().join(format!("oracle.{rank}"));
        (rank, (entry.clone(), trace, path.exists().then(|| Oracle::read(&path))))
    });
    let ranks = ranks.collect();
    Ranks { run, ranks }
}

/// Like [`run`], for a program that must succeed. Compares each rank's events with PyTorch's.
#[track_caller]
pub fn compare(traced: TracedProgram) -> Ranks {
    let ranks = run(traced);
    ranks.run.assert_ended_well();
    assert_eq!(ranks.ranks.keys().collect::<Vec<_>>(), [&0, &1], "ranks");
    for (entry, trace, oracle) in ranks.ranks.values() {
        let oracle = oracle.as_ref().unwrap_or_else(|| panic!("no snapshot of PyTorch's: {entry}"));
        assert_equal(trace, oracle);
    }
    ranks
}
