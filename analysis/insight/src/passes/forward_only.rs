//! The use of calls of models without gradients: an evaluation, generation, or rollouts for reinforcement learning.
//!
//! A place is a call stack up to a model's call. The innermost function of it that is named after one of the three
//! decides. Without such a function, these facts do:
//!
//! - Generation: from one call of a module at the place to the next, the sizes of at least two blocks grow by the same
//!   number of bytes, [`SAME_GROWTH`] times in a row, while the sizes of others stay. This is a cache to which each
//!   call adds a token.
//! - Rollouts: several calls of trained modules come before the first backward pass, calls come between later ones, and
//!   the last calls are followed by more training, or were interrupted. The calls that a training starts with and goes
//!   on with make its data. An evaluation ends a training, or at least follows its last part.
//!
//! A place that computes losses evaluates, and training that begins its steps with a data loader has its data from
//! there.
//!
//! A call that each training step makes once, such as a teacher's, is an evaluation here.

use std::collections::{BTreeMap, HashMap, HashSet};

use memtrace_trace::file::Definitions;
use memtrace_trace::ids::{ContextId, StackId};

use crate::rules::{ForwardOnlyUse, names_forward_only};
use memtrace_input::AddressBuildHasher;

/// A cache has grown so often in a row by the same number of bytes.
const SAME_GROWTH: u32 = 2;
/// Keys and values.
const GROWING_BLOCKS: u32 = 2;
/// At least 25 % (1/4) of the stacks that allocate in a call that adds a token have a size that stays.
const STEADY_PART: u32 = 4;
/// So many calls before the first backward pass, and so many parts of the program with calls, show rollouts.
const FIRST_CALLS: u32 = 2;
const PARTS: u32 = 2;
/// The maximum number of places, of pairs of places that follow each other, and of modules of a place.
const MAX_PLACES: usize = 4096;
const MAX_MODULES: usize = 16;

/// The uses of calls without gradients, by place.
#[derive(Clone, Debug, Default)]
pub(super) struct ForwardOnlyCalls {
    uses: HashMap<StackId, ForwardOnlyUse>,
    /// The places that most training steps call once.
    in_each_step: HashSet<StackId>,
    cache_growth: CacheGrowthTable,
}

/// How caches grow with each call that adds a token.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheGrowthTable {
    /// By stack.
    pub by_stack: BTreeMap<StackId, CacheGrowth>,
    /// By stack and call of a module: by how many requested bytes each such call grows its part of a cache.
    pub by_call: BTreeMap<(StackId, ContextId), u64>,
}

/// How the blocks of a cache that one stack allocates grow with each call that adds a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheGrowth {
    /// By how many requested bytes each block grows.
    pub by: u64,
    /// The maximum number of blocks that one call of the model allocates. Blocks of earlier requests that the program
    /// keeps do not grow.
    pub blocks: u32,
}

impl ForwardOnlyCalls {
    /// The use of the calls at this place.
    pub(super) fn use_of(&self, place: StackId) -> ForwardOnlyUse {
        self.uses.get(&place).copied().unwrap_or(ForwardOnlyUse::Evaluation)
    }

    /// How caches grow with each call that adds a token.
    pub(super) fn cache_growth(&self) -> &CacheGrowthTable {
        &self.cache_growth
    }

    /// Whether most training steps call this place once.
    pub(super) fn is_in_each_step(&self, place: StackId) -> bool {
        self.in_each_step.contains(&place)
    }
}

/// The calls at one place.
#[derive(Clone, Debug, Default)]
struct SiteCalls {
    calls: u32,
    /// The number of backward passes before the latest call.
    backward_passes: u32,
    /// The number of parts of the program with a call. Backward passes separate the parts.
    parts: u32,
    /// The calls in the first part of the program, in the latest one, and in the one before that.
    before_training: u32,
    latest: u32,
    before_latest: u32,
    /// Whether a part has several calls.
    repeats: bool,
    /// Whether the program computes a loss from the results.
    has_loss: bool,
    /// Whether calls have added a token to a cache.
    adds_tokens: bool,
    /// The modules that allocate in the first call.
    modules: Vec<ContextId>,
}

