//! What a block was for, told from where it was allocated and how long it lived.
//!
//! A block's category is settled when it is freed, when its fate is known: what a forward allocates and the backward still
//! finds is an activation; what a backward allocates and the optimizer still finds is a gradient; what an optimizer
//! allocates and the next step still finds is its state. Blocks whose life was cut short (an out-of-memory error
//! unwinding the program, the end of the recording) are judged by where they came from.

use memtrace_trace::ids::{ContextId, StackId};
use serde::Serialize;

use super::phase::{Moment, Phase};

/// What a block was for, by the names of PyTorch's own memory timeline.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters and buffers.
    Parameter,
    /// Gradients of parameters.
    Gradient,
    /// What the optimizer keeps.
    OptimizerState,
    /// What the forward keeps for the backward.
    Activation,
    /// Scratch memory that a library keeps: cuBLAS workspaces.
    Workspace,
    /// Batches.
    Input,
    /// What lives within one phase.
    Temporary,
    /// What no rule knows.
    Unknown,
}

impl Category {
    /// All categories, in the order of a report.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::Workspace,
        Category::Input,
        Category::Temporary,
        Category::Unknown,
    ];

    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer_state",
            Category::Activation => "activation",
            Category::Workspace => "workspace",
            Category::Input => "input",
            Category::Temporary => "temporary",
            Category::Unknown => "unknown",
        }
    }

    /// The name for people, in the plural.
    pub const fn plural(self) -> &'static str {
        match self {
            Category::Parameter => "parameters",
            Category::Gradient => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::Activation => "activations",
            Category::Workspace => "cuBLAS workspaces",
            Category::Input => "inputs",
            Category::Temporary => "temporaries",
            Category::Unknown => "other",
        }
    }
}

/// How a block came to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Birth {
    /// `seq` of its allocation.
    pub seq: u64,
    /// Its (rounded) size.
    pub size: u64,
    /// What was asked for.
    pub requested: u64,
    /// The stack.
    pub stack: StackId,
    /// The autograd node.
    pub context: ContextId,
    /// Where the program was.
    pub at: Moment,
    /// In which phase it was allocated: the program's, but for other threads.
    pub phase: Phase,
    /// Out-of-memory errors before it.
    pub ooms: u32,
    /// What the stack proves.
    pub proof: Proof,
}

/// What a stack proves about a block, whatever becomes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Proof {
    /// Nothing.
    #[default]
    None,
    /// A rule about building, moving or filling models.
    Model,
    /// A rule about an optimizer's making its state.
    State,
    /// The node that hands gradients to parameters.
    AccumulatesGradient,
    /// It is as large as a library's workspace: one, should it outlive its step.
    WorkspaceSized,
    /// It is as large as a parameter: a gradient, should it come from a backward that was cut short.
    ParameterSized,
}

/// The category of a block that ends at `now`. `cut`: something ended the program's course, not the block's.
pub fn categorize(birth: &Birth, now: &Moment, cut: bool) -> Category {
    let same_run = birth.at.run == now.run;
    if birth.proof == Proof::WorkspaceSized && (now.step > birth.at.step || cut && now.optimizers > birth.at.optimizers)
    {
        return Category::Workspace;
    }
    match birth.phase {
        Phase::Data => Category::Input,
        Phase::Load => match birth.proof {
            _ if birth.at.step.is_none() && now.step.is_none() && !cut => Category::Temporary,
            Proof::Model => Category::Parameter,
            _ => Category::Unknown,
        },
        Phase::Forward | Phase::Recompute | Phase::Eval => {
            if same_run && !cut {
                Category::Temporary
            } else {
                Category::Activation
            }
        }
        Phase::Backward => {
            let lived_on = now.optimizers > birth.at.optimizers || now.backwards > birth.at.backwards;
            let over = !matches!(now.phase, Phase::Backward | Phase::Recompute);
            let likely = matches!(birth.proof, Proof::AccumulatesGradient | Proof::ParameterSized);
            if lived_on || cut && (over || likely) { Category::Gradient } else { Category::Temporary }
        }
        Phase::Optimizer => {
            if birth.proof == Proof::State || !same_run {
                Category::OptimizerState
            } else {
                Category::Temporary
            }
        }
        Phase::Other => Category::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment { phase: Phase::Load, step: None, run: 0, backwards: 0, optimizers: 0 };

    fn born(phase: Phase, proof: Proof) -> Birth {
        let at = Moment { phase, ..NOW };
        Birth {
            seq: 1,
            size: 512,
            requested: 512,
            stack: StackId::NONE,
            context: ContextId::NONE,
            at,
            phase,
            ooms: 0,
            proof,
        }
    }

    #[test]
    fn a_fate_makes_a_category() {
        let later = Moment { phase: Phase::Optimizer, step: Some(0), run: 3, backwards: 1, optimizers: 1 };
        let is = |phase, proof, now: Moment, cut| categorize(&born(phase, proof), &now, cut);
        assert_eq!(is(Phase::Forward, Proof::None, later, false), Category::Activation);
        assert_eq!(
            is(Phase::Forward, Proof::None, Moment { phase: Phase::Forward, ..NOW }, false),
            Category::Temporary
        );
        assert_eq!(
            is(Phase::Forward, Proof::None, Moment { phase: Phase::Forward, ..NOW }, true),
            Category::Activation
        );
        assert_eq!(is(Phase::Backward, Proof::None, later, false), Category::Gradient);
        let backward = Moment { phase: Phase::Backward, run: 2, ..NOW };
        assert_eq!(is(Phase::Backward, Proof::None, backward, false), Category::Temporary);
        assert_eq!(is(Phase::Backward, Proof::ParameterSized, backward, true), Category::Gradient);
        assert_eq!(
            is(Phase::Optimizer, Proof::State, Moment { phase: Phase::Optimizer, ..NOW }, true),
            Category::OptimizerState
        );
        assert_eq!(is(Phase::Load, Proof::Model, later, false), Category::Parameter);
        assert_eq!(is(Phase::Load, Proof::Model, NOW, false), Category::Temporary);
        assert_eq!(is(Phase::Load, Proof::None, later, false), Category::Unknown);
    }
}
