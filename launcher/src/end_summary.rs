//! The end-of-run summary: analyzes the run after the command has ended, with a progress line on a terminal, and prints
//! the report on stderr.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memtrace_analysis::load::Manifest;
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{FinishOptions, FinishedRun, RunFolder, ToText, finish_run};

use crate::cli::EndSummaryOptions;
use crate::output::{Printed, Stream, print_to_stderr};
use crate::terminal::{ProgressLine, layout};
use crate::{message, sandbox};

/// The maximum number of problems that are printed one by one. A hostile program can put any number of invalid files
/// into the folder.
const MAX_PRINTED_PROBLEMS: usize = 8;
/// The loss of events that could not be written, in the manifest.
const UNWRITTEN: &str = "unwritten";

/// The help for a command that failed on a machine without a GPU.
pub(crate) const USE_DRY_RUN: &str = "this machine has no NVIDIA driver; `memtrace dry-run -- COMMAND` runs the \
    command over a simulated GPU";

/// The options of the end-of-run summary: its output and its files.
#[derive(Clone, Debug)]
pub(crate) struct SummaryOptions {
    /// Print only errors and warnings.
    pub(crate) quiet: bool,
    /// Print evidence, replay details and churn too.
    pub(crate) verbose: bool,
    /// Write no snapshots.
    pub(crate) no_snapshot: bool,
    /// Say how to run the command without a GPU, if no GPU was used.
    pub(crate) suggests_dry_run: bool,
    /// The rules of the user's own categories.
    pub(crate) custom_rules: Option<Arc<CustomRules>>,
}

impl SummaryOptions {
    /// Reads the options of the command line.
    pub(crate) fn new(options: &EndSummaryOptions, custom_rules: Option<Arc<CustomRules>>) -> SummaryOptions {
        let EndSummaryOptions { quiet, verbose, no_snapshot } = *options;
        SummaryOptions { quiet, verbose, no_snapshot, suggests_dry_run: false, custom_rules }
    }
}

/// Analyzes the run in `folder`, writes its files and prints the summary.
///
/// A failure of the analysis does not end the launcher.
pub(crate) fn finish(folder: &RunFolder, options: SummaryOptions) {
    let analysis = || match analyze(folder, &options) {
        Ok(()) => 0,
        Err(e) => {
            report_failure(folder, e);
            0
        }
    };
    if let Err(e) = sandbox::run(analysis) {
        report_failure(folder, e);
    }
}

/// [`finish`] in a process of its own session, so that neither the caller of memtrace waits for it nor a signal to
/// memtrace's process group ends it. This process must have no other threads.
pub(crate) fn finish_in_background(folder: &RunFolder, options: SummaryOptions) {
    // SAFETY: `fork` takes no arguments and accesses no memory of ours.
    match unsafe { libc::fork() } {
        0 => {
            let _ = rustix::process::setsid();
            // Whoever reads the output of the command waits for its end, and not for that of the reports.
            if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
                let _ = rustix::stdio::dup2_stdin(&null);
                let _ = rustix::stdio::dup2_stdout(&null);
                let _ = rustix::stdio::dup2_stderr(&null);
            }
            let _ = catch_unwind(AssertUnwindSafe(|| finish(folder, options)));
            // SAFETY: `_exit` takes an integer and does not return. The exit handlers of the copied parent must not run
            // here.
            unsafe { libc::_exit(0) }
        }
        child if child < 0 => finish(folder, options),
        _ => {}
    }
}

fn report_failure(folder: &RunFolder, error: anyhow::Error) {
    message::report(&error.context("cannot analyze the run"));
    let manifest = Manifest::read(folder).ok().flatten().map(|mut manifest| {
        manifest.check_traces(folder);
        manifest
    });
    let Some(manifest) = manifest else { return };
    let shown = folder.path().display();
    match manifest.changed_traces.len() {
        0 if manifest.losses.get(UNWRITTEN).is_none_or(|events| *events == 0) => {
            message::note(&format!("the recording in {shown} is complete"));
        }
        0 => message::note(&format!("what could be written of the recording is in {shown}")),
        count => {
            manifest.changed_traces.iter().take(MAX_PRINTED_PROBLEMS).for_each(|text| message::warning(text));
            if count > MAX_PRINTED_PROBLEMS {
                message::warning(&format!("{} more traces were removed or cut", count - MAX_PRINTED_PROBLEMS));
            }
        }
    }
}

fn analyze(folder: &RunFolder, options: &SummaryOptions) -> anyhow::Result<()> {
    let custom_rules = options.custom_rules.clone();
    let finish_options = FinishOptions { no_snapshot: options.no_snapshot, custom_rules, ..FinishOptions::default() };
    let mut line = ProgressLine::new(!options.quiet && Stream::Stderr.is_terminal());
    let written = finish_run(folder, &finish_options, &mut |progress| line.show(&progress));
    line.clear();
    print(&written?, options);
    Ok(())
}

fn print(written: &FinishedRun, options: &SummaryOptions) {
    for problem in written.problems.iter().take(MAX_PRINTED_PROBLEMS) {
        message::warning(&format!("{}: {}", problem.path.display(), problem.text));
    }
    if written.problems.len() > MAX_PRINTED_PROBLEMS {
        let more = written.problems.len() - MAX_PRINTED_PROBLEMS;
        message::warning(&format!("{more} more problems are listed in summary.json"));
    }
    if options.quiet {
        return;
    }
    print_to_stderr(Printed::Styled(&written.summary.to_text(&layout(Stream::Stderr, options.verbose))));
    let mut devices = written.summary.processes.iter().flat_map(|process| &process.devices);
    if options.suggests_dry_run && devices.all(|device| device.device < 0) {
        message::help(USE_DRY_RUN);
    }
}
