//! The verdict: what happened to the worst device of a run, and the facts that explain it.

use memtrace_input::load::EstimatedWorkspaces;
use memtrace_summary::{
    DeviceSummary, MemoryState, OomSummary, ProcessSummary, Summary, WhatIfSummary, count_text, device_name,
    is_snapshot, process_name, share_text, size_text, when, when_peaked,
};

use crate::fit::{columns, wrap_words};
use crate::launch_text::launch_sentences;
use crate::parts::{largest_owners, limit_text, not_recorded, outside, request, short_text};
use crate::pools::preallocated_text;
use crate::style::{Style, TextOptions};
use crate::text_report::TextReport;

/// How a run went. The mark stands before the verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    Good,
    Warning,
    Failed,
}

impl Mark {
    fn text(self) -> &'static str {
        match self {
            Mark::Good => "+",
            Mark::Warning => "!",
            Mark::Failed => "x",
        }
    }

    fn paint(self) -> fn(Style, &str) -> String {
        match self {
            Mark::Good => Style::good,
            Mark::Warning => Style::warning,
            Mark::Failed => Style::alarm,
        }
    }
}

/// A width at which no line is wrapped.
const UNLIMITED: usize = 1 << 16;

/// The lines of the verdict without wrapping. A statement begins with a mark (`+`, `!` or `x`); the lines after it explain it.
pub(crate) fn verdict_lines(summary: &Summary) -> Vec<String> {
    let mut report = TextReport::new(&TextOptions { width: UNLIMITED, ..TextOptions::default() });
    report.verdict(summary, worst_process(summary).as_deref());
    report.text().lines().map(str::to_owned).collect()
}

/// The name of the worst process, if there are several.
pub(crate) fn worst_process(summary: &Summary) -> Option<String> {
    summary.processes.first().filter(|_| summary.processes.len() > 1).map(process_name)
}

/// Ranges below this size in bytes are not worth a sentence.
const SMALL_RANGE: u64 = 1 << 20;

/// How far the peak of a dry run can be off, because workspaces of cuDNN are estimated. `None` if it hardly can.
fn estimated_workspaces(workspaces: &EstimatedWorkspaces) -> Option<String> {
    let side = |bytes: u64, word: &str| (bytes >= SMALL_RANGE).then(|| format!("{} {word}", size_text(bytes)));
    let sides = [side(workspaces.below_bytes, "lower"), side(workspaces.above_bytes, "higher")];
    let range = sides.into_iter().flatten().collect::<Vec<_>>().join(" or ");
    let (estimated, all) = (count_text(workspaces.estimated), count_text(workspaces.convolutions));
    (!range.is_empty()).then(|| {
        format!(
            "cuDNN workspaces of {estimated} of {all} convolutions are estimates: on a GPU, the peak can be {range}."
        )
    })
}

impl TextReport {
    /// Adds the verdict of the run. `name` is the name of the worst process, if there are several.
    pub(crate) fn verdict(&mut self, summary: &Summary, name: Option<&str>) {
        if let Some(simulated) = &summary.run.simulated {
            let gpus =
                if simulated.count == 1 { String::new() } else { format!("{} x ", count_text(simulated.count.into())) };
            let (gpu, memory) = (&simulated.gpu, size_text(simulated.memory_bytes));
            let text = format!("Dry run on {gpus}{gpu} ({memory}), simulated: no GPU was used, no kernel ran.");
            self.lines.extend(wrap_words(&text, self.width));
            if let Some(text) = simulated.workspaces.as_ref().and_then(estimated_workspaces) {
                self.lines.extend(wrap_words(&text, self.width));
            }
        }
        if let Some(limit) = summary.run.limit_bytes {
            let text = format!("Limited to {} of each GPU (--limit); all processes together.", size_text(limit));
            self.lines.extend(wrap_words(&text, self.width));
        }
        if let Some(count) = summary.run.limit_lock_missed {
            let allocations = if count == 1 { "allocation" } else { "allocations" };
            let text = format!(
                "The limit may not have been exact: {} {allocations} did not wait any longer for the others.",
                count_text(count)
            );
            self.marked(Mark::Warning, &text);
        }
        let process = summary.processes.first();
        let device = process.and_then(|process| process.devices.first());
        match (process, device) {
            (Some(process), Some(device)) => match explained_oom(device) {
                Some(oom) => {
                    self.oom_verdict(process, device, oom, name);
                    self.below_if(&preallocated_text(device).unwrap_or_default());
                }
                None => self.end_verdict(summary, process, device, name),
            },
            _ => {
                let text = format!(
                    "{}: no GPU memory was allocated, and no CPU tensors were recorded.",
                    capitalized(&summary.run.outcome)
                );
                self.marked(end_mark(summary), &text);
            }
        }
        if let Some(exception) = summary.run.simulated.as_ref().and_then(|simulated| simulated.exception.as_ref()) {
            self.marked(Mark::Failed, &exception.text());
        }
        if let Some(launch) = &summary.launch {
            launch_sentences(launch).iter().for_each(|text| self.below(text));
        }
        self.missing_parts(summary);
    }

