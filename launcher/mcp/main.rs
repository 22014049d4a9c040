//! The binary `memtrace-mcp`: a Model Context Protocol server on stdin and stdout. `memtrace mcp` executes it.
//!
//! Its modules, each using those before it:
//! - `tool_error`: errors that the agent reads, with help.
//! - `answer`: answers of bounded size that report what they leave out.
//! - `summary`: the part of `memtrace report --json` and its relatives that answers use.
//! - `command`: runs the `memtrace` binary.
//! - `tools`: one file a tool.
//! - `server`: the protocol.
//!
//! Runs are read only through the `memtrace` binary. It analyzes them in a sandboxed worker with bounded memory, so a
//! malicious or huge run cannot end the server.

mod answer;
mod command;
mod server;
mod summary;
mod tool_error;
mod tools;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rmcp::ServiceExt;
use rmcp::transport::io::stdio_pipes;
use tokio::signal::unix::{SignalKind, signal};

use crate::command::Memtrace;
use crate::server::{Input, Server};

/// How long a run that is ended with the server may take to write its trace.
const END_OF_RUNS: Duration = Duration::from_secs(20);

/// Serve the Model Context Protocol on stdin and stdout
///
/// `memtrace mcp` starts this program. It is not meant to be called by hand.
#[derive(Parser, Debug)]
#[command(name = "memtrace-mcp", version)]
struct Options {
    /// Offer a tool that runs commands
    #[arg(long)]
    allow_run: bool,
    /// The memtrace binary [default: the one beside this program, or else the one on PATH]
    #[arg(long, value_name = "FILE")]
    memtrace: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    // One thread: calls wait for processes, and no call computes for long.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return fail(&format!("cannot start the server: {e}")),
    };
    let memtrace = Memtrace::new(options.memtrace.unwrap_or_else(beside_this_program));
    let result = runtime.block_on(serve(memtrace, options.allow_run));
    // A read of stdin that is still waiting must not keep the process.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => fail(&text),
    }
}

/// Serves one client until it closes stdin.
async fn serve(memtrace: Memtrace, allow_run: bool) -> Result<(), String> {
    let server = Server::new(memtrace, allow_run);
    let running = server.running();
    let (input, output) = stdio_pipes();
    let service = match server.serve((Input::new(input, running.clone()), output)).await {
        Ok(service) => service,
        // The client left before it said anything.
        Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(e) => return Err(format!("cannot begin a session: {e}")),
    };
    let mut terminated = signal(SignalKind::terminate()).map_err(|e| format!("cannot wait for signals: {e}"))?;
    let result = tokio::select! {
        result = service.waiting() => result.map(|_| ()),
        // Clients send it to servers that do not end at once.
        _ = terminated.recv() => Ok(()),
    };
    // Nobody reads the answers any more. What still runs is ended, and writes its trace.
    running.end(END_OF_RUNS).await;
    result.map_err(|e| format!("the session ended: {e}"))
}

/// The `memtrace` binary that was installed with this program, or else the name to search for on PATH.
fn beside_this_program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|program| program.with_file_name("memtrace"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "memtrace".into())
}

/// Prints an error on stderr. stdout belongs to the protocol.
fn fail(text: &str) -> ExitCode {
    eprintln!("error: {text}");
    ExitCode::from(2)
}
