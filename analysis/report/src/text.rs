//! The end-of-run summary: one screen, the most important result first. All figures come from the [`Summary`]; unknown
//! figures are omitted.

use std::collections::BTreeMap;

use super::build::{is_snapshot, when};
use super::sections::wanted;
use super::summary::{
    DeviceSummary, FindingSummary, LabelSummary, MomentSummary, NativeObjectSummary, OomSummary, OwnerSummary,
    PhaseSummary, ProcessSummary, Summary, TopEntry,
};
use super::table::{Align, Table, cut, wrap, wrap_words};
use super::units::{count_text, duration_text, signed_size_text, size_text};
use memtrace_input::load::SNAPSHOT_TOPIC;
use memtrace_input::printable;
use memtrace_insight::passes::Category;

/// The maximum number of processes listed.
const LISTED_PROCESSES: usize = 12;
/// The maximum number of named ranges listed, and the maximum length of their names in characters.
const LISTED_LABELS: usize = 8;
const LONGEST_LABEL: usize = 28;
/// The maximum number of sources listed for the peak.
const TOP: usize = 4;
/// The maximum number of findings printed.
const FINDINGS: usize = 3;
/// Categories and owners below one in this many parts of the whole are summed up.
const WORTH_SAYING: u64 = 200;

/// Layout options for text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// The width in columns. 80 to 120 looks best; the minimum is 40.
    pub width: usize,
    /// Whether to use ANSI colors.
    pub colour: bool,
}

impl Default for TextOptions {
    fn default() -> TextOptions {
        TextOptions { width: 120, colour: false }
    }
}

/// Paints text with ANSI colors, or leaves it plain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Style {
    colour: bool,
}

impl Style {
    #[cfg(test)]
    pub(super) const PLAIN: Style = Style { colour: false };

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
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
        const OURS: [&str; 4] = ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;31m"];
        let (mut out, mut rest) = (String::with_capacity(line.len()), line);
        while let Some((before, _)) = rest.split_once('\x1b').filter(|_| self.colour) {
            out.push_str(&printable::line(before));
            let sequence = &rest[before.len()..];
            let ours = OURS.iter().find(|ours| sequence.starts_with(**ours));
            out.push_str(ours.map_or("\u{fffd}", |ours| ours));
            rest = &sequence[ours.map_or(1, |ours| ours.len())..];
        }
        out.push_str(&printable::line(rest));
        out
    }
}

impl Summary {
    /// The end-of-run summary as text.
    pub fn to_text(&self, options: &TextOptions) -> String {
        let mut page = Page::new(options);
        page.head(self);
        if self.processes.len() > 1 {
            page.blank();
            page.processes(&self.processes);
        }
        if let Some(process) = self.processes.first() {
            let name = (self.processes.len() > 1).then(|| process_name(process));
            for device in process.devices.iter().take(2) {
                page.blank();
                page.device(device, name.as_deref());
            }
            if process.devices.len() > 2 {
                page.line(format!("  {} more devices: see summary.json", process.devices.len() - 2));
            }
            page.findings(&process.findings, FINDINGS);
            page.pinned(&process.pinned);
        } else {
            page.line("nothing was allocated on a GPU, and no CPU tensors were recorded".to_owned());
        }
        page.foot(self);
        page.text()
    }
}

/// The title of the run: its command, or the file name of a snapshot.
pub(super) fn called(summary: &Summary) -> String {
    let run = &summary.run;
    let name = std::path::Path::new(&run.path).file_name().filter(|_| is_snapshot(&summary.processes));
    name.map_or_else(|| run.command.join(" "), |name| name.to_string_lossy().into_owned())
}

/// A report while its lines are collected.
pub(super) struct Page {
    pub(super) lines: Vec<String>,
    pub(super) width: usize,
    pub(super) style: Style,
}

impl Page {
    pub(super) fn new(options: &TextOptions) -> Page {
        Page { lines: Vec::new(), width: options.width.max(40), style: Style { colour: options.colour } }
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
        let outcome = &run.outcome;
        let room = self.width.saturating_sub(outcome.chars().count() + facts.chars().count() + 8 + "memtrace: ".len());
        let command = cut(&called(summary), room.max(16));
        let failed = run.exit.success() == Some(false);
        let plain = format!("memtrace: {command}    {outcome}    {facts}");
        if plain.chars().count() > self.width || !self.style.colour {
            self.line(plain);
        } else {
            let outcome = if failed { self.style.alarm(outcome) } else { self.style.bold(outcome) };
            self.lines.push(format!("{}    {outcome}    {facts}", self.style.bold(&format!("memtrace: {command}"))));
        }
    }