/// The sizes that a stack allocates first in each call.
#[derive(Clone, Copy, Debug)]
struct Growth {
    call: u32,
    size: u64,
    by: u64,
    /// How often in a row it has grown by this.
    times: u32,
    /// The number of blocks of this size in the call.
    blocks: u32,
}

/// The call that is running.
#[derive(Clone, Copy, Debug, Default)]
struct OpenPlace {
    place: StackId,
    number: u32,
    growing_blocks: u32,
    growing_stacks: u32,
    steady_stacks: u32,
}

/// Finds [`ForwardOnlyCalls`].
#[derive(Debug, Default)]
pub(super) struct ForwardOnlyFinder {
    places: BTreeMap<StackId, SiteCalls>,
    /// Places that follow each other, without training in between. `NONE` stands for training.
    followers: HashSet<(StackId, StackId)>,
    /// By stack and module: a program can call the layers of its model at one line.
    growth: HashMap<u64, Growth, AddressBuildHasher>,
    cache_growth: BTreeMap<(StackId, ContextId), CacheGrowth>,
    open: OpenPlace,
    /// The place of the latest call since the training; `NONE` without one.
    latest: StackId,
    backward_passes: u32,
}

impl ForwardOnlyFinder {
    /// Observes the beginning of a backward pass.
    pub(super) fn backward_began(&mut self) {
        self.backward_passes += 1;
        self.trained();
    }

    /// Observes the beginning of a call, or with `NONE` of the code between calls.
    pub(super) fn begins(&mut self, place: StackId) {
        let number = self.places.get(&place).map_or(0, |place| place.calls);
        self.open = OpenPlace { place, number, ..OpenPlace::default() };
    }

    /// Observes an allocation without gradients in the call that is running.
    #[inline]
    pub(super) fn allocated(&mut self, stack: StackId, context: ContextId, requested: u64) {
        let open = &mut self.open;
        if open.place.is_none() {
            return;
        }
        if open.number == 0 && !context.is_none() && self.places.len() < MAX_PLACES {
            let modules = &mut self.places.entry(open.place).or_default().modules;
            if modules.len() < MAX_MODULES && !modules.contains(&context) {
                modules.push(context);
            }
        }
        let first = Growth { call: open.number, size: requested, by: 0, times: 0, blocks: 1 };
        let key = u64::from(stack.0) << 32 | u64::from(context.0);
        let growth = self.growth.entry(key).or_insert(first);
        if growth.call == open.number {
            growth.blocks += u32::from(growth.size == requested);
            if growth.times >= SAME_GROWTH {
                open.growing_blocks += 1;
                self.cache_growth
                    .entry((stack, context))
                    .and_modify(|cache| cache.blocks = cache.blocks.max(growth.blocks));
            }
            return;
        }
        let by = requested.saturating_sub(growth.size);
        let times = match by {
            0 => 0,
            by if by == growth.by => growth.times + 1,
            _ => 1,
        };
        if times == SAME_GROWTH {
            self.cache_growth
                .entry((stack, context))
                .and_modify(|cache| cache.by = by)
                .or_insert(CacheGrowth { by, blocks: 1 });
        }
        open.steady_stacks += u32::from(growth.size == requested);
        open.growing_stacks += u32::from(times >= SAME_GROWTH);
        open.growing_blocks += u32::from(times >= SAME_GROWTH);
        *growth = Growth { call: open.number, size: requested, by, times, blocks: 1 };
    }

    /// Observes the end of the call at `place`. `is_forward_only` means that autograd has not recorded in it.
    pub(super) fn ended(&mut self, place: StackId, is_forward_only: bool) {
        if !is_forward_only {
            self.trained();
            return;
        }
        if self.places.len() >= MAX_PLACES && !self.places.contains_key(&place) {
            return;
        }
        self.follow(place);
        let known = self.places.entry(place).or_default();
        if known.calls == 0 || known.backward_passes != self.backward_passes {
            known.parts += 1;
            (known.before_latest, known.latest) = (known.latest, 0);
        }
        known.calls += 1;
        known.latest += 1;
        known.backward_passes = self.backward_passes;
        known.before_training += u32::from(self.backward_passes == 0);
        known.repeats |= known.latest > 1;
        let OpenPlace { growing_blocks, growing_stacks, steady_stacks, .. } = self.open;
        let is_steady = steady_stacks * STEADY_PART >= steady_stacks + growing_stacks;
        known.adds_tokens |= self.open.place == place && growing_blocks >= GROWING_BLOCKS && is_steady;
    }

