//! The devices' memory in the launcher's samples of NVML: `nvml.jsonl` of a run folder.
//!
//! The samples separate this run from other processes on a device. A file without an end is that of a launcher that was
//! killed, or still runs.

use std::collections::BTreeMap;

use memtrace_trace::file::{Budget, untrusted};
use serde::{Deserialize, Serialize};

use crate::folder::RunFolder;

use super::workload::Workload;

/// The name of the file in a run folder.
pub const DEVICE_SAMPLES_FILE: &str = "nvml.jsonl";
/// The version of the format, in its first line.
pub const DEVICE_SAMPLES_VERSION: u32 = 1;
/// The launcher stops writing samples before the file is this large, in bytes.
pub const MAX_DEVICE_SAMPLES_BYTES: u64 = 4 << 20;

/// One line of the file. Times are nanoseconds since the Unix epoch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DeviceSamplesLine {
    /// The first line.
    Start {
        /// The format's version.
        version: u32,
        /// The version of NVIDIA's driver.
        driver: String,
        /// The time.
        time_ns: u64,
    },
    /// A device, before its samples.
    Device {
        /// NVML's index.
        index: u32,
        /// The PCI bus id.
        pci: String,
        /// The product name.
        name: String,
        /// The total bytes.
        total_bytes: u64,
        /// The bytes that the driver and the firmware reserve. `used_bytes` of samples does not include them.
        reserved_bytes: u64,
        /// Whether the device is divided into instances (MIG), of which programs use one each.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_divided: bool,
    },
    /// A process, before the samples that list it.
    Process {
        /// The process id as NVML reports it.
        pid: u32,
        /// The name of its program.
        name: String,
        /// Its pod, container, Slurm job and user.
        #[serde(default, skip_serializing_if = "Workload::is_unknown")]
        workload: Workload,
    },
    /// The memory of a device, if it has changed since the sample before.
    Sample {
        /// The time.
        time_ns: u64,
        /// NVML's index of the device.
        device: u32,
        /// The bytes in use, as `nvidia-smi` shows them.
        used_bytes: u64,
        /// The processes that use the device.
        processes: Vec<SampledProcess>,
    },
    /// The last line.
    End {
        /// The time.
        time_ns: u64,
        /// How often the devices were sampled.
        samples: u64,
        /// The number of samples that differ from those before and are not in the file, because of its bound.
        left_out: u64,
    },
}

/// A process in a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SampledProcess {
    /// The process id as NVML reports it.
    pub pid: u32,
    /// The bytes that it uses. Absent if NVML does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The GPU instance (MIG) in which it runs. Absent if the device is not divided, or if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Whether NVML lists it as a client of MPS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mps: bool,
}

/// One sample of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSample {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The bytes in use, as `nvidia-smi` shows them.
    pub used_bytes: u64,
    /// The processes that use the device.
    pub processes: Vec<SampledProcess>,
}

/// The samples of one device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SampledDevice {
    /// The PCI bus id.
    pub pci: String,
    /// The bytes that the driver and the firmware reserve.
    pub reserved_bytes: u64,
    /// Whether the device is divided into instances (MIG).
    pub is_divided: bool,
    /// The samples, in the order of time. Each holds until the next.
    pub samples: Vec<DeviceSample>,
}

/// All samples of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceSamples {
    devices: BTreeMap<u32, SampledDevice>,
    processes: BTreeMap<u32, (String, Workload)>,
}

