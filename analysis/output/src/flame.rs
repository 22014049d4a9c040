//! Flame graphs of bytes by call stack: for speedscope, and folded stacks for all tools that read Brendan Gregg's
//! format.
//!
//! Allocations of a backward node appear under the forward call that made the node, with the node as the innermost
//! frame. The weights of a device add up to figures of the summary. `Peak` adds up to its allocated bytes at the peak,
//! `Leaks` to the bytes allocated at the end, `Total` to all bytes ever allocated.

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

/// Which bytes to show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlameOf {
    /// The blocks allocated at the window's peak of allocated bytes.
    #[default]
    Peak,
    /// Blocks allocated within the window and still allocated at its end.
    Leaks,
    /// All allocations within the window.
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

/// The format of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlameForm {
    /// <https://www.speedscope.app/file-format-schema.json>: one profile per device.
    Speedscope,
    /// One line `outermost;...;innermost bytes` per stack. With several devices, each device is the outermost frame.
    Folded,
}

/// Writes a flame graph of a window. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
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

/// The source of bytes.
pub(super) type Place = (StackId, ContextId);

/// The bytes of one device by source.
#[derive(Default)]
struct Bytes {
    level: u64,
    /// `seq` of the event that reached the peak, and its allocated bytes.
    peak: Option<(u64, u64)>,
    /// Entries of an older generation belong to an older peak and are invalid.
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

    /// Prepares for an event of the window, before it changes the level.
    fn begin(&mut self, window: &Window) {
        if self.peak.is_none() {
            self.peak = Some((window.first().saturating_sub(1), self.level));
        }
    }

    /// The bytes by source, most first.
    fn finish(self) -> Vec<(Place, u64)> {
        let now = self.generation;
        let all = self.by_place.into_iter().filter(|(_, (generation, bytes))| *generation == now && *bytes > 0);
        let mut all: Vec<_> = all.map(|(place, (_, bytes))| (place, bytes)).collect();
        all.sort_by_key(|(place, bytes)| (std::cmp::Reverse(*bytes), *place));
        all
    }
}

/// Sums up bytes by source over block lifetimes.
pub(super) struct Sums<'a> {
    window: &'a Window,
    of: FlameOf,
    devices: BTreeMap<i16, Bytes>,
}

impl<'a> Sums<'a> {
    /// Takes the devices of the window.
    pub(super) fn new(process: &Process, window: &'a Window, of: FlameOf) -> Sums<'a> {
        let devices = window.lanes(process).keys().map(|device| (*device, Bytes::default())).collect();
        Sums { window, of, devices }
    }

    /// The bytes of each device by source, most first.
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
            // Without an event in the window, all its blocks were allocated all the time.
            FlameOf::Peak if bytes.peak.is_none_or(|(peak, _)| birth.seq <= peak) => bytes.add(birth),
            _ => {}
        }
    }
}

/// Formats a device: `GPU 0`, or `CPU tensors`.
pub(super) fn device_name(device: i16) -> String {
    if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") }
}

/// The stack that an allocation counts for: the forward call of a node if known, else the allocating stack.
pub(super) fn accounted(definitions: &Definitions, stack: StackId, context: ContextId) -> StackId {
    match definitions.context(context) {
        Some(context) if !context.forward.is_none() => context.forward,
        _ => stack,
    }
}

/// One element of a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Step<'a> {
    Frame(FrameId),
    Node(&'a str),
    Unknown,
}

impl Step<'_> {
    /// Formats an element: `forward (model.py:12)` or `[autograd] MmBackward0`.
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

/// The path of a source, outermost first; never empty.
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
    // Semicolons and line ends are separators of the format.
    let clean = |text: &str| text.replace(';', ":").replace(['\n', '\r'], " ");
    for (device, places) in devices {
        // Sources with the same text share a line.
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
