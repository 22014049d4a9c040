//! The data of the HTML report: every block with its lifetime, from which the page draws any view at any point in time.
//!
//! The data is written while the recording streams, so memory grows with blocks in use and distinct stacks, not with
//! events. A recording with few enough events is complete. Of a longer one, the page lists the largest blocks one by
//! one and adds up the rest at points that [`selection`] chooses. Then all totals are still exact.

mod annotations;
mod dictionary;
mod encode;
mod rank_totals;
mod selection;
mod seq_range;

use std::io::Write;

use memtrace_trace::event::{Action, Event, Source};
use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{FrameId, StackId};
use serde_json::{Value, json};

use crate::sources::{SourceAccess, SourceFiles};
use memtrace_input::EventSource;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockMemory, BlockModules, BlockObserver, Category, FirstPass,
    FirstPassOptions, Phase, ProgramPosition, ReplayObserver, StageFollower,
};
use memtrace_insight::rules::{CustomRules, ServingStage};
use memtrace_replay::{MemoryLocation, Replay, Usage};

pub use rank_totals::{RankSeries, rank_totals};

use annotations::Annotations;
use dictionary::Dictionary;
use encode::{Clock, Column, ROWS, Records, Rising, Tag};
use selection::{DeviceSelection, Listed, Point, Selector};
use seq_range::{RangePosition, SeqRange};

/// The maximum number of changes of a line that the page draws. Later changes are counted only.
const MAX_CHANGES: u64 = 1 << 19;
/// In a recording that is not complete, phases shorter than this part of it are not drawn.
const SHORTEST_PHASE: u64 = 1 << 16;
const CATEGORIES: usize = Category::ALL.len();

/// Options for the page's data.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a closure has none")]
pub struct PageDataOptions<'a> {
    /// Only this device; -1 is the CPU.
    pub device: Option<i16>,
    /// The maximum number of blocks of each device to list one by one, besides those at the marks and at the end.
    /// `None` lists all.
    pub max_blocks: Option<u64>,
    /// Events, by `seq`, at which all blocks are listed.
    pub marks: &'a [u64],
    /// Only this part: its first and its last event, by `seq`. Of each device, the data then has the state before the
    /// first event, the events of the part, and the blocks that were allocated during it.
    pub window: Option<(u64, u64)>,
    /// Modules have the paths that they had at about this event. The blocks of the summary's peak are in the same
    /// modules as in the summary if this is its `seq`.
    pub modules_at: u64,
    /// Whether a frame belongs to an installed package or to Python itself.
    pub is_library: &'a dyn Fn(&Frame) -> bool,
    /// The source files that may be quoted.
    pub sources: SourceAccess,
    /// The rules that give the blocks their custom categories.
    pub custom_rules: Option<&'a CustomRules>,
}

/// Writes the data of one process. `progress` receives the number of events read so far.
///
/// # Errors
///
/// The errors of `out`.
pub fn page_data(
    process: &Process,
    options: &PageDataOptions<'_>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let part = options.window.map_or(SeqRange::WHOLE, |(first, last)| SeqRange { first, last });
    let marks: Vec<u64> =
        options.marks.iter().copied().filter(|mark| part.place(*mark) == RangePosition::Inside).collect();
    let mut selector = options.max_blocks.map(|most| Selector::new(process, most, &marks, part));
    let observer = selector.as_mut().map(|selector| selector as &mut dyn ReplayObserver);
    let first_pass =
        FirstPass::with_options(recording, process.trace_index(), &FirstPassOptions::default(), observer, progress);
    let names = &first_pass.names;
    let sources = process.trace_index().sources.iter();
    let sources = sources.filter(|(device, _)| options.device.is_none_or(|only| only == **device));
    let calibration = recording.calibration();
    let begin_ns = process.trace_index().tick_range.map_or(0, |(first, _)| calibration.epoch_ns(first));
    let clock = Clock { calibration, begin_ns };
    let mut devices: Vec<DeviceData> =
        sources.map(|(device, source)| DeviceData::new(*device, *source, clock, part)).collect();
    if let Some(mut selected) = selector.map(Selector::finish) {
        for device in &mut devices {
            device.rest = Some(Rest::new(selected.remove(&device.device).unwrap_or_default(), &marks));
        }
    }
    let events = recording.event_count();
    let shortest_phase = options.max_blocks.map_or(0, |_| events.min(part.length()) / SHORTEST_PHASE);
    let modules = BlockModules::of(process.definitions(), names, options.modules_at);
    let mut writer = PageWriter {
        records: Records::new(out),
        dictionary: Dictionary::new(process.definitions(), names, modules, options.is_library, options.custom_rules),
        annotations: Annotations::new(process.definitions(), devices.len()),
        clock,
        devices,
        phases: PhaseChanges::new(process.definitions(), part, shortest_phase, events / SHORTEST_PHASE),
    };
    Analysis::with_observer(recording, process.trace_index(), &first_pass, &mut writer, progress);
    writer.finish(begin_ns, &mut SourceFiles::of(process, &options.sources)).map_err(Error::io("cannot write the page"))
}

