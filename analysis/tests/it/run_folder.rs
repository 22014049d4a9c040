//! Run folders: the files written, and the messages when something is wrong.

use std::path::Path;

use memtrace_analysis::{FinishOptions, RunFolder, finish_run, open_run};
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{End, Writer};

fn write_trace(path: &Path, info: &str) {
    let mut writer = Writer::new(Vec::new(), info).unwrap();
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 1_700_000_000_000_000_000 }).unwrap();
    let base = Event { device: 0, addr: 1 << 30, ..Event::EMPTY };
    writer.event(&Event { seq: 1, ticks: 1, action: Action::SegmentAlloc, size: 2 << 20, ..base }).unwrap();
    writer.event(&Event { seq: 2, ticks: 2, action: Action::Alloc, size: 1024, ..base }).unwrap();
    let bytes = writer.finish(&End { wait_status: Some(0), reason: "exited".into(), ..End::default() }).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_file_is_written() {
    let folder = tempfile::tempdir().unwrap();
    write_trace(&folder.path().join("11.mtr"), r#"{"pid":11,"env":{"RANK":"0"}}"#);
    write_trace(&folder.path().join("12.mtr"), r#"{"pid":12}"#);
    let written = finish_run(&RunFolder::open(folder.path()).unwrap(), &FinishOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(
        names(folder.path()),
        ["11.mtr", "12.mtr", "12.pickle", "rank0.pickle", "report.html", "summary.json", "summary.txt"]
    );
    assert!(written.problems.is_empty());
    let rank0 = written.summary.processes.iter().find(|p| p.rank == Some(0)).unwrap();
    assert_eq!(rank0.snapshot.as_deref(), Some("rank0.pickle"));
    let options = FinishOptions { no_snapshot: true, ..FinishOptions::default() };
    assert_eq!(finish_run(&RunFolder::open(folder.path()).unwrap(), &options, &mut |_| {}).unwrap().files.len(), 3);
}

#[test]
fn a_damaged_trace_does_not_hide_the_others() {
    let folder = tempfile::tempdir().unwrap();
    write_trace(&folder.path().join("11.mtr"), r#"{"pid":11}"#);
    std::fs::write(folder.path().join("12.mtr"), b"not a trace").unwrap();
    std::fs::write(folder.path().join("run.json"), b"{ cut").unwrap();
    let written = finish_run(&RunFolder::open(folder.path()).unwrap(), &FinishOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(written.problems.len(), 2);
    assert_eq!(written.summary.processes.len(), 1);
    assert!(written.summary.problems.iter().any(|p| p.contains("12.mtr")), "{:?}", written.summary.problems);
}

#[test]
fn a_trace_cut_at_any_byte_is_summarized() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("11.mtr");
    write_trace(&path, r#"{"pid":11}"#);
    let whole = std::fs::read(&path).unwrap();
    for len in (16..whole.len()).step_by(7) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let written =
            finish_run(&RunFolder::open(folder.path()).unwrap(), &FinishOptions::default(), &mut |_| {}).unwrap();
        assert!(written.problems.is_empty(), "cut at {len}: {:?}", written.problems);
    }
}

#[test]
fn errors_name_the_path_and_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let error = open_run(folder.path()).unwrap_err();
    assert!(error.help().is_some());
    let empty = error.to_string();
    assert!(empty.contains("contains no trace") && empty.contains(&folder.path().display().to_string()), "{empty}");
    let error = open_run(folder.path().join("x")).unwrap_err();
    assert!(error.help().is_some());
    let missing = error.to_string();
    assert!(missing.contains("No such file or directory"), "{missing}");
    std::fs::write(folder.path().join("x.mtr"), b"hello").unwrap();
    let error = open_run(folder.path().join("x.mtr")).unwrap_err();
    assert!(error.help().is_some());
    let strange = error.to_string();
    assert!(strange.contains("x.mtr") && strange.contains("not a memtrace trace"), "{strange}");
}