    /// Adds a sentence that begins with a mark.
    fn marked(&mut self, mark: Mark, text: &str) {
        let mut head = mark.text();
        for line in wrap_words(text, self.width.saturating_sub(2)) {
            let line = mark.paint()(self.style, &format!("{head} {line}"));
            self.lines.push(line);
            head = " ";
        }
    }

    /// Adds sentences below the verdict.
    fn below(&mut self, text: &str) {
        for line in wrap_words(text, self.width.saturating_sub(2)) {
            self.lines.push(format!("  {line}"));
        }
    }

    fn oom_verdict(&mut self, process: &ProcessSummary, device: &DeviceSummary, oom: &OomSummary, name: Option<&str>) {
        let total = device.total_bytes.map(|total| format!(" ({})", size_text(total))).unwrap_or_default();
        let when = when(oom.in_use.step, oom.in_use.phase);
        let location = &oom.requested_at.location;
        let at =
            location.split(", ").next().filter(|at| !at.is_empty()).map(|at| format!(", {at}")).unwrap_or_default();
        let times = match (device.oom_count, device.explained_oom) {
            (1, _) => String::new(),
            (n, Some(0)) => format!(" (the first of {} errors)", count_text(n)),
            (n, _) => format!(" (the last of {} errors)", count_text(n)),
        };
        let continued = oom.fatal == Some(false);
        let end = if continued { "; the program continued" } else { "" };
        let mark = if continued { Mark::Warning } else { Mark::Failed };
        let gpu = owner(device, name);
        self.marked(mark, &format!("CUDA out of memory on {gpu}{total} {when}{at}{times}{end}"));
        let tried = format!("Tried to allocate {}; {}", request(oom), lack(oom));
        let settings = device.what_if.as_ref().map(|what_if| fragmentation(oom, what_if)).unwrap_or_default();
        self.below(&format!("{} {settings}", tried.trim_end_matches("; ")));
        let remark = process.no_issue_remark.as_deref().map(str::to_owned);
        self.below_if(&remark.unwrap_or_else(|| issues_text(process)));
        if location.contains(", ") {
            self.below(&format!("Requested at {location}"));
        }
    }

    fn end_verdict(&mut self, summary: &Summary, process: &ProcessSummary, device: &DeviceSummary, name: Option<&str>) {
        let steps = match device.steps {
            0 => String::new(),
            1 => "1 step, ".to_owned(),
            n => format!("{} steps, ", count_text(n.into())),
        };
        let highest = device.highest.allocated_bytes;
        let of = |total: u64| format!(" of {} ({})", size_text(total), share_text(highest, total));
        let of = device.total_bytes.filter(|_| device.device >= 0).map(of).unwrap_or_default();
        let when = device.peak.as_ref().map(when_peaked).unwrap_or_default();
        let issues = issues_text(process);
        let in_launch = summary.launch.as_ref().is_some_and(|launch| !launch.issues.is_empty());
        let mark = match end_mark(summary) {
            Mark::Good if !issues.is_empty() || in_launch => Mark::Warning,
            mark => mark,
        };
        let text = format!(
            "{}: {steps}peak {}{of} on {} {when}",
            capitalized(&summary.run.outcome),
            size_text(highest),
            owner(device, name)
        );
        self.marked(mark, &format!("{}.", text.trim_end()));
        self.below_if(&preallocated_text(device).unwrap_or_default());
        if issues.is_empty() && !in_launch && is_examined(summary, device) {
            self.below("No leaks or misuse found.");
        }
        self.below_if(&issues);
    }

