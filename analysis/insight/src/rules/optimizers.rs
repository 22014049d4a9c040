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
}

const fn rule(
    file: &'static str,
    name: &'static str,
    state_per_parameter: Option<(&'static str, u32)>,
) -> OptimizerRule {
    OptimizerRule { file, name, state_per_parameter }
}

static OPTIMIZERS: &[OptimizerRule] = &[
    rule("adam", "Adam", Some(("moments", 2))),
    rule("adamw", "AdamW", Some(("moments", 2))),
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
