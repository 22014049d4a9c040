//! Finds where steps end, from the ranges that PyTorch itself marks: `Optimizer.step#...`, `Optimizer.zero_grad#...`,
//! `enumerate(DataLoader)#...`.
//!
//! An optimizer is identified by the class in its range's name and by the stack that calls it. A step is the shortest
//! part of the program in which no optimizer steps twice:
//!
//! - A step ends with the last optimizer call before an optimizer of this step steps again. A backward pass or a data
//!   loader call must come in between, so an optimizer that steps group by group steps once. Two networks that are
//!   trained in turn, each with its own optimizer, share a step.
//! - An optimizer that is called for the first time, after other optimizers of the step, belongs to that step. If it is
//!   also the next one to be called, the program has turned to other work, and it begins a step of its own.
//! - If gradients are cleared twice at one place, with a backward pass and no optimizer step in between, a step was
//!   skipped. A `GradScaler` that finds infinities does that. The skipped step ends at the second clearing. It ends
//!   earlier if a data loader was called after the backward pass: there.
//! - Optimizers that step inside a backward pass, parameter by parameter, are one optimizer, whose step ends with that
//!   backward pass.
//! - A place that is called for the first time can belong to an optimizer that has stepped elsewhere. Then the
//!   optimizer has its state already: its first call there keeps no block, although the first call of another place
//!   with the same class did. If exactly one place qualifies, both places are one optimizer.
//!
//! [`super::phase`] decides where the next step begins. The first pass finds the ends of steps if the recording has
//! such ranges, or if nothing trains. It also finds which calls of models train ([`super::model_calls`]).

use std::collections::{HashMap, HashSet};

use memtrace_trace::event::{Action, Event, Flags, Source};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{StackId, ThreadId};

use super::model_calls::{CallFinder, ModelCalls};
use super::stacks::StackTable;
use crate::rules::{ForwardOnlyUse, LabelRule, Meaning, label_rule};
use memtrace_input::Recording;

/// The maximum number of distinct optimizers in a step, and of places that clear gradients.
const MAX_SITES: usize = 256;
/// The maximum number of places in the program that load batches.
const MAX_LOADS: usize = 4096;

/// The ends of steps. Needs eight bytes per step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StepEnds {
    ends: Vec<u64>,
    loaders: bool,
}

/// The meaning of each label; `None` for the program's own labels.
#[derive(Clone, Debug, Default)]
pub(super) struct LabelRules(Vec<Option<&'static LabelRule>>);

impl LabelRules {
    /// Makes the rules for the labels of a recording.
    pub(super) fn of(definitions: &Definitions) -> LabelRules {
        let mut rules = Vec::new();
        for (id, label) in &definitions.labels {
            if let Some(rule) = label_rule(label) {
                let index = *id as usize;
                rules.resize(rules.len().max(index + 1), None);
                rules[index] = Some(rule);
            }
        }
        LabelRules(rules)
    }

    /// The rule for the label of a range event.
    #[inline]
    pub(super) fn get(&self, e: &Event) -> Option<&'static LabelRule> {
        *self.0.get(usize::try_from(e.label_id()).ok()?)?
    }

    fn any(&self, meaning: Meaning) -> bool {
        self.0.iter().flatten().any(|rule| rule.meaning == meaning)
    }
}

/// The facts about the training loop that only the whole recording shows.
#[derive(Clone, Debug, Default)]
pub(super) struct TrainingLoop {
    pub(super) ends: StepEnds,
    pub(super) calls: ModelCalls,
    /// The stacks of user code that loads a batch between two steps. The first batch comes before the first step.
    pub(super) batches: HashSet<StackId>,
    /// Whether the program calls a model between two steps, so that these stacks are all that load batches of the
    /// training.
    pub(super) knows_batches: bool,
}

impl TrainingLoop {
    /// Finds the training loop of a recording. Streams it if it has ranges of an optimizer's step, or no training at
    /// all.
    pub(super) fn of(recording: &dyn Recording, table: &StackTable, rules: &LabelRules) -> TrainingLoop {
        let mut finder = LoopFinder::new(recording.definitions(), table, rules);
        if finder.is_needed() {
            recording.stream(&mut |events| events.iter().for_each(|e| finder.observe(e, table)));
        }
        finder.finish(recording.definitions(), table)
    }
}

