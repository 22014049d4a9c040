//! One recorded process: its recording and its identity.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memtrace_trace::file::Definitions;
use serde::Deserialize;

use super::manifest::{Exit, Manifest, ManifestIndex};
use super::rank::{RankSource, RankVariables};
use crate::recording::Recording;
use crate::trace_index::TraceIndex;

/// Facts about a process that the recorder stored. Every field can be missing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    /// The process id.
    pub pid: u32,
    /// The parent's process id.
    pub ppid: Option<u32>,
    /// The command line.
    pub argv: Vec<String>,
    /// The recorded environment variables.
    pub env: BTreeMap<String, String>,
    /// The host's name.
    pub host: Option<String>,
    /// The folder it ran in.
    pub cwd: Option<PathBuf>,
}

/// A recorded process.
pub struct Process {
    path: PathBuf,
    info: ProcessInfo,
    exit: Exit,
    recording: Box<dyn Recording>,
    trace_index: OnceLock<TraceIndex>,
    in_set: Option<SnapshotInSet>,
}

/// The place of a snapshot among several that were opened together.
struct SnapshotInSet {
    name: String,
    rank: Option<(u32, RankSource)>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("path", &self.path).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Process {
    /// Makes a process from its recording and its entry in the run's manifest, if there is one. Facts of the recording
    /// take precedence.
    pub fn new(path: &Path, recording: Box<dyn Recording>, manifest: &Manifest) -> Process {
        Process::of(path, recording, &ManifestIndex::of(manifest))
    }

    /// [`Self::new`] for one of many processes.
    pub(super) fn of(path: &Path, recording: Box<dyn Recording>, index: &ManifestIndex<'_>) -> Process {
        let manifest = index.manifest;
        let mut info: ProcessInfo = serde_json::from_str(recording.info()).unwrap_or_default();
        if info.pid == 0 {
            info.pid = pid_of_file_name(path).unwrap_or(0);
        }
        let recorded = recording.end().and_then(|e| e.wait_status).map(Exit::from_wait_status).unwrap_or_default();
        let mut exit = recorded;
        if let Some(entry) = index.process(info.pid) {
            if info.argv.is_empty() {
                info.argv.clone_from(&entry.argv);
            }
            for (name, value) in &entry.env {
                info.env.entry(name.clone()).or_insert_with(|| value.clone());
            }
            info.ppid = info.ppid.or(entry.ppid);
            if exit == Exit::default() {
                exit = entry.exit;
            }
        }
        if exit == Exit::default() && manifest.pid == Some(info.pid) {
            exit = manifest.exit;
        }
        if info.cwd.is_none() {
            info.cwd = manifest.directory.as_ref().map(PathBuf::from);
        }
        Process { path: path.to_owned(), info, exit, recording, trace_index: OnceLock::new(), in_set: None }
    }

    /// The same process as one of several snapshots, with its path from the folder that has all of them. A number in
    /// the file's name is no process id if it is the rank.
    pub(super) fn in_snapshot_set(mut self, name: String, rank: Option<(u32, RankSource)>) -> Process {
        if rank.is_some() {
            self.info.pid = 0;
        }
        Process { in_set: Some(SnapshotInSet { name, rank }), ..self }
    }

    /// The name of the trace, unique in its run: that of the file, or its path from the folder that has all snapshots.
    pub fn trace_name(&self) -> Cow<'_, str> {
        match &self.in_set {
            Some(in_set) => in_set.name.as_str().into(),
            None => self.path.file_name().unwrap_or_default().to_string_lossy(),
        }
    }

    /// The trace's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.info.pid
    }

    /// The identity of the process.
    pub fn info(&self) -> &ProcessInfo {
        &self.info
    }

    /// The folder it ran in; `None` if unknown.
    pub fn directory(&self) -> Option<&Path> {
        self.info.cwd.as_deref()
    }

    /// The devices and the event source of each. The first call makes one quick pass over the events.
    pub fn trace_index(&self) -> &TraceIndex {
        self.trace_index.get_or_init(|| TraceIndex::of(self.recording()))
    }

    /// How the process ended. Empty if unknown.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// The rank in a distributed job, and what it was read from: PyTorch, else the environment ([`RankVariables`]).
    /// That of a snapshot comes from the names or the order of the files.
    pub fn rank_and_source(&self) -> Option<(u32, RankSource)> {
        let reported = self.definitions().rank.map(|(rank, _)| (rank, RankSource::Torch));
        let of_file = || self.in_set.as_ref()?.rank;
        reported.or_else(of_file).or_else(|| RankVariables::of(&self.info.env)?.rank_and_source())
    }

    /// The rank of [`Self::rank_and_source`].
    pub fn rank(&self) -> Option<u32> {
        self.rank_and_source().map(|(rank, _)| rank)
    }

    /// The rank on its host; `None` if unknown.
    pub fn local_rank(&self) -> Option<u32> {
        RankVariables::of(&self.info.env)?.local_rank
    }

    /// The number of ranks of the job; `None` if unknown.
    pub fn world_size(&self) -> Option<u32> {
        let reported = self.definitions().rank.map(|(_, size)| size);
        reported.or_else(|| RankVariables::of(&self.info.env)?.world_size)
    }

    /// The number of ranks on its host; `None` if unknown.
    pub fn local_world_size(&self) -> Option<u32> {
        RankVariables::of(&self.info.env)?.local_world_size
    }

    /// The number of its host in the job; `None` if unknown.
    pub fn node_rank(&self) -> Option<u32> {
        RankVariables::of(&self.info.env)?.node_rank
    }

    /// The events and their definitions.
    pub fn recording(&self) -> &dyn Recording {
        &*self.recording
    }

    /// The definitions: frames, stacks, contexts and others.
    pub fn definitions(&self) -> &Definitions {
        self.recording.definitions()
    }
}

fn pid_of_file_name(path: &Path) -> Option<u32> {
    path.file_stem()?.to_str()?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
