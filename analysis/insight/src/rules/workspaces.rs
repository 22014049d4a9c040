//! Scratch memory that libraries keep, identified by its size and by the code that allocates it.

use memtrace_trace::file::Frame;

/// PyTorch allocates one workspace per cuBLAS handle and stream and never frees it. PyTorch 2.15 frees it after each
/// call, unless `TORCH_CUBLAS_WORKSPACE_CACHE=1` is set. The sizes are those of
/// aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute capability 9 and 10, else `:4096:2:16:8` as in the cuBLAS
/// manual. The setting `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which deterministic programs use, is 32 MiB too.
const CUBLAS_WORKSPACES: [u64; 2] = [32 << 20, (4096 * 2 + 16 * 8) << 10];

/// The size of the cuBLASLt workspace beside it, as seen with PyTorch 2.11. It is allocated after the cuBLAS workspace
/// of the same thread and stream, and it is kept as long.
const CUBLASLT_WORKSPACE: u64 = 1 << 20;

/// Whether a request is as large as a cuBLASLt workspace. Many other blocks have this size, so more evidence is
/// required.
pub fn is_lt_workspace_size(requested: u64) -> bool {
    requested == CUBLASLT_WORKSPACE
}

/// Whether a request is as large as a cuBLAS workspace. Other blocks can have this size, so more evidence is required.
pub fn is_workspace_size(requested: u64) -> bool {
    CUBLAS_WORKSPACES.contains(&requested)
}

/// Whether code multiplies matrices with cuBLAS. Only such code allocates a cuBLAS workspace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum UsesCublas {
    /// It does.
    Yes,
    /// It does not.
    No,
    /// Any code, such as a line of the program.
    #[default]
    Unknown,
}

/// Functions of `torch/nn/functional.py` that multiply matrices. The others there do not.
const NN_FUNCTIONS: [&str; 6] = [
    "linear",
    "bilinear",
    "multi_head_attention_forward",
    "_in_projection",
    "_in_projection_packed",
    "scaled_dot_product_attention",
];
/// Functions of `torch/functional.py` that multiply matrices. Of the others it is not known.
const FUNCTIONS: [&str; 4] = ["einsum", "tensordot", "cdist", "chain_matmul"];
/// Classes of `torch/nn/modules/` that multiply matrices in a frame of their own. The others there call a function or a
/// library other than cuBLAS.
const MODULES: [&str; 5] =
    ["Linear", "Bilinear", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"];
/// Convolutions multiply matrices where cuDNN cannot serve them or is switched off.
const CONVOLUTIONS: &str = "/conv.py";
/// Autograd nodes of operations that multiply matrices only without another library.
const MAYBE_NODES: [&str; 1] = ["ConvolutionBackward"];
/// Autograd nodes whose backward multiplies matrices, without the number at the end.
const NODES: [&str; 12] = [
    "AddbmmBackward",
    "AddmmBackward",
    "AddmvBackward",
    "BaddbmmBackward",
    "BmmBackward",
    "CdistBackward",
    "DotBackward",
    "EinsumBackward",
    "LinearBackward",
    "MatmulBackward",
    "MmBackward",
    "MvBackward",
];

/// Whether a Python frame that allocates may be waiting for cuBLAS.
pub fn frame_uses_cublas(frame: &Frame) -> UsesCublas {
    let known = |uses| if uses { UsesCublas::Yes } else { UsesCublas::No };
    if frame.filename.ends_with("torch/nn/functional.py") {
        known(NN_FUNCTIONS.contains(&&*frame.name))
    } else if frame.filename.ends_with("torch/functional.py") {
        if FUNCTIONS.contains(&&*frame.name) { UsesCublas::Yes } else { UsesCublas::Unknown }
    } else if frame.filename.contains("torch/nn/modules/") && frame.filename.ends_with(CONVOLUTIONS) {
        UsesCublas::Unknown
    } else if frame.filename.contains("torch/nn/modules/") {
        // Python before 3.11 has no qualified names. Such a frame shows only the file.
        let class = frame.qualname.split('.').next().unwrap_or_default();
        known(MODULES.contains(&class) || frame.filename.ends_with("/linear.py"))
    } else {
        UsesCublas::Unknown
    }
}

/// Whether an autograd node multiplies matrices. A node of PyTorch's own operators ends in a number. A node of an
/// `autograd.Function` can run any code.
pub fn node_uses_cublas(node: &str) -> UsesCublas {
    let operator = node.trim_end_matches(|c: char| c.is_ascii_digit());
    if NODES.contains(&operator) || operator.starts_with("Linalg") {
        UsesCublas::Yes
    } else if MAYBE_NODES.contains(&operator) {
        UsesCublas::Unknown
    } else if operator.len() < node.len() || node == "AccumulateGrad" {
        UsesCublas::No
    } else {
        UsesCublas::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_that_multiplies_matrices_is_recognized() {
        let uses = |file: &str, qualname: &str| {
            let name = qualname.rsplit('.').next().unwrap_or(qualname);
            let filename = format!("/venv/site-packages/{file}").into();
            frame_uses_cublas(&Frame { filename, name: name.into(), qualname: qualname.into(), ..Frame::default() })
        };
        assert_eq!(uses("torch/nn/modules/linear.py", "forward"), UsesCublas::Yes);
        assert_eq!(uses("torch/nn/modules/conv.py", "Conv2d._conv_forward"), UsesCublas::Unknown);
        assert_eq!(uses("torch/nn/modules/batchnorm.py", "BatchNorm2d.forward"), UsesCublas::No);
        assert_eq!(uses("torch/nn/modules/activation.py", "MultiheadAttention.forward"), UsesCublas::Yes);
        assert_eq!(uses("torch/nn/modules/activation.py", "GELU.forward"), UsesCublas::No);
        assert_eq!(uses("torch/nn/functional.py", "batch_norm"), UsesCublas::No);
        assert_eq!(uses("torch/functional.py", "einsum"), UsesCublas::Yes);
        assert_eq!(uses("model.py", "Block.forward"), UsesCublas::Unknown);
        assert_eq!(node_uses_cublas("AddmmBackward0"), UsesCublas::Yes);
        assert_eq!(node_uses_cublas("ConvolutionBackward0"), UsesCublas::Unknown);
        assert_eq!(node_uses_cublas("GeluBackward0"), UsesCublas::No);
        assert_eq!(node_uses_cublas("MyFunctionBackward"), UsesCublas::Unknown);
    }
}
