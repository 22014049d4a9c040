//! The snapshot writer against snapshots that PyTorch itself wrote on an H200: the same events replayed give the same file.

use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{Definitions, Frame, StackNode};
use memtrace_trace::ids::{FrameId, StackId};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/snapshots").join(name)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// The recording that memtrace would have made of the run whose snapshot this is.
fn recording(json: &Value) -> MemoryRecording {
    let mut definitions = Definitions::default();
    definitions.frames.push(Frame::default());
    for frame in json["frames"].as_array().unwrap() {
        definitions.frames.push(Frame {
            name: frame[0].as_str().unwrap().into(),
            qualname: frame[0].as_str().unwrap().into(),
            filename: frame[1].as_str().unwrap().into(),
            line: number(&frame[2]) as u32,
            first_line: 0,
        });
    }
    definitions.stacks.push(StackNode::default());
    for stack in json["stacks"].as_array().unwrap() {
        let (parent, frame) = (StackId(number(&stack[0]) as u32), FrameId(number(&stack[1]) as u32));
        definitions.stacks.push(StackNode { parent, frame });
    }
    let mut events = Vec::new();
    for (device, trace) in json["traces"].as_array().unwrap().iter().enumerate() {
        for e in trace.as_array().unwrap() {
            events.push(Event {
                seq: events.len() as u64 + 1,
                action: Action::from_wire(number(&e[0]) as u8).unwrap(),
                addr: number(&e[1]),
                size: number(&e[2]),
                stream: number(&e[3]),
                ticks: number(&e[4]) * 1000,
                stack: StackId(number(&e[5]) as u32),
                device: device as i16,
                ..Event::EMPTY
            });
        }
    }
    MemoryRecording { definitions, events, info: r#"{"pid": 7}"#.into(), ..MemoryRecording::default() }
}

fn the_same_file_comes_out(name: &str) {
    let path = golden(name);
    let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let process = Process::new(Path::new("7.mtr"), Box::new(recording(&json)), &Manifest::default());
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("7.pickle");
    let file = std::fs::File::create(&ours).unwrap();
    let report = snapshot(&process, file, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(report.bytes, std::fs::metadata(&ours).unwrap().len());
    let output = Command::new("python3").arg(golden("compare.py")).arg(&ours).arg(&path).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_resnet_with_splits_and_merges() {
    the_same_file_comes_out("resnet_leak.json");
}

#[test]
fn an_out_of_memory_error() {
    the_same_file_comes_out("oom.json");
}

#[test]
fn expandable_segments() {
    the_same_file_comes_out("expandable.json");
}
