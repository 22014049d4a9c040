//! Samples the memory of the machine's GPUs through NVML while a run lasts, about once a second.
//!
//! NVML knows how much each process uses. The samples go to `nvml.jsonl` in the run folder. The analysis separates
//! other processes with them. The sampling thread creates no CUDA context, and neither the command nor the launcher
//! waits for it, because a driver may answer late or never.

mod nvml;
mod samples_file;
mod source;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use memtrace_analysis::RunFolder;

use self::samples_file::SamplesFile;
use self::source::{SampleSource, SampledDevice};
use crate::bounded_read::read_until;
use crate::output::{Printed, print};
use crate::{gpu, host, workload};

/// The time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);
/// The command that [`print_used`] executes.
pub(crate) const MEMORY_IN_USE: &str = "memory-in-use";
/// How long the start of a run with a limit waits for NVML.
const FIRST_SAMPLE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer of that command, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// How long the end of a run waits for the last sample.
const LAST_SAMPLE_TIMEOUT: Duration = Duration::from_secs(2);
/// Names the library to load in the place of `libnvidia-ml.so.1`, also where there is no NVIDIA driver.
const LIBRARY: &str = "MEMTRACE_NVML_LIBRARY";

/// The sampling thread. It ends with [`Sampler::finish`].
#[derive(Debug)]
pub(crate) struct Sampler {
    stop: Sender<()>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Sampler {
    /// Starts to sample if this machine has an NVIDIA driver. `None` otherwise.
    pub(crate) fn start(folder: Arc<RunFolder>) -> Option<Sampler> {
        let library = library()?;
        let (stop, stopped) = channel();
        let (end, ended) = channel();
        let thread = std::thread::Builder::new()
            .name("memtrace-nvml".into())
            .spawn(move || {
                if let Some(source) = nvml::Nvml::load(library.as_deref()) {
                    sample_until(&source, &folder, &stopped, INTERVAL);
                }
                // The receiver is gone if nobody waited any longer.
                let _ = end.send(());
            })
            .ok()?;
        Some(Sampler { stop, ended, thread })
    }

    /// Writes the last sample and completes the file. A driver that does not answer is left behind.
    pub(crate) fn finish(self) {
        // The thread has ended already if there is no NVML.
        let _ = self.stop.send(());
        if self.ended.recv_timeout(LAST_SAMPLE_TIMEOUT) != Err(RecvTimeoutError::Timeout) {
            let _ = self.thread.join();
        }
    }
}

/// The library that the environment names, in the place of the driver's. `None` if there is neither.
fn library() -> Option<Option<PathBuf>> {
    let named = std::env::var_os(LIBRARY).filter(|path| !path.is_empty()).map(PathBuf::from);
    (named.is_some() || gpu::has_driver()).then_some(named)
}

/// The bytes that are in use on each device now, by its PCI address, without what the driver has reserved. Empty if
/// NVML does not answer soon.
///
/// Another process asks NVML: this one must not have a second thread before it has changed its environment.
pub(crate) fn used_now() -> Vec<(String, u64)> {
    if library().is_none() {
        return Vec::new();
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg(MEMORY_IN_USE).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else { return Vec::new() };
    let answer = child
        .stdout
        .take()
        .and_then(|output| read_until(output, Instant::now() + FIRST_SAMPLE_TIMEOUT, MAX_ANSWER).ok());
    // It has ended, or its answer came too late.
    let _ = child.kill();
    let _ = child.wait();
    answer.and_then(|answer| serde_json::from_slice(&answer).ok()).unwrap_or_default()
}

/// Prints the result of [`used_now`] as JSON. The other process of [`used_now`] runs this.
pub(crate) fn print_used() -> anyhow::Result<()> {
    let source = library().and_then(|library| nvml::Nvml::load(library.as_deref())).context("NVML cannot be loaded")?;
    let used = |device: SampledDevice| Some((device.pci, source.sample(device.index)?.0));
    // NVML does not say what is used of a part of a GPU.
    let is_whole = |device: &SampledDevice| !source.is_divided(device.index);
    let used: Vec<(String, u64)> = source.devices().into_iter().filter(is_whole).filter_map(used).collect();
    Ok(print(Printed::Json(&(serde_json::to_string(&used)? + "\n")))?)
}

/// The bytes that these processes use on all devices, as NVML tells. `None` if it does not know.
pub(crate) fn used_by(pids: &[u32]) -> Option<u64> {
    let source = nvml::Nvml::load(library()?.as_deref())?;
    let samples = source.devices().into_iter().filter_map(|device| source.sample(device.index));
    let of_processes = samples.flat_map(|(_, processes)| processes).filter(|process| pids.contains(&process.pid));
    of_processes.map(|process| process.bytes).sum()
}

/// Samples at once, then at each interval, and a last time when `stop` has a message.
fn sample_until(source: &dyn SampleSource, folder: &RunFolder, stop: &Receiver<()>, interval: Duration) {
    let devices = source.devices();
    // Without the file there are no samples. Nothing else depends on them.
    let Ok(mut file) = SamplesFile::create(folder, &source.driver(), &devices, host::epoch_ns()) else { return };
    let mut is_last = false;
    loop {
        for device in &devices {
            if let Some((used_bytes, processes)) = source.sample(device.index) {
                let describe = |pid| (source.process_name(pid), workload::of_other(pid));
                file.add(host::epoch_ns(), device.index, used_bytes, processes, is_last, &describe);
            }
        }
        if is_last {
            return file.finish(host::epoch_ns());
        }
        is_last = stop.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    use memtrace_analysis::load::SampledProcess;
    use memtrace_analysis::load::{DEVICE_SAMPLES_FILE, DeviceSamples};
    use memtrace_trace::file::Budget;

    /// A device that another process uses, and from the second sample on this run too.
    struct Simulated {
        taken: Cell<u64>,
        stop: Sender<()>,
    }

    impl SampleSource for Simulated {
        fn driver(&self) -> String {
            "580".to_owned()
        }

        fn devices(&self) -> Vec<SampledDevice> {
            let pci = "00000000:17:00.0".to_owned();
            vec![SampledDevice {
                index: 3,
                pci,
                name: "H200".to_owned(),
                total_bytes: 1 << 40,
                reserved_bytes: 615 << 20,
                is_divided: false,
            }]
        }

        fn sample(&self, device: u32) -> Option<(u64, Vec<SampledProcess>)> {
            assert_eq!(device, 3);
            self.taken.set(self.taken.get() + 1);
            if self.taken.get() == 5 {
                self.stop.send(()).unwrap();
            }
            let mut processes = vec![SampledProcess { pid: 7, bytes: Some(100), ..SampledProcess::default() }];
            if self.taken.get() > 1 {
                processes.push(SampledProcess { pid: 8, bytes: Some(50), ..SampledProcess::default() });
            }
            Some((processes.iter().filter_map(|process| process.bytes).sum(), processes))
        }

        fn process_name(&self, pid: u32) -> String {
            format!("program-{pid}")
        }
    }

    #[test]
    fn only_changes_and_the_last_sample_are_written() {
        let path = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(path.path()).unwrap();
        let (stop, stopped) = channel();
        let source = Simulated { taken: Cell::new(0), stop };
        sample_until(&source, &folder, &stopped, Duration::from_millis(1));
        let text = std::fs::read_to_string(path.path().join(DEVICE_SAMPLES_FILE)).unwrap();
        assert_eq!(text.lines().filter(|line| line.contains("\"process\"")).count(), 2, "{text}");
        let samples = DeviceSamples::read_within(&folder, &Budget::default()).unwrap();
        let device = samples.device("0000:17:00.0").unwrap();
        let used: Vec<u64> = device.samples.iter().map(|sample| sample.used_bytes).collect();
        assert_eq!((used, device.reserved_bytes), (vec![100, 150, 150], 615 << 20));
        assert_eq!(samples.process_name(7), Some("program-7"));
        let end = text.lines().last().unwrap();
        assert!(end.contains("\"end\"") && end.contains(&format!("\"samples\":{}", source.taken.get())), "{end}");
    }

    #[test]
    fn a_library_that_is_no_nvml_takes_no_samples() {
        assert!(nvml::Nvml::load(Some(std::path::Path::new("/nonexistent/libnvidia-ml.so.1"))).is_none());
        assert!(nvml::Nvml::load(Some(std::path::Path::new("libc.so.6"))).is_none());
    }
}
