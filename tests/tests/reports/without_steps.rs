//! Growth in programs that have neither training steps nor modules: requests of plain functions, simulations. Ranges of
//! a reinforcement-learning loop.

use std::collections::BTreeMap;
use std::process::Command;

use memtrace_analysis::report::{CalledFunctionSummary, IssueSummary, LabelSummary};
use memtrace_analysis::rules::RuleId;
use memtrace_analysis::{open_run, summarize};
use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_tests::random_delays::run_with_random_delays;
use memtrace_tests::snapshots::json;
use memtrace_tests::traced_program::{Run, TracedProgram, memtrace, root};

fn recorded(program: &str) -> Run {
    let run = TracedProgram::python(program, &[]).option("--no-snapshot").run();
    run.assert_ended_well();
    run
}

/// All issues of a program of `tests/programs/issues`.
fn issues(program: &str) -> Vec<IssueSummary> {
    issues_of(&recorded(&format!("issues/{program}")))
}

fn issues_of(run: &Run) -> Vec<IssueSummary> {
    let summary = summarize(&open_run(run.path()).unwrap(), &mut |_| {}).unwrap();
    summary.processes.into_iter().flat_map(|process| process.issues).collect()
}

/// The only issue, a leak: its headline, its location and the forecast in turns.
fn leak(program: &str) -> (String, String, u64) {
    let [issue] = &issues(program)[..] else { panic!("{program} has one issue") };
    assert_eq!(issue.rule, RuleId::Leak);
    let forecast = issue.forecast.as_ref().expect("the device's memory is known");
    assert!(forecast.duration_ns > 0, "{forecast:?}");
    assert_eq!(forecast.turns, forecast.free_bytes / forecast.growth_bytes);
    (issue.headline.clone(), issue.stack.as_ref().unwrap().location.clone(), forecast.turns)
}

/// The peak that a program prints, in MiB.
fn printed_peak(run: &Run) -> f64 {
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let peak = output.split_once("peak=").and_then(|(_, rest)| rest.split_once(' '));
    peak.and_then(|(peak, _)| peak.parse().ok()).unwrap_or_else(|| panic!("no peak: {output}"))
}

#[test]
fn a_c_program_is_in_no_phase_and_its_leaks_are_at_the_callers_of_one_function() {
    let folder = ProgramFolder::new();
    let run = |name: &str, frees: Option<&str>| {
        let options: Vec<_> = linked_with("libcudart.so.12").into_iter().chain(frees.map(str::to_owned)).collect();
        let run = with_simcuda(&[folder.program("native/flow.c", name, &options)]).option("--no-snapshot").run();
        run.assert_ended_well();
        run
    };
    let leaking = run("flow", None);
    let text = std::fs::read_to_string(leaking.path().join("summary.txt")).unwrap();
    let first = text.lines().next().unwrap();
    assert!(first.ends_with("of 8.00 GiB (5 %) on GPU 0."), "{first}");
    for word in ["loading", "phase", "step", "inputs", "a list"] {
        assert!(!text.contains(word), "{word}: {text}");
    }
    let mut issues = issues_of(&leaking);
    issues.sort_by_key(|issue| issue.stack.as_ref().map(|stack| stack.location.clone()));
    let lines = [("flow.c:34 allocate_frame", "-DFREES_COLOR"), ("flow.c:35 allocate_frame", "-DFREES_DEPTH")];
    assert_eq!(issues.len(), lines.len(), "{issues:?}");
    for (issue, (line, frees)) in issues.iter().zip(lines) {
        let location = &issue.stack.as_ref().unwrap().location;
        assert!(issue.rule == RuleId::Leak && location.contains(line), "{location}");
        assert!(issue.fix.contains("cudaFree"), "{}", issue.fix);
        let measured = printed_peak(&leaking) - printed_peak(&run("fixed", Some(frees)));
        let saves = issue.saves_bytes.unwrap() as f64 / f64::from(1 << 20);
        assert!((saves - measured).abs() < measured / 100.0, "{saves} MiB announced, {measured} MiB measured");
    }
}

