//! The memory of a job that serves a model and trains one on the same device, as in reinforcement learning.

use std::collections::BTreeMap;

use memtrace_insight::passes::{ActivityFigures, Category, DeviceAnalysis};
use memtrace_insight::rules::{Activity, ServingEngine, ServingPart};
use memtrace_insight::units::size_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An engine and a trainer on the same device.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ColocationSummary {
    /// The engine: `vLLM` or `SGLang`.
    pub engine: String,
    /// The name of the trainer's process. Absent if the engine's process trains itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainer: Option<String>,
    /// The activities that allocated memory, in their usual order.
    pub activities: Vec<ActivitySummary>,
    /// Changes of the program, and what each brings.
    pub advice: Vec<String>,
}

/// The memory in use in one activity, when it was highest. Blocks whose memory the engine has unmapped while it sleeps
/// do not count.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ActivitySummary {
    /// The activity.
    pub activity: Activity,
    /// How often it began. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// The bytes of both. In one process, those that PyTorch allocated; in two, those that it reserved, because only
    /// the process itself can use what it caches.
    pub bytes: u64,
    /// The bytes of the engine.
    pub engine_bytes: u64,
    /// The bytes of the trainer.
    pub trainer_bytes: u64,
    /// The bytes of blocks that PyTorch counts as allocated, and whose memory the engine has unmapped.
    pub paused_bytes: u64,
    /// The parts, most bytes first.
    pub parts: Vec<HeldPart>,
    /// The largest parts in one line.
    pub parts_text: String,
}

/// The owner of a part.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    /// The engine that serves the model.
    Engine,
    /// The code that trains it.
    Trainer,
}

/// The bytes of one part.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
pub struct HeldPart {
    /// The owner.
    pub holder: Holder,
    /// The part of a server, or the category.
    pub name: String,
    /// The bytes.
    pub bytes: u64,
}

/// A smaller share than 2 % (1/50) gives no advice.
const LARGE_SHARE: u64 = 50;

impl ActivitySummary {
    /// The bytes of a part.
    fn part(&self, holder: Holder, name: &str) -> u64 {
        self.parts.iter().filter(|part| part.holder == holder && part.name == name).map(|part| part.bytes).sum()
    }

    /// The same with its parts in their order, and their text.
    fn composed(mut self) -> ActivitySummary {
        self.parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        let large = self.parts.iter().filter(|part| part.bytes * LARGE_SHARE >= self.bytes).take(4);
        self.parts_text =
            large.map(|part| format!("{} {}", part.name, size_text(part.bytes))).collect::<Vec<_>>().join(", ");
        self
    }

    fn is_large(&self, bytes: u64) -> bool {
        bytes > 0 && bytes * LARGE_SHARE >= self.bytes
    }
}

/// The activities of an engine's process. Without a training, they wait for [`ColocationSummary::join`]. `None` if the
/// program is no engine that served. `epoch_ns` converts clock ticks.
pub(crate) fn colocation(
    analysis: &DeviceAnalysis,
    may_sleep: bool,
    epoch_ns: impl Fn(u64) -> u64,
) -> Option<ColocationSummary> {
    let engine = analysis.serving.engine?;
    analysis.serving.colocated.activity(Activity::Rollout)?;
    let activities = activities(analysis, epoch_ns);
    let advice = advice(engine.name(), &activities, may_sleep);
    Some(ColocationSummary { engine: engine.name().to_owned(), trainer: None, activities, advice })
}

/// PyTorch's memory in a process at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProcessMemory {
    /// The bytes of segments with memory on the device.
    pub(crate) reserved: u64,
    /// The bytes of blocks, also of those without memory.
    pub(crate) allocated: u64,
}

/// The peak of a process that trains.
#[derive(Clone, Debug)]
pub(crate) struct TrainerPeak {
    /// The name of the process.
    pub(crate) name: String,
    /// The device ordinal in that process.
    pub(crate) device: i16,
    /// Nanoseconds since the Unix epoch.
    pub(crate) time_ns: u64,
    /// The allocated bytes.
    pub(crate) bytes: u64,
    /// Their categories.
    pub(crate) parts: Vec<(Category, u64)>,
}

