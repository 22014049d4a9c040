//! The memory of an engine that serves models: its stages, and what was allocated at the peak of serving.
//!
//! The stack of an allocation proves the stage. Allocations outside the functions of an engine belong to none.

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::StackId;

use super::category::{BlockAllocation, Category};
use super::colocated::Colocated;
use super::composition::{Composition, Origin};
use super::mark::Mark;
use super::pass::{BlockAllocated, BlockFreed, LifetimeEnded, Pass, RecordingStart};
use super::serving_growth::ServingGrowth;
use crate::rules::{RuleId, ServingEngine, ServingPart, ServingStage, is_serving_engine, serving_part, serving_stage};

/// The stages of a server on one device.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// The engine that was recognized. `None` if the program is no server.
    pub engine: Option<ServingEngine>,
    /// In the order of [`ServingStage::ALL`]; `None` for a stage that allocated nothing.
    pub stages: [Option<StageFigures>; ServingStage::ALL.len()],
    /// The blocks that were allocated at the peak after the engine allocated its cache of keys and values. Empty if it
    /// never did.
    pub peak: Composition,
    /// The weights at that peak: `seq` of the allocation and bytes of each block.
    pub weights: Vec<(u64, u64)>,
    /// The growth of the memory of requests.
    pub(crate) growth: ServingGrowth,
    /// The activities of a process that trains, too.
    pub colocated: Colocated,
    stages_of_stacks: StageTable,
    /// `seq` of the first allocation for a request.
    served_from: Option<u64>,
    /// The current stage.
    current: Option<ServingStage>,
}

/// The figures of one stage, over all times in which it ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageFigures {
    /// The times of its first and its last event, in clock ticks.
    pub ticks: (u64, u64),
    /// The allocated bytes before its first event.
    pub start: u64,
    /// The highest allocated bytes.
    pub peak: u64,
    /// The allocated bytes after its last event.
    pub end: u64,
    /// The most bytes by which a run of consecutive events of the stage rose above the bytes before it.
    pub transient: u64,
    /// The allocated bytes before the current run.
    run_start: u64,
}

/// The stage and the part that a stack proves.
#[derive(Clone, Copy, Debug, Default)]
struct ServingFacts {
    stage: Option<ServingStage>,
    part: Option<ServingPart>,
    /// Whether a function of an engine is on the stack.
    is_of_engine: bool,
}

/// By stack: the facts that it proves.
#[derive(Clone, Debug, Default)]
struct StageTable(Vec<ServingFacts>);

impl StageTable {
    /// The table, and the engine of the first stack that proves a stage.
    fn new(definitions: &Definitions) -> (StageTable, Option<ServingEngine>) {
        let frames: Vec<_> = definitions.frames.iter().map(serving_stage).collect();
        if frames.iter().all(Option::is_none) {
            return (StageTable::default(), None);
        }
        let parts: Vec<_> = definitions.frames.iter().map(serving_part).collect();
        let of_engine: Vec<_> = definitions.frames.iter().map(|frame| is_serving_engine(&frame.filename)).collect();
        let (mut stages, mut engine): (Vec<ServingFacts>, _) = (Vec::new(), None);
        for (i, node) in definitions.stacks.iter().enumerate() {
            // A parent has a smaller id than its child.
            let mut facts = if node.parent.index() < i { stages[node.parent.index()] } else { ServingFacts::default() };
            if let Some((of_frame, stage)) = frames.get(node.frame.index()).copied().flatten() {
                engine = engine.or(Some(of_frame));
                facts.stage = Some(stage.within(facts.stage));
            }
            facts.part = facts.part.or(parts.get(node.frame.index()).copied().flatten());
            let is_of_engine = of_engine.get(node.frame.index()).is_some_and(|is_of_engine| *is_of_engine);
            facts.is_of_engine |= facts.stage.is_some() || facts.part.is_some() || is_of_engine;
            stages.push(facts);
        }
        (StageTable(stages), engine)
    }

    #[inline]
    fn of(&self, stack: StackId) -> ServingFacts {
        self.0.get(stack.index()).copied().unwrap_or_default()
    }
}

impl Serving {
    /// The stage that a stack proves.
    #[inline]
    pub fn stage_of(&self, stack: StackId) -> Option<ServingStage> {
        self.stages_of_stacks.of(stack).stage
    }

