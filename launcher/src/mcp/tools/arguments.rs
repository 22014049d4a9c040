//! Arguments that several tools have. Their comments are the descriptions in the schemas of the tools.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;

/// A run folder, a .mtr file or a PyTorch memory snapshot (.pickle, .pkl, .json, each also .gz).
#[derive(Deserialize, JsonSchema, Debug)]
#[serde(transparent)]
#[schemars(inline)]
pub(super) struct RunPath(pub(super) PathBuf);

/// The command and its arguments, for example ["python", "train.py"]. No shell interprets them.
#[derive(Deserialize, JsonSchema, Debug)]
#[serde(transparent)]
#[schemars(inline)]
pub(super) struct CommandLine(pub(super) Vec<String>);

/// The time limit in seconds. Default: 600. Then the command gets SIGTERM, and the run up to there is recorded. No
/// process of the command outlives it.
#[derive(Deserialize, JsonSchema, Debug)]
#[serde(transparent)]
#[schemars(inline)]
pub(super) struct TimeoutSeconds(pub(super) u64);

/// The run folder, below the working folder of the server. It must be new or empty. Default: named after the program
/// and the time.
#[derive(Deserialize, JsonSchema, Debug)]
#[serde(transparent)]
#[schemars(inline)]
pub(super) struct NewRunFolder(pub(super) PathBuf);
