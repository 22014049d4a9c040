//! Builds recordings from the golden snapshots: what memtrace would have recorded in the runs that PyTorch's recorder
//! recorded.

use std::path::{Path, PathBuf};

use memtrace_analysis::load::MemoryRecording;
use memtrace_trace::event::{Action, Event};
use memtrace_trace::file::{Definitions, End, Frame, StackNode};
use memtrace_trace::ids::{FrameId, StackId};
use serde_json::Value;

/// The path of a file in `tests/golden/snapshots`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/snapshots").join(name)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// The recording that corresponds to a golden file.
pub fn load(name: &str) -> MemoryRecording {
    recording(&serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap())
}

/// The recording that memtrace would have made of the run behind this snapshot.
fn recording(json: &Value) -> MemoryRecording {
    let mut definitions = Definitions::default();
    definitions.frames.push(Frame::default());
    for frame in json["frames"].as_array().unwrap() {
        definitions.frames.push(Frame {
            name: frame[0].as_str().unwrap().into(),
            qualname: frame[0].as_str().unwrap().into(),
            filename: frame[1].as_str().unwrap().into(),
            line: number(&frame[2]) as u32,
            ..Frame::default()
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
                action: Action::from_wire(number(&e[0])).unwrap(),
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
    let end = Some(End { reason: "exited".into(), ..End::default() });
    MemoryRecording { definitions, events, end, info: r#"{"pid": 7}"#.into(), ..MemoryRecording::default() }
}
