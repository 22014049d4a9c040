//! The parts of a report that the end-of-run summary and the sections share.

use memtrace_insight::passes::{Category, Phase};
use memtrace_insight::rules::NO_CUSTOM_CATEGORY;
use memtrace_summary::{
    AllocationGroup, BlockingAllocation, CalledFunctionsSummary, CategoryAmount, CompileContextAmount,
    CustomCategoryAmount, DeviceSummary, HolderSummary, IssueSummary, LabelSummary, MemoryState, ModuleGroupSummary,
    OomSummary, PhaseSummary, StepEstimateBasis, SuggestionScope, SuggestionSummary, Summary, count_text, device_name,
    duration_text, is_snapshot, limit_text, not_recorded, number_text, short_text, signed_size_text, size_text,
};

use crate::fit::{columns, cut, cut_middle, short_location, wrap_list, wrap_location, wrap_words};
use crate::holders::holder_text;
use crate::style::Style;
use crate::table::{Align, Table};
use crate::text_report::{ISSUE_LABEL_WIDTH, ROW_TEXT, TextReport};

/// The maximum number of named ranges listed, and the maximum width of their names in columns.
const LISTED_LABELS: usize = 8;
const LONGEST_LABEL: usize = 28;
/// Categories below 0.5 % (1/200) of the whole are summed up.
const SMALL_CATEGORY: u64 = 200;
/// The maximum number of modules listed. A listed module has at least one in `SMALL_MODULE` parts of the allocated
/// bytes.
const MODULES: usize = 3;
const SMALL_MODULE: u64 = 50;
/// The maximum number of compile contexts listed.
const COMPILE_CONTEXTS: usize = 8;
/// The name for blocks that no compiled region allocated.
pub(crate) const NOT_COMPILED: &str = "outside compiled regions";
/// The maximum width of a tensor name in columns.
const LONGEST_NAME: usize = 96;
/// The maximum width of a data type and shape in columns.
const LONGEST_SHAPE: usize = 32;
/// The maximum number of suggestions listed, besides that about allocator settings.
const SUGGESTIONS: usize = 5;
/// The minimum widths of a suggestion's text and of its peak, in columns.
const NARROWEST_CHANGE: usize = 24;
const PEAK_WIDTH: usize = 11;
/// The notes of suggestions whose figures do not cover the whole run.
const UNTIL_ERROR: &str = "the error cut the step off, so the peaks cover the program up to the error. \"unknown\": \
                           this part fits, and the rest of the step was not recorded";
const ONE_ITERATION: &str = "the peaks cover the program up to the end of the interrupted iteration. \"unknown\": this \
                             part fits, and the rest of the step was not recorded";
const UPPER_BOUND: &str = "\"<=\" counts what step 0 left and the step may free before its peak. \"unknown\": too \
                           close to the memory of the device";

impl TextReport {
    pub(crate) fn head(&mut self, summary: &Summary) {
        let run = &summary.run;
        let mut facts = Vec::new();
        facts.extend(run.duration_ns.map(duration_text));
        facts.push(format!("{} events", count_text(run.events)));
        let other_losses = if summary.has_other_losses() { " (see Losses)" } else { "" };
        facts.push(format!("{} lost{other_losses}", count_text(summary.lost_events())));
        facts.extend(not_recorded(summary));
        let facts = facts.join(", ");
        let title = format!("memtrace: {}", run_title(summary));
        let failed = run.exit.success() == Some(false);
        let outcome = |style: Style| if failed { style.alarm(&run.outcome) } else { style.bold(&run.outcome) };
        let length = |parts: &[&str]| parts.iter().map(|part| columns(part) + 4).sum::<usize>() - 4;
        if length(&[&title, &run.outcome, &facts]) <= self.width {
            let text = format!("{}    {}    {facts}", self.style.bold(&title), outcome(self.style));
            return self.lines.push(text);
        }
        // The events and what was lost stand on a line of their own, so that only a long command is cut.
        let left = self.width.saturating_sub(columns(&run.outcome) + 4);
        let title = cut(&title, left.max(24));
        if length(&[&title, &run.outcome]) <= self.width {
            self.lines.push(format!("{}    {}", self.style.bold(&title), outcome(self.style)));
        } else {
            self.line(format!("{title}    {}", run.outcome));
        }
        self.line(format!("  {facts}"));
    }

