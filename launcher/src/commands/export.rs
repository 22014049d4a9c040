//! `memtrace export`: writes a run in the format of another program.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use memtrace_analysis::export::{
    FlameFormat, FlameWeight, LeftOut, Selection, SnapshotOptions, SourceAccess, TABLES, TableLayout, TimelineFormat,
    Window, blocks_csv, flame_graph, perfetto, pprof, run_start_ns, snapshot, tables, timeline,
};
use memtrace_analysis::report::{count_text, size_text};
use memtrace_analysis::rules::CustomRules;
use memtrace_analysis::{
    HtmlOptions, Process, Progress, Run, RunFolder, Summary, SummaryOptions, html_report, summarize_with,
};

use super::selection::Selected;
use crate::cli::{self, Export, ExportFormat};
use crate::message::{self, WithHelp};
use crate::output::{Printed, Stream};
use crate::output_file::OutputFile;
use crate::terminal::ProgressLine;

/// Writes the requested files. Fails when the run cannot be read or a file cannot be written.
pub(crate) fn export(options: &Export) -> anyhow::Result<()> {
    if options.partition {
        ensure!(
            options.to == ExportFormat::Parquet,
            WithHelp::new("--partition applies only to Parquet", "use it with --to parquet, or leave it out")
        );
        ensure!(
            options.of.is_none() && !options.sources,
            WithHelp::new("--of and --sources do not apply to Parquet", "leave them out")
        );
        let rules = super::categories::read(options.categories.as_deref())?;
        return super::job::export(options, rules.as_deref());
    }
    let run = super::open_or_newest(options.run.as_deref())?;
    let is_flame = matches!(options.to, ExportFormat::Speedscope | ExportFormat::Folded);
    ensure!(
        options.of.is_none() || is_flame,
        WithHelp::new(
            "--of applies only to flame graphs",
            "use it with --to speedscope or --to folded, or leave it out"
        )
    );
    ensure!(
        !options.sources || options.to == ExportFormat::Snapshot,
        WithHelp::new(
            "--sources applies only to snapshots",
            "use it with --to snapshot, or leave it out: no other format quotes source lines"
        )
    );
    let rules = super::categories::read(options.categories.as_deref())?;
    let has_categories = matches!(
        options.to,
        ExportFormat::Snapshot | ExportFormat::Html | ExportFormat::Json | ExportFormat::Csv | ExportFormat::Parquet
    );
    ensure!(
        rules.is_none() || has_categories,
        WithHelp::new(
            "--categories applies only to snapshots, HTML, JSON, CSV and Parquet",
            "use it with --to snapshot, html, json, csv or parquet, or leave it out"
        )
    );
    let summary_options =
        SummaryOptions { custom_rules: rules.as_deref(), is_recording: options.so_far, ..SummaryOptions::default() };
    match options.to {
        ExportFormat::Snapshot => {
            let sources = SourceAccess::of(&run, options.sources);
            let help = "open it at https://pytorch.org/memory_viz";
            files(&run, options, ".pickle", Some(help), &|part, file, path| {
                let options = SnapshotOptions {
                    window: part.window.clone(),
                    sources: sources.clone(),
                    custom_rules: rules.clone(),
                };
                write(part.process, "writing the snapshot", path, file, |out, progress| {
                    snapshot(part.process, out, &options, progress).map(drop)
                })
            })
        }
        ExportFormat::Timeline => {
            let Some(path) = options.output.as_ref().filter(|path| path.extension() != Some("html".as_ref())) else {
                return html(&run, options, &summary_options, "timeline.html");
            };
            let format = TimelineFormat::of(path).with_context(|| {
                WithHelp::new(
                    format!("cannot write {}: the extension names no timeline format", path.display()),
                    "use the extension .html, .svg or .json",
                )
            })?;
            files(&run, options, ".html", None, &|part, file, path| {
                let device = device(part.process, options.window.device)?;
                write(part.process, "writing the timeline", path, file, |out, progress| {
                    timeline(part.process, &part.window, device, format, out, progress)
                })
            })
        }
        ExportFormat::Csv => files(&run, options, ".csv", None, &|part, file, path| {
            write(part.process, "writing the table", path, file, |out, progress| {
                blocks_csv(part.process, &part.window, rules.as_deref(), out, progress)
            })
        }),
        ExportFormat::Perfetto => {
            files(&run, options, ".pftrace", Some("open it at https://ui.perfetto.dev"), &|part, file, path| {
                write(part.process, "writing the Perfetto trace", path, file, |out, progress| {
                    perfetto(part.process, &part.window, out, progress)
                })
            })
        }
        ExportFormat::Speedscope | ExportFormat::Folded => {
            let (format, extension, help) = match options.to {
                ExportFormat::Speedscope => {
                    (FlameFormat::Speedscope, ".speedscope.json", Some("open it at https://www.speedscope.app"))
                }
                _ => (FlameFormat::Folded, ".folded", None),
            };
            let of = options.of.map_or(FlameWeight::default(), Into::into);
            files(&run, options, extension, help, &|part, file, path| {
                write(part.process, "writing the flame graph", path, file, |out, progress| {
                    flame_graph(part.process, &part.window, of, format, out, progress)
                })
            })
        }
        ExportFormat::Pprof => {
            files(&run, options, ".pb.gz", Some("open it with `go tool pprof`"), &|part, file, path| {
                write(part.process, "writing the pprof profile", path, file, |out, progress| {
                    pprof(part.process, &part.window, out, progress)
                })
            })
        }
        ExportFormat::Parquet => parquet(&run, options, rules.as_deref()),
        ExportFormat::Html => html(&run, options, &summary_options, super::REPORT_PAGE),
        ExportFormat::Json => {
            let whole = !options.window.is_limited() && options.window.device.is_none();
            ensure!(
                whole && options.rank.is_none() && options.pid.is_none(),
                WithHelp::new(
                    "--to json exports the summary of the whole run",
                    "leave out --rank, --pid, --device, --steps, --range, --time, --min-size and --max-events"
                )
            );
            let text = summarize_with(&run, &summary_options, &mut |_| {})?.to_json() + "\n";
            super::write_output(Printed::Json(&text), options.output.as_deref())
        }
    }
}

