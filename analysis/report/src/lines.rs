//! The line table: what each source line of selected functions did. `analysis/schema/lines.schema.json` describes its
//! JSON.

use memtrace_trace::counters::Counter;
use schemars::JsonSchema;
use serde::Serialize;

use super::finish::Progress;
use super::places::{Places, is_library};
use super::source::{Body, end_of, start_of};
use memtrace_input::Lane;
use memtrace_input::load::{Process, Run, SNAPSHOT_TOPIC};
use memtrace_input::printable;
use memtrace_insight::passes::{DeviceLines, FunctionUse, LineUse, Lines};
use memtrace_output::Sources;

/// The version of the structure: major.minor.
pub const LINES_VERSION: &str = "1.0";

/// The maximum number of source lines shown of one function. Of a longer function, only lines near a line with figures
/// are shown.
const LONGEST: u32 = 400;
/// The number of lines shown before and after a line with figures, in a function that is not shown in full.
const AROUND: u32 = 1;

/// Which lines to show.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LinesWanted {
    /// A function: its name, its qualified name or the end of it (`Block.forward`).
    pub function: Option<String>,
    /// A file: its path or the end of it.
    pub file: Option<String>,
    /// The maximum number of functions. Those with the highest peaks are chosen.
    pub top: usize,
    /// Shows only the process of this rank.
    pub rank: Option<u32>,
    /// Shows only the process with this id.
    pub pid: Option<u32>,
    /// Shows only this device.
    pub device: Option<i16>,
}

/// The line table of one device of one process. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LinesReport {
    /// The version of this structure.
    pub version: String,
    /// What was read.
    pub run: String,
    /// The process.
    pub pid: u32,
    /// Its rank in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device; -1 is the CPU.
    pub device: i16,
    /// Whose events tell about its blocks: `torch`, `torch_reporter`, `cuda_calls` or `torch_cpu`.
    pub source: String,
    /// The device's own peak of active bytes.
    pub active_peak_bytes: u64,
    /// The device's own peak of reserved bytes.
    pub reserved_peak_bytes: u64,
    /// The functions: those of one file together, in its order.
    pub functions: Vec<FunctionLines>,
    /// Functions that match and are not listed.
    pub functions_left_out: u64,
    /// Other devices and processes that match, whose lines are not these.
    pub others: Vec<OtherDevice>,
    /// What the figures cannot tell, in words.
    pub remarks: Vec<String>,
}

/// A device with lines of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct OtherDevice {
    /// The process.
    pub pid: u32,
    /// Its rank in a distributed job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The device; -1 is the CPU.
    pub device: i16,
    /// Its peak of active bytes.
    pub active_peak_bytes: u64,
}

/// A function.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct FunctionLines {
    /// The qualified name, where known; else the name.
    pub function: String,
    /// The file, as the code object has it.
    pub filename: String,
    /// The first line of the function; 0 when unknown.
    pub first_line: u32,
    /// The highest number of active bytes while a line of it was current.
    pub active_peak_bytes: u64,
    /// The highest number of reserved bytes.
    pub reserved_peak_bytes: u64,
    /// Bytes allocated by its lines and what they called.
    pub allocated_bytes: u64,
    /// Bytes added to what is allocated, or taken from it.
    pub net_bytes: i64,
    /// Whether the text of its lines is known: the file is there and has not changed since the recording.
    pub has_source: bool,
    /// Its lines, in order. Those without events have no figures and are there for their text.
    pub lines: Vec<LineRow>,
}

/// A line.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LineRow {
    /// Its number.
    pub line: u32,
    /// Its text; absent where the source is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// What it did; absent where no event happened in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figures: Option<LineFigures>,
}

/// What a line did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, JsonSchema)]
pub struct LineFigures {
    /// How often events showed it entered anew; it ran at least so often. 0 in snapshots of PyTorch's, which tell no threads.
    pub times: u64,
    /// The highest number of active bytes while it was current: `active_bytes.all.peak`.
    pub active_peak_bytes: u64,
    /// The highest number of reserved bytes while it was current: `reserved_bytes.all.peak`.
    pub reserved_peak_bytes: u64,
    /// Bytes added to what is allocated, or taken from it.
    pub net_bytes: i64,
    /// Blocks allocated by it and what it called.
    pub allocations: u64,
    /// Their bytes.
    pub allocated_bytes: u64,
    /// Blocks given back.
    pub frees: u64,
    /// Their bytes.
    pub freed_bytes: u64,
    /// Blocks that the backward of its calls allocated; they count in the line that called the engine, not in this one's other figures.
    pub backward_allocations: u64,
    /// Their bytes.
    pub backward_bytes: u64,
}

