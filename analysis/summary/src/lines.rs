//! The line table: what each source line of selected functions did. `analysis/schema/lines.schema.json` describes its
//! JSON.
//!
//! The doc comments of the report types are the descriptions in the JSON Schema.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use memtrace_trace::counters::Counter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::json_text::json_text;
use crate::progress::Progress;
use crate::source::{Body, end_of, start_of};
use crate::summary::{CompileContextAmount, CustomCategoryAmount};
use memtrace_input::load::{Process, Run, SNAPSHOT_TOPIC};
use memtrace_input::{CompileContexts, EventSource};
use memtrace_insight::locations::Locations;
use memtrace_insight::passes::{
    Amount, BlockKind, CustomCategorizer, DeviceLines, FunctionUse, LineUse, Lines, LinesScope,
};
use memtrace_insight::rules::{CustomRules, is_library};
use memtrace_output::{NoSource, SourceAccess, SourceFiles};
use memtrace_replay::Names;

/// The version of the structure: major.minor.
pub const LINES_VERSION: &str = "2.0";

/// The maximum number of source lines shown of one function. Of a longer function, only lines near a line with figures
/// are shown.
const LONGEST: u32 = 400;
/// The number of lines shown before and after a line with figures, in a function that is not shown in full.
const AROUND: u32 = 1;

/// The selection of the lines to show.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LinesOptions {
    /// Functions: the name of each, its qualified name or the end of it (`Block.forward`). Empty: any function.
    pub functions: Vec<String>,
    /// Files: the path of each or the end of it. Empty: any file.
    pub files: Vec<String>,
    /// The maximum number of functions. Those with the highest peaks are chosen.
    pub top: usize,
    /// Shows only the process of this rank.
    pub rank: Option<u32>,
    /// Shows only the process with this id.
    pub pid: Option<u32>,
    /// Shows only this device.
    pub device: Option<i16>,
    /// Whether to quote source files of this machine that the recording names, even if nothing proves that it was made
    /// with them.
    pub sources: bool,
    /// The rules of the user's own categories.
    pub custom_rules: Option<Arc<CustomRules>>,
    /// Counts only what happened while the program had a range of this name open.
    pub range: Option<String>,
    /// Whether lines have the figures of `torch.cuda.memory_stats`.
    pub statistics: bool,
}

/// The line table of one device of one process. A field whose name ends in `_bytes` is in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LinesReport {
    /// The version of this structure: major.minor. A new major version renames or removes fields.
    pub version: String,
    /// The path of the run folder, trace or snapshot that was read.
    pub run: String,
    /// The process id.
    pub pid: u32,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The source of the block events: `torch` (the tracker of PyTorch's caching allocator), `torch_reporter` (the
    /// profiler's memory reporter), `cuda_calls` or `torch_cpu`.
    pub source: String,
    /// The peak of active bytes of the device.
    pub active_peak_bytes: u64,
    /// The peak of reserved bytes of the device.
    pub reserved_peak_bytes: u64,
    /// The functions, by `active_peak_bytes` in descending order.
    pub functions: Vec<FunctionLines>,
    /// The number of matching functions that `functions` leaves out.
    pub functions_left_out: u64,
    /// The other matching devices and processes. Their lines are not in this table.
    pub other_devices: Vec<OtherDevice>,
    /// The limits of the figures, as text.
    pub notes: Vec<String>,
}

/// A device with a line table of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OtherDevice {
    /// The process id.
    pub pid: u32,
    /// The rank in a distributed job. Absent outside a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device ordinal; -1 is the CPU.
    pub device: i16,
    /// The peak of active bytes of the device.
    pub active_peak_bytes: u64,
}

/// The lines of one function.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FunctionLines {
    /// The qualified name of the function, or its name if the qualified name is unknown.
    pub function: String,
    /// The path of the source file, as in the code object.
    pub filename: String,
    /// The number of the first line of the function; 0 if it is unknown.
    pub first_line: u32,
    /// The highest number of active bytes while a line of the function was current.
    pub active_peak_bytes: u64,
    /// The highest number of reserved bytes while a line of the function was current.
    pub reserved_peak_bytes: u64,
    /// The bytes of the blocks that the function and its callees allocated.
    pub allocated_bytes: u64,
    /// The change of allocated bytes: bytes allocated minus bytes freed.
    pub net_bytes: i64,
    /// Whether the source text is known: the file exists and has not changed since the recording.
    pub has_source: bool,
    /// The lines, in order. Lines without events have no figures.
    pub lines: Vec<LineRow>,
}

