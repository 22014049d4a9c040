//! `memtrace run`: runs a command and records it, from the command line to the end-of-run summary.

use std::sync::Arc;

use anyhow::Context;
use memtrace_trace::options::{self, Options};

use crate::child::{self, Child};
use crate::cli::{Cpu, Run};
use crate::closing::{self, Manner};
use crate::drain::Outcome;
use crate::drain::pump::Drain;
use crate::inherited::State;
use crate::manifest::Manifest;
use crate::preflight::{self, CANNOT, NOT_EXECUTABLE, NOT_FOUND, Refusal};
use crate::signals::Signals;
use crate::unseen::{self, Given, Watch};
use crate::witness::Witness;
use crate::{folder, gpu, host, library, say, session};

/// Runs the command and returns the exit code: the command's own, or one of memtrace's when it could not be started.
pub(crate) fn run(run: &Run) -> u8 {
    match start(run) {
        Ok(code) => code,
        Err(refusal) => {
            say(&refusal.message);
            refusal.code
        }
    }
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Refusal {
        Refusal { code: CANNOT, message: format!("{error:#}") }
    }
}

fn start(run: &Run) -> Result<u8, Refusal> {
    let state = State::take();
    let (program, arguments) = run.command.split_first().context("no command given")?;
    preflight::check(program, arguments)?;
    preflight::check_system()?;
    let start_ns = host::epoch_ns();
    let created = folder::create(run.output.as_deref(), &run.command, &host::stamp(start_ns))?;
    let folder = Arc::new(created.folder);
    let path = folder.path();
    if created.is_open_to_others {
        say(&format!("others can read {}: its file system keeps no modes", path.display()));
    }
    let mut manifest = Manifest::begin(&run.command, start_ns);
    manifest
        .write(&folder)
        .with_context(|| format!("cannot write into {}; choose another folder with -o", path.display()))?;

    let library = library::library(path)?;
    let token = session::token()?;
    let listener = session::listen(&token)?;
    let cpu = if run.cpu == Cpu::Auto && gpu::is_usable() { options::Cpu::Never } else { run.cpu.into() };
    let filters = std::fs::read_to_string("/proc/self/status").map_or(0, |status| options::filters_in(&status));
    let (stacks, check_stacks, names) = (run.stacks.into(), run.check_stacks, !run.no_names);
    let cycles = if run.cycles {
        Some(std::path::absolute(path).context("cannot tell where the run's folder is")?)
    } else {
        None
    };
    let options = Options { token, cpu, stacks, check_stacks, names, cycles, filters };
    // SAFETY: this process has started no thread so far. `main` calls this function, and the checks before it start
    // none.
    unsafe { session::enter(&library.path, &options) };
    let signals = Signals::block().context("cannot block signals")?;
    // Without the signal probe, a signal to the whole group is passed on a second time. Recording is still worthwhile.
    let witness = Witness::start().ok();
    let drain = Drain::start(listener, Arc::clone(&folder))?;

    let child = match Child::spawn(&run.command, state) {
        Ok(child) => child,
        Err(e) => {
            // This is rare after the preflight checks. Nothing was recorded, so the folder is removed.
            drop(drain.finish());
            std::fs::remove_dir_all(path).ok();
            let code = if e.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
            let mut message = format!("cannot execute {}: {e}", program.to_string_lossy());
            if e.raw_os_error() == Some(libc::E2BIG) {
                message +=
                    "; memtrace's two environment variables need a few hundred bytes more than there is room for";
            }
            return Err(Refusal { code, message });
        }
    };
    // Without this thread, processes that cannot be recorded are not reported. The others are recorded nevertheless.
    let watch = Watch::start(Given { library: library.path.clone(), filters }).ok();
    manifest.started(child.pid() as u32);
    let status = signals.watch(&child, witness.as_ref());
    drop(witness);
    let outcome = drain.finish();
    child.collect();
    // From here on, Ctrl-C ends the launcher instead of the command.
    signals.unblock(&state);

    let outcome = outcome.unwrap_or_else(|e| {
        say(&format!("{e:#}"));
        Outcome::default()
    });
    let unseen =
        watch.map(|w| w.finish(outcome.recorded.iter().filter(|r| r.events > 0).map(|r| r.pid))).unwrap_or_default();
    let blind: Vec<_> = unseen.iter().filter(|u| !u.uses_cuda).cloned().collect();
    manifest.unseen(unseen);
    let summary = manifest.finish(status, outcome);
    if let Err(e) = manifest.write(&folder) {
        say(&format!("cannot write {}: {e}", path.join("run.json").display()));
    }
    for problem in &summary.problems {
        say(problem);
    }
    if summary.processes > 0 {
        closing::close(&folder, Manner { quiet: run.quiet, no_snapshot: run.no_snapshot });
    } else if !run.quiet {
        let command: Vec<_> = run.command.iter().map(|a| a.to_string_lossy()).collect();
        let command: String = command.join(" ").chars().take(120).collect();
        say(&format!("{command}    {}    nothing recorded: no process allocated GPU memory", summary.ending));
        if let Some(words) = unseen::in_words(&blind) {
            say(&format!("where nothing can be recorded: {words}"));
        }
    }
    Ok(child::exit_code(status))
}
