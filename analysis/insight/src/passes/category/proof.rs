//! Facts that are proven about a block at its allocation: by its tensor name, by the frames of its stack, by its pool
//! and by its size. A proof holds whatever the block's lifetime is.

use memtrace_trace::definition::TensorKind;

use crate::rules::CategoryRule;

/// A fact that a name, a stack, a size or a pool proves about a block, whatever its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Proof {
    /// Nothing.
    #[default]
    None,
    /// The block has a tensor name of this kind.
    Named(TensorKind),
    /// The block is a buffer, and its name is one that people give to a key/value cache.
    NamedCache,
    /// A category rule matches the frames that allocated the block.
    FrameRule(&'static CategoryRule),
    /// A phase rule for building, moving or filling models matches.
    ModelLoaded,
    /// The phase rule for moving a module matches.
    ModuleMoved,
    /// A phase rule for the optimizer's state initialization matches.
    OptimizerState,
    /// An optimizer's step allocated the block.
    OptimizerStep,
    /// Work on gradients outside an optimizer's step allocated the block.
    GradientWork,
    /// The block is in this private pool.
    PrivatePool(u16),
    /// PyTorch's functions for workspaces of cuBLAS allocated the block.
    CublasWorkspace,
    /// The autograd node `AccumulateGrad`, which passes gradients to parameters, was running.
    AccumulatesGradient,
    /// The block is as large as a cuBLAS workspace, and its stack multiplies matrices. It is a workspace if it is never
    /// freed and the oldest such block of its thread and stream.
    WorkspaceSized,
    /// The same, but nothing shows whether its stack multiplies matrices. It must outlive its step too.
    MaybeWorkspace,
    /// The block is as large as a cuBLASLt workspace, and its stack multiplies matrices. It is one under the same
    /// conditions, beside a cuBLAS workspace.
    LtWorkspaceSized,
    /// The same, but nothing shows whether its stack multiplies matrices. It must outlive its step too.
    MaybeLtWorkspace,
    /// The block is as large as a parameter. It is a gradient if it comes from a backward pass that was cut short.
    ParameterSized,
    /// The block is half as large as a parameter of the module that is called, its stack casts tensors, and that
    /// parameter has no cast yet. It is a weight that autocast casts.
    WeightCast,
}

impl Proof {
    /// Whether the block has the size of a workspace, and nothing speaks against one.
    pub(crate) fn may_be_workspace(self) -> bool {
        matches!(self, Proof::WorkspaceSized | Proof::LtWorkspaceSized) || self.is_unsure_workspace()
    }

    /// Whether nothing shows that the block's stack multiplies matrices.
    pub(super) fn is_unsure_workspace(self) -> bool {
        matches!(self, Proof::MaybeWorkspace | Proof::MaybeLtWorkspace)
    }

    /// Whether the name of a tensor decides which module the block belongs to.
    pub fn is_named(self) -> bool {
        matches!(self, Proof::Named(_) | Proof::NamedCache)
    }

    /// Whether nothing is proven about a block that is no workspace.
    pub(super) fn is_open(self) -> bool {
        self == Proof::None || self.may_be_workspace()
    }
}
