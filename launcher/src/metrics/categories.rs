//! Asks the process that finds out the memory by category ([`super::category_worker`]) every few seconds, from a thread
//! of its own.
//!
//! The process reads what traced processes have sent, so its answers are not trusted: their length and the series are
//! bounded. If it ends or gives a wrong answer, the metric ends.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::passes::Category;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::category_worker::{self, Line};
use super::figures::{ByCategory, Figures};
use crate::epoll::EventFd;
use crate::message;

/// The maximum number of traces that are followed. A request for so many fits into a pipe, so writing it does not
/// block.
const MAX_TRACES: usize = 256;
/// The maximum number of devices of a process.
const MAX_DEVICES: usize = 64;
/// The maximum length of a line of the process, in bytes: the devices, with all categories.
const MAX_LINE: usize = 1 << 17;
/// How often the thread checks whether a process allocates, while there is none.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum pause between two requests.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// How long an answer may take. The process has the lowest priority.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1800);

/// The thread that asks. It ends with [`CategoryReader::finish`].
#[derive(Debug)]
pub(crate) struct CategoryReader {
    stop: EventFd,
    thread: JoinHandle<()>,
}

impl CategoryReader {
    /// Starts to follow the traces of these processes, which are in this run folder.
    pub(crate) fn start(folder: &Path, figures: Figures) -> anyhow::Result<CategoryReader> {
        let folder = std::path::absolute(folder).context("cannot determine the absolute path of the run folder")?;
        let stop = EventFd::new().context("cannot create an event descriptor")?;
        let stopped = stop.try_clone().context("cannot create an event descriptor")?;
        let work = move || Thread { folder, figures, stopped, worker: None }.run();
        let thread = std::thread::Builder::new()
            .name("memtrace-category".into())
            .spawn(work)
            .context("cannot start a thread")?;
        Ok(CategoryReader { stop, thread })
    }

    /// Ends the process and the thread.
    pub(crate) fn finish(self) {
        self.stop.raise();
        _ = self.thread.join();
    }
}

struct Thread {
    folder: PathBuf,
    figures: Figures,
    stopped: EventFd,
    worker: Option<Worker>,
}

impl Thread {
    fn run(mut self) {
        let mut pause = CHECK_INTERVAL;
        while !self.is_stopped_within(pause) {
            let mut traces = self.figures.traces();
            traces.truncate(MAX_TRACES);
            if traces.is_empty() {
                (self.worker, pause) = (None, CHECK_INTERVAL);
                continue;
            }
            match self.read(&traces) {
                Ok(Some(next)) => pause = next.min(MAX_PAUSE),
                Ok(None) => return,
                Err(error) => {
                    self.figures.clear_by_category();
                    message::warning(&format!("the memory by category is no longer among the metrics: {error:#}"));
                    return;
                }
            }
        }
    }

    fn is_stopped_within(&self, pause: Duration) -> bool {
        let mut ready = [PollFd::new(&self.stopped, PollFlags::IN)];
        poll(&mut ready, Timespec::try_from(pause).ok().as_ref()).is_ok_and(|count| count > 0)
    }

    /// Reads the figures of these traces. Returns the pause until the next request, or `None` if the run ends.
    fn read(&mut self, traces: &[String]) -> anyhow::Result<Option<Duration>> {
        let Thread { folder, figures, stopped, worker } = self;
        if worker.is_none() {
            *worker = Some(Worker::start(folder)?);
        }
        let Some(worker) = worker else { return Ok(None) };
        worker.ask(traces)?;
        let until = Instant::now() + ANSWER_TIMEOUT;
        for _ in 0..=traces.len() {
            let Some(line) = worker.line(stopped, until)? else { return Ok(None) };
            match serde_json::from_slice(&line).context("its answer cannot be read")? {
                Line::Reading { trace, devices } => figures.set_by_category(&trace, checked(devices)?),
                Line::Done { pause_ms } => return Ok(Some(Duration::from_millis(pause_ms))),
            }
        }
        bail!("its answer does not end");
    }
}

/// The categories with these names.
fn checked(devices: BTreeMap<i16, BTreeMap<String, u64>>) -> anyhow::Result<ByCategory> {
    ensure!(devices.len() <= MAX_DEVICES, "a process has too many devices");
    let named = |(name, bytes): (String, u64)| Some((Category::named(&name)?, bytes));
    let known = devices.into_iter().map(|(device, bytes)| (device, bytes.into_iter().filter_map(named).collect()));
    Ok(known.collect())
}

/// The process, and what was read of its answer. The process ends with this value.
#[derive(Debug)]
struct Worker {
    child: Child,
    unread: Vec<u8>,
}

