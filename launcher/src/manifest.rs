//! The manifest of a run while the launcher fills it in, and what the end-of-run messages take from it.
//!
//! `run.json` is written when the run begins, so that a killed launcher leaves one, and again when the run ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;

use memtrace_analysis::RunFolder;
use memtrace_analysis::load::{
    AttachedRun, Discovery, Exit, MANIFEST_VERSION, Manifest, ManifestProcess, RunState, SimulatedGpus,
};
use memtrace_trace::counters::{Counter, CounterValues};
use memtrace_trace::unrecorded::Unrecorded;
use serde_json::Value;

use crate::drain::refusal::RefusalReason;
use crate::drain::{Outcome, Recorded, Written};
use crate::host;
use crate::message;
use crate::process_watch::Watched;
use crate::simulation::Finished;
use crate::unrecordable::{self, UnrecordableProcess};

/// Why a recording ended whose process outlived the launcher.
const STILL_RUNNING: &str = "still running";
/// Why a recording ended whose process goes on without memtrace.
const DETACHED: &str = "detached";

/// A run that goes on, and its manifest.
#[derive(Debug)]
pub(crate) struct RunManifest {
    content: Manifest,
    /// The processes of the command that cannot be recorded, as far as they were found.
    unrecordable: Vec<UnrecordableProcess>,
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

impl RunManifest {
    /// The manifest of a run that is about to begin.
    ///
    /// `start_ns` is in nanoseconds since the Unix epoch. `simulated` are the GPUs of a dry run.
    pub(crate) fn begin(command: &[OsString], start_ns: u64, simulated: Option<SimulatedGpus>) -> RunManifest {
        let content = Manifest {
            version: MANIFEST_VERSION,
            memtrace: env!("CARGO_PKG_VERSION").to_owned(),
            command: command.iter().map(|a| a.to_string_lossy().into_owned()).collect(),
            directory: Some(std::env::current_dir().map(|d| d.to_string_lossy().into_owned()).unwrap_or_default()),
            host: Some(host::name()),
            machine: Some(host::machine()),
            state: Some(RunState::Running),
            started: Some(host::rfc3339(start_ns)),
            started_ns: Some(start_ns),
            simulated,
            ..Manifest::default()
        };
        RunManifest { content, unrecordable: Vec::new() }
    }

    /// Stores what is known of a dry run that ended. `was_ready` means that it was ended because it answered requests.
    pub(crate) fn set_simulated(&mut self, finished: Finished, was_ready: bool) {
        if let Some(simulated) = &mut self.content.simulated {
            simulated.was_ready = was_ready;
            (simulated.exception, simulated.workspaces) = (finished.exception, finished.workspaces);
            simulated.missing_functions = finished.missing_functions;
            simulated.guessed_sizes = finished.guessed_sizes;
            simulated.guessed_branches = finished.guessed_branches;
        }
    }

    /// Stores how much memory of each GPU the command sees, in bytes.
    pub(crate) fn set_limit(&mut self, bytes: Option<u64>) {
        self.content.limit_bytes = bytes;
    }

    /// Stores the job's id that the user gave.
    pub(crate) fn set_job(&mut self, job: Option<String>) {
        self.content.job = job;
    }

    /// Stores how memtrace attached to a process that ran already.
    pub(crate) fn set_attached(&mut self, attached: AttachedRun) {
        self.content.attached = Some(attached);
    }

    /// Stores the command's process id after its start.
    pub(crate) fn set_started(&mut self, pid: u32) {
        self.content.pid = Some(pid);
    }

    /// Stores the processes that could not be recorded: those that were found from outside, and those that reported
    /// themselves. `watched` is `None` when nothing watched the processes.
    pub(crate) fn set_unrecordable(&mut self, watched: Option<Watched>, reports: Vec<Unrecorded>) {
        self.content.discovery = watched.as_ref().map(|watched| watched.discovery);
        let watched = watched.unwrap_or_default();
        self.unrecordable = unrecordable::merge(watched.unrecordable, reports);
        self.content.unrecordable = self.unrecordable.iter().map(UnrecordableProcess::entry).collect();
        (self.content.unlisted, self.content.unchecked) = (watched.unlisted, watched.unchecked);
    }

