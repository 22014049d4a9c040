//! The effect of `torch.autocast("cuda", dtype=torch.bfloat16)` on the operations of PyTorch, by the autograd nodes
//! that they make. Source: `aten/src/ATen/autocast_mode.h` (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
//! `AT_FORALL_FP32_SET_OPT_DTYPE`) and <https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference>.

use memtrace_trace::file::Frame;

/// The type of a floating-point operation under autocast.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AutocastType {
    /// The widest type of its inputs, as without autocast.
    Widest,
    /// Reads weights, which autocast does not cast.
    Parameters,
    /// bfloat16.
    Lower,
    /// float32, and the inputs are saved for the backward pass in float32.
    Float32,
    /// float32, and the inputs are not saved.
    Float32WithoutInputs,
    /// Not known.
    Unknown,
}

use AutocastType::{Float32, Float32WithoutInputs, Lower, Parameters, Unknown, Widest};

/// Operations that run in bfloat16.
const LOWER: &[&str] = &[
    "Addbmm",
    "Addmm",
    "Addmv",
    "Addr",
    "Baddbmm",
    "Bmm",
    "Convolution",
    "Linear",
    "Mm",
    "Mv",
    "PreluKernel",
    "ScaledDotProductCudnnAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductFlashAttention",
];

/// Operations that run in float32 and save their inputs.
const FLOAT32: &[&str] = &[
    "Acos",
    "Asin",
    "BinaryCrossEntropyWithLogits",
    "Cdist",
    "Cosh",
    "Dist",
    "HuberLoss",
    "KlDiv",
    "Log",
    "Log10",
    "Log1P",
    "Log2",
    "Logsumexp",
    "MseLoss",
    "MultiMarginLoss",
    "MultilabelMarginLoss",
    "NativeGroupNorm",
    "NativeLayerNorm",
    "NllLoss",
    "NllLoss2D",
    "Norm",
    "LinalgVectorNorm",
    "Pow",
    "Renorm",
    "Sinh",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "Softplus",
];

/// Operations that run in float32 and save nothing, or only their result.
const FLOAT32_WITHOUT_INPUTS: &[&str] = &[
    "Cumprod",
    "Cumsum",
    "Erfinv",
    "Exp",
    "Expm1",
    "LogSoftmax",
    "Prod",
    "Reciprocal",
    "Rsqrt",
    "Softmax",
    "Sum",
    "Tan",
    "UpsampleBicubic2D",
    "UpsampleBicubic2DAa",
    "UpsampleBilinear2D",
    "UpsampleBilinear2DAa",
    "UpsampleLinear1D",
    "UpsampleNearest1D",
    "UpsampleNearest2D",
    "UpsampleNearest3D",
    "UpsampleNearestExact1D",
    "UpsampleNearestExact2D",
    "UpsampleNearestExact3D",
    "UpsampleTrilinear3D",
];

/// Operations whose result has the widest type of the inputs.
const WIDEST: &[&str] = &[
    "Abs",
    "AdaptiveAvgPool2D",
    "AdaptiveAvgPool3D",
    "AdaptiveMaxPool2D",
    "AdaptiveMaxPool3D",
    "Add",
    "Addcdiv",
    "Addcmul",
    "Alias",
    "Amax",
    "Amin",
    "AsStrided",
    "AvgPool2D",
    "AvgPool3D",
    "Cat",
    "Celu",
    "Clamp",
    "ClampMax",
    "ClampMin",
    "Clone",
    "Col2Im",
    "ConstantPadNd",
    "Cos",
    "CudnnBatchNorm",
    "Diagonal",
    "Div",
    "Elu",
    "Erf",
    "Expand",
    "Flip",
    "FusedDropout",
    "FusedRmsNorm",
    "Gather",
    "Gelu",
    "Glu",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "Im2Col",
    "Index",
    "IndexPut",
    "IndexSelect",
    "LeakyRelu",
    "Lerp",
    "LogSigmoid",
    "MaskedFill",
    "Max",
    "MaxPool2DWithIndices",
    "MaxPool3DWithIndices",
    "Maximum",
    "Mean",
    "Min",
    "Minimum",
    "Mish",
    "Mul",
    "NativeBatchNorm",
    "NativeDropout",
    "Neg",
    "Permute",
    "PixelShuffle",
    "PixelUnshuffle",
    "ReflectionPad1D",
    "ReflectionPad2D",
    "Relu",
    "Repeat",
    "ReplicationPad1D",
    "ReplicationPad2D",
    "ReshapeAlias",
    "Roll",
    "Rsub",
    "Select",
    "Sigmoid",
    "Silu",
    "Sin",
    "Slice",
    "Split",
    "SplitWithSizes",
    "Sqrt",
    "Squeeze",
    "Stack",
    "Std",
    "StdMean",
    "Sub",
    "T",
    "Tanh",
    "Threshold",
    "Topk",
    "Transpose",
    "Tril",
    "Triu",
    "Unbind",
    "Unfold",
    "UnsafeSplit",
    "UnsafeView",
    "Unsqueeze",
    "Var",
    "VarMean",
    "View",
    "Where",
];

