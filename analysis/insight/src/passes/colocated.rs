//! A process that serves a model and trains one, as in reinforcement learning: the memory in use in each activity.
//!
//! An engine that sleeps unmaps the memory of its segments. PyTorch counts its blocks as allocated all the same. So the
//! figures here are those of blocks that have memory on the device.

use super::composition::Composition;
use super::pass::{BlockAllocated, LifetimeEnded};
use super::phase::Phase;
use crate::rules::{Activity, ServingStage};
use memtrace_replay::{Allocator, BlockState, PhysicalMemory};

/// The activities of a process that serves and trains, on one device.
#[derive(Clone, Debug, Default)]
pub struct Colocated {
    activities: [Option<ActivityFigures>; Activity::ALL.len()],
    /// Whether the program has run a backward pass or an optimizer.
    trains: bool,
    current: Option<Activity>,
    paused: Paused,
}

/// The highest bytes that had memory in one activity.
#[derive(Clone, Debug, Default)]
pub struct ActivityFigures {
    /// How often the activity began.
    pub times: u64,
    /// The bytes of blocks with memory at the highest.
    pub bytes: u64,
    /// The blocks with memory at that time.
    pub composition: Composition,
    /// The blocks without memory at that time.
    paused: Paused,
}

impl ActivityFigures {
    /// The bytes of blocks without memory at the highest.
    pub fn paused(&self) -> u64 {
        self.paused.bytes
    }
}

/// The blocks whose memory is unmapped.
#[derive(Clone, Debug, Default)]
struct Paused {
    /// Their bytes.
    bytes: u64,
    /// The segments without memory, in order: address and size.
    segments: Vec<(u64, u64)>,
    /// The number of changes of mappings at which this was found.
    changes: u64,
}

impl Paused {
    /// Follows the changes of mappings. Memory that is unmapped for good, such as a segment that a library releases
    /// without PyTorch, has no blocks.
    fn update(&mut self, device: i16, physical: &PhysicalMemory, allocator: &Allocator) {
        let unmapped = physical.unmapped_segments().get(&device);
        let changes = unmapped.map_or(0, |unmapped| unmapped.changes);
        if changes == self.changes {
            return;
        }
        let segments = if unmapped.is_some_and(|unmapped| unmapped.current > 0) {
            physical.segments_without_memory(device).collect()
        } else {
            Vec::new()
        };
        *self = Paused { bytes: 0, segments, changes };
        if !self.segments.is_empty() {
            let blocks = allocator.allocated().filter(|(_, block)| block.state == BlockState::Allocated);
            self.bytes = blocks.filter(|(_, block)| self.includes(block.addr)).map(|(_, block)| block.size).sum();
        }
    }

    /// Whether a block at this address has no memory.
    fn includes(&self, addr: u64) -> bool {
        let after = self.segments.partition_point(|(start, _)| *start <= addr);
        let before = after.checked_sub(1).and_then(|at| self.segments.get(at));
        before.is_some_and(|(start, size)| addr - start < *size)
    }
}

impl Colocated {
    /// The figures of an activity. `None` if it did not occur.
    pub fn activity(&self, activity: Activity) -> Option<&ActivityFigures> {
        self.activities[activity as usize].as_ref().filter(|_| activity != Activity::Train || self.trains)
    }

    /// The activity of an allocation in a phase. `stage` is the stage that its stack proves. `is_of_engine` is true if
    /// a function of an engine is on its stack. `None` if it belongs to the start, or to none.
    fn activity_of(&self, stage: Option<ServingStage>, is_of_engine: bool, phase: Phase) -> Option<Activity> {
        let has_begun = self.activities.iter().any(Option::is_some);
        match stage {
            Some(stage) if stage.serves() => Some(Activity::Rollout),
            Some(ServingStage::Load) if has_begun => Some(Activity::Sync),
            None if !is_of_engine && trains(phase) => Some(Activity::Train),
            _ => None,
        }
    }

    /// Follows an allocation of a program that has an engine.
    #[inline]
    pub(super) fn allocated(
        &mut self,
        allocated: &BlockAllocated<'_>,
        stage: Option<ServingStage>,
        is_of_engine: bool,
    ) {
        let BlockAllocated { e, usage, classification, physical, allocator, .. } = *allocated;
        let Some(activity) = self.activity_of(stage, is_of_engine, classification.phase) else { return };
        let begins = self.current.replace(activity) != Some(activity);
        self.trains |=
            matches!(classification.phase, Phase::Backward | Phase::Optimizer) && activity == Activity::Train;
        self.paused.update(e.device, physical, allocator);
        let figures = self.activities[activity as usize].get_or_insert_default();
        figures.times += u64::from(begins);
        let bytes = usage.allocated.saturating_sub(self.paused.bytes);
        if bytes > figures.bytes {
            figures.bytes = bytes;
            figures.composition.restart(e, *allocated.now, classification.phase, *usage);
            if figures.paused.changes != self.paused.changes {
                figures.paused = self.paused.clone();
            }
        }
    }

    /// Adds a block to the activities at whose highest it had memory.
    #[inline]
    pub(super) fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        for figures in self.activities.iter_mut().flatten() {
            if figures.composition.includes(ended.block.seq) && !figures.paused.includes(ended.block.memory.addr) {
                ended.add_to(&mut figures.composition);
            }
        }
    }
}

/// Whether a phase belongs to a training step.
fn trains(phase: Phase) -> bool {
    matches!(phase, Phase::Forward | Phase::Backward | Phase::Recompute | Phase::Optimizer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_paused_segments_have_no_memory() {
        let paused = Paused { segments: vec![(0x1000, 0x400), (0x3000, 0x200)], ..Paused::default() };
        let found = [0xfff, 0x1000, 0x13ff, 0x1400, 0x3100, 0x3200].map(|addr| paused.includes(addr));
        assert_eq!(found, [false, true, true, false, true, false]);
    }
}