    fn below_if(&mut self, text: &str) {
        if !text.is_empty() {
            self.below(text);
        }
    }

    /// Adds what the recording lacks: with it, the figures could be higher.
    fn missing_parts(&mut self, summary: &Summary) {
        let mut missing = Vec::new();
        match summary.lost_events() {
            0 => {}
            count => missing.push(format!("{} events lost", count_text(count))),
        }
        if summary.has_other_losses() {
            missing.push("parts of the recording are missing (see Losses)".to_owned());
        }
        missing.extend(not_recorded(summary));
        if !missing.is_empty() {
            self.marked(Mark::Warning, &format!("Incomplete: {}.", missing.join(", ")));
        }
    }

    /// Adds the totals of a point in time on one line, or below each other where they do not fit.
    pub(crate) fn totals(&mut self, device: &DeviceSummary, state: &MemoryState, oom: Option<&OomSummary>) {
        let totals = &state.totals;
        let mut parts = vec![format!("Allocated {}", size_text(totals.allocated_bytes))];
        if totals.reserved_bytes > 0 {
            let unallocated = match oom {
                Some(oom) => oom.reserved_but_unallocated_bytes,
                None => totals.reserved_bytes.saturating_sub(totals.allocated_bytes),
            };
            let largest = oom.filter(|oom| oom.reserved_but_unallocated_bytes > 0);
            let largest = largest.map(|oom| format!(" (largest free block {})", size_text(oom.largest_free_bytes)));
            let highest = device.highest.reserved_bytes;
            let highest = (oom.is_none() && highest > totals.reserved_bytes)
                .then(|| format!(" (peak of reserved memory {})", size_text(highest)));
            let notes = largest.or(highest).unwrap_or_default();
            parts.push(format!("reserved but unallocated {}{notes}", size_text(unallocated)));
        }
        let outside = match oom {
            Some(oom) => outside_at(device, oom),
            None => outside_at_peak(device),
        };
        parts.extend(outside.map(|text| format!("outside PyTorch {text}")));
        let mut line = String::new();
        for part in parts {
            if !line.is_empty() && columns(&line) + 3 + columns(&part) > self.width {
                self.heading(&std::mem::take(&mut line));
            }
            let gap = if line.is_empty() { "" } else { "   " };
            line.push_str(&format!("{gap}{part}"));
        }
        let text = wrap_words(&line, self.width);
        text.iter().for_each(|line| self.heading(line));
    }
}

/// The out-of-memory error that the report explains.
pub(crate) fn explained_oom(device: &DeviceSummary) -> Option<&OomSummary> {
    device.explained_oom.and_then(|at| device.ooms.get(at))
}

/// The GPU, and the process if there are several.
fn owner(device: &DeviceSummary, name: Option<&str>) -> String {
    let gpu = device_name(device);
    name.map_or(gpu.clone(), |name| format!("{name}, {gpu}"))
}

fn end_mark(summary: &Summary) -> Mark {
    let is_incomplete = summary.losses.values().any(|count| *count > 0) || summary.run.unrecorded_processes > 0;
    match summary.run.exit.success() {
        Some(false) => Mark::Failed,
        None if !is_snapshot(&summary.processes) => Mark::Warning,
        _ if is_incomplete => Mark::Warning,
        _ => Mark::Good,
    }
}

/// Whether the diagnostic rules saw the whole program: without losses, and with PyTorch's blocks.
fn is_examined(summary: &Summary, device: &DeviceSummary) -> bool {
    let is_whole = summary.losses.values().all(|count| *count == 0) && summary.run.unrecorded_processes == 0;
    is_whole && device.source == "torch" && !is_snapshot(&summary.processes) && summary.problems.is_empty()
}