/// One line of a function.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LineRow {
    /// The line number.
    pub line: u32,
    /// The source text. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The figures. Absent if no event happened in the line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figures: Option<LineFigures>,
    /// The largest tensor with a name that the line allocated. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_tensor: Option<LineTensor>,
    /// The blocks of `allocated_bytes` by custom category (`--categories FILE`), by bytes in descending order. Blocks
    /// that no rule matches come last. Absent without a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub custom_categories: Vec<CustomCategoryAmount>,
    /// The blocks of `allocated_bytes` by compile context (compiled region of `torch.compile`), by bytes in descending
    /// order. Blocks that no compiled region allocated come last. Absent without compile contexts, which only snapshots
    /// of PyTorch have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compile_contexts: Vec<CompileContextAmount>,
    /// The values that `torch.cuda.memory_stats` has at the line, by its keys such as `active_bytes.all.peak`: `peak`
    /// while the line was current, `allocated` and `freed` by the line, `current` after its last event. Absent without
    /// `--statistics`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub statistics: BTreeMap<String, u64>,
}

/// The largest tensor with a name that a line allocated.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LineTensor {
    /// The name, for example `blocks.0.attn.weight`. Tensors that share the memory are separated by commas.
    pub name: String,
    /// The data type and shape, for example `float32[768, 3072]`. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape: Option<String>,
    /// The bytes of its block.
    pub bytes: u64,
    /// The number of blocks with names that the line allocated, this one included.
    pub named_blocks: u64,
}

/// The figures of one line. A line is current from an event in it, or in a function that it calls, to the next event.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LineFigures {
    /// The number of times that events show the start of the line. The line ran at least that often. 0 in PyTorch's
    /// snapshots, which do not record threads.
    pub times: u64,
    /// The highest number of active bytes while the line was current: `active_bytes.all.peak`.
    pub active_peak_bytes: u64,
    /// The highest number of reserved bytes while the line was current: `reserved_bytes.all.peak`.
    pub reserved_peak_bytes: u64,
    /// The change of allocated bytes: `allocated_bytes` minus `freed_bytes`.
    pub net_bytes: i64,
    /// The number of blocks that the line and the functions that it calls allocated.
    pub allocations: u64,
    /// The bytes of these blocks.
    pub allocated_bytes: u64,
    /// The number of blocks that were freed while the line was current.
    pub frees: u64,
    /// The bytes of these blocks.
    pub freed_bytes: u64,
    /// The number of blocks that the backward pass of the line's calls allocated. They also count for the line that
    /// called `backward()`, and in no other figure of this line.
    pub backward_allocations: u64,
    /// The bytes of these blocks.
    pub backward_bytes: u64,
}

impl From<LineUse> for LineFigures {
    fn from(line_use: LineUse) -> LineFigures {
        LineFigures {
            times: line_use.times,
            active_peak_bytes: line_use.active_peak,
            reserved_peak_bytes: line_use.reserved_peak,
            net_bytes: line_use.net(),
            allocations: line_use.allocated.blocks,
            allocated_bytes: line_use.allocated.bytes,
            frees: line_use.freed.blocks,
            freed_bytes: line_use.freed.bytes,
            backward_allocations: line_use.backward.blocks,
            backward_bytes: line_use.backward.bytes,
        }
    }
}

impl LinesReport {
    /// The JSON Schema, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        crate::summary::schema_text::<LinesReport>()
    }

    /// The table as JSON.
    pub fn to_json(&self) -> String {
        json_text(self) + "\n"
    }
}

/// Whether `end` is the path itself or its last components.
pub(crate) fn ends_in(path: &str, end: &str) -> bool {
    let end = end.trim_start_matches("./");
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || end.starts_with('/') || rest.ends_with('/'))
}