    /// Adds one line per process, the worst first.
    fn processes(&mut self, processes: &[ProcessSummary]) {
        let mut table = Table::new(&[
            ("process", Align::Left),
            ("device", Align::Left),
            ("peak", Align::Right),
            ("reserved", Align::Right),
            ("outside", Align::Right),
            ("peak at", Align::Left),
        ]);
        for process in processes.iter().take(LISTED_PROCESSES) {
            for device in process.devices.iter().take(4) {
                let peak = device.peak.as_ref();
                let mut at = peak.map(|p| when(p.step, p.phase)).unwrap_or_default();
                if device.oom_count > 0 {
                    at = format!("OUT OF MEMORY {at}");
                }
                table.row(vec![
                    process_name(process),
                    device_name(device),
                    size_text(device.highest.allocated_bytes),
                    size_text(device.highest.reserved_bytes),
                    size_text(outside(device).iter().map(|(_, bytes)| bytes).sum()),
                    at,
                ]);
            }
        }
        if processes.len() > LISTED_PROCESSES {
            table.caption(format!("{} more: see summary.json", processes.len() - LISTED_PROCESSES));
        }
        self.lines.extend(table.lines(0, self.width, self.style));
    }

    fn device(&mut self, device: &DeviceSummary, process: Option<&str>) {
        let title = self.device_title(device, process);
        let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
        match (oom, &device.peak) {
            (Some(oom), _) => self.out_of_memory(&title, device, oom),
            (None, Some(peak)) => self.peak(&title, device, peak),
            (None, None) => self.line(title),
        }
        if let Some(oom) = oom {
            self.oom_facts(device, oom);
            self.sources(&oom.there, TOP);
        } else if let Some(peak) = &device.peak {
            self.outside(device);
            self.sources(peak, TOP);
        }
        self.blank();
        self.phases(device);
        self.blank();
        self.second_step(device);
        self.next(device);
        // No suggestions were added, so the blank line before them is removed.
        if self.lines.last().is_some_and(String::is_empty) {
            self.lines.pop();
        }
    }

    fn peak(&mut self, title: &str, device: &DeviceSummary, peak: &MomentSummary) {
        let place = peak.by.as_ref().map(|by| by.place.as_str()).unwrap_or_default();
        self.title(
            title,
            &format!("peak {} {}", size_text(peak.totals.allocated_bytes), when(peak.step, peak.phase)),
            place,
        );
        let mut parts = categories(peak);
        let cached = peak.totals.reserved_bytes.saturating_sub(peak.totals.allocated_bytes);
        if cached > 0 {
            parts.push(format!("cached {}", size_text(cached)));
        }
        if device.highest.reserved_bytes > peak.totals.reserved_bytes {
            parts.push(format!("(reserved at most {})", size_text(device.highest.reserved_bytes)));
        }
        self.labelled("there", &format!("{}  {}", size_text(peak.totals.reserved_bytes), parts.join(", ")));
        self.modules(peak);
    }

    fn out_of_memory(&mut self, title: &str, device: &DeviceSummary, oom: &OomSummary) {
        let times = match (device.oom_count, device.explained_oom) {
            (1, _) => String::new(),
            (n, Some(0)) => format!(" (the first of {} such errors)", count_text(n)),
            (n, _) => format!(" (the last of {} such errors)", count_text(n)),
        };
        let verb = if oom.fatal == Some(false) { "ran out of memory and went on" } else { "ran out of memory" };
        self.title(
            title,
            &format!("{verb}: wanted {} {}{times}", wanted(oom), when(oom.there.step, oom.there.phase)),
            &oom.by.place,
        );
        let mut parts = categories(&oom.there);
        if let Some(needed) = oom.state_needed_bytes
            && let Some(state) = parts.iter_mut().find(|p| p.starts_with(Category::OptimizerState.plural()))
        {
            state.push_str(&format!(" (of {} it needs)", size_text(needed)));
        }
        if oom.cached_bytes > 0 {
            parts.push(format!("cached {}", size_text(oom.cached_bytes)));
        }
        self.labelled("there", &format!("{}  {}", size_text(oom.there.totals.reserved_bytes), parts.join(", ")));
    }

    fn title(&mut self, title: &str, what: &str, place: &str) {
        let plain = format!("{title}    {what}    {place}");
        let plain = plain.trim_end();
        if self.style.colour && plain.chars().count() <= self.width {
            let text = format!("{}    {what}    {place}", self.style.bold(title));
            self.lines.push(text.trim_end().to_owned());
        } else if plain.chars().count() <= self.width {
            self.line(plain.to_owned());
        } else {
            let first = format!("{title}    {what}");
            if first.chars().count() <= self.width {
                self.line(first);
            } else {
                self.line(title.to_owned());
                self.labelled("", what);
            }
            self.labelled("where", place);
        }
    }

