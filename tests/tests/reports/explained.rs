//! The explanation of the peak and of out-of-memory errors.
//!
//! The report of a run is compared with the simulated device's memory, and with the same program after the suggested
//! change.

use std::process::Command;

use memtrace_tests::traced_program::{Run, TracedProgram, memtrace, root};
use serde_json::Value;

const CONF: &str = "PYTORCH_CUDA_ALLOC_CONF";

fn summary(run: &Run) -> Value {
    let path = run.path().join("summary.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{e}: {:?}", run.output));
    serde_json::from_str(&text).expect("JSON")
}

fn device(run: &Run) -> Value {
    summary(run)["processes"][0]["devices"][0].take()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// One section of the text report.
fn section(run: &Run, name: &str) -> String {
    let output = Command::new(memtrace()).arg("report").arg(run.path()).args(["--section", name]).output();
    let output = output.expect("memtrace report");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    println!("{text}");
    text
}

fn printed(run: &Run) -> u64 {
    run.assert_ended_well();
    String::from_utf8_lossy(&run.output.stdout).trim().parse().expect("bytes")
}

fn peak_after(device: &Value, rule: &str) -> u64 {
    let actions = device["suggestions"].as_array().expect("actions");
    let action = actions.iter().find(|a| a["rule"] == rule).unwrap_or_else(|| panic!("no {rule} in {actions:?}"));
    bytes(&action["peak_after_bytes"])
}

#[track_caller]
fn measure_peak(what: &str, rule: &str) {
    let before = TracedProgram::python("torch/actions.py", &[what]).run();
    let after = TracedProgram::python("torch/actions.py", &[what, "after"]).run();
    let predicted = peak_after(&device(&before), rule);
    let measured = printed(&after);
    println!("{rule}: {} before, {predicted} predicted, {measured} measured", printed(&before));
    assert!(measured < printed(&before) / 100 * 95, "{rule} does not help");
    assert!(predicted.abs_diff(measured) <= measured / 50, "{rule}: {predicted} bytes predicted, {measured} measured");
    // A change that the program already has is not suggested.
    if what == "step" {
        let actions = device(&after)["suggestions"].to_string();
        assert!(!actions.contains(rule), "{actions}");
    }
}

/// The estimate of a step that an error interrupted, and the peak of the same program with enough memory.
fn estimated_and_measured(what: &str, memory: &str) -> (Value, u64) {
    let traced = TracedProgram::python("torch/oom_steps.py", &[what]);
    let measured = printed(&traced.run());
    let run = traced.env("SIMCUDA_MEMORY", memory).run();
    assert_eq!(run.output.status.code(), Some(1), "{what}: {:?}", run.output);
    let estimate = device(&run)["ooms"][0]["step_estimate"].take();
    println!("{what}: measured {measured}, {estimate}");
    let page = String::from_utf8_lossy(&run.output.stderr);
    assert!(page.contains("Still to come"), "{page}");
    (estimate, measured)
}

#[track_caller]
fn is_near(estimated: u64, measured: u64) {
    assert!(estimated.abs_diff(measured) * 50 <= measured, "{estimated} bytes estimated, {measured} measured");
}

/// A step that an error interrupts is estimated from an earlier step. In [`exhaustive`]: from an earlier iteration,
/// from equal modules, and from the optimizer's state.
#[test]
fn an_interrupted_step_is_estimated() {
    let (estimate, measured) = estimated_and_measured("second", "800M");
    assert_eq!(estimate["basis"], "earlier_step", "{estimate}");
    assert_eq!(estimate["earlier_step"], 0, "{estimate}");
    is_near(bytes(&estimate["needed_bytes"]), measured);
}

/// The report's statements about allocator settings and the rest of the step come true in the program: with the setting
/// it fits, or it lacks about the bytes that the report says.
#[test]
fn settings_are_replayed_to_the_end_of_the_step() {
    settings_are_replayed(&[840]);
}

/// Each of `memory` is the size of a GPU in MiB.
#[track_caller]
fn settings_are_replayed(memory: &[u64]) {
    let traced = TracedProgram::python("torch/oom_steps.py", &["second"]);
    let mut seen = [false; 2];
    for &memory in memory {
        let run = traced.clone().env("SIMCUDA_MEMORY", format!("{memory}M")).run();
        if run.output.status.success() {
            continue;
        }
        let device = device(&run);
        let setting = &device["what_if"]["settings"][0];
        assert_eq!(setting["setting"], "expandable_segments:True");
        let again = |memory: u64| {
            let other = traced.clone().env(CONF, "expandable_segments:True");
            other.env("SIMCUDA_MEMORY", format!("{memory}M")).run().output.status.success()
        };
        let page = String::from_utf8_lossy(&run.output.stderr);
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        println!("{memory}: {setting}");
        match setting["step_fits"].as_bool() {
            Some(true) => {
                assert!(again(memory), "{memory}: {setting}");
                assert!(page.contains("the request and the rest of the step fit"), "{page}");
                seen[0] = true;
            }
            Some(false) => {
                let short = bytes(&setting["step_short_bytes"]).div_ceil(1 << 20);
                assert!(!again(memory), "{memory}: {setting}");
                assert!(again(memory + short + 20), "{memory}: {setting}");
                let others = device["what_if"]["settings"].to_string();
                let is_reported = page.contains("is not enough: the request fits, the rest of the step does not");
                assert!(is_reported || others.contains("\"step_fits\":true"), "{page}");
                seen[1] = true;
            }
            None => {}
        }
    }
    assert!(seen.contains(&true), "the memory sizes show no case");
}

/// Little is allocated and much is reserved. The report shows this, the lines that hold segments, and the setting that
/// helps. A run with that setting confirms it.
#[test]
fn fragmentation_is_diagnosed_and_its_fix_works() {
    let traced = TracedProgram::python("torch/fragmentation.py", &[]).env("SIMCUDA_MEMORY", "1200M");
    let run = traced.run();
    assert_eq!(run.output.status.code(), Some(1));
    let device = device(&run);
    let (oom, reserved) = (&device["ooms"][0], &device["reserved"]);
    let parts = ["allocated_bytes", "pending_free_bytes", "releasable_bytes", "blocked_bytes"];
    let sum: u64 = parts.iter().map(|part| bytes(&reserved[part])).sum();
    assert_eq!(sum, bytes(&oom["in_use"]["totals"]["reserved_bytes"]), "{reserved}");
    assert!(bytes(&reserved["blocked_bytes"]) > 300 << 20, "{reserved}");
    assert_eq!(reserved["blocked_by"][0]["segments"], reserved["blocked_segments"], "all by one line: {reserved}");
    // The reported free memory equals the value in the allocator's own message.
    let stderr = String::from_utf8_lossy(&run.output.stderr);
    let free = format!("of which {:.2} MiB is free", bytes(&oom["device_free_bytes"]) as f64 / f64::from(1 << 20));
    assert!(stderr.contains(&free), "{free}: {stderr}");
    let settings = device["what_if"]["settings"].as_array().expect("settings");
    let fits = settings.iter().find(|s| s["fits"] == true).expect("a setting that helps");
    assert_eq!(fits["setting"], "expandable_segments:True");
    traced.clone().env(CONF, "expandable_segments:True").run().assert_ended_well();
    let page = String::from_utf8_lossy(&run.output.stderr);
    assert!(page.contains("expandable_segments:True: the request fits"), "{page}");
    let pages = section(&run, "fragmentation");
    assert!(pages.contains("fragmentation.py:16 bytes_of") && pages.contains("fits"), "{pages}");
}

#[track_caller]
fn checkpointing_saves(batches: &[&str], action: &str, words: &str) {
    let of = |saving| {
        TracedProgram::python("torch/deep.py", &[&[saving], batches].concat()).env("SIMCUDA_MEMORY", "300M").run()
    };
    let (plain, saving_run) = (of("plain"), of("checkpoint"));
    assert_eq!(plain.output.status.code(), Some(1));
    saving_run.assert_ended_well();
    // The program prints "at BATCH LAYER CALL ALLOCATED".
    let printed_calls = |run: &Run| -> Vec<(String, u64)> {
        let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
        let lines = text.lines().filter_map(|line| line.strip_prefix("at ")?.rsplit_once(' '));
        lines.map(|(at, bytes)| (at.to_owned(), bytes.parse().unwrap())).collect()
    };
    let (at, before) = printed_calls(&plain).pop().unwrap();
    let device = device(&plain);
    let oom = &device["ooms"][0];
    assert_eq!(bytes(&oom["in_use"]["totals"]["allocated_bytes"]), before, "{at}: {oom}");
    // The first time that the call is reached; backward repeats it later.
    let (_, after) = printed_calls(&saving_run).into_iter().find(|(call, _)| *call == at).unwrap();
    let predicted = peak_after(&device, action);
    println!("{at}: {before} bytes, with checkpointing {after}; predicted {predicted}");
    assert!(before > after + (64 << 20), "{at}: {before} and {after}");
    // The allocations of one call of a layer: its norm, up, gelu, down and sum. Without a backward pass the recording
    // does not show which of them the call frees when.
    let layer = 4096 * (256 + 1024 + 1024 + 256 + 256) * 4;
    assert!(
        predicted >= after && predicted <= after + layer + (1 << 20),
        "{predicted} bytes predicted, {after} measured"
    );
    // The report wraps the texts of the suggestions, beside their figures.
    let texts = device["suggestions"].to_string();
    assert!(texts.contains(words), "{texts}");
    assert!(String::from_utf8_lossy(&plain.output.stderr).contains("activation checkpointing"));
    // A change that the program already has is not suggested.
    let actions = self::device(&saving_run)["suggestions"].to_string();
    assert!(!actions.contains("checkpoint-"), "{actions}");
}

/// A request that failed in the first step is named as the optimizer state of its parameter, from the program's own
/// frames.
#[test]
fn a_failed_request_of_the_optimizer_is_named() {
    let mut names = Vec::new();
    for memory in ["384M", "400M"] {
        let run = TracedProgram::python("torch/oom_train.py", &["print"]).env("SIMCUDA_MEMORY", memory).run();
        run.assert_ended_well();
        let stdout = String::from_utf8_lossy(&run.output.stdout).into_owned();
        let name = stdout.lines().find_map(|line| line.strip_prefix("requested for ")).unwrap().to_owned();
        let device = device(&run);
        assert_eq!(device["ooms"][0]["requested_for"], *name, "{memory}: {}", device["ooms"][0]);
        let page = String::from_utf8_lossy(&run.output.stderr);
        // The report wraps lines, so they are joined.
        let flat: Vec<&str> = page.split_whitespace().collect();
        assert!(flat.join(" ").contains(&format!("Tried to allocate 16.0 MiB for {name};")), "{page}");
        // Names that share a pattern are summarized under the pattern.
        assert!(page.contains("  Adam.exp_avg of *.weight") && page.contains("oom_train.py:"), "{page}");
        names.push(name);
    }
    names.dedup();
    assert!(names.len() == 2 && names.iter().any(|n| n.contains(".exp_avg of ")), "{names:?}");
}

/// The report separates other processes' memory from this process's.
#[test]
fn memory_of_other_processes_is_reported_separately() {
    let run = TracedProgram::python("torch/oom_train.py", &[])
        .env("SIMCUDA_MEMORY", "800M")
        .env("SIMCUDA_CONTEXT", "500M")
        .run();
    assert_eq!(run.output.status.code(), Some(1), "{}", String::from_utf8_lossy(&run.output.stderr));
    let device = device(&run);
    let oom = &device["ooms"][0];
    assert_eq!(bytes(&oom["contexts_and_other_processes_bytes"]), 500 << 20, "{oom}");
    assert_eq!(bytes(&device["in_use_before_bytes"]), 500 << 20);
    let whole = bytes(&device["total_bytes"]);
    let outside: u64 = ["contexts_and_other_processes_bytes", "outside_pytorch_bytes", "device_free_bytes"]
        .iter()
        .map(|w| bytes(&oom[w]))
        .sum();
    assert_eq!(outside + bytes(&oom["in_use"]["totals"]["reserved_bytes"]), whole, "all of the device: {oom}");
    assert!(section(&run, "oom").contains("CUDA contexts and other processes 500 MiB"));
}

/// A limit that the program set itself is not a lack of device memory.
#[test]
fn options_that_an_optimizer_refuses_are_not_suggested() {
    let suggested = |optimizer: &str| {
        let run = TracedProgram::python("torch/optimizers.py", &[optimizer]).run();
        run.assert_ended_well();
        device(&run)["suggestions"].to_string()
    };
    for (optimizer, rule) in
        [("amsgrad", "eight-bit-moments"), ("centered", "eight-bit-moments"), ("lbfgs", "single-tensor-step")]
    {
        assert!(!suggested(optimizer).contains(rule), "{optimizer}");
    }
    for (optimizer, rule) in [("adam", "eight-bit-moments"), ("adagrad", "single-tensor-step")] {
        let suggested = suggested(optimizer);
        assert!(suggested.contains(rule), "{optimizer}: {suggested}");
    }
}

#[test]
fn a_memory_fraction_limit_is_named() {
    let run = TracedProgram::python("allocators/policies.py", &["0.1"])
        .env("PYTHONPATH", root().join("tests/programs/torch"))
        .run();
    run.assert_ended_well();
    let device = device(&run);
    assert_eq!(device["ooms"][0]["refused_by_pytorch"], true);
    assert_eq!(device["ooms"][0]["short_bytes"], Value::Null);
    assert!(section(&run, "oom").contains("set_per_process_memory_fraction"));
}

#[test]
fn a_section_that_does_not_exist_is_refused_with_the_list_of_sections() {
    let output = Command::new(memtrace()).args(["report", ".", "--section", "nonsense"]).output().expect("memtrace");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("fragmentation") && text.contains("peak"), "{text}");
}

