//! The rest of a step that an error interrupted, as blocks: those of an earlier iteration, at later times.

use std::collections::HashMap;

use crate::passes::lifetimes::{BEFORE_STEPS, BlockLifetime, NEVER};
use crate::passes::phase::Phase;
use crate::passes::rest_of_step::{RestBlock, RestEvent, RestOfStep};
use memtrace_trace::ids::{ContextId, StackId};

/// A request that failed. The recording ends there for replays, or goes on with the rest of the step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FailedRequest {
    /// `seq` of the error.
    pub seq: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The stack and the context of the request.
    pub at: (StackId, ContextId),
    /// The phase.
    pub phase: Phase,
    /// The step; `None` before the first.
    pub step: Option<u32>,
}

/// The blocks up to the failed request, and those of the rest. `blocks`: the recorded ones before the request, in the
/// order of their allocation. `None` if they lack a block of the earlier iteration.
pub(super) fn continued(
    blocks: &[BlockLifetime],
    failed: &FailedRequest,
    rest: &RestOfStep,
) -> Option<Vec<BlockLifetime>> {
    let find = |seq: u64| {
        let seq = u32::try_from(seq).ok()?;
        blocks.binary_search_by_key(&seq, |block| block.allocated).ok()
    };
    let start = u32::try_from(failed.seq).ok()?;
    let mut all = blocks.to_vec();
    for block in all.iter_mut().filter(|block| block.freed >= start && block.freed < NEVER) {
        // What the error unwinds would have stayed.
        (block.freed, block.freed_context) = (NEVER, ContextId::NONE);
    }
    let Some(RestEvent::Requested { earlier: first, .. }) = rest.events.first() else { return None };
    let passes_then = blocks[find(*first)?].backward_passes;
    let passes_now = blocks.last().map_or(0, |block| block.backward_passes);
    // By number of the request: the indices of its block and of the earlier one.
    let mut new: HashMap<usize, (usize, usize)> = HashMap::new();
    for (seq, event) in (start..NEVER).zip(&rest.events) {
        match event {
            RestEvent::Requested { earlier, .. } => {
                let earlier = find(*earlier)?;
                new.insert(new.len(), (all.len(), earlier));
                let mut block = blocks[earlier];
                (block.allocated, block.freed, block.freed_context) = (seq, NEVER, ContextId::NONE);
                block.is_freed_in_backward = false;
                block.step = failed.step.unwrap_or(BEFORE_STEPS);
                block.backward_passes = passes_now.wrapping_add(block.backward_passes.wrapping_sub(passes_then));
                all.push(block);
            }
            RestEvent::FreeRequested(block) => {
                let (index, earlier) = match block {
                    RestBlock::New(number) => *new.get(number)?,
                    RestBlock::Old { seq, earlier, .. } => (find(*seq)?, find(*earlier)?),
                };
                let earlier = blocks[earlier];
                let block = &mut all[index];
                (block.freed, block.freed_context) = (seq, earlier.freed_context);
                block.is_freed_in_backward = earlier.is_freed_in_backward;
            }
            RestEvent::FreeCompleted(_) => {}
        }
    }
    Some(all)
}
