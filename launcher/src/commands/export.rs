//! `memtrace export`: writes a run in the format of another program.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::export::{
    FlameForm, FlameOf, LeftOut, Selection, SnapshotOptions, TABLES, TimelineForm, Window, blocks_csv, flame, perfetto,
    run_began_ns, snapshot, tables, timeline,
};
use memtrace_analysis::report::{count_text, size_text};
use memtrace_analysis::{Process, Progress, Run, RunFolder, html_page, summarize};

use crate::cli::{self, Export, Format};
use crate::closing::ProgressLine;
use crate::say;

/// Writes the requested files. Fails when the run cannot be read or a file cannot be written.
pub(crate) fn export(options: &Export) -> anyhow::Result<()> {
    let run = super::open(&options.run)?;
    let is_flame = matches!(options.to, Format::Speedscope | Format::Folded);
    ensure!(options.of.is_none() || is_flame, "--of is for --to speedscope and --to folded");
    match options.to {
        Format::Snapshot => {
            let hint = ": drop it on pytorch.org/memory_viz";
            files(&run, options, ".pickle", hint, &|part, file, path| {
                let options = SnapshotOptions { window: part.window.clone(), ..SnapshotOptions::default() };
                write(part.process, "writing the snapshot", path, file, |out, progress| {
                    snapshot(part.process, out, &options, progress).map(drop)
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
            files(&run, options, ".html", "", &|part, file, path| {
                let device = device(part.process, options.window.device)?;
                write(part.process, "writing the timeline", path, file, |out, progress| {
                    timeline(part.process, &part.window, device, form, out, progress)
                })
            })
        }
        Format::Csv => files(&run, options, ".csv", "", &|part, file, path| {
            write(part.process, "writing the table", path, file, |out, progress| {
                blocks_csv(part.process, &part.window, out, progress)
            })
        }),
        Format::Perfetto => files(&run, options, ".pftrace", ": open it on ui.perfetto.dev", &|part, file, path| {
            write(part.process, "writing the Perfetto trace", path, file, |out, progress| {
                perfetto(part.process, &part.window, out, progress)
            })
        }),
        Format::Speedscope | Format::Folded => {
            let (form, ending, hint) = match options.to {
                Format::Speedscope => (FlameForm::Speedscope, ".speedscope.json", ": open it on speedscope.app"),
                _ => (FlameForm::Folded, ".folded", ""),
            };
            let of = options.of.map_or(FlameOf::default(), Into::into);
            files(&run, options, ending, hint, &|part, file, path| {
                write(part.process, "writing the flame graph", path, file, |out, progress| {
                    flame(part.process, &part.window, of, form, out, progress)
                })
            })
        }
        Format::Parquet => parquet(&run, options),
        Format::Html => html(&run, options),
        Format::Json => {
            let whole = !options.window.is_part() && options.window.device.is_none();
            ensure!(
                whole && options.rank.is_none() && options.pid.is_none(),
                "the summary is about the whole run: leave out --rank, --pid, --device, --steps, --time, --min-size and --max-events"
            );
            let text = summarize(&run, &mut |_| {})?.to_json() + "\n";
            super::put(&text, options.output.as_deref())
        }
    }
}

/// Writes one HTML report about the run, or about the selected processes.
fn html(run: &Run, options: &Export) -> anyhow::Result<()> {
    ensure!(
        !options.window.is_part(),
        "the page is about the whole run: leave out --steps, --time, --min-size and --max-events"
    );
    let processes: Vec<&Process> = choose(run, options)?.into_iter().map(|(process, _)| process).collect();
    if let Some(device) = options.window.device {
        // Check this before the file exists. Every selected process must have the device.
        let selection = Selection { device: Some(device), ..Selection::default() };
        processes.iter().try_for_each(|process| Window::of(process, &selection, &mut |_| {}).map(drop))?;
    }
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from("report.html"));
    not_what_is_read(&path, run.processes())?;
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let summary = summarize(run, &mut |progress| line.show(&progress))?;
    let mut page = Vec::new();
    let drawn = html_page(&summary, &processes, options.window.device, &mut page, &mut |progress| line.show(&progress));
    line.clear();
    drawn?;
    let cannot = || format!("cannot write {}", path.display());
    match &options.output {
        Some(path) => std::fs::write(path, page).with_context(cannot)?,
        None => {
            // A symbolic link with this name is not followed. `RunFolder` guarantees that.
            let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
            let mut new = here.begin("report.html").with_context(cannot)?;
            new.file().write_all(&page).with_context(cannot)?;
            new.place().with_context(cannot)?;
        }
    }
    say(&format!("wrote {}", path.display()));
    Ok(())
}

/// Fails when the output file is one of the files that are being exported.
fn not_what_is_read<'a>(path: &Path, read: impl IntoIterator<Item = &'a Process>) -> anyhow::Result<()> {
    let is = |process: &Process| path.canonicalize().is_ok_and(|p| process.path().canonicalize().is_ok_and(|q| p == q));
    ensure!(!read.into_iter().any(is), "{} is what is being exported: name another file with -o", path.display());
    Ok(())
}

/// The part of one process that is exported.
struct Part<'a> {
    process: &'a Process,
    window: Window,
}

/// The selected processes with their names. Fails when no process matches.
fn choose<'a>(run: &'a Run, options: &Export) -> anyhow::Result<Vec<(&'a Process, String)>> {
    let mut chosen: Vec<(&Process, String)> = run.processes().iter().zip(run.names()).collect();
    let has = list(&chosen);
    chosen.retain(|(p, _)| {
        options.rank.is_none_or(|rank| p.rank() == Some(rank)) && options.pid.is_none_or(|pid| p.pid() == pid)
    });
    ensure!(!chosen.is_empty(), "no process of the run matches; it has {has}");
    if let (Some(device), 2..) = (options.window.device, chosen.len()) {
        // Select the processes that used the device. If none did, the first process reports the devices that it has.
        let used = |(p, _): &(&Process, String)| p.survey().lanes.contains_key(&device);
        if chosen.iter().any(used) {
            chosen.retain(used);
        }
    }
    Ok(chosen)
}

