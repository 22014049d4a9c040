//! Classifies each block by purpose, from its name, its allocation site and its lifetime.
//!
//! A block's category is decided when the block is freed, because only then is its whole lifetime known. The evidence,
//! in order of trust:
//!
//! 1. A tensor name that was read in the traced process: a parameter, a gradient or optimizer state.
//! 2. A rule about the frames that allocated the block.
//! 3. The block's lifetime:
//! - A block from a forward pass is an activation, unless the call that allocated it also frees it.
//! - A block from a backward pass is a gradient if the optimizer still finds it. It is autograd detail if it goes from
//!   one node to the next.
//! - A block that the optimizer allocates is optimizer state if the next step still finds it.
//!
//! An out-of-memory error that unwinds the program, or the end of the recording, cuts lifetimes short. Such blocks are
//! classified by allocation site.
//!
//! The first seven categories, and the distinctions between them, are those of PyTorch's own memory timeline
//! (`torch.profiler._memory_profiler`). `docs/dev/accuracy.md` measures the agreement with it.

use std::collections::{HashMap, HashSet};

use memtrace_trace::definition::TensorKind;
use memtrace_trace::event::{Event, Flags};
use memtrace_trace::file::{Definitions, StackNode};
use memtrace_trace::ids::{ContextId, FrameId, StackId};
use serde::Serialize;

use super::phase::{Moment, Phase, PhaseTracker, Verdict};
use crate::rules::{
    CategoryRule, Makes, Meaning, category_rule, ends_autocast, is_attention, is_cache_name, is_library_module,
    is_lt_workspace_size, is_workspace_size,
};
use memtrace_input::AddressHashing;
use memtrace_replay::{Block, Named};

/// What a block was for, by the names of PyTorch's own memory timeline, and what that does not know.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters and buffers.
    Parameter,
    /// Gradients of parameters.
    Gradient,
    /// What the optimizer keeps.
    OptimizerState,
    /// What the forward computes.
    Activation,
    /// What a backward node hands to the next.
    AutogradDetail,
    /// Batches.
    Input,
    /// What lives within one call, or one phase outside forward and backward.
    Temporary,
    /// Scratch memory that a library keeps: cuBLAS workspaces.
    Workspace,
    /// Buckets and gathered shards of DistributedDataParallel, FSDP and their kin.
    CommunicationBucket,
    /// Copies of weights in lower precision that autocast makes.
    AutocastCache,
    /// A loaded checkpoint beside the model that it was loaded into.
    Checkpoint,
    /// Keys and values (or other state) that an inference-only program's model keeps across its calls.
    KvCache,
    /// Memory of a private pool (CUDA graphs, `torch.cuda.MemPool`).
    GraphPool,
    /// What no rule knows.
    Unknown,
}

impl Category {
    /// All categories, in the order in which reports list them.
    pub const ALL: [Category; 14] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::AutogradDetail,
        Category::Input,
        Category::Temporary,
        Category::Workspace,
        Category::CommunicationBucket,
        Category::AutocastCache,
        Category::Checkpoint,
        Category::KvCache,
        Category::GraphPool,
        Category::Unknown,
    ];

    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer_state",
            Category::Activation => "activation",
            Category::AutogradDetail => "autograd_detail",
            Category::Input => "input",
            Category::Temporary => "temporary",
            Category::Workspace => "workspace",
            Category::CommunicationBucket => "communication_bucket",
            Category::AutocastCache => "autocast_cache",
            Category::Checkpoint => "checkpoint",
            Category::KvCache => "kv_cache",
            Category::GraphPool => "graph_pool",
            Category::Unknown => "unknown",
        }
    }

    /// The plural name in reports.
    pub const fn plural(self) -> &'static str {
        match self {
            Category::Parameter => "parameters",
            Category::Gradient => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activations",
            Category::AutogradDetail => "autograd detail",
            Category::Input => "inputs",
            Category::Temporary => "temporaries",
            Category::Workspace => "cuBLAS workspaces",
            Category::CommunicationBucket => "communication buckets",
            Category::AutocastCache => "autocast's weights",
            Category::Checkpoint => "loaded checkpoint",
            Category::KvCache => "KV cache",
            Category::GraphPool => "CUDA graph pool",
            Category::Unknown => "other",
        }
    }

    /// Whether blocks of this category are normally freed within the phase that allocated them.
    pub const fn is_passing(self) -> bool {
        matches!(self, Category::Temporary | Category::AutogradDetail)
    }
}

/// A category and the rule that decided it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Judged {
    /// The category.
    pub category: Category,
    /// The name of the rule that decided it.
    pub rule: &'static str,
}

