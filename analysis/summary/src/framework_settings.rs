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
    /// made them. Also those that are not around modules, if the program uses them at all.
    pub(crate) fn new(definitions: &Definitions, peak: &Composition) -> FrameworkSettings {
        let by_frame: Vec<Option<Framework>> = definitions.frames.iter().map(Framework::of).collect();
        let of_program = by_frame.iter().flatten().filter(|framework| !framework.is_around_modules());
        let mut in_use: BTreeSet<Framework> = of_program.copied().collect();
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
        if in_use.contains(&Framework::Transformers) && in_use.contains(&Framework::TransformersTrainer) {
            in_use.insert(Framework::TransformersInTrainer);
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
        setting_in("timm/models/vision_transformer.py", &[], category, rule)
    }

    /// The setting for a rule, if a model in this file allocates a block of this category, in a training step of
    /// transformers' `Trainer`, and other stacks have frames of `others`.
    fn setting_in(model: &str, others: &[&str], category: Category, rule: RuleId) -> Option<&'static str> {
        let frame = |file: &str, name: &str| Frame { filename: file.into(), name: name.into(), ..Frame::default() };
        let node = |parent, frame| StackNode { parent: StackId(parent), frame: FrameId(frame) };
        let definitions = Definitions {
            frames: vec![
                Frame::default(),
                frame("/x/site-packages/transformers/trainer.py", "training_step"),
                frame(&format!("/x/site-packages/{model}"), "forward"),
            ]
            .into_iter()
            .chain(others.iter().map(|file| frame(&format!("/x/site-packages/{file}"), "unshard")))
            .collect(),
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

    #[test]
    fn a_model_of_transformers_has_the_setting_of_its_trainer() {
        let model = "transformers/models/gpt2/modeling_gpt2.py";
        let found = setting_in(model, &[], Category::Activation, RuleId::CheckpointLayers);
        assert_eq!(found, Some("Trainer: TrainingArguments(gradient_checkpointing=True)"));
    }

    #[test]
    fn fully_shard_counts_without_being_around_the_modules() {
        let used = |rule| {
            let fsdp = ["torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"];
            setting_in("train/model.py", &fsdp, Category::Temporary, rule)
        };
        let policy = "FSDP2: fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16))";
        assert_eq!(used(RuleId::Autocast), Some(policy));
        assert_eq!(used(RuleId::CheckpointLayers), Some("FSDP2: checkpoint the modules before fully_shard()"));
    }
}