impl ColocationSummary {
    /// When the most was in use, as a sentence. `None` if it waits for a trainer.
    pub(crate) fn verdict(&self) -> Option<String> {
        let highest = self.activities.iter().filter(|_| self.trains()).max_by_key(|one| one.bytes)?;
        let (engine, bytes, activity) = (&self.engine, size_text(highest.bytes), highest.activity.name());
        let paused = self.activities.iter().any(|one| one.paused_bytes > 0);
        let reason = if paused { ": memory that it unmaps to sleep is not in use" } else { "" };
        Some(format!("{engine} and the training have {bytes} in use at most, in {activity}{reason}."))
    }

    /// Whether the training is among the activities.
    pub(crate) fn trains(&self) -> bool {
        self.activities.iter().any(|one| one.activity == Activity::Train)
    }

    /// Joins a trainer that has a process of its own. `at_times` returns the memory of the engine and of the trainer at
    /// given times, which ascend.
    pub(crate) fn join(
        &mut self,
        trainer: &TrainerPeak,
        may_sleep: bool,
        at_times: impl Fn(&[u64]) -> Vec<(ProcessMemory, ProcessMemory)>,
    ) {
        self.trainer = Some(trainer.name.clone());
        let parts = trainer.parts.iter().map(|(category, bytes)| HeldPart {
            holder: Holder::Trainer,
            name: category.plural().to_owned(),
            bytes: *bytes,
        });
        self.activities.push(ActivitySummary {
            activity: Activity::Train,
            times: None,
            time_ns: trainer.time_ns,
            bytes: 0,
            engine_bytes: 0,
            trainer_bytes: 0,
            paused_bytes: 0,
            parts: parts.collect(),
            parts_text: String::new(),
        });
        self.activities.sort_by_key(|one| one.time_ns);
        let times: Vec<u64> = self.activities.iter().map(|one| one.time_ns).collect();
        for (one, (engine, trainer)) in self.activities.iter_mut().zip(at_times(&times)) {
            one.parts
                .iter_mut()
                .filter(|_| one.activity != Activity::Train)
                .for_each(|part| part.holder = Holder::Engine);
            (one.bytes, one.engine_bytes, one.trainer_bytes) =
                (engine.reserved + trainer.reserved, engine.reserved, trainer.reserved);
            let cached = trainer.reserved.saturating_sub(trainer.allocated);
            let mut add = |holder, name: &str, bytes| {
                if bytes > 0 {
                    one.parts.push(HeldPart { holder, name: name.to_owned(), bytes });
                }
            };
            add(Holder::Trainer, CACHED, cached);
            if one.activity == Activity::Train {
                add(Holder::Engine, IN_USE, engine.reserved);
            } else {
                add(Holder::Trainer, IN_USE, trainer.reserved - cached);
            }
        }
        self.activities = std::mem::take(&mut self.activities).into_iter().map(ActivitySummary::composed).collect();
        self.activities.sort_by_key(|one| one.activity);
        self.advice = advice(&self.engine, &self.activities, may_sleep);
    }
}

/// The part of a process whose blocks are not listed here.
const IN_USE: &str = "in use";
/// The part of a process that its allocator caches.
const CACHED: &str = "cached";

/// The activities of one process.
fn activities(analysis: &DeviceAnalysis, epoch_ns: impl Fn(u64) -> u64) -> Vec<ActivitySummary> {
    let summary = |activity| {
        let figures = analysis.serving.colocated.activity(activity)?;
        let parts = parts(analysis, figures);
        let of = |holder| parts.iter().filter(|part| part.holder == holder).map(|part| part.bytes).sum();
        let summary = ActivitySummary {
            activity,
            times: Some(figures.times),
            time_ns: epoch_ns(figures.composition.ticks),
            bytes: figures.bytes,
            engine_bytes: of(Holder::Engine),
            trainer_bytes: of(Holder::Trainer),
            paused_bytes: figures.paused(),
            parts,
            parts_text: String::new(),
        };
        Some(summary.composed())
    };
    Activity::ALL.into_iter().filter_map(summary).collect()
}

/// The parts of both.
fn parts(analysis: &DeviceAnalysis, figures: &ActivityFigures) -> Vec<HeldPart> {
    let mut bytes: BTreeMap<(Holder, &str), u64> = BTreeMap::new();
    for (origin, amount) in figures.composition.origins() {
        let serving = &analysis.serving;
        let key = if serving.is_of_engine(origin) {
            (Holder::Engine, serving.part_of(origin.stack, origin.category).name())
        } else {
            (Holder::Trainer, origin.category.plural())
        };
        *bytes.entry(key).or_default() += amount.bytes;
    }
    let part = |((holder, name), bytes): ((Holder, &str), u64)| HeldPart { holder, name: name.to_owned(), bytes };
    bytes.into_iter().map(part).collect()
}