#[test]
fn a_python_program_without_pytorch_is_in_no_phase() {
    let program = root().join("tests/programs/steps/without_torch.py");
    let run = with_simcuda(&["python3", program.to_str().unwrap()]).option("--no-snapshot").run();
    run.assert_ended_well();
    let text = std::fs::read_to_string(run.path().join("summary.txt")).unwrap();
    let first = text.lines().next().unwrap();
    assert!(first.starts_with("+ Finished: peak 72.0 MiB") && first.ends_with("on GPU 0."), "{first}");
    for word in ["loading", "phase", "before the first step", "inputs"] {
        assert!(!text.contains(word), "{word}: {text}");
    }
}

#[test]
fn weights_that_a_recurrent_module_joins_are_no_evaluation() {
    let run = recorded("issues/recurrent.py");
    let summary = json(&run.path().join("summary.json"));
    let device = &summary["processes"][0]["devices"][0];
    let phases = |rows: &str| -> Vec<String> {
        device[rows].as_array().unwrap().iter().map(|row| row["phase"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(phases("before_first_step"), ["load"]);
    assert!(!phases("later_steps").contains(&"eval".to_owned()), "{:?}", phases("later_steps"));
}

#[test]
fn caches_of_two_models_are_reported_by_model() {
    let run = recorded("steps/speculative.py");
    let output = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let printed = |model: &str| {
        let rest = output.split_once(model).unwrap().1;
        rest.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let summary = json(&run.path().join("summary.json"));
    let cache = &summary["processes"][0]["devices"][0]["peak"]["growing_kv_cache"];
    let by_model = cache["by_model"].as_array().unwrap();
    let figures: Vec<_> =
        by_model.iter().map(|one| (one["model"].as_str().unwrap(), one["growth_bytes"].as_u64().unwrap())).collect();
    assert_eq!(figures, [("Target", printed("target")), ("Draft", printed("draft"))], "{cache}");
    assert_eq!(by_model.iter().map(|one| one["bytes"].as_u64().unwrap()).sum::<u64>(), cache["bytes"]);
}

#[test]
fn a_dict_that_grows_with_each_request_of_plain_functions_is_a_leak() {
    let (headline, location, turns) = leak("index.py");
    assert!(headline.starts_with("1.00 MiB more with each iteration, 11"), "{headline}");
    assert!(location.ends_with("issues/index.py:15 handle"), "{location}");
    assert!((7000..8192).contains(&turns), "8 GiB hold at most 8192 blocks of a mebibyte: {turns}");
}

#[test]
fn growth_inside_named_ranges_counts_by_range() {
    let (headline, location, _) = leak("endpoints.py");
    // Each third of 150 requests is of this endpoint. 512 KiB stay each time.
    assert!(headline.starts_with("512 KiB more with each range recommend, 2"), "{headline}");
    assert!(location.ends_with("issues/endpoints.py:23 recommend"), "{location}");
}

#[test]
fn a_tensor_that_is_replaced_by_a_longer_one_is_a_leak() {
    let (headline, location, _) = leak("trail.py");
    assert!(headline.starts_with("96.0 KiB more with each iteration, 1"), "{headline}");
    assert!(location.ends_with("issues/trail.py:17"), "{location}");
}

#[test]
fn delays_change_nothing_but_the_time_until_the_memory_is_full() {
    let texts = |run: &Run| {
        run.assert_ended_well();
        issues_of(run).into_iter().map(|issue| (issue.headline, issue.evidence)).collect::<Vec<_>>()
    };
    let program = TracedProgram::python("issues/endpoints.py", &[]).option("--no-snapshot");
    let (delayed, stops) = run_with_random_delays(&program, 1);
    assert!(stops > 3, "the run was delayed {stops} times");
    assert_eq!(texts(&delayed), texts(&program.run()));
}

#[test]
fn full_caches_warm_ups_and_evaluations_are_no_leak() {
    for program in ["keys.py", "waves.py", "dataset.py"] {
        assert_eq!(issues(program), [], "{program}");
    }
}

#[test]
fn the_ranges_of_a_reinforcement_learning_loop_have_a_row_each() {
    let run = recorded("steps/rollouts.py");
    let printed = printed(&run);
    let summary = summarize(&open_run(run.path()).unwrap(), &mut |_| {}).unwrap();
    let labels = &summary.processes[0].devices[0].labels;
    let row = |name: &str| -> &LabelSummary { labels.iter().find(|row| row.name == name).expect(name) };
    for name in ["rollout", "train", "sync"] {
        assert_eq!((row(name).times, row(name).peak_bytes), (6, printed[name]), "{name}");
    }
    assert_eq!(summary.processes[0].issues, [], "the batch is freed in each iteration");
    let report = Command::new(memtrace()).arg("report").arg(run.path()).args(["--section", "phases"]).output().unwrap();
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    for name in ["  rollout ", "  train ", "  sync "] {
        let is_row = |line: &str| line.trim_start().starts_with(name.trim_start()) && line.contains("6 times");
        assert!(text.lines().any(is_row), "{name}: {text}");
    }
}

/// The table of functions of the only device: calls, allocated and kept bytes, peak.
fn functions(run: &Run) -> BTreeMap<String, (u64, u64, u64, u64)> {
    let summary = summarize(&open_run(run.path()).unwrap(), &mut |_| {}).unwrap();
    let found = summary.processes[0].devices[0].called_functions.clone().unwrap_or_default();
    let row = |one: CalledFunctionSummary| {
        assert!(one.location.contains(".py:"), "{one:?}");
        (one.name, (one.calls, one.allocated_bytes, one.kept_bytes, one.peak_bytes))
    };
    found.functions.into_iter().map(row).collect()
}

/// The numbers that a program printed, by name.
fn printed(run: &Run) -> BTreeMap<String, u64> {
    let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let row = |line: &str| line.rsplit_once(' ').map(|(name, n)| (name.to_owned(), n.parse().unwrap())).unwrap();
    text.lines().map(row).collect()
}

#[test]
fn endpoints_that_are_plain_functions_have_a_row_each() {
    let run = recorded("steps/endpoints_by_function.py");
    let found = functions(&run);
    let calls: BTreeMap<String, u64> = found.iter().map(|(name, row)| (name.clone(), row.0)).collect();
    assert_eq!(calls, printed(&run));
    // Each of 60 users gets a profile of 64 numbers, which takes 512 bytes.
    assert_eq!((found["recommend"].2, found["search"].2), (60 * 512, 0), "{found:?}");
    let report = Command::new(memtrace()).arg("report").arg(run.path()).args(["--section", "phases"]).output().unwrap();
    let text = String::from_utf8_lossy(&report.stdout).into_owned();
    assert!(text.contains("60 calls, kept 512 B") && text.contains("140 calls"), "{text}");
}

#[test]
fn the_functions_of_a_reinforcement_learning_loop_have_a_row_each() {
    let run = recorded("steps/rollouts_by_function.py");
    let peaks: BTreeMap<String, u64> = functions(&run).into_iter().map(|(name, row)| (name, row.3)).collect();
    assert_eq!(peaks, printed(&run));
    assert!(functions(&run).values().all(|row| row.0 == 6));
}

#[test]
fn the_functions_of_a_training_step_have_no_rows() {
    for program in ["issues/regression.py", "issues/deployed.py"] {
        assert_eq!(functions(&recorded(program)), BTreeMap::new(), "{program}");
    }
}

#[test]
fn what_grows_with_each_request_after_training_is_a_leak() {
    let (headline, location, turns) = leak("online.py");
    // 16 rows of 4096 numbers.
    assert!(headline.starts_with("256 KiB more with each iteration, "), "{headline}");
    assert!(location.ends_with("issues/online.py:27 answer"), "{location}");
    assert!((30_000..32_768).contains(&turns), "8 GiB hold at most 32,768 blocks of 256 KiB: {turns}");
}

#[test]
fn bounded_caches_and_results_of_evaluations_after_training_are_no_leak() {
    for program in ["deployed.py", "graded.py"] {
        assert_eq!(issues(program), [], "{program}");
    }
}
