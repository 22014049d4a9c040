//! The binary `memtrace`: runs a program, records what fills its GPU memory, and reports.
//!
//! `memtrace [run] -- COMMAND` goes through these modules in order:
//! - `preflight`: checks that the command can be recorded.
//! - `folder`: creates the run folder.
//! - `library`: provides the preloaded library.
//! - `drain`: moves the processes' records into trace files, in the background.
//! - `child` and `signals`: start the command and pass signals on.
//! - `manifest`: writes `run.json`.
//! - `closing`: runs the analysis and prints the end-of-run summary.

mod child;
mod cli;
mod closing;
mod commands;
mod confined;
mod doctor;
mod drain;
mod epoll;
mod folder;
mod gpu;
mod host;
mod inherited;
mod library;
mod manifest;
mod preflight;
mod proc;
mod session;
mod signals;
mod unseen;
mod witness;

use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match cli::Cli::read(std::env::args_os()) {
        Ok(cli) => cli,
        Err(bad) => return ExitCode::from(bad.print()),
    };
    ExitCode::from(match cli.command {
        cli::Command::Run(run) => commands::run::run(&run),
        cli::Command::Report(options) => commands::read(|| commands::report::report(&options)),
        cli::Command::Export(options) => commands::read(|| commands::export::export(&options)),
        cli::Command::Lines(options) => commands::read(|| commands::lines::lines(&options)),
        cli::Command::Diff(options) => commands::read(|| commands::diff::diff(&options)),
        cli::Command::Check(options) => commands::decide(|| commands::check::check(&options)),
        cli::Command::Doctor(options) => commands::doctor::doctor(&options),
        cli::Command::Man(options) => commands::answer(commands::manual::man(&options)),
        cli::Command::Completions(options) => commands::answer(commands::manual::completions(&options)),
    })
}

/// Prints one line on stderr. A closed stderr is not an error.
fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "memtrace: {}", memtrace_analysis::printable::line(line));
}
