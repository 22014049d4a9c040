//! Writes `host.jsonl`, the samples of a run, line by line, so that a killed launcher leaves what it has sampled.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};

use memtrace_analysis::load::{
    HOST_SAMPLES_FILE, HOST_SAMPLES_VERSION, HostLimitKind, HostProcessName, HostSample, HostSamplesEnd,
    HostSamplesLine, HostSharedFile, MAX_HOST_SAMPLES_BYTES,
};
use memtrace_analysis::{RunFolder, printable};

/// Samples that differ by less than this are the same, in bytes.
const LEAST_CHANGE: u64 = 1 << 20;
/// Samples that differ by less than this part of the highest are the same.
const LEAST_SHARE: u64 = 256;
/// At most this many samples are written while the run's time doubles, apart from those with a new peak.
const SAMPLES_A_DOUBLING: u64 = 1000;

/// The file of a run.
#[derive(Debug)]
pub(super) struct SamplesFile {
    file: File,
    bytes: u64,
    began_ns: u64,
    /// The latest sample in the file.
    written: Option<HostSample>,
    /// The latest sample, if it is not in the file.
    held: Option<HostSample>,
    /// The most bytes of a written sample.
    peak: u64,
    /// By pid, what the file says of a process.
    named: BTreeMap<u32, HostProcessName>,
    left_out: u64,
}

impl SamplesFile {
    /// Creates the file.
    pub(super) fn create(
        folder: &RunFolder,
        time_ns: u64,
        limit: HostLimitKind,
        limit_bytes: u64,
        shm_bytes: u64,
    ) -> io::Result<Self> {
        let mut file = SamplesFile {
            file: folder.create(HOST_SAMPLES_FILE)?,
            bytes: 0,
            began_ns: time_ns,
            written: None,
            held: None,
            peak: 0,
            named: BTreeMap::new(),
            left_out: 0,
        };
        file.write(&HostSamplesLine::Start { version: HOST_SAMPLES_VERSION, time_ns, shm_bytes });
        file.limit(time_ns, limit, limit_bytes);
        Ok(file)
    }

    /// Writes a limit, the first or a changed one.
    pub(super) fn limit(&mut self, time_ns: u64, limit: HostLimitKind, limit_bytes: u64) {
        self.write(&HostSamplesLine::Limit { time_ns, limit, limit_bytes });
    }

    /// Adds a sample. It is written at once or with the next if it differs from the last one or is the highest.
    pub(super) fn add(&mut self, sample: HostSample, name: &dyn Fn(u32) -> HostProcessName) {
        if !self.is_new(&sample) {
            // Of the samples between two that are written, the highest is kept.
            let is_highest = self.held.as_ref().is_none_or(|held| held.bytes() <= sample.bytes());
            self.left_out += u64::from(self.held.is_some());
            if is_highest {
                self.held = Some(sample);
            }
            return;
        }
        // A process can have executed another program since the last sample.
        for pid in sample.processes.iter().map(|process| process.pid) {
            let process = name(pid);
            if self.bytes < MAX_HOST_SAMPLES_BYTES && self.named.get(&pid) != Some(&process) && !process.name.is_empty()
            {
                self.named.insert(pid, process.clone());
                self.write(&HostSamplesLine::Process { pid, name: process.name, parent: process.parent });
            }
        }
        match self.held.take() {
            Some(held) if held.bytes() > self.peak.max(sample.bytes()) => self.put(held),
            held => self.left_out += u64::from(held.is_some()),
        }
        self.put(sample);
    }

