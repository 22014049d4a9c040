//! The blocks of one device while its events stream. All passes see the device through them.

use std::cell::RefCell;

use memtrace_trace::event::Event;

use super::category::{BlockAllocation, BlockClassification, Categorizer, Category, LifetimeEnd};
use super::composition::{Composition, ModuleKey, Origin};
use super::custom::CustomCategorizer;
use super::mark::{Mark, Marks};
use super::modules::ModulePaths;
use super::phase::{EventClassification, Phase, PhaseTracker, ProgramPosition};
use memtrace_input::CompileContexts;
use memtrace_replay::{Allocator, Block, BlockId, BlockState, Names};

/// The blocks in use are determined for this many out-of-memory errors, because any of them can be the last one.
const EXAMINED_ERRORS: u64 = 1000;

/// The program's position, the tensor names and the user's rules.
pub(crate) struct Tracked<'a> {
    pub(super) tracker: PhaseTracker,
    pub(super) names: Option<&'a Names>,
    pub(super) custom: Option<CustomCategorizer<'a>>,
    pub(super) compile_contexts: &'a CompileContexts,
}

/// The allocations of a device's blocks, and what decides their categories.
#[derive(Clone, Debug)]
pub(crate) struct DeviceBlocks {
    /// By block id: the allocation of the block. Valid for allocated blocks.
    allocations: Vec<BlockAllocation>,
    marks: Marks,
    categorizer: Categorizer,
    /// The number of out-of-memory errors so far.
    errors: u64,
    /// How often the phase had changed at the last error.
    phase_changes: Option<u32>,
    /// Whether frees since the last allocation may belong to the program's teardown.
    may_be_ending: bool,
    /// The paths of the modules that compositions refer to.
    module_paths: RefCell<ModulePaths>,
}

impl DeviceBlocks {
    pub(super) fn new(categorizer: Categorizer) -> DeviceBlocks {
        DeviceBlocks {
            allocations: Vec::new(),
            marks: Marks::new(categorizer.knows_workspaces()),
            categorizer,
            errors: 0,
            phase_changes: None,
            may_be_ending: false,
            module_paths: RefCell::default(),
        }
    }

    /// The allocation of an allocated block.
    #[inline]
    pub(super) fn of(&self, id: BlockId) -> Option<&BlockAllocation> {
        self.allocations.get(id.index())
    }

    /// The mark of an allocated block.
    #[inline]
    pub(super) fn mark(&self, id: BlockId) -> Mark {
        self.marks.of(id)
    }

    /// Adds a block that is allocated.
    #[inline]
    pub(super) fn allocated(
        &mut self,
        tracked: &Tracked<'_>,
        e: &Event,
        id: BlockId,
        block: &Block,
        classification: &EventClassification,
    ) -> (BlockAllocation, Mark) {
        let Tracked { tracker, names, .. } = tracked;
        let errors = self.errors as u32;
        let block = self.categorizer.allocated(tracker, e, block, classification, *names, errors);
        match self.allocations.get_mut(id.index()) {
            Some(old) => *old = block,
            None => self.allocations.resize(id.index() + 1, block),
        }
        self.may_be_ending = false;
        (block, self.marks.allocated(id, &block, e, tracker.stacks().facts(e.stack), classification))
    }

    /// The program frees something.
    #[inline]
    pub(super) fn freed(&mut self, tracked: &Tracked<'_>, e: &Event) {
        self.categorizer.freed(&tracked.tracker, e);
    }

    /// Whether an error that unwinds the program frees the block, which would have stayed allocated.
    #[inline]
    pub(super) fn is_truncated(&self, block: &BlockAllocation, now: &ProgramPosition) -> bool {
        self.errors > u64::from(block.oom_count) && self.phase_changes == Some(now.phase_changes)
    }

    /// Whether a free of the block belongs to the program's teardown if no allocation follows.
    #[inline]
    pub(super) fn may_be_teardown(
        &mut self,
        block: &BlockAllocation,
        classification: &EventClassification,
        now: &ProgramPosition,
    ) -> bool {
        // After such a free, later frees by user code count as frees of older blocks, until the next allocation.
        let older = block.position.step != now.step || self.may_be_ending;
        let may_be = classification.may_be_teardown(older);
        self.may_be_ending |= may_be;
        may_be
    }