/// Writes TABLE-NAME.parquet for every table and process into one folder.
fn parquet(run: &Run, options: &Export) -> anyhow::Result<()> {
    let folder = options.output.clone().unwrap_or_else(|| PathBuf::from("."));
    let cannot = || format!("cannot create {}", folder.display());
    if options.output.is_some() {
        std::fs::create_dir_all(&folder).with_context(cannot)?;
    }
    let absolute = run.path().canonicalize().unwrap_or_else(|_| run.path().to_owned());
    let called = absolute.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
    for (process, name) in choose(run, options)? {
        let part = part(run, process, &options.window)?;
        // `RunFolder` follows no symbolic links, and no file appears before it is complete.
        let here = RunFolder::open(&folder).with_context(cannot)?;
        let mut new = Vec::new();
        for table in TABLES {
            new.push(here.begin(&format!("{table}-{name}.parquet")).with_context(cannot)?);
        }
        let mut files = new.iter_mut().map(|new| new.file().try_clone()).collect::<Result<Vec<_>, _>>()?.into_iter();
        let mut next = || files.next().map(BufWriter::new).context("a file for each table");
        let files = [next()?, next()?, next()?, next()?];
        let mut line = ProgressLine::new(std::io::stderr().is_terminal());
        let (what, total) = ("writing the tables", process.recording().event_count());
        let written =
            tables(process, &called, &part.window, files, &mut |done| line.show(&Progress { what, done, total }));
        line.clear();
        for mut file in written? {
            file.flush().with_context(|| format!("cannot write into {}", folder.display()))?;
        }
        for new in new {
            new.place().with_context(cannot)?;
        }
        let tables = TABLES.map(|table| folder.join(format!("{table}-{name}.parquet")).display().to_string());
        say(&format!("wrote {}", tables.join(", ")));
        if options.window.is_part() {
            say(&format!("left out of {name}: {}", left_out(part.window.left_out())));
        }
    }
    Ok(())
}

/// Writes one file for each process, named NAME plus `ending`, or as requested with `-o`. `write` gets the file and its
/// path.
fn files(
    run: &Run,
    options: &Export,
    ending: &str,
    hint: &str,
    write: &dyn Fn(&Part, &mut File, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let chosen = choose(run, options)?;
    if options.output.is_some() && chosen.len() > 1 {
        bail!("the run has {}: choose one with --rank or --pid, or leave -o out to write one file each", list(&chosen));
    }
    for (process, name) in chosen {
        let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}{ending}")));
        not_what_is_read(&path, [process])?;
        // Check this before the file exists, because the window may be empty.
        let part = part(run, process, &options.window)?;
        let cannot = || format!("cannot create {}", path.display());
        match &options.output {
            Some(path) => write(&part, &mut File::create(path).with_context(cannot)?, path)?,
            None => {
                // The current directory may be a run folder of another user. `RunFolder` follows no symbolic links.
                let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
                let mut new = here.begin(&format!("{name}{ending}")).with_context(cannot)?;
                write(&part, new.file(), &path)?;
                new.place().with_context(cannot)?;
            }
        }
        say(&format!("wrote {}{hint}", path.display()));
        if options.window.is_part() {
            say(&format!("left out of {}: {}", path.display(), left_out(part.window.left_out())));
        }
    }
    Ok(())
}

/// The requested part of a process. Fails when the window cannot be computed or is empty.
fn part<'a>(run: &Run, process: &'a Process, asked: &cli::Window) -> anyhow::Result<Part<'a>> {
    let began = run_began_ns(run).unwrap_or(0);
    let selection = Selection {
        steps: asked.steps,
        epoch_ns: asked.time.map(|(from, to)| (began.saturating_add(from), began.saturating_add(to))),
        min_size: asked.min_size.unwrap_or(0),
        max_events: asked.max_events,
        device: asked.device,
    };
    let mut line = ProgressLine::new(std::io::stderr().is_terminal());
    let total = process.recording().event_count();
    let what = "looking for the part asked for";
    let window = Window::of(process, &selection, &mut |done| line.show(&Progress { what, done, total }));
    line.clear();
    Ok(Part { process, window: window? })
}

/// A description of the events and blocks outside a window.
fn left_out(left: &LeftOut) -> String {
    let count = |n: u64, one: &str, many: &str| {
        (n > 0).then(|| format!("{} {}", count_text(n), if n == 1 { one } else { many }))
    };
    let small = count(left.small_blocks, "smaller block", "smaller blocks");
    let parts = [
        count(left.before, "event before it", "events before it"),
        count(left.older, "older event", "older events"),
        count(left.after, "event after it", "events after it"),
        small.map(|blocks| format!("{blocks} ({})", size_text(left.small_bytes))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}

/// The device of a timeline. Fails when the process has no events of `wanted`, or when `wanted` is `None` and it used
/// several devices or none.
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

/// Writes the file of one process and shows the progress.
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
