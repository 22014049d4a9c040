//! The processes and devices that the arguments of a call select.

use std::path::Path;

use memtrace_analysis::report::{DeviceSummary, ProcessSummary, Summary};
use schemars::JsonSchema;
use serde::Serialize;

use crate::mcp::answer::Size;
use crate::mcp::tool_error::ToolError;

/// The number of processes that an error lists.
const LISTED: usize = 16;

/// The rank, process and device that a call selects.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Selection {
    pub(super) rank: Option<u32>,
    pub(super) pid: Option<u32>,
    pub(super) device: Option<i16>,
}

/// A device of a process.
#[derive(Serialize, JsonSchema, Debug)]
pub(super) struct DeviceId {
    /// The process id.
    pid: u32,
    /// The rank, in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    device: i16,
    /// The name of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The memory of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<Size>,
}

impl DeviceId {
    /// A device of this process.
    pub(super) fn of(process: &ProcessSummary, device: &DeviceSummary) -> DeviceId {
        DeviceId {
            pid: process.pid,
            rank: process.rank,
            device: device.device,
            name: device.name.clone(),
            total: device.total_bytes.map(Size::of),
        }
    }
}

/// A device that an answer is not about.
#[derive(Serialize, JsonSchema, Debug)]
pub(super) struct OtherDevice {
    /// The process id.
    pub(super) pid: u32,
    /// The rank, in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    pub(super) device: i16,
    /// Its peak.
    pub(super) peak: Size,
}

impl OtherDevice {
    /// A device of this process.
    pub(super) fn of((process, device): &(&ProcessSummary, &DeviceSummary)) -> OtherDevice {
        let peak = Size::of(device.peak_bytes());
        OtherDevice { pid: process.pid, rank: process.rank, device: device.device, peak }
    }
}

impl Selection {
    /// The selected processes, at least one: those with out-of-memory errors first, then by peak.
    pub(super) fn processes<'a>(&self, run: &Path, summary: &'a Summary) -> Result<Vec<&'a ProcessSummary>, ToolError> {
        if summary.processes.is_empty() {
            let reasons: String = summary.not_recorded.iter().take(3).map(|part| format!("; {}", part.text)).collect();
            return Err(ToolError::new(
                format!("{} has no events{reasons}", run.display()),
                "check what can be recorded: memtrace doctor -- COMMAND",
            ));
        }
        let is_selected = |process: &&ProcessSummary| {
            self.rank.is_none_or(|rank| process.rank == Some(rank)) && self.pid.is_none_or(|pid| process.pid == pid)
        };
        let selected: Vec<&ProcessSummary> = summary.processes.iter().filter(is_selected).collect();
        if selected.is_empty() {
            let what = match (self.rank, self.pid) {
                (Some(rank), Some(pid)) => format!("process {pid} of rank {rank}"),
                (Some(rank), None) => format!("process of rank {rank}"),
                (None, Some(pid)) => format!("process {pid}"),
                (None, None) => "process".to_owned(),
            };
            let text = format!("{} has no {what}", run.display());
            return Err(ToolError::new(text, format!("its processes are {}", list(&summary.processes))));
        }
        Ok(selected)
    }

    /// The selected devices, at least one: those with out-of-memory errors first, then by peak.
    pub(super) fn devices<'a>(
        &self,
        run: &Path,
        summary: &'a Summary,
    ) -> Result<Vec<(&'a ProcessSummary, &'a DeviceSummary)>, ToolError> {
        let processes = self.processes(run, summary)?;
        let all = || processes.iter().flat_map(|process| process.devices.iter().map(move |device| (*process, device)));
        let is_selected =
            |(_, device): &(&ProcessSummary, &DeviceSummary)| self.device.is_none_or(|id| device.device == id);
        let mut selected: Vec<_> = all().filter(is_selected).collect();
        if selected.is_empty() {
            let mut ids: Vec<i16> = all().map(|(_, device)| device.device).collect();
            ids.sort_unstable();
            ids.dedup();
            let ids: Vec<String> = ids.iter().map(i16::to_string).collect();
            let what = self.device.map_or("a device".to_owned(), |id| format!("device {id}"));
            let text = format!("{} has no events of {what}", run.display());
            return Err(match ids.is_empty() {
                true => ToolError::new(text, "check what can be recorded: memtrace doctor -- COMMAND"),
                false => ToolError::new(text, format!("its devices are {}", ids.join(", "))),
            });
        }
        selected.sort_by_key(|(_, device)| (device.oom_count == 0, std::cmp::Reverse(device.peak_bytes())));
        Ok(selected)
    }
}

/// The processes of a run: `rank 0 (pid 17), rank 1 (pid 18)`.
fn list(processes: &[ProcessSummary]) -> String {
    let name = |process: &ProcessSummary| match process.rank {
        Some(rank) => format!("rank {rank} (pid {})", process.pid),
        None => format!("pid {}", process.pid),
    };
    let mut names: Vec<String> = processes.iter().take(LISTED).map(name).collect();
    if processes.len() > LISTED {
        names.push(format!("and {} more", processes.len() - LISTED));
    }
    names.join(", ")
}
