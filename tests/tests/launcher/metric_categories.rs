//! Memory by category among the metrics of `--metrics`, against what the program counts itself.

use std::collections::BTreeMap;

use memtrace_tests::traced_program::TracedProgram;
use serde_json::Value;

use crate::launcher_support::*;
use crate::metrics::{Served, value};

/// The PyTorch program that prints its own figures.
fn training() -> TracedProgram {
    TracedProgram::python("torch/live.py", &[])
}

/// The bytes by category.
fn by_category(samples: &[Value]) -> BTreeMap<String, u64> {
    let all = samples.iter().filter(|sample| sample[0] == "memtrace_allocated_by_category_bytes");
    all.map(|one| (one[1]["category"].as_str().unwrap().to_owned(), one[2].as_f64().unwrap() as u64)).collect()
}

/// Waits until the categories are those of a training that prints these figures: their sum is what PyTorch has
/// allocated, and the model's parameters have as many bytes as the program counts. Adam has two tensors for each after
/// a step.
#[track_caller]
fn expect_figures(served: &Served, printed: &str, has_stepped: bool) -> [Vec<Value>; 2] {
    let printed: Value = serde_json::from_str(printed).unwrap();
    let [allocated, parameters] = [&printed["allocated"], &printed["parameters"]].map(|n| n.as_u64().unwrap());
    served.until(|samples| {
        let bytes = by_category(samples);
        value(samples, "memtrace_allocated_bytes", None) == Some(allocated)
            && bytes.values().sum::<u64>() == allocated
            && bytes.get("parameter") == Some(&parameters)
            && bytes.get("optimizer_state").copied().unwrap_or(0) == if has_stepped { 2 * parameters } else { 0 }
    })
}

/// The process of this launcher that reads the traces. A thread has started it.
fn worker(launcher: i32) -> Option<i32> {
    let threads = std::fs::read_dir(format!("/proc/{launcher}/task")).unwrap().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let pids: Vec<i32> = children.flat_map(|text| text.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
    let name = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    pids.into_iter().find(|pid| name(pid).starts_with(b"memtrace-categories\0"))
}

#[test]
fn categories_of_a_training_add_up_to_what_pytorch_has_allocated() {
    let mut served = Served::start(training());
    for turn in 0..3 {
        let printed = served.launcher.line();
        for samples in expect_figures(&served, &printed, turn > 0) {
            let [labels, allocated] = ["memtrace_allocated_by_category_bytes", "memtrace_allocated_bytes"]
                .map(|name| &samples.iter().find(|sample| sample[0] == name).unwrap()[1]);
            assert_eq!((&labels["pid"], &labels["device"]), (&allocated["pid"], &allocated["device"]));
        }
        served.say("more");
    }
    let stderr = served.end();
    assert!(!stderr.iter().any(|line| line.contains("warning")), "{stderr:?}");
}

#[test]
fn categories_of_a_process_end_with_it() {
    let mut served = Served::start(training().through(&["sh", "-c", "\"$@\"; read line", "sh"]));
    let printed = served.launcher.line();
    expect_figures(&served, &printed, false);
    let reads = worker(served.launcher.pid()).expect("a process that reads the traces");
    served.say("");
    served.until(|samples| value(samples, "memtrace_processes", None) == Some(0) && by_category(samples).is_empty());
    // Without a process to follow, it has nothing to do.
    wait_for(|| worker(served.launcher.pid()) != Some(reads));
    served.say("");
    served.end();
}

#[test]
fn without_the_process_that_reads_the_traces_only_the_categories_are_missing() {
    let mut served = Served::start(training());
    let printed = served.launcher.line();
    expect_figures(&served, &printed, false);
    let reads = worker(served.launcher.pid()).expect("a process that reads the traces");
    kill(reads, libc::SIGKILL);
    let missing = |samples: &[Value]| by_category(samples).is_empty();
    for samples in served.until(missing) {
        let printed: Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(value(&samples, "memtrace_allocated_bytes", None), printed["allocated"].as_u64());
    }
    served.say("more");
    served.launcher.line();
    let stderr = served.end();
    let warnings: Vec<&String> = stderr.iter().filter(|line| line.contains("warning: ")).collect();
    let [warning] = warnings[..] else { panic!("{stderr:?}") };
    assert!(warning.contains("the memory by category is no longer among the metrics") && warning.contains("SIGKILL"));
}

#[test]
fn categories_go_on_in_a_rotated_trace() {
    let mut served = Served::start(training().option("--keep").option("1s"));
    let mut printed = served.launcher.line();
    expect_figures(&served, &printed, false);
    let inode = |run: &std::path::Path| {
        let trace = traces(run).into_iter().next().unwrap();
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(trace).unwrap())
    };
    let run = served.run();
    let first = inode(&run);
    while inode(&run) == first {
        served.say("50");
        printed = served.launcher.line();
    }
    expect_figures(&served, &printed, true);
    let stderr = served.end();
    assert!(!stderr.iter().any(|line| line.contains("warning")), "{stderr:?}");
}
