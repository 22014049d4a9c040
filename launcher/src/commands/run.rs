//! `memtrace run`: runs a command and records it, from the command line to the end-of-run summary.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use memtrace_analysis::load::{Exit, unrecorded};
use memtrace_analysis::{RunFolder, host_kill};
use memtrace_trace::unrecorded::Unrecorded;

use super::library_options;
use crate::child::{self, Child};
use crate::cli::Run;
use crate::device_samples::Sampler;
use crate::drain::Outcome;
use crate::drain::drain_loop::Drain;
use crate::end_summary::{self, SummaryOptions, USE_DRY_RUN};
use crate::folder::{CHOOSE_ANOTHER, Place};
use crate::host_samples::HostSampler;
use crate::inherited::InheritedState;
use crate::kernel_parent::ParentWatch;
use crate::manifest::{Problem, RunManifest};
use crate::message::WithHelp;
use crate::metrics::{CategoryReader, Figures, MetricsListener, Push, require_push};
use crate::output::Stream;
use crate::preflight::{self, NOT_EXECUTABLE, NOT_FOUND, Refusal};
use crate::private_folder::{PrivateFolder, Readers};
use crate::process_watch::{CommandEnvironment, ProcessWatch};
use crate::ready::{ReadyThread, ReadyWatch};
use crate::ready_line::LineWatch;
use crate::signal_probe::SignalProbe;
use crate::signals::Signals;
use crate::simulation::Simulation;
use crate::{folder, gpu, host, library, message, session, xla};

/// The maximum length of the command line in the end-of-run summary, in characters.
const MAX_COMMAND: usize = 120;
/// The help for a dry run in which nothing used CUDA.
const USE_CUDA: &str = "move the model and its inputs to the GPU, such as model.to(\"cuda\"), and run it with a \
    PyTorch that `python -c 'import torch'` finds";

/// The variable that names the job, for launchers that set variables more easily than options.
const JOB: &str = "MEMTRACE_JOB";

/// Runs the command and returns the exit code: the command's own, or one of memtrace's when it could not be started.
///
/// With a simulation, the command runs over it instead of over this machine's GPUs.
pub(crate) fn run(run: &Run, simulation: Option<&Simulation>) -> u8 {
    message::use_prefix();
    match start(run, simulation) {
        Ok(code) => code,
        Err(refusal) => {
            message::error(&refusal.message, refusal.help.as_deref());
            refusal.code
        }
    }
}

/// Where the options put the run folder.
pub(super) fn place(run: &Run) -> Place<'_> {
    match (&run.output, &run.runs) {
        (Some(path), _) => Place::At(path),
        (None, parent) => Place::In(parent.as_deref().unwrap_or(Path::new(""))),
    }
}

