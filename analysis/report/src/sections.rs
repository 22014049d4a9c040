//! The sections of a report in full: `memtrace report RUN --section peak`. Like the end-of-run summary, they use only
//! the [`Summary`].

use std::collections::BTreeMap;

use super::build::when;
use super::summary::{
    BlockingAllocation, DeviceSummary, FrameSummary, MemoryState, ModuleSummary, OomSummary, ProcessSummary,
    ReservedSummary, SuggestionSummary, Summary, WhatIfSummary,
};
use super::table::{Align, Table, cut_middle, location_in, short_location, wrap_words};
use super::text::{ROW_TEXT, TextOptions, TextReport, allocation_rows, device_name, in_blocks, process_name};
use super::units::{count_text, size_text};

/// A section of the report.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The name on the command line.
    pub name: &'static str,
    /// The heading in HTML.
    pub title: &'static str,
    /// A description of its content.
    pub description: &'static str,
    add: fn(&mut TextReport, &DeviceSummary),
}

/// The maximum number of modules listed. A listed module has at least one in `SMALL_MODULE` parts of the allocated
/// bytes.
const MODULES: usize = 3;
const SMALL_MODULE: u64 = 50;
/// The maximum length of a tensor name, in characters.
const LONGEST_NAME: usize = 48;
/// The maximum number of allocations listed.
const LARGEST: usize = 12;
/// The maximum number of allocations listed that block segments.
const BLOCKED_BY: usize = 8;

/// All sections, in the order of `--help`.
pub static SECTIONS: &[Section] = &[
    Section {
        name: "peak",
        title: "Peak",
        description: "the peak: when, what was in use, and what would lower it",
        add: TextReport::peak_section,
    },
    Section {
        name: "oom",
        title: "Out-of-memory errors",
        description: "out-of-memory errors: the request, and where the memory was",
        add: TextReport::oom_section,
    },
    Section {
        name: "phases",
        title: "Memory by phase",
        description: "what each phase allocated, freed and kept",
        add: TextReport::phases,
    },
    Section {
        name: "fragmentation",
        title: "Fragmentation",
        description: "reserved but unallocated memory, what blocks it, and a replay with other allocator settings",
        add: TextReport::fragmentation,
    },
    Section {
        name: "memory",
        title: "Memory statistics",
        description: "the table of torch.cuda.memory_summary at the end of the run",
        add: TextReport::memory,
    },
    Section {
        name: "outside-pytorch",
        title: "Outside PyTorch",
        description: "device memory outside PyTorch's caching allocator, by owner",
        add: TextReport::outside_section,
    },
    Section {
        name: "rules",
        title: "Rules",
        description: "which rules decided phases and categories, with evidence",
        add: TextReport::rules,
    },
    Section { name: "issues", title: "Issues", description: "issues, with evidence and fix", add: |_, _| {} },
];

impl Section {
    /// The section with this name; `None` if there is none.
    pub fn named(name: &str) -> Option<&'static Section> {
        SECTIONS.iter().find(|section| section.name == name)
    }

    /// Whether the section needs a replay of the allocator's policy.
    pub fn replays(&self) -> bool {
        self.name == "fragmentation"
    }

    /// Whether the section has content for a process.
    pub(super) fn has_content(&self, process: &ProcessSummary) -> bool {
        let any = |has: fn(&DeviceSummary) -> bool| process.devices.iter().any(has);
        match self.name {
            "oom" => any(|device| device.oom_count > 0),
            "peak" => any(|device| device.peak.is_some()),
            "phases" => any(|device| !device.before_first_step.is_empty() || !device.first_step.is_empty()),
            "fragmentation" => any(|device| device.reserved.is_some()),
            "memory" => any(|device| !device.statistics.is_empty()),
            "outside-pytorch" => {
                any(|device| device.owners.iter().any(|owner| owner.object.is_some() && owner.peak_bytes > 0))
            }
            "rules" => any(|device| !device.phase_rules.is_empty()),
            _ => true,
        }
    }

    /// The section's text for one process, without the line about the run.
    pub(super) fn of_process(&self, process: &ProcessSummary, name: Option<&str>, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.section(self, process, name);
        report.text()
    }
}