    /// The title of a device: `rank 3, GPU 0  NVIDIA H200  140 GiB`.
    pub(crate) fn device_title(&self, device: &DeviceSummary, process: Option<&str>) -> String {
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

    /// Adds what was allocated, by category, the largest first. `sum_small` sums up small categories. `state_needed` is
    /// the optimizer state that the program needs in all, if it is not yet allocated.
    pub(crate) fn categories(&mut self, state: &MemoryState, sum_small: bool, state_needed: Option<u64>) {
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
        let label = amounts.iter().map(|amount| columns(amount.category.plural())).max().unwrap_or(0);
        for amount in amounts {
            let needed = state_needed.filter(|_| amount.category == Category::OptimizerState);
            let needed = needed.map(|bytes| format!(" ({} needed in all)", size_text(bytes))).unwrap_or_default();
            let note = format!("{}{needed}", in_blocks(amount.blocks));
            let name = amount.category.plural();
            self.bar(label, (amount.category, name), (amount.bytes, whole), note.trim_start());
        }
        if let Some(text) = state.totals.rounding_sentence() {
            self.sentence(&text);
        }
        if let Some(cache) = &state.growing_kv_cache {
            self.sentence(&cache.text);
        }
        self.custom_categories(state);
        self.compile_contexts(state);
    }

    /// Adds what was allocated, by compiled region of `torch.compile`, the largest first.
    fn compile_contexts(&mut self, state: &MemoryState) {
        let whole = state.totals.allocated_bytes;
        let in_use = state.by_compile_context.iter().filter(|amount| amount.bytes > 0);
        let (mut named, rest): (Vec<&CompileContextAmount>, Vec<_>) =
            in_use.partition(|amount| amount.compile_context.is_some());
        if named.is_empty() {
            return;
        }
        named.sort_by_key(|amount| std::cmp::Reverse(amount.bytes));
        self.list(&format!("In use by compile context of torch.compile (% of the {} allocated)", size_text(whole)));
        let (shown, left_out) = named.split_at(named.len().min(COMPILE_CONTEXTS));
        let mut row = |name: &str, bytes: u64, blocks: u64| {
            self.row(bytes, whole, &format!("{name}{}", in_blocks(blocks)));
        };
        for amount in shown {
            row(amount.compile_context.as_deref().unwrap_or_default(), amount.bytes, amount.blocks);
        }
        if !left_out.is_empty() {
            let sum = |value: fn(&CompileContextAmount) -> u64| left_out.iter().map(|amount| value(amount)).sum();
            row(&format!("{} more compile contexts", left_out.len()), sum(|a| a.bytes), sum(|a| a.blocks));
        }
        for amount in rest {
            row(NOT_COMPILED, amount.bytes, amount.blocks);
        }
    }

    /// Adds what was allocated, by custom category, the largest first. Blocks that no rule matches come last.
    fn custom_categories(&mut self, state: &MemoryState) {
        let whole = state.totals.allocated_bytes;
        let mut amounts: Vec<&CustomCategoryAmount> =
            state.by_custom_category.iter().filter(|amount| amount.bytes > 0).collect();
        if amounts.is_empty() {
            return;
        }
        amounts.sort_by_key(|amount| (amount.custom_category.is_none(), std::cmp::Reverse(amount.bytes)));
        self.list(&format!("In use by custom category (% of the {} allocated)", size_text(whole)));
        for amount in amounts {
            let name = amount.custom_category.as_deref().unwrap_or(NO_CUSTOM_CATEGORY);
            self.row(amount.bytes, whole, &format!("{name}{}", in_blocks(amount.blocks)));
        }
    }

    /// Adds the device memory outside the caching allocator.
    pub(crate) fn outside(&mut self, device: &DeviceSummary) {
        if let Some(outside) = device.outside_pytorch.as_ref().filter(|outside| !outside.text.is_empty()) {
            self.labelled_list("Outside PyTorch", &outside.text);
        }
        self.imported(device);
        if let Some(before) = device.in_use_before_bytes.filter(|bytes| *bytes > 0) {
            let text = format!("{} (CUDA context, other processes)", size_text(before));
            self.labelled("In use before the program started", &text);
        }
    }

    /// Adds the memory of other processes.
    pub(crate) fn imported(&mut self, device: &DeviceSummary) {
        let imported: u64 = device.imported.iter().map(|owner| owner.peak_bytes).sum();
        if imported > 0 {
            let text = format!("{} of other processes (CUDA IPC), counted there", size_text(imported));
            self.labelled("Imported", &text);
        }
    }

    pub(crate) fn phases(&mut self, device: &DeviceSummary) {
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
        let before = PhaseGroup { caption: None, rows: &device.before_first_step, steps: 1, micro_batches: 0 };
        let first = PhaseGroup {
            caption: Some("step 0".to_owned()),
            rows: &device.first_step,
            steps: 1,
            micro_batches: device.first_step_micro_batches,
        };
        let later = PhaseGroup {
            caption: Some(match device.later_steps_count {
                1 => "step 1".to_owned(),
                n => format!("steps 1-{n}"),
            }),
            rows: &device.later_steps,
            steps: device.later_steps_count.into(),
            micro_batches: device.later_steps_micro_batches,
        };
        for part in [&before, &first, &later] {
            part.add(&mut table);
        }
        // Later steps are typical, because an optimizer allocates its state in the first one.
        if let Some(part) = [&later, &first].into_iter().find(|part| part.accumulates()) {
            part.add_micro_batches(&mut table);
        }
        named_ranges(device, &mut table);
        called_functions(device, &mut table);
        let lines = table.lines(2, self.width, self.style);
        self.lines.extend(lines);
    }

    /// Adds the issues, largest first. `process` is their process, if the report has several.
    /// Without issues, `remark` says what an out-of-memory error means.
    pub(crate) fn issues(
        &mut self,
        issues: &[IssueSummary],
        count: usize,
        process: Option<&str>,
        remark: Option<&str>,
    ) {
        if issues.is_empty() && remark.is_none() {
            return;
        }
        self.blank();
        self.heading(&process.map_or_else(|| "Issues".to_owned(), |process| format!("Issues in {process}")));
        let width = self.width.saturating_sub(2);
        for line in remark.iter().flat_map(|remark| wrap_words(remark, width)) {
            self.line(format!("  {line}"));
        }
        for issue in issues.iter().take(count) {
            let forecast = issue.forecast.as_ref().map(|forecast| format!("; {}", forecast.text)).unwrap_or_default();
            let headline = format!("{}: {}{forecast}", issue.rule, issue.headline);
            for (i, line) in wrap_words(&headline, self.width.saturating_sub(4)).iter().enumerate() {
                self.lines.push(format!("{}{}", if i == 0 { "  " } else { "    " }, self.style.alarm(line)));
            }
            let location = issue.stack.as_ref().map_or("", |stack| stack.location.as_str());
            let evidence = issue.evidence.iter().map(|evidence| ("Evidence", evidence.as_str()));
            let evidence = evidence.take(if self.verbose { usize::MAX } else { 0 });
            let saves = issue.saves_bytes.map(|bytes| format!(" (lowers the peak by {})", size_text(bytes)));
            let fix = format!("{}{}", issue.fix, saves.unwrap_or_default());
            self.labelled_at(4, ISSUE_LABEL_WIDTH, "Location", location, wrap_list);
            let held_by: Vec<String> = issue.held_by.iter().map(holder_text).collect();
            let held_by = held_by.iter().map(|text| ("Held by", text.as_str()));
            let help = issue.help.iter().map(|text| ("Help", text.as_str()));
            for (label, text) in evidence.chain(held_by).chain([("Fix", fix.as_str())]).chain(help) {
                self.labelled_at(4, ISSUE_LABEL_WIDTH, label, text, wrap_words);
            }
        }
        if let Some(first) = issues.first().filter(|_| count == usize::MAX) {
            self.line(format!("  memtrace explain {} shows what the rule means and the usual fix", first.rule));
        }
        if issues.len() > count {
            self.line(format!("  {} more issues: memtrace report RUN --section issues", issues.len() - count));
        }
    }

    /// Adds where the device's memory was when a request failed.
    pub(crate) fn oom_facts(&mut self, device: &DeviceSummary, oom: &OomSummary) {
        let reserved = size_text(oom.in_use.totals.reserved_bytes);
        match (oom.device_free_bytes, oom.refused_by_pytorch) {
            (Some(free), true) => {
                let text = format!(
                    "PyTorch's own limit (set_per_process_memory_fraction) refused the request at {reserved} reserved; \
                     the device had {} free",
                    size_text(free)
                );
                self.labelled("Limit", &text);
            }
            (Some(free), false) => {
                let label = if oom.held_back_bytes.is_some() { "Free within the limit" } else { "Free on the device" };
                self.labelled(label, &format!("{}{}", size_text(free), short_text(oom)));
            }
            (None, _) => {}
        }
        if let Some(text) = limit_text(oom) {
            self.labelled("Limit", &text);
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
        self.labelled_list("Outside PyTorch", oom.outside_text.as_deref().unwrap_or_default());
        if let Some(estimate) = &oom.step_estimate {
            self.labelled("Still to come", &estimate.text());
        }
    }

    /// Adds the largest allocations of the blocks that were allocated.
    pub(crate) fn largest_allocations(&mut self, state: &MemoryState, count: usize) {
        let rows = allocation_rows(&state.largest_allocations);
        if !rows.is_empty() {
            self.list("Largest allocations");
        }
        for row in rows.iter().take(count) {
            let custom = row.custom_category.map(|name| format!(" [{name}]")).unwrap_or_default();
            let pool = row.memory_pool.map(|id| format!(" {id}")).unwrap_or_default();
            let mut text = format!("{}{pool}{}{custom}", row.category.plural(), in_blocks(row.blocks));
            let (name, shape) = match (row.tensor_name_pattern, row.tensor_name) {
                (Some(pattern), _) => (pattern.to_owned(), row.common_tensor_shape),
                (None, Some(name)) if row.blocks > 1 => (format!("{name}, ..."), None),
                (None, name) => (name.unwrap_or_default().to_owned(), row.tensor_shape),
            };
            text.extend((!name.is_empty()).then(|| format!("  {}", cut_middle(&name, LONGEST_NAME))));
            text.extend(
                shape.filter(|_| !name.is_empty()).map(|shape| format!(" {}", cut_middle(shape, LONGEST_SHAPE))),
            );
            let left = self.width.saturating_sub(ROW_TEXT + columns(&text) + 2);
            let beside = short_location(row.location, left);
            text.extend(beside.iter().map(|location| format!("  {location}")));
            self.row(row.bytes, state.totals.allocated_bytes, &text);
            if beside.is_none() {
                for line in wrap_location(row.location, self.width.saturating_sub(ROW_TEXT)) {
                    self.lines.push(format!("{:ROW_TEXT$}{line}", ""));
                }
            }
        }
    }

    /// Adds the largest modules, one line each. Modules of one class whose paths differ only in numbers share a line.
    pub(crate) fn modules(&mut self, state: &MemoryState) {
        let whole = state.totals.allocated_bytes;
        let groups = state.module_groups.iter().filter(|group| group.bytes >= whole / SMALL_MODULE).take(MODULES);
        for (at, group) in groups.enumerate() {
            if at == 0 {
                self.list("By module");
            }
            self.row(group.bytes, whole, &module_text(group));
        }
    }

    pub(crate) fn growth_after_first_step(&mut self, device: &DeviceSummary) {
        if let Some(growth) = &device.growth_after_first_step {
            self.sentence(&growth.text);
        }
    }

    fn sentence(&mut self, text: &str) {
        let lines = wrap_words(text, self.width);
        self.lines.extend(lines);
    }

    pub(crate) fn outlier_step(&mut self, device: &DeviceSummary) {
        if let Some(outlier) = &device.outlier_step {
            self.labelled_at(2, 0, &format!("Step {} needs more", outlier.step), &outlier.text, wrap_words);
        }
    }

    pub(crate) fn larger_inputs(&mut self, device: &DeviceSummary) {
        let Some(inputs) = &device.larger_inputs else { return };
        let (bytes, median) = (size_text(inputs.input_bytes), size_text(inputs.median_input_bytes));
        let held = |held: &HolderSummary| format!(", {} {}", held.path, held.shape.as_deref().unwrap_or_default());
        let held: String = inputs.held.iter().map(held).collect();
        let text = format!("{bytes}{}; the median step has {median}", held.trim_end());
        self.labelled_at(2, 0, &format!("Step {} has larger inputs", inputs.step), &text, wrap_words);
    }

    /// Adds the suggestions: changes to the program, each with the peak that it leads to. An allocator setting comes
    /// first if the interrupted step fits with it, else last. Without an indent they have a heading of the whole
    /// report, else one of the device's section.
    pub(crate) fn suggestions(&mut self, device: &DeviceSummary, heading: &str, indent: usize) {
        let advice = device.what_if.as_ref().and_then(|what_if| what_if.advice.as_ref());
        if advice.is_none() && device.suggestions.is_empty() {
            return;
        }
        if indent == 0 && !heading.is_empty() {
            self.blank();
        }
        let text = advice.map(|advice| format!("{} (allocator replay)", advice.text));
        let (first, last) = if advice.is_some_and(|advice| advice.is_fix) { (text, None) } else { (None, text) };
        if device.suggestions.is_empty() {
            if !heading.is_empty() {
                let heading = self.style.bold(heading);
                self.lines.push(format!("{:indent$}{heading}", ""));
            }
            first.iter().for_each(|text| self.item(indent + 2, text));
        } else {
            self.suggested_changes(device, (heading, indent), first.as_deref());
        }
        last.iter().for_each(|text| self.item(indent + 2, text));
    }

    /// Adds the changes to the program: what to try, the peak after it, and after an error whether the run fits.
    fn suggested_changes(
        &mut self,
        device: &DeviceSummary,
        (heading, head_indent): (&str, usize),
        first: Option<&str>,
    ) {
        let indent = head_indent + 2;
        let failed = device.explained_oom.is_some();
        // The device's memory is not the limit: other libraries, other processes and PyTorch's own limit take a part.
        let fits_head = if failed { "  fits?  " } else { "" };
        let scope = device.suggestions.first().map_or(SuggestionScope::Run, |suggestion| suggestion.scope);
        let peak_head = if scope == SuggestionScope::UntilError { "at the error" } else { "peak after" };
        let right = peak_head.len().max(PEAK_WIDTH);
        let tail = 2 + right + fits_head.len();
        let left = self.width.saturating_sub(indent + tail).max(NARROWEST_CHANGE);
        let gap = " ".repeat((left + 2).saturating_sub(columns(heading)));
        let columns_head = self.style.dim(&format!("{gap}  {peak_head:>right$}{}", fits_head.trim_end()));
        let heading = self.style.bold(heading);
        self.lines.push(format!("{:head_indent$}{heading}{columns_head}", ""));
        first.into_iter().for_each(|text| self.item(indent, text));
        let shown = shown_suggestions(&device.suggestions);
        for suggestion in &shown {
            let bound = if suggestion.at_most { "<= " } else { "" };
            let peak = format!("{bound}{}", size_text(suggestion.peak_after_bytes));
            let fits = match suggestion.fits {
                _ if !failed => "",
                Some(true) => "  yes",
                Some(false) => "  no",
                None => "  unknown",
            };
            let mut cells = format!("  {peak:>right$}{fits}");
            for line in wrap_words(&suggestion.action, left) {
                self.line(format!("{:indent$}{line:<left$}{}", "", std::mem::take(&mut cells)).trim_end().to_owned());
            }
        }
        let more = match device.suggestions.len() - shown.len() {
            0 => "The code of each".to_owned(),
            1 => "1 more change, and the code of each".to_owned(),
            left_out => format!("{left_out} more changes, and the code of each"),
        };
        self.note(&format!("{more}: memtrace report RUN --section try"));
        match scope {
            SuggestionScope::UntilError => self.note(UNTIL_ERROR),
            SuggestionScope::Iteration => self.note(ONE_ITERATION),
            SuggestionScope::Run if is_upper_bound(device) => self.note(UPPER_BOUND),
            SuggestionScope::Run => {}
        }
    }
}

/// Whether the peaks of suggestions are upper bounds because it is unknown which blocks the interrupted step would have
/// freed.
fn is_upper_bound(device: &DeviceSummary) -> bool {
    let estimate = device.explained_oom().and_then(|oom| oom.step_estimate.as_ref());
    estimate.is_some_and(|estimate| estimate.at_least && estimate.basis == StepEstimateBasis::EarlierStep)
}

/// The first suggestions, and in place of the last one the first that fits, or else the one with the lowest peak, if it
/// is not among them.
fn shown_suggestions(all: &[SuggestionSummary]) -> Vec<&SuggestionSummary> {
    let mut shown: Vec<&SuggestionSummary> = all.iter().take(SUGGESTIONS).collect();
    let fits = all.iter().position(|one| one.fits == Some(true));
    let lowest = || (0..all.len()).min_by_key(|at| all[*at].peak_after_bytes);
    if let Some(best) = fits.or_else(lowest).filter(|best| *best >= SUGGESTIONS) {
        shown[SUGGESTIONS - 1] = &all[best];
    }
    shown
}

/// The title of the run: its command, or the name of a snapshot or of the folder of several.
pub(crate) fn run_title(summary: &Summary) -> String {
    let run = &summary.run;
    if !is_snapshot(&summary.processes) {
        return run.command.join(" ");
    }
    // The folder of several snapshots can have no name: `.`.
    let name = std::path::Path::new(&run.path).file_name();
    name.map_or_else(|| run.outcome.clone(), |name| name.to_string_lossy().into_owned())
}

/// Formats a number of blocks: ` in 293 blocks`. Empty for a single block.
fn in_blocks(blocks: u64) -> String {
    if blocks == 1 { String::new() } else { format!(" in {} blocks", count_text(blocks)) }
}

/// Whether the program was in any phase. A program without PyTorch is in none.
pub(crate) fn has_phases(device: &DeviceSummary) -> bool {
    !device.first_step.is_empty() || device.before_first_step.iter().any(|row| row.phase != Phase::Other)
}

/// A row of the largest allocations.
struct AllocationRow<'a> {
    bytes: u64,
    blocks: u64,
    category: Category,
    custom_category: Option<&'a str>,
    memory_pool: Option<&'a str>,
    location: &'a str,
    tensor_name: Option<&'a str>,
    tensor_name_pattern: Option<&'a str>,
    tensor_shape: Option<&'a str>,
    common_tensor_shape: Option<&'a str>,
    native: bool,
}

/// The largest allocations first. Groups that differ only in native frames are merged.
fn allocation_rows(groups: &[AllocationGroup]) -> Vec<AllocationRow<'_>> {
    let mut rows: Vec<AllocationRow<'_>> = Vec::new();
    for group in groups {
        let native = group.stack.frames.iter().any(|frame| frame.native);
        let pattern = group.tensor_name_pattern.as_deref();
        let custom_category = group.custom_category.as_deref();
        let is_same = |row: &&mut AllocationRow<'_>| {
            let memory_pool = group.memory_pool.as_deref();
            let kinds =
                (row.category, row.custom_category, row.memory_pool) == (group.category, custom_category, memory_pool);
            row.native && native && kinds && row.location == group.stack.location
        };
        match rows.iter_mut().find(is_same) {
            Some(same) => {
                same.bytes += group.bytes;
                same.blocks += group.blocks;
                if same.tensor_name_pattern != pattern {
                    same.tensor_name_pattern = None;
                }
                if same.common_tensor_shape != group.common_tensor_shape.as_deref() {
                    same.common_tensor_shape = None;
                }
            }
            None => rows.push(AllocationRow {
                bytes: group.bytes,
                blocks: group.blocks,
                category: group.category,
                custom_category,
                memory_pool: group.memory_pool.as_deref(),
                location: &group.stack.location,
                tensor_name: group.tensor_name.as_deref(),
                tensor_name_pattern: pattern,
                tensor_shape: group.tensor_shape.as_deref(),
                common_tensor_shape: group.common_tensor_shape.as_deref(),
                native,
            }),
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

/// The phases of one part of a run.
struct PhaseGroup<'a> {
    /// The steps of the part; `None` before the first step.
    caption: Option<String>,
    rows: &'a [PhaseSummary],
    steps: u64,
    micro_batches: u64,
}

impl PhaseGroup<'_> {
    /// Whether the steps accumulate the gradients of several micro-batches.
    fn accumulates(&self) -> bool {
        self.steps > 0 && self.micro_batches > self.steps
    }

