//! The end-of-run summary, with the most important result first. All figures come from the [`Summary`]; unknown figures
//! are omitted.
//!
//! The order is that in which a reader asks: what happened, where the memory is, what is wrong, what would help, and
//! then the phases in detail. A fact has its label in a column at the left. A list has its heading on a line of its own.

use std::collections::BTreeMap;

use super::build::{is_snapshot, when};
use super::sections::request;
use super::summary::{
    AllocationGroup, CategoryAmount, DeviceSummary, IssueSummary, LabelSummary, MemoryState, NativeObjectSummary,
    OomSummary, OwnerSummary, PhaseSummary, ProcessSummary, Summary,
};
use super::table::{Align, Table, cut, wrap_list, wrap_words};
use super::units::{count_text, duration_text, share_text, signed_size_text, size_text};
use memtrace_input::load::SNAPSHOT_TOPIC;
use memtrace_input::printable;
use memtrace_insight::passes::Category;

/// The maximum number of processes listed.
const LISTED_PROCESSES: usize = 12;
/// The maximum number of devices shown of a process.
const DEVICES: usize = 2;
/// The maximum number of named ranges listed, and the maximum length of their names in characters.
const LISTED_LABELS: usize = 8;
const LONGEST_LABEL: usize = 28;
/// The maximum number of allocations listed for the peak.
const LARGEST: usize = 4;
/// The maximum number of issues printed.
const ISSUES: usize = 3;
/// Categories below one in this many parts of the whole are summed up.
const SMALL_CATEGORY: u64 = 200;

/// The width of the label column: that of `Reserved but unallocated`. Longer labels move their own text to the right.
const LABEL_WIDTH: usize = 24;
/// The width of the labels in an issue.
const ISSUE_LABEL_WIDTH: usize = 8;
/// The column in which the text of a list's row begins: after bytes and percentage.
pub(super) const ROW_TEXT: usize = 21;
/// If less than this remains beside a label, the text stands below it.
const NARROWEST_TEXT: usize = 40;

/// Layout options for text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// The width in columns. 80 to 120 looks best; the minimum is 40.
    pub width: usize,
    /// Whether to use ANSI colors.
    pub color: bool,
}

impl Default for TextOptions {
    fn default() -> TextOptions {
        TextOptions { width: 100, color: false }
    }
}

/// Paints text with ANSI colors, or leaves it plain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Style {
    color: bool,
}

impl Style {
    #[cfg(test)]
    pub(super) const PLAIN: Style = Style { color: false };

