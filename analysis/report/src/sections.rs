//! The sections of a report in full: `memtrace report RUN --section peak`. Like the end-of-run summary, they use only
//! the [`Summary`].

use std::collections::BTreeMap;

use super::build::when;
use super::summary::{
    ActionSummary, DeviceSummary, FrameSummary, ModuleSummary, MomentSummary, OomSummary, PinSummary, ProcessSummary,
    ReservedSummary, Summary, WhatIfSummary,
};
use super::table::{Align, Table, cut, cut_middle, place_in};
use super::text::{Page, TextOptions, by_place, device_name, process_name};
use super::units::{count_text, share_text, size_text};

/// A section of the report.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The name on the command line.
    pub name: &'static str,
    /// A description of its content.
    pub tells: &'static str,
    page: fn(&mut Page, &DeviceSummary),
}

/// The maximum number of modules listed. A listed module has at least one in `MODULES_WORTH` parts of the allocated
/// bytes.
const MODULES: usize = 3;
const MODULES_WORTH: u64 = 50;
/// The maximum length of a name, in characters.
const LONGEST_NAME: usize = 48;
/// The maximum number of sources listed.
const SOURCES: usize = 12;
/// The maximum number of origins listed that hold segments.
const PINS: usize = 8;

/// All sections, in the order of `--help`.
pub static SECTIONS: &[Section] = &[
    Section { name: "peak", tells: "the peak: when, what was there, and what would lower it", page: Page::whole_peak },
    Section {
        name: "oom",
        tells: "out-of-memory errors: the request, and where the memory was",
        page: Page::whole_oom,
    },
    Section { name: "phases", tells: "what each phase allocated, freed and kept", page: Page::phases },
    Section {
        name: "fragmentation",
        tells: "reserved memory that is not in use, who pins it, and what other settings would have done",
        page: Page::fragmentation,
    },
    Section {
        name: "memory",
        tells: "the table of torch.cuda.memory_summary, as it would be at the end",
        page: Page::memory,
    },
    Section { name: "outside", tells: "device memory that is not the caching allocator's", page: Page::whole_outside },
    Section { name: "rules", tells: "which rules decided, on what evidence", page: Page::rules },
    Section { name: "findings", tells: "what is wrong, with its evidence and its mend", page: |_, _| {} },
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
    pub(super) fn is_about(&self, process: &ProcessSummary) -> bool {
        let any = |has: fn(&DeviceSummary) -> bool| process.devices.iter().any(has);
        match self.name {
            "oom" => any(|device| device.oom_count > 0),
            "peak" => any(|device| device.peak.is_some()),
            "phases" => any(|device| !device.before.is_empty() || !device.first_step.is_empty()),
            "fragmentation" => any(|device| device.reserved.is_some()),
            "memory" => any(|device| !device.statistics.is_empty()),
            "outside" => any(|device| device.owners.iter().any(|owner| owner.module.is_some() && owner.peak_bytes > 0)),
            "rules" => any(|device| !device.reasons.is_empty()),
            _ => true,
        }
    }

    /// The section's text for one process, without the line about the run.
    pub(super) fn of_process(&self, process: &ProcessSummary, name: Option<&str>, options: &TextOptions) -> String {
        let mut page = Page::new(options);
        page.section(self, process, name);
        page.text()
    }
}

impl Summary {
    /// One section of the report as text.
    pub fn section_to_text(&self, section: &Section, options: &TextOptions) -> String {
        let mut page = Page::new(options);
        page.head(self);
        for process in &self.processes {
            let name = (self.processes.len() > 1).then(|| process_name(process));
            page.section(section, process, name.as_deref());
        }
        page.text()
    }
}

impl Page {
    fn section(&mut self, section: &Section, process: &ProcessSummary, name: Option<&str>) {
        if section.name == "findings" {
            if process.findings.is_empty() {
                self.blank();
                let of = name.map(|name| format!("{name}: ")).unwrap_or_default();
                self.line(format!("{of}nothing was found wrong"));
            }
            self.findings(&process.findings, usize::MAX);
            return;
        }
        for device in &process.devices {
            self.blank();
            let title = self.device_title(device, name);
            self.heading(&title);
            (section.page)(self, device);
        }
    }