impl Summary {
    /// One section of the report as text.
    pub fn section_to_text(&self, section: &Section, options: &TextOptions) -> String {
        let mut report = TextReport::new(options);
        report.head(self);
        for process in &self.processes {
            let name = (self.processes.len() > 1).then(|| process_name(process));
            report.section(section, process, name.as_deref());
        }
        report.text()
    }
}

impl TextReport {
    fn section(&mut self, section: &Section, process: &ProcessSummary, name: Option<&str>) {
        if section.name == "issues" {
            if process.issues.is_empty() {
                self.blank();
                self.line(name.map_or_else(|| "no issues".to_owned(), |name| format!("no issues in {name}")));
            }
            self.issues(&process.issues, usize::MAX, name);
            return;
        }
        for device in &process.devices {
            self.blank();
            let title = self.device_title(device, name);
            self.heading(&title);
            (section.add)(self, device);
        }
    }

    /// The title of a device: `rank 3, GPU 0  NVIDIA H200  140 GiB`.
    pub(super) fn device_title(&self, device: &DeviceSummary, process: Option<&str>) -> String {
        let mut title = device_name(device);
        if let Some(process) = process {
            title = format!("{process}, {title}");
        }
        if device.device >= 0 {
            title.extend(device.name.iter().map(|name| format!("  {name}")));
        }
        title.extend(device.total_bytes.map(|total| format!("  {}", size_text(total))));
        title
    }

    /// The peak in full.
    fn peak_section(&mut self, device: &DeviceSummary) {
        let Some(peak) = &device.peak else {
            return self.line("  nothing was allocated".to_owned());
        };
        let location = peak.allocated_at.as_ref().map_or("", |stack| stack.location.as_str());
        let when = when(peak.step, peak.phase);
        self.labelled("Peak", &format!("{} {when}", size_text(peak.totals.allocated_bytes)));
        self.labelled_list("Allocated at", location);
        let reserved = device.reserved.as_ref().filter(|_| device.explained_oom.is_none());
        self.reserved(peak, reserved, device);
        self.categories(peak, false, None);
        self.modules(peak);
        self.largest_allocations(peak, LARGEST);
        self.growth_after_first_step(device);
        if device.explained_oom.is_none() {
            self.blocked_by(device.reserved.as_ref(), BLOCKED_BY);
            self.suggestions(device, "Suggestions", 2);
        }
    }

    /// The out-of-memory error in full.
    fn oom_section(&mut self, device: &DeviceSummary) {
        let Some(oom) = device.explained_oom.and_then(|at| device.ooms.get(at)) else {
            return self.line("  no out-of-memory error".to_owned());
        };
        let end = match oom.fatal {
            Some(false) => "the program continued",
            Some(true) => "the error ended the process",
            None => "it is unknown whether the error ended the process",
        };
        self.labelled("Requested", &format!("{} {}; {end}", request(oom), when(oom.in_use.step, oom.in_use.phase)));
        self.labelled_list("Requested at", &oom.requested_at.location);
        self.oom_facts(device, oom);
        self.categories(&oom.in_use, false, oom.optimizer_state_needed_bytes);
        self.largest_allocations(&oom.in_use, LARGEST);
        self.blocked_by(device.reserved.as_ref(), BLOCKED_BY);
        self.suggestions(device, "Suggestions", 2);
        self.other_errors(device);
    }

    fn other_errors(&mut self, device: &DeviceSummary) {
        let others = device.ooms.iter().enumerate().filter(|(at, _)| Some(*at) != device.explained_oom);
        let others: Vec<&OomSummary> = others.map(|(_, oom)| oom).collect();
        if others.is_empty() {
            return;
        }
        self.list(&format!("Other out-of-memory errors ({} in all)", count_text(device.oom_count)));
        for oom in others {
            let when = when(oom.in_use.step, oom.in_use.phase);
            let text = format!("requested {} {when}  {}", request(oom), oom.requested_at.location);
            self.item(4, text.trim_end());
        }
    }