    /// The category of a block whose lifetime ends.
    #[inline]
    pub(super) fn lifetime_ended(
        &mut self,
        tracked: &Tracked<'_>,
        block: &BlockAllocation,
        end: &LifetimeEnd<'_>,
    ) -> BlockClassification {
        self.categorizer.lifetime_ended(&tracked.tracker, block, end)
    }

    pub(super) fn categorizer(&self) -> &Categorizer {
        &self.categorizer
    }

    /// A CUDA graph is captured into a private pool.
    pub(super) fn captured_into(&mut self, pool: u16) {
        self.categorizer.captured_into(pool);
    }

    /// A request ran out of memory. Returns whether its blocks in use are to be examined.
    pub(super) fn out_of_memory(&mut self, allocator: &Allocator, tracked: &Tracked<'_>) -> bool {
        self.categorizer.out_of_memory();
        let is_examined = self.errors < EXAMINED_ERRORS;
        if is_examined {
            self.examine_allocated(allocator, tracked);
        }
        self.errors += 1;
        self.phase_changes = Some(tracked.tracker.now().phase_changes);
        is_examined
    }

    /// Learns from the blocks that are allocated when nothing more is known about them.
    pub(super) fn examine_allocated(&mut self, allocator: &Allocator, tracked: &Tracked<'_>) {
        let end = LifetimeEnd { now: tracked.tracker.now(), is_truncated: true, free: None };
        let allocated = allocator.allocated().filter_map(|(id, _)| self.allocations.get(id.index()));
        self.categorizer.examine_allocated(&tracked.tracker, allocated, &end);
    }

    /// Adds a block to a composition, and to the module that the block belongs to.
    pub(super) fn add_to(
        &self,
        composition: &mut Composition,
        block: &BlockAllocation,
        category: Category,
        tracked: &Tracked<'_>,
    ) {
        let custom = tracked.custom.as_ref().map(|custom| custom.category_of(block)).unwrap_or_default();
        let origin = Origin {
            stack: block.site.stack,
            context: block.site.context,
            phase: block.phase,
            category,
            custom,
            pool: block.private_pool(category),
            compile_context: tracked.compile_contexts.of(block.seq),
        };
        composition.add(origin, block.memory.size, block.seq);
        if let Some(module) = self.module_of(block, tracked) {
            let checkpointed = tracked.tracker.stacks().facts(block.site.stack).in_checkpoint;
            composition.add_to_module(module, category, block.memory.size, block.seq, checkpointed);
        }
    }

    fn module_of(&self, block: &BlockAllocation, tracked: &Tracked<'_>) -> Option<ModuleKey> {
        let call = tracked.tracker.stacks().contexts().module(block.site.event_context);
        match tracked.names.filter(|_| block.proof.is_named()).and_then(|names| names.of_allocation(block.seq)) {
            Some(named) => self.module_paths.borrow_mut().number(named).map(ModuleKey::Path),
            None => (!call.is_none()).then_some(ModuleKey::Call(call)),
        }
    }
}

/// The blocks of a device that are in use. A block that waits for a stream was already freed by the program.
#[derive(Clone, Copy)]
pub(crate) struct BlocksInUse<'a> {
    pub(super) allocator: &'a Allocator,
    pub(super) blocks: &'a DeviceBlocks,
    pub(super) tracked: &'a Tracked<'a>,
}

impl<'a> BlocksInUse<'a> {
    /// The blocks and their marks.
    pub(crate) fn iter(self) -> impl Iterator<Item = (&'a BlockAllocation, Mark)> {
        let in_use = self.allocator.allocated().filter(|(_, block)| block.state == BlockState::Allocated);
        in_use.filter_map(move |(id, _)| Some((self.blocks.of(id)?, self.blocks.mark(id))))
    }

    /// The composition of the blocks. `e` is the latest event, in `phase`.
    pub(super) fn composition(self, e: &Event, phase: Phase) -> Composition {
        let now = self.tracked.tracker.now();
        let end = LifetimeEnd { now, is_truncated: true, free: None };
        let mut composition = Composition::default();
        composition.restart(e, *now, phase, *self.allocator.usage());
        for (block, _) in self.iter() {
            let category = self.blocks.categorizer.classify(&self.tracked.tracker, block, &end).category;
            self.blocks.add_to(&mut composition, block, category, self.tracked);
        }
        composition
    }

    /// The paths of the modules that all compositions of the device refer to.
    pub(super) fn take_module_paths(self) -> ModulePaths {
        self.blocks.module_paths.take()
    }
}