/// What is known about a block at its allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Birth {
    /// `seq` of the allocation event.
    pub seq: u64,
    /// Time of the allocation, in clock ticks.
    pub ticks: u64,
    /// The block's address.
    pub addr: u64,
    /// The block's size in bytes, rounded as the allocator rounds.
    pub size: u64,
    /// The requested size in bytes.
    pub requested: u64,
    /// The stack that allocated the block.
    pub stack: StackId,
    /// The autograd node that was running; `NONE` without one.
    pub context: ContextId,
    /// The context that the event itself carries: an autograd node or a module's call.
    pub within: ContextId,
    /// The program's position at the allocation.
    pub at: Moment,
    /// The phase of the allocation event. On other threads it can differ from the program's phase in `at`.
    pub phase: Phase,
    /// The number of out-of-memory errors before the allocation.
    pub ooms: u32,
    /// What the name, stack, size or pool proves.
    pub proof: Proof,
    /// The number of the run of consecutive events from one place that the allocation belongs to.
    call: u32,
    /// The number of calls of the model so far, including the one that allocates this block.
    model_calls: u32,
}

impl Birth {
    /// A 512-byte block of step 0's forward pass without stack or proof. Only for tests, here and in the crates above.
    #[doc(hidden)]
    pub fn for_tests(seq: u64) -> Birth {
        let at = Moment { phase: Phase::Forward, step: Some(0), run: 0, backwards: 0, optimizers: 0 };
        Birth::of_forward(seq, 512, StackId::NONE, at)
    }

    /// A block of a forward pass without context or proof. Only for tests of passes that examine block lifetimes.
    pub(super) fn of_forward(seq: u64, size: u64, stack: StackId, at: Moment) -> Birth {
        Birth {
            seq,
            ticks: seq,
            addr: seq << 9,
            size,
            requested: size,
            stack,
            context: ContextId::NONE,
            within: ContextId::NONE,
            at,
            phase: Phase::Forward,
            ooms: 0,
            proof: Proof::None,
            call: 0,
            model_calls: 0,
        }
    }
}

/// What a name, a stack, a size or a pool proves about a block, whatever its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Proof {
    /// Nothing.
    #[default]
    None,
    /// The block has a tensor name of this kind.
    Named(TensorKind),
    /// The block is a buffer, and its name is one that people give to a key/value cache.
    NamedCache,
    /// A category rule matches the frames that allocated the block.
    Made(&'static CategoryRule),
    /// A phase rule for building, moving or filling models matches.
    Model,
    /// The phase rule for moving a module matches.
    Moved,
    /// A phase rule for the optimizer's state initialization matches.
    State,
    /// An optimizer's step allocated the block.
    Step,
    /// Work on gradients outside an optimizer's step allocated the block.
    GradientWork,
    /// The block is in a private pool.
    Pool,
    /// The autograd node `AccumulateGrad`, which passes gradients to parameters, was running.
    AccumulatesGradient,
    /// The block is as large as a library's workspace. It is a workspace if it outlives its step.
    WorkspaceSized,
    /// The block is as large as a cuBLASLt workspace. It is one if it is never freed and cuBLAS has a workspace.
    LtWorkspaceSized,
    /// The block is as large as a parameter. It is a gradient if it comes from a backward pass that was cut short.
    ParameterSized,
    /// The block is half as large as a parameter, and its stack casts tensors. It is a weight that autocast casts.
    WeightCast,
}

/// How a block's lifetime ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct End<'a> {
    /// The program's position at the end.
    pub now: &'a Moment,
    /// Whether an out-of-memory error or the end of the recording ended the lifetime, not the program's own logic.
    pub cut: bool,
    /// The event that frees the block; `None` if the block is still allocated.
    pub free: Option<&'a Event>,
}

