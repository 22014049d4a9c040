//! NVML, loaded at run time.

use std::path::Path;

use memtrace_analysis::load::SampledProcess;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::source::{SampleSource, SampledDevice};

/// The name of NVML's library. The driver installs it. `libnvidia-ml.so` can be a stub of the CUDA toolkit.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// The longest name of a program, in bytes.
const MAX_NAME: usize = 256;

/// The loaded library.
pub(super) struct Nvml(nvml_wrapper::Nvml);

impl Nvml {
    /// Loads the library, by default the driver's. `None` if there is none or it does not work.
    pub(super) fn load(library: Option<&Path>) -> Option<Nvml> {
        let library = library.unwrap_or(Path::new(LIBRARY)).as_os_str();
        nvml_wrapper::Nvml::builder().lib_path(library).init().ok().map(Nvml)
    }

    /// Whether the device is divided into parts (MIG), of which programs use one each.
    pub(super) fn is_divided(&self, device: u32) -> bool {
        self.device(device).and_then(|device| device.mig_mode().ok()).is_some_and(|mode| mode.current != 0)
    }

    fn device(&self, index: u32) -> Option<nvml_wrapper::Device<'_>> {
        self.0.device_by_index(index).ok()
    }
}

impl SampleSource for Nvml {
    fn driver(&self) -> String {
        self.0.sys_driver_version().unwrap_or_default()
    }

    fn devices(&self) -> Vec<SampledDevice> {
        let describe = |index| {
            let device = self.device(index)?;
            // Without the sum of memory there is no sample either.
            let memory = device.memory_info().ok()?;
            Some(SampledDevice {
                index,
                pci: device.pci_info().ok()?.bus_id,
                name: device.name().unwrap_or_default(),
                total_bytes: memory.total,
                reserved_bytes: memory.reserved,
                is_divided: self.is_divided(index),
            })
        };
        (0..self.0.device_count().unwrap_or(0)).filter_map(describe).collect()
    }

    fn sample(&self, device: u32) -> Option<(u64, Vec<SampledProcess>)> {
        let device = self.device(device)?;
        let used_bytes = device.memory_info().ok()?.used;
        let lists = [
            (device.running_compute_processes(), false),
            (device.running_graphics_processes(), false),
            (device.mps_running_compute_processes(), true),
        ];
        let processes = lists
            .into_iter()
            .flat_map(|(list, is_mps)| list.into_iter().flatten().map(move |process| sampled(&process, is_mps)));
        Some((used_bytes, merged(processes)))
    }

    fn process_name(&self, pid: u32) -> String {
        self.0.sys_process_name(pid, MAX_NAME).unwrap_or_default()
    }
}

/// A process of a list. `is_mps` is whether the list is that of the clients of MPS.
fn sampled(process: &ProcessInfo, is_mps: bool) -> SampledProcess {
    let bytes = match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    SampledProcess { pid: process.pid, bytes, gpu_instance: process.gpu_instance_id, is_mps }
}

/// The processes by pid. One that is in several lists counts once, with what any of them knows of it.
fn merged(listed: impl Iterator<Item = SampledProcess>) -> Vec<SampledProcess> {
    let mut processes: Vec<SampledProcess> = listed.collect();
    processes.sort_by_key(|process| (process.pid, std::cmp::Reverse(process.bytes)));
    processes.dedup_by(|same, kept| {
        let is_same = same.pid == kept.pid;
        if is_same {
            kept.gpu_instance = kept.gpu_instance.or(same.gpu_instance);
            kept.is_mps |= same.is_mps;
        }
        is_same
    });
    processes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_once() {
        let process = |pid, used_gpu_memory, gpu_instance_id, is_mps| {
            sampled(&ProcessInfo { pid, used_gpu_memory, gpu_instance_id, compute_instance_id: None }, is_mps)
        };
        let listed = [
            process(9, UsedGpuMemory::Used(5), None, false),
            process(7, UsedGpuMemory::Unavailable, None, false),
            process(9, UsedGpuMemory::Unavailable, Some(3), true),
        ];
        let expected = [
            SampledProcess { pid: 7, ..SampledProcess::default() },
            SampledProcess { pid: 9, bytes: Some(5), gpu_instance: Some(3), is_mps: true },
        ];
        assert_eq!(merged(listed.into_iter()), expected);
    }
}
