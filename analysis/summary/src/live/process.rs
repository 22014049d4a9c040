//! The state of one process that is being recorded.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memtrace_input::error::{Error, Result};
use memtrace_input::load::{Process, Run};
use memtrace_input::{EventSource, open_run};
use memtrace_insight::passes::{Analysis, Category, FirstPass, PhaseTracker, ProgramPosition};
use memtrace_replay::{Block, BlockState, Change, DeviceReplay, MemoryLocation, Names, Replay};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Reader;
use memtrace_trace::ids::{ContextId, StackId};

use super::growth::Growth;
use super::learned::Learned;
use super::report::{LiveDevice, LiveGrowth, LiveProcessReport, LiveStack, LiveTensor};
use crate::build::missing_state;
use crate::owners::by_owner;
use crate::summary::{CategoryAmount, OwnerBytes};
use crate::totals::totals;
use memtrace_insight::locations::Locations;

/// The maximum number of stacks, and of tensors, in a report.
const MAX_ROWS: usize = 100;
/// The least time between two analyses if the program has run new code, and how many times the duration of the last
/// one.
const MIN_PAUSE: Duration = Duration::from_secs(2);
const PAUSE_FACTOR: u32 = 20;
/// The same if it has not.
const MIN_LONG_PAUSE: Duration = Duration::from_secs(30);
const LONG_PAUSE_FACTOR: u32 = 50;
/// A slower growth than this, in bytes a minute, gives no forecast.
const MIN_FORECAST_GROWTH: i64 = 1 << 20;

/// The memory in use on a device when the driver was asked for it.
#[derive(Clone, Copy, Debug)]
struct Reading {
    total: u64,
    used: u64,
    /// This process's allocations at that time.
    own: u64,
}

/// The pauses between two analyses of all events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnalysisPauses {
    /// If the program has run new code since the last analysis.
    pub after_new_code: Duration,
    /// If it has not. Names of tensors can be read later than the blocks were allocated.
    pub otherwise: Duration,
}

/// The result of [`LiveProcess::advance_with`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advance {
    /// Whether the figures can have changed.
    pub has_changed: bool,
    /// Whether all events were analyzed again.
    pub is_analyzed: bool,
}

/// Follows the trace of one process while it is being written.
#[derive(Debug)]
pub struct LiveProcess {
    path: PathBuf,
    run: Run,
    names: Names,
    learned: Learned,
    state: State,
    /// The number of blocks of the trace before the last analysis, when it ended, and how long it took.
    analyzed_blocks: usize,
    analyzed_at: Instant,
    analysis_took: Duration,
}

/// The state of the process after the events so far.
#[derive(Debug)]
struct State {
    reader: Reader,
    /// The number of blocks of the trace that were read.
    read: usize,
    /// The number of stacks that the analysis knows.
    known_stacks: usize,
    replay: Replay,
    tracker: PhaseTracker,
    /// The position at the end of the analysis.
    analyzed: ProgramPosition,
    step: Option<u32>,
    readings: BTreeMap<i16, Reading>,
    /// By the index of the device in the replay.
    growth: Vec<Growth>,
    /// The allocated bytes before the current event, by the same index.
    levels: Vec<u64>,
    counts: LiveCounts,
    is_outdated: bool,
}

/// The events of the whole recording.
#[derive(Debug, Default)]
struct LiveCounts {
    events: u64,
    lost_events: u64,
    oom_count: u64,
}

