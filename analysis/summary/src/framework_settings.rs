//! The frameworks that compute the activations at a peak, and their settings for the changes that suggestions name.

use std::collections::BTreeSet;

use memtrace_insight::passes::{Category, Composition};
use memtrace_insight::rules::{Framework, RuleId, Setting};
use memtrace_trace::file::Definitions;
use memtrace_trace::ids::StackId;

/// The frameworks that compute the activations at a peak. They decide about the training step; what computes without
/// gradients, or loads parameters, has other settings.
pub(crate) struct FrameworkSettings {
    in_use: BTreeSet<Framework>,
}

impl FrameworkSettings {
    /// The frameworks in the stacks of the activations of `peak`, and in those of the operations whose autograd nodes
    /// made them.
    pub(crate) fn new(definitions: &Definitions, peak: &Composition) -> FrameworkSettings {
        let by_frame: Vec<Option<Framework>> = definitions.frames.iter().map(Framework::of).collect();
        let mut in_use = BTreeSet::new();
        if by_frame.iter().any(Option::is_some) {
            let activations = peak.origins().filter(|(origin, _)| origin.category == Category::Activation);
            let stacks: BTreeSet<StackId> = activations
                .flat_map(|(origin, _)| {
                    let forward = definitions.context(origin.context).map_or(StackId::NONE, |node| node.forward);
                    [origin.stack, forward]
                })
                .collect();
            let frames = stacks.into_iter().flat_map(|stack| definitions.walk_ids(stack));
            in_use.extend(frames.filter_map(|(_, frame)| by_frame.get(frame.index()).copied().flatten()));
        }
        FrameworkSettings { in_use }
    }

    /// The setting that makes the change of a rule.
    pub(crate) fn of(&self, rule: RuleId) -> Option<&'static Setting> {
        self.in_use.iter().find_map(|framework| framework.setting(rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::CompileContextId;
    use memtrace_insight::passes::{Origin, Phase};
    use memtrace_insight::rules::CustomCategory;
    use memtrace_trace::file::{Frame, StackNode};
    use memtrace_trace::ids::{ContextId, FrameId};

    /// The setting for a rule, if a model of timm in a training step of transformers' `Trainer` allocates a block of
    /// this category.
    fn setting(category: Category, rule: RuleId) -> Option<&'static str> {
        let frame = |file: &str, name: &str| Frame { filename: file.into(), name: name.into(), ..Frame::default() };
        let node = |parent, frame| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        let definitions = Definitions {
            frames: vec![
                Frame::default(),
                frame("/x/site-packages/transformers/trainer.py", "training_step"),
                frame("/x/site-packages/timm/models/vision_transformer.py", "forward"),
            ],
            stacks: vec![node(0, 0), node(0, 1), node(1, 2)],
            ..Definitions::default()
        };
        let mut peak = Composition::default();
        let origin = Origin {
            stack: StackId(2),
            context: ContextId::NONE,
            phase: Phase::Forward,
            category,
            custom: CustomCategory::NONE,
            pool: 0,
            compile_context: CompileContextId::FIRST,
        };
        peak.add(origin, 1 << 20, 1);
        FrameworkSettings::new(&definitions, &peak).of(rule).map(|setting| setting.text)
    }

    #[test]
    fn the_framework_of_the_activations_at_the_peak_has_the_setting() {
        let activation = |rule| setting(Category::Activation, rule);
        assert_eq!(activation(RuleId::Autocast), Some("Trainer: TrainingArguments(bf16=True)"));
        assert_eq!(activation(RuleId::CheckpointLayers), Some("timm: model.set_grad_checkpointing()"));
        assert_eq!(activation(RuleId::EightBitMoments), None);
        assert_eq!(setting(Category::Temporary, RuleId::Autocast), None, "a teacher without gradients");
    }
}