/// Classifies blocks. Facts about stacks are computed once; facts about the program accumulate as the recording
/// streams.
#[derive(Clone, Debug)]
pub struct Categorizer {
    /// By stack: the category rule of the innermost frame that has one.
    rules: Vec<Option<&'static CategoryRule>>,
    /// By stack: the frame that this rule matched.
    frames: Vec<FrameId>,
    /// By stack: whether one of the frames is attention code. `may_cache`: whether a model can keep keys and values
    /// that this stack allocates.
    attends: Vec<bool>,
    may_cache: Vec<bool>,
    /// Stacks whose forward call made an autograd node that casts (`ToCopyBackward`).
    casts: HashSet<StackId, AddressHashing>,
    /// Stacks at the end of an autocast region.
    ends_autocast: HashSet<StackId, AddressHashing>,
    accumulates: Vec<bool>,
    has_nodes: bool,
    /// Whether a block as large as cuBLAS's workspace has been allocated.
    has_workspace: bool,
    /// Whether parameters have names. If so, a block without a name is not a parameter.
    has_names: bool,
    place: (StackId, ContextId),
    call: u32,
    model_calls: u32,
    in_model: bool,
    /// Requested sizes of the blocks that building, moving and filling models allocated.
    parameter_sizes: HashSet<u64, AddressHashing>,
    /// Requested sizes of the gradients so far.
    gradient_sizes: HashSet<u64, AddressHashing>,
    /// By stack: whether it loads data.
    data_stacks: Vec<bool>,
    /// By stack: allocations per call of the model. Filled only for inference-only programs.
    growing: HashMap<StackId, Growing, AddressHashing>,
    /// `often`: the number of stacks that allocated in [`SEVERAL_CALLS`] calls of the model. `steady`: those of them
    /// whose requested size never changed.
    often: u32,
    steady: u32,
    /// By requested size: how many blocks user code that no rule matches allocated before the first forward pass.
    made_at_load: HashMap<u64, u32, AddressHashing>,
}

/// The name of the phase rule for `model.to()` and similar methods of `nn.Module`.
const MODULE_MOVED: &str = "load: Module moved";
/// The name of the rule for blocks that an inference-only program's model enlarges from call to call.
const GROWS: &str = "kv cache: grows from call to call";

/// The allocations of one stack across the model's calls, in an inference-only program.
#[derive(Clone, Copy, Debug)]
struct Growing {
    /// The first call of the model in which the stack allocated, and the number of calls in which it did.
    first: u32,
    calls: u32,
    /// The latest call in which the stack allocated, and the requested bytes of the first allocation in it.
    call: u32,
    size: u64,
    /// How often in a row the size has grown, and whether it has ever changed.
    grown: u32,
    varies: bool,
    /// Whether a block of this stack was already classified as a cache that grows.
    kept: bool,
}

/// A block must outlive this many calls of the model to count as a cache. A plain result is freed as soon as the next
/// calls replace it.
const CACHED_CALLS: u32 = 3;
/// A cache that grows with each call is replaced within this many calls.
const GROWN_CALLS: u32 = 2;
/// A stack counts in [`Categorizer::often`] and [`Categorizer::steady`] once it has allocated in this many calls of the
/// model. `STEADY_PART`: a growing cache needs at least one in this many of these stacks to have a constant size.
const SEVERAL_CALLS: u32 = 3;
const STEADY_PART: u32 = 4;
/// The minimum number of equal-sized blocks from user code that count as a cache: keys and values of two layers.
const CACHE_BLOCKS: u32 = 4;

impl Categorizer {
    /// Takes the definitions of a recording. `has_names`: whether the recording names parameters.
    pub fn new(definitions: &Definitions, has_names: bool) -> Categorizer {
        let known: Vec<_> = definitions.frames.iter().map(category_rule).collect();
        let ends: Vec<bool> = definitions.frames.iter().map(ends_autocast).collect();
        let ends = |stack: &StackNode| ends.get(stack.frame.index()).is_some_and(|ends| *ends);
        let ends = definitions.stacks.iter().enumerate().filter(|(_, stack)| ends(stack));
        let ends: HashSet<StackId, AddressHashing> = ends.map(|(i, _)| StackId(i as u32)).collect();
        let mut rules: Vec<Option<&'static CategoryRule>> = Vec::with_capacity(definitions.stacks.len());
        let mut frames: Vec<FrameId> = Vec::with_capacity(definitions.stacks.len());
        let mut attends: Vec<bool> = Vec::with_capacity(definitions.stacks.len());
        let mut may_cache: Vec<bool> = Vec::with_capacity(definitions.stacks.len());
        // By frame: whether it is native, whether it is attention code, and whether it belongs to a module of
        // PyTorch's.
        let kinds = definitions.frames.iter().map(|f| (f.native, is_attention(f), is_library_module(f)));
        let kinds: Vec<(bool, bool, bool)> = kinds.collect();
        for (i, node) in definitions.stacks.iter().enumerate() {
            let caller = node.parent.index();
            let (attended, might) = if caller < i { (attends[caller], may_cache[caller]) } else { (false, true) };
            let (native, attention, library) = kinds.get(node.frame.index()).copied().unwrap_or_default();
            attends.push(attended || attention);
            // The innermost Python frame decides.
            may_cache.push(if native { might } else { attended || attention || !library });
            let inherited = if caller < i { (rules[caller], frames[caller]) } else { (None, FrameId::NONE) };
            let (rule, frame) = match known.get(node.frame.index()).copied().flatten() {
                Some(rule) => (Some(rule), node.frame),
                None => inherited,
            };
            rules.push(rule);
            frames.push(frame);
        }
        let casts = definitions.contexts.iter().filter(|c| c.node.starts_with("ToCopyBackward"));
        Categorizer {
            rules,
            frames,
            attends,
            may_cache,
            casts: casts.map(|c| c.forward).filter(|stack| !stack.is_none()).collect(),
            ends_autocast: ends,
            accumulates: definitions.contexts.iter().map(|c| &*c.node == "AccumulateGrad").collect(),
            has_nodes: definitions.contexts.iter().any(|c| !c.node.is_empty()),
            has_workspace: false,
            has_names,
            place: (StackId::NONE, ContextId::NONE),
            call: 0,
            model_calls: 0,
            in_model: false,
            parameter_sizes: HashSet::default(),
            gradient_sizes: HashSet::default(),
            data_stacks: vec![false; definitions.stacks.len()],
            growing: HashMap::default(),
            often: 0,
            steady: 0,
            made_at_load: HashMap::default(),
        }
    }

