//! The same program gives the same names, categories and report, however busy the machine is.
//!
//! Runs that are delayed at random places (`memtrace_tests::random_delays`) are compared with a run without delays.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_tests::random_delays::run_with_random_delays;
use memtrace_tests::traced_program::{Run, TracedProgram, events, root};
use memtrace_trace::file::Reader;
use serde_json::{Value, json};

/// Runs of each program that are delayed, and in the exhaustive tier.
const RUNS: u64 = 1;
const MANY_RUNS: u64 = 20;

/// Whether a field of `summary.json` differs between runs of one program: times, process ids, paths, memtrace's own
/// cost.
fn is_of_the_run(key: &str) -> bool {
    key.ends_with("_ns") || key.ends_with("_us") || ["pid", "ppid", "path", "trace", "snapshot", "files"].contains(&key)
}

fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| !is_of_the_run(key))
            .map(|(key, value)| (key.clone(), canonical(value)))
            .collect(),
        Value::Array(values) => values.iter().map(canonical).collect(),
        value => value.clone(),
    }
}

/// The report and the names of each process, in an order that does not depend on process ids.
fn results(run: &Run) -> Vec<String> {
    let text = std::fs::read_to_string(run.path().join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let mut results = Vec::new();
    for process in summary["processes"].as_array().expect("processes") {
        results.push(format!("{:#}", canonical(process)));
    }
    for trace in run.traces() {
        let definitions = trace.definitions();
        // Names come with the number of the event after which they were read. Equal numbers show that each scan ran at
        // the same point.
        let tensors =
            definitions.tensor_names.iter().map(|n| json!([n.seq, format!("{:?}", n.kind), &*n.name, &*n.shape]));
        // A module's name is written again only for another address. Python's addresses differ between runs, so only
        // the first time of each name counts.
        let mut modules = BTreeMap::new();
        for name in &definitions.nn_names {
            modules.entry(format!("{} {}", name.class, name.name)).or_insert(name.seq);
        }
        let names = json!({"events": events(&trace).len(), "tensors": tensors.collect::<Vec<_>>(), "modules": modules});
        assert!(!definitions.tensor_names.is_empty(), "the program's tensors have names");
        results.push(format!("{names:#}"));
    }
    results.sort_unstable();
    results
}

/// The names of each process, without the numbers of events.
fn names(run: &Run) -> Vec<String> {
    let of_trace = |trace: Reader| {
        let definitions = trace.definitions();
        let tensors: BTreeSet<_> =
            definitions.tensor_names.iter().map(|n| format!("{:?} {} {}", n.kind, n.name, n.shape)).collect();
        let modules: BTreeSet<_> = definitions.nn_names.iter().map(|n| format!("{} {}", n.class, n.name)).collect();
        assert!(!tensors.is_empty(), "the program's tensors have names");
        format!("{tensors:#?} {modules:#?}")
    };
    let mut names: Vec<String> = run.traces().into_iter().map(of_trace).collect();
    names.sort_unstable();
    names
}

#[track_caller]
fn check(traced: TracedProgram, runs: u64) {
    check_equal(traced, runs, results);
}

/// Compares what `results` takes from each run.
#[track_caller]
fn check_equal(traced: TracedProgram, runs: u64, results: fn(&Run) -> Vec<String>) {
    // The interpreter's own objects depend on the string hashes, so the hash seed is fixed.
    let traced = traced.env("PYTHONHASHSEED", "0").env("OMP_NUM_THREADS", "1");
    let calm = traced.run();
    calm.assert_ended_well();
    let expected = results(&calm);
    for seed in 1..=runs {
        let (run, stops) = run_with_random_delays(&traced, seed);
        run.assert_ended_well();
        assert!(stops > 3, "the run was delayed {stops} times");
        let ours = results(&run);
        assert_eq!(ours.len(), expected.len(), "processes");
        if let Some((ours, expected)) = ours.iter().zip(&expected).find(|(ours, expected)| ours != expected) {
            let line = ours.lines().zip(expected.lines()).find(|(a, b)| a != b);
            panic!("delays {seed} ({stops} stops) changed what is said, first in {line:?}");
        }
    }
}

fn named(case: &str) -> TracedProgram {
    TracedProgram::python("names/named.py", &[case]).env("SIMCUDA_MEMORY", if case == "oom" { "1500M" } else { "8G" })
}

fn ranks(kind: &str) -> TracedProgram {
    let traced = TracedProgram::python("names/ranks.py", &[kind]).env("SIMCUDA_DEVICES", "2");
    traced.env("PYTHONPATH", root().join("tests/programs/names"))
}

#[test]
fn ranks_of_fsdp() {
    check(ranks("fsdp"), RUNS);
}

/// Every naming program, many times.
mod exhaustive {
    use super::*;

    #[test]
    fn checkpointing() {
        check(TracedProgram::python("torch/checkpoint.py", &[]), MANY_RUNS);
    }

    #[test]
    fn a_training_with_adam() {
        check(named("adam"), 3);
    }

    /// A test for each case of `names/named.py`.
    macro_rules! cases {
        ($($case:ident)*) => {$(
            #[test]
            fn $case() {
                check(named(stringify!($case)), MANY_RUNS);
            }
        )*};
    }

    mod one_process {
        use super::super::*;

        cases! {
            adam resnet tied frozen compiled two variables classes second_model folds resumed served inference one_step
            oom
        }
    }

    #[test]
    fn two_ranks() {
        check(ranks("fsdp"), MANY_RUNS);
        // When DDP replaces its buckets after the first step, NCCL's watchdog, a thread of PyTorch that wakes up ten
        // times a second, decides when the old ones are freed (pytorch/pytorch#150398). So the program's own peak
        // differs.
        check_equal(ranks("ddp"), MANY_RUNS, names);
    }
}
