//! A trace for <https://ui.perfetto.dev>. It shows allocated memory over time as counters and every block as a slice,
//! beside the program's steps, phases and named ranges.
//!
//! Blocks overlap in any way, but slices of one track must not. So each block takes the lowest free place on its device
//! while it is allocated, and each track holds one place and one category. Perfetto merges tracks with the same name.
//! The counters of a device are exact at every event. The counters of its categories come from the curve of
//! [`super::timeline`], because a category is known only when a block's lifetime ends. No peak is lost.

mod packets;
mod proto;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufWriter, Write};

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId, ThreadId};

use super::flame::{accounted, device_name};
use super::timeline::curve::CurveBuilder;
use super::window::Window;
use memtrace_input::AddressHashing;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{Birth, Category, Judged, Lives, Moment, Phase, RangeNames, Story};
use memtrace_replay::{Names, Replay, Usage};

use packets::{Packets, Track, Value};
use proto::{ProcessDescriptor, TrackDescriptor};

/// The maximum number of points of a device's curve of categories.
const POINTS: u64 = 1 << 15;
/// The maximum number of frames in a slice's stack.
const FRAMES: usize = 32;
/// The maximum number of named ranges that are open at once.
const MOST_OPEN: usize = 1024;

/// Writes a window of one process as a Perfetto trace. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn perfetto(process: &Process, window: &Window, out: impl Write, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let recording = process.recording();
    let names = Names::of(recording);
    let mut scene = Scene::new(process, window, &names, BufWriter::new(out));
    Story::with(recording, process.survey(), &names, &mut scene, progress);
    scene.finish().map_err(Error::io("cannot write the Perfetto trace"))
}

/// A pool of numbers. The lowest free number is taken first.
#[derive(Default)]
struct Places {
    next: u32,
    free: BTreeSet<u32>,
}

impl Places {
    fn take(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    fn give_back(&mut self, place: u32) {
        self.free.insert(place);
    }
}

/// One device.
struct Device<'w> {
    counters: [Track; 3],
    told: Option<[u64; 3]>,
    parent: Track,
    places: Places,
    /// By `seq` of the allocation: the block's place.
    taken: HashMap<u64, u32, AddressHashing>,
    tracks: HashMap<(Category, u32), Track>,
    curve: CurveBuilder<'w>,
}

/// A time range that has not ended. `from` is in nanoseconds since 1970.
struct Stretch<T> {
    what: T,
    from: u64,
}

/// A named range that has started.
struct Open<'a> {
    event: Event,
    text: &'a str,
    from: u64,
    place: u32,
}

struct Scene<'a, W: Write> {
    packets: Packets<W>,
    window: &'a Window,
    definitions: &'a Definitions,
    names: &'a Names,
    calibration: Calibration,
    devices: BTreeMap<i16, Device<'a>>,
    process: Track,
    steps: Track,
    phases: Track,
    step: Option<Stretch<u32>>,
    phase: Option<Stretch<Phase>>,
    ranges: RangeNames<'a>,
    open: Vec<Open<'a>>,
    range_places: HashMap<ThreadId, Places>,
    range_tracks: HashMap<(ThreadId, u32), Track>,
    stacks: HashMap<(StackId, ContextId), Box<str>, AddressHashing>,
    /// The times of the window's first and last event, in nanoseconds.
    began: Option<u64>,
    ended: u64,
}

