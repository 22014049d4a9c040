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

    /// Its setting for the change of a rule. The setting of a model may checkpoint other modules than those that the
    /// suggestion names.
    pub fn setting(self, rule: RuleId) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.framework == self && setting.rules.contains(&rule))
    }
}

/// A setting of a framework that makes the change of a suggestion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    framework: Framework,
    rules: &'static [RuleId],
    /// The setting, with the name of the framework.
    pub text: &'static str,
    /// Lines of Python that make it.
    pub code: &'static [&'static str],
}

const CHECKPOINT: &[RuleId] = &[RuleId::CheckpointLayers, RuleId::CheckpointOrNoGrad];

static SETTINGS: &[Setting] = &[
    Setting {
        framework: TransformersTrainer,
        rules: &[RuleId::Autocast],
        text: "Trainer: TrainingArguments(bf16=True)",
        code: &["args = TrainingArguments(..., bf16=True)"],
    },
    Setting {
        framework: TransformersTrainer,
        rules: &[RuleId::SmallerBatches],
        text: "Trainer: half of per_device_train_batch_size, with gradient_accumulation_steps=2",
        code: &[
            "args = TrainingArguments(..., per_device_train_batch_size=batch_size // 2,",
            "                         gradient_accumulation_steps=2)",
        ],
    },
    Setting {
        framework: TransformersTrainer,
        rules: &[RuleId::MoreMicroBatches],
        text: "Trainer: half of per_device_train_batch_size, twice the gradient_accumulation_steps",
        code: &[
            "args = TrainingArguments(..., per_device_train_batch_size=batch_size // 2,",
            "                         gradient_accumulation_steps={twice})",
        ],
    },
    Setting {
        framework: TransformersTrainer,
        rules: &[RuleId::HalfTheBatch],
        text: "Trainer: half of per_device_train_batch_size",
        code: &["args = TrainingArguments(..., per_device_train_batch_size=batch_size // 2)"],
    },
    Setting {
        framework: Lightning,
        rules: &[RuleId::Autocast],
        text: "Lightning: Trainer(precision=\"bf16-mixed\")",
        code: &[r#"trainer = Trainer(..., precision="bf16-mixed")"#],
    },
    Setting {
        framework: Lightning,
        rules: &[RuleId::SmallerBatches],
        text: "Lightning: half of the DataLoader's batch_size, with Trainer(accumulate_grad_batches=2)",
        code: &[
            "loader = DataLoader(dataset, batch_size=batch_size // 2)",
            "trainer = Trainer(..., accumulate_grad_batches=2)",
        ],
    },
    Setting {
        framework: Lightning,
        rules: &[RuleId::MoreMicroBatches],
        text: "Lightning: half of the DataLoader's batch_size, twice the accumulate_grad_batches of Trainer",
        code: &[
            "loader = DataLoader(dataset, batch_size=batch_size // 2)",
            "trainer = Trainer(..., accumulate_grad_batches={twice})",
        ],
    },
    Setting {
        framework: Lightning,
        rules: &[RuleId::HalfTheBatch],
        text: "Lightning: half of the DataLoader's batch_size",
        code: &["loader = DataLoader(dataset, batch_size=batch_size // 2)"],
    },
    Setting {
        framework: Ultralytics,
        rules: &[RuleId::Autocast],
        text: "ultralytics: amp=True",
        code: &["model.train(..., amp=True)"],
    },
    Setting {
        framework: Ultralytics,
        rules: &[RuleId::SmallerBatches, RuleId::MoreMicroBatches],
        text: "ultralytics: half of batch=, which accumulates gradients up to nbs=64",
        code: &["model.train(..., batch=batch // 2)  # accumulates gradients up to nbs=64"],
    },
    Setting {
        framework: Ultralytics,
        rules: &[RuleId::HalfTheBatch],
        text: "ultralytics: half of batch=",
        code: &["model.train(..., batch=batch // 2)"],
    },
    Setting {
        framework: Transformers,
        rules: CHECKPOINT,
        text: "transformers: TrainingArguments(activation_checkpointing=True), or \
               model.activation_checkpointing_enable() without Trainer; gradient_checkpointing in older releases",
        code: &[
            "model.activation_checkpointing_enable()  # older releases: model.gradient_checkpointing_enable()",
            "# or, with Trainer: TrainingArguments(..., activation_checkpointing=True)",
        ],
    },
    Setting {
        framework: Transformers,
        rules: &[RuleId::ScaledDotProductAttention],
        text: "transformers: from_pretrained(..., attn_implementation=\"sdpa\")",
        code: &[r#"model = AutoModel.from_pretrained(name, attn_implementation="sdpa")"#],
    },
    Setting {
        framework: Diffusers,
        rules: CHECKPOINT,
        text: "diffusers: model.enable_gradient_checkpointing(), for the blocks that the model chooses",
        code: &["model.enable_gradient_checkpointing()"],
    },
    Setting {
        framework: DiffusersDecoder,
        rules: &[RuleId::HalfTheBatch],
        text: "diffusers: pipe.vae.enable_slicing() decodes one image at a time, and pipe.enable_model_cpu_offload() \
               keeps only the running model on the GPU",
        code: &["pipe.vae.enable_slicing()", "pipe.enable_model_cpu_offload()"],
    },
    Setting {
        framework: Timm,
        rules: CHECKPOINT,
        text: "timm: model.set_grad_checkpointing()",
        code: &["model.set_grad_checkpointing()"],
    },
];

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
