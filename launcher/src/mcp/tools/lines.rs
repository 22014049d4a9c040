//! The tool `lines`: the GPU memory that each source line allocated and freed.

use memtrace_analysis::report::{FunctionLines, LineFigures, LineRow, LinesReport};
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::RunPath;
use super::selection::OtherDevice;
use crate::mcp::answer::{DEFAULT_LIMIT, Shape, Size, fit};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

/// The number of functions that a call may page through.
const MAX_FUNCTIONS: usize = 1000;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    run: RunPath,
    /// A function: its name, its qualified name or the end of it, for example Block.forward. Default: the functions of
    /// the program with the highest peaks.
    function: Option<String>,
    /// The functions of this file: its path or the end of it.
    file: Option<String>,
    /// The process of this rank. Default: the process with the highest peak.
    rank: Option<u32>,
    /// The process with this id.
    pid: Option<u32>,
    /// The device; -1 is the CPU. Default: the device with the highest peak.
    device: Option<i16>,
    /// The maximum number of functions, and of lines of each. Default: 10.
    limit: Option<usize>,
    /// The number of functions to skip.
    offset: Option<usize>,
}

/// A line table.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// The process id.
    pid: u32,
    /// The rank, in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    device: i16,
    /// The peak of active memory of the device.
    active_peak: Size,
    /// The functions, those with the highest peaks first.
    functions: Vec<FunctionRow>,
    /// Other devices with a table of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_devices: Vec<OtherDevice>,
    /// The limits of the figures, and files that could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct FunctionRow {
    /// `FILE:LINE FUNCTION`.
    at: String,
    /// The highest active memory while a line of the function was current.
    active_peak: Size,
    /// The bytes that the function and its callees allocated.
    allocated: Size,
    /// The bytes that they allocated less the bytes that they freed.
    net: Size,
    /// The lines that allocated most, in the order of the file.
    lines: Vec<LineRowContent>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct LineRowContent {
    /// `FILE:LINE`.
    at: String,
    /// The source text, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The highest active memory while the line was current.
    active_peak: Size,
    /// The bytes that the line and the functions that it calls allocated.
    allocated: Size,
    /// The bytes that were allocated less the bytes that were freed while the line was current.
    net: Size,
    /// The bytes that the backward pass of the line's calls allocated. Absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<Size>,
    /// The number of blocks that were allocated.
    allocations: u64,
    /// How often the line ran at least. 0 if it is unknown.
    times: u64,
    /// The largest tensor with a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor: Option<String>,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { run: RunPath(run), function, file, rank, pid, device, limit, offset } = arguments;
    if rank.is_some() && pid.is_some() {
        return Err(ToolError::new("rank and pid cannot be used together", "leave out one of them"));
    }
    let top = offset.unwrap_or(0).saturating_add(limit.unwrap_or(DEFAULT_LIMIT)).clamp(1, MAX_FUNCTIONS);
    let mut options = vec!["lines".to_owned(), "--json".to_owned(), format!("--top={top}")];
    options.extend(function.map(|name| format!("--function={name}")));
    options.extend(file.map(|path| format!("--file={path}")));
    options.extend(rank.map(|rank| format!("--rank={rank}")));
    options.extend(pid.map(|pid| format!("--pid={pid}")));
    options.extend(device.map(|device| format!("--device={device}")));
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let (lines, warnings): (LinesReport, _) = memtrace.json(&options, &[run.as_os_str()]).await?;
    let everything = format!("memtrace lines {} --json --top 1000", shell_word(&run.to_string_lossy()));
    let notes: Vec<String> = lines.notes.iter().cloned().chain(warnings).collect();
    fit((limit, offset), &everything, |shape| {
        let functions = shape.page("functions", &lines.functions, |function| function_row(function, shape));
        if lines.functions_left_out > 0 {
            let next = lines.functions.len();
            shape.note(format!("{} more functions: call again with offset={next}", lines.functions_left_out));
        }
        Content {
            pid: lines.pid,
            rank: lines.rank,
            device: lines.device,
            active_peak: Size::of(lines.active_peak_bytes),
            functions,
            other_devices: shape.first("other_devices", &lines.other_devices, |other| OtherDevice {
                pid: other.pid,
                rank: other.rank,
                device: other.device,
                peak: Size::of(other.active_peak_bytes),
            }),
            notes: shape.first("notes", &notes, |note| shape.text(note)),
        }
    })
}

fn function_row(function: &FunctionLines, shape: &Shape) -> FunctionRow {
    let file = shape.path(&function.filename);
    let mut lines: Vec<(&LineRow, &LineFigures)> =
        function.lines.iter().filter_map(|line| Some((line, line.figures.as_ref()?))).collect();
    lines.sort_by_key(|(_, figures)| std::cmp::Reverse((figures.allocated_bytes, figures.active_peak_bytes)));
    let name = format!("lines of {}", shape.text(&function.function));
    let mut largest = shape.first(&name, &lines, |line| *line);
    largest.sort_by_key(|(line, _)| line.line);
    let line_row = |(line, figures): (&LineRow, &LineFigures)| LineRowContent {
        at: format!("{file}:{}", line.line),
        text: line.text.as_deref().map(|text| shape.text(text.trim())),
        active_peak: Size::of(figures.active_peak_bytes),
        allocated: Size::of(figures.allocated_bytes),
        net: Size::change(figures.net_bytes),
        backward: (figures.backward_bytes > 0).then(|| Size::of(figures.backward_bytes)),
        allocations: figures.allocations,
        times: figures.times,
        tensor: line.largest_tensor.as_ref().map(|tensor| shape.text(&tensor.name)),
    };
    FunctionRow {
        at: format!("{file}:{} {}", function.first_line, shape.text(&function.function)),
        active_peak: Size::of(function.active_peak_bytes),
        allocated: Size::of(function.allocated_bytes),
        net: Size::change(function.net_bytes),
        lines: largest.into_iter().map(line_row).collect(),
    }
}
