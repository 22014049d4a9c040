//! Completes traces that a full disk has truncated.
//!
//! Each such file stays as it is, a valid trace up to that point, until the run has ended. Then a small reserve of disk
//! space is released. It has space for an end record in each file: how many events are missing, and why.

use std::fs::File;
use std::io::{self, Write};

use memtrace_analysis::RunFolder;
use memtrace_trace::counters::CounterValues;
use memtrace_trace::file::{self, End, Writer};

/// The reserve in bytes. It suffices for the ends of a few hundred traces and for the manifest and the summary, which
/// are written later.
const RESERVE: u64 = 256 << 10;

/// Disk space that is reserved for the end records.
#[derive(Debug)]
pub(super) struct Reserve(Option<File>);

impl Reserve {
    /// Reserves the space. Continues without a reserve when the disk is full or the file system cannot reserve space.
    pub(super) fn take(folder: &RunFolder) -> Reserve {
        Reserve(folder.reserve(RESERVE).ok())
    }

    /// Releases the reserved space.
    pub(super) fn release(&mut self) {
        self.0 = None;
    }
}

/// A trace file to which each frame is written completely or not at all.
#[derive(Debug)]
pub(super) struct TraceFile {
    file: File,
    bytes: u64,
}

impl TraceFile {
    /// Wraps a new, empty file.
    pub(super) fn new(file: File) -> TraceFile {
        TraceFile { file, bytes: 0 }
    }

    /// Wraps a file of `bytes` bytes that is written on at its end.
    pub(super) fn appending(file: File, bytes: u64) -> TraceFile {
        TraceFile { file, bytes }
    }

    /// The length in bytes.
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
                // The file may contain a part of the frame. If it cannot be truncated, readers see a truncated tail.
                let _ = self.file.set_len(self.bytes);
                Err(e)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A truncated trace.
#[derive(Debug)]
pub(super) struct TruncatedTrace {
    /// The info object, when even the beginning of the file could not be written.
    pub(super) unwritten_info: Option<String>,
    pub(super) counters: Option<Box<CounterValues>>,
    pub(super) end: End,
}

impl TruncatedTrace {
    /// Writes the end record and returns the file's length in bytes.
    pub(super) fn finish(&self, folder: &RunFolder, name: &str) -> anyhow::Result<u64> {
        let out = match &self.unwritten_info {
            Some(info) => {
                let mut writer = Writer::new(TraceFile::new(folder.create_replacing(name)?), info)?;
                if let Some(counters) = &self.counters {
                    writer.counters(counters)?;
                }
                writer.finish(&self.end)?
            }
            None => {
                let file = folder.open_append(name)?;
                let bytes = file.metadata()?.len();
                let mut out = TraceFile { file, bytes };
                file::end_after_failure(&mut out, self.counters.as_deref(), &self.end)?;
                out
            }
        };
        Ok(out.bytes)
    }
}
