//! Identifies the optimizer of a frame, and the state that it keeps per parameter.

use memtrace_trace::file::Frame;

/// Facts about an optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptimizerRule {
    /// The file name without extension, in `torch/optim/` or `bitsandbytes/optim/`.
    file: &'static str,
    /// The optimizer's name in reports.
    pub name: &'static str,
    /// The state tensors, in the plural, and their number per parameter; `None` if the state depends on the optimizer's
    /// options.
    pub state_per_parameter: Option<(&'static str, u32)>,
    /// The copies of all parameters that a step makes at once with `foreach=True`; `None` if they depend on the
    /// optimizer's options or are unknown. Adam's are the square roots of its second moments.
    pub foreach_temporaries: Option<u32>,
}

const fn rule(
    file: &'static str,
    name: &'static str,
    state_per_parameter: Option<(&'static str, u32)>,
) -> OptimizerRule {
    OptimizerRule { file, name, state_per_parameter, foreach_temporaries: None }
}

const fn adam(file: &'static str, name: &'static str) -> OptimizerRule {
    OptimizerRule { foreach_temporaries: Some(1), ..rule(file, name, Some(("moments", 2))) }
}

static OPTIMIZERS: &[OptimizerRule] = &[
    adam("adam", "Adam"),
    adam("adamw", "AdamW"),
    rule("nadam", "NAdam", Some(("moments", 2))),
    rule("radam", "RAdam", Some(("moments", 2))),
    rule("adamax", "Adamax", Some(("moments", 2))),
    rule("sgd", "SGD", Some(("momentum buffers", 1))),
    rule("rmsprop", "RMSprop", Some(("square averages", 1))),
    rule("adagrad", "Adagrad", Some(("sums of squares", 1))),
    rule("adadelta", "Adadelta", Some(("accumulators", 2))),
    rule("rprop", "Rprop", Some(("buffers", 2))),
    rule("asgd", "ASGD", Some(("averages", 1))),
    rule("lion", "Lion", Some(("momentum buffers", 1))),
    rule("lbfgs", "LBFGS", None),
    rule("_adafactor", "Adafactor", None),
    rule("_muon", "Muon", Some(("momentum buffers", 1))),
];

/// Classes that run another class's code from PyTorch 2.7 on: their own file has no step.
const SUBCLASSES: [(&str, &str); 1] = [("AdamW", "Adam")];

/// The start and the end of the name of the range that PyTorch marks around an optimizer's step.
const STEP_RANGE: (&str, &str) = ("Optimizer.step#", ".step");

/// The optimizer's class in the name of a range: `AdamW` in `Optimizer.step#AdamW.step`.
pub fn optimizer_class(range: &str) -> Option<&str> {
    range.strip_prefix(STEP_RANGE.0)?.strip_suffix(STEP_RANGE.1).filter(|class| !class.is_empty())
}

impl OptimizerRule {
    /// The name of the class whose step ran this code, of the classes whose steps PyTorch marked. Without marks, or if
    /// several classes share the code, all that it can be: `Adam or AdamW`.
    pub fn class_name(&self, classes: &[Box<str>]) -> String {
        let is_subclass = |class: &str| SUBCLASSES.contains(&(class, self.name));
        let has_code = |class: &str| OPTIMIZERS.iter().any(|rule| rule.name == class);
        let mut can_be: Vec<&str> = classes.iter().map(|class| &**class).collect();
        can_be.retain(|class| *class == self.name || is_subclass(class) || !has_code(class));
        if can_be.is_empty() {
            can_be = std::iter::once(self.name)
                .chain(SUBCLASSES.iter().filter(|(_, base)| *base == self.name).map(|(class, _)| *class))
                .collect();
        }
        can_be.sort_unstable();
        can_be.dedup();
        can_be.join(" or ")
    }
}

/// The optimizer whose code this frame is.
pub fn optimizer_of(frame: &Frame) -> Option<&'static OptimizerRule> {
    if frame.native {
        return None;
    }
    let (folder, file) = frame.filename.rsplit_once('/')?;
    if !folder.ends_with("/optim") && !folder.ends_with("optim/adam") && folder != "torch/optim" {
        return None;
    }
    let stem = file.strip_suffix(".py")?;
    OPTIMIZERS.iter().find(|rule| rule.file == stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optimizer_has_the_name_of_its_class() {
        let adam = OPTIMIZERS.iter().find(|rule| rule.name == "Adam").unwrap();
        let sgd = OPTIMIZERS.iter().find(|rule| rule.name == "SGD").unwrap();
        let name = |rule: &OptimizerRule, classes: &[&str]| {
            rule.class_name(&classes.iter().map(|class| Box::from(*class)).collect::<Vec<_>>())
        };
        assert_eq!(name(adam, &["AdamW"]), "AdamW");
        assert_eq!(name(adam, &["SGD", "Adam"]), "Adam");
        assert_eq!(name(adam, &["Adam", "AdamW"]), "Adam or AdamW");
        assert_eq!(name(adam, &[]), "Adam or AdamW");
        assert_eq!(name(adam, &["MyAdam", "SGD"]), "MyAdam");
        assert_eq!((name(sgd, &["SGD", "AdamW"]), name(sgd, &[])), ("SGD".into(), "SGD".into()));
        assert_eq!(optimizer_class("Optimizer.step#AdamW.step"), Some("AdamW"));
        assert_eq!(optimizer_class("Optimizer.zero_grad#AdamW.zero_grad"), None);
    }
}
