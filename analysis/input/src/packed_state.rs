//! The [`KeptState`] of a trace of version 1.5, which has it among its definitions (kinds 27 and 28 of
//! `trace/FORMAT.md`) and no file beside it.

use memtrace_trace::error::Result;
use memtrace_trace::file::PackedState;
use memtrace_trace::rotation::Rotation;
use memtrace_trace::wire::Cursor;

use crate::kept_state::{KeptBlock, KeptPosition, KeptProgress, KeptState};

/// Decodes the state. Fails for malformed bytes.
pub(crate) fn unpack(packed: &PackedState, rotation: Rotation) -> Result<KeptState> {
    Ok(KeptState {
        rotation,
        is_partial: false,
        progress: progress(&mut Cursor::new(&packed.progress))?,
        blocks: packed.blocks.iter().map(|bytes| block(&mut Cursor::new(bytes))).collect::<Result<_>>()?,
    })
}

fn option(c: &mut Cursor<'_>) -> Result<Option<u32>> {
    Ok(c.varint()?.checked_sub(1).map(|value| u32::try_from(value).unwrap_or(u32::MAX)))
}

fn position(c: &mut Cursor<'_>) -> Result<KeptPosition> {
    Ok(KeptPosition {
        step: option(c)?,
        phase: c.str()?.into(),
        phase_changes: c.varint32()?,
        backward_passes: c.varint32()?,
        optimizer_steps: c.varint32()?,
    })
}

fn progress(c: &mut Cursor<'_>) -> Result<KeptProgress> {
    let (position, ended_steps, main_thread, bits) = (position(c)?, c.varint32()?, c.varint32()?, c.varint32()?);
    let has = |bit: u32| bits >> bit & 1 != 0;
    Ok(KeptProgress {
        position,
        ended_steps,
        main_thread,
        model_ran: has(0),
        step_is_over: has(1),
        optimizer_has_stepped: has(2),
        awaits_loader: has(3),
        optimizer_is_running: has(4),
        has_profiler_ranges: has(5),
        backward_passes_in_step: c.varint32()?,
        backward_passes_of_first_step: option(c)?,
        optimizer_steps: c.varint32()?,
    })
}

fn block(c: &mut Cursor<'_>) -> Result<KeptBlock> {
    let (seq, position, phase, category, rule) = (c.varint()?, position(c)?, c.str()?, c.str()?, c.str()?);
    let classification = (!category.is_empty()).then(|| (category.into(), rule.into()));
    Ok(KeptBlock { seq, position, phase: phase.into(), classification })
}
