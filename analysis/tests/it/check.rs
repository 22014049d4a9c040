//! Limits and baselines on hand-made training programs; golden text and JSON.
//!
//! `UPDATE_GOLDEN=1 cargo test -p memtrace-analysis --test it check` rewrites the golden files.

use crate::training::MIB;
use memtrace_analysis::report::{CheckResult, NotRecordedSummary, TextOptions, ToText};
use memtrace_analysis::{CheckOptions, CheckReport, DiffOptions, Summary, Tolerance, check, diff, summarize};
use memtrace_trace::file::End;

/// The peak of [`crate::training::run`] with more than one step. `figures_match_the_program` in lines.rs derives
/// it.
const PEAK: u64 = 41 * MIB;

pub(crate) fn nothing() -> CheckOptions {
    CheckOptions {
        max_peak: None,
        max_reserved: None,
        max_leak: None,
        max_categories: Vec::new(),
        released_after: None,
        no_oom: false,
        no_issues: Vec::new(),
        tolerance: Tolerance::Share(0.01),
        rank: None,
        device: None,
        allow_incomplete: false,
    }
}

fn summary(steps: u32, oom: bool) -> Summary {
    summarize(&crate::training::run(steps, oom), &mut |_| {}).unwrap()
}

fn check_summary(summary: &Summary, options: &CheckOptions) -> CheckReport {
    check(summary, None, None, options)
}

fn failed(report: &CheckReport) -> Vec<&CheckResult> {
    report.results.iter().filter(|result| !result.passed).collect()
}

#[test]
fn limits_are_exact_to_the_byte() {
    let summary = summary(3, false);
    for (limit, ok) in [(PEAK, true), (PEAK - 1, false), (0, false), (u64::MAX, true)] {
        let report = check_summary(&summary, &CheckOptions { max_peak: Some(limit), ..nothing() });
        assert_eq!((report.passed, report.results[0].value_bytes), (ok, Some(PEAK)), "{limit}: {}", report.headline);
    }
    let reserved = summary.processes[0].devices[0].highest.reserved_bytes;
    assert!(check_summary(&summary, &CheckOptions { max_reserved: Some(reserved), ..nothing() }).passed);
    assert!(!check_summary(&summary, &CheckOptions { max_reserved: Some(reserved - 1), ..nothing() }).passed);
}

#[test]
fn a_failed_check_names_the_line() {
    let report = check_summary(&summary(3, false), &CheckOptions { max_peak: Some(20 * MIB), ..nothing() });
    assert!(report.headline.starts_with("FAIL  peak 41.0 MiB > 20.0 MiB (GPU 0, step "), "{}", report.headline);
    let result = &report.results[0];
    assert_eq!((result.file.as_deref(), result.line), (Some("train.py"), Some(22)));
    assert!(report.headline.contains("train.py:22"), "{}", report.headline);
    crate::golden::assert_matches("check.txt", &memtrace_analysis::check_text(&report));
    crate::golden::assert_matches("check.json", &report.to_json());
    crate::golden::assert_matches("check.github.txt", &memtrace_analysis::github_annotations(&report, "/repo"));
    crate::schemas::assert_valid("check", &report.to_json());
}

#[test]
fn an_incomplete_recording_does_not_pass() {
    let fine = CheckOptions { max_peak: Some(PEAK), ..nothing() };
    let whole = summary(3, false);
    assert!(check_summary(&whole, &fine).passed);
    let mut lossy = whole.clone();
    lossy.losses.insert("events_lost".into(), 12);
    let report = check_summary(&lossy, &fine);
    assert_eq!(failed(&report).len(), 1);
    assert!(
        report.headline.contains("12 events lost") && report.results[0].limit == "recording",
        "{}",
        report.headline
    );
    let accepted = check_summary(&lossy, &CheckOptions { allow_incomplete: true, ..fine.clone() });
    assert!(accepted.passed && accepted.notes[0].contains("12 events lost"), "{accepted:?}");
    for loss in ["reentered", "unwritten", "events_dropped", "events_of_unrecorded_processes"] {
        let mut lossy = whole.clone();
        lossy.losses.insert(loss.into(), 12);
        let report = check_summary(&lossy, &fine);
        assert!(!report.passed && report.headline.contains(&format!("12 {}", loss.replace('_', " "))), "{report:?}");
        let text = lossy.to_text(&TextOptions::default());
        assert!(lossy.lost_events() == 12 && text.contains("12 lost"), "{text}");
    }
    // A process that used CUDA and was not recorded, and one that was not seen with CUDA.
    let mut partial = whole.clone();
    let not_recorded = |is_loss| NotRecordedSummary { is_loss, text: "memtrace could not record a (7): b".into() };
    partial.not_recorded.push(not_recorded(true));
    partial.conclude();
    let report = check_summary(&partial, &fine);
    assert!(!report.passed && report.headline.contains("could not record a (7): b"), "{report:?}");
    assert!(partial.to_text(&TextOptions::default()).contains("could not record a (7): b"));
    partial.not_recorded = vec![not_recorded(false)];
    let report = check_summary(&partial, &fine);
    assert!(report.passed && report.notes.iter().any(|note| note.contains("a (7): b")), "{report:?}");
    // A loss that no peak depends on does not make a recording incomplete.
    let mut unnamed = whole.clone();
    unnamed.losses.insert("names_dropped".into(), 12);
    assert!(check_summary(&unnamed, &fine).passed);
    // A recorder that was killed, and a trace that cannot be read.
    let mut cut = crate::training::training(3, false);
    cut.recording.end = None;
    let run = memtrace_analysis::Run::from_processes("run".as_ref(), Default::default(), vec![cut.process()]);
    assert!(check_summary(&summarize(&run, &mut |_| {}).unwrap(), &fine).headline.contains("have no end"));
    let mut broken = whole.clone();
    broken.problems.push("8.mtr: unreadable".into());
    assert!(check_summary(&broken, &fine).headline.contains("8.mtr"));
    // A program that failed, and a recording without memory.
    assert!(
        check_summary(&summary(1, true), &CheckOptions { max_peak: Some(u64::MAX), ..nothing() })
            .headline
            .contains("the program failed")
    );
    let nobody = check_summary(&whole, &CheckOptions { device: Some(3), allow_incomplete: true, ..fine });
    assert!(!nobody.passed && nobody.headline.contains("no memory was recorded"), "{}", nobody.headline);
}

