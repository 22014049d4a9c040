//! The source files of one process, and which of them may be quoted.

use std::collections::HashMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::content::{NoSource, read, resolve};
use super::hashes::SourceHashes;
use memtrace_input::RunFolder;
use memtrace_input::load::{Process, Run};

/// Which files are quoted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SourceAccess {
    /// None. No file is opened.
    #[default]
    Nothing,
    /// Those whose content the run proves to know. No other file is opened.
    Proven(Arc<SourceHashes>),
    /// Every file that the recording names and that has not changed since it ended: for a run that this machine has
    /// just recorded, or on the user's request.
    AllNamed,
}

impl SourceAccess {
    /// The access for a run. `is_requested` means that the user asks for the files that the recording names.
    pub fn of(run: &Run, is_requested: bool) -> SourceAccess {
        if is_requested {
            return SourceAccess::AllNamed;
        }
        // A trace or a snapshot inside a run folder has the hashes beside it.
        let path = run.path();
        let folder = if path.is_dir() { Some(path) } else { path.parent() };
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        let hashes = folder.and_then(|folder| RunFolder::open(folder).ok()).and_then(|folder| {
            // A damaged file proves nothing. The report says why lines are missing.
            SourceHashes::read(&folder).ok().flatten()
        });
        SourceAccess::Proven(Arc::new(hashes.unwrap_or_default()))
    }
}

impl SourceHashes {
    /// The hashes for `sources.json` of a run that this machine has just recorded.
    pub fn of_new_run<'a>(processes: impl IntoIterator<Item = &'a Process>) -> SourceHashes {
        SourceHashes::of_frames(processes, |process, metadata| is_unchanged(metadata, recording_end(process)))
    }
}

const CHANGED: NoSource = NoSource::MissingOrChanged;

/// The source files of one process.
#[derive(Debug)]
pub struct SourceFiles {
    directory: Option<PathBuf>,
    changed_before: Option<SystemTime>,
    access: SourceAccess,
    files: HashMap<Box<str>, Result<Vec<String>, NoSource>>,
}

/// When the recording of a process ended. `None` if it has no times. The recording claims this time, so a time that is
/// still to come counts as now.
fn recording_end(process: &Process) -> Option<SystemTime> {
    let calibration = process.recording().calibration();
    let (_, last) = process.trace_index().tick_range.filter(|(_, last)| *last > 0)?;
    let claimed = SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(calibration.epoch_ns(last)))?;
    Some(claimed.min(SystemTime::now()))
}

/// Whether a file is the one that ran: it has not changed since the recording ended. Without that time, it may be.
fn is_unchanged(metadata: &Metadata, recording_end: Option<SystemTime>) -> bool {
    match (metadata.modified().ok(), recording_end) {
        (Some(modified), Some(end)) => modified <= end,
        _ => true,
    }
}

impl SourceFiles {
    /// The files that frames of this process name. Relative names are resolved in the folder in which it ran.
    pub fn of(process: &Process, access: &SourceAccess) -> SourceFiles {
        SourceFiles {
            directory: process.directory().map(Path::to_owned),
            changed_before: recording_end(process),
            access: access.clone(),
            files: HashMap::new(),
        }
    }

    /// No files.
    pub fn none() -> SourceFiles {
        SourceFiles { directory: None, changed_before: None, access: SourceAccess::Nothing, files: HashMap::new() }
    }

    /// The line without surrounding white space; `None` if it is unknown or blank.
    pub fn line(&mut self, filename: &str, line: u32) -> Option<&str> {
        let index = (line as usize).checked_sub(1)?;
        let text = self.lines(filename).ok()?.get(index)?.trim();
        (!text.is_empty()).then_some(text)
    }

    /// All lines of a file without trailing white space.
    ///
    /// # Errors
    ///
    /// The reason why the file is not quoted.
    pub fn lines(&mut self, filename: &str) -> Result<&[String], NoSource> {
        if !self.files.contains_key(filename) {
            let lines = self.read(filename);
            self.files.insert(filename.into(), lines);
        }
        let lines = self.files.get(filename).ok_or(NoSource::MissingOrChanged)?;
        lines.as_deref().map_err(|reason| *reason)
    }