impl From<LineUse> for LineFigures {
    fn from(did: LineUse) -> LineFigures {
        LineFigures {
            times: did.times,
            active_peak_bytes: did.active_peak,
            reserved_peak_bytes: did.reserved_peak,
            net_bytes: did.net(),
            allocations: did.allocated.blocks,
            allocated_bytes: did.allocated.bytes,
            frees: did.freed.blocks,
            freed_bytes: did.freed.bytes,
            backward_allocations: did.backward.blocks,
            backward_bytes: did.backward.bytes,
        }
    }
}

impl LinesReport {
    /// The JSON Schema, generated from these structures and their documentation.
    pub fn json_schema() -> String {
        super::summary::schema_text(&schemars::schema_for!(LinesReport))
    }

    /// The table as JSON.
    pub fn to_json(&self) -> String {
        // Serializing these plain structures cannot fail.
        printable::json(serde_json::to_string_pretty(self).unwrap_or_default() + "\n")
    }
}

/// Whether `end` is the path itself or its last components.
pub(super) fn ends_in(path: &str, end: &str) -> bool {
    let end = end.trim_start_matches("./");
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || end.starts_with('/') || rest.ends_with('/'))
}

/// Whether `name` is the qualified name itself or its end: `forward` and `Block.forward` match `model.Block.forward`.
fn is_called(qualname: &str, name: &str) -> bool {
    qualname.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The line table of the matching device with the highest peak. `None` if no process or device matches, or if no device
/// has such functions.
pub fn lines(run: &Run, wanted: &LinesWanted, progress: &mut dyn FnMut(Progress<'_>)) -> Option<LinesReport> {
    let mut all: Vec<(&Process, DeviceLines)> = Vec::new();
    let mut undecoded = 0u64;
    for process in run.processes() {
        if wanted.rank.is_some_and(|rank| process.rank() != Some(rank))
            || wanted.pid.is_some_and(|pid| process.pid() != pid)
        {
            continue;
        }
        let total = process.recording().event_count();
        let mut heard = |done| progress(Progress { what: "reading lines", done, total });
        let found = Lines::of(process.recording(), process.survey(), &mut heard);
        undecoded = undecoded.saturating_add(found.lost.events);
        all.extend(found.devices.into_iter().map(|device| (process, device)));
    }
    all.retain(|(_, device)| wanted.device.is_none_or(|d| d == device.device));
    all.sort_by_key(|(process, device)| {
        (std::cmp::Reverse(device.peak.active), process.rank(), process.pid(), device.device)
    });
    let index = all.iter().position(|(process, device)| !chosen(process, device, wanted).is_empty())?;
    let (process, device) = all.remove(index);
    let mut report = of_device(process, &device, wanted);
    report.run = run.path().display().to_string();
    let other = |(process, device): &(&Process, DeviceLines)| OtherDevice {
        pid: process.pid(),
        rank: process.rank(),
        device: device.device,
        active_peak_bytes: device.peak.active,
    };
    report.others = all.iter().filter(|(_, device)| device.peak.active > 0).map(other).collect();
    if undecoded > 0 {
        report.remarks.push(format!("{undecoded} events could not be decoded: the figures may be too low"));
    }
    Some(report)
}

fn chosen(process: &Process, device: &DeviceLines, wanted: &LinesWanted) -> Vec<FunctionUse> {
    let definitions = process.definitions();
    let is_wanted = |id| {
        let Some(frame) = definitions.frame(id) else { return false };
        let function =
            wanted.function.as_deref().is_none_or(|name| is_called(&frame.qualname, name) || &*frame.name == name);
        let file = wanted.file.as_deref().is_none_or(|file| ends_in(&frame.filename, file));
        let own = wanted.function.is_some() || wanted.file.is_some() || !is_library(&frame.filename);
        function && file && own
    };
    device.functions(definitions, &is_wanted)
}

fn of_device(process: &Process, device: &DeviceLines, wanted: &LinesWanted) -> LinesReport {
    let definitions = process.definitions();
    let mut sources = Sources::of(process);
    let mut functions = Vec::new();
    for function in chosen(process, device, wanted) {
        functions.extend(apart(function, &mut sources));
    }
    let peak = |f: &FunctionUse| (f.whole.active_peak, f.whole.allocated.bytes);
    functions.sort_by(|a, b| {
        peak(b)
            .cmp(&peak(a))
            .then_with(|| (&a.filename, a.first_line, &a.qualname).cmp(&(&b.filename, b.first_line, &b.qualname)))
    });
    let left_out = functions.len().saturating_sub(wanted.top);
    functions.truncate(wanted.top);
    let mut remarks = Vec::new();
    let anonymous = functions.iter().any(|f| f.first_line == 0);
    let functions: Vec<FunctionLines> = functions.into_iter().map(|f| rows(f, &mut sources)).collect();
    if let Some(changed) = functions.iter().find(|f| !f.has_source && !f.filename.starts_with('<')) {
        let places = Places::new(definitions, process.directory());
        remarks.push(format!(
            "{} is not here as it was when the program ran: its lines have no text",
            places.short(&changed.filename)
        ));
    }
    if anonymous {
        remarks.push("it is not recorded where functions begin: those of one name in one file are told apart by their source alone".to_owned());
    }
    let events: u64 =
        process.survey().events.iter().filter(|((d, _), _)| *d == device.device).map(|(_, count)| count).sum();
    if events > 0 && definitions.stacks.len() <= 1 {
        remarks.push("it was recorded without stacks".to_owned());
    }
    let recording = process.recording();
    let lost = recording.end().map_or(0, |end| end.lost.saturating_add(end.late));
    let lost = lost.saturating_add(recording.counter(Counter::EventsDropped));
    if lost > 0 {
        remarks.push(format!("{lost} events were lost: the figures may be too low"));
    }
    let said = definitions.notices.iter().filter(|notice| &*notice.topic == SNAPSHOT_TOPIC);
    remarks.extend(said.map(|notice| notice.text.to_string()));
    LinesReport {
        version: LINES_VERSION.to_owned(),
        pid: process.pid(),
        rank: process.rank(),
        device: device.device,
        source: process.survey().lanes.get(&device.device).copied().map_or("", Lane::name).to_owned(),
        active_peak_bytes: device.peak.active,
        reserved_peak_bytes: device.peak.reserved,
        functions,
        functions_left_out: left_out as u64,
        remarks,
        ..LinesReport::default()
    }
}

/// Splits functions with the same name by the source. Needed only if the recording does not contain the first lines of
/// functions.
fn apart(function: FunctionUse, sources: &mut Sources) -> Vec<FunctionUse> {
    if function.first_line > 0 || &*function.qualname == "<module>" {
        return vec![function];
    }
    let Some(text) = sources.lines(&function.filename) else { return vec![function] };
    let mut all: Vec<FunctionUse> = Vec::new();
    for (line, did) in function.lines {
        let first_line = start_of(text, line, &function.qualname).unwrap_or(0);
        match all.last_mut().filter(|last| last.first_line == first_line) {
            Some(last) => {
                last.whole.join(&did);
                last.lines.push((line, did));
            }
            None => all.push(FunctionUse {
                qualname: function.qualname.clone(),
                filename: function.filename.clone(),
                first_line,
                whole: did,
                lines: vec![(line, did)],
            }),
        }
    }
    all
}

fn rows(function: FunctionUse, sources: &mut Sources) -> FunctionLines {
    let text = sources.lines(&function.filename);
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
    let near = |line: u32| function.lines.iter().any(|(with, _)| with.abs_diff(line) <= AROUND);
    let mut did = function.lines.iter().peekable();
    let mut lines = Vec::new();
    let mut row = |line: u32| {
        let figures = did.next_if(|(with, _)| *with == line).map(|(_, did)| LineFigures::from(*did));
        let text = text.and_then(|text| text.get((line as usize).checked_sub(1)?)).cloned();
        if figures.is_some() || text.is_some() && (whole || near(line)) {
            lines.push(LineRow { line, text, figures });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_may_be_given_by_their_ends() {
        assert!(ends_in("/home/me/model.py", "model.py") && ends_in("/home/me/model.py", "me/model.py"));
        assert!(ends_in("/home/me/model.py", "/home/me/model.py") && ends_in("model.py", "./model.py"));
        assert!(!ends_in("/home/me/my_model.py", "model.py") && !ends_in("model.py", "me/model.py"));
        assert!(is_called("Block.forward", "forward") && is_called("Block.forward", "Block.forward"));
        assert!(!is_called("Block.forward", "ward") && !is_called("Block.forward", "Block"));
    }
}
