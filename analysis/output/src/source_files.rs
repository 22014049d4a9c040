//! Reads source lines of the traced program.
//!
//! A file is quoted only if it is certainly the one that ran: it exists and has not changed since the recording ended.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use memtrace_trace::file::untrusted;

use memtrace_input::load::Process;

/// The maximum size of a source file, in bytes. Real Python sources are smaller.
const MAX_FILE: u64 = 16 << 20;

/// The source files of one process.
#[derive(Debug)]
pub struct SourceFiles {
    directory: Option<PathBuf>,
    changed_before: Option<SystemTime>,
    is_disabled: bool,
    files: HashMap<Box<str>, Option<Vec<String>>>,
}

impl SourceFiles {
    /// Resolves relative names in `directory`. Files that changed after `recording_ended_ns` (since the epoch) are not
    /// quoted. `is_disabled`: quote nothing.
    pub fn new(directory: Option<&Path>, recording_ended_ns: Option<u64>, is_disabled: bool) -> SourceFiles {
        SourceFiles {
            directory: directory.map(Path::to_owned),
            changed_before: recording_ended_ns.map(|ns| SystemTime::UNIX_EPOCH + Duration::from_nanos(ns)),
            is_disabled,
            files: HashMap::new(),
        }
    }

    /// Takes the folder and the end of a process's recording. If the recording has no times, existing files are quoted
    /// whenever they changed.
    pub fn of(process: &Process) -> SourceFiles {
        let calibration = process.recording().calibration();
        let ended =
            process.trace_index().tick_range.filter(|(_, last)| *last > 0).map(|(_, last)| calibration.epoch_ns(last));
        SourceFiles::new(process.directory(), ended, false)
    }

    /// The line without surrounding white space; `None` if it is unknown or blank.
    pub fn line(&mut self, filename: &str, line: u32) -> Option<&str> {
        if self.is_disabled || line == 0 {
            return None;
        }
        let text = self.lines(filename)?.get(line as usize - 1)?.trim();
        (!text.is_empty()).then_some(text)
    }

    /// All lines of a file without trailing white space; `None` if the file is unknown.
    pub fn lines(&mut self, filename: &str) -> Option<&[String]> {
        if self.is_disabled {
            return None;
        }
        if !self.files.contains_key(filename) {
            let lines = self.read(filename);
            self.files.insert(filename.into(), lines);
        }
        self.files.get(filename)?.as_deref()
    }

    fn read(&self, filename: &str) -> Option<Vec<String>> {
        if filename.starts_with('<') {
            return None;
        }
        let path = Path::new(filename);
        let path = if path.is_relative() { self.directory.as_ref()?.join(path) } else { path.to_owned() };
        let file = untrusted::open(&path).ok()?;
        let metadata = file.metadata().ok()?;
        let unchanged = match (metadata.modified().ok(), self.changed_before) {
            (Some(modified), Some(limit)) => modified <= limit,
            _ => true,
        };
        if !unchanged {
            return None;
        }
        let text = untrusted::read(&file, MAX_FILE).ok()?;
        Some(String::from_utf8_lossy(&text).lines().map(|line| line.trim_end().to_owned()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_from_unchanged_files_only() {
        let dir = std::env::temp_dir().join(format!("memtrace-sources-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("x.py"), "a = 1\n    return f(x)  \n\n").unwrap();
        let mut sources = SourceFiles::new(Some(&dir), None, false);
        assert_eq!(sources.line("x.py", 2), Some("return f(x)"));
        assert_eq!(sources.line("x.py", 3), None);
        assert_eq!(sources.lines("x.py").unwrap()[1], "    return f(x)");
        assert_eq!(sources.line("x.py", 9), None);
        assert_eq!(sources.line("<string>", 1), None);
        assert_eq!(SourceFiles::new(Some(&dir), Some(1), false).line("x.py", 2), None);
        assert_eq!(SourceFiles::new(None, None, false).line("x.py", 2), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
