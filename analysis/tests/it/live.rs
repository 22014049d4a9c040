//! The figures of a recording that goes on: whenever a trace was opened, its figures are those of the whole trace.

use std::time::Duration;

use memtrace_analysis::report::{AnalysisPauses, LiveProcess};
use memtrace_analysis::{open_run, summarize};

use crate::small_trace::trace;

#[test]
fn a_trace_that_grows_has_the_figures_of_the_whole_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    let whole = trace(3);
    std::fs::write(&path, &whole).unwrap();
    let expected = LiveProcess::open(&path).unwrap().report();
    let run = open_run(&path).unwrap();
    let summary = summarize(&run, &mut |_| {}).unwrap();
    for (live, report) in expected.devices.iter().zip(&summary.processes[0].devices) {
        // A device on which nothing is allocated has no state.
        let end = report.end.clone().unwrap_or_default();
        assert_eq!((live.totals, live.highest), (end.totals, report.highest));
        assert_eq!(live.by_category, end.by_category);
    }
    let (mut opened, mut compared) = (0, 0);
    for begins in (0..whole.len()).step_by(50) {
        std::fs::write(&path, &whole[..begins]).unwrap();
        // A trace of which the definitions are not written yet has no devices.
        let Ok(mut process) = LiveProcess::open(&path) else { continue };
        opened += 1;
        for len in (begins..whole.len()).step_by(71).chain([whole.len()]) {
            std::fs::write(&path, &whole[..len]).unwrap();
            process.advance().unwrap();
        }
        let report = process.report();
        assert_eq!((report.events, report.lost_events), (expected.events, 0), "opened at byte {begins}");
        if report.devices.len() == expected.devices.len() {
            assert_eq!((report.step, report.phase), (expected.step, expected.phase), "opened at byte {begins}");
        }
        for (live, expected) in report.devices.iter().zip(&expected.devices) {
            assert_eq!((live.totals, live.highest), (expected.totals, expected.highest), "opened at byte {begins}");
            compared += 1;
        }
    }
    assert!(opened > 3 && compared > 3, "{opened} {compared}");
}

#[test]
fn the_bytes_by_category_are_those_of_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    let whole = trace(3);
    std::fs::write(&path, &whole).unwrap();
    let process = LiveProcess::open(&path).unwrap();
    let by_category = process.by_category();
    let devices = process.report().devices;
    assert!(devices.iter().any(|device| !device.by_category.is_empty()), "{devices:?}");
    for device in devices {
        let expected = device.by_category.iter().map(|amount| (amount.category, amount.bytes)).collect();
        assert_eq!(by_category[&device.device], expected);
    }
}

#[test]
fn all_events_are_analyzed_again_after_a_pause_if_there_are_new_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    let whole = trace(3);
    let every = |pause| AnalysisPauses { after_new_code: pause, otherwise: pause };
    let (never, always) = (every(Duration::MAX), every(Duration::ZERO));
    let half = (whole.len() / 2..whole.len()).find_map(|len| {
        std::fs::write(&path, &whole[..len]).unwrap();
        LiveProcess::open(&path).ok()
    });
    let mut process = half.expect("a part of the trace that can be opened");
    let done = |process: &mut LiveProcess, pauses| {
        let advance = process.advance_with(pauses).unwrap();
        (advance.has_changed, advance.is_analyzed)
    };
    assert_eq!(done(&mut process, &always), (false, false), "nothing is new");
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(done(&mut process, &never), (true, false));
    assert_eq!(done(&mut process, &always), (true, true));
    assert_eq!(done(&mut process, &always), (false, false));
}
