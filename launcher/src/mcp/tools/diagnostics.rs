//! The tool `diagnostics`: the issues of a run with evidence and fix, and suggestions with the peak after them.

use memtrace_analysis::report::{DeviceSummary, IssueSummary, ProcessSummary, SuggestionSummary};
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::arguments::RunPath;
use super::place::SourceLocation;
use super::selection::Selection;
use crate::mcp::answer::{Shape, Size, fit};
use crate::mcp::command::{Memtrace, shell_word};
use crate::mcp::tool_error::ToolError;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    run: RunPath,
    /// Only processes of this rank.
    rank: Option<u32>,
    /// Only the process with this id.
    pid: Option<u32>,
    /// Only this device; -1 is the CPU.
    device: Option<i16>,
    /// The maximum number of issues, and of suggestions. Default: 10.
    limit: Option<usize>,
    /// The number of issues, and of suggestions, to skip.
    offset: Option<usize>,
}

/// Issues and suggestions.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// The issues, largest first. docs/reference/diagnostics.md explains each rule.
    issues: Vec<IssueRow>,
    /// Changes that lower the peak, or the memory in use at the out-of-memory error: cheapest first.
    suggestions: Vec<SuggestionRow>,
    /// The meaning of the out-of-memory error, if no rule matched.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    remarks: Vec<String>,
}

#[derive(Serialize, JsonSchema, Debug)]
struct IssueRow {
    /// The diagnostic rule.
    rule: String,
    /// The issue in one line.
    headline: String,
    /// The memory that is held needlessly.
    cost: Size,
    /// By how much the fix lowers the peak. Absent if the run does not show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    saves: Option<Size>,
    /// The line to change, or of the allocations.
    place: Option<SourceLocation>,
    /// The measured facts.
    evidence: Vec<String>,
    /// The change to the program.
    fix: String,
    /// The Python paths that hold the tensors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    held_by: Vec<String>,
    /// When the memory would be full.
    #[serde(skip_serializing_if = "Option::is_none")]
    forecast: Option<String>,
    /// How to record more about this issue.
    #[serde(skip_serializing_if = "Option::is_none")]
    help: Option<String>,
    #[serde(flatten)]
    of: Owner,
}

#[derive(Serialize, JsonSchema, Debug)]
struct SuggestionRow {
    /// The rule of the suggestion.
    rule: String,
    /// The change to the program.
    action: String,
    /// The peak with the change, by a replay of the run.
    peak_after: Size,
    /// Whether `peak_after` is an upper bound.
    at_most: bool,
    /// By how much the change lowers the peak.
    saves: Size,
    /// Whether the device's memory suffices with the change. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
    /// The part of the run that the figures cover: `run`, `iteration` or `until_error`.
    scope: String,
    /// The condition of the rule, and the figures of this run.
    evidence: String,
    /// The change that the replay makes.
    method: String,
    #[serde(flatten)]
    of: Owner,
}

/// The process and device of a row.
#[derive(Serialize, JsonSchema, Debug)]
struct Owner {
    /// The process id.
    pid: u32,
    /// The rank, in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    device: i16,
}

/// Answers a call.
pub(crate) async fn call(memtrace: &Memtrace, arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { run: RunPath(run), rank, pid, device, limit, offset } = arguments;
    let summary = memtrace.summary(&run).await?;
    let selection = Selection { rank, pid, device };
    let devices = selection.devices(&run, &summary)?;
    let processes = selection.processes(&run, &summary)?;
    let mut issues: Vec<(&ProcessSummary, &IssueSummary)> =
        processes.iter().flat_map(|process| process.issues.iter().map(move |issue| (*process, issue))).collect();
    issues.retain(|(_, issue)| device.is_none_or(|id| issue.device == id));
    issues.sort_by_key(|(_, issue)| std::cmp::Reverse(issue.bytes));
    let suggestions: Vec<(&ProcessSummary, &DeviceSummary, &SuggestionSummary)> = devices
        .iter()
        .flat_map(|(process, device)| device.suggestions.iter().map(|suggestion| (*process, *device, suggestion)))
        .collect();
    let remarks: Vec<&String> = processes.iter().filter_map(|process| process.no_issue_remark.as_ref()).collect();
    let everything = format!("memtrace report {} --json", shell_word(&run.to_string_lossy()));
    fit((limit, offset), &everything, |shape| Content {
        issues: shape.page("issues", &issues, |(process, issue)| issue_row(process, issue, shape)),
        suggestions: shape.page("suggestions", &suggestions, |(process, device, suggestion)| {
            suggestion_row(process, device, suggestion, shape)
        }),
        remarks: shape.first("remarks", &remarks, |remark| shape.text(remark)),
    })
}

fn issue_row(process: &ProcessSummary, issue: &IssueSummary, shape: &Shape) -> IssueRow {
    IssueRow {
        rule: issue.rule.to_string(),
        headline: shape.text(&issue.headline),
        cost: Size::of(issue.bytes),
        saves: issue.saves_bytes.map(Size::of),
        place: issue.stack.as_ref().map(|stack| SourceLocation::of(stack, 0, shape)),
        evidence: shape.first("evidence", &issue.evidence, |fact| shape.text(fact)),
        fix: shape.text(&issue.fix),
        held_by: shape.first("held_by", &issue.held_by, |holder| {
            format!("{} {}", shape.text(&holder.path), memtrace_analysis::report::size_text(holder.bytes))
        }),
        forecast: issue.forecast.as_ref().map(|forecast| forecast.text.clone()),
        help: issue.help.as_deref().map(|help| shape.text(help)),
        of: Owner { pid: process.pid, rank: process.rank, device: issue.device },
    }
}

fn suggestion_row(
    process: &ProcessSummary,
    device: &DeviceSummary,
    suggestion: &SuggestionSummary,
    shape: &Shape,
) -> SuggestionRow {
    SuggestionRow {
        rule: suggestion.rule.to_string(),
        action: shape.text(&suggestion.action),
        peak_after: Size::of(suggestion.peak_after_bytes),
        at_most: suggestion.at_most,
        saves: Size::of(suggestion.saves_bytes),
        fits: suggestion.fits,
        scope: suggestion.scope.name().to_owned(),
        evidence: shape.text(&suggestion.evidence),
        method: shape.text(&suggestion.method),
        of: Owner { pid: process.pid, rank: process.rank, device: device.device },
    }
}
