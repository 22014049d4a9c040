//! A program that repeatedly runs out of memory. The report explains the error that ended it.

use std::path::Path;

use memtrace_analysis::load::{Exit, Manifest, MemoryRecording, Process, Run};
use memtrace_analysis::{TextOptions, ToText, summarize};
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::End;

const MIB: u64 = 1 << 20;

fn run(errors: u64, code: i32) -> Run {
    let event = |action, addr, size| Event { action, addr, size, device: 0, ..Event::EMPTY };
    let mut events = vec![event(Action::SegmentAlloc, 100 * MIB, 100 * MIB)];
    for i in 0..errors {
        events.push(event(Action::Alloc, (100 + i) * MIB, MIB));
        events.push(event(Action::Oom, 3 * MIB, (200 + i) * MIB));
    }
    for (i, e) in events.iter_mut().enumerate() {
        (e.seq, e.ticks) = (i as u64 + 1, i as u64 * 1000);
    }
    let end = Some(End { reason: "exited".into(), ..End::default() });
    let recording = MemoryRecording { events, end, info: r#"{"pid": 7}"#.into(), ..MemoryRecording::default() };
    let exit = Exit { code: Some(code), signal: None };
    let manifest = Manifest { command: vec!["train".into()], exit, pid: Some(7), ..Manifest::default() };
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &manifest);
    Run::from_processes(Path::new("run"), manifest, vec![process])
}

#[test]
fn the_report_explains_the_error_that_ended_the_program() {
    for (errors, code, explained) in [(1, 1, 0), (40, 1, 39), (40, 0, 0)] {
        let summary = summarize(&run(errors, code), &mut |_| {}).unwrap();
        let device = &summary.processes[0].devices[0];
        assert_eq!(device.oom_count, errors);
        let oom = &device.ooms[device.explained_oom.unwrap()];
        assert_eq!(oom.requested_bytes, (200 + explained) * MIB, "{errors} errors, status {code}");
        // Each error leaves one more block than the previous one.
        assert_eq!(oom.in_use.totals.allocated_bytes, (explained + 1) * MIB);
        assert_eq!(oom.in_use.by_category.iter().map(|c| c.bytes).sum::<u64>(), (explained + 1) * MIB);
        // PyTorch requests a multiple of 2 MiB from CUDA.
        assert_eq!(oom.segment_bytes, (200 + explained).next_multiple_of(2) * MIB);
        assert_eq!(oom.short_bytes, Some(oom.segment_bytes - 3 * MIB));
        let page = summary.to_text(&TextOptions::default());
        assert_eq!(page.contains(" errors)"), errors > 1, "{page}");
    }
}