/// Finds the [`TrainingLoop`] of a recording while it streams.
pub(super) struct LoopFinder {
    steps: StepFinder,
    calls: CallFinder,
    has_ranges: bool,
    may_train: bool,
    /// In a rotated recording, events before the kept ones are not in the order of the program.
    is_rotated: bool,
}

impl LoopFinder {
    pub(super) fn new(definitions: &Definitions, table: &StackTable, rules: &LabelRules) -> LoopFinder {
        LoopFinder {
            steps: StepFinder { rules: rules.clone(), has_nodes: table.has_nodes(), ..StepFinder::default() },
            calls: CallFinder::new(definitions),
            has_ranges: rules.any(Meaning::OptimizerStep),
            may_train: table.may_train(),
            is_rotated: definitions.rotation.is_some(),
        }
    }

    /// Whether the recording has ranges of an optimizer's step, or no training at all.
    pub(super) fn is_needed(&self) -> bool {
        self.has_ranges || !self.may_train
    }

    #[inline]
    pub(super) fn observe(&mut self, e: &Event, table: &StackTable) {
        if e.source == Source::Label {
            self.steps.observe_label(e);
            return;
        }
        let in_backward = e.flags.contains(Flags::IN_BACKWARD);
        let is_earlier = self.is_rotated && e.flags.contains(Flags::PREEXISTING);
        if in_backward && !is_earlier {
            self.steps.observe_backward(e.seq);
        }
        if is_earlier || !matches!(e.source, Source::Torch | Source::TorchReporter | Source::TorchCpu) {
            return;
        }
        if in_backward || table.facts(e.stack).in_engine || table.contexts().is_node(e.context) {
            self.calls.observe_backward(e.seq);
        } else if matches!(e.action, Action::Alloc | Action::FreeRequested | Action::Oom) {
            self.steps.observe_outside(e, table);
            self.calls.observe(e, table);
        }
    }

    pub(super) fn finish(self, definitions: &Definitions, table: &StackTable) -> TrainingLoop {
        if !self.is_needed() {
            return TrainingLoop::default();
        }
        let LoopFinder { mut steps, calls, has_ranges, .. } = self;
        steps.finish();
        // A backward pass that is replayed as a CUDA graph is not recorded, but the optimizer's call after it is.
        let last_end = steps.ends.last().copied().unwrap_or(0);
        let calls = calls.finish(definitions, table, last_end, steps.has_loaders());
        if !has_ranges {
            return TrainingLoop { calls: calls.without_training(), ..TrainingLoop::default() };
        }
        let (knows_batches, batches) = steps.batches.stacks(table, &calls, steps.has_loaders());
        TrainingLoop { ends: steps.into_ends(), calls, batches, knows_batches }
    }
}

impl StepEnds {
    /// Finds the ends of the steps of a recording. Empty if the recording has no range of an optimizer's step.
    pub fn of(recording: &dyn Recording) -> StepEnds {
        let definitions = recording.definitions();
        TrainingLoop::of(recording, &StackTable::new(definitions), &LabelRules::of(definitions)).ends
    }

    /// The event numbers (`seq`) after which a step has ended, in order.
    pub fn all(&self) -> &[u64] {
        &self.ends
    }

    /// Whether most steps begin with a call of a data loader.
    pub fn loaders(&self) -> bool {
        self.loaders
    }
}

/// An optimizer, or a place where gradients are cleared: label and stack.
type Site = (u64, StackId);

/// The last time that one place cleared gradients.
struct Cleared {
    site: Site,
    seq: u64,
    calls: u64,
}

/// Whether a step, or a call without gradients, has ended and the model has not been called since.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Between {
    #[default]
    No,
    AfterOptimizer,
    AfterLoader,
    /// After a call of a model without gradients at this place.
    AfterCall(StackId),
}

