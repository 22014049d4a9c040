//! Limits and baselines on hand-made training programs; golden text and JSON, the schema.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it check` rewrites the golden files and the schema.

use crate::training::MIB;
use memtrace_analysis::report::CheckResult;
use memtrace_analysis::{Baseline, CheckReport, CheckWanted, DiffWanted, Summary, Tolerance, check, diff, summarize};
use memtrace_trace::file::End;

/// The peak of [`crate::training::run`] with more than one step. `figures_are_those_of_the_program` in lines.rs derives
/// it.
const PEAK: u64 = 41 * MIB;

fn nothing() -> CheckWanted {
    CheckWanted {
        max_peak: None,
        max_reserved: None,
        max_leak: None,
        no_oom: false,
        no_findings: Vec::new(),
        tolerance: Tolerance::Share(0.01),
        rank: None,
        device: None,
        allow_incomplete: false,
    }
}

fn summary(steps: u32, oom: bool) -> Summary {
    summarize(&crate::training::run(steps, oom), &mut |_| {}).unwrap()
}

fn hold(summary: &Summary, wanted: &CheckWanted) -> CheckReport {
    check(summary, None, None, wanted)
}

fn failed(report: &CheckReport) -> Vec<&CheckResult> {
    report.results.iter().filter(|result| !result.ok).collect()
}

#[test]
fn a_limit_is_kept_to_the_byte() {
    let summary = summary(3, false);
    for (limit, ok) in [(PEAK, true), (PEAK - 1, false), (0, false), (u64::MAX, true)] {
        let report = hold(&summary, &CheckWanted { max_peak: Some(limit), ..nothing() });
        assert_eq!((report.ok, report.results[0].value_bytes), (ok, Some(PEAK)), "{limit}: {}", report.verdict);
    }
    let reserved = summary.processes[0].devices[0].highest.reserved_bytes;
    assert!(hold(&summary, &CheckWanted { max_reserved: Some(reserved), ..nothing() }).ok);
    assert!(!hold(&summary, &CheckWanted { max_reserved: Some(reserved - 1), ..nothing() }).ok);
}

#[test]
fn the_verdict_names_the_line() {
    let report = hold(&summary(3, false), &CheckWanted { max_peak: Some(20 * MIB), ..nothing() });
    assert!(report.verdict.starts_with("FAIL  peak 41.0 MiB > 20.0 MiB (GPU 0, step "), "{}", report.verdict);
    let result = &report.results[0];
    assert_eq!((result.file.as_deref(), result.line), (Some("train.py"), Some(22)));
    assert!(report.verdict.contains("train.py:22"), "{}", report.verdict);
    crate::golden::is("check.txt", &report.to_text());
    crate::golden::is("check.json", &report.to_json());
    crate::golden::is("check.github.txt", &report.to_github("/repo"));
    let schema = CheckReport::json_schema();
    crate::golden::is("../../schema/check.schema.json", &schema);
    crate::json_schema::assert_valid(
        &serde_json::from_str(&schema).unwrap(),
        &serde_json::from_str(&report.to_json()).unwrap(),
    );
}

#[test]
fn what_the_recording_lacks_does_not_pass() {
    let fine = CheckWanted { max_peak: Some(PEAK), ..nothing() };
    let whole = summary(3, false);
    assert!(hold(&whole, &fine).ok);
    let mut lossy = whole.clone();
    lossy.losses.insert("events_lost".into(), 12);
    let report = hold(&lossy, &fine);
    assert_eq!(failed(&report).len(), 1);
    assert!(report.verdict.contains("12 events lost") && report.results[0].limit == "recording", "{}", report.verdict);
    let accepted = hold(&lossy, &CheckWanted { allow_incomplete: true, ..fine.clone() });
    assert!(accepted.ok && accepted.notes[0].contains("12 events lost"), "{accepted:?}");
    // A loss that no peak depends on does not make a recording incomplete.
    let mut unnamed = whole.clone();
    unnamed.losses.insert("names_cut".into(), 12);
    assert!(hold(&unnamed, &fine).ok);
    // A recorder that was killed, and a trace that cannot be read.
    let mut cut = crate::training::training(3, false);
    cut.recording.end = None;
    let run = memtrace_analysis::Run::from_processes("run".as_ref(), Default::default(), vec![cut.process()]);
    assert!(hold(&summarize(&run, &mut |_| {}).unwrap(), &fine).verdict.contains("have no end"));
    let mut broken = whole.clone();
    broken.problems.push("8.mtr: unreadable".into());
    assert!(hold(&broken, &fine).verdict.contains("8.mtr"));
    // A program that failed, and a recording without memory.
    assert!(
        hold(&summary(1, true), &CheckWanted { max_peak: Some(u64::MAX), ..nothing() })
            .verdict
            .contains("did not end well")
    );
    let nobody = hold(&whole, &CheckWanted { device: Some(3), allow_incomplete: true, ..fine });
    assert!(!nobody.ok && nobody.verdict.contains("no memory was recorded"), "{}", nobody.verdict);
}

#[test]
fn errors_of_memory_fail() {
    let wanted = CheckWanted { no_oom: true, allow_incomplete: true, ..nothing() };
    let report = hold(&summary(1, true), &wanted);
    assert!(
        !report.ok && report.verdict.contains("1 out-of-memory error: wanted 4.00 MiB at step 0, optimizer"),
        "{}",
        report.verdict
    );
    assert!(hold(&summary(3, false), &wanted).ok);
}