/// Blocks in columns.
#[derive(Debug, Default)]
struct BlockColumns {
    rows: u64,
    all: u64,
    /// `seq` of the free. Empty for blocks that were allocated at the end.
    end: Rising,
    /// The lifetime in events. For blocks that were allocated at the end, `seq` of the allocation.
    lifetime: Column,
    size: Column,
    site: Column,
    address: Column,
    tensor: Column,
    /// By site: the last address.
    last_address: Vec<u64>,
}

impl BlockColumns {
    /// Adds a block that was freed at `end`.
    fn put_freed(&mut self, end: u64, site: usize, tensor: usize, block: &BlockAllocation) {
        self.end.put(end);
        self.lifetime.put(end.saturating_sub(block.seq));
        self.put(site, tensor, &block.memory);
    }

    /// Adds a block that was allocated at the end. Their allocations have no order.
    fn put_live(&mut self, site: usize, tensor: usize, block: &BlockAllocation) {
        self.lifetime.put(block.seq);
        self.put(site, tensor, &block.memory);
    }

    fn put(&mut self, site: usize, tensor: usize, memory: &BlockMemory) {
        self.size.put(memory.size);
        self.site.put(site as u64);
        if self.last_address.len() <= site {
            self.last_address.resize(site + 1, 0);
        }
        // The allocator gives addresses in multiples of 512.
        let change = memory.addr.wrapping_sub(self.last_address[site]) as i64;
        self.last_address[site] = memory.addr;
        let (value, is_unaligned) = if change & 511 == 0 { (change >> 9, 0) } else { (change, 1) };
        self.address.put(encode::zigzag(value) << 1 | is_unaligned);
        self.tensor.put(tensor as u64);
        (self.rows, self.all) = (self.rows + 1, self.all + 1);
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>, tag: Tag, device: u64) {
        if self.rows > 0 {
            let columns = &mut [
                &mut self.end.column,
                &mut self.lifetime,
                &mut self.size,
                &mut self.site,
                &mut self.address,
                &mut self.tensor,
            ];
            records.columns(tag, &[device, self.rows], columns);
            self.rows = 0;
        }
    }
}

/// A value after each of its changes in the part, and before them its value at the last allocation or free before the
/// part.
#[derive(Debug)]
struct Changes {
    part: SeqRange,
    rows: u64,
    all: u64,
    value: u64,
    /// Before the part: the value at the last allocation or free, and after the last change since.
    before: [Option<(u64, u64)>; 2],
    written: u64,
    seq: Rising,
    change: Column,
}

impl Changes {
    fn new(part: SeqRange) -> Changes {
        let (seq, change) = (Rising::default(), Column::default());
        Changes { part, rows: 0, all: 0, value: 0, before: [None; 2], written: 0, seq, change }
    }

    #[inline]
    fn put(&mut self, seq: u64, value: u64) {
        if value == self.value {
            return;
        }
        self.value = value;
        match self.part.place(seq) {
            RangePosition::Before => self.before[1] = Some((seq, value)),
            RangePosition::Inside => {
                self.end_before();
                self.add(seq, value);
            }
            RangePosition::After => {}
        }
    }

    /// Keeps the value at an allocation or a free before the part.
    #[inline]
    fn keep(&mut self, seq: u64) {
        self.before = [Some((seq, self.value)), None];
    }

    /// Adds the values before the part.
    fn end_before(&mut self) {
        for (seq, value) in std::mem::take(&mut self.before).into_iter().flatten() {
            if value != self.written {
                self.add(seq, value);
            }
        }
    }

