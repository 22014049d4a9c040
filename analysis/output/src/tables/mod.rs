//! A run as tables in Parquet files, for DuckDB, Polars, Spark and Ray Data: events, blocks, stacks, phases.
//! `docs/reference/parquet.md` describes every column. Each row has its run, rank and process, so the files of any
//! number of ranks form one table.

mod columns;
mod partition;
mod phases;
mod ranks;
mod reader;
mod writer;

use std::io::Write;

use memtrace_trace::clock::Calibration;
use memtrace_trace::event::{Event, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, FrameId, StackId};

use super::flame_graph::attributed_stack;
use super::window::Window;
use memtrace_input::CompileContexts;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::{
    Analysis, BlockAllocation, BlockClassification, BlockObserver, CustomCategorizer, FirstPass,
};
use memtrace_insight::rules::CustomRules;
use memtrace_replay::{Change, Names, Replay};

use columns::{INT64, OPTIONAL_INT32, OPTIONAL_INT64, OPTIONAL_TEXT, ProcessColumns, TEXT};
use phases::{PHASES, PhaseEvent, PhaseRows};
use writer::{Columns, Field, Table};

pub use partition::{partition_folder, unpartitioned_value};
pub use ranks::{
    RANKS_FILE, RANKS_TABLE, RankAssignment, RankRow, RowDevice, RowExit, RowPeaks, RowProcess, RowRun, read_ranks,
    write_ranks,
};

/// Which columns a file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableLayout {
    /// All columns: a file of any name is a part of its table.
    Whole,
    /// All but `run` and `rank`, which are in the file's path ([`partition_folder`]).
    Partitioned,
}

impl TableLayout {
    /// The number of leading columns that a file leaves out.
    const fn left_out(self) -> usize {
        match self {
            TableLayout::Whole => 0,
            TableLayout::Partitioned => 2,
        }
    }
}

/// The tables, by the names of their files.
pub const TABLES: [&str; 4] = ["events", "blocks", "stacks", "phases"];

const EVENTS: &Columns = &[
    ("run", TEXT),
    ("rank", OPTIONAL_INT32),
    ("pid", OPTIONAL_INT32),
    ("device", OPTIONAL_INT32),
    ("seq", INT64),
    ("time_ns", INT64),
    ("action", TEXT),
    ("address", INT64),
    ("size", INT64),
    ("stream", INT64),
    ("allocated", INT64),
    ("reserved", INT64),
    ("step", OPTIONAL_INT32),
    ("phase", OPTIONAL_TEXT),
    ("stack", OPTIONAL_INT64),
    ("node", OPTIONAL_TEXT),
    ("compile_context", OPTIONAL_TEXT),
];

const BLOCKS: &Columns = &[
    ("run", TEXT),
    ("rank", OPTIONAL_INT32),
    ("pid", OPTIONAL_INT32),
    ("device", OPTIONAL_INT32),
    ("alloc_seq", INT64),
    ("free_seq", OPTIONAL_INT64),
    ("alloc_ns", INT64),
    ("free_ns", OPTIONAL_INT64),
    ("address", INT64),
    ("size", INT64),
    ("requested", INT64),
    ("step", OPTIONAL_INT32),
    ("phase", TEXT),
    ("category", TEXT),
    ("rule", TEXT),
    ("name", OPTIONAL_TEXT),
    ("shape", OPTIONAL_TEXT),
    ("module", OPTIONAL_TEXT),
    ("node", OPTIONAL_TEXT),
    ("stack", OPTIONAL_INT64),
    ("custom_category", OPTIONAL_TEXT),
    ("compile_context", OPTIONAL_TEXT),
];

const STACKS: &Columns = &[
    ("run", TEXT),
    ("rank", OPTIONAL_INT32),
    ("pid", OPTIONAL_INT32),
    ("stack", INT64),
    ("depth", OPTIONAL_INT32),
    ("function", TEXT),
    ("file", TEXT),
    ("line", OPTIONAL_INT32),
    ("native", Field::Bool(false)),
];

