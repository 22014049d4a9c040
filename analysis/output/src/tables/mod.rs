//! A run as tables in Parquet files, for DuckDB, Polars, Spark and Ray Data: events, blocks, stacks, phases.
//! `docs/reference/parquet.md` describes every column. Each row has its run, rank and process, so the files of any number of
//! ranks form one table.

mod writer;

use std::collections::BTreeMap;
use std::io::Write;

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Event, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::flame::accounted;
use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{Birth, Judged, Lives, Phase, PhaseTracker, Story};
use memtrace_replay::{Change, Names, Replay, Usage};

use writer::{Columns, Field, Table};

/// The tables, by the names of their files.
pub const TABLES: [&str; 4] = ["events", "blocks", "stacks", "phases"];

const LONG: Field<'static> = Field::Long(0);
const MAYBE: Field<'static> = Field::Maybe(None);
const INT: Field<'static> = Field::Int(None);
const TEXT: Field<'static> = Field::Text("");
const NAME: Field<'static> = Field::Name("");

const EVENTS: &Columns = &[
    ("run", TEXT),
    ("rank", INT),
    ("pid", INT),
    ("device", INT),
    ("seq", LONG),
    ("time_ns", LONG),
    ("action", TEXT),
    ("address", LONG),
    ("size", LONG),
    ("stream", LONG),
    ("allocated", LONG),
    ("reserved", LONG),
    ("step", INT),
    ("phase", NAME),
    ("stack", MAYBE),
    ("node", NAME),
];

const BLOCKS: &Columns = &[
    ("run", TEXT),
    ("rank", INT),
    ("pid", INT),
    ("device", INT),
    ("alloc_seq", LONG),
    ("free_seq", MAYBE),
    ("alloc_ns", LONG),
    ("free_ns", MAYBE),
    ("address", LONG),
    ("size", LONG),
    ("requested", LONG),
    ("step", INT),
    ("phase", TEXT),
    ("category", TEXT),
    ("rule", TEXT),
    ("name", NAME),
    ("module", NAME),
    ("node", NAME),
    ("stack", MAYBE),
];

const STACKS: &Columns = &[
    ("run", TEXT),
    ("rank", INT),
    ("pid", INT),
    ("stack", LONG),
    ("depth", INT),
    ("function", TEXT),
    ("file", TEXT),
    ("line", INT),
    ("native", Field::Bool(false)),
];

const PHASES: &Columns = &[
    ("run", TEXT),
    ("rank", INT),
    ("pid", INT),
    ("device", INT),
    ("step", INT),
    ("phase", TEXT),
    ("began_ns", LONG),
    ("ended_ns", LONG),
    ("allocations", LONG),
    ("allocated", LONG),
    ("frees", LONG),
    ("freed", LONG),
    ("peak", LONG),
];

/// Writes the tables of one process in a window, in the order of [`TABLES`]. `run` is the value of the column `run`.
/// `progress` receives the number of events read so far; the events are read twice.
///
/// # Errors
///
/// The errors of the outputs.
pub fn tables<W: Write + Send>(
    process: &Process,
    run: &str,
    window: &Window,
    [events, blocks, stacks, phases]: [W; 4],
    progress: &mut dyn FnMut(u64),
) -> Result<[W; 4]> {
    let names = Names::of(process.recording());
    let who = Who { run, rank: process.rank().map(|rank| rank as i32), pid: process.pid() as i32 };
    let mut used = vec![false; process.definitions().stacks.len()];
    let write = || -> parquet::errors::Result<[W; 4]> {
        let mut events = Table::new("events", EVENTS, events)?;
        let rows = put_events(process, window, &who, &mut events, &mut used, progress)?;
        let mut blocks = Blocks {
            table: Table::new("blocks", BLOCKS, blocks)?,
            definitions: process.definitions(),
            names: &names,
            calibration: process.recording().calibration(),
            window,
            who: &who,
            used: &mut used,
            failed: None,
        };
        Story::with(process.recording(), process.survey(), &names, &mut blocks, progress);
        if let Some(e) = blocks.failed {
            return Err(e);
        }
        let blocks = blocks.table.finish()?;
        let mut stacks = Table::new("stacks", STACKS, stacks)?;
        put_stacks(process.definitions(), &who, &used, &mut stacks)?;
        let mut phases = Table::new("phases", PHASES, phases)?;
        for ((device, step, phase), row) in rows {
            phases.row(&[
                Field::Text(who.run),
                Field::Int(who.rank),
                Field::Int(Some(who.pid)),
                Field::Int(Some(device.into())),
                Field::Int(step.map(|step| step as i32)),
                Field::Text(phase.name()),
                Field::Long(row.began_ns),
                Field::Long(row.ended_ns),
                Field::Long(row.allocations),
                Field::Long(row.allocated),
                Field::Long(row.frees),
                Field::Long(row.freed),
                Field::Long(row.peak),
            ])?;
        }
        Ok([events.finish()?, blocks, stacks.finish()?, phases.finish()?])
    };
    write().map_err(|e| Error::io("cannot write the tables")(std::io::Error::other(e)))
}