    fn add(&mut self, seq: u64, value: u64) {
        self.all += 1;
        if self.all <= MAX_CHANGES {
            self.seq.put(seq);
            self.change.put_signed(value.wrapping_sub(self.written) as i64);
            self.written = value;
            self.rows += 1;
        }
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>, tag: Tag, device: u64) {
        if self.rows > 0 {
            records.columns(tag, &[device, self.rows], &mut [&mut self.seq.column, &mut self.change]);
            self.rows = 0;
        }
    }
}

/// The blocks that the page does not list, added up at its points.
struct Rest {
    listed: Listed,
    /// Events at which all blocks are listed, in order.
    marks: Vec<u64>,
    points: Vec<Point>,
    /// By point: the change of bytes by category since the point before, and of the number of blocks.
    changes: Vec<[i64; CATEGORIES]>,
    counts: Vec<i64>,
    /// The first point that is not before the latest event.
    at: usize,
    blocks: u64,
    bytes: u64,
    largest: u64,
}

impl Rest {
    fn new(selection: DeviceSelection, marks: &[u64]) -> Rest {
        let mut marks = marks.to_vec();
        marks.sort_unstable();
        let DeviceSelection { listed, points } = selection;
        let (changes, counts) = (vec![[0; CATEGORIES]; points.len() + 1], vec![0; points.len() + 1]);
        Rest { listed, marks, points, changes, counts, at: 0, blocks: 0, bytes: 0, largest: 0 }
    }

    /// Whether the page lists a block that is freed at `end`.
    fn is_listed(&self, block: &BlockAllocation, end: u64) -> bool {
        let at_mark = self.marks.get(self.marks.partition_point(|mark| *mark < block.seq));
        at_mark.is_some_and(|mark| *mark < end) || self.listed.has(block.memory.size, end.saturating_sub(block.seq))
    }

    /// Adds a block that is freed at `end`. Ends come in order.
    fn add(&mut self, block: &BlockAllocation, category: Category, end: u64) {
        self.blocks += 1;
        self.bytes += block.memory.size;
        self.largest = self.largest.max(block.memory.size);
        while self.points.get(self.at).is_some_and(|point| point.seq < end) {
            self.at += 1;
        }
        let to = self.at;
        let from = self.points.partition_point(|point| point.seq < block.seq);
        if from < to {
            let category = category as usize;
            self.changes[from][category] += block.memory.size as i64;
            self.changes[to][category] -= block.memory.size as i64;
            self.counts[from] += 1;
            self.counts[to] -= 1;
        }
    }

    fn write<W: Write>(&self, records: &mut Records<W>, device: u64, clock: &Clock) {
        let (mut seq, mut time) = (Rising::default(), Rising::default());
        let (mut allocated, mut count) = (Column::default(), Column::default());
        let mut before = 0;
        for (point, change) in self.points.iter().zip(&self.counts) {
            seq.put(point.seq);
            time.put(clock.us(point.ticks));
            allocated.put_signed(point.allocated.wrapping_sub(before) as i64);
            before = point.allocated;
            count.put_signed(*change);
        }
        let mut columns: Vec<Column> = Vec::with_capacity(CATEGORIES);
        for category in 0..CATEGORIES {
            let mut column = Column::default();
            self.changes.iter().take(self.points.len()).for_each(|change| column.put_signed(change[category]));
            columns.push(column);
        }
        let mut all = vec![&mut seq.column, &mut time.column, &mut allocated, &mut count];
        all.extend(columns.iter_mut());
        records.columns(Tag::Points, &[device, self.points.len() as u64, CATEGORIES as u64], &mut all);
    }
}

/// Allocations and frees in columns.
struct EventColumns {
    clock: Clock,
    /// The last event before the part.
    before: Option<AllocatorEvent>,
    rows: u64,
    all: u64,
    seq: Rising,
    times: Rising,
}

/// An allocation or a free.
#[derive(Clone, Copy)]
struct AllocatorEvent {
    seq: u64,
    ticks: u64,
    is_free: bool,
}

impl EventColumns {
    fn new(clock: Clock) -> EventColumns {
        EventColumns { clock, before: None, rows: 0, all: 0, seq: Rising::default(), times: Rising::default() }
    }

