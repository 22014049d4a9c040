//! Limits and baselines: `CheckReport`. `analysis/schema/check.schema.json` describes its JSON.
//!
//! An incomplete recording fails the check. Reasons are a limit that the recording cannot answer, lost events,
//! processes that used CUDA and were not recorded, or a program that did not end successfully.
//! [`CheckOptions::allow_incomplete`] accepts such a recording.
//!
//! The doc comments of the report types are the descriptions in the JSON Schema.

use schemars::JsonSchema;
use serde::Serialize;

use crate::compare::line_text;
use crate::device_names::{device_name, process_name};
use crate::diff::{DevicePair, DiffReport};
use crate::json_text::json_text;
use crate::launch::LaunchIssueSummary;
use crate::positions::when;
use crate::refused::RefusedRequestSummary;
use crate::summary::is_snapshot;
use crate::summary::{DeviceSummary, ProcessSummary, ReleasedSummary, StackSummary, Summary, schema_text};
use memtrace_insight::diagnostics::diagnostic_rules;
use memtrace_insight::passes::{Category, Phase, ReleasePoint};
use memtrace_insight::rules::RuleId;
use memtrace_insight::rules::is_library;
use memtrace_insight::units::{count_text, signed_size_text, size_text};

/// The version of the structure: major.minor.
pub const CHECK_VERSION: &str = "2.0";

/// Losses that do not affect any peak.
const HARMLESS: [&str; 11] = [
    "definitions_dropped",
    "forward_stacks_lost",
    "labels_dropped",
    "names_dropped",
    "nn_calls_merged",
    "reporter_mismatches",
    "stacks_truncated",
    "strings_truncated",
    "unknown_definitions",
    "unmatched_cuda_frees",
    "unwrapped_entry_points",
];

/// How far a run may exceed its baseline.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tolerance {
    /// A share of the baseline: 0.02 is 2 %.
    Share(f64),
    /// A number of bytes.
    Bytes(u64),
}

impl Tolerance {
    fn of(self, bytes: u64) -> u64 {
        match self {
            Tolerance::Share(share) => bytes.saturating_add((bytes as f64 * share) as u64),
            Tolerance::Bytes(more) => bytes.saturating_add(more),
        }
    }
}

/// The limits for a run. Sizes are in bytes; `None` means no limit.
#[derive(Clone, PartialEq, Debug)]
pub struct CheckOptions {
    /// The maximum peak of allocated bytes of any device of any process (`torch.cuda.max_memory_allocated`).
    pub max_peak: Option<u64>,
    /// The maximum peak of reserved bytes (`torch.cuda.max_memory_reserved`).
    pub max_reserved: Option<u64>,
    /// The maximum growth per step after the second step.
    pub max_leak: Option<u64>,
    /// The maximum bytes at the peak, by category: a category's name in JSON, or the name of a custom category.
    pub max_categories: Vec<(String, u64)>,
    /// A point at which the program releases memory, and the maximum bytes that this process may still have on the
    /// device.
    pub released_after: Option<(ReleasePoint, u64)>,
    /// Whether out-of-memory errors fail the check, caught or not.
    pub no_oom: bool,
    /// The diagnostic rules whose issues fail the check.
    pub no_issues: Vec<String>,
    /// How far a run may exceed its baseline, if there is one.
    pub tolerance: Tolerance,
    /// Checks only processes of this rank.
    pub rank: Option<u32>,
    /// Checks only this device.
    pub device: Option<i16>,
    /// Whether an incomplete recording passes.
    pub allow_incomplete: bool,
}

/// The result of a check: each limit with the measured value. A field whose name ends in `_bytes` is in bytes.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct CheckReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The path of the run folder, trace or snapshot that was checked.
    pub run: String,
    /// Whether every limit passed.
    pub passed: bool,
    /// The result in one line: `ok` or `FAIL`, and the limits.
    pub headline: String,
    /// The result of each limit for each device. Failed limits come first.
    pub results: Vec<CheckResult>,
    /// Further facts about the run or the baseline, as text.
    pub notes: Vec<String>,
}