impl<'a, W: Write> Scene<'a, W> {
    fn new(process: &'a Process, window: &'a Window, names: &'a Names, out: W) -> Scene<'a, W> {
        let recording = process.recording();
        let mut packets = Packets::new(out);
        let argv = &process.info().argv;
        let who = match process.rank() {
            Some(rank) => format!("rank {rank}: {}", argv.join(" ")),
            None => argv.join(" "),
        };
        let described = ProcessDescriptor {
            pid: i32::try_from(process.pid()).ok(),
            cmdline: argv.clone(),
            process_name: Some(if who.is_empty() { "memtrace".to_owned() } else { who }),
        };
        let described = TrackDescriptor { process: Some(described), ..TrackDescriptor::default() };
        let top = packets.track("", None, 0, described);
        let steps = packets.track("steps", Some(top), 0, TrackDescriptor::default());
        let phases = packets.track("phases", Some(top), 1, TrackDescriptor::default());
        let lanes = window.lanes(process);
        let devices = lanes.keys().enumerate().map(|(i, device)| {
            let place = device_name(*device);
            let rank = 3 + i as i32;
            let parent = packets.track(&place, Some(top), rank, TrackDescriptor::default());
            let counters = ["allocated", "active", "reserved"];
            let mut rank = 0;
            let counters = counters.map(|name| {
                rank += 1;
                packets.counter(&format!("{place} {name}"), parent, rank)
            });
            let curve = CurveBuilder::new(window, *device, recording.event_count(), POINTS);
            let (taken, tracks) = (HashMap::default(), HashMap::new());
            (*device, Device { counters, told: None, parent, places: Places::default(), taken, tracks, curve })
        });
        let devices = devices.collect();
        Scene {
            packets,
            window,
            definitions: process.definitions(),
            names,
            calibration: recording.calibration(),
            devices,
            process: top,
            steps,
            phases,
            step: None,
            phase: None,
            ranges: RangeNames::new(process.definitions()),
            open: Vec::new(),
            range_places: HashMap::new(),
            range_tracks: HashMap::new(),
            stacks: HashMap::default(),
            began: None,
            ended: 0,
        }
    }

    fn ns(&self, ticks: u64) -> u64 {
        self.calibration.epoch_ns(ticks)
    }

    /// A time range cut to the start of the window.
    fn seen(&self, from: u64, to: u64) -> (u64, u64) {
        let began = self.began.unwrap_or(from);
        (from.max(began), to.max(began))
    }

    fn put_step(&mut self, to: u64) {
        if let Some(step) = self.step.take() {
            let stretch = self.seen(step.from, to);
            let number = [("step", Value::Number(step.what.into()))];
            self.packets.slice(self.steps, stretch, "step", &format!("step {}", step.what), &number);
        }
    }

    fn put_phase(&mut self, to: u64) {
        if let Some(phase) = self.phase.take() {
            let stretch = self.seen(phase.from, to);
            self.packets.slice(self.phases, stretch, "phase", phase.what.name(), &[]);
        }
    }

    fn observe_label(&mut self, e: &Event, at: u64) {
        let Some(label) = self.ranges.label(e) else { return };
        if e.action == Action::RangeStart {
            if self.open.len() < MOST_OPEN {
                let place = self.range_places.entry(e.thread).or_default().take();
                self.open.push(Open { event: *e, text: &label.text, from: at, place });
            }
            return;
        }
        let is_it = |open: &Open<'_>| match (e.addr, e.size) {
            (0, 0) => open.event.size == 0 && (open.event.thread, open.event.stream) == (e.thread, e.stream),
            (0, number) => open.event.size == number,
            (label, _) => open.event.addr == label && open.event.thread == e.thread,
        };
        // A `record_function` range can end on another thread, when a future completes.
        let elsewhere = |open: &Open<'_>| e.addr != 0 && open.event.addr == e.addr;
        let index = self.open.iter().rposition(is_it).or_else(|| self.open.iter().rposition(elsewhere));
        if let Some(index) = index {
            let open = self.open.remove(index);
            self.put_range(&open, at);
        }
    }

    fn put_range(&mut self, open: &Open<'_>, to: u64) {
        let thread = open.event.thread;
        if let Some(places) = self.range_places.get_mut(&thread) {
            places.give_back(open.place);
        }
        if self.began.is_none() {
            return;
        }
        let track = match self.range_tracks.get(&(thread, open.place)) {
            Some(track) => *track,
            None => {
                let told = self.definitions.thread(thread);
                let name = told.map_or("ranges".to_owned(), |thread| format!("ranges of {}", thread.name));
                let track = self.packets.track(&name, Some(self.process), 2, TrackDescriptor::default());
                self.range_tracks.insert((thread, open.place), track);
                track
            }
        };
        let stretch = self.seen(open.from, to);
        self.packets.slice(track, stretch, "range", open.text, &[]);
    }

    /// A stack as text, innermost frame first.
    fn stack_text(definitions: &Definitions, stack: StackId, context: ContextId) -> Box<str> {
        let frames = definitions.walk(accounted(definitions, stack, context)).filter_map(|(_, frame)| frame);
        let frames = frames.take(FRAMES).map(|frame| match frame.line {
            0 => format!("{} ({})", frame.name, frame.filename),
            line => format!("{} ({}:{line})", frame.name, frame.filename),
        });
        frames.collect::<Vec<_>>().join("\n").into()
    }

    fn finish(mut self) -> std::io::Result<()> {
        let ended = self.ended;
        self.put_step(ended);
        self.put_phase(ended);
        for open in std::mem::take(&mut self.open) {
            self.put_range(&open, ended);
        }
        for (device, known) in self.devices {
            let curve = known.curve.finish(&self.calibration);
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
                        packets.counter(&name, known.parent, 10 + i as i32)
                    });
                    packets.count(track, point.time_ns, point.bytes[i]);
                }
                before = point.bytes;
            }
        }
        self.packets.finish()
    }
}

