//! Records a short run of the given command and reports on each of its processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{Manifest, UnrecordableProcess};
use memtrace_trace::counters::Counter;
use memtrace_trace::file::Reader;
use serde_json::Value;

use super::evidence::EventCounts;
use super::layers;
use super::report::{Check, NotRecorded, Program, PyTorch, RecordedProcess};
use super::supervise::{self, CommandResult};
use super::units::count;
use super::{probe, torch};
use crate::drain::refusal::RefusalReason;
use crate::inherited::InheritedState;
use crate::preflight;
use crate::unrecordable::Obstacle;

/// The command to record and the options of that run.
#[derive(Clone, Copy)]
pub(super) struct RecordOptions<'a> {
    pub(super) command: &'a [OsString],
    /// The folder for the recording.
    pub(super) folder: &'a Path,
    /// Whether the recording stays in that folder.
    pub(super) keep: bool,
    pub(super) limit: Option<Duration>,
    /// Doctor's stdout is machine-readable, so the command's output goes to stderr.
    pub(super) to_stderr: bool,
}

/// Records the command and checks the recording.
pub(super) fn record(state: InheritedState, options: RecordOptions<'_>) -> Program {
    let mut program = Program {
        command: options.command.iter().map(|w| w.to_string_lossy().into_owned()).collect(),
        ending: String::new(),
        seconds: 0.0,
        stopped: false,
        folder: None,
        checks: Vec::new(),
        processes: Vec::new(),
        not_recorded: Vec::new(),
    };
    let Some((first, arguments)) = options.command.split_first() else { return program };
    if let Err(refusal) = preflight::check(first, arguments) {
        let fix = refusal.help.unwrap_or_else(|| "name another program".to_owned());
        program.checks.push(Check::failed("Command", refusal.message, fix));
        return program;
    }
    let result = match supervise::run(state, options.command, options.folder, options.limit, options.to_stderr) {
        Ok(result) => result,
        Err(e) => {
            program.checks.push(Check::failed(
                "Command",
                format!("cannot start memtrace: {e}"),
                "see the checks of the machine",
            ));
            return program;
        }
    };
    program.seconds = result.duration.as_secs_f64();
    program.stopped = result.stopped;
    if options.keep {
        program.folder = Some(options.folder.display().to_string());
    }
    let Some(manifest) = manifest(options.folder) else {
        let reason = format!("memtrace failed before the command started (exit status {})", result.code.unwrap_or(-1));
        program.checks.push(Check::failed("Command", reason, "see the error on stderr, above"));
        return program;
    };
    program.ending = ending(&manifest, &result);
    program.checks.push(exit(&manifest, &result));
    program.checks.extend(refused(&manifest));
    for trace in probe::traces(options.folder) {
        program.processes.push(process(&trace));
    }
    program.checks.push(recording(&program.processes));
    program.not_recorded = not_recorded(&manifest);
    program
}

fn manifest(folder: &Path) -> Option<Manifest> {
    Manifest::read(&RunFolder::open(folder).ok()?).ok()?
}

fn ending(manifest: &Manifest, result: &CommandResult) -> String {
    if result.stopped {
        return "stopped by doctor after the time limit".to_owned();
    }
    manifest.exit.text().unwrap_or_else(|| "unknown exit status".to_owned())
}

/// How the command ended. A failure is only a note, because the command may have ended before its GPU work.
fn exit(manifest: &Manifest, result: &CommandResult) -> Check {
    let text = ending(manifest, result);
    if manifest.exit.success() == Some(true) || result.stopped {
        Check::ok("Exit", text)
    } else {
        Check::note("Exit", format!("{text}; the command may have ended before its GPU work"))
    }
}

/// Checks of processes whose recording request was refused.
fn refused(manifest: &Manifest) -> impl Iterator<Item = Check> {
    manifest.refused.iter().map(|(reason, number)| {
        let fix = RefusalReason::from_text(reason).map_or("run the command again", RefusalReason::fix);
        let number = count(*number, "request");
        Check::failed("Refused requests", format!("{number}: {reason}"), fix)
    })
}

fn recording(processes: &[RecordedProcess]) -> Check {
    let events: u64 = processes.iter().map(|p| p.events).sum();
    match processes.len() {
        0 => Check::unused("Recording", "no process allocated GPU memory, or CPU tensors with PyTorch"),
        1 => Check::ok("Recording", format!("{} of 1 process", count(events, "event"))),
        n => Check::ok("Recording", format!("{} of {n} processes", count(events, "event"))),
    }
}

fn process(trace: &Reader) -> RecordedProcess {
    let info: Value = serde_json::from_str(trace.info()).unwrap_or_default();
    let pid = info["pid"].as_u64().and_then(|p| u32::try_from(p).ok()).unwrap_or(0);
    let argv = info["argv"].as_array().into_iter().flatten().filter_map(|w| Some(w.as_str()?.to_owned())).collect();
    let counts = EventCounts::of(trace);
    let counters: BTreeMap<&'static str, u64> =
        Counter::ALL.iter().map(|c| (c.name(), trace.counter(*c))).filter(|(_, n)| *n > 0).collect();
    RecordedProcess {
        pid,
        argv,
        events: counts.events,
        pytorch: pytorch(trace),
        layers: layers::layers(trace, &counts),
        stacks: counts.stacks,
        checks: layers::checks(trace, &counts),
        counters,
    }
}

/// The PyTorch that a process used: the one that called CUDA, or whose code is in the process's stacks.
fn pytorch(trace: &Reader) -> Option<PyTorch> {
    let definitions = trace.definitions();
    let libraries = definitions.modules.iter().find_map(|m| torch::of_file(Path::new(&*m.path)));
    libraries.or_else(|| definitions.frames.iter().find_map(|f| torch::of_file(Path::new(&*f.filename))))
}

/// The processes of the command that the launcher could not record.
fn not_recorded(manifest: &Manifest) -> Vec<NotRecorded> {
    let of_process = |process: &UnrecordableProcess| {
        let (exe, reason) = (&process.program, &process.reason);
        let name = Path::new(exe).file_name().map_or("?".into(), |n| n.to_string_lossy()).into_owned();
        let fix = Obstacle::from_text(reason).map_or("run the command again", Obstacle::fix);
        let check = if process.uses_cuda {
            Check::failed(&name, format!("{reason}; it uses CUDA"), fix)
        } else {
            Check::note(&name, format!("{reason}; it had not loaded CUDA at the last scan")).with_fix(fix)
        };
        NotRecorded { pid: process.pid, exe: exe.clone(), check }
    };
    manifest.unrecordable.iter().map(of_process).collect()
}