    /// The frame that decided `judged`. `NONE` if no category rule about frames decided it.
    #[inline]
    pub fn evidence(&self, birth: &Birth, judged: &Judged) -> FrameId {
        match birth.proof {
            Proof::Made(rule) if std::ptr::eq(rule.name, judged.rule) => {
                self.frames.get(birth.stack.index()).copied().unwrap_or(FrameId::NONE)
            }
            _ => FrameId::NONE,
        }
    }

    /// Takes an allocation or a free. Consecutive events with the same Python stack and context belong to one call.
    #[inline]
    fn note_place(&mut self, tracker: &PhaseTracker, e: &Event) {
        let place = (tracker.stacks().python(e.stack), e.context);
        if place != self.place {
            self.place = place;
            self.call = self.call.wrapping_add(1);
        }
    }

    /// Takes an allocation. `name` is the block's tensor name, `ooms` the number of out-of-memory errors so far.
    #[inline]
    pub fn born(
        &mut self,
        tracker: &PhaseTracker,
        e: &Event,
        block: &Block,
        verdict: &Verdict,
        name: Option<&Named>,
        ooms: u32,
    ) -> Birth {
        self.note_place(tracker, e);
        let in_model = !tracker.stacks().facts(e.stack).outermost_compute.is_none();
        self.model_calls += u32::from(in_model && !self.in_model);
        self.in_model = in_model;
        let proof = self.proof(e, block.requested, verdict, name);
        self.learn(tracker, e, block.requested, verdict, proof);
        Birth {
            seq: e.seq,
            ticks: e.ticks,
            addr: e.addr,
            size: block.size,
            requested: block.requested,
            stack: e.stack,
            context: tracker.stacks().contexts().node(e.context),
            within: e.context,
            at: *tracker.now(),
            phase: verdict.phase,
            ooms,
            proof,
            call: self.call,
            model_calls: self.model_calls,
        }
    }

    #[inline]
    fn proof(&self, e: &Event, requested: u64, verdict: &Verdict, name: Option<&Named>) -> Proof {
        let made = self.rules.get(e.stack.index()).copied().flatten();
        if let Some(rule) = made.filter(|rule| rule.makes == Makes::Gathered) {
            return Proof::Made(rule);
        }
        if let Some(Named { kind, names, .. }) = name.filter(|name| name.kind != TensorKind::Other) {
            let cache = *kind == TensorKind::Buffer && names.iter().any(|name| is_cache_name(name));
            return if cache { Proof::NamedCache } else { Proof::Named(*kind) };
        }
        if let Some(rule) = made {
            return Proof::Made(rule);
        }
        if e.pool != 0 {
            return Proof::Pool;
        }
        match verdict.meaning() {
            Some(Meaning::Load) if verdict.rule == MODULE_MOVED => return Proof::Moved,
            Some(Meaning::Load) => return Proof::Model,
            Some(Meaning::OptimizerState) => return Proof::State,
            Some(Meaning::OptimizerStep) => return Proof::Step,
            Some(Meaning::GradientWork) => return Proof::GradientWork,
            _ => {}
        }
        match verdict.phase {
            Phase::Backward if self.accumulates.get(e.context.index()).is_some_and(|a| *a) => {
                Proof::AccumulatesGradient
            }
            Phase::Backward if self.parameter_sizes.contains(&requested) => Proof::ParameterSized,
            Phase::Forward | Phase::Backward | Phase::Eval | Phase::Recompute if is_workspace_size(requested) => {
                Proof::WorkspaceSized
            }
            Phase::Forward | Phase::Backward | Phase::Eval | Phase::Recompute if is_lt_workspace_size(requested) => {
                Proof::LtWorkspaceSized
            }
            Phase::Forward | Phase::Recompute
                if self.casts.contains(&e.stack) && self.parameter_sizes.contains(&(2 * requested)) =>
            {
                Proof::WeightCast
            }
            _ => Proof::None,
        }
    }

