//! The allocated blocks that limit what a new block can be: a parameter has at most one gradient and one cast of
//! autocast, and a thread has one workspace on each stream.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hash};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::Event;
use memtrace_trace::ids::{ContextId, ThreadId};

use super::block::BlockAllocation;
use super::proof::Proof;
use crate::rules::is_workspace_size;
use memtrace_input::AddressBuildHasher;

/// Where a library keeps one workspace: its size, thread and stream.
type WorkspacePlace = (u64, ThreadId, u64);

/// The allocated blocks, counted.
#[derive(Clone, Debug, Default)]
pub(super) struct LiveBlocks {
    /// The blocks that may be workspaces, by place. `true` means that nothing shows whether the stack multiplies
    /// matrices. The last number is the `seq` of the allocation.
    workspaces: BTreeSet<(WorkspacePlace, bool, u64)>,
    /// Parameters by requested size.
    parameters: HashMap<u64, u32, AddressBuildHasher>,
    /// Blocks that are gradients, or may be gradients of a parameter, by requested size.
    gradients: HashMap<u64, u32, AddressBuildHasher>,
    /// Autocast's casts of weights, by requested size, and by the module whose call casts.
    casts: HashMap<u64, u32, AddressBuildHasher>,
    casts_in_call: HashMap<(ContextId, u64), u32>,
}

/// Adds one to the count of a key.
fn count<K: Hash + Eq, S: BuildHasher>(counts: &mut HashMap<K, u32, S>, key: K) {
    *counts.entry(key).or_default() += 1;
}

/// Subtracts one from the count of a key.
fn uncount<K: Hash + Eq, S: BuildHasher>(counts: &mut HashMap<K, u32, S>, key: &K) {
    if let Some(n) = counts.get_mut(key) {
        *n = n.saturating_sub(1);
    }
}

/// The count of a key.
fn counted<K: Hash + Eq, S: BuildHasher>(counts: &HashMap<K, u32, S>, key: &K) -> u32 {
    counts.get(key).copied().unwrap_or_default()
}

/// Whether a block with this proof is a parameter.
pub(super) fn is_parameter(proof: Proof) -> bool {
    matches!(proof, Proof::ModelLoaded | Proof::ModuleMoved | Proof::Named(TensorKind::Parameter))
}

impl LiveBlocks {
    /// Adds an allocation.
    #[inline]
    pub(super) fn add(&mut self, e: &Event, requested: u64, proof: Proof) {
        match proof {
            _ if is_parameter(proof) => count(&mut self.parameters, requested),
            _ if proof.may_be_workspace() => {
                let place = (requested, e.thread, e.stream);
                self.workspaces.insert((place, proof.is_unsure_workspace(), e.seq));
            }
            Proof::ParameterSized | Proof::AccumulatesGradient | Proof::Named(TensorKind::Gradient) => {
                count(&mut self.gradients, requested);
            }
            Proof::WeightCast => {
                count(&mut self.casts, requested);
                count(&mut self.casts_in_call, (e.context, requested));
            }
            _ => {}
        }
    }

    /// Removes a freed block, after its category was decided.
    #[inline]
    pub(super) fn remove(&mut self, block: &BlockAllocation) {
        let requested = block.memory.requested;
        match block.proof {
            proof if is_parameter(proof) => uncount(&mut self.parameters, &requested),
            proof if proof.may_be_workspace() => {
                let place = (requested, block.site.thread, block.memory.stream);
                self.workspaces.remove(&(place, block.proof.is_unsure_workspace(), block.seq));
            }
            Proof::ParameterSized | Proof::AccumulatesGradient | Proof::Named(TensorKind::Gradient) => {
                uncount(&mut self.gradients, &requested);
            }
            Proof::WeightCast => {
                uncount(&mut self.casts, &requested);
                uncount(&mut self.casts_in_call, &(block.site.event_context, requested));
            }
            _ => {}
        }
    }

    /// Whether fewer gradients than parameters have this size.
    pub(super) fn may_be_gradient(&self, requested: u64) -> bool {
        counted(&self.gradients, &requested) < counted(&self.parameters, &requested)
    }

    /// Whether a block can be a weight in half of its precision, by its size. Autocast keeps one such copy of a weight.
    pub(super) fn may_be_cast(&self, requested: u64) -> bool {
        counted(&self.casts, &requested) < counted(&self.parameters, &(2 * requested))
    }

