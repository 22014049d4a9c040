//! Autograd graphs that no backward pass consumed: activations that a forward pass kept for the backward pass and that
//! something else freed all at once.
//!
//! A backward pass frees activations one by one. A dropped graph is freed as a whole: many blocks, from many places of
//! the forward pass, with no allocation in between. Two facts identify the issue: whether a backward pass ran since,
//! and how many calls' graphs were freed together.

use std::collections::BTreeMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::Mark;
use crate::passes::category::Birth;
use crate::passes::phase::{Moment, Phase};

/// A graph has at least this many blocks of one call of the model, from at least this many stacks. A loop over layers
/// has one stack. A program's own variables hold fewer.
const BLOCKS: usize = 3;
const STACKS: usize = 2;
/// Graphs of this many calls that are freed together had been collected. At the end one more is required, because the
/// current graph is freed with them.
const CALLS: usize = 3;

/// A backward pass that retains its graph frees nothing of it. So at least this many blocks must be left for each block
/// that one frees. Tensors that the program itself holds from a forward pass (a list of features, what a hook stored)
/// are left, too. Memory that only autograd had kept beside them is freed.
const LEFT: u64 = 3;
/// At least this many blocks must also be left per call of the model, regardless of what backward passes free.
const LEFT_OF_CALL: usize = 2;

/// What happened to graphs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fate {
    /// The graph was dropped without a backward pass.
    Unused,
    /// A backward pass ran and left the graph.
    Retained,
    /// The graphs of several calls were held at once.
    Kept,
}

/// The graphs of one fate and place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Abandoned {
    /// How often it happened.
    pub times: u64,
    /// The bytes of the largest graph.
    pub bytes: u64,
    /// The blocks of the largest graph.
    pub blocks: u64,
    /// The bytes of the largest graph without its last block, the result that the program wanted.
    pub beside_result: u64,
    /// The number of calls of the model in the largest graph.
    pub calls: u64,
    /// The number of steps in which they were allocated.
    pub steps: u64,
    /// The stack of the model's call, up to the frame that computes.
    pub site: StackId,
    /// The latest allocation in the largest graph, usually the loss.
    pub last: (StackId, ContextId),
    /// The stack that freed the largest graph.
    pub freed_by: StackId,
    /// The latest call of backward before.
    pub backward: StackId,
    /// `seq` of the first and of the last allocation of the largest graph.
    pub seqs: (u64, u64),
    /// Whether autograd ran nodes of these places.
    pub run: bool,
}

#[derive(Clone, Copy, Debug)]
struct Fallen {
    size: u64,
    seq: u64,
    stack: StackId,
    context: ContextId,
    site: StackId,
    call: u32,
    step: Option<u32>,
    run: bool,
    backward_since: bool,
    freed_by: StackId,
}

/// The unconsumed graphs of one device.
#[derive(Clone, Debug, Default)]
pub struct Graphs {
    /// The latest call of backward.
    pub backward: StackId,
    fallen: Vec<Fallen>,
    unwound: Vec<Fallen>,
    consumed: u64,
    consumed_blocks: u64,
    /// The number of blocks consumed since the beginning, and the number of backward passes.
    consumed_blocks_in_all: u64,
    backwards: u32,
    /// Bytes of the forward passes that backward passes freed, since the beginning.
    pub consumed_in_all: u64,
    found: BTreeMap<(Fate, StackId), Abandoned>,
}

impl Graphs {
    #[inline]
    #[allow(clippy::too_many_arguments, reason = "one event's facts")]
    pub(super) fn freed(
        &mut self,
        birth: &Birth,
        mark: Mark,
        freed_by: StackId,
        phase: Phase,
        inside: bool,
        cut: bool,
        now: &Moment,
    ) {
        self.backwards = now.backwards;
        if matches!(phase, Phase::Backward | Phase::Recompute) {
            self.consumed += birth.size;
            self.consumed_blocks += 1;
            self.consumed_blocks_in_all += 1;
            self.consumed_in_all += birth.size;
        } else if !inside {
            let fallen = fallen(birth, mark, freed_by, now);
            if cut { self.unwound.push(fallen) } else { self.fallen.push(fallen) }
        }
    }

    pub(super) fn alive(&mut self, birth: &Birth, mark: Mark, now: &Moment) {
        self.unwound.push(fallen(birth, mark, StackId::NONE, now));
    }

    /// Takes the next allocation. The blocks that were freed since the previous allocation were freed together.
    #[inline]
    pub(super) fn settle(&mut self) {
        if !self.fallen.is_empty() {
            self.close(false);
        }
    }