/// The result of one limit for one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, JsonSchema)]
pub struct CheckResult {
    /// The name of the limit: `max-peak`, `max-reserved`, `max-leak`, `max-category`, `released-after`, `no-oom`,
    /// `no-issue`, `baseline-peak` or `baseline-reserved`. `recording` stands for a gap of the recording.
    pub limit: String,
    /// Whether the limit passed.
    pub passed: bool,
    /// The measured value in bytes. Absent if it is unknown, or if the limit is not a size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_bytes: Option<u64>,
    /// The highest value in bytes that passes. Absent if the limit is not a size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The process id. Absent if the result is not about one process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal; -1 is the CPU. Absent if the result is not about one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<i16>,
    /// The step of the peak, or of the point after which memory stayed, counted from 0. Absent before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// The phase of the peak or of that point. Absent if the result is not about one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The path of the source file of the program's line that is responsible. Absent if no line is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The line number in `file`. Absent if no line is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// The result as text.
    pub text: String,
}

/// A device of the run.
struct CheckedDevice<'a> {
    process: &'a ProcessSummary,
    device: &'a DeviceSummary,
}

/// Checks a run against limits and a baseline. `diff` is the comparison with the baseline's recording if that can be
/// read. It names what grew.
pub fn check(
    summary: &Summary,
    baseline: Option<&Summary>,
    diff: Option<&DiffReport>,
    options: &CheckOptions,
) -> CheckReport {
    let processes = summary.processes.iter().filter(|p| options.rank.is_none_or(|rank| p.rank == Some(rank)));
    let all: Vec<CheckedDevice<'_>> = processes
        .flat_map(|process| process.devices.iter().map(move |device| CheckedDevice { process, device }))
        .filter(|c| {
            options.device.is_none_or(|device| c.device.device == device) && c.device.highest.reserved_bytes > 0
        })
        .collect();
    let mut results = Vec::new();
    let mut notes = Vec::new();
    incomplete(summary, &all, options, &mut results, &mut notes);
    let launch_issues = summary.launch.as_ref().map_or(&[][..], |launch| &launch.issues);
    for one in &all {
        limits(one, launch_issues, options, &mut results);
    }
    if let Some((point, _)) = &options.released_after
        && !results.iter().any(|result| result.limit == RELEASED_AFTER)
    {
        let text = format!("no device of the run came to {}", point.text());
        results.push(CheckResult { limit: RELEASED_AFTER.into(), text, ..CheckResult::default() });
    }
    let is_rule = |name: &str| name == ANY || diagnostic_rules().iter().any(|rule| rule.id.as_str() == name);
    if options.no_issues.iter().any(|name| !is_rule(name)) {
        results.push(CheckResult { limit: "no-issue".into(), text: "unknown rule".into(), ..CheckResult::default() });
    }
    if let Some(baseline) = baseline {
        compare_with_baseline(&all, baseline, diff, options, &mut results, &mut notes);
    }
    results.sort_by_key(|result| result.passed);
    let failed = results.iter().filter(|result| !result.passed).count();
    let headline = match (failed, results.first()) {
        (0, None) => "ok".to_owned(),
        (0, Some(_)) => format!("ok  {}", results.iter().map(|r| &*r.text).collect::<Vec<_>>().join("; ")),
        (1, Some(first)) => format!("FAIL  {}", first.text),
        (_, Some(first)) => format!("FAIL  {}; and {} more", first.text, failed - 1),
        (_, None) => String::new(),
    };
    CheckReport {
        version: CHECK_VERSION.to_owned(),
        run: summary.run.path.clone(),
        passed: failed == 0,
        headline,
        results,
        notes,
    }
}

/// The name of the limit of what stays after memory was released.
const RELEASED_AFTER: &str = "released-after";

/// The name that stands for every rule.
pub(crate) const ANY: &str = "any";

