//! `memtrace mcp`: executes the server of the Model Context Protocol.
//!
//! The server is a program of its own (`launcher/mcp`), so that only those who want it build its runtime.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::cli::Mcp;
use crate::message::WithHelp;

/// The name of the server's program.
const SERVER: &str = "memtrace-mcp";

/// Replaces this process by the server. Returns only if that fails.
pub(crate) fn mcp(options: &Mcp) -> anyhow::Result<()> {
    let own = std::env::current_exe().ok();
    let beside = own.as_ref().map(|own| own.with_file_name(SERVER)).filter(|path| path.is_file());
    let mut server = Command::new(beside.unwrap_or_else(|| PathBuf::from(SERVER)));
    if options.allow_run {
        server.arg("--allow-run");
    }
    if let Some(own) = own {
        server.arg("--memtrace").arg(own);
    }
    let error = server.exec();
    let help = "install it beside memtrace: cargo install --path launcher --features mcp";
    let text = format!("cannot execute {}", server.get_program().to_string_lossy());
    match error.kind() {
        io::ErrorKind::NotFound => Err(WithHelp::new(format!("{text}: it is not installed"), help).into()),
        _ => Err(error).with_context(|| WithHelp::new(text, help)),
    }
}