mod exhaustive {
    use super::*;

    #[test]
    fn the_predicted_peak_of_a_fused_step_is_measured() {
        measure_peak("step", "fused-step");
    }

    /// Activation checkpointing of equal layers is suggested where a forward ran out of memory. Up to that call, the
    /// same program with checkpointing needs at most the predicted bytes, and at most one layer less. In the first
    /// forward only the optimizer shows that the program trains: the report does not suggest `torch.no_grad()`.
    #[test]
    fn checkpointing_is_suggested_in_the_first_forward() {
        checkpointing_saves(&["large"], "checkpoint-or-no-grad", "of Layer)\"");
    }

    /// As [`checkpointing_is_suggested_in_the_first_forward`], in a later step.
    #[test]
    fn checkpointing_saves_the_predicted_bytes() {
        checkpointing_saves(&[], "checkpoint-layers", "of Layer)");
    }

    /// The peak that a suggestion predicts is the one that the program has with the change, to 2 %.
    #[test]
    fn the_predicted_peak_of_smaller_batches_is_measured() {
        measure_peak("batch", "smaller-batches");
    }

    #[test]
    fn settings_are_replayed_for_gpus_of_several_sizes() {
        settings_are_replayed(&[820, 840, 860, 880, 900]);
    }

    #[test]
    fn an_interrupted_evaluation_is_estimated() {
        let (estimate, measured) = estimated_and_measured("evaluate", "700M");
        assert_eq!(estimate["basis"], "earlier_iteration", "{estimate}");
        is_near(bytes(&estimate["needed_bytes"]), measured);
    }