    /// The peak in full.
    fn whole_peak(&mut self, device: &DeviceSummary) {
        let Some(peak) = &device.peak else {
            return self.line("  nothing was allocated".to_owned());
        };
        let by = peak.by.as_ref().map(|by| by.place.as_str()).unwrap_or_default();
        let what = format!("{} {}    {by}", size_text(peak.totals.allocated_bytes), when(peak.step, peak.phase));
        self.labelled("peak", what.trim_end());
        self.by_category(peak);
        self.reserved_line(peak, device.reserved.as_ref().filter(|_| device.explained_oom.is_none()), device);
        self.blank();
        self.modules(peak);
        self.sources(peak, SOURCES);
        self.second_step(device);
        if device.explained_oom.is_none() {
            self.pins(device.reserved.as_ref(), PINS);
            self.next(device);
        }
    }

    /// The out-of-memory error in full.
    fn whole_oom(&mut self, device: &DeviceSummary) {
        let Some(oom) = device.explained_oom.and_then(|at| device.ooms.get(at)) else {
            return self.line("  no request failed".to_owned());
        };
        let fate = match oom.fatal {
            Some(false) => "the program went on",
            Some(true) => "it ended the process",
            None => "how the process ended is not known",
        };
        let what = format!("{} {}: {fate}    {}", wanted(oom), when(oom.there.step, oom.there.phase), oom.by.place);
        self.labelled("wanted", what.trim_end());
        self.oom_facts(device, oom);
        self.by_category(&oom.there);
        self.blank();
        self.sources(&oom.there, SOURCES);
        self.pins(device.reserved.as_ref(), PINS);
        self.next(device);
        self.other_errors(device);
    }

    fn other_errors(&mut self, device: &DeviceSummary) {
        let others = device.ooms.iter().enumerate().filter(|(at, _)| Some(*at) != device.explained_oom);
        let mut others = others.map(|(_, oom)| oom).peekable();
        if others.peek().is_none() {
            return;
        }
        self.blank();
        self.line(format!("  {} requests failed in all; of the others:", count_text(device.oom_count)));
        for oom in others {
            let text = format!("{} {}    {}", wanted(oom), when(oom.there.step, oom.there.phase), oom.by.place);
            self.labelled("wanted", text.trim_end());
        }
    }

    /// Where the device's memory was when a request failed.
    pub(super) fn oom_facts(&mut self, device: &DeviceSummary, oom: &OomSummary) {
        if let (Some(free), false) = (oom.device_free_bytes, oom.refused_by_pytorch) {
            let mut text = format!("{}  on the device, as CUDA says", size_text(free));
            if let Some(short) = oom.short_bytes {
                text.push_str(&format!(": {} short", size_text(short)));
            }
            self.labelled("free", &text);
        }
        if let (Some(free), true) = (oom.device_free_bytes, oom.refused_by_pytorch) {
            let text = format!(
                "CUDA had {} free: PyTorch's own limit, set_per_process_memory_fraction, stopped at {}",
                size_text(free),
                size_text(oom.there.totals.reserved_bytes)
            );
            self.labelled("refused", &text);
        }
        if oom.cached_bytes > 0 {
            let mut text = format!("{} reserved and not in use", size_text(oom.cached_bytes));
            let piece = size_text(oom.largest_free_bytes);
            let too_small = oom.largest_free_bytes < oom.wanted_bytes;
            text.push_str(&format!(", the largest piece {piece}{}", if too_small { ": too small" } else { "" }));
            if let Some(reserved) = &device.reserved.as_ref().filter(|reserved| reserved.pinned_bytes > 0) {
                let pinned = format!(
                    "; {} of it pinned in {} of {} segments by blocks that live there",
                    size_text(reserved.pinned_bytes),
                    reserved.pinned_segments,
                    reserved.segments
                );
                text.push_str(&pinned);
            }
            self.labelled("cached", &text);
        }
        let mut outside: Vec<String> =
            oom.outside.iter().take(5).map(|one| format!("{} {}", one.owner, size_text(one.bytes))).collect();
        if let Some(others) = oom.others_bytes.filter(|bytes| *bytes > 0) {
            let before = device.used_before_bytes.filter(|bytes| *bytes > 0);
            let before = before
                .map(|bytes| format!(" ({} when this one first allocated)", size_text(bytes)))
                .unwrap_or_default();
            outside.push(format!("CUDA contexts and other processes {}{before}", size_text(others)));
        }
        if !outside.is_empty() {
            let total = oom.outside_allocator_bytes.saturating_add(oom.others_bytes.unwrap_or(0));
            self.labelled("outside", &format!("{}  {}", size_text(total), outside.join(", ")));
        }
    }

