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
use memtrace_input::AddressBuildHasher;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_insight::passes::{Analysis, BlockAllocation, BlockClassification, BlockObserver, FirstPass};
use memtrace_replay::{Contexts, Usage};

/// The bytes that a flame graph shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlameWeight {
    /// The blocks allocated at the window's peak of allocated bytes.
    #[default]
    Peak,
    /// Blocks allocated within the window and still allocated at its end.
    Leaks,
    /// All allocations within the window.
    Total,
}

impl FlameWeight {
    const fn text(self) -> &'static str {
        match self {
            FlameWeight::Peak => "at the peak",
            FlameWeight::Leaks => "never freed",
            FlameWeight::Total => "all allocations",
        }
    }
}

/// The format of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlameFormat {
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
pub fn flame_graph(
    process: &Process,
    window: &Window,
    of: FlameWeight,
    format: FlameFormat,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let mut sums = SiteSums::new(process, window, of);
    Analysis::with_observer(recording, process.trace_index(), &FirstPass::of_process(process), &mut sums, progress);
    let devices = sums.finish().map(|(device, sites)| (device_name(device), sites));
    let devices: Vec<(String, Vec<(AllocationSite, u64)>)> = devices.collect();
    let written = match format {
        FlameFormat::Speedscope => speedscope(process, of, &devices, BufWriter::new(out)),
        FlameFormat::Folded => folded(process.definitions(), &devices, BufWriter::new(out)),
    };
    written.map_err(Error::io("cannot write the flame graph"))
}

/// Where bytes were allocated: the stack, and the autograd node or module call.
pub(super) type AllocationSite = (StackId, ContextId);

/// The bytes of one device by allocation site.
#[derive(Default)]
struct DeviceBytes {
    current: u64,
    /// `seq` of the event that reached the peak, and its allocated bytes.
    peak: Option<(u64, u64)>,
    /// Entries of an older generation belong to an older peak and are invalid.
    generation: u64,
    by_site: HashMap<AllocationSite, (u64, u64), AddressBuildHasher>,
}

impl DeviceBytes {
    fn add(&mut self, block: &BlockAllocation) {
        let (generation, bytes) = self.by_site.entry((block.site.stack, block.site.context)).or_default();
        if *generation != self.generation {
            (*generation, *bytes) = (self.generation, 0);
        }
        *bytes += block.memory.size;
    }

    /// Prepares for an event of the window, before it changes the level.
    fn start_peak(&mut self, window: &Window) {
        if self.peak.is_none() {
            self.peak = Some((window.first().saturating_sub(1), self.current));
        }
    }

    /// The bytes by allocation site, most first.
    fn finish(self) -> Vec<(AllocationSite, u64)> {
        let now = self.generation;
        let all = self.by_site.into_iter().filter(|(_, (generation, bytes))| *generation == now && *bytes > 0);
        let mut all: Vec<_> = all.map(|(site, (_, bytes))| (site, bytes)).collect();
        all.sort_by_key(|(site, bytes)| (std::cmp::Reverse(*bytes), *site));
        all
    }
}

/// SiteSums up bytes by allocation site over block lifetimes.
pub(super) struct SiteSums<'a> {
    window: &'a Window,
    of: FlameWeight,
    devices: BTreeMap<i16, DeviceBytes>,
}

impl<'a> SiteSums<'a> {
    /// Makes sums for the devices of the window.
    pub(super) fn new(process: &Process, window: &'a Window, of: FlameWeight) -> SiteSums<'a> {
        let devices = window.sources(process).keys().map(|device| (*device, DeviceBytes::default())).collect();
        SiteSums { window, of, devices }
    }

    /// The bytes of each device by allocation site, most first.
    pub(super) fn finish(self) -> impl Iterator<Item = (i16, Vec<(AllocationSite, u64)>)> {
        self.devices.into_iter().map(|(device, bytes)| (device, bytes.finish()))
    }
}

impl BlockObserver for SiteSums<'_> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, _: &Usage) {
        let Some(bytes) = self.devices.get_mut(&device).filter(|_| self.window.has_size(block.memory.size)) else {
            return;
        };
        if self.window.is_past(block.seq) {
            return;
        }
        let is_inside = self.window.contains(block.seq);
        if is_inside {
            bytes.start_peak(self.window);
        }
        bytes.current += block.memory.size;
        match self.of {
            FlameWeight::Total if is_inside => bytes.add(block),
            FlameWeight::Peak if is_inside && bytes.peak.is_none_or(|(_, peak)| bytes.current > peak) => {
                bytes.peak = Some((block.seq, bytes.current));
                bytes.generation += 1;
            }
            _ => {}
        }
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        _: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        let Some(bytes) = self.devices.get_mut(&device).filter(|_| self.window.has_size(block.memory.size)) else {
            return;
        };
        if let Some(free) = free.filter(|free| !self.window.is_past(free.seq)) {
            if self.window.contains(free.seq) {
                bytes.start_peak(self.window);
            }
            bytes.current = bytes.current.saturating_sub(block.memory.size);
        }
        let Some(free) = self.window.shows_block(device, block, free) else { return };
        match self.of {
            FlameWeight::Leaks if free.is_none() && self.window.contains(block.seq) => bytes.add(block),
            // Without an event in the window, all its blocks were allocated all the time.
            FlameWeight::Peak if bytes.peak.is_none_or(|(peak, _)| block.seq <= peak) => bytes.add(block),
            _ => {}
        }
    }
}