/// A place that calls an optimizer.
struct Caller {
    site: Site,
    /// The first place that called this optimizer.
    optimizer: Site,
    /// Whether the first call kept a block: the optimizer allocated its state.
    allocated_state: bool,
}

/// The running first call of a place.
struct FirstCall {
    site: Site,
    thread: ThreadId,
    /// The blocks that the call has allocated and not freed: device and address.
    blocks: HashSet<(i16, u64)>,
    /// Where the current step would end if the optimizer had stepped in it before. `None` if there was no backward pass
    /// in between.
    end_before: Option<u64>,
}

/// The calls of optimizers.
#[derive(Default)]
struct OptimizerCalls {
    /// By thread: the number of open optimizer ranges.
    depths: HashMap<ThreadId, u32>,
    calls: u64,
    callers: Vec<Caller>,
    first_call: Option<FirstCall>,
}

/// The step that has not ended.
#[derive(Default)]
struct CurrentStep {
    /// The optimizers that have stepped in it.
    stepped: Vec<Site>,
    /// The number of optimizers that stepped in the previous step.
    stepped_before: usize,
    /// `seq` of the start and the end of the last optimizer range.
    last_start: u64,
    last_end: u64,
    /// An optimizer that has joined the step, and where the step would have ended without it.
    joined: Option<(Site, u64)>,
}

/// The calls of data loaders.
#[derive(Default)]
struct LoaderCalls {
    /// `seq` of the last one.
    last: u64,
    /// The number of steps with a call.
    steps: usize,
    /// Whether the current step has one.
    in_step: bool,
}

/// Finds the stacks of user code that loads batches.
#[derive(Default)]
struct BatchFinder {
    /// The thread that last called a model. It also calls `backward()`.
    main_thread: ThreadId,
    between: Between,
    /// The stacks of user code that has allocated since the step ended, with what came before.
    maybe_batch: Vec<(StackId, Between)>,
    /// The places of the first calls of a model after a step.
    called: HashSet<StackId>,
    /// The place of a call, the stack of user code that has allocated before it, and what came before that.
    loads: HashSet<(StackId, StackId, Between)>,
}

impl BatchFinder {
    /// The first call of a model after a step or after a call without gradients.
    fn model_called(&mut self, place: StackId) {
        let after = std::mem::take(&mut self.between);
        for (stack, before) in self.maybe_batch.drain(..) {
            if self.loads.len() < MAX_LOADS {
                self.loads.insert((place, stack, before));
            }
        }
        if !matches!(after, Between::AfterCall(_)) && self.called.len() < MAX_SITES {
            self.called.insert(place);
        }
    }

    /// The stacks that load batches of the training, and whether these are known: whether the program calls its model
    /// for the training right after steps. Batches that an evaluation loads do not count.
    fn stacks(&self, table: &StackTable, calls: &ModelCalls, has_loaders: bool) -> (bool, HashSet<StackId>) {
        let trains = |place: StackId| table.is_trained(place) || calls.may_train(place);
        // Where steps begin with a data loader, what comes before it is not the batch.
        let follows_step = |after: Between| match after {
            Between::AfterLoader => true,
            Between::AfterOptimizer => !has_loaders,
            Between::No | Between::AfterCall(_) => false,
        };
        let of_training = self.loads.iter().filter(|(place, _, after)| trains(*place) && follows_step(*after));
        let mut batches: HashSet<StackId> = of_training.map(|(_, stack, _)| *stack).collect();
        // Where each step follows a rollout, its batch is what is loaded after that.
        if batches.is_empty() {
            let is_rollout = |place: StackId| calls.use_of(place) == ForwardOnlyUse::Rollout;
            let after_rollout: Vec<(StackId, StackId)> = self
                .loads
                .iter()
                .filter(|(_, _, after)| matches!(after, Between::AfterCall(place) if is_rollout(*place)))
                .map(|(place, stack, _)| (*place, *stack))
                .collect();
            // Code between two calls of the rollout is a part of it.
            let of_rollout: HashSet<StackId> =
                after_rollout.iter().filter(|(place, _)| is_rollout(*place)).map(|(_, stack)| *stack).collect();
            let is_step = |place: StackId| trains(place) || calls.is_in_each_step(place);
            let sampled = after_rollout.iter().filter(|(place, stack)| is_step(*place) && !of_rollout.contains(stack));
            batches = sampled.map(|(_, stack)| *stack).collect();
        }
        (self.called.iter().any(|place| trains(*place)), batches)
    }
}

