//! PyTorch's own recorder as the oracle: compares its `device_traces` with the trace, event by event.

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Definitions, Reader};
use serde_json::Value;

use crate::traced_program::{Run, TracedProgram, events};

/// An event in the format that both sides share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// PyTorch's name of the action.
    pub action: String,
    /// The address; for `oom` the number of free bytes.
    pub addr: u64,
    /// The size in bytes, as PyTorch reports it.
    pub size: u64,
    /// The raw stream handle.
    pub stream: u64,
    /// Frames as (name, file, line), innermost first.
    pub frames: Vec<(String, String, u64)>,
}

/// PyTorch's snapshot as `tests/programs/torch/oracle.py` writes it.
#[derive(Debug)]
pub struct Oracle {
    /// The whole JSON document.
    pub snapshot: Value,
}

fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| value.as_i64().map(|v| v as u64)).unwrap_or_else(|| panic!("not a number: {value}"))
}

impl Oracle {
    /// Reads the JSON file. Panics when it cannot be read.
    pub fn read(path: &Path) -> Oracle {
        let text = std::fs::read_to_string(path).expect("the oracle's snapshot");
        Oracle { snapshot: serde_json::from_str(&text).expect("the oracle's JSON") }
    }

    /// The snapshot's events by device; devices without events are absent.
    pub fn entries(&self) -> BTreeMap<i16, Vec<Entry>> {
        let traces = self.snapshot["device_traces"].as_array().expect("device_traces");
        let trace = |t: &Value| t.as_array().expect("a trace").iter().map(Oracle::entry).collect::<Vec<_>>();
        let mut by_device: BTreeMap<i16, Vec<Entry>> = (0..).zip(traces.iter().map(trace)).collect();
        by_device.values_mut().for_each(skip_first_snapshots);
        by_device.retain(|_, trace| !trace.is_empty());
        by_device
    }

    fn entry(e: &Value) -> Entry {
        let action = e["action"].as_str().expect("an action").to_owned();
        let addr = number(if action == "oom" { &e["device_free"] } else { &e["addr"] });
        let frames = e["frames"].as_array().map(Vec::as_slice).unwrap_or_default();
        let frame = |f: &Value| {
            let text = |key: &str| f[key].as_str().unwrap_or_default().to_owned();
            // PyTorch gives code without a line (made by a compiler or torch.compile) the line -1 as an unsigned
            // number. We use 0.
            let line = Some(number(&f["line"])).filter(|line| *line != u64::MAX).unwrap_or(0);
            (text("name"), text("filename"), line)
        };
        Entry {
            action,
            addr,
            size: number(&e["size"]),
            stream: number(&e["stream"]),
            frames: frames.iter().map(frame).collect(),
        }
    }
}

/// Leaves out snapshots before the first event of a device. PyTorch 2.15 takes one when NCCL is initialized, which can
/// be before the first allocation, at which memtrace attaches.
fn skip_first_snapshots(trace: &mut Vec<Entry>) {
    let first = trace.iter().position(|e| e.action != "snapshot").unwrap_or(trace.len());
    trace.drain(..first);
}

/// The trace's allocator events before the oracle's snapshot, by device.
pub fn ours(reader: &Reader) -> BTreeMap<i16, Vec<Entry>> {
    let definitions = reader.definitions();
    let mut by_device: BTreeMap<i16, Vec<Entry>> = BTreeMap::new();
    let events = events(reader);
    // Taking the oracle's snapshot is an event too. Later events are not in the snapshot.
    let snapshot = events.iter().rposition(|e| e.action == Action::Snapshot).expect("the oracle's snapshot");
    for event in &events[..=snapshot] {
        if event.source == Source::Torch && event.action <= Action::Annotate {
            by_device.entry(event.device).or_default().push(entry(definitions, event));
        }
    }
    for trace in by_device.values_mut() {
        // The snapshot makes one event on each device, and so does one of NCCL's end (PyTorch 2.15).
        while trace.last().is_some_and(|e| e.action == "snapshot") {
            trace.pop();
        }
        skip_first_snapshots(trace);
    }
    by_device.retain(|_, trace| !trace.is_empty());
    by_device
}

fn entry(definitions: &Definitions, event: &Event) -> Entry {
    // PyTorch's recorder was not asked for native frames, which memtrace adds to events without Python frames.
    let frames = definitions
        .walk_ids(event.stack)
        .filter(|(_, id)| !definitions.native_frames.contains_key(id))
        .map(|(_, id)| {
            let frame = definitions.frame(id).expect("every frame is defined");
            (frame.name.to_string(), frame.filename.to_string(), frame.line.into())
        })
        .collect();
    Entry { action: event.action.name().into(), addr: event.addr, size: event.size, stream: event.stream, frames }
}

/// Runs a program of `tests/programs/torch` with memtrace and PyTorch's recorder at once and compares every event.
/// Returns the run and PyTorch's snapshot.
#[track_caller]
pub fn compare(traced: TracedProgram) -> (Run, Oracle) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let run = traced.env("MEMTRACE_TEST_ORACLE", file.path()).run();
    run.assert_ended_well();
    let oracle = Oracle::read(file.path());
    assert_equal(&run.trace(), &oracle);
    (run, oracle)
}

/// Compares every event of a trace with PyTorch's snapshot of the same process.
#[track_caller]
pub fn assert_equal(trace: &Reader, oracle: &Oracle) {
    let (ours, theirs) = (ours(trace), oracle.entries());
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "devices");
    assert!(!theirs.is_empty(), "the oracle recorded something");
    for (device, theirs) in &theirs {
        let ours = &ours[device];
        for (index, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert_eq!(a, b, "event {index} of device {device} (left: ours, right: PyTorch's)");
        }
        assert_eq!(ours.len(), theirs.len(), "events of device {device}");
    }
}
