//! Flame graphs of bytes by call stack: for speedscope, and folded stacks for everything that reads Brendan Gregg's format.
//!
//! What a backward node allocates stands under the forward call that made the node, with the node as the innermost frame. The weights of a
//! device add up to what the summary says: of the peak to its allocated bytes, of leaks to what is there at the end, of everything to
//! all bytes allocated.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};

use memtrace_trace::event::Event;
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};
use serde_json::json;

use super::window::Window;
use memtrace_input::AddressHashing;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{Birth, Judged, Lives, Story};
use memtrace_replay::{Contexts, Names, Usage};

/// Which bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlameOf {
    /// What was there when most was allocated within the window.
    #[default]
    Peak,
    /// What was allocated within the window and is there when it ends.
    Leaks,
    /// All that was allocated within the window.
    Total,
}

impl FlameOf {
    const fn text(self) -> &'static str {
        match self {
            FlameOf::Peak => "at the peak",
            FlameOf::Leaks => "never freed",
            FlameOf::Total => "all allocations",
        }
    }
}

/// The file's form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlameForm {
    /// <https://www.speedscope.app/file-format-schema.json>: a profile for each device.
    Speedscope,
    /// `outermost;...;innermost bytes` a line; with several devices each is a frame around all.
    Folded,
}

/// Writes a flame graph of what a window shows. `progress` hears how many of the process's events have been read.
///
/// # Errors
///
/// The sink's.
pub fn flame(
    process: &Process,
    window: &Window,
    of: FlameOf,
    form: FlameForm,
    out: impl Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let mut sums = Sums::new(process, window, of);
    Story::with(recording, process.survey(), &Names::of(recording), &mut sums, progress);
    let devices = sums.finish().map(|(device, places)| (device_name(device), places));
    let devices: Vec<(String, Vec<(Place, u64)>)> = devices.collect();
    let written = match form {
        FlameForm::Speedscope => speedscope(process, of, &devices, BufWriter::new(out)),
        FlameForm::Folded => folded(process.definitions(), &devices, BufWriter::new(out)),
    };
    written.map_err(Error::io("cannot write the flame graph"))
}

/// Where bytes come from.
pub(super) type Place = (StackId, ContextId);

/// One device's bytes by place.
#[derive(Default)]
struct Bytes {
    level: u64,
    /// The number of the event that reached the peak, and its level.
    peak: Option<(u64, u64)>,
    /// What was added for an older peak is void.
    generation: u64,
    by_place: HashMap<Place, (u64, u64), AddressHashing>,
}

impl Bytes {
    fn add(&mut self, birth: &Birth) {
        let (generation, bytes) = self.by_place.entry((birth.stack, birth.context)).or_default();
        if *generation != self.generation {
            (*generation, *bytes) = (self.generation, 0);
        }
        *bytes += birth.size;
    }

    /// The level is about to change by an event of the window.
    fn begin(&mut self, window: &Window) {
        if self.peak.is_none() {
            self.peak = Some((window.first().saturating_sub(1), self.level));
        }
    }

    /// Most first.
    fn finish(self) -> Vec<(Place, u64)> {
        let now = self.generation;
        let all = self.by_place.into_iter().filter(|(_, (generation, bytes))| *generation == now && *bytes > 0);
        let mut all: Vec<_> = all.map(|(place, (_, bytes))| (place, bytes)).collect();
        all.sort_by_key(|(place, bytes)| (std::cmp::Reverse(*bytes), *place));
        all
    }
}

/// Adds up bytes by place, over blocks' lives.
pub(super) struct Sums<'a> {
    window: &'a Window,
    of: FlameOf,
    devices: BTreeMap<i16, Bytes>,
}

impl<'a> Sums<'a> {
    /// Of the devices that the window is about.
    pub(super) fn new(process: &Process, window: &'a Window, of: FlameOf) -> Sums<'a> {
        let devices = window.lanes(process).keys().map(|device| (*device, Bytes::default())).collect();
        Sums { window, of, devices }
    }

    /// Each device's bytes by place, most first.
    pub(super) fn finish(self) -> impl Iterator<Item = (i16, Vec<(Place, u64)>)> {
        self.devices.into_iter().map(|(device, bytes)| (device, bytes.finish()))
    }
}

impl Lives for Sums<'_> {
    fn began(&mut self, device: i16, birth: &Birth, _: &Usage) {
        let Some(bytes) = self.devices.get_mut(&device).filter(|_| self.window.has_size(birth.size)) else { return };
        if self.window.is_past(birth.seq) {
            return;
        }
        let inside = self.window.holds(birth.seq);
        if inside {
            bytes.begin(self.window);
        }
        bytes.level += birth.size;
        match self.of {
            FlameOf::Total if inside => bytes.add(birth),
            FlameOf::Peak if inside && bytes.peak.is_none_or(|(_, level)| bytes.level > level) => {
                bytes.peak = Some((birth.seq, bytes.level));
                bytes.generation += 1;
            }
            _ => {}
        }
    }