/// Finds the ends of steps.
#[derive(Default)]
struct StepFinder {
    rules: LabelRules,
    has_nodes: bool,
    optimizers: OptimizerCalls,
    current: CurrentStep,
    ends: Vec<u64>,
    cleared: Vec<Cleared>,
    last_backward: u64,
    /// Whether an optimizer has stepped inside the backward pass that is running.
    steps_in_backward: bool,
    loaders: LoaderCalls,
    batches: BatchFinder,
}

impl StepFinder {
    fn observe_label(&mut self, e: &Event) {
        let Some(rule) = self.rules.get(e) else { return };
        let starts = e.action == Action::RangeStart;
        if e.flags.contains(Flags::IN_BACKWARD) {
            if rule.meaning == Meaning::OptimizerStep {
                self.stepped_in_backward(e);
            }
            return;
        }
        match rule.meaning {
            Meaning::OptimizerStep => {
                self.steps_in_backward = false;
                let depth = self.optimizers.depths.entry(e.thread).or_default();
                if starts {
                    *depth += 1;
                    if *depth == 1 {
                        self.optimizer_called((e.label_id(), e.stack), e);
                    }
                } else if *depth > 0 {
                    *depth -= 1;
                    if *depth == 0 {
                        self.optimizer_returned(e);
                    }
                }
            }
            // A closure that an optimizer calls can clear gradients any number of times.
            Meaning::ZeroGrad if starts && self.optimizers.depths.values().all(|depth| *depth == 0) => {
                self.gradients_cleared((e.label_id(), e.stack), e.seq);
            }
            Meaning::Data if starts => {
                self.loaders.last = e.seq;
                self.loaders.in_step = true;
                if self.batches.between == Between::AfterOptimizer && e.thread == self.batches.main_thread {
                    self.batches.between = Between::AfterLoader;
                }
            }
            _ => {}
        }
    }

    #[inline]
    fn observe_backward(&mut self, seq: u64) {
        self.last_backward = seq;
        self.batches.between = Between::No;
        if self.steps_in_backward {
            self.current.last_end = seq;
        }
    }

    /// Observes an allocation, a free or an out-of-memory error outside backward passes.
    #[inline]
    fn observe_outside(&mut self, e: &Event, table: &StackTable) {
        // While a backward pass runs, its caller waits.
        if self.steps_in_backward && e.thread == self.batches.main_thread && !table.is_without_python(e.stack) {
            self.steps_in_backward = false;
            self.batches.between = Between::AfterOptimizer;
            self.batches.maybe_batch.clear();
        }
        let facts = table.facts(e.stack);
        if !facts.outermost_module.is_none() {
            self.batches.main_thread = e.thread;
            if self.batches.between != Between::No {
                self.batches.model_called(facts.outermost_module);
            }
            if e.flags.contains(Flags::GRAD_KNOWN) && !e.flags.contains(Flags::GRAD_ENABLED) {
                self.batches.between = Between::AfterCall(facts.outermost_module);
            }
        } else if self.batches.between != Between::No && facts.rule.is_none() {
            let loads = e.action == Action::Alloc
                && e.flags.contains(Flags::GRAD_KNOWN.with(Flags::GRAD_ENABLED))
                && e.thread == self.batches.main_thread
                && !table.is_without_python(e.stack);
            let allocation = (table.python(e.stack), self.batches.between);
            if loads && self.batches.maybe_batch.len() < MAX_SITES && !self.batches.maybe_batch.contains(&allocation) {
                self.batches.maybe_batch.push(allocation);
            }
        }
        if let Some(first) = self.optimizers.first_call.as_mut().filter(|first| first.thread == e.thread) {
            let block = (e.device, e.addr);
            match e.action {
                // With gradients enabled, a closure runs.
                Action::Alloc if !e.flags.contains(Flags::GRAD_ENABLED) => {
                    first.blocks.insert(block);
                }
                Action::FreeRequested => {
                    first.blocks.remove(&block);
                }
                _ => {}
            }
        }
    }