/// How a program lets its engine release its memory, as code.
fn sleep_text(engine: &str, may_sleep: bool) -> &'static str {
    match (engine == ServingEngine::Vllm.name(), may_sleep) {
        (true, true) => "`llm.sleep(level=1)`",
        (true, false) => "`enable_sleep_mode=True` and `llm.sleep(level=1)`",
        (false, true) => "`engine.release_memory_occupation()`",
        (false, false) => "`enable_memory_saver=True` and `engine.release_memory_occupation()`",
    }
}

/// Changes that lower the highest of these activities.
fn advice(engine: &str, activities: &[ActivitySummary], may_sleep: bool) -> Vec<String> {
    let Some(highest) = activities.iter().max_by_key(|one| one.bytes) else { return Vec::new() };
    let others = activities.iter().filter(|one| one.activity != highest.activity).map(|one| one.bytes).max();
    let after = |saved: u64| highest.bytes.saturating_sub(saved).max(others.unwrap_or(0));
    let falls =
        |saved| format!("The most in use falls from {} to {}.", size_text(highest.bytes), size_text(after(saved)));
    let mut found = Vec::new();
    match highest.activity {
        Activity::Train => {
            let of_engine = |name| highest.part(Holder::Engine, name);
            let cache = of_engine(ServingPart::KvCache.name());
            let saved = cache + of_engine(ServingPart::Weights.name()) + of_engine(IN_USE);
            if highest.is_large(saved) && after(saved) < highest.bytes {
                let text = sleep_text(engine, may_sleep);
                let held = size_text(saved);
                found.push(format!("{text} before the training: {engine} holds {held} then. {}", falls(saved)));
            }
        }
        Activity::Sync => {}
        Activity::Rollout => {
            let of_trainer = |name| highest.part(Holder::Trainer, name);
            let gradients = of_trainer(Category::Gradient.plural());
            if highest.is_large(gradients) {
                found.push(format!(
                    "`optimizer.zero_grad(set_to_none=True)` before the rollout, which needs no gradients. {}",
                    falls(gradients)
                ));
            }
            let state = of_trainer(Category::OptimizerState.plural());
            if highest.is_large(state) {
                found.push(format!(
                    "The optimizer's state ({}) in host memory during rollouts. {}",
                    size_text(state),
                    falls(state)
                ));
            }
        }
    }
    let cached = highest.part(Holder::Trainer, CACHED);
    if highest.activity != Activity::Train && highest.is_large(cached) {
        found.push(format!(
            "`torch.cuda.empty_cache()` in the trainer after its steps: it caches {}, which only it can use. {}",
            size_text(cached),
            falls(cached)
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity(activity: Activity, bytes: u64, parts: &[(Holder, &str, u64)]) -> ActivitySummary {
        let parts = parts.iter().map(|(holder, name, bytes)| HeldPart {
            holder: *holder,
            name: (*name).to_owned(),
            bytes: *bytes << 20,
        });
        ActivitySummary {
            activity,
            times: Some(1),
            time_ns: 0,
            bytes: bytes << 20,
            engine_bytes: 0,
            trainer_bytes: 0,
            paused_bytes: 0,
            parts: parts.collect(),
            parts_text: String::new(),
        }
    }

    #[test]
    fn the_highest_activity_decides_what_to_change() {
        let rollout = activity(Activity::Rollout, 900, &[(Holder::Engine, "KV cache", 700)]);
        let train =
            activity(Activity::Train, 990, &[(Holder::Engine, "KV cache", 700), (Holder::Trainer, "gradients", 200)]);
        let found = advice("vLLM", &[rollout.clone(), train.clone()], true);
        assert_eq!(
            found,
            ["`llm.sleep(level=1)` before the training: vLLM holds 700 MiB then. The most in use falls from 990 \
                 MiB to 900 MiB."]
        );
        let higher = ActivitySummary { bytes: 2000 << 20, ..rollout };
        assert!(advice("vLLM", &[higher, train], true).is_empty(), "the trainer holds nothing then");
    }
}
