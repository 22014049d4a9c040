//! Traces that a full disk has cut short. Each is left as it is, a sound trace up to that point, until the run has ended; then a small
//! reserve of space is given back, and there every one of them gets its end: what is missing, and why.

use std::fs::File;
use std::io::{self, Write};

use memtrace_analysis::RunFolder;
use memtrace_trace::counters::CounterValues;
use memtrace_trace::file::{self, End, Writer};

/// Enough for the ends of a few hundred traces, and for the manifest and the summary, which are written after them.
const RESERVE: u64 = 256 << 10;

/// Space kept for the last words.
#[derive(Debug)]
pub(super) struct Reserve(Option<File>);

impl Reserve {
    /// Takes the space; without it where there is none left, or where the file system promises none.
    pub(super) fn take(folder: &RunFolder) -> Reserve {
        Reserve(folder.reserve(RESERVE).ok())
    }

    /// Gives it back.
    pub(super) fn release(&mut self) {
        self.0 = None;
    }
}

/// A trace file: frames reach it whole or not at all.
#[derive(Debug)]
pub(super) struct TraceFile {
    file: File,
    bytes: u64,
}

impl TraceFile {
    /// A new, empty one.
    pub(super) fn new(file: File) -> TraceFile {
        TraceFile { file, bytes: 0 }
    }

    /// How long it is.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Write for TraceFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.file.write_all(bytes) {
            Ok(()) => {
                self.bytes += bytes.len() as u64;
                Ok(())
            }
            Err(e) => {
                // A part of it may be there. Where it cannot be taken back, readers see a cut tail.
                let _ = self.file.set_len(self.bytes);
                Err(e)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A trace that was cut short.
#[derive(Debug)]
pub(super) struct Cut {
    /// Where the file could not even be begun: what it should begin with.
    pub(super) unbegun: Option<String>,
    pub(super) counters: Option<Box<CounterValues>>,
    pub(super) end: End,
}

impl Cut {
    /// Writes the end; gives the file's length.
    pub(super) fn finish(&self, folder: &RunFolder, name: &str) -> anyhow::Result<u64> {
        let out = match &self.unbegun {
            Some(info) => {
                let mut writer = Writer::new(TraceFile::new(folder.create_in_place(name)?), info)?;
                if let Some(counters) = &self.counters {
                    writer.counters(counters)?;
                }
                writer.finish(&self.end)?
            }
            None => {
                let file = folder.append(name)?;
                let bytes = file.metadata()?.len();
                let mut out = TraceFile { file, bytes };
                file::end_after_failure(&mut out, self.counters.as_deref(), &self.end)?;
                out
            }
        };
        Ok(out.bytes)
    }
}
