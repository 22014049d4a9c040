//! The tool `summary`: how a run ended, and the peak of each process and device.

use memtrace_analysis::report::{CategoryAmount, DeviceSummary, ProcessSummary, StepSummary, duration_text};
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::RunPath;
use super::selection::{DeviceId, Selection};
use super::state::largest_first;
use crate::mcp::answer::{Shape, Size, fit, percent};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

/// The number of categories that are named for each device.
const TOP_CATEGORIES: usize = 4;
/// The number of issues that are named for each process.
const TOP_ISSUES: usize = 3;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    run: RunPath,
    /// Only processes of this rank.
    rank: Option<u32>,
    /// Only the process with this id.
    pid: Option<u32>,
    /// The maximum number of devices. Default: 10.
    limit: Option<usize>,
    /// The number of devices to skip.
    offset: Option<usize>,
}

/// The summary of a run.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// The run that was read.
    run: String,
    /// The command.
    command: String,
    /// How the run ended.
    outcome: String,
    /// The verdict, in the sentences of the report.
    verdict: Vec<String>,
    /// The exit status or the signal of the command. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit: Option<String>,
    /// The GPU that a dry run simulated: no kernel ran, and allocations are those of that GPU. Absent for a real one.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated_gpu: Option<String>,
    /// How long it took. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    duration: Option<String>,
    /// The version of memtrace that recorded it. Absent for a snapshot of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    memtrace_version: Option<String>,
    /// The devices of all processes: those with out-of-memory errors first, then by peak.
    devices: Vec<DeviceRow>,
    /// The number of issues. The tool `diagnostics` explains them.
    issues: usize,
    /// The largest issues, in one line each.
    largest_issues: Vec<String>,
    /// The number of suggestions that lower the peak. The tool `diagnostics` lists them.
    suggestions: usize,
    /// The gaps of the recording. Absent if it is complete.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    incomplete: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct DeviceRow {
    #[serde(flatten)]
    id: DeviceId,
    /// The peak of allocated memory (torch.cuda.max_memory_allocated).
    peak: Size,
    /// Its share of the device's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_share: Option<String>,
    /// The step of the peak. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_step: Option<u32>,
    /// The phase of the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_phase: Option<String>,
    /// The peak of reserved memory (torch.cuda.max_memory_reserved).
    reserved_peak: Size,
    /// The largest categories at the peak, for example `activation 7.57 GiB`.
    largest_categories: Vec<String>,
    /// The number of steps.
    steps: u32,
    /// A typical step, one line a phase. Absent without one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    typical_step: Vec<String>,
    /// The number of out-of-memory errors. The tool `out_of_memory` explains them.
    out_of_memory_errors: u64,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { run: RunPath(run), rank, pid, limit, offset } = arguments;
    let summary = memtrace.summary(&run).await?;
    let selection = Selection { rank, pid, device: None };
    let processes = selection.processes(&run, &summary)?;
    let devices = selection.devices(&run, &summary)?;
    let everything = format!("memtrace report {} --json", shell_word(&run.to_string_lossy()));
    fit((limit, offset), &everything, |shape| Content {
        run: shape.path(&run.display().to_string()),
        command: shape.text(&summary.run.command.join(" ")),
        outcome: shape.text(&summary.run.outcome),
        verdict: shape.first("verdict", &summary.verdict.sentences(), |text| shape.text(text)),
        exit: summary.run.exit.text(),
        simulated_gpu: summary.run.simulated.as_ref().map(|simulated| simulated.gpu.clone()),
        duration: summary.run.duration_ns.map(duration_text),
        memtrace_version: summary.run.memtrace_version.clone(),
        devices: shape.page("devices", &devices, |(process, device)| row(process, device, shape)),
        issues: processes.iter().map(|process| process.issues.len()).sum(),
        largest_issues: processes
            .iter()
            .flat_map(|process| &process.issues)
            .take(TOP_ISSUES)
            .map(|issue| shape.text(&format!("{}: {}", issue.rule, issue.headline)))
            .collect(),
        suggestions: devices.iter().map(|(_, device)| device.suggestions.len()).sum(),
        incomplete: shape.first("incomplete", &summary.gaps, |gap| shape.text(&format!("{}: {}", gap.label, gap.text))),
    })
}

fn row(process: &ProcessSummary, device: &DeviceSummary, shape: &Shape) -> DeviceRow {
    let peak = device.peak.as_ref();
    let categories = largest_first(peak.map_or(&[], |peak| &peak.by_category), |category| category.bytes);
    let category = |amount: &&CategoryAmount| format!("{} {}", amount.category.name(), size(amount.bytes));
    DeviceRow {
        id: DeviceId::of(process, device),
        peak: Size::of(device.peak_bytes()),
        peak_share: device.total_bytes.map(|total| percent(device.peak_bytes(), total)),
        peak_step: peak.and_then(|peak| peak.step),
        peak_phase: peak.map(|peak| peak.phase.name().to_owned()),
        reserved_peak: Size::of(device.highest.reserved_bytes),
        largest_categories: categories.iter().take(TOP_CATEGORIES).map(category).collect(),
        steps: device.steps,
        typical_step: device.typical_step.as_ref().map(|step| phases(step, shape)).unwrap_or_default(),
        out_of_memory_errors: device.oom_count,
    }
}

fn phases(step: &StepSummary, shape: &Shape) -> Vec<String> {
    shape.first("typical_step", &step.phases, |phase| {
        let (start, peak, end) = (size(phase.start_bytes), size(phase.peak_bytes), size(phase.end_bytes));
        format!("step {} {}: start {start}, peak {peak}, end {end}", step.step, phase.phase.name())
    })
}

fn size(bytes: u64) -> String {
    memtrace_analysis::report::size_text(bytes)
}
