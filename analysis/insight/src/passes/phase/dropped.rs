//! The dropped part of a rotated trace, as its definitions state it.

use std::collections::HashMap;
use std::sync::Arc;

use memtrace_trace::file::Definitions;
use memtrace_trace::rotation::{Circumstances, EarlierBlock};

use super::event::{Phase, ProgramPosition};

/// The dropped part of a recording; nothing in a recording that was not rotated.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// `seq` of the first kept event of a rotated trace; `u64::MAX` once it has come, and in other recordings.
    pub(super) resumes_at: u64,
    pub(super) earlier: Option<Earlier>,
}

impl Dropped {
    pub(super) fn of(definitions: &Definitions) -> Dropped {
        let Some(rotation) = &definitions.rotation else { return Dropped { resumes_at: u64::MAX, earlier: None } };
        let block = |block: &EarlierBlock<Box<str>>| {
            (block.seq, (ProgramPosition::of(&block.progress), Phase::from_name(&block.phase).unwrap_or_default()))
        };
        let earlier = Earlier {
            position: ProgramPosition::of(&rotation.progress),
            ended_steps: rotation.ended_steps,
            circumstances: rotation.circumstances,
            blocks: Arc::new(definitions.earlier_blocks.values().map(block).collect()),
        };
        Dropped { resumes_at: rotation.first_seq, earlier: Some(earlier) }
    }

    /// Whether profiler ranges ended steps before the first kept event.
    pub(super) fn had_profiler_ranges(&self) -> bool {
        self.earlier.as_ref().is_some_and(|earlier| earlier.circumstances.bits & bit::PROFILER_RANGES != 0)
    }

    /// The number of steps that profiler ranges ended before the first kept event.
    pub(super) fn ended_steps(&self) -> u32 {
        self.earlier.as_ref().map_or(0, |earlier| earlier.ended_steps)
    }
}

/// The time before the first kept event, as the trace states it.
#[derive(Clone, Debug)]
pub(super) struct Earlier {
    pub(super) position: ProgramPosition,
    ended_steps: u32,
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