/// The process that rows belong to.
struct Who<'a> {
    run: &'a str,
    rank: Option<i32>,
    pid: i32,
}

/// One phase of one step.
#[derive(Clone, Copy, Default)]
struct PhaseRow {
    began_ns: u64,
    ended_ns: u64,
    allocations: u64,
    allocated: u64,
    frees: u64,
    freed: u64,
    peak: u64,
}

type PhaseRows = BTreeMap<(i16, Option<u32>, Phase), PhaseRow>;

/// The column with a stack's id. Marks the stack as used.
fn stack_field(used: &mut [bool], stack: StackId) -> Field<'static> {
    match used.get_mut(stack.index()) {
        Some(used) if !stack.is_none() => {
            *used = true;
            Field::Maybe(Some(stack.0.into()))
        }
        _ => Field::Maybe(None),
    }
}

fn node(definitions: &Definitions, context: ContextId) -> &str {
    definitions.context(context).map_or("", |context| &*context.node)
}

fn put_events<W: Write + Send>(
    process: &Process,
    window: &Window,
    who: &Who<'_>,
    table: &mut Table<W>,
    used: &mut [bool],
    progress: &mut dyn FnMut(u64),
) -> parquet::errors::Result<PhaseRows> {
    let (recording, definitions) = (process.recording(), process.definitions());
    let calibration = recording.calibration();
    let mut tracker = PhaseTracker::of(recording);
    let mut replay = Replay::new(process.survey(), None);
    let mut rows = PhaseRows::new();
    let mut failed = None;
    let mut done = 0;
    recording.stream(&mut |events| {
        for e in events.iter().filter(|e| !window.is_past(e.seq)) {
            if e.source == Source::Label {
                tracker.observe_label(e);
                continue;
            }
            replay.apply(e, |replay, slot, e, change| {
                let seen = &replay.devices()[slot];
                let (allocator, device) = (&seen.allocator, seen.device);
                let phase = match change {
                    Change::Alloc(_) | Change::FreeRequested(_) | Change::Oom => Some(tracker.observe(e).phase),
                    _ => None,
                };
                let is_there = window.has_device(device) && window.holds(e.seq) && window.tells(allocator, e, &change);
                if !is_there || failed.is_some() {
                    return;
                }
                let usage = *allocator.usage();
                let at = calibration.epoch_ns(e.ticks);
                let step = tracker.now().step;
                let (action, size) = match change {
                    Change::Alloc(id) => ("alloc", allocator.block(id).size),
                    Change::FreeRequested(id) => ("free_requested", allocator.block(id).size),
                    Change::FreeCompleted(_, block) => ("free_completed", block.size),
                    _ => (e.action.name(), e.size),
                };
                if let Some(phase) = phase {
                    let new = PhaseRow { began_ns: at, peak: usage.allocated, ..PhaseRow::default() };
                    let row = rows.entry((device, step, phase)).or_insert(new);
                    row.ended_ns = at;
                    row.peak = row.peak.max(usage.allocated);
                    let (count, bytes) = match change {
                        Change::Alloc(_) => (&mut row.allocations, &mut row.allocated),
                        Change::FreeRequested(_) => (&mut row.frees, &mut row.freed),
                        _ => (&mut 0, &mut 0),
                    };
                    *count += 1;
                    *bytes += size;
                }
                let written = table.row(&[
                    Field::Text(who.run),
                    Field::Int(who.rank),
                    Field::Int(Some(who.pid)),
                    Field::Int(Some(device.into())),
                    Field::Long(e.seq),
                    Field::Long(at),
                    Field::Text(action),
                    Field::Long(e.addr),
                    Field::Long(size),
                    Field::Long(e.stream),
                    Field::Long(usage.allocated),
                    Field::Long(usage.reserved),
                    Field::Int(step.map(|step| step as i32)),
                    Field::Name(phase.map_or("", Phase::name)),
                    stack_field(used, accounted(definitions, e.stack, e.context)),
                    Field::Name(node(definitions, e.context)),
                ]);
                failed = written.err();
            });
        }
        done += events.len() as u64;
        progress(done);
    });
    failed.map_or(Ok(rows), Err)
}