impl LiveProcess {
    /// Reads a trace that is being written.
    pub fn open(path: &Path) -> Result<LiveProcess> {
        let began = Instant::now();
        // The analysis has these blocks at least, and perhaps some that are written meanwhile.
        let mut reader = Reader::following(path).map_err(|cause| Error::Trace { path: path.to_owned(), cause })?;
        reader.follow().map_err(|cause| Error::Trace { path: path.to_owned(), cause })?;
        let analyzed_blocks = reader.blocks().len();
        let run = open_run(path)?;
        let process = only(&run, path)?;
        let recording = process.recording();
        let first_pass = FirstPass::of_process(process);
        let mut learned = Learned::default();
        Analysis::with_observer(recording, process.trace_index(), &first_pass, &mut learned, &mut |_| {});
        let (replay, tracker) = (Replay::new(process.trace_index(), None), first_pass.tracker(recording));
        let mut state = State {
            reader,
            read: 0,
            known_stacks: recording.definitions().stacks.len(),
            growth: vec![Growth::default(); replay.devices().len()],
            levels: vec![0; replay.devices().len()],
            replay,
            analyzed: *tracker.now(),
            tracker,
            step: None,
            readings: BTreeMap::new(),
            counts: LiveCounts::default(),
            is_outdated: false,
        };
        state.advance(path)?;
        state.analyzed = *state.tracker.now();
        Ok(LiveProcess {
            path: path.to_owned(),
            run,
            names: first_pass.names,
            learned,
            analyzed_blocks,
            state,
            analyzed_at: Instant::now(),
            analysis_took: began.elapsed(),
        })
    }

    /// Reads what was appended to the trace. Analyzes all events again if the last analysis was long enough ago.
    ///
    /// A trace that was rotated is read from its beginning.
    pub fn advance(&mut self) -> Result<()> {
        let took = self.analysis_took;
        let pauses = AnalysisPauses {
            after_new_code: MIN_PAUSE.max(took * PAUSE_FACTOR),
            otherwise: MIN_LONG_PAUSE.max(took * LONG_PAUSE_FACTOR),
        };
        self.advance_with(&pauses).map(drop)
    }

    /// [`Self::advance`] with these pauses between two analyses.
    pub fn advance_with(&mut self, pauses: &AnalysisPauses) -> Result<Advance> {
        if self.state.reader.is_replaced() {
            return self.analyze();
        }
        let has_changed = self.state.advance(&self.path)?;
        let is_behind = self.state.is_outdated || self.state.read > self.analyzed_blocks;
        let pause = if self.state.is_outdated { pauses.after_new_code } else { pauses.otherwise };
        if is_behind && self.analyzed_at.elapsed() >= pause {
            return self.analyze();
        }
        Ok(Advance { has_changed, is_analyzed: false })
    }

    fn analyze(&mut self) -> Result<Advance> {
        *self = LiveProcess::open(&self.path)?;
        Ok(Advance { has_changed: true, is_analyzed: true })
    }

    /// The bytes in allocated blocks of PyTorch's caching allocator, by device and category.
    pub fn by_category(&self) -> BTreeMap<i16, BTreeMap<Category, u64>> {
        let devices = self.state.replay.devices().iter().filter(|device| device.source == EventSource::Torch);
        let of_device = |device: &DeviceReplay| {
            let mut bytes = BTreeMap::new();
            self.blocks(device).for_each(|(block, _, category)| *bytes.entry(category).or_default() += block.size);
            (device.device, bytes)
        };
        devices.map(of_device).collect()
    }

