//! Which calls of a model compute gradients.
//!
//! Code inside a model can switch gradients off (a rotary embedding, a momentum encoder), autocast switches them on to
//! cast a weight, and a program can evaluate with gradients on. So the mode of one event does not tell whether the
//! program trains. An outermost call of a module trains if autograd records at some point of it, and if a backward pass
//! runs through the results of such calls.
//!
//! [`OpenCall`] follows one call as events stream. [`ModelCalls`] has what only later events show. It comes from the
//! first pass over the recording, which [`super::steps`] makes.

use std::collections::{HashMap, HashSet};

use memtrace_trace::event::{Action, Event, Flags};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{FrameId, StackId, ThreadId};

use super::forward_only::{CacheGrowthTable, ForwardOnlyCalls, ForwardOnlyFinder};
use super::stacks::{StackFacts, StackTable};
use crate::rules::{ForwardOnlyUse, is_loss};

/// The number of calls without a backward pass after which a place in the program does not train. The first forward
/// pass of a training can end with an error, before its backward pass.
const CALLS_WITHOUT_BACKWARD: u32 = 2;

/// The outermost call of a module that a thread is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OpenCall {
    thread: ThreadId,
    /// The place of the call ([`StackFacts::outermost_module`]); `NONE` between calls.
    place: StackId,
    /// Whether autograd has recorded in this call.
    has_gradients: bool,
    /// The Python stack of the latest allocation, if gradients were on. Without another event of this stack at which
    /// they are off, autograd records. Such an event shows that autocast cast a weight.
    maybe_recorded: Option<StackId>,
}

impl OpenCall {
    /// Whether this event, outside backward passes, is part of a call or of the code between calls.
    #[inline]
    fn is_part(&self, e: &Event, facts: &StackFacts) -> bool {
        // Other threads load data while a model runs. A truncated stack lacks the outermost frames.
        let is_unrelated = facts.native_only || e.stack.is_none() || e.thread != self.thread;
        !(facts.outermost_module.is_none() && is_unrelated || e.flags.contains(Flags::STACK_TRUNCATED))
    }

    /// Begins another call if the event is not part of this one. Returns this call if it ends.
    #[inline]
    fn end_before(&mut self, e: &Event, facts: &StackFacts) -> Option<OpenCall> {
        let next = OpenCall { thread: e.thread, place: facts.outermost_module, ..OpenCall::default() };
        let ends = (next.thread, next.place) != (self.thread, self.place);
        ends.then(|| {
            let ended = std::mem::replace(self, next);
            OpenCall { has_gradients: ended.has_gradients || ended.maybe_recorded.is_some(), ..ended }
        })
    }

    /// Observes the gradient mode of an event of the call. `stack` is its Python stack.
    #[inline]
    fn observe_mode(&mut self, e: &Event, stack: StackId) {
        let is_on = e.flags.contains(Flags::GRAD_KNOWN) && e.flags.contains(Flags::GRAD_ENABLED);
        if is_on && e.action != Action::Alloc {
            return;
        }
        let before = std::mem::replace(&mut self.maybe_recorded, is_on.then_some(stack));
        self.has_gradients |= before.is_some_and(|before| before != stack);
    }

    /// Observes the next event outside backward passes. `stack` is its Python stack. `records_later` is true if
    /// autograd will record in the call of this event.
    #[inline]
    pub(super) fn observe(&mut self, e: &Event, facts: &StackFacts, stack: StackId, records_later: bool) {
        if self.is_part(e, facts) {
            self.end_before(e, facts);
            self.observe_mode(e, stack);
        }
        self.has_gradients |= records_later;
    }

    /// Whether autograd has recorded in the call that this event is part of.
    #[inline]
    pub(super) fn records(&self, e: &Event, facts: &StackFacts) -> bool {
        self.has_gradients && !facts.outermost_module.is_none() && e.thread == self.thread
    }
}