/// Whether `name` is the qualified name itself or its end: `forward` and `Block.forward` match `model.Block.forward`.
fn matches_name(qualname: &str, name: &str) -> bool {
    qualname.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The line table of the matching device with the highest peak. `None` if no process or device matches, or if no device
/// has such functions.
pub fn lines(run: &Run, options: &LinesOptions, progress: &mut dyn FnMut(Progress<'_>)) -> Option<LinesReport> {
    let mut all: Vec<(&Process, DeviceLines, Rc<Names>)> = Vec::new();
    let mut undecoded = 0u64;
    let rules = options.custom_rules.as_deref();
    for process in run.processes() {
        if options.rank.is_some_and(|rank| process.rank() != Some(rank))
            || options.pid.is_some_and(|pid| process.pid() != pid)
        {
            continue;
        }
        let total = process.recording().event_count();
        let mut on_progress = |done| progress(Progress { what: "reading lines", done, total });
        let names = Names::of_process(process);
        let custom = rules.map(|rules| CustomCategorizer::new(rules, process.definitions(), &names));
        let scope = LinesScope { range: options.range.as_deref(), statistics: options.statistics };
        let (recording, index) = (process.recording(), process.trace_index());
        let found = Lines::of(recording, index, &names, custom.as_ref(), scope, &mut on_progress);
        undecoded = undecoded.saturating_add(found.lost.events);
        drop(custom);
        let names = Rc::new(names);
        all.extend(found.devices.into_iter().map(|device| (process, device, Rc::clone(&names))));
    }
    all.retain(|(_, device, _)| options.device.is_none_or(|d| d == device.device));
    all.sort_by_key(|(process, device, _)| {
        (std::cmp::Reverse(device.peak.active), process.rank(), process.pid(), device.device)
    });
    let index = all.iter().position(|(process, device, _)| !matching_functions(process, device, options).is_empty())?;
    let (process, device, names) = all.remove(index);
    let sources = SourceFiles::of(process, &SourceAccess::of(run, options.sources));
    let mut report = device_report(process, &device, &names, sources, options);
    report.run = run.path().display().to_string();
    let other = |(process, device, _): &(&Process, DeviceLines, Rc<Names>)| OtherDevice {
        pid: process.pid(),
        rank: process.rank(),
        device: device.device,
        active_peak_bytes: device.peak.active,
    };
    report.other_devices = all.iter().filter(|(_, device, _)| device.peak.active > 0).map(other).collect();
    if undecoded > 0 {
        report.notes.push(format!("{undecoded} events could not be decoded: the figures may be too low"));
    }
    Some(report)
}

fn matching_functions(process: &Process, device: &DeviceLines, options: &LinesOptions) -> Vec<FunctionUse> {
    let definitions = process.definitions();
    let is_selected = |id| {
        let Some(frame) = definitions.frame(id) else { return false };
        let (functions, files) = (&options.functions, &options.files);
        let is_named = |name: &String| matches_name(&frame.qualname, name) || &*frame.name == name;
        let function = functions.is_empty() || functions.iter().any(is_named);
        let file = files.is_empty() || files.iter().any(|file| ends_in(&frame.filename, file));
        let own = !functions.is_empty() || !files.is_empty() || !is_library(&frame.filename);
        function && file && own
    };
    device.functions(definitions, &is_selected)
}

fn device_report(
    process: &Process,
    device: &DeviceLines,
    names: &Names,
    mut sources: SourceFiles,
    options: &LinesOptions,
) -> LinesReport {
    let definitions = process.definitions();
    let mut functions = Vec::new();
    for function in matching_functions(process, device, options) {
        functions.extend(split_by_definition(function, &mut sources));
    }
    let peak = |f: &FunctionUse| (f.whole.active_peak, f.whole.allocated.bytes);
    functions.sort_by(|a, b| {
        peak(b)
            .cmp(&peak(a))
            .then_with(|| (&a.filename, a.first_line, &a.qualname).cmp(&(&b.filename, b.first_line, &b.qualname)))
    });
    let left_out = functions.len().saturating_sub(options.top);
    functions.truncate(options.top);
    let mut notes = Vec::new();
    let anonymous = functions.iter().any(|f| f.first_line == 0);
    let kinds =
        Kinds { rules: options.custom_rules.as_deref(), contexts: process.recording().compile_contexts(), names };
    let functions: Vec<FunctionLines> = functions.into_iter().map(|f| rows(f, &mut sources, &kinds)).collect();
    let locations = Locations::new(definitions, process.directory());
    let mut missing: BTreeMap<NoSource, String> = BTreeMap::new();
    for function in functions.iter().filter(|f| !f.has_source && !f.filename.starts_with('<')) {
        if let Err(reason) = sources.lines(&function.filename) {
            missing.entry(reason).or_insert_with(|| locations.short(&function.filename).to_owned());
        }
    }
    notes.extend(missing.iter().map(|(reason, file)| no_source_note(*reason, file)));
    if anonymous {
        notes.push(
            "the recording lacks the first lines of functions: functions of one name in one file are distinguished by \
             their source, if that can be read"
                .to_owned(),
        );
    }
    let events: u64 = process
        .trace_index()
        .events_by_source
        .iter()
        .filter(|((d, _), _)| *d == device.device)
        .map(|(_, count)| count)
        .sum();
    if events > 0 && definitions.stacks.len() <= 1 {
        notes.push("the recording has no stacks".to_owned());
    }
    let recording = process.recording();
    let lost = recording.end().map_or(0, |end| end.lost.saturating_add(end.late));
    let lost = lost.saturating_add(recording.counter(Counter::EventsDropped));
    if lost > 0 {
        notes.push(format!("{lost} events were lost: the figures may be too low"));
    }
    let notices = definitions.notices.iter().filter(|notice| &*notice.topic == SNAPSHOT_TOPIC);
    notes.extend(notices.map(|notice| notice.text.to_string()));
    LinesReport {
        version: LINES_VERSION.to_owned(),
        pid: process.pid(),
        rank: process.rank(),
        device: device.device,
        source: process.trace_index().sources.get(&device.device).copied().map_or("", EventSource::name).to_owned(),
        active_peak_bytes: device.peak.active,
        reserved_peak_bytes: device.peak.reserved,
        functions,
        functions_left_out: left_out as u64,
        notes,
        ..LinesReport::default()
    }
}

/// Says why the lines of a file have no text.
fn no_source_note(reason: NoSource, file: &str) -> String {
    match reason {
        NoSource::MissingOrChanged => format!("{file} is missing or has changed since the run: its lines have no text"),
        NoSource::NotSource => format!("{file} is no source file: its lines have no text"),
        NoSource::Unproven => format!(
            "nothing proves that the recording was made with {file} of this machine: its lines have no text; use \
             --sources to quote the files that the recording names"
        ),
    }
}

/// Splits functions with the same name by the source. Needed only if the recording does not contain the first lines of
/// functions.
fn split_by_definition(function: FunctionUse, sources: &mut SourceFiles) -> Vec<FunctionUse> {
    if function.first_line > 0 || &*function.qualname == "<module>" {
        return vec![function];
    }
    let Ok(text) = sources.lines(&function.filename) else { return vec![function] };
    let mut all: Vec<FunctionUse> = Vec::new();
    for (line, line_use) in function.lines {
        let first_line = start_of(text, line, &function.qualname).unwrap_or(0);
        match all.last_mut().filter(|last| last.first_line == first_line) {
            Some(last) => {
                last.whole.join(&line_use);
                last.lines.push((line, line_use));
            }
            None => all.push(FunctionUse {
                qualname: function.qualname.clone(),
                filename: function.filename.clone(),
                first_line,
                whole: line_use,
                lines: vec![(line, line_use)],
                kinds: function.kinds.clone(),
                named: function.named.clone(),
                statistics: function.statistics.clone(),
            }),
        }
    }
    all
}

fn rows(function: FunctionUse, sources: &mut SourceFiles, kinds: &Kinds<'_>) -> FunctionLines {
    let text = sources.lines(&function.filename).ok();
    let first = function.lines.first().map_or(0, |(line, _)| *line);
    let last = function.lines.last().map_or(0, |(line, _)| *line);
    let body = match text {
        // The lines of module code can be far apart, so their range is not extended.
        Some(text) if &*function.qualname != "<module>" && function.first_line > 0 => {
            Body { first: function.first_line.min(first), last: end_of(text, function.first_line).max(last) }
        }
        _ => Body { first, last },
    };
    let whole = body.last - body.first < LONGEST && &*function.qualname != "<module>";
    let near = |line: u32| function.lines.iter().any(|(used, _)| used.abs_diff(line) <= AROUND);
    let mut line_uses = function.lines.iter().peekable();
    let mut lines = Vec::new();
    let mut row = |line: u32| {
        let figures = line_uses.next_if(|(used, _)| *used == line).map(|(_, line_use)| LineFigures::from(*line_use));
        let text = text.and_then(|text| text.get((line as usize).checked_sub(1)?)).cloned();
        if figures.is_some() || text.is_some() && (whole || near(line)) {
            let (custom_categories, compile_contexts) =
                (kinds.custom(&function, line), kinds.compiled(&function, line));
            let largest_tensor = kinds.tensor(&function, line);
            let statistics = function.statistics.get(&line).map(crate::statistics::of_line).unwrap_or_default();
            lines.push(LineRow {
                line,
                text,
                figures,
                largest_tensor,
                custom_categories,
                compile_contexts,
                statistics,
            });
        }
    };
    match text {
        Some(_) => (body.first..=body.last).for_each(&mut row),
        None => function.lines.iter().for_each(|(line, _)| row(*line)),
    }
    FunctionLines {
        function: function.qualname.to_string(),
        filename: function.filename.to_string(),
        first_line: function.first_line,
        active_peak_bytes: function.whole.active_peak,
        reserved_peak_bytes: function.whole.reserved_peak,
        allocated_bytes: function.whole.allocated.bytes,
        net_bytes: function.whole.net(),
        has_source: text.is_some(),
        lines,
    }
}

/// The names of the kinds of blocks.
struct Kinds<'a> {
    rules: Option<&'a CustomRules>,
    contexts: &'a CompileContexts,
    names: &'a Names,
}

impl Kinds<'_> {
    /// The allocations of a line, by custom category.
    fn custom(&self, function: &FunctionUse, line: u32) -> Vec<CustomCategoryAmount> {
        let Some(rules) = self.rules else { return Vec::new() };
        let amounts = amounts_by(function, line, |kind| rules.name(kind.custom).map(str::to_owned));
        let amount =
            |(custom_category, Amount { bytes, blocks })| CustomCategoryAmount { custom_category, bytes, blocks };
        amounts.into_iter().map(amount).collect()
    }

    /// The largest named tensor that a line allocated.
    fn tensor(&self, function: &FunctionUse, line: u32) -> Option<LineTensor> {
        let named = function.named.get(&line)?;
        let of = self.names.of_allocation(named.largest.1)?;
        let shape = Some(of.shape.to_string()).filter(|shape| !shape.is_empty());
        Some(LineTensor { name: of.text(), shape, bytes: named.largest.0, named_blocks: named.blocks })
    }

    /// The allocations of a line, by compile context.
    fn compiled(&self, function: &FunctionUse, line: u32) -> Vec<CompileContextAmount> {
        if self.contexts.is_empty() {
            return Vec::new();
        }
        let amounts = amounts_by(function, line, |kind| self.contexts.text(kind.compile_context).map(str::to_owned));
        let amount =
            |(compile_context, Amount { bytes, blocks })| CompileContextAmount { compile_context, bytes, blocks };
        amounts.into_iter().map(amount).collect()
    }
}