    /// Whether a sample is worth a line.
    fn is_new(&self, sample: &HostSample) -> bool {
        let Some(written) = &self.written else { return true };
        let least = LEAST_CHANGE.max(self.peak / LEAST_SHARE);
        let differs = |a: u64, b: u64| a.abs_diff(b) >= least;
        let pids = |sample: &HostSample| sample.processes.iter().map(|process| process.pid).collect::<Vec<_>>();
        let (bytes, before) = (sample.bytes(), written.bytes());
        let group = |sample: &HostSample| sample.group_bytes.unwrap_or(0);
        if bytes >= self.peak.saturating_add(least) {
            return true;
        }
        let is_changed = differs(bytes, before)
            || differs(group(sample), group(written))
            || differs(sample.shm_used_bytes, written.shm_used_bytes)
            || pids(sample) != pids(written);
        let spacing = sample.time_ns.saturating_sub(self.began_ns) / SAMPLES_A_DOUBLING;
        is_changed && sample.time_ns.saturating_sub(written.time_ns) >= spacing
    }

    fn put(&mut self, sample: HostSample) {
        if self.bytes > MAX_HOST_SAMPLES_BYTES {
            self.left_out += 1;
            return;
        }
        self.peak = self.peak.max(sample.bytes());
        self.write(&HostSamplesLine::Sample(sample.clone()));
        self.written = Some(sample);
    }

    /// Writes the files in shared memory.
    pub(super) fn shared_files(&mut self, time_ns: u64, files: Vec<HostSharedFile>) {
        if self.bytes < MAX_HOST_SAMPLES_BYTES {
            self.write(&HostSamplesLine::SharedFiles { time_ns, files });
        }
    }

    /// Writes the latest sample if it is not in the file, and the last line.
    pub(super) fn finish(mut self, time_ns: u64, end: HostSamplesEnd) {
        if let Some(held) = self.held.take() {
            self.put(held);
        }
        let left_out = self.left_out;
        self.write(&HostSamplesLine::End { time_ns, end: HostSamplesEnd { left_out, ..end } });
    }

    /// Writes one line with one call. A disk that is full costs the line.
    fn write(&mut self, line: &HostSamplesLine) {
        let Ok(text) = serde_json::to_string(line) else { return };
        let text = format!("{}\n", printable::json(text));
        if self.file.write_all(text.as_bytes()).is_ok() {
            self.bytes += text.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use memtrace_analysis::load::{HostProcess, HostSamples};
    use memtrace_trace::file::Budget;

    fn sample(second: u64, mebibytes: u64) -> HostSample {
        let process = HostProcess { pid: 7, anonymous_bytes: mebibytes << 20, ..HostProcess::default() };
        HostSample { time_ns: second * 1_000_000_000, processes: vec![process], ..HostSample::default() }
    }

    fn written(samples: &[HostSample]) -> (Vec<u64>, u64) {
        let path = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(path.path()).unwrap();
        let mut file = SamplesFile::create(&folder, 0, HostLimitKind::Machine, 1 << 40, 0).unwrap();
        samples.iter().for_each(|sample| file.add(sample.clone(), &|_| HostProcessName::default()));
        file.finish(u64::MAX, HostSamplesEnd::default());
        let read = HostSamples::read_within(&folder, &Budget::default()).unwrap();
        (read.samples.iter().map(|sample| sample.bytes() >> 20).collect(), read.end.unwrap().left_out)
    }

    #[test]
    fn changes_and_the_highest_sample_are_written() {
        let steady = [100, 100, 100, 100].map(|mebibytes| sample(1, mebibytes));
        assert_eq!(written(&steady), (vec![100, 100], 2));
        // The changes of a long run are left out between its first and its last samples, but the peak is not.
        let long: Vec<HostSample> =
            (0..100_000).map(|second| sample(second, if second == 70_003 { 101 } else { 98 + second % 3 })).collect();
        let (bytes, left_out) = written(&long);
        assert!(bytes.len() < 20_000 && left_out > 80_000, "{}", bytes.len());
        assert_eq!(bytes.iter().max(), Some(&101));
    }

    #[test]
    fn each_new_peak_of_a_growing_program_is_written() {
        let growing: Vec<HostSample> = (0..1000).map(|second| sample(second, 100 + second)).collect();
        assert_eq!(written(&growing).0.last(), Some(&1099));
    }
}
