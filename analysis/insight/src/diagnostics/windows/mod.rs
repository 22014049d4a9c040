//! Leaks of a program without steps, or after its last step. They are described by the program's ranges, by the
//! iterations of its loops, or by the blocks.

mod loops;
mod open_ranges;
mod sampler;

use std::collections::BTreeMap;
use std::sync::Arc;

use memtrace_input::EventSource;
use memtrace_trace::event::Event;
use memtrace_trace::file::Frame;
use memtrace_trace::ids::StackId;

use super::device_facts::{DeviceFacts, MAX_LINES, SharedFacts};
use super::diagnostic::Diagnostic;
use super::growing::{BOUND_TENSOR, GrowthKind, LEAK, LEAK_IN_CPP};
use super::issue::{Issue, LONGEST_FORECAST, OomForecast};
use super::rule::DiagnosticRule;
use super::turns::LoopTurn;
use crate::locations::Locations;
use crate::passes::mark::Mark;
use crate::passes::pass::{BlockAllocated, BlockFreed, Pass, RecordingStart};
use crate::rules::{ForwardOnlyUse, is_library, names_forward_only};
use crate::units::{count_text, size_text};
use loops::LoopTable;
use open_ranges::range_rows;
use sampler::{Turns, WindowGrowth, WindowSampler};

/// The fix for blocks that native code does not free.
const FREE_BLOCKS: &str = "nothing frees these blocks: call cudaFree (or the free function of the call that allocated \
     them) on every path, or allocate them once before the loop";

/// The blocks that grow on one device without steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows {
    sampler: WindowSampler,
}

impl Pass for Windows {
    fn started(start: &RecordingStart<'_>) -> Windows {
        let loops = Arc::new(LoopTable::new(start.definitions));
        let rows = Arc::new(range_rows(start.definitions));
        Windows { sampler: WindowSampler::new(&loops, &rows, start.is_inference) }
    }

    #[inline]
    fn range(&mut self, e: &Event) {
        self.sampler.observe_range(e);
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        let BlockAllocated { e, block, mark, usage, .. } = *allocated;
        if !mark.is(Mark::WORKSPACE) {
            self.sampler.allocated(block, e.thread, mark, usage.allocated);
            if !e.source.is_torch() {
                self.sampler.allocated_outside_pytorch(block);
            }
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if !freed.mark.is(Mark::WORKSPACE) {
            self.sampler.freed(freed.block, freed.mark);
        }
    }
}

impl Diagnostic for Windows {
    /// Its issues are leaks: the rule is that of `growing`.
    const RULES: &'static [&'static DiagnosticRule] = &[];

    /// Adds what grows where no other issue of the device names it.
    fn issues(&self, device: &DeviceFacts<'_>, _: &SharedFacts, issues: &mut Vec<Issue>) {
        let is_named = |stack: StackId| issues.iter().any(|issue| issue.sites.iter().any(|(site, _)| *site == stack));
        let leaks = WindowLeaks::of(&self.sampler, device, &is_named);
        let mut found = leaks.issues(device);
        // One forecast for all that grows.
        if let Some(largest) = found.first_mut()
            && device.ooms.count() == 0
            && let Some(forecast) = device.capacity.limit.and_then(|limit| leaks.forecast(limit))
        {
            largest.evidence.push(forecast.evidence());
            largest.forecast = Some(forecast);
        }
        issues.append(&mut found);
    }
}

/// The turns by which one line grows.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Unit {
    turn: LoopTurn,
    /// The name of a range.
    name: Option<String>,
    count: u64,
    /// The function with the loop.
    at: Option<String>,
}

/// All that grows, by line.
struct WindowLeaks {
    lines: Vec<(String, Vec<WindowGrowth>, Unit)>,
    last_peak: u64,
    after_training: bool,
}

impl WindowLeaks {
    /// The blocks that grow, without stacks that `is_named` elsewhere, and without blocks that an evaluation keeps
    /// after training.
    fn of(windows: &WindowSampler, device: &DeviceFacts<'_>, is_named: &dyn Fn(StackId) -> bool) -> WindowLeaks {
        let locations = device.inputs.locations;
        let mut by_line: BTreeMap<String, Vec<WindowGrowth>> = BTreeMap::new();
        let evaluates = |frame: &Frame| {
            names_forward_only(&frame.filename, &frame.name) == Some(ForwardOnlyUse::Evaluation)
                && !is_library(&frame.filename)
        };
        let is_result = |stack| {
            windows.is_after_training()
                && locations
                    .definitions()
                    .walk_ids(stack)
                    .any(|(_, id)| locations.definitions().frame(id).is_some_and(evaluates))
        };
        let is_native = |stack| device.inputs.table.facts(stack).native_only;
        for growth in windows.grown(&is_native) {
            if is_named(growth.stack) || is_result(growth.stack) {
                continue;
            }
            by_line.entry(locations.stack(growth.stack, growth.context).location).or_default().push(growth);
        }
        let with_unit = |(line, growths): (String, Vec<WindowGrowth>)| {
            let unit = unit(&growths, locations);
            (line, growths, unit)
        };
        let mut lines: Vec<_> = by_line.into_iter().map(with_unit).collect();
        // The order of the lines decides between equal ones.
        lines.sort_by_key(|(_, growths, _)| std::cmp::Reverse(bytes(growths)));
        WindowLeaks { lines, last_peak: windows.last_peak(), after_training: windows.is_after_training() }
    }

    /// The leaks of the lines with the most bytes.
    fn issues(&self, device: &DeviceFacts<'_>) -> Vec<Issue> {
        let largest = self.lines.iter().take(MAX_LINES);
        let found = largest.map(|(_, growths, unit)| leak(device, growths, unit, self.after_training));
        found.filter(|leak| device.matters(leak.bytes)).collect()
    }

