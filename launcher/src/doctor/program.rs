//! Records a short run of the given command and reports on each of its processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use memtrace_trace::counters::Counter;
use memtrace_trace::file::Reader;
use serde_json::Value;

use super::diagnosis::{Finding, Process, Program, PyTorch, Stranger};
use super::layers::{self, Tally};
use super::supervise::{self, Ended};
use super::units::count;
use super::{probe, torch};
use crate::inherited::State;
use crate::preflight;

/// The command to record and the options of that run.
#[derive(Clone, Copy)]
pub(super) struct Order<'a> {
    pub(super) command: &'a [OsString],
    /// The folder for the recording.
    pub(super) folder: &'a Path,
    /// Whether the recording stays in that folder.
    pub(super) keep: bool,
    pub(super) limit: Option<Duration>,
    /// Doctor's stdout is machine-readable, so the command's output goes to stderr.
    pub(super) to_stderr: bool,
}

/// Records the command and examines the recording.
pub(super) fn examine(state: State, order: Order<'_>) -> Program {
    let mut program = Program {
        command: order.command.iter().map(|w| w.to_string_lossy().into_owned()).collect(),
        ending: String::new(),
        seconds: 0.0,
        stopped: false,
        folder: None,
        checks: Vec::new(),
        processes: Vec::new(),
        not_recorded: Vec::new(),
    };
    let Some((first, arguments)) = order.command.split_first() else { return program };
    if let Err(refusal) = preflight::check(first, arguments) {
        let (why, mend) = refusal.message.split_once("; ").unwrap_or((&refusal.message, "name another program"));
        program.checks.push(Finding::off("program", format!("cannot be recorded: {why}"), mend));
        return program;
    }
    let ended = match supervise::run(state, order.command, order.folder, order.limit, order.to_stderr) {
        Ok(ended) => ended,
        Err(e) => {
            program.checks.push(Finding::off(
                "program",
                format!("memtrace cannot be started: {e}"),
                "see the machine's lines",
            ));
            return program;
        }
    };
    program.seconds = ended.took.as_secs_f64();
    program.stopped = ended.stopped;
    if order.keep {
        program.folder = Some(order.folder.display().to_string());
    }
    let Some(manifest) = manifest(order.folder) else {
        let why = format!("memtrace gave up before it started (exit status {})", ended.code.unwrap_or(-1));
        program.checks.push(Finding::off("program", why, "mend what it said on stderr, above"));
        return program;
    };
    program.ending = ending(&manifest, &ended);
    program.checks.push(outcome(&manifest, &ended));
    program.checks.extend(refused(&manifest));
    for trace in probe::traces(order.folder) {
        program.processes.push(process(&trace));
    }
    program.checks.push(recorded(&program.processes));
    program.not_recorded = strangers(&manifest);
    program
}

fn manifest(folder: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(folder.join("run.json")).ok()?).ok()
}

fn ending(manifest: &Value, ended: &Ended) -> String {
    let exit = &manifest["exit"];
    match (exit["code"].as_i64(), exit["signal"].as_i64()) {
        _ if ended.stopped => "ended by doctor when its time was up".to_owned(),
        (Some(0), _) => "ended well".to_owned(),
        (Some(code), _) => format!("exit status {code}"),
        (_, Some(signal)) => format!("killed by signal {signal}"),
        _ => "it is not known how it ended".to_owned(),
    }
}

/// A finding on how the program ended. A failure is only a note, because the program may have ended before its GPU
/// work.
fn outcome(manifest: &Value, ended: &Ended) -> Finding {
    let text = ending(manifest, ended);
    if manifest["exit"]["code"] == 0 || ended.stopped {
        Finding::ok("program", text)
    } else {
        Finding::note("program", format!("{text}: it may not have come to all that it does"))
    }
}

