//! `memtrace export`: a run in the form of another program.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::export::{SnapshotOptions, TimelineForm, blocks_csv, snapshot, timeline};
use memtrace_analysis::{Process, Progress, Run, RunFolder, summarize};

use crate::cli::{Export, Format};
use crate::closing::ProgressLine;
use crate::say;

/// Writes the files.
pub(crate) fn export(options: &Export) -> anyhow::Result<()> {
    let run = super::open(&options.run)?;
    for problem in run.problems() {
        say(&format!("{}: {}", problem.path.display(), problem.text));
    }
    match options.to {
        Format::Snapshot => {
            let hint = ": drop it on pytorch.org/memory_viz";
            files(&run, options, ".pickle", hint, &|process, file, path| {
                write(process, "writing the snapshot", path, file, |out, progress| {
                    snapshot(process, out, &SnapshotOptions::default(), progress).map(drop)
                })
            })
        }
        Format::Timeline => {
            let form = match &options.output {
                None => TimelineForm::Html,
                Some(path) => TimelineForm::of(path).with_context(|| {
                    format!(
                        "{}: a timeline's name ends in .html, .png, .json, .raw.json or .raw.json.gz",
                        path.display()
                    )
                })?,
            };
            files(&run, options, ".html", "", &|process, file, path| {
                let device = device(process, options.device)?;
                write(process, "writing the timeline", path, file, |out, progress| {
                    timeline(process, device, form, out, progress)
                })
            })
        }
        Format::Csv => files(&run, options, ".csv", "", &|process, file, path| {
            write(process, "writing the table", path, file, |out, progress| blocks_csv(process, out, progress))
        }),
        Format::Json => {
            let text = summarize(&run, &mut |_| {})?.to_json() + "\n";
            match &options.output {
                Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
                None => super::print(text.as_bytes()).context("cannot print"),
            }
        }
    }
}

/// One file a process: NAME and its ending, or what was asked for. `write` gets the file and its path.
fn files(
    run: &Run,
    options: &Export,
    ending: &str,
    hint: &str,
    write: &dyn Fn(&Process, &mut File, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
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
        let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}{ending}")));
        let is_read =
            |path: &Path| path.canonicalize().is_ok_and(|p| process.path().canonicalize().is_ok_and(|q| p == q));
        ensure!(!is_read(&path), "{} is what is being exported: name another file with -o", path.display());
        let cannot = || format!("cannot create {}", path.display());
        match &options.output {
            Some(path) => write(process, &mut File::create(path).with_context(cannot)?, path)?,
            None => {
                // The current folder may be the run's, and what is there somebody else's: no link is followed.
                let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
                let mut new = here.begin(&format!("{name}{ending}")).with_context(cannot)?;
                write(process, new.file(), &path)?;
                new.place().with_context(cannot)?;
            }
        }
        say(&format!("wrote {}{hint}", path.display()));
    }
    Ok(())
}

/// The device that a timeline is about.
fn device(process: &Process, wanted: Option<i16>) -> anyhow::Result<i16> {
    let known: Vec<i16> = process.survey().lanes.keys().copied().collect();
    let list = || known.iter().map(i16::to_string).collect::<Vec<_>>().join(", ");
    match (wanted, &known[..]) {
        (Some(device), known) if known.contains(&device) => Ok(device),
        (Some(device), _) => {
            bail!("pid {} has no events of device {device}; it has those of: {}", process.pid(), list())
        }
        (None, [only]) => Ok(*only),
        (None, []) => bail!("pid {} recorded no memory", process.pid()),
        (None, _) => bail!("pid {} used devices {}: choose one with --device", process.pid(), list()),
    }
}

fn list(named: &[(&Process, String)]) -> String {
    let names: Vec<_> = named.iter().map(|(process, name)| format!("{name} (pid {})", process.pid())).collect();
    names.join(", ")
}

/// Writes one process's file, showing how far it is.
fn write<W: Write>(
    process: &Process,
    what: &'static str,
    path: &Path,
    out: W,
    export: impl FnOnce(&mut BufWriter<W>, &mut dyn FnMut(u64)) -> memtrace_analysis::Result<()>,
) -> anyhow::Result<()> {
    let mut out = BufWriter::new(out);
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let total = process.recording().event_count();
    let written = export(&mut out, &mut |done| line.show(&Progress { what, done, total }));
    line.clear();
    written?;
    out.flush().with_context(|| format!("cannot write {}", path.display()))
}
