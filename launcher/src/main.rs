//! The binary `memtrace`: runs a program, records what fills its GPU memory, and reports.
//!
//! `memtrace [run] -- COMMAND` goes through these modules in order:
//! - `preflight`: checks that the command can be recorded.
//! - `folder`: creates the run folder.
//! - `library`: provides the preloaded library.
//! - `drain`: moves the processes' records into trace files, in the background.
//! - `child` and `signals`: start the command and pass signals on.
//! - `manifest`: writes `run.json`.
//! - `end_summary`: runs the analysis and prints the end-of-run summary.

mod attach;
mod bounded_read;
mod child;
mod clean;
mod cli;
mod commands;
mod condition;
mod control;
mod control_group;
mod device_samples;
mod doctor;
mod drain;
mod end_summary;
mod epoll;
mod first_word;
mod folder;
mod gpu;
mod host;
mod host_samples;
mod http;
mod inherited;
mod inquiry;
mod kernel_parent;
mod library;
mod manifest;
#[cfg(feature = "mcp")]
mod mcp;
mod message;
mod metrics;
mod option_values;
mod output;
mod output_file;
mod preflight;
mod private_folder;
mod proc;
mod process_events;
mod process_watch;
mod ready;
mod ready_line;
mod running;
mod sandbox;
mod sanitizer;
mod session;
mod signal_probe;
mod signals;
mod simulation;
mod stack;
#[cfg(feature = "mcp")]
mod supervisor;
mod suspend;
mod terminal;
mod unrecordable;
mod workload;
mod xla;

use std::process::ExitCode;

fn main() -> ExitCode {
    output::print_panics();
    if let Some(request) = drain::rotation_worker::requested() {
        return ExitCode::from(drain::rotation_worker::run(request));
    }
    #[cfg(feature = "mcp")]
    if let Some(arguments) = supervisor::requested() {
        return ExitCode::from(supervisor::run(arguments));
    }
    let work = if metrics::category_worker::requested().is_some() { metrics::category_worker::run } else { run };
    ExitCode::from(stack::run_with_enough(work))
}

/// Runs the command line of this process, and returns the exit code.
fn run() -> u8 {
    let cli = match cli::Cli::from_arguments(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return error.print(),
    };
    match cli.command {
        cli::Command::Run(run) => commands::run::run(&run, None),
        cli::Command::Attach(options) => commands::exit_code(commands::attach::attach(&options)),
        cli::Command::DryRun(options) => commands::dry_run::dry_run(&options),
        cli::Command::Report(options) => commands::sandboxed(|| commands::report::report(&options)),
        cli::Command::Open(options) => commands::open::open(&options),
        cli::Command::Export(options) => commands::sandboxed(|| commands::export::export(&options)),
        cli::Command::Lines(options) => commands::sandboxed(|| commands::lines::lines(&options)),
        cli::Command::Diff(options) => commands::sandboxed(|| commands::diff::diff(&options)),
        cli::Command::Check(options) => commands::sandboxed_check(|| commands::check::check(&options)),
        cli::Command::Redact(options) => commands::redact::redact(&options),
        cli::Command::Suspend(options) => commands::exit_code(commands::suspend::suspend(&options)),
        cli::Command::Resume(options) => commands::exit_code(commands::suspend::resume(&options)),
        cli::Command::Live(options) => commands::live::live(&options),
        cli::Command::Snapshot(options) => commands::sandboxed_check(|| commands::snapshot::snapshot(&options)),
        cli::Command::Doctor(options) => commands::doctor::doctor(&options),
        cli::Command::Mcp(options) => commands::exit_code(commands::mcp::mcp(&options)),
        cli::Command::Kernel(options) => commands::exit_code(commands::kernel::kernel(&options)),
        cli::Command::SimulatedLibraries { python } => {
            commands::exit_code(commands::dry_run::simulated_libraries(&python))
        }
        cli::Command::MemoryInUse => commands::exit_code(device_samples::print_used()),
        cli::Command::Explain(options) => commands::exit_code(commands::explain::explain(&options)),
        cli::Command::Docs(options) => commands::exit_code(commands::docs::docs(&options)),
        cli::Command::Man(options) => commands::exit_code(commands::manual::man(&options)),
        cli::Command::Completions(options) => commands::exit_code(commands::manual::completions(&options)),
    }
}