/// How many issues there are, and what the fix of the first brings.
fn issues_text(process: &ProcessSummary) -> String {
    let Some(first) = process.issues.first() else { return String::new() };
    let count = match process.issues.len() {
        1 => "1 issue".to_owned(),
        n => format!("{n} issues, first"),
    };
    let saving = first.saves_bytes.map(|bytes| format!("; its fix lowers the peak by {}", size_text(bytes)));
    format!("{count}: {}{}.", first.rule, saving.unwrap_or_default())
}

/// Why the request failed, in bytes.
fn lack(oom: &OomSummary) -> String {
    match (oom.device_free_bytes, oom.refused_by_pytorch) {
        (Some(free), true) => format!(
            "PyTorch's own limit (set_per_process_memory_fraction) refused it at {} reserved; CUDA had {} free.",
            size_text(oom.in_use.totals.reserved_bytes),
            size_text(free)
        ),
        (Some(free), false) => match limit_text(oom) {
            Some(limit) => format!("{} free within a limit{}: {limit}.", size_text(free), short_text(oom, free)),
            None => format!("{} free on the device{}.", size_text(free), short_text(oom, free)),
        },
        (None, _) => String::new(),
    }
}

/// What the replayed allocator settings say about fragmentation.
fn fragmentation(oom: &OomSummary, what_if: &WhatIfSummary) -> String {
    let settings = &what_if.settings;
    if what_if.mismatch.is_some() || settings.is_empty() || oom.reserved_but_unallocated_bytes == 0 {
        return String::new();
    }
    if let Some(setting) = settings.iter().find(|setting| setting.step_fits == Some(true)) {
        return format!("Fragmentation: with {}, the request and the rest of the step fit.", setting.setting);
    }
    if let Some(setting) = settings.iter().find(|setting| setting.fits == Some(true)) {
        return match setting.step_short_bytes {
            Some(short) => format!(
                "Not only fragmentation: with {}, the request fits, and the rest of the step is {} short.",
                setting.setting,
                size_text(short)
            ),
            None => format!("Fragmentation: with {}, the request fits.", setting.setting),
        };
    }
    match settings.iter().all(|setting| setting.fits == Some(false)) {
        true if settings.len() == 1 => {
            "Not fragmentation: 1 other allocator setting replayed, it fails too.".to_owned()
        }
        true => format!("Not fragmentation: {} other allocator settings replayed, all fail.", settings.len()),
        false => String::new(),
    }
}

/// The memory outside the caching allocator at an error, with its largest owners.
fn outside_at(device: &DeviceSummary, oom: &OomSummary) -> Option<String> {
    let others = oom.contexts_and_other_processes_bytes.unwrap_or(0);
    let owners = oom.outside_pytorch.iter().take(4).map(|owner| format!("{} {}", owner.owner, size_text(owner.bytes)));
    let mut owners: Vec<String> = owners.collect();
    if others > 0 {
        let before = device.in_use_before_bytes.filter(|bytes| *bytes > 0);
        let before = before.map(|bytes| format!(", {} of it before the program started", size_text(bytes)));
        owners.push(format!("CUDA contexts and other processes {}{}", size_text(others), before.unwrap_or_default()));
    }
    let total = oom.outside_pytorch_bytes.saturating_add(others);
    (total > 0).then(|| format!("{} ({})", size_text(total), owners.join(", ")))
}

/// The memory outside the caching allocator: what was in use before the program, and each owner's peak.
fn outside_at_peak(device: &DeviceSummary) -> Option<String> {
    let owners = outside(device);
    let before = device.in_use_before_bytes.unwrap_or(0);
    let total: u64 = owners.iter().map(|(_, bytes)| bytes).sum::<u64>() + before;
    let mut parts = largest_owners(&owners, 3);
    if before > 0 {
        parts.push(format!("before the program started {}", size_text(before)));
    }
    (total > 0 && device.source.starts_with("torch"))
        .then(|| format!("up to {} ({})", size_text(total), parts.join(", ")))
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}
