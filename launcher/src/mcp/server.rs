//! The protocol: lists the tools, and answers calls.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use memtrace_analysis::printable;
use rmcp::handler::server::tool::{schema_for_input, schema_for_output};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ErrorData, Implementation, JsonObject, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, ReadBuf};

use crate::mcp::answer::Answer;
use crate::mcp::command::Memtrace;
use crate::mcp::tool_error::{INPUT_SCHEMA, ToolError};
use crate::mcp::tools::{diagnostics, diff, dry_run, lines, out_of_memory, peak, run, runs, summary};

/// The instructions that an agent reads first.
const INSTRUCTIONS: &str = "memtrace records every GPU memory allocation of a program. Start with `runs`, then \
    `summary` of a run. If it ran out of memory, call `out_of_memory`; `diagnostics` has issues with the line and the \
    fix, and changes with the peak after them; `peak` has what filled the memory; `lines` has the memory of each \
    source line; `diff` says what made one peak higher than another. Sizes are in bytes and as text. Places are \
    FILE:LINE. Answers are at most 16 KiB; `left_out` says what is missing and how to get it.";
/// The tools that only `--allow-run` adds, because they execute commands.
const RUN: &str = "run";
const DRY_RUN: &str = "dry_run";

/// A server for one client.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    memtrace: Arc<Memtrace>,
    allow_run: bool,
    running: run::Running,
}

impl Server {
    pub(crate) fn new(memtrace: Memtrace, allow_run: bool) -> Server {
        Server { memtrace: Arc::new(memtrace), allow_run, running: run::Running::new() }
    }

    /// The run in progress.
    pub(crate) fn running(&self) -> run::Running {
        self.running.clone()
    }

    /// Calls a tool. `None` if there is no such tool.
    async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        context: &RequestContext<RoleServer>,
    ) -> Result<Option<CallToolResult>, ToolError> {
        let memtrace = &self.memtrace;
        Ok(Some(match name {
            "runs" => {
                let arguments = parse(arguments)?;
                let result = tokio::task::spawn_blocking(|| runs::call(arguments)).await;
                result.map_err(|e| ToolError::new(format!("the call failed: {e}"), "report this"))??
            }
            "summary" => summary::call(memtrace, parse(arguments)?).await?,
            "peak" => peak::call(memtrace, parse(arguments)?).await?,
            "out_of_memory" => out_of_memory::call(memtrace, parse(arguments)?).await?,
            "diagnostics" => diagnostics::call(memtrace, parse(arguments)?).await?,
            "lines" => lines::call(memtrace, parse(arguments)?).await?,
            "diff" => diff::call(memtrace, parse(arguments)?).await?,
            RUN if self.allow_run => run::call(memtrace, &self.running, parse(arguments)?, context).await?,
            DRY_RUN if self.allow_run => dry_run::call(memtrace, &self.running, parse(arguments)?, context).await?,
            RUN | DRY_RUN => {
                return Err(ToolError::new(
                    "this server only reads runs",
                    "run `memtrace -- COMMAND` or `memtrace dry-run -- COMMAND` in a shell, or start the server with \
                     `memtrace mcp --allow-run`",
                ));
            }
            _ => return Ok(None),
        }))
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.server_info = Implementation::new("memtrace", env!("CARGO_PKG_VERSION"));
        info.with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools(self.allow_run)?))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let name = request.name.to_string();
        let result = tokio::select! {
            result = self.call(&name, request.arguments.unwrap_or_default(), &context) => result,
            // Nobody reads these answers. The processes of the call end, because it is dropped.
            () = context.ct.cancelled() => Err(ToolError::new("the call was cancelled", "call again")),
            () = self.running.over() => Err(ToolError::new("the client left", "call again")),
        };
        match result {
            Ok(Some(result)) => Ok(result.into()),
            Ok(None) => {
                Err(ErrorData::invalid_params(printable::output_line(&format!("there is no tool {name}")), None))
            }
            Err(error) => Ok(error.into_result().into()),
        }
    }
}

/// The arguments of a call.
fn parse<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, ToolError> {
    serde_json::from_value(Value::Object(arguments))
        .map_err(|e| ToolError::new(format!("the arguments are invalid: {e}"), INPUT_SCHEMA))
}