/// The calls of models, as a pass over the whole recording shows them.
#[derive(Clone, Debug)]
pub struct ModelCalls {
    /// The calls that begin without gradients and record later: `seq` of the first event, and of the first one with
    /// gradients.
    late: Vec<(u64, u64)>,
    /// The calls without gradients in which autocast casts weights: `seq` of the first and the last of these events.
    casts: Vec<(u64, u64)>,
    /// The places of calls whose results no backward pass uses.
    untrained: HashSet<StackId>,
    /// The places of calls whose results a backward pass may use after the end of the recording.
    may_train: HashSet<StackId>,
    /// `seq` of the last event that is part of a training step.
    last_training: u64,
    /// The uses of calls without gradients.
    forward_only: ForwardOnlyCalls,
}

impl Default for ModelCalls {
    /// Nothing is known about later events.
    fn default() -> ModelCalls {
        ModelCalls {
            late: Vec::new(),
            casts: Vec::new(),
            untrained: HashSet::new(),
            may_train: HashSet::new(),
            last_training: u64::MAX,
            forward_only: ForwardOnlyCalls::default(),
        }
    }
}

/// Where searches in [`ModelCalls`] begin, for events that come in order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SearchPosition {
    late: usize,
    casts: usize,
}

/// Whether a range has this event. `from` skips the ranges before it.
#[inline]
fn includes(ranges: &[(u64, u64)], from: &mut usize, seq: u64) -> bool {
    while ranges.get(*from).is_some_and(|(_, last)| *last < seq) {
        *from += 1;
    }
    ranges.get(*from).is_some_and(|(first, _)| *first <= seq)
}

impl ModelCalls {
    /// Whether the event is in a call in which autograd will record.
    #[inline]
    pub(super) fn records_later(&self, seq: u64, from: &mut SearchPosition) -> bool {
        includes(&self.late, &mut from.late, seq)
    }

    /// Whether the event is in a call without gradients, although gradients can be on.
    #[inline]
    pub(super) fn is_cast(&self, seq: u64, from: &mut SearchPosition) -> bool {
        includes(&self.casts, &mut from.casts, seq)
    }

    /// Whether no backward pass uses the results of the calls at this place.
    #[inline]
    pub(super) fn is_untrained(&self, place: StackId) -> bool {
        !self.untrained.is_empty() && self.untrained.contains(&place)
    }

    /// The use of the calls without gradients at this place.
    pub(super) fn use_of(&self, place: StackId) -> ForwardOnlyUse {
        self.forward_only.use_of(place)
    }

    /// How caches grow with each call that adds a token.
    pub(super) fn cache_growth(&self) -> &CacheGrowthTable {
        self.forward_only.cache_growth()
    }

    /// Whether each training step makes a call without gradients at this place, such as a teacher's.
    pub(super) fn is_in_each_step(&self, place: StackId) -> bool {
        self.forward_only.is_in_each_step(place)
    }

    /// Of a recording without training, only what the calls are for.
    pub(super) fn without_training(self) -> ModelCalls {
        ModelCalls { forward_only: self.forward_only, ..ModelCalls::default() }
    }

    /// Whether a backward pass may use the results of the calls at this place after the end of the recording.
    pub(super) fn may_train(&self, place: StackId) -> bool {
        self.may_train.contains(&place)
    }

    /// Whether a training step includes this event or a later one.
    #[inline]
    pub(super) fn trains_from(&self, seq: u64) -> bool {
        seq <= self.last_training
    }
}

/// Finds [`ModelCalls`].
#[derive(Debug, Default)]
pub(super) struct CallFinder {
    open: OpenCall,
    /// `seq` of the first and of the last event of the open call.
    seqs: (u64, u64),
    /// `seq` of the first and of the last allocation with gradients of the open call.
    with_gradients: Option<(u64, u64)>,
    late: Vec<(u64, u64)>,
    casts: Vec<(u64, u64)>,
    /// By place without a backward pass: the number of calls with gradients, and `seq` of the last event.
    without_backward: HashMap<StackId, (u32, u64)>,
    last_training: u64,
    forward_only: ForwardOnlyFinder,
    /// Whether the latest event is part of a backward pass.
    in_backward: bool,
    /// By frame: whether it is a loss.
    losses: Vec<bool>,
}

