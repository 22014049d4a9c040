//! Recordings of CUDA calls without PyTorch: the accounting of physical memory, and snapshots in which every allocation
//! is a segment.

use std::path::Path;

use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::load::{Manifest, MemoryRecording, Process};
use memtrace_analysis::model::{EventSource, MemoryLocation, Owner, PhysicalMemory};
use memtrace_analysis::report::ProcessSummary;
use memtrace_analysis::{Run, summarize};
use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Definitions, Module};
use memtrace_trace::ids::ModuleId;

const MIB: u64 = 1 << 20;

fn call(seq: u64, api: Api, action: Action, addr: u64, size: u64) -> Event {
    Event {
        seq,
        ticks: seq * 1000,
        source: api.source().unwrap(),
        action,
        addr,
        size,
        api,
        device: 0,
        module: ModuleId(1),
        ..Event::EMPTY
    }
}

fn replayed(events: &[Event]) -> PhysicalMemory {
    let mut physical = PhysicalMemory::default();
    for e in events {
        physical.apply(e);
    }
    physical
}

#[test]
fn nested_calls_count_once_and_belong_to_the_outer_caller() {
    let driver = call(1, Api::cuMemAlloc_v2, Action::Alloc, 4096, MIB);
    let runtime = call(2, Api::cudaMalloc, Action::Alloc, 4096, MIB);
    let events = [
        Event { flags: Flags::NESTED, module: ModuleId(9), ..driver },
        Event { flags: Flags::HAS_NESTED, ..runtime },
        // A free is recorded before it is made, so the outer call comes first.
        call(3, Api::cudaFree, Action::FreeCompleted, 4096, 0),
        Event { flags: Flags::NESTED, ..call(4, Api::cuMemFree_v2, Action::FreeCompleted, 4096, 0) },
    ];
    let physical = replayed(&events[..2]);
    assert_eq!(physical.total(MemoryLocation::Device(0)).current, MIB);
    assert_eq!(physical.usage_by_owner()[&(MemoryLocation::Device(0), Owner::Module(ModuleId(1)))].current, MIB);
    assert_eq!(physical.usage_by_owner()[&(MemoryLocation::Device(0), Owner::Module(ModuleId(9)))].current, 0);
    let freed = replayed(&events);
    assert_eq!((freed.total(MemoryLocation::Device(0)).current, freed.total(MemoryLocation::Device(0)).peak), (0, MIB));
    assert_eq!(freed.unmatched_frees(), 0);
}

#[test]
fn a_retained_handle_is_released_twice() {
    let handle = 77;
    let events = [
        call(1, Api::cuMemCreate, Action::Alloc, handle, 2 * MIB),
        // NCCL frees memory this way: it asks for the handle of an address.
        call(2, Api::cuMemRetainAllocationHandle, Action::Alloc, handle, 0),
        call(3, Api::cuMemRelease, Action::FreeCompleted, handle, 0),
        call(4, Api::cuMemRelease, Action::FreeCompleted, handle, 0),
    ];
    assert_eq!(replayed(&events[..3]).total(MemoryLocation::Device(0)).current, 2 * MIB);
    let released = replayed(&events);
    assert_eq!((released.total(MemoryLocation::Device(0)).current, released.unmatched_frees()), (0, 0));
}

#[test]
fn memory_of_another_process_is_counted_where_it_is_opened() {
    let opened = call(2, Api::cudaIpcOpenMemHandle, Action::Alloc, 4096, MIB);
    let closed = call(6, Api::cudaIpcCloseMemHandle, Action::FreeCompleted, 4096, 0);
    let events = [
        Event { flags: Flags::NESTED, ..call(1, Api::cuIpcOpenMemHandle_v2, Action::Alloc, 4096, MIB) },
        Event { flags: Flags::HAS_NESTED, ..opened },
        call(3, Api::cuMemImportFromShareableHandle, Action::Alloc, 77, 0),
        Event { stream: 77, ..call(4, Api::cuMemMap, Action::Map, 1 << 30, 2 * MIB) },
        call(5, Api::cuMemRelease, Action::FreeCompleted, 77, 0),
        closed,
        Event { flags: Flags::NESTED, ..call(7, Api::cuIpcCloseMemHandle, Action::FreeCompleted, 4096, 0) },
        call(8, Api::cuMemUnmap, Action::Unmap, 1 << 30, 2 * MIB),
    ];
    let imported = |events: &[Event]| {
        let physical = replayed(events);
        assert_eq!((physical.total(MemoryLocation::Device(0)).peak, physical.unmatched_frees()), (0, 0));
        physical.total(MemoryLocation::Imported(0)).current / MIB
    };
    assert_eq!([2, 4, 5, 6, 7, 8].map(|n| imported(&events[..n])), [1, 3, 3, 2, 2, 0]);
}

