//! `memtrace diff` and `memtrace check` on real PyTorch: known changes, against `torch.cuda.memory_stats` of both runs.

use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{Run, TracedProgram, memtrace};
use serde_json::Value;

struct Recorded {
    run: Run,
    /// The program's `torch.cuda.memory_stats`.
    stats: Value,
}

fn record(arguments: &[&str]) -> Recorded {
    let run = TracedProgram::python("torch/changed.py", arguments).run();
    run.assert_ended_well();
    let stats = serde_json::from_slice(&run.output.stdout).expect("the program's figures");
    Recorded { run, stats }
}

fn memtrace_on(words: &[&str], paths: &[&Path]) -> Output {
    Command::new(memtrace()).args(words).args(paths).output().expect("memtrace starts")
}

fn diff(a: &Recorded, b: &Recorded) -> Value {
    let output = memtrace_on(&["diff", "--json"], &[&a.run.path(), &b.run.path()]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pair = report["pairs"][0].clone();
    let bytes = |value: &Value| value.as_i64().expect("bytes");
    for (side, recorded) in [("a", a), ("b", b)] {
        assert_eq!(
            pair[side]["totals"]["allocated_bytes"], recorded.stats["allocated"],
            "torch.cuda.memory_stats of {side}"
        );
        assert_eq!(pair[side]["reserved_peak_bytes"], recorded.stats["reserved"], "torch.cuda.memory_stats of {side}");
    }
    let difference = bytes(&b.stats["allocated"]) - bytes(&a.stats["allocated"]);
    assert_eq!(bytes(&pair["difference_bytes"]), difference);
    for table in ["by_category", "by_phase", "by_line", "by_stack", "by_module"] {
        let sum: i64 = pair[table].as_array().unwrap().iter().map(|row| bytes(&row["difference_bytes"])).sum();
        assert_eq!(sum, difference, "{table} adds up");
    }
    pair
}

/// The number of the first line of the program that contains this text.
fn line_of(text: &str) -> u64 {
    let source = include_str!("../../programs/torch/changed.py");
    source.lines().position(|line| line.contains(text)).expect("there is such a line") as u64 + 1
}

#[test]
fn known_changes_are_named_with_their_bytes() {
    let plain = record(&[]);
    assert_leaking_line(&plain, &record(&["--keep"]));
    assert_larger_batch(&plain, &record(&["--batch", "256"]));
    assert_no_difference(&plain, &record(&[]));
}

#[track_caller]
fn assert_leaking_line(plain: &Recorded, keeps: &Recorded) {
    let pair = diff(plain, keeps);
    let most = &pair["by_line"][0];
    assert_eq!(most["b_frame"]["line"], line_of("history.append"), "{most:#}");
    // At the peak, in the last step, four tensors of 64 x 2048 floats are kept.
    assert_eq!(most["difference_bytes"], 4 * 64 * 2048 * 4);
    assert_eq!(pair["result"], "grew");
    assert!(
        pair["headline"].as_str().unwrap().contains(&format!("changed.py:{}", line_of("history.append"))),
        "{pair:#}"
    );
    // With the first run as baseline the check fails, and the annotation names that line.
    let output =
        memtrace_on(&["check", "--github", "--baseline", plain.run.path().to_str().unwrap()], &[&keeps.run.path()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("memtrace check: FAIL  peak "), "{text}");
    let annotation = text.lines().find(|line| line.starts_with("::error ")).expect("an annotation");
    assert!(annotation.contains(&format!(",line={},", line_of("history.append"))), "{annotation}");
}

/// The blocks that depend on the batch size have grown, and no others.
#[track_caller]
fn assert_larger_batch(small: &Recorded, large: &Recorded) {
    let pair = diff(small, large);
    // The peak is in the backward's last node, that of the first layer. Two blocks in use then depend on the batch
    // size: the input, which the node multiplies, and the gradient of relu's input. `diff` has compared the peaks with
    // `torch.cuda.memory_stats`.
    let (input, gradient) = ((256 - 64) * 512 * 4, (256 - 64) * 2048 * 4);
    assert_eq!((pair["a"]["phase"].as_str(), pair["b"]["phase"].as_str()), (Some("backward"), Some("backward")));
    assert_eq!(pair["difference_bytes"], input + gradient, "{pair:#}");
    let grown = |table: &str| -> Vec<Value> {
        let rows = pair[table].as_array().unwrap().iter();
        rows.filter(|row| row["difference_bytes"] != 0).cloned().collect()
    };
    let categories = grown("by_category");
    let categories: Vec<_> =
        categories.iter().map(|row| (row["category"].as_str(), &row["difference_bytes"])).collect();
    assert_eq!(
        categories,
        [(Some("autograd_detail"), &Value::from(gradient)), (Some("input"), &Value::from(input))],
        "{pair:#}"
    );
    let lines = grown("by_line");
    let lines: Vec<_> = lines.iter().map(|row| (row["b_frame"]["line"].as_u64(), &row["difference_bytes"])).collect();
    let (relu, batch) = (line_of("torch.relu"), line_of("x = torch.empty"));
    assert_eq!(lines, [(Some(relu), &Value::from(gradient)), (Some(batch), &Value::from(input))], "{pair:#}");
    assert_eq!(pair["result"], "grew", "{pair:#}");
    assert_eq!(pair["moved_lines"], 0);
}

/// Data that one side does not have is no difference: a snapshot has no nodes, modules or names.
#[test]
fn a_recording_and_pytorchs_snapshot_of_a_process_have_no_differences() {
    let dir = tempfile::tempdir().unwrap();
    let pickle = dir.path().join("theirs.pickle");
    let traced = TracedProgram::python("torch/mlp.py", &[]).env("MEMTRACE_TEST_ORACLE", &pickle);
    // With a workspace that PyTorch keeps, the peak is not in the backward pass, where a snapshot has no Python frames.
    let run = traced.env("MEMTRACE_TEST_ORACLE_LAST", "1").env("TORCH_CUBLAS_WORKSPACE_CACHE", "1").run();
    run.assert_ended_well();
    // The program prints "peak BYTES reserved BYTES".
    let printed = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let printed: Vec<u64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    for (a, b) in [(run.path(), pickle.clone()), (pickle.clone(), run.path())] {
        let output = memtrace_on(&["diff", "--json"], &[&a, &b]);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let pair = &report["pairs"][0];
        for side in ["a", "b"] {
            assert_eq!(pair[side]["totals"]["allocated_bytes"], printed[0], "torch.cuda.max_memory_allocated");
        }
        assert_eq!(pair["a"]["totals"], pair["b"]["totals"]);
        assert_eq!(pair["a"]["reserved_peak_bytes"], pair["b"]["reserved_peak_bytes"]);
        for key in ["phase", "step"] {
            assert_eq!(pair["a"][key], pair["b"][key], "{key}");
        }
        // A snapshot does not have the program's working directory.
        let place =
            |side: &str| pair[side]["location"].as_str().and_then(|place| place.find("mlp.py").map(|at| &place[at..]));
        assert!(place("a").is_some() && place("a") == place("b"), "{pair:#}");
        assert_eq!((&pair["difference_bytes"], &pair["result"]), (&Value::from(0), &Value::from("same")), "{pair:#}");
        for table in ["by_category", "by_phase", "by_line", "by_stack"] {
            let rows = pair[table].as_array().unwrap();
            assert!(rows.iter().all(|row| row["difference_bytes"] == 0), "{table}: {rows:#?}");
        }
        assert!(pair["by_line"].as_array().is_some_and(|rows| rows.len() > 4), "{pair:#}");
        assert_eq!(pair["by_module"], Value::from([0; 0]));
        let remarks = report["notes"].to_string();
        for remark in ["a snapshot without autograd nodes", "no table by module", "tensor names"] {
            assert!(remarks.contains(remark), "{remark}: {remarks}");
        }
    }
}

#[track_caller]
fn assert_no_difference(one: &Recorded, other: &Recorded) {
    let pair = diff(one, other);
    assert_eq!((&pair["result"], &pair["difference_bytes"]), (&Value::from("same"), &Value::from(0)));
    let text = memtrace_on(&["diff"], &[&one.run.path(), &other.run.path()]);
    assert!(String::from_utf8(text.stdout).unwrap().contains(": no difference\n"));
    // A run passes the check against its own summary.json. A limit is exact to the byte.
    let dir = tempfile::tempdir().unwrap();
    let baseline = dir.path().join("baseline.json");
    std::fs::copy(one.run.path().join("summary.json"), &baseline).unwrap();
    let peak = one.stats["allocated"].as_u64().unwrap();
    let status = |words: &[&str]| memtrace_on(words, &[&other.run.path()]).status.code();
    assert_eq!(status(&["check", "--baseline", baseline.to_str().unwrap(), "--tolerance", "0%"]), Some(0));
    assert_eq!(status(&["check", "--max-peak", &peak.to_string(), "--no-oom", "--max-leak", "0"]), Some(0));
    assert_eq!(status(&["check", "--max-peak", &(peak - 1).to_string()]), Some(1));
    assert_eq!(status(&["check", "--max-peak", "20GB"]), Some(0));
    assert_eq!(status(&["check", "--max-peak", "20G"]), Some(2), "neither GiB nor GB");
    assert_eq!(status(&["check", "--baseline", "/nonexistent"]), Some(2));
}

#[test]
fn two_steps_of_a_run_show_the_growth_per_step() {
    let keeps = record(&["--keep"]);
    let output = memtrace_on(&["diff", "--json", "--steps", "1", "3"], &[&keeps.run.path()]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pair = &report["pairs"][0];
    assert_eq!(pair["difference_bytes"], 2 * 64 * 2048 * 4, "{pair:#}");
    assert_eq!(pair["by_line"][0]["b_frame"]["line"], line_of("history.append"));
}
