//! Flame graphs of bytes by call stack: for speedscope, and folded stacks for all tools that read Brendan Gregg's
//! format.
//!
//! Allocations of a backward node appear under the forward call that made the node, with the node as the innermost
//! frame. The weights of a device add up to figures of the summary. `Peak` adds up to its allocated bytes at the peak,
//! `Leaks` to the bytes allocated at the end, `Total` to all bytes ever allocated.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};
use serde_json::json;

use super::block_sums::{BlockSum, BlockSums, FlameWeight};
use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_input::printable;
use memtrace_insight::passes::{Analysis, FirstPass};
use memtrace_replay::Contexts;

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
    let mut sums = BlockSums::new(process, window, of, |block, _| (block.site.stack, block.site.context));
    Analysis::with_observer(recording, process.trace_index(), &FirstPass::of_process(process), &mut sums, progress);
    let devices: Vec<DeviceSites> = sums.finish().map(|(device, sites)| (device_name(device), sites)).collect();
    let written = match format {
        FlameFormat::Speedscope => speedscope(process, of, &devices, BufWriter::new(out)),
        FlameFormat::Folded => folded(process.definitions(), &devices, BufWriter::new(out)),
    };
    written.map_err(Error::io("cannot write the flame graph"))
}

/// The name of a device, and its blocks by allocation site.
type DeviceSites = (String, Vec<(AllocationSite, BlockSum)>);

/// Where bytes were allocated: the stack, and the autograd node or module call.
pub(super) type AllocationSite = (StackId, ContextId);

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

fn folded(definitions: &Definitions, devices: &[DeviceSites], mut out: impl Write) -> std::io::Result<()> {
    let contexts = Contexts::of(definitions);
    for (device, sites) in devices {
        // Sites with the same text share a line.
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (site, sum) in sites {
            let mut line = if devices.len() > 1 { vec![device.clone()] } else { Vec::new() };
            let path = path(definitions, &contexts, *site);
            line.extend(path.iter().map(|element| printable::folded_frame(&element.text(definitions))));
            *lines.entry(line.join(";")).or_default() += sum.bytes;
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
    devices: &[DeviceSites],
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
        for (site, sum) in sites {
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
            weights.push(sum.bytes);
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
