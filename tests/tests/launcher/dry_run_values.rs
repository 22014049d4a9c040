//! `memtrace dry-run`: what depends on values, which no kernel computes.

use std::path::Path;
use std::process::{Command, Output};

use memtrace_tests::traced_program::{python, root};
use serde_json::{Value, json};

use crate::launcher_support::*;

/// A dry run of a part of `tests/programs/launcher/dry_run_values.py`, in a folder.
fn dry_run(folder: &Path, options: &[&str], part: &str) -> Output {
    let program = root().join("tests/programs/launcher/dry_run_values.py");
    // For the Python of the test environment.
    let mut command = Command::new(root().join("scripts/sim"));
    command.current_dir(folder).env("PYTHONPATH", folder.join("modules"));
    command.arg(memtrace()).args(["dry-run", "--gpu", "h200", "-o", "run"]).args(options);
    command.arg("--").arg(python()).arg(program).arg(part);
    output(&mut command)
}

/// The values that the part prints.
fn printed(options: &[&str], part: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run(folder.path(), options, part);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The exit code, the report and the summary of a part.
fn ended(part: &str) -> (Option<i32>, String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run(folder.path(), &[], part);
    let summary = std::fs::read(folder.path().join("run/summary.json")).unwrap();
    // Lines of the report are wrapped.
    let report = stderr(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    (output.status.code(), report, serde_json::from_slice(&summary).unwrap())
}

#[test]
fn integers_are_those_of_a_gpu() {
    let expected = json!({
        "where": [0, -1, -2, 3, -4, -5, 6, -7, 0, 9],
        "nonzero": [7, 8, 9],
        "unique": [[0, 1, 2], [4, 3, 3]],
        "repeated": [0, 2, 2],
        "bincount": [4, 4, 2],
        "sorted": [1, 2, 3],
        "one_hot": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        "coalesced": [[0, 2]],
    });
    assert_eq!(printed(&[], "integers"), expected);
}

#[test]
fn the_policy_decides_what_masks_select() {
    let of = |policy: &str| printed(&["--nonzero", policy], "masks");
    let expected = |count: u64, unique: u64, both: u64| {
        json!({
            "masked": count, "others": count, "where": count, "unique": unique, "both": both, "is_finite": true,
            "is_nan": false,
        })
    };
    // Two conditions are independent of each other: about a quarter.
    let half = of("half");
    let both = half["both"].as_u64().unwrap();
    assert!((200..300).contains(&both), "{half}");
    assert_eq!(half, expected(500, 500, both));
    assert_eq!(of("full"), expected(1000, 1000, 1000));
    assert_eq!(of("zero"), expected(0, 1, 0));
}

#[test]
fn numbers_are_those_of_the_host_or_one() {
    let expected =
        json!({"loss": 1.0, "list": [1.0], "copied": [2.5, 0.5], "filled": 7.5, "rounds": 30, "sampled": [4]});
    assert_eq!(printed(&[], "numbers"), expected);
}

#[test]
fn sizes_by_random_numbers_are_those_of_the_cpu_but_for_chance() {
    let program = root().join("tests/programs/launcher/dry_run_sizes.py");
    let folder = tempfile::tempdir().unwrap();
    let sizes = |simulated: bool| -> Value {
        let mut command = Command::new(root().join("scripts/sim"));
        command.current_dir(folder.path());
        if simulated {
            command.arg(memtrace()).args(["dry-run", "--gpu", "h200", "-o", "run", "--"]);
        } else {
            command.env("DEVICE", "cpu");
        }
        let output = output(command.arg(python()).arg(&program));
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (ours, theirs) = (sizes(true), sizes(false));
    for (name, figures) in theirs.as_object().unwrap() {
        for (figure, truth) in figures.as_object().unwrap() {
            let truth = truth.as_f64().unwrap_or_else(|| panic!("{name}: {figures}"));
            let ours = ours[name][figure].as_f64().unwrap_or_else(|| panic!("{name}: {ours}"));
            // Four standard deviations of a count, and a share of what depends on few random numbers.
            let tolerance = (0.08 * truth.abs() + 4.0 * truth.abs().sqrt()).max(4.0);
            assert!((ours - truth).abs() <= tolerance, "{name}, {figure}: {ours} instead of {truth}");
        }
    }
    let summary: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("run/summary.json")).unwrap()).unwrap();
    let guessed = summary["run"]["simulated"]["guessed_sizes"].as_array().unwrap();
    // Samples by weights (`multinomial`) are declared. All others follow from random numbers.
    let text = std::fs::read_to_string(&program).unwrap();
    let line = 1 + text.lines().position(|line| line.contains("index.unique()")).unwrap();
    let of_samples = format!("dry_run_sizes.py:{line}");
    let is_declared = |size: &Value| size["location"].as_str().unwrap().ends_with(&of_samples);
    assert!(
        guessed.len() > 8 && guessed.iter().all(|size| is_declared(size) || size["is_assumed"] == false),
        "{guessed:?}"
    );
}

#[test]
fn values_do_not_change_what_the_allocator_does() {
    let program = root().join("tests/programs/launcher/dry_run_events.py");
    let events = |path: &Path| -> Value {
        let mut command = Command::new(root().join("scripts/sim"));
        let output = output(command.env("PYTHONPATH", path).arg(python()).arg(&program));
        assert!(output.status.success(), "{}", stderr(&output));
        let mut programs: Value = serde_json::from_slice(&output.stdout).unwrap();
        for events in programs.as_object_mut().unwrap().values_mut() {
            let events = events.as_array_mut().unwrap();
            // Tensors that one operator drops are freed in any order.
            for run in events.chunk_by_mut(|one, next| [one, next].iter().all(|event| is_free(event))) {
                run.sort_by_key(Value::to_string);
            }
        }
        programs
    };
    let with_values = events(&root().join("simulate/python"));
    let without = events(Path::new(""));
    for (name, events) in without.as_object().unwrap() {
        assert!(events.as_array().unwrap().len() > 40, "{name}: {events}");
        assert!(with_values[name] == *events, "{name}");
    }
}

fn is_free(event: &Value) -> bool {
    event[0].as_str().unwrap().starts_with("free_")
}

#[test]
fn solvers_succeed_and_small_tensors_are_computed() {
    assert_eq!(printed(&[], "solvers"), json!({"failed": [], "inverse": [-2.0, 1.0, 1.5, -0.5]}));
    assert_eq!(printed(&[], "operators"), json!([]));
}

#[test]
fn lengths_on_the_host_and_sparse_gradients_keep_their_values() {
    assert_eq!(printed(&[], "layouts"), json!({"packed": [3, 3, 2, 1, 1], "rows": [[3, 7, 9]]}));
}

#[test]
fn memory_that_another_tensor_had_is_not_taken_for_its_values() {
    assert_eq!(printed(&[], "storages"), json!({"is_same": true, "before": -1, "after": 7}));
}

#[test]
fn line_searches_go_on_and_loops_end() {
    assert_eq!(printed(&[], "optimizers"), json!({"history": 7, "is_bounded": true}));
}

#[test]
fn tokens_choose_experts_by_the_rule() {
    let tokens = |rule: &str| -> Vec<u64> {
        serde_json::from_value(printed(&["--routing", rule], "experts")["tokens"].clone()).unwrap()
    };
    assert_eq!(tokens("even"), [256; 8]);
    assert_eq!(tokens("one-rank"), [1024, 1024, 0, 0, 0, 0, 0, 0]);
    let zipf = tokens("zipf:1.2");
    assert_eq!(zipf.iter().sum::<u64>(), 2048);
    assert!(zipf[0] > 2 * zipf[3] && zipf[3] > zipf[7], "{zipf:?}");
}

#[test]
fn guessed_sizes_are_reported_with_their_lines() {
    let (code, report, summary) = ended("masks");
    assert_eq!(code, Some(0), "{report}");
    let program = std::fs::read_to_string(root().join("tests/programs/launcher/dry_run_values.py")).unwrap();
    let line = 1 + program.lines().position(|line| line.contains("\"masked\": x[mask]")).unwrap();
    assert!(
        report.contains("Sizes are guessed, because they depend on values that a dry run does not compute"),
        "{report}"
    );
    let found = summary["run"]["simulated"]["guessed_sizes"].as_array().unwrap().iter();
    let place = format!("dry_run_values.py:{line}");
    let found: Vec<_> = found.filter(|size| size["location"].as_str().unwrap().ends_with(&place)).collect();
    assert!(
        found.iter().any(|size| size["operator"] == "nonzero" && size["selected"] == 500 && size["total"] == 1000),
        "{found:?}"
    );
}

#[test]
fn guessed_branches_are_reported_with_their_lines() {
    let (code, report, summary) = ended("branches");
    assert_eq!(code, Some(0), "{report}");
    let program = std::fs::read_to_string(root().join("tests/programs/launcher/dry_run_values.py")).unwrap();
    let marked = |mark: &str| -> Vec<usize> {
        let lines = program.lines().zip(1..).filter(|(line, _)| line.ends_with(&format!("  # {mark}")));
        lines.map(|(_, number)| number).collect()
    };
    let found = summary["run"]["simulated"]["guessed_branches"].as_array().unwrap();
    let lines = |is_of: &dyn Fn(&Value) -> bool| -> Vec<usize> {
        let line = |one: &Value| one["location"].as_str()?.rsplit_once(':')?.1.parse().ok();
        let mut lines: Vec<usize> = found.iter().filter(|one| is_of(one)).filter_map(line).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(lines(&|one| one["kind"] == "branch" && one["optimizer"].is_null()), marked("branch"), "{found:?}");
    assert_eq!(lines(&|one| one["kind"] == "size"), marked("size"), "{found:?}");
    assert_eq!(lines(&|one| one["optimizer"] == "LBFGS"), marked("optimizer"), "{found:?}");
    assert!(report.contains("Numbers that a dry run does not compute decide the course at "), "{report}");
    assert!(report.contains("its memory is an upper bound: LBFGS at "), "{report}");
    let (_, report, summary) = ended("scaler");
    assert!(summary["run"]["simulated"]["guessed_branches"].is_null(), "{report}");
}

#[test]
fn gradscaler_skips_no_step() {
    assert_eq!(printed(&[], "scaler"), json!({"steps": 3, "scale": 65536.0}));
}

#[test]
fn sampling_ends_after_the_tokens_that_were_asked_for() {
    assert_eq!(printed(&[], "sampling"), json!({"length": 64, "is_valid": true}));
}

#[test]
fn each_expert_gets_as_many_tokens() {
    assert_eq!(printed(&[], "routing"), json!({"tokens": [24, 24, 24, 24, 24, 24, 24, 24]}));
}

#[test]
fn non_maximum_suppression_keeps_the_policys_share() {
    assert_eq!(printed(&[], "suppression"), json!({"kept": 50, "highest": 98}));
}

#[test]
fn memory_of_the_device_takes_no_memory_of_the_host() {
    let figures = printed(&[], "memory");
    assert!(figures["device"].as_u64() > Some(70_000_000_000), "{figures}");
    assert!(figures["host"].as_u64() < Some(256), "MiB: {figures}");
}

#[test]
fn compilers_leave_nothing_in_the_users_caches() {
    let printed = printed(&[], "compilers");
    let folders = printed["folders"].as_array().unwrap();
    assert_eq!(folders.len(), 4);
    assert!(folders.iter().all(|folder| folder.as_str().unwrap().contains("/run/.simulated/")), "{printed}");
    // Workers that inductor forks again can hang (docs/dev/dry-run.md).
    assert_eq!(printed["forks_workers_again"], false);
}

#[test]
fn a_program_that_fails_over_a_value_is_reported_with_its_lines() {
    let (code, report, summary) = ended("value_error");
    assert_eq!(code, Some(1));
    let exception = &summary["run"]["simulated"]["exception"];
    assert_eq!(exception["exception"], "IndexError", "{summary}");
    let program = std::fs::read_to_string(root().join("tests/programs/launcher/dry_run_values.py")).unwrap();
    let line = |text: &str| 1 + program.lines().position(|line| line.contains(text)).unwrap();
    let (died, read) = (line("return {\"found\": [\"a\"][index]}"), line(".sum().item() * 10)"));
    assert!(
        report.contains(&format!(
            "dry_run_values.py:{died}. A dry run computes no values; the program last read some at"
        )) && report.contains(&format!("dry_run_values.py:{read}.")),
        "{report}"
    );
    assert!(!report.contains("simcuda/"), "{report}");
}

#[test]
fn a_program_that_leaves_over_a_value_is_reported_with_its_lines() {
    let program = std::fs::read_to_string(root().join("tests/programs/launcher/dry_run_values.py")).unwrap();
    let line = |text: &str| 1 + program.lines().position(|line| line.contains(text)).unwrap();
    let ends = [
        ("value_exit", 1, "SystemExit", "sys.exit(\"the loss is too large\")"),
        ("value_immediate_exit", 3, "os._exit", "os._exit(3)"),
    ];
    for (part, status, name, text) in ends {
        let (code, report, summary) = ended(part);
        assert_eq!(code, Some(status), "{report}");
        let place = format!("dry_run_values.py:{}", line(text));
        assert!(report.contains(&format!("{place}. A dry run computes no values")), "{report}");
        let exception = &summary["run"]["simulated"]["exception"];
        assert_eq!(exception["exception"], name, "{summary}");
        let read = format!("dry_run_values.py:{}", line(text) - 1);
        assert!(exception["read_location"].as_str().unwrap().ends_with(&read), "{summary}");
    }
    // Nothing was read, or the program leaves over an out-of-memory error.
    for part in ["early_exit", "out_of_memory_exit"] {
        let (code, _, summary) = ended(part);
        assert_eq!(code, Some(3));
        assert!(summary["run"]["simulated"]["exception"].is_null(), "{summary}");
    }
}

#[test]
fn other_errors_are_not_explained_by_values() {
    for (part, error) in [("early_error", "before any value"), ("out_of_memory", "CUDA out of memory")] {
        let (code, report, summary) = ended(part);
        assert_eq!(code, Some(1));
        assert!(report.contains(error) && !report.contains("computes no values"), "{report}");
        assert!(summary["run"]["simulated"]["exception"].is_null(), "{summary}");
    }
}

#[test]
fn a_program_ends_after_the_steps_of_each_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let output = dry_run(folder.path(), &["--steps", "3"], "endless");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // It ends in the third step, before the line is printed.
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n1\n");
}

#[test]
fn the_programs_own_sitecustomize_runs_too() {
    let folder = tempfile::tempdir().unwrap();
    let modules = folder.path().join("modules");
    std::fs::create_dir(&modules).unwrap();
    std::fs::write(modules.join("sitecustomize.py"), "import builtins\nbuiltins.is_customized = True\n").unwrap();
    let output = dry_run(folder.path(), &[], "environment");
    assert!(output.status.success(), "{}", stderr(&output));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, json!({"is_customized": true, "loss": 1.0, "foreign_paths": []}));
}
