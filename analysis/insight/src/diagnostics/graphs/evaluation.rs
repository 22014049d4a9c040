//! Evaluations with gradients that run out of memory themselves.
//!
//! Such an evaluation drops no graph, because it never gets that far. The place of the failed forward pass identifies
//! it: no backward pass ever ran through that place, while backward passes ran through the same modules at another
//! place. A second stage of training begins in the same way, so one of these facts is also required: the program has
//! dropped a graph of this place before; a function that only this place runs in is named after evaluation; or the
//! modules allocate as after `model.eval()`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use memtrace_trace::file::{Definitions, Frame};
use memtrace_trace::ids::{ContextId, StackId};

use crate::passes::category::BlockAllocation;
use crate::passes::mark::Mark;
use crate::passes::phase::ProgramPosition;
use crate::rules::{is_changed_by_eval, names_evaluation, names_training};

/// This many calls are remembered until a backward pass runs through them.
const MAX_RECENT: usize = 8;
/// Training calls of at most this many places are remembered.
const MAX_PLACES: usize = 32;

/// The allocations of one call of the model, by module, in order.
type ModuleAllocations = Vec<(ContextId, u32)>;

/// A call of the model that a backward pass may still run through.
#[derive(Clone, Debug, Default)]
struct RecentCall {
    call: u32,
    allocations: ModuleAllocations,
}

/// The graph of a forward pass that an out-of-memory error interrupted.
#[derive(Clone, Debug, Default)]
pub(super) struct InterruptedGraph {
    /// `seq` of the error.
    pub(super) seq: u64,
    /// The bytes of the graphs since the last backward pass.
    pub(super) bytes: u64,
    /// Their blocks.
    pub(super) blocks: u64,
    /// The number of calls of the model that they belong to.
    pub(super) calls: u64,
    /// The stack of the model's call, up to the frame that computes.
    pub(super) site: StackId,
    /// How many optimizer steps there had been.
    pub(super) optimizer_steps: u32,
    /// The bytes by module.
    by_module: Vec<(ContextId, u64)>,
    allocations: ModuleAllocations,
}

/// The evidence that an interrupted forward pass was an evaluation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum EvaluationSign {
    /// The program has dropped this many graphs of this place.
    Dropped(u64),
    /// This function is named after evaluation, and no backward pass follows what it calls.
    Function(String),
    /// Modules of this class allocate less than in training, as after `model.eval()`.
    Inactive(String),
}

/// The allocations of training and of interrupted forward passes, for one device.
#[derive(Clone, Debug, Default)]
pub(super) struct Evaluations {
    recent: VecDeque<RecentCall>,
    /// By place: the allocations of the first call that a backward pass ran through.
    trained: BTreeMap<StackId, ModuleAllocations>,
    latest_trained: StackId,
    /// By context: whether a backward pass freed blocks of this module call.
    trained_modules: Vec<bool>,
    interrupted: Option<InterruptedGraph>,
}

impl Evaluations {
    /// Observes the allocation of a block of a graph.
    #[inline]
    pub(super) fn allocated(&mut self, block: &BlockAllocation, mark: Mark) {
        if self.recent.back().is_none_or(|latest| latest.call != mark.call) {
            let mut allocations = if self.recent.len() >= MAX_RECENT {
                self.recent.pop_front().unwrap_or_default().allocations
            } else {
                Vec::new()
            };
            allocations.clear();
            self.recent.push_back(RecentCall { call: mark.call, allocations });
        }
        let Some(latest) = self.recent.back_mut() else { return };
        match latest.allocations.last_mut() {
            Some((module, count)) if *module == block.site.event_context => *count += 1,
            _ => latest.allocations.push((block.site.event_context, 1)),
        }
    }

    /// Observes a block of a graph that a backward pass frees.
    #[inline]
    pub(super) fn consumed(&mut self, block: &BlockAllocation, mark: Mark) {
        let module = block.site.event_context.index();
        if self.trained_modules.len() <= module {
            self.trained_modules.resize(module + 1, false);
        }
        self.trained_modules[module] = true;
        let is_new = !mark.site.is_none() && mark.site != self.latest_trained;
        if is_new && self.trained.len() < MAX_PLACES && !self.trained.contains_key(&mark.site) {
            let of_call = self.recent.iter().find(|recent| recent.call == mark.call);
            self.trained.insert(mark.site, of_call.map(|recent| recent.allocations.clone()).unwrap_or_default());
        }
        self.latest_trained = if mark.site.is_none() { self.latest_trained } else { mark.site };
    }