    /// Why nothing was recorded, in one line.
    pub(crate) fn reason_for_nothing(&self) -> String {
        let run = &self.content;
        let refused: u64 = run.refused.values().sum();
        let count = (self.unrecordable.len() as u64).saturating_add(run.unlisted).saturating_add(refused);
        match (count, run.unchecked, run.discovery) {
            (0, 0, Some(Discovery::KernelReports)) => "no process allocated GPU memory".to_owned(),
            (0, ..) => "no process that memtrace can record allocated GPU memory".to_owned(),
            (1, ..) => "1 process could not be recorded".to_owned(),
            (count, ..) => format!("{count} processes could not be recorded"),
        }
    }

    /// The notes that the end-of-run summary adds if nothing was recorded: the processes that no problem names.
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
        note(self.content.unlisted, "more process cannot be recorded", "more processes cannot be recorded");
        note(
            self.content.unchecked,
            "program ended before memtrace could check whether it can record it",
            "programs ended before memtrace could check whether it can record them",
        );
        notes
    }

    /// Completes the manifest after the command has ended and all traces are written. `wait_status` is the command's
    /// status word of `wait(2)`.
    pub(crate) fn finish(&mut self, wait_status: i32, outcome: Outcome) -> Summary {
        self.content.exit = Exit::from_wait_status(wait_status);
        self.finish_with("ended", outcome)
    }

    /// Completes the manifest of a process that memtrace had attached to. It may still run.
    pub(crate) fn finish_attached(&mut self, outcome: Outcome) -> Summary {
        let recorded = outcome.recorded.iter().find(|one| Some(one.pid) == self.content.pid);
        self.content.exit = exit_of(recorded.and_then(|one| one.wait_status));
        let is_detached = recorded.is_some_and(|one| one.reason == DETACHED);
        self.finish_with(if is_detached { DETACHED } else { "ended" }, outcome)
    }

    /// Completes the manifest. `without_exit` says how the command ended if its exit is unknown.
    fn finish_with(&mut self, without_exit: &str, outcome: Outcome) -> Summary {
        let end_ns = host::epoch_ns();
        let mut written: BTreeMap<String, Written> = outcome.written.into_iter().map(|w| (w.file.clone(), w)).collect();
        let mut processes: Vec<ManifestProcess> =
            outcome.recorded.into_iter().map(|r| process(&mut written, r)).collect();
        processes.sort_by_key(|p| p.recording_started_ns);
        let refused: BTreeMap<RefusalReason, u64> = outcome.refused.into_iter().collect();
        let run = &mut self.content;
        run.state = Some(RunState::Ended);
        (run.ended, run.ended_ns) = (Some(host::rfc3339(end_ns)), Some(end_ns));
        run.losses = losses(&processes);
        run.refused = refused.iter().map(|(reason, count)| (reason.text().to_owned(), *count)).collect();
        run.processes = processes;
        let ending = run.exit.text().unwrap_or_else(|| without_exit.to_owned());
        Summary { processes: run.processes.len(), ending, problems: self.problems(&refused) }
    }