fn start(run: &Run, simulation: Option<&Simulation>) -> Result<u8, Refusal> {
    let state = InheritedState::capture_and_adjust();
    let (program, arguments) = run.command.split_first().context("no command given")?;
    let checked = preflight::check(program, arguments)?;
    preflight::check_system()?;
    let custom_rules = super::categories::read(run.categories.as_deref())?;
    if run.otlp.is_some() {
        require_push()?;
    }
    let token_file = run.metrics_token_file.as_deref();
    let metrics = run.metrics.as_ref().map(|address| MetricsListener::bind(address, token_file)).transpose()?;
    let start_ns = host::epoch_ns();
    let created = folder::create(place(run), &run.command, &host::stamp(start_ns))?;
    let folder = Arc::new(created.folder);
    let path = folder.path();
    if created.is_open_to_others {
        message::warning(&format!(
            "other users can read {}, because its file system stores no file modes",
            path.display()
        ));
    }
    let mut manifest = RunManifest::begin(&run.command, start_ns, simulation.map(Simulation::description));
    manifest.set_job(run.job.clone().or_else(|| std::env::var(JOB).ok().filter(|id| !id.is_empty())));
    manifest.set_limit(run.limit);
    manifest
        .write(&folder)
        .with_context(|| WithHelp::new(format!("cannot write into {}", path.display()), CHOOSE_ANOTHER))?;

    let library = library::library(path)?;
    if let (Some(simulation), Some(folder)) = (simulation, library.path.parent()) {
        let folder = PrivateFolder::enter(folder, &[], Readers::of_code())?;
        for (name, value) in simulation.environment(&run.command, &folder, path)? {
            // SAFETY: no other thread of this process runs: the checks before start none.
            unsafe { std::env::set_var(name, value) };
        }
    }
    let token = session::name_of_run()?;
    let listener = session::listen(&token)?;
    let options = library_options::of_run(run, token, path, simulation.is_some())?;
    // A run that does not start leaves no folder.
    let variables = xla::environment(run, options.folder.as_deref().unwrap_or(path))
        .inspect_err(|_| drop(std::fs::remove_dir_all(path)))?;
    for (name, value) in variables {
        // SAFETY: no other thread of this process runs: the checks before start none.
        unsafe { std::env::set_var(name, value) };
    }
    // SAFETY: no other thread of this process runs. The checks before start none, and with a small stack limit the
    // first thread only waits for this one (`stack`).
    unsafe { session::set_environment(&library.path, &options, checked.needs_asan) };
    let signals = Signals::block().context("cannot block signals")?;
    // Without the signal probe, a signal to the whole group is passed on a second time. Recording is still worthwhile.
    let probe = SignalProbe::start().ok();
    let url = metrics.as_ref().map(MetricsListener::url);
    let figures = (metrics.is_some() || run.otlp.is_some()).then(Figures::default);
    let drain = Drain::start(listener, Arc::clone(&folder), figures.clone(), run.keep)?;
    let categories = figures.clone().map(|figures| CategoryReader::start(path, figures)).transpose()?;
    let push = run.otlp.as_deref().zip(figures.clone()).map(|(url, figures)| Push::start(url, figures)).transpose()?;
    let metrics = metrics.zip(figures).map(|(metrics, figures)| metrics.serve(figures)).transpose()?;
    // Without this thread, processes that cannot be recorded are reported only if the library is loaded there. All
    // others are recorded nevertheless.
    let watch =
        ProcessWatch::start(CommandEnvironment { library: library.path.clone(), filters: options.filters }).ok();
    // A dry run uses no GPU of this machine.
    let sampler =
        if simulation.is_none() && !run.recording.no_device_usage { Sampler::start(Arc::clone(&folder)) } else { None };

    if !run.summary.quiet && Stream::Stderr.is_terminal() {
        // One line, which stays: the program may draw its own progress.
        message::status(&format!("recording to {}", path.display()));
    }
    if let Some(url) = url.filter(|_| !run.summary.quiet) {
        message::status(&format!("metrics at {url}"));
    }
    let line = simulation.and_then(|simulation| simulation.ready_line.as_ref());
    let (line, output) = line.map(LineWatch::start).transpose().context("cannot read the output")?.unzip();
    let child = match Child::spawn(&run.command, state, output) {
        Ok(child) => child,
        Err(e) => {
            // This is rare after the preflight checks. Nothing was recorded, so the folder is removed.
            drop((drain.finish(), watch.map(|watch| watch.finish(std::iter::empty()))));
            sampler.into_iter().for_each(Sampler::finish);
            std::fs::remove_dir_all(path).ok();
            let code = if e.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
            let message = format!("cannot execute {}: {e}", program.to_string_lossy());
            let help = (e.raw_os_error() == Some(libc::E2BIG)).then(|| {
                "shorten the arguments or the environment by a few hundred bytes, which memtrace's variables need"
                    .to_owned()
            });
            return Err(Refusal { code, message, help });
        }
    };
    manifest.set_started(child.pid() as u32);
    // The main memory that a program takes over the simulated CUDA is not that on a machine with a GPU.
    let host_sampler =
        if simulation.is_none() { HostSampler::start(Arc::clone(&folder), child.pid() as u32) } else { None };
    let parent = ParentWatch::start();
    let ready = ReadyWatch {
        asks_health: simulation.is_some_and(|simulation| simulation.until_ready),
        line: line.as_ref().map(|line| Arc::clone(&line.found)),
    };
    let command = rustix::process::Pid::from_raw(child.pid());
    let ready =
        command.and_then(|command| ready.start(command)).transpose().context("cannot start a thread").inspect_err(
            |_| {
                child.signal(libc::SIGKILL, None);
            },
        )?;
    let mut status = signals.forward_until_exit(&child, probe.as_ref());
    // A server that was ready has done what it was run for, however it takes its end.
    let was_ready = ready.is_some_and(ReadyThread::finish);
    line.into_iter().for_each(LineWatch::finish);
    if was_ready {
        status = 0;
    }
    drop((probe, parent));
    sampler.into_iter().for_each(Sampler::finish);
    host_sampler.into_iter().for_each(HostSampler::finish);
    push.into_iter().for_each(Push::finish);
    categories.into_iter().for_each(CategoryReader::finish);
    let outcome = drain.finish();
    drop(metrics);
    child.collect();
    let outcome = outcome.unwrap_or_else(|e| {
        message::report(&e);
        Outcome::default()
    });
    let recorded = outcome.recorded.iter().filter(|r| r.received.events > 0).map(|r| r.pid);
    let watched = watch.map(|watch| watch.finish(recorded));
    let mut simulated = simulation.map(|_| Simulation::finish(&folder, child::exit_code(status) != 0));
    let missing_toolkit = simulated.as_mut().and_then(|simulated| simulated.missing_toolkit.take());
    // A program without its toolkit ends before it uses CUDA.
    let is_simulation_unused =
        missing_toolkit.is_none() && simulated.as_ref().is_some_and(|simulated| !simulated.used_cuda);
    if let Some(simulated) = simulated {
        simulated.problems.iter().for_each(|problem| message::warning(problem));
        manifest.set_simulated(simulated, was_ready);
    }
    manifest.set_unrecordable(watched, take_reports(&folder));
    let summary = manifest.finish(status, outcome);
    if let Err(e) = manifest.write(&folder) {
        message::error(&format!("cannot write {}: {e}", path.join("run.json").display()), None);
    }
    // From here on, Ctrl-C ends the launcher instead of the command. The manifest says that the run has ended.
    signals.unblock(&state);
    summary.problems.iter().for_each(Problem::print);
    // A signal is mostly the end that the user wanted.
    let has_failed = (1..128).contains(&child::exit_code(status));
    let suggests_dry_run = simulation.is_none() && has_failed && !gpu::has_driver();
    if summary.processes > 0 {
        let options = SummaryOptions { suggests_dry_run, ..SummaryOptions::new(&run.summary, custom_rules) };
        if run.reports_in_background {
            end_summary::finish_in_background(&folder, options);
        } else {
            end_summary::finish(&folder, options);
        }
    } else if !run.summary.quiet {
        let command: Vec<_> = run.command.iter().map(|a| a.to_string_lossy()).collect();
        let command: String = command.join(" ").chars().take(MAX_COMMAND).collect();
        let reason = manifest.reason_for_nothing();
        message::status(&format!("{command}    {}    nothing recorded: {reason}", summary.ending));
        if let Some(kill) = host_kill(&folder, Exit::from_wait_status(status)) {
            message::warning(&format!("{}. {}", kill.outcome, kill.text));
        }
        manifest.notes_for_nothing().iter().for_each(Problem::print);
        // A command that fails before it uses CUDA, for example over a missing file, has another problem.
        if is_simulation_unused && !has_failed {
            message::warning("no process of the command used CUDA");
            message::help(USE_CUDA);
        }
        if suggests_dry_run {
            message::help(USE_DRY_RUN);
        }
    }
    if let Some([text, help]) = missing_toolkit.map(|missing| missing.texts()) {
        message::warning(&text);
        message::help(&help);
    }
    Ok(child::exit_code(status))
}

/// Reads and removes the reports of processes that could not record.
fn take_reports(folder: &RunFolder) -> Vec<Unrecorded> {
    let reports = unrecorded(folder);
    for report in &reports {
        // A report that stays is listed twice at worst.
        let _ = folder.remove(report.name());
    }
    reports
}