    /// The caption with what its figures are: `steps 1-3: per-step mean (4 micro-batches each); peak is the maximum`.
    fn caption(&self) -> Option<String> {
        let name = self.caption.as_ref()?;
        let count = self.micro_batches / self.steps.max(1);
        let is_equal = count * self.steps == self.micro_batches;
        Some(match (self.steps, self.accumulates()) {
            (1, false) => name.clone(),
            (1, true) => format!("{name}: sum of {count} micro-batches"),
            (_, false) => format!("{name}: per-step mean; peak is the maximum"),
            (_, true) if is_equal => format!("{name}: per-step mean ({count} micro-batches each); peak is the maximum"),
            (_, true) => format!(
                "{name}: per-step mean ({} micro-batches in all); peak is the maximum",
                count_text(self.micro_batches)
            ),
        })
    }

    fn add(&self, table: &mut Table) {
        if self.rows.is_empty() || self.steps == 0 {
            return;
        }
        let indent = if self.caption.is_some() { "  " } else { "" };
        if let Some(caption) = self.caption() {
            table.caption(caption);
        }
        for row in self.rows {
            let mut cells = phase_cells(row, indent, u64::from(row.steps));
            if u64::from(row.steps) < self.steps {
                let explanation = if row.explanation.is_empty() { "" } else { ": " };
                cells[CHANGES] = format!("in {} of {} steps{explanation}{}", row.steps, self.steps, row.explanation);
            }
            table.row(cells);
        }
    }