impl<W: Write> Lives for Scene<'_, W> {
    fn began(&mut self, device: i16, birth: &Birth, usage: &Usage) {
        let Some(known) = self.devices.get_mut(&device) else { return };
        known.curve.began(device, birth, usage);
        if self.window.has_size(birth.size) && !self.window.is_past(birth.seq) {
            known.taken.insert(birth.seq, known.places.take());
        }
    }

    fn ended(&mut self, device: i16, birth: &Birth, judged: &Judged, evidence: FrameId, free: Option<&Event>) {
        let Some(known) = self.devices.get_mut(&device) else { return };
        known.curve.ended(device, birth, judged, evidence, free);
        let Some(place) = known.taken.remove(&birth.seq) else { return };
        // A block that is freed after the window keeps its place until the end of the window.
        if free.is_some_and(|free| !self.window.is_past(free.seq)) {
            known.places.give_back(place);
        }
        let Some(free) = self.window.shows(device, birth, free) else { return };
        let category = judged.category;
        let (packets, parent) = (&mut self.packets, known.parent);
        let track = *known.tracks.entry((category, place)).or_insert_with(|| {
            let rank = 40 + category as i32;
            packets.track(&format!("blocks: {}", category.plural()), Some(parent), rank, TrackDescriptor::default())
        });
        let to = free.map_or(self.ended, |free| self.calibration.epoch_ns(free.ticks));
        // This free can be the window's first event.
        let began = self.began.unwrap_or(if free.is_some() { to } else { 0 });
        let from = self.calibration.epoch_ns(birth.ticks).max(began);
        let named = self.names.of_alloc(birth.seq).map(|name| name.text());
        let module = self.names.module_path(birth.within, birth.seq);
        let definitions = self.definitions;
        let key = (birth.stack, birth.context);
        let stack =
            self.stacks.entry(key).or_insert_with(|| Scene::<W>::stack_text(definitions, birth.stack, birth.context));
        let node = definitions.contexts.get(birth.context.index()).map_or("", |context| &*context.node);
        let mut says = vec![
            ("size", Value::Number(birth.size)),
            ("requested", Value::Number(birth.requested)),
            ("address", Value::Number(birth.addr)),
            ("category", Value::Text(category.name())),
            ("rule", Value::Text(judged.rule)),
            ("phase", Value::Text(birth.phase.name())),
        ];
        if let Some(step) = birth.at.step {
            says.push(("step", Value::Number(step.into())));
        }
        let texts = [("module", module.as_deref().unwrap_or("")), ("node", node), ("stack", &**stack)];
        says.extend(texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| (key, Value::Text(text))));
        if free.is_none() {
            says.push(("freed", Value::Text("never")));
        }
        packets.slice(track, (from, to), "block", named.as_deref().unwrap_or(category.name()), &says);
    }

    fn passed(&mut self, replay: &Replay, e: &Event, now: &Moment) {
        if e.flags.contains(Flags::BEFORE) {
            return;
        }
        let at = self.ns(e.ticks);
        if self.window.is_past(e.seq) {
            return;
        }
        if self.window.holds(e.seq) {
            self.began.get_or_insert(at);
            self.ended = self.ended.max(at);
        }
        if self.phase.as_ref().is_none_or(|phase| phase.what != now.phase) {
            if self.began.is_some() {
                self.put_phase(at);
            }
            self.phase = Some(Stretch { what: now.phase, from: at });
        }
        if self.step.as_ref().map(|step| step.what) != now.step {
            if self.began.is_some() {
                self.put_step(at);
            }
            self.step = now.step.map(|what| Stretch { what, from: at });
        }
        if e.source == Source::Label {
            self.observe_label(e, at);
            return;
        }
        if !self.window.holds(e.seq) {
            return;
        }
        for seen in replay.devices() {
            let Some(known) = self.devices.get_mut(&seen.device) else { continue };
            let usage = seen.allocator.usage();
            let totals = [usage.allocated, usage.active, usage.reserved];
            let before = known.told.replace(totals);
            for (i, total) in totals.into_iter().enumerate() {
                if before.is_none_or(|before| before[i] != total) {
                    self.packets.count(known.counters[i], at, total as i64);
                }
            }
            if e.action == Action::Oom && e.device == seen.device {
                let wanted = [("wanted", Value::Number(e.size))];
                self.packets.instant(known.parent, at, "out of memory", &wanted);
            }
        }
    }
}
