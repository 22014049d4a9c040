//! The whole memory of a device, divided by what uses it: hand-made readings, allocations and samples of NVML.

use std::path::Path;

use memtrace_analysis::load::{
    DeviceSamples, DeviceSamplesLine, Manifest, MemoryRecording, Process, SampledProcess, SimulatedGpus,
    UnrecordableProcess, Workload,
};
use memtrace_analysis::report::{
    DeviceBreakdown, DeviceMemorySummary, DevicePartKind, OtherProcesses, Section, TextOptions, section_text,
};
use memtrace_analysis::{Run, Summary, summarize};
use memtrace_trace::api::Api;
use memtrace_trace::event::{Action, Event, Flags, Source, UsageOccasion};
use memtrace_trace::file::{Definitions, Device, Module};
use memtrace_trace::ids::ModuleId;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 1000 * MIB;

fn call(seq: u64, api: Api, addr: u64, size: u64) -> Event {
    Event {
        seq,
        ticks: seq * 1000,
        source: api.source().unwrap(),
        action: if api.frees() { Action::FreeCompleted } else { Action::Alloc },
        addr,
        size,
        api,
        device: 0,
        module: ModuleId(1),
        ..Event::EMPTY
    }
}

fn reading(seq: u64, occasion: UsageOccasion, used: u64) -> Event {
    let action = Action::DeviceUsage;
    Event { action, stream: occasion as u64, ..call(seq, Api::cuMemAlloc_v2, TOTAL - used, TOTAL) }
}

fn torch(seq: u64, action: Action, addr: u64, size: u64) -> Event {
    Event { seq, ticks: seq * 1000, action, addr, size, device: 0, flags: Flags::SLACK_KNOWN, ..Event::EMPTY }
}

/// A process with a context of 300 MiB, 40 MiB of PyTorch's segments, cuBLAS, and kernels that are loaded on the way.
fn events() -> Vec<Event> {
    let segment = |seq, addr, size| {
        let nested = Event { flags: Flags::IN_ALLOCATOR, ..call(seq, Api::cuMemAlloc_v2, addr, size) };
        [nested, torch(seq + 1, Action::SegmentAlloc, addr, size)]
    };
    let mut events = segment(1, 1 << 30, 20 * MIB).to_vec();
    events.extend([
        reading(3, UsageOccasion::ContextCreated, 300 * MIB),
        reading(4, UsageOccasion::Allocated, 320 * MIB),
        torch(5, Action::Alloc, 1 << 30, 18 * MIB),
    ]);
    events.extend(segment(6, 2 << 30, 20 * MIB));
    events.extend([
        torch(8, Action::Alloc, 2 << 30, 19 * MIB),
        call(9, Api::cuMemAlloc_v2, 3 << 30, 64 * MIB),
        call(10, Api::cuMemAlloc_v2, 4 << 30, 129 << 10),
        Event { action: Action::Alloc, device: -1, ..call(11, Api::cuMemHostAlloc, 5 << 30, 7 * MIB) },
        // 92 MiB of kernels were loaded meanwhile.
        reading(12, UsageOccasion::Allocated, (300 + 40 + 66 + 92) * MIB),
        torch(13, Action::FreeRequested, 2 << 30, 19 * MIB),
        torch(14, Action::FreeCompleted, 2 << 30, 19 * MIB),
        call(15, Api::cuMemAlloc_v2, 6 << 30, 10 * MIB),
        call(16, Api::cuMemFree_v2, 6 << 30, 0),
        call(17, Api::cuMemFree_v2, 3 << 30, 0),
    ]);
    events
}

