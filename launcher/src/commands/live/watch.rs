//! Follows the traces of the selected recordings.

use std::collections::BTreeMap;
use std::path::PathBuf;

use memtrace_analysis::RunFolder;
use memtrace_analysis::report::{LIVE_VERSION, LiveProcess, LiveRecording, LiveReport, live_host};

use crate::host;
use crate::running::{self, Recording, Selected};

/// The selected recordings, and what was read of them.
#[derive(Debug)]
pub(crate) struct Watch {
    /// `None`: all recordings of this user.
    selected: Option<Selected>,
    /// By the path of the trace.
    processes: BTreeMap<PathBuf, LiveProcess>,
}

impl Watch {
    /// Selects the recording, or the process, that a PID or RUN argument names; all recordings without one.
    pub(crate) fn new(target: Option<&str>) -> anyhow::Result<Watch> {
        Ok(Watch { selected: target.map(running::select).transpose()?, processes: BTreeMap::new() })
    }

    /// Follows what is selected.
    pub(crate) fn of(selected: Selected) -> Watch {
        Watch { selected: Some(selected), processes: BTreeMap::new() }
    }

    /// The selection, with the last answer of its launcher.
    pub(crate) fn selected(&self) -> Option<&Selected> {
        self.selected.as_ref()
    }

    /// Reads what was recorded since the last call. Fails if the selected recording has ended.
    pub(crate) fn refresh(&mut self) -> anyhow::Result<LiveReport> {
        let mut recordings = Vec::new();
        match &mut self.selected {
            Some(selected) => {
                selected.recording.write_out()?;
                let selected = selected.clone();
                recordings.push(self.read(&selected.recording, selected.pid));
            }
            None => {
                for mut recording in running::recordings() {
                    // One that ends meanwhile is left out.
                    if recording.write_out().is_ok() {
                        recordings.push(self.read(&recording, None));
                    }
                }
            }
        }
        let is_listed =
            |path: &PathBuf| recordings.iter().any(|one: &(LiveRecording, Vec<PathBuf>)| one.1.contains(path));
        self.processes.retain(|path, _| is_listed(path));
        let recordings = recordings.into_iter().map(|(recording, _)| recording).collect();
        Ok(LiveReport { version: LIVE_VERSION.to_owned(), time_ns: host::epoch_ns(), recordings })
    }

    /// The figures of one recording, and the traces that were read.
    fn read(&mut self, recording: &Recording, pid: Option<u32>) -> (LiveRecording, Vec<PathBuf>) {
        let mut figures = LiveRecording {
            launcher_pid: recording.answer.pid,
            folder: recording.answer.folder.clone(),
            host: RunFolder::open(recording.folder()).ok().and_then(|folder| live_host(&folder)),
            ..LiveRecording::default()
        };
        let mut traces = Vec::new();
        for process in recording.answer.processes.iter().filter(|process| pid.is_none_or(|pid| process.pid == pid)) {
            let path = recording.folder().join(&process.trace);
            let read = match self.processes.get_mut(&path) {
                Some(known) => known.advance(),
                None => LiveProcess::open(&path).map(|opened| drop(self.processes.insert(path.clone(), opened))),
            };
            match (read, self.processes.get(&path)) {
                (Ok(()), Some(known)) => {
                    figures.processes.push(known.report());
                    figures.problems.extend(known.missing_state());
                }
                (Err(error), _) => figures.problems.push(error.to_string()),
                (Ok(()), None) => {}
            }
            traces.push(path);
        }
        figures.processes.sort_by_key(|process| (process.rank.unwrap_or(u32::MAX), process.pid));
        (figures, traces)
    }
}
