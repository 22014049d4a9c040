//! How often a report reads the events of a trace.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::training::{MIB, PARAMETERS, Program, training};
use memtrace_analysis::export::{PageDataOptions, SourceAccess, page_data};
use memtrace_analysis::load::{Exit, LostEvents, Manifest, MemoryRecording, Process, Recording, Run};
use memtrace_analysis::report::Summary;
use memtrace_analysis::{DiffOptions, HtmlOptions, LinesOptions, diff, html_report, lines, summarize};
use memtrace_trace::api::Api;
use memtrace_trace::clock::Calibration;
use memtrace_trace::counters::Counter;
use memtrace_trace::definition::{LabelOrigin, ScanOccasion, TensorKind};
use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Cycle, Damage, Definitions, End, EventCounts, Holder, HolderScan, Label, TensorName};
use memtrace_trace::ids::{ContextId, StackId};

/// No report streams a trace more often: once for what must be known before the main pass, and for the main pass.
const MOST: usize = 2;

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

/// How often the events of a process were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ReadCounts {
    counted: usize,
    streamed: usize,
}

/// The processes of a run, each with the number of its reads.
struct CountedRun {
    run: Run,
    reads: Vec<Arc<Reads>>,
}

impl CountedRun {
    fn of(programs: Vec<Program>, status: i32) -> CountedRun {
        let mut reads = Vec::new();
        let processes = programs.into_iter().zip(7..).map(|(mut program, pid)| {
            program.recording.end = Some(End { wait_status: Some(status), reason: "exited".into(), ..End::default() });
            let of_process = Arc::new(Reads::default());
            reads.push(of_process.clone());
            let recording = CountedRecording { recording: program.recording, reads: of_process };
            Process::new(Path::new(&format!("{pid}.mtr")), Box::new(recording), &Manifest::default())
        });
        let processes = processes.collect();
        let manifest = Manifest { pid: Some(7), exit: Exit::from_wait_status(status), ..Manifest::default() };
        CountedRun { run: Run::from_processes(Path::new("run"), manifest, processes), reads }
    }

    /// The reads of each process since the last call.
    fn take(&self) -> Vec<ReadCounts> {
        let take = |reads: &Arc<Reads>| ReadCounts {
            counted: reads.counted.swap(0, Ordering::Relaxed),
            streamed: reads.streamed.swap(0, Ordering::Relaxed),
        };
        self.reads.iter().map(take).collect()
    }
}

/// Makes the report of a program. Returns the summary, and how often its events were streamed.
#[track_caller]
fn report(program: Program, status: i32) -> (Summary, usize) {
    let counted = CountedRun::of(vec![program], status);
    let summary = summarize(&counted.run, &mut |_| {}).unwrap();
    let peak = summary.processes[0].devices[0].peak.as_ref().unwrap();
    assert!(peak.totals.allocated_bytes >= PARAMETERS);
    let reads = counted.take()[0];
    assert_eq!(reads.counted, 1, "the index counts the events once");
    assert!(reads.streamed <= MOST, "{reads:?}");
    (summary, reads.streamed)
}

/// Names the first parameter, whose address shows the block only in the state at that time.
fn name_a_parameter(program: &mut Program) {
    let first = program.recording.events.iter().find(|e| e.size == 4 * MIB).unwrap();
    let (address, seq) = (first.addr, first.seq + 1);
    let name = TensorName { address, seq, kind: TensorKind::Parameter, name: "weight".into(), shape: "".into() };
    program.recording.definitions.tensor_names.push(name);
}

fn add_label(program: &mut Program, origin: LabelOrigin, text: &str) -> u64 {
    let id = program.recording.definitions.labels.len() as u32 + 1;
    program.recording.definitions.labels.insert(id, Label { origin, text: text.into() });
    id.into()
}

/// Adds the label of ranges of PyTorch's profiler, which show where steps end.
fn name_the_steps(program: &mut Program) {
    add_label(program, LabelOrigin::RecordFunction, "Optimizer.step#Adam.step");
}

/// Adds what `--holders` and `--cycles` record about the first parameter.
fn hold_a_parameter(program: &mut Program) {
    let first = program.recording.events.iter().find(|e| e.size == 4 * MIB).unwrap();
    let (address, seq) = (first.addr, first.seq + 1);
    let definitions = &mut program.recording.definitions;
    definitions.holder_scans.push(HolderScan { seq, occasion: ScanOccasion::Running, objects: 1, is_partial: false });
    definitions.holders.push(Holder { seq, address, path: "model.weight".into(), shape: "".into() });
    definitions.cycles.push(Cycle { seq, address, file: "".into(), text: "Node -> Node".into() });
}

/// Captures a CUDA graph that keeps a block.
fn capture_a_graph(program: &mut Program) {
    let stack = program.recording.events[0].stack;
    let call = |program: &mut Program, api, addr, size| {
        program.event(Action::Graph, addr, size, stack, ContextId::NONE);
        let e = program.recording.events.last_mut().unwrap();
        (e.source, e.api, e.stream) = (Source::Driver, api, 7);
    };
    call(program, Api::cuStreamBeginCapture_v2, 0, 0);
    program.alloc(MIB, stack);
    for e in program.recording.events.iter_mut().rev().take(2) {
        (e.pool, e.stream) = (1, 7);
    }
    call(program, Api::cuStreamEndCapture, 100, 3);
}

/// Leaves much reserved memory unused at the peak, which the report explains.
fn leave_memory_unused(program: &mut Program) {
    let stack = program.recording.events[0].stack;
    for size in [200 * MIB, 200 * MIB, 300 * MIB] {
        let block = program.alloc(size, stack);
        program.free(block, stack);
    }
}

