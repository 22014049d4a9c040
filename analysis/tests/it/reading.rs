//! The summary and the snapshot do not depend on how a trace is read: with one thread or several, complete or damaged.
//! They are equal byte for byte. The reference comes from events that were never written to a file.

use std::path::Path;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process, Recording, Run, TraceRecording};
use memtrace_analysis::model::TraceIndex;
use memtrace_analysis::summarize;
use memtrace_trace::api::Api;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{End, EventCounts, Reader, Writer};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};

const INFO: &str = r#"{"pid":7,"argv":["python","train.py"]}"#;
const SEGMENT: u64 = 64 << 20;
const BLOCK: u64 = 1 << 20;
/// Short blocks, so that there are many.
const FLUSH_EVERY: usize = 50;

/// A training loop and CUDA calls of other libraries, some of which fail, on two devices.
fn events() -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let mut add = |e: Event| {
        let seq = events.len() as u64 + 1;
        events.push(Event { seq, ticks: seq * 700, thread: ThreadId(1 + (seq % 3) as u32), ..e });
    };
    let torch = |device: i16, action, addr, size, stack, context| Event {
        action,
        addr,
        size,
        stack: StackId(stack),
        context: ContextId(context),
        device,
        slack: if action == Action::Alloc { (BLOCK - size) as u32 } else { 0 },
        flags: if action == Action::Alloc { Flags::SLACK_KNOWN } else { Flags(0) },
        ..Event::EMPTY
    };
    let call = |api: Api, action, addr, size, result| Event {
        source: api.source().unwrap_or(Source::Driver),
        api,
        action,
        addr,
        size,
        result,
        device: 0,
        module: ModuleId(1),
        ..Event::EMPTY
    };
    for device in [0, 1] {
        add(torch(device, Action::SegmentAlloc, u64::from(device as u16 + 1) << 40, SEGMENT, 1, 0));
    }
    for step in 0..40u64 {
        let base = |i: u64| (1 << 40) + i * BLOCK;
        for i in 0..20 {
            add(torch(0, Action::Alloc, base(i), BLOCK - 512 * (i % 5), 2 + (i % 3) as u32, 0));
        }
        add(torch(1, Action::Alloc, (2 << 40) + (step % 9) * BLOCK, BLOCK, 2, 0));
        add(call(Api::cuMemAlloc_v2, Action::Alloc, (3 << 40) + step * BLOCK, BLOCK, 0));
        add(call(Api::cuMemAlloc_v2, Action::Alloc, 0, 9 * BLOCK, 2));
        for i in 0..20 {
            add(torch(0, Action::FreeRequested, base(i), BLOCK - 512 * (i % 5), 0, 1 + (i % 2) as u32));
            add(torch(0, Action::FreeCompleted, base(i), BLOCK - 512 * (i % 5), 0, 0));
        }
        add(torch(1, Action::FreeRequested, (2 << 40) + (step % 9) * BLOCK, BLOCK, 5, 0));
        add(torch(1, Action::FreeCompleted, (2 << 40) + (step % 9) * BLOCK, BLOCK, 0, 0));
        add(call(Api::cuMemFree_v2, Action::FreeCompleted, (3 << 40) + step * BLOCK, 0, 0));
    }
    events
}

fn definitions() -> Vec<u8> {
    let mut bytes = Vec::new();
    let frame = |id, name, filename, line| Definition::Frame {
        id: FrameId(id),
        name,
        qualname: name,
        filename,
        line,
        first_line: 1,
    };
    frame(1, "<module>", "/home/me/train.py", 5).encode(&mut bytes);
    frame(2, "forward", "/site-packages/torch/nn/modules/linear.py", 100).encode(&mut bytes);
    frame(3, "step", "/site-packages/torch/optim/sgd.py", 80).encode(&mut bytes);
    for (id, parent, frame) in [(1, 0, 1), (2, 1, 2), (3, 2, 2), (4, 3, 2), (5, 1, 3)] {
        Definition::Stack { id: StackId(id), parent: StackId(parent), frame: FrameId(frame) }.encode(&mut bytes);
    }
    for (id, node) in [(1, "AddmmBackward0"), (2, "ReluBackward0")] {
        Definition::Context { id: ContextId(id), node, forward: StackId(2 + id), module: ContextId::NONE }
            .encode(&mut bytes);
    }
    bytes
}

fn trace() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), INFO).unwrap();
    writer.definition(&definitions()).unwrap();
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 1_700_000_000_000_000_000 }).unwrap();
    for part in events().chunks(FLUSH_EVERY) {
        for e in part {
            writer.event(e).unwrap();
        }
        writer.flush().unwrap();
    }
    writer.finish(&End { wait_status: Some(0), reason: "exited".into(), ..End::default() }).unwrap()
}

/// The summary and the snapshot.
fn results(recording: impl Recording + 'static) -> (String, Vec<u8>) {
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default());
    let mut pickle = Vec::new();
    snapshot(&process, &mut pickle, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![process]);
    (summarize(&run, &mut |_| {}).unwrap().to_json(), pickle)
}

fn open(path: &Path, threads: usize) -> TraceRecording {
    TraceRecording::open(path).unwrap().with_threads(threads)
}

#[test]
fn a_trace_file_gives_the_results_of_its_events_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    std::fs::write(&path, trace()).unwrap();
    let reader = Reader::open(&path).unwrap();
    let memory = MemoryRecording {
        definitions: reader.definitions().clone(),
        events: events(),
        clock: reader.clock_points().to_vec(),
        end: reader.end().cloned(),
        info: INFO.to_owned(),
    };
    let expected = results(memory.clone());
    assert!(expected.1.len() > 50 * memory.events.len(), "a snapshot of every event");
    for threads in [1, 2, 5] {
        assert_eq!(TraceIndex::of(&open(&path, threads)), TraceIndex::of(&memory), "{threads} threads");
        assert!(results(open(&path, threads)) == expected, "{threads} threads");
    }
}

#[test]
fn damage_is_the_same_for_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("7.mtr");
    let whole = trace();
    let mut lossy = 0;
    for at in (16..whole.len()).step_by(211) {
        for cut in [false, true] {
            let mut bytes = whole.clone();
            if cut {
                bytes.truncate(at)
            } else {
                bytes[at] ^= 0x10
            }
            std::fs::write(&path, bytes).unwrap();
            let alone = open(&path, 1);
            let mut counted = EventCounts::default();
            let lost = alone.stream(&mut |events| events.iter().for_each(|e| counted.count(e)));
            lossy += u32::from(lost.blocks > 0);
            let expected = results(alone);
            for threads in [2, 3] {
                let several = open(&path, threads);
                assert_eq!(
                    several.event_counts(),
                    (counted.clone(), lost.clone()),
                    "event counts, byte {at}, {threads} threads"
                );
                assert_eq!(several.stream(&mut |_| {}), lost, "byte {at}, {threads} threads");
                assert!(results(several) == expected, "byte {at}, cut: {cut}, {threads} threads");
            }
        }
    }
    assert!(lossy > 20, "only {lossy} files had a block that could not be decoded");
}