    /// Adds where the device's memory was when a request failed.
    pub(super) fn oom_facts(&mut self, device: &DeviceSummary, oom: &OomSummary) {
        let reserved = size_text(oom.in_use.totals.reserved_bytes);
        match (oom.device_free_bytes, oom.refused_by_pytorch) {
            (Some(free), true) => {
                let text = format!(
                    "PyTorch's own limit (set_per_process_memory_fraction) refused the request at {reserved} reserved; \
                     CUDA had {} free",
                    size_text(free)
                );
                self.labelled("Limit", &text);
            }
            (Some(free), false) => {
                let short = oom.short_bytes.map(|bytes| format!(" ({} less than requested)", size_text(bytes)));
                self.labelled("Free on the device", &format!("{}{}", size_text(free), short.unwrap_or_default()));
            }
            (None, _) => {}
        }
        if oom.reserved_but_unallocated_bytes > 0 {
            let is_small = oom.largest_free_bytes < oom.requested_bytes;
            let mut text = format!(
                "{} of {reserved} reserved; largest free block {}{}",
                size_text(oom.reserved_but_unallocated_bytes),
                size_text(oom.largest_free_bytes),
                if is_small { ", smaller than the request" } else { "" }
            );
            if let Some(reserved) = &device.reserved.as_ref().filter(|reserved| reserved.blocked_bytes > 0) {
                text.push_str(&format!(
                    "; {} blocked by live blocks in {} of {} segments",
                    size_text(reserved.blocked_bytes),
                    count_text(reserved.blocked_segments),
                    count_text(reserved.segments)
                ));
            }
            self.labelled("Reserved but unallocated", &text);
        }
        let mut owners: Vec<String> = oom
            .outside_pytorch
            .iter()
            .take(5)
            .map(|owner| format!("{} {}", owner.owner, size_text(owner.bytes)))
            .collect();
        let others = oom.contexts_and_other_processes_bytes.unwrap_or(0);
        if others > 0 {
            let before = device.in_use_before_bytes.filter(|bytes| *bytes > 0);
            let before =
                before.map(|bytes| format!(" ({} before the program started)", size_text(bytes))).unwrap_or_default();
            owners.push(format!("CUDA contexts and other processes {}{before}", size_text(others)));
        }
        if !owners.is_empty() {
            let total = oom.outside_pytorch_bytes.saturating_add(others);
            self.labelled_list("Outside PyTorch", &format!("{}: {}", size_text(total), owners.join(", ")));
        }
    }

    /// Adds what was reserved, and the parts of it that are not in use.
    fn reserved(&mut self, state: &MemoryState, reserved: Option<&ReservedSummary>, device: &DeviceSummary) {
        let totals = &state.totals;
        if totals.reserved_bytes == 0 {
            return;
        }
        let unallocated = totals.reserved_bytes.saturating_sub(totals.active_bytes.max(totals.allocated_bytes));
        let mut parts = match reserved {
            Some(reserved) => vec![
                (reserved.releasable_bytes, "free and releasable to CUDA"),
                (reserved.blocked_bytes, "free but blocked by live blocks"),
            ],
            None => vec![(unallocated, "unallocated")],
        };
        parts.push((totals.active_bytes.saturating_sub(totals.allocated_bytes), "pending free"));
        parts.push((totals.active_bytes.saturating_sub(totals.requested_bytes), "rounding"));
        parts.retain(|(bytes, _)| *bytes > 0);
        let parts: Vec<String> = parts.iter().map(|(bytes, what)| format!("{} {what}", size_text(*bytes))).collect();
        let mut text = size_text(totals.reserved_bytes);
        if !parts.is_empty() {
            text = format!("{text}: {}", parts.join(", "));
        }
        if device.highest.reserved_bytes > totals.reserved_bytes {
            text.push_str(&format!("; peak of reserved memory {}", size_text(device.highest.reserved_bytes)));
        }
        self.labelled_list("Reserved", &text);
    }

