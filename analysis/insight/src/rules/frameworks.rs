//! The settings by which frameworks make the changes that suggestions name. Sources: transformers 4.57, 5.17 and 5.24,
//! lightning 2.6, ultralytics 8.4, diffusers 0.42, timm 1.0, torchtitan 0.2.2 and 0.3.0, and PyTorch 2.15 (FSDP2).

use memtrace_trace::file::Frame;
use memtrace_trace::named;

use super::ids::RuleId;
use super::modules::FULLY_SHARD;

named! {
    /// A library that runs a training step, or that has the code of a model.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub enum Framework {
        /// A model of transformers in a training step of its `Trainer`: both of these. No frame shows it alone.
        TransformersInTrainer,
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
        /// A training step of torchtitan up to 0.2, which takes options and TOML files.
        TorchtitanOptions,
        /// A training step of torchtitan from 0.3 on, whose configuration is a Python function.
        TorchtitanConfig,
        /// `fully_shard` of PyTorch (FSDP2). Its code runs before and after the modules that it shards, not around
        /// them.
        Fsdp2,
    }
}

use Framework::{
    Diffusers, DiffusersDecoder, Fsdp2, Lightning, Timm, TorchtitanConfig, TorchtitanOptions, Transformers,
    TransformersInTrainer, TransformersTrainer, Ultralytics,
};

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
    ("/torchtitan/train.py", "forward_backward_step", TorchtitanOptions),
    ("/torchtitan/trainer.py", "forward_backward_step", TorchtitanConfig),
];

impl Framework {
    /// Whether the framework's own code is in the stacks of the activations that it is about.
    pub fn is_around_modules(self) -> bool {
        self != Fsdp2
    }

    /// The framework whose code a frame runs.
    pub fn of(frame: &Frame) -> Option<Framework> {
        let is_in = |file: &str, function: &str| {
            frame.filename.contains(file) && (function.is_empty() || *frame.name == *function)
        };
        let found = CODE.iter().find(|(file, function, _)| is_in(file, function));
        let is_fully_shard = FULLY_SHARD.iter().any(|folder| is_in(folder, ""));
        found.map(|(_, _, framework)| *framework).or(is_fully_shard.then_some(Fsdp2))
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
        framework: TransformersInTrainer,
        rules: CHECKPOINT,
        text: "Trainer: TrainingArguments(gradient_checkpointing=True)",
        code: &[
            "# transformers 5.24 and newer also call it activation_checkpointing",
            "args = TrainingArguments(..., gradient_checkpointing=True)",
        ],
    },
    Setting {
        framework: Transformers,
        rules: CHECKPOINT,
        text: "transformers: model.gradient_checkpointing_enable()",
        code: &[
            "# transformers 5.24 and newer also call it activation_checkpointing_enable()",
            "model.gradient_checkpointing_enable()",
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
    Setting {
        framework: TorchtitanOptions,
        rules: CHECKPOINT,
        text: "torchtitan: --activation_checkpoint.mode=full",
        code: &[
            "# an option of torchtitan, or in its TOML file:",
            "[activation_checkpoint]",
            r#"mode = "full"  # "selective" keeps some of the activations, and computes less twice"#,
        ],
    },
    Setting {
        framework: TorchtitanOptions,
        rules: &[RuleId::SmallerBatches, RuleId::MoreMicroBatches, RuleId::HalfTheBatch],
        text: "torchtitan: half of --training.local_batch_size, with the same --training.global_batch_size",
        code: &[
            "[training]",
            "local_batch_size = 4    # half of it",
            "global_batch_size = 64  # as before: the product of local_batch_size and the data-parallel degree",
        ],
    },
    Setting {
        framework: TorchtitanConfig,
        rules: CHECKPOINT,
        text: "torchtitan: activation_checkpoint=FullAC.Config()",
        code: &[
            "from torchtitan.distributed.activation_checkpoint import FullAC",
            "# in the configuration; SelectiveAC keeps some of the activations, and computes less twice",
            "Trainer.Config(..., activation_checkpoint=FullAC.Config())",
        ],
    },
    Setting {
        framework: TorchtitanConfig,
        rules: &[RuleId::SmallerBatches, RuleId::MoreMicroBatches, RuleId::HalfTheBatch],
        text: "torchtitan: half of training.local_batch_size, with the same training.global_batch_size",
        code: &[
            "# half of local_batch_size; global_batch_size stays (local_batch_size times the data-parallel degree)",
            "training=TrainingConfig(..., local_batch_size=4, global_batch_size=64)",
        ],
    },
    Setting {
        framework: Fsdp2,
        rules: CHECKPOINT,
        text: "FSDP2: checkpoint the modules before fully_shard()",
        code: &[
            "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper",
            "# after the model is built, before fully_shard(): {layers}",
            "is_one = lambda m: type(m).__name__ in {{classes}}",
            "checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=is_one)",
        ],
    },
    Setting {
        framework: Fsdp2,
        rules: &[RuleId::Autocast],
        text: "FSDP2: fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
        code: &[
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            "fully_shard(module, mp_policy=policy)  # each module that is sharded, and the model",
        ],
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
        let titan = |file: &str| of(&format!("/x/site-packages/torchtitan/{file}.py"), "forward_backward_step");
        assert_eq!((titan("train"), titan("trainer")), (Some(TorchtitanOptions), Some(TorchtitanConfig)));
        let fsdp = |folder: &str| of(&format!("/x/site-packages/torch/distributed/fsdp/{folder}.py"), "unshard");
        assert_eq!((fsdp("_fully_shard/_fsdp_param_group"), fsdp("_flat_param")), (Some(Fsdp2), None));
        let composable = "/x/torch/distributed/_composable/fsdp/_fsdp_param_group.py";
        assert_eq!(of(composable, "unshard"), Some(Fsdp2), "PyTorch 2.4 and 2.5");
    }
}