    /// Whether the engine has these blocks, and not a trainer in the same process.
    pub fn is_of_engine(&self, origin: &Origin) -> bool {
        origin.category == Category::KvCache || self.stages_of_stacks.of(origin.stack).is_of_engine
    }

    /// The part of the server's memory that a block of this category belongs to, by the stack that allocated it.
    pub fn part_of(&self, stack: StackId, category: Category) -> ServingPart {
        let ServingFacts { stage, part, .. } = self.stages_of_stacks.of(stack);
        // An engine allocates its cache in a stage of its own. What a request leaves is none.
        let of_request = stage.map_or(self.has_cache(), ServingStage::serves);
        match (stage, category, part) {
            (_, Category::KvCache, _) if !of_request => ServingPart::KvCache,
            (_, Category::GraphPool, _) | (Some(ServingStage::Capture), _, None) => ServingPart::CudaGraphs,
            (_, _, Some(part)) => part,
            (_, Category::Workspace, _) => ServingPart::Buffers,
            (Some(ServingStage::Load), _, _) | (_, Category::Parameter, _) => ServingPart::Weights,
            (Some(stage), _, _) if stage.serves() => ServingPart::Activations,
            _ => ServingPart::Buffers,
        }
    }

    /// Whether a server that does not train cannot have this issue: it is about the graphs of autograd, or about blocks
    /// that an engine allocates before it serves, such as weights that it converts one layer after the other.
    pub(crate) fn excludes(&self, rule: RuleId, place: Option<StackId>) -> bool {
        let is_before = || place.and_then(|stack| self.stage_of(stack)).is_some_and(|stage| !stage.serves());
        self.engine.is_some()
            && match rule {
                RuleId::GraphKept | RuleId::GraphRetained | RuleId::EvalWithoutNoGrad => true,
                RuleId::Leak | RuleId::OutputsKept => is_before(),
                _ => false,
            }
    }

    /// The figures of a stage.
    pub fn stage(&self, stage: ServingStage) -> Option<&StageFigures> {
        self.stages[stage as usize].as_ref()
    }

    /// The stage that began last before this time in clock ticks. `None` if none had begun.
    pub fn latest_stage(&self, ticks: u64) -> Option<ServingStage> {
        let begun = |stage: &ServingStage| self.stage(*stage).map(|figures| figures.ticks.0).filter(|at| *at <= ticks);
        ServingStage::ALL.into_iter().filter(|stage| begun(stage).is_some()).max_by_key(begun)
    }

    /// An event of this stage changed the allocated bytes.
    fn changed(&mut self, stage: ServingStage, ticks: u64, before: u64, after: u64) {
        let is_new_run = self.current.replace(stage) != Some(stage);
        let figures = self.stages[stage as usize].get_or_insert_with(|| StageFigures {
            ticks: (ticks, ticks),
            start: before,
            ..StageFigures::default()
        });
        if is_new_run {
            figures.run_start = before;
        }
        (figures.ticks.1, figures.end) = (ticks, after);
        figures.peak = figures.peak.max(after);
        figures.transient = figures.transient.max(after.saturating_sub(figures.run_start));
    }

    /// Whether the server allocated a block after it had begun to answer requests, and not to sleep or wake up.
    #[inline]
    fn is_of_requests(&self, block: &BlockAllocation) -> bool {
        self.served_from.is_some_and(|from| block.seq >= from)
            && self.stage_of(block.site.stack).is_none_or(ServingStage::serves)
    }

    /// Whether the cache of keys and values is allocated.
    fn has_cache(&self) -> bool {
        self.stage(ServingStage::KvCache).is_some()
    }
}

impl Pass for Serving {
    fn started(start: &RecordingStart<'_>) -> Serving {
        let (stages_of_stacks, engine) = StageTable::new(start.definitions);
        let growth = ServingGrowth::new(&start.definitions.cache_uses);
        Serving { engine, stages_of_stacks, growth, ..Serving::default() }
    }