    /// When a device with `limit` bytes would be full. `None` if that is far away.
    fn forecast(&self, limit: u64) -> Option<OomForecast> {
        let (_, growths, unit) = self.lines.first()?;
        let free = limit.checked_sub(self.last_peak)?;
        // The growth of the other lines in the same time counts, too.
        let ticks = growths.iter().map(|growth| growth.ticks).max()?;
        let share = |growth: &WindowGrowth| {
            let of_time = ticks as f64 / growth.ticks.max(1) as f64;
            (growth.bytes as f64 * of_time) as u64
        };
        let all: u64 = self.lines.iter().flat_map(|(_, growths, _)| growths).map(share).sum();
        let growth = (all / unit.count.max(1)).max(1);
        let turns = free.checked_div(growth).filter(|turns| *turns <= LONGEST_FORECAST)?;
        let each = ticks as f64 / unit.count.max(1) as f64;
        Some(OomForecast { turn: unit.turn, turns, free, growth, ticks: (turns as f64 * each) as u64 })
    }
}

fn bytes(growths: &[WindowGrowth]) -> u64 {
    growths.iter().map(|growth| growth.bytes).sum()
}

/// The number of blocks that were kept; of growing blocks, how often one became larger.
fn kept_blocks(growths: &[WindowGrowth]) -> u64 {
    let count = |growth: &WindowGrowth| match growth.kind {
        GrowthKind::Blocks => growth.blocks,
        GrowthKind::Sizes => growth.rises as u64,
    };
    growths.iter().map(count).sum::<u64>().max(1)
}

/// The turns of the largest growth: a range, else the outermost loop in the program's own code, else its blocks.
fn unit(growths: &[WindowGrowth], locations: &Locations<'_>) -> Unit {
    let Some(largest) = growths.iter().max_by_key(|growth| (growth.bytes, std::cmp::Reverse(growth.stack))) else {
        return Unit { turn: LoopTurn::Block, name: None, count: 1, at: None };
    };
    match &largest.turns {
        Turns::Ranges(name, count) => {
            Unit { turn: LoopTurn::Range, name: Some(name.to_string()), count: *count, at: None }
        }
        Turns::Iterations(loops) => {
            let own = loops.iter().find_map(|(stack, count)| {
                let frame = locations.definitions().frame(locations.innermost(*stack))?;
                (!is_library(&frame.filename)).then(|| (locations.frame(frame), *count))
            });
            match own {
                Some((at, count)) => Unit { turn: LoopTurn::Iteration, name: None, count, at: Some(at) },
                None => Unit { turn: LoopTurn::Block, name: None, count: kept_blocks(growths), at: None },
            }
        }
    }
}

fn leak(device: &DeviceFacts<'_>, growths: &[WindowGrowth], unit: &Unit, after_training: bool) -> Issue {
    let bytes = bytes(growths);
    let blocks: u64 = growths.iter().map(|growth| growth.blocks).sum();
    let turn = unit.turn.name();
    let (rises, windows) = growths.iter().map(|growth| (growth.rises, growth.windows)).max().unwrap_or_default();
    let grew = format!("in {rises} of {windows} windows of equally many allocations");
    let is_list = growths.iter().any(|growth| growth.kind == GrowthKind::Blocks);
    let outlived = if unit.turn == LoopTurn::Block { "call" } else { turn };
    let evidence = if is_list {
        format!("{} blocks stay allocated; the least that was allocated grew {grew}", count_text(blocks))
    } else {
        format!("each new block is larger than the block that it replaces; the smallest grew {grew}")
    };
    let is_native = growths.iter().all(|growth| device.inputs.table.facts(growth.stack).native_only);
    let holder = format!("an object that outlives the {outlived} (a list, a dict, an attribute) holds each block");
    let fix = match (device.source != EventSource::CudaCalls, is_list) {
        (true, true) => format!("{holder}: store a number, a CPU copy, or fewer tensors; give a cache a bound"),
        (true, false) => BOUND_TENSOR.to_owned(),
        (false, true) if is_native => FREE_BLOCKS.to_owned(),
        (false, true) => format!("{holder}: release it, keep a copy on the CPU, or give a cache a bound"),
        (false, false) => "a buffer that grows with all earlier data has no bound: keep a window, or allocate the \
                           largest size once"
            .to_owned(),
    };
    let mut evidence = vec![evidence];
    if after_training {
        evidence.push("it grows after the last training step".to_owned());
    }
    evidence.extend(unit.at.as_ref().map(|at| format!("an iteration: the program returns to an earlier line of {at}")));
    let each = match &unit.name {
        Some(name) => format!("{turn} {name}"),
        None => turn.to_owned(),
    };
    let sites: Vec<_> = growths.iter().map(|growth| (growth.stack, growth.context)).collect();
    // With a free at the end of each turn, the last turn still uses its blocks.
    let in_use = if is_native { bytes / unit.count.max(1) } else { 0 };
    let last_seq = growths.iter().map(|growth| growth.last_seq).max().unwrap_or(0);
    Issue {
        headline: format!(
            "{} more with each {each}, {} in {} {turn}s",
            size_text(bytes / unit.count.max(1)),
            size_text(bytes),
            count_text(unit.count)
        ),
        evidence,
        place: sites.first().copied(),
        sites,
        fix,
        saves: Some(bytes - in_use).filter(|_| device.at_peak(last_seq)),
        ..device.issue(if is_native { &LEAK_IN_CPP } else { &LEAK }, bytes)
    }
}