/// A program with `steps` steps. Each step keeps `bytes` bytes, and the second keeps 8 MiB more.
fn leaking(steps: u32, bytes: u64) -> Summary {
    let mut p = crate::training::Program::new();
    let s = crate::training::stacks(&mut p);
    let store = p.stack(&[("train.py", 25, "<module>")]);
    p.alloc(4 * MIB, s.load);
    for step in 0..steps {
        p.with_grad(true);
        let kept = p.alloc(2 * MIB, s.forward);
        if step == 1 {
            p.alloc(8 * MIB, s.forward);
        }
        p.on_thread(2).free_in(kept, memtrace_trace::ids::StackId::NONE, s.node);
        p.on_thread(1).with_grad(false);
        if step == 0 {
            p.alloc(4 * MIB, s.state);
        }
        let temporary = p.alloc(8 * MIB, s.step);
        p.free(temporary, s.step);
        p.with_grad(true);
        if bytes > 0 {
            p.alloc(bytes, store);
        }
    }
    p.recording.end = Some(End { wait_status: Some(0), reason: "exited".into(), ..End::default() });
    let run = memtrace_analysis::Run::from_processes("run".as_ref(), Default::default(), vec![p.process()]);
    summarize(&run, &mut |_| {}).unwrap()
}

#[test]
fn what_each_step_keeps_is_told_from_what_one_brings() {
    let wanted = |bytes| CheckWanted { max_leak: Some(bytes), ..nothing() };
    let value = |summary: &Summary| hold(summary, &wanted(0)).results[0].value_bytes;
    assert_eq!(value(&leaking(12, MIB)), Some(MIB));
    assert_eq!(value(&leaking(12, 0)), Some(0));
    assert!(hold(&leaking(12, MIB), &wanted(MIB)).ok && !hold(&leaking(12, MIB), &wanted(MIB - 1)).ok);
    // One step shows no growth per step, and that fails the check.
    let report = hold(&leaking(1, MIB), &wanted(MIB));
    assert!(!report.ok && report.verdict.contains("is not known"), "{}", report.verdict);
    // The leak rule finds the same growth and names the line.
    let found = hold(&leaking(12, MIB), &CheckWanted { no_findings: vec!["leak".into()], ..nothing() });
    assert!(!found.ok && found.verdict.contains("train.py:25"), "{}", found.verdict);
    assert!(hold(&leaking(12, 0), &CheckWanted { no_findings: vec!["any".into()], ..nothing() }).ok);
}

#[test]
fn a_baseline_is_a_run_or_its_summary() {
    let (small, large) = (summary(1, false), summary(3, false));
    assert!(small.processes[0].devices[0].highest.allocated_bytes <= PEAK);
    let of_large = Baseline::from_json(&large.to_json()).unwrap();
    assert_eq!(of_large, Baseline::of(&large).unwrap());
    assert!(check(&large, Some(&of_large), None, &nothing()).ok);
    let mut grown = large.clone();
    let highest = &mut grown.processes[0].devices[0].highest.allocated_bytes;
    *highest += *highest / 100;
    assert!(check(&grown, Some(&of_large), None, &nothing()).ok, "1 % is within 1 %");
    grown.processes[0].devices[0].highest.allocated_bytes += 1;
    let report = check(&grown, Some(&of_large), None, &nothing());
    assert!(!report.ok && report.results[0].limit == "baseline-peak", "{}", report.verdict);
    // With the baseline's recording, the message names the line that grew.
    let (before, after) = (crate::training::run(0, false), crate::training::run(3, false));
    let beside = diff(&before, &after, &DiffWanted::default(), &mut |_| {});
    let baseline = Baseline::of(&summarize(&before, &mut |_| {}).unwrap()).unwrap();
    let report = check(&large, Some(&baseline), Some(&beside), &nothing());
    assert!(report.verdict.contains("; the most: +16.0 MiB optimizer state at train.py:22"), "{}", report.verdict);
    let report = check(&large, Some(&baseline), None, &nothing());
    assert!(report.verdict.contains("; the most: +16.0 MiB optimizer state"), "{}", report.verdict);
    // A device that only one of the runs has cannot be checked, and that fails the check.
    let other = Baseline::from_json(
        &large.to_json().replace("\"device\": 0", "\"device\": 1").replace("\"pid\": 7", "\"pid\": 8"),
    );
    let mut two = large.clone();
    two.processes.push(large.processes[0].clone());
    let report = check(&two, Some(&other.unwrap()), None, &nothing());
    assert!(!report.ok && report.results.iter().any(|r| r.text.contains("the baseline has no GPU 0")), "{report:#?}");
    assert!(
        report.results.iter().any(|r| r.text.contains("the baseline has device 1, this run has not")),
        "{report:#?}"
    );
}

#[test]
fn what_is_no_baseline_is_refused() {
    assert!(Baseline::from_json("{\"version\": \"1.0\"}").unwrap_err().contains("no summary.json"));
    assert!(Baseline::from_json(r#"{"version": "2.0", "processes": []}"#).unwrap_err().contains("version 2.0"));
}