impl Worker {
    fn start(folder: &Path) -> anyhow::Result<Worker> {
        let child = category_worker::start(folder).context("cannot start the process that reads the traces")?;
        Ok(Worker { child, unread: Vec::new() })
    }

    fn ask(&mut self, traces: &[String]) -> anyhow::Result<()> {
        let mut request = serde_json::to_vec(traces)?;
        request.push(b'\n');
        match self.child.stdin.as_mut().context("no stdin")?.write_all(&request) {
            Ok(()) => Ok(()),
            Err(_) => self.ended(),
        }
    }

    /// The next line of the answer. `None` if the run ends.
    fn line(&mut self, stopped: &EventFd, until: Instant) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                return Ok(Some(std::mem::replace(&mut self.unread, rest)));
            }
            ensure!(self.unread.len() <= MAX_LINE, "its answer is too long");
            let stdout = self.child.stdout.as_mut().context("no stdout")?;
            let left = until.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "the process that reads the traces does not answer");
            let mut ready =
                [PollFd::new(stopped, PollFlags::IN), PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::IN)];
            // An interrupted call is repeated.
            let _ = poll(&mut ready, Timespec::try_from(left).ok().as_ref());
            let [is_stopped, is_readable] = ready.map(|fd| !fd.revents().is_empty());
            if is_stopped {
                return Ok(None);
            }
            if is_readable {
                let mut bytes = [0; 4096];
                let count = stdout.read(&mut bytes).context("cannot read its answer")?;
                if count == 0 {
                    self.ended()?;
                }
                self.unread.extend(bytes.iter().take(count));
            }
        }
    }

    /// The error of a process that has ended, or has closed its stdout.
    fn ended(&mut self) -> anyhow::Result<()> {
        // One that only closed it is ended first.
        let _ = self.child.kill();
        let status = self.child.wait()?;
        bail!("the process that reads the traces has ended: {status}")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// A thread whose worker is this shell script.
    fn asks(script: &str) -> Thread {
        let pipes = [Stdio::piped(), Stdio::piped()];
        let [stdin, stdout] = pipes;
        let child = Command::new("sh").args(["-c", script]).stdin(stdin).stdout(stdout).spawn().unwrap();
        let worker = Some(Worker { child, unread: Vec::new() });
        Thread { folder: PathBuf::new(), figures: Figures::default(), stopped: EventFd::new().unwrap(), worker }
    }

    fn traces() -> Vec<String> {
        vec!["7.mtr".to_owned()]
    }

    #[test]
    fn an_answer_is_taken_and_may_name_the_pause() {
        let line = |line| serde_json::to_string(&line).unwrap();
        let devices = BTreeMap::from([(0, BTreeMap::from([("input".to_owned(), 9)]))]);
        let reading = line(Line::Reading { trace: "7.mtr".to_owned(), devices });
        let mut thread =
            asks(&format!("read request; echo '{reading}'; echo '{}'", line(Line::Done { pause_ms: 7000 })));
        assert_eq!(thread.read(&traces()).unwrap(), Some(Duration::from_secs(7)));
        assert!(format!("{:#}", thread.read(&traces()).unwrap_err()).contains("has ended: exit status: 0"));
    }

    #[test]
    fn a_wrong_answer_is_an_error() {
        for (script, error) in [
            ("read request; exit 3", "has ended: exit status: 3"),
            ("kill -KILL $$", "has ended: signal: 9 (SIGKILL)"),
            ("read request; cat /dev/zero", "its answer is too long"),
            ("read request; yes '{\"reading\":{\"trace\":\"7.mtr\",\"devices\":{}}}'", "its answer does not end"),
            ("read request; echo '{\"done\":{\"pause_ms\":-1}}'", "its answer cannot be read"),
        ] {
            let text = format!("{:#}", asks(script).read(&traces()).unwrap_err());
            assert!(text.contains(error), "{script}: {text}");
        }
        let many = (0..=MAX_DEVICES as i16).map(|device| (device, BTreeMap::new())).collect();
        assert!(checked(many).unwrap_err().to_string().contains("too many devices"));
        let unknown = BTreeMap::from([(0, BTreeMap::from([("\"x".to_owned(), 1), ("gradient".to_owned(), 2)]))]);
        assert_eq!(checked(unknown).unwrap(), BTreeMap::from([(0, BTreeMap::from([(Category::Gradient, 2)]))]));
    }

    #[test]
    fn the_end_of_the_run_does_not_wait_for_an_answer() {
        let mut thread = asks("read request; exec sleep 1000");
        thread.stopped.raise();
        assert_eq!(thread.read(&traces()).unwrap(), None);
        assert!(thread.is_stopped_within(Duration::from_secs(1000)));
    }
}