/// Writes one page about the run, or about the selected processes. Its timeline shows the window first. `name` is the
/// file's name without -o.
fn html(run: &Run, options: &Export, summary_options: &SummaryOptions<'_>, name: &str) -> anyhow::Result<()> {
    ensure!(
        options.window.min_size.is_none(),
        WithHelp::new("the page shows blocks of every size", "leave out --min-size")
    );
    let processes: Vec<&Process> = choose(run, options)?.into_iter().map(|(process, _)| process).collect();
    // Check this before the file exists. Every selected process must have the device and the window.
    let window_of = |process: &&Process| part(run, process, &options.window).map(|part| part.window);
    let windows = processes.iter().map(window_of).collect::<anyhow::Result<Vec<Window>>>()?;
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from(name));
    super::ensure_not_input(&path, run.processes())?;
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let summary = summarize_with(run, summary_options, &mut |progress| line.show(&progress))?;
    let html_options = HtmlOptions {
        device: options.window.device,
        // The process that records asks for its own files.
        sources: SourceAccess::of(run, options.so_far),
        windows,
        custom_rules: summary_options.custom_rules,
        is_served: false,
    };
    draw(&summary, &processes, &html_options, line, options.output.as_deref(), name)
}

/// Draws a page and writes it into a file, whose name without `output` is `name`. `line` shows the progress.
fn draw(
    summary: &Summary,
    processes: &[&Process],
    options: &HtmlOptions<'_>,
    mut line: ProgressLine,
    output: Option<&Path>,
    name: &str,
) -> anyhow::Result<()> {
    let mut page = Vec::new();
    let drawn = html_report(summary, processes, options, &mut page, &mut |progress| line.show(&progress));
    line.clear();
    drawn?;
    super::write_page(&page, output, name)
}