    /// How many casts of this size one call of a module has made.
    pub(super) fn casts_in_call(&self, call: ContextId, requested: u64) -> u32 {
        counted(&self.casts_in_call, &(call, requested))
    }

    /// Whether a block is the oldest allocated one of its size, thread and stream that may be a workspace. A block of
    /// unknown code counts only where no other does.
    pub(super) fn is_oldest_workspace(&self, block: &BlockAllocation) -> bool {
        let first = |place: WorkspacePlace| {
            let found = self.workspaces.range((place, false, 0)..).next();
            found.filter(|(there, ..)| *there == place).map(|(_, _, seq)| *seq)
        };
        first((block.memory.requested, block.site.thread, block.memory.stream)) == Some(block.seq)
    }

    /// Whether cuBLAS has a workspace for a block's thread and stream.
    pub(super) fn has_workspace_beside(&self, block: &BlockAllocation) -> bool {
        let beside = |(requested, thread, stream): &WorkspacePlace| {
            is_workspace_size(*requested) && (*thread, *stream) == (block.site.thread, block.memory.stream)
        };
        self.workspaces.iter().any(|(place, ..)| beside(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::{Phase, ProgramPosition};
    use memtrace_trace::ids::StackId;

    const WORKSPACE: u64 = 32 << 20;
    const POSITION: ProgramPosition = ProgramPosition {
        phase: Phase::Forward,
        step: Some(0),
        phase_changes: 0,
        backward_passes: 0,
        optimizer_steps: 0,
    };

    fn block(seq: u64, requested: u64, thread: u32, proof: Proof) -> BlockAllocation {
        let mut block = BlockAllocation::of_forward(seq, requested, StackId::NONE, POSITION);
        (block.site.thread, block.proof) = (ThreadId(thread), proof);
        block
    }

    fn add(live: &mut LiveBlocks, block: &BlockAllocation) {
        let e = Event { seq: block.seq, thread: block.site.thread, context: block.site.event_context, ..Event::EMPTY };
        live.add(&e, block.memory.requested, block.proof);
    }

    #[test]
    fn a_workspace_is_the_oldest_block_of_its_thread_and_size() {
        let mut live = LiveBlocks::default();
        let unknown = block(1, WORKSPACE, 1, Proof::MaybeWorkspace);
        let first = block(2, WORKSPACE, 1, Proof::WorkspaceSized);
        let second = block(3, WORKSPACE, 1, Proof::WorkspaceSized);
        let other = block(4, WORKSPACE, 2, Proof::WorkspaceSized);
        let light = block(5, 1 << 20, 1, Proof::LtWorkspaceSized);
        add(&mut live, &unknown);
        assert!(live.is_oldest_workspace(&unknown));
        for block in [&first, &second, &other, &light] {
            add(&mut live, block);
        }
        let oldest = |live: &LiveBlocks, block| live.is_oldest_workspace(block);
        // Code that multiplies matrices is the better evidence.
        assert!(oldest(&live, &first) && oldest(&live, &other) && oldest(&live, &light));
        assert!(!oldest(&live, &second) && !oldest(&live, &unknown));
        assert!(live.has_workspace_beside(&light));
        assert!(!live.has_workspace_beside(&block(6, 1 << 20, 3, Proof::LtWorkspaceSized)));
        live.remove(&first);
        assert!(oldest(&live, &second));
    }

    #[test]
    fn casts_and_gradients_are_at_most_one_of_each_parameter() {
        let mut live = LiveBlocks::default();
        for seq in [1, 2] {
            add(&mut live, &block(seq, 64, 1, Proof::Named(TensorKind::Parameter)));
        }
        assert!(live.may_be_cast(32) && !live.may_be_cast(64));
        let (one, two) = (block(3, 32, 1, Proof::WeightCast), block(4, 32, 1, Proof::WeightCast));
        add(&mut live, &one);
        assert!(live.may_be_cast(32));
        add(&mut live, &two);
        assert!(!live.may_be_cast(32));
        live.remove(&one);
        assert!(live.may_be_cast(32));
        add(&mut live, &block(5, 64, 1, Proof::Named(TensorKind::Gradient)));
        assert!(live.may_be_gradient(64) && !live.may_be_gradient(32));
        add(&mut live, &block(6, 64, 1, Proof::ParameterSized));
        assert!(!live.may_be_gradient(64));
    }
}
