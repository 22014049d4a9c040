//! The dropped part of a rotated trace, as the rotation has left it.

use std::collections::HashMap;
use std::sync::Arc;

use memtrace_input::{KeptBlock, KeptProgress, KeptState, Recording};

use super::event::{Phase, ProgramPosition};

/// The dropped part of a recording; nothing in a recording that was not rotated.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// `seq` of the first kept event of a rotated trace; `u64::MAX` once it has come, and in other recordings.
    pub(super) resumes_at: u64,
    /// `None` if nothing is known about it.
    pub(super) earlier: Option<Earlier>,
}

impl Dropped {
    pub(super) fn of(recording: &dyn Recording) -> Dropped {
        let rotation = &recording.definitions().rotation;
        Dropped {
            resumes_at: rotation.map_or(u64::MAX, |rotation| rotation.first_seq),
            earlier: recording.kept_state().map(Earlier::of),
        }
    }

    /// Whether profiler ranges ended steps before the first kept event.
    pub(super) fn had_profiler_ranges(&self) -> bool {
        self.earlier.as_ref().is_some_and(|earlier| earlier.progress.has_profiler_ranges)
    }

    /// The number of steps that profiler ranges ended before the first kept event.
    pub(super) fn ended_steps(&self) -> u32 {
        self.earlier.as_ref().map_or(0, |earlier| earlier.progress.ended_steps)
    }
}

/// The time before the first kept event.
#[derive(Clone, Debug)]
pub(super) struct Earlier {
    pub(super) position: ProgramPosition,
    pub(super) progress: KeptProgress,
    /// By `seq` of an allocation: where the program was, and the phase of the allocation.
    pub(super) blocks: Arc<HashMap<u64, (ProgramPosition, Phase)>>,
}

impl Earlier {
    fn of(state: &KeptState) -> Earlier {
        let block = |block: &KeptBlock| {
            (block.seq, (ProgramPosition::of_kept(&block.position), Phase::from_name(&block.phase).unwrap_or_default()))
        };
        Earlier {
            position: ProgramPosition::of_kept(&state.progress.position),
            progress: state.progress.clone(),
            blocks: Arc::new(state.blocks.iter().map(block).collect()),
        }
    }
}
