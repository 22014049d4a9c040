//! The part of a `summary.json` that the table of ranks needs. All other fields are skipped while they are parsed.

use std::collections::BTreeMap;

use memtrace_input::load::Exit;
use memtrace_insight::passes::Phase;
use serde::Deserialize;

use crate::summary::SUMMARY_VERSION;

/// A `summary.json`. Every field can be missing.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredSummary {
    version: String,
    pub(super) run: StoredRun,
    pub(super) processes: Vec<StoredProcess>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredRun {
    pub(super) memtrace_version: Option<String>,
    pub(super) started_ns: Option<u64>,
    pub(super) outcome: String,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredProcess {
    pub(super) pid: u32,
    pub(super) ppid: Option<u32>,
    pub(super) rank: Option<u32>,
    pub(super) world_size: Option<u32>,
    pub(super) host: Option<String>,
    pub(super) exit: Exit,
    pub(super) trace: String,
    pub(super) snapshot: Option<String>,
    pub(super) events: u64,
    pub(super) losses: BTreeMap<String, u64>,
    pub(super) devices: Vec<StoredDevice>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredDevice {
    pub(super) device: i16,
    pub(super) total_bytes: Option<u64>,
    pub(super) highest: StoredTotals,
    pub(super) oom_count: u64,
    before_first_step: Vec<StoredPhase>,
    first_step: Vec<StoredPhase>,
    later_steps: Vec<StoredPhase>,
    pub(super) by_step: Vec<StepTime>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredTotals {
    pub(super) allocated_bytes: u64,
    pub(super) reserved_bytes: u64,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
struct StoredPhase {
    phase: String,
    peak_bytes: u64,
}

/// When a step began, by the clock of its host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StepTime {
    pub(super) step: u32,
    pub(super) time_ns: u64,
}

impl StoredSummary {
    /// Parses a `summary.json`. The error says what is wrong.
    pub(super) fn parse(json: &[u8]) -> Result<StoredSummary, String> {
        let summary: StoredSummary = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        let major = |version: &str| version.split('.').next().map(str::to_owned);
        if major(&summary.version) == major(SUMMARY_VERSION) {
            Ok(summary)
        } else {
            Err(format!("its version is {:?}, and this memtrace reads {SUMMARY_VERSION}", summary.version))
        }
    }
}

impl StoredDevice {
    /// The highest number of allocated bytes in each phase of any step, in the order of [`Phase::ALL`].
    pub(super) fn phase_peaks(&self) -> [Option<u64>; Phase::ALL.len()] {
        let rows = || self.before_first_step.iter().chain(&self.first_step).chain(&self.later_steps);
        Phase::ALL.map(|phase| rows().filter(|row| row.phase == phase.name()).map(|row| row.peak_bytes).max())
    }
}
