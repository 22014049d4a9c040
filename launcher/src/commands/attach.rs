//! `memtrace attach`: records a process that runs already, until it ends or until the user ends it.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use memtrace_analysis::RunFolder;
use memtrace_analysis::load::AttachedRun;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::library_options;
use crate::attach::{Injection, Stopped, TracedProcess};
use crate::cli::Attach;
use crate::device_samples::Sampler;
use crate::drain::drain_loop::Drain;
use crate::drain::{Outcome, Recorded};
use crate::end_summary::{self, SummaryOptions};
use crate::folder::{CHOOSE_ANOTHER, Place};
use crate::host_samples::HostSampler;
use crate::manifest::{Problem, RunManifest};
use crate::message::{self, WithHelp};
use crate::proc::ProcessDir;
use crate::signals::EndSignals;
use crate::{folder, host, library, session};

/// How long the library may take to find the state that was there before. Its own limit is lower.
const STATE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often to check whether it has.
const PAUSE: Duration = Duration::from_millis(5);

/// Attaches to a process, records it and prints the end-of-run summary.
pub(crate) fn attach(options: &Attach) -> anyhow::Result<()> {
    let pid = options.pid;
    let process = ProcessDir::of(pid);
    let command: Vec<OsString> = process.command_line().into_iter().map(OsString::from).collect();
    let start_ns = host::epoch_ns();
    let ran_ns = process.start_epoch_ns().map(|started| start_ns.saturating_sub(started));
    // The library must be there before the process is examined, and the folder must not if it cannot be recorded.
    let scratch = std::env::temp_dir();
    let library = library::library(options.output.as_deref().and_then(Path::parent).unwrap_or(&scratch))?;
    let token = session::name_of_run()?;
    let place = options.output.as_deref().map_or(Place::In(Path::new("")), Place::At);
    let traced = Injection::examine(pid, &library.path)?;
    let created = folder::create(place, &command, &host::stamp(start_ns))?;
    let folder = Arc::new(created.folder);
    let path = folder.path().to_owned();
    let result = record(options, &folder, token, traced, &library.path, (command, start_ns, ran_ns));
    if result.is_err() {
        // A recording that does not start leaves no folder.
        drop(std::fs::remove_dir_all(&path));
    }
    result
}

fn record(
    options: &Attach,
    folder: &Arc<RunFolder>,
    token: String,
    traced: TracedProcess,
    library: &Path,
    (command, start_ns, ran_ns): (Vec<OsString>, u64, Option<u64>),
) -> anyhow::Result<()> {
    let (pid, path) = (options.pid, folder.path());
    let mut manifest = RunManifest::begin(&command, start_ns, None);
    manifest.set_started(pid);
    manifest
        .write(folder)
        .with_context(|| WithHelp::new(format!("cannot write into {}", path.display()), CHOOSE_ANOTHER))?;
    let listener = session::listen(&token)?;
    let ended = pidfd(pid)?;
    let library_options = library_options::of_attach(options, token, path)?;
    let mut injection = Injection::start(traced, library, &library_options.encode())?;
    // From here on there are threads, which inherit the signal mask.
    let signals = EndSignals::block().context("cannot block signals")?;
    let drain = Drain::start(listener, Arc::clone(folder), None, None)?;
    let stopped = inject(&mut injection, &signals)?;
    drop(injection);
    check(pid, stopped)?;
    manifest.set_attached(AttachedRun { ran_ns, stopped_ns: stopped.stopped_ns, loading_ns: stopped.loading_ns });
    wait_for_state(&drain, &signals, &ended);
    let sampler = if options.recording.no_device_usage { None } else { Sampler::start(Arc::clone(folder)) };
    let host_sampler = HostSampler::start(Arc::clone(folder), pid);
    let began = Instant::now();
    if !options.summary.quiet {
        let milliseconds = |ns: u64| ns as f64 / 1e6;
        let loading = milliseconds(stopped.loading_ns);
        message::status(&match stopped.stopped_ns {
            Some(stopped) => format!(
                "attached to process {pid}: its threads were stopped for {:.1} ms, one at a time, and one has loaded \
                 the library in {loading:.1} ms",
                milliseconds(stopped)
            ),
            None => {
                format!("attached to process {pid}: Python loaded the library in {loading:.1} ms (sys.remote_exec)")
            }
        });
        message::status(&format!("recording to {}; Ctrl-C detaches", path.display()));
        message::note(
            "calls of the CUDA driver that libraries have bound before are not recorded (docs/how-to/attach.md)",
        );
    }
    wait(&signals, &ended, options.duration.map(|duration| began + duration));
    sampler.into_iter().for_each(Sampler::finish);
    host_sampler.into_iter().for_each(HostSampler::finish);
    let outcome = drain.finish().unwrap_or_else(|error| {
        message::report(&error);
        Outcome::default()
    });
    let notices = notices(&outcome, pid);
    let summary = manifest.finish_attached(outcome);
    if let Err(error) = manifest.write(folder) {
        message::error(&format!("cannot write {}: {error}", path.join("run.json").display()), None);
    }
    drop(signals);
    summary.problems.iter().for_each(Problem::print);
    notices.iter().for_each(|text| message::warning(text));
    if summary.processes == 0 {
        bail!(WithHelp::new(
            format!("process {pid} did not record: it has not connected to this memtrace"),
            "start the program with: memtrace -- COMMAND"
        ));
    }
    end_summary::finish(folder, SummaryOptions::new(&options.summary, None));
    Ok(())
}