    fn backward_since(&self, seq: u64) -> bool {
        !self.has_nodes || self.last_backward > seq
    }

    /// Observes the range of an optimizer inside a backward pass. All optimizers of one backward pass are one.
    fn stepped_in_backward(&mut self, e: &Event) {
        if !std::mem::replace(&mut self.steps_in_backward, true) {
            self.step_called((e.label_id(), e.stack), e.seq);
        }
        self.current.last_end = e.seq;
    }

    fn optimizer_called(&mut self, site: Site, e: &Event) {
        let optimizer =
            self.optimizers.callers.iter().find(|caller| caller.site == site).map(|caller| caller.optimizer);
        let end_before = self.step_called(optimizer.unwrap_or(site), e.seq);
        if optimizer.is_none() && self.optimizers.callers.len() < MAX_SITES {
            self.optimizers.callers.push(Caller { site, optimizer: site, allocated_state: false });
            self.optimizers.first_call = Some(FirstCall { site, thread: e.thread, blocks: HashSet::new(), end_before });
        }
    }

    fn optimizer_returned(&mut self, e: &Event) {
        self.current.last_end = e.seq;
        self.batches.between = Between::AfterOptimizer;
        self.batches.maybe_batch.clear();
        let Some(first) = self.optimizers.first_call.take_if(|first| first.thread == e.thread) else { return };
        let has_state = !first.blocks.is_empty();
        let stepped_elsewhere = |caller: &&Caller| caller.allocated_state && caller.site.0 == first.site.0;
        let mut others = self.optimizers.callers.iter().filter(stepped_elsewhere).map(|caller| caller.optimizer);
        let known = match (others.next(), others.next()) {
            (Some(only), None) if !has_state => Some(only),
            _ => None,
        };
        let Some(caller) = self.optimizers.callers.iter_mut().find(|caller| caller.site == first.site) else { return };
        caller.allocated_state = has_state;
        if let Some(optimizer) = known {
            caller.optimizer = optimizer;
            self.is_known(first.site, optimizer, first.end_before);
        }
    }

    /// Corrects the current step: what stepped at `site` is an optimizer that has stepped elsewhere. `end_before` is
    /// the end of the step if the optimizer has stepped in it before.
    fn is_known(&mut self, site: Site, optimizer: Site, end_before: Option<u64>) {
        self.current.stepped.retain(|stepped| *stepped != site);
        if !self.current.stepped.contains(&optimizer) {
            self.current.stepped.push(optimizer);
            self.current.joined =
                self.current.joined.map(|(joined, end)| (if joined == site { optimizer } else { joined }, end));
            return;
        }
        self.current.joined = self.current.joined.filter(|(joined, _)| *joined != site);
        if let Some(end) = end_before {
            self.end(end);
            self.current.stepped_before = self.current.stepped.len();
            self.current.stepped = vec![optimizer];
            self.current.joined = None;
        }
    }

    /// Observes the call of an optimizer. Returns where the current step ends if this optimizer has stepped in it;
    /// `None` if nothing ran between two calls.
    fn step_called(&mut self, site: Site, seq: u64) -> Option<u64> {
        self.optimizers.calls += 1;
        // The recording does not show a backward pass that is replayed as a CUDA graph. It can show the data loader's
        // call for it.
        let worked = self.backward_since(self.current.last_start) || self.loaders.last > self.current.last_start;
        let end_before = self.current.last_end;
        let joined = self.current.joined.take();
        if !self.current.stepped.contains(&site) {
            if let Some((_, end)) = self.current.stepped.first().zip(Some(self.current.last_end)).filter(|_| worked) {
                self.current.joined = Some((site, end));
            }
            if self.current.stepped.len() < MAX_SITES {
                self.current.stepped.push(site);
            }
        } else if worked {
            if let Some((_, end)) = joined.filter(|(other, _)| *other == site) {
                self.end(end);
            }
            self.end(self.current.last_end);
            self.current.stepped_before = self.current.stepped.len();
            self.current.stepped = vec![site];
        } else {
            self.current.joined = joined;
        }
        self.current.last_start = seq;
        worked.then_some(end_before)
    }