/// The allocations of a line, by a name of the blocks' kinds: the largest first, then the blocks without a name.
fn amounts_by(
    function: &FunctionUse,
    line: u32,
    name: impl Fn(&BlockKind) -> Option<String>,
) -> Vec<(Option<String>, Amount)> {
    let [first, last] = BlockKind::BOUNDS;
    let mut sums: BTreeMap<Option<String>, Amount> = BTreeMap::new();
    for ((_, kind), amount) in function.kinds.range((line, first)..=(line, last)) {
        let sum = sums.entry(name(kind)).or_default();
        sum.bytes += amount.bytes;
        sum.blocks += amount.blocks;
    }
    let mut sums: Vec<(Option<String>, Amount)> = sums.into_iter().collect();
    sums.sort_by_key(|(name, amount)| (name.is_none(), std::cmp::Reverse(amount.bytes)));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_may_be_given_by_their_ends() {
        assert!(ends_in("/home/me/model.py", "model.py") && ends_in("/home/me/model.py", "me/model.py"));
        assert!(ends_in("/home/me/model.py", "/home/me/model.py") && ends_in("model.py", "./model.py"));
        assert!(!ends_in("/home/me/my_model.py", "model.py") && !ends_in("model.py", "me/model.py"));
        assert!(matches_name("Block.forward", "forward") && matches_name("Block.forward", "Block.forward"));
        assert!(!matches_name("Block.forward", "ward") && !matches_name("Block.forward", "Block"));
    }
}
