//! How often a report reads the events of a trace.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::training::{MIB, PARAMETERS, Program, training};
use memtrace_analysis::load::{Exit, LostEvents, Manifest, MemoryRecording, Process, Recording, Run};
use memtrace_analysis::summarize;
use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{LabelOrigin, TensorKind};
use memtrace_trace::event::Event;
use memtrace_trace::file::{Damage, Definitions, End, EventCounts, Label, TensorName};

/// How often the events of a recording were read.
#[derive(Default)]
struct Reads {
    /// Only their kinds, for the index.
    counted: AtomicUsize,
    streamed: AtomicUsize,
}

struct CountedRecording {
    recording: MemoryRecording,
    reads: Arc<Reads>,
}

impl Recording for CountedRecording {
    fn definitions(&self) -> &Definitions {
        self.recording.definitions()
    }

    fn calibration(&self) -> Calibration {
        self.recording.calibration()
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.recording.counter(counter)
    }

    fn end(&self) -> Option<&End> {
        self.recording.end()
    }

    fn damage(&self) -> Damage {
        self.recording.damage()
    }

    fn info(&self) -> &str {
        self.recording.info()
    }

    fn event_count(&self) -> u64 {
        self.recording.event_count()
    }

    fn stream(&self, sink: &mut dyn FnMut(&[Event])) -> LostEvents {
        self.reads.streamed.fetch_add(1, Ordering::Relaxed);
        self.recording.stream(sink)
    }

    fn event_counts(&self) -> (EventCounts, LostEvents) {
        self.reads.counted.fetch_add(1, Ordering::Relaxed);
        self.recording.event_counts()
    }
}

/// Makes the report of a program. Returns how often its events were counted, and streamed.
fn reads(mut program: Program, status: i32) -> (usize, usize) {
    program.recording.end = Some(End { wait_status: Some(status), reason: "exited".into(), ..End::default() });
    let reads = Arc::new(Reads::default());
    let recording = CountedRecording { recording: program.recording, reads: reads.clone() };
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default());
    let manifest = Manifest { pid: Some(7), exit: Exit::from_wait_status(status), ..Manifest::default() };
    let run = Run::from_processes(Path::new("run"), manifest, vec![process]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let peak = summary.processes[0].devices[0].peak.as_ref().unwrap();
    assert!(peak.totals.allocated_bytes >= PARAMETERS);
    (reads.counted.load(Ordering::Relaxed), reads.streamed.load(Ordering::Relaxed))
}

/// Names the first parameter, whose address shows the block only in the state at that time.
fn name_a_parameter(program: &mut Program) {
    let first = program.recording.events.iter().find(|e| e.size == 4 * MIB).unwrap();
    let (address, seq) = (first.addr, first.seq + 1);
    let name = TensorName { address, seq, kind: TensorKind::Parameter, name: "weight".into(), shape: "".into() };
    program.recording.definitions.tensor_names.push(name);
}

/// Adds the label of ranges of PyTorch's profiler, which show where steps end.
fn name_the_steps(program: &mut Program) {
    let label = Label { origin: LabelOrigin::RecordFunction, text: "Optimizer.step#Adam.step".into() };
    program.recording.definitions.labels.insert(1, label);
}

#[test]
fn a_trace_is_counted_once_and_streamed_once() {
    assert_eq!(reads(training(3, false), 0), (1, 1));
}

#[test]
fn an_error_is_explained_in_a_second_pass() {
    assert_eq!(reads(training(3, true), 0x100), (1, 2));
}

/// The analysis needs both before it begins.
#[test]
fn names_and_the_ends_of_steps_take_a_pass_each() {
    let mut program = training(3, false);
    name_a_parameter(&mut program);
    assert_eq!(reads(program, 0), (1, 2));
    let mut program = training(3, false);
    name_the_steps(&mut program);
    assert_eq!(reads(program, 0), (1, 2));
    let mut program = training(3, true);
    name_a_parameter(&mut program);
    name_the_steps(&mut program);
    assert_eq!(reads(program, 0x100), (1, 4));
}
