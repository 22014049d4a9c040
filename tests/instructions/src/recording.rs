//! Checks that the trace holds exactly the events that the stand-ins made. Otherwise the instruction count would be
//! meaningless.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::{Definitions, Reader};
use memtrace_trace::ids::{ContextId, StackId};

/// The number of allocator reports per record of its totals.
const TOTALS_EVERY: usize = 1024;

/// Compares the one trace in `run` with the list that `oracle.c` wrote. Returns the number of events.
pub(crate) fn check(run: &Path, oracle: &Path) -> Result<usize> {
    let mut traces: Vec<_> = std::fs::read_dir(run)?.filter_map(|e| Some(e.ok()?.path())).collect();
    traces.retain(|p| p.extension().is_some_and(|e| e == "mtr"));
    let [trace] = traces.as_slice() else { bail!("{} traces were written instead of one", traces.len()) };
    let reader = Reader::open(trace)?;
    ensure!(reader.damage().is_none(), "the trace is damaged: {:?}", reader.damage());
    let end = reader.end().context("the trace has no end")?;
    ensure!((end.lost, end.late) == (0, 0), "{} events lost, {} late", end.lost, end.late);
    let mut recorded = Vec::new();
    for block in reader.events() {
        recorded.extend(block.map_err(|e| anyhow::anyhow!("{e:?}"))?);
    }
    let expected = std::fs::read_to_string(oracle).context("the stand-ins wrote no list of events")?;

    let (totals, recorded): (Vec<Event>, Vec<Event>) = recorded.into_iter().partition(|e| e.action == Action::Totals);
    for (index, (event, line)) in recorded.iter().zip(expected.lines()).enumerate() {
        let found = describe(event, reader.definitions());
        ensure!(found == line, "event {} is not what happened:\n  recorded  {found}\n  expected  {line}", index + 1);
    }
    let expected_count = expected.lines().count();
    ensure!(recorded.len() == expected_count, "{} events were recorded and {expected_count} happened", recorded.len());
    let reports = recorded
        .iter()
        .filter(|e| e.source == Source::Torch && matches!(e.action, Action::Alloc | Action::FreeCompleted))
        .count();
    let notes = reports / TOTALS_EVERY;
    ensure!(totals.len() == notes, "{} notes of totals, {notes} belong to {reports} reports", totals.len());
    Ok(recorded.len() + totals.len())
}

/// Formats an event as oracle.c does: source, action, address, size and slack. Then, for the event's stack and for its
/// node's forward stack, the number of frames and the innermost line.
fn describe(event: &Event, definitions: &Definitions) -> String {
    let source = match event.source {
        Source::Torch => "torch",
        Source::TorchReporter => "reporter",
        Source::TorchCpu => "cpu",
        Source::Driver => "driver",
        Source::Runtime => "runtime",
        Source::Label => "label",
    };
    let slack = if event.flags.contains(Flags::SLACK_KNOWN) { i64::from(event.slack) } else { -1 };
    let place = |stack: StackId| {
        let depth = definitions.walk(stack).count();
        let line = definitions.walk(stack).next().and_then(|(_, frame)| frame).map_or(0, |frame| frame.line);
        format!("{depth} {line}")
    };
    let context = if event.context == ContextId::NONE { None } else { definitions.context(event.context) };
    let node = match context {
        None => "0 0".to_owned(),
        Some(context) if &*context.node == "AddBackward0" => place(context.forward),
        Some(context) => format!("in a node {}", context.node),
    };
    let (action, addr, size) = (event.action.name(), event.addr, event.size);
    format!("{source} {action} {addr} {size} {slack} {} {node}", place(event.stack))
}