    /// Records what this allocation shows about other blocks.
    #[inline]
    fn learn(&mut self, tracker: &PhaseTracker, e: &Event, requested: u64, verdict: &Verdict, proof: Proof) {
        match (verdict.phase, proof) {
            (_, Proof::WorkspaceSized) => self.has_workspace = true,
            (_, Proof::Model | Proof::Moved | Proof::Named(TensorKind::Parameter)) => {
                self.parameter_sizes.insert(requested);
            }
            // Between a backward pass and the next forward pass, user code that no rule matches loads the next batch.
            (Phase::Data, _) | (Phase::Other, Proof::None)
                if verdict.meaning().is_none() || verdict.phase == Phase::Data =>
            {
                if let Some(brings) = self.data_stacks.get_mut(e.stack.index()) {
                    *brings = true;
                }
            }
            (Phase::Load, Proof::None) => *self.made_at_load.entry(requested).or_default() += 1,
            (Phase::Eval | Phase::Forward, Proof::None) if tracker.is_inference() && self.in_model => {
                let now = self.model_calls;
                let first =
                    Growing { first: now, calls: 1, call: now, size: requested, grown: 0, varies: false, kept: false };
                let growing = self.growing.entry(e.stack).or_insert(first);
                if growing.call != now {
                    growing.calls += 1;
                    let varied = growing.varies;
                    growing.varies |= requested != growing.size;
                    if growing.calls == SEVERAL_CALLS {
                        self.often += 1;
                        self.steady += u32::from(!growing.varies);
                    } else if growing.calls > SEVERAL_CALLS && growing.varies && !varied {
                        self.steady -= 1;
                    }
                    growing.grown = if requested > growing.size { growing.grown + 1 } else { 0 };
                    (growing.call, growing.size) = (now, requested);
                }
            }
            _ => {}
        }
    }

    /// Takes a free. Call this before the block's lifetime is classified.
    #[inline]
    pub fn freed(&mut self, tracker: &PhaseTracker, e: &Event) {
        self.note_place(tracker, e);
    }