    /// Adds the means of one micro-batch. A micro-batch is one forward and one backward pass.
    fn add_micro_batches(&self, table: &mut Table) {
        let name = self.caption.as_deref().unwrap_or_default();
        table.caption(format!("each of the {} micro-batches of {name}: mean", count_text(self.micro_batches)));
        let in_pass = |row: &&PhaseSummary| matches!(row.phase, Phase::Forward | Phase::Backward | Phase::Recompute);
        for row in self.rows.iter().filter(in_pass) {
            let mut cells = phase_cells(row, "  ", self.micro_batches);
            for index in [AFTER, PEAK, CHANGES] {
                cells[index].clear();
            }
            table.row(cells);
        }
    }
}

/// The columns of the phase table after `Net`.
const AFTER: usize = 4;
const PEAK: usize = 5;
const CHANGES: usize = 6;

/// The cells of a phase. Bytes are means over `count` steps or micro-batches.
fn phase_cells(row: &PhaseSummary, indent: &str, count: u64) -> Vec<String> {
    let per = |bytes: u64| size_text(bytes / count.max(1));
    vec![
        format!("{indent}{}", row.phase.name()),
        per(row.allocated_bytes),
        per(row.freed_bytes),
        signed_size_text(row.net_bytes / count.max(1) as i64),
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
    let annotate = if own.iter().any(|label| label.api == "annotate") { ", annotate" } else { "" };
    table.caption(format!("named ranges (record_function, NVTX{annotate}): mean per range; peak is the maximum"));
    for label in own.iter().take(LISTED_LABELS) {
        let per = |bytes: u64| size_text(bytes / label.times.max(1));
        let net = (label.allocated_bytes as i64 - label.freed_bytes as i64) / label.times.max(1) as i64;
        let times = if label.times == 1 { "once".to_owned() } else { format!("{} times", count_text(label.times)) };
        let kept = if label.kept_bytes == 0 { String::new() } else { format!(", kept {}", per(label.kept_bytes)) };
        table.row(vec![
            format!("  {}", cut_middle(&label.name, LONGEST_LABEL)),
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

/// Adds the functions that are called again and again, most allocated bytes first.
fn called_functions(device: &DeviceSummary, table: &mut Table) {
    let Some(CalledFunctionsSummary { functions: all, left_out }) = &device.called_functions else { return };
    table.caption("functions that allocate: mean per call; peak is the maximum".to_owned());
    for called in all.iter().take(LISTED_LABELS) {
        let per = |bytes: u64| size_text(bytes / called.calls.max(1));
        let kept = if called.kept_bytes == 0 { String::new() } else { format!(", kept {}", per(called.kept_bytes)) };
        table.row(vec![
            format!("  {}", cut_middle(&called.name, LONGEST_LABEL)),
            per(called.allocated_bytes),
            String::new(),
            String::new(),
            String::new(),
            size_text(called.peak_bytes),
            format!("{}{kept}, {}", number_text(called.calls, "call"), called.location),
        ]);
    }
    let more = all.len().saturating_sub(LISTED_LABELS) as u64 + left_out;
    if more > 0 {
        table.caption(format!("{} more: see summary.json", count_text(more)));
    }
}

/// Formats a module or a group of modules: `blocks.* (12 of Block)`.
fn module_text(group: &ModuleGroupSummary) -> String {
    let own = if group.is_own { " itself" } else { "" };
    let text = match (group.pattern.as_str(), group.class.as_deref()) {
        ("", None) => "a module".to_owned(),
        ("", Some(class)) => class.to_owned(),
        (path, Some(class)) if group.modules > 1 => format!("{path} ({} of {class})", group.modules),
        (path, Some(class)) if path != class => format!("{path} ({class})"),
        (path, _) => path.to_owned(),
    };
    format!("{text}{own}")
}

pub(crate) fn blocking_text(blocking: &BlockingAllocation) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_shown_change_fits_or_saves_most() {
        let suggestion = |peak: u64, fits: Option<bool>| -> SuggestionSummary {
            serde_json::from_value(serde_json::json!({
                "rule": "fused-step", "action": "", "peak_after_bytes": peak, "reserved_after_bytes": peak,
                "saves_bytes": 1, "fits": fits, "scope": "run", "cost": "free", "cost_text": "", "code": [], "link": "",
                "evidence": "", "method": "",
            }))
            .unwrap()
        };
        let shown = |all: &[SuggestionSummary]| -> Vec<u64> {
            shown_suggestions(all).iter().map(|one| one.peak_after_bytes).collect()
        };
        let mut all: Vec<SuggestionSummary> = (10..18).map(|peak| suggestion(peak, None)).collect();
        assert_eq!(shown(&all), [10, 11, 12, 13, 14], "the lowest is among them");
        all[6].peak_after_bytes = 3;
        assert_eq!(shown(&all), [10, 11, 12, 13, 3]);
        all[5].fits = Some(true);
        assert_eq!(shown(&all), [10, 11, 12, 13, 15]);
        assert_eq!(shown(&all[..2]), [10, 11]);
    }
}