    /// Observes the computation of a loss without gradients.
    #[inline]
    pub(super) fn computes_loss(&mut self) {
        let place = if self.open.place.is_none() { self.latest } else { self.open.place };
        // A loss can be a module of its own.
        for place in [place, self.latest] {
            if let Some(known) = self.places.get_mut(&place) {
                known.has_loss = true;
            }
        }
    }

    /// Observes the beginning of a part of the training.
    fn trained(&mut self) {
        self.follow(StackId::NONE);
    }

    fn follow(&mut self, next: StackId) {
        let pair = (std::mem::replace(&mut self.latest, next), next);
        if pair != (StackId::NONE, StackId::NONE) && self.followers.len() < MAX_PLACES {
            self.followers.insert(pair);
        }
    }

    /// Ends the recording. `has_loaders` means that most steps begin with a call of a data loader.
    pub(super) fn finish(mut self, definitions: &Definitions, has_loaders: bool) -> ForwardOnlyCalls {
        self.trained();
        let trained = trained_modules(definitions);
        let is_trained = |module: &ContextId| {
            let call = definitions.nn_calls.get(module);
            call.is_some_and(|call| trained.contains(&(call.object, &*call.class)))
        };
        let passes = self.backward_passes;
        let is_in_each_step =
            |place: &SiteCalls| passes > 0 && !place.repeats && place.parts.saturating_mul(2) > passes;
        let is_data = |place: &SiteCalls| {
            let is_cut_off = place.backward_passes == passes;
            !has_loaders
                && !place.has_loss
                && place.before_training >= FIRST_CALLS
                && place.parts >= PARTS
                && (!is_cut_off || place.latest < place.before_latest)
                && place.modules.iter().any(is_trained)
        };
        let mut uses = HashMap::new();
        for (id, place) in &self.places {
            let named = name_of(*id, definitions);
            let used_for = match named {
                Some(ForwardOnlyUse::Evaluation) => ForwardOnlyUse::Evaluation,
                Some(ForwardOnlyUse::Rollout) if passes > 0 => ForwardOnlyUse::Rollout,
                _ if passes > 0 && is_data(place) => ForwardOnlyUse::Rollout,
                Some(ForwardOnlyUse::Generation) => ForwardOnlyUse::Generation,
                _ if place.adds_tokens => ForwardOnlyUse::Generation,
                _ => continue,
            };
            uses.insert(*id, used_for);
        }
        let in_each_step: HashSet<StackId> =
            self.places.iter().filter(|(_, place)| is_in_each_step(place)).map(|(id, _)| *id).collect();
        self.join(&mut uses, &in_each_step);
        // The layers of a model allocate at one stack.
        let mut cache_growth = CacheGrowthTable::default();
        for ((stack, call), of_module) in self.cache_growth {
            let of_call = cache_growth.by_call.entry((stack, call)).or_default();
            *of_call = of_call.saturating_add(of_module.by.saturating_mul(of_module.blocks.into()));
            let growth = cache_growth.by_stack.entry(stack).or_default();
            *growth = CacheGrowth { by: growth.by.max(of_module.by), blocks: growth.blocks + of_module.blocks };
        }
        ForwardOnlyCalls { uses, in_each_step, cache_growth }
    }

