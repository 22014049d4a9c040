//! The whole memory of a device, as `nvidia-smi` shows it, divided by what uses it.
//!
//! Readings of the driver show the memory in use. The recording knows what this process has allocated, and NVML's
//! samples show other processes. The rest is the driver's own memory of this process.

use std::collections::BTreeMap;

use memtrace_input::load::{DeviceSample, DeviceSamples, SampledProcess, Workload};
use memtrace_insight::passes::{DeviceMemory, DeviceMemoryState};
use memtrace_replay::Owner;
use memtrace_trace::clock::Calibration;
use memtrace_trace::file::Definitions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::owners::{ROUNDING, UNUSED_POOLS, library_bytes};

/// The memory in use on a device, of all processes, and what uses it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeviceMemorySummary {
    /// The total bytes of the device that programs can use.
    pub total_bytes: u64,
    /// When the most memory was in use.
    pub at_peak: DeviceBreakdown,
    /// At the peak of allocated bytes of PyTorch's caching allocator. Absent if it came before the first reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_allocated_peak: Option<DeviceBreakdown>,
    /// At the end of the recording.
    pub at_end: DeviceBreakdown,
    /// The number of readings of the memory in use.
    pub readings: u64,
    /// The memory in use at readings, in the order of time: at most 256.
    pub over_time: Vec<DeviceMemoryPoint>,
    /// How other processes were separated from this one.
    pub other_processes: OtherProcesses,
    /// The highest figure of this process that NVML's samples show, in bytes, for comparison. The samples are a second
    /// apart. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvml_process_peak_bytes: Option<u64>,
}

/// How other processes on the device were separated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OtherProcesses {
    /// By NVML's figures. No other process has changed its memory between samples.
    Steady,
    /// By NVML's figures, which are up to a second old: other processes have changed their memory.
    Changing,
    /// NVML lists processes but not this one, as in a container. The processes of the first sample count as others.
    OtherPids,
    /// There are none: it is the simulated device of a dry run, and no other process of the run uses it.
    None,
    /// Not at all: the device is divided into instances (MIG), and NVML does not report in which one this process runs.
    UnknownInstance,
    /// Not at all: there are no samples of NVML from before the process used the device.
    Unknown,
}

/// The memory in use on a device at one point in time. The bytes of the parts add up to `used_bytes`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DeviceBreakdown {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The event number.
    pub seq: u64,
    /// The bytes in use, as `nvidia-smi` shows them: those of all processes and of the driver.
    pub used_bytes: u64,
    /// Whether the driver was asked at this event. Otherwise `used_bytes` is the latest reading and what this process
    /// has allocated and freed since.
    pub is_reading: bool,
    /// The users of the memory, most bytes first. `unattributed` comes last and is always present.
    pub parts: Vec<DevicePart>,
    /// Beside them: page-locked host memory of this process, in bytes.
    pub pinned_host_bytes: u64,
    /// Beside them: memory of other processes that this process has opened (CUDA IPC), in bytes. It counts for the
    /// process that allocated it.
    pub imported_bytes: u64,
    /// Beside them: managed memory of this process, in bytes. The part of it that is on the device counts as
    /// `unattributed` or as kernels.
    pub managed_bytes: u64,
}

/// A part of the memory in use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DevicePart {
    /// The kind of memory.
    pub kind: DevicePartKind,
    /// The name, for example `NCCL`, or that of the program of another process.
    pub name: String,
    /// The name in reports. That of another process has its id and its pod, job, container or user: `python3 (process
    /// 4711, pod trainer-7f)`.
    pub label: String,
    /// The bytes.
    pub bytes: u64,
    /// The process id, for another process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The pod, container, Slurm job and user of another process. Absent if they are unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Workload>,
    /// Whether NVML lists another process as a client of MPS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mps: bool,
}

impl DevicePart {
    /// A part of this process or of the driver.
    pub(crate) fn new(kind: DevicePartKind, name: &str, bytes: u64) -> DevicePart {
        let (name, label) = (name.to_owned(), name.to_owned());
        DevicePart { kind, name, label, bytes, pid: None, workload: None, is_mps: false }
    }

    /// The part of another process.
    fn of_process(name: String, process: &SampledProcess, workload: Option<Workload>, bytes: u64) -> DevicePart {
        let (pid, is_mps) = (process.pid, process.is_mps);
        let text = workload.as_ref().and_then(Workload::text).map(|text| format!(", {text}")).unwrap_or_default();
        let mps = if is_mps { ", MPS client" } else { "" };
        let label = format!("{name} (process {pid}{text}{mps})");
        DevicePart { kind: DevicePartKind::OtherProcess, name, label, bytes, pid: Some(pid), workload, is_mps }
    }
}

