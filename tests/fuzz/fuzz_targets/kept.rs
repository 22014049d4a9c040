//! The file beside a rotated trace, with a checksum that fits.
#![no_main]

use std::io::{Seek, Write};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::report::Totals;
use memtrace_analysis::{KeptState, open_run, summarize};
use memtrace_fuzz::{Folder, analyse};
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::file::{Budget, End, Writer};
use memtrace_trace::rotation::Rotation;

const ROTATION: Rotation = Rotation { first_seq: 9, dropped: 8, recreating: 2, dropped_ticks: (1, 8) };

/// The result of the first input.
static HIGHEST: OnceLock<Totals> = OnceLock::new();

/// A trace with two older blocks, one of which is freed, and a new one.
fn trace() -> Vec<u8> {
    let mut definition = Vec::new();
    Definition::Rotation { rotation: ROTATION }.encode(&mut definition);
    let mut writer = Writer::new(Vec::new(), r#"{"pid":7}"#).expect("memory");
    writer.definition(&definition).expect("memory");
    let event = |seq: u64, action, addr| {
        let flags = if seq < ROTATION.first_seq { Flags::PREEXISTING } else { Flags(0) };
        Event { seq, ticks: seq, size: 512, addr, device: 0, action, flags, ..Event::EMPTY }
    };
    let (alloc, requested, completed) = (Action::Alloc, Action::FreeRequested, Action::FreeCompleted);
    let (older, new) = ([(2, alloc, 4096), (5, alloc, 8192)], [(9, alloc, 12288), (10, requested, 4096)]);
    for (seq, action, addr) in older.into_iter().chain(new).chain([(11, completed, 4096)]) {
        writer.event(&event(seq, action, addr)).expect("memory");
    }
    writer.finish(&End { reason: "exited".into(), ..End::default() }).expect("memory")
}

fuzz_target!(init: Folder::here().put("7.mtr", &trace()), |states: &[u8]| {
    let folder = Folder::here();
    let header = format!("{{\"version\":1,\"crc32\":{}}}\n", crc32fast::hash(states));
    folder.put("7.kept.jsonl", &[header.as_bytes(), states].concat());
    analyse(folder.path());
    let run = open_run(folder.path()).expect("the trace is sound");
    let summary = summarize(&run, &mut |_| {}).expect("the trace is sound");
    let highest = &summary.processes[0].devices[0].highest;
    assert_eq!(highest, HIGHEST.get_or_init(|| highest.clone()), "the file says nothing about sizes");
    if let Some(state) = run.processes()[0].recording().kept_state() {
        let mut again = tempfile::tempfile().expect("a file");
        again.write_all(&state.to_file(None)).and_then(|()| again.rewind()).expect("a file");
        assert_eq!(KeptState::read(&again, &ROTATION, &Budget::default()).expect("our own file"), *state);
    }
});
