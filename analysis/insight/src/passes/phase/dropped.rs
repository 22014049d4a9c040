//! The dropped part of a rotated trace, as its definitions state it.

use std::collections::HashMap;
use std::sync::Arc;

use memtrace_trace::file::Definitions;
use memtrace_trace::rotation::Circumstances;

use super::event::{Phase, ProgramPosition};

/// The dropped part of a recording; empty in a recording that was not rotated.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// `seq` of the first kept event of a rotated trace; `u64::MAX` once it has come.
    pub(super) resumes_at: u64,
    pub(super) earlier: Option<Earlier>,
}

impl Dropped {
    pub(super) const NOTHING: Dropped = Dropped { resumes_at: u64::MAX, earlier: None };
}

/// What a rotated trace states about the time before its kept events.
#[derive(Clone, Debug)]
pub(super) struct Earlier {
    /// `seq` of the first kept event.
    pub(super) first_seq: u64,
    pub(super) position: ProgramPosition,
    pub(super) ended_steps: u32,
    pub(super) circumstances: Circumstances,
    /// By `seq` of an allocation: where the program was, and the phase of the allocation.
    pub(super) blocks: Arc<HashMap<u64, (ProgramPosition, Phase)>>,
}

/// The bits of [`Circumstances::bits`].
pub(super) mod bit {
    pub(in crate::passes::phase) const MODEL_RAN: u32 = 1;
    pub(in crate::passes::phase) const STEP_OVER: u32 = 1 << 1;
    pub(in crate::passes::phase) const AFTER_OPTIMIZER: u32 = 1 << 2;
    pub(in crate::passes::phase) const LOADER_AWAITED: u32 = 1 << 3;
    pub(in crate::passes::phase) const OPTIMIZER_RUNNING: u32 = 1 << 4;
    pub(in crate::passes::phase) const PROFILER_RANGES: u32 = 1 << 5;
}

impl Earlier {
    pub(super) fn of(definitions: &Definitions) -> Option<Earlier> {
        let rotation = definitions.rotation.as_ref()?;
        let block = |block: &memtrace_trace::rotation::EarlierBlock<Box<str>>| {
            (block.seq, (ProgramPosition::of(&block.progress), Phase::named(&block.phase).unwrap_or_default()))
        };
        Some(Earlier {
            first_seq: rotation.first_seq,
            position: ProgramPosition::of(&rotation.progress),
            ended_steps: rotation.ended_steps,
            circumstances: rotation.circumstances,
            blocks: Arc::new(definitions.earlier_blocks.values().map(block).collect()),
        })
    }
}