    pub(super) fn labelled(&mut self, label: &str, text: &str) {
        let indent = 2 + 9;
        let mut first = true;
        for line in wrap(text, self.width.saturating_sub(indent)) {
            let label = if first { format!("  {label:<9}") } else { " ".repeat(indent) };
            self.lines.push(format!("{}{line}", self.style.dim(&label)));
            first = false;
        }
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
            self.labelled("outside", &format!("{}  {}", size_text(total), parts.join(", ")));
        }
        let imported: u64 = device.imported.iter().map(|o| o.peak_bytes).sum();
        if imported > 0 {
            let text = format!("{} of other processes, opened here and counted there", size_text(imported));
            self.labelled("imported", &text);
        }
        if let Some(before) = device.used_before_bytes.filter(|bytes| *bytes > 0) {
            let text =
                format!("{}  in use before the first allocation: CUDA context, other processes", size_text(before));
            self.labelled("before", &text);
        }
    }

    pub(super) fn phases(&mut self, device: &DeviceSummary) {
        if device.before.is_empty() && device.first_step.is_empty() {
            return;
        }
        let mut table = Table::new(&[
            ("phase", Align::Left),
            ("allocated", Align::Right),
            ("freed", Align::Right),
            ("net", Align::Right),
            ("after", Align::Right),
            ("peak", Align::Right),
            ("what grew", Align::Left),
        ]);
        let later = match device.later_steps_count {
            1 => "step 1".to_owned(),
            n => format!("steps 1-{n}: mean of each, highest peak"),
        };
        let parts = [
            (None, &device.before, 1),
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

    /// Adds the findings, largest first.
    pub(super) fn findings(&mut self, findings: &[FindingSummary], count: usize) {
        for finding in findings.iter().take(count) {
            self.blank();
            let place = finding.place.as_ref().map(|p| p.place.as_str()).unwrap_or_default();
            let headline = format!("{}    {place}", finding.headline);
            let mut label = finding.rule.as_str();
            for line in wrap_words(headline.trim_end(), self.width.saturating_sub(finding.rule.chars().count() + 2)) {
                let text = format!("{}  {line}", self.style.alarm(label));
                self.lines.push(if label.is_empty() { format!("  {line}") } else { text });
                label = "";
            }
            for evidence in &finding.evidence {
                self.labelled("because", evidence);
            }
            let saves = finding.saves_bytes.map(|bytes| format!(" (saves {})", size_text(bytes)));
            self.labelled("mend", &format!("{}{}", finding.mend, saves.unwrap_or_default()));
        }
        if findings.len() > count {
            self.line(format!("  {} more findings: memtrace report --section findings", findings.len() - count));
        }
    }

    fn pinned(&mut self, owners: &[OwnerSummary]) {
        let total: u64 = owners.iter().map(|o| o.peak_bytes).sum();
        if total >= 1 << 20 {
            self.blank();
            let names: Vec<String> =
                owners.iter().take(3).map(|o| format!("{} {}", o.owner, size_text(o.peak_bytes))).collect();
            self.labelled("host", &format!("page-locked memory: {}", names.join(", ")));
        }
    }

    fn foot(&mut self, summary: &Summary) {
        let mut told: BTreeMap<&str, u64> =
            summary.losses.iter().map(|(name, count)| (name.as_str(), *count)).collect();
        told.retain(|_, count| *count > 0);
        if !told.is_empty() || !summary.problems.is_empty() {
            self.blank();
        }
        if !told.is_empty() {
            let text: Vec<String> =
                told.iter().map(|(name, count)| format!("{} {}", name.replace('_', " "), count_text(*count))).collect();
            self.labelled("missing", &text.join(", "));
        }
        self.unnamed(&summary.native_objects);
        for problem in summary.problems.iter().take(3) {
            self.labelled("problem", problem);
        }
        let remarks = summary.processes.iter().flat_map(|p| &p.notices).filter(|n| n.topic == SNAPSHOT_TOPIC);
        for (i, remark) in remarks.enumerate() {
            if i == 0 {
                self.blank();
            }
            self.labelled("snapshot", &remark.text);
        }
        if !summary.files.is_empty() {
            self.blank();
            let mut names = summary.files.clone();
            if let Some(pickle) = names.iter_mut().find(|name| name.ends_with(".pickle")) {
                pickle.push_str(" (drop on pytorch.org/memory_viz)");
            }
            if names.len() > 5 {
                let more = names.len() - 5;
                names.truncate(5);
                names.push(format!("{more} more"));
            }
            let folder = summary.run.path.trim_end_matches('/');
            self.plain_label("files", &format!("{folder}/  {}", names.join("  ")));
            self.plain_label("look", &format!("memtrace report {folder}"));
        }
    }

    /// Adds native code whose symbols are missing for a reason that the user can fix.
    fn unnamed(&mut self, objects: &[NativeObjectSummary]) {
        let mut unnamed: Vec<_> = objects.iter().filter(|o| o.named < o.places && !o.notes.is_empty()).collect();
        unnamed.sort_by_key(|o| std::cmp::Reverse(o.places - o.named));
        for object in unnamed.iter().take(2) {
            let file = object.path.rsplit('/').next().unwrap_or(&object.path);
            let (missing, places) = (count_text(object.places - object.named), count_text(object.places));
            let why = object.notes.first().map(String::as_str).unwrap_or_default();
            self.labelled("unnamed", &format!("{missing} of {places} places in {file}: {why}"));
        }
    }

    fn plain_label(&mut self, label: &str, text: &str) {
        let text = format!("{label:<9}{text}");
        // Paths are meant to be copied, so the line is not cut.
        self.lines.push(text);
    }
}

/// A line of the largest sources.
pub(super) struct Source<'a> {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pub(super) category: Category,
    pub(super) place: &'a str,
    pub(super) name: Option<&'a str>,
    pub(super) names: Option<&'a str>,
    native: bool,
}

