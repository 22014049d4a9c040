//! Signs of an evaluation: the names of functions, and modules that `model.eval()` changes.

use memtrace_trace::file::Frame;

/// Words that name an evaluation.
const EVALUATION: &[&str] =
    &["eval", "evaluate", "evaluation", "evaluator", "val", "valid", "validate", "validation", "test", "testing"];

/// Words that name a computation without training, whatever it is for.
const INFERENCE: &[&str] = &["infer", "inference", "predict", "prediction", "predictions"];

/// Words that name the generation of tokens.
const GENERATION: &[&str] = &["generate", "generates", "generation", "generator"];

/// Words that name the collection of experience for reinforcement learning.
const ROLLOUT: &[&str] = &[
    "rollout",
    "rollouts",
    "trajectory",
    "trajectories",
    "experience",
    "experiences",
    "episode",
    "episodes",
    "explore",
    "exploration",
];

/// Losses of `torch.nn.functional`. A program computes one without gradients in an evaluation.
const LOSSES: &[&str] = &[
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
];

/// Words that name training.
const TRAINING: &[&str] = &["train", "training", "trainer", "fit", "finetune", "finetuning", "pretrain", "pretraining"];

/// Parts of the class names of modules that allocate less after `model.eval()`: dropout allocates nothing, batch
/// normalization keeps no statistics of the batch.
const CHANGED_BY_EVAL: &[&str] = &["Dropout", "DropPath", "BatchNorm"];

/// Whether a module of this class allocates less after `model.eval()`.
pub fn is_changed_by_eval(class: &str) -> bool {
    CHANGED_BY_EVAL.iter().any(|part| class.contains(part))
}

/// The use of forward passes that no backward pass follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardOnlyUse {
    /// An evaluation.
    Evaluation,
    /// The generation of tokens.
    Generation,
    /// The collection of experience for reinforcement learning.
    Rollout,
}

/// Whether pytest calls a function of this file. Such functions are named after what they test.
fn is_of_pytest(file: &str, function: &str) -> bool {
    let file = file.rsplit('/').next().unwrap_or(file);
    function.starts_with("test_") && (file.starts_with("test_") || file.ends_with("_test.py"))
}

/// Whether a function of this file is named after evaluation or inference.
pub fn names_evaluation(file: &str, function: &str) -> bool {
    !is_of_pytest(file, function) && (has_word(function, EVALUATION) || has_word(function, INFERENCE))
}

/// The use of a function of this file, by its name. Rollouts and generation are inference, too, so this says nothing of
/// a function that is named after inference.
pub fn names_forward_only(file: &str, function: &str) -> Option<ForwardOnlyUse> {
    let all = [
        (ForwardOnlyUse::Evaluation, EVALUATION),
        (ForwardOnlyUse::Rollout, ROLLOUT),
        (ForwardOnlyUse::Generation, GENERATION),
    ];
    let found = all.into_iter().find(|(_, words)| has_word(function, words));
    found.map(|(named, _)| named).filter(|_| !is_of_pytest(file, function))
}

/// Whether the frame is a dropout of `torch.nn.functional`. It allocates in training mode only.
pub fn is_dropout(frame: &Frame) -> bool {
    !frame.native && frame.filename.ends_with("torch/nn/functional.py") && frame.name.contains("dropout")
}

/// Whether the frame is a loss of `torch.nn.functional`.
pub fn is_loss(frame: &Frame) -> bool {
    !frame.native && frame.filename.ends_with("torch/nn/functional.py") && LOSSES.contains(&&*frame.name)
}

/// Whether a function is named after training.
pub fn names_training(function: &str) -> bool {
    has_word(function, TRAINING)
}

/// Whether one of these words is in a name such as `run_eval` or `evaluateModel`.
fn has_word(name: &str, of: &[&str]) -> bool {
    let mut words: Vec<String> = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        if !c.is_alphanumeric() || c.is_uppercase() && was_lower {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_alphanumeric()) {
            word.extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words.iter().any(|word| of.contains(&word.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_named_after_evaluation() {
        for name in ["validate", "run_eval", "evaluateModel", "_evaluation_step", "test", "test_epoch", "predict_all"] {
            assert!(names_evaluation("/home/me/train.py", name), "{name}");
        }
        for name in ["train", "fit", "<module>", "retrieval", "evaluator2x", "medieval", "latest", "forward", "value"] {
            assert!(!names_evaluation("train.py", name), "{name}");
        }
        assert!(names_evaluation("train.py", "predict") && names_forward_only("train.py", "predict").is_none());
        assert!(!names_evaluation("/repo/tests/test_model.py", "test_second_stage"));
        assert!(names_evaluation("/repo/tests/test_model.py", "validate"));
    }

    #[test]
    fn functions_named_after_what_they_compute() {
        use ForwardOnlyUse::{Evaluation, Generation, Rollout};
        let of = |name| names_forward_only("/home/me/agent.py", name);
        for name in ["evaluate_policy", "validation_step", "eval_episode", "test_generation"] {
            assert_eq!(of(name), Some(Evaluation), "{name}");
        }
        for name in ["collect_rollouts", "run_episode", "makeExperience", "rollout"] {
            assert_eq!(of(name), Some(Rollout), "{name}");
        }
        for name in ["generate", "generate_text", "_generate_and_score"] {
            assert_eq!(of(name), Some(Generation), "{name}");
        }
        for name in ["forward", "act", "degenerate", "predict", "main", "__call__"] {
            assert_eq!(of(name), None, "{name}");
        }
        assert_eq!(names_forward_only("/repo/tests/test_agent.py", "test_rollout"), None);
    }
}