    fn by_category(&mut self, moment: &MomentSummary) {
        let mut amounts = moment.by_category.clone();
        amounts.sort_by_key(|amount| std::cmp::Reverse(amount.bytes));
        for (i, amount) in amounts.iter().filter(|amount| amount.bytes > 0).enumerate() {
            let label = if i == 0 { "there" } else { "" };
            let text = format!(
                "{:>4}  {:>8}  {}{}",
                share_text(amount.bytes, moment.totals.allocated_bytes),
                size_text(amount.bytes),
                amount.category.plural(),
                in_blocks(amount.blocks)
            );
            self.row(label, &text);
        }
    }

    /// What was reserved, and which part of it was not in use.
    fn reserved_line(&mut self, moment: &MomentSummary, reserved: Option<&ReservedSummary>, device: &DeviceSummary) {
        let totals = &moment.totals;
        let idle = totals.reserved_bytes.saturating_sub(totals.active_bytes.max(totals.allocated_bytes));
        let mut parts = Vec::new();
        let mut part = |what: &str, bytes: u64| {
            if bytes > 0 {
                parts.push(format!("{what} {}", size_text(bytes)));
            }
        };
        match reserved {
            Some(reserved) => {
                part("cached and unused", reserved.returnable_bytes);
                part("free, but pinned by live blocks", reserved.pinned_bytes);
            }
            None => part("cached", idle),
        }
        part("waiting for streams", totals.active_bytes.saturating_sub(totals.allocated_bytes));
        part("rounding", totals.active_bytes.saturating_sub(totals.requested_bytes));
        if device.highest.reserved_bytes > totals.reserved_bytes {
            parts.push(format!("at most {} at another moment", size_text(device.highest.reserved_bytes)));
        }
        if totals.reserved_bytes > 0 {
            let text = format!("{}  {}", size_text(totals.reserved_bytes), parts.join(", "));
            self.labelled("reserved", text.trim_end());
        }
    }

    /// The largest sources of the allocated blocks.
    pub(super) fn sources(&mut self, moment: &MomentSummary, count: usize) {
        for (i, source) in by_place(&moment.top).iter().take(count).enumerate() {
            let mut text = format!(
                "{:>4}  {:>8}  {}{}",
                share_text(source.bytes, moment.totals.allocated_bytes),
                size_text(source.bytes),
                source.category.plural(),
                in_blocks(source.blocks),
            );
            let name = match (source.names, source.name) {
                (Some(names), _) => names.to_owned(),
                (None, Some(name)) if source.blocks > 1 => format!("{name}, ..."),
                (None, name) => name.unwrap_or_default().to_owned(),
            };
            text.extend((!name.is_empty()).then(|| format!("  {}", cut_middle(&name, LONGEST_NAME))));
            let room = self.width.saturating_sub(11 + 2 + text.chars().count());
            text.extend((!source.place.is_empty()).then(|| format!("  {}", place_in(source.place, room))));
            self.row(if i == 0 { "most" } else { "" }, text.trim_end());
        }
    }