/// Adds a failed result or a note for each gap of the recording.
fn incomplete(
    summary: &Summary,
    all: &[CheckedDevice<'_>],
    options: &CheckOptions,
    results: &mut Vec<CheckResult>,
    notes: &mut Vec<String>,
) {
    let mut gaps: Vec<String> = Vec::new();
    for (name, count) in summary.losses.iter().filter(|(name, _)| !HARMLESS.contains(&&***name)) {
        gaps.push(format!("the recording is incomplete: {} {}", count_text(*count), name.replace('_', " ")));
    }
    gaps.extend(summary.problems.iter().cloned());
    for one in &summary.not_recorded {
        if one.is_loss {
            gaps.push(format!("the recording is incomplete: {}", one.text));
        } else {
            notes.push(one.text.clone());
        }
    }
    if summary.run.exit.success() == Some(false) {
        gaps.push(format!("the program failed ({}), so its full memory use is unknown", summary.run.outcome));
    }
    if is_snapshot(&summary.processes) {
        if summary.run.events == 0 {
            gaps.push(
                "a snapshot without events does not have the peak: record with \
                 torch.cuda.memory._record_memory_history()"
                    .into(),
            );
        }
        let older =
            summary.processes.iter().flat_map(|p| &p.notices).filter(|n| n.text.contains("older than its first event"));
        notes.extend(
            older.map(|notice| format!("a peak before the snapshot's first event is unknown: {}", notice.text)),
        );
    }
    for text in gaps {
        if options.allow_incomplete {
            notes.push(text);
        } else {
            let text = format!("{text} (--allow-incomplete accepts this)");
            results.push(CheckResult { limit: "recording".into(), text, ..CheckResult::default() });
        }
    }
    // A run without any memory to check never passes, even if incomplete recordings are accepted.
    if all.is_empty() {
        let text = "no memory was recorded on any selected device".to_owned();
        results.push(CheckResult { limit: "recording".into(), text, ..CheckResult::default() });
    }
}

impl CheckedDevice<'_> {
    /// Formats the device and its peak: `GPU 0, step 3, backward, model.py:88 forward`. The process is included if it
    /// has a rank.
    fn at_peak(&self) -> String {
        let mut parts = vec![self.name()];
        if let Some(peak) = &self.device.peak {
            let when = when(peak.step, peak.phase);
            parts.extend(Some(when.trim_start().trim_start_matches("at ").to_owned()).filter(|when| !when.is_empty()));
            parts.extend(
                peak.allocated_at.iter().map(|stack| stack.location.clone()).filter(|location| !location.is_empty()),
            );
        }
        parts.join(", ")
    }

    /// The refused requests of this device. Those of host memory, and of devices that nothing was allocated on, are
    /// those of the first device.
    fn refused_requests(&self) -> Vec<&RefusedRequestSummary> {
        let device = self.device.device;
        let devices = &self.process.devices;
        let is_first = devices.first().is_some_and(|first| first.device == device);
        let is_own = |ordinal: i16| ordinal == device || is_first && devices.iter().all(|one| one.device != ordinal);
        self.process.refused_requests.iter().filter(|request| is_own(request.device)).collect()
    }

    fn name(&self) -> String {
        match self.process.rank {
            Some(_) => format!("{}, {}", process_name(self.process), device_name(self.device)),
            None => device_name(self.device),
        }
    }

    /// Makes a result about this device, at its peak.
    fn result(&self, limit: &str, value: Option<u64>, allowed: Option<u64>, text: String) -> CheckResult {
        let peak = self.device.peak.as_ref();
        let (file, line) = own_line(peak.and_then(|peak| peak.allocated_at.as_ref()));
        CheckResult {
            limit: limit.to_owned(),
            passed: value.zip(allowed).is_some_and(|(value, allowed)| value <= allowed),
            value_bytes: value,
            limit_bytes: allowed,
            pid: Some(self.process.pid),
            rank: self.process.rank,
            device: Some(self.device.device),
            step: peak.and_then(|peak| peak.step),
            phase: peak.map(|peak| peak.phase),
            file,
            line,
            text,
        }
    }
}

/// The file and line of the innermost frame that is the program's own code.
fn own_line(stack: Option<&StackSummary>) -> (Option<String>, Option<u32>) {
    let own = stack.and_then(|stack| stack.frames.iter().find(|f| !f.native && f.line > 0 && !is_library(&f.filename)));
    (own.map(|frame| frame.filename.clone()), own.map(|frame| frame.line))
}