/// The largest sources first. Sources that differ only in native frames are merged.
pub(super) fn by_place(top: &[TopEntry]) -> Vec<Source<'_>> {
    let mut all: Vec<Source<'_>> = Vec::new();
    for TopEntry { bytes, blocks, category, stack, name, names, .. } in top {
        let native = stack.frames.iter().any(|frame| frame.native);
        match all.iter_mut().find(|s| s.native && native && s.category == *category && s.place == stack.place) {
            Some(same) => {
                same.bytes += bytes;
                same.blocks += blocks;
                if same.names != names.as_deref() {
                    same.names = None;
                }
            }
            None => {
                let (category, place, name) = (*category, stack.place.as_str(), name.as_deref());
                let names = names.as_deref();
                all.push(Source { bytes: *bytes, blocks: *blocks, category, place, name, names, native });
            }
        }
    }
    all.sort_by_key(|source| std::cmp::Reverse(source.bytes));
    all
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
    table.caption("ranges that the program named: mean of each, highest peak".to_owned());
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

/// The largest categories as text.
fn categories(moment: &MomentSummary) -> Vec<String> {
    let whole = moment.totals.allocated_bytes;
    let mut parts = Vec::new();
    let mut rest = 0;
    for amount in &moment.by_category {
        if amount.category == Category::Unknown || amount.bytes < whole / WORTH_SAYING {
            rest += amount.bytes;
        } else {
            parts.push(format!("{} {}", amount.category.plural(), size_text(amount.bytes)));
        }
    }
    if rest > 0 {
        parts.push(format!("{} {}", if parts.is_empty() { "allocated" } else { "other" }, size_text(rest)));
    }
    parts
}

/// Memory outside the caching allocator, by owner. Each figure is the owner's peak in bytes.
fn outside(device: &DeviceSummary) -> Vec<(&str, u64)> {
    let mut owners: Vec<(&str, u64)> = Vec::new();
    for owner in device.owners.iter().filter(|o| o.module.is_some()) {
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
    fn a_finding_is_told_with_its_reason_and_its_mend() {
        let finding = FindingSummary {
            rule: "leak".into(),
            headline: "12.0 MiB more with each step, 120 MiB at the end".into(),
            evidence: vec!["10 of 10 steps from step 2 on left a block more".into()],
            place: Some(StackSummary { place: "train.py:9 step".into(), ..StackSummary::default() }),
            mend: "append loss.item()".into(),
            saves_bytes: Some(120 << 20),
            ..FindingSummary::default()
        };
        let process = ProcessSummary { findings: vec![finding; FINDINGS + 2], ..ProcessSummary::default() };
        let text = Summary { processes: vec![process], ..Summary::default() }.to_text(&TextOptions::default());
        let told = "leak  12.0 MiB more with each step, 120 MiB at the end    train.py:9 step
  because  10 of 10 steps from step 2 on left a block more
  mend     append loss.item() (saves 120 MiB)
";
        assert_eq!(text.matches(told).count(), FINDINGS, "{text}");
        assert!(text.contains("2 more findings"), "{text}");
    }

    #[test]
    fn of_control_sequences_only_our_own() {
        let style = Style { colour: true };
        let line = format!("{} \x1b]0;title\x07 \x1b[2J", style.bold("x"));
        assert_eq!(style.printable(&line), "\x1b[1mx\x1b[0m \u{fffd}]0;title\u{fffd} \u{fffd}[2J");
        assert_eq!(Style::PLAIN.printable("a\x1b[1mb"), "a\u{fffd}[1mb");
    }
}