    fn paint(self, code: &str, text: &str) -> String {
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn alarm(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// The line, safe for a terminal. It keeps only the control sequences that [`Self::paint`] makes.
    fn printable(self, line: &str) -> String {
        const OWN: [&str; 4] = ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;31m"];
        let (mut out, mut rest) = (String::with_capacity(line.len()), line);
        while let Some((before, _)) = rest.split_once('\x1b').filter(|_| self.color) {
            out.push_str(&printable::line(before));
            let sequence = &rest[before.len()..];
            let own = OWN.iter().find(|own| sequence.starts_with(**own));
            out.push_str(own.map_or("\u{fffd}", |own| own));
            rest = &sequence[own.map_or(1, |own| own.len())..];
        }
        out.push_str(&printable::line(rest));
        out
    }
}

impl Summary {
    /// The end-of-run summary as text.
    pub fn to_text(&self, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.head(self);
        let several = self.processes.len() > 1;
        if several {
            report.blank();
            report.processes(&self.processes);
        }
        match self.processes.first() {
            Some(process) => report.process(process, several.then(|| process_name(process)).as_deref()),
            None => report.line("no GPU memory was allocated, and no CPU tensors were recorded".to_owned()),
        }
        report.foot(self);
        report.text()
    }
}

/// The title of the run: its command, or the file name of a snapshot.
pub(super) fn run_title(summary: &Summary) -> String {
    let run = &summary.run;
    let name = std::path::Path::new(&run.path).file_name().filter(|_| is_snapshot(&summary.processes));
    name.map_or_else(|| run.command.join(" "), |name| name.to_string_lossy().into_owned())
}

/// A report in plain text while its lines are collected.
pub(super) struct TextReport {
    pub(super) lines: Vec<String>,
    pub(super) width: usize,
    pub(super) style: Style,
}

impl TextReport {
    pub(super) fn new(options: &TextOptions) -> TextReport {
        TextReport { lines: Vec::new(), width: options.width.max(40), style: Style { color: options.color } }
    }

    pub(super) fn text(&self) -> String {
        self.lines.iter().map(|line| self.style.printable(line) + "\n").collect()
    }

    pub(super) fn heading(&mut self, text: &str) {
        let text = self.style.bold(&cut(text, self.width));
        self.lines.push(text);
    }

    pub(super) fn line(&mut self, text: String) {
        let text = cut(&text, self.width);
        self.lines.push(text);
    }

    pub(super) fn blank(&mut self) {
        self.lines.push(String::new());
    }

    pub(super) fn head(&mut self, summary: &Summary) {
        let run = &summary.run;
        let mut facts = Vec::new();
        facts.extend(run.duration_ns.map(duration_text));
        facts.push(format!("{} events", count_text(run.events)));
        let lost = LOST_EVENTS.iter().filter_map(|name| summary.losses.get(*name));
        let lost = lost.fold(0u64, |sum, count| sum.saturating_add(*count));
        facts.push(format!("{} lost", count_text(lost)));
        let facts = facts.join(", ");
        let title = format!("memtrace: {}", run_title(summary));
        let failed = run.exit.success() == Some(false);
        let outcome = |style: Style| if failed { style.alarm(&run.outcome) } else { style.bold(&run.outcome) };
        let length = |parts: &[&str]| parts.iter().map(|part| part.chars().count() + 4).sum::<usize>() - 4;
        if length(&[&title, &run.outcome, &facts]) <= self.width {
            let text = format!("{}    {}    {facts}", self.style.bold(&title), outcome(self.style));
            return self.lines.push(text);
        }
        // The events and what was lost stand on a line of their own, so that only a long command is cut.
        let left = self.width.saturating_sub(run.outcome.chars().count() + 4);
        let title = cut(&title, left.max(24));
        if length(&[&title, &run.outcome]) <= self.width {
            self.lines.push(format!("{}    {}", self.style.bold(&title), outcome(self.style)));
        } else {
            self.line(format!("{title}    {}", run.outcome));
        }
        self.line(format!("  {facts}"));
    }

    /// Adds one line per process, the worst first.
    fn processes(&mut self, processes: &[ProcessSummary]) {
        let mut table = Table::new(&[
            ("Process", Align::Left),
            ("Device", Align::Left),
            ("Peak", Align::Right),
            ("Reserved", Align::Right),
            ("Outside PyTorch", Align::Right),
            ("Peak at", Align::Left),
        ]);
        for process in processes.iter().take(LISTED_PROCESSES) {
            for device in process.devices.iter().take(4) {
                let mut at = device.peak.as_ref().map(|peak| when(peak.step, peak.phase)).unwrap_or_default();
                if device.oom_count > 0 {
                    at = format!("{at}; out of memory").trim_start_matches("; ").to_owned();
                }
                table.row(vec![
                    process_name(process),
                    device_name(device),
                    size_text(device.highest.allocated_bytes),
                    size_text(device.highest.reserved_bytes),
                    size_text(outside(device).iter().map(|(_, bytes)| bytes).sum()),
                    at.trim_start_matches("at ").to_owned(),
                ]);
            }
        }
        if processes.len() > LISTED_PROCESSES {
            table.caption(format!("{} more: see summary.json", processes.len() - LISTED_PROCESSES));
        }
        self.lines.extend(table.lines(0, self.width, self.style));
    }

    /// Adds a process: where its memory is, its issues, what would lower its peaks, and its phases.
    fn process(&mut self, process: &ProcessSummary, name: Option<&str>) {
        let devices = || process.devices.iter().take(DEVICES);
        for device in devices() {
            self.blank();
            self.device(device, name);
        }
        if process.devices.len() > DEVICES {
            self.line(format!("  {} more devices: see summary.json", process.devices.len() - DEVICES));
        }
        self.pinned_host_memory(&process.pinned_host_memory);
        self.issues(&process.issues, ISSUES, None);
        let several = process.devices.len() > 1;
        let with_device = |heading: &str, preposition: &str, device: &DeviceSummary| {
            if several { format!("{heading} {preposition} {}", device_name(device)) } else { heading.to_owned() }
        };
        for device in devices() {
            self.suggestions(device, &with_device("Suggestions", "for", device), 0);
        }
        for device in devices().filter(|device| has_phases(device)) {
            self.blank();
            self.heading(&with_device("Memory by phase", "on", device));
            self.phases(device);
        }
    }

    fn device(&mut self, device: &DeviceSummary, process: Option<&str>) {
        let title = self.device_title(device, process);
        if let Some(oom) = device.explained_oom.and_then(|at| device.ooms.get(at)) {
            self.title(&title, &oom_verdict(device, oom), Style::alarm);
            self.labelled_list("Requested at", &oom.requested_at.location);
            self.oom_facts(device, oom);
            self.categories(&oom.in_use, true, oom.optimizer_state_needed_bytes);
            self.largest_allocations(&oom.in_use, LARGEST);
        } else if let Some(peak) = &device.peak {
            let verdict = format!("peak {} {}", size_text(peak.totals.allocated_bytes), when(peak.step, peak.phase));
            self.title(&title, &verdict, Style::bold);
            self.labelled_list("Allocated at", peak.allocated_at.as_ref().map_or("", |stack| stack.location.as_str()));
            self.unallocated(device, peak);
            self.outside(device);
            self.categories(peak, true, None);
            self.modules(peak);
            self.largest_allocations(peak, LARGEST);
        } else {
            return self.heading(&title);
        }
        self.growth_after_first_step(device);
    }

    /// Adds a device's title and its verdict, on one line if they fit.
    fn title(&mut self, title: &str, verdict: &str, paint: fn(Style, &str) -> String) {
        if title.chars().count() + 4 + verdict.chars().count() <= self.width {
            self.lines.push(format!("{}    {}", self.style.bold(title), paint(self.style, verdict)));
        } else {
            self.heading(title);
            let lines = wrap_words(verdict, self.width.saturating_sub(2));
            self.lines.extend(lines.iter().map(|line| format!("  {}", paint(self.style, line))));
        }
    }

    /// Adds a labelled fact. Text that does not fit continues below its beginning. An empty text adds nothing.
    pub(super) fn labelled(&mut self, label: &str, text: &str) {
        self.labelled_at(2, LABEL_WIDTH, label, text, wrap_words);
    }

    /// Adds a labelled list whose parts end with commas.
    pub(super) fn labelled_list(&mut self, label: &str, text: &str) {
        self.labelled_at(2, LABEL_WIDTH, label, text, wrap_list);
    }

    fn labelled_at(
        &mut self,
        indent: usize,
        label_width: usize,
        label: &str,
        text: &str,
        wrap: fn(&str, usize) -> Vec<String>,
    ) {
        if text.is_empty() {
            return;
        }
        let label_width = label_width.max(label.chars().count());
        let mut start = indent + label_width + 2;
        let mut head = format!("{:indent$}{label:<label_width$}  ", "");
        if self.width < start + NARROWEST_TEXT {
            if !label.is_empty() {
                self.lines.push(self.style.dim(head.trim_end()));
            }
            start = indent + 2;
            head = " ".repeat(start);
        }
        for line in wrap(text, self.width.saturating_sub(start)) {
            self.lines.push(format!("{}{line}", self.style.dim(&head)));
            head = " ".repeat(start);
        }
    }

    /// Adds the heading of a list. Each row is a [`Self::row`].
    pub(super) fn list(&mut self, heading: &str) {
        let heading = cut(&format!("  {heading}"), self.width);
        self.lines.push(self.style.dim(&heading));
    }

    /// Adds a row of a list: bytes, their share of `whole`, and what they are.
    pub(super) fn row(&mut self, bytes: u64, whole: u64, text: &str) {
        let text = format!("    {:>8}  {:>5}  {text}", size_text(bytes), share_text(bytes, whole));
        self.line(text.trim_end().to_owned());
    }

    /// Adds what was allocated, by category, the largest first. `sum_small` sums up small categories. `state_needed` is
    /// the optimizer state that the program needs in all, if it is not yet allocated.
    pub(super) fn categories(&mut self, state: &MemoryState, sum_small: bool, state_needed: Option<u64>) {
        let whole = state.totals.allocated_bytes;
        let is_small = |amount: &CategoryAmount| {
            sum_small && (amount.category == Category::Unknown || amount.bytes < whole / SMALL_CATEGORY)
        };
        let (small, mut amounts): (Vec<CategoryAmount>, Vec<CategoryAmount>) =
            state.by_category.iter().filter(|amount| amount.bytes > 0).partition(|amount| is_small(amount));
        amounts.sort_by_key(|amount| std::cmp::Reverse(amount.bytes));
        let sum = |value: fn(&CategoryAmount) -> u64| small.iter().map(value).sum();
        let other = CategoryAmount { category: Category::Unknown, bytes: sum(|a| a.bytes), blocks: sum(|a| a.blocks) };
        amounts.extend((other.bytes > 0).then_some(other));
        if !amounts.is_empty() {
            self.list(&format!("In use by category (% of the {} allocated)", size_text(whole)));
        }
        for amount in amounts {
            let needed = state_needed.filter(|_| amount.category == Category::OptimizerState);
            let needed = needed.map(|bytes| format!(" ({} needed in all)", size_text(bytes))).unwrap_or_default();
            let text = format!("{}{}{needed}", amount.category.plural(), in_blocks(amount.blocks));
            self.row(amount.bytes, whole, &text);
        }
    }

    /// Adds the reserved memory that is not allocated.
    fn unallocated(&mut self, device: &DeviceSummary, state: &MemoryState) {
        let (reserved, highest) = (state.totals.reserved_bytes, device.highest.reserved_bytes);
        let unallocated = reserved.saturating_sub(state.totals.allocated_bytes);
        if unallocated == 0 && highest <= reserved {
            return;
        }
        let mut text = format!("{} of {} reserved", size_text(unallocated), size_text(reserved));
        if highest > reserved {
            text.push_str(&format!("; peak of reserved memory {}", size_text(highest)));
        }
        self.labelled("Reserved but unallocated", &text);
    }

    /// Adds the device memory outside the caching allocator.
    pub(super) fn outside(&mut self, device: &DeviceSummary) {
        let owners = outside(device);
        let total: u64 = owners.iter().map(|(_, bytes)| bytes).sum();
        let mut parts: Vec<String> =
            owners.iter().take(4).map(|(name, bytes)| format!("{name} {}", size_text(*bytes))).collect();
        if owners.len() > 4 {
            let rest = owners.iter().skip(4).map(|(_, bytes)| bytes).sum();
            parts.push(format!("{} others {}", owners.len() - 4, size_text(rest)));
        }
        if total > 0 && device.source.starts_with("torch") {
            let text = format!("{} (sum of each owner's peak): {}", size_text(total), parts.join(", "));
            self.labelled_list("Outside PyTorch", &text);
        }
        let imported: u64 = device.imported.iter().map(|owner| owner.peak_bytes).sum();
        if imported > 0 {
            let text = format!("{} of other processes (CUDA IPC), counted there", size_text(imported));
            self.labelled("Imported", &text);
        }
        if let Some(before) = device.in_use_before_bytes.filter(|bytes| *bytes > 0) {
            let text = format!("{} (CUDA context, other processes)", size_text(before));
            self.labelled("In use before the program started", &text);
        }
    }

    pub(super) fn phases(&mut self, device: &DeviceSummary) {
        if !has_phases(device) {
            return;
        }
        let mut table = Table::new(&[
            ("Phase", Align::Left),
            ("Allocated", Align::Right),
            ("Freed", Align::Right),
            ("Net", Align::Right),
            ("After", Align::Right),
            ("Peak", Align::Right),
            ("Main changes", Align::Left),
        ]);
        let later = match device.later_steps_count {
            1 => "step 1".to_owned(),
            n => format!("steps 1-{n}: per-step mean; peak is the maximum"),
        };
        let parts = [
            (None, &device.before_first_step, 1),
            (Some("step 0".to_owned()), &device.first_step, 1),
            (Some(later), &device.later_steps, u64::from(device.later_steps_count)),
        ];
        for (caption, rows, steps) in parts {
            if rows.is_empty() || steps == 0 {
                continue;
            }
            let indent = if caption.is_some() { "  " } else { "" };
            if let Some(caption) = caption {
                table.caption(caption);
            }
            for row in rows {
                table.row(phase_cells(row, indent, steps));
            }
        }
        named_ranges(device, &mut table);
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Adds the issues, largest first. `process` is their process, if the report has several.
    pub(super) fn issues(&mut self, issues: &[IssueSummary], count: usize, process: Option<&str>) {
        if issues.is_empty() {
            return;
        }
        self.blank();
        self.heading(&process.map_or_else(|| "Issues".to_owned(), |process| format!("Issues in {process}")));
        for issue in issues.iter().take(count) {
            let headline = format!("{}: {}", issue.rule, issue.headline);
            for (i, line) in wrap_words(&headline, self.width.saturating_sub(4)).iter().enumerate() {
                self.lines.push(format!("{}{}", if i == 0 { "  " } else { "    " }, self.style.alarm(line)));
            }
            let location = issue.stack.as_ref().map_or("", |stack| stack.location.as_str());
            let evidence = issue.evidence.iter().map(|evidence| ("Evidence", evidence.as_str()));
            let saves = issue.saves_bytes.map(|bytes| format!(" (lowers the peak by {})", size_text(bytes)));
            let fix = format!("{}{}", issue.fix, saves.unwrap_or_default());
            self.labelled_at(4, ISSUE_LABEL_WIDTH, "Location", location, wrap_list);
            for (label, text) in evidence.chain([("Fix", fix.as_str())]) {
                self.labelled_at(4, ISSUE_LABEL_WIDTH, label, text, wrap_words);
            }
        }
        if issues.len() > count {
            self.line(format!("  {} more issues: memtrace report RUN --section issues", issues.len() - count));
        }
    }

    fn pinned_host_memory(&mut self, owners: &[OwnerSummary]) {
        let total: u64 = owners.iter().map(|o| o.peak_bytes).sum();
        if total >= 1 << 20 {
            let names: Vec<String> =
                owners.iter().take(3).map(|o| format!("{} {}", o.owner, size_text(o.peak_bytes))).collect();
            self.labelled_list("Pinned host memory", &format!("{} (peak of each owner)", names.join(", ")));
        }
    }

    fn foot(&mut self, summary: &Summary) {
        let mut losses: BTreeMap<&str, u64> =
            summary.losses.iter().map(|(name, count)| (name.as_str(), *count)).collect();
        losses.retain(|_, count| *count > 0);
        let before = self.lines.len();
        self.blank();
        let losses: Vec<String> =
            losses.iter().map(|(name, count)| format!("{} {}", name.replace('_', " "), count_text(*count))).collect();
        self.labelled_list("Losses", &losses.join(", "));
        self.missing_symbols(&summary.native_objects);
        for problem in summary.problems.iter().take(3) {
            self.labelled("Warning", problem);
        }
        let remarks = summary.processes.iter().flat_map(|p| &p.notices).filter(|n| n.topic == SNAPSHOT_TOPIC);
        for (i, remark) in remarks.enumerate() {
            self.labelled(if i == 0 { "Limits of a snapshot" } else { "" }, &remark.text);
        }
        if self.lines.len() == before + 1 {
            self.lines.truncate(before);
        }
        if !summary.files.is_empty() {
            self.blank();
            let mut names = summary.files.clone();
            if let Some(pickle) = names.iter_mut().find(|name| name.ends_with(".pickle")) {
                pickle.push_str(" (for pytorch.org/memory_viz)");
            }
            if names.len() > 5 {
                let more = names.len() - 5;
                names.truncate(5);
                names.push(format!("{more} more"));
            }
            let folder = summary.run.path.trim_end_matches('/');
            self.footer("Files", &format!("{folder}/  {}", names.join("  ")));
            self.footer("Next command", &format!("memtrace report {folder}"));
            self.footer("Labels", "explained in docs/reading-the-report.md");
        }
    }

    /// Adds native code whose symbols are missing for a reason that the user can fix.
    fn missing_symbols(&mut self, objects: &[NativeObjectSummary]) {
        let missing = |object: &NativeObjectSummary| object.addresses.saturating_sub(object.addresses_with_function);
        let mut objects: Vec<_> = objects.iter().filter(|o| missing(o) > 0 && !o.notes.is_empty()).collect();
        objects.sort_by_key(|object| std::cmp::Reverse(missing(object)));
        for object in objects.iter().take(2) {
            let file = object.path.rsplit('/').next().unwrap_or(&object.path);
            let (without, addresses) = (count_text(missing(object)), count_text(object.addresses));
            let why = object.notes.first().map(String::as_str).unwrap_or_default();
            self.labelled("Missing symbols", &format!("{without} of {addresses} addresses in {file}: {why}"));
        }
    }

    fn footer(&mut self, label: &str, text: &str) {
        let text = format!("{label:<12}  {text}");
        // Paths are meant to be copied, so the line is not cut.
        self.lines.push(text);
    }
}

/// The verdict about an out-of-memory error: `out of memory: requested 785 MiB at step 1, forward`.
fn oom_verdict(device: &DeviceSummary, oom: &OomSummary) -> String {
    let times = match (device.oom_count, device.explained_oom) {
        (1, _) => String::new(),
        (n, Some(0)) => format!(" (the first of {} OOMs)", count_text(n)),
        (n, _) => format!(" (the last of {} OOMs)", count_text(n)),
    };
    let continued = if oom.fatal == Some(false) { " (the program continued)" } else { "" };
    let when = when(oom.in_use.step, oom.in_use.phase);
    format!("out of memory{continued}: requested {} {when}{times}", request(oom))
}

/// Formats a number of blocks: ` in 293 blocks`. Empty for a single block.
pub(super) fn in_blocks(blocks: u64) -> String {
    if blocks == 1 { String::new() } else { format!(" in {} blocks", count_text(blocks)) }
}

fn has_phases(device: &DeviceSummary) -> bool {
    !device.before_first_step.is_empty() || !device.first_step.is_empty()
}

/// A row of the largest allocations.
pub(super) struct AllocationRow<'a> {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pub(super) category: Category,
    pub(super) location: &'a str,
    pub(super) tensor_name: Option<&'a str>,
    pub(super) tensor_name_pattern: Option<&'a str>,
    native: bool,
}

/// The largest allocations first. Groups that differ only in native frames are merged.
pub(super) fn allocation_rows(groups: &[AllocationGroup]) -> Vec<AllocationRow<'_>> {
    let mut rows: Vec<AllocationRow<'_>> = Vec::new();
    for group in groups {
        let native = group.stack.frames.iter().any(|frame| frame.native);
        let pattern = group.tensor_name_pattern.as_deref();
        let is_same = |row: &&mut AllocationRow<'_>| {
            row.native && native && row.category == group.category && row.location == group.stack.location
        };
        match rows.iter_mut().find(is_same) {
            Some(same) => {
                same.bytes += group.bytes;
                same.blocks += group.blocks;
                if same.tensor_name_pattern != pattern {
                    same.tensor_name_pattern = None;
                }
            }
            None => rows.push(AllocationRow {
                bytes: group.bytes,
                blocks: group.blocks,
                category: group.category,
                location: &group.stack.location,
                tensor_name: group.tensor_name.as_deref(),
                tensor_name_pattern: pattern,
                native,
            }),
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

/// Losses that are events missing from the trace.
const LOST_EVENTS: [&str; 3] = ["events_dropped", "events_lost", "undecodable_events"];

fn phase_cells(row: &PhaseSummary, indent: &str, steps: u64) -> Vec<String> {
    let per = |bytes: u64| size_text(bytes / steps);
    vec![
        format!("{indent}{}", row.phase.name()),
        per(row.allocated_bytes),
        per(row.freed_bytes),
        signed_size_text(row.net_bytes / steps as i64),
        size_text(row.after_bytes),
        size_text(row.peak_bytes),
        row.explanation.clone(),
    ]
}

/// Adds the program's named ranges in which memory changed, most allocated bytes first.
fn named_ranges(device: &DeviceSummary, table: &mut Table) {
    let mut own: Vec<&LabelSummary> = device.labels.iter().filter(|l| l.rule.is_none()).collect();
    own.retain(|label| label.allocations + label.frees > 0);
    if own.is_empty() {
        return;
    }
    own.sort_by_key(|label| std::cmp::Reverse(label.allocated_bytes));
    table.caption("named ranges (record_function, NVTX): mean per range; peak is the maximum".to_owned());
    for label in own.iter().take(LISTED_LABELS) {
        let per = |bytes: u64| size_text(bytes / label.times.max(1));
        let net = (label.allocated_bytes as i64 - label.freed_bytes as i64) / label.times.max(1) as i64;
        let times = if label.times == 1 { "once".to_owned() } else { format!("{} times", count_text(label.times)) };
        let kept = if label.kept_bytes == 0 { String::new() } else { format!(", kept {}", per(label.kept_bytes)) };
        table.row(vec![
            format!("  {}", cut(&label.name, LONGEST_LABEL)),
            per(label.allocated_bytes),
            per(label.freed_bytes),
            signed_size_text(net),
            size_text(label.after_bytes),
            size_text(label.peak_bytes),
            format!("{times}{kept}"),
        ]);
    }
    let more = own.len().saturating_sub(LISTED_LABELS) as u64 + device.labels_left_out;
    if more > 0 {
        table.caption(format!("{} more: see summary.json", count_text(more)));
    }
}

pub(super) fn process_name(process: &ProcessSummary) -> String {
    match process.rank {
        Some(rank) => format!("rank {rank}"),
        None => format!("pid {}", process.pid),
    }
}

pub(super) fn device_name(device: &DeviceSummary) -> String {
    if device.device < 0 { "CPU tensors".to_owned() } else { format!("GPU {}", device.device) }
}

/// Formats a device: `rank 3, GPU 0` or `pid 7, CPU tensors`.
pub(super) fn device_text(rank: Option<u32>, pid: u32, device: i16) -> String {
    let process = rank.map_or_else(|| format!("pid {pid}"), |rank| format!("rank {rank}"));
    let device = if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    format!("{process}, {device}")
}

/// Memory outside the caching allocator, by owner. Each figure is the owner's peak in bytes.
fn outside(device: &DeviceSummary) -> Vec<(&str, u64)> {
    let mut owners: Vec<(&str, u64)> = Vec::new();
    for owner in device.owners.iter().filter(|o| o.object.is_some()) {
        match owners.iter_mut().find(|(name, _)| *name == owner.owner) {
            Some((_, bytes)) => *bytes += owner.peak_bytes,
            None => owners.push((&owner.owner, owner.peak_bytes)),
        }
    }
    owners.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    owners
}

#[cfg(test)]
mod tests {
    use super::super::summary::StackSummary;
    use super::*;

    #[test]
    fn an_issue_has_its_location_evidence_and_fix() {
        let issue = IssueSummary {
            rule: memtrace_insight::rules::RuleId::Leak,
            device: 0,
            bytes: 120 << 20,
            headline: "12.0 MiB more with each step, 120 MiB at the end".into(),
            evidence: vec!["10 of 10 steps from step 2 on left a block more".into()],
            stack: Some(StackSummary { location: "train.py:9 step".into(), ..StackSummary::default() }),
            fix: "append loss.item()".into(),
            saves_bytes: Some(120 << 20),
            files: Vec::new(),
        };
        let process = ProcessSummary { issues: vec![issue; ISSUES + 2], ..ProcessSummary::default() };
        let text = Summary { processes: vec![process], ..Summary::default() }.to_text(&TextOptions::default());
        let expected = "  leak: 12.0 MiB more with each step, 120 MiB at the end
    Location  train.py:9 step
    Evidence  10 of 10 steps from step 2 on left a block more
    Fix       append loss.item() (lowers the peak by 120 MiB)
";
        assert_eq!(text.matches(expected).count(), ISSUES, "{text}");
        assert!(text.contains("2 more issues"), "{text}");
    }

    #[test]
    fn labels_stand_beside_their_text_or_above_it() {
        let lines = |width: usize| {
            let mut report = TextReport::new(&TextOptions { width, color: false });
            report.labelled("Free on the device", "550 MiB");
            report.labelled("In use before the program started", "520 MiB");
            report.labelled("Losses", "");
            report.lines
        };
        let wide = ["  Free on the device        550 MiB", "  In use before the program started  520 MiB"];
        assert_eq!(lines(100), wide);
        let narrow = ["  Free on the device", "    550 MiB", "  In use before the program started", "    520 MiB"];
        assert_eq!(lines(60), narrow);
    }

    #[test]
    fn only_own_control_sequences_are_kept() {
        let style = Style { color: true };
        let line = format!("{} \x1b]0;title\x07 \x1b[2J", style.bold("x"));
        assert_eq!(style.printable(&line), "\x1b[1mx\x1b[0m \u{fffd}]0;title\u{fffd} \u{fffd}[2J");
        assert_eq!(Style::PLAIN.printable("a\x1b[1mb"), "a\u{fffd}[1mb");
    }
}