/// Ends a range after which memory should be released.
fn release_memory(program: &mut Program) {
    let label = add_label(program, LabelOrigin::Nvtx, "offload weights");
    for action in [Action::RangeStart, Action::RangeEnd] {
        program.event(action, label, 0, StackId::NONE, ContextId::NONE);
        program.recording.events.last_mut().unwrap().source = Source::Label;
    }
}

/// Opens memory of another process.
fn import_memory(program: &mut Program) {
    program.event(Action::Alloc, 0x7000, MIB, StackId::NONE, ContextId::NONE);
    let e = program.recording.events.last_mut().unwrap();
    (e.source, e.api) = (Source::Driver, Api::cuIpcOpenMemHandle_v2);
}

/// Gives a program all that a first pass finds.
fn everything(program: &mut Program) {
    name_a_parameter(program);
    name_the_steps(program);
    hold_a_parameter(program);
    capture_a_graph(program);
    leave_memory_unused(program);
    release_memory(program);
    import_memory(program);
}

#[test]
fn a_plain_trace_is_streamed_once() {
    assert_eq!(report(training(3, false), 0).1, 1);
}

#[test]
fn an_error_is_explained_in_two_streams() {
    let (summary, streamed) = report(training(3, true), 0x100);
    assert_eq!(streamed, MOST);
    let device = &summary.processes[0].devices[0];
    assert!(device.explained_oom.is_some() && device.reserved.is_some() && device.what_if.is_some());
}

#[test]
fn a_peak_is_explained_in_two_streams() {
    for has_names in [false, true] {
        let mut program = training(3, false);
        leave_memory_unused(&mut program);
        if has_names {
            name_a_parameter(&mut program);
        }
        let (summary, streamed) = report(program, 0);
        assert_eq!(streamed, MOST);
        let device = &summary.processes[0].devices[0];
        assert!(device.reserved.is_some() && device.what_if.is_some());
    }
}

#[test]
fn holders_and_cycles_need_no_stream_of_their_own() {
    let mut program = training(3, false);
    hold_a_parameter(&mut program);
    capture_a_graph(&mut program);
    let (summary, streamed) = report(program, 0);
    assert_eq!(streamed, 1);
    let device = &summary.processes[0].devices[0];
    assert!(device.holders.is_some() && device.cuda_graphs.is_some());
}

/// Each of them must be known before the main pass.
#[test]
fn names_the_ends_of_steps_and_releases_take_one_stream_together() {
    for add in [name_a_parameter, name_the_steps, release_memory] {
        let mut program = training(3, false);
        add(&mut program);
        assert_eq!(report(program, 0).1, MOST);
    }
}

#[test]
fn no_trace_is_streamed_more_than_twice() {
    for (oom, status) in [(false, 0), (true, 0x100)] {
        let mut program = training(3, oom);
        everything(&mut program);
        let (summary, streamed) = report(program, status);
        assert_eq!(streamed, MOST);
        let device = &summary.processes[0].devices[0];
        assert!(device.reserved.is_some() && device.holders.is_some() && device.cuda_graphs.is_some());
        assert_eq!((device.released.len(), device.explained_oom.is_some()), (1, oom));
    }
}

/// The ranks exchange memory, and the one with the highest peak is compared with the median.
#[test]
fn no_rank_of_a_launch_is_streamed_more_than_twice() {
    let rank = |rank: u32| {
        let mut program = training(3, false);
        if rank == 2 {
            let stack = program.recording.events[0].stack;
            program.alloc(400 * MIB, stack);
        }
        everything(&mut program);
        program.recording.definitions.rank = Some((rank, 3));
        program
    };
    let counted = CountedRun::of((0..3).map(rank).collect(), 0);
    let summary = summarize(&counted.run, &mut |_| {}).unwrap();
    let launch = summary.launch.unwrap();
    assert!(launch.table.worst_against_median.is_some() && !launch.shared_memory.is_empty());
    assert_eq!(counted.take(), [ReadCounts { counted: 1, streamed: MOST }; 3]);
}

/// The other reports, each on its own.
#[test]
fn the_page_the_lines_and_the_comparison_stream_a_trace_at_most_twice() {
    let mut program = training(3, false);
    everything(&mut program);
    let counted = CountedRun::of(vec![program], 0);
    let process = &counted.run.processes()[0];
    let summary = summarize(&counted.run, &mut |_| {}).unwrap();
    counted.take();
    let streamed = |what: &str| {
        let streamed = counted.take()[0].streamed;
        assert!(streamed > 0 && streamed <= MOST, "{what}: {streamed}");
    };
    let options = HtmlOptions::default();
    html_report(&summary, &[process], &options, &mut Vec::new(), &mut |_| {}).unwrap();
    streamed("the page");
    let options = PageDataOptions {
        device: None,
        max_blocks: Some(3),
        marks: &[10],
        window: None,
        modules_at: 0,
        is_library: &|_| false,
        sources: SourceAccess::Nothing,
        custom_rules: None,
    };
    page_data(process, &options, &mut Vec::new(), &mut |_| {}).unwrap();
    streamed("the page of a long recording");
    lines(&counted.run, &LinesOptions { top: 5, ..LinesOptions::default() }, &mut |_| {}).unwrap();
    streamed("the lines");
    let options = DiffOptions { steps: Some((0, 1)), ..DiffOptions::default() };
    diff(&counted.run, &counted.run, &options, &mut |_| {});
    streamed("the comparison of two steps");
}
