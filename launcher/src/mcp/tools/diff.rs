//! The tool `diff`: why the peak of one run is higher than that of another.

use std::path::PathBuf;

use memtrace_analysis::report::{Change, DevicePair, DiffPeak, DiffReport, DiffRun, LineChange};
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::place::frame_text;
use super::selection::OtherDevice;
use crate::mcp::answer::{Shape, Size, fit};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    /// The baseline: a run folder, a .mtr file or a PyTorch memory snapshot.
    a: PathBuf,
    /// The run to compare with it. Default: run `a`; then `step_a` and `step_b` are needed.
    b: Option<PathBuf>,
    /// The step of run `a` whose peak is compared, counted from 0. Default: the peak of the run.
    step_a: Option<u32>,
    /// The step of run `b` whose peak is compared, counted from 0. Default: the peak of the run.
    step_b: Option<u32>,
    /// Only processes of this rank.
    rank: Option<u32>,
    /// Only this device; -1 is the CPU.
    device: Option<i16>,
    /// The maximum number of items of each list. Default: 10.
    limit: Option<usize>,
    /// The number of lines to skip.
    offset: Option<usize>,
}

/// The comparison of two peaks.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// The baseline.
    a: RunRow,
    /// The run that is compared with it.
    b: RunRow,
    /// The devices that are in both runs, largest difference first. Differences are B minus A.
    devices: Vec<PairRow>,
    /// The devices that are in one run only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    only_in_a: Vec<OtherDevice>,
    /// The devices that are in one run only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    only_in_b: Vec<OtherDevice>,
    /// The limits of the comparison, and files that could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct RunRow {
    /// The run that was read.
    run: String,
    /// The command.
    command: String,
    /// The step that is compared. Absent for the peak of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct PairRow {
    /// The result in one line.
    headline: String,
    /// `same`, `redistributed`, `grew` or `shrank`.
    result: String,
    /// The rank, in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    device: i16,
    /// The difference of the peaks.
    difference: Size,
    /// Differences up to this size are ignored.
    noise: Size,
    /// The peak of run A.
    a: PeakRow,
    /// The peak of run B.
    b: PeakRow,
    /// Differences by category.
    by_category: Vec<ChangeRow>,
    /// Differences by phase.
    by_phase: Vec<ChangeRow>,
    /// Differences by source line and category, largest first.
    by_line: Vec<ChangeRow>,
    /// Differences by `nn.Module`, largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    by_module: Vec<ChangeRow>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct PeakRow {
    /// Allocated memory at the peak.
    allocated: Size,
    /// Reserved memory at the peak.
    reserved: Size,
    /// The step. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
    /// The phase.
    phase: String,
    /// The line of the allocation that reached the peak.
    at: String,
}

#[derive(Serialize, JsonSchema, Debug)]
struct ChangeRow {
    /// The category, phase or module, or `FILE:LINE FUNCTION` of run B, or of run A if run B lacks the line.
    name: String,
    /// The category of the line's blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    category: Option<String>,
    /// The difference.
    difference: Size,
    /// The memory in run A.
    a: Size,
    /// The memory in run B.
    b: Size,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { a, b, step_a, step_b, rank, device, limit, offset } = arguments;
    let mut options = vec!["diff".to_owned(), "--json".to_owned()];
    match (step_a, step_b, &b) {
        (Some(a), Some(b), _) => options.extend(["--steps".to_owned(), a.to_string(), b.to_string()]),
        (None, None, Some(_)) => {}
        (None, None, None) => {
            return Err(ToolError::new("there is nothing to compare with", "pass b, or step_a and step_b"));
        }
        _ => return Err(ToolError::new("a step is compared with a step", "pass both step_a and step_b")),
    }
    options.extend(rank.map(|rank| format!("--rank={rank}")));
    options.extend(device.map(|device| format!("--device={device}")));
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let paths: Vec<_> = std::iter::once(&a).chain(&b).map(|path| path.as_os_str()).collect();
    let (diff, warnings): (DiffReport, _) = memtrace.json(&options, &paths).await?;
    let shown: Vec<String> = paths.iter().map(|path| shell_word(&path.to_string_lossy())).collect();
    let everything = format!("memtrace {} {}", options.join(" "), shown.join(" "));
    let notes: Vec<String> = diff.notes.iter().cloned().chain(warnings).collect();
    fit((limit, offset), &everything, |shape| {
        let only_in = |name: &str, run: &str| {
            let devices: Vec<_> = diff.unpaired.iter().filter(|device| device.run == run).collect();
            shape.first(name, &devices, |device| OtherDevice {
                pid: device.pid,
                rank: device.rank,
                device: device.device,
                peak: Size::of(device.peak_bytes),
            })
        };
        Content {
            a: run_row(&diff.a, shape),
            b: run_row(&diff.b, shape),
            devices: shape.first("devices", &diff.pairs, |pair| pair_row(pair, shape)),
            only_in_a: only_in("only_in_a", "a"),
            only_in_b: only_in("only_in_b", "b"),
            notes: shape.first("notes", &notes, |note| shape.text(note)),
        }
    })
}

