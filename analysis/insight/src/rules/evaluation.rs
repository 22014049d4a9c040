//! What tells an evaluation from training: the names of functions, and modules that `model.eval()` changes.

/// Words that name what is no training.
const EVALUATION: &[&str] = &[
    "eval",
    "evaluate",
    "evaluation",
    "evaluator",
    "val",
    "valid",
    "validate",
    "validation",
    "test",
    "testing",
    "infer",
    "inference",
    "predict",
    "prediction",
    "predictions",
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

/// Whether a function of this file is named after evaluation.
pub fn names_evaluation(file: &str, function: &str) -> bool {
    // pytest's functions are named after what they test.
    let file = file.rsplit('/').next().unwrap_or(file);
    let is_of_pytest = function.starts_with("test_") && (file.starts_with("test_") || file.ends_with("_test.py"));
    !is_of_pytest && has_word(function, EVALUATION)
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
        assert!(!names_evaluation("/repo/tests/test_model.py", "test_second_stage"));
        assert!(names_evaluation("/repo/tests/test_model.py", "validate"));
    }
}