#[test]
fn failed_and_retracted_calls_are_not_counted() {
    let alloc = call(1, Api::cuMemAlloc_v2, Action::Alloc, 4096, MIB);
    let free = call(3, Api::cuMemFree_v2, Action::FreeCompleted, 4096, 0);
    let retract = Event { addr: free.seq, action: Action::Retract, result: 1, ..free };
    let failed = Event { result: 2, addr: 0, ..call(2, Api::cuMemAlloc_v2, Action::Alloc, 0, 9 * MIB) };
    let physical = replayed(&[alloc, failed, free, retract]);
    assert_eq!(physical.total(MemoryLocation::Device(0)).current, MIB);
    assert_eq!(physical.failed_calls(), 1);
}

#[test]
fn physical_memory_is_freed_when_it_is_released_and_unmapped() {
    let handle = 77;
    let events = [
        call(1, Api::cuMemCreate, Action::Alloc, handle, 2 * MIB),
        Event { stream: handle, ..call(2, Api::cuMemMap, Action::Map, 1 << 30, 2 * MIB) },
        call(3, Api::cuMemRelease, Action::FreeCompleted, handle, 0),
        call(4, Api::cuMemUnmap, Action::Unmap, 1 << 30, 2 * MIB),
    ];
    for (count, bytes) in [(1, 2 * MIB), (2, 2 * MIB), (3, 2 * MIB), (4, 0)] {
        assert_eq!(replayed(&events[..count]).total(MemoryLocation::Device(0)).current, bytes, "after {count} calls");
    }
}

#[test]
fn pinned_memory_is_counted_as_host_memory() {
    let pinned = Event { device: -1, ..call(1, Api::cudaHostAlloc, Action::Alloc, 4096, MIB) };
    let physical = replayed(&[pinned]);
    assert_eq!(
        (physical.total(MemoryLocation::Host).current, physical.total(MemoryLocation::Device(0)).current),
        (MIB, 0)
    );
}

fn process() -> Process {
    let nccl = Module { path: "/opt/lib/libnccl.so.2".into(), ..Module::default() };
    let modules = vec![Module::default(), nccl];
    let definitions = Definitions { modules, ..Definitions::default() };
    let events = vec![
        call(1, Api::cuMemAlloc_v2, Action::Alloc, 1 << 30, 3 * MIB),
        call(2, Api::cuMemCreate, Action::Alloc, 77, 2 * MIB),
        call(3, Api::cuMemAlloc_v2, Action::Alloc, 2 << 30, MIB),
        call(4, Api::cuMemFree_v2, Action::FreeCompleted, 2 << 30, 0),
    ];
    let recording = MemoryRecording { definitions, events, info: r#"{"pid":7}"#.into(), ..MemoryRecording::default() };
    Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default())
}

#[test]
fn a_device_without_pytorch_is_replayed_from_its_cuda_calls() {
    let process = process();
    assert_eq!(process.trace_index().sources[&0], EventSource::CudaCalls);
    let mut bytes = Vec::new();
    let report = snapshot(&process, &mut bytes, &SnapshotOptions::default(), &mut |_| {}).unwrap();
    // Each allocation has its segment. The free has a request, a completion and its segment.
    assert_eq!((report.events, report.segments), (3 * 2 + 3, 2));
    assert_eq!(report.bytes, bytes.len() as u64);
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![process]);
    let summary = summarize(&run, &mut |_| {}).unwrap();
    let device = &summary.processes[0].devices[0];
    assert_eq!((device.source.as_str(), device.highest.allocated_bytes), ("cuda_calls", 6 * MIB));
    assert_eq!((device.owners[0].owner.as_str(), device.owners[0].end_bytes), ("NCCL", 5 * MIB));
    assert!(summary.losses.is_empty(), "{:?}", summary.losses);
}