    /// Adds the largest allocations of the blocks that were allocated.
    pub(super) fn largest_allocations(&mut self, state: &MemoryState, count: usize) {
        let rows = allocation_rows(&state.largest_allocations);
        if !rows.is_empty() {
            self.list("Largest allocations (% of allocated)");
        }
        for row in rows.iter().take(count) {
            let mut text = format!("{}{}", row.category.plural(), in_blocks(row.blocks));
            let name = match (row.tensor_name_pattern, row.tensor_name) {
                (Some(pattern), _) => pattern.to_owned(),
                (None, Some(name)) if row.blocks > 1 => format!("{name}, ..."),
                (None, name) => name.unwrap_or_default().to_owned(),
            };
            text.extend((!name.is_empty()).then(|| format!("  {}", cut_middle(&name, LONGEST_NAME))));
            let left = self.width.saturating_sub(ROW_TEXT + text.chars().count() + 2);
            let beside = short_location(row.location, left);
            text.extend(beside.iter().map(|location| format!("  {location}")));
            self.row(row.bytes, state.totals.allocated_bytes, &text);
            if beside.is_none() {
                let location = location_in(row.location, self.width.saturating_sub(ROW_TEXT));
                self.line(format!("{:ROW_TEXT$}{location}", ""));
            }
        }
    }

    /// Adds the largest modules, one line each. Sibling modules of one class share a line.
    pub(super) fn modules(&mut self, state: &MemoryState) {
        let whole = state.totals.allocated_bytes;
        let mut groups = module_groups(&state.by_module);
        groups.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        groups.retain(|group| group.bytes >= whole / SMALL_MODULE);
        if !groups.is_empty() {
            self.list("By module (% of allocated)");
        }
        for group in groups.iter().take(MODULES) {
            self.row(group.bytes, whole, &group.name);
        }
    }

    pub(super) fn growth_after_first_step(&mut self, device: &DeviceSummary) {
        let Some(growth) = &device.growth_after_first_step else { return };
        let text = format!(
            "{}: step 0 peaks at {}, later steps at {}; the optimizer allocated {} of state at the end of step 0",
            size_text(growth.later_steps_peak_bytes.saturating_sub(growth.first_step_peak_bytes)),
            size_text(growth.first_step_peak_bytes),
            size_text(growth.later_steps_peak_bytes),
            size_text(growth.optimizer_state_bytes)
        );
        self.labelled("Growth after the first step", &text);
    }

    /// Adds the live blocks that keep segments from being returned.
    fn blocked_by(&mut self, reserved: Option<&ReservedSummary>, count: usize) {
        let Some(reserved) = reserved.filter(|reserved| !reserved.blocked_by.is_empty()) else { return };
        self.list("Segments blocked by");
        for blocking in reserved.blocked_by.iter().take(count) {
            self.item(4, &blocking_text(blocking));
            let location = location_in(&blocking.allocated_at.location, self.width.saturating_sub(6));
            if !location.is_empty() {
                self.line(format!("      {location}"));
            }
        }
    }

    /// Adds the suggestions: replayed allocator settings first, then changes to the program. Without an indent they
    /// have a heading of the whole report, else one of the device's section.
    pub(super) fn suggestions(&mut self, device: &DeviceSummary, heading: &str, indent: usize) {
        let suggestions = suggestion_texts(device);
        if suggestions.is_empty() {
            return;
        }
        if indent == 0 {
            self.blank();
            self.heading(heading);
        } else {
            self.list(heading);
        }
        for text in &suggestions {
            self.item(indent + 2, text);
        }
    }

    /// Adds an item of a list of sentences.
    fn item(&mut self, indent: usize, text: &str) {
        let mut head = format!("{:indent$}- ", "");
        for line in wrap_words(text, self.width.saturating_sub(indent + 2)) {
            self.lines.push(format!("{head}{line}"));
            head = " ".repeat(indent + 2);
        }
    }

