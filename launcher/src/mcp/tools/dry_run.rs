//! The tool `dry_run`: records a command over a simulated GPU. Only with `--allow-run`, because the command is
//! executed.

use rmcp::RoleServer;
use rmcp::model::CallToolResult;
use rmcp::service::RequestContext;
use schemars::JsonSchema;
use serde::Deserialize;

use super::arguments::{CommandLine, NewRunFolder, TimeoutSeconds};
use super::run::{Request, Running, record};
use crate::mcp::command::Memtrace;
use crate::mcp::tool_error::ToolError;

#[derive(Deserialize, JsonSchema, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arguments {
    command: CommandLine,
    /// The GPU, for example "a100-40gb". `memtrace dry-run --list-gpus` has all names. Default: "h100-sxm".
    gpu: Option<String>,
    /// The memory of each GPU instead of the model's, for example "24GiB".
    memory: Option<String>,
    /// The number of GPUs. Default: 1.
    gpus: Option<u32>,
    timeout_seconds: Option<TimeoutSeconds>,
    folder: Option<NewRunFolder>,
}

/// Answers a call.
pub(crate) async fn call(
    memtrace: &Memtrace,
    running: &Running,
    arguments: Arguments,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ToolError> {
    let Arguments { command, gpu, memory, gpus, timeout_seconds, folder } = arguments;
    let options = [("--gpu", gpu), ("--memory", memory), ("--gpus", gpus.map(|count| count.to_string()))];
    // One word: a value that begins with a hyphen is no option.
    let options = options.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    let recorder = std::iter::once("dry-run".to_owned()).chain(options).collect();
    record(memtrace, running, Request { recorder, command, timeout_seconds, folder }, context).await
}