    fn ended(&mut self, device: i16, birth: &Birth, _: &Judged, _: FrameId, free: Option<&Event>) {
        let Some(bytes) = self.devices.get_mut(&device).filter(|_| self.window.has_size(birth.size)) else { return };
        if let Some(free) = free.filter(|free| !self.window.is_past(free.seq)) {
            if self.window.holds(free.seq) {
                bytes.begin(self.window);
            }
            bytes.level = bytes.level.saturating_sub(birth.size);
        }
        let Some(free) = self.window.shows(device, birth, free) else { return };
        match self.of {
            FlameOf::Leaks if free.is_none() && self.window.holds(birth.seq) => bytes.add(birth),
            // Where nothing happens in the window it is as it was all along.
            FlameOf::Peak if bytes.peak.is_none_or(|(peak, _)| birth.seq <= peak) => bytes.add(birth),
            _ => {}
        }
    }
}

/// `GPU 0`, or the CPU.
pub(super) fn device_name(device: i16) -> String {
    if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") }
}

/// The stack that what was allocated there is accounted to: a node's forward call, where it is known.
pub(super) fn accounted(definitions: &Definitions, stack: StackId, context: ContextId) -> StackId {
    match definitions.context(context) {
        Some(context) if !context.forward.is_none() => context.forward,
        _ => stack,
    }
}

/// One step of a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Step<'a> {
    Frame(FrameId),
    Node(&'a str),
    Unknown,
}

impl Step<'_> {
    /// `forward (model.py:12)`, `[autograd] MmBackward0`.
    pub(super) fn text(&self, definitions: &Definitions) -> String {
        match self {
            Step::Frame(id) => definitions.frame(*id).map_or(String::new(), |frame| match frame.line {
                0 => format!("{} ({})", frame.name, frame.filename),
                line => format!("{} ({}:{line})", frame.name, frame.filename),
            }),
            Step::Node(node) => format!("[autograd] {node}"),
            Step::Unknown => "[no stack]".to_owned(),
        }
    }
}

/// A place's path, outermost first; never empty.
pub(super) fn path<'a>(definitions: &'a Definitions, contexts: &Contexts, (stack, context): Place) -> Vec<Step<'a>> {
    let accounted = accounted(definitions, stack, context);
    let frames = definitions.walk_ids(accounted).filter(|(_, id)| definitions.frame(*id).is_some());
    let mut path: Vec<Step<'a>> = frames.map(|(_, id)| Step::Frame(id)).collect();
    path.reverse();
    if let Some(node) = definitions.context(contexts.node(context)) {
        path.push(Step::Node(&node.node));
    }
    if path.is_empty() {
        path.push(Step::Unknown);
    }
    path
}

fn folded(
    definitions: &Definitions,
    devices: &[(String, Vec<(Place, u64)>)],
    mut out: impl Write,
) -> std::io::Result<()> {
    let contexts = Contexts::of(definitions);
    // Semicolons and line ends are the format's own.
    let clean = |text: &str| text.replace(';', ":").replace(['\n', '\r'], " ");
    for (device, places) in devices {
        // Places that read the same are one line.
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (place, bytes) in places {
            let mut line = if devices.len() > 1 { vec![device.clone()] } else { Vec::new() };
            line.extend(path(definitions, &contexts, *place).iter().map(|step| clean(&step.text(definitions))));
            *lines.entry(line.join(";")).or_default() += bytes;
        }
        for (line, bytes) in lines {
            writeln!(out, "{line} {bytes}")?;
        }
    }
    out.flush()
}

fn speedscope<'a>(
    process: &'a Process,
    of: FlameOf,
    devices: &[(String, Vec<(Place, u64)>)],
    mut out: impl Write,
) -> std::io::Result<()> {
    let definitions = process.definitions();
    let contexts = Contexts::of(definitions);
    let mut numbers: HashMap<Step<'a>, usize> = HashMap::new();
    let mut frames = Vec::new();
    let who = match process.rank() {
        Some(rank) => format!("rank {rank}"),
        None => format!("pid {}", process.pid()),
    };
    let mut profiles = Vec::new();
    for (device, places) in devices {
        let (mut samples, mut weights) = (Vec::new(), Vec::new());
        for (place, bytes) in places {
            let number = |step: Step<'a>| match numbers.get(&step) {
                Some(number) => *number,
                None => {
                    frames.push(match &step {
                        Step::Frame(id) => definitions.frame(*id).map_or(json!({ "name": "" }), |frame| {
                            let mut told = json!({ "name": &*frame.name, "file": &*frame.filename });
                            if frame.line > 0 {
                                told["line"] = frame.line.into();
                            }
                            told
                        }),
                        Step::Node(node) => json!({ "name": format!("[autograd] {node}") }),
                        Step::Unknown => json!({ "name": "[no stack]" }),
                    });
                    numbers.insert(step, frames.len() - 1);
                    frames.len() - 1
                }
            };
            samples.push(path(definitions, &contexts, *place).into_iter().map(number).collect::<Vec<usize>>());
            weights.push(*bytes);
        }
        profiles.push(json!({
            "type": "sampled",
            "name": format!("{device}, {who}: {}", of.text()),
            "unit": "bytes",
            "startValue": 0,
            "endValue": weights.iter().sum::<u64>(),
            "samples": samples,
            "weights": weights,
        }));
    }
    let file = json!({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": concat!("memtrace ", env!("CARGO_PKG_VERSION")),
        "name": format!("memory {}", of.text()),
        "activeProfileIndex": 0,
        "shared": { "frames": frames },
        "profiles": profiles,
    });
    serde_json::to_writer(&mut out, &file)?;
    out.flush()
}
