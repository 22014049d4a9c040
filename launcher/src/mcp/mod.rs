//! The server of `memtrace mcp`: the Model Context Protocol on stdin and stdout. Only with the feature `mcp`.
//!
//! Its modules, each using those before it. Of the rest of the launcher they use the module `supervisor`, which runs
//! the commands of the tools.
//! - `tool_error`: errors that the agent reads, with help.
//! - `answer`: answers of bounded size that report what they leave out.
//! - `command`: runs the `memtrace` binary.
//! - `tools`: one file a tool.
//! - `server`: the protocol.
//!
//! Runs are read only through the `memtrace` binary, in processes of their own. It analyzes them in a sandboxed worker
//! with bounded memory, so a malicious or huge run cannot end the server.

mod answer;
mod command;
mod server;
mod tool_error;
mod tools;

use std::time::Duration;

use anyhow::{Context, anyhow};
use rmcp::ServiceExt;
use rmcp::transport::io::stdio_pipes;
use tokio::signal::unix::{SignalKind, signal};

use crate::mcp::command::Memtrace;
use crate::mcp::server::{Input, Server};

/// How long a run that is ended with the server may take to write its trace.
const END_OF_RUNS: Duration = Duration::from_secs(20);

/// Serves one client until it closes stdin. `allow_run` offers the tool that runs commands.
pub(crate) fn serve(allow_run: bool) -> anyhow::Result<()> {
    let memtrace = Memtrace::new(std::env::current_exe().context("cannot find the program memtrace")?);
    // One thread: calls wait for processes, and no call computes for long.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the server")?;
    let result = runtime.block_on(serve_client(memtrace, allow_run));
    // A read of stdin that is still waiting must not keep the process.
    runtime.shutdown_background();
    result
}

async fn serve_client(memtrace: Memtrace, allow_run: bool) -> anyhow::Result<()> {
    let server = Server::new(memtrace, allow_run);
    let running = server.running();
    #[expect(clippy::disallowed_methods, reason = "`answer` and `tool_error` make all texts printable")]
    let (input, output) = stdio_pipes();
    let service = match server.serve((Input::new(input, running.clone()), output)).await {
        Ok(service) => service,
        // The client left before it said anything.
        Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(e) => return Err(anyhow!("cannot begin a session: {e}")),
    };
    let mut terminated = signal(SignalKind::terminate()).context("cannot wait for signals")?;
    let result = tokio::select! {
        result = service.waiting() => result.map(|_| ()),
        // Clients send it to servers that do not end at once.
        _ = terminated.recv() => Ok(()),
    };
    // Nobody reads the answers any more. What still runs is ended, and writes its trace.
    running.end(END_OF_RUNS).await;
    result.context("the session ended")
}
