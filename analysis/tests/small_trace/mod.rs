//! A small trace that contains everything. It has every kind of frame, definition, source and action, an autograd node
//! and native frames. It has a private pool, two devices, failed calls, an out-of-memory error and a training step.

use memtrace_trace::api::Api;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::counters::{COUNTER_SLOTS, Counter};
use memtrace_trace::definition::{Definition, NoticeStatus};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::{ContextId, FrameId, ModuleId, StackId, ThreadId};

/// The process that recorded.
pub(crate) const INFO: &str =
    r#"{"pid":7,"argv":["python","train.py"],"cwd":"/home/me","env":{"RANK":"0","WORLD_SIZE":"1"},"host":"h"}"#;
const MIB: u64 = 1 << 20;

/// The definitions that the ids refer to, encoded.
pub(crate) fn definitions() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut add = |definition: Definition<'_>| definition.encode(&mut bytes);
    let python = [
        (1, "<module>", "/home/me/train.py", 5),
        (2, "forward", "/site-packages/torch/nn/modules/linear.py", 100),
        (3, "step", "/site-packages/torch/optim/sgd.py", 80),
        (4, "backward", "/site-packages/torch/_tensor.py", 580),
    ];
    for (id, name, filename, line) in python {
        add(Definition::Frame { id: FrameId(id), name, qualname: name, filename, line, first_line: 1 });
    }
    add(Definition::Module { id: ModuleId(1), path: "/nowhere/libnccl.so.2", build_id: "00ff" });
    add(Definition::NativeFrame { id: FrameId(5), module: ModuleId(1), address: 0x1234 });
    add(Definition::NativeFrame { id: FrameId(6), module: ModuleId::NONE, address: 0x7000_0000 });
    for (id, parent, frame) in [(1, 0, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (5, 1, 5), (6, 5, 6)] {
        add(Definition::Stack { id: StackId(id), parent: StackId(parent), frame: FrameId(frame) });
    }
    add(Definition::Context { id: ContextId(1), node: "AddmmBackward0", forward: StackId(2), module: ContextId::NONE });
    add(Definition::Thread { id: ThreadId(1), tid: 7, name: "python" });
    add(Definition::Thread { id: ThreadId(2), tid: 8, name: "pt_autograd_0" });
    add(Definition::Pool { id: 1, pool: (0, 7) });
    for ordinal in [0, 1] {
        add(Definition::Device { ordinal, name: "H200", total: 1 << 37, used_before: 5 * MIB, pci: "0000:01:00.0" });
    }
    add(Definition::Rank { rank: 0, size: 1 });
    add(Definition::Notice { topic: "torch.tracker", text: "attached", status: NoticeStatus::Works });
    bytes
}

/// A segment for each device; three steps of forward, backward and optimizer; CUDA calls; an out-of-memory error at the
/// end.
pub(crate) fn events() -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let mut add = |e: Event| {
        let seq = events.len() as u64 + 1;
        events.push(Event { seq, ticks: seq * 700, thread: ThreadId(1 + (e.context.0 & 1)), ..e });
    };
    let block = |action, index: u64, stack| Event {
        action,
        addr: (1 << 40) + index * MIB,
        size: MIB - 100,
        slack: if action == Action::Alloc { 100 } else { 0 },
        flags: if action == Action::Alloc { Flags::SLACK_KNOWN } else { Flags(0) },
        stack: StackId(stack),
        device: 0,
        ..Event::EMPTY
    };
    let segment = |action, device: i16, size| Event {
        action,
        addr: (1 + device as u64) << 40,
        size,
        device,
        stack: StackId(2),
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
        stack: StackId(6),
        ..Event::EMPTY
    };
    add(call(Api::cuMemAlloc_v2, Action::Alloc, 1 << 40, 64 * MIB, 0));
    add(segment(Action::SegmentAlloc, 0, 64 * MIB));
    add(segment(Action::SegmentAlloc, 1, 2 * MIB));
    add(Event { pool: 1, ..segment(Action::SegmentMap, 0, 4 * MIB) });
    for step in 0..3 {
        add(block(Action::Alloc, 0, 2));
        add(block(Action::Alloc, 1, 2));
        let backward = Event {
            context: ContextId(1),
            flags: Flags::IN_BACKWARD.with(Flags::SLACK_KNOWN),
            ..block(Action::Alloc, 2, 4)
        };
        let freed = Event { flags: Flags::IN_BACKWARD, slack: 0, ..backward };
        add(backward);
        add(Event { action: Action::FreeRequested, ..freed });
        add(Event { action: Action::FreeCompleted, ..freed });
        if step == 0 {
            add(block(Action::Alloc, 3, 3));
        }
        for index in [0, 1] {
            add(block(Action::FreeRequested, index, 1));
            add(block(Action::FreeCompleted, index, 1));
        }
        add(call(Api::cuMemCreate, Action::Alloc, 100 + step, 2 * MIB, 0));
        add(call(Api::cuMemAlloc_v2, Action::Alloc, 0, 900 * MIB, 2));
    }
    add(call(Api::cuMemAddressReserve, Action::Reserve, 5 << 40, 64 * MIB, 0));
    add(Event { stream: 100, ..call(Api::cuMemMap, Action::Map, 5 << 40, 2 * MIB, 0) });
    add(call(Api::cuMemUnmap, Action::Unmap, 5 << 40, 2 * MIB, 0));
    add(call(Api::cuMemAddressFree, Action::Unreserve, 5 << 40, 64 * MIB, 0));
    add(call(Api::cuMemFree_v2, Action::FreeCompleted, 1 << 41, 0, 1));
    add(Event { addr: 4, ..call(Api::cuMemFree_v2, Action::Retract, 0, 0, 1) });
    add(Event { source: Source::TorchCpu, device: -1, ..block(Action::Alloc, 70, 1) });
    add(Event { source: Source::TorchReporter, ..block(Action::Alloc, 71, 1) });
    add(Event { action: Action::Totals, addr: MIB, size: 64 * MIB, device: 0, ..Event::EMPTY });
    add(Event { action: Action::Snapshot, size: MIB, device: 0, ..Event::EMPTY });
    add(Event { action: Action::Oom, addr: 900 * MIB, size: 4096 * MIB, stack: StackId(2), device: 0, ..Event::EMPTY });
    add(segment(Action::SegmentUnmap, 0, 4 * MIB));
    add(segment(Action::SegmentFree, 1, 2 * MIB));
    events
}

/// The file, with `per_block` events in each block.
pub(crate) fn trace(per_block: usize) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), INFO).unwrap();
    writer.definition(&definitions()).unwrap();
    writer.clock(ClockPoint { ticks: 0, monotonic_ns: 0, realtime_ns: 1_700_000_000_000_000_000 }).unwrap();
    for part in events().chunks(per_block) {
        for event in part {
            writer.event(event).unwrap();
        }
        writer.flush().unwrap();
    }
    let mut counters = [0; COUNTER_SLOTS];
    counters[Counter::RingWaits as usize] = 3;
    writer.counters(&counters).unwrap();
    writer.clock(ClockPoint { ticks: 70_000, monotonic_ns: 35_000, realtime_ns: 1_700_000_000_000_035_000 }).unwrap();
    writer.finish(&End { wait_status: Some(256), reason: "exited".into(), ..End::default() }).unwrap()
}