fn comparison(value: u64, allowed: u64) -> &'static str {
    if value > allowed { ">" } else { "<=" }
}

fn limits(
    one: &CheckedDevice<'_>,
    launch_issues: &[LaunchIssueSummary],
    options: &CheckOptions,
    results: &mut Vec<CheckResult>,
) {
    let highest = &one.device.highest;
    for (limit, what, value, allowed) in [
        ("max-peak", "peak", highest.allocated_bytes, options.max_peak),
        ("max-reserved", "reserved", highest.reserved_bytes, options.max_reserved),
    ] {
        let Some(allowed) = allowed else { continue };
        // Reserved bytes are known only from segment events, which have no place in the program.
        let place = if limit == "max-peak" { one.at_peak() } else { one.name() };
        let text =
            format!("{what} {} {} {} ({place})", size_text(value), comparison(value, allowed), size_text(allowed));
        results.push(one.result(limit, Some(value), Some(allowed), text));
    }
    if let Some(allowed) = options.max_leak {
        results.push(leak(one, allowed));
    }
    for (name, allowed) in &options.max_categories {
        let peak = one.device.peak.as_ref();
        let own = peak.and_then(|peak| peak.by_category.iter().find(|row| row.category.name() == name));
        let custom = peak.and_then(|peak| {
            peak.by_custom_category.iter().find(|row| row.custom_category.as_deref() == Some(name.as_str()))
        });
        let value = own.map(|row| row.bytes).or(custom.map(|row| row.bytes)).unwrap_or(0);
        let shown = own.map_or(name.as_str(), |row| row.category.plural());
        let text = format!(
            "{shown} {} {} {} at the peak ({})",
            size_text(value),
            comparison(value, *allowed),
            size_text(*allowed),
            one.at_peak()
        );
        results.push(one.result("max-category", Some(value), Some(*allowed), text));
    }
    if let Some((point, allowed)) = &options.released_after {
        let point = point.text();
        results.extend(
            one.device.released.iter().find(|one| one.after == point).map(|found| stayed(one, found, *allowed)),
        );
    }
    if options.no_oom {
        let count = one.device.oom_count;
        let text = match one.device.ooms.first() {
            Some(oom) => {
                let location = &oom.requested_at.location;
                let location = if location.is_empty() { String::new() } else { format!(", {location}") };
                let (step, phase) = (oom.in_use.step, oom.in_use.phase);
                format!(
                    "{} out-of-memory error{}: requested {}{} ({}{location})",
                    count_text(count),
                    if count == 1 { "" } else { "s" },
                    size_text(oom.requested_bytes),
                    when(step, phase),
                    one.name()
                )
            }
            None => format!("no out-of-memory error ({})", one.name()),
        };
        let (file, line) = own_line(one.device.ooms.first().map(|oom| &oom.requested_at));
        let refused = one.refused_requests();
        if count > 0 || refused.is_empty() {
            results.push(CheckResult { passed: count == 0, file, line, ..one.result("no-oom", None, None, text) });
        }
        for request in refused {
            let (file, line) = own_line(Some(&request.requested_at));
            let text = format!("{} ({})", request.text, one.name());
            let value = Some(request.requested_bytes);
            results.push(CheckResult { passed: false, file, line, ..one.result("no-oom", value, None, text) });
        }
    }
    for rule in &options.no_issues {
        let (pid, device) = (one.process.pid, one.device.device);
        let of_launch = launch_issues.iter().filter(|issue| issue.concerns(pid, device)).map(|issue| &issue.issue);
        let of_device = one.process.issues.iter().filter(|issue| issue.device == device).chain(of_launch);
        let matching: Vec<_> = of_device.filter(|issue| rule == ANY || issue.rule.as_str() == rule).collect();
        for issue in &matching {
            let location = issue.stack.as_ref().map_or_else(String::new, |stack| format!(", {}", stack.location));
            let text = format!("{}: {} ({}{location})", issue.rule, issue.headline, one.name());
            let (file, line) = own_line(issue.stack.as_ref());
            let result = one.result("no-issue", Some(issue.bytes), Some(0), text);
            results.push(CheckResult { passed: false, file, line, ..result });
        }
        if matching.is_empty() {
            let of_rule = if rule == ANY { String::new() } else { format!(" of rule {rule}") };
            let text = format!("no issue{of_rule} ({})", one.name());
            results.push(CheckResult {
                passed: true,
                file: None,
                line: None,
                ..one.result("no-issue", None, None, text)
            });
        }
    }
}

