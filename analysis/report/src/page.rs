//! The common parts of the interactive pages: policy, style sheet, data of processes, and script (`web/`).
//!
//! Everything that a program can name is data: compressed, encoded as base64, and set as text by the script.

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::rules::CustomRules;
use memtrace_output::{PageDataOptions, RankSeries, SourceAccess, page_data, rank_totals};
use memtrace_summary::{Progress, is_library};
use sha2::{Digest, Sha256};

use crate::markup::Text;

/// The built script and style sheet. `scripts/web --check` proves that they are current.
const SCRIPT: &str = include_str!("../../../web/dist/report.js");
const STYLE: &str = include_str!("../../../web/dist/report.css");

/// The maximum number of processes whose data a page has.
pub(crate) const MAX_PROCESSES: usize = 8;
/// A page of at most this many events has every block. A larger one has the largest blocks, up to [`MAX_BLOCKS`].
const COMPLETE_EVENTS: u64 = 2_000_000;
const MAX_BLOCKS: u64 = 1_000_000;
/// A window of at most this many events has every block. A larger one has points and its largest blocks.
pub(crate) const COMPLETE_WINDOW: u64 = 1_000_000;
const MAX_WINDOW_BLOCKS: u64 = 500_000;
/// The width of the text for browsers without scripts, in columns.
pub(crate) const TEXT_WIDTH: usize = 100;

/// A process whose data a page has.
pub(crate) struct PageProcess<'a> {
    pub(crate) process: &'a Process,
    /// The events, by `seq`, at which all blocks are listed. Modules have the paths that they had at the first.
    pub(crate) marks: Vec<u64>,
    /// The source files that may be quoted.
    pub(crate) sources: SourceAccess,
    /// The rules that give the blocks their custom categories.
    pub(crate) custom_rules: Option<&'a CustomRules>,
}

/// The value of a policy that allows exactly this inline text.
fn hash(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

/// The resources that a page may load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loads {
    Nothing,
    /// Data from the server that it came from.
    OwnServer,
}

/// The content security policy of a page.
pub(crate) fn policy(loads: Loads) -> String {
    let connect = match loads {
        Loads::Nothing => "",
        Loads::OwnServer => "; connect-src 'self'",
    };
    let (script, style) = (hash(SCRIPT), hash(STYLE));
    format!("default-src 'none'; script-src {script}; style-src {style}{connect}; base-uri 'none'; form-action 'none'")
}

/// Writes everything before the data: the policy, the style sheet, and the text for browsers without scripts.
pub(crate) fn write_head(title: &str, text: &str, loads: Loads, out: &mut dyn Write) -> io::Result<()> {
    let head = maud::html! {
        (maud::DOCTYPE) "\n"
        (maud::PreEscaped("<html lang=\"en\"><head>"))
        meta charset="utf-8"; "\n"
        meta name="viewport" content="width=device-width, initial-scale=1"; "\n"
        meta http-equiv="Content-Security-Policy" content=(maud::PreEscaped(policy(loads))); "\n"
        title { (Text(title)) } "\n"
        style { (maud::PreEscaped(STYLE)) }
        (maud::PreEscaped("</head><body>\n"))
        div #app {
            noscript {
                pre #report {
                    @for line in text.lines() { (Text(line)) "\n" }
                }
            }
        } "\n"
    };
    out.write_all(head.into_string().as_bytes())
}

/// Writes an element with JSON: an object with these members, each of which is JSON.
pub(crate) fn write_json(id: &str, members: &[(&str, String)], out: &mut dyn Write) -> io::Result<()> {
    write!(out, "<script type=\"application/octet-stream\" id=\"{id}\">")?;
    let mut compressed = ZlibEncoder::new(EncoderWriter::new(&mut *out, &STANDARD), Compression::default());
    for (at, (name, json)) in members.iter().enumerate() {
        write!(compressed, "{}\"{name}\":{json}", if at == 0 { '{' } else { ',' })?;
    }
    compressed.write_all(b"}")?;
    compressed.finish()?.finish()?;
    out.write_all(b"</script>\n")
}

