//! The process that finds out the memory by category: this program once more, under another name. It reads what the
//! traced processes have sent, so its memory is bounded, and its end does not end the launcher.
//!
//! Each line of its stdin lists traces. It follows these, and answers on stdout with a line for each trace that has new
//! figures, and with a last line. It ends with its stdin.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use memtrace_analysis::passes::Category;
use memtrace_analysis::report::{Advance, AnalysisPauses, LiveProcess};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::output::{Stream, pipe_to_launcher};
use crate::sandbox::{self, Priority};

/// The name of the process: its first argument.
const NAME: &str = "memtrace-categories";
/// The exit code if the request cannot be read, or the answer not be written.
const FAILED: u8 = 2;

/// The least pause between two analyses of a trace: if the program has run new code, and if not.
const ANALYSIS_PAUSE: Duration = Duration::from_secs(5);
const LONG_ANALYSIS_PAUSE: Duration = Duration::from_secs(15);
/// How many times the processor time of the last analysis this pause takes, for each trace;
/// twice as many if the program has run no new code.
const ANALYSIS_PAUSE_FACTOR: u32 = 200;
/// The pause between two readings of the new events, and how many times the processor time of the last one it takes.
/// New events cost no less if they are read later, so the pause has a maximum.
const MIN_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(60);
const PAUSE_FACTOR: u32 = 100;

/// A line of the process's output.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// The bytes in the allocated blocks of a trace, by device and the name of the category.
    Reading { trace: String, devices: BTreeMap<i16, BTreeMap<String, u64>> },
    /// The end of an answer: how long to wait until the next request.
    Done { pause_ms: u64 },
}

/// Starts the process for the traces in this folder, whose path is absolute.
pub(super) fn start(folder: &Path) -> io::Result<Child> {
    let mut command = sandbox::background_process(NAME);
    command.arg(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

/// The folder that this process is asked to read, if it is such a process.
pub(crate) fn requested() -> Option<PathBuf> {
    let mut arguments = std::env::args_os();
    if arguments.next()? != NAME { None } else { arguments.next().map(PathBuf::from) }
}

/// Answers until stdin ends, and returns the exit code.
pub(crate) fn run() -> u8 {
    let Some(folder) = requested() else { return FAILED };
    sandbox::restrict_background_process(Priority::Lowest);
    match answer_all(&folder, io::stdin().lock(), pipe_to_launcher(Stream::Stdout)) {
        Ok(()) => 0,
        Err(_) => FAILED,
    }
}

fn answer_all(folder: &Path, requests: impl BufRead, mut out: impl Write) -> io::Result<()> {
    let mut followed = BTreeMap::new();
    for request in requests.lines() {
        let traces: Vec<String> = serde_json::from_str(&request?)?;
        followed.retain(|trace, _| traces.contains(trace));
        let pause = answer(folder, &traces, &mut followed, &mut out)?;
        write_line(&mut out, &Line::Done { pause_ms: pause.as_millis() as u64 })?;
    }
    Ok(())
}

/// A trace that is followed.
#[derive(Debug)]
struct Followed {
    process: LiveProcess,
    /// The processor time of the last analysis of all events.
    analysis: Duration,
}

/// Writes the new figures of these traces. Returns the pause until the next reading.
fn answer(
    folder: &Path,
    traces: &[String],
    all: &mut BTreeMap<String, Followed>,
    out: &mut impl Write,
) -> io::Result<Duration> {
    // All traces together take their share of a processor.
    let times = ANALYSIS_PAUSE_FACTOR.saturating_mul(traces.len() as u32);
    let (mut reading, mut failures) = (Duration::ZERO, Duration::ZERO);
    for trace in traces {
        let began = processor_time();
        let advance = follow(folder, trace, all, times);
        if let (Ok(Advance { has_changed: true, .. }), Some(followed)) = (&advance, all.get(trace)) {
            let line = Line::Reading { trace: trace.clone(), devices: by_category(&followed.process) };
            write_line(out, &line)?;
        }
        let took = processor_time().saturating_sub(began);
        match (advance, all.get_mut(trace)) {
            // The next analysis waits for its own pause.
            (Ok(Advance { is_analyzed: true, .. }), Some(followed)) => followed.analysis = took,
            (Ok(_), _) => reading += took,
            (Err(_), _) => {
                // It is opened again: its definitions may not be written yet.
                all.remove(trace);
                failures += took;
            }
        }
    }
    Ok((reading * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE) + failures * PAUSE_FACTOR)
}

/// Reads what was appended to a trace, or opens it.
fn follow(
    folder: &Path,
    trace: &str,
    all: &mut BTreeMap<String, Followed>,
    times: u32,
) -> memtrace_analysis::Result<Advance> {
    if let Some(Followed { process, analysis }) = all.get_mut(trace) {
        let pause = analysis.saturating_mul(times);
        return process.advance_with(&AnalysisPauses {
            after_new_code: pause.max(ANALYSIS_PAUSE),
            otherwise: pause.saturating_mul(2).max(LONG_ANALYSIS_PAUSE),
        });
    }
    let process = LiveProcess::open(&folder.join(trace))?;
    all.insert(trace.to_owned(), Followed { process, analysis: Duration::ZERO });
    Ok(Advance { has_changed: true, is_analyzed: true })
}

/// The bytes by device and the name of the category.
fn by_category(process: &LiveProcess) -> BTreeMap<i16, BTreeMap<String, u64>> {
    let named = |bytes: BTreeMap<Category, u64>| bytes.into_iter().map(|(c, n)| (c.name().to_owned(), n)).collect();
    process.by_category().into_iter().map(|(device, bytes)| (device, named(bytes))).collect()
}

fn write_line(out: &mut impl Write, line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    out.write_all(&text)?;
    out.flush()
}

/// The processor time of all threads of this process.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