#[test]
fn cuda_calls_of_the_caching_allocator_are_not_counted_twice() {
    let mut events =
        vec![Event { flags: Flags::IN_ALLOCATOR, ..call(1, Api::cuMemAlloc_v2, Action::Alloc, 1 << 30, 2 * MIB) }];
    let torch = Event { device: 0, source: Source::Torch, addr: 1 << 30, ..Event::EMPTY };
    events.push(Event { seq: 2, action: Action::SegmentAlloc, size: 2 * MIB, ..torch });
    events.push(Event { seq: 3, action: Action::Alloc, size: 512, ..torch });
    let recording = MemoryRecording { events, ..MemoryRecording::default() };
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default());
    assert_eq!(process.trace_index().sources[&0], EventSource::Torch);
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![process]);
    let device = &summarize(&run, &mut |_| {}).unwrap().processes[0].devices[0];
    assert_eq!((device.highest.allocated_bytes, device.highest.reserved_bytes), (512, 2 * MIB));
    assert_eq!(device.owners[0].owner, "PyTorch's caching allocator");
}

fn one_device(events: Vec<Event>) -> ProcessSummary {
    let recording = MemoryRecording { events, info: r#"{"pid":7}"#.into(), ..MemoryRecording::default() };
    let process = Process::new(Path::new("7.mtr"), Box::new(recording), &Manifest::default());
    let run = Run::from_processes(Path::new("run"), Manifest::default(), vec![process]);
    summarize(&run, &mut |_| {}).unwrap().processes.remove(0)
}

#[test]
fn the_reserved_memory_of_a_pool_is_the_reported_one() {
    let pool = 0x77;
    let alloc = |seq, addr, size| call(seq, Api::cuMemAllocAsync, Action::Alloc, addr, size);
    let totals =
        |seq, used, reserved| Event { stream: pool, ..call(seq, Api::cuMemAllocAsync, Action::Totals, used, reserved) };
    let events = vec![
        alloc(1, 1 << 30, 5 * MIB),
        totals(2, 5 * MIB, 32 * MIB),
        alloc(3, 2 << 30, 20 * MIB),
        call(4, Api::cuMemFreeAsync, Action::FreeCompleted, 1 << 30, 0),
        alloc(5, 3 << 30, 10 * MIB),
        alloc(6, 4 << 30, 4 * MIB),
        totals(7, 34 * MIB, 64 * MIB),
        call(8, Api::cuMemFreeAsync, Action::FreeCompleted, 2 << 30, 0),
        // The pool is trimmed.
        totals(9, 14 * MIB, 16 * MIB),
        // An allocation outside the pool.
        call(10, Api::cuMemAlloc_v2, Action::Alloc, 5 << 30, MIB),
    ];
    let summary = one_device(events);
    let device = &summary.devices[0];
    assert_eq!((device.highest.allocated_bytes, device.highest.reserved_bytes), (34 * MIB, 64 * MIB));
    let end = &device.end.as_ref().unwrap().totals;
    assert_eq!((end.allocated_bytes, end.reserved_bytes), (15 * MIB, 17 * MIB));
    assert!(summary.losses.is_empty(), "{:?}", summary.losses);
}

#[test]
fn segments_belong_to_the_caching_allocator_that_reported_them() {
    let torch =
        |seq, action, addr, size| Event { seq, action, addr, size, device: 0, source: Source::Torch, ..Event::EMPTY };
    let events = vec![
        call(1, Api::cuMemAlloc_v2, Action::Alloc, 1 << 30, 3 * MIB),
        call(2, Api::cuMemAlloc_v2, Action::Alloc, 2 << 30, 20 * MIB),
        torch(3, Action::SegmentAlloc, 2 << 30, 20 * MIB),
        torch(4, Action::Alloc, 2 << 30, 512),
        call(5, Api::cuMemAlloc_v2, Action::Alloc, 3 << 30, MIB),
    ];
    let summary = one_device(events);
    let owners: Vec<_> = summary.devices[0].owners.iter().map(|o| (o.peak_bytes, o.end_bytes, o.allocations)).collect();
    assert_eq!(owners, [(20 * MIB, 20 * MIB, 1), (4 * MIB, 4 * MIB, 2)]);
}