/// Lookups in weights.
const PARAMETERS: &[&str] = &["Embedding", "EmbeddingBag"];

/// The type under autocast of the operation that makes nodes of this type, such as `AddmmBackward0`.
pub fn autocast_type(node: &str) -> AutocastType {
    let operation = operation(node);
    let lists = [
        (LOWER, Lower),
        (FLOAT32, Float32),
        (FLOAT32_WITHOUT_INPUTS, Float32WithoutInputs),
        (WIDEST, Widest),
        (PARAMETERS, Parameters),
    ];
    lists.iter().find(|(list, _)| list.contains(&operation)).map_or(Unknown, |(_, of)| *of)
}

/// The operation that makes nodes of this type: `Addmm` for `AddmmBackward0`. Empty for other nodes.
fn operation(node: &str) -> &str {
    node.trim_end_matches(|c: char| c.is_ascii_digit()).strip_suffix("Backward").unwrap_or("")
}

/// Whether the operation reads several values of any types, and its result has the widest.
pub fn promotes(node: &str) -> bool {
    [
        "Add", "Addcdiv", "Addcmul", "Cat", "Div", "IndexPut", "Lerp", "Maximum", "Minimum", "Mul", "Rsub", "Stack",
        "Sub", "Where",
    ]
    .contains(&operation(node))
}

/// Whether the operation reads several values and saves none of them for its backward pass.
pub fn saves_no_operand(node: &str) -> bool {
    ["Add", "Cat", "Rsub", "Stack", "Sub", "Where"].contains(&operation(node))
}

/// Whether the operation only makes views of its input.
pub fn makes_views(node: &str) -> bool {
    [
        "Alias",
        "AsStrided",
        "Diagonal",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "Unfold",
        "UnsafeSplit",
        "UnsafeView",
        "Unsqueeze",
        "View",
    ]
    .contains(&operation(node))
}

/// Whether the nodes of one function are those of `cross_entropy`, which computes its softmax in the type of the logits
/// and only the loss in float32.
pub fn is_cross_entropy<'a>(nodes: impl Iterator<Item = &'a str>) -> bool {
    let (mut softmax, mut loss) = (false, false);
    for node in nodes {
        softmax |= operation(node) == "LogSoftmax";
        loss |= operation(node).starts_with("NllLoss");
    }
    softmax && loss
}

/// Whether code casts the logits to float32 before it computes the cross-entropy.
pub fn casts_logits(frame: &Frame) -> bool {
    !frame.native && frame.filename.ends_with("/transformers/loss/loss_utils.py")
}

/// Modules whose call makes no node if nothing in it needs gradients.
pub fn autocast_type_of_class(class: &str) -> AutocastType {
    match class {
        "Linear" | "Conv1d" | "Conv2d" | "Conv3d" | "ConvTranspose1d" | "ConvTranspose2d" | "ConvTranspose3d" => Lower,
        "LayerNorm" | "GroupNorm" => Float32,
        "Softmax" | "LogSoftmax" | "Upsample" => Float32WithoutInputs,
        "Embedding" | "EmbeddingBag" => Parameters,
        "LSTM" | "GRU" | "RNN" | "LSTMCell" | "GRUCell" | "RNNCell" => Unknown,
        _ => Widest,
    }
}

/// Operations with results of another type beside the first: `bool` masks, which are a quarter as large, or indices,
/// which are twice as large.
pub fn makes_other_types(node: &str) -> bool {
    ["NativeDropout", "FusedDropout", "MaxPool", "AdaptiveMaxPool", "Topk", "MaskedFill", "Where", "Max", "Min"]
        .iter()
        .any(|operation| node.starts_with(operation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_have_the_types_of_the_documentation() {
        for (node, of) in [
            ("AddmmBackward0", Lower),
            ("ConvolutionBackward0", Lower),
            ("NativeLayerNormBackward0", Float32),
            ("SoftmaxBackward0", Float32WithoutInputs),
            ("UpsampleNearest2DBackward0", Float32WithoutInputs),
            ("EmbeddingBackward0", Parameters),
            ("GeluBackward0", Widest),
            ("CudnnRnnBackward0", Unknown),
            ("CompiledFunctionBackward", Unknown),
            // A cast: not everything is in float32.
            ("ToCopyBackward0", Unknown),
            ("", Unknown),
        ] {
            assert_eq!(autocast_type(node), of, "{node}");
        }
    }
}
