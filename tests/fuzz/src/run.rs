//! A run folder with fuzzed files, processed by everything that reads it.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use memtrace_analysis::export::{SnapshotOptions, SourceAccess, snapshot};
use memtrace_analysis::{TextOptions, ToText, open_run, summarize};

/// The process's temporary folder, created once.
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// The folder, below `TMPDIR`, which `tests/fuzz/run` removes afterwards.
    pub fn here() -> &'static Folder {
        static FOLDER: OnceLock<Folder> = OnceLock::new();
        FOLDER.get_or_init(|| Folder(tempfile::tempdir().expect("a folder")))
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file in the folder, or in a folder below it, which it creates.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.path().join(name);
        if let Err(e) = fs::write(&path, bytes) {
            assert_eq!(e.kind(), io::ErrorKind::NotFound, "room for a file");
            fs::create_dir_all(path.parent().expect("a folder")).expect("room for a folder");
            fs::write(&path, bytes).expect("room for a file");
        }
    }
}

/// Opens, summarizes, reports and exports a run, as `memtrace` does after it. Requires that the counts add up.
pub fn analyse(folder: &Path) {
    let Ok(run) = open_run(folder) else { return };
    for process in run.processes() {
        let recording = process.recording();
        let mut read = 0;
        let lost = recording.stream(&mut |events| read += events.len() as u64);
        assert_eq!(read + lost.events, recording.event_count(), "every event is read or counted as lost");
        let (event_counts, not_counted) = recording.event_counts();
        assert!(not_counted.events > 0 || event_counts.events() == recording.event_count());
    }
    let Ok(summary) = summarize(&run, &mut |_| {}) else { return };
    let text = summary.to_text(&TextOptions::default());
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "nothing reaches a terminal but text");
    serde_json::to_string(&summary).expect("a summary is JSON");
    for process in run.processes() {
        let options = SnapshotOptions { sources: SourceAccess::of(&run, false), ..SnapshotOptions::default() };
        let _ = snapshot(process, &mut io::sink(), &options, &mut |_| {});
    }
}
