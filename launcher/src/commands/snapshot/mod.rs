//! `memtrace snapshot`: writes the state of a running recording into a file, from outside the traced process.

mod triggers;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use memtrace_analysis::{SummaryOptions, TextOptions, ToText, summarize_with};

use self::triggers::Triggers;
use super::live::Watch;
use crate::cli::{Export, ExportFormat, Snapshot, Window};
use crate::message::{self, WithHelp};
use crate::output::Printed;
use crate::running::{self, Selected};

/// How often a command that waits for a trigger reads the figures.
const REFRESH: Duration = Duration::from_secs(1);

/// The endings of file names, and what they select.
const ENDINGS: [(&str, Format); 11] = [
    (".pickle", Format::Export(ExportFormat::Snapshot)),
    (".pkl", Format::Export(ExportFormat::Snapshot)),
    (".html", Format::Export(ExportFormat::Html)),
    (".speedscope.json", Format::Export(ExportFormat::Speedscope)),
    (".json", Format::Export(ExportFormat::Json)),
    (".csv", Format::Export(ExportFormat::Csv)),
    (".svg", Format::Export(ExportFormat::Timeline)),
    (".pftrace", Format::Export(ExportFormat::Perfetto)),
    (".folded", Format::Export(ExportFormat::Folded)),
    (".pb.gz", Format::Export(ExportFormat::Pprof)),
    (".txt", Format::Report),
];

/// The format to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    /// A format of `memtrace export`.
    Export(ExportFormat),
    /// The report as text.
    Report,
}

impl Format {
    /// The format that the ending of a file's name selects.
    fn of(path: &Path) -> anyhow::Result<Format> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let found = ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, format)| *format);
        found.with_context(|| {
            let endings: Vec<&str> = ENDINGS.iter().map(|(ending, _)| *ending).collect();
            WithHelp::new(
                format!("cannot write {}: the ending of its name selects no format", path.display()),
                format!("use one of {}", endings.join(", ")),
            )
        })
    }
}

/// Writes the file, or with triggers a file for each time that one fires until the recording ends. Returns whether a
/// file was written.
///
/// Fails if the recording is not running, or if a file cannot be written.
pub(crate) fn snapshot(options: &Snapshot) -> anyhow::Result<bool> {
    // Check this before anything is asked of the launcher.
    let format = options.output.as_deref().map_or(Ok(Format::Export(ExportFormat::Snapshot)), Format::of)?;
    let mut selected = running::select_or_only(options.target.as_deref())?;
    if options.on.is_some() || options.when.is_some() || options.every.is_some() {
        return watch(selected, options, format);
    }
    selected.recording.write_out()?;
    write(&selected, format, options.output.as_deref()).map(|()| true)
}

/// Writes a file each time that a trigger fires, until the recording ends.
fn watch(selected: Selected, options: &Snapshot, format: Format) -> anyhow::Result<bool> {
    let output = options.output.as_deref().unwrap_or(Path::new("snapshot.pickle"));
    let mut triggers = Triggers::new(options.on.is_some(), options.when, options.every, Instant::now());
    let mut watch = Watch::of(selected);
    let (mut written, mut is_waiting) = (0, false);
    loop {
        let report = match watch.refresh() {
            Ok(report) => report,
            Err(error) => {
                message::note(&format!("{error:#}"));
                return Ok(written > 0);
            }
        };
        for fired in triggers.fired(&report, Instant::now()) {
            let Some(mut selected) = watch.selected().cloned() else { continue };
            selected.pid = fired.pid.or(selected.pid);
            message::status(&fired.reason);
            written += 1;
            write(&selected, format, Some(&numbered(output, written)))?;
            if Some(written) == options.count {
                return Ok(true);
            }
        }
        if !std::mem::replace(&mut is_waiting, true) {
            message::status("waiting for the trigger");
        }
        std::thread::sleep(REFRESH);
    }
}

/// The path with a number before its ending: `now-1.pickle`.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let lower = name.to_lowercase();
    let ending = ENDINGS.iter().map(|(ending, _)| *ending).find(|ending| lower.ends_with(ending)).unwrap_or_default();
    let (stem, ending) = name.split_at(name.len() - ending.len());
    path.with_file_name(format!("{stem}-{number}{ending}"))
}

/// Writes what the traces of the selected processes have.
fn write(selected: &Selected, format: Format, output: Option<&Path>) -> anyhow::Result<()> {
    let folder = selected.recording.folder().to_owned();
    let processes = &selected.recording.answer.processes;
    let is_of_one = !matches!(format, Format::Report | Format::Export(ExportFormat::Html | ExportFormat::Json));
    if output.is_some() && is_of_one && selected.pid.is_none() && processes.len() > 1 {
        let pids: Vec<String> = processes.iter().map(|process| process.pid.to_string()).collect();
        bail!(WithHelp::new(
            format!("-o names one file, and {} processes are being recorded: {}", pids.len(), pids.join(", ")),
            "pass the id of one process, or leave out -o to write a file for each"
        ));
    }
    let run = match selected.pid {
        None => folder,
        Some(pid) => running::trace_of(&selected.recording, pid)
            .with_context(|| WithHelp::new(format!("process {pid} has ended"), running::read_it(folder.display())))?,
    };
    match format {
        Format::Report => {
            let run = super::open(&run)?;
            let options = SummaryOptions { is_recording: true, ..SummaryOptions::default() };
            let text = summarize_with(&run, &options, &mut |_| {})?.to_text(&TextOptions::default());
            super::write_output(Printed::Text(&text), output)?;
        }
        Format::Export(to) => {
            let window = Window::default();
            let output = output.map(Path::to_owned);
            let (rank, pid, of, categories) = (None, None, None, None);
            let export = Export {
                run: Some(run),
                to,
                output,
                partition: false,
                rank,
                pid,
                of,
                sources: false,
                so_far: true,
                categories,
                window,
            };
            super::export::export(&export)?;
            if to != ExportFormat::Json {
                return Ok(());
            }
        }
    }
    if let Some(path) = output {
        message::status(&format!("wrote {}", path.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_triggers_are_numbered() {
        assert_eq!(numbered(Path::new("a/now.pickle"), 3), Path::new("a/now-3.pickle"));
        assert_eq!(numbered(Path::new("x.Speedscope.JSON"), 1), Path::new("x-1.Speedscope.JSON"));
    }

    #[test]
    fn the_ending_selects_the_format() {
        let of = |name: &str| Format::of(Path::new(name)).unwrap();
        assert_eq!(of("a/now.pickle"), Format::Export(ExportFormat::Snapshot));
        assert_eq!(of("now.HTML"), Format::Export(ExportFormat::Html));
        assert_eq!(of("now.speedscope.json"), Format::Export(ExportFormat::Speedscope));
        assert_eq!(of("now.json"), Format::Export(ExportFormat::Json));
        assert_eq!(of("now.txt"), Format::Report);
        for bad in ["now", "now.gz", ".", "a.pickle/"] {
            let found = Format::of(Path::new(bad));
            assert_eq!(found.is_ok(), bad == "a.pickle/", "{bad}: {found:?}");
        }
    }
}
