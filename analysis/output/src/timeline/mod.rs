//! Bytes by category over time: what PyTorch's deprecated `export_memory_timeline` writes, and pictures.
//!
//! The curve is built in one pass. The recording is cut into slices of equally many events; of each slice the moment with most bytes is kept,
//! so that no peak is lost however few the points. With at most as many events as points every slice holds one, and nothing is left out. A
//! block's category is known when it ends: then it is added to the moments that it was alive at. Only the last slice's moment may still move;
//! what ended in that slice is held apart and forgotten when it does.

mod axes;
mod canvas;
pub(super) mod curve;
mod json;
pub(super) mod page;
mod picture;

use std::io::Write;
use std::path::Path;

use super::window::Window;
use memtrace_input::error::{Error, Result};
use memtrace_input::load::Process;
use memtrace_insight::passes::Story;
use memtrace_replay::Names;

use curve::CurveBuilder;

/// What to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimelineForm {
    /// `[times in microseconds, [0, bytes by PyTorch's categories]]`.
    Json,
    /// `[time in nanoseconds, action, bytes, category]` of every change, by PyTorch's numbers.
    RawJson,
    /// The same, compressed.
    RawJsonGz,
    /// A page with a picture in it.
    Html,
    /// A picture.
    Png,
}

impl TimelineForm {
    /// By the ending of the file's name.
    pub fn of(path: &Path) -> Option<TimelineForm> {
        let name = path.file_name()?.to_str()?;
        let forms = [
            (".raw.json.gz", TimelineForm::RawJsonGz),
            (".raw.json", TimelineForm::RawJson),
            (".json", TimelineForm::Json),
            (".html", TimelineForm::Html),
            (".png", TimelineForm::Png),
        ];
        forms.into_iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, form)| form)
    }

    /// Points at most: what a program reads may have more than what is seen.
    pub(super) const fn points(self) -> u64 {
        match self {
            TimelineForm::Json | TimelineForm::RawJson | TimelineForm::RawJsonGz | TimelineForm::Png => 100_000,
            TimelineForm::Html => 2_000,
        }
    }
}

/// Writes one device's timeline, as far as a window shows it. `progress` hears how many of the process's events have been read.
///
/// # Errors
///
/// The sink's.
pub fn timeline(
    process: &Process,
    window: &Window,
    device: i16,
    form: TimelineForm,
    out: impl Write,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let recording = process.recording();
    let mut builder = CurveBuilder::new(window, device, recording.event_count(), form.points());
    let names = Names::of(recording);
    Story::with(recording, process.survey(), &names, &mut builder, progress);
    let curve = builder.finish(&recording.calibration());
    let written = match form {
        TimelineForm::Json => json::coalesced(&curve, out),
        TimelineForm::RawJson => json::raw(&curve, out),
        TimelineForm::RawJsonGz => {
            let mut compressed = flate2::write::GzEncoder::new(out, flate2::Compression::default());
            json::raw(&curve, &mut compressed).and_then(|()| compressed.finish().map(drop))
        }
        TimelineForm::Html => page::html(&curve, &title(process, device), out),
        TimelineForm::Png => picture::png(&curve, &title(process, device), out),
    };
    written.map_err(Error::io("cannot write the timeline"))
}

/// `GPU 0, rank 3`.
pub(super) fn title(process: &Process, device: i16) -> String {
    let place = if device < 0 { "CPU tensors".to_owned() } else { format!("GPU {device}") };
    match process.rank() {
        Some(rank) => format!("{place}, rank {rank}"),
        None => format!("{place}, pid {}", process.pid()),
    }
}