    fn fragmentation(&mut self, device: &DeviceSummary) {
        let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
        let state = oom.map(|oom| &oom.in_use).or(device.peak.as_ref());
        let (Some(reserved), Some(state)) = (&device.reserved, state) else {
            return self.line("  no data: only PyTorch's caching allocator reserves memory".to_owned());
        };
        let whole = state.totals.reserved_bytes;
        let when = when(state.step, state.phase);
        let at = if oom.is_some() { "at the out-of-memory error" } else { "at the peak of allocated memory" };
        let segments = count_text(reserved.segments);
        self.labelled("Reserved", &format!("{} in {segments} segments, {at} ({when})", size_text(whole)));
        self.list("Use of reserved memory (% of reserved)");
        let rows = [
            ("requested by the program", reserved.allocated_bytes.saturating_sub(reserved.rounding_bytes)),
            ("rounding of requests to block sizes", reserved.rounding_bytes),
            ("pending free: streams still use the block", reserved.pending_free_bytes),
            ("free in unused segments and pages, releasable to CUDA", reserved.releasable_bytes),
            ("free but blocked by live blocks in the same segment", reserved.blocked_bytes),
        ];
        for (what, bytes) in rows.iter().filter(|(_, bytes)| *bytes > 0) {
            self.row(*bytes, whole, what);
        }
        self.blocked_by(Some(reserved), usize::MAX);
        match &device.what_if {
            Some(what_if) => self.what_if(what_if),
            None => self.labelled("Allocator replay", "none"),
        }
    }