    #[inline]
    fn allocated(&mut self, allocated: &BlockAllocated<'_>) {
        if self.engine.is_none() {
            return;
        }
        let BlockAllocated { e, block, usage, .. } = *allocated;
        let ServingFacts { stage, is_of_engine, .. } = self.stages_of_stacks.of(block.site.stack);
        self.colocated.allocated(allocated, stage, is_of_engine);
        if self.served_from.is_none() && stage.is_some_and(ServingStage::serves) {
            self.served_from = Some(block.seq);
        }
        if !allocated.mark.is(Mark::WORKSPACE) && self.is_of_requests(block) {
            self.growth.allocated(block);
        }
        if let Some(stage) = stage {
            self.changed(stage, e.ticks, usage.allocated.saturating_sub(block.memory.size), usage.allocated);
        }
        if usage.allocated > self.peak.usage.allocated && self.has_cache() {
            self.peak.restart(e, *allocated.now, allocated.classification.phase, *usage);
            self.weights.clear();
        }
    }

    #[inline]
    fn freed(&mut self, freed: &BlockFreed<'_>) {
        if self.engine.is_none() {
            return;
        }
        if !freed.mark.is(Mark::WORKSPACE) && self.is_of_requests(freed.block) {
            self.growth.freed(freed.block);
        }
        if let Some(stage) = self.stage_of(freed.e.stack) {
            let after = freed.usage.allocated;
            self.changed(stage, freed.e.ticks, after + freed.block.memory.size, after);
        }
    }

    #[inline]
    fn lifetime_ended(&mut self, ended: &LifetimeEnded<'_>) {
        if self.engine.is_none() {
            return;
        }
        self.colocated.lifetime_ended(ended);
        if self.peak.includes(ended.block.seq) {
            ended.add_to(&mut self.peak);
            let stack = ended.block.site.stack;
            let part = self.part_of(stack, ended.classification.category);
            if part == ServingPart::Weights && self.stages_of_stacks.of(stack).is_of_engine {
                self.weights.push((ended.block.seq, ended.block.memory.size));
            }
        }
    }
}

/// Follows a server through its stages.
#[derive(Clone, Debug)]
pub struct StageFollower {
    stages: StageTable,
    /// The stage of the latest event that proved one.
    current: ServingStage,
}

impl StageFollower {
    /// `None` if the program is no server, or if it trains too.
    pub fn new(definitions: &Definitions) -> Option<StageFollower> {
        let (stages, engine) = StageTable::new(definitions);
        let trains = definitions.contexts.iter().any(|context| !context.node.is_empty());
        (engine.is_some() && !trains).then_some(StageFollower { stages, current: ServingStage::Start })
    }

    /// Follows an event. Returns its stage.
    #[inline]
    pub fn at(&mut self, stack: StackId) -> ServingStage {
        self.current = self.of(stack);
        self.current
    }

    /// The stage of code with this stack, which is the current one if the stack proves none.
    #[inline]
    pub fn of(&self, stack: StackId) -> ServingStage {
        self.stages.of(stack).stage.unwrap_or(self.current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_no_issues_of_trainings_and_does_not_leak_while_it_loads() {
        let facts = |stage| ServingFacts { stage, ..ServingFacts::default() };
        let stages = vec![facts(Some(ServingStage::Load)), facts(Some(ServingStage::Serve)), facts(None)];
        let mut serving = Serving { stages_of_stacks: StageTable(stages), ..Serving::default() };
        let leaks = |serving: &Serving| [0, 1, 2].map(|stack| !serving.excludes(RuleId::Leak, Some(StackId(stack))));
        assert_eq!(leaks(&serving), [true; 3]);
        serving.engine = Some(ServingEngine::Vllm);
        assert_eq!(leaks(&serving), [false, true, true]);
        assert!(serving.excludes(RuleId::GraphKept, Some(StackId(1))) && serving.excludes(RuleId::GraphKept, None));
        assert!(!serving.excludes(RuleId::Fragmentation, Some(StackId(0))));
    }

    #[test]
    fn a_transient_is_above_what_was_allocated_before_the_run() {
        let mut serving = Serving::default();
        let mut change = |stage, ticks, before, after| serving.changed(stage, ticks, before, after);
        change(ServingStage::Load, 1, 0, 100);
        change(ServingStage::Profile, 2, 100, 150);
        change(ServingStage::Profile, 3, 150, 90);
        change(ServingStage::KvCache, 4, 90, 900);
        change(ServingStage::Profile, 5, 900, 930);
        let profile = serving.stage(ServingStage::Profile).unwrap();
        assert_eq!((profile.start, profile.peak, profile.end, profile.transient), (100, 930, 930, 50));
        assert_eq!(profile.ticks, (2, 5));
    }
}