    /// Observes an error in a forward pass. `allocated` are the blocks of graphs that no backward pass has run through.
    pub(super) fn out_of_memory<'a>(
        &mut self,
        seq: u64,
        allocated: impl Iterator<Item = (&'a BlockAllocation, Mark)>,
        now: &ProgramPosition,
    ) {
        let mut by_site: BTreeMap<StackId, u64> = BTreeMap::new();
        let mut by_module: BTreeMap<ContextId, u64> = BTreeMap::new();
        let mut calls = BTreeSet::new();
        let mut graph = InterruptedGraph { seq, optimizer_steps: now.optimizer_steps, ..InterruptedGraph::default() };
        for (block, mark) in allocated {
            *by_site.entry(mark.site).or_default() += block.memory.size;
            *by_module.entry(block.site.event_context).or_default() += block.memory.size;
            calls.insert((mark.site, mark.call));
            graph.bytes += block.memory.size;
            graph.blocks += 1;
        }
        let of_model = by_site.iter().filter(|(site, _)| !site.is_none());
        let Some((site, _)) = of_model.max_by_key(|(site, bytes)| (**bytes, **site)) else { return };
        graph.site = *site;
        graph.calls = calls.iter().filter(|(of, _)| of == site).count() as u64;
        graph.by_module = by_module.into_iter().collect();
        let latest = calls.iter().filter(|(of, _)| of == site).map(|(_, call)| *call).max();
        let recent = self.recent.iter().find(|recent| Some(recent.call) == latest);
        graph.allocations = recent.map(|recent| recent.allocations.clone()).unwrap_or_default();
        self.interrupted = Some(graph);
    }

    /// The evaluation that the last error interrupted, and what shows that it is one. `dropped` is the number of graphs
    /// of each place that the program dropped.
    pub(super) fn interrupted(
        &self,
        definitions: &Definitions,
        consumed_sites: &BTreeSet<StackId>,
        dropped: &dyn Fn(StackId) -> u64,
    ) -> Option<(&InterruptedGraph, Vec<EvaluationSign>)> {
        let graph = self.interrupted.as_ref().filter(|graph| graph.optimizer_steps > 0)?;
        let place = ModelCallSite::of(graph.site, definitions);
        let trained: Vec<ModelCallSite<'_>> =
            consumed_sites.iter().map(|site| ModelCallSite::of(*site, definitions)).collect();
        if trained.contains(&place) || !self.trains_the_same_modules(graph, definitions) {
            return None;
        }
        let mut signs = Vec::new();
        signs.extend(Some(dropped(graph.site)).filter(|times| *times > 0).map(EvaluationSign::Dropped));
        signs.extend(place.evaluating_function(&trained).map(EvaluationSign::Function));
        signs.extend(self.inactive_class(graph, definitions).map(EvaluationSign::Inactive));
        (!signs.is_empty()).then_some((graph, signs))
    }

    /// Whether backward passes ran through modules that hold at least half of the graph.
    fn trains_the_same_modules(&self, graph: &InterruptedGraph, definitions: &Definitions) -> bool {
        let trained: HashSet<(u64, &str)> = self
            .trained_modules
            .iter()
            .enumerate()
            .filter(|(_, is_trained)| **is_trained)
            .filter_map(|(id, _)| module_of(ContextId(id as u32), definitions))
            .collect();
        let is_trained = |id: ContextId| module_of(id, definitions).is_some_and(|module| trained.contains(&module));
        let bytes: u64 = graph.by_module.iter().filter(|(id, _)| is_trained(*id)).map(|(_, bytes)| bytes).sum();
        bytes * 2 >= graph.bytes
    }