impl CallFinder {
    /// Makes a finder for the definitions of a recording.
    pub(super) fn new(definitions: &Definitions) -> CallFinder {
        CallFinder { losses: definitions.frames.iter().map(is_loss).collect(), ..CallFinder::default() }
    }

    /// Observes an event of a backward pass.
    #[inline]
    pub(super) fn observe_backward(&mut self, seq: u64) {
        self.last_training = seq;
        if !std::mem::replace(&mut self.in_backward, true) {
            self.forward_only.backward_began();
        }
    }

    /// Observes an allocation, a free or an out-of-memory error outside backward passes.
    #[inline]
    pub(super) fn observe(&mut self, e: &Event, table: &StackTable) {
        let facts = table.facts(e.stack);
        if facts.made_node {
            self.last_training = e.seq;
        }
        if !self.open.is_part(e, facts) {
            return;
        }
        self.in_backward = false;
        if let Some(ended) = self.open.end_before(e, facts) {
            self.ended(&ended, table);
            self.seqs.0 = e.seq;
            self.forward_only.begins(self.open.place);
        }
        self.seqs.1 = e.seq;
        self.open.observe_mode(e, table.python(e.stack));
        if e.action != Action::Alloc {
            return;
        }
        if self.open.maybe_recorded.is_some() {
            self.with_gradients = Some((self.with_gradients.map_or(e.seq, |(first, _)| first), e.seq));
        } else if self.is_loss(facts.frame) {
            self.forward_only.computes_loss();
        } else {
            self.forward_only.allocated(e.stack, e.context, e.size);
        }
    }

    fn is_loss(&self, frame: FrameId) -> bool {
        self.losses.get(frame.index()).is_some_and(|is_loss| *is_loss)
    }

    /// Observes a call that has ended.
    fn ended(&mut self, call: &OpenCall, table: &StackTable) {
        let (first, last) = self.seqs;
        if !call.place.is_none() {
            self.forward_only.ended(call.place, !call.has_gradients);
        }
        let Some(with_gradients) = self.with_gradients.take().filter(|_| !call.place.is_none()) else { return };
        if !call.has_gradients {
            self.casts.push(with_gradients);
            return;
        }
        if first < with_gradients.0 {
            self.late.push((first, with_gradients.0));
        }
        if table.is_trained(call.place) {
            self.last_training = self.last_training.max(last);
        } else {
            let (calls, seq) = self.without_backward.entry(call.place).or_default();
            (*calls, *seq) = (*calls + 1, last);
        }
    }

    /// Ends the recording. `last_step_end` is `seq` of the end of the last step. `has_loaders` means that most steps
    /// begin with a call of a data loader.
    pub(super) fn finish(
        mut self,
        definitions: &Definitions,
        table: &StackTable,
        last_step_end: u64,
        has_loaders: bool,
    ) -> ModelCalls {
        let last =
            OpenCall { has_gradients: self.open.has_gradients || self.open.maybe_recorded.is_some(), ..self.open };
        self.ended(&last, table);
        let CallFinder { late, casts, mut last_training, forward_only, .. } = self;
        let forward_only = forward_only.finish(definitions, has_loaders);
        last_training = last_training.max(last_step_end);
        let (mut untrained, mut may_train) = (HashSet::new(), HashSet::new());
        for (place, (count, last)) in self.without_backward {
            if table.has_trained_calls() && count >= CALLS_WITHOUT_BACKWARD {
                untrained.insert(place);
            } else {
                may_train.insert(place);
                last_training = last_training.max(last);
            }
        }
        ModelCalls { late, casts, untrained, may_train, last_training, forward_only }
    }
}