    /// Takes the blocks that are still allocated at the end of the recording, and records the sizes of the gradients
    /// among them.
    pub fn ending<'a>(&mut self, tracker: &PhaseTracker, births: impl Iterator<Item = &'a Birth>, end: &End<'_>) {
        for birth in births.filter(|b| b.phase == Phase::Backward) {
            self.learn_gradient(birth, &self.backward(tracker, birth, end));
        }
    }

    #[inline]
    fn learn_gradient(&mut self, birth: &Birth, judged: &Judged) {
        if judged.category == Category::Gradient {
            self.gradient_sizes.insert(birth.requested);
        }
    }

    /// The category of a block whose lifetime ends. Blocks must come in the order in which their lifetimes end.
    #[inline]
    pub fn ended(&mut self, tracker: &PhaseTracker, birth: &Birth, end: &End<'_>) -> Judged {
        let judged = self.judge(tracker, birth, end);
        self.learn_gradient(birth, &judged);
        if judged.category == Category::KvCache
            && judged.rule == GROWS
            && let Some(growing) = self.growing.get_mut(&birth.stack)
        {
            growing.kept = true;
        }
        judged
    }

    /// The category of a block whose lifetime ends, or would end, with `end`.
    #[inline]
    pub fn judge(&self, tracker: &PhaseTracker, birth: &Birth, end: &End<'_>) -> Judged {
        let now = end.now;
        let beyond = now.step > birth.at.step || end.cut && now.optimizers > birth.at.optimizers;
        match birth.proof {
            Proof::Named(TensorKind::Parameter) => return is(Category::Parameter, "name: a parameter"),
            Proof::Named(TensorKind::Buffer) => return is(Category::Parameter, "name: a buffer"),
            Proof::Named(TensorKind::Gradient) => return is(Category::Gradient, "name: a gradient"),
            Proof::Named(_) => return is(Category::OptimizerState, "name: optimizer state"),
            Proof::NamedCache => return is(Category::KvCache, "kv cache: a buffer's name"),
            Proof::Made(rule) => return self.made(rule, birth, now),
            Proof::Pool => return is(Category::GraphPool, "graph pool: in a private pool"),
            Proof::WorkspaceSized if beyond => {
                return is(Category::Workspace, "workspace: its size, outlives its step");
            }
            Proof::LtWorkspaceSized
                if self.has_workspace && end.free.is_none() && beyond && birth.at.step == Some(0) =>
            {
                return is(Category::Workspace, "workspace: its size, from the first step to the end");
            }
            _ => {}
        }
        match birth.phase {
            Phase::Data if self.in_one_call(birth, end) => {
                is(Category::Temporary, "temporary: freed by the call that made it")
            }
            Phase::Data => is(Category::Input, "input: brought by the data phase"),
            Phase::Load => self.load(tracker, birth, end),
            Phase::Forward | Phase::Recompute | Phase::Eval => self.forward(tracker, birth, end),
            Phase::Backward => self.backward(tracker, birth, end),
            Phase::Optimizer => optimizer(birth, end),
            Phase::Other => self.other(birth, end),
        }
    }

    #[inline]
    fn brings_data(&self, stack: StackId) -> bool {
        self.data_stacks.get(stack.index()).is_some_and(|brings| *brings)
    }

    /// Whether the call that allocated the block also frees it. Such a block is an operator's scratch memory.
    #[inline]
    fn in_one_call(&self, birth: &Birth, end: &End<'_>) -> bool {
        end.free.is_some() && birth.call == self.call
    }

    fn made(&self, rule: &'static CategoryRule, birth: &Birth, now: &Moment) -> Judged {
        if rule.makes == Makes::Bucket && birth.phase == Phase::Backward && outlives_backward(birth, now) {
            return is(Category::Gradient, "gradient: of all ranks, outlives its backward");
        }
        let category = match rule.makes {
            Makes::Bucket | Makes::Gathered => Category::CommunicationBucket,
            Makes::KvCache => Category::KvCache,
            Makes::Workspace => Category::Workspace,
            Makes::Parameter => Category::Parameter,
            // A loaded checkpoint is the model itself, unless the program has another copy of the parameters.
            Makes::Checkpoint if self.has_names => Category::Checkpoint,
            Makes::Checkpoint if self.parameter_sizes.contains(&birth.requested) => Category::Checkpoint,
            Makes::Checkpoint => Category::Parameter,
        };
        is(category, rule.name)
    }

    fn load(&self, tracker: &PhaseTracker, birth: &Birth, end: &End<'_>) -> Judged {
        let never_used = birth.at.step.is_none() && end.now.step.is_none() && !end.cut;
        match birth.proof {
            Proof::Moved => is(Category::Parameter, "parameter: a module is moved or cast"),
            Proof::Model if never_used => is(Category::Temporary, "temporary: gone before the first forward"),
            Proof::Model => is(Category::Parameter, "parameter: a model is built, moved or filled"),
            _ if self.brings_data(birth.stack) => is(Category::Input, "input: later batches come from here"),
            _ if never_used => is(Category::Temporary, "temporary: gone before the first forward"),
            _ if tracker.is_inference() => {
                let alike = self.made_at_load.get(&birth.requested).copied().unwrap_or_default();
                let cached = self.model_calls >= birth.model_calls + CACHED_CALLS;
                if self.has_names && cached && alike >= CACHE_BLOCKS && alike % 2 == 0 {
                    is(Category::KvCache, "kv cache: equal blocks without a name, kept across calls")
                } else if self.has_names {
                    is(Category::Input, "input: made before the first forward, no name")
                } else {
                    is(Category::Unknown, "unknown: made by the program before the first forward")
                }
            }
            _ if self.has_names => is(Category::Input, "input: made before the first forward, no name"),
            _ if self.gradient_sizes.contains(&birth.requested) => {
                is(Category::Parameter, "parameter: as large as a gradient")
            }
            _ if !self.gradient_sizes.is_empty() => {
                is(Category::Input, "input: made before the first forward, no gradient")
            }
            _ => is(Category::Unknown, "unknown: made by the program before the first forward"),
        }
    }

    fn forward(&self, tracker: &PhaseTracker, birth: &Birth, end: &End<'_>) -> Judged {
        if self.in_one_call(birth, end) {
            return is(Category::Temporary, "temporary: freed by the call that made it");
        }
        if birth.proof == Proof::WeightCast {
            return is(Category::AutocastCache, "autocast cache: a cast, half as large as a parameter");
        }
        if end.free.is_some_and(|e| self.ends_autocast.contains(&e.stack)) {
            return is(Category::AutocastCache, "autocast cache: freed when autocast ends");
        }
        // A block that only the garbage collector frees was not kept for later calls to read.
        let collected = end.free.is_some_and(|e| e.flags.contains(Flags::IN_GC));
        if tracker.is_inference() && !collected {
            let outlives = self.model_calls.saturating_sub(birth.model_calls);
            let may_cache = self.may_cache.get(birth.stack.index()).is_some_and(|may| *may);
            let growing = self.growing.get(&birth.stack);
            // A model with a cache does constant work per token, so most of its stacks allocate a constant size. The
            // last version of a cache is never replaced: it is still allocated at the end. `kept` covers that version.
            let replaced = end.free.is_some() && (1..=GROWN_CALLS).contains(&outlives);
            let grows = |g: &Growing| g.kept || replaced && g.grown >= 2 && STEADY_PART * self.steady >= self.often;
            if may_cache && growing.is_some_and(grows) {
                return is(Category::KvCache, GROWS);
            }
            let inside = !tracker.stacks().facts(birth.stack).outermost_compute.is_none();
            if inside && outlives >= CACHED_CALLS {
                // A cache is allocated once, or in attention. A block that every call allocates anew and that the
                // program keeps is a result.
                let often = growing.is_some_and(|g| 2 * g.calls > self.model_calls.saturating_sub(g.first));
                let attends = self.attends.get(birth.stack.index()).is_some_and(|attends| *attends);
                if attends || may_cache && !often {
                    return is(Category::KvCache, "kv cache: kept across calls of the model");
                }
                return is(Category::Activation, "activation: a result, kept across calls of the model");
            }
        }
        if self.brings_data(birth.stack) && tracker.stacks().facts(birth.stack).rule.is_none() {
            return is(Category::Input, "input: other batches come from here");
        }
        match birth.phase {
            Phase::Recompute => is(Category::Activation, "activation: recomputed"),
            _ => is(Category::Activation, "activation: computed by the forward"),
        }
    }

    fn backward(&self, tracker: &PhaseTracker, birth: &Birth, end: &End<'_>) -> Judged {
        let now = end.now;
        if birth.proof == Proof::Named(TensorKind::Gradient) {
            return is(Category::Gradient, "name: a gradient");
        }
        if outlives_backward(birth, now) {
            return is(Category::Gradient, "gradient: outlives its backward");
        }
        if end.free.is_some_and(|e| tracker.is_beside_engine(e)) {
            return is(Category::Gradient, "gradient: freed by plain code after its backward");
        }
        if end.cut {
            if !matches!(now.phase, Phase::Backward | Phase::Recompute) {
                return is(Category::Gradient, "gradient: outlives its backward");
            }
            match birth.proof {
                Proof::AccumulatesGradient => return is(Category::Gradient, "gradient: made by AccumulateGrad"),
                Proof::ParameterSized => return is(Category::Gradient, "gradient: as large as a parameter"),
                _ => {}
            }
        }
        if self.in_one_call(birth, end) && (self.has_nodes || !birth.stack.is_none()) {
            return is(Category::Temporary, "temporary: freed by the node that made it");
        }
        is(Category::AutogradDetail, "autograd detail: handed from node to node")
    }

    fn other(&self, birth: &Birth, end: &End<'_>) -> Judged {
        if self.in_one_call(birth, end) {
            is(Category::Temporary, "temporary: freed by the call that made it")
        } else if self.brings_data(birth.stack) {
            is(Category::Input, "input: other batches come from here")
        } else if birth.proof == Proof::None && end.now.run > birth.at.run && birth.at.step.is_some() {
            is(Category::Input, "input: made between backward and forward")
        } else {
            is(Category::Unknown, "unknown: no rule")
        }
    }
}

