//! `memtrace export`: a run in the form of another program.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::export::{SnapshotOptions, snapshot};
use memtrace_analysis::{Process, Progress, Run, RunFolder, open_run, summarize};

use crate::cli::{Export, Format};
use crate::closing::ProgressLine;
use crate::say;

/// Writes the files.
pub(crate) fn export(options: &Export) -> anyhow::Result<()> {
    let run = open_run(&options.run)?;
    for problem in run.problems() {
        say(&format!("{}: {}", problem.path.display(), problem.text));
    }
    match options.to {
        Format::Snapshot => snapshots(&run, options),
        Format::Json => {
            let text = summarize(&run, &mut |_| {})?.to_json() + "\n";
            match &options.output {
                Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
                None => super::print(text.as_bytes()).context("cannot print"),
            }
        }
    }
}

fn snapshots(run: &Run, options: &Export) -> anyhow::Result<()> {
    let named: Vec<(&Process, String)> = run.processes().iter().zip(run.names()).collect();
    let chosen: Vec<_> = named
        .iter()
        .filter(|(p, _)| {
            options.rank.is_none_or(|r| p.rank() == Some(r)) && options.pid.is_none_or(|pid| p.pid() == pid)
        })
        .collect();
    ensure!(!chosen.is_empty(), "no process of the run matches; it has {}", list(&named));
    if options.output.is_some() && chosen.len() > 1 {
        bail!("the run has {}: choose one with --rank or --pid, or leave -o out to write one file each", list(&named));
    }
    for (process, name) in chosen {
        let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.pickle")));
        let cannot = || format!("cannot create {}", path.display());
        match &options.output {
            Some(path) => write(process, File::create(path).with_context(cannot)?, path)?,
            None => {
                // The current folder may be the run's, and what is there somebody else's: no link is followed.
                let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
                let mut new = here.begin(&format!("{name}.pickle")).with_context(cannot)?;
                write(process, new.file(), &path)?;
                new.place().with_context(cannot)?;
            }
        }
        say(&format!("wrote {}: drop it on pytorch.org/memory_viz", path.display()));
    }
    Ok(())
}

fn list(named: &[(&Process, String)]) -> String {
    let names: Vec<_> = named.iter().map(|(process, name)| format!("{name} (pid {})", process.pid())).collect();
    names.join(", ")
}

fn write(process: &Process, file: impl Write + Send, path: &Path) -> anyhow::Result<()> {
    let mut out = BufWriter::new(file);
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let total = process.recording().event_count();
    let written = snapshot(process, &mut out, &SnapshotOptions::default(), &mut |done| {
        line.show(&Progress { what: "writing the snapshot", done, total });
    });
    line.clear();
    written?;
    out.flush().with_context(|| format!("cannot write {}", path.display()))
}