    fn gradients_cleared(&mut self, site: Site, seq: u64) {
        let calls = self.optimizers.calls;
        let Some(before) = self.cleared.iter_mut().find(|cleared| cleared.site == site) else {
            if self.cleared.len() < MAX_SITES {
                self.cleared.push(Cleared { site, seq, calls });
            }
            return;
        };
        let Cleared { seq: since, calls: then, .. } = std::mem::replace(before, Cleared { site, seq, calls });
        if calls != then || !self.backward_since(since) || !self.has_nodes {
            return;
        }
        if !self.current.stepped.is_empty() {
            self.end(self.current.last_end);
            self.current.stepped_before = self.current.stepped.len();
            self.current.stepped.clear();
        }
        self.current.joined = None;
        let loader_after = self.loaders.last > self.last_backward;
        self.end(if loader_after { self.loaders.last } else { seq });
    }

    fn end(&mut self, seq: u64) {
        self.loaders.steps += usize::from(std::mem::take(&mut self.loaders.in_step));
        self.ends.push(seq);
    }

    /// Ends the recording.
    fn finish(&mut self) {
        // A program that ended between two optimizers of a step had not finished that step.
        let whole = self.current.stepped.len() >= self.current.stepped_before;
        if !self.current.stepped.is_empty() && whole && self.optimizers.depths.values().all(|depth| *depth == 0) {
            self.end(self.current.last_end);
        }
    }

    /// Whether most steps begin with a data loader.
    fn has_loaders(&self) -> bool {
        self.loaders.steps * 2 > self.ends.len()
    }