/// The tools of a server.
fn tools(allow_run: bool) -> Result<Vec<Tool>, ErrorData> {
    let mut tools = vec![
        reading::<runs::Arguments, runs::Content>(
            "runs",
            "List recorded runs",
            "List the run folders in a folder, newest first, with command, outcome and peak.",
        )?,
        reading::<summary::Arguments, summary::Content>(
            "summary",
            "Summarize a run",
            "How a run ended, the peak of each process and device, a typical step, and the number of issues.",
        )?,
        reading::<peak::Arguments, peak::Content>(
            "peak",
            "Explain the peak",
            "What filled the GPU memory at the peak: by category, phase and nn.Module, and the largest allocations \
             with FILE:LINE and tensor name.",
        )?,
        reading::<out_of_memory::Arguments, out_of_memory::Content>(
            "out_of_memory",
            "Explain an out-of-memory error",
            "Why a request for GPU memory failed: the request with its call stack, what was in use, free memory that \
             was not usable, what the step still needed, and whether other allocator settings would have helped.",
        )?,
        reading::<diagnostics::Arguments, diagnostics::Content>(
            "diagnostics",
            "List issues and suggestions",
            "The issues of a run (leaks, retained graphs, fragmentation, ...) with evidence, FILE:LINE and fix, and \
             changes that lower the peak with the computed peak after them.",
        )?,
        reading::<lines::Arguments, lines::Content>(
            "lines",
            "Memory of source lines",
            "The GPU memory that each source line allocated and freed, as a line profiler shows it.",
        )?,
        reading::<diff::Arguments, diff::Content>(
            "diff",
            "Compare two peaks",
            "Why the peak of run B differs from that of run A, by category, phase, source line and nn.Module; or two \
             steps of one run.",
        )?,
    ];
    if allow_run {
        let annotations = ToolAnnotations::new().read_only(false).destructive(true).idempotent(false).open_world(true);
        let executing = [
            tool::<run::Arguments, run::Content>(
                RUN,
                "Record a command",
                "Run a command under memtrace and record its GPU memory. Returns the run, the exit status and the end \
                 of the output.",
            )?,
            tool::<dry_run::Arguments, run::Content>(
                DRY_RUN,
                "Record a command over a simulated GPU",
                "Run a command of PyTorch over a simulated GPU, on a machine without one, to know whether it fits: its \
                 allocations are those of a GPU, and no kernel computes. Returns what `run` returns.",
            )?,
        ];
        tools.extend(executing.map(|tool| tool.with_annotations(annotations.clone())));
    }
    Ok(tools)
}

/// A tool that changes nothing.
fn reading<A: JsonSchema + 'static, C: JsonSchema + 'static>(
    name: &'static str,
    title: &str,
    description: &'static str,
) -> Result<Tool, ErrorData> {
    let annotations = ToolAnnotations::new().read_only(true).idempotent(true).open_world(false);
    Ok(tool::<A, C>(name, title, description)?.with_annotations(annotations))
}

fn tool<A: JsonSchema + 'static, C: JsonSchema + 'static>(
    name: &'static str,
    title: &str,
    description: &'static str,
) -> Result<Tool, ErrorData> {
    let input = schema_for_input::<A>().map_err(|e| ErrorData::internal_error(e, None))?;
    let output = schema_for_output::<Answer<C>>();
    Ok(Tool::new(name, description, input).with_title(title).with_raw_output_schema(output))
}

/// The input of a server. Its end is the end of the client, which the run in progress must not outlive.
#[derive(Debug)]
pub(crate) struct Input<R> {
    input: R,
    running: run::Running,
}

impl<R> Input<R> {
    pub(crate) fn new(input: R, running: run::Running) -> Input<R> {
        Input { input, running }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Input<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let (before, space) = (to.filled().len(), to.remaining());
        let result = Pin::new(&mut self.input).poll_read(context, to);
        let is_end = match &result {
            Poll::Ready(Ok(())) => to.filled().len() == before && space > 0,
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        };
        if is_end {
            self.running.client_left();
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_servers_run_commands() {
        let names = |allow_run| tools(allow_run).unwrap().into_iter().map(|tool| tool.name).collect::<Vec<_>>();
        assert_eq!(names(true), [names(false), vec![RUN.into(), DRY_RUN.into()]].concat());
        let reading = tools(false).unwrap();
        assert!(reading.iter().all(|tool| tool.annotations.as_ref().unwrap().read_only_hint == Some(true)));
    }
}