    fn put(&mut self, e: AllocatorEvent) {
        let delta = self.seq.next(e.seq);
        self.seq.column.put(delta << 1 | u64::from(e.is_free));
        self.times.put(self.clock.us(e.ticks));
        self.rows += 1;
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>, device: u64) {
        if self.rows > 0 {
            let columns = &mut [&mut self.seq.column, &mut self.times.column];
            records.columns(Tag::Events, &[device, self.rows], columns);
            self.rows = 0;
        }
    }
}

/// Segment events in columns.
#[derive(Default)]
struct SegmentColumns {
    rows: u64,
    all: u64,
    seq: Rising,
    kinds: Column,
    addresses: Column,
    sizes: Column,
    pools: Column,
    streams: Column,
    last_address: u64,
}

impl SegmentColumns {
    /// Adds the segment of a segment event.
    fn put(&mut self, e: &Event, kind: u64) {
        self.all += 1;
        if self.all > MAX_CHANGES {
            return;
        }
        let change = e.addr.wrapping_sub(self.last_address) as i64;
        self.last_address = e.addr;
        self.seq.put(e.seq);
        self.kinds.put(kind);
        self.addresses.put_signed(change);
        self.sizes.put(e.size);
        self.pools.put(e.pool.into());
        self.streams.put(e.stream);
        self.rows += 1;
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>, device: u64) {
        if self.rows > 0 {
            let columns = &mut [
                &mut self.seq.column,
                &mut self.kinds,
                &mut self.addresses,
                &mut self.sizes,
                &mut self.pools,
                &mut self.streams,
            ];
            records.columns(Tag::Segments, &[device, self.rows], columns);
            self.rows = 0;
        }
    }
}

/// One device.
struct DeviceData {
    device: i16,
    source: EventSource,
    part: SeqRange,
    /// All allocations and frees. Not written if there is a rest.
    events: EventColumns,
    freed: BlockColumns,
    live: BlockColumns,
    reserved: Changes,
    physical: Changes,
    segments: SegmentColumns,
    rest: Option<Rest>,
    /// The allocated bytes by the observed blocks, and how often the allocator's own figure differed.
    bytes: u64,
    mismatches: u64,
}

impl DeviceData {
    fn new(device: i16, source: EventSource, clock: Clock, part: SeqRange) -> DeviceData {
        DeviceData {
            device,
            source,
            part,
            events: EventColumns::new(clock),
            freed: BlockColumns::default(),
            live: BlockColumns::default(),
            reserved: Changes::new(part),
            physical: Changes::new(part),
            segments: SegmentColumns::default(),
            rest: None,
            bytes: 0,
            mismatches: 0,
        }
    }

    #[inline]
    fn event(&mut self, e: AllocatorEvent) {
        match self.part.place(e.seq) {
            RangePosition::Before => {
                self.events.before = Some(e);
                self.reserved.keep(e.seq);
                self.physical.keep(e.seq);
            }
            RangePosition::Inside => {
                self.end_before();
                self.add_event(e);
            }
            RangePosition::After => {}
        }
    }

    /// Adds the last event before the part.
    fn end_before(&mut self) {
        if let Some(e) = self.events.before.take() {
            self.add_event(e);
        }
    }

    fn add_event(&mut self, e: AllocatorEvent) {
        self.events.all += 1;
        if self.rest.is_none() {
            self.events.put(e);
        }
    }

    /// Observes the segment of a segment event.
    fn segment(&mut self, e: &Event) {
        let kind = match e.action {
            Action::SegmentAlloc => 0,
            Action::SegmentFree => 1,
            Action::SegmentMap => 2,
            Action::SegmentUnmap => 3,
            _ => return,
        };
        // The segments of the part are those of the allocations and frees before and in it.
        if self.part.place(e.seq) != RangePosition::After {
            self.segments.put(e, kind);
        }
    }

    fn json(&self) -> Value {
        let rest = self
            .rest
            .as_ref()
            .map(|rest| json!({ "blocks": rest.blocks, "bytes": rest.bytes, "largest": rest.largest }));
        json!({
            "device": self.device,
            "source": self.source.name(),
            "events": self.events.all,
            "blocks": self.freed.all + self.live.all,
            "rest": rest,
            "segments_left_out": self.segments.all.saturating_sub(MAX_CHANGES),
            "reserved_left_out": self.reserved.all.saturating_sub(MAX_CHANGES),
            "physical_left_out": self.physical.all.saturating_sub(MAX_CHANGES),
            "mismatches": self.mismatches,
        })
    }
}