    /// The class of modules that `model.eval()` changes and that allocated less than in training. Only modules before
    /// the last one count, because the error interrupted that one.
    fn inactive_class(&self, graph: &InterruptedGraph, definitions: &Definitions) -> Option<String> {
        let (last, _) = *graph.allocations.last()?;
        let last = module_of(last, definitions)?;
        let now = counts(&graph.allocations, definitions);
        let is_active = |of: &ModuleAllocations| -> Option<Vec<(&str, bool)>> {
            let until = of.iter().position(|(id, _)| module_of(*id, definitions) == Some(last))?;
            let before = of.get(..until)?;
            let modules: BTreeSet<ContextId> = before.iter().map(|(id, _)| *id).collect();
            let in_training = counts(of, definitions);
            let changes = modules.into_iter().filter_map(|id| module_of(id, definitions));
            let changes = changes.filter(|(_, class)| is_changed_by_eval(class));
            Some(changes.map(|module| (module.1, now.get(&module) >= in_training.get(&module))).collect())
        };
        let compared = self.trained.values().find_map(is_active)?;
        // Some kernels of batch normalization allocate as much in both modes.
        let is_inactive = |class: &&str| compared.iter().filter(|(of, _)| of == class).all(|(_, active)| !active);
        compared.iter().map(|(class, _)| *class).find(is_inactive).map(str::to_owned)
    }
}

/// The object and the class of a called module.
fn module_of(call: ContextId, definitions: &Definitions) -> Option<(u64, &str)> {
    definitions.nn_calls.get(&call).map(|call| (call.object, &*call.class))
}

fn counts<'a>(of: &ModuleAllocations, definitions: &'a Definitions) -> HashMap<(u64, &'a str), u32> {
    let mut counts = HashMap::new();
    for (id, count) in of {
        if let Some(module) = module_of(*id, definitions) {
            *counts.entry(module).or_default() += count;
        }
    }
    counts
}

/// The functions of a call of the model, innermost first, and the line that calls it.
#[derive(PartialEq, Eq)]
struct ModelCallSite<'a> {
    functions: Vec<Function<'a>>,
    line: u32,
}

/// A function by its file, name and first line.
type Function<'a> = (&'a str, &'a str, u32);