#[test]
fn out_of_memory_errors_fail_the_check() {
    let options = CheckOptions { no_oom: true, allow_incomplete: true, ..nothing() };
    let report = check_summary(&summary(1, true), &options);
    assert!(
        !report.passed && report.headline.contains("1 out-of-memory error: requested 4.00 MiB at step 0, optimizer"),
        "{}",
        report.headline
    );
    assert!(check_summary(&summary(3, false), &options).passed);
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
fn growth_in_each_step_is_a_leak_and_growth_in_one_step_is_not() {
    let options = |bytes| CheckOptions { max_leak: Some(bytes), ..nothing() };
    let value = |summary: &Summary| check_summary(summary, &options(0)).results[0].value_bytes;
    assert_eq!(value(&leaking(12, MIB)), Some(MIB));
    assert_eq!(value(&leaking(12, 0)), Some(0));
    assert!(
        check_summary(&leaking(12, MIB), &options(MIB)).passed
            && !check_summary(&leaking(12, MIB), &options(MIB - 1)).passed
    );
    // One step shows no growth per step, and that fails the check.
    let report = check_summary(&leaking(1, MIB), &options(MIB));
    assert!(!report.passed && report.headline.contains("is unknown"), "{}", report.headline);
    // The leak rule finds the same growth and names the line.
    let found = check_summary(&leaking(12, MIB), &CheckOptions { no_issues: vec!["leak".into()], ..nothing() });
    assert!(!found.passed && found.headline.contains("train.py:25"), "{}", found.headline);
    assert!(check_summary(&leaking(12, 0), &CheckOptions { no_issues: vec!["any".into()], ..nothing() }).passed);
}

#[test]
fn a_baseline_is_a_run_or_its_summary() {
    let (small, large) = (summary(1, false), summary(3, false));
    assert!(small.processes[0].devices[0].highest.allocated_bytes <= PEAK);
    let of_large = Summary::from_json(large.to_json().as_bytes()).unwrap();
    assert_eq!(of_large, large);
    assert!(check(&large, Some(&of_large), None, &nothing()).passed);
    let mut grown = large.clone();
    let highest = &mut grown.processes[0].devices[0].highest.allocated_bytes;
    *highest += *highest / 100;
    assert!(check(&grown, Some(&of_large), None, &nothing()).passed, "1 % is within 1 %");
    grown.processes[0].devices[0].highest.allocated_bytes += 1;
    let report = check(&grown, Some(&of_large), None, &nothing());
    assert!(!report.passed && report.results[0].limit == "baseline-peak", "{}", report.headline);
    // With the baseline's recording, the message names the line that grew.
    let (before, after) = (crate::training::run(0, false), crate::training::run(3, false));
    let beside = diff(&before, &after, &DiffOptions::default(), &mut |_| {});
    let baseline = summarize(&before, &mut |_| {}).unwrap();
    let report = check(&large, Some(&baseline), Some(&beside), &nothing());
    assert!(
        report.headline.contains("; largest change: +16.0 MiB optimizer state at train.py:22"),
        "{}",
        report.headline
    );
    let report = check(&large, Some(&baseline), None, &nothing());
    assert!(report.headline.contains("; largest change: +16.0 MiB optimizer state"), "{}", report.headline);
    // A device that only one of the runs has cannot be checked, and that fails the check.
    let other = large.to_json().replace("\"device\": 0", "\"device\": 1").replace("\"pid\": 7", "\"pid\": 8");
    let other = Summary::from_json(other.as_bytes());
    let mut two = large.clone();
    two.processes.push(large.processes[0].clone());
    let report = check(&two, Some(&other.unwrap()), None, &nothing());
    assert!(
        !report.passed && report.results.iter().any(|r| r.text.contains("the baseline has no GPU 0")),
        "{report:#?}"
    );
    assert!(
        report.results.iter().any(|r| r.text.contains("the baseline has device 1, but this run does not")),
        "{report:#?}"
    );
}

#[test]
fn a_file_that_is_no_baseline_is_refused() {
    let error = |json: &str| Summary::from_json(json.as_bytes()).unwrap_err().to_string();
    assert!(error(r#"{"version": 1}"#).contains("not a summary.json"));
    assert!(error(r#"{"version": "1.0"}"#).contains("version 1.0"));
    assert!(error(r#"{"version": "3.0", "processes": {}}"#).contains("version 3.0"));
}
