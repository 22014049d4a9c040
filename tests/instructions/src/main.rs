//! Counts the instructions that one recorded event costs the traced program, and fails when they increase.
//!
//! Times on shared machines are noise; the same build executes the same number of instructions in every run. Callgrind
//! counts the instructions executed in memtrace's library while stand-ins for PyTorch's libraries (`fake/`) make it
//! record. A real PyTorch would take minutes and change none of the counts. Every run's trace is compared with the
//! events that the stand-ins made.
//!
//! The counts do not include cycles, cache misses, or the time that locked instructions wait.

mod baseline;
mod callgrind;
mod case;
mod python;
mod recording;
mod report;
mod sources;
mod stand_ins;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use baseline::Baseline;
use case::{CASES, Case, Measured, Places};
use python::{Python, stdout_of};

/// Counts the instructions of one recorded event, by kind, and compares them with the baseline.
#[derive(Parser, Debug)]
#[command(name = "tests/instructions/run")]
struct Options {
    /// Only these cases
    #[arg(value_name = "CASE")]
    cases: Vec<String>,
    /// Make what is measured the new baseline
    #[arg(long)]
    accept: bool,
    /// Print where this case's instructions go: functions, source lines, calls into other libraries
    #[arg(long, value_name = "CASE")]
    annotate: Option<String>,
    /// With --annotate: how many source lines
    #[arg(long, value_name = "N", default_value_t = 40)]
    lines: usize,
    /// Another baseline to compare with, or to write: of a build that is to be changed, for instance
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// List the cases
    #[arg(long)]
    list: bool,
    /// The Python to probe [default: one of the baseline's release, on PATH or in pyenv]
    #[arg(long, value_name = "PYTHON")]
    python: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if options.list {
        CASES.iter().for_each(|c| println!("{:<12} {}", c.name, c.what));
        return Ok(ExitCode::SUCCESS);
    }
    let selected = options.annotate.as_slice().iter().chain(&options.cases);
    let selected: Vec<&Case> = selected.map(|name| find(name)).collect::<Result<_>>()?;
    let selected = if selected.is_empty() { CASES.iter().collect() } else { selected };

    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = options.baseline.clone().unwrap_or_else(|| here.join("baseline.json"));
    let mut baseline = if path.exists() { Baseline::read(&path)? } else { Baseline::default() };
    let python = match (&options.python, baseline.python()) {
        (Some(python), _) => Python::ask(python)?,
        (None, Some(release)) => Python::of_release(release)?,
        (None, None) => Python::ask(Path::new("python3"))?,
    };
    // The path always has the same length: the library reads the paths of the objects that call it byte by byte.
    let scratch = tempfile::Builder::new().prefix("memtrace-instructions-").tempdir_in("/tmp")?;
    let simcuda = from_environment("SIMCUDA_LIB")?;
    let places = Places {
        memtrace: from_environment("MEMTRACE_BIN")?,
        python: python.path.clone(),
        probe: here.join("probe.py"),
        libraries: scratch.path().to_owned(),
        scratch: scratch.path().to_owned(),
    };
    stand_ins::build(&here.join("fake"), &simcuda, &places.libraries)?;
    let measured = measure(&selected, &places)?;

    if let Some(name) = &options.annotate {
        report::annotate(name, measured.get(name.as_str()).context("not measured")?, options.lines)?;
    } else if options.accept {
        report::table(&selected, &measured, &baseline);
        let anew = baseline.python() != Some(python.release());
        ensure!(!anew || selected.len() == CASES.len(), "another Python is measured as a whole: leave the cases out");
        baseline.conditions = conditions(&python)?;
        baseline.cases.retain(|name, _| CASES.iter().any(|c| c.name == name));
        baseline.cases.extend(measured.iter().map(|(name, m)| ((*name).to_owned(), m.counts())));
        baseline.write(&path)?;
        println!("\naccepted: {}", path.display());
    } else if let Some(release) = baseline.python().filter(|release| *release != python.release()) {
        report::table(&selected, &measured, &baseline);
        println!("\nnot compared: this is Python {}, the baseline is of {release}", python.version);
    } else {
        let stale = baseline.cases.keys().find(|name| !CASES.iter().any(|c| c.name == *name));
        if let Some(name) = stale {
            bail!("{name} is in the baseline and no case: tests/instructions/run --accept");
        }
        let comparisons = report::table(&selected, &measured, &baseline);
        return Ok(if report::passes(&comparisons) { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    Ok(ExitCode::SUCCESS)
}

fn from_environment(name: &str) -> Result<PathBuf> {
    Ok(std::env::var_os(name).with_context(|| format!("{name} is not set: start tests/instructions/run"))?.into())
}

fn find(name: &str) -> Result<&'static Case> {
    CASES.iter().find(|c| c.name == name).with_context(|| format!("no case {name}: see --list"))
}

/// Measures the cases in parallel, as many at once as there are processors.
fn measure(cases: &[&Case], places: &Places) -> Result<BTreeMap<&'static str, Measured>> {
    let left = Mutex::new(cases.iter().rev().copied().collect::<Vec<&Case>>());
    let done = Mutex::new(BTreeMap::new());
    let work = || -> Result<()> {
        loop {
            let Some(case) = left.lock().ok().and_then(|mut l| l.pop()) else { return Ok(()) };
            let measured = case.measure(places)?;
            if let Ok(mut done) = done.lock() {
                done.insert(case.name, measured);
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|w| w.join().map_err(|_| anyhow::anyhow!("a measurement panicked"))?)
    })?;
    done.into_inner().map_err(|_| anyhow::anyhow!("a measurement panicked"))
}

/// The versions of the tools that the counts depend on, by name.
fn conditions(python: &Python) -> Result<BTreeMap<String, String>> {
    Ok([
        ("python", python.version.clone()),
        ("glibc", python.glibc.clone()),
        ("valgrind", stdout_of(Command::new("valgrind").arg("--version"))?),
        ("rustc", stdout_of(Command::new("rustc").arg("--version"))?),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into())
}