/// A kind of memory on a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DevicePartKind {
    /// Blocks that PyTorch's caching allocator has handed out, rounded as it rounds.
    PytorchAllocated,
    /// Memory that PyTorch's caching allocator holds and has not handed out.
    PytorchCached,
    /// Memory that another library has allocated from CUDA.
    Library,
    /// Memory of stream-ordered pools that is not in use.
    UnusedPools,
    /// The part of the driver's pages beyond the allocations in them.
    Rounding,
    /// The CUDA contexts of this process, measured at their creation.
    Context,
    /// Memory that the driver has taken since without an allocation call: kernels and modules, local memory, CUDA
    /// graphs.
    Kernels,
    /// Another process.
    OtherProcess,
    /// Memory that was in use before this process and belongs to no process that NVML lists.
    BeforeProcess,
    /// The CUDA context of this process, other processes and the driver, which cannot be separated.
    ContextAndOtherProcesses,
    /// Memory that cannot be attributed.
    Unattributed,
}

/// The memory in use at one point in time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DeviceMemoryPoint {
    /// The time, in nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The event number.
    pub seq: u64,
    /// The bytes in use, of all processes.
    pub used_bytes: u64,
    /// The part that PyTorch's caching allocator holds.
    pub pytorch_reserved_bytes: u64,
    /// The part that other libraries of this process have allocated, with unused pools and rounding.
    pub libraries_bytes: u64,
    /// The rest: context, kernels and other processes.
    pub beyond_allocations_bytes: u64,
}

/// The inputs for one device of one process.
pub(crate) struct DeviceInputs<'a> {
    pub(crate) pid: u32,
    pub(crate) definitions: &'a Definitions,
    pub(crate) calibration: Calibration,
    pub(crate) samples: &'a DeviceSamples,
    /// Names of the other processes of this run, by pid.
    pub(crate) processes: &'a BTreeMap<u32, String>,
    /// The PCI bus id of the device.
    pub(crate) pci: &'a str,
    /// The times of the process's first and last event, in nanoseconds since the Unix epoch.
    pub(crate) recorded_ns: (u64, u64),
    /// Whether no other process can use the device.
    pub(crate) is_only_process: bool,
}

/// Divides the memory of a device.
pub(crate) fn device_memory(memory: &DeviceMemory, inputs: &DeviceInputs<'_>) -> DeviceMemorySummary {
    let others = Others::of(memory, inputs);
    let breakdown = |state: &DeviceMemoryState| breakdown(state, memory, inputs, others.as_ref().ok());
    let point = |state: &DeviceMemoryState| {
        let reserved = bytes_of_allocator(state);
        DeviceMemoryPoint {
            time_ns: inputs.calibration.epoch_ns(state.ticks),
            seq: state.seq,
            used_bytes: state.used,
            pytorch_reserved_bytes: reserved,
            libraries_bytes: state.used.saturating_sub(state.beyond_allocations).saturating_sub(reserved),
            beyond_allocations_bytes: state.beyond_allocations,
        }
    };
    // Samples are of the machine's devices, and this one can be simulated.
    let device = inputs.samples.device(inputs.pci).filter(|_| !inputs.is_only_process);
    let own = device.into_iter().flat_map(|device| &device.samples).filter_map(|sample| bytes_of(sample, inputs.pid));
    DeviceMemorySummary {
        total_bytes: memory.total,
        at_peak: breakdown(&memory.peak),
        at_allocated_peak: memory.allocated_peak.as_ref().filter(|state| state.blocks > 0).map(breakdown),
        at_end: breakdown(&memory.end),
        readings: memory.readings,
        over_time: memory.over_time.iter().map(point).collect(),
        other_processes: others.as_ref().map_or_else(|unknown| *unknown, |others| others.separation),
        nvml_process_peak_bytes: own.max().filter(|bytes| *bytes > 0),
    }
}

/// Divides the memory of a device at one more point in time.
pub(crate) fn device_breakdown(
    state: &DeviceMemoryState,
    memory: &DeviceMemory,
    inputs: &DeviceInputs<'_>,
) -> DeviceBreakdown {
    breakdown(state, memory, inputs, Others::of(memory, inputs).as_ref().ok())
}