/// Writes the tables of one process in a window, in the order of [`TABLES`]. `run` is the value of the column `run`,
/// and `custom_rules` give the blocks their custom categories. `progress` receives the number of events read so far;
/// the events are read twice.
///
/// # Errors
///
/// The errors of the outputs.
pub fn tables(
    process: &Process,
    run: &str,
    layout: TableLayout,
    window: &Window,
    custom_rules: Option<&CustomRules>,
    [events, blocks, stacks, phases]: [&mut (dyn Write + Send); 4],
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let first_pass = FirstPass::of_process(process);
    let names = &first_pass.names;
    let process_columns =
        ProcessColumns { run, rank: process.rank().map(|rank| rank as i32), pid: process.pid() as i32 };
    let mut used_stacks = vec![false; process.definitions().stacks.len()];
    let left_out = layout.left_out();
    let mut write = || -> parquet::errors::Result<()> {
        let mut events = Table::new("events", EVENTS, left_out, events)?;
        let rows = put_events(process, &first_pass, window, &process_columns, &mut events, &mut used_stacks, progress)?;
        let mut blocks = BlockRows {
            table: Table::new("blocks", BLOCKS, left_out, blocks)?,
            definitions: process.definitions(),
            names,
            custom: custom_rules.map(|rules| CustomCategorizer::new(rules, process.definitions(), names)),
            compile_contexts: process.recording().compile_contexts(),
            calibration: process.recording().calibration(),
            window,
            process_columns: &process_columns,
            used_stacks: &mut used_stacks,
            error: None,
        };
        Analysis::with_observer(process.recording(), process.trace_index(), &first_pass, &mut blocks, progress);
        if let Some(e) = blocks.error {
            return Err(e);
        }
        blocks.table.finish()?;
        let mut stacks = Table::new("stacks", STACKS, left_out, stacks)?;
        put_stacks(process.definitions(), &process_columns, &used_stacks, &mut stacks)?;
        let mut phases = Table::new("phases", PHASES, left_out, phases)?;
        rows.write(&process_columns, &mut phases)?;
        events.finish()?;
        stacks.finish()?;
        phases.finish()?;
        Ok(())
    };
    write().map_err(|e| Error::io("cannot write the tables")(std::io::Error::other(e)))
}

/// The column with a stack's id. Marks the stack as used.
fn stack_field(used_stacks: &mut [bool], stack: StackId) -> Field<'static> {
    match used_stacks.get_mut(stack.index()) {
        Some(is_used) if !stack.is_none() => {
            *is_used = true;
            Field::OptionalInt64(Some(stack.0.into()))
        }
        _ => Field::OptionalInt64(None),
    }
}

fn node(definitions: &Definitions, context: ContextId) -> &str {
    definitions.context(context).map_or("", |context| &*context.node)
}

fn put_events(
    process: &Process,
    first_pass: &FirstPass,
    window: &Window,
    process_columns: &ProcessColumns<'_>,
    table: &mut Table<'_>,
    used_stacks: &mut [bool],
    progress: &mut dyn FnMut(u64),
) -> parquet::errors::Result<PhaseRows> {
    let (recording, definitions) = (process.recording(), process.definitions());
    let calibration = recording.calibration();
    let compile_contexts = recording.compile_contexts();
    let mut tracker = first_pass.tracker(recording);
    let mut replay = Replay::new(process.trace_index(), None);
    let mut rows = PhaseRows::default();
    let mut error = None;
    let mut done = 0;
    let mut is_whole = true;
    recording.stream(&mut |events| {
        for e in events {
            if window.is_past(e.seq) {
                is_whole = false;
                // The next allocation shows whether the last frees are the program's teardown.
                if !rows.is_pending() {
                    continue;
                }
            }
            if e.source == Source::Label {
                tracker.observe_label(e);
                continue;
            }
            replay.apply(e, |replay, slot, e, change| {
                let device_replay = &replay.devices()[slot];
                let (allocator, device) = (&device_replay.allocator, device_replay.device);
                let classification = match change {
                    Change::Alloc(_) | Change::FreeRequested(_) | Change::Oom => Some(tracker.observe(e)),
                    _ => None,
                };
                let usage = *allocator.usage();
                let at = calibration.epoch_ns(e.ticks);
                let step = tracker.now().step;
                let is_in_window = window.has_device(device) && window.contains(e.seq);
                if let (Change::Alloc(id) | Change::FreeRequested(id), Some(classification)) =
                    (&change, &classification)
                {
                    let bytes = allocator.block(*id).size;
                    let is_shown = is_in_window && window.has_size(bytes);
                    let (block, level) = (id.index(), usage.allocated);
                    let event = PhaseEvent { block, bytes, level, time_ns: at, step, classification, is_shown };
                    match change {
                        Change::Alloc(_) => rows.allocated(device, &event),
                        _ => rows.freed(device, &event),
                    }
                }
                if !is_in_window || !window.shows_change(allocator, e, &change) || error.is_some() {
                    return;
                }
                let (action, size) = match change {
                    Change::Alloc(id) => ("alloc", allocator.block(id).size),
                    Change::FreeRequested(id) => ("free_requested", allocator.block(id).size),
                    Change::FreeCompleted(_, block) => ("free_completed", block.size),
                    _ => (e.action.name(), e.size),
                };
                let written = table.row(&[
                    Field::Text(process_columns.run),
                    Field::OptionalInt32(process_columns.rank),
                    Field::OptionalInt32(Some(process_columns.pid)),
                    Field::OptionalInt32(Some(device.into())),
                    Field::Int64(e.seq),
                    Field::Int64(at),
                    Field::Text(action),
                    Field::Int64(e.addr),
                    Field::Int64(size),
                    Field::Int64(e.stream),
                    Field::Int64(usage.allocated),
                    Field::Int64(usage.reserved),
                    Field::OptionalInt32(step.map(|step| step as i32)),
                    Field::OptionalText(classification.map_or("", |classification| classification.phase.name())),
                    stack_field(used_stacks, attributed_stack(definitions, e.stack, e.context)),
                    Field::OptionalText(node(definitions, e.context)),
                    Field::OptionalText(compile_contexts.text(compile_contexts.of(e.seq)).unwrap_or_default()),
                ]);
                error = written.err();
            });
        }
        done += events.len() as u64;
        progress(done);
    });
    if is_whole {
        rows.finish();
    }
    error.map_or(Ok(rows), Err)
}

