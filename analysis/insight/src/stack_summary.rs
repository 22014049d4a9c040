//! Call stacks in the results of the analysis.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A frame of a call stack, with the field names of PyTorch's snapshots.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FrameSummary {
    /// The name of the function.
    pub name: String,
    /// The path of the source file. For native code without a known source file, the path of the object.
    pub filename: String,
    /// The line number; 0 if it is unknown.
    pub line: u32,
    /// Whether the frame is native code. Absent for Python frames.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub native: bool,
}

/// A call stack.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StackSummary {
    /// The line of the program's own code, and the innermost line if that is in a library, for example
    /// `model.py:88 forward`. Empty if the stack is unknown.
    pub location: String,
    /// The autograd node that was running. Absent outside the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The frames, innermost first. With `node`, these are the frames of the forward call that created the node.
    pub frames: Vec<FrameSummary>,
}
