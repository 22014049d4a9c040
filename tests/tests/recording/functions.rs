//! The functions that the preloaded library exports for programs: ranges, and the part of the trace that is on disk.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use memtrace_tests::programs::{ProgramFolder, linked_with, with_simcuda};
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::LabelOrigin;
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::Reader;

const THREADS: u64 = 6;
const ROUNDS: u64 = 5;

/// The events so far. The trace may have no end yet.
fn events(trace: &Reader) -> Vec<Event> {
    trace.events().flat_map(|block| block.expect("a sound block")).collect()
}

fn of_runtime(trace: &Reader) -> u64 {
    events(trace).iter().filter(|e| e.source == Source::Runtime).count() as u64
}

/// The events that were not recorded because of a pause, and the first of them at once.
#[test]
fn every_event_of_a_pause_is_counted() {
    const THREADS: u64 = 8;
    const PAIRS: u64 = 3000;
    // An allocation and a release, of the runtime and of the driver.
    const EVENTS_OF_PAIR: u64 = 4;
    let programs = ProgramFolder::new();
    let program = programs.program("recording/paused.c", "paused", &linked_with("libcudart.so.12"));
    let (threads, pairs) = (THREADS.to_string(), PAIRS.to_string());
    let run = with_simcuda(&[program.as_os_str(), threads.as_ref(), pairs.as_ref()]).option("--quiet").run();
    run.assert_ended_well();
    let mut counted: Vec<(u64, u64)> =
        run.traces().iter().map(|trace| (of_runtime(trace), trace.counter(Counter::EventsDropped))).collect();
    counted.sort();
    let of_child = PAIRS * EVENTS_OF_PAIR;
    // Two children, and the program itself, with a pair after each pause.
    assert_eq!(counted, [(0, of_child), (0, of_child), (4, 2 * THREADS * PAIRS * EVENTS_OF_PAIR)]);
}

/// The starts and ends of ranges in their order: the action and the name.
fn ranges(trace: &Reader) -> Vec<(Action, String)> {
    let definitions = trace.definitions();
    let mut open: Vec<(u64, String)> = Vec::new();
    let name = |e: &Event| definitions.labels[&(e.addr as u32)].text.to_string();
    let mut found = Vec::new();
    for event in events(trace).iter().filter(|e| e.source == Source::Label) {
        if event.action == Action::RangeStart {
            open.push((event.size, name(event)));
            found.push((event.action, name(event)));
        } else {
            let index = open.iter().position(|(number, _)| *number == event.size).expect("a range that has started");
            found.push((event.action, open.remove(index).1));
        }
    }
    assert!(open.is_empty(), "{open:?}");
    found
}

#[test]
fn what_was_published_is_on_disk_when_flush_returns() {
    let programs = ProgramFolder::new();
    let program = programs.program("recording/functions.c", "functions", &linked_with("libcudart.so.12"));
    let (threads, rounds) = (THREADS.to_string(), ROUNDS.to_string());
    let traced = with_simcuda(&[program.as_os_str(), threads.as_ref(), rounds.as_ref()]).option("--quiet");
    let folder = programs.path("run");
    let mut command = traced.prepare(Some(&folder));
    let mut child: Child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the launcher starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut path = None;
    for round in 1..=ROUNDS {
        let line = lines.next().expect("a line for each round").expect("text");
        // The program waits, so no further event is on its way.
        let trace = Reader::open(&line).expect("a trace that is still being written");
        assert!(trace.end().is_none());
        assert_eq!(of_runtime(&trace), 2 + round * THREADS * 1000, "after {round} rounds");
        path = Some(line);
        stdin.write_all(b"\n").expect("the program reads");
    }
    assert_eq!(child.wait().expect("the launcher ends").code(), Some(0));

    let trace = Reader::open(path.expect("a path")).expect("the whole trace");
    assert_eq!(of_runtime(&trace), 2 + ROUNDS * THREADS * 1000);
    let long = "x".repeat(1024);
    let (start, end) = (Action::RangeStart, Action::RangeEnd);
    let expected: Vec<(Action, String)> = [
        (start, "first"),
        (start, "second"),
        (end, "first"),
        (end, "second"),
        (start, &long),
        (end, &long),
        (start, "\u{fffd}"),
        (end, "\u{fffd}"),
    ]
    .map(|(action, name)| (action, name.to_owned()))
    .into();
    assert_eq!(ranges(&trace), expected);
    assert!(trace.definitions().labels.values().all(|label| label.origin == LabelOrigin::Annotation));
    assert_eq!(trace.counter(Counter::StringsTruncated), 1);
    assert_eq!(trace.counter(Counter::EventsDropped), 0, "a refused range is no lost event");
}