/// Writes the page of a run with all its processes.
pub(super) fn write_page_of(
    run: &Run,
    summary: &Summary,
    summary_options: &SummaryOptions<'_>,
    path: Option<&Path>,
) -> anyhow::Result<()> {
    super::ensure_not_input(path.unwrap_or(Path::new(super::REPORT_PAGE)), run.processes())?;
    let html_options = HtmlOptions {
        device: None,
        sources: SourceAccess::of(run, summary_options.is_recording),
        windows: Vec::new(),
        custom_rules: summary_options.custom_rules,
        is_served: false,
    };
    let processes: Vec<&Process> = run.processes().iter().collect();
    let line = ProgressLine::new(Stream::Stderr.is_terminal());
    draw(summary, &processes, &html_options, line, path, super::REPORT_PAGE)
}

/// The part of one process that is exported.
struct ExportedWindow<'a> {
    process: &'a Process,
    window: Window,
}

/// The selected processes with their names. Fails when no process matches.
fn choose<'a>(run: &'a Run, options: &Export) -> anyhow::Result<Vec<(&'a Process, String)>> {
    let selected = Selected { rank: options.rank, pid: options.pid, device: options.window.device };
    selected.ensure_in(run)?;
    let mut chosen: Vec<(&Process, String)> = run.processes().iter().zip(run.process_names()).collect();
    chosen.retain(|(process, _)| selected.has_process(process));
    if let Some(device) = options.window.device {
        chosen.retain(|(process, _)| process.trace_index().sources.contains_key(&device));
    }
    Ok(chosen)
}

/// Writes TABLE-NAME.parquet for every table and process into one folder.
fn parquet(run: &Run, options: &Export, rules: Option<&CustomRules>) -> anyhow::Result<()> {
    let folder = options.output.clone().unwrap_or_else(|| PathBuf::from("."));
    let cannot = || format!("cannot create {}", folder.display());
    if options.output.is_some() {
        std::fs::create_dir_all(&folder).with_context(cannot)?;
    }
    let absolute = run.path().canonicalize().unwrap_or_else(|_| run.path().to_owned());
    let run_name = absolute.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
    for (process, name) in choose(run, options)? {
        let part = part(run, process, &options.window)?;
        // `RunFolder` follows no symbolic links, and no file appears before it is complete.
        let here = RunFolder::open(&folder).with_context(cannot)?;
        let mut new = Vec::new();
        for table in TABLES {
            new.push(here.create_atomic(&format!("{table}-{name}.parquet")).with_context(cannot)?);
        }
        let mut files = new.iter_mut().map(|new| new.file().try_clone()).collect::<Result<Vec<_>, _>>()?.into_iter();
        let mut next = || files.next().map(BufWriter::new).context("each table has a file");
        let mut files = [next()?, next()?, next()?, next()?];
        let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
        let (what, total) = ("writing the tables", process.recording().event_count());
        let outputs = files.each_mut().map(|file| file as &mut (dyn Write + Send));
        let written = tables(process, &run_name, TableLayout::Whole, &part.window, rules, outputs, &mut |done| {
            line.show(&Progress { what, done, total })
        });
        line.clear();
        written.with_context(|| format!("cannot export to {}", folder.display()))?;
        for mut file in files {
            file.flush().with_context(|| format!("cannot write into {}", folder.display()))?;
        }
        for new in new {
            new.commit().with_context(cannot)?;
        }
        let tables = TABLES.map(|table| folder.join(format!("{table}-{name}.parquet")).display().to_string());
        message::status(&format!("wrote {}", tables.join(", ")));
        if options.window.is_limited() {
            message::note(&format!("{name} leaves out {}", left_out(part.window.left_out())));
        }
    }
    Ok(())
}