/// Findings about processes whose recording request was refused.
fn refused(manifest: &Value) -> impl Iterator<Item = Finding> {
    manifest["refused"].as_object().into_iter().flatten().map(|(reason, number)| {
        let mend = match reason.as_str() {
            "another user" => "record as that user: sudo -u USER memtrace -- COMMAND",
            "outside our pid namespace" => "start memtrace inside the container, or the container with --pid=host",
            "library of another build" => "unset MEMTRACE_LIBRARY, and start nested memtrace of the same version",
            "no descriptors left" => "raise the hard limit of open files: ulimit -Hn 65536",
            "no shared memory" => "raise the memory limit; allow memfd_create",
            "too many processes" | "too many at once" => {
                "record a part of the job: put memtrace before one worker's command"
            }
            _ => "run it again; if it stays, report it with this page",
        };
        let text =
            format!("{}: {reason}", count(number.as_u64().unwrap_or(0), "process").replace("processs", "processes"));
        Finding::off("not recorded", text, mend)
    })
}

fn recorded(processes: &[Process]) -> Finding {
    let events: u64 = processes.iter().map(|p| p.events).sum();
    match processes.len() {
        0 => Finding::unused("recorded", "nothing: no process allocated GPU memory, or CPU tensors with PyTorch"),
        1 => Finding::ok("recorded", format!("{} of 1 process", count(events, "event"))),
        n => Finding::ok("recorded", format!("{} of {n} processes", count(events, "event"))),
    }
}

fn process(trace: &Reader) -> Process {
    let info: Value = serde_json::from_str(trace.info()).unwrap_or_default();
    let pid = info["pid"].as_u64().and_then(|p| u32::try_from(p).ok()).unwrap_or(0);
    let argv = info["argv"].as_array().into_iter().flatten().filter_map(|w| Some(w.as_str()?.to_owned())).collect();
    let tally = Tally::of(trace);
    let counters: BTreeMap<&'static str, u64> =
        Counter::ALL.iter().map(|c| (c.name(), trace.counter(*c))).filter(|(_, n)| *n > 0).collect();
    Process {
        pid,
        argv,
        events: tally.events,
        pytorch: pytorch(trace),
        layers: layers::layers(trace, &tally),
        stacks: tally.stacks,
        checks: layers::checks(trace, &tally),
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
fn strangers(manifest: &Value) -> Vec<Stranger> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = manifest["unseen"].as_array().into_iter().flatten();
    all.map(|unseen| {
        let (exe, reason) = (text(&unseen["program"]), text(&unseen["reason"]));
        let name = Path::new(&exe).file_name().map_or("?".into(), |n| n.to_string_lossy()).into_owned();
        let mend = mend(&reason);
        let why = if unseen["uses_cuda"] == true {
            Finding::off(&name, format!("{reason}; and it uses CUDA"), mend)
        } else {
            Finding::note(&name, format!("{reason}; it had no CUDA loaded when it was looked at")).with_mend(mend)
        };
        let pid = unseen["pid"].as_u64().and_then(|p| u32::try_from(p).ok()).unwrap_or(0);
        Stranger { pid, exe, why }
    })
    .collect()
}

/// The fix for a process that cannot be recorded. `crate::unseen` produces the reasons.
fn mend(reason: &str) -> &'static str {
    const MENDS: [(&str, &str); 9] = [
        ("another user", "run memtrace as that user, behind sudo: sudo -u USER memtrace -- COMMAND"),
        ("statically", "run a dynamically linked build of it"),
        ("another machine", "run a 64-bit build of it"),
        (
            "LD_PRELOAD",
            "pass LD_PRELOAD and MEMTRACE_SESSION on, or put memtrace there: env -i ... memtrace -- COMMAND",
        ),
        ("MEMTRACE_SESSION", "pass MEMTRACE_SESSION on beside LD_PRELOAD"),
        ("file system", "start memtrace inside the container, before its command"),
        ("privileges", "run memtrace behind it: COMMAND ... memtrace -- ..."),
        ("network namespace", "start memtrace inside the container, before its command"),
        ("seccomp", "let the filter allow socket(AF_UNIX), connect, recvmsg and mmap"),
    ];
    let known = MENDS.iter().find(|(part, _)| reason.contains(part)).map(|(_, mend)| *mend);
    known.unwrap_or("raise the limit: ulimit -v unlimited")
}
