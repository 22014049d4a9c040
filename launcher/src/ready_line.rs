//! Finds the line of the command's output that says that it is ready (`memtrace dry-run --ready-line`).
//!
//! The standard output and error of the command are then pipes. A thread each copies the bytes on, unchanged and at
//! once, and examines every line. A write that fails closes the pipe, so that the command sees what it would see
//! without memtrace.

use std::io::{PipeReader, Read};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use regex_lite::Regex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::output::Stream;

/// The maximum length of a line in bytes. The rest of a longer line is not examined.
const MAX_LINE: usize = 64 << 10;
/// How often a thread looks whether the command has ended, in nanoseconds.
const INTERVAL_NS: i64 = 50_000_000;
/// How many reads may follow the end of the command: its other processes can write for ever.
const LAST_READS: usize = 64;

/// The threads that copy the output of a command.
#[derive(Debug)]
pub(crate) struct LineWatch {
    /// Set when a line has matched.
    pub(crate) found: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl LineWatch {
    /// Starts to copy what is written into the returned ends of pipes: the command's output and error.
    pub(crate) fn start(expression: &Regex) -> std::io::Result<(LineWatch, [Stdio; 2])> {
        let mut watch = LineWatch { found: Arc::default(), ended: Arc::default(), threads: Vec::new() };
        let mut pipe = |stream: Stream| -> std::io::Result<Stdio> {
            let (from, to) = std::io::pipe()?;
            let (found, ended) = (Arc::clone(&watch.found), Arc::clone(&watch.ended));
            let mut lines = Lines { expression: expression.clone(), line: Vec::new() };
            let copy = move || {
                copy(from, stream, &ended, |bytes| {
                    if lines.is_match(bytes) {
                        found.store(true, Ordering::Release);
                    }
                })
            };
            watch.threads.push(std::thread::Builder::new().name("ready-line".to_owned()).spawn(copy)?);
            Ok(Stdio::from(to))
        };
        let ends = [pipe(Stream::Stdout)?, pipe(Stream::Stderr)?];
        Ok((watch, ends))
    }

    /// Copies what a command that has ended wrote before.
    pub(crate) fn finish(self) {
        self.ended.store(true, Ordering::Release);
        self.threads.into_iter().for_each(|thread| _ = thread.join());
    }
}

/// The unfinished line of a stream.
struct Lines {
    expression: Regex,
    line: Vec<u8>,
}

impl Lines {
    /// Whether a line that these bytes, the next of the stream, end matches.
    fn is_match(&mut self, bytes: &[u8]) -> bool {
        let mut is_match = false;
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let left = MAX_LINE.saturating_sub(self.line.len());
            self.line.extend_from_slice(part.get(..left).unwrap_or(part));
            if part.ends_with(b"\n") || part.ends_with(b"\r") {
                is_match |= self.expression.is_match(String::from_utf8_lossy(&self.line).trim_end());
                self.line.clear();
            }
        }
        is_match
    }
}

fn copy(mut from: PipeReader, to: Stream, ended: &AtomicBool, mut observe: impl FnMut(&[u8])) {
    let (mut buffer, mut last_reads) = (vec![0; MAX_LINE], 0);
    let interval = Timespec { tv_sec: 0, tv_nsec: INTERVAL_NS };
    while last_reads < LAST_READS {
        let has_ended = ended.load(Ordering::Acquire);
        last_reads += usize::from(has_ended);
        match poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&interval)) {
            Ok(0) if has_ended => return,
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        let Ok(read @ 1..) = from.read(&mut buffer) else { return };
        let bytes = buffer.get(..read).unwrap_or_default();
        if to.pass_on(bytes).is_err() {
            return;
        }
        observe(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_matches_wherever_its_bytes_are_divided() {
        let lines = |expression: &str| Lines { expression: Regex::new(expression).unwrap(), line: Vec::new() };
        let mut startup = lines("Application startup complete");
        let parts = [&b"INFO: Application sta"[..], b"rtup compl", b"ete", b"\r\nmore"];
        assert_eq!(parts.map(|part| startup.is_match(part)), [false, false, false, true]);
        let mut ends = lines("^ready$");
        assert!(!ends.is_match(b"not ready\n") && ends.is_match(b"\xff\nready\n"));
        let mut long = lines("end");
        assert!(!long.is_match(&[b'x'; 2 * MAX_LINE]) && !long.is_match(b"end\n") && long.is_match(b"end\n"));
    }
}
