//! A sound trace of a process that uses a device beside PyTorch: its PCI bus id, readings of the memory in use, and
//! memory of PyTorch, cuBLAS, JAX and CuPy.

use memtrace_trace::api::Api;
use memtrace_trace::clock::ClockPoint;
use memtrace_trace::definition::Definition;
use memtrace_trace::event::{Action, Event, Flags, Source, UsageOccasion};
use memtrace_trace::file::{End, Writer};
use memtrace_trace::ids::ModuleId;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 1000 * MIB;
/// The time of the first event, in nanoseconds since the Unix epoch. Each event follows a millisecond after the one
/// before.
const START_NS: u64 = 1_000_000_000;

/// The trace of the process 7.
pub fn device_trace() -> Vec<u8> {
    let mut definitions = Vec::new();
    let libraries =
        ["libcublas.so.13", "jax_plugins/xla_cuda13/xla_cuda_plugin.so", "cupy_backends/cuda/api/runtime.so"];
    for (id, library) in (1..).zip(libraries) {
        let path = format!("/env/site-packages/{library}");
        Definition::Module { id: ModuleId(id), path: &path, build_id: "" }.encode(&mut definitions);
    }
    let (name, pci) = ("NVIDIA H100 80GB HBM3", "0000:17:00.0");
    Definition::Device { ordinal: 0, name, total: TOTAL, used_before: 300 * MIB, pci }.encode(&mut definitions);
    let mut writer = Writer::new(Vec::new(), r#"{"pid":7,"exe":"/usr/bin/python3"}"#).expect("memory");
    writer.definition(&definitions).expect("memory");
    for seq in [0, 1000] {
        let ticks = seq * 1_000_000;
        let point = ClockPoint { ticks, monotonic_ns: ticks, realtime_ns: START_NS + ticks };
        writer.clock(point).expect("memory");
    }
    for (seq, event) in (1..).zip(events()) {
        writer.event(&Event { seq, ticks: seq * 1_000_000, device: 0, ..event }).expect("memory");
    }
    writer.finish(&End { reason: "exited".into(), ..End::default() }).expect("memory")
}

fn events() -> Vec<Event> {
    let driver = |module, addr, size| Event {
        source: Source::Driver,
        action: Action::Alloc,
        api: Api::cuMemAlloc_v2,
        module: ModuleId(module),
        addr,
        size,
        ..Event::EMPTY
    };
    let torch = |action, addr, size| Event { action, addr, size, flags: Flags::SLACK_KNOWN, ..Event::EMPTY };
    let reading = |occasion: UsageOccasion, used: u64| Event {
        action: Action::DeviceUsage,
        stream: occasion as u64,
        ..driver(1, TOTAL - used, TOTAL)
    };
    vec![
        reading(UsageOccasion::ContextCreated, 300 * MIB),
        Event { flags: Flags::IN_ALLOCATOR, ..driver(0, 1 << 30, 20 * MIB) },
        torch(Action::SegmentAlloc, 1 << 30, 20 * MIB),
        reading(UsageOccasion::Allocated, 320 * MIB),
        torch(Action::Alloc, 1 << 30, 18 * MIB),
        driver(1, 3 << 30, 64 * MIB),
        driver(2, 4 << 30, 100 * MIB),
        driver(3, 5 << 30, 129 << 10),
        reading(UsageOccasion::CodeLoaded, 600 * MIB),
        torch(Action::FreeRequested, 1 << 30, 18 * MIB),
        torch(Action::FreeCompleted, 1 << 30, 18 * MIB),
    ]
}
