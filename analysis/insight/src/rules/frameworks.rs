//! The settings by which frameworks make the changes that suggestions name. Sources: transformers 5.24, lightning 2.6,
//! ultralytics 8.4, diffusers 0.42 and timm 1.0.

use memtrace_trace::file::Frame;

use super::ids::RuleId;

/// A library that runs a training step, or that has the code of a model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Framework {
    /// A training step of transformers' `Trainer`.
    TransformersTrainer,
    /// A training step of Lightning. Manual optimization does not count: it refuses `accumulate_grad_batches`.
    Lightning,
    /// The training loop of ultralytics.
    Ultralytics,
    /// A model of transformers.
    Transformers,
    /// A model of diffusers.
    Diffusers,
    /// The autoencoder of a pipeline of diffusers, which makes images of latents.
    DiffusersDecoder,
    /// A model of timm.
    Timm,
}

use Framework::{Diffusers, DiffusersDecoder, Lightning, Timm, Transformers, TransformersTrainer, Ultralytics};

/// A part of the path of a file, the function in it (empty: any), and the framework.
const CODE: &[(&str, &str, Framework)] = &[
    ("/transformers/trainer.py", "training_step", TransformersTrainer),
    ("/lightning/pytorch/loops/optimization/automatic.py", "", Lightning),
    ("/pytorch_lightning/loops/optimization/automatic.py", "", Lightning),
    ("/ultralytics/engine/trainer.py", "_do_train", Ultralytics),
    ("/transformers/models/", "", Transformers),
    ("/diffusers/models/autoencoders/", "_decode", DiffusersDecoder),
    ("/diffusers/models/", "", Diffusers),
    ("/timm/models/", "", Timm),
];

impl Framework {
    /// All frameworks.
    pub const ALL: [Framework; 7] =
        [TransformersTrainer, Lightning, Ultralytics, Transformers, Diffusers, DiffusersDecoder, Timm];

    /// The framework whose code a frame runs.
    pub fn of(frame: &Frame) -> Option<Framework> {
        let is_in = |file: &str, function: &str| {
            frame.filename.contains(file) && (function.is_empty() || *frame.name == *function)
        };
        CODE.iter().find(|(file, function, _)| is_in(file, function)).map(|(_, _, framework)| *framework)
    }

    /// Its setting for the change of a rule, with its name. The setting of a model may checkpoint other modules than
    /// those that the suggestion names.
    pub fn setting(self, rule: RuleId) -> Option<&'static str> {
        Some(match (self, rule) {
            (TransformersTrainer, RuleId::Autocast) => "Trainer: TrainingArguments(bf16=True)",
            (TransformersTrainer, RuleId::SmallerBatches) => {
                "Trainer: half of per_device_train_batch_size, with gradient_accumulation_steps=2"
            }
            (TransformersTrainer, RuleId::MoreMicroBatches) => {
                "Trainer: half of per_device_train_batch_size, twice the gradient_accumulation_steps"
            }
            (TransformersTrainer, RuleId::HalfTheBatch) => "Trainer: half of per_device_train_batch_size",
            (Lightning, RuleId::Autocast) => "Lightning: Trainer(precision=\"bf16-mixed\")",
            (Lightning, RuleId::SmallerBatches) => {
                "Lightning: half of the DataLoader's batch_size, with Trainer(accumulate_grad_batches=2)"
            }
            (Lightning, RuleId::MoreMicroBatches) => {
                "Lightning: half of the DataLoader's batch_size, twice the accumulate_grad_batches of Trainer"
            }
            (Lightning, RuleId::HalfTheBatch) => "Lightning: half of the DataLoader's batch_size",
            (Ultralytics, RuleId::Autocast) => "ultralytics: amp=True",
            (Ultralytics, RuleId::SmallerBatches | RuleId::MoreMicroBatches) => {
                "ultralytics: half of batch=, which accumulates gradients up to nbs=64"
            }
            (Ultralytics, RuleId::HalfTheBatch) => "ultralytics: half of batch=",
            (Transformers, RuleId::CheckpointLayers | RuleId::CheckpointOrNoGrad) => {
                "transformers: TrainingArguments(activation_checkpointing=True), or \
                 model.activation_checkpointing_enable() without Trainer; gradient_checkpointing in older releases"
            }
            (Diffusers, RuleId::CheckpointLayers | RuleId::CheckpointOrNoGrad) => {
                "diffusers: model.enable_gradient_checkpointing(), for the blocks that the model chooses"
            }
            (DiffusersDecoder, RuleId::HalfTheBatch) => {
                "diffusers: pipe.vae.enable_slicing() decodes one image at a time, and \
                 pipe.enable_model_cpu_offload() keeps only the running model on the GPU"
            }
            (Timm, RuleId::CheckpointLayers | RuleId::CheckpointOrNoGrad) => "timm: model.set_grad_checkpointing()",
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(filename: &str, name: &str) -> Option<Framework> {
        Framework::of(&Frame { filename: filename.into(), name: name.into(), ..Frame::default() })
    }

    #[test]
    fn frameworks_are_recognized_by_the_code_of_a_training_step() {
        let trainer = "/x/site-packages/transformers/trainer.py";
        assert_eq!(of(trainer, "training_step"), Some(TransformersTrainer));
        assert_eq!(of(trainer, "prediction_step"), None, "an evaluation has other settings");
        for package in ["lightning/pytorch", "pytorch_lightning"] {
            let of_loop = |name| of(&format!("/x/site-packages/{package}/loops/optimization/{name}.py"), "step");
            assert_eq!((of_loop("automatic"), of_loop("manual")), (Some(Lightning), None));
        }
        assert_eq!(of("/x/site-packages/timm/models/resnet.py", "forward"), Some(Timm));
        assert_eq!(of("/home/me/models/resnet.py", "forward"), None);
        let diffusers = |file: &str, name| of(&format!("/x/site-packages/diffusers/models/{file}.py"), name);
        assert_eq!(diffusers("autoencoders/autoencoder_kl", "_decode"), Some(DiffusersDecoder));
        assert_eq!(diffusers("autoencoders/autoencoder_kl", "encode"), Some(Diffusers));
        assert_eq!(diffusers("resnet", "forward"), Some(Diffusers));
    }
}