    /// The largest modules, one line each. Sibling modules of one class share a line.
    pub(super) fn modules(&mut self, moment: &MomentSummary) {
        let mut groups = module_groups(&moment.by_module);
        groups.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        let text = |group: &ModuleGroup| {
            let share = share_text(group.bytes, moment.totals.allocated_bytes);
            format!("{:>4}  {:>8}  {}", share, size_text(group.bytes), group.name)
        };
        let worth = |group: &&ModuleGroup| group.bytes >= moment.totals.allocated_bytes / MODULES_WORTH;
        for (i, group) in groups.iter().filter(worth).take(MODULES).enumerate() {
            self.row(if i == 0 { "modules" } else { "" }, &text(group));
        }
    }

    /// Adds one line with a label, cut to the width of the report.
    fn row(&mut self, label: &str, text: &str) {
        let label = self.style.dim(&format!("  {label:<9}"));
        let room = self.width.saturating_sub(11);
        self.lines.push(format!("{label}{}", cut(text, room)).trim_end().to_owned());
    }

    pub(super) fn second_step(&mut self, device: &DeviceSummary) {
        let Some(second) = &device.second_step else { return };
        let text = format!(
            "{} more than in step 0 ({} at most, against {}): the optimizer made {} of state at the end of step 0",
            size_text(second.later_peak_bytes - second.first_peak_bytes),
            size_text(second.later_peak_bytes),
            size_text(second.first_peak_bytes),
            size_text(second.optimizer_state_bytes)
        );
        self.labelled("later", &text);
    }

    /// The blocks in use that keep memory from being returned.
    fn pins(&mut self, reserved: Option<&ReservedSummary>, count: usize) {
        for (i, pin) in reserved.iter().flat_map(|reserved| &reserved.pins).take(count).enumerate() {
            let label = if i == 0 { "pinned" } else { "" };
            self.labelled(label, &pin_text(pin));
        }
    }

    /// The suggestions: replayed allocator settings first, then changes to the program.
    pub(super) fn next(&mut self, device: &DeviceSummary) {
        let lines = next_steps(device);
        for (i, line) in lines.iter().enumerate() {
            self.labelled(if i == 0 { "next" } else { "" }, line);
        }
    }

    fn fragmentation(&mut self, device: &DeviceSummary) {
        let oom = device.explained_oom.and_then(|at| device.ooms.get(at));
        let moment = oom.map(|oom| &oom.there).or(device.peak.as_ref());
        let (Some(reserved), Some(moment)) = (&device.reserved, moment) else {
            return self.line("  only PyTorch's caching allocator reserves".to_owned());
        };
        let whole = moment.totals.reserved_bytes;
        let when = when(moment.step, moment.phase);
        let at = if oom.is_some() { "when the request failed" } else { "at the peak of allocated bytes" };
        self.labelled("reserved", &format!("{}  {at}, {when}; {} segments", size_text(whole), reserved.segments));
        let rows = [
            ("in use", reserved.allocated_bytes - reserved.rounding_bytes.min(reserved.allocated_bytes)),
            ("rounding of requests up to blocks", reserved.rounding_bytes),
            ("given back, waiting for streams", reserved.waiting_bytes),
            ("unused segments and pages: can be returned", reserved.returnable_bytes),
            ("free beside live blocks: pinned", reserved.pinned_bytes),
        ];
        for (what, bytes) in rows.iter().filter(|(_, bytes)| *bytes > 0) {
            self.row("", &format!("{:>4}  {:>8}  {what}", share_text(*bytes, whole), size_text(*bytes)));
        }
        self.pins(Some(reserved), usize::MAX);
        self.blank();
        match &device.what_if {
            Some(what_if) => self.what_if(what_if),
            None => self.line("  the allocator's policy was not replayed".to_owned()),
        }
    }