fn bytes_of_allocator(state: &DeviceMemoryState) -> u64 {
    let owners = state.allocations.by_owner.iter();
    sum(owners.filter(|(owner, _)| *owner == Owner::CachingAllocator).map(|(_, bytes)| *bytes))
}

/// The sum of figures that a file can claim to be anything.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

fn bytes_of(sample: &DeviceSample, pid: u32) -> Option<u64> {
    sample.processes.iter().find(|process| process.pid == pid)?.bytes
}

/// The other processes on a device, by the samples of NVML.
struct Others<'a> {
    /// The samples. None if there can be no other process.
    samples: &'a [DeviceSample],
    /// The pids that count as others. `None`: all but this process's own.
    only: Option<Vec<u32>>,
    own: u32,
    /// The instance of the device (MIG) in which this process runs. Processes of other instances use other memory.
    instance: Option<u32>,
    /// Memory that was in use before this process and belongs to no listed process.
    before: u64,
    separation: OtherProcesses,
}

impl<'a> Others<'a> {
    /// Fails if other processes are possible and cannot be separated: no sample is older than the process's use of the
    /// device, or the instance of the process is unknown.
    fn of(memory: &DeviceMemory, inputs: &DeviceInputs<'a>) -> Result<Others<'a>, OtherProcesses> {
        if inputs.is_only_process {
            let (own, separation) = (inputs.pid, OtherProcesses::None);
            return Ok(Others { samples: &[], only: None, own, instance: None, before: 0, separation });
        }
        let device = inputs.samples.device(inputs.pci).ok_or(OtherProcesses::Unknown)?;
        let first = device.samples.first().ok_or(OtherProcesses::Unknown)?;
        let (started_ns, ended_ns) = inputs.recorded_ns;
        if first.time_ns > started_ns || bytes_of(first, inputs.pid).is_some() {
            return Err(OtherProcesses::Unknown);
        }
        let instance = if device.is_divided {
            let listed = device.samples.iter().flat_map(|sample| &sample.processes);
            let own = listed.filter(|process| process.pid == inputs.pid).find_map(|process| process.gpu_instance);
            Some(own.ok_or(OtherProcesses::UnknownInstance)?)
        } else {
            None
        };
        // A process can end before any sample. Only a sample from while it used the device can lack it.
        let first_reading = memory.over_time.first().map_or(u64::MAX, |first| inputs.calibration.epoch_ns(first.ticks));
        let during = |sample: &&DeviceSample| (first_reading..=ended_ns).contains(&sample.time_ns);
        let lacks_own = |sample: &DeviceSample| {
            !sample.processes.is_empty() && sample.processes.iter().all(|process| process.pid != inputs.pid)
        };
        let is_unlisted = device.samples.iter().filter(during).any(lacks_own);
        let only = is_unlisted.then(|| first.processes.iter().map(|process| process.pid).collect());
        let listed = sum(first.processes.iter().filter_map(|process| process.bytes));
        let mut others = Others {
            samples: &device.samples,
            only,
            own: inputs.pid,
            instance,
            // The used bytes of a divided device are those of all instances.
            before: if instance.is_some() { 0 } else { first.used_bytes.saturating_sub(listed) },
            separation: OtherProcesses::Steady,
        };
        let at_first = others.at_sample(first);
        others.separation = if others.only.is_some() {
            OtherProcesses::OtherPids
        } else if device.samples.iter().any(|s| s.time_ns <= ended_ns && others.at_sample(s) != at_first) {
            OtherProcesses::Changing
        } else {
            OtherProcesses::Steady
        };
        Ok(others)
    }

    /// The other processes in a sample.
    fn at_sample(&self, sample: &DeviceSample) -> Vec<SampledProcess> {
        let is_other = |process: &&SampledProcess| {
            process.pid != self.own
                && self.only.as_ref().is_none_or(|only| only.contains(&process.pid))
                && self.instance.is_none_or(|instance| process.gpu_instance == Some(instance))
        };
        sample.processes.iter().filter(is_other).copied().collect()
    }

    /// The other processes at a time: those of the latest sample before it.
    fn at(&self, time_ns: u64) -> Vec<SampledProcess> {
        let after = self.samples.partition_point(|sample| sample.time_ns <= time_ns);
        self.samples.get(after.saturating_sub(1)).map(|sample| self.at_sample(sample)).unwrap_or_default()
    }
}

fn breakdown(
    state: &DeviceMemoryState,
    memory: &DeviceMemory,
    inputs: &DeviceInputs<'_>,
    others: Option<&Others<'_>>,
) -> DeviceBreakdown {
    let time_ns = inputs.calibration.epoch_ns(state.ticks);
    let mut parts = Parts::default();
    let reserved = bytes_of_allocator(state);
    // Without events of its blocks, PyTorch's memory is known by its segments only.
    let blocks = state.blocks.min(reserved);
    parts.add(DevicePartKind::PytorchAllocated, "PyTorch allocated", blocks);
    let held = if blocks > 0 { "PyTorch cached" } else { "PyTorch's caching allocator" };
    parts.add(DevicePartKind::PytorchCached, held, reserved - blocks);
    for (name, bytes) in library_bytes(&state.allocations, inputs.definitions) {
        parts.add(DevicePartKind::Library, name, bytes);
    }
    parts.add(DevicePartKind::UnusedPools, UNUSED_POOLS, state.allocations.unused_pools);
    parts.add(DevicePartKind::Rounding, ROUNDING, state.allocations.rounding);
    // The memory that this process has not allocated: each part takes at most the rest.
    let mut left = state.beyond_allocations;
    let mut take = |bytes: u64| {
        let taken = bytes.min(left);
        left -= taken;
        taken
    };
    let at_creation = memory.context.unwrap_or(memory.first_beyond_allocations).saturating_add(state.later_contexts);
    let context_name = match memory.context {
        Some(_) if state.later_contexts > 0 => "CUDA contexts",
        Some(_) => "CUDA context",
        None => "CUDA context with code loaded before the first allocation",
    };
    match others {
        Some(others) => {
            for process in others.at(time_ns) {
                let pid = process.pid;
                let (name, workload) = match inputs.processes.get(&pid).map(String::as_str) {
                    Some(name) => (format!("{name} of this run"), None),
                    // NVML's process ids are not those of the host that was asked for names.
                    None if others.only.is_some() => ("a process".to_owned(), None),
                    None => {
                        let name = inputs.samples.process_name(pid).unwrap_or("a process");
                        (name.to_owned(), inputs.samples.workload(pid).cloned())
                    }
                };
                parts.add_process(name, &process, workload, take(process.bytes.unwrap_or(0)));
            }
            let first = memory.over_time.first().map_or(time_ns, |first| inputs.calibration.epoch_ns(first.ticks));
            let others_then = sum(others.at(first).iter().filter_map(|process| process.bytes));
            let before = take(others.before);
            parts.add(DevicePartKind::BeforeProcess, "in use before by no listed process", before);
            let context = at_creation.saturating_sub(others_then).saturating_sub(others.before);
            parts.add(DevicePartKind::Context, context_name, take(context));
            parts.add(DevicePartKind::Kernels, "kernels and other memory of the driver", take(u64::MAX));
        }
        None => {
            let name = format!("{context_name} and other processes");
            parts.add(DevicePartKind::ContextAndOtherProcesses, &name, take(at_creation));
        }
    }
    let attributed = sum(parts.0.iter().map(|part| part.bytes));
    let mut parts = parts.0;
    parts.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.kind.cmp(&b.kind)).then_with(|| a.name.cmp(&b.name)));
    let unattributed = state.used.saturating_sub(attributed);
    parts.push(DevicePart::new(DevicePartKind::Unattributed, "unattributed", unattributed));
    DeviceBreakdown {
        time_ns,
        seq: state.seq,
        used_bytes: attributed.saturating_add(unattributed),
        is_reading: state.is_reading,
        parts,
        pinned_host_bytes: state.allocations.pinned_host,
        imported_bytes: state.allocations.imported,
        managed_bytes: state.allocations.managed,
    }
}

#[derive(Default)]
struct Parts(Vec<DevicePart>);

impl Parts {
    /// Adds bytes to the part of this name. No bytes make no part.
    fn add(&mut self, kind: DevicePartKind, name: &str, bytes: u64) {
        if bytes == 0 {
            return;
        }
        match self.0.iter_mut().find(|part| part.kind == kind && part.name == name) {
            Some(part) => part.bytes = part.bytes.saturating_add(bytes),
            None => self.0.push(DevicePart::new(kind, name, bytes)),
        }
    }

    fn add_process(&mut self, name: String, process: &SampledProcess, workload: Option<Workload>, bytes: u64) {
        if bytes > 0 {
            self.0.push(DevicePart::of_process(name, process, workload, bytes));
        }
    }
}
