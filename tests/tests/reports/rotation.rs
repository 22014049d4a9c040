//! A recording that keeps its newest part (`memtrace run --keep`) reports what the full recording does about its end.

use std::fs::File;
use std::path::Path;

use memtrace_analysis::model::Replay;
use memtrace_analysis::report::{ProcessSummary, Summary};
use memtrace_analysis::rewrite::{Keep, Rotated, rotate};
use memtrace_analysis::{KeptState, Process, open_run, summarize};
use memtrace_tests::traced_program::{TracedProgram, events};
use memtrace_trace::file::{Reader, Writer, copy_frames, definitions_before};

const STEPS: u32 = 40;

fn process(summary: &Summary) -> &ProcessSummary {
    let [process] = &summary.processes[..] else { panic!("{} processes", summary.processes.len()) };
    process
}

/// The segments at the end, as a snapshot has them, but for what only the allocator's own objects distinguish.
fn segments(process: &Process) -> Vec<String> {
    let mut replay = Replay::new(process.trace_index(), None);
    process.recording().stream(&mut |events| events.iter().for_each(|e| replay.apply(e, |_, _, _, _| {})));
    let segments = replay.devices()[0].allocator.segments();
    let text = |s: &memtrace_analysis::model::Segment| {
        let block = |b: &memtrace_analysis::model::Block| {
            format!(
                "{:?}",
                (b.addr, b.size, b.requested, b.state, b.stack, b.context, b.seq * u64::from(b.is_active()))
            )
        };
        let blocks: Vec<String> = s.blocks.iter().map(block).collect();
        format!("{:?} {blocks:?}", (s.addr, s.size, s.stream, s.stack, s.context, s.pool, s.small, s.expandable))
    };
    segments.iter().map(text).collect()
}

/// The same trace in small blocks of events, between which it can be cut.
fn in_small_blocks(trace: &Path) -> File {
    let reader = Reader::open(trace).unwrap();
    let mut writer = Writer::new(tempfile::tempfile().unwrap(), reader.info()).unwrap();
    let len = reader.file().metadata().unwrap().len();
    definitions_before(reader.file(), len, &mut |_, encoded| writer.definition(encoded)).unwrap();
    reader.clock_points().iter().for_each(|point| writer.clock(*point).unwrap());
    writer.counters(&reader.counters()).unwrap();
    for events in events(&reader).chunks(64) {
        events.iter().for_each(|e| writer.event(e).unwrap());
        writer.flush().unwrap();
    }
    writer.into_out().unwrap()
}

#[test]
fn the_newest_part_of_a_training_has_the_end_of_the_whole() {
    let full = TracedProgram::python("torch/kept.py", &[]).run();
    full.assert_ended_well();
    let whole = open_run(full.path()).unwrap();
    let expected = summarize(&whole, &mut |_| {}).unwrap();
    let (of_whole, trace) = (process(&expected), whole.processes()[0].path());
    let device = &of_whole.devices[0];
    assert_eq!(device.steps, STEPS);
    let rules = |process: &ProcessSummary| process.issues.iter().map(|issue| issue.rule).collect::<Vec<_>>();
    assert!(!rules(of_whole).is_empty());
    let (first, last) = whole.processes()[0].trace_index().tick_range.unwrap();
    for part in [0.3, 0.5, 0.7, 0.85] {
        let since = first + ((last - first) as f64 * part) as u64;
        let (folder, old) = (tempfile::tempdir().unwrap(), in_small_blocks(trace));
        let path = folder.path().join(trace.file_name().unwrap());
        let new = File::create_new(&path).unwrap();
        let no_file = || unreachable!("the old trace was not rotated");
        let rotated = rotate(trace, old.try_clone().unwrap(), no_file, Keep::Since(since), new).unwrap();
        let Rotated { mut out, copied_to, dropped, kept_state, .. } = rotated.expect("something to drop");
        std::fs::write(KeptState::file_name(&path), kept_state).unwrap();
        copy_frames(&old, copied_to, old.metadata().unwrap().len(), &mut out).unwrap();
        let run = open_run(&path).unwrap();
        let summary = summarize(&run, &mut |_| {}).unwrap();
        let of_part = process(&summary);
        assert_eq!(of_part.dropped.as_ref().map(|d| d.events), Some(dropped));
        assert_eq!(of_part.events + dropped, of_whole.events);
        assert!(of_part.losses.is_empty(), "{:?}", of_part.losses);
        assert_eq!(segments(&run.processes()[0]), segments(&whole.processes()[0]), "{dropped} dropped");
        let kept = &of_part.devices[0];
        assert_eq!(kept.steps, STEPS, "{dropped} dropped");
        assert_eq!(kept.highest, device.highest, "{dropped} dropped");
        assert_eq!(kept.end, device.end, "{dropped} dropped");
        assert_eq!(rules(of_part), rules(of_whole), "{dropped} dropped");
    }
}