fn run_row(run: &DiffRun, shape: &Shape) -> RunRow {
    RunRow { run: shape.path(&run.path), command: shape.text(&run.command.join(" ")), step: run.step }
}

fn pair_row(pair: &DevicePair, shape: &Shape) -> PairRow {
    let change = |name: Option<&str>, change: Change| ChangeRow {
        name: name.map_or("unknown".to_owned(), |name| shape.text(name)),
        category: None,
        difference: Size::change(change.difference_bytes),
        a: Size::of(change.a_bytes),
        b: Size::of(change.b_bytes),
    };
    let categories = changed(&pair.by_category, |c| c.change.difference_bytes);
    let phases = changed(&pair.by_phase, |p| p.change.difference_bytes);
    let lines = changed(&pair.by_line, |line| line.change.difference_bytes);
    let modules = changed(&pair.by_module, |module| module.change.difference_bytes);
    PairRow {
        headline: shape.text(&pair.headline),
        result: pair.result.name().to_owned(),
        rank: pair.b.rank,
        device: pair.b.device,
        difference: Size::change(pair.difference_bytes),
        noise: Size::of(pair.noise_bytes),
        a: peak_row(&pair.a, shape),
        b: peak_row(&pair.b, shape),
        by_category: shape
            .first("by_category", &categories, |c| change(c.category.map(|category| category.name()), c.change)),
        by_phase: shape.first("by_phase", &phases, |p| change(p.phase.map(|phase| phase.name()), p.change)),
        by_line: shape.page("by_line", &lines, |line| line_row(line, shape)),
        by_module: shape.first("by_module", &modules, |module| change(module.path.as_deref(), module.change)),
    }
}

fn peak_row(peak: &DiffPeak, shape: &Shape) -> PeakRow {
    PeakRow {
        allocated: Size::of(peak.totals.allocated_bytes),
        reserved: Size::of(peak.totals.reserved_bytes),
        step: peak.step,
        phase: peak.phase.name().to_owned(),
        at: shape.text(&peak.location),
    }
}

fn line_row(line: &LineChange, shape: &Shape) -> ChangeRow {
    let frame = line.b_frame.as_ref().or(line.a_frame.as_ref());
    ChangeRow {
        name: frame.map_or_else(|| shape.text(&line.location), |frame| frame_text(frame, shape)),
        category: line.category.map(|category| category.name().to_owned()),
        difference: Size::change(line.change.difference_bytes),
        a: Size::of(line.change.a_bytes),
        b: Size::of(line.change.b_bytes),
    }
}

/// The rows that differ, largest difference first.
fn changed<T>(rows: &[T], difference: impl Fn(&T) -> i64) -> Vec<&T> {
    let mut changed: Vec<&T> = rows.iter().filter(|row| difference(row) != 0).collect();
    changed.sort_by_key(|row| std::cmp::Reverse(difference(row).unsigned_abs()));
    changed
}
