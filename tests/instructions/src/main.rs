//! Counts the instructions that one recorded event costs the traced program, and fails where they have become more.
//!
//! Times on shared machines are noise; instructions are not: the same build gives the same number on every run. Counted is what is
//! executed in memtrace's library, by callgrind, while stand-ins for PyTorch's libraries (`fake/`) make it record: a real PyTorch
//! would take minutes and add nothing that is counted. Every run's trace is compared with what the stand-ins did.
//!
//! Not counted, and not to be read into these numbers: cycles, cache misses, locked instructions' waits.

mod baseline;
mod callgrind;
mod case;
mod recording;
mod report;
mod stand_ins;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use baseline::Baseline;
use case::{CASES, Case, Measured, Places};

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
    /// List the cases
    #[arg(long)]
    list: bool,
    /// The Python to probe
    #[arg(long, value_name = "PYTHON", default_value = "python3")]
    python: PathBuf,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if options.list {
        CASES.iter().for_each(|c| println!("{:<12} {}", c.name, c.what));
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = options.annotate.as_slice().iter().chain(&options.cases);
    let wanted: Vec<&Case> = wanted.map(|name| find(name)).collect::<Result<_>>()?;
    let wanted = if wanted.is_empty() { CASES.iter().collect() } else { wanted };

    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Always the same length: the library reads the paths of objects that call it, byte by byte.
    let scratch = tempfile::Builder::new().prefix("memtrace-instructions-").tempdir_in("/tmp")?;
    let simcuda = std::env::var_os("SIMCUDA_LIB").context("SIMCUDA_LIB is not set: start tests/instructions/run")?;
    let places = Places {
        memtrace: std::env::var_os("MEMTRACE_BIN")
            .context("MEMTRACE_BIN is not set: start tests/instructions/run")?
            .into(),
        python: interpreter(&options.python)?,
        probe: here.join("probe.py"),
        libraries: scratch.path().to_owned(),
        scratch: scratch.path().to_owned(),
    };
    stand_ins::build(&here.join("fake"), Path::new(&simcuda), &places.libraries)?;
    let measured = measure(&wanted, &places)?;
    if let Some(name) = &options.annotate {
        report::annotate(name, measured.get(name.as_str()).context("not measured")?, options.lines);
        return Ok(ExitCode::SUCCESS);
    }
    let path = here.join("baseline.json");
    if options.accept {
        let mut baseline = if path.exists() { Baseline::read(&path)? } else { Baseline::default() };
        baseline.conditions = conditions(&places)?;
        baseline.cases.retain(|name, _| CASES.iter().any(|c| c.name == name));
        baseline.cases.extend(measured.iter().map(|(name, m)| ((*name).to_owned(), m.counts())));
        report::table(&wanted, &measured, &baseline);
        baseline.write(&path)?;
        println!("\naccepted: tests/instructions/baseline.json");
        return Ok(ExitCode::SUCCESS);
    }
    let baseline = Baseline::read(&path)?;
    let stale = baseline.cases.keys().find(|name| !CASES.iter().any(|c| c.name == *name));
    if let Some(name) = stale {
        bail!("{name} is in the baseline and no case: tests/instructions/run --accept");
    }
    Ok(if report::table(&wanted, &measured, &baseline) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find(name: &str) -> Result<&'static Case> {
    CASES.iter().find(|c| c.name == name).with_context(|| format!("no case {name}: see --list"))
}

/// Measures the cases, as many at a time as there are processors.
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

/// The interpreter's own file: `python3` may be a script that looks for one.
fn interpreter(python: &Path) -> Result<PathBuf> {
    let text = said(Command::new(python).args(["-c", "import os, sys; print(os.path.realpath(sys.executable))"]))?;
    Ok(text.into())
}

/// What the counts depend on.
fn conditions(places: &Places) -> Result<BTreeMap<String, String>> {
    let python = "import platform; print(platform.python_version(), platform.libc_ver()[1])";
    let python = said(Command::new(&places.python).args(["-c", python]))?;
    let (python, glibc) = python.split_once(' ').unwrap_or((&python, ""));
    Ok([
        ("python", python.to_owned()),
        ("glibc", glibc.to_owned()),
        ("valgrind", said(Command::new("valgrind").arg("--version"))?),
        ("rustc", said(Command::new("rustc").arg("--version"))?),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into())
}

fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