struct BlockRows<'a, 'out> {
    table: Table<'out>,
    definitions: &'a Definitions,
    names: &'a Names,
    custom: Option<CustomCategorizer<'a>>,
    compile_contexts: &'a CompileContexts,
    calibration: Calibration,
    window: &'a Window,
    process_columns: &'a ProcessColumns<'a>,
    used_stacks: &'a mut [bool],
    error: Option<parquet::errors::ParquetError>,
}

impl BlockObserver for BlockRows<'_, '_> {
    fn lifetime_ended(
        &mut self,
        device: i16,
        block: &BlockAllocation,
        classification: &BlockClassification,
        _: FrameId,
        free: Option<&Event>,
    ) {
        let Some(free) = self.window.shows_block(device, block, free).filter(|_| self.error.is_none()) else { return };
        let named = self.names.of_allocation(block.seq);
        let name = named.map(|named| named.text()).unwrap_or_default();
        let module = self.names.module_path(block.site.event_context, block.seq).unwrap_or_default();
        let written = self.table.row(&[
            Field::Text(self.process_columns.run),
            Field::OptionalInt32(self.process_columns.rank),
            Field::OptionalInt32(Some(self.process_columns.pid)),
            Field::OptionalInt32(Some(device.into())),
            Field::Int64(block.seq),
            Field::OptionalInt64(free.map(|free| free.seq)),
            Field::Int64(self.calibration.epoch_ns(block.ticks)),
            Field::OptionalInt64(free.map(|free| self.calibration.epoch_ns(free.ticks))),
            Field::Int64(block.memory.addr),
            Field::Int64(block.memory.size),
            Field::Int64(block.memory.requested),
            Field::OptionalInt32(block.position.step.map(|step| step as i32)),
            Field::Text(block.phase.name()),
            Field::Text(classification.category.name()),
            Field::Text(classification.rule.as_str()),
            Field::OptionalText(&name),
            Field::OptionalText(named.map_or("", |named| &*named.shape)),
            Field::OptionalText(&module),
            Field::OptionalText(node(self.definitions, block.site.context)),
            stack_field(self.used_stacks, attributed_stack(self.definitions, block.site.stack, block.site.context)),
            Field::OptionalText(self.custom.as_ref().and_then(|custom| custom.name_of(block)).unwrap_or_default()),
            Field::OptionalText(self.compile_contexts.text(self.compile_contexts.of(block.seq)).unwrap_or_default()),
        ]);
        self.error = written.err();
    }
}

fn put_stacks(
    definitions: &Definitions,
    process_columns: &ProcessColumns<'_>,
    used_stacks: &[bool],
    table: &mut Table<'_>,
) -> parquet::errors::Result<()> {
    for (stack, _) in used_stacks.iter().enumerate().filter(|(_, is_used)| **is_used) {
        let frames = definitions.walk(StackId(stack as u32)).filter_map(|(_, frame)| frame);
        for (depth, frame) in frames.enumerate() {
            table.row(&[
                Field::Text(process_columns.run),
                Field::OptionalInt32(process_columns.rank),
                Field::OptionalInt32(Some(process_columns.pid)),
                Field::Int64(stack as u64),
                Field::OptionalInt32(Some(depth as i32)),
                Field::Text(&frame.name),
                Field::Text(&frame.filename),
                Field::OptionalInt32((frame.line > 0).then_some(frame.line as i32)),
                Field::Bool(frame.native),
            ])?;
        }
    }
    Ok(())
}
