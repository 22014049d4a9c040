//! The part of a `summary.json` that the table of ranks needs. All other fields are skipped while they are parsed.

use std::collections::BTreeMap;

use memtrace_input::load::{Exit, RankSource};
use memtrace_insight::passes::Phase;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::rank_table::used_bytes;
use crate::summary::SUMMARY_VERSION;

/// A `summary.json`. Every field can be missing.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredSummary {
    version: String,
    pub(super) run: StoredRun,
    pub(super) processes: Vec<StoredProcess>,
    pub(super) launch: Option<StoredLaunch>,
}

/// Which process is which rank. Versions before 2.3 lack it, and so do runs of one process outside a job.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredLaunch {
    ranks: Vec<StoredRank>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredRank {
    pub(super) rank: u32,
    pid: u32,
    trace: String,
    rank_source: String,
    pub(super) local_rank: Option<u32>,
    pub(super) node_rank: Option<u32>,
    pub(super) device: Option<i16>,
    pub(super) pci_bus_id: Option<String>,
    helpers: Vec<StoredHelper>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
struct StoredHelper {
    pid: u32,
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
    pub(super) ooms: Vec<StoredOom>,
    pub(super) peak: Option<StoredPeak>,
    pub(super) steps: u32,
    owners: Vec<StoredOwner>,
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

#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredOom {
    pub(super) fatal: Option<bool>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredPeak {
    pub(super) phase: String,
    pub(super) step: Option<u32>,
}

#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(default)]
struct StoredOwner {
    object: Option<IgnoredAny>,
    peak_bytes: u64,
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

impl StoredLaunch {
    /// The rank whose own process this is.
    pub(super) fn rank_of(&self, process: &StoredProcess) -> Option<&StoredRank> {
        self.ranks.iter().find(|rank| rank.pid == process.pid && rank.trace == process.trace)
    }

    /// The rank whose worker or helper this process is.
    pub(super) fn helper_of(&self, pid: u32) -> Option<u32> {
        let has = |rank: &&StoredRank| rank.helpers.iter().any(|helper| helper.pid == pid);
        self.ranks.iter().find(has).map(|rank| rank.rank)
    }
}

impl StoredRank {
    pub(super) fn source(&self) -> Option<RankSource> {
        RankSource::named(&self.rank_source)
    }
}

impl StoredDevice {
    /// The sum of the peaks of memory outside PyTorch's caching allocator.
    pub(super) fn outside_pytorch_bytes(&self) -> u64 {
        self.owners.iter().filter(|owner| owner.object.is_some()).map(|owner| owner.peak_bytes).sum()
    }

    /// The most bytes that the process took from the device.
    pub(super) fn used_bytes(&self) -> u64 {
        let owners = self.owners.iter().map(|owner| owner.peak_bytes);
        used_bytes(self.highest.allocated_bytes, self.highest.reserved_bytes, owners)
    }

    /// The highest number of allocated bytes in each phase of any step, in the order of [`Phase::ALL`].
    pub(super) fn phase_peaks(&self) -> [Option<u64>; Phase::ALL.len()] {
        let rows = || self.before_first_step.iter().chain(&self.first_step).chain(&self.later_steps);
        Phase::ALL.map(|phase| rows().filter(|row| row.phase == phase.name()).map(|row| row.peak_bytes).max())
    }
}