/// Whether the backward pass that allocated the block has ended.
fn outlives_backward(birth: &Birth, now: &Moment) -> bool {
    now.optimizers > birth.at.optimizers || now.backwards > birth.at.backwards
}

fn optimizer(birth: &Birth, end: &End<'_>) -> Judged {
    match birth.proof {
        Proof::State => is(Category::OptimizerState, "optimizer state: made by the optimizer's set-up of it"),
        _ if birth.at.run == end.now.run => is(Category::Temporary, "temporary: gone before the optimizer is done"),
        Proof::Step => is(Category::OptimizerState, "optimizer state: outlives the optimizer's step"),
        Proof::GradientWork => is(Category::Temporary, "temporary: of work on gradients"),
        _ => is(Category::Unknown, "unknown: made beside the optimizer"),
    }
}

const fn is(category: Category, rule: &'static str) -> Judged {
    Judged { category, rule }
}

/// How often one rule decided a category.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CategoryReason {
    /// The category and its rule.
    pub judged: Judged,
    /// A frame that the rule matched; `NONE` if the rule is not about frames.
    pub evidence: FrameId,
    /// The number of blocks that the rule decided.
    pub blocks: u64,
    /// The sum of their sizes in bytes.
    pub bytes: u64,
}

/// For each rule: how many blocks and bytes it decided.
#[derive(Clone, Debug, Default)]
pub struct CategoryReasons {
    rules: Vec<CategoryReason>,
    latest: usize,
}