impl DeviceSamples {
    /// Reads the samples of a run folder. Without a file there are none. Lines that this version does not know are
    /// skipped.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is too large or is of a newer version.
    pub fn read_within(folder: &RunFolder, budget: &Budget) -> std::io::Result<DeviceSamples> {
        let file = match folder.open_file(DEVICE_SAMPLES_FILE) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(DeviceSamples::default()),
            Err(e) => return Err(e),
        };
        budget.add_file(&file)?;
        // The last lines may exceed the bound.
        let text = untrusted::read(&file, 2 * MAX_DEVICE_SAMPLES_BYTES)?;
        budget.hold(2 * text.len() as u64).map_err(std::io::Error::other)?;
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<DeviceSamplesLine> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        match lines.first() {
            Some(DeviceSamplesLine::Start { version, .. }) if *version > DEVICE_SAMPLES_VERSION => Err(
                std::io::Error::other(format!("its version is {version}, and {DEVICE_SAMPLES_VERSION} is supported")),
            ),
            _ => Ok(DeviceSamples::of(lines)),
        }
    }

    /// Collects the lines of a file.
    pub fn of(lines: impl IntoIterator<Item = DeviceSamplesLine>) -> DeviceSamples {
        let mut all = DeviceSamples::default();
        for line in lines {
            match line {
                DeviceSamplesLine::Device { index, pci, reserved_bytes, is_divided, .. } => {
                    all.devices.insert(index, SampledDevice { pci, reserved_bytes, is_divided, samples: Vec::new() });
                }
                DeviceSamplesLine::Process { pid, name, workload } => {
                    all.processes.insert(pid, (name, workload));
                }
                DeviceSamplesLine::Sample { time_ns, device, used_bytes, processes } => {
                    if let Some(device) = all.devices.get_mut(&device) {
                        device.samples.push(DeviceSample { time_ns, used_bytes, processes });
                    }
                }
                DeviceSamplesLine::Start { .. } | DeviceSamplesLine::End { .. } => {}
            }
        }
        all
    }

    /// The device with this PCI bus id, in the driver's form (`0000:17:00.0`) or NVML's (`00000000:17:00.0`).
    pub fn device(&self, pci: &str) -> Option<&SampledDevice> {
        let address = pci_address(pci)?;
        self.devices.values().find(|device| pci_address(&device.pci) == Some(address)).filter(|d| !d.samples.is_empty())
    }

    /// The name of a process's program. `None` if it is unknown.
    pub fn process_name(&self, pid: u32) -> Option<&str> {
        self.processes.get(&pid).map(|(name, _)| name.as_str()).filter(|name| !name.is_empty())
    }

    /// The pod, container, Slurm job and user of a process. `None` if nothing is known.
    pub fn workload(&self, pid: u32) -> Option<&Workload> {
        self.processes.get(&pid).map(|(_, workload)| workload).filter(|workload| !workload.is_unknown())
    }
}

/// Domain, bus and device of a PCI bus id. A GPU is function 0.
fn pci_address(id: &str) -> Option<(u32, u32, u32)> {
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    let mut parts = id.split(':');
    let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
    Some((hex(domain)?, hex(bus)?, hex(device.split('.').next()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_and_devices_are_found_by_their_pci_bus_ids() {
        let sample = |time_ns, device, used_bytes, pid| DeviceSamplesLine::Sample {
            time_ns,
            device,
            used_bytes,
            processes: vec![SampledProcess { pid, bytes: Some(7), ..SampledProcess::default() }],
        };
        let device = |index, pci: &str| DeviceSamplesLine::Device {
            index,
            pci: pci.to_owned(),
            name: "H200".to_owned(),
            total_bytes: 100,
            reserved_bytes: 3,
            is_divided: index == 1,
        };
        let workload = Workload { pod: Some("trainer-7f".to_owned()), ..Workload::default() };
        let lines = vec![
            DeviceSamplesLine::Start { version: 1, driver: "580".to_owned(), time_ns: 1 },
            device(0, "00000000:17:00.0"),
            device(1, "00000000:3D:00.0"),
            DeviceSamplesLine::Process { pid: 9, name: "python3".to_owned(), workload: workload.clone() },
            sample(1, 0, 10, 9),
            sample(2, 1, 20, 8),
            DeviceSamplesLine::End { time_ns: 3, samples: 2, left_out: 0 },
        ];
        let mut text = String::new();
        for line in &lines {
            text.push_str(&serde_json::to_string(line).unwrap());
            text.push('\n');
        }
        // A newer line, and one that a kill has cut.
        text.push_str("{\"kind\":\"temperature\",\"c\":40}\n{\"kind\":\"samp");
        let path = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(path.path()).unwrap();
        assert_eq!(DeviceSamples::read_within(&folder, &Budget::default()).unwrap(), DeviceSamples::default());
        std::fs::write(path.path().join(DEVICE_SAMPLES_FILE), text).unwrap();
        let read = DeviceSamples::read_within(&folder, &Budget::default()).unwrap();
        assert_eq!(read, DeviceSamples::of(lines));
        assert_eq!(read.device("0000:3d:00.0").unwrap().samples[0].used_bytes, 20);
        assert_eq!(read.device("0000:17:00.0").unwrap().samples[0].processes[0].bytes, Some(7));
        assert!(read.device("0001:17:00.0").is_none() && read.device("").is_none());
        assert_eq!((read.process_name(9), read.process_name(8)), (Some("python3"), None));
        assert_eq!((read.workload(9), read.workload(8)), (Some(&workload), None));
        assert!(read.device("0000:3d:00.0").unwrap().is_divided && !read.device("0000:17:00.0").unwrap().is_divided);
        std::fs::write(
            path.path().join(DEVICE_SAMPLES_FILE),
            "{\"kind\":\"start\",\"version\":2,\"driver\":\"\",\"time_ns\":1}",
        )
        .unwrap();
        let error = DeviceSamples::read_within(&folder, &Budget::default()).unwrap_err().to_string();
        assert_eq!(error, "its version is 2, and 1 is supported");
    }
}
