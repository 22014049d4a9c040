//! `run.json`: what the launcher records about a run, written through [`Manifest`]. Every field can be absent, because
//! a run folder can outlive the launcher that was writing it.

use memtrace_trace::file::untrusted;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::folder::RunFolder;

/// The manifest's file name in the run folder.
pub const MANIFEST_FILE: &str = "run.json";
/// The largest manifest that is read, in bytes: about that of a run with 65,536 processes.
const MAX_FILE_SIZE: u64 = 256 << 20;

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Exit {
    /// The exit status. Absent if the process did not exit, or if its end is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The number of the signal that ended the process. Absent if no signal ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

impl Exit {
    /// Takes the status word of `waitpid`.
    pub fn from_wait_status(status: i32) -> Exit {
        // As WIFEXITED, WEXITSTATUS and WTERMSIG of wait(2).
        match status & 0x7f {
            0 => Exit { code: Some((status >> 8) & 0xff), signal: None },
            signal => Exit { code: None, signal: Some(signal) },
        }
    }

    /// Whether the process succeeded; `None` if it is unknown how it ended.
    pub fn success(&self) -> Option<bool> {
        match (self.code, self.signal) {
            (_, Some(_)) => Some(false),
            (Some(code), None) => Some(code == 0),
            (None, None) => None,
        }
    }
}

/// A process of the run.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ManifestProcess {
    /// The process id.
    pub pid: u32,
    /// The parent's process id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ppid: Option<u32>,
    /// The command line.
    pub argv: Vec<String>,
    /// The recorded environment variables: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `SLURM_*`, ...
    pub env: BTreeMap<String, String>,
    /// How it ended, if the launcher saw it.
    pub exit: Exit,
    /// The trace's file name in the run folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

/// The content of `run.json`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Manifest {
    /// The version of memtrace that recorded the run.
    pub memtrace: String,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The folder it was started in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The host's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The process id of the command itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Start time of the command, in nanoseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// End time of the command, in nanoseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
    /// How the command ended.
    pub exit: Exit,
    /// Every process that recorded anything, and other processes of interest.
    pub processes: Vec<ManifestProcess>,
    /// Losses of the launcher itself, by name.
    pub losses: BTreeMap<String, u64>,
    /// Other fields that the launcher wrote. They are kept but not interpreted.
    #[serde(flatten)]
    pub extra: BTreeMap<String, serde_json::Value>,
}

impl Manifest {
    /// Reads the manifest of a run folder; `Ok(None)` if there is none.
    ///
    /// # Errors
    ///
    /// If the manifest cannot be read. That is only a problem for the report, because the traces beside it remain
    /// usable.
    pub fn read(folder: &RunFolder) -> Result<Option<Manifest>> {
        let fail = |e| Error::io(format!("cannot read {}", folder.path().join(MANIFEST_FILE).display()))(e);
        let text = match folder.open_file(MANIFEST_FILE).and_then(|file| untrusted::read(&file, MAX_FILE_SIZE)) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e)),
        };
        serde_json::from_slice(&text).map(Some).map_err(|e| fail(e.into()))
    }

    /// The entry of the process with this id.
    pub fn process(&self, pid: u32) -> Option<&ManifestProcess> {
        self.processes.iter().find(|p| p.pid == pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_decoded() {
        assert_eq!(Exit::from_wait_status(0), Exit { code: Some(0), signal: None });
        assert_eq!(Exit::from_wait_status(0x0100), Exit { code: Some(1), signal: None });
        assert_eq!(Exit::from_wait_status(9), Exit { code: None, signal: Some(9) });
        assert_eq!(Exit::from_wait_status(139), Exit { code: None, signal: Some(11) });
    }

    #[test]
    fn absent_and_unknown_fields_are_accepted() {
        let manifest: Manifest = serde_json::from_str(r#"{"command":["python","x.py"],"new":1}"#).unwrap();
        assert_eq!(manifest.command, ["python", "x.py"]);
        assert_eq!(manifest.exit.success(), None);
        assert_eq!(manifest.extra["new"], 1);
        assert_eq!(serde_json::from_str::<Manifest>("{}").unwrap(), Manifest::default());
    }
}
