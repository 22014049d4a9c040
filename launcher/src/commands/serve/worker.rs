//! The analysis of a served run, in a sandboxed worker: it writes the page, and then the data of windows, one at a
//! time.
//!
//! Both sides send messages: one byte for the kind, the length, and the content.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use memtrace_analysis::export::SourceAccess;
use memtrace_analysis::{HtmlOptions, PageWindow, Process, SummaryOptions, html_report, html_window, summarize_with};

use crate::message;
use crate::output::Stream;
use crate::sandbox::Worker;
use crate::signals::leave_end_to_parent;
use crate::terminal::ProgressLine;

/// The largest message that is read, in bytes. A page of 10 M events has 30 MB.
const LONGEST: u64 = 1 << 30;

/// The kinds of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Kind {
    /// The page, or the data of a window.
    Data = b'D',
    /// There is no such window.
    Nothing = b'N',
    /// An error, as text.
    Error = b'E',
    /// A request for a window.
    Window = b'W',
}

fn send(stream: &mut UnixStream, kind: Kind, content: &[u8]) -> io::Result<()> {
    stream.write_all(&[kind as u8])?;
    stream.write_all(&(content.len() as u64).to_le_bytes())?;
    stream.write_all(content)
}

/// The next message; `None` if the other side has ended.
fn receive(stream: &mut UnixStream) -> io::Result<Option<(Kind, Vec<u8>)>> {
    let mut head = [0; 9];
    match stream.read_exact(&mut head) {
        Err(e) if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => return Ok(None),
        result => result?,
    }
    let [kind, length @ ..] = head;
    let kinds = [Kind::Data, Kind::Nothing, Kind::Error, Kind::Window];
    let kind = kinds.into_iter().find(|one| *one as u8 == kind).ok_or(io::ErrorKind::InvalidData)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut content = Vec::new();
    stream.take(length).read_to_end(&mut content)?;
    Ok((content.len() as u64 == length).then_some((kind, content)))
}

fn encoded(window: PageWindow) -> [u8; 26] {
    let PageWindow { process, device, first, last } = window;
    let mut bytes = [0; 26];
    bytes[..8].copy_from_slice(&(process as u64).to_le_bytes());
    bytes[8..10].copy_from_slice(&device.to_le_bytes());
    bytes[10..18].copy_from_slice(&first.to_le_bytes());
    bytes[18..].copy_from_slice(&last.to_le_bytes());
    bytes
}

fn decoded(bytes: &[u8]) -> Option<PageWindow> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let device = i16::from_le_bytes(bytes.get(8..10)?.try_into().ok()?);
    Some(PageWindow { process: usize::try_from(number(0)?).ok()?, device, first: number(10)?, last: number(18)? })
}

/// The worker, as the server sees it.
#[derive(Debug)]
pub(super) struct Analysis {
    stream: UnixStream,
    /// `None` after its end, when `failure` says what ended it.
    worker: Option<Worker>,
    failure: String,
}

impl Analysis {
    /// Starts the worker. This process must have no other threads.
    pub(super) fn start(run: &Path) -> anyhow::Result<Analysis> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a pair of sockets")?;
        let run: PathBuf = run.to_owned();
        // The worker has a copy of the server's side too. It ends by the signal that follows the server's end.
        let work = move || {
            // Ctrl-C must not end it before the server, which would report that.
            leave_end_to_parent();
            super::super::exit_code(answer_windows(&run, theirs))
        };
        let worker = Worker::start(work).map_err(|(_, e)| anyhow!(e).context("cannot start the worker process"))?;
        Ok(Analysis { stream: ours, worker: Some(worker), failure: String::new() })
    }

    /// The page. `None` if the worker could not write it. Then it has printed why.
    pub(super) fn page(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let message = receive(&mut self.stream).context("cannot read the page from the worker process")?;
        Ok(message.filter(|(kind, _)| *kind == Kind::Data).map(|(_, page)| page))
    }

    /// The exit code of a worker that has ended early.
    pub(super) fn exit_code(mut self) -> u8 {
        match self.worker.take().map(Worker::wait) {
            Some(Ok(code)) => code,
            Some(Err(e)) => super::super::exit_code(Err(e.context("cannot read the run"))),
            None => super::super::exit_code(Err(anyhow!("cannot read the run"))),
        }
    }

    /// The data of a window. `None` if the page has no such window.
    pub(super) fn window(&mut self, window: PageWindow) -> anyhow::Result<Option<Vec<u8>>> {
        ensure!(self.worker.is_some(), "{}", self.failure);
        let answer = send(&mut self.stream, Kind::Window, &encoded(window)).and_then(|()| receive(&mut self.stream));
        match answer {
            Ok(Some((Kind::Data, data))) => Ok(Some(data)),
            Ok(Some((Kind::Nothing, _))) => Ok(None),
            Ok(Some((Kind::Error, text))) => bail!("{}", String::from_utf8_lossy(&text)),
            Ok(Some((Kind::Window, _)) | None) | Err(_) => {
                let reason = match self.worker.take().map(Worker::wait) {
                    Some(Err(e)) => format!("{e:#}"),
                    _ => "the worker process ended".to_owned(),
                };
                self.failure = format!("{reason}; start memtrace open --serve again");
                message::error(&format!("cannot read a window: {}", self.failure), None);
                bail!("{}", self.failure)
            }
        }
    }

    /// Ends the worker.
    pub(super) fn end(mut self) {
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
    }
}

/// The work of the worker.
fn answer_windows(run: &Path, mut stream: UnixStream) -> anyhow::Result<()> {
    let run = super::super::open(run)?;
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let summary = summarize_with(&run, &SummaryOptions::default(), &mut |progress| line.show(&progress))?;
    let processes: Vec<&Process> = run.processes().iter().collect();
    let options = HtmlOptions {
        device: None,
        sources: SourceAccess::of(&run, false),
        windows: Vec::new(),
        custom_rules: None,
        is_served: true,
    };
    let mut page = Vec::new();
    let drawn = html_report(&summary, &processes, &options, &mut page, &mut |progress| line.show(&progress));
    line.clear();
    drawn?;
    // A server that has ended needs no answer.
    let _ = send(&mut stream, Kind::Data, &page);
    drop(page);
    while let Ok(Some((Kind::Window, request))) = receive(&mut stream) {
        let Some(window) = decoded(&request) else { break };
        let mut data = Vec::new();
        let (kind, content) = match html_window(&summary, &processes, &options, window, &mut data, &mut |_| {}) {
            Ok(true) => (Kind::Data, data),
            Ok(false) => (Kind::Nothing, Vec::new()),
            Err(e) => (Kind::Error, e.to_string().into_bytes()),
        };
        if send(&mut stream, kind, &content).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        let window = PageWindow { process: 3, device: -1, first: 1 << 40, last: u64::MAX };
        send(&mut a, Kind::Window, &encoded(window)).unwrap();
        let (kind, content) = receive(&mut b).unwrap().unwrap();
        assert_eq!((kind, decoded(&content)), (Kind::Window, Some(window)));
        send(&mut a, Kind::Nothing, &[]).unwrap();
        a.write_all(&[Kind::Data as u8, 9, 0, 0, 0, 0, 0, 0, 0, 1]).unwrap();
        drop(a);
        assert_eq!(receive(&mut b).unwrap(), Some((Kind::Nothing, Vec::new())));
        assert_eq!(receive(&mut b).unwrap(), None, "a part of a message is no message");
    }
}
