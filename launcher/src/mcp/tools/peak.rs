//! The tool `peak`: what filled the memory of a device at its peak.

use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::RunPath;
use super::place::SourceLocation;
use super::selection::{DeviceId, OtherDevice, Selection};
use super::state::Held;
use crate::mcp::answer::{Size, fit};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

/// The number of frames of a stack that a call may request.
const MAX_FRAMES: usize = 50;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    run: RunPath,
    /// The process of this rank. Default: the process with an out-of-memory error or the highest peak.
    rank: Option<u32>,
    /// The process with this id.
    pid: Option<u32>,
    /// The device; -1 is the CPU. Default: the device with an out-of-memory error or the highest peak.
    device: Option<i16>,
    /// The number of frames of each call stack. Default: 0, only the place in the program.
    frames: Option<usize>,
    /// The maximum number of items of each list. Default: 10.
    limit: Option<usize>,
    /// The number of largest allocations to skip.
    offset: Option<usize>,
}

/// The peak of a device.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    #[serde(flatten)]
    id: DeviceId,
    /// The memory at the peak of allocated bytes. Absent if nothing was allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak: Option<Held>,
    /// The allocation that reached the peak. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    reached_by: Option<SourceLocation>,
    /// The highest reserved memory of the recording.
    reserved_peak: Size,
    /// Reserved memory that is free and cannot be released, because blocks in use are in the same segments.
    #[serde(skip_serializing_if = "Option::is_none")]
    fragmentation: Option<Fragmentation>,
    /// Other selected devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_devices: Vec<OtherDevice>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct Fragmentation {
    /// Free memory that the allocator cannot release.
    blocked: Size,
    /// Free memory that the allocator can release.
    releasable: Size,
    /// The blocks that alone keep segments.
    blocked_by: Vec<Blocking>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct Blocking {
    /// The free memory in these segments.
    free: Size,
    #[serde(flatten)]
    place: SourceLocation,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { run: RunPath(run), rank, pid, device, frames, limit, offset } = arguments;
    let frames = frames.unwrap_or(0).min(MAX_FRAMES);
    let summary = memtrace.summary(&run).await?;
    let devices = Selection { rank, pid, device }.devices(&run, &summary)?;
    let Some(((process, device), others)) = devices.split_first() else {
        return Err(ToolError::new("no device is selected", "leave out rank, pid and device"));
    };
    let everything = format!("memtrace report {} --json", shell_word(&run.to_string_lossy()));
    fit((limit, offset), &everything, |shape| Content {
        id: DeviceId::of(process, device),
        peak: device.peak.as_ref().map(|peak| Held::of(peak, frames, shape)),
        reached_by: device
            .peak
            .as_ref()
            .and_then(|peak| peak.allocated_at.as_ref())
            .map(|stack| SourceLocation::of(stack, frames, shape)),
        reserved_peak: Size::of(device.highest.reserved_bytes),
        fragmentation: device.reserved.as_ref().map(|reserved| Fragmentation {
            blocked: Size::of(reserved.blocked_bytes),
            releasable: Size::of(reserved.releasable_bytes),
            blocked_by: shape.first("blocked_by", &reserved.blocked_by, |blocking| Blocking {
                free: Size::of(blocking.free_bytes),
                place: SourceLocation::of(&blocking.allocated_at, frames, shape),
            }),
        }),
        other_devices: shape.first("other_devices", others, OtherDevice::of),
    })
}
