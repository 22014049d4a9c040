//! The tool `runs`: the run folders in a folder, newest first.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{MANIFEST_FILE, Manifest, RunState};
use memtrace_analysis::report::Summary;
use memtrace_trace::file::untrusted;
use rmcp::model::CallToolResult;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mcp::answer::{DEFAULT_LIMIT, MAX_LIMIT, Shape, Size, fit};
use crate::mcp::command::shell_word;
use crate::mcp::tool_error::ToolError;

/// The summary that `memtrace run` writes into the run folder.
const SUMMARY_FILE: &str = "summary.json";
/// The largest summary that is read for one row, in bytes.
const MAX_SUMMARY: u64 = 64 << 20;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    /// The folder that contains run folders. Default: the working folder of the server.
    folder: Option<PathBuf>,
    /// The maximum number of runs. Default: 10.
    limit: Option<usize>,
    /// The number of runs to skip.
    offset: Option<usize>,
}

/// The run folders of a folder.
#[derive(Serialize, JsonSchema, Debug)]
pub(crate) struct Content {
    /// The folder.
    folder: String,
    /// The number of run folders in it.
    count: usize,
    /// The runs, newest first.
    runs: Vec<RunRow>,
}

/// A run in one row.
#[derive(Serialize, JsonSchema, Clone, Debug)]
pub(super) struct RunRow {
    /// The argument `run` of the other tools.
    run: String,
    /// The command.
    command: String,
    /// When it started, in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<String>,
    /// How it ended. `running` also if memtrace was killed.
    outcome: String,
    /// The GPU that a dry run simulated. Absent where the command ran on a real one.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated_gpu: Option<String>,
    /// The number of processes that recorded events.
    processes: usize,
    /// The highest peak of a device of a process. Absent until the run has a summary.
    #[serde(skip_serializing_if = "Option::is_none")]
    highest_peak: Option<Size>,
    /// The number of out-of-memory errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    out_of_memory_errors: Option<u64>,
    /// The number of issues.
    #[serde(skip_serializing_if = "Option::is_none")]
    issues: Option<usize>,
}

impl RunRow {
    /// The row of a run folder. `None` if it cannot be read.
    pub(super) fn read(path: &Path) -> Option<RunRow> {
        let folder = RunFolder::open(path).ok()?;
        let manifest = Manifest::read(&folder).ok()??;
        let summary: Option<Summary> = (|| {
            let file = folder.open_file(SUMMARY_FILE).ok()?;
            Summary::from_json(&untrusted::read(&file, MAX_SUMMARY).ok()?).ok()
        })();
        let devices = || summary.iter().flat_map(|summary| &summary.processes).flat_map(|process| &process.devices);
        let ended = match manifest.state {
            Some(RunState::Running) => "running".to_owned(),
            _ => manifest.exit.text().unwrap_or_else(|| "ended".to_owned()),
        };
        Some(RunRow {
            run: path.display().to_string(),
            command: manifest.command.join(" "),
            started: manifest.started_ns.map(utc),
            outcome: summary.as_ref().map_or(ended, |summary| summary.run.outcome.clone()),
            simulated_gpu: manifest.simulated.map(|simulated| simulated.gpu),
            processes: summary.as_ref().map_or(manifest.processes.len(), |summary| summary.processes.len()),
            highest_peak: summary.as_ref().and(devices().map(|device| device.peak_bytes()).max().map(Size::of)),
            out_of_memory_errors: summary.as_ref().map(|_| devices().map(|device| device.oom_count).sum()),
            issues: summary.as_ref().map(|summary| summary.processes.iter().map(|process| process.issues.len()).sum()),
        })
    }

    /// The row with texts of a shape.
    pub(super) fn shown(&self, shape: &Shape) -> RunRow {
        let (command, outcome) = (shape.text(&self.command), shape.text(&self.outcome));
        RunRow { command, outcome, ..self.clone() }
    }
}

/// A point in time in UTC, to the second.
fn utc(ns: u64) -> String {
    let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(ns / 1_000_000_000);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Answers a call.
pub(crate) fn call(arguments: Arguments) -> Result<CallToolResult, ToolError> {
    let Arguments { folder, limit, offset } = arguments;
    let folder = folder.unwrap_or_else(|| ".".into());
    let entries = std::fs::read_dir(&folder).map_err(|e| {
        let text = format!("cannot read the folder {}: {}", folder.display(), reason(&e));
        ToolError::new(text, "pass a folder that contains run folders")
    })?;
    let begun = |path: &Path| path.join(MANIFEST_FILE).metadata().ok()?.modified().ok();
    let runs = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut runs: Vec<(SystemTime, PathBuf)> = runs.filter_map(|path| Some((begun(&path)?, path))).collect();
    // A run folder itself is meant as its only run.
    if runs.is_empty() {
        runs.extend(begun(&folder).map(|time| (time, folder.clone())));
    }
    runs.sort_by(|a, b| b.cmp(a));
    // Only the requested rows are read.
    let first = offset.unwrap_or(0);
    let last = first.saturating_add(limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT));
    let rows: Vec<Option<RunRow>> = runs
        .iter()
        .enumerate()
        .map(|(i, (_, path))| {
            let path = path.strip_prefix("./").unwrap_or(path);
            (first..last).contains(&i).then(|| RunRow::read(path)).flatten()
        })
        .collect();
    fit((limit, offset), &format!("ls {}", shell_word(&folder.to_string_lossy())), |shape| Content {
        folder: shape.path(&folder.display().to_string()),
        count: rows.len(),
        runs: shape.page("runs", &rows, |row| row.as_ref().map(|row| row.shown(shape))).into_iter().flatten().collect(),
    })
}

/// The system's reason without its number.
fn reason(e: &std::io::Error) -> String {
    let text = e.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
