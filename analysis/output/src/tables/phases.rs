//! The rows of the table `phases`: what each phase of each step allocated and freed on a device.
//!
//! They have the figures of the summary's phases: frees of the program's teardown belong to no phase, and what follows
//! the last step without a computation is `other` of that step. The summary keeps sums and few steps; these are all
//! steps of a window.

use std::collections::BTreeMap;

use memtrace_insight::passes::{EventClassification, Phase, PhaseRow};

use super::columns::{INT64, OPTIONAL_INT32, ProcessColumns, TEXT};
use super::writer::{Columns, Field, Table};

pub(super) const PHASES: &Columns = &[
    ("run", TEXT),
    ("rank", OPTIONAL_INT32),
    ("pid", OPTIONAL_INT32),
    ("device", OPTIONAL_INT32),
    ("step", OPTIONAL_INT32),
    ("phase", TEXT),
    ("began_ns", INT64),
    ("ended_ns", INT64),
    ("allocations", INT64),
    ("allocated", INT64),
    ("frees", INT64),
    ("freed", INT64),
    ("peak", INT64),
];

/// An allocation, or a request to free.
pub(super) struct PhaseEvent<'a> {
    /// The number of the block in its allocator.
    pub(super) block: usize,
    pub(super) bytes: u64,
    /// Allocated bytes after it.
    pub(super) level: u64,
    pub(super) time_ns: u64,
    pub(super) step: Option<u32>,
    pub(super) classification: &'a EventClassification,
    /// Whether it is part of the exported window.
    pub(super) is_shown: bool,
}

/// The phases of all devices. Events must come in order.
#[derive(Default)]
pub(super) struct PhaseRows {
    devices: BTreeMap<i16, DevicePhases>,
}

/// The phases of one device.
#[derive(Default)]
struct DevicePhases {
    rows: BTreeMap<(Option<u32>, Phase), TimedRow>,
    /// The step in which each block was allocated, by its number.
    block_steps: Vec<Option<u32>>,
    /// Frees that belong to the teardown if no allocation follows.
    pending: Vec<Change>,
    level: u64,
    /// The latest step that has a row, and whether it computes anything.
    step: Option<u32>,
    computes: bool,
    /// The step before it.
    previous_step: Option<u32>,
}

#[derive(Clone, Copy, Default)]
struct TimedRow {
    row: PhaseRow,
    began_ns: u64,
    ended_ns: u64,
}

#[derive(Clone, Copy)]
struct Change {
    is_free: bool,
    phase: Phase,
    bytes: u64,
    before: u64,
    level: u64,
    time_ns: u64,
    is_shown: bool,
}

impl PhaseRows {
    pub(super) fn allocated(&mut self, device: i16, event: &PhaseEvent<'_>) {
        let device = self.devices.entry(device).or_default();
        if device.block_steps.len() <= event.block {
            device.block_steps.resize(event.block + 1, None);
        }
        device.block_steps[event.block] = event.step;
        let change = device.change(event, false);
        for free in std::mem::take(&mut device.pending) {
            device.add(device.step, &free);
        }
        device.add(event.step, &change);
    }

    pub(super) fn freed(&mut self, device: i16, event: &PhaseEvent<'_>) {
        let device = self.devices.entry(device).or_default();
        let change = device.change(event, true);
        let block_step = device.block_steps.get(event.block).copied().flatten();
        let is_older = block_step != event.step || !device.pending.is_empty();
        if event.classification.may_be_teardown(is_older) {
            device.pending.push(change);
        } else {
            device.add(event.step, &change);
        }
    }

    /// Whether frees of the window wait for the allocation that follows them.
    pub(super) fn is_pending(&self) -> bool {
        self.devices.values().any(|device| device.pending.iter().any(|free| free.is_shown))
    }

    /// Ends the recording. If nothing was computed after the last step, that work began no step.
    pub(super) fn finish(&mut self) {
        self.devices.values_mut().for_each(DevicePhases::join_rest);
    }

    /// Writes the rows, by device, step and phase.
    pub(super) fn write(
        &self,
        process_columns: &ProcessColumns<'_>,
        table: &mut Table<'_>,
    ) -> parquet::errors::Result<()> {
        for (device, phases) in &self.devices {
            for ((step, phase), TimedRow { row, began_ns, ended_ns }) in &phases.rows {
                table.row(&[
                    Field::Text(process_columns.run),
                    Field::OptionalInt32(process_columns.rank),
                    Field::OptionalInt32(Some(process_columns.pid)),
                    Field::OptionalInt32(Some((*device).into())),
                    Field::OptionalInt32(step.map(|step| step as i32)),
                    Field::Text(phase.name()),
                    Field::Int64(*began_ns),
                    Field::Int64(*ended_ns),
                    Field::Int64(row.allocations),
                    Field::Int64(row.allocated),
                    Field::Int64(row.frees),
                    Field::Int64(row.freed),
                    Field::Int64(row.peak),
                ])?;
            }
        }
        Ok(())
    }
}

impl DevicePhases {
    fn change(&mut self, event: &PhaseEvent<'_>, is_free: bool) -> Change {
        let before = std::mem::replace(&mut self.level, event.level);
        let PhaseEvent { bytes, level, time_ns, is_shown, .. } = *event;
        Change { is_free, phase: event.classification.phase, bytes, before, level, time_ns, is_shown }
    }

    fn add(&mut self, step: Option<u32>, change: &Change) {
        if step != self.step {
            (self.previous_step, self.step, self.computes) = (self.step, step, false);
        }
        self.computes |= change.phase.computes();
        if !change.is_shown {
            return;
        }
        let Change { is_free, phase, bytes, before, level, time_ns, .. } = *change;
        let timed = self.rows.entry((step, phase)).or_insert(TimedRow { began_ns: time_ns, ..TimedRow::default() });
        timed.ended_ns = time_ns;
        if is_free { timed.row.free(bytes, before, level) } else { timed.row.alloc(bytes, before, level) }
    }

    fn join_rest(&mut self) {
        let Some(last) = self.step.filter(|step| *step > 0 && !self.computes) else { return };
        for phase in Phase::ALL {
            let Some(rest) = self.rows.remove(&(Some(last), phase)) else { continue };
            let into = (self.previous_step.or(Some(last)), Phase::Other);
            let joined = self.rows.entry(into).or_insert(TimedRow { began_ns: rest.began_ns, ..TimedRow::default() });
            joined.began_ns = joined.began_ns.min(rest.began_ns);
            joined.ended_ns = joined.ended_ns.max(rest.ended_ns);
            joined.row.absorb(&rest.row);
        }
    }
}