/// Checks what stayed after the program had released memory.
fn stayed(one: &CheckedDevice<'_>, found: &ReleasedSummary, allowed: u64) -> CheckResult {
    let mut facts = vec![one.name()];
    if found.times > 1 {
        facts.push(format!("most of {} times", count_text(found.times)));
    }
    facts.extend(found.parts.iter().map(|part| format!("{} {}", size_text(part.bytes), part.name)));
    let largest = found.state.largest_allocations.first();
    if let Some(largest) = largest {
        let name = largest.tensor_name_pattern.as_ref().or(largest.tensor_name.as_ref());
        let name = name.map_or_else(String::new, |name| format!("{name} "));
        facts.push(format!("largest: {} {name}{}", size_text(largest.bytes), largest.stack.location));
    }
    facts.extend(found.held_by.first().map(|holder| format!("held by {}", holder.path)));
    let text = format!(
        "{} stayed after {} {} {} ({})",
        size_text(found.stayed_bytes),
        found.after,
        comparison(found.stayed_bytes, allowed),
        size_text(allowed),
        facts.join(", ")
    );
    let (file, line) = own_line(largest.map(|largest| &largest.stack));
    let result = one.result(RELEASED_AFTER, Some(found.stayed_bytes), Some(allowed), text);
    CheckResult { file, line, step: found.state.step, phase: Some(found.state.phase), ..result }
}

/// Checks the growth per step.
fn leak(one: &CheckedDevice<'_>, allowed: u64) -> CheckResult {
    let mut count = i64::from(one.device.later_steps_count);
    let mut net: i64 = one.device.later_steps.iter().map(|phase| phase.net_bytes).sum();
    let last = one.device.steps.saturating_sub(1);
    // The second and the last step are left out if at least two others remain. One-time allocations of the second step
    // (lazy optimizer state) and work after training are no leak.
    for (step, least) in [(1, 3), (last, 3)] {
        let step = one.device.by_step.iter().find(|row| row.step == step);
        if let Some(step) = step.filter(|_| count >= least) {
            net -= step.phases.iter().map(|phase| phase.net_bytes).sum::<i64>();
            count -= 1;
        }
    }
    if count == 0 {
        let text = format!("the growth per step is unknown: {} steps were recorded ({})", one.device.steps, one.name());
        return one.result("max-leak", None, Some(allowed), text);
    }
    let each = net.div_euclid(count) + i64::from(net.rem_euclid(count) > 0);
    let value = u64::try_from(each).unwrap_or(0);
    let issue = one.process.issues.iter().find(|issue| {
        issue.device == one.device.device
            && matches!(issue.rule, RuleId::Leak | RuleId::GraphKept)
            && issue.stack.is_some()
    });
    let stack = issue.and_then(|issue| issue.stack.as_ref());
    let (file, line) = own_line(stack);
    let location = stack.map_or_else(String::new, |stack| format!(", {}", stack.location));
    let text = format!(
        "{} growth per step {} {} ({}, {} steps{location})",
        size_text(value),
        comparison(value, allowed),
        size_text(allowed),
        one.name(),
        count_text(count as u64)
    );
    CheckResult { file, line, ..one.result("max-leak", Some(value), Some(allowed), text) }
}