fn event_count(processes: &[PageProcess<'_>]) -> u64 {
    processes.iter().map(|one| one.process.recording().event_count()).sum()
}

/// Writes the sum of several devices' allocated bytes: those of all GPUs, or without any those of CPU tensors. Nothing
/// for a single device.
pub(crate) fn write_rank_totals(
    processes: &[PageProcess<'_>],
    device: Option<i16>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let shown: Vec<&Process> = processes.iter().map(|one| one.process).collect();
    let devices = |(number, process): (usize, &&Process)| {
        let devices = process.trace_index().sources.keys().filter(|one| device.is_none_or(|device| device == **one));
        devices.map(|device| RankSeries { process: number, device: *device }).collect::<Vec<_>>()
    };
    let mut series: Vec<RankSeries> = shown.iter().enumerate().flat_map(devices).collect();
    if series.iter().any(|one| one.device >= 0) {
        series.retain(|one| one.device >= 0);
    }
    if series.len() < 2 {
        return Ok(());
    }
    let total = event_count(processes);
    write!(out, "<script type=\"application/octet-stream\" id=\"rank-totals\">").map_err(cannot())?;
    let what = "adding up the ranks";
    let mut encoder = EncoderWriter::new(&mut *out, &STANDARD);
    let mut on_progress = |done| progress(Progress { what, done, total });
    rank_totals(&shown, &series, total <= COMPLETE_EVENTS, &mut encoder, &mut on_progress)?;
    encoder.finish().map_err(cannot())?;
    drop(encoder);
    out.write_all(b"</script>\n").map_err(cannot())
}

/// Writes the data of processes, numbered from 0.
pub(crate) fn write_processes(
    processes: &[PageProcess<'_>],
    device: Option<i16>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let events = event_count(processes);
    for (number, PageProcess { process, marks, sources, custom_rules }) in processes.iter().enumerate() {
        let total = process.recording().event_count();
        let share = |most: u64| (u128::from(most) * u128::from(total) / u128::from(events.max(1))) as u64;
        let data = PageDataOptions {
            device,
            max_blocks: (events > COMPLETE_EVENTS).then(|| share(MAX_BLOCKS)),
            marks,
            window: None,
            modules_at: marks.first().copied().unwrap_or(0),
            is_library: &|frame| is_library(&frame.filename),
            sources: sources.clone(),
            custom_rules: *custom_rules,
        };
        write!(out, "<script type=\"application/octet-stream\" id=\"process-{number}\">").map_err(cannot())?;
        let what = "writing the HTML page";
        let mut encoder = EncoderWriter::new(&mut *out, &STANDARD);
        page_data(process, &data, &mut encoder, &mut |done| progress(Progress { what, done, total }))?;
        encoder.finish().map_err(cannot())?;
        drop(encoder);
        out.write_all(b"</script>\n").map_err(cannot())?;
    }
    Ok(())
}

/// Writes the data of a part of a process: the events of a device from `first` to `last`, by `seq`.
pub(crate) fn write_window(
    PageProcess { process, marks, sources, custom_rules }: &PageProcess<'_>,
    device: i16,
    (first, last): (u64, u64),
    out: &mut dyn Write,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<()> {
    let total = process.recording().event_count();
    let data = PageDataOptions {
        device: Some(device),
        max_blocks: (last.saturating_sub(first) >= COMPLETE_WINDOW).then_some(MAX_WINDOW_BLOCKS),
        marks,
        window: Some((first, last)),
        modules_at: marks.first().copied().unwrap_or(0),
        is_library: &|frame| is_library(&frame.filename),
        sources: sources.clone(),
        custom_rules: *custom_rules,
    };
    page_data(process, &data, out, &mut |done| progress(Progress { what: "reading a window", done, total }))
}

/// Writes the script and the end of the page.
pub(crate) fn write_end(out: &mut dyn Write) -> io::Result<()> {
    write!(out, "<script>{SCRIPT}</script>\n</body></html>\n").and_then(|()| out.flush())
}

/// The error of a page that cannot be written.
pub(crate) fn cannot() -> impl FnOnce(io::Error) -> Error {
    Error::io("cannot write the page")
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_insight::passes::{Category, Phase};

    #[test]
    fn nothing_in_the_script_ends_its_element() {
        for text in [SCRIPT, STYLE] {
            assert!(!text.contains("</") && !text.contains("<!--"), "an inline script ends at its end tag");
        }
    }

    #[test]
    fn every_category_and_phase_has_a_color() {
        let names = Category::ALL.iter().map(|one| format!("--category-{}:", one.name()));
        let names = names.chain(Phase::ALL.iter().map(|one| format!("--phase-{}:", one.name())));
        names.for_each(|name| assert!(STYLE.contains(&name), "{name}"));
    }

    #[test]
    fn a_hash_is_that_of_the_browsers() {
        // The value that Chromium prints for an inline script with this text.
        assert_eq!(hash("alert(1)"), "'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='");
    }
}
