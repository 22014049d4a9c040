//! `run.json`, the manifest of a run: the command, its processes, how it ended, and what was lost.
//!
//! The file is written when the run begins, so that a killed launcher leaves one, and again when the run ends.
//!
//! The analysis reads the fields that `memtrace_analysis::load::Manifest` declares. The other fields are for people and
//! other programs. All times are nanoseconds since the Unix epoch; the start and end of the run are also given as text.
//! Readers ignore unknown fields. Removing or renaming a field raises the version.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};

use memtrace_analysis::load::{EstimatedWorkspaces, MANIFEST_FILE, SimulatedGpus, ValueException};
use memtrace_analysis::{RunFolder, printable};
use memtrace_trace::counters::{Counter, CounterValues};
use memtrace_trace::unrecorded::Unrecorded;
use serde::Serialize;
use serde_json::Value;

use crate::drain::refusal::RefusalReason;
use crate::drain::{Notice, Outcome, Recorded, Written};
use crate::host::{self, Host};
use crate::message;
use crate::process_watch::{Discovery, Watched};
use crate::unrecordable::{self, UnrecordableProcess};

/// The format version. It is raised when a field changes its name or meaning.
const VERSION: u32 = 2;

/// The content of `run.json`.
#[derive(Serialize, Debug)]
pub(crate) struct Manifest {
    /// The value of [`VERSION`].
    version: u32,
    /// The version of memtrace that made the run.
    memtrace: &'static str,
    /// The command line.
    command: Vec<String>,
    /// The directory in which the command was started.
    directory: String,
    /// The host's name.
    host: String,
    machine: Host,
    /// The id of the distributed job, if the user gave one.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    /// `running` until the end. If nothing runs any more, `running` means that the launcher was killed.
    state: RunState,
    started: String,
    started_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_ns: Option<u64>,
    /// What is known of the attachment, if the process ran before the recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    attached: Option<Attached>,
    /// The process id of the command itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    /// How the command ended. Absent until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit: Option<Exit>,
    /// Every process image that recorded events, in the order in which their recordings began.
    processes: Vec<Process>,
    losses: Losses,
    /// The number of recording requests that were refused, by reason.
    refused: BTreeMap<String, u64>,
    /// Processes of the command that cannot be recorded, as far as they were found.
    unrecordable: Vec<UnrecordableProcess>,
    /// The number of further ones.
    unlisted: u64,
    /// The number of programs that ended before they were checked.
    unchecked: u64,
    /// The GPUs of a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated: Option<SimulatedGpus>,
    /// How much memory of each GPU the command saw, in bytes. Absent without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes: Option<u64>,
    /// How the processes of the command were found. Absent until the run ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    discovery: Option<Discovery>,
}

/// Whether the run has ended.
#[derive(Serialize, Clone, Copy, Debug)]
#[serde(rename_all = "snake_case")]
enum RunState {
    Running,
    Ended,
}

/// How memtrace attached to a process.
#[derive(Serialize, Clone, Copy, Debug)]
pub(crate) struct Attached {
    /// How long the process ran before, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ran_ns: Option<u64>,
    /// How long its threads were stopped together, one at a time, until one could load the library, in nanoseconds. `None`
    /// if Python itself has loaded it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stopped_ns: Option<u64>,
    /// How long the thread that loaded the library did not go on with the program, in nanoseconds.
    pub(crate) loading_ns: u64,
}

/// How a process ended.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// The process exited with this status.
    Code(i32),
    /// This signal killed the process.
    Signal(i32),
}

impl Exit {
    /// Decodes the status word of `wait(2)`.
    pub(crate) fn of(wait_status: i32) -> Exit {
        if libc::WIFSIGNALED(wait_status) {
            Exit::Signal(libc::WTERMSIG(wait_status))
        } else {
            Exit::Code(libc::WEXITSTATUS(wait_status))
        }
    }