/// Lets the injector begin, and waits for its result or for a signal to end.
fn inject(injection: &mut Injection, signals: &EndSignals) -> anyhow::Result<Stopped> {
    injection.begin()?;
    loop {
        let mut ready = [PollFd::new(&*injection, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let polled = poll(&mut ready, None);
        let has_answer = !ready[0].revents().is_empty();
        if has_answer {
            return injection.finish();
        }
        if polled.is_ok() {
            bail!("interrupted");
        }
    }
}

/// Waits until the state that was there before is known, the process ends or a signal asks to end.
fn wait_for_state(drain: &Drain, signals: &EndSignals, ended: &impl AsFd) {
    let until = Instant::now() + STATE_TIMEOUT;
    while !drain.is_state_known() && Instant::now() < until && !wait(signals, ended, Some(Instant::now() + PAUSE)) {}
}

/// Checks the value that the library's function has returned.
fn check(pid: u32, stopped: Stopped) -> anyhow::Result<()> {
    match stopped.result {
        0 => Ok(()),
        1 => bail!(WithHelp::new(
            format!("cannot attach to process {pid}: it is recorded already"),
            format!("look at the recording with: memtrace live {pid}")
        )),
        code => bail!("the library cannot record in process {pid} (code {code})"),
    }
}

/// The library's notices about the state that was there before, if it is not complete.
fn notices(outcome: &Outcome, pid: u32) -> Vec<String> {
    let of_process = |one: &&Recorded| one.pid == pid;
    let all = outcome.recorded.iter().filter(of_process).flat_map(|one| &one.notices);
    all.filter(|notice| notice.topic == "attach" && notice.status == "off").map(|notice| notice.text.clone()).collect()
}

/// A descriptor that becomes readable when the process ends.
fn pidfd(pid: u32) -> anyhow::Result<OwnedFd> {
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw).context("the process id is too large")?;
    let fd = pidfd_open(id, PidfdFlags::empty()).map_err(io::Error::from);
    fd.with_context(|| format!("cannot watch process {pid}"))
}

/// Waits for the end of the process, a signal to end, or `until`. Returns whether one of the first two has come.
fn wait(signals: &EndSignals, ended: &impl AsFd, until: Option<Instant>) -> bool {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return false;
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut ready = [PollFd::new(ended, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        if poll(&mut ready, left.as_ref()).is_ok_and(|count| count > 0) {
            return true;
        }
    }
}