    /// Gives places without facts of their own the use of their neighbors: what always follows a rollout (the value of
    /// the last state), and what always precedes generation (the prompt).
    fn join(&self, uses: &mut HashMap<StackId, ForwardOnlyUse>, in_each_step: &HashSet<StackId>) {
        let mut before: BTreeMap<StackId, Vec<StackId>> = BTreeMap::new();
        let mut after: BTreeMap<StackId, Vec<StackId>> = BTreeMap::new();
        for (first, next) in &self.followers {
            before.entry(*next).or_default().push(*first);
            after.entry(*first).or_default().push(*next);
        }
        loop {
            let all = |of: Option<&Vec<StackId>>, used_for: ForwardOnlyUse, itself: &StackId| {
                let mut others = of.into_iter().flatten().filter(|other| *other != itself).peekable();
                others.peek().is_some() && others.all(|other| uses.get(other) == Some(&used_for))
            };
            let joins = |(id, place): (&StackId, &SiteCalls)| {
                if uses.contains_key(id) || in_each_step.contains(id) || place.has_loss {
                    None
                } else if !place.repeats && all(before.get(id), ForwardOnlyUse::Rollout, id) {
                    Some((*id, ForwardOnlyUse::Rollout))
                } else if all(after.get(id), ForwardOnlyUse::Generation, id) {
                    Some((*id, ForwardOnlyUse::Generation))
                } else {
                    None
                }
            };
            let joined: Vec<(StackId, ForwardOnlyUse)> = self.places.iter().filter_map(joins).collect();
            if joined.is_empty() {
                return;
            }
            uses.extend(joined);
        }
    }
}

/// The objects and classes of the modules that made nodes through which a backward pass ran.
fn trained_modules(definitions: &Definitions) -> HashSet<(u64, &str)> {
    let nodes = definitions.contexts.iter().filter(|context| !context.node.is_empty());
    let calls = nodes.filter_map(|context| definitions.nn_calls.get(&context.module));
    calls.map(|call| (call.object, &*call.class)).collect()
}