/// Where phases and steps begin.
#[derive(Debug)]
struct PhaseChanges {
    part: SeqRange,
    /// Shorter phases are not written, in the part and outside it.
    shortest: u64,
    shortest_outside: u64,
    rows: u64,
    seq: Rising,
    phases: Column,
    steps: Column,
    /// The number of the phase, and the step.
    now: Option<(usize, Option<u32>)>,
    /// The use of the latest blocks of an evaluation: evaluation, generation or rollouts.
    forward_only: Phase,
    /// The stages of a server, which has neither phases nor steps.
    stages: Option<StageFollower>,
}

impl PhaseChanges {
    fn new(definitions: &Definitions, part: SeqRange, shortest: u64, shortest_outside: u64) -> PhaseChanges {
        let (seq, phases, steps) = (Rising::default(), Column::default(), Column::default());
        PhaseChanges {
            part,
            shortest,
            shortest_outside,
            rows: 0,
            seq,
            phases,
            steps,
            now: None,
            forward_only: Phase::Eval,
            stages: StageFollower::new(definitions),
        }
    }

    /// The names of the phases, or of the stages of a server, by number.
    fn names(&self) -> Vec<&'static str> {
        match self.stages {
            Some(_) => ServingStage::ALL.map(ServingStage::name).to_vec(),
            None => Phase::ALL.map(Phase::name).to_vec(),
        }
    }

    /// The number of the phase of a block.
    #[inline]
    fn of_block(&self, block: &BlockAllocation) -> usize {
        match &self.stages {
            Some(stages) => stages.of(block.site.stack) as usize,
            None => block.phase as usize,
        }
    }

    #[inline]
    fn put(&mut self, seq: u64, stack: StackId, now: &ProgramPosition) {
        let now = match &mut self.stages {
            Some(stages) => (stages.at(stack) as usize, None),
            None if now.phase == Phase::Eval => (self.forward_only as usize, now.step),
            None => (now.phase as usize, now.step),
        };
        let shortest = match self.part.place(seq) {
            RangePosition::Inside => self.shortest,
            RangePosition::Before | RangePosition::After => self.shortest_outside,
        };
        if self.now == Some(now) || (self.now.is_some() && seq < self.seq.last + shortest) {
            return;
        }
        self.now = Some(now);
        self.seq.put(seq);
        self.phases.put(now.0 as u64);
        self.steps.put(now.1.map_or(0, |step| u64::from(step) + 1));
        self.rows += 1;
    }

    fn write<W: Write>(&mut self, records: &mut Records<W>) {
        if self.rows > 0 {
            let columns = &mut [&mut self.seq.column, &mut self.phases, &mut self.steps];
            records.columns(Tag::Phases, &[self.rows], columns);
            self.rows = 0;
        }
    }
}

struct PageWriter<'a, W: Write> {
    records: Records<W>,
    dictionary: Dictionary<'a>,
    annotations: Annotations<'a>,
    clock: Clock,
    devices: Vec<DeviceData>,
    phases: PhaseChanges,
}

impl<W: Write> PageWriter<'_, W> {
    /// Writes what is left, and the tables.
    fn finish(mut self, begin_ns: u64, sources: &mut SourceFiles) -> std::io::Result<()> {
        for (number, device) in self.devices.iter_mut().enumerate() {
            let number = number as u64;
            device.end_before();
            device.reserved.end_before();
            device.physical.end_before();
            device.events.write(&mut self.records, number);
            device.freed.write(&mut self.records, Tag::Freed, number);
            device.live.write(&mut self.records, Tag::Live, number);
            device.segments.write(&mut self.records, number);
            device.reserved.write(&mut self.records, Tag::Reserved, number);
            device.physical.write(&mut self.records, Tag::Physical, number);
            if let Some(rest) = &device.rest {
                rest.write(&mut self.records, number, &self.clock);
            }
        }
        self.phases.write(&mut self.records);
        let ranges = self.annotations.write(&mut self.records, &mut self.dictionary, &self.clock);
        let categories: Vec<Value> =
            Category::ALL.iter().map(|one| json!({ "name": one.name(), "plural": one.plural() })).collect();
        let tables = json!({
            "begin_ns": begin_ns.to_string(),
            "categories": categories,
            "phases": self.phases.names(),
            "shortest_phase": self.phases.shortest,
            "ranges": ranges,
            "devices": self.devices.iter().map(DeviceData::json).collect::<Vec<_>>(),
            "sources": self.dictionary.sources(sources),
            "tables": self.dictionary.json(),
        });
        self.records.bytes(Tag::Json, tables.to_string().as_bytes());
        self.records.finish().map(drop)
    }
}