    fn problems(&self, refused: &BTreeMap<RefusalReason, u64>) -> Vec<Problem> {
        let mut problems = Vec::new();
        let failed: Vec<&ManifestProcess> = self.content.processes.iter().filter(|p| p.write_error.is_some()).collect();
        if let Some(first) = failed.first() {
            let unwritten: u64 = failed.iter().map(|p| p.unwritten).sum();
            problems.push(Problem::Error {
                text: format!(
                    "cannot write {} of {} traces: {}; {unwritten} events are missing, the events before are intact",
                    failed.len(),
                    self.content.processes.len(),
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
        let running = self.content.processes.iter().filter(|p| p.end_reason == STILL_RUNNING).count();
        if running > 0 && self.content.attached.is_none() {
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
        self.content.write(folder)
    }
}

/// How a process ended, if that is known.
fn exit_of(wait_status: Option<i32>) -> Exit {
    wait_status.map(Exit::from_wait_status).unwrap_or_default()
}

/// The sums over all processes, by name.
fn losses(processes: &[ManifestProcess]) -> BTreeMap<String, u64> {
    // The traced process itself writes its counters, so they may hold any value.
    let dropped = |process: &ManifestProcess| process.counters.get(Counter::EventsDropped.name()).copied();
    let sum = |count: &dyn Fn(&ManifestProcess) -> u64| {
        processes.iter().fold(0u64, |sum, process| sum.saturating_add(count(process)))
    };
    let sums = [
        ("events", sum(&|process| process.events)),
        ("lost", sum(&|process| process.lost)),
        ("late", sum(&|process| process.late)),
        ("unwritten", sum(&|process| process.unwritten)),
        ("dropped", sum(&|process| dropped(process).unwrap_or(0))),
    ];
    sums.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

fn process(written: &mut BTreeMap<String, Written>, recorded: Recorded) -> ManifestProcess {
    let written = written.remove(&recorded.file);
    // The facts that the process reported about itself. Those of the launcher count more.
    let mut process: ManifestProcess = match recorded.info {
        info @ Value::Object(_) => serde_json::from_value(info).unwrap_or_default(),
        _ => ManifestProcess::default(),
    };
    let (bytes, unwritten, write_error) =
        written.map_or((0, recorded.received.events, None), |w| (w.bytes, w.unwritten, w.error));
    process.pid = recorded.pid;
    process.trace = Some(recorded.file);
    process.rank = recorded.rank.map(|(rank, _)| rank);
    process.world_size = recorded.rank.map(|(_, size)| size);
    process.recording_started_ns = recorded.start_ns;
    process.ended_ns = recorded.end_ns;
    process.end_reason = recorded.reason.to_owned();
    process.exit = exit_of(recorded.wait_status);
    process.events = recorded.received.events;
    process.lost = recorded.received.lost;
    process.late = recorded.received.late;
    process.unwritten = unwritten;
    process.bytes = bytes;
    process.corrupt = recorded.received.corrupt;
    process.definitions_refused = recorded.received.definitions_refused;
    process.write_error = write_error;
    process.counters = counters_by_name(&recorded.counters);
    process.notices = recorded.notices;
    process
}

fn counters_by_name(counters: &CounterValues) -> BTreeMap<String, u64> {
    let all = counters.iter().enumerate().filter(|(_, v)| **v != 0);
    all.map(|(i, v)| (Counter::from_wire(i as u64).map_or_else(|| format!("counter_{i}"), |c| c.name().to_owned()), *v))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_analysis::load;
    use memtrace_trace::unrecorded::Reason;

    #[test]
    fn what_is_missing_is_named_where_nothing_was_recorded() {
        let mut manifest = RunManifest::begin(&["a".into()], 1, None);
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
        let read = load::Manifest::read(&folder).unwrap().unwrap();
        assert_eq!(read.state, Some(load::RunState::Ended));
        let [process] = &read.unrecordable[..] else { panic!("{read:?}") };
        assert_eq!((process.pid, &*process.reason, process.lost_events), (7, reason, 8));
    }

    #[test]
    fn a_manifest_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let folder = RunFolder::open(dir.path()).unwrap();
        let mut manifest = RunManifest::begin(&["a".into(), "b c".into()], 1_000_000_000, None);
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
        let read = load::Manifest::read(&folder).unwrap().unwrap();
        assert_eq!((read.pid, read.exit.signal), (Some(7), Some(9)));
        assert_eq!(read.started_ns, Some(1_000_000_000));
        assert_eq!(summary.ending, "killed by SIGKILL");
        let [Problem::Warning { text, help: Some(_) }] = &summary.problems[..] else { panic!("{summary:?}") };
        assert_eq!(text, "refused 2 recording requests: process of another user");
    }
}