    /// A description for people, such as `exit status 3`.
    pub(crate) fn text(self) -> String {
        match self {
            Exit::Code(0) => "finished".to_owned(),
            Exit::Code(code) => format!("exit status {code}"),
            Exit::Signal(signal) => format!("killed by {}", signal_name(signal)),
        }
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT (Ctrl-C)",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// One process image that recorded events.
#[derive(Serialize, Debug)]
struct Process {
    pid: u32,
    /// The name of its trace file in the run folder.
    trace: String,
    /// The trace's own info object: ppid, argv, exe, env, host.
    #[serde(flatten)]
    info: BTreeMap<String, Value>,
    /// The rank in a distributed job, as the process gave it to PyTorch (`torch.distributed`).
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    /// The number of ranks in the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    world_size: Option<u32>,
    /// When the recording began: at the first event.
    recording_started_ns: u64,
    ended_ns: u64,
    /// `exited`, `replaced by exec`, `detached` or `still running`.
    end_reason: &'static str,
    /// How the process ended. Absent when it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit: Option<Exit>,
    /// The number of events taken from the process.
    events: u64,
    /// The number of events that have a sequence number and never arrived.
    lost: u64,
    /// The number of events that are out of order in the trace.
    late: u64,
    /// The number of events that did not reach the file.
    unwritten: u64,
    /// The size of the trace file in bytes.
    bytes: u64,
    /// The number of malformed records in the shared memory of the process.
    corrupt: u64,
    /// The number of definitions that were refused because they were malformed or over the limit.
    definitions_refused: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    write_error: Option<String>,
    /// The counters of the process that are not 0.
    counters: BTreeMap<String, u64>,
    notices: Vec<Notice>,
}

/// Sums over all processes.
#[derive(Serialize, Default, Debug)]
struct Losses {
    events: u64,
    lost: u64,
    late: u64,
    unwritten: u64,
    dropped: u64,
}

/// Something to report at the end of the run, even with `--quiet`.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Problem {
    /// A part of the recording could not be written.
    Error { text: String, help: String },
    /// A part of the command could not be recorded.
    Warning { text: String, help: Option<&'static str> },
    /// Something that adds to the messages before.
    Note { text: String, help: Option<&'static str> },
}

impl Problem {
    /// Prints the problem on stderr.
    pub(crate) fn print(&self) {
        match self {
            Problem::Error { text, help } => message::error(text, Some(help)),
            Problem::Warning { text, help } => {
                message::warning(text);
                help.iter().for_each(|help| message::help(help));
            }
            Problem::Note { text, help } => {
                message::note(text);
                help.iter().for_each(|help| message::help(help));
            }
        }
    }
}

/// The data for the messages at the end of the run.
#[derive(Debug)]
pub(crate) struct Summary {
    /// The number of process images that recorded events.
    pub(crate) processes: usize,
    /// A description of how the command ended.
    pub(crate) ending: String,
    /// The problems of the run.
    pub(crate) problems: Vec<Problem>,
}

impl Manifest {
    /// The manifest of a run that is about to begin.
    ///
    /// `start_ns` is in nanoseconds since the Unix epoch. `simulated` are the GPUs of a dry run.
    pub(crate) fn begin(command: &[OsString], start_ns: u64, simulated: Option<SimulatedGpus>) -> Manifest {
        Manifest {
            version: VERSION,
            memtrace: env!("CARGO_PKG_VERSION"),
            command: command.iter().map(|a| a.to_string_lossy().into_owned()).collect(),
            directory: std::env::current_dir().map(|d| d.to_string_lossy().into_owned()).unwrap_or_default(),
            host: host::name(),
            machine: Host::read(),
            job: None,
            state: RunState::Running,
            started: host::rfc3339(start_ns),
            started_ns: start_ns,
            ended: None,
            ended_ns: None,
            attached: None,
            pid: None,
            exit: None,
            processes: Vec::new(),
            losses: Losses::default(),
            refused: BTreeMap::new(),
            unrecordable: Vec::new(),
            unlisted: 0,
            unchecked: 0,
            simulated,
            limit_bytes: None,
            discovery: None,
        }
    }

    /// Stores what is known of a dry run that ended: the exception that ended the program, and cuDNN's workspaces.
    pub(crate) fn set_simulated(&mut self, exception: Option<ValueException>, workspaces: Option<EstimatedWorkspaces>) {
        if let Some(simulated) = &mut self.simulated {
            (simulated.exception, simulated.workspaces) = (exception, workspaces);
        }
    }

    /// Stores how much memory of each GPU the command sees, in bytes.
    pub(crate) fn set_limit(&mut self, bytes: Option<u64>) {
        self.limit_bytes = bytes;
    }

    /// Stores the job's id that the user gave.
    pub(crate) fn set_job(&mut self, job: Option<String>) {
        self.job = job;
    }

    /// Stores how memtrace attached to a process that ran already.
    pub(crate) fn set_attached(&mut self, attached: Attached) {
        self.attached = Some(attached);
    }

    /// Stores the command's process id after its start.
    pub(crate) fn set_started(&mut self, pid: u32) {
        self.pid = Some(pid);
    }

    /// Stores the processes that could not be recorded: those that were found from outside, and those that reported
    /// themselves. `watched` is `None` when nothing watched the processes.
    pub(crate) fn set_unrecordable(&mut self, watched: Option<Watched>, reports: Vec<Unrecorded>) {
        self.discovery = watched.as_ref().map(|watched| watched.discovery);
        let watched = watched.unwrap_or_default();
        self.unrecordable = unrecordable::merge(watched.unrecordable, reports);
        (self.unlisted, self.unchecked) = (watched.unlisted, watched.unchecked);
    }

    /// Why nothing was recorded, in one line.
    pub(crate) fn reason_for_nothing(&self) -> String {
        let refused: u64 = self.refused.values().sum();
        let count = (self.unrecordable.len() as u64).saturating_add(self.unlisted).saturating_add(refused);
        match (count, self.unchecked, self.discovery) {
            (0, 0, Some(Discovery::KernelReports)) => "no process allocated GPU memory".to_owned(),
            (0, ..) => "no process that memtrace can record allocated GPU memory".to_owned(),
            (1, ..) => "1 process could not be recorded".to_owned(),
            (count, ..) => format!("{count} processes could not be recorded"),
        }
    }

    /// What the end-of-run summary adds if nothing was recorded: the processes of which no problem speaks.
    pub(crate) fn notes_for_nothing(&self) -> Vec<Problem> {
        let without_cuda: Vec<_> = self.unrecordable.iter().filter(|process| !process.uses_cuda).cloned().collect();
        let groups = unrecordable::by_obstacle(&without_cuda);
        let mut notes: Vec<Problem> = groups
            .into_iter()
            .map(|(obstacle, names)| Problem::Note {
                text: format!("cannot record {names}: {}", obstacle.text()),
                help: Some(obstacle.fix()),
            })
            .collect();
        let mut note = |count: u64, one: &str, many: &str| {
            if count > 0 {
                let text = if count == 1 { format!("1 {one}") } else { format!("{count} {many}") };
                notes.push(Problem::Note { text, help: None });
            }
        };
        note(self.unlisted, "more process cannot be recorded", "more processes cannot be recorded");
        note(
            self.unchecked,
            "program ended before memtrace could check whether it can record it",
            "programs ended before memtrace could check whether it can record them",
        );
        notes
    }

    /// Completes the manifest after the command has ended and all traces are written. `wait_status` is the command's
    /// status word of `wait(2)`.
    pub(crate) fn finish(&mut self, wait_status: i32, outcome: Outcome) -> Summary {
        let exit = Exit::of(wait_status);
        self.exit = Some(exit);
        self.finish_with(exit.text(), outcome)
    }

    /// Completes the manifest of a process that memtrace had attached to. It may still run.
    pub(crate) fn finish_attached(&mut self, outcome: Outcome) -> Summary {
        let recorded = outcome.recorded.iter().find(|one| Some(one.pid) == self.pid);
        self.exit = recorded.and_then(|one| one.wait_status).map(Exit::of);
        let is_detached = recorded.is_some_and(|one| one.reason == "detached");
        let ending = self.exit.map_or_else(|| if is_detached { "detached" } else { "ended" }.to_owned(), Exit::text);
        self.finish_with(ending, outcome)
    }

    fn finish_with(&mut self, ending: String, outcome: Outcome) -> Summary {
        let end_ns = host::epoch_ns();
        self.state = RunState::Ended;
        self.ended = Some(host::rfc3339(end_ns));
        self.ended_ns = Some(end_ns);
        let mut written: BTreeMap<String, Written> = outcome.written.into_iter().map(|w| (w.file.clone(), w)).collect();
        self.processes = outcome.recorded.into_iter().map(|r| process(&mut written, r)).collect();
        self.processes.sort_by_key(|p| p.recording_started_ns);
        self.losses = Losses {
            events: self.processes.iter().map(|p| p.events).sum(),
            lost: self.processes.iter().map(|p| p.lost).sum(),
            late: self.processes.iter().map(|p| p.late).sum(),
            unwritten: self.processes.iter().map(|p| p.unwritten).sum(),
            // The traced process itself writes this counter, so it may hold any value.
            dropped: self
                .processes
                .iter()
                .filter_map(|p| p.counters.get(Counter::EventsDropped.name()))
                .fold(0, |sum, count| sum.saturating_add(*count)),
        };
        let refused: BTreeMap<RefusalReason, u64> = outcome.refused.into_iter().collect();
        let problems = self.problems(&refused);
        self.refused = refused.iter().map(|(reason, count)| (reason.text().to_owned(), *count)).collect();
        Summary { processes: self.processes.len(), ending, problems }
    }

    fn problems(&self, refused: &BTreeMap<RefusalReason, u64>) -> Vec<Problem> {
        let mut problems = Vec::new();
        let failed: Vec<&Process> = self.processes.iter().filter(|p| p.write_error.is_some()).collect();
        if let Some(first) = failed.first() {
            let unwritten: u64 = failed.iter().map(|p| p.unwritten).sum();
            problems.push(Problem::Error {
                text: format!(
                    "cannot write {} of {} traces: {}; {unwritten} events are missing, the events before are intact",
                    failed.len(),
                    self.processes.len(),
                    first.write_error.as_deref().unwrap_or_default(),
                ),
                help: "free disk space, or choose another folder with -o".to_owned(),
            });
        }
        let cuda: Vec<_> = self.unrecordable.iter().filter(|process| process.uses_cuda).cloned().collect();
        for (obstacle, names) in unrecordable::by_obstacle(&cuda) {
            let lost = cuda.iter().filter(|process| process.obstacle == obstacle);
            let lost = lost.fold(0u64, |sum, process| sum.saturating_add(process.lost_events));
            let lost = match lost {
                0 => String::new(),
                1 => "; at least 1 event is lost".to_owned(),
                lost => format!("; at least {lost} events are lost"),
            };
            problems.push(Problem::Warning {
                text: format!("cannot record {names}, which used CUDA: {}{lost}", obstacle.text()),
                help: Some(obstacle.fix()),
            });
        }
        for (reason, count) in refused {
            let requests = if *count == 1 { "request" } else { "requests" };
            problems.push(Problem::Warning {
                text: format!("refused {count} recording {requests}: {}", reason.text()),
                help: Some(reason.fix()),
            });
        }
        let running = self.processes.iter().filter(|p| p.end_reason == "still running").count();
        if running > 0 && self.attached.is_none() {
            let text = match running {
                1 => "1 process outlived the command; its recording ends with the command".to_owned(),
                n => format!("{n} processes outlived the command; their recordings end with the command"),
            };
            problems.push(Problem::Warning { text, help: None });
        }
        problems
    }

    /// Writes `run.json` into `folder`. The new file replaces the old one only when it is complete.
    pub(crate) fn write(&self, folder: &RunFolder) -> io::Result<()> {
        let mut text = printable::json(serde_json::to_string_pretty(self)?);
        text.push('\n');
        let mut new = folder.create_atomic(MANIFEST_FILE)?;
        new.file().write_all(text.as_bytes())?;
        new.commit()
    }
}

fn process(written: &mut BTreeMap<String, Written>, r: Recorded) -> Process {
    let written = written.remove(&r.file);
    let mut info: BTreeMap<String, Value> = match r.info {
        Value::Object(map) => map.into_iter().collect(),
        _ => BTreeMap::new(),
    };
    info.remove("pid");
    let (bytes, unwritten, write_error) = written.map_or((0, r.events, None), |w| (w.bytes, w.unwritten, w.error));
    Process {
        pid: r.pid,
        trace: r.file,
        info,
        rank: r.rank.map(|(rank, _)| rank),
        world_size: r.rank.map(|(_, size)| size),
        recording_started_ns: r.start_ns,
        ended_ns: r.end_ns,
        end_reason: r.reason,
        exit: r.wait_status.map(Exit::of),
        events: r.events,
        lost: r.lost,
        late: r.late,
        unwritten,
        bytes,
        corrupt: r.corrupt,
        definitions_refused: r.definitions_refused,
        write_error,
        counters: counters_by_name(&r.counters),
        notices: r.notices,
    }
}

fn counters_by_name(counters: &CounterValues) -> BTreeMap<String, u64> {
    let all = counters.iter().enumerate().filter(|(_, v)| **v != 0);
    all.map(|(i, v)| (Counter::from_index(i).map_or_else(|| format!("counter_{i}"), |c| c.name().to_owned()), *v))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::unrecorded::Reason;

    #[test]
    fn what_is_missing_is_named_where_nothing_was_recorded() {
        let mut manifest = Manifest::begin(&["a".into()], 1, None);
        manifest.set_unrecordable(None, Vec::new());
        assert_eq!(manifest.reason_for_nothing(), "no process that memtrace can record allocated GPU memory");
        let complete = Watched { discovery: Discovery::KernelReports, ..Watched::default() };
        manifest.set_unrecordable(Some(complete.clone()), Vec::new());
        assert_eq!(manifest.reason_for_nothing(), "no process allocated GPU memory");
        manifest.set_unrecordable(Some(Watched { unchecked: 2, ..complete.clone() }), Vec::new());
        assert_eq!(manifest.reason_for_nothing(), "no process that memtrace can record allocated GPU memory");
        let [Problem::Note { text, .. }] = &manifest.notes_for_nothing()[..] else { panic!("{manifest:?}") };
        assert_eq!(text, "2 programs ended before memtrace could check whether it can record them");
        let report = Unrecorded { pid: 7, id: 1, reason: Reason::AddressSpace, events: 8, program: "/bin/a".into() };
        manifest.set_unrecordable(Some(complete), vec![report]);
        assert_eq!(manifest.reason_for_nothing(), "1 process could not be recorded");
        let summary = manifest.finish(0, Outcome::default());
        let [Problem::Warning { text, .. }] = &summary.problems[..] else { panic!("{summary:?}") };
        let reason = Reason::AddressSpace.text();
        assert_eq!(*text, format!("cannot record a (7), which used CUDA: {reason}; at least 8 events are lost"));
        // The analysis reads the same.
        let folder = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(folder.path()).unwrap();
        manifest.write(&folder).unwrap();
        let read = memtrace_analysis::load::Manifest::read(&folder).unwrap().unwrap();
        assert_eq!(read.state, Some(memtrace_analysis::load::RunState::Ended));
        let [process] = &read.unrecordable[..] else { panic!("{read:?}") };
        assert_eq!((process.pid, &*process.reason, process.lost_events), (7, reason, 8));
    }

    #[test]
    fn a_manifest_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path()).unwrap();
        let mut manifest = Manifest::begin(&["a".into(), "b c".into()], 1_000_000_000, None);
        manifest.write(&folder).unwrap();
        let read = || serde_json::from_slice::<Value>(&std::fs::read(dir.path().join("run.json")).unwrap()).unwrap();
        assert_eq!(read()["state"], "running");
        manifest.set_started(7);
        let summary = manifest
            .finish(libc::SIGKILL, Outcome { refused: vec![(RefusalReason::OtherUser, 2)], ..Outcome::default() });
        manifest.write(&folder).unwrap();
        let run = read();
        assert_eq!(run["state"], "ended");
        assert_eq!(run["exit"]["signal"], 9);
        assert_eq!(run["command"][1], "b c");
        assert_eq!(run["refused"]["process of another user"], 2);
        // The analysis must be able to read this file.
        let read = memtrace_analysis::load::Manifest::read(&folder).unwrap().unwrap();
        assert_eq!((read.pid, read.exit.signal), (Some(7), Some(9)));
        assert_eq!(read.started_ns, Some(1_000_000_000));
        assert_eq!(summary.ending, "killed by SIGKILL");
        let [Problem::Warning { text, help: Some(_) }] = &summary.problems[..] else { panic!("{summary:?}") };
        assert_eq!(text, "refused 2 recording requests: process of another user");
    }
}
