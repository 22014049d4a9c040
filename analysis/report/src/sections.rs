//! The sections of a report in full: `memtrace report RUN --section peak`. Like the end-of-run summary, they use only
//! the [`Summary`].

use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{
    DeviceSummary, FrameSummary, MemoryState, OomSummary, ProcessSummary, RangeSummary, ReservedSummary,
    SuggestionScope, Summary, WhatIfSummary, count_text, process_name, request, size_text, when, when_peaked,
    when_refused,
};

use crate::fit::{location_in, wrap_words};
use crate::parts::blocking_text;
use crate::style::TextOptions;
use crate::table::{Align, Table};
use crate::text_report::TextReport;

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

/// The width of the labels of a change.
const CHANGE_LABEL_WIDTH: usize = 12;
/// The section about the run as a whole, not about a device.
const XLA: &str = "xla";
/// The section about main memory, of all processes together.
const HOST: &str = "host";
/// The maximum number of allocations listed.
const LARGEST: usize = 12;
/// The maximum number of allocations listed that block segments.
const BLOCKED_BY: usize = 8;

/// The section of out-of-memory errors, which is about processes too.
const OOM: &str = "oom";

/// All sections, in the order of `--help`.
pub static SECTIONS: &[Section] = &[
    Section {
        name: "peak",
        title: "Peak",
        description: "the peak: when, what was in use, and what would lower it",
        add: TextReport::peak_section,
    },
    Section {
        name: OOM,
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
        name: "device",
        title: "Device memory",
        description: "what nvidia-smi shows: PyTorch, libraries, CUDA context, kernels, other processes",
        add: TextReport::device_section,
    },
    Section {
        name: "graphs",
        title: "CUDA graphs",
        description: "what each CUDA graph capture cost, and the private memory pools",
        add: TextReport::cuda_graphs_section,
    },
    Section {
        name: "server",
        title: "Server",
        description: "an engine that serves models: weights, KV cache, stages, and what it had expected",
        add: TextReport::server_section,
    },
    Section {
        name: "rules",
        title: "Rules",
        description: "which rules decided phases and categories, with evidence",
        add: TextReport::rules,
    },
    Section {
        name: "holders",
        title: "Holders",
        description: "which Python objects hold the largest tensors (memtrace --holders)",
        add: TextReport::holders_section,
    },
    Section {
        name: "released",
        title: "Memory after a release",
        description: "what stayed after empty_cache, after ranges such as sleep or offload, and after --released-after",
        add: TextReport::released_section,
    },
    Section {
        name: "ranks",
        title: "Ranks",
        description: "all ranks of the launch, how they differ, stray contexts and shared memory",
        add: |_, _| {},
    },
    Section {
        name: XLA,
        title: "Programs that XLA compiled",
        description: "what each program that XLA compiled needs, by source line (memtrace --xla-dump)",
        add: |_, _| {},
    },
    Section {
        name: HOST,
        title: "Main memory",
        description: "main memory of the host: the peak, its limit, each process, shared and pinned memory",
        add: |_, _| {},
    },
    Section {
        name: "try",
        title: "What to try",
        description: "changes that lower the peak, cheapest first: the code of each, and what it costs",
        add: TextReport::changes_with_code,
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
}

/// One section of the report as text.
pub fn section_text(summary: &Summary, section: &Section, options: &TextOptions) -> String {
    let mut report = TextReport::new(&TextOptions { verbose: true, ..*options });
    report.head(summary);
    if section.name == "ranks" {
        report.ranks_section(summary);
        return report.text();
    }
    if section.name == XLA {
        report.blank();
        report.xla_section(summary);
        return report.text();
    }
    if section.name == HOST {
        report.host_section(summary);
        return report.text();
    }
    for process in &summary.processes {
        let name = (summary.processes.len() > 1).then(|| process_name(process));
        report.section(section, process, name.as_deref());
    }
    if section.name == "issues" {
        report.launch_issues(summary.launch.as_ref(), usize::MAX);
    }
    report.text()
}

/// The peak in the ranges of one name (`--range NAME`) as text.
pub fn range_text(summary: &Summary, options: &TextOptions) -> String {
    let mut report = TextReport::new(options);
    for process in &summary.processes {
        let name = (summary.processes.len() > 1).then(|| process_name(process));
        for device in &process.devices {
            let Some(range) = &device.range else { continue };
            if !report.lines.is_empty() {
                report.blank();
            }
            let title = report.device_title(device, name.as_deref());
            report.heading(&title);
            report.range(range);
        }
    }
    report.text()
}

impl TextReport {
    fn range(&mut self, range: &RangeSummary) {
        let RangeSummary { start_bytes, end_bytes, peak } = range;
        let location = peak.allocated_at.as_ref().map_or("", |stack| stack.location.as_str());
        let above = peak.totals.allocated_bytes.saturating_sub(*start_bytes);
        let text = format!(
            "{}, {} more than at the start; at the end {}",
            size_text(peak.totals.allocated_bytes),
            size_text(above),
            size_text(*end_bytes)
        );
        self.labelled("Peak", &text);
        // At the start, no allocation of the range has reached the peak.
        self.labelled_list("Allocated at", if above > 0 { location } else { "" });
        self.categories(peak, false, None);
        self.modules(peak);
        self.largest_allocations(peak, LARGEST);
    }

    fn section(&mut self, section: &Section, process: &ProcessSummary, name: Option<&str>) {
        if section.name == "issues" {
            let remark = process.no_issue_remark.as_deref();
            if process.issues.is_empty() && remark.is_none() {
                self.blank();
                self.line(name.map_or_else(|| "no issues".to_owned(), |name| format!("no issues in {name}")));
            }
            self.issues(&process.issues, usize::MAX, name, remark);
            return;
        }
        for device in &process.devices {
            self.blank();
            let title = self.device_title(device, name);
            self.heading(&title);
            (section.add)(self, device);
        }
        if section.name == OOM {
            self.refused_requests(process, name);
        }
    }

    /// The requests that CUDA refused to other callers than PyTorch's allocator.
    fn refused_requests(&mut self, process: &ProcessSummary, name: Option<&str>) {
        if process.refused_requests.is_empty() {
            return;
        }
        self.blank();
        let of = name.map(|name| format!(" in {name}")).unwrap_or_default();
        self.heading(&format!("Requests of other callers that CUDA refused{of}"));
        for request in &process.refused_requests {
            self.item(2, &request.text);
            request.details.iter().for_each(|text| self.item(4, text));
        }
    }

    /// The peak in full.
    fn peak_section(&mut self, device: &DeviceSummary) {
        let Some(peak) = &device.peak else {
            return self.line("  nothing was allocated".to_owned());
        };
        let location = peak.allocated_at.as_ref().map_or("", |stack| stack.location.as_str());
        let when = when_peaked(peak);
        self.labelled("Peak", &format!("{}{when}", size_text(peak.totals.allocated_bytes)));
        self.labelled_list("Allocated at", location);
        let reserved = device.reserved.as_ref().filter(|_| device.explained_oom.is_none());
        self.reserved(peak, reserved, device);
        self.categories(peak, false, None);
        self.modules(peak);
        self.largest_allocations(peak, LARGEST);
        self.growth_after_first_step(device);
        self.outlier_step(device);
        self.larger_inputs(device);
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
        self.labelled("Requested", &format!("{}{}; {end}", request(oom), when_refused(device, oom)));
        self.labelled_list("Requested at", &oom.requested_at.location);
        self.oom_facts(device, oom);
        self.categories(&oom.in_use, false, oom.optimizer_state_needed_bytes);
        self.modules(&oom.in_use);
        self.largest_allocations(&oom.in_use, LARGEST);
        self.outlier_step(device);
        self.larger_inputs(device);
        self.blocked_by(device.reserved.as_ref(), BLOCKED_BY);
        self.suggestions(device, "Suggestions", 2);
        self.other_errors(device);
    }

    /// Each change with its figures, its cost and its code.
    fn changes_with_code(&mut self, device: &DeviceSummary) {
        if device.suggestions.is_empty() {
            return self.line("  no change lowers the peak".to_owned());
        }
        for (at, suggestion) in device.suggestions.iter().enumerate() {
            if at > 0 {
                self.blank();
            }
            self.item(2, &suggestion.action);
            let bound = if suggestion.at_most { "at most " } else { "" };
            let when = if suggestion.scope == SuggestionScope::UntilError { "At the error" } else { "Peak after" };
            let fits = match suggestion.fits.filter(|_| device.explained_oom.is_some()) {
                Some(true) => "; fits",
                Some(false) => "; does not fit",
                None => "",
            };
            let (after, saves) = (size_text(suggestion.peak_after_bytes), size_text(suggestion.saves_bytes));
            let figures = format!("{bound}{after}, {saves} less{fits}");
            self.labelled_at(4, CHANGE_LABEL_WIDTH, when, &figures, wrap_words);
            self.labelled_at(4, CHANGE_LABEL_WIDTH, "Cost", &suggestion.cost_text, wrap_words);
            // To be copied: neither is cut.
            if !suggestion.link.is_empty() {
                self.lines.push(format!("    {:CHANGE_LABEL_WIDTH$}  {}", "Page", suggestion.link));
            }
            let more = format!("memtrace explain {}", suggestion.rule);
            self.lines.push(format!("    {:CHANGE_LABEL_WIDTH$}  {more}", "More"));
            let code = suggestion.code.iter().map(|line| format!("      {line}").trim_end().to_owned());
            self.lines.extend(code);
        }
    }

    fn other_errors(&mut self, device: &DeviceSummary) {
        let others = device.ooms.iter().enumerate().filter(|(at, _)| Some(*at) != device.explained_oom);
        let others: Vec<&OomSummary> = others.map(|(_, oom)| oom).collect();
        if others.is_empty() {
            return;
        }
        self.list(&format!("Other out-of-memory errors ({} in all)", count_text(device.oom_count)));
        for oom in others {
            let when = when_refused(device, oom);
            let text = format!("requested {}{when}  {}", request(oom), oom.requested_at.location);
            self.item(4, text.trim_end());
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

    /// Adds the live blocks that keep segments from being returned.
    pub(crate) fn blocked_by(&mut self, reserved: Option<&ReservedSummary>, count: usize) {
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

    fn fragmentation(&mut self, device: &DeviceSummary) {
        let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
        let state = oom.map(|oom| &oom.in_use).or(device.peak.as_ref());
        let (Some(reserved), Some(state)) = (&device.reserved, state) else {
            return self.line("  no data: only PyTorch's caching allocator reserves memory".to_owned());
        };
        let whole = state.totals.reserved_bytes;
        let when = match when(state.step, state.phase) {
            when if when.is_empty() => when,
            when => format!(" ({})", when.trim_start()),
        };
        let at = if oom.is_some() { "at the out-of-memory error" } else { "at the peak of allocated memory" };
        let segments = count_text(reserved.segments);
        self.labelled("Reserved", &format!("{} in {segments} segments, {at}{when}", size_text(whole)));
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
        let has_step = what_if.settings.iter().any(|setting| setting.step_fits.is_some());
        let mut table = Table::new(&[
            ("Setting", Align::Left),
            ("Peak reserved", Align::Right),
            (if has_request { "Request" } else { "" }, Align::Left),
            (if has_step { "Rest of the step" } else { "" }, Align::Left),
        ]);
        for setting in &what_if.settings {
            let fits = match (setting.fits, setting.fails_earlier) {
                (_, true) => "an earlier request fails",
                (Some(true), _) => "fits",
                (Some(false), _) => "fails",
                (None, _) => "",
            };
            let step = match (setting.step_fits, setting.step_short_bytes) {
                (Some(true), _) => "fits".to_owned(),
                (Some(false), Some(short)) => format!("{} short", size_text(short)),
                _ => String::new(),
            };
            table.row(vec![setting.setting.clone(), size_text(setting.reserved_peak_bytes), fits.to_owned(), step]);
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
        for (at, rule) in device.custom_category_rules.iter().enumerate() {
            let (name, id) = match &rule.custom_category {
                Some(name) => (name.clone(), format!("rule {} of --categories", at + 1)),
                None => (NO_CUSTOM_CATEGORY.to_owned(), String::new()),
            };
            table.row(vec![name, id, count_text(rule.blocks), size_text(rule.bytes), String::new()]);
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }
}
