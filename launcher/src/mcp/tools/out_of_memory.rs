//! The tool `out_of_memory`: why a request for memory failed.

use memtrace_analysis::report::{DeviceSummary, OomSummary, ProcessSummary, RefusedRequestSummary, ReplayedSetting};
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::RunPath;
use super::place::SourceLocation;
use super::selection::{DeviceId, OtherDevice, Selection};
use super::state::Held;
use crate::mcp::answer::{Shape, Size, fit};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

/// The number of frames of the failed request by default, and at most.
const FRAMES: (usize, usize) = (8, 50);

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    run: RunPath,
    /// The process of this rank. Default: the process with an out-of-memory error.
    rank: Option<u32>,
    /// The process with this id.
    pid: Option<u32>,
    /// The device. Default: the device with an out-of-memory error.
    device: Option<i16>,
    /// Which of the device's errors, counted from 0. Default: the one that ended the process, or else the first.
    error: Option<usize>,
    /// The number of frames of the failed request. Default: 8.
    frames: Option<usize>,
    /// The maximum number of items of each list. Default: 10.
    limit: Option<usize>,
    /// The number of largest allocations to skip.
    offset: Option<usize>,
}

/// An out-of-memory error.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// How the run ended.
    outcome: String,
    /// The number of out-of-memory errors of the selected devices.
    out_of_memory_errors: u64,
    /// The error. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorContent>,
    /// Requests for memory that CUDA refused to other callers than PyTorch's allocator, and what would have served
    /// them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused_requests: Vec<RefusedRequest>,
    /// Other devices with out-of-memory errors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_devices: Vec<OtherDevice>,
}

/// A request that CUDA refused to another caller than PyTorch's allocator.
#[derive(Serialize, JsonSchema, Debug)]
struct RefusedRequest {
    pid: u32,
    /// The number of bytes that were requested at least.
    requested: Size,
    /// Who requested it and where, as text.
    text: String,
    /// Why it was refused and what would have served it, as text.
    details: String,
}

impl RefusedRequest {
    fn of(process: &ProcessSummary, request: &RefusedRequestSummary, shape: &Shape) -> RefusedRequest {
        RefusedRequest {
            pid: process.pid,
            requested: Size::of(request.requested_bytes),
            text: shape.text(&request.text),
            details: shape.text(&request.details.join(" ")),
        }
    }
}