    fn read(&self, filename: &str) -> Result<Vec<String>, NoSource> {
        let path = resolve(filename, self.directory.as_deref()).ok_or(NoSource::MissingOrChanged)?;
        let content = match &self.access {
            SourceAccess::Nothing => return Err(NoSource::Unproven),
            SourceAccess::Proven(hashes) if !hashes.has(&path) => return Err(NoSource::Unproven),
            SourceAccess::Proven(hashes) => {
                read(&path).and_then(|(content, _)| hashes.proves(&path, &content).then_some(content).ok_or(CHANGED))?
            }
            SourceAccess::AllNamed => read(&path).and_then(|(content, metadata)| {
                is_unchanged(&metadata, self.changed_before).then_some(content).ok_or(CHANGED)
            })?,
        };
        Ok(String::from_utf8_lossy(&content).lines().map(|line| line.trim_end().to_owned()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_input::load::{Manifest, MemoryRecording};
    use memtrace_trace::event::{Action, Event};
    use memtrace_trace::file::Frame;

    /// A process in `directory` whose frames are in these files. Its only event is at `ended_ns` since the epoch.
    fn process(directory: &Path, files: &[&str], ended_ns: u64) -> Process {
        let mut recording = MemoryRecording {
            info: serde_json::json!({ "pid": 7, "cwd": directory }).to_string(),
            events: vec![Event { seq: 1, action: Action::Alloc, size: 512, ticks: ended_ns, ..Event::EMPTY }],
            ..MemoryRecording::default()
        };
        for file in files {
            let frame = Frame { name: "f".into(), filename: (*file).into(), line: 1, ..Default::default() };
            recording.definitions.frames.push(frame);
        }
        Process::new(&directory.join("7.mtr"), Box::new(recording), &Manifest::default())
    }

    /// An end that is still to come.
    const LATER: u64 = 1 << 62;
    const SOURCES: &str = super::super::SOURCES_FILE;

    /// Quotes line 1 of a file as an analysis of the run in `folder` does.
    fn quoted(folder: &Path, process: Process, file: &str, is_requested: bool) -> Result<String, NoSource> {
        let run = Run::from_processes(folder, Manifest::default(), vec![process]);
        let access = SourceAccess::of(&run, is_requested);
        SourceFiles::of(&run.processes()[0], &access).lines(file).map(|lines| lines[0].clone())
    }

    #[test]
    fn a_run_of_this_machine_quotes_its_files_until_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("x.py"), text).unwrap();
        write("a = 1  \n");
        let here = || process(dir.path(), &["x.py"], LATER);
        std::fs::write(dir.path().join(SOURCES), SourceHashes::of_new_run([&here()]).to_json()).unwrap();
        let run = |is_requested| quoted(dir.path(), here(), "x.py", is_requested);
        assert_eq!(run(false).as_deref(), Ok("a = 1"));
        // The trace of the folder is part of the run.
        assert_eq!(quoted(&dir.path().join("7.mtr"), here(), "x.py", false).as_deref(), Ok("a = 1"));
        write("a = 2\n");
        assert_eq!(run(false), Err(NoSource::MissingOrChanged));
        // Without the hash, the time of the change decides.
        assert_eq!(run(true).as_deref(), Ok("a = 2"));
        assert_eq!(
            quoted(dir.path(), process(dir.path(), &["x.py"], 1), "x.py", true),
            Err(NoSource::MissingOrChanged)
        );
    }

    #[test]
    fn a_foreign_run_quotes_nothing_unless_requested() {
        let (home, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let secret = home.path().join("settings.py");
        std::fs::write(&secret, "PASSWORD = 'correct horse'\n").unwrap();
        std::fs::write(home.path().join("id_rsa"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        let (secret, key) = (secret.to_str().unwrap(), home.path().join("id_rsa"));
        let key = key.to_str().unwrap();
        let of = |file: &str, is_requested| {
            quoted(foreign.path(), process(foreign.path(), &[secret, key], LATER), file, is_requested)
        };
        assert_eq!((of(secret, false), of(key, false)), (Err(NoSource::Unproven), Err(NoSource::Unproven)));
        // The author claims hashes, but does not know the content.
        let forged = format!("{{\"version\": 1, \"files\": {{\"{secret}\": \"{}\"}}}}", "0".repeat(64));
        std::fs::write(foreign.path().join(SOURCES), forged).unwrap();
        assert_eq!(of(secret, false), Err(NoSource::MissingOrChanged));
        assert_eq!(of(key, false), Err(NoSource::Unproven));
        // On request, source files are quoted, but no key.
        assert_eq!(of(secret, true).as_deref(), Ok("PASSWORD = 'correct horse'"));
        assert_eq!(of(key, true), Err(NoSource::NotSource));
    }

    #[test]
    fn files_that_are_no_source_are_not_hashed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.py"), "a = 1\n").unwrap();
        std::fs::write(dir.path().join("id_rsa"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        let json =
            SourceHashes::of_new_run([&process(dir.path(), &["x.py", "id_rsa", "<string>", "y.py"], LATER)]).to_json();
        assert!(json.contains("x.py") && !json.contains("id_rsa") && !json.contains("string"), "{json}");
        // A file that changed after the recording is not the one that ran.
        let json = SourceHashes::of_new_run([&process(dir.path(), &["x.py"], 1)]).to_json();
        assert!(!json.contains("x.py"), "{json}");
    }

    #[test]
    fn blank_and_unknown_lines_have_no_text() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.py"), "a = 1\n    return f(x)  \n\n").unwrap();
        let mut sources = SourceFiles::of(&process(dir.path(), &["x.py"], LATER), &SourceAccess::AllNamed);
        assert_eq!(sources.line("x.py", 2), Some("return f(x)"));
        for (file, line) in [("x.py", 0), ("x.py", 3), ("x.py", 9), ("<string>", 1)] {
            assert_eq!(sources.line(file, line), None, "{file}:{line}");
        }
        assert_eq!(sources.lines("x.py").unwrap()[1], "    return f(x)");
        assert_eq!(SourceFiles::none().line("x.py", 2), None);
    }
}