    #[test]
    fn a_step_interrupted_in_the_optimizer_is_estimated() {
        let (estimate, measured) = estimated_and_measured("optimizer", "420M");
        assert_eq!(estimate["basis"], "optimizer_state", "{estimate}");
        is_near(bytes(&estimate["needed_with_foreach_bytes"]), measured);
        assert!(bytes(&estimate["needed_bytes"]) <= measured, "{estimate}");
    }

    #[test]
    fn a_step_interrupted_in_the_forward_pass_is_estimated() {
        let (estimate, measured) = estimated_and_measured("forward", "200M");
        assert_eq!(estimate["basis"], "sibling_modules", "{estimate}");
        assert_eq!(estimate["at_least"], true, "{estimate}");
        // A lower bound: the backward pass and the optimizer's state are not in it.
        let needed = bytes(&estimate["needed_bytes"]);
        assert!(needed <= measured && needed >= measured / 100 * 60, "{needed} estimated, {measured} measured");
        assert!(estimate["still_to_come"].to_string().contains("head (Linear)"), "{estimate}");
    }

    /// The report is the same whether the error ended the program or was caught.
    #[test]
    fn a_caught_error_is_reported_like_a_fatal_one() {
        let of = |arguments: &[&str]| {
            TracedProgram::python("torch/oom_train.py", arguments).env("SIMCUDA_MEMORY", "400M").run()
        };
        let (fatal, caught) = (of(&[]), of(&["catch"]));
        assert_eq!(fatal.output.status.code(), Some(1));
        caught.assert_ended_well();
        let (of_fatal, of_caught) = (device(&fatal), device(&caught));
        assert_eq!(of_fatal["ooms"][0]["fatal"], true);
        assert_eq!(of_caught["ooms"][0]["fatal"], false);
        for what in [
            "requested_bytes",
            "device_free_bytes",
            "short_bytes",
            "reserved_but_unallocated_bytes",
            "optimizer_state_needed_bytes",
        ] {
            assert_eq!(of_fatal["ooms"][0][what], of_caught["ooms"][0][what], "{what}");
        }
        assert_eq!(of_fatal["ooms"][0]["in_use"]["by_category"], of_caught["ooms"][0]["in_use"]["by_category"]);
        let state = bytes(&of_fatal["ooms"][0]["optimizer_state_needed_bytes"]);
        let parameters: u64 = (6 * 2048 * 2048 + 2048 * 1500) * 4;
        assert_eq!(state, 2 * parameters, "two moments of each parameter");
        let report_of = |run: &Run| {
            let page = section(run, "oom");
            let (_, rest) = page.split_once("  Free on the device ").unwrap_or_else(|| panic!("{page}"));
            rest.to_owned()
        };
        assert_eq!(report_of(&fatal), report_of(&caught), "the report");
    }
}