    /// Ends the recording. One graph that exists now can be in use; several collected graphs cannot.
    pub(super) fn finish(&mut self) {
        // Blocks freed by unwinding or by the end can belong to one step in progress. They count if a backward pass ran
        // since. They also count if their calls never had a backward pass and other calls had one.
        let unwound = std::mem::take(&mut self.unwound);
        let had = self.consumed_in_all > 0;
        self.fallen.extend(unwound.into_iter().filter(|f| f.backward_since || had && !f.run));
        self.close(true);
    }

    fn close(&mut self, at_end: bool) {
        let mut fallen = std::mem::take(&mut self.fallen);
        let consumed = std::mem::take(&mut self.consumed);
        let consumed_blocks = std::mem::take(&mut self.consumed_blocks);
        if fallen.len() >= BLOCKS {
            // What a backward pass left counts as a graph only if it is most of the graph. A program's variables hold a
            // part.
            let (left, unused): (Vec<Fallen>, Vec<Fallen>) = fallen.iter().partition(|f| f.backward_since);
            let bytes: u64 = left.iter().map(|f| f.size).sum();
            let (run, never): (Vec<Fallen>, Vec<Fallen>) = left.into_iter().partition(|f| f.run);
            let is_most = bytes >= consumed;
            if is_most && run.len() as u64 >= LEFT * consumed_blocks {
                self.judge(&run, Fate::Retained, at_end);
            }
            self.judge(&never, Fate::Unused, at_end || !is_most);
            self.judge(&unused, Fate::Unused, at_end);
        }
        fallen.clear();
        self.fallen = fallen;
    }

    fn judge(&mut self, fallen: &[Fallen], fate: Fate, at_end: bool) {
        let distinct = |of: &mut dyn Iterator<Item = u64>| {
            let mut all: Vec<u64> = of.collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        let mut sites: BTreeMap<StackId, u64> = BTreeMap::new();
        for f in fallen.iter().filter(|f| !f.site.is_none()) {
            *sites.entry(f.site).or_default() += f.size;
        }
        let Some((&site, _)) = sites.iter().max_by_key(|(site, bytes)| (**bytes, **site)) else { return };
        let of_site = fallen.iter().filter(|f| f.site == site).count();
        if of_site < BLOCKS || distinct(&mut fallen.iter().map(|f| u64::from(f.stack.0))) < STACKS {
            return;
        }
        let calls = distinct(&mut fallen.iter().filter(|f| f.site == site).map(|f| u64::from(f.call)));
        if fate == Fate::Retained {
            let per_backward = self.consumed_blocks_in_all as f64 / f64::from(self.backwards.max(1));
            if (of_site as f64) < calls as f64 * (LEFT as f64 * per_backward) || of_site < calls * LEFT_OF_CALL {
                return;
            }
        }
        let fate = if calls >= CALLS + usize::from(at_end) { Fate::Kept } else { fate };
        if at_end && fate != Fate::Kept {
            return;
        }
        let steps = distinct(&mut fallen.iter().map(|f| f.step.map_or(0, |s| u64::from(s) + 1)));
        let (Some(last), Some(first)) = (fallen.iter().max_by_key(|f| f.seq), fallen.iter().min_by_key(|f| f.seq))
        else {
            return;
        };
        let bytes: u64 = fallen.iter().map(|f| f.size).sum();
        let run = fallen.iter().filter(|f| f.run).map(|f| f.size).sum::<u64>() * 2 > bytes;
        let found = self.found.entry((fate, site)).or_default();
        found.times += 1;
        if bytes > found.bytes {
            *found = Abandoned {
                times: found.times,
                bytes,
                blocks: fallen.len() as u64,
                beside_result: bytes - last.size,
                calls: calls as u64,
                steps: steps as u64,
                site,
                last: (last.stack, last.context),
                freed_by: last.freed_by,
                backward: self.backward,
                seqs: (first.seq, last.seq),
                run,
            };
        }
    }

    /// What was found, by bytes in descending order.
    pub fn found(&self) -> Vec<(Fate, Abandoned)> {
        let mut found: Vec<(Fate, Abandoned)> = self.found.iter().map(|((fate, _), a)| (*fate, *a)).collect();
        found.sort_by_key(|(fate, a)| (std::cmp::Reverse(a.bytes), *fate, a.site));
        found
    }
}

fn fallen(birth: &Birth, mark: Mark, freed_by: StackId, now: &Moment) -> Fallen {
    Fallen {
        size: birth.size,
        seq: birth.seq,
        stack: birth.stack,
        context: birth.context,
        site: mark.site,
        call: mark.call,
        step: birth.at.step,
        run: mark.is(Mark::RUN),
        backward_since: now.backwards > birth.at.backwards,
        freed_by,
    }
}
