//! A trace for <https://ui.perfetto.dev>. It shows allocated memory over time as counters and every block as a slice,
//! beside the program's steps, phases and named ranges.
//!
//! Blocks overlap in any way, but slices of one track must not. So each block takes the lowest free row on its device
//! while it is allocated, and each track holds one row and one category. Perfetto merges tracks with the same name.
//! The counters of a device are exact at every event. The counters of its categories come from the curve of
//! [`super::timeline`], because a category is known only when a block's lifetime ends. No peak is lost.

mod packets;
mod proto;

use std::collections::{BTreeMap, HashMap};
use std::io::{BufWriter, Write};

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};

use super::flame_graph::{attributed_stack, device_name};
use super::named_ranges::{NamedRange, NamedRanges, Rows};
use super::timeline::curve::CurveBuilder;
use super::window::Window;
use memtrace_input::AddressBuildHasher;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockObserver, Category, FirstPass, Phase, ProgramPosition,
};
use memtrace_replay::{Names, Replay, Usage};

use packets::{PacketWriter, Track, Value};
use proto::{ProcessDescriptor, TrackDescriptor};

/// The maximum number of points of a device's curve of categories.
const MAX_CURVE_POINTS: u64 = 1 << 15;
/// The maximum number of frames in a slice's stack.
const MAX_STACK_FRAMES: usize = 32;

/// Writes a window of one process as a Perfetto trace. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn perfetto(process: &Process, window: &Window, out: &mut dyn Write, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let recording = process.recording();
    let first_pass = FirstPass::of_process(process);
    let mut writer = TraceWriter::new(process, window, &first_pass.names, BufWriter::new(out));
    Analysis::with_observer(recording, process.trace_index(), &first_pass, &mut writer, progress);
    writer.finish().map_err(Error::io("cannot write the Perfetto trace"))
}

/// The tracks of one device.
struct DeviceTracks<'w> {
    counters: [Track; 3],
    last_totals: Option<[u64; 3]>,
    parent: Track,
    rows: Rows,
    /// By `seq` of the allocation: the block's row.
    row_by_block: HashMap<u64, u32, AddressBuildHasher>,
    tracks: HashMap<(Category, u32), Track>,
    curve: CurveBuilder<'w>,
}

/// A time range that has not ended. `from` is in nanoseconds since 1970.
struct TimeRange<T> {
    what: T,
    from: u64,
}

/// The tracks of the process, and its running step and phase.
struct ProgramTracks {
    process: Track,
    steps: Track,
    phases: Track,
    step: Option<TimeRange<u32>>,
    phase: Option<TimeRange<Phase>>,
}

/// The times of the window's first and last event, in nanoseconds.
#[derive(Default)]
struct ShownTimes {
    first_ns: Option<u64>,
    last_ns: u64,
}

impl ShownTimes {
    /// A time range cut to the start of the window.
    fn clipped(&self, from: u64, to: u64) -> (u64, u64) {
        let began = self.first_ns.unwrap_or(from);
        (from.max(began), to.max(began))
    }
}

struct TraceWriter<'a, W: Write> {
    packets: PacketWriter<W>,
    window: &'a Window,
    definitions: &'a Definitions,
    names: &'a Names,
    calibration: Calibration,
    devices: BTreeMap<i16, DeviceTracks<'a>>,
    program: ProgramTracks,
    /// With the time of the start in nanoseconds.
    ranges: NamedRanges<'a, u64>,
    range_tracks: HashMap<(ThreadId, u32), Track>,
    stacks: HashMap<(StackId, ContextId), Box<str>, AddressBuildHasher>,
    shown: ShownTimes,
}