impl<W: Write> BlockObserver for PageWriter<'_, W> {
    fn allocated(&mut self, device: i16, block: &BlockAllocation, usage: &Usage) {
        let Some((number, data)) = self.devices.iter_mut().enumerate().find(|(_, one)| one.device == device) else {
            return;
        };
        if block.phase.is_forward_only() {
            self.phases.forward_only = block.phase;
        }
        data.event(AllocatorEvent { seq: block.seq, ticks: block.ticks, is_free: false });
        data.bytes += block.memory.size;
        self.annotations.level(number, data.bytes);
        if data.bytes != usage.allocated && data.part.place(block.seq) == RangePosition::Inside {
            data.mismatches += 1;
        }
        if data.events.rows >= ROWS {
            data.events.write(&mut self.records, number as u64);
        }
    }

    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        let Some((number, data)) = self.devices.iter_mut().enumerate().find(|(_, one)| one.device == device) else {
            return;
        };
        if let Some(free) = free {
            data.event(AllocatorEvent { seq: free.seq, ticks: free.ticks, is_free: true });
            data.bytes = data.bytes.saturating_sub(block.memory.size);
            self.annotations.level(number, data.bytes);
        }
        if !data.part.has_block(block.seq, free.map(|free| free.seq)) {
            return;
        }
        if let (Some(rest), Some(free)) = (&mut data.rest, free)
            && !rest.is_listed(block, free.seq)
        {
            rest.add(block, classification.category, free.seq);
            return;
        }
        let phase = self.phases.of_block(block);
        let site = self.dictionary.site(block, classification, phase);
        let tensor = self.dictionary.tensor(block, classification);
        match free {
            Some(free) => data.freed.put_freed(free.seq, site, tensor, block),
            None => data.live.put_live(site, tensor, block),
        }
        if data.freed.rows >= ROWS {
            data.freed.write(&mut self.records, Tag::Freed, number as u64);
        }
        if data.live.rows >= ROWS {
            data.live.write(&mut self.records, Tag::Live, number as u64);
        }
    }

    fn event_processed(&mut self, replay: &Replay, e: &Event, now: &ProgramPosition) {
        self.annotations.event(e);
        match e.source {
            Source::Label => self.annotations.observe(e),
            Source::Torch => {
                if let Some((number, data)) =
                    self.devices.iter_mut().enumerate().find(|(_, one)| one.device == e.device)
                {
                    data.segment(e);
                    if let Some(replayed) = replay.devices().iter().find(|one| one.device == e.device) {
                        data.reserved.put(e.seq, replayed.allocator.usage().reserved);
                    }
                    if data.segments.rows >= ROWS {
                        data.segments.write(&mut self.records, number as u64);
                    }
                    if data.reserved.rows >= ROWS {
                        data.reserved.write(&mut self.records, Tag::Reserved, number as u64);
                    }
                }
            }
            Source::Driver | Source::Runtime => {
                if let Some((number, data)) =
                    self.devices.iter_mut().enumerate().find(|(_, one)| one.device == e.device)
                {
                    let total = replay.physical().total(MemoryLocation::Device(data.device)).current;
                    data.physical.put(e.seq, total);
                    if data.physical.rows >= ROWS {
                        data.physical.write(&mut self.records, Tag::Physical, number as u64);
                    }
                }
            }
            _ => {}
        }
        if matches!(e.action, Action::Alloc | Action::FreeRequested) {
            self.phases.put(e.seq, e.stack, now);
            if self.phases.rows >= ROWS {
                self.phases.write(&mut self.records);
            }
        }
    }
}