/// The use of a place, by the innermost function that is named after a use.
fn name_of(place: StackId, definitions: &Definitions) -> Option<ForwardOnlyUse> {
    let frames = definitions.walk(place).skip(1).filter_map(|(_, frame)| frame).filter(|frame| !frame.native);
    frames.filter_map(|frame| names_forward_only(&frame.filename, &frame.name)).next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ForwardOnlyUse::{Evaluation, Generation, Rollout};
    use memtrace_trace::file::{Context, Frame, NnCall, StackNode};

    /// The functions that call a model.
    const CALLERS: [&str; 6] = ["main", "other", "evaluate", "collect_rollouts", "generate", "teacher"];
    const MODEL: ContextId = ContextId(1);
    const FROZEN: ContextId = ContextId(2);

    fn definitions() -> Definitions {
        let mut definitions = Definitions { frames: vec![Frame::default()], ..Definitions::default() };
        definitions.stacks.push(StackNode { parent: StackId::NONE, frame: memtrace_trace::ids::FrameId::NONE });
        for name in CALLERS.iter().copied().chain(["_call_impl"]) {
            definitions.frames.push(Frame { name: name.into(), filename: "train.py".into(), ..Frame::default() });
        }
        for caller in 1..=CALLERS.len() as u32 {
            for (parent, frame) in [(0, caller), (2 * caller - 1, CALLERS.len() as u32 + 1)] {
                let frame = memtrace_trace::ids::FrameId(frame);
                definitions.stacks.push(StackNode { parent: StackId(parent), frame });
            }
        }
        for (id, object) in [(MODEL, 0x100), (FROZEN, 0x200)] {
            let call = NnCall { caller: ContextId::NONE, object, class: "Net".into() };
            definitions.nn_calls.insert(id, call);
        }
        let node = Context { node: "AddmmBackward0".into(), module: MODEL, ..Context::default() };
        definitions.contexts = vec![Context::default(), Context::default(), Context::default(), node];
        definitions
    }

    /// The calls of a program of one letter per call. `m`, `o`, `e`, `c`, `g` and `t`: calls of the trained model by
    /// functions with these initials. `f`: `main` calls a frozen model. `+`: `main` calls a model whose cache grows by
    /// a token. `=`: `main` calls two layers with such caches at one line. `T`: a training call and its backward pass.
    /// `l`: a loss.
    fn calls(program: &str, has_loaders: bool) -> ForwardOnlyCalls {
        let mut finder = ForwardOnlyFinder::default();
        let mut tokens = 0;
        for letter in program.chars() {
            let at = match letter {
                'T' => {
                    finder.ended(StackId(99), false);
                    finder.backward_began();
                    continue;
                }
                'l' => {
                    finder.computes_loss();
                    continue;
                }
                'm' | 'f' | '+' | '=' => 0,
                other => CALLERS.iter().position(|name| name.starts_with(other)).unwrap(),
            };
            let at = place(at);
            tokens += u64::from(matches!(letter, '+' | '='));
            let modules: &[ContextId] = match letter {
                'f' => &[FROZEN],
                '=' => &[MODEL, FROZEN],
                _ => &[MODEL],
            };
            for module in modules {
                finder.begins(at);
                finder.allocated(StackId(50), *module, 4096);
                finder.allocated(StackId(51), *module, 512 * tokens);
                finder.allocated(StackId(51), *module, 512 * tokens);
                finder.ended(at, true);
                finder.begins(StackId::NONE);
            }
        }
        finder.finish(&definitions(), has_loaders)
    }

    fn place(caller: usize) -> StackId {
        StackId(2 * caller as u32 + 2)
    }

    /// The uses of the places that `main`, `other` and so on call.
    fn uses(program: &str, has_loaders: bool) -> Vec<ForwardOnlyUse> {
        let calls = calls(program, has_loaders);
        (0..CALLERS.len()).map(|caller| calls.use_of(place(caller))).collect()
    }

    #[test]
    fn a_cache_grows_by_the_blocks_of_one_call() {
        let growth = |program: &str| calls(program, false).cache_growth().by_stack.get(&StackId(51)).copied();
        assert_eq!(growth("++"), None);
        assert_eq!(growth("++++++++"), Some(CacheGrowth { by: 512, blocks: 2 }), "keys and values");
    }

    #[test]
    fn the_order_of_calls_shows_rollouts() {
        let of_main = |program: &str| uses(program, false)[0];
        let cases = [
            ("experience before each part of the training", "mmmTTmmmTTmmmTT", Rollout),
            ("one call for each step, after the first ones", "mmmmTmTmTmT", Rollout),
            ("an error while experience is collected", "mmmTTmmmTTmm", Rollout),
            ("evaluation after each part", "TTmmmTTmmmTTmmm", Evaluation),
            ("evaluation before the training, too", "mmmTTmmmTTmmm", Evaluation),
            ("evaluation before each part, with a loss", "mmlTTmmlTTmmlTT", Evaluation),
            ("a model that is not trained", "ffTffTffT", Evaluation),
            ("one call in each step", "mTmTmTmT", Evaluation),
            ("one part", "mmmmTTTT", Evaluation),
        ];
        for (what, program, expected) in cases {
            assert_eq!(of_main(program), expected, "{what}: {program}");
        }
        assert_eq!(uses("mmmTTmmmTTmmmTT", true)[0], Evaluation, "a data loader has the data of the training");
    }

    #[test]
    fn what_always_follows_a_rollout_belongs_to_it() {
        let found = uses("mmoTTmmoTTmmoTT", false);
        assert_eq!((found[0], found[1]), (Rollout, Rollout));
        let found = uses("mmmtTmtTmtTmtT", false);
        assert_eq!((found[0], found[5]), (Rollout, Evaluation), "a teacher is in each step");
    }

    #[test]
    fn functions_are_named_after_what_they_compute() {
        let found = uses("TeTcTgTg", false);
        assert_eq!((found[2], found[3], found[4]), (Evaluation, Rollout, Generation));
        assert_eq!(uses("eeTTeeTTeeTT", false)[2], Evaluation, "the name outweighs the order");
        assert_eq!(uses("cc", false)[3], Evaluation, "without training");
    }

    #[test]
    fn a_cache_that_grows_by_the_same_size_shows_generation() {
        assert_eq!(uses("+++++", false)[0], Generation);
        assert_eq!(uses("===", false)[0], Generation);
        assert_eq!(uses("o+++++o+++++", false)[..2], [Generation, Generation], "with its prompt");
        assert_eq!(uses("++", false)[0], Evaluation, "too few calls");
        assert_eq!(uses("mmmmmm", false)[0], Evaluation, "nothing grows");
    }
}