    /// The allocated blocks of a device, with where they were allocated and with their categories.
    fn blocks<'a>(&'a self, device: &'a DeviceReplay) -> impl Iterator<Item = (&'a Block, AllocationSite, Category)> {
        let allocated = device.allocator.allocated().map(|(_, block)| block);
        allocated.filter(|block| block.state == BlockState::Allocated).map(|block| {
            let place = (block.stack, self.state.tracker.stacks().contexts().node(block.context));
            (block, place, self.learned.category(block.seq, place, &self.names))
        })
    }

    /// The sentence about what a rotated trace lacks, with its path. `None` if nothing is.
    pub fn missing_state(&self) -> Option<String> {
        let missing = missing_state(self.run.processes().first()?)?;
        Some(format!("{}: {missing}", self.path.display()))
    }

    /// The current figures.
    pub fn report(&self) -> LiveProcessReport {
        let mut report = LiveProcessReport {
            trace: self.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            events: self.state.counts.events,
            lost_events: self.state.counts.lost_events,
            oom_count: self.state.counts.oom_count,
            step: self.state.step,
            phase: self.state.tracker.now().phase,
            ..LiveProcessReport::default()
        };
        if let Some(process) = self.run.processes().first() {
            report.dropped_events = process.definitions().rotation.as_ref().map(|rotation| rotation.dropped);
            (report.pid, report.rank, report.world_size) = (process.pid(), process.rank(), process.world_size());
            report.argv.clone_from(&process.info().argv);
            let devices = 0..self.state.replay.devices().len();
            report.devices = devices.map(|slot| self.device(process, slot)).collect();
        }
        report
    }

    fn device(&self, process: &Process, slot: usize) -> LiveDevice {
        let State { replay, readings, growth, .. } = &self.state;
        let device = &replay.devices()[slot];
        let allocator = &device.allocator;
        let (mut by_category, mut by_place, mut tensors) = (BTreeMap::new(), HashMap::new(), Vec::new());
        for (block, place, category) in self.blocks(device) {
            add(by_category.entry(category).or_default(), block.size);
            add(by_place.entry((place, category)).or_default(), block.size);
            if let Some(names) = self.names.of_allocation(block.seq) {
                tensors.push((block.size, block.seq, category, names));
            }
        }
        tensors.sort_by_key(|(bytes, seq, ..)| (std::cmp::Reverse(*bytes), *seq));
        let tensors = tensors.into_iter().take(MAX_ROWS).map(|(bytes, _, category, names)| LiveTensor {
            name: names.text(),
            shape: names.shape.to_string(),
            category,
            bytes,
        });
        let locations = Locations::new(process.definitions(), process.directory());
        let definition =
            u32::try_from(device.device).ok().and_then(|ordinal| process.definitions().devices.get(&ordinal));
        let reading = readings.get(&device.device);
        let total_bytes =
            reading.map(|reading| reading.total).or(definition.map(|d| d.total).filter(|total| *total > 0));
        let own = replay.physical().total(MemoryLocation::Device(device.device)).current;
        // The memory of others and the driver at the reading, and the memory of this process now.
        let used_bytes = reading.map(|reading| (reading.used + own).saturating_sub(reading.own));
        let usage = allocator.usage();
        let per_minute_bytes = growth[slot].per_minute(process.recording().calibration().ns_per_tick());
        let cached = usage.reserved.saturating_sub(usage.allocated);
        let free = total_bytes.zip(used_bytes).map(|(total, used)| total.saturating_sub(used) + cached);
        let oom_in_ns = free.zip(per_minute_bytes.filter(|growth| *growth >= MIN_FORECAST_GROWTH));
        LiveDevice {
            device: device.device,
            name: definition.map(|d| d.name.to_string()).filter(|name| !name.is_empty()),
            total_bytes,
            used_bytes,
            totals: totals(usage),
            highest: totals(allocator.peak()),
            by_category: by_category
                .into_iter()
                .map(|(category, (bytes, blocks))| CategoryAmount { category, bytes, blocks })
                .collect(),
            by_owner: self.owners(process, device.device),
            stacks: largest_stacks(&locations, by_place),
            tensors: tensors.collect(),
            growth: LiveGrowth {
                per_step_bytes: growth[slot].per_step(),
                per_minute_bytes,
                oom_in_ns: oom_in_ns.map(|(free, growth)| (free as f64 / growth as f64 * 60e9) as u64),
            },
        }
    }

    /// The owners of a device's memory.
    fn owners(&self, process: &Process, device: i16) -> Vec<OwnerBytes> {
        let here = MemoryLocation::Device(device);
        let usage = self.state.replay.physical().usage_by_owner().iter();
        let held = usage.filter(|((location, _), usage)| *location == here && usage.current > 0);
        by_owner(held.map(|((_, owner), usage)| (*owner, usage.current)), process.definitions())
    }
}

/// Bytes and the number of blocks.
type Sum = (u64, u64);

fn add(sum: &mut Sum, bytes: u64) {
    *sum = (sum.0 + bytes, sum.1 + 1);
}

/// A stack and its autograd node.
type AllocationSite = (StackId, ContextId);

