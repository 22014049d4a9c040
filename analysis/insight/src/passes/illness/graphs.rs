//! Graphs that no backward consumed: what a forward kept for the backward, freed all at once by something else.
//!
//! A backward frees activations one by one as it goes. A graph that is dropped falls as a whole: many blocks, from many places of the
//! forward, with no allocation in between. Whether a backward had run since, and the graphs of how many calls fell together, says what
//! was wrong.

use std::collections::BTreeMap;

use memtrace_trace::ids::{ContextId, StackId};

use super::Mark;
use crate::passes::category::Birth;
use crate::passes::phase::{Moment, Phase};

/// Blocks of a model's call that a graph must have at least, and of how many stacks (a loop over layers has one); a program's own variables
/// hold fewer.
const BLOCKS: usize = 3;
const STACKS: usize = 2;
/// Graphs that fall together when they had been collected; one more at the end, where the last ones fall with it.
const CALLS: usize = 3;

/// A backward that leaves its graph frees nothing of it: so many blocks must be left for each that one frees. What a program itself holds of a
/// forward (a list of features, what a hook put away) is left, too, but what autograd alone had kept beside it goes.
const LEFT: u64 = 3;
/// And so many for each call of the model, whatever backward passes free.
const LEFT_OF_CALL: usize = 2;

/// What became of graphs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fate {
    /// Dropped without a backward.
    Unused,
    /// A backward ran and left them.
    Retained,
    /// Those of several calls were held at once.
    Kept,
}

/// Graphs of one fate and place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Abandoned {
    /// How often it happened.
    pub times: u64,
    /// Bytes of the largest.
    pub bytes: u64,
    /// Blocks of the largest.
    pub blocks: u64,
    /// The largest without the block that was made last: the result, which was wanted.
    pub beside_result: u64,
    /// Calls of the model in the largest.
    pub calls: u64,
    /// Steps in which they had been made.
    pub steps: u64,
    /// The call of the model, to the frame that computes.
    pub site: StackId,
    /// The latest allocation in the largest: the loss, mostly.
    pub last: (StackId, ContextId),
    /// Who freed the largest.
    pub freed_by: StackId,
    /// The latest call of backward before.
    pub backward: StackId,
    /// `seq` of the first and of the last allocation of the largest.
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

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Graphs {
    /// The latest call of backward.
    pub backward: StackId,
    fallen: Vec<Fallen>,
    unwound: Vec<Fallen>,
    consumed: u64,
    consumed_blocks: u64,
    /// The same since the beginning, and the calls of backward.
    consumed_blocks_in_all: u64,
    backwards: u32,
    /// Bytes that backward passes freed of what forwards had kept.
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

    /// The program goes on: what fell since the last allocation fell together.
    #[inline]
    pub(super) fn settle(&mut self) {
        if !self.fallen.is_empty() {
            self.close(false);
        }
    }

    /// The recording ends. One graph that is there now may be at work; several that were collected are not.
    pub(super) fn finish(&mut self) {
        // What unwinding or the end took may be one step's, unless it is of calls that never had a backward, where others had.
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
            // After a backward, what it left is a graph only where that is most of it: a program's variables hold some.
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

    /// What was found, most bytes first.
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