struct Blocks<'a, W: Write + Send> {
    table: Table<W>,
    definitions: &'a Definitions,
    names: &'a Names,
    calibration: Calibration,
    window: &'a Window,
    who: &'a Who<'a>,
    used: &'a mut [bool],
    failed: Option<parquet::errors::ParquetError>,
}

impl<W: Write + Send> Lives for Blocks<'_, W> {
    fn began(&mut self, _: i16, _: &Birth, _: &Usage) {}

    fn ended(&mut self, device: i16, birth: &Birth, judged: &Judged, _: FrameId, free: Option<&Event>) {
        let Some(free) = self.window.shows(device, birth, free).filter(|_| self.failed.is_none()) else { return };
        let name = self.names.of_alloc(birth.seq).map(|name| name.text()).unwrap_or_default();
        let module = self.names.module_path(birth.within, birth.seq).unwrap_or_default();
        let written = self.table.row(&[
            Field::Text(self.who.run),
            Field::Int(self.who.rank),
            Field::Int(Some(self.who.pid)),
            Field::Int(Some(device.into())),
            Field::Long(birth.seq),
            Field::Maybe(free.map(|free| free.seq)),
            Field::Long(self.calibration.epoch_ns(birth.ticks)),
            Field::Maybe(free.map(|free| self.calibration.epoch_ns(free.ticks))),
            Field::Long(birth.addr),
            Field::Long(birth.size),
            Field::Long(birth.requested),
            Field::Int(birth.at.step.map(|step| step as i32)),
            Field::Text(birth.phase.name()),
            Field::Text(judged.category.name()),
            Field::Text(judged.rule),
            Field::Name(&name),
            Field::Name(&module),
            Field::Name(node(self.definitions, birth.context)),
            stack_field(self.used, accounted(self.definitions, birth.stack, birth.context)),
        ]);
        self.failed = written.err();
    }
}

fn put_stacks<W: Write + Send>(
    definitions: &Definitions,
    who: &Who<'_>,
    used: &[bool],
    table: &mut Table<W>,
) -> parquet::errors::Result<()> {
    for (stack, _) in used.iter().enumerate().filter(|(_, used)| **used) {
        let frames = definitions.walk(StackId(stack as u32)).filter_map(|(_, frame)| frame);
        for (depth, frame) in frames.enumerate() {
            table.row(&[
                Field::Text(who.run),
                Field::Int(who.rank),
                Field::Int(Some(who.pid)),
                Field::Long(stack as u64),
                Field::Int(Some(depth as i32)),
                Field::Text(&frame.name),
                Field::Text(&frame.filename),
                Field::Int((frame.line > 0).then_some(frame.line as i32)),
                Field::Bool(frame.native),
            ])?;
        }
    }
    Ok(())
}