impl CategoryReasons {
    /// Counts one classified block of `bytes` bytes. `evidence` is called only for a rule's first block.
    #[inline]
    pub fn add(&mut self, judged: &Judged, bytes: u64, evidence: impl FnOnce() -> FrameId) {
        // The name is compared by address, which is cheap. A literal can have several addresses; that only adds an
        // entry, and `all` merges entries.
        let is = |r: &CategoryReason| std::ptr::eq(r.judged.rule, judged.rule) && r.judged.category == judged.category;
        if !self.rules.get(self.latest).is_some_and(is) {
            self.latest = self.rules.iter().position(is).unwrap_or_else(|| {
                self.rules.push(CategoryReason { judged: *judged, evidence: evidence(), blocks: 0, bytes: 0 });
                self.rules.len() - 1
            });
        }
        if let Some(reason) = self.rules.get_mut(self.latest) {
            reason.blocks += 1;
            reason.bytes += bytes;
        }
    }

    /// Every rule that decided a block, by bytes in descending order. Entries with the same name and category are
    /// merged.
    pub fn all(&self) -> Vec<CategoryReason> {
        let mut all: Vec<CategoryReason> = Vec::new();
        for reason in &self.rules {
            match all.iter_mut().find(|r| r.judged == reason.judged) {
                Some(same) => {
                    same.blocks += reason.blocks;
                    same.bytes += reason.bytes;
                }
                None => all.push(*reason),
            }
        }
        all.sort_by_key(|r| std::cmp::Reverse(r.bytes));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::{LabelRules, StackTable, StepEnds};
    use memtrace_trace::event::Flags;

    const NOW: Moment = Moment { phase: Phase::Load, step: None, run: 0, backwards: 0, optimizers: 0 };

    fn born(phase: Phase, proof: Proof) -> Birth {
        Birth { at: Moment { phase, ..NOW }, phase, proof, ..Birth::for_tests(1) }
    }

    #[test]
    fn a_fate_makes_a_category() {
        let definitions = Definitions::default();
        let tracker = PhaseTracker::new(StackTable::new(&definitions), StepEnds::default(), LabelRules::default());
        let mut categorizer = Categorizer::new(&definitions, false);
        // An event from another place has passed since the allocation.
        categorizer.call = 1;
        let later = Moment { phase: Phase::Optimizer, step: Some(0), run: 3, backwards: 1, optimizers: 1 };
        let free = Event { flags: Flags::IN_BACKWARD, ..Event::EMPTY };
        let is = |phase, proof, now: Moment, cut| {
            categorizer
                .judge(&tracker, &born(phase, proof), &End { now: &now, cut, free: (!cut).then_some(&free) })
                .category
        };
        let forward = Moment { phase: Phase::Forward, ..NOW };
        assert_eq!(is(Phase::Forward, Proof::None, later, false), Category::Activation);
        assert_eq!(is(Phase::Forward, Proof::None, forward, false), Category::Activation);
        assert_eq!(is(Phase::Forward, Proof::None, forward, true), Category::Activation);
        assert_eq!(is(Phase::Backward, Proof::None, later, false), Category::Gradient);
        let backward = Moment { phase: Phase::Backward, run: 2, ..NOW };
        assert_eq!(is(Phase::Backward, Proof::None, backward, false), Category::AutogradDetail);
        assert_eq!(is(Phase::Backward, Proof::ParameterSized, backward, true), Category::Gradient);
        let optimizer = Moment { phase: Phase::Optimizer, ..NOW };
        assert_eq!(is(Phase::Optimizer, Proof::State, optimizer, true), Category::OptimizerState);
        assert_eq!(is(Phase::Optimizer, Proof::Step, optimizer, false), Category::Temporary);
        assert_eq!(is(Phase::Optimizer, Proof::Step, later, false), Category::OptimizerState);
        assert_eq!(is(Phase::Load, Proof::Model, later, false), Category::Parameter);
        assert_eq!(is(Phase::Load, Proof::Model, NOW, false), Category::Temporary);
        assert_eq!(is(Phase::Load, Proof::None, later, false), Category::Unknown);
        let forward = Proof::Named(TensorKind::Buffer);
        assert_eq!(is(Phase::Forward, forward, later, false), Category::Parameter);
        assert_eq!(is(Phase::Load, Proof::Named(TensorKind::OptimizerState), later, true), Category::OptimizerState);
        // The call that allocated the block also frees it.
        categorizer.call = 0;
        let judged = categorizer.judge(
            &tracker,
            &born(Phase::Forward, Proof::None),
            &End { now: &later, cut: false, free: Some(&free) },
        );
        assert_eq!(judged.category, Category::Temporary);
    }
}