    fn into_ends(self) -> StepEnds {
        StepEnds { loaders: self.has_loaders(), ends: self.ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::MemoryRecording;
    use memtrace_trace::definition::LabelOrigin;
    use memtrace_trace::file::{Context, Label};

    /// Runs a program of one letter per event and returns it with a `|` at each end of a step. `A` to `C`: steps of
    /// optimizers of one class, called at three places. Each allocates its state in its first step. `P` and `Q`: steps
    /// of optimizers of this class at two more places, which allocate no state. `z` and `y`: two places that clear
    /// gradients. `b`: an event of a backward pass. `.`: an allocation of user code. `l`: a call of the data loader.
    /// `(` and `)`: a step that calls a closure. `h`: a step and clearing gradients inside a backward pass.
    fn steps(program: &str) -> String {
        let names =
            ["Optimizer.step#Adam.step", "Optimizer.zero_grad#Adam.zero_grad", "enumerate(DataLoader)#X.__next__"];
        let mut recording = MemoryRecording::default();
        recording.definitions.contexts = vec![Context::default(), Context { node: "N".into(), ..Context::default() }];
        for (id, text) in (1..).zip(names) {
            let label = Label { origin: LabelOrigin::RecordFunction, text: text.into() };
            recording.definitions.labels.insert(id, label);
        }
        let mut last_of = Vec::new();
        let mut seq = 0;
        let mut called = HashSet::new();
        for letter in program.chars() {
            let mut add = |action, label: u64, stack: u32, flags| {
                seq += 1;
                let (addr, stack) = (label, StackId(stack));
                let source = if label == 0 { Source::Torch } else { Source::Label };
                recording.events.push(Event { seq, source, action, addr, stack, flags, ..Event::EMPTY });
            };
            let (start, end, none) = (Action::RangeStart, Action::RangeEnd, Flags::default());
            match letter {
                'A'..='C' | 'P' | 'Q' => {
                    add(start, 1, letter as u32, none);
                    // A temporary of the step.
                    add(Action::Alloc, 0, 50, none);
                    add(Action::FreeRequested, 0, 50, none);
                    if letter < 'P' && called.insert(letter) {
                        add(Action::Alloc, 0, 50, none);
                    }
                    add(end, 1, 0, none);
                }
                '.' => add(Action::Alloc, 0, 50, none),
                '(' => add(start, 1, 99, none),
                ')' => add(end, 1, 0, none),
                'h' => {
                    add(start, 1, 98, Flags::IN_BACKWARD);
                    add(end, 1, 0, Flags::IN_BACKWARD);
                    add(start, 2, 97, Flags::IN_BACKWARD);
                    add(end, 2, 0, Flags::IN_BACKWARD);
                }
                'y' | 'z' => add(start, 2, letter as u32, none),
                'l' => add(start, 3, 0, none),
                'b' => add(Action::Alloc, 0, 0, Flags::IN_BACKWARD),
                _ => panic!("{letter}"),
            }
            last_of.push(seq);
        }
        let ends = StepEnds::of(&recording);
        let mut marked = String::new();
        let mut next = ends.all().iter().peekable();
        for (letter, last) in program.chars().zip(last_of) {
            marked.push(letter);
            while next.next_if(|end| **end <= last).is_some() {
                marked.push('|');
            }
        }
        marked
    }

    #[test]
    fn each_iteration_of_a_loop_is_a_step() {
        let cases = [
            // a plain loop; gradients cleared after or before; gradient accumulation
            ("bAbAbA", "bA|bA|bA|"),
            ("bAzbAzbAz", "bA|zbA|zbA|z"),
            ("lzbAlzbAlzbA", "lzbA|lzbA|lzbA|"),
            ("bbbAbbbA", "bbbA|bbbA|"),
            // two optimizers after one backward pass; two networks trained in turn
            ("bABbAB", "bAB|bAB|"),
            ("zbAybBzbAybB", "zbAybB|zbAybB|"),
            ("bAbAbAbBbAbAbAbB", "bA|bA|bAbB|bA|bA|bAbB|"),
            // an optimizer that steps group by group; one optimizer first, then another
            ("bAAAbAAA", "bAAA|bAAA|"),
            ("bAbAbBbBbB", "bA|bA|bB|bB|bB|"),
            // closures; steps inside a backward pass
            ("(zbzb)(zbzb)", "(zbzb)|(zbzb)|"),
            (".bhbhb.bhbhb", ".bhbhb|.bhbhb|"),
            (".b.bhbh.b.bhbh", ".b.bhbh|.b.bhbh|"),
            (".bhbhA.bhbhA", ".bhbhA|.bhbhA|"),
            // one optimizer at two or three places: it has its state already
            ("bAbPbAbPbA", "bA|bP|bA|bP|bA|"),
            ("bAbPbPbAbPbP", "bA|bP|bP|bA|bP|bP|"),
            ("bAPbAPbAP", "bAP|bAP|bAP|"),
            ("bAbPbQbAbPbQ", "bA|bP|bQ|bA|bP|bQ|"),
            // two optimizers have state, or none has: which one steps at the other place is unknown
            ("bAbBbPbAbBbP", "bAbBbP|bAbBbP|"),
            ("bPbQbPbQ", "bPbQ|bPbQ|"),
            // a skipped step
            ("zbAzbzbAzbA", "zbA|zbz|bA|zbA|"),
            ("bAzbzbAz", "bA|zbz|bA|z"),
            ("lzbAlzblzbA", "lzbA|lzbl|zbA|"),
            // gradients cleared for one optimizer after the other
            ("zzbABzzbAB", "zzbAB|zzbAB|"),
            // a recording that ends in the middle of a step
            ("bAbBbAbBbA", "bAbB|bAbB|bA"),
            ("bAbAb", "bA|bA|b"),
            // backward passes that are replayed as CUDA graphs
            ("lbAlAlA", "lbA|lA|lA|"),
        ];
        for (program, expected) in cases {
            let expected: String = expected.into();
            assert_eq!(steps(program), expected, "{program}");
        }
    }
}
