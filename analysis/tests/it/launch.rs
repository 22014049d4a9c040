//! Launches of many ranks, made by hand: the table of ranks, what differs, and the issues of several processes.

use std::path::Path;

use memtrace_analysis::load::{Exit, Manifest, Process, Run};
use memtrace_analysis::passes::{Category, Phase};
use memtrace_analysis::report::{LaunchSummary, Summary, TextOptions};
use memtrace_analysis::rules::RuleId;
use memtrace_analysis::{CheckOptions, Section, ToText, check, section_text, summarize};
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::End;

use crate::training::{MIB, Program, stacks, training};

/// One rank of a training: three steps, and `more` bytes that it loads from another line.
fn rank(rank: u32, size: u32, more: u64, stray: u64, status: i32) -> Process {
    let mut program = Program::new();
    // The same stacks as in `training`, with the same ids.
    stacks(&mut program);
    if more > 0 {
        let line = program.stack(&[("train.py", 12, "<module>"), ("train.py", 44, "cache")]);
        program.alloc(more, line);
    }
    let trained = training(3, false);
    let offset = program.recording.events.len() as u64;
    let stray_line = program.stack(&[("train.py", 3, "<module>")]);
    assert_eq!(trained.recording.definitions.contexts.len(), program.recording.definitions.contexts.len());
    let events =
        trained.recording.events.iter().map(|e| Event { seq: e.seq + offset, ticks: (e.seq + offset) * 1000, ..*e });
    program.recording.events.extend(events.map(|e| Event { addr: e.addr + (1 << 45), ..e }));
    // The device of the rank is the one with its number. Bus ids are unique in the launch.
    let device = program.recording.definitions.devices.remove(&0).expect("a device");
    for e in &mut program.recording.events {
        e.device = rank as i16;
    }
    for ordinal in [0, rank] {
        let device = memtrace_trace::file::Device { pci: format!("bus {ordinal}").into(), ..device.clone() };
        program.recording.definitions.devices.insert(ordinal, device);
    }
    if stray > 0 {
        let seq = program.recording.events.len() as u64;
        for (action, at) in [(Action::SegmentAlloc, 1), (Action::Alloc, 2)] {
            let like = program.recording.events[0];
            let e = Event { seq: seq + at, ticks: (seq + at) * 1000, action, addr: 1 << 50, size: stray, ..like };
            program.recording.events.push(Event { device: 0, stack: stray_line, ..e });
        }
    }
    program.recording.definitions.rank = Some((rank, size));
    program.recording.info = format!(
        r#"{{"pid": {}, "ppid": 1, "host": "n0", "env": {{"LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "{size}"}}}}"#,
        100 + rank
    );
    program.recording.end = Some(End { wait_status: Some(status), reason: "exited".into(), ..End::default() });
    Process::new(Path::new(&format!("{}.mtr", 100 + rank)), Box::new(program.recording), &Manifest::default())
}

fn summary_of(processes: Vec<Process>) -> Summary {
    let manifest = Manifest {
        command: vec!["torchrun".into(), "train.py".into()],
        exit: Exit { code: Some(0), signal: None },
        ..Manifest::default()
    };
    summarize(&Run::from_processes(Path::new("run"), manifest, processes), &mut |_| {}).unwrap()
}