/// Compares each device with the baseline.
fn compare_with_baseline(
    all: &[CheckedDevice<'_>],
    baseline: &Summary,
    diff: Option<&DiffReport>,
    options: &CheckOptions,
    results: &mut Vec<CheckResult>,
    notes: &mut Vec<String>,
) {
    let processes = baseline.processes.iter().filter(|p| options.rank.is_none_or(|rank| p.rank == Some(rank)));
    let mut unmatched: Vec<(&ProcessSummary, &DeviceSummary)> = processes
        .flat_map(|process| process.devices.iter().map(move |device| (process, device)))
        .filter(|(_, d)| options.device.is_none_or(|device| d.device == device) && d.highest.reserved_bytes > 0)
        .collect();
    let alone = all.len() == 1 && unmatched.len() == 1;
    for one in all {
        let is_it = |(process, device): &(&ProcessSummary, &DeviceSummary)| {
            alone || process.rank == one.process.rank && device.device == one.device.device
        };
        let Some(index) = unmatched.iter().position(is_it) else {
            let text = format!("the baseline has no {}", one.name());
            results.push(one.result("baseline-peak", None, None, text));
            continue;
        };
        let (process, before) = unmatched.remove(index);
        let pair = diff.and_then(|diff| {
            diff.pairs.iter().find(|pair| {
                (pair.a.pid, pair.a.device) == (process.pid, before.device)
                    && (pair.b.pid, pair.b.device) == (one.process.pid, one.device.device)
            })
        });
        let highest = &one.device.highest;
        for (limit, what, value, was) in [
            ("baseline-peak", "peak", highest.allocated_bytes, before.highest.allocated_bytes),
            ("baseline-reserved", "reserved", highest.reserved_bytes, before.highest.reserved_bytes),
        ] {
            let allowed = options.tolerance.of(was);
            let difference = signed_size_text(value as i64 - was as i64);
            let (change, place) = if limit == "baseline-peak" && value > allowed {
                largest_change(one, before, pair)
            } else {
                Default::default()
            };
            let at = if limit == "baseline-peak" { one.at_peak() } else { one.name() };
            let text = format!(
                "{what} {} {} {} ({difference} compared with the baseline's {}; {at}){change}",
                size_text(value),
                comparison(value, allowed),
                size_text(allowed),
                size_text(was)
            );
            let mut result = one.result(limit, Some(value), Some(allowed), text);
            if let Some((file, line)) = place {
                (result.file, result.line) = (Some(file), Some(line));
            }
            results.push(result);
            if value < was.saturating_sub(options.tolerance.of(was) - was) {
                notes.push(format!(
                    "{what} {} is below the baseline's {}: record a new baseline to keep it there ({})",
                    size_text(value),
                    size_text(was),
                    one.name()
                ));
            }
        }
    }
    for (process, device) in unmatched {
        let rank = process.rank.map_or_else(String::new, |rank| format!("rank {rank}, "));
        let text = format!("the baseline has {rank}device {}, but this run does not", device.device);
        results.push(CheckResult {
            limit: "baseline-peak".into(),
            rank: process.rank,
            device: Some(device.device),
            text,
            ..CheckResult::default()
        });
    }
}

/// The largest growth compared with the baseline, as text, and its line.
fn largest_change(
    one: &CheckedDevice<'_>,
    before: &DeviceSummary,
    pair: Option<&DevicePair>,
) -> (String, Option<(String, u32)>) {
    if let Some(line) = pair.and_then(|pair| pair.by_line.first()).filter(|line| line.change.difference_bytes > 0) {
        let frame = line.b_frame.as_ref().filter(|frame| !is_library(&frame.filename) && !frame.native);
        let place = frame.map(|frame| (frame.filename.clone(), frame.line));
        return (format!("; largest change: {}", line_text(line)), place);
    }
    let (Some(now), Some(was)) = (&one.device.peak, &before.peak) else { return Default::default() };
    let of =
        |category: Category| was.by_category.iter().find(|row| row.category == category).map_or(0, |row| row.bytes);
    let grew = now.by_category.iter().map(|row| (row.bytes as i64 - of(row.category) as i64, row.category));
    match grew.max_by_key(|(difference, _)| *difference).filter(|(difference, _)| *difference > 0) {
        Some((difference, category)) => {
            (format!("; largest change: {} {}", signed_size_text(difference), category.plural()), None)
        }
        None => Default::default(),
    }
}

impl CheckReport {
    /// The JSON Schema, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        schema_text::<CheckReport>()
    }

    /// The result as JSON.
    pub fn to_json(&self) -> String {
        json_text(self) + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerances() {
        assert_eq!(Tolerance::Share(0.02).of(1000), 1020);
        assert_eq!(Tolerance::Bytes(5).of(1000), 1005);
    }
}