fn process(events: Vec<Event>, pid: u32, manifest: &Manifest) -> Process {
    let module = Module { path: "/opt/lib/libcublas.so.13".into(), ..Module::default() };
    let device = Device { name: "H200".into(), total: TOTAL, used_before: 300 * MIB, pci: "0000:17:00.0".into() };
    let definitions = Definitions {
        modules: vec![Module::default(), module],
        devices: [(0, device)].into(),
        ..Definitions::default()
    };
    let info = format!(r#"{{"pid":{pid}}}"#);
    let recording = MemoryRecording { definitions, events, info, ..MemoryRecording::default() };
    Process::new(Path::new(&format!("{pid}.mtr")), Box::new(recording), manifest)
}

fn run(events: Vec<Event>, samples: Vec<DeviceSamplesLine>) -> Run {
    let process = process(events, 7, &Manifest::default());
    Run::from_processes(Path::new("run"), Manifest::default(), vec![process])
        .with_device_samples(DeviceSamples::of(samples))
}

fn summary(samples: Vec<DeviceSamplesLine>) -> Summary {
    summarize(&run(events(), samples), &mut |_| {}).unwrap()
}

#[track_caller]
fn memory(summary: &Summary) -> &DeviceMemorySummary {
    let memory = summary.processes[0].devices[0].device_memory.as_ref().expect("the memory of the device");
    for state in [Some(&memory.at_peak), memory.at_allocated_peak.as_ref(), Some(&memory.at_end)].into_iter().flatten()
    {
        let sum: u64 = state.parts.iter().map(|part| part.bytes).sum();
        assert_eq!(sum, state.used_bytes, "{state:?}");
        assert_eq!(state.parts.last().map(|part| part.kind), Some(DevicePartKind::Unattributed));
    }
    memory
}

/// The parts that are not empty, in KiB.
fn parts(state: &DeviceBreakdown) -> Vec<(&str, u64)> {
    state.parts.iter().filter(|part| part.bytes > 0).map(|part| (part.name.as_str(), part.bytes >> 10)).collect()
}

/// Samples from before the run: another process uses 100 MiB of the context's 300, and NVML lists 8 MiB for no process.
fn samples(of_own: Option<u64>, other_later: u64) -> Vec<DeviceSamplesLine> {
    let other = |bytes| SampledProcess { pid: 4242, bytes: Some(bytes), ..SampledProcess::default() };
    let own = of_own.map(|bytes| SampledProcess { pid: 7, bytes: Some(bytes), ..SampledProcess::default() });
    let later: u64 = other_later + of_own.unwrap_or(0);
    vec![
        DeviceSamplesLine::Device {
            index: 1,
            pci: "00000000:17:00.0".to_owned(),
            name: String::new(),
            total_bytes: TOTAL,
            reserved_bytes: MIB,
            is_divided: false,
        },
        DeviceSamplesLine::Process { pid: 4242, name: "vllm".to_owned(), workload: Workload::default() },
        DeviceSamplesLine::Sample { time_ns: 0, device: 1, used_bytes: 108 * MIB, processes: vec![other(100 * MIB)] },
        DeviceSamplesLine::Sample {
            time_ns: 11_500,
            device: 1,
            used_bytes: later,
            processes: own.into_iter().chain([other(other_later)]).collect(),
        },
    ]
}

#[test]
fn without_samples_of_nvml_other_processes_are_part_of_the_context() {
    let summary = summary(Vec::new());
    let memory = memory(&summary);
    assert_eq!((memory.readings, memory.other_processes), (2, OtherProcesses::Unknown));
    // The peak is no reading: 10 MiB were allocated after the last one.
    assert_eq!((memory.at_peak.used_bytes, memory.at_peak.seq, memory.at_peak.is_reading), (508 * MIB, 15, false));
    let expected = [
        ("CUDA context and other processes", 300 << 10),
        ("cuBLAS", (74 << 10) + 129),
        ("PyTorch cached", 22 << 10),
        ("PyTorch allocated", 18 << 10),
        ("rounding to the driver's pages", 2048 - 129),
        ("unattributed", 92 << 10),
    ];
    assert_eq!(parts(&memory.at_peak), expected);
    assert_eq!(memory.at_peak.pinned_host_bytes, 7 * MIB);
    let at_allocated_peak = memory.at_allocated_peak.as_ref().unwrap();
    assert_eq!((at_allocated_peak.seq, at_allocated_peak.used_bytes), (8, 340 * MIB));
    assert_eq!(memory.at_end.used_bytes, (300 + 40 + 2 + 92) * MIB);
    let points: Vec<_> = memory.over_time.iter().map(|point| (point.seq, point.used_bytes / MIB)).collect();
    assert_eq!(points, [(4, 320), (12, 498)]);
    let last = memory.over_time.last().unwrap();
    let [pytorch, libraries] = [last.pytorch_reserved_bytes, last.libraries_bytes].map(|bytes| bytes / MIB);
    assert_eq!((pytorch, libraries, last.beyond_allocations_bytes / MIB), (40, 66, 392));
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(text.contains("Most memory in use: 508 MiB of 0.98 GiB (51 %), as nvidia-smi shows it"), "{text}");
    assert!(text.contains("other processes are not separated"), "{text}");
}

#[test]
fn samples_of_nvml_separate_other_processes() {
    let summary = summary(samples(Some(390 * MIB), 100 * MIB));
    let memory = memory(&summary);
    assert_eq!((memory.other_processes, memory.nvml_process_peak_bytes), (OtherProcesses::Steady, Some(390 * MIB)));
    let expected = [
        ("CUDA context", 192 << 10),
        ("vllm", 100 << 10),
        ("kernels and other memory of the driver", 92 << 10),
        ("cuBLAS", (74 << 10) + 129),
        ("PyTorch cached", 22 << 10),
        ("PyTorch allocated", 18 << 10),
        ("in use before by no listed process", 8 << 10),
        ("rounding to the driver's pages", 2048 - 129),
    ];
    assert_eq!(parts(&memory.at_peak), expected);
    let other = memory.at_peak.parts.iter().find(|part| part.kind == DevicePartKind::OtherProcess).unwrap();
    assert_eq!(other.pid, Some(4242));
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(text.contains("100 MiB   20 %  vllm (process 4242)"), "{text}");
    assert!(text.contains("at most 390 MiB for this process"), "{text}");
}

#[test]
fn other_processes_have_their_pods_and_are_clients_of_mps() {
    let mut samples = samples(Some(390 * MIB), 100 * MIB);
    for line in &mut samples {
        match line {
            DeviceSamplesLine::Process { workload, .. } => {
                workload.pod = Some("trainer-7f".to_owned());
                workload.user = Some("root".to_owned());
            }
            DeviceSamplesLine::Sample { processes, .. } => processes.iter_mut().for_each(|one| one.is_mps = true),
            _ => {}
        }
    }
    let summary = summary(samples);
    let other = memory(&summary).at_peak.parts.iter().find(|part| part.kind == DevicePartKind::OtherProcess).unwrap();
    assert_eq!(other.workload.as_ref().unwrap().pod.as_deref(), Some("trainer-7f"));
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(text.contains("100 MiB   20 %  vllm (process 4242, pod trainer-7f, MPS client)"), "{text}");
}

/// The samples of a device that is divided, on which the other process and this one run in these instances.
fn divided(other: Option<u32>, own: Option<u32>) -> Vec<DeviceSamplesLine> {
    let mut samples = samples(Some(390 * MIB), 100 * MIB);
    for line in &mut samples {
        match line {
            DeviceSamplesLine::Device { is_divided, .. } => *is_divided = true,
            DeviceSamplesLine::Sample { processes, .. } => {
                processes.iter_mut().for_each(|one| one.gpu_instance = if one.pid == 7 { own } else { other });
            }
            _ => {}
        }
    }
    samples
}

#[test]
fn processes_of_other_instances_use_other_memory() {
    let summary = summary(divided(Some(2), Some(1)));
    let memory = memory(&summary);
    assert_eq!(memory.other_processes, OtherProcesses::Steady);
    let found = parts(&memory.at_peak);
    // The context is all that was in use before: neither the other process nor what NVML lists for none is in it.
    assert!(found.contains(&("CUDA context", 300 << 10)) && !found.iter().any(|part| part.0 == "vllm"), "{found:?}");
}

#[test]
fn processes_of_the_same_instance_share_its_memory() {
    let summary = summary(divided(Some(1), Some(1)));
    let found = parts(&memory(&summary).at_peak);
    assert!(found.contains(&("vllm", 100 << 10)) && found.contains(&("CUDA context", 200 << 10)), "{found:?}");
}

#[test]
fn an_unknown_instance_is_reported() {
    let summary = summary(divided(Some(1), None));
    assert_eq!(memory(&summary).other_processes, OtherProcesses::UnknownInstance);
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(text.contains("divided into instances (MIG)"), "{text}");
}

#[test]
fn a_later_context_is_apart_from_the_kernels_of_before() {
    let mut events = events();
    events.extend([
        // 166 MiB of kernels were loaded meanwhile.
        reading(18, UsageOccasion::ContextRequested, 600 * MIB),
        reading(19, UsageOccasion::ContextCreated, 850 * MIB),
    ]);
    let summary = summarize(&run(events, samples(Some(390 * MIB), 100 * MIB)), &mut |_| {}).unwrap();
    let memory = memory(&summary);
    let end = parts(&memory.at_end);
    assert!(end.contains(&("CUDA contexts", (192 + 250) << 10)), "{end:?}");
    assert!(end.contains(&("kernels and other memory of the driver", (92 + 166) << 10)), "{end:?}");
    assert_eq!(memory.at_peak.used_bytes, memory.at_end.used_bytes);
    // Before it was created.
    let then = parts(memory.at_allocated_peak.as_ref().unwrap());
    assert!(then.contains(&("CUDA context", 192 << 10)), "{then:?}");
}

#[test]
fn what_other_processes_take_later_is_not_this_process_s() {
    let summary = summary(samples(Some(390 * MIB), 150 * MIB));
    let memory = memory(&summary);
    assert_eq!(memory.other_processes, OtherProcesses::Changing);
    let found = parts(&memory.at_peak);
    assert!(found.contains(&("vllm", 150 << 10)) && found.contains(&("CUDA context", 192 << 10)), "{found:?}");
    assert!(found.contains(&("kernels and other memory of the driver", 42 << 10)), "{found:?}");
    // Before it grew.
    let then = parts(memory.at_allocated_peak.as_ref().unwrap());
    assert!(then.contains(&("vllm", 100 << 10)), "{then:?}");
}

#[test]
fn in_a_container_the_processes_of_the_first_sample_are_the_others() {
    let mut samples = samples(None, 100 * MIB);
    if let Some(DeviceSamplesLine::Sample { processes, .. }) = samples.last_mut() {
        // This process by the pid that it has outside.
        processes.push(SampledProcess { pid: 99_007, bytes: Some(390 * MIB), ..SampledProcess::default() });
    }
    let summary = summary(samples);
    let memory = memory(&summary);
    assert_eq!(memory.other_processes, OtherProcesses::OtherPids);
    let found = parts(&memory.at_peak);
    assert!(found.contains(&("a process", 100 << 10)) && found.contains(&("CUDA context", 192 << 10)), "{found:?}");
}

#[test]
fn a_process_that_ends_before_a_sample_lists_it_is_no_container_s() {
    // The only other sample is from after the last event, at 17,000.
    let mut samples = samples(None, 100 * MIB);
    if let Some(DeviceSamplesLine::Sample { time_ns, .. }) = samples.last_mut() {
        *time_ns = 20_000;
    }
    let summary = summary(samples);
    let memory = memory(&summary);
    assert_eq!(memory.other_processes, OtherProcesses::Steady);
    assert!(parts(&memory.at_peak).contains(&("vllm", 100 << 10)));
}

#[test]
fn samples_can_claim_more_than_fits_into_a_number() {
    let mut samples = samples(Some(390 * MIB), 100 * MIB);
    for sample in &mut samples {
        if let DeviceSamplesLine::Sample { processes, .. } = sample {
            processes.extend([4243, 4244].map(|pid| SampledProcess {
                pid,
                bytes: Some(u64::MAX),
                ..SampledProcess::default()
            }));
        }
    }
    let summary = summary(samples);
    // Never more than the memory in use: `memory` compares the sums.
    assert!(memory(&summary).at_peak.used_bytes <= TOTAL);
}

#[test]
fn samples_that_begin_too_late_separate_nothing() {
    let mut late = samples(Some(390 * MIB), 100 * MIB);
    late.remove(2);
    assert_eq!(memory(&summary(late)).other_processes, OtherProcesses::Unknown);
}

#[test]
fn a_simulated_device_of_one_process_has_no_other_processes() {
    let simulated = |pids: &[u32], uses_cuda: bool| {
        let unrecordable = UnrecordableProcess { uses_cuda, ..UnrecordableProcess::default() };
        let manifest = Manifest {
            simulated: Some(SimulatedGpus { count: 1, ..SimulatedGpus::default() }),
            unrecordable: vec![unrecordable],
            ..Manifest::default()
        };
        let processes = pids.iter().map(|pid| process(events(), *pid, &manifest)).collect();
        // Samples are of the machine's GPUs, which a dry run does not use.
        let run = Run::from_processes(Path::new("run"), manifest, processes)
            .with_device_samples(DeviceSamples::of(samples(Some(390 * MIB), 100 * MIB)));
        summarize(&run, &mut |_| {}).unwrap()
    };
    let summary = simulated(&[7], false);
    let memory = memory(&summary);
    assert_eq!(memory.other_processes, OtherProcesses::None);
    let expected = [
        ("CUDA context", 300 << 10),
        ("kernels and other memory of the driver", 92 << 10),
        ("cuBLAS", (74 << 10) + 129),
        ("PyTorch cached", 22 << 10),
        ("PyTorch allocated", 18 << 10),
        ("rounding to the driver's pages", 2048 - 129),
    ];
    assert_eq!(parts(&memory.at_peak), expected);
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(!text.contains("other processes") && !text.contains("NVML"), "{text}");
    for shared in [simulated(&[7, 8], false), simulated(&[7], true)] {
        let memory = shared.processes[0].devices[0].device_memory.as_ref().unwrap();
        assert_ne!(memory.other_processes, OtherProcesses::None);
    }
}

#[test]
fn managed_memory_and_more_allocations_than_memory_in_use_do_not_break_the_sum() {
    let mut events = events();
    events.extend([
        call(18, Api::cuMemAllocManaged, 7 << 30, 900 * MIB),
        call(19, Api::cuMemAlloc_v2, 8 << 30, 50 * MIB),
        // Another thread has freed most of it, and its event follows.
        reading(20, UsageOccasion::Scan, 60 * MIB),
    ]);
    let summary = summarize(&run(events, samples(Some(390 * MIB), 100 * MIB)), &mut |_| {}).unwrap();
    let end = &memory(&summary).at_end;
    assert_eq!((end.managed_bytes, end.used_bytes), (900 * MIB, (40 + 50 + 2) * MIB));
}

#[test]
fn recordings_without_readings_say_so() {
    let events = events().into_iter().filter(|e| e.action != Action::DeviceUsage).collect();
    let summary = summarize(&run(events, samples(Some(1), 1)), &mut |_| {}).unwrap();
    assert_eq!(summary.processes[0].devices[0].device_memory, None);
    let text = section_text(&summary, Section::named("device").unwrap(), &TextOptions::default());
    assert!(text.contains("not known: the recording has no readings"), "{text}");
}

#[test]
fn many_readings_leave_a_bounded_series() {
    let mut events = events();
    events.extend((0..5000).map(|n| reading(18 + n, UsageOccasion::CodeLoaded, 500 * MIB)));
    let source = events.last().unwrap().source;
    assert_eq!(source, Source::Driver);
    let summary = summarize(&run(events, Vec::new()), &mut |_| {}).unwrap();
    let memory = memory(&summary);
    assert_eq!(memory.readings, 5002);
    assert!((128..=256).contains(&memory.over_time.len()), "{}", memory.over_time.len());
    assert!(memory.over_time.is_sorted_by_key(|point| point.seq));
}