    fn what_if(&mut self, what_if: &WhatIfSummary) {
        if let Some(difference) = &what_if.difference {
            let text = format!(
                "after {} blocks the replay does something else, so nothing is said of other settings: {difference}",
                count_text(what_if.blocks)
            );
            return self.labelled("replay", &text);
        }
        let text = format!(
            "the allocator's policy, replayed: {} blocks where they were, {} segment events one for one; reserved at most {}",
            count_text(what_if.blocks),
            count_text(what_if.segment_events),
            size_text(what_if.reserved_bytes)
        );
        self.labelled("replay", &text);
        if let Some(limit) = what_if.limit_bytes {
            let text = format!("{} for the allocator: the rest of the device is held as it was", size_text(limit));
            self.labelled("", &text);
        }
        let asked = what_if.settings.iter().any(|setting| setting.fits.is_some() || setting.fails_earlier);
        let request = if asked { "the request" } else { "" };
        let mut table =
            Table::new(&[("with", Align::Left), ("reserved at most", Align::Right), (request, Align::Left)]);
        for setting in &what_if.settings {
            let fits = match (setting.fits, setting.fails_earlier) {
                (_, true) => "one before it fails",
                (Some(true), _) => "fits",
                (Some(false), _) => "fails, too",
                (None, _) => "",
            };
            table.row(vec![setting.setting.clone(), size_text(setting.reserved_bytes), fits.to_owned()]);
        }
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Other owners of device memory.
    fn whole_outside(&mut self, device: &DeviceSummary) {
        let before = self.lines.len();
        self.outside(device);
        for owner in device.owners.iter().filter(|owner| owner.module.is_some() && owner.peak_bytes > 0) {
            let module = owner.module.as_deref().unwrap_or_default();
            let file = module.rsplit('/').next().unwrap_or(module);
            let text = format!(
                "{:>8}  {:>8} at the end  {} in {} allocations  {file}",
                size_text(owner.peak_bytes),
                size_text(owner.end_bytes),
                owner.owner,
                count_text(owner.allocations)
            );
            self.row("", &text);
        }
        if self.lines.len() == before {
            self.line("  nothing is known to be held outside the caching allocator".to_owned());
        }
    }

    fn rules(&mut self, device: &DeviceSummary) {
        let mut table = Table::new(&[
            ("verdict", Align::Left),
            ("rule", Align::Left),
            ("blocks", Align::Right),
            ("bytes", Align::Right),
            ("such as", Align::Left),
        ]);
        let place = |frame: &Option<FrameSummary>| {
            frame.as_ref().map(|f| format!("{}:{} {}", f.filename, f.line, f.name)).unwrap_or_default()
        };
        for reason in &device.reasons {
            table.row(vec![
                reason.phase.name().to_owned(),
                reason.rule.clone(),
                count_text(reason.allocations),
                size_text(reason.bytes),
                place(&reason.evidence),
            ]);
        }
        for reason in &device.category_reasons {
            table.row(vec![
                reason.category.name().to_owned(),
                reason.rule.clone(),
                count_text(reason.blocks),
                size_text(reason.bytes),
                place(&reason.evidence),
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
        open(&tree[at..end], &mut groups);
        at = end;
    }
    groups
}

/// Groups one module and the modules inside it. `tree` starts with the module itself.
fn open(tree: &[ModuleSummary], groups: &mut Vec<ModuleGroup>) {
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
    let alike = |class: &str| !class.is_empty() && classes.get(class).is_some_and(|(count, _)| *count >= 2);
    let most = classes.iter().filter(|(class, _)| alike(class)).map(|(_, (_, bytes))| *bytes).max().unwrap_or(0);
    let largest = children.iter().map(|&at| inside[at].bytes).max().unwrap_or(0);
    if module.depth > 0 && most * 2 < module.bytes && largest * 2 < module.bytes {
        return groups.push(ModuleGroup { name, bytes: module.bytes });
    }
    let told: u64 = children.iter().map(|&at| inside[at].bytes).sum();
    if module.bytes > told {
        let name = if inside.is_empty() { name } else { format!("{name} itself") };
        groups.push(ModuleGroup { name, bytes: module.bytes - told });
    }
    for (class, (count, bytes)) in classes.iter().filter(|(class, _)| alike(class)) {
        let path = if module.path.is_empty() { "*".to_owned() } else { format!("{}.*", module.path) };
        groups.push(ModuleGroup { name: format!("{path} ({count} of {class})"), bytes: *bytes });
    }
    let ends = children.iter().skip(1).copied().chain([inside.len()]);
    for (&from, to) in children.iter().zip(ends) {
        if !alike(inside[from].class.as_deref().unwrap_or("")) {
            open(&inside[from..to], groups);
        }
    }
}

/// Formats the request: `200 MiB for Adam.exp_avg of head.weight` or `200 MiB (as large as head.weight)`.
pub(super) fn wanted(oom: &OomSummary) -> String {
    let what = match (&oom.wanted_for, &oom.as_large_as) {
        (Some(name), _) => format!(" for {name}"),
        (None, Some(name)) => format!(" (as large as {name})"),
        (None, None) => String::new(),
    };
    format!("{}{what}", size_text(oom.wanted_bytes))
}

fn in_blocks(blocks: u64) -> String {
    if blocks == 1 { String::new() } else { format!(" in {} blocks", count_text(blocks)) }
}

fn pin_text(pin: &PinSummary) -> String {
    let blocks = if pin.blocks == 1 { "1 block".to_owned() } else { format!("{} blocks", count_text(pin.blocks)) };
    let segments =
        if pin.segments == 1 { "1 segment".to_owned() } else { format!("{} segments", count_text(pin.segments)) };
    let name = pin.name.as_ref().map(|name| format!("  {name}")).unwrap_or_default();
    format!(
        "{} free in {segments} of {}, held by {blocks} of {}  {}{name}",
        size_text(pin.free_bytes),
        size_text(pin.segment_bytes),
        size_text(pin.live_bytes),
        pin.by.place
    )
}

/// The maximum number of actions listed.
const ACTIONS: usize = 3;

/// The suggestions, most promising first. They use only the replay and the figures of this run.
fn next_steps(device: &DeviceSummary) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(what_if) = &device.what_if {
        lines.extend(settings_text(device, what_if));
    }
    let text = |action: &ActionSummary| {
        let bound = if action.at_most { "at most " } else { "" };
        format!("{}: {bound}-{}", action.what, size_text(action.saves_bytes))
    };
    lines.extend(device.actions.iter().take(ACTIONS).map(text));
    lines
}

/// A setting that saves less than one in this many parts of the reserved bytes is not suggested.
const WORTH_SETTING: u64 = 20;

fn settings_text(device: &DeviceSummary, what_if: &WhatIfSummary) -> Option<String> {
    if what_if.difference.is_some() || what_if.settings.is_empty() {
        return None;
    }
    let replayed = format!(
        "replayed: {} blocks and {} segment events as recorded",
        count_text(what_if.blocks),
        count_text(what_if.segment_events)
    );
    if device.explained_oom.is_some() {
        let fits = what_if.settings.iter().find(|setting| setting.fits == Some(true));
        return match fits {
            Some(setting) => Some(format!(
                "PYTORCH_CUDA_ALLOC_CONF={}: the request would have fitted, {} reserved of {} that could be had ({replayed})",
                setting.setting,
                size_text(setting.reserved_bytes),
                size_text(what_if.limit_bytes.unwrap_or_default()),
            )),
            None if what_if.settings.iter().all(|setting| setting.fits == Some(false)) => {
                let names: Vec<&str> = what_if.settings.iter().map(|setting| setting.setting.as_str()).collect();
                Some(format!("no setting of the allocator would have helped: {} ({replayed})", names.join(", ")))
            }
            None => None,
        };
    }
    let best = what_if.settings.iter().min_by_key(|setting| setting.reserved_bytes)?;
    let saves = what_if.reserved_bytes.checked_sub(best.reserved_bytes)?;
    (saves >= what_if.reserved_bytes / WORTH_SETTING && saves > 0).then(|| {
        format!(
            "PYTORCH_CUDA_ALLOC_CONF={}: {} reserved at most instead of {} ({replayed})",
            best.setting,
            size_text(best.reserved_bytes),
            size_text(what_if.reserved_bytes)
        )
    })
}

/// The title of a device's part of a section.
impl Page {
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
}