/// Formats a device: `GPU 0`, or `CPU tensors`.
pub(super) fn device_name(device: i16) -> String {
    if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") }
}

/// The stack to which an allocation is attributed: the forward call of a node if known, else the allocating stack.
pub(super) fn attributed_stack(definitions: &Definitions, stack: StackId, context: ContextId) -> StackId {
    match definitions.context(context) {
        Some(context) if !context.forward.is_none() => context.forward,
        _ => stack,
    }
}

/// One element of a path from the outermost frame to an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum PathElement<'a> {
    Frame(FrameId),
    Node(&'a str),
    Unknown,
}

impl PathElement<'_> {
    /// Formats an element: `forward (model.py:12)` or `[autograd] MmBackward0`.
    pub(super) fn text(&self, definitions: &Definitions) -> String {
        match self {
            PathElement::Frame(id) => definitions.frame(*id).map_or(String::new(), |frame| match frame.line {
                0 => format!("{} ({})", frame.name, frame.filename),
                line => format!("{} ({}:{line})", frame.name, frame.filename),
            }),
            PathElement::Node(node) => format!("[autograd] {node}"),
            PathElement::Unknown => "[no stack]".to_owned(),
        }
    }
}

/// The path of an allocation site, outermost first; never empty.
pub(super) fn path<'a>(
    definitions: &'a Definitions,
    contexts: &Contexts,
    (stack, context): AllocationSite,
) -> Vec<PathElement<'a>> {
    let stack = attributed_stack(definitions, stack, context);
    let frames = definitions.walk_ids(stack).filter(|(_, id)| definitions.frame(*id).is_some());
    let mut path: Vec<PathElement<'a>> = frames.map(|(_, id)| PathElement::Frame(id)).collect();
    path.reverse();
    if let Some(node) = definitions.context(contexts.node(context)) {
        path.push(PathElement::Node(&node.node));
    }
    if path.is_empty() {
        path.push(PathElement::Unknown);
    }
    path
}

fn folded(
    definitions: &Definitions,
    devices: &[(String, Vec<(AllocationSite, u64)>)],
    mut out: impl Write,
) -> std::io::Result<()> {
    let contexts = Contexts::of(definitions);
    for (device, sites) in devices {
        // Sites with the same text share a line.
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (site, bytes) in sites {
            let mut line = if devices.len() > 1 { vec![device.clone()] } else { Vec::new() };
            let path = path(definitions, &contexts, *site);
            line.extend(path.iter().map(|element| printable::folded_frame(&element.text(definitions))));
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
    of: FlameWeight,
    devices: &[(String, Vec<(AllocationSite, u64)>)],
    mut out: impl Write,
) -> std::io::Result<()> {
    let definitions = process.definitions();
    let contexts = Contexts::of(definitions);
    let mut numbers: HashMap<PathElement<'a>, usize> = HashMap::new();
    let mut frames = Vec::new();
    let process_name = match process.rank() {
        Some(rank) => format!("rank {rank}"),
        None => format!("pid {}", process.pid()),
    };
    let mut profiles = Vec::new();
    for (device, sites) in devices {
        let (mut samples, mut weights) = (Vec::new(), Vec::new());
        for (site, bytes) in sites {
            let number = |element: PathElement<'a>| match numbers.get(&element) {
                Some(number) => *number,
                None => {
                    frames.push(match &element {
                        PathElement::Frame(id) => definitions.frame(*id).map_or(json!({ "name": "" }), |frame| {
                            // A viewer shows these texts as they are.
                            let (name, file) = (printable::line(&frame.name), printable::line(&frame.filename));
                            let mut description = json!({ "name": name, "file": file });
                            if frame.line > 0 {
                                description["line"] = frame.line.into();
                            }
                            description
                        }),
                        PathElement::Node(node) => json!({ "name": printable::line(&format!("[autograd] {node}")) }),
                        PathElement::Unknown => json!({ "name": "[no stack]" }),
                    });
                    numbers.insert(element, frames.len() - 1);
                    frames.len() - 1
                }
            };
            samples.push(path(definitions, &contexts, *site).into_iter().map(number).collect::<Vec<usize>>());
            weights.push(*bytes);
        }
        profiles.push(json!({
            "type": "sampled",
            "name": format!("{device}, {process_name}: {}", of.text()),
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
    out.write_all(printable::json(file.to_string()).as_bytes())?;
    out.flush()
}