fn launch(summary: &Summary) -> &LaunchSummary {
    summary.launch.as_ref().expect("a launch")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn many_ranks_are_folded_and_the_worst_is_compared_with_the_median() {
    // Rank 17 caches 20 MiB more than the others. Rank 63 recorded nothing.
    let ranks = (0..63).map(|at| rank(at, 64, if at == 17 { 20 * MIB } else { 0 }, 0, 0));
    let summary = summary_of(ranks.collect());
    let launch = launch(&summary);
    assert_eq!((launch.table.ranks.len(), launch.table.ranks[0].rank, launch.table.world_size), (63, 17, Some(64)));
    assert_eq!((launch.table.unrecorded_ranks_count, &launch.table.unrecorded_ranks[..]), (1, &[63][..]));
    let imbalance = launch.table.imbalance.unwrap();
    assert_eq!((imbalance.worst_rank, imbalance.max_bytes, imbalance.median_bytes), (17, 61 * MIB, 41 * MIB));
    assert_eq!((imbalance.difference_bytes, imbalance.unused_bytes), (20 * MIB, 62 * 20 * MIB));
    let row = &launch.table.ranks[0];
    // Parameters, batch, gradients and both moments, and the temporary of the step.
    assert_eq!((row.device, row.peak_bytes, row.peak_phase), (Some(17), 61 * MIB, Some(Phase::Optimizer)));
    // Both parameters, the cache, and the first batch.
    assert_eq!(row.phase_peak(Phase::Load), Some(29 * MIB));
    let comparison = launch.table.worst_against_median.as_ref().unwrap();
    assert_eq!((comparison.worst.rank, comparison.difference_bytes), (Some(17), 20 * MIB as i64));
    assert_eq!(comparison.by_category.iter().map(|row| row.change.difference_bytes).sum::<i64>(), 20 * MIB as i64);
    assert_eq!(comparison.by_line.len(), 1, "{:?}", comparison.by_line);
    assert_eq!(comparison.by_line[0].location, "train.py:44 cache");
    assert_ne!(comparison.by_line[0].category, Some(Category::Gradient));
    let text = summary.to_text(&TextOptions::default());
    let verdict = "Worst of 63 ranks: rank 17, peak 61.0 MiB, 20.0 MiB (49 %) more than the median";
    for expected in [
        verdict,
        "No recording: rank 63 has none, or used no GPU memory.",
        "others: 41.0 MiB, within 0 % of the median",
        "1.21 GiB stay unused on the other ranks, because the batch has to fit rank 17",
        "train.py:44 cache",
    ] {
        assert!(words(&text).contains(expected), "{expected}\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= TextOptions::default().width), "{text}");
    let whole = section_text(&summary, Section::named("ranks").unwrap(), &TextOptions::default());
    let rows =
        whole.lines().filter(|line| line.split_whitespace().next().is_some_and(|one| one.parse::<u32>().is_ok()));
    assert_eq!(rows.count(), 63, "{whole}");
    let schema = serde_json::from_str(&Summary::json_schema()).unwrap();
    crate::json_schema::assert_valid(&schema, &serde_json::from_str(&summary.to_json()).unwrap());
}

#[test]
fn even_ranks_are_not_compared() {
    let summary = summary_of((0..4).map(|at| rank(at, 4, 0, 0, 0)).collect());
    let launch = launch(&summary);
    assert_eq!(
        (launch.table.worst_against_median.as_ref(), launch.issues.len(), launch.table.unrecorded_ranks_count),
        (None, 0, 0)
    );
    assert_eq!(launch.table.imbalance.map(|imbalance| imbalance.difference_bytes), Some(0));
    let text = summary.to_text(&TextOptions::default());
    assert!(
        words(&text).contains("4 ranks, within 0 % of each other: the highest peak is 41.0 MiB on rank 0."),
        "{text}"
    );
}

#[test]
fn ranks_on_the_gpu_of_rank_0_are_an_issue_of_the_launch() {
    let summary = summary_of((0..8).map(|at| rank(at, 8, 0, if at > 0 { 2 * MIB } else { 0 }, 0)).collect());
    let [issue] = &launch(&summary).issues[..] else { panic!("{:?}", launch(&summary).issues) };
    assert_eq!((issue.issue.rule, issue.issue.bytes, issue.processes.len()), (RuleId::StrayContext, 14 * MIB, 7));
    assert_eq!(issue.processes[0].location, "train.py:3");
    assert!(issue.issue.headline.contains("7 processes hold 14.0 MiB"), "{}", issue.issue.headline);
    let limits = |rule: &str| CheckOptions { no_issues: vec![rule.into()], ..crate::check::nothing() };
    assert!(!check(&summary, None, None, &limits("stray-context")).passed);
    assert!(check(&summary, None, None, &limits("worker-context")).passed);
}

#[test]
fn ranks_that_ended_differently_are_named() {
    let summary = summary_of((0..6).map(|at| rank(at, 6, 0, 0, if at == 2 { 9 } else { 15 })).collect());
    let text = summary.to_text(&TextOptions::default());
    let expected = "The ranks ended differently: rank 2 killed by SIGKILL; ranks 0, 1, 3-5 killed by SIGTERM.";
    assert!(words(&text).contains(expected), "{text}");
}

#[test]
fn one_process_without_a_job_is_no_launch() {
    let summary = summarize(&crate::training::run(3, false), &mut |_| {}).unwrap();
    assert_eq!(summary.launch, None);
}