#[derive(Serialize, JsonSchema, Debug)]
struct ErrorContent {
    #[serde(flatten)]
    id: DeviceId,
    /// Which of the device's errors this is, counted from 0.
    index: usize,
    /// Whether the error ended the process. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    fatal: Option<bool>,
    /// The size of the request.
    requested: Size,
    /// The place of the request.
    requested_at: SourceLocation,
    /// The purpose of the request, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    requested_for: Option<String>,
    /// How much memory CUDA lacked.
    #[serde(skip_serializing_if = "Option::is_none")]
    short: Option<Size>,
    /// Free memory of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<Size>,
    /// Free memory that PyTorch had reserved.
    reserved_but_unallocated: Size,
    /// Its largest block. A request that is larger needs new memory.
    largest_free_block: Size,
    /// Memory of this process outside PyTorch's caching allocator.
    outside_pytorch: Size,
    /// CUDA contexts and other processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    contexts_and_other_processes: Option<Size>,
    /// Free memory of the device that a limit (a library such as HAMi-core) keeps from this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    held_back_by_a_limit: Option<Size>,
    /// Whether PyTorch's own limit (set_per_process_memory_fraction) refused the request.
    refused_by_pytorch: bool,
    /// The memory when the request failed.
    in_use: Held,
    /// The memory that the interrupted step still needed. Absent if the recording does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    rest_of_step: Option<RestOfStep>,
    /// The results of other allocator settings (PYTORCH_CUDA_ALLOC_CONF), by a replay.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allocator_settings: Vec<SettingRow>,
    /// The meaning of the error, if no diagnostic rule matched.
    #[serde(skip_serializing_if = "Option::is_none")]
    remark: Option<String>,
    /// The issues of this process in one line each. The tool `diagnostics` has evidence and fixes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    issues: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct RestOfStep {
    /// The memory that the whole step needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    needed: Option<Size>,
    /// Whether `needed` is a lower bound.
    at_least: bool,
    /// The memory that the allocator could have had.
    #[serde(skip_serializing_if = "Option::is_none")]
    available: Option<Size>,
    /// The parts of the step that had not run.
    still_to_come: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct SettingRow {
    /// The setting.
    setting: String,
    /// Whether the failed request would have succeeded. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_fits: Option<bool>,
    /// Whether the rest of the step would have succeeded, too. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    step_fits: Option<bool>,
    /// The peak of reserved memory.
    reserved_peak: Size,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { run: RunPath(run), rank, pid, device, error, frames, limit, offset } = arguments;
    let frames = frames.unwrap_or(FRAMES.0).min(FRAMES.1);
    let summary = memtrace.summary(&run).await?;
    let mut devices = Selection { rank, pid, device }.devices(&run, &summary)?;
    let mut refused: Vec<(&ProcessSummary, &RefusedRequestSummary)> = Vec::new();
    for (process, _) in &devices {
        if refused.iter().all(|(one, _)| one.pid != process.pid) {
            refused.extend(process.refused_requests.iter().map(|request| (*process, request)));
        }
    }
    devices.retain(|(_, device)| !device.ooms.is_empty());
    let explained = match devices.first() {
        None => None,
        Some((process, device)) => {
            let index = error.or(device.explained_oom).unwrap_or(0);
            let Some(oom) = device.ooms.get(index) else {
                let text = format!("{} has no out-of-memory error {index}", run.display());
                let last = device.ooms.len().saturating_sub(1);
                return Err(ToolError::new(text, format!("its recorded errors are 0 to {last}")));
            };
            Some((*process, *device, index, oom))
        }
    };
    let everything = format!("memtrace report {} --json", shell_word(&run.to_string_lossy()));
    fit((limit, offset), &everything, |shape| Content {
        outcome: shape.text(&summary.run.outcome),
        out_of_memory_errors: devices.iter().map(|(_, device)| device.oom_count).sum(),
        error: explained.map(|(process, device, index, oom)| content(process, device, index, oom, frames, shape)),
        refused_requests: shape
            .first("refused_requests", &refused, |(process, request)| RefusedRequest::of(process, request, shape)),
        other_devices: shape.first("other_devices", devices.get(1..).unwrap_or_default(), OtherDevice::of),
    })
}

fn content(
    process: &ProcessSummary,
    device: &DeviceSummary,
    index: usize,
    oom: &OomSummary,
    frames: usize,
    shape: &Shape,
) -> ErrorContent {
    let is_explained = device.explained_oom == Some(index);
    // The replay is about the explained error.
    let settings = device.what_if.as_ref().filter(|_| is_explained).map(|what_if| what_if.settings.as_slice());
    ErrorContent {
        id: DeviceId::of(process, device),
        index,
        fatal: oom.fatal,
        requested: Size::of(oom.requested_bytes),
        requested_at: SourceLocation::of(&oom.requested_at, frames, shape),
        requested_for: oom.requested_for.as_ref().or(oom.as_large_as.as_ref()).map(|name| {
            let how = if oom.requested_for.is_some() { "" } else { "as large as " };
            format!("{how}{}", shape.text(name))
        }),
        short: oom.short_bytes.map(Size::of),
        device_free: oom.device_free_bytes.map(Size::of),
        reserved_but_unallocated: Size::of(oom.reserved_but_unallocated_bytes),
        largest_free_block: Size::of(oom.largest_free_bytes),
        outside_pytorch: Size::of(oom.outside_pytorch_bytes),
        contexts_and_other_processes: oom.contexts_and_other_processes_bytes.map(Size::of),
        held_back_by_a_limit: oom.held_back_bytes.map(Size::of),
        refused_by_pytorch: oom.refused_by_pytorch,
        in_use: Held::of(&oom.in_use, 0, shape),
        rest_of_step: oom.step_estimate.as_ref().map(|estimate| RestOfStep {
            needed: estimate.needed_bytes.map(Size::of),
            at_least: estimate.at_least,
            available: estimate.available_bytes.map(Size::of),
            still_to_come: shape.first("still_to_come", &estimate.still_to_come, |part| {
                let size = part.bytes.map(|bytes| format!(": {}", memtrace_analysis::report::size_text(bytes)));
                shape.text(&format!("{}{}", part.text, size.unwrap_or_default()))
            }),
        }),
        allocator_settings: shape.first("allocator_settings", settings.unwrap_or_default(), row),
        remark: process.no_issue_remark.as_deref().map(|remark| shape.text(remark)),
        issues: shape
            .first("issues", &process.issues, |issue| shape.text(&format!("{}: {}", issue.rule, issue.headline))),
    }
}

fn row(setting: &ReplayedSetting) -> SettingRow {
    SettingRow {
        setting: setting.setting.clone(),
        request_fits: setting.fits,
        step_fits: setting.step_fits,
        reserved_peak: Size::of(setting.reserved_peak_bytes),
    }
}
