//! Writes `nvml.jsonl`, the samples of a run, line by line, so that a killed launcher leaves what it has sampled.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};

use memtrace_analysis::load::{
    DEVICE_SAMPLES_FILE, DEVICE_SAMPLES_VERSION, DeviceSamplesLine, MAX_DEVICE_SAMPLES_BYTES, SampledProcess, Workload,
};
use memtrace_analysis::{RunFolder, printable};

use super::source::SampledDevice;

/// The longest name of a process, in characters.
const MAX_NAME: usize = 64;

/// The file of a run.
#[derive(Debug)]
pub(super) struct SamplesFile {
    file: File,
    bytes: u64,
    /// By device, the latest sample.
    latest: BTreeMap<u32, (u64, Vec<SampledProcess>)>,
    named: BTreeSet<u32>,
    samples: u64,
    left_out: u64,
}

impl SamplesFile {
    /// Creates the file and writes what does not change.
    pub(super) fn create(
        folder: &RunFolder,
        driver: &str,
        devices: &[SampledDevice],
        time_ns: u64,
    ) -> io::Result<Self> {
        let mut file = SamplesFile {
            file: folder.create(DEVICE_SAMPLES_FILE)?,
            bytes: 0,
            latest: BTreeMap::new(),
            named: BTreeSet::new(),
            samples: 0,
            left_out: 0,
        };
        file.write(&DeviceSamplesLine::Start { version: DEVICE_SAMPLES_VERSION, driver: driver.to_owned(), time_ns });
        for device in devices {
            let SampledDevice { index, pci, name, total_bytes, reserved_bytes, is_divided } = device.clone();
            file.write(&DeviceSamplesLine::Device { index, pci, name, total_bytes, reserved_bytes, is_divided });
        }
        Ok(file)
    }

    /// Adds a sample of a device if it differs from the one before, or is the last one.
    pub(super) fn add(
        &mut self,
        time_ns: u64,
        device: u32,
        used_bytes: u64,
        processes: Vec<SampledProcess>,
        is_last: bool,
        describe: &dyn Fn(u32) -> (String, Workload),
    ) {
        self.samples += 1;
        let sample = (used_bytes, processes);
        if !is_last && self.latest.get(&device) == Some(&sample) {
            return;
        }
        self.latest.insert(device, sample.clone());
        if !is_last && self.bytes > MAX_DEVICE_SAMPLES_BYTES {
            self.left_out += 1;
            return;
        }
        for process in &sample.1 {
            if self.named.insert(process.pid) {
                let (name, workload) = describe(process.pid);
                // The path of the program may show more than the name, and is longer.
                let name = name.rsplit('/').next().unwrap_or_default().chars().take(MAX_NAME).collect();
                self.write(&DeviceSamplesLine::Process { pid: process.pid, name, workload });
            }
        }
        self.write(&DeviceSamplesLine::Sample { time_ns, device, used_bytes, processes: sample.1 });
    }

    /// Writes the last line.
    pub(super) fn finish(mut self, time_ns: u64) {
        let (samples, left_out) = (self.samples, self.left_out);
        self.write(&DeviceSamplesLine::End { time_ns, samples, left_out });
    }

    /// Writes one line with one call. A disk that is full costs the line.
    fn write(&mut self, line: &DeviceSamplesLine) {
        let Ok(text) = serde_json::to_string(line) else { return };
        let text = format!("{}\n", printable::json(text));
        if self.file.write_all(text.as_bytes()).is_ok() {
            self.bytes += text.len() as u64;
        }
    }
}