/// Writes one file for each process, named NAME plus `extension`, or as requested with `-o`. `write` gets the file and
/// its path.
fn files(
    run: &Run,
    options: &Export,
    extension: &str,
    help: Option<&str>,
    write: &dyn Fn(&ExportedWindow, &mut File, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let chosen = choose(run, options)?;
    if options.output.is_some() && chosen.len() > 1 {
        bail!(WithHelp::new(
            format!("-o names one file, and the run has {} processes: {}", chosen.len(), list(&chosen)),
            "choose one with --rank or --pid, or leave out -o to write a file for each process"
        ));
    }
    for (process, name) in chosen {
        let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}{extension}")));
        super::ensure_not_input(&path, run.processes())?;
        // Check this before the file exists, because the window may be empty.
        let part = part(run, process, &options.window)?;
        let cannot = || format!("cannot create {}", path.display());
        match &options.output {
            Some(path) => {
                let mut new = OutputFile::create(path)?;
                write(&part, new.file(), path)?;
                new.commit()?;
            }
            None => {
                // The current directory may be a run folder of another user. `RunFolder` follows no symbolic links.
                let here = RunFolder::open(Path::new(".")).with_context(cannot)?;
                let mut new = here.create_atomic(&format!("{name}{extension}")).with_context(cannot)?;
                write(&part, new.file(), &path)?;
                new.commit().with_context(cannot)?;
            }
        }
        message::status(&format!("wrote {}", path.display()));
        if let Some(help) = help {
            message::help(help);
        }
        if options.window.is_limited() {
            message::note(&format!("{} leaves out {}", path.display(), left_out(part.window.left_out())));
        }
    }
    Ok(())
}

/// The requested window of a process. Fails when the window cannot be computed or is empty.
fn part<'a>(run: &Run, process: &'a Process, requested: &cli::Window) -> anyhow::Result<ExportedWindow<'a>> {
    let began = run_start_ns(run).unwrap_or(0);
    let selection = Selection {
        steps: requested.steps,
        range: requested.range.clone(),
        epoch_ns: requested.time.map(|(from, to)| (began.saturating_add(from), began.saturating_add(to))),
        min_size: requested.min_size.unwrap_or(0),
        max_events: requested.max_events,
        device: requested.device,
    };
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let total = process.recording().event_count();
    let what = "selecting the window";
    let window = Window::of(process, &selection, &mut |done| line.show(&Progress { what, done, total }));
    line.clear();
    Ok(ExportedWindow { process, window: window? })
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

/// The device of a timeline. Fails when `requested` is `None` and the process used several devices or none.
fn device(process: &Process, requested: Option<i16>) -> anyhow::Result<i16> {
    let used: Vec<i16> = process.trace_index().sources.keys().copied().collect();
    let list = || used.iter().map(i16::to_string).collect::<Vec<_>>().join(", ");
    let pid = process.pid();
    match (requested, &used[..]) {
        // Only processes that used the device were chosen.
        (Some(device), _) => Ok(device),
        (None, [only]) => Ok(*only),
        (None, []) => bail!("process {pid} recorded no memory"),
        (None, _) => bail!(WithHelp::new(
            format!("a timeline shows one device, and process {pid} used several"),
            format!("choose one with --device: {}", list())
        )),
    }
}

fn list(processes: &[(&Process, String)]) -> String {
    let names: Vec<_> = processes.iter().map(|(process, name)| format!("{name} (pid {})", process.pid())).collect();
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
    let mut line = ProgressLine::new(Stream::Stderr.is_terminal());
    let total = process.recording().event_count();
    let written = export(&mut out, &mut |done| line.show(&Progress { what, done, total }));
    line.clear();
    written.with_context(|| format!("cannot export to {}", path.display()))?;
    out.flush().with_context(|| format!("cannot write {}", path.display()))
}