fn largest_stacks(locations: &Locations<'_>, by_place: HashMap<(AllocationSite, Category), Sum>) -> Vec<LiveStack> {
    let mut places: Vec<((AllocationSite, Category), Sum)> = by_place.into_iter().collect();
    places.sort_by_key(|(key, (bytes, _))| (std::cmp::Reverse(*bytes), *key));
    let row = |(((stack, context), category), (bytes, blocks))| LiveStack {
        location: locations.stack(stack, context).location,
        category,
        bytes,
        blocks,
    };
    places.into_iter().take(MAX_ROWS).map(row).collect()
}

fn only<'a>(run: &'a Run, path: &Path) -> Result<&'a Process> {
    run.processes().first().ok_or_else(|| Error::NoTraces { path: path.to_owned() })
}

impl State {
    /// Reads the events that were appended to the trace. Returns whether there were any.
    fn advance(&mut self, path: &Path) -> Result<bool> {
        self.reader.follow().map_err(|cause| Error::Trace { path: path.to_owned(), cause })?;
        let blocks = self.reader.blocks()[self.read..].to_vec();
        self.read += blocks.len();
        let mut events = Vec::new();
        for block in &blocks {
            match self.reader.decode(block, &mut events) {
                Ok(()) => events.iter().for_each(|event| self.apply(event)),
                Err(lost) => self.counts.lost_events += u64::from(lost.events),
            }
        }
        Ok(!blocks.is_empty())
    }

    fn apply(&mut self, e: &Event) {
        // In a rotated trace, such events recreate what was in use.
        let is_new = !e.flags.contains(Flags::PREEXISTING);
        self.counts.events += u64::from(is_new);
        if e.source == Source::Label {
            self.tracker.observe_label(e);
            return;
        }
        self.is_outdated |= e.stack.index() >= self.known_stacks && !e.stack.is_none() || self.is_of_new_source(e);
        let State { replay, tracker, growth, counts, .. } = self;
        replay.apply(e, |replay, slot, e, change| {
            if matches!(change, Change::Alloc(_) | Change::FreeRequested(_) | Change::Oom) {
                tracker.observe(e);
                counts.oom_count += u64::from(change == Change::Oom);
            }
            if let Some(growth) = growth.get_mut(slot).filter(|_| is_new) {
                growth.changed(e.ticks, replay.devices()[slot].allocator.usage().allocated);
            }
        });
        if e.action == Action::DeviceUsage {
            let own = self.replay.physical().total(MemoryLocation::Device(e.device)).current;
            let reading = Reading { total: e.size, used: e.used_bytes(), own };
            self.readings.insert(e.device, reading);
        }
        let step = self.step_now();
        if step != self.step {
            if let Some(step) = step.filter(|_| is_new) {
                for (growth, level) in self.growth.iter_mut().zip(&self.levels) {
                    growth.step_began(step, e.ticks, *level);
                }
            }
            self.step = step;
        }
        for (level, device) in self.levels.iter_mut().zip(self.replay.devices()) {
            *level = device.allocator.usage().allocated;
        }
    }

    /// Whether an event shows a device, or a better source of one, that the replay does not have.
    fn is_of_new_source(&self, e: &Event) -> bool {
        let Some((device, source)) = EventSource::of(e) else { return false };
        let known = self.replay.devices().iter().find(|known| known.device == device);
        let has_gpu = self.replay.devices().iter().any(|known| known.device >= 0);
        known.map_or(device >= 0 || !has_gpu, |known| source > known.source)
    }

    /// The step of the program. The ranges that PyTorch marks show the steps up to the analysis; after it, the
    /// optimizer steps are counted.
    fn step_now(&self) -> Option<u32> {
        let (now, analyzed) = (self.tracker.now(), &self.analyzed);
        let step = now.step?;
        if Some(step) != analyzed.step || analyzed.optimizer_steps == 0 {
            return Some(step);
        }
        let more = u64::from(now.optimizer_steps.saturating_sub(analyzed.optimizer_steps));
        let per_step = u64::from(analyzed.optimizer_steps).div_ceil(u64::from(step) + 1).max(1);
        Some(step.saturating_add((more / per_step) as u32))
    }
}