    fn what_if(&mut self, what_if: &WhatIfSummary) {
        if let Some(mismatch) = &what_if.mismatch {
            let text = format!(
                "differs from the recording after {} blocks, so other settings are not compared: {mismatch}",
                count_text(what_if.matched_blocks)
            );
            return self.labelled("Allocator replay", &text);
        }
        let text = format!(
            "matches the recording: {} blocks at the same addresses, {} segment events; peak of reserved memory {}",
            count_text(what_if.matched_blocks),
            count_text(what_if.matched_segment_events),
            size_text(what_if.reserved_peak_bytes)
        );
        self.labelled("Allocator replay", &text);
        if let Some(limit) = what_if.limit_bytes {
            let text = format!("{} for the allocator; the other owners keep what they had", size_text(limit));
            self.labelled("Memory limit", &text);
        }
        let has_request = what_if.settings.iter().any(|setting| setting.fits.is_some() || setting.fails_earlier);
        let mut table = Table::new(&[
            ("Setting", Align::Left),
            ("Peak reserved", Align::Right),
            (if has_request { "Request" } else { "" }, Align::Left),
        ]);
        for setting in &what_if.settings {
            let fits = match (setting.fits, setting.fails_earlier) {
                (_, true) => "an earlier request fails",
                (Some(true), _) => "fits",
                (Some(false), _) => "fails",
                (None, _) => "",
            };
            table.row(vec![setting.setting.clone(), size_text(setting.reserved_peak_bytes), fits.to_owned()]);
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// The memory outside the caching allocator in full.
    fn outside_section(&mut self, device: &DeviceSummary) {
        let before = self.lines.len();
        self.outside(device);
        let mut owners = device.owners.iter().filter(|o| o.object.is_some() && o.peak_bytes > 0).peekable();
        if owners.peek().is_some() {
            let mut table = Table::new(&[
                ("Owner", Align::Left),
                ("Peak", Align::Right),
                ("At the end", Align::Right),
                ("Allocations", Align::Right),
                ("Object", Align::Left),
            ]);
            for owner in owners {
                let object = owner.object.as_deref().unwrap_or_default();
                table.row(vec![
                    owner.owner.clone(),
                    size_text(owner.peak_bytes),
                    size_text(owner.end_bytes),
                    count_text(owner.allocations),
                    object.rsplit('/').next().unwrap_or(object).to_owned(),
                ]);
            }
            let lines = table.lines(2, self.width, self.style);
            self.lines.extend(lines);
        }
        if self.lines.len() == before {
            self.line("  no memory outside PyTorch is known".to_owned());
        }
    }

    fn rules(&mut self, device: &DeviceSummary) {
        let mut table = Table::new(&[
            ("Result", Align::Left),
            ("Rule", Align::Left),
            ("Blocks", Align::Right),
            ("Bytes", Align::Right),
            ("Example", Align::Left),
        ]);
        let location = |frame: &Option<FrameSummary>| {
            frame.as_ref().map(|f| format!("{}:{} {}", f.filename, f.line, f.name)).unwrap_or_default()
        };
        for rule in &device.phase_rules {
            table.row(vec![
                rule.phase.name().to_owned(),
                rule.rule.to_string(),
                count_text(rule.allocations),
                size_text(rule.bytes),
                location(&rule.evidence),
            ]);
        }
        for rule in &device.category_rules {
            table.row(vec![
                rule.category.name().to_owned(),
                rule.rule.to_string(),
                count_text(rule.blocks),
                size_text(rule.bytes),
                location(&rule.evidence),
            ]);
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }
}

/// One line of the report: a module, or several sibling modules of one class.
struct ModuleGroup {
    name: String,
    bytes: u64,
}

/// Groups the modules of a tree for listing. A module is divided further if sibling modules of one class hold at least
/// half of it, or if one other module inside it does. A root is always divided, into its own memory and its modules.
fn module_groups(tree: &[ModuleSummary]) -> Vec<ModuleGroup> {
    let mut groups = Vec::new();
    let mut at = 0;
    while let Some(module) = tree.get(at) {
        let end = at + 1 + tree[at + 1..].iter().take_while(|one| one.depth > module.depth).count();
        add_groups(&tree[at..end], &mut groups);
        at = end;
    }
    groups
}

/// Groups one module and the modules inside it. `tree` starts with the module itself.
fn add_groups(tree: &[ModuleSummary], groups: &mut Vec<ModuleGroup>) {
    let Some((module, inside)) = tree.split_first() else { return };
    let class = module.class.as_deref().unwrap_or("");
    let name = match (module.path.as_str(), class) {
        ("", "") => "a module".to_owned(),
        ("", class) => class.to_owned(),
        (path, "") => path.to_owned(),
        (path, class) => format!("{path} ({class})"),
    };
    let children: Vec<usize> = (0..inside.len()).filter(|&at| inside[at].depth == module.depth + 1).collect();
    let mut classes: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for child in children.iter().map(|&at| &inside[at]) {
        let (count, bytes) = classes.entry(child.class.as_deref().unwrap_or("")).or_default();
        (*count, *bytes) = (*count + 1, *bytes + child.bytes);
    }
    let is_repeated = |class: &str| !class.is_empty() && classes.get(class).is_some_and(|(count, _)| *count >= 2);
    let repeated = classes.iter().filter(|(class, _)| is_repeated(class)).map(|(_, (_, bytes))| *bytes);
    let most_repeated = repeated.max().unwrap_or(0);
    let largest = children.iter().map(|&at| inside[at].bytes).max().unwrap_or(0);
    if module.depth > 0 && most_repeated * 2 < module.bytes && largest * 2 < module.bytes {
        return groups.push(ModuleGroup { name, bytes: module.bytes });
    }
    let in_children: u64 = children.iter().map(|&at| inside[at].bytes).sum();
    if module.bytes > in_children {
        let name = if inside.is_empty() { name } else { format!("{name} itself") };
        groups.push(ModuleGroup { name, bytes: module.bytes - in_children });
    }
    for (class, (count, bytes)) in classes.iter().filter(|(class, _)| is_repeated(class)) {
        let path = if module.path.is_empty() { "*".to_owned() } else { format!("{}.*", module.path) };
        groups.push(ModuleGroup { name: format!("{path} ({count} of {class})"), bytes: *bytes });
    }
    let ends = children.iter().skip(1).copied().chain([inside.len()]);
    for (&from, to) in children.iter().zip(ends) {
        if !is_repeated(inside[from].class.as_deref().unwrap_or("")) {
            add_groups(&inside[from..to], groups);
        }
    }
}

/// Formats the request: `200 MiB for Adam.exp_avg of head.weight` or `200 MiB (as large as head.weight)`.
pub(super) fn request(oom: &OomSummary) -> String {
    let what = match (&oom.requested_for, &oom.as_large_as) {
        (Some(name), _) => format!(" for {name}"),
        (None, Some(name)) => format!(" (as large as {name})"),
        (None, None) => String::new(),
    };
    format!("{}{what}", size_text(oom.requested_bytes))
}

fn blocking_text(blocking: &BlockingAllocation) -> String {
    let count = |count: u64, noun: &str| {
        if count == 1 { format!("1 {noun}") } else { format!("{} {noun}s", count_text(count)) }
    };
    let name = blocking.tensor_name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
    format!(
        "{} of {}{name}: {} free in {} of {}",
        count(blocking.blocks, "block"),
        size_text(blocking.block_bytes),
        size_text(blocking.free_bytes),
        count(blocking.segments, "segment"),
        size_text(blocking.segment_bytes)
    )
}

/// The maximum number of suggestions listed, besides that about allocator settings.
const SUGGESTIONS: usize = 3;

/// The suggestions, most promising first. They use only the replay and the figures of this run.
fn suggestion_texts(device: &DeviceSummary) -> Vec<String> {
    let mut texts = Vec::new();
    if let Some(what_if) = &device.what_if {
        texts.extend(settings_text(device, what_if));
    }
    let text = |suggestion: &SuggestionSummary| {
        let bound = if suggestion.at_most { "up to " } else { "" };
        format!("{}: saves {bound}{}", suggestion.action, size_text(suggestion.saves_bytes))
    };
    texts.extend(device.suggestions.iter().take(SUGGESTIONS).map(text));
    texts
}

/// A setting that saves less than one in this many parts of the reserved bytes is not suggested.
const SMALL_SAVING: u64 = 20;

fn settings_text(device: &DeviceSummary, what_if: &WhatIfSummary) -> Option<String> {
    if what_if.mismatch.is_some() || what_if.settings.is_empty() {
        return None;
    }
    let replay = format!(
        "allocator replay; it matches {} recorded blocks and {} segment events",
        count_text(what_if.matched_blocks),
        count_text(what_if.matched_segment_events)
    );
    if device.explained_oom.is_some() {
        let fits = what_if.settings.iter().find(|setting| setting.fits == Some(true));
        return match fits {
            Some(setting) => Some(format!(
                "PYTORCH_CUDA_ALLOC_CONF={}: the request fits, with {} of at most {} reserved ({replay})",
                setting.setting,
                size_text(setting.reserved_peak_bytes),
                size_text(what_if.limit_bytes.unwrap_or_default()),
            )),
            None if what_if.settings.iter().all(|setting| setting.fits == Some(false)) => {
                let names: Vec<&str> = what_if.settings.iter().map(|setting| setting.setting.as_str()).collect();
                Some(format!("no allocator setting makes the request fit: {} ({replay})", names.join(", ")))
            }
            None => None,
        };
    }
    let best = what_if.settings.iter().min_by_key(|setting| setting.reserved_peak_bytes)?;
    let saves = what_if.reserved_peak_bytes.checked_sub(best.reserved_peak_bytes)?;
    (saves >= what_if.reserved_peak_bytes / SMALL_SAVING && saves > 0).then(|| {
        format!(
            "PYTORCH_CUDA_ALLOC_CONF={}: saves {} of reserved memory, {} instead of {} at its peak ({replay})",
            best.setting,
            size_text(saves),
            size_text(best.reserved_peak_bytes),
            size_text(what_if.reserved_peak_bytes)
        )
    })
}