impl<'a, W: Write> TraceWriter<'a, W> {
    fn new(process: &'a Process, window: &'a Window, names: &'a Names, out: W) -> TraceWriter<'a, W> {
        let recording = process.recording();
        let mut packets = PacketWriter::new(out);
        let argv = &process.info().argv;
        let process_name = match process.rank() {
            Some(rank) => format!("rank {rank}: {}", argv.join(" ")),
            None => argv.join(" "),
        };
        let descriptor = ProcessDescriptor {
            pid: i32::try_from(process.pid()).ok(),
            cmdline: argv.clone(),
            process_name: Some(if process_name.is_empty() { "memtrace".to_owned() } else { process_name }),
        };
        let descriptor = TrackDescriptor { process: Some(descriptor), ..TrackDescriptor::default() };
        let top = packets.track("", None, 0, descriptor);
        let steps = packets.track("steps", Some(top), 0, TrackDescriptor::default());
        let phases = packets.track("phases", Some(top), 1, TrackDescriptor::default());
        let sources = window.sources(process);
        let devices = sources.keys().enumerate().map(|(i, device)| {
            let place = device_name(*device);
            let rank = 3 + i as i32;
            let parent = packets.track(&place, Some(top), rank, TrackDescriptor::default());
            let counters = ["allocated", "active", "reserved"];
            let mut rank = 0;
            let counters = counters.map(|name| {
                rank += 1;
                packets.counter(&format!("{place} {name}"), parent, rank)
            });
            let curve = CurveBuilder::new(window, *device, recording.event_count(), MAX_CURVE_POINTS);
            let (row_by_block, tracks) = (HashMap::default(), HashMap::new());
            (
                *device,
                DeviceTracks {
                    counters,
                    last_totals: None,
                    parent,
                    rows: Rows::default(),
                    row_by_block,
                    tracks,
                    curve,
                },
            )
        });
        let devices = devices.collect();
        TraceWriter {
            packets,
            window,
            definitions: process.definitions(),
            names,
            calibration: recording.calibration(),
            devices,
            program: ProgramTracks { process: top, steps, phases, step: None, phase: None },
            ranges: NamedRanges::new(process.definitions()),
            range_tracks: HashMap::new(),
            stacks: HashMap::default(),
            shown: ShownTimes::default(),
        }
    }

    fn ns(&self, ticks: u64) -> u64 {
        self.calibration.epoch_ns(ticks)
    }

    fn put_step(&mut self, to: u64) {
        if let Some(step) = self.program.step.take() {
            let range = self.shown.clipped(step.from, to);
            let number = [("step", Value::Number(step.what.into()))];
            self.packets.slice(self.program.steps, range, "step", &format!("step {}", step.what), &number);
        }
    }

    fn put_phase(&mut self, to: u64) {
        if let Some(phase) = self.program.phase.take() {
            let range = self.shown.clipped(phase.from, to);
            self.packets.slice(self.program.phases, range, "phase", phase.what.name(), &[]);
        }
    }

    fn put_range(&mut self, open: &NamedRange<'a, u64>, to: u64) {
        let thread = open.thread();
        if self.shown.first_ns.is_none() {
            return;
        }
        let track = match self.range_tracks.get(&(thread, open.row)) {
            Some(track) => *track,
            None => {
                let definition = self.definitions.thread(thread);
                let name = definition.map_or("ranges".to_owned(), |thread| format!("ranges of {}", thread.name));
                let track = self.packets.track(&name, Some(self.program.process), 2, TrackDescriptor::default());
                self.range_tracks.insert((thread, open.row), track);
                track
            }
        };
        let range = self.shown.clipped(open.kept, to);
        self.packets.slice(track, range, "range", &open.label.text, &[]);
    }

    /// A stack as text, innermost frame first.
    fn stack_text(definitions: &Definitions, stack: StackId, context: ContextId) -> Box<str> {
        let frames = definitions.walk(attributed_stack(definitions, stack, context)).filter_map(|(_, frame)| frame);
        let frames = frames.take(MAX_STACK_FRAMES).map(|frame| match frame.line {
            0 => format!("{} ({})", frame.name, frame.filename),
            line => format!("{} ({}:{line})", frame.name, frame.filename),
        });
        frames.collect::<Vec<_>>().join("\n").into()
    }

    fn finish(mut self) -> std::io::Result<()> {
        let ended = self.shown.last_ns;
        self.put_step(ended);
        self.put_phase(ended);
        let ranges = std::mem::replace(&mut self.ranges, NamedRanges::new(self.definitions));
        for open in ranges.finish() {
            self.put_range(&open, ended);
        }
        for (device, device_tracks) in self.devices {
            let curve = device_tracks.curve.finish(&self.calibration);
            let mut tracks: [Option<Track>; Category::ALL.len()] = [None; Category::ALL.len()];
            let mut before = [0; Category::ALL.len()];
            for point in &curve.points {
                for (i, category) in Category::ALL.into_iter().enumerate() {
                    if point.bytes[i] == before[i] {
                        continue;
                    }
                    let packets = &mut self.packets;
                    let track = *tracks[i].get_or_insert_with(|| {
                        let name = format!("{} {}", device_name(device), category.plural());
                        packets.counter(&name, device_tracks.parent, 10 + i as i32)
                    });
                    packets.count(track, point.time_ns, point.bytes[i]);
                }
                before = point.bytes;
            }
        }
        self.packets.finish()
    }
}

impl<W: Write> BlockObserver for TraceWriter<'_, W> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        let Some(device_tracks) = self.devices.get_mut(&device) else { return };
        device_tracks.curve.allocated(device, block, usage);
        if self.window.has_size(block.memory.size) && !self.window.is_past(block.seq) {
            device_tracks.row_by_block.insert(block.seq, device_tracks.rows.take());
        }
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        evidence: FrameId,
        free: Option<&Event>,
    ) {
        let Some(device_tracks) = self.devices.get_mut(&device) else { return };
        device_tracks.curve.lifetime_ended(device, block, classification, evidence, free);
        let Some(row) = device_tracks.row_by_block.remove(&block.seq) else { return };
        // A block that is freed after the window keeps its row until the end of the window.
        if free.is_some_and(|free| !self.window.is_past(free.seq)) {
            device_tracks.rows.free(row);
        }
        let Some(free) = self.window.shows_block(device, block, free) else { return };
        let category = classification.category;
        let (packets, parent) = (&mut self.packets, device_tracks.parent);
        let track = *device_tracks.tracks.entry((category, row)).or_insert_with(|| {
            let rank = 40 + category as i32;
            packets.track(&format!("blocks: {}", category.plural()), Some(parent), rank, TrackDescriptor::default())
        });
        let to = free.map_or(self.shown.last_ns, |free| self.calibration.epoch_ns(free.ticks));
        // This free can be the window's first event.
        let began = self.shown.first_ns.unwrap_or(if free.is_some() { to } else { 0 });
        let from = self.calibration.epoch_ns(block.ticks).max(began);
        let named = self.names.of_allocation(block.seq).map(|name| name.text());
        let module = self.names.module_path(block.site.event_context, block.seq);
        let definitions = self.definitions;
        let key = (block.site.stack, block.site.context);
        let stack = self
            .stacks
            .entry(key)
            .or_insert_with(|| TraceWriter::<W>::stack_text(definitions, block.site.stack, block.site.context));
        let node = definitions.contexts.get(block.site.context.index()).map_or("", |context| &*context.node);
        let mut annotations = vec![
            ("size", Value::Number(block.memory.size)),
            ("requested", Value::Number(block.memory.requested)),
            ("address", Value::Number(block.memory.addr)),
            ("category", Value::Text(category.name())),
            ("rule", Value::Text(classification.rule.as_str())),
            ("phase", Value::Text(block.phase.name())),
        ];
        if let Some(step) = block.position.step {
            annotations.push(("step", Value::Number(step.into())));
        }
        let texts = [("module", module.as_deref().unwrap_or("")), ("node", node), ("stack", &**stack)];
        annotations
            .extend(texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| (key, Value::Text(text))));
        if free.is_none() {
            annotations.push(("freed", Value::Text("never")));
        }
        packets.slice(track, (from, to), "block", named.as_deref().unwrap_or(category.name()), &annotations);
    }

    fn event_processed(&mut self, replay: &Replay, e: &Event, now: &ProgramPosition) {
        if e.flags.contains(Flags::PREEXISTING) {
            return;
        }
        let at = self.ns(e.ticks);
        if self.window.is_past(e.seq) {
            return;
        }
        if self.window.contains(e.seq) {
            self.shown.first_ns.get_or_insert(at);
            self.shown.last_ns = self.shown.last_ns.max(at);
        }
        if self.program.phase.as_ref().is_none_or(|phase| phase.what != now.phase) {
            if self.shown.first_ns.is_some() {
                self.put_phase(at);
            }
            self.program.phase = Some(TimeRange { what: now.phase, from: at });
        }
        if self.program.step.as_ref().map(|step| step.what) != now.step {
            if self.shown.first_ns.is_some() {
                self.put_step(at);
            }
            self.program.step = now.step.map(|what| TimeRange { what, from: at });
        }
        if e.source == Source::Label {
            if let Some(range) = self.ranges.observe(e, || at) {
                self.put_range(&range, at);
            }
            return;
        }
        if !self.window.contains(e.seq) {
            return;
        }
        for device in replay.devices() {
            let Some(device_tracks) = self.devices.get_mut(&device.device) else { continue };
            let usage = device.allocator.usage();
            let totals = [usage.allocated, usage.active, usage.reserved];
            let before = device_tracks.last_totals.replace(totals);
            for (i, total) in totals.into_iter().enumerate() {
                if before.is_none_or(|before| before[i] != total) {
                    self.packets.count(device_tracks.counters[i], at, total as i64);
                }
            }
            if e.action == Action::Oom && e.device == device.device {
                let requested = [("requested_bytes", Value::Number(e.size))];
                self.packets.instant(device_tracks.parent, at, "out of memory", &requested);
            }
        }
    }
}