impl<'a> ModelCallSite<'a> {
    fn of(site: StackId, definitions: &'a Definitions) -> ModelCallSite<'a> {
        let frames = || definitions.walk(site).skip(1).filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
        let function = |frame: &'a Frame| (&*frame.filename, &*frame.name, frame.first_line);
        ModelCallSite {
            functions: frames().map(function).collect(),
            line: frames().next().map_or(0, |frame| frame.line),
        }
    }

    /// The innermost function that is named after evaluation and that no training call runs in. A function that a stage
    /// of training calls does not count.
    fn evaluating_function(&self, trained: &[ModelCallSite<'_>]) -> Option<String> {
        let in_training = |function: &Function<'_>| trained.iter().any(|place| place.functions.contains(function));
        let functions: Vec<&Function<'_>> = self.functions.iter().filter(|function| !in_training(function)).collect();
        let found = functions.iter().position(|(file, name, _)| names_evaluation(file, name))?;
        let (function, around) = functions[found..].split_first()?;
        (!around.iter().any(|(_, name, _)| names_training(name))).then(|| function.1.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::file::{NnCall, StackNode};
    use memtrace_trace::ids::FrameId;

    use super::*;
    use crate::passes::phase::Phase;

    const MODULE: &str = "/site-packages/torch/nn/modules/module.py";

    /// Two steps of training, then a forward pass that runs out of memory.
    struct Program {
        definitions: Definitions,
        evaluations: Evaluations,
        consumed: BTreeSet<StackId>,
        seq: u64,
        calls: u32,
    }

    impl Program {
        fn new() -> Program {
            let mut definitions = Definitions { frames: vec![Frame::default()], ..Definitions::default() };
            definitions.stacks.push(StackNode::default());
            for (id, class) in ["Net", "Linear", "Dropout", "Linear", "BatchNorm1d"].into_iter().enumerate() {
                let call = NnCall { caller: ContextId(u32::from(id > 0)), object: id as u64, class: class.into() };
                definitions.nn_calls.insert(ContextId(id as u32 + 1), call);
            }
            let mut p = Program {
                definitions,
                evaluations: Evaluations::default(),
                consumed: BTreeSet::new(),
                seq: 0,
                calls: 0,
            };
            let train = p.site(&[("train.py", 5, "<module>"), ("train.py", 20, "fit")]);
            for _ in 0..2 {
                for (block, mark) in p.forward(train, &[2, 5, 3, 4]) {
                    p.evaluations.consumed(&block, mark);
                }
                p.consumed.insert(train);
            }
            p
        }

        /// A call of the model by these functions, outermost first.
        fn site(&mut self, frames: &[(&str, u32, &str)]) -> StackId {
            let mut parent = StackId::NONE;
            for (filename, line, name) in frames.iter().chain(&[(MODULE, 1790, "_call_impl")]) {
                let frame =
                    Frame { name: (*name).into(), filename: (*filename).into(), line: *line, ..Frame::default() };
                self.definitions.frames.push(frame);
                let frame = FrameId(self.definitions.frames.len() as u32 - 1);
                self.definitions.stacks.push(StackNode { parent, frame });
                parent = StackId(self.definitions.stacks.len() as u32 - 1);
            }
            parent
        }

        /// The blocks of a call in which these modules allocate.
        fn forward(&mut self, site: StackId, modules: &[u32]) -> Vec<(BlockAllocation, Mark)> {
            self.calls += 1;
            let mark = Mark { bits: Mark::GRAPH, call: self.calls, site };
            let blocks = modules.iter().map(|module| {
                self.seq += 1;
                let mut block = BlockAllocation::for_tests(self.seq);
                block.site.event_context = ContextId(*module);
                self.evaluations.allocated(&block, mark);
                (block, mark)
            });
            blocks.collect()
        }

        /// The evidence that a forward pass from this place with these modules is an evaluation, if it fails.
        fn fails(
            &mut self,
            frames: &[(&str, u32, &str)],
            modules: &[u32],
            dropped: u64,
        ) -> Option<Vec<EvaluationSign>> {
            let site = self.site(frames);
            let blocks = self.forward(site, modules);
            let now = ProgramPosition {
                phase: Phase::Forward,
                step: Some(2),
                phase_changes: 9,
                backward_passes: 2,
                optimizer_steps: 2,
            };
            self.evaluations.out_of_memory(99, blocks.iter().map(|(block, mark)| (block, *mark)), &now);
            let dropped = move |_| dropped;
            let found = self.evaluations.interrupted(&self.definitions, &self.consumed, &dropped)?;
            assert_eq!((found.0.site, found.0.blocks, found.0.calls), (site, modules.len() as u64, 1));
            Some(found.1)
        }
    }

    #[test]
    fn a_forward_pass_that_training_never_runs() {
        let validate = [("train.py", 6, "<module>"), ("train.py", 40, "validate")];
        let function = EvaluationSign::Function("validate".into());
        assert_eq!(Program::new().fails(&validate, &[2, 5, 3, 4], 0), Some(vec![function.clone()]));
        let inactive = EvaluationSign::Inactive("Dropout".into());
        assert_eq!(Program::new().fails(&validate, &[2, 5, 4], 0), Some(vec![function, inactive.clone()]));
        let inline = [("train.py", 8, "<module>")];
        assert_eq!(Program::new().fails(&inline, &[2, 5, 4], 0), Some(vec![inactive]));
        assert_eq!(Program::new().fails(&inline, &[2, 5, 3, 4], 2), Some(vec![EvaluationSign::Dropped(2)]));
    }

    #[test]
    fn a_forward_pass_of_training() {
        // The same function at the same line, called from elsewhere.
        let again = [("train.py", 9, "<module>"), ("train.py", 20, "fit")];
        assert_eq!(Program::new().fails(&again, &[2, 5, 4], 3), None);
        // A second stage of training.
        let stage = [("train.py", 9, "<module>"), ("train.py", 60, "refine")];
        assert_eq!(Program::new().fails(&stage, &[2, 5, 3, 4], 0), None);
        let stage = [("train.py", 9, "<module>"), ("train.py", 60, "finetune"), ("train.py", 70, "predict_noise")];
        assert_eq!(Program::new().fails(&stage, &[2, 5, 3, 4], 0), None);
        // The dropout was not reached.
        assert_eq!(Program::new().fails(&stage, &[2], 0), None);
        // Another model.
        let mut p = Program::new();
        p.definitions
            .nn_calls
            .insert(ContextId(7), NnCall { caller: ContextId::NONE, object: 70, class: "Critic".into() });
        assert_eq!(p.fails(&[("train.py", 70, "evaluate")], &[7], 0), None);
    }
}
